//! The command line: clap types, one file per subcommand.
//!
//! Enters: arguments. Leaves: calls into the library and printed results. Nothing is computed here. Data goes to stdout,
//! progress and warnings to stderr. Exit codes: 0 complete, 1 some cells failed or are invalid, 2 bad input, 130 stopped by Ctrl-C.

mod benchmark;
mod capacity;
mod ceiling;
mod checklist;
mod compare;
mod completions;
mod doctor;
mod explain;
mod fleet;
mod glossary;
mod import;
mod ladder;
mod list;
mod logits;
mod man;
mod predict;
mod progress;
mod record;
mod report;
mod run;
mod selftest;
mod serve;
pub(crate) mod shared_args;
mod speculate;
mod verify;

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

use clap::error::{ContextKind, ContextValue};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum as _};

use crate::serve::serving_job::ServeJob;
use crate::weights::OpenModel;
use crate::worker::job::Job;
use crate::worker::journal::FolderLock;
use hbmark_core::ledger::ExpertRouting;
use hbmark_core::units::Bytes;
use hbmark_report::analysis::import::UserOverrides;
use hbmark_report::analysis::opened::result_in;
use hbmark_report::analysis::{FailOn, Opened, failures};
use hbmark_report::output::{Format, Kind, Screen, render};

/// Times LLM prefill and decode steps in-process and holds them against the memory roofline.
#[derive(Debug, Parser)]
#[command(
    name = "hbmark",
    version,
    arg_required_else_help = true,
    after_help = "Example:\n  hbmark run --model SmolLM2-135M --batch 1,4 --context 128,512\n\n`hbmark glossary` defines the metrics, and docs/causes.md the causes."
)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Time prefill and decode over batch × context, beside the prediction.
    Run(Box<run::Args>),
    /// Serve traffic with objectives, in process or on a live server (--url); or predict it on a virtual clock.
    Serve(Box<serve::Args>),
    /// Is B faster than A? Two configurations or servers in paired rounds, folders of saved processes, or two saved results side by side.
    Compare(compare::Args),
    /// How many instances a rate needs, what they cost and what breaks first, from a sweep of `serve`: the arithmetic line by line.
    Capacity(capacity::Args),
    /// What speculative decoding may gain: verify steps of a saved result and a draft model's time, over acceptance.
    Speculate(speculate::Args),
    /// A short decision record of a saved result: what was asked, accepted and rejected, and how to reproduce it.
    Record(record::Args),
    /// Is every GPU of a cluster as fast as the next, and which is sick: plans for Slurm, Kubernetes or ssh, and the report.
    Fleet(fleet::Args),
    /// Compute the roofline alone: any model on any GPU of the table, no device needed.
    Predict(predict::Args),
    /// Measure this device's ceilings: bandwidth, GEMM peak, launch latency.
    Ceiling(ceiling::Args),
    /// Print last-position logits, to check an engine against other implementations.
    Logits(logits::Args),
    /// Check outputs, timer and ceilings on this machine: PASS or FAIL, line by line.
    Verify(verify::Args),
    /// Plant faults on a scripted device and check that each is named, and known answers beside them: no device needed.
    Selftest(selftest::Args),
    /// Recompute and print a saved result in any format.
    Report(report::Args),
    /// Say in plain words where the time of a saved result went, and what disturbed it.
    Explain(explain::Args),
    /// Check whether a result, of hbmark or of another program, is VALID or INVALID.
    Checklist(checklist::Args),
    /// Read results of vLLM, SGLang, llama.cpp, AIPerf, GuideLLM, inference-perf, optimum-benchmark or TensorRT-LLM onto the same
    /// roofline.
    Import(import::Args),
    /// Break down another program's decode time beside a measured cell: memory, kernels, launches, scheduler, server.
    Ladder(ladder::Args),
    /// List the models that have a name.
    Models(list::ModelsArgs),
    /// List the GPUs of the datasheet table.
    Devices(list::DevicesArgs),
    /// Say what is found, what is missing, and what would distort a measurement here.
    Doctor(doctor::Args),
    /// Define every word of a report.
    Glossary(glossary::Args),
    /// Print a completion script for a shell.
    Completions(completions::Args),
    /// Write manual pages, one for each command.
    Man(man::Args),
}

/// How a command that could run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Complete,
    SomeCellsFailed,
    /// As a Nagios plugin ends: 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN.
    Nagios(u8),
    /// A signal stopped it; what it had by then is printed and saved.
    Stopped(i32),
}

impl From<Outcome> for std::process::ExitCode {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Complete => Self::SUCCESS,
            Outcome::SomeCellsFailed => Self::from(1),
            Outcome::Nagios(code) => Self::from(code),
            // As a shell counts it: 130 after Ctrl-C.
            Outcome::Stopped(signal) => Self::from(u8::try_from(128 + signal).unwrap_or(u8::MAX)),
        }
    }
}

/// Executes the requests of a supervisor, as a program that was started with [`crate::worker::child::WORKER_ARGUMENT`].
pub fn work() -> std::process::ExitCode {
    let serves = std::env::args_os().nth(2).is_some_and(|kind| kind == ServeJob::KIND);
    match if serves { serve::work() } else { crate::run::in_process::work() } {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            say_error(&error.into());
            std::process::ExitCode::from(2)
        }
    }
}

/// Runs the chosen subcommand.
///
/// # Errors
/// Bad input of any kind; the message says what to do.
pub fn dispatch(cli: Cli) -> anyhow::Result<Outcome> {
    match cli.command {
        Command::Run(args) => run::execute(&args),
        Command::Serve(args) => serve::execute(&args),
        Command::Compare(args) => compare::execute(&args),
        Command::Capacity(args) => capacity::execute(&args),
        Command::Speculate(args) => speculate::execute(&args),
        Command::Record(args) => record::execute(&args),
        Command::Fleet(args) => fleet::execute(&args),
        Command::Predict(args) => predict::execute(&args),
        Command::Ceiling(args) => ceiling::execute(&args),
        Command::Logits(args) => logits::execute(&args),
        Command::Verify(args) => verify::execute(&args),
        Command::Selftest(args) => selftest::execute(&args),
        Command::Report(args) => report::execute(&args),
        Command::Explain(args) => explain::execute(&args),
        Command::Checklist(args) => checklist::execute(&args),
        Command::Import(args) => import::execute(&args),
        Command::Ladder(args) => ladder::execute(&args),
        Command::Models(args) => list::models(&args),
        Command::Devices(args) => list::devices(&args),
        Command::Doctor(args) => doctor::execute(&args),
        Command::Glossary(args) => glossary::execute(&args),
        Command::Completions(args) => completions::execute(&args),
        Command::Man(args) => man::execute(&args),
    }
}

/// An error and its causes on one line, without characters that do something to a terminal; of a long one its beginning and its end.
pub fn one_line(error: &anyhow::Error) -> String {
    hbmark_core::input::one_line(&**error)
}

/// Prints a line to stderr as plain text: paths and commands are untrusted. A closed or full stderr is ignored.
pub fn say(line: &str) {
    let mut text = hbmark_core::input::plain(line);
    text.push('\n');
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// Says where a model's bytes come from, where that is not what its files hold.
fn say_doubt(model: &OpenModel) {
    if let Some(doubt) = model.doubt() {
        say(&format!("warning: {doubt}"));
    }
}

/// Refuses --expert-routing of a model that routes nothing.
fn check_routing(asked: Option<ExpertRouting>, model: &OpenModel) -> anyhow::Result<()> {
    anyhow::ensure!(
        asked.is_none() || model.architecture.experts.is_some(),
        "--expert-routing: {} has no experts; leave the flag out",
        model.name
    );
    Ok(())
}

/// Prints an error to stderr.
pub fn say_error(error: &anyhow::Error) {
    say(&format!("error: {}", one_line(error)));
}

/// The arguments of this process; an error is printed as plain text, because it quotes them.
///
/// # Errors
/// The exit code, where there is nothing to do but to end.
pub fn parse() -> Result<Cli, std::process::ExitCode> {
    let mut given = std::env::args_os().skip(1);
    let asked = given.next().unwrap_or_default();
    if asked == "run"
        && let Some((flag, tip)) =
            given.find_map(|flag| Some((flag.to_str()?.to_owned(), run::in_place_of(flag.to_str()?)?)))
    {
        say(&format!("error: `run` has no {flag} of llama-bench: {tip}"));
        return Err(std::process::ExitCode::from(2));
    }
    let mut command = with_negative_numbers(Cli::command());
    let parsed = command.try_get_matches_from_mut(std::env::args_os());
    let parsed = parsed.and_then(|found| Cli::from_arg_matches(&found).map_err(|e| e.format(&mut command)));
    parsed.map_err(|mut error| {
        if asked == "serve"
            && let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg)
            && let Some(tip) = serve::in_place_of(flag)
        {
            for guess in [ContextKind::SuggestedArg, ContextKind::Usage] {
                error.remove(guess);
            }
            error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
        }
        if !error.use_stderr() {
            // Help and version, which quote no argument.
            error.exit();
        }
        let text = error.render().to_string();
        let lines: Vec<String> = text.lines().map(hbmark_core::input::plain).collect();
        let _ = std::io::stderr().write_all((lines.join("\n") + "\n").as_bytes());
        std::process::ExitCode::from(2)
    })
}

/// A command whose flags take a negative number as their value, so that it is refused with their limits.
fn with_negative_numbers(command: clap::Command) -> clap::Command {
    command.allow_negative_numbers(true).mut_subcommands(with_negative_numbers)
}

/// Prints data to stdout; a closed pipe ends the program quietly.
fn print(text: &str) -> anyhow::Result<()> {
    use anyhow::Context;
    let mut out = std::io::stdout().lock();
    let written = out
        .write_all(text.as_bytes())
        .and_then(|()| if text.ends_with('\n') { Ok(()) } else { out.write_all(b"\n") });
    match written.and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other.context("cannot write to stdout"),
    }
}

/// Reports where a result was saved, if it was. It is saved before errors of printing count: stdout may be closed.
///
/// The inner result is that of the printing. What is saved is complete without it, and what cannot be saved is printed all the same.
fn conclude(
    printed: anyhow::Result<()>,
    saved: Option<anyhow::Result<PathBuf>>,
) -> anyhow::Result<anyhow::Result<()>> {
    let Some(path) = saved.transpose()? else { return Ok(printed) };
    say(&format!("saved {}", path.display()));
    Ok(printed.map_err(|error| error.context(format!("saved {}, but not printed", path.display()))))
}

/// Whether stdout may carry colour: a terminal, and `NO_COLOR` unset.
fn stdout_color() -> bool {
    std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
}

/// Prints a serialisable value as JSON.
fn print_json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    print(&serde_json::to_string_pretty(value)?)
}

/// Room for a result with hardly anything in it, and the program's own files beside it.
const MIN_FREE_BYTES: u64 = 8 << 20;
/// What a cell takes at the most, in the journal and in every format of a result.
const BYTES_PER_CELL: u64 = 256 << 10;

/// Creates an output folder and checks that it can be written and has room, before anything is measured.
fn prepare_folder(folder: &Path, cells: usize) -> anyhow::Result<()> {
    use anyhow::Context;
    std::fs::create_dir_all(folder)
        .with_context(|| format!("cannot create the output folder {}", folder.display()))?;
    // Without a name: a process that is killed here leaves nothing.
    tempfile::tempfile_in(folder)
        .with_context(|| format!("cannot write into the output folder {}", folder.display()))?;
    let of_cells = (cells as u64).saturating_mul(BYTES_PER_CELL);
    Ok(crate::machine::atomic_file::check_free_space(folder, Bytes(MIN_FREE_BYTES.saturating_add(of_cells)))?)
}

/// Says that a folder has a finished result, which a new one replaces.
fn say_replaced(folder: &Path) {
    if result_in(folder).is_some() {
        say(&format!("the result in {} will be replaced", folder.display()));
    }
}

/// As [`prepare_folder`], and locks it for as long as the lock is kept.
fn lock_folder(folder: &Path) -> anyhow::Result<FolderLock> {
    prepare_folder(folder, 0)?;
    Ok(FolderLock::take(folder)?)
}

/// Says which conditions of `--fail-on` hold of a result; whether there are any.
///
/// # Errors
/// When a condition is of another kind of result, and so would never hold.
fn tell_failures(opened: &Opened, conditions: &[FailOn], given: &UserOverrides<'_>) -> anyhow::Result<bool> {
    for condition in conditions {
        anyhow::ensure!(
            condition.applies_to(opened),
            "--fail-on {}: {} has nothing of the kind",
            name_of(*condition),
            opened.kind()
        );
    }
    let failures = failures(opened, conditions, given);
    for failure in &failures {
        say(&format!("--fail-on: {failure}"));
    }
    Ok(!failures.is_empty())
}

/// A condition as it is typed.
fn name_of(condition: FailOn) -> String {
    condition.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// Prints a result on stdout.
fn print_result<K: Kind + ?Sized>(result: &K, format: Format) -> anyhow::Result<()> {
    let terminal = Some(console::Term::stdout()).filter(console::Term::is_term);
    let width = terminal.and_then(|terminal| terminal.size_checked()).map(|(_, columns)| columns.into());
    print(&render(result, format, Screen { color: stdout_color(), width })?)
}

/// Writes a result into a folder in every format but the terminal's, named after what it is about, and returns the path of the first.
///
/// # Errors
/// When the folder cannot be written.
pub fn save<K: Kind>(result: &K, stem: &str, folder: &Path) -> anyhow::Result<PathBuf> {
    std::fs::create_dir_all(folder)?;
    for format in Format::SAVED {
        let text = render(result, format, false)?;
        crate::machine::atomic_file::write_atomic(&folder.join(format.file_name(stem)), &text)?;
    }
    Ok(folder.join(Format::Json.file_name(stem)))
}
