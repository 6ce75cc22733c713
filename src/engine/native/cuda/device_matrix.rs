//! Weights as the kernels stream them.
//!
//! Enters: the parts of a linear layer as they are stored. Leaves: a [`Matrix`] on the device: row-major, padded with zeros to
//! whole 16-byte vectors, and rows that one warp needs together next to each other.

use super::device::Device;
use super::ggml_blocks::{lower_bits, words_beside};
use crate::engine::EngineError;
use crate::engine::native::operations::{FusedLayout, LinearPart};
use crate::weights::stored_matrix::SuperBlock;
use crate::weights::{Packing, StoredData, StoredMatrix};
use hbmark_cpu_kernels::e4m3;

/// Bytes of a load.
pub const VECTOR: usize = 16;

/// What the elements of a matrix are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KernelFormat {
    Bf16,
    F16,
    F32,
    /// 8 bits, and a scale per output.
    Int8,
    /// 8-bit floats (e4m3), and a scale per output.
    Fp8,
    /// The same, and an f32 for the columns of a block, which 16 outputs have by twos.
    Fp8Block,
    /// The same, and a byte of e8m0 for every two vectors.
    Mxfp8,
    /// 4-bit floats (e2m1), and a byte of e8m0 for every vector.
    Mxfp4,
    /// The same, and two bytes of e4m3 for every vector; an f32 per output.
    Nvfp4,
    /// 4-bit integers, and a word with a scale and a zero for every group of columns.
    Int4,
    /// ggml's blocks, whose scales and further bits are in words beside the vectors (`blocks.cuh`).
    Q8_0,
    Q4_0,
    Q4K,
    Q5K,
    Q6K,
}

impl KernelFormat {
    /// The format of a stored matrix.
    fn of(packing: Packing) -> Self {
        match packing {
            Packing::Bf16 => Self::Bf16,
            Packing::F16 => Self::F16,
            Packing::F32 => Self::F32,
            Packing::Int8 => Self::Int8,
            Packing::Fp8 { block: None } => Self::Fp8,
            Packing::Fp8 { .. } => Self::Fp8Block,
            Packing::Mxfp8 => Self::Mxfp8,
            Packing::Mxfp4 => Self::Mxfp4,
            Packing::Nvfp4 => Self::Nvfp4,
            Packing::Int4 { .. } => Self::Int4,
            Packing::Q8_0 => Self::Q8_0,
            Packing::Q4_0 => Self::Q4_0,
            Packing::Super(SuperBlock::Q4K) => Self::Q4K,
            Packing::Super(SuperBlock::Q5K) => Self::Q5K,
            Packing::Super(SuperBlock::Q6K) => Self::Q6K,
        }
    }

    /// As in the names of kernels.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F32 => "f32",
            Self::Int8 => "int8",
            Self::Fp8 => "fp8",
            Self::Fp8Block => "fp8_block",
            Self::Mxfp8 => "mxfp8",
            Self::Mxfp4 => "mxfp4",
            Self::Nvfp4 => "nvfp4",
            Self::Int4 => "int4",
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
            Self::Q4K => "q4_k",
            Self::Q5K => "q5_k",
            Self::Q6K => "q6_k",
        }
    }

    /// Columns in a vector.
    pub fn columns(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => VECTOR / 2,
            Self::F32 => VECTOR / 4,
            Self::Int8 | Self::Fp8 | Self::Fp8Block | Self::Mxfp8 | Self::Q8_0 => VECTOR,
            Self::Mxfp4 | Self::Nvfp4 | Self::Int4 | Self::Q4_0 | Self::Q4K | Self::Q5K | Self::Q6K => {
                2 * VECTOR
            }
        }
    }

    /// The format whose inputs it meets on tensor cores.
    pub fn of_inputs(self) -> Self {
        match self {
            Self::Fp8Block | Self::Mxfp8 => Self::Fp8,
            Self::Int4 => Self::Mxfp4,
            // Widened.
            Self::Q8_0 | Self::Q4_0 | Self::Q4K | Self::Q5K | Self::Q6K => Self::Bf16,
            other => other,
        }
    }

    /// Words of a row, such as scales of groups of columns, that are on their way beside each vector of weights.
    pub fn words_beside(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 | Self::F32 | Self::Int8 | Self::Fp8 => 0,
            Self::Fp8Block
            | Self::Mxfp8
            | Self::Mxfp4
            | Self::Nvfp4
            | Self::Int4
            | Self::Q8_0
            | Self::Q4_0
            | Self::Q4K => 1,
            Self::Q5K => 2,
            Self::Q6K => 4,
        }
    }

    /// Whether it is one of ggml's.
    pub fn is_of_ggml(self) -> bool {
        matches!(self, Self::Q8_0 | Self::Q4_0 | Self::Q4K | Self::Q5K | Self::Q6K)
    }

    /// Vectors of a row. Rows of 8-bit integers are whole groups of 32 columns, as the activations they meet.
    pub fn vectors(self, columns: usize) -> usize {
        match self {
            Self::Int8 | Self::Q8_0 => columns.div_ceil(2 * VECTOR) * 2,
            _ => columns.div_ceil(self.columns()),
        }
    }
}

/// A matrix `[outputs, columns]` on a device.
#[derive(Debug)]
pub struct Matrix<D: Device> {
    pub format: KernelFormat,
    pub outputs: usize,
    pub columns: usize,
    /// 16-byte vectors of a row.
    pub vectors: usize,
    /// `2^shift` vectors of a row share a word of scales, where scales are words of groups.
    pub shift: u32,
    pub data: D::Memory,
    pub scales: Option<D::Memory>,
    pub bias: Option<D::Memory>,
    /// The heads of Q, K and V that are in another format: their outputs follow.
    pub following: Vec<Self>,
}

impl<D: Device> Matrix<D> {
    /// Packs the parts of a fused layer.
    pub fn new(device: &mut D, parts: &[LinearPart], layout: FusedLayout) -> Result<Self, EngineError> {
        let of_ggml = |part: &LinearPart| KernelFormat::of(part.matrix.packing()).is_of_ggml();
        if !matches!(layout, FusedLayout::Heads { .. }) || !parts.iter().all(of_ggml) {
            return Self::of_one_format(device, parts, layout);
        }
        let mut runs = parts
            .chunk_by(|a, b| a.matrix.packing() == b.matrix.packing())
            .map(|run| Self::of_one_format(device, run, layout))
            .collect::<Result<Vec<_>, _>>()?;
        let following = runs.split_off(1);
        let mut first = runs.remove(0);
        if !following.is_empty() {
            // A product of all of them at once takes the biases of all.
            let all = parts.iter().any(|part| part.bias.is_some()).then(|| order(parts, layout));
            first.bias = all.map(|order| biases(device, parts, &order)).transpose()?;
        }
        Ok(Self { following, ..first })
    }

    fn of_one_format(device: &mut D, parts: &[LinearPart], layout: FusedLayout) -> Result<Self, EngineError> {
        let first = &parts[0].matrix;
        let format = KernelFormat::of(first.packing());
        for LinearPart { matrix, .. } in parts {
            if (matrix.packing(), matrix.columns) != (first.packing(), first.columns) {
                return super::super::refuse(
                    format!("{} beside {} in one fused layer", first.storage(), matrix.storage()),
                    "the matrices of a fused layer must be of one format and width; Q, K and V may differ among q8_0, q6_k, q5_k, q4_k and q4_0",
                );
            }
        }
        let order = order(parts, layout);
        let vectors = format.vectors(first.columns);
        let threads = threads_for(order.len() * vectors * VECTOR);
        let data = uploaded(device, &packed(parts, &order, vectors * VECTOR, threads))?;
        let shift = shift(first, format, vectors)?;
        let scales = match format {
            KernelFormat::Int8 | KernelFormat::Fp8 | KernelFormat::Nvfp4 => {
                let of_row = |&(part, row): &(usize, usize)| row_scale(&parts[part].matrix, row);
                let mut bytes: Vec<u8> = order.iter().flat_map(|row| of_row(row).to_le_bytes()).collect();
                if format.words_beside() > 0 {
                    bytes.extend(group_scales(parts, &order));
                }
                Some(uploaded(device, &bytes)?)
            }
            KernelFormat::Mxfp8 | KernelFormat::Mxfp4 => {
                Some(uploaded(device, &group_scales(parts, &order))?)
            }
            KernelFormat::Int4 => Some(words(device, &int4_words(parts, &order)?)?),
            KernelFormat::Fp8Block => Some(words(device, &block_words(parts, &order)?)?),
            KernelFormat::Q8_0
            | KernelFormat::Q4_0
            | KernelFormat::Q4K
            | KernelFormat::Q5K
            | KernelFormat::Q6K => {
                let rows = order.iter().map(|&(part, row)| (&parts[part].matrix, row));
                Some(uploaded(device, &words_beside(format, &rows))?)
            }
            KernelFormat::Bf16 | KernelFormat::F16 | KernelFormat::F32 => None,
        };
        let has_bias = parts.iter().any(|part| part.bias.is_some());
        let bias = has_bias.then(|| biases(device, parts, &order)).transpose()?;
        Ok(Self {
            format,
            outputs: order.len(),
            columns: first.columns,
            vectors,
            shift,
            data,
            scales,
            bias,
            following: Vec::new(),
        })
    }

    /// Vectors of a row of the inputs that it meets, by which those are prepared.
    pub fn input_vectors(&self) -> usize {
        if self.format.is_of_ggml() {
            self.vectors * self.format.columns() / KernelFormat::Bf16.columns()
        } else {
            self.vectors
        }
    }

    /// Bytes in bf16, with those that follow.
    pub fn widened_bytes(&self) -> usize {
        self.all_outputs() * self.input_vectors() * VECTOR
    }

    /// This one and those whose outputs follow.
    pub fn runs(&self) -> impl Iterator<Item = &Self> {
        std::iter::once(self).chain(&self.following)
    }

    /// Outputs, with those that follow.
    pub fn all_outputs(&self) -> usize {
        self.runs().map(|run| run.outputs).sum()
    }

    /// Bytes of weights, scales and biases: what one pass over the matrix reads, without those that follow.
    pub fn bytes(&self) -> u64 {
        let scales = self.scales.as_ref().map_or(0, D::bytes);
        let biases = if self.bias.is_some() { 4 * self.outputs } else { 0 };
        (self.outputs * self.vectors * VECTOR + scales + biases) as u64
    }
}

/// The biases of outputs in their order, zeros where a part has none.
fn biases<D: Device>(
    device: &mut D,
    parts: &[LinearPart],
    order: &[(usize, usize)],
) -> Result<D::Memory, EngineError> {
    let bias = |&(part, row): &(usize, usize)| parts[part].bias.as_ref().map_or(0.0, |bias| bias[row]);
    floats(device, &order.iter().map(bias).collect::<Vec<f32>>())
}

/// A vector of f32 on the device.
pub fn floats<D: Device>(device: &mut D, values: &[f32]) -> Result<D::Memory, EngineError> {
    uploaded(device, &values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>())
}

fn words<D: Device>(device: &mut D, values: &[u32]) -> Result<D::Memory, EngineError> {
    uploaded(device, &values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>())
}

fn uploaded<D: Device>(device: &mut D, bytes: &[u8]) -> Result<D::Memory, EngineError> {
    let memory = device.allocate(bytes.len())?;
    device.upload(&memory, 0, bytes)?;
    Ok(memory)
}

/// Bytes that are worth a thread.
const THREAD_BYTES: usize = 4 << 20;

/// The threads that pack so many bytes: one core would take longer over a model than its way to the device.
fn threads_for(bytes: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    cores.min(bytes / THREAD_BYTES).max(1)
}

/// Rows of so many bytes in an order, each thread a run of them.
fn packed(parts: &[LinearPart], order: &[(usize, usize)], row_size: usize, threads: usize) -> Vec<u8> {
    let mut bytes = vec![0; order.len() * row_size];
    if bytes.is_empty() {
        return bytes;
    }
    let rows = order.len().div_ceil(threads);
    std::thread::scope(|scope| {
        for (order, out) in order.chunks(rows).zip(bytes.chunks_mut(rows * row_size)) {
            let mut pack = move || {
                for (&(part, row), out) in order.iter().zip(out.chunks_exact_mut(row_size)) {
                    row_bytes(&parts[part].matrix, row, out);
                }
            };
            if threads == 1 {
                pack();
            } else {
                scope.spawn(pack);
            }
        }
    });
    bytes
}

/// Part and row of each output, in the order in which they lie.
fn order(parts: &[LinearPart], layout: FusedLayout) -> Vec<(usize, usize)> {
    let stacked =
        parts.iter().enumerate().flat_map(|(part, p)| (0..p.matrix.rows).map(move |row| (part, row)));
    match layout {
        FusedLayout::Stacked => stacked.collect(),
        FusedLayout::Interleaved => {
            (0..parts[0].matrix.rows).flat_map(|row| (0..parts.len()).map(move |part| (part, row))).collect()
        }
        FusedLayout::Heads { head_dim } => {
            let plain: Vec<_> = stacked.collect();
            let halves = |head: &[(usize, usize)]| {
                let (first, second) = head.split_at(head_dim / 2);
                first.iter().zip(second).flat_map(|(a, b)| [*a, *b]).collect::<Vec<_>>()
            };
            plain.chunks_exact(head_dim).flat_map(halves).collect()
        }
    }
}

/// The elements of a row; what is behind them stays as it is.
fn row_bytes(matrix: &StoredMatrix, row: usize, out: &mut [u8]) {
    fn put<T: Copy, const N: usize>(out: &mut [u8], values: &[T], bytes: impl Fn(T) -> [u8; N]) {
        let (out, _) = out.as_chunks_mut::<N>();
        out.iter_mut().zip(values).for_each(|(out, value)| *out = bytes(*value));
    }
    let range = row * matrix.columns..(row + 1) * matrix.columns;
    match &matrix.data {
        StoredData::F32(values) => put(out, &values[range], f32::to_le_bytes),
        StoredData::F16(values) => put(out, &values[range], half::f16::to_le_bytes),
        StoredData::Bf16(values) => put(out, &values[range], half::bf16::to_le_bytes),
        StoredData::Int8 { quants, .. } => put(out, &quants[range], i8::to_le_bytes),
        StoredData::Fp8 { codes, .. } | StoredData::Mxfp8 { codes, .. } => {
            put(out, &codes[range], u8::to_le_bytes);
        }
        StoredData::Q8_0 { quants, .. } => {
            let stride = quants.len() / matrix.rows;
            put(out, &quants[row * stride..(row + 1) * stride], i8::to_le_bytes);
        }
        StoredData::Super { .. } => lower_bits(matrix, row, out),
        StoredData::Mxfp4 { nibbles, .. }
        | StoredData::Int4 { nibbles, .. }
        | StoredData::Q4_0 { nibbles, .. } => {
            // Rows of int4 are stored in whole groups, which may go further than the last vector.
            let (stride, bytes) =
                (nibbles.len() / matrix.rows, matrix.columns.div_ceil(MXFP4_GROUP) * VECTOR);
            put(out, &nibbles[row * stride..row * stride + bytes], u8::to_le_bytes);
        }
        StoredData::Nvfp4 { nibbles, .. } => {
            let stride = nibbles.len() / matrix.rows;
            let vectors = nibbles[row * stride..(row + 1) * stride].chunks(VECTOR);
            for (out, vector) in out.chunks_exact_mut(VECTOR).zip(vectors) {
                // Of every word the first half is of the first 16 columns, the second of the others.
                for (at, byte) in vector.iter().enumerate() {
                    out[at % 8 / 2 * 4 + at / 8 * 2 + at % 2] = *byte;
                }
            }
        }
    }
}

fn row_scale(matrix: &StoredMatrix, row: usize) -> f32 {
    match &matrix.data {
        StoredData::Int8 { scales, .. } => scales[row],
        StoredData::Fp8 { scales, .. } => scales[row] * e4m3::BELOW_F16,
        // Kernels have twice the values of the codes, and a 256th of their scales.
        StoredData::Nvfp4 { tensor_scale, .. } => tensor_scale * e4m3::BELOW_F16 / 2.0,
        _ => 1.0,
    }
}

/// Vectors of a row that share a word of scales, as a power of two; whole rows of any width are one group.
fn shift(matrix: &StoredMatrix, format: KernelFormat, vectors: usize) -> Result<u32, EngineError> {
    let group = match matrix.packing() {
        Packing::Int4 { group } => group,
        Packing::Fp8 { block: Some([_, columns]) } => columns,
        _ => return Ok(0),
    };
    if group >= matrix.columns {
        return Ok(vectors.next_power_of_two().ilog2());
    }
    let of_vectors = group / format.columns();
    if group.is_multiple_of(format.columns()) && of_vectors.is_power_of_two() {
        return Ok(of_vectors.ilog2());
    }
    super::super::refuse(
        format!("{} in groups of {group} columns on a GPU", matrix.storage()),
        format!("groups must be {} columns times a power of two, or whole rows", format.columns()),
    )
}

/// A word for each group of each row: the scale as f16, and above it the zero.
fn int4_words(parts: &[LinearPart], order: &[(usize, usize)]) -> Result<Vec<u32>, EngineError> {
    let mut words = Vec::new();
    for &(part, row) in order {
        let matrix = &parts[part].matrix;
        let StoredData::Int4 { scales, zeros, group, .. } = &matrix.data else {
            unreachable!("the parts of a layer are of one format: {}", matrix.storage())
        };
        let groups = matrix.columns.div_ceil(*group);
        let own = row * groups..(row + 1) * groups;
        for (scale, zero) in scales[own.clone()].iter().zip(&zeros[own]) {
            let whole = (0..=16_u8).find(|whole| f32::from(*whole).to_bits() == zero.to_f32().to_bits());
            let Some(whole) = whole else {
                return super::super::refuse(
                    format!("int4 with a zero of {zero} on a GPU"),
                    "zeros must be whole numbers from 0 to 16",
                );
            };
            words.push(u32::from(scale.to_bits()) | u32::from(whole) << 16);
        }
    }
    Ok(words)
}

/// Rows whose scales of blocks are kept once, for the even ones and for the odd ones.
const BLOCK_ROWS: usize = 16;

/// The scales of blocks: those of the first two of 16 rows, which all others of the even and of the odd ones have, too.
fn block_words(parts: &[LinearPart], order: &[(usize, usize)]) -> Result<Vec<u32>, EngineError> {
    let of_row = |&(part, row): &(usize, usize)| match &parts[part].matrix.data {
        StoredData::Fp8 { scales, .. } => {
            let groups = scales.len() / parts[part].matrix.rows;
            &scales[row * groups..(row + 1) * groups]
        }
        other => unreachable!("the parts of a layer are of one format: {other:?}"),
    };
    let same = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
    let mut words = Vec::new();
    for rows in order.chunks(BLOCK_ROWS) {
        for parity in 0..2 {
            let mut scales = rows.iter().skip(parity).step_by(2).map(of_row);
            // A last row without a second has room for its scales all the same.
            let first = scales.next().unwrap_or_else(|| of_row(&rows[0]));
            if !scales.all(|scales| same(scales, first)) {
                return super::super::refuse(
                    format!("fp8 whose scales differ within {BLOCK_ROWS} outputs on a GPU"),
                    "blocks must have a multiple of 16 rows, such as 128, and so must the parts of a fused layer",
                );
            }
            words.extend(first.iter().map(|scale| (scale * e4m3::BELOW_F16).to_bits()));
        }
    }
    Ok(words)
}

/// Columns of mxfp4 that share a scale.
const MXFP4_GROUP: usize = crate::weights::stored_matrix::BLOCK;

/// Scales of a row that are copied together (`linear.cuh`).
const SCALES_AT_ONCE: usize = 4;

/// Scales of a byte each of every row, padded with zeros.
fn group_scales(parts: &[LinearPart], order: &[(usize, usize)]) -> Vec<u8> {
    let of_row = |part: usize, row: usize| match &parts[part].matrix.data {
        StoredData::Mxfp8 { scales, .. }
        | StoredData::Mxfp4 { scales, .. }
        | StoredData::Nvfp4 { scales, .. } => {
            let groups = scales.len() / parts[part].matrix.rows;
            &scales[row * groups..(row + 1) * groups]
        }
        other => unreachable!("the parts of a layer are of one format: {other:?}"),
    };
    let mut bytes = Vec::new();
    for &(part, row) in order {
        bytes.extend_from_slice(of_row(part, row));
        bytes.resize(bytes.len().next_multiple_of(SCALES_AT_ONCE), 0);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_pack_what_one_does() {
        let matrix = |rows: usize, first: usize| StoredMatrix {
            rows,
            columns: 5,
            data: StoredData::F32((0..rows * 5).map(|i| (first + i) as f32).collect()),
        };
        let parts = [7, 6].map(|rows| LinearPart { matrix: matrix(rows, 100 * rows), bias: None });
        let order = order(&parts, FusedLayout::Stacked);
        let one = packed(&parts, &order, 32, 1);
        assert_eq!(one.len(), 13 * 32);
        assert_eq!(one[32..36], 705.0_f32.to_le_bytes());
        for threads in [2, 3, 5, 13, 20] {
            assert_eq!(packed(&parts, &order, 32, threads), one, "{threads} threads");
        }
        assert_eq!([0, THREAD_BYTES, 2 * THREAD_BYTES - 1].map(threads_for), [1; 3]);
    }
}
