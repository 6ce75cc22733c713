//! The GPU according to NVML.
//!
//! Enters: libnvidia-ml, loaded on first use. Leaves: [`GpuEnvironment`], throttle reasons, samples of clocks and
//! power. Without the library or the driver everything here is `None`. It sets nothing and holds no CUDA context.
//!
//! CUDA and NVML number GPUs differently: CUDA_VISIBLE_DEVICES hides and reorders, and CUDA by default puts the fastest first. A GPU is
//! therefore matched by CUDA's identity of it ([`CudaIdentity`]), and by its number only where CUDA gives none: [`select`] then
//! undoes CUDA_VISIBLE_DEVICES, the order cannot be undone, and [`GpuMatch::Number`] marks that.

mod board;

use std::fmt;

use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, PerformancePolicy, TemperatureSensor};
use nvml_wrapper::error::{Bits, NvmlError};
use nvml_wrapper::{Device, Nvml, cuda_driver_version_major, cuda_driver_version_minor};

use crate::machine::device::CudaIdentity;
use hbmark_core::result::{GpuEnvironment, GpuMatch};
use hbmark_core::units::Bytes;

/// How a GPU is named to NVML.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GpuSelector {
    Index(u32),
    /// `GPU-...` or `MIG-...`, in full or as many of its first letters as no other has.
    Uuid(String),
    /// `0000:65:00.0`.
    PciBusId(String),
}

/// The NVML identifiers of a CUDA device, the most specific first. A MIG device shows its own UUID, whose sixteen bytes do not say
/// that it is one.
pub fn selectors(identity: &CudaIdentity) -> Vec<(GpuSelector, GpuMatch)> {
    let uuids = identity.uuid.iter().flat_map(|bytes| ["GPU", "MIG"].map(|kind| uuid_text(kind, bytes)));
    let uuids = uuids.map(|uuid| (GpuSelector::Uuid(uuid), GpuMatch::Uuid));
    let pci = identity.pci_bus_id.iter().map(|id| (GpuSelector::PciBusId(id.clone()), GpuMatch::PciBusId));
    uuids.chain(pci).collect()
}

/// Sixteen bytes as NVML spells them: `GPU-` and hexadecimal digits in groups of 8, 4, 4, 4 and 12.
fn uuid_text(kind: &str, bytes: &[u8; 16]) -> String {
    let number = u128::from_be_bytes(*bytes);
    let digits = format!("{number:032x}");
    format!(
        "{kind}-{}-{}-{}-{}-{}",
        &digits[..8],
        &digits[8..12],
        &digits[12..16],
        &digits[16..20],
        &digits[20..]
    )
}

/// The GPU that CUDA calls `ordinal` under a value of CUDA_VISIBLE_DEVICES; `None` when that hides it.
pub fn select(visible_devices: Option<&str>, ordinal: u32) -> Option<GpuSelector> {
    let Some(visible) = visible_devices else { return Some(GpuSelector::Index(ordinal)) };
    // CUDA stops at the first entry that it does not understand.
    let mut entries = visible.split(',').map(str::trim).map_while(|entry| match entry.parse::<u32>() {
        Ok(index) => Some(GpuSelector::Index(index)),
        Err(_) if entry.starts_with("GPU-") || entry.starts_with("MIG-") => {
            Some(GpuSelector::Uuid(entry.to_owned()))
        }
        Err(_) => None,
    });
    entries.nth(ordinal as usize)
}

/// What holds the clocks down, as the bits of `nvmlDeviceGetCurrentClocksThrottleReasons`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ThrottleBits(pub u64);

/// One throttle reason. Its text is what reports carry, and [`Throttle::parse`] reads it back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Throttle {
    GpuIdle,
    ApplicationClocks,
    SwPowerCap,
    HwSlowdown,
    SyncBoost,
    SwThermal,
    HwThermal,
    HwPowerBrake,
    DisplayClocks,
    /// The thermal violation counter advanced, although no sample caught the bit.
    ThermalViolation,
    /// The board-limit violation counter advanced.
    BoardLimit,
    /// A bit that this program does not know.
    Unknown(u64),
}

/// Bits and names. Source: nvml.h, nvmlClocksEventReasons; named without their `nvmlClocks...Reason` prefix.
const REASONS: [(u64, Throttle, &str); 11] = [
    (0x1, Throttle::GpuIdle, "gpu_idle"),
    (0x2, Throttle::ApplicationClocks, "application_clocks"),
    (0x4, Throttle::SwPowerCap, "sw_power_cap"),
    (0x8, Throttle::HwSlowdown, "hw_slowdown"),
    (0x10, Throttle::SyncBoost, "sync_boost"),
    (0x20, Throttle::SwThermal, "sw_thermal"),
    (0x40, Throttle::HwThermal, "hw_thermal"),
    (0x80, Throttle::HwPowerBrake, "hw_power_brake"),
    (0x100, Throttle::DisplayClocks, "display_clocks"),
    (0, Throttle::ThermalViolation, "thermal_violation"),
    (0, Throttle::BoardLimit, "board_limit"),
];

impl ThrottleBits {
    /// Every set bit as a reason, the unknown ones last.
    pub fn reasons(self) -> Vec<Throttle> {
        let known = REASONS.iter().filter(|(bit, ..)| self.0 & bit != 0).map(|(_, reason, _)| *reason);
        let mask = REASONS.iter().fold(0, |mask, (bit, ..)| mask | bit);
        let unknown = (0..u64::BITS).map(|shift| 1 << shift).filter(|bit| self.0 & !mask & bit != 0);
        known.chain(unknown.map(Throttle::Unknown)).collect()
    }
}

impl Throttle {
    /// Reads what `Display` wrote.
    pub fn parse(text: &str) -> Option<Self> {
        if let Some(bit) = text.strip_prefix("unknown_0x") {
            return u64::from_str_radix(bit, 16).ok().map(Self::Unknown);
        }
        REASONS.iter().find(|(_, _, name)| *name == text).map(|(_, reason, _)| *reason)
    }
}

impl fmt::Display for Throttle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Self::Unknown(bit) = self {
            return write!(f, "unknown_0x{bit:x}");
        }
        let name =
            REASONS.iter().find(|(_, reason, _)| reason == self).map_or("unknown", |(_, _, name)| name);
        f.write_str(name)
    }
}

/// One look at a GPU.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GpuSample {
    pub sm_clock_mhz: Option<u32>,
    pub memory_clock_mhz: Option<u32>,
    pub power_watts: Option<f64>,
    pub temperature_celsius: Option<f64>,
    pub throttle: Option<ThrottleBits>,
    /// Millijoules since the driver was loaded.
    pub energy_millijoules: Option<u64>,
    /// Nanoseconds spent held down, by cause, since the driver was loaded.
    pub thermal_violation: Option<u64>,
    pub power_violation: Option<u64>,
    pub board_violation: Option<u64>,
    /// Processes with a context on the GPU, this one among them where NVML sees it.
    pub processes: Option<usize>,
}

/// An open NVML and the GPU it is asked about.
#[derive(Debug)]
pub struct Gpu {
    nvml: Nvml,
    /// Of the whole GPU, whose clocks, power and temperature its slices share.
    index: u32,
    /// The UUID of the slice that CUDA shows, where the GPU is divided (MIG): it has memory and processes of its own.
    slice: Option<String>,
    matched_by: GpuMatch,
}

impl Gpu {
    /// Opens the GPU that `matched_by` found; `None` without library, driver or such a GPU.
    fn open(selector: &GpuSelector, matched_by: GpuMatch) -> Option<Self> {
        Self::find(open_library()?, selector, matched_by)
    }

    fn find(nvml: Nvml, selector: &GpuSelector, matched_by: GpuMatch) -> Option<Self> {
        let device = match selector {
            GpuSelector::Index(index) => nvml.device_by_index(*index).ok(),
            GpuSelector::Uuid(uuid) => device_by_uuid(&nvml, uuid),
            GpuSelector::PciBusId(id) => nvml.device_by_pci_bus_id(id.as_str()).ok(),
        }?;
        let (index, slice) = match device.mig_parent_device() {
            Ok(parent) => (parent.index().ok()?, Some(device.uuid().ok()?)),
            Err(_) => (device.index().ok()?, None),
        };
        Some(Self { nvml, index, slice, matched_by })
    }

    /// The GPU that CUDA calls by this ordinal in this process.
    pub fn of_cuda_ordinal(ordinal: u32) -> Option<Self> {
        let identity = CudaIdentity::of_ordinal(ordinal);
        let sure = selectors(&identity).iter().find_map(|(selector, by)| Self::open(selector, *by));
        sure.or_else(|| {
            let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
            Self::open(&select(visible.as_deref(), ordinal)?, GpuMatch::Number)
        })
    }

    /// The whole GPU.
    fn device(&self) -> Option<Device<'_>> {
        self.nvml.device_by_index(self.index).ok()
    }

    /// What CUDA shows of it.
    fn shown(&self) -> Option<Device<'_>> {
        let Some(uuid) = &self.slice else { return self.device() };
        self.nvml.device_by_uuid(uuid.as_str()).ok()
    }

    /// Energy spent since the driver was loaded; of a slice nobody counts it.
    pub fn energy_millijoules(&self) -> Option<u64> {
        self.whole()?.total_energy_consumption().ok()
    }

    /// The device, where it is not divided: its energy and power are those of all slices.
    fn whole(&self) -> Option<Device<'_>> {
        self.device().filter(|_| self.slice.is_none())
    }

    /// Energy, clocks, power, temperature and other counters now, in this order.
    pub fn sample(&self) -> GpuSample {
        let Some(device) = self.device() else { return GpuSample::default() };
        let violation =
            |policy| device.violation_status(policy).ok().map(|violation| violation.violation_time);
        GpuSample {
            energy_millijoules: self.energy_millijoules(),
            sm_clock_mhz: device.clock_info(Clock::SM).ok(),
            memory_clock_mhz: device.clock_info(Clock::Memory).ok(),
            power_watts: self.whole().and_then(|device| device.power_usage().ok()).map(watts),
            temperature_celsius: device.temperature(TemperatureSensor::Gpu).ok().map(f64::from),
            throttle: throttle_bits(&device),
            thermal_violation: violation(PerformancePolicy::Thermal),
            power_violation: violation(PerformancePolicy::Power),
            board_violation: violation(PerformancePolicy::BoardLimit),
            processes: self
                .shown()
                .and_then(|shown| shown.running_compute_processes().ok())
                .map(|processes| processes.len()),
        }
    }

    /// Everything a report keeps of the GPU.
    pub fn describe(&self) -> Option<GpuEnvironment> {
        let (device, shown) = (self.device()?, self.shown()?);
        let sample = self.sample();
        let memory = shown.memory_info().ok();
        let cuda = self.nvml.sys_cuda_driver_version().ok();
        let capability = device.cuda_compute_capability().ok();
        let reasons = sample.throttle.unwrap_or_default().reasons();
        Some(GpuEnvironment {
            index: self.index,
            matched_by: Some(self.matched_by),
            name: device.name().ok(),
            uuid: shown.uuid().ok(),
            driver: self.nvml.sys_driver_version().ok(),
            cuda_driver: cuda
                .map(|v| format!("{}.{}", cuda_driver_version_major(v), cuda_driver_version_minor(v))),
            compute_capability: capability.map(|c| format!("{}.{}", c.major, c.minor)),
            memory_bytes: memory.as_ref().map(|memory| Bytes(memory.total)),
            memory_used_bytes: memory.as_ref().map(|memory| Bytes(memory.used)),
            memory_bus_width_bits: device.memory_bus_width().ok(),
            max_memory_clock_mhz: device.max_clock_info(Clock::Memory).ok(),
            max_sm_clock_mhz: device.max_clock_info(Clock::SM).ok(),
            sm_clock_mhz: sample.sm_clock_mhz,
            memory_clock_mhz: sample.memory_clock_mhz,
            power_limit_watts: device.enforced_power_limit().ok().map(watts),
            temperature_celsius: sample.temperature_celsius,
            throttle_reasons: reasons.iter().map(ToString::to_string).collect(),
            ecc: device.is_ecc_enabled().ok().map(|ecc| ecc.currently_enabled),
            mig: device.mig_mode().ok().map(|mode| mode.current == 1),
            persistence: device.is_in_persistent_mode().ok(),
            mps: device.mps_running_compute_processes().ok().map(|processes| !processes.is_empty()),
            other_processes: other_processes(&shown),
            board: Some(board::describe(&self.nvml, &device)),
        })
    }

    /// Free memory of the GPU.
    pub fn free_memory(&self) -> Option<Bytes> {
        self.shown()?.memory_info().ok().map(|memory| Bytes(memory.free))
    }
}

/// The GPU that CUDA calls by this ordinal, described.
pub fn describe(ordinal: u32) -> Option<GpuEnvironment> {
    Gpu::of_cuda_ordinal(ordinal)?.describe()
}

/// Free memory of the GPU that CUDA calls by this ordinal.
pub fn free_memory(ordinal: u32) -> Option<Bytes> {
    Gpu::of_cuda_ordinal(ordinal)?.free_memory()
}

/// The GPUs that CUDA would see in this process, by NVML's number and UUID: CUDA_VISIBLE_DEVICES hides and reorders. `None` without
/// library or driver.
pub fn visible_gpus() -> Option<Vec<(u32, String)>> {
    let count = gpu_count()?;
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let each = (0..count).map_while(|ordinal| select(visible.as_deref(), ordinal));
    let gpus = each.map_while(|selector| {
        let gpu = Gpu::open(&selector, GpuMatch::Uuid)?;
        Some((gpu.index, gpu.shown()?.uuid().ok()?))
    });
    Some(gpus.collect())
}

/// GPUs that NVML sees; `None` without library or driver.
pub fn gpu_count() -> Option<u32> {
    open_library()?.device_count().ok()
}

fn open_library() -> Option<Nvml> {
    // Hosts without the developer package have only the versioned name.
    Nvml::init().or_else(|_| Nvml::builder().lib_path("libnvidia-ml.so.1".as_ref()).init()).ok()
}

/// The GPU or slice of a UUID, or the only one whose UUID begins so, as CUDA_VISIBLE_DEVICES may name it.
fn device_by_uuid<'nvml>(nvml: &'nvml Nvml, uuid: &str) -> Option<Device<'nvml>> {
    if let Ok(device) = nvml.device_by_uuid(uuid) {
        return Some(device);
    }
    let gpus = (0..nvml.device_count().ok()?).filter_map(|index| nvml.device_by_index(index).ok());
    let with_slices = gpus.flat_map(|gpu| {
        let places = 0..gpu.mig_device_count().unwrap_or(0);
        let slices: Vec<_> = places.filter_map(|place| gpu.mig_device_by_index(place).ok()).collect();
        std::iter::once(gpu).chain(slices)
    });
    let mut found = with_slices.filter(|device| device.uuid().is_ok_and(|full| full.starts_with(uuid)));
    let first = found.next()?;
    found.next().is_none().then_some(first)
}

fn throttle_bits(device: &Device<'_>) -> Option<ThrottleBits> {
    match device.current_throttle_reasons_strict() {
        Ok(reasons) => Some(ThrottleBits(reasons.bits())),
        // The strict call is the one that does not swallow bits newer than the wrapper.
        Err(NvmlError::IncorrectBits(Bits::U64(bits))) => Some(ThrottleBits(bits)),
        Err(_) => device
            .current_throttle_reasons()
            .ok()
            .map(|reasons: ThrottleReasons| ThrottleBits(reasons.bits())),
    }
}

/// Processes that are not this one. In a container NVML gives host numbers or nothing, so this is a hint and no proof.
fn other_processes(device: &Device<'_>) -> Option<usize> {
    let processes = device.running_compute_processes().ok()?;
    Some(processes.iter().filter(|process| process.pid != std::process::id()).count())
}

fn watts(milliwatts: u32) -> f64 {
    f64::from(milliwatts) / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_devices_hide_and_reorder() {
        assert_eq!(select(None, 2), Some(GpuSelector::Index(2)));
        assert_eq!(select(Some("3, 1"), 1), Some(GpuSelector::Index(1)));
        assert_eq!(select(Some("3,1"), 2), None);
        assert_eq!(select(Some(""), 0), None);
        assert_eq!(select(Some("GPU-ab,0"), 0), Some(GpuSelector::Uuid("GPU-ab".to_owned())));
        assert_eq!(select(Some("0,-1,2"), 1), None, "what follows an invalid entry is hidden");
    }

    #[test]
    fn sixteen_bytes_are_spelled_as_nvml_does() {
        let bytes: [u8; 16] = std::array::from_fn(|i| 0x0f + 0x10 * u8::try_from(i).unwrap());
        assert_eq!(uuid_text("GPU", &bytes), "GPU-0f1f2f3f-4f5f-6f7f-8f9f-afbfcfdfefff");
        assert_eq!(uuid_text("MIG", &[0; 16]), "MIG-00000000-0000-0000-0000-000000000000");
    }

    #[test]
    fn a_gpu_is_looked_up_by_uuid_then_as_a_mig_device_then_on_the_bus() {
        let bus = "0000:65:00.0".to_owned();
        let identity = CudaIdentity { uuid: Some([0xab; 16]), pci_bus_id: Some(bus.clone()) };
        let digits = "abababab-abab-abab-abab-abababababab";
        let wanted = [
            (GpuSelector::Uuid(format!("GPU-{digits}")), GpuMatch::Uuid),
            (GpuSelector::Uuid(format!("MIG-{digits}")), GpuMatch::Uuid),
            (GpuSelector::PciBusId(bus), GpuMatch::PciBusId),
        ];
        assert_eq!(selectors(&identity), wanted);
        assert!(selectors(&CudaIdentity::default()).is_empty());
    }

    #[test]
    fn throttle_bits_become_names_and_read_back() {
        let reasons = ThrottleBits(0x4 | 0x40 | 0x4000).reasons();
        assert_eq!(reasons, [Throttle::SwPowerCap, Throttle::HwThermal, Throttle::Unknown(0x4000)]);
        let names: Vec<String> = reasons.iter().map(ToString::to_string).collect();
        assert_eq!(names, ["sw_power_cap", "hw_thermal", "unknown_0x4000"]);
        assert_eq!(names.iter().filter_map(|name| Throttle::parse(name)).collect::<Vec<_>>(), reasons);
        assert!(ThrottleBits(0).reasons().is_empty());
    }

    #[test]
    fn the_bits_are_those_of_the_nvml_header() {
        let all = ThrottleReasons::all().bits();
        assert!(ThrottleBits(all).reasons().iter().all(|reason| !matches!(reason, Throttle::Unknown(_))));
        let thermal = ThrottleBits(ThrottleReasons::HW_THERMAL_SLOWDOWN.bits()).reasons();
        assert_eq!(thermal, [Throttle::HwThermal]);
    }

    #[test]
    fn a_machine_without_such_a_gpu_answers_none() {
        assert!(Gpu::open(&GpuSelector::Index(u32::MAX), GpuMatch::Number).is_none());
        assert!(Gpu::open(&GpuSelector::Uuid("GPU-none".to_owned()), GpuMatch::Uuid).is_none());
    }

    /// Two GPUs, 0 divided into two slices. A device is its number plus one, a slice 11 or 12.
    const DIVIDED: &str = r#"
        #include <stdio.h>
        typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory;
        static const char *uuids[] = {"GPU-89aa", "GPU-89bb", "MIG-11aa", "MIG-11bb"};
        static const char *uuid(long d) { return uuids[d > 10 ? d - 9 : d - 1]; }
        int nvmlInit_v2(void) { return 0; }
        int nvmlShutdown(void) { return 0; }
        int nvmlDeviceGetCount_v2(unsigned *count) { return *count = 2, 0; }
        int nvmlDeviceGetHandleByIndex_v2(unsigned index, long *d) { return *d = index + 1, index > 1 ? 2 : 0; }
        int nvmlDeviceGetHandleByUUID(const char *wanted, long *d) {
            for (*d = 1; *d < 13; *d += *d == 2 ? 9 : 1) {
                const char *a = uuid(*d), *b = wanted;
                while (*a && *a == *b) a++, b++;
                if (!*a && !*b) return 0;
            }
            return 6;
        }
        int nvmlDeviceGetUUID(long d, char *text, unsigned room) { return snprintf(text, room, "%s", uuid(d)), 0; }
        int nvmlDeviceGetIndex(long d, unsigned *index) { return *index = d - 1, d > 10 ? 2 : 0; }
        int nvmlDeviceGetMaxMigDeviceCount(long d, unsigned *count) { return *count = d == 1 ? 7 : 0, 0; }
        int nvmlDeviceGetMigDeviceHandleByIndex(long d, unsigned index, long *slice) { return *slice = 11 + index, index > 1 ? 6 : 0; }
        int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(long d, long *parent) { return *parent = 1, d > 10 ? 0 : 2; }
        int nvmlDeviceGetMemoryInfo_v2(long d, memory *m) { return m->total = m->free = d * 1000, 0; }
        int nvmlDeviceGetPowerUsage(long d, unsigned *milliwatts) { return *milliwatts = d * 1000, d > 10 ? 3 : 0; }
    "#;

    /// A GPU of those, as a value of CUDA_VISIBLE_DEVICES names it.
    fn divided(folder: &std::path::Path, visible: &str) -> Option<Gpu> {
        let (source, library) = (folder.join("nvml.c"), folder.join("nvml.so"));
        if !library.exists() {
            std::fs::write(&source, DIVIDED).unwrap();
            let compile = ["-shared", "-fPIC", "-w", "-o"];
            let compiled = std::process::Command::new("cc").args(compile).arg(&library).arg(&source).status();
            assert!(compiled.unwrap().success());
        }
        let nvml = Nvml::builder().lib_path(library.as_os_str()).init().unwrap();
        Gpu::find(nvml, &select(Some(visible), 0)?, GpuMatch::Uuid)
    }

    #[test]
    fn a_slice_has_its_own_memory_and_uuid_and_not_the_power_of_its_gpu() {
        let folder = tempfile::tempdir().unwrap();
        let slice = divided(folder.path(), "MIG-11bb").unwrap();
        let described = slice.describe().unwrap();
        assert_eq!((described.index, described.uuid.as_deref()), (0, Some("MIG-11bb")));
        assert_eq!((described.memory_bytes, slice.free_memory()), (Some(Bytes(12_000)), Some(Bytes(12_000))));
        assert_eq!((slice.sample().power_watts, slice.energy_millijoules()), (None, None));
        let whole = divided(folder.path(), "1").unwrap();
        let described = whole.describe().unwrap();
        assert_eq!((described.index, described.uuid.as_deref()), (1, Some("GPU-89bb")));
        assert_eq!((described.memory_bytes, whole.sample().power_watts), (Some(Bytes(2_000)), Some(2.0)));
    }

    #[test]
    fn a_uuid_may_be_abbreviated_where_one_device_alone_begins_so() {
        let folder = tempfile::tempdir().unwrap();
        let uuid = |visible: &str| divided(folder.path(), visible)?.describe()?.uuid;
        assert_eq!(uuid("GPU-89b").as_deref(), Some("GPU-89bb"));
        assert_eq!(uuid("MIG-11a").as_deref(), Some("MIG-11aa"));
        for none in ["GPU-89", "MIG-1", "GPU-7"] {
            assert_eq!(uuid(none), None, "{none}");
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn a_real_gpu_tells_its_name_memory_and_throttle_bits() {
        let gpu = Gpu::of_cuda_ordinal(0).expect("no NVIDIA GPU that NVML can open");
        let described = gpu.describe().unwrap();
        assert!(described.name.is_some() && described.driver.is_some() && described.memory_bytes.is_some());
        assert!(gpu.sample().throttle.is_some());
        let by_uuid = Gpu::open(&GpuSelector::Uuid(described.uuid.unwrap()), GpuMatch::Uuid).unwrap();
        assert_eq!(by_uuid.index, described.index);
        if cfg!(feature = "cuda") {
            assert_eq!(described.matched_by, Some(GpuMatch::Uuid));
        }
    }
}
