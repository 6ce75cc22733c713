//! The validity of a point: checks of the run itself, and whether the system is saturated.
//!
//! Enters: a run, and its result so far. Leaves: the result with its gates, its validity and reasons; latencies that only reflect the
//! length of a saturated run are removed.

use super::latency::{Window, queue, ttft};
use super::scheduler::RejectReason;
use super::serving_loop::{LoadMode, Record, RequestOutcome, Run, StepLog, Traffic};
use hbmark_core::result::Cause;
use hbmark_core::result::serving::{
    ClauseResult, Gate, GateName, MIN_REQUESTS, ServeResult, SloMetric, Validity,
};
use hbmark_core::stats::{mean, percentile, trend};

/// Largest p99 of the injection lag: this, or this share of the median TTFT, whichever is more.
const LAG_FLOOR_NS: f64 = 1e6;
const LAG_SHARE: f64 = 0.05;
/// Completed over offered below this is saturation.
const MIN_COMPLETED_SHARE: f64 = 0.98;
/// Largest relative error of Little's law: mean requests in the system against rate × time in system.
const LITTLE_TOLERANCE: f64 = 0.1;
/// Largest relative error of the arrival rate against the plan.
const RATE_TOLERANCE: f64 = 0.02;

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

/// Checks the run.
pub(super) fn gates(
    result: &mut ServeResult,
    run: &Run,
    traffic: &Traffic<'_>,
    records: &[Record],
    window: &Window,
) {
    let ms = |ns: f64| format!("{:.3} ms", ns / 1e6);
    // With too few requests for a p99 this is the largest lag.
    let mut lags: Vec<f64> = records.iter().filter(|r| r.enqueued.is_some()).map(|r| r.lag.0).collect();
    lags.sort_by(f64::total_cmp);
    let mut waits: Vec<f64> = records.iter().map(ttft).collect();
    waits.sort_by(f64::total_cmp);
    // Where most requests were rejected the median is infinite, and must not allow any lag.
    let middle = Some(percentile(&waits, 0.5)).filter(|wait| wait.is_finite()).unwrap_or(0.0);
    let allowed = LAG_FLOOR_NS.max(LAG_SHARE * middle);
    let lag = percentile(&lags, 0.99);
    result.gate(
        GateName::InjectionLag,
        (!lags.is_empty()).then_some(lag <= allowed),
        format!(
            "99 % of the requests were queued within {} of when they could be; {} is allowed",
            ms(lag),
            ms(allowed)
        ),
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
        result.gate(
            GateName::RealisedRate,
            (due >= MIN_REQUESTS).then_some((share - 1.0).abs() <= RATE_TOLERANCE),
            format!("{queued} of {due} planned requests were sent, at {offered:.3} per second{planned}"),
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
        let product = stays.len() as f64 / (window.to - window.from) * mean(&stays);
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
                format!(
                    "{seen:.3} requests in the system on average, rate × time in system gives {product:.3}"
                )
            },
        );
    }
    // This gate appears only when it fails.
    let lost = |s: &StepLog| s.load.used_blocks.saturating_sub(s.load.held_blocks);
    if let Some(most) = run.steps.iter().map(lost).max().filter(|lost| *lost > 0) {
        result.gate(
            GateName::KvAccounting,
            Some(false),
            format!("{most} KV blocks are in use that no running request holds"),
        );
    }
    let planned = traffic.plan[traffic.measured.clone()].iter();
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
}

/// Bins over which trends are judged.
const BINS: usize = 10;

/// Whether a series significantly grows to at least double over the run.
fn rises(values: &[f64]) -> bool {
    trend(values).is_some_and(|t| t.significant && t.relative_change > 1.0)
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
    if traffic.kind == LoadMode::Open && !infinite && records.len() >= MIN_REQUESTS {
        let (before, after) = (population_at(run, window.from), population_at(run, window.to));
        let growth = after as f64 - before as f64;
        // Requests rejected by a full queue count as offered; those that never fit do not.
        let possible = |r: &&Record| !matches!(r.outcome, RequestOutcome::Rejected(reason) if reason != RejectReason::QueueFull);
        let offered = due(records, window).filter(possible).count().max(1);
        let shed =
            records.iter().filter(|r| r.outcome == RequestOutcome::Rejected(RejectReason::QueueFull)).count();
        let completed = 1.0 - (growth + shed as f64) / offered as f64;
        // A stable queue fluctuates too: only growth beyond its own size counts, or less where every part of the window holds more
        // than the one before.
        let spread = ((before + after) as f64).sqrt();
        let parts = (0..BINS).map(|part| {
            let width = (window.to - window.from) / BINS as f64;
            let from = window.from + part as f64 * width;
            mean_population(run, &Window { from, to: from + width })
        });
        let climbs =
            trend(&parts.collect::<Vec<_>>()).is_some_and(|t| t.significant && t.relative_change > 0.0);
        let noise = if climbs { 1.5 * spread } else { 3.0 * spread };
        let turned_away = if shed > 0 { format!(", and {shed} found the queue full") } else { String::new() };
        let balance = format!(
            "{:.1} % of the offered requests were completed in the window: {before} were in the system at its start, {after} at \
             its end{turned_away}",
            completed * 100.0
        );
        let behind = completed < MIN_COMPLETED_SHARE;
        let beyond_chance =
            growth > noise.max(10.0) || shed as f64 > (1.0 - MIN_COMPLETED_SHARE) * offered as f64;
        if behind && beyond_chance {
            let detail = format!("{balance}; below {:.0} % it does not keep up", MIN_COMPLETED_SHARE * 100.0);
            reasons.push(Cause::GateFailed { gate: GateName::KeepsUp, detail });
        }
        let detail = if behind && !beyond_chance {
            format!("{balance}; so few requests cannot tell that from chance, a longer run can")
        } else {
            balance
        };
        let passed = if behind { beyond_chance.then_some(false) } else { Some(true) };
        result.gates.push(Gate { name: GateName::KeepsUp, passed, detail });
        let waits: Vec<f64> = bins(records.iter().map(ttft), records.len());
        let depths: Vec<f64> = bins(records.iter().map(queue), records.len());
        if rises(&waits) && rises(&depths) {
            reasons.push(Cause::LatenciesRise);
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
    // A saturated system meets no latency objective, however short the run.
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

/// Means of consecutive parts; infinite values count as the largest finite one.
fn bins(values: impl Iterator<Item = f64>, count: usize) -> Vec<f64> {
    let values: Vec<f64> = values.collect();
    let most = values.iter().copied().filter(|v| v.is_finite()).fold(0.0, f64::max);
    let finite: Vec<f64> = values.into_iter().map(|v| if v.is_finite() { v } else { most }).collect();
    finite.chunks(count.div_ceil(BINS).max(1)).map(mean).collect()
}
