//! What `hbmark serve` does with its arguments: starts, goes on, prints and saves.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory, Parser};

use super::flags::{OutputArgs, ServingArgs, WorkerArgs};
use super::progress::LiveProgress;
use super::{Args, Asked, Mode};
use crate::cli::run::command_line;
use crate::cli::{Cli, Command, Outcome, give_up, lock_folder, prepare_folder, print_result, save, say};
use crate::engine;
use crate::serve::checkpoint::{ServeCheckpoint, ServePlan};
use crate::serve::subprocess::{self, Job};
use crate::serve::{Completion, Finished, ServeConfig, ServeError, ServeObserver, in_process};
use crate::weights::OpenModel;
use crate::worker::journal::{self, Header, Journal, ReopenedJournal};
use crate::worker::signals::Interrupts;
use crate::worker::spawn::WorkerCommand;
use hbmark_core::result::as_map;
use hbmark_core::result::serving::{ServeReport, Validity};

/// Settings of this program and not of what is measured: they may change when a benchmark goes on.
const FREE: [&str; 4] = ["resume", "format", "no_isolation", "hang_after"];

/// A benchmark that is about to start, or to go on.
struct Ready {
    isolated: bool,
    worker: WorkerArgs,
    output: OutputArgs,
    config: ServeConfig,
    model: OpenModel,
    job: Job,
    checkpoint: ServeCheckpoint,
}

/// Runs it.
pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    let ready = match (&args.mode, &args.point.resume) {
        (Some(Mode::Cold(cold)), _) => return cold.execute(),
        (None, Some(folder)) => resume(&args.point.load.serving, folder)?,
        _ => {
            let asked = args.asked()?;
            if asked.serving.clock.simulate {
                return simulate(&asked);
            }
            start(asked)?
        }
    };
    let Ready { isolated, worker, output, config, model, job, mut checkpoint } = ready;
    // Before any other thread is started.
    crate::engine::threads::limit(config.threads);
    let interrupts = Interrupts::listen().context("cannot listen for Ctrl-C")?;
    let mut live = LiveProgress::new();
    let finished = if isolated {
        // The worker opens it for itself.
        drop(model);
        let launch = WorkerCommand::this_program(Duration::from_secs(u64::from(worker.hang_after)))?;
        subprocess::serve(&launch, &job, &interrupts, &mut checkpoint, &mut live)
    } else {
        in_process::serve(&config, &model, &job.command, &interrupts, &mut checkpoint, &mut live)
    };
    live.finish();
    let journal = checkpoint.into_journal();
    let Finished { report, lost, ending } = match finished {
        Ok(finished) => finished,
        Err(error) => {
            let signal = if let ServeError::Interrupted { signal } = error { Some(signal) } else { None };
            return give_up(journal, signal, error.into());
        }
    };
    let printed = conclude(&report, &output)?;
    if ending == Completion::Whole {
        journal.map_or(Ok(()), Journal::finish)?;
    } else if let Some(folder) = &output.out {
        say(&format!("stopped early; resume with `hbmark serve --resume {}`", folder.display()));
    }
    printed?;
    Ok(match ending {
        Completion::Stopped(signal) => Outcome::Stopped(signal),
        Completion::Whole if lost == 0 => judge(&report),
        Completion::Whole | Completion::Early => Outcome::SomeCellsFailed,
    })
}

/// How a whole benchmark ended.
fn judge(report: &ServeReport) -> Outcome {
    let mut results = report.points.iter().filter_map(|point| point.result.as_ref());
    if results.any(|result| result.validity == Validity::Invalid) {
        return Outcome::SomeCellsFailed;
    }
    Outcome::Complete
}

/// A virtual clock: nothing to isolate, and soon done again.
fn simulate(Asked { serving, config, .. }: &Asked<'_>) -> anyhow::Result<Outcome> {
    let model = serving.open()?;
    // Kept until the result is saved.
    let _claim = config.out.as_deref().map(lock_folder).transpose()?;
    let mut live = LiveProgress::new();
    let report = crate::serve::serve(config, &model, &command_line(), &mut live);
    live.finish();
    let report = report?;
    conclude(&report, &serving.output)??;
    Ok(judge(&report))
}

/// What is asked for, in a process of `worker`.
fn ready(asked: Asked<'_>, worker: WorkerArgs, output: OutputArgs, job: Job) -> anyhow::Result<Ready> {
    let Asked { serving, workload, config } = asked;
    // What only this process can read no other one reads again.
    let own = |path: &Path| path.starts_with("/dev") || path.starts_with("/proc/self");
    let isolated = !worker.no_isolation && !serving.files().chain(workload.map(Path::new)).any(own);
    let config = ServeConfig { out: output.out.clone(), ..config };
    let model = serving.open()?;
    Ok(Ready { isolated, worker, output, config, model, job, checkpoint: ServeCheckpoint::default() })
}

/// A benchmark from its beginning.
fn start(asked: Asked<'_>) -> anyhow::Result<Ready> {
    let job = Job { arguments: std::env::args_os().skip(1).collect(), command: command_line() };
    let (worker, output) = (asked.serving.worker, asked.serving.output.clone());
    let mut ready = ready(asked, worker, output, job)?;
    if let Some(folder) = &ready.config.out {
        prepare_folder(folder, 0)?;
        let plan = plan(&ready.config, &ready.model, ready.job.arguments.clone());
        let header = Header::new(&ready.job.command, plan)?;
        ready.checkpoint = ServeCheckpoint::journaled(Journal::create(folder, &header)?, Vec::new());
    }
    Ok(ready)
}

/// A benchmark from where it ended.
fn resume(given: &ServingArgs, folder: &Path) -> anyhow::Result<Ready> {
    let ReopenedJournal { journal, header: Header { command, plan: was, .. }, entries, notice } =
        Journal::reopen::<ServePlan, _>(folder)?;
    if let Some(notice) = notice {
        say(&notice);
    }
    same_settings(&was.arguments, folder)?;
    let output = OutputArgs { out: Some(folder.to_owned()), ..given.output.clone() };
    let job = Job { arguments: was.arguments.clone(), command };
    let mut ready = ready(parse(&was.arguments)?.asked()?, given.worker, output, job)?;
    let is = plan(&ready.config, &ready.model, was.arguments);
    for (key, was) in was.config.iter().filter(|(key, _)| *key != "out") {
        let is = is.config.get(key).map_or_else(String::new, ToString::to_string);
        journal::same(folder, key, &was.to_string(), &is)?;
    }
    journal::same(folder, "the model", &was.model_hash, &is.model_hash)?;
    ready.checkpoint = ServeCheckpoint::journaled(journal, entries);
    say(&format!("resuming `{}` after {} measured points", ready.job.command, ready.checkpoint.points()));
    Ok(ready)
}

fn plan(config: &ServeConfig, model: &OpenModel, arguments: Vec<OsString>) -> ServePlan {
    let dtype = config.dtype.unwrap_or_else(|| engine::default_dtype(&config.engine, model, config.device));
    let model_hash = hbmark_core::model::model_hash(&model.architecture, &model.inventory(dtype));
    let config: BTreeMap<_, _> = as_map(config);
    ServePlan { arguments, config, model_hash }
}

/// Holds the settings that are given again on the command line against those of a benchmark.
fn same_settings(was: &[OsString], folder: &Path) -> anyhow::Result<()> {
    let program = std::iter::once(OsString::from("hbmark"));
    let cli = Cli::command();
    let was = cli.clone().try_get_matches_from(program.chain(was.iter().cloned()))?;
    let is = cli.clone().get_matches();
    let (Some(was), Some(is), Some(serve)) =
        (was.subcommand_matches("serve"), is.subcommand_matches("serve"), cli.find_subcommand("serve"))
    else {
        return Ok(());
    };
    let was = was.subcommand().map_or(was, |(_, mode)| mode);
    let text = |matches: &ArgMatches, id: &str| {
        let values = matches.try_get_raw(id).ok().flatten().into_iter().flatten();
        let values: Vec<_> = values.map(|value| value.to_string_lossy()).collect();
        if values.is_empty() { "none".to_owned() } else { values.join(" ") }
    };
    for id in serve.get_arguments().map(|flag| flag.get_id().as_str()).filter(|id| !FREE.contains(id)) {
        if is.value_source(id) == Some(ValueSource::CommandLine) {
            let what = format!("--{}", id.replace('_', "-"));
            journal::same(folder, &what, &text(was, id), &text(is, id))?;
        }
    }
    Ok(())
}

/// The arguments of a benchmark that this program was started with before.
fn parse(arguments: &[OsString]) -> anyhow::Result<Args> {
    let program = std::iter::once(OsString::from("hbmark"));
    match Cli::try_parse_from(program.chain(arguments.iter().cloned()))?.command {
        Command::Serve(args) => Ok(*args),
        _ => anyhow::bail!("{arguments:?} are the arguments of another subcommand than serve"),
    }
}

/// Saves a result where that was asked for, and prints it; the inner result is that of the printing.
pub(super) fn conclude(report: &ServeReport, output: &OutputArgs) -> anyhow::Result<anyhow::Result<()>> {
    let saved = output.out.as_ref().map(|folder| save(report, "serve", folder));
    crate::cli::conclude(print_result(report, output.format), saved)
}

/// Serves as a worker.
pub(in crate::cli) fn work() -> Result<(), crate::worker::child::WorkerExit> {
    crate::serve::child::work(|job, observer| {
        report_of(job, observer).map_err(|error| crate::cli::one_line(&error))
    })
}

/// The report of a job: what these arguments mean, done in this process.
fn report_of(job: &Job, observer: &mut dyn ServeObserver) -> anyhow::Result<ServeReport> {
    let args = parse(&job.arguments)?;
    let Asked { serving, config, .. } = args.asked()?;
    crate::engine::threads::limit(config.threads);
    let model = serving.open()?;
    Ok(crate::serve::serve(&config, &model, &job.command, observer)?)
}
