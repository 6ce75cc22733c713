//! How a KV cache keeps a vector of K or V.
//!
//! Enters: a vector, and the dtype of a cache. Leaves: its elements as the cache keeps them. f32, f16 and bf16 are the nearest value; fp8 is the
//! nearest e4m3, at most ±448, with no scale; int8 is whole multiples, −127 to 127, of one f32 scale for each vector of a token and a
//! head, which lies in the block behind K and V. All implementations of the operations keep the same.

use half::{bf16, f16};
use hbmark_cpu_kernels::e4m3;
pub use hbmark_cpu_kernels::element::LARGEST_CODE;
use hbmark_cpu_kernels::element::int8_code;

use super::refuse;
use crate::engine::EngineError;
use hbmark_core::model::Dtype;

/// Checks that a cache can be kept in a dtype.
pub fn check(dtype: Dtype, latent: bool) -> Result<(), EngineError> {
    match dtype {
        Dtype::Fp8 | Dtype::Int8 if latent => {
            refuse(format!("latents in a {dtype} KV cache"), "they are kept in f32, f16 or bf16")
        }
        Dtype::F32 | Dtype::F16 | Dtype::Bf16 | Dtype::Fp8 | Dtype::Int8 => Ok(()),
        _ => refuse(format!("a KV cache in {dtype}"), "it is kept in f32, f16, bf16, fp8 or int8"),
    }
}

/// Bytes of one element.
pub fn element_bytes(dtype: Dtype) -> usize {
    match dtype {
        Dtype::F32 => 4,
        Dtype::Fp8 | Dtype::Int8 => 1,
        _ => 2,
    }
}

/// Bytes of what lies beside each vector of a token and a head.
pub fn scale_bytes(dtype: Dtype) -> usize {
    if dtype == Dtype::Int8 { size_of::<f32>() } else { 0 }
}

/// The scale of a vector in int8.
pub fn scale_of(vector: &[f32]) -> f32 {
    vector.iter().fold(0.0f32, |largest, x| largest.max(x.abs())) / LARGEST_CODE
}

/// What the elements of a vector with a scale are multiplied with to become codes.
pub fn inverse(scale: f32) -> f32 {
    if scale > 0.0 { 1.0 / scale } else { 0.0 }
}

/// The elements of a vector as a cache in a dtype keeps them, in place; `scale` is that of int8.
pub fn keep(vector: &mut [f32], dtype: Dtype, scale: f32) {
    match dtype {
        Dtype::F16 => vector.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32()),
        Dtype::Bf16 => vector.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32()),
        Dtype::Fp8 => vector.iter_mut().for_each(|x| *x = e4m3::to_f32(e4m3::from_f32(*x))),
        Dtype::Int8 => {
            let inverse = inverse(scale);
            for x in vector {
                *x = f32::from(int8_code(*x * inverse)) * scale;
            }
        }
        _ => {}
    }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "values that the formats hold exactly")]
mod tests {
    use super::*;

    #[test]
    fn int8_keeps_the_largest_element_and_is_off_by_half_a_step_at_most() {
        let vector: Vec<f32> = (0..64).map(|i| (i as f32 * 0.7).sin() * 3.0).collect();
        let scale = scale_of(&vector);
        let mut kept = vector.clone();
        keep(&mut kept, Dtype::Int8, scale);
        let largest = vector.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        assert!((kept.iter().fold(0.0f32, |most, x| most.max(x.abs())) - largest).abs() < 1e-6);
        for (kept, x) in kept.iter().zip(&vector) {
            assert!((kept - x).abs() <= 0.5001 * scale, "{kept} of {x}");
        }
        let mut zeros = [0.0; 8];
        keep(&mut zeros, Dtype::Int8, scale_of(&[0.0; 8]));
        assert_eq!(zeros, [0.0; 8]);
    }

    #[test]
    fn fp8_keeps_three_bits_of_mantissa_and_saturates() {
        let mut vector = [1.0, 1.06, 1.07, -1000.0, 0.001];
        keep(&mut vector, Dtype::Fp8, 0.0);
        assert_eq!(vector, [1.0, 1.0, 1.125, -448.0, 2f32.powi(-9)]);
    }

    #[test]
    fn other_dtypes_are_refused_by_name() {
        for dtype in [Dtype::Q8_0, Dtype::Int4, Dtype::Nvfp4, Dtype::Gguf] {
            assert!(check(dtype, false).unwrap_err().to_string().contains(dtype.name()));
        }
        assert!(check(Dtype::Fp8, true).unwrap_err().to_string().contains("latents"));
        assert!(check(Dtype::Bf16, true).is_ok() && check(Dtype::Int8, false).is_ok());
    }
}
