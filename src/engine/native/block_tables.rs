//! Which blocks of the pool belong to which sequence, for callers that keep no tables of their own.
//!
//! Enters: sequences and the positions they need. Leaves: block tables. A scheduler's own tables are used as given; a
//! session serves one kind of caller or the other, because both number the same blocks.

use std::collections::HashMap;

use crate::engine::{EngineError, SequenceId, SequenceStep};

/// Block tables of the sequences of a session.
#[derive(Debug)]
pub struct BlockTables {
    block_size: usize,
    sequences: HashMap<SequenceId, OwnedBlocks>,
    /// Released blocks, to be used again.
    free: Vec<u32>,
    /// Blocks ever used, by this or by the caller.
    blocks: usize,
    /// The caller passes tables.
    foreign: bool,
}

/// The blocks of one sequence, and how far it is filled.
#[derive(Debug, Default)]
struct OwnedBlocks {
    blocks: Vec<u32>,
    positions: usize,
}

impl BlockTables {
    /// No sequences yet.
    pub fn new(block_size: usize) -> Self {
        Self { block_size, sequences: HashMap::new(), free: Vec::new(), blocks: 0, foreign: false }
    }

    /// Blocks that must exist.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// A block that no sequence has had. A sequence that gets it later fills it before reading it, so it may hold anything until then.
    pub fn spare(&self) -> u32 {
        u32::try_from(self.blocks).expect("memory ends before 2^32 blocks")
    }

    /// The table of a sequence that will have `end` positions: the caller's, or our own, extended.
    ///
    /// # Errors
    /// When the step starts beyond what its sequence has, its table is too short, or both kinds of tables are mixed.
    pub fn table<'a>(&'a mut self, step: &'a SequenceStep, end: usize) -> Result<&'a [u32], EngineError> {
        if !step.block_table.is_empty() {
            return self.foreign(step, end);
        }
        let filled = self.sequences.get(&step.sequence).map_or(0, |owned| owned.positions);
        if step.start_position > filled {
            return super::refuse(
                format!("a step at position {} of sequence {}", step.start_position, step.sequence.0),
                format!("its cache holds {filled} positions"),
            );
        }
        self.extend(step.sequence, end)?;
        // A step at an earlier position drops what follows it.
        let owned = self.sequences.get_mut(&step.sequence).expect("extended above");
        owned.positions = end;
        Ok(&owned.blocks)
    }

    /// Gives a sequence blocks for so many positions, and counts them as filled.
    pub fn extend(&mut self, sequence: SequenceId, positions: usize) -> Result<&[u32], EngineError> {
        if self.foreign {
            return super::refuse(
                "a sequence without a block table",
                "others of this session brought theirs",
            );
        }
        let owned = self.sequences.entry(sequence).or_default();
        while owned.blocks.len() * self.block_size < positions {
            let block = self.free.pop().unwrap_or_else(|| {
                self.blocks += 1;
                u32::try_from(self.blocks - 1).expect("memory ends before 2^32 blocks")
            });
            owned.blocks.push(block);
        }
        owned.positions = owned.positions.max(positions);
        Ok(&owned.blocks)
    }

    /// Frees the blocks of a sequence.
    pub fn release(&mut self, sequence: SequenceId) {
        if let Some(owned) = self.sequences.remove(&sequence) {
            self.free.extend(owned.blocks);
        }
    }

    fn foreign<'a>(&mut self, step: &'a SequenceStep, end: usize) -> Result<&'a [u32], EngineError> {
        if !self.sequences.is_empty() {
            return super::refuse("a block table", "sequences of this session have tables of its own");
        }
        if step.block_table.len() * self.block_size < end {
            return super::refuse(
                format!("a block table of {} for {end} positions", step.block_table.len()),
                format!("a block has {} positions", self.block_size),
            );
        }
        self.foreign = true;
        let highest = step.block_table.iter().copied().max().unwrap_or(0);
        self.blocks = self.blocks.max(highest as usize + 1);
        Ok(&step.block_table)
    }
}
