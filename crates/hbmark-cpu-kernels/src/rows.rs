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

/// What the values of a row are multiplied with: a weight each and a factor of all. Without a norm there is nothing to multiply.
#[inline(always)]
fn factors<'a>(values: &'a [f32], norm: Option<(&'a [f32], f32)>) -> (&'a [f32], f32) {
    match norm {
        Some((weights, eps)) => (weights, inverse_rms(values, eps)),
        None => (values, 1.0),
    }
}

/// Calls `each` with sixteen normed values at a time, the last ones padded with zeros.
#[inline(always)]
fn in_lanes(values: &[f32], norm: Option<(&[f32], f32)>, mut each: impl FnMut(usize, &[f32; LANES])) {
    let (weights, factor) = factors(values, norm);
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

// One loop and no closure: called from several places it would be left out of line, without the kernel's processor features, and every rounding
// would be a call.
#[inline(always)]
unsafe fn byte_quads<S: Simd>(
    values: &[f32],
    norm: Option<(&[f32], f32)>,
    words: &mut [u32],
    scales: &mut [f32],
    sums: &mut [i32],
) {
    let (weights, factor) = factors(values, norm);
    let (full, rest) = values.as_chunks::<GROUP>();
    let (full_weights, rest_weights) = weights.as_chunks::<GROUP>();
    let (words, _) = words.as_chunks_mut::<{ GROUP / 4 }>();
    let (sums, _) = sums.as_chunks_mut::<2>();
    for (index, scale) in scales.iter_mut().enumerate() {
        // Behind the row zeros, up to the block of the weights.
        let mut group = [0.0f32; GROUP];
        if let (Some(values), Some(weights)) = (full.get(index), full_weights.get(index)) {
            for at in [0, LANES] {
                // SAFETY: sixteen of the group's values each; the features are the caller's promise.
                unsafe {
                    let mut lanes = S::load(values.as_ptr().add(at));
                    if norm.is_some() {
                        lanes = S::mul(S::mul(lanes, S::splat(factor)), S::load(weights.as_ptr().add(at)));
                    }
                    S::store(group.as_mut_ptr().add(at), lanes);
                }
            }
        } else if index == full.len() {
            for ((lane, value), weight) in group.iter_mut().zip(rest).zip(rest_weights) {
                *lane = if norm.is_some() { value * factor * weight } else { *value };
            }
        }
        // Plain loops over whole arrays, each of which becomes a few vector instructions. As integers, magnitudes of floats have the order of the
        // floats, and what is not finite is above the others: it must not vanish in the rounding, so the scale is NaN then.
        let largest = group.iter().fold(0, |most, value| value.abs().to_bits().max(most));
        let step = if largest < f32::INFINITY.to_bits() { f32::from_bits(largest) / 127.0 } else { f32::NAN };
        let inverse = if step > 0.0 { 1.0 / step } else { 0.0 };
        let mut quants = [0i32; GROUP];
        let halves = quants.as_chunks_mut::<LANES>().0.iter_mut().zip(group.as_chunks::<LANES>().0);
        for ((quants, values), sum) in halves.zip(&mut sums[index]) {
            *sum = 0;
            for (quant, value) in quants.iter_mut().zip(values) {
                let rounded = (value * inverse).round_ties_even();
                // A conversion that saturates costs a compare for NaN as well: any bound is as good, the scale is NaN then.
                let bounded = if rounded.abs() <= 127.0 { rounded } else { 127.0f32.copysign(rounded) };
                // SAFETY: within ±127, and a NaN became a bound.
                *quant = unsafe { bounded.to_int_unchecked() };
                // Sixteen of ±127: a check for overflow would keep them from being added as vectors.
                *sum = sum.wrapping_add(*quant);
            }
        }
        #[expect(clippy::cast_possible_truncation, reason = "within ±127 by the choice of the scale")]
        let bytes = quants.map(|quant| (quant as i8).cast_unsigned());
        for (word, quad) in words[index].iter_mut().zip(bytes.as_chunks::<4>().0) {
            *word = u32::from_le_bytes(*quad);
        }
        *scale = step;
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

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "the same operations in the same order")]
mod tests {
    use super::*;
    use crate::simd::InstructionSet;

    /// Words, scales and sums of a row by one set.
    fn quads(
        set: InstructionSet,
        values: &[f32],
        norm: Option<(&[f32], f32)>,
    ) -> (Vec<u32>, Vec<f32>, Vec<i32>) {
        // A group more than the row has, as where the block of the weights is wider.
        let groups = values.len().div_ceil(GROUP) + 1;
        let (mut words, mut scales, mut sums) =
            (vec![u32::MAX; groups * GROUP / 4], vec![f32::NAN; groups], vec![-1; 2 * groups]);
        // SAFETY: the set is available.
        unsafe { pack_quads(set, values, norm, &mut words, &mut scales, &mut sums) };
        (words, scales, sums)
    }

    #[test]
    fn quads_are_the_nearest_of_127_steps_in_every_set_at_every_width() {
        for set in InstructionSet::available() {
            for width in 1..=3 * GROUP {
                let values: Vec<f32> = (0..width).map(|i| (i * 37 % 101) as f32 / 16.0 - 3.0).collect();
                let weights: Vec<f32> = (0..width).map(|i| 0.5 + (i % 5) as f32 / 4.0).collect();
                for norm in [None, Some((&weights[..], 1e-5))] {
                    let row: Vec<f32> = match norm {
                        Some((weights, eps)) => {
                            let factor = inverse_rms(&values, eps);
                            values
                                .iter()
                                .zip(weights)
                                .map(|(value, weight)| value * factor * weight)
                                .collect()
                        }
                        None => values.clone(),
                    };
                    let (words, scales, sums) = quads(set, &values, norm);
                    let bytes: Vec<i8> =
                        words.iter().flat_map(|word| word.to_le_bytes()).map(u8::cast_signed).collect();
                    for (index, bytes) in bytes.as_chunks::<GROUP>().0.iter().enumerate() {
                        let group = row.get(index * GROUP..).unwrap_or_default();
                        let group = &group[..group.len().min(GROUP)];
                        let largest = group.iter().fold(0.0f32, |most, value| most.max(value.abs()));
                        assert_eq!(scales[index], largest / 127.0, "{set:?} {width}");
                        for (byte, value) in bytes.iter().zip(group) {
                            let off = (f32::from(*byte) * scales[index] - value).abs();
                            assert!(off <= 0.5001 * scales[index], "{set:?} {width}: {value} became {byte}");
                        }
                        assert!(
                            bytes[group.len()..].iter().all(|byte| *byte == 0),
                            "{set:?} {width}: padding"
                        );
                        let halves = bytes.as_chunks::<LANES>().0.iter();
                        let expected: Vec<i32> =
                            halves.map(|half| half.iter().copied().map(i32::from).sum()).collect();
                        assert_eq!(sums[2 * index..2 * index + 2], expected, "{set:?} {width}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_group_with_a_value_that_is_not_finite_has_no_scale() {
        for set in InstructionSet::available() {
            for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut values = vec![1.0; 2 * GROUP];
                values[GROUP + 3] = wrong;
                let (_, scales, _) = quads(set, &values, None);
                assert!(scales[0] == 1.0 / 127.0 && scales[1].is_nan(), "{set:?} {wrong}: {scales:?}");
            }
        }
    }
}
