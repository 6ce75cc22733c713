//! Which target fails first as the load grows, and which branch to follow from there.
//!
//! Enters: the points of a serving result in order of their load, with objectives, and what the reader will pay. Leaves: one [`Finding`],
//! or none where the load was not varied. Targets are the time to the first token, the time per output token, that of a whole request,
//! throughput, and cost. Pure.

use super::diagnose_serving::{Cost, rate};
use hbmark_core::result::serving::{
    Offered, Point, Quantiles, ServeReport, ServeResult, SloMetric, Validity,
};
use hbmark_core::result::{Finding, Severity};
use hbmark_core::units::Nanos;

/// The name of the rule.
pub(super) const FIRST_TARGET: &str = "first_target_failed";
/// The rule's name where cost is the only target, or holds.
pub(super) const COST: &str = "cost_of_tokens";

/// A target of the system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ServingTarget {
    Ttft,
    Tpot,
    E2e,
    Throughput,
    Cost,
}

impl ServingTarget {
    fn name(self) -> &'static str {
        match self {
            Self::Ttft => "TTFT",
            Self::Tpot => "TPOT",
            Self::E2e => "E2E",
            Self::Throughput => "throughput",
            Self::Cost => "cost",
        }
    }

    /// What to try, and what would confirm it.
    fn branch(self) -> (&'static str, &'static str) {
        match self {
            Self::Ttft => (
                "the queue and the prefill: more sequences or tokens a step (--max-num-seqs, --max-num-batched-tokens), prefix caching, \
                 a faster prefill; after that more instances",
                "queue p50 beside TTFT p50 at that rate: the larger of wait and prefill is the one to fix",
            ),
            Self::Tpot => (
                "the decode step: a smaller batch (--max-num-seqs), fewer prefill tokens a step (--max-num-batched-tokens), fewer bytes (int8, \
                 q8_0, a smaller KV dtype)",
                "hbmark run at the batch and context of that rate: bytes, launches or the host",
            ),
            Self::E2e => (
                "its larger part: before the first token the queue and the prefill (--max-num-seqs, --max-num-batched-tokens, prefix caching), \
                 behind it the decode step (a smaller batch, fewer bytes) and the length of the outputs",
                "TTFT p50 beside E2E p50 at that rate: what is left is TPOT times the output tokens",
            ),
            Self::Throughput => (
                "capacity: a larger batch where memory allows, cheaper steps, or another instance",
                "a sweep of --max-num-seqs at that rate: served per second should rise with it or be the engine's limit",
            ),
            Self::Cost => (
                "tokens per hour of the device: a higher load within the objectives, a cheaper device, fewer bytes a token",
                "the highest rate under the objectives (hbmark serve search), and its tokens per second",
            ),
        }
    }
}

/// The load of a point that a sweep orders.
fn load(point: &Point) -> Option<f64> {
    match point.offered {
        Offered::Concurrency(n) => Some(n as f64),
        _ => rate(point),
    }
}

/// What failed at a point, the one that is furthest beyond its limit first.
fn failures(result: &ServeResult) -> Vec<(ServingTarget, String)> {
    let mut failed: Vec<(f64, ServingTarget, String)> = Vec::new();
    for clause in result.slo.iter().filter(|c| c.met == Some(false)) {
        let target = match clause.clause.metric {
            SloMetric::Tpot => ServingTarget::Tpot,
            SloMetric::E2e => ServingTarget::E2e,
            SloMetric::Ttft | SloMetric::Queue => ServingTarget::Ttft,
        };
        // Refused where the system does not keep up: then throughput is what failed.
        if let Some(observed) = clause.observed {
            let seen = observed.value();
            let parts = if target == ServingTarget::E2e { first_token_of(result) } else { String::new() };
            failed.push((
                seen / clause.clause.limit_ns,
                target,
                format!("{} was {}{parts}", clause.clause, Nanos(seen)),
            ));
        }
    }
    failed.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mut failed: Vec<(ServingTarget, String)> =
        failed.into_iter().map(|(_, target, words)| (target, words)).collect();
    if result.validity == Validity::Saturated {
        let offered = result.offered_per_s.unwrap_or(0.0);
        let words = format!("{offered:.3} per second were offered and {:.3} served", result.served_per_s);
        // A system that does not keep up fails every promise about waiting: throughput is the cause.
        failed.insert(0, (ServingTarget::Throughput, words));
    }
    failed
}

/// The part of a whole request that its first token took: `, TTFT p50 100 ms of E2E p50 12.0 s`.
fn first_token_of(result: &ServeResult) -> String {
    let p50 = |times: &Option<Quantiles>| times.as_ref()?.p50.map(|time| Nanos(time.value()));
    let parts = p50(&result.ttft_ns).zip(p50(&result.e2e_ns));
    parts.map_or_else(String::new, |(first, all)| format!(", TTFT p50 {first} of E2E p50 {all}"))
}

fn cost_per_million(result: &ServeResult, cost: Cost) -> f64 {
    cost.price_per_hour / (result.output_tokens_per_s * 3600.0) * 1e6
}

/// Whether a load is a number of requests at a time, and no rate: neither orders the other.
fn is_closed(point: &Point) -> bool {
    matches!(point.offered, Offered::Concurrency(_))
}

/// The points with usable results, the smallest load first; of two kinds of load those of the kind that varies.
fn by_load<'a>(points: &[(&'a Point, &'a ServeResult)]) -> Vec<(f64, &'a Point, &'a ServeResult)> {
    let mut swept: Vec<(f64, &Point, &ServeResult)> = points
        .iter()
        .filter(|(_, result)| result.validity != Validity::Invalid)
        .filter_map(|(point, result)| Some((load(point)?, *point, *result)))
        .collect();
    swept.sort_by(|a, b| a.0.total_cmp(&b.0));
    let varies = |closed: bool| {
        let mut loads =
            swept.iter().filter(|(_, point, _)| is_closed(point) == closed).map(|(load, ..)| *load);
        let least = loads.next();
        loads.next_back().zip(least).is_some_and(|(most, least)| least < most)
    };
    match [varies(false), varies(true)] {
        [true, false] => swept.retain(|(_, point, _)| !is_closed(point)),
        [false, true] => swept.retain(|(_, point, _)| is_closed(point)),
        _ => swept.clear(),
    }
    swept
}

/// What a million output tokens cost, where a limit was given: the least of the points that hold, or that there is no price while it is
/// undetermined whether any does. `None` where [`first_failure`] already reports it.
pub(super) fn cost(
    points: &[(&Point, &ServeResult)],
    first: Option<&Finding>,
    cost: Option<Cost>,
) -> Option<Finding> {
    let cost = cost?;
    if first.is_some_and(|finding| finding.regime.starts_with(ServingTarget::Cost.name())) {
        return None;
    }
    let priced = |result: &ServeResult| result.output_tokens_per_s > 0.0 && result.held().0 == Some(true);
    let within = points.iter().filter(|(_, result)| priced(result));
    let cheapest = within.min_by(|a, b| cost_per_million(a.1, cost).total_cmp(&cost_per_million(b.1, cost)));
    let Some((point, result)) = cheapest.copied() else { return undetermined(points) };
    let (least, limit) = (cost_per_million(result, cost), cost.limit_per_million_output_tokens);
    let holds = least <= limit;
    let (symptom, regime, severity) = if holds {
        ("output tokens cost no more than they may", "the cost is within its limit", Severity::Ok)
    } else {
        ("output tokens cost more than they may", "the cost is over its limit", Severity::Note)
    };
    let (response, next) = ServingTarget::Cost.branch();
    Some(Finding {
        rule: COST.to_owned(),
        severity,
        symptom: symptom.to_owned(),
        regime: regime.to_owned(),
        evidence: vec![format!(
            "{}: a million output tokens cost {least:.2} and may cost {limit}: {:.1} tokens per second at {:.2} per hour",
            point.label, result.output_tokens_per_s, cost.price_per_hour
        )],
        next: next.to_owned(),
        response: if holds { "none: there is room".to_owned() } else { response.to_owned() },
        cells: vec![point.label.clone()],
    })
}

/// That tokens have no price yet, where objectives are neither met nor missed.
fn undetermined(points: &[(&Point, &ServeResult)]) -> Option<Finding> {
    let open =
        points.iter().filter(|(_, result)| result.validity == Validity::Valid && result.held().0.is_none());
    let (cells, evidence): (Vec<String>, Vec<String>) = open
        .map(|(point, result)| (point.label.clone(), format!("{}: {}", point.label, result.held().1)))
        .unzip();
    (!cells.is_empty()).then(|| Finding {
        rule: COST.to_owned(),
        severity: Severity::Note,
        symptom: "no rate is shown to hold".to_owned(),
        regime: "the cost is undetermined: the runs are too short to tell".to_owned(),
        evidence,
        next: "the same load with more --requests, or without, until it is decided".to_owned(),
        response: "state no price of these rates until then".to_owned(),
        cells,
    })
}

/// The first target that fails as the load grows.
pub(super) fn first_failure(
    report: &ServeReport,
    points: &[(&Point, &ServeResult)],
    cost: Option<Cost>,
) -> Option<Finding> {
    let swept = by_load(points);
    let asked = cost.is_some() || swept.iter().any(|(.., result)| !result.slo.is_empty());
    let varied = swept.first()?.0 < swept.last()?.0;
    // A matrix has another workload in every row: its rates are not a sweep.
    if !asked || !varied || !report.matrix.is_empty() {
        return None;
    }
    // A search ran its rate several times: what it found goes before single runs at that rate or below.
    let found = report.search.as_ref().and_then(|search| search.max_rate);
    let beyond = |load: f64| found.is_none_or(|found| load > found * (1.0 + 1e-9));
    let at = swept.iter().position(|(load, _, result)| beyond(*load) && !failures(result).is_empty());
    let within = &swept[..at.unwrap_or(swept.len())];
    let too_dear = cost.and_then(|cost| dear(within, cost));
    let mut evidence = Vec::new();
    let (target, cells) = match (at, &too_dear) {
        (Some(at), None) => {
            let (load, point, result) = &swept[at];
            let all = failures(result);
            // A search runs one load several times, and not every run of it need fail.
            let same = swept.iter().filter(|(other, ..)| other.total_cmp(load).is_eq());
            let (runs, failed) = same.fold((0, 0), |(runs, failed), (_, _, result)| {
                (runs + 1, failed + usize::from(!failures(result).is_empty()))
            });
            let below = || within.iter().rev().filter(|(other, ..)| other < load);
            // Throughput is a target, too: a load of which it is open whether the system keeps up is not within every one.
            let smaller = below().find(|(_, point, _)| point.held());
            let open: Vec<String> = below()
                .take_while(|(_, point, _)| !point.held())
                .map(|(other, ..)| format!("{other:.3}"))
                .collect();
            let open = if open.is_empty() || report.search.is_some() {
                String::new()
            } else {
                format!("; undetermined at {}", open.join(", "))
            };
            let before = match (&report.search, found, smaller) {
                (_, Some(found), _) => format!("the search found {found:.3} to hold"),
                (Some(_), None, _) => "the search found no rate that holds".to_owned(),
                (None, None, Some((last, ..))) => format!("{last:.3} was within every target"),
                (None, None, None) => "no smaller load was shown to be within every target".to_owned(),
            };
            let of_runs = if runs > 1 { format!(" in {failed} of {runs} runs") } else { String::new() };
            evidence.push(format!("at {load:.3}{of_runs}: {}; {before}{open}", all[0].1));
            evidence
                .extend(all[1..].iter().map(|(target, words)| format!("then {}: {words}", target.name())));
            (all[0].0, vec![point.label.clone()])
        }
        (at, Some(words)) => {
            evidence.push(words.clone());
            if let Some(at) = at {
                let (load, point, result) = &swept[at];
                let (target, failed) = &failures(result)[0];
                evidence.push(format!(
                    "{} ends the load at {load:.3} ({}): {failed}",
                    target.name(),
                    point.label
                ));
            }
            (
                ServingTarget::Cost,
                within.last().map(|(_, point, _)| point.label.clone()).into_iter().collect(),
            )
        }
        (None, None) => return None,
    };
    let (response, next) = target.branch();
    Some(Finding {
        rule: FIRST_TARGET.to_owned(),
        severity: Severity::Note,
        symptom: format!("{} is the first target that fails as the load grows", target.name()),
        regime: format!("{} fails first", target.name()),
        evidence,
        next: next.to_owned(),
        response: response.to_owned(),
        cells,
    })
}

/// Whether no load within the other targets is cheap enough, and by how much.
fn dear(within: &[(f64, &Point, &ServeResult)], cost: Cost) -> Option<String> {
    let (load, _, result) =
        within.last().filter(|(.., result)| result.within_objectives().0 == Some(true))?;
    let least = cost_per_million(result, cost);
    let limit = cost.limit_per_million_output_tokens;
    (least > limit).then(|| {
        format!(
            "at {load:.3}, the most within the other targets, a million output tokens cost {least:.2} and may cost {limit}: {:.1} tokens per \
             second at {:.2} per hour",
            result.output_tokens_per_s, cost.price_per_hour
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::explain_serving;
    use crate::samples;

    /// Points at given rates, each within its targets or saturated.
    fn searched(rates: &[(f64, bool)]) -> ServeReport {
        let mut report = samples::sweep();
        let point = report.points.iter().find(|point| point.result.is_some()).unwrap().clone();
        let at = |(number, (rate, saturated)): (usize, &(f64, bool))| {
            let mut point =
                Point { offered: Offered::Rate(*rate), label: format!("run {number}"), ..point.clone() };
            let result = samples::keeps_up(&mut point, Some(!*saturated));
            (result.offered_per_s, result.served_per_s) =
                (Some(*rate), if *saturated { rate * 0.9 } else { *rate });
            for clause in &mut result.slo {
                clause.met = (!*saturated).then_some(true);
            }
            result.slo_met = (!*saturated).then_some(true);
            point
        };
        report.points = rates.iter().enumerate().map(at).collect();
        report.matrix.clear();
        report
    }

    #[test]
    fn a_load_that_failed_in_some_runs_was_not_within_every_target() {
        let report = searched(&[(20.0, false), (43.0, false), (43.0, true), (60.0, true)]);
        assert!(
            report.points.iter().all(|point| !point.result.as_ref().unwrap().slo.is_empty()),
            "objectives"
        );
        let findings = explain_serving(&report, None);
        let first = findings.iter().find(|finding| finding.rule == FIRST_TARGET).unwrap();
        assert!(
            first.evidence[0].starts_with("at 43.000 in 1 of 2 runs: ")
                && first.evidence[0].ends_with("20.000 was within every target"),
            "{:?}",
            first.evidence
        );
    }

    #[test]
    fn a_closed_loop_beside_an_open_one_is_no_larger_load() {
        let found = |report: &ServeReport| {
            let findings = explain_serving(report, None);
            findings.into_iter().find(|finding| finding.rule == FIRST_TARGET).map(|found| found.evidence)
        };
        let closed = |report: &mut ServeReport, at: usize| {
            report.points[at].offered = Offered::Concurrency(64);
        };
        let mut compared = searched(&[(20.0, false), (64.0, true)]);
        closed(&mut compared, 1);
        assert_eq!(found(&compared), None);
        // Beside rates that vary it is left out.
        let mut swept = searched(&[(20.0, false), (43.0, true), (64.0, false)]);
        let alone = found(&swept).unwrap();
        closed(&mut swept, 2);
        assert_eq!(found(&swept).unwrap(), alone);
    }

    #[test]
    fn a_load_that_was_not_seen_to_keep_up_is_not_within_every_target() {
        let mut report = searched(&[(20.0, false), (43.0, false), (60.0, true)]);
        samples::keeps_up(&mut report.points[1], None);
        let findings = explain_serving(&report, None);
        let first = findings.iter().find(|finding| finding.rule == FIRST_TARGET).unwrap();
        let ends = "; 20.000 was within every target; undetermined at 43.000";
        samples::ends(first, ends);
    }

    #[test]
    fn whole_requests_that_are_late_by_their_outputs_are_no_late_first_tokens() {
        use hbmark_core::result::serving::{Clause, ClauseResult};
        let mut report = searched(&[(4.0, false), (8.0, false)]);
        let result = report.points[1].result.as_mut().unwrap();
        // 200 tokens of 60 ms behind a first one of 100 ms.
        let times = |ns: f64| Some(Quantiles::of(std::iter::repeat_n(Some(ns), 400)));
        (result.ttft_ns, result.e2e_ns) = (times(1e8), times(1.2e10));
        let clause = |metric, limit_ns, ns: f64| {
            ClauseResult::of(&[ns; 400], Clause { metric, percentile: 0.95, limit_ns })
        };
        result.slo = vec![clause(SloMetric::Ttft, 1e9, 1e8), clause(SloMetric::E2e, 1e10, 1.2e10)];
        let findings = explain_serving(&report, None);
        let first = findings.iter().find(|finding| finding.rule == FIRST_TARGET).unwrap();
        assert_eq!(first.regime, "E2E fails first");
        samples::says(first, "e2e_p95 ≤ 10.0 s was 12.0 s, TTFT p50 100 ms of E2E p50 12.0 s");
        assert!(first.response.contains("the decode step"), "{first:?}");
    }

    #[test]
    fn what_a_search_found_goes_before_single_runs() {
        let mut report = searched(&[(20.0, false), (43.0, false), (43.0, true), (45.0, false), (60.0, true)]);
        let first = |report: &ServeReport| {
            let findings = explain_serving(report, None);
            findings.into_iter().find(|finding| finding.rule == FIRST_TARGET).unwrap().evidence.remove(0)
        };
        let clauses = report.points[0].result.as_ref().unwrap().slo.iter().map(|c| c.clause).collect();
        let slo = hbmark_core::result::serving::Slo { clauses };
        let search = |max_rate| hbmark_core::result::serving::Search {
            slo: slo.clone(),
            max_rate,
            ..Default::default()
        };
        report.search = Some(search(Some(43.0)));
        let evidence = first(&report);
        assert!(
            evidence.starts_with("at 60.000: ") && evidence.ends_with("the search found 43.000 to hold"),
            "{evidence}"
        );
        let question = crate::analysis::capacity::Question {
            target_rate: 100.0,
            mean_rate: None,
            slo: None,
            headroom: 0.2,
            gpus_per_instance: 1,
            prices: None,
            context: None,
            concurrency: None,
        };
        let planned = crate::analysis::capacity::capacity(&report, &question).unwrap();
        assert!((planned.rate_per_instance - 43.0).abs() < 1e-9, "{}", planned.rate_per_instance);
        report.search = Some(search(None));
        let evidence = first(&report);
        assert!(evidence.ends_with("the search found no rate that holds"), "{evidence}");
        let none = crate::analysis::capacity::capacity(&report, &question).unwrap_err().to_string();
        assert!(none.contains("the search found no rate"), "{none}");
    }

    #[test]
    fn a_rate_that_neither_met_nor_missed_its_objectives_has_no_price() {
        let mut report = searched(&[(20.0, false), (43.0, false)]);
        let cost = Cost { price_per_hour: 2.0, limit_per_million_output_tokens: 1e-6 };
        let found = |report: &ServeReport| {
            let findings = explain_serving(report, Some(cost));
            findings.into_iter().filter(|finding| finding.regime.contains("cost")).collect::<Vec<_>>()
        };
        assert!(found(&report)[0].evidence[0].contains("may cost"));
        for point in &mut report.points {
            let result = point.result.as_mut().unwrap();
            result.slo_met = None;
            result.slo.iter_mut().for_each(|clause| clause.met = None);
        }
        let [open] = found(&report).try_into().unwrap();
        assert!(open.regime.starts_with("the cost is undetermined"), "{open:?}");
        assert!(open.evidence.iter().all(|line| !line.contains("may cost")), "{open:?}");
    }

    #[test]
    fn saturation_comes_first_and_what_meets_its_objectives_last() {
        let mut report = searched(&[(20.0, false), (60.0, true)]);
        // Ten milliseconds of queue where a second is allowed.
        let low = report.points[0].result.as_mut().unwrap();
        assert_eq!(low.slo_met, Some(true));
        low.breakdown.schedule_ns = low.breakdown.device_ns.max(1.0) * 100.0;
        let findings = explain_serving(&report, None);
        let place = |rule: &str| findings.iter().position(|finding| finding.rule == rule);
        let saturation = place("scheduler_saturation").unwrap();
        for finding in &findings[..saturation] {
            assert!(finding.severity > Severity::Warn, "{} before saturation", finding.rule);
        }
        for finding in &findings {
            assert!(finding.severity < Severity::Warn || finding.cells != ["run 0"], "{finding:?}");
        }
    }
}
