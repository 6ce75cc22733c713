//! The native engine's operations on a GPU: the kernels in `kernels/`, launched in order, and a decode step replayed as one graph.
//!
//! Enters: what [`Operations`](super::operations::Operations) says. Leaves: the same, enqueued on a device's stream. [`kernels`] are typed
//! launches with their shapes checked and bytes counted, [`step`] is what of a step changes and lies on the device, [`operations`] puts both
//! together over any [`Device`]: a GPU through its driver, or the emulation that runs the same sources in `cargo test`.

pub mod attention;
#[cfg(feature = "cuda")]
mod cublaslt;
pub mod device;
pub mod device_matrix;
#[cfg(feature = "cuda")]
pub mod driver;
#[cfg(all(test, debug_assertions))]
pub mod emulator;
pub mod experts;
pub mod ggml_blocks;
pub mod kernels;
pub mod latent;
#[cfg(feature = "cuda")]
pub mod nccl;
pub mod operations;
pub mod peers;
pub mod step;
pub mod tensor_core_linear;
#[cfg(test)]
mod tests;

pub use device::Device;
pub use operations::CudaOperations;
