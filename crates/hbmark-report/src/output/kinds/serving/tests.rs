//! Every format of a serving result, from the virtual clock, so that it never changes.

use super::*;
use crate::output::{Format, render};
use crate::samples::{single, sweep};
use hbmark_core::result::serving::schema;

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
    assert!(rows[0].starts_with("label,validity,reasons,seed,cold,offered_per_s,served_per_s,"));
    assert!(rows[4].starts_with("rate 128,not run,the sweep ended at rate 64: "), "{}", rows[4]);
    assert!(rows[4].ends_with(&",".repeat(fields - 5)), "nothing was measured, so nothing is there");
}

#[test]
fn a_result_is_read_back_as_it_was_written_and_fits_its_schema() {
    let report = sweep();
    let text = render(&report, Format::Json, false).unwrap();
    assert_eq!(serde_json::from_str::<ServeReport>(&text).unwrap(), report);
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    let validator = jsonschema::validator_for(&schema()).unwrap();
    let problems: Vec<String> = validator.iter_errors(&value).map(|e| e.to_string()).collect();
    assert!(problems.is_empty(), "{problems:?}");
}

#[test]
fn the_published_schema_is_the_one_of_the_types() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/serve.schema.json");
    let wanted = format!("{}\n", serde_json::to_string_pretty(&schema()).unwrap());
    if std::env::var_os("INSTA_UPDATE").is_some_and(|v| v == "always") {
        std::fs::write(&path, &wanted).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(found, wanted, "run the tests with INSTA_UPDATE=always");
}

#[test]
fn a_row_whose_keeping_up_nobody_can_judge_says_so() {
    let mut sweep = sweep();
    let result = sweep.points[0].result.as_mut().unwrap();
    let gate = result.gates.iter_mut().find(|gate| gate.name == GateName::KeepsUp).unwrap();
    (gate.passed, gate.detail) = (None, "planted".into());
    let text = render(&sweep, Format::Table, false).unwrap();
    assert!(
        text.contains(" requests waited on average; the run is too short to show that it stays so: planted"),
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
