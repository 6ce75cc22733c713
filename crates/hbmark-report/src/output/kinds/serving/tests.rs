//! Every format of a serving result, from the virtual clock, so that it never changes.

use super::*;
use crate::output::document::Cells;
use crate::output::{Format, render};
use crate::samples::{self, single, sweep};
use hbmark_core::result::serving::LiveResult;

#[test]
fn the_table_of_a_point_shows_every_latency_and_gate() {
    insta::assert_snapshot!(render(&single(), Format::Table, false).unwrap());
}

#[test]
fn the_table_of_a_sweep_is_a_curve_that_ends_where_the_objectives_do() {
    insta::assert_snapshot!(render(&sweep(), Format::Table, false).unwrap());
}

#[test]
fn tables_fit_a_narrow_terminal_and_every_part_names_its_points() {
    let screen = crate::output::Screen { color: false, width: Some(80) };
    for (report, title) in [(sweep(), "point "), (single(), "rate 4 ")] {
        let text = render(&report, Format::Table, screen).unwrap();
        let tables = text.lines().filter(|line| line.contains("  ") && !line.starts_with("  "));
        let tables: Vec<&str> = tables.collect();
        assert!(tables.iter().all(|line| line.chars().count() <= 80), "{tables:#?}");
        assert!(tables.iter().filter(|line| line.starts_with(title)).count() > 1, "{tables:#?}");
    }
    let text = render(&sweep(), Format::Table, screen).unwrap();
    let unit = ["req/s", "tok/s", "p50", "p95", "/step", "KV use", "prefix hits", "preemptions"];
    assert!(unit.iter().all(|unit| text.contains(unit)), "{text}");
}

#[test]
fn markdown_escapes_what_strangers_wrote() {
    insta::assert_snapshot!(render(&sweep(), Format::Md, false).unwrap());
}

#[test]
fn csv_has_a_row_per_point_and_empty_fields_for_null() {
    let text = render(&sweep(), Format::Csv, false).unwrap();
    let rows: Vec<&str> = text.lines().collect();
    assert_eq!(rows.len(), 5);
    let fields = rows[0].split(',').count();
    assert!(
        rows[0].starts_with("label,validity,reasons,seed,cold,rate,concurrency,offered_per_s,served_per_s,")
    );
    assert!(rows[4].starts_with("rate 128,not run,the sweep ended at rate 64: "), "{}", rows[4]);
    assert!(
        rows[4].ends_with(&format!(",128{}", ",".repeat(fields - 6))),
        "nothing was measured, so nothing is there"
    );
}

#[test]
fn a_result_is_read_back_as_it_was_written_and_fits_its_schema() {
    let report = sweep();
    let text = render(&report, Format::Json, false).unwrap();
    assert_eq!(serde_json::from_str::<ServeReport>(&text).unwrap(), report);
    crate::output::tests::follows_schema(&serde_json::from_str(&text).unwrap(), "serve.schema.json");
}

#[test]
fn a_row_whose_keeping_up_nobody_can_judge_says_so() {
    let mut sweep = sweep();
    samples::keeps_up(&mut sweep.points[0], None);
    let text = render(&sweep, Format::Table, false).unwrap();
    assert!(
        text.contains(
            " requests waited on average; the run is too short to show that it stays so: as planted"
        ),
        "{text}"
    );
}

#[test]
fn infinity_survives_json_and_null_stays_null() {
    let quantiles = Quantiles::of([Some(1.0), Some(f64::INFINITY), None].into_iter());
    let text = serde_json::to_string(&quantiles).unwrap();
    assert!(text.contains("\"max\":\"infinite\"") && text.contains("\"p99\":null"), "{text}");
    assert_eq!(serde_json::from_str::<Quantiles>(&text).unwrap(), quantiles);
}

#[test]
fn a_percentile_that_the_sample_cannot_carry_is_infinite_only_where_enough_requests_failed() {
    let shown = |n: usize, failed: usize| {
        let mut report = single();
        let point = &mut report.points[0];
        let values = (0..n).map(|at| Some(if at < n - failed { 1e6 } else { f64::INFINITY }));
        let mut result = point.result.take().unwrap();
        result.ttft_ns = Some(Quantiles::of(values));
        let columns = latencies("", point, &result);
        let cell = |title: &str| {
            let column = columns.iter().find(|column| column.title == title).unwrap();
            let Cells::Measured { values, .. } = &column.cells else { panic!("{title} is measured") };
            values[0]
        };
        ["p90", "p99", "p99.9", "max"].map(cell)
    };
    let [p90, p99, p99_9, max] = shown(100, 1);
    assert!(matches!(p90, Value::Finite(_)), "{p90:?}");
    assert_eq!((p99, p99_9, max), (Value::Null, Value::Infinite, Value::Infinite));
    assert_eq!(shown(100, 2)[1], Value::Infinite);
    // One of ten is the tenth: the ninth is the p90.
    assert_eq!(shown(10, 1)[0], Value::Null);
    assert_eq!(shown(10, 2)[0], Value::Infinite);
}

#[test]
fn the_words_of_a_server_are_said_of_sweeps_and_searches_too() {
    let words = "maximum context length is 2048";
    let failing = |mut point: Point| {
        let messages = [("status_400".to_owned(), words.to_owned())].into();
        point.live = Some(LiveResult { messages, ..samples::live() });
        point.result.as_mut().unwrap().rejected = [("status_400".to_owned(), 3)].into();
        point
    };
    let mut report = single();
    report.server = Some(samples::server());
    report.points[0] = failing(report.points[0].clone());
    report.points[0].live.as_mut().unwrap().beyond_context = 2;
    let measured = report.points[0].result.as_ref().unwrap().measured;
    let line = format!("not served: 3 of {measured} measured requests: status_400; the first one: {words}");
    let warning = format!(
        "2 of {measured} planned requests are longer than the server's context of 2048: it refuses or cuts them"
    );
    let table = |report: &ServeReport| render(report, Format::Table, false).unwrap();
    let single = table(&report);
    assert!(single.contains(&line) && single.matches(words).count() == 1, "{single}");
    assert!(single.contains(&warning), "{single}");
    assert!(page_of(&report).contains("it refuses or cuts them"));
    report.points.push(Point { label: "rate 9".to_owned(), ..report.points[0].clone() });
    let swept = table(&report);
    assert!(swept.contains(&format!("rate 9: {line}")), "{swept}");
    assert_eq!(swept.matches("it refuses or cuts them").count(), 1, "{swept}");
    report.search = Some(Search::default());
    let searched = table(&report);
    assert!(searched.contains(&format!("the first status_400: {words}")), "{searched}");
    assert_eq!(searched.matches(words).count(), 1, "{searched}");
    assert!(page_of(&report).contains(words));
}

#[test]
fn prompt_tokens_of_which_nobody_says_whether_they_were_cached_are_said_to_count() {
    let mut report = single();
    let said = |report: &ServeReport| point_lines(&report.points[0]).pop().unwrap_or_default();
    let unknown = "cached prompt tokens are not known and count as computed";
    let lines = |report: &ServeReport| point_lines(&report.points[0]);
    report.points[0].live = Some(samples::live());
    assert!(lines(&report).iter().any(|line| line == unknown), "{}", said(&report));
    report.points[0].live.as_mut().unwrap().cached_share = Some(0.0);
    assert!(lines(&report).iter().all(|line| line != unknown));
}

/// A page as text.
fn page_of(report: &ServeReport) -> String {
    render(report, Format::Html, false).unwrap()
}

/// The report's only point, as a gate that passed, failed or stayed open leaves it, with one objective.
fn judged(passed: Option<bool>, met: Option<bool>) -> ServeReport {
    let mut report = single();
    let result = samples::keeps_up(&mut report.points[0], passed);
    result.validity = Validity::Valid;
    result.slo.iter_mut().for_each(|clause| clause.met = met);
    result.slo_met = met;
    assert!(!result.slo.is_empty(), "the fixture has objectives");
    report
}

#[test]
fn the_box_of_rejected_points_holds_rejected_points_alone() {
    const REJECTED: &str = "Points that were rejected, and why";
    const OPEN: &str = "Points that are not decided, and why";
    let boxes = |report: &ServeReport| [REJECTED, OPEN].map(|title| page_of(report).contains(title));
    assert_eq!(boxes(&judged(Some(true), Some(true))), [false, false]);
    assert_eq!(boxes(&judged(Some(true), None)), [false, true]);
    assert_eq!(boxes(&judged(None, Some(true))), [false, true]);
    assert_eq!(boxes(&judged(None, Some(false))), [true, false]);
    // A prediction is not a rejection: it is said about the point.
    let mut missed = judged(Some(true), Some(false));
    missed.points[0].predicted = missed.points[0].result.clone();
    let rejected = reasons(&missed.points[0]);
    assert!(rejected.iter().all(|line| line.starts_with("NOT met: ")), "{rejected:?}");
    assert!(notes(&missed.points[0]).iter().any(|line| line.starts_with("predicted against measured")));
    missed.points[0].result.as_mut().unwrap().slo.iter_mut().for_each(|clause| clause.met = Some(true));
    missed.points[0].result.as_mut().unwrap().foreign_cores = Some(1.5);
    assert_eq!(boxes(&missed), [true, false], "a disturbed point is none to build on");
    assert_eq!(validity(&missed.points[0]), "disturbed");
}

#[test]
fn a_record_accepts_no_open_point_where_another_held_and_says_so_where_none_did() {
    use crate::output::kinds::record::of_serving;
    let text = |report: &ServeReport| crate::output::markdown(&of_serving(report, None));
    let mut report = judged(Some(true), Some(true));
    let open = judged(None, Some(true)).points.remove(0);
    report.points[0].label = "held".to_owned();
    report.points.push(Point { label: "open".to_owned(), ..open });
    let both = text(&report);
    let accepted = both.split("Accepted").nth(1).unwrap().split('#').next().unwrap().to_owned();
    assert!(accepted.contains("held: ") && !accepted.contains("open: "), "{both}");
    let undecided = both.split("Not decided").nth(1).unwrap().split('#').next().unwrap().to_owned();
    assert!(undecided.contains("open") && undecided.contains("undetermined: "), "{both}");
    report.points.remove(0);
    let alone = text(&report);
    assert!(alone.contains("whether the system keeps up is not judged"), "{alone}");
}

#[test]
fn a_rate_below_the_range_over_seeds_says_why_and_small_rates_are_no_zeros() {
    use hbmark_core::result::serving::Attempt;
    let attempt = |rate: f64, met: Option<bool>, why: &str| Attempt {
        stage: SearchStage::Sustain,
        rate,
        seed: 1,
        met,
        why: why.to_owned(),
    };
    let mut search = Search {
        max_rate: Some(23.972),
        rate_by_seed: vec![26.605, 26.472, 26.738],
        confirmed: true,
        attempts: vec![
            attempt(26.605, None, "ttft_p95 ≤ 1.00 s: 208 ms (133 ms or more): the interval holds the limit"),
            attempt(25.443, None, "the same"),
            attempt(23.972, Some(true), "every objective was met"),
        ],
        ..Search::default()
    };
    for sustained in [Some(true), None] {
        search.sustained = sustained;
        let answer = search_answer(&search).remove(0);
        assert!(answer.starts_with("highest rate: at least 23.972"), "nothing above it failed: {answer}");
        assert!(
            answer.contains("lowered from their median of 26.605, at which the last run could not tell (2 such runs before one did): ttft_p95"),
            "{answer}"
        );
    }
    search.attempts[0].met = Some(false);
    let answer = search_answer(&search).remove(0);
    assert!(answer.starts_with("highest rate: 23.972"), "{answer}");
    assert!(
        answer.ends_with("lowered from their median of 26.605, which a longer run did not hold"),
        "{answer}"
    );
    search.attempts[0].rate = 0.000_029_5;
    assert!(search_steps(&search).next().unwrap().starts_with("sustain 2.95e-5/s: failed"));
}

#[test]
fn one_request_per_second_is_singular_and_a_virtual_clock_has_no_injection_lag() {
    let mut report = single();
    report.points[0].offered = Offered::Rate(1.0);
    let text = render(&report, Format::Table, false).unwrap();
    assert!(text.contains("1 request per second, "), "{text}");
    assert!(!text.lines().any(|line| line.starts_with("injection lag")), "{text}");
    let result = report.points[0].result.as_mut().unwrap();
    result.injection_lag_ns.max = Some(Quantity::Finite(12_000.0));
    let text = render(&report, Format::Table, false).unwrap();
    assert!(text.lines().any(|line| line.starts_with("injection lag")), "{text}");
}

#[test]
fn a_drift_of_steps_is_more_or_less_and_never_a_negative_more() {
    let mut report = single();
    report.points[0].predicted = report.points[0].result.clone();
    for (drift, says) in [(0.403, "59.7 % less time"), (1.953, "95.3 % more time")] {
        report.points[0].drift = Some(drift);
        let said = reasons(&report.points[0]);
        assert!(said.iter().any(|line| line.starts_with("disturbed: ") && line.contains(says)), "{said:?}");
    }
    report.points[0].drift = Some(1.01);
    assert!(!reasons(&report.points[0]).iter().any(|line| line.starts_with("disturbed")));
}
