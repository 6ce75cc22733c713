//! The kernels on the emulated device: each against the oracle, and the whole engine against the engine on the CPU.

#[cfg(not(hbmark_emulated))]
#[test]
#[ignore = "this build found no C++ compiler, so the CUDA kernels are not emulated"]
fn the_kernels_are_emulated() {}

#[cfg(hbmark_emulated)]
mod emulation;
#[cfg(hbmark_emulated)]
mod engine;
#[cfg(hbmark_emulated)]
mod latent;
mod launches;
#[cfg(hbmark_emulated)]
mod operations;

/// Splits of 16 positions and little shared memory: the paths of long contexts and wide layers, on tiny models.
#[cfg(hbmark_emulated)]
const SMALL: super::kernels::Tuning = super::kernels::Tuning {
    input_bytes: 4 << 10,
    min_split: 16,
    min_tiled_rows: 5,
    min_library_rows: usize::MAX,
    min_prefill_rows: usize::MAX,
};
