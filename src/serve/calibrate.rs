//! A few steps of this very engine, timed before a run, from which a virtual clock is made.
//!
//! Enters: a session and the scheduler's options. Leaves: a [`Calibration`]. Prefills of growing length, decodes of growing batch, one decode
//! over a longer context and one later chunk of a prefill, in rounds; the median of each counts.

use crate::engine::{AdapterId, EngineError, SequenceId, SequenceStep, Session, StepBatch};
use hbmark_core::ledger::RaggedPart;
use hbmark_core::result::Ragged;
use hbmark_core::result::serving::SchedulerConfig;
use hbmark_core::stats::median;
use hbmark_core::units::Nanos;
use hbmark_traffic::clock::Clock;
use hbmark_traffic::step_model::Calibration;
use hbmark_traffic::workload::splitmix64;

/// Timed repetitions of a shape.
const REPEATS: usize = 5;
/// Time after which no shape is begun.
const BUDGET_NS: f64 = 15e9;
/// The longest prompt and the largest batch that are timed; beyond, the last segment is extrapolated.
const MAX_PROMPT: usize = 1024;
const MAX_BATCH: usize = 64;
/// Cached positions while decodes are timed, and the longer context that gives the slope.
const BASE_CONTEXT: usize = 16;
const LONG_CONTEXT: usize = 512;
/// Sequences of the step that gives the slope.
const SLOPE_BATCH: usize = 4;

/// Times the shapes. `between` is called before each, as a heartbeat.
pub fn calibrate(
    session: &mut dyn Session,
    config: &SchedulerConfig,
    clock: &dyn Clock,
    between: &mut dyn FnMut(),
) -> Result<Calibration, EngineError> {
    let capabilities = session.capabilities();
    let fused = capabilities.ragged == Ragged::Fused;
    let mut bench = Shapes {
        vocab: session.architecture().vocab_size as u64,
        paged: capabilities.paged,
        session,
        clock,
        block_size: config.block_size,
        next: u64::MAX / 2,
        tokens: Vec::new(),
    };
    let positions = config.max_model_len.min(config.num_blocks * config.block_size);
    let longest = MAX_PROMPT.min(positions - 1).min(config.max_num_batched_tokens.max(LONG_CONTEXT));
    let base = BASE_CONTEXT.min(longest / 2).max(1);
    let fits = (config.num_blocks / (base + 1).div_ceil(config.block_size)).max(1);
    let widest = if fused { config.max_num_seqs.min(MAX_BATCH).min(fits) } else { 1 };
    let long = LONG_CONTEXT.min(longest);
    let slope_batch = if fused { SLOPE_BATCH.min(widest) } else { 1 };
    let chunk = (long / 4).max(2);
    let mut shapes: Vec<Shape> = doubling(1, longest).into_iter().map(Shape::Prefill).collect();
    shapes.extend(doubling(1, widest).into_iter().map(|batch| Shape::Decode(batch, base)));
    // What the slopes are taken from.
    let over = [Shape::Decode(slope_batch, base), Shape::Decode(slope_batch, long), Shape::Prefill(chunk)];
    shapes.extend(over.iter().filter(|s| !shapes.contains(s)).copied().collect::<Vec<_>>());
    // An engine with a cache of its own prefills in one piece.
    let chunked = fused && long + chunk <= positions;
    if chunked {
        shapes.push(Shape::Chunk(long, chunk));
    }
    let mixture = Shape::Mixed(slope_batch, base, chunk);
    if fused && slope_batch < config.max_num_seqs {
        shapes.push(mixture);
    }
    let room = |shape: &Shape| shape.blocks(config.block_size) <= config.num_blocks;
    shapes.retain(room);
    let times = bench.rounds(&shapes, between)?;
    let of = |wanted: Shape| times.iter().find(|(shape, _)| *shape == wanted).map(|(_, time)| *time);
    let line = |pick: &dyn Fn(Shape) -> Option<usize>| {
        let mut points: Vec<(f64, f64)> =
            times.iter().filter_map(|(shape, time)| Some((pick(*shape)? as f64, *time))).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        points
    };
    let slope = |high: Shape, low: Shape, units: usize| match (of(high), of(low)) {
        (Some(high), Some(low)) if units > 0 => ((high - low) / units as f64).max(0.0),
        _ => 0.0,
    };
    let mut calibration = Calibration {
        looped: !fused,
        prefill: line(&|shape| if let Shape::Prefill(tokens) = shape { Some(tokens) } else { None }),
        decode: line(&|shape| match shape {
            Shape::Decode(batch, context) if context == base => Some(batch),
            _ => None,
        }),
        base_context: base as f64,
        ns_per_decode_position: slope(
            Shape::Decode(slope_batch, long),
            Shape::Decode(slope_batch, base),
            slope_batch * (long - base),
        ),
        ns_per_prefill_pair: slope(Shape::Chunk(long, chunk), Shape::Prefill(chunk), long * chunk),
        mixed: 1.0,
    };
    if let Some(seen) = of(mixture) {
        let parts = |cached, tokens| RaggedPart::new(cached, tokens);
        let decodes = std::iter::repeat_n(parts(base, 1), slope_batch);
        calibration.mixed = seen / calibration.step(decodes.chain([parts(0, chunk)]));
    }
    Ok(calibration)
}

/// The time that one more adapter adds to a step: decodes of a few sequences, each with an adapter of its own and without, in turns.
pub fn adapter_time(
    session: &mut dyn Session,
    config: &SchedulerConfig,
    clock: &dyn Clock,
    adapters: usize,
) -> Result<Nanos, EngineError> {
    let mut bench = Shapes {
        vocab: session.architecture().vocab_size as u64,
        paged: session.capabilities().paged,
        session,
        clock,
        block_size: config.block_size,
        next: u64::MAX / 4,
        tokens: Vec::new(),
    };
    let context = BASE_CONTEXT.min(config.max_model_len.saturating_sub(1)).max(1);
    let fits = config.num_blocks / (context + 1).div_ceil(config.block_size);
    let batch = SLOPE_BATCH.min(adapters).min(config.max_num_seqs).min(fits).max(1);
    let (mut with, mut without) = (Vec::new(), Vec::new());
    // The first round warms up.
    for round in 0..=REPEATS {
        for adapted in [false, true] {
            for index in 0..batch {
                let sequence = SequenceId(bench.next + index as u64);
                crate::engine::lora(bench.session)?
                    .set_adapter(sequence, adapted.then_some(AdapterId(index)))?;
            }
            let time = bench.shape(Shape::Decode(batch, context))?;
            if round > 0 {
                if adapted { with.push(time) } else { without.push(time) }
            }
        }
    }
    Ok(Nanos(((median(&with) - median(&without)) / batch as f64).max(0.0)))
}

/// A step to time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    /// One prompt of so many tokens.
    Prefill(usize),
    /// So many sequences over so many cached positions each.
    Decode(usize, usize),
    /// Behind so many cached positions, so many tokens of a prompt.
    Chunk(usize, usize),
    /// So many sequences decode over so many cached positions each while a prompt of so many tokens is prefilled.
    Mixed(usize, usize, usize),
}

impl Shape {
    fn blocks(self, block_size: usize) -> usize {
        match self {
            Self::Prefill(tokens) => tokens.div_ceil(block_size),
            Self::Decode(batch, context) => batch * (context + 1).div_ceil(block_size),
            Self::Chunk(start, tokens) => (start + tokens).div_ceil(block_size),
            Self::Mixed(batch, context, tokens) => {
                Self::Decode(batch, context).blocks(block_size) + Self::Prefill(tokens).blocks(block_size)
            }
        }
    }
}

/// 1, 2, 4 ... and the end.
fn doubling(from: usize, to: usize) -> Vec<usize> {
    let mut values: Vec<usize> =
        std::iter::successors(Some(from), |v| v.checked_mul(2)).take_while(|v| *v < to).collect();
    values.push(to.max(from));
    values
}

struct Shapes<'a> {
    session: &'a mut dyn Session,
    clock: &'a dyn Clock,
    vocab: u64,
    paged: bool,
    block_size: usize,
    /// Sequences that no run will name.
    next: u64,
    /// Greedy tokens of the last step.
    tokens: Vec<u32>,
}

impl Shapes<'_> {
    /// Sequences that bring `tokens` tokens each at `start`, each with blocks of its own for `room` positions.
    fn batch(&self, sequences: usize, tokens: usize, start: usize, room: usize) -> StepBatch {
        let blocks = room.div_ceil(self.block_size);
        let sequence = |index: usize| SequenceStep {
            sequence: SequenceId(self.next + index as u64),
            tokens: (0..tokens as u64)
                .map(|i| u32::try_from(splitmix64(index as u64, i) % self.vocab).unwrap_or(0))
                .collect(),
            start_position: start,
            draft_tokens: 0,
            block_table: if self.paged {
                (index * blocks..(index + 1) * blocks).filter_map(|b| u32::try_from(b).ok()).collect()
            } else {
                Vec::new()
            },
        };
        StepBatch { sequences: (0..sequences).map(sequence).collect() }
    }

    /// A prompt whose blocks lie behind those of `sequences` sequences of `room` positions.
    fn prompt_beside(&self, sequences: usize, room: usize, tokens: usize) -> SequenceStep {
        let before = sequences * room.div_ceil(self.block_size);
        let mut step = self.batch(1, tokens, 0, tokens).sequences.remove(0);
        step.sequence = SequenceId(self.next + sequences as u64);
        step.block_table.iter_mut().for_each(|block| *block += u32::try_from(before).unwrap_or(0));
        step
    }

    fn once(&mut self, batch: &StepBatch) -> Result<f64, EngineError> {
        self.tokens.clear();
        self.tokens.reserve(batch.output_count());
        let begin = self.clock.now().0;
        self.session.step(batch)?;
        self.session.next_tokens(&mut self.tokens)?;
        Ok(self.clock.now().0 - begin)
    }

    fn release(&mut self, sequences: usize) {
        for index in 0..sequences as u64 {
            self.session.release(SequenceId(self.next + index));
        }
        self.next += sequences as u64;
    }

    /// Rounds over all shapes, so that a slow minute of the machine touches all of them and not one: the median of each counts. The first
    /// round warms up. A machine too slow for all ends early with the shapes it could do, shortest first.
    fn rounds(
        &mut self,
        shapes: &[Shape],
        between: &mut dyn FnMut(),
    ) -> Result<Vec<(Shape, f64)>, EngineError> {
        let mut times: Vec<Vec<f64>> = vec![Vec::new(); shapes.len()];
        let begin = self.clock.now().0;
        for round in 0..=REPEATS {
            for (index, shape) in shapes.iter().enumerate() {
                let spent = self.clock.now().0 - begin;
                // Two points make a line.
                if spent > BUDGET_NS && (round > 1 || times.iter().filter(|t| !t.is_empty()).count() > 2) {
                    continue;
                }
                between();
                let time = self.shape(*shape)?;
                if round == 1 {
                    times[index].clear();
                }
                times[index].push(time);
            }
        }
        let known = shapes.iter().zip(&times).filter(|(_, times)| !times.is_empty());
        Ok(known.map(|(shape, times)| (*shape, median(times))).collect())
    }

    fn shape(&mut self, shape: Shape) -> Result<f64, EngineError> {
        let (sequences, tokens, start) = match shape {
            Shape::Prefill(tokens) => (1, tokens, 0),
            Shape::Decode(sequences, context) | Shape::Mixed(sequences, context, _) => {
                (sequences, 1, context)
            }
            Shape::Chunk(start, tokens) => (1, tokens, start),
        };
        if start > 0 {
            // What is cached is computed: pages that were never written would be read faster than memory. One sequence after the other,
            // because an engine may take only one prompt at a time.
            for step in self.batch(sequences, start, 0, start + tokens).sequences {
                self.session.step(&StepBatch { sequences: vec![step] })?;
            }
        }
        let mut batch = self.batch(sequences, tokens, start, start + tokens);
        if matches!(shape, Shape::Decode(..)) {
            // A decode follows decodes nearly always: the one behind a prefill finds other things in the caches and is not the one to time.
            self.once(&batch)?;
        }
        if let Shape::Mixed(.., prompt) = shape {
            batch.sequences.push(self.prompt_beside(sequences, start + tokens, prompt));
        }
        let time = self.once(&batch)?;
        self.release(batch.sequences.len());
        Ok(time)
    }
}
