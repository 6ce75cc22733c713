//! placeholder
use rand::{RngCore, SeedableRng};
pub fn fill(seed: u64, layer: usize, block: u32, values: bool, out: &mut [f32]) {
    let mut r = rand_chacha::ChaCha8Rng::seed_from_u64(
        seed ^ (layer as u64) << 32 ^ u64::from(block) << 1 ^ u64::from(values),
    );
    for o in out.iter_mut() {
        *o = (r.next_u32() as f32 / 4294967296.0 - 0.5) * 3.4;
    }
}
