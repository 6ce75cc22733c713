//! Ragged steps over shuffled blocks.
//!
//! Enters: what each sequence does, as [`Script`]s, and a seed. Leaves: a [`Scenario`]: the rows of each step, and the pool they run over.
//! Tokens depend on the sequence and the position alone, so the same scripts cut otherwise, or over blocks of another
//! size, must give the same logits.

use rand::seq::{IndexedRandom, SliceRandom};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::engine::native::ragged_batch::{Rows, SequenceRows};

/// Lengths beside the edges of blocks of 16 to 128 positions, and the smallest.
pub const EDGES: [usize; 13] = [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129];
/// Sizes of blocks.
pub const BLOCK_SIZES: [usize; 4] = [16, 32, 64, 128];
/// Unused blocks of the pool.
const SPARE_BLOCKS: usize = 3;

/// What one sequence does.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Script {
    /// Positions that it finds in the cache, filled with noise.
    pub cached: usize,
    /// Tokens that it brings to each step; none in steps that it sits out.
    pub brings: Vec<usize>,
}

impl Script {
    /// Positions in the cache after the last step.
    pub fn positions(&self) -> usize {
        self.cached + self.brings.iter().sum::<usize>()
    }
}

/// Up to seven sequences over three steps: prefill, prefill in chunks, decode, and prompts on top of a cache, mixed in every step.
pub fn ragged(seed: u64) -> Vec<Script> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let others = random.random_range(1..=6);
    // Somebody decodes in every step, so no step is empty.
    let first = Script { cached: edge(&mut random), brings: vec![1, 1, 1] };
    let script = |_| {
        let (length, cached) = (edge(&mut random), edge(&mut random));
        match random.random_range(0..5) {
            0 => Script { cached: 0, brings: vec![length, 1, 1] },
            1 => {
                let chunk = random.random_range(1..=length);
                Script { cached: 0, brings: vec![chunk, length - chunk, 1] }
            }
            2 => Script { cached, brings: vec![1, 1, 1] },
            3 => Script { cached, brings: vec![length.min(17), 0, 1] },
            _ => Script { cached: 0, brings: vec![0, length, 1] },
        }
    };
    std::iter::once(first).chain((0..others).map(script).collect::<Vec<_>>()).collect()
}

/// Two decode steps of so many sequences, their contexts beside the edges of blocks.
pub fn decode(batch: usize, seed: u64) -> Vec<Script> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    (0..batch).map(|_| Script { cached: edge(&mut random), brings: vec![1, 1] }).collect()
}

/// Two verify steps of so many sequences, with one to eight draft tokens each, their contexts beside the edges of blocks. To be run
/// [with every logit](Scenario::with_every_logit).
pub fn verify(batch: usize, seed: u64) -> Vec<Script> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let script = |_| {
        let cached = edge(&mut random);
        Script { cached, brings: [(); 2].map(|()| random.random_range(2..=9)).to_vec() }
    };
    (0..batch).map(script).collect()
}

fn edge(random: &mut ChaCha8Rng) -> usize {
    *EDGES.choose(random).expect("there are edges")
}

/// Steps, and the pool they run over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scenario {
    pub block_size: usize,
    /// Blocks of the pool.
    pub blocks: usize,
    /// Blocks that hold noise before the first step.
    pub filled: Vec<u32>,
    pub steps: Vec<Rows>,
    /// What the noise is made from.
    pub seed: u64,
}

impl Scenario {
    /// The steps of some scripts, each sequence over blocks picked at random from the pool.
    ///
    /// # Panics
    /// When blocks or vocabulary are beyond 32 bits.
    pub fn new(scripts: &[Script], block_size: usize, vocab: usize, seed: u64) -> Self {
        let needed = scripts.iter().map(|script| script.positions().div_ceil(block_size));
        let blocks = needed.clone().sum::<usize>() + SPARE_BLOCKS;
        let mut order: Vec<u32> = (0..u32::try_from(blocks).expect("blocks fit 32 bits")).collect();
        order.shuffle(&mut ChaCha8Rng::seed_from_u64(seed));
        let mut order = order.into_iter();
        let tables: Vec<Vec<u32>> = needed.map(|count| order.by_ref().take(count).collect()).collect();

        let tokens: Vec<Vec<u32>> = (0..)
            .zip(scripts)
            .map(|(stream, script)| {
                let mut random = ChaCha8Rng::seed_from_u64(seed);
                random.set_stream(stream + 1);
                let vocab = u32::try_from(vocab).expect("a vocabulary fits 32 bits");
                (0..script.positions()).map(|_| random.random_range(0..vocab)).collect()
            })
            .collect();

        let filled = scripts
            .iter()
            .zip(&tables)
            .flat_map(|(script, table)| &table[..script.cached.div_ceil(block_size)])
            .copied()
            .collect();
        let count = scripts.iter().map(|script| script.brings.len()).max().unwrap_or(0);
        let steps = (0..count)
            .map(|step| {
                let mut rows = Rows::new(block_size);
                for ((script, tokens), table) in scripts.iter().zip(&tokens).zip(&tables) {
                    let before = script.brings.iter().take(step).sum::<usize>();
                    let start = script.cached + before;
                    let brings = script.brings.get(step).copied().unwrap_or(0);
                    if brings > 0 {
                        rows.push(&tokens[start..start + brings], start, table);
                    }
                }
                rows
            })
            .collect();
        Self { block_size, blocks, filled, steps, seed }
    }

    /// The same with the logits of every row.
    pub fn with_every_logit(mut self) -> Self {
        for rows in &mut self.steps {
            rows.outputs = (0..).take(rows.len()).collect();
        }
        self
    }
}

/// One sequence of a step by itself, at most `chunk` tokens at a time.
pub fn pieces(rows: &Rows, sequence: &SequenceRows, chunk: usize) -> Vec<Rows> {
    let tokens = &rows.tokens[sequence.rows.clone()];
    tokens
        .chunks(chunk)
        .scan(sequence.start_position, |start, tokens| {
            let mut piece = Rows::new(rows.block_size);
            piece.push(tokens, *start, rows.table(sequence));
            *start += tokens.len();
            Some(piece)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn sequences_of_a_scenario_share_no_block_and_bring_their_tokens_in_order() {
        for seed in 0..20 {
            let scripts = ragged(seed);
            let scenario = Scenario::new(&scripts, 16, 50, seed);
            assert_eq!(scenario.steps.len(), 3);
            for rows in &scenario.steps {
                assert!(!rows.is_empty());
                let distinct: HashSet<u32> = rows.tables.iter().copied().collect();
                assert_eq!(distinct.len(), rows.tables.len());
                assert!(distinct.iter().all(|block| (*block as usize) < scenario.blocks));
                assert!(rows.tokens.iter().all(|token| *token < 50));
            }
            let brought: usize = scripts.iter().flat_map(|script| &script.brings).sum();
            assert_eq!(scenario.steps.iter().map(Rows::len).sum::<usize>(), brought);
        }
    }

    #[test]
    fn tokens_do_not_depend_on_how_a_prompt_is_cut_or_on_the_size_of_blocks() {
        let whole = Script { cached: 3, brings: vec![40] };
        let cut = Script { cached: 3, brings: vec![7, 0, 32, 1] };
        let tokens = |script: &Script, block_size| -> Vec<u32> {
            let scenario = Scenario::new(std::slice::from_ref(script), block_size, 99, 5);
            scenario.steps.into_iter().flat_map(|rows| rows.tokens).collect()
        };
        assert_eq!(tokens(&whole, 16), tokens(&cut, 64));
    }

    #[test]
    fn pieces_continue_each_other_over_the_same_blocks() {
        let mut rows = Rows::new(16);
        rows.push(&[9], 0, &[5]);
        rows.push(&[1, 2, 3, 4, 5], 14, &[7, 3]);
        let pieces = pieces(&rows, &rows.sequences[1], 2);
        let seen: Vec<(&[u32], &[u32])> = pieces.iter().map(|p| (&*p.tokens, &*p.positions)).collect();
        assert_eq!(seen, [(&[1, 2][..], &[14, 15][..]), (&[3, 4], &[16, 17]), (&[5], &[18])]);
        assert_eq!(pieces[0].tables, [7]);
        assert_eq!(pieces[2].tables, [7, 3]);
    }
}
