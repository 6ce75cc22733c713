//! The steps of a run against the step-time model.

use serde::{Deserialize, Serialize};

/// Steps of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Residual {
    pub steps: usize,
    /// Measured over predicted time: the median over the steps.
    pub median_ratio: f64,
    /// The same for the sum of all steps.
    pub total_ratio: f64,
}

/// By kinds of steps; a kind that hardly happened is absent.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Residuals {
    /// Decodes alone.
    pub decode: Option<Residual>,
    /// Decodes right after a prefill.
    pub decode_behind_prefill: Option<Residual>,
    /// Prefills alone.
    pub prefill: Option<Residual>,
    /// Decodes and prefills in one step.
    pub mixed: Option<Residual>,
}

impl Residuals {
    /// The kinds and their residuals, those that are known.
    pub fn kinds(&self) -> impl Iterator<Item = (&'static str, Residual)> {
        let kinds = [
            ("decode", self.decode),
            ("decode behind a prefill", self.decode_behind_prefill),
            ("prefill", self.prefill),
            ("mixed", self.mixed),
        ];
        kinds.into_iter().filter_map(|(kind, residual)| Some((kind, residual?)))
    }
}
