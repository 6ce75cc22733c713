//! One point of load.

use serde::{Deserialize, Serialize};

use super::adapters::AdapterCost;
use super::arrivals::Arrivals;
use super::latency::{GateName, ServeResult, Validity};
use super::live::LiveResult;
use super::requests::SavedOutcome;
use super::residuals::Residuals;
use super::scheduler::SchedulerConfig;
use crate::result::{Cause, Limits};
use crate::stats::mean;

/// How much is offered.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
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

/// The ratio of the engine's step times after a point to before it beyond which, either way, the machine was not the same meanwhile.
pub const STEADY_DRIFT: std::ops::RangeInclusive<f64> = 0.95..=1.05;

/// A point and its result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
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

impl Point {
    /// Whether the run shows that the system keeps up with what is offered. Null where it is too short to tell, or invalid, and in results that
    /// kept no such check of an open loop; a closed loop sends no more than is done.
    pub fn keeps_up(&self) -> Option<bool> {
        let result = self.result.as_ref()?;
        let gate = result.gates.iter().find(|gate| gate.name == GateName::KeepsUp);
        match (result.validity, gate) {
            (Validity::Saturated, _) => Some(false),
            (Validity::Invalid, _) => None,
            (Validity::Valid, Some(gate)) => gate.passed,
            (Validity::Valid, None) => matches!(self.offered, Offered::Concurrency(_)).then_some(true),
        }
    }

    /// Whether the run shows that the load is held: valid, within every objective, and the system keeps up.
    pub fn held(&self) -> bool {
        self.keeps_up() == Some(true)
            && self.result.as_ref().is_some_and(|result| result.within_objectives().0 == Some(true))
    }

    /// Tokens of a prompt on average: as a live server counts them, where it does, and otherwise as planned.
    pub fn prompt_tokens(&self) -> f64 {
        let ratio = self.live.as_ref().and_then(|live| live.prompt_tokens_ratio);
        self.mean_prompt_tokens * ratio.unwrap_or(1.0)
    }

    /// Tokens of an output on average: of the requests that were served where they are kept, of a live server by its rates, otherwise as planned.
    pub fn output_tokens(&self) -> f64 {
        let Some(result) = &self.result else { return self.mean_output_tokens };
        let made = result.requests.as_ref().map(|requests| {
            let served = requests
                .outcome
                .iter()
                .zip(&requests.output_tokens)
                .filter(|(outcome, _)| **outcome == SavedOutcome::Served);
            mean(&served.map(|(_, tokens)| *tokens as f64).collect::<Vec<_>>())
        });
        let by_rates = self.live.is_some().then(|| result.output_tokens_per_s / result.served_per_s);
        made.or(by_rates)
            .filter(|tokens| tokens.is_finite() && *tokens > 0.0)
            .unwrap_or(self.mean_output_tokens)
    }

    /// What disturbed the machine while the point was measured; empty where nothing did, or nobody looked.
    pub fn disturbances(&self) -> Vec<String> {
        let foreign = self.foreign_load();
        let foreign = foreign.map(|cores| format!("other processes kept {cores:.1} cores busy over the run"));
        foreign.into_iter().chain(self.drifted()).collect()
    }

    /// The cores that other processes kept busy, where these are more than may be.
    pub fn foreign_load(&self) -> Option<f64> {
        let result = self.result.as_ref()?;
        let allowed = result.foreign_cores_allowed.unwrap_or(Limits::default().foreign_cores);
        result.foreign_cores.filter(|cores| *cores > allowed)
    }

    /// How the engine's own steps differ between before and after the point, where they do.
    pub fn drifted(&self) -> Option<String> {
        let drift = self.drift.filter(|drift| !STEADY_DRIFT.contains(drift))?;
        let (percent, than) = ((drift - 1.0).abs() * 100.0, if drift > 1.0 { "more" } else { "less" });
        Some(format!("the engine's own steps took {percent:.1} % {than} time after the run than before it"))
    }
}
