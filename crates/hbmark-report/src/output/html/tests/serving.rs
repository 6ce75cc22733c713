//! The page of serving results from the virtual clock, which never change: the right values in the right plots, and no foreign
//! text becomes markup.

use super::{HOSTILE, count, every_plot_is_whole, texts, well_formed};
use crate::output::html::render;
use crate::output::kinds::serving::page::page;
use crate::samples::{single, sweep};
use hbmark_core::result::serving::{
    Attempt, ColdPhase, ColdStart, GateName, Launch, Quantity, Search, SearchStage, ServeReport, SloMetric,
    Span, Validity,
};
use hbmark_core::result::{Cause, Finding, Severity};
use hbmark_core::units::Nanos;

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
    report.model.as_mut().unwrap().name = text();
    report.model.as_mut().unwrap().source = text();
    report.model.as_mut().unwrap().hash = text();
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
        point.not_run = Some(Cause::other(text()));
        if let Some(result) = &mut point.result {
            result.reasons = vec![Cause::other(text())];
            result.gates[0].detail = text();
            result.rejected.insert(text(), 1);
        }
    }
    report
}

pub(super) fn render_serving(report: &ServeReport, findings: &[Finding]) -> String {
    render(&page(report, findings))
}

#[test]
fn the_page_has_every_plot_for_a_desk_and_a_phone_with_a_table_behind_each() {
    let page = well_formed(&render_serving(&sweep(), &[]));
    every_plot_is_whole(&page, &PLOTS);
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
    assert!(!marks("latency").iter().any(|m| m.starts_with("TTFT p99")), "200 values do not tell a p99");
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
    result.reasons = vec![Cause::other("planted saturation")];
    (result.ttft_ns, result.e2e_ns, result.queue_ns) = (None, None, None);
    let page = well_formed(&render_serving(&report, &[]));
    let marks = texts(&page, "#load svg.wide .mark:has(.cross) > title");
    assert!(
        marks
            .iter()
            .any(|m| m.starts_with("TTFT is not reported") && m.contains("SATURATED: planted saturation")),
        "{marks:?}"
    );
    assert!(texts(&page, "#latency figcaption").concat().contains("are not reported"));
}

#[test]
fn one_point_says_what_a_curve_needs_and_an_old_result_that_it_has_no_timeline() {
    let mut one = single();
    one.points[0].result.as_mut().unwrap().timeline = None;
    let page = well_formed(&render_serving(&one, &[]));
    assert!(texts(&page, "#load .absent")[0].contains("serve sweep rate="));
    assert!(texts(&page, "#timeline .absent")[0].contains("before timelines were kept"));
    assert_eq!(count(&page, "#latency svg.wide"), 1);
}

#[test]
fn a_cold_start_is_bars_with_their_phases() {
    let mut report = single();
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
    assert_eq!(texts(&page, "h1"), [format!("{HOSTILE}: serving sweep on a virtual clock")]);
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

/// The sweep with its second point's verdict about one objective turned to missed.
fn missing(metric: SloMetric, observed: Option<f64>) -> ServeReport {
    let mut report = sweep();
    let result = report.points[1].result.as_mut().unwrap();
    result.slo_met = Some(false);
    for clause in &mut result.slo {
        let missed = clause.clause.metric == metric;
        clause.met = Some(!missed);
        clause.observed = if missed { observed.map(Quantity::from) } else { clause.observed };
    }
    report
}

/// The hover texts of the second point's crosses in a plot over load.
fn crosses(page: &scraper::Html, plot: &str) -> Vec<String> {
    let marks = texts(page, &format!("#load svg.wide[data-name=load-{plot}] .mark:has(.cross) > title"));
    marks.into_iter().filter(|m| m.contains("rate 8")).collect()
}

#[test]
fn an_infinite_objective_is_a_cross_at_the_upper_edge() {
    let mut report = missing(SloMetric::Ttft, Some(f64::INFINITY));
    let ttft = report.points[1].result.as_mut().unwrap().ttft_ns.as_mut().unwrap();
    (ttft.p50, ttft.p95) = (Some(f64::INFINITY.into()), Some(f64::INFINITY.into()));
    let page = well_formed(&render_serving(&report, &[]));
    let crossed = crosses(&page, "ttft");
    assert!(
        matches!(crossed.as_slice(), [one] if one.starts_with("TTFT is p50, p95 infinite: requests were rejected")),
        "{crossed:?}"
    );
    assert!(texts(&page, "#load figcaption").concat().contains("infinite, because requests were rejected"));
}

#[test]
fn a_cross_is_of_the_metric_and_the_percentile_that_missed() {
    let page = well_formed(&render_serving(&missing(SloMetric::Ttft, Some(9e8)), &[]));
    let crossed = crosses(&page, "ttft");
    assert!(matches!(crossed.as_slice(), [one] if one.starts_with("TTFT p95 ")), "{crossed:?}");
    assert_eq!(
        (crosses(&page, "tpot"), crosses(&page, "e2e")),
        (vec![], vec![]),
        "the TPOT was within its own"
    );
    let page = well_formed(&render_serving(&missing(SloMetric::Tpot, Some(9e8)), &[]));
    assert_eq!((crosses(&page, "ttft").len(), crosses(&page, "tpot").len()), (0, 1));
}

#[test]
fn points_that_are_invalid_or_disturbed_are_marked_and_no_line_goes_through_them() {
    let mut report = sweep();
    report.points.retain(|point| point.result.is_some());
    let shown = |report: &ServeReport, name: &str, plot: &str| {
        let page = well_formed(&render_serving(report, &[]));
        let within = format!("#{plot} svg.wide[data-name={name}]");
        let lines = scraper::Selector::parse(&format!("{within} polyline.c0")).unwrap();
        let joined = page.select(&lines).map(|line| line.value().attr("points").unwrap().split(' ').count());
        let crosses = texts(&page, &format!("{within} .mark:has(.cross.bad) > title"));
        let faint = texts(&page, &format!("{within} .mark:has(.point.doubtful) > title"));
        (joined.sum::<usize>(), crosses, faint)
    };
    let (joined, crosses, faint) = shown(&report, "load-throughput", "load");
    assert_eq!((joined, crosses.len(), faint.len()), (3, 0, 0));
    let result = report.points[0].result.as_mut().unwrap();
    result.gate(GateName::InjectionLag, Some(false), "planted".to_owned());
    report.points[1].result.as_mut().unwrap().foreign_cores = Some(1.5);
    for (name, height) in [("load-throughput", 0), ("load-tpot", 0)] {
        let (joined, crosses, faint) = shown(&report, name, "load");
        assert_eq!(joined, height, "{name}");
        assert!(crosses.iter().any(|hover| hover.contains("INVALID: ")), "{name}: {crosses:?}");
        let said = "disturbed: other processes kept 1.5 cores busy";
        assert!(faint.iter().any(|hover| hover.contains(said)), "{name}: {faint:?}");
    }
    let (joined, crosses, faint) = shown(&report, "latency", "latency");
    assert!(crosses.iter().all(|hover| hover.contains("INVALID: ")) && !crosses.is_empty(), "{crosses:?}");
    assert!(faint.iter().all(|hover| hover.contains("disturbed: ")) && !faint.is_empty(), "{faint:?}");
    assert_eq!(joined, 0, "neither has a line, and TTFT of the saturated one is not reported");
    let page = well_formed(&render_serving(&report, &[]));
    let titles = texts(&page, "#latency svg.wide text.title");
    assert!(titles[0].ends_with("(INVALID)") && titles[1].ends_with("(disturbed)"), "{titles:?}");
}

#[test]
fn objectives_look_alike_whatever_they_are_about() {
    let page = well_formed(&render_serving(&sweep(), &[]));
    assert_eq!(count(&page, "#latency svg.wide .mark .cross:not(.goal)"), 0);
    assert_eq!(count(&page, "#latency svg.wide .mark .cross.goal"), 2 * 3, "two objectives, three points");
    assert_eq!(count(&page, "#load svg.wide .line.goal[points]"), 2, "one line each in TTFT and TPOT");
    let named = |text: &String| text.starts_with("objective tpot_p95 ≤ 20");
    assert!(texts(&page, "#latency svg.wide text.key").iter().any(named));
}

#[test]
fn every_mark_has_a_colour_in_the_style_sheet() {
    let style = include_str!("../style.css");
    let page = well_formed(&render_serving(&missing(SloMetric::Ttft, Some(f64::INFINITY)), &[]));
    let measured = well_formed(&crate::output::page(&crate::samples::measured(), &[]));
    for kind in ["point", "cross", "line", "bar"] {
        for page in [&page, &measured] {
            for element in page.select(&scraper::Selector::parse(&format!("svg .{kind}")).unwrap()) {
                let known = |class: &str| {
                    style.contains(&format!(".{kind}.{class}"))
                        || style.contains(&format!("\n.{class} {{ stroke"))
                };
                assert!(element.value().classes().any(known), "{:?}", element.value());
            }
        }
    }
}

#[test]
fn throughput_stands_over_what_was_really_offered_beside_a_straight_line() {
    let mut report = sweep();
    let polylines = |report: &ServeReport| {
        let page = well_formed(&render_serving(report, &[]));
        let lines = scraper::Selector::parse("#load svg.wide[data-name=load-throughput] polyline").unwrap();
        let of = |e: scraper::ElementRef<'_>| {
            let points = e.value().attr("points").unwrap().split(' ');
            let pairs = points.map(|p| p.split_once(',').unwrap());
            let numbers: Vec<(f64, f64)> =
                pairs.map(|(x, y)| (x.parse().unwrap(), y.parse().unwrap())).collect();
            (e.value().attr("class").unwrap().to_owned(), numbers)
        };
        page.select(&lines).map(of).collect::<Vec<_>>()
    };
    let drawn = polylines(&report);
    let offered = drawn.iter().find(|(class, _)| class == "line level").unwrap();
    assert_eq!(offered.1.len(), 2, "from the origin to the edge");
    // A point that serves everything offered stays on that line at twice the load.
    let served = |lines: &[(String, Vec<(f64, f64)>)]| {
        lines.iter().find(|(class, _)| class == "line c0").unwrap().1[0].0
    };
    let before = served(&drawn);
    let first = report.points[0].result.as_mut().unwrap();
    first.offered_per_s = first.offered_per_s.map(|rate| 4.0 * rate);
    assert!(served(&polylines(&report)) > before + 5.0, "moved to the right with what was offered");
    report.search = Some(Search::default());
    assert_eq!(polylines(&report).len(), 1, "the points of a search are not joined");
}

#[test]
fn lines_of_steps_are_broken_where_nothing_ran() {
    let mut report = sweep();
    report.points.truncate(1);
    let lines = |report: &ServeReport| {
        let page = well_formed(&render_serving(report, &[]));
        let of =
            |name: &str| count(&page, &format!("#timeline svg.wide[data-name=timeline-{name}] polyline"));
        (of("requests"), of("step-tokens"), of("longest-step"))
    };
    let line = report.points[0].result.as_mut().unwrap().timeline.as_mut().unwrap();
    let busy =
        Span { steps: 3, prompt_tokens: 5, output_tokens: 9, longest_step_ns: Some(2e6), ..line.spans[0] };
    let idle = Span { steps: 0, prompt_tokens: 0, output_tokens: 0, longest_step_ns: None, ..busy };
    line.spans = vec![busy; 12];
    assert_eq!(lines(&report), (2, 1, 1));
    let line = report.points[0].result.as_mut().unwrap().timeline.as_mut().unwrap();
    line.spans[4..6].fill(idle);
    assert_eq!(lines(&report), (2, 2, 2), "requests run or wait at all times");
}

#[test]
fn a_rate_that_a_search_found_is_confirmed_by_what_ran() {
    let said = |seeds: usize, sustained: Option<bool>| {
        let mut report = sweep();
        let attempt = |stage| Attempt { stage, rate: 8.0, seed: 1, met: Some(true), why: String::new() };
        let stages = [SearchStage::Bracket, SearchStage::Confirm];
        report.search = Some(Search {
            max_rate: Some(8.0),
            confirmed: true,
            sustained,
            attempts: stages.into_iter().take(seeds).map(attempt).collect(),
            ..Search::default()
        });
        let caption = texts(&well_formed(&render_serving(&report, &[])), "#load figcaption").concat();
        let record = crate::output::markdown(&crate::output::record::of_serving(&report, None));
        let agreed = record.lines().find_map(|line| line.strip_suffix(" agreed on the rate"));
        let agreed = agreed.map(|line| line.trim_start_matches("- ").to_owned());
        (caption, agreed)
    };
    for (seeds, sustained, by) in [
        (2, Some(true), Some("fresh seeds and a longer run")),
        (1, Some(true), Some("a longer run")),
        (2, None, Some("fresh seeds")),
        (1, None, None),
    ] {
        let (caption, agreed) = said(seeds, sustained);
        assert_eq!(agreed.as_deref(), by);
        let words = by.map_or("that held, in runs of one seed and one length".to_owned(), |by| {
            format!("that {by} confirmed")
        });
        assert!(caption.contains(&format!("the highest rate {words}: 8.000")), "{caption}");
    }
}
