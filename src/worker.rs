//! Jobs of requests and responses: in this process or in a child process that owns the device, observed, recorded and resumed.
//!
//! Enters: a `Job` with its requests. Leaves: the responses of a worker, or how it was lost: a signal, an exit code, a silence.
//! Beside it the journal, to resume after a kill, and planted faults for tests. What the job measures is not known here.

pub mod child;
pub(crate) mod fault_injection;
pub(crate) mod job;
pub(crate) mod journal;
pub(crate) mod journaled;
pub(crate) mod messages;
pub(crate) mod observer;
pub mod signals;
pub(crate) mod spawn;
pub(crate) mod supervisor;

pub use job::{InProcess, Worker};
pub use journaled::JournaledWorker;
pub use observer::{NoopObserver, Observer};
pub use supervisor::Supervisor;
