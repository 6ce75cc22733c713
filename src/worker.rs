//! Child processes that own the device: one layer for every kind of job.
//!
//! Enters: a configuration and orders of any type that serialises. Leaves: the answers of a worker process, or how it ended: a signal, an
//! exit code, a silence. Beside it the journal, to go on after a kill, and the faults that tests plant. What the job is, is not known here.

pub mod child;
pub(crate) mod fault_injection;
pub mod journal;
pub mod messages;
pub mod signals;
pub mod spawn;
