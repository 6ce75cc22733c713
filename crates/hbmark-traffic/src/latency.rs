//! The result of a run: latencies, throughput, goodput, and validity.
//!
//! Enters: a [`Run`]. Leaves: a [`ServeResult`]. The definitions are those of the glossary. In short: every latency counts from the
//! scheduled arrival; a request that failed or never finished is infinitely slow and stays in the percentiles; a quantity that does not
//! exist (the TPOT of one token) is null and never 0; a percentile with too few samples is null, and the largest value is shown as its
//! bound; and the percentiles of a saturated run are not reported, because they depend on the length of the run.

use std::collections::BTreeMap;

use super::evidence::evidence;
use super::gates::{due, gates, keeps_up, saturation};
use super::serving_loop::{LoadMode, Record, RequestOutcome, Run, StepLog, Traffic};
use crate::occupancy::{begun, occupancy, overlap};
use crate::requests::columns;
use crate::timeline::timeline;
use hbmark_core::result::serving::{
    Breakdown, Clause, ClauseResult, Quantiles, ServeResult, Slo, SloMetric, Validity, throughput_end,
};
use hbmark_core::stats::{known_median, mean};

/// The quantities of a measured request.
pub(super) fn ttft(record: &Record) -> f64 {
    match (record.outcome, record.first_token) {
        (RequestOutcome::Rejected(_) | RequestOutcome::Failed(_), _) | (_, None) => f64::INFINITY,
        (_, Some(first)) => first.0 - record.arrival.0,
    }
}

fn e2e(record: &Record) -> f64 {
    match (record.outcome, record.last_token) {
        (RequestOutcome::Served, Some(last)) => last.0 - record.arrival.0,
        _ => f64::INFINITY,
    }
}

/// `None` for an output of one token; infinite for one that never finished.
fn tpot(record: &Record) -> Option<f64> {
    match (record.outcome, record.first_token, record.last_token) {
        (RequestOutcome::Served, Some(first), Some(last)) if record.output_tokens > record.first_tokens => {
            Some((last.0 - first.0) / (record.output_tokens - record.first_tokens) as f64)
        }
        (RequestOutcome::Served, ..) => None,
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
pub fn summarise(run: &Run, traffic: &Traffic<'_>, slo: &Slo) -> ServeResult {
    let records = &run.records[run.measured.clone()];
    let arrivals = Window::new(run, traffic, records);
    let window = arrivals.of_throughput(traffic, records);
    let steps: Vec<&StepLog> = run.steps.iter().filter(|s| window.holds(s.end)).collect();
    let typical =
        |of: fn(&StepLog) -> f64| known_median(&steps.iter().map(|step| of(step)).collect::<Vec<_>>());
    let served_per_s = {
        let planned = traffic.plan.iter().map(|request| request.output_len);
        window.per_s(run.records.iter().zip(planned).map(|(r, planned)| window.served(run, r, planned)).sum())
    };
    let (prompt_tokens, output_tokens) = match &run.remote {
        // With the millisecond in which the window ends: a closed loop's ends with a token.
        Some(tokens) => (window.prompts(run), tokens.between(window.from, window.to + 1e6) as f64),
        None => (
            steps.iter().map(|s| s.prompt_tokens).sum::<usize>() as f64,
            steps.iter().map(|s| s.output_tokens).sum::<usize>() as f64,
        ),
    };
    let good = records.iter().filter(|r| meets(r, slo)).count();
    let served = records.iter().filter(|r| r.outcome == RequestOutcome::Served).count();
    // Of the requests that count: the first of the warm-up find an empty system, and are within objectives that no later one meets.
    let good_share = good as f64 / served.max(1) as f64;
    let infinite = traffic.plan.iter().all(|p| p.arrival.0 == 0.0) && traffic.kind == LoadMode::Open;
    let offered = (traffic.kind == LoadMode::Open && !infinite)
        // The first one begins the window: as many as follow it came within.
        .then(|| arrivals.per_s(due(records, &arrivals).count().saturating_sub(1) as f64));
    let begun = || records.iter().filter(|record| record.started.is_some());
    let prompt_lengths: usize = begun().map(|record| record.prompt_tokens).sum();
    let cached: usize = begun().map(|record| record.cached_tokens).sum();
    let of_measured =
        |(gap, request): (&f64, &u32)| run.measured.contains(&(*request as usize)).then_some(Some(*gap));
    let gaps = run.gaps.iter().zip(&run.gap_request).filter_map(of_measured);
    let mut result = ServeResult {
        validity: Validity::Valid,
        reasons: Vec::new(),
        gates: Vec::new(),
        measured: records.len(),
        served,
        unfinished: records.iter().filter(|r| r.outcome == RequestOutcome::Unfinished).count(),
        rejected: rejected(records),
        warmup_requests: run.measured.start,
        cooldown_requests: run.records[run.measured.end..].iter().filter(|r| r.enqueued.is_some()).count(),
        foreign_cores: None,
        foreign_cores_allowed: None,
        window_s: window.seconds(),
        offered_per_s: offered,
        served_per_s,
        prompt_tokens_per_s: window.per_s(prompt_tokens),
        output_tokens_per_s: window.per_s(output_tokens),
        goodput_per_s: (!slo.clauses.is_empty()).then_some(served_per_s * good_share),
        goodput_share: (!slo.clauses.is_empty() && !records.is_empty())
            .then(|| good as f64 / records.len() as f64),
        tpot_clause_dropped: records.iter().filter(|r| tpot(r).is_none()).count(),
        slo: Vec::new(),
        slo_met: None,
        ttft_ns: Some(Quantiles::of(records.iter().map(|r| Some(ttft(r))))),
        tpot_ns: Some(Quantiles::of(records.iter().map(tpot))),
        itl_ns: Some(Quantiles::of(gaps)),
        e2e_ns: Some(Quantiles::of(records.iter().map(|r| Some(e2e(r))))),
        queue_ns: run.remote.is_none().then(|| Quantiles::of(records.iter().map(|r| Some(queue(r))))),
        injection_lag_ns: Quantiles::of(records.iter().map(|r| r.enqueued.map(|_| r.lag.0))),
        mean_running: window.mean(occupancy(run).map(|o| (o.from, o.until, o.running as f64))),
        mean_waiting: window.mean(occupancy(run).map(|o| (o.from, o.until, o.waiting as f64))),
        mean_kv_use: window.mean(run.steps.iter().map(|s| (s.begin, s.end, kv_use(s)))),
        max_kv_use: run.steps.iter().map(kv_use).fold(0.0, f64::max),
        mean_batch: average(&steps, |s| s.load.running as f64),
        // What was scheduled: the first token of an output comes from its prompt's step and takes no place in it.
        mean_step_tokens: average(&steps, |s| s.mixture.queries + s.mixture.decodes),
        median_step_ns: typical(|s| s.end - s.begin),
        median_schedule_ns: typical(|s| s.schedule),
        preemptions: run.preemptions,
        drafts: run.drafts.clone(),
        prefix_hit_rate: (run.cache.queried_tokens > 0 && prompt_lengths > 0)
            .then(|| cached as f64 / prompt_lengths as f64),
        prefix_evictions: run.cache.evictions,
        mean_adapters: traffic
            .plan
            .iter()
            .any(|p| p.adapter.is_some())
            .then(|| average(&steps, |s| s.adapters as f64)),
        encoded_per_asked: (run.asked_tokens > 0)
            .then(|| run.encoded_tokens as f64 / run.asked_tokens as f64),
        breakdown: breakdown(run),
        timeline: timeline(run, (window.from, window.to)),
        requests: columns(records),
        evidence: Some(evidence(run, traffic)),
    };
    result.slo = slo.clauses.iter().map(|clause| judge(records, *clause)).collect();
    result.slo_met = ClauseResult::all_met(&result.slo);
    gates(&mut result, run, traffic, records, &arrivals);
    saturation(&mut result, run, traffic, records, &arrivals, infinite);
    result
}

/// Whether a run tells if the system keeps up and every objective is met, or that one of these fails.
pub(super) fn decided(run: &Run, traffic: &Traffic<'_>, slo: &Slo) -> bool {
    let records = &run.records[run.measured.clone()];
    let window = Window::new(run, traffic, records);
    let keeps_up = keeps_up(run, records, &window).passed();
    let met: Vec<ClauseResult> = slo.clauses.iter().map(|clause| judge(records, *clause)).collect();
    let fails = keeps_up == Some(false) || met.iter().any(|clause| clause.met == Some(false));
    fails || keeps_up.is_some() && met.iter().all(|clause| clause.met.is_some())
}

/// The first request that came when the system was as full as the load makes it, twice as long after the start as a request stays; the first
/// measured one where the system does not keep up, which fills without end.
pub(super) fn full_from(run: &Run, traffic: &Traffic<'_>) -> usize {
    let records = &run.records[run.measured.clone()];
    let served = records.iter().filter(|r| r.outcome == RequestOutcome::Served);
    let stays: Vec<f64> = served.filter_map(|r| Some(r.last_token?.0 - r.arrival.0)).collect();
    let window = Window::new(run, traffic, records);
    if stays.is_empty() || keeps_up(run, records, &window).passed() == Some(false) {
        return run.measured.start;
    }
    let full = 2.0 * mean(&stays);
    run.records.partition_point(|r| r.arrival.0 < full)
}

/// The span over which a run is looked at: from the first measured arrival to the last in an open loop, otherwise to the last measured end.
#[derive(Debug, Clone, Copy)]
pub struct Window {
    pub from: f64,
    pub to: f64,
}

impl Window {
    fn new(run: &Run, traffic: &Traffic<'_>, records: &[Record]) -> Self {
        let from = records.first().map_or(0.0, |r| r.arrival.0);
        let last_arrival = records.last().map_or(0.0, |r| r.arrival.0);
        let last_end = records.iter().filter_map(|r| r.last_token).map(|t| t.0).fold(from, f64::max);
        let to = match traffic.kind {
            LoadMode::Open if last_arrival > from => last_arrival,
            _ => last_end,
        };
        Self { from, to: to.min(run.end) }
    }

    /// The span over which throughput is taken.
    fn of_throughput(self, traffic: &Traffic<'_>, records: &[Record]) -> Self {
        if traffic.kind != LoadMode::Open || records.last().is_none_or(|r| r.arrival.0 <= self.from) {
            return self;
        }
        let first_tokens = records.iter().filter_map(|r| r.first_token).map(|t| t.0);
        Self { to: throughput_end(self.to, first_tokens), ..self }
    }

    fn seconds(&self) -> f64 {
        (self.to - self.from).max(0.0) / 1e9
    }
    fn per_s(&self, count: f64) -> f64 {
        if self.seconds() > 0.0 { count / self.seconds() } else { 0.0 }
    }
    /// The share of a request that was served in the window, whenever it arrived.
    fn served(&self, run: &Run, record: &Record, planned_tokens: usize) -> f64 {
        let (share, end) = match record.outcome {
            RequestOutcome::Served => (1.0, record.last_token.map_or(run.end, |t| t.0)),
            // Of requests that the end of the run cut off, what was done.
            RequestOutcome::Unfinished => {
                (record.output_tokens as f64 / planned_tokens.max(1) as f64, run.end)
            }
            RequestOutcome::Rejected(_) | RequestOutcome::Failed(_) => return 0.0,
        };
        match begun(run, record).map(|t| t.0) {
            Some(begun) if begun < end => share * overlap((begun, end), (self.from, self.to)) / (end - begun),
            Some(_) if self.holds(end) => share,
            _ => 0.0,
        }
    }
    /// Prompt tokens that a live server computed: those of requests whose first token came.
    fn prompts(&self, run: &Run) -> f64 {
        let came = run.records.iter().filter(|r| r.first_token.is_some_and(|t| self.holds(t.0)));
        came.map(|r| r.prompt_tokens.saturating_sub(r.cached_tokens)).sum::<usize>() as f64
    }
    fn holds(&self, moment: f64) -> bool {
        self.from < moment && moment <= self.to
    }
    /// The time average of values, each of which holds from one moment until another.
    fn mean(&self, values: impl Iterator<Item = (f64, f64, f64)>) -> f64 {
        // From 0 on: an empty float sum is -0.
        let area = values.fold(0.0, |sum, (from, until, value)| {
            sum + value * overlap((from, until), (self.from, self.to))
        });
        if self.seconds() > 0.0 { area / (self.to - self.from) } else { 0.0 }
    }
}

fn meets(record: &Record, slo: &Slo) -> bool {
    // A quantity that does not exist violates no objective.
    record.outcome == RequestOutcome::Served
        && slo.clauses.iter().all(|c| metric(record, c.metric).is_none_or(|value| value <= c.limit_ns))
}

fn judge(records: &[Record], clause: Clause) -> ClauseResult {
    let values: Vec<f64> = records.iter().filter_map(|r| metric(r, clause.metric)).collect();
    ClauseResult::of(&values, clause)
}

fn rejected(records: &[Record]) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for record in records {
        if let RequestOutcome::Rejected(_) | RequestOutcome::Failed(_) = record.outcome {
            *counts.entry(record.outcome.name()).or_insert(0) += 1;
        }
    }
    counts
}

fn kv_use(step: &StepLog) -> f64 {
    step.load.used_blocks as f64 / step.load.total_blocks.max(1) as f64
}

fn average(steps: &[&StepLog], of: impl Fn(&StepLog) -> f64) -> f64 {
    if steps.is_empty() { 0.0 } else { steps.iter().map(|s| of(s)).sum::<f64>() / steps.len() as f64 }
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

#[cfg(test)]
mod tests;
