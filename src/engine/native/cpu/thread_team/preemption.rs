//! Which members of a team lose their processor to other programs, and how long the team does without them.
//!
//! Enters: what the system says of a thread's time in the run queue, and the time of day. Leaves: whether a member takes part. One that has just been
//! preempted holds up all others at every barrier, for a whole time slice of the scheduler; without it a step costs its share of the work.

#[cfg(target_os = "linux")]
use std::fs::File;
use std::time::{Duration, Instant};

/// Less than this in the run queue is not a preemption that a team should act on.
const SHORTEST: Duration = Duration::from_millis(1);
/// Nor is less than this part of the time since the last look: it adds up over a long time from threads that are woken.
const SMALLEST_PART: u32 = 8;
/// The longest pause of a member: so often is tried whether its processor is free again.
const LONGEST: Duration = Duration::from_millis(500);

/// The time that a thread was ready to run and did not.
#[derive(Debug)]
pub struct RunDelay {
    #[cfg(target_os = "linux")]
    file: Option<File>,
}

impl RunDelay {
    /// Of the thread of this process with this number.
    pub fn of_thread(thread: u32) -> Self {
        #[cfg(not(target_os = "linux"))]
        let _ = thread;
        Self {
            #[cfg(target_os = "linux")]
            file: File::open(format!("/proc/self/task/{thread}/schedstat")).ok(),
        }
    }

    /// Since the thread began; none where the system does not count it.
    pub fn read(&self) -> Option<Duration> {
        #[cfg(target_os = "linux")]
        {
            use std::os::unix::fs::FileExt;
            let mut text = [0; 80];
            let read = self.file.as_ref()?.read_at(&mut text, 0).ok()?;
            // Nanoseconds on a processor, nanoseconds in the run queue, time slices.
            let fields = str::from_utf8(&text[..read]).ok()?;
            Some(Duration::from_nanos(fields.split_ascii_whitespace().nth(1)?.parse().ok()?))
        }
        #[cfg(not(target_os = "linux"))]
        None
    }
}

/// Whether one member takes part.
#[derive(Debug)]
pub struct Attendance {
    delay: RunDelay,
    /// The run delay at the last look, and when that was.
    seen: Duration,
    looked: Instant,
    pause: Pause,
}

impl Attendance {
    pub fn new(delay: RunDelay) -> Self {
        let mut new = Self { delay, seen: Duration::ZERO, looked: Instant::now(), pause: Pause::default() };
        new.look(new.looked);
        new
    }

    #[cfg(test)]
    pub fn set_absent(&mut self, absent: bool) {
        self.pause.until = absent.then(|| Instant::now() + 3600 * LONGEST);
    }

    pub fn is_present(&self) -> bool {
        self.pause.until.is_none()
    }

    /// What the member has lost since the last look, and how long ago that was.
    fn look(&mut self, now: Instant) -> (Duration, Duration) {
        let delay = self.delay.read().unwrap_or_default();
        let lost = delay.saturating_sub(std::mem::replace(&mut self.seen, delay));
        (lost, now - std::mem::replace(&mut self.looked, now))
    }

    /// Looks at a member that takes part. Whether it leaves.
    pub fn leaves(&mut self, now: Instant) -> bool {
        let (lost, elapsed) = self.look(now);
        if is_preemption(lost, elapsed) {
            self.pause.begin(lost, now);
        }
        !self.is_present()
    }

    /// Has a member that takes no part come back now. Whether it took none.
    pub fn recall(&mut self) -> bool {
        let absent = self.pause.until.take().is_some();
        if absent {
            self.look(Instant::now());
        }
        absent
    }

    /// Whether a member that takes no part comes back.
    pub fn returns(&mut self, now: Instant) -> bool {
        let returns = self.pause.ends(now);
        if returns {
            // What it waited for while it had nothing to do is not a loss.
            self.look(now);
        }
        returns
    }
}

fn is_preemption(lost: Duration, elapsed: Duration) -> bool {
    lost >= SHORTEST && lost * SMALLEST_PART >= elapsed
}

/// When a member pauses: as long as it has held up the others, and twice as long each time that this happens again soon.
#[derive(Debug, Default)]
struct Pause {
    length: Duration,
    until: Option<Instant>,
    returned: Option<Instant>,
}

impl Pause {
    fn begin(&mut self, lost: Duration, now: Instant) {
        let again = self.returned.is_some_and(|returned| now - returned < 4 * self.length);
        self.length = if again { 2 * self.length } else { lost }.min(LONGEST);
        self.until = Some(now + self.length);
    }

    fn ends(&mut self, now: Instant) -> bool {
        let ends = self.until.is_some_and(|until| until <= now);
        if ends {
            self.until = None;
            self.returned = Some(now);
        }
        ends
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_time_slice_is_a_preemption_and_many_wakings_are_none() {
        assert!(is_preemption(3 * MS, 6 * MS));
        assert!(!is_preemption(MS / 2, MS), "too short");
        assert!(!is_preemption(3 * MS, 100 * MS), "too little of the time");
    }

    #[test]
    fn a_pause_is_as_long_as_the_loss_and_doubles_while_it_goes_on() {
        let begin = Instant::now();
        let mut pause = Pause::default();
        let mut now = begin;
        let mut lengths = Vec::new();
        for _ in 0..9 {
            pause.begin(3 * MS, now);
            let until = pause.until.unwrap();
            assert!(!pause.ends(now));
            assert!(pause.ends(until));
            lengths.push((until - now).as_millis());
            now = until + 4 * MS;
        }
        assert_eq!(lengths, [3, 6, 12, 24, 48, 96, 192, 384, 500]);
        // After a long time without a loss it is a first one again.
        now += 4 * LONGEST;
        pause.begin(2 * MS, now);
        assert_eq!(pause.until, Some(now + 2 * MS));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_run_delay_of_a_thread_grows_and_one_that_does_not_exist_has_none() {
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        let delay = RunDelay::of_thread(u32::try_from(thread).unwrap());
        let before = delay.read().expect("this system counts the time in the run queue");
        std::thread::yield_now();
        assert!(delay.read().unwrap() >= before);
        let mut nobody = Attendance::new(RunDelay::of_thread(u32::MAX));
        assert!(!nobody.leaves(Instant::now()) && nobody.is_present());
    }
}
