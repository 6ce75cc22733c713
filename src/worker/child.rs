//! The worker's side of its pipes: who started it, what its work is about, and its end with its supervisor.

use std::io::BufReader;

use serde::de::DeserializeOwned;

use super::messages::{self, Program, SupervisorMessage, WorkerMessage};

/// The hidden subcommand that starts a worker.
pub const WORKER_ARGUMENT: &str = "__worker";

/// Tells a program that another of its kind launched it, by that one's process number.
pub const LAUNCHED_BY: &str = "HBMARK_LAUNCHED_BY";

/// Lets a program that another one launched end with it. `false` when that one is gone already.
#[must_use]
pub fn exit_with_launcher() -> bool {
    let launcher = std::env::var(LAUNCHED_BY).ok().and_then(|number| number.parse().ok());
    launcher.is_none_or(exit_with_parent)
}

/// Why a worker ends otherwise than by being told to.
#[derive(Debug, thiserror::Error)]
pub enum WorkerExit {
    #[error(
        "`{WORKER_ARGUMENT}` is how hbmark starts the process that owns the device; use `hbmark run` or `hbmark serve`"
    )]
    NotAWorker,
    #[error("the pipes to the supervisor broke: {0}")]
    Pipe(#[from] std::io::Error),
}

/// Whether this process was started as a worker.
#[must_use]
pub fn is_worker_process() -> bool {
    std::env::args_os().nth(1).is_some_and(|argument| argument == WORKER_ARGUMENT)
}

/// The ends of a worker that knows its supervisor, and what its work is about.
pub(crate) struct Handshake<C> {
    pub input: BufReader<std::io::Stdin>,
    pub out: std::fs::File,
    pub config: Box<C>,
    /// How many workers there were before.
    pub workers: usize,
}

/// Hears what the work is about; `None` where there is nobody to work for: the supervisor is gone or is another program.
pub(crate) fn handshake<C: DeserializeOwned>() -> Result<Option<Handshake<C>>, WorkerExit> {
    let (mut input, mut out) = (BufReader::new(std::io::stdin()), take_stdout()?);
    let Ok(Some(SupervisorMessage::<C, ()>::Hello { program, parent, workers, config })) =
        messages::read(&mut input)
    else {
        return Err(WorkerExit::NotAWorker);
    };
    if !exit_with_parent(parent) {
        return Ok(None);
    }
    messages::write(&mut out, &WorkerMessage::<()>::Hello { program: Program::this() })?;
    Ok((program == Program::this()).then_some(Handshake { input, out, config, workers }))
}

/// Stdout as a file of our own; what others print there goes to stderr from now on.
fn take_stdout() -> std::io::Result<std::fs::File> {
    use std::os::fd::AsFd;
    let own = std::io::stdout().as_fd().try_clone_to_owned()?;
    rustix::stdio::dup2_stdout(std::io::stderr())?;
    Ok(own.into())
}

/// Asks the kernel to end this process with the one that started it; `false` when that one is gone already.
fn exit_with_parent(parent: u32) -> bool {
    #[cfg(target_os = "linux")]
    if rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)).is_err() {
        // The end of stdin remains.
    }
    std::os::unix::process::parent_id() == parent
}
