//! Rows of floats → packed rows: the one place where weights are rounded.
//!
//! Enters: rows, given as floats or as a matrix. Leaves: a [`StoredMatrix`]. `q8_0` and `q4_0` round as ggml's reference does, bit
//! for bit, so that a generated matrix is the one that llama.cpp would have made; all others round against the scale as it is stored.
//!
//! *Source* of `q8_0` and `q4_0`: `quantize_row_q8_0_ref` and `quantize_row_q4_0_ref` of the ggml project.

use std::num::NonZeroUsize;

use half::{bf16, f16};

use super::{BLOCK, Packing, SUPER_BLOCK, StoredData, StoredMatrix};
use hbmark_core::model::NVFP4_GROUP;
use hbmark_cpu_kernels::{e2m1, e4m3, e8m0};

/// Below this many elements one thread is faster than several.
const ELEMENTS_PER_THREAD: usize = 1 << 17;

impl StoredMatrix {
    /// Packs rows of floats, rounding to nearest.
    ///
    /// # Panics
    /// When `values` is not `rows × columns` long.
    pub fn from_f32_rows(rows: usize, columns: usize, values: &[f32], packing: Packing) -> Self {
        assert_eq!(values.len(), rows * columns, "{rows} rows of {columns}");
        packed(rows, columns, packing, &|row, out| {
            out.copy_from_slice(&values[row * columns..(row + 1) * columns]);
        })
    }

    /// Packs a matrix anew, rounding its values to nearest. Weights that are not numbers become zeros in quantised formats.
    pub fn quantize(plain: &Self, to: Packing) -> Self {
        packed(plain.rows, plain.columns, to, &|row, out| plain.row(row, out))
    }
}

/// Packs the rows that `source` writes, on as many threads as the size is worth.
fn packed(
    rows: usize,
    columns: usize,
    packing: Packing,
    source: &(dyn Fn(usize, &mut [f32]) + Sync),
) -> StoredMatrix {
    let mut matrix = StoredMatrix::blank(rows, columns, packing);
    let shape = packing.row_shape(columns);
    let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let threads = cores.min(rows * columns / ELEMENTS_PER_THREAD).max(1);
    let job = Job { rows, columns, padded: shape.padded, threads, source };
    let (values, groups) = (shape.values, shape.groups);
    match &mut matrix.data {
        StoredData::F32(all) => {
            job.run((all, values), (&mut [(); 0], 0), |row, out, _| out.copy_from_slice(row));
        }
        StoredData::F16(all) => {
            job.run((all, values), (&mut [(); 0], 0), |row, out, _| round(row, out, f16::from_f32));
        }
        StoredData::Bf16(all) => {
            job.run((all, values), (&mut [(); 0], 0), |row, out, _| round(row, out, bf16::from_f32));
        }
        StoredData::Int8 { quants, scales } => job.run((quants, values), (scales, groups), int8_row),
        StoredData::Fp8 { codes, scales, block: None } => {
            job.run((codes, values), (scales, groups), |row, codes, scales| {
                scales.fill(single_scale(largest(row) / e4m3::LARGEST));
                fp8_row(row, row.len(), codes, scales);
            });
        }
        StoredData::Fp8 { codes, scales, block: Some([rows, columns]) } => {
            let columns = *columns;
            job.run((&mut [(); 0], 0), (scales.as_mut_slice(), groups), |row, _, scales| {
                row.chunks(columns)
                    .zip(scales)
                    .for_each(|(block, scale)| *scale = single_scale(largest(block) / e4m3::LARGEST));
            });
            share_largest(scales, *rows, groups);
            job.run((codes, values), (scales, groups), |row, codes, scales| {
                fp8_row(row, columns, codes, scales);
            });
        }
        StoredData::Q8_0 { quants, scales } => job.run((quants, values), (scales, groups), q8_0_row),
        StoredData::Q4_0 { nibbles, scales } => job.run((nibbles, values), (scales, groups), q4_0_row),
        StoredData::Mxfp8 { codes, scales } => job.run((codes, values), (scales, groups), mxfp8_row),
        StoredData::Mxfp4 { nibbles, scales } => job.run((nibbles, values), (scales, groups), mxfp4_row),
        StoredData::Nvfp4 { nibbles, scales, tensor_scale } => {
            let mut of_rows = vec![0.0; rows];
            job.run((&mut [(); 0], 0), (&mut of_rows, 1), |row, _, most| most[0] = largest(row));
            // Where the largest value of all is the largest code under the largest scale.
            let whole = single_scale(largest(&of_rows) / (e2m1::LARGEST * e4m3::LARGEST));
            *tensor_scale = whole;
            job.run((nibbles, values), (scales, groups), |row, nibbles, scales| {
                nvfp4_row(row, whole, nibbles, scales);
            });
        }
        StoredData::Super { format, blocks } => {
            let format = *format;
            job.run((blocks, values), (&mut [(); 0], 0), |row, out, _| {
                let blocks = out.chunks_exact_mut(format.bytes());
                row.chunks_exact(SUPER_BLOCK).zip(blocks).for_each(|(row, block)| format.pack(row, block));
            });
        }
        StoredData::Int4 { nibbles, scales, zeros, group } => {
            // Scales and zeros are made together and kept apart.
            let mut both = vec![[f16::ZERO; 2]; scales.len()];
            let group = *group;
            job.run((nibbles, values), (&mut both, groups), |row, out, both| int4_row(row, group, out, both));
            for ((both, scale), zero) in both.iter().zip(scales).zip(zeros) {
                [*scale, *zero] = *both;
            }
        }
    }
    matrix
}

/// Rows to be packed, shared out to threads.
struct Job<'a> {
    rows: usize,
    columns: usize,
    padded: usize,
    threads: usize,
    source: &'a (dyn Fn(usize, &mut [f32]) + Sync),
}

impl Job<'_> {
    /// Calls `pack` for each row with its floats, padded with zeros to whole groups, and its part of two arrays, each given
    /// with its elements per row.
    fn run<A: Send, B: Send>(
        &self,
        (mut values, values_per_row): (&mut [A], usize),
        (mut scales, scales_per_row): (&mut [B], usize),
        pack: impl Fn(&[f32], &mut [A], &mut [B]) + Sync,
    ) {
        let band = self.rows.div_ceil(self.threads).max(1);
        let pack = &pack;
        std::thread::scope(|scope| {
            for first in (0..self.rows).step_by(band) {
                let rows = band.min(self.rows - first);
                let (mine, rest) = values.split_at_mut(rows * values_per_row);
                let (my_scales, rest_scales) = scales.split_at_mut(rows * scales_per_row);
                (values, scales) = (rest, rest_scales);
                let mut work = move || {
                    let mut floats = vec![0.0; self.padded];
                    for row in 0..rows {
                        (self.source)(first + row, &mut floats[..self.columns]);
                        pack(
                            &floats,
                            &mut mine[row * values_per_row..(row + 1) * values_per_row],
                            &mut my_scales[row * scales_per_row..(row + 1) * scales_per_row],
                        );
                    }
                };
                if first + rows == self.rows {
                    // The last band is this thread's own.
                    work();
                } else {
                    scope.spawn(work);
                }
            }
        });
    }
}

fn round<T>(row: &[f32], out: &mut [T], to: impl Fn(f32) -> T) {
    for (out, &value) in out.iter_mut().zip(row) {
        *out = to(value);
    }
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |largest, value| value.abs().max(largest))
}

/// `1 / scale`, and 0 for a group of zeros.
pub(super) fn inverse(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

/// A scale as it is stored: one beyond f16 would turn zeros into NaN.
pub(super) fn stored_scale(scale: f32) -> f16 {
    f16::from_f32(scale.min(f16::MAX.to_f32()))
}

/// A scale that is stored as f32: below what would turn the largest code into infinity.
fn single_scale(scale: f32) -> f32 {
    scale.min(f16::MAX.to_f32())
}

/// The nearest whole number, halves away from zero: `f32::round`, which without SSE 4.1 is a call for each value.
#[expect(clippy::cast_possible_truncation, reason = "clamped to i8, and a NaN is 0")]
fn to_i8(value: f32) -> i8 {
    let value = value.clamp(-127.0, 127.0);
    let whole = value as i8;
    let fraction = value - f32::from(whole);
    whole + i8::from(fraction >= 0.5) - i8::from(fraction <= -0.5)
}

/// The whole part of a value, from 0 to `most`.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped, and a NaN is 0")]
pub(super) fn to_code(value: f32, most: f32) -> u8 {
    value.clamp(0.0, most) as u8
}

/// The whole part of a value, as a nibble.
fn to_nibble(value: f32) -> u8 {
    to_code(value, 15.0)
}

fn int8_row(row: &[f32], quants: &mut [i8], scales: &mut [f32]) {
    let scale = single_scale(largest(row) / 127.0);
    scales.fill(scale);
    let inverse = inverse(scale);
    round(row, quants, |value| to_i8(value * inverse));
}

/// Rounds a row against scales that it has already, one for so many columns.
fn fp8_row(row: &[f32], columns: usize, codes: &mut [u8], scales: &[f32]) {
    for ((block, codes), scale) in row.chunks(columns).zip(codes.chunks_mut(columns)).zip(scales) {
        let inverse = inverse(*scale);
        round(block, codes, |value| e4m3::from_f32(value * inverse));
    }
}

fn mxfp8_row(row: &[f32], codes: &mut [u8], scales: &mut [u8]) {
    for ((block, codes), scale) in row.chunks(BLOCK).zip(codes.chunks_mut(BLOCK)).zip(scales) {
        *scale = e8m0::scale_of(largest(block), e4m3::LARGEST_POWER);
        let inverse = inverse(e8m0::power(*scale));
        round(block, codes, |value| e4m3::from_f32(value * inverse));
    }
}

/// Gives so many rows the largest of their scales, group by group.
fn share_largest(scales: &mut [f32], rows: usize, groups: usize) {
    for block in scales.chunks_mut((rows * groups).max(1)) {
        for group in 0..groups {
            let largest =
                block.iter().skip(group).step_by(groups).fold(0.0_f32, |most, scale| most.max(*scale));
            block.iter_mut().skip(group).step_by(groups).for_each(|scale| *scale = largest);
        }
    }
}

fn q8_0_row(row: &[f32], quants: &mut [i8], scales: &mut [f16]) {
    for ((block, quants), stored) in row.chunks(BLOCK).zip(quants.chunks_mut(BLOCK)).zip(scales) {
        let scale = largest(block) / 127.0;
        *stored = stored_scale(scale);
        let inverse = inverse(scale);
        round(block, quants, |value| to_i8(value * inverse));
    }
}

fn q4_0_row(row: &[f32], nibbles: &mut [u8], scales: &mut [f16]) {
    for ((block, bytes), stored) in row.chunks(BLOCK).zip(nibbles.chunks_mut(BLOCK / 2)).zip(scales) {
        // The value of the largest magnitude becomes −8, the one code without an opposite.
        let extreme = block.iter().fold(0.0_f32, |e, &value| if value.abs() > e.abs() { value } else { e });
        let scale = extreme / -8.0;
        *stored = f16::from_f32(scale.clamp(f16::MIN.to_f32(), f16::MAX.to_f32()));
        let inverse = inverse(scale);
        let code = |value: f32| to_nibble(value * inverse + 8.5);
        for (byte, pair) in bytes.iter_mut().zip(block.as_chunks::<2>().0) {
            *byte = code(pair[0]) | code(pair[1]) << 4;
        }
    }
}

fn mxfp4_row(row: &[f32], nibbles: &mut [u8], scales: &mut [u8]) {
    for ((block, bytes), scale) in row.chunks(BLOCK).zip(nibbles.chunks_mut(BLOCK / 2)).zip(scales) {
        *scale = e8m0::scale_of(largest(block), e2m1::LARGEST_POWER);
        e2m1_group(block, e8m0::power(*scale), bytes);
    }
}

fn nvfp4_row(row: &[f32], tensor_scale: f32, nibbles: &mut [u8], scales: &mut [u8]) {
    let groups = row.chunks(NVFP4_GROUP).zip(nibbles.chunks_mut(NVFP4_GROUP / 2));
    for ((group, bytes), scale) in groups.zip(scales) {
        *scale = e4m3::from_f32(largest(group) / e2m1::LARGEST / tensor_scale);
        e2m1_group(group, e4m3::to_f32(*scale) * tensor_scale, bytes);
    }
}

/// Rounds a group against its scale, two columns to a byte.
fn e2m1_group(group: &[f32], scale: f32, bytes: &mut [u8]) {
    let inverse = inverse(scale);
    let code = |value: f32| e2m1::from_f32(value * inverse);
    for (byte, pair) in bytes.iter_mut().zip(group.as_chunks::<2>().0) {
        *byte = code(pair[0]) | code(pair[1]) << 4;
    }
}

fn int4_row(row: &[f32], group: usize, nibbles: &mut [u8], scales_and_zeros: &mut [[f16; 2]]) {
    nibbles.fill(0);
    for (index, (values, stored)) in row.chunks(group).zip(scales_and_zeros).enumerate() {
        // A range that holds 0 keeps the zero in 0..=15, where f16 is within a hundredth of a step.
        let (low, high) = values.iter().fold((0.0_f32, 0.0_f32), |(low, high), &v| (low.min(v), high.max(v)));
        let scale = stored_scale(high / 15.0 - low / 15.0);
        let inverse = inverse(scale.to_f32());
        // A scale near the least of f16 may be rounded to much less.
        let zero = f16::from_f32((low.abs() * inverse).round().min(15.0));
        *stored = [scale, zero];
        for (offset, &value) in values.iter().enumerate() {
            let column = index * group + offset;
            let code = to_nibble(value * inverse + zero.to_f32() + 0.5);
            nibbles[column / 2] |= code << (4 * (column % 2));
        }
    }
}
