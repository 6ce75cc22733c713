//! What a run says: latencies under the honesty rules, throughput, goodput, and whether any of it can be believed.
//!
//! Enters: a [`Run`]. Leaves: a [`ServeResult`]. The definitions are those of the glossary. In short: every latency counts from the
//! scheduled arrival; a request that failed or never finished is infinitely slow and stays in the percentiles; what does not exist (the
//! TPOT of one token) is null and never 0; a percentile that the sample cannot carry is null, and the largest value is shown as its
//! bound; and the percentiles of a saturated run are refused, because they say how long one waited to stop.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::evidence::{Evidence, evidence};
use super::gates::{due, gates, saturation};
use super::requests::Requests;
use super::run::{Fate, Loop, Record, Run, StepLog, Traffic};
use super::slo::{Clause, Slo, SloMetric};
use super::timeline::Timeline;
use crate::stats::{honest_percentile, mean, percentile};

/// A number that may be infinite; JSON has no number for that, and it must not become null.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Quantity {
    Finite(f64),
    Infinite(Infinite),
}

/// The word for infinity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
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
    #[must_use]
    pub fn value(self) -> f64 {
        match self {
            Self::Finite(value) => value,
            Self::Infinite(_) => f64::INFINITY,
        }
    }
}

/// One latency over all measured requests (or tokens), in nanoseconds. Percentiles are nearest-rank.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
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
    #[must_use]
    pub fn of(values: impl Iterator<Item = Option<f64>>) -> Self {
        let mut missing = 0;
        let mut sorted: Vec<f64> = values
            .filter_map(|value| {
                missing += usize::from(value.is_none());
                value
            })
            .collect();
        sorted.sort_by(f64::total_cmp);
        let at = |p: f64| honest_percentile(&sorted, p).map(Quantity::from);
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ClauseResult {
    pub clause: Clause,
    /// The percentile, where the sample can carry it.
    pub observed: Option<Quantity>,
    /// Null where it cannot.
    pub met: Option<bool>,
}

/// A check of the run itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Gate {
    pub name: String,
    /// Null where there was too little to judge.
    pub passed: Option<bool>,
    pub detail: String,
}

/// Whether a point can be believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Validity {
    Valid,
    /// The system did not keep up: throughput is a result, latencies are not.
    Saturated,
    /// Something about the measurement itself is wrong.
    Invalid,
}

/// Where the time of the loop went, in nanoseconds over the whole run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Breakdown {
    pub enqueue_ns: f64,
    pub schedule_ns: f64,
    pub build_ns: f64,
    pub launch_ns: f64,
    pub device_ns: f64,
    pub sample_ns: f64,
    /// Finding the tokens that grammars allow, and forbidding the others.
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ServeResult {
    pub validity: Validity,
    /// Why it is not valid.
    pub reasons: Vec<String>,
    pub gates: Vec<Gate>,
    /// Requests whose times count: all of them, served or not.
    pub measured: usize,
    pub served: usize,
    pub unfinished: usize,
    /// By the reason's name.
    pub rejected: BTreeMap<String, usize>,
    pub warmup_requests: usize,
    pub cooldown_requests: usize,
    /// CPU cores that other processes kept busy over the run; nobody looks where time is virtual.
    #[serde(default)]
    pub foreign_cores: Option<f64>,
    /// The span over which rates are taken.
    pub window_s: f64,
    pub offered_per_s: Option<f64>,
    pub served_per_s: f64,
    /// Prompt tokens computed, without those found in the cache.
    pub prompt_tokens_per_s: f64,
    pub output_tokens_per_s: f64,
    /// Requests per second that were completed in the window and met every objective: never more than were served.
    pub goodput_per_s: Option<f64>,
    /// Of the measured requests, whenever they were completed.
    pub goodput_share: Option<f64>,
    /// Requests without a TPOT, whose TPOT clause was dropped.
    pub tpot_clause_dropped: usize,
    pub slo: Vec<ClauseResult>,
    /// Null where a percentile is missing.
    pub slo_met: Option<bool>,
    /// Null where percentiles are refused.
    pub ttft_ns: Option<Quantiles>,
    pub tpot_ns: Option<Quantiles>,
    pub itl_ns: Option<Quantiles>,
    pub e2e_ns: Option<Quantiles>,
    pub queue_ns: Option<Quantiles>,
    pub injection_lag_ns: Quantiles,
    /// Time averages over the window.
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
    pub prefix_hit_rate: Option<f64>,
    pub prefix_evictions: u64,
    /// Different adapters in a step, on average; null where no request has one.
    #[serde(default)]
    pub mean_adapters: Option<f64>,
    /// Tokens that the texts of the prompts encoded to, per token asked for; null without a tokenizer.
    #[serde(default)]
    pub encoded_per_asked: Option<f64>,
    pub breakdown: Breakdown,
    /// What happened when; null for a prediction beside a measurement, and in results of before.
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

/// A measured request, as the definitions see it.
pub(super) fn ttft(record: &Record) -> f64 {
    match (record.fate, record.first_token) {
        (Fate::Rejected(_), _) | (_, None) => f64::INFINITY,
        (_, Some(first)) => first.0 - record.arrival.0,
    }
}

fn e2e(record: &Record) -> f64 {
    match (record.fate, record.last_token) {
        (Fate::Served, Some(last)) => last.0 - record.arrival.0,
        _ => f64::INFINITY,
    }
}

/// `None` for an output of one token; infinite for one that never came to its end.
fn tpot(record: &Record) -> Option<f64> {
    match (record.fate, record.first_token, record.last_token) {
        (Fate::Served, Some(first), Some(last)) if record.output_tokens > 1 => {
            Some((last.0 - first.0) / (record.output_tokens - 1) as f64)
        }
        (Fate::Served, ..) => None,
        _ => Some(f64::INFINITY),
    }
}

pub(super) fn queue(record: &Record) -> f64 {
    record.started.map_or(f64::INFINITY, |started| started.0 - record.arrival.0)
}

fn metric(record: &Record, which: SloMetric) -> Option<f64> {
    match which {
        SloMetric::Ttft => Some(ttft(record)),
        SloMetric::Tpot => tpot(record),
        SloMetric::E2e => Some(e2e(record)),
        SloMetric::Queue => Some(queue(record)),
    }
}

/// Summarises a run.
#[must_use]
pub fn summarise(run: &Run, traffic: &Traffic<'_>, slo: &Slo) -> ServeResult {
    let records = &run.records[traffic.measured.clone()];
    let window = Window::new(run, traffic, records);
    let steps: Vec<&StepLog> = run.steps.iter().filter(|s| window.holds(s.end)).collect();
    let per_s = |count: f64| if window.seconds() > 0.0 { count / window.seconds() } else { 0.0 };
    // Whatever comes to its end in the window, whenever it came: as many as the system gets done.
    let completed = || {
        let all = run.records.iter();
        all.filter(|r| r.fate == Fate::Served && r.last_token.is_some_and(|t| window.holds(t.0)))
    };
    let served_in_window = completed().count();
    let good_in_window = completed().filter(|r| meets(r, slo)).count();
    let good = records.iter().filter(|r| meets(r, slo)).count();
    let infinite = traffic.plan.iter().all(|p| p.arrival.0 == 0.0) && traffic.kind == Loop::Open;
    let offered =
        (traffic.kind == Loop::Open && !infinite).then(|| per_s(due(records, &window).count() as f64));
    let mut result = ServeResult {
        validity: Validity::Valid,
        reasons: Vec::new(),
        gates: Vec::new(),
        measured: records.len(),
        served: records.iter().filter(|r| r.fate == Fate::Served).count(),
        unfinished: records.iter().filter(|r| r.fate == Fate::Unfinished).count(),
        rejected: rejected(records),
        warmup_requests: traffic.measured.start,
        cooldown_requests: run.records[traffic.measured.end..]
            .iter()
            .filter(|r| r.enqueued.is_some())
            .count(),
        foreign_cores: None,
        window_s: window.seconds(),
        offered_per_s: offered,
        served_per_s: per_s(served_in_window as f64),
        prompt_tokens_per_s: per_s(steps.iter().map(|s| s.prompt_tokens).sum::<usize>() as f64),
        output_tokens_per_s: per_s(steps.iter().map(|s| s.output_tokens).sum::<usize>() as f64),
        goodput_per_s: (!slo.clauses.is_empty()).then(|| per_s(good_in_window as f64)),
        goodput_share: (!slo.clauses.is_empty() && !records.is_empty())
            .then(|| good as f64 / records.len() as f64),
        tpot_clause_dropped: records.iter().filter(|r| tpot(r).is_none()).count(),
        slo: Vec::new(),
        slo_met: None,
        ttft_ns: Some(Quantiles::of(records.iter().map(|r| Some(ttft(r))))),
        tpot_ns: Some(Quantiles::of(records.iter().map(tpot))),
        itl_ns: Some(Quantiles::of(run.gaps.iter().map(|gap| Some(*gap)))),
        e2e_ns: Some(Quantiles::of(records.iter().map(|r| Some(e2e(r))))),
        queue_ns: Some(Quantiles::of(records.iter().map(|r| Some(queue(r))))),
        injection_lag_ns: Quantiles::of(records.iter().map(|r| r.enqueued.map(|_| r.lag.0))),
        mean_running: over_time(&steps, &window, |s| s.load.running as f64),
        mean_waiting: over_time(&steps, &window, |s| s.load.waiting as f64),
        mean_kv_use: over_time(&steps, &window, kv_use),
        max_kv_use: run.steps.iter().map(kv_use).fold(0.0, f64::max),
        mean_batch: average(&steps, |s| s.load.running as f64),
        mean_step_tokens: average(&steps, |s| (s.prompt_tokens + s.output_tokens) as f64),
        median_step_ns: middle(&steps, |s| s.end - s.begin),
        median_schedule_ns: middle(&steps, |s| s.schedule),
        preemptions: run.preemptions,
        prefix_hit_rate: (run.cache.queried_tokens > 0)
            .then(|| run.cache.hit_tokens as f64 / run.cache.queried_tokens as f64),
        prefix_evictions: run.cache.evictions,
        mean_adapters: traffic
            .plan
            .iter()
            .any(|p| p.adapter.is_some())
            .then(|| average(&steps, |s| s.adapters as f64)),
        encoded_per_asked: (run.asked_tokens > 0)
            .then(|| run.encoded_tokens as f64 / run.asked_tokens as f64),
        breakdown: breakdown(run),
        timeline: Timeline::of(&run.steps, run.end, (window.from, window.to)),
        requests: Requests::of(records),
        evidence: Some(evidence(run, traffic)),
    };
    result.slo = slo.clauses.iter().map(|clause| judge(records, *clause)).collect();
    result.slo_met = all_met(&result.slo);
    gates(&mut result, run, traffic, records, &window);
    saturation(&mut result, run, traffic, records, &window, infinite);
    result
}

/// Whether every objective was met; one that was not decides, whatever is unknown.
fn all_met(clauses: &[ClauseResult]) -> Option<bool> {
    let known = |met: bool| clauses.iter().filter(|c| c.met == Some(met)).count();
    match (known(false), known(true)) {
        (1.., _) => Some(false),
        (0, met) if met > 0 && met == clauses.len() => Some(true),
        _ => None,
    }
}

/// The span over which rates are taken: from the first measured arrival to the last in an open loop, otherwise to the last measured end.
#[derive(Debug, Clone, Copy)]
pub(super) struct Window {
    pub from: f64,
    pub to: f64,
}

impl Window {
    fn new(run: &Run, traffic: &Traffic<'_>, records: &[Record]) -> Self {
        let from = records.first().map_or(0.0, |r| r.arrival.0);
        let last_arrival = records.last().map_or(0.0, |r| r.arrival.0);
        let last_end = records.iter().filter_map(|r| r.last_token).map(|t| t.0).fold(from, f64::max);
        let to = match traffic.kind {
            Loop::Open if last_arrival > from => last_arrival,
            _ => last_end,
        };
        Self { from, to: to.min(run.end) }
    }
    fn seconds(&self) -> f64 {
        (self.to - self.from).max(0.0) / 1e9
    }
    fn holds(&self, moment: f64) -> bool {
        self.from < moment && moment <= self.to
    }
}

fn meets(record: &Record, slo: &Slo) -> bool {
    // A quantity that does not exist breaks no promise.
    record.fate == Fate::Served
        && slo.clauses.iter().all(|c| metric(record, c.metric).is_none_or(|value| value <= c.limit_ns))
}

fn judge(records: &[Record], clause: Clause) -> ClauseResult {
    let mut values: Vec<f64> = records.iter().filter_map(|r| metric(r, clause.metric)).collect();
    values.sort_by(f64::total_cmp);
    let observed = honest_percentile(&values, clause.percentile);
    ClauseResult {
        clause,
        observed: observed.map(Quantity::from),
        met: observed.map(|v| v <= clause.limit_ns),
    }
}

fn rejected(records: &[Record]) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for record in records {
        if let Fate::Rejected(_) = record.fate {
            *counts.entry(record.fate.name()).or_insert(0) += 1;
        }
    }
    counts
}

fn kv_use(step: &StepLog) -> f64 {
    step.load.used_blocks as f64 / step.load.total_blocks.max(1) as f64
}

fn over_time(steps: &[&StepLog], window: &Window, of: impl Fn(&StepLog) -> f64) -> f64 {
    // From 0 on: the sum of nothing is -0.
    let busy = steps.iter().fold(0.0, |sum, s| sum + of(s) * (s.end - s.begin.max(window.from)));
    if window.seconds() > 0.0 { busy / (window.seconds() * 1e9) } else { 0.0 }
}

fn average(steps: &[&StepLog], of: impl Fn(&StepLog) -> f64) -> f64 {
    if steps.is_empty() { 0.0 } else { steps.iter().map(|s| of(s)).sum::<f64>() / steps.len() as f64 }
}

fn middle(steps: &[&StepLog], of: impl Fn(&StepLog) -> f64) -> Option<f64> {
    let mut values: Vec<f64> = steps.iter().map(|s| of(s)).collect();
    values.sort_by(f64::total_cmp);
    (!values.is_empty()).then(|| percentile(&values, 0.5))
}

fn breakdown(run: &Run) -> Breakdown {
    let sum = |of: &dyn Fn(&StepLog) -> f64| run.steps.iter().map(of).sum::<f64>();
    let mut all = Breakdown {
        enqueue_ns: run.enqueue,
        schedule_ns: sum(&|s| s.schedule),
        build_ns: sum(&|s| s.phases.build),
        launch_ns: sum(&|s| s.phases.launch),
        device_ns: sum(&|s| s.phases.device),
        sample_ns: sum(&|s| s.phases.sample),
        mask_ns: sum(&|s| s.phases.mask),
        mask_apply_ns: sum(&|s| s.phases.mask_apply),
        detokenize_ns: sum(&|s| s.detokenize),
        idle_ns: run.idle,
        other_ns: 0.0,
        wall_ns: run.end,
        steps: run.steps.len(),
    };
    let named = all.enqueue_ns
        + all.schedule_ns
        + all.build_ns
        + all.launch_ns
        + all.device_ns
        + all.sample_ns
        + all.mask_ns
        + all.mask_apply_ns
        + all.detokenize_ns
        + all.idle_ns;
    all.other_ns = (all.wall_ns - named).max(0.0);
    all
}
