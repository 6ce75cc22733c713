//! Rows of activations, normed, rounded and packed for a product.
//!
//! Enters: a row of f32, a norm where the layer has one. Leaves: words of the row, and of quads a scale for each group of columns and a sum for
//! each half of it.
#![expect(
    unsafe_code,
    reason = "kernels are compiled per instruction set, and rows are read through pointers"
)]
#![expect(
    clippy::extra_unused_type_parameters,
    reason = "these kernels are plain loops, compiled once per instruction set"
)]

use crate::simd::{LANES, Simd, dispatch, nth};
use crate::tiles::GROUP;

/// One packed row, as kernels take it.
#[derive(Debug, Clone, Copy)]
pub struct InputRow {
    pub words: *const u32,
    pub scales: *const f32,
    /// Two for a group.
    pub sums: *const i32,
}

impl InputRow {
    /// The sum of the bytes of a group.
    ///
    /// # Safety
    /// The row has such a group.
    #[inline(always)]
    #[must_use]
    pub unsafe fn sum(&self, group: usize) -> i32 {
        let halves = nth(self.sums, group, 2);
        // SAFETY: the caller's promise.
        unsafe { *halves + *halves.add(1) }
    }
}

/// `1 / rms`, from sixteen running sums.
#[inline(always)]
fn inverse_rms(values: &[f32], eps: f32) -> f32 {
    let mut sums = [0.0f32; LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for (sum, value) in sums.iter_mut().zip(chunk) {
            *sum += value * value;
        }
    }
    for (sum, value) in sums.iter_mut().zip(rest) {
        *sum += value * value;
    }
    let mean = sums.iter().sum::<f32>() / values.len() as f32;
    1.0 / (mean + eps).sqrt()
}

/// Calls `each` with sixteen normed values at a time, the last ones padded with zeros.
#[inline(always)]
fn in_lanes(values: &[f32], norm: Option<(&[f32], f32)>, mut each: impl FnMut(usize, &[f32; LANES])) {
    let (weights, factor) = match norm {
        Some((weights, eps)) => (weights, inverse_rms(values, eps)),
        None => (values, 1.0),
    };
    let mut lanes = [0.0f32; LANES];
    for (index, (chunk, weights)) in values.chunks(LANES).zip(weights.chunks(LANES)).enumerate() {
        if chunk.len() < LANES {
            lanes = [0.0; LANES];
        }
        if norm.is_some() {
            for ((lane, value), weight) in lanes.iter_mut().zip(chunk).zip(weights) {
                *lane = value * factor * weight;
            }
        } else {
            lanes[..chunk.len()].copy_from_slice(chunk);
        }
        each(index * LANES, &lanes);
    }
}

#[inline(always)]
unsafe fn floats<S: Simd>(values: &[f32], norm: Option<(&[f32], f32)>, words: &mut [u32]) {
    in_lanes(values, norm, |at, lanes| {
        for (word, value) in words[at..].iter_mut().zip(lanes) {
            *word = value.to_bits();
        }
    });
}
dispatch! {
    /// A row rounded to f32, normed first where a norm is given: `x / rms(x) ∘ norm`, its epsilon beside it.
    ///
    /// # Safety
    /// The set is available.
    pub fn pack_floats(values: &[f32], norm: Option<(&[f32], f32)>, words: &mut [u32]) = floats
}

/// To the nearest bf16, ties to even. Arithmetic makes no NaN that the addition would carry into infinity.
#[inline(always)]
#[must_use]
pub fn bf16_bits(value: f32) -> u32 {
    let bits = value.to_bits();
    bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16
}

#[inline(always)]
unsafe fn bf16_pairs<S: Simd>(values: &[f32], norm: Option<(&[f32], f32)>, words: &mut [u32]) {
    in_lanes(values, norm, |at, lanes| {
        let (pairs, _) = lanes.as_chunks::<2>();
        for (word, [first, second]) in words[at / 2..].iter_mut().zip(pairs) {
            *word = bf16_bits(*first) | bf16_bits(*second) << 16;
        }
    });
}
dispatch! {
    /// A row rounded to pairs of bf16, normed first where a norm is given: `x / rms(x) ∘ norm`, its epsilon beside it.
    ///
    /// # Safety
    /// The set is available.
    pub fn pack_pairs(values: &[f32], norm: Option<(&[f32], f32)>, words: &mut [u32]) = bf16_pairs
}

#[inline(always)]
unsafe fn byte_quads<S: Simd>(
    values: &[f32],
    norm: Option<(&[f32], f32)>,
    words: &mut [u32],
    scales: &mut [f32],
    sums: &mut [i32],
) {
    let mut group = [0.0f32; GROUP];
    let groups = scales.len();
    let mut finish = |index: usize, group: &mut [f32; GROUP]| {
        // Plain loops over whole arrays, each of which becomes a few vector instructions.
        let mut largest = [0.0f32; LANES];
        let mut poison = [0.0f32; LANES];
        for half in group.as_chunks::<LANES>().0 {
            for ((largest, poison), value) in largest.iter_mut().zip(&mut poison).zip(half) {
                *largest = largest.max(value.abs());
                *poison += value * 0.0;
            }
        }
        let scale = largest.iter().fold(0.0f32, |most, v| most.max(*v)) / 127.0;
        let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
        let mut quants = [0i32; GROUP];
        for (quant, value) in quants.iter_mut().zip(&*group) {
            let rounded = (value * inverse).round_ties_even();
            // A conversion that saturates costs a compare for NaN as well: 0 is as good, the scale is NaN then.
            let bounded = if rounded.abs() <= 127.0 { rounded } else { 127.0f32.copysign(rounded) };
            // SAFETY: within ±127, and a NaN became a bound.
            *quant = unsafe { bounded.to_int_unchecked() };
        }
        #[expect(clippy::cast_possible_truncation, reason = "within ±127 by the choice of the scale")]
        let bytes = quants.map(|quant| (quant as i8).cast_unsigned());
        for (word, quad) in words[index * GROUP / 4..].iter_mut().zip(bytes.as_chunks::<4>().0) {
            *word = u32::from_le_bytes(*quad);
        }
        // A value that is not finite must not vanish in the rounding: 0 · x is then NaN.
        scales[index] = scale + poison.iter().sum::<f32>();
        for (sum, half) in sums[2 * index..].iter_mut().zip(quants.as_chunks::<{ GROUP / 2 }>().0) {
            *sum = half.iter().sum();
        }
        *group = [0.0; GROUP];
    };
    let mut open = false;
    in_lanes(values, norm, |at, lanes| {
        let half = at % GROUP;
        group[half..half + LANES].copy_from_slice(lanes);
        open = half == 0;
        if !open {
            finish(at / GROUP, &mut group);
        }
    });
    let mut done = values.len().next_multiple_of(LANES) / GROUP;
    if open {
        finish(done, &mut group);
        done += 1;
    }
    // Padding up to the block of the weights.
    for index in done..groups {
        finish(index, &mut group);
    }
}
dispatch! {
    /// A row rounded to quads of bytes, a scale for each group, normed first where a norm is given: `x / rms(x) ∘ norm`, its epsilon beside it.
    ///
    /// # Safety
    /// The set is available.
    pub fn pack_quads(
        values: &[f32],
        norm: Option<(&[f32], f32)>,
        words: &mut [u32],
        scales: &mut [f32],
        sums: &mut [i32],
    ) = byte_quads
}
