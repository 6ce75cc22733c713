//! The ABI of NVML.
//!
//! Enters: calls of libnvidia-ml as the program makes them through nvml-wrapper. Leaves: answers of the simulated devices, with the planted
//! faults in them; what a real device of the kind does not support is answered so. Nothing is set through NVML.
//!
//! A sample of a device begins where its SM clock is asked for, which is the first thing that the program asks for in each of its own.
//!
//! *Source* of names, layouts and codes: nvml.h of driver 580, as nvml-wrapper-sys 0.10 declares them.

pub mod reading;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::MaybeUninit;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use crate::device::{self, Device, LOST, MAX_DEVICES, USED_BYTES};
use crate::script::{Script, script};
use reading::Reading;

/// A device as callers hold it: its number plus one.
pub type Handle = *mut c_void;
/// Where a caller wants a value.
pub type Out<'a, T> = Option<&'a mut MaybeUninit<T>>;

/// Codes of `nvmlReturn_t` other than success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Status {
    Uninitialized = 1,
    InvalidArgument = 2,
    NotSupported = 3,
    NotFound = 6,
    InsufficientSize = 7,
    GpuIsLost = 15,
    ArgumentVersionMismatch = 25,
}

type Answer = Result<(), Status>;

/// `nvmlPciInfo_t`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct PciInfo {
    pub bus_id_legacy: [c_char; 16],
    pub domain: c_uint,
    pub bus: c_uint,
    pub device: c_uint,
    pub pci_device_id: c_uint,
    pub pci_subsystem_id: c_uint,
    pub bus_id: [c_char; 32],
}

/// `nvmlMemory_v2_t`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct MemoryV2 {
    pub version: c_uint,
    pub total: u64,
    pub reserved: u64,
    pub free: u64,
    /// Without what the driver reserves.
    pub used: u64,
}

/// `nvmlProcessInfo_v2_t`, which `_v3` of the calls takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ProcessInfo {
    pub pid: c_uint,
    pub used_bytes: u64,
    pub gpu_instance: c_uint,
    pub compute_instance: c_uint,
}

/// `nvmlViolationTime_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct ViolationTime {
    pub reference_us: u64,
    pub violation_ns: u64,
}

/// `nvmlGpuFabricInfo_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct FabricInfo {
    pub cluster_uuid: [u8; 16],
    pub status: c_uint,
    pub clique: c_uint,
    pub state: u8,
}

/// Of instances in [`ProcessInfo`] where there is no MIG.
const NO_INSTANCE: c_uint = c_uint::MAX;
/// Process numbers of others. *Source*: below Linux's highest, 4,194,304, and above what a machine in use reaches.
const FIRST_FOREIGN_PID: c_uint = 4_190_001;
/// `NVML_GPU_FABRIC_STATE_COMPLETED`.
const FABRIC_COMPLETED: u8 = 3;

/// `nvmlInit` without `nvmlShutdown`.
static OPENED: AtomicU32 = AtomicU32::new(0);
/// Samples taken of each device.
static SAMPLES: [AtomicU64; MAX_DEVICES] = [const { AtomicU64::new(0) }; MAX_DEVICES];

/// The script, once NVML is open.
fn opened() -> Result<&'static Script, Status> {
    if OPENED.load(Relaxed) == 0 { Err(Status::Uninitialized) } else { Ok(script()) }
}

/// A device that answers.
#[derive(Clone, Copy)]
struct Gpu {
    script: &'static Script,
    device: &'static Device,
    index: u32,
}

/// The device of a handle.
fn gpu(handle: Handle) -> Result<Gpu, Status> {
    let script = opened()?;
    let index = u32::try_from(handle.addr().wrapping_sub(1)).map_err(|_| Status::InvalidArgument)?;
    if index >= script.count {
        return Err(Status::InvalidArgument);
    }
    if LOST[index as usize].load(Relaxed) {
        return Err(Status::GpuIsLost);
    }
    Ok(Gpu { script, device: script.device, index })
}

fn handle(index: u32) -> Handle {
    std::ptr::without_provenance_mut(index as usize + 1)
}

impl Gpu {
    fn used(self) -> u64 {
        USED_BYTES[self.index as usize].load(Relaxed)
    }

    fn reading(self) -> Reading {
        let sample = SAMPLES[self.index as usize].load(Relaxed);
        Reading::of(self.script, self.index, sample, self.used() > 0)
    }

    fn memory(self) -> MemoryV2 {
        let (total, reserved) = (self.script.capacity(), device::RESERVED_BYTES);
        let free = device::free_bytes(self.script, self.index as usize);
        MemoryV2 { version: 0, total, reserved, free, used: total - reserved - free }
    }

    /// This process, if it has memory, and the others.
    fn processes(self) -> Vec<ProcessInfo> {
        let of = |pid, used_bytes| ProcessInfo {
            pid,
            used_bytes,
            gpu_instance: NO_INSTANCE,
            compute_instance: NO_INSTANCE,
        };
        let own = (self.used() > 0).then(|| of(std::process::id(), self.used()));
        let others = (0..self.script.foreign_processes)
            .map(|n| of(FIRST_FOREIGN_PID + n, device::FOREIGN_PROCESS_BYTES));
        own.into_iter().chain(others).collect()
    }

    /// Millijoules since the driver was loaded: the mean power of a busy device by the machine's clock, so that a difference over time is a
    /// power.
    fn energy(self) -> u64 {
        static STARTED: OnceLock<Instant> = OnceLock::new();
        let milliseconds =
            u64::try_from(STARTED.get_or_init(Instant::now).elapsed().as_millis()).unwrap_or(u64::MAX);
        let watts = u64::from(self.device.max_power_watts * reading::BUSY_POWER_PERCENT / 100);
        // As of a machine that has been up for a while.
        5_100_000_000 + watts.saturating_mul(milliseconds)
    }

    fn bus_id(self) -> String {
        format!("00000000:{:02X}:00.0", device::pci_bus(self.index))
    }

    fn uuid(self) -> String {
        let digits = format!("{:032x}", u128::from_be_bytes(device::uuid(self.index)));
        format!(
            "GPU-{}-{}-{}-{}-{}",
            &digits[..8],
            &digits[8..12],
            &digits[12..16],
            &digits[16..20],
            &digits[20..]
        )
    }

    /// This device, if it has links to others, MIG and a module's number: those here that have one of them have all.
    fn with_nvlink(self) -> Result<Self, Status> {
        if self.device.nvlink { Ok(self) } else { Err(Status::NotSupported) }
    }
}

/// A clock by `nvmlClockType_t`: graphics and SM are one. There is no video engine.
fn clock(kind: c_uint, sm: u32, memory: u32) -> Result<c_uint, Status> {
    match kind {
        0 | 1 => Ok(sm),
        2 => Ok(memory),
        3 => Err(Status::NotSupported),
        _ => Err(Status::InvalidArgument),
    }
}

fn put<T>(to: Out<'_, T>, value: T) -> Answer {
    to.ok_or(Status::InvalidArgument)?.write(value);
    Ok(())
}

/// Writes a text and its zero.
///
/// # Safety
///
/// The address is null or that of as many bytes.
unsafe fn put_text(to: *mut c_char, bytes: c_uint, text: &str) -> Answer {
    if to.is_null() {
        return Err(Status::InvalidArgument);
    }
    if text.len() >= bytes as usize {
        return Err(Status::InsufficientSize);
    }
    // SAFETY: the caller's bytes are more than the text's; nobody else has them while it waits.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, text.len());
        to.add(text.len()).write(0);
    }
    Ok(())
}

/// Writes a list as NVML does: with too little room only how much is needed.
///
/// # Safety
///
/// The address is null or that of as many values as the count says.
unsafe fn put_list<T: Copy>(count: Option<&mut c_uint>, to: *mut T, values: &[T]) -> Answer {
    let count = count.ok_or(Status::InvalidArgument)?;
    let room = *count as usize;
    *count = c_uint::try_from(values.len()).map_err(|_| Status::InvalidArgument)?;
    if values.is_empty() {
        return Ok(());
    }
    if room < values.len() {
        return Err(Status::InsufficientSize);
    }
    if to.is_null() {
        return Err(Status::InvalidArgument);
    }
    // SAFETY: the caller has room for that many.
    unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), to, values.len()) };
    Ok(())
}

/// The text that a caller passes.
///
/// # Safety
///
/// The address is null or that of a zero-terminated text, which is left alone while the caller waits.
unsafe fn text<'a>(from: *const c_char) -> Result<&'a str, Status> {
    if from.is_null() {
        return Err(Status::InvalidArgument);
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(from) }.to_str().map_err(|_| Status::InvalidArgument)
}

/// A text in a field of a structure, cut to its length.
fn field_text<const BYTES: usize>(text: &str) -> [c_char; BYTES] {
    let mut field = [0; BYTES];
    for (to, byte) in field.iter_mut().take(BYTES - 1).zip(text.bytes()) {
        *to = byte.cast_signed() as c_char;
    }
    field
}

/// Domain, bus and device of an address such as `00000000:1B:00.0`, `0000:1b:00.0` or `1b:00.0`.
fn pci_address(text: &str) -> Option<[u32; 3]> {
    let numbers: Option<Vec<u32>> =
        text.split('.').next()?.split(':').map(|part| u32::from_str_radix(part, 16).ok()).collect();
    match numbers?.as_slice() {
        [domain, bus, device] => Some([*domain, *bus, *device]),
        [bus, device] => Some([0, *bus, *device]),
        _ => None,
    }
}

/// The device that a condition holds for, if it is not lost.
fn find(to: Out<'_, Handle>, matches: impl Fn(Gpu) -> bool) -> Answer {
    let script = opened()?;
    let all = (0..script.count).map(|index| Gpu { script, device: script.device, index });
    let found = all.into_iter().find(|gpu| matches(*gpu)).ok_or(Status::NotFound)?;
    gpu(handle(found.index))?;
    put(to, handle(found.index))
}

/// Declares entry points, and lists them.
macro_rules! entry_points {
    ($(fn $name:ident($($argument:ident: $type:ty),*) $body:block)*) => {
        /// The names of all that answer with a code.
        pub const NAMES: &[&str] = &[$(stringify!($name)),*];
        $(
            /// As documented by NVML.
            ///
            /// # Safety
            ///
            /// Addresses are null or those of what NVML's documentation says.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($argument: $type),*) -> c_uint {
                $crate::calls::count!(stringify!($name));
                #[allow(unused_unsafe, reason = "most of them only write where the caller wants the answer")]
                // SAFETY: addresses are the caller's, as NVML's documentation says of each.
                let answer = move || -> Answer { unsafe { $body } };
                answer().map_or_else(|status| status as c_uint, |()| 0)
            }
        )*
    };
}

entry_points! {
    // Opening and closing.
    fn nvmlInit_v2() {
        OPENED.fetch_add(1, Relaxed);
        Ok(())
    }
    fn nvmlShutdown() {
        let closed = OPENED.fetch_update(Relaxed, Relaxed, |opened| opened.checked_sub(1));
        closed.map(|_| ()).map_err(|_| Status::Uninitialized)
    }

    // The system.
    fn nvmlSystemGetDriverVersion(version: *mut c_char, bytes: c_uint) {
        opened()?;
        put_text(version, bytes, device::DRIVER_VERSION)
    }
    fn nvmlSystemGetCudaDriverVersion_v2(version: Out<'_, c_int>) {
        opened()?;
        put(version, device::CUDA_VERSION)
    }

    // Which devices.
    fn nvmlDeviceGetCount_v2(count: Out<'_, c_uint>) { put(count, opened()?.count) }
    fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: Out<'_, Handle>) {
        let handle = handle(index);
        gpu(handle)?;
        put(device, handle)
    }
    fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, device: Out<'_, Handle>) {
        let uuid = text(uuid)?;
        find(device, |gpu| gpu.uuid().eq_ignore_ascii_case(uuid))
    }
    fn nvmlDeviceGetHandleByPciBusId_v2(bus_id: *const c_char, device: Out<'_, Handle>) {
        let wanted = pci_address(text(bus_id)?).ok_or(Status::InvalidArgument)?;
        find(device, |gpu| wanted == [0, device::pci_bus(gpu.index), 0])
    }
    fn nvmlDeviceGetIndex(device: Handle, index: Out<'_, c_uint>) { put(index, gpu(device)?.index) }
    fn nvmlDeviceGetModuleId(device: Handle, module: Out<'_, c_uint>) { put(module, gpu(device)?.with_nvlink()?.index + 1) }

    // What the device is.
    fn nvmlDeviceGetName(device: Handle, name: *mut c_char, bytes: c_uint) {
        let gpu = gpu(device)?;
        put_text(name, bytes, &gpu.device.name())
    }
    fn nvmlDeviceGetUUID(device: Handle, uuid: *mut c_char, bytes: c_uint) {
        let gpu = gpu(device)?;
        put_text(uuid, bytes, &gpu.uuid())
    }
    fn nvmlDeviceGetSerial(device: Handle, serial: *mut c_char, bytes: c_uint) {
        let gpu = gpu(device)?;
        put_text(serial, bytes, &format!("51d000000000{}", gpu.index))
    }
    fn nvmlDeviceGetBoardPartNumber(device: Handle, part: *mut c_char, bytes: c_uint) {
        gpu(device)?;
        put_text(part, bytes, "SIMULATED")
    }
    fn nvmlDeviceGetVbiosVersion(device: Handle, version: *mut c_char, bytes: c_uint) {
        gpu(device)?;
        put_text(version, bytes, "51.D0.00.00.00")
    }
    fn nvmlDeviceGetCudaComputeCapability(device: Handle, major: Out<'_, c_int>, minor: Out<'_, c_int>) {
        let capability = gpu(device)?.script.compute_capability();
        put(major, capability.0.cast_signed())?;
        put(minor, capability.1.cast_signed())
    }
    fn nvmlDeviceGetPciInfo_v3(device: Handle, pci: Out<'_, PciInfo>) {
        let gpu = gpu(device)?;
        let info = PciInfo {
            // The old form has four digits of domain.
            bus_id_legacy: field_text(&gpu.bus_id()[4..]),
            domain: 0,
            bus: device::pci_bus(gpu.index),
            device: 0,
            pci_device_id: gpu.device.pci_device_id << 16 | 0x10de,
            pci_subsystem_id: 0x51d0_10de,
            bus_id: field_text(&gpu.bus_id()),
        };
        put(pci, info)
    }
    fn nvmlDeviceGetMemoryBusWidth(device: Handle, bits: Out<'_, c_uint>) { put(bits, gpu(device)?.device.memory_bus_bits) }
    fn nvmlDeviceGetPersistenceMode(device: Handle, mode: Out<'_, c_uint>) { gpu(device).and_then(|_| put(mode, 1)) }
    fn nvmlDeviceGetMigMode(device: Handle, current: Out<'_, c_uint>, pending: Out<'_, c_uint>) {
        gpu(device)?.with_nvlink()?;
        put(current, 0)?;
        put(pending, 0)
    }
    fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device: Handle, _parent: Out<'_, Handle>) {
        gpu(device)?.with_nvlink()?;
        Err(Status::InvalidArgument)
    }

    // Memory, and rows of it that were replaced.
    fn nvmlDeviceGetMemoryInfo_v2(device: Handle, memory: Option<&mut MemoryV2>) {
        let now = gpu(device)?.memory();
        let memory = memory.ok_or(Status::InvalidArgument)?;
        let version = memory.version;
        if version as usize != size_of::<MemoryV2>() | 2 << 24 {
            return Err(Status::ArgumentVersionMismatch);
        }
        *memory = MemoryV2 { version, ..now };
        Ok(())
    }
    fn nvmlDeviceGetEccMode(device: Handle, current: Out<'_, c_uint>, pending: Out<'_, c_uint>) {
        gpu(device)?;
        put(current, 1)?;
        put(pending, 1)
    }
    fn nvmlDeviceGetRemappedRows(
        device: Handle,
        corrected: Out<'_, c_uint>,
        uncorrected: Out<'_, c_uint>,
        pending: Out<'_, c_uint>,
        failed: Out<'_, c_uint>
    ) {
        let rows = gpu(device)?.script.uncorrected_errors;
        put(corrected, 0)?;
        put(uncorrected, rows)?;
        put(pending, u32::from(rows > 0))?;
        put(failed, 0)
    }

    // Processes.
    fn nvmlDeviceGetComputeRunningProcesses_v3(device: Handle, count: Option<&mut c_uint>, processes: *mut ProcessInfo) {
        let running = gpu(device)?.processes();
        put_list(count, processes, &running)
    }
    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(device: Handle, count: Option<&mut c_uint>, processes: *mut ProcessInfo) {
        gpu(device)?;
        put_list(count, processes, &[])
    }

    // Clocks.
    fn nvmlDeviceGetClockInfo(device: Handle, kind: c_uint, mhz: Out<'_, c_uint>) {
        let gpu = gpu(device)?;
        if kind == 1 {
            SAMPLES[gpu.index as usize].fetch_add(1, Relaxed);
        }
        let reading = gpu.reading();
        put(mhz, clock(kind, reading.sm_clock_mhz, reading.memory_clock_mhz)?)
    }
    fn nvmlDeviceGetMaxClockInfo(device: Handle, kind: c_uint, mhz: Out<'_, c_uint>) {
        let device = gpu(device)?.device;
        put(mhz, clock(kind, device.max_sm_clock_mhz, device.memory_clock_mhz)?)
    }
    fn nvmlDeviceGetCurrentClocksThrottleReasons(device: Handle, reasons: Out<'_, u64>) { put(reasons, gpu(device)?.reading().reasons) }
    fn nvmlDeviceGetViolationStatus(device: Handle, policy: c_uint, time: Out<'_, ViolationTime>) {
        let gpu = gpu(device)?;
        // nvmlPerfPolicyType_t: power, thermal, synchronous boost, board limit, low utilisation, reliability, and sums of them.
        let violation_ns = match policy {
            1 | 10 => gpu.reading().thermal_violation_ns,
            0 | 2..=5 | 11 => 0,
            _ => return Err(Status::InvalidArgument),
        };
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        put(time, ViolationTime { reference_us: u64::try_from(now.as_micros()).unwrap_or_default(), violation_ns })
    }

    // Power and temperature.
    fn nvmlDeviceGetPowerUsage(device: Handle, milliwatts: Out<'_, c_uint>) { put(milliwatts, gpu(device)?.reading().power_milliwatts) }
    fn nvmlDeviceGetEnforcedPowerLimit(device: Handle, milliwatts: Out<'_, c_uint>) {
        put(milliwatts, gpu(device)?.device.max_power_watts * 1000)
    }
    fn nvmlDeviceGetTotalEnergyConsumption(device: Handle, millijoules: Out<'_, u64>) { put(millijoules, gpu(device)?.energy()) }
    fn nvmlDeviceGetTemperature(device: Handle, sensor: c_uint, celsius: Out<'_, c_uint>) {
        let gpu = gpu(device)?;
        // The chip's is the only sensor.
        if sensor != 0 {
            return Err(Status::InvalidArgument);
        }
        put(celsius, gpu.reading().temperature_celsius)
    }

    // The fabric.
    fn nvmlDeviceGetGpuFabricInfo(device: Handle, info: Out<'_, FabricInfo>) {
        if !gpu(device)?.device.fabric {
            return Err(Status::NotSupported);
        }
        // Within one machine a fabric has no number.
        put(info, FabricInfo { cluster_uuid: [0; 16], status: 0, clique: 0, state: FABRIC_COMPLETED })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_before_it_is_opened_and_with_no_address_are_refused_and_a_lost_device_says_so() {
        // SAFETY: addresses of values that live through each call, or null.
        unsafe {
            assert_eq!(nvmlDeviceGetIndex(handle(0), None), 1, "not opened");
            assert_eq!(nvmlShutdown(), 1, "not opened");
            assert_eq!(nvmlInit_v2(), 0);
            assert_eq!(nvmlDeviceGetIndex(handle(0), None), 2, "null");
            assert_eq!(nvmlDeviceGetIndex(handle(7), None), 2, "no such device");
            let mut short = [0; 5];
            assert_eq!(nvmlDeviceGetName(handle(0), short.as_mut_ptr(), 5), 7, "too short");

            // What the driver has allocated shows as this process's.
            USED_BYTES[0].store(3 << 30, Relaxed);
            let mut memory = MemoryV2 { version: 2 << 24 | 40, ..MemoryV2::default() };
            assert_eq!(nvmlDeviceGetMemoryInfo_v2(handle(0), Some(&mut memory)), 0);
            assert_eq!((memory.used, memory.total - memory.free - memory.reserved), (3 << 30, 3 << 30));
            memory.version = 1;
            assert_eq!(nvmlDeviceGetMemoryInfo_v2(handle(0), Some(&mut memory)), 25);
            let mut count = 0;
            assert_eq!(
                nvmlDeviceGetComputeRunningProcesses_v3(handle(0), Some(&mut count), std::ptr::null_mut()),
                7
            );
            let mut process = ProcessInfo::default();
            assert_eq!(
                nvmlDeviceGetComputeRunningProcesses_v3(handle(0), Some(&mut count), &raw mut process),
                0
            );
            assert_eq!((count, process.pid, process.used_bytes), (1, std::process::id(), 3 << 30));
            assert_eq!(gpu(handle(0)).unwrap().reading().reasons, 0, "a device in use is not idle");
            USED_BYTES[0].store(0, Relaxed);

            LOST[0].store(true, Relaxed);
            let mut index = MaybeUninit::uninit();
            assert_eq!(nvmlDeviceGetIndex(handle(0), Some(&mut index)), 15);
            LOST[0].store(false, Relaxed);
            assert_eq!(nvmlShutdown(), 0);
        }
    }

    #[test]
    fn addresses_on_the_bus_are_read_in_every_form() {
        for text in ["00000000:1B:00.0", "0000:1b:00.0", "1b:00.0"] {
            assert_eq!(pci_address(text), Some([0, 0x1b, 0]));
        }
        assert_eq!(pci_address("x:1b:00.0"), None);
    }
}
