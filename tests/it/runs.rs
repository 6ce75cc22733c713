//! Runs of the program on a tiny model, and what tests do to them from outside.

#![allow(dead_code, reason = "each test file needs its own share")]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Only a test that hangs waits so long.
const SAFETY_NET: Duration = Duration::from_mins(3);

/// A program of the environment of a test: no setting from outside, no network, no colour.
pub fn clean(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("HBMARK_")) {
        command.env_remove(name);
    }
    command.env("HF_HUB_OFFLINE", "1").env("NO_COLOR", "1").stdin(Stdio::null());
    command
}

pub fn program() -> PathBuf {
    env!("CARGO_BIN_EXE_hbmark").into()
}

pub fn hbmark() -> Command {
    clean(program())
}

/// The program, whose output is to be held against something.
pub fn asserted() -> assert_cmd::Command {
    assert_cmd::Command::from_std(hbmark())
}

/// The root of the source tree.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Adds the Rust sources below a folder, but for what builds and fuzzing leave there.
pub fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && !matches!(name.as_str(), "target" | "corpus" | "artifacts" | "found") {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// A model of the fixtures.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(name)
}

/// A copy of a fixture folder that a test may break.
pub fn copy_of(name: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixture(name)).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    copy
}

/// A copy of a fixture with its config changed.
pub fn changed(name: &str, change: impl FnOnce(&mut Value)) -> tempfile::TempDir {
    let copy = copy_of(name);
    let path = copy.path().join("config.json");
    let mut config = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut config);
    std::fs::write(path, config.to_string()).unwrap();
    copy
}

pub fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// The arguments of a command line without quotation marks.
pub fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

/// The arguments of a run of four decode cells, every one measured once.
pub fn cells() -> Vec<String> {
    let model = fixture("qwen3");
    let arguments =
        ["run", "--smoke", "--engine", "stock", "--dtype", "f32", "--device", "cpu", "--phase", "decode"];
    let axes = ["--batch", "1,2", "--context", "4,8", "--model"];
    arguments
        .iter()
        .chain(&axes)
        .map(|text| (*text).to_owned())
        .chain([model.to_str().unwrap().to_owned()])
        .collect()
}

/// That run with its result as JSON on stdout.
pub fn run() -> Command {
    let mut command = hbmark();
    command.args(cells()).args(["--format", "json"]);
    command
}

pub fn report(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", stderr(output)))
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Holds an output against bad input: exit code 2, nothing on stdout, and these words.
pub fn refused(output: &Output, parts: &[&str]) {
    let said = stderr(output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(output.stdout.is_empty());
    for part in parts {
        assert!(said.contains(part), "`{part}` is not in: {said}");
    }
}

/// Status and the reason's words of every cell, by its name.
pub fn statuses(report: &Value) -> Vec<(String, String, String)> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let cells = report["cells"].as_array().unwrap().iter();
    cells.map(|cell| (text(&cell["id"]), text(&cell["status"]), text(&cell["reason"]["message"]))).collect()
}

/// What does not depend on time: name, status, bytes and tokens of every cell.
pub fn essence(report: &Value) -> Vec<Value> {
    let cells = report["cells"].as_array().unwrap().iter();
    cells
        .map(|c| {
            serde_json::json!([
                c["id"],
                c["status"],
                c["bytes"],
                c["quality"],
                c["blocks"].as_array().unwrap().len()
            ])
        })
        .collect()
}

/// Waits for something to become true.
pub fn until<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(begin.elapsed() < SAFETY_NET, "this never happened: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Starts a run whose output is kept.
pub fn start(command: &mut Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

pub fn signal(pid: u32, name: &str) {
    let status = Command::new("kill").args([format!("-{name}"), pid.to_string()]).status().unwrap();
    assert!(status.success());
}

/// The children of a process.
pub fn children(pid: u32) -> Vec<u32> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    text.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

/// Whether a process still runs; one that nobody has waited for yet does not.
pub fn runs(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit(')').next().unwrap_or_default().trim_start().chars().next();
    state.is_some_and(|state| state != 'Z' && state != 'X')
}

/// Whole lines of a run's journal.
pub fn journal_lines(folder: &Path) -> usize {
    let bytes = std::fs::read(folder.join("journal.jsonl")).unwrap_or_default();
    bytes.split(|byte| *byte == b'\n').count() - 1
}

/// The names in a folder, in order.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

pub const RESULTS: [&str; 4] = ["report.html", "result.csv", "result.json", "result.md"];

/// A run whose worker hangs in the cell of batch 2 and context 8: the run, its worker, and the rest of what both say.
pub fn hanging(folder: &Path, arguments: &[&str]) -> (Child, u32, BufReader<ChildStderr>) {
    let mut command = hbmark();
    command.args(cells()).args(arguments).args(["--hang-after", "100000", "--out", folder.to_str().unwrap()]);
    command.env("HBMARK_PLANT_FAULT", "hang@decode/stock/f32/b2/c8");
    hung(&mut command)
}

/// Starts a program whose worker is to hang, and waits until it does: the program, its worker, and the rest of what both say.
pub fn hung(command: &mut Command) -> (Child, u32, BufReader<ChildStderr>) {
    let mut child = start(command);
    let mut said = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("HBMARK_PLANT_FAULT") {
        line.clear();
        assert!(said.read_line(&mut line).unwrap() > 0, "it ended before its worker hung");
    }
    let worker = children(child.id())[0];
    (child, worker, said)
}
