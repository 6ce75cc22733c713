//! The reference implementation of the operations: one thread, every sum in f64, no optimisation.
//!
//! Enters: what [`Operations`] says. Leaves: the same, slowly, and as close to exact arithmetic as the formats allow: every other
//! implementation is compared with it. It rounds where the trait says that all implementations round (inputs of linear layers, K and V
//! in the pool) and where activations are kept between operations (f32), and nowhere else. There are no threads, no SIMD
//! and no packed layout: weights stay as they are stored and are widened row by row when they are used.

mod arithmetic;
mod experts;
mod latent;

use std::ops::Range;

use arithmetic::{as_multiplied, bent, dot, first_largest, gated, normed, softmax};

use super::adapters::LoraWeights;
use super::operations::{
    AttentionWeights, DraftWeights, Embedding, ExpertMlp, FusedLayout, LinearPart, LoraOperations,
    Operations, StepLaunch, Steps, Storage,
};
use super::ragged_batch::{Rows, SequenceRows};
use super::ranks::Rank;
use super::rope::{RopeTables, rotate, to_f32};
use super::shapes::{AttentionShape, ExpertsMet, Gate, LatentShape, PoolShape};
use super::{kv_format, random_kv};
use crate::engine::EngineError;
use crate::weights::StoredMatrix;
use hbmark_core::model::Dtype;
use hbmark_core::units::Bytes;

/// The operations as formulas.
#[derive(Debug, Default)]
pub struct Oracle {
    moved: u64,
    /// Hidden states to which a normed sum of all ranks is added.
    residual: Vec<f32>,
    /// What adapters add to the rows of the next linear layer.
    delta: Option<Vec<Vec<f64>>>,
    /// Experts of each row of the layer, by number, with their shares; then what the shared expert is multiplied with.
    routed: Vec<(Vec<(usize, f64)>, f64)>,
    met: ExpertsMet,
    fault: Option<PlantedFault>,
}

/// What an oracle computes wrong, for tests of the checks that compare with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OracleFault {
    /// The next token of the vocabulary is embedded.
    Embed,
    /// The norm of the hidden state that a drafting layer takes has too large an ε, or where it has none the state is doubled.
    DraftInput,
    /// The norm of this operation has too large an ε.
    NormQkv,
    GateUp,
    Head,
    /// A row attends to its own position only.
    Attention,
    /// The residual is added twice.
    Residual,
    /// Of the experts that the router chose, those after them.
    Router,
    /// The norm before the experts has too large an ε.
    ExpertGateUp,
    /// Shares of routed experts count twice.
    ExpertDown,
    /// What meets the keys of latent attention is not turned.
    LatentQuery,
    /// All heads have the keys of the first one.
    LatentExpand,
    /// Every head has the matrix of the first.
    LatentValue,
    /// Every fiftieth byte is counted twice, from the first faulty step on.
    Bytes,
}

#[derive(Debug)]
struct PlantedFault {
    fault: OracleFault,
    /// The steps that are faulty.
    when: fn(&Rows) -> bool,
    /// The current step is one.
    now: bool,
    /// One has begun.
    begun: bool,
}

/// Activations, `[rows, width]`.
#[derive(Debug)]
pub struct PlainBuffer {
    width: usize,
    values: Vec<f32>,
}

impl PlainBuffer {
    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.width..(row + 1) * self.width]
    }

    fn row_mut(&mut self, row: usize) -> &mut [f32] {
        &mut self.values[row * self.width..(row + 1) * self.width]
    }
}

/// K and V, `[blocks, kv_heads, block_size, head_dim]` per layer, as f32 that the pool's dtype can hold; of latent attention K alone.
///
/// Positions never written hold NaN, so that reading one shows.
#[derive(Debug)]
pub struct PlainPool {
    shape: PoolShape,
    /// Keys and values of each layer.
    layers: Vec<[Vec<f32>; 2]>,
}

impl PlainPool {
    /// Where a head's vectors of one position lie in its layer: K, and V, which of latent attention begins where K does.
    fn places(&self, (block, slot): (usize, usize), head: usize) -> [Range<usize>; 2] {
        let shape = &self.shape;
        let value_dim = if shape.value_dim == 0 { shape.head_dim } else { shape.value_dim };
        [shape.head_dim, value_dim].map(|dim| {
            let start = ((block * shape.kv_heads + head) * shape.block_size + slot) * dim;
            start..start + dim
        })
    }

    fn write(&mut self, layer: usize, slot: (usize, usize), head: usize, [key, value]: [&[f32]; 2]) {
        let places = self.places(slot, head);
        let dtype = self.shape.dtype;
        let [keys, values] = &mut self.layers[layer];
        for ((cache, place), new) in [keys, values].into_iter().zip(places).zip([key, value]) {
            let kept = &mut cache[place];
            kept.copy_from_slice(new);
            kv_format::keep(kept, dtype, kv_format::scale_of(new));
        }
    }
}

/// Bytes of a linear layer.
fn bytes_of(parts: &[LinearPart]) -> u64 {
    let bias = |part: &LinearPart| part.bias.as_ref().map_or(0, |bias| 4 * bias.len() as u64);
    parts.iter().map(|part| part.matrix.bytes().0 + bias(part)).sum()
}

impl Oracle {
    /// An oracle with its byte count at zero.
    pub fn new() -> Self {
        Self::default()
    }

    /// An oracle with a fault in the steps that `when` picks.
    #[cfg_attr(not(test), expect(dead_code, reason = "only tests plant faults"))]
    pub fn with_fault(fault: OracleFault, when: fn(&Rows) -> bool) -> Self {
        Self { fault: Some(PlantedFault { fault, when, now: false, begun: false }), ..Self::default() }
    }

    fn is_faulty(&self, fault: OracleFault) -> bool {
        self.fault.as_ref().is_some_and(|planted| planted.fault == fault && planted.now)
    }

    fn eps(&self, fault: OracleFault, eps: f32) -> f32 {
        if self.is_faulty(fault) { 0.1 } else { eps }
    }

    /// `W · input + b` of all parts one after another, for each input.
    fn multiply(&mut self, parts: &[LinearPart], inputs: &[Vec<f32>]) -> Vec<Vec<f64>> {
        let mut outputs = vec![Vec::new(); inputs.len()];
        for LinearPart { matrix, bias } in parts {
            let inputs: Vec<Vec<f64>> = inputs.iter().map(|input| as_multiplied(input, matrix)).collect();
            let mut weights = vec![0.0; matrix.columns];
            for row in 0..matrix.rows {
                matrix.row(row, &mut weights);
                let bias = bias.as_ref().map_or(0.0, |bias| f64::from(bias[row]));
                for (output, input) in outputs.iter_mut().zip(&inputs) {
                    output.push(dot(&weights, input) + bias);
                }
            }
        }
        self.moved += bytes_of(parts);
        outputs
    }

    /// As [`Self::multiply`], with what adapters add.
    fn multiply_adapted(&mut self, parts: &[LinearPart], inputs: &[Vec<f32>]) -> Vec<Vec<f64>> {
        let delta = self.delta.take();
        let mut outputs = self.multiply(parts, inputs);
        for (output, delta) in outputs.iter_mut().zip(delta.iter().flatten()) {
            output.iter_mut().zip(delta).for_each(|(output, delta)| *output += delta);
        }
        outputs
    }

    /// `x / √(mean(x²) + ε) ∘ weights` of some rows; the rows themselves without a norm.
    fn norm(
        &mut self,
        buffer: &PlainBuffer,
        rows: impl Iterator<Item = usize>,
        norm: Option<(&Vec<f32>, f32)>,
    ) -> Vec<Vec<f32>> {
        self.moved += norm.map_or(0, |(weights, _)| 4 * weights.len() as u64);
        let normed = |row: &[f32]| norm.map_or(row.to_vec(), |(weights, eps)| normed(row, weights, eps));
        rows.map(|row| normed(buffer.row(row))).collect()
    }
}

impl Storage for Oracle {
    type Linear = Vec<LinearPart>;
    type Vector = Vec<f32>;
    type Table = StoredMatrix;
    type Buffer = PlainBuffer;
    type Pool = PlainPool;
    type ExpertTable = ();

    fn linear(
        &mut self,
        parts: Vec<LinearPart>,
        _arrangement: FusedLayout,
    ) -> Result<Vec<LinearPart>, EngineError> {
        Ok(parts)
    }

    fn vector(&mut self, values: Vec<f32>) -> Result<Vec<f32>, EngineError> {
        Ok(values)
    }

    fn table(&mut self, matrix: StoredMatrix) -> Result<StoredMatrix, EngineError> {
        Ok(matrix)
    }

    fn expert_table(
        &mut self,
        _: &[ExpertMlp<Self>],
        _: Option<&ExpertMlp<Self>>,
    ) -> Result<(), EngineError> {
        Ok(())
    }

    fn buffer(&mut self, rows: usize, width: usize) -> Result<PlainBuffer, EngineError> {
        Ok(PlainBuffer { width, values: vec![f32::NAN; rows * width] })
    }

    fn pool(&mut self, shape: PoolShape) -> Result<PlainPool, EngineError> {
        kv_format::check(shape.dtype, shape.value_dim == 0)?;
        Ok(PlainPool { shape, layers: vec![Default::default(); shape.layers] })
    }

    fn expanded_pool(&mut self, shape: &LatentShape, latents: &PlainPool) -> Result<PlainPool, EngineError> {
        self.pool(PoolShape { dtype: Dtype::F32, ..shape.expanded_pool(&latents.shape) })
    }

    fn set_width(buffer: &mut PlainBuffer, width: usize) {
        buffer.width = width;
    }

    fn reserve(&mut self, pool: &mut PlainPool, blocks: usize) -> Result<(), EngineError> {
        for caches in &mut pool.layers {
            for (cache, elements) in caches.iter_mut().zip(pool.shape.block_parts()) {
                cache.resize((blocks * elements).max(cache.len()), f32::NAN);
            }
        }
        Ok(())
    }

    fn fill_blocks(&mut self, pool: &mut PlainPool, blocks: &[u32], seed: u64) -> Result<(), EngineError> {
        let (parts, dtype) = (pool.shape.block_parts(), pool.shape.dtype);
        for (layer, caches) in pool.layers.iter_mut().enumerate() {
            for ((cache, elements), values) in caches.iter_mut().zip(parts).zip([false, true]) {
                for (number, &block) in blocks.iter().enumerate() {
                    let out = &mut cache[block as usize * elements..(block as usize + 1) * elements];
                    random_kv::fill(seed, layer, number, values, out);
                    kv_format::keep(out, dtype, random_kv::int8_scale());
                }
            }
        }
        Ok(())
    }

    fn read_into(
        &mut self,
        buffer: &PlainBuffer,
        rows: usize,
        values: &mut Vec<f32>,
    ) -> Result<(), EngineError> {
        values.clear();
        values.extend_from_slice(&buffer.values[..rows * buffer.width]);
        Ok(())
    }
}

impl LoraOperations for Oracle {
    fn supports_lora(&self) -> bool {
        true
    }

    fn lora(
        &mut self,
        rows: &Rows,
        adapters: &[Option<LoraWeights<Self>>],
        width: usize,
        norm: Option<(&Vec<f32>, f32)>,
        input: &PlainBuffer,
    ) -> Result<(), EngineError> {
        let mut delta = vec![vec![0.0; width]; rows.len()];
        for group in &rows.adapters {
            let Some(low) = &adapters[group.adapter] else { continue };
            let own = &rows.adapted[group.rows.clone()];
            // The norm's weights are counted where the layer itself norms.
            let inputs: Vec<Vec<f32>> = own
                .iter()
                .map(|&row| {
                    norm.map_or_else(|| input.row(row).to_vec(), |(w, eps)| normed(input.row(row), w, eps))
                })
                .collect();
            let inner = self.multiply(&low.a, &inputs);
            for (part, first) in low.outputs.iter().enumerate() {
                let inner: Vec<Vec<f32>> = inner
                    .iter()
                    .map(|row| {
                        row[part * low.rank..(part + 1) * low.rank].iter().map(|x| to_f32(*x)).collect()
                    })
                    .collect();
                for (row, output) in own.iter().zip(self.multiply(&low.b[part..=part], &inner)) {
                    delta[*row][*first..first + output.len()].copy_from_slice(&output);
                }
            }
        }
        self.delta = Some(delta);
        Ok(())
    }
}

impl Steps for Oracle {
    fn begin(&mut self, rows: &Rows, _: &RopeTables, _: &Self::Pool) -> Result<StepLaunch, EngineError> {
        if let Some(planted) = &mut self.fault {
            planted.now = (planted.when)(rows);
            planted.begun |= planted.now;
        }
        Ok(StepLaunch::PerOperation)
    }
}

impl Operations for Oracle {
    fn embed(
        &mut self,
        rows: &Rows,
        embedding: Embedding<'_, Self>,
        scale: f32,
        hidden: &mut PlainBuffer,
    ) -> Result<(), EngineError> {
        let table = match embedding {
            Embedding::Table(table) => table,
            Embedding::Head(head) => &head[0].matrix,
        };
        let shift = usize::from(self.is_faulty(OracleFault::Embed));
        for (row, &token) in rows.tokens.iter().enumerate() {
            let out = hidden.row_mut(row);
            table.row((token as usize + shift) % table.rows, out);
            for x in out {
                *x *= scale;
            }
        }
        self.moved += rows.len() as u64 * (table.bytes().0 / table.rows.max(1) as u64);
        Ok(())
    }

    fn join_state(
        &mut self,
        rows: &Rows,
        draft: &DraftWeights<Self>,
        norm_eps: f32,
        hidden: &mut PlainBuffer,
        joined: &mut PlainBuffer,
    ) -> Result<(), EngineError> {
        let [of_embedding, of_state] =
            draft.norms.as_ref().map_or([None; 2], |[embedding, state]| [Some(embedding), Some(state)]);
        let eps = self.eps(OracleFault::DraftInput, norm_eps);
        let state = match of_state {
            Some(norm) => normed(&draft.state, norm, eps),
            None if self.is_faulty(OracleFault::DraftInput) => draft.state.iter().map(|x| 2.0 * x).collect(),
            None => draft.state.clone(),
        };
        let embeddings = self.norm(hidden, 0..rows.len(), of_embedding.map(|norm| (norm, norm_eps)));
        for (row, embedding) in embeddings.into_iter().enumerate() {
            joined.row_mut(row).copy_from_slice(&[embedding.as_slice(), &state].concat());
            hidden.row_mut(row).fill(0.0);
        }
        self.moved += 4 * of_state.map_or(0, Vec::len) as u64;
        Ok(())
    }

    fn norm_qkv(
        &mut self,
        rows: &Rows,
        shape: &AttentionShape,
        weights: &AttentionWeights<Self>,
        ropes: &RopeTables,
        layer: usize,
        hidden: &PlainBuffer,
        pool: &mut PlainPool,
        query: &mut PlainBuffer,
    ) -> Result<(), EngineError> {
        let eps = self.eps(OracleFault::NormQkv, shape.norm_eps);
        let inputs = self.norm(hidden, 0..rows.len(), weights.norm.as_ref().map(|norm| (norm, eps)));
        let projected = self.multiply_adapted(&weights.qkv, &inputs);
        let head_norms = weights.head_norms.as_ref();
        for (row, projected) in projected.iter().enumerate() {
            let angles = ropes.at(shape.rope, rows.positions[row] as usize);
            // Queries or keys, normed together or head by head, and turned.
            let turned = |heads: &[f32], norm: Option<&Vec<f32>>| {
                let together = if shape.joint_norms { heads.len() } else { shape.head_dim };
                let normed = |heads: &[f32]| match norm {
                    Some(norm) => normed(heads, norm, shape.norm_eps),
                    None => heads.to_vec(),
                };
                let mut heads: Vec<f32> = heads.chunks(together).flat_map(normed).collect();
                if let Some((cosines, sines)) = angles {
                    heads.chunks_mut(shape.head_dim).for_each(|head| rotate(head, cosines, sines));
                }
                heads
            };
            let projected: Vec<f32> = projected.iter().map(|&x| to_f32(x)).collect();
            let (queries, rest) = projected.split_at(shape.query_width());
            let (keys, values) = rest.split_at(shape.kv_width());

            query.row_mut(row).copy_from_slice(&turned(queries, head_norms.map(|norms| &norms.0)));
            let keys = turned(keys, head_norms.map(|norms| &norms.1));
            let heads = keys.chunks_exact(shape.head_dim).zip(values.chunks_exact(shape.head_dim));
            for (head, (key, value)) in heads.enumerate() {
                pool.write(layer, rows.slot(row), head, [key, value]);
            }
        }
        let norms = head_norms.map_or(0, |(query, key)| query.len() + key.len());
        self.moved += (4 * norms + rows.len() * pool.shape.position_bytes()) as u64;
        Ok(())
    }

    fn attention(
        &mut self,
        rows: &Rows,
        shape: &AttentionShape,
        window: Option<usize>,
        sinks: Option<&Vec<f32>>,
        layer: usize,
        query: &PlainBuffer,
        pool: &PlainPool,
        out: &mut PlainBuffer,
    ) -> Result<(), EngineError> {
        let (dim, value_dim) = (shape.head_dim, shape.value_dim);
        let window = if self.is_faulty(OracleFault::Attention) { Some(1) } else { window };
        let [keys, values] = &pool.layers[layer];
        let values = if pool.shape.value_dim == 0 { keys } else { values };
        for sequence in &rows.sequences {
            for row in sequence.rows.clone() {
                let attended = attended(rows.positions[row] as usize, window);
                for head in 0..shape.heads {
                    let block = |index| rows.block(sequence, index, &pool.shape);
                    let places: Vec<[Range<usize>; 2]> = attended
                        .clone()
                        .map(|p| (block(p / rows.block_size), p % rows.block_size))
                        .map(|slot| pool.places(slot, head / shape.group()))
                        .collect();
                    let query = &query.row(row)[head * dim..(head + 1) * dim];
                    let scores = places
                        .iter()
                        .map(|[key, _]| dot(query, &keys[key.clone()]) * f64::from(shape.scale))
                        .map(|score| bent(score, shape.softcap));
                    // The sink comes last, where no position is.
                    let sink = sinks.map(|sinks| f64::from(sinks[head]));
                    let shares = softmax(&scores.chain(sink).collect::<Vec<f64>>());
                    let out = &mut out.row_mut(row)[head * value_dim..(head + 1) * value_dim];
                    for (i, out) in out.iter_mut().enumerate() {
                        let weighted = places
                            .iter()
                            .zip(&shares)
                            .map(|([_, value], share)| share * f64::from(values[value.start + i]));
                        *out = to_f32(weighted.sum());
                    }
                }
            }
            self.moved += (positions_read(sequence, window) * pool.shape.position_bytes()) as u64;
        }
        self.moved += 4 * sinks.map_or(0, Vec::len) as u64;
        Ok(())
    }

    fn begin_sum(
        &mut self,
        rows: &Rows,
        rank: &mut Rank,
        normed: bool,
        hidden: &mut PlainBuffer,
    ) -> Result<(), EngineError> {
        let values = &mut hidden.values[..rows.len() * hidden.width];
        self.residual = values.to_vec();
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
        hidden: &mut PlainBuffer,
    ) -> Result<(), EngineError> {
        let width = hidden.width;
        let values = &mut hidden.values[..rows.len() * width];
        rank.sum(values)?;
        let Some((norm, eps)) = norm else { return Ok(()) };
        for (sums, residual) in values.chunks_exact_mut(width).zip(self.residual.chunks_exact(width)) {
            let squares: f64 = sums.iter().map(|x| f64::from(*x).powi(2)).sum();
            let factor = 1.0 / (squares / width as f64 + f64::from(eps)).sqrt();
            for ((sum, residual), weight) in sums.iter_mut().zip(residual).zip(norm) {
                *sum = to_f32(f64::from(*residual) + f64::from(*sum) * factor * f64::from(*weight));
            }
        }
        self.moved += 4 * norm.len() as u64;
        Ok(())
    }

    fn first_of_ranks(
        &mut self,
        _rows: &Rows,
        rank: &mut Rank,
        first: usize,
        logits: &PlainBuffer,
        next: &mut Vec<u32>,
    ) -> Result<(), EngineError> {
        rank.first_largest(first, next, |output, token| logits.row(output)[token])
    }

    fn project_add(
        &mut self,
        rows: &Rows,
        weights: &Vec<LinearPart>,
        norm: Option<(&Vec<f32>, f32)>,
        input: &PlainBuffer,
        hidden: &mut PlainBuffer,
    ) -> Result<(), EngineError> {
        let inputs: Vec<Vec<f32>> = (0..rows.len()).map(|row| input.row(row).to_vec()).collect();
        let times = if self.is_faulty(OracleFault::Residual) { 2.0 } else { 1.0 };
        for (row, output) in self.multiply_adapted(weights, &inputs).iter_mut().enumerate() {
            if let Some((weights, eps)) = norm {
                let squares: f64 = output.iter().map(|x| x * x).sum();
                let factor = 1.0 / (squares / output.len() as f64 + f64::from(eps)).sqrt();
                output.iter_mut().zip(weights).for_each(|(x, weight)| *x *= factor * f64::from(*weight));
            }
            for (hidden, output) in hidden.row_mut(row).iter_mut().zip(output) {
                *hidden = to_f32(f64::from(*hidden) + times * *output);
            }
        }
        self.moved += norm.map_or(0, |(weights, _)| 4 * weights.len() as u64);
        Ok(())
    }

    fn norm_gate_up(
        &mut self,
        rows: &Rows,
        norm: Option<(&Vec<f32>, f32)>,
        gate: Gate,
        weights: &Vec<LinearPart>,
        hidden: &PlainBuffer,
        out: &mut PlainBuffer,
    ) -> Result<(), EngineError> {
        let norm = norm.map(|(norm, eps)| (norm, self.eps(OracleFault::GateUp, eps)));
        let inputs = self.norm(hidden, 0..rows.len(), norm);
        for (row, output) in self.multiply_adapted(weights, &inputs).iter().enumerate() {
            let (gates, ups) = output.split_at(weights[0].matrix.rows);
            for ((out, x), up) in out.row_mut(row).iter_mut().zip(gates).zip(ups) {
                *out = to_f32(gated(gate, *x, *up));
            }
        }
        Ok(())
    }

    fn head(
        &mut self,
        rows: &Rows,
        norm: &Vec<f32>,
        norm_eps: f32,
        head: &Vec<LinearPart>,
        softcap: Option<f32>,
        hidden: &PlainBuffer,
        logits: &mut PlainBuffer,
        next: &mut Vec<u32>,
    ) -> Result<(), EngineError> {
        let with_logits = rows.outputs.iter().map(|row| *row as usize);
        let norm = Some((norm, self.eps(OracleFault::Head, norm_eps)));
        let inputs = self.norm(hidden, with_logits, norm);
        next.clear();
        for (output, sums) in self.multiply(head, &inputs).iter().enumerate() {
            let logits = logits.row_mut(output);
            for (logit, sum) in logits.iter_mut().zip(sums) {
                *logit = to_f32(bent(*sum, softcap));
            }
            next.push(first_largest(logits));
        }
        Ok(())
    }

    fn take_bytes_moved(&mut self) -> Bytes {
        let moved = std::mem::take(&mut self.moved);
        let twice =
            self.fault.as_ref().is_some_and(|planted| planted.fault == OracleFault::Bytes && planted.begun);
        Bytes(if twice { moved + moved / 50 } else { moved })
    }
}

/// The positions that a token attends to.
fn attended(position: usize, window: Option<usize>) -> Range<usize> {
    window.map_or(0, |window| (position + 1).saturating_sub(window))..position + 1
}

/// Positions that one or more rows of a sequence attend to.
fn positions_read(sequence: &SequenceRows, window: Option<usize>) -> usize {
    sequence.positions_after() - attended(sequence.start_position, window).start
}

#[cfg(test)]
mod tests;
