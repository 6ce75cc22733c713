//! The machine a result comes from: processor, memory, GPU, other load, and files.
//!
//! Enters: procfs, sysfs, NVML. Leaves: plain data, with `None` for what cannot be read.

pub(crate) mod atomic_file;
mod cgroup;
pub(crate) mod clock;
pub(crate) mod device;
pub(crate) mod doctor;
pub mod environment;
pub(crate) mod memory;
pub(crate) mod nvml;
pub(crate) mod placement;
pub(crate) mod processors;
pub(crate) mod system_files;
pub(crate) mod telemetry;
mod xid;
