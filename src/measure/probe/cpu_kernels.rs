//! The loops that walk memory, and the few system calls they stand on.
//!
//! Enters: slices of words. Leaves: sums that prove every word was read, and copies and triads equal bit for bit to the
//! plain loops beside them. Also here, because they too are unsafe: a huge-page buffer and the pinning of a thread. Knows
//! nothing of clocks, repetitions or rates.
#![expect(unsafe_code, reason = "SIMD loads and stores through pointers, mmap, and thread affinity")]

use std::io;
use std::ptr::NonNull;

/// An instruction set the kernels are written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InstructionSet {
    Avx512,
    Avx2,
    /// Plain Rust, which the compiler turns into NEON on aarch64.
    Portable,
}

impl InstructionSet {
    /// What this processor can run, widest first.
    #[must_use]
    pub fn available() -> Vec<Self> {
        [Self::Avx512, Self::Avx2, Self::Portable].into_iter().filter(|set| set.is_available()).collect()
    }

    #[cfg(target_arch = "x86_64")]
    fn is_available(self) -> bool {
        match self {
            Self::Avx512 => std::arch::is_x86_feature_detected!("avx512f"),
            Self::Avx2 => std::arch::is_x86_feature_detected!("avx2"),
            Self::Portable => true,
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn is_available(self) -> bool {
        self == Self::Portable
    }

    /// The name used in a report.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Avx512 => "avx512",
            Self::Avx2 => "avx2",
            Self::Portable if cfg!(target_arch = "aarch64") => "neon",
            Self::Portable => "portable",
        }
    }
}

/// How a copy or triad writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stores {
    /// Through the caches: each written line is first read.
    Normal,
    /// Past the caches. Portable code has none and stores normally.
    NonTemporal,
}

/// Sums the bit patterns of all words, wrapping, while walking `streams` (1, 4 or 8; anything else is 1) equal parts in
/// lockstep.
///
/// An integer sum does not depend on its order, so every variant must agree exactly.
#[must_use]
pub fn read(set: InstructionSet, streams: usize, words: &[f64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if set.is_available() {
        // SAFETY: `is_available` has just found the feature that each arm's function is compiled for.
        unsafe {
            match (set, streams) {
                (InstructionSet::Avx512, 8) => return avx512::read::<8, 1>(words),
                (InstructionSet::Avx512, 4) => return avx512::read::<4, 2>(words),
                (InstructionSet::Avx512, _) => return avx512::read::<1, 8>(words),
                (InstructionSet::Avx2, 8) => return avx2::read::<8, 1>(words),
                (InstructionSet::Avx2, 4) => return avx2::read::<4, 2>(words),
                (InstructionSet::Avx2, _) => return avx2::read::<1, 8>(words),
                (InstructionSet::Portable, _) => {}
            }
        }
    }
    let _ = (set, streams);
    portable_read(words)
}

/// Copies `from` into `to` over the length of the shorter.
pub fn copy(set: InstructionSet, stores: Stores, from: &[f64], to: &mut [f64]) {
    #[cfg(target_arch = "x86_64")]
    if set.is_available() {
        // SAFETY: `is_available` has just found the feature that each arm's function is compiled for.
        unsafe {
            match (set, stores) {
                (InstructionSet::Avx512, Stores::Normal) => return avx512::copy::<false>(from, to),
                (InstructionSet::Avx512, Stores::NonTemporal) => return avx512::copy::<true>(from, to),
                (InstructionSet::Avx2, Stores::Normal) => return avx2::copy::<false>(from, to),
                (InstructionSet::Avx2, Stores::NonTemporal) => return avx2::copy::<true>(from, to),
                (InstructionSet::Portable, _) => {}
            }
        }
    }
    let _ = (set, stores);
    let len = from.len().min(to.len());
    to[..len].copy_from_slice(&from[..len]);
}

/// `a = b + scale · c` over the length of the shortest, rounded after the product and after the sum.
pub fn triad(set: InstructionSet, stores: Stores, a: &mut [f64], b: &[f64], c: &[f64], scale: f64) {
    #[cfg(target_arch = "x86_64")]
    if set.is_available() {
        // SAFETY: `is_available` has just found the feature that each arm's function is compiled for.
        unsafe {
            match (set, stores) {
                (InstructionSet::Avx512, Stores::Normal) => return avx512::triad::<false>(a, b, c, scale),
                (InstructionSet::Avx512, Stores::NonTemporal) => {
                    return avx512::triad::<true>(a, b, c, scale);
                }
                (InstructionSet::Avx2, Stores::Normal) => return avx2::triad::<false>(a, b, c, scale),
                (InstructionSet::Avx2, Stores::NonTemporal) => return avx2::triad::<true>(a, b, c, scale),
                (InstructionSet::Portable, _) => {}
            }
        }
    }
    let _ = (set, stores);
    portable_triad(a, b, c, scale);
}

#[inline(never)]
fn portable_read(words: &[f64]) -> u64 {
    let mut sums = [0u64; 16];
    let mut chunks = words.chunks_exact(16);
    for chunk in &mut chunks {
        for (sum, word) in sums.iter_mut().zip(chunk) {
            *sum = sum.wrapping_add(word.to_bits());
        }
    }
    plain_sum(chunks.remainder()).wrapping_add(sums.iter().fold(0, |total, sum| total.wrapping_add(*sum)))
}

#[inline(never)]
fn portable_triad(a: &mut [f64], b: &[f64], c: &[f64], scale: f64) {
    for ((a, b), c) in a.iter_mut().zip(b).zip(c) {
        *a = b + scale * c;
    }
}

fn plain_sum(words: &[f64]) -> u64 {
    words.iter().fold(0, |total, word| total.wrapping_add(word.to_bits()))
}

/// Words before the first 64-byte boundary, where non-temporal stores may begin.
#[cfg(target_arch = "x86_64")]
fn words_to_line(words: &[f64]) -> usize {
    words.as_ptr().align_offset(64).min(words.len())
}

#[cfg(target_arch = "x86_64")]
macro_rules! vector_kernels {
    ($module:ident, $feature:literal, $lanes:literal, $integer:ident, $zero:ident, $add_integer:ident, $load:ident,
     $store:ident, $stream:ident, $splat:ident, $multiply:ident, $add:ident) => {
        mod $module {
            use std::arch::x86_64::*;

            use super::{plain_sum, portable_triad, words_to_line};

            const LANES: usize = $lanes;

            #[inline(never)]
            #[target_feature(enable = $feature)]
            pub fn read<const STREAMS: usize, const PER_STREAM: usize>(words: &[f64]) -> u64 {
                // SAFETY: every pattern of bits is a valid word and a valid vector of integers.
                let (head, vectors, tail) = unsafe { words.align_to::<$integer>() };
                // Loads through slices, not pointers: builds with debug assertions check every pointer, at a third of
                // the bandwidth.
                let (steps, rest) = vectors.as_chunks::<PER_STREAM>();
                let length = steps.len() / STREAMS;
                let streams: [&[[$integer; PER_STREAM]]; STREAMS] =
                    std::array::from_fn(|stream| &steps[stream * length..(stream + 1) * length]);
                let mut sums = [[$zero(); PER_STREAM]; STREAMS];
                for at in 0..length {
                    for stream in 0..STREAMS {
                        let step = &streams[stream][at];
                        for k in 0..PER_STREAM {
                            sums[stream][k] = $add_integer(sums[stream][k], step[k]);
                        }
                    }
                }
                for vector in steps[STREAMS * length..].as_flattened().iter().chain(rest) {
                    sums[0][0] = $add_integer(sums[0][0], *vector);
                }
                // SAFETY: every pattern of bits is a valid word; words need no more alignment than vectors.
                let (_, lanes, _) = unsafe { sums.as_flattened().align_to::<f64>() };
                [head, tail, lanes].iter().fold(0, |total: u64, words| total.wrapping_add(plain_sum(words)))
            }

            #[inline(never)]
            #[target_feature(enable = $feature)]
            pub fn copy<const STREAMING: bool>(from: &[f64], to: &mut [f64]) {
                let len = from.len().min(to.len());
                let head = words_to_line(&to[..len]);
                let step = 4 * LANES;
                let body = head + (len - head) / step * step;
                to[..head].copy_from_slice(&from[..head]);
                let (source, target) = (from.as_ptr(), to.as_mut_ptr());
                let mut at = head;
                while at < body {
                    for k in 0..4 {
                        let i = at + k * LANES;
                        // SAFETY: `i + LANES <= body <= len`, within both slices; `target + head` is on a 64-byte line
                        // and `i - head` a multiple of the vector, so the streaming store is aligned.
                        unsafe {
                            let vector = $load(source.add(i));
                            if STREAMING {
                                $stream(target.add(i), vector)
                            } else {
                                $store(target.add(i), vector)
                            }
                        }
                    }
                    at += step;
                }
                if STREAMING {
                    _mm_sfence();
                }
                to[body..len].copy_from_slice(&from[body..len]);
            }

            #[inline(never)]
            #[target_feature(enable = $feature)]
            pub fn triad<const STREAMING: bool>(a: &mut [f64], b: &[f64], c: &[f64], scale: f64) {
                let len = a.len().min(b.len()).min(c.len());
                let head = words_to_line(&a[..len]);
                let step = 4 * LANES;
                let body = head + (len - head) / step * step;
                portable_triad(&mut a[..head], &b[..head], &c[..head], scale);
                let factor = $splat(scale);
                let target = a.as_mut_ptr();
                let mut at = head;
                while at < body {
                    for k in 0..4 {
                        let i = at + k * LANES;
                        // SAFETY: `i + LANES <= body <= len`, within all three slices; `target + head` is on a 64-byte
                        // line and `i - head` a multiple of the vector, so the streaming store is aligned.
                        unsafe {
                            let product = $multiply($load(c.as_ptr().add(i)), factor);
                            let vector = $add($load(b.as_ptr().add(i)), product);
                            if STREAMING {
                                $stream(target.add(i), vector)
                            } else {
                                $store(target.add(i), vector)
                            }
                        }
                    }
                    at += step;
                }
                if STREAMING {
                    _mm_sfence();
                }
                portable_triad(&mut a[body..len], &b[body..len], &c[body..len], scale);
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
vector_kernels!(
    avx512,
    "avx512f",
    8,
    __m512i,
    _mm512_setzero_si512,
    _mm512_add_epi64,
    _mm512_loadu_pd,
    _mm512_storeu_pd,
    _mm512_stream_pd,
    _mm512_set1_pd,
    _mm512_mul_pd,
    _mm512_add_pd
);
#[cfg(target_arch = "x86_64")]
vector_kernels!(
    avx2,
    "avx2",
    4,
    __m256i,
    _mm256_setzero_si256,
    _mm256_add_epi64,
    _mm256_loadu_pd,
    _mm256_storeu_pd,
    _mm256_stream_pd,
    _mm256_set1_pd,
    _mm256_mul_pd,
    _mm256_add_pd
);

/// Anonymous memory on huge pages where the system grants them, untouched until its first writer. Unmapped on drop.
#[derive(Debug)]
pub struct HugePageBuffer {
    start: NonNull<libc::c_void>,
    mapped: usize,
    skipped: usize,
    words: usize,
}

/// The size of a transparent huge page on x86-64 and (with 4 KiB pages) on aarch64.
const HUGE_PAGE: usize = 2 << 20;

// SAFETY: the buffer owns its mapping, which any thread may use or unmap; it hands out slices by the borrow rules.
unsafe impl Send for HugePageBuffer {}

impl HugePageBuffer {
    /// Maps room for `bytes`, rounded up to a whole huge page and starting on one.
    ///
    /// # Errors
    /// What the system said when it refused the mapping.
    pub fn new(bytes: usize) -> io::Result<Self> {
        let size = bytes
            .max(1)
            .checked_next_multiple_of(HUGE_PAGE)
            .filter(|size| *size < isize::MAX as usize - HUGE_PAGE)
            .ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let mapped = size + HUGE_PAGE;
        // SAFETY: a fresh private anonymous mapping at an address the system picks touches nothing that exists.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapped,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start).ok_or_else(io::Error::last_os_error)?;
        let skipped = start.as_ptr().cast::<u8>().align_offset(HUGE_PAGE);
        let buffer = Self { start, mapped, skipped, words: size / size_of::<f64>() };
        // Advice only: where the system has no huge pages, the probe runs on small ones.
        // SAFETY: the range lies inside the mapping just made.
        unsafe { libc::madvise(buffer.first_word().cast(), size, libc::MADV_HUGEPAGE) };
        Ok(buffer)
    }

    fn first_word(&self) -> *mut f64 {
        self.start.as_ptr().wrapping_byte_add(self.skipped).cast()
    }

    /// All words; zero until written.
    #[must_use]
    pub fn words_mut(&mut self) -> &mut [f64] {
        // SAFETY: `skipped < HUGE_PAGE` and `words * 8 + HUGE_PAGE == mapped`, so the range lies in the mapping, aligned
        // and initialised (to zero) by the system; `&mut self` makes the slice the only one.
        unsafe { std::slice::from_raw_parts_mut(self.first_word(), self.words) }
    }
}

impl Drop for HugePageBuffer {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `new`, unmapped once; no slice outlives the buffer.
        unsafe { libc::munmap(self.start.as_ptr(), self.mapped) };
    }
}

/// The cores the calling thread may run on, by number.
///
/// # Errors
/// What the system said.
pub fn usable_cores() -> io::Result<Vec<usize>> {
    // SAFETY: an all-zero `cpu_set_t` is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the size passed is that of `set`, which outlives the call.
    if unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: every number asked for is below the capacity of the set.
    Ok((0..8 * size_of::<libc::cpu_set_t>()).filter(|core| unsafe { libc::CPU_ISSET(*core, &set) }).collect())
}

/// Pins the calling thread to one core. Only threads of the probe's own call it, and they end with the probe, so no
/// affinity is left behind.
///
/// # Errors
/// What the system said.
pub fn pin_to(core: usize) -> io::Result<()> {
    if core >= 8 * size_of::<libc::cpu_set_t>() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: an all-zero `cpu_set_t` is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `core` was checked against the capacity of the set.
    unsafe { libc::CPU_SET(core, &mut set) };
    // SAFETY: the size passed is that of `set`, which outlives the call.
    if unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// `CLOCK_MONOTONIC_RAW` in nanoseconds: the same crystal as `Instant`, without the slewing of time synchronisation.
///
/// # Errors
/// What the system said.
pub fn raw_clock() -> io::Result<hbmark_core::units::Nanos> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` outlives the call.
    if unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_RAW, &raw mut time) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(hbmark_core::units::Nanos(time.tv_sec as f64 * 1e9 + time.tv_nsec as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ODD_SIZES: [usize; 10] = [0, 1, 7, 8, 63, 64, 65, 127, 1_021, 8_193];

    fn noise(len: usize, seed: u64) -> Vec<f64> {
        (0..len as u64).map(|i| ((i + seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 11) as f64 / 7.0).collect()
    }

    #[test]
    fn every_read_sums_every_word_at_odd_sizes_and_offsets() {
        for len in ODD_SIZES {
            let words = noise(len + 3, 1);
            for offset in 0..3 {
                let words = &words[offset..];
                let wanted = words.iter().fold(0u64, |sum, word| sum.wrapping_add(word.to_bits()));
                for set in InstructionSet::available() {
                    for streams in [1, 4, 8] {
                        assert_eq!(
                            read(set, streams, words),
                            wanted,
                            "{set:?}, {streams} streams, {len} + {offset}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn every_copy_and_triad_equals_the_plain_loop_and_stays_inside() {
        for len in ODD_SIZES {
            let (b, c) = (noise(len, 2), noise(len, 3));
            for set in InstructionSet::available() {
                for stores in [Stores::Normal, Stores::NonTemporal] {
                    for offset in 0..3 {
                        let mut to = vec![-1.0; len + 4];
                        copy(set, stores, &b, &mut to[offset..offset + len]);
                        assert_eq!(&to[offset..offset + len], &b[..], "{set:?} {stores:?} {len}");
                        assert!(
                            to[..offset]
                                .iter()
                                .chain(&to[offset + len..])
                                .all(|word| word.to_bits() == (-1.0f64).to_bits())
                        );
                        triad(set, stores, &mut to[offset..offset + len], &b, &c, 3.0);
                        let wanted: Vec<f64> = b.iter().zip(&c).map(|(b, c)| b + 3.0 * c).collect();
                        assert_eq!(&to[offset..offset + len], &wanted[..], "{set:?} {stores:?} {len}");
                        assert!(
                            to[..offset]
                                .iter()
                                .chain(&to[offset + len..])
                                .all(|word| word.to_bits() == (-1.0f64).to_bits())
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn a_buffer_starts_on_a_huge_page_and_holds_what_was_asked() {
        let mut buffer = HugePageBuffer::new(HUGE_PAGE + 1).unwrap();
        let words = buffer.words_mut();
        assert_eq!(words.as_ptr().align_offset(HUGE_PAGE), 0);
        assert_eq!(words.len() * 8, 2 * HUGE_PAGE);
        words.fill(1.0);
        assert!(HugePageBuffer::new(usize::MAX).is_err());
    }

    #[test]
    fn a_core_beyond_the_set_is_refused() {
        assert!(pin_to(usize::MAX).is_err());
        assert!(!usable_cores().unwrap().is_empty());
    }
}
