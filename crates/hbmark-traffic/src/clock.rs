//! The time of a serving loop: given from outside, or virtual.

use std::cell::Cell;
use std::rc::Rc;

use hbmark_core::units::Nanos;

/// A clock that can be read and waited on.
pub trait Clock {
    /// Time since some fixed moment.
    fn now(&self) -> Nanos;
    /// Lets time pass until a moment; returns at once when it has passed.
    fn wait_until(&mut self, moment: Nanos);
    /// Whether waiting costs nobody anything.
    fn is_virtual(&self) -> bool;
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

/// A clock that moves only when told to; clones share it.
#[derive(Debug, Clone, Default)]
pub struct VirtualClock(Rc<Cell<f64>>);

impl VirtualClock {
    /// The virtual time.
    #[must_use]
    pub fn now(&self) -> Nanos {
        Nanos(self.0.get())
    }
    /// Lets time pass.
    pub fn advance(&self, span: Nanos) {
        self.0.set(self.0.get() + span.0);
    }
}
