//! What the death of a worker costs a serving benchmark: one point, named. Faults are planted into workers by environment.

use std::io::{BufReader, Read};
use std::process::{Command, Output};

use crate::runs::{fixture, hbmark, hung, names, report, runs as is_alive, signal, stderr, until, words};
use serde_json::Value;

const SWEEP: [&str; 2] = ["sweep", "rate=100,200,400"];
/// Where it does not matter: timing steps of an engine takes longer than everything else here.
const QUICK: [&str; 3] = ["sweep", "rate=100,200,400", "--no-predict"];
const VICTIM: &str = "rate 200";

/// A small load on a tiny model, as JSON on stdout.
fn serve(more: &[&str]) -> Command {
    let mut command = hbmark();
    // A mode is named first.
    let (named, flags) = more.split_at(usize::from(!more[0].starts_with("--")));
    command.arg("serve").args(named);
    command
        .args(["--engine", "native", "--device", "cpu", "--dtype", "f32", "--model"])
        .arg(fixture("qwen3"));
    command.args(["--requests", "10", "--input-len", "8", "--output-len", "4", "--threads", "2"]);
    command.args(["--num-gpu-blocks-override", "64", "--format", "json"]).args(flags);
    command
}

fn suffering(fault: &str, more: &[&str]) -> Output {
    serve(more).env("HBMARK_PLANT_FAULT", fault).output().unwrap()
}

fn points(report: &Value) -> &Vec<Value> {
    report["points"].as_array().unwrap()
}

/// Exit code 1 is a point that was lost, or one that a busy machine made invalid.
fn holds_exit_code(output: &Output, lost: bool) {
    let invalid =
        points(&report(output)).iter().any(|point| point["result"]["validity"].as_str() == Some("invalid"));
    assert_eq!(output.status.code(), Some(i32::from(lost || invalid)), "{}", stderr(output));
}

fn warned(report: &Value, of: &str) -> bool {
    report["warnings"].as_array().unwrap().iter().any(|warning| warning.as_str().unwrap().contains(of))
}

/// Serves the sweep with a fault in its second point, and holds reason, exit code and the other points against what is expected.
fn costs_one_point(fault: &str, arguments: &[&str], reason: &[&str]) {
    let arguments: Vec<&str> = SWEEP.iter().chain(arguments).copied().collect();
    let output = suffering(&format!("{fault}@{VICTIM}"), &arguments);
    assert_eq!(output.status.code(), Some(1), "{fault}: {}", stderr(&output));
    let report = report(&output);
    let [before, lost, behind] = &points(&report)[..] else { panic!("{fault}: {report}") };
    for point in [before, behind] {
        assert_eq!((&point["not_run"], &point["result"]["served"]), (&Value::Null, &10.into()), "{fault}");
    }
    assert_eq!((lost["label"].as_str(), &lost["result"]), (Some(VICTIM), &Value::Null), "{fault}");
    assert_eq!(lost["not_run"]["code"], "worker_lost", "{fault}");
    let said = lost["not_run"]["message"].as_str().unwrap();
    for part in reason {
        assert!(said.contains(part), "{fault}: {said}");
    }
    assert!(warned(&report, "a fault was planted") && warned(&report, "the point was repeated"), "{fault}");
}

#[test]
fn a_worker_that_dies_costs_one_point_and_is_named() {
    let doing = "while measuring rate 200";
    costs_one_point("kill", &["--no-predict"], &["the worker was killed by signal 9", doing]);
    costs_one_point("abort", &["--no-predict"], &["the worker was ended by signal 6 (SIGABRT)", doing]);
    costs_one_point("exit=3", &["--no-predict"], &["the worker exited with code 3", doing]);
}

#[test]
fn a_worker_that_hangs_costs_one_point_and_says_for_how_long_it_was_silent() {
    let reason = ["no answer while measuring rate 200", "silent for", "are predicted", "was killed"];
    costs_one_point("hang", &["--hang-after", "1"], &reason);
}

#[test]
fn a_device_that_fails_for_good_costs_one_point_and_is_no_result() {
    let output = suffering(&format!("device@{VICTIM}"), &QUICK);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let report = report(&output);
    let served: Vec<Option<u64>> =
        points(&report).iter().map(|point| point["result"]["served"].as_u64()).collect();
    assert_eq!(served, [Some(10), Some(0), Some(10)]);
    let reasons = points(&report)[1]["result"]["reasons"].as_array().unwrap();
    assert!(reasons.iter().any(|r| r["code"] == "gate_failed" && r["gate"] == "engine"), "{reasons:?}");
    assert!(warned(&report, "rate 200: planted failed: an illegal memory access"));
}

#[test]
fn a_worker_lost_once_costs_no_point_and_the_result_says_so() {
    let output = suffering(&format!("kill@{VICTIM}:3:1"), &SWEEP);
    holds_exit_code(&output, false);
    let report = report(&output);
    assert!(points(&report).iter().all(|point| point["result"]["served"] == 10));
    assert!(warned(&report, "rate 200: the worker was killed by signal 9"));
    assert!(warned(&report, "timed anew for points after a lost worker"));
    // What was measured before is as the first worker measured it, and the second one's loads are those of an undisturbed run.
    let whole = serve(&QUICK).output().unwrap();
    let asked = |report: &Value| -> Vec<Value> {
        let of = |p: &Value| {
            serde_json::json!([p["label"], p["offered"], p["seed"], p["scheduler"], p["mean_prompt_tokens"]])
        };
        points(report).iter().map(of).collect()
    };
    assert_eq!(asked(&report), asked(&crate::runs::report(&whole)));
}

#[test]
fn a_worker_lost_while_loading_is_replaced_once_and_then_it_is_an_error() {
    let once = suffering("kill@load:0:1", &["--rate", "100", "--no-predict"]);
    holds_exit_code(&once, false);
    assert!(warned(&report(&once), "signal 9"), "{}", stderr(&once));
    let always = suffering("exit=7@load", &["--rate", "100"]);
    assert_eq!(always.status.code(), Some(2));
    let said = stderr(&always);
    assert!(said.contains("error: the worker exited with code 7 while loading weights"), "{said}");
    assert!(said.contains("the worker before it was lost, too"), "{said}");
    let begin = suffering("abort@begin", &["--rate", "100"]);
    assert_eq!(begin.status.code(), Some(2), "{}", stderr(&begin));
    assert!(begin.stdout.is_empty() && always.stdout.is_empty());
}

#[test]
fn modes_that_need_a_lost_point_end_in_words() {
    let search = ["search", "--rate", "100", "--slo", "ttft_p50=1s", "--no-predict"];
    let output = suffering("kill@rate 100.000", &search);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let found = report(&output);
    let note = found["search"]["note"].as_str().unwrap();
    assert!(
        note.starts_with("the search ended early, at `bracket` of 100.000 per second: the worker"),
        "{note}"
    );
    assert_eq!(found["search"]["max_rate"], Value::Null);

    let output = suffering("kill@open, rate 100", &["--compare-loops", "--rate", "100", "--no-predict"]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert_eq!(points(&report(&output)).len(), 1);
    assert!(warned(&report(&output), "the closed loop was not run"));
}

/// The names of a value's fields, all the way down; of a list, those of its first element.
fn shape(value: &Value) -> Value {
    match value {
        // Why a point does not count is what the machine did meanwhile.
        Value::Object(cause) if cause.contains_key("code") => Value::Null,
        Value::Object(fields) => fields.iter().map(|(name, field)| (name.clone(), shape(field))).collect(),
        Value::Array(items) => items.first().map_or(Value::Null, shape),
        _ => Value::Null,
    }
}

#[test]
fn one_process_makes_the_same_report_and_plants_nothing() {
    let isolated = serve(&QUICK).output().unwrap();
    holds_exit_code(&isolated, false);
    let by_argument =
        || serve(&QUICK).arg("--no-isolation").env("HBMARK_PLANT_FAULT", "kill@rate 200").output();
    let by_environment = || serve(&QUICK).env("HBMARK_NO_ISOLATION", "1").output();
    for alone in [by_argument().unwrap(), by_environment().unwrap()] {
        holds_exit_code(&alone, false);
        let (one, two) = (report(&alone), report(&isolated));
        for part in ["environment", "points", "config", "model", "capabilities"] {
            // A telling of times may have more or fewer of them.
            let without = |report: &Value| {
                let mut part = report[part].clone();
                for point in part.as_array_mut().into_iter().flatten() {
                    point["result"]["timeline"] = Value::Null;
                    point["residuals"] = Value::Null;
                }
                shape(&part)
            };
            assert_eq!(without(&one), without(&two), "{part}");
        }
        assert_eq!((&one["config"], &one["kind"]), (&two["config"], &two["kind"]));
        assert!(!warned(&one, "planted"));
    }
}

/// A benchmark whose worker hangs in its first point, and that worker.
fn hanging(more: &[&str]) -> (std::process::Child, u32, BufReader<std::process::ChildStderr>) {
    let mut command = serve(&["--rate", "100", "--no-predict", "--hang-after", "100000"]);
    hung(command.args(more).env("HBMARK_PLANT_FAULT", "hang@rate 100"))
}

#[test]
fn no_worker_outlives_its_supervisor_and_nothing_is_left_where_nothing_was_measured() {
    // Not SIGINT, which is ignored where tests run in the background.
    for (name, code) in [("KILL", None), ("TERM", Some(143))] {
        let folder = tempfile::tempdir().unwrap();
        let (child, worker, mut said) = hanging(&["--out", folder.path().to_str().unwrap()]);
        assert!(is_alive(worker));
        signal(child.id(), name);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), code);
        // Both hold the other end of stderr: it ends when neither is left.
        let mut words = String::new();
        said.read_to_string(&mut words).unwrap();
        until("the worker's end", || (!is_alive(worker)).then_some(()));
        if code.is_some() {
            assert!(
                words.contains("stopped by SIGTERM: what was being measured was not complete"),
                "{words}"
            );
            assert_eq!(names(folder.path()), [""; 0]);
        } else {
            assert_eq!(names(folder.path()), ["journal.jsonl"]);
        }
    }
}

#[test]
fn a_cold_start_and_a_virtual_run_have_no_worker_to_suffer() {
    let mut command = hbmark();
    command
        .args(["serve", "cold", "--launches", "1", "--prompt-tokens", "4", "--device", "cpu", "--model"])
        .arg(fixture("qwen3"));
    let cold = command.env("HBMARK_PLANT_FAULT", "kill@load").output().unwrap();
    assert_eq!(cold.status.code(), Some(0), "{}", stderr(&cold));
    let mut command = hbmark();
    command.args(words("serve --virtual --gpu h100-sxm --model SmolLM2-135M --rate 5 --format json"));
    let simulated = command.env("HBMARK_PLANT_FAULT", "kill@load").output().unwrap();
    assert_eq!(simulated.status.code(), Some(0), "{}", stderr(&simulated));
    assert!(!warned(&report(&simulated), "planted"));
}
