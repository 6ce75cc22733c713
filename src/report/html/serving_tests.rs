//! The page of serving results from the virtual clock, which never change: the right values in the right plots, and nothing a stranger
//! wrote becomes markup.

use super::render_serving;
use super::tests::{HOSTILE, count, texts, well_formed};
use crate::insight::Finding;
use crate::measure::doctor::Severity;
use crate::report::serving::ServeReport;
use crate::report::serving::tests::{report, sweep};
use crate::serve::latency::{Quantity, Validity};
use crate::serving::Mode;
use crate::serving::cold::{ColdPhase, ColdStart, Launch};
use crate::units::Nanos;

/// The anchors of the plots.
const PLOTS: [&str; 4] = ["load", "latency", "timeline", "breakdown"];

fn finding(text: &str) -> Finding {
    Finding {
        rule: "planted".into(),
        severity: Severity::Warn,
        symptom: text.into(),
        regime: text.into(),
        evidence: vec![text.into()],
        next: text.into(),
        response: text.into(),
        cells: Vec::new(),
    }
}

pub(super) fn hostile_findings() -> Vec<Finding> {
    vec![finding(HOSTILE)]
}

/// A sweep in which every text a file can carry is hostile.
pub(super) fn hostile() -> ServeReport {
    let mut report = sweep();
    let text = || HOSTILE.to_owned();
    report.model.name = text();
    report.model.source = text();
    report.model.hash = text();
    report.command = text();
    report.note = Some(text());
    report.hypothesis = Some(text());
    report.workload.name = text();
    report.workload.source = text();
    report.step_model = Some(text());
    report.warnings = vec![text()];
    report.config.insert(text(), serde_json::Value::String(text()));
    for point in &mut report.points {
        point.label = text();
        point.not_run = Some(text());
        if let Some(result) = &mut point.result {
            result.reasons = vec![text()];
            result.gates[0].name = text();
            result.gates[0].detail = text();
            result.rejected.insert(text(), 1);
        }
    }
    report
}

#[test]
fn the_page_has_every_plot_for_a_desk_and_a_phone_with_a_table_behind_each() {
    let page = well_formed(&render_serving(&sweep(), &[]));
    for plot in PLOTS {
        let (wide, narrow) =
            (count(&page, &format!("#{plot} svg.wide")), count(&page, &format!("#{plot} svg.narrow")));
        assert!(wide > 0 && wide == narrow, "{plot}: {wide} and {narrow}");
        assert!(count(&page, &format!("#{plot} details table")) > 0, "{plot} has a table behind it");
        assert_eq!(count(&page, &format!("#{plot} button[data-save=png]")), wide);
    }
    assert_eq!(count(&page, "#load svg.wide"), 4, "TTFT, TPOT, E2E, throughput");
    assert_eq!(count(&page, "#timeline svg.wide"), 4 * 3, "four strips for each point that was run");
}

#[test]
fn plots_hold_the_values_of_the_result_and_mark_what_was_rejected() {
    let report = sweep();
    let page = well_formed(&render_serving(&report, &[finding("a planted finding")]));
    let marks = |plot: &str| texts(&page, &format!("#{plot} svg.wide .mark > title"));
    let first = report.points[0].result.as_ref().unwrap();
    let p95 = Nanos(first.ttft_ns.as_ref().unwrap().p95.unwrap().value());
    let shown = format!("TTFT p95\n{p95}");
    assert!(marks("latency").iter().any(|m| m.starts_with(&shown)), "{shown} {:?}", marks("latency"));
    let unsure: Vec<String> =
        marks("latency").into_iter().filter(|m| m.starts_with("TTFT p99\n≥ ")).collect();
    assert!(unsure[0].contains("the largest seen\n200 values; 1000 are needed"), "{unsure:?}");
    assert!(
        texts(&page, "#load svg.wide text").contains(&"ttft_p95 ≤ 500 ms".to_owned()),
        "the objective's line"
    );
    // The last point that was run was not accepted: it is crossed in every plot that shows it.
    let last = report.points.iter().rfind(|p| p.result.is_some()).unwrap();
    assert_eq!(last.result.as_ref().unwrap().slo_met, Some(false));
    let crossed = texts(&page, "#load svg.wide .mark:has(.cross) > title");
    assert!(crossed.iter().any(|m| m.contains(&last.label)), "{crossed:?}");
    assert!(crossed.iter().all(|m| !m.contains(&report.points[0].label)), "{crossed:?}");
    let line = first.timeline.as_ref().unwrap();
    assert!(marks("timeline").len() >= 3 * 6 * line.spans.len() / 2);
    let found = texts(&page, "#findings").concat();
    assert!(found.contains("a planted finding") && found.contains("rate 64"), "{found}");
    assert!(texts(&page, "#gates td").iter().any(|t| t == "injection lag"));
    assert_eq!(texts(&page, "#reproduce pre"), ["hbmark serve --virtual"]);
    assert!(texts(&page, ".notice")[0].starts_with("VIRTUAL"));
}

#[test]
fn a_saturated_point_has_no_latency_and_stands_at_the_edge() {
    let mut report = sweep();
    let result = report.points[1].result.as_mut().unwrap();
    result.validity = Validity::Saturated;
    result.reasons = vec!["planted saturation".into()];
    (result.ttft_ns, result.e2e_ns, result.queue_ns) = (None, None, None);
    let page = well_formed(&render_serving(&report, &[]));
    let marks = texts(&page, "#load svg.wide .mark:has(.cross) > title");
    assert!(
        marks.iter().any(|m| m.starts_with("TTFT is refused") && m.contains("SATURATED: planted saturation")),
        "{marks:?}"
    );
    assert!(texts(&page, "#latency figcaption").concat().contains("are refused"));
}

#[test]
fn one_point_says_what_a_curve_needs_and_an_old_result_that_it_has_no_timeline() {
    let mut one = report(Mode::Single, 4.0);
    one.points[0].result.as_mut().unwrap().timeline = None;
    let page = well_formed(&render_serving(&one, &[]));
    assert!(texts(&page, "#load .absent")[0].contains("--sweep rate="));
    assert!(texts(&page, "#timeline .absent")[0].contains("before timelines were kept"));
    assert_eq!(count(&page, "#latency svg.wide"), 1);
}

#[test]
fn a_cold_start_is_bars_with_their_phases() {
    let mut report = report(Mode::Single, 4.0);
    let phase = |name: &str, ns: f64| ColdPhase {
        name: name.into(),
        holds: "what it holds".into(),
        median_ns: ns,
        min_ns: ns * 0.9,
        max_ns: ns * 1.1,
        first_launch_ns: ns * 2.0,
    };
    report.points.clear();
    report.cold_start = Some(ColdStart {
        prompt_tokens: 16,
        phases: vec![phase("process", 5e6), phase(HOSTILE, 3e8)],
        to_first_token: phase("all", 3.05e8),
        launches: vec![Launch { phases_ns: vec![5e6, 3e8], to_first_token_ns: 3.05e8 }],
    });
    let page = well_formed(&render_serving(&report, &[]));
    assert_eq!((count(&page, "#cold svg.wide .mark"), count(&page, "img")), (3, 0));
    assert!(texts(&page, "#cold .mark > title")[0].starts_with("process\nmedian 5.00 ms"));
}

#[test]
fn nothing_that_strangers_wrote_becomes_markup() {
    let text = render_serving(&hostile(), &hostile_findings());
    let page = well_formed(&text);
    assert_eq!((count(&page, "img"), count(&page, "script")), (0, 1));
    assert_eq!(texts(&page, "h1"), [HOSTILE]);
    assert_eq!(text.matches("</script").count(), 1);
    assert_eq!(count(&page, "[src], [href], [onerror]"), 0);
}

#[test]
fn numbers_that_make_no_sense_draw_no_nonsense() {
    let mut report = sweep();
    for point in &mut report.points {
        let Some(result) = &mut point.result else { continue };
        if let Some(q) = &mut result.ttft_ns {
            (q.p50, q.p95, q.max) =
                (Some(Quantity::Finite(-5.0)), Some(f64::INFINITY.into()), Some(Quantity::Finite(0.0)));
        }
        result.breakdown.wall_ns = 0.0;
        if let Some(line) = &mut result.timeline {
            line.span_ns = 0.0;
            line.spans[0].running = 1e308;
        }
    }
    let text = render_serving(&report, &[]);
    assert!(!text.contains("NaN") && !text.contains("=\"inf") && !text.contains(",inf"));
    well_formed(&text);
}
