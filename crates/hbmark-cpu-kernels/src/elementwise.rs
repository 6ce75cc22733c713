//! What is done to sums elementwise: the gates of a feed-forward, and caps.
//!
//! Enters: sixteen sums of gate and of up, or scores and logits. Leaves: their products, or the values bent towards a cap.
#![expect(unsafe_code, reason = "vectors are loaded and stored through pointers")]

use crate::simd::{LANES, Simd, dispatch, exp, tanh};

/// `gate / (1 + e^minus) ∘ up`.
#[inline(always)]
unsafe fn gated<S: Simd>(gate: S::Floats, minus: S::Floats, up: &[f32; LANES], out: &mut [f32; LANES]) {
    // SAFETY: the features are the caller's promise.
    unsafe {
        let gate = S::div(gate, S::add(S::splat(1.0), exp::<S>(minus)));
        S::store(out.as_mut_ptr(), S::mul(gate, S::load(up.as_ptr())));
    }
}

#[inline(always)]
unsafe fn silu_gated<S: Simd>(gate: &[f32; LANES], up: &[f32; LANES], out: &mut [f32; LANES]) {
    // SAFETY: sixteen elements each; the caller dispatched on an available set.
    unsafe {
        let gate = S::load(gate.as_ptr());
        gated::<S>(gate, S::mul(gate, S::splat(-1.0)), up, out);
    }
}
dispatch! {
    /// `silu(gate) ∘ up`.
    ///
    /// # Safety
    /// The set is available.
    pub fn silu_times(gate: &[f32; LANES], up: &[f32; LANES], out: &mut [f32; LANES]) = silu_gated
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
        gated::<S>(x, S::mul(x, slope), up, out);
    }
}

#[inline(always)]
unsafe fn clamped_swiglu<S: Simd>(
    gate: &[f32; LANES],
    up: &[f32; LANES],
    out: &mut [f32; LANES],
    limit: f32,
    slope: f32,
) {
    // By comparisons: what is not a number stays one.
    let below = |x: f32| if x > limit { limit } else { x };
    let gate = gate.map(below);
    // SAFETY: sixteen elements; the caller dispatched on an available set.
    unsafe {
        let minus_slope = S::splat(-slope);
        S::store(out.as_mut_ptr(), exp::<S>(S::mul(S::load(gate.as_ptr()), minus_slope)));
    }
    for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
        let up = below(*up);
        *out = gate / (1.0 + *out) * (if up < -limit { -limit } else { up } + 1.0);
    }
}
dispatch! {
    /// `(up + 1) ∘ gate ∘ sigmoid(slope · gate)`, both clamped.
    ///
    /// # Safety
    /// The set is available.
    pub fn clamped_swiglu_times(
        gate: &[f32; LANES],
        up: &[f32; LANES],
        out: &mut [f32; LANES],
        limit: f32,
        slope: f32,
    ) = clamped_swiglu
}

dispatch! {
    /// `gelu(gate) ∘ up`, by tanh: `(1 + tanh(y)) / 2` is `1 / (1 + e^(−2y))`.
    ///
    /// # Safety
    /// The set is available.
    pub fn gelu_times(gate: &[f32; LANES], up: &[f32; LANES], out: &mut [f32; LANES]) = gelu_gated
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
    ///
    /// # Safety
    /// The set is available.
    pub fn bend(values: &mut [f32], scale: f32, softcap: f32) = bent
}
