//! Linear layers: panels of weights times packed rows.
//!
//! Enters: a [`PackedMatrix`] (or several, fused) and [`PackedActivations`](super::packed_activations::PackedActivations). Leaves: sixteen sums
//! for each row and panel, passed to a closure that finishes the operation. Weights are read once per step for all rows: a unit of work
//! is a few panels, which stay in the L2 cache while all rows are multiplied with them. The order of the sums depends on the columns
//! only, so neither the number of threads nor the other rows of a batch change a result.
#![expect(unsafe_code, reason = "kernels read packed weights and rows through pointers")]

use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr;

use hbmark_cpu_kernels::rows::InputRow;
use hbmark_cpu_kernels::simd::{InstructionSet, LANES};
use hbmark_cpu_kernels::tiles::{
    MAX_PANELS, MAX_ROWS, NEIGHBOURS, PackedFormat, SLOTS, Sums, TileWork, multiply_tile, release_matrices,
};

use super::kernel_choice::KernelChoice;
use super::packed_activations::InputWriter;
use super::packed_matrix::PackedMatrix;
use super::thread_team::Worker;
use super::{MULTIPLY, PREPARE};

/// Units that each member should have at the least, for an even share.
const UNITS_PER_MEMBER: usize = 8;

/// Bytes of panels that stay in L2: half of the 2 MiB that a core of a server with AMX has.
const BLOCK_BYTES: usize = 1 << 20;

/// Panels of two interleaved parts that are finished together.
const TOGETHER: usize = 2 * NEIGHBOURS;

const _: () = assert!(MAX_PANELS.is_multiple_of(TOGETHER));

/// Matrices whose panels are done in one go over the same rows.
#[derive(Debug)]
pub struct FusedMatrix {
    pub parts: Vec<PackedMatrix>,
    pub biases: Vec<Option<Vec<f32>>>,
    /// [`NEIGHBOURS`] panels of each of two parts alternate instead of one part after another.
    pub interleaved: bool,
    /// Of the parts, each once.
    formats: Vec<PackedFormat>,
    /// Where each panel stands, in the order in which panels are done.
    places: Vec<PanelPosition>,
}

/// Where a panel stands: its part, its number there, and its first line in the bytes of the part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PanelPosition {
    pub part: usize,
    pub panel: usize,
    first_line: usize,
}

impl FusedMatrix {
    /// Parts one after another, or two of as many panels interleaved.
    pub fn new(parts: Vec<PackedMatrix>, biases: Vec<Option<Vec<f32>>>, interleaved: bool) -> Self {
        let of_part = |part: usize, panels: Range<usize>| {
            let matrix: &PackedMatrix = &parts[part];
            panels.map(move |panel| PanelPosition { part, panel, first_line: matrix.first_line(panel) })
        };
        let places = if interleaved {
            let panels = parts[0].panels();
            let pairs = (0..panels).step_by(NEIGHBOURS).map(|first| first..(first + NEIGHBOURS).min(panels));
            pairs
                .flat_map(|pair| (0..parts.len()).flat_map(move |part| of_part(part, pair.clone())))
                .collect()
        } else {
            (0..parts.len()).flat_map(|part| of_part(part, 0..parts[part].panels())).collect()
        };
        let mut formats: Vec<_> = Vec::with_capacity(1);
        for part in &parts {
            if !formats.contains(&part.format) {
                formats.push(part.format);
            }
        }
        Self { parts, biases, interleaved, formats, places }
    }

    /// Panels of all parts.
    pub fn panels(&self) -> usize {
        self.places.len()
    }

    /// Bytes that one pass over all parts reads, biases included.
    pub fn bytes(&self) -> usize {
        let biases: usize = self.biases.iter().flatten().map(|bias| 4 * bias.len()).sum();
        self.parts.iter().map(PackedMatrix::bytes).sum::<usize>() + biases
    }

    /// The place of the n-th panel in the order in which panels are done.
    pub fn place(&self, index: usize) -> PanelPosition {
        self.places[index]
    }

    /// The part of a panel, its first line, and which of its neighbours it is.
    fn panel(&self, index: usize) -> (&PackedMatrix, *const u8, usize) {
        let place = self.place(index);
        let matrix = &self.parts[place.part];
        (matrix, matrix.address(place.first_line), place.panel % NEIGHBOURS)
    }

    /// Panels that a unit of work has, of so many that a job has in all.
    pub fn panels_per_unit(&self, panels: usize, members: usize) -> usize {
        let many = panels >= MAX_PANELS * UNITS_PER_MEMBER * members;
        if many || self.interleaved { MAX_PANELS } else { NEIGHBOURS }
    }

    /// The same where the rows take several tiles of matrices: as many panels as stay in L2, since each unit has all rows read once more.
    fn panels_per_block(&self, panels: usize, members: usize) -> usize {
        let largest = self.parts.iter().map(|part| part.panel_bytes).max().unwrap_or(0);
        let most = (BLOCK_BYTES / largest.max(1)).min(panels / (UNITS_PER_MEMBER * members));
        (most / MAX_PANELS * MAX_PANELS).max(self.panels_per_unit(panels, members))
    }
}

/// Does a member's share of `matrix · rows`, of which `row` is where the i-th is packed. `finish(first_panel, row, sums)` gets the sums of
/// neighbouring panels: `sums[i]` are the sixteen rows of panel `first_panel + i`; of two interleaved parts the first half is of the first part.
///
/// # Safety
/// The rows are packed and not written meanwhile, in the precision and width of the matrix; the set is available.
pub unsafe fn multiply(
    kernels: &KernelChoice,
    worker: &Worker<'_>,
    phase: usize,
    matrix: &FusedMatrix,
    rows: usize,
    row: impl Fn(usize) -> InputRow,
    mut finish: impl FnMut(usize, usize, &[[f32; LANES]]),
) {
    let panels = matrix.panels();
    let tiling = Tiling::new(kernels, matrix, rows, &row);
    let per_unit = if tiling.one_pass.is_none() && tiling.in_matrices {
        matrix.panels_per_block(panels, worker.count)
    } else {
        matrix.panels_per_unit(panels, worker.count)
    };
    let most = if rows <= FEW_ROWS { SHORT_UNITS } else { 1 };
    worker.parallel_for_short(phase, panels.div_ceil(per_unit), most, |unit| {
        let first = unit * per_unit;
        // SAFETY: the caller's promise.
        unsafe { tiling.run(first..(first + per_unit).min(panels), &row, &mut finish) };
    });
}

/// Units of a few rows that a member takes at a time.
const SHORT_UNITS: usize = 8;
const FEW_ROWS: usize = 8;

/// A product of so many rows with a matrix, and the room in which they are packed for it.
#[derive(Clone, Copy)]
pub struct Product<'a> {
    pub kernels: KernelChoice,
    pub matrix: &'a FusedMatrix,
    pub inputs: InputWriter,
    pub rows: usize,
}

impl Product<'_> {
    /// Packed rows that a product of so many needs room for: with one, the others would wait for the member that packs it. So each packs a copy, and
    /// there is no barrier, and no line to fetch from another processor.
    pub fn packed_rows(rows: usize, members: usize) -> usize {
        if rows == 1 { members } else { rows }
    }

    /// Does a member's share: packs rows, of which `row` is the i-th, normed first where there is a norm, and multiplies them as
    /// [`multiply`] does.
    ///
    /// # Safety
    /// The room is for [`Self::packed_rows`] of this team, and nothing else uses it meanwhile; the set is available.
    pub unsafe fn run<'r>(
        &self,
        worker: &Worker<'_>,
        row: impl Fn(usize) -> &'r [f32],
        norm: Option<(&[f32], f32)>,
        finish: impl FnMut(usize, usize, &[[f32; LANES]]),
    ) {
        let Self { kernels, matrix, inputs, rows } = self;
        let first = if *rows == 1 { worker.index } else { 0 };
        // SAFETY: members have different rows of the room; the rest is the caller's promise.
        let pack = |i: usize| unsafe { inputs.pack(kernels.general, first + i, row(i), norm) };
        if *rows == 1 {
            pack(0);
        } else {
            worker.parallel_for(PREPARE, *rows, pack);
            worker.barrier();
        }
        // SAFETY: the rows were packed by this member or before the barrier, for this matrix.
        unsafe { multiply(kernels, worker, MULTIPLY, matrix, *rows, |i| inputs.row(first + i), finish) };
    }
}

/// Does neighbouring panels of a matrix, no more than a unit has, over rows that are picked from the packed ones: what experts need, to
/// each of which other rows are routed. `finish(first_panel, i, sums)` gets the sums of the i-th picked row as in [`multiply`].
///
/// # Safety
/// As [`multiply`].
pub unsafe fn multiply_picked(
    kernels: &KernelChoice,
    matrix: &FusedMatrix,
    panels: Range<usize>,
    inputs: &InputWriter,
    picked: &[u32],
    mut finish: impl FnMut(usize, usize, &[[f32; LANES]]),
) {
    let row = |i: usize| inputs.row(picked[i] as usize);
    // SAFETY: the caller's promise.
    unsafe { Tiling::new(kernels, matrix, picked.len(), &row).run(panels, &row, &mut finish) };
}

/// Does one panel of a matrix over some of the packed rows: what adapters need, whose matrices are of few panels and whose rows are some
/// of a step's. `finish(row, sums)` gets the panel's sixteen sums of a row.
///
/// # Safety
/// As [`multiply`].
pub unsafe fn multiply_panel(
    kernels: &KernelChoice,
    matrix: &FusedMatrix,
    panel: usize,
    inputs: &InputWriter,
    rows: Range<usize>,
    mut finish: impl FnMut(usize, &[f32; LANES]),
) {
    let row = |i: usize| inputs.row(rows.start + i);
    let mut one = |_: usize, i: usize, sums: &[[f32; LANES]]| finish(rows.start + i, &sums[0]);
    // SAFETY: the caller's promise.
    unsafe { Tiling::new(kernels, matrix, rows.len(), &row).run(panel..panel + 1, &row, &mut one) };
}

/// How products of so many rows with a matrix are cut into tiles.
pub struct Tiling<'a> {
    kernels: &'a KernelChoice,
    matrix: &'a FusedMatrix,
    rows: usize,
    /// More panels at a time for few rows than for many.
    panels_of_tile: usize,
    panels_of_strip: usize,
    /// Whether all panels of a unit are done for some rows before the next rows.
    in_matrices: bool,
    /// Rows that are done in one tile: the same for all panels.
    one_pass: Option<TileRows>,
}

/// The rows of a tile.
struct TileRows {
    packed: [InputRow; MAX_ROWS],
    count: usize,
    /// Others were done before with the same panels.
    cached: bool,
}

impl TileRows {
    const NONE: Self = {
        let none = InputRow { words: ptr::null(), scales: ptr::null(), sums: ptr::null() };
        Self { packed: [none; MAX_ROWS], count: 0, cached: false }
    };

    /// As many rows from `first` on as a tile has. A tile of vectors has a power of two of them: one that lacks rows does its last one again, and the
    /// result is dropped, since the bytes are in the first cache.
    fn take(&mut self, first: usize, rows: usize, most: usize, row: &impl Fn(usize) -> InputRow) {
        self.count = (rows - first).min(most);
        self.cached = first > 0;
        let last = self.count - 1;
        for (i, packed) in self.packed[..self.count.next_power_of_two()].iter_mut().enumerate() {
            *packed = row(first + i.min(last));
        }
    }
}

impl<'a> Tiling<'a> {
    /// Of rows of which `row` is where the i-th is packed; at least one.
    pub fn new(
        kernels: &'a KernelChoice,
        matrix: &'a FusedMatrix,
        rows: usize,
        row: &impl Fn(usize) -> InputRow,
    ) -> Self {
        // Parts may be stored differently.
        let formats = || matrix.formats.iter().map(|format| (*format, kernels.of(*format, rows)));
        let tiles = formats().map(|(format, set)| format.panels(set, rows));
        let panels_of_tile = tiles.min().unwrap_or(NEIGHBOURS);
        let most_rows = most_rows(kernels, matrix, rows, panels_of_tile);
        let one_pass = (1..=most_rows).contains(&rows).then(|| {
            let mut all = TileRows::NONE;
            all.take(0, rows, most_rows, row);
            all
        });
        // Panels of interleaved parts are finished together, and so are those whose rows are done in one tile: there is nothing to keep in the first
        // cache for the next.
        let together = matrix.interleaved || one_pass.is_some();
        let panels_of_strip = if together { TOGETHER } else { panels_of_tile };
        // A strip stays in L1 or L2 for the rows of all its tiles of vectors. Tiles of matrices take so little time that the rows, and not the
        // strips, must be read from L1.
        let in_matrices = formats().any(|(format, set)| format.in_matrices(set));
        Self { kernels, matrix, rows, panels_of_tile, panels_of_strip, in_matrices, one_pass }
    }

    /// All rows over the panels of a unit; `finish` is that of [`multiply`].
    ///
    /// # Safety
    /// As [`multiply`]; `row` is as it was.
    pub unsafe fn run(
        &self,
        panels: Range<usize>,
        row: &impl Fn(usize) -> InputRow,
        finish: &mut impl FnMut(usize, usize, &[[f32; LANES]]),
    ) {
        // What is read was written by a tile: zeros would cost one of few columns a part of its time.
        let mut sums = [const { MaybeUninit::<Sums>::uninit() }; MAX_ROWS];
        let mut some = None;
        let per_block = if self.in_matrices { panels.len().max(1) } else { self.panels_of_strip };
        for block in panels.clone().step_by(per_block) {
            let block = block..(block + per_block).min(panels.end);
            let mut first = 0;
            while first < self.rows {
                let rows = if let Some(all) = &self.one_pass {
                    all
                } else {
                    let some = some.get_or_insert(TileRows::NONE);
                    some.take(first, self.rows, self.most_rows(block.len()), row);
                    some
                };
                for start in block.clone().step_by(self.panels_of_strip) {
                    let panels = start..(start + self.panels_of_strip).min(block.end);
                    // SAFETY: the caller's promise.
                    unsafe { self.strip(panels.clone(), rows, &mut sums) };
                    for (i, sums) in sums.iter().enumerate().take(rows.count) {
                        // SAFETY: the tiles have written the sums of all panels of this row.
                        let sums = unsafe { std::slice::from_raw_parts(sums.as_ptr().cast(), panels.len()) };
                        finish(panels.start, first + i, sums);
                    }
                }
                first += rows.count;
            }
        }
    }

    /// Panels of the tiles of a strip.
    fn width(&self, panels: usize) -> usize {
        let format = self.matrix.parts[0].format;
        panels.next_power_of_two().min(self.panels_of_tile).max(format.fewest_panels())
    }

    /// Rows of the tiles of a strip.
    fn most_rows(&self, panels: usize) -> usize {
        most_rows(self.kernels, self.matrix, self.rows, self.width(panels))
    }

    /// The panels of the tile that a member does next, as far as it can be known; behind the last one its own.
    fn next(
        &self,
        first: usize,
        tile: &[(&PackedMatrix, *const u8, usize); MAX_PANELS],
    ) -> [*const u8; MAX_PANELS] {
        std::array::from_fn(|i| {
            let next = first + i;
            if next < self.matrix.panels() { self.matrix.panel(next).1 } else { tile[i].1 }
        })
    }

    /// Rows over neighbouring panels, those of one format together.
    unsafe fn strip(&self, panels: Range<usize>, rows: &TileRows, sums: &mut [MaybeUninit<Sums>; MAX_ROWS]) {
        let (matrix, width) = (self.matrix, self.width(panels.len()));
        let mut start = panels.start;
        while start < panels.end {
            // Parts may be stored differently: a tile is of one format and width. A tile that lacks panels does its last one again.
            let mut tile = [matrix.panel(start); MAX_PANELS];
            let lead = tile[0].0;
            let mut count = 1;
            for index in (start + 1..panels.end).take(width - 1) {
                let next = matrix.panel(index);
                if next.0.format != lead.format {
                    break;
                }
                tile[count..].fill(next);
                count += 1;
            }
            let work = TileWork {
                columns: lead.padded_columns(),
                panels: tile.map(|(_, lines, _)| lines),
                places: tile.map(|(.., place)| place),
                cached: rows.cached,
                past_caches: self.kernels.past_caches(lead.format),
                next: self.next(start + count, &tile),
                span: lead.panel_span(),
                factors: tile.map(|(part, ..)| part.factor),
                rows: &rows.packed,
                out: sums.as_mut_ptr().cast(),
                slot: start - panels.start,
            };
            let set = self.kernels.of(lead.format, self.rows);
            // SAFETY: panels are as long as their format says, rows as wide as the matrix by the caller's promise, and `out` has
            // room for the largest tile at the last slot.
            unsafe { multiply_tile(set, lead.format, (width, rows.count), &work) };
            start += count;
        }
    }
}

/// Rows that tiles of so many panels have in all parts of a matrix.
fn most_rows(kernels: &KernelChoice, matrix: &FusedMatrix, rows: usize, panels: usize) -> usize {
    let of_format = |format: &PackedFormat| format.most_rows(kernels.of(*format, rows), panels);
    matrix.formats.iter().map(of_format).min().unwrap_or(1)
}

/// The first panels of a matrix over a few rows, in tiles of a set, to be timed; the first sum of the last tile.
///
/// # Safety
/// The set is available; so many rows are packed behind `inputs` for the matrix.
pub unsafe fn first_tiles(
    set: InstructionSet,
    matrix: &PackedMatrix,
    panels: usize,
    inputs: &InputWriter,
    rows: usize,
    past_caches: bool,
) -> f32 {
    let (width, last) = (matrix.format.panels(set, rows), matrix.panels() - 1);
    let tile_rows = matrix.format.most_rows(set, width).min(rows);
    let mut sums: [Sums; MAX_ROWS] = [[[0.0; LANES]; SLOTS]; MAX_ROWS];
    let mut some = TileRows::NONE;
    for panel in (0..panels).step_by(width) {
        for row in (0..rows).step_by(tile_rows) {
            some.take(row, rows, tile_rows, &|row| inputs.row(row));
            let work = TileWork {
                columns: matrix.padded_columns(),
                panels: std::array::from_fn(|i| matrix.panel((panel + i).min(last))),
                places: std::array::from_fn(|i| (panel + i).min(last) % NEIGHBOURS),
                cached: some.cached,
                past_caches,
                next: std::array::from_fn(|i| matrix.panel((panel + width + i).min(last))),
                span: matrix.panel_span(),
                factors: [matrix.factor; MAX_PANELS],
                rows: &some.packed,
                out: sums.as_mut_ptr(),
                slot: 0,
            };
            // SAFETY: the caller's promise; `out` has room for the largest tile.
            unsafe { multiply_tile(set, matrix.format, (width, some.count), &work) };
        }
    }
    release_matrices();
    sums[0][0][0]
}
