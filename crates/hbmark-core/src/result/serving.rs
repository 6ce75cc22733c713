//! The result of serving: points of load with their measurements.

mod adapters;
mod arrivals;
mod cold;
mod evidence;
mod extras;
mod latency;
mod live;
mod matrix;
mod point;
mod probe;
mod requests;
mod residuals;
mod scheduler;
mod search;
mod server_metrics;
mod slo;
mod sweep;
mod timeline;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Capabilities, Ceilings, DeviceSpec, Environment, ModelSummary, ReportError};
use crate::model::Dtype;

pub use adapters::{AdapterCost, Assignment, UnknownAssignment};
pub use arrivals::{Arrivals, ArrivalsError};
pub use cold::{ColdPhase, ColdStart, Launch};
pub use evidence::{Evidence, LongPrompts, Stalls, Start};
pub use extras::{AdapterSummary, LoraSummary, StructuredSummary};
pub use latency::{
    Breakdown, ClauseResult, Gate, GateName, Infinite, LEVELS, Level, MIN_REQUESTS, Quantiles, Quantity,
    ServeResult, Validity,
};
pub use live::{Dialect, Failure, LiveResult, ServerIdentity, StampSource, TokenEvidence};
pub use matrix::{Row, RowVerdict};
pub use point::{Offered, Point, STEADY_DRIFT, StructuredCost};
pub use probe::{
    Asked, ClockCheck, Clue, DialectEvidence, Outcome, Probe, ProbedAddress, ProbedMetrics, Question,
    ServedModel,
};
pub use requests::{Requests, SavedOutcome, throughput_end};
pub use residuals::{Residual, Residuals};
pub use scheduler::{DraftCounts, Policy, SchedulerConfig, SettingOutOfRange, SpeculativeConfig};
pub use search::{Attempt, Search, SearchStage};
pub use server_metrics::{
    BusySteps, FetchFailure, FetchFailures, GaugeOverTime, SeenSeries, ServerConfiguration, ServerMean,
    ServerMetrics, ServerSpeculation, Signal, StepBasis, Unknown, UnknownSignal,
};
pub use slo::{Clause, Slo, SloError, SloMetric, parse_span};
pub use sweep::{SweepVariable, UnknownVariable};
pub use timeline::{SPANS, Span, Timeline};

/// Version of the JSON result of `serve`. Version 1 had sentences where causes are now.
pub const SCHEMA_VERSION: u32 = 2;

/// The oldest version that is still read.
const OLDEST_SCHEMA_VERSION: u32 = 1;

/// The kind of a serving result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ServeKind {
    /// Measured on an engine.
    Serve,
    /// Simulated: the real scheduler on a virtual clock.
    ServeVirtual,
    /// Launches of a process, up to their first tokens.
    ServeCold,
    /// Measured against a live server, over HTTP.
    ServeLive,
}

/// What was sent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct WorkloadSummary {
    pub name: String,
    pub source: String,
}

/// A whole serving result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ServeReport {
    pub schema_version: u32,
    pub kind: ServeKind,
    pub command: String,
    pub started_at: Option<String>,
    pub note: Option<String>,
    pub hypothesis: Option<String>,
    pub environment: Environment,
    pub config: BTreeMap<String, serde_json::Value>,
    /// Null for a live server whose model was not given.
    pub model: Option<ModelSummary>,
    pub dtype: Option<Dtype>,
    /// The live server that was measured.
    #[serde(default)]
    pub server: Option<ServerIdentity>,
    pub capabilities: Option<Capabilities>,
    pub datasheet: Option<DeviceSpec>,
    pub ceilings: Option<Ceilings>,
    pub workload: WorkloadSummary,
    /// The source of the virtual clock's step times.
    pub step_model: Option<String>,
    /// The variable of a sweep: `rate`, `max-num-seqs`.
    pub swept: Option<String>,
    pub points: Vec<Point>,
    pub search: Option<Search>,
    pub matrix: Vec<RowVerdict>,
    pub cold_start: Option<ColdStart>,
    #[serde(default)]
    pub lora: Option<LoraSummary>,
    #[serde(default)]
    pub structured: Option<StructuredSummary>,
    pub warnings: Vec<String>,
}

impl ServeReport {
    /// A report of a workload, without points.
    pub fn new(kind: ServeKind, command: &str, workload: WorkloadSummary) -> Self {
        Self {
            schema_version: SCHEMA_VERSION,
            kind,
            command: command.to_owned(),
            workload,
            started_at: None,
            note: None,
            hypothesis: None,
            environment: Environment::default(),
            config: BTreeMap::new(),
            model: None,
            dtype: None,
            server: None,
            capabilities: None,
            datasheet: None,
            ceilings: None,
            step_model: None,
            swept: None,
            points: Vec::new(),
            search: None,
            matrix: Vec::new(),
            cold_start: None,
            lora: None,
            structured: None,
            warnings: Vec::new(),
        }
    }

    /// What the points differ in; the rate, where there was no sweep. `None` for a variable that this program does not know.
    pub fn variable(&self) -> Option<SweepVariable> {
        self.swept.as_ref().map_or(Some(SweepVariable::Rate), |name| name.parse().ok())
    }

    /// The model's name.
    pub fn model_name(&self) -> &str {
        let served = self.server.as_ref().map(|server| server.model.as_str());
        served.or_else(|| Some(self.model.as_ref()?.name.as_str())).unwrap_or("unknown model")
    }

    /// The storage of the KV cache that the run was asked for.
    pub fn kv_dtype(&self) -> Option<Dtype> {
        self.config.get("kv_dtype").and_then(|dtype| Dtype::deserialize(dtype).ok())
    }
}

/// Reads a saved serving result; `None` where the file is of another kind, or no result at all, which its own reader reports.
///
/// # Errors
/// When the file cannot be read, or is a serving result of another version, or holds impossible values.
pub fn read(path: &std::path::Path) -> Result<Option<ServeReport>, ReportError> {
    #[derive(Deserialize)]
    struct Head {
        kind: ServeKind,
        schema_version: Option<u32>,
    }
    let file = super::saved::Saved::open(path)?;
    let Ok(head) = file.read::<Head>() else { return Ok(None) };
    let _: ServeKind = head.kind;
    if !matches!(head.schema_version, Some(OLDEST_SCHEMA_VERSION..=SCHEMA_VERSION)) {
        return Err(ReportError::Version { found: head.schema_version, supported: SCHEMA_VERSION });
    }
    let report = file.read().map_err(|json| ReportError::Malformed { path: path.to_path_buf(), json })?;
    super::validation::check_serving(&report)?;
    Ok(Some(report))
}

/// Reads a serving result that another process printed.
///
/// # Errors
/// As [`read`].
pub fn parse(text: &str) -> Result<ServeReport, ReportError> {
    #[derive(Deserialize)]
    struct Head {
        schema_version: Option<u32>,
    }
    let budget = super::saved::BUDGET.saturating_add(text.len());
    let head: Head = crate::input::json::from_str(text, budget)?;
    if head.schema_version != Some(SCHEMA_VERSION) {
        return Err(ReportError::Version { found: head.schema_version, supported: SCHEMA_VERSION });
    }
    let report = crate::input::json::from_reader(&mut text.as_bytes(), budget)?;
    super::validation::check_serving(&report)?;
    Ok(report)
}
