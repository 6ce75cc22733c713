//! The result of a step benchmark or of a prediction.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::capabilities::Capabilities;
use super::ceilings::{Ceilings, DeviceSpec};
use super::cell::CellResult;
use super::environment::Environment;
use super::group::GroupSummary;
use super::ladder::Ladder;
use crate::model::{Architecture, Dtype, Inventory, model_hash};
use crate::units::Bytes;

/// Version of the JSON result; raised when a field changes its meaning or goes away.
/// Version 1 had sentences where causes are now; they are read as [`Cause::Other`](super::Cause::Other).
pub const SCHEMA_VERSION: u32 = 2;

/// The oldest version that is still read.
pub const OLDEST_SCHEMA_VERSION: u32 = 1;

/// Where a report's numbers come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ReportKind {
    /// Measured by `hbmark run`.
    Run,
    /// Computed by `hbmark predict`; nothing was measured.
    Predict,
}

/// A whole result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
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
    pub capabilities: Vec<Capabilities>,
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
    /// The GPUs that hold the model together, of a prediction for several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<GroupSummary>,
}

impl Report {
    /// One of today's schema in which nothing was measured yet.
    pub fn new(kind: ReportKind, command: impl Into<String>, model: ModelSummary) -> Self {
        Self {
            schema_version: SCHEMA_VERSION,
            kind,
            command: command.into(),
            started_at: None,
            note: None,
            hypothesis: None,
            environment: Environment::default(),
            config: BTreeMap::new(),
            model,
            capabilities: Vec::new(),
            protocol: None,
            ceilings: None,
            datasheet: None,
            cells: Vec::new(),
            cold: Vec::new(),
            ladders: Vec::new(),
            fits: Vec::new(),
            crossovers: Vec::new(),
            warnings: Vec::new(),
            group: None,
        }
    }
}

/// The model that was run or predicted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
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

impl ModelSummary {
    /// A model of these dimensions and tensors.
    pub fn new(
        name: impl Into<String>,
        source: impl Into<String>,
        architecture: &Architecture,
        inventory: &Inventory,
    ) -> Self {
        Self {
            name: name.into(),
            source: source.into(),
            hash: model_hash(architecture, inventory),
            parameters: inventory.parameters(),
            weight_bytes: inventory.total_bytes(),
            architecture: architecture.clone(),
        }
    }

    /// The source of a model of which only the shape is used.
    pub const SHAPE_ALONE: &str = "model shape alone, no weights";
}

/// The protocol as it was applied.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ProtocolSummary {
    /// `full`, `quick` or `smoke`.
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
    /// How the context of decode cells was filled, in engines that can do both.
    #[serde(default)]
    pub kv: KvFill,
    /// How a script spread rows over experts in place of the routers, where one did: `uniform`, `balanced`, `zipf:1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expert_routing: Option<String>,
}

/// The most that a canary is tolerated: on a CPU, whose cores share memory with other work of the host.
pub const MAX_CANARY_TOLERANCE: f64 = 0.25;

impl ProtocolSummary {
    /// The full protocol, with which results are published.
    pub fn full(seed: u64) -> Self {
        Self {
            name: "full".into(),
            seed,
            warmup_min_seconds: 2.0,
            warmup_min_steps: 20,
            block_min_steps: 20,
            block_min_seconds: 0.1,
            min_blocks: 10,
            max_blocks: 40,
            visits: 3,
            target_half_width: 0.01,
            cell_max_seconds: 12.0,
            canary_tolerance: 0.01,
            kv: KvFill::Synthetic,
            expert_routing: None,
        }
    }

    /// In what it asks for less than the full protocol, whatever it is called: `5 blocks (full: 10)`.
    pub fn short_of_full(&self) -> Vec<String> {
        let full = Self::full(self.seed);
        let count = |count: usize| count as f64;
        // Each with what is asked of it; `sign` says where less is stricter.
        let asked = [
            ("s of warm-up", 1.0, self.warmup_min_seconds, full.warmup_min_seconds),
            ("steps of warm-up", 1.0, count(self.warmup_min_steps), count(full.warmup_min_steps)),
            ("steps a block", 1.0, count(self.block_min_steps), count(full.block_min_steps)),
            ("s a block", 1.0, self.block_min_seconds, full.block_min_seconds),
            ("blocks", 1.0, count(self.min_blocks), count(full.min_blocks)),
            ("visits", 1.0, count(self.visits), count(full.visits)),
            ("as half-width", -1.0, self.target_half_width, full.target_half_width),
            // The device decides, as far as that.
            ("off for the canary", -1.0, self.canary_tolerance, MAX_CANARY_TOLERANCE),
        ];
        // A number that is none falls short, too.
        let short = asked
            .into_iter()
            .filter(|(_, sign, own, full)| (sign * own).total_cmp(&(sign * full)).is_lt() || own.is_nan());
        let said = |(what, sign, own, full): (&str, f64, f64, f64)| match sign {
            ..0.0 if own > 1.0 => format!("any {what} (full: {} %)", full * 100.0),
            ..0.0 => format!("{} % {what} (full: {} %)", own * 100.0, full * 100.0),
            _ => format!("{own} {what} (full: {full})"),
        };
        short.map(said).collect()
    }

    /// Whether every cell is run once, whatever the protocol is called: an interval that may be as wide as the time itself holds nothing.
    pub fn is_smoke(&self) -> bool {
        self.name == "smoke" || self.target_half_width >= 1.0 || self.target_half_width.is_nan()
    }
}

/// How the KV cache of a decode cell is filled before its steps are timed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum KvFill {
    /// By a real prefill of random tokens.
    #[default]
    Prefill,
    /// With random values, where the engine can: the same bytes at the same places, at once.
    Synthetic,
}

/// A cold measurement: its own row, never mixed with warm steps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ColdRow {
    /// `load weights`, `first prefill`, `first decode`, `after idle`.
    pub what: String,
    pub engine: String,
    pub dtype: Dtype,
    pub time_ns: f64,
}

/// The measured step regressed on Σcontext and batch: `step = fixed + per_kv_byte × KV bytes + per_sequence × batch`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
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

/// Which change of regime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum CrossoverKind {
    /// The ridge point of the weights alone, without KV.
    #[serde(alias = "classical_compute_bound_batch")]
    CriticalBatchSize,
    /// The batch from which a decode step at a context is bound by arithmetic.
    ComputeBoundBatch,
    /// The prompt tokens from which a prefill of a batch is bound by arithmetic.
    ComputeBoundPrompt,
    /// The context from which a batch reads more KV than weights.
    #[serde(alias = "kv_outweighs_weights_context")]
    KvExceedsWeightsContext,
    MaxBatchThatFits,
    MaxContextThatFits,
}

impl fmt::Display for CrossoverKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::CriticalBatchSize => "critical batch size",
            Self::ComputeBoundBatch => "compute-bound batch",
            Self::ComputeBoundPrompt => "compute-bound prompt",
            Self::KvExceedsWeightsContext => "context where KV bytes exceed weight bytes",
            Self::MaxBatchThatFits => "max batch that fits",
            Self::MaxContextThatFits => "max context that fits",
        })
    }
}

/// A place on an axis where the regime changes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Crossover {
    pub what: CrossoverKind,
    pub value: Option<f64>,
    pub unit: String,
    pub explanation: String,
}

/// A serialisable configuration as the map a report keeps.
pub fn as_map(config: &impl Serialize) -> BTreeMap<String, serde_json::Value> {
    match serde_json::to_value(config) {
        Ok(serde_json::Value::Object(map)) => map.into_iter().collect(),
        _ => BTreeMap::new(),
    }
}
