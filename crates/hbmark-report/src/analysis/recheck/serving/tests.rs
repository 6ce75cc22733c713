//! A serving result as the program saves it is what it was; edited in any way it is not.

use super::*;
use crate::analysis::{ChecklistVerdict, FailOn, of_serving, serving_failures};
use crate::samples;

/// Saved results with their requests.
fn saved() -> Vec<ServeReport> {
    let all: Vec<ServeReport> = ["serve-single", "serve-sweep"].map(samples::saved).into();
    assert!(all.iter().flat_map(|report| &report.points).any(|point| {
        point.result.as_ref().is_some_and(|result| result.requests.is_some() && result.ttft_ns.is_some())
    }));
    all
}

/// What becomes of the first point that keeps up.
fn edited(change: impl Fn(&mut ServeResult)) -> ServeResult {
    let mut report: ServeReport = samples::saved("serve-sweep");
    let at = report.points.iter().position(|point| {
        point.result.as_ref().is_some_and(|r| r.validity == Validity::Valid && r.requests.is_some())
    });
    let at = at.unwrap();
    change(report.points[at].result.as_mut().unwrap());
    recheck_serving(&mut report);
    let result = report.points[at].result.clone().unwrap();
    if result.validity == Validity::Invalid {
        assert_eq!(of_serving(&report).verdict(), ChecklistVerdict::Invalid);
        assert_eq!(serving_failures(&report, &[FailOn::Invalid]).len(), 1);
    }
    result
}

fn rule(change: impl Fn(&mut ServeResult)) -> Option<Rule> {
    let result = edited(change);
    result.reasons.iter().find_map(|reason| match reason {
        Cause::Inconsistent { rule, .. } => Some(*rule),
        _ => None,
    })
}

#[test]
fn results_as_they_were_saved_are_what_they_were() {
    for report in saved() {
        let mut again = report.clone();
        recheck_serving(&mut again);
        for (again, point) in again.points.iter().zip(&report.points) {
            assert_eq!(again, point);
        }
    }
}

#[test]
fn percentiles_that_the_requests_do_not_give_are_invalid_and_replaced() {
    let halved = |q: &mut Option<Quantity>| *q = q.map(|q| (q.value() / 2.0).into());
    let honest = edited(|_| {});
    assert_eq!(honest.validity, Validity::Valid);
    let latencies: [fn(&mut ServeResult) -> &mut Option<Quantiles>; 4] =
        [|r| &mut r.ttft_ns, |r| &mut r.tpot_ns, |r| &mut r.e2e_ns, |r| &mut r.queue_ns];
    for of in latencies {
        let result = edited(|result| halved(&mut of(result).as_mut().unwrap().mean));
        assert_eq!(result.validity, Validity::Invalid);
        assert!(
            matches!(result.reasons[0], Cause::Inconsistent { rule: Rule::Lists, .. }),
            "{:?}",
            result.reasons
        );
        let mean = |mut result: ServeResult| of(&mut result).as_ref().unwrap().mean.unwrap().value();
        assert!(near(mean(result), mean(honest.clone())));
    }
}

#[test]
fn objectives_that_the_requests_do_not_meet_are_not_met() {
    let strict = edited(|result| {
        assert!(!result.slo.is_empty());
        for clause in &mut result.slo {
            clause.clause.limit_ns = 1.0;
            clause.met = Some(true);
        }
        result.slo_met = Some(true);
    });
    assert_eq!((strict.validity, strict.slo_met), (Validity::Invalid, Some(false)));
    assert_eq!(rule(|result| result.slo_met = Some(result.slo_met != Some(true))), Some(Rule::Lists));
}

#[test]
fn a_valid_point_has_its_latencies() {
    assert_eq!(rule(|r| r.ttft_ns = None), Some(Rule::Lists));
}

#[test]
fn counts_and_columns_agree() {
    assert_eq!(rule(|r| r.served -= 1), Some(Rule::RequestCount));
    assert_eq!(rule(|r| r.unfinished += 1), Some(Rule::RequestCount));
    assert_eq!(rule(|r| _ = r.rejected.insert("queue_full".into(), 3)), Some(Rule::RequestCount));
    assert_eq!(rule(|r| r.measured *= 10), Some(Rule::Lists));
    let requests = |r: &mut ServeResult, change: &dyn Fn(&mut Requests)| change(r.requests.as_mut().unwrap());
    assert_eq!(rule(|r| requests(r, &|q| _ = q.last_token_ns.pop())), Some(Rule::Lists));
    assert_eq!(rule(|r| requests(r, &|q| q.last_token_ns[3] = None)), Some(Rule::EndAfterFirstToken));
    assert_eq!(
        rule(|r| requests(r, &|q| q.last_token_ns[3] = Some(q.arrival_ns[3]))),
        Some(Rule::EndAfterFirstToken)
    );
    assert_eq!(rule(|r| requests(r, &|q| q.outcome[3] = SavedOutcome::Unfinished)), Some(Rule::RequestCount));
}

#[test]
fn the_window_and_its_rates_are_those_of_the_arrivals() {
    assert_eq!(rule(|r| r.window_s /= 2.0), Some(Rule::Throughput));
    assert_eq!(rule(|r| r.served_per_s *= 2.0), Some(Rule::Throughput));
    assert_eq!(rule(|r| r.offered_per_s = r.offered_per_s.map(|rate| rate * 2.0)), Some(Rule::Throughput));
    assert_eq!(rule(|r| r.goodput_share = Some(0.123)), Some(Rule::Lists));
    assert_eq!(rule(|r| r.goodput_per_s = Some(1.2 * r.served_per_s)), Some(Rule::Throughput));
}

#[test]
fn no_point_is_better_than_its_gates() {
    let failed = |name: GateName| {
        edited(move |result| {
            let gate = result.gates.iter_mut().find(|gate| gate.name == name).unwrap();
            gate.passed = Some(false);
        })
    };
    assert_eq!(failed(GateName::InjectionLag).validity, Validity::Invalid);
    let saturated = failed(GateName::KeepsUp);
    assert_eq!(saturated.validity, Validity::Saturated);
    assert!(matches!(saturated.reasons[0], Cause::GateFailed { gate: GateName::KeepsUp, .. }));
}

#[test]
fn the_rate_of_a_search_is_one_that_was_tried_and_held() {
    use hbmark_core::result::serving::{Attempt, Search, SearchStage};
    let mut report: ServeReport = samples::saved("serve-sweep");
    let attempt =
        |rate: f64, met| Attempt { stage: SearchStage::Sustain, rate, seed: 1, met, why: String::new() };
    let attempts = vec![attempt(4.0, Some(true)), attempt(8.0, Some(false))];
    let mut found = |max_rate: f64| {
        let search = Search {
            max_rate: Some(max_rate),
            confirmed: true,
            attempts: attempts.clone(),
            ..Search::default()
        };
        report.search = Some(search);
        recheck_serving(&mut report);
        let search = report.search.as_ref().unwrap();
        (search.max_rate, search.confirmed, serving_failures(&report, &[FailOn::NoRate]).len())
    };
    assert_eq!(found(4.0), (Some(4.0), true, 0));
    assert_eq!(found(8.0), (None, false, 1));
    assert_eq!(found(80.0), (None, false, 1));
}
