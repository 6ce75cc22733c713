//! The gates of a feed-forward over the panels of a fused matrix.
//!
//! Enters: sums of neighbouring panels of gate and up. Leaves: their products, where they are stored.
#![expect(unsafe_code, reason = "kernels are compiled per instruction set")]

use hbmark_cpu_kernels::elementwise::{clamped_swiglu_times, gelu_times, silu_times};
use hbmark_cpu_kernels::simd::{InstructionSet, LANES};

use super::linear::FusedMatrix;
use super::lora::Added;
use super::thread_team::DisjointSlice;
use super::{bias_of, valid_rows};
use crate::engine::native::shapes::{CLAMPED_SWIGLU_SLOPE, Gate};

/// Where gated sums of a row are stored, and what adapters add before.
pub(super) struct GatedRow<'a> {
    pub out: DisjointSlice<f32>,
    /// Where the row's first column is stored.
    pub at: usize,
    pub added: &'a Added<'a>,
    pub row: usize,
    /// Columns between gate and up in what is added.
    pub width: usize,
}

/// Stores `gate(gate) ∘ up` of panels from `first` on, as many of gate as of up behind them, biases and what adapters add included.
///
/// Sums that nothing changes are not copied: a copy in pieces that is then read whole waits until the pieces are in the cache (store forwarding
/// fails), behind all stores before them.
///
/// # Safety
/// The set is available, and nothing else touches these columns of the row.
pub(super) unsafe fn store_activated(
    set: InstructionSet,
    gate: Gate,
    weights: &FusedMatrix,
    first: usize,
    sums: &[[f32; LANES]],
    row: &GatedRow<'_>,
) {
    let (gates, ups) = sums.split_at(sums.len() / 2);
    for (i, (gates, ups)) in gates.iter().zip(ups).enumerate() {
        let (of_gate, of_up) = (weights.place(first + i), weights.place(first + sums.len() / 2 + i));
        let column = of_gate.panel * LANES;
        let (start, valid) = (row.at + column, valid_rows(weights, of_gate));
        // SAFETY: the caller's promise.
        let out = unsafe { row.out.part(start..start + valid) };
        let biases = [bias_of(weights, of_gate), bias_of(weights, of_up)];
        if let (Some(out), [[], []], true) = (out.first_chunk_mut(), biases, row.added.is_none()) {
            // SAFETY: the caller's promise.
            unsafe { activate(set, gate, gates, ups, out) };
            continue;
        }
        let (mut gates, mut ups, mut products) = (*gates, *ups, [0.0; LANES]);
        for (sums, bias) in [&mut gates, &mut ups].into_iter().zip(biases) {
            sums.iter_mut().zip(bias).for_each(|(sum, bias)| *sum += bias);
        }
        row.added.add(row.row, column, &mut gates[..valid]);
        row.added.add(row.row, row.width + column, &mut ups[..valid]);
        // SAFETY: the caller's promise.
        unsafe { activate(set, gate, &gates, &ups, &mut products) };
        out.copy_from_slice(&products[..valid]);
    }
}

/// One vector of [`store_activated`].
///
/// # Safety
/// The set is available.
unsafe fn activate(
    set: InstructionSet,
    gate: Gate,
    gates: &[f32; LANES],
    ups: &[f32; LANES],
    out: &mut [f32; LANES],
) {
    // SAFETY: the caller's promise.
    unsafe {
        match gate {
            Gate::Silu => silu_times(set, gates, ups, out),
            Gate::GeluTanh => gelu_times(set, gates, ups, out),
            Gate::ClampedSwiglu { limit } => {
                clamped_swiglu_times(set, gates, ups, out, limit, CLAMPED_SWIGLU_SLOPE);
            }
        }
    }
}
