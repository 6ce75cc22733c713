//! The native engine: our own forward over a paged KV pool, fused operations, ragged batches.
//!
//! Enters: a model and a device's [`Operations`]. Leaves: a [`Session`]. The stock engine shows what users of candle get, the native one
//! what memory bandwidth allows. `forward` is written once; `cpu` is the fast implementation on the host, `oracle` the reference
//! that all others are compared with.

pub(crate) mod adapters;
mod block_tables;
mod checks;
pub(crate) mod cpu;
#[cfg(any(test, feature = "cuda"))]
#[allow(dead_code, reason = "a build with CUDA needs what tests do not, and the other way round")]
pub(crate) mod cuda;
pub(crate) mod forward;
mod gguf_formats;
pub(crate) mod kv_format;
pub mod operations;
pub(crate) mod oracle;
mod parallel;
pub(crate) mod ragged_batch;
pub mod random_kv;
pub(crate) mod ranks;
pub(crate) mod rope;
pub(crate) mod routing_script;
pub(crate) mod shapes;
pub(crate) mod testing;
mod weights;

use std::collections::HashMap;

use block_tables::BlockTables;
pub use checks::check;
#[cfg(any(test, feature = "cuda"))]
pub(crate) use checks::check_device;
pub(crate) use checks::{check_kv_dtype, check_model_on_device, check_ranks};
pub use cpu::{CpuOperations, InstructionSet};
use forward::{Forward, ModelWeights, ModelWidths};
use operations::{Operation, Operations};
pub(crate) use parallel::ParallelSession;
pub use ragged_batch::Rows;
pub use rope::RopeTables;
use rope::distinct_ropes;
pub use shapes::{AttentionShape, Gate, PoolShape};

use super::{
    AdapterId, DeviceChoice, DeviceOptions, EngineError, LoadedModel, OperationTime, ScriptedRouting,
    SequenceId, Session, StepBatch, Timeline,
};
use crate::engine::{LoraSession, StepProfiler, SyntheticKv};
use crate::weights::{Adapter, OpenModel, Packing, StoredTensor};
use hbmark_core::model::{Architecture, Dtype, Inventory, Target};
use hbmark_core::result::{Capabilities, Ragged};
use hbmark_core::units::{Bytes, Nanos};

/// The name on the command line and in results.
pub const NAME: &str = "native";

/// Default positions in a block: 64 positions of one head are 8 KB and more of contiguous memory.
pub const DEFAULT_BLOCK_SIZE: usize = 64;

/// The most sequences in a step.
const MAX_BATCH: usize = 4096;

fn refuse<T>(what: impl Into<String>, why: impl Into<String>) -> Result<T, EngineError> {
    Err(EngineError::unsupported(NAME, what, why))
}

/// What the engine can do with an architecture.
pub fn capabilities(architecture: &Architecture, device: &str, host_memory: bool) -> Capabilities {
    Capabilities {
        engine: NAME.into(),
        device: device.into(),
        max_batch: MAX_BATCH,
        max_batch_reason: None,
        max_positions: architecture.max_positions,
        max_positions_reason: None,
        ragged: Ragged::Fused,
        paged: true,
        prefix_sharing: true,
        graphs: !host_memory,
        every_token_logits: true,
        host_memory,
        kernels: Vec::new(),
    }
}

/// The storage of the KV cache that goes with a dtype of weights.
pub fn kv_dtype(dtype: Dtype) -> Dtype {
    match dtype {
        Dtype::F32 | Dtype::F16 => dtype,
        _ => Dtype::Bf16,
    }
}

/// Loads a model onto a device, over so many ranks of a tensor parallel group.
///
/// # Errors
/// When the model is not one the engine runs there, this build has no such device, or the weights cannot be loaded.
pub fn open(
    model: &OpenModel,
    dtype: Dtype,
    (device, ranks): (DeviceChoice, usize),
    options: DeviceOptions,
    loaded: &mut dyn FnMut(Bytes),
) -> Result<Box<dyn Session>, EngineError> {
    check(&model.architecture, dtype)?;
    check_model_on_device(model, dtype, device)?;
    let block_size = options.block_size.unwrap_or(DEFAULT_BLOCK_SIZE);
    let dtypes = (dtype, options.kv_dtype.unwrap_or_else(|| kv_dtype(dtype)));
    let threads = options.threads.unwrap_or_else(usable_threads);
    let mut session: Box<dyn Session> = match (device, ranks) {
        (DeviceChoice::Cpu, ..=1) => {
            let operations = CpuOperations::new(threads)?;
            Box::new(NativeSession::load_with_cache(operations, model, dtypes, block_size, loaded)?)
        }
        (DeviceChoice::Cpu, _) => {
            Box::new(ParallelSession::on_cpu(model, dtypes, (ranks, threads), block_size, loaded)?)
        }
        #[cfg(feature = "cuda")]
        (DeviceChoice::Cuda(index), ..=1) => {
            let operations = cuda::CudaOperations::new(cuda::driver::Driver::open(index)?);
            Box::new(NativeSession::load_with_cache(operations, model, dtypes, block_size, loaded)?)
        }
        #[cfg(feature = "cuda")]
        (DeviceChoice::Cuda(first), _) => {
            check_ranks(model, dtype, device, ranks)?;
            let drivers = cuda::driver::Driver::open_group(first, ranks)?;
            let operations = drivers.into_iter().map(cuda::CudaOperations::new).collect();
            Box::new(ParallelSession::on_gpus(model, dtypes, operations, block_size, loaded)?)
        }
        #[cfg(not(feature = "cuda"))]
        (DeviceChoice::Cuda(_), _) => {
            return Err(EngineError::NotBuiltForCuda { asked: device.to_string() });
        }
    };
    session.script_experts(options.scripted_routing);
    Ok(session)
}

/// Loads quantised weights dequantised to f32: the reference of their quality.
///
/// # Errors
/// As [`open`].
pub fn open_dequantised(
    model: &OpenModel,
    dtype: Dtype,
    options: DeviceOptions,
    loaded: &mut dyn FnMut(Bytes),
) -> Result<NativeSession<CpuOperations>, EngineError> {
    check(&model.architecture, dtype)?;
    let operations = CpuOperations::new(options.threads.unwrap_or_else(usable_threads))?;
    let each = weights::dequantised;
    let mut session =
        NativeSession::assemble(operations, model, (dtype, Dtype::F32), DEFAULT_BLOCK_SIZE, each, loaded)?;
    session.script_experts(options.scripted_routing);
    Ok(session)
}

/// The processors this process may run on.
fn usable_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// A loaded model on a device.
pub struct NativeSession<O: Operations> {
    operations: O,
    forward: Forward<O>,
    pool: O::Pool,
    pool_shape: PoolShape,
    tables: BlockTables,
    rows: Rows,
    model: LoadedModel,
    timeline: Box<dyn Timeline + Send>,
    moved: Option<Bytes>,
    /// The adapters of the sequences that have one.
    adapted: HashMap<SequenceId, usize>,
    /// The script that picks experts, where one does.
    scripted: Option<ScriptedRouting>,
}

impl<O: Operations> std::fmt::Debug for NativeSession<O> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NativeSession").field("operations", &self.operations).finish_non_exhaustive()
    }
}

impl<O: Operations> NativeSession<O> {
    /// Loads a model through a device's operations.
    ///
    /// # Errors
    /// When the weights cannot be loaded or memory runs out.
    pub fn load(
        operations: O,
        model: &OpenModel,
        dtype: Dtype,
        block_size: usize,
        loaded: &mut dyn FnMut(Bytes),
    ) -> Result<Self, EngineError> {
        Self::load_with_cache(operations, model, (dtype, kv_dtype(dtype)), block_size, loaded)
    }

    /// As [`Self::load`], with dtypes of weights and of the KV cache.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn load_with_cache(
        operations: O,
        model: &OpenModel,
        dtypes: (Dtype, Dtype),
        block_size: usize,
        loaded: &mut dyn FnMut(Bytes),
    ) -> Result<Self, EngineError> {
        Self::assemble(operations, model, dtypes, block_size, std::convert::identity, loaded)
    }

    /// As [`Self::load`], with every tensor passed through `each` before it is packed.
    fn assemble(
        mut operations: O,
        model: &OpenModel,
        (dtype, kv_dtype): (Dtype, Dtype),
        block_size: usize,
        each: fn(StoredTensor) -> StoredTensor,
        loaded: &mut dyn FnMut(Bytes),
    ) -> Result<Self, EngineError> {
        let (weights, inventory) = weights::load(&mut operations, model, dtype, each, loaded)?;
        Self::of_weights(operations, &model.architecture, weights, inventory, kv_dtype, block_size)
    }

    /// Over weights that are packed.
    fn of_weights(
        mut operations: O,
        architecture: &Architecture,
        weights: ModelWeights<O>,
        inventory: Inventory,
        kv_dtype: Dtype,
        block_size: usize,
    ) -> Result<Self, EngineError> {
        let architecture = architecture.clone();
        let ropes = RopeTables::new(&architecture)?;
        let pool_shape = PoolShape::of(&architecture, block_size, kv_dtype);
        let pool = operations.pool(pool_shape)?;
        Ok(Self {
            forward: Forward::new(ModelWidths::of(&architecture), weights, ropes),
            pool,
            pool_shape,
            tables: BlockTables::new(block_size),
            rows: Rows::new(block_size),
            model: LoadedModel {
                capabilities: Capabilities {
                    kernels: operations.kernels(),
                    ..capabilities(&architecture, &operations.device_name(), operations.in_host_memory())
                },
                architecture,
                inventory,
                kv_dtype,
            },
            timeline: operations.timeline(),
            operations,
            moved: None,
            adapted: HashMap::new(),
            scripted: None,
        })
    }

    /// The shape of the KV pool.
    pub fn pool_shape(&self) -> PoolShape {
        self.pool_shape
    }

    fn check_batch(&self, batch: &StepBatch) -> Result<(), EngineError> {
        let LoadedModel { capabilities, architecture, .. } = &self.model;
        if batch.sequences.is_empty() {
            return refuse("an empty batch", "a step needs at least one sequence");
        }
        if batch.sequences.len() > capabilities.max_batch {
            return refuse(
                format!("a batch of {}", batch.sequences.len()),
                format!("the limit is {}", capabilities.max_batch),
            );
        }
        for step in &batch.sequences {
            if step.tokens.is_empty() {
                return refuse("a step without tokens", "every sequence must bring one");
            }
            if let Some(token) = step.tokens.iter().find(|t| **t as usize >= architecture.vocab_size) {
                return refuse(
                    format!("token {token}"),
                    format!("the vocabulary ends at {}", architecture.vocab_size),
                );
            }
            let end = step.start_position + step.tokens.len();
            if end > capabilities.max_positions {
                return refuse(
                    format!("position {end}"),
                    format!("the limit is {}", capabilities.max_positions),
                );
            }
        }
        Ok(())
    }

    /// Flattens the batch into rows and allocates its KV blocks.
    fn prepare(&mut self, batch: &StepBatch) -> Result<(), EngineError> {
        self.check_batch(batch)?;
        self.rows.clear();
        for step in &batch.sequences {
            let end = step.start_position + step.tokens.len();
            let table = self.tables.table(step, end)?;
            self.rows.push_with_outputs(&step.tokens, step.start_position, table, step.outputs());
        }
        if !self.adapted.is_empty() {
            let adapted = &self.adapted;
            self.rows.set_adapters(batch.sequences.iter().map(|step| adapted.get(&step.sequence).copied()));
        }
        self.rows.pad(self.operations.padded(&self.rows), self.tables.spare());
        self.operations.reserve(&mut self.pool, self.tables.blocks() + self.rows.padding.min(1))
    }
}

impl<O: Operations> Session for NativeSession<O> {
    fn model(&self) -> &LoadedModel {
        &self.model
    }

    fn step(&mut self, batch: &StepBatch) -> Result<(), EngineError> {
        self.prepare(batch)?;
        self.forward.step(&mut self.operations, &self.rows, &mut self.pool, &mut |_, _| {})?;
        self.moved = Some(self.operations.take_bytes_moved());
        Ok(())
    }

    fn read_logits(&mut self, logits: &mut Vec<f32>) -> Result<(), EngineError> {
        self.forward.read_logits(&mut self.operations, logits)
    }

    fn next_tokens(&mut self, tokens: &mut Vec<u32>) -> Result<(), EngineError> {
        tokens.extend_from_slice(self.forward.next_tokens(&mut self.operations)?);
        Ok(())
    }

    fn timeline(&mut self) -> &mut dyn Timeline {
        &mut *self.timeline
    }

    fn release(&mut self, sequence: SequenceId) {
        self.tables.release(sequence);
        self.adapted.remove(&sequence);
    }

    fn lora(&mut self) -> Option<&mut dyn LoraSession> {
        self.operations.supports_lora().then_some(self as &mut dyn LoraSession)
    }
    fn synthetic_kv(&mut self) -> Option<&mut dyn SyntheticKv> {
        Some(self)
    }
    fn profiler(&mut self) -> Option<&mut dyn StepProfiler> {
        Some(self)
    }

    fn bytes_moved(&mut self) -> Option<Bytes> {
        let [gate_up, down] = self.operations.await_expert_bytes().ok()?;
        self.moved.map(|moved| moved + gate_up + down)
    }

    fn experts_met(&mut self) -> Option<f64> {
        self.operations.take_experts_met().mean()
    }

    fn threads_away(&mut self) -> Option<f64> {
        self.operations.take_threads_away()
    }

    fn script_experts(&mut self, script: Option<ScriptedRouting>) -> Option<ScriptedRouting> {
        self.forward.script_routing(script);
        std::mem::replace(&mut self.scripted, script)
    }

    fn preallocate_blocks(&mut self, blocks: usize) -> Result<(), EngineError> {
        self.operations.reserve(&mut self.pool, blocks)
    }
}

/// Whether the elements of heads are brought into another order when a model is loaded, which adapters do not know.
fn reorders_heads(a: &Architecture) -> bool {
    distinct_ropes(a).any(|rotary| rotary.interleaved || rotary.dims < a.head_dim)
}

impl<O: Operations> LoraSession for NativeSession<O> {
    fn load_adapter(&mut self, adapter: &Adapter) -> Result<(AdapterId, Bytes), EngineError> {
        // As precise as K and V: plain floats keep their dtype, adapters of quantised weights are 16-bit.
        let packing = Packing::of(self.pool_shape.dtype, 0).unwrap_or(Packing::Bf16);
        let architecture = &self.model.architecture;
        let widths = ModelWidths::of(architecture);
        let mlp = [Target::GateProj, Target::UpProj, Target::DownProj];
        let adapts = |layer: usize| mlp.iter().any(|target| adapter.at(layer, *target).is_some());
        if (0..architecture.layers).any(|layer| architecture.is_expert_layer(layer) && adapts(layer)) {
            return refuse(
                format!("the adapter {} of a layer with experts", adapter.name),
                "its experts take none; adapt q_proj, k_proj, v_proj and o_proj alone",
            );
        }
        if reorders_heads(architecture) {
            return refuse(
                format!("the adapter {} of the {:?} family", adapter.name, architecture.family),
                "elements of its heads are kept in an order that adapters do not know; merge the adapter into the weights",
            );
        }
        let (number, bytes) =
            self.forward.adapters().take(&mut self.operations, &widths, adapter, packing)?;
        Ok((AdapterId(number), bytes))
    }

    fn set_adapter(&mut self, sequence: SequenceId, adapter: Option<AdapterId>) -> Result<(), EngineError> {
        match adapter {
            Some(AdapterId(number)) if number >= self.forward.adapters().count() => {
                refuse(format!("adapter {number}"), format!("{} are loaded", self.forward.adapters().count()))
            }
            Some(AdapterId(number)) => {
                self.adapted.insert(sequence, number);
                Ok(())
            }
            None => {
                self.adapted.remove(&sequence);
                Ok(())
            }
        }
    }
}

impl<O: Operations> SyntheticKv for NativeSession<O> {
    fn fill_kv(&mut self, sequence: SequenceId, positions: usize, seed: u64) -> Result<(), EngineError> {
        let table = self.tables.extend(sequence, positions)?.to_vec();
        self.operations.reserve(&mut self.pool, self.tables.blocks())?;
        self.operations.fill_blocks(&mut self.pool, &table, seed)?;
        Ok(())
    }
}

impl<O: Operations> StepProfiler for NativeSession<O> {
    fn profile(&mut self, batch: &StepBatch) -> Result<Vec<OperationTime>, EngineError> {
        self.prepare(batch)?;
        let mut times: Vec<OperationTime> = Operation::ALL
            .iter()
            .map(|operation| OperationTime {
                operation: operation.name(),
                calls: 0,
                time: Nanos(0.0),
                bytes: Bytes(0),
            })
            .collect();
        self.operations.take_bytes_moved();
        self.timeline.drain()?;
        self.timeline.mark()?;
        let Self { operations, forward, timeline, rows, pool, .. } = self;
        let mut ends = Vec::with_capacity(Operation::ALL.len() * self.model.architecture.layers);
        let mut marked = Ok(());
        // A step launched as one graph has no operations to time.
        operations.allow_whole_graph(false);
        let stepped = forward.step(operations, rows, pool, &mut |operations, operation| {
            ends.push((operation, operations.take_bytes_moved()));
            if let Err(error) = timeline.mark() {
                marked = Err(error);
            }
        });
        operations.allow_whole_graph(true);
        stepped.and(marked)?;
        let marks = timeline.drain()?;
        let [gate_up, down] = operations.await_expert_bytes()?;
        for ((operation, bytes), gap) in ends.into_iter().zip(marks.windows(2)) {
            let row = &mut times[operation as usize];
            row.calls += 1;
            row.time = Nanos(row.time.0 + gap[1].0 - gap[0].0);
            row.bytes = row.bytes + bytes;
        }
        for (operation, bytes) in [(Operation::ExpertGateUp, gate_up), (Operation::ExpertDown, down)] {
            let row = &mut times[operation as usize];
            row.bytes = row.bytes + bytes;
        }
        // A dense model has no experts, and a mixture perhaps no dense layer.
        times.retain(|row| row.calls > 0);
        Ok(times)
    }
}
