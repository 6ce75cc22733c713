//! The machine a result comes from: processor, memory, GPU, other load, and files.
//!
//! Enters: procfs, sysfs, NVML. Leaves: plain data, with `None` for what cannot be read. It knows no model and no engine.

mod cgroup;
pub mod clock;
pub mod device;
pub mod doctor;
pub mod environment;
pub mod files;
pub mod memory;
pub mod nvml;
pub mod root;
pub mod telemetry;
