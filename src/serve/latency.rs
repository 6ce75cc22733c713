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
use super::run::{Fate, Loop, Record, Run, StepLog, Traffic};
use super::slo::{Clause, Slo, SloMetric};
use super::timeline::Timeline;
use crate::stats::{honest_percentile, mean, percentile, trend};

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
    /// Requests per second that met every objective.
    pub goodput_per_s: Option<f64>,
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
    /// What a diagnosis needs; null in results of versions that did not keep it.
    #[serde(default)]
    pub evidence: Option<Evidence>,
}

/// p99 of the injection lag may be this, or this share of the median TTFT, whichever is more.
const LAG_FLOOR_NS: f64 = 1e6;
const LAG_SHARE: f64 = 0.05;
/// The name of the gate that tells a run that keeps up from one that does not.
pub const KEEPS_UP: &str = "keeps up";
/// The name of the gate that counts KV blocks.
pub const KV_BOOKS: &str = "KV books";
/// The name of the gate that watches the harness itself.
pub const INJECTION_LAG: &str = "injection lag";
/// Completed over offered below this is saturation.
const ENOUGH_COMPLETED: f64 = 0.98;
/// The in-system mean may differ from rate × time in system by this.
const LITTLE_TOLERANCE: f64 = 0.1;
/// Below so many measured requests trends, rates and Little's law are not judged.
pub const ENOUGH: usize = 100;
/// The rate of arrivals may differ from the plan's by this.
const RATE_TOLERANCE: f64 = 0.02;

/// A measured request, as the definitions see it.
fn ttft(record: &Record) -> f64 {
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

fn queue(record: &Record) -> f64 {
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
    let served_in_window = run
        .records
        .iter()
        .filter(|r| r.fate == Fate::Served && r.last_token.is_some_and(|t| window.holds(t.0)))
        .count();
    let good = records.iter().filter(|r| meets(r, slo)).count();
    let infinite = traffic.plan.iter().all(|p| p.arrival.0 == 0.0) && traffic.kind == Loop::Open;
    let offered = (traffic.kind == Loop::Open && !infinite).then(|| per_s(records.len() as f64));
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
        goodput_per_s: (!slo.clauses.is_empty()).then(|| per_s(good as f64)),
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
struct Window {
    from: f64,
    to: f64,
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
        if let Fate::Rejected(reject) = record.fate {
            let name = serde_json::to_value(reject).ok().and_then(|v| v.as_str().map(str::to_owned));
            *counts.entry(name.unwrap_or_default()).or_insert(0) += 1;
        }
    }
    counts
}

fn kv_use(step: &StepLog) -> f64 {
    step.load.used_blocks as f64 / step.load.total_blocks.max(1) as f64
}

fn over_time(steps: &[&StepLog], window: &Window, of: impl Fn(&StepLog) -> f64) -> f64 {
    let busy: f64 = steps.iter().map(|s| of(s) * (s.end - s.begin.max(window.from))).sum();
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

/// Requests in the system at a moment.
fn population_at(run: &Run, moment: f64) -> usize {
    let at = run.population.partition_point(|(time, _)| *time <= moment);
    at.checked_sub(1).map_or(0, |i| run.population[i].1)
}

/// The time average of the requests in the system.
fn mean_population(run: &Run, window: &Window) -> f64 {
    let mut area = 0.0;
    let mut since = window.from;
    let mut count = population_at(run, window.from);
    let start = run.population.partition_point(|(time, _)| *time <= window.from);
    for (time, next) in &run.population[start..] {
        let until = time.min(window.to);
        area += (until - since) * count as f64;
        (since, count) = (until, *next);
        if *time >= window.to {
            break;
        }
    }
    area += (window.to - since).max(0.0) * count as f64;
    area / (window.to - window.from)
}

fn gates(result: &mut ServeResult, run: &Run, traffic: &Traffic<'_>, records: &[Record], window: &Window) {
    let mut gate = |name: &str, passed: Option<bool>, detail: String| {
        if passed == Some(false) {
            result.validity = Validity::Invalid;
            result.reasons.push(detail.clone());
        }
        result.gates.push(Gate { name: name.into(), passed, detail });
    };
    let ms = |ns: f64| format!("{:.3} ms", ns / 1e6);
    // The largest lag stands for p99 where there are too few requests for one.
    let mut lags: Vec<f64> = records.iter().filter(|r| r.enqueued.is_some()).map(|r| r.lag.0).collect();
    lags.sort_by(f64::total_cmp);
    let mut waits: Vec<f64> = records.iter().map(ttft).collect();
    waits.sort_by(f64::total_cmp);
    // Where most requests were rejected the median is infinite, and must not excuse any lag.
    let middle = Some(percentile(&waits, 0.5)).filter(|wait| wait.is_finite()).unwrap_or(0.0);
    let allowed = LAG_FLOOR_NS.max(LAG_SHARE * middle);
    let lag = percentile(&lags, 0.99);
    gate(
        INJECTION_LAG,
        (!lags.is_empty()).then_some(lag <= allowed),
        format!(
            "99 % of the requests were queued within {} of when they could be; {} is allowed",
            ms(lag),
            ms(allowed)
        ),
    );
    if let (Loop::Open, Some(offered)) = (traffic.kind, result.offered_per_s) {
        // Queued over planned, in the window: what the loop really sent.
        let queued = records.iter().filter(|r| r.enqueued.is_some()).count();
        let enough = records.len() >= ENOUGH;
        let share = queued as f64 / records.len().max(1) as f64;
        gate(
            "realised rate",
            enough.then_some((share - 1.0).abs() <= RATE_TOLERANCE || traffic.time_limit.is_some()),
            format!("{queued} of {} planned requests were sent, at {offered:.3} per second", records.len()),
        );
    }
    if traffic.kind == Loop::Open && result.offered_per_s.is_some() {
        let stays: Vec<f64> = records
            .iter()
            .filter_map(|r| Some(r.last_token.filter(|_| r.fate == Fate::Served)?.0 - r.enqueued?.0))
            .collect();
        let all_served = stays.len() == records.len();
        let product = stays.len() as f64 / (window.to - window.from) * mean(&stays);
        let seen = mean_population(run, window);
        let enough = all_served && records.len() >= 10 * ENOUGH;
        // The ends of a window cut stays in two; a window must be much longer than one for the law to hold in it.
        let long = (window.to - window.from) > 20.0 * mean(&stays);
        gate(
            "Little's law",
            (enough && long).then_some((seen / product - 1.0).abs() <= LITTLE_TOLERANCE),
            format!("{seen:.3} requests in the system on average, rate × time in system gives {product:.3}"),
        );
    }
    // Books are said only where they do not balance.
    let lost = |s: &StepLog| s.load.used_blocks.saturating_sub(s.load.held_blocks);
    if let Some(most) = run.steps.iter().map(lost).max().filter(|lost| *lost > 0) {
        gate(KV_BOOKS, Some(false), format!("{most} KV blocks are in use that no running request holds"));
    }
    let planned = traffic.plan[traffic.measured.clone()].iter();
    let short = records
        .iter()
        .zip(planned)
        .filter(|(r, p)| r.fate == Fate::Served && r.output_tokens != p.output_len)
        .count();
    if traffic.stop_tokens.is_empty() && short > 0 {
        let detail =
            format!("{short} of {} requests made another number of tokens than was forced", records.len());
        gate("token count", Some(false), detail);
    }
    if let Some(failure) = &run.failure {
        gate("engine", Some(false), format!("the engine failed: {failure}"));
    }
}

/// Bins over which trends are judged.
const BINS: usize = 10;

/// Whether a series at least doubles over the run, beyond chance.
fn rises(values: &[f64]) -> bool {
    trend(values).is_some_and(|t| t.significant && t.relative_change > 1.0)
}

fn saturation(
    result: &mut ServeResult,
    run: &Run,
    traffic: &Traffic<'_>,
    records: &[Record],
    window: &Window,
    infinite: bool,
) {
    let mut reasons = Vec::new();
    if infinite && records.len() > 1 {
        reasons.push(
            "all requests arrive at once: throughput is the result, and how long one waits depends on how many there are".to_owned(),
        );
    }
    if traffic.kind == Loop::Open && !infinite && records.len() >= ENOUGH {
        let (before, after) = (population_at(run, window.from), population_at(run, window.to));
        let growth = after as f64 - before as f64;
        let completed = 1.0 - growth / records.len() as f64;
        // A stable queue goes up and down too: only growth beyond its own size counts, and less of it where every part of the
        // window holds more than the one before.
        let spread = ((before + after) as f64).sqrt();
        let parts = (0..BINS).map(|part| {
            let width = (window.to - window.from) / BINS as f64;
            let from = window.from + part as f64 * width;
            mean_population(run, &Window { from, to: from + width })
        });
        let climbs =
            trend(&parts.collect::<Vec<_>>()).is_some_and(|t| t.significant && t.relative_change > 0.0);
        let noise = if climbs { 1.5 * spread } else { 3.0 * spread };
        let balance = format!(
            "{:.1} % of the offered requests were completed in the window: {before} were in the system at its start, {after} at \
             its end",
            completed * 100.0
        );
        let behind = completed < ENOUGH_COMPLETED;
        let beyond_chance = growth > noise.max(10.0);
        if behind && beyond_chance {
            reasons.push(format!("{balance}; below {:.0} % it does not keep up", ENOUGH_COMPLETED * 100.0));
        }
        let detail = if behind && !beyond_chance {
            format!("{balance}; so few requests cannot tell that from chance, a longer run can")
        } else {
            balance
        };
        let passed = if behind { beyond_chance.then_some(false) } else { Some(true) };
        result.gates.push(Gate { name: KEEPS_UP.into(), passed, detail });
        let waits: Vec<f64> = bins(records.iter().map(ttft), records.len());
        let depths: Vec<f64> = bins(records.iter().map(queue), records.len());
        if rises(&waits) && rises(&depths) {
            reasons.push(
                "queue time and TTFT both rise from the start of the window to its end: they depend on how long one measures"
                    .to_owned(),
            );
        }
    }
    if reasons.is_empty() {
        return;
    }
    if result.validity == Validity::Valid {
        result.validity = Validity::Saturated;
    }
    result.reasons.append(&mut reasons);
    (result.ttft_ns, result.e2e_ns, result.queue_ns) = (None, None, None);
    // A system that does not keep up meets no promise about waiting, however short the run.
    if !infinite {
        let waiting = |c: &ClauseResult| c.clause.metric != SloMetric::Tpot;
        for clause in result.slo.iter_mut().filter(|c| waiting(c)) {
            clause.observed = None;
            clause.met = Some(false);
        }
        if result.slo.iter().any(waiting) {
            result.slo_met = Some(false);
        }
    }
}

/// Means of consecutive parts; what is infinite counts as the largest finite value.
fn bins(values: impl Iterator<Item = f64>, count: usize) -> Vec<f64> {
    let values: Vec<f64> = values.collect();
    let most = values.iter().copied().filter(|v| v.is_finite()).fold(0.0, f64::max);
    let finite: Vec<f64> = values.into_iter().map(|v| if v.is_finite() { v } else { most }).collect();
    finite.chunks(count.div_ceil(BINS).max(1)).map(mean).collect()
}
