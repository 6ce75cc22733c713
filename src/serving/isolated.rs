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
use super::{ServeError, ServeObserver};
use crate::report::serving::ServeReport;
use crate::rig::wire::{Call, Word};
use crate::rig::workers::{Heard, Launch, WorkerError, Workers, same_program};
use crate::serve::point::Point;
use crate::serve::run::Progress;
use crate::units::Bytes;

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
pub(super) enum Past {
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

/// A benchmark that came to an end.
#[derive(Debug, Clone, PartialEq)]
pub struct Finished {
    pub report: ServeReport,
    /// Points that were given up, and whether the end was one of the benchmark's own.
    pub lost: usize,
    pub complete: bool,
}

/// How a worker's work ended.
enum End {
    Report(Box<ServeReport>),
    Lost(Box<Loss>),
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
/// When no worker can be started, when two are lost one after the other before they come to a point and none was measured, and when the
/// benchmark itself is refused.
pub fn serve(launch: &Launch, job: &Job, observer: &mut dyn ServeObserver) -> Result<Finished, ServeError> {
    let mut supervisor = Supervisor {
        workers: Workers::new(launch.program.clone(), Some(KIND)),
        patience: launch.patience,
        job,
        openings: Vec::new(),
        answered: Vec::new(),
        begun: None,
        struck: None,
        barren: 0,
        lost: 0,
        warnings: Vec::new(),
    };
    loop {
        match supervisor.attend(observer)? {
            End::Report(report) => return Ok(supervisor.conclude(*report, true)),
            End::Lost(loss) => {
                supervisor.workers.kill();
                if let Some(reason) = supervisor.bear(*loss) {
                    return supervisor.give_up(&reason);
                }
            }
        }
    }
}

struct Supervisor<'a> {
    workers: Workers<Told>,
    patience: Duration,
    job: &'a Job,
    openings: Vec<Opening>,
    answered: Vec<Answered>,
    begun: Option<Box<ServeReport>>,
    /// The point that cost a worker and is measured once more.
    struck: Option<Asked>,
    /// Workers lost in a row before they came to a point.
    barren: usize,
    lost: usize,
    warnings: Vec<String>,
}

impl Supervisor<'_> {
    /// Starts a worker and attends to it until it ends, one way or the other.
    fn attend(&mut self, observer: &mut dyn ServeObserver) -> Result<End, ServeError> {
        self.workers.start()?;
        let hello = self.workers.hello(self.job.clone());
        self.workers.say(&hello);
        let mut now = Now { doing: "starting".into(), measuring: None, steps: None };
        match self.hear(&now) {
            Ok(word) => same_program(&word)?,
            Err(reason) => return Ok(Loss::end(reason, None)),
        }
        self.hand_on();
        loop {
            let word = match self.hear(&now) {
                Ok(word) => word,
                Err(reason) => return Ok(Loss::end(reason, now.measuring)),
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
        let openings = self.openings.iter().map(|opening| Past::Opening(Box::new(opening.clone())));
        let points = self.answered.iter().map(|answered| Past::Point(Box::new(answered.clone())));
        let past: Vec<Past> = openings.chain(points).chain([Past::Begin]).collect();
        for known in past {
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
            Told::Opened(opening) => self.openings.push(*opening),
            Told::Begun(report) => {
                self.begun.get_or_insert(report);
            }
            Told::Measuring { asked, blank, longest_s } => {
                self.barren = 0;
                now.becomes(format!("measuring {}", asked.label));
                now.steps = Some(Steps { longest_s, run: false });
                now.measuring = Some(Answered { asked, point: *blank });
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
                self.answered.push(*answered);
            }
            Told::Faulty { asked, point, reason } => {
                let blank = now.measuring.take().map(|answered| answered.point);
                let point = point.map(|point| *point).or(blank);
                let point = point.map(|point| Answered { asked, point });
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

    /// The worker's next word, or how it was lost.
    fn hear(&mut self, now: &Now) -> Result<Word<Told>, String> {
        let silence = now.silence(self.patience);
        match self.workers.hear(Instant::now() + silence) {
            Heard::Word(word) => Ok(word),
            Heard::Ended { how, broken } => Err(format!("the worker {how} while {}{broken}", now.doing())),
            // Nobody asked to be told of signals.
            Heard::Nothing | Heard::Interrupted(_) => Err(format!(
                "no answer while {}: silent for {:.1} s{}; the worker was killed",
                now.doing(),
                silence.as_secs_f64(),
                now.expected()
            )),
        }
    }

    /// Decides what a loss costs; `Some` where it is everything that is still to come.
    fn bear(&mut self, Loss { reason, point }: Loss) -> Option<String> {
        let Some(Answered { asked, mut point }) = point else {
            self.barren += 1;
            if self.barren >= BARREN_WORKERS {
                return Some(reason);
            }
            self.warnings.push(format!("{reason}; another worker went on"));
            return None;
        };
        if self.struck.as_ref() == Some(&asked) {
            self.lost += 1;
            if point.result.is_none() {
                point.not_run = Some(reason);
            }
            self.answered.push(Answered { asked, point });
        } else {
            self.warnings.push(format!("{}: {reason}; the point was repeated", asked.label));
            self.struck = Some(asked);
        }
        None
    }

    /// Ends with what was measured, where anything was.
    fn give_up(mut self, reason: &str) -> Result<Finished, ServeError> {
        let Some(begun) = self.begun.take().filter(|_| !self.answered.is_empty()) else {
            let reason = format!("{reason}, and so was lost the one before it");
            return Err(ServeError::Refused { reason });
        };
        let points: Vec<Point> = self.answered.iter().map(|answered| answered.point.clone()).collect();
        self.warnings.push(format!(
            "the benchmark ended early: {reason}, {BARREN_WORKERS} workers in a row; here is what was measured before"
        ));
        Ok(self.conclude(ServeReport { points, ..*begun }, false))
    }

    /// Adds what the supervisor alone knows.
    fn conclude(self, mut report: ServeReport, complete: bool) -> Finished {
        if let Some(begun) = self.begun {
            report.started_at = begun.started_at;
        }
        if self.workers.started() > 1 {
            self.warnings.iter().rev().for_each(|warning| report.warnings.insert(0, warning.clone()));
            if self.openings.iter().any(|opening| opening.calibration.is_some()) {
                report.warnings.push(
                    "the engine was loaded and its steps were timed anew for points after a lost worker; rates and warm-ups go by the \
                     first times"
                        .into(),
                );
            }
        }
        Finished { report, lost: self.lost, complete }
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
