//! One point of load.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::adapters::AdapterCost;
use super::arrivals::Arrivals;
use super::latency::ServeResult;
use super::live::LiveResult;
use super::residuals::Residuals;
use super::scheduler::SchedulerConfig;
use crate::result::Cause;

/// How much is offered.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Offered {
    /// Requests per second, whatever the system does.
    Rate(f64),
    /// All at once.
    AtOnce,
    /// So many in the system at any time: a closed loop.
    Concurrency(usize),
    /// As recorded.
    AsRecorded,
}

/// The cost of constraining outputs to a grammar.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StructuredCost {
    pub grammar: String,
    /// Share of the requests that was asked for.
    pub share: f64,
    /// Outputs begun under the grammar, and those that came to its end; others were cut at their planned length or not done.
    pub started: usize,
    pub complete: usize,
    /// Tokens chosen under a mask.
    pub tokens: usize,
    /// Tokens that a mask allowed, on average.
    pub mean_allowed: Option<f64>,
    /// Time of finding and of applying a mask, per token chosen under one.
    pub mask_ns_per_token: Option<f64>,
    pub mask_apply_ns_per_token: Option<f64>,
}

/// A point and its result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Point {
    pub label: String,
    pub offered: Offered,
    /// Absent where a trace gives the gaps, scaled to the rate that was asked for.
    pub arrivals: Option<Arrivals>,
    pub seed: u64,
    pub cold: bool,
    pub mean_prompt_tokens: f64,
    pub mean_output_tokens: f64,
    /// Null for a live server, which has its own.
    pub scheduler: Option<SchedulerConfig>,
    /// Of an infinite cache.
    pub ideal_hit_rate: Option<f64>,
    /// Null for a point that was not run, for the given reason.
    pub result: Option<ServeResult>,
    pub not_run: Option<Cause>,
    /// The same point on a virtual clock, with step times taken from this engine just before and just after.
    pub predicted: Option<ServeResult>,
    #[serde(default)]
    pub adapters: Option<AdapterCost>,
    #[serde(default)]
    pub structured: Option<StructuredCost>,
    /// The ratio of those step times after the point to before: the drift of the machine.
    #[serde(default)]
    pub drift: Option<f64>,
    /// The steps of the run against the model of them that the prediction goes by.
    #[serde(default)]
    pub residuals: Option<Residuals>,
    /// Of a live server.
    #[serde(default)]
    pub live: Option<LiveResult>,
}
