//! [`Operations`] over a [`Device`]: each is one kernel, and a repeated decode step is one graph.
//!
//! Enters: packed weights, activations, the rows of a step. Leaves: work enqueued on the device. The first decode step of a size runs kernel by kernel,
//! which allocates all scratch memory; the second is recorded; later ones of that size are one replay, whatever their tokens, positions and
//! blocks, because those are in device memory ([`StepState`]). Sizes are few: a decode step is padded to the next of them ([`padded`]), and what its
//! longest context needs in attention is rounded up to a power of two. Any reallocation invalidates the recorded graphs.

mod workspace;

use std::collections::HashMap;

use super::attention::{
    AttentionCut, DecodeAttention, KvSplitPlan, MAX_HEAD_DIM, PrefillAttention, QueryTiles,
};
use super::device::Device;
use super::device_matrix::{KernelFormat, Matrix, floats};
use super::experts::{
    COUNTED_LAYERS, DeviceScript, ExpertDown, ExpertGateUp, ExpertPlan, ExpertTable, Route,
};
use super::kernels::{
    AddNormed, DeviceTensor, Embed, FillKv, GateUp, Head, JoinState, NormQkv, ProjectAdd, Tuning,
};
use super::latent::{
    DeviceRows, ExpandLatents, FinishLatent, HeadProduct, LatentAttention, LatentCut, LatentDown,
    MAX_WIDTH as MAX_LATENT_WIDTH, TurnQueries,
};
use super::peers::{NO_TOKEN, PeerBuffer};
use super::step::{Pool, Scratch, StepState};
use super::tensor_core_linear::{self, TiledWorkspace};
use crate::engine::native::operations::{
    AttentionWeights, DraftWeights, Embedding, ExpertMlp, ExpertWeights, FusedLayout, LatentWeights,
    LinearPart, Operations, StepLaunch,
};
use crate::engine::native::ragged_batch::Rows;
use crate::engine::native::ranks::Rank;
use crate::engine::native::rope::RopeTables;
use crate::engine::native::shapes::{AttentionShape, ExpertsMet, Gate, LatentForm, LatentShape, PoolShape};
use crate::engine::native::{kv_format, random_kv};
use crate::engine::{EngineError, Timeline};
use crate::weights::StoredMatrix;
use hbmark_core::model::Dtype;
use hbmark_core::units::Bytes;
use hbmark_cpu_kernels::e4m3;
use hbmark_cpu_kernels::element::int8_code;
use workspace::{Rounded, Workspace};

/// The size that decode steps of so many rows are run at. A product takes `at_once` rows for the price of one, so that rows up to a whole number
/// of such groups cost no weights; beyond 128 rows an eighth is added at the most.
fn padded(rows: usize, at_once: usize) -> usize {
    if rows < at_once {
        return rows.next_power_of_two().min(at_once);
    }
    rows.next_multiple_of((rows.next_power_of_two() / 16).max(at_once))
}

/// Rows that products take at once: on tensor cores, and streaming.
const TILED_AT_ONCE: usize = 8;
const STREAMED_AT_ONCE: usize = 4;

/// What steps have in common that one graph can serve: rows, how they are attended to, and the power of two above the splits that their longest
/// context could fill.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct StepKey {
    rows: usize,
    tiles: QueryTiles,
    splits: usize,
    /// Whether a script picks experts.
    scripted: bool,
}

/// What is known of steps of a key.
#[derive(Debug)]
enum GraphState<D: Device> {
    /// One ran, so the scratch is there.
    Ran,
    Captured(CapturedGraph<D>),
}

#[derive(Debug)]
struct CapturedGraph<D: Device> {
    graph: D::Graph,
    /// Bytes of everything but attention, which depends on positions.
    bytes: u64,
    attentions: Vec<(AttentionCut, Option<usize>)>,
    routed: Vec<[u64; 2]>,
}

/// How the current step continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Plain,
    Recording(StepKey),
}

/// A device's side of the native forward.
#[derive(Debug)]
pub struct CudaOperations<D: Device> {
    /// Before the device, so that graphs are destroyed while their kernels are loaded: fields are dropped in this order.
    known: HashMap<StepKey, GraphState<D>>,
    device: D,
    tuning: Tuning,
    step: StepState<D>,
    workspace: Workspace<D>,
    /// Of a rank of a tensor parallel group, and how many ranks that has.
    peer_buffer: PeerBuffer<D>,
    ranks: usize,
    /// What the last operation left for the next.
    rounded: Option<Rounded>,
    /// Rows that every linear layer takes at once.
    at_once: usize,
    mode: Mode,
    may_record: bool,
    moved: u64,
    attention_moved: u64,
    attentions: Vec<(AttentionCut, Option<usize>)>,
    script: DeviceScript<D>,
    /// Of the layers with experts of the current step: bytes of an expert's gate and up, and of its down.
    routed: Vec<[u64; 2]>,
    /// Layers with experts, summed over steps, and the experts that were met when they were last asked for.
    routed_layers: u64,
    experts_told: u64,
    /// Of the current step, without padding.
    outputs: usize,
    replays: usize,
    next_bytes: Vec<u8>,
    /// Draws of K and V as a cache keeps them, by its dtype.
    quantiles: Option<(Dtype, D::Memory)>,
}

impl<D: Device> CudaOperations<D> {
    /// The operations of a device.
    #[must_use]
    pub fn new(device: D) -> Self {
        Self::with_tuning(device, Tuning::default())
    }

    /// As [`Self::new`], with sizes of one's own.
    #[must_use]
    pub fn with_tuning(device: D, tuning: Tuning) -> Self {
        Self {
            device,
            tuning,
            step: StepState::default(),
            workspace: Workspace::default(),
            peer_buffer: PeerBuffer::default(),
            ranks: 1,
            rounded: None,
            known: HashMap::new(),
            at_once: TILED_AT_ONCE,
            mode: Mode::Plain,
            may_record: true,
            moved: 0,
            attention_moved: 0,
            attentions: Vec::new(),
            script: DeviceScript::default(),
            routed: Vec::new(),
            routed_layers: 0,
            experts_told: 0,
            outputs: 0,
            replays: 0,
            next_bytes: Vec::new(),
            quantiles: None,
        }
    }

    /// Steps that were replayed so far.
    #[must_use]
    pub fn replays(&self) -> usize {
        self.replays
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &D {
        &self.device
    }

    /// The device, to plant faults in.
    #[cfg(test)]
    pub fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// Copies of step data to the device so far.
    #[must_use]
    pub fn uploads(&self) -> usize {
        self.step.uploads
    }

    /// Only steps over a cache come again and again; `longest` is what their positions reach.
    fn key(&self, rows: &Rows) -> Option<StepKey> {
        let longest = longest(rows).div_ceil(self.tuning.min_split).next_power_of_two();
        (self.may_record && comes_again(rows)).then_some(StepKey {
            rows: rows.len(),
            tiles: QueryTiles::of(rows),
            splits: longest,
            scripted: self.script.is_set(),
        })
    }

    /// Counts K and V of an attention; in a recorded step they depend on the positions of each replay.
    fn count_attention(&mut self, cut: AttentionCut, rows: &Rows, window: Option<usize>, pool: &PoolShape) {
        let read = cut.bytes(rows, window, pool);
        self.attentions.push((cut, window));
        self.moved += read;
        self.attention_moved += read;
    }

    /// The product of each head with its own part of a matrix; of rows and outputs, how far those of heads are apart.
    fn product_by_head(
        &mut self,
        rows: usize,
        heads: usize,
        weights: &Matrix<D>,
        (input, input_apart): (DeviceRows, usize),
        (out, out_apart): (&DeviceTensor<D>, usize),
    ) -> Result<(), EngineError> {
        let mut workspace = None;
        if rows >= self.tuning.min_tiled_rows && tensor_core_linear::fits(weights.format) {
            let bytes = tensor_core_linear::prepared_bytes(weights, rows * heads);
            self.grow(|space| &mut space.prepared, bytes, &[])?;
            let prepared = self.workspace.prepared.address();
            workspace = Some(TiledWorkspace { prepared, ready: false, by_library: false, widened: 0 });
        }
        let kernel = HeadProduct { rows, heads, weights, input, input_apart, out, out_apart, workspace };
        self.moved += kernel.launch(&mut self.device, self.tuning)?;
        Ok(())
    }

    /// Attention over latents; `longest` positions are the most that a row of any step sees that a graph of this one will serve.
    #[expect(clippy::too_many_arguments, reason = "one fused operation")]
    fn attend_to_latents(
        &mut self,
        rows: &Rows,
        shape: &AttentionShape,
        layer: usize,
        query: &DeviceTensor<D>,
        pool: &Pool<D>,
        out: &DeviceTensor<D>,
        longest: usize,
    ) -> Result<(), EngineError> {
        let cut = LatentCut::new(&self.device, rows, shape.heads, pool.shape.dtype, longest, self.tuning);
        if cut.splits() > 1 {
            let parts = rows.len() * shape.heads * cut.splits();
            self.splits_workspace(parts, shape.value_dim, cut.words(rows))?;
        }
        let space = &self.workspace;
        let kernel = LatentAttention {
            rows,
            shape: *shape,
            cut,
            query,
            step: &self.step,
            pool,
            layer,
            out,
            partial: space.partial.address(),
            statistics: space.statistics.address(),
            arrived: space.splits_arrived.address(),
        };
        kernel.launch(&mut self.device, self.tuning)?;
        self.count_attention(AttentionCut::Latents(cut), rows, None, &pool.shape);
        Ok(())
    }

    /// How the rows of a step meet experts, and where what routing leaves lies.
    fn expert_plan(
        &mut self,
        rows: usize,
        experts: &ExpertWeights<Self>,
    ) -> Result<(ExpertPlan, u64), EngineError> {
        let format = experts.routed[0].gate_up.format;
        let plan = ExpertPlan::new(self.device.shared_bytes(), rows, &experts.shape, format, self.tuning);
        self.grow(|space| &mut space.expert_work, plan.work_bytes(&experts.shape), &[])?;
        self.grow(|space| &mut space.prepared, plan.prepared_bytes(experts), &[])?;
        Ok((plan, self.workspace.expert_work.address()))
    }

    /// `hidden += norm(sums)`, where there is a norm.
    fn add_normed(
        &mut self,
        rows: usize,
        sums: u64,
        norm: Option<(&DeviceTensor<D>, f32)>,
        hidden: &DeviceTensor<D>,
    ) -> Result<(), EngineError> {
        if let Some((norm, norm_eps)) = norm {
            self.moved += AddNormed { rows, sums, norm, norm_eps, hidden }.launch(&mut self.device)?;
        }
        Ok(())
    }

    fn finish_capture(&mut self, key: StepKey) -> Result<(), EngineError> {
        // Until there is a graph the next step of the key runs kernel by kernel.
        self.known.remove(&key);
        let graph = self.device.end_capture()?;
        let attentions = std::mem::take(&mut self.attentions);
        let bytes = self.moved - self.attention_moved;
        self.device.replay(&graph)?;
        self.replays += 1;
        self.routed_layers += self.routed.len() as u64;
        let routed = self.routed.clone();
        self.known.insert(key, GraphState::Captured(CapturedGraph { graph, bytes, attentions, routed }));
        Ok(())
    }
}

/// Whether all tokens have logits: in decode and verify steps.
fn comes_again(rows: &Rows) -> bool {
    rows.len() == rows.outputs.len()
}

/// Positions of the longest sequence after the step.
fn longest(rows: &Rows) -> usize {
    rows.positions.iter().max().map_or(0, |position| *position as usize + 1)
}

impl<D: Device> Operations for CudaOperations<D> {
    type Linear = Matrix<D>;
    type Vector = DeviceTensor<D>;
    type Table = Matrix<D>;
    type Buffer = DeviceTensor<D>;
    type Pool = Pool<D>;
    type ExpertTable = ExpertTable<D>;

    fn linear(&mut self, parts: Vec<LinearPart>, layout: FusedLayout) -> Result<Matrix<D>, EngineError> {
        let matrix = Matrix::new(&mut self.device, &parts, layout)?;
        if !tensor_core_linear::fits(matrix.format) {
            self.at_once = STREAMED_AT_ONCE;
        }
        Ok(matrix)
    }

    fn vector(&mut self, values: Vec<f32>) -> Result<DeviceTensor<D>, EngineError> {
        Ok(DeviceTensor { memory: floats(&mut self.device, &values)?, rows: 1, width: values.len() })
    }

    fn table(&mut self, matrix: StoredMatrix) -> Result<Matrix<D>, EngineError> {
        Matrix::new(&mut self.device, &[LinearPart { matrix, bias: None }], FusedLayout::Stacked)
    }

    fn expert_table(
        &mut self,
        routed: &[ExpertMlp<Self>],
        shared: Option<&ExpertMlp<Self>>,
    ) -> Result<ExpertTable<D>, EngineError> {
        ExpertTable::new(&mut self.device, routed, shared)
    }

    fn buffer(&mut self, rows: usize, width: usize) -> Result<DeviceTensor<D>, EngineError> {
        // What was recorded may point to the buffer that this one replaces.
        self.known.clear();
        self.rounded = None;
        Ok(DeviceTensor { memory: self.device.allocate(4 * rows * width)?, rows, width })
    }

    fn expanded_pool(&mut self, shape: &LatentShape, latents: &Pool<D>) -> Result<Pool<D>, EngineError> {
        self.pool(shape.expanded_pool(&latents.shape))
    }

    fn set_width(buffer: &mut DeviceTensor<D>, width: usize) {
        buffer.width = width;
    }

    fn pool(&mut self, shape: PoolShape) -> Result<Pool<D>, EngineError> {
        if !shape.block_size.is_power_of_two() {
            return super::super::refuse(
                format!("blocks of {} positions on {}", shape.block_size, self.device.name()),
                "a power of two is needed",
            );
        }
        let widest = if shape.value_dim == 0 { MAX_LATENT_WIDTH } else { MAX_HEAD_DIM };
        kv_format::check(shape.dtype, shape.value_dim == 0)?;
        if !shape.head_dim.is_multiple_of(8) || shape.head_dim > widest {
            return super::super::refuse(
                format!("heads of {} on {}", shape.head_dim, self.device.name()),
                format!("a multiple of 8 up to {widest} is needed"),
            );
        }
        Ok(Pool::new(shape))
    }

    fn reserve(&mut self, pool: &mut Pool<D>, blocks: usize) -> Result<(), EngineError> {
        pool.reserve(&mut self.device, blocks)
    }

    fn fill_blocks(&mut self, pool: &mut Pool<D>, blocks: &[u32], seed: u64) -> Result<(), EngineError> {
        if blocks.is_empty() {
            return Ok(());
        }
        if self.quantiles.as_ref().is_none_or(|(dtype, _)| *dtype != pool.shape.dtype) {
            let mut bytes = Vec::new();
            narrow_into(random_kv::quantiles(), pool.shape.dtype, random_kv::int8_scale(), &mut bytes);
            let memory = self.device.allocate(bytes.len())?;
            self.device.upload(&memory, 0, &bytes)?;
            self.quantiles = Some((pool.shape.dtype, memory));
        }
        let Some((_, quantiles)) = &self.quantiles else { return Ok(()) };
        let addresses: Vec<u8> = blocks.iter().flat_map(|block| pool.address(*block).to_le_bytes()).collect();
        let table = self.device.allocate(addresses.len())?;
        self.device.upload(&table, 0, &addresses)?;
        FillKv { pool, quantiles, blocks: &table, count: blocks.len(), seed }.launch(&mut self.device)
    }

    fn take_script(&mut self, chosen: Option<&[u32]>) -> Result<(), EngineError> {
        let moved = self.script.set(&mut self.device, chosen);
        if !matches!(moved, Ok(false)) {
            self.known.clear();
        }
        moved.map(drop)
    }

    fn begin(&mut self, rows: &Rows, ropes: &RopeTables, pool: &Pool<D>) -> Result<StepLaunch, EngineError> {
        let moved = self.step.set(&mut self.device, rows, ropes, pool);
        if !matches!(moved, Ok(false)) {
            self.known.clear();
        }
        moved?;
        self.rounded = None;
        self.outputs = rows.served();
        self.attentions.clear();
        self.routed.clear();
        (self.moved, self.attention_moved) = (0, 0);
        let Some(key) = self.key(rows) else { return Ok(StepLaunch::PerOperation) };
        match self.known.get(&key) {
            None => Ok(StepLaunch::PerOperation),
            Some(GraphState::Ran) => {
                self.device.begin_capture()?;
                self.mode = Mode::Recording(key);
                Ok(StepLaunch::PerOperation)
            }
            Some(GraphState::Captured(recorded)) => {
                self.device.replay(&recorded.graph)?;
                self.replays += 1;
                let attentions = recorded.attentions.iter();
                let read: u64 = attentions.map(|(cut, window)| cut.bytes(rows, *window, &pool.shape)).sum();
                self.moved = recorded.bytes + read;
                self.routed.clone_from(&recorded.routed);
                self.routed_layers += self.routed.len() as u64;
                Ok(StepLaunch::WholeGraph)
            }
        }
    }

    fn end(&mut self, rows: &Rows) -> Result<(), EngineError> {
        debug_assert!(self.peer_buffer.is_even(), "two sums take turns in every step");
        match std::mem::replace(&mut self.mode, Mode::Plain) {
            Mode::Recording(key) => self.finish_capture(key),
            Mode::Plain => {
                self.routed_layers += self.routed.len() as u64;
                if let Some(key) = self.key(rows) {
                    self.known.insert(key, GraphState::Ran);
                }
                Ok(())
            }
        }
    }

    fn abandon(&mut self) {
        if let Mode::Recording(key) = std::mem::replace(&mut self.mode, Mode::Plain) {
            // The step has said why it failed; that its recording is void is no news, and no fault of the next step.
            drop(self.device.end_capture());
            self.known.remove(&key);
        }
        if self.ranks > 1 {
            self.peer_buffer.reset();
            self.known.clear();
        }
        if self.workspace.to_norm.memory().is_some() {
            // Sums that nobody normed are not zeros.
            self.workspace.to_norm = Scratch::default();
            self.known.clear();
        }
    }

    fn padded(&self, rows: &Rows) -> usize {
        if comes_again(rows) { padded(rows.len(), self.at_once) } else { rows.len() }
    }

    fn allow_whole_graph(&mut self, allowed: bool) {
        self.may_record = allowed;
    }

    fn embed(
        &mut self,
        rows: &Rows,
        embedding: Embedding<'_, Self>,
        scale: f32,
        hidden: &mut DeviceTensor<D>,
    ) -> Result<(), EngineError> {
        let (Embedding::Table(table) | Embedding::Head(table)) = embedding;
        let kernel = Embed { rows: rows.len(), table, scale, step: &self.step, hidden };
        self.moved += kernel.launch(&mut self.device)?;
        Ok(())
    }

    fn join_state(
        &mut self,
        rows: &Rows,
        draft: &DraftWeights<Self>,
        norm_eps: f32,
        hidden: &mut DeviceTensor<D>,
        joined: &mut DeviceTensor<D>,
    ) -> Result<(), EngineError> {
        let (state, norms) = (&draft.state, draft.norms.as_ref());
        let kernel = JoinState { rows: rows.len(), hidden, state, norms, norm_eps, joined };
        self.moved += kernel.launch(&mut self.device)?;
        Ok(())
    }

    fn norm_qkv(
        &mut self,
        rows: &Rows,
        shape: &AttentionShape,
        weights: &AttentionWeights<Self>,
        _ropes: &RopeTables,
        layer: usize,
        hidden: &DeviceTensor<D>,
        pool: &mut Pool<D>,
        query: &mut DeviceTensor<D>,
    ) -> Result<(), EngineError> {
        let workspace = self.tiled_workspace(rows.len(), &weights.qkv)?;
        let heads = shape.heads + 2 * shape.kv_heads;
        let narrow = pool.has_narrow_elements();
        let by_library = workspace.is_some_and(|workspace| workspace.by_library);
        let in_runs = !weights.qkv.following.is_empty();
        let projected = if weights.head_norms.is_some() || narrow || by_library || in_runs {
            self.sums_workspace(rows.len(), heads * shape.head_dim)?
        } else {
            0
        };
        let arrived = if weights.head_norms.is_some() && !shape.joint_norms && !narrow && !in_runs {
            self.grow(|space| &mut space.heads_arrived, 4 * rows.len() * heads, &[0])?;
            self.workspace.heads_arrived.address()
        } else {
            0
        };
        let kernel = NormQkv {
            rows: rows.len(),
            shape: *shape,
            hidden,
            norm: weights.norm.as_ref(),
            weights: &weights.qkv,
            head_norms: weights.head_norms.as_ref().map(|(query, key)| (query, key)),
            step: &self.step,
            pool,
            layer,
            query,
            projected,
            arrived,
            workspace,
        };
        self.moved += kernel.launch(&mut self.device, self.tuning)?;
        Ok(())
    }

    fn latent_down(
        &mut self,
        rows: &Rows,
        shape: &AttentionShape,
        weights: &LatentWeights<Self>,
        _ropes: &RopeTables,
        layer: usize,
        hidden: &DeviceTensor<D>,
        pool: &mut Pool<D>,
        compressed: &mut DeviceTensor<D>,
    ) -> Result<(), EngineError> {
        let count = rows.len();
        let workspace = self.tiled_workspace(count, &weights.down)?;
        // Where queries are made of what is normed, the sums are for nobody else.
        let sums = match weights.query {
            Some(_) => self.sums_workspace(count, weights.down.outputs)?,
            None => D::address(&compressed.memory),
        };
        let norm = Some((&weights.norm, shape.norm_eps));
        let down = LatentDown { rows: count, input: hidden, norm, weights: &weights.down, sums, workspace };
        self.moved += down.launch(&mut self.device, self.tuning)?;
        let finish = FinishLatent {
            rows: count,
            attention: shape,
            shape: weights.shape,
            sums,
            latent_norm: &weights.latent_norm,
            query: weights.query.as_ref().map(|(norm, _)| (norm, &*compressed)),
            step: &self.step,
            pool,
            layer,
        };
        self.moved += finish.launch(&mut self.device)?;
        Ok(())
    }

    fn latent_query(
        &mut self,
        rows: &Rows,
        shape: &AttentionShape,
        weights: &LatentWeights<Self>,
        _ropes: &RopeTables,
        form: LatentForm,
        compressed: &DeviceTensor<D>,
        query: &mut DeviceTensor<D>,
    ) -> Result<(), EngineError> {
        let own = weights.shape;
        let count = rows.len();
        let mut queries = DeviceRows::of(compressed);
        if let Some((_, projection)) = &weights.query {
            let workspace = self.tiled_workspace(count, projection)?;
            let sums = self.sums_workspace(count, projection.outputs)?;
            let (input, weights) = (compressed, projection);
            let up = LatentDown { rows: count, input, norm: None, weights, sums, workspace };
            self.moved += up.launch(&mut self.device, self.tuning)?;
            queries = DeviceRows { address: sums, width: projection.outputs };
        }
        if form == LatentForm::Absorbed {
            let (from, to) = ((queries, own.query_dim()), (&*query, own.cached()));
            self.product_by_head(count, own.heads, &weights.key_up, from, to)?;
        }
        let step = &self.step;
        TurnQueries { rows: count, attention: shape, shape: own, queries, step, form, out: query }
            .launch(&mut self.device)
    }

    fn can_expand(&self, rows: &Rows, weights: &LatentWeights<Self>, pool: &Pool<D>) -> bool {
        let matrices = [&weights.key, &weights.value_up];
        ExpandLatents::fits(rows, &weights.shape, matrices, &pool.shape, self.tuning)
    }

    fn latent_expand(
        &mut self,
        rows: &Rows,
        weights: &LatentWeights<Self>,
        layer: usize,
        pool: &Pool<D>,
        expanded: &mut Pool<D>,
    ) -> Result<(), EngineError> {
        let blocks = rows.tables.len();
        let positions = blocks * pool.shape.block_size;
        let latents = self.sums_workspace(positions, weights.shape.kv_rank)?;
        let room = tensor_core_linear::prepared_bytes(&weights.key, positions);
        self.grow(|space| &mut space.prepared, room, &[])?;
        let kernel = ExpandLatents {
            blocks,
            shape: weights.shape,
            key: &weights.key,
            value: &weights.value_up,
            step: &self.step,
            pool,
            layer,
            expanded,
            latents,
            prepared: self.workspace.prepared.address(),
        };
        self.moved += kernel.launch(&mut self.device)?;
        Ok(())
    }

    fn latent_value(
        &mut self,
        rows: &Rows,
        weights: &LatentWeights<Self>,
        attended: &DeviceTensor<D>,
        values: &mut DeviceTensor<D>,
    ) -> Result<(), EngineError> {
        let own = weights.shape;
        let from = (DeviceRows::of(attended), own.kv_rank);
        self.product_by_head(rows.len(), own.heads, &weights.value_up, from, (values, own.value_dim))
    }

    fn attention(
        &mut self,
        rows: &Rows,
        shape: &AttentionShape,
        window: Option<usize>,
        sinks: Option<&DeviceTensor<D>>,
        layer: usize,
        query: &DeviceTensor<D>,
        pool: &Pool<D>,
        out: &mut DeviceTensor<D>,
    ) -> Result<(), EngineError> {
        self.rounded = None;
        self.moved += 4 * sinks.map_or(0, |sinks| sinks.width) as u64;
        // Not what this step's positions reach, but the most of any step that a graph of this one will serve.
        let reach = longest(rows).div_ceil(self.tuning.min_split).next_power_of_two() * self.tuning.min_split;
        if pool.shape.value_dim == 0 {
            return self.attend_to_latents(rows, shape, layer, query, pool, out, reach);
        }
        let longest = reach.min(window.unwrap_or(usize::MAX));
        if PrefillAttention::<D>::fits(rows, &pool.shape, self.tuning) {
            let (splits, words) = PrefillAttention::splits(&self.device, rows, shape, longest, self.tuning);
            if splits > 1 {
                self.splits_workspace(rows.len() * shape.heads * splits, shape.value_dim, words)?;
            }
            let space = &self.workspace;
            let kernel = PrefillAttention {
                shape: *shape,
                window,
                sinks,
                query,
                step: &self.step,
                pool,
                layer,
                out,
                splits,
                partial: space.partial.address(),
                statistics: space.statistics.address(),
                arrived: space.splits_arrived.address(),
            };
            kernel.launch(&mut self.device, rows, self.tuning)?;
            self.count_attention(AttentionCut::Tiles { group: shape.group() }, rows, window, &pool.shape);
            return Ok(());
        }
        let cut = KvSplitPlan::new(&self.device, shape, rows.len(), longest, self.tuning);
        let rounded = match pool.shape.dtype {
            Dtype::F16 => self.round_for_next(out, rows.len(), KernelFormat::F16)?,
            Dtype::Bf16 => self.round_for_next(out, rows.len(), KernelFormat::Bf16)?,
            _ => 0,
        };
        let words = rows.len() * shape.kv_heads * cut.chunks;
        self.splits_workspace(rows.len() * shape.heads * cut.splits, shape.head_dim, words)?;
        let space = &self.workspace;
        let kernel = DecodeAttention {
            rows: rows.len(),
            shape: *shape,
            window,
            sinks,
            cut,
            query,
            step: &self.step,
            pool,
            layer,
            out,
            rounded,
            partial: space.partial.address(),
            statistics: space.statistics.address(),
            arrived: space.splits_arrived.address(),
        };
        kernel.launch(&mut self.device, self.tuning)?;
        self.count_attention(AttentionCut::Rows(cut), rows, window, &pool.shape);
        Ok(())
    }

    fn project_add(
        &mut self,
        rows: &Rows,
        weights: &Matrix<D>,
        norm: Option<(&DeviceTensor<D>, f32)>,
        input: &DeviceTensor<D>,
        hidden: &mut DeviceTensor<D>,
    ) -> Result<(), EngineError> {
        let mut workspace = self.tiled_workspace(rows.len(), weights)?;
        let wanted = Rounded { buffer: D::address(&input.memory), rows: rows.len(), format: weights.format };
        if self.rounded.take() == Some(wanted)
            && let Some(workspace) = &mut workspace
        {
            (workspace.prepared, workspace.ready) = (self.workspace.rounded.address(), true);
        }
        let mut into = self.peer_buffer.take_begun().unwrap_or_else(|| D::address(&hidden.memory));
        if norm.is_some() {
            into = self.sums_to_norm(rows.len(), weights.outputs)?;
        }
        let kernel = ProjectAdd { rows: rows.len(), input, weights, hidden, into, workspace };
        self.moved += kernel.launch(&mut self.device, self.tuning)?;
        self.add_normed(rows.len(), into, norm, hidden)
    }

    fn norm_gate_up(
        &mut self,
        rows: &Rows,
        norm: Option<(&DeviceTensor<D>, f32)>,
        gate: Gate,
        weights: &Matrix<D>,
        hidden: &DeviceTensor<D>,
        out: &mut DeviceTensor<D>,
    ) -> Result<(), EngineError> {
        self.rounded = None;
        let workspace = self.tiled_workspace(rows.len(), weights)?;
        let by_library = workspace.is_some_and(|workspace| workspace.by_library);
        let sums = if by_library { self.sums_workspace(rows.len(), weights.outputs)? } else { 0 };
        let by_us = workspace.is_some() && !by_library;
        let rounded = if by_us { self.round_for_next(out, rows.len(), weights.format)? } else { 0 };
        let kernel = GateUp { rows: rows.len(), hidden, norm, gate, weights, out, rounded, sums, workspace };
        self.moved += kernel.launch(&mut self.device, self.tuning)?;
        Ok(())
    }

    fn route(
        &mut self,
        rows: &Rows,
        norm: (&DeviceTensor<D>, f32),
        experts: &ExpertWeights<Self>,
        scripted: Option<&[u32]>,
        hidden: &DeviceTensor<D>,
    ) -> Result<(), EngineError> {
        let (plan, work) = self.expert_plan(rows.len(), experts)?;
        let workspace = self.router_workspace(rows.len(), &experts.router)?;
        let layer = self.routed.len();
        self.grow(|space| &mut space.routers_arrived, 4 * plan.arrivals(), &[0])?;
        self.grow(|space| &mut space.experts_met, 8, &[0])?;
        self.grow(|space| &mut space.tiles_met, 4 * (layer + 1).max(COUNTED_LAYERS), &[0])?;
        let logits = self.sums_workspace(rows.len(), experts.router.outputs)?;
        let space = &self.workspace;
        let kernel = Route {
            plan,
            hidden,
            norm,
            experts,
            scripted: scripted.map_or(0, |chosen| self.script.take(chosen.len())),
            real_rows: self.step.real_rows(),
            logits,
            work,
            arrived: space.routers_arrived.address(),
            met: space.experts_met.address(),
            tiles_met: space.tiles_met.address() + 4 * layer as u64,
            workspace,
        };
        self.moved += kernel.launch(&mut self.device, self.tuning)?;
        let [first, ..] = experts.routed.as_slice() else { return Ok(()) };
        self.routed.push([first.gate_up.bytes(), first.down.bytes()]);
        Ok(())
    }

    fn expert_gate_up(
        &mut self,
        rows: &Rows,
        norm: (&DeviceTensor<D>, f32),
        experts: &ExpertWeights<Self>,
        hidden: &DeviceTensor<D>,
        inner: &mut DeviceTensor<D>,
    ) -> Result<(), EngineError> {
        let (plan, work) = self.expert_plan(rows.len(), experts)?;
        let router = &experts.router;
        let is_prepared = router.format == experts.routed[0].gate_up.format
            && self.router_workspace(rows.len(), router)?.is_some();
        let prepared = self.workspace.prepared.address();
        let kernel = ExpertGateUp { plan, hidden, norm, experts, work, inner, prepared, is_prepared };
        self.moved += kernel.launch(&mut self.device, self.tuning)?;
        Ok(())
    }

    fn expert_down(
        &mut self,
        rows: &Rows,
        experts: &ExpertWeights<Self>,
        inner: &DeviceTensor<D>,
        hidden: &mut DeviceTensor<D>,
    ) -> Result<(), EngineError> {
        let (plan, work) = self.expert_plan(rows.len(), experts)?;
        let parts = rows.len() * (experts.shape.per_row + 1);
        self.grow(|space| &mut space.expert_parts, 4 * parts * hidden.width, &[])?;
        let kernel = ExpertDown {
            plan,
            inner,
            experts,
            work,
            real_rows: self.step.real_rows(),
            parts: self.workspace.expert_parts.address(),
            hidden,
            into: self.peer_buffer.take_begun().unwrap_or_else(|| D::address(&hidden.memory)),
            prepared: self.workspace.prepared.address(),
        };
        self.moved += kernel.launch(&mut self.device, self.tuning)?;
        Ok(())
    }

    fn take_experts_met(&mut self) -> ExpertsMet {
        let layers = std::mem::take(&mut self.routed_layers);
        let mut bytes = [0; 8];
        let Some(memory) = self.workspace.experts_met.memory().filter(|_| layers > 0) else {
            return ExpertsMet::default();
        };
        if self.device.download(memory, 0, &mut bytes).is_err() {
            return ExpertsMet::default();
        }
        let before = std::mem::replace(&mut self.experts_told, u64::from_le_bytes(bytes));
        ExpertsMet { experts: self.experts_told - before, layers }
    }

    fn await_expert_bytes(&mut self) -> Result<[Bytes; 2], EngineError> {
        let mut sums = [0; 2];
        if let Some(memory) = self.workspace.tiles_met.memory().filter(|_| !self.routed.is_empty()) {
            let mut tiles = vec![0; 4 * self.routed.len()];
            self.device.download(memory, 0, &mut tiles)?;
            for (word, [gate_up, down]) in tiles.as_chunks().0.iter().zip(&self.routed) {
                let tiles = u64::from(u32::from_le_bytes(*word));
                sums = [sums[0] + tiles * gate_up, sums[1] + tiles * down];
            }
        }
        Ok(sums.map(Bytes))
    }

    fn head(
        &mut self,
        rows: &Rows,
        norm: &DeviceTensor<D>,
        norm_eps: f32,
        head: &Matrix<D>,
        softcap: Option<f32>,
        hidden: &DeviceTensor<D>,
        logits: &mut DeviceTensor<D>,
        _next: &mut Vec<u32>,
    ) -> Result<(), EngineError> {
        let outputs = rows.outputs.len();
        let workspace = self.tiled_workspace(outputs, head)?;
        self.grow(|space| &mut space.best, 8 * outputs, &Head::<D>::NO_LOGIT.to_le_bytes())?;
        self.grow(|space| &mut space.logits_arrived, 4 * outputs, &[0])?;
        self.grow(|space| &mut space.next, 4 * outputs, &[])?;
        let space = &self.workspace;
        let kernel = Head {
            outputs,
            hidden,
            norm,
            norm_eps,
            weights: head,
            softcap,
            step: &self.step,
            logits,
            best: space.best.address(),
            arrived: space.logits_arrived.address(),
            next: space.next.address(),
            workspace,
        };
        self.moved += kernel.launch(&mut self.device, self.tuning)?;
        Ok(())
    }

    fn await_next(&mut self, next: &mut Vec<u32>) -> Result<(), EngineError> {
        next.clear();
        if let Some(memory) = self.workspace.next.memory() {
            // Kept from step to step: this is part of what is timed.
            self.next_bytes.resize(4 * self.outputs, 0);
            self.device.download(memory, 0, &mut self.next_bytes)?;
            next.extend(self.next_bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)));
            if self.ranks > 1 && next.contains(&NO_TOKEN) {
                self.peer_buffer.check(&mut self.device, self.ranks)?;
            }
        }
        Ok(())
    }

    fn begin_sum(
        &mut self,
        rows: &Rows,
        rank: &mut Rank,
        normed: bool,
        hidden: &mut DeviceTensor<D>,
    ) -> Result<(), EngineError> {
        self.ranks = rank.size();
        if normed {
            self.sums_to_norm(rows.len(), hidden.width)?;
        }
        let (floats, outputs) = (rows.len() * hidden.width, rows.outputs.len());
        if self.peer_buffer.begin(&mut self.device, rank, floats, outputs)? {
            self.known.clear();
        }
        Ok(())
    }

    fn all_reduce(
        &mut self,
        rows: &Rows,
        rank: &mut Rank,
        norm: Option<(&DeviceTensor<D>, f32)>,
        hidden: &mut DeviceTensor<D>,
    ) -> Result<(), EngineError> {
        let sums = self.workspace.to_norm.address();
        let to = if norm.is_some() { sums } else { D::address(&hidden.memory) };
        self.peer_buffer.all_reduce(&mut self.device, rank, self.tuning, (rows.len(), hidden.width), to)?;
        self.add_normed(rows.len(), sums, norm, hidden)
    }

    fn first_of_ranks(
        &mut self,
        rows: &Rows,
        rank: &mut Rank,
        first: usize,
        logits: &DeviceTensor<D>,
        _next: &mut Vec<u32>,
    ) -> Result<(), EngineError> {
        let outputs = (rows.outputs.len(), logits);
        let next = self.workspace.next.address();
        self.peer_buffer.first_of_ranks(&mut self.device, rank, self.tuning, outputs, next, first)
    }

    fn device_name(&self) -> String {
        self.device.name().into()
    }
    fn in_host_memory(&self) -> bool {
        false
    }

    fn timeline(&self) -> Box<dyn Timeline + Send> {
        self.device.timeline()
    }

    fn read(&mut self, buffer: &DeviceTensor<D>, rows: usize) -> Result<Vec<Vec<f32>>, EngineError> {
        let mut bytes = vec![0; 4 * rows * buffer.width];
        self.device.download(&buffer.memory, 0, &mut bytes)?;
        self.peer_buffer.check(&mut self.device, self.ranks)?;
        let values: Vec<f32> = bytes.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)).collect();
        Ok(values.chunks_exact(buffer.width.max(1)).map(<[f32]>::to_vec).collect())
    }

    fn take_bytes_moved(&mut self) -> Bytes {
        self.attention_moved = 0;
        Bytes(std::mem::take(&mut self.moved))
    }
}

/// Elements as a pool keeps them; `scale` is that of int8.
pub(super) fn narrow_into(elements: &[f32], dtype: Dtype, scale: f32, bytes: &mut Vec<u8>) {
    let inverse = kv_format::inverse(scale);
    match dtype {
        Dtype::Fp8 => bytes.extend(elements.iter().map(|x| e4m3::from_f32(*x))),
        Dtype::Int8 => {
            bytes.extend(elements.iter().map(|x| int8_code(*x * inverse).cast_unsigned()));
        }
        Dtype::F32 => bytes.extend(elements.iter().flat_map(|x| x.to_le_bytes())),
        Dtype::F16 => bytes.extend(elements.iter().flat_map(|x| half::f16::from_f32(*x).to_le_bytes())),
        _ => bytes.extend(elements.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes())),
    }
}

#[cfg(test)]
mod tests {
    use super::{STREAMED_AT_ONCE, TILED_AT_ONCE, padded};

    #[test]
    fn sizes_are_few_and_cost_an_eighth_at_the_most() {
        let sizes = |at_once: usize, upto: usize| {
            let mut sizes: Vec<usize> = (1..=upto).map(|rows| padded(rows, at_once)).collect();
            sizes.dedup();
            sizes
        };
        assert_eq!(sizes(TILED_AT_ONCE, 100), [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104]);
        assert_eq!(sizes(STREAMED_AT_ONCE, 20), [1, 2, 4, 8, 12, 16, 20]);
        assert!(sizes(TILED_AT_ONCE, 4096).len() < 64);
        for at_once in [TILED_AT_ONCE, STREAMED_AT_ONCE] {
            for rows in 1..=4096 {
                let size = padded(rows, at_once);
                let free = rows.next_power_of_two().min(rows.next_multiple_of(at_once));
                assert!(size >= rows && (size <= free || (size - rows) * 8 <= rows), "{rows} as {size}");
                assert_eq!(padded(size, at_once), size, "a size is its own");
            }
        }
    }
}
