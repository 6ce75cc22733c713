//! Some columns of a matrix, where no group of columns that share a scale is cut.
//!
//! Enters: a [`StoredMatrix`]. Leaves: the columns that a rank of a tensor parallel group has, as they are stored.

use std::ops::Range;

use super::{ArrayCopy, StoredData, StoredMatrix};

impl StoredMatrix {
    /// Some of its columns; `None` where that would cut a group.
    pub fn slice_columns(&self, own: Range<usize>) -> Option<Self> {
        let group = match &self.data {
            // One scale for whole rows, which all parts have.
            StoredData::Int8 { .. } | StoredData::Fp8 { block: None, .. } => 1,
            StoredData::Int4 { group, .. } if group % 2 == 1 => return None,
            _ => self.packing().group(self.columns),
        };
        if [own.start, own.end].iter().any(|at| !at.is_multiple_of(group)) {
            return None;
        }
        let mut part = Self::blank(self.rows, own.len(), self.packing());
        part.each_array(self, &mut ColumnsCopy { rows: self.rows, columns: self.columns, start: own.start });
        Some(part)
    }
}

/// Of each row, as much as there is room for, from this column on.
struct ColumnsCopy {
    rows: usize,
    columns: usize,
    start: usize,
}

impl ArrayCopy for ColumnsCopy {
    fn array<T: Copy>(&mut self, into: &mut [T], from: &[T]) {
        let (part, whole) = (into.len() / self.rows, from.len() / self.rows);
        // What is as long in both is one scale for a row.
        let start = if part == whole { 0 } else { self.start * whole / self.columns };
        for row in 0..self.rows {
            into[row * part..][..part].copy_from_slice(&from[row * whole + start..][..part]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::Packing;
    use crate::weights::stored_matrix::SuperBlock;

    fn matrix(rows: usize, columns: usize, packing: Packing) -> StoredMatrix {
        let value = |i: usize| ((i * 37 % 101) as f32 - 50.0) / 13.0;
        let values: Vec<f32> = (0..rows * columns).map(value).collect();
        StoredMatrix::from_f32_rows(rows, columns, &values, packing)
    }

    fn row(matrix: &StoredMatrix, row: usize) -> Vec<f32> {
        let mut values = vec![0.0; matrix.columns];
        matrix.row(row, &mut values);
        values
    }

    #[test]
    fn parts_of_a_row_side_by_side_are_the_row_in_every_format() {
        let fp8 = [None, Some([2, 128])].map(|block| Packing::Fp8 { block });
        let int4 = [32, 128].map(|group| Packing::Int4 { group });
        let plain = [Packing::F32, Packing::F16, Packing::Bf16, Packing::Int8];
        let grouped = [Packing::Q8_0, Packing::Q4_0, Packing::Mxfp8, Packing::Mxfp4, Packing::Nvfp4];
        let all = plain.into_iter().chain(grouped).chain(fp8).chain(int4);
        for packing in all.chain(SuperBlock::ALL.map(Packing::Super)) {
            let whole = matrix(3, 512, packing);
            // Unequal parts, too, where the groups are small.
            let cut = if packing.group(512) > 128 { 256 } else { 128 };
            let parts = [0..cut, cut..512].map(|own| whole.slice_columns(own).unwrap());
            for r in 0..3 {
                assert_eq!([row(&parts[0], r), row(&parts[1], r)].concat(), row(&whole, r), "{packing:?}");
            }
            assert_eq!(parts[0].packing(), whole.packing());
        }
    }

    #[test]
    fn no_group_is_cut() {
        assert!(matrix(2, 64, Packing::Q8_0).slice_columns(0..16).is_none());
        assert!(matrix(2, 512, Packing::Super(SuperBlock::Q4K)).slice_columns(0..128).is_none());
        assert!(matrix(2, 96, Packing::Int4 { group: 32 }).slice_columns(48..96).is_none());
    }
}
