//! A search for the highest rate.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::slo::Slo;
use crate::units::PerSecond;

/// What a step of the search is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum SearchStage {
    /// Doubling or halving until a rate that holds and one that fails are known.
    Bracket,
    /// Between the two.
    Bisect,
    /// Around the rate found, with fresh seeds.
    Confirm,
    /// The fresh seeds together, in results of before.
    Agree,
    /// A longer run at the rate found.
    Sustain,
}

impl fmt::Display for SearchStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bracket => "bracket",
            Self::Bisect => "bisect",
            Self::Confirm => "confirm",
            Self::Agree => "agree",
            Self::Sustain => "sustain",
        })
    }
}

/// A step of the search.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Attempt {
    pub stage: SearchStage,
    pub rate: f64,
    pub seed: u64,
    /// Null where the run could not tell.
    pub met: Option<bool>,
    /// What decided.
    pub why: String,
}

/// What was found.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Search {
    pub slo: Slo,
    /// The median of the rates found with different seeds, lowered until a longer run held it; null where none did.
    pub max_rate: Option<f64>,
    /// The highest rate that held with each seed; empty in results of before.
    #[serde(default)]
    pub rate_by_seed: Vec<f64>,
    pub confirmed: bool,
    pub attempts: Vec<Attempt>,
    /// What a longer run at the rate found gave.
    pub sustained: Option<bool>,
    pub note: String,
}

impl Search {
    /// The lowest and the highest of the rates found with different seeds.
    pub fn range(&self) -> Option<(f64, f64)> {
        let low = self.rate_by_seed.iter().copied().reduce(f64::min)?;
        let high = self.rate_by_seed.iter().copied().reduce(f64::max)?;
        Some((low, high))
    }

    /// The median of the rates found with different seeds.
    pub fn median(&self) -> Option<f64> {
        crate::stats::known_median(&self.rate_by_seed)
    }

    /// What agreed on the rate found beside the runs that found it; `None` where nothing did.
    pub fn confirmed_by(&self) -> Option<&'static str> {
        let is_of_fresh_seeds =
            |tried: &Attempt| matches!(tried.stage, SearchStage::Confirm | SearchStage::Agree);
        match (self.attempts.iter().any(is_of_fresh_seeds), self.sustained == Some(true)) {
            _ if !self.confirmed => None,
            (true, true) => Some("fresh seeds and a longer run"),
            (true, false) => Some("fresh seeds"),
            (false, true) => Some("a longer run"),
            (false, false) => None,
        }
    }

    /// Whether the rate found is the highest that could be decided, and not the highest that holds: runs above it could not tell, and none failed.
    pub fn is_lower_bound(&self) -> bool {
        let Some(rate) = self.max_rate else { return false };
        let above = || self.attempts.iter().filter(|tried| tried.rate > rate * (1.0 + 1e-9));
        above().any(|tried| tried.met.is_none()) && above().all(|tried| tried.met != Some(false))
    }

    /// Ends at a point that has no result, or behind several that served nothing: whether a lower rate holds is not known, and a search that took
    /// it for either would mislead.
    pub fn ended_early(mut self, held: Option<f64>) -> Self {
        let Some(Attempt { stage, rate, why, .. }) = self.attempts.last() else { return self };
        let held = held.map_or_else(
            || "no rate had held before".to_owned(),
            |rate| format!("{} per second had held in a single run and is not confirmed", PerSecond(rate)),
        );
        let rate = PerSecond(*rate);
        self.note = format!("the search ended early, at `{stage}` of {rate} per second: {why}; {held}");
        self
    }
}
