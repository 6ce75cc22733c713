//! Measuring: the protocol over a session, the probes of a device's ceilings, telemetry around the blocks.
//!
//! Enters: a session and ordered cells. Leaves: raw samples with the conditions they were taken under. The only statistics are
//! those of the stopping rule.

pub mod block;
pub mod canary;
pub mod ceilings;
pub mod monitor;
pub mod operations;
pub mod probe;
pub mod protocol;
pub mod quality;
pub mod timer_checks;
pub mod visit;
pub mod weight_check;
