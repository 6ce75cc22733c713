//! The rig that is another process, started anew when it is lost.
//!
//! Enters: orders. Leaves: the worker's answers, or [`Answer::Lost`] with how the worker ended: a signal, an exit code, a silence longer
//! than what it does may take. It opens no device and waits without using the CPU.

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::run::config::RunConfig;
use crate::run::rig::{Answer, OpenSeries, Order, Rig};
use crate::run::{Observer, RunError};
use crate::worker::interrupt::Interrupts;
use crate::worker::wire::{Call, Word};
use crate::worker::workers::{Heard, Launch, WorkerError, Workers, same_program};
use hbmark_core::units::Bytes;

/// A step may take so many times what is predicted before its worker is given up: candle's slowest products are about fifty times above
/// their floor.
const SLOWER_THAN_PREDICTED: f64 = 100.0;

/// Loading, probing and checking announce no prediction and may be silent so many times longer than a step.
const STAGE_PATIENCE: u32 = 10;

/// Workers that die one after another before anything is open; then the series is given up.
const BARREN_WORKERS: usize = 3;

/// The device, in a child process.
pub struct Supervised {
    launch: Launch,
    config: RunConfig,
    interrupts: Interrupts,
    workers: Workers<Answer>,
    /// The series that the worker has open.
    held: OpenSeries,
    /// Workers lost in a row before their series were open again.
    barren: usize,
    open: OpenSeries,
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
        let workers = Workers::new(launch.program.clone(), None);
        interrupts.on_first(workers.interrupter());
        Self {
            launch,
            config: config.clone(),
            interrupts,
            workers,
            held: OpenSeries::default(),
            barren: 0,
            open: OpenSeries::default(),
        }
    }

    /// Starts a worker where there is none, and opens again what it does not hold; `Some` says how that was lost.
    fn ready(&mut self, observer: &mut dyn Observer) -> Result<Option<String>, RunError> {
        if !self.workers.has_one() {
            self.workers.start()?;
            self.held = OpenSeries::default();
            if let Some(lost) = self.greet(observer)? {
                return Ok(Some(lost));
            }
        }
        for order in self.open.again() {
            if self.held.holds(&order) {
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
        self.held.note(order, answer);
    }

    fn greet(&mut self, observer: &mut dyn Observer) -> Result<Option<String>, RunError> {
        let hello = self.workers.hello(self.config.clone());
        match self.converse(&hello, "starting", observer)? {
            Ok(word) => Ok(same_program(&word).map(|()| None)?),
            Err(lost) => Ok(Some(lost)),
        }
    }

    fn exchange(&mut self, order: &Order, observer: &mut dyn Observer) -> Result<Answer, RunError> {
        match self.converse(&Call::<(), _>::Order(Box::new(order.clone())), &order.doing(), observer)? {
            Ok(Word::Answer(answer)) => Ok(*answer),
            Ok(_) => Err(WorkerError::Confused { doing: order.doing() }.into()),
            Err(reason) => Ok(Answer::Lost { reason }),
        }
    }

    /// Sends a call and waits for its last word; the inner error says how the worker was lost meanwhile.
    fn converse(
        &mut self,
        call: &impl Serialize,
        doing: &str,
        observer: &mut dyn Observer,
    ) -> Result<Result<Word<Answer>, String>, RunError> {
        let patience = self.launch.patience;
        let stages = patience * STAGE_PATIENCE;
        self.workers.say(call);
        let (mut stage, mut predicted) = (None::<String>, None::<f64>);
        let mut deadline = Instant::now() + stages;
        loop {
            match self.workers.hear(deadline) {
                Heard::Word(Word::Stage { what }) => {
                    observer.stage(&what);
                    (stage, predicted) = (Some(what), None);
                    deadline = Instant::now() + stages;
                }
                Heard::Word(Word::Loaded { done, total }) => {
                    observer.loaded(Bytes(done), Bytes(total));
                    deadline = Instant::now() + stages;
                }
                Heard::Word(Word::Busy { seconds }) => {
                    predicted = Some(seconds);
                    deadline = Instant::now() + patience + beyond(seconds);
                }
                Heard::Word(last @ (Word::Hello { .. } | Word::Answer(_))) => return Ok(Ok(last)),
                Heard::Ended { how, broken } => {
                    let stage = stage.map_or_else(String::new, |stage| format!(" ({stage})"));
                    return Ok(Err(format!("the worker {how} while {doing}{stage}{broken}")));
                }
                Heard::Interrupted(signal) => {
                    self.workers.kill();
                    return Err(RunError::Interrupted { signal });
                }
                Heard::Nothing => {
                    self.workers.kill();
                    let allowed = silence(patience, stages, predicted);
                    let stage = stage.map_or_else(String::new, |stage| format!(" ({stage})"));
                    return Ok(Err(format!(
                        "no answer while {doing}{stage}: {allowed}; the worker was killed"
                    )));
                }
            }
        }
    }
}

impl Rig for Supervised {
    fn ask(&mut self, order: &Order, observer: &mut dyn Observer) -> Result<Answer, RunError> {
        if let Some(signal) = self.interrupts.signal() {
            self.workers.kill();
            return Err(RunError::Interrupted { signal });
        }
        if matches!(order, Order::Release { .. } | Order::Close { .. }) && !self.workers.has_one() {
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
            self.workers.kill();
            return Ok(Answer::Lost { reason });
        }
        self.barren = 0;
        let answer = self.exchange(order, observer)?;
        self.note(order, &answer);
        if matches!(answer, Answer::Lost { .. }) || answer.taints() {
            self.workers.kill();
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
        self.workers.dismiss();
    }
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
