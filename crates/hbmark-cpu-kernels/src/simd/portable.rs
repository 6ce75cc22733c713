//! Plain Rust over arrays, which compilers vectorise; the only one outside x86-64.
#![expect(unsafe_code, reason = "loads and stores through pointers")]

use half::{bf16, f16};

use super::{LANES, Simd};
use crate::e4m3;

/// No feature beyond the target's baseline.
#[derive(Debug, Clone, Copy)]
pub struct Portable;

#[inline(always)]
fn each<T: Copy, U: Copy + Default>(a: [T; LANES], f: impl Fn(T) -> U) -> [U; LANES] {
    let mut out = [U::default(); LANES];
    for (out, a) in out.iter_mut().zip(a) {
        *out = f(a);
    }
    out
}

#[inline(always)]
fn both<T: Copy, U: Copy>(mut a: [T; LANES], b: [U; LANES], f: impl Fn(T, U) -> T) -> [T; LANES] {
    for (a, b) in a.iter_mut().zip(b) {
        *a = f(*a, b);
    }
    a
}

fn widened(bits: u32) -> (f32, f32) {
    (f32::from_bits(bits << 16), f32::from_bits(bits & 0xffff_0000))
}

// SAFETY of every block below: the trait's contract makes the pointers valid for sixteen elements.
impl Simd for Portable {
    type Floats = [f32; LANES];
    type Ints = [i32; LANES];
    type Packed = [u32; LANES];
    const MOST_SUMS: usize = 4;

    #[inline(always)]
    unsafe fn zero() -> Self::Floats {
        [0.0; LANES]
    }
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::Floats {
        [value; LANES]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::Floats {
        // SAFETY: valid for sixteen elements.
        unsafe { from.cast::<[f32; LANES]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Self::Floats) {
        // SAFETY: valid for sixteen elements.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(value) }
    }
    #[inline(always)]
    unsafe fn store_streaming(to: *mut f32, value: Self::Floats) {
        // SAFETY: the caller's promise.
        unsafe { Self::store(to, value) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self::Floats {
        // SAFETY: valid for sixteen elements.
        each(unsafe { from.cast::<[u16; LANES]>().read_unaligned() }, |bits| bf16::from_bits(bits).to_f32())
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self::Floats {
        // SAFETY: valid for sixteen elements.
        each(unsafe { from.cast::<[u16; LANES]>().read_unaligned() }, |bits| f16::from_bits(bits).to_f32())
    }
    #[inline(always)]
    unsafe fn load_e4m3(from: *const u8) -> Self::Floats {
        // SAFETY: valid for sixteen bytes.
        let codes = unsafe { from.cast::<[u8; LANES]>().read_unaligned() };
        codes.map(|code| e4m3::below_f16(code).to_f32())
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self::Floats {
        // SAFETY: valid for sixteen bytes.
        each(unsafe { from.cast::<[i8; LANES]>().read_unaligned() }, f32::from)
    }
    #[inline(always)]
    unsafe fn add(a: Self::Floats, b: Self::Floats) -> Self::Floats {
        both(a, b, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats {
        both(a, b, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn div(a: Self::Floats, b: Self::Floats) -> Self::Floats {
        both(a, b, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn max(a: Self::Floats, b: Self::Floats) -> Self::Floats {
        // What is not a number stays where it is the second.
        both(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn mul_add(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats {
        // Two roundings: a fused one is a library call where the baseline has no such instruction.
        both(both(a, b, |a, b| a * b), c, |ab, c| ab + c)
    }
    #[inline(always)]
    unsafe fn split_power(x: Self::Floats) -> (Self::Floats, Self::Floats) {
        let whole = each(x, f32::round_ties_even);
        #[expect(clippy::cast_possible_truncation, reason = "x is within ±126")]
        let power = each(whole, |n| f32::from_bits(((n as i32 + 127) << 23).cast_unsigned()));
        (power, both(x, whole, |x, n| x - n))
    }
    #[inline(always)]
    unsafe fn load_packed(from: *const u8) -> Self::Packed {
        // SAFETY: valid for 64 bytes.
        each(unsafe { from.cast::<[u32; LANES]>().read_unaligned() }, u32::from_le)
    }
    #[inline(always)]
    unsafe fn splat_packed(value: u32) -> Self::Packed {
        [value; LANES]
    }
    #[inline(always)]
    unsafe fn add_packed(a: Self::Packed, b: Self::Packed) -> Self::Packed {
        both(a, b, u32::wrapping_add)
    }
    #[inline(always)]
    unsafe fn dot_pairs(sum: Self::Floats, a: Self::Packed, b: Self::Packed) -> Self::Floats {
        let mut sum = sum;
        for ((sum, a), b) in sum.iter_mut().zip(a).zip(b) {
            let ((a0, a1), (b0, b1)) = (widened(a), widened(b));
            *sum += a0 * b0 + a1 * b1;
        }
        sum
    }
    #[inline(always)]
    unsafe fn dot_quads(sum: Self::Ints, a: Self::Packed, b: Self::Packed) -> Self::Ints {
        let mut sum = sum;
        for ((sum, a), b) in sum.iter_mut().zip(a).zip(b) {
            for (a, b) in a.to_le_bytes().into_iter().zip(b.to_le_bytes()) {
                *sum += i32::from(a) * i32::from(b.cast_signed());
            }
        }
        sum
    }
    #[inline(always)]
    unsafe fn low_halves(value: Self::Packed) -> Self::Packed {
        each(value, |v| v & 0x0f0f_0f0f)
    }
    #[inline(always)]
    unsafe fn high_halves(value: Self::Packed) -> Self::Packed {
        each(value, |v| v >> 4 & 0x0f0f_0f0f)
    }
    #[inline(always)]
    unsafe fn look_up(table: &[u8; 16], indices: Self::Packed) -> Self::Packed {
        each(indices, |lane| u32::from_le_bytes(lane.to_le_bytes().map(|byte| table[usize::from(byte & 15)])))
    }
    #[inline(always)]
    unsafe fn load_powers(from: *const u8) -> Self::Floats {
        // SAFETY: the trait's contract: sixteen bytes.
        let bytes = unsafe { from.cast::<[u8; LANES]>().read_unaligned() };
        bytes.map(|byte| f32::from_bits(u32::from(byte) << 23))
    }
    #[inline(always)]
    unsafe fn shift_left(value: Self::Packed, bits: u32) -> Self::Packed {
        each(value, |v| v << bits)
    }
    #[inline(always)]
    unsafe fn shift_right(value: Self::Packed, bits: u32) -> Self::Packed {
        each(value, |v| v >> bits)
    }
    #[inline(always)]
    unsafe fn merge(value: Self::Packed, bits: Self::Packed, mask: u32) -> Self::Packed {
        both(value, bits, |v, bits| v | bits & mask)
    }
    #[inline(always)]
    unsafe fn low_byte(value: Self::Packed) -> Self::Ints {
        each(value, |v| (v & 0xff).cast_signed())
    }
    #[inline(always)]
    unsafe fn splat_int(value: i32) -> Self::Ints {
        [value; LANES]
    }
    #[inline(always)]
    unsafe fn to_floats(value: Self::Ints) -> Self::Floats {
        #[expect(clippy::cast_precision_loss, reason = "sums of a group are far below 2^24")]
        each(value, |v| v as f32)
    }
}
