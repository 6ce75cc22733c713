//! The clock of a serving loop: real or virtual.

use std::cell::Cell;
use std::rc::Rc;

use hbmark_core::units::Nanos;

/// A clock that can be read and waited on.
pub trait Clock {
    /// Time since some fixed moment.
    fn now(&self) -> Nanos;
    /// Waits until a moment; returns at once when it has passed.
    fn wait_until(&mut self, moment: Nanos);
    /// Whether waiting takes no real time.
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

/// A clock that advances only on request; clones share it.
#[derive(Debug, Clone, Default)]
pub struct VirtualClock(Rc<Cell<f64>>);

impl VirtualClock {
    /// The virtual time.
    pub fn now(&self) -> Nanos {
        Nanos(self.0.get())
    }
    /// Advances the time.
    pub fn advance(&self, span: Nanos) {
        self.0.set(self.0.get() + span.0);
    }
}
