//! A CUDA device that is not there, for tests: the driver's ABI and its libraries', with kernels run on the host.

pub mod device;
pub mod kernels;
pub mod nvml;
pub mod script;
pub mod stream;
