//! What `hbmark run` and `hbmark serve` share: the worker, the journal, and how a benchmark ends.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use clap::{ArgMatches, Args, CommandFactory};

use super::progress::Progress;
use super::{Cli, Outcome, say};
use crate::worker::job::{Handler, Job};
use crate::worker::journal::{Header, Journal, JournaledPlan, ReopenedJournal};
use crate::worker::journaled::EntryOf;
use crate::worker::signals::Interrupts;
use crate::worker::spawn::WorkerCommand;
use crate::worker::{InProcess, JournaledWorker, Supervisor, Worker};

/// The process that measures.
#[derive(Debug, Clone, Copy, Args)]
#[command(next_help_heading = None)]
pub struct WorkerArgs {
    /// Measure in this process, not in a worker: for profilers and debuggers. A crash then ends everything.
    #[arg(long, env = "HBMARK_NO_ISOLATION", value_parser = clap::builder::FalseyValueParser::new())]
    pub no_isolation: bool,
    /// Kill a worker that is silent for longer than this plus 100 times (serve: 10 times) its predicted step.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = clap::value_parser!(u32).range(1..))]
    pub hang_after: u32,
}

/// Settings of this program and not of what is measured: they may change when a benchmark is resumed.
pub const FREE: [&str; 4] = ["resume", "format", "no_isolation", "hang_after"];

/// A journal and what it held.
pub type Resumable<J> = Option<(Journal, Vec<EntryOf<J>>)>;

/// The result of a plan, and its journal.
pub type Executed<J, T> = (Result<T, <J as Job>::Error>, Option<Journal>);

/// Executes the plan of a job, on a worker in a process of its own where `isolation` holds its configuration. Leaves the journal.
pub fn execute<H: Handler + 'static, T>(
    isolation: Option<(WorkerArgs, <H::Job as Job>::Config)>,
    handler: H,
    journal: Resumable<H::Job>,
    plan: impl FnOnce(&mut dyn Worker<H::Job>, &mut Progress) -> Result<T, <H::Job as Job>::Error>,
) -> anyhow::Result<Executed<H::Job, T>> {
    let interrupts = Interrupts::listen().context("cannot listen for Ctrl-C")?;
    let mut worker: Box<dyn Worker<H::Job>> = match isolation {
        Some((args, config)) => {
            let launch = WorkerCommand::this_program(Duration::from_secs(args.hang_after.into()))?;
            Box::new(Supervisor::new(launch, config, interrupts))
        }
        None => Box::new(InProcess::interruptible(handler, interrupts)),
    };
    let mut progress = Progress::new();
    let finished = match journal {
        None => (plan(worker.as_mut(), &mut progress), None),
        Some((journal, entries)) => {
            let mut worker = JournaledWorker::new(worker, journal, entries);
            let finished =
                worker.check_machine(&mut progress).and_then(|()| plan(&mut worker, &mut progress));
            (finished, Some(worker.into_journal()))
        }
    };
    progress.finish();
    Ok(finished)
}

/// Reopens the journal of a benchmark that ended early, and prints what was dropped from it.
pub fn reopen<P: JournaledPlan, J: Job>(
    folder: &Path,
) -> anyhow::Result<(Journal, Header<P>, Vec<EntryOf<J>>)> {
    let ReopenedJournal { journal, header, entries, notice } = Journal::reopen(folder)?;
    if let Some(notice) = notice {
        say(&notice);
    }
    Ok((journal, header, entries))
}

/// The arguments of a subcommand of this process, as clap read them.
pub fn arguments_of(subcommand: &str) -> Option<ArgMatches> {
    Cli::command()
        .get_matches()
        .remove_subcommand()
        .filter(|(name, _)| name == subcommand)
        .map(|(_, args)| args)
}

/// Ends without a result: a journal without measurements is removed, and a signal is not an error of the input.
pub fn give_up(
    journal: Option<Journal>,
    signal: Option<i32>,
    error: anyhow::Error,
) -> anyhow::Result<Outcome> {
    if let Some(journal) = journal.filter(|journal| !journal.has_measurements()) {
        journal.finish()?;
    }
    let Some(signal) = signal else { return Err(error) };
    say(&error.to_string());
    Ok(Outcome::Stopped(signal))
}

/// The command line as typed.
pub fn command_line() -> String {
    let quote = |arg: String| if arg.contains(' ') { format!("'{arg}'") } else { arg };
    let program = std::iter::once("hbmark".to_owned());
    program.chain(std::env::args().skip(1)).map(quote).collect::<Vec<_>>().join(" ")
}
