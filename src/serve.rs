//! `hbmark serve` as data: the one place where the serving loop meets a model, an engine and a machine.
//!
//! Enters: a [`ServeConfig`] and an opened model. Leaves: a [`ServeReport`]: one point, a sweep, a search or the matrix, on a real engine
//! or on a virtual clock.

pub(crate) mod adapters_and_grammar;
pub(crate) mod calibrate;
pub mod clock;
pub(crate) mod cold;
mod context;
pub mod detokenizer;
pub mod executor;
pub(crate) mod in_process;
mod plans;
pub(crate) mod point;
mod scheduler_options;
mod server;
pub(crate) mod serving_job;
pub mod structured_output;
#[cfg(test)]
mod tests;

use std::path::PathBuf;

use context::ServingContext;
use serde::Serialize;

use crate::engine::{self, DeviceChoice};
use crate::serve::point::PointError;
use crate::serve::structured_output::StructuredError;
use crate::weights::tokenizer::TokenizerError;
use crate::weights::{AdapterError, OpenModel};
use crate::worker::journal::JournalError;
use crate::worker::spawn::{WorkerError, signal_name};
use crate::worker::{Observer, Worker};
use hbmark_core::model::Dtype;
use hbmark_core::result::serving::{
    Arrivals, MIN_REQUESTS, Offered, Point, ServeKind, ServeReport, Slo, SweepVariable, WorkloadSummary,
};
use hbmark_core::result::{Cause, DeviceSpec, ModelSummary, Report, as_map};
use hbmark_core::units::{Bytes, Nanos, counted, whole_count};
use hbmark_traffic::arrivals::Burst;
use hbmark_traffic::point::TrafficSource;
use hbmark_traffic::sampler::Sampling;
use hbmark_traffic::step_model::StepModel;
use hbmark_traffic::workload::{Structured, WorkloadError};

pub use adapters_and_grammar::LoraConfig;
pub use in_process::LocalEngine;
pub use scheduler_options::SchedulerOptions;
pub use server::{ServerAccess, ServerConfig};
use serving_job::ServeJob;

/// What makes the time of a step where no engine runs.
#[derive(Debug, Clone)]
pub enum VirtualSource {
    /// The data sheet: every step at its floor.
    Datasheet(Box<DeviceSpec>),
    /// A saved result of `run`: its decode fit and its prefills.
    Saved(Box<Report>),
}

/// What to do with the points.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// One point; with its baseline without reuse where prefixes are shared.
    Single,
    /// One variable over its values.
    Sweep { variable: SweepVariable, values: Vec<f64> },
    /// The highest rate under the objectives.
    FindMaxRate {
        seeds: usize,
        precision: f64,
        /// The run that confirms the rate lasts this long at least.
        sustain_s: f64,
    },
    /// The six standard rows.
    Matrix { scale: f64 },
    /// The same load open and closed, side by side.
    CompareLoops,
}

/// A serving benchmark, ready to run.
#[derive(Debug, Clone, Serialize)]
pub struct ServeConfig {
    pub engine: String,
    pub device: DeviceChoice,
    /// `None`: the engine's default for the device.
    pub dtype: Option<Dtype>,
    /// Storage of the KV cache; `None`: what goes with the weights.
    pub kv_dtype: Option<Dtype>,
    pub threads: Option<usize>,
    #[serde(skip)]
    pub virtual_source: Option<VirtualSource>,
    /// A live server instead of an engine.
    pub server: Option<ServerConfig>,
    #[serde(skip)]
    pub source: TrafficSource,
    pub offered: Offered,
    pub arrivals: Arrivals,
    pub burst: Option<Burst>,
    pub requests: usize,
    /// As many requests as arrive in this time are measured at a rate, in place of `requests`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub duration: Option<Nanos>,
    /// As many are measured where fewer decide nothing.
    pub max_requests: usize,
    /// `None`: a tenth of the requests, and at least twice as many as are in the system at a time on the virtual clock.
    pub warmup: Option<usize>,
    /// Measure the baseline without reuse, too.
    pub cold_baseline: bool,
    pub scheduler: SchedulerOptions,
    pub sampling: Sampling,
    pub stop_at_eos: bool,
    pub slo: Slo,
    pub time_limit_s: Option<f64>,
    pub mode: Mode,
    /// Time the engine's steps first, and predict every point with them.
    pub predict: bool,
    /// A tokenizer for a model that has none, or instead of its own.
    pub tokenizer: Option<PathBuf>,
    pub lora: Option<LoraConfig>,
    /// Outputs held to a grammar; wins over the workload's own.
    pub structured: Option<Structured>,
    pub seed: u64,
    pub note: Option<String>,
    pub hypothesis: Option<String>,
    pub out: Option<PathBuf>,
}

/// Requests that arrive in this time, at so many a second.
pub fn requests_within(duration: Nanos, rate: f64) -> usize {
    whole_count((duration.seconds() * rate).ceil())
}

/// Why a serving benchmark could not run.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error(transparent)]
    Engine(#[from] engine::EngineError),
    #[error(transparent)]
    Point(#[from] PointError),
    #[error(transparent)]
    Plan(#[from] hbmark_traffic::point::PlanError),
    #[error(transparent)]
    Workload(#[from] WorkloadError),
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    #[error(transparent)]
    Structured(#[from] StructuredError),
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    #[error("{what} needs {needed} and the device has {have} of memory for it; {remedy}")]
    InsufficientKvMemory { what: String, needed: Bytes, have: Bytes, remedy: String },
    #[error("the saved run is of {saved} (hash {saved_hash}), not of {asked} (hash {asked_hash})")]
    OtherModel { saved: String, saved_hash: String, asked: String, asked_hash: String },
    #[error(
        "the saved run has no {what}, from which steps could be predicted; run `hbmark run` with {needed}"
    )]
    NoFit { what: &'static str, needed: &'static str },
    #[error("a sweep over {variable} {problem}")]
    Sweep { variable: SweepVariable, problem: String },
    #[error("{what} needs {needs}")]
    Needs { what: &'static str, needs: &'static str },
    #[error(transparent)]
    Worker(#[from] WorkerError),
    #[error("{reason}")]
    Refused { reason: String },
    #[error(
        "a worker was asked for {asked} and found {found}: a trace or another file changed meanwhile; start again"
    )]
    PointMismatch { asked: String, found: String },
    #[error("{reason}; the worker before it was lost, too")]
    GaveUp { reason: String },
    #[error(transparent)]
    Journal(#[from] JournalError),
    #[error(transparent)]
    Server(#[from] server::ServerError),
}

/// How a benchmark ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completion {
    /// By itself.
    Whole,
    /// Because no worker could go on, or a later point could not be run.
    Early,
    /// By a signal.
    Stopped(i32),
}

/// A benchmark that ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Finished {
    pub report: ServeReport,
    /// Points that were given up.
    pub lost: usize,
    pub ending: Completion,
}

impl ServeError {
    /// The signal that ended the benchmark, if one did.
    pub fn signal(&self) -> Option<i32> {
        if let Self::Worker(error) = self { error.signal() } else { None }
    }
}

/// Runs a serving benchmark.
///
/// # Errors
/// When the engine cannot be opened, when a point cannot be run at all, and when nothing was measured before a signal came or workers
/// were lost one after another.
pub fn benchmark(
    worker: &mut dyn Worker<ServeJob>,
    config: &ServeConfig,
    model: Option<&OpenModel>,
    command: &str,
    observer: &mut dyn Observer,
) -> Result<Finished, ServeError> {
    let mut stage = ServingContext::open(worker, config, model, observer)?;
    let mut report = begin(config, model, command, &stage);
    let mut ending = Completion::Whole;
    if let Err(error) = plans::run(config, &mut stage, &mut report, observer) {
        ending = end_early(&mut stage, &mut report, error)?;
    } else if report
        .points
        .iter()
        .filter_map(|point| point.result.as_ref())
        .any(|r| r.measured < MIN_REQUESTS)
    {
        report.warnings.push(format!(
            "fewer than {MIN_REQUESTS} requests were measured: saturation and the achieved rate are not judged"
        ));
    }
    report.warnings.splice(0..0, std::mem::take(&mut stage.worker.warnings));
    if let Some(after) = stage.timed_anew_after() {
        report.warnings.push(format!(
            "the engine was loaded and its steps were timed anew for points after {after}; rates and warm-ups go by the first times"
        ));
    }
    Ok(Finished { report, lost: stage.lost, ending })
}

/// The report of the points so far, where there are any; otherwise the error.
fn end_early(
    stage: &mut ServingContext<'_>,
    report: &mut ServeReport,
    error: ServeError,
) -> Result<Completion, ServeError> {
    let measured = stage.measured.len();
    if measured == 0 {
        return Err(error);
    }
    let ending = match (error.signal(), &error) {
        (Some(signal), _) => {
            let by = signal_name(signal);
            report.warnings.push(format!(
                "the benchmark was stopped by {by} after {}: what would have followed is missing",
                counted(measured, "point")
            ));
            stage.measured.extend(stage.interrupted.take().map(|point| {
                let not_run = Some(Cause::Interrupted { signal: by.to_owned() });
                Point { not_run, ..point }
            }));
            Completion::Stopped(signal)
        }
        (None, ServeError::GaveUp { reason }) => {
            let warning = format!(
                "the benchmark ended early: {reason}, and so was lost the worker before it; here is what was measured before"
            );
            report.warnings.insert(0, warning);
            Completion::Early
        }
        // A later point that cannot be run, of a length beyond the server's, takes nothing from those before it.
        (
            None,
            ServeError::Refused { .. }
            | ServeError::Point(_)
            | ServeError::Plan(_)
            | ServeError::Sweep { .. },
        ) => {
            let warning = format!("the benchmark ended early: {error}; here is what was measured before");
            report.warnings.insert(0, warning);
            Completion::Early
        }
        _ => return Err(error),
    };
    report.points = std::mem::take(&mut stage.measured);
    Ok(ending)
}

fn begin(
    config: &ServeConfig,
    model: Option<&OpenModel>,
    command: &str,
    stage: &ServingContext<'_>,
) -> ServeReport {
    let engine = &stage.engine;
    let mut warnings = engine.warnings.clone();
    if let Some(c) = &engine.capabilities {
        if c.ragged != hbmark_core::result::Ragged::Fused {
            warnings.push(format!(
                "the {} engine takes one sequence at a time here: a batch of n is n passes over the weights, so nothing is gained by \
                 batching; chunked prefill and prefix caching are off",
                c.engine
            ));
        }
        if !engine.has_tokenizer {
            warnings.push(
                "the model has no tokenizer: encoding prompts and decoding outputs take no time here (--tokenizer PATH gives it one)".into(),
            );
        }
    }
    let concurrency_swept = matches!(&config.mode, Mode::Sweep { variable: SweepVariable::Concurrency, .. });
    if concurrency_swept || matches!(config.offered, Offered::Concurrency(_)) {
        warnings.push(
            "closed loop: requests are sent as others finish, so waiting that independent users would see is hidden".into(),
        );
    }
    let (name, source) = match &config.source {
        TrafficSource::Workload(w) => (w.name.clone(), w.source.clone()),
        TrafficSource::Dataset(dataset) => dataset.as_ref().map_or_else(Default::default, |dataset| {
            let (name, prompts) = (dataset.format.name(), dataset.prompts.len());
            (
                format!("{name} dataset"),
                format!("{}, {} of other lengths left out", counted(prompts, "prompt"), dataset.left_out),
            )
        }),
        TrafficSource::Trace(trace, _) => (
            format!("{} trace", trace.format),
            format!(
                "{} as recorded, {} without tokens left out",
                counted(trace.requests.len(), "request"),
                trace.left_out
            ),
        ),
    };
    let kind = match (&engine.server, &engine.capabilities) {
        (Some(_), _) => ServeKind::ServeLive,
        (None, Some(_)) => ServeKind::Serve,
        (None, None) => ServeKind::ServeVirtual,
    };
    let workload = WorkloadSummary { name, source };
    ServeReport {
        started_at: engine.started_at.clone(),
        note: config.note.clone(),
        hypothesis: config.hypothesis.clone(),
        environment: engine.environment.clone(),
        config: as_map(config),
        model: model.zip(stage.dtype).map(|(model, dtype)| {
            let summary = model.summary(dtype);
            // A virtual clock needs no weights, and none were made.
            let virtual_shape = config.virtual_source.is_some() && model.is_synthetic();
            if virtual_shape {
                ModelSummary { source: ModelSummary::SHAPE_ALONE.to_owned(), ..summary }
            } else {
                summary
            }
        }),
        dtype: stage.dtype,
        server: engine.server.clone(),
        capabilities: engine.capabilities.clone(),
        datasheet: match &config.virtual_source {
            Some(VirtualSource::Datasheet(sheet)) => Some((**sheet).clone()),
            _ => None,
        },
        step_model: stage.step_model.as_ref().map(StepModel::describe),
        swept: match &config.mode {
            Mode::Sweep { variable, .. } => Some(variable.name().to_owned()),
            _ => None,
        },
        lora: engine.lora.as_ref().map(|(summary, _)| summary.clone()),
        structured: engine.structured.clone(),
        warnings,
        ..ServeReport::new(kind, command, workload)
    }
}

impl ServeConfig {
    /// The grammar that was asked for, by itself or with the workload.
    fn asked_structure(&self) -> Option<&Structured> {
        self.structured.as_ref().or(match &self.source {
            TrafficSource::Workload(workload) => workload.structured.as_ref(),
            TrafficSource::Trace(..) | TrafficSource::Dataset(_) => None,
        })
    }
}
