use super::*;
use crate::plan::Plan;
use hbmark_core::result::{FleetTask, GpuEnvironment, Report};
use hbmark_report::samples;
use std::os::unix::fs::symlink;

fn result(gpu: &str, node: &str, process: u32) -> Report {
    let mut report = samples::measured();
    report.started_at = Some(format!("2026-01-01T00:0{process}:00Z"));
    report.environment.gpu = Some(GpuEnvironment {
        index: 3,
        uuid: Some(gpu.into()),
        name: Some("NVIDIA H200".into()),
        ..GpuEnvironment::default()
    });
    report.environment.placement = Some(Placement {
        node: Some(node.into()),
        topology: Some("root.rack7.n1".into()),
        ..Placement::default()
    });
    report
}

fn put(path: &Path, report: &Report) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, serde_json::to_string(report).unwrap()).unwrap();
}

fn kinds(reading: &Reading) -> Vec<(NoticeKind, String)> {
    let name = |path: &String| Path::new(path).file_name().unwrap().to_string_lossy().into_owned();
    reading.notices.shown.iter().map(|notice| (notice.kind, name(&notice.path))).collect()
}

#[test]
fn a_result_is_read_with_its_gpu_its_place_and_its_numbers() {
    let folder = tempfile::tempdir().unwrap();
    put(&folder.path().join("n1/GPU-a/run-1/result.json"), &result("GPU-a", "n1", 1));
    let reading = read(&[folder.path().to_owned()]).unwrap();
    let run = &reading.runs[0];
    assert_eq!((run.gpu.as_str(), run.node.as_str(), run.slot), ("GPU-a", "n1", Some(3)));
    assert_eq!((run.rack.as_deref(), run.device.as_str()), (Some("rack7"), "NVIDIA H200"));
    assert!((run.datasheet_bytes_per_s.unwrap() - 4.8e12).abs() < 1e9, "of the table of GPUs");
    let metrics: Vec<String> = run.values.iter().map(|(metric, _)| metric.to_string()).collect();
    assert_eq!(metrics[..4], ["read", "copy", "gemm bf16", "gemm f32"]);
    assert!(metrics.len() > 4, "cells: {metrics:?}");
    assert!(reading.notices.shown.is_empty(), "{:?}", reading.notices);
}

#[test]
fn foreign_double_half_and_linked_files_are_named_and_cost_no_result() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    put(&at("n1/GPU-a/run-1/result.json"), &result("GPU-a", "n1", 1));
    put(&at("n1/GPU-a/run-2/result.json"), &result("GPU-a", "n1", 2));
    // Copied together from two places, once more.
    put(&at("copy/n1/GPU-a/run-1/result.json"), &result("GPU-a", "n1", 1));
    put(&at("nameless.json"), &samples::measured());
    std::fs::write(at("half.json"), &serde_json::to_string(&result("GPU-b", "n1", 1)).unwrap()[..300])
        .unwrap();
    std::fs::write(at("notes.txt"), "hello").unwrap();
    std::fs::write(at("vllm.json"), r#"{"completed": 3}"#).unwrap();
    std::fs::write(at("serve.json"), r#"{"kind": "serve"}"#).unwrap();
    std::fs::write(at("deep.json"), "[".repeat(100_000)).unwrap();
    std::fs::create_dir_all(at("n1/GPU-c/run-1.unfinished")).unwrap();
    std::fs::write(at("n1/GPU-c/run-1.unfinished/journal.jsonl"), "x").unwrap();
    symlink(folder.path(), at("loop")).unwrap();
    symlink("nowhere", at("dangling")).unwrap();
    let mut other = result("GPU-d", "n1", 1);
    other.schema_version = 99;
    put(&at("future.json"), &other);
    let reading = read(&[folder.path().to_owned()]).unwrap();
    assert_eq!(reading.runs.len(), 2);
    let kinds = kinds(&reading);
    let of = |wanted: NoticeKind| -> Vec<&str> {
        kinds.iter().filter(|(kind, _)| *kind == wanted).map(|(_, name)| name.as_str()).collect()
    };
    assert_eq!(of(NoticeKind::Duplicate).len(), 1);
    assert_eq!(of(NoticeKind::NotEntered), ["dangling", "loop"]);
    assert_eq!(of(NoticeKind::Unfinished), ["half.json", "journal.jsonl"]);
    assert_eq!(of(NoticeKind::Nameless), ["nameless.json"]);
    assert_eq!(of(NoticeKind::Damaged), ["future.json"]);
    assert_eq!(of(NoticeKind::Foreign), ["deep.json", "notes.txt", "serve.json", "vllm.json"]);
}

#[test]
fn files_above_the_limit_are_refused_before_they_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("huge.json");
    std::fs::File::create(&path).unwrap().set_len(1 << 40).unwrap();
    let reading = read(&[folder.path().to_owned()]).unwrap();
    assert!(reading.notices.shown[0].why.contains("above the limit"), "{:?}", reading.notices);
}

#[test]
fn a_json_of_countless_values_costs_a_notice_and_no_memory() {
    let folder = tempfile::tempdir().unwrap();
    let text = format!(r#"{{"kind": "run", "schema_version": 2, "cells": [{}0]}}"#, "0,".repeat(10 << 20));
    std::fs::write(folder.path().join("flood.json"), text).unwrap();
    let reading = read(&[folder.path().to_owned()]).unwrap();
    assert_eq!(kinds(&reading), [(NoticeKind::Damaged, "flood.json".into())]);
}

#[test]
fn kept_ceilings_are_no_fresh_measurement() {
    let folder = tempfile::tempdir().unwrap();
    let mut report = result("GPU-a", "n1", 1);
    report.ceilings.as_mut().unwrap().age_s = Some(60.0);
    put(&folder.path().join("result.json"), &report);
    let reading = read(&[folder.path().to_owned()]).unwrap();
    assert!(reading.runs[0].values.iter().all(|(metric, _)| matches!(metric, Metric::Step(_))));
    assert!(reading.runs[0].unmeasured[0].why.contains("--fresh-ceilings"));
}

#[test]
fn an_emulated_device_has_a_name_of_its_own_and_says_what_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let mut report = result("GPU-a", "n1", 1);
    report.environment.gpu = None;
    report.environment.placement.as_mut().unwrap().fleet = Some(FleetTask {
        plan: "p".into(),
        device: "emulated-n1-5".into(),
        slot: Some(5),
        process: 1,
        at_once: 8,
        emulated: true,
    });
    put(&folder.path().join("result.json"), &report);
    let run = read(&[folder.path().to_owned()]).unwrap().runs.remove(0);
    assert_eq!((run.gpu.as_str(), run.slot, run.emulated), ("emulated-n1-5", Some(5), true));
    assert!(run.device.ends_with("(emulated GPU)"), "{}", run.device);
}

#[test]
fn the_order_of_folders_does_not_show_and_a_manifest_counts_at_the_top_alone() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    put(&a.path().join("n1/x/result.json"), &result("GPU-a", "n1", 1));
    put(&b.path().join("n2/x/result.json"), &result("GPU-b", "n2", 1));
    let manifest =
        Manifest::new(Plan::open("quick-ceiling").unwrap(), crate::nodes::parse("n[1-2]").unwrap());
    let text = serde_json::to_string(&manifest).unwrap();
    std::fs::write(a.path().join("fleet.json"), &text).unwrap();
    std::fs::create_dir(b.path().join("other")).unwrap();
    std::fs::write(b.path().join("other/fleet.json"), &text).unwrap();
    let (a, b) = (a.path().to_owned(), b.path().to_owned());
    let (one, two) = (read(&[a.clone(), b.clone()]).unwrap(), read(&[b, a]).unwrap());
    assert_eq!(one.runs, two.runs);
    assert_eq!((one.manifests.len(), two.manifests.len()), (1, 1));
    assert_eq!(kinds(&one), [(NoticeKind::OtherManifest, "fleet.json".into())]);
}

#[test]
fn many_foreign_files_are_counted_and_the_first_of_them_named() {
    let mut notices = Notices::default();
    for number in 0..1_000_000 {
        notices.add(NoticeKind::Foreign, format!("{number}"), "no result");
    }
    assert_eq!((notices.shown.len(), notices.counts[&NoticeKind::Foreign]), (MAX_NOTICES, 1_000_000));
}

#[test]
fn any_truncation_or_flipped_byte_is_a_run_or_a_notice_and_never_a_panic() {
    let folder = tempfile::tempdir().unwrap();
    let mut report = result("GPU-a", "n1", 1);
    report.cells.truncate(1);
    report.cells[0].blocks.clear();
    let whole = serde_json::to_vec(&report).unwrap();
    let path = folder.path().join("result.json");
    let settings = crate::result::Settings::default();
    let try_bytes = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        let reading = read(&[folder.path().to_owned()]).unwrap();
        assert_eq!(reading.runs.len() + reading.notices.shown.len(), 1, "nothing is lost without a word");
        let report = crate::verdict::verdict(reading, &settings, &[]);
        let _ = hbmark_report::output::render(&report, hbmark_report::output::Format::Html, false).unwrap();
    };
    for at in (0..whole.len()).step_by(11) {
        try_bytes(&whole[..at]);
        let mut flipped = whole.clone();
        flipped[at] ^= 1 << (at % 8);
        try_bytes(&flipped);
    }
}

#[test]
fn the_settings_that_set_speed_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let mut report = result("GPU-a", "n1", 1);
    let gpu = report.environment.gpu.as_mut().unwrap();
    (gpu.power_limit_watts, gpu.mig, gpu.ecc) = (Some(700.0), Some(false), Some(true));
    gpu.memory_bytes = Some(hbmark_core::units::Bytes(151_397_597_184));
    let build = &mut report.environment.build;
    (build.version, build.git_revision, build.profile) = ("0.1.0".into(), Some("abc".into()), "debug".into());
    put(&folder.path().join("result.json"), &report);
    let run = read(&[folder.path().to_owned()]).unwrap().runs.remove(0);
    assert_eq!(run.speed_facts(), ["off", "141 GiB", "700 W", "on", "0.1.0 (abc, debug)"]);
}

/// An invalid cell counted like a good one, whatever it was invalid for.
#[test]
fn of_an_invalid_cell_no_value_is_taken_and_changed_tokens_are_wrong_outputs() {
    let folder = tempfile::tempdir().unwrap();
    let mut report = result("GPU-a", "n1", 1);
    let causes = [
        (Status::Invalid, Cause::TokensChanged { sequence: 0, first: 1, then: 2 }),
        (Status::Invalid, Cause::TokenCount { wanted: 2, found: 1 }),
        (Status::Invalid, Cause::ClocksDisagree { timeline_ns: 1.0, host_ns: 2.0 }),
        (Status::Invalid, Cause::AboveDatasheetPeak { share: 1.2 }),
        (Status::Oom, Cause::NotReached),
        (Status::Failed, Cause::NotReached),
        (Status::Skipped, Cause::EmptyBatch),
    ];
    for (cell, (status, cause)) in report.cells.iter_mut().zip(causes) {
        (cell.status, cell.reason) = (status, Some(cause));
    }
    let of = |index: usize| Metric::Step(report.cells[index].id.clone());
    put(&folder.path().join("result.json"), &report);
    let run = read(&[folder.path().to_owned()]).unwrap().runs.remove(0);
    for index in 0..7 {
        assert!(run.values.iter().all(|(metric, _)| *metric != of(index)), "{}", report.cells[index].id);
    }
    assert!(run.values.iter().any(|(metric, _)| *metric == of(7)));
    assert_eq!(run.wrong.len(), 2, "{:?}", run.wrong);
    assert!(run.wrong[0].contains("gave different tokens"), "{:?}", run.wrong);
    let lacks: Vec<Lack> = run.unmeasured.iter().map(|unmeasured| unmeasured.lack).collect();
    let (invalid, failed) = (Lack::Invalid, Lack::Failed);
    assert_eq!(lacks, [invalid, invalid, invalid, invalid, failed, failed, Lack::NotRun]);
    assert_eq!(run.unmeasured[2].metric, Some(of(2)));
    assert!(run.unmeasured[2].why.contains("cannot be trusted"), "{}", run.unmeasured[2].why);
}
