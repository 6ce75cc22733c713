//! The rig that is another process, started anew when it is lost.
//!
//! Enters: orders. Leaves: the worker's answers, or [`Answer::Lost`] with how the worker ended: a signal, an exit code, a silence longer
//! than what it does may take. It opens no device and waits without using the CPU.

use std::io::BufReader;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use super::wire::{self, Call, Program, Word};
use super::{Answer, Interrupts, OpenSeries, Order, Rig, WORKER_ARGUMENT};
use crate::config::RunConfig;
use crate::units::Bytes;
use crate::{Observer, RunError};

/// A step may take so many times what is predicted before its worker is given up: candle's slowest products are about fifty times above
/// their floor.
const SLOWER_THAN_PREDICTED: f64 = 100.0;

/// Loading, probing and checking announce no prediction and may be silent so many times longer than a step.
const STAGE_PATIENCE: u32 = 10;

/// Workers that die one after another before anything is open; then the series is given up.
const BARREN_WORKERS: usize = 3;

/// A worker that was told to end is killed after this time.
const FAREWELL: Duration = Duration::from_secs(5);

/// How to start a worker.
#[derive(Debug, Clone)]
pub struct Launch {
    pub program: PathBuf,
    /// How long a worker may be silent beyond a hundred times what is predicted.
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

/// What the supervisor wakes up for.
enum Happening {
    Word(usize, Box<Word>),
    /// The pipe of a worker ended; with a message where it broke.
    Closed(usize, Option<String>),
    Interrupted(i32),
}

struct Worker {
    number: usize,
    child: Child,
    calls: Option<ChildStdin>,
    /// The series that it has open.
    held: OpenSeries,
}

/// The device, in a child process.
pub struct Supervised {
    launch: Launch,
    config: RunConfig,
    interrupts: Interrupts,
    worker: Option<Worker>,
    started: usize,
    /// Workers lost in a row before their series were open again.
    barren: usize,
    open: OpenSeries,
    happenings: Receiver<Happening>,
    sender: Sender<Happening>,
}

impl std::fmt::Debug for Supervised {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Supervised").field("launch", &self.launch).finish_non_exhaustive()
    }
}

impl Supervised {
    /// A rig whose worker is started with the first order.
    #[must_use]
    pub fn new(launch: Launch, config: &RunConfig, interrupts: Interrupts) -> Self {
        let (sender, happenings) = channel();
        let tell = sender.clone();
        interrupts.on_first(move |signal| {
            // Without a receiver the run is over already.
            let _ = tell.send(Happening::Interrupted(signal));
        });
        Self {
            launch,
            config: config.clone(),
            interrupts,
            worker: None,
            started: 0,
            barren: 0,
            open: OpenSeries::default(),
            happenings,
            sender,
        }
    }

    /// Starts a worker where there is none, and opens again what it does not hold; `Some` says how that was lost.
    fn ready(&mut self, observer: &mut dyn Observer) -> Result<Option<String>, RunError> {
        if self.worker.is_none() {
            self.start()?;
            if let Some(lost) = self.greet(observer)? {
                return Ok(Some(lost));
            }
        }
        for order in self.open.again() {
            if self.worker.as_ref().is_some_and(|worker| worker.held.holds(&order)) {
                continue;
            }
            match self.exchange(&order, observer)? {
                answer @ Answer::Opened(_) => self.note(&order, &answer),
                Answer::Lost { reason } | Answer::NoRoom { reason, .. } | Answer::Refused { reason } => {
                    return Ok(Some(format!("{reason} (a new worker for the cells that are left)")));
                }
                _ => return Err(WorkerError::Confused { doing: order.doing() }.into()),
            }
        }
        Ok(None)
    }

    /// Remembers what is open, in this worker and for the next one.
    fn note(&mut self, order: &Order, answer: &Answer) {
        self.open.note(order, answer);
        if let Some(worker) = &mut self.worker {
            worker.held.note(order, answer);
        }
    }

    fn start(&mut self) -> Result<(), RunError> {
        use std::os::unix::process::CommandExt;
        let program = &self.launch.program;
        let mut child = Command::new(program)
            .arg(WORKER_ARGUMENT)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Ctrl-C at a terminal is for the supervisor alone.
            .process_group(0)
            .spawn()
            .map_err(|source| WorkerError::Start { program: program.clone(), source })?;
        let number = self.started;
        self.started += 1;
        let (calls, words) = (child.stdin.take(), child.stdout.take());
        let sender = self.sender.clone();
        if let Some(words) = words {
            std::thread::spawn(move || listen(number, BufReader::new(words), &sender));
        }
        self.worker = Some(Worker { number, child, calls, held: OpenSeries::default() });
        Ok(())
    }

    fn greet(&mut self, observer: &mut dyn Observer) -> Result<Option<String>, RunError> {
        let hello = Call::Hello {
            program: Program::this(),
            parent: std::process::id(),
            workers: self.started - 1,
            config: Box::new(self.config.clone()),
        };
        match self.converse(&hello, "starting", observer)? {
            Ok(Word::Hello { program }) if program == Program::this() => Ok(None),
            Ok(Word::Hello { program }) => {
                let (worker, this) = (program.to_string(), Program::this().to_string());
                Err(WorkerError::AnotherProgram { worker, this }.into())
            }
            Ok(_) => Err(WorkerError::Confused { doing: "starting".into() }.into()),
            Err(lost) => Ok(Some(lost)),
        }
    }

    fn exchange(&mut self, order: &Order, observer: &mut dyn Observer) -> Result<Answer, RunError> {
        match self.converse(&Call::Order(Box::new(order.clone())), &order.doing(), observer)? {
            Ok(Word::Answer(answer)) => Ok(*answer),
            Ok(_) => Err(WorkerError::Confused { doing: order.doing() }.into()),
            Err(reason) => Ok(Answer::Lost { reason }),
        }
    }

    /// Sends a call and waits for its last word; the inner error says how the worker was lost meanwhile.
    fn converse(
        &mut self,
        call: &Call,
        doing: &str,
        observer: &mut dyn Observer,
    ) -> Result<Result<Word, String>, RunError> {
        let patience = self.launch.patience;
        let stages = patience * STAGE_PATIENCE;
        let Some(worker) = &mut self.worker else { return Ok(Err("there is no worker".into())) };
        let number = worker.number;
        if let Some(calls) = &mut worker.calls {
            // A worker that is gone is found below, where its pipe ends.
            let _ = wire::write(calls, call);
        }
        let (mut stage, mut predicted) = (None::<String>, None::<f64>);
        let mut deadline = Instant::now() + stages;
        loop {
            match self.happenings.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Happening::Word(of, word)) if of == number => match *word {
                    Word::Stage { what } => {
                        observer.stage(&what);
                        (stage, predicted) = (Some(what), None);
                        deadline = Instant::now() + stages;
                    }
                    Word::Loaded { done, total } => {
                        observer.loaded(Bytes(done), Bytes(total));
                        deadline = Instant::now() + stages;
                    }
                    Word::Busy { seconds } => {
                        predicted = Some(seconds);
                        deadline = Instant::now() + patience + beyond(seconds);
                    }
                    last @ (Word::Hello { .. } | Word::Answer(_)) => return Ok(Ok(last)),
                },
                Ok(Happening::Closed(of, broken)) if of == number => {
                    let ended = self.wait();
                    let stage = stage.map_or_else(String::new, |stage| format!(" ({stage})"));
                    let broken = broken
                        .map_or_else(String::new, |broken| format!(", its last message broken: {broken}"));
                    return Ok(Err(format!("the worker {ended} while {doing}{stage}{broken}")));
                }
                Ok(Happening::Interrupted(signal)) => {
                    self.kill();
                    return Err(RunError::Interrupted { signal });
                }
                // Of a worker before this one.
                Ok(Happening::Word(..) | Happening::Closed(..)) => {}
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    self.kill();
                    let allowed = silence(patience, stages, predicted);
                    let stage = stage.map_or_else(String::new, |stage| format!(" ({stage})"));
                    return Ok(Err(format!(
                        "no answer while {doing}{stage}: {allowed}; the worker was killed"
                    )));
                }
            }
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

    fn kill(&mut self) {
        if let Some(mut worker) = self.worker.take() {
            let _ = worker.child.kill();
            let _ = worker.child.wait();
        }
    }

    /// Lets an idle worker end by itself: profilers and CUDA write their last words then.
    fn dismiss(&mut self) {
        let Some(worker) = &mut self.worker else { return };
        let number = worker.number;
        worker.calls = None;
        let deadline = Instant::now() + FAREWELL;
        while let Ok(happening) =
            self.happenings.recv_timeout(deadline.saturating_duration_since(Instant::now()))
        {
            match happening {
                Happening::Closed(of, _) if of == number => break,
                Happening::Interrupted(_) => break,
                _ => {}
            }
        }
        self.kill();
    }
}

impl Rig for Supervised {
    fn ask(&mut self, order: &Order, observer: &mut dyn Observer) -> Result<Answer, RunError> {
        if let Some(signal) = self.interrupts.signal() {
            self.kill();
            return Err(RunError::Interrupted { signal });
        }
        if matches!(order, Order::Release { .. } | Order::Close { .. }) && self.worker.is_none() {
            self.note(order, &Answer::Done);
            self.barren = 0;
            return Ok(Answer::Done);
        }
        if self.barren >= BARREN_WORKERS {
            let reason =
                format!("{} workers in a row were lost before anything was loaded again", self.barren);
            return Ok(Answer::Lost { reason });
        }
        if let Some(reason) = self.ready(observer)? {
            self.barren += 1;
            self.kill();
            return Ok(Answer::Lost { reason });
        }
        self.barren = 0;
        let answer = self.exchange(order, observer)?;
        self.note(order, &answer);
        if matches!(answer, Answer::Lost { .. }) || answer.taints() {
            self.kill();
        }
        Ok(answer)
    }

    fn assume(&mut self, order: &Order, answer: &Answer) {
        self.open.note(order, answer);
    }

    fn renews(&self) -> bool {
        true
    }
}

impl Drop for Supervised {
    fn drop(&mut self) {
        self.dismiss();
    }
}

/// Passes a worker's words on until its pipe ends.
fn listen(number: usize, mut words: impl std::io::BufRead, sender: &Sender<Happening>) {
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

/// What a prediction adds to the patience.
fn beyond(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds * SLOWER_THAN_PREDICTED).unwrap_or(Duration::from_hours(24))
}

/// A silence that was too long, in words.
fn silence(patience: Duration, stages: Duration, predicted: Option<f64>) -> String {
    match predicted {
        Some(seconds) => format!(
            "silent for {:.1} s, where {seconds:.3} s are predicted and {:.1} s more than {SLOWER_THAN_PREDICTED} times that are allowed",
            (patience + beyond(seconds)).as_secs_f64(),
            patience.as_secs_f64()
        ),
        None => format!("silent for {:.1} s", stages.as_secs_f64()),
    }
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
