//! AVX2 with FMA and F16C: two registers are sixteen lanes.
#![expect(unsafe_code, reason = "processor intrinsics")]

use std::arch::x86_64::{
    __m256, __m256i, _MM_FROUND_NO_EXC, _MM_FROUND_TO_NEAREST_INT, _mm_and_si128, _mm_loadl_epi64,
    _mm_loadu_si128, _mm_set1_epi16, _mm_setzero_si128, _mm_srai_epi16, _mm_unpacklo_epi8, _mm256_add_epi32,
    _mm256_add_ps, _mm256_and_si256, _mm256_broadcastsi128_si256, _mm256_castsi256_ps, _mm256_cvtepi8_epi32,
    _mm256_cvtepi32_ps, _mm256_cvtepu8_epi32, _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_cvtps_epi32,
    _mm256_div_ps, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_madd_epi16,
    _mm256_maddubs_epi16, _mm256_max_ps, _mm256_mul_ps, _mm256_or_si256, _mm256_round_ps, _mm256_set1_epi8,
    _mm256_set1_epi16, _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_ps, _mm256_shuffle_epi8,
    _mm256_slli_epi16, _mm256_slli_epi32, _mm256_sllv_epi32, _mm256_srai_epi16, _mm256_srli_epi16,
    _mm256_srlv_epi32, _mm256_storeu_ps, _mm256_stream_ps, _mm256_sub_ps,
};

use super::Simd;

/// AVX2, FMA and F16C.
#[derive(Debug, Clone, Copy)]
pub struct Avx2;

#[inline(always)]
fn halves<T: Copy, U>(a: [T; 2], f: impl Fn(T) -> U) -> [U; 2] {
    [f(a[0]), f(a[1])]
}

#[inline(always)]
fn pairs<T: Copy, V: Copy, U>(a: [T; 2], b: [V; 2], f: impl Fn(T, V) -> U) -> [U; 2] {
    [f(a[0], b[0]), f(a[1], b[1])]
}

// SAFETY of every block below: the trait's contract: the features are there and the pointers valid for sixteen elements.
impl Simd for Avx2 {
    type Floats = [__m256; 2];
    type Ints = [__m256i; 2];
    type Packed = [__m256i; 2];
    const MOST_SUMS: usize = 4;

    #[inline(always)]
    unsafe fn zero() -> Self::Floats {
        // SAFETY: above.
        unsafe { [_mm256_setzero_ps(); 2] }
    }
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::Floats {
        // SAFETY: above.
        unsafe { [_mm256_set1_ps(value); 2] }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::Floats {
        // SAFETY: above.
        unsafe { [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))] }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Self::Floats) {
        // SAFETY: above.
        unsafe {
            _mm256_storeu_ps(to, value[0]);
            _mm256_storeu_ps(to.add(8), value[1]);
        }
    }
    #[inline(always)]
    unsafe fn store_streaming(to: *mut f32, value: Self::Floats) {
        // SAFETY: above.
        unsafe {
            _mm256_stream_ps(to, value[0]);
            _mm256_stream_ps(to.add(8), value[1]);
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self::Floats {
        // SAFETY: above.
        unsafe {
            halves([from, from.add(8)], |p| {
                let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
            })
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self::Floats {
        // SAFETY: above.
        unsafe { halves([from, from.add(8)], |p| _mm256_cvtph_ps(_mm_loadu_si128(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_e4m3(from: *const u8) -> Self::Floats {
        // SAFETY: above.
        unsafe {
            halves([from, from.add(8)], |p| {
                let high = _mm_unpacklo_epi8(_mm_setzero_si128(), _mm_loadl_epi64(p.cast()));
                // A shift that keeps the sign, without the copy of it that comes into the highest place of the exponent.
                let moved = _mm_srai_epi16::<1>(high);
                _mm256_cvtph_ps(_mm_and_si128(moved, _mm_set1_epi16(0xbfff_u16.cast_signed())))
            })
        }
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self::Floats {
        // SAFETY: above.
        unsafe {
            halves([from, from.add(8)], |p| {
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast())))
            })
        }
    }
    #[inline(always)]
    unsafe fn add(a: Self::Floats, b: Self::Floats) -> Self::Floats {
        // SAFETY: above.
        pairs(a, b, |a, b| unsafe { _mm256_add_ps(a, b) })
    }
    #[inline(always)]
    unsafe fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats {
        // SAFETY: above.
        pairs(a, b, |a, b| unsafe { _mm256_mul_ps(a, b) })
    }
    #[inline(always)]
    unsafe fn div(a: Self::Floats, b: Self::Floats) -> Self::Floats {
        // SAFETY: above.
        pairs(a, b, |a, b| unsafe { _mm256_div_ps(a, b) })
    }
    #[inline(always)]
    unsafe fn max(a: Self::Floats, b: Self::Floats) -> Self::Floats {
        // SAFETY: above.
        pairs(a, b, |a, b| unsafe { _mm256_max_ps(a, b) })
    }
    #[inline(always)]
    unsafe fn mul_add(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats {
        // SAFETY: above.
        unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }
    #[inline(always)]
    unsafe fn split_power(x: Self::Floats) -> (Self::Floats, Self::Floats) {
        // SAFETY: above.
        unsafe {
            let whole =
                halves(x, |x| _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x));
            let power = halves(whole, |n| {
                let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent))
            });
            (power, pairs(x, whole, |x, n| _mm256_sub_ps(x, n)))
        }
    }
    #[inline(always)]
    unsafe fn load_packed(from: *const u8) -> Self::Packed {
        // SAFETY: above.
        unsafe { [_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(32).cast())] }
    }
    #[inline(always)]
    unsafe fn splat_packed(value: u32) -> Self::Packed {
        // SAFETY: above.
        unsafe { [_mm256_set1_epi32(value.cast_signed()); 2] }
    }
    #[inline(always)]
    unsafe fn add_packed(a: Self::Packed, b: Self::Packed) -> Self::Packed {
        // SAFETY: above.
        unsafe { [_mm256_add_epi32(a[0], b[0]), _mm256_add_epi32(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn dot_pairs(sum: Self::Floats, a: Self::Packed, b: Self::Packed) -> Self::Floats {
        // SAFETY: above.
        unsafe {
            let high = _mm256_set1_epi32(0xffff_0000u32.cast_signed());
            let first = |v| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(v));
            let second = |v| _mm256_castsi256_ps(_mm256_and_si256(v, high));
            let one =
                |sum, a, b| _mm256_fmadd_ps(second(a), second(b), _mm256_fmadd_ps(first(a), first(b), sum));
            [one(sum[0], a[0], b[0]), one(sum[1], a[1], b[1])]
        }
    }
    #[inline(always)]
    unsafe fn dot_quads(sum: Self::Ints, a: Self::Packed, b: Self::Packed) -> Self::Ints {
        // SAFETY: above.
        unsafe {
            let one = |sum, a, b| {
                // Bytes 0 and 2 of each lane, then 1 and 3, as 16-bit pairs: no product can saturate.
                let even_a = _mm256_and_si256(a, _mm256_set1_epi32(0x00ff_00ff));
                let odd_a = _mm256_srli_epi16::<8>(a);
                let even_b = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(b));
                let odd_b = _mm256_srai_epi16::<8>(b);
                let products =
                    _mm256_add_epi32(_mm256_madd_epi16(even_a, even_b), _mm256_madd_epi16(odd_a, odd_b));
                _mm256_add_epi32(sum, products)
            };
            [one(sum[0], a[0], b[0]), one(sum[1], a[1], b[1])]
        }
    }
    #[inline(always)]
    unsafe fn dot_small_quads(sum: Self::Ints, a: Self::Packed, b: Self::Packed) -> Self::Ints {
        // SAFETY: above.
        unsafe {
            let ones = _mm256_set1_epi16(1);
            let first = _mm256_madd_epi16(_mm256_maddubs_epi16(a[0], b[0]), ones);
            let second = _mm256_madd_epi16(_mm256_maddubs_epi16(a[1], b[1]), ones);
            [_mm256_add_epi32(sum[0], first), _mm256_add_epi32(sum[1], second)]
        }
    }
    #[inline(always)]
    unsafe fn low_halves(value: Self::Packed) -> Self::Packed {
        // SAFETY: above.
        halves(value, |v| unsafe { _mm256_and_si256(v, _mm256_set1_epi8(0x0f)) })
    }
    #[inline(always)]
    unsafe fn high_halves(value: Self::Packed) -> Self::Packed {
        // SAFETY: above.
        halves(value, |v| unsafe { _mm256_and_si256(_mm256_srli_epi16::<4>(v), _mm256_set1_epi8(0x0f)) })
    }
    #[inline(always)]
    unsafe fn look_up(table: &[u8; 16], indices: Self::Packed) -> Self::Packed {
        // SAFETY: above.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            halves(indices, |indices| _mm256_shuffle_epi8(table, indices))
        }
    }
    #[inline(always)]
    unsafe fn load_powers(from: *const u8) -> Self::Floats {
        // SAFETY: above.
        unsafe {
            halves([from, from.add(8)], |p| {
                let exponents = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponents))
            })
        }
    }
    #[inline(always)]
    unsafe fn shift_left(value: Self::Packed, bits: u32) -> Self::Packed {
        // SAFETY: above.
        halves(value, |v| unsafe { _mm256_sllv_epi32(v, _mm256_set1_epi32(bits.cast_signed())) })
    }
    #[inline(always)]
    unsafe fn shift_right(value: Self::Packed, bits: u32) -> Self::Packed {
        // SAFETY: above.
        halves(value, |v| unsafe { _mm256_srlv_epi32(v, _mm256_set1_epi32(bits.cast_signed())) })
    }
    #[inline(always)]
    unsafe fn merge(value: Self::Packed, bits: Self::Packed, mask: u32) -> Self::Packed {
        // SAFETY: above.
        pairs(value, bits, |v, bits| unsafe {
            _mm256_or_si256(v, _mm256_and_si256(bits, _mm256_set1_epi32(mask.cast_signed())))
        })
    }
    #[inline(always)]
    unsafe fn low_byte(value: Self::Packed) -> Self::Ints {
        // SAFETY: above.
        halves(value, |v| unsafe { _mm256_and_si256(v, _mm256_set1_epi32(0xff)) })
    }
    #[inline(always)]
    unsafe fn splat_int(value: i32) -> Self::Ints {
        // SAFETY: above.
        unsafe { [_mm256_set1_epi32(value); 2] }
    }
    #[inline(always)]
    unsafe fn to_floats(value: Self::Ints) -> Self::Floats {
        // SAFETY: above.
        halves(value, |v| unsafe { _mm256_cvtepi32_ps(v) })
    }
}
