//! AVX-512: one register is sixteen lanes.
#![expect(unsafe_code, reason = "processor intrinsics")]

use std::arch::x86_64::{
    __m256i, __m512, __m512bh, __m512i, _MM_FROUND_NO_EXC, _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128,
    _mm256_and_si256, _mm256_cvtepu8_epi16, _mm256_loadu_si256, _mm256_set1_epi16, _mm256_slli_epi16,
    _mm256_srai_epi16, _mm512_add_epi32, _mm512_add_ps, _mm512_and_si512, _mm512_broadcast_i32x4,
    _mm512_castsi512_ps, _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps, _mm512_cvtepu8_epi32,
    _mm512_cvtepu16_epi32, _mm512_cvtph_ps, _mm512_div_ps, _mm512_dpbf16_ps, _mm512_dpbusd_epi32,
    _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_madd_epi16, _mm512_max_ps, _mm512_mul_ps,
    _mm512_or_si512, _mm512_roundscale_ps, _mm512_scalef_ps, _mm512_set1_epi8, _mm512_set1_epi32,
    _mm512_set1_ps, _mm512_setzero_ps, _mm512_shuffle_epi8, _mm512_slli_epi32, _mm512_sllv_epi32,
    _mm512_srai_epi16, _mm512_srli_epi16, _mm512_srlv_epi32, _mm512_storeu_ps, _mm512_stream_ps,
    _mm512_sub_ps,
};

use super::Simd;

/// AVX-512 F, BW, VL, DQ with bf16 and VNNI.
#[derive(Debug, Clone, Copy)]
pub struct Avx512;

/// AVX-512 F, BW, VL, DQ.
#[derive(Debug, Clone, Copy)]
pub struct Avx512Base;

macro_rules! shared_by_both {
    () => {
        type Floats = __m512;
        type Ints = __m512i;
        type Packed = __m512i;
        const MOST_SUMS: usize = 16;

        #[inline(always)]
        unsafe fn zero() -> __m512 {
            // SAFETY: the trait's contract.
            unsafe { _mm512_setzero_ps() }
        }
        #[inline(always)]
        unsafe fn splat(value: f32) -> __m512 {
            // SAFETY: the trait's contract.
            unsafe { _mm512_set1_ps(value) }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> __m512 {
            // SAFETY: the trait's contract.
            unsafe { _mm512_loadu_ps(from) }
        }
        #[inline(always)]
        unsafe fn store(to: *mut f32, value: __m512) {
            // SAFETY: the trait's contract.
            unsafe { _mm512_storeu_ps(to, value) }
        }
        #[inline(always)]
        unsafe fn store_streaming(to: *mut f32, value: __m512) {
            // SAFETY: the trait's contract.
            unsafe { _mm512_stream_ps(to, value) }
        }
        #[inline(always)]
        unsafe fn load_bf16(from: *const u16) -> __m512 {
            // SAFETY: the trait's contract.
            unsafe {
                let bits: __m256i = _mm256_loadu_si256(from.cast());
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
            }
        }
        #[inline(always)]
        unsafe fn load_f16(from: *const u16) -> __m512 {
            // SAFETY: the trait's contract.
            unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
        }
        #[inline(always)]
        unsafe fn load_e4m3(from: *const u8) -> __m512 {
            // SAFETY: the trait's contract.
            unsafe {
                let high = _mm256_slli_epi16::<8>(_mm256_cvtepu8_epi16(_mm_loadu_si128(from.cast())));
                // A shift that keeps the sign, without the copy of it that comes into the highest place of the exponent.
                let moved = _mm256_srai_epi16::<1>(high);
                _mm512_cvtph_ps(_mm256_and_si256(moved, _mm256_set1_epi16(0xbfff_u16.cast_signed())))
            }
        }
        #[inline(always)]
        unsafe fn load_i8(from: *const i8) -> __m512 {
            // SAFETY: the trait's contract.
            unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) }
        }
        #[inline(always)]
        unsafe fn add(a: __m512, b: __m512) -> __m512 {
            // SAFETY: the trait's contract.
            unsafe { _mm512_add_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn mul(a: __m512, b: __m512) -> __m512 {
            // SAFETY: the trait's contract.
            unsafe { _mm512_mul_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn div(a: __m512, b: __m512) -> __m512 {
            // SAFETY: the trait's contract.
            unsafe { _mm512_div_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn max(a: __m512, b: __m512) -> __m512 {
            // SAFETY: the trait's contract.
            unsafe { _mm512_max_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512 {
            // SAFETY: the trait's contract.
            unsafe { _mm512_fmadd_ps(a, b, c) }
        }
        #[inline(always)]
        unsafe fn split_power(x: __m512) -> (__m512, __m512) {
            // SAFETY: the trait's contract.
            unsafe {
                let whole = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
                (_mm512_scalef_ps(_mm512_set1_ps(1.0), whole), _mm512_sub_ps(x, whole))
            }
        }
        #[inline(always)]
        unsafe fn load_packed(from: *const u8) -> __m512i {
            // SAFETY: the trait's contract.
            unsafe { _mm512_loadu_si512(from.cast()) }
        }
        #[inline(always)]
        unsafe fn splat_packed(value: u32) -> __m512i {
            // SAFETY: the trait's contract.
            unsafe { _mm512_set1_epi32(value.cast_signed()) }
        }
        #[inline(always)]
        unsafe fn add_packed(a: __m512i, b: __m512i) -> __m512i {
            // SAFETY: the trait's contract.
            unsafe { _mm512_add_epi32(a, b) }
        }
        #[inline(always)]
        unsafe fn low_halves(value: __m512i) -> __m512i {
            // SAFETY: the trait's contract.
            unsafe { _mm512_and_si512(value, _mm512_set1_epi8(0x0f)) }
        }
        #[inline(always)]
        unsafe fn high_halves(value: __m512i) -> __m512i {
            // SAFETY: the trait's contract.
            unsafe { _mm512_and_si512(_mm512_srli_epi16::<4>(value), _mm512_set1_epi8(0x0f)) }
        }
        #[inline(always)]
        unsafe fn shift_left(value: __m512i, bits: u32) -> __m512i {
            // SAFETY: the trait's contract.
            unsafe { _mm512_sllv_epi32(value, _mm512_set1_epi32(bits.cast_signed())) }
        }
        #[inline(always)]
        unsafe fn shift_right(value: __m512i, bits: u32) -> __m512i {
            // SAFETY: the trait's contract.
            unsafe { _mm512_srlv_epi32(value, _mm512_set1_epi32(bits.cast_signed())) }
        }
        #[inline(always)]
        unsafe fn merge(value: __m512i, bits: __m512i, mask: u32) -> __m512i {
            // SAFETY: the trait's contract.
            unsafe { _mm512_or_si512(value, _mm512_and_si512(bits, _mm512_set1_epi32(mask.cast_signed()))) }
        }
        #[inline(always)]
        unsafe fn look_up(table: &[u8; 16], indices: __m512i) -> __m512i {
            // SAFETY: the trait's contract.
            unsafe {
                let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
                _mm512_shuffle_epi8(table, indices)
            }
        }
        #[inline(always)]
        unsafe fn load_powers(from: *const u8) -> __m512 {
            // SAFETY: the trait's contract.
            unsafe {
                let exponents = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<23>(exponents))
            }
        }
        #[inline(always)]
        unsafe fn low_byte(value: __m512i) -> __m512i {
            // SAFETY: the trait's contract.
            unsafe { _mm512_and_si512(value, _mm512_set1_epi32(0xff)) }
        }
        #[inline(always)]
        unsafe fn splat_int(value: i32) -> __m512i {
            // SAFETY: the trait's contract.
            unsafe { _mm512_set1_epi32(value) }
        }
        #[inline(always)]
        unsafe fn to_floats(value: __m512i) -> __m512 {
            // SAFETY: the trait's contract.
            unsafe { _mm512_cvtepi32_ps(value) }
        }
    };
}

/// The same bits as the type that the bf16 product takes.
#[inline(always)]
unsafe fn bf16s(value: __m512i) -> __m512bh {
    // SAFETY: both types are 64 bytes of any pattern.
    unsafe { std::mem::transmute::<__m512i, __m512bh>(value) }
}

impl Simd for Avx512 {
    shared_by_both!();

    #[inline(always)]
    unsafe fn dot_pairs(sum: __m512, a: __m512i, b: __m512i) -> __m512 {
        // SAFETY: the trait's contract.
        unsafe { _mm512_dpbf16_ps(sum, bf16s(a), bf16s(b)) }
    }
    #[inline(always)]
    unsafe fn dot_quads(sum: __m512i, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: the trait's contract.
        unsafe { _mm512_dpbusd_epi32(sum, a, b) }
    }
}

impl Simd for Avx512Base {
    shared_by_both!();

    #[inline(always)]
    unsafe fn dot_pairs(sum: __m512, a: __m512i, b: __m512i) -> __m512 {
        // SAFETY: the trait's contract.
        unsafe {
            let high = _mm512_set1_epi32(0xffff_0000u32.cast_signed());
            let first = |v| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(v));
            let second = |v| _mm512_castsi512_ps(_mm512_and_si512(v, high));
            _mm512_fmadd_ps(second(a), second(b), _mm512_fmadd_ps(first(a), first(b), sum))
        }
    }
    #[inline(always)]
    unsafe fn dot_quads(sum: __m512i, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: the trait's contract.
        unsafe {
            // Bytes 0 and 2 of each lane, then 1 and 3, as 16-bit pairs: no product can saturate.
            let even_a = _mm512_and_si512(a, _mm512_set1_epi32(0x00ff_00ff));
            let odd_a = _mm512_srli_epi16::<8>(a);
            let even_b = _mm512_srai_epi16::<8>(std::arch::x86_64::_mm512_slli_epi16::<8>(b));
            let odd_b = _mm512_srai_epi16::<8>(b);
            let products =
                _mm512_add_epi32(_mm512_madd_epi16(even_a, even_b), _mm512_madd_epi16(odd_a, odd_b));
            _mm512_add_epi32(sum, products)
        }
    }
}
