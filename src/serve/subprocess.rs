//! A serving benchmark in a process of its own, started anew when it is lost.
//!
//! Enters: the command line of this program. Leaves: the report that the worker makes, or as much of it as there is. The worker opens the
//! device, loads weights and measures; it tells every point when it is known. A worker that is lost costs the point that it was
//! measuring: its successor is told what was answered before, takes that instead of measuring, and goes on where the other one ended. The
//! supervisor opens no device and waits without using the CPU.
//!
//! ```text
//! supervisor ── Job, known openings and points ──→ worker: the same arguments, the same modes, points known or measured
//!            ←── stages, progress, points, report ──
//! ```

use std::ffi::OsString;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::checkpoint::{CheckpointEntry, ServeCheckpoint};
use super::recorded_points::{EngineRecord, PointKey, RecordedPoint};
use super::{Completion, Finished, ServeError, ServeObserver};
use crate::worker::messages::{SupervisorMessage, WorkerMessage};
use crate::worker::signals::Interrupts;
use crate::worker::spawn::{WorkerCommand, WorkerError, WorkerEvent, Workers, check_same_version};
use hbmark_core::result::Cause;
use hbmark_core::result::serving::{Point, ServeReport};
use hbmark_core::units::Bytes;
use hbmark_traffic::serving_loop::Progress;

/// What follows the hidden subcommand of a worker that serves.
pub const KIND: &str = "serve";

/// A step may take so many times what the engine's own steps let expect.
const STEP_TIMEOUT_FACTOR: f64 = 10.0;

/// Loading, timing and planning announce no prediction and may be silent so many times longer than a step.
const STAGE_TIMEOUT_FACTOR: u32 = 10;

/// Workers that are lost one after the other without coming to a point; then the benchmark ends.
const MAX_CONSECUTIVE_FAILURES: usize = 2;

/// What a worker is started with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    /// The arguments of this program, its name left out.
    pub arguments: Vec<OsString>,
    /// The command line as the report shows it.
    pub command: String,
}

/// What a worker is told before it begins.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum WorkerInput {
    EngineRecord(Box<EngineRecord>),
    Point(Box<RecordedPoint>),
    /// That was all: begin.
    Begin,
}

/// What a worker tells.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ServeUpdate {
    /// An engine is loaded that no worker had opened before.
    Opened(Box<EngineRecord>),
    /// The report, with everything but points.
    Begun(Box<ServeReport>),
    /// A point begins. `blank` is the point without a result, `longest_s` what its longest step should take.
    Measuring {
        asked: PointKey,
        blank: Box<Point>,
        longest_s: Option<f64>,
    },
    Progress(Progress),
    Measured(Box<RecordedPoint>),
    /// The device failed while a point was measured, and the worker with it; the point as it is, where there is one.
    Faulty {
        asked: PointKey,
        point: Option<Box<Point>>,
        reason: String,
    },
    Report(Box<ServeReport>),
    /// The benchmark cannot be run by anybody.
    Refused {
        reason: String,
    },
}

/// How a worker's work ended.
enum AttemptEnd {
    Report(Box<ServeReport>),
    Lost(Box<WorkerLoss>),
    /// By a signal to the supervisor; with the point that it hit.
    Stopped(i32, Option<Box<Point>>),
}

/// What was lost with a worker.
struct WorkerLoss {
    reason: String,
    /// The point that it was measuring, with what there is of it.
    point: Option<RecordedPoint>,
}

impl WorkerLoss {
    fn end(reason: String, point: Option<RecordedPoint>) -> AttemptEnd {
        AttemptEnd::Lost(Box::new(Self { reason, point }))
    }
}

/// Runs a serving benchmark in a worker.
///
/// # Errors
/// When no worker can be started, when two are lost one after the other before they come to a point and none was measured, when the
/// benchmark itself is refused, and when a signal comes before anything was measured.
pub fn serve(
    launch: &WorkerCommand,
    job: &Job,
    interrupts: &Interrupts,
    checkpoint: &mut ServeCheckpoint,
    observer: &mut dyn ServeObserver,
) -> Result<Finished, ServeError> {
    let workers = Workers::new(launch.program.clone(), Some(KIND));
    interrupts.on_first(workers.interrupt_sender());
    let mut supervisor = Supervisor {
        workers,
        timeout: launch.timeout,
        job,
        interrupts,
        checkpoint,
        retried: None,
        consecutive_failures: 0,
    };
    loop {
        match supervisor.run_worker(observer)? {
            AttemptEnd::Report(report) => return Ok(supervisor.conclude(*report, Completion::Whole)),
            AttemptEnd::Lost(loss) => {
                supervisor.workers.kill();
                if let Some(reason) = supervisor.handle_loss(*loss)? {
                    return supervisor.give_up(&reason);
                }
            }
            AttemptEnd::Stopped(signal, hit) => {
                supervisor.workers.kill();
                let report = supervisor.checkpoint.stopped(signal, hit.map(|point| *point))?;
                return Ok(supervisor.conclude(report, Completion::Stopped(signal)));
            }
        }
    }
}

struct Supervisor<'a> {
    workers: Workers<ServeUpdate>,
    timeout: Duration,
    job: &'a Job,
    interrupts: &'a Interrupts,
    checkpoint: &'a mut ServeCheckpoint,
    /// The point that cost a worker and is measured once more.
    retried: Option<PointKey>,
    /// Workers lost in a row before they came to a point.
    consecutive_failures: usize,
}

impl Supervisor<'_> {
    /// Starts a worker and attends to it until it ends, one way or the other.
    fn run_worker(&mut self, observer: &mut dyn ServeObserver) -> Result<AttemptEnd, ServeError> {
        // One that came while nobody listened.
        if let Some(signal) = self.interrupts.signal() {
            return Ok(AttemptEnd::Stopped(signal, None));
        }
        self.workers.start()?;
        let hello = self.workers.hello(self.job.clone());
        self.workers.send(&hello);
        let mut now = WorkerActivity { doing: "starting".into(), measuring: None, steps: None };
        match self.receive(&mut now) {
            Ok(word) => check_same_version(&word)?,
            Err(end) => return Ok(end),
        }
        self.send_checkpoint();
        loop {
            let word = match self.receive(&mut now) {
                Ok(word) => word,
                Err(end) => return Ok(end),
            };
            match word {
                WorkerMessage::Stage { what } => {
                    observer.stage(&what);
                    now.set_activity(what);
                }
                WorkerMessage::Loaded { done, total } => observer.loaded(Bytes(done), Bytes(total)),
                WorkerMessage::Response(told) => {
                    if let Some(end) = self.handle_update(*told, &mut now, observer)? {
                        return Ok(end);
                    }
                }
                // A sign of life.
                WorkerMessage::Busy { .. } => {}
                WorkerMessage::Hello { .. } => {
                    return Err(WorkerError::UnexpectedResponse { doing: now.doing() }.into());
                }
            }
        }
    }

    /// Tells a worker what is known.
    fn send_checkpoint(&mut self) {
        let openings = self
            .checkpoint
            .openings()
            .iter()
            .map(|opening| WorkerInput::EngineRecord(Box::new(opening.clone())));
        let points =
            self.checkpoint.answered().iter().map(|answered| WorkerInput::Point(Box::new(answered.clone())));
        let known: Vec<WorkerInput> = openings.chain(points).chain([WorkerInput::Begin]).collect();
        for known in known {
            self.workers.send(&SupervisorMessage::<(), _>::Request(Box::new(known)));
        }
    }

    /// Takes in what a worker tells; `Some` where that is its last.
    fn handle_update(
        &mut self,
        told: ServeUpdate,
        now: &mut WorkerActivity,
        observer: &mut dyn ServeObserver,
    ) -> Result<Option<AttemptEnd>, ServeError> {
        match told {
            ServeUpdate::Opened(opening) => self.checkpoint.record(CheckpointEntry::Opened(opening))?,
            ServeUpdate::Begun(report) => self.checkpoint.record(CheckpointEntry::Begun(report))?,
            ServeUpdate::Measuring { asked, blank, longest_s } => {
                self.consecutive_failures = 0;
                now.set_activity(format!("measuring {}", asked.label));
                now.steps = Some(StepWatch { longest_s, run: false });
                now.measuring = Some(RecordedPoint { asked, point: *blank, lost: false });
            }
            ServeUpdate::Progress(progress) => {
                if let Some(steps) = &mut now.steps {
                    // Behind the last request the engine is timed again, and a virtual clock runs.
                    steps.run = progress.done < progress.total;
                }
                observer.progress(progress);
            }
            ServeUpdate::Measured(answered) => {
                now.set_activity(format!("preparing what follows {}", answered.asked.label));
                self.checkpoint.record(CheckpointEntry::Point(answered))?;
            }
            ServeUpdate::Faulty { asked, point, reason } => {
                let blank = now.measuring.take().map(|answered| answered.point);
                let point = point.map(|point| *point).or(blank);
                let point = point.map(|point| RecordedPoint { asked, point, lost: false });
                return Ok(Some(WorkerLoss::end(reason, point)));
            }
            ServeUpdate::Report(report) => {
                self.workers.shut_down();
                return Ok(Some(AttemptEnd::Report(report)));
            }
            ServeUpdate::Refused { reason } => {
                self.workers.shut_down();
                return Err(ServeError::Refused { reason });
            }
        }
        Ok(None)
    }

    /// The worker's next word, or how it ended instead.
    fn receive(&mut self, now: &mut WorkerActivity) -> Result<WorkerMessage<ServeUpdate>, AttemptEnd> {
        let silence = now.silence(self.timeout);
        let reason = match self.workers.next_event(Instant::now() + silence) {
            WorkerEvent::Message(word) => return Ok(word),
            WorkerEvent::Interrupted(signal) => {
                let hit = now.measuring.take().map(|answered| Box::new(answered.point));
                return Err(AttemptEnd::Stopped(signal, hit));
            }
            WorkerEvent::Ended { how, broken } => format!("the worker {how} while {}{broken}", now.doing()),
            WorkerEvent::Nothing => format!(
                "no answer while {}: silent for {:.1} s{}; the worker was killed",
                now.doing(),
                silence.as_secs_f64(),
                now.expected()
            ),
        };
        Err(WorkerLoss::end(reason, now.measuring.take()))
    }

    /// Decides what a loss costs; `Some` where it is everything that is still to come.
    fn handle_loss(
        &mut self,
        WorkerLoss { reason, point }: WorkerLoss,
    ) -> Result<Option<String>, ServeError> {
        let Some(RecordedPoint { asked, mut point, .. }) = point else {
            self.consecutive_failures += 1;
            if self.consecutive_failures >= MAX_CONSECUTIVE_FAILURES {
                return Ok(Some(reason));
            }
            self.checkpoint.record(CheckpointEntry::Warning(format!("{reason}; another worker went on")))?;
            return Ok(None);
        };
        if self.retried.as_ref() == Some(&asked) {
            if point.result.is_none() {
                point.not_run = Some(Cause::WorkerLost { detail: reason });
            }
            self.checkpoint.record(CheckpointEntry::Point(Box::new(RecordedPoint {
                asked,
                point,
                lost: true,
            })))?;
        } else {
            let warning = format!("{}: {reason}; the point was repeated", asked.label);
            self.checkpoint.record(CheckpointEntry::Warning(warning))?;
            self.retried = Some(asked);
        }
        Ok(None)
    }

    /// Ends with what was measured, where anything was.
    fn give_up(self, reason: &str) -> Result<Finished, ServeError> {
        let Some(mut report) = self.checkpoint.partial_report() else {
            let reason = format!("{reason}, and so was lost the one before it");
            return Err(ServeError::Refused { reason });
        };
        report.warnings.insert(
            0,
            format!(
                "the benchmark ended early: {reason}, {MAX_CONSECUTIVE_FAILURES} workers in a row; here is what was measured before"
            ),
        );
        Ok(self.conclude(report, Completion::Early))
    }

    /// Adds what the supervisor alone knows.
    fn conclude(self, report: ServeReport, ending: Completion) -> Finished {
        let report = self.checkpoint.complete(report, self.workers.started() > 1);
        Finished { report, lost: self.checkpoint.lost(), ending }
    }
}

/// What a worker is doing.
struct WorkerActivity {
    doing: String,
    /// The point that is being measured, without a result.
    measuring: Option<RecordedPoint>,
    steps: Option<StepWatch>,
}

/// Steps of a point.
struct StepWatch {
    longest_s: Option<f64>,
    /// Whether they run now.
    run: bool,
}

impl WorkerActivity {
    fn set_activity(&mut self, doing: String) {
        if self.measuring.as_ref().is_some_and(|point| point.asked.label == doing) {
            // The point's own name, as a stage.
            return;
        }
        *self = Self { doing, measuring: None, steps: None };
    }

    fn doing(&self) -> String {
        self.doing.clone()
    }

    /// What the longest step should take, while steps run.
    fn longest(&self) -> Option<f64> {
        self.steps.as_ref().filter(|steps| steps.run).and_then(|steps| steps.longest_s)
    }

    /// The longest silence that means nothing.
    fn silence(&self, timeout: Duration) -> Duration {
        let beyond = |seconds: f64| {
            Duration::try_from_secs_f64(seconds * STEP_TIMEOUT_FACTOR).unwrap_or(Duration::from_hours(24))
        };
        self.longest().map_or(timeout * STAGE_TIMEOUT_FACTOR, |seconds| timeout + beyond(seconds))
    }

    fn expected(&self) -> String {
        self.longest().map_or_else(String::new, |seconds| {
            format!(", where the longest step should take {seconds:.3} s")
        })
    }
}

#[cfg(test)]
mod tests;
