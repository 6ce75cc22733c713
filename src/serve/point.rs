//! One point of load: from what was asked to a result.
//!
//! Enters: a [`PointSpec`] and a [`ServingEngine`]. Leaves: a [`Point`]. A sweep, a search and a matrix are lists of points.

use super::calibrate::calibrate;
use super::detokenizer::TextPipeline;
use super::executor::SessionExecutor;
use super::structured_output::{CompiledGrammar, ConstraintCounts, Constraints};
use crate::engine::{EngineError, Session};
use crate::machine::environment::cores;
use crate::machine::telemetry::{HostTelemetry, Telemetry};
use crate::serve::clock::HostClock;
use crate::weights::tokenizer::Tokenizer;
use hbmark_client::point::Server;
use hbmark_core::result::Limits;
use hbmark_core::result::serving::{Point, ServeResult, StructuredCost};
use hbmark_traffic::latency::summarise;
use hbmark_traffic::point::{PlanError, PointSpec, simulate};
use hbmark_traffic::residuals::residuals;
use hbmark_traffic::sampler::Sampler;
use hbmark_traffic::serving_loop::{Progress, RunError, TextPath, run};
use hbmark_traffic::step_model::StepModel;
use hbmark_traffic::workload::PlannedRequest;

/// The share of the time that a client may wait for a processor and count as never kept from one.
const UNHINDERED: f64 = 0.02;

/// What other processes did beside the client of a server elsewhere. Work that never kept the client from a processor is in no latency.
fn note_foreign_load(point: &mut Point, host: &mut HostTelemetry) {
    let waited = point.live.as_ref().and_then(|live| live.client_cpu_wait);
    if let Some(result) = point.result.as_mut() {
        result.foreign_cores = host.load(true).and_then(|load| load.foreign_cores);
        let unhindered = waited.is_some_and(|share| share <= UNHINDERED);
        result.foreign_cores_allowed = unhindered.then(|| cores() as f64);
    }
}

/// What holding outputs to a grammar took.
fn structured_cost(
    grammar: &CompiledGrammar,
    share: f64,
    counts: ConstraintCounts,
    result: &ServeResult,
) -> StructuredCost {
    let per_token = |sum: f64| (counts.tokens > 0).then(|| sum / counts.tokens as f64);
    StructuredCost {
        grammar: grammar.grammar().to_string(),
        share,
        started: counts.started,
        complete: counts.complete,
        tokens: counts.tokens,
        mean_allowed: per_token(counts.allowed as f64),
        mask_ns_per_token: per_token(result.breakdown.mask_ns),
        mask_apply_ns_per_token: per_token(result.breakdown.mask_apply_ns),
    }
}

/// What runs the steps.
pub enum ServingEngine {
    /// A session, and a model of its steps to predict with.
    Engine {
        session: Box<dyn Session>,
        tokenizer: Option<Box<Tokenizer>>,
        model: Option<StepModel>,
        grammar: Option<Box<CompiledGrammar>>,
        /// A fault of the device while a point was measured, after which it is not to be trusted.
        fault: Option<String>,
    },
    /// A model of steps alone.
    Virtual { model: StepModel, vocab: usize },
    /// A server, over HTTP.
    Server(Box<Server>),
}

impl std::fmt::Debug for ServingEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Engine { .. } => "Engine",
            Self::Virtual { .. } => "Virtual",
            Self::Server(_) => "Server",
        })
    }
}

/// Why a point could not be measured at all.
#[derive(Debug, thiserror::Error)]
pub enum PointError {
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(
        "the prompts together have {tokens} tokens, above the {limit} that are prepared in memory; ask for fewer --requests"
    )]
    TooMuch { tokens: usize, limit: usize },
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Fault(#[from] RunError),
    #[error(transparent)]
    Client(#[from] hbmark_client::point::MeasureError),
}

/// Words below which prompts would be too much alike.
const MIN_WORDS: usize = 32;
/// Prompt tokens prepared in memory for a real run, 2 GB of them.
const MAX_PREPARED: usize = 500_000_000;

impl ServingEngine {
    /// Why nothing that the device does from here on can be trusted.
    pub fn fault(&self) -> Option<&str> {
        match self {
            Self::Engine { fault, .. } => fault.as_deref(),
            Self::Virtual { .. } | Self::Server(_) => None,
        }
    }

    /// Measures a point; where the engine is real and its steps were timed, with the prediction of the virtual clock beside it.
    pub fn measure(
        &mut self,
        spec: &PointSpec,
        observe: &mut dyn FnMut(Progress),
    ) -> Result<Point, PointError> {
        let (plan, measured) = spec.plan()?;
        spec.check(&plan, &measured)?;
        let mut point = spec.without_result(&plan, &measured);
        match self {
            Self::Virtual { model, vocab } => {
                let traffic = spec.traffic(&plan, measured, *vocab, &[]);
                let run = simulate(model, spec, &traffic, observe)?;
                point.ideal_hit_rate = spec.ideal_hit_rate(&plan, &run);
                point.result = Some(summarise(&run, &traffic, &spec.slo));
            }
            Self::Server(server) => {
                let mut host = HostTelemetry::new();
                host.before_block();
                point = server.measure(spec, observe)?;
                host.after_block();
                // The work of a server on this machine is no other's.
                if !server.endpoint.is_local() {
                    note_foreign_load(&mut point, &mut host);
                }
            }
            Self::Engine { session, tokenizer, model, grammar, fault } => {
                let tokens = plan.iter().map(PlannedRequest::prompt_len).sum();
                if tokens > MAX_PREPARED {
                    return Err(PointError::TooMuch { tokens, limit: MAX_PREPARED });
                }
                // Tokens outside the tokenizer's vocabulary have no text.
                let known = tokenizer.as_ref().map_or(usize::MAX, |t| t.vocab_size().max(1));
                let vocab = session.architecture().vocab_size.min(known);
                let eos = session.architecture().eos_tokens.clone();
                let mut traffic = spec.traffic(&plan, measured, vocab, &eos);
                // Prompts of words encode to as many tokens as were asked for.
                traffic.prompt_vocab = tokenizer.as_ref().map_or_else(Vec::new, |t| t.words());
                if traffic.prompt_vocab.len() < MIN_WORDS {
                    traffic.prompt_vocab.clear();
                }
                let grammar = grammar.as_deref().filter(|_| spec.constrained.is_some());
                traffic.constrained_stops = grammar.map_or_else(Vec::new, |g| g.ends().to_vec());
                let mut text = tokenizer
                    .as_ref()
                    .map(|t| TextPipeline::new(t, plan.iter().map(|p| traffic.prompt(p))))
                    .transpose()
                    .map_err(|error| RunError::Text(error.into()))?;
                let constraints = grammar
                    .map(|g| Constraints::new(g, plan.iter().map(|request| request.constrained).collect()));
                let mut suffer = |error: EngineError| {
                    if error.is_sticky() {
                        *fault = Some(error.to_string());
                    }
                    error
                };
                session.preallocate_blocks(spec.blocks_of(&plan)).map_err(&mut suffer)?;
                let on_gpu = session.capabilities().on_gpu();
                let mut executor = SessionExecutor::new(session.as_mut(), Sampler::new(spec.sampling))
                    .with_constraints(constraints);
                let mut clock = HostClock::default();
                let config = spec.scheduler.clone();
                let mut host = HostTelemetry::new();
                host.before_block();
                let mut last = None;
                let mut note = |progress| {
                    last = Some(progress);
                    observe(progress);
                };
                let text = text.as_mut().map(|text| text as &mut dyn TextPath);
                let run = run(&traffic, config, &mut executor, &mut clock, text, &mut note)?;
                host.after_block();
                let mut result = summarise(&run, &traffic, &spec.slo);
                let device_unusable = run.device_unusable;
                result.check_outputs(
                    device_unusable || run.steps.is_empty() || executor.last_logits_are_finite(),
                );
                point.ideal_hit_rate = spec.ideal_hit_rate(&plan, &run);
                result.foreign_cores = host.load(true).and_then(|load| load.foreign_cores);
                result.foreign_cores_allowed = on_gpu.then(|| Limits::beside_gpu(cores()).foreign_cores);
                let share = spec.constrained.unwrap_or_default();
                let counts = grammar.zip(executor.constraint_counts());
                point.structured = counts.map(|(g, counts)| structured_cost(g, share, counts, &result));
                point.result = Some(result);
                // Grammar and model decide where an output ends, so constrained ones are not predicted.
                let predictable = grammar.is_none() && !device_unusable;
                if let Some(StepModel::Calibrated(before)) = model.as_mut().filter(|_| predictable) {
                    let after = calibrate(session.as_mut(), &spec.scheduler, &clock, &mut || {
                        last.iter().copied().for_each(&mut *observe);
                    })
                    .map_err(&mut suffer)?;
                    let meanwhile = before.halfway(&after);
                    point.residuals = residuals(&run.steps, &meanwhile, spec.adapter_time());
                    let meanwhile = StepModel::Calibrated(meanwhile);
                    let predicted = simulate(&meanwhile, spec, &traffic, &mut |_| {})?;
                    let predicted = summarise(&predicted, &traffic, &spec.slo);
                    // Only aggregates are compared with a prediction.
                    point.predicted = Some(ServeResult { timeline: None, requests: None, ..predicted });
                    point.drift = before.drift(&after);
                    *before = after;
                }
                if device_unusable {
                    fault.clone_from(&run.failure);
                }
            }
        }
        if let (Some(adapters), Some(result)) = (&spec.adapters, &point.result) {
            point.adapters = Some(adapters.cost(&plan, result));
        }
        Ok(point)
    }
}
