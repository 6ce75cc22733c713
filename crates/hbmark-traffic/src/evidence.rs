//! What a diagnosis needs of a run beyond its latencies.
//!
//! Enters: records and steps. Leaves: an [`Evidence`]: requests delayed by long prompts, stalled steps and the requests they delayed,
//! warm-up effects on the first requests, and output lengths against the plan. Numbers only; `hbmark_report::analysis` interprets them.

use super::serving_loop::{Record, RequestOutcome, Run, StepLog, Traffic};
use hbmark_core::result::serving::{Evidence, LongPrompts, Stalls, Start};
use hbmark_core::stats::{known_median, median};

/// Prompts of at least this many times the median are long.
const LONG: usize = 4;
/// A step this many times longer than others of its size is a stall.
const STALL: f64 = 5.0;
/// Steps of a size needed for a typical time of that size.
const MIN_STEPS: usize = 5;
/// Measured requests needed to compare the first part with the rest.
const MIN_REQUESTS: usize = 50;

/// Collects the evidence of a run.
pub fn evidence(run: &Run, traffic: &Traffic<'_>) -> Evidence {
    let records = &run.records[run.measured.clone()];
    let served = || {
        records
            .iter()
            .zip(&traffic.plan[run.measured.clone()])
            .filter(|(r, _)| r.outcome == RequestOutcome::Served)
    };
    let stays: f64 = records.iter().filter_map(|r| Some(r.last_token?.0 - r.arrival.0)).sum();
    let waits: f64 = records.iter().map(|r| r.preempted_wait.0).sum();
    let usual = TypicalStepTimes::of(&run.steps);
    Evidence {
        long_prompts: long_prompts(records, &run.steps),
        stalls: stalls(records, &run.steps, &usual),
        start: start(records, &run.steps),
        planned_output_tokens: served().map(|(_, planned)| planned.output_len as u64).sum(),
        output_tokens: served().map(|(record, _)| record.output_tokens as u64).sum(),
        preempted_requests: records.iter().filter(|r| r.preemptions > 0).count(),
        preempted_share: if stays > 0.0 { waits / stays } else { 0.0 },
    }
}

fn ttft(record: &Record) -> Option<f64> {
    Some(record.first_token?.0 - record.arrival.0)
}

/// The steps that end after a moment and begin before another; steps are in order of time.
fn between(steps: &[StepLog], from: f64, to: f64) -> impl Iterator<Item = &StepLog> {
    let first = steps.partition_point(|step| step.end <= from);
    steps[first..].iter().take_while(move |step| step.begin < to)
}

fn long_prompts(records: &[Record], steps: &[StepLog]) -> Option<LongPrompts> {
    let mut lengths: Vec<usize> = records.iter().map(|r| r.prompt_tokens).collect();
    lengths.sort_unstable();
    let typical = *lengths.get(lengths.len() / 2)?;
    let from_tokens = LONG * typical;
    let long = lengths.iter().filter(|length| **length >= from_tokens).count();
    let busy: Vec<StepLog> = steps.iter().filter(|s| s.longest_prompt >= from_tokens).copied().collect();
    if long == 0 || busy.is_empty() {
        return None;
    }
    let (mut beside, mut alone, mut inside, mut waited) = (Vec::new(), Vec::new(), 0.0, 0.0);
    for record in records.iter().filter(|r| r.prompt_tokens <= typical) {
        let Some(wait) = ttft(record) else { continue };
        let (from, to) = (record.arrival.0, record.arrival.0 + wait);
        let shared: f64 = between(&busy, from, to).map(|s| s.end.min(to) - s.begin.max(from)).sum();
        if shared > 0.0 {
            beside.push(wait);
            inside += shared;
            waited += wait;
        } else {
            alone.push(wait);
        }
    }
    Some(LongPrompts {
        from_tokens,
        long,
        beside: beside.len(),
        alone: alone.len(),
        ttft_p50_beside_ns: known_median(&beside),
        ttft_p50_alone_ns: known_median(&alone),
        share_in_long_steps: if waited > 0.0 { inside / waited } else { 0.0 },
    })
}

/// The typical time of a step by size: medians over sizes that differ by less than a factor of two.
struct TypicalStepTimes(Vec<Option<f64>>);

fn size(step: &StepLog) -> usize {
    (step.prompt_tokens + step.load.running).max(1).ilog2() as usize
}

impl TypicalStepTimes {
    fn of(steps: &[StepLog]) -> Self {
        let mut sizes: Vec<Vec<f64>> = Vec::new();
        for step in steps {
            let size = size(step);
            if sizes.len() <= size {
                sizes.resize(size + 1, Vec::new());
            }
            sizes[size].push(step.end - step.begin);
        }
        let known = |times: Vec<f64>| (times.len() >= MIN_STEPS).then(|| median(&times));
        Self(sizes.into_iter().map(known).collect())
    }

    /// How many times longer than usual a step took.
    fn ratio(&self, step: &StepLog) -> Option<f64> {
        let usual = self.0.get(size(step)).copied().flatten()?;
        (usual > 0.0).then(|| (step.end - step.begin) / usual)
    }
}

fn stalls(records: &[Record], steps: &[StepLog], usual: &TypicalStepTimes) -> Stalls {
    let stalled: Vec<StepLog> =
        steps.iter().filter(|s| usual.ratio(s).is_some_and(|ratio| ratio >= STALL)).copied().collect();
    let spans = || stalled.iter().map(|s| s.end - s.begin);
    let mut waits: Vec<(f64, &Record)> =
        records.iter().map(|r| (ttft(r).unwrap_or(f64::INFINITY), r)).collect();
    waits.sort_by(|a, b| b.0.total_cmp(&a.0));
    let slowest = records.len().div_ceil(100).min(records.len());
    let met = |record: &Record| {
        let until = record.last_token.map_or(f64::INFINITY, |t| t.0);
        between(&stalled, record.arrival.0, until).next().is_some()
    };
    Stalls {
        count: stalled.len(),
        longest_ns: spans().fold(0.0, f64::max),
        total_ns: spans().sum(),
        slowest,
        slowest_in_stalls: waits[..slowest].iter().filter(|(_, record)| met(record)).count(),
    }
}

fn start(records: &[Record], steps: &[StepLog]) -> Option<Start> {
    if records.len() < MIN_REQUESTS {
        return None;
    }
    let (first, rest) = records.split_at(records.len() / 10);
    let typical = |part: &[Record]| known_median(&part.iter().filter_map(ttft).collect::<Vec<_>>());
    let hits = |part: &[Record]| {
        let all: usize = part.iter().map(|r| r.prompt_tokens).sum();
        part.iter().map(|r| r.cached_tokens).sum::<usize>() as f64 / all.max(1) as f64
    };
    let from = first[0].arrival.0;
    let until = first.iter().filter_map(|r| r.first_token).map(|t| t.0).fold(from, f64::max);
    let later = steps.partition_point(|step| step.begin < until);
    let usual = TypicalStepTimes::of(&steps[later..]);
    let ratios: Vec<f64> =
        between(&steps[..later], from, until).filter_map(|step| usual.ratio(step)).collect();
    Some(Start {
        first: first.len(),
        ttft_p50_first_ns: typical(first),
        ttft_p50_rest_ns: typical(rest),
        step_ratio: known_median(&ratios),
        hit_share_first: hits(first),
        hit_share_rest: hits(rest),
    })
}
