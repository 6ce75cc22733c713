//! The process that serves: it owns the device and tells everything that its supervisor should know.
//!
//! Enters: a [`Job`], and what earlier workers found out. Leaves: stages, progress, points and the report, on what was stdout. Words
//! are written where an observer in the same process would be told: between two steps, a few times a second.

use std::time::{Duration, Instant};

use super::recorded_points::{EngineRecord, PointKey, RecordedPoint, ReplayQueue};
use super::subprocess::{Job, ServeUpdate, WorkerInput};
use super::{ServeError, ServeObserver};
use crate::engine::Session;
use crate::serve::point::PointError;
use crate::worker::child::{Handshake, WorkerExit, handshake};
use crate::worker::fault_injection::{FaultInjectingSession, FaultSite, InjectedFault};
use crate::worker::messages::{self, SupervisorMessage, WorkerMessage};
use hbmark_core::result::serving::{Point, ServeReport};
use hbmark_core::units::{Bytes, Nanos};
use hbmark_traffic::point::PointSpec;
use hbmark_traffic::serving_loop::Progress;

/// A supervisor hears of progress so often; a bar is drawn no faster.
const REFRESH: Duration = Duration::from_millis(250);

/// Serves one job. `run` makes the report of it, or says in one line why there is none.
///
/// # Errors
/// When it was not started by a supervisor, or the pipes break.
pub fn work(
    run: impl FnOnce(&Job, &mut dyn ServeObserver) -> Result<ServeReport, String>,
) -> Result<(), WorkerExit> {
    let Some(Handshake { mut input, out, config: job, workers }) = handshake::<Job>()? else { return Ok(()) };
    let (mut openings, mut points) = (Vec::new(), Vec::new());
    loop {
        match messages::read(&mut input)? {
            None => return Ok(()),
            Some(SupervisorMessage::<(), _>::Request(handed)) => match *handed {
                WorkerInput::EngineRecord(opening) => openings.push(*opening),
                WorkerInput::Point(point) => points.push(*point),
                WorkerInput::Begin => break,
            },
            Some(SupervisorMessage::Hello { .. }) => return Err(WorkerExit::NotAWorker),
        }
    }
    let planted = InjectedFault::from_environment();
    let fault = planted.as_ref().ok().cloned().flatten();
    let mut told = ForwardingObserver {
        out,
        past: ReplayQueue::new(openings, points),
        measuring: None,
        said: None,
        ended: false,
        injected_fault: fault.clone().and_then(|fault| fault.for_worker(workers)),
        planted: fault.map(|fault| fault.warning()),
        now: FaultSite::default(),
        faulty: false,
    };
    let made = planted.and_then(|_| {
        if let Some(fault) = &told.injected_fault {
            fault.trigger_at("begin");
        }
        run(&job, &mut told)
    });
    if told.faulty {
        // The supervisor knows, and another worker goes on.
        return Ok(());
    }
    let last = match made {
        Ok(report) => ServeUpdate::Report(Box::new(told.warned(report))),
        Err(reason) => ServeUpdate::Refused { reason },
    };
    told.tell(last);
    Ok(())
}

/// Tells the supervisor how it goes on, and the benchmark what is known.
struct ForwardingObserver {
    out: std::fs::File,
    past: ReplayQueue,
    measuring: Option<PointKey>,
    /// When progress was told last; `None` for a point that has told none.
    said: Option<Instant>,
    /// The last measured request of the point is done.
    ended: bool,
    injected_fault: Option<InjectedFault>,
    /// What a report says of a planted fault.
    planted: Option<String>,
    now: FaultSite,
    /// A fault of the device was told: this process is of no use any more.
    faulty: bool,
}

impl ForwardingObserver {
    fn send(&mut self, word: &WorkerMessage<ServeUpdate>) {
        if messages::write(&mut self.out, word).is_err() {
            // Nobody listens: the supervisor is gone, and where the kernel did not say so, this does.
            std::process::exit(2);
        }
    }

    fn tell(&mut self, told: ServeUpdate) {
        self.send(&WorkerMessage::Response(Box::new(told)));
    }

    fn warned(&self, mut report: ServeReport) -> ServeReport {
        report.warnings.extend(self.planted.clone());
        report
    }
}

impl ServeObserver for ForwardingObserver {
    fn stage(&mut self, what: &str) {
        self.send(&WorkerMessage::Stage { what: what.to_owned() });
        if what == super::LOADING
            && let Some(fault) = &self.injected_fault
        {
            fault.trigger_at("load");
        }
    }

    fn progress(&mut self, progress: Progress) {
        // The end is told at once, and only once at once: the engine is timed again behind it.
        let done = progress.done >= progress.total;
        let last = done && !self.ended;
        self.ended |= done;
        if last || self.said.is_none_or(|said| said.elapsed() >= REFRESH) {
            self.tell(ServeUpdate::Progress(progress));
            self.said = Some(Instant::now());
        }
    }

    fn alive(&mut self) {
        if self.said.is_none_or(|said| said.elapsed() >= REFRESH) {
            self.send(&WorkerMessage::Busy { seconds: 0.0 });
            self.said = Some(Instant::now());
        }
    }

    fn loaded(&mut self, done: Bytes, total: Bytes) {
        if done >= total || self.said.is_none_or(|said| said.elapsed() >= REFRESH) {
            self.send(&WorkerMessage::Loaded { done: done.0, total: total.0 });
            self.said = Some(Instant::now());
        }
    }

    fn session(&mut self, session: Box<dyn Session>) -> Box<dyn Session> {
        match &self.injected_fault {
            Some(fault) => {
                Box::new(FaultInjectingSession { session, fault: fault.clone(), now: self.now.clone() })
            }
            None => session,
        }
    }

    fn opened(&mut self, found: EngineRecord) -> Result<EngineRecord, ServeError> {
        if let Some(known) = self.past.opening(&found)? {
            return Ok(known);
        }
        self.tell(ServeUpdate::Opened(Box::new(found.clone())));
        Ok(found)
    }

    fn begun(&mut self, report: &ServeReport) -> Result<(), ServeError> {
        let report = self.warned(report.clone());
        self.tell(ServeUpdate::Begun(Box::new(report)));
        Ok(())
    }

    fn recall(&mut self, spec: &PointSpec, longest: Option<Nanos>) -> Result<Option<Point>, ServeError> {
        let (asked, known) = self.past.point(spec)?;
        if known.is_some() {
            return Ok(known);
        }
        let (plan, measured) = spec.plan()?;
        let blank = Box::new(spec.without_result(&plan, &measured));
        self.now.enter(&spec.label);
        (self.said, self.ended) = (None, false);
        self.measuring = Some(asked.clone());
        // A prediction that is no number is none.
        let longest_s = longest.map(Nanos::seconds).filter(|seconds| seconds.is_finite());
        self.tell(ServeUpdate::Measuring { asked, blank, longest_s });
        Ok(None)
    }

    fn measured(&mut self, point: &Result<Point, PointError>, fault: Option<&str>) -> Result<(), ServeError> {
        self.now.enter("");
        let Some(asked) = self.measuring.take() else { return Ok(()) };
        match (fault, point) {
            (Some(fault), point) => {
                self.faulty = true;
                let reason = format!("{fault} (while measuring {})", asked.label);
                let point = point.as_ref().ok().cloned().map(Box::new);
                self.tell(ServeUpdate::Faulty { asked, point, reason: reason.clone() });
                Err(ServeError::Refused { reason })
            }
            (None, Ok(point)) => {
                self.tell(ServeUpdate::Measured(Box::new(RecordedPoint {
                    asked,
                    point: point.clone(),
                    lost: false,
                })));
                Ok(())
            }
            // The benchmark ends by it, and says why itself.
            (None, Err(_)) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::tests::report_told;
    use crate::serve::Mode;

    /// Asks like any worker, and goes on without what is refused.
    struct Asks {
        teller: ForwardingObserver,
        refused: Vec<String>,
    }

    impl ServeObserver for Asks {
        fn stage(&mut self, _what: &str) {}
        fn progress(&mut self, _progress: Progress) {}
        fn recall(&mut self, spec: &PointSpec, longest: Option<Nanos>) -> Result<Option<Point>, ServeError> {
            let recalled = self.teller.recall(spec, longest);
            Ok(recalled.unwrap_or_else(|error| {
                self.refused.push(error.to_string());
                None
            }))
        }
        fn measured(
            &mut self,
            point: &Result<Point, PointError>,
            fault: Option<&str>,
        ) -> Result<(), ServeError> {
            self.teller.measured(point, fault)
        }
    }

    fn asks(points: &[RecordedPoint]) -> Asks {
        let teller = ForwardingObserver {
            out: tempfile::tempfile().unwrap(),
            past: ReplayQueue::new([], points.to_vec()),
            measuring: None,
            said: None,
            ended: false,
            injected_fault: None,
            planted: None,
            now: FaultSite::default(),
            faulty: false,
        };
        Asks { teller, refused: Vec::new() }
    }

    fn told(asks: &mut Asks) -> Vec<ServeUpdate> {
        use std::io::Seek;
        asks.teller.out.rewind().unwrap();
        let mut input = std::io::BufReader::new(&asks.teller.out);
        let next = std::iter::from_fn(|| messages::read::<WorkerMessage<ServeUpdate>>(&mut input).unwrap());
        let tells = next.map(|word| match word {
            WorkerMessage::Response(told) => *told,
            other => panic!("{other:?}"),
        });
        tells.collect()
    }

    #[test]
    fn a_known_point_is_not_told_again_and_another_one_in_its_place_is_refused() {
        let mode = || Mode::Sweep { variable: "rate".into(), values: vec![2.0, 4.0] };
        let mut first = asks(&[]);
        let whole = report_told(mode(), 1.0, &mut first);
        let answered: Vec<RecordedPoint> = told(&mut first)
            .into_iter()
            .filter_map(
                |told| if let ServeUpdate::Measured(answered) = told { Some(*answered) } else { None },
            )
            .collect();
        assert_eq!(answered.len(), 2);

        let mut second = asks(&answered[..1]);
        assert_eq!(report_told(mode(), 1.0, &mut second), whole);
        let tells = told(&mut second);
        assert!(
            matches!(&tells[..], [ServeUpdate::Measuring { asked, .. }, ServeUpdate::Measured(_)] if asked.ordinal == 1)
        );

        let other = Mode::Sweep { variable: "rate".into(), values: vec![3.0, 4.0] };
        let mut third = asks(&answered[..1]);
        report_told(other, 1.0, &mut third);
        let [refused] = &third.refused[..] else { panic!("{:?}", third.refused) };
        assert!(refused.contains("had measured `rate 2` (point 1, seed"), "{refused}");
        assert!(refused.contains("is asked for `rate 3` (point 1, seed"), "{refused}");
    }
}
