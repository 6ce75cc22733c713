//! The engine as the plan of a serving benchmark uses it: opened, timed, with room for its cache, and ready for points.
//!
//! Enters: a [`ServeConfig`], a model, and a worker that owns the engine. Leaves: points of this configuration: measured, repeated after a
//! loss, or given up. Which points there are is not decided here.

use super::in_process::{virtual_dtype, virtual_step_model};
use super::serving_job::{EngineRecord, PointKey, PointRequest, ServeJob, ServeRequest, ServeResponse};
use super::{ServeConfig, ServeError, requests_within};
use crate::engine;
use crate::serve::point::ServingEngine;
use crate::weights::OpenModel;
use crate::worker::spawn::WorkerError;
use crate::worker::{Observer, Worker};
use hbmark_core::ledger::RaggedPart;
use hbmark_core::model::Dtype;
use hbmark_core::result::Cause;
use hbmark_core::result::serving::{Offered, Point, Slo};
use hbmark_core::units::{Nanos, counted, whole_count};
use hbmark_traffic::point::{PointSpec, TrafficSource};
use hbmark_traffic::sampler::Sampling;
use hbmark_traffic::step_model::StepModel;

/// Workers that are lost one after another without coming to a point; then the benchmark ends.
const MAX_CONSECUTIVE_FAILURES: usize = 2;

/// A worker, and what was lost of it.
pub(super) struct EngineWorker<'a> {
    worker: &'a mut dyn Worker<ServeJob>,
    /// Workers lost in a row before they came to a point.
    consecutive_failures: usize,
    pub warnings: Vec<String>,
}

impl EngineWorker<'_> {
    /// Executes a request, in another worker where one was lost that measured nothing.
    fn execute(
        &mut self,
        request: &ServeRequest,
        observer: &mut dyn Observer,
    ) -> Result<ServeResponse, ServeError> {
        let opens = matches!(request, ServeRequest::Open { .. });
        loop {
            match self.worker.execute(request, observer)? {
                ServeResponse::Refused { reason } => return Err(ServeError::Refused { reason }),
                ServeResponse::Lost { reason, executing } if opens || !executing => {
                    self.consecutive_failures += 1;
                    if self.consecutive_failures >= MAX_CONSECUTIVE_FAILURES {
                        return Err(ServeError::GaveUp { reason: reason.to_string() });
                    }
                    self.warnings.push(format!("{reason}; another worker went on"));
                }
                response => return Ok(response),
            }
        }
    }

    fn open(
        &mut self,
        block_size: Option<usize>,
        observer: &mut dyn Observer,
    ) -> Result<EngineRecord, ServeError> {
        match self.execute(&ServeRequest::Open { block_size }, observer)? {
            ServeResponse::Opened(engine) => Ok(*engine),
            _ => Err(WorkerError::UnexpectedResponse { doing: "loading weights".into() }.into()),
        }
    }
}

/// Sequences that a trial on the virtual clock makes room for: as many as servers run at a time, and a few seconds of work.
const MAX_TRIAL_SEQS: usize = 1024;

/// The engine and everything that is known of it.
pub(super) struct ServingContext<'a> {
    config: &'a ServeConfig,
    /// None where it is a server that has the model, and it was not given.
    pub model: Option<&'a OpenModel>,
    pub dtype: Option<Dtype>,
    pub worker: EngineWorker<'a>,
    pub engine: EngineRecord,
    pub step_model: Option<StepModel>,
    /// Every point so far, as it was measured.
    pub measured: Vec<Point>,
    /// The point that a signal interrupted, without a result.
    pub interrupted: Option<Point>,
    /// How many points were given up.
    pub lost: usize,
}

impl<'a> ServingContext<'a> {
    pub fn open(
        worker: &'a mut dyn Worker<ServeJob>,
        config: &'a ServeConfig,
        model: Option<&'a OpenModel>,
        observer: &mut dyn Observer,
    ) -> Result<Self, ServeError> {
        let mut worker = EngineWorker { worker, consecutive_failures: 0, warnings: Vec::new() };
        let engine = worker.open(config.scheduler.block_size, observer)?;
        let dtype = |model: &OpenModel| match (&config.server, &config.virtual_source) {
            (Some(_), _) => model.stored_dtype(),
            (None, Some(_)) => virtual_dtype(config, model),
            (None, None) => engine::default_dtype(&config.engine, model, config.device),
        };
        let dtype = model.map(|model| config.dtype.unwrap_or_else(|| dtype(model)));
        let step_model = match (&config.virtual_source, model) {
            (Some(source), Some(model)) => Some(virtual_step_model(config, model, source)?),
            _ => engine.calibration.clone().map(StepModel::Calibrated),
        };
        Ok(Self {
            config,
            model,
            dtype,
            worker,
            engine,
            step_model,
            measured: Vec::new(),
            interrupted: None,
            lost: 0,
        })
    }

    /// Tokens of the model's vocabulary.
    pub fn vocab(&self) -> usize {
        self.model.map_or(1, |model| model.architecture.vocab_size)
    }

    /// Opens the engine again, where its blocks have another size.
    pub fn set_block_size(
        &mut self,
        block_size: usize,
        observer: &mut dyn Observer,
    ) -> Result<(), ServeError> {
        if self.config.virtual_source.is_none() && self.engine.scheduler.block_size != block_size {
            self.engine = self.worker.open(Some(block_size), observer)?;
            self.step_model = self.engine.calibration.clone().map(StepModel::Calibrated);
        }
        Ok(())
    }

    /// Measures a point. One that costs a worker is measured once more, and then given up.
    pub fn measure(&mut self, spec: &PointSpec, observer: &mut dyn Observer) -> Result<Point, ServeError> {
        let mut spec = spec.clone();
        self.settle(&mut spec);
        if spec.is_remote {
            // The server's cache keeps what the points before left there.
            spec.prompt_set = self.measured.len() as u64;
        }
        let (plan, measured) = spec.plan()?;
        let blank = spec.without_result(&plan, &measured);
        let (label, source) = (spec.label.clone(), spec.source.clone());
        let (key, longest) = (PointKey::of(self.measured.len(), &spec), self.longest_step(&spec));
        let request = ServeRequest::Measure(Box::new(PointRequest { key, spec, longest }));
        observer.stage(&label);
        let mut repeated = false;
        let mut point = loop {
            let response = self.worker.execute(&request, observer).inspect_err(|error| {
                if let ServeError::Worker(WorkerError::Interrupted { executing: true, .. }) = error {
                    self.interrupted = Some(blank.clone());
                }
            })?;
            let (reason, point) = match response {
                ServeResponse::Measured { point: Some(point), fault: None } => break *point,
                ServeResponse::Measured { point, fault: Some(fault) } => {
                    if !self.worker.worker.can_restart() {
                        break *point.ok_or(ServeError::Refused { reason: fault })?;
                    }
                    (Cause::WorkerLost { detail: format!("{fault} (while measuring {label})") }, point)
                }
                ServeResponse::Lost { reason, .. } => (reason, None),
                _ => {
                    let doing = format!("measuring {label}");
                    return Err(WorkerError::UnexpectedResponse { doing }.into());
                }
            };
            self.worker.consecutive_failures = 0;
            if repeated {
                self.lost += 1;
                let mut point = point.map_or(blank, |point| *point);
                point.not_run = point.result.is_none().then_some(reason);
                break point;
            }
            repeated = true;
            self.worker.warnings.push(format!("{label}: {reason}; the point was repeated"));
        };
        self.worker.consecutive_failures = 0;
        if let Some(result) = point.result.as_mut() {
            result.check_device(self.engine.environment.gpu.as_ref());
            let sent = result.warmup_requests + result.measured + result.cooldown_requests;
            self.warn_of_repeated_prompts(&source, sent);
        }
        self.measured.push(point.clone());
        Ok(point)
    }

    /// Recorded prompts are the same in every point, and a server's prefix cache has them from the point before.
    fn warn_of_repeated_prompts(&mut self, source: &TrafficSource, sent: usize) {
        let (TrafficSource::Dataset(Some(dataset)), Some(server)) = (source, &self.config.server) else {
            return;
        };
        let kept = !self.measured.is_empty() && server.cache_salt.is_none();
        if sent > dataset.prompts.len() || kept {
            let prompts = counted(dataset.prompts.len(), "prompt");
            let warning = format!(
                "the {prompts} of this dataset are sent more than once: a server with a prefix cache has computed them already (more prompts, \
                 or --cache-salt, which keeps points apart)"
            );
            if !self.worker.warnings.contains(&warning) {
                self.worker.warnings.push(warning);
            }
        }
    }

    /// Why the engine was timed more than once for the same rates, if it was.
    pub fn timed_anew_after(&self) -> Option<&'static str> {
        self.worker.worker.reopened_after().filter(|_| self.engine.calibration.is_some())
    }

    /// The point that the configuration describes.
    pub fn spec(&self, label: &str, offered: Offered, seed: u64) -> PointSpec {
        let config = self.config;
        let asked = match (offered, config.duration) {
            (Offered::Rate(rate), Some(duration)) => requests_within(duration, rate),
            _ => config.requests,
        };
        let requests = match &config.source {
            TrafficSource::Workload(_) | TrafficSource::Dataset(_) => asked,
            // A short trace is not spent on warming up.
            TrafficSource::Trace(trace, _) => asked.min(trace.requests.len()),
        };
        let goes_on = config.max_requests > config.requests;
        PointSpec {
            label: label.to_owned(),
            source: config.source.clone(),
            offered,
            arrivals: config.arrivals,
            burst: config.burst,
            requests,
            max_requests: if goes_on { config.max_requests } else { requests },
            warmup: config.warmup.unwrap_or_else(|| (requests / 10).clamp(4, 100)),
            settles: config.server.is_some() && config.warmup.is_none(),
            scheduler: self.engine.scheduler.clone(),
            sampling: Sampling { seed, ..config.sampling },
            stop_at_eos: config.stop_at_eos,
            seed,
            prompt_set: 0,
            cold: false,
            slo: config.slo.clone(),
            time_limit: config.time_limit_s.map(Nanos::from_seconds),
            adapters: self.engine.lora.as_ref().map(|(_, mix)| mix.clone()),
            constrained: self.engine.structured.as_ref().map(|s| s.share),
            is_remote: config.server.is_some(),
        }
    }

    /// What the longest step of a point should take: all that a step may prefill, beside as many sequences as there may be with as much
    /// cached as there is room for.
    fn longest_step(&self, spec: &PointSpec) -> Option<Nanos> {
        let scheduler = &spec.scheduler;
        let room = scheduler.num_blocks.saturating_mul(scheduler.block_size);
        let cached = (room / scheduler.max_num_seqs.max(1)).min(scheduler.max_model_len);
        let decodes = std::iter::repeat_n(RaggedPart::new(cached, 1), scheduler.max_num_seqs);
        let prompt = RaggedPart::new(0, scheduler.max_num_batched_tokens.min(room));
        self.step_model.as_ref().map(|model| model.step(decodes.chain([prompt])))
    }

    /// Lengthens a warm-up that would end before the system is as full as the load makes it, where nothing else was asked for: twice the
    /// requests that are in the system, in an open loop by the virtual clock.
    fn settle(&self, spec: &mut PointSpec) {
        if self.config.warmup.is_some() {
            return;
        }
        let sequences = spec.scheduler.max_num_seqs.min(MAX_TRIAL_SEQS);
        let (wanted, most) = match (spec.offered, &self.step_model) {
            (Offered::Concurrency(concurrency), _) => (2 * concurrency, usize::MAX),
            (Offered::Rate(_), Some(model)) => {
                (whole_count((2.0 * self.inside(model, spec, sequences)).ceil()), 4 * sequences)
            }
            _ => return,
        };
        let spare = match &spec.source {
            TrafficSource::Workload(_) | TrafficSource::Dataset(_) => most,
            TrafficSource::Trace(trace, _) => trace.requests.len().saturating_sub(spec.requests).min(most),
        };
        spec.warmup = spec.warmup.max(wanted.min(spare));
    }

    /// How many requests the virtual clock finds in the system, on average.
    fn inside(&self, model: &StepModel, spec: &PointSpec, sequences: usize) -> f64 {
        let trial = PointSpec {
            requests: (2 * sequences).max(50),
            max_requests: 0,
            warmup: 4 * sequences,
            slo: Slo::default(),
            time_limit: None,
            ..spec.clone()
        };
        let mut engine = ServingEngine::Virtual { model: model.clone(), vocab: self.vocab() };
        // A trace may be too short for a trial; then the usual tenth has to do.
        let Ok(point) = engine.measure(&trial, &mut |_| {}) else { return 0.0 };
        point.result.map_or(0.0, |r| r.mean_running + r.mean_waiting)
    }
}

#[cfg(test)]
mod tests;
