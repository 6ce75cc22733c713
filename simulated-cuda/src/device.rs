//! The devices that can be simulated, as data.
//!
//! Enters: data sheets. Leaves: [`Device`], what the driver and NVML say of it, and what all parts of the simulation share of each device:
//! bytes in use, whether it is lost.

use std::ffi::c_int;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use crate::script::Script;

/// The most devices of one machine. *Source*: an HGX board has 8.
pub const MAX_DEVICES: usize = 8;

/// Bytes that this process has allocated on each device. The driver adds and subtracts, NVML reports.
pub static USED_BYTES: [AtomicU64; MAX_DEVICES] = [const { AtomicU64::new(0) }; MAX_DEVICES];

/// Devices that have fallen off the bus. The driver sets it, every call of NVML obeys it.
pub static LOST: [AtomicBool; MAX_DEVICES] = [const { AtomicBool::new(false) }; MAX_DEVICES];

/// Bytes that the driver keeps for itself. *Source*: assumed; `nvidia-smi -q` of data-centre devices shows some hundred MiB "Reserved".
pub const RESERVED_BYTES: u64 = 512 << 20;

/// Bytes of each foreign process. *Source*: assumed, a context and a small model.
pub const FOREIGN_PROCESS_BYTES: u64 = 2 << 30;

/// The driver's version and the version of CUDA that it speaks.
pub const DRIVER_VERSION: &str = "580.00 (simulated)";
pub const CUDA_VERSION: c_int = 13_000;

/// Major and minor number.
pub type ComputeCapability = (u32, u32);

/// What one product promises and its driver reports.
///
/// *Source*: `models/devices.toml` for the fields that it has ([`data_sheet`]); the others stand beside each device.
#[derive(Debug, Default, PartialEq)]
pub struct Device {
    /// As a script names it.
    pub short_name: &'static str,
    /// As NVML names the real one; what is simulated is [`Device::name`].
    pub product: &'static str,
    pub compute_capability: ComputeCapability,
    pub multiprocessors: u32,
    pub memory_bytes: u64,
    pub l2_bytes: u64,
    pub max_sm_clock_mhz: u32,
    pub idle_sm_clock_mhz: u32,
    pub memory_clock_mhz: u32,
    pub memory_bus_bits: u32,
    pub bandwidth_bytes_per_s: f64,
    pub dense_flops_per_s: Peaks,
    /// To equal devices of the same machine, one direction.
    pub link_bytes_per_s: f64,
    pub nvlink: bool,
    /// Whether the switch joins devices to a fabric, which NVML describes.
    pub fabric: bool,
    pub max_power_watts: u32,
    pub idle_power_watts: u32,
    /// The number of PCI, without the vendor's.
    pub pci_device_id: u32,
    /// Times that f32 is faster than f64.
    pub f32_to_f64: u32,
}

/// Dense peaks of matrix units; `f32` is the plain vector rate.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Peaks {
    pub f32: f64,
    /// The same for bf16.
    pub f16: f64,
}

/// What a compute capability grants.
///
/// *Source*: CUDA C++ programming guide, "Technical specifications per compute capability".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub threads_per_multiprocessor: u32,
    pub blocks_per_multiprocessor: u32,
    pub shared_bytes_per_multiprocessor: u32,
    /// With `cuFuncSetAttribute`; without it 48 KiB.
    pub shared_bytes_per_block_opt_in: u32,
}

/// Of shared memory, in bytes, that a block has without asking.
pub const SHARED_BYTES_PER_BLOCK: u32 = 48 << 10;
/// Of shared memory, in bytes, that the driver takes of each block. *Source*: programming guide, compute capability 8.x and later.
pub const RESERVED_SHARED_BYTES_PER_BLOCK: u32 = 1 << 10;
/// Registers of a multiprocessor and of a block, of every capability here.
pub const REGISTERS: u32 = 64 << 10;
pub const MAX_THREADS_PER_BLOCK: u32 = 1024;
pub const WARP_SIZE: u32 = 32;
/// Blocks of a grid along x, y and z.
pub const MAX_GRID: [u32; 3] = [0x7fff_ffff, 65_535, 65_535];
/// Threads of a block along x, y and z.
pub const MAX_BLOCK: [u32; 3] = [1024, 1024, 64];

impl Limits {
    /// The limits of a capability that a script may ask for.
    #[must_use]
    pub fn of(capability: ComputeCapability) -> Option<Self> {
        let (threads, blocks, shared_kib) = match capability {
            (7, 5) => (1024, 16, 64),
            (8, 0) => (2048, 32, 164),
            (8, 6) => (1536, 16, 100),
            (8, 9) | (12, 0 | 1) => (1536, 24, 100),
            (9, 0) | (10, 0 | 3) => (2048, 32, 228),
            _ => return None,
        };
        // Since 8.0 one KiB is reserved for each block.
        let opt_in_kib = if capability < (8, 0) { shared_kib } else { shared_kib - 1 };
        Some(Self {
            threads_per_multiprocessor: threads,
            blocks_per_multiprocessor: blocks,
            shared_bytes_per_multiprocessor: shared_kib << 10,
            shared_bytes_per_block_opt_in: opt_in_kib << 10,
        })
    }
}

/// Every device, the default first.
///
/// *Source* beside `models/devices.toml`: clocks, bus and powers as `nvidia-smi -q` prints them for the product; multiprocessors and links
/// of the architecture whitepapers (Ampere, Ada, Hopper) and the data sheet of DGX B200; PCI numbers of the PCI ID repository (10de);
/// f64 of the programming guide's table of arithmetic throughput. None was read off a device here; idle powers are typical, not promised.
pub static DEVICES: LazyLock<[Device; 5]> = LazyLock::new(|| {
    [
        Device {
            short_name: "h200",
            compute_capability: (9, 0),
            multiprocessors: 132,
            max_sm_clock_mhz: 1980,
            idle_sm_clock_mhz: 345,
            memory_clock_mhz: 3201,
            memory_bus_bits: 6144,
            nvlink: true,
            fabric: true,
            max_power_watts: 700,
            idle_power_watts: 76,
            pci_device_id: 0x2335,
            f32_to_f64: 2,
            ..data_sheet("NVIDIA H200")
        },
        Device {
            short_name: "h100",
            compute_capability: (9, 0),
            multiprocessors: 132,
            max_sm_clock_mhz: 1980,
            idle_sm_clock_mhz: 345,
            memory_clock_mhz: 2619,
            memory_bus_bits: 5120,
            nvlink: true,
            fabric: true,
            max_power_watts: 700,
            idle_power_watts: 70,
            pci_device_id: 0x2330,
            f32_to_f64: 2,
            ..data_sheet("NVIDIA H100 80GB HBM3")
        },
        Device {
            short_name: "a100",
            compute_capability: (8, 0),
            multiprocessors: 108,
            max_sm_clock_mhz: 1410,
            idle_sm_clock_mhz: 210,
            memory_clock_mhz: 1593,
            memory_bus_bits: 5120,
            nvlink: true,
            fabric: false,
            max_power_watts: 400,
            idle_power_watts: 62,
            pci_device_id: 0x20b2,
            f32_to_f64: 2,
            ..data_sheet("NVIDIA A100-SXM4-80GB")
        },
        Device {
            short_name: "l40s",
            compute_capability: (8, 9),
            multiprocessors: 142,
            max_sm_clock_mhz: 2520,
            idle_sm_clock_mhz: 210,
            memory_clock_mhz: 9001,
            memory_bus_bits: 384,
            nvlink: false,
            fabric: false,
            max_power_watts: 350,
            idle_power_watts: 35,
            pci_device_id: 0x26b9,
            f32_to_f64: 64,
            ..data_sheet("NVIDIA L40S")
        },
        Device {
            short_name: "b200",
            compute_capability: (10, 0),
            multiprocessors: 148,
            max_sm_clock_mhz: 1965,
            idle_sm_clock_mhz: 120,
            memory_clock_mhz: 3996,
            memory_bus_bits: 8192,
            nvlink: true,
            fabric: true,
            max_power_watts: 1000,
            idle_power_watts: 140,
            pci_device_id: 0x2901,
            f32_to_f64: 2,
            ..data_sheet("NVIDIA B200")
        },
    ]
});

/// What the program's table has of a product.
fn data_sheet(product: &'static str) -> Device {
    let (devices, links) =
        include_str!("../../models/devices.toml").split_once("\n[[link]]").expect("links follow devices");
    let found = |rows: &'static str, table, text: String| {
        rows.split(table).find(|row| row.contains(&text)).unwrap_or_else(|| panic!("no row has {text}"))
    };
    let row = found(devices, "[[device]]", format!("product = \"{product}\"\n"));
    let name = row.split('"').nth(1).expect("a row begins with its name");
    let figure = |row: &str, key| -> f64 {
        let after = row.split_once(&format!("{key} = ")).unwrap_or_else(|| panic!("{name} has no {key}")).1;
        let text: String = after.chars().take_while(|c| c.is_ascii_digit() || ".e_".contains(*c)).collect();
        text.replace('_', "").parse().expect("a figure is a number")
    };
    Device {
        product,
        memory_bytes: figure(row, "memory_bytes") as u64,
        l2_bytes: figure(row, "l2_bytes") as u64,
        bandwidth_bytes_per_s: figure(row, "bandwidth_bytes_per_s"),
        dense_flops_per_s: Peaks { f32: figure(row, " f32"), f16: figure(row, " f16") },
        link_bytes_per_s: figure(found(links, "[[link]]", format!("\"{name}\"")), "bytes_per_s"),
        ..Device::default()
    }
}

impl Device {
    /// The device of a short name.
    #[must_use]
    pub fn named(short_name: &str) -> Option<&'static Self> {
        DEVICES.iter().find(|device| device.short_name == short_name)
    }

    /// The name that driver and NVML report, which nobody takes for a real device's.
    #[must_use]
    pub fn name(&self) -> String {
        format!("SIMULATED DEVICE ({})", self.product)
    }
}

/// The UUID of a device, by NVML's number: `GPU-51d00000-0000-0000-0000-00000000000N`.
#[must_use]
pub fn uuid(index: u32) -> [u8; 16] {
    (0x51d0_0000_u128 << 96 | u128::from(index)).to_be_bytes()
}

/// The number of a device's bus; domain, device and function are 0.
#[must_use]
pub fn pci_bus(index: u32) -> u32 {
    0x1b + 0x10 * index
}

/// Bytes of a device that other processes hold.
#[must_use]
pub fn foreign_bytes(script: &Script) -> u64 {
    script.busy_memory_bytes + u64::from(script.foreign_processes) * FOREIGN_PROCESS_BYTES
}

/// Bytes of a device that this process can still allocate: what `cuMemGetInfo` and NVML call free.
#[must_use]
pub fn free_bytes(script: &Script, index: usize) -> u64 {
    let used = USED_BYTES[index].load(Relaxed);
    script.capacity().saturating_sub(RESERVED_BYTES + foreign_bytes(script) + used)
}

/// The value of a `CUdevice_attribute`, or none where the driver calls the number invalid.
///
/// *Source* of the numbers: `cuda.h` of CUDA 13. Sizes of textures and surfaces are left out.
#[must_use]
pub fn attribute(script: &Script, index: u32, number: c_int) -> Option<c_int> {
    let device = script.device;
    let capability = script.compute_capability();
    let limits = script.limits();
    let value = match number {
        // Threads of a block in all and along each axis.
        1 => MAX_THREADS_PER_BLOCK,
        2..=4 => MAX_BLOCK[usize::try_from(number - 2).ok()?],
        5..=7 => MAX_GRID[usize::try_from(number - 5).ok()?],
        8 => SHARED_BYTES_PER_BLOCK,
        // Constant memory.
        9 => 64 << 10,
        10 => WARP_SIZE,
        // Bytes between rows of a copy.
        11 => 0x7fff_ffff,
        // Registers of a block and of a multiprocessor.
        12 | 82 => REGISTERS,
        // Clocks in kHz.
        13 => device.max_sm_clock_mhz * 1000,
        36 => device.memory_clock_mhz * 1000,
        // Alignment of textures and surfaces.
        14 | 30 => 512,
        16 => script.multiprocessors.unwrap_or(device.multiprocessors),
        33 => pci_bus(index),
        37 => device.memory_bus_bits,
        38 => u32::try_from(script.l2_bytes.unwrap_or(device.l2_bytes)).ok()?,
        39 => limits.threads_per_multiprocessor,
        // Copy engines.
        40 => 3,
        75 => capability.0,
        76 => capability.1,
        81 => limits.shared_bytes_per_multiprocessor,
        87 => device.f32_to_f64,
        97 => limits.shared_bytes_per_block_opt_in,
        106 => limits.blocks_per_multiprocessor,
        111 => RESERVED_SHARED_BYTES_PER_BLOCK,
        // What the device can: overlapped copies, mapped host memory, concurrent kernels, ECC, unified addressing, priorities of streams,
        // caching in L1, managed memory, pre-emption, registered memory by its host pointer, stream operations on memory, cooperative
        // launch, flushed remote writes, registered host memory, virtual memory, file descriptors as handles, memory pools.
        15 | 19 | 31 | 32 | 41 | 78 | 79 | 80 | 83 | 89 | 90 | 91 | 93 | 94 | 95 | 98 | 99 | 102 | 103
        | 115 | 119 => 1,
        // Clusters, and tensor maps.
        120 | 127 => u32::from(capability >= (9, 0)),
        // What it is not or has not: a time limit of kernels, integrated, a compute mode, the PCI slot, a TCC driver, the PCI domain,
        // several boards, atomics on host memory, pageable memory, old stream operations, cooperative launch over devices, host page
        // tables, access of managed memory from the host, Windows's handles, compression, L2 set aside.
        17 | 18 | 20 | 34 | 35 | 50 | 84..=86 | 88 | 92 | 96 | 100 | 101 | 104 | 105 | 107..=110 => 0,
        _ => return None,
    };
    c_int::try_from(value).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_and_bus_make_about_the_bandwidth() {
        for device in DEVICES.iter() {
            let bytes_per_s =
                f64::from(device.memory_clock_mhz) * 1e6 * 2.0 * f64::from(device.memory_bus_bits / 8);
            let ratio = bytes_per_s / device.bandwidth_bytes_per_s;
            assert!((0.99..1.03).contains(&ratio), "{}: {ratio}", device.product);
        }
    }

    #[test]
    fn attributes_follow_the_capability_that_a_script_asks_for() {
        let h200 = Script::parse("").unwrap();
        let of = |number| attribute(&h200, 0, number);
        assert_eq!([75, 76, 16, 97, 6].map(of), [9, 0, 132, 232_448, 65_535].map(Some));
        let older = Script::parse("compute=8.9").unwrap();
        assert_eq!(
            [75, 76, 97, 39].map(|number| attribute(&older, 0, number)),
            [8, 9, 101_376, 1536].map(Some)
        );
        assert_eq!(of(-1).or(of(0)).or(of(10_000)), None);
        assert!(DEVICES.iter().all(|device| Limits::of(device.compute_capability).is_some()));
    }

    #[test]
    fn a_simulated_device_has_no_name_of_a_real_one() {
        let names: Vec<String> = DEVICES.iter().map(Device::name).collect();
        assert_eq!(names[0], "SIMULATED DEVICE (NVIDIA H200)");
        assert!(DEVICES.iter().all(|device| !names.contains(&device.product.to_owned())));
    }
}
