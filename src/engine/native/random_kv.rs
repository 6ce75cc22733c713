//! K and V from a seed: what a cache of any depth holds before anything was computed.
//!
//! Enters: a seed and the place of a block in its sequence. Leaves: its elements, N(0, 1), and never zeros, because zeros draw less power. They
//! depend on nothing else, so every implementation of the operations can make the same cache. Nothing here knows
//! how a pool lies in memory.

use std::sync::LazyLock;

use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::kv_format;
use crate::weights::synthetic::standard_quantile;

/// Draws taken from the generator together: 4 KiB stay in the first cache.
const DRAWS_AT_ONCE: usize = 2_048;

/// Separates these streams from other uses of the generator with the same seed.
const DOMAIN: &[u8; 11] = b"hbmark kv 1";

/// The standard normal distribution as 65,536 equally likely values: a draw is one look-up.
static QUANTILES: LazyLock<Vec<f32>> = LazyLock::new(|| (0..=u16::MAX).map(standard_quantile).collect());

/// Computed once: fills of many blocks ask for it.
static INT8_SCALE: LazyLock<f32> = LazyLock::new(|| kv_format::scale_of(&QUANTILES));

/// The value of every 16 random bits, for devices that draw themselves.
pub fn quantiles() -> &'static [f32] {
    &QUANTILES
}

/// The scale of every vector where such a cache is kept in int8: that of the largest value.
pub fn int8_scale() -> f32 {
    *INT8_SCALE
}

/// Fills the K (or, with `values`, the V) of the sequence's n-th block in one layer.
///
/// *Shapes*: `out: [kv_heads, block_size, head_dim]`.
///
/// # Panics
/// Beyond 2^32 blocks, for which there is no memory.
pub fn fill(seed: u64, layer: usize, number: usize, values: bool, out: &mut [f32]) {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(&(layer as u64).to_le_bytes());
    let number = u32::try_from(number).expect("memory ends before 2^32 blocks");
    key[16..20].copy_from_slice(&number.to_le_bytes());
    key[20] = u8::from(values);
    // `kernels/fill_kv.cu` has the same key and the same draws.
    key[21..].copy_from_slice(DOMAIN);
    let mut generator = ChaCha8Rng::from_seed(key);
    let quantiles = &**QUANTILES;
    let mut bytes = [0; DRAWS_AT_ONCE * 2];
    for out in out.chunks_mut(DRAWS_AT_ONCE) {
        let bytes = &mut bytes[..2 * out.len()];
        generator.fill_bytes(bytes);
        let (draws, _) = bytes.as_chunks::<2>();
        for (out, draw) in out.iter_mut().zip(draws) {
            *out = quantiles[usize::from(u16::from_le_bytes(*draw))];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(seed: u64, layer: usize, block: usize, values: bool) -> Vec<f32> {
        let mut out = vec![0.0; 5_000];
        fill(seed, layer, block, values, &mut out);
        out
    }

    #[test]
    fn a_block_depends_on_its_place_and_seed_and_on_nothing_else() {
        let one = filled(1, 2, 3, false);
        assert_eq!(one, filled(1, 2, 3, false));
        for other in
            [filled(2, 2, 3, false), filled(1, 3, 3, false), filled(1, 2, 4, false), filled(1, 2, 3, true)]
        {
            assert_ne!(one[..64], other[..64]);
        }
        let mut shorter = vec![0.0; 2_049];
        fill(1, 2, 3, false, &mut shorter);
        assert_eq!(one[..2_049], shorter);
    }

    #[test]
    fn elements_are_standard_normal_and_never_zero() {
        let values = filled(9, 0, 0, true);
        let count = values.len() as f64;
        let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / count;
        let variance = values.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / count;
        assert!(mean.abs() < 5.0 / count.sqrt(), "{mean}");
        assert!((variance - 1.0).abs() < 0.1, "{variance}");
        assert!(values.iter().all(|v| *v != 0.0 && v.abs() < 5.0));
    }
}
