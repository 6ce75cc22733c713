//! A small fixed piece of work, repeated between the blocks of a measurement to detect changes of the machine.
//!
//! Enters: a [`Canary`]. Leaves: its time as a ratio to the session's [`Baseline`], and the canary's own noise, so
//! that the protocol rejects a block for a change of the machine and not for the canary's jitter.

use super::probe::cpu::{Pass, instruction_sets, with_team};
use super::probe::{ProbeError, usable_cores};
use crate::engine::native::cpu::huge_pages::Pages;
use hbmark_core::result::Spread;
use hbmark_core::units::Bytes;
use hbmark_cpu_kernels::memory::Walk;

/// Fixed work whose time should never change.
pub trait Canary {
    /// Does the work once and returns the seconds it took.
    fn run(&mut self) -> f64;

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
    /// A smaller deviation never rejects a block, however quiet the canary.
    pub const MIN_TOLERANCE: f64 = 0.01;
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

    /// How far a ratio may lie from 1: one percent, or four of the canary's own standard deviations where that is more.
    pub fn tolerance(&self) -> f64 {
        (Self::TOLERATED_DEVIATIONS * self.relative_sd).max(Self::MIN_TOLERANCE)
    }
}

/// Reads a fixed buffer with all usable cores: the memory that decode depends on, a few milliseconds at a time.
#[derive(Debug)]
pub struct CpuCanary {
    buffer: Pages,
    bytes: Bytes,
    cores: Vec<usize>,
    pass: Pass,
}

/// Passes of one run, of which the fastest counts. Threads share a pass as they share a step: a core that is taken delays it by its share.
const PASSES: usize = 5;

impl CpuCanary {
    /// 256 MiB: a few times the last cache of most machines, yet some 5 ms of reading.
    pub const USUAL_SIZE: Bytes = Bytes(256 << 20);

    /// Maps and touches a buffer of `bytes`.
    ///
    /// # Errors
    /// When the system refuses the memory, or a thread cannot be pinned.
    pub fn new(bytes: Bytes) -> Result<Self, ProbeError> {
        let cores = usable_cores()?;
        let size = usize::try_from(bytes.0).unwrap_or(usize::MAX);
        let mut buffer = Pages::new(size).map_err(|source| ProbeError::Memory { bytes, source })?;
        with_team(&cores, buffer.floats_mut(), |time| time(Pass::Touch))?;
        Ok(Self { buffer, bytes, cores, pass: Pass::Read { set: instruction_sets()[0], walk: Walk::PLAIN } })
    }
}

impl Canary for CpuCanary {
    fn run(&mut self) -> f64 {
        let mut seconds = f64::NAN;
        let pass = self.pass;
        let team = with_team(&self.cores, self.buffer.floats_mut(), |time| {
            time(Pass::Empty);
            // Threads of the work just measured may still be spinning: the fastest pass is one without them. A slow machine is slow in
            // all passes.
            seconds = (0..PASSES).map(|_| time(pass).inside).fold(f64::INFINITY, f64::min);
        });
        // Cores taken away during the session leave a thread unpinned: its time would not be comparable.
        if team.is_ok() { seconds } else { f64::NAN }
    }

    fn host_memory(&self) -> Bytes {
        self.bytes
    }
}

/// A canary with given times; after the last it stays there.
#[derive(Debug, Clone, PartialEq)]
pub struct ScriptedCanary {
    seconds: Vec<f64>,
    next: usize,
}

impl ScriptedCanary {
    /// The times of its runs, in order. Without any, every run is not a number.
    pub fn new(seconds: Vec<f64>) -> Self {
        Self { seconds, next: 0 }
    }
}

impl Canary for ScriptedCanary {
    fn run(&mut self) -> f64 {
        let now = self.seconds.get(self.next).or(self.seconds.last());
        self.next += 1;
        now.copied().unwrap_or(f64::NAN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quiet_canary_tolerates_one_percent_and_a_noisy_one_four_deviations() {
        let quiet = Baseline::of(&[1.0, 1.0, 1.0]).unwrap();
        assert!((quiet.tolerance() - 0.01).abs() < 1e-12);
        let noisy = Baseline::of(&[0.9, 1.0, 1.1]).unwrap();
        assert!((noisy.relative_sd - 0.1).abs() < 1e-12);
        assert!((noisy.tolerance() - 0.4).abs() < 1e-12);
    }

    #[test]
    fn the_first_run_is_not_counted_and_ratios_are_to_the_median() {
        let mut canary = ScriptedCanary::new(vec![9.0, 2.0, 1.0, 4.0, 3.0]);
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
        assert_eq!(ScriptedCanary::new(vec![]).baseline(5), None);
    }

    #[test]
    fn the_processor_canary_reads_and_returns_a_time() {
        let mut canary = CpuCanary::new(Bytes(4 << 20)).unwrap();
        assert!(canary.baseline(3).is_some());
        assert_eq!(canary.host_memory(), Bytes(4 << 20));
    }
}
