//! Progress of a job, to be shown or sent on.

use hbmark_core::result::Cause;
use hbmark_core::units::Bytes;

/// Receives the progress of a job.
pub trait Observer {
    /// A stage begins: loading, probing, the next point.
    fn stage(&mut self, _what: &str) {}
    /// Bytes of weights loaded so far. Called once a tensor; the last call may fall short of the total, or pass it, where an engine
    /// stores some tensors in another dtype than planned.
    fn loaded(&mut self, _done: Bytes, _total: Bytes) {}
    /// Visits of cells or requests of a point done so far; the message is formatted only where it is shown.
    fn progress(&mut self, _done: usize, _total: usize, _message: &mut dyn FnMut() -> String) {}
    /// A block was rejected.
    fn rejected(&mut self, _cause: &Cause) {}
    /// Work that is done and work that is left, at the least and at the most, in units of about one second.
    fn remaining(&mut self, _done: f64, _least: f64, _most: f64) {}
    /// The device works; the next call is predicted within so many seconds, where that can be predicted.
    fn busy(&mut self, _seconds: Option<f64>) {}
}

/// Ignores progress.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoopObserver;

impl Observer for NoopObserver {}
