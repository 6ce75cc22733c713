//! Serving in process: the same `Session` and `StepBatch` under continuous batching and open-loop traffic.
//!
//! Enters: a workload or a trace, a rate, a scheduler's knobs, and a session (or a model of its step times). Leaves: a
//! [`ServeResult`](latency::ServeResult) per point of load. The step benchmark isolates kernels; this isolates what is above them:
//! queueing, batching, prefix caching and host work show as times of their own.
//!
//! ```text
//! Workload | Trace → Planned (arrivals, prompts) → run: Scheduler × Executor × Clock → Run (records, steps) → ServeResult
//! ```
//!
//! It never imports the measurement protocol, and nothing in it prints.

pub mod adapters;
pub mod arrivals;
pub mod block_pool;
pub mod calibrate;
pub mod clock;
pub mod evidence;
pub mod execute;
pub mod gates;
pub mod latency;
pub mod matrix;
pub mod point;
pub mod requests;
pub mod residuals;
pub mod run;
pub mod sampler;
pub mod scheduler;
pub mod search;
pub mod slo;
pub mod step_model;
pub mod structured;
pub mod text;
pub mod timeline;
pub mod trace;
pub mod workload;

#[cfg(test)]
mod tests;
