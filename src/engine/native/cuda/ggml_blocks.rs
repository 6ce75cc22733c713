//! Rows of ggml's blocks as `kernels/blocks.cuh` takes them.
//!
//! Enters: rows as a file has them. Leaves: the lower four bits of their codes as vectors, and what lies beside those in words: as many bytes, in
//! another order.

use half::f16;

use super::device_matrix::KernelFormat;
use crate::weights::stored_matrix::{SUPER_BLOCK, SuperBlock, scale_and_min};
use crate::weights::{StoredData, StoredMatrix};

/// Bytes of a word.
const WORD: usize = 4;
/// Columns of a vector.
const GROUP: usize = 32;

/// Appends one kind of words of a row.
type Kind = fn(&StoredMatrix, usize, &mut Vec<u8>);

/// The words beside the vectors of all rows, one kind after another, rows padded with zeros to whole words.
pub fn words_beside<'a>(
    format: KernelFormat,
    rows: &(impl Iterator<Item = (&'a StoredMatrix, usize)> + Clone),
) -> Vec<u8> {
    let kinds: &[Kind] = match format {
        KernelFormat::Q4K => &[ranges],
        KernelFormat::Q5K => &[ranges, upper_bits],
        KernelFormat::Q6K => &[signed_scales, scales_of_blocks, upper_bits],
        _ => &[scales_of_groups],
    };
    let mut bytes = Vec::new();
    for kind in kinds {
        for (matrix, row) in rows.clone() {
            kind(matrix, row, &mut bytes);
            bytes.resize(bytes.len().next_multiple_of(WORD), 0);
        }
    }
    bytes
}

/// The lower four bits of the codes of a row, two to a byte.
pub fn lower_bits(matrix: &StoredMatrix, row: usize, out: &mut [u8]) {
    let codes = blocks(matrix, row).flat_map(|(format, block)| format.codes(block));
    for (column, code) in codes.enumerate() {
        out[column / 2] |= (code & 15) << (4 * (column % 2));
    }
}

/// The blocks of a row.
fn blocks(matrix: &StoredMatrix, row: usize) -> impl Iterator<Item = (SuperBlock, &[u8])> {
    let (format, blocks) = match &matrix.data {
        StoredData::Super { format, blocks } => (*format, blocks.as_slice()),
        // Rows of no block.
        _ => (SuperBlock::Q4K, &[][..]),
    };
    let bytes = matrix.columns / SUPER_BLOCK * format.bytes();
    let own = blocks.get(row * bytes..(row + 1) * bytes).unwrap_or_default();
    own.chunks_exact(format.bytes()).map(move |block| (format, block))
}

/// An f16 for each 32 columns.
fn scales_of_groups(matrix: &StoredMatrix, row: usize, out: &mut Vec<u8>) {
    if let StoredData::Q8_0 { scales, .. } | StoredData::Q4_0 { scales, .. } = &matrix.data {
        let groups = scales.len() / matrix.rows;
        out.extend(scales[row * groups..(row + 1) * groups].iter().flat_map(|scale| scale.to_le_bytes()));
    }
}

/// Scales and minima of two groups in a word, and a byte of what both are multiplied with.
fn ranges(matrix: &StoredMatrix, row: usize, out: &mut Vec<u8>) {
    for (format, block) in blocks(matrix, row) {
        let [d, d_min] = format.block_scales(block).map(f16::to_le_bytes);
        let of_block = [d[0], d[1], d_min[0], d_min[1]];
        for (pair, byte) in of_block.into_iter().enumerate() {
            let [(scale, min), (next_scale, next_min)] =
                [2 * pair, 2 * pair + 1].map(|group| scale_and_min(format.scale_bytes(block), group));
            let fields = [(scale, 0), (min, 6), (next_scale, 12), (next_min, 18), (byte, 24)];
            let word = fields.into_iter().fold(0, |word, (field, at)| word | u32::from(field) << at);
            out.extend(word.to_le_bytes());
        }
    }
}

/// A signed byte for each 16 columns.
fn signed_scales(matrix: &StoredMatrix, row: usize, out: &mut Vec<u8>) {
    blocks(matrix, row).for_each(|(format, block)| out.extend_from_slice(format.scale_bytes(block)));
}

/// An f16 for each block.
fn scales_of_blocks(matrix: &StoredMatrix, row: usize, out: &mut Vec<u8>) {
    blocks(matrix, row)
        .for_each(|(format, block)| out.extend_from_slice(&format.block_scales(block)[0].to_le_bytes()));
}

/// The bits of codes above the lower four: of one a word for 32 columns, of two a word for 16. Bits i of byte b are of column 4i + b.
fn upper_bits(matrix: &StoredMatrix, row: usize, out: &mut Vec<u8>) {
    for (format, block) in blocks(matrix, row) {
        let bits = format.high_bits();
        for of_word in format.codes(block).chunks_exact(GROUP / bits) {
            let mut word = [0; WORD];
            for (column, code) in of_word.iter().enumerate() {
                word[column % WORD] |= code >> 4 << (column / WORD * bits);
            }
            out.extend(word);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::Packing;

    #[test]
    fn rows_keep_their_bytes_and_pad_to_words() {
        for (packing, format, bits) in [
            (Packing::Q8_0, KernelFormat::Q8_0, 8.5),
            (Packing::Q4_0, KernelFormat::Q4_0, 4.5),
            (Packing::Super(SuperBlock::Q4K), KernelFormat::Q4K, 4.5),
            (Packing::Super(SuperBlock::Q5K), KernelFormat::Q5K, 5.5),
            (Packing::Super(SuperBlock::Q6K), KernelFormat::Q6K, 6.5625),
        ] {
            let columns = 2 * SUPER_BLOCK;
            let values: Vec<f32> = (0..3 * columns).map(|i| ((i * 37 % 101) as f32 - 50.0) / 7.0).collect();
            let matrix = StoredMatrix::from_f32_rows(3, columns, &values, packing);
            let words = words_beside(format, &(0..3).map(|row| (&matrix, row)));
            let vectors = 3 * format.vectors(columns) * super::super::device_matrix::VECTOR;
            let stored = bits / 8.0 * (3 * columns) as f64;
            assert!(((vectors + words.len()) as f64 - stored).abs() < 0.5, "{format:?}: {}", words.len());
            assert_eq!(matrix.bytes().0, (vectors + words.len()) as u64, "{format:?}");
        }
        // An odd number of blocks: the f16 of each row is padded.
        let matrix =
            StoredMatrix::from_f32_rows(2, SUPER_BLOCK, &[1.0; 512], Packing::Super(SuperBlock::Q6K));
        let words = words_beside(KernelFormat::Q6K, &(0..2).map(|row| (&matrix, row)));
        assert_eq!(words.len(), 2 * (16 + 4 + 64));
    }
}
