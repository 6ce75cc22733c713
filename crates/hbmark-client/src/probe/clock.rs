//! The clock of schedules against the clock of packets.
//!
//! Enters: two clocks of this machine. Leaves: their offset, and whether it holds still: a kernel stamp of a packet (`CLOCK_REALTIME`) means
//! something on a schedule (`CLOCK_MONOTONIC`) only as long as it does.

use std::time::Duration;

use hbmark_core::result::serving::ClockCheck;
use rustix::time::{ClockId, Timespec, clock_gettime};

/// Between two readings.
const PAUSE: Duration = Duration::from_millis(20);
/// Of so many tries the quickest is the reading: a thread may be interrupted between two clocks.
const TRIES: usize = 5;

/// `CLOCK_REALTIME` − `CLOCK_MONOTONIC` at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockOffset {
    /// The moment, on `CLOCK_MONOTONIC`.
    pub at_ns: i64,
    pub offset_ns: i64,
    /// The true offset is not farther away than this.
    pub uncertainty_ns: i64,
}

/// Reads the offset of the two clocks.
#[must_use]
pub fn offset() -> ClockOffset {
    let read = || {
        let before = nanoseconds(clock_gettime(ClockId::Monotonic));
        let real = nanoseconds(clock_gettime(ClockId::Realtime));
        let after = nanoseconds(clock_gettime(ClockId::Monotonic));
        let at_ns = before + (after - before) / 2;
        ClockOffset { at_ns, offset_ns: real - at_ns, uncertainty_ns: (after - before) / 2 + 1 }
    };
    let mut best = read();
    for _ in 1..TRIES {
        let again = read();
        if again.uncertainty_ns < best.uncertainty_ns {
            best = again;
        }
    }
    best
}

/// Reads the offset again and again for a while.
#[must_use]
pub fn watch(span: Duration) -> ClockCheck {
    let mut readings = vec![offset()];
    let first = readings[0].at_ns;
    while i128::from(readings[readings.len() - 1].at_ns - first) < span.as_nanos().cast_signed() {
        std::thread::sleep(PAUSE);
        readings.push(offset());
    }
    check(&readings)
}

/// What a row of readings says.
#[must_use]
pub fn check(readings: &[ClockOffset]) -> ClockCheck {
    let steps = readings.windows(2).map(|pair| {
        let step = pair[0].offset_ns.abs_diff(pair[1].offset_ns) as f64;
        (step - (pair[0].uncertainty_ns + pair[1].uncertainty_ns) as f64).max(0.0)
    });
    let (span_ns, drift_ns) = match readings {
        [first, .., last] => ((last.at_ns - first.at_ns) as f64, (last.offset_ns - first.offset_ns) as f64),
        _ => (0.0, 0.0),
    };
    ClockCheck {
        span_ns,
        readings: readings.len(),
        largest_step_ns: steps.fold(0.0, f64::max),
        drift_ppm: if span_ns > 0.0 { drift_ns / span_ns * 1e6 } else { 0.0 },
        uncertainty_ns: readings.iter().map(|reading| reading.uncertainty_ns as f64).fold(0.0, f64::max),
    }
}

fn nanoseconds(time: Timespec) -> i64 {
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(at_ns: i64, offset_ns: i64) -> ClockOffset {
        ClockOffset { at_ns, offset_ns, uncertainty_ns: 50 }
    }

    #[test]
    fn a_step_is_seen_and_the_uncertainty_of_reading_is_none() {
        let steady = check(&[at(0, 1_000), at(500, 1_080), at(1_000, 1_000)]);
        assert!(steady.largest_step_ns.abs() < f64::EPSILON && steady.drift_ppm.abs() < f64::EPSILON);
        assert!((steady.span_ns - 1_000.0).abs() < f64::EPSILON);
        let stepped = check(&[at(0, 1_000), at(500, 1_000), at(1_000, -4_000)]);
        assert!((stepped.largest_step_ns - 4_900.0).abs() < 1e-9);
        assert!((stepped.drift_ppm + 5e6).abs() < 1e-3);
        assert_eq!(check(&[]).readings, 0);
    }

    #[test]
    fn the_clocks_of_this_machine_are_read() {
        let check = watch(Duration::from_millis(30));
        assert!(check.readings >= 2 && check.uncertainty_ns > 0.0, "{check:?}");
        assert!(check.span_ns >= 30e6, "{check:?}");
    }
}
