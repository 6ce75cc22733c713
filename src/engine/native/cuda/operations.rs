//! [`Operations`] over a [`Device`]: each is one kernel, and a repeated decode step is one graph ([`graph_replay`]).
//!
//! Enters: packed weights, activations, the rows of a step. Leaves: work enqueued on the device. Any reallocation of what a graph may point to
//! forgets the recorded ones.

mod experts;
mod graph_replay;
mod latent;
mod workspace;

use std::collections::HashMap;

use super::attention::{
    AttentionCut, DecodeAttention, KvSplitPlan, MAX_HEAD_DIM, PrefillAttention, SequenceRun,
};
use super::device::Device;
use super::device_matrix::{KernelFormat, Matrix, floats};
use super::experts::{DeviceScript, ExpertTable};
use super::kernels::{
    AddNormed, DeviceTensor, Embed, FillKv, GateUp, Head, JoinState, NormQkv, ProjectAdd, Tuning,
};
use super::latent::MAX_WIDTH as MAX_LATENT_WIDTH;
use super::peers::{NO_TOKEN, PeerBuffer};
use super::step::{Pool, StepState};
use super::tensor_core_linear;
use crate::engine::native::operations::{
    AttentionWeights, DraftWeights, Embedding, ExpertMlp, FusedLayout, LinearPart, LoraOperations,
    Operations, Storage,
};
use crate::engine::native::ragged_batch::Rows;
use crate::engine::native::ranks::Rank;
use crate::engine::native::rope::RopeTables;
use crate::engine::native::shapes::{AttentionShape, Gate, LatentShape, PoolShape};
use crate::engine::native::{kv_format, random_kv};
use crate::engine::{EngineError, Timeline};
use crate::weights::StoredMatrix;
use graph_replay::{GraphState, Mode, STREAMED_AT_ONCE, StepKey, TILED_AT_ONCE};
use hbmark_core::model::Dtype;
use hbmark_core::units::Bytes;
use hbmark_cpu_kernels::e4m3;
use hbmark_cpu_kernels::element::int8_code;
use workspace::{Part, Rounded, Workspace};

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
    /// Of a buffer that is read, as it lies on the device.
    read_bytes: Vec<u8>,
    /// Draws of K and V as a cache keeps them, by its dtype.
    quantiles: Option<(Dtype, D::Memory)>,
}

impl<D: Device> CudaOperations<D> {
    /// The operations of a device.
    pub fn new(device: D) -> Self {
        Self::with_tuning(device, Tuning::default())
    }

    /// As [`Self::new`], with sizes of one's own.
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
            read_bytes: Vec::new(),
            quantiles: None,
        }
    }

    /// Steps that were replayed so far.
    pub fn replays(&self) -> usize {
        self.replays
    }

    /// The device.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// The device, to plant faults in.
    #[cfg(test)]
    pub fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// Copies of step data to the device so far.
    pub fn uploads(&self) -> usize {
        self.step.uploads
    }

    /// Counts K and V of an attention; in a recorded step, of which it is the whole, they depend on the positions of each replay.
    fn count_attention(
        &mut self,
        cut: AttentionCut,
        run: &SequenceRun<'_>,
        window: Option<usize>,
        pool: &PoolShape,
    ) {
        let read = cut.bytes(run, window, pool);
        self.attentions.push((cut, window));
        self.moved += read;
        self.attention_moved += read;
    }

    /// The most positions that a row of a run sees: not those of this step, but of any that a graph of this one will serve.
    fn reach(&self, run: &SequenceRun<'_>) -> usize {
        run.longest().div_ceil(self.tuning.min_split).next_power_of_two() * self.tuning.min_split
    }

    /// Attention of a run: of its sequences together, on tensor cores, or of each row by itself.
    #[expect(clippy::too_many_arguments, reason = "one fused operation")]
    fn attend(
        &mut self,
        run: &SequenceRun<'_>,
        shape: &AttentionShape,
        (window, sinks): (Option<usize>, Option<&DeviceTensor<D>>),
        layer: usize,
        query: &DeviceTensor<D>,
        pool: &Pool<D>,
        out: &DeviceTensor<D>,
    ) -> Result<(), EngineError> {
        let longest = self.reach(run).min(window.unwrap_or(usize::MAX));
        let rows = run.rows();
        if PrefillAttention::<D>::fits(run, &pool.shape, self.tuning) {
            let (splits, words) = PrefillAttention::splits(&self.device, run, shape, longest, self.tuning);
            if splits > 1 {
                self.splits_workspace(rows.len() * shape.heads * splits, shape.value_dim, words)?;
            }
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
                space: self.split_space(),
            };
            kernel.launch(&mut self.device, run, self.tuning)?;
            self.count_attention(AttentionCut::Tiles { group: shape.group() }, run, window, &pool.shape);
            return Ok(());
        }
        let cut = KvSplitPlan::new(&self.device, shape, rows.len(), longest, self.tuning);
        // Where other rows are left to another launch, the product that follows rounds all of them.
        let rounded = match pool.shape.dtype {
            _ if !run.is_whole() => 0,
            Dtype::F16 => self.round_for_next(out, rows.len(), KernelFormat::F16)?,
            Dtype::Bf16 => self.round_for_next(out, rows.len(), KernelFormat::Bf16)?,
            _ => 0,
        };
        let words = rows.len() * shape.kv_heads * cut.chunks;
        self.splits_workspace(rows.len() * shape.heads * cut.splits, shape.head_dim, words)?;
        let kernel = DecodeAttention {
            rows,
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
            space: self.split_space(),
        };
        kernel.launch(&mut self.device, self.tuning)?;
        self.count_attention(AttentionCut::Rows(cut), run, window, &pool.shape);
        Ok(())
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
}

impl<D: Device> Storage for CudaOperations<D> {
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

    fn expanded_pool(&mut self, shape: &LatentShape, latents: &Pool<D>) -> Result<Pool<D>, EngineError> {
        self.pool(shape.expanded_pool(&latents.shape))
    }

    fn set_width(buffer: &mut DeviceTensor<D>, width: usize) {
        buffer.width = width;
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

    fn read_into(
        &mut self,
        buffer: &DeviceTensor<D>,
        rows: usize,
        values: &mut Vec<f32>,
    ) -> Result<(), EngineError> {
        self.read_bytes.resize(4 * rows * buffer.width, 0);
        self.device.download(&buffer.memory, 0, &mut self.read_bytes)?;
        self.peer_buffer.check(&mut self.device, self.ranks)?;
        values.clear();
        values.extend(self.read_bytes.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)));
        Ok(())
    }

    fn device_name(&self) -> String {
        self.device.name().into()
    }

    fn in_host_memory(&self) -> bool {
        false
    }
}

impl<D: Device> LoraOperations for CudaOperations<D> {}

impl<D: Device> Operations for CudaOperations<D> {
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
            self.grow(Part::HeadsArrived, 4 * rows.len() * heads, &[0])?;
            self.workspace.address(Part::HeadsArrived)
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
        if pool.shape.value_dim == 0 {
            return self.attend_to_latents(rows, shape, layer, query, pool, out);
        }
        let whole = SequenceRun::whole(rows);
        let tiled = PrefillAttention::<D>::fits(&whole, &pool.shape, self.tuning);
        // The kernel of single rows takes K and V that are alike, at places of the step's own.
        let alike = pool.shape.value_dim == pool.shape.head_dim && !pool.shape.consecutive;
        if tiled && alike && self.tuning.min_prefill_rows > 1 {
            for run in SequenceRun::with_single_rows_apart(rows) {
                self.attend(&run, shape, (window, sinks), layer, query, pool, out)?;
            }
            return Ok(());
        }
        self.attend(&whole, shape, (window, sinks), layer, query, pool, out)
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
            (workspace.prepared, workspace.ready) = (self.workspace.address(Part::Rounded), true);
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
        self.grow(Part::Best, 8 * outputs, &Head::<D>::NO_LOGIT.to_le_bytes())?;
        self.grow(Part::LogitsArrived, 4 * outputs, &[0])?;
        self.grow(Part::Next, 4 * outputs, &[])?;
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
            best: space.address(Part::Best),
            arrived: space.address(Part::LogitsArrived),
            next: space.address(Part::Next),
            workspace,
        };
        self.moved += kernel.launch(&mut self.device, self.tuning)?;
        Ok(())
    }

    fn await_next(&mut self, next: &mut Vec<u32>) -> Result<(), EngineError> {
        next.clear();
        if let Some(memory) = self.workspace.memory(Part::Next) {
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
        let sums = self.workspace.address(Part::ToNorm);
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
        let next = self.workspace.address(Part::Next);
        self.peer_buffer.first_of_ranks(&mut self.device, rank, self.tuning, outputs, next, first)
    }

    fn timeline(&self) -> Box<dyn Timeline + Send> {
        self.device.timeline()
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
