//! A device that follows a script on a virtual clock.
//!
//! Enters: a function from step to outcome (how long, or which fault). Leaves: a [`Session`] whose timing is exact and
//! whose hour passes in milliseconds. Every rule above the [`Session`] interface (stopping, rejection, retries, scheduling, diagnosis) is
//! tested by planting a fault here and asking for its name. It computes no model: tokens are a hash of what went in.

use std::collections::BTreeMap;

#[cfg(test)]
use super::replay::CapturableSession;
use super::{EngineError, LoadedModel, OperationTime, SequenceId, Session, StepBatch, Timeline, native};
use crate::engine::StepProfiler;
use hbmark_core::model::{Architecture, Dtype, Inventory};
use hbmark_core::result::Capabilities;
use hbmark_core::units::{Bytes, Nanos};
use hbmark_traffic::clock::VirtualClock;

/// A step as the script gets it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepInfo {
    /// Steps run before this one.
    pub index: usize,
    pub batch: usize,
    pub tokens: usize,
    pub start_position: usize,
}

/// What a step does.
#[derive(Debug)]
pub enum StepOutcome {
    /// The device is busy for `device`, and the host spends `host` more before the step's tokens are read.
    Takes { device: Nanos, host: Nanos },
    /// The host's work for the next step runs while the device computes: only what is longer than the step shows.
    Ahead { device: Nanos, host: Nanos },
    /// As `Takes`, with other tokens than an identical step gave before.
    WrongTokens { device: Nanos },
    /// As `Takes`, with logits that are not numbers.
    NotANumber { device: Nanos },
    /// The engine returns an error.
    Fails(EngineError),
}

/// The script.
pub type Script = Box<dyn FnMut(StepInfo) -> StepOutcome>;

/// The operations of a profiled step; called with the number of steps profiled before it.
pub type Profiler = Box<dyn FnMut(usize) -> Vec<OperationTime>>;

/// What a replayed step does; without one a step cannot be recorded.
#[cfg(test)]
pub type Replay = Box<dyn FnMut() -> StepOutcome>;

/// A session that follows a script.
pub struct ScriptedSession {
    clock: VirtualClock,
    timeline: ScriptedTimeline,
    script: Script,
    model: LoadedModel,
    steps: usize,
    lengths: BTreeMap<SequenceId, usize>,
    tokens: Option<Vec<u32>>,
    nan: bool,
    /// Host time of the last step that passes when its tokens are read.
    host_debt: Nanos,
    moved: Option<Bytes>,
    profiler: Profiler,
    profiles: usize,
    #[cfg(test)]
    replay: Option<Replay>,
    faults: Faults,
    /// Positions of KV of released sequences.
    leaked_positions: usize,
}

/// Faults of the engine itself, in addition to the script.
#[derive(Debug, Clone, Copy, Default)]
struct Faults {
    /// Device time passes when tokens are read, after all marks.
    marks_elsewhere: bool,
    /// Memory use is reported, and grows by so much a step.
    leak_per_step: Option<Bytes>,
    /// A released sequence keeps its KV.
    keeps_kv: bool,
    /// The last sequence of a batch of several gets no token.
    loses_a_token: bool,
}

impl std::fmt::Debug for ScriptedSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ScriptedSession").field("steps", &self.steps).finish_non_exhaustive()
    }
}

/// Marks that read the virtual clock of the scripted device.
#[derive(Debug, Default)]
struct ScriptedTimeline {
    clock: VirtualClock,
    marks: Vec<Nanos>,
    /// Device clock over host clock; anything but 1 is a planted fault.
    rate: f64,
}

impl Timeline for ScriptedTimeline {
    fn mark(&mut self) -> Result<(), EngineError> {
        self.marks.push(Nanos(self.clock.now().0 * self.rate));
        Ok(())
    }
    fn drain_into(&mut self, times: &mut Vec<Nanos>) -> Result<(), EngineError> {
        let first = self.marks.first().map_or(0.0, |m| m.0);
        times.extend(self.marks.drain(..).map(|m| Nanos(m.0 - first)));
        Ok(())
    }
    fn host_now(&self) -> Nanos {
        self.clock.now()
    }
}

impl ScriptedSession {
    /// A session over `architecture` that follows `script` on `clock`.
    pub fn new(
        architecture: Architecture,
        inventory: Inventory,
        clock: &VirtualClock,
        script: Script,
    ) -> Self {
        // As the native engine's, without graphs.
        let capabilities = Capabilities {
            engine: "scripted".into(),
            graphs: false,
            ..native::capabilities(&architecture, "scripted", false)
        };
        Self {
            clock: clock.clone(),
            timeline: ScriptedTimeline { clock: clock.clone(), marks: Vec::new(), rate: 1.0 },
            script,
            model: LoadedModel { capabilities, architecture, inventory, kv_dtype: Dtype::Bf16 },
            steps: 0,
            lengths: BTreeMap::new(),
            tokens: None,
            nan: false,
            host_debt: Nanos(0.0),
            moved: None,
            profiler: Box::new(|_| Vec::new()),
            profiles: 0,
            #[cfg(test)]
            replay: None,
            faults: Faults::default(),
            leaked_positions: 0,
        }
    }

    /// Plants marks on another stream, which do not cover the step.
    pub fn with_marks_elsewhere(mut self) -> Self {
        self.faults.marks_elsewhere = true;
        self
    }

    /// Reports memory in use, and plants a leak of so much a step.
    pub fn with_leak(mut self, per_step: Bytes) -> Self {
        self.faults.leak_per_step = Some(per_step);
        self
    }

    /// Plants a cache that keeps the KV of released sequences.
    pub fn with_kv_leak(mut self) -> Self {
        self.faults.keeps_kv = true;
        self
    }

    /// Plants an engine that returns a token fewer than the batch has sequences.
    pub fn with_lost_token(mut self) -> Self {
        self.faults.loses_a_token = true;
        self
    }

    /// KV of all positions held, as the architecture stores it in 16 bits.
    fn kv_bytes(&self) -> u64 {
        let held: usize = self.lengths.values().sum::<usize>() + self.leaked_positions;
        (held
            * self.model.architecture.layers
            * self.model.architecture.kv_elements_per_token_and_layer()
            * 2) as u64
    }

    /// Makes steps recordable; this is the script of replayed ones.
    #[cfg(test)]
    pub fn with_replay(mut self, replay: impl FnMut() -> StepOutcome + 'static) -> Self {
        self.replay = Some(Box::new(replay));
        self
    }

    /// Plants a device clock that runs at another rate than the host's.
    pub fn with_clock_rate(mut self, rate: f64) -> Self {
        self.timeline.rate = rate;
        self
    }

    /// Makes every step report so many bytes moved.
    pub fn with_moved(mut self, bytes: Bytes) -> Self {
        self.moved = Some(bytes);
        self
    }

    /// Makes steps profilable, operation by operation.
    pub fn with_profiler(mut self, profiler: impl FnMut(usize) -> Vec<OperationTime> + 'static) -> Self {
        self.profiler = Box::new(profiler);
        self
    }

    /// Advances the clock and generates tokens.
    fn apply_outcome(
        &mut self,
        batch: &StepBatch,
        index: usize,
        outcome: StepOutcome,
    ) -> Result<(), EngineError> {
        let (device, host, salt) = match outcome {
            StepOutcome::Takes { device, host } => (device, host, 0),
            StepOutcome::Ahead { device, host } => (device, Nanos((host.0 - device.0).max(0.0)), 0),
            StepOutcome::WrongTokens { device } => (device, Nanos(0.0), index + 1),
            StepOutcome::NotANumber { device } => {
                self.nan = true;
                (device, Nanos(0.0), 0)
            }
            StepOutcome::Fails(error) => return Err(error),
        };
        let missing = usize::from(self.faults.loses_a_token && batch.output_count() > 1);
        let answered = batch.output_count() - missing;
        let vocab = self.model.architecture.vocab_size;
        // From the token and its position only, so that chunks of a prompt change nothing.
        let answer = |token: u32, position: usize| {
            let next = (token as usize * 31 + (position + 1) * 17 + salt) % vocab;
            u32::try_from(next).expect("a vocabulary fits 32 bits")
        };
        let outputs = batch.sequences.iter().flat_map(|step| {
            let tokens = step.tokens.iter().enumerate().skip(step.tokens.len() - step.outputs());
            tokens.map(move |(index, token)| answer(*token, step.start_position + index))
        });
        self.tokens = Some(outputs.take(answered).collect());
        // The host's share passes after the device mark that follows a step, when the tokens are read.
        self.host_debt = host;
        if self.faults.marks_elsewhere {
            self.host_debt.0 += device.0;
        } else {
            self.clock.advance(device);
        }
        Ok(())
    }

    /// Sequences whose KV is held.
    #[cfg(test)]
    pub fn held_sequences(&self) -> usize {
        self.lengths.len()
    }
}

#[cfg(test)]
impl CapturableSession for ScriptedSession {
    type CapturedStep = StepBatch;

    fn record(&mut self, batch: &StepBatch) -> Result<StepBatch, EngineError> {
        match self.replay {
            Some(_) => Ok(batch.clone()),
            None => Err(EngineError::unsupported("scripted", "a recorded step", "its script has none")),
        }
    }

    fn replay(&mut self, recording: &StepBatch) -> Result<(), EngineError> {
        let outcome = self.replay.as_mut().ok_or(EngineError::NoStepRun)?();
        // A replayed step has the index of the recorded one, unless a fault is planted.
        self.apply_outcome(recording, self.steps, outcome)
    }
}

impl Session for ScriptedSession {
    fn model(&self) -> &LoadedModel {
        &self.model
    }

    fn step(&mut self, batch: &StepBatch) -> Result<(), EngineError> {
        let info = StepInfo {
            index: self.steps,
            batch: batch.sequences.len(),
            tokens: batch.token_count(),
            start_position: batch.sequences.iter().map(|s| s.start_position).max().unwrap_or(0),
        };
        self.steps += 1;
        for sequence in &batch.sequences {
            let length = self.lengths.entry(sequence.sequence).or_insert(0);
            // A caller with block tables manages the cache: a prefix may be another sequence's.
            if sequence.start_position > *length && sequence.block_table.is_empty() {
                return Err(EngineError::unsupported(
                    "scripted",
                    format!("a step at position {}", sequence.start_position),
                    format!("sequence {} holds {length} positions", sequence.sequence.0),
                ));
            }
            *length = sequence.start_position + sequence.tokens.len();
        }
        let outcome = (self.script)(info);
        self.apply_outcome(batch, info.index, outcome)
    }

    fn read_logits(&mut self, logits: &mut Vec<f32>) -> Result<(), EngineError> {
        let (tokens, vocab) = (self.greedy_tokens()?, self.model.architecture.vocab_size);
        logits.clear();
        logits.resize(tokens.len() * vocab, 0.0);
        for (row, token) in logits.chunks_mut(vocab).zip(tokens) {
            row[token as usize] = if self.nan { f32::NAN } else { 1.0 };
        }
        Ok(())
    }

    fn next_tokens(&mut self, tokens: &mut Vec<u32>) -> Result<(), EngineError> {
        let host = std::mem::take(&mut self.host_debt);
        self.clock.advance(host);
        tokens.extend_from_slice(self.tokens.as_ref().ok_or(EngineError::NoStepRun)?);
        Ok(())
    }

    fn timeline(&mut self) -> &mut dyn Timeline {
        &mut self.timeline
    }
    fn release(&mut self, sequence: SequenceId) {
        let length = self.lengths.remove(&sequence).unwrap_or(0);
        if self.faults.keeps_kv {
            self.leaked_positions += length;
        }
    }
    fn peak_memory(&mut self) -> Option<Bytes> {
        let weights = self.model.inventory.total_bytes();
        let in_use = |per_step: Bytes| Bytes(weights.0 + self.kv_bytes() + per_step.0 * self.steps as u64);
        self.faults.leak_per_step.map(in_use)
    }
    fn bytes_moved(&mut self) -> Option<Bytes> {
        self.moved.filter(|_| self.steps > 0)
    }
    fn profiler(&mut self) -> Option<&mut dyn StepProfiler> {
        Some(self)
    }
}

impl StepProfiler for ScriptedSession {
    fn profile(&mut self, batch: &StepBatch) -> Result<Vec<OperationTime>, EngineError> {
        self.step(batch)?;
        self.profiles += 1;
        Ok((self.profiler)(self.profiles - 1))
    }
}
