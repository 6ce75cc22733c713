//! What one process found out, for another to go on with: openings of an engine, and points.
//!
//! Enters: what a benchmark learns. Leaves: plain data that goes through a pipe and into a journal, and what of it is asked for again. A
//! point is known again by what was asked, never by its place alone.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::ServeError;
use hbmark_core::result::Environment;
use hbmark_core::result::serving::{LoraSummary, Point, SchedulerConfig, StructuredSummary};
use hbmark_traffic::adapters::AdapterMix;
use hbmark_traffic::point::PointSpec;
use hbmark_traffic::step_model::Calibration;

/// An engine, loaded and timed: what rates, warm-ups and the report go by.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EngineRecord {
    /// As asked for.
    pub block_size: Option<usize>,
    pub environment: Environment,
    pub scheduler: SchedulerConfig,
    pub calibration: Option<Calibration>,
    pub lora: Option<(LoraSummary, AdapterMix)>,
    pub structured: Option<StructuredSummary>,
}

/// Which point was asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PointKey {
    /// Points that were asked for before it.
    pub ordinal: usize,
    pub label: String,
    pub seed: u64,
    /// sha256 over all that was asked, the trace included.
    pub hash: String,
}

impl PointKey {
    pub(super) fn of(ordinal: usize, spec: &PointSpec) -> Self {
        let mut hasher = Sha256::new();
        // A hasher takes every byte, and a specification has no map whose keys are not text.
        let written = serde_json::to_writer(&mut hasher, spec);
        debug_assert!(written.is_ok(), "a specification is plain data");
        let hash = format!("{:x}", hasher.finalize());
        Self { ordinal, label: spec.label.clone(), seed: spec.seed, hash }
    }
}

impl std::fmt::Display for PointKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let hash: String = self.hash.chars().take(12).collect();
        write!(f, "`{}` (point {}, seed {}, hash {hash})", self.label, self.ordinal + 1, self.seed)
    }
}

/// A point that needs no measuring any more: it was measured, or it was given up and says why.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecordedPoint {
    pub asked: PointKey,
    pub point: Point,
    /// It cost one worker after the other, and is as the last one left it.
    pub lost: bool,
}

/// What was found out before, in the order in which it is asked for again.
#[derive(Debug, Default)]
pub(super) struct ReplayQueue {
    openings: VecDeque<EngineRecord>,
    points: VecDeque<RecordedPoint>,
    /// Points asked for so far.
    asked: usize,
}

impl ReplayQueue {
    pub(super) fn new(
        openings: impl IntoIterator<Item = EngineRecord>,
        points: impl IntoIterator<Item = RecordedPoint>,
    ) -> Self {
        Self { openings: openings.into_iter().collect(), points: points.into_iter().collect(), asked: 0 }
    }

    /// What is known of an engine that was just opened.
    pub(super) fn opening(&mut self, found: &EngineRecord) -> Result<Option<EngineRecord>, ServeError> {
        let Some(known) = self.openings.pop_front() else { return Ok(None) };
        if known.block_size != found.block_size {
            return Err(ServeError::EngineMismatch { known: known.block_size, asked: found.block_size });
        }
        match known.environment.difference(&found.environment) {
            Some((what, was, is)) => Err(ServeError::MachineMismatch { what, was, is }),
            None => Ok(Some(known)),
        }
    }

    /// Which point is asked for, and what is known of it.
    pub(super) fn point(&mut self, spec: &PointSpec) -> Result<(PointKey, Option<Point>), ServeError> {
        let asked = PointKey::of(self.asked, spec);
        self.asked += 1;
        match self.points.pop_front() {
            Some(known) if known.asked != asked => {
                Err(ServeError::PointMismatch { known: known.asked.to_string(), asked: asked.to_string() })
            }
            known => Ok((asked, known.map(|known| known.point))),
        }
    }
}
