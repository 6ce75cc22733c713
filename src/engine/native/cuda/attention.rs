//! Attention as typed launches: over single rows, split by positions, and over prompts, on tensor cores.
//!
//! Enters: queries, a step and a pool. Leaves: launches of `decode_attention.cu` and `prefill_attention.cu`, and the bytes of K and V they read.

use std::ops::Range;

use Argument::{Address, F32, I32, U64};

use super::device::{Argument, Device, KernelLaunch};
use super::kernels::{DeviceTensor, Tuning, launch_mismatch, size, word};
use super::latent::LatentCut;
use super::step::{Pool, StepState};
use crate::engine::EngineError;
use crate::engine::native::ragged_batch::{Rows, SequenceRows};
use crate::engine::native::shapes::{AttentionShape, PoolShape};
use hbmark_core::model::Dtype;

/// Threads of a block, its warps, query heads that can share a load, and bytes of K and V that a thread has on their way
/// (`decode_attention.cu`).
const THREADS: u32 = 256;
const WARPS: usize = 8;
const SHARED_HEADS: [usize; 4] = [1, 2, 4, 8];
const LANE_BYTES: usize = 256;
/// Splits whose values are asked for together when they are merged (`splits.cuh`).
const MERGED_AT_ONCE: usize = 16;

/// The widest head of the attention kernels.
pub const MAX_HEAD_DIM: usize = 256;

/// Threads and queries of a block, positions of a tile, and the widest K and V of a head that there are kernels for (`prefill_attention.cu`).
const PREFILL_THREADS: u32 = 128;
pub(super) const QUERIES: usize = 64;
const POSITIONS: usize = 64;
const PREFILL_DIMS: [[usize; 2]; 3] = [[64, 64], [128, 128], [192, 128]];
/// Tiles of queries of a sequence from which a prompt makes blocks enough by itself, and parts of its positions would be many bytes.
const MOST_SPLIT_TILES: usize = 4;
/// Its blocks that a multiprocessor holds.
const PREFILL_RESIDENT: usize = 2;

/// How decode attention is cut, by shape and window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvSplitPlan {
    /// Query heads that share a load.
    pub together: usize,
    /// Loads of the same K and V by one row.
    pub chunks: usize,
    /// Blocks that share the positions of a row.
    pub splits: usize,
}

impl KvSplitPlan {
    /// As few splits as come near to filling the device evenly, none shorter than the tuning says; `longest` positions are the most that a
    /// row sees.
    pub fn new<D: Device>(
        device: &D,
        shape: &AttentionShape,
        rows: usize,
        longest: usize,
        tuning: Tuning,
    ) -> Self {
        let together = SHARED_HEADS.into_iter().find(|heads| *heads >= shape.group()).unwrap_or(8);
        let chunks = shape.group().div_ceil(together);
        // Eight heads need the registers of two blocks.
        let resident = if together > 4 { 1 } else { 2 };
        let ways = rows * shape.kv_heads * chunks;
        let most = longest.div_ceil(tuning.min_split).max(1);
        let splits = splits(ways, device.multiprocessors() as usize, resident, most);
        Self { together, chunks, splits }
    }

    /// Dynamic shared memory: K and V on their way, then what warps, and then splits, are merged in.
    fn shared_bytes(&self, head_dim: usize) -> usize {
        let of_warps = WARPS * self.together * (head_dim + 2) * 4;
        (LANE_BYTES * THREADS as usize).max(of_warps).max(4 * self.together * self.splits)
    }
}

/// Blocks per way that share its positions. What counts is how much of the device has blocks, and how evenly multiprocessors do; the fewest
/// splits within 5 % of the best are taken, since each must be merged. More than one round of merging needs a device that would stay idle.
pub(super) fn splits(ways: usize, multiprocessors: usize, resident: usize, most: usize) -> usize {
    let most = most.min(MERGED_AT_ONCE.max(multiprocessors.div_ceil(ways)));
    let score = |splits: usize| {
        let blocks = splits * ways;
        let filled = (blocks as f64 / (multiprocessors * resident) as f64).min(1.0);
        filled * blocks as f64 / blocks.next_multiple_of(multiprocessors) as f64
    };
    let best = (1..=most).map(score).fold(0.0, f64::max);
    (1..=most).find(|splits| score(*splits) >= 0.95 * best).unwrap_or(1)
}

/// Where those who attend to parts of the positions leave what they found, and meet.
#[derive(Debug, Clone, Copy, Default)]
pub struct SplitSpace {
    /// `[rows, heads, splits, value_dim]` f32.
    pub partial: u64,
    /// `[rows, heads, splits]` pairs of f32.
    pub statistics: u64,
    /// Words, zeros before the first launch.
    pub arrived: u64,
}

/// Attention of single rows over the cache.
#[derive(Debug)]
pub struct DecodeAttention<'a, D: Device> {
    /// Which of the step.
    pub rows: Range<usize>,
    pub shape: AttentionShape,
    pub window: Option<usize>,
    /// One more score of each head, whose V is zero.
    pub sinks: Option<&'a DeviceTensor<D>>,
    pub cut: KvSplitPlan,
    pub query: &'a DeviceTensor<D>,
    pub step: &'a StepState<D>,
    pub pool: &'a Pool<D>,
    pub layer: usize,
    pub out: &'a DeviceTensor<D>,
    /// All rows of it in the format of the cache, for the product that follows; 0 for none.
    pub rounded: u64,
    /// With `[rows, kv_heads · chunks]` words.
    pub space: SplitSpace,
}

impl<D: Device> DecodeAttention<'_, D> {
    /// Enqueues it.
    pub fn launch(&self, device: &mut D, tuning: Tuning) -> Result<(), EngineError> {
        let Self { rows, shape, window, sinks, cut, query, step, pool, layer, out, .. } = self;
        let dim = shape.head_dim;
        if query.width != shape.query_width()
            || out.width != query.width
            || query.rows.min(out.rows) < rows.end
        {
            return launch_mismatch(
                device,
                "decode_attention",
                format!("rows {rows:?} of {} to {}", query.width, out.width),
            );
        }
        if !dim.is_multiple_of(8) || dim > MAX_HEAD_DIM || pool.shape.head_dim != dim {
            return launch_mismatch(device, "decode_attention", format!("heads of {dim}"));
        }
        let sinks = sinks_argument(device, "decode_attention", shape, *sinks)?;
        let known_dim = if matches!(dim, 64 | 128) && pool.shape.dtype != Dtype::F32 { dim } else { 0 };
        let of_row = |address, bytes: usize| row_address(address, rows.start, bytes);
        device.launch(&KernelLaunch {
            kernel: format!("decode_attention_{}_g{}_d{known_dim}", pool.shape.dtype, cut.together),
            grid: [word(rows.len()), word(shape.kv_heads * cut.chunks), word(cut.splits)],
            threads: THREADS,
            shared_bytes: word(cut.shared_bytes(dim)),
            arguments: vec![
                of_row(D::address(&query.memory), 4 * query.width),
                of_row(step.positions(), 4),
                Address(step.tables()),
                of_row(step.starts(), 4),
                of_row(D::address(&out.memory), 4 * out.width),
                of_row(self.rounded, 2 * out.width),
                Address(self.space.partial),
                Address(self.space.statistics),
                Address(self.space.arrived),
                U64(pool.layer_bytes() as u64),
                size(*layer),
                size(shape.heads),
                size(shape.kv_heads),
                size(dim),
                size(pool.block_shift() as usize),
                window_argument(*window),
                size(tuning.min_split),
                F32(shape.scale),
                F32(shape.softcap.unwrap_or(0.0)),
                sinks,
            ],
        })
    }
}

/// Where a row begins, of so many bytes each; nowhere where there are no rows.
pub(super) fn row_address(rows: u64, row: usize, bytes: usize) -> Argument {
    Address(if rows == 0 { 0 } else { rows + (row * bytes) as u64 })
}

/// How an attention is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionCut {
    /// Rows by themselves.
    Rows(KvSplitPlan),
    /// Rows of each sequence together, for heads of K and V that so many query heads share.
    Tiles { group: usize },
    /// Over latents.
    Latents(LatentCut),
}

impl AttentionCut {
    /// Bytes of K and V that the rows of a run read.
    pub fn bytes(&self, run: &SequenceRun<'_>, window: Option<usize>, pool: &PoolShape) -> u64 {
        match self {
            Self::Rows(cut) => row_bytes(run, cut.chunks, window, pool.position_bytes()),
            Self::Tiles { group } => tile_bytes(run, *group, window, pool.position_bytes()),
            Self::Latents(cut) => cut.bytes(run, pool.position_bytes()),
        }
    }
}

/// Consecutive sequences of a step, to which one launch attends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SequenceRun<'a> {
    step: &'a Rows,
    sequences: Range<usize>,
}

impl<'a> SequenceRun<'a> {
    /// All sequences of a step.
    pub fn whole(step: &'a Rows) -> Self {
        Self { step, sequences: 0..step.sequences.len() }
    }

    /// The sequences of a step with prompts in three: those of a single row before the first prompt, those from there to the last, and those behind, of
    /// which none may be there. Single rows between prompts stay among them. Steps that come again are one: a graph serves others of theirs.
    pub fn with_single_rows_apart(step: &'a Rows) -> impl Iterator<Item = Self> {
        let count = step.sequences.len();
        let single = |sequence: &&SequenceRows| sequence.rows.len() == 1;
        let (mut before, mut behind) = (0, 0);
        if !comes_again(step) {
            before = step.sequences.iter().take_while(single).count();
            behind = step.sequences[before..].iter().rev().take_while(single).count();
        }
        let parts = [0..before, before..count - behind, count - behind..count];
        parts.into_iter().filter(|part| !part.is_empty()).map(move |sequences| Self { step, sequences })
    }

    /// Whether they are all.
    pub fn is_whole(&self) -> bool {
        self.sequences.len() == self.step.sequences.len()
    }

    /// Which of the step they are.
    pub fn sequences(&self) -> Range<usize> {
        self.sequences.clone()
    }

    fn all(&self) -> &'a [SequenceRows] {
        &self.step.sequences[self.sequences()]
    }

    /// Their rows.
    pub fn rows(&self) -> Range<usize> {
        let sequences = self.all();
        sequences.first().map_or(0, |first| first.rows.start)
            ..sequences.last().map_or(0, |last| last.rows.end)
    }

    fn positions(&self) -> &'a [u32] {
        &self.step.positions[self.rows()]
    }

    /// The positions that the last of them reaches.
    pub fn longest(&self) -> usize {
        self.positions().iter().max().map_or(0, |position| *position as usize + 1)
    }

    /// How they are launched.
    pub fn tiles(&self) -> QueryTiles {
        QueryTiles::of(self)
    }

    /// Tiles with queries, of which rows have so many each; of steps that come again the most that one of a graph has.
    pub(super) fn busy_tiles(&self, per_row: usize) -> usize {
        if comes_again(self.step) {
            let launched = self.tiles();
            return launched.tiles(per_row).min(launched.sequences * launched.of_longest(per_row));
        }
        self.all().iter().map(|sequence| (sequence.rows.len() * per_row).div_ceil(QUERIES)).sum()
    }
}

/// Whether all tokens have logits: in decode and verify steps.
pub(super) fn comes_again(rows: &Rows) -> bool {
    rows.len() == rows.outputs.len()
}

/// Bytes of the positions that single rows see, in one layer, each loaded so many times.
pub(super) fn row_bytes(
    run: &SequenceRun<'_>,
    loads: usize,
    window: Option<usize>,
    position_bytes: usize,
) -> u64 {
    let seen = |position: u32| (position as usize + 1).min(window.unwrap_or(usize::MAX));
    let positions: usize = run.positions().iter().map(|position| seen(*position)).sum();
    (positions * loads * position_bytes) as u64
}

/// Bytes of one position in one layer, for each tile of queries that sees it; whole tiles of positions before it count.
pub(super) fn tile_bytes(
    run: &SequenceRun<'_>,
    group: usize,
    window: Option<usize>,
    position_bytes: usize,
) -> u64 {
    let of_sequence = |sequence: &SequenceRows| {
        let (queries, start) = (sequence.rows.len() * group, sequence.start_position);
        let of_tile = |first: usize| {
            let (low, high) = (start + first / group, start + (queries.min(first + QUERIES) - 1) / group);
            let begin = window.map_or(0, |window| (low + 1).saturating_sub(window));
            high + 1 - begin / POSITIONS * POSITIONS
        };
        (0..queries).step_by(QUERIES).map(of_tile).sum::<usize>()
    };
    let positions: usize = run.all().iter().map(of_sequence).sum();
    (positions * position_bytes) as u64
}

/// Attention of all rows of each sequence together.
#[derive(Debug)]
pub struct PrefillAttention<'a, D: Device> {
    pub shape: AttentionShape,
    pub window: Option<usize>,
    /// One more score of each head, whose V is zero.
    pub sinks: Option<&'a DeviceTensor<D>>,
    pub query: &'a DeviceTensor<D>,
    pub step: &'a StepState<D>,
    pub pool: &'a Pool<D>,
    pub layer: usize,
    pub out: &'a DeviceTensor<D>,
    /// Blocks that share the positions of a tile of queries.
    pub splits: usize,
    /// With `[tiles, kv_heads]` words, where there are several.
    pub space: SplitSpace,
}

/// Dynamic shared memory: two tiles of K and of V, in whose place splits are then merged; of elements of one byte also the one of both that they
/// are widened to, and their scales.
fn prefill_shared_bytes(known: [usize; 2], element_bytes: usize, splits: usize) -> usize {
    let elements = POSITIONS * (known[0] + known[1]);
    let widened = if element_bytes == 1 { 2 * elements + 2 * 2 * POSITIONS * 4 } else { 0 };
    (2 * elements * element_bytes + widened).max(4 * QUERIES * splits)
}

/// Sequences, their rows, and rows of the longest, at which the attention of a run is launched. Of a step that comes again the first and the last are powers
/// of two, so that few graphs serve steps of many mixtures: a place without a sequence has no rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct QueryTiles {
    sequences: usize,
    rows: usize,
    pub(super) most_rows: usize,
}

impl QueryTiles {
    /// Those of a run.
    fn of(run: &SequenceRun<'_>) -> Self {
        let (sequences, rows) = (run.sequences.len(), run.rows().len());
        let most_rows = run.all().iter().map(|sequence| sequence.rows.len()).max().unwrap_or(0);
        if !comes_again(run.step) {
            return Self { sequences, rows, most_rows };
        }
        Self {
            sequences: sequences.next_power_of_two().min(rows),
            rows,
            most_rows: most_rows.next_power_of_two(),
        }
    }

    /// Places for sequences.
    pub(super) fn places(self) -> usize {
        self.sequences
    }

    /// Tiles of queries, of which rows have so many each, as they lie in `query_tiles.cuh`.
    pub(super) fn tiles(self, per_row: usize) -> usize {
        (self.rows * per_row + self.sequences * (QUERIES - 1)) / QUERIES
    }

    /// Those of the longest sequence.
    fn of_longest(self, per_row: usize) -> usize {
        (self.most_rows * per_row).div_ceil(QUERIES)
    }
}

impl<D: Device> PrefillAttention<'_, D> {
    /// Splits of each tile, so that few queries over many positions fill the device, and the words that splits meet at. `longest` positions are
    /// the most that a row sees.
    pub fn splits(
        device: &D,
        run: &SequenceRun<'_>,
        shape: &AttentionShape,
        longest: usize,
        tuning: Tuning,
    ) -> (usize, usize) {
        let (launched, group) = (run.tiles(), shape.group());
        let words = shape.kv_heads * launched.tiles(group);
        if launched.of_longest(group) > MOST_SPLIT_TILES {
            return (1, words);
        }
        let ways = shape.kv_heads * run.busy_tiles(group);
        let most = longest.div_ceil(tuning.min_split.max(POSITIONS)).max(1);
        (splits(ways, device.multiprocessors() as usize, PREFILL_RESIDENT, most), words)
    }

    /// Whether some sequence of a run brings as many rows as the tuning says, and there is a kernel for the heads and the cache.
    pub fn fits(run: &SequenceRun<'_>, pool: &PoolShape, tuning: Tuning) -> bool {
        let kernel = known_dims(pool.head_dim, pool.value_dim, pool.element_bytes());
        kernel.is_some() && pool.dtype != Dtype::F32 && run.tiles().most_rows >= tuning.min_prefill_rows
    }

    /// Enqueues it.
    pub fn launch(&self, device: &mut D, run: &SequenceRun<'_>, tuning: Tuning) -> Result<(), EngineError> {
        let Self { shape, window, sinks, query, step, pool, layer, out, splits, .. } = self;
        let sinks = sinks_argument(device, "prefill_attention", shape, *sinks)?;
        let (dim, rows, launched) = (shape.head_dim, run.rows(), run.tiles());
        if (query.width, out.width) != (shape.query_width(), shape.attended_width())
            || query.rows.min(out.rows) < rows.end
        {
            let what = format!("rows {rows:?} of {} to {}", query.width, out.width);
            return launch_mismatch(device, "prefill_attention", what);
        }
        let Some(known) = known_dims(dim, shape.value_dim, pool.shape.element_bytes()) else {
            return launch_mismatch(device, "prefill_attention", format!("heads of {dim}"));
        };
        let of_row = |address, bytes: usize| row_address(address, rows.start, bytes);
        device.launch(&KernelLaunch {
            kernel: format!("prefill_attention_{}_d{}", pool.shape.dtype, known[0]),
            grid: [word(launched.tiles(shape.group()) * splits), word(shape.kv_heads), 1],
            threads: PREFILL_THREADS,
            shared_bytes: word(prefill_shared_bytes(known, pool.shape.element_bytes(), *splits)),
            arguments: vec![
                of_row(D::address(&query.memory), 4 * query.width),
                of_row(step.positions(), 4),
                row_address(step.last_rows(), run.sequences().start, 4),
                Address(pool.tables(step)),
                of_row(step.starts(), 4),
                of_row(D::address(&out.memory), 4 * out.width),
                U64(pool.layer_bytes() as u64),
                size(*layer),
                size(shape.heads),
                size(shape.kv_heads),
                size(dim),
                size(shape.value_dim),
                size(pool.block_shift() as usize),
                window_argument(*window),
                F32(shape.scale),
                F32(shape.softcap.unwrap_or(0.0)),
                sinks,
                size(*splits),
                size(tuning.min_split.div_ceil(POSITIONS)),
                size(rows.start),
                size(launched.sequences),
                Address(self.space.partial),
                Address(self.space.statistics),
                Address(self.space.arrived),
            ],
        })
    }
}

/// The widths of K and V of the kernel for heads, where there is one.
fn known_dims(head_dim: usize, value_dim: usize, element_bytes: usize) -> Option<[usize; 2]> {
    let whole = [head_dim, value_dim].iter().all(|dim| dim.is_multiple_of(8));
    // Elements of one byte are widened in tiles that are alike.
    let alike = element_bytes > 1 || head_dim == value_dim;
    let fits = |known: &[usize; 2]| head_dim <= known[0] && value_dim <= known[1];
    PREFILL_DIMS.into_iter().find(fits).filter(|_| whole && alike)
}

/// The sinks of all heads as kernels take them: 0 where there are none.
fn sinks_argument<D: Device>(
    device: &D,
    kernel: &str,
    shape: &AttentionShape,
    sinks: Option<&DeviceTensor<D>>,
) -> Result<Argument, EngineError> {
    match sinks {
        Some(sinks) if sinks.width != shape.heads => {
            launch_mismatch(device, kernel, format!("{} sinks of {} heads", sinks.width, shape.heads))
        }
        sinks => Ok(Address(sinks.map_or(0, |sinks| D::address(&sinks.memory)))),
    }
}

/// A window as kernels take it: the largest where there is none.
fn window_argument(window: Option<usize>) -> Argument {
    I32(window.and_then(|window| i32::try_from(window).ok()).unwrap_or(i32::MAX))
}

#[cfg(test)]
mod tests {
    use super::{PREFILL_DIMS, QUERIES, Rows, SequenceRun, prefill_shared_bytes, splits};

    /// A step of sequences that bring so many rows each, with logits of the last.
    fn step(brings: &[usize]) -> Rows {
        let mut rows = Rows::new(16);
        for &count in brings {
            let table: Vec<u32> = (0..).take(count.div_ceil(16)).collect();
            rows.push(&vec![0; count], 0, &table);
        }
        rows
    }

    #[test]
    fn tiles_of_every_mixture_lie_behind_each_other() {
        let mixtures: [&[usize]; 6] =
            [&[1], &[64], &[1, 1, 1], &[7, 1, 200, 3, 1], &[65, 63, 64, 1, 1, 130], &[33; 40]];
        for brings in mixtures {
            for per_row in [1, 3, 4, 7, 64, 128] {
                // As `query_tiles.cuh` has it.
                let first = |sequence: usize| {
                    let before: usize = brings[..sequence].iter().sum();
                    (before * per_row + sequence * (QUERIES - 1)) / QUERIES
                };
                for (sequence, rows) in brings.iter().enumerate() {
                    let end = first(sequence) + (rows * per_row).div_ceil(QUERIES);
                    assert!(end <= first(sequence + 1), "{brings:?}, {per_row} queries a row");
                }
                let launched = SequenceRun::whole(&step(brings)).tiles().tiles(per_row);
                assert!(first(brings.len()) <= launched, "{brings:?}, {per_row} queries a row");
            }
        }
    }

    #[test]
    fn a_prompt_beside_decodes_makes_no_tiles_of_its_length_for_them() {
        let brings: Vec<usize> = [1793].into_iter().chain([1; 255]).rev().collect();
        let rows = step(&brings);
        // 113 tiles of the prompt, and one for each of the others; so many that are without queries may lie between sequences.
        let whole = SequenceRun::whole(&rows);
        assert_eq!((whole.busy_tiles(4), whole.tiles().tiles(4)), (368, 380));
        let apart: Vec<_> = SequenceRun::with_single_rows_apart(&rows).collect();
        assert_eq!(apart.iter().map(SequenceRun::rows).collect::<Vec<_>>(), [0..255, 255..2048]);
        assert_eq!(apart[1].tiles().tiles(4), 113);
    }

    #[test]
    fn single_rows_are_apart_before_and_behind_prompts() {
        let apart = |rows: &Rows| -> Vec<_> {
            SequenceRun::with_single_rows_apart(rows).map(|run| (run.sequences(), run.rows())).collect()
        };
        assert_eq!(apart(&step(&[1, 1, 5, 1, 3, 1])), [(0..2, 0..2), (2..5, 2..11), (5..6, 11..12)]);
        assert_eq!(apart(&step(&[5])), [(0..1, 0..5)]);
        assert_eq!(apart(&step(&[2, 1])), [(0..1, 0..2), (1..2, 2..3)]);
        // A graph serves others of them.
        let mut verified = step(&[1, 4]);
        verified.outputs = (0..5).collect();
        assert_eq!(apart(&verified), [(0..2, 0..5)]);
        assert_eq!(apart(&step(&[1, 1, 1])), [(0..3, 0..3)]);
    }

    #[test]
    fn splits_fill_a_device_evenly_and_are_few() {
        // Multiprocessors of an H200 and of an A100; ways of 8 heads of K and V at batch 1, 8 and 32.
        assert_eq!([8, 64, 256].map(|ways| splits(ways, 132, 2, 128)), [16, 4, 1]);
        assert_eq!([8, 64, 256].map(|ways| splits(ways, 108, 2, 128)), [13, 5, 2]);
        // One head, which would leave most of the device idle; and a context too short for more.
        assert_eq!(splits(1, 132, 2, 1000), 129);
        assert_eq!(splits(8, 132, 2, 8), 8);
    }

    #[test]
    fn what_splits_of_a_tile_count_has_room_whatever_the_head() {
        // One head of K and V and one sequence: as many splits as there are multiprocessors, nearly.
        let most = splits(1, 132, 2, 1000);
        for known in PREFILL_DIMS {
            assert!(prefill_shared_bytes(known, 2, most) >= 4 * QUERIES * most, "{most} splits");
        }
        assert_eq!(prefill_shared_bytes([128, 128], 2, 16), 64 << 10);
        assert_eq!(prefill_shared_bytes([192, 128], 2, 16), 80 << 10);
    }
}
