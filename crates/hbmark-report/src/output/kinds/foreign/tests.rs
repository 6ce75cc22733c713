use std::path::Path;

use super::*;
use crate::analysis::import::{self, UserOverrides};
use crate::analysis::{of_foreign, with_external};
use crate::output::{Format, render};
use crate::samples;
use hbmark_core::ledger::devices;
use hbmark_core::model::{Dtype, test_shapes};
use hbmark_core::result::{Report, ReportKind};

fn imported(names: &[&str], given: &UserOverrides<'_>) -> Vec<Imported> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/foreign");
    let results = names.iter().flat_map(|name| import::read(&folder.join(name)).unwrap());
    results.map(|result| Imported::new(result, given)).collect()
}

fn table(names: &[&str], given: &UserOverrides<'_>) -> String {
    render(&*imported(names, given), Format::Table, false).unwrap()
}

#[test]
fn every_server_benchmark_prints_what_it_says_and_asks_for_the_rest() {
    insta::assert_snapshot!(table(
        &[
            "vllm-serve-0.25.json",
            "vllm-serve-appended.json",
            "vllm-serve-all-failed.json",
            "vllm-table.json",
            "sglang-serving-2024.jsonl",
            "aiperf.json",
            "guidellm.json",
            "trtllm-bench-streaming.json",
        ],
        &UserOverrides::default()
    ));
}

#[test]
fn every_step_benchmark_prints_what_it_says_and_asks_for_the_rest() {
    insta::assert_snapshot!(table(
        &["sglang-one-batch.jsonl", "llama-bench.json", "llama-cpp-page.md", "optimum-benchmark.json"],
        &UserOverrides::default()
    ));
}

/// Files that name no GPU, on a GPU that was given.
fn on_a_given_gpu(names: &[&str]) -> Vec<Imported> {
    let architecture = test_shapes::llama_3_1_8b();
    let given = UserOverrides {
        model: Some(&architecture),
        model_name: Some("Llama-3.1-8B"),
        gpu: Some(devices::find("h100-pcie").unwrap()),
        dtype: Some(Dtype::Bf16),
        gpus: Some(1),
        ..UserOverrides::default()
    };
    imported(names, &given)
}

#[test]
fn several_files_of_a_program_define_its_metrics_once() {
    let both = ["vllm-serve-0.25.json", "vllm-serve-2025-03-detailed.json", "sglang-serving-2024.jsonl"];
    let text = table(&both, &UserOverrides::default());
    assert_eq!(text.matches(DIFFERING).count(), 1, "{text}");
    let lines = |what: &str| text.lines().filter(|line| line.contains(what)).collect::<Vec<_>>();
    assert_eq!(
        lines("is our TPOT:"),
        ["  vLLM bench serve: tpot_ms is our TPOT: timed by the client: network and HTTP are in it"]
    );
    let shared = lines("ttft_ms is our TTFT:");
    assert!(
        shared.len() == 1 && shared[0].starts_with("  vLLM bench serve, SGLang bench_serving: "),
        "{text}"
    );
}

#[test]
fn a_gpu_that_a_person_named_is_shown_as_such() {
    let given = on_a_given_gpu(&["vllm-serve-2025-03-detailed.json"]);
    let page = render(&*given, Format::Html, false).unwrap();
    assert!(page.contains("of 1 × h100-pcie, named by hand"), "{page}");
    for format in [Format::Table, Format::Md, Format::Html] {
        let text = render(&*given, format, false).unwrap();
        assert!(text.contains("it ran on h100-pcie as given: the file names no GPU"), "{text}");
    }
}

#[test]
fn where_there_is_little_room_a_row_keeps_its_time_its_floor_and_its_share() {
    let main = |results: &[Imported]| {
        let lines: Vec<Line<'_>> = results.iter().flat_map(lines_of).collect();
        let shown = columns(&lines).1.into_iter().filter(|column| !column.minor);
        shown.map(|column| column.title).collect::<Vec<_>>()
    };
    let rated = on_a_given_gpu(&["vllm-serve-2025-03-detailed.json"]);
    assert_eq!(main(&rated), ["row", "TPOT median", "% sheet", "floor"]);
    let unrated = imported(&["vllm-serve-0.25.json"], &UserOverrides::default());
    assert_eq!(main(&unrated), ["row", "TTFT median", "TPOT median", "out tok/s"]);
}

#[test]
fn the_figures_stand_right_behind_the_name_of_the_row_and_what_ran_comes_last() {
    let titles = |results: &[Imported]| {
        let lines: Vec<Line<'_>> = results.iter().flat_map(lines_of).collect();
        columns(&lines).1.into_iter().map(|column| column.title).collect::<Vec<_>>()
    };
    let two = on_a_given_gpu(&["vllm-serve-2025-03-detailed.json", "sglang-one-batch.jsonl"]);
    let shown = titles(&two);
    assert_eq!(shown[..5], ["file", "row", "TTFT median", "TTFT p99", "TPOT median"], "{shown:?}");
    let at = |title: &str| shown.iter().position(|shown| shown == title).unwrap();
    assert!(at("TPOT median") < at("% sheet") && at("req/s") < at("% sheet"), "{shown:?}");
    assert!(at("% sheet") < at("program") && at("bound") < at("model") && at("ITL median") < at("engine"));
}

#[test]
fn on_a_narrow_terminal_every_part_of_the_table_says_which_row_it_is() {
    let two = on_a_given_gpu(&["vllm-serve-2025-03-detailed.json", "sglang-one-batch.jsonl"]);
    let screen = crate::output::Screen { color: false, width: Some(80) };
    let text = render(&*two, Format::Table, screen).unwrap();
    let table: Vec<&str> = text.lines().skip(1).collect();
    let headings: Vec<usize> = (0..table.len()).filter(|line| table[*line].starts_with("file ")).collect();
    assert!(headings.len() > 2, "{text}");
    for heading in &headings {
        assert!(table[*heading].contains("row "), "{text}");
        let rows = &table[heading + 1..heading + 5];
        assert!(rows[0].starts_with("vllm-s") && rows[0].contains("c1 10 req/s"), "{text}");
        for (row, batch) in rows[1..].iter().zip(["1 in512 out8", "4 in512 out8", "6 in512 out8"]) {
            assert!(row.starts_with("sglang") && row.contains(batch) && row.chars().count() <= 80, "{text}");
        }
    }
    let first = table[headings[0]];
    assert!(first.contains("TTFT median") && first.contains("TPOT median"), "{text}");
    let one = on_a_given_gpu(&["vllm-serve-2025-03-detailed.json"]);
    let text = render(&*one, Format::Table, screen).unwrap();
    let first = text.lines().find(|line| line.starts_with("row ")).unwrap();
    for figure in ["TTFT median", "TPOT median", "req/s", "% sheet"] {
        assert!(first.contains(figure), "{figure}: {first}");
    }
    let wide = render(&*two, Format::Table, false).unwrap();
    assert!(wide.contains("vllm-serve-2025-03-detailed.json  "), "whole where there is room");
}

#[test]
fn a_contradiction_names_both_values_and_the_flag_and_a_failed_run_is_invalid() {
    let architecture = test_shapes::llama_3_1_8b();
    let given = UserOverrides {
        model: Some(&architecture),
        model_name: Some("Llama-3.1-8B"),
        gpu: Some(devices::find("h100-pcie").unwrap()),
        batch: Some(8),
        dtype: Some(Dtype::Bf16),
        ..UserOverrides::default()
    };
    let text = table(&["vllm-serve-2025-03-detailed.json"], &given);
    let line = text.lines().find(|line| line.contains("CONTRADICTS, not rated")).unwrap();
    assert!(line.contains("limit of requests at once 1, and 8 was given; change --batch to"), "{line}");
    let failed = table(&["vllm-serve-all-failed.json"], &UserOverrides::default());
    assert!(failed.contains("INVALID: no request of 8 completed"), "{failed}");
    let row = failed.lines().find(|line| line.starts_with("run 1 ")).unwrap();
    assert!(row.contains("INVALID"), "{failed}");
}

#[test]
fn offered_rates_have_no_more_digits_than_a_reader_uses() {
    let shown =
        |request_rate, max_concurrency| offered(&Setup { max_concurrency, request_rate, ..Setup::default() });
    assert_eq!(shown(Some(Rate::PerSecond(146.529_644_211_620_8)), None).unwrap(), "146.5/s");
    assert_eq!(shown(Some(Rate::PerSecond(10.0)), Some(2)).unwrap(), "10/s");
    assert_eq!(shown(Some(Rate::Unlimited), None).unwrap(), "inf (all at time 0)");
    assert_eq!(shown(Some(Rate::Unlimited), Some(2)).unwrap(), "inf");
    assert_eq!(shown(None, Some(2)), None);
}

#[test]
fn with_what_was_missing_the_rows_stand_on_the_roofline() {
    let placed = on_a_given_gpu(&["vllm-serve-2025-03-detailed.json", "sglang-one-batch.jsonl"]);
    insta::assert_snapshot!(render(&*placed, Format::Table, false).unwrap());
    insta::assert_snapshot!("placed_markdown", render(&*placed, Format::Md, false).unwrap());
    insta::assert_snapshot!("placed_csv", render(&*placed, Format::Csv, false).unwrap());
    let json: Vec<Imported> = serde_json::from_str(&render(&*placed, Format::Json, false).unwrap()).unwrap();
    assert_eq!(json, placed, "JSON reads back as it was");
}

#[test]
fn the_dictionary_prints_in_every_format() {
    insta::assert_snapshot!(render(&Aliases(None), Format::Table, false).unwrap());
    assert!(render(&Aliases(None), Format::Csv, false).unwrap().lines().count() > 60);
    assert!(
        render(&Aliases(Some(ForeignFormat::Aiperf)), Format::Md, false)
            .unwrap()
            .contains("called ITL there")
    );
    let json: serde_json::Value =
        serde_json::from_str(&render(&Aliases(None), Format::Json, false).unwrap()).unwrap();
    assert_eq!(json[0]["format"], "vllm-serve");
}

#[test]
fn a_spreadsheet_runs_nothing_a_stranger_wrote() {
    let mut one = imported(&["vllm-serve-0.25.json"], &UserOverrides::default());
    one[0].result.rows[0].setup.model = Some("=cmd()".to_owned());
    one[0].result.rows[0].label = "@x".to_owned();
    let csv = render(&*one, Format::Csv, false).unwrap();
    assert!(csv.contains("'=cmd()") && csv.contains("'@x") && !csv.contains(",=cmd"), "{csv}");
}

#[test]
fn foreign_checklists_mostly_say_what_is_missing() {
    let names = ["vllm-serve-2025-03-detailed.json", "llama-bench-q8_0.json"];
    let lists: Vec<_> = imported(&names, &UserOverrides::default())
        .iter()
        .map(|i| of_foreign(&i.result, &UserOverrides::default(), None))
        .collect();
    insta::assert_snapshot!(render(&*lists, Format::Table, false).unwrap());
}

#[test]
fn an_external_server_stands_above_a_predicted_cell() {
    let architecture = test_shapes::llama_3_1_8b();
    let device = devices::find("h100-pcie").unwrap();
    let given = UserOverrides {
        model: Some(&architecture),
        gpu: Some(device),
        dtype: Some(Dtype::Bf16),
        ..UserOverrides::default()
    };
    let external = imported(&["vllm-serve-2025-03-detailed.json"], &given);
    let RooflinePlacement::Placed(placed) = &external[0].places[0] else { panic!("not placed") };
    let prediction = hbmark_core::ledger::predict(&hbmark_core::ledger::Request {
        architecture: &architecture,
        inventory: &architecture.inventory(Dtype::Bf16),
        name: "Llama-3.1-8B",
        weights: Dtype::Bf16,
        kv: Dtype::Bf16,
        device,
        batches: &[1],
        contexts: &[512],
        phases: &[hbmark_core::result::Phase::Decode],
        routing: hbmark_core::ledger::ExpertRouting::Uniform,
    });
    let report = Report {
        kind: ReportKind::Predict,
        ceilings: None,
        datasheet: Some(device.clone()),
        cells: prediction.cells,
        ..samples::report()
    };
    let cell = std::slice::from_ref(&placed.cell);
    let ladder = with_external(&report, "decode/ideal/bf16/b1/c512", cell).unwrap();
    insta::assert_snapshot!(render(&ladder, Format::Table, false).unwrap());
    assert!(with_external(&report, "decode/ideal/bf16/b2/c512", cell).is_err());
}

#[test]
fn every_column_names_its_statistic_and_tails_stand_beside_the_middle() {
    let heading = |name: &str| {
        let text = table(&[name], &UserOverrides::default());
        text.lines().find(|line| line.starts_with("row ")).unwrap().to_owned()
    };
    let served = heading("vllm-serve-0.25.json");
    for title in ["TTFT median", "TTFT p99", "TPOT median", "TPOT p99", "ITL median", "ITL p99"] {
        assert!(served.contains(title), "{title}: {served}");
    }
    let bench = heading("llama-bench.md");
    assert!(bench.contains("in tok/s mean") && bench.contains("prefill step mean"), "{bench}");
}
