//! What a worker's death costs: one cell, named. Faults are planted into workers by environment.

use std::io::Read;

use crate::runs::{
    cells, children, essence, hanging, hbmark, journal_lines, names, report, run, runs as is_alive, signal,
    start, statuses, stderr, until,
};

const VICTIM: &str = "decode/stock/f32/b2/c4";

/// Runs with a fault, which may come after so many steps (`hang:3`), and holds exit code, the victim's status and the others' against what is
/// expected.
fn costs_one_cell(fault: &str, arguments: &[&str], status: &str, reason: &[&str]) {
    let (kind, after) = fault.split_once(':').unwrap_or((fault, "0"));
    let planted = format!("{kind}@{VICTIM}:{after}");
    let output = run().args(arguments).env("HBMARK_PLANT_FAULT", planted).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{fault}: {}", stderr(&output));
    let report = report(&output);
    for (cell, found, why) in statuses(&report) {
        if cell == VICTIM {
            assert_eq!(found, status, "{fault}: {why}");
            for part in reason {
                assert!(why.contains(part), "{fault}: {why}");
            }
        } else {
            assert_eq!((found.as_str(), why.as_str()), ("smoke", ""), "{fault}: {cell}");
        }
    }
    assert!(report["warnings"].to_string().contains("a fault was planted"), "{fault}");
}

#[test]
fn a_worker_that_dies_costs_one_cell_and_is_named() {
    let doing = "while measuring decode/stock/f32/b2/c4 in round 1";
    costs_one_cell("kill", &[], "failed", &["the worker was killed by signal 9", doing]);
    costs_one_cell("abort", &[], "failed", &["the worker was ended by signal 6 (SIGABRT)", doing]);
    costs_one_cell("exit=3", &[], "failed", &["the worker exited with code 3", doing]);
}

#[test]
fn a_device_that_fails_for_good_costs_one_cell() {
    costs_one_cell("device", &[], "failed", &["planted failed: an illegal memory access"]);
}

#[test]
fn out_of_memory_costs_one_cell_as_oom() {
    costs_one_cell("oom", &[], "oom", &["out of memory on planted: 9.00 GB wanted"]);
}

#[test]
fn a_worker_that_hangs_costs_one_cell_and_says_what_was_allowed() {
    // Behind the two steps of the fill and the one of the warm-up, which says how long the block should take.
    let reason =
        ["no answer while measuring decode/stock/f32/b2/c4", "silent for 5.", "are predicted", "was killed"];
    costs_one_cell("hang:3", &["--hang-after", "5"], "failed", &reason);
}

#[test]
fn a_worker_lost_once_costs_nothing_but_the_visit_and_the_result_says_so() {
    for fault in ["kill", "device", "oom"] {
        let output = run().env("HBMARK_PLANT_FAULT", format!("{fault}@{VICTIM}:1:1")).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let report = report(&output);
        assert!(statuses(&report).iter().all(|(_, status, _)| status == "smoke"));
        let warnings = report["warnings"].to_string();
        assert!(warnings.contains(VICTIM) && warnings.contains("the visit was repeated"), "{warnings}");
    }
}

#[test]
fn a_worker_lost_while_loading_is_replaced_once_and_then_costs_the_series() {
    let once = run().env("HBMARK_PLANT_FAULT", "kill@load:0:1").output().unwrap();
    assert_eq!(once.status.code(), Some(0), "{}", stderr(&once));
    let always = run().env("HBMARK_PLANT_FAULT", "kill@load").output().unwrap();
    assert_eq!(always.status.code(), Some(1), "{}", stderr(&always));
    for (cell, status, reason) in statuses(&report(&always)) {
        assert_eq!(status, "failed", "{cell}");
        assert!(
            reason.contains("signal 9") && reason.contains("loading and checking stock as f32"),
            "{reason}"
        );
    }
    let begin = run().env("HBMARK_PLANT_FAULT", "exit=7@begin").output().unwrap();
    assert_eq!(begin.status.code(), Some(2));
    assert!(
        stderr(&begin).contains("the worker exited with code 7 while measuring the ceilings"),
        "{}",
        stderr(&begin)
    );
}

#[test]
fn one_process_measures_the_same_cells_and_plants_nothing() {
    let isolated = run().output().unwrap();
    let alone =
        run().arg("--no-isolation").env("HBMARK_PLANT_FAULT", format!("kill@{VICTIM}")).output().unwrap();
    assert_eq!((isolated.status.code(), alone.status.code()), (Some(0), Some(0)), "{}", stderr(&alone));
    assert_eq!(essence(&report(&isolated)), essence(&report(&alone)));
    assert!(!report(&alone)["warnings"].to_string().contains("planted"));
}

#[test]
fn a_worker_is_not_started_by_hand_and_a_fault_is_not_misspelt() {
    let output = hbmark().arg("__worker").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("use `hbmark run`"), "{}", stderr(&output));
    let output = run().env("HBMARK_PLANT_FAULT", "burn@load").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("HBMARK_PLANT_FAULT=burn@load is not a fault"), "{}", stderr(&output));
    let help = hbmark().args(["--help"]).output().unwrap();
    assert!(!String::from_utf8_lossy(&help.stdout).contains("__worker"));
}

#[test]
fn no_run_outlives_the_comparison_that_launched_it() {
    let folder = tempfile::tempdir().unwrap();
    let model = cells().pop().unwrap();
    let both = format!("model={model} device=cpu engine=native phase=decode batch=1 context=4");
    let mut comparison = hbmark();
    comparison.args(["compare", "dtype=f32", "dtype=bf16", "--protocol", "smoke", "--rounds", "2"]);
    comparison.args(["--both", &both, "--out", folder.path().to_str().unwrap()]);
    let mut comparison = start(comparison.env("HBMARK_PLANT_FAULT", "hang@begin"));
    let run = until("the comparison launches a run", || children(comparison.id()).first().copied());
    let worker = until("the run starts a worker", || children(run).first().copied());
    signal(comparison.id(), "KILL");
    comparison.wait().unwrap();
    until("the run is gone", || (!is_alive(run)).then_some(()));
    until("its worker is gone", || (!is_alive(worker)).then_some(()));
}

#[test]
fn no_worker_outlives_its_supervisor() {
    let folder = tempfile::tempdir().unwrap();
    let (mut child, worker, mut said) = hanging(folder.path(), &["--format", "json"]);
    assert!(is_alive(worker));
    signal(child.id(), "KILL");
    child.wait().unwrap();
    // Both hold the other end of stderr: it ends when neither is left.
    said.read_to_end(&mut Vec::new()).unwrap();
    until("the worker's end", || (!is_alive(worker)).then_some(()));
}

#[test]
fn ctrl_c_saves_what_there_is_as_incomplete() {
    for name in ["INT", "TERM"] {
        let folder = tempfile::tempdir().unwrap();
        let (child, worker, mut said) = hanging(folder.path(), &["--format", "json"]);
        let measured = journal_lines(folder.path());
        signal(child.id(), name);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(if name == "INT" { 130 } else { 143 }));
        let printed = report(&output);
        let saved: serde_json::Value =
            serde_json::from_slice(&std::fs::read(folder.path().join("result.json")).unwrap()).unwrap();
        assert_eq!(printed, saved);
        let incomplete = statuses(&saved).into_iter().filter(|(_, status, _)| status == "incomplete").count();
        assert!(incomplete >= 1, "the cell that hung is not finished");
        let warnings = saved["warnings"].to_string();
        assert!(warnings.contains(&format!("{incomplete} of 4 cells are incomplete")), "{warnings}");
        let mut expected: Vec<&str> = crate::runs::RESULTS.to_vec();
        expected.insert(0, "journal.jsonl");
        assert_eq!(names(folder.path()), expected, "and nothing unfinished beside them");
        assert_eq!(journal_lines(folder.path()), measured);
        let mut rest = String::new();
        said.read_to_string(&mut rest).unwrap();
        assert!(rest.contains("hbmark run --resume"), "{rest}");
        until("the worker's end", || (!is_alive(worker)).then_some(()));
    }
}

#[test]
fn a_signal_that_reaches_the_worker_first_is_no_loss() {
    let folder = tempfile::tempdir().unwrap();
    let (child, worker, mut said) = hanging(folder.path(), &["--format", "json"]);
    let measured = journal_lines(folder.path());
    for name in ["INT", "TERM"] {
        signal(worker, name);
    }
    signal(child.id(), "TERM");
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(143));
    assert_eq!(journal_lines(folder.path()), measured, "a loss would be in the journal");
    let warnings = report(&output)["warnings"].to_string();
    assert!(!warnings.contains("SIGTERM") && !warnings.contains("SIGINT"), "{warnings}");
    said.read_to_string(&mut String::new()).unwrap();
    until("the worker's end", || (!is_alive(worker)).then_some(()));
}

#[test]
fn a_second_ctrl_c_ends_at_once() {
    let folder = tempfile::tempdir().unwrap();
    // Nobody reads what it prints, which is more than a pipe holds: after the first Ctrl-C it cannot end by itself.
    let note = "a long note ".repeat(6000);
    let (mut child, worker, said) = hanging(folder.path(), &["--note", &note, "--format", "json"]);
    signal(child.id(), "INT");
    until("the whole result", || folder.path().join("report.html").exists().then_some(()));
    until("the end of the worker", || (!is_alive(worker)).then_some(()));
    assert_eq!(child.try_wait().unwrap(), None, "it waits for a reader");
    signal(child.id(), "INT");
    assert_eq!(child.wait().unwrap().code(), Some(130));
    drop(said);
}

#[test]
fn ctrl_c_in_one_process_ends_between_two_visits() {
    let mut command = hbmark();
    let mut arguments = crate::runs::cells();
    // Long enough to be stopped: the full protocol.
    arguments.retain(|argument| argument != "--smoke");
    let folder = tempfile::tempdir().unwrap();
    command
        .args(arguments)
        .args(["--no-isolation", "--quick", "--format", "json", "--out"])
        .arg(folder.path());
    let child = crate::runs::start(&mut command);
    until("a first visit", || (journal_lines(folder.path()) > 3).then_some(()));
    signal(child.id(), "INT");
    assert!(children(child.id()).is_empty());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    assert!(statuses(&report(&output)).iter().any(|(_, status, _)| status == "incomplete"));
}
