//! The native engine's operations on a CPU: threads, SIMD, packed weights, one pass over the weights per step.
//!
//! Enters: what [`Operations`] says. Leaves: the same, as fast as memory gives the weights. Each operation is one job of the
//! [`thread_team`]: rows are normed and rounded by all members (`packed_activations`) before a barrier, or the only one by each; panels of
//! weights are streamed (`linear`), and the member that has the sums of a panel finishes them: adds, activates, stores.
#![expect(unsafe_code, reason = "members write shared buffers at places that do not overlap")]

mod attention;
mod cache;
mod experts;
mod finished_heads;
mod gates;
pub mod huge_pages;
pub mod kernel_choice;
mod largest_logits;
mod latent;
mod linear;
mod lora;
mod packed_activations;
mod packed_matrix;
mod storage;
pub mod thread_team;

use attention::{Attention, AttentionPlan};
use cache::with_element;
use experts::RoutedRows;
use finished_heads::{FinishHead, norm_factor};
use gates::{GatedRow, store_activated};
use huge_pages::Arena;
use largest_logits::LargestLogits;
use linear::Product;
use lora::{Added, LoraDelta};
use packed_activations::{InputShape, PackedActivations};
use packed_matrix::PackedMatrix;
use thread_team::{DisjointSlice, Team, Worker};

use hbmark_cpu_kernels::elementwise::bend;
use hbmark_cpu_kernels::simd::LANES;

use super::operations::{
    AttentionWeights, DraftWeights, Embedding, FusedLayout, LinearPart, Operations, StepLaunch, Steps,
    Storage,
};
use super::ragged_batch::Rows;
use super::ranks::Rank;
use super::rope::RopeTables;
use super::shapes::{AttentionShape, ExpertsMet, Gate};
use crate::engine::EngineError;
use crate::weights::{Packing, StoredMatrix};
use hbmark_core::units::Bytes;

pub use cache::CachePool;
pub use hbmark_cpu_kernels::simd::InstructionSet;
pub use kernel_choice::KernelChoice;
pub use linear::FusedMatrix;

/// Phases of a job's shared work.
const PREPARE: usize = 0;
const MULTIPLY: usize = 1;
const FINISH: usize = 2;
const NORM: usize = 3;

/// Activations, `[rows, width]`.
#[derive(Debug)]
pub struct CpuBuffer {
    width: usize,
    values: Vec<f32>,
}

impl CpuBuffer {
    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.width..(row + 1) * self.width]
    }
}

/// The native forward's operations on a CPU.
#[derive(Debug)]
pub struct CpuOperations {
    team: Team,
    arena: Arena,
    kernels: KernelChoice,
    inputs: PackedActivations,
    /// A row for each head of each row.
    head_inputs: PackedActivations,
    plan: AttentionPlan,
    /// The plan belongs to an earlier step.
    plan_stale: bool,
    /// Sums of the rows that are finished when all of a row is there: Q, K and V before norm, RoPE and store; what is normed before it is added.
    projected: Vec<f32>,
    /// The positions that a step sees, where K and V are made of latents: the block in its tables, and the slot.
    seen: Vec<(usize, usize)>,
    /// Hidden states to which a normed sum of all ranks is added.
    residual: Vec<f32>,
    /// Of each row, what its Q and its K are multiplied with where all heads are normed together.
    factors: Vec<[f32; 2]>,
    largest: LargestLogits,
    /// What adapters add to the next linear layer.
    delta: LoraDelta,
    /// The experts of the rows of a layer.
    routed: RoutedRows,
    met: ExpertsMet,
    moved: u64,
}

impl CpuOperations {
    /// A team of so many threads with the fastest kernels of this processor.
    ///
    /// # Errors
    /// When the system gives no threads, or the user asks for kernels that this processor does not have.
    pub fn new(threads: usize) -> Result<Self, EngineError> {
        Self::on_processors(threads, 0, KernelChoice::of_processor()?)
    }

    /// As [`Self::new`] with the kernels of an available instruction set.
    ///
    /// # Errors
    /// When the system gives no threads.
    ///
    /// # Panics
    /// When this processor does not have the set.
    pub fn with_set(threads: usize, set: InstructionSet) -> Result<Self, EngineError> {
        assert!(InstructionSet::available().contains(&set), "an instruction set of this processor");
        Self::on_processors(threads, 0, KernelChoice::forced(set))
    }

    /// With the threads on the processors from the `first` on that this process may use.
    ///
    /// # Errors
    /// When the system gives no threads.
    pub fn on_processors(threads: usize, first: usize, kernels: KernelChoice) -> Result<Self, EngineError> {
        let team = Team::on_processors(threads, first, 1).map_err(|error| EngineError::Device {
            device: "cpu".into(),
            detail: format!("cannot start {threads} threads: {error}"),
        })?;
        Ok(Self {
            team: team.that_may_shrink(),
            arena: Arena::default(),
            kernels,
            inputs: PackedActivations::default(),
            head_inputs: PackedActivations::default(),
            plan: AttentionPlan::default(),
            plan_stale: true,
            projected: Vec::new(),
            seen: Vec::new(),
            residual: Vec::new(),
            factors: Vec::new(),
            largest: LargestLogits::default(),
            delta: LoraDelta::default(),
            routed: RoutedRows::default(),
            met: ExpertsMet::default(),
            moved: 0,
        })
    }

    /// Threads, the caller included.
    pub fn threads(&self) -> usize {
        self.team.members()
    }

    /// The product of so many rows with a matrix.
    fn product<'a>(&mut self, matrix: &'a FusedMatrix, rows: usize) -> Product<'a> {
        let packed = Product::packed_rows(rows, self.team.members());
        let inputs = self.inputs.writer(Self::input_shape(matrix, packed));
        Product { kernels: self.kernels, matrix, inputs, rows }
    }

    fn input_shape(weights: &FusedMatrix, rows: usize) -> InputShape {
        let widest = weights.parts.iter().map(PackedMatrix::padded_columns).max().unwrap_or(0);
        let first = &weights.parts[0];
        InputShape { precision: first.format.precision(), rows, columns: first.columns, padded: widest }
    }
}

/// The rate of a product of `[rows, columns]` activations with a square matrix of that width in one of the native formats, in FLOPs per
/// second, measured a few times: the upper bound of the native engine's prefill on this processor.
pub fn product_rates(
    threads: usize,
    packing: Packing,
    size: usize,
    count: usize,
) -> Result<Vec<f64>, EngineError> {
    let mut operations = CpuOperations::new(threads)?;
    let mut noise = vec![0.0; size * size];
    super::random_kv::fill(1, 0, 0, false, &mut noise);
    let matrix = StoredMatrix::from_f32_rows(size, size, &noise, packing);
    let weights = operations.linear(vec![LinearPart { matrix, bias: None }], FusedLayout::Stacked)?;
    let mut rows = Rows::new(size.next_multiple_of(LANES));
    rows.push(&vec![0; size], 0, &[0]);
    let input = CpuBuffer { width: size, values: noise };
    let mut output = operations.buffer(size, size)?;
    operations.project_add(&rows, &weights, None, &input, &mut output)?;
    let flops = 2.0 * (size as f64).powi(3);
    (0..count)
        .map(|_| {
            let begin = std::time::Instant::now();
            operations.project_add(&rows, &weights, None, &input, &mut output)?;
            Ok(flops / begin.elapsed().as_secs_f64())
        })
        .collect()
}

/// Rows of a panel that exist.
fn valid_rows(weights: &FusedMatrix, place: linear::PanelPosition) -> usize {
    LANES.min(weights.parts[place.part].rows - place.panel * LANES)
}

/// Bias of a panel's rows, where the part has one.
fn bias_of(weights: &FusedMatrix, place: linear::PanelPosition) -> &[f32] {
    weights.biases[place.part].as_deref().map_or(&[], |bias| {
        let first = place.panel * LANES;
        &bias[first..(first + LANES).min(bias.len())]
    })
}

/// Writes the sums of neighbouring panels, from the first on, to the outputs of a row, part after part; biases and what adapters add included.
///
/// # Safety
/// Nothing else touches these outputs.
unsafe fn store_sums(
    weights: &FusedMatrix,
    out: DisjointSlice<f32>,
    width: usize,
    added: &Added<'_>,
    (first, row): (usize, usize),
    sums: &[[f32; LANES]],
) {
    for (i, sums) in sums.iter().enumerate() {
        let place = weights.place(first + i);
        let valid = valid_rows(weights, place);
        let before: usize = weights.parts[..place.part].iter().map(|part| part.rows).sum();
        let column = before + place.panel * LANES;
        let at = row * width + column;
        // SAFETY: the caller's promise.
        let out = unsafe { out.part(at..at + valid) };
        out.copy_from_slice(&sums[..valid]);
        out.iter_mut().zip(bias_of(weights, place)).for_each(|(out, bias)| *out += bias);
        added.add(row, column, out);
    }
}

impl Steps for CpuOperations {
    fn begin(&mut self, _: &Rows, _: &RopeTables, _: &Self::Pool) -> Result<StepLaunch, EngineError> {
        self.plan_stale = true;
        Ok(StepLaunch::PerOperation)
    }
}

impl Operations for CpuOperations {
    fn embed(
        &mut self,
        rows: &Rows,
        embedding: Embedding<'_, Self>,
        scale: f32,
        hidden: &mut CpuBuffer,
    ) -> Result<(), EngineError> {
        let width = hidden.width;
        let out = DisjointSlice::new(&mut hidden.values);
        let embedding = &embedding;
        self.team.run(&|worker: &Worker<'_>| {
            worker.parallel_for(PREPARE, rows.len(), |row| {
                // SAFETY: members have different rows.
                let out = unsafe { out.part(row * width..(row + 1) * width) };
                let token = rows.tokens[row] as usize;
                match embedding {
                    Embedding::Table(table) => table.row(token, out),
                    Embedding::Head(head) => head.parts[0].row(token, out),
                }
                for x in out {
                    *x *= scale;
                }
            });
        });
        let row_bytes = match embedding {
            Embedding::Table(table) => table.bytes().0 / table.rows.max(1) as u64,
            // A row's values are spread over its whole panel.
            Embedding::Head(head) => head.parts[0].panel_bytes as u64,
        };
        self.moved += rows.len() as u64 * row_bytes;
        Ok(())
    }

    fn join_state(
        &mut self,
        rows: &Rows,
        draft: &DraftWeights<Self>,
        norm_eps: f32,
        hidden: &mut CpuBuffer,
        joined: &mut CpuBuffer,
    ) -> Result<(), EngineError> {
        let width = hidden.width;
        let (from, to) = (DisjointSlice::new(&mut hidden.values), DisjointSlice::new(&mut joined.values));
        let [of_embedding, of_state] =
            draft.norms.as_ref().map_or([None; 2], |[embedding, state]| [Some(embedding), Some(state)]);
        let join = |values: &[f32], norm: Option<&Vec<f32>>, out: &mut [f32]| match norm {
            Some(norm) => {
                let factor = norm_factor(values, norm_eps);
                for ((out, x), weight) in out.iter_mut().zip(values).zip(norm) {
                    *out = x * factor * weight;
                }
            }
            None => out.copy_from_slice(values),
        };
        self.team.run(&|worker: &Worker<'_>| {
            worker.parallel_for(PREPARE, rows.len(), |row| {
                // SAFETY: members have different rows.
                let (embedding, out) = unsafe {
                    (
                        from.part(row * width..(row + 1) * width),
                        to.part(2 * row * width..2 * (row + 1) * width),
                    )
                };
                let (first, second) = out.split_at_mut(width);
                join(embedding, of_embedding, first);
                join(&draft.state, of_state, second);
                embedding.fill(0.0);
            });
        });
        self.moved += draft.norms.iter().flatten().map(|norm| 4 * norm.len() as u64).sum::<u64>();
        Ok(())
    }

    fn norm_qkv(
        &mut self,
        rows: &Rows,
        shape: &AttentionShape,
        weights: &AttentionWeights<Self>,
        ropes: &RopeTables,
        layer: usize,
        hidden: &CpuBuffer,
        pool: &mut CachePool,
        query: &mut CpuBuffer,
    ) -> Result<(), EngineError> {
        let (matrix, count) = (&weights.qkv, rows.len());
        let width = shape.query_width() + 2 * shape.kv_width();
        if self.projected.len() < count * width {
            self.projected.resize(count * width, 0.0);
        }
        let projected = DisjointSlice::new(&mut self.projected);
        let joint = weights.head_norms.as_ref().filter(|_| shape.joint_norms);
        if joint.is_some() {
            self.factors.resize(count.max(self.factors.len()), [1.0; 2]);
        }
        let factors = DisjointSlice::new(&mut self.factors);
        let product = self.product(matrix, count);
        let delta = self.delta.take();
        let query_out = DisjointSlice::new(&mut query.values);
        let pool = &*pool;
        let offsets = [0, shape.query_width(), shape.query_width() + shape.kv_width()];
        self.team.run(&|worker: &Worker<'_>| {
            let norm = weights.norm.as_ref().map(|norm| (norm.as_slice(), shape.norm_eps));
            let store = |first: usize, row: usize, sums: &[[f32; LANES]]| {
                // SAFETY: members have different panels.
                unsafe { store_sums(matrix, projected, width, &delta, (first, row), sums) };
            };
            // SAFETY: room was made for this matrix; the set is this processor's.
            unsafe { product.run(worker, |row| hidden.row(row), norm, store) };
            worker.barrier();
            if joint.is_some() {
                worker.parallel_for(NORM, count, |row| {
                    let start = row * width;
                    let end = start + offsets[2];
                    // SAFETY: behind the barrier every row belongs to one unit.
                    unsafe {
                        let (queries, keys) = projected.part(start..end).split_at(offsets[1]);
                        let both = [queries, keys].map(|heads| norm_factor(heads, shape.norm_eps));
                        factors.part(row..row + 1)[0] = both;
                    }
                });
                worker.barrier();
            }
            worker.parallel_for(FINISH, count * shape.kv_heads, |unit| {
                let (row, head) = (unit / shape.kv_heads, unit % shape.kv_heads);
                // SAFETY: behind the barrier factors are only read.
                let joint = joint.map(|_| unsafe { factors.whole()[row] });
                let finish = FinishHead { rows, shape, weights, joint, ropes, layer, pool, row, head };
                // SAFETY: behind the barrier every head belongs to one unit.
                unsafe {
                    let start = row * width;
                    let queries = shape.group() * shape.head_dim;
                    let q = projected.part(start + head * queries..start + (head + 1) * queries);
                    let at = |offset: usize| start + offset + head * shape.head_dim;
                    let k = projected.part(at(offsets[1])..at(offsets[1]) + shape.head_dim);
                    let v = projected.part(at(offsets[2])..at(offsets[2]) + shape.head_dim);
                    let out = row * shape.query_width() + head * queries;
                    finish.run(q, k, v, query_out.part(out..out + queries));
                }
            });
        });
        let norms = weights.norm.as_ref().map_or(0, Vec::len)
            + weights.head_norms.as_ref().map_or(0, |(query, key)| query.len() + key.len());
        self.moved += (matrix.bytes() + 4 * norms + count * pool.shape.position_bytes()) as u64;
        Ok(())
    }

    fn attention(
        &mut self,
        rows: &Rows,
        shape: &AttentionShape,
        window: Option<usize>,
        sinks: Option<&Vec<f32>>,
        layer: usize,
        query: &CpuBuffer,
        pool: &CachePool,
        out: &mut CpuBuffer,
    ) -> Result<(), EngineError> {
        let set = self.kernels.general;
        if std::mem::take(&mut self.plan_stale) {
            self.plan.make(rows, shape, self.team.members());
        }
        let (plan, workspace) = self.plan.lend();
        let work = Attention {
            rows,
            shape,
            window,
            sinks: sinks.map(Vec::as_slice),
            layer,
            query: &query.values,
            pool,
            out: DisjointSlice::new(&mut out.values),
        };
        self.team.run(&|worker: &Worker<'_>| {
            with_element!(pool.shape.dtype, E => {
                // SAFETY: all members run this with the same arguments, and `E` is the pool's dtype.
                unsafe { plan.run::<E>(set, worker, PREPARE, &work, workspace) };
            });
        });
        self.moved += attention::bytes_read(&work) as u64;
        Ok(())
    }

    fn project_add(
        &mut self,
        rows: &Rows,
        weights: &FusedMatrix,
        norm: Option<(&Vec<f32>, f32)>,
        input: &CpuBuffer,
        hidden: &mut CpuBuffer,
    ) -> Result<(), EngineError> {
        if let Some(norm) = norm {
            self.project_add_normed(rows, weights, norm, input, hidden);
            return Ok(());
        }
        let (count, width) = (rows.len(), hidden.width);
        let product = self.product(weights, count);
        let delta = self.delta.take();
        let out = DisjointSlice::new(&mut hidden.values);
        self.team.run(&|worker: &Worker<'_>| {
            let add = |first: usize, row: usize, sums: &[[f32; LANES]]| {
                for (i, sums) in sums.iter().enumerate() {
                    let place = weights.place(first + i);
                    let at = row * width + place.panel * LANES;
                    // SAFETY: members have different panels.
                    let out = unsafe { out.part(at..at + valid_rows(weights, place)) };
                    out.iter_mut().zip(sums).for_each(|(out, sum)| *out += sum);
                    out.iter_mut().zip(bias_of(weights, place)).for_each(|(out, bias)| *out += bias);
                    delta.add(row, place.panel * LANES, out);
                }
            };
            // SAFETY: room was made for this matrix; the set is this processor's.
            unsafe { product.run(worker, |row| input.row(row), None, add) };
        });
        self.moved += weights.bytes() as u64;
        Ok(())
    }

    fn norm_gate_up(
        &mut self,
        rows: &Rows,
        norm: Option<(&Vec<f32>, f32)>,
        gate: Gate,
        weights: &FusedMatrix,
        hidden: &CpuBuffer,
        out: &mut CpuBuffer,
    ) -> Result<(), EngineError> {
        let (kernels, count, width) = (self.kernels, rows.len(), out.width);
        let norm = norm.map(|(norm, eps)| (norm.as_slice(), eps));
        let product = self.product(weights, count);
        let delta = self.delta.take();
        let out = DisjointSlice::new(&mut out.values);
        self.team.run(&|worker: &Worker<'_>| {
            let activate = |first: usize, row: usize, sums: &[[f32; LANES]]| {
                let row = GatedRow { out, at: row * width, added: &delta, row, width };
                // SAFETY: members have different panels; the set is this processor's.
                unsafe { store_activated(kernels.general, gate, weights, first, sums, &row) };
            };
            // SAFETY: room was made for this matrix; the set is this processor's.
            unsafe { product.run(worker, |row| hidden.row(row), norm, activate) };
        });
        self.moved += (weights.bytes() + norm.map_or(0, |(norm, _)| 4 * norm.len())) as u64;
        Ok(())
    }

    fn head(
        &mut self,
        rows: &Rows,
        norm: &Vec<f32>,
        norm_eps: f32,
        head: &FusedMatrix,
        softcap: Option<f32>,
        hidden: &CpuBuffer,
        logits: &mut CpuBuffer,
        next: &mut Vec<u32>,
    ) -> Result<(), EngineError> {
        let (kernels, count, width) = (self.kernels, rows.outputs.len(), logits.width);
        let largest = self.largest.begin(self.team.members(), count);
        let product = self.product(head, count);
        let out = DisjointSlice::new(&mut logits.values);
        self.team.run(&|worker: &Worker<'_>| {
            let row = |output: usize| hidden.row(rows.outputs[output] as usize);
            let norm = Some((norm.as_slice(), norm_eps));
            let keep = |first: usize, output: usize, sums: &[[f32; LANES]]| {
                for (i, sums) in sums.iter().enumerate() {
                    let place = head.place(first + i);
                    let at = place.panel * LANES;
                    let sums = &sums[..valid_rows(head, place)];
                    let start = output * width + at;
                    // SAFETY: members have different panels.
                    let out = unsafe { out.part(start..start + sums.len()) };
                    out.copy_from_slice(sums);
                    let mut logits = sums;
                    if let Some(cap) = softcap {
                        // SAFETY: the set is this processor's.
                        unsafe { bend(kernels.general, out, 1.0 / cap, cap) };
                        logits = out;
                    }
                    // SAFETY: the buffer is borrowed for this job, and this thread is this member.
                    unsafe { largest.meet(worker.index, output, at, logits) };
                }
            };
            // SAFETY: room was made for this matrix; the set is this processor's.
            unsafe { product.run(worker, row, norm, keep) };
        });
        self.largest.tokens(count, next);
        self.moved += (head.bytes() + 4 * norm.len()) as u64;
        Ok(())
    }

    fn begin_sum(
        &mut self,
        rows: &Rows,
        rank: &mut Rank,
        normed: bool,
        hidden: &mut CpuBuffer,
    ) -> Result<(), EngineError> {
        let values = &mut hidden.values[..rows.len() * hidden.width];
        if normed {
            self.residual.clear();
            self.residual.extend_from_slice(values);
        }
        if normed || rank.index() > 0 {
            values.fill(0.0);
        }
        Ok(())
    }

    fn all_reduce(
        &mut self,
        rows: &Rows,
        rank: &mut Rank,
        norm: Option<(&Vec<f32>, f32)>,
        hidden: &mut CpuBuffer,
    ) -> Result<(), EngineError> {
        let width = hidden.width;
        let values = &mut hidden.values[..rows.len() * width];
        rank.sum(values)?;
        if let Some((norm, eps)) = norm {
            for (sums, residual) in values.chunks_exact_mut(width).zip(self.residual.chunks_exact(width)) {
                let factor = norm_factor(sums, eps);
                for ((sum, residual), weight) in sums.iter_mut().zip(residual).zip(norm) {
                    *sum = residual + *sum * factor * weight;
                }
            }
            self.moved += 4 * norm.len() as u64;
        }
        Ok(())
    }

    fn first_of_ranks(
        &mut self,
        _rows: &Rows,
        rank: &mut Rank,
        first: usize,
        logits: &CpuBuffer,
        next: &mut Vec<u32>,
    ) -> Result<(), EngineError> {
        rank.first_largest(first, next, |output, token| logits.row(output)[token])
    }

    fn take_bytes_moved(&mut self) -> Bytes {
        Bytes(std::mem::take(&mut self.moved))
    }

    fn take_threads_away(&mut self) -> Option<f64> {
        self.team.take_absence()
    }

    fn kernels(&self) -> Vec<String> {
        self.kernels.names()
    }
}

impl CpuOperations {
    /// `hidden += norm(W · input + b)`: all sums of a row come before its norm.
    fn project_add_normed(
        &mut self,
        rows: &Rows,
        weights: &FusedMatrix,
        (norm, eps): (&Vec<f32>, f32),
        input: &CpuBuffer,
        hidden: &mut CpuBuffer,
    ) {
        let (count, width) = (rows.len(), hidden.width);
        self.projected.resize(self.projected.len().max(count * width), 0.0);
        let projected = DisjointSlice::new(&mut self.projected);
        let product = self.product(weights, count);
        let delta = self.delta.take();
        let out = DisjointSlice::new(&mut hidden.values);
        self.team.run(&|worker: &Worker<'_>| {
            let store = |first: usize, row: usize, sums: &[[f32; LANES]]| {
                // SAFETY: members have different panels.
                unsafe { store_sums(weights, projected, width, &delta, (first, row), sums) };
            };
            // SAFETY: room was made for this matrix; the set is this processor's.
            unsafe { product.run(worker, |row| input.row(row), None, store) };
            worker.barrier();
            worker.parallel_for(FINISH, count, |row| {
                let row = row * width..(row + 1) * width;
                // SAFETY: behind the barrier every row belongs to one unit.
                let (sums, out) = unsafe { (projected.part(row.clone()), out.part(row)) };
                let factor = norm_factor(sums, eps);
                for ((out, sum), weight) in out.iter_mut().zip(sums).zip(norm) {
                    *out += *sum * factor * weight;
                }
            });
        });
        self.moved += (weights.bytes() + 4 * norm.len()) as u64;
    }
}
