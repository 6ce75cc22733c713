//! All that is known of a serving benchmark so far, kept in memory and, where results go into a folder, in a journal there.
//!
//! Enters: entries, as they become known, and those of a process that ended. Leaves: what another process needs to go on, and the report
//! of as much as there is. It measures nothing and asks nobody.

use std::collections::BTreeMap;
use std::ffi::OsString;

use serde::{Deserialize, Serialize};

use super::recorded_points::{EngineRecord, RecordedPoint, ReplayQueue};
use super::{ServeError, signal_name};
use crate::worker::journal::{Journal, JournaledPlan};
use hbmark_core::result::Cause;
use hbmark_core::result::serving::{Point, ServeReport};

/// What a serving benchmark is to do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ServePlan {
    /// The arguments of this program, its name left out.
    pub arguments: Vec<OsString>,
    /// What they and the environment mean.
    pub config: BTreeMap<String, serde_json::Value>,
    /// Of the model's dimensions and tensors.
    pub model_hash: String,
}

impl JournaledPlan for ServePlan {
    const SUBCOMMAND: &'static str = "serve";
}

/// Something that became known.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckpointEntry {
    Opened(Box<EngineRecord>),
    /// The report, with everything but points.
    Begun(Box<ServeReport>),
    Point(Box<RecordedPoint>),
    /// What the report has to say beside what it measures.
    Warning(String),
}

/// What is known.
#[derive(Debug, Default)]
pub struct ServeCheckpoint {
    openings: Vec<EngineRecord>,
    begun: Option<Box<ServeReport>>,
    answered: Vec<RecordedPoint>,
    warnings: Vec<String>,
    journal: Option<Journal>,
    /// Points that a process before this one measured.
    resumed: usize,
}

impl ServeCheckpoint {
    /// A memory of what a journal holds, which writes on into it.
    #[must_use]
    pub fn journaled(journal: Journal, entries: Vec<CheckpointEntry>) -> Self {
        let mut checkpoint = Self::default();
        for entry in entries {
            checkpoint.take(entry);
        }
        checkpoint.resumed = checkpoint.answered.len();
        checkpoint.journal = Some(journal);
        checkpoint
    }

    /// Keeps an entry; on the disk first.
    ///
    /// # Errors
    /// When the journal cannot be written.
    pub(super) fn record(&mut self, entry: CheckpointEntry) -> Result<(), ServeError> {
        // The first one tells when it all began.
        if matches!(&entry, CheckpointEntry::Begun(_)) && self.begun.is_some() {
            return Ok(());
        }
        if let Some(journal) = &mut self.journal {
            journal.write(&entry, matches!(&entry, CheckpointEntry::Point(_)))?;
        }
        self.take(entry);
        Ok(())
    }

    fn take(&mut self, entry: CheckpointEntry) {
        match entry {
            CheckpointEntry::Opened(opening) => self.openings.push(*opening),
            CheckpointEntry::Begun(report) => {
                self.begun.get_or_insert(report);
            }
            CheckpointEntry::Point(answered) => self.answered.push(*answered),
            CheckpointEntry::Warning(warning) => self.warnings.push(warning),
        }
    }

    /// Points that are known.
    #[must_use]
    pub fn points(&self) -> usize {
        self.answered.len()
    }

    pub(super) fn openings(&self) -> &[EngineRecord] {
        &self.openings
    }

    pub(super) fn answered(&self) -> &[RecordedPoint] {
        &self.answered
    }

    /// What is known, to be asked for again.
    pub(super) fn past(&self) -> ReplayQueue {
        ReplayQueue::new(self.openings.iter().cloned(), self.answered.iter().cloned())
    }

    /// Points that were given up.
    pub(super) fn lost(&self) -> usize {
        self.answered.iter().filter(|answered| answered.lost).count()
    }

    /// The report of as much as there is, where anything was measured.
    pub(super) fn partial_report(&self) -> Option<ServeReport> {
        let begun = self.begun.as_ref().filter(|_| !self.answered.is_empty())?;
        let points = self.answered.iter().map(|answered| answered.point.clone()).collect();
        Some(ServeReport { points, ..(**begun).clone() })
    }

    /// What a signal leaves: what was measured, and the point that it hit.
    pub(super) fn stopped(&self, signal: i32, hit: Option<Point>) -> Result<ServeReport, ServeError> {
        let mut report = self.partial_report().ok_or(ServeError::Interrupted { signal })?;
        let by = signal_name(signal);
        let measured = self.answered.len();
        report.points.extend(hit.map(|point| {
            let not_run = Some(Cause::Interrupted { signal: by.to_owned() });
            Point { not_run, ..point }
        }));
        report.warnings.push(format!(
            "the benchmark was stopped by {by} after {measured} points: what would have followed is missing"
        ));
        Ok(report)
    }

    /// Adds to a report what only the memory knows. `anew`: the engine was opened more than once for the same points.
    pub(super) fn complete(&self, mut report: ServeReport, anew: bool) -> ServeReport {
        if let Some(begun) = &self.begun {
            report.started_at.clone_from(&begun.started_at);
        }
        report.warnings.splice(0..0, self.warnings.iter().cloned());
        if (anew || self.resumed > 0) && self.openings.iter().any(|opening| opening.calibration.is_some()) {
            let after = if self.resumed > 0 { "the first start" } else { "a lost worker" };
            report.warnings.push(format!(
                "the engine was loaded and its steps were timed anew for points after {after}; rates and warm-ups go by the first times"
            ));
        }
        report
    }

    /// The journal, when the benchmark is over.
    #[must_use]
    pub fn into_journal(self) -> Option<Journal> {
        self.journal
    }
}
