//! `hbmark serve` as data: the one place where the serving loop meets a model, an engine and a machine.
//!
//! Enters: a [`ServeConfig`] and an opened model. Leaves: a [`ServeReport`]: one point, a sweep, a search or the matrix, on a real engine
//! or on a virtual clock. Everything below it is told what it needs and knows nothing of the rest.

pub mod adapters_and_grammar;
pub mod calibrate;
pub mod checkpoint;
pub mod child;
pub mod clock;
pub mod cold;
mod context;
pub mod detokenizer;
pub mod executor;
pub mod in_process;
mod plans;
pub mod point;
mod recorded_points;
mod scheduler_options;
pub mod structured_output;
pub mod subprocess;
#[cfg(test)]
mod tests;

use std::path::PathBuf;

use context::ServingContext;
use serde::Serialize;

use crate::engine::{self, DeviceChoice, Session};
use crate::machine::clock::now_utc;
use crate::machine::doctor;
use crate::serve::point::{PointError, ServingEngine};
use crate::serve::structured_output::StructuredError;
use crate::weights::tokenizer::TokenizerError;
use crate::weights::{AdapterError, OpenModel};
use crate::worker::journal::JournalError;
use crate::worker::spawn::WorkerError;
use hbmark_core::model::Dtype;
use hbmark_core::result::serving::{
    Arrivals, MIN_REQUESTS, Offered, Point, SCHEMA_VERSION, ServeKind, ServeReport, Slo, WorkloadSummary,
};
use hbmark_core::result::{DeviceSpec, Report, as_map};
use hbmark_core::units::{Bytes, Nanos};
use hbmark_traffic::arrivals::Burst;
use hbmark_traffic::point::{PointSpec, TrafficSource};
use hbmark_traffic::sampler::Sampling;
use hbmark_traffic::serving_loop::Progress;
use hbmark_traffic::step_model::StepModel;
use hbmark_traffic::workload::{Structured, WorkloadError};

pub use adapters_and_grammar::LoraConfig;
pub use recorded_points::{EngineRecord, PointKey, RecordedPoint};
pub use scheduler_options::SchedulerOptions;

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
    Sweep { variable: String, values: Vec<f64> },
    /// The highest rate under the objectives.
    FindMaxRate { seeds: usize, precision: f64 },
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
    pub threads: Option<usize>,
    #[serde(skip)]
    pub virtual_source: Option<VirtualSource>,
    #[serde(skip)]
    pub source: TrafficSource,
    pub offered: Offered,
    pub arrivals: Arrivals,
    pub burst: Option<Burst>,
    pub requests: usize,
    /// `None`: a tenth of the requests, and at least twice as many as the virtual clock says are in the system at a time.
    pub warmup: Option<usize>,
    /// Measure the baseline without reuse, too.
    pub cold_twin: bool,
    pub knobs: SchedulerOptions,
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

/// Is told how a serving benchmark goes on, and may know parts of it from before.
pub trait ServeObserver {
    /// A stage outside the points, or the next point.
    fn stage(&mut self, what: &str);
    /// How far the point is.
    fn progress(&mut self, progress: Progress);
    /// Nothing to tell, and all is well.
    fn alive(&mut self) {}
    /// While weights load: so many bytes of so many have come.
    fn loaded(&mut self, _done: Bytes, _total: Bytes) {}
    /// A session was opened; what is given back is served with.
    fn session(&mut self, session: Box<dyn Session>) -> Box<dyn Session> {
        session
    }
    /// An engine is loaded and timed. What is given back is gone by: the same, or what an earlier process found.
    ///
    /// # Errors
    /// When an earlier process found another engine.
    fn opened(&mut self, found: EngineRecord) -> Result<EngineRecord, ServeError> {
        Ok(found)
    }
    /// Everything but the points is known.
    ///
    /// # Errors
    /// When it cannot be kept.
    fn begun(&mut self, _report: &ServeReport) -> Result<(), ServeError> {
        Ok(())
    }
    /// A point is about to be measured, whose longest step should take so long; what is known of it is not measured again.
    ///
    /// # Errors
    /// When another point is known in its place, or it cannot be planned.
    fn recall(&mut self, _spec: &PointSpec, _longest: Option<Nanos>) -> Result<Option<Point>, ServeError> {
        Ok(None)
    }
    /// A point was measured; `fault` says why nothing that the device does from here on can be trusted.
    ///
    /// # Errors
    /// When the benchmark must not go on with this device.
    fn measured(
        &mut self,
        _point: &Result<Point, PointError>,
        _fault: Option<&str>,
    ) -> Result<(), ServeError> {
        Ok(())
    }
}

/// The stage in which weights are loaded.
pub(crate) const LOADING: &str = "loading weights";

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
    #[error(
        "{what} needs {needed} and the device has {have} of memory for it; choose a smaller model or dtype, or raise \
         --gpu-memory-utilization"
    )]
    InsufficientKvMemory { what: String, needed: Bytes, have: Bytes },
    #[error("the saved run is of {saved} (hash {saved_hash}), not of {asked} (hash {asked_hash})")]
    OtherModel { saved: String, saved_hash: String, asked: String, asked_hash: String },
    #[error(
        "the saved run has no {what}, from which steps could be predicted; run `hbmark run` with {needed}"
    )]
    NoFit { what: &'static str, needed: &'static str },
    #[error("a sweep over {variable} {problem}")]
    Sweep { variable: String, problem: String },
    #[error("{what} needs {needs}")]
    Needs { what: &'static str, needs: &'static str },
    #[error(transparent)]
    Worker(#[from] WorkerError),
    #[error("{reason}")]
    Refused { reason: String },
    #[error(
        "an earlier process had measured {known} where this one is asked for {asked}: the model, a trace or another file changed \
         meanwhile; start again"
    )]
    PointMismatch { known: String, asked: String },
    #[error(
        "an earlier process had loaded the engine with blocks of {known:?} where this one is asked for {asked:?}: something changed \
         meanwhile; start again"
    )]
    EngineMismatch { known: Option<usize>, asked: Option<usize> },
    #[error("cannot go on with what was measured before: {what} differs: it was {was}, this is {is}")]
    MachineMismatch { what: &'static str, was: String, is: String },
    #[error("stopped by {} before anything was measured", signal_name(*signal))]
    Interrupted { signal: i32 },
    #[error(transparent)]
    Journal(#[from] JournalError),
}

/// How a benchmark came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completion {
    /// By itself.
    Whole,
    /// Because no worker could go on.
    Early,
    /// By a signal.
    Stopped(i32),
}

/// A benchmark that came to an end.
#[derive(Debug, Clone, PartialEq)]
pub struct Finished {
    pub report: ServeReport,
    /// Points that were given up.
    pub lost: usize,
    pub ending: Completion,
}

/// What a signal did, as a part of a sentence.
fn signal_name(signal: i32) -> &'static str {
    signal_hook::low_level::signal_name(signal).unwrap_or("a signal")
}

/// Runs a serving benchmark.
///
/// # Errors
/// When the engine cannot be opened, or a point cannot be run at all.
pub fn serve(
    config: &ServeConfig,
    model: &OpenModel,
    command: &str,
    observer: &mut dyn ServeObserver,
) -> Result<ServeReport, ServeError> {
    let stage = ServingContext::open(config, model, observer)?;
    let mut report = begin(config, model, command, &stage);
    observer.begun(&report)?;
    plans::run(config, stage, &mut report, observer)?;
    if report.points.iter().filter_map(|point| point.result.as_ref()).any(|r| r.measured < MIN_REQUESTS) {
        report.warnings.push(format!(
            "fewer than {MIN_REQUESTS} requests were measured: saturation and the realised rate are not judged"
        ));
    }
    Ok(report)
}

fn begin(config: &ServeConfig, model: &OpenModel, command: &str, stage: &ServingContext<'_>) -> ServeReport {
    let live = stage.capabilities.is_some();
    let mut warnings = if live { doctor::distortions(&stage.environment) } else { Vec::new() };
    if let Some(c) = &stage.capabilities {
        if c.ragged != hbmark_core::result::Ragged::Fused {
            warnings.push(format!(
                "the {} engine takes one sequence at a time here: a batch of n is n passes over the weights, so nothing is gained by \
                 batching; chunked prefill and prefix caching are off",
                c.engine
            ));
        }
        if matches!(&stage.engine, ServingEngine::Live { tokenizer: None, .. }) {
            warnings.push(
                "the model has no tokenizer: encoding prompts and decoding outputs take no time here (--tokenizer PATH gives it one)".into(),
            );
        }
    }
    let concurrency_swept = matches!(&config.mode, Mode::Sweep { variable, .. } if variable == "concurrency");
    if concurrency_swept || matches!(config.offered, Offered::Concurrency(_)) {
        warnings.push(
            "closed loop: requests are sent as others finish, so waiting that independent users would see is hidden".into(),
        );
    }
    let (workload, source) = match &config.source {
        TrafficSource::Workload(w) => (w.name.clone(), w.source.clone()),
        TrafficSource::Trace(trace, _) => (
            format!("{} trace", trace.format),
            format!(
                "{} requests as recorded, {} without tokens left out",
                trace.requests.len(),
                trace.left_out
            ),
        ),
    };
    ServeReport {
        schema_version: SCHEMA_VERSION,
        kind: if live { ServeKind::Serve } else { ServeKind::ServeVirtual },
        command: command.to_owned(),
        started_at: live.then(now_utc),
        note: config.note.clone(),
        hypothesis: config.hypothesis.clone(),
        environment: stage.environment.clone(),
        config: as_map(config),
        model: model.summary(stage.dtype),
        dtype: stage.dtype,
        capabilities: stage.capabilities.clone(),
        datasheet: match &config.virtual_source {
            Some(VirtualSource::Datasheet(sheet)) => Some((**sheet).clone()),
            _ => None,
        },
        ceilings: None,
        workload: WorkloadSummary { name: workload, source },
        step_model: stage.step_model.as_ref().map(StepModel::describe),
        swept: match &config.mode {
            Mode::Sweep { variable, .. } => Some(variable.clone()),
            _ => None,
        },
        points: Vec::new(),
        search: None,
        matrix: Vec::new(),
        cold_start: None,
        lora: stage.lora.as_ref().map(|(summary, _)| summary.clone()),
        structured: stage.structured.clone(),
        warnings,
    }
}

impl ServeConfig {
    /// The grammar that was asked for, by itself or with the workload.
    fn asked_structure(&self) -> Option<&Structured> {
        self.structured.as_ref().or(match &self.source {
            TrafficSource::Workload(workload) => workload.structured.as_ref(),
            TrafficSource::Trace(..) => None,
        })
    }
}
