//! What the oracle computes with: sums and functions of f64.

use half::bf16;

use super::super::operations::ACTIVATION_GROUP;
use super::super::rope::to_f32;
use super::super::shapes::{CLAMPED_SWIGLU_SLOPE, Gate};
use crate::weights::{StoredData, StoredMatrix};

/// An input as it is multiplied with the weights of a matrix.
pub(super) fn as_multiplied(input: &[f32], matrix: &StoredMatrix) -> Vec<f64> {
    match matrix.data {
        StoredData::F32(_) | StoredData::F16(_) => input.iter().map(|&x| x.into()).collect(),
        StoredData::Bf16(_) | StoredData::Fp8 { .. } | StoredData::Mxfp8 { .. } => {
            input.iter().map(|&x| bf16::from_f32(x).to_f32().into()).collect()
        }
        StoredData::Int8 { .. }
        | StoredData::Q8_0 { .. }
        | StoredData::Q4_0 { .. }
        | StoredData::Mxfp4 { .. }
        | StoredData::Nvfp4 { .. }
        | StoredData::Int4 { .. }
        | StoredData::Super { .. } => input.chunks(ACTIVATION_GROUP).flat_map(in_bytes).collect(),
    }
}

/// A group of activations in 8 bits: whole multiples, −127 to 127, of a scale. Both are computed in f32, as in every implementation.
fn in_bytes(group: &[f32]) -> impl Iterator<Item = f64> {
    let scale = group.iter().fold(0.0f32, |largest, x| largest.max(x.abs())) / 127.0;
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    group.iter().map(move |x| f64::from((x * inverse).round_ties_even()) * f64::from(scale))
}

/// Over the shorter of the two. Four sums side by side, since one would make each addition wait for the one before it.
pub(super) fn dot(a: &[f32], b: &[impl Copy + Into<f64>]) -> f64 {
    let length = a.len().min(b.len());
    let ((a, a_rest), (b, b_rest)) = (a[..length].as_chunks::<4>(), b[..length].as_chunks::<4>());
    let mut sums = [0.0; 4];
    for (a, b) in a.iter().zip(b) {
        sums[0] += f64::from(a[0]) * b[0].into();
        sums[1] += f64::from(a[1]) * b[1].into();
        sums[2] += f64::from(a[2]) * b[2].into();
        sums[3] += f64::from(a[3]) * b[3].into();
    }
    let rest: f64 = a_rest.iter().zip(b_rest).map(|(&a, &b)| f64::from(a) * b.into()).sum();
    sums.iter().sum::<f64>() + rest
}

pub(super) fn normed(values: &[f32], weights: &[f32], eps: f32) -> Vec<f32> {
    let rms = (dot(values, values) / values.len() as f64 + f64::from(eps)).sqrt();
    values.iter().zip(weights).map(|(x, w)| to_f32(f64::from(*x) / rms * f64::from(*w))).collect()
}

pub(super) fn softmax(scores: &[f64]) -> Vec<f64> {
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let powers: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.iter().map(|power| power / sum).collect()
}

/// A gate and what goes up.
pub(super) fn gated(gate: Gate, x: f64, up: f64) -> f64 {
    match gate {
        Gate::Silu => x * sigmoid(x) * up,
        Gate::GeluTanh => gelu_tanh(x) * up,
        Gate::ClampedSwiglu { limit } => {
            let limit = f64::from(limit);
            let (x, up) = (if x > limit { limit } else { x }, up.clamp(-limit, limit));
            (up + 1.0) * x * sigmoid(f64::from(CLAMPED_SWIGLU_SLOPE) * x)
        }
    }
}

pub(super) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn gelu_tanh(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh())
}

/// A score or a logit, bent towards a cap where there is one.
pub(super) fn bent(value: f64, softcap: Option<f32>) -> f64 {
    softcap.map_or(value, |cap| f64::from(cap) * (value / f64::from(cap)).tanh())
}

/// The index of the first of the largest.
pub(super) fn first_largest(values: &[f32]) -> u32 {
    let mut best = 0;
    for (index, value) in values.iter().enumerate() {
        if *value > values[best] {
            best = index;
        }
    }
    u32::try_from(best).expect("a vocabulary fits 32 bits")
}
