//! Processes of this very program that work for it, one at a time.
//!
//! Enters: how to start one, and messages for it. Leaves: its words, or how it ended. It knows neither what the messages mean nor when a
//! silence is too long: that is for whoever supervises.

use std::io::BufReader;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::wire::{self, Call, Program, Word};
use crate::worker::child::WORKER_ARGUMENT;

/// A worker that was told to end is killed after this time.
const FAREWELL: Duration = Duration::from_secs(5);

/// How to start a worker.
#[derive(Debug, Clone)]
pub struct Launch {
    pub program: PathBuf,
    /// How long a worker may be silent beyond what is predicted.
    pub patience: Duration,
}

impl Launch {
    /// A worker of this very program.
    ///
    /// # Errors
    /// When the system does not say where the program is.
    pub fn this_program(patience: Duration) -> Result<Self, WorkerError> {
        let program = std::env::current_exe().map_err(WorkerError::NoProgram)?;
        Ok(Self { program, patience })
    }
}

/// Why there is no worker.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    #[error("cannot find the path of this program: {0}; `--no-isolation` runs in one process")]
    NoProgram(std::io::Error),
    #[error("cannot start a worker process from {program}: {source}; `--no-isolation` runs in one process")]
    Start { program: PathBuf, source: std::io::Error },
    #[error("the worker is {worker}, this is {this}: the program changed while it ran; start again")]
    AnotherProgram { worker: String, this: String },
    #[error("the worker answered something else than it was asked: {doing}")]
    Confused { doing: String },
}

/// What a supervisor wakes up for.
pub(crate) enum Heard<A> {
    Word(Word<A>),
    /// The worker is gone: how it ended, as the end of a sentence about it, and what was wrong with its last message.
    Ended {
        how: String,
        broken: String,
    },
    Interrupted(i32),
    /// Nothing until the deadline.
    Nothing,
}

enum Happening<A> {
    Word(usize, Box<Word<A>>),
    /// The pipe of a worker ended; with a message where it broke.
    Closed(usize, Option<String>),
    Interrupted(i32),
}

struct Worker {
    number: usize,
    child: Child,
    calls: Option<ChildStdin>,
}

/// The worker that there is, if there is one, and the place of the next.
pub(crate) struct Workers<A> {
    program: PathBuf,
    /// What follows [`WORKER_ARGUMENT`].
    kind: Option<&'static str>,
    worker: Option<Worker>,
    started: usize,
    happenings: Receiver<Happening<A>>,
    sender: Sender<Happening<A>>,
}

impl<A: DeserializeOwned + Send + 'static> Workers<A> {
    pub(crate) fn new(program: PathBuf, kind: Option<&'static str>) -> Self {
        let (sender, happenings) = channel();
        Self { program, kind, worker: None, started: 0, happenings, sender }
    }

    /// Makes [`Self::hear`] hear of a signal.
    pub(crate) fn interrupter(&self) -> impl Fn(i32) + Send + 'static {
        let tell = self.sender.clone();
        move |signal| {
            // Without a receiver the run is over already.
            let _ = tell.send(Happening::Interrupted(signal));
        }
    }

    /// Whether one was started and not lost.
    pub(crate) fn has_one(&self) -> bool {
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
            .args(self.kind)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Ctrl-C at a terminal is for the supervisor alone.
            .process_group(0)
            .spawn()
            .map_err(|source| WorkerError::Start { program: self.program.clone(), source })?;
        let number = self.started;
        self.started += 1;
        let (calls, words) = (child.stdin.take(), child.stdout.take());
        let sender = self.sender.clone();
        if let Some(words) = words {
            std::thread::spawn(move || listen(number, BufReader::new(words), &sender));
        }
        self.worker = Some(Worker { number, child, calls });
        Ok(())
    }

    /// The first message to the worker that was started last.
    pub(crate) fn hello<C>(&self, config: C) -> Call<C, ()> {
        Call::Hello {
            program: Program::this(),
            parent: std::process::id(),
            workers: self.started.saturating_sub(1),
            config: Box::new(config),
        }
    }

    /// Sends a message. A worker that is gone is found by [`Self::hear`], where its pipe ends.
    pub(crate) fn say(&mut self, message: &impl Serialize) {
        if let Some(calls) = self.worker.as_mut().and_then(|worker| worker.calls.as_mut()) {
            let _ = wire::write(calls, message);
        }
    }

    /// Waits for whatever comes next of the worker that there is.
    pub(crate) fn hear(&mut self, deadline: Instant) -> Heard<A> {
        let number = self.worker.as_ref().map(|worker| worker.number);
        let mut waiting = Waiting::until(deadline);
        loop {
            let slept = Instant::now();
            match self.happenings.recv_timeout(waiting.slice()) {
                Ok(Happening::Word(of, word)) if Some(of) == number => return Heard::Word(*word),
                Ok(Happening::Closed(of, broken)) if Some(of) == number => {
                    let broken = broken
                        .map_or_else(String::new, |broken| format!(", its last message broken: {broken}"));
                    return Heard::Ended { how: self.wait(), broken };
                }
                Ok(Happening::Interrupted(signal)) => return Heard::Interrupted(signal),
                // This side holds a sender: the channel is never closed.
                Err(_) if waiting.is_over() => return Heard::Nothing,
                // A slice of silence, or of a worker before this one.
                Err(_) | Ok(Happening::Word(..) | Happening::Closed(..)) => {}
            }
            waiting.waited(slept.elapsed());
        }
    }

    /// How a worker ended whose pipe is closed.
    fn wait(&mut self) -> String {
        let Some(mut worker) = self.worker.take() else { return "was gone".into() };
        let deadline = Instant::now() + FAREWELL;
        let status = loop {
            match worker.child.try_wait() {
                Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(2)),
                Ok(None) => {
                    // It closed its pipe and lives on: of no use to anybody.
                    let _ = worker.child.kill();
                    break worker.child.wait();
                }
                Ok(Some(status)) => break Ok(status),
                Err(error) => break Err(error),
            }
        };
        match status {
            Ok(status) => ended(status),
            Err(error) => format!("ended, nobody knows how ({error}),"),
        }
    }

    /// Lets an idle worker end by itself: profilers and CUDA write their last words then.
    pub(crate) fn dismiss(&mut self) {
        let Some(worker) = &mut self.worker else { return };
        worker.calls = None;
        let deadline = Instant::now() + FAREWELL;
        while matches!(self.hear(deadline), Heard::Word(_)) {}
        self.kill();
    }
}

/// What is left of a silence that is borne. A process that is stopped (SIGSTOP, a laptop that sleeps) hears nothing while words pile up
/// in the pipe: of a slice of waiting that took longer than it was to take, the rest was not waited by anybody and does not count.
struct Waiting {
    left: Duration,
    /// Whether the last look at the pipe is still to come.
    spare: bool,
}

/// Waiting is counted in slices of this.
const SLICE: Duration = Duration::from_secs(1);
/// After a silence, the thread that listens gets so long to pass on what it may have just read.
const LAST_LOOK: Duration = Duration::from_secs(1);

impl Waiting {
    fn until(deadline: Instant) -> Self {
        Self { left: deadline.saturating_duration_since(Instant::now()), spare: true }
    }

    /// How long to wait now.
    fn slice(&self) -> Duration {
        self.left.min(SLICE)
    }

    /// Counts a slice that took so long.
    fn waited(&mut self, took: Duration) {
        self.left -= took.min(self.slice());
        if self.left.is_zero() && self.spare {
            (self.left, self.spare) = (LAST_LOOK, false);
        }
    }

    fn is_over(&self) -> bool {
        !self.spare && self.left <= SLICE
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

/// Checks the first word of a worker: another program would mean other things by the same words.
pub(crate) fn same_program<A>(word: &Word<A>) -> Result<(), WorkerError> {
    match word {
        Word::Hello { program } if *program == Program::this() => Ok(()),
        Word::Hello { program } => {
            let (worker, this) = (program.to_string(), Program::this().to_string());
            Err(WorkerError::AnotherProgram { worker, this })
        }
        _ => Err(WorkerError::Confused { doing: "starting".into() }),
    }
}

/// Passes a worker's words on until its pipe ends.
fn listen<A: DeserializeOwned>(
    number: usize,
    mut words: impl std::io::BufRead,
    sender: &Sender<Happening<A>>,
) {
    let broken = loop {
        match wire::read(&mut words) {
            Ok(Some(word)) => {
                if sender.send(Happening::Word(number, Box::new(word))).is_err() {
                    return;
                }
            }
            Ok(None) => break None,
            Err(error) => break Some(error.to_string()),
        }
    };
    // Without a receiver the run is over already.
    let _ = sender.send(Happening::Closed(number, broken));
}

/// An exit status as the end of a sentence about the worker.
fn ended(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.signal(), status.code()) {
        (Some(libc::SIGKILL), _) => {
            "was killed by signal 9 (SIGKILL; where nobody sent it, the kernel ran out of memory)".into()
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
        let mut waiting = Waiting { left: Duration::from_secs(seconds), spare: true };
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
            assert_eq!(waits(60, stopped), Duration::from_mins(1) + LAST_LOOK);
        }
    }

    #[test]
    fn a_deadline_that_passed_while_nobody_looked_leaves_a_last_look() {
        assert_eq!(waits(0, Duration::ZERO), LAST_LOOK);
        assert!(!Waiting::until(Instant::now()).is_over());
    }
}
