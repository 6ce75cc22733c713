//! Every format over one report, of the scripted engine on its virtual clock, so that it never changes.

use super::*;
use crate::analysis::judge;
use crate::samples;
use hbmark_core::result::{Cause, Phase, RungKind, SIMULATED_DEVICE, Spread, Status, saved};
use hbmark_core::units::Bytes;

fn report() -> Report {
    samples::saved("run-scripted")
}

#[test]
fn one_of_a_thing_is_written_in_the_singular() {
    let mut report = samples::measured();
    report.crossovers[0].value = Some(1.0);
    let line = super::kinds::run::crossover_line(&report.crossovers[0]);
    assert!(line.contains(": 1 sequence; "), "{line}");
    report.cells.truncate(1);
    let text = render(&report, Format::Html, false).unwrap();
    assert!(text.contains("1 of 1 cell measured") && !text.contains(" 1 cells"), "{text}");
}

#[test]
fn of_remarks_that_differ_in_their_numbers_the_first_stands_for_more_than_two_cells() {
    let mut report = report();
    let cells = report.cells.len();
    assert!(cells > 3);
    let in_cache = |bytes: usize| Cause::WorkingSetInCache {
        bytes: Bytes(bytes as u64 * 1_000_000),
        cache_bytes: Bytes(300_000_000),
        margin: 3,
    };
    for (n, cell) in report.cells.iter_mut().enumerate() {
        (cell.reason, cell.flags) = (None, vec![in_cache(500 + n)]);
        cell.blocks.clear();
    }
    let first = format!("{}: working set of 500 MB", report.cells[0].id);
    assert_eq!(kinds::run::remarks(&report.cells).len(), 1);
    assert!(kinds::run::remarks(&report.cells)[0].starts_with(&format!("{cells} cells, such as {first}")));
    // Two are said one by one, and what all share is said of all.
    assert_eq!(kinds::run::remarks(&report.cells[..2]).len(), 2);
    report.cells.iter_mut().for_each(|cell| cell.flags = vec![in_cache(500)]);
    assert!(kinds::run::remarks(&report.cells)[0].starts_with("every cell: working set of 500 MB"));
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

/// A run beside load: one cell without an accepted block, one that did not converge, ceilings that were disturbed.
fn beside_load() -> Report {
    let mut report = samples::measured();
    report.cells.truncate(4);
    let load = || Cause::ForeignLoad { cores: 1.4 };
    let cell = &mut report.cells[2];
    cell.blocks.iter_mut().for_each(|block| block.rejected = Some(load()));
    cell.status = Status::Disturbed;
    cell.reason = Some(Cause::RejectedInARow { blocks: 5, last: Box::new(load()) });
    // A file of before has no numbers of it.
    (cell.step_ns, cell.tpot_ns, cell.tokens_per_s, cell.all_blocks) = (None, None, None, None);
    let wide = &mut report.cells[3];
    wide.status = Status::NotConverged;
    wide.reason = Some(Cause::IntervalTooWide { half_width: 0.3, wanted: 0.01, blocks: 5, sampled_s: 2.0 });
    report.ceilings.as_mut().unwrap().disturbed = vec![load()];
    report
}

/// The same as `hbmark report` reads it from a file of a version that kept the samples alone.
fn read_again(report: &Report) -> Report {
    let mut json: serde_json::Value =
        serde_json::from_str(&render(report, Format::Json, false).unwrap()).unwrap();
    for cell in json["cells"].as_array_mut().unwrap() {
        cell.as_object_mut().unwrap().remove("all_blocks");
    }
    let mut report = saved::parse(&json.to_string()).unwrap();
    judge::recompute(&mut report);
    report
}

#[test]
fn a_copy_faster_than_every_read_is_said_where_the_ceilings_are() {
    let mut report = samples::measured();
    let said = |report: &Report| {
        [Format::Table, Format::Md, Format::Html].map(|format| {
            render(report, format, false)
                .unwrap()
                .replace('\\', "")
                .contains("copy bandwidth (24.0 GB/s) exceeds")
        })
    };
    let ceilings = report.ceilings.as_mut().unwrap();
    ceilings.copy_bytes_per_s = Spread { median: 24e9, low: 23e9, high: 25e9 };
    ceilings.read_bytes_per_s = Spread { median: 20e9, low: 19e9, high: 24.1e9 };
    assert_eq!(said(&report), [false; 3], "one read was as fast");
    report.ceilings.as_mut().unwrap().read_bytes_per_s.high = 21e9;
    assert_eq!(said(&report), [true; 3]);
}

#[test]
fn a_disturbed_cell_has_its_median_and_range_in_every_format_and_so_has_one_of_an_old_file() {
    let report = read_again(&beside_load());
    let all = report.cells[2].all_blocks.clone().unwrap();
    assert_eq!((all.blocks, all.rejected), (5, 5));
    assert!(all.tpot_ns.is_some() == (report.cells[2].phase == Phase::Decode));
    assert!(report.cells[2].step_ns.is_none(), "no block was accepted");
    assert!(all.step_ns.low < all.step_ns.high && all.tokens_per_s.low < all.tokens_per_s.high);
    for format in [Format::Table, Format::Md, Format::Html] {
        let text = render(&report, format, false).unwrap().replace('\\', "");
        // The step alone of a disturbed prefill, in milliseconds.
        let [median, low, high] = [all.step_ns.median, all.step_ns.low, all.step_ns.high].map(|ns| ns / 1e6);
        let ranges = || text.split('[').skip(1).filter_map(|part| part.split(']').next());
        let numbers = |part: &str| -> Vec<f64> {
            part.split([' ', ',']).filter_map(|word| word.parse().ok()).collect()
        };
        let near = |found: f64, wanted: f64| (found / wanted - 1.0).abs() < 0.01;
        let has = |part: &str| matches!(numbers(part)[..], [a, b, c] if near(a, median) && near(b, low) && near(c, high));
        assert!(ranges().any(has), "{format:?} {median} {low} {high}: {text}");
        for said in ["disturbed", "not converged", "the ceilings were disturbed", "1.4 cores busy"] {
            assert!(text.contains(said), "{format:?}: {said}: {text}");
        }
        assert!(text.contains("rest on a ceiling that was disturbed"), "{format:?}: {text}");
    }
    let csv = render(&report, Format::Csv, false).unwrap();
    let mut rows = ::csv::Reader::from_reader(csv.as_bytes());
    let titles = rows.headers().unwrap().clone();
    let row = rows.records().nth(2).unwrap().unwrap();
    let field = |name: &str| row[titles.iter().position(|title| title == name).unwrap()].to_owned();
    assert_eq!(field("status"), "disturbed");
    assert_eq!(field("step_ns"), all.step_ns.median.to_string());
    assert_eq!(field("tokens_per_s"), all.tokens_per_s.median.to_string());
    assert_eq!(field("blocks_rejected"), "5");
    assert!(!field("all_blocks_low_ns").is_empty() && !field("all_blocks_high_ns").is_empty());
    let json = render(&report, Format::Json, false).unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert!(json["cells"][2]["all_blocks"]["tokens_per_s"]["median"].is_number());
    // On a terminal it is grey.
    let colored = render(&report, Format::Table, true).unwrap();
    assert!(
        colored.lines().any(|line| line.starts_with("\u{1b}[2m") && line.contains("disturbed")),
        "{colored}"
    );
    // And a faint mark in every plot.
    let page = render(&report, Format::Html, false).unwrap();
    assert!(page.contains("doubtful\"") || page.contains("doubtful "), "{page}");
}

#[test]
fn what_a_simulated_device_ran_is_never_ok() {
    let mut report = samples::measured();
    let real = report.cells.iter().filter(|cell| cell.status == Status::Ok).count();
    let gpu = report.environment.gpu.get_or_insert_default();
    gpu.name = Some(format!("{SIMULATED_DEVICE} (NVIDIA H200)"));
    judge::recompute(&mut report);
    let simulated =
        |report: &Report| report.cells.iter().filter(|cell| cell.status == Status::Simulated).count();
    assert!(real > 0 && simulated(&report) >= real, "{real}");
    assert!(report.cells.iter().all(|cell| cell.status != Status::Ok), "{:?}", report.cells);
    let rungs = || report.ladders.iter().flat_map(|ladder| &ladder.rungs);
    assert!(
        rungs().all(|rung| !matches!(rung.kind, RungKind::Native | RungKind::Stock)),
        "no rung of its times"
    );
    for format in [Format::Table, Format::Md, Format::Html, Format::Csv] {
        let text = render(&report, format, false).unwrap();
        assert!(text.to_uppercase().contains("SIMULATED"), "{text}");
    }
}

#[test]
fn a_smoke_run_is_never_ok() {
    let mut report = samples::measured();
    report.protocol = Some(samples::protocol_named("smoke"));
    judge::recompute(&mut report);
    assert!(report.cells.iter().all(|cell| cell.status == Status::Smoke));
    judge::recompute(&mut report);
    assert!(report.cells.iter().all(|cell| cell.status == Status::Smoke), "and stays so");
    let text = render(&report, Format::Table, false).unwrap();
    assert!(!text.lines().any(|line| line.trim_end().ends_with(" ok")) && text.contains("smoke"), "{text}");
}

#[test]
fn a_table_fits_the_terminal_and_keeps_every_number() {
    let report = read_again(&beside_load());
    let narrow = render(&report, Format::Table, Screen { color: false, width: Some(80) }).unwrap();
    let tables = |text: &str| -> Vec<String> {
        let lines = text.lines().skip_while(|line| !line.starts_with("phase"));
        lines.take_while(|line| !line.starts_with("ladders")).map(str::to_owned).collect()
    };
    let (shown, whole) = (tables(&narrow), tables(&render(&report, Format::Table, false).unwrap()));
    assert!(whole[0].chars().count() > 80);
    assert!(narrow.lines().all(|line| line.chars().count() <= 80), "{narrow}");
    // Every part names its rows.
    let parts = shown.iter().filter(|line| line.starts_with("phase")).count();
    assert!(parts > 1 && shown.iter().filter(|line| line.starts_with("decode")).count() == 2 * parts);
    let words = |lines: &[String]| -> std::collections::BTreeSet<String> {
        lines.iter().flat_map(|line| line.split_whitespace()).map(str::to_owned).collect()
    };
    assert_eq!(words(&shown), words(&whole));
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

/// A result is valid under one of the schemas in `docs/`.
#[track_caller]
pub(super) fn follows_schema(result: &serde_json::Value, schema: &str) {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(schema);
    let schema = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let validator = jsonschema::validator_for(&schema).unwrap();
    let problems: Vec<String> = validator.iter_errors(result).map(|e| e.to_string()).collect();
    assert!(problems.is_empty(), "{problems:?}");
}

#[test]
fn a_report_follows_the_published_schema() {
    follows_schema(&serde_json::to_value(report()).unwrap(), "result.schema.json");
}

#[test]
fn a_prediction_says_that_nothing_was_measured() {
    let report: Report = samples::saved("predict-h200");
    insta::assert_snapshot!(render(&report, Format::Table, false).unwrap());
}

#[test]
fn a_prediction_on_a_phone_keeps_the_floor_and_the_tokens_per_second() {
    let shown_on_a_phone = |report: &Report| {
        let (_, columns) = kinds::run::of_cells(&report.cells);
        let shown = columns.into_iter().filter(|column| !column.minor);
        shown.map(|column| column.title).collect::<Vec<_>>()
    };
    let predicted: Report = samples::saved("predict-h200");
    let columns = shown_on_a_phone(&predicted);
    assert!(["floor", "tok/s"].iter().all(|title| columns.iter().any(|own| own == title)), "{columns:?}");
    let columns = shown_on_a_phone(&samples::measured());
    assert!(
        columns.iter().all(|title| title != "floor") && columns.contains(&"TPOT".to_owned()),
        "{columns:?}"
    );
}

#[test]
fn a_protocol_of_a_fixed_number_of_blocks_is_no_range() {
    let mut report = samples::measured();
    let protocol = report.protocol.as_mut().unwrap();
    (protocol.name, protocol.min_blocks, protocol.max_blocks) = ("custom".to_owned(), 2, 2);
    protocol.visits = 1;
    let (text, _) = kinds::run::protocol_text(&report).unwrap();
    assert!(text.starts_with("protocol custom: 2 blocks, 1 visit in random order"), "{text}");
}

#[test]
fn a_prediction_for_several_gpus_shows_the_parts_of_a_step() {
    let report: Report = samples::saved("predict-70b-8-h200");
    insta::assert_snapshot!(render(&report, Format::Table, false).unwrap());
    let page = render(&report, Format::Html, false).unwrap();
    assert!(page.contains("all-reduce of hidden states") && page.contains("NVLink 4 through NVSwitch"));
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
        let text = render(&Glossary::whole(), format, false).unwrap();
        assert!(text.contains("host bubble G") && text.contains("goodput"), "{format:?}: {text}");
    }
}

#[test]
fn a_word_of_the_glossary_is_found_by_its_term_and_else_by_its_meaning() {
    let text = |word: &str| Glossary::of(word).map(|found| render(&found, Format::Table, false).unwrap());
    let canary = text("Canary").unwrap();
    assert!(canary.contains("canary") && !canary.contains("goodput"), "{canary}");
    assert!(text("no such word").is_none());
}

#[test]
fn numbers_of_a_table_are_text_for_a_reader_and_raw_in_a_sheet() {
    use document::{Value, measured, words};
    let columns = || {
        let times = [Value::Finite(1.5e6), Value::Disturbed(2e6), Value::Infinite, Value::Null];
        let names = ["=a", "b|", "c\u{1b}", "d"].map(str::to_owned);
        vec![words("of", names), measured("t", metrics::Unit::Nanoseconds, times)]
    };
    let mut shown = Document::new("title");
    shown.table(columns());
    assert_eq!(
        terminal::render(&shown, false),
        "title\nof          t\n=a    1.50 ms\nb|  [2.00 ms]\nc\u{fffd}          ∞\nd           -\n"
    );
    assert!(markdown(&shown).ends_with("| b\\| | \\[2.00 ms\\] |\n| c\u{fffd} | ∞ |\n| d | - |\n"));
    shown.sheet = Some(columns());
    let raw = "of,t_ns\n'=a,1500000\nb|,2000000\nc\u{fffd},infinite\nd,\n";
    assert_eq!(csv::render(&shown).unwrap(), raw);
    // Without a sheet the table has the same, and what is a dash for a reader is nothing.
    shown.sheet = None;
    assert_eq!(csv::render(&shown).unwrap(), raw);
    shown.blocks.clear();
    shown.table(vec![words("of", ["-", "-x"].map(str::to_owned))]);
    assert_eq!(csv::render(&shown).unwrap(), "of\n\"\"\n'-x\n");
}

#[test]
fn a_plot_is_its_tables_where_there_are_no_drawings() {
    let shown = Kind::page(&samples::sweep());
    for text in [terminal::render(&shown, false), markdown(&shown), csv::render(&shown).unwrap()] {
        assert!(text.contains("longest step") && text.contains("injection lag"), "{text}");
        assert!(!text.contains('<') && !text.contains("polyline"), "{text}");
    }
}
