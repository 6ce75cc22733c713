//! Measuring: the protocol over a session, the probes of a device's ceilings, telemetry around the blocks.
//!
//! Enters: a session and ordered cells. Leaves: raw samples with the conditions they were taken under. The only statistics are
//! those of the stopping rule.

pub mod block;
pub mod canary;
pub(crate) mod ceilings;
pub(crate) mod monitor;
pub(crate) mod operations;
pub(crate) mod probe;
pub mod protocol;
pub mod quality;
pub(crate) mod timer_checks;
pub(crate) mod visit;
pub(crate) mod weight_check;
