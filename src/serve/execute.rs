//! From the scheduler's batch to tokens: a real session, or a prediction of how long one would take.
//!
//! Enters: a [`Scheduler`] with a batch in flight. Leaves: one token per part, and how long each phase of the host's work took.

use super::clock::Clock;
use super::sampler::Sampler;
use super::scheduler::Scheduler;
use super::step_model::StepModel;
use crate::engine::scripted::VirtualClock;
use crate::engine::{EngineError, Ragged, SequenceId, SequenceStep, Session, StepBatch};
use crate::units::Nanos;

/// Where the host's time of a step went, in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Phases {
    /// Filling the engine's batch from the scheduler's.
    pub build: f64,
    /// Handing it over: on a GPU the enqueueing, on a CPU the part of the call that is not the step itself.
    pub launch: f64,
    /// The step: on a CPU its own time, on a GPU the wait for it.
    pub device: f64,
    /// Choosing tokens.
    pub sample: f64,
}

/// Runs batches.
pub trait Executor {
    /// Runs the batch in flight and leaves one token per part in `tokens`.
    ///
    /// # Errors
    /// When the engine fails.
    fn run(
        &mut self,
        scheduler: &Scheduler,
        clock: &mut dyn Clock,
        tokens: &mut Vec<u32>,
    ) -> Result<Phases, EngineError>;
}

/// A session under the scheduler.
pub struct SessionExecutor<'a> {
    session: &'a mut dyn Session,
    sampler: Sampler,
    batch: StepBatch,
    /// Parts of earlier batches, whose buffers are used again.
    spare: Vec<SequenceStep>,
    ragged: Ragged,
    paged: bool,
}

impl std::fmt::Debug for SessionExecutor<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SessionExecutor").field("ragged", &self.ragged).finish_non_exhaustive()
    }
}

impl<'a> SessionExecutor<'a> {
    /// Runs batches on a session. One that cannot run sequences of different length in one pass gets them one after the other.
    #[must_use]
    pub fn new(session: &'a mut dyn Session, sampler: Sampler) -> Self {
        let (ragged, paged) = (session.capabilities().ragged, session.capabilities().paged);
        Self { session, sampler, batch: StepBatch::default(), spare: Vec::new(), ragged, paged }
    }

    /// Fills the batch with a range of the scheduler's parts.
    fn build(&mut self, scheduler: &Scheduler, range: std::ops::Range<usize>) {
        self.spare.append(&mut self.batch.sequences);
        for part in &scheduler.batch().parts[range] {
            let mut step = self.spare.pop().unwrap_or_else(|| SequenceStep {
                sequence: SequenceId(0),
                tokens: Vec::new(),
                start_position: 0,
                block_table: Vec::new(),
            });
            step.sequence = SequenceId(part.sequence);
            step.start_position = part.start;
            step.tokens.clear();
            step.tokens.extend_from_slice(scheduler.tokens(part));
            step.block_table.clear();
            if self.paged {
                step.block_table.extend_from_slice(scheduler.block_table(part));
            }
            self.batch.sequences.push(step);
        }
    }

    fn step(
        &mut self,
        scheduler: &Scheduler,
        range: std::ops::Range<usize>,
        clock: &dyn Clock,
        tokens: &mut Vec<u32>,
    ) -> Result<Phases, EngineError> {
        let begin = clock.now().0;
        self.build(scheduler, range.clone());
        let built = clock.now().0;
        self.session.timeline().mark()?;
        self.session.step(&self.batch)?;
        self.session.timeline().mark()?;
        let launched = clock.now().0;
        // Draining waits for the device.
        let marks = self.session.timeline().drain()?;
        let span = marks.last().map_or(0.0, |m| m.0);
        let waited = clock.now().0;
        if self.sampler.is_greedy() {
            tokens.extend(self.session.next_tokens()?);
        } else {
            for (part, logits) in scheduler.batch().parts[range].iter().zip(self.session.logits()?) {
                // A token is a function of seed, request and position, whatever it was batched with.
                tokens.push(self.sampler.sample(&logits, part.key, part.start + part.tokens));
            }
        }
        // A synchronous step spends its own time inside the call.
        let inside = span.min(launched - built);
        Ok(Phases {
            build: built - begin,
            launch: (launched - built - inside).max(0.0),
            device: inside + (waited - launched),
            sample: clock.now().0 - waited,
        })
    }
}

impl Executor for SessionExecutor<'_> {
    fn run(
        &mut self,
        scheduler: &Scheduler,
        clock: &mut dyn Clock,
        tokens: &mut Vec<u32>,
    ) -> Result<Phases, EngineError> {
        for sequence in &scheduler.batch().dropped {
            self.session.release(SequenceId(*sequence));
        }
        let parts = scheduler.batch().parts.len();
        if self.ragged == Ragged::Fused {
            return self.step(scheduler, 0..parts, clock, tokens);
        }
        let mut all = Phases::default();
        for index in 0..parts {
            let one = self.step(scheduler, index..index + 1, clock, tokens)?;
            all.build += one.build;
            all.launch += one.launch;
            all.device += one.device;
            all.sample += one.sample;
        }
        Ok(all)
    }
}

/// Steps that take as long as a model of them says and compute nothing.
#[derive(Debug)]
pub struct PredictedExecutor {
    model: StepModel,
    clock: VirtualClock,
}

impl PredictedExecutor {
    /// Lets predicted time pass on a clock.
    #[must_use]
    pub fn new(model: StepModel, clock: &VirtualClock) -> Self {
        Self { model, clock: clock.clone() }
    }
}

impl Executor for PredictedExecutor {
    fn run(
        &mut self,
        scheduler: &Scheduler,
        _clock: &mut dyn Clock,
        tokens: &mut Vec<u32>,
    ) -> Result<Phases, EngineError> {
        let parts = &scheduler.batch().parts;
        let time = self.model.step(
            parts.iter().map(|part| crate::roofline::RaggedPart { cached: part.start, tokens: part.tokens }),
        );
        self.clock.advance(time);
        // No model ran: tokens that differ between requests, so that they share no prefix by accident.
        tokens.extend(parts.iter().map(|part| u32::try_from(part.key & 0xffff).unwrap_or(0)));
        Ok(Phases { device: Nanos(time.0).0, ..Phases::default() })
    }
}
