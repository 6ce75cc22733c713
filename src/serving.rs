//! `hbmark serve` as data: the one place where the serving loop meets a model, an engine and a machine.
//!
//! Enters: a [`ServeConfig`] and an opened model. Leaves: a [`ServeReport`]: one point, a sweep, a search or the matrix, on a real engine
//! or on a virtual clock. Everything below it is told what it needs and knows nothing of the rest.

pub mod cold;
pub mod extras;
pub mod isolated;
mod knobs;
mod known;
mod modes;
#[cfg(test)]
mod tests;
pub mod worker;

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Serialize;

pub use extras::LoraConfig;
pub use knobs::Knobs;
pub use known::{Answered, Asked, Opening};

use crate::engine::{self, Capabilities, DeviceChoice, DeviceOptions, Session};
use crate::measure::doctor;
use crate::measure::environment::{BuildEnvironment, Environment};
use crate::model::tokenizer::TokenizerError;
use crate::model::{AdapterError, Dtype, OpenModel};
use crate::report::serving::{SCHEMA_VERSION, ServeKind, ServeReport, WorkloadSummary};
use crate::report::{self, Report};
use crate::rig::WorkerError;
use crate::roofline::{DeviceSpec, Ledger, RaggedPart, Roof};
use crate::serve::adapters::AdapterMix;
use crate::serve::arrivals::{Arrivals, Burst};
use crate::serve::calibrate::{adapter_time, calibrate};
use crate::serve::clock::HostClock;
use crate::serve::latency::ENOUGH;
use crate::serve::point::{Engine, Offered, Point, PointError, PointSpec, Source};
use crate::serve::run::Progress;
use crate::serve::sampler::Sampling;
use crate::serve::scheduler::SchedulerConfig;
use crate::serve::slo::Slo;
use crate::serve::step_model::{Fitted, StepModel};
use crate::serve::structured::StructuredError;
use crate::serve::workload::{Structured, WorkloadError};
use crate::units::{Bytes, Nanos};

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
    /// One point; with its cold twin where prefixes are shared.
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
    pub source: Source,
    pub offered: Offered,
    pub arrivals: Arrivals,
    pub burst: Option<Burst>,
    pub requests: usize,
    /// `None`: a tenth of the requests, and at least twice as many as the virtual clock says are in the system at a time.
    pub warmup: Option<usize>,
    /// Measure the cold twin, too.
    pub cold_twin: bool,
    pub knobs: Knobs,
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
    fn opened(&mut self, found: Opening) -> Result<Opening, ServeError> {
        Ok(found)
    }
    /// Everything but the points is known.
    fn begun(&mut self, _report: &ServeReport) {}
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
    NoRoomForKv { what: String, needed: Bytes, have: Bytes },
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
        "a lost worker had measured {known} where this one is asked for {asked}: the model, a trace or another file changed meanwhile; \
         start again"
    )]
    OtherPoint { known: String, asked: String },
    #[error(
        "a lost worker had loaded the engine with blocks of {known:?} where this one is asked for {asked:?}: something changed meanwhile; \
         start again"
    )]
    OtherOpening { known: Option<usize>, asked: Option<usize> },
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
    let mut stage = Stage::open(config, model, observer)?;
    let mut report = begin(config, model, command, &stage);
    observer.begun(&report);
    modes::run(config, &mut stage, &mut report, observer)?;
    if report.points.iter().filter_map(|point| point.result.as_ref()).any(|r| r.measured < ENOUGH) {
        report.warnings.push(format!(
            "fewer than {ENOUGH} requests were measured: saturation and the realised rate are not judged"
        ));
    }
    Ok(report)
}

/// The engine and everything that is known of it.
pub(crate) struct Stage<'a> {
    config: &'a ServeConfig,
    model: &'a OpenModel,
    dtype: Dtype,
    pub engine: Engine,
    pub capabilities: Option<Capabilities>,
    pub environment: Environment,
    pub scheduler: SchedulerConfig,
    pub step_model: Option<StepModel>,
    /// Adapters and what they are as traffic.
    pub lora: Option<(extras::LoraSummary, AdapterMix)>,
    pub structured: Option<extras::StructuredSummary>,
}

impl<'a> Stage<'a> {
    fn open(
        config: &'a ServeConfig,
        model: &'a OpenModel,
        observer: &mut dyn ServeObserver,
    ) -> Result<Self, ServeError> {
        match &config.virtual_source {
            Some(source) => Self::open_virtual(config, model, source),
            None => Self::open_live(config, model, config.knobs.block_size, observer),
        }
    }

    fn open_virtual(
        config: &'a ServeConfig,
        model: &'a OpenModel,
        source: &VirtualSource,
    ) -> Result<Self, ServeError> {
        if config.asked_structure().is_some() {
            return Err(ServeError::Needs {
                what: "structured output",
                needs: "an engine that generates: leave out --virtual",
            });
        }
        let dtype = config.dtype.unwrap_or(Dtype::Bf16);
        let inventory = model.inventory(dtype);
        let ledger = Ledger::new(&model.architecture, &inventory, model.kv_dtype(dtype));
        let (step_model, memory) = match source {
            VirtualSource::Datasheet(sheet) => {
                let roof = Roof::datasheet(sheet, dtype);
                (StepModel::Floor { ledger: Box::new(ledger.clone()), roof }, Some(sheet.memory_bytes))
            }
            VirtualSource::Saved(saved) => (
                StepModel::Fitted { fit: fitted(saved, model, dtype)?, ledger: Box::new(ledger.clone()) },
                saved.environment.device_memory(),
            ),
        };
        let scheduler = config.knobs.on_a_device(&ledger, memory)?;
        let vocab = model.architecture.vocab_size;
        let lora = match &config.lora {
            None => None,
            Some(asked) => {
                let adapters = extras::Adapters::open(
                    asked,
                    &model.architecture,
                    scheduler.max_loras,
                    config.seed,
                    true,
                )?;
                let mut mix =
                    extras::traffic(asked, &adapters.summary, ledger.decode(1, 0).bytes.weights, Nanos(0.0));
                mix.time_each = step_model.read_time(mix.bytes_each);
                Some((adapters.summary, mix))
            }
        };
        Ok(Self {
            config,
            model,
            dtype,
            lora,
            structured: None,
            engine: Engine::Virtual { model: step_model.clone(), vocab },
            capabilities: None,
            // A prediction says nothing of the machine it was computed on.
            environment: Environment { build: BuildEnvironment::of_this_binary(), ..Environment::default() },
            scheduler,
            step_model: Some(step_model),
        })
    }

    fn open_live(
        config: &'a ServeConfig,
        model: &'a OpenModel,
        block_size: Option<usize>,
        observer: &mut dyn ServeObserver,
    ) -> Result<Self, ServeError> {
        let device = config.device;
        extras::check_engine(config.lora.as_ref(), &config.engine, device)?;
        let tokenizer = extras::tokenizer(config.tokenizer.as_ref(), model)?;
        let architecture = &model.architecture;
        let (grammar, structured) = match config.asked_structure() {
            None => (None, None),
            Some(asked) => {
                observer.stage("compiling the grammar");
                let (grammar, summary) = extras::grammar(asked, tokenizer.as_deref(), architecture)?;
                (Some(grammar), Some(summary))
            }
        };
        let max_loras = config.knobs.max_loras;
        let adapters = config
            .lora
            .as_ref()
            .map(|asked| extras::Adapters::open(asked, architecture, max_loras, config.seed, false))
            .transpose()?;
        let environment = Environment::collect(device.gpu());
        let dtype = config.dtype.unwrap_or_else(|| engine::default_dtype(&config.engine, model, device));
        let options = DeviceOptions { threads: config.threads, block_size, ..DeviceOptions::default() };
        observer.stage(LOADING);
        let session = engine::open(&config.engine, model, dtype, device, options, &mut |done, total| {
            observer.loaded(done, total);
        })?;
        let mut session = observer.session(session);
        let capabilities = session.capabilities().clone();
        let ledger = Ledger::new(&model.architecture, session.inventory(), session.kv_dtype());
        let loaded = adapters.map(|adapters| adapters.load(session.as_mut())).transpose()?;
        let knobs = Knobs { block_size, ..config.knobs.clone() };
        let scheduler = knobs.on_an_engine(&capabilities, &ledger, &environment)?;
        let calibration = if config.predict {
            observer.stage("timing steps of this engine, to predict with");
            let clock = HostClock::default();
            Some(calibrate(session.as_mut(), &scheduler, &clock, &mut || observer.alive())?)
        } else {
            None
        };
        let lora = match (&config.lora, loaded) {
            (Some(asked), Some(summary)) => {
                let count = summary.adapters.len();
                let time = if config.predict {
                    observer.stage("timing adapters, to predict with");
                    adapter_time(session.as_mut(), &scheduler, &HostClock::default(), count)?
                } else {
                    Nanos(0.0)
                };
                let mix = extras::traffic(asked, &summary, ledger.decode(1, 0).bytes.weights, time);
                Some((summary, mix))
            }
            _ => None,
        };
        // This engine's own steps predict what it is about to do; everything that is decided goes by what was found first.
        let step_model = calibration.clone().map(StepModel::Calibrated);
        let found = Opening { block_size, environment, scheduler, calibration, lora, structured };
        let first = observer.opened(found)?;
        Ok(Self {
            config,
            model,
            dtype,
            lora: first.lora,
            structured: first.structured,
            engine: Engine::Live { session, tokenizer, model: step_model, grammar, fault: None },
            capabilities: Some(capabilities),
            environment: first.environment,
            scheduler: first.scheduler,
            step_model: first.calibration.map(StepModel::Calibrated),
        })
    }

    /// Sees to it that the engine's blocks have a size; loads it again where they have another.
    fn with_block_size(
        &mut self,
        block_size: usize,
        observer: &mut dyn ServeObserver,
    ) -> Result<(), ServeError> {
        if matches!(self.engine, Engine::Live { .. }) && self.scheduler.block_size != block_size {
            // The old weights go before the new ones come.
            self.engine = Engine::Virtual {
                model: StepModel::Fitted {
                    ledger: Box::new(Ledger::new(
                        &self.model.architecture,
                        &self.model.inventory(self.dtype),
                        self.dtype,
                    )),
                    fit: Fitted {
                        fixed_ns: 1.0,
                        ns_per_kv_byte: 0.0,
                        ns_per_sequence: 0.0,
                        prefill_flops_per_ns: 1.0,
                    },
                },
                vocab: 1,
            };
            *self = Self::open_live(self.config, self.model, Some(block_size), observer)?;
        }
        Ok(())
    }

    /// The point that the configuration describes.
    fn spec(&self, label: &str, offered: Offered, seed: u64) -> PointSpec {
        let config = self.config;
        let requests = match &config.source {
            Source::Workload(_) => config.requests,
            // A short trace is not spent on warming up.
            Source::Trace(trace, _) => config.requests.min(trace.requests.len()),
        };
        PointSpec {
            label: label.to_owned(),
            source: config.source.clone(),
            offered,
            arrivals: config.arrivals,
            burst: config.burst,
            requests,
            warmup: config.warmup.unwrap_or_else(|| (requests / 10).clamp(4, 100)),
            scheduler: self.scheduler.clone(),
            sampling: Sampling { seed, ..config.sampling },
            stop_at_eos: config.stop_at_eos,
            seed,
            cold: false,
            slo: config.slo.clone(),
            time_limit: config.time_limit_s.map(Nanos::from_seconds),
            adapters: self.lora.as_ref().map(|(_, mix)| mix.clone()),
            constrained: self.structured.as_ref().map(|s| s.share),
        }
    }
}

impl ServeConfig {
    /// The grammar that was asked for, by itself or with the workload.
    fn asked_structure(&self) -> Option<&Structured> {
        self.structured.as_ref().or(match &self.source {
            Source::Workload(workload) => workload.structured.as_ref(),
            Source::Trace(..) => None,
        })
    }
}

impl Stage<'_> {
    /// What the longest step of a point should take: all that a step may prefill, beside as many sequences as there may be with as much
    /// cached as there is room for.
    pub(crate) fn longest_step(&self, spec: &PointSpec) -> Option<Nanos> {
        let knobs = &spec.scheduler;
        let room = knobs.num_blocks.saturating_mul(knobs.block_size);
        let cached = (room / knobs.max_num_seqs.max(1)).min(knobs.max_model_len);
        let decodes = std::iter::repeat_n(RaggedPart { cached, tokens: 1 }, knobs.max_num_seqs);
        let prompt = RaggedPart { cached: 0, tokens: knobs.max_num_batched_tokens.min(room) };
        self.step_model.as_ref().map(|model| model.step(decodes.chain([prompt])))
    }

    /// Lengthens a warm-up that would end before the system is as full as the load makes it: twice the requests that the virtual clock finds
    /// in the system, where nothing else was asked for.
    pub(crate) fn settle(&self, spec: &mut PointSpec) {
        let (Some(model), Offered::Rate(_), None) = (&self.step_model, spec.offered, self.config.warmup)
        else {
            return;
        };
        let most = 4 * spec.scheduler.max_num_seqs;
        let trial = PointSpec {
            requests: (2 * spec.scheduler.max_num_seqs).max(50),
            warmup: most,
            slo: Slo::default(),
            time_limit: None,
            ..spec.clone()
        };
        let vocab = self.model.architecture.vocab_size;
        let mut engine = Engine::Virtual { model: model.clone(), vocab };
        // A trace may be too short for a trial; then the usual tenth has to do.
        let Ok(point) = engine.measure(&trial, &mut |_| {}) else { return };
        let inside = point.result.map_or(0.0, |r| r.mean_running + r.mean_waiting);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small positive mean")]
        let wanted = (2.0 * inside).ceil() as usize;
        let spare = match &spec.source {
            Source::Workload(_) => most,
            Source::Trace(trace, _) => trace.requests.len().saturating_sub(spec.requests).min(most),
        };
        spec.warmup = spec.warmup.max(wanted.min(spare));
    }
}

/// The step model of a saved run of the same model.
fn fitted(saved: &Report, model: &OpenModel, dtype: Dtype) -> Result<Fitted, ServeError> {
    let asked_hash = crate::model::model_hash(&model.architecture, &model.inventory(dtype));
    if saved.model.architecture != model.architecture {
        return Err(ServeError::OtherModel {
            saved: saved.model.name.clone(),
            saved_hash: saved.model.hash.chars().take(12).collect(),
            asked: model.name.clone(),
            asked_hash: asked_hash.chars().take(12).collect(),
        });
    }
    let fit = saved.fits.iter().find(|fit| fit.dtype == dtype).or_else(|| saved.fits.first());
    let fit = fit.ok_or(ServeError::NoFit {
        what: "fit of its decode steps",
        needed: "several batches and contexts",
    })?;
    let mut rates: Vec<f64> = saved
        .cells
        .iter()
        .filter(|c| c.phase == report::Phase::Prefill && c.engine == fit.engine && c.dtype == fit.dtype)
        .filter_map(|c| Some(c.flops / c.step_ns.as_ref()?.median))
        .collect();
    rates.sort_by(f64::total_cmp);
    if rates.is_empty() {
        return Err(ServeError::NoFit {
            what: "prefill of that engine and dtype",
            needed: "--phase prefill,decode",
        });
    }
    Ok(Fitted {
        fixed_ns: fit.intercept_ns.max(1.0),
        ns_per_kv_byte: fit.kv_bytes_per_s.map_or(0.0, |rate| 1e9 / rate),
        ns_per_sequence: fit.per_sequence_ns.unwrap_or(0.0).max(0.0),
        prefill_flops_per_ns: crate::stats::percentile(&rates, 0.5),
    })
}

fn begin(config: &ServeConfig, model: &OpenModel, command: &str, stage: &Stage<'_>) -> ServeReport {
    let live = stage.capabilities.is_some();
    let mut warnings = if live { doctor::distortions(&stage.environment) } else { Vec::new() };
    if let Some(c) = &stage.capabilities {
        if c.ragged != engine::Ragged::Fused {
            warnings.push(format!(
                "the {} engine takes one sequence at a time here: a batch of n is n passes over the weights, so nothing is gained by \
                 batching; chunked prefill and prefix caching are off",
                c.engine
            ));
        }
        if matches!(&stage.engine, Engine::Live { tokenizer: None, .. }) {
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
        Source::Workload(w) => (w.name.clone(), w.source.clone()),
        Source::Trace(trace, _) => (
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
        started_at: live.then(report::now_utc),
        note: config.note.clone(),
        hypothesis: config.hypothesis.clone(),
        environment: stage.environment.clone(),
        config: report::as_map(config),
        model: crate::summarise_model(model, stage.dtype),
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

/// Results of the matrix by row.
type Rows = BTreeMap<crate::serve::matrix::Row, (crate::serve::latency::ServeResult, Option<f64>)>;
