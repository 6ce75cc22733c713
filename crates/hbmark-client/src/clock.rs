//! Time on this machine: one monotonic clock, and the kernel's receive stamps brought onto it.
//!
//! Enters: nothing. Leaves: nanoseconds of `CLOCK_MONOTONIC`. The kernel stamps packets by `CLOCK_REALTIME`; the offset between both is read
//! again every second, and at once where a stamp is not near the present; a step of the real-time clock is noticed, counted and not believed.

use rustix::time::{ClockId, clock_gettime};

/// A moment or a span, in nanoseconds of `CLOCK_MONOTONIC`.
pub type Moment = u64;

/// How often the offset is read again.
const REFRESH: u64 = 1_000_000_000;
/// An offset that moves by more than this between two readings is a step, not drift.
const MAX_DRIFT: i64 = 2_000_000;
/// A stamp that lies further ahead of the present than this is not of this clock.
const MAX_AHEAD: i64 = 1_000_000;
/// A stamp that lies further behind the present than this was read late, or the clock was set back.
const MAX_BEHIND: i64 = 50_000_000;

fn read(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    let whole = |part: i64| u64::try_from(part).unwrap_or(0);
    whole(time.tv_sec) * 1_000_000_000 + whole(time.tv_nsec)
}

/// The present.
pub fn now() -> Moment {
    read(ClockId::Monotonic)
}

/// Of so many tries the quickest is the reading: a thread may be interrupted between two clocks.
const TRIES: usize = 5;

/// How far `CLOCK_REALTIME` is ahead of `CLOCK_MONOTONIC` at a moment, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offset {
    /// On `CLOCK_MONOTONIC`.
    pub at: i64,
    pub ahead: i64,
    /// The true offset is not farther away than this.
    pub uncertainty: i64,
}

impl Offset {
    pub fn read() -> Self {
        let one = || {
            let before = now().cast_signed();
            let real = read(ClockId::Realtime).cast_signed();
            let after = now().cast_signed();
            let at = before.midpoint(after);
            Self { at, ahead: real - at, uncertainty: (after - before) / 2 + 1 }
        };
        (1..TRIES)
            .map(|_| one())
            .fold(one(), |best, again| if again.uncertainty < best.uncertainty { again } else { best })
    }
}

/// Brings stamps of `CLOCK_REALTIME` onto `CLOCK_MONOTONIC`.
#[derive(Debug, Clone)]
pub struct RealTime {
    offset: i64,
    read_at: Moment,
    /// How often the real-time clock was stepped.
    steps: usize,
}

impl Default for RealTime {
    fn default() -> Self {
        Self { offset: Offset::read().ahead, read_at: now(), steps: 0 }
    }
}

impl RealTime {
    /// The moment of a stamp; `None` where the clock was stepped since it was made.
    pub fn moment(&mut self, stamp: u64, present: Moment) -> Option<Moment> {
        if present.saturating_sub(self.read_at) > REFRESH {
            self.refresh(Offset::read().ahead, present);
        }
        let moment = stamp.cast_signed() - self.offset;
        let ahead = moment - present.cast_signed();
        if !(-MAX_BEHIND..=MAX_AHEAD).contains(&ahead) {
            let before = self.steps;
            self.refresh(Offset::read().ahead, present);
            if ahead > MAX_AHEAD || self.steps > before {
                return None;
            }
        }
        // An offset is read with an error of a fraction of a microsecond.
        u64::try_from(moment).ok().map(|moment| moment.min(present))
    }

    fn refresh(&mut self, offset: i64, present: Moment) {
        if (offset - self.offset).abs() > MAX_DRIFT {
            self.steps += 1;
        }
        (self.offset, self.read_at) = (offset, present);
    }

    /// How often the real-time clock was stepped.
    pub fn steps(&self) -> usize {
        self.steps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stamp_of_now_is_now() {
        let mut real = RealTime::default();
        let before = now();
        let stamp = read(ClockId::Realtime);
        let after = now();
        let moment = real.moment(stamp, after).unwrap();
        assert!(moment + 1_000_000 >= before && moment <= after, "{before} {moment} {after}");
    }

    #[test]
    fn a_clock_that_was_set_back_is_noticed_at_the_first_stamp() {
        let mut real = RealTime::default();
        let present = now();
        // As far ahead as it was before the clock was set back by five seconds.
        real.offset += 5_000_000_000;
        assert_eq!(real.moment(read(ClockId::Realtime), present), None);
        assert_eq!(real.steps(), 1);
        let stamp = read(ClockId::Realtime);
        let moment = real.moment(stamp, now()).unwrap();
        assert!(moment + 1_000_000 >= present, "{moment} {present}");
        // One that was read late is what it says.
        let late = now() + 200_000_000;
        let moment = real.moment(stamp, late).unwrap();
        assert!(moment + 150_000_000 < late && real.steps() == 1, "{moment} {late}");
    }

    #[test]
    fn a_step_of_the_clock_is_counted_and_its_stamps_are_not_used() {
        let mut real = RealTime::default();
        let present = now();
        let stamp = (present.cast_signed() + real.offset).cast_unsigned();
        assert_eq!(real.moment(stamp, present), Some(present));
        assert_eq!(real.moment(stamp + 5_000_000_000, present), None, "five seconds ahead of the present");
        real.refresh(real.offset + 5_000_000_000, present);
        assert_eq!(real.steps(), 1);
        real.refresh(real.offset + 1_000, present);
        assert_eq!(real.steps(), 1, "drift is not a step");
    }
}
