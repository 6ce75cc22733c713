//! The engine on its stage: opened, timed, with room for its cache, and ready for points.
//!
//! Enters: a [`ServeConfig`] and a model. Leaves: a [`ServingContext`], which knows what a point of this configuration is, what its longest step
//! should take, and how long it must warm up. Which points there are is not its business.

use super::scheduler_options::KvMemoryBudget;
use super::{
    EngineRecord, LOADING, ServeConfig, ServeError, ServeObserver, VirtualSource, adapters_and_grammar,
};
use crate::engine::{self, DeviceOptions};
use crate::machine::environment;
use crate::serve::calibrate::{adapter_time, calibrate};
use crate::serve::clock::HostClock;
use crate::serve::point::ServingEngine;
use crate::weights::OpenModel;
use hbmark_core::ledger::{Ledger, RaggedPart, Roof};
use hbmark_core::model::Dtype;
use hbmark_core::result::serving::{LoraSummary, Offered, SchedulerConfig, Slo, StructuredSummary};
use hbmark_core::result::{Capabilities, Environment, Report};
use hbmark_core::units::Nanos;
use hbmark_traffic::adapters::AdapterMix;
use hbmark_traffic::point::{PointSpec, TrafficSource};
use hbmark_traffic::sampler::Sampling;
use hbmark_traffic::step_model::{Fitted, StepModel};

/// The engine and everything that is known of it.
pub(super) struct ServingContext<'a> {
    config: &'a ServeConfig,
    pub model: &'a OpenModel,
    pub dtype: Dtype,
    pub engine: ServingEngine,
    pub capabilities: Option<Capabilities>,
    pub environment: Environment,
    pub scheduler: SchedulerConfig,
    pub step_model: Option<StepModel>,
    /// Adapters and what they are as traffic.
    pub lora: Option<(LoraSummary, AdapterMix)>,
    pub structured: Option<StructuredSummary>,
}

impl<'a> ServingContext<'a> {
    pub fn open(
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
        let (step_model, room) = match source {
            VirtualSource::Datasheet(sheet) => {
                let roof = Roof::datasheet(sheet, dtype);
                (
                    StepModel::Floor { ledger: Box::new(ledger.clone()), roof },
                    KvMemoryBudget::Gpu(Some(sheet.memory_bytes)),
                )
            }
            VirtualSource::Saved(saved) => (
                StepModel::Fitted { fit: fitted(saved, model, dtype)?, ledger: Box::new(ledger.clone()) },
                KvMemoryBudget::of(&saved.environment, saved.environment.gpu.is_some()),
            ),
        };
        let scheduler = config.knobs.for_budget(room, &ledger)?;
        let vocab = model.architecture.vocab_size;
        let lora = match &config.lora {
            None => None,
            Some(asked) => {
                let adapters = adapters_and_grammar::Adapters::open(
                    asked,
                    &model.architecture,
                    scheduler.max_loras,
                    config.seed,
                    true,
                )?;
                let mut mix = adapters_and_grammar::traffic(
                    asked,
                    &adapters.summary,
                    ledger.decode(1, 0).bytes.weights,
                    Nanos(0.0),
                );
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
            engine: ServingEngine::Virtual { model: step_model.clone(), vocab },
            capabilities: None,
            // A prediction says nothing of the machine it was computed on.
            environment: Environment { build: environment::this_binary(), ..Environment::default() },
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
        adapters_and_grammar::check_engine(config.lora.as_ref(), &config.engine, device)?;
        let tokenizer = adapters_and_grammar::tokenizer(config.tokenizer.as_ref(), model)?;
        let architecture = &model.architecture;
        let (grammar, structured) = match config.asked_structure() {
            None => (None, None),
            Some(asked) => {
                observer.stage("compiling the grammar");
                let (grammar, summary) =
                    adapters_and_grammar::grammar(asked, tokenizer.as_deref(), architecture)?;
                (Some(grammar), Some(summary))
            }
        };
        let max_loras = config.knobs.max_loras;
        let adapters = config
            .lora
            .as_ref()
            .map(|asked| {
                adapters_and_grammar::Adapters::open(asked, architecture, max_loras, config.seed, false)
            })
            .transpose()?;
        let environment = environment::collect(device.gpu());
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
        let knobs = super::SchedulerOptions { block_size, ..config.knobs.clone() };
        let scheduler = knobs.for_engine(
            &capabilities,
            KvMemoryBudget::of(&environment, device.gpu().is_some()),
            &ledger,
        )?;
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
                let mix =
                    adapters_and_grammar::traffic(asked, &summary, ledger.decode(1, 0).bytes.weights, time);
                Some((summary, mix))
            }
            _ => None,
        };
        // This engine's own steps predict what it is about to do; everything that is decided goes by what was found first.
        let step_model = calibration.clone().map(StepModel::Calibrated);
        let found = EngineRecord { block_size, environment, scheduler, calibration, lora, structured };
        let first = observer.opened(found)?;
        Ok(Self {
            config,
            model,
            dtype,
            lora: first.lora,
            structured: first.structured,
            engine: ServingEngine::Live { session, tokenizer, model: step_model, grammar, fault: None },
            capabilities: Some(capabilities),
            environment: first.environment,
            scheduler: first.scheduler,
            step_model: first.calibration.map(StepModel::Calibrated),
        })
    }

    /// This stage with blocks of a size; the engine is loaded again where they have another.
    pub fn with_block_size(
        self,
        block_size: usize,
        observer: &mut dyn ServeObserver,
    ) -> Result<Self, ServeError> {
        if matches!(self.engine, ServingEngine::Virtual { .. }) || self.scheduler.block_size == block_size {
            return Ok(self);
        }
        let Self { config, model, engine, .. } = self;
        // The old weights go before the new ones come.
        drop(engine);
        Self::open_live(config, model, Some(block_size), observer)
    }

    /// The point that the configuration describes.
    pub fn spec(&self, label: &str, offered: Offered, seed: u64) -> PointSpec {
        let config = self.config;
        let requests = match &config.source {
            TrafficSource::Workload(_) => config.requests,
            // A short trace is not spent on warming up.
            TrafficSource::Trace(trace, _) => config.requests.min(trace.requests.len()),
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

    /// What the longest step of a point should take: all that a step may prefill, beside as many sequences as there may be with as much
    /// cached as there is room for.
    pub fn longest_step(&self, spec: &PointSpec) -> Option<Nanos> {
        let knobs = &spec.scheduler;
        let room = knobs.num_blocks.saturating_mul(knobs.block_size);
        let cached = (room / knobs.max_num_seqs.max(1)).min(knobs.max_model_len);
        let decodes = std::iter::repeat_n(RaggedPart { cached, tokens: 1 }, knobs.max_num_seqs);
        let prompt = RaggedPart { cached: 0, tokens: knobs.max_num_batched_tokens.min(room) };
        self.step_model.as_ref().map(|model| model.step(decodes.chain([prompt])))
    }

    /// Lengthens a warm-up that would end before the system is as full as the load makes it: twice the requests that the virtual clock finds
    /// in the system, where nothing else was asked for.
    pub fn settle(&self, spec: &mut PointSpec) {
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
        let mut engine = ServingEngine::Virtual { model: model.clone(), vocab };
        // A trace may be too short for a trial; then the usual tenth has to do.
        let Ok(point) = engine.measure(&trial, &mut |_| {}) else { return };
        let inside = point.result.map_or(0.0, |r| r.mean_running + r.mean_waiting);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small positive mean")]
        let wanted = (2.0 * inside).ceil() as usize;
        let spare = match &spec.source {
            TrafficSource::Workload(_) => most,
            TrafficSource::Trace(trace, _) => trace.requests.len().saturating_sub(spec.requests).min(most),
        };
        spec.warmup = spec.warmup.max(wanted.min(spare));
    }
}

/// The step model of a saved run of the same model.
fn fitted(saved: &Report, model: &OpenModel, dtype: Dtype) -> Result<Fitted, ServeError> {
    let asked_hash = hbmark_core::model::model_hash(&model.architecture, &model.inventory(dtype));
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
        .filter(|c| {
            c.phase == hbmark_core::result::Phase::Prefill && c.engine == fit.engine && c.dtype == fit.dtype
        })
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
        prefill_flops_per_ns: hbmark_core::stats::percentile(&rates, 0.5),
    })
}
