//! Wakes a poll at a time finer than its own milliseconds.

use std::io;
use std::time::Duration;

use mio::{Interest, Poll, Token};

#[derive(Debug)]
pub(super) struct Alarm {
    timer: std::os::fd::OwnedFd,
    set_ns: u64,
}

impl Alarm {
    pub(super) fn new(poll: &Poll, token: Token) -> io::Result<Self> {
        use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};
        use std::os::fd::AsRawFd;
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        poll.registry().register(&mut mio::unix::SourceFd(&timer.as_raw_fd()), token, Interest::READABLE)?;
        Ok(Self { timer, set_ns: 0 })
    }
    /// Rings at this time. Says how long the poll may wait.
    pub(super) fn set(&mut self, due_ns: u64) -> Option<Duration> {
        use rustix::time::{Itimerspec, TimerfdTimerFlags, Timespec, timerfd_settime};
        if self.set_ns == due_ns {
            return None;
        }
        let whole = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let due = Timespec { tv_sec: whole(due_ns / 1_000_000_000), tv_nsec: whole(due_ns % 1_000_000_000) };
        let once = Itimerspec { it_interval: zero, it_value: due };
        match timerfd_settime(&self.timer, TimerfdTimerFlags::ABSTIME, &once) {
            Ok(_) => {
                self.set_ns = due_ns;
                None
            }
            Err(_) => Some(Duration::from_millis(1)),
        }
    }
    /// The next edge comes from the next setting; the count of rings is not read.
    pub(super) fn rang(&mut self) {
        self.set_ns = 0;
    }
}
