//! What one process found out, for another to go on with: openings of an engine, and points.
//!
//! Enters: what a benchmark learns. Leaves: plain data that goes through a pipe. A point is known again by what was asked, never by its
//! place alone.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::extras::{LoraSummary, StructuredSummary};
use crate::measure::environment::Environment;
use crate::serve::adapters::AdapterMix;
use crate::serve::point::{Point, PointSpec};
use crate::serve::scheduler::SchedulerConfig;
use crate::serve::step_model::Calibration;

/// An engine, loaded and timed: what rates, warm-ups and the report go by.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Opening {
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
pub struct Asked {
    /// Points that were asked for before it.
    pub ordinal: usize,
    pub label: String,
    pub seed: u64,
    /// sha256 over all that was asked, the trace included.
    pub hash: String,
}

impl Asked {
    pub(super) fn of(ordinal: usize, spec: &PointSpec) -> Self {
        let mut hasher = Sha256::new();
        // A hasher takes every byte, and a specification has no map whose keys are not text.
        let written = serde_json::to_writer(&mut hasher, spec);
        debug_assert!(written.is_ok(), "a specification is plain data");
        let hash = format!("{:x}", hasher.finalize());
        Self { ordinal, label: spec.label.clone(), seed: spec.seed, hash }
    }
}

impl std::fmt::Display for Asked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let hash: String = self.hash.chars().take(12).collect();
        write!(f, "`{}` (point {}, seed {}, hash {hash})", self.label, self.ordinal + 1, self.seed)
    }
}

/// A point that needs no measuring any more: it was measured, or it was given up and says why.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Answered {
    pub asked: Asked,
    pub point: Point,
}
