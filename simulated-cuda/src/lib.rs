//! A CUDA device that is not there, for tests: kernels run on the host.

pub mod kernels;
