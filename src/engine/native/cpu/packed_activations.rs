//! Activations rounded and packed for the products of a linear layer.
//!
//! Enters: rows of f32, a norm where the layer has one. Leaves: [`PackedActivations`]: the rows in the precision that the weights are
//! multiplied in, kept between steps so that a steady decode allocates nothing.
#![expect(unsafe_code, reason = "members write rows of shared buffers")]

use hbmark_cpu_kernels::rows::{InputRow, pack_floats, pack_pairs, pack_quads};
use hbmark_cpu_kernels::simd::InstructionSet;
use hbmark_cpu_kernels::tiles::{GROUP, LINE, Precision};

use super::thread_team::DisjointSlice;

/// The packed rows of one operation.
#[derive(Debug, Default)]
pub struct PackedActivations {
    /// Words of all rows: f32 bits, pairs of bf16, or quads of bytes.
    words: Vec<u32>,
    /// One scale per group of 32 columns of a row, for quads.
    scales: Vec<f32>,
    /// Sum of the bytes of each half of a group, for the offsets of unsigned weights.
    sums: Vec<i32>,
    pub shape: InputShape,
}

/// How rows are packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InputShape {
    pub precision: Precision,
    pub rows: usize,
    pub columns: usize,
    /// Columns with padding.
    pub padded: usize,
}

impl Default for InputShape {
    fn default() -> Self {
        Self { precision: Precision::Floats, rows: 0, columns: 0, padded: 0 }
    }
}

impl InputShape {
    fn words(&self) -> usize {
        match self.precision {
            Precision::Floats => self.padded,
            Precision::Pairs => self.padded / 2,
            Precision::Quads => self.padded / 4,
        }
    }

    fn groups(&self) -> usize {
        match self.precision {
            Precision::Quads => self.padded / GROUP,
            Precision::Floats | Precision::Pairs => 0,
        }
    }

    fn halves(&self) -> usize {
        2 * self.groups()
    }
}

/// Words between rows of so many: members write neighbouring rows at a time, and no cache line has parts of two.
fn apart(words: usize) -> usize {
    words + LINE / size_of::<u32>()
}

/// Where members write packed rows.
#[derive(Debug, Clone, Copy)]
pub struct InputWriter {
    words: DisjointSlice<u32>,
    scales: DisjointSlice<f32>,
    sums: DisjointSlice<i32>,
    shape: InputShape,
}

impl PackedActivations {
    /// Makes room for rows of a shape and lends it to a team.
    pub fn writer(&mut self, shape: InputShape) -> InputWriter {
        let grow = |have: usize, need: usize| need.max(have);
        self.words.resize(grow(self.words.len(), shape.rows * apart(shape.words())), 0);
        self.scales.resize(grow(self.scales.len(), shape.rows * apart(shape.groups())), 0.0);
        self.sums.resize(grow(self.sums.len(), shape.rows * apart(shape.halves())), 0);
        self.shape = shape;
        InputWriter {
            words: DisjointSlice::new(&mut self.words),
            scales: DisjointSlice::new(&mut self.scales),
            sums: DisjointSlice::new(&mut self.sums),
            shape,
        }
    }
}

impl InputWriter {
    /// Packs one row, normed first where a norm is given: `x / rms(x) ∘ norm`.
    ///
    /// # Safety
    /// The buffers behind the writer are still borrowed, no other member has this row, and the set is available.
    ///
    /// # Panics
    /// When the row is not within the shape.
    pub unsafe fn pack(&self, set: InstructionSet, row: usize, values: &[f32], norm: Option<(&[f32], f32)>) {
        let shape = self.shape;
        assert!(
            row < shape.rows && values.len() == shape.columns,
            "a row of the shape that was made room for"
        );
        assert!(norm.is_none_or(|(weights, _)| weights.len() == values.len()), "a norm as wide as its row");
        let of_row = |count: usize| row * apart(count)..row * apart(count) + count;
        // SAFETY: rows do not overlap, and no other member has this one.
        let (words, scales, sums) = unsafe {
            (
                self.words.part(of_row(shape.words())),
                self.scales.part(of_row(shape.groups())),
                self.sums.part(of_row(shape.halves())),
            )
        };
        // SAFETY: the set is available.
        unsafe {
            match shape.precision {
                Precision::Floats => pack_floats(set, values, norm, words),
                Precision::Pairs => pack_pairs(set, values, norm, words),
                Precision::Quads => pack_quads(set, values, norm, words, scales, sums),
            }
        }
    }

    /// A packed row. Its pointers hold as long as the borrow behind the writer.
    ///
    /// # Panics
    /// When the row is not within the shape.
    pub fn row(&self, row: usize) -> InputRow {
        assert!(row < self.shape.rows, "a row of the shape that was made room for");
        InputRow {
            words: self.words.at(row * apart(self.shape.words())),
            scales: self.scales.at(row * apart(self.shape.groups())),
            sums: self.sums.at(row * apart(self.shape.halves())),
        }
    }
}
