//! Elements of a cache, and of weights that are multiplied as they are.
//!
//! Enters: sixteen elements as they are stored. Leaves: sixteen f32. The kernels of attention over such elements are methods of the type.
#![expect(unsafe_code, reason = "vectors are loaded through pointers")]

use std::ops::Range;

use half::{bf16, f16};

use crate::attention::{self, Tiles};
use crate::e4m3;
use crate::simd::{InstructionSet, Simd};

/// The largest code of int8, and the smallest with its sign.
pub const LARGEST_CODE: f32 = 127.0;

/// The int8 code of an element that was multiplied with the inverse of its scale.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "rounded and clamped before it is cast")]
pub fn int8_code(scaled: f32) -> i8 {
    scaled.round_ties_even().clamp(-LARGEST_CODE, LARGEST_CODE) as i8
}

/// An element of the cache.
pub trait Element: Copy + Send + Sync + 'static {
    /// Each vector has a scale, by whose inverse elements are multiplied before they are narrowed.
    const SCALED: bool = false;
    /// Nearest element.
    fn narrow(value: f32) -> Self;
    /// The element as a number, before its vector's scale.
    fn widen(self) -> f32;
    /// Sixteen elements, widened.
    ///
    /// # Safety
    /// As [`Simd::load`].
    unsafe fn load<S: Simd>(from: *const Self) -> S::Floats;
    /// `scores[q][position] = q · k` over tiles of a chunk: `[dim][16]` elements of K each. Queries have `dim` elements.
    ///
    /// # Safety
    /// The set is available, the pointers of `tiles` are valid for a tile each, and there is a chunk of scores for each query.
    unsafe fn scores(
        set: InstructionSet,
        keys: &Tiles<Self>,
        tiles: Range<usize>,
        dim: usize,
        queries: &[f32],
        scores: &mut [f32],
    );
    /// The same over positions of a chunk whose keys are rows of `stride` elements, a whole number of lanes, as queries are.
    ///
    /// # Safety
    /// As [`scores`](Self::scores), for the tiles of the positions.
    unsafe fn row_scores(
        set: InstructionSet,
        rows: &Tiles<Self>,
        positions: Range<usize>,
        stride: usize,
        queries: &[f32],
        scores: &mut [f32],
    );
    /// `values[q] += Σ weights[q][position] · v[position]` over positions of a chunk. Strides are those of rows of V, and of values, which is
    /// no larger.
    ///
    /// # Safety
    /// As [`scores`](Self::scores), for the tiles of the positions.
    unsafe fn accumulate_pv(
        set: InstructionSet,
        rows: &Tiles<Self>,
        positions: Range<usize>,
        strides: (usize, usize),
        weights: &[f32],
        values: &mut [f32],
    );
}

/// The kernels over elements of a type: what is not a generic function is compiled in this crate.
macro_rules! kernels {
    () => {
        unsafe fn scores(
            set: InstructionSet,
            keys: &Tiles<Self>,
            tiles: Range<usize>,
            dim: usize,
            queries: &[f32],
            scores: &mut [f32],
        ) {
            // SAFETY: the caller's promise.
            unsafe { attention::scores::<Self>(set, keys, tiles, dim, queries, scores) }
        }
        unsafe fn row_scores(
            set: InstructionSet,
            rows: &Tiles<Self>,
            positions: Range<usize>,
            stride: usize,
            queries: &[f32],
            scores: &mut [f32],
        ) {
            // SAFETY: the caller's promise.
            unsafe { attention::row_scores::<Self>(set, rows, positions, stride, queries, scores) }
        }
        unsafe fn accumulate_pv(
            set: InstructionSet,
            rows: &Tiles<Self>,
            positions: Range<usize>,
            strides: (usize, usize),
            weights: &[f32],
            values: &mut [f32],
        ) {
            // SAFETY: the caller's promise.
            unsafe { attention::accumulate_pv::<Self>(set, rows, positions, strides, weights, values) }
        }
    };
}

impl Element for f32 {
    #[inline(always)]
    fn narrow(value: f32) -> Self {
        value
    }
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::Floats {
        // SAFETY: the caller's promise.
        unsafe { S::load(from) }
    }
    kernels!();
}

impl Element for bf16 {
    #[inline(always)]
    fn narrow(value: f32) -> Self {
        Self::from_f32(value)
    }
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::Floats {
        // SAFETY: the caller's promise; a bf16 is its 16 bits.
        unsafe { S::load_bf16(from.cast()) }
    }
    kernels!();
}

impl Element for f16 {
    #[inline(always)]
    fn narrow(value: f32) -> Self {
        Self::from_f32(value)
    }
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::Floats {
        // SAFETY: the caller's promise; an f16 is its 16 bits.
        unsafe { S::load_f16(from.cast()) }
    }
    kernels!();
}

/// An element in fp8.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub struct E4m3(u8);

impl Element for E4m3 {
    #[inline(always)]
    fn narrow(value: f32) -> Self {
        Self(e4m3::from_f32(value))
    }
    #[inline(always)]
    fn widen(self) -> f32 {
        e4m3::to_f32(self.0)
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::Floats {
        // SAFETY: the caller's promise; no code that was narrowed is NaN.
        unsafe { S::mul(S::load_e4m3(from.cast()), S::splat(e4m3::BELOW_F16)) }
    }
    kernels!();
}

impl Element for i8 {
    const SCALED: bool = true;
    #[inline(always)]
    fn narrow(value: f32) -> Self {
        int8_code(value)
    }
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from(self)
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::Floats {
        // SAFETY: the caller's promise.
        unsafe { S::load_i8(from) }
    }
    kernels!();
}
