//! The engine interface: every program part that runs a model uses these types.
//!
//! Enters: a [`StepBatch`] (which tokens of which sequences, at which positions). Leaves: logits, next tokens, and
//! time marks on the stream that ran the step. The step benchmark and the scheduler are above it; candle, our own kernels and the
//! scripted device implement it.
//!
//! ```
//! use hbmark::engine::{self, DeviceChoice, DeviceOptions, SequenceId, StepBatch};
//! use hbmark_core::model::Dtype;
//!
//! # fn main() -> anyhow::Result<()> {
//! let model = hbmark::weights::open("tests/fixtures/models/qwen3-tied", None, 42)?;
//! let options = DeviceOptions::default();
//! let mut session = engine::open("native", &model, Dtype::F32, DeviceChoice::Cpu, options, &mut |_, _| {})?;
//! // A prefill of three tokens, then a decode step of the token that follows, timed on the session's own timeline.
//! session.step(&StepBatch::uniform(SequenceId(0), &[vec![1, 2, 3]], 0))?;
//! let next = session.greedy_tokens()?;
//! session.timeline().mark()?;
//! session.step(&StepBatch::uniform(SequenceId(0), &[next], 3))?;
//! session.timeline().mark()?;
//! assert_eq!(session.logits()?[0].len(), model.architecture.vocab_size);
//! assert_eq!(session.timeline().drain()?.len(), 2);
//! # Ok(())
//! # }
//! ```

#[cfg(feature = "cuda")]
pub(crate) mod cuda;
pub(crate) mod device;
pub(crate) mod error_mapping;
pub mod native;
mod open;
#[cfg(any(test, feature = "cuda"))]
pub(crate) mod replay;
pub(crate) mod scripted;
pub(crate) mod stock;
pub(crate) mod threads;
pub(crate) mod timeline;

use serde::{Deserialize, Serialize};

use crate::weights::Adapter;
use hbmark_core::model::{Architecture, Dtype, Inventory};
use hbmark_core::result::{Capabilities, Cause, EngineKind};
use hbmark_core::units::{Bytes, Nanos};

pub use crate::machine::device::DeviceChoice;
pub use device::{Backend, DeviceOptions, ScriptedRouting};
pub use open::{capabilities, check_kv_dtype, open};
pub(crate) use open::{default_dtype, kv_dtype, open_reference, reference_device};
pub use stock::StockSession;
pub use timeline::Timeline;

/// Methods of a session that hand their call to the session inside it.
macro_rules! forward {
    ($($method:ident($($argument:ident: $kind:ty),*) -> $answer:ty;)*) => {$(
        fn $method(&mut self $(, $argument: $kind)*) -> $answer {
            self.session.$method($($argument),*)
        }
    )*};
}
pub(crate) use forward;

/// Identifies a sequence while a session keeps its KV.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SequenceId(pub u64);

/// A low-rank adapter of a session, by the order in which it was loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AdapterId(pub usize);

/// What one step does to one sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SequenceStep {
    pub sequence: SequenceId,
    /// All of the prompt in a prefill, one token in a decode, a chunk in a chunked prefill.
    pub tokens: Vec<u32>,
    /// Position of the first token. A position below the sequence's length rewrites from there and drops the KV
    /// after it; so a decode is pinned at one context.
    pub start_position: usize,
    /// Speculative decoding: so many of the tokens, the last ones, are draft tokens. Each of them, and the token before them, has logits and a greedy
    /// next token; without any the last token alone.
    pub draft_tokens: usize,
    /// Blocks of the paged KV pool in order; empty for engines that keep their own cache.
    pub block_table: Vec<u32>,
}

impl SequenceStep {
    /// Tokens with logits.
    pub fn outputs(&self) -> usize {
        (self.draft_tokens + 1).min(self.tokens.len())
    }
}

/// A ragged set of sequences that advance together.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StepBatch {
    pub sequences: Vec<SequenceStep>,
}

impl StepBatch {
    /// The batch of consecutive sequences, from `first` on, whose tokens start at the same position.
    pub fn uniform(first: SequenceId, tokens: &[Vec<u32>], start_position: usize) -> Self {
        Self {
            sequences: tokens
                .iter()
                .enumerate()
                .map(|(index, tokens)| SequenceStep {
                    sequence: SequenceId(first.0 + index as u64),
                    tokens: tokens.clone(),
                    start_position,
                    draft_tokens: 0,
                    block_table: Vec::new(),
                })
                .collect(),
        }
    }

    /// The same step with all tokens of a sequence but the first as draft tokens.
    pub fn as_verify_step(mut self) -> Self {
        for step in &mut self.sequences {
            step.draft_tokens = step.tokens.len().saturating_sub(1);
        }
        self
    }

    /// Rows of logits, and greedy next tokens, that the step gives, sequence by sequence.
    pub fn output_count(&self) -> usize {
        self.sequences.iter().map(SequenceStep::outputs).sum()
    }

    /// Tokens of all sequences together.
    pub fn token_count(&self) -> usize {
        self.sequences.iter().map(|s| s.tokens.len()).sum()
    }
}

/// One operation of a step, all its calls together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OperationTime {
    pub operation: &'static str,
    pub calls: usize,
    pub time: Nanos,
    /// Counted where the operation ran.
    pub bytes: Bytes,
}

/// A model as a session has it, and what the session can do with it.
#[derive(Debug, Clone)]
pub struct LoadedModel {
    pub capabilities: Capabilities,
    pub architecture: Architecture,
    pub inventory: Inventory,
    pub kv_dtype: Dtype,
}

/// A loaded model that can be stepped.
pub trait Session {
    /// What is loaded.
    fn model(&self) -> &LoadedModel;
    /// What this session can do.
    fn capabilities(&self) -> &Capabilities {
        &self.model().capabilities
    }
    /// The model's dimensions.
    fn architecture(&self) -> &Architecture {
        &self.model().architecture
    }
    /// The tensors as loaded: the source of the byte ledger.
    fn inventory(&self) -> &Inventory {
        &self.model().inventory
    }
    /// Storage of the KV cache.
    fn kv_dtype(&self) -> Dtype {
        self.model().kv_dtype
    }
    /// Runs or enqueues one step and does not wait for it.
    ///
    /// # Errors
    /// When the batch is outside the capabilities, when memory runs out, or when the device fails.
    fn step(&mut self, batch: &StepBatch) -> Result<(), EngineError>;
    /// Waits for the last step and puts the logits of the tokens that the step asked for, f32, `[outputs, vocab]`, in place of what the caller's
    /// buffer holds, which is used again.
    ///
    /// # Errors
    /// When no step ran or the device fails.
    fn read_logits(&mut self, logits: &mut Vec<f32>) -> Result<(), EngineError>;
    /// The same row by row in new buffers, outside of timed code.
    ///
    /// # Errors
    /// As [`read_logits`](Self::read_logits).
    fn logits(&mut self) -> Result<Vec<Vec<f32>>, EngineError> {
        let mut logits = Vec::new();
        self.read_logits(&mut logits)?;
        Ok(logits.chunks(self.architecture().vocab_size).map(<[f32]>::to_vec).collect())
    }
    /// Waits for the last step and appends the greedy next token of each of them to the caller's buffer: nothing is allocated while a
    /// step is timed.
    ///
    /// # Errors
    /// When no step ran or the device fails.
    fn next_tokens(&mut self, tokens: &mut Vec<u32>) -> Result<(), EngineError>;
    /// The same in a new buffer, outside of timed code.
    ///
    /// # Errors
    /// As [`next_tokens`](Self::next_tokens).
    fn greedy_tokens(&mut self) -> Result<Vec<u32>, EngineError> {
        let mut tokens = Vec::new();
        self.next_tokens(&mut tokens)?;
        Ok(tokens)
    }
    /// Marks on the stream the steps run on.
    fn timeline(&mut self) -> &mut dyn Timeline;
    /// Allocates and touches memory for so many KV blocks, so that no step has to: the system finds and zeroes a page when it is first
    /// written, which takes milliseconds. Nothing to do where the cache is allocated whole or grows with a sequence.
    ///
    /// # Errors
    /// When memory runs out.
    fn preallocate_blocks(&mut self, _blocks: usize) -> Result<(), EngineError> {
        Ok(())
    }
    /// Forgets a sequence and frees its KV.
    fn release(&mut self, sequence: SequenceId);
    /// The most memory held on the device since the last call, where the device reports it.
    fn peak_memory(&mut self) -> Option<Bytes> {
        None
    }
    /// Bytes the last step moved, counted by its operations; `None` where the engine does not count.
    fn bytes_moved(&mut self) -> Option<Bytes> {
        None
    }
    /// Different experts of a layer that a step met, on average over the layers with experts and the steps since the last call, counted where
    /// rows were routed; `None` where nothing was.
    fn experts_met(&mut self) -> Option<f64> {
        None
    }
    /// Threads that were left out of a job because another program had their processor, on average over the jobs since the last call; `None` where
    /// none is ever left out.
    fn threads_away(&mut self) -> Option<f64> {
        None
    }
    /// From the next step on a script picks the experts of a mixture, or its routers do again; what did so before. Nothing to do where there are none.
    fn script_experts(&mut self, _script: Option<ScriptedRouting>) -> Option<ScriptedRouting> {
        None
    }
    /// LoRA adapters, where the engine supports them.
    fn lora(&mut self) -> Option<&mut dyn LoraSession> {
        None
    }
    /// KV without a prefill, where the engine can make it.
    fn synthetic_kv(&mut self) -> Option<&mut dyn SyntheticKv> {
        None
    }
    /// Steps timed operation by operation, where the engine supports it.
    fn profiler(&mut self) -> Option<&mut dyn StepProfiler> {
        None
    }
}

/// LoRA adapters of an engine.
pub trait LoraSession {
    /// Loads an adapter into the device's memory; returns its id and the bytes of its matrices as stored.
    ///
    /// # Errors
    /// When memory runs out.
    fn load_adapter(&mut self, adapter: &Adapter) -> Result<(AdapterId, Bytes), EngineError>;
    /// Runs a sequence with an adapter (or with none) from its next step to its release. The KV of a sequence is computed with its adapter,
    /// so it is chosen before the first step.
    ///
    /// # Errors
    /// When there is no such adapter.
    fn set_adapter(&mut self, sequence: SequenceId, adapter: Option<AdapterId>) -> Result<(), EngineError>;
}

/// A KV cache that is filled without a prefill.
pub trait SyntheticKv {
    /// Gives a sequence a KV cache of so many positions filled with random values. A decode step over it moves the same bytes as one over
    /// a real prefill.
    ///
    /// # Errors
    /// When memory runs out or the device fails.
    fn fill_kv(&mut self, sequence: SequenceId, positions: usize, seed: u64) -> Result<(), EngineError>;
}

/// Times the operations of a step.
pub trait StepProfiler {
    /// One step, timed operation by operation; slower than a step, and never mixed with its times.
    ///
    /// # Errors
    /// As [`Session::step`].
    fn profile(&mut self, batch: &StepBatch) -> Result<Vec<OperationTime>, EngineError>;
}

/// The adapters of a session.
///
/// # Errors
/// [`EngineError::Unsupported`] where the engine has none.
pub fn lora(session: &mut dyn Session) -> Result<&mut dyn LoraSession, EngineError> {
    let (engine, device) = (session.capabilities().engine.clone(), session.capabilities().device.to_string());
    session.lora().ok_or_else(|| no_adapters(&engine, &device))
}

fn no_adapters(engine: &str, device: &str) -> EngineError {
    EngineError::unsupported(
        engine,
        format!("LoRA adapters on {device}"),
        "only the native engine on a CPU adds them; choose --engine native --device cpu",
    )
}

/// Checks, before anything is loaded, that an engine supports LoRA adapters on a device.
///
/// # Errors
/// [`EngineError::Unsupported`] where it does not.
pub fn check_adapters(engine: &str, device: DeviceChoice) -> Result<(), EngineError> {
    let is_native = EngineKind::of(engine) == Some(EngineKind::Native) && EngineKind::ranks(engine) == 1;
    if is_native && device == DeviceChoice::Cpu {
        return Ok(());
    }
    Err(no_adapters(engine, &device.to_string()))
}

/// Checks that an engine gives the logits that a step asks for.
///
/// # Errors
/// [`EngineError::Unsupported`] where it gives those of the last token alone.
pub fn check_logits(capabilities: &Capabilities, batch: &StepBatch) -> Result<(), EngineError> {
    if capabilities.every_token_logits || batch.sequences.iter().all(|step| step.draft_tokens == 0) {
        return Ok(());
    }
    Err(no_verify_steps(&capabilities.engine))
}

/// That an engine does not give what speculative decoding needs.
pub fn no_verify_steps(engine: &str) -> EngineError {
    EngineError::unsupported(
        engine,
        "verify steps",
        "it computes the logits of the last token of each sequence alone; choose --engine native",
    )
}

/// Why an engine could not open or step.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error("out of memory on {device}: {detail}")]
    OutOfMemory { device: String, detail: String },
    #[error("the {engine} engine does not run {what}: {why}")]
    Unsupported { engine: String, what: String, why: String },
    #[error("{engine} cannot replay this step: {why}")]
    NotReplayed { engine: String, why: String },
    #[error("the grammar of request {request} cannot go on: {detail}")]
    Grammar { request: usize, detail: String },
    #[error("no step has run yet, so there is nothing to read")]
    NoStepRun,
    #[error("{device} failed: {detail}")]
    Device { device: String, detail: String },
    #[error(
        "rank {rank} of {of} did not reach a sum in time, so the others cannot go on: it failed or hangs"
    )]
    RankLost { rank: usize, of: usize },
    #[error(
        "this build has no CUDA support, so `--device {asked}` cannot be used; rebuild with `--features cuda` \
         on a machine with the CUDA toolkit (see docs/gpu.md)"
    )]
    NotBuiltForCuda { asked: String },
    #[error(
        "no CUDA device {asked}: {detail}; check that the NVIDIA driver is loaded (`nvidia-smi`) or use `--device cpu`"
    )]
    NoCudaDevice { asked: String, detail: String },
    /// Boxed, so that the errors of every step stay small.
    #[error(transparent)]
    Model(Box<crate::weights::OpenError>),
}

impl EngineError {
    /// That an engine does not do something, and why.
    pub fn unsupported(engine: &str, what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Unsupported { engine: engine.to_owned(), what: what.into(), why: why.into() }
    }

    /// The same as data, for a result.
    pub fn cause(&self) -> Cause {
        match self {
            Self::OutOfMemory { device, detail } => {
                Cause::OutOfMemory { device: device.clone(), detail: detail.clone(), during: None }
            }
            Self::Unsupported { engine, what, why } => {
                Cause::Unsupported { engine: engine.clone(), what: what.clone(), why: why.clone() }
            }
            Self::NotReplayed { engine, why } => {
                Cause::NotReplayed { engine: engine.clone(), why: why.clone() }
            }
            Self::Device { device, detail } => {
                Cause::DeviceFailed { device: device.clone(), detail: detail.clone() }
            }
            other => Cause::EngineFailed { detail: other.to_string() },
        }
    }

    /// Whether the device is unusable after this error.
    pub fn is_sticky(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. } | Self::Device { .. } | Self::RankLost { .. })
    }
}

impl From<EngineError> for hbmark_traffic::executor::StepFailure {
    fn from(error: EngineError) -> Self {
        Self { message: error.to_string(), device_unusable: error.is_sticky() }
    }
}

impl From<crate::weights::OpenError> for EngineError {
    fn from(error: crate::weights::OpenError) -> Self {
        Self::Model(Box::new(error))
    }
}

/// Largest difference of two logit rows, relative to the largest magnitude of the reference.
pub fn relative_error(found: &[f32], reference: &[f32]) -> f64 {
    let scale = reference.iter().fold(0.0f64, |m, &x| m.max(f64::from(x).abs())).max(f64::MIN_POSITIVE);
    found
        .iter()
        .zip(reference)
        .map(|(&a, &b)| (f64::from(a) - f64::from(b)).abs() / scale)
        .fold(0.0, |worst, e| if e.is_nan() { f64::INFINITY } else { worst.max(e) })
}
