//! Latent attention around the attention itself: one vector is kept of a token, and each head has matrices of its own between it and the
//! queries and values.
//!
//! Enters: hidden states, [`LatentWeights`]. Leaves: the vectors in the cache, queries as wide as these, and values of each head. A product by head
//! takes units of (head, a few panels), so that the matrix of a head is read once for all rows.
#![expect(unsafe_code, reason = "members write shared buffers at places that do not overlap")]

use hbmark_cpu_kernels::element::Element;
use hbmark_cpu_kernels::simd::LANES;

use super::super::operations::{LatentOperations, LatentWeights};
use super::super::ragged_batch::Rows;
use super::super::rope::RopeTables;
use super::super::shapes::{AttentionShape, LatentForm, LatentShape};
use super::cache::with_element;
use super::kernel_choice::KernelChoice;
use super::linear::{self, FusedMatrix, Tiling};
use super::lora::Added;
use super::packed_activations::InputWriter;
use super::thread_team::{DisjointSlice, Worker};
use super::{
    CachePool, CpuBuffer, CpuOperations, FINISH, MULTIPLY, NORM, PREPARE, norm_factor, store_sums, valid_rows,
};
use crate::engine::EngineError;

/// The product of each head's input with its own part of a matrix.
#[derive(Clone, Copy)]
struct ByHead<'a> {
    matrix: &'a FusedMatrix,
    /// A packed row for each head of each row.
    inputs: &'a InputWriter,
    rows: usize,
    out: DisjointSlice<f32>,
    /// Between the outputs of heads, a row having those of all.
    stride: usize,
}

impl ByHead<'_> {
    /// Does a member's share.
    ///
    /// # Safety
    /// The rows are packed and not written meanwhile, for this matrix; nothing else touches what heads write; the set is available.
    unsafe fn run(&self, kernels: &KernelChoice, worker: &Worker<'_>, phase: usize) {
        let Self { matrix, inputs, rows, out, stride } = *self;
        let heads = matrix.parts.len();
        let panels = matrix.parts[0].panels();
        let per_unit = matrix.panels_per_unit(heads * panels, worker.count);
        let of_head = panels.div_ceil(per_unit);
        worker.parallel_for(phase, heads * of_head, |unit| {
            let (head, first) = (unit / of_head, unit % of_head * per_unit);
            let unit = head * panels + first..head * panels + (first + per_unit).min(panels);
            let input = |row: usize| inputs.row(row * heads + head);
            let mut store = |first: usize, row: usize, sums: &[[f32; LANES]]| {
                for (i, sums) in sums.iter().enumerate() {
                    let place = matrix.place(first + i);
                    let valid = valid_rows(matrix, place);
                    let at = (row * heads + head) * stride + place.panel * LANES;
                    // SAFETY: members have different heads or panels.
                    unsafe { out.part(at..at + valid) }.copy_from_slice(&sums[..valid]);
                }
            };
            // SAFETY: the caller's promise.
            unsafe { Tiling::new(kernels, matrix, rows, &input).run(unit, &input, &mut store) };
        });
    }
}

impl LatentOperations for CpuOperations {
    fn latent_down(
        &mut self,
        rows: &Rows,
        shape: &AttentionShape,
        weights: &LatentWeights<Self>,
        ropes: &RopeTables,
        layer: usize,
        hidden: &CpuBuffer,
        pool: &mut CachePool,
        compressed: &mut CpuBuffer,
    ) -> Result<(), EngineError> {
        let (count, matrix) = (rows.len(), &weights.down);
        let (queries, kv_rank) = (weights.shape.query_part(), weights.shape.kv_rank);
        let width = queries + weights.shape.cached();
        self.projected.resize(self.projected.len().max(count * width), 0.0);
        let projected = DisjointSlice::new(&mut self.projected);
        let product = self.product(matrix, count);
        let out_width = compressed.width;
        let out = DisjointSlice::new(&mut compressed.values);
        self.team.run(&|worker: &Worker<'_>| {
            let norm = Some((weights.norm.as_slice(), shape.norm_eps));
            let store = |first: usize, row: usize, sums: &[[f32; LANES]]| {
                // SAFETY: members have different panels.
                unsafe { store_sums(matrix, projected, width, &Added::NONE, (first, row), sums) };
            };
            // SAFETY: room was made for this matrix; the set is this processor's.
            unsafe { product.run(worker, |row| hidden.row(row), norm, store) };
            worker.barrier();
            worker.parallel_for(FINISH, count, |row| {
                // SAFETY: behind the barrier every row belongs to one unit.
                let (sums, out) = unsafe {
                    let sums = projected.part(row * width..(row + 1) * width);
                    (sums, out.part(row * out_width..(row + 1) * out_width))
                };
                let normed = |values: &mut [f32], norm: &[f32]| {
                    let factor = norm_factor(values, shape.norm_eps);
                    values.iter_mut().zip(norm).for_each(|(x, weight)| *x = *x * factor * weight);
                };
                if let Some((norm, _)) = &weights.query {
                    normed(&mut sums[..queries], norm);
                }
                out.copy_from_slice(&sums[..out_width]);
                let kept = &mut sums[queries..];
                let (latent, key) = kept.split_at_mut(kv_rank);
                normed(latent, &weights.latent_norm);
                ropes.rotate(shape.rope, rows.positions[row] as usize, key);
                with_element!(pool.shape.dtype, E => {
                    // SAFETY: `E` is the pool's dtype; the slot is this unit's.
                    unsafe { pool.write_latent::<E>(layer, rows.slot(row), kept) };
                });
            });
        });
        let of_queries = weights.query.as_ref().map_or(0, |(norm, _)| norm.len());
        let norms = weights.norm.len() + weights.latent_norm.len() + of_queries;
        let written = count * pool.shape.position_bytes();
        self.moved += (matrix.bytes() + 4 * norms + written) as u64;
        Ok(())
    }

    fn latent_query(
        &mut self,
        rows: &Rows,
        shape: &AttentionShape,
        weights: &LatentWeights<Self>,
        ropes: &RopeTables,
        form: LatentForm,
        compressed: &CpuBuffer,
        query: &mut CpuBuffer,
    ) -> Result<(), EngineError> {
        match form {
            LatentForm::Absorbed => self.absorb_queries(rows, shape, weights, ropes, compressed, query),
            LatentForm::Expanded => self.turn_queries(rows, shape, weights, ropes, compressed, query),
        }
        Ok(())
    }

    fn latent_expand(
        &mut self,
        rows: &Rows,
        weights: &LatentWeights<Self>,
        layer: usize,
        pool: &CachePool,
        expanded: &mut CachePool,
    ) -> Result<(), EngineError> {
        let LatentShape { heads, kv_rank, nope_dim, .. } = weights.shape;
        let (key, value) = (&weights.key, &weights.value_up);
        let (kernels, dim) = (self.kernels, weights.shape.query_dim());
        self.seen.clear();
        self.seen.extend(rows.seen());
        let (seen, count) = (self.seen.as_slice(), self.seen.len());
        let writer = self.inputs.writer(Self::input_shape(key, count));
        // An element of K of a slot; those of the next elements are as many lanes behind.
        let in_tile = |slot: usize, element: usize| (slot / LANES * dim + element) * LANES + slot % LANES;
        self.team.run(&|worker: &Worker<'_>| {
            with_element!(pool.shape.dtype, E => {
                let mut kept = vec![0.0; weights.shape.cached()];
                worker.parallel_for(PREPARE, count, |row| {
                    let (block, slot) = seen[row];
                    let at = slot * pool.value_stride;
                    // SAFETY: `E` is the pool's dtype, and the slot is only read; its place in the other pool is this unit's.
                    unsafe {
                        let from = pool.values::<E>(layer, rows.tables[block] as usize, 0).add(at);
                        kept.iter_mut().enumerate().for_each(|(i, x)| *x = from.add(i).read().widen());
                        let (latent, turned) = kept.split_at(kv_rank);
                        writer.pack(kernels.general, row, latent, None);
                        for head in 0..heads {
                            let keys = expanded.keys::<f32>(0, block, head);
                            for (element, x) in (nope_dim..).zip(turned) {
                                keys.add(in_tile(slot, element)).write(*x);
                            }
                        }
                    }
                });
            });
            worker.barrier();
            let store_keys = |first: usize, row: usize, sums: &[[f32; LANES]]| {
                let (block, slot) = seen[row];
                for (i, sums) in sums.iter().enumerate() {
                    let place = key.place(first + i);
                    let keys = expanded.keys::<f32>(0, block, place.part);
                    for (element, sum) in (place.panel * LANES..).zip(&sums[..valid_rows(key, place)]) {
                        // SAFETY: members have different panels.
                        unsafe { keys.add(in_tile(slot, element)).write(*sum) };
                    }
                }
            };
            let store_values = |first: usize, row: usize, sums: &[[f32; LANES]]| {
                let (block, slot) = seen[row];
                for (i, sums) in sums.iter().enumerate() {
                    let place = value.place(first + i);
                    let at = slot * expanded.value_stride + place.panel * LANES;
                    let values = expanded.values::<f32>(0, block, place.part).wrapping_add(at);
                    // SAFETY: members have different panels.
                    unsafe { values.copy_from_nonoverlapping(sums.as_ptr(), valid_rows(value, place)) };
                }
            };
            let packed = |i: usize| writer.row(i);
            // SAFETY: the rows were packed before the barrier, in the width and precision of both matrices.
            unsafe {
                linear::multiply(&kernels, worker, MULTIPLY, key, count, packed, store_keys);
                linear::multiply(&kernels, worker, NORM, value, count, packed, store_values);
            }
        });
        let bytes = |pool: &CachePool| count * pool.shape.position_bytes();
        self.moved += (key.bytes() + value.bytes() + bytes(pool) + bytes(expanded)) as u64;
        Ok(())
    }

    fn latent_value(
        &mut self,
        rows: &Rows,
        weights: &LatentWeights<Self>,
        attended: &CpuBuffer,
        values: &mut CpuBuffer,
    ) -> Result<(), EngineError> {
        let LatentShape { heads, kv_rank, value_dim, .. } = weights.shape;
        let (kernels, count, matrix) = (self.kernels, rows.len(), &weights.value_up);
        let inputs = self.head_inputs.writer(Self::input_shape(matrix, count * heads));
        let out = DisjointSlice::new(&mut values.values);
        let up = ByHead { matrix, inputs: &inputs, rows: count, out, stride: value_dim };
        self.team.run(&|worker: &Worker<'_>| {
            worker.parallel_for(PREPARE, count * heads, |unit| {
                let (row, head) = (unit / heads, unit % heads);
                let own = &attended.row(row)[head * kv_rank..(head + 1) * kv_rank];
                // SAFETY: members have different units, each a packed row of its own; the set is this processor's.
                unsafe { inputs.pack(kernels.general, unit, own, None) };
            });
            worker.barrier();
            // SAFETY: the rows were packed before the barrier, for these matrices.
            unsafe { up.run(&kernels, worker, MULTIPLY) };
        });
        self.moved += matrix.bytes() as u64;
        Ok(())
    }
}

impl CpuOperations {
    /// Projects queries, where what was kept for them is not them already, and gives each of them to `finish(row, head, query)`. `behind` runs when all
    /// of that is done.
    fn each_query(
        &mut self,
        rows: &Rows,
        weights: &LatentWeights<Self>,
        compressed: &CpuBuffer,
        finish: &(impl Fn(usize, usize, &[f32]) + Sync),
        behind: &(impl Fn(&Worker<'_>) + Sync),
    ) {
        let (heads, query_dim) = (weights.shape.heads, weights.shape.query_dim());
        let (count, width) = (rows.len(), weights.shape.query_width());
        self.projected.resize(self.projected.len().max(count * width), 0.0);
        let projected = DisjointSlice::new(&mut self.projected);
        let projection = weights.query.as_ref().map(|(_, matrix)| self.product(matrix, count));
        self.team.run(&|worker: &Worker<'_>| {
            if let Some(product) = &projection {
                let store = |first: usize, row: usize, sums: &[[f32; LANES]]| {
                    // SAFETY: members have different panels.
                    unsafe { store_sums(product.matrix, projected, width, &Added::NONE, (first, row), sums) };
                };
                // SAFETY: room was made for this matrix; the set is this processor's.
                unsafe { product.run(worker, |row| compressed.row(row), None, store) };
                worker.barrier();
            }
            worker.parallel_for(FINISH, count * heads, |unit| {
                let (row, head) = (unit / heads, unit % heads);
                let all = if projection.is_some() {
                    // SAFETY: behind the barrier what was projected is only read.
                    unsafe { &projected.whole()[row * width..(row + 1) * width] }
                } else {
                    compressed.row(row)
                };
                finish(row, head, &all[head * query_dim..(head + 1) * query_dim]);
            });
            worker.barrier();
            behind(worker);
        });
        self.moved += weights.query.as_ref().map_or(0, |(_, matrix)| matrix.bytes()) as u64;
    }

    /// Makes the queries that meet those vectors.
    fn absorb_queries(
        &mut self,
        rows: &Rows,
        shape: &AttentionShape,
        weights: &LatentWeights<Self>,
        ropes: &RopeTables,
        compressed: &CpuBuffer,
        query: &mut CpuBuffer,
    ) {
        let LatentShape { heads, kv_rank, nope_dim, .. } = weights.shape;
        let (kernels, count, cached) = (self.kernels, rows.len(), weights.shape.cached());
        let of_heads = self.head_inputs.writer(Self::input_shape(&weights.key_up, count * heads));
        let out = DisjointSlice::new(&mut query.values);
        let up = ByHead { matrix: &weights.key_up, inputs: &of_heads, rows: count, out, stride: cached };
        let finish = |row: usize, head: usize, query: &[f32]| {
            let unit = row * heads + head;
            let (unturned, turned) = query.split_at(nope_dim);
            // SAFETY: every head of a row belongs to one unit; the set is this processor's.
            let key = unsafe {
                of_heads.pack(kernels.general, unit, unturned, None);
                out.part(unit * cached + kv_rank..(unit + 1) * cached)
            };
            key.copy_from_slice(turned);
            ropes.rotate(shape.rope, rows.positions[row] as usize, key);
        };
        self.each_query(rows, weights, compressed, &finish, &|worker| {
            // SAFETY: the rows were packed before the barrier, for these matrices.
            unsafe { up.run(&kernels, worker, NORM) };
        });
        self.moved += weights.key_up.bytes() as u64;
    }

    /// Makes the queries that meet the keys of each head.
    fn turn_queries(
        &mut self,
        rows: &Rows,
        shape: &AttentionShape,
        weights: &LatentWeights<Self>,
        ropes: &RopeTables,
        compressed: &CpuBuffer,
        query: &mut CpuBuffer,
    ) {
        let LatentShape { heads, nope_dim, .. } = weights.shape;
        let dim = weights.shape.query_dim();
        let out = DisjointSlice::new(&mut query.values);
        let finish = |row: usize, head: usize, query: &[f32]| {
            let unit = row * heads + head;
            // SAFETY: every head of a row belongs to one unit.
            let out = unsafe { out.part(unit * dim..(unit + 1) * dim) };
            out.copy_from_slice(query);
            ropes.rotate(shape.rope, rows.positions[row] as usize, &mut out[nope_dim..]);
        };
        self.each_query(rows, weights, compressed, &finish, &|_| {});
    }
}
