//! Measured ceilings of this machine: the denominators of every percentage.
//!
//! Enters: [`ProbeConfig`] (thread counts, working set, time limit). Leaves: [`Ceilings`](hbmark_core::result::Ceilings). One file per
//! device kind.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(any(test, feature = "cuda"))]
pub mod device;
#[cfg(any(test, feature = "cuda"))]
pub mod links;

use std::io;

use hbmark_core::units::Bytes;

pub use cpu::measure_cpu;

use crate::engine::error_mapping::of_candle;
use crate::engine::native::cpu::thread_team::allowed_processors;
use crate::machine::environment::{last_cache, within_quota};
use crate::machine::memory::{MemoryOf, available};
use crate::machine::system_files::Root;

/// How to probe.
#[derive(Debug, Clone, PartialEq)]
pub struct ProbeConfig {
    /// Thread counts to try; each at most the number of usable cores.
    pub threads: Vec<usize>,
    /// Bytes each bandwidth pass moves; well beyond the last cache.
    pub working_set: Bytes,
    /// Timed passes of every kernel, after one warm-up pass.
    pub repetitions: usize,
    /// Time after which no further pass is started once each kernel has [`MIN_REPETITIONS`]; shared among the parts of the
    /// probe. A soft limit: the minimum number of passes is always made.
    pub seconds_cap: f64,
    /// Edges of the square matrix products tried in f32.
    pub gemm_sizes: Vec<usize>,
}

/// The fewest passes a median is taken of.
pub const MIN_REPETITIONS: usize = 3;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

impl ProbeConfig {
    /// For `hbmark ceiling`: about 15 seconds.
    pub fn full() -> Result<Self, ProbeError> {
        let cores = usable_cores()?.len();
        Ok(Self {
            threads: thread_counts(cores),
            working_set: working_set(last_cache(), available(MemoryOf::Host)),
            repetitions: 15,
            seconds_cap: 15.0,
            gemm_sizes: vec![512, 1024, 2048],
        })
    }

    /// At the start of every run: about 3 seconds, all cores or half of them.
    pub fn quick() -> Result<Self, ProbeError> {
        let cores = usable_cores()?.len();
        let mut threads = vec![cores.div_ceil(2), cores];
        threads.dedup();
        Ok(Self { threads, repetitions: 5, seconds_cap: 3.0, gemm_sizes: vec![512, 1024], ..Self::full()? })
    }
}

/// Why a probe failed.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    #[error("cannot read which cores this process may use: {source}")]
    Cores { source: io::Error },
    #[error("the native engine cannot multiply in {dtype}: {source}")]
    NativeProduct { dtype: &'static str, source: Box<crate::engine::EngineError> },
    #[error("cannot judge {repetitions} repetitions; ask for at least {MIN_REPETITIONS}")]
    Repetitions { repetitions: usize },
    #[error("cannot map {bytes} for the bandwidth probe: {source}; ask for a smaller working set")]
    Memory { bytes: Bytes, source: io::Error },
    #[error("cannot start {threads} probe threads: {source}")]
    Start { threads: usize, source: io::Error },
    #[error("cannot pin a probe thread to core {core}: {source}")]
    Pin { core: usize, source: io::Error },
    #[error("the {dtype} matrix product of size {size} failed: {source}")]
    Gemm { dtype: &'static str, size: usize, source: Box<crate::engine::EngineError> },
    #[error(
        "{kernel} read wrong data on {device}: its sum is {found:#x}, not {wanted:#x}; check the memory (ECC) before any timing"
    )]
    WrongSum { device: String, kernel: &'static str, wanted: u32, found: u32 },
    #[error(transparent)]
    Engine(#[from] crate::engine::EngineError),
}

impl ProbeError {
    /// A product that candle refused.
    fn of_product(device: &str, dtype: &'static str, size: usize, error: &candle_core::Error) -> Self {
        Self::Gemm { dtype, size, source: Box::new(of_candle(device, error)) }
    }
}

/// The cores this process may use, by number: under a CPU quota as many as an engine takes.
pub fn usable_cores() -> Result<Vec<usize>, ProbeError> {
    usable_cores_of(&Root::system())
}

fn usable_cores_of(root: &Root) -> Result<Vec<usize>, ProbeError> {
    let mut cores = allowed_processors().map_err(|source| ProbeError::Cores { source })?;
    cores.truncate(within_quota(root, cores.len()));
    Ok(cores)
}

/// All counts up to eight; beyond, powers of two, three quarters of the cores, and all of them.
pub fn thread_counts(cores: usize) -> Vec<usize> {
    let mut counts: Vec<usize> = if cores <= 8 {
        (1..=cores).collect()
    } else {
        let powers = std::iter::successors(Some(1), |n| Some(n * 2)).take_while(|n| *n < cores);
        powers.chain([cores * 3 / 4, cores]).collect()
    };
    counts.sort_unstable();
    counts.dedup();
    counts
}

/// Eight times the last-level cache and at least 1 GiB, but no more than a quarter of the available memory.
pub fn working_set(last_cache: Option<Bytes>, available: Option<Bytes>) -> Bytes {
    let wanted = last_cache.map_or(GIB, |cache| cache.0.saturating_mul(8).max(GIB));
    let bytes = available.map_or(wanted, |available| wanted.min(available.0 / 4));
    Bytes((bytes / (2 * MIB) * (2 * MIB)).max(2 * MIB))
}

/// The second half of the samples, where a clock that came down under load has settled.
#[cfg(any(test, feature = "cuda"))]
pub(crate) fn last_half(samples: &[f64]) -> &[f64] {
    &samples[samples.len() / 2..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_working_set_is_far_beyond_the_cache_yet_leaves_memory() {
        assert_eq!(working_set(Some(Bytes(32 * MIB)), Some(Bytes(20 * GIB))), Bytes(GIB));
        assert_eq!(working_set(Some(Bytes(GIB)), Some(Bytes(100 * GIB))), Bytes(8 * GIB));
        assert_eq!(working_set(Some(Bytes(GIB)), Some(Bytes(8 * GIB))), Bytes(2 * GIB));
        assert_eq!(working_set(None, None), Bytes(GIB));
        assert_eq!(working_set(None, Some(Bytes(0))), Bytes(2 * MIB));
    }

    #[test]
    fn under_a_quota_no_more_cores_are_probed_than_it_keeps_busy() {
        let (_keep, root) = crate::machine::system_files::fake_root(&[
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/cpu.max", "150000 100000\n"),
        ]);
        assert_eq!(usable_cores_of(&root).unwrap(), allowed_processors().unwrap()[..1]);
    }

    #[test]
    fn thread_counts_are_all_of_few_and_some_of_many() {
        assert_eq!(thread_counts(1), [1]);
        assert_eq!(thread_counts(3), [1, 2, 3]);
        assert_eq!(thread_counts(24), [1, 2, 4, 8, 16, 18, 24]);
    }

    #[test]
    fn what_is_sustained_is_what_came_later() {
        assert_eq!(last_half(&[9.0, 9.0, 5.0, 6.0]), [5.0, 6.0]);
        assert_eq!(last_half(&[9.0]), [9.0]);
        assert!(last_half(&[]).is_empty());
    }
}
