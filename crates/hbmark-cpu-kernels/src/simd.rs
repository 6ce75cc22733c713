//! A SIMD abstraction of sixteen lanes for the CPU kernels.
//!
//! A kernel is written once, generic over [`Simd`], and compiled for each instruction set inside a function that enables its
//! features (`dispatch!`). A panel of weights has sixteen rows, a tile of the cache sixteen positions, so
//! that a lane is an output and nothing is ever summed across lanes.
//!
//! [`Avx512`](avx512::Avx512) needs the bf16 and VNNI extensions (Zen 4, Cooper Lake, Sapphire Rapids and later),
//! [`Avx512Base`](avx512::Avx512Base) does without them, [`Avx2`](avx2::Avx2) needs FMA and F16C, [`Portable`](portable::Portable)
//! is plain Rust, which the compiler turns into NEON on aarch64. [`InstructionSet::Amx`] is AVX-512 and, for products of bf16, the registers of
//! [`amx`] (Sapphire Rapids and later). They differ in the last bits only: the order and rounding of products of bf16.
#![expect(unsafe_code, reason = "the methods load and store through pointers and need processor features")]

#[cfg(target_arch = "x86_64")]
pub mod amx;
#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512;
pub mod portable;

/// Lanes of a vector: rows of a panel, positions of a tile.
pub const LANES: usize = 16;

/// Sixteen f32, sixteen i32, and 64 bytes read as sixteen small groups.
///
/// # Safety
/// Every method requires the processor features of its implementation; those with pointers require them to be valid for the
/// sixteen elements (or 64 bytes) read or written. No alignment is required.
#[expect(clippy::missing_safety_doc, reason = "stated once, for all methods")]
pub trait Simd: Copy + Send + Sync + 'static {
    /// 16 × f32.
    type Floats: Copy;
    /// 16 × i32.
    type Ints: Copy;
    /// 64 bytes: 16 pairs of bf16, or 16 quads of bytes.
    type Packed: Copy;
    /// Vectors of sums that a loop keeps: about half of the registers.
    const MOST_SUMS: usize;

    unsafe fn zero() -> Self::Floats;
    unsafe fn splat(value: f32) -> Self::Floats;
    unsafe fn load(from: *const f32) -> Self::Floats;
    unsafe fn store(to: *mut f32, value: Self::Floats);
    /// A store past the caches where the set has one. `to` must be aligned to 64 bytes; [`store_fence`] must follow before another thread
    /// reads it.
    unsafe fn store_streaming(to: *mut f32, value: Self::Floats);
    /// Sixteen bf16, widened.
    unsafe fn load_bf16(from: *const u16) -> Self::Floats;
    /// Sixteen f16, widened.
    unsafe fn load_f16(from: *const u16) -> Self::Floats;
    /// Sixteen codes of e4m3, none of them NaN, as a 256th of their values: the f16 that a code is when it is moved up by seven places.
    unsafe fn load_e4m3(from: *const u8) -> Self::Floats;
    /// Sixteen signed bytes, as floats.
    unsafe fn load_i8(from: *const i8) -> Self::Floats;
    unsafe fn add(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    unsafe fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    unsafe fn div(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// The larger of both; b where either is not a number.
    unsafe fn max(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a · b + c`.
    unsafe fn mul_add(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    /// `2^(nearest integer to x)` and x less that integer; x within ±126.
    unsafe fn split_power(x: Self::Floats) -> (Self::Floats, Self::Floats);

    unsafe fn load_packed(from: *const u8) -> Self::Packed;
    /// The same four bytes in every lane.
    unsafe fn splat_packed(value: u32) -> Self::Packed;
    /// Per lane: `a + b` of 32-bit integers, wrapping.
    unsafe fn add_packed(a: Self::Packed, b: Self::Packed) -> Self::Packed;
    /// Per lane: `sum + a₀·b₀ + a₁·b₁` over a pair of bf16.
    unsafe fn dot_pairs(sum: Self::Floats, a: Self::Packed, b: Self::Packed) -> Self::Floats;
    /// Per lane: `sum + Σ a·b` over four bytes, `a` unsigned, `b` signed.
    unsafe fn dot_quads(sum: Self::Ints, a: Self::Packed, b: Self::Packed) -> Self::Ints;
    /// The same where no byte of `a` is above 127, and two neighbours of it times 128 do not exceed 2^15: codes of up to six bits.
    #[inline(always)]
    unsafe fn dot_small_quads(sum: Self::Ints, a: Self::Packed, b: Self::Packed) -> Self::Ints {
        // SAFETY: the trait's contract.
        unsafe { Self::dot_quads(sum, a, b) }
    }
    /// The low half of every byte.
    unsafe fn low_halves(value: Self::Packed) -> Self::Packed;
    /// The high half of every byte.
    unsafe fn high_halves(value: Self::Packed) -> Self::Packed;
    /// Per lane: the 32 bits moved towards the high end.
    unsafe fn shift_left(value: Self::Packed, bits: u32) -> Self::Packed;
    /// Per lane: the 32 bits moved towards the low end.
    unsafe fn shift_right(value: Self::Packed, bits: u32) -> Self::Packed;
    /// Per lane: `value | (bits & mask)`.
    unsafe fn merge(value: Self::Packed, bits: Self::Packed, mask: u32) -> Self::Packed;
    /// For each byte, of which the high half is 0, the byte of a table.
    unsafe fn look_up(table: &[u8; 16], indices: Self::Packed) -> Self::Packed;
    /// Sixteen bytes as powers of two: `2^(byte − 127)`; 0 for 0, whose power is denormal.
    unsafe fn load_powers(from: *const u8) -> Self::Floats;
    /// The first byte of each lane, unsigned.
    unsafe fn low_byte(value: Self::Packed) -> Self::Ints;
    unsafe fn splat_int(value: i32) -> Self::Ints;
    unsafe fn to_floats(value: Self::Ints) -> Self::Floats;
}

/// The address of an element `index · stride` elements on.
///
/// Overflow checks are on in release builds for code that reads files; in an inner loop a check per load costs time, and
/// an offset within an allocation cannot overflow.
#[inline(always)]
pub fn nth<T>(from: *const T, index: usize, stride: usize) -> *const T {
    from.wrapping_add(index.wrapping_mul(stride))
}

/// Prefetches the cache line at an address; any address is allowed. `ONCE`: a line that is read once, and should push no other out of the caches.
#[inline(always)]
pub fn prefetch<const ONCE: bool, T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing, whatever the address, and needs no feature beyond the baseline.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_NTA, _MM_HINT_T0, _mm_prefetch};
        if ONCE {
            _mm_prefetch::<_MM_HINT_NTA>(address.cast());
        } else {
            _mm_prefetch::<_MM_HINT_T0>(address.cast());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Orders streaming stores before all later stores of this thread.
#[inline(always)]
pub fn store_fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a fence has no operands, and SSE belongs to the baseline.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// `e^x` within ±87, and its value there beyond: within 4 units in the last place. What is not a number stays none.
///
/// *Source*: `e^x = 2^n · e^f`, n the integer nearest to x / ln 2 and f = x − n · ln 2, with ln 2 in two parts (Cody and Waite) so that f is
/// right to the last place; `e^f` by its Taylor polynomial to the seventh power, whose remainder is below 2^-27 for f within ±ln 2 / 2.
///
/// # Safety
/// The processor has the features of `S`.
#[inline(always)]
pub unsafe fn exp<S: Simd>(x: S::Floats) -> S::Floats {
    // Below -87 the result is denormal: as good as zero for a softmax.
    const LIMIT: f32 = 87.0;
    // 355/512, whose product with an integer up to 2^7 is exact, and the rest.
    const LN_2_HIGH: f32 = 355.0 / 512.0;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    // 1 / k!
    const POLYNOMIAL: [f32; 8] =
        [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
    // SAFETY: the caller's promise.
    unsafe {
        let negative = |v| S::mul(S::splat(-1.0), v);
        let x = S::max(S::splat(-LIMIT), x);
        let x = negative(S::max(S::splat(-LIMIT), negative(x)));
        let turns = S::mul(x, S::splat(std::f32::consts::LOG2_E));
        let (power, fraction) = S::split_power(turns);
        let minus_whole = S::add(fraction, negative(turns));
        let f = S::mul_add(minus_whole, S::splat(LN_2_HIGH), x);
        let f = S::mul_add(minus_whole, S::splat(LN_2_LOW), f);
        let mut value = S::splat(POLYNOMIAL[0]);
        let mut index = 1;
        while index < POLYNOMIAL.len() {
            value = S::mul_add(value, f, S::splat(POLYNOMIAL[index]));
            index += 1;
        }
        S::mul(value, power)
    }
}

/// `tanh(x)`: within 5 units in the last place. What is not a number stays none.
///
/// *Source*: `tanh(x) = 2t / (1 + t²)` with `t = tanh(x / 2)`, and t by the convergent of Lambert's continued fraction
/// `y / (1 + y² / (3 + y² / (5 + …)))` that ends with 13; beyond ±9 the result is ±1 in f32.
///
/// # Safety
/// The processor has the features of `S`.
#[inline(always)]
pub unsafe fn tanh<S: Simd>(x: S::Floats) -> S::Floats {
    const LIMIT: f32 = 9.0;
    // By descending powers of y², over y and over 1.
    const ABOVE: [f32; 4] = [1.0, 378.0, 17_325.0, 135_135.0];
    const BELOW: [f32; 4] = [28.0, 3_150.0, 62_370.0, 135_135.0];
    let (mut above, mut below) = ([0.0; LANES], [0.0; LANES]);
    // SAFETY: the caller's promise, and sixteen elements each.
    unsafe {
        let x = S::max(S::splat(-LIMIT), x);
        let y = S::mul(S::splat(-0.5), S::max(S::splat(-LIMIT), S::mul(S::splat(-1.0), x)));
        let square = S::mul(y, y);
        // Without a closure, which may be left out of line.
        let (mut over_y, mut over_1) = (S::splat(ABOVE[0]), S::splat(BELOW[0]));
        for (of_y, of_1) in ABOVE[1..].iter().zip(&BELOW[1..]) {
            over_y = S::mul_add(over_y, square, S::splat(*of_y));
            over_1 = S::mul_add(over_1, square, S::splat(*of_1));
        }
        S::store(above.as_mut_ptr(), S::mul(y, over_y));
        S::store(below.as_mut_ptr(), over_1);
    }
    for (value, below) in above.iter_mut().zip(below) {
        let half = *value / below;
        *value = 2.0 * half / (1.0 + half * half);
    }
    // SAFETY: sixteen elements.
    unsafe { S::load(above.as_ptr()) }
}

/// An instruction set that the kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InstructionSet {
    /// What [`Self::Avx512`] has, and AMX.
    Amx,
    /// AVX-512 with its bf16 dot product and VNNI.
    Avx512,
    /// AVX-512 without them.
    Avx512Base,
    Avx2,
    Portable,
}

impl InstructionSet {
    /// All that this processor can run, fastest first.
    pub fn available() -> Vec<Self> {
        [Self::Amx, Self::Avx512, Self::Avx512Base, Self::Avx2, Self::Portable]
            .into_iter()
            .filter(|set| set.is_available())
            .collect()
    }

    /// The fastest that this processor can run.
    pub fn best() -> Self {
        Self::available()[0]
    }

    /// Whether this processor can run it.
    #[cfg(target_arch = "x86_64")]
    pub fn is_available(self) -> bool {
        use std::arch::is_x86_feature_detected as has;
        let base = || has!("avx512f") && has!("avx512bw") && has!("avx512vl") && has!("avx512dq");
        match self {
            Self::Amx => Self::Avx512.is_available() && amx::is_available(),
            Self::Avx512 => base() && has!("avx512bf16") && has!("avx512vnni"),
            Self::Avx512Base => base(),
            Self::Avx2 => has!("avx2") && has!("fma") && has!("f16c"),
            Self::Portable => true,
        }
    }

    /// Whether this processor can run it.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn is_available(self) -> bool {
        self == Self::Portable
    }

    /// Vectors of sums that a loop keeps: about half of the registers.
    #[inline]
    pub fn most_sums(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx | Self::Avx512 => avx512::Avx512::MOST_SUMS,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Base => avx512::Avx512Base::MOST_SUMS,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => avx2::Avx2::MOST_SUMS,
            _ => portable::Portable::MOST_SUMS,
        }
    }

    /// The name by which it is asked for.
    pub fn id(self) -> &'static str {
        match self {
            Self::Amx => "amx",
            Self::Avx512 => "avx512",
            Self::Avx512Base => "avx512-base",
            Self::Avx2 => "avx2",
            Self::Portable => "portable",
        }
    }

    /// The name used in a report.
    pub fn name(self) -> &'static str {
        match self {
            Self::Amx => "avx512 with bf16, vnni and amx",
            Self::Avx512 => "avx512 with bf16 and vnni",
            Self::Avx512Base => "avx512",
            Self::Avx2 => "avx2",
            Self::Portable if cfg!(target_arch = "aarch64") => "neon",
            Self::Portable => "portable",
        }
    }
}

/// Defines a function that runs a generic kernel compiled for the given instruction set.
///
/// `dispatch! { fn name(arg: T, ...) = kernel }` makes `unsafe fn name(set: InstructionSet, arg: T, ...)`, which calls
/// `kernel::<S>(arg, ...)` with the features of `S` enabled. Generics of the kernel go in brackets:
/// `fn name[const P: usize](...)`.
///
/// # Safety
/// Of the defined function: that of the kernel, and the set must be available (a set that is not compiled in runs portably).
macro_rules! dispatch {
    ($(#[$attribute:meta])* $visibility:vis fn $name:ident $([$($generics:tt)*] [$($use:tt)*])? ($($argument:ident : $type:ty),* $(,)?) $(-> $result:ty)? = $kernel:ident) => {
        $(#[$attribute])*
        $visibility unsafe fn $name $(<$($generics)*>)? (
            set: $crate::simd::InstructionSet, $($argument: $type),*
        ) $(-> $result)? {
            use $crate::simd;
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,f16c,fma,avx2")]
            unsafe fn avx512 $(<$($generics)*>)? ($($argument: $type),*) $(-> $result)? {
                // SAFETY: the outer function's contract.
                unsafe { $kernel::<simd::avx512::Avx512 $(, $($use)*)?>($($argument),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c,fma,avx2")]
            unsafe fn avx512_base $(<$($generics)*>)? ($($argument: $type),*) $(-> $result)? {
                // SAFETY: the outer function's contract.
                unsafe { $kernel::<simd::avx512::Avx512Base $(, $($use)*)?>($($argument),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn avx2 $(<$($generics)*>)? ($($argument: $type),*) $(-> $result)? {
                // SAFETY: the outer function's contract.
                unsafe { $kernel::<simd::avx2::Avx2 $(, $($use)*)?>($($argument),*) }
            }
            // SAFETY: the outer function's contract: the set is available.
            unsafe {
                match set {
                    #[cfg(target_arch = "x86_64")]
                    simd::InstructionSet::Amx | simd::InstructionSet::Avx512 => avx512 $(::<$($use)*>)? ($($argument),*),
                    #[cfg(target_arch = "x86_64")]
                    simd::InstructionSet::Avx512Base => avx512_base $(::<$($use)*>)? ($($argument),*),
                    #[cfg(target_arch = "x86_64")]
                    simd::InstructionSet::Avx2 => avx2 $(::<$($use)*>)? ($($argument),*),
                    _ => $kernel::<simd::portable::Portable $(, $($use)*)?>($($argument),*),
                }
            }
        }
    };
}
pub(crate) use dispatch;

/// An array of vectors, each by its index.
///
/// In the place of `std::array::from_fn`, whose closure a compiler may leave out of line: there it has none of the processor features of the
/// function around it, and every intrinsic is a call. `scripts/check_simd.sh` looks for such calls.
macro_rules! each {
    ($blank:expr, |$index:ident| $value:expr) => {{
        let mut all = [$blank; _];
        for ($index, one) in all.iter_mut().enumerate() {
            *one = $value;
        }
        all
    }};
}
pub(crate) use each;

#[cfg(test)]
#[expect(
    clippy::float_cmp,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "small whole numbers, exact in every type here"
)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::e4m3;

    #[inline(always)]
    unsafe fn check<S: Simd>(out: *mut f32) {
        let bf: Vec<u16> = (0..32).map(|i| bf16::from_f32(i as f32 - 7.5).to_bits()).collect();
        let hf: Vec<u16> = (0..16).map(|i| f16::from_f32(0.25 * i as f32).to_bits()).collect();
        let bytes: Vec<u8> = (0..64).map(|i| (i * 5 + 3) as u8).collect();
        let codes: Vec<u8> = (0..16).map(|i| (i * 17 + 1) as u8 & 0xbf).collect();
        // SAFETY: every array is as long as what is read of it; the caller dispatched on an available set.
        unsafe {
            S::store(out, S::load_bf16(bf.as_ptr()));
            S::store(out.add(16), S::load_f16(hf.as_ptr()));
            let pairs = S::load_packed(bf.as_ptr().cast());
            let three = u32::from(bf16::from_f32(3.0).to_bits());
            let minus_two = u32::from(bf16::from_f32(-2.0).to_bits());
            let weights = S::splat_packed(three | minus_two << 16);
            S::store(out.add(32), S::dot_pairs(S::splat(1.0), pairs, weights));
            let quads = S::load_packed(bytes.as_ptr());
            let signed = S::splat_packed(u32::from_le_bytes([1, 0xfe, 127, 0x80]));
            S::store(out.add(48), S::to_floats(S::dot_quads(S::splat_int(9), quads, signed)));
            let (low, high) = (S::low_halves(quads), S::high_halves(quads));
            let ones = S::splat_packed(0x0101_0101);
            let sum = S::dot_small_quads(
                S::dot_small_quads(S::splat_int(0), low, ones),
                high,
                S::splat_packed(0x1010_1010),
            );
            S::store(out.add(64), S::to_floats(sum));
            let x: Vec<f32> = (0..16).map(|i| -0.37 * i as f32 * i as f32).collect();
            S::store(out.add(80), exp::<S>(S::load(x.as_ptr())));
            for index in 0..4 {
                let byte = S::low_byte(S::shift_right(quads, 8 * index));
                S::store(out.add(96 + 16 * index as usize), S::to_floats(byte));
            }
            let moved = S::merge(S::shift_left(quads, 4), S::shift_right(quads, 11), 0x0000_0f0f);
            for index in 0..4 {
                let byte = S::low_byte(S::shift_right(moved, 8 * index));
                S::store(out.add(160 + 16 * index as usize), S::to_floats(byte));
            }
            let x: Vec<f32> = (0..16).map(|i| 0.045 * i as f32 * i as f32 * (-1.0f32).powi(i)).collect();
            S::store(out.add(224), tanh::<S>(S::load(x.as_ptr())));
            S::store(out.add(240), exp::<S>(S::splat(f32::NAN)));
            S::store(out.add(256), tanh::<S>(S::splat(f32::NAN)));
            S::store(out.add(272), S::load_e4m3(codes.as_ptr()));
            S::store(out.add(288), S::load_i8(bytes.as_ptr().cast()));
        }
    }
    dispatch! { fn check_on(out: *mut f32) = check }

    #[test]
    fn every_set_computes_what_its_methods_say() {
        for set in InstructionSet::available() {
            let mut out = [0.0f32; 304];
            // SAFETY: the set is available, and `out` has the nineteen vectors that are written.
            unsafe { check_on(set, out.as_mut_ptr()) };
            for lane in 0..16 {
                let i = lane as f32;
                assert_eq!(out[lane], i - 7.5, "{set:?}");
                assert_eq!(out[16 + lane], 0.25 * i);
                assert_eq!(out[32 + lane], 1.0 + 3.0 * (2.0 * i - 7.5) - 2.0 * (2.0 * i - 6.5), "{set:?}");
                let byte = |k: usize| f32::from(((4 * lane + k) * 5 + 3) as u8);
                assert_eq!(
                    out[48 + lane],
                    9.0 + byte(0) - 2.0 * byte(1) + 127.0 * byte(2) - 128.0 * byte(3),
                    "{set:?}"
                );
                assert_eq!(out[64 + lane], (0..4).map(byte).sum::<f32>(), "{set:?}");
                let exact = f64::from(-0.37f32 * i * i).exp();
                assert!((f64::from(out[80 + lane]) / exact - 1.0).abs() < 4e-7, "{set:?} {lane}");
                let exact = f64::from(0.045 * i * i * (-1.0f32).powf(i)).tanh();
                assert!((f64::from(out[224 + lane]) - exact).abs() <= 3e-7 * exact.abs(), "{set:?} {lane}");
                assert!(out[240 + lane].is_nan() && out[256 + lane].is_nan(), "{set:?}");
                let code = e4m3::to_f32((lane * 17 + 1) as u8 & 0xbf);
                assert_eq!(out[272 + lane] * e4m3::BELOW_F16, code, "{set:?}");
                assert_eq!(out[288 + lane], f32::from(((lane * 5 + 3) as u8).cast_signed()), "{set:?}");
                let word = u32::from_le_bytes(std::array::from_fn(|k| byte(k) as u8));
                let moved = (word << 4 | (word >> 11 & 0x0f0f)).to_le_bytes();
                for index in 0..4 {
                    assert_eq!(out[96 + 16 * index + lane], byte(index), "{set:?}");
                    assert_eq!(out[160 + 16 * index + lane], f32::from(moved[index]), "{set:?}");
                }
            }
        }
    }
}
