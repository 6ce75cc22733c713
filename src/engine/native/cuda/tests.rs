//! The kernels on the emulated device: each against the oracle, and the whole engine against the engine on the CPU.

#[cfg(not(debug_assertions))]
#[test]
#[ignore = "the CUDA kernels are emulated in debug builds only"]
fn the_kernels_are_emulated() {}

#[cfg(debug_assertions)]
mod emulation;
#[cfg(debug_assertions)]
mod engine;
#[cfg(debug_assertions)]
mod ggml_blocks;
#[cfg(debug_assertions)]
mod latent;
mod launches;
#[cfg(debug_assertions)]
mod operations;
#[cfg(debug_assertions)]
mod ranks;
