//! A matrix with rows and columns exchanged, where its format has the same values that way.
//!
//! Enters: a [`StoredMatrix`]. Leaves: its transpose, as precise and as large. Plain floats always have one; 8-bit floats where the scales of a
//! block, or of the whole matrix, stay those of a block. Formats with a scale for a part of each row have none: their values would be rounded again.

use super::{StoredData, StoredMatrix};
use crate::weights::loading::transposed;

impl StoredMatrix {
    /// `[columns, rows]`; `None` where the format would round the values again.
    pub fn transposed(&self) -> Option<Self> {
        let (rows, columns) = (self.rows, self.columns);
        let data = match &self.data {
            StoredData::F32(values) => StoredData::F32(transposed(values, 1, rows, columns)),
            StoredData::F16(values) => StoredData::F16(transposed(values, 1, rows, columns)),
            StoredData::Bf16(values) => StoredData::Bf16(transposed(values, 1, rows, columns)),
            StoredData::Fp8 { codes, scales, block } => {
                let [block_rows, block_columns] = block.unwrap_or([rows, columns]);
                let groups = columns.div_ceil(block_columns);
                let alike = |rows: &[f32]| rows.chunks_exact(groups).all(|row| row == &rows[..groups]);
                if !scales.chunks(block_rows * groups).all(alike) {
                    return None;
                }
                let of_blocks: Vec<&[f32]> = scales.chunks(block_rows * groups).collect();
                let of_column =
                    |column: usize| of_blocks.iter().map(move |rows| rows[column / block_columns]);
                StoredData::Fp8 {
                    codes: transposed(codes, 1, rows, columns),
                    scales: (0..columns).flat_map(of_column).collect(),
                    block: block.map(|_| [block_columns, block_rows]),
                }
            }
            _ => return None,
        };
        Some(Self { rows: columns, columns: rows, data })
    }
}

#[cfg(test)]
mod tests {
    use crate::weights::{Packing, StoredMatrix, StoredTensor};

    fn values(matrix: StoredMatrix) -> Vec<f32> {
        StoredTensor::Matrix(matrix).values()
    }

    #[test]
    fn a_transpose_has_the_same_values() {
        let (rows, columns) = (6, 10);
        let plain: Vec<f32> = (0..rows * columns).map(|i| (i as f32 - 20.0) / 8.0).collect();
        for packing in [Packing::F32, Packing::F16, Packing::Bf16, Packing::Fp8 { block: Some([3, 4]) }] {
            let matrix = StoredMatrix::from_f32_rows(rows, columns, &plain, packing);
            let turned = matrix.transposed().unwrap();
            assert_eq!((turned.rows, turned.columns, turned.bytes() >= matrix.bytes()), (10, 6, true));
            assert_eq!(turned.transposed().unwrap(), matrix, "{packing:?}");
            let (before, after) = (values(matrix), values(turned));
            for (at, value) in before.iter().enumerate() {
                let (row, column) = (at / columns, at % columns);
                assert!(
                    after[column * rows + row].to_bits() == value.to_bits(),
                    "{packing:?}, {row} {column}"
                );
            }
        }
    }

    #[test]
    fn what_would_be_rounded_again_has_none() {
        let plain: Vec<f32> = (0..64 * 64).map(|i| i as f32).collect();
        for packing in
            [Packing::Int8, Packing::Q8_0, Packing::Mxfp8, Packing::Nvfp4, Packing::Fp8 { block: None }]
        {
            assert_eq!(
                StoredMatrix::from_f32_rows(64, 64, &plain, packing).transposed(),
                None,
                "{packing:?}"
            );
        }
        // A scale for the whole matrix, as some checkpoints have it.
        let alike = [448.0; 64 * 64];
        let whole = StoredMatrix::from_f32_rows(64, 64, &alike, Packing::Fp8 { block: None });
        assert!(whole.transposed().is_some());
    }
}
