//! The process that owns the device.
//!
//! Enters: requests on stdin. Leaves: progress and responses on what was stdout; whatever a library prints there goes to stderr instead.
//! It ends with its supervisor: by a signal of the kernel, at the end of its stdin, or when its pipe breaks.

use std::io::BufReader;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::fault_injection::{FaultInjectingSession, FaultSite, InjectedFault};
use super::job::{Handler, InProcess, Job, Worker};
use super::messages::{self, Program, SupervisorMessage, WorkerMessage};
use super::observer::Observer;
use super::signals;
use hbmark_core::input::one_line;
use hbmark_core::result::Cause;
use hbmark_core::units::Bytes;

/// The hidden subcommand that starts a worker.
pub const WORKER_ARGUMENT: &str = "__worker";

/// The process number of the program that launched this one, where that was hbmark, too.
pub const LAUNCHED_BY: &str = "HBMARK_LAUNCHED_BY";

/// Makes a program that another one launched end with it. `false` when that one is gone already.
pub fn exit_with_launcher() -> bool {
    let launcher = std::env::var(LAUNCHED_BY).ok().and_then(|number| number.parse().ok());
    launcher.is_none_or(exit_with_parent)
}

/// Why a worker ends before its stdin does.
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
pub fn is_worker_process() -> bool {
    std::env::args_os().nth(1).is_some_and(|argument| argument == WORKER_ARGUMENT)
}

/// Progress is sent no more often than this: a bar is drawn no faster.
const REFRESH: Duration = Duration::from_millis(250);

/// Messages that only say that the worker is alive are sent no more often than this.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// Executes requests until stdin ends, with the handler that `open` makes of the configuration.
///
/// # Errors
/// When it was not started by a supervisor, or the pipes break.
pub fn work<H: Handler>(
    open: impl FnOnce(&<H::Job as Job>::Config) -> Result<H, String>,
) -> Result<(), WorkerExit> {
    signals::leave_to_supervisor();
    let Some(Handshake { mut input, out, config, workers }) = handshake()? else { return Ok(()) };
    let mut observer = ForwardingObserver { out, sent: Instant::now(), shown: None, predicted: None };
    let mut worker = open(&config).map(InProcess::new);
    let planted = InjectedFault::from_environment();
    let site = FaultSite::default();
    let fault = planted.as_ref().ok().cloned().flatten().and_then(|fault| fault.for_worker(workers));
    if let (Ok(worker), Some(fault)) = (&mut worker, fault.clone()) {
        let now = site.clone();
        worker.handler.wrap_sessions(Box::new(move |session| {
            Box::new(FaultInjectingSession { session, fault: fault.clone(), now: now.clone() })
        }));
    }
    while let Some(message) = messages::read(&mut input)? {
        let SupervisorMessage::<(), _>::Request(request) = message else {
            return Err(WorkerExit::NotAWorker);
        };
        if let Some(fault) = &fault {
            for place in H::Job::fault_places(&request) {
                fault.trigger_at(place);
            }
            site.enter(&H::Job::fault_site(&request));
        }
        (observer.shown, observer.predicted) = (None, None);
        let mut response = match (&mut worker, &planted) {
            (_, Err(reason)) => H::Job::refused(reason.clone()),
            (Err(reason), _) => H::Job::refused(reason.clone()),
            (Ok(worker), Ok(_)) => worker
                .execute(&request, &mut observer)
                .unwrap_or_else(|error| H::Job::refused(one_line(&error))),
        };
        if let Ok(Some(fault)) = &planted {
            H::Job::warn(&mut response, fault.warning());
        }
        observer.send(&WorkerMessage::Response(Box::new(response)));
    }
    Ok(())
}

/// Sends progress to the supervisor.
struct ForwardingObserver {
    out: std::fs::File,
    /// When anything was sent last.
    sent: Instant,
    /// When progress of this request was sent last, and whether that was its end.
    shown: Option<(Instant, bool)>,
    /// The prediction that was sent last.
    predicted: Option<f64>,
}

impl ForwardingObserver {
    fn send<R: Serialize>(&mut self, message: &WorkerMessage<R>) {
        if messages::write(&mut self.out, message).is_err() {
            // The supervisor is gone, and the kernel did not end this process with it.
            std::process::exit(2);
        }
        self.sent = Instant::now();
    }

    /// Whether progress is due: after a while, and once at the end.
    fn is_due(&mut self, end: bool) -> bool {
        let due = self.shown.is_none_or(|(shown, ended)| shown.elapsed() >= REFRESH || (end && !ended));
        if due {
            self.shown = Some((Instant::now(), end));
        }
        due
    }
}

impl Observer for ForwardingObserver {
    fn stage(&mut self, what: &str) {
        (self.shown, self.predicted) = (None, None);
        self.send(&WorkerMessage::<()>::Stage { what: what.to_owned() });
    }

    fn loaded(&mut self, done: Bytes, total: Bytes) {
        if self.is_due(done >= total) {
            self.send(&WorkerMessage::<()>::Loaded { done: done.0, total: total.0 });
        }
    }

    fn progress(&mut self, done: usize, total: usize, message: &mut dyn FnMut() -> String) {
        if self.is_due(done >= total) {
            self.send(&WorkerMessage::<()>::Progress { done, total, message: message() });
        }
    }

    fn rejected(&mut self, cause: &Cause) {
        self.send(&WorkerMessage::<()>::Rejected { cause: cause.clone() });
    }

    fn busy(&mut self, seconds: Option<f64>) {
        // A prediction that is not a number is none.
        let seconds = seconds.map(|seconds| if seconds.is_finite() { seconds } else { 0.0 });
        let longer = seconds.is_none() != self.predicted.is_none() || seconds > self.predicted;
        if longer || self.sent.elapsed() >= HEARTBEAT {
            self.predicted = seconds;
            self.send(&WorkerMessage::<()>::Busy { seconds });
        }
    }
}

/// A worker's pipes, and its configuration.
struct Handshake<C> {
    input: BufReader<std::io::Stdin>,
    out: std::fs::File,
    config: Box<C>,
    /// How many workers there were before.
    workers: usize,
}

/// Reads the configuration; `None` where the supervisor is gone or is another version of the program.
fn handshake<C: DeserializeOwned>() -> Result<Option<Handshake<C>>, WorkerExit> {
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
