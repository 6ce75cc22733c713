//! The loops that walk memory: read, copy and triad, for each instruction set.
//!
//! Enters: slices of f32. Leaves: sums that prove every element was read, and copies and triads equal bit for bit to the plain
//! loops.
#![expect(unsafe_code, reason = "SIMD loads and stores through pointers")]

use crate::simd::{InstructionSet, LANES, Simd, dispatch, nth, prefetch, store_fence};

/// How a read walks memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Walk {
    /// Equal parts that are walked in lockstep: 1, 4 or 8; anything else is 1.
    pub streams: usize,
    pub prefetch: Prefetch,
}

/// What a read asks for ahead of itself. The portable set leaves that to the processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prefetch {
    Hardware,
    /// 512 bytes ahead.
    Near,
    /// 2 KiB ahead.
    Far,
    /// 2 KiB ahead, as lines that are read once.
    FarOnce,
}

impl Walk {
    /// Every walk that is worth a trial on vectors.
    pub const ALL: [Self; 12] = {
        let (streams, ahead) =
            ([1, 4, 8], [Prefetch::Hardware, Prefetch::Near, Prefetch::Far, Prefetch::FarOnce]);
        let mut all = [Self { streams: 1, prefetch: Prefetch::Hardware }; 12];
        let mut at = 0;
        while at < all.len() {
            all[at] = Self { streams: streams[at % 3], prefetch: ahead[at / 3] };
            at += 1;
        }
        all
    };

    /// One stream, and no more than the processor prefetches.
    pub const PLAIN: Self = Self::ALL[0];
}

impl std::fmt::Display for Walk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let plural = if self.streams == 1 { "" } else { "s" };
        write!(f, "{} stream{plural}", self.streams)?;
        match self.prefetch {
            Prefetch::Hardware => Ok(()),
            Prefetch::Near => f.write_str(", prefetch 512 B ahead"),
            Prefetch::Far => f.write_str(", prefetch 2 KiB ahead"),
            Prefetch::FarOnce => f.write_str(", non-temporal prefetch 2 KiB ahead"),
        }
    }
}

/// How a copy or triad writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stores {
    /// Through the caches: each written line is first read.
    Normal,
    /// Past the caches. The portable set has none and stores normally.
    NonTemporal,
}

/// Takes bytes out of all caches, where the processor has an instruction for it.
pub fn flush(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: lines are the slice's, a fence has no operands, and both instructions belong to the baseline.
    unsafe {
        use std::arch::x86_64::{_mm_clflush, _mm_mfence};
        for line in bytes.chunks(crate::tiles::LINE) {
            _mm_clflush(line.as_ptr());
        }
        _mm_mfence();
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
}

/// Sums the bit patterns of all elements, wrapping.
///
/// An integer sum does not depend on its order, so every variant must agree exactly.
///
/// # Panics
/// When this processor does not have the set.
pub fn read(set: InstructionSet, walk: Walk, values: &[f32]) -> u32 {
    // In vectors of a line each.
    const NEAR: usize = 8;
    const FAR: usize = 32;
    assert!(set.is_available(), "an instruction set of this processor");
    // SAFETY: the set is available.
    unsafe {
        match (set, walk.prefetch) {
            // As many sums as fit its registers.
            (InstructionSet::Portable, _) => sum_on::<1, 2, 0, false>(set, values),
            (_, Prefetch::Hardware) => sum_by::<0, false>(set, walk.streams, values),
            (_, Prefetch::Near) => sum_by::<NEAR, false>(set, walk.streams, values),
            (_, Prefetch::Far) => sum_by::<FAR, false>(set, walk.streams, values),
            (_, Prefetch::FarOnce) => sum_by::<FAR, true>(set, walk.streams, values),
        }
    }
}

/// # Safety
/// The processor has the set.
unsafe fn sum_by<const AHEAD: usize, const ONCE: bool>(
    set: InstructionSet,
    streams: usize,
    values: &[f32],
) -> u32 {
    // SAFETY: the caller's promise.
    unsafe {
        match streams {
            8 => sum_on::<8, 1, AHEAD, ONCE>(set, values),
            4 => sum_on::<4, 2, AHEAD, ONCE>(set, values),
            _ => sum_on::<1, 8, AHEAD, ONCE>(set, values),
        }
    }
}

/// Copies `from` into `to` over the length of the shorter.
///
/// # Panics
/// When this processor does not have the set.
pub fn copy(set: InstructionSet, stores: Stores, from: &[f32], to: &mut [f32]) {
    assert!(set.is_available(), "an instruction set of this processor");
    // SAFETY: the set is available.
    unsafe {
        match stores {
            Stores::Normal => copy_on::<false>(set, from, to),
            Stores::NonTemporal => copy_on::<true>(set, from, to),
        }
    }
}

/// `a = b + scale · c` over the length of the shortest, rounded after the product and after the sum.
///
/// # Panics
/// When this processor does not have the set.
pub fn triad(set: InstructionSet, stores: Stores, a: &mut [f32], b: &[f32], c: &[f32], scale: f32) {
    assert!(set.is_available(), "an instruction set of this processor");
    // SAFETY: the set is available.
    unsafe {
        match stores {
            Stores::Normal => triad_on::<false>(set, a, b, c, scale),
            Stores::NonTemporal => triad_on::<true>(set, a, b, c, scale),
        }
    }
}

fn plain_sum(values: &[f32]) -> u32 {
    values.iter().fold(0, |total, value| total.wrapping_add(value.to_bits()))
}

/// # Safety
/// The processor has the features of `S`.
#[inline(always)]
unsafe fn sum<
    S: Simd,
    const STREAMS: usize,
    const PER_STREAM: usize,
    const AHEAD: usize,
    const ONCE: bool,
>(
    values: &[f32],
) -> u32 {
    // SAFETY: every pattern of bits is a valid element and a valid vector of integers.
    let (head, vectors, tail) = unsafe { values.align_to::<S::Packed>() };
    // Loads through slices, not pointers: builds with debug assertions check every pointer, at a third of the bandwidth.
    let (steps, rest) = vectors.as_chunks::<PER_STREAM>();
    let length = steps.len() / STREAMS;
    let streams: [&[[S::Packed; PER_STREAM]]; STREAMS] =
        std::array::from_fn(|stream| &steps[stream * length..(stream + 1) * length]);
    // SAFETY: the caller's promise.
    let mut sums = [[unsafe { S::splat_packed(0) }; PER_STREAM]; STREAMS];
    #[expect(clippy::needless_range_loop, reason = "several streams advance together")]
    for at in 0..length {
        for stream in 0..STREAMS {
            let step = &streams[stream][at];
            for k in 0..PER_STREAM {
                let ahead = nth(&raw const step[k], AHEAD, 1);
                if AHEAD > 0 {
                    prefetch::<ONCE, _>(ahead);
                }
                // SAFETY: the caller's promise.
                sums[stream][k] = unsafe { S::add_packed(sums[stream][k], step[k]) };
            }
        }
    }
    for vector in steps[STREAMS * length..].as_flattened().iter().chain(rest) {
        // SAFETY: the caller's promise.
        sums[0][0] = unsafe { S::add_packed(sums[0][0], *vector) };
    }
    // SAFETY: every pattern of bits is a valid element, which needs no more alignment than vectors.
    let (_, lanes, _) = unsafe { sums.as_flattened().align_to::<f32>() };
    [head, tail, lanes].iter().fold(0, |total: u32, values| total.wrapping_add(plain_sum(values)))
}
dispatch! {
    fn sum_on[const STREAMS: usize, const PER_STREAM: usize, const AHEAD: usize, const ONCE: bool][STREAMS, PER_STREAM, AHEAD, ONCE](values: &[f32]) -> u32 = sum
}

/// Fills `out` by vectors of `vector(first)`, and by `plain(index)` before the first line and behind the last step.
///
/// # Safety
/// The processor has the features of `S`, and `vector` can be called for sixteen elements within `out`.
#[inline(always)]
unsafe fn fill<S: Simd, const STREAMING: bool>(
    out: &mut [f32],
    vector: impl Fn(usize) -> S::Floats,
    plain: impl Fn(usize) -> f32,
) {
    const STEP: usize = 4 * LANES;
    // Streaming stores begin on a cache line.
    let head = out.as_ptr().align_offset(64).min(out.len());
    let body = head + (out.len() - head) / STEP * STEP;
    for at in (head..body).step_by(STEP) {
        for first in [at, at + LANES, at + 2 * LANES, at + 3 * LANES] {
            let to = out.as_mut_ptr().wrapping_add(first);
            // SAFETY: `first + LANES <= body <= out.len()`, and `to` is on a line: `first - head` is a multiple of sixteen.
            unsafe {
                if STREAMING {
                    S::store_streaming(to, vector(first));
                } else {
                    S::store(to, vector(first));
                }
            }
        }
    }
    if STREAMING {
        store_fence();
    }
    for index in (0..head).chain(body..out.len()) {
        out[index] = plain(index);
    }
}

/// # Safety
/// The processor has the features of `S`.
#[inline(always)]
unsafe fn copy_kernel<S: Simd, const STREAMING: bool>(from: &[f32], to: &mut [f32]) {
    let len = from.len().min(to.len());
    let source = from.as_ptr();
    // SAFETY: `fill` asks for sixteen elements below `len`, which both slices have.
    unsafe {
        fill::<S, STREAMING>(
            &mut to[..len],
            |first| S::load(source.wrapping_add(first)),
            |index| from[index],
        );
    }
}
dispatch! { fn copy_on[const STREAMING: bool][STREAMING](from: &[f32], to: &mut [f32]) = copy_kernel }

/// # Safety
/// The processor has the features of `S`.
#[inline(always)]
unsafe fn triad_kernel<S: Simd, const STREAMING: bool>(a: &mut [f32], b: &[f32], c: &[f32], scale: f32) {
    let len = a.len().min(b.len()).min(c.len());
    let (b_start, c_start) = (b.as_ptr(), c.as_ptr());
    // SAFETY: `fill` asks for sixteen elements below `len`, which all three slices have.
    unsafe {
        let factor = S::splat(scale);
        fill::<S, STREAMING>(
            &mut a[..len],
            |first| {
                let product = S::mul(S::load(c_start.wrapping_add(first)), factor);
                S::add(S::load(b_start.wrapping_add(first)), product)
            },
            |index| b[index] + scale * c[index],
        );
    }
}
dispatch! {
    fn triad_on[const STREAMING: bool][STREAMING](a: &mut [f32], b: &[f32], c: &[f32], scale: f32) = triad_kernel
}

#[cfg(test)]
mod tests {
    use super::*;

    const ODD_SIZES: [usize; 10] = [0, 1, 7, 8, 63, 64, 65, 127, 1_021, 8_193];

    fn noise(len: usize, seed: u32) -> Vec<f32> {
        (seed..).take(len).map(|i| i.wrapping_mul(0x9E37_79B9) as f32 / 7.0).collect()
    }

    #[test]
    fn every_read_sums_every_element_at_odd_sizes_and_offsets() {
        for len in ODD_SIZES {
            let values = noise(len + 3, 1);
            for offset in 0..3 {
                let values = &values[offset..];
                for set in InstructionSet::available() {
                    for walk in Walk::ALL {
                        let found = read(set, walk, values);
                        assert_eq!(found, plain_sum(values), "{set:?}, {walk}, {len} + {offset}");
                    }
                }
            }
        }
    }

    #[test]
    fn every_copy_and_triad_equals_the_plain_loop_and_stays_inside() {
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        for len in ODD_SIZES {
            let (b, c) = (noise(len, 2), noise(len, 3));
            let summed: Vec<f32> = b.iter().zip(&c).map(|(b, c)| b + 3.0 * c).collect();
            for set in InstructionSet::available() {
                for stores in [Stores::Normal, Stores::NonTemporal] {
                    for offset in 0..3 {
                        let mut to = vec![-1.0; len + 4];
                        copy(set, stores, &b, &mut to[offset..offset + len]);
                        assert_eq!(bits(&to[offset..offset + len]), bits(&b), "{set:?} {stores:?} {len}");
                        triad(set, stores, &mut to[offset..offset + len], &b, &c, 3.0);
                        assert_eq!(
                            bits(&to[offset..offset + len]),
                            bits(&summed),
                            "{set:?} {stores:?} {len}"
                        );
                        to.drain(offset..offset + len);
                        assert_eq!(bits(&to), bits(&[-1.0; 4]), "{set:?} {stores:?} {len}");
                    }
                }
            }
        }
    }
}
