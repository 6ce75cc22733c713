//! The validity of a point: checks of the run itself, and whether the system is saturated.
//!
//! Enters: a run, and its result so far. Leaves: the result with its gates, its validity and reasons; latencies that only reflect the
//! length of a saturated run are removed.

use super::latency::{Window, ttft};
use super::occupancy::{Stay, stay, stays};
use super::scheduler::RejectReason;
use super::serving_loop::{LoadMode, Record, RequestOutcome, Run, StepLog, Traffic};
use super::stability::{
    CONFIDENCE, MIN_OFFERED, Stability, TOLERATED_GROWTH, UndecidedReason, Verdict, stability,
};
use hbmark_core::result::Cause;
use hbmark_core::result::serving::{
    ClauseResult, Gate, GateName, MIN_REQUESTS, ServeResult, SloMetric, Validity,
};
use hbmark_core::stats::{mean, median, percentile};
use hbmark_core::units::Nanos;

/// Largest p99 of the injection lag: this, or this share of the median TTFT, whichever is more.
const LAG_FLOOR_NS: f64 = 1e6;
const LAG_SHARE: f64 = 0.05;
/// A full queue that turns away more than this share of the offered requests is saturation.
const MAX_SHED_SHARE: f64 = 0.02;
/// With more requests that fail for another reason than load, what is measured is not the load that was asked for.
const MAX_FAILED_SHARE: f64 = 0.05;
/// Largest relative error of Little's law: mean requests in the system against rate × time in system.
const LITTLE_TOLERANCE: f64 = 0.1;
/// Largest relative error of the arrival rate against the plan.
const RATE_TOLERANCE: f64 = 0.02;
/// Of the measured requests' time in the system, the largest share with less load than was asked for.
const MAX_UNLOADED_SHARE: f64 = 0.05;

/// Measured requests that were due during the run: all, unless a time limit or a failure ended it early.
pub(super) fn due<'a>(records: &'a [Record], window: &Window) -> impl Iterator<Item = &'a Record> {
    let end = window.to;
    records.iter().filter(move |r| r.arrival.0 <= end)
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

/// Whether a request was turned away: the queue was full, or the server said so.
fn was_shed(record: &Record) -> bool {
    match record.outcome {
        RequestOutcome::Rejected(reason) => reason == RejectReason::QueueFull,
        RequestOutcome::Failed(failure) => failure.is_overload(),
        _ => false,
    }
}

/// Whether the load that was asked for came about. In an open loop a full queue and answers that come too late are results; in a closed one they
/// leave fewer requests at a time than were asked for.
fn served(result: &mut ServeResult, records: &[Record], kind: LoadMode) {
    let (measured, open) = (records.len(), kind == LoadMode::Open);
    let failed = |r: &&Record| match r.outcome {
        RequestOutcome::Failed(why) => !(open && why.may_be_overload()),
        _ => false,
    };
    let failed = records.iter().filter(failed).count();
    let detail = if !records.iter().any(|r| r.outcome == RequestOutcome::Served || was_shed(r)) {
        format!("none of the {measured} measured requests was served")
    } else if failed > 1 && failed as f64 > MAX_FAILED_SHARE * measured as f64 {
        let most = MAX_FAILED_SHARE * 100.0;
        let why = if open { ", with something else than 429, 503 or a time-out" } else { "" };
        format!("{failed} of the {measured} measured requests failed{why}; {most:.0} % may")
    } else {
        return;
    };
    result.gate(GateName::Served, Some(false), detail);
}

/// Checks the run.
pub(super) fn gates(
    result: &mut ServeResult,
    run: &Run,
    traffic: &Traffic<'_>,
    records: &[Record],
    window: &Window,
) {
    let ms = |ns: f64| if ns < 1e9 { format!("{:.3} ms", ns / 1e6) } else { Nanos(ns).to_string() };
    // With too few requests for a p99 this is the largest lag.
    let mut lags: Vec<f64> = records.iter().filter(|r| r.enqueued.is_some()).map(|r| r.lag.0).collect();
    lags.sort_by(f64::total_cmp);
    let mut waits: Vec<f64> = records.iter().map(ttft).collect();
    waits.sort_by(f64::total_cmp);
    // Where most requests were rejected the median is infinite, and must not allow any lag.
    let middle = Some(median(&waits)).filter(|wait| wait.is_finite()).unwrap_or(0.0);
    let allowed = LAG_FLOOR_NS.max(LAG_SHARE * middle);
    let lag = percentile(&lags, 0.99);
    result.gate(
        GateName::InjectionLag,
        (!lags.is_empty()).then_some(lag <= allowed),
        if lags.is_empty() {
            "no request was queued".to_owned()
        } else {
            format!("p99 dispatch lag {}, limit {}", ms(lag), ms(allowed))
        },
    );
    if let (LoadMode::Open, Some(offered)) = (traffic.kind, result.offered_per_s) {
        // Queued over planned, in the window: what the loop really sent.
        let queued = due(records, window).filter(|r| r.enqueued.is_some()).count();
        let due = due(records, window).count();
        let share = queued as f64 / due.max(1) as f64;
        let planned = if due < records.len() {
            format!("; {} were planned, and the run ended before the others were due", records.len())
        } else {
            String::new()
        };
        let few = if due < MIN_REQUESTS { format!("; judged from {MIN_REQUESTS} on") } else { String::new() };
        result.gate(
            GateName::RealisedRate,
            (due >= MIN_REQUESTS).then_some((share - 1.0).abs() <= RATE_TOLERANCE),
            format!("{queued} of {due} planned requests were sent, at {offered:.3} per second{planned}{few}"),
        );
    }
    if traffic.kind == LoadMode::Open && result.offered_per_s.is_some() {
        let stays: Vec<f64> = records
            .iter()
            .filter_map(|r| {
                Some(r.last_token.filter(|_| r.outcome == RequestOutcome::Served)?.0 - r.enqueued?.0)
            })
            .collect();
        let all_served = stays.len() == records.len();
        // The first arrival begins the window, and is not one within it.
        let product = (stays.len() as f64 - 1.0) / (window.to - window.from) * mean(&stays);
        let seen = mean_population(run, window);
        let enough = all_served && records.len() >= 10 * MIN_REQUESTS;
        // The ends of a window cut requests in two: the law holds only in a window much longer than a request.
        let long = (window.to - window.from) > 20.0 * mean(&stays);
        result.gate(
            GateName::LittlesLaw,
            (enough && long && product > 0.0).then_some((seen / product - 1.0).abs() <= LITTLE_TOLERANCE),
            if stays.is_empty() {
                "no request was served".to_owned()
            } else {
                let why_not = match (all_served, records.len() >= 10 * MIN_REQUESTS, long) {
                    (false, ..) => {
                        "; not every request was served, so the rate is not that of all who were there"
                            .to_owned()
                    }
                    (_, false, _) => format!("; judged from {} requests on", 10 * MIN_REQUESTS),
                    (.., false) => {
                        "; judged where the window is 20 times as long as a request takes".to_owned()
                    }
                    _ => String::new(),
                };
                format!(
                    "{seen:.3} requests were queued or running on average; λ·W gives {product:.3}{why_not}"
                )
            },
        );
    }
    // These gates appear only when they fail.
    let lost = |s: &StepLog| s.load.used_blocks.saturating_sub(s.load.held_blocks);
    if let Some(most) = run.steps.iter().map(lost).max().filter(|lost| *lost > 0) {
        result.gate(
            GateName::KvAccounting,
            Some(false),
            format!("{most} KV blocks are in use that no running request holds"),
        );
    }
    let planned = traffic.plan[run.measured.clone()].iter();
    let short = records
        .iter()
        .zip(planned)
        .filter(|(r, p)| r.outcome == RequestOutcome::Served && r.output_tokens != p.output_len)
        .count();
    if traffic.stop_tokens.is_empty() && short > 0 {
        let detail =
            format!("{short} of {} requests made another number of tokens than was forced", records.len());
        result.gate(GateName::TokenCount, Some(false), detail);
    }
    if let Some(failure) = &run.failure {
        result.gate(GateName::Engine, Some(false), format!("the engine failed: {failure}"));
    }
    served(result, records, traffic.kind);
}

/// Whether there were requests to send until the measured ones were done; a system that does not keep up has enough of them waiting.
fn sustained(result: &mut ServeResult, run: &Run, traffic: &Traffic<'_>, records: &[Record]) {
    let Some(until) = run.loaded_until.filter(|_| traffic.goes_on) else { return };
    let stays = || records.iter().filter_map(|record| stay(run, record));
    let all: f64 = stays().map(|stay| stay.departed - stay.arrival).sum();
    let unloaded: f64 = stays().map(|stay| (stay.departed - stay.arrival.max(until)).max(0.0)).sum();
    if unloaded > MAX_UNLOADED_SHARE * all {
        result.gate(
            GateName::SustainedLoad,
            Some(false),
            format!(
                "no request was left to send after {}, and {:.0} % of the measured requests' time came after that; {:.0} % may",
                Nanos(until),
                unloaded / all * 100.0,
                MAX_UNLOADED_SHARE * 100.0
            ),
        );
    }
}

/// Whether a system keeps up, and on what grounds.
pub(super) struct KeepsUp {
    stability: Stability,
    offered: usize,
    /// Requests that were turned away.
    shed: usize,
}

/// Judges the queue over the window.
pub(super) fn keeps_up(run: &Run, records: &[Record], window: &Window) -> KeepsUp {
    // Requests rejected by a full queue count as offered; those that never fit do not.
    let possible = |r: &&Record| !matches!(r.outcome, RequestOutcome::Rejected(reason) if reason != RejectReason::QueueFull);
    let offered = due(records, window).filter(possible).count();
    let shed = due(records, window).filter(|r| was_shed(r)).count();
    let stays: Vec<Stay> = stays(run).collect();
    KeepsUp { stability: stability(&stays, window, offered, wait_alone(run, records)), offered, shed }
}

/// How long a request waits that finds nobody before it: for the end of a step, which is what a first token takes once it is begun. Of a
/// live server, where that cannot be seen, the shortest wait for a first token.
fn wait_alone(run: &Run, records: &[Record]) -> f64 {
    if run.remote.is_some() {
        return run.records.iter().map(ttft).fold(f64::INFINITY, f64::min);
    }
    let begun = |r: &Record| Some(r.first_token?.0 - r.started?.0);
    let times: Vec<f64> = records.iter().filter_map(begun).collect();
    if times.is_empty() { 0.0 } else { median(&times) }
}

impl KeepsUp {
    /// `None` where the run is too short to tell.
    pub fn passed(&self) -> Option<bool> {
        if self.shed as f64 > MAX_SHED_SHARE * self.offered as f64 {
            return Some(false);
        }
        match self.stability.verdict {
            Verdict::KeepsUp => Some(true),
            Verdict::Saturated => Some(false),
            Verdict::Undetermined(_) => None,
        }
    }

    /// How many requests would tell, where more would.
    #[cfg(test)]
    pub fn needed(&self) -> Option<f64> {
        self.stability.needed(self.offered)
    }

    fn detail(&self) -> String {
        let percent = |requests: f64| format!("{:.1} %", requests / self.offered.max(1) as f64 * 100.0);
        // Of requests that are turned away none waits: what grows says nothing.
        let growing = self.shed == 0 || self.stability.verdict == Verdict::Saturated;
        let growth = self.stability.growth.filter(|_| growing).map_or_else(
            || format!("{} requests were offered", self.offered),
            |g| {
                format!(
                    "requests in the system grew by {} of the {} offered ({:.1} % interval {} to {})",
                    percent(g.change),
                    self.offered,
                    CONFIDENCE * 100.0,
                    percent(g.low),
                    percent(g.high)
                )
            },
        );
        let shed =
            if self.shed > 0 { format!(", and {} were turned away", self.shed) } else { String::new() };
        let verdict = match (self.passed(), self.stability.verdict) {
            (Some(true), _) => "",
            (Some(false), _) => "; it does not keep up",
            (None, Verdict::Undetermined(UndecidedReason::TooFewRequests)) => &format!(
                "; at fewer than {MIN_OFFERED} no trend of the queue is seen, and only a longer run can tell"
            ),
            (None, Verdict::Undetermined(UndecidedReason::ShortWindow)) => {
                "; they came within less time than one of them takes, and only a longer run can tell"
            }
            (None, _) => {
                let needed = self.stability.needed(self.offered).map_or_else(String::new, |needed| {
                    format!(": about {needed:.0} requests, where the queue stays as it was")
                });
                &format!(
                    "; below {:.0} % it keeps up, and only a longer run can tell{needed}",
                    TOLERATED_GROWTH * 100.0
                )
            }
        };
        format!("{growth}{shed}{verdict}")
    }
}

/// What ended a run before it was decided whether the system keeps up.
fn limit(run: &Run, traffic: &Traffic<'_>) -> &'static str {
    let asked = traffic.measured.len();
    let most = traffic.extension.as_ref().map_or(asked, |extension| extension.max_requests);
    if traffic.time_limit.is_some_and(|limit| run.end >= limit.0) {
        "--time-limit"
    } else if run.measured.len() < most && run.measured.end == traffic.plan.len() {
        "the trace"
    } else if run.measured.len() < most {
        // More were allowed, and not needed.
        "a missed objective"
    } else if most > asked {
        "--max-requests"
    } else {
        "--requests"
    }
}

/// Checks whether the system kept up.
pub(super) fn saturation(
    result: &mut ServeResult,
    run: &Run,
    traffic: &Traffic<'_>,
    records: &[Record],
    window: &Window,
    infinite: bool,
) {
    let mut reasons = Vec::new();
    if infinite && records.len() > 1 {
        reasons.push(Cause::AllAtOnce);
    }
    if traffic.kind == LoadMode::Open && !infinite {
        let judged = keeps_up(run, records, window);
        let passed = judged.passed();
        let ended = || format!(" ({} ended this one after {})", limit(run, traffic), judged.offered);
        let detail = judged.detail() + &passed.map_or_else(ended, |_| String::new());
        if passed == Some(false) {
            reasons.push(Cause::GateFailed { gate: GateName::KeepsUp, detail: detail.clone() });
        }
        result.gates.push(Gate { name: GateName::KeepsUp, passed, detail });
    }
    if reasons.is_empty() {
        return sustained(result, run, traffic, records);
    }
    if result.validity == Validity::Valid {
        result.validity = Validity::Saturated;
    }
    result.reasons.append(&mut reasons);
    // Of requests that all arrive at once, latencies are those of that many. Else they depend on how long the run was: a saturated system meets
    // no latency objective, however short it is.
    if !infinite {
        (result.ttft_ns, result.e2e_ns, result.queue_ns) = (None, None, None);
        let waiting = |c: &ClauseResult| c.clause.metric != SloMetric::Tpot;
        for clause in result.slo.iter_mut().filter(|c| waiting(c)) {
            (clause.observed, clause.low, clause.high) = (None, None, None);
            clause.met = Some(false);
        }
        if result.slo.iter().any(waiting) {
            result.slo_met = Some(false);
        }
    }
}
