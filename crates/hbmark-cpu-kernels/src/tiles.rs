//! Products of panels of weights with packed rows: P panels × B rows over all columns.
//!
//! Enters: [`TileWork`]: panels of sixteen rows of a matrix in a [`PackedFormat`], rows of activations packed for it. Leaves: P · B vectors of
//! sixteen sums. A step along the columns is P loads of weights and B of activations. The order of the sums depends on the columns only.
#![expect(unsafe_code, reason = "kernels read packed weights and rows through pointers")]

use std::ops::Range;

use half::f16;

use crate::element::Element;
use crate::rows::InputRow;
#[cfg(target_arch = "x86_64")]
use crate::simd::amx;
use crate::simd::{InstructionSet, LANES, Simd, dispatch, each, nth, prefetch};
use crate::{e2m1, e4m3};

/// Columns of integer weights that share one scale of the activations.
pub const GROUP: usize = 32;

/// Columns of nvfp4 that share a scale.
pub const NVFP4_GROUP: usize = 16;

/// Columns of a block of q4_k, q5_k and q6_k.
pub const SUPER_BLOCK: usize = 256;

/// Bytes of a header: 32 values of f16.
pub const HEADER: usize = 64;

/// Bytes of lines before the codes of a block of 256 columns: 6-bit scales and two f16 ones of each row, or 16 scales of 8 bits.
pub const SUPER_HEADER: usize = 4 * HEADER;

/// Columns between two headers of q8_0 and q4_0: two groups, so that every load is aligned.
const Q_BLOCK: usize = 2 * GROUP;

/// Bytes of a vector, and of a line of a processor's caches: four of each row of a panel.
pub const LINE: usize = 4 * LANES;

/// Bytes that a tile of a single panel prefetches ahead: the processor's own prefetch does not keep up on a single stream.
const AHEAD: usize = 2048;

/// Bytes that an integer tile prefetches ahead of each line it loads. Half of it is too near where memory takes longest to answer.
const LINES_AHEAD: usize = 8192;

/// Sums of an integer tile, panels times rows: unpacking weights costs it more than a row does.
const INTEGER_SUMS: usize = 8;

/// Rows of the largest of them.
const MOST_INTEGER_ROWS: usize = INTEGER_SUMS / NEIGHBOURS;

/// Panels of an integer tile at batch 1, and panels whose lines alternate.
pub const NEIGHBOURS: usize = 2;

/// The most panels and rows of a tile.
pub const MAX_PANELS: usize = 4;
pub const MAX_ROWS: usize = 32;

/// Rows of the largest tile of vectors; those of matrices have up to [`MAX_ROWS`].
const MOST_VECTOR_ROWS: usize = 8;

/// Panels that a tile may write when it begins at the last of [`MAX_PANELS`].
pub const SLOTS: usize = 2 * MAX_PANELS - 1;

/// How a packed matrix is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PackedFormat {
    F32,
    F16,
    Bf16,
    Int8,
    /// `group`: columns that share a scale, which the rows of a panel share too; `None` for a scale of each row.
    Fp8 {
        group: Option<usize>,
    },
    Q8_0,
    Q4_0,
    Mxfp8,
    Mxfp4,
    Nvfp4,
    /// `zeros`: with a zero beside each scale; otherwise all of them are 8.
    Int4 {
        group: usize,
        zeros: bool,
    },
    Q4K,
    Q5K,
    Q6K,
}

impl PackedFormat {
    /// Columns that are packed together; a row is padded with zeros to a multiple.
    pub const fn block_columns(self) -> usize {
        match self {
            Self::F32 | Self::F16 => 1,
            Self::Bf16 | Self::Fp8 { .. } | Self::Mxfp8 => 2,
            Self::Int8 | Self::Mxfp4 | Self::Nvfp4 => GROUP,
            Self::Q8_0 | Self::Q4_0 => Q_BLOCK,
            Self::Int4 { group, .. } => group,
            Self::Q4K | Self::Q5K | Self::Q6K => SUPER_BLOCK,
        }
    }

    /// Bytes of one block of columns of a panel.
    pub const fn block_bytes(self) -> usize {
        let columns = self.block_columns();
        match self {
            Self::F32 | Self::Bf16 => 4 * LANES,
            Self::F16 => 2 * LANES,
            Self::Int8 | Self::Fp8 { .. } | Self::Mxfp8 => columns * LANES,
            Self::Mxfp4 | Self::Nvfp4 | Self::Int4 { .. } => columns * LANES / 2,
            Self::Q8_0 => HEADER + columns * LANES,
            Self::Q4_0 => HEADER + columns * LANES / 2,
            Self::Q4K => 144 * LANES,
            Self::Q5K => 176 * LANES,
            Self::Q6K => 210 * LANES,
        }
    }

    /// Bytes from a line of a panel to its next one within a block. Where lines of [`NEIGHBOURS`] panels alternate, a tile of them reads one
    /// stream; what blocks have beyond whole lines comes before the lines of both.
    pub const fn line_stride(self) -> usize {
        match self {
            Self::Q8_0 | Self::Q4_0 | Self::Q4K | Self::Q5K | Self::Q6K => NEIGHBOURS * LINE,
            _ => LINE,
        }
    }

    /// Panels whose lines alternate; 1 where none do.
    pub const fn neighbours(self) -> usize {
        self.line_stride() / LINE
    }

    /// The precision that activations are rounded to for these weights.
    #[inline]
    pub fn precision(self) -> Precision {
        match self {
            Self::F32 | Self::F16 => Precision::Floats,
            Self::Bf16 | Self::Fp8 { .. } | Self::Mxfp8 => Precision::Pairs,
            Self::Int8
            | Self::Q8_0
            | Self::Q4_0
            | Self::Mxfp4
            | Self::Nvfp4
            | Self::Int4 { .. }
            | Self::Q4K
            | Self::Q5K
            | Self::Q6K => Precision::Quads,
        }
    }

    /// The fewest panels of a tile: there is no integer tile of a single one.
    #[inline]
    pub fn fewest_panels(self) -> usize {
        if self.precision() == Precision::Quads { NEIGHBOURS } else { 1 }
    }

    /// Whether a set multiplies such weights as matrices, and not as vectors.
    #[inline]
    pub fn in_matrices(self, set: InstructionSet) -> bool {
        set == InstructionSet::Amx && self == Self::Bf16
    }

    /// Panels of a tile, for a product of so many rows: as many as its sums have registers for. Integer tiles have two, whose lines are one
    /// stream where they alternate.
    #[inline]
    pub fn panels(self, set: InstructionSet, rows: usize) -> usize {
        if self.precision() == Precision::Quads {
            return NEIGHBOURS;
        }
        if self.in_matrices(set) {
            return MAX_PANELS;
        }
        (set.most_sums() / rows.min(MOST_VECTOR_ROWS).next_power_of_two()).clamp(1, MAX_PANELS)
    }

    /// Rows that a tile of one, two or four panels may have.
    #[inline]
    pub fn most_rows(self, set: InstructionSet, panels: usize) -> usize {
        if self.in_matrices(set) {
            return MAX_ROWS;
        }
        let most = if self.precision() == Precision::Quads { INTEGER_SUMS } else { set.most_sums() };
        (most / panels).min(MOST_VECTOR_ROWS)
    }
}

/// What activations are rounded to before a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// Not at all: f32.
    Floats,
    /// bf16, two to a word.
    Pairs,
    /// Groups of 32 signed bytes with a scale, four to a word.
    Quads,
}

/// Bytes of the scales of a group of int4, and of its zeros where it has any.
#[inline]
pub fn int4_scales(zeros: bool) -> usize {
    if zeros { 4 * LANES } else { 2 * LANES }
}

/// Sums of a row: sixteen for each panel.
pub type Sums = [[f32; LANES]; SLOTS];

/// The arguments of a tile, of which it takes as many panels and rows as it has.
#[derive(Debug, Clone, Copy)]
pub struct TileWork<'a> {
    /// Columns with padding.
    pub columns: usize,
    pub panels: [*const u8; MAX_PANELS],
    /// Which of its [`NEIGHBOURS`] each panel is: of q6_k alone.
    pub places: [usize; MAX_PANELS],
    /// Of integer tiles alone, which prefetch: a tile of other rows has read these panels before.
    pub cached: bool,
    /// Likewise: whether a tile of one or two rows prefetches past the outer caches (`prefetchnta`).
    pub past_caches: bool,
    /// Likewise: the panels of the next tile, whose lines come behind those of this one.
    pub next: [*const u8; MAX_PANELS],
    /// Bytes from the first line of a panel to the end of its last.
    pub span: usize,
    /// What all values of each panel's matrix are multiplied with: of nvfp4 alone.
    pub factors: [f32; MAX_PANELS],
    pub rows: &'a [InputRow; MAX_ROWS],
    /// One for each row, from panel `slot` on.
    pub out: *mut Sums,
    pub slot: usize,
}

/// One tile by the kernel of its format. Its shape is panels and rows: 1, 2 or 4 panels (of quads 2), and no more rows than
/// [`PackedFormat::most_rows`].
///
/// # Safety
/// The set is available; panels are as long as the format says for the columns, rows are packed for it, and `out` has room for the panels of
/// each row from `slot` on (of two where there is one, in matrices), of as many rows as the next power of two.
///
/// # Panics
/// When there is no such tile.
pub unsafe fn multiply_tile(
    set: InstructionSet,
    format: PackedFormat,
    shape: (usize, usize),
    work: &TileWork<'_>,
) {
    let (panels, rows) = shape;
    #[cfg(target_arch = "x86_64")]
    if format.in_matrices(set) {
        // SAFETY: the caller's promise.
        return unsafe {
            amx::multiply_pairs(
                work.columns,
                &work.panels[..panels],
                &work.rows[..rows],
                work.out,
                work.slot,
            );
        };
    }
    let shape = (panels, rows.next_power_of_two());
    // SAFETY: the caller's promise.
    unsafe {
        if format.precision() == Precision::Quads {
            match shape {
                (2, 1) => quads::<2, 1>(set, format, work),
                (2, 2) => quads::<2, 2>(set, format, work),
                (2, 4) => quads::<2, 4>(set, format, work),
                _ => unreachable!("no tile of quads is {shape:?}"),
            }
        } else {
            match shape {
                (1, 1) => floats::<1, 1>(set, format, work),
                (1, 2) => floats::<1, 2>(set, format, work),
                (1, 4) => floats::<1, 4>(set, format, work),
                (1, 8) => floats::<1, 8>(set, format, work),
                (2, 1) => floats::<2, 1>(set, format, work),
                (2, 2) => floats::<2, 2>(set, format, work),
                (2, 4) => floats::<2, 4>(set, format, work),
                (2, 8) => floats::<2, 8>(set, format, work),
                (4, 1) => floats::<4, 1>(set, format, work),
                (4, 2) => floats::<4, 2>(set, format, work),
                (4, 4) => floats::<4, 4>(set, format, work),
                _ => unreachable!("no tile of floats is {shape:?}"),
            }
        }
    }
}

/// Gives back the registers that tiles of this thread have held since its first product by matrices.
#[inline]
pub fn release_matrices() {
    #[cfg(target_arch = "x86_64")]
    amx::release();
}

/// Formats whose activations are floats, or pairs of them.
unsafe fn floats<const P: usize, const B: usize>(
    set: InstructionSet,
    format: PackedFormat,
    work: &TileWork<'_>,
) {
    let tile = Tile::<P, B>::of(work);
    // SAFETY: the caller's promise.
    unsafe {
        match format {
            PackedFormat::F32 => tile_floats::<f32, P, B>(set, tile),
            PackedFormat::F16 => tile_floats::<f16, P, B>(set, tile),
            PackedFormat::Bf16 => tile_bf16::<P, B>(set, tile),
            PackedFormat::Fp8 { group } => tile_fp8::<false, P, B>(set, tile, group),
            PackedFormat::Mxfp8 => tile_fp8::<true, P, B>(set, tile, Some(GROUP)),
            _ => unreachable!("a format of floats or pairs"),
        }
    }
}

/// Formats whose activations are quads of bytes.
unsafe fn quads<const P: usize, const B: usize>(
    set: InstructionSet,
    format: PackedFormat,
    work: &TileWork<'_>,
) {
    let tile = Tile::<P, B>::of(work);
    // SAFETY: the caller's promise.
    unsafe {
        match format {
            PackedFormat::Int8 => tile_int8::<P, B>(set, tile),
            PackedFormat::Q8_0 => tile_q8_0::<P, B>(set, tile),
            PackedFormat::Q4_0 => tile_q4_0::<P, B>(set, tile),
            PackedFormat::Mxfp4 => tile_mxfp4::<P, B>(set, tile),
            PackedFormat::Nvfp4 => tile_nvfp4::<P, B>(set, tile),
            PackedFormat::Int4 { group, zeros: false } => tile_int4::<false, P, B>(set, tile, group),
            PackedFormat::Int4 { group, zeros: true } => tile_int4::<true, P, B>(set, tile, group),
            PackedFormat::Q4K => tile_ranges::<0, P, B>(set, tile),
            PackedFormat::Q5K => tile_ranges::<1, P, B>(set, tile),
            PackedFormat::Q6K => tile_q6_k::<P, B>(set, tile),
            _ => unreachable!("a format of quads"),
        }
    }
}

/// P panels × B rows over all columns.
#[derive(Clone, Copy)]
struct Tile<'a, const P: usize, const B: usize> {
    columns: usize,
    weights: &'a [*const u8; P],
    places: &'a [usize; P],
    cached: bool,
    past_caches: bool,
    next: &'a [*const u8; P],
    span: usize,
    factors: &'a [f32; P],
    rows: &'a [InputRow; B],
    out: *mut Sums,
    slot: usize,
}

impl<'a, const P: usize, const B: usize> Tile<'a, P, B> {
    #[inline(always)]
    fn of(work: &'a TileWork<'_>) -> Self {
        Self {
            columns: work.columns,
            weights: work.panels.first_chunk().expect("no more than MAX_PANELS"),
            places: work.places.first_chunk().expect("no more than MAX_PANELS"),
            cached: work.cached,
            past_caches: work.past_caches,
            next: work.next.first_chunk().expect("no more than MAX_PANELS"),
            span: work.span,
            factors: work.factors.first_chunk().expect("no more than MAX_PANELS"),
            rows: work.rows.first_chunk().expect("no more than MAX_ROWS"),
            out: work.out,
            slot: work.slot,
        }
    }

    #[inline(always)]
    fn lines(self, format: PackedFormat) -> Lines<'a, P, B> {
        let Self { weights, next, span, cached, past_caches, .. } = self;
        Lines { weights, next, span, cached, past_caches, first: 0, stride: format.line_stride() }
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(self, sums: [[S::Floats; P]; B]) {
        for (row, sums) in sums.iter().enumerate() {
            for (panel, sum) in sums.iter().enumerate() {
                // SAFETY: a tile is at most MAX_PANELS × MAX_ROWS, and begins at one of MAX_PANELS slots.
                unsafe { S::store((*self.out.add(row))[self.slot + panel].as_mut_ptr(), *sum) };
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
            if P == 1 {
                prefetch::<false, _>(nth(weights[0].cast::<E>(), column, LANES).wrapping_byte_add(AHEAD));
            }
            let w: [S::Floats; P] = each!(S::zero(), |p| E::load::<S>(nth(weights[p].cast(), column, LANES)));
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
            if P == 1 {
                prefetch::<false, _>(nth(weights[0], pair, 4 * LANES).wrapping_add(AHEAD));
            }
            let w: [S::Packed; P] =
                each!(S::splat_packed(0), |p| S::load_packed(nth(weights[p], pair, 4 * LANES)));
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

/// With a scale of each row, or of each group of columns: one of all rows, or a power of two of each.
#[inline(always)]
unsafe fn fp8_tile<S: Simd, const POWERS: bool, const P: usize, const B: usize>(
    tile: Tile<'_, P, B>,
    group: Option<usize>,
) {
    let Tile { columns, weights, rows, .. } = tile;
    let width = group.unwrap_or(columns);
    // SAFETY: `columns` codes of sixteen rows lie in every panel, then sixteen scales, or one or sixteen bytes for each group of columns; half as many
    // words in every row.
    unsafe {
        let mut sums = [[S::zero(); P]; B];
        let mut begin = 0;
        while begin < columns {
            let end = columns.min(begin.wrapping_add(width));
            let mut of_group = [[S::zero(); P]; B];
            for pair in begin / 2..end / 2 {
                let mut w = [[S::zero(); P]; 2];
                for (half, w) in w.iter_mut().enumerate() {
                    for (w, from) in w.iter_mut().zip(weights) {
                        *w = S::load_e4m3(nth(*from, pair.wrapping_mul(2).wrapping_add(half), LANES));
                    }
                }
                for (sums, row) in of_group.iter_mut().zip(rows) {
                    let word = *row.words.add(pair);
                    let x =
                        [S::splat(f32::from_bits(word << 16)), S::splat(f32::from_bits(word & 0xffff_0000))];
                    for (x, w) in x.into_iter().zip(w) {
                        for (sum, w) in sums.iter_mut().zip(w) {
                            *sum = S::mul_add(w, x, *sum);
                        }
                    }
                }
            }
            for (p, from) in weights.iter().enumerate() {
                let scales: *const f32 = nth(*from, columns, LANES).cast();
                let scale = if POWERS {
                    S::load_powers(nth(*from, columns.wrapping_add(begin / width), LANES))
                } else if group.is_some() {
                    S::splat(*nth(scales, begin / width, 1))
                } else {
                    S::load(scales)
                };
                let scale = S::mul(scale, S::splat(e4m3::BELOW_F16));
                for (sums, of_group) in sums.iter_mut().zip(&of_group) {
                    sums[p] = S::mul_add(of_group[p], scale, sums[p]);
                }
            }
            begin = end;
        }
        tile.store::<S>(sums);
    }
}
dispatch! { fn tile_fp8[const POWERS: bool, const P: usize, const B: usize][POWERS, P, B](tile: Tile<'_, P, B>, group: Option<usize>) = fp8_tile }

/// What unsigned bytes of 8-bit weights are above the signed ones.
const BYTE_OFFSET: i32 = 128;

/// What half bytes of q4_0 are above the signed ones.
const NIBBLE_OFFSET: i32 = 8;

/// The lines of an integer tile's panels, from one of them on.
#[derive(Clone, Copy)]
struct Lines<'a, const P: usize, const B: usize> {
    weights: &'a [*const u8; P],
    next: &'a [*const u8; P],
    span: usize,
    cached: bool,
    past_caches: bool,
    /// Bytes behind the first line of each panel.
    first: usize,
    stride: usize,
}

impl<const P: usize, const B: usize> Lines<'_, P, B> {
    /// Whether lines are prefetched beside their loads, and not those of a group together, which wait for each other: products of more rows have
    /// no time for that, and take long enough.
    const BESIDE: bool = B < MOST_INTEGER_ROWS;

    /// From a later line on.
    #[inline(always)]
    fn from(self, line: usize) -> Self {
        self.behind(line.wrapping_mul(self.stride))
    }

    /// From so many bytes on.
    #[inline(always)]
    fn behind(self, bytes: usize) -> Self {
        Self { first: self.first.wrapping_add(bytes), ..self }
    }

    #[inline(always)]
    fn at(self, panel: usize, line: usize) -> *const u8 {
        nth(self.weights[panel].wrapping_add(self.first), line, self.stride)
    }

    /// Before a group of lines is loaded.
    #[inline(always)]
    fn prefetch_group(self, lines: usize) {
        if !Self::BESIDE {
            self.prefetch(0..lines);
        }
    }

    /// Before a line of a group is loaded.
    #[inline(always)]
    fn prefetch_beside(self, line: usize) {
        if Self::BESIDE {
            self.prefetch_line(line);
        }
    }

    /// Prefetches what comes behind lines of each panel.
    #[inline(always)]
    fn prefetch(self, lines: Range<usize>) {
        if !Self::BESIDE && self.cached {
            return;
        }
        for line in lines {
            self.prefetch_line(line);
        }
    }

    /// Behind a panel come lines that another tile, or another processor, reads: those of the next tile are prefetched instead.
    #[inline(always)]
    fn prefetch_line(self, line: usize) {
        let ahead = self.first.wrapping_add(line.wrapping_mul(self.stride)).wrapping_add(LINES_AHEAD);
        let beyond = ahead.wrapping_sub(self.span);
        for panel in 0..P {
            let address = if ahead < self.span {
                self.weights[panel].wrapping_add(ahead)
            } else {
                self.next[panel].wrapping_add(beyond)
            };
            if Self::BESIDE && self.past_caches {
                prefetch::<true, _>(address);
            } else {
                prefetch::<false, _>(address);
            }
        }
    }
}

/// 32 columns of 8-bit weights, a line each four, × one row: `Σ (q + 128) · x − 128 · Σ x`, exact in 32 bits.
#[inline(always)]
unsafe fn bytes_group<S: Simd, const P: usize, const B: usize>(
    lines: Lines<'_, P, B>,
    rows: &[InputRow; B],
    group: usize,
) -> [[S::Ints; P]; B] {
    lines.prefetch_group(GROUP / 4);
    // SAFETY: the caller's promise: a group of each panel from a line on, and of each row.
    unsafe {
        let mut sums = [[S::splat_int(0); P]; B];
        for (sums, row) in sums.iter_mut().zip(rows) {
            *sums = [S::splat_int(-BYTE_OFFSET * row.sum(group)); P];
        }
        for quad in 0..GROUP / 4 {
            lines.prefetch_beside(quad);
            let w: [S::Packed; P] = each!(S::splat_packed(0), |p| S::load_packed(lines.at(p, quad)));
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

/// What the codes of e2m1 stand for: twice their values, and [`E2M1_OFFSET`] above the signed ones.
#[expect(clippy::cast_possible_truncation, reason = "the offset is 12")]
const E2M1: [u8; 16] = {
    let mut table = [0; 16];
    let mut code = 0;
    while code < table.len() {
        table[code] = e2m1::DOUBLED[code].wrapping_add(E2M1_OFFSET as i8).cast_unsigned();
        code += 1;
    }
    table
};
const E2M1_OFFSET: i32 = 12;

/// What codes of q6_k are above the signed ones.
const SIX_BIT_OFFSET: i32 = 32;

/// What the bytes of q6_k's scales are above the signed ones.
const SCALE_OFFSET: f32 = 128.0;

/// So many octets of columns of weights in half bytes, with `HIGH` bits above each in a vector before them, × one row:
/// `Σ q · x − offset · Σ x`, exact in 32 bits. `half` is the first half group of the row. With a table, q is what [`E2M1`] has for the code.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "numbers of bits and bytes of a word")]
unsafe fn codes<
    S: Simd,
    const TABLE: bool,
    const HIGH: usize,
    const OCTETS: usize,
    const P: usize,
    const B: usize,
>(
    lines: Lines<'_, P, B>,
    rows: &[InputRow; B],
    half: usize,
    offset: i32,
) -> [[S::Ints; P]; B] {
    let high_lines = HIGH.min(1);
    lines.prefetch_group(high_lines + OCTETS);
    // SAFETY: the caller's promise: octets of each panel from a line on, and of each row.
    unsafe {
        let mut sums = [[S::splat_int(0); P]; B];
        for (sums, row) in sums.iter_mut().zip(rows) {
            let mut sum = *row.sums.add(half);
            if OCTETS == GROUP / 8 {
                sum += *row.sums.add(half + 1);
            }
            *sums = [S::splat_int(-offset * sum); P];
        }
        // The first quad of an octet has its bits above the low halves of the bytes, the second in them.
        // Loops and no closures: a closure as large as this one is not inlined, and has no instruction set of its own.
        let mut high = [[S::splat_packed(0); 2]; P];
        if HIGH > 0 {
            lines.prefetch_beside(0);
            for (panel, high) in high.iter_mut().enumerate() {
                let bits = S::load_packed(lines.at(panel, 0));
                *high = [bits, S::shift_left(bits, 4)];
            }
        }
        let (mask, step) = (0x1010_1010 * ((1u32 << HIGH) - 1), HIGH as u32);
        for octet in 0..OCTETS {
            let down = step * octet as u32;
            let line = high_lines + octet;
            lines.prefetch_beside(line);
            let mut w = [[S::splat_packed(0); 2]; P];
            for (panel, (w, high)) in w.iter_mut().zip(high).enumerate() {
                let packed = S::load_packed(lines.at(panel, line));
                *w = [S::low_halves(packed), S::high_halves(packed)];
                if TABLE {
                    *w = [S::look_up(&E2M1, w[0]), S::look_up(&E2M1, w[1])];
                }
                if HIGH > 0 {
                    w[0] = S::merge(w[0], S::shift_right(high[0], down), mask);
                    w[1] = S::merge(w[1], S::shift_right(high[1], down), mask);
                }
            }
            for (sums, row) in sums.iter_mut().zip(rows) {
                let words = nth(nth(row.words, half, GROUP / 8), octet, 2);
                let (first, second) = (S::splat_packed(*words), S::splat_packed(*words.add(1)));
                for (sum, w) in sums.iter_mut().zip(w) {
                    *sum = S::dot_small_quads(*sum, w[0], first);
                    *sum = S::dot_small_quads(*sum, w[1], second);
                }
            }
        }
        sums
    }
}

/// 32 columns of 4-bit weights × one row.
#[inline(always)]
unsafe fn nibbles_group<S: Simd, const TABLE: bool, const P: usize, const B: usize>(
    lines: Lines<'_, P, B>,
    rows: &[InputRow; B],
    group: usize,
    offset: i32,
) -> [[S::Ints; P]; B] {
    // SAFETY: the caller's promise: a group of each panel from a line on, and of each row.
    unsafe { codes::<S, TABLE, 0, { GROUP / 8 }, P, B>(lines, rows, 2 * group, offset) }
}

#[inline(always)]
unsafe fn int8_tile<S: Simd, const P: usize, const B: usize>(tile: Tile<'_, P, B>) {
    let Tile { columns, weights, rows, .. } = tile;
    let lines = tile.lines(PackedFormat::Int8);

    // SAFETY: `columns` bytes of sixteen rows and sixteen scales lie in every panel; rows have a scale per group.
    unsafe {
        let mut sums = [[S::zero(); P]; B];
        for group in 0..columns / GROUP {
            let products = bytes_group::<S, P, B>(lines.from(group * GROUP / 4), rows, group);
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

/// The scales of a group in the header of its block, which holds those of two groups.
#[inline(always)]
unsafe fn block_scales<S: Simd, const P: usize, const B: usize>(
    lines: Lines<'_, P, B>,
    group: usize,
) -> [S::Floats; P] {
    if group.is_multiple_of(2) {
        lines.prefetch(0..1);
    }
    // SAFETY: the caller's promise: a header of each panel at the first line.
    unsafe { each!(S::zero(), |p| S::load_f16(lines.at(p, 0).add(group % 2 * (HEADER / 2)).cast())) }
}

#[inline(always)]
unsafe fn q8_0_tile<S: Simd, const P: usize, const B: usize>(tile: Tile<'_, P, B>) {
    const LINES: usize = GROUP / 4;
    let Tile { columns, rows, .. } = tile;
    let lines = tile.lines(PackedFormat::Q8_0);
    // SAFETY: a block of every panel is a header of two times sixteen scales and two groups of bytes.
    unsafe {
        let mut sums = [[S::zero(); P]; B];
        for group in 0..columns / GROUP {
            let block = group / 2 * (1 + 2 * LINES);
            let scales = block_scales::<S, P, B>(lines.from(block), group);
            let lines = lines.from(block + 1 + group % 2 * LINES);
            let products = bytes_group::<S, P, B>(lines, rows, group);
            add_scaled::<S, P, B>(&mut sums, products, &scales, rows, group);
        }
        tile.store::<S>(sums);
    }
}
dispatch! { fn tile_q8_0[const P: usize, const B: usize][P, B](tile: Tile<'_, P, B>) = q8_0_tile }

#[inline(always)]
unsafe fn q4_0_tile<S: Simd, const P: usize, const B: usize>(tile: Tile<'_, P, B>) {
    const LINES: usize = GROUP / 8;
    let Tile { columns, rows, .. } = tile;
    let lines = tile.lines(PackedFormat::Q4_0);
    // SAFETY: a block of every panel is a header of two times sixteen scales and two groups of half bytes.
    unsafe {
        let mut sums = [[S::zero(); P]; B];
        for group in 0..columns / GROUP {
            let block = group / 2 * (1 + 2 * LINES);
            let scales = block_scales::<S, P, B>(lines.from(block), group);
            let lines = lines.from(block + 1 + group % 2 * LINES);
            let products = nibbles_group::<S, false, P, B>(lines, rows, group, NIBBLE_OFFSET);
            add_scaled::<S, P, B>(&mut sums, products, &scales, rows, group);
        }
        tile.store::<S>(sums);
    }
}
dispatch! { fn tile_q4_0[const P: usize, const B: usize][P, B](tile: Tile<'_, P, B>) = q4_0_tile }

#[inline(always)]
unsafe fn mxfp4_tile<S: Simd, const P: usize, const B: usize>(tile: Tile<'_, P, B>) {
    const CODES: usize = GROUP / 2 * LANES;
    let Tile { columns, weights, rows, .. } = tile;
    let lines = tile.lines(PackedFormat::Mxfp4);

    // SAFETY: groups of half bytes lie in every panel, and sixteen bytes of scales for each behind them.
    unsafe {
        let mut sums = [[S::zero(); P]; B];
        let groups = columns / GROUP;
        for group in 0..groups {
            let at = groups * CODES + group * LANES;
            let scales: [S::Floats; P] = each!(S::zero(), |p| {
                // The table has twice the values.
                S::mul(S::load_powers(weights[p].add(at)), S::splat(0.5))
            });
            let products =
                nibbles_group::<S, true, P, B>(lines.from(group * CODES / LINE), rows, group, E2M1_OFFSET);
            add_scaled::<S, P, B>(&mut sums, products, &scales, rows, group);
        }
        tile.store::<S>(sums);
    }
}
dispatch! { fn tile_mxfp4[const P: usize, const B: usize][P, B](tile: Tile<'_, P, B>) = mxfp4_tile }

#[inline(always)]
unsafe fn nvfp4_tile<S: Simd, const P: usize, const B: usize>(tile: Tile<'_, P, B>) {
    const CODES: usize = NVFP4_GROUP / 2 * LANES;
    let Tile { columns, weights, factors, rows, .. } = tile;
    let lines = tile.lines(PackedFormat::Nvfp4);

    // SAFETY: half groups of half bytes lie in every panel, and sixteen bytes of scales for each behind them; rows have two sums per group.
    unsafe {
        let mut sums = [[S::zero(); P]; B];
        let halves = columns / NVFP4_GROUP;
        for half in 0..halves {
            let at = halves * CODES + half * LANES;
            let scales: [S::Floats; P] = each!(S::zero(), |p| S::load_e4m3(weights[p].add(at)));
            let products = codes::<S, true, 0, { NVFP4_GROUP / 8 }, P, B>(
                lines.from(half * CODES / LINE),
                rows,
                half,
                E2M1_OFFSET,
            );
            add_scaled::<S, P, B>(&mut sums, products, &scales, rows, half / 2);
        }
        for sums in &mut sums {
            for (sum, factor) in sums.iter_mut().zip(factors) {
                // The table has twice the values, and scales come as a 256th of theirs.
                *sum = S::mul(*sum, S::splat(0.5 * e4m3::BELOW_F16 * factor));
            }
        }
        tile.store::<S>(sums);
    }
}
dispatch! { fn tile_nvfp4[const P: usize, const B: usize][P, B](tile: Tile<'_, P, B>) = nvfp4_tile }

#[inline(always)]
unsafe fn int4_tile<S: Simd, const ZEROS: bool, const P: usize, const B: usize>(
    tile: Tile<'_, P, B>,
    weight_group: usize,
) {
    const CODES: usize = GROUP / 2 * LANES;
    let Tile { columns, weights, rows, .. } = tile;
    let lines = tile.lines(PackedFormat::Int4 { group: weight_group, zeros: ZEROS });

    // SAFETY: groups of half bytes lie in every panel, and behind them sixteen scales for each group of weights, with sixteen zeros or without.
    unsafe {
        let mut sums = [[S::zero(); P]; B];
        let groups = columns / GROUP;
        for group in 0..groups {
            let scales_at = groups * CODES + group / (weight_group / GROUP) * int4_scales(ZEROS);
            let scales: [S::Floats; P] = each!(S::zero(), |p| S::load_f16(weights[p].add(scales_at).cast()));
            let offset = if ZEROS { 0 } else { NIBBLE_OFFSET };
            let products =
                nibbles_group::<S, false, P, B>(lines.from(group * CODES / LINE), rows, group, offset);
            if !ZEROS {
                add_scaled::<S, P, B>(&mut sums, products, &scales, rows, group);
                continue;
            }
            for ((sums, products), row) in sums.iter_mut().zip(products).zip(rows) {
                let of_row = S::splat(*row.scales.add(group));
                #[expect(clippy::cast_precision_loss, reason = "32 bytes sum to less than 2^13")]
                let minus_sum = S::splat(-(row.sum(group) as f32));
                for (p, (sum, product)) in sums.iter_mut().zip(products).enumerate() {
                    let zeros = S::load_f16(weights[p].add(scales_at + 2 * LANES).cast());
                    let product = S::mul_add(zeros, minus_sum, S::to_floats(product));
                    *sum = S::mul_add(product, S::mul(scales[p], of_row), *sum);
                }
            }
        }
        tile.store::<S>(sums);
    }
}
dispatch! { fn tile_int4[const ZEROS: bool, const P: usize, const B: usize][ZEROS, P, B](tile: Tile<'_, P, B>, group: usize) = int4_tile }

/// q4_k, and q5_k with one bit more.
#[inline(always)]
unsafe fn ranges_tile<S: Simd, const HIGH: usize, const P: usize, const B: usize>(tile: Tile<'_, P, B>) {
    const GROUPS: usize = SUPER_BLOCK / GROUP;
    let Tile { columns, rows, .. } = tile;
    let lines = tile.lines(if HIGH == 0 { PackedFormat::Q4K } else { PackedFormat::Q5K });
    let (header_lines, group_lines) = (SUPER_HEADER / LINE, GROUP / 8 + HIGH);
    // SAFETY: a block of every panel is a header of scales and eight groups of codes; rows have two sums per group.
    unsafe {
        let mut sums = [[S::zero(); P]; B];
        for block in 0..columns / SUPER_BLOCK {
            let lines = lines.from(block * (header_lines + GROUPS * group_lines));
            lines.prefetch(0..header_lines);
            let d: [S::Floats; P] = each!(S::zero(), |p| S::load_f16(lines.at(p, 0).cast()));
            let d_min: [S::Floats; P] =
                each!(S::zero(), |p| S::load_f16(lines.at(p, 0).add(HEADER / 2).cast()));
            for half in 0..2 {
                // The scales and the minima of four groups, a byte each.
                let mut bytes = [[S::splat_packed(0); 2]; P];
                for (panel, bytes) in bytes.iter_mut().enumerate() {
                    let first = S::load_packed(lines.at(panel, 1));
                    let second = S::load_packed(lines.at(panel, 2));
                    if half == 0 {
                        bytes[0] = S::merge(bytes[0], first, 0x3f3f_3f3f);
                        bytes[1] = S::merge(bytes[1], second, 0x3f3f_3f3f);
                    } else {
                        let low = S::load_packed(lines.at(panel, 3));
                        bytes[0] = S::merge(S::low_halves(low), S::shift_right(first, 2), 0x3030_3030);
                        bytes[1] = S::merge(S::high_halves(low), S::shift_right(second, 2), 0x3030_3030);
                    }
                }
                for index in 0..4 {
                    let within = 4 * half + index;
                    let group = block * GROUPS + within;
                    // A loop and no closures, as in `codes`.
                    let (mut scales, mut mins) = (d, d_min);
                    for ((scale, min), bytes) in scales.iter_mut().zip(&mut mins).zip(&mut bytes) {
                        *scale = S::mul(*scale, S::to_floats(S::low_byte(bytes[0])));
                        *min = S::mul(*min, S::to_floats(S::low_byte(bytes[1])));
                        *bytes = [S::shift_right(bytes[0], 8), S::shift_right(bytes[1], 8)];
                    }
                    let lines = lines.from(header_lines + within * group_lines);
                    let products = codes::<S, false, HIGH, { GROUP / 8 }, P, B>(lines, rows, 2 * group, 0);
                    add_scaled::<S, P, B>(&mut sums, products, &scales, rows, group);
                    for (sums, row) in sums.iter_mut().zip(rows) {
                        #[expect(clippy::cast_precision_loss, reason = "32 bytes sum to less than 2^13")]
                        let of_row = S::splat(-(row.sum(group) as f32) * *row.scales.add(group));
                        for (sum, min) in sums.iter_mut().zip(mins) {
                            *sum = S::mul_add(min, of_row, *sum);
                        }
                    }
                }
            }
        }
        tile.store::<S>(sums);
    }
}
dispatch! { fn tile_ranges[const HIGH: usize, const P: usize, const B: usize][HIGH, P, B](tile: Tile<'_, P, B>) = ranges_tile }

#[inline(always)]
unsafe fn q6_k_tile<S: Simd, const P: usize, const B: usize>(tile: Tile<'_, P, B>) {
    const HALVES: usize = 2 * SUPER_BLOCK / GROUP;
    const HALF_BYTES: usize = 3 * LINE;
    const SCALES: usize = HEADER / 2;
    let Tile { columns, places, rows, .. } = tile;
    let lines = tile.lines(PackedFormat::Q6K);

    // SAFETY: a block of every panel is sixteen bytes of scales of each row, sixteen half groups of codes and sixteen scales, which are before
    // the lines of both panels.
    unsafe {
        let mut sums = [[S::zero(); P]; B];
        for block in 0..columns / SUPER_BLOCK {
            let lines = lines.behind(block * NEIGHBOURS * PackedFormat::Q6K.block_bytes());
            // A line before those of the first of the neighbours.
            let scales: [*const u8; P] = std::array::from_fn(|p| {
                lines.at(p, 0).wrapping_sub(LINE).wrapping_sub(places[p].wrapping_mul(LINE - SCALES))
            });
            lines.behind(LINE.wrapping_neg()).prefetch(0..1);
            let d: [S::Floats; P] = each!(S::zero(), |p| S::load_f16(scales[p].cast()));
            let mut offsets = d;
            for offset in &mut offsets {
                *offset = S::mul(*offset, S::splat(-SCALE_OFFSET));
            }
            // All of them before any code: lines that are loaded out of their order come at four fifths of the rate.
            let mut of_fours = [[S::splat_packed(0); P]; HALVES / 4];
            for (four, bytes) in of_fours.iter_mut().enumerate() {
                lines.prefetch(four..four + 1);
                *bytes = each!(S::splat_packed(0), |p| S::load_packed(lines.at(p, four)));
            }
            for (four, mut bytes) in of_fours.into_iter().enumerate() {
                for index in 0..4 {
                    let within = 4 * four + index;
                    let half = block * HALVES + within;
                    let mut scales = offsets;
                    for ((scale, d), bytes) in scales.iter_mut().zip(d).zip(&mut bytes) {
                        // Exact, fused or not: eleven bits times eight.
                        *scale = S::mul_add(S::to_floats(S::low_byte(*bytes)), d, *scale);
                        *bytes = S::shift_right(*bytes, 8);
                    }
                    let lines = lines.from((SUPER_HEADER + within * HALF_BYTES) / LINE);
                    let products =
                        codes::<S, false, 2, { GROUP / 16 }, P, B>(lines, rows, half, SIX_BIT_OFFSET);
                    add_scaled::<S, P, B>(&mut sums, products, &scales, rows, half / 2);
                }
            }
        }
        tile.store::<S>(sums);
    }
}
dispatch! { fn tile_q6_k[const P: usize, const B: usize][P, B](tile: Tile<'_, P, B>) = q6_k_tile }
