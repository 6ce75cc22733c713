//! NVML as the program uses it: through nvml-wrapper, which opens the library that is built here by its system name.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, PerformancePolicy, TemperatureSensor};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use simulated_cuda::script::VARIABLE;

/// Set in the process that runs a test's body.
const INSIDE: &str = "HBMARK_SIMULATED_CUDA_TEST";

/// The library that cargo builds beside the tests.
fn library() -> PathBuf {
    let path = std::env::current_exe().unwrap().with_file_name("libsimulated_cuda.so");
    assert!(path.exists(), "{} is not built", path.display());
    path
}

/// Runs a test of this file again, in a process that finds the library as the system's NVML and reads this script.
fn run(test: &str, script: &str) -> Output {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test);
    std::fs::create_dir_all(&folder).unwrap();
    let link = folder.join("libnvidia-ml.so.1");
    let _ = std::fs::remove_file(&link);
    std::os::unix::fs::symlink(library(), link).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env("LD_LIBRARY_PATH", folder);
    command.env(VARIABLE, script).env(INSIDE, "1").output().unwrap()
}

/// Runs the body of a test under a script.
fn under(script: &str, test: &str, body: impl FnOnce(&Nvml)) {
    if std::env::var_os(INSIDE).is_some() {
        return body(&Nvml::init().unwrap());
    }
    let output = run(test, script);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{test} is not a test's name");
}

/// One sample in the order that the program asks in: clock, reasons, nanoseconds of the thermal counter.
fn sample(device: &Device<'_>) -> (u32, ThrottleReasons, u64) {
    (
        device.clock_info(Clock::SM).unwrap(),
        device.current_throttle_reasons_strict().unwrap(),
        device.violation_status(PerformancePolicy::Thermal).unwrap().violation_time,
    )
}

#[test]
fn every_entry_point_is_exported() {
    // SAFETY: the library's initialisation does nothing, and no symbol is called.
    let library = unsafe { libloading::Library::new(library()) }.unwrap();
    for name in simulated_cuda::nvml::NAMES {
        // SAFETY: as above.
        assert!(unsafe { library.get::<*const ()>(name.as_bytes()) }.is_ok(), "{name}");
    }
}

#[test]
fn a_device_answers_everything_that_the_program_asks() {
    under("count=2", "a_device_answers_everything_that_the_program_asks", |nvml| {
        assert_eq!(nvml.device_count().unwrap(), 2);
        assert_eq!(nvml.sys_driver_version().unwrap(), "580.00 (simulated)");
        assert_eq!(nvml.sys_cuda_driver_version().unwrap(), 13_000);
        let device = nvml.device_by_index(1).unwrap();
        assert_eq!(device.name().unwrap(), "SIMULATED DEVICE (NVIDIA H200)");
        assert_eq!(device.uuid().unwrap(), "GPU-51d00000-0000-0000-0000-000000000001");
        let capability = device.cuda_compute_capability().unwrap();
        assert_eq!((capability.major, capability.minor), (9, 0));
        let memory = device.memory_info().unwrap();
        assert_eq!((memory.total, memory.used), (151_397_597_184, 0));
        assert_eq!(memory.free + memory.reserved, memory.total);
        assert_eq!(device.memory_bus_width().unwrap(), 6144);
        assert_eq!(device.max_clock_info(Clock::Memory).unwrap(), 3201);
        assert_eq!(device.max_clock_info(Clock::SM).unwrap(), 1980);
        assert_eq!(device.enforced_power_limit().unwrap(), 700_000);
        assert!(
            device.power_usage().unwrap() >= 76_000
                && device.temperature(TemperatureSensor::Gpu).unwrap() > 20
        );
        assert!(
            device.is_ecc_enabled().unwrap().currently_enabled && device.is_in_persistent_mode().unwrap()
        );
        assert_eq!(device.mig_mode().unwrap().current, 0);
        assert!(device.mps_running_compute_processes().unwrap().is_empty());
        assert!(device.running_compute_processes().unwrap().is_empty());
        for policy in [PerformancePolicy::Power, PerformancePolicy::BoardLimit] {
            assert_eq!(device.violation_status(policy).unwrap().violation_time, 0);
        }
        // Nothing is allocated: the device is idle.
        assert_eq!(sample(&device), (345, ThrottleReasons::GPU_IDLE, 0));
        let energy = device.total_energy_consumption().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(5));
        assert!(device.total_energy_consumption().unwrap() > energy);

        let pci = device.pci_info().unwrap();
        assert_eq!((pci.bus_id.as_str(), pci.pci_device_id), ("00000000:2B:00.0", 0x2335_10de));
        assert_eq!(device.vbios_version().unwrap(), "51.D0.00.00.00");
        assert_eq!(device.board_part_number().unwrap(), "SIMULATED");
        assert_eq!(device.serial().unwrap(), "51d0000000001");
        assert!(matches!(device.mig_parent_device(), Err(NvmlError::InvalidArg)));

        // Every way to the same device.
        let found = [
            nvml.device_by_uuid(device.uuid().unwrap()),
            nvml.device_by_pci_bus_id(pci.bus_id),
            nvml.device_by_pci_bus_id("0000:2b:00.0"),
        ];
        assert!(found.into_iter().all(|found| found.unwrap().index().unwrap() == 1));
        assert!(matches!(
            nvml.device_by_uuid("MIG-51d00000-0000-0000-0000-000000000001"),
            Err(NvmlError::NotFound)
        ));
        assert!(matches!(nvml.device_by_index(2), Err(NvmlError::InvalidArg)));

        // The calls that the program makes past the wrapper.
        let (mut module, mut rows) = (0, [9; 4]);
        let [corrected, uncorrected, pending, failed] = rows.each_mut().map(|row| &raw mut *row);
        let mut fabric = std::mem::MaybeUninit::zeroed();
        let lib = nvml.lib();
        // SAFETY: an open device and addresses of the values that each call writes.
        let (answers, fabric) = unsafe {
            let handle = device.handle();
            let answers = [
                lib.nvmlDeviceGetModuleId(handle, &raw mut module),
                lib.nvmlDeviceGetRemappedRows(handle, corrected, uncorrected, pending, failed),
                lib.nvmlDeviceGetGpuFabricInfo(handle, fabric.as_mut_ptr()),
            ];
            (answers, fabric.assume_init())
        };
        assert_eq!((answers, module, rows, fabric.state), ([0; 3], 2, [0; 4], 3));
    });
}

#[test]
fn planted_faults_show() {
    let script = "thermal=3+2,clock=7+1,ecc=3,foreign-process=1,busy-memory=20GiB,device=l40s,compute=8.0";
    under(script, "planted_faults_show", |nvml| {
        let device = nvml.device_by_index(0).unwrap();
        assert_eq!(device.name().unwrap(), "SIMULATED DEVICE (NVIDIA L40S)");
        assert_eq!(device.cuda_compute_capability().unwrap().minor, 0);
        let samples: Vec<_> = (1..=8).map(|_| sample(&device)).collect();
        let thermal = ThrottleReasons::HW_THERMAL_SLOWDOWN
            | ThrottleReasons::SW_THERMAL_SLOWDOWN
            | ThrottleReasons::HW_SLOWDOWN;
        let hot: Vec<bool> = samples.iter().map(|(_, reasons, _)| reasons.contains(thermal)).collect();
        assert_eq!(hot, [false, false, true, true, false, false, false, false]);
        let advanced: Vec<bool> = samples.windows(2).map(|pair| pair[1].2 > pair[0].2).collect();
        assert_eq!(advanced, [false, true, true, false, false, false, false]);

        let processes = device.running_compute_processes().unwrap();
        assert_eq!(processes.iter().map(|process| process.pid).collect::<Vec<_>>(), [4_190_001]);
        assert_eq!(device.memory_info().unwrap().used, 22 << 30);
        // What this product has not.
        assert!(matches!(device.mig_mode(), Err(NvmlError::NotSupported)));
        let (mut rows, lib) = ([9; 4], nvml.lib());
        let [corrected, uncorrected, pending, failed] = rows.each_mut().map(|row| &raw mut *row);
        // SAFETY: an open device and addresses of four numbers.
        unsafe { lib.nvmlDeviceGetRemappedRows(device.handle(), corrected, uncorrected, pending, failed) };
        assert_eq!(rows, [0, 3, 1, 0]);
    });
}

#[test]
fn a_script_that_cannot_be_read_ends_the_process() {
    let test = "a_script_that_cannot_be_read_ends_the_process";
    if std::env::var_os(INSIDE).is_some() {
        let _ = Nvml::init().unwrap().device_count();
        return;
    }
    let output = run(test, "device=h200,thermal=hot");
    assert_eq!(output.status.code(), Some(2));
    let wanted =
        "HBMARK_SIMULATED_CUDA: `thermal=hot`: wanted a sample, or a sample and how many, such as 50+8";
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains(wanted), "{said}");
}
