//! `hbmark compare` as a person meets it: exit codes, messages, formats. Times are never compared.

use std::path::Path;

use predicates::prelude::PredicateBooleanExt;
use predicates::str::contains;

use crate::runs::{self, asserted as hbmark, fixture, path};

/// What both sides of a tiny comparison share.
fn tiny() -> String {
    format!("model={} device=cpu engine=native batch=1,2 context=8 phase=decode", path(&fixture("qwen3")))
}

/// Bad input: exit code 2, the message on stderr, nothing on stdout.
fn refused(arguments: &[&str], message: &str) {
    hbmark().arg("compare").args(arguments).assert().code(2).stdout("").stderr(contains(message));
}

/// Saves a result of a fixture model.
fn save(folder: &Path, model: &str, more: &[&str]) {
    hbmark()
        .args(["run", "--smoke", "--model", path(&fixture(model)), "--device", "cpu", "--phase", "decode"])
        .args(["--batch", "1", "--out", path(folder)])
        .args(more)
        .assert()
        .code(0);
}

fn json(bytes: &[u8]) -> serde_json::Value {
    serde_json::from_slice(bytes).unwrap()
}

#[test]
fn a_live_comparison_runs_its_rounds_in_processes_and_keeps_them() {
    let out = tempfile::tempdir().unwrap();
    let output = hbmark()
        .args(["compare", "dtype=bf16", "dtype=int8", "--both", &tiny(), "--protocol", "smoke"])
        .args(["--rounds", "3", "--aa", "--format", "json", "--out", path(out.path())])
        .assert()
        .code(0);
    let found = json(&output.get_output().stdout);
    assert_eq!(found["method"], "paired_rounds");
    assert_eq!(found["cells"].as_array().unwrap().len(), 2);
    for cell in found["cells"].as_array().unwrap() {
        assert_eq!((&cell["a"]["dtype"], &cell["b"]["dtype"]), (&"bf16".into(), &"int8".into()));
        assert_eq!(cell["pairs"].as_array().unwrap().len(), 3);
        // Three rounds can never reach a p of 0.05, and the noise of a smoke run is not an equivalence.
        assert!(cell["p"].as_f64().unwrap() >= 0.25);
        assert!(cell["ratio"].as_f64().unwrap() > 0.0 && !cell["floor"].is_null());
    }
    assert_eq!(found["differences"][0]["key"], "dtypes");
    assert_eq!(found["order"].as_array().unwrap().len(), 3);
    assert_eq!(found["floor"]["cells"].as_array().unwrap().len(), 2);
    let kept = json(&std::fs::read(out.path().join("comparison.json")).unwrap());
    assert_eq!(kept, found);
    for name in
        ["comparison.csv", "comparison.md", "processes/001-a/result.json", "processes/012-b/result.json"]
    {
        // The last of twelve launches is of either side.
        let other = name.replace("-b/", "-a/");
        assert!(out.path().join(name).exists() || out.path().join(other).exists(), "{name}");
    }
}

#[test]
fn a_gate_ends_with_one_and_its_absence_with_nought() {
    let with = |more: &[&str], code: i32| {
        hbmark()
            .args(["compare", "threads=1", "threads=1", "--both", &tiny(), "--protocol", "smoke"])
            .args(["--rounds", "1"])
            .args(more)
            .assert()
            .code(code)
            .stdout(contains("INCONCLUSIVE").and(contains("the configurations do not differ")));
    };
    with(&[], 0);
    // Runs that decide nothing let no gate pass.
    with(&["--fail-on", "slower:2%,faster"], 1);
    with(&["--fail-on", "slower:2%,inconclusive"], 1);
}

#[test]
fn saved_results_stand_side_by_side_and_say_what_they_cannot_prove() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    save(a.path(), "qwen3", &["--engine", "native", "--dtype", "bf16"]);
    save(b.path(), "qwen3", &["--engine", "native", "--dtype", "int8"]);
    hbmark().args(["compare", path(a.path()), path(&b.path().join("result.json"))]).assert().code(0).stdout(
        contains("what this cannot prove")
            .and(contains("not paired"))
            .and(contains("no random order"))
            .and(contains("native bf16"))
            .and(contains("INCONCLUSIVE")),
    );
    let output =
        hbmark().args(["compare", path(a.path()), path(b.path()), "--format", "json"]).assert().code(0);
    let found = json(&output.get_output().stdout);
    assert_eq!(found["method"], "saved_results");
    let cell = &found["cells"][0];
    assert!(cell["ratio"].as_f64().unwrap() > 0.0 && cell["p"].is_null() && cell["p_adjusted"].is_null());
    for format in ["csv", "md"] {
        hbmark().args(["compare", path(a.path()), path(b.path()), "--format", format]).assert().code(0);
    }
    refused(
        &[path(a.path()), path(b.path()), "--fail-on", "slower"],
        "--fail-on: 1 and 1 saved results decide nothing; give folders with 4 or more each",
    );
    refused(&[path(a.path()), path(b.path()), "--aa"], "--aa needs two configurations");
    refused(&[path(a.path()), "threads=1"], "give two of one kind");
}

#[test]
fn folders_of_saved_processes_are_decided_and_gated_and_no_process_counts_twice() {
    let folder = tempfile::tempdir().unwrap();
    let sides = ["old", "new"].map(|side| folder.path().join(side));
    for process in ["1", "2", "3", "4"] {
        for side in &sides {
            save(&side.join(process), "qwen3", &["--engine", "native"]);
        }
    }
    let [old, new] = sides.each_ref().map(|side| path(side));
    let output = hbmark().args(["compare", old, new, "--format", "json"]).assert().code(0);
    let found = json(&output.get_output().stdout);
    assert_eq!((&found["method"], &found["protocol"]), (&"saved_processes".into(), &"smoke".into()));
    let cell = &found["cells"][0];
    assert_eq!(cell["pairs"].as_array().map(Vec::len), Some(4));
    assert!(cell["p"].is_f64() && cell["ratio"].is_f64(), "{cell}");
    hbmark().args(["compare", old, new, "--fail-on", "slower:5%"]).assert().code(1).stdout(
        contains("4 processes of A and 4 of B, saved before, not in pairs").and(contains("ran once")),
    );
    hbmark().args(["compare", old, new, "--fail-on", "inconclusive"]).assert().code(1);
    refused(&[old, old], "are one process, which would count as two");
    refused(&[old, new, "--aa"], "--aa needs two configurations");
    let one = sides[1].join("1");
    refused(&[old, path(&one), "--fail-on", "slower"], "--fail-on: 4 and 1 saved results decide nothing");
    let mixed = sides[1].join("5");
    save(&mixed, "qwen3", &["--engine", "native", "--threads", "1"]);
    refused(&[old, new], "are not runs of one configuration: threads differs");
    std::fs::remove_dir_all(&mixed).unwrap();
    let empty = folder.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    refused(&[old, path(&empty)], "has 0 folders with a result: wanted one to 100");
    // One process beside four: not enough to decide, and it is said how many are.
    let output = hbmark().args(["compare", old, path(&one), "--format", "json"]).assert().code(0);
    assert_eq!(json(&output.get_output().stdout)["method"], "saved_processes");
}

#[test]
fn saved_results_that_do_not_belong_together_are_refused() {
    let [a, b, c, d] = [(); 4].map(|()| tempfile::tempdir().unwrap());
    save(a.path(), "qwen3", &["--engine", "native", "--context", "8"]);
    save(b.path(), "llama-gqa", &["--engine", "native", "--context", "8"]);
    save(c.path(), "qwen3", &["--engine", "native", "--context", "8,16"]);
    save(d.path(), "qwen3", &["--engine", "stock,native", "--context", "8"]);
    refused(&[path(a.path()), path(b.path())], "times of different models cannot be compared");
    refused(&[path(a.path()), path(c.path())], "B has the cell decode b1 c16 and A has no such step");
    refused(&[path(a.path()), path(d.path())], "it is open which to hold against which");
    refused(&[path(a.path()), "no/such/result.json"], "cannot read no/such/result.json");
    let broken = a.path().join("broken.json");
    std::fs::write(&broken, "{\"schema_version\": 1").unwrap();
    refused(&[path(a.path()), path(&broken)], "was it cut off?");
    let predicted = a.path().join("predicted.json");
    let prediction = hbmark()
        .args(["predict", "--model", path(&fixture("qwen3")), "--gpu", "h200", "--format", "json"])
        .args(["--context", "16"])
        .assert()
        .code(0);
    std::fs::write(&predicted, &prediction.get_output().stdout).unwrap();
    refused(&[path(a.path()), path(&predicted)], "is a prediction");
}

#[test]
fn bad_sides_are_refused_before_anything_runs() {
    refused(&["speed=9", "threads=1"], "`speed` is not a setting of a side; there are: model");
    refused(&["threads=1", "fast"], "`fast` is neither key=value");
    refused(&["threads=none", "threads=1"], "side A: invalid value 'none'");
    refused(&["threads=1", "dtype=f8"], "`f8` is not one of");
    refused(&["threads=1", "engine=warp"], "`warp` is unknown");
    refused(&["batch=1", "batch=2"], "A has the cell prefill b1 c128 and B has no such step");
    refused(&["engine=stock,native", "engine=native"], "it is open which to hold against which");
    refused(&["model=SmolLM2-135M", "model=Llama-3.2-1B"], "different models");
    refused(&["model=no-such-model", "threads=1"], "side A");
    refused(&["threads=1", "no-such.toml"], "cannot read no-such.toml");
    refused(&["threads=1", "threads=2", "--rounds", "0"], "--rounds");
    refused(&["threads=1", "dtype=bf16", "--rounds", "1"], "ask for 7 or more");
    refused(&["threads=1", "threads=2", "--margin", "x"], "wanted a percentage such as 2%");
    refused(&["threads=1", "threads=2", "--fail-on", "slow"], "wanted slower, slower:2%");
}

#[test]
fn settings_may_come_from_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let good = file("good.toml", "dtype = \"bf16\"\nbatch = [1]\nthreads = 1\n");
    let nested = file("nested.toml", "[engine]\nname = \"native\"\n");
    let broken = file("broken.toml", "engine = ");
    hbmark()
        .args(["compare", path(&good), &format!("{} dtype=f16", path(&good)), "--both", &tiny()])
        .args(["--protocol", "smoke", "--rounds", "1", "--format", "csv"])
        .assert()
        .code(0)
        .stdout(contains("b_against_a,decode,1,8,native,bf16,native,f16,1,"));
    refused(&[path(&nested), "threads=1"], "`engine` in");
    refused(&[path(&broken), "threads=1"], "is not TOML");
}

/// Starts a comparison of more rounds than anybody waits for, and waits until so many launches have a result.
fn long_comparison(out: &Path, launches: usize) -> std::process::Child {
    let mut command = runs::hbmark();
    command.args(["compare", "dtype=bf16", "dtype=int8", "--both", &tiny(), "--protocol", "smoke"]);
    command.args(["--rounds", "5000", "--format", "json", "--out", path(out)]);
    let child = runs::start(&mut command);
    runs::until("its launches", || (results(out) >= launches).then_some(()));
    child
}

/// Launches that have a result.
fn results(out: &Path) -> usize {
    let launches = std::fs::read_dir(out.join("processes")).into_iter().flatten().flatten();
    launches.filter(|launch| launch.path().join("result.json").is_file()).count()
}

#[test]
fn a_comparison_that_is_stopped_keeps_its_complete_rounds() {
    let out = tempfile::tempdir().unwrap();
    let child = long_comparison(out.path(), 5);
    runs::signal(child.id(), "INT");
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{said}");
    let found = json(&output.stdout);
    assert_eq!(found, json(&std::fs::read(out.path().join("comparison.json")).unwrap()));
    let rounds = found["rounds"].as_u64().unwrap();
    assert!((2..5000).contains(&rounds), "{rounds} rounds");
    assert_eq!(found["order"].as_array().unwrap().len() as u64, rounds);
    assert!(found["remarks"].to_string().contains("stopped by signal 2 after"), "{}", found["remarks"]);
    assert!(!out.path().join("journal.jsonl").exists(), "the folder is given back");
}

#[test]
fn a_comparison_that_is_stopped_in_its_first_round_says_that_it_decides_nothing() {
    let out = tempfile::tempdir().unwrap();
    let child = long_comparison(out.path(), 0);
    runs::until("its first launch", || out.path().join("processes").is_dir().then_some(()));
    runs::signal(child.id(), "INT");
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(said.contains("stopped by signal 2 after ") && said.contains("at least are needed"), "{said}");
    assert!(output.stdout.is_empty() && !out.path().join("comparison.json").exists());
}

#[test]
fn a_comparison_that_was_killed_is_started_again_with_the_same_command() {
    let out = tempfile::tempdir().unwrap();
    let mut child = long_comparison(out.path(), 1);
    runs::signal(child.id(), "KILL");
    child.wait().unwrap();
    // What a launch leaves that was killed after it had measured something.
    let launches = std::fs::read_dir(out.path().join("processes")).unwrap();
    let first = |path: &std::path::PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with("001-");
    let launch = launches.map(|entry| entry.unwrap().path()).find(first).unwrap();
    std::fs::write(launch.join("journal.jsonl"), "what nobody goes on with").unwrap();
    hbmark()
        .args(["compare", "dtype=bf16", "dtype=int8", "--both", &tiny(), "--protocol", "smoke"])
        .args(["--rounds", "2", "--out", path(out.path())])
        .assert()
        .code(0);
    assert_eq!(results(out.path()), 4);
    assert!(!launch.join("journal.jsonl").exists());
}

#[test]
fn a_comparison_that_cannot_be_printed_is_saved() {
    let saved = tempfile::tempdir().unwrap();
    let (a, b, out) = (saved.path().join("a"), saved.path().join("b"), saved.path().join("out"));
    save(&a, "qwen3", &["--context", "8"]);
    save(&b, "qwen3", &["--context", "8"]);
    let mut command = runs::hbmark();
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let output =
        command.args(["compare", path(&a), path(&b), "--out", path(&out)]).stdout(full).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("but not printed: cannot write to stdout"), "{said}");
    assert!(out.join("comparison.json").is_file());
}

#[cfg(unix)]
#[test]
fn a_comparison_that_is_killed_leaves_nothing_behind() {
    let temporary = tempfile::tempdir().unwrap();
    let mut command = runs::hbmark();
    command
        .args(["compare", "threads=1", "threads=2", "--both", &tiny(), "--protocol", "smoke"])
        .args(["--rounds", "500"])
        .env("TMPDIR", temporary.path());
    let mut child = runs::start(&mut command);
    runs::until("a side that runs", || runs::children(child.id()).pop());
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(runs::names(temporary.path()), Vec::<String>::new());
}
