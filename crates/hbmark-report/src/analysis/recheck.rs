//! The rules of a live run, applied again to the raw blocks of a saved one.
//!
//! Enters: a judged [`Report`] from a file. Leaves: the same, in which no cell counts whose own blocks say otherwise. A file may have been
//! edited, or written by a version that did not have a rule; nothing is taken from its verdicts that its samples do not show.

mod serving;

use crate::analysis::words::precise;
use std::collections::BTreeMap;

use hbmark_core::ledger::{Ledger, StepShape};
use hbmark_core::model::{Architecture, Dtype};
use hbmark_core::result::{
    Block, Cause, CellResult, ConsistencyRule as Rule, EngineKind, Limits, Phase, ProtocolSummary, Report,
    ReportKind, Status, accepted, block_interval, block_means, judged_times,
};

/// No live run tolerates a canary that is further off, on any device.
const CANARY_TOLERANCE: f64 = 0.25;
/// Steps in a block come from the warm-up's time of one; the block itself may be so much faster.
const SHORT_BLOCK: f64 = 0.5;
/// On a CPU the device span is the host's own time of the step, without the choice of the next token.
const HOST_SPAN: f64 = 0.6;
/// A decode that takes longer than so many prefills of its batch and context is a prefill.
const DECODE_OVER_PREFILL: f64 = 2.0;
/// Contexts below this are hardly more work than a token.
const LONG_CONTEXT: usize = 64;
/// Of the weights of its shape, the share that a step reads at the least: storages differ in scales and in what they leave unquantised.
const LEAST_WEIGHTS: f64 = 0.7;
/// The rounding of sums of nanoseconds.
const ROUNDING: f64 = 1e-6;

/// Marks every cell whose blocks break a rule; the first rule that is broken is its reason.
pub fn recheck(report: &mut Report) {
    if report.kind != ReportKind::Run {
        return;
    }
    let on_host = report.environment.gpu.is_none();
    let limits = Limits::of(&report.environment);
    let prefills = prefills(report);
    let architecture = report.model.architecture.clone();
    let mut ledgers = Ledgers::new();
    // A run that does not say by which protocol it was taken is held against the full one.
    let protocol = report.protocol.clone().unwrap_or_else(|| ProtocolSummary::full(0));
    let counts =
        |cell: &&mut CellResult| matches!(cell.status, Status::Ok | Status::NotConverged | Status::Noisy);
    for cell in report.cells.iter_mut().filter(counts) {
        let mut found = blocks(cell, &protocol, &limits, on_host)
            .or_else(|| swapped(cell, &prefills))
            .or_else(|| lighter(cell, &architecture, on_host, &mut ledgers))
            .map(|cause| (Status::Invalid, cause));
        if cell.status == Status::Ok {
            found = found.or_else(|| sampling(cell, &protocol));
        }
        if let Some((status, reason)) = found {
            cell.status = status;
            cell.reason = Some(reason);
        }
    }
}

fn broken(rule: Rule, detail: String) -> Cause {
    Cause::Inconsistent { rule, detail }
}

/// What single blocks, and blocks beside each other, must be.
fn blocks(cell: &CellResult, protocol: &ProtocolSummary, limits: &Limits, on_host: bool) -> Option<Cause> {
    if accepted(&cell.blocks).next().is_none() {
        let detail = match cell.blocks.last().and_then(|block| block.rejected.as_ref()) {
            Some(last) => format!("all {} blocks are rejected; the last: {last}", cell.blocks.len()),
            None => "there are no blocks: nothing shows what was measured".to_owned(),
        };
        return Some(broken(Rule::AcceptedBlocks, detail));
    }
    let numbered = cell.blocks.iter().enumerate().filter(|(_, block)| block.rejected.is_none());
    let found = numbered.clone().find_map(|(number, block)| {
        let in_block =
            |(rule, detail): (Rule, String)| broken(rule, format!("block {}: {detail}", number + 1));
        // Blocks beside other work, and of steps that the warm-up found slower, are what a noisy cell counts in spite of.
        let noisy = cell.status == Status::Noisy;
        let disturbed = || disturbed(block, limits).filter(|_| !noisy);
        let length = || length(cell.phase, block, protocol).filter(|_| !noisy);
        disturbed().or_else(|| clocks(block, on_host)).or_else(length).map(in_block)
    });
    found.or_else(|| repeated(&cell.blocks))
}

/// What the block's own telemetry rejects it for.
fn disturbed(block: &Block, limits: &Limits) -> Option<(Rule, String)> {
    let recorded = block.telemetry.as_ref().and_then(|telemetry| telemetry.rejects(limits));
    let off = |ratio: &f64| (ratio - 1.0).abs() > CANARY_TOLERANCE;
    let cause = recorded.or_else(|| block.canary_ratio.filter(off).map(|ratio| Cause::Canary { ratio }))?;
    Some((Rule::AcceptedBlocks, format!("it counts, and its own record rejects it: {cause}")))
}

fn clocks(block: &Block, on_host: bool) -> Option<(Rule, String)> {
    let sum = |times: &[f64]| times.iter().sum::<f64>();
    let (spans, intervals) = (sum(&block.step_ns), sum(&block.interval_ns));
    if block.interval_ns.is_empty() {
        return None;
    }
    if block.interval_ns.len() != block.step_ns.len() {
        let detail = format!("{} intervals of {} steps", block.interval_ns.len(), block.step_ns.len());
        return Some((Rule::IntervalsAndSpans, detail));
    }
    let slack = block.clock_slack_ns();
    if spans > intervals + slack || (on_host && spans < intervals * HOST_SPAN - slack) {
        let detail = format!(
            "its device spans add up to {} and its intervals to {}",
            precise(spans),
            precise(intervals)
        );
        return Some((Rule::IntervalsAndSpans, detail));
    }
    if (intervals - block.wall_ns).abs() > block.wall_ns * ROUNDING + 1e3 {
        let detail =
            format!("its intervals add up to {}, and it took {}", precise(intervals), precise(block.wall_ns));
        return Some((Rule::IntervalsAndWall, detail));
    }
    let timeline = block.timeline_ns.filter(|spanned| !block.clocks_agree(*spanned))?;
    let detail =
        format!("it took {} by the timeline and {} by the host", precise(timeline), precise(block.wall_ns));
    Some((Rule::IntervalsAndWall, detail))
}

fn length(phase: Phase, block: &Block, protocol: &ProtocolSummary) -> Option<(Rule, String)> {
    let (steps, least) = (block.step_ns.len(), protocol.block_min_steps);
    if phase.is_over_cache() && steps < least {
        return Some((
            Rule::BlockLength,
            format!("it has {steps} steps, and the protocol takes at least {least}"),
        ));
    }
    let seconds = block.wall_ns / 1e9;
    (seconds < protocol.block_min_seconds * SHORT_BLOCK).then(|| {
        let least = protocol.block_min_seconds;
        (Rule::BlockLength, format!("it took {seconds:.4} s, and the protocol takes at least {least} s"))
    })
}

/// One measurement twice: two blocks of a visit at one time, or with the same times to the last digit.
fn repeated(blocks: &[Block]) -> Option<Cause> {
    let kept: Vec<(usize, &Block)> = blocks.iter().enumerate().collect();
    let twice = |a: &Block, b: &Block| {
        let varied =
            a.step_ns.len() > 2 && a.step_ns.iter().any(|time| time.total_cmp(&a.step_ns[0]).is_ne());
        let overlap =
            a.visit == b.visit && (b.at_ns - a.at_ns).abs() < a.wall_ns.min(b.wall_ns) * (1.0 - ROUNDING);
        overlap || (varied && a.step_ns == b.step_ns)
    };
    kept.iter().enumerate().find_map(|(place, (first, a))| {
        let (second, _) = kept[place + 1..].iter().find(|(_, b)| twice(a, b))?;
        Some(broken(
            Rule::RepeatedBlocks,
            format!("blocks {} and {} are one measurement", first + 1, second + 1),
        ))
    })
}

/// The protocol's number of blocks and width of the interval.
fn sampling(cell: &CellResult, protocol: &ProtocolSummary) -> Option<(Status, Cause)> {
    let means = block_means(&cell.blocks, cell.block_merge, |block| judged_times(cell.phase, block));
    let blocks = means.len();
    if blocks < protocol.min_blocks || blocks < 2 {
        return Some((Status::NotConverged, Cause::TooFewBlocks { blocks }));
    }
    let half_width = block_interval(&cell.blocks, cell.block_merge, |block| judged_times(cell.phase, block))
        .map_or(f64::INFINITY, |interval| interval.relative_half_width());
    let sampled_s = cell.blocks.iter().map(|block| block.wall_ns / 1e9).sum();
    (half_width > protocol.target_half_width * (1.0 + ROUNDING)).then_some((
        Status::NotConverged,
        Cause::IntervalTooWide { half_width, wanted: protocol.target_half_width, blocks, sampled_s },
    ))
}

/// Of each storage of weights and cache, and each number of ranks.
type Ledgers = BTreeMap<(&'static str, &'static str, usize), Ledger>;

/// A step that is said to read far fewer weights than its model has: its floor would be too low to hold any time against.
fn lighter(
    cell: &CellResult,
    architecture: &Architecture,
    on_host: bool,
    ledgers: &mut Ledgers,
) -> Option<Cause> {
    // Blocks of a GGUF file are its own, and experts are counted as they came.
    if cell.dtype == Dtype::Gguf || cell.distinct_experts.is_some() {
        return None;
    }
    let ranks = EngineKind::ranks(&cell.engine);
    let key = (cell.dtype.name(), cell.kv_dtype.name(), ranks);
    let inventory = || architecture.inventory(cell.dtype);
    let made = || Ledger::of_engine(architecture, &inventory(), cell.kv_dtype, ranks, !on_host);
    let ledger = ledgers.entry(key).or_insert_with(made);
    let shape = StepShape { phase: cell.phase, batch: cell.batch, context: cell.context };
    let (found_bytes, wanted_bytes) = (cell.bytes.weights, ledger.step(shape).bytes.weights);
    (found_bytes.as_f64() < wanted_bytes.as_f64() * LEAST_WEIGHTS)
        .then_some(Cause::WeightsSize { found_bytes, wanted_bytes })
}

type Place = (String, &'static str, usize, usize);

fn place(cell: &CellResult) -> Place {
    (cell.engine.clone(), cell.dtype.name(), cell.batch, cell.context)
}

/// The prefill of each engine, storage, batch and context.
fn prefills(report: &Report) -> BTreeMap<Place, f64> {
    let prefills = report.cells.iter().filter(|cell| cell.phase == Phase::Prefill);
    prefills.filter_map(|cell| Some((place(cell), cell.step_ns.as_ref()?.median))).collect()
}

/// A decode step computes one token where the prefill computes a context of them.
fn swapped(cell: &CellResult, prefills: &BTreeMap<Place, f64>) -> Option<Cause> {
    // Device spans of both: what a step waits for the host is not its work.
    let is_long = cell.phase == Phase::Decode && cell.context >= LONG_CONTEXT;
    let decode = cell.step_ns.as_ref().filter(|_| is_long)?.median;
    let prefill = *prefills.get(&place(cell))?;
    (decode > prefill * DECODE_OVER_PREFILL).then(|| {
        let detail = format!(
            "a decode step takes {}, and the prefill of the same batch and context {}",
            precise(decode),
            precise(prefill)
        );
        broken(Rule::Phases, detail)
    })
}

pub use serving::recheck_serving;

#[cfg(test)]
mod tests;
