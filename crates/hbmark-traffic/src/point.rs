//! One point of load: what to send and how to schedule it.
//!
//! Enters: a [`PointSpec`]. Leaves: planned requests, and their simulation on a virtual clock.

use serde::{Deserialize, Serialize};

use crate::adapters::AdapterMix;
use crate::arrivals::Burst;
use crate::clock::VirtualClock;
use crate::dataset::Dataset;
use crate::executor::PredictedExecutor;
use crate::sampler::Sampling;
use crate::scheduler::{RejectReason, Scheduler};
use crate::serving_loop::{Extension, LoadMode, Progress, Record, Run, RunError, Traffic, run};
use crate::stability::MIN_OFFERED;
use crate::step_model::StepModel;
use crate::trace::Trace;
use crate::workload::{PlannedRequest, Workload, ideal_hit_rate, plan_trace, splitmix64, without_sharing};
use hbmark_core::result::serving::{Arrivals, Offered, Point, SchedulerConfig, Slo};
use hbmark_core::units::Nanos;

/// Why a point cannot be planned.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    #[error(
        "the KV pool of {blocks} blocks of {block_size} positions is too small: a request of {prompt} prompt and {output} output tokens \
         needs {needed} blocks; give more (--num-gpu-blocks-override, --gpu-memory-utilization) or shorter requests"
    )]
    PoolTooSmall { blocks: usize, block_size: usize, prompt: usize, output: usize, needed: usize },
    #[error(
        "no request can be served: {reason} (the first has {prompt} prompt and {output} output tokens, the model's context is \
         {context}, a step takes {budget} tokens)"
    )]
    NothingFits { reason: RejectReason, prompt: usize, output: usize, context: usize, budget: usize },
    #[error(
        "the trace has {have} requests, fewer than the {warmup} that warm up and one more; give a longer one, or fewer --warmup-requests"
    )]
    TraceTooShort { have: usize, warmup: usize },
    #[error("the prompts of the dataset were not read again")]
    NoDataset,
    #[error(
        "{clause} needs at least {needed} requests, with fewer it is as good as the largest value, and {requests} are measured; \
         raise --requests{more} or choose a lower percentile"
    )]
    TooFewForSlo { clause: String, needed: usize, requests: usize, more: &'static str },
    #[error(
        "a search needs at least {needed} measured requests at each rate, to see whether the queue grows, and {requests} are measured; \
         raise --requests{more}"
    )]
    TooFewForTrend { needed: usize, requests: usize, more: &'static str },
}

/// The source of requests.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(clippy::large_enum_variant, reason = "one per point, never many at once")]
pub enum TrafficSource {
    Workload(Workload),
    /// Times are multiplied by the factor, where no rate is asked for. The trace itself is not serialised.
    Trace(#[serde(skip)] std::rc::Rc<Trace>, f64),
    /// Recorded prompts, which are not serialised either.
    Dataset(#[serde(skip)] Option<std::rc::Rc<Dataset>>),
}

/// Requests behind the measured ones, for each place of a closed loop.
const COOLDOWN: usize = 16;
/// Requests of which a mean is taken.
const SAMPLE: usize = 1_000;

impl TrafficSource {
    /// Positions of prompt and output together, on average over requests; of a trace over all it has.
    pub fn mean_positions(&self, seed: u64) -> Option<usize> {
        let plan = match self {
            Self::Workload(workload) => workload.plan(None, Arrivals::Poisson, None, SAMPLE, seed),
            Self::Dataset(dataset) => dataset.as_ref()?.plan(None, Arrivals::Poisson, None, SAMPLE, seed),
            Self::Trace(trace, factor) => plan_trace(trace, *factor, seed),
        };
        let all: usize = plan.iter().map(|request| request.prompt_len() + request.output_len).sum();
        (!plan.is_empty()).then(|| all.div_ceil(plan.len()))
    }
}

/// What to measure.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "each may be with each of the others")]
pub struct PointSpec {
    pub label: String,
    pub source: TrafficSource,
    pub offered: Offered,
    pub arrivals: Arrivals,
    pub burst: Option<Burst>,
    /// Requests whose times count.
    pub requests: usize,
    /// As many may count where fewer decide nothing; no more than `requests` for exactly as many.
    pub max_requests: usize,
    /// Warm-up requests before them.
    pub warmup: usize,
    /// More of them where the system is not yet full by then: of a live server nobody knows before how long a request stays.
    pub settles: bool,
    pub scheduler: SchedulerConfig,
    pub sampling: Sampling,
    /// End an output at a stop token instead of at its planned length.
    pub stop_at_eos: bool,
    pub seed: u64,
    /// Above 0: prompts of other tokens than those of 0, with the same lengths, and as much shared among them. Recorded texts are what they are.
    pub prompt_set: u64,
    /// Share nothing between prompts: the baseline without prefix reuse.
    pub cold: bool,
    pub slo: Slo,
    pub time_limit: Option<Nanos>,
    /// The adapters of the requests; `None` for none.
    pub adapters: Option<AdapterMix>,
    /// Share of the requests whose outputs are constrained by the engine's grammar.
    pub constrained: Option<f64>,
    /// Another program schedules the requests: a live server. The scheduler's settings above are then no limit of anything.
    pub is_remote: bool,
}

impl PointSpec {
    /// Requests after the measured ones, to keep the system loaded until those are done. They are sent only until then.
    fn cooldown(&self) -> usize {
        match self.offered {
            Offered::AtOnce => 0,
            // While the longest output is made, each of the others' places is taken by many of mean length.
            Offered::Concurrency(places) => COOLDOWN * places + 16,
            Offered::Rate(_) | Offered::AsRecorded => (4 * self.requests).max(self.most() / 2 + 16),
        }
    }

    /// Whether there are always more requests, at the same rate.
    fn goes_on(&self) -> bool {
        matches!(self.source, TrafficSource::Workload(_) | TrafficSource::Dataset(_))
            && matches!(self.offered, Offered::Rate(_))
    }

    /// The most requests that are measured.
    fn most(&self) -> usize {
        if self.goes_on() { self.max_requests.max(self.requests) } else { self.requests }
    }

    pub fn warmup(&self) -> usize {
        if self.offered == Offered::AtOnce { 0 } else { self.warmup }
    }

    /// Plans every request, and the range of those that count.
    ///
    /// # Errors
    /// When a trace has too few.
    pub fn plan(&self) -> Result<(Vec<PlannedRequest>, std::ops::Range<usize>), PlanError> {
        let warmup = self.warmup();
        let count = warmup + self.most() + self.cooldown();
        let rate = if let Offered::Rate(rate) = self.offered { Some(rate) } else { None };
        let (mut plan, recorded) = match &self.source {
            TrafficSource::Workload(workload) => {
                (workload.plan(rate, self.arrivals, self.burst, count, self.seed), usize::MAX)
            }
            TrafficSource::Dataset(dataset) => {
                let dataset = dataset.as_ref().ok_or(PlanError::NoDataset)?;
                (dataset.plan(rate, self.arrivals, self.burst, count, self.seed), usize::MAX)
            }
            TrafficSource::Trace(trace, factor) => {
                let have = trace.requests.len();
                if have <= warmup {
                    return Err(PlanError::TraceTooShort { have, warmup });
                }
                // The given mean rate holds over the requests that count: the rate of a trace varies.
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
        if self.prompt_set > 0 {
            for segment in plan.iter_mut().flat_map(|request| &mut request.prompt) {
                segment.source = splitmix64(segment.source, self.prompt_set);
            }
        }
        if self.cold {
            plan = without_sharing(&plan, splitmix64(self.seed, 7));
        }
        if let Some(adapters) = &self.adapters {
            adapters.assign(&mut plan, self.seed);
        }
        if let Some(share) = self.constrained {
            for (index, request) in plan.iter_mut().enumerate() {
                // A float in [0, 1) has 53 bits.
                let drawn =
                    (splitmix64(splitmix64(self.seed, 21), index as u64) >> 11) as f64 / (1_u64 << 53) as f64;
                request.constrained = drawn < share;
            }
        }
        let end = (warmup + self.requests).min(recorded).min(plan.len());
        Ok((plan, warmup..end))
    }

    /// Checks what can be checked before anything runs.
    ///
    /// # Errors
    /// When no request can be served, or there are too few for an objective.
    pub fn check(&self, plan: &[PlannedRequest], measured: &std::ops::Range<usize>) -> Result<(), PlanError> {
        let scheduler = &self.scheduler;
        let of = |p: &PlannedRequest| Scheduler::check(scheduler, p.prompt_len(), p.output_len);
        if let Some(large) = plan.iter().find(|p| of(p) == Err(RejectReason::ExceedsPool)) {
            let (prompt, output) = (large.prompt_len(), large.output_len);
            return Err(PlanError::PoolTooSmall {
                blocks: scheduler.num_blocks,
                block_size: scheduler.block_size,
                prompt,
                output,
                needed: (prompt + output - 1).div_ceil(scheduler.block_size),
            });
        }
        if let Some(Err(reason)) = plan.first().map(of)
            && plan.iter().all(|p| of(p).is_err())
        {
            return Err(PlanError::NothingFits {
                reason,
                prompt: plan[0].prompt_len(),
                output: plan[0].output_len,
                context: scheduler.max_model_len,
                budget: scheduler.max_num_batched_tokens,
            });
        }
        for clause in &self.slo.clauses {
            let needed = hbmark_core::stats::needed(clause.percentile);
            let requests = self.available(plan, measured);
            if requests < needed {
                let (clause, more) = (clause.to_string(), self.longer());
                return Err(PlanError::TooFewForSlo { clause, needed, requests, more });
            }
        }
        Ok(())
    }

    /// Checks that a run at a rate can show a trend of the queue: without one every rate of a search is undetermined.
    ///
    /// # Errors
    /// When there are too few requests.
    pub fn check_trend(&self) -> Result<(), PlanError> {
        let (plan, measured) = self.plan()?;
        let (needed, requests) = (MIN_OFFERED, self.available(&plan, &measured));
        if requests < needed {
            return Err(PlanError::TooFewForTrend { needed, requests, more: self.longer() });
        }
        Ok(())
    }

    /// As many requests as a trace has to measure; `None` where requests are drawn.
    pub fn recorded(&self) -> Option<usize> {
        match &self.source {
            TrafficSource::Trace(trace, _) => Some(trace.requests.len().saturating_sub(self.warmup())),
            TrafficSource::Workload(_) | TrafficSource::Dataset(_) => None,
        }
    }

    /// As many requests as can be measured: those of a trace are all there are.
    fn available(&self, plan: &[PlannedRequest], measured: &std::ops::Range<usize>) -> usize {
        measured.len().max(self.most()).min(plan.len() - measured.start)
    }

    /// What else a run with more requests needs.
    fn longer(&self) -> &'static str {
        if matches!(self.source, TrafficSource::Trace(..)) { " and give a trace that has them" } else { "" }
    }

    /// The hit rate of an infinite cache, over the measured requests that ran: rejected and unsent ones are never looked up.
    pub fn ideal_hit_rate(&self, plan: &[PlannedRequest], run: &Run) -> Option<f64> {
        let looked_up =
            |record: &Record| record.started.is_some() || self.is_remote && record.first_token.is_some();
        let ran = plan.iter().zip(&run.records).enumerate().filter(|(_, (_, record))| looked_up(record));
        let counted = ran.map(|(index, (planned, _))| (planned, run.measured.contains(&index)));
        let rate = || ideal_hit_rate(counted, self.scheduler.block_size);
        self.scheduler.enable_prefix_caching.then(rate).flatten()
    }

    /// Blocks that the plan fills at most, without prefix reuse.
    pub fn blocks_of(&self, plan: &[PlannedRequest]) -> usize {
        let scheduler = &self.scheduler;
        let of = |p: &PlannedRequest| (p.prompt_len() + p.output_len).div_ceil(scheduler.block_size);
        plan.iter().map(of).sum::<usize>().min(scheduler.num_blocks)
    }

    pub fn traffic<'a>(
        &'a self,
        plan: &'a [PlannedRequest],
        measured: std::ops::Range<usize>,
        vocab: usize,
        eos: &[u32],
    ) -> Traffic<'a> {
        let kind = match self.offered {
            Offered::Concurrency(concurrency) => LoadMode::Closed { concurrency },
            _ => LoadMode::Open,
        };
        Traffic {
            extension: (self.goes_on() && (self.settles || self.most() > self.requests)).then(|| Extension {
                max_requests: self.most(),
                settles: self.settles,
                slo: self.slo.clone(),
            }),
            dataset: if let TrafficSource::Dataset(dataset) = &self.source {
                dataset.as_deref()
            } else {
                None
            },
            goes_on: self.offered != Offered::AtOnce && !matches!(self.source, TrafficSource::Trace(..)),
            stop_tokens: if self.stop_at_eos { eos.to_vec() } else { Vec::new() },
            time_limit: self.time_limit,
            ..Traffic::new(plan, kind, measured, vocab)
        }
    }

    /// Time of one more adapter in a step.
    pub fn adapter_time(&self) -> Nanos {
        self.adapters.as_ref().map_or(Nanos(0.0), |adapters| adapters.time_each)
    }

    /// The point, before it is run. Its means are those of the requests that count.
    pub fn without_result(&self, plan: &[PlannedRequest], measured: &std::ops::Range<usize>) -> Point {
        let counted = &plan[measured.clone()];
        let mean = |of: &dyn Fn(&PlannedRequest) -> usize| {
            counted.iter().map(|p| of(p) as f64).sum::<f64>() / counted.len().max(1) as f64
        };
        Point {
            label: self.label.clone(),
            offered: self.offered,
            arrivals: (!matches!(self.source, TrafficSource::Trace(..))).then_some(self.arrivals),
            seed: self.seed,
            cold: self.cold,
            mean_prompt_tokens: mean(&PlannedRequest::prompt_len),
            mean_output_tokens: mean(&|p| p.output_len),
            scheduler: (!self.is_remote).then(|| self.scheduler.clone()),
            ideal_hit_rate: None,
            result: None,
            not_run: None,
            predicted: None,
            adapters: None,
            structured: None,
            drift: None,
            residuals: None,
            live: None,
        }
    }
}

/// Simulates the point on a virtual clock.
///
/// # Errors
/// When the run cannot go on.
pub fn simulate(
    model: &StepModel,
    spec: &PointSpec,
    traffic: &Traffic<'_>,
    observe: &mut dyn FnMut(Progress),
) -> Result<Run, RunError> {
    let clock = VirtualClock::default();
    let mut executor = PredictedExecutor::new(model.clone(), &clock).with_adapter_time(spec.adapter_time());
    run(traffic, spec.scheduler.clone(), &mut executor, &mut clock.clone(), None, observe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mean_positions_are_those_of_prompt_and_output_together() {
        let fixed = TrafficSource::Workload(Workload::fixed(1000, 100).expect("lengths"));
        assert_eq!(fixed.mean_positions(7), Some(1100));
        assert_eq!(TrafficSource::Dataset(None).mean_positions(7), None);
    }
}
