//! Serving benchmarks that end early, keep what they measured, and go on.

use std::io::{BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Output};

use crate::runs::{
    fixture, hbmark, hung, names, path, refused, report, runs as is_alive, signal, stderr, until, words,
};
use serde_json::Value;

const RESULTS: [&str; 4] = ["report.html", "serve.csv", "serve.json", "serve.md"];

/// A sweep of three rates on a tiny model, as JSON on stdout.
fn sweep(more: &[&str]) -> Command {
    sweep_of("10", more)
}

fn sweep_of(requests: &str, more: &[&str]) -> Command {
    let mut command = hbmark();
    command.args(words("serve sweep rate=100,200,400 --engine native --device cpu --dtype f32"));
    command.args(words("--no-predict --input-len 8 --output-len 4 --threads 2 --format json"));
    command
        .args(["--num-gpu-blocks-override", "64", "--requests", requests, "--model"])
        .arg(fixture("qwen3"));
    command.args(more);
    command
}

/// That sweep in its second point, where its worker hangs.
fn hanging(folder: &Path) -> (Child, u32, BufReader<ChildStderr>) {
    let mut command = sweep(&["--hang-after", "100000", "--out", path(folder)]);
    hung(command.env("HBMARK_PLANT_FAULT", "hang@rate 200"))
}

/// A folder with a sweep that was killed in its second point.
fn killed() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let (mut child, worker, _said) = hanging(folder.path());
    signal(child.id(), "KILL");
    child.wait().unwrap();
    until("the worker's end", || (!is_alive(worker)).then_some(()));
    assert_eq!(names(folder.path()), ["journal.jsonl"], "no result, and nothing that looks like one");
    folder
}

fn resume(folder: &Path, more: &[&str]) -> Output {
    hbmark().args(["serve", "--format", "json", "--resume", path(folder)]).args(more).output().unwrap()
}

/// What does not depend on time.
fn essence(report: &Value) -> Vec<Value> {
    let of = |p: &Value| {
        serde_json::json!([p["label"], p["seed"], p["scheduler"], p["not_run"], p["result"]["served"]])
    };
    report["points"].as_array().unwrap().iter().map(of).collect()
}

/// Whole, but for what a busy machine makes of its times.
fn is_whole(output: &Output) {
    assert!(matches!(output.status.code(), Some(0 | 1)), "{}", stderr(output));
    assert_eq!(essence(&report(output)), essence(&report(&sweep(&[]).output().unwrap())));
}

#[test]
fn a_killed_sweep_goes_on_with_the_points_that_it_had() {
    for how in [&[][..], &["--no-isolation"]] {
        let folder = killed();
        let output = resume(folder.path(), how);
        assert!(stderr(&output).contains("` after 1 measured point\n"), "{}", stderr(&output));
        is_whole(&output);
        assert_eq!(names(folder.path()), RESULTS, "a whole result needs no journal");
        refused(&resume(folder.path(), &[]), &["holds no unfinished run", "journal.jsonl"]);
    }
}

#[test]
fn a_signal_saves_what_there_is_and_names_what_it_hit() {
    for (name, code) in [("INT", 130), ("TERM", 143)] {
        let folder = tempfile::tempdir().unwrap();
        let (child, worker, mut said) = hanging(folder.path());
        signal(child.id(), name);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(code));
        let printed = report(&output);
        let saved: Value =
            serde_json::from_slice(&std::fs::read(folder.path().join("serve.json")).unwrap()).unwrap();
        assert_eq!(printed, saved);
        let [first, hit] = &printed["points"].as_array().unwrap()[..] else { panic!("{printed}") };
        assert_eq!(first["result"]["served"], 10);
        assert_eq!(hit["not_run"]["signal"], format!("SIG{name}"));
        let warnings = printed["warnings"].to_string();
        assert!(warnings.contains(&format!("stopped by SIG{name} after 1 point")), "{warnings}");
        let mut words = String::new();
        said.read_to_string(&mut words).unwrap();
        assert!(words.contains("resume with `hbmark serve --resume"), "{words}");
        until("the worker's end", || (!is_alive(worker)).then_some(()));
        is_whole(&resume(folder.path(), &[]));
        assert_eq!(names(folder.path()), RESULTS);
    }
}

#[test]
fn what_differs_is_refused_with_both_values_and_the_same_is_not() {
    let folder = killed();
    refused(
        &resume(folder.path(), &["--requests", "20"]),
        &["--requests differs: the run had 10, this is 20"],
    );
    refused(&resume(folder.path(), &["--rate", "3"]), &["--rate differs: the run had none, this is 3"]);
    let mut other = hbmark();
    other.args(["serve", "--resume", path(folder.path())]).env("HBMARK_THREADS", "1");
    let said = stderr(&other.output().unwrap());
    assert!(!said.contains("differs"), "an option given on the command line wins: {said}");
    refused(&resume(folder.path(), &["--requests", "20"]), &["holds no unfinished run"]);
}

#[test]
fn a_folder_of_a_serve_is_none_of_a_run_and_is_not_overwritten() {
    let folder = killed();
    let run = hbmark().args(["run", "--resume", path(folder.path())]).output().unwrap();
    refused(&run, &["holds an unfinished `hbmark serve`", "hbmark serve --resume"]);
    for command in
        [&mut sweep(&["--out", path(folder.path())]), crate::runs::run().args(["--out", path(folder.path())])]
    {
        refused(&command.output().unwrap(), &["holds an unfinished run", "hbmark serve --resume"]);
    }
    is_whole(&resume(folder.path(), &[]));
}

#[test]
fn one_process_keeps_a_journal_too_and_stops_between_two_points() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = sweep_of("200", &["--no-isolation", "--out", path(folder.path())]);
    let child = crate::runs::start(&mut command);
    until("a first point", || (crate::runs::journal_lines(folder.path()) > 2).then_some(()));
    signal(child.id(), "INT");
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    let measured = report(&output)["points"].as_array().unwrap().len();
    assert!((1..3).contains(&measured), "{measured}");
    let output = resume(folder.path(), &["--no-isolation"]);
    assert_eq!(report(&output)["points"].as_array().unwrap().len(), 3, "{}", stderr(&output));
}
