//! The libraries beside the driver: cuBLAS, cuBLASLt, cuRAND, NCCL and the CUDA runtime.
//!
//! Enters: calls by the libraries' C interfaces. Leaves: their status codes at once, and work on a stream. Each entry point is exported
//! with `simulated_` before its name; `scripts/simulated-cuda.sh` makes the libraries whose symbols lead here.

pub mod blas;
pub mod blas_lt;
pub mod gemm;
pub mod handles;
pub mod nccl;
pub mod random;
pub mod runtime;
