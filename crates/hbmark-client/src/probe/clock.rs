//! The clock of schedules against the clock of packets.
//!
//! Enters: two clocks of this machine. Leaves: their offset, and whether it holds still: a kernel stamp of a packet (`CLOCK_REALTIME`) means
//! something on a schedule (`CLOCK_MONOTONIC`) only as long as it does.

use std::time::Duration;

use hbmark_core::result::serving::ClockCheck;

use crate::clock::Offset;

/// Between two readings.
const PAUSE: Duration = Duration::from_millis(20);
/// Reads the offset again and again for a while.
pub(super) fn watch(span: Duration) -> ClockCheck {
    let mut readings = vec![Offset::read()];
    let first = readings[0].at;
    while i128::from(readings[readings.len() - 1].at - first) < span.as_nanos().cast_signed() {
        std::thread::sleep(PAUSE);
        readings.push(Offset::read());
    }
    check(&readings)
}

/// What a row of readings says.
fn check(readings: &[Offset]) -> ClockCheck {
    let steps = readings.windows(2).map(|pair| {
        let step = pair[0].ahead.abs_diff(pair[1].ahead) as f64;
        (step - (pair[0].uncertainty + pair[1].uncertainty) as f64).max(0.0)
    });
    let (span_ns, drift_ns) = match readings {
        [first, .., last] => ((last.at - first.at) as f64, (last.ahead - first.ahead) as f64),
        _ => (0.0, 0.0),
    };
    ClockCheck {
        span_ns,
        readings: readings.len(),
        largest_step_ns: steps.fold(0.0, f64::max),
        drift_ppm: if span_ns > 0.0 { drift_ns / span_ns * 1e6 } else { 0.0 },
        uncertainty_ns: readings.iter().map(|reading| reading.uncertainty as f64).fold(0.0, f64::max),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(at: i64, ahead: i64) -> Offset {
        Offset { at, ahead, uncertainty: 50 }
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
