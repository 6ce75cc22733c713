//! Attention over the paged cache.
//!
//! Enters: queries `[rows, heads · head_dim]`, a [`CachePool`]. Leaves: attended values `[rows, heads · value_dim]`. A unit of work is a head of K and V of one
//! sequence, some rows of queries (all query heads that share the head of K and V together, so that it is read once for them), and
//! a KV split of positions. A few rows over a long context are split into KV splits, whose parts are merged after a barrier. Positions are taken
//! in chunks at fixed places, so that neither threads nor the chunks of a prefill change the order of the sums. Of latent attention a row of the
//! cache is both key and value, so it is read once, and scores are sums over its lanes.
#![expect(unsafe_code, reason = "kernels read queries and the cache through pointers")]

use std::ops::Range;

use hbmark_cpu_kernels::attention::{CHUNK, Tiles, multiply_by_scales, online_softmax};
use hbmark_cpu_kernels::element::Element;
use hbmark_cpu_kernels::elementwise::bend;
use hbmark_cpu_kernels::simd::{InstructionSet, LANES};

use super::cache::CachePool;
use super::thread_team::{DisjointSlice, Worker};
use crate::engine::native::ragged_batch::{Rows, SequenceRows};
use crate::engine::native::shapes::AttentionShape;

/// Queries (rows × heads of a group) that pass over a chunk together.
const MAX_QUERIES: usize = 16;

/// Positions of a KV split, where a sequence is split; a multiple of the chunk.
const KV_SPLIT_POSITIONS: usize = 256;

/// What one unit does.
#[derive(Debug, Clone, Copy)]
struct WorkUnit {
    sequence: usize,
    head: usize,
    /// First row, and number of rows.
    first_row: usize,
    rows: usize,
    kv_split: usize,
}

/// How one sequence is cut into units; units of a sequence are numbered head by head, rows by rows, KV split by KV split.
#[derive(Debug, Clone, Copy)]
struct SequenceSplit {
    first_unit: usize,
    /// Parts that await merging, before this sequence.
    first_part: usize,
    rows_per_unit: usize,
    row_tiles: usize,
    kv_splits: usize,
}

/// The plan of a step's attention, kept between layers and steps.
#[derive(Debug, Default)]
pub struct AttentionPlan {
    cuts: Vec<SequenceSplit>,
    units: usize,
    parts: usize,
    /// Per part: values, largest score and sum of weights of each query head.
    partial: Vec<f32>,
    part_width: usize,
    /// One per member, allocated here so that a steady decode allocates nothing.
    scratch: Vec<Scratch>,
}

/// What the members of a team write to during one operation.
#[derive(Debug, Clone, Copy)]
pub struct Workspace {
    partial: DisjointSlice<f32>,
    scratch: DisjointSlice<Scratch>,
}

impl AttentionPlan {
    /// Cuts a step into units.
    pub fn make(&mut self, rows: &Rows, shape: &AttentionShape, members: usize) {
        let group = shape.group();
        let rows_per_unit = (MAX_QUERIES / group).max(1);
        self.cuts.clear();
        (self.units, self.parts) = (0, 0);
        for sequence in &rows.sequences {
            let row_tiles = sequence.rows.len().div_ceil(rows_per_unit);
            // Many rows make units enough.
            let kv_splits =
                if row_tiles == 1 { sequence.positions_after().div_ceil(KV_SPLIT_POSITIONS) } else { 1 };
            self.cuts.push(SequenceSplit {
                first_unit: self.units,
                first_part: self.parts,
                rows_per_unit,
                row_tiles,
                kv_splits,
            });
            self.units += shape.kv_heads * row_tiles * kv_splits;
            if kv_splits > 1 {
                self.parts += sequence.rows.len() * shape.heads * kv_splits;
            }
        }
        self.part_width = shape.value_dim.next_multiple_of(LANES) + 2;
        let need = self.parts * self.part_width;
        if self.partial.len() < need {
            self.partial.resize(need, 0.0);
        }
        self.scratch.resize_with(members, Scratch::default);
        for scratch in &mut self.scratch {
            let query = shape.head_dim.next_multiple_of(LANES);
            scratch.reserve(rows_per_unit * group, query, self.part_width - 2);
        }
    }

    fn unit(&self, rows: &Rows, index: usize) -> (WorkUnit, SequenceSplit) {
        let sequence = self.cuts.partition_point(|cut| cut.first_unit <= index) - 1;
        let cut = self.cuts[sequence];
        let within = index - cut.first_unit;
        let (kv_split, rest) = (within % cut.kv_splits, within / cut.kv_splits);
        let (tile, head) = (rest % cut.row_tiles, rest / cut.row_tiles);
        let of_sequence = &rows.sequences[sequence].rows;
        let first_row = of_sequence.start + tile * cut.rows_per_unit;
        let unit = WorkUnit {
            sequence,
            head,
            first_row,
            rows: cut.rows_per_unit.min(of_sequence.end - first_row),
            kv_split,
        };
        (unit, cut)
    }
}

/// Scratch of one member: queries, scores and running values of one unit.
#[derive(Debug, Default)]
struct Scratch {
    queries: Vec<f32>,
    values: Vec<f32>,
    scores: Vec<f32>,
    largest: Vec<f32>,
    sums: Vec<f32>,
}

impl Scratch {
    /// Room for so many queries of a head.
    fn reserve(&mut self, queries: usize, dim: usize, stride: usize) {
        let grow = |vector: &mut Vec<f32>, need: usize| vector.resize(need.max(vector.len()), 0.0);
        grow(&mut self.queries, queries * dim);
        grow(&mut self.values, queries * stride);
        grow(&mut self.scores, queries * CHUNK);
        grow(&mut self.largest, queries);
        grow(&mut self.sums, queries);
    }
}

/// The arguments of one attention operation.
#[derive(Debug, Clone, Copy)]
pub struct Attention<'a> {
    pub rows: &'a Rows,
    pub shape: &'a AttentionShape,
    pub window: Option<usize>,
    /// One more score of each head, whose V is zero.
    pub sinks: Option<&'a [f32]>,
    pub layer: usize,
    pub query: &'a [f32],
    pub pool: &'a CachePool,
    pub out: DisjointSlice<f32>,
}

/// Where the tiles of a chunk lie; null where none of them is asked for.
struct ChunkTiles<E> {
    keys: Tiles<E>,
    values: Tiles<E>,
    /// Of K and of V, where vectors have any.
    scales: [Tiles<f32>; 2],
}

impl Attention<'_> {
    /// Those of some tiles of one chunk, of a head of K and V.
    fn tiles_of_chunk<E: Element>(
        &self,
        sequence: &SequenceRows,
        head: usize,
        tiles: Range<usize>,
    ) -> ChunkTiles<E> {
        let Self { pool, layer, .. } = *self;
        let mut found = ChunkTiles {
            keys: [std::ptr::null(); CHUNK / LANES],
            values: [std::ptr::null(); CHUNK / LANES],
            scales: [[std::ptr::null(); CHUNK / LANES]; 2],
        };
        for tile in tiles {
            let (block, slot) = (tile * LANES / self.rows.block_size, tile * LANES % self.rows.block_size);
            let (block, at) = (self.rows.block(sequence, block, &pool.shape), tile % (CHUNK / LANES));
            // SAFETY: the slot lies within the block.
            unsafe {
                found.keys[at] = pool.keys::<E>(layer, block, head).add(slot * self.shape.head_dim);
                found.values[at] = pool.values::<E>(layer, block, head).add(slot * pool.value_stride);
                if E::SCALED {
                    let of = |values: bool| pool.scales(layer, block, head, values).add(slot).cast_const();
                    (found.scales[0][at], found.scales[1][at]) = (of(false), of(true));
                }
            }
        }
        found
    }
}

impl AttentionPlan {
    /// Does a member's share. Phases `phase` and `phase + 1` of the job are used.
    ///
    /// # Safety
    /// All members run this in the same job with the same arguments; `out` and the cache are not touched otherwise; the set is available.
    pub unsafe fn run<E: Element>(
        &self,
        set: InstructionSet,
        worker: &Worker<'_>,
        phase: usize,
        work: &Attention<'_>,
        workspace: Workspace,
    ) {
        let partial = workspace.partial;
        // SAFETY: each member takes its own.
        let scratch = unsafe { &mut workspace.scratch.part(worker.index..worker.index + 1)[0] };
        worker.parallel_for(phase, self.units, |index| {
            let (unit, cut) = self.unit(work.rows, index);
            // SAFETY: units do not overlap in what they write.
            unsafe { self.attend::<E>(set, work, unit, cut, partial, scratch) };
        });
        if self.parts == 0 {
            return;
        }
        worker.barrier();
        worker.parallel_for(phase + 1, work.rows.len() * work.shape.heads, |index| {
            let (row, head) = (index / work.shape.heads, index % work.shape.heads);
            // SAFETY: behind the barrier parts are only read; each query's output belongs to one unit.
            unsafe { self.merge(work, row, head, partial) };
        });
    }

    /// Takes the memory that members write to out of the plan, for the length of a job.
    pub fn lend(&mut self) -> (&Self, Workspace) {
        let workspace = Workspace {
            partial: DisjointSlice::new(&mut self.partial),
            scratch: DisjointSlice::new(&mut self.scratch),
        };
        (self, workspace)
    }

    /// Where the part of a query head and KV split lies.
    fn part(
        &self,
        cut: &SequenceSplit,
        sequence: &SequenceRows,
        shape: &AttentionShape,
        row: usize,
        head: usize,
        kv_split: usize,
    ) -> Range<usize> {
        let index =
            cut.first_part + ((row - sequence.rows.start) * shape.heads + head) * cut.kv_splits + kv_split;
        index * self.part_width..(index + 1) * self.part_width
    }

    unsafe fn attend<E: Element>(
        &self,
        set: InstructionSet,
        work: &Attention<'_>,
        unit: WorkUnit,
        cut: SequenceSplit,
        partial: DisjointSlice<f32>,
        scratch: &mut Scratch,
    ) {
        let shape = work.shape;
        let (group, dim) = (shape.group(), shape.head_dim);
        let (row_stride, stride) = (work.pool.value_stride, self.part_width - 2);
        // Queries that meet whole rows are padded as these are.
        let query_stride = if work.pool.is_latent() { row_stride } else { dim };
        let count = unit.rows * group;
        let sequence = &work.rows.sequences[unit.sequence];
        let queries = &mut scratch.queries[..count * query_stride];
        let running = &mut scratch.values[..count * stride];
        let scored = &mut scratch.scores[..count * CHUNK];
        let (largest, sums) = (&mut scratch.largest[..count], &mut scratch.sums[..count]);
        running.fill(0.0);
        // A sink is a score that the first KV split has seen before all others.
        let sinks = work.sinks.filter(|_| unit.kv_split == 0);
        for (i, (largest, sum)) in largest.iter_mut().zip(&mut *sums).enumerate() {
            let sink = sinks.map(|sinks| sinks[unit.head * group + i % group]);
            (*largest, *sum) = sink.map_or((f32::NEG_INFINITY, 0.0), |sink| (sink, 1.0));
        }
        scale_queries(work, unit, queries, query_stride);
        let position = |row: usize| work.rows.positions[row] as usize;
        let last = position(unit.first_row + unit.rows - 1);
        let reach = |position: usize| work.window.map_or(0, |w| (position + 1).saturating_sub(w));
        let mut kv_split = reach(position(unit.first_row))..last + 1;
        if cut.kv_splits > 1 {
            kv_split = kv_split.start.max(unit.kv_split * KV_SPLIT_POSITIONS)
                ..kv_split.end.min((unit.kv_split + 1) * KV_SPLIT_POSITIONS);
        }
        let first_chunk = kv_split.start / CHUNK;
        for chunk in first_chunk..kv_split.end.div_ceil(CHUNK).max(first_chunk) {
            let seen = kv_split.start.max(chunk * CHUNK)..kv_split.end.min((chunk + 1) * CHUNK);
            if seen.is_empty() {
                continue;
            }
            // Blocks may be smaller than a chunk: tiles of sixteen positions are looked up one by one.
            let tiles = seen.start / LANES..seen.end.div_ceil(LANES);
            let ChunkTiles { keys, values, scales } =
                work.tiles_of_chunk::<E>(sequence, unit.head, tiles.clone());
            let first_tile = tiles.start - chunk * CHUNK / LANES;
            let tiles = first_tile..tiles.end - chunk * CHUNK / LANES;
            let local = seen.start - chunk * CHUNK..seen.end - chunk * CHUNK;
            // SAFETY: the pointers of `tiles` are set, scratch has `count` queries, and the set is available.
            unsafe {
                if work.pool.is_latent() {
                    E::row_scores(set, &values, local.clone(), row_stride, queries, scored);
                } else {
                    E::scores(set, &keys, tiles.clone(), dim, queries, scored);
                }
                if E::SCALED {
                    multiply_by_scales(&scales[0], tiles.clone(), scored);
                }
                if let Some(cap) = shape.softcap {
                    let seen = tiles.start * LANES..tiles.end * LANES;
                    for scored in scored.chunks_exact_mut(CHUNK) {
                        bend(set, &mut scored[seen.clone()], 1.0, cap);
                    }
                }
                for i in 0..count {
                    let own = position(unit.first_row + i / group);
                    let (low, high) = (reach(own), own + 1);
                    let visible = low.clamp(seen.start, seen.end) - chunk * CHUNK
                        ..high.clamp(seen.start, seen.end) - chunk * CHUNK;
                    online_softmax(
                        set,
                        &mut scored[i * CHUNK..(i + 1) * CHUNK],
                        visible,
                        &mut largest[i],
                        &mut sums[i],
                        &mut running[i * stride..(i + 1) * stride],
                    );
                }
                if E::SCALED {
                    multiply_by_scales(&scales[1], tiles.clone(), scored);
                }
                E::accumulate_pv(set, &values, local, (row_stride, stride), scored, running);
            }
        }
        for i in 0..count {
            let (row, head) = (unit.first_row + i / group, unit.head * group + i % group);
            let values = &running[i * stride..(i + 1) * stride];
            if cut.kv_splits > 1 {
                let range = self.part(&cut, sequence, shape, row, head, unit.kv_split);
                // SAFETY: the part belongs to this unit alone.
                let part = unsafe { partial.part(range) };
                part[..stride].copy_from_slice(values);
                part[stride] = largest[i];
                part[stride + 1] = sums[i];
            } else {
                let at = row * shape.attended_width() + head * shape.value_dim;
                // SAFETY: the output of this row and head belongs to this unit alone.
                let out = unsafe { work.out.part(at..at + shape.value_dim) };
                for (out, value) in out.iter_mut().zip(values) {
                    *out = value / sums[i];
                }
            }
        }
    }

    /// Joins the KV splits of one query.
    unsafe fn merge(&self, work: &Attention<'_>, row: usize, head: usize, partial: DisjointSlice<f32>) {
        let owner = work.rows.owners[row] as usize;
        let (sequence, cut, shape) = (&work.rows.sequences[owner], self.cuts[owner], work.shape);
        if cut.kv_splits == 1 {
            return;
        }
        let dim = shape.value_dim;
        let stride = self.part_width - 2;
        let at = row * shape.attended_width() + head * dim;
        // SAFETY: after the barrier no member writes parts; the output of this row and head belongs to this unit alone.
        let (parts, out) = unsafe { (partial.whole(), work.out.part(at..at + dim)) };
        let part = |kv_split| &parts[self.part(&cut, sequence, shape, row, head, kv_split)];
        let largest = (0..cut.kv_splits).map(|s| part(s)[stride]).fold(f32::NEG_INFINITY, f32::max);
        let mut sum = 0.0;
        out.fill(0.0);
        for kv_split in 0..cut.kv_splits {
            let part = part(kv_split);
            // A KV split that the window hides has seen nothing.
            if part[stride] == f32::NEG_INFINITY {
                continue;
            }
            let weight = (part[stride] - largest).exp();
            sum += weight * part[stride + 1];
            for (out, value) in out.iter_mut().zip(part) {
                *out += weight * value;
            }
        }
        for out in out {
            *out /= sum;
        }
    }
}

/// The queries of a unit as they meet keys, each with zeros up to the stride.
fn scale_queries(work: &Attention<'_>, unit: WorkUnit, queries: &mut [f32], stride: usize) {
    let shape = work.shape;
    let (group, dim) = (shape.group(), shape.head_dim);
    // What a bend divides scores by is divided out of the queries.
    let scale = shape.softcap.map_or(shape.scale, |cap| shape.scale / cap);
    for (i, query) in queries.chunks_exact_mut(stride).enumerate() {
        let at = (unit.first_row + i / group) * shape.query_width() + (unit.head * group + i % group) * dim;
        query[dim..].fill(0.0);
        for (scaled, value) in query.iter_mut().zip(&work.query[at..at + dim]) {
            *scaled = value * scale;
        }
    }
}

/// Bytes of sinks, and of K and V that the units of a step read: whole tiles of K, rows of V, once per unit of rows.
pub fn bytes_read(work: &Attention<'_>) -> usize {
    let shape = work.shape;
    let rows_per_unit = (MAX_QUERIES / shape.group()).max(1);
    let mut positions = 0;
    for sequence in &work.rows.sequences {
        for first in (0..sequence.rows.len()).step_by(rows_per_unit) {
            let rows = rows_per_unit.min(sequence.rows.len() - first);
            let low = sequence.start_position + first;
            let start = work.window.map_or(0, |w| (low + 1).saturating_sub(w));
            positions += low + rows - start;
        }
    }
    let per_position =
        if work.pool.is_latent() { shape.head_dim } else { shape.head_dim + work.pool.value_stride };
    let of_pool = work.pool.shape;
    let kept = positions * (shape.kv_heads * per_position * of_pool.element_bytes() + of_pool.scale_bytes());
    kept + 4 * work.sinks.map_or(0, <[f32]>::len)
}
