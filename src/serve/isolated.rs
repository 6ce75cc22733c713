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

use super::known::{Answered, Asked, Opening};
use super::memory::{Entry, Memory};
use super::{Ending, Finished, ServeError, ServeObserver};
use crate::worker::interrupt::Interrupts;
use crate::worker::wire::{Call, Word};
use crate::worker::workers::{Heard, Launch, WorkerError, Workers, same_program};
use hbmark_core::result::serving::{Point, ServeReport};
use hbmark_core::units::Bytes;
use hbmark_traffic::run::Progress;

/// What follows the hidden subcommand of a worker that serves.
pub const KIND: &str = "serve";

/// A step may take so many times what the engine's own steps let expect.
const SLOWER_THAN_TIMED: f64 = 10.0;

/// Loading, timing and planning announce no prediction and may be silent so many times longer than a step.
const STAGE_PATIENCE: u32 = 10;

/// Workers that are lost one after the other without coming to a point; then the benchmark ends.
const BARREN_WORKERS: usize = 2;

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
pub(super) enum Handed {
    Opening(Box<Opening>),
    Point(Box<Answered>),
    /// That was all: begin.
    Begin,
}

/// What a worker tells.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Told {
    /// An engine is loaded that no worker had opened before.
    Opened(Box<Opening>),
    /// The report, with everything but points.
    Begun(Box<ServeReport>),
    /// A point begins. `blank` is the point without a result, `longest_s` what its longest step should take.
    Measuring {
        asked: Asked,
        blank: Box<Point>,
        longest_s: Option<f64>,
    },
    Progress(Progress),
    Measured(Box<Answered>),
    /// The device failed while a point was measured, and the worker with it; the point as it is, where there is one.
    Faulty {
        asked: Asked,
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
enum End {
    Report(Box<ServeReport>),
    Lost(Box<Loss>),
    /// By a signal to the supervisor; with the point that it hit.
    Stopped(i32, Option<Box<Point>>),
}

/// What was lost with a worker.
struct Loss {
    reason: String,
    /// The point that it was measuring, with what there is of it.
    point: Option<Answered>,
}

impl Loss {
    fn end(reason: String, point: Option<Answered>) -> End {
        End::Lost(Box::new(Self { reason, point }))
    }
}

/// Runs a serving benchmark in a worker.
///
/// # Errors
/// When no worker can be started, when two are lost one after the other before they come to a point and none was measured, when the
/// benchmark itself is refused, and when a signal comes before anything was measured.
pub fn serve(
    launch: &Launch,
    job: &Job,
    interrupts: &Interrupts,
    memory: &mut Memory,
    observer: &mut dyn ServeObserver,
) -> Result<Finished, ServeError> {
    let workers = Workers::new(launch.program.clone(), Some(KIND));
    interrupts.on_first(workers.interrupter());
    let mut supervisor =
        Supervisor { workers, patience: launch.patience, job, interrupts, memory, struck: None, barren: 0 };
    loop {
        match supervisor.attend(observer)? {
            End::Report(report) => return Ok(supervisor.conclude(*report, Ending::Whole)),
            End::Lost(loss) => {
                supervisor.workers.kill();
                if let Some(reason) = supervisor.bear(*loss)? {
                    return supervisor.give_up(&reason);
                }
            }
            End::Stopped(signal, hit) => {
                supervisor.workers.kill();
                let report = supervisor.memory.stopped(signal, hit.map(|point| *point))?;
                return Ok(supervisor.conclude(report, Ending::Stopped(signal)));
            }
        }
    }
}

struct Supervisor<'a> {
    workers: Workers<Told>,
    patience: Duration,
    job: &'a Job,
    interrupts: &'a Interrupts,
    memory: &'a mut Memory,
    /// The point that cost a worker and is measured once more.
    struck: Option<Asked>,
    /// Workers lost in a row before they came to a point.
    barren: usize,
}

impl Supervisor<'_> {
    /// Starts a worker and attends to it until it ends, one way or the other.
    fn attend(&mut self, observer: &mut dyn ServeObserver) -> Result<End, ServeError> {
        // One that came while nobody listened.
        if let Some(signal) = self.interrupts.signal() {
            return Ok(End::Stopped(signal, None));
        }
        self.workers.start()?;
        let hello = self.workers.hello(self.job.clone());
        self.workers.say(&hello);
        let mut now = Now { doing: "starting".into(), measuring: None, steps: None };
        match self.hear(&mut now) {
            Ok(word) => same_program(&word)?,
            Err(end) => return Ok(end),
        }
        self.hand_on();
        loop {
            let word = match self.hear(&mut now) {
                Ok(word) => word,
                Err(end) => return Ok(end),
            };
            match word {
                Word::Stage { what } => {
                    observer.stage(&what);
                    now.becomes(what);
                }
                Word::Loaded { done, total } => observer.loaded(Bytes(done), Bytes(total)),
                Word::Answer(told) => {
                    if let Some(end) = self.learn(*told, &mut now, observer)? {
                        return Ok(end);
                    }
                }
                // A sign of life.
                Word::Busy { .. } => {}
                Word::Hello { .. } => {
                    return Err(WorkerError::Confused { doing: now.doing() }.into());
                }
            }
        }
    }

    /// Tells a worker what is known.
    fn hand_on(&mut self) {
        let openings =
            self.memory.openings().iter().map(|opening| Handed::Opening(Box::new(opening.clone())));
        let points = self.memory.answered().iter().map(|answered| Handed::Point(Box::new(answered.clone())));
        let known: Vec<Handed> = openings.chain(points).chain([Handed::Begin]).collect();
        for known in known {
            self.workers.say(&Call::<(), _>::Order(Box::new(known)));
        }
    }

    /// Takes in what a worker tells; `Some` where that is its last.
    fn learn(
        &mut self,
        told: Told,
        now: &mut Now,
        observer: &mut dyn ServeObserver,
    ) -> Result<Option<End>, ServeError> {
        match told {
            Told::Opened(opening) => self.memory.learn(Entry::Opened(opening))?,
            Told::Begun(report) => self.memory.learn(Entry::Begun(report))?,
            Told::Measuring { asked, blank, longest_s } => {
                self.barren = 0;
                now.becomes(format!("measuring {}", asked.label));
                now.steps = Some(Steps { longest_s, run: false });
                now.measuring = Some(Answered { asked, point: *blank, lost: false });
            }
            Told::Progress(progress) => {
                if let Some(steps) = &mut now.steps {
                    // Behind the last request the engine is timed again, and a virtual clock runs.
                    steps.run = progress.done < progress.total;
                }
                observer.progress(progress);
            }
            Told::Measured(answered) => {
                now.becomes(format!("preparing what follows {}", answered.asked.label));
                self.memory.learn(Entry::Answered(answered))?;
            }
            Told::Faulty { asked, point, reason } => {
                let blank = now.measuring.take().map(|answered| answered.point);
                let point = point.map(|point| *point).or(blank);
                let point = point.map(|point| Answered { asked, point, lost: false });
                return Ok(Some(Loss::end(reason, point)));
            }
            Told::Report(report) => {
                self.workers.dismiss();
                return Ok(Some(End::Report(report)));
            }
            Told::Refused { reason } => {
                self.workers.dismiss();
                return Err(ServeError::Refused { reason });
            }
        }
        Ok(None)
    }

    /// The worker's next word, or how it ended instead.
    fn hear(&mut self, now: &mut Now) -> Result<Word<Told>, End> {
        let silence = now.silence(self.patience);
        let reason = match self.workers.hear(Instant::now() + silence) {
            Heard::Word(word) => return Ok(word),
            Heard::Interrupted(signal) => {
                let hit = now.measuring.take().map(|answered| Box::new(answered.point));
                return Err(End::Stopped(signal, hit));
            }
            Heard::Ended { how, broken } => format!("the worker {how} while {}{broken}", now.doing()),
            Heard::Nothing => format!(
                "no answer while {}: silent for {:.1} s{}; the worker was killed",
                now.doing(),
                silence.as_secs_f64(),
                now.expected()
            ),
        };
        Err(Loss::end(reason, now.measuring.take()))
    }

    /// Decides what a loss costs; `Some` where it is everything that is still to come.
    fn bear(&mut self, Loss { reason, point }: Loss) -> Result<Option<String>, ServeError> {
        let Some(Answered { asked, mut point, .. }) = point else {
            self.barren += 1;
            if self.barren >= BARREN_WORKERS {
                return Ok(Some(reason));
            }
            self.memory.learn(Entry::Warning(format!("{reason}; another worker went on")))?;
            return Ok(None);
        };
        if self.struck.as_ref() == Some(&asked) {
            if point.result.is_none() {
                point.not_run = Some(reason);
            }
            self.memory.learn(Entry::Answered(Box::new(Answered { asked, point, lost: true })))?;
        } else {
            let warning = format!("{}: {reason}; the point was repeated", asked.label);
            self.memory.learn(Entry::Warning(warning))?;
            self.struck = Some(asked);
        }
        Ok(None)
    }

    /// Ends with what was measured, where anything was.
    fn give_up(self, reason: &str) -> Result<Finished, ServeError> {
        let Some(mut report) = self.memory.so_far() else {
            let reason = format!("{reason}, and so was lost the one before it");
            return Err(ServeError::Refused { reason });
        };
        report.warnings.insert(
            0,
            format!(
                "the benchmark ended early: {reason}, {BARREN_WORKERS} workers in a row; here is what was measured before"
            ),
        );
        Ok(self.conclude(report, Ending::Early))
    }

    /// Adds what the supervisor alone knows.
    fn conclude(self, report: ServeReport, ending: Ending) -> Finished {
        let report = self.memory.complete(report, self.workers.started() > 1);
        Finished { report, lost: self.memory.lost(), ending }
    }
}

/// What a worker is doing.
struct Now {
    doing: String,
    /// The point that is being measured, without a result.
    measuring: Option<Answered>,
    steps: Option<Steps>,
}

/// Steps of a point.
struct Steps {
    longest_s: Option<f64>,
    /// Whether they run now.
    run: bool,
}

impl Now {
    fn becomes(&mut self, doing: String) {
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
    fn silence(&self, patience: Duration) -> Duration {
        let beyond = |seconds: f64| {
            Duration::try_from_secs_f64(seconds * SLOWER_THAN_TIMED).unwrap_or(Duration::from_hours(24))
        };
        self.longest().map_or(patience * STAGE_PATIENCE, |seconds| patience + beyond(seconds))
    }

    fn expected(&self) -> String {
        self.longest().map_or_else(String::new, |seconds| {
            format!(", where the longest step should take {seconds:.3} s")
        })
    }
}

#[cfg(test)]
#[path = "isolated_tests.rs"]
mod tests;
