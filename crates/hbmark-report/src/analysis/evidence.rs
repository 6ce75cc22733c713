//! What a cell's blocks, operations and fits show beyond its times: waiting, growth of memory, operations that move nothing.
//!
//! Enters: a judged cell or a whole [`Report`]. Leaves: evidence as text with numbers, or nothing. The rules that use it are
//! in [`super::diagnose`]. Pure.

use hbmark_core::result::{Block, Bound, Cause, CellResult, FittedModel, Phase, Report, Status};
use hbmark_core::stats;
use hbmark_core::units::{Bytes, BytesPerSecond, Nanos, whole};

/// Share of an interval in which the device waits, from which a step is called host-bound.
pub(super) const WAITING: f64 = 0.2;
/// The tail of the waits, as a share of the interval, from which the host is called jittery.
const JITTER: f64 = 0.1;
/// The device's own tail must be this much smaller than the host's, or the host is not the cause.
const DEVICE_SHARE: f64 = 0.3;
/// Memory that grows by less a step may be the harness's own records and an allocator's habits.
const LEAK_PER_STEP: f64 = 16_384.0;
/// ... and in all by less.
const LEAK_IN_ALL: f64 = 8e6;
/// Share of neighbouring blocks between which a leak must show.
const LEAK_RISES: f64 = 0.8;
/// Share of a step's operations that one which moves nothing must take to be named, and the share of its time that its bytes may explain.
const COSTLY: f64 = 0.1;
const MOVES_NOTHING: f64 = 0.05;
/// Slow canaries beyond this lose bandwidth; closer ones are noise.
const DEGRADED: f64 = 1.05;
/// How many times slower than the weights the cache must be read to be named, and the least its interval may leave open.
const KV_TIMES: f64 = 1.5;
const KV_TIMES_LOW: f64 = 1.25;

/// Whether a time may be read for a regime at all.
pub(super) fn is_believable(cell: &CellResult) -> bool {
    matches!(cell.status, Status::Ok | Status::NotConverged | Status::Noisy)
}

/// Blocks that count.
fn accepted(cell: &CellResult) -> impl Iterator<Item = &Block> {
    cell.blocks.iter().filter(|block| block.rejected.is_none())
}

/// The part of the interval in which the device waits for the host, where it is large.
pub(super) fn host_waits(cell: &CellResult) -> Option<String> {
    let interval = cell.tpot_ns.filter(|_| is_believable(cell))?;
    let bubble = cell.host_bubble_ns.filter(|bubble| bubble / interval >= WAITING)?;
    let span = cell.step_ns.as_ref()?.center();
    Some(format!(
        "the device works {} and waits {} of each {}, {:.0} %",
        Nanos(span),
        Nanos(bubble),
        Nanos(interval),
        bubble / interval * 100.0
    ))
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

/// Waits that are mostly short and sometimes long, of a device whose own steps are not.
pub(super) fn host_jitter(cell: &CellResult) -> Option<String> {
    let interval = cell.tpot_ns?;
    let waits = sorted(
        accepted(cell).flat_map(|b| b.interval_ns.iter().zip(&b.step_ns).map(|(whole, span)| whole - span)),
    );
    let spans = sorted(accepted(cell).flat_map(|b| &b.step_ns).copied());
    let tail =
        |values: &[f64]| Some(stats::percentile_if_enough(values, 0.95)? - stats::percentile(values, 0.5));
    let (host, device) = (tail(&waits)?, tail(&spans)?);
    (host >= JITTER * interval && device <= DEVICE_SHARE * host).then(|| {
        format!(
            "between steps the host takes {} at the median and {} more in one step of twenty; the device's own tail is {}",
            Nanos(stats::percentile(&waits, 0.5)),
            Nanos(host),
            Nanos(device)
        )
    })
}

/// Memory in use beside the steps taken until then, block by block.
fn levels(cell: &CellResult) -> Vec<(usize, f64, f64)> {
    let mut steps = 0.0;
    cell.blocks
        .iter()
        .filter_map(|block| {
            steps += block.step_ns.len() as f64;
            Some((block.visit, steps, block.memory_bytes?.as_f64()))
        })
        .collect()
}

/// Memory that grows from block to block, whatever the visit.
pub(super) fn leak(cell: &CellResult) -> Option<String> {
    let levels = levels(cell);
    let [(_, first_steps, first), .., (_, last_steps, last)] = levels.as_slice() else { return None };
    let rises = levels.windows(2).filter(|pair| pair[1].2 > pair[0].2).count() as f64;
    if levels.len() < 5 || rises < LEAK_RISES * (levels.len() - 1) as f64 || last - first < LEAK_IN_ALL {
        return None;
    }
    let rows: Vec<Vec<f64>> = levels.iter().map(|level| vec![1.0, level.1]).collect();
    let memory: Vec<f64> = levels.iter().map(|level| level.2).collect();
    let fit = stats::least_squares(&rows, &memory, 0.95)?;
    let slope = fit.coefficients.get(1).filter(|slope| slope.low > LEAK_PER_STEP)?;
    Some(format!(
        "memory in use grew by {} over {:.0} sampled steps, {} a step (at least {})",
        bytes(last - first),
        last_steps - first_steps,
        bytes(slope.value),
        bytes(slope.low)
    ))
}

/// Memory that grows by the cell's own cache with each visit, and not within one.
pub(super) fn kv_leak(cell: &CellResult) -> Option<String> {
    let levels = levels(cell);
    let cache = cell.bytes.kv_read.as_f64();
    let mut grown = 0.0;
    let mut visits = 1;
    for pair in levels.windows(2) {
        let growth = pair[1].2 - pair[0].2;
        if pair[0].0 == pair[1].0 {
            if growth.abs() > 0.1 * cache {
                return None;
            }
        } else if growth < 0.5 * cache {
            return None;
        } else {
            visits += 1;
            grown += growth;
        }
    }
    (visits >= 3 && cache >= LEAK_IN_ALL / 8.0 && grown >= LEAK_IN_ALL).then(|| {
        format!(
            "memory in use grew by {} over {visits} visits, and one visit's cache is {}: released sequences keep theirs",
            bytes(grown),
            cell.bytes.kv_read
        )
    })
}

fn bytes(count: f64) -> Bytes {
    Bytes(whole(count))
}

/// An operation that takes long and moves next to nothing.
pub(super) fn extra_kernel(cell: &CellResult) -> Option<String> {
    if !cell.phase.is_over_cache() || cell.bound == Some(Bound::Compute) {
        return None;
    }
    let whole: f64 = cell.operations.iter().map(|row| row.time_ns).sum();
    let worst = cell
        .operations
        .iter()
        .filter(|row| row.fraction_of_ceiling.is_some_and(|share| share < MOVES_NOTHING))
        .filter(|row| row.time_ns >= COSTLY * whole)
        .max_by(|a, b| a.time_ns.total_cmp(&b.time_ns))?;
    Some(format!(
        "`{}` runs {} times a step for {} each, {:.0} % of the step, and moves {}",
        worst.operation,
        worst.calls,
        Nanos(worst.time_ns / worst.calls.max(1) as f64),
        worst.time_ns / whole * 100.0,
        worst.bytes
    ))
}

/// Blocks rejected because the canary was slow, always slow, and by a good deal.
pub(super) fn degraded(cell: &CellResult, often: f64) -> Option<String> {
    let off: Vec<f64> = cell
        .blocks
        .iter()
        .filter(|block| matches!(block.rejected, Some(Cause::Canary { .. })))
        .filter_map(|block| block.canary_ratio)
        .collect();
    let slow = off.iter().filter(|ratio| **ratio >= DEGRADED).count();
    if off.is_empty() || (off.len() as f64) < often * cell.blocks.len() as f64 || slow * 10 < off.len() * 9 {
        return None;
    }
    Some(format!(
        "beside {} of {} blocks the canary took {:.0} % longer than at the start of the run",
        off.len(),
        cell.blocks.len(),
        (stats::median(&off) - 1.0) * 100.0
    ))
}

/// An invalid cell's reason as text, where it is one of these.
fn invalid_because(cell: &CellResult, is: impl Fn(&Cause) -> bool) -> Option<String> {
    let reason = cell.reason.as_ref().filter(|_| cell.status == Status::Invalid)?;
    is(reason).then(|| reason.to_string())
}

pub(super) fn wrong_size(cell: &CellResult) -> Option<String> {
    invalid_because(cell, |cause| matches!(cause, Cause::WeightsSize { .. }))
}

pub(super) fn wrong_storage(cell: &CellResult) -> Option<String> {
    invalid_because(cell, |cause| matches!(cause, Cause::WeightsStorage { .. }))
}

pub(super) fn unseen_work(cell: &CellResult) -> Option<String> {
    invalid_because(cell, |cause| matches!(cause, Cause::WorkUnseen { .. }))
}

pub(super) fn wrong_tokens(cell: &CellResult) -> Option<String> {
    invalid_because(cell, |cause| matches!(cause, Cause::TokensChanged { .. } | Cause::TokenCount { .. }))
}

pub(super) fn clocks_disagree(cell: &CellResult) -> Option<String> {
    invalid_because(cell, |cause| matches!(cause, Cause::ClocksDisagree { .. }))
}

/// A time that no memory allows: the step did not do its work.
pub(super) fn impossible(cell: &CellResult) -> Option<String> {
    invalid_because(cell, |cause| {
        matches!(
            cause,
            Cause::AboveDatasheetBandwidth { .. }
                | Cause::AboveDatasheetPeak { .. }
                | Cause::AboveReadCeiling { .. }
                | Cause::ImportMismatch { .. }
        )
    })
}

/// A fit whose cache costs far more a byte than its weights do, while the weights themselves are read as they should be.
pub(super) fn kv_costs(report: &Report, fit: &FittedModel) -> Option<String> {
    let weights = report
        .cells
        .iter()
        .find(|c| c.phase == Phase::Decode && c.engine == fit.engine && c.dtype == fit.dtype)?
        .bytes
        .weights;
    let floor = fit.predicted_intercept_ns.filter(|floor| *floor > 0.0)?;
    let as_predicted = (0.8..=1.35).contains(&(fit.intercept_ns / floor));
    let weight_rate = weights.as_f64() / fit.intercept_ns * 1e9;
    let (rate, [_, fastest]) = (fit.kv_bytes_per_s?, fit.kv_bytes_per_s_ci?);
    let (times, at_least) = (weight_rate / rate, weight_rate / fastest);
    (as_predicted && fit.r_squared > 0.95 && times >= KV_TIMES && at_least >= KV_TIMES_LOW).then(|| {
        format!(
            "{} {}: over {} cells a byte of the cache costs {times:.2} times a byte of weights: {} against {}; the intercept is {:.2} \
             times the weights' floor",
            fit.engine,
            fit.dtype,
            fit.cells,
            BytesPerSecond(rate),
            BytesPerSecond(weight_rate),
            fit.intercept_ns / floor
        )
    })
}
