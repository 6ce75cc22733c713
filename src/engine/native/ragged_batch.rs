//! A ragged step laid flat: one row per token.
//!
//! Enters: sequences with their tokens, positions and block tables. Leaves: [`Rows`], plain arrays that a device can take as they
//! are. Kept between steps, so that a steady decode allocates nothing.

use std::ops::Range;

use super::shapes::PoolShape;

/// The rows of one sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SequenceRows {
    /// Its rows in the step.
    pub rows: Range<usize>,
    /// Position of its first row.
    pub start_position: usize,
    /// Its blocks in [`Rows::tables`].
    pub blocks: Range<usize>,
}

impl SequenceRows {
    /// Positions of the sequence in the cache when the step is done.
    pub fn positions_after(&self) -> usize {
        self.start_position + self.rows.len()
    }
}

/// The rows of a step that one adapter adds to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdaptedRows {
    /// Which adapter, in order of loading.
    pub adapter: usize,
    /// Its rows, in [`Rows::adapted`].
    pub rows: Range<usize>,
}

/// All tokens of a step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rows {
    /// The token of each row.
    pub tokens: Vec<u32>,
    /// The position of each row in its sequence.
    pub positions: Vec<u32>,
    /// The sequence of each row, as an index into `sequences`.
    pub owners: Vec<u32>,
    pub sequences: Vec<SequenceRows>,
    /// Block tables of all sequences, one after another.
    pub tables: Vec<u32>,
    /// Positions in a block.
    pub block_size: usize,
    /// Adapters of the step, each once; empty where no row has one.
    pub adapters: Vec<AdaptedRows>,
    /// Rows that have an adapter, grouped by adapter.
    pub adapted: Vec<usize>,
    /// Padding sequences at the end: see [`pad`](Self::pad).
    pub padding: usize,
    /// The rows that have logits, in order; of most steps the last one of each sequence.
    pub outputs: Vec<u32>,
    /// (adapter, row); kept to reuse its memory.
    pub(super) order: Vec<(usize, usize)>,
}

impl Rows {
    /// Rows over blocks of so many positions.
    pub fn new(block_size: usize) -> Self {
        Self { block_size, ..Self::default() }
    }

    /// Removes all sequences and keeps the memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.owners.clear();
        self.sequences.clear();
        self.tables.clear();
        self.adapters.clear();
        self.adapted.clear();
        self.padding = 0;
        self.outputs.clear();
    }

    /// Pads to as many rows, with sequences of one token at their first position. Their K and V go to `block`, which no sequence may use; all of
    /// them write the same there.
    pub fn pad(&mut self, rows: usize, block: u32) {
        while self.len() < rows {
            self.push(&[0], 0, &[block]);
            self.padding += 1;
        }
    }

    /// Outputs without the padding, whose sequences are one row each.
    pub fn served(&self) -> usize {
        self.outputs.len() - self.padding
    }

    /// Sets the adapter of each sequence, in order of the sequences; rows of one adapter are grouped, whatever their order.
    pub fn set_adapters(&mut self, adapters: impl Iterator<Item = Option<usize>>) {
        self.adapters.clear();
        self.adapted.clear();
        self.order.clear();
        for (sequence, adapter) in self.sequences.iter().zip(adapters) {
            if let Some(adapter) = adapter {
                self.order.extend(sequence.rows.clone().map(|row| (adapter, row)));
            }
        }
        self.order.sort_unstable();
        for &(adapter, row) in &self.order {
            let at = self.adapted.len();
            self.adapted.push(row);
            match self.adapters.last_mut() {
                Some(last) if last.adapter == adapter => last.rows.end = at + 1,
                _ => self.adapters.push(AdaptedRows { adapter, rows: at..at + 1 }),
            }
        }
    }

    /// Adds a sequence with `tokens` at `start_position`, the last of which has logits; `table` holds its blocks in order.
    ///
    /// # Panics
    /// As [`push_with_outputs`](Self::push_with_outputs).
    pub fn push(&mut self, tokens: &[u32], start_position: usize, table: &[u32]) {
        self.push_with_outputs(tokens, start_position, table, 1);
    }

    /// The same with logits of the last `outputs` tokens.
    ///
    /// # Panics
    /// When the table is too short for the positions, or there are fewer tokens: the session checks that first.
    pub fn push_with_outputs(
        &mut self,
        tokens: &[u32],
        start_position: usize,
        table: &[u32],
        outputs: usize,
    ) {
        let end = start_position + tokens.len();
        assert!(table.len() * self.block_size >= end, "a block table covers every position of its sequence");
        let first = self.tokens.len();
        let owner = index(self.sequences.len());
        self.tokens.extend_from_slice(tokens);
        self.positions.extend((start_position..end).map(index));
        self.owners.extend(std::iter::repeat_n(owner, tokens.len()));
        let blocks = self.tables.len()..self.tables.len() + end.div_ceil(self.block_size);
        self.tables.extend_from_slice(&table[..blocks.len()]);
        self.outputs.extend((self.tokens.len() - outputs..self.tokens.len()).map(index));
        self.sequences.push(SequenceRows { rows: first..self.tokens.len(), start_position, blocks });
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The block and the slot within it of a row.
    pub fn slot(&self, row: usize) -> (usize, usize) {
        let position = self.positions[row] as usize;
        let sequence = &self.sequences[self.owners[row] as usize];
        let block = self.tables[sequence.blocks.start + position / self.block_size];
        (block as usize, position % self.block_size)
    }

    /// The positions that a step sees, sequence by sequence: the index of its block in [`tables`](Self::tables), and the slot within that.
    pub fn seen(&self) -> impl Iterator<Item = (usize, usize)> {
        self.sequences.iter().flat_map(|sequence| {
            let place =
                |position| (sequence.blocks.start + position / self.block_size, position % self.block_size);
            (0..sequence.positions_after()).map(place)
        })
    }

    /// The number of a block of a sequence in a pool.
    pub fn block(&self, sequence: &SequenceRows, index: usize, pool: &PoolShape) -> usize {
        let at = sequence.blocks.start + index;
        if pool.consecutive { at } else { self.tables[at] as usize }
    }

    /// The block table of a sequence.
    pub fn table(&self, sequence: &SequenceRows) -> &[u32] {
        &self.tables[sequence.blocks.clone()]
    }
}

/// Rows, positions and blocks are far below 2^32: memory runs out first.
fn index(value: usize) -> u32 {
    u32::try_from(value).expect("an index of rows, positions or sequences fits 32 bits")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_one_adapter_stand_together_and_each_adapter_once() {
        let mut rows = Rows::new(16);
        for tokens in [2, 1, 1, 3] {
            rows.push(&vec![0; tokens], 0, &[0]);
        }
        rows.set_adapters([Some(5), None, Some(2), Some(5)].into_iter());
        assert_eq!(rows.adapted, [3, 0, 1, 4, 5, 6]);
        let of = |adapter, rows| AdaptedRows { adapter, rows };
        assert_eq!(rows.adapters, [of(2, 0..1), of(5, 1..6)]);
        rows.set_adapters(std::iter::repeat_n(None, 4));
        assert!(rows.adapters.is_empty() && rows.adapted.is_empty());
    }

    #[test]
    fn a_row_knows_its_place_in_the_pool() {
        let mut rows = Rows::new(16);
        rows.push(&[5, 6, 7], 15, &[9, 4]);
        rows.push(&[8], 0, &[2]);
        assert_eq!(rows.positions, [15, 16, 17, 0]);
        assert_eq!((0..4).map(|r| rows.slot(r)).collect::<Vec<_>>(), [(9, 15), (4, 0), (4, 1), (2, 0)]);
        assert_eq!(rows.sequences[0].positions_after(), 18);
        assert_eq!(rows.table(&rows.sequences[1]), [2]);
        rows.pad(6, 11);
        assert_eq!((rows.len(), rows.served(), rows.slot(5)), (6, 2, (11, 0)));
        assert_eq!(rows.outputs, [2, 3, 4, 5]);
        rows.clear();
        assert!(rows.is_empty() && rows.padding == 0 && rows.outputs.is_empty());
        rows.push_with_outputs(&[5, 6, 7], 15, &[9, 4], 2);
        rows.push_with_outputs(&[8, 9], 3, &[1], 2);
        assert_eq!((rows.outputs.as_slice(), rows.served()), (&[1, 2, 3, 4][..], 4));
    }
}
