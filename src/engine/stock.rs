//! The stock engine: candle-transformers' forward, unchanged.
//!
//! Enters: an architecture, loaded tensors and a device. Leaves: a [`Session`] whose steps are candle's own kernels in
//! candle's own order. A step is the forward plus the greedy argmax, which a decoder needs before it can go on.
//!
//! Sequences advance in groups: the sequences of one batch share one candle cache and must bring as many tokens at the
//! same position ([`Ragged::Uniform`]). Each group keeps the cache as it was before its last step, so a step that starts
//! at that position again runs on a clone of it. A clone copies handles and no tensor, so a pinned decode costs what an
//! ordinary one does; it holds one more copy of the KV. The clone must not be of a cache fresh from a prefill, which candle
//! rearranges in its first decode step: so a pinned decode fills the last position by a decode step.

#[cfg(feature = "cuda")]
mod captured_graph;
mod family;

use std::collections::{BTreeMap, HashMap};

use candle_core::{D, DType, Tensor};

use super::error_mapping::of_candle;
use super::{
    Backend, DeviceChoice, EngineError, LoadedModel, SequenceId, Session, StepBatch, Timeline, check_logits,
};
use crate::weights::loading::plain_dtype;
use hbmark_core::ledger::largest_stock_tensor;
use hbmark_core::model::{Architecture, Dtype, Inventory};
use hbmark_core::result::{Capabilities, EngineKind, Ragged};
use hbmark_core::units::Bytes;

pub use family::{Limits, StockModel, limits};

/// Checks that a device has one of candle's engines.
pub fn check_device(kind: EngineKind, device: DeviceChoice) -> Result<(), EngineError> {
    let why = match (kind, device) {
        (EngineKind::StockPool, DeviceChoice::Cpu) => "memory pools are a GPU's; run `stock`",
        (EngineKind::StockGraph, DeviceChoice::Cpu) => "launches are a GPU's; run `stock`",
        _ => return Ok(()),
    };
    Err(EngineError::unsupported(kind.name(), "steps on a CPU", why))
}

/// Elements of a tensor that candle's CUDA kernels can index. Beyond them the index of a softmax is below 0; from 2^32 on the loops of other kernels
/// never end. *Source*: candle-kernels 0.11.1, `softmax` in `reduce.cu`, `affine.cu`.
const MAX_CUDA_ELEMENTS: u64 = 1 << 31;

/// Checks that candle's kernels can index every tensor of a step of so many tokens of each sequence, which has so many positions behind it.
///
/// # Errors
/// [`EngineError::Unsupported`] with the largest tensor. On a CPU there is no limit.
pub fn check_tensors(
    capabilities: &Capabilities,
    architecture: &Architecture,
    batch: usize,
    tokens: usize,
    positions: usize,
) -> Result<(), EngineError> {
    let (what, elements) = largest_stock_tensor(architecture, batch, tokens, positions);
    if capabilities.host_memory || elements <= MAX_CUDA_ELEMENTS {
        return Ok(());
    }
    Err(EngineError::unsupported(
        &capabilities.engine,
        format!("a tensor of {elements} {what}"),
        format!(
            "candle's CUDA kernels index {MAX_CUDA_ELEMENTS} elements; choose a smaller batch or context"
        ),
    ))
}

/// The KV of sequences that advance together, now and before their last step.
#[derive(Debug)]
struct Group {
    sequences: Vec<SequenceId>,
    before: (usize, StockModel),
    now: (usize, StockModel),
}

/// candle's model, loaded.
#[derive(Debug)]
pub struct StockSession {
    model: LoadedModel,
    /// The model with an empty cache, from which every group starts.
    blank: StockModel,
    /// Keyed by the first sequence of the group.
    groups: BTreeMap<SequenceId, Group>,
    /// Logits and greedy tokens of the last step.
    last: Option<(Tensor, Tensor)>,
    /// Behind all tensors, as it gives back the memory that they leave.
    backend: Backend,
}

impl StockSession {
    /// Passes loaded tensors to candle.
    ///
    /// # Errors
    /// When candle cannot run the architecture, or the device fails.
    pub fn new(
        architecture: Architecture,
        tensors: HashMap<String, Tensor>,
        inventory: Inventory,
        dtype: Dtype,
        backend: Backend,
    ) -> Result<Self, EngineError> {
        let limits = limits(&architecture, dtype, false)?;
        let candle_dtype = candle_dtype(dtype)?;
        let blank = StockModel::build(&architecture, tensors, candle_dtype, &backend.device)
            .map_err(|e| of_candle(&backend.name, &e))?;
        Ok(Self::assemble(architecture, inventory, dtype, limits, blank, backend))
    }

    /// Opens a validated GGUF file through candle's quantised models.
    ///
    /// # Errors
    /// When candle cannot run the architecture, or the device fails.
    pub fn from_gguf(
        architecture: Architecture,
        content: candle_core::quantized::gguf_file::Content,
        file: &mut std::fs::File,
        inventory: Inventory,
        backend: Backend,
    ) -> Result<Self, EngineError> {
        let limits = limits(&architecture, Dtype::Gguf, true)?;
        let blank = StockModel::build_gguf(&architecture, content, file, &backend.device)
            .map_err(|e| of_candle(&backend.name, &e))?;
        // candle's quantised models compute, and so keep K and V, in f32.
        Ok(Self::assemble(architecture, inventory, Dtype::F32, limits, blank, backend))
    }

    fn assemble(
        architecture: Architecture,
        inventory: Inventory,
        kv_dtype: Dtype,
        limits: Limits,
        blank: StockModel,
        backend: Backend,
    ) -> Self {
        let capabilities = capabilities(EngineKind::Stock, limits, &backend.name, backend.device.is_cpu());
        Self {
            model: LoadedModel { capabilities, architecture, inventory, kv_dtype },
            blank,
            groups: BTreeMap::new(),
            last: None,
            backend,
        }
    }

    /// The same session under the name of another variant.
    pub fn named(mut self, variant: EngineKind) -> Self {
        variant.name().clone_into(&mut self.model.capabilities.engine);
        self
    }

    fn refuse<T>(what: String, why: String) -> Result<T, EngineError> {
        Err(EngineError::unsupported("stock", what, why))
    }

    /// Checks that a batch is uniform and inside the limits; returns tokens per sequence and the position.
    fn check(&self, batch: &StepBatch) -> Result<(usize, usize), EngineError> {
        let LoadedModel { capabilities, architecture, .. } = &self.model;
        check_logits(capabilities, batch)?;
        let Some(first) = batch.sequences.first() else {
            return Self::refuse("an empty batch".into(), "a step needs at least one sequence".into());
        };
        let (tokens, position) = (first.tokens.len(), first.start_position);
        if tokens == 0 {
            return Self::refuse("a step without tokens".into(), "every sequence must bring one".into());
        }
        for other in &batch.sequences {
            if other.tokens.len() != tokens || other.start_position != position {
                return Self::refuse(
                    "a ragged batch".into(),
                    format!(
                        "sequence {} brings {} tokens at {}, sequence {} {} at {}; candle's cache has one offset",
                        first.sequence.0,
                        tokens,
                        position,
                        other.sequence.0,
                        other.tokens.len(),
                        other.start_position
                    ),
                );
            }
            if let Some(&token) = other.tokens.iter().find(|&&t| t as usize >= architecture.vocab_size) {
                return Self::refuse(
                    format!("token {token}"),
                    format!("the vocabulary ends at {}", architecture.vocab_size),
                );
            }
        }
        if position + tokens > capabilities.max_positions {
            return Self::refuse(
                format!("position {}", position + tokens),
                format!("the limit is {}", capabilities.max_positions),
            );
        }
        check_tensors(capabilities, architecture, batch.sequences.len(), tokens, position + tokens)?;
        Ok((tokens, position))
    }

    /// The group of a batch at the wanted position: empty, continued, or rewound by one step.
    fn group_at(&mut self, batch: &StepBatch, position: usize) -> Result<&mut Group, EngineError> {
        let key = batch.sequences[0].sequence;
        if position == 0 {
            let sequences = batch.sequences.iter().map(|s| s.sequence).collect();
            let blank = || (0, self.blank.clone());
            self.groups.insert(key, Group { sequences, before: blank(), now: blank() });
        }
        let Some(group) = self.groups.get_mut(&key) else {
            return Self::refuse(
                format!("a step at position {position} of unknown sequence {}", key.0),
                "a sequence starts at position 0".into(),
            );
        };
        if !group.sequences.iter().eq(batch.sequences.iter().map(|s| &s.sequence)) {
            return Self::refuse(
                "sequences from different groups in one step".into(),
                "sequences that were prefilled together must go on together".into(),
            );
        }
        if group.now.0 == position {
            group.before = group.now.clone();
        } else if group.before.0 == position {
            group.now = group.before.clone();
        } else {
            return Self::refuse(
                format!("a step at position {position}"),
                format!("the cache holds {} positions and can go back to {}", group.now.0, group.before.0),
            );
        }
        Ok(group)
    }
}

impl Session for StockSession {
    fn model(&self) -> &LoadedModel {
        &self.model
    }

    fn step(&mut self, batch: &StepBatch) -> Result<(), EngineError> {
        let (tokens, position) = self.check(batch)?;
        // The last step's logits are freed before the next step allocates, as in a decoding loop.
        self.last = None;
        let name = self.backend.name.clone();
        let failed = |e: candle_core::Error| of_candle(&name, &e);
        let flat: Vec<u32> = batch.sequences.iter().flat_map(|s| s.tokens.iter().copied()).collect();
        let input =
            Tensor::from_vec(flat, (batch.sequences.len(), tokens), &self.backend.device).map_err(failed)?;
        let group = self.group_at(batch, position)?;
        let outputs = greedy(&mut group.now.1, &input, position).map_err(failed)?;
        group.now.0 = position + tokens;
        self.last = Some(outputs);
        Ok(())
    }

    fn read_logits(&mut self, logits: &mut Vec<f32>) -> Result<(), EngineError> {
        let (all, _) = self.last.as_ref().ok_or(EngineError::NoStepRun)?;
        // candle returns a tensor's values in a new vector.
        *logits =
            all.flatten_all().and_then(|all| all.to_vec1()).map_err(|e| of_candle(&self.backend.name, &e))?;
        Ok(())
    }

    fn next_tokens(&mut self, tokens: &mut Vec<u32>) -> Result<(), EngineError> {
        let (_, greedy) = self.last.as_ref().ok_or(EngineError::NoStepRun)?;
        // candle returns a tensor's values in a new vector, as its users read tokens.
        tokens.extend(greedy.to_vec1::<u32>().map_err(|e| of_candle(&self.backend.name, &e))?);
        Ok(())
    }

    fn timeline(&mut self) -> &mut dyn Timeline {
        self.backend.timeline.as_mut()
    }

    fn release(&mut self, sequence: SequenceId) {
        self.groups.retain(|_, group| !group.sequences.contains(&sequence));
    }

    fn peak_memory(&mut self) -> Option<Bytes> {
        self.backend.peak_memory.as_mut().and_then(|read| read())
    }
}

/// What candle's models can do within the limits of an architecture.
pub fn capabilities(variant: EngineKind, limits: Limits, device: &str, host_memory: bool) -> Capabilities {
    // Behind a prompt they take the last position of each sequence, which lie apart, to a product that wants rows side by side.
    let one_sequence = limits.quantized && !host_memory;
    Capabilities {
        engine: variant.name().into(),
        device: device.into(),
        max_batch: if one_sequence { 1 } else { 4096 },
        max_batch_reason: one_sequence
            .then(|| "candle's quantised models take one sequence on a GPU".to_owned()),
        max_positions: limits.max_positions,
        max_positions_reason: limits.reason,
        ragged: Ragged::Uniform,
        paged: false,
        prefix_sharing: false,
        graphs: variant == EngineKind::StockGraph,
        every_token_logits: false,
        kernels: Vec::new(),
        host_memory,
    }
}

/// A step as a decoder needs it: logits of the last position, f32, and the greedy token of each sequence.
fn greedy(model: &mut StockModel, tokens: &Tensor, position: usize) -> candle_core::Result<(Tensor, Tensor)> {
    let logits = model.forward(tokens, position)?;
    let greedy = logits.argmax(D::Minus1)?;
    Ok((logits, greedy))
}

/// The candle dtype of a plain float dtype.
pub fn candle_dtype(dtype: Dtype) -> Result<DType, EngineError> {
    plain_dtype(dtype, "loaded").map_err(|_| {
        let native = match dtype {
            Dtype::Fp8 | Dtype::Gguf => String::new(),
            _ => format!("; the native engine runs {dtype}"),
        };
        let why = format!(
            "candle's float models run f32, bf16 and f16; its quantised ones take their weights from a GGUF file{native}"
        );
        EngineError::unsupported("stock", format!("dtype {dtype}"), why)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_way_is_an_engine_and_only_the_eager_one_runs_on_a_cpu() {
        for variant in EngineKind::ALL.iter().copied().filter(|kind| kind.is_stock()) {
            assert_eq!(EngineKind::of(variant.name()), Some(variant));
            assert!(check_device(variant, DeviceChoice::Cuda(0)).is_ok());
            assert_eq!(check_device(variant, DeviceChoice::Cpu).is_ok(), variant == EngineKind::Stock);
        }
    }

    #[test]
    fn quantised_models_of_candle_take_one_sequence_on_a_gpu() {
        let of = |quantized, host_memory| {
            let limits = Limits { max_positions: 64, reason: None, quantized };
            capabilities(EngineKind::Stock, limits, "cuda:0", host_memory)
        };
        assert_eq!(of(true, false).max_batch, 1);
        assert!(of(true, false).max_batch_reason.unwrap().contains("one sequence"));
        for (quantized, host_memory) in [(true, true), (false, false), (false, true)] {
            let capabilities = of(quantized, host_memory);
            assert!(capabilities.max_batch > 1 && capabilities.max_batch_reason.is_none());
        }
    }

    #[test]
    fn a_step_with_a_tensor_that_no_kernel_can_index_is_refused_on_a_gpu() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models/llama-gqa");
        let model = crate::weights::open(folder, None, 0).unwrap();
        let backend = Backend::cpu();
        let loaded = model.load(Dtype::F32, &backend.device, &mut |_| {}).unwrap();
        let crate::weights::Weights::Tensors { tensors, inventory } = loaded else { unreachable!() };
        let mut session =
            StockSession::new(model.architecture.clone(), tensors, inventory, Dtype::F32, backend).unwrap();
        let (heads, context) = (model.architecture.heads, model.architecture.max_positions);
        let most = (1 << 31) / (heads * context * context);
        let prompts = |batch| StepBatch::uniform(SequenceId(0), &vec![vec![1; context]; batch], 0);
        assert!(session.check(&prompts(most + 1)).is_ok());
        session.model.capabilities.host_memory = false;
        assert!(session.check(&prompts(most)).is_ok());
        let error = session.check(&prompts(most + 1)).unwrap_err().to_string();
        let scores = (most + 1) * heads * context * context;
        assert!(error.contains(&format!("a tensor of {scores} attention scores")), "{error}");
        assert!(error.contains("index 2147483648 elements"), "{error}");
    }

    #[test]
    fn a_packed_dtype_is_refused_with_the_engine_that_runs_it() {
        for dtype in [Dtype::Int8, Dtype::Int4, Dtype::Q8_0, Dtype::Q4_0, Dtype::Q4K, Dtype::Q5K, Dtype::Q6K]
        {
            let error = candle_dtype(dtype).unwrap_err().to_string();
            assert!(error.contains(&format!("dtype {dtype}")), "{error}");
            assert!(error.ends_with(&format!("the native engine runs {dtype}")), "{error}");
        }
        assert!(!candle_dtype(Dtype::Fp8).unwrap_err().to_string().contains("native"));
    }
}
