//! Executors: from the scheduler's batch to tokens, on an engine or by a model of step times.
//!
//! Enters: a [`Scheduler`] with a batch in flight. Leaves: one token per sequence, and the time of each phase of the host's work.

use crate::clock::{Clock, VirtualClock};
use crate::scheduler::{ScheduledSequence, Scheduler};
use crate::step_model::StepModel;
use hbmark_core::units::Nanos;

/// Why a step gave no tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepFailure {
    /// The engine's error.
    pub message: String,
    /// The device failed: nothing it does afterwards is reliable.
    pub device_unusable: bool,
}

/// The host's time of a step by phase, in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Phases {
    /// Filling the engine's batch from the scheduler's.
    pub build: f64,
    /// Launching: on a GPU the enqueueing, on a CPU the part of the call that is not the step itself.
    pub launch: f64,
    /// The step: on a CPU its own time, on a GPU the wait for it.
    pub device: f64,
    /// Sampling.
    pub sample: f64,
    /// Computing and applying the masks of grammars.
    pub mask: f64,
    pub mask_apply: f64,
}

impl std::ops::AddAssign for Phases {
    fn add_assign(&mut self, other: Self) {
        self.build += other.build;
        self.launch += other.launch;
        self.device += other.device;
        self.sample += other.sample;
        self.mask += other.mask;
        self.mask_apply += other.mask_apply;
    }
}

/// Runs batches.
pub trait Executor {
    /// Runs the batch in flight and leaves one token per sequence in `tokens`.
    ///
    /// # Errors
    /// When the engine fails.
    fn run(
        &mut self,
        scheduler: &Scheduler,
        clock: &mut dyn Clock,
        tokens: &mut Vec<u32>,
    ) -> Result<Phases, StepFailure>;
}

/// Simulated steps: each takes the time that a model predicts, and computes nothing.
#[derive(Debug)]
pub struct PredictedExecutor {
    model: StepModel,
    clock: VirtualClock,
    /// Time of one more adapter in a batch.
    adapter: Nanos,
}

impl PredictedExecutor {
    /// An executor that advances a clock by predicted times.
    pub fn new(model: StepModel, clock: &VirtualClock) -> Self {
        Self { model, clock: clock.clone(), adapter: Nanos(0.0) }
    }

    /// Adds a time for every distinct adapter of a batch.
    pub fn with_adapter_time(self, adapter: Nanos) -> Self {
        Self { adapter, ..self }
    }
}

impl Executor for PredictedExecutor {
    fn run(
        &mut self,
        scheduler: &Scheduler,
        _clock: &mut dyn Clock,
        tokens: &mut Vec<u32>,
    ) -> Result<Phases, StepFailure> {
        let batch = &scheduler.batch().scheduled;
        let time = self.model.step(batch.iter().map(ScheduledSequence::part));
        let time = Nanos(time.0 + self.adapter.0 * scheduler.batch().adapters as f64);
        self.clock.advance(time);
        // Made-up tokens that differ between requests, so that they share no prefix by accident.
        tokens.extend(batch.iter().map(|seq| u32::try_from(seq.key & 0xffff).unwrap_or(0)));
        Ok(Phases { device: Nanos(time.0).0, ..Phases::default() })
    }
}
