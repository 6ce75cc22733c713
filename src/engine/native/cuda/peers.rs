//! Sums over the GPUs of a tensor parallel group, by kernels that read each other's memory (`kernels/all_reduce.cu`).
//!
//! Enters: what a rank adds to a sum, where [`PeerBuffer::begin`] says. Leaves: the hidden states with what all ranks added, and the token with the
//! largest logit of all. Nothing of it passes the host, so that a step of a rank is still one graph. All ranks launch the same kernels in the same
//! order; a rank that does not reach a barrier in [`Tuning::rank_timeout`] is lost, and no other waits for it then.

use Argument::{Address, I32, U64};

use super::device::{Argument, Device, GEMM_ALIGNMENT};
use super::kernels::{DeviceTensor, THREADS, Tuning, enqueue, launch_mismatch, size, word};
use crate::engine::EngineError;
use crate::engine::native::checks::MAX_GPU_RANKS;
use crate::engine::native::ranks::Rank;

/// Words in front of everything else, and which of them says that a rank was lost.
const WORDS: usize = 64;
const LOST: usize = MAX_GPU_RANKS + 2;

/// What `first_of_ranks` leaves in place of a token where a rank was lost.
pub const NO_TOKEN: u32 = u32::MAX;

/// Bytes in front of the sums, which the library of the device makes in place.
fn head_bytes(outputs: usize) -> usize {
    (4 * WORDS + 8 * outputs).next_multiple_of(GEMM_ALIGNMENT)
}

/// Bytes of one of the two sums.
fn sum_bytes(floats: usize) -> usize {
    (4 * floats).next_multiple_of(GEMM_ALIGNMENT)
}

/// Bytes of a peer buffer for sums of so many floats, and so many outputs.
pub fn buffer_bytes(floats: usize, outputs: usize) -> usize {
    head_bytes(outputs) + 2 * sum_bytes(floats)
}

/// What a rank shares with the others.
#[derive(Debug)]
struct Shared<D: Device> {
    memory: D::Memory,
    /// Where that of each rank lies.
    addresses: D::Memory,
}

/// The memory through which a rank meets the others.
#[derive(Debug)]
pub struct PeerBuffer<D: Device> {
    shared: Option<Shared<D>>,
    floats: usize,
    outputs: usize,
    /// Of the two sums the one that comes next.
    slot: usize,
    /// Where the sum that was begun is made.
    begun: Option<u64>,
}

impl<D: Device> Default for PeerBuffer<D> {
    fn default() -> Self {
        Self { shared: None, floats: 0, outputs: 0, slot: 0, begun: None }
    }
}

impl<D: Device> PeerBuffer<D> {
    /// Begins a sum of hidden states, and sees to it that all ranks have room for it and for the outputs of the step. Says whether something has moved,
    /// so that what was recorded before is void.
    pub fn begin(
        &mut self,
        device: &mut D,
        rank: &mut Rank,
        floats: usize,
        outputs: usize,
    ) -> Result<bool, EngineError> {
        let moved = floats > self.floats || outputs > self.outputs || self.shared.is_none();
        if moved {
            self.grow(device, rank, floats, outputs)?;
        }
        self.begun = self.shared.as_ref().map(|shared| D::address(&shared.memory) + self.sum_at(self.slot));
        Ok(moved)
    }

    /// Whether the two sums have had as many turns. Every step has an even number of sums, two for each layer, so that a recorded one finds the turn as it was.
    pub fn is_even(&self) -> bool {
        self.slot == 0
    }

    /// Where the sum that was begun is made, once.
    pub fn take_begun(&mut self) -> Option<u64> {
        self.begun.take()
    }

    /// Begins anew with the next sum: what a step that failed left there is no zeros. Kernels of others may still write to the memory.
    pub fn reset(&mut self) {
        (self.floats, self.outputs, self.begun) = (0, 0, None);
    }

    /// All ranks come here in the same step, with the same sizes.
    fn grow(
        &mut self,
        device: &mut D,
        rank: &mut Rank,
        floats: usize,
        outputs: usize,
    ) -> Result<(), EngineError> {
        // No kernel of any rank touches the old memory any more.
        device.synchronise()?;
        rank.bring(std::iter::empty())?;
        self.shared = None;
        self.slot = 0;
        self.floats = self.floats.max(floats).next_power_of_two();
        self.outputs = self.outputs.max(outputs).next_power_of_two();
        let bytes = buffer_bytes(self.floats, self.outputs);
        let memory = device.allocate_shared(bytes)?;
        device.upload(&memory, 0, &vec![0; bytes])?;
        device.synchronise()?;
        let own = D::address(&memory);
        let mut table = Vec::with_capacity(8 * rank.size());
        let own = own.to_le_bytes();
        rank.bring(own.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)))?;
        rank.each_brought(|_, words| table.extend(words.iter().flat_map(|word| word.to_le_bytes())));
        let addresses = device.allocate(table.len())?;
        device.upload(&addresses, 0, &table)?;
        self.shared = Some(Shared { memory, addresses });
        Ok(())
    }

    /// Whether every rank reads all of a sum itself.
    pub fn is_one_shot(ranks: usize, floats: usize, tuning: Tuning) -> bool {
        ranks == 2 || 4 * floats <= tuning.max_one_shot_bytes / if ranks > 4 { 2 } else { 1 }
    }

    fn sum_at(&self, slot: usize) -> u64 {
        (head_bytes(self.outputs) + slot * sum_bytes(self.floats)) as u64
    }

    fn launch(
        &self,
        device: &mut D,
        rank: &Rank,
        tuning: Tuning,
        (kernel, blocks): (&str, u32),
        rest: &[Argument],
    ) -> Result<(), EngineError> {
        let Some(shared) = &self.shared else {
            return launch_mismatch(device, kernel, "no sum was begun".into());
        };
        let mut arguments = vec![
            Address(D::address(&shared.addresses)),
            size(rank.index()),
            size(rank.size()),
            U64(u64::try_from(tuning.rank_timeout.as_nanos()).unwrap_or(u64::MAX)),
        ];
        arguments.extend(rest);
        enqueue(device, kernel, [blocks, 1, 1], arguments)
    }

    /// `to += Σ sums` over the ranks, of so many rows and columns of f32.
    pub fn all_reduce(
        &mut self,
        device: &mut D,
        rank: &Rank,
        tuning: Tuning,
        (rows, width): (usize, usize),
        to: u64,
    ) -> Result<(), EngineError> {
        let floats = rows * width;
        if !floats.is_multiple_of(4)
            || floats > self.floats.min(u32::MAX as usize)
            || rank.size() > MAX_GPU_RANKS
        {
            let what = format!("{rows} rows of {width} on {} ranks", rank.size());
            return launch_mismatch(device, "all_reduce", what);
        }
        self.begun = None;
        let blocks = |vectors: usize| {
            let blocks = vectors.div_ceil(THREADS as usize);
            word(blocks).clamp(1, device.multiprocessors())
        };
        let [own, other] = [self.slot, 1 - self.slot].map(|slot| U64(self.sum_at(slot)));
        // Kernels take the count without a sign: half of all counts would be too many for one with it.
        let sums = [own, other, size(self.slot), I32(word(floats).cast_signed())];
        let whole = [&sums[..], &[Address(to)]].concat();
        if Self::is_one_shot(rank.size(), floats, tuning) {
            let blocks = blocks(floats / 4);
            self.launch(device, rank, tuning, ("all_reduce", blocks), &whole)?;
        } else {
            let [slices, all] = [(floats / 4).div_ceil(rank.size()), floats / 4].map(blocks);
            self.launch(device, rank, tuning, ("reduce_slice", slices), &sums)?;
            self.launch(device, rank, tuning, ("gather_slices", all), &whole)?;
        }
        self.slot = 1 - self.slot;
        Ok(())
    }

    /// Replaces the tokens at `next`, of the rank's own part of the vocabulary, by those with the largest logits of all ranks.
    pub fn first_of_ranks(
        &self,
        device: &mut D,
        rank: &Rank,
        tuning: Tuning,
        (outputs, logits): (usize, &DeviceTensor<D>),
        next: u64,
        first: usize,
    ) -> Result<(), EngineError> {
        if outputs > self.outputs.min(logits.rows) {
            return launch_mismatch(device, "first_of_ranks", format!("{outputs} rows of {}", self.outputs));
        }
        let rest = [
            U64(4 * WORDS as u64),
            Address(D::address(&logits.memory)),
            Address(next),
            size(first),
            size(outputs),
            size(logits.width),
        ];
        self.launch(device, rank, tuning, ("first_of_ranks", 1), &rest)
    }

    /// Waits, and checks that kernels have lost no rank.
    pub fn check(&self, device: &mut D, ranks: usize) -> Result<(), EngineError> {
        let Some(shared) = &self.shared else { return Ok(()) };
        let mut lost = [0; 4];
        device.download(&shared.memory, 4 * LOST, &mut lost)?;
        match u32::from_le_bytes(lost) as usize {
            0 => Ok(()),
            rank => Err(EngineError::RankLost { rank: rank - 1, of: ranks }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::emulator::{Emulated, GraphNode};
    use super::*;

    /// Hidden states of 32 prompts of 8,192 tokens and 8,192 floats each.
    #[test]
    fn sums_of_more_floats_than_a_signed_word_counts_are_launched_with_their_count() {
        let mut device = Emulated::new(1);
        let mut allocate = || device.allocate(8).unwrap();
        let (shared, hidden) = (Shared { memory: allocate(), addresses: allocate() }, allocate());
        let rank = Rank::group(2).remove(0);
        let mut buffer =
            PeerBuffer { shared: Some(shared), floats: 1 << 32, outputs: 1, ..PeerBuffer::default() };
        let hidden = Emulated::address(&hidden);
        device.only_checks = true;
        buffer.all_reduce(&mut device, &rank, Tuning::default(), (1, 8192), hidden).unwrap();
        device.begin_capture().unwrap();
        for rows in [(1 << 18) - 1, 1 << 18] {
            buffer.all_reduce(&mut device, &rank, Tuning::default(), (rows, 8192), hidden).unwrap();
        }
        assert!(buffer.all_reduce(&mut device, &rank, Tuning::default(), (1 << 19, 8192), hidden).is_err());
        let counts = device
            .end_capture()
            .unwrap()
            .nodes
            .iter()
            .map(|node| match node {
                GraphNode::KernelLaunch(launch) => match launch.arguments[..] {
                    [.., I32(count), Address(_)] => count.cast_unsigned(),
                    _ => panic!("{launch:?}"),
                },
                GraphNode::Gemm(..) => panic!("{node:?}"),
            })
            .collect::<Vec<_>>();
        assert_eq!(counts, [(1 << 31) - 8192, 1 << 31]);
    }

    #[test]
    fn the_kernels_have_the_same_layout() {
        let source = include_str!("../../../../kernels/peers.cuh");
        assert!(source.contains(&format!("MAX_RANKS = {MAX_GPU_RANKS};")));
        assert!(source.contains(&format!("LOST = MAX_RANKS + {}", LOST - MAX_GPU_RANKS)));
        assert!(source.contains(&format!("USED = MAX_RANKS + {};", LOST + 1 - MAX_GPU_RANKS)));
        const { assert!(LOST + 2 < WORDS) };
    }

    #[test]
    fn sums_lie_where_the_library_may_assume_them_and_beside_each_other() {
        for (floats, outputs) in [(1, 1), (64, 1), (65, 2), (8192, 33), (1 << 20, 1024)] {
            let buffer = PeerBuffer::<Emulated> { floats, outputs, ..PeerBuffer::default() };
            let [first, second] = [0, 1].map(|slot| usize::try_from(buffer.sum_at(slot)).unwrap());
            assert!([first, second].iter().all(|at| at.is_multiple_of(GEMM_ALIGNMENT)), "{floats} floats");
            assert!(first >= 4 * WORDS + 8 * outputs && second >= first + 4 * floats, "{floats} floats");
            assert!(buffer_bytes(floats, outputs) >= second + 4 * floats, "{floats} floats");
        }
    }
}
