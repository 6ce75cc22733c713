//! Linear layers: panels of weights times packed rows.
//!
//! Enters: a [`PackedMatrix`] (or several, fused) and [`PackedActivations`](super::packed_activations::PackedActivations). Leaves: sixteen sums
//! for each row and panel, passed to a closure that finishes the operation. Weights are read once per step for all rows: a unit of work
//! is a few panels, which stay in the L2 cache while all rows are multiplied with them. The order of the sums depends on the columns
//! only, so neither the number of threads nor the other rows of a batch change a result.
//!
//! The inner tile is P panels × B rows: P · B running sums, P loads of weights and B of activations per step along the columns.
#![expect(unsafe_code, reason = "kernels read packed weights and rows through pointers")]

use half::f16;

use super::cache::Element;
use super::packed_activations::{InputRow, InputWriter};
use super::packed_matrix::{GROUP, HEADER, PackedFormat, PackedMatrix, Precision};
use super::simd::{InstructionSet, LANES, Simd, dispatch, nth};
use super::thread_team::Worker;

/// The most panels and rows of a tile.
const MAX_PANELS: usize = 4;
const MAX_ROWS: usize = 8;

/// Rows up to which a tile is four panels wide; beyond it is two, for the sake of registers.
const FEW_ROWS: usize = 4;

/// Units that each member should have at the least, for an even share.
const UNITS_PER_MEMBER: usize = 8;

/// Matrices whose panels are done in one go over the same rows.
#[derive(Debug)]
pub struct FusedMatrix {
    pub parts: Vec<PackedMatrix>,
    pub biases: Vec<Option<Vec<f32>>>,
    /// Panels of the parts alternate instead of one part after another.
    pub interleaved: bool,
}

/// Where a panel stands: its part, and its first row there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PanelPosition {
    pub part: usize,
    pub panel: usize,
}

impl FusedMatrix {
    /// Panels of all parts.
    #[must_use]
    pub fn panels(&self) -> usize {
        self.parts.iter().map(PackedMatrix::panels).sum()
    }

    /// Bytes that one pass over all parts reads, biases included.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let biases: usize = self.biases.iter().flatten().map(|bias| 4 * bias.len()).sum();
        self.parts.iter().map(PackedMatrix::bytes).sum::<usize>() + biases
    }

    /// The place of the n-th panel in the order in which panels are done.
    #[must_use]
    pub fn place(&self, index: usize) -> PanelPosition {
        if self.interleaved {
            let parts = self.parts.len();
            return PanelPosition { part: index % parts, panel: index / parts };
        }
        let mut panel = index;
        for (part, matrix) in self.parts.iter().enumerate() {
            if panel < matrix.panels() {
                return PanelPosition { part, panel };
            }
            panel -= matrix.panels();
        }
        unreachable!("an index below the number of panels")
    }

    fn panel(&self, index: usize) -> (&PackedMatrix, &[u8]) {
        let place = self.place(index);
        let matrix = &self.parts[place.part];
        (matrix, matrix.panel(place.panel))
    }
}

/// Does a member's share of `matrix · rows`. `finish(first_panel, row, sums)` gets the sums of neighbouring panels: `sums[i]` are the sixteen
/// rows of panel `first_panel + i`; with interleaved parts the first is always one of the first part.
///
/// # Safety
/// The rows behind `inputs` are packed and not written meanwhile, in the precision and width of the matrix; the set is available.
pub unsafe fn multiply(
    set: InstructionSet,
    worker: &Worker<'_>,
    phase: usize,
    matrix: &FusedMatrix,
    inputs: &InputWriter,
    rows: usize,
    mut finish: impl FnMut(usize, usize, &[[f32; LANES]]),
) {
    let panels = matrix.panels();
    let wide = panels >= MAX_PANELS * UNITS_PER_MEMBER * worker.count;
    let per_unit = if wide { MAX_PANELS } else { 2 };
    worker.parallel_for(phase, panels.div_ceil(per_unit), |unit| {
        let first = unit * per_unit;
        let end = (first + per_unit).min(panels);
        let few =
            if matrix.parts[0].format.precision() == Precision::Quads { FEW_ROWS / 2 } else { FEW_ROWS };
        if rows <= few && per_unit == MAX_PANELS {
            // SAFETY: the caller's promise.
            unsafe { strip::<MAX_PANELS>(set, matrix, first, end, inputs, 0..rows, &mut finish) };
        } else {
            for first in (first..end).step_by(2) {
                // SAFETY: the caller's promise.
                unsafe { strip::<2>(set, matrix, first, (first + 2).min(end), inputs, 0..rows, &mut finish) };
            }
        }
    });
}

/// Does one panel of a matrix over some of the packed rows: what adapters need, whose matrices are of few panels and whose rows are some
/// of a step's. `finish(row, sums)` gets the panel's sixteen sums of a row.
///
/// # Safety
/// As [`multiply`].
pub unsafe fn multiply_panel(
    set: InstructionSet,
    matrix: &FusedMatrix,
    panel: usize,
    inputs: &InputWriter,
    rows: std::ops::Range<usize>,
    mut finish: impl FnMut(usize, &[f32; LANES]),
) {
    let mut one = |_: usize, row: usize, sums: &[[f32; LANES]]| finish(row, &sums[0]);
    // SAFETY: the caller's promise.
    unsafe { strip::<1>(set, matrix, panel, panel + 1, inputs, rows, &mut one) };
}

/// All rows over up to P neighbouring panels of one format.
unsafe fn strip<const P: usize>(
    set: InstructionSet,
    matrix: &FusedMatrix,
    first: usize,
    end: usize,
    inputs: &InputWriter,
    rows: std::ops::Range<usize>,
    finish: &mut impl FnMut(usize, usize, &[[f32; LANES]]),
) {
    let mut start = first;
    while start < end {
        let (lead, _) = matrix.panel(start);
        // Integer tiles keep a second set of sums, so they are half as large.
        let most_rows = if lead.format.precision() == Precision::Quads { MAX_ROWS / 2 } else { MAX_ROWS };
        // Parts may be stored differently: a tile is of one format and width.
        let count = (start..end.min(start + P))
            .take_while(|&index| matrix.panel(index).0.format == lead.format)
            .count();
        // A tile that lacks panels does its last one again, and the result is dropped: the bytes are in the first cache.
        let weights: [*const u8; P] =
            std::array::from_fn(|i| matrix.panel(start + i.min(count - 1)).1.as_ptr());
        let mut row = rows.start;
        while row < rows.end {
            let left = (rows.end - row).min(most_rows);
            let mut sums = [[[0.0f32; LANES]; MAX_PANELS]; MAX_ROWS];
            let out = sums.as_mut_ptr();
            // Likewise a tile that lacks rows does its last one again.
            let at = |i: usize| inputs.row(row + i.min(left - 1));
            // SAFETY: panels are as long as their format says, rows as wide as the matrix by the caller's promise, and `out` has
            // room for the largest tile.
            unsafe {
                match left {
                    1 => tile::<P, 1>(set, lead, &weights, at, out),
                    2 => tile::<P, 2>(set, lead, &weights, at, out),
                    3..=FEW_ROWS => tile::<P, 4>(set, lead, &weights, at, out),
                    _ => tile::<P, 8>(set, lead, &weights, at, out),
                }
            }
            for (i, sums) in sums.iter().enumerate().take(left) {
                finish(start, row + i, &sums[..count]);
            }
            row += left;
        }
        start += count;
    }
}

/// P panels × B rows over all columns.
#[derive(Clone, Copy)]
struct Tile<'a, const P: usize, const B: usize> {
    columns: usize,
    weights: &'a [*const u8; P],
    rows: &'a [InputRow; B],
    /// Sums, `[row][panel]`.
    out: *mut [[f32; LANES]; MAX_PANELS],
}

/// One tile by the kernel of its format.
///
/// # Safety
/// The set is available; panels are as long as the format says, rows are packed for it, and `out` has room for B rows.
unsafe fn tile<const P: usize, const B: usize>(
    set: InstructionSet,
    matrix: &PackedMatrix,
    weights: &[*const u8; P],
    row: impl Fn(usize) -> InputRow,
    out: *mut [[f32; LANES]; MAX_PANELS],
) {
    let tile = Tile { columns: matrix.padded_columns(), weights, rows: &std::array::from_fn(row), out };
    // SAFETY: the caller's promise.
    unsafe {
        match matrix.format {
            PackedFormat::F32 => tile_floats::<f32, P, B>(set, tile),
            PackedFormat::F16 => tile_floats::<f16, P, B>(set, tile),
            PackedFormat::Bf16 => tile_bf16::<P, B>(set, tile),
            PackedFormat::Int8 => tile_int8::<P, B>(set, tile),
            PackedFormat::Q8_0 => tile_q8_0::<P, B>(set, tile),
            PackedFormat::Q4_0 => tile_q4_0::<P, B>(set, tile),
            PackedFormat::Int4 { group } => tile_int4::<P, B>(set, tile, group),
        }
    }
}

impl<const P: usize, const B: usize> Tile<'_, P, B> {
    #[inline(always)]
    unsafe fn store<S: Simd>(self, sums: [[S::Floats; P]; B]) {
        for (row, sums) in sums.iter().enumerate() {
            for (panel, sum) in sums.iter().enumerate() {
                // SAFETY: a tile is at most MAX_PANELS × MAX_ROWS.
                unsafe { S::store((*self.out.add(row))[panel].as_mut_ptr(), *sum) };
            }
        }
    }
}

#[inline(always)]
unsafe fn float_tile<S: Simd, E: Element, const P: usize, const B: usize>(tile: Tile<'_, P, B>) {
    let Tile { columns, weights, rows, .. } = tile;
    // SAFETY: `columns` values of sixteen rows lie in every panel, `columns` words in every row.
    unsafe {
        let mut sums = [[S::zero(); P]; B];
        for column in 0..columns {
            let w: [S::Floats; P] =
                std::array::from_fn(|p| E::load::<S>(nth(weights[p].cast(), column, LANES)));
            for (sums, row) in sums.iter_mut().zip(rows) {
                let x = S::splat(f32::from_bits(*row.words.add(column)));
                for (sum, w) in sums.iter_mut().zip(w) {
                    *sum = S::mul_add(w, x, *sum);
                }
            }
        }
        tile.store::<S>(sums);
    }
}
dispatch! { fn tile_floats[E: Element, const P: usize, const B: usize][E, P, B](tile: Tile<'_, P, B>) = float_tile }

#[inline(always)]
unsafe fn bf16_tile<S: Simd, const P: usize, const B: usize>(tile: Tile<'_, P, B>) {
    let Tile { columns, weights, rows, .. } = tile;
    // SAFETY: `columns / 2` pairs of sixteen rows lie in every panel, as many words in every row.
    unsafe {
        let mut sums = [[S::zero(); P]; B];
        for pair in 0..columns / 2 {
            let w: [S::Packed; P] = std::array::from_fn(|p| S::load_packed(nth(weights[p], pair, 4 * LANES)));
            for (sums, row) in sums.iter_mut().zip(rows) {
                let x = S::splat_packed(*row.words.add(pair));
                for (sum, w) in sums.iter_mut().zip(w) {
                    *sum = S::dot_pairs(*sum, w, x);
                }
            }
        }
        tile.store::<S>(sums);
    }
}
dispatch! { fn tile_bf16[const P: usize, const B: usize][P, B](tile: Tile<'_, P, B>) = bf16_tile }

/// What unsigned bytes of 8-bit weights are above the signed ones.
const BYTE_OFFSET: i32 = 128;

/// What half bytes of q4_0 are above the signed ones.
const NIBBLE_OFFSET: i32 = 8;

/// 32 columns of 8-bit weights × one row: `Σ (q + 128) · x − 128 · Σ x`, exact in 32 bits.
#[inline(always)]
unsafe fn bytes_group<S: Simd, const P: usize, const B: usize>(
    weights: &[*const u8; P],
    at: usize,
    rows: &[InputRow; B],
    group: usize,
) -> [[S::Ints; P]; B] {
    // SAFETY: the caller's promise: a group of each panel at `at`, and of each row.
    unsafe {
        let mut sums = [[S::splat_int(0); P]; B];
        for (sums, row) in sums.iter_mut().zip(rows) {
            *sums = [S::splat_int(-BYTE_OFFSET * *row.sums.add(group)); P];
        }
        for quad in 0..GROUP / 4 {
            let w: [S::Packed; P] =
                std::array::from_fn(|p| S::load_packed(nth(weights[p].wrapping_add(at), quad, 4 * LANES)));
            for (sums, row) in sums.iter_mut().zip(rows) {
                let x = S::splat_packed(*nth(row.words, group, GROUP / 4).add(quad));
                for (sum, w) in sums.iter_mut().zip(w) {
                    *sum = S::dot_quads(*sum, w, x);
                }
            }
        }
        sums
    }
}

/// 32 columns of 4-bit weights × one row: `Σ q · x − offset · Σ x`, exact in 32 bits.
#[inline(always)]
unsafe fn nibbles_group<S: Simd, const P: usize, const B: usize>(
    weights: &[*const u8; P],
    at: usize,
    rows: &[InputRow; B],
    group: usize,
    offset: i32,
) -> [[S::Ints; P]; B] {
    // SAFETY: the caller's promise: a group of each panel at `at`, and of each row.
    unsafe {
        let mut sums = [[S::splat_int(0); P]; B];
        for (sums, row) in sums.iter_mut().zip(rows) {
            *sums = [S::splat_int(-offset * *row.sums.add(group)); P];
        }
        for octet in 0..GROUP / 8 {
            let w: [S::Packed; P] =
                std::array::from_fn(|p| S::load_packed(nth(weights[p].wrapping_add(at), octet, 4 * LANES)));
            for (sums, row) in sums.iter_mut().zip(rows) {
                let words = nth(nth(row.words, group, GROUP / 4), octet, 2);
                let (first, second) = (S::splat_packed(*words), S::splat_packed(*words.add(1)));
                for (sum, w) in sums.iter_mut().zip(w) {
                    *sum = S::dot_quads(*sum, S::low_halves(w), first);
                    *sum = S::dot_quads(*sum, S::high_halves(w), second);
                }
            }
        }
        sums
    }
}

#[inline(always)]
unsafe fn int8_tile<S: Simd, const P: usize, const B: usize>(tile: Tile<'_, P, B>) {
    let Tile { columns, weights, rows, .. } = tile;
    // SAFETY: `columns` bytes of sixteen rows and sixteen scales lie in every panel; rows have a scale per group.
    unsafe {
        let mut sums = [[S::zero(); P]; B];
        for group in 0..columns / GROUP {
            let products = bytes_group::<S, P, B>(weights, group * GROUP * LANES, rows, group);
            for ((sums, products), row) in sums.iter_mut().zip(products).zip(rows) {
                let scale = S::splat(*row.scales.add(group));
                for (sum, product) in sums.iter_mut().zip(products) {
                    *sum = S::mul_add(S::to_floats(product), scale, *sum);
                }
            }
        }
        for sums in &mut sums {
            for (sum, weights) in sums.iter_mut().zip(weights) {
                *sum = S::mul(*sum, S::load(weights.add(columns * LANES).cast()));
            }
        }
        tile.store::<S>(sums);
    }
}
dispatch! { fn tile_int8[const P: usize, const B: usize][P, B](tile: Tile<'_, P, B>) = int8_tile }

/// Adds the products of a group, scaled on both sides.
#[inline(always)]
unsafe fn add_scaled<S: Simd, const P: usize, const B: usize>(
    sums: &mut [[S::Floats; P]; B],
    products: [[S::Ints; P]; B],
    scales: &[S::Floats; P],
    rows: &[InputRow; B],
    group: usize,
) {
    for ((sums, products), row) in sums.iter_mut().zip(products).zip(rows) {
        // SAFETY: rows have a scale per group; the features are the caller's promise.
        unsafe {
            let of_row = S::splat(*row.scales.add(group));
            for ((sum, product), scale) in sums.iter_mut().zip(products).zip(scales) {
                *sum = S::mul_add(S::to_floats(product), S::mul(*scale, of_row), *sum);
            }
        }
    }
}

#[inline(always)]
unsafe fn q8_0_tile<S: Simd, const P: usize, const B: usize>(tile: Tile<'_, P, B>) {
    let Tile { columns, weights, rows, .. } = tile;
    // SAFETY: a block of every panel is a header of two times sixteen scales and two groups of bytes.
    unsafe {
        let mut sums = [[S::zero(); P]; B];
        for group in 0..columns / GROUP {
            let block = group / 2 * (HEADER + 2 * GROUP * LANES);
            let scales: [S::Floats; P] =
                std::array::from_fn(|p| S::load_f16(weights[p].add(block + group % 2 * (HEADER / 2)).cast()));
            let at = block + HEADER + group % 2 * GROUP * LANES;
            let products = bytes_group::<S, P, B>(weights, at, rows, group);
            add_scaled::<S, P, B>(&mut sums, products, &scales, rows, group);
        }
        tile.store::<S>(sums);
    }
}
dispatch! { fn tile_q8_0[const P: usize, const B: usize][P, B](tile: Tile<'_, P, B>) = q8_0_tile }

#[inline(always)]
unsafe fn q4_0_tile<S: Simd, const P: usize, const B: usize>(tile: Tile<'_, P, B>) {
    let Tile { columns, weights, rows, .. } = tile;
    // SAFETY: a block of every panel is a header of two times sixteen scales and two groups of half bytes.
    unsafe {
        let mut sums = [[S::zero(); P]; B];
        for group in 0..columns / GROUP {
            let block = group / 2 * (HEADER + GROUP * LANES);
            let scales: [S::Floats; P] =
                std::array::from_fn(|p| S::load_f16(weights[p].add(block + group % 2 * (HEADER / 2)).cast()));
            let at = block + HEADER + group % 2 * (GROUP / 2) * LANES;
            let products = nibbles_group::<S, P, B>(weights, at, rows, group, NIBBLE_OFFSET);
            add_scaled::<S, P, B>(&mut sums, products, &scales, rows, group);
        }
        tile.store::<S>(sums);
    }
}
dispatch! { fn tile_q4_0[const P: usize, const B: usize][P, B](tile: Tile<'_, P, B>) = q4_0_tile }

#[inline(always)]
unsafe fn int4_tile<S: Simd, const P: usize, const B: usize>(tile: Tile<'_, P, B>, weight_group: usize) {
    let Tile { columns, weights, rows, .. } = tile;
    // SAFETY: a block of every panel is a header of sixteen scales and sixteen zeros and one group of half bytes.
    unsafe {
        let mut sums = [[S::zero(); P]; B];
        let per_block = weight_group / GROUP;
        let block_bytes = HEADER + weight_group * LANES / 2;
        for group in 0..columns / GROUP {
            let block = group / per_block * block_bytes;
            let scales: [S::Floats; P] = std::array::from_fn(|p| S::load_f16(weights[p].add(block).cast()));
            let at = block + HEADER + group % per_block * (GROUP / 2) * LANES;
            let products = nibbles_group::<S, P, B>(weights, at, rows, group, 0);
            for ((sums, products), row) in sums.iter_mut().zip(products).zip(rows) {
                let of_row = S::splat(*row.scales.add(group));
                #[expect(clippy::cast_precision_loss, reason = "32 bytes sum to less than 2^13")]
                let minus_sum = S::splat(-(*row.sums.add(group) as f32));
                for (p, (sum, product)) in sums.iter_mut().zip(products).enumerate() {
                    let zeros = S::load_f16(weights[p].add(block + HEADER / 2).cast());
                    let product = S::mul_add(zeros, minus_sum, S::to_floats(product));
                    *sum = S::mul_add(product, S::mul(scales[p], of_row), *sum);
                }
            }
        }
        tile.store::<S>(sums);
    }
}
dispatch! { fn tile_int4[const P: usize, const B: usize][P, B](tile: Tile<'_, P, B>, group: usize) = int4_tile }
