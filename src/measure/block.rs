//! One block of steps: fill the context, warm up, and time steps back to back.
//!
//! Enters: a session and a cell's input. Leaves: the device span and the interval of every step, cross-checked against the host's
//! clock. The order of cells, stopping and rejection are decided elsewhere.
//!
//! A decode is pinned: every step rewrites the same position, so all steps of a cell read the same KV.
//!
//! ```
//! use hbmark::engine::{self, DeviceChoice, DeviceOptions};
//! use hbmark::measure::block::{CellInput, take_block};
//! use hbmark_core::model::Dtype;
//! use hbmark_core::result::{Cell, Phase};
//!
//! # fn main() -> anyhow::Result<()> {
//! let model = hbmark::weights::open("tests/fixtures/models/qwen3-tied", None, 42)?;
//! let (options, device) = (DeviceOptions::default(), DeviceChoice::Cpu);
//! let mut session = engine::open("native", &model, Dtype::Bf16, device, options, &mut |_, _| {})?;
//! let cell = Cell { phase: Phase::Decode, engine: "native".into(), dtype: Dtype::Bf16, batch: 2, context: 8 };
//! let mut input = CellInput::new(&cell, 0, 42, model.architecture.vocab_size);
//! input.fill(session.as_mut())?;
//! let block = take_block(session.as_mut(), &input, 20, &mut Vec::new())?;
//! assert_eq!(block.step_ns.len(), 20);
//! # Ok(())
//! # }
//! ```

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::protocol::Protocol;
use crate::engine::{EngineError, SequenceId, Session, StepBatch};
use hbmark_core::result::{Block, Cause, Cell, KvFill, Phase};
use hbmark_core::stats;

/// Sequence ids of a cell start at this times its index, so several cells can be resident at once.
const SEQUENCES_PER_CELL: u64 = 1 << 20;

/// Attention scores of one fill step are kept below this many elements; filling is not timed.
const FILL_SCORE_ELEMENTS: usize = 1 << 26;

/// Why a block could not be taken or is not valid.
#[derive(Debug, thiserror::Error)]
pub enum BlockError {
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Untrusted(Cause),
}

/// The tokens of a cell and where they go.
#[derive(Debug, Clone)]
pub struct CellInput {
    phase: Phase,
    first: SequenceId,
    context: usize,
    prompts: Vec<Vec<u32>>,
    /// Of the K and V of each sequence.
    kv_seeds: Vec<u64>,
    kv: KvFill,
    /// The batch that is timed repeatedly.
    step: StepBatch,
    filled: bool,
}

impl CellInput {
    /// Seeded random tokens for a cell; cells differ, so no cache can serve two. What they are depends on the seed and on the step that is timed,
    /// and on nothing that ran before: `index` only keeps the sequences of several cells apart.
    pub fn new(cell: &Cell, index: usize, seed: u64, vocab: usize) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        // Both are below 2^28, and draft tokens are few. A verify step has the cache
        // and the first tokens of the decode step that it is held against.
        let step =
            (cell.context as u64) << 30 | (cell.batch as u64) << 1 | u64::from(cell.phase.is_over_cache());
        random.set_stream(step + 1);
        let vocab = u32::try_from(vocab).unwrap_or(u32::MAX);
        let draw = |random: &mut ChaCha8Rng, count: usize| -> Vec<Vec<u32>> {
            (0..cell.batch).map(|_| (0..count).map(|_| random.random_range(0..vocab)).collect()).collect()
        };
        let first = SequenceId(index as u64 * SEQUENCES_PER_CELL);
        let prompts = draw(&mut random, cell.context);
        let mut tokens = if cell.phase.is_over_cache() { draw(&mut random, 1) } else { prompts.clone() };
        let kv_seeds = (0..cell.batch).map(|_| random.random()).collect();
        let step = match cell.phase {
            Phase::Prefill => StepBatch::uniform(first, &tokens, 0),
            Phase::Decode => StepBatch::uniform(first, &tokens, cell.context),
            Phase::Verify { draft_tokens } => {
                for (tokens, drafted) in tokens.iter_mut().zip(draw(&mut random, draft_tokens)) {
                    tokens.extend(drafted);
                }
                StepBatch::uniform(first, &tokens, cell.context).as_verify_step()
            }
        };
        Self {
            phase: cell.phase,
            first,
            context: cell.context,
            prompts,
            kv_seeds,
            kv: KvFill::Synthetic,
            step,
            filled: false,
        }
    }

    /// The same input with its context filled in another way.
    pub fn filled_by(self, kv: KvFill) -> Self {
        Self { kv, ..self }
    }

    /// Random K and V for every sequence; `false` where the engine cannot fill its cache.
    fn fill_synthetically(&self, session: &mut dyn Session) -> Result<bool, EngineError> {
        let Some(kv) = session.synthetic_kv() else { return Ok(false) };
        for (step, seed) in self.step.sequences.iter().zip(&self.kv_seeds) {
            kv.fill_kv(step.sequence, self.context, *seed)?;
        }
        Ok(true)
    }

    /// Fills the KV cache of a decode cell up to its context: with random values where that is asked for and the engine can, else by a
    /// prefill in chunks that keep the attention scores small. Not timed.
    ///
    /// # Errors
    /// When the engine fails.
    pub fn fill(&mut self, session: &mut dyn Session) -> Result<(), EngineError> {
        if self.phase == Phase::Prefill || self.filled {
            return Ok(());
        }
        if self.kv == KvFill::Synthetic && self.fill_synthetically(session)? {
            self.filled = true;
            return Ok(());
        }
        let scores_per_token = self.prompts.len() * session.architecture().heads * self.context.max(1);
        let chunk = (FILL_SCORE_ELEMENTS / scores_per_token.max(1)).clamp(1, 512);
        // The last position is filled by a decode step: candle's first decode after a prefill rearranges the cache, and a pinned step
        // that started from the prefill's cache would pay for that every time.
        let prefilled = self.context.saturating_sub(1);
        let chunks = (0..prefilled).step_by(chunk).map(|start| start..(start + chunk).min(prefilled));
        for range in chunks.chain(std::iter::once(prefilled..self.context)) {
            let tokens: Vec<Vec<u32>> = self.prompts.iter().map(|p| p[range.clone()].to_vec()).collect();
            session.step(&StepBatch::uniform(self.first, &tokens, range.start))?;
        }
        if self.context > 0 {
            // Waits, so that nothing of the fill is left on the stream when timing starts.
            session.greedy_tokens()?;
        }
        self.filled = true;
        Ok(())
    }

    /// How many steps the next [`fill`](Self::fill) takes at the most: none where nothing is to be filled, one for each position of a prefill.
    /// `None` of random values, which no step writes.
    pub fn steps_to_fill(&self, session: &mut dyn Session) -> Option<usize> {
        if self.phase == Phase::Prefill || self.filled {
            return Some(0);
        }
        let prefills = self.kv == KvFill::Prefill || session.synthetic_kv().is_none();
        prefills.then_some(self.context)
    }

    /// The step that is timed repeatedly.
    pub fn step(&self) -> &StepBatch {
        &self.step
    }

    /// Frees the KV of the cell.
    pub fn release(&mut self, session: &mut dyn Session) {
        for sequence in &self.step.sequences {
            session.release(sequence.sequence);
        }
        self.filled = false;
    }
}

/// What the warm-up found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WarmupResult {
    pub step_seconds: f64,
    pub steady: bool,
    /// Relative change over the last steps, where not steady.
    pub drift: f64,
}

/// Runs steps until the device is busy long enough and the last steps show no trend; `whole` is the first visit's warm-up, later
/// ones are shorter. `stepped` is called after every step, outside of its time.
///
/// # Errors
/// When the engine fails.
pub fn warm_up(
    session: &mut dyn Session,
    input: &CellInput,
    protocol: &Protocol,
    whole: bool,
    stepped: &mut dyn FnMut(),
) -> Result<WarmupResult, BlockError> {
    let share = if whole { 1.0 } else { 0.1 };
    let min_seconds = protocol.warmup_min_seconds * share;
    let min_steps = match input.phase {
        Phase::Decode | Phase::Verify { .. } => (protocol.warmup_min_steps as f64 * share).ceil(),
        // A prefill step is worth many decode steps; seconds decide.
        Phase::Prefill => 1.0,
    };
    let start = session.timeline().host_now();
    let mut times: Vec<f64> = Vec::new();
    let mut tokens = Vec::with_capacity(input.step.output_count());
    loop {
        let before = session.timeline().host_now();
        session.step(&input.step)?;
        tokens.clear();
        session.next_tokens(&mut tokens)?;
        let now = session.timeline().host_now();
        times.push((now.0 - before.0) / 1e9);
        stepped();
        let busy = (now.0 - start.0) / 1e9;
        if busy < min_seconds || (times.len() as f64) < min_steps {
            continue;
        }
        let tail = &times[times.len() / 2..];
        let step_seconds = tail.iter().sum::<f64>() / tail.len() as f64;
        let trend = stats::trend(tail);
        let drift = trend.map_or(0.0, |t| t.relative_change);
        // A trend matters when it is both certain and large; one in twenty steady tails looks certain by chance.
        let steady = !trend.is_some_and(|t| t.significant && t.relative_change.abs() > 0.05);
        if steady || !whole || busy >= protocol.warmup_max_seconds {
            return Ok(WarmupResult { step_seconds, steady: steady || !whole, drift });
        }
    }
}

/// Times `steps` steps back to back.
///
/// `tokens` holds the cell's greedy tokens from its first block on; a step that gives others makes the cell invalid.
///
/// # Errors
/// When the engine fails, when identical steps give different tokens, or when the clocks disagree.
pub fn take_block(
    session: &mut dyn Session,
    input: &CellInput,
    steps: usize,
    tokens: &mut Vec<u32>,
) -> Result<Block, BlockError> {
    // Everything that the timed steps write into is there before the clock starts.
    let mut interval_ns = Vec::with_capacity(steps);
    let wanted = input.step.output_count();
    let mut now = Vec::with_capacity(wanted);
    tokens.reserve(wanted.saturating_sub(tokens.len()));
    session.timeline().reserve(2 * steps);
    session.experts_met();
    // The clocks start here: everything enqueued before has been waited for.
    let start = session.timeline().host_now();
    let mut last_end = start;
    for _ in 0..steps {
        session.timeline().mark()?;
        session.step(&input.step)?;
        session.timeline().mark()?;
        now.clear();
        session.next_tokens(&mut now)?;
        let end = session.timeline().host_now();
        interval_ns.push(end.0 - last_end.0);
        last_end = end;
        check_tokens(&now, &input.step, tokens)?;
    }
    // The clocks stop here; reading the marks comes after.
    let wall_ns = last_end.0 - start.0;
    let marks = session.timeline().drain()?;
    let step_ns: Vec<f64> = marks.chunks_exact(2).map(|pair| pair[1].0 - pair[0].0).collect();
    let spanned = marks.last().map_or(0.0, |m| m.0);
    let block = Block {
        at_ns: start.0,
        step_ns,
        interval_ns,
        wall_ns,
        timeline_ns: Some(spanned),
        experts_met: session.experts_met(),
        ..Block::default()
    };
    if !block.clocks_agree(spanned) {
        return Err(BlockError::Untrusted(Cause::ClocksDisagree { timeline_ns: spanned, host_ns: wall_ns }));
    }
    Ok(block)
}

fn check_tokens(now: &[u32], step: &StepBatch, first: &mut Vec<u32>) -> Result<(), BlockError> {
    let wanted = step.output_count();
    if now.len() != wanted {
        return Err(BlockError::Untrusted(Cause::TokenCount { wanted, found: now.len() }));
    }
    if first.is_empty() {
        now.clone_into(first);
    }
    match first.iter().zip(now).position(|(a, b)| a != b) {
        None => Ok(()),
        Some(output) => {
            let (first, then) = (first[output], now[output]);
            // Outputs of a sequence stand together.
            let ends = step.sequences.iter().scan(0, |end, step| {
                *end += step.outputs();
                Some(*end)
            });
            let sequence = ends.take_while(|end| *end <= output).count();
            Err(BlockError::Untrusted(Cause::TokensChanged { sequence, first, then }))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{DeviceChoice, DeviceOptions};
    use crate::measure::protocol::{self, NoopMonitor};
    use hbmark_core::model::Dtype;

    fn cell(engine: &str, phase: Phase, batch: usize, context: usize) -> Cell {
        Cell { phase, engine: engine.into(), dtype: Dtype::F32, batch, context }
    }

    /// The tokens of the last of these cells, with all of them measured in one session.
    fn tokens_of_last(cells: &[Cell], keep_resident: bool, looks: &[usize], seed: u64) -> Vec<u32> {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models/qwen3");
        let model = crate::weights::open(folder, None, 0).unwrap();
        let options = DeviceOptions { threads: Some(1), ..DeviceOptions::default() };
        let engine = &cells[0].engine;
        let mut session =
            crate::engine::open(engine, &model, Dtype::F32, DeviceChoice::Cpu, options, &mut |_, _| {})
                .unwrap();
        let protocol = Protocol { looks: looks.to_vec(), visits: 2, ..Protocol::smoke(seed) };
        let (measured, _) =
            protocol::run(session.as_mut(), cells, &protocol, &mut NoopMonitor, keep_resident, &mut |_| {});
        let last = measured.last().unwrap();
        assert_eq!(last.reason, None);
        last.tokens.clone()
    }

    #[test]
    fn a_verify_step_answers_first_what_the_decode_step_answers() {
        let decode = tokens_of_last(&[cell("native", Phase::Decode, 3, 21)], true, &[1], 7);
        let verify = Phase::Verify { draft_tokens: 3 };
        let cells = [cell("native", Phase::Decode, 3, 21), cell("native", verify, 3, 21)];
        let verified = tokens_of_last(&cells, true, &[2], 7);
        assert_eq!(verified.len(), 12);
        let first: Vec<u32> = verified.iter().step_by(4).copied().collect();
        assert_eq!(first, decode);
    }

    #[test]
    fn the_tokens_of_a_cell_depend_neither_on_what_ran_before_nor_on_how_often_it_was_visited() {
        for engine in ["native", "stock"] {
            for phase in [Phase::Decode, Phase::Prefill] {
                let last = || cell(engine, phase, 4, 21);
                let alone = tokens_of_last(&[last()], true, &[1], 7);
                assert_eq!(alone.len(), 4);
                let others = [cell(engine, Phase::Decode, 3, 40), cell(engine, phase, 1, 5), last()];
                for (looks, keep) in [(&[1][..], true), (&[4], true), (&[4], false)] {
                    let found = tokens_of_last(&others, keep, looks, 7);
                    assert_eq!(found, alone, "{engine} {phase:?} {looks:?} {keep}");
                }
                let reseeded = tokens_of_last(&[last()], true, &[1], 8);
                assert_ne!(reseeded, alone, "{engine} {phase:?}: another seed asks for other tokens");
            }
        }
    }
}
