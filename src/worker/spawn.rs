//! Child processes of this very program, one at a time.
//!
//! Enters: how to start one, and messages for it. Leaves: its messages, or how it ended. What the messages mean and when a silence is too
//! long is decided by the supervisor.

use std::io::BufReader;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::messages::{self, Program, SupervisorMessage, WorkerMessage};
use crate::worker::child::WORKER_ARGUMENT;

/// A worker that was asked to end is killed after this time.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// How to start a worker.
#[derive(Debug, Clone)]
pub struct WorkerCommand {
    pub program: PathBuf,
    /// How long a worker may be silent on top of what is predicted.
    pub timeout: Duration,
}

impl WorkerCommand {
    /// A worker of this very program.
    pub fn this_program(timeout: Duration) -> Result<Self, WorkerError> {
        let program = std::env::current_exe().map_err(WorkerError::UnknownExecutable)?;
        Ok(Self { program, timeout })
    }
}

/// Why there is no worker.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    #[error("cannot find the path of this program: {0}; `--no-isolation` runs in one process")]
    UnknownExecutable(std::io::Error),
    #[error("cannot start a worker process from {program}: {source}; `--no-isolation` runs in one process")]
    Start { program: PathBuf, source: std::io::Error },
    #[error("the worker is {worker}, this is {this}: the program changed while it ran; start again")]
    VersionMismatch { worker: String, this: String },
    #[error("the worker answered something else than it was asked: {doing}")]
    UnexpectedResponse { doing: String },
    #[error("{reason}")]
    Refused { reason: String },
    /// `executing` says whether a request was being executed.
    #[error("stopped by {}: {}", signal_name(*signal), if *executing {
        "what was being measured was not complete, and is not kept"
    } else {
        "nothing was being measured yet"
    })]
    Interrupted { signal: i32, executing: bool },
}

impl WorkerError {
    /// The signal that ended it, if one did.
    pub fn signal(&self) -> Option<i32> {
        if let Self::Interrupted { signal, .. } = self { Some(*signal) } else { None }
    }
}

/// A signal's name.
pub(crate) fn signal_name(signal: i32) -> &'static str {
    signal_hook::low_level::signal_name(signal).unwrap_or("a signal")
}

/// What a supervisor wakes up for.
pub(crate) enum WorkerEvent<A> {
    Message(WorkerMessage<A>),
    /// The worker is gone: how it ended, as the end of a sentence about it, and what was wrong with its last message.
    Ended {
        how: String,
        broken: String,
    },
    Interrupted(i32),
    /// Nothing until the deadline.
    Nothing,
}

enum QueuedEvent<A> {
    Message(usize, Box<WorkerMessage<A>>),
    /// The pipe of a worker ended; with a message where it broke.
    Closed(usize, Option<String>),
    Interrupted(i32),
}

struct Worker {
    number: usize,
    child: Child,
    input: Option<ChildStdin>,
}

/// The worker that there is, if there is one, and the place of the next.
pub(crate) struct Workers<A> {
    program: PathBuf,
    /// What follows [`WORKER_ARGUMENT`].
    kind: &'static str,
    worker: Option<Worker>,
    started: usize,
    events: Receiver<QueuedEvent<A>>,
    sender: Sender<QueuedEvent<A>>,
}

impl<A: DeserializeOwned + Send + 'static> Workers<A> {
    pub(crate) fn new(program: PathBuf, kind: &'static str) -> Self {
        let (sender, events) = channel();
        Self { program, kind, worker: None, started: 0, events, sender }
    }

    /// Makes a signal an event of [`Self::next_event`].
    pub(crate) fn interrupt_sender(&self) -> impl Fn(i32) + Send + 'static {
        let tell = self.sender.clone();
        move |signal| {
            // Without a receiver the run is over already.
            let _ = tell.send(QueuedEvent::Interrupted(signal));
        }
    }

    /// Whether one was started and not lost.
    pub(crate) fn is_running(&self) -> bool {
        self.worker.is_some()
    }

    /// How many were started.
    pub(crate) fn started(&self) -> usize {
        self.started
    }

    pub(crate) fn start(&mut self) -> Result<(), WorkerError> {
        use std::os::unix::process::CommandExt;
        let mut child = Command::new(&self.program)
            .arg(WORKER_ARGUMENT)
            .arg(self.kind)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Ctrl-C at a terminal is for the supervisor alone.
            .process_group(0)
            .spawn()
            .map_err(|source| WorkerError::Start { program: self.program.clone(), source })?;
        let number = self.started;
        self.started += 1;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let sender = self.sender.clone();
        if let Some(output) = output {
            std::thread::spawn(move || listen(number, BufReader::new(output), &sender));
        }
        self.worker = Some(Worker { number, child, input });
        Ok(())
    }

    /// The first message to the worker that was started last.
    pub(crate) fn hello<C>(&self, config: C) -> SupervisorMessage<C, ()> {
        SupervisorMessage::Hello {
            program: Program::this(),
            parent: std::process::id(),
            workers: self.started.saturating_sub(1),
            config: Box::new(config),
        }
    }

    /// Sends a message. A worker that is gone is found by [`Self::next_event`], where its pipe ends.
    pub(crate) fn send(&mut self, message: &impl Serialize) {
        if let Some(input) = self.worker.as_mut().and_then(|worker| worker.input.as_mut()) {
            let _ = messages::write(input, message);
        }
    }

    /// Waits for whatever comes next of the worker that there is.
    pub(crate) fn next_event(&mut self, deadline: Instant) -> WorkerEvent<A> {
        let number = self.worker.as_ref().map(|worker| worker.number);
        let mut waiting = IdleTimer::until(deadline);
        loop {
            let slept = Instant::now();
            match self.events.recv_timeout(waiting.slice()) {
                Ok(QueuedEvent::Message(of, message)) if Some(of) == number => {
                    return WorkerEvent::Message(*message);
                }
                Ok(QueuedEvent::Closed(of, broken)) if Some(of) == number => {
                    let broken = broken
                        .map_or_else(String::new, |broken| format!(", its last message broken: {broken}"));
                    return WorkerEvent::Ended { how: self.wait(), broken };
                }
                Ok(QueuedEvent::Interrupted(signal)) => return WorkerEvent::Interrupted(signal),
                // This side holds a sender: the channel is never closed.
                Err(_) if waiting.is_over() => return WorkerEvent::Nothing,
                // A slice of silence, or of a worker before this one.
                Err(_) | Ok(QueuedEvent::Message(..) | QueuedEvent::Closed(..)) => {}
            }
            waiting.waited(slept.elapsed());
        }
    }

    /// How a worker ended whose pipe is closed.
    fn wait(&mut self) -> String {
        let Some(mut worker) = self.worker.take() else { return "was gone".into() };
        let deadline = Instant::now() + SHUTDOWN_TIMEOUT;
        let status = loop {
            match worker.child.try_wait() {
                Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(2)),
                Ok(None) => {
                    // It closed its pipe and runs on: nothing can be asked of it any more.
                    let _ = worker.child.kill();
                    break worker.child.wait();
                }
                Ok(Some(status)) => break Ok(status),
                Err(error) => break Err(error),
            }
        };
        match status {
            Ok(status) => exit_description(status),
            Err(error) => format!("ended in an unknown way ({error})"),
        }
    }

    /// Lets an idle worker end by itself: profilers and CUDA write their output then.
    pub(crate) fn shut_down(&mut self) {
        let Some(worker) = &mut self.worker else { return };
        worker.input = None;
        let deadline = Instant::now() + SHUTDOWN_TIMEOUT;
        while matches!(self.next_event(deadline), WorkerEvent::Message(_)) {}
        self.kill();
    }
}

/// What is left of an allowed silence. A process that is stopped (SIGSTOP, a laptop that sleeps) reads nothing while messages pile up in
/// the pipe: of a slice of waiting that took longer than planned, the rest does not count.
struct IdleTimer {
    left: Duration,
    /// Whether the last poll of the pipe is still to come.
    spare: bool,
}

/// Waiting is counted in slices of this.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// After a silence, the thread that listens gets so long to pass on what it may have just read.
const FINAL_POLL: Duration = Duration::from_secs(1);

impl IdleTimer {
    fn until(deadline: Instant) -> Self {
        Self { left: deadline.saturating_duration_since(Instant::now()), spare: true }
    }

    /// How long to wait now.
    fn slice(&self) -> Duration {
        self.left.min(POLL_INTERVAL)
    }

    /// Counts a slice that took so long.
    fn waited(&mut self, took: Duration) {
        self.left -= took.min(self.slice());
        if self.left.is_zero() && self.spare {
            (self.left, self.spare) = (FINAL_POLL, false);
        }
    }

    fn is_over(&self) -> bool {
        !self.spare && self.left <= POLL_INTERVAL
    }
}

impl<A> Workers<A> {
    pub(crate) fn kill(&mut self) {
        if let Some(mut worker) = self.worker.take() {
            let _ = worker.child.kill();
            let _ = worker.child.wait();
        }
    }
}

impl<A> Drop for Workers<A> {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Checks the first message of a worker: another version may mean other things by the same messages.
pub(crate) fn check_same_version<A>(message: &WorkerMessage<A>) -> Result<(), WorkerError> {
    match message {
        WorkerMessage::Hello { program } if *program == Program::this() => Ok(()),
        WorkerMessage::Hello { program } => {
            let (worker, this) = (program.to_string(), Program::this().to_string());
            Err(WorkerError::VersionMismatch { worker, this })
        }
        _ => Err(WorkerError::UnexpectedResponse { doing: "starting".into() }),
    }
}

/// Passes a worker's messages on until its pipe ends.
fn listen<A: DeserializeOwned>(
    number: usize,
    mut output: impl std::io::BufRead,
    sender: &Sender<QueuedEvent<A>>,
) {
    let broken = loop {
        match messages::read(&mut output) {
            Ok(Some(message)) => {
                if sender.send(QueuedEvent::Message(number, Box::new(message))).is_err() {
                    return;
                }
            }
            Ok(None) => break None,
            Err(error) => break Some(error.to_string()),
        }
    };
    // Without a receiver the run is over already.
    let _ = sender.send(QueuedEvent::Closed(number, broken));
}

/// An exit status as the end of a sentence about the worker.
fn exit_description(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.signal(), status.code()) {
        (Some(libc::SIGKILL), _) => {
            "was killed by signal 9 (SIGKILL; if no process sent it, the kernel was out of memory)".into()
        }
        (Some(signal), _) => {
            let name = signal_hook::low_level::signal_name(signal).unwrap_or("unknown");
            format!("was ended by signal {signal} ({name})")
        }
        (None, Some(code)) => format!("exited with code {code}"),
        (None, None) => format!("ended ({status})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits in slices that each take so much longer than they were to take; returns how long was waited.
    fn waits(seconds: u64, longer: Duration) -> Duration {
        let mut waiting = IdleTimer { left: Duration::from_secs(seconds), spare: true };
        let mut slices = Duration::ZERO;
        loop {
            let slice = waiting.slice();
            slices += slice;
            if waiting.is_over() {
                return slices;
            }
            waiting.waited(slice + longer);
        }
    }

    #[test]
    fn time_in_which_this_process_stood_still_is_no_silence() {
        for stopped in [Duration::ZERO, Duration::from_millis(3), Duration::from_hours(5)] {
            assert_eq!(waits(60, stopped), Duration::from_mins(1) + FINAL_POLL);
        }
    }

    #[test]
    fn a_deadline_that_passed_unpolled_leaves_a_last_poll() {
        assert_eq!(waits(0, Duration::ZERO), FINAL_POLL);
        assert!(!IdleTimer::until(Instant::now()).is_over());
    }
}
