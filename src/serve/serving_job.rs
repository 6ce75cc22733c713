//! The requests of a serving benchmark to the worker that owns the engine, and their responses.
//!
//! Enters: a [`ServeRequest`]. Leaves: its [`ServeResponse`], plain data that goes through a pipe and into a journal. A point is
//! identified by a hash of all that is asked, and never by its place alone.

use std::collections::BTreeMap;
use std::ffi::OsString;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::ServeError;
use crate::worker::job::{Job, RequestKind, StateChange};
use crate::worker::journal::JournaledPlan;
use hbmark_core::result::serving::{LoraSummary, Point, SchedulerConfig, ServerIdentity, StructuredSummary};
use hbmark_core::result::{Capabilities, Cause, Environment};
use hbmark_core::units::Nanos;
use hbmark_traffic::adapters::AdapterMix;
use hbmark_traffic::point::{PointSpec, TrafficSource};
use hbmark_traffic::step_model::Calibration;

/// The plan of a serving benchmark.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ServePlan {
    /// The arguments of this program without its name.
    pub arguments: Vec<OsString>,
    /// What they and the environment mean.
    pub config: BTreeMap<String, serde_json::Value>,
    /// [`OpenModel::identity`](crate::weights::OpenModel::identity); nothing without a model.
    pub model: String,
}

impl JournaledPlan for ServePlan {
    const SUBCOMMAND: &'static str = "serve";
}

/// A request to the worker that owns the engine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ServeRequest {
    /// Name the machine.
    Identify,
    /// Load the engine, with KV blocks of a size, and time its steps.
    Open {
        block_size: Option<usize>,
    },
    Measure(Box<PointRequest>),
}

/// A point to measure.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PointRequest {
    pub key: PointKey,
    /// A trace in it is empty after a pipe: every worker reads it itself.
    pub spec: PointSpec,
    /// What the longest step is predicted to take.
    pub longest: Option<Nanos>,
}

impl PartialEq for PointRequest {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key
    }
}

/// Identifies a point.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PointKey {
    /// Points before it.
    pub ordinal: usize,
    pub label: String,
    pub seed: u64,
    /// sha256 over all that is asked, a trace or dataset included.
    pub hash: String,
}

impl PointKey {
    pub(super) fn of(ordinal: usize, spec: &PointSpec) -> Self {
        let (trace, dataset) = match &spec.source {
            TrafficSource::Trace(trace, _) => (Some(&**trace), None),
            TrafficSource::Dataset(dataset) => (None, dataset.as_deref()),
            TrafficSource::Workload(_) => (None, None),
        };
        let written = serde_json::to_vec(&(spec, trace, dataset)).expect("a specification is plain data");
        let hash = format!("{:x}", Sha256::digest(written));
        Self { ordinal, label: spec.label.clone(), seed: spec.seed, hash }
    }
}

impl std::fmt::Display for PointKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let hash: String = self.hash.chars().take(12).collect();
        write!(f, "`{}` (point {}, seed {}, hash {hash})", self.label, self.ordinal + 1, self.seed)
    }
}

/// The response to a request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ServeResponse {
    Identified(Box<Environment>),
    Opened(Box<EngineRecord>),
    /// `fault`: the device failed, and nothing that it does from here on can be trusted.
    Measured {
        point: Option<Box<Point>>,
        fault: Option<String>,
    },
    Done,
    /// No worker can execute the request: the benchmark ends.
    Refused {
        reason: String,
    },
    /// The worker is gone; it had or had not come to the request.
    Lost {
        reason: Cause,
        executing: bool,
    },
}

/// An engine, loaded and timed: what rates, warm-ups and the report go by.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EngineRecord {
    /// Unless the clock is virtual.
    pub started_at: Option<String>,
    pub environment: Environment,
    pub capabilities: Option<Capabilities>,
    pub server: Option<ServerIdentity>,
    pub has_tokenizer: bool,
    pub scheduler: SchedulerConfig,
    pub calibration: Option<Calibration>,
    pub lora: Option<(LoraSummary, AdapterMix)>,
    pub structured: Option<StructuredSummary>,
    pub warnings: Vec<String>,
}

/// A serving benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServeJob;

impl Job for ServeJob {
    /// The arguments of this program without its name.
    type Config = Vec<OsString>;
    type Request = ServeRequest;
    type Response = ServeResponse;
    type Error = ServeError;

    const KIND: &'static str = "serve";
    const STEP_TIMEOUT_FACTOR: f64 = 10.0;
    const IDENTIFY: ServeRequest = ServeRequest::Identify;
    const DONE: ServeResponse = ServeResponse::Done;

    fn kind(request: &ServeRequest) -> RequestKind {
        match request {
            ServeRequest::Identify => RequestKind::Identify,
            ServeRequest::Open { .. } => RequestKind::Prepare,
            ServeRequest::Measure(_) => RequestKind::Measure,
        }
    }

    fn description(request: &ServeRequest) -> String {
        match request {
            ServeRequest::Identify => "identifying the machine".into(),
            ServeRequest::Open { .. } => "loading weights and timing steps".into(),
            ServeRequest::Measure(asked) => format!("measuring {}", asked.key.label),
        }
    }

    fn identity(request: &ServeRequest) -> String {
        match request {
            ServeRequest::Open { block_size: Some(size) } => format!("an engine with KV blocks of {size}"),
            ServeRequest::Measure(asked) => asked.key.to_string(),
            other => Self::description(other),
        }
    }

    fn state_change(request: &ServeRequest, response: &ServeResponse) -> Option<StateChange<ServeRequest>> {
        matches!(response, ServeResponse::Opened(_))
            .then(|| StateChange::Opened { key: 0, reopen: request.clone() })
    }

    fn lost(reason: Cause, executing: bool) -> ServeResponse {
        ServeResponse::Lost { reason, executing }
    }

    fn refused(reason: String) -> ServeResponse {
        ServeResponse::Refused { reason }
    }

    fn failure(response: &ServeResponse) -> Option<String> {
        match response {
            ServeResponse::Lost { reason, .. } => Some(reason.to_string()),
            ServeResponse::Refused { reason } => Some(reason.clone()),
            _ => None,
        }
    }

    fn is_recorded(response: &ServeResponse) -> bool {
        // Whether a worker can be started is asked again by a resumed benchmark.
        !matches!(response, ServeResponse::Refused { .. } | ServeResponse::Lost { executing: false, .. })
    }

    fn is_sticky(response: &ServeResponse) -> bool {
        matches!(response, ServeResponse::Lost { .. } | ServeResponse::Measured { fault: Some(_), .. })
    }

    fn environment(response: &ServeResponse) -> Option<&Environment> {
        match response {
            ServeResponse::Identified(environment) => Some(environment),
            ServeResponse::Opened(engine) => Some(&engine.environment),
            _ => None,
        }
    }

    fn warn(response: &mut ServeResponse, warning: String) {
        if let ServeResponse::Opened(engine) = response {
            engine.warnings.push(warning);
        }
    }

    fn fault_places(request: &ServeRequest) -> &'static [&'static str] {
        if matches!(request, ServeRequest::Open { .. }) { &["begin", "load"] } else { &[] }
    }

    fn fault_site(request: &ServeRequest) -> String {
        if let ServeRequest::Measure(asked) = request { asked.key.label.clone() } else { String::new() }
    }
}
