//! What adapters add to a linear layer: `B · (A · x)` for the rows of each adapter of a step.
//!
//! Enters: activations, the adapters' packed matrices, the adapter of each row. Leaves: a [`LoraDelta`] of all outputs of the next linear layer, which
//! that layer's own operation adds as it finishes its sums. One job of the team: rows are packed, `A` makes a few numbers of each,
//! these are packed, `B` makes outputs of them. A matrix is read once for all rows of its adapter; the sums of a row depend only on
//! its adapter and its input, so neither other rows nor the number of threads change a result.
#![expect(unsafe_code, reason = "members write shared buffers at places that do not overlap")]

use hbmark_cpu_kernels::simd::LANES;

use super::super::adapters::LoraWeights;
use super::super::operations::LoraOperations;
use super::linear::{self, FusedMatrix};
use super::packed_activations::{InputShape, PackedActivations};
use super::packed_matrix::PackedMatrix;
use super::thread_team::{DisjointSlice, Worker};
use super::{CpuBuffer, CpuOperations, Rows, valid_rows};
use crate::engine::EngineError;

/// Phases of the job's shared work.
const PREPARE: usize = 0;
const DOWN: usize = 1;
const PACK: usize = 2;
const UP: usize = 3;

/// What is added to the rows of the next linear layer, kept from step to step.
#[derive(Debug, Default)]
pub(super) struct LoraDelta {
    /// `[rows, width]`, zeros where nothing is added.
    values: Vec<f32>,
    width: usize,
    /// It was computed and not yet added.
    ready: bool,
    /// `A · x`, `[parts, adapted rows, rank]`.
    inner: Vec<f32>,
    packed: PackedActivations,
}

/// A delta to add; of no width where there is none.
#[derive(Debug, Clone, Copy)]
pub(super) struct Added<'a> {
    values: &'a [f32],
    width: usize,
}

impl LoraDelta {
    /// What the next layer adds.
    pub(super) fn take(&mut self) -> Added<'_> {
        let width = if std::mem::take(&mut self.ready) { self.width } else { 0 };
        Added { values: &self.values, width }
    }
}

impl Added<'_> {
    /// Nothing to add.
    pub(super) const NONE: Self = Added { values: &[], width: 0 };

    pub(super) fn is_none(&self) -> bool {
        self.width == 0
    }

    /// Adds to the outputs from `first` on of a row.
    #[inline]
    pub(super) fn add(&self, row: usize, first: usize, out: &mut [f32]) {
        if !self.is_none() {
            let at = row * self.width + first;
            let delta = &self.values[at..at + out.len()];
            out.iter_mut().zip(delta).for_each(|(out, delta)| *out += delta);
        }
    }
}

/// Sizes over all adapters of a step.
#[derive(Debug, Clone, Copy, Default)]
struct Extent {
    parts: usize,
    rank: usize,
    padded: usize,
}

/// Unit `unit` of the panels of all adapters of a step, one adapter after the other.
fn nth_panel<'a>(
    mut unit: usize,
    groups: impl Iterator<Item = (&'a LoraWeights<CpuOperations>, std::ops::Range<usize>)>,
    matrix: fn(&LoraWeights<CpuOperations>) -> &FusedMatrix,
) -> (&'a LoraWeights<CpuOperations>, std::ops::Range<usize>, usize) {
    for (low, rows) in groups {
        let panels = matrix(low).panels();
        if unit < panels {
            return (low, rows, unit);
        }
        unit -= panels;
    }
    unreachable!("a unit below the number of panels")
}

impl LoraOperations for CpuOperations {
    fn supports_lora(&self) -> bool {
        true
    }

    fn lora(
        &mut self,
        rows: &Rows,
        adapters: &[Option<LoraWeights<Self>>],
        width: usize,
        norm: Option<(&Vec<f32>, f32)>,
        input: &CpuBuffer,
    ) -> Result<(), EngineError> {
        let groups =
            || rows.adapters.iter().filter_map(|g| Some((adapters[g.adapter].as_ref()?, g.rows.clone())));
        let mut extent = Extent::default();
        let (mut down_panels, mut up_panels, mut bytes) = (0, 0, 0);
        for (low, _) in groups() {
            let padded = low.b.parts.iter().map(PackedMatrix::padded_columns).max().unwrap_or(0);
            extent.parts = extent.parts.max(low.outputs.len());
            extent.rank = extent.rank.max(low.rank);
            extent.padded = extent.padded.max(padded);
            down_panels += low.a.panels();
            up_panels += low.b.panels();
            bytes += low.a.bytes() + low.b.bytes();
        }
        let Some((first, _)) = groups().next() else { return Ok(()) };
        let (kernels, count, slots) = (self.kernels, rows.len(), rows.adapted.len());
        let outer = self.inputs.writer(Self::input_shape(&first.a, slots));
        let LoraDelta { values, inner, packed, .. } = &mut self.delta;
        // Buffers only grow, so a steady decode finds them there.
        values.resize(values.len().max(count * width), 0.0);
        inner.resize(inner.len().max(extent.parts * slots * extent.rank), 0.0);
        let inner_rows = extent.parts * slots;
        let packed = packed.writer(InputShape {
            precision: first.b.parts[0].format.precision(),
            rows: inner_rows,
            columns: extent.rank,
            padded: extent.padded,
        });
        let values = DisjointSlice::new(values);
        let inner = DisjointSlice::new(inner);
        let norm = norm.map(|(weights, eps)| (weights.as_slice(), eps));
        self.team.run(&|worker: &Worker<'_>| {
            worker.parallel_for(PREPARE, count.max(slots).max(inner_rows), |unit| {
                // SAFETY: members have different units; each buffer has one part per unit. The set is this processor's.
                unsafe {
                    if unit < count {
                        values.part(unit * width..(unit + 1) * width).fill(0.0);
                    }
                    if unit < inner_rows {
                        // An adapter of a smaller rank leaves the rest.
                        inner.part(unit * extent.rank..(unit + 1) * extent.rank).fill(0.0);
                    }
                    if unit < slots {
                        outer.pack(kernels.general, unit, input.row(rows.adapted[unit]), norm);
                    }
                }
            });
            worker.barrier();
            worker.parallel_for(DOWN, down_panels, |unit| {
                let (low, own, panel) = nth_panel(unit, groups(), |low| &low.a);
                let place = low.a.place(panel);
                let valid = valid_rows(&low.a, place);
                let store = |slot: usize, sums: &[f32; LANES]| {
                    let at = (place.part * slots + slot) * extent.rank + place.panel * LANES;
                    // SAFETY: members have different panels.
                    unsafe { inner.part(at..at + valid) }.copy_from_slice(&sums[..valid]);
                };
                // SAFETY: the rows were packed before the barrier, for matrices of this width and precision.
                unsafe { linear::multiply_panel(&kernels, &low.a, panel, &outer, own, store) };
            });
            worker.barrier();
            worker.parallel_for(PACK, inner_rows, |unit| {
                // SAFETY: after the barrier no member writes the sums; members have different rows.
                unsafe {
                    let row = &inner.whole()[unit * extent.rank..(unit + 1) * extent.rank];
                    packed.pack(kernels.general, unit, row, None);
                }
            });
            worker.barrier();
            worker.parallel_for(UP, up_panels, |unit| {
                let (low, own, panel) = nth_panel(unit, groups(), |low| &low.b);
                let place = low.b.place(panel);
                let (valid, first) = (valid_rows(&low.b, place), place.part * slots);
                let store = |row: usize, sums: &[f32; LANES]| {
                    let row = rows.adapted[row - first];
                    let at = row * width + low.outputs[place.part] + place.panel * LANES;
                    // SAFETY: members have different panels.
                    unsafe { values.part(at..at + valid) }.copy_from_slice(&sums[..valid]);
                };
                let own = first + own.start..first + own.end;
                // SAFETY: the rows were packed before the barrier, at least as wide as the matrix and in its precision.
                unsafe { linear::multiply_panel(&kernels, &low.b, panel, &packed, own, store) };
            });
        });
        self.delta.width = width;
        self.delta.ready = true;
        self.moved += bytes as u64;
        Ok(())
    }
}
