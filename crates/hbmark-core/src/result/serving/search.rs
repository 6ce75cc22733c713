//! A search for the highest rate.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::slo::Slo;

/// A step of the search.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Attempt {
    /// `bracket`, `bisect`, `confirm`, `sustain`.
    pub stage: String,
    pub rate: f64,
    pub seed: u64,
    pub met: bool,
    /// What decided.
    pub why: String,
}

/// What was found.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
pub struct Search {
    pub slo: Slo,
    /// Null when not even the lowest rate holds.
    pub max_rate: Option<f64>,
    pub confirmed: bool,
    pub attempts: Vec<Attempt>,
    /// What a longer run at the rate found gave.
    pub sustained: Option<bool>,
    pub note: String,
}

impl Search {
    /// Ends at a point that has no result: whether its rate holds is not known, and a search that took it for either would mislead.
    #[must_use]
    pub fn ended_early(mut self, held: Option<f64>) -> Self {
        let (stage, rate, why) = self
            .attempts
            .last()
            .map_or(("", 0.0, ""), |last| (last.stage.as_str(), last.rate, last.why.as_str()));
        let held = held.map_or_else(
            || "no rate had held before".to_owned(),
            |rate| format!("{rate:.3} per second had held in a single run and is not confirmed"),
        );
        self.note = format!("the search ended early, at `{stage}` of {rate:.3} per second: {why}; {held}");
        self
    }
}
