//! From the scheduler's batch to tokens: a real session, or a prediction of how long one would take.
//!
//! Enters: a [`Scheduler`] with a batch in flight. Leaves: one token per part, and how long each phase of the host's work took.

use super::structured_output::{ConstraintCounts, Constraints};
use crate::engine::{AdapterId, EngineError, SequenceId, SequenceStep, Session, StepBatch, lora};
use hbmark_core::result::Ragged;
use hbmark_core::units::Nanos;
use hbmark_traffic::clock::Clock;
use hbmark_traffic::executor::{Executor, Phases, StepFailure};
use hbmark_traffic::sampler::Sampler;
use hbmark_traffic::scheduler::{ScheduledSequence, Scheduler};

/// A session under the scheduler.
pub struct SessionExecutor<'a> {
    session: &'a mut dyn Session,
    sampler: Sampler,
    batch: StepBatch,
    /// Parts of earlier batches, whose buffers are used again.
    spare: Vec<SequenceStep>,
    /// Greedy tokens of all outputs of a step.
    greedy: Vec<u32>,
    /// Logits of all outputs of a step.
    logits: Vec<f32>,
    /// Times of a step's marks.
    marks: Vec<Nanos>,
    ragged: Ragged,
    paged: bool,
    constraints: Option<Constraints<'a>>,
}

impl std::fmt::Debug for SessionExecutor<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SessionExecutor").field("ragged", &self.ragged).finish_non_exhaustive()
    }
}

impl<'a> SessionExecutor<'a> {
    /// Runs batches on a session. One that cannot run sequences of different length in one pass gets them one after the other.
    pub fn new(session: &'a mut dyn Session, sampler: Sampler) -> Self {
        let (ragged, paged) = (session.capabilities().ragged, session.capabilities().paged);
        let (batch, spare) = (StepBatch::default(), Vec::new());
        let (greedy, logits, marks) = (Vec::new(), Vec::new(), Vec::new());
        Self { session, sampler, batch, spare, greedy, logits, marks, ragged, paged, constraints: None }
    }

    /// Holds outputs to a grammar.
    pub fn with_constraints(self, constraints: Option<Constraints<'a>>) -> Self {
        Self { constraints, ..self }
    }

    /// How constrained requests have fared.
    pub fn constraint_counts(&self) -> Option<ConstraintCounts> {
        self.constraints.as_ref().map(|c| c.counts)
    }

    /// Whether the logits of the last step are numbers. Read once, after a run: greedy tokens come without them.
    pub fn last_logits_are_finite(&mut self) -> bool {
        // An engine that no longer has them, or fails now, is not judged.
        self.session.logits().map_or(true, |all| all.iter().flatten().all(|logit| logit.is_finite()))
    }

    /// Fills the batch with a range of the scheduler's parts.
    fn build(&mut self, scheduler: &Scheduler, range: std::ops::Range<usize>) -> Result<(), EngineError> {
        self.spare.append(&mut self.batch.sequences);
        for seq in &scheduler.batch().scheduled[range] {
            let mut step = self.spare.pop().unwrap_or_else(|| SequenceStep {
                sequence: SequenceId(0),
                tokens: Vec::new(),
                start_position: 0,
                draft_tokens: 0,
                block_table: Vec::new(),
            });
            step.sequence = SequenceId(seq.sequence);
            if seq.is_first_step && seq.adapter.is_some() {
                lora(self.session)?
                    .set_adapter(step.sequence, seq.adapter.map(|number| AdapterId(number as usize)))?;
            }
            step.start_position = seq.start;
            step.draft_tokens = seq.draft_tokens;
            step.tokens.clear();
            step.tokens.extend_from_slice(scheduler.tokens(seq));
            step.block_table.clear();
            if self.paged {
                step.block_table.extend_from_slice(scheduler.block_table(seq));
            }
            self.batch.sequences.push(step);
        }
        Ok(())
    }

    /// Chooses a token per part of the batch that was run.
    fn sample_tokens(
        &mut self,
        scheduler: &Scheduler,
        range: std::ops::Range<usize>,
        clock: &dyn Clock,
        tokens: &mut Vec<u32>,
        phases: &mut Phases,
    ) -> Result<(), EngineError> {
        let begin = clock.now().0;
        let entries = &scheduler.batch().scheduled[range];
        let held = |seq: &ScheduledSequence, c: &Constraints<'_>| seq.produces_token && c.holds(seq.key);
        let constrained = self.constraints.as_ref().is_some_and(|c| entries.iter().any(|seq| held(seq, c)));
        // Of a verify step there is one output for each draft token, and what follows is behind the accepted ones.
        let mut outputs = 0;
        let mut place = |seq: &ScheduledSequence| {
            let first = outputs;
            outputs += seq.draft_tokens + 1;
            (
                first + scheduler.accepted(seq),
                seq.start + seq.tokens - seq.draft_tokens + scheduler.accepted(seq),
            )
        };
        if self.sampler.is_greedy() && !constrained {
            self.greedy.clear();
            self.session.next_tokens(&mut self.greedy)?;
            for seq in entries {
                // One that is missing is found where tokens are counted.
                tokens.extend(self.greedy.get(place(seq).0));
            }
            phases.sample += clock.now().0 - begin;
            return Ok(());
        }
        let mut masked = 0.0;
        self.session.read_logits(&mut self.logits)?;
        let vocab = self.session.architecture().vocab_size;
        for seq in entries {
            // A token is a function of seed, request and position, whatever it was batched with.
            let (output, position) = place(seq);
            let Some(logits) = self.logits.get_mut(output * vocab..(output + 1) * vocab) else { break };
            let Some(constraints) = self.constraints.as_mut().filter(|c| held(seq, c)) else {
                tokens.push(self.sampler.sample(logits, seq.key, position));
                continue;
            };
            let failed = |detail| EngineError::Grammar { request: seq.key, detail };
            let start = clock.now().0;
            constraints.compute_mask(seq.key).map_err(failed)?;
            let found = clock.now().0;
            constraints.apply(logits);
            let applied = clock.now().0;
            let token = self.sampler.sample(logits, seq.key, position);
            let sampled = clock.now().0;
            constraints.advance(seq.key, token).map_err(failed)?;
            let advanced = clock.now().0;
            phases.mask += (found - start) + (advanced - sampled);
            phases.mask_apply += applied - found;
            masked += (applied - start) + (advanced - sampled);
            tokens.push(token);
        }
        phases.sample += clock.now().0 - begin - masked;
        Ok(())
    }

    fn step(
        &mut self,
        scheduler: &Scheduler,
        range: std::ops::Range<usize>,
        clock: &dyn Clock,
        tokens: &mut Vec<u32>,
    ) -> Result<Phases, EngineError> {
        let begin = clock.now().0;
        self.build(scheduler, range.clone())?;
        let built = clock.now().0;
        self.session.timeline().mark()?;
        self.session.step(&self.batch)?;
        self.session.timeline().mark()?;
        let launched = clock.now().0;
        // Draining waits for the device.
        self.marks.clear();
        self.session.timeline().drain_into(&mut self.marks)?;
        let span = self.marks.last().map_or(0.0, |m| m.0);
        let waited = clock.now().0;
        // A synchronous step spends its own time inside the call.
        let inside = span.min(launched - built);
        let mut phases = Phases {
            build: built - begin,
            launch: (launched - built - inside).max(0.0),
            device: inside + (waited - launched),
            ..Phases::default()
        };
        let (before, entries) = (tokens.len(), range.len());
        self.sample_tokens(scheduler, range, clock, tokens, &mut phases)?;
        if tokens.len() - before != entries {
            return Err(EngineError::Device {
                device: self.session.capabilities().device.to_string(),
                detail: format!("{} tokens came for {entries} sequences", tokens.len() - before),
            });
        }
        Ok(phases)
    }
}

impl Executor for SessionExecutor<'_> {
    fn run(
        &mut self,
        scheduler: &Scheduler,
        clock: &mut dyn Clock,
        tokens: &mut Vec<u32>,
    ) -> Result<Phases, StepFailure> {
        for sequence in &scheduler.batch().dropped {
            self.session.release(SequenceId(*sequence));
        }
        let entries = scheduler.batch().scheduled.len();
        if self.ragged == Ragged::Fused {
            return Ok(self.step(scheduler, 0..entries, clock, tokens)?);
        }
        let mut all = Phases::default();
        for index in 0..entries {
            all += self.step(scheduler, index..index + 1, clock, tokens)?;
        }
        Ok(all)
    }
}
