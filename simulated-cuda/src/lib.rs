//! A CUDA device that is not there, for tests: the driver's ABI and its libraries', with kernels run on the host.

pub mod calls;
pub mod kernels;
pub mod launch;
pub mod libraries;
pub mod stream;
