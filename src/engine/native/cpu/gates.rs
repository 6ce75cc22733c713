//! What is done to sums elementwise: the gates of a feed-forward, and caps.
//!
//! Enters: sums of neighbouring panels of gate and up, or scores and logits. Leaves: their products, or the values bent towards a cap.
#![expect(unsafe_code, reason = "vectors are loaded and stored through pointers")]

use super::linear::FusedMatrix;
use super::simd::{InstructionSet, LANES, Simd, dispatch, exp, tanh};
use super::{bias_of, valid_rows};
use crate::engine::native::operations::{CLAMPED_SWIGLU_SLOPE, Gate};

#[inline(always)]
unsafe fn silu_gated<S: Simd>(gate: &[f32; LANES], up: &[f32; LANES], out: &mut [f32; LANES]) {
    // SAFETY: sixteen elements each; the caller dispatched on an available set.
    unsafe {
        let minus_gate = S::mul(S::load(gate.as_ptr()), S::splat(-1.0));
        S::store(out.as_mut_ptr(), exp::<S>(minus_gate));
    }
    for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
        *out = gate / (1.0 + *out) * up;
    }
}
dispatch! {
    /// `silu(gate) ∘ up`.
    fn silu_times(gate: &[f32; LANES], up: &[f32; LANES], out: &mut [f32; LANES]) = silu_gated
}

#[inline(always)]
unsafe fn gelu_gated<S: Simd>(gate: &[f32; LANES], up: &[f32; LANES], out: &mut [f32; LANES]) {
    // 2 √(2/π), and the share of the cube.
    const SLOPE: f32 = 1.595_769;
    const CUBE: f32 = 0.044_715;
    // SAFETY: sixteen elements each; the caller dispatched on an available set.
    unsafe {
        let x = S::load(gate.as_ptr());
        let minus_slope = S::splat(-SLOPE);
        let slope = S::mul_add(S::mul(minus_slope, S::splat(CUBE)), S::mul(x, x), minus_slope);
        S::store(out.as_mut_ptr(), exp::<S>(S::mul(x, slope)));
    }
    for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
        *out = gate / (1.0 + *out) * up;
    }
}
#[inline(always)]
unsafe fn clamped_swiglu<S: Simd>(
    gate: &[f32; LANES],
    up: &[f32; LANES],
    out: &mut [f32; LANES],
    limit: f32,
) {
    // By comparisons: what is no number stays one.
    let below = |x: f32| if x > limit { limit } else { x };
    let gate = gate.map(below);
    // SAFETY: sixteen elements; the caller dispatched on an available set.
    unsafe {
        let minus_slope = S::splat(-CLAMPED_SWIGLU_SLOPE);
        S::store(out.as_mut_ptr(), exp::<S>(S::mul(S::load(gate.as_ptr()), minus_slope)));
    }
    for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
        let up = below(*up);
        *out = gate / (1.0 + *out) * (if up < -limit { -limit } else { up } + 1.0);
    }
}
dispatch! {
    /// `(up + 1) ∘ gate ∘ sigmoid(1.702 gate)`, both clamped.
    fn clamped_swiglu_times(
        gate: &[f32; LANES],
        up: &[f32; LANES],
        out: &mut [f32; LANES],
        limit: f32,
    ) = clamped_swiglu
}

dispatch! {
    /// `gelu(gate) ∘ up`, by tanh: `(1 + tanh(y)) / 2` is `1 / (1 + e^(−2y))`.
    fn gelu_times(gate: &[f32; LANES], up: &[f32; LANES], out: &mut [f32; LANES]) = gelu_gated
}

#[inline(always)]
unsafe fn bent<S: Simd>(values: &mut [f32], scale: f32, softcap: f32) {
    let (whole, rest) = values.as_chunks_mut::<LANES>();
    let mut last = [0.0; LANES];
    last[..rest.len()].copy_from_slice(rest);
    for chunk in whole.iter_mut().chain(std::iter::once(&mut last)) {
        // SAFETY: sixteen elements; the caller dispatched on an available set.
        unsafe {
            let value = tanh::<S>(S::mul(S::load(chunk.as_ptr()), S::splat(scale)));
            S::store(chunk.as_mut_ptr(), S::mul(value, S::splat(softcap)));
        }
    }
    rest.copy_from_slice(&last[..rest.len()]);
}
dispatch! {
    /// `softcap · tanh(scale · value)`.
    pub(super) fn bend(values: &mut [f32], scale: f32, softcap: f32) = bent
}

/// `gate(gate) ∘ up` of neighbouring panels, which alternate from `first` on: the first column of each pair, its columns, their values. `adapt`
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
    let (pairs, _) = sums.as_chunks::<2>();
    pairs.iter().enumerate().map(move |(i, [gate, up])| {
        let (of_gate, of_up) = (weights.place(first + 2 * i), weights.place(first + 2 * i + 1));
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
                    clamped_swiglu_times(set, &gate, &up, &mut product, limit);
                }
            }
        }
        (column, valid, product)
    })
}
