//! cuRAND: pseudorandom numbers in device memory.
//!
//! Enters: the library's C calls. Leaves: statuses, and numbers as work of the generator's stream, the same for equal seeds and equal
//! calls. They are not the library's numbers: each is made of its place in the sequence by splitmix64, and pairs become normal by Box and
//! Muller.

use std::f64::consts::TAU;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

use super::handles::Handles;
use crate::clock::Demand;
use crate::launch::mix;
use crate::stream::{self, StreamHandle, Work};

/// `curandStatus_t`.
pub type Status = i32;
pub const SUCCESS: Status = 0;
pub const NOT_INITIALIZED: Status = 101;
pub const TYPE_ERROR: Status = 103;
pub const OUT_OF_RANGE: Status = 104;
pub const LENGTH_NOT_MULTIPLE: Status = 105;
pub const LAUNCH_FAILURE: Status = 201;

#[derive(Debug, Clone, Copy)]
struct Generator {
    stream: usize,
    seed: u64,
    /// Numbers that were drawn since the seed was set.
    drawn: u64,
}

static GENERATORS: Handles<Generator> = Handles::new();

entries! {
    // A pseudorandom generator; quasirandom ones there are none.
    "curandCreateGenerator" create_generator(generator: *mut *mut c_void, kind: c_int) -> Status {
        // curandRngType_t.
        if !matches!(kind, 100 | 101 | 121 | 141 | 142 | 161) {
            return TYPE_ERROR;
        }
        if generator.is_null() {
            return OUT_OF_RANGE;
        }
        *generator = GENERATORS.insert(Generator { stream: 0, seed: 0, drawn: 0 });
        SUCCESS
    }
    "curandDestroyGenerator" destroy_generator(generator: *mut c_void) -> Status {
        if GENERATORS.remove(generator).is_some() { SUCCESS } else { NOT_INITIALIZED }
    }
    "curandSetStream" set_stream(generator: *mut c_void, stream: StreamHandle) -> Status {
        // A stream's handle is only handed on, never followed here.
        let set = |generator: &mut Generator| generator.stream = stream.expose_provenance();
        if GENERATORS.with(generator, set).is_some() { SUCCESS } else { NOT_INITIALIZED }
    }
    "curandSetPseudoRandomGeneratorSeed" set_seed(generator: *mut c_void, seed: u64) -> Status {
        let set = |generator: &mut Generator| (generator.seed, generator.drawn) = (seed, 0);
        if GENERATORS.with(generator, set).is_some() { SUCCESS } else { NOT_INITIALIZED }
    }
    "curandGenerateNormal" generate_normal(generator: *mut c_void, out: *mut f32, numbers: usize, mean: f32, deviation: f32) -> Status {
        if !numbers.is_multiple_of(2) {
            return LENGTH_NOT_MULTIPLE;
        }
        if !out.is_null() && !out.is_aligned() {
            return LAUNCH_FAILURE;
        }
        let next = |generator: &mut Generator| {
            let before = *generator;
            generator.drawn += numbers as u64;
            before
        };
        let Some(Generator { stream, seed, drawn }) = GENERATORS.with(generator, next) else { return NOT_INITIALIZED };
        if numbers == 0 {
            return SUCCESS;
        }
        if out.is_null() {
            return LAUNCH_FAILURE;
        }
        let out = out.expose_provenance();
        let run = move || {
            let out = std::ptr::with_exposed_provenance_mut::<f32>(out);
            for i in 0..numbers {
                let number = f64::from(mean) + f64::from(deviation) * normal(seed, drawn + i as u64);
                out.add(i).write(number as f32);
            }
            Ok(())
        };
        let work = Work::new("curandGenerateNormal", Demand::of_memory(numbers * size_of::<f32>()), Arc::new(run));
        if stream::enqueue(std::ptr::with_exposed_provenance_mut(stream), work) == 0 { SUCCESS } else { LAUNCH_FAILURE }
    }
}

#[must_use]
/// Number `i` of a seed: more than 0, at most 1.
pub fn uniform(seed: u64, i: u64) -> f64 {
    let bits = mix(mix(seed).wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    ((bits >> 11) + 1) as f64 / (1_u64 << 53) as f64
}

/// Number `i` of mean 0 and deviation 1. *Source*: Box and Muller, "A note on the generation of random normal deviates", 1958.
pub fn normal(seed: u64, i: u64) -> f64 {
    let pair = i & !1;
    let (sine, cosine) = (uniform(seed, pair + 1) * TAU).sin_cos();
    (-2.0 * uniform(seed, pair).ln()).sqrt() * if i == pair { cosine } else { sine }
}
