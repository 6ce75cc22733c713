//! The machine a result comes from: processor, memory, GPU, other load, and files.
//!
//! Enters: procfs, sysfs, NVML. Leaves: plain data, with `None` for what cannot be read.

pub mod atomic_file;
mod cgroup;
pub mod clock;
pub mod device;
pub mod doctor;
pub mod environment;
pub mod memory;
pub mod nvml;
pub mod placement;
pub mod system_files;
pub mod telemetry;
mod xid;
