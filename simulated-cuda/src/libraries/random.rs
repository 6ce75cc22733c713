//! cuRAND: pseudorandom numbers in device memory.
//!
//! Enters: the library's C calls. Leaves: statuses, and numbers as work of the generator's stream, the same for equal seeds and equal
//! calls. They are not the library's numbers: each is made of its place in the sequence by splitmix64, and pairs become normal by Box and
//! Muller.

use std::f64::consts::TAU;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

use super::handles::Handles;
use crate::calls::count;
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

/// Makes a pseudorandom generator; quasirandom ones there are none.
///
/// # Safety
///
/// Null, or there is room for a handle.
#[unsafe(export_name = "simulated_curandCreateGenerator")]
pub unsafe extern "C" fn create_generator(generator: *mut *mut c_void, kind: c_int) -> Status {
    count!("curandCreateGenerator");
    // curandRngType_t.
    if !matches!(kind, 100 | 101 | 121 | 141 | 142 | 161) {
        return TYPE_ERROR;
    }
    if generator.is_null() {
        return OUT_OF_RANGE;
    }
    // SAFETY: there is room, by the caller's promise.
    unsafe { *generator = GENERATORS.insert(Generator { stream: 0, seed: 0, drawn: 0 }) };
    SUCCESS
}

#[unsafe(export_name = "simulated_curandDestroyGenerator")]
pub extern "C" fn destroy_generator(generator: *mut c_void) -> Status {
    count!("curandDestroyGenerator");
    if GENERATORS.remove(generator).is_some() { SUCCESS } else { NOT_INITIALIZED }
}

#[unsafe(export_name = "simulated_curandSetStream")]
pub extern "C" fn set_stream(generator: *mut c_void, stream: StreamHandle) -> Status {
    count!("curandSetStream");
    // A stream's handle is only handed on, never followed here.
    let set = |generator: &mut Generator| generator.stream = stream.expose_provenance();
    if GENERATORS.with(generator, set).is_some() { SUCCESS } else { NOT_INITIALIZED }
}

#[unsafe(export_name = "simulated_curandSetPseudoRandomGeneratorSeed")]
pub extern "C" fn set_seed(generator: *mut c_void, seed: u64) -> Status {
    count!("curandSetPseudoRandomGeneratorSeed");
    let set = |generator: &mut Generator| (generator.seed, generator.drawn) = (seed, 0);
    if GENERATORS.with(generator, set).is_some() { SUCCESS } else { NOT_INITIALIZED }
}

/// # Safety
///
/// When the stream comes to it, there is room for so many numbers.
#[unsafe(export_name = "simulated_curandGenerateNormal")]
pub unsafe extern "C" fn generate_normal(
    generator: *mut c_void,
    out: *mut f32,
    numbers: usize,
    mean: f32,
    deviation: f32,
) -> Status {
    count!("curandGenerateNormal");
    if !numbers.is_multiple_of(2) {
        return LENGTH_NOT_MULTIPLE;
    }
    let next = |generator: &mut Generator| {
        let before = *generator;
        generator.drawn += numbers as u64;
        before
    };
    if !out.is_null() && !out.is_aligned() {
        return LAUNCH_FAILURE;
    }
    let Some(Generator { stream, seed, drawn }) = GENERATORS.with(generator, next) else {
        return NOT_INITIALIZED;
    };
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
            // SAFETY: there is room for so many, by the promise of the library's callers, and the address is aligned.
            unsafe { out.add(i).write(number as f32) };
        }
        Ok(())
    };
    let demand = Demand::of_memory(numbers * size_of::<f32>());
    let work = Work::new("curandGenerateNormal", demand, Arc::new(run));
    if stream::enqueue(std::ptr::with_exposed_provenance_mut(stream), work) == 0 {
        SUCCESS
    } else {
        LAUNCH_FAILURE
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
