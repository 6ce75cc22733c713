//! A serving benchmark in this very process, which keeps what it learns as a supervisor would.
//!
//! Enters: what a [`super::serve`] needs, and what is known from before. Leaves: the report, or as much of it as there was when a signal
//! came. A signal is heeded between two points.

use super::checkpoint::{CheckpointEntry, ServeCheckpoint};
use super::recorded_points::{EngineRecord, PointKey, RecordedPoint, ReplayQueue};
use super::{Completion, Finished, ServeConfig, ServeError, ServeObserver};
use crate::engine::Session;
use crate::serve::point::PointError;
use crate::weights::OpenModel;
use crate::worker::signals::Interrupts;
use hbmark_core::result::serving::{Point, ServeReport};
use hbmark_core::units::{Bytes, Nanos};
use hbmark_traffic::point::PointSpec;
use hbmark_traffic::serving_loop::Progress;

/// Runs a serving benchmark in this process.
///
/// # Errors
/// As [`super::serve`], and when a signal comes before anything was measured.
pub fn serve(
    config: &ServeConfig,
    model: &OpenModel,
    command: &str,
    interrupts: &Interrupts,
    checkpoint: &mut ServeCheckpoint,
    observer: &mut dyn ServeObserver,
) -> Result<Finished, ServeError> {
    let past = checkpoint.past();
    let mut keeper = CheckpointingObserver { observer, checkpoint, past, interrupts, asked: None };
    let (report, ending) = match super::serve(config, model, command, &mut keeper) {
        Ok(report) => (report, Completion::Whole),
        Err(ServeError::Interrupted { signal }) => {
            (checkpoint.stopped(signal, None)?, Completion::Stopped(signal))
        }
        Err(error) => return Err(error),
    };
    Ok(Finished { report: checkpoint.complete(report, false), lost: checkpoint.lost(), ending })
}

/// Passes on what it hears, and keeps it.
struct CheckpointingObserver<'a> {
    observer: &'a mut dyn ServeObserver,
    checkpoint: &'a mut ServeCheckpoint,
    past: ReplayQueue,
    interrupts: &'a Interrupts,
    /// The point that is being measured.
    asked: Option<PointKey>,
}

impl CheckpointingObserver<'_> {
    fn check_interrupt(&self) -> Result<(), ServeError> {
        self.interrupts.signal().map_or(Ok(()), |signal| Err(ServeError::Interrupted { signal }))
    }
}

impl ServeObserver for CheckpointingObserver<'_> {
    fn stage(&mut self, what: &str) {
        self.observer.stage(what);
    }

    fn progress(&mut self, progress: Progress) {
        self.observer.progress(progress);
    }

    fn alive(&mut self) {
        self.observer.alive();
    }

    fn loaded(&mut self, done: Bytes, total: Bytes) {
        self.observer.loaded(done, total);
    }

    fn session(&mut self, session: Box<dyn Session>) -> Box<dyn Session> {
        self.observer.session(session)
    }

    fn opened(&mut self, found: EngineRecord) -> Result<EngineRecord, ServeError> {
        self.check_interrupt()?;
        if let Some(known) = self.past.opening(&found)? {
            return Ok(known);
        }
        self.checkpoint.record(CheckpointEntry::Opened(Box::new(found.clone())))?;
        Ok(found)
    }

    fn begun(&mut self, report: &ServeReport) -> Result<(), ServeError> {
        self.checkpoint.record(CheckpointEntry::Begun(Box::new(report.clone())))
    }

    fn recall(&mut self, spec: &PointSpec, _longest: Option<Nanos>) -> Result<Option<Point>, ServeError> {
        self.check_interrupt()?;
        let (asked, known) = self.past.point(spec)?;
        self.asked = known.is_none().then_some(asked);
        Ok(known)
    }

    fn measured(
        &mut self,
        point: &Result<Point, PointError>,
        _fault: Option<&str>,
    ) -> Result<(), ServeError> {
        // A benchmark that ends by its point says why itself.
        let (Some(asked), Ok(point)) = (self.asked.take(), point) else { return Ok(()) };
        self.checkpoint.record(CheckpointEntry::Point(Box::new(RecordedPoint {
            asked,
            point: point.clone(),
            lost: false,
        })))
    }
}
