//! The gates of a feed-forward over the panels of a fused matrix.
//!
//! Enters: sums of neighbouring panels of gate and up. Leaves: their products, where they are stored.
#![expect(unsafe_code, reason = "kernels are compiled per instruction set")]

use hbmark_cpu_kernels::elementwise::{clamped_swiglu_times, gelu_times, silu_times};
use hbmark_cpu_kernels::simd::{InstructionSet, LANES};

use super::linear::FusedMatrix;
use super::{bias_of, valid_rows};
use crate::engine::native::shapes::{CLAMPED_SWIGLU_SLOPE, Gate};

/// Stores `gate(gate) ∘ up` of panels from `first` on, as many of gate as of up behind them. `out` lends outputs, so many from a column on; `adapt`
/// changes gate and up from a column on, biases already added, before they meet.
///
/// Sums that nothing changes go through no copy: a vector that is read where it was written in pieces waits for all stores before it.
///
/// # Safety
/// The set is available.
pub(super) unsafe fn store_activated<'o>(
    set: InstructionSet,
    gate: Gate,
    weights: &FusedMatrix,
    first: usize,
    sums: &[[f32; LANES]],
    adapt: Option<&impl Fn(usize, &mut [f32], &mut [f32])>,
    out: impl Fn(usize, usize) -> &'o mut [f32],
) {
    let (gates, ups) = sums.split_at(sums.len() / 2);
    for (i, (gates, ups)) in gates.iter().zip(ups).enumerate() {
        let (of_gate, of_up) = (weights.place(first + i), weights.place(first + sums.len() / 2 + i));
        let column = of_gate.panel * LANES;
        let out = out(column, valid_rows(weights, of_gate));
        let biases = [bias_of(weights, of_gate), bias_of(weights, of_up)];
        if let (Ok(out), [[], []], None) = (<&mut [f32; LANES]>::try_from(&mut *out), biases, adapt) {
            // SAFETY: the caller's promise.
            unsafe { activate(set, gate, gates, ups, out) };
            continue;
        }
        let (mut gates, mut ups, mut products) = (*gates, *ups, [0.0; LANES]);
        for (sums, bias) in [&mut gates, &mut ups].into_iter().zip(biases) {
            sums.iter_mut().zip(bias).for_each(|(sum, bias)| *sum += bias);
        }
        if let Some(adapt) = adapt {
            adapt(column, &mut gates[..out.len()], &mut ups[..out.len()]);
        }
        // SAFETY: the caller's promise.
        unsafe { activate(set, gate, &gates, &ups, &mut products) };
        out.copy_from_slice(&products[..out.len()]);
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
