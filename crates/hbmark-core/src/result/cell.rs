//! A cell of the grid: what was measured there, and the numbers that follow from it.

use serde::{Deserialize, Serialize};

use super::block::{Block, judged_times};
use super::cause::Cause;
use super::ceilings::Spread;
use super::group::GroupStep;
use crate::input::plain;
use crate::model::Dtype;
use crate::stats;
use crate::units::Bytes;

/// What a step does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Whole prompts into an empty cache.
    Prefill,
    /// One token of each sequence on top of its cache.
    #[default]
    Decode,
    /// Speculative decoding: the last token of each sequence and so many draft tokens behind it, with the logits of all of them.
    Verify {
        #[serde(deserialize_with = "draft_tokens")]
        draft_tokens: usize,
    },
}

/// Reads the number of draft tokens of a file: arithmetic over any other would not end.
fn draft_tokens<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<usize, D::Error> {
    let tokens = usize::deserialize(deserializer)?;
    if (1..=MAX_DRAFT_TOKENS).contains(&tokens) {
        return Ok(tokens);
    }
    Err(serde::de::Error::custom(format!("{tokens} draft tokens are not 1 to {MAX_DRAFT_TOKENS}")))
}

/// The most draft tokens of a verify step.
pub const MAX_DRAFT_TOKENS: usize = 64;

impl Phase {
    /// Tokens that each sequence brings; `context` are those of a prompt.
    pub fn new_tokens(self, context: usize) -> usize {
        match self {
            Self::Prefill => context,
            Self::Decode => 1,
            Self::Verify { draft_tokens } => draft_tokens.saturating_add(1),
        }
    }

    /// Tokens of each sequence that a step is sure to bring: those of a prompt, otherwise one. A verify step brings more where draft tokens are
    /// accepted.
    pub fn sure_tokens(self, context: usize) -> usize {
        if self.is_over_cache() { 1 } else { context }
    }

    /// Positions of each sequence in the cache when the step is done.
    pub fn positions_after(self, context: usize) -> usize {
        match self {
            Self::Prefill => context,
            Self::Decode | Self::Verify { .. } => context.saturating_add(self.new_tokens(context)),
        }
    }

    /// Whether its steps follow one another over a cache, so that what counts is the interval between their ends. The others are judged by the
    /// device's span.
    pub fn is_over_cache(self) -> bool {
        matches!(self, Self::Decode | Self::Verify { .. })
    }
}

impl std::fmt::Display for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Prefill => f.pad("prefill"),
            Self::Decode => f.pad("decode"),
            Self::Verify { draft_tokens } => f.pad(&format!("verify-{draft_tokens}")),
        }
    }
}

/// A text that is not a phase.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a phase; write prefill, decode or verify-3 for a verify step of 3 draft tokens")]
pub struct NoPhase(String);

impl std::str::FromStr for Phase {
    type Err = NoPhase;
    fn from_str(name: &str) -> Result<Self, NoPhase> {
        let lower = name.to_ascii_lowercase();
        match lower.as_str() {
            "prefill" => Ok(Self::Prefill),
            "decode" => Ok(Self::Decode),
            other => other
                .strip_prefix("verify-")
                .and_then(|tokens| tokens.parse().ok())
                .filter(|tokens| (1..=MAX_DRAFT_TOKENS).contains(tokens))
                .map(|draft_tokens| Self::Verify { draft_tokens })
                .ok_or_else(|| NoPhase(plain(name))),
        }
    }
}

/// The status of a cell.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Measured, and every gate passed.
    Ok,
    /// Measured, but invalid, for the given reason. Still shown.
    Invalid,
    /// Measured; the interval did not reach its target. The reason has the width reached.
    NotConverged,
    /// Warm-up never became steady.
    NoSteadyState,
    /// Every retry of a block was throttled or disturbed.
    Disturbed,
    /// Disturbed or not converged, and accepted because the user allowed noise. The reason says which.
    Noisy,
    /// Run once to see that it runs: its time means nothing.
    Smoke,
    /// Ran on a simulated device: its outputs are checked, its time means nothing.
    Simulated,
    /// Not run, for the given reason.
    #[default]
    Skipped,
    /// An allocation failed on the device.
    Oom,
    /// The engine, the device or the process that held it failed.
    Failed,
    /// The run was stopped before the cell was done; what it has by then is shown.
    Incomplete,
    /// Computed, not measured.
    Predicted,
}

impl Status {
    /// Whether the blocks cannot stand for the cell: its time is then shown with its range over all of them.
    pub fn is_doubtful(self) -> bool {
        matches!(
            self,
            Self::NotConverged
                | Self::NoSteadyState
                | Self::Disturbed
                | Self::Noisy
                | Self::Smoke
                | Self::Simulated
                | Self::Incomplete
        )
    }
}

/// What bounds a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    Memory,
    Compute,
    /// Neither floor explains the time: launches, host work or slow kernels do.
    Overhead,
    /// Of a prediction for a group: what the GPUs exchange takes longer than all of their own work.
    Collectives,
}

/// Statistics of one timed quantity, in nanoseconds. Percentiles are nearest-rank; null where n is too small.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct TimeSummary {
    /// The time that the cell stands for: the geometric mean over blocks, which `ci_low` and `ci_high` are about.
    #[serde(default)]
    pub typical: Option<f64>,
    pub median: f64,
    pub p50: f64,
    pub p90: Option<f64>,
    pub p95: Option<f64>,
    /// Needs n ≥ 1,000.
    pub p99: Option<f64>,
    /// Needs n ≥ 10,000.
    pub p99_9: Option<f64>,
    pub mean: f64,
    pub sd: Option<f64>,
    /// sd / mean.
    pub cv: Option<f64>,
    pub min: f64,
    pub max: f64,
    pub p99_over_p50: Option<f64>,
    /// 95 % interval of the typical step, from block means (t on logs).
    pub ci_low: Option<f64>,
    pub ci_high: Option<f64>,
    /// Order-statistic 95 % interval of the median over single steps.
    pub median_ci_low: Option<f64>,
    pub median_ci_high: Option<f64>,
    /// Lag-1 autocorrelation of block means.
    pub autocorrelation: Option<f64>,
    /// Slope of block means over the cell's whole time, relative to the mean.
    pub drift: Option<f64>,
    /// Single steps.
    pub n: usize,
    pub blocks: usize,
}

impl TimeSummary {
    /// The time that the cell stands for; of files from before it was kept, the median.
    pub fn center(&self) -> f64 {
        self.typical.unwrap_or(self.median)
    }
}

/// Median, lowest and highest of all blocks of a cell, the rejected ones too.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct AllBlocks {
    pub step_ns: Spread,
    /// Of steps over a cache.
    pub tpot_ns: Option<Spread>,
    pub tokens_per_s: Spread,
    pub blocks: usize,
    pub rejected: usize,
}

/// Bytes one step moves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct StepBytes {
    /// Every matrix once, as stored, with scales, biases, norms and head.
    pub weights: Bytes,
    pub kv_read: Bytes,
    pub kv_write: Bytes,
    /// Embedding rows and whatever else the step must touch.
    pub other: Bytes,
    /// What this engine really moves; null where it is not modelled.
    pub as_implemented: Option<Bytes>,
}

impl StepBytes {
    /// What the step must move at the least.
    pub fn ideal(&self) -> Bytes {
        self.weights + self.kv_read + self.kv_write + self.other
    }
}

/// The check of outputs. A cell whose tokens are wrong has no ranked timing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Quality {
    pub passed: bool,
    /// What was compared: `logits against f32 reference`, `finite logits, stable token hash`...
    pub check: String,
    /// Largest relative logit difference to the reference.
    pub max_relative_error: Option<f64>,
    /// sha256 over the greedy tokens of the cell, shortened.
    pub token_hash: Option<String>,
}

/// One operation of a step, all its calls together: the median of a few steps that were timed operation by operation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct OperationRow {
    /// `embed`, `norm_qkv`, `attention`, `output`, `gate_up`, `down`, `head`; of layers with experts `router`, `expert_gate_up`, `expert_down`;
    /// of latent attention `latent_down`, `latent_query`, `latent_value`, `latent_expand`; of a layer that drafts `draft_input`; of ranks `all_reduce`.
    pub operation: String,
    pub calls: usize,
    pub time_ns: f64,
    /// As counted where it ran.
    pub bytes: Bytes,
    /// Its bytes over its time, of the read ceiling measured in this run.
    pub fraction_of_ceiling: Option<f64>,
}

/// One cell of the grid.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct CellResult {
    /// `decode/stock/f32/b1/c512`, of a verify step `verify-3/native/bf16/b1/c512`: stable, and what filters match.
    pub id: String,
    pub phase: Phase,
    pub engine: String,
    pub dtype: Dtype,
    pub kv_dtype: Dtype,
    pub batch: usize,
    pub context: usize,
    pub status: Status,
    pub reason: Option<Cause>,
    /// Device span of a step (D).
    pub step_ns: Option<TimeSummary>,
    /// Interval between step ends (I), not of prefills: the typical time per output token of a steady decode. A verify step's is that where
    /// none of its draft tokens is accepted, and without the time that drafting takes.
    pub tpot_ns: Option<f64>,
    pub tpot_ci_low_ns: Option<f64>,
    pub tpot_ci_high_ns: Option<f64>,
    /// G = I − D, typical.
    pub host_bubble_ns: Option<f64>,
    /// What launching candle's kernels one by one costs: this step less the same one replayed from a recording, and its share of the step.
    #[serde(default)]
    pub launch_cost_ns: Option<f64>,
    #[serde(default)]
    pub launch_share: Option<f64>,
    /// Prompt tokens per second (prefill) or output tokens per second (decode), whole batch; of a verify step without any accepted draft token.
    pub tokens_per_s: Option<f64>,
    /// The floor by the measured ceiling, or by the data sheet for `predict`.
    pub predicted_ns: Option<f64>,
    pub predicted_datasheet_ns: Option<f64>,
    /// Null of a cell that was never costed.
    #[serde(with = "crate::null_as_default")]
    #[cfg_attr(test, schemars(with = "Option<StepBytes>"))]
    pub bytes: StepBytes,
    #[serde(with = "crate::null_as_default")]
    #[cfg_attr(test, schemars(with = "Option<f64>"))]
    pub flops: f64,
    pub achieved_bytes_per_s: Option<f64>,
    pub fraction_of_ceiling: Option<f64>,
    /// The rate at which memory was read beside the accepted blocks, and the share of it that the bytes of a block's steps took, geometric means;
    /// no share where the steps were more than a tenth faster: then the reads were disturbed, or a cache served the steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_beside_bytes_per_s: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fraction_of_read_beside: Option<f64>,
    pub fraction_of_datasheet: Option<f64>,
    /// FLOPs over time × dense peak of `mfu_dtype`.
    pub mfu: Option<f64>,
    pub mfu_dtype: Option<String>,
    pub bound: Option<Bound>,
    pub quality: Option<Quality>,
    pub memory_predicted_bytes: Option<Bytes>,
    /// The most in use while the cell was measured, without the canary's buffer: on a GPU what was taken from the device's memory
    /// pool, on a CPU the resident set of the whole process, with buffers that earlier cells made it grow and, where the KV of all cells fits at
    /// once, that of the others.
    pub memory_peak_bytes: Option<Bytes>,
    pub energy_per_step_joules: Option<f64>,
    pub energy_per_token_joules: Option<f64>,
    /// Different experts of a layer that a step meets, of mixtures: counted in the timed steps where the engine routed them, otherwise expected.
    pub distinct_experts: Option<f64>,
    /// What limits the reading of the numbers and does not invalidate them.
    pub flags: Vec<Cause>,
    /// Consecutive accepted blocks that count as one in the interval; above 1 after autocorrelation was seen.
    pub block_merge: usize,
    /// What is shown of a cell whose blocks cannot stand for it; null where they can, or where there are none.
    #[serde(default)]
    pub all_blocks: Option<AllBlocks>,
    pub blocks: Vec<Block>,
    /// The step broken down per operation, in an untimed pass of its own; empty unless asked for.
    #[serde(default)]
    pub operations: Vec<OperationRow>,
    /// Of a prediction for several GPUs: the parts of its time. The bytes and FLOPs of the cell are then those of the slowest GPU of each
    /// stage, and the memory that of the fullest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<GroupStep>,
}

/// The stable name of a cell, which filters match: `decode/stock/f32/b1/c512`.
pub fn cell_id(phase: Phase, engine: &str, dtype: Dtype, batch: usize, context: usize) -> String {
    format!("{phase}/{engine}/{dtype}/b{batch}/c{context}")
}

/// A cell's name taken apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CellName {
    pub phase: Phase,
    pub engine: String,
    pub dtype: Dtype,
    pub batch: usize,
    pub context: usize,
}

/// A text that is not a name of a cell.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a cell; write phase/engine/dtype/bBATCH/cCONTEXT, such as decode/native/bf16/b1/c128")]
pub struct NoCellName(String);

impl std::str::FromStr for CellName {
    type Err = NoCellName;
    fn from_str(name: &str) -> Result<Self, NoCellName> {
        let parsed = || {
            let [phase, engine, dtype, batch, context] =
                <[&str; 5]>::try_from(name.split('/').collect::<Vec<_>>()).ok()?;
            Some(Self {
                phase: phase.parse().ok()?,
                engine: engine.to_owned(),
                dtype: <Dtype as clap::ValueEnum>::from_str(dtype, true).ok()?,
                batch: batch.strip_prefix('b')?.parse().ok().filter(|b| *b > 0)?,
                context: context.strip_prefix('c')?.parse().ok()?,
            })
        };
        parsed().ok_or_else(|| NoCellName(plain(name)))
    }
}

impl CellResult {
    /// An empty cell at a place of the grid.
    pub fn blank(phase: Phase, engine: &str, dtype: Dtype, batch: usize, context: usize) -> Self {
        Self {
            id: cell_id(phase, engine, dtype, batch, context),
            phase,
            engine: engine.to_owned(),
            dtype,
            kv_dtype: dtype,
            batch,
            context,
            block_merge: 1,
            ..Self::default()
        }
    }
}

impl CellResult {
    /// Tokens that a step is sure to bring ([`Phase::sure_tokens`]).
    pub fn tokens(&self) -> usize {
        self.batch * self.phase.sure_tokens(self.context)
    }

    /// Time per output token: of a verify step it hangs on how many draft tokens are accepted, and there is none.
    pub fn tpot(&self) -> Option<f64> {
        self.tpot_ns.filter(|_| self.phase == Phase::Decode)
    }

    /// Median and range over all blocks, from the raw samples; `None` without one.
    pub fn over_all_blocks(&self) -> Option<AllBlocks> {
        let spread =
            |times: &dyn Fn(&Block) -> f64| Spread::of(&self.blocks.iter().map(times).collect::<Vec<_>>());
        let usable = |times: &[f64]| stats::mean(times);
        let judged = spread(&|block| usable(judged_times(self.phase, block)))?;
        let rate = |ns: f64| self.tokens() as f64 / ns * 1e9;
        Some(AllBlocks {
            step_ns: spread(&|block| usable(&block.step_ns))?,
            tpot_ns: self.phase.is_over_cache().then_some(judged),
            tokens_per_s: Spread {
                median: rate(judged.median),
                low: rate(judged.high),
                high: rate(judged.low),
            },
            blocks: self.blocks.len(),
            rejected: self.blocks.iter().filter(|block| block.rejected.is_some()).count(),
        })
    }

    /// The time that a reader is shown, and its interval: of all blocks where they cannot stand for the cell, and then the range.
    pub fn shown_time(&self) -> Option<(f64, Option<(f64, f64)>)> {
        if let Some(all) = &self.all_blocks {
            let judged = all.tpot_ns.unwrap_or(all.step_ns);
            return Some((judged.median, Some((judged.low, judged.high))));
        }
        let step = self.step_ns.as_ref()?;
        Some(match self.phase {
            Phase::Decode | Phase::Verify { .. } => {
                (self.tpot_ns?, self.tpot_ci_low_ns.zip(self.tpot_ci_high_ns))
            }
            Phase::Prefill => (step.center(), step.ci_low.zip(step.ci_high)),
        })
    }

    /// [`shown_time`](Self::shown_time), or of a prediction its floor, where that is a finite time above 0.
    pub fn time_or_floor(&self) -> Option<(f64, Option<(f64, f64)>)> {
        let time = match self.status {
            Status::Predicted => self.predicted_ns.map(|floor| (floor, None)),
            _ => self.shown_time(),
        };
        time.filter(|(time, _)| time.is_finite() && *time > 0.0)
    }
}

/// One point of the grid.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    pub phase: Phase,
    pub engine: String,
    pub dtype: Dtype,
    pub batch: usize,
    /// Positions in the KV cache before the step. Prefill: prompt tokens per sequence.
    pub context: usize,
}

impl Cell {
    /// The stable name that filters match: `decode/stock/f32/b1/c512`.
    pub fn id(&self) -> String {
        cell_id(self.phase, &self.engine, self.dtype, self.batch, self.context)
    }

    /// Positions the cell needs: a step over a cache adds its own to them.
    pub fn positions(&self) -> usize {
        self.phase.positions_after(self.context)
    }
}

/// A cell as measured.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured {
    pub cell: Cell,
    pub status: Status,
    pub reason: Option<Cause>,
    pub blocks: Vec<Block>,
    /// Consecutive accepted blocks that count as one in the interval; 2 or 4 after autocorrelation was seen.
    pub merge: usize,
    /// Greedy tokens of the cell, the same in every step of a pinned cell.
    pub tokens: Vec<u32>,
    /// Peak memory over the cell's visits, without the monitor's own: of the pool on a GPU, of the whole process on a CPU.
    pub peak_memory: Option<Bytes>,
    /// Bytes a step of the cell really moved, where the engine counts them.
    pub moved: Option<Bytes>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_has_the_name_that_it_is_read_from() {
        for (phase, name) in [
            (Phase::Prefill, "prefill/native/bf16/b1/c512"),
            (Phase::Decode, "decode/native/bf16/b1/c512"),
            (Phase::Verify { draft_tokens: 3 }, "verify-3/native/bf16/b1/c512"),
        ] {
            assert_eq!(cell_id(phase, "native", Dtype::Bf16, 1, 512), name);
            assert_eq!(name.parse::<CellName>().unwrap().phase, phase);
        }
        for name in ["verify", "verify-", "verify-0", "verify-65", "verify--1", "verify-3x", "draft"] {
            let problem = name.parse::<Phase>().unwrap_err().to_string();
            assert!(problem.contains(name) && problem.contains("verify-3"), "{problem}");
        }
    }

    #[test]
    fn a_file_has_draft_tokens_within_bounds_or_is_refused() {
        let read = |tokens: &str| {
            serde_json::from_str::<Phase>(&format!("{{\"verify\":{{\"draft_tokens\":{tokens}}}}}"))
        };
        assert_eq!(read("64").unwrap(), Phase::Verify { draft_tokens: 64 });
        for tokens in ["0", "65", "18446744073709551615", "-1", "1.5"] {
            assert!(read(tokens).is_err(), "{tokens}");
        }
        assert_eq!(serde_json::from_str::<Phase>("\"decode\"").unwrap(), Phase::Decode);
    }
}
