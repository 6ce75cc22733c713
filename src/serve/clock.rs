//! The host's clock, for serving loops in real time.

use std::time::{Duration, Instant};

use hbmark_core::units::Nanos;
use hbmark_traffic::clock::Clock;

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
