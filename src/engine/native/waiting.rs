//! A word that one thread changes and others wait for.
//!
//! Enters: values. Leaves: waiters that go on once the word has another one. They spin first, since work of other threads of a step ends within
//! microseconds; then they sleep until they are woken. A waiter that lost its processor to another program so leaves that program the time which the
//! thread it waits for needs, and is the first to go on behind it; one that went on spinning, or yielded, would lose whole time slices.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How long a waiter spins: well beyond what operations on the same rows differ by, and far below a time slice.
const SPIN: Duration = Duration::from_micros(100);

/// Turns of a spinning waiter between looks at the clock.
const TURNS: u32 = 64;

/// The word, on a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct WaitWord {
    value: AtomicU32,
    sleeping: AtomicU32,
}

impl WaitWord {
    /// Its value. What was written before it was set is visible.
    #[must_use]
    pub fn get(&self) -> u32 {
        self.value.load(Ordering::Acquire)
    }

    /// Sets it, and wakes whoever sleeps.
    pub fn set(&self, value: u32) {
        // Sequentially consistent with what a waiter does before it sleeps: either it sees this value, or this sees it sleeping.
        self.value.store(value, Ordering::SeqCst);
        self.wake();
    }

    /// One less; wakes whoever sleeps where that is 0.
    pub fn count_down(&self) {
        if self.value.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.wake();
        }
    }

    /// Waits until it is another value than `old`, and returns that.
    pub fn await_change(&self, old: u32) -> u32 {
        let (mut turns, mut since) = (0u32, None);
        loop {
            let now = self.get();
            if now != old {
                return now;
            }
            std::hint::spin_loop();
            turns += 1;
            if turns.is_multiple_of(TURNS) && since.get_or_insert_with(Instant::now).elapsed() >= SPIN {
                break;
            }
        }
        loop {
            self.sleeping.fetch_add(1, Ordering::SeqCst);
            if self.value.load(Ordering::SeqCst) == old {
                sleep(&self.value, old);
            }
            self.sleeping.fetch_sub(1, Ordering::SeqCst);
            let now = self.get();
            if now != old {
                return now;
            }
        }
    }

    /// Waits until it is `wanted`, whatever it is until then.
    pub fn await_value(&self, wanted: u32) {
        let mut now = self.get();
        while now != wanted {
            now = self.await_change(now);
        }
    }

    /// Waiters that sleep.
    #[must_use]
    pub fn sleeping(&self) -> u32 {
        self.sleeping.load(Ordering::SeqCst)
    }

    fn wake(&self) {
        if self.sleeping() > 0 {
            wake_all(&self.value);
        }
    }
}

/// Sleeps while the word is `old`, or returns at once or early.
#[cfg(target_os = "linux")]
fn sleep(word: &AtomicU32, old: u32) {
    use rustix::thread::futex;
    // Whatever it returned for, the caller looks again.
    let _ = futex::wait(word, futex::Flags::PRIVATE, old, None);
}

#[cfg(target_os = "linux")]
fn wake_all(word: &AtomicU32) {
    use rustix::thread::futex;
    let _ = futex::wake(word, futex::Flags::PRIVATE, i32::MAX.unsigned_abs());
}

/// Without a futex: looks again a little later.
#[cfg(not(target_os = "linux"))]
fn sleep(_: &AtomicU32, _: u32) {
    std::thread::sleep(Duration::from_micros(50));
}

#[cfg(not(target_os = "linux"))]
fn wake_all(_: &AtomicU32) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_waiter_sees_every_value_asleep_or_not() {
        const VALUES: u32 = 200;
        let (word, seen) = (WaitWord::default(), WaitWord::default());
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let mut last = 0;
                    while last < VALUES {
                        let now = word.await_change(last);
                        assert_eq!(now, last + 1);
                        last = now;
                        seen.count_down();
                    }
                });
            }
            for value in 1..=VALUES {
                seen.set(3);
                if value % 20 == 0 {
                    // So that they sleep.
                    while word.sleeping() < 3 {
                        std::thread::yield_now();
                    }
                }
                word.set(value);
                seen.await_value(0);
            }
        });
    }
}
