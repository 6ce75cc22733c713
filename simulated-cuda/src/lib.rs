//! A CUDA device that is not there, for tests: the driver's ABI and its libraries', with kernels run on the host.

pub mod calls;
pub mod clock;
pub mod device;
pub mod driver;
pub mod kernels;
pub mod launch;
pub mod libraries;
pub mod machine;
pub mod memory;
pub mod nvml;
pub mod script;
pub mod status;
pub mod stream;
