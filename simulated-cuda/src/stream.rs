//! Work in the order of streams.
//!
//! Enters: what a call of the driver or of one of its libraries asks for. Leaves: the same, done when somebody waits, in the order of its stream, or
//! recorded as a node of a graph while the stream is captured.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::sync::Arc;

use crate::clock::Demand;
use crate::machine;

/// A stream as callers hold it; null is the default stream.
pub type StreamHandle = *mut c_void;

/// What runs on the device. A graph runs it once a launch.
pub type Run = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;

/// Runs on what was begun; whether it is at its end, or waits for another device. It keeps the values of the arguments.
pub type Finish = Box<dyn FnMut() -> Result<bool, String> + Send>;

/// Begins a kernel in a slot, where the one before has ended or has not; none where it is at its end already.
pub type Begin = Arc<dyn Fn(u32, bool) -> Result<Option<Finish>, String> + Send + Sync>;

/// One piece of work of a stream.
#[derive(Clone)]
pub struct Work {
    /// The kernel's or function's name, for messages.
    pub name: String,
    /// What it asks of the device, where the caller knows; kernels are counted as they run.
    pub demand: Demand,
    /// The module of a kernel of the driver's, which must be loaded when it runs.
    pub module: Option<usize>,
    pub run: Run,
    /// Of a kernel: it can be left where it waits.
    pub begin: Option<Begin>,
    /// Whether that may be while the kernel before runs: programmatic dependent launch.
    pub dependent: bool,
}

impl Work {
    /// Work that is no kernel of the driver's and waits for nothing.
    #[must_use]
    pub fn new(name: &str, demand: Demand, run: Run) -> Self {
        Self { name: name.to_owned(), demand, module: None, run, begin: None, dependent: false }
    }
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").field("name", &self.name).field("demand", &self.demand).finish()
    }
}

/// Puts work on a stream. It runs when somebody waits for the stream; while the stream is captured it becomes a node of the graph.
///
/// Returns the `CUresult`: 0, or why the stream takes no work (an error that sticks, an invalid handle).
#[must_use]
pub fn enqueue(stream: StreamHandle, work: Work) -> c_int {
    machine::asked(|machine| machine.work(stream as usize, work.clone())).err().unwrap_or(0)
}
