//! What a diagnosis of a serving run needs.

use serde::{Deserialize, Serialize};

/// What a run showed beside its latencies.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Evidence {
    /// Null where no prompt is long.
    pub long_prompts: Option<LongPrompts>,
    pub stalls: Stalls,
    /// Null with fewer than fifty measured requests.
    pub start: Option<Start>,
    /// Output tokens of the served requests, as planned and as made.
    pub planned_output_tokens: u64,
    pub output_tokens: u64,
    /// Measured requests that were preempted.
    pub preempted_requests: usize,
    /// Of the measured requests' time in the system, the share spent waiting to be started again.
    pub preempted_share: f64,
}

/// Short requests with and without a long prompt computed before their first token.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct LongPrompts {
    /// Prompt tokens from which one is long: four times the median.
    pub from_tokens: usize,
    pub long: usize,
    /// Short requests that waited while a long prompt was computed, and those that did not.
    pub beside: usize,
    pub alone: usize,
    pub ttft_p50_beside_ns: Option<f64>,
    pub ttft_p50_alone_ns: Option<f64>,
    /// Of the TTFT of those beside, the share that passed in steps that computed long prompts.
    pub share_in_long_steps: f64,
}

/// Steps that took many times as long as others of their size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Stalls {
    pub count: usize,
    pub longest_ns: f64,
    pub total_ns: f64,
    /// The slowest hundredth of the measured requests, by TTFT, and those of them that were in the system while a step stalled.
    pub slowest: usize,
    pub slowest_in_stalls: usize,
}

/// The first tenth of the measured requests against the others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Start {
    pub first: usize,
    pub ttft_p50_first_ns: Option<f64>,
    pub ttft_p50_rest_ns: Option<f64>,
    /// How long the steps of the first tenth took beside later ones of their size, at the median.
    pub step_ratio: Option<f64>,
    /// Share of the prompt tokens that were found in the cache.
    pub hit_share_first: f64,
    pub hit_share_rest: f64,
}
