//! Every measured request.

use serde::{Deserialize, Serialize};

use super::slo::SloMetric;
use crate::stats::percentile;

/// Measured requests in the order of their arrival. Times are whole nanoseconds since the start of the run, null for what never happened.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Requests {
    /// Scheduled, whenever the loop came to it.
    pub arrival_ns: Vec<u64>,
    /// When the client sent it, at the arrival or later; empty where no client did, and in results of before.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sent_ns: Vec<Option<u64>>,
    /// First scheduled for a step.
    pub started_ns: Vec<Option<u64>>,
    pub first_token_ns: Vec<Option<u64>>,
    pub last_token_ns: Vec<Option<u64>>,
    pub prompt_tokens: Vec<usize>,
    pub output_tokens: Vec<usize>,
    /// Prompt tokens that were found in the cache.
    pub cached_tokens: Vec<usize>,
    /// `served`, `unfinished`, or why it was rejected.
    #[cfg_attr(test, schemars(with = "Vec<String>"))]
    #[serde(alias = "fate")]
    pub outcome: Vec<SavedOutcome>,
}

/// How a request ended. In files it is one word.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum SavedOutcome {
    Served,
    /// On its way when the run ended.
    Unfinished,
    /// Rejected or failed, for this reason: `queue_full`, `status_503`.
    NotServed(String),
}

const SERVED: &str = "served";
const UNFINISHED: &str = "unfinished";

impl From<String> for SavedOutcome {
    fn from(word: String) -> Self {
        match word.as_str() {
            SERVED => Self::Served,
            UNFINISHED => Self::Unfinished,
            _ => Self::NotServed(word),
        }
    }
}

impl From<SavedOutcome> for String {
    fn from(outcome: SavedOutcome) -> Self {
        match outcome {
            SavedOutcome::Served => SERVED.to_owned(),
            SavedOutcome::Unfinished => UNFINISHED.to_owned(),
            SavedOutcome::NotServed(reason) => reason,
        }
    }
}

/// Share of the measured requests that have had their first token when the span of throughput ends.
const BEGUN: f64 = 0.95;

/// The end of the span over which the throughput of an open loop is taken: the last arrival. An overloaded system has served few of its
/// requests by then: there the span goes on until nearly all have had their first token, and the batch begins to empty.
pub fn throughput_end(last_arrival: f64, first_tokens: impl Iterator<Item = f64>) -> f64 {
    let mut begun: Vec<f64> = first_tokens.collect();
    begun.sort_by(f64::total_cmp);
    if begun.is_empty() { last_arrival } else { last_arrival.max(percentile(&begun, BEGUN)) }
}

impl Requests {
    /// A latency of a request, by the definitions of the serving loop; null where it does not exist.
    pub fn latency(&self, i: usize, metric: SloMetric) -> Option<f64> {
        self.latency_from(i, Some(self.arrival_ns[i]), metric)
    }

    /// The same from when a client sent it, as clients that know no schedule count; from the arrival where no client did.
    pub fn latency_from_sending(&self, i: usize, metric: SloMetric) -> Option<f64> {
        self.latency_from(i, self.sent_ns.get(i).copied().unwrap_or(Some(self.arrival_ns[i])), metric)
    }

    fn latency_from(&self, i: usize, begin: Option<u64>, metric: SloMetric) -> Option<f64> {
        let since = |from: Option<u64>, to: Option<u64>| match (from, to) {
            (Some(from), Some(to)) => to.saturating_sub(from) as f64,
            _ => f64::INFINITY,
        };
        let outcome = &self.outcome[i];
        match metric {
            // What is on its way at the end has had its first token.
            SloMetric::Ttft if matches!(outcome, SavedOutcome::Served | SavedOutcome::Unfinished) => {
                Some(since(begin, self.first_token_ns[i]))
            }
            SloMetric::E2e if *outcome == SavedOutcome::Served => Some(since(begin, self.last_token_ns[i])),
            SloMetric::Queue => Some(since(begin, self.started_ns[i])),
            SloMetric::Tpot if *outcome == SavedOutcome::Served => (self.output_tokens[i] > 1).then(|| {
                since(self.first_token_ns[i], self.last_token_ns[i]) / (self.output_tokens[i] - 1) as f64
            }),
            SloMetric::Ttft | SloMetric::E2e | SloMetric::Tpot => Some(f64::INFINITY),
        }
    }

    /// The requests that had the server to themselves: all before them were done when they came, and none came until their last token.
    pub fn alone(&self) -> Vec<usize> {
        let end = |i: usize| self.last_token_ns[i].unwrap_or(u64::MAX);
        // Requests of the warm-up may be in the system with the first one.
        let mut others = u64::MAX;
        let mut alone = Vec::new();
        for (i, arrival) in self.arrival_ns.iter().enumerate() {
            let next = self.arrival_ns.get(i + 1).copied();
            if *arrival >= others && next.is_some_and(|next| next >= end(i)) {
                alone.push(i);
            }
            others = if i == 0 { end(i) } else { others.max(end(i)) };
        }
        alone
    }
}
