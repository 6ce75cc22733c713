//! A client of live servers: planned requests go out on time, and every event of the answers is stamped.
//!
//! Enters: planned requests, a URL, and what the server understands ([`dialect`]). Leaves: a record per request, token gaps, and what
//! went wrong, from which `hbmark_traffic::latency` makes the same result as of a run in this process.
//!
//! ```text
//! PlannedRequest → prompt, body → run (one thread: connections, HTTP, stamps) → sse → event → tokens → records
//!                                                                   metrics ─┘ (the server's counters, before and after)
//! ```

pub mod accuracy;
pub mod answer;
mod body;
mod clock;
mod connection;
pub mod dialect;
mod event;
pub mod exchange;
mod fetch;
pub mod header;
mod http;
pub mod metrics;
pub mod mock;
pub mod point;
pub mod probe;
pub mod run;
mod sse;
pub mod target;
mod thinned;
mod tokens;
