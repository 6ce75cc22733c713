//! Recording and replay of whole steps as CUDA graphs.
//!
//! Enters: the rows of a step. Leaves: whether its operations are to be enqueued, or all of them are already. The first decode step of a size runs
//! kernel by kernel, which allocates all scratch memory; the second is recorded; later ones of that size are one replay, whatever their tokens,
//! positions and blocks, because those are in device memory ([`step`](super::super::step)). Sizes are few: a decode step is padded to the next of
//! them ([`padded`]), and what its longest context needs in attention is rounded up to a power of two.

use super::CudaOperations;
use super::workspace::Part;
use crate::engine::EngineError;
use crate::engine::native::cuda::attention::{AttentionCut, QueryTiles, SequenceRun, comes_again};
use crate::engine::native::cuda::device::Device;
use crate::engine::native::cuda::step::Pool;
use crate::engine::native::operations::{StepLaunch, Steps};
use crate::engine::native::ragged_batch::Rows;
use crate::engine::native::rope::RopeTables;

/// The size that decode steps of so many rows are run at. A product takes `at_once` rows for the price of one, so that rows up to a whole number
/// of such groups cost no weights; beyond 128 rows an eighth is added at the most.
fn padded(rows: usize, at_once: usize) -> usize {
    if rows < at_once {
        return rows.next_power_of_two().min(at_once);
    }
    rows.next_multiple_of((rows.next_power_of_two() / 16).max(at_once))
}

/// Rows that products take at once: on tensor cores, and streaming.
pub(super) const TILED_AT_ONCE: usize = 8;
pub(super) const STREAMED_AT_ONCE: usize = 4;

/// What steps have in common that one graph can serve: rows and sequences, how they are attended to, and the power of two above the splits that their
/// longest context could fill.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct StepKey {
    tiles: QueryTiles,
    splits: usize,
    /// Whether a script picks experts.
    scripted: bool,
}

/// What is known of steps of a key.
#[derive(Debug)]
pub(super) enum GraphState<D: Device> {
    /// One ran, so the scratch is there.
    Ran,
    Captured(CapturedGraph<D>),
}

#[derive(Debug)]
pub(super) struct CapturedGraph<D: Device> {
    graph: D::Graph,
    /// Bytes of everything but attention, which depends on positions.
    bytes: u64,
    attentions: Vec<(AttentionCut, Option<usize>)>,
    routed: Vec<[u64; 2]>,
}

/// How the current step continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    Plain,
    Recording(StepKey),
}

impl<D: Device> CudaOperations<D> {
    /// Only steps over a cache come again and again; `longest` is what their positions reach.
    fn key(&self, rows: &Rows) -> Option<StepKey> {
        let run = SequenceRun::whole(rows);
        let longest = run.longest().div_ceil(self.tuning.min_split).next_power_of_two();
        (self.may_record && comes_again(rows)).then_some(StepKey {
            tiles: run.tiles(),
            splits: longest,
            scripted: self.script.is_set(),
        })
    }

    fn finish_capture(&mut self, key: StepKey) -> Result<(), EngineError> {
        // Until there is a graph the next step of the key runs kernel by kernel.
        self.known.remove(&key);
        let graph = self.device.end_capture()?;
        let attentions = std::mem::take(&mut self.attentions);
        let bytes = self.moved - self.attention_moved;
        self.device.replay(&graph)?;
        self.replays += 1;
        self.routed_layers += self.routed.len() as u64;
        let routed = self.routed.clone();
        self.known.insert(key, GraphState::Captured(CapturedGraph { graph, bytes, attentions, routed }));
        Ok(())
    }
}

impl<D: Device> Steps for CudaOperations<D> {
    fn begin(&mut self, rows: &Rows, ropes: &RopeTables, pool: &Pool<D>) -> Result<StepLaunch, EngineError> {
        let moved = self.step.set(&mut self.device, rows, ropes, pool);
        if !matches!(moved, Ok(false)) {
            self.known.clear();
        }
        moved?;
        self.rounded = None;
        self.outputs = rows.served();
        self.attentions.clear();
        self.routed.clear();
        (self.moved, self.attention_moved) = (0, 0);
        let Some(key) = self.key(rows) else { return Ok(StepLaunch::PerOperation) };
        match self.known.get(&key) {
            None => Ok(StepLaunch::PerOperation),
            Some(GraphState::Ran) => {
                self.device.begin_capture()?;
                self.mode = Mode::Recording(key);
                Ok(StepLaunch::PerOperation)
            }
            Some(GraphState::Captured(recorded)) => {
                self.device.replay(&recorded.graph)?;
                self.replays += 1;
                let run = SequenceRun::whole(rows);
                let attentions = recorded.attentions.iter();
                let read: u64 = attentions.map(|(cut, window)| cut.bytes(&run, *window, &pool.shape)).sum();
                self.moved = recorded.bytes + read;
                self.routed.clone_from(&recorded.routed);
                self.routed_layers += self.routed.len() as u64;
                Ok(StepLaunch::WholeGraph)
            }
        }
    }

    fn end(&mut self, rows: &Rows) -> Result<(), EngineError> {
        debug_assert!(self.peer_buffer.is_even(), "two sums take turns in every step");
        match std::mem::replace(&mut self.mode, Mode::Plain) {
            Mode::Recording(key) => self.finish_capture(key),
            Mode::Plain => {
                self.routed_layers += self.routed.len() as u64;
                if let Some(key) = self.key(rows) {
                    self.known.insert(key, GraphState::Ran);
                }
                Ok(())
            }
        }
    }

    fn abandon(&mut self) {
        if let Mode::Recording(key) = std::mem::replace(&mut self.mode, Mode::Plain) {
            // The step has said why it failed; that its recording is void is no news, and no fault of the next step.
            drop(self.device.end_capture());
            self.known.remove(&key);
        }
        if self.ranks > 1 {
            self.peer_buffer.reset();
            self.known.clear();
        }
        if self.workspace.memory(Part::ToNorm).is_some() {
            // Sums that nobody normed are not zeros.
            self.workspace.forget(Part::ToNorm);
            self.known.clear();
        }
    }

    fn padded(&self, rows: &Rows) -> usize {
        if comes_again(rows) { padded(rows.len(), self.at_once) } else { rows.len() }
    }

    fn allow_whole_graph(&mut self, allowed: bool) {
        self.may_record = allowed;
    }
}

#[cfg(test)]
mod tests {
    use super::{STREAMED_AT_ONCE, TILED_AT_ONCE, padded};

    #[test]
    fn sizes_are_few_and_cost_an_eighth_at_the_most() {
        let sizes = |at_once: usize, upto: usize| {
            let mut sizes: Vec<usize> = (1..=upto).map(|rows| padded(rows, at_once)).collect();
            sizes.dedup();
            sizes
        };
        assert_eq!(sizes(TILED_AT_ONCE, 100), [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104]);
        assert_eq!(sizes(STREAMED_AT_ONCE, 20), [1, 2, 4, 8, 12, 16, 20]);
        assert!(sizes(TILED_AT_ONCE, 4096).len() < 64);
        for at_once in [TILED_AT_ONCE, STREAMED_AT_ONCE] {
            for rows in 1..=4096 {
                let size = padded(rows, at_once);
                let free = rows.next_power_of_two().min(rows.next_multiple_of(at_once));
                assert!(size >= rows && (size <= free || (size - rows) * 8 <= rows), "{rows} as {size}");
                assert_eq!(padded(size, at_once), size, "a size is its own");
            }
        }
    }
}
