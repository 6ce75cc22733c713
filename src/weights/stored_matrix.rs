//! Matrices in the row-major formats that the native engine streams from memory.
//!
//! Enters: rows of floats, or a matrix in another of these formats. Leaves: a [`StoredMatrix`]: values and scales in
//! separate arrays, or ggml's blocks of 256 as they are, each of them a whole number of elements per row, so that a thread takes rows without
//! looking at those before. An engine may lay the arrays out again.

mod columns;
mod pack;
mod super_block;
mod transposed;

use half::{bf16, f16};
use hbmark_cpu_kernels::element::Element;
use hbmark_cpu_kernels::{e2m1, e4m3, e8m0};

use hbmark_core::model::{Dtype, Format, ModuleStorage, NVFP4_GROUP, Scales, TensorInfo};
use hbmark_core::units::Bytes;

pub use super_block::{SUPER_BLOCK, SuperBlock, scale_and_min};

/// Columns that share a scale in ggml's `q8_0` and `q4_0`, in mxfp4 and in mxfp8.
pub const BLOCK: usize = 32;

/// One tensor as an engine takes it.
#[derive(Debug, Clone, PartialEq)]
pub enum StoredTensor {
    Matrix(StoredMatrix),
    /// A norm or a bias: few values, read once for a whole row of outputs.
    Vector(Vec<f32>),
}

impl StoredTensor {
    /// Everything it holds.
    pub fn bytes(&self) -> Bytes {
        match self {
            Self::Matrix(matrix) => matrix.bytes(),
            Self::Vector(values) => Bytes(size_of_val(values.as_slice()) as u64),
        }
    }

    /// Its values, row after row.
    pub fn values(&self) -> Vec<f32> {
        match self {
            Self::Vector(values) => values.clone(),
            Self::Matrix(matrix) => {
                let mut values = vec![0.0; matrix.rows * matrix.columns];
                for (row, out) in values.chunks_mut(matrix.columns).enumerate() {
                    matrix.row(row, out);
                }
                values
            }
        }
    }
}

/// A matrix `[rows, columns]`, row-major, in one of the formats the native engine streams.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredMatrix {
    pub rows: usize,
    pub columns: usize,
    pub data: StoredData,
}

/// The arrays of a [`StoredMatrix`].
///
/// Formats with groups pad each row to whole groups, so a row of `scales` has `columns.div_ceil(group)` elements and a row
/// of `quants` that times `group`. Padding is never part of [`StoredMatrix::row`]; in `q8_0` and `q4_0` it stands for zeros.
#[derive(Debug, Clone, PartialEq)]
pub enum StoredData {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    /// One scale per row: `value = q · scale`; this program makes q in −127..=127.
    Int8 {
        quants: Vec<i8>,
        scales: Vec<f32>,
    },
    /// 8-bit floats: `value = e4m3(code) · scale`; no code is NaN. One scale per row, or one per row and so many columns as a block has.
    ///
    /// Rows of a block `[rows, columns]` have the same scales, which are kept with each of them: rows can then be picked in any order.
    Fp8 {
        codes: Vec<u8>,
        scales: Vec<f32>,
        block: Option<[usize; 2]>,
    },
    /// ggml's `q8_0`: one scale per 32 columns of a row, `value = q · scale`.
    Q8_0 {
        quants: Vec<i8>,
        scales: Vec<f16>,
    },
    /// ggml's `q4_0`: one scale per 32 columns of a row, `value = (nibble − 8) · scale`.
    ///
    /// Byte i of a row holds column 2i in its low half and column 2i + 1 in its high half; ggml's files keep columns j and
    /// j + 16 of a block together instead.
    Q4_0 {
        nibbles: Vec<u8>,
        scales: Vec<f16>,
    },
    /// 8-bit floats with one power of two per 32 columns of a row ([`e8m0`]): `value = e4m3(code) · 2^(scale − 127)`; no code is NaN, and no scale
    /// beyond 2^119, so that sums of all values are numbers.
    Mxfp8 {
        codes: Vec<u8>,
        scales: Vec<u8>,
    },
    /// 4-bit floats with one scale per 32 columns of a row: `value = e2m1(nibble) · 2^(scale − 127)`; no scale is 255.
    ///
    /// Nibbles lie as in `Q4_0`, and so do those of published checkpoints.
    Mxfp4 {
        nibbles: Vec<u8>,
        scales: Vec<u8>,
    },
    /// 4-bit floats with one 8-bit float per 16 columns of a row, and a scale of all: `value = e2m1(nibble) · e4m3(scale) · tensor_scale`; no scale is NaN.
    ///
    /// Nibbles lie as in `Q4_0`, and so do those of published checkpoints.
    Nvfp4 {
        nibbles: Vec<u8>,
        scales: Vec<u8>,
        tensor_scale: f32,
    },
    /// Groups of `group` columns with a scale and a whole zero in 0..=15: `value = (nibble − zero) · scale`.
    ///
    /// Nibbles lie as in `Q4_0`; where `group` is odd a row of nibbles is padded to a whole byte.
    Int4 {
        nibbles: Vec<u8>,
        scales: Vec<f16>,
        zeros: Vec<f16>,
        group: usize,
    },
    /// ggml's blocks of 256 columns as a file has them, scales inside.
    Super {
        format: SuperBlock,
        blocks: Vec<u8>,
    },
}

/// Which format a matrix is in, or is to be packed into.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Packing {
    F32,
    F16,
    Bf16,
    Int8,
    /// With a scale per row, or per block of rows and columns, each at least 1.
    Fp8 {
        block: Option<[usize; 2]>,
    },
    Q8_0,
    Q4_0,
    Mxfp8,
    Mxfp4,
    Nvfp4,
    /// `group` is at least 1.
    Int4 {
        group: usize,
    },
    Super(SuperBlock),
}

impl Packing {
    /// What the native engine streams, and multiplies in its own way: one of each kind.
    pub const NATIVE: [Self; 14] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Int8,
        Self::Fp8 { block: None },
        Self::Q8_0,
        Self::Q4_0,
        Self::Mxfp8,
        Self::Mxfp4,
        Self::Nvfp4,
        Self::Int4 { group: 32 },
        Self::Super(SuperBlock::Q4K),
        Self::Super(SuperBlock::Q5K),
        Self::Super(SuperBlock::Q6K),
    ];

    /// The packing of a dtype's linear layers; `int4_group` is [`Architecture::int4_group`](hbmark_core::model::Architecture::int4_group).
    ///
    /// `None` for `gguf`, whose matrices each have their own.
    pub fn of(dtype: Dtype, int4_group: usize) -> Option<Self> {
        Self::named(dtype.name(), int4_group)
    }

    /// The name in inventories.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
            Self::Fp8 { .. } => "fp8",
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
            Self::Mxfp8 => "mxfp8",
            Self::Mxfp4 => "mxfp4",
            Self::Nvfp4 => "nvfp4",
            Self::Int4 { .. } => "int4",
            Self::Super(format) => format.name(),
        }
    }

    /// The packing of an inventory's storage name, which is that of a dtype, too.
    fn named(storage: &str, int4_group: usize) -> Option<Self> {
        let packing = Self::NATIVE.into_iter().find(|packing| packing.name() == storage)?;
        Some(match packing {
            Self::Int4 { .. } => Self::Int4 { group: int4_group.max(1) },
            other => other,
        })
    }

    /// The packing of a tensor of a model, whose config may say which blocks of its fp8 share a scale; `None` where none has the storage.
    pub(crate) fn of_tensor(
        info: &TensorInfo,
        int4_group: usize,
        formats: Option<&ModuleStorage>,
    ) -> Option<Self> {
        let format = || formats?.format(super::quantised::module(&info.name));
        match Self::named(&info.storage, int4_group)? {
            Self::Fp8 { .. } => Some(match format() {
                Some(Format::Fp8 { scales: Scales::Block { rows, columns }, .. }) => {
                    Self::Fp8 { block: Some([rows, columns]) }
                }
                _ => Self::Fp8 { block: None },
            }),
            // A whole row is a group of the widest that there is: padding rows to it would take its memory.
            Self::Int4 { group } => {
                let widest = info.shape.last().copied().unwrap_or(1).next_multiple_of(BLOCK);
                Some(Self::Int4 { group: group.min(widest) })
            }
            other => Some(other),
        }
    }

    /// Columns that share a scale; 1 for plain floats.
    fn group(self, columns: usize) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Int8 | Self::Fp8 { block: None } => columns.max(1),
            Self::Fp8 { block: Some([_, columns]) } => columns,
            Self::Q8_0 | Self::Q4_0 | Self::Mxfp8 | Self::Mxfp4 => BLOCK,
            Self::Nvfp4 => NVFP4_GROUP,
            Self::Int4 { group } => group,
            Self::Super(_) => SUPER_BLOCK,
        }
    }

    /// Elements of the arrays that one row takes.
    fn row_shape(self, columns: usize) -> RowShape {
        let group = self.group(columns);
        let groups = columns.div_ceil(group);
        // The last block of a row may have fewer columns.
        let padded = if matches!(self, Self::Fp8 { .. } | Self::Mxfp8) { columns } else { groups * group };
        let values = match self {
            Self::Q4_0 | Self::Mxfp4 | Self::Nvfp4 | Self::Int4 { .. } => padded.div_ceil(2),
            Self::Super(format) => groups * format.bytes(),
            _ => padded,
        };
        RowShape { values, groups, padded }
    }
}

/// What one row takes of each array.
#[derive(Debug, Clone, Copy)]
struct RowShape {
    /// Elements of the array of values: floats, quants, bytes of two nibbles, or bytes of blocks.
    values: usize,
    /// Scales, and zeros where there are any; blocks of 256 have theirs inside.
    groups: usize,
    /// Columns, rounded up to whole groups.
    padded: usize,
}

/// Nibble `column` of a row.
fn nibble(row: &[u8], column: usize) -> u8 {
    (row[column / 2] >> (4 * (column % 2))) & 0xF
}

impl StoredMatrix {
    /// The rows of another matrix below its own; `None` where the two are not plain floats of one kind and width.
    pub fn extended(mut self, below: Self) -> Option<Self> {
        match (&mut self.data, below.data) {
            _ if self.columns != below.columns => return None,
            (StoredData::F32(own), StoredData::F32(more)) => own.extend(more),
            (StoredData::F16(own), StoredData::F16(more)) => own.extend(more),
            (StoredData::Bf16(own), StoredData::Bf16(more)) => own.extend(more),
            _ => return None,
        }
        Some(Self { rows: self.rows + below.rows, ..self })
    }

    /// Some of its rows, as they are stored.
    pub fn slice_rows(&self, rows: std::ops::Range<usize>) -> Self {
        self.pick_rows(rows)
    }

    /// As [`slice_rows`](Self::slice_rows), in any order.
    pub fn pick_rows(&self, rows: impl IntoIterator<Item = usize, IntoIter: ExactSizeIterator>) -> Self {
        let rows = rows.into_iter();
        let mut picked = Self::blank(rows.len(), self.columns, self.packing());
        for (to, row) in rows.enumerate() {
            picked.copy_row(to, self, row);
        }
        picked
    }

    /// A matrix of zeros, except that padding and zeros of `q4_0` and `int4` are whatever 0 bits mean there.
    pub(crate) fn blank(rows: usize, columns: usize, packing: Packing) -> Self {
        let RowShape { values, groups, .. } = packing.row_shape(columns);
        let values = values * rows;
        let scales = || vec![f16::ZERO; rows * groups];
        let data = match packing {
            Packing::F32 => StoredData::F32(vec![0.0; values]),
            Packing::F16 => StoredData::F16(vec![f16::ZERO; values]),
            Packing::Bf16 => StoredData::Bf16(vec![bf16::ZERO; values]),
            Packing::Int8 => StoredData::Int8 { quants: vec![0; values], scales: vec![0.0; rows * groups] },
            Packing::Fp8 { block } => {
                StoredData::Fp8 { codes: vec![0; values], scales: vec![0.0; rows * groups], block }
            }
            Packing::Q8_0 => StoredData::Q8_0 { quants: vec![0; values], scales: scales() },
            Packing::Q4_0 => StoredData::Q4_0 { nibbles: vec![0; values], scales: scales() },
            Packing::Mxfp8 => StoredData::Mxfp8 { codes: vec![0; values], scales: vec![0; rows * groups] },
            Packing::Mxfp4 => StoredData::Mxfp4 { nibbles: vec![0; values], scales: vec![0; rows * groups] },
            Packing::Nvfp4 => {
                let (nibbles, scales) = (vec![0; values], vec![0; rows * groups]);
                StoredData::Nvfp4 { nibbles, scales, tensor_scale: 0.0 }
            }
            Packing::Int4 { group } => {
                StoredData::Int4 { nibbles: vec![0; values], scales: scales(), zeros: scales(), group }
            }
            Packing::Super(format) => StoredData::Super { format, blocks: vec![0; values] },
        };
        Self { rows, columns, data }
    }

    /// The format.
    pub fn packing(&self) -> Packing {
        match self.data {
            StoredData::F32(_) => Packing::F32,
            StoredData::F16(_) => Packing::F16,
            StoredData::Bf16(_) => Packing::Bf16,
            StoredData::Int8 { .. } => Packing::Int8,
            StoredData::Fp8 { block, .. } => Packing::Fp8 { block },
            StoredData::Q8_0 { .. } => Packing::Q8_0,
            StoredData::Q4_0 { .. } => Packing::Q4_0,
            StoredData::Mxfp8 { .. } => Packing::Mxfp8,
            StoredData::Mxfp4 { .. } => Packing::Mxfp4,
            StoredData::Nvfp4 { .. } => Packing::Nvfp4,
            StoredData::Int4 { group, .. } => Packing::Int4 { group },
            StoredData::Super { format, .. } => Packing::Super(format),
        }
    }

    /// The format's name in inventories.
    pub fn storage(&self) -> &'static str {
        self.packing().name()
    }

    /// Bytes of all arrays, padding included.
    pub fn bytes(&self) -> Bytes {
        let scales = match &self.data {
            StoredData::F32(_) | StoredData::F16(_) | StoredData::Bf16(_) | StoredData::Super { .. } => 0,
            StoredData::Int8 { scales, .. } | StoredData::Fp8 { scales, .. } => {
                size_of_val(scales.as_slice())
            }
            StoredData::Q8_0 { scales, .. } | StoredData::Q4_0 { scales, .. } => {
                size_of_val(scales.as_slice())
            }
            StoredData::Mxfp8 { scales, .. } | StoredData::Mxfp4 { scales, .. } => scales.len(),
            StoredData::Nvfp4 { scales, tensor_scale, .. } => scales.len() + size_of_val(tensor_scale),
            StoredData::Int4 { scales, zeros, .. } => {
                size_of_val(scales.as_slice()) + size_of_val(zeros.as_slice())
            }
        };
        Bytes(self.value_bytes().0 + scales as u64)
    }

    /// Bytes of the values alone: without scales and zeros, but for those inside blocks of 256.
    pub fn value_bytes(&self) -> Bytes {
        let bytes = match &self.data {
            StoredData::F32(values) => size_of_val(values.as_slice()),
            StoredData::F16(values) => size_of_val(values.as_slice()),
            StoredData::Bf16(values) => size_of_val(values.as_slice()),
            StoredData::Int8 { quants, .. } | StoredData::Q8_0 { quants, .. } => quants.len(),
            StoredData::Fp8 { codes: bytes, .. }
            | StoredData::Mxfp8 { codes: bytes, .. }
            | StoredData::Q4_0 { nibbles: bytes, .. }
            | StoredData::Mxfp4 { nibbles: bytes, .. }
            | StoredData::Nvfp4 { nibbles: bytes, .. }
            | StoredData::Int4 { nibbles: bytes, .. }
            | StoredData::Super { blocks: bytes, .. } => bytes.len(),
        };
        Bytes(bytes as u64)
    }

    /// Writes the values of one row.
    ///
    /// # Panics
    /// When there is no row `row`, or `out` is not one row long.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        assert_eq!(out.len(), self.columns, "the width of a row");
        let shape = self.packing().row_shape(self.columns);
        let values = row * shape.values..(row + 1) * shape.values;
        let groups = row * shape.groups..(row + 1) * shape.groups;
        match &self.data {
            StoredData::F32(all) => out.copy_from_slice(&all[values]),
            StoredData::F16(all) => widen(out, &all[values], f16::to_f32),
            StoredData::Bf16(all) => widen(out, &all[values], bf16::to_f32),
            StoredData::Int8 { quants, scales } => {
                let scale = scales[row];
                widen(out, &quants[values], |q| f32::from(q) * scale);
            }
            StoredData::Fp8 { codes, scales, .. } => {
                let group = self.packing().group(self.columns);
                let blocks = out.chunks_mut(group).zip(codes[values].chunks(group));
                for ((out, codes), scale) in blocks.zip(&scales[groups]) {
                    widen(out, codes, |code| e4m3::to_f32(code) * scale);
                }
            }
            StoredData::Q8_0 { quants, scales } => {
                let blocks = out.chunks_mut(BLOCK).zip(quants[values].chunks(BLOCK));
                for ((out, quants), scale) in blocks.zip(&scales[groups]) {
                    let scale = scale.to_f32();
                    widen(out, quants, |q| f32::from(q) * scale);
                }
            }
            StoredData::Q4_0 { nibbles, scales } => {
                let (nibbles, scales) = (&nibbles[values], &scales[groups]);
                for (column, out) in out.iter_mut().enumerate() {
                    *out = (f32::from(nibble(nibbles, column)) - 8.0) * scales[column / BLOCK].to_f32();
                }
            }
            StoredData::Mxfp8 { codes, scales } => {
                let blocks = out.chunks_mut(BLOCK).zip(codes[values].chunks(BLOCK));
                for ((out, codes), scale) in blocks.zip(&scales[groups]) {
                    widen(out, codes, |code| e4m3::to_f32(code) * e8m0::power(*scale));
                }
            }
            StoredData::Mxfp4 { nibbles, scales } => {
                let (nibbles, scales) = (&nibbles[values], &scales[groups]);
                for (column, out) in out.iter_mut().enumerate() {
                    *out = e2m1::to_f32(nibble(nibbles, column)) * e8m0::power(scales[column / BLOCK]);
                }
            }
            StoredData::Nvfp4 { nibbles, scales, tensor_scale } => {
                let (nibbles, scales) = (&nibbles[values], &scales[groups]);
                for (column, out) in out.iter_mut().enumerate() {
                    let scale = e4m3::to_f32(scales[column / NVFP4_GROUP]);
                    *out = e2m1::to_f32(nibble(nibbles, column)) * scale * tensor_scale;
                }
            }
            StoredData::Int4 { nibbles, scales, zeros, group } => {
                let (nibbles, scales, zeros) = (&nibbles[values], &scales[groups.clone()], &zeros[groups]);
                for (column, out) in out.iter_mut().enumerate() {
                    let (scale, zero) = (scales[column / group].to_f32(), zeros[column / group].to_f32());
                    *out = (f32::from(nibble(nibbles, column)) - zero) * scale;
                }
            }
            StoredData::Super { format, blocks } => {
                let blocks = blocks[values].chunks_exact(format.bytes());
                out.chunks_mut(SUPER_BLOCK).zip(blocks).for_each(|(out, block)| format.values(block, out));
            }
        }
    }

    /// Copies row `row` of a matrix of the same width and packing to row `to` of this one, with the scale of the whole matrix where there is one.
    pub(crate) fn copy_row(&mut self, to: usize, from: &Self, row: usize) {
        assert_eq!((self.columns, self.packing()), (from.columns, from.packing()), "rows of one kind");
        let mut copy = RowCopy { to, row, rows: (self.rows, from.rows) };
        self.each_array(from, &mut copy);
    }

    /// Every array of this matrix with that of another in the same packing; the scale of the whole matrix is taken over.
    fn each_array(&mut self, from: &Self, copy: &mut impl ArrayCopy) {
        match (&mut self.data, &from.data) {
            (StoredData::F32(into), StoredData::F32(from)) => copy.array(into, from),
            (StoredData::F16(into), StoredData::F16(from)) => copy.array(into, from),
            (StoredData::Bf16(into), StoredData::Bf16(from)) => copy.array(into, from),
            (StoredData::Int8 { quants, scales }, StoredData::Int8 { quants: q, scales: s }) => {
                copy.array(quants, q);
                copy.array(scales, s);
            }
            (StoredData::Q8_0 { quants, scales }, StoredData::Q8_0 { quants: q, scales: s }) => {
                copy.array(quants, q);
                copy.array(scales, s);
            }
            (StoredData::Fp8 { codes, scales, .. }, StoredData::Fp8 { codes: c, scales: s, .. }) => {
                copy.array(codes, c);
                copy.array(scales, s);
            }
            (StoredData::Q4_0 { nibbles, scales }, StoredData::Q4_0 { nibbles: n, scales: s }) => {
                copy.array(nibbles, n);
                copy.array(scales, s);
            }
            (StoredData::Mxfp8 { codes: own, scales }, StoredData::Mxfp8 { codes: other, scales: s })
            | (StoredData::Mxfp4 { nibbles: own, scales }, StoredData::Mxfp4 { nibbles: other, scales: s }) =>
            {
                copy.array(own, other);
                copy.array(scales, s);
            }
            (
                StoredData::Nvfp4 { nibbles, scales, tensor_scale },
                StoredData::Nvfp4 { nibbles: n, scales: s, tensor_scale: scale },
            ) => {
                copy.array(nibbles, n);
                copy.array(scales, s);
                *tensor_scale = *scale;
            }
            (
                StoredData::Int4 { nibbles, scales, zeros, .. },
                StoredData::Int4 { nibbles: n, scales: s, zeros: z, .. },
            ) => {
                copy.array(nibbles, n);
                copy.array(scales, s);
                copy.array(zeros, z);
            }
            (StoredData::Super { blocks, .. }, StoredData::Super { blocks: b, .. }) => copy.array(blocks, b),
            _ => unreachable!("the packings are equal"),
        }
    }
}

/// What is copied of each array of a matrix, whatever its elements are.
trait ArrayCopy {
    fn array<T: Copy>(&mut self, into: &mut [T], from: &[T]);
}

/// One row; `rows` are those of both matrices.
struct RowCopy {
    to: usize,
    row: usize,
    rows: (usize, usize),
}

impl ArrayCopy for RowCopy {
    fn array<T: Copy>(&mut self, into: &mut [T], from: &[T]) {
        let (width, own) = (from.len() / self.rows.1, into.len() / self.rows.0);
        assert_eq!(own, width, "rows of one width");
        into[self.to * width..][..width].copy_from_slice(&from[self.row * width..][..width]);
    }
}

fn widen<T: Copy>(out: &mut [f32], values: &[T], value: impl Fn(T) -> f32) {
    for (out, &stored) in out.iter_mut().zip(values) {
        *out = value(stored);
    }
}

/// Whether no value is NaN or infinite. Looks at all of them: without an early end it is fast enough to go with every read.
pub(crate) fn all_finite<T: PlainFloat>(values: &[T]) -> bool {
    values.iter().fold(true, |all, value| all & value.widen().is_finite())
}

/// A plain float that a matrix can be kept in.
pub(crate) trait PlainFloat: candle_core::WithDType + Element {
    fn of_f16(value: f16) -> Self {
        Self::narrow(value.to_f32())
    }
    fn of_bf16(value: bf16) -> Self {
        Self::narrow(value.to_f32())
    }
    /// The values as the data of a matrix.
    fn data(values: Vec<Self>) -> StoredData;
}

impl PlainFloat for f32 {
    fn data(values: Vec<Self>) -> StoredData {
        StoredData::F32(values)
    }
}

impl PlainFloat for f16 {
    fn of_f16(value: f16) -> Self {
        value
    }
    fn data(values: Vec<Self>) -> StoredData {
        StoredData::F16(values)
    }
}

impl PlainFloat for bf16 {
    fn of_bf16(value: bf16) -> Self {
        value
    }
    fn data(values: Vec<Self>) -> StoredData {
        StoredData::Bf16(values)
    }
}

#[cfg(test)]
mod tests;
