//! What happened when, over a run.

use serde::{Deserialize, Serialize};

/// Spans of a timeline: as many as a plot of a thousand pixels can show apart.
pub const SPANS: usize = 120;

/// A run over time.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Timeline {
    /// The window over which rates are taken, since the run began.
    pub window_from_ns: f64,
    pub window_to_ns: f64,
    /// Length of a span; the first begins with the run.
    pub span_ns: f64,
    pub spans: Vec<Span>,
}

/// One span of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Span {
    /// Steps that ended in it.
    pub steps: usize,
    /// Requests in the batch and before it, over the span's time.
    pub running: f64,
    pub waiting: f64,
    /// Share of the KV blocks in use, over the span's time, and its largest value.
    pub kv_use: f64,
    pub max_kv_use: f64,
    /// Of the steps that ended in it.
    pub prompt_tokens: usize,
    pub output_tokens: usize,
    /// The longest of them; null where none ended.
    pub longest_step_ns: Option<f64>,
}

impl Span {
    /// Tokens of a step, on average; `None` where none ended.
    pub fn step_tokens(&self) -> Option<f64> {
        (self.steps > 0).then(|| (self.prompt_tokens + self.output_tokens) as f64 / self.steps as f64)
    }
}

impl Timeline {
    /// The spans with the moment each begins.
    pub fn at(&self) -> impl Iterator<Item = (f64, &Span)> {
        self.spans.iter().enumerate().map(|(index, span)| (index as f64 * self.span_ns, span))
    }
}
