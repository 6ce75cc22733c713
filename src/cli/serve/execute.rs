//! What `hbmark serve` does with its arguments: starts, goes on, prints and saves.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory, Parser};

use super::live::LiveProgress;
use super::{Args, one_engine};
use crate::cli::axes::parse_dtypes;
use crate::cli::run::command_line;
use crate::cli::{Cli, Command, Outcome, give_up, lock_folder, prepare_folder, print_result, save, say};
use crate::engine;
use crate::serve::cold::{self, ColdConfig};
use crate::serve::isolated::{self, Job};
use crate::serve::memory::{ServeCheckpoint, ServePlan};
use crate::serve::{Completion, Finished, ServeConfig, ServeError, ServeObserver, alone};
use crate::weights::{self, OpenModel};
use crate::worker::interrupt::Interrupts;
use crate::worker::journal::{self, Header, Journal, ReopenedJournal};
use crate::worker::workers::WorkerCommand;
use hbmark_core::result::as_map;
use hbmark_core::result::serving::{ServeReport, Validity};

/// Settings of this program and not of what is measured: they may change when a benchmark goes on.
const FREE: [&str; 4] = ["resume", "format", "no_isolation", "hang_after"];

/// A benchmark that is about to start, or to go on.
struct Ready {
    args: Args,
    config: ServeConfig,
    model: OpenModel,
    job: Job,
    checkpoint: ServeCheckpoint,
}

pub(super) fn execute(args: Args) -> anyhow::Result<Outcome> {
    if let Some(launches) = args.cold {
        return cold(&args, launches);
    }
    if args.simulate {
        return simulate(&args);
    }
    let ready = match args.resume.clone() {
        Some(folder) => resume(&args, &folder)?,
        None => start(args)?,
    };
    let Ready { args, config, model, job, mut checkpoint } = ready;
    // Before any other thread is started.
    crate::engine::threads::limit(config.threads);
    let interrupts = Interrupts::listen().context("cannot listen for Ctrl-C")?;
    let mut live = LiveProgress::new();
    let finished = if args.isolated() {
        // The worker opens it for itself.
        drop(model);
        let launch = WorkerCommand::this_program(Duration::from_secs(u64::from(args.hang_after)))?;
        isolated::serve(&launch, &job, &interrupts, &mut checkpoint, &mut live)
    } else {
        alone::serve(&config, &model, &job.command, &interrupts, &mut checkpoint, &mut live)
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
    let printed = conclude(&report, &args)?;
    if ending == Completion::Whole {
        journal.map_or(Ok(()), Journal::finish)?;
    } else if let Some(folder) = &args.out {
        say(&format!("it ended early; go on with `hbmark serve --resume {}`", folder.display()));
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
fn simulate(args: &Args) -> anyhow::Result<Outcome> {
    let config = args.config()?;
    let model = open(args)?;
    // Kept until the result is saved.
    let _claim = config.out.as_deref().map(lock_folder).transpose()?;
    let mut live = LiveProgress::new();
    let report = crate::serve::serve(&config, &model, &command_line(), &mut live);
    live.finish();
    let report = report?;
    conclude(&report, args)??;
    Ok(judge(&report))
}

fn open(args: &Args) -> anyhow::Result<OpenModel> {
    if args.simulate {
        return Ok(weights::open_shape(&args.model.model, args.model.revision.as_deref())?);
    }
    Ok(weights::open(&args.model.model, args.model.revision.as_deref(), args.model.seed)?)
}

/// A benchmark from its beginning.
fn start(args: Args) -> anyhow::Result<Ready> {
    let (config, model) = (args.config()?, open(&args)?);
    let job = Job { arguments: std::env::args_os().skip(1).collect(), command: command_line() };
    let checkpoint = match &config.out {
        Some(folder) => {
            prepare_folder(folder, 0)?;
            let plan = plan(&config, &model, job.arguments.clone());
            let header = Header::new(&job.command, plan)?;
            ServeCheckpoint::journaled(Journal::create(folder, &header)?, Vec::new())
        }
        None => ServeCheckpoint::default(),
    };
    Ok(Ready { args, config, model, job, checkpoint })
}

/// A benchmark from where it ended.
fn resume(given: &Args, folder: &Path) -> anyhow::Result<Ready> {
    let ReopenedJournal { journal, header: Header { command, plan: was, .. }, entries, notice } =
        Journal::reopen::<ServePlan, _>(folder)?;
    if let Some(notice) = notice {
        say(&notice);
    }
    same_settings(&was.arguments, folder)?;
    let args = Args {
        format: given.format,
        no_isolation: given.no_isolation,
        hang_after: given.hang_after,
        out: Some(folder.to_owned()),
        ..parse(&was.arguments)?
    };
    let (config, model) = (args.config()?, open(&args)?);
    let is = plan(&config, &model, was.arguments.clone());
    for (key, was) in was.config.iter().filter(|(key, _)| *key != "out") {
        let is = is.config.get(key).map_or_else(String::new, ToString::to_string);
        journal::same(folder, key, &was.to_string(), &is)?;
    }
    journal::same(folder, "the model", &was.model_hash, &is.model_hash)?;
    let checkpoint = ServeCheckpoint::journaled(journal, entries);
    say(&format!("going on after {} points of `{command}`", checkpoint.points()));
    Ok(Ready { args, config, model, job: Job { arguments: was.arguments, command }, checkpoint })
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
    let was = Cli::command().try_get_matches_from(program.chain(was.iter().cloned()))?;
    let is = Cli::command().get_matches();
    let (Some(was), Some(is)) = (was.subcommand_matches("serve"), is.subcommand_matches("serve")) else {
        return Ok(());
    };
    let text = |matches: &ArgMatches, id: &str| {
        let values = matches.try_get_raw(id).ok().flatten().into_iter().flatten();
        let values: Vec<_> = values.map(|value| value.to_string_lossy()).collect();
        if values.is_empty() { "none".to_owned() } else { values.join(" ") }
    };
    for id in is.ids().map(clap::Id::as_str).filter(|id| !FREE.contains(id)) {
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

/// `--cold`: this process launches others of itself, or is one of them.
fn cold(args: &Args, launches: u32) -> anyhow::Result<Outcome> {
    one_engine(&args.engine)?;
    anyhow::ensure!(args.cold_prompt_tokens > 0, "--cold-prompt-tokens 0: at least 1 is needed");
    let config = ColdConfig {
        engine: args.engine.clone(),
        device: args.device.choice()?,
        dtype: args.dtype.as_deref().map(|d| parse_dtypes("dtype", d)).transpose()?.map(|d| d[0]),
        threads: args.device.threads.map(|t| t as usize),
        prompt_tokens: args.cold_prompt_tokens as usize,
        launches: launches as usize,
        seed: args.model.seed,
        note: args.note.clone(),
        hypothesis: args.hypothesis.clone(),
    };
    crate::engine::threads::limit(config.threads);
    let open = || -> anyhow::Result<crate::weights::OpenModel> {
        Ok(crate::weights::open(&args.model.model, args.model.revision.as_deref(), args.model.seed)?)
    };
    if args.cold_child {
        cold::child(&config, open, &mut std::io::stdout())?;
        return Ok(Outcome::Complete);
    }
    // Kept until the result is saved.
    let _claim = args.out.as_deref().map(lock_folder).transpose()?;
    let program = std::env::current_exe().context("cannot find this program, to launch it again")?;
    let mut arguments: Vec<std::ffi::OsString> = std::env::args_os().skip(1).collect();
    arguments.push("--cold-child".into());
    let mut live = LiveProgress::new();
    let report = cold::measure(&config, &open()?, &command_line(), (&program, &arguments), &mut live);
    live.finish();
    conclude(&report?, args)??;
    Ok(Outcome::Complete)
}

/// Saves a result where that was asked for, and prints it; the inner result is that of the printing.
fn conclude(report: &ServeReport, args: &Args) -> anyhow::Result<anyhow::Result<()>> {
    let saved = args.out.as_ref().map(|folder| save(report, "serve", folder));
    crate::cli::conclude(print_result(report, args.format), saved)
}

/// Serves as a worker.
pub(in crate::cli) fn work() -> Result<(), crate::worker::child::WorkerExit> {
    crate::serve::worker::work(|job, observer| {
        report_of(job, observer).map_err(|error| crate::cli::one_line(&error))
    })
}

/// The report of a job: what these arguments mean, done in this process.
fn report_of(job: &Job, observer: &mut dyn ServeObserver) -> anyhow::Result<ServeReport> {
    let args = parse(&job.arguments)?;
    let config = args.config()?;
    crate::engine::threads::limit(config.threads);
    let model = crate::weights::open(&args.model.model, args.model.revision.as_deref(), args.model.seed)?;
    Ok(crate::serve::serve(&config, &model, &job.command, observer)?)
}
