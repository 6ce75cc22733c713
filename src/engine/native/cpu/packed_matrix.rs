//! Weights packed for streaming.
//!
//! Enters: a row-major [`StoredMatrix`]. Leaves: a [`PackedMatrix`]: panels of sixteen rows, each one contiguous stream, in which sixteen
//! neighbouring values belong to sixteen rows. A step reads every panel once from its first byte to its last, and a vector register
//! holds one value of each row, so that nothing is ever summed across lanes. The same panels serve decode, batches and prefill.
//!
//! | format | a panel is, over its columns |
//! |---|---|
//! | f32, f16 | columns × 16 values |
//! | bf16 | pairs of columns × 16 pairs |
//! | fp8 | columns × 16 codes; then 16 scales, f32, or one for each block of columns |
//! | int8 | quads of columns × 16 quads of (q + 128); then 16 scales, f32 |
//! | q8_0 | per 64 columns: 2 × 16 scales, f16; 16 × 16 quads of (q + 128) |
//! | q4_0 | per 64 columns: 2 × 16 scales, f16; 8 × 16 × 4 bytes: columns 0–3 of each 8 in the low halves, 4–7 in the high |
//! | mxfp8 | as fp8; then 16 scales, a byte each, for every 32 columns |
//! | mxfp4 | per 32 columns: as q4_0 without scales; then 16 scales, a byte each, for every 32 columns |
//! | nvfp4 | as mxfp4, with 16 scales for every 16 columns; the scale of the matrix is beside it |
//! | int4 | per group: as q4_0 without scales; then for every group 16 scales, f16, and 16 zeros where not all are 8 |
//! | q4_k, q5_k | per 256 columns: 16 scales and 16 scales of minima, f16; 3 × 16 × 4 bytes of 6-bit scales and minima as in a file; then per 32 columns the fifth bits, 16 × 4 bytes, and the others as q4_0 |
//! | q6_k | per 256 columns: 16 scales, f16; 4 × 16 quads of (scale + 128); then per 16 columns the two high bits, 16 × 4 bytes, and the low four as q4_0 |
//!
//! In q8_0, q4_0 and the blocks of 256 the lines of two neighbouring panels alternate, 64 bytes of one and 64 of the other, so that a tile of both
//! reads one stream. Of q6_k the scales of both make the first line of a block.
//!
//! Every format takes the bytes of the file it comes from and no more, but for rows and columns that are filled up to whole panels and blocks.

use std::ops::Range;

use half::f16;
use hbmark_cpu_kernels::simd::LANES;
use hbmark_cpu_kernels::tiles::{self, GROUP, HEADER, LINE, PackedFormat, SUPER_HEADER, int4_scales};
use hbmark_cpu_kernels::{e2m1, e4m3, e8m0};

use super::huge_pages::{Arena, Region};
use crate::engine::EngineError;
use crate::engine::native::operations::ACTIVATION_GROUP;
use crate::engine::native::refuse;
use crate::weights::stored_matrix::{SUPER_BLOCK, SuperBlock, scale_and_min};
use crate::weights::{StoredData, StoredMatrix};
use hbmark_core::model::NVFP4_GROUP;

const _: () = assert!(
    GROUP == ACTIVATION_GROUP && tiles::NVFP4_GROUP == NVFP4_GROUP && tiles::SUPER_BLOCK == SUPER_BLOCK
);

/// The packed format of a stored matrix.
fn format_of(stored: &StoredMatrix) -> Result<PackedFormat, EngineError> {
    Ok(match &stored.data {
        StoredData::F32(_) => PackedFormat::F32,
        StoredData::F16(_) => PackedFormat::F16,
        StoredData::Bf16(_) => PackedFormat::Bf16,
        StoredData::Int8 { .. } => PackedFormat::Int8,
        StoredData::Fp8 { block: None, .. } => PackedFormat::Fp8 { group: None },
        StoredData::Fp8 { scales, block: Some([_, group]), .. } => {
            if !group.is_multiple_of(2) || !panels_share_scales(scales, stored.columns.div_ceil(*group)) {
                return refuse(
                    format!(
                        "{} in columns of {group} whose scales differ within {LANES} rows",
                        stored.storage()
                    ),
                    "blocks must have a multiple of 16 rows and an even number of columns, such as 128 of each",
                );
            }
            PackedFormat::Fp8 { group: Some(*group) }
        }
        StoredData::Q8_0 { .. } => PackedFormat::Q8_0,
        StoredData::Q4_0 { .. } => PackedFormat::Q4_0,
        StoredData::Mxfp8 { .. } => PackedFormat::Mxfp8,
        StoredData::Mxfp4 { .. } => PackedFormat::Mxfp4,
        StoredData::Nvfp4 { .. } => PackedFormat::Nvfp4,
        StoredData::Int4 { zeros, group, .. } if group.is_multiple_of(GROUP) && *group > 0 => {
            PackedFormat::Int4 { group: *group, zeros: zeros.iter().any(|zero| *zero != f16::from_f32(8.0)) }
        }
        StoredData::Int4 { group, .. } => {
            return refuse(
                format!("int4 in groups of {group}"),
                format!("groups must be a multiple of {GROUP}"),
            );
        }
        StoredData::Super { format, .. } if stored.columns.is_multiple_of(SUPER_BLOCK) => match format {
            SuperBlock::Q4K => PackedFormat::Q4K,
            SuperBlock::Q5K => PackedFormat::Q5K,
            SuperBlock::Q6K => PackedFormat::Q6K,
        },
        StoredData::Super { format, .. } => {
            return refuse(
                format!("{} in rows of {}", format.name(), stored.columns),
                format!("ggml keeps whole blocks of {SUPER_BLOCK}; choose q8_0 or q4_0"),
            );
        }
    })
}

/// The most bytes of a block of a format whose panels' lines alternate.
const MAX_BLOCK: usize = PackedFormat::Q6K.block_bytes();

/// Where a panel's first line is in the bytes of its matrix.
fn first_line(format: PackedFormat, panel_bytes: usize, panel: usize) -> usize {
    let neighbours = format.neighbours();
    let before_lines = if neighbours > 1 { neighbours * (format.block_bytes() % LINE) } else { 0 };
    neighbours_at(format, panel_bytes, panel) + before_lines + panel % neighbours * LINE
}

/// Where a panel and its neighbours begin in the bytes of its matrix.
fn neighbours_at(format: PackedFormat, panel_bytes: usize, panel: usize) -> usize {
    panel / format.neighbours() * format.neighbours() * panel_bytes
}

/// The pieces of a block of a panel whose lines alternate with its neighbours': their places in the block and in the packed bytes, from the
/// beginning of all that neighbours have of the block. What a block has beyond whole lines comes first.
fn pieces(format: PackedFormat, panel: usize) -> impl Iterator<Item = (Range<usize>, usize)> {
    let (stride, first) = (format.line_stride(), format.block_bytes() % LINE);
    let (neighbours, lines) = (format.neighbours(), format.block_bytes() / LINE);
    let place = panel % neighbours;
    let lines = (0..lines).map(move |line| {
        let from = first + line * LINE;
        (from..from + LINE, neighbours * first + line * stride + place * LINE)
    });
    std::iter::once((0..first, place * first)).chain(lines)
}

/// A matrix `[rows, columns]` in panels of sixteen rows.
#[derive(Debug)]
pub struct PackedMatrix {
    pub rows: usize,
    pub columns: usize,
    pub format: PackedFormat,
    pub panel_bytes: usize,
    /// What all values are multiplied with: the scale of nvfp4, otherwise 1.
    pub factor: f32,
    region: Region,
}

impl PackedMatrix {
    /// Packs a stored matrix. `touch` is called with the memory and the bytes of a panel before anything is written, so that each
    /// thread can touch the panels it will read.
    pub fn new(
        arena: &mut Arena,
        stored: &StoredMatrix,
        touch: impl FnOnce(&mut [u8], usize),
    ) -> Result<Self, EngineError> {
        let format = format_of(stored)?;
        let blocks = stored.columns.div_ceil(format.block_columns());
        let tail = match format {
            PackedFormat::Int8 | PackedFormat::Fp8 { group: None } => 4 * LANES,
            PackedFormat::Fp8 { group: Some(group) } => 4 * stored.columns.div_ceil(group),
            PackedFormat::Mxfp8 => stored.columns.div_ceil(GROUP) * LANES,
            PackedFormat::Mxfp4 => blocks * LANES,
            PackedFormat::Nvfp4 => blocks * GROUP / NVFP4_GROUP * LANES,
            PackedFormat::Int4 { zeros, .. } => blocks * int4_scales(zeros),
            _ => 0,
        };
        let panel_bytes = blocks * format.block_bytes() + tail;
        let panels = stored.rows.div_ceil(LANES);
        let neighbours = format.neighbours();
        let size = panels.next_multiple_of(neighbours) * panel_bytes;
        let mut region = arena.take(size).map_err(|error| EngineError::OutOfMemory {
            device: "cpu".into(),
            detail: format!("{size} bytes of weights: {error}"),
        })?;
        let bytes = region.bytes_mut();
        touch(bytes, panel_bytes);
        let pack = |panel: usize, bytes: &mut [u8]| {
            for lane in 0..LANES.min(stored.rows - panel * LANES) {
                pack_row(stored, panel * LANES + lane, lane, format, bytes);
            }
        };
        if neighbours == 1 {
            let panels = bytes.chunks_exact_mut(panel_bytes.max(1)).enumerate();
            panels.for_each(|(panel, bytes)| pack(panel, bytes));
        } else {
            let mut own = vec![0; panel_bytes];
            for panel in 0..panels {
                own.fill(0);
                pack(panel, &mut own);
                let of_neighbours = &mut bytes[neighbours_at(format, panel_bytes, panel)..];
                let blocks = of_neighbours.chunks_exact_mut(neighbours * format.block_bytes());
                for (packed, block) in blocks.zip(own.chunks_exact(format.block_bytes())) {
                    for (piece, to) in pieces(format, panel) {
                        packed[to..to + piece.len()].copy_from_slice(&block[piece]);
                    }
                }
            }
        }
        let factor =
            if let StoredData::Nvfp4 { tensor_scale, .. } = stored.data { tensor_scale } else { 1.0 };
        let (rows, columns) = (stored.rows, stored.columns);
        Ok(Self { rows, columns, format, panel_bytes, factor, region })
    }

    /// Panels of sixteen rows, the last one padded.
    pub fn panels(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    /// The first line of a panel; the next are [`PackedFormat::line_stride`] apart.
    pub fn panel(&self, panel: usize) -> *const u8 {
        self.address(self.first_line(panel))
    }

    /// A place in the packed bytes. Of q6_k a tile reads before the first line of a panel, so that the pointer is one to all of them.
    pub fn address(&self, first_line: usize) -> *const u8 {
        let bytes = self.packed_bytes();
        assert!(first_line <= bytes.len(), "a panel of this matrix");
        bytes.as_ptr().wrapping_add(first_line)
    }

    /// Bytes from the first line of a panel to the end of its last.
    pub fn panel_span(&self) -> usize {
        self.format.neighbours() * self.panel_bytes
    }

    /// Where a panel's first line is in [`packed_bytes`](Self::packed_bytes).
    pub fn first_line(&self, panel: usize) -> usize {
        first_line(self.format, self.panel_bytes, panel)
    }

    /// All panels as they are packed.
    pub fn packed_bytes(&self) -> &[u8] {
        self.region.bytes()
    }

    /// Bytes that one pass over the matrix reads.
    pub fn bytes(&self) -> usize {
        let factor = if self.format == PackedFormat::Nvfp4 { size_of_val(&self.factor) } else { 0 };
        self.panels() * self.panel_bytes + factor
    }

    /// Columns with padding: what a packed row of activations must have.
    pub fn padded_columns(&self) -> usize {
        self.columns.next_multiple_of(self.format.block_columns())
    }

    /// Unpacks a row into `out`, as f32.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        let (panel, lane, format) = (row / LANES, row % LANES, self.format);
        let neighbours = format.neighbours();
        let of_neighbours = &self.packed_bytes()[neighbours_at(format, self.panel_bytes, panel)..];
        if neighbours == 1 {
            return self.unpack(&of_neighbours[..self.panel_bytes], lane, out);
        }
        let mut block = [0; MAX_BLOCK];
        let block = &mut block[..format.block_bytes()];
        let blocks = of_neighbours.chunks_exact(neighbours * format.block_bytes());
        for (packed, out) in blocks.zip(out[..self.columns].chunks_mut(format.block_columns())) {
            for (piece, from) in pieces(format, panel) {
                let length = piece.len();
                block[piece].copy_from_slice(&packed[from..from + length]);
            }
            self.unpack(block, lane, out);
        }
    }

    /// Unpacks a row of a panel, or of some of its blocks where those are all that there is.
    fn unpack(&self, panel: &[u8], lane: usize, out: &mut [f32]) {
        let format = self.format;
        let (block_columns, block_bytes) = (format.block_columns(), format.block_bytes());
        for (column, out) in out.iter_mut().enumerate().take(self.columns) {
            let block = &panel[column / block_columns * block_bytes..];
            let within = column % block_columns;
            let in_super_block = |format| super_value(format, &block[..block_bytes], within, lane);
            *out = match format {
                PackedFormat::F32 => f32::from_le_bytes(at(block, 4 * lane)),
                PackedFormat::F16 => f16::from_le_bytes(at(block, 2 * lane)).to_f32(),
                PackedFormat::Bf16 => half::bf16::from_le_bytes(at(block, 4 * lane + 2 * within)).to_f32(),
                PackedFormat::Int8 => {
                    let scale = f32::from_le_bytes(at(&panel[panel.len() - 4 * LANES..], 4 * lane));
                    (f32::from(block[quad(within, lane)]) - 128.0) * scale
                }
                PackedFormat::Fp8 { group } => {
                    let scales = &panel[self.padded_columns() * LANES..];
                    let scale = group.map_or(lane, |group| column / group);
                    e4m3::to_f32(block[within * LANES + lane]) * f32::from_le_bytes(at(scales, 4 * scale))
                }
                PackedFormat::Q8_0 => {
                    let scale = header(block, within / GROUP, lane);
                    (f32::from(block[HEADER + quad(within, lane)]) - 128.0) * scale
                }
                PackedFormat::Q4_0 => {
                    let scale = header(block, within / GROUP, lane);
                    (f32::from(nibble(&block[HEADER..], within, lane)) - 8.0) * scale
                }
                PackedFormat::Mxfp8 => {
                    let scale = panel[self.padded_columns() * LANES + column / GROUP * LANES + lane];
                    e4m3::to_f32(block[within * LANES + lane]) * e8m0::power(scale)
                }
                PackedFormat::Mxfp4 => {
                    let scales = &panel[self.columns.div_ceil(block_columns) * block_bytes..];
                    let scale = scales[column / GROUP * LANES + lane];
                    e2m1::to_f32(nibble(block, within, lane)) * e8m0::power(scale)
                }
                PackedFormat::Nvfp4 => {
                    let scales = &panel[self.columns.div_ceil(block_columns) * block_bytes..];
                    let scale = scales[column / NVFP4_GROUP * LANES + lane];
                    e2m1::to_f32(nibble(block, within, lane)) * e4m3::to_f32(scale) * self.factor
                }
                PackedFormat::Int4 { zeros, .. } => {
                    let scales = self.columns.div_ceil(block_columns) * block_bytes
                        + column / block_columns * int4_scales(zeros);
                    let scales = &panel[scales..];
                    let zero = if zeros { header(scales, 1, lane) } else { 8.0 };
                    (f32::from(nibble(block, within, lane)) - zero) * header(scales, 0, lane)
                }
                PackedFormat::Q4K => in_super_block(SuperBlock::Q4K),
                PackedFormat::Q5K => in_super_block(SuperBlock::Q5K),
                PackedFormat::Q6K => in_super_block(SuperBlock::Q6K),
            };
        }
    }
}

/// Whether the rows of each panel have the same scales, of which a row has so many.
fn panels_share_scales(scales: &[f32], groups: usize) -> bool {
    scales.chunks(LANES * groups).all(|panel| {
        panel
            .chunks(groups)
            .all(|row| row.iter().zip(panel).all(|(own, first)| own.to_bits() == first.to_bits()))
    })
}

/// Where a column's byte lies among quads of sixteen rows.
fn quad(column: usize, lane: usize) -> usize {
    column / 4 * 4 * LANES + 4 * lane + column % 4
}

/// Where a column's half byte lies, and whether it is the high one.
fn half_byte(column: usize, lane: usize) -> (usize, bool) {
    (column / 8 * 4 * LANES + 4 * lane + column % 4, column % 8 >= 4)
}

fn nibble(bytes: &[u8], column: usize, lane: usize) -> u8 {
    let (index, high) = half_byte(column, lane);
    if high { bytes[index] >> 4 } else { bytes[index] & 15 }
}

/// Columns of a block of 256 whose high bits share a vector.
fn span(format: SuperBlock) -> usize {
    if format == SuperBlock::Q6K { GROUP / 2 } else { GROUP }
}

/// Where a column's code is in a block of 256: its half byte, whether that is the high half, its high bits and how far up they are.
fn code_place(format: SuperBlock, column: usize, lane: usize) -> (usize, bool, usize, usize) {
    let (span, bits) = (span(format), format.high_bits());
    let (high_vectors, within) = (bits.min(1), column % span);
    let at = lines_at(format) + SUPER_HEADER + column / span * (high_vectors * LINE + span * LANES / 2);
    let (index, is_high) = half_byte(within, lane);
    // The first octet of columns has the bits that need no shift: a kernel moves them down by `bits` for each octet.
    let shift = bits * (within / 8) + if is_high { 0 } else { 4 };
    (at + high_vectors * LINE + index, is_high, at + 4 * lane + within % 4, shift)
}

/// Where byte `index` of a row's scales is in a block of 256.
fn scale_place(format: SuperBlock, index: usize, lane: usize) -> usize {
    // Behind the f16 scales of the rows, which those of the minima follow.
    let first = if format == SuperBlock::Q6K { HEADER / 2 } else { HEADER };
    first + quad(index, lane)
}

/// Where whole lines begin in a block of 256: what is before them is in a line with that of the neighbour.
fn lines_at(format: SuperBlock) -> usize {
    format.bytes() * LANES % LINE
}

/// One value of a block of 256 columns of sixteen rows.
fn super_value(format: SuperBlock, block: &[u8], column: usize, lane: usize) -> f32 {
    let (low, is_high, above, shift) = code_place(format, column, lane);
    let mut code = if is_high { block[low] >> 4 } else { block[low] & 15 };
    if format.high_bits() > 0 {
        code |= (block[above] >> shift & ((1 << format.high_bits()) - 1)) << 4;
    }
    let d = header(block, 0, lane);
    let byte = |index| block[scale_place(format, index, lane)];
    if format == SuperBlock::Q6K {
        return d * (f32::from(byte(column / span(format))) - 128.0) * (f32::from(code) - 32.0);
    }
    let (scale, min) = scale_and_min(&std::array::from_fn::<u8, 12, _>(byte), column / GROUP);
    d * f32::from(scale) * f32::from(code) - header(block, 1, lane) * f32::from(min)
}

/// Writes one block of 256 columns into its lane of a zeroed block of a panel.
fn pack_super(format: SuperBlock, stored: &[u8], lane: usize, block: &mut [u8]) {
    for (column, code) in format.codes(stored).into_iter().enumerate() {
        let (low, is_high, above, shift) = code_place(format, column, lane);
        block[low] |= if is_high { code << 4 } else { code & 15 };
        if format.high_bits() > 0 {
            block[above] |= code >> 4 << shift;
        }
    }
    let sign = if format == SuperBlock::Q6K { 0x80 } else { 0 };
    for (index, byte) in format.scale_bytes(stored).iter().enumerate() {
        block[scale_place(format, index, lane)] = byte ^ sign;
    }
    let [d, d_min] = format.block_scales(stored).map(f16::to_le_bytes);
    let at = 2 * lane;
    block[at..at + 2].copy_from_slice(&d);
    if format != SuperBlock::Q6K {
        block[at + 2 * LANES..at + 2 * LANES + 2].copy_from_slice(&d_min);
    }
}

fn header(block: &[u8], index: usize, lane: usize) -> f32 {
    f16::from_le_bytes(at(block, 2 * (index * LANES + lane))).to_f32()
}

fn at<const N: usize>(bytes: &[u8], index: usize) -> [u8; N] {
    *bytes[index..].first_chunk().expect("the panel is as long as its format says")
}

/// Writes one row into its lane of a zeroed panel.
fn pack_row(stored: &StoredMatrix, row: usize, lane: usize, format: PackedFormat, panel: &mut [u8]) {
    let columns = stored.columns;
    let (block_columns, block_bytes) = (format.block_columns(), format.block_bytes());
    let plain = |panel: &mut [u8], column: usize, bytes: &[u8]| {
        let at = column / block_columns * block_bytes
            + block_columns * bytes.len() * lane
            + bytes.len() * (column % block_columns);
        panel[at..at + bytes.len()].copy_from_slice(bytes);
    };
    let scales = |panel: &mut [u8], values: &[f16], group: usize, slot_of: &dyn Fn(usize) -> usize| {
        for (index, scale) in values.iter().enumerate() {
            let block = index * group / block_columns * block_bytes;
            let at = block + 2 * (slot_of(index) * LANES + lane);
            panel[at..at + 2].copy_from_slice(&scale.to_le_bytes());
        }
    };
    let own = row * columns..(row + 1) * columns;
    match &stored.data {
        StoredData::F32(values) => {
            values[own].iter().enumerate().for_each(|(c, v)| plain(panel, c, &v.to_le_bytes()));
        }
        StoredData::F16(values) => {
            values[own].iter().enumerate().for_each(|(c, v)| plain(panel, c, &v.to_le_bytes()));
        }
        StoredData::Bf16(values) => {
            values[own].iter().enumerate().for_each(|(c, v)| plain(panel, c, &v.to_le_bytes()));
        }
        StoredData::Int8 { quants, scales: row_scales } => {
            pack_quads(&quants[own], lane, panel, block_columns, block_bytes, 0);
            let at = panel.len() - 4 * LANES + 4 * lane;
            panel[at..at + 4].copy_from_slice(&row_scales[row].to_le_bytes());
        }
        StoredData::Fp8 { codes, scales, block } => {
            for (column, code) in codes[own].iter().enumerate() {
                panel[column * LANES + lane] = *code;
            }
            let groups = scales.len() / stored.rows;
            let (to, _) = panel[columns.next_multiple_of(block_columns) * LANES..].as_chunks_mut::<4>();
            let to = if block.is_some() { to } else { &mut to[lane..] };
            let own = &scales[row * groups..(row + 1) * groups];
            to.iter_mut().zip(own).for_each(|(to, scale)| *to = scale.to_le_bytes());
        }
        StoredData::Q8_0 { quants, scales: all } => {
            let groups = columns.div_ceil(GROUP);
            let padded = groups * GROUP;
            let quants = &quants[row * padded..(row + 1) * padded];
            pack_quads(quants, lane, panel, block_columns, block_bytes, HEADER);
            scales(panel, &all[row * groups..(row + 1) * groups], GROUP, &|index| index % 2);
        }
        StoredData::Q4_0 { nibbles, scales: all } => {
            let groups = columns.div_ceil(GROUP);
            let half_row = groups * GROUP / 2;
            let nibbles = &nibbles[row * half_row..(row + 1) * half_row];
            pack_nibbles(nibbles, lane, panel, block_columns, block_bytes, HEADER);
            scales(panel, &all[row * groups..(row + 1) * groups], GROUP, &|index| index % 2);
        }
        StoredData::Mxfp8 { codes, scales } => {
            for (column, code) in codes[own].iter().enumerate() {
                panel[column * LANES + lane] = *code;
            }
            let codes = columns.next_multiple_of(block_columns) * LANES;
            pack_bytes(scales, row, columns.div_ceil(GROUP), lane, &mut panel[codes..]);
        }
        StoredData::Mxfp4 { nibbles, scales } | StoredData::Nvfp4 { nibbles, scales, .. } => {
            // A row is stored in whole groups of its own, and here in those of the activations.
            let group = if format == PackedFormat::Nvfp4 { NVFP4_GROUP } else { GROUP };
            let groups = columns.div_ceil(group);
            let half_row = groups * group / 2;
            let nibbles = &nibbles[row * half_row..(row + 1) * half_row];
            pack_nibbles(nibbles, lane, panel, block_columns, block_bytes, 0);
            let codes = columns.div_ceil(block_columns) * block_bytes;
            pack_bytes(scales, row, groups, lane, &mut panel[codes..]);
        }
        StoredData::Int4 { nibbles, scales: all, zeros, group } => {
            let groups = columns.div_ceil(*group);
            let half_row = groups * group / 2;
            let nibbles = &nibbles[row * half_row..(row + 1) * half_row];
            pack_nibbles(nibbles, lane, panel, block_columns, block_bytes, 0);
            let with_zeros = matches!(format, PackedFormat::Int4 { zeros: true, .. });
            let own = row * groups..(row + 1) * groups;
            let of_groups = panel[groups * block_bytes..].chunks_exact_mut(int4_scales(with_zeros));
            for ((to, scale), zero) in of_groups.zip(&all[own.clone()]).zip(&zeros[own]) {
                for (to, value) in to.chunks_exact_mut(2 * LANES).zip([scale, zero]) {
                    to[2 * lane..2 * lane + 2].copy_from_slice(&value.to_le_bytes());
                }
            }
        }
        StoredData::Super { format, blocks } => {
            let row_bytes = columns / SUPER_BLOCK * format.bytes();
            let row = &blocks[row * row_bytes..(row + 1) * row_bytes];
            let blocks = row.chunks_exact(format.bytes()).zip(panel.chunks_exact_mut(block_bytes));
            blocks.for_each(|(stored, block)| pack_super(*format, stored, lane, block));
        }
    }
}

/// The scales of a row, a byte each, beside those of the others.
fn pack_bytes(scales: &[u8], row: usize, groups: usize, lane: usize, panel: &mut [u8]) {
    let own = &scales[row * groups..(row + 1) * groups];
    panel.chunks_exact_mut(LANES).zip(own).for_each(|(of_rows, scale)| of_rows[lane] = *scale);
}

/// Signed bytes as unsigned ones, quad by quad. A padded column stays 0, which stands for -128: its activation is 0.
fn pack_quads(quants: &[i8], lane: usize, panel: &mut [u8], columns: usize, bytes: usize, header: usize) {
    for (column, quant) in quants.iter().enumerate() {
        let block = column / columns * bytes + header;
        panel[block + quad(column % columns, lane)] = quant.cast_unsigned() ^ 0x80;
    }
}

/// Half bytes from two columns to a byte to eight columns over a quad.
fn pack_nibbles(nibbles: &[u8], lane: usize, panel: &mut [u8], columns: usize, bytes: usize, header: usize) {
    for column in 0..2 * nibbles.len() {
        let value =
            if column.is_multiple_of(2) { nibbles[column / 2] & 15 } else { nibbles[column / 2] >> 4 };
        let (index, high) = half_byte(column % columns, lane);
        let block = column / columns * bytes + header;
        panel[block + index] |= if high { value << 4 } else { value };
    }
}
