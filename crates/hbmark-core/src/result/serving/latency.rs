//! The latencies, rates and gates of one point of load.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::evidence::Evidence;
use super::requests::Requests;
use super::scheduler::DraftCounts;
use super::slo::Clause;
use super::timeline::Timeline;
use crate::result::cause::joined;
use crate::result::{Cause, GpuEnvironment, SIMULATED_DEVICE};
use crate::stats::{CONFIDENCE, batch_error, mean, percentile_if_enough};
use crate::units::{Nanos, whole_count};

/// A number that may be infinite; JSON has no number for that, and it must not become null.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(untagged)]
pub enum Quantity {
    Finite(f64),
    Infinite(Infinite),
}

/// The word for infinity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Infinite {
    Infinite,
}

impl From<f64> for Quantity {
    fn from(value: f64) -> Self {
        if value.is_finite() { Self::Finite(value) } else { Self::Infinite(Infinite::Infinite) }
    }
}

impl Quantity {
    /// The number.
    pub fn value(self) -> f64 {
        match self {
            Self::Finite(value) => value,
            Self::Infinite(_) => f64::INFINITY,
        }
    }
}

/// One latency over all measured requests (or tokens), in nanoseconds. Percentiles are nearest-rank.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Quantiles {
    /// Values, infinite ones among them.
    pub n: usize,
    /// Requests that failed or did not finish.
    pub infinite: usize,
    /// Requests for which the quantity does not exist.
    pub missing: usize,
    pub mean: Option<Quantity>,
    pub p50: Option<Quantity>,
    pub p75: Option<Quantity>,
    pub p90: Option<Quantity>,
    pub p95: Option<Quantity>,
    /// Needs n ≥ 1,000.
    pub p99: Option<Quantity>,
    /// Needs n ≥ 10,000.
    pub p99_9: Option<Quantity>,
    pub max: Option<Quantity>,
}

/// A percentile, of one, and where it is kept.
pub type Level = (f64, fn(&Quantiles) -> Option<Quantity>);

/// The percentiles that are kept.
pub const LEVELS: [Level; 6] = [
    (0.5, |q| q.p50),
    (0.75, |q| q.p75),
    (0.9, |q| q.p90),
    (0.95, |q| q.p95),
    (0.99, |q| q.p99),
    (0.999, |q| q.p99_9),
];

impl Quantiles {
    /// Of values in any order; `None` among them is missing.
    pub fn of(values: impl Iterator<Item = Option<f64>>) -> Self {
        let mut missing = 0;
        let mut sorted: Vec<f64> = values
            .filter_map(|value| {
                missing += usize::from(value.is_none());
                value
            })
            .collect();
        sorted.sort_by(f64::total_cmp);
        let at = |p: f64| percentile_if_enough(&sorted, p).map(Quantity::from);
        Self {
            n: sorted.len(),
            infinite: sorted.iter().filter(|v| v.is_infinite()).count(),
            missing,
            mean: (!sorted.is_empty()).then(|| mean(&sorted).into()),
            p50: at(0.5),
            p75: at(0.75),
            p90: at(0.9),
            p95: at(0.95),
            p99: at(0.99),
            p99_9: at(0.999),
            max: sorted.last().map(|v| (*v).into()),
        }
    }
}

/// An objective and what was seen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ClauseResult {
    pub clause: Clause,
    /// The percentile, where the sample is large enough.
    pub observed: Option<Quantity>,
    /// Its 95 % interval, which allows for requests that depend on each other; null in results of before.
    #[serde(default)]
    pub low: Option<Quantity>,
    #[serde(default)]
    pub high: Option<Quantity>,
    /// Whether the interval is below the limit, or above it; null where the limit lies inside, or where the sample is too small.
    pub met: Option<bool>,
}

/// Runs of consecutive requests over which the share of those above a percentile varies as it does by chance and by bursts.
const BATCHES: usize = 20;

impl ClauseResult {
    /// Whether there are too few requests for an upper end of the interval.
    pub fn is_unbounded(&self) -> bool {
        self.high.is_some_and(|high| !high.value().is_finite())
    }

    /// Judges an objective by the interval of its percentile over values in the order of their requests.
    ///
    /// The interval is that of order statistics, but for requests that are not independent: how far the rank may be off comes from the
    /// variation, between consecutive batches of requests, of the share above the percentile (*batch means*), and is never less than for
    /// independent requests.
    pub fn of(values: &[f64], clause: Clause) -> Self {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let observed = percentile_if_enough(&sorted, clause.percentile);
        let interval = observed.and_then(|at| {
            let above: Vec<f64> = values.iter().map(|value| f64::from(u8::from(*value > at))).collect();
            let spread = batch_error(&above, BATCHES, CONFIDENCE)?;
            let rank = |p: f64| (p * sorted.len() as f64).ceil();
            let (low, high) = (rank(clause.percentile - spread), rank(clause.percentile + spread));
            let at = |rank: f64| sorted.get(whole_count(rank.max(1.0)) - 1).copied();
            // Beyond the largest value seen nothing is known.
            Some((at(low)?, at(high).unwrap_or(f64::INFINITY)))
        });
        let (low, high) = interval.unzip();
        let [observed, low, high] = [observed, low, high].map(|value| value.map(Quantity::from));
        Self { clause, observed, low, high, met: None }.with_limit(clause.limit_ns)
    }

    /// The same percentile against another limit.
    pub fn with_limit(self, limit_ns: f64) -> Self {
        let met = self.low.zip(self.high).and_then(|(low, high)| match limit_ns {
            limit if high.value() <= limit => Some(true),
            limit if low.value() > limit => Some(false),
            _ => None,
        });
        Self { clause: Clause { limit_ns, ..self.clause }, met, ..self }
    }

    /// Whether every objective was met: false if any failed, otherwise unknown if any is unknown.
    pub fn all_met(clauses: &[Self]) -> Option<bool> {
        let known = |met: bool| clauses.iter().filter(|c| c.met == Some(met)).count();
        match (known(false), known(true)) {
            (1.., _) => Some(false),
            (0, met) if met > 0 && met == clauses.len() => Some(true),
            _ => None,
        }
    }
}

/// What was seen, and between which bounds: `ttft_p95 ≤ 1.00 s: 0.94 s (0.90 s to 0.99 s)`.
impl fmt::Display for ClauseResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = |q: Quantity| {
            if q.value().is_finite() { Nanos(q.value()).to_string() } else { "infinite".to_owned() }
        };
        match self.observed {
            None => write!(f, "{}: unknown", self.clause),
            Some(observed) => {
                write!(f, "{}: {}", self.clause, time(observed))?;
                match self.low.zip(self.high) {
                    Some((low, high)) if high.value().is_finite() => {
                        write!(f, " ({} to {})", time(low), time(high))
                    }
                    Some((low, _)) => write!(f, " ({} or more)", time(low)),
                    None => Ok(()),
                }
            }
        }
    }
}

/// Which check of the run it is. The aliases are the names of schema version 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum GateName {
    /// Requests were queued when they were due: the harness itself was in time.
    #[serde(alias = "injection lag")]
    InjectionLag,
    /// As many requests were sent as were planned.
    #[serde(alias = "realised rate")]
    RealisedRate,
    /// Requests in the system are rate × time in system.
    #[serde(alias = "Little's law")]
    LittlesLaw,
    /// Every KV block in use is held by a running request.
    #[serde(alias = "KV books")]
    KvAccounting,
    /// Every request made as many tokens as was forced.
    #[serde(alias = "token count")]
    TokenCount,
    /// A measured request was served, and few failed for another reason than load.
    Served,
    /// There were requests to send until the measured ones were done.
    SustainedLoad,
    /// The engine did not fail.
    Engine,
    /// What the engine computes are numbers.
    Outputs,
    /// The device is real: times of a simulated one mean nothing.
    Device,
    /// The system is not saturated.
    #[serde(alias = "keeps up")]
    KeepsUp,
    /// The client read what a live server sent as soon as it came.
    ClientDelay,
    /// The client had a processor to itself.
    ClientProcessor,
}

impl fmt::Display for GateName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InjectionLag => "injection lag",
            Self::RealisedRate => "achieved rate",
            Self::LittlesLaw => "Little's law",
            Self::KvAccounting => "KV accounting",
            Self::TokenCount => "token count",
            Self::Served => "served",
            Self::SustainedLoad => "sustained load",
            Self::Engine => "engine",
            Self::Outputs => "outputs",
            Self::Device => "device",
            Self::KeepsUp => "keeps up",
            Self::ClientDelay => "client delay",
            Self::ClientProcessor => "client processor",
        })
    }
}

/// A check of the run itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Gate {
    pub name: GateName,
    /// Null where there was too little to judge.
    pub passed: Option<bool>,
    pub detail: String,
}

/// The validity of a point.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Validity {
    Valid,
    /// The system did not keep up: throughput is a result, latencies are not.
    Saturated,
    /// Something about the measurement itself is wrong.
    Invalid,
}

/// Where the time of the loop went, in nanoseconds over the whole run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Breakdown {
    pub enqueue_ns: f64,
    pub schedule_ns: f64,
    pub build_ns: f64,
    pub launch_ns: f64,
    pub device_ns: f64,
    pub sample_ns: f64,
    /// Computing and applying the masks of grammars.
    #[serde(default)]
    pub mask_ns: f64,
    #[serde(default)]
    pub mask_apply_ns: f64,
    pub detokenize_ns: f64,
    pub idle_ns: f64,
    /// The rest: keeping the records.
    pub other_ns: f64,
    pub wall_ns: f64,
    pub steps: usize,
}

/// The result of one point of load.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ServeResult {
    pub validity: Validity,
    /// Why it is not valid.
    pub reasons: Vec<Cause>,
    pub gates: Vec<Gate>,
    /// Requests whose times count: all of them, served or not.
    pub measured: usize,
    pub served: usize,
    pub unfinished: usize,
    /// By the reason's name.
    pub rejected: BTreeMap<String, usize>,
    pub warmup_requests: usize,
    pub cooldown_requests: usize,
    /// CPU cores that other processes kept busy over the run; not measured where time is virtual.
    #[serde(default)]
    pub foreign_cores: Option<f64>,
    /// As many may be busy without a disturbance; null for the fifth of a core that a CPU's steps allow.
    #[serde(default)]
    pub foreign_cores_allowed: Option<f64>,
    /// The span over which throughput is taken.
    pub window_s: f64,
    pub offered_per_s: Option<f64>,
    /// Each request counts by the share of its service that lies in the window.
    pub served_per_s: f64,
    /// Prompt tokens computed, without those found in the cache.
    pub prompt_tokens_per_s: f64,
    pub output_tokens_per_s: f64,
    /// Requests per second within every objective: `served_per_s` times the share of the served measured requests that met them.
    pub goodput_per_s: Option<f64>,
    /// Of the measured requests, whenever they were completed.
    pub goodput_share: Option<f64>,
    /// Requests without a TPOT, whose TPOT clause was dropped.
    pub tpot_clause_dropped: usize,
    pub slo: Vec<ClauseResult>,
    /// Null where a percentile is missing.
    pub slo_met: Option<bool>,
    /// Null where percentiles are not reported.
    pub ttft_ns: Option<Quantiles>,
    pub tpot_ns: Option<Quantiles>,
    pub itl_ns: Option<Quantiles>,
    pub e2e_ns: Option<Quantiles>,
    pub queue_ns: Option<Quantiles>,
    pub injection_lag_ns: Quantiles,
    /// Time averages over the window. A request waits from its scheduled arrival on, so that both together are rate × time in system.
    pub mean_running: f64,
    pub mean_waiting: f64,
    pub mean_kv_use: f64,
    pub max_kv_use: f64,
    /// Sequences and tokens of a step, on average.
    pub mean_batch: f64,
    pub mean_step_tokens: f64,
    pub median_step_ns: Option<f64>,
    pub median_schedule_ns: Option<f64>,
    pub preemptions: u64,
    /// Draft tokens of speculative decoding over the whole run; null without it.
    #[serde(default)]
    pub drafts: Option<DraftCounts>,
    pub prefix_hit_rate: Option<f64>,
    pub prefix_evictions: u64,
    /// Different adapters in a step, on average; null where no request has one.
    #[serde(default)]
    pub mean_adapters: Option<f64>,
    /// Tokens that the texts of the prompts encoded to, per token asked for; null without a tokenizer.
    #[serde(default)]
    pub encoded_per_asked: Option<f64>,
    pub breakdown: Breakdown,
    /// The timeline; null for a prediction beside a measurement, and in results of before.
    #[serde(default)]
    pub timeline: Option<Timeline>,
    /// Every measured request; null for a prediction beside a measurement, for more of them than a file should hold, and in results of
    /// before.
    #[serde(default)]
    pub requests: Option<Requests>,
    /// What a diagnosis needs; null in results of versions that did not keep it.
    #[serde(default)]
    pub evidence: Option<Evidence>,
}

/// Below so many measured requests trends, rates and Little's law are not judged.
pub const MIN_REQUESTS: usize = 100;

impl ServeResult {
    /// Whether the load was held: as [`Self::within_objectives`], and the run shows that the system keeps up.
    pub fn held(&self) -> (Option<bool>, String) {
        match (self.within_objectives(), self.steadiness_open()) {
            ((Some(true), _), Some(open)) => (None, open.detail.clone()),
            (found, _) => found,
        }
    }

    /// Whether the run is valid, not saturated, and the interval of every objective's percentile below its limit. `None` where it cannot
    /// tell. With it, what decided.
    pub fn within_objectives(&self) -> (Option<bool>, String) {
        match self.validity {
            Validity::Saturated => return (Some(false), format!("saturated: {}", joined(&self.reasons))),
            Validity::Invalid => return (None, format!("invalid: {}", joined(&self.reasons))),
            Validity::Valid => {}
        }
        let clause = |met: Option<bool>| self.slo.iter().find(|c| c.met == met);
        if let Some(failed) = clause(Some(false)) {
            return (Some(false), failed.to_string());
        }
        clause(None).map_or_else(
            || (Some(true), "every objective was met".to_owned()),
            |open| {
                let why = if open.is_unbounded() {
                    "has no upper end: too few requests"
                } else {
                    "holds the limit"
                };
                (None, format!("{open}: the interval {why}"))
            },
        )
    }

    /// The gate that could not tell whether the system keeps up, where it could not.
    pub fn steadiness_open(&self) -> Option<&Gate> {
        self.gates.iter().find(|gate| gate.name == GateName::KeepsUp && gate.passed.is_none())
    }

    /// Whether a check of the run failed.
    pub fn failed(&self, name: GateName) -> bool {
        self.gates.iter().any(|gate| gate.name == name && gate.passed == Some(false))
    }

    /// A check of the run; one that fails makes the point INVALID.
    pub fn gate(&mut self, name: GateName, passed: Option<bool>, detail: String) {
        if passed == Some(false) {
            self.validity = Validity::Invalid;
            self.reasons.push(Cause::GateFailed { gate: name, detail: detail.clone() });
        }
        self.gates.push(Gate { name, passed, detail });
    }

    /// Checks that the device which served is a real one.
    pub fn check_device(&mut self, gpu: Option<&GpuEnvironment>) {
        if gpu.is_some_and(GpuEnvironment::is_simulated) {
            let detail = format!("{SIMULATED_DEVICE}: its times mean nothing");
            self.gate(GateName::Device, Some(false), detail);
        }
    }

    /// Checks the last output of the engine: it must be finite.
    pub fn check_outputs(&mut self, are_numbers: bool) {
        if !are_numbers {
            self.gate(
                GateName::Outputs,
                Some(false),
                "outputs are wrong: logits are not finite numbers".to_owned(),
            );
        }
    }
}
