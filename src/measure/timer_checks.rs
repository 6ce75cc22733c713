//! Checks of clocks against intervals of known length.
//!
//! Enters: a timeline and a second clock that is not derived from it. Leaves: one [`Check`] each, passed or failed. The outcome
//! depends on the machine, so these run in `hbmark verify` and not in the tests of the program.

use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::engine::EngineError;
use crate::engine::timeline::{MonotonicTimeline, Timeline};
use crate::machine::clock::raw_monotonic;
use hbmark_core::units::Nanos;

/// One comparison and its result. *Units*: nanoseconds, except for counts, as the name says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Check {
    pub name: String,
    pub passed: bool,
    pub wanted: f64,
    pub found: f64,
    /// How far `found` may lie from `wanted`.
    pub bound: f64,
}

impl Check {
    /// Passes when `found` lies within `bound` of `wanted`; never when it is not a number.
    pub fn within(name: impl Into<String>, wanted: f64, found: f64, bound: f64) -> Self {
        Self { name: name.into(), passed: (found - wanted).abs() <= bound, wanted, found, bound }
    }
}

/// Spans to spin for: from the shortest sample worth having to a long decode step.
const SPINS: [Nanos; 6] = [Nanos(5e4), Nanos(2e5), Nanos(1e6), Nanos(2e6), Nanos(5e6), Nanos(1e7)];
/// Tries of each spin: the shortest counts, for an interruption can only lengthen a spin.
const TRIES: usize = 15;
/// Readings for resolution and monotonicity.
const READINGS: usize = 20_000;
/// A timeline in steps coarser than this cannot time a step to a percent.
const RESOLUTION_BOUND: Nanos = Nanos(1e3);
/// How long the two clocks run side by side.
const CROSS_CHECK: Nanos = Nanos(5e7);
/// Time synchronisation slews a clock by at most 500 ppm (Linux `adjtimex`); as much again for the readings.
const CROSS_CHECK_BOUND: f64 = 1e-3;

/// All clock checks on the host's own clocks; about half a second.
pub fn check_clocks() -> Result<Vec<Check>, EngineError> {
    let mut timeline = MonotonicTimeline::default();
    let mut checks = check_spins(&mut timeline, &mut raw_monotonic)?;
    checks.extend(check_readings((0..READINGS).map(|_| timeline.host_now())));
    let origin = Instant::now();
    checks.push(check_against(&mut || origin.elapsed().into(), &mut raw_monotonic));
    Ok(checks)
}

/// A second clock.
type Clock<'a> = dyn FnMut() -> Nanos + 'a;

/// Spins by `clock` for known spans between two marks of the timeline, which must agree within 0.5 % or 2 µs, whichever is more.
pub fn check_spins(timeline: &mut dyn Timeline, clock: &mut Clock) -> Result<Vec<Check>, EngineError> {
    let mut checks = Vec::with_capacity(SPINS.len());
    for span in SPINS {
        let mut shortest = f64::INFINITY;
        for _ in 0..TRIES {
            timeline.mark()?;
            let begin = clock().0;
            while clock().0 - begin < span.0 {
                std::hint::spin_loop();
            }
            timeline.mark()?;
            let found = timeline.drain()?.last().map_or(f64::NAN, |mark| mark.0);
            shortest = shortest.min(found);
        }
        let bound = (0.005 * span.0).max(2e3);
        checks.push(Check::within(format!("timeline: a spin of {span} (ns)"), span.0, shortest, bound));
    }
    Ok(checks)
}

/// Consecutive readings must never go back, and their smallest step must be at most a microsecond.
pub fn check_readings(readings: impl Iterator<Item = Nanos>) -> Vec<Check> {
    let mut backwards = 0u32;
    let mut smallest = f64::INFINITY;
    let mut previous: Option<f64> = None;
    for now in readings {
        if let Some(before) = previous {
            let step = now.0 - before;
            if step < 0.0 {
                backwards += 1;
            } else if step > 0.0 {
                smallest = smallest.min(step);
            }
        }
        previous = Some(now.0);
    }
    vec![
        Check::within("timeline: steps backwards (count)", 0.0, f64::from(backwards), 0.0),
        Check::within("timeline: smallest step (ns)", 0.0, smallest, RESOLUTION_BOUND.0),
    ]
}

/// Runs two clocks side by side for 50 ms; they must agree to a thousandth in the best of three tries.
pub fn check_against(clock: &mut Clock, reference: &mut Clock) -> Check {
    let mut best: Option<Check> = None;
    for _ in 0..3 {
        let (begin, reference_begin) = (clock().0, reference().0);
        while reference().0 - reference_begin < CROSS_CHECK.0 {
            std::hint::spin_loop();
        }
        let found = clock().0 - begin;
        let wanted = reference().0 - reference_begin;
        let check =
            Check::within("monotonic against raw clock (ns)", wanted, found, CROSS_CHECK_BOUND * wanted);
        let off = |check: &Check| (check.found - check.wanted).abs();
        if best.as_ref().is_none_or(|best| off(&check) < off(best)) {
            best = Some(check);
        }
    }
    best.unwrap_or_else(|| Check::within("monotonic against raw clock (ns)", CROSS_CHECK.0, f64::NAN, 0.0))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// A timeline that runs at `rate` times the virtual time.
    struct Skewed<'a> {
        time: &'a Cell<f64>,
        rate: f64,
        marks: Vec<f64>,
    }

    impl Timeline for Skewed<'_> {
        fn mark(&mut self) -> Result<(), EngineError> {
            self.marks.push(self.host_now().0);
            Ok(())
        }
        fn drain_into(&mut self, times: &mut Vec<Nanos>) -> Result<(), EngineError> {
            let first = self.marks.first().copied().unwrap_or(0.0);
            times.extend(self.marks.drain(..).map(|mark| Nanos(mark - first)));
            Ok(())
        }
        fn host_now(&self) -> Nanos {
            Nanos(self.time.get() * self.rate)
        }
    }

    /// Advances virtual time by 100 ns per reading.
    fn ticking(time: &Cell<f64>) -> impl FnMut() -> Nanos {
        || {
            time.set(time.get() + 100.0);
            Nanos(time.get())
        }
    }

    fn spins_at(rate: f64) -> Vec<bool> {
        let time = Cell::new(0.0);
        let mut timeline = Skewed { time: &time, rate, marks: Vec::new() };
        let checks = check_spins(&mut timeline, &mut ticking(&time)).unwrap();
        checks.iter().map(|check| check.passed).collect()
    }

    #[test]
    fn a_true_timeline_passes_every_spin() {
        assert_eq!(spins_at(1.0), [true; SPINS.len()]);
    }

    #[test]
    fn a_timeline_a_percent_off_fails_every_long_spin() {
        for rate in [0.99, 1.01] {
            assert_eq!(spins_at(rate)[2..], [false; SPINS.len() - 2], "rate {rate}");
        }
    }

    #[test]
    fn readings_that_go_back_or_stand_still_are_found() {
        let passed = |times: &[f64]| {
            check_readings(times.iter().copied().map(Nanos)).iter().map(|c| c.passed).collect::<Vec<_>>()
        };
        assert_eq!(passed(&[0.0, 0.0, 30.0, 60.0]), [true, true]);
        assert_eq!(passed(&[0.0, 30.0, 29.0]), [false, true]);
        assert_eq!(passed(&[0.0, 4e6, 8e6]), [true, false]);
        assert_eq!(passed(&[5.0, 5.0]), [true, false]);
    }

    #[test]
    fn clocks_that_drift_apart_are_found() {
        let agree = |rate: f64| {
            let time = Cell::new(0.0);
            let mut clock = || Nanos(time.get() * rate);
            check_against(&mut clock, &mut ticking(&time)).passed
        };
        assert!(agree(1.0) && agree(1.0004));
        assert!(!agree(1.002) && !agree(0.998));
    }

    #[test]
    fn what_is_not_a_number_never_passes() {
        assert!(!Check::within("x", 1.0, f64::NAN, 1.0).passed);
    }
}
