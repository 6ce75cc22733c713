//! Steps replayed from a recording in place of kernels launched one by one.
//!
//! Enters: a session that can record a step. Leaves: a [`Session`] that records a step that comes twice in a row, compares it with what
//! it gave eagerly, and from then on replayed for as long as it stays the same. That is what a pinned decode does, and nothing else does: fills,
//! gates and prefills run as they always do. The kernels are the same, so the difference between both sessions is what launches cost on
//! the host, candle's uploads of parameters and allocations for each of them among it.
//! A step that cannot be recorded, or that gives another result when replayed, is an error that says why.

use std::collections::HashMap;

use super::{EngineError, LoadedModel, SequenceId, Session, StepBatch, Timeline, forward, relative_error};
use crate::engine::{ScriptedRouting, StepProfiler, SyntheticKv};
use hbmark_core::units::Bytes;

/// Largest difference between logits replayed and eager, relative to the largest of a sequence. The kernels are the same, so the bits should be the same;
/// a library may choose another algorithm while it is recorded, whose sums have another order.
///
/// *Source*: one step of bf16 is 2⁻⁸ of a value; a sum in another order is a few of f32's.
const MAX_RELATIVE_DIFFERENCE: f64 = 5e-3;

/// A session whose steps can be recorded.
pub trait CapturableSession: Session {
    /// A recorded step, with the memory it reads and writes.
    type CapturedStep: std::fmt::Debug;

    /// Records the step that ran last, and does not run it.
    ///
    /// # Errors
    /// When it cannot be recorded; the session stays as it was.
    fn record(&mut self, batch: &StepBatch) -> Result<Self::CapturedStep, EngineError>;

    /// Enqueues a recorded step. Its logits and tokens are then the session's.
    fn replay(&mut self, recording: &Self::CapturedStep) -> Result<(), EngineError>;
}

/// A session that replays repeated steps.
#[derive(Debug)]
pub struct Replayed<S: CapturableSession> {
    session: S,
    model: LoadedModel,
    /// The last step, where it ran eagerly.
    last: Option<StepBatch>,
    /// By the first sequence of the batch.
    recordings: HashMap<SequenceId, (StepBatch, S::CapturedStep)>,
}

impl<S: CapturableSession> Replayed<S> {
    /// A session under another name.
    pub fn new(session: S, engine: &str) -> Self {
        let mut model = session.model().clone();
        engine.clone_into(&mut model.capabilities.engine);
        model.capabilities.graphs = true;
        Self { session, model, last: None, recordings: HashMap::new() }
    }

    /// Records the step that just ran, and replays it once: the results must be the same.
    fn record(&mut self, batch: &StepBatch) -> Result<S::CapturedStep, EngineError> {
        let (eager, tokens) = (self.session.logits()?, self.session.greedy_tokens()?);
        let recording = self.session.record(batch).map_err(|error| self.not_replayed(error))?;
        self.session.replay(&recording)?;
        let (replayed, then) = (self.session.logits()?, self.session.greedy_tokens()?);
        let off = difference(&replayed, &eager);
        if off > MAX_RELATIVE_DIFFERENCE || then != tokens {
            let changed = tokens.iter().zip(&then).filter(|(a, b)| a != b).count();
            return Err(EngineError::NotReplayed {
                engine: self.model.capabilities.engine.clone(),
                why: format!(
                    "its logits are {off:.1e} off the eager ones (at most {MAX_RELATIVE_DIFFERENCE:.0e}), and {changed} of {} tokens differ",
                    tokens.len()
                ),
            });
        }
        Ok(recording)
    }

    /// Maps an error of recording; out of memory stays out of memory.
    fn not_replayed(&self, error: EngineError) -> EngineError {
        match error {
            full @ EngineError::OutOfMemory { .. } => full,
            other => EngineError::NotReplayed {
                engine: self.model.capabilities.engine.clone(),
                why: other.to_string(),
            },
        }
    }
}

/// Largest difference of any logit, relative to the largest magnitude of its sequence; infinite where something is not a number.
fn difference(found: &[Vec<f32>], wanted: &[Vec<f32>]) -> f64 {
    if found.len() != wanted.len() {
        return f64::INFINITY;
    }
    let errors = found.iter().zip(wanted).map(|(found, wanted)| relative_error(found, wanted));
    errors.fold(0.0, f64::max)
}

impl<S: CapturableSession> Session for Replayed<S> {
    fn model(&self) -> &LoadedModel {
        &self.model
    }

    fn step(&mut self, batch: &StepBatch) -> Result<(), EngineError> {
        let Some(first) = batch.sequences.first().map(|step| step.sequence) else {
            return self.session.step(batch);
        };
        if let Some((_, recording)) = self.recordings.get(&first).filter(|(known, _)| known == batch) {
            self.last = None;
            return self.session.replay(recording);
        }
        // What the sequences hold changes, and with it what was recorded.
        self.recordings.remove(&first);
        if self.last.take().as_ref() == Some(batch) {
            let recording = self.record(batch)?;
            self.recordings.insert(first, (batch.clone(), recording));
            return Ok(());
        }
        self.session.step(batch)?;
        self.last = Some(batch.clone());
        Ok(())
    }

    fn release(&mut self, sequence: SequenceId) {
        self.forget(sequence);
        self.session.release(sequence);
    }
    fn synthetic_kv(&mut self) -> Option<&mut dyn SyntheticKv> {
        self.session.synthetic_kv().is_some().then_some(self as &mut dyn SyntheticKv)
    }
    forward! {
        read_logits(logits: &mut Vec<f32>) -> Result<(), EngineError>;
        next_tokens(tokens: &mut Vec<u32>) -> Result<(), EngineError>;
        timeline() -> &mut dyn Timeline;
        peak_memory() -> Option<Bytes>;
        profiler() -> Option<&mut dyn StepProfiler>;
        bytes_moved() -> Option<Bytes>;
        experts_met() -> Option<f64>;
        threads_away() -> Option<f64>;
        script_experts(script: Option<ScriptedRouting>) -> Option<ScriptedRouting>;
    }
}

impl<S: CapturableSession> SyntheticKv for Replayed<S> {
    fn fill_kv(&mut self, sequence: SequenceId, positions: usize, seed: u64) -> Result<(), EngineError> {
        self.forget(sequence);
        self.session.synthetic_kv().map_or(Ok(()), |kv| kv.fill_kv(sequence, positions, seed))
    }
}

impl<S: CapturableSession> Replayed<S> {
    fn forget(&mut self, sequence: SequenceId) {
        let holds = |batch: &StepBatch| batch.sequences.iter().any(|step| step.sequence == sequence);
        self.recordings.retain(|_, (batch, _)| !holds(batch));
        self.last = self.last.take().filter(|batch| !holds(batch));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::scripted::{ScriptedSession, StepOutcome};
    use hbmark_core::model::{Dtype, test_shapes};
    use hbmark_core::units::Nanos;
    use hbmark_traffic::clock::VirtualClock;

    const EAGER: f64 = 9e6;
    const REPLAY: f64 = 4e6;

    fn session(replay: impl FnMut() -> StepOutcome + 'static) -> (Replayed<ScriptedSession>, VirtualClock) {
        let architecture = test_shapes::smollm2_135m();
        let inventory = architecture.inventory(Dtype::Bf16);
        let clock = VirtualClock::default();
        let takes = |_| StepOutcome::Takes { device: Nanos(EAGER), host: Nanos(0.0) };
        let scripted = ScriptedSession::new(architecture, inventory, &clock, Box::new(takes));
        (Replayed::new(scripted.with_replay(replay), "scripted-graph"), clock)
    }

    fn takes() -> StepOutcome {
        StepOutcome::Takes { device: Nanos(REPLAY), host: Nanos(0.0) }
    }

    fn step(token: u32, start: usize) -> StepBatch {
        StepBatch::uniform(SequenceId(3), &[vec![token]], start)
    }

    /// How a step ran, by the time it took.
    #[derive(Debug, PartialEq, Eq)]
    enum Ran {
        Eagerly,
        Replayed,
        Neither,
    }
    use Ran::{Eagerly, Replayed as FromRecording};

    fn ran(session: &mut Replayed<ScriptedSession>, clock: &VirtualClock, batch: &StepBatch) -> Ran {
        let before = clock.now().0;
        session.step(batch).unwrap();
        let took = clock.now().0 - before;
        let near = |time: f64| (took - time).abs() < 1.0;
        if near(EAGER) {
            Eagerly
        } else if near(REPLAY) {
            FromRecording
        } else {
            Ran::Neither
        }
    }

    #[test]
    fn the_step_that_comes_again_is_recorded_and_every_other_one_is_eager() {
        let (mut session, clock) = session(takes);
        let prompt = StepBatch::uniform(SequenceId(3), &[vec![1, 2, 3]], 0);
        let mut runs = |batch: &StepBatch| ran(&mut session, &clock, batch);
        assert_eq!(runs(&prompt), Eagerly);
        let pinned = step(7, 3);
        // Eager; recorded, and replayed to compare; replayed.
        assert_eq!([runs(&pinned), runs(&pinned), runs(&pinned)], [Eagerly, FromRecording, FromRecording]);
        // Another token is another step, and makes the first one a new one.
        assert_eq!([runs(&step(8, 3)), runs(&pinned), runs(&pinned)], [Eagerly, Eagerly, FromRecording]);
        assert_eq!(runs(&step(8, 4)), Eagerly);
    }

    #[test]
    fn sequences_keep_their_recordings_beside_each_other_until_they_are_released() {
        let (mut session, clock) = session(takes);
        let other = StepBatch::uniform(SequenceId(9), &[vec![4]], 0);
        let pinned = step(7, 0);
        for batch in [&pinned, &other] {
            ran(&mut session, &clock, batch);
            ran(&mut session, &clock, batch);
        }
        assert_eq!(ran(&mut session, &clock, &pinned), FromRecording);
        session.release(SequenceId(3));
        assert_eq!(ran(&mut session, &clock, &pinned), Eagerly);
        assert_eq!(ran(&mut session, &clock, &other), FromRecording);
    }

    #[test]
    fn a_replay_that_gives_something_else_is_an_error_with_the_difference() {
        let wrong = || StepOutcome::WrongTokens { device: Nanos(REPLAY) };
        let not_a_number = || StepOutcome::NotANumber { device: Nanos(REPLAY) };
        for (planted, says) in
            [(wrong as fn() -> StepOutcome, "1 of 1 tokens differ"), (not_a_number, "inf off")]
        {
            let (mut session, _) = session(planted);
            session.step(&step(7, 0)).unwrap();
            let error = session.step(&step(7, 0)).unwrap_err();
            assert!(matches!(error, EngineError::NotReplayed { .. }), "{error}");
            assert!(error.to_string().contains(says), "{error}");
        }
    }

    #[test]
    fn what_cannot_be_recorded_says_why_and_leaves_the_session_usable() {
        let architecture = test_shapes::smollm2_135m();
        let inventory = architecture.inventory(Dtype::Bf16);
        let clock = VirtualClock::default();
        let eager = |_| StepOutcome::Takes { device: Nanos(EAGER), host: Nanos(0.0) };
        let scripted = ScriptedSession::new(architecture, inventory, &clock, Box::new(eager));
        let mut session = Replayed::new(scripted, "scripted-graph");
        session.step(&step(7, 0)).unwrap();
        let error = session.step(&step(7, 0)).unwrap_err().to_string();
        assert!(error.starts_with("scripted-graph cannot replay this step: "), "{error}");
        assert_eq!(ran(&mut session, &clock, &step(8, 0)), Eagerly);
    }
}
