//! Every format over one report, of the scripted engine on its virtual clock, so that it never changes.

use super::*;
use crate::analysis::judge;
use crate::samples;
use hbmark_core::result::{Cause, saved};

fn report() -> Report {
    samples::saved("run-scripted")
}

#[test]
fn the_table_shows_every_cell_with_its_validity_and_reason() {
    insta::assert_snapshot!(render(&report(), Format::Table, false).unwrap());
}

#[test]
fn markdown_escapes_what_strangers_wrote() {
    insta::assert_snapshot!(render(&report(), Format::Md, false).unwrap());
}

#[test]
fn csv_has_raw_numbers_with_units_in_the_heading_and_empty_fields_for_null() {
    insta::assert_snapshot!(render(&report(), Format::Csv, false).unwrap());
}

#[test]
fn csv_does_not_run_formulas() {
    let mut report = report();
    report.cells[0].reason = Some(Cause::other("=HYPERLINK(\"evil\")"));
    let text = render(&report, Format::Csv, false).unwrap();
    assert!(text.contains("'=HYPERLINK"), "{text}");
}

#[test]
fn json_reads_back_to_the_same_report() {
    let report = report();
    assert!(saved::parse(&render(&report, Format::Json, false).unwrap()).unwrap() == report);
}

#[test]
fn recomputing_a_report_changes_nothing() {
    let report = report();
    let mut again = report.clone();
    judge::recompute(&mut again);
    assert!(again == report);
}

#[test]
fn colour_is_only_colour() {
    let report = report();
    let colored = render(&report, Format::Table, true).unwrap();
    assert!(colored.contains('\u{1b}'));
    let mut plain = String::new();
    let mut characters = colored.chars();
    while let Some(c) = characters.next() {
        if c == '\u{1b}' {
            characters.by_ref().find(|&c| c == 'm');
        } else {
            plain.push(c);
        }
    }
    assert_eq!(plain, render(&report, Format::Table, false).unwrap());
}

#[test]
fn the_shipped_schema_is_current_and_a_report_follows_it() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/result.schema.json");
    let schema = saved::schema();
    if std::env::var_os("INSTA_UPDATE").is_some_and(|v| v == "always") {
        std::fs::write(&path, serde_json::to_string_pretty(&schema).unwrap() + "\n").unwrap();
    }
    let shipped: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!(shipped, schema, "run the tests with INSTA_UPDATE=always");
    let instance = serde_json::to_value(report()).unwrap();
    let validator = jsonschema::validator_for(&schema).unwrap();
    let problems: Vec<String> = validator.iter_errors(&instance).map(|e| e.to_string()).collect();
    assert!(problems.is_empty(), "{problems:?}");
}

#[test]
fn a_prediction_says_that_nothing_was_measured() {
    let report: Report = samples::saved("predict-h200");
    insta::assert_snapshot!(render(&report, Format::Table, false).unwrap());
}

#[test]
fn a_result_without_plots_is_a_page_of_its_tables_on_which_strangers_write_no_markup() {
    let mut found: hbmark_core::result::comparison::Comparison = samples::saved("comparison");
    found.model = "<img src=x onerror=alert(1)>\u{1b}[31m".into();
    let page = render(&found, Format::Html, false).unwrap();
    assert!(page.contains("&lt;img") && !page.contains("<img") && !page.contains('\u{1b}'), "{page}");
    assert!(page.contains(">B/A<") && page.contains(&found.cells[0].effect.reason), "{page}");
}

#[test]
fn every_word_is_defined_in_every_format() {
    for format in [Format::Table, Format::Json, Format::Csv, Format::Md, Format::Html] {
        let text = render(&Glossary, format, false).unwrap();
        assert!(text.contains("host bubble G") && text.contains("goodput"), "{format:?}: {text}");
    }
}

#[test]
fn numbers_of_a_table_are_text_for_a_reader_and_raw_in_a_sheet() {
    use document::{Value, measured, words};
    let columns = || {
        let times = [Value::Finite(1.5e6), Value::AtLeast(2e6), Value::Infinite, Value::Null];
        let names = ["=a", "b|", "c\u{1b}", "d"].map(str::to_owned);
        vec![words("of", names), measured("t", metrics::Unit::Nanoseconds, times)]
    };
    let mut shown = Document::new("title");
    shown.table(columns());
    assert_eq!(
        terminal::render(&shown, false),
        "title\nof          t\n=a    1.50 ms\nb|  ≥ 2.00 ms\nc\u{fffd}          ∞\nd           -\n"
    );
    assert!(markdown(&shown).ends_with("| b\\| | ≥ 2.00 ms |\n| c\u{fffd} | ∞ |\n| d | - |\n"));
    shown.sheet = Some(columns());
    assert_eq!(csv::render(&shown).unwrap(), "of,t_ns\n'=a,1500000\nb|,≥ 2000000\nc\u{fffd},infinite\nd,\n");
}

#[test]
fn a_plot_is_its_tables_where_there_are_no_drawings() {
    let shown = Kind::page(&samples::sweep());
    for text in [terminal::render(&shown, false), markdown(&shown), csv::render(&shown).unwrap()] {
        assert!(text.contains("longest step") && text.contains("injection lag"), "{text}");
        assert!(!text.contains('<') && !text.contains("polyline"), "{text}");
    }
}
