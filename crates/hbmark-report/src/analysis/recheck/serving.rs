//! A saved serving result, held against its own requests and gates.
//!
//! Enters: a [`ServeReport`] from a file. Leaves: the same, in which counts, latencies and objectives are those of the measured requests, and
//! no point is better than its gates. What a file keeps no samples of (rates, averages over time, the details of gates) stays as it says.

use crate::analysis::words::{answer, precise};
use hbmark_core::result::serving::{
    ClauseResult, GateName, Offered, Point, Quantiles, Quantity, Requests, SavedOutcome, ServeKind,
    ServeReport, ServeResult, SloMetric, Validity, throughput_end,
};
use hbmark_core::result::{Cause, ConsistencyRule as Rule};

/// Times are kept as whole nanoseconds; a difference of two of them is this much off at the most.
const ROUNDING_NS: f64 = 2.0;
/// The rounding of sums of them.
const ROUNDING: f64 = 1e-9;

/// Takes from the requests of every point what follows from them, and marks a point invalid that says another thing.
pub fn recheck_serving(report: &mut ServeReport) {
    // A live server may send several tokens at first, and does not say when a request was started.
    let live = report.kind == ServeKind::ServeLive;
    report.points.iter_mut().for_each(|point| recheck(point, live));
    if let Some(search) = &mut report.search
        && let Some(rate) = search.max_rate
        && !search.attempts.iter().any(|tried| tried.met == Some(true) && same_rate(tried.rate, rate))
    {
        (search.max_rate, search.confirmed, search.sustained) = (None, false, None);
        search.note = format!("the file names {rate:.3} per second, and no run at that rate held");
    }
}

fn same_rate(a: f64, b: f64) -> bool {
    (a / b - 1.0).abs() < 1e-6
}

fn recheck(point: &mut Point, live: bool) {
    let Some(result) = &mut point.result else { return };
    let found = result.requests.take().map(|requests| {
        let found = columns(&requests, result).or_else(|| {
            let window = window(&requests, result, live, point.offered);
            figures(&requests, result, live).or(window)
        });
        result.requests = Some(requests);
        found
    });
    if let Some((rule, detail)) = found.flatten() {
        result.validity = Validity::Invalid;
        result.reasons.insert(0, Cause::Inconsistent { rule, detail });
    }
    by_gates(result);
}

/// No point is better than its gates and reasons.
fn by_gates(result: &mut ServeResult) {
    let failed = result.gates.iter().filter(|gate| gate.passed == Some(false));
    for gate in failed {
        let cause = Cause::GateFailed { gate: gate.name, detail: gate.detail.clone() };
        if !result
            .reasons
            .iter()
            .any(|r| matches!(r, Cause::GateFailed { gate: name, .. } if *name == gate.name))
        {
            result.reasons.push(cause);
        }
    }
    for reason in &result.reasons {
        let validity = match reason {
            Cause::GateFailed { gate: GateName::KeepsUp, .. } | Cause::AllAtOnce | Cause::LatenciesRise => {
                Validity::Saturated
            }
            Cause::GateFailed { .. } | Cause::Inconsistent { .. } => Validity::Invalid,
            _ => continue,
        };
        if result.validity == Validity::Valid || validity == Validity::Invalid {
            result.validity = validity;
        }
    }
}

type Broken = (Rule, String);

/// As many of everything, in the order of time.
fn columns(requests: &Requests, result: &ServeResult) -> Option<Broken> {
    let n = requests.arrival_ns.len();
    let lengths = [
        requests.started_ns.len(),
        requests.first_token_ns.len(),
        requests.last_token_ns.len(),
        requests.prompt_tokens.len(),
        requests.output_tokens.len(),
        requests.cached_tokens.len(),
        requests.outcome.len(),
        result.measured,
        // Known of all, or of none.
        if requests.sent_ns.is_empty() { n } else { requests.sent_ns.len() },
    ];
    if let Some(other) = lengths.into_iter().find(|length| *length != n) {
        return Some((
            Rule::Lists,
            format!("{n} arrivals of requests, and {other} of what else is known of them"),
        ));
    }
    let backwards = (0..n).find(|i| {
        let times = [
            Some(requests.arrival_ns[*i]),
            requests.sent_ns.get(*i).copied().flatten(),
            requests.started_ns[*i],
            requests.first_token_ns[*i],
            requests.last_token_ns[*i],
        ];
        let unserved = served(requests, *i) && (times[3].is_none() || times[4].is_none());
        unserved || !times.into_iter().flatten().is_sorted()
    });
    backwards.map(|i| {
        let detail = format!(
            "request {} is served and its arrival, sending, start, first and last token are not in order",
            i + 1
        );
        (Rule::EndAfterFirstToken, detail)
    })
}

fn served(requests: &Requests, i: usize) -> bool {
    requests.outcome[i] == SavedOutcome::Served
}

/// Replaces what the requests say by what they say; the first that was another thing.
fn figures(requests: &Requests, result: &mut ServeResult, live: bool) -> Option<Broken> {
    let n = requests.arrival_ns.len();
    let all = |metric| (0..n).map(move |i| requests.latency(i, metric));
    let mut broken: Option<Broken> = None;
    let mut note = |rule: Rule, detail: String| {
        broken.get_or_insert((rule, detail));
    };
    let count = |outcome: SavedOutcome| requests.outcome.iter().filter(|own| **own == outcome).count();
    for (what, stated, counted) in [
        ("served", &mut result.served, count(SavedOutcome::Served)),
        ("unfinished", &mut result.unfinished, count(SavedOutcome::Unfinished)),
    ] {
        if *stated != counted {
            note(
                Rule::RequestCount,
                format!("{stated} requests {what} by the summary, and {counted} one by one"),
            );
            *stated = counted;
        }
    }
    let rejected = n - result.served - result.unfinished;
    let stated: usize = result.rejected.values().sum();
    if rejected != stated {
        note(
            Rule::RequestCount,
            format!("{stated} requests rejected by the summary, and {rejected} one by one"),
        );
    }
    if result.validity == Validity::Valid && result.ttft_ns.is_none() {
        let detail =
            "latencies are left out, as of a saturated point, and the point is called valid".to_owned();
        note(Rule::Lists, detail);
    }
    let knows = |metric| !(live && matches!(metric, SloMetric::Tpot | SloMetric::Queue));
    for (metric, stated) in [
        (SloMetric::Ttft, &mut result.ttft_ns),
        (SloMetric::Tpot, &mut result.tpot_ns),
        (SloMetric::E2e, &mut result.e2e_ns),
        (SloMetric::Queue, &mut result.queue_ns),
    ] {
        // What is not reported of a saturated point stays so.
        let Some(stated) = stated.as_mut().filter(|_| knows(metric)) else { continue };
        let own = Quantiles::of(all(metric));
        if let Some(detail) = differs(metric, stated, &own) {
            note(Rule::Lists, detail);
            *stated = own;
        }
    }
    let refused = result.ttft_ns.is_none();
    let mut judged_again = false;
    for stated in result.slo.iter_mut().filter(|clause| knows(clause.clause.metric)) {
        if refused && stated.clause.metric != SloMetric::Tpot {
            continue;
        }
        let values: Vec<f64> = all(stated.clause.metric).flatten().collect();
        let own = ClauseResult::of(&values, stated.clause);
        // A limit that is met or missed by less than the rounding of times is left as it was.
        let (low, high) = (own.low.map(Quantity::value), own.high.map(Quantity::value));
        let close = |bound: Option<f64>| bound.is_some_and(|at| near(at, stated.clause.limit_ns));
        if own.met != stated.met && !close(low) && !close(high) {
            let word = |met| answer(met, ["met", "missed", "undetermined"]);
            let detail = format!(
                "{own} is {} by the requests, and the summary says {}",
                word(own.met),
                word(stated.met)
            );
            // Results of before kept no interval and were judged by the percentile alone: undetermined is not a contradiction there.
            if stated.low.is_some() || stated.observed.is_none() || own.met.is_some() {
                note(Rule::Lists, detail);
            }
            *stated = own;
            judged_again = true;
        }
    }
    if let Some(detail) = (!live).then(|| goodput(requests, result)).flatten() {
        note(Rule::Lists, detail);
    }
    let met = ClauseResult::all_met(&result.slo);
    if met != result.slo_met {
        if !judged_again {
            note(Rule::Lists, "whether the objectives are met does not follow from each of them".to_owned());
        }
        result.slo_met = met;
    }
    broken
}

/// Replaces the share of requests within every objective where they say another one.
fn goodput(requests: &Requests, result: &mut ServeResult) -> Option<String> {
    let n = requests.arrival_ns.len();
    let stated = result.goodput_share.filter(|_| n > 0)?;
    let meets = |i: &usize| {
        let within = |clause: &ClauseResult| {
            let clause = clause.clause;
            requests.latency(*i, clause.metric).is_none_or(|value| value <= clause.limit_ns + ROUNDING_NS)
        };
        served(requests, *i) && result.slo.iter().all(within)
    };
    let own = (0..n).filter(meets).count() as f64;
    // A request at its limit may fall to either side of it.
    if (stated * n as f64 - own).abs() <= 1.5 {
        return None;
    }
    let own = own / n as f64;
    result.goodput_share = Some(own);
    Some(format!(
        "{:.1} % of the requests are within every objective by the summary, and {:.1} % one by one",
        stated * 100.0,
        own * 100.0
    ))
}

/// The span over which rates are taken, and the requests in it.
fn window(requests: &Requests, result: &ServeResult, live: bool, offered: Offered) -> Option<Broken> {
    let first = *requests.arrival_ns.first()? as f64;
    let last = *requests.arrival_ns.last()? as f64;
    let open = matches!(offered, Offered::Rate(_) | Offered::AsRecorded) && last > first;
    let stated = result.window_s;
    let found = if open {
        let first_tokens = requests.first_token_ns.iter().flatten().map(|at| *at as f64);
        let spans = [throughput_end(last, first_tokens), last].map(|end| (end - first) / 1e9);
        // Older results have the span of the arrivals of an overloaded run, too.
        let off = |span: f64| (span - stated).abs();
        if off(spans[1]) < off(spans[0]) { spans[1] } else { spans[0] }
    } else {
        let end = requests.last_token_ns.iter().flatten().map(|at| *at as f64).fold(first, f64::max);
        (end - first) / 1e9
    };
    // A run that ended early has a shorter window, and requests that were not served.
    let ended_early = stated < found && result.served < result.measured;
    if !ended_early && (stated - found).abs() > 1e-8 + ROUNDING * found {
        return Some((
            Rule::Throughput,
            format!("rates are taken over {stated:.6} s, and the requests give {found:.6} s"),
        ));
    }
    let until = first + stated * 1e9 + ROUNDING_NS;
    let begun = if live { &requests.first_token_ns } else { &requests.started_ns };
    let services = begun.iter().zip(&requests.last_token_ns).zip(&requests.outcome);
    let services = services.filter(|(_, outcome)| **outcome == SavedOutcome::Served);
    let services: Vec<(f64, f64)> =
        services.filter_map(|((begun, end), _)| Some(((*begun)? as f64, (*end)? as f64))).collect();
    let shares = services.iter().map(|(begun, end)| {
        if begun < end {
            ((end.min(until) - begun) / (end - begun)).max(0.0)
        } else {
            f64::from(*end <= until)
        }
    });
    let shares: f64 = shares.sum();
    // Older results count those that end in the window.
    let ended = services.iter().filter(|(_, end)| *end <= until).count() as f64;
    // Requests before and behind the measured ones may be served in the window, too, and a part of those that did not finish.
    let around = (result.warmup_requests + result.cooldown_requests + result.unfinished) as f64;
    let said = result.served_per_s * stated;
    if !(shares.min(ended) - 2.0..=shares.max(ended) + around + 2.0).contains(&said) {
        let detail = format!(
            "{:.3} requests per second served, and {shares:.0} were in {stated:.3} s",
            result.served_per_s
        );
        return Some((Rule::Throughput, detail));
    }
    if let Some(good) = result.goodput_per_s.filter(|good| *good > result.served_per_s * (1.0 + ROUNDING)) {
        let detail = format!(
            "{good:.3} requests per second within every objective, and {:.3} were served",
            result.served_per_s
        );
        return Some((Rule::Throughput, detail));
    }
    let of_arrivals = stated.min((last - first) / 1e9);
    let offered = result.offered_per_s? * of_arrivals;
    let is_due = |at: &&u64| **at as f64 <= first + of_arrivals * 1e9 + ROUNDING_NS;
    let due = requests.arrival_ns.iter().filter(is_due).count() as f64;
    // The first of them begins the span; older results count it, too.
    (open && !(due - 2.5..=due + 1.5).contains(&offered)).then(|| {
        let detail = format!(
            "{:.3} requests per second offered, and {due:.0} were due in {of_arrivals:.3} s",
            offered / of_arrivals
        );
        (Rule::Throughput, detail)
    })
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() <= ROUNDING_NS + ROUNDING * b.abs() || (a.is_infinite() && b.is_infinite())
}

/// How a summary of a latency is not that of its requests.
fn differs(metric: SloMetric, stated: &Quantiles, own: &Quantiles) -> Option<String> {
    let counts = |q: &Quantiles| [q.n, q.infinite, q.missing];
    if counts(stated) != counts(own) {
        let [n, ..] = counts(own);
        return Some(format!("{} of {} requests by the summary, of {n} one by one", metric.name(), stated.n));
    }
    let figures = |q: &Quantiles| {
        [
            ("mean", q.mean),
            ("p50", q.p50),
            ("p75", q.p75),
            ("p90", q.p90),
            ("p95", q.p95),
            ("p99", q.p99),
            ("p99.9", q.p99_9),
            ("max", q.max),
        ]
    };
    figures(stated).into_iter().zip(figures(own)).find_map(|((name, stated), (_, own))| {
        let same = match (stated, own) {
            (Some(stated), Some(own)) => near(stated.value(), own.value()),
            (None, None) => true,
            _ => false,
        };
        let shown = |q: Option<Quantity>| q.map_or("none".to_owned(), |q| precise(q.value()));
        let metric = metric.name();
        (!same).then(|| {
            format!(
                "{name} of {metric} is {} by the summary, and {} by the requests",
                shown(stated),
                shown(own)
            )
        })
    })
}

#[cfg(test)]
mod tests;
