//! Marks on the stream that runs the steps, and the times between them.
//!
//! Enters: requests for a mark between enqueued steps. Leaves: the times of all marks, read later in one go, so that
//! reading never disturbs what is timed. On a GPU a mark is a CUDA event, on a CPU a reading of the monotonic clock, in
//! the scripted engine a reading of the virtual clock. Each engine owns its stream, and so its timeline;
//! the protocol uses the trait.

use super::EngineError;
use hbmark_core::units::Nanos;

/// Marks on a stream or a clock.
pub trait Timeline {
    /// Reserves so many marks, so that setting one allocates nothing.
    fn reserve(&mut self, _marks: usize) {}
    /// Sets a mark after everything enqueued so far, without waiting.
    ///
    /// # Errors
    /// When the device fails.
    fn mark(&mut self) -> Result<(), EngineError>;
    /// Waits for the device and appends to the caller's buffer the time of every mark since the last call, relative to the first; then
    /// removes them all.
    ///
    /// # Errors
    /// When the device fails.
    fn drain_into(&mut self, times: &mut Vec<Nanos>) -> Result<(), EngineError>;
    /// The same in a new buffer, outside of timed code.
    ///
    /// # Errors
    /// As [`drain_into`](Self::drain_into).
    fn drain(&mut self) -> Result<Vec<Nanos>, EngineError> {
        let mut times = Vec::new();
        self.drain_into(&mut times)?;
        Ok(times)
    }
    /// The host's clock (virtual in the scripted engine), for intervals as a client sees them.
    fn host_now(&self) -> Nanos;
}

/// The monotonic clock of the host, for engines whose steps are synchronous.
#[derive(Debug)]
pub struct MonotonicTimeline {
    origin: std::time::Instant,
    marks: Vec<Nanos>,
}

impl Default for MonotonicTimeline {
    fn default() -> Self {
        Self { origin: std::time::Instant::now(), marks: Vec::with_capacity(4096) }
    }
}

impl Timeline for MonotonicTimeline {
    fn reserve(&mut self, marks: usize) {
        self.marks.reserve(marks);
    }
    fn mark(&mut self) -> Result<(), EngineError> {
        self.marks.push(self.host_now());
        Ok(())
    }
    fn drain_into(&mut self, times: &mut Vec<Nanos>) -> Result<(), EngineError> {
        let first = self.marks.first().map_or(0.0, |m| m.0);
        times.extend(self.marks.drain(..).map(|m| Nanos(m.0 - first)));
        Ok(())
    }
    fn host_now(&self) -> Nanos {
        self.origin.elapsed().into()
    }
}
