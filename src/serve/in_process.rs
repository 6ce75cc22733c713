//! Executes the requests of a serving benchmark: loads the engine, times its steps, measures points.
//!
//! Enters: requests. Leaves: responses. A worker process executes them here, and so do a benchmark without isolation and a virtual clock.
//! Which points there are is not decided here.

use std::rc::Rc;

use super::scheduler_options::KvMemoryBudget;
use super::serving_job::{EngineRecord, PointKey, PointRequest, ServeJob, ServeRequest, ServeResponse};
use super::{
    SchedulerOptions, ServeConfig, ServeError, ServerConfig, VirtualSource, adapters_and_grammar, server,
};
use crate::engine::{self, DeviceOptions};
use crate::machine::clock::now_utc;
use crate::machine::{doctor, environment};
use crate::serve::calibrate::{adapter_time, calibrate};
use crate::serve::clock::HostClock;
use crate::serve::point::ServingEngine;
use crate::weights::OpenModel;
use crate::worker::Observer;
use crate::worker::fault_injection::SessionWrapper;
use crate::worker::job::Handler;
use hbmark_core::ledger::{Ledger, Roof};
use hbmark_core::model::Dtype;
use hbmark_core::result::serving::SchedulerConfig;
use hbmark_core::result::{Environment, Report};
use hbmark_core::units::Nanos;
use hbmark_traffic::point::TrafficSource;
use hbmark_traffic::serving_loop::Progress;
use hbmark_traffic::step_model::{Fitted, StepModel};

/// The engine of this process, or a model of one.
pub struct LocalEngine {
    config: ServeConfig,
    /// None where it is a server that has the model, and it was not given.
    model: Option<Rc<OpenModel>>,
    engine: Option<ServingEngine>,
    wrap: Option<SessionWrapper>,
}

impl std::fmt::Debug for LocalEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalEngine").field("engine", &self.engine).finish_non_exhaustive()
    }
}

impl Handler for LocalEngine {
    type Job = ServeJob;

    fn wrap_sessions(&mut self, wrap: SessionWrapper) {
        self.wrap = Some(wrap);
    }

    fn handle(
        &mut self,
        request: &ServeRequest,
        observer: &mut dyn Observer,
    ) -> Result<ServeResponse, ServeError> {
        match request {
            ServeRequest::Identify => {
                Ok(ServeResponse::Identified(Box::new(environment::collect(self.config.device.gpu()))))
            }
            ServeRequest::Open { block_size } => {
                // The old weights go before the new ones come.
                self.engine = None;
                let model = self.model.clone();
                let (engine, record) = match (&self.config.server, &self.config.virtual_source, model) {
                    (Some(server), ..) => self.open_server(server, observer)?,
                    (None, Some(source), Some(model)) => self.open_virtual(source, &model)?,
                    (None, None, Some(model)) => self.open_engine(&model, *block_size, observer)?,
                    (None, _, None) => return Err(ServeError::Needs { what: "an engine", needs: "a model" }),
                };
                self.engine = Some(engine);
                Ok(ServeResponse::Opened(Box::new(record)))
            }
            ServeRequest::Measure(asked) => self.measure(asked, observer),
        }
    }
}

impl LocalEngine {
    pub fn new(config: &ServeConfig, model: Option<Rc<OpenModel>>) -> Self {
        Self { config: config.clone(), model, engine: None, wrap: None }
    }

    fn measure(
        &mut self,
        asked: &PointRequest,
        observer: &mut dyn Observer,
    ) -> Result<ServeResponse, ServeError> {
        let mut spec = asked.spec.clone();
        // What was recorded does not travel: each process has read it.
        match (&mut spec.source, &self.config.source) {
            (TrafficSource::Trace(trace, _), TrafficSource::Trace(own, _)) => trace.clone_from(own),
            (TrafficSource::Dataset(dataset), TrafficSource::Dataset(own)) => dataset.clone_from(own),
            _ => {}
        }
        let found = PointKey::of(asked.key.ordinal, &spec);
        if found != asked.key {
            return Err(ServeError::PointMismatch { asked: asked.key.to_string(), found: found.to_string() });
        }
        let Some(engine) = &mut self.engine else {
            return Err(ServeError::Refused { reason: "no engine is open".into() });
        };
        let longest = asked.longest.map(Nanos::seconds);
        let mut before = None;
        let point = engine.measure(&spec, &mut |progress| {
            observer.progress(progress.done, progress.total, &mut || describe(progress, &mut before));
            // After the last request the engine is timed again, and a virtual clock runs.
            observer.busy(longest.filter(|_| progress.done < progress.total));
        });
        match (point, engine.fault().map(str::to_owned)) {
            (Ok(point), fault) => Ok(ServeResponse::Measured { point: Some(Box::new(point)), fault }),
            (Err(_), fault @ Some(_)) => Ok(ServeResponse::Measured { point: None, fault }),
            (Err(error), None) => Err(error.into()),
        }
    }

    /// A live server: asked who it is.
    fn open_server(
        &self,
        server: &ServerConfig,
        observer: &mut dyn Observer,
    ) -> Result<(ServingEngine, EngineRecord), ServeError> {
        observer.stage("asking the server what it is");
        let server::OpenServer { server, lora, structured, warnings } =
            server.open(&self.config, self.model.as_deref())?;
        let environment = environment::collect(None);
        let record = EngineRecord {
            started_at: Some(now_utc()),
            warnings: doctor::distortions(&environment).into_iter().chain(warnings).collect(),
            environment,
            capabilities: None,
            server: Some(server.identity.clone()),
            has_tokenizer: false,
            // The server has its own.
            scheduler: SchedulerConfig {
                max_model_len: server.identity.max_model_len.unwrap_or(usize::MAX),
                ..SchedulerConfig::UNLIMITED
            },
            calibration: None,
            lora,
            structured,
        };
        Ok((ServingEngine::Server(Box::new(server)), record))
    }

    fn open_virtual(
        &self,
        source: &VirtualSource,
        model: &OpenModel,
    ) -> Result<(ServingEngine, EngineRecord), ServeError> {
        let config = &self.config;
        if config.asked_structure().is_some() {
            return Err(ServeError::Needs {
                what: "structured output",
                needs: "an engine that generates: leave out --virtual",
            });
        }
        let ledger = virtual_ledger(config, model);
        let step_model = virtual_step_model(config, model, source)?;
        let room = match source {
            VirtualSource::Datasheet(sheet) => KvMemoryBudget::Gpu(Some(sheet.memory_bytes)),
            VirtualSource::Saved(saved) => {
                KvMemoryBudget::of(&saved.environment, saved.environment.gpu.is_some())
            }
        };
        let typical = config.source.mean_positions(config.seed);
        let scheduler = config.scheduler.for_budget(room, &ledger, typical)?;
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
        let record = EngineRecord {
            started_at: None,
            // A prediction does not depend on the machine it was computed on.
            environment: Environment { build: environment::this_binary(), ..Environment::default() },
            capabilities: None,
            server: None,
            has_tokenizer: false,
            scheduler,
            calibration: None,
            lora,
            structured: None,
            warnings: typical
                .filter(|_| config.scheduler.num_gpu_blocks_override.is_none())
                .and_then(|positions| uneven_blocks(&ledger, positions))
                .into_iter()
                .collect(),
        };
        Ok((ServingEngine::Virtual { model: step_model, vocab }, record))
    }

    fn open_engine(
        &self,
        model: &OpenModel,
        block_size: Option<usize>,
        observer: &mut dyn Observer,
    ) -> Result<(ServingEngine, EngineRecord), ServeError> {
        let config = &self.config;
        let device = config.device;
        adapters_and_grammar::check_engine(config.lora.as_ref(), &config.engine, device)?;
        let tokenizer = adapters_and_grammar::tokenizer(config.tokenizer.as_ref(), model)?;
        let architecture = &model.architecture;
        let (grammar, structured) = match config.asked_structure() {
            None => (None, None),
            Some(_) if config.scheduler.speculation.is_some() => {
                return Err(ServeError::Needs {
                    what: "speculative decoding",
                    needs: "outputs without a grammar, which draft tokens do not follow: leave out --structured",
                });
            }
            Some(asked) => {
                observer.stage("compiling the grammar");
                let (grammar, summary) =
                    adapters_and_grammar::grammar(asked, tokenizer.as_deref(), architecture)?;
                (Some(grammar), Some(summary))
            }
        };
        let max_loras = config.scheduler.max_loras;
        let adapters = config
            .lora
            .as_ref()
            .map(|asked| {
                adapters_and_grammar::Adapters::open(asked, architecture, max_loras, config.seed, false)
            })
            .transpose()?;
        let environment = environment::collect(device.gpu());
        let dtype = config.dtype.unwrap_or_else(|| engine::default_dtype(&config.engine, model, device));
        let (threads, kv_dtype) = (config.threads, config.kv_dtype);
        let options = DeviceOptions { threads, block_size, kv_dtype, ..DeviceOptions::default() };
        let started_at = Some(now_utc());
        observer.stage("loading weights");
        let session = engine::open(&config.engine, model, dtype, device, options, &mut |done, total| {
            observer.loaded(done, total);
        })?;
        let mut session = match &self.wrap {
            Some(wrap) => wrap(session),
            None => session,
        };
        let capabilities = session.capabilities().clone();
        if config.scheduler.speculation.is_some() && !capabilities.every_token_logits {
            return Err(ServeError::Needs {
                what: "speculative decoding",
                needs: "an engine with the logits of every token: --engine native",
            });
        }
        let ledger = Ledger::new(&model.architecture, session.inventory(), session.kv_dtype());
        let loaded = adapters.map(|adapters| adapters.load(session.as_mut())).transpose()?;
        let scheduler = SchedulerOptions { block_size, ..config.scheduler.clone() };
        let scheduler = scheduler.for_engine(
            &capabilities,
            KvMemoryBudget::of(&environment, device.gpu().is_some()),
            &ledger,
        )?;
        let calibration = if config.predict {
            observer.stage("timing steps of this engine, to predict with");
            let clock = HostClock::default();
            Some(calibrate(session.as_mut(), &scheduler, &clock, &mut || observer.busy(None))?)
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
        let record = EngineRecord {
            started_at,
            warnings: doctor::distortions(&environment),
            environment,
            capabilities: Some(capabilities),
            server: None,
            has_tokenizer: tokenizer.is_some(),
            scheduler,
            calibration: calibration.clone(),
            lora,
            structured,
        };
        let model = calibration.map(StepModel::Calibrated);
        Ok((ServingEngine::Engine { session, tokenizer, model, grammar, fault: None }, record))
    }
}

/// The state of a point, with the output tokens per second since `before`: seconds and tokens.
fn describe(progress: Progress, before: &mut Option<(f64, usize)>) -> String {
    let (now, load) = (progress.elapsed.seconds(), progress.load);
    let (then, tokens) = before.replace((now, progress.output_tokens)).unwrap_or_default();
    let rate =
        if now > then { progress.output_tokens.saturating_sub(tokens) as f64 / (now - then) } else { 0.0 };
    format!(
        "{now:.1} s · running {} · waiting {} · {rate:.1} tok/s · KV {:.0} %",
        load.running,
        load.waiting,
        load.used_blocks as f64 / load.total_blocks.max(1) as f64 * 100.0
    )
}

/// The dtype of a virtual clock's weights.
pub(super) fn virtual_dtype(config: &ServeConfig, model: &OpenModel) -> Dtype {
    config.dtype.unwrap_or_else(|| model.stored_dtype())
}

fn virtual_ledger(config: &ServeConfig, model: &OpenModel) -> Ledger {
    let dtype = virtual_dtype(config, model);
    let kv_dtype = config.kv_dtype.unwrap_or_else(|| model.architecture.cache_of(dtype));
    Ledger::new(&model.architecture, &model.inventory(dtype), kv_dtype)
}

/// That blocks are those of sequences of one length, where others keep more or fewer bytes of a position.
fn uneven_blocks(ledger: &Ledger, positions: usize) -> Option<String> {
    let (each, all) = (ledger.kept_per_position(positions), ledger.kv_bytes_per_token().as_f64());
    ((each - all).abs() > 0.0).then(|| {
        format!(
            "a KV block counts as in a sequence of {positions} positions, the mean of this traffic: layers with windows or states keep {each:.0} B of \
             each there, in place of {all:.0} B; longer and shorter sequences take other shares of a real pool"
        )
    })
}

/// Step times of a virtual clock.
pub(super) fn virtual_step_model(
    config: &ServeConfig,
    model: &OpenModel,
    source: &VirtualSource,
) -> Result<StepModel, ServeError> {
    let dtype = virtual_dtype(config, model);
    let ledger = Box::new(virtual_ledger(config, model));
    Ok(match source {
        VirtualSource::Datasheet(sheet) => {
            let roof = Roof::of_model(sheet, dtype, &model.architecture);
            if roof.peak.is_none() {
                return Err(ServeError::Refused {
                    reason: format!(
                        "the data sheet of {} has no matrix-product peak for {dtype}, so its prefills have no time; choose another --dtype \
                         or --gpu, or --from a saved run",
                        sheet.product
                    ),
                });
            }
            StepModel::Floor { ledger, roof }
        }
        VirtualSource::Saved(saved) => StepModel::Fitted { fit: fitted(saved, model, dtype)?, ledger },
    })
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
