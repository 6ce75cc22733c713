//! Every command of the documentation is run, as far as a machine without a GPU and a network can: in a folder with the files that it names, a run
//! up to its plan, traffic on a virtual clock, a server that is scripted. What is only parsed stands in [`trial`] with the reason, and what is no
//! command of this program in [`OTHERS`]. Commands in the help are parsed.

use std::path::{Path, PathBuf};

use clap::{CommandFactory, Parser};

use hbmark::cli::Cli;
use hbmark_client::mock::{Answer, Mock, Script, Stream};
use hbmark_core::result::Report;
use hbmark_fleet::simulation::{Fault, Simulated, node_name, rack_name};
use hbmark_report::samples;

use crate::runs::hbmark;

/// Commands in blocks of `sh` in a page of Markdown, each with its line; lines that end in a backslash go on.
fn documented(page: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut language = None;
    let mut lines = page.lines().enumerate();
    while let Some((number, line)) = lines.next() {
        if let Some(name) = line.trim_start().strip_prefix("```") {
            language = ["sh", "bash", "console"].into_iter().find(|shell| *shell == name);
            continue;
        }
        // What a console shows behind a command is its output.
        let line = if language == Some("console") { line.strip_prefix("$ ").unwrap_or("") } else { line };
        let mut whole = line.trim().to_owned();
        while let Some(begun) = whole.strip_suffix('\\') {
            whole = format!("{begun} {}", lines.next().map_or("", |(_, next)| next.trim()));
        }
        if language.is_some() && !whole.is_empty() {
            found.push((number + 1, whole));
        }
    }
    found
}

/// Commands in the help of a command and of those below it.
fn in_help(command: &clap::Command) -> Vec<String> {
    let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    // Examples are indented by two; prose is not, and a table has more blanks behind the name.
    let example = |line: &str| line.strip_prefix("  hbmark ").is_some_and(|rest| !rest.starts_with(' '));
    let own = help.lines().filter(|line| example(line)).map(|line| line.trim().to_owned());
    own.chain(command.get_subcommands().flat_map(in_help)).collect()
}

/// The words of the first command of a line, up to what the shell does with it.
fn words(command: &str) -> Vec<String> {
    let words = shlex::split(command).expect("quotes are closed");
    let ends = |word: &String| ["|", ">", "&&", "||"].contains(&word.as_str());
    let mut words: Vec<String> = words.into_iter().take_while(|word| !ends(word)).collect();
    // `command; another`, and variables before it.
    if let Some(last) = words.iter().position(|word| word.ends_with(';')) {
        words.truncate(last + 1);
        words[last].pop();
    }
    let variables =
        words.iter().take_while(|word| word.split_once('=').is_some_and(|(name, _)| is_variable(name)));
    words.split_off(variables.count())
}

fn is_variable(name: &str) -> bool {
    name.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_')
}

/// Why the program would refuse a command, as far as its arguments tell.
fn problem(command: &str) -> Option<String> {
    let error = Cli::try_parse_from(words(command)).err()?;
    Some(error.to_string().lines().next().unwrap_or_default().to_owned())
}

/// How a documented command is run.
enum Trial {
    Whole,
    /// With arguments that leave the measuring out.
    With(&'static [&'static str]),
    /// Against a scripted server, with few requests.
    Server,
    /// Only parsed, and why.
    Parsed(&'static str),
}

fn trial(words: &[String]) -> Trial {
    use Trial::{Parsed, Server, Whole, With};
    let has = |flag: &str| words.iter().any(|word| word == flag || word.starts_with(&format!("{flag}=")));
    let second = words.get(2).map_or("", String::as_str);
    match words[1].as_str() {
        "run" if has("--resume") => Parsed("needs a run that was cut short: tests/it/resume.rs"),
        "run" => With(&["--dry-run"]),
        "serve" if has("--url") && second.starts_with("--") => Server,
        "serve" if has("--url") => Parsed("many points in real time: tests/it/live_server.rs has few"),
        "serve" if second == "cold" => Parsed("starts engines: tests/it/serve.rs"),
        "serve" if has("--structured") => Parsed("needs the logits of an engine: tests/it/serve.rs"),
        "serve" if has("--resume") => Parsed("needs a point that was cut short: tests/it/serve_resume.rs"),
        "serve" if has("--virtual") => Whole,
        "serve" if has("--model") => With(&["--virtual", "--gpu=h100-sxm"]),
        "serve" => With(&["--virtual", "--gpu=h100-sxm", "--model=Llama-3.1-8B"]),
        "doctor" if has("--url") => Server,
        "ladder" => Parsed("needs a cell measured on that GPU: tests/it/cli.rs"),
        "report" if has("--external") => Parsed("needs a cell measured on that GPU: tests/it/cli.rs"),
        "speculate" => {
            Parsed("needs measured verify steps: crates/hbmark-report/src/analysis/speculation/tests.rs")
        }
        "compare" if !second.starts_with("results/") => {
            Parsed("measures in pairs for minutes: tests/it/compare.rs")
        }
        "verify" | "ceiling" | "doctor" => Parsed("measures this machine or a GPU: tests/it/cli.rs"),
        _ => Whole,
    }
}

/// How commands of other programs begin, and what tries them.
const OTHERS: &[(&str, &str)] = &[
    ("cargo bench", "CI builds every bench"),
    ("cargo install", "CI packages and builds the same"),
    ("cargo run -p hbmark-fleet --example simulate", "CI builds the example; its results are read below"),
    ("cargo run --release --features cuda", "needs a GPU; CI runs the same on the simulated device"),
    ("cargo test", "this is it"),
    ("cd ", "a shell"),
    ("docker ", "needs a container engine"),
    ("eval \"$(scripts/", "CI runs both scripts"),
    ("jq ", "another program"),
    ("llama-bench ", "another program"),
    ("podman ", "needs a container engine"),
    ("scripts/gpu-day.sh", "tests/it/gpu_day.rs"),
    ("scripts/simulated-checks.sh", "CI runs it"),
    ("scripts/wheel.sh", "CI builds and tries both wheels"),
    ("sh /shared/fleet/", "needs Slurm: scripts/fleet-slurm.sh"),
    ("sinfo ", "needs Slurm: scripts/fleet-slurm.sh"),
    ("target/debug/hbmark run --smoke --device cuda", "scripts/simulated-checks.sh"),
];

/// A folder with the files that the pages speak of.
fn stage(root: &Path) {
    let fixture = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    let make = |name: &str| {
        let path = root.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        path
    };
    for (from, to) in [
        ("results/serve-sweep.json", "results/sweep/serve.json"),
        ("foreign/vllm-latency.json", "a.json"),
        ("foreign/sglang-one-batch.jsonl", "b.jsonl"),
        ("foreign/llama-bench.csv", "c.csv"),
        ("traces/azure-conv.csv", "AzureLLMInferenceTrace_conv.csv"),
        ("configs/qwen3-0.6b.json", "config-only/config.json"),
        ("models/llama-q8_0.gguf", "llama-q4km.gguf"),
        ("models/llama-tied/config.json", "my-llama/config.json"),
        ("models/llama-tied/model.safetensors", "my-llama/model.safetensors"),
    ] {
        std::fs::copy(fixture(from), make(to)).unwrap();
    }
    let foreign = std::fs::read_to_string(fixture("foreign/vllm-serve-0.25.json")).unwrap();
    std::fs::write(root.join("vllm.json"), foreign.replace("facebook/opt-125m", "meta-llama/Llama-3.1-8B"))
        .unwrap();
    let text = hbmark_core::result::saved::write(&samples::measured()).unwrap();
    let released = "results/h200-sxm";
    for name in [
        "results/qwen".to_owned(),
        "results/old".to_owned(),
        "results/new".to_owned(),
        format!("{released}/2026-11-19-9f1f2e65/Llama-3.1-8B-bf16"),
        format!("{released}/2026-11-26-50c7e842/Llama-3.1-8B-bf16"),
    ] {
        std::fs::write(make(&format!("{name}/result.json")), &text).unwrap();
    }
    for (side, day) in [("baseline", 1), ("new", 2)] {
        for process in 1..=5 {
            let started_at = Some(format!("2026-11-0{day}T00:0{process}:00Z"));
            let report = Report { started_at, ..samples::measured() };
            let text = hbmark_core::result::saved::write(&report).unwrap();
            std::fs::write(make(&format!("{side}/{process}/result.json")), text).unwrap();
        }
    }
    let predicted =
        hbmark().args(["predict", "--model=Llama-3.1-8B", "--gpu=h200", "--format=json"]).output().unwrap();
    std::fs::write(root.join("prediction.json"), predicted.stdout).unwrap();
    let nodes: Vec<String> = (0..8).map(|node| format!("{} {}", node_name(node), rack_name(node))).collect();
    std::fs::write(root.join("nodes.txt"), nodes.join("\n")).unwrap();
    std::fs::create_dir_all(root.join("var/lib/node_exporter/textfile")).unwrap();
    for day in ["sunday", "monday", "tuesday"] {
        let plan =
            format!("hbmark fleet plan --launcher ssh --nodes nodes.txt --plan quick-ceiling --out {day}");
        run_in(root, &words(&plan)).unwrap();
        if day != "tuesday" {
            run_in(root, &words(&format!("hbmark fleet report {day} --out {day}/report"))).unwrap();
        }
    }
}

/// Runs the program in the folder; what it says where it calls its input bad.
fn run_in(root: &Path, words: &[String]) -> Result<(), String> {
    // Folders of everyone are folders of the test.
    let local = |word: &String| {
        let absolute = ["/shared/", "/var/"].iter().any(|prefix| word.starts_with(prefix));
        if absolute { word[1..].to_owned() } else { word.clone() }
    };
    let words: Vec<String> = words.iter().map(local).collect();
    let output = hbmark().args(&words[1..]).current_dir(root).env("HOME", root).output().unwrap();
    // 1: findings, or a gate that did not hold; `--nagios` has exit codes of its own.
    let good = if words.iter().any(|word| word == "--nagios") { 0..4 } else { 0..2 };
    if !output.status.code().is_some_and(|code| good.contains(&code)) {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{:?}: {}", output.status.code(), said.trim()));
    }
    // The nodes of a plan have run when its results are read.
    if words[1] == "fleet" && words[2] == "plan" {
        let at = words.iter().position(|word| word == "--out").expect("a plan has a folder");
        let folder = root.join(&words[at + 1]);
        let manifest = std::fs::read_to_string(folder.join("fleet.json")).unwrap();
        let manifest: serde_json::Value = serde_json::from_str(&manifest).unwrap();
        let fleet = Simulated::new(64, 1, Some(Fault::SlowGpu(0.08)));
        fleet.write(&folder, usize::MAX, manifest["digest"].as_str().unwrap()).unwrap();
    }
    Ok(())
}

/// The same command against this server, with few requests.
fn against(words: &[String], url: &str) -> Vec<String> {
    let mut words = words.to_vec();
    for (flag, value) in [("--url", url), ("--requests", "60"), ("--warmup-requests", "0"), ("--rate", "50")]
    {
        match words.iter().position(|word| word == flag) {
            Some(at) => value.clone_into(&mut words[at + 1]),
            None if words[1] == "serve" => words.extend([flag.to_owned(), value.to_owned()]),
            None => {}
        }
    }
    words
}

fn pages() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let docs = std::fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let mut pages: Vec<PathBuf> = docs.filter(|path| path.extension().is_some_and(|e| e == "md")).collect();
    pages.extend(["README.md", "CONTRIBUTING.md", "results/README.md"].map(|name| root.join(name)));
    pages.sort();
    pages
}

#[test]
fn every_documented_command_runs() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    stage(root);
    let stream = Stream {
        first_token: std::time::Duration::from_millis(5),
        token_gap: std::time::Duration::from_millis(1),
        ..Stream::default()
    };
    let server = Mock::start(Script::new(Answer::Stream(stream))).unwrap();
    let (mut run, mut parsed, mut wrong) = (0, 0, Vec::new());
    for page in pages() {
        for (line, command) in documented(&std::fs::read_to_string(&page).unwrap()) {
            let words = words(&command);
            let tried = if words.first().is_some_and(|word| word == "hbmark") {
                problem(&command).map_or(Ok(()), Err).and_then(|()| match trial(&words) {
                    Trial::Parsed(why) => {
                        println!("parsed: {command}\n    {why}");
                        parsed += 1;
                        Ok(())
                    }
                    how => {
                        run += 1;
                        let words = match how {
                            Trial::With(more) => {
                                [words, more.iter().map(|word| (*word).to_owned()).collect()].concat()
                            }
                            Trial::Server => against(&words, &server.url()),
                            _ => words,
                        };
                        run_in(root, &words)
                    }
                })
            } else if OTHERS
                .iter()
                .any(|(begin, _)| words.join(" ").starts_with(begin) || command.starts_with(begin))
            {
                Ok(())
            } else {
                Err("no command of this program, and not in OTHERS".to_owned())
            };
            if let Err(why) = tried {
                wrong.push(format!("{}:{line}: {command}\n    {why}", page.display()));
            }
        }
    }
    println!("{run} commands were run, {parsed} parsed");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(run > 60, "{run} commands were run");
}

#[test]
fn every_command_in_the_help_is_one_that_the_program_takes() {
    let commands = in_help(&Cli::command());
    let wrong: Vec<String> =
        commands.iter().filter_map(|command| Some(format!("{command}\n    {}", problem(command)?))).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(commands.len() > 40, "{} commands were found", commands.len());
}

#[test]
fn a_flag_that_is_gone_is_found() {
    let page = "```sh\nhbmark run --batch 1 \\\n    --no-such-flag   # a comment\n```\n\n`hbmark nothing`\n";
    let found = documented(page);
    assert_eq!(found.len(), 1);
    assert!(problem(&found[0].1).unwrap().contains("--no-such-flag"));
    assert_eq!(problem("A_B=1 hbmark run --batch 1 | tee log # hbmark nothing"), None);
    assert_eq!(words("hbmark run; echo $?"), ["hbmark", "run"]);
    let console = "```console\n$ hbmark devices\nhbmark nothing\n```\n";
    assert_eq!(documented(console), [(2, "hbmark devices".to_owned())]);
    let folder = tempfile::tempdir().unwrap();
    let error = run_in(folder.path(), &words("hbmark report results/none.json")).unwrap_err();
    assert!(error.contains("none.json"), "{error}");
}
