//! The ranks of a tensor parallel group in one process, and the sum of what each of them has.
//!
//! Enters: values of each rank. Leaves: all of them on each, or their sum, to the bit the same, since it is made in the order of the ranks. A rank that fails
//! leaves the group, and no other waits for it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use super::cpu::thread_team::spin_until;
use crate::engine::EngineError;

/// What the ranks share.
#[derive(Debug)]
struct Group {
    /// Of each rank, what it brought to this meeting and to the one before: a rank may write the next while others still read the last.
    brought: Vec<[RwLock<Vec<u32>>; 2]>,
    arrived: AtomicUsize,
    generation: AtomicUsize,
    /// The number of a rank that left, and 1; 0 while all are there.
    left: AtomicUsize,
}

/// One rank of a group.
#[derive(Debug, Clone)]
pub struct Rank {
    group: Arc<Group>,
    index: usize,
    meetings: usize,
    /// Logits of the tokens that were found so far.
    best: Vec<f32>,
}

impl Rank {
    /// The ranks of a group.
    pub fn group(size: usize) -> Vec<Self> {
        let group = Arc::new(Group {
            brought: (0..size).map(|_| <[RwLock<Vec<u32>>; 2]>::default()).collect(),
            arrived: AtomicUsize::new(0),
            generation: AtomicUsize::new(0),
            left: AtomicUsize::new(0),
        });
        (0..size)
            .map(|index| Self { group: Arc::clone(&group), index, meetings: 0, best: Vec::new() })
            .collect()
    }

    /// Which it is.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Ranks of its group.
    pub fn size(&self) -> usize {
        self.group.brought.len()
    }

    /// `values[i] = Σ values[i]` of all ranks, each of which calls this with as many values.
    pub fn sum(&mut self, values: &mut [f32]) -> Result<(), EngineError> {
        self.bring(values.iter().map(|value| value.to_bits()))?;
        values.fill(0.0);
        self.each_brought(|_, words| {
            values.iter_mut().zip(words).for_each(|(sum, word)| *sum += f32::from_bits(*word));
        });
        Ok(())
    }

    /// Brings words to all ranks, and waits until each of them has brought its own.
    pub fn bring(&mut self, words: impl Iterator<Item = u32>) -> Result<(), EngineError> {
        self.meetings += 1;
        {
            let own = &self.group.brought[self.index][self.meetings % 2];
            let mut own = own.write().unwrap_or_else(PoisonError::into_inner);
            own.clear();
            own.extend(words);
        }
        self.meet()
    }

    /// What each rank brought to the last meeting, in their order.
    pub fn each_brought(&self, mut each: impl FnMut(usize, &[u32])) {
        for (rank, brought) in self.group.brought.iter().enumerate() {
            each(rank, &brought[self.meetings % 2].read().unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Of each output the first largest logit of all ranks: `next` are the tokens of the rank's own part of the vocabulary, the first of which is token
    /// `first` of all.
    ///
    /// # Panics
    /// Where the vocabulary is larger than 32 bits can count.
    pub fn first_largest(
        &mut self,
        first: usize,
        next: &mut [u32],
        logit: impl Fn(usize, usize) -> f32,
    ) -> Result<(), EngineError> {
        let first = u32::try_from(first).expect("a vocabulary fits 32 bits");
        let own = next.iter().enumerate();
        self.bring(
            own.flat_map(|(output, token)| [logit(output, *token as usize).to_bits(), first + token]),
        )?;
        let mut best = std::mem::take(&mut self.best);
        best.clear();
        best.resize(next.len(), f32::NAN);
        self.each_brought(|rank, words| {
            for ((best, next), [logit, token]) in best.iter_mut().zip(&mut *next).zip(words.as_chunks().0) {
                let logit = f32::from_bits(*logit);
                if rank == 0 || logit > *best || best.is_nan() && !logit.is_nan() {
                    (*best, *next) = (logit, *token);
                }
            }
        });
        self.best = best;
        Ok(())
    }

    /// Leaves the group: this rank failed.
    pub fn leave(&self) {
        self.group.left.store(self.index + 1, Ordering::Release);
    }

    /// Takes back all that left, while none of the group is at a sum.
    pub fn restore(&self) {
        self.group.left.store(0, Ordering::Release);
        self.group.arrived.store(0, Ordering::Release);
    }

    fn meet(&self) -> Result<(), EngineError> {
        let Group { arrived, generation, left, .. } = &*self.group;
        let current = generation.load(Ordering::Acquire);
        if arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.size() {
            arrived.store(0, Ordering::Relaxed);
            generation.store(current.wrapping_add(1), Ordering::Release);
        } else {
            spin_until(|| generation.load(Ordering::Acquire) != current || left.load(Ordering::Acquire) > 0);
        }
        match left.load(Ordering::Acquire) {
            0 => Ok(()),
            rank => Err(EngineError::RankLost { rank: rank - 1, of: self.size() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_has_the_sum_of_all_in_their_order() {
        for size in [1, 2, 3, 5] {
            let found: Vec<Vec<u32>> = std::thread::scope(|scope| {
                let threads: Vec<_> = Rank::group(size)
                    .into_iter()
                    .map(|mut rank| {
                        scope.spawn(move || {
                            let mut all = Vec::new();
                            for turn in 0..200 {
                                let own = |i: usize| ((rank.index() + 1) * (i + 3 + turn)) as f32 / 7.0;
                                let mut values: Vec<f32> = (0..=turn % 9).map(own).collect();
                                rank.sum(&mut values).unwrap();
                                all.extend(values.into_iter().map(f32::to_bits));
                            }
                            all
                        })
                    })
                    .collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let mut wanted = Vec::new();
            for turn in 0..200 {
                let own = |rank: usize, i: usize| ((rank + 1) * (i + 3 + turn)) as f32 / 7.0;
                let sum = |i: usize| (0..size).fold(0.0, |sum, rank| sum + own(rank, i));
                wanted.extend((0..=turn % 9).map(sum).map(f32::to_bits));
            }
            assert!(found.iter().all(|found| *found == wanted), "{size} ranks");
        }
    }

    #[test]
    fn nobody_waits_for_a_rank_that_left() {
        let mut ranks = Rank::group(3);
        let lost = ranks.remove(1);
        let errors: Vec<String> = std::thread::scope(|scope| {
            let threads: Vec<_> = ranks
                .iter_mut()
                .map(|rank| scope.spawn(|| rank.sum(&mut [1.0]).unwrap_err().to_string()))
                .collect();
            lost.leave();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(errors.iter().all(|error| error.contains("rank 1 of 3")), "{errors:?}");
    }
}
