//! The result as plain data, and its output formats.
//!
//! Enters: what was planned, measured and computed. Leaves: one [`Report`], from which every format is printed and which
//! can be saved, read back and printed again. null is not 0: what was not measured stays null. It knows no device.

mod breakdown;
pub mod capacity;
pub mod comparison;
mod csv;
pub mod findings;
pub mod foreign;
pub mod glossary;
mod html;
pub mod json;
mod limits;
mod markdown;
pub mod metrics;
pub mod record;
pub mod serving;
mod table;
mod terminal;
mod text;

pub(crate) use limits::check_blocks;
pub(crate) use text::{acts, plain};

use std::collections::BTreeMap;
use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::insight::Ladder;
use crate::measure::environment::Environment;
use crate::model::{Architecture, Dtype};
use crate::roofline::{Ceilings, DeviceSpec};
use crate::units::Bytes;
use crate::unless_known;

/// Version of the JSON result; raised when a field changes its meaning or goes away.
pub const SCHEMA_VERSION: u32 = 1;

/// Where a report's numbers come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ReportKind {
    /// Measured by `hbmark run`.
    Run,
    /// Computed by `hbmark predict`; nothing was measured.
    Predict,
}

/// A whole result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Report {
    pub schema_version: u32,
    pub kind: ReportKind,
    /// The command line that made it.
    pub command: String,
    /// Start of the run, UTC, RFC 3339.
    pub started_at: Option<String>,
    pub note: Option<String>,
    pub hypothesis: Option<String>,
    pub environment: Environment,
    /// The validated configuration, key by key as on the command line.
    pub config: BTreeMap<String, serde_json::Value>,
    pub model: ModelSummary,
    pub capabilities: Vec<crate::engine::Capabilities>,
    pub protocol: Option<ProtocolSummary>,
    pub ceilings: Option<Ceilings>,
    pub datasheet: Option<DeviceSpec>,
    pub cells: Vec<CellResult>,
    pub cold: Vec<ColdRow>,
    /// Where the time of a step goes, recomputed from the cells.
    #[serde(default)]
    pub ladders: Vec<Ladder>,
    pub fits: Vec<FittedModel>,
    pub crossovers: Vec<Crossover>,
    /// Plain sentences about anything that limits trust in the whole result.
    pub warnings: Vec<String>,
}

/// The model that was run or predicted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ModelSummary {
    pub name: String,
    /// `synthetic(seed 42)`, a folder, a hub id with revision, or a GGUF file.
    pub source: String,
    /// sha256 over the config and the tensor inventory (names, shapes, storage).
    pub hash: String,
    pub parameters: u64,
    pub weight_bytes: Bytes,
    pub architecture: Architecture,
}

/// The protocol as it was applied.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ProtocolSummary {
    /// `full`, `quick` or `smoke`: nothing short is dressed up as the full protocol.
    pub name: String,
    pub seed: u64,
    pub warmup_min_seconds: f64,
    pub warmup_min_steps: usize,
    pub block_min_steps: usize,
    pub block_min_seconds: f64,
    pub min_blocks: usize,
    pub max_blocks: usize,
    pub visits: usize,
    /// Half-width of the 95 % interval that ends sampling, relative.
    pub target_half_width: f64,
    /// Sampling time after which a cell ends with the interval it has.
    pub cell_max_seconds: f64,
    /// A block whose canary is further off than this is rejected, relative.
    pub canary_tolerance: f64,
    /// How the context of decode cells came about, in engines that can do both.
    #[serde(default)]
    pub kv: KvFill,
}

/// How the KV cache of a decode cell is filled before its steps are timed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum KvFill {
    /// By a real prefill of random tokens.
    #[default]
    Prefill,
    /// With random values, where the engine can: the same bytes at the same places, at once.
    Synthetic,
}

/// Prefill or decode.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    JsonSchema,
    clap::ValueEnum,
)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    Prefill,
    Decode,
}

/// What became of a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Measured, and every gate passed.
    Ok,
    /// Measured, and not to be trusted; the reason says why. Still shown.
    Invalid,
    /// Measured; the interval did not reach its target. The reason says what was reached.
    NotConverged,
    /// Warm-up never became steady.
    NoSteadyState,
    /// Every retry of a block was throttled or disturbed.
    Disturbed,
    /// Not run; the reason says why.
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

/// What bounds a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    Memory,
    Compute,
    /// Neither floor explains the time: launches, host work or slow kernels do.
    Overhead,
}

/// Statistics of one timed quantity, in nanoseconds. Percentiles are nearest-rank; null where n is too small to say.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
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

/// Bytes one step moves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
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
    #[must_use]
    pub fn ideal(&self) -> Bytes {
        self.weights + self.kv_read + self.kv_write + self.other
    }
}

/// Are the outputs right? A cell whose tokens are wrong has no ranked timing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Quality {
    pub passed: bool,
    /// What was compared: `logits against f32 reference`, `finite logits, stable token hash`...
    pub check: String,
    /// Largest relative logit difference to the reference.
    pub max_relative_error: Option<f64>,
    /// sha256 over the greedy tokens of the cell, shortened.
    pub token_hash: Option<String>,
}

/// One block of steps as measured.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Block {
    /// Which randomised visit of the cell it belongs to.
    pub visit: usize,
    /// Start since the run began.
    pub at_ns: f64,
    /// Device span of each step (D).
    pub step_ns: Vec<f64>,
    /// Interval between step ends as the host sees it (I).
    pub interval_ns: Vec<f64>,
    /// Wall time of the whole block on the host's clock: the cross-check of the timeline.
    pub wall_ns: f64,
    /// From the first mark of the timeline to the last: an independent clock over the same block. Null in files that had none.
    #[serde(default)]
    pub timeline_ns: Option<f64>,
    /// In use after the block: what the device says, or on a CPU the resident set, without the witness's own.
    #[serde(default)]
    pub memory_bytes: Option<Bytes>,
    /// The canary beside this block over the session's canary: 1.02 is 2 % slow.
    pub canary_ratio: Option<f64>,
    /// Why the block does not count, if it does not. Never a value.
    pub rejected: Option<String>,
    /// Conditions that do not reject: `sw_power_cap`, `load 0.4 cores`.
    pub conditions: Vec<String>,
    pub telemetry: Option<BlockTelemetry>,
}

/// What the telemetry saw during a block.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct BlockTelemetry {
    pub sm_clock_mhz: Option<f64>,
    pub memory_clock_mhz: Option<f64>,
    pub power_watts: Option<f64>,
    pub temperature_celsius: Option<f64>,
    pub throttle_reasons: Vec<String>,
    /// Joules spent by the device (NVML energy counter, or RAPL package).
    pub energy_joules: Option<f64>,
    /// CPU cores busy with other processes.
    pub foreign_cores: Option<f64>,
    /// Cores stolen by the hypervisor.
    pub steal_cores: Option<f64>,
    pub major_faults: Option<u64>,
    pub minor_faults: Option<u64>,
    pub cpu_frequency_mhz: Option<f64>,
    /// Other processes with a context on the measured GPU.
    #[serde(default)]
    pub gpu_other_processes: Option<usize>,
}

/// One operation of a step, all its calls together: the median of a few steps that were timed operation by operation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct OperationRow {
    /// `embed`, `norm_qkv`, `attention`, `output`, `gate_up`, `down`, `head`.
    pub operation: String,
    pub calls: usize,
    pub time_ns: f64,
    /// As counted where it ran.
    pub bytes: Bytes,
    /// Its bytes over its time, of the read ceiling measured in this run.
    pub fraction_of_ceiling: Option<f64>,
}

/// One cell of the grid.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CellResult {
    /// `decode/stock/f32/b1/c512`: stable, and what filters match.
    pub id: String,
    pub phase: Phase,
    pub engine: String,
    pub dtype: Dtype,
    pub kv_dtype: Dtype,
    pub batch: usize,
    pub context: usize,
    pub status: Status,
    pub reason: Option<String>,
    /// Device span of a step (D).
    pub step_ns: Option<TimeSummary>,
    /// Interval between step ends (I), decode only: the typical time per output token of a steady decode.
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
    /// Prompt tokens per second (prefill) or output tokens per second (decode), whole batch.
    pub tokens_per_s: Option<f64>,
    /// The floor by the measured ceiling, or by the data sheet for `predict`.
    pub predicted_ns: Option<f64>,
    pub predicted_datasheet_ns: Option<f64>,
    /// Null of a cell that was never costed.
    #[serde(with = "unless_known")]
    #[schemars(with = "Option<StepBytes>")]
    pub bytes: StepBytes,
    #[serde(with = "unless_known")]
    #[schemars(with = "Option<f64>")]
    pub flops: f64,
    pub achieved_bytes_per_s: Option<f64>,
    pub fraction_of_ceiling: Option<f64>,
    pub fraction_of_datasheet: Option<f64>,
    /// FLOPs over time × dense peak of `mfu_dtype`.
    pub mfu: Option<f64>,
    pub mfu_dtype: Option<String>,
    pub bound: Option<Bound>,
    pub quality: Option<Quality>,
    pub memory_predicted_bytes: Option<Bytes>,
    /// The most in use while the cell was measured, without the canary's buffer: on a GPU what was taken from the device's memory
    /// pool, on a CPU the resident set of the whole process.
    pub memory_peak_bytes: Option<Bytes>,
    pub energy_per_step_joules: Option<f64>,
    pub energy_per_token_joules: Option<f64>,
    /// Expected and observed distinct experts per layer, for mixtures of experts.
    pub distinct_experts: Option<f64>,
    /// Flags that do not invalidate: `working set under 3x last cache`, `power capped`...
    pub flags: Vec<String>,
    /// Consecutive accepted blocks that count as one in the interval; above 1 after autocorrelation was seen.
    pub block_merge: usize,
    pub blocks: Vec<Block>,
    /// The step broken down per operation, in an untimed pass of its own; empty unless asked for.
    #[serde(default)]
    pub operations: Vec<OperationRow>,
}

/// The stable name of a cell, which filters match: `decode/stock/f32/b1/c512`.
#[must_use]
pub fn cell_id(phase: Phase, engine: &str, dtype: Dtype, batch: usize, context: usize) -> String {
    let phase = match phase {
        Phase::Prefill => "prefill",
        Phase::Decode => "decode",
    };
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

/// A text that is no name of a cell.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no cell; write phase/engine/dtype/bBATCH/cCONTEXT, such as decode/native/bf16/b1/c128")]
pub struct NoCellName(String);

impl std::str::FromStr for CellName {
    type Err = NoCellName;
    fn from_str(name: &str) -> Result<Self, NoCellName> {
        let parsed = || {
            let [phase, engine, dtype, batch, context] =
                <[&str; 5]>::try_from(name.split('/').collect::<Vec<_>>()).ok()?;
            Some(Self {
                phase: <Phase as clap::ValueEnum>::from_str(phase, true).ok()?,
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
    /// A cell of which nothing is known but where it stands on the grid.
    #[must_use]
    pub fn blank(phase: Phase, engine: &str, dtype: Dtype, batch: usize, context: usize) -> Self {
        Self {
            id: cell_id(phase, engine, dtype, batch, context),
            phase,
            engine: engine.to_owned(),
            dtype,
            kv_dtype: dtype,
            batch,
            context,
            status: Status::Skipped,
            reason: None,
            step_ns: None,
            tpot_ns: None,
            tpot_ci_low_ns: None,
            tpot_ci_high_ns: None,
            host_bubble_ns: None,
            launch_cost_ns: None,
            launch_share: None,
            tokens_per_s: None,
            predicted_ns: None,
            predicted_datasheet_ns: None,
            bytes: StepBytes::default(),
            flops: 0.0,
            achieved_bytes_per_s: None,
            fraction_of_ceiling: None,
            fraction_of_datasheet: None,
            mfu: None,
            mfu_dtype: None,
            bound: None,
            quality: None,
            memory_predicted_bytes: None,
            memory_peak_bytes: None,
            energy_per_step_joules: None,
            energy_per_token_joules: None,
            distinct_experts: None,
            flags: Vec::new(),
            block_merge: 1,
            blocks: Vec::new(),
            operations: Vec::new(),
        }
    }
}

/// A cold measurement: its own row, never mixed with warm steps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ColdRow {
    /// `load weights`, `first prefill`, `first decode`, `after idle`.
    pub what: String,
    pub engine: String,
    pub dtype: Dtype,
    pub time_ns: f64,
}

/// The measured step regressed on Σcontext and batch: `step = fixed + per_kv_byte × KV bytes + per_sequence × batch`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FittedModel {
    pub engine: String,
    pub dtype: Dtype,
    /// Weights plus fixed overhead.
    pub intercept_ns: f64,
    pub intercept_ci_ns: [f64; 2],
    pub predicted_intercept_ns: Option<f64>,
    /// Inverse of the slope over KV bytes: effective KV bandwidth.
    pub kv_bytes_per_s: Option<f64>,
    pub kv_bytes_per_s_ci: Option<[f64; 2]>,
    pub per_sequence_ns: Option<f64>,
    pub per_sequence_ci_ns: Option<[f64; 2]>,
    pub r_squared: f64,
    pub cells: usize,
}

/// A place on an axis where the regime changes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Crossover {
    /// `compute_bound_batch`, `kv_outweighs_weights_context`, `max_batch_that_fits`, `max_context_that_fits`.
    pub what: String,
    pub value: Option<f64>,
    pub unit: String,
    pub explanation: String,
}

/// A serialisable configuration as the map a report keeps.
#[must_use]
pub fn as_map(config: &impl Serialize) -> BTreeMap<String, serde_json::Value> {
    match serde_json::to_value(config) {
        Ok(serde_json::Value::Object(map)) => map.into_iter().collect(),
        _ => BTreeMap::new(),
    }
}

/// The time of day, UTC, RFC 3339, to the second.
#[must_use]
pub fn now_utc() -> String {
    let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    rfc3339(since_epoch.as_secs())
}

/// Seconds since the epoch as a date. *Source*: days to civil date by the proleptic Gregorian calendar's 400-year cycle.
pub(crate) fn rfc3339(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Years are counted from March, so that the leap day is the last of its year.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", second / 3600, second / 60 % 60, second % 60)
}

/// Another program's decode, to stand beside the cells of a report on its roofline.
#[derive(Debug, Clone, PartialEq)]
pub struct External {
    /// What the file calls the row.
    pub label: String,
    pub cell: CellResult,
}

/// How everything is printed that has no page of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum TextFormat {
    /// For a person at a terminal.
    Table,
    /// Everything.
    Json,
    /// One row a thing.
    Csv,
    /// For an issue or a pull request.
    Md,
}

/// How a report is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// For a person at a terminal.
    Table,
    /// Everything, raw samples included.
    Json,
    /// One row a cell.
    Csv,
    /// For an issue or a pull request.
    Md,
    /// One page with plots, for a browser; it loads nothing.
    Html,
}

impl Format {
    /// The same without pages.
    #[must_use]
    pub fn as_text(self) -> Option<TextFormat> {
        match self {
            Self::Table => Some(TextFormat::Table),
            Self::Json => Some(TextFormat::Json),
            Self::Csv => Some(TextFormat::Csv),
            Self::Md => Some(TextFormat::Md),
            Self::Html => None,
        }
    }
}

/// Why a report could not be printed or read back.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} is {found}, not a regular file; give the result.json itself")]
    NotRegular { path: PathBuf, found: &'static str },
    #[error(
        "the result says {what} is {found}, and no run has that ({wanted}); it was not written by hbmark, or edited since"
    )]
    Unbelievable { what: String, found: String, wanted: &'static str },
    #[error("{path} holds {size} bytes, and a result is at most {limit}; is it a result of hbmark?")]
    TooLarge { path: PathBuf, size: u64, limit: u64 },
    #[error("{path} is not a result of hbmark: {source}")]
    Malformed { path: PathBuf, source: serde_json::Error },
    #[error("{} is not a result of hbmark; results of other programs are read by `hbmark import {}`", path.display(), path.display())]
    NotOurs { path: PathBuf },
    #[error("the result has schema version {}, this program reads {supported}; use the hbmark that wrote it", found.map_or("none".into(), |v| v.to_string()))]
    Version { found: Option<u32>, supported: u32 },
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error(transparent)]
    Csv(#[from] ::csv::Error),
}

/// Prints a report in a format; `color` is for the table on a terminal.
///
/// # Errors
/// When a format's writer fails.
pub fn render(report: &Report, format: Format, color: bool) -> Result<String, ReportError> {
    match format {
        Format::Table => Ok(terminal::render(report, color)),
        Format::Json => json::write(report),
        Format::Csv => csv::render(report),
        Format::Md => Ok(markdown::render(report)),
        Format::Html => Ok(html::render(report, &[])),
    }
}

/// Draws a report as a page, with other programs' decodes on its roofline.
#[must_use]
pub fn page(report: &Report, externals: &[External]) -> String {
    html::render(report, externals)
}

#[cfg(test)]
pub(crate) mod hand_made;
#[cfg(test)]
mod tests;
