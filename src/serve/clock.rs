//! The time of a serving loop: the host's, or a virtual one.

use std::time::{Duration, Instant};

use crate::engine::scripted::VirtualClock;
use crate::units::Nanos;

/// A clock that can be read and waited on.
pub trait Clock {
    /// Time since some fixed moment.
    fn now(&self) -> Nanos;
    /// Lets time pass until a moment; returns at once when it has passed.
    fn wait_until(&mut self, moment: Nanos);
    /// Whether waiting costs nobody anything.
    fn is_virtual(&self) -> bool;
}

/// The host's monotonic clock.
#[derive(Debug)]
pub struct HostClock(Instant);

impl Default for HostClock {
    fn default() -> Self {
        Self(Instant::now())
    }
}

/// The last stretch before a deadline is spun, because a sleep may end a scheduler tick late.
const SPIN: f64 = 200_000.0;

impl Clock for HostClock {
    fn now(&self) -> Nanos {
        self.0.elapsed().into()
    }
    fn wait_until(&mut self, moment: Nanos) {
        loop {
            let left = moment.0 - self.now().0;
            if left <= 0.0 {
                return;
            }
            if left > SPIN {
                std::thread::sleep(Duration::from_secs_f64((left - SPIN) / 1e9));
            } else {
                std::hint::spin_loop();
            }
        }
    }
    fn is_virtual(&self) -> bool {
        false
    }
}

impl Clock for VirtualClock {
    fn now(&self) -> Nanos {
        Self::now(self)
    }
    fn wait_until(&mut self, moment: Nanos) {
        let left = moment.0 - Self::now(self).0;
        if left > 0.0 {
            self.advance(Nanos(left));
        }
    }
    fn is_virtual(&self) -> bool {
        true
    }
}
