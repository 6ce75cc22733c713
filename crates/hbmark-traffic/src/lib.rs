//! Traffic and scheduling: requests, arrivals, batches, and latencies.
//!
//! Enters: a workload or a trace, a rate, the scheduler's settings, and an executor of steps. Leaves: a
//! [`ServeResult`](hbmark_core::result::serving::ServeResult) per point of load.
//!
//! ```text
//! Workload | Trace → Planned (arrivals, prompts) → run: Scheduler × Executor × Clock → Run (records, steps) → ServeResult
//! ```
//!
//! Engines are behind [`executor::Executor`], time behind [`clock::Clock`].

pub mod adapters;
pub mod arrivals;
pub mod block_pool;
pub mod clock;
pub mod dataset;
pub mod evidence;
pub mod executor;
pub mod gates;
pub mod latency;
pub mod matrix;
pub mod occupancy;
pub mod order;
pub mod point;
pub mod requests;
pub mod residuals;
pub mod sampler;
pub mod scheduler;
pub mod search;
pub mod serving_loop;
pub mod stability;
pub mod step_model;
#[cfg(test)]
mod test_queues;
pub mod timeline;
pub mod trace;
pub mod workload;
