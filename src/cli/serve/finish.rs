//! What `hbmark serve` does with its arguments: starts, resumes, prints and saves.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;
use std::rc::Rc;

use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory, Parser};

use super::flags::ServingArgs;
use super::vllm_names::SavedResultArgs;
use super::{Args, Asked, Mode};
use crate::cli::benchmark::{self, FREE, Resumable, WorkerArgs, arguments_of, command_line, give_up, reopen};
use crate::cli::progress::Progress;
use crate::cli::shared_args::OutputArgs;
use crate::cli::{Cli, Command, Outcome, lock_folder, prepare_folder, print_result, save, say, say_replaced};
use crate::engine;
use crate::engine::native::cpu::kernel_choice;
use crate::serve::serving_job::{ServeJob, ServePlan, ServeResponse};
use crate::serve::{Completion, Finished, LocalEngine, ServeConfig};
use crate::weights::OpenModel;
use crate::worker::InProcess;
use crate::worker::child::WorkerExit;
use crate::worker::journal::{self, Header, Journal};
use hbmark_core::result::as_map;
use hbmark_core::result::serving::{ServeReport, Validity};
use hbmark_report::analysis::words::counted;
use hbmark_report::analysis::{FailOn, serving_failures};

/// A benchmark that is about to start, or to be resumed.
struct Ready {
    isolation: Option<WorkerArgs>,
    output: OutputArgs,
    /// In vLLM's schema.
    as_vllm: Option<SavedResultArgs>,
    config: ServeConfig,
    fail_on: Vec<FailOn>,
    model: Option<Rc<OpenModel>>,
    arguments: Vec<OsString>,
    command: String,
    journal: Resumable<ServeJob>,
}

/// Runs it.
pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    let ready = match (&args.mode, &args.point.resume) {
        (Some(Mode::Cold(cold)), _) => return cold.execute(),
        (None, Some(folder)) => resume(&args.point.load.serving, folder)?,
        _ => {
            let asked = args.asked()?;
            if asked.serving.clock.simulate {
                anyhow::ensure!(
                    !asked.workload.is_some_and(|workload| workload.vllm.saved().is_asked()),
                    "--save-result writes what was measured, in vLLM's schema, which has no word for computed times; use --out"
                );
                return simulate(&asked);
            }
            start(asked)?
        }
    };
    let Ready { isolation, output, as_vllm, config, fail_on, model, arguments, command, journal } = ready;
    // Before any other thread is started.
    crate::engine::threads::limit(config.threads);
    let handler = LocalEngine::new(&config, model.clone());
    let isolation = isolation.map(|worker| (worker, arguments));
    let (finished, journal) = benchmark::execute(isolation, handler, journal, |worker, progress| {
        crate::serve::benchmark(worker, &config, model.as_deref(), &command, progress)
    })?;
    let Finished { report, lost, ending } = match finished {
        Ok(finished) => finished,
        Err(error) => return give_up(journal, error.signal(), error.into()),
    };
    let printed = conclude(&report, &output)?;
    write_as_vllm(as_vllm.as_ref(), &report, &config)?;
    if ending == Completion::Whole {
        journal.map_or(Ok(()), Journal::finish)?;
    } else if let Some(folder) = &output.out {
        say(&format!("stopped early; resume with `hbmark serve --resume {}`", folder.display()));
    }
    printed?;
    Ok(match ending {
        Completion::Stopped(signal) => Outcome::Stopped(signal),
        Completion::Whole if lost == 0 => judge(&report, &fail_on),
        Completion::Whole | Completion::Early => Outcome::SomeCellsFailed,
    })
}

/// Writes what was asked for in vLLM's schema, and says where.
fn write_as_vllm(
    asked: Option<&SavedResultArgs>,
    report: &ServeReport,
    config: &ServeConfig,
) -> anyhow::Result<()> {
    for path in asked.map_or_else(|| Ok(Vec::new()), |asked| asked.write(report, config))? {
        say(&format!("written in the schema of vllm bench serve: {}", path.display()));
    }
    Ok(())
}

/// How a whole benchmark ended.
fn judge(report: &ServeReport, fail_on: &[FailOn]) -> Outcome {
    let failures = serving_failures(report, fail_on);
    for failure in &failures {
        say(&format!("--fail-on: {failure}"));
    }
    // A script that asks for a rate must not take the lack of one for success.
    let found = report.search.as_ref().is_none_or(|search| search.max_rate.is_some());
    if !failures.is_empty() || !found {
        return Outcome::SomeCellsFailed;
    }
    let mut results = report.points.iter().filter_map(|point| point.result.as_ref());
    if results.any(|result| result.validity == Validity::Invalid) {
        return Outcome::SomeCellsFailed;
    }
    Outcome::Complete
}

/// A virtual clock: nothing to isolate, and quickly repeated.
fn simulate(Asked { serving, config, .. }: &Asked<'_>) -> anyhow::Result<Outcome> {
    let model = serving.open_and_warn()?;
    if let Some(model) = &model {
        model.storage(config.dtype)?;
    }
    // Kept until the result is saved.
    let _lock = config.out.as_deref().map(lock_folder).transpose()?;
    let mut worker = InProcess::new(LocalEngine::new(config, model.clone()));
    let mut progress = Progress::new();
    let finished =
        crate::serve::benchmark(&mut worker, config, model.as_deref(), &command_line(), &mut progress);
    progress.finish();
    let Finished { report, ending, .. } = finished?;
    conclude(&report, &serving.output)??;
    let judged = judge(&report, &serving.fail_on);
    Ok(if ending == Completion::Whole { judged } else { Outcome::SomeCellsFailed })
}

/// What is asked for, before its journal.
fn ready(
    Asked { serving, workload, config }: Asked<'_>,
    worker: WorkerArgs,
    output: OutputArgs,
    (arguments, command): (Vec<OsString>, String),
) -> anyhow::Result<Ready> {
    // Files that another process cannot read again.
    let own = |path: &Path| path.starts_with("/dev") || path.starts_with("/proc/self");
    let file = workload.and_then(|workload| workload.workload.as_deref()).map(Path::new);
    let dataset = workload.and_then(|workload| workload.vllm.dataset_path());
    let isolated = !worker.no_isolation && !serving.files().chain(file).chain(dataset).any(own);
    let config = ServeConfig { out: output.out.clone(), ..config };
    let as_vllm = workload.map(|workload| workload.vllm.saved().clone());
    as_vllm.as_ref().map_or(Ok(()), |asked| asked.prepare(&config))?;
    let model = serving.open_and_warn()?;
    Ok(Ready {
        fail_on: serving.fail_on.clone(),
        isolation: isolated.then_some(worker),
        output,
        as_vllm,
        config,
        model,
        arguments,
        command,
        journal: None,
    })
}

/// A benchmark from its beginning.
fn start(asked: Asked<'_>) -> anyhow::Result<Ready> {
    let (worker, output) = (asked.serving.worker, asked.serving.output.clone());
    let mut ready = ready(asked, worker, output, (std::env::args_os().skip(1).collect(), command_line()))?;
    if let Some(folder) = &ready.config.out {
        say_replaced(folder);
        prepare_folder(folder, 0)?;
        let plan = plan(&ready.config, ready.model.as_deref(), ready.arguments.clone());
        let header = Header::new(&ready.command, plan)?;
        ready.journal = Some((Journal::create(folder, &header)?, Vec::new()));
    }
    Ok(ready)
}

/// A benchmark that ended early.
fn resume(given: &ServingArgs, folder: &Path) -> anyhow::Result<Ready> {
    let (journal, Header { command, plan: was, .. }, entries) = reopen::<ServePlan, ServeJob>(folder)?;
    same_settings(&was.arguments, folder)?;
    let output = OutputArgs { out: Some(folder.to_owned()), ..given.output.clone() };
    let asked = parse(&was.arguments)?;
    let mut ready = ready(asked.asked()?, given.worker, output, (was.arguments.clone(), command))?;
    let is = plan(&ready.config, ready.model.as_deref(), was.arguments);
    for (key, was) in was.config.iter().filter(|(key, _)| *key != "out") {
        let is = is.config.get(key).map_or_else(String::new, ToString::to_string);
        journal::same(folder, key, &was.to_string(), &is)?;
    }
    journal::same(folder, "the model", &was.model, &is.model)?;
    let points =
        entries.iter().filter(|entry| matches!(entry.response, ServeResponse::Measured { .. })).count();
    say(&format!("resuming `{}` after {}", ready.command, counted(points, "measured point")));
    ready.journal = Some((journal, entries));
    Ok(ready)
}

fn plan(config: &ServeConfig, model: Option<&OpenModel>, arguments: Vec<OsString>) -> ServePlan {
    let identity = |model: &OpenModel| {
        let default = || engine::default_dtype(&config.engine, model, config.device);
        model.identity(config.dtype.unwrap_or_else(default))
    };
    let model = model.map(identity).unwrap_or_default();
    let mut config: BTreeMap<_, _> = as_map(config);
    config.insert(kernel_choice::FORCED.to_owned(), kernel_choice::forced_name().into());
    ServePlan { arguments, config, model }
}

/// Compares the settings that are given again on the command line with those of a benchmark.
fn same_settings(was: &[OsString], folder: &Path) -> anyhow::Result<()> {
    let program = std::iter::once(OsString::from("hbmark"));
    let cli = Cli::command();
    let was = cli.clone().try_get_matches_from(program.chain(was.iter().cloned()))?;
    let (Some(was), Some(is), Some(serve)) =
        (was.subcommand_matches("serve"), arguments_of("serve"), cli.find_subcommand("serve"))
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
            journal::same(folder, &what, &text(was, id), &text(&is, id))?;
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

/// Executes the requests of a supervisor.
pub(in crate::cli) fn work() -> Result<(), WorkerExit> {
    crate::worker::child::work(|arguments: &Vec<OsString>| {
        handler(arguments).map_err(|error| crate::cli::one_line(&error))
    })
}

/// The engine that these arguments mean, in this process.
fn handler(arguments: &[OsString]) -> anyhow::Result<LocalEngine> {
    let args = parse(arguments)?;
    let Asked { serving, config, .. } = args.asked()?;
    crate::engine::threads::limit(config.threads);
    Ok(LocalEngine::new(&config, serving.open()?))
}
