//! One point of load: from what was asked to a result.
//!
//! Enters: a [`PointSpec`] and an [`Engine`]. Leaves: a [`Point`]. A sweep, a search and a matrix are lists of points.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::adapters::{AdapterCost, AdapterMix};
use super::arrivals::{Arrivals, Burst};
use super::calibrate::calibrate;
use super::clock::HostClock;
use super::execute::{PredictedExecutor, SessionExecutor};
use super::latency::{ServeResult, summarise};
use super::residuals::Residuals;
use super::run::{Loop, Progress, Run, RunFault, Traffic, run};
use super::sampler::{Sampler, Sampling};
use super::scheduler::{Reject, Scheduler, SchedulerConfig};
use super::slo::Slo;
use super::step_model::StepModel;
use super::structured::{Compiled, ConstraintCounts, Constraints};
use super::text::Text;
use super::trace::Trace;
use super::workload::{Planned, Workload, ideal_hit_rate, mix, plan_trace, without_sharing};
use crate::engine::scripted::VirtualClock;
use crate::engine::{EngineError, Session};
use crate::measure::telemetry::{HostTelemetry, Telemetry};
use crate::model::tokenizer::Tokenizer;
use crate::units::Nanos;

/// How much is offered.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Offered {
    /// Requests per second, whatever the system does.
    Rate(f64),
    /// All at once.
    AtOnce,
    /// So many in the system at any time: a closed loop.
    Concurrency(usize),
    /// As recorded.
    AsRecorded,
}

/// What is sent.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[expect(clippy::large_enum_variant, reason = "there is one to a point, and nobody keeps many")]
pub enum Source {
    Workload(Workload),
    /// Times are multiplied by the factor, where no rate is asked for.
    Trace(#[serde(serialize_with = "whole")] std::rc::Rc<Trace>, f64),
}

/// A trace as what it holds.
fn whole<S: serde::Serializer>(trace: &std::rc::Rc<Trace>, serializer: S) -> Result<S::Ok, S::Error> {
    Trace::serialize(trace, serializer)
}

/// What to measure.
#[derive(Debug, Clone, Serialize)]
pub struct PointSpec {
    pub label: String,
    pub source: Source,
    pub offered: Offered,
    pub arrivals: Arrivals,
    pub burst: Option<Burst>,
    /// Requests whose times count.
    pub requests: usize,
    /// Requests in front of them.
    pub warmup: usize,
    pub scheduler: SchedulerConfig,
    pub sampling: Sampling,
    /// End an output at a stop token instead of at its planned length.
    pub stop_at_eos: bool,
    pub seed: u64,
    /// Nothing is shared between prompts: the cold twin.
    pub cold: bool,
    pub slo: Slo,
    pub time_limit: Option<Nanos>,
    /// The adapters that requests have; `None` for none.
    pub adapters: Option<AdapterMix>,
    /// Share of the requests whose outputs are held to the engine's grammar.
    pub constrained: Option<f64>,
}

/// What holding outputs to a grammar took.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StructuredCost {
    pub grammar: String,
    /// Share of the requests that was asked for.
    pub share: f64,
    /// Outputs begun under the grammar, and those that came to its end; others were cut at their planned length or not done.
    pub started: usize,
    pub complete: usize,
    /// Tokens chosen under a mask.
    pub tokens: usize,
    /// Tokens that a mask allowed, on average.
    pub mean_allowed: Option<f64>,
    /// Time of finding and of applying a mask, per token chosen under one.
    pub mask_ns_per_token: Option<f64>,
    pub mask_apply_ns_per_token: Option<f64>,
}

impl StructuredCost {
    fn of(grammar: &Compiled, share: f64, counts: ConstraintCounts, result: &ServeResult) -> Self {
        let per_token = |sum: f64| (counts.tokens > 0).then(|| sum / counts.tokens as f64);
        Self {
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
}

/// A point and what it gave.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Point {
    pub label: String,
    pub offered: Offered,
    /// Absent where a trace gives the gaps, scaled to the rate that was asked for.
    pub arrivals: Option<Arrivals>,
    pub seed: u64,
    pub cold: bool,
    pub mean_prompt_tokens: f64,
    pub mean_output_tokens: f64,
    pub scheduler: SchedulerConfig,
    /// Of a cache without an end.
    pub ideal_hit_rate: Option<f64>,
    /// Null for a point that was not run; the reason says why.
    pub result: Option<ServeResult>,
    pub not_run: Option<String>,
    /// The same point on a virtual clock, with step times taken from this engine just before and just after.
    pub predicted: Option<ServeResult>,
    #[serde(default)]
    pub adapters: Option<AdapterCost>,
    #[serde(default)]
    pub structured: Option<StructuredCost>,
    /// By which factor those steps were longer after the point than before: what the machine itself did meanwhile.
    #[serde(default)]
    pub drift: Option<f64>,
    /// The steps of the run against the model of them that the prediction goes by.
    #[serde(default)]
    pub residuals: Option<Residuals>,
}

/// What runs the steps.
pub enum Engine {
    /// A session, and a model of its steps to predict with.
    Live {
        session: Box<dyn Session>,
        tokenizer: Option<Box<Tokenizer>>,
        model: Option<StepModel>,
        grammar: Option<Box<Compiled>>,
        /// What the device suffered while a point was measured, after which it is not to be trusted.
        fault: Option<String>,
    },
    /// A model of steps alone.
    Virtual { model: StepModel, vocab: usize },
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Live { .. } => "Live",
            Self::Virtual { .. } => "Virtual",
        })
    }
}

/// Why a point could not be measured at all.
#[derive(Debug, thiserror::Error)]
pub enum PointError {
    #[error(
        "the KV pool of {blocks} blocks of {block_size} positions is too small: a request of {prompt} prompt and {output} output tokens \
         needs {needed} blocks; give more (--num-gpu-blocks-override, --gpu-memory-utilization) or shorter requests"
    )]
    PoolTooSmall { blocks: usize, block_size: usize, prompt: usize, output: usize, needed: usize },
    #[error(
        "no request can be served: {reason} (the first has {prompt} prompt and {output} output tokens, the model's context is \
         {context}, a step takes {budget} tokens)"
    )]
    NothingFits { reason: Reject, prompt: usize, output: usize, context: usize, budget: usize },
    #[error("the trace has {have} requests, fewer than the {warmup} that warm up and one more")]
    TraceTooShort { have: usize, warmup: usize },
    #[error(
        "{clause} needs at least {needed} requests to be more than the largest value by another name, and {requests} are measured; \
         raise --requests or choose a lower percentile"
    )]
    TooFewForSlo { clause: String, needed: usize, requests: usize },
    #[error(
        "the prompts together have {tokens} tokens, above the {limit} that are prepared in memory; ask for fewer --requests"
    )]
    TooMuch { tokens: usize, limit: usize },
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Fault(#[from] RunFault),
}

/// Words below which prompts would be too much alike.
const ENOUGH_WORDS: usize = 32;
/// Prompt tokens prepared in memory for a real run, 2 GB of them.
const MAX_PREPARED: usize = 500_000_000;

impl PointSpec {
    /// Requests behind the measured ones, to keep the system loaded until those are done.
    fn cooldown(&self) -> usize {
        match self.offered {
            Offered::AtOnce => 0,
            _ => self.requests / 2 + 16,
        }
    }

    fn warmup(&self) -> usize {
        if self.offered == Offered::AtOnce { 0 } else { self.warmup }
    }

    /// Plans every request, and says which of them count.
    ///
    /// # Errors
    /// When a trace has too few.
    pub fn plan(&self) -> Result<(Vec<Planned>, std::ops::Range<usize>), PointError> {
        let warmup = self.warmup();
        let count = warmup + self.requests + self.cooldown();
        let rate = if let Offered::Rate(rate) = self.offered { Some(rate) } else { None };
        let (mut plan, recorded) = match &self.source {
            Source::Workload(workload) => {
                (workload.plan(rate, self.arrivals, self.burst, count, self.seed), usize::MAX)
            }
            Source::Trace(trace, factor) => {
                let have = trace.requests.len();
                if have <= warmup {
                    return Err(PointError::TraceTooShort { have, warmup });
                }
                // The mean rate asked for, over the requests that count: a trace is not as busy everywhere.
                let (first, last) = (warmup, (warmup + self.requests).min(have) - 1);
                let at = |index: usize| trace.requests[index].arrival.seconds();
                let span = at(last) - at(first);
                let factor = match rate {
                    Some(rate) if span > 0.0 => (last - first) as f64 / rate / span,
                    _ => *factor,
                };
                let mut plan = plan_trace(trace, factor, self.seed);
                plan.truncate(count);
                (plan, have)
            }
        };
        if matches!(self.offered, Offered::AtOnce | Offered::Concurrency(_)) {
            for request in &mut plan {
                request.arrival = Nanos(0.0);
            }
        }
        if self.cold {
            plan = without_sharing(&plan, mix(self.seed, 7));
        }
        if let Some(adapters) = &self.adapters {
            adapters.assign(&mut plan, self.seed);
        }
        if let Some(share) = self.constrained {
            for (index, request) in plan.iter_mut().enumerate() {
                // 53 bits are what a float between 0 and 1 holds.
                let drawn = (mix(mix(self.seed, 21), index as u64) >> 11) as f64 / (1_u64 << 53) as f64;
                request.constrained = drawn < share;
            }
        }
        let end = (warmup + self.requests).min(recorded).min(plan.len());
        Ok((plan, warmup..end))
    }

    /// Checks what can be checked before anything runs.
    fn check(&self, plan: &[Planned], measured: usize) -> Result<(), PointError> {
        let knobs = &self.scheduler;
        let of = |p: &Planned| Scheduler::check(knobs, p.prompt_len(), p.output_len);
        if let Some(large) = plan.iter().find(|p| of(p) == Err(Reject::ExceedsPool)) {
            let (prompt, output) = (large.prompt_len(), large.output_len);
            return Err(PointError::PoolTooSmall {
                blocks: knobs.num_blocks,
                block_size: knobs.block_size,
                prompt,
                output,
                needed: (prompt + output - 1).div_ceil(knobs.block_size),
            });
        }
        if let Some(Err(reason)) = plan.first().map(of)
            && plan.iter().all(|p| of(p).is_err())
        {
            return Err(PointError::NothingFits {
                reason,
                prompt: plan[0].prompt_len(),
                output: plan[0].output_len,
                context: knobs.max_model_len,
                budget: knobs.max_num_batched_tokens,
            });
        }
        for clause in &self.slo.clauses {
            let needed = crate::stats::needed(clause.percentile);
            if measured < needed {
                return Err(PointError::TooFewForSlo {
                    clause: clause.to_string(),
                    needed,
                    requests: measured,
                });
            }
        }
        Ok(())
    }

    /// What a cache without an end would find, over the requests that ran: what is rejected or never sent is looked up nowhere.
    fn ideal_hit_rate(&self, plan: &[Planned], run: &Run) -> Option<f64> {
        let ran = plan.iter().zip(&run.records).filter(|(_, record)| record.started.is_some());
        let rate = || ideal_hit_rate(ran.map(|(planned, _)| planned), self.scheduler.block_size);
        self.scheduler.enable_prefix_caching.then(rate).flatten()
    }

    /// Blocks that the plan could ever fill, prefixes counted as often as they are sent.
    fn blocks_of(&self, plan: &[Planned]) -> usize {
        let knobs = &self.scheduler;
        let of = |p: &Planned| (p.prompt_len() + p.output_len).div_ceil(knobs.block_size);
        plan.iter().map(of).sum::<usize>().min(knobs.num_blocks)
    }

    fn traffic<'a>(
        &self,
        plan: &'a [Planned],
        measured: std::ops::Range<usize>,
        vocab: usize,
        eos: &[u32],
    ) -> Traffic<'a> {
        Traffic {
            plan,
            kind: match self.offered {
                Offered::Concurrency(concurrency) => Loop::Closed { concurrency },
                _ => Loop::Open,
            },
            measured,
            vocab,
            alphabet: Vec::new(),
            stop_tokens: if self.stop_at_eos { eos.to_vec() } else { Vec::new() },
            constrained_stops: Vec::new(),
            time_limit: self.time_limit,
            keep_outputs: false,
        }
    }

    /// What one more adapter adds to a step.
    fn adapter_time(&self) -> Nanos {
        self.adapters.as_ref().map_or(Nanos(0.0), |adapters| adapters.time_each)
    }

    /// The point, before it is run. Its means are those of the requests that count.
    #[must_use]
    pub fn blank(&self, plan: &[Planned], measured: &std::ops::Range<usize>) -> Point {
        let counted = &plan[measured.clone()];
        let mean = |of: &dyn Fn(&Planned) -> usize| {
            counted.iter().map(|p| of(p) as f64).sum::<f64>() / counted.len().max(1) as f64
        };
        Point {
            label: self.label.clone(),
            offered: self.offered,
            arrivals: matches!(self.source, Source::Workload(_)).then_some(self.arrivals),
            seed: self.seed,
            cold: self.cold,
            mean_prompt_tokens: mean(&Planned::prompt_len),
            mean_output_tokens: mean(&|p| p.output_len),
            scheduler: self.scheduler.clone(),
            ideal_hit_rate: None,
            result: None,
            not_run: None,
            predicted: None,
            adapters: None,
            structured: None,
            drift: None,
            residuals: None,
        }
    }
}

impl Engine {
    /// Why nothing that the device does from here on can be trusted.
    #[must_use]
    pub fn fault(&self) -> Option<&str> {
        match self {
            Self::Live { fault, .. } => fault.as_deref(),
            Self::Virtual { .. } => None,
        }
    }

    /// Measures a point; where the engine is real and its steps were timed, the virtual clock's answer stands beside it.
    ///
    /// # Errors
    /// When the point cannot be run at all. Rejected requests and a failing engine are results.
    pub fn measure(
        &mut self,
        spec: &PointSpec,
        observe: &mut dyn FnMut(Progress),
    ) -> Result<Point, PointError> {
        let (plan, measured) = spec.plan()?;
        spec.check(&plan, measured.len())?;
        let mut point = spec.blank(&plan, &measured);
        match self {
            Self::Virtual { model, vocab } => {
                let traffic = spec.traffic(&plan, measured, *vocab, &[]);
                let run = simulate(model, spec, &traffic, observe)?;
                point.ideal_hit_rate = spec.ideal_hit_rate(&plan, &run);
                point.result = Some(summarise(&run, &traffic, &spec.slo));
            }
            Self::Live { session, tokenizer, model, grammar, fault } => {
                let tokens = plan.iter().map(Planned::prompt_len).sum();
                if tokens > MAX_PREPARED {
                    return Err(PointError::TooMuch { tokens, limit: MAX_PREPARED });
                }
                // A prompt of tokens that the tokenizer does not have would be no text.
                let known = tokenizer.as_ref().map_or(usize::MAX, |t| t.vocab_size().max(1));
                let vocab = session.architecture().vocab_size.min(known);
                let eos = session.architecture().eos_tokens.clone();
                let mut traffic = spec.traffic(&plan, measured, vocab, &eos);
                // Prompts of words encode to as many tokens as were asked for.
                traffic.alphabet = tokenizer.as_ref().map_or_else(Vec::new, |t| t.words());
                if traffic.alphabet.len() < ENOUGH_WORDS {
                    traffic.alphabet.clear();
                }
                let grammar = grammar.as_deref().filter(|_| spec.constrained.is_some());
                traffic.constrained_stops = grammar.map_or_else(Vec::new, |g| g.ends().to_vec());
                let text = tokenizer
                    .as_ref()
                    .map(|t| Text::new(t, plan.iter().map(|p| traffic.prompt(p))))
                    .transpose()
                    .map_err(RunFault::from)?;
                let constraints = grammar
                    .map(|g| Constraints::new(g, plan.iter().map(|request| request.constrained).collect()));
                let mut suffer = |error: EngineError| {
                    if error.taints() {
                        *fault = Some(error.to_string());
                    }
                    error
                };
                session.warm_pool(spec.blocks_of(&plan)).map_err(&mut suffer)?;
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
                let run = run(&traffic, config, &mut executor, &mut clock, text, &mut note)?;
                host.after_block();
                let mut result = summarise(&run, &traffic, &spec.slo);
                let tainted = run.tainted;
                result.holds_outputs(tainted || run.steps.is_empty() || executor.last_logits_are_numbers());
                point.ideal_hit_rate = spec.ideal_hit_rate(&plan, &run);
                result.foreign_cores = host.load(true).and_then(|load| load.foreign_cores);
                let share = spec.constrained.unwrap_or_default();
                let counts = grammar.zip(executor.constraint_counts());
                point.structured = counts.map(|(g, counts)| StructuredCost::of(g, share, counts, &result));
                point.result = Some(result);
                // Where an output ends is the grammar's and the model's to say, so nothing is predicted of constrained ones.
                let predictable = grammar.is_none() && !tainted;
                if let Some(StepModel::Calibrated(before)) = model.as_mut().filter(|_| predictable) {
                    let after = calibrate(session.as_mut(), &spec.scheduler, &clock, &mut || {
                        last.iter().copied().for_each(&mut *observe);
                    })
                    .map_err(&mut suffer)?;
                    let meanwhile = before.halfway(&after);
                    point.residuals = Residuals::of(&run.steps, &meanwhile, spec.adapter_time());
                    let meanwhile = StepModel::Calibrated(meanwhile);
                    let predicted = simulate(&meanwhile, spec, &traffic, &mut |_| {})?;
                    let predicted = summarise(&predicted, &traffic, &spec.slo);
                    // What the prediction looked like over time, and request by request, nobody compares.
                    point.predicted = Some(ServeResult { timeline: None, requests: None, ..predicted });
                    point.drift = before.drift(&after);
                    *before = after;
                }
                if tainted {
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

/// The point on a virtual clock.
fn simulate(
    model: &StepModel,
    spec: &PointSpec,
    traffic: &Traffic<'_>,
    observe: &mut dyn FnMut(Progress),
) -> Result<Run, PointError> {
    let clock = VirtualClock::default();
    let mut executor = PredictedExecutor::new(model.clone(), &clock).with_adapter_time(spec.adapter_time());
    Ok(run(traffic, spec.scheduler.clone(), &mut executor, &mut clock.clone(), None, observe)?)
}
