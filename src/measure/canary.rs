//! A small fixed piece of work, repeated between the blocks of a measurement to detect changes of the machine.
//!
//! Enters: a [`Canary`]. Leaves: its time as a ratio to the session's [`Baseline`], and the canary's own noise, so
//! that the protocol rejects a block for a change of the machine and not for the canary's jitter.

use super::probe::cpu::{Pass, fastest_read, with_team};
use super::probe::{ProbeError, usable_cores, working_set};
use crate::engine::native::cpu::huge_pages::Pages;
use crate::machine::environment::last_cache;
use crate::machine::memory::{MemoryOf, available};
use hbmark_core::ledger::CACHE_MARGIN;
use hbmark_core::result::Spread;
use hbmark_core::stats;
use hbmark_core::units::{Bytes, BytesPerSecond, Nanos};

/// Fixed work whose time should never change.
pub trait Canary {
    /// Does the work once and returns the seconds it took.
    fn run(&mut self) -> f64;

    /// The rate at which the last run read memory; none of a canary whose memory does not change its rate, or may be in a cache.
    fn read_rate(&self) -> Option<BytesPerSecond> {
        None
    }

    /// The memory of this process that it reads, and keeps resident.
    fn host_memory(&self) -> Bytes {
        Bytes(0)
    }

    /// Its median time and noise over `runs` runs, after one warm-up run. None of fewer than two usable times.
    fn baseline(&mut self, runs: usize) -> Option<Baseline> {
        self.run();
        let seconds: Vec<f64> = (0..runs).map(|_| self.run()).collect();
        Baseline::of(&seconds)
    }
}

/// The canary's time when the session began.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Baseline {
    pub median_seconds: f64,
    /// Standard deviation of one run over the median: the noise of the canary itself.
    pub relative_sd: f64,
    pub runs: usize,
}

impl Baseline {
    /// Standard deviations a run may lie off: about one false alarm in 16,000 were the noise normal.
    pub const TOLERATED_DEVIATIONS: f64 = 4.0;

    /// From the times of the first runs; none when fewer than two of them are positive numbers.
    pub fn of(seconds: &[f64]) -> Option<Self> {
        let usable: Vec<f64> = seconds.iter().copied().filter(|s| s.is_finite() && *s > 0.0).collect();
        if usable.len() < 2 {
            return None;
        }
        let median_seconds = Spread::of(&usable)?.median;
        let count = usable.len() as f64;
        let mean = usable.iter().sum::<f64>() / count;
        let variance = usable.iter().map(|s| (s - mean).powi(2)).sum::<f64>() / (count - 1.0);
        Some(Self { median_seconds, relative_sd: variance.sqrt() / median_seconds, runs: usable.len() })
    }

    /// A run's time over the usual one: above 1 the machine has become slower.
    pub fn ratio(&self, seconds: f64) -> f64 {
        seconds / self.median_seconds
    }

    /// How far a ratio may lie from 1 by the canary's own noise.
    pub fn tolerance(&self) -> f64 {
        Self::TOLERATED_DEVIATIONS * self.relative_sd
    }
}

/// Reads a fixed buffer with the cores of a run: the memory that decode depends on, a few milliseconds at a time.
#[derive(Debug)]
pub struct CpuCanary {
    buffer: Pages,
    bytes: Bytes,
    cores: Vec<usize>,
    /// Of the ways to read, the one that was fastest on parts of the buffer.
    pass: Pass,
    /// Seconds of each pass of the last run.
    passes: [f64; PASSES],
    /// Whether caches can hold too little of the buffer to matter.
    is_in_memory: bool,
}

/// Passes of one run. Threads share a pass as they share a step: a core that is taken delays it by its share.
const PASSES: usize = 5;
/// Large beside most caches.
const SIZE: Bytes = Bytes(256 << 20);

impl CpuCanary {
    /// A buffer of 256 MiB, some 5 ms of reading; larger where the last cache holds a good part of that.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn beyond_caches(threads: Option<usize>) -> Result<Self, ProbeError> {
        let cache = last_cache();
        let wanted = cache.map_or(0, |cache| cache.0.saturating_mul(CACHE_MARGIN)).max(SIZE.0);
        // Where memory is short, no more than a probe takes.
        Self::new(working_set(cache, available(MemoryOf::Host)).min(Bytes(wanted)), threads)
    }

    /// Maps and touches a buffer of `bytes`, and finds how to read it: with so many threads, or with one on each usable core.
    ///
    /// # Errors
    /// When the system refuses the memory, or a thread cannot be pinned.
    pub fn new(bytes: Bytes, threads: Option<usize>) -> Result<Self, ProbeError> {
        let mut cores = usable_cores()?;
        cores.truncate(threads.unwrap_or(usize::MAX).max(1));
        let size = usize::try_from(bytes.0).unwrap_or(usize::MAX);
        let mut buffer = Pages::new(size).map_err(|source| ProbeError::Memory { bytes, source })?;
        let pass = with_team(&cores, buffer.floats_mut(), |time| {
            time(Pass::Touch);
            fastest_read(time)
        })?;
        let is_in_memory = last_cache().is_none_or(|cache| bytes.0 / CACHE_MARGIN >= cache.0);
        Ok(Self { buffer, bytes, cores, pass, passes: [f64::NAN; PASSES], is_in_memory })
    }
}

impl Canary for CpuCanary {
    fn run(&mut self) -> f64 {
        let pass = self.pass;
        let passes = with_team(&self.cores, self.buffer.floats_mut(), |time| {
            time(Pass::Empty);
            [(); PASSES].map(|()| time(pass).inside)
        });
        // Cores taken away during the session leave a thread unpinned: its time would not be comparable.
        self.passes = passes.unwrap_or([f64::NAN; PASSES]);
        // Threads of the work just measured may still be spinning: the fastest pass is one without them. A slow machine is slow in
        // all passes.
        self.passes.into_iter().fold(f64::NAN, f64::min)
    }

    fn read_rate(&self) -> Option<BytesPerSecond> {
        // What a step met is what the memory usually gave, not the most.
        let usual = Nanos(stats::median(&self.passes) * 1e9);
        (self.is_in_memory && usual.0 > 0.0).then(|| self.bytes.per(usual))
    }

    fn host_memory(&self) -> Bytes {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs of given times: the last repeats, and without any a time is not a number.
    struct ScriptedCanary(Vec<f64>);

    impl Canary for ScriptedCanary {
        fn run(&mut self) -> f64 {
            if self.0.len() > 1 { self.0.remove(0) } else { self.0.first().copied().unwrap_or(f64::NAN) }
        }
    }

    #[test]
    fn a_noisy_canary_tolerates_four_deviations() {
        let noisy = Baseline::of(&[0.9, 1.0, 1.1]).unwrap();
        assert!((noisy.relative_sd - 0.1).abs() < 1e-12);
        assert!((noisy.tolerance() - 0.4).abs() < 1e-12);
    }

    #[test]
    fn the_first_run_is_not_counted_and_ratios_are_to_the_median() {
        let mut canary = ScriptedCanary(vec![9.0, 2.0, 1.0, 4.0, 3.0]);
        let baseline = canary.baseline(3).unwrap();
        assert!((baseline.median_seconds - 2.0).abs() < 1e-12);
        assert_eq!(baseline.runs, 3);
        assert!((baseline.ratio(canary.run()) - 1.5).abs() < 1e-12);
        assert!((canary.run() - 3.0).abs() < 1e-12, "the last time repeats");
    }

    #[test]
    fn too_few_usable_times_make_no_baseline() {
        assert_eq!(Baseline::of(&[1.0]), None);
        assert_eq!(Baseline::of(&[1.0, f64::NAN, 0.0]), None);
        assert_eq!(ScriptedCanary(vec![]).baseline(5), None);
    }

    #[test]
    fn the_processor_canary_reads_and_returns_a_time() {
        let mut canary = CpuCanary::new(Bytes(4 << 20), Some(1)).unwrap();
        assert!(canary.baseline(3).is_some());
        assert_eq!((canary.host_memory(), canary.cores.len()), (Bytes(4 << 20), 1));
        // Two of its five passes are slow: the canary's time is the fastest, its rate that of the median.
        canary.passes = [4e-3, 1e-3, 2e-3, 8e-3, 2e-3];
        canary.is_in_memory = true;
        assert_eq!(canary.read_rate(), Some(Bytes(4 << 20).per(Nanos(2e6))));
        canary.is_in_memory = false;
        assert_eq!(canary.read_rate(), None);
        (canary.is_in_memory, canary.passes) = (true, [f64::NAN; PASSES]);
        assert_eq!(canary.read_rate(), None);
    }
}
