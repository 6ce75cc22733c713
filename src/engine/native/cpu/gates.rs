//! The gates of a feed-forward over the panels of a fused matrix.
//!
//! Enters: sums of neighbouring panels of gate and up. Leaves: their products.
#![expect(unsafe_code, reason = "kernels are compiled per instruction set")]

use hbmark_cpu_kernels::elementwise::{clamped_swiglu_times, gelu_times, silu_times};
use hbmark_cpu_kernels::simd::{InstructionSet, LANES};

use super::linear::FusedMatrix;
use super::{bias_of, valid_rows};
use crate::engine::native::shapes::{CLAMPED_SWIGLU_SLOPE, Gate};

/// `gate(gate) ∘ up` of panels from `first` on, as many of gate as of up behind them: the first column of each, its columns, their values. `adapt`
/// changes gate and up, biases already added, before they meet.
///
/// # Safety
/// The set is available.
pub(super) unsafe fn activated(
    set: InstructionSet,
    gate: Gate,
    weights: &FusedMatrix,
    first: usize,
    sums: &[[f32; LANES]],
    adapt: impl Fn(usize, &mut [f32], &mut [f32]),
) -> impl Iterator<Item = (usize, usize, [f32; LANES])> {
    let function = gate;
    let (gates, ups) = sums.split_at(sums.len() / 2);
    gates.iter().zip(ups).enumerate().map(move |(i, (gate, up))| {
        let (of_gate, of_up) = (weights.place(first + i), weights.place(first + gates.len() + i));
        let (mut gate, mut up, mut product) = (*gate, *up, [0.0; LANES]);
        gate.iter_mut().zip(bias_of(weights, of_gate)).for_each(|(g, bias)| *g += bias);
        up.iter_mut().zip(bias_of(weights, of_up)).for_each(|(u, bias)| *u += bias);
        let valid = valid_rows(weights, of_gate);
        let column = of_gate.panel * LANES;
        adapt(column, &mut gate[..valid], &mut up[..valid]);
        // SAFETY: the caller's promise.
        unsafe {
            match function {
                Gate::Silu => silu_times(set, &gate, &up, &mut product),
                Gate::GeluTanh => gelu_times(set, &gate, &up, &mut product),
                Gate::ClampedSwiglu { limit } => {
                    clamped_swiglu_times(set, &gate, &up, &mut product, limit, CLAMPED_SWIGLU_SLOPE);
                }
            }
        }
        (column, valid, product)
    })
}
