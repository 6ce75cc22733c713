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

/// Splits of 16 positions and little shared memory: the paths of long contexts and wide layers, on tiny models.
#[cfg(debug_assertions)]
const SMALL: super::kernels::Tuning = super::kernels::Tuning {
    input_bytes: 4 << 10,
    min_split: 16,
    min_tiled_rows: 5,
    min_library_rows: usize::MAX,
    min_widened_rows: usize::MAX,
    min_prefill_rows: usize::MAX,
    max_one_shot_bytes: 2 << 10,
    rank_timeout: std::time::Duration::from_secs(30),
};
