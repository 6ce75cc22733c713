//! From raw blocks to a judged cell: summary, prediction, fractions, bound.
//!
//! Enters: blocks, the cost of a step, ceilings. Leaves: the numbers of a [`CellResult`]. The same code judges a live run and a saved
//! file, so `hbmark report` recomputes everything right of the samples.

use crate::analysis::distinct;
use crate::analysis::ladder::launch_cost;
use hbmark_core::ledger::{CEILING_IMPOSSIBLE, EXPLAINED_SHARE, FitPoint, Floor, Roof, StepCost, Verdict};
use hbmark_core::model::{Architecture, Dtype};
use hbmark_core::result::{
    Block, Bound, Cause, Ceilings, Cell, CellResult, DeviceSpec, FittedModel, GpuEnvironment, LaunchCost,
    Measured, Phase, ProtocolSummary, Report, Status, TimeSummary, accepted, block_interval, block_means,
    judged_times,
};
use hbmark_core::stats::{self, CONFIDENCE, Interval};
use hbmark_core::units::{Flops, Nanos};

/// A result with everything but times: what a skipped cell shows, and what a measured one starts from.
pub fn unmeasured(
    cell: &Cell,
    kv_dtype: Dtype,
    cost: &StepCost,
    status: Status,
    reason: Option<Cause>,
) -> CellResult {
    CellResult {
        kv_dtype,
        status,
        reason,
        bytes: cost.bytes,
        flops: cost.flops.0,
        distinct_experts: cost.distinct_experts,
        ..CellResult::blank(cell.phase, &cell.engine, cell.dtype, cell.batch, cell.context)
    }
}

/// The result of a measured cell.
pub fn measured(
    measured: Measured,
    kv_dtype: Dtype,
    cost: &StepCost,
    architecture: &Architecture,
    ceilings: Option<&Ceilings>,
    datasheet: Option<&DeviceSpec>,
) -> CellResult {
    let mut result = unmeasured(&measured.cell, kv_dtype, cost, measured.status, measured.reason);
    result.blocks = measured.blocks;
    result.block_merge = measured.merge;
    judge(&mut result, architecture, ceilings, datasheet);
    result
}

/// Recomputes every judged number of a saved report from its raw blocks.
pub fn recompute(report: &mut Report) {
    let (ceilings, datasheet) = (report.ceilings.clone(), report.datasheet.clone());
    let smoke = report.protocol.as_ref().is_some_and(ProtocolSummary::is_smoke);
    let simulated = report.environment.gpu.as_ref().is_some_and(GpuEnvironment::is_simulated);
    for cell in &mut report.cells {
        // What ran once is judged as what ran, and never called good.
        if matches!(cell.status, Status::Smoke | Status::Simulated) {
            cell.status = Status::Ok;
        }
        judge(cell, &report.model.architecture, ceilings.as_ref(), datasheet.as_ref());
        if smoke && cell.status == Status::Ok {
            cell.status = Status::Smoke;
        }
        if simulated && (cell.status == Status::Ok || cell.status.is_doubtful()) {
            cell.status = Status::Simulated;
        }
    }
    relate(report);
}

/// Fills in what follows from the cells together, and from what each is called: ladders, fits, launch costs, the range over all blocks.
pub fn relate(report: &mut Report) {
    for cell in &mut report.cells {
        cell.all_blocks = cell.status.is_doubtful().then(|| cell.over_all_blocks()).flatten();
    }
    let launches: Vec<Option<LaunchCost>> =
        report.cells.iter().map(|cell| launch_cost(cell, &report.cells)).collect();
    for (cell, launches) in report.cells.iter_mut().zip(launches) {
        cell.launch_cost_ns = launches.map(|launches| launches.cost_ns);
        cell.launch_share = launches.map(|launches| launches.share);
    }
    report.fits = fits(report);
    report.ladders = super::ladders(report);
}

/// Fills in everything that follows from a cell's blocks, bytes and FLOPs.
fn judge(
    cell: &mut CellResult,
    architecture: &Architecture,
    ceilings: Option<&Ceilings>,
    datasheet: Option<&DeviceSpec>,
) {
    let cost =
        StepCost { bytes: cell.bytes, flops: Flops(cell.flops), distinct_experts: cell.distinct_experts };
    if cell.status != Status::Predicted {
        // Older files have neither bytes nor FLOPs of skipped cells.
        let floor = |roof: Roof| Some(Floor::new(&cost, &roof).time().0).filter(|ns| *ns > 0.0);
        cell.predicted_ns = ceilings.and_then(|c| floor(Roof::measured(c, cell.dtype)));
        cell.predicted_datasheet_ns =
            datasheet.and_then(|d| floor(Roof::of_any_engine(d, cell.dtype, architecture)));
    }
    for row in &mut cell.operations {
        let at_ceiling = |c: &Ceilings| row.bytes.as_f64() / c.read_bytes_per_s.median * 1e9;
        row.fraction_of_ceiling = ceilings.filter(|_| row.time_ns > 0.0).map(|c| at_ceiling(c) / row.time_ns);
    }
    if cell.blocks.is_empty() {
        return;
    }
    // Flags are computed again each time the cell is judged.
    cell.flags.clear();
    cell.flags.extend(
        ceilings.and_then(Ceilings::doubt).map(|cause| Cause::CeilingDisturbed { cause: Box::new(cause) }),
    );
    let (rate, share) = beside(cell).unzip();
    cell.read_beside_bytes_per_s = rate;
    cell.fraction_of_read_beside = share.filter(|share| *share <= CEILING_IMPOSSIBLE);
    if accepted(&cell.blocks).next().is_none() {
        return;
    }
    let means = block_means(&cell.blocks, cell.block_merge, |b| judged_times(cell.phase, b));
    let spans: Vec<f64> = accepted(&cell.blocks).flat_map(|b| &b.step_ns).copied().collect();
    let span_means = block_means(&cell.blocks, cell.block_merge, |b| &b.step_ns);
    let of_spans = block_interval(&cell.blocks, cell.block_merge, |b| &b.step_ns);
    cell.step_ns = Some(summarise(&spans, &span_means, of_spans, accepted(&cell.blocks).count()));
    // A prefill has none of these, whatever the file holds.
    (cell.tpot_ns, cell.tpot_ci_low_ns, cell.tpot_ci_high_ns, cell.host_bubble_ns) = (None, None, None, None);
    // The cell's typical time: the interval between step ends over a cache, the device span for prefill.
    let typical = block_interval(&cell.blocks, cell.block_merge, |b| judged_times(cell.phase, b));
    let center = stats::geometric_mean(&means);
    if cell.phase.is_over_cache() {
        cell.tpot_ns = Some(center);
        cell.tpot_ci_low_ns = typical.map(|i| i.low);
        cell.tpot_ci_high_ns = typical.map(|i| i.high);
        let bubbles: Vec<f64> = accepted(&cell.blocks)
            .flat_map(|b| b.interval_ns.iter().zip(&b.step_ns).map(|(interval, span)| interval - span))
            .collect();
        cell.host_bubble_ns = Some(stats::median(&bubbles));
    }
    // A probe that read slower than the machine does now is doubtful here, though it was steady then.
    let shifted = ceilings.and_then(|known| {
        let read = known.read_bytes_per_s.median;
        let beat = rate.filter(|rate| rate * ROSE > read);
        let cause = shift(&cell.blocks).or(beat.map(|rate| Cause::BandwidthShifted { ratio: read / rate }))?;
        let mut known = known.clone();
        known.disturbed.push(cause);
        Some(known)
    });
    let ceilings = shifted.as_ref().or(ceilings);
    let tokens = cell.tokens();
    cell.tokens_per_s = Some(tokens as f64 / Nanos(center).seconds());
    cell.energy_per_step_joules = energy_per_step(cell);
    cell.energy_per_token_joules = cell.energy_per_step_joules.map(|joules| joules / tokens as f64);
    Verdict::new(&cost, Nanos(center), cell.dtype, architecture, ceilings, datasheet).record(cell);
    // The memory as it was beside the blocks explains what the ceiling, measured before, does not.
    if cell.bound == Some(Bound::Overhead)
        && cell.fraction_of_read_beside.is_some_and(|share| share >= EXPLAINED_SHARE)
    {
        cell.bound = Some(Bound::Memory);
    }
    if let Some(reason) = unseen_work(cell, &cost, architecture, ceilings, datasheet)
        && matches!(cell.status, Status::Ok | Status::NotConverged | Status::Noisy)
    {
        cell.status = Status::Invalid;
        cell.reason = Some(reason);
    }
}

/// Of accepted blocks whose energy is known, in seconds: a GPU's is said where they last so long together.
const LEAST_ENERGY_S: f64 = 0.5;

/// Joules of a step, of all accepted blocks together. A counter that advances every 20 to 100 ms gives a block up to one advance too many or too few,
/// so the median block is wrong by as much, and few short blocks say nothing. *Source* of the period: the documentation of PETSc and Zeus on
/// `nvmlDeviceGetTotalEnergyConsumption`.
fn energy_per_step(cell: &CellResult) -> Option<f64> {
    let (mut joules, mut seconds, mut steps, mut on_gpu) = (0.0, 0.0, 0_usize, false);
    for block in accepted(&cell.blocks) {
        let Some(telemetry) = &block.telemetry else { continue };
        let Some(spent) = telemetry.energy_joules else { continue };
        joules += spent;
        seconds += Nanos(block.wall_ns).seconds();
        steps += block.step_ns.len();
        // A processor has many clocks, and none of these.
        on_gpu |= telemetry.sm_clock_mhz.is_some();
    }
    (steps > 0 && (!on_gpu || seconds >= LEAST_ENERGY_S)).then(|| joules / steps as f64)
}

/// The rate at which memory was read beside the accepted blocks, and the share of it that their steps took: each block is held against the rate
/// beside it, so that memory whose rate changes over a run changes neither. Geometric means, as the time of the cell is one.
fn beside(cell: &CellResult) -> Option<(f64, f64)> {
    let shares: (Vec<f64>, Vec<f64>) = accepted(&cell.blocks)
        .filter_map(|block| {
            let rate = block.read_bytes_per_s?;
            let step = Nanos(stats::geometric_mean(judged_times(cell.phase, block)));
            Some((rate, cell.bytes.ideal().per(step).0 / rate))
        })
        .unzip();
    (!shares.0.is_empty()).then(|| (stats::geometric_mean(&shares.0), stats::geometric_mean(&shares.1)))
}

/// The ceiling as a share of the rate beside the blocks, below which that one rose: by a third.
const ROSE: f64 = 0.75;

/// That the machine read faster beside a block than when the ceilings were measured.
fn shift(blocks: &[Block]) -> Option<Cause> {
    let faster = |cause: &&Cause| matches!(cause, Cause::BandwidthShifted { ratio } if *ratio < 1.0);
    accepted(blocks).flat_map(|block| &block.conditions).find(faster).cloned()
}

/// A decode whose interval is possible and whose device span is not: its marks are on a stream that does not do the work.
fn unseen_work(
    cell: &CellResult,
    cost: &StepCost,
    architecture: &Architecture,
    ceilings: Option<&Ceilings>,
    datasheet: Option<&DeviceSpec>,
) -> Option<Cause> {
    let span = cell.step_ns.as_ref().filter(|_| cell.phase.is_over_cache())?.median;
    let of_span = Verdict::new(cost, Nanos(span), cell.dtype, architecture, ceilings, datasheet);
    of_span.invalid?;
    Some(Cause::WorkUnseen { timeline_ns: span, host_ns: cell.tpot_ns?, bytes: cost.bytes.ideal() })
}

/// The measured decode steps of each engine and dtype, regressed on KV bytes and batch.
pub fn fits(report: &Report) -> Vec<FittedModel> {
    distinct(report.cells.iter().map(|cell| (cell.engine.as_str(), cell.dtype)))
        .into_iter()
        .filter_map(|(engine, dtype)| {
            let cells = || {
                report.cells.iter().filter(move |c| {
                    c.engine == engine
                        && c.dtype == dtype
                        && c.phase == Phase::Decode
                        && matches!(c.status, Status::Ok | Status::NotConverged | Status::Noisy)
                })
            };
            let points: Vec<FitPoint> = cells()
                .filter_map(|c| {
                    Some(FitPoint { batch: c.batch, kv_bytes: c.bytes.kv_read.as_f64(), step_ns: c.tpot_ns? })
                })
                .collect();
            let weights = cells().next().map(|c| c.bytes.weights)?;
            let predicted =
                report.ceilings.as_ref().map(|c| weights.at(Roof::measured(c, dtype).bandwidth).0);
            hbmark_core::ledger::fit(engine, dtype, &points, predicted)
        })
        .collect()
}

/// Statistics over single steps and block means.
fn summarise(steps: &[f64], block_means: &[f64], interval: Option<Interval>, blocks: usize) -> TimeSummary {
    let mut sorted = steps.to_vec();
    sorted.sort_by(f64::total_cmp);
    let median = stats::percentile(&sorted, 0.5);
    let honest = |p| stats::percentile_if_enough(&sorted, p);
    let mean = stats::mean(steps);
    let sd = stats::sd(steps);
    let around_median = stats::order_statistic_interval(&sorted, 0.5, CONFIDENCE);
    TimeSummary {
        typical: (!block_means.is_empty()).then(|| stats::geometric_mean(block_means)),
        median,
        p50: median,
        p90: honest(0.90),
        p95: honest(0.95),
        p99: honest(0.99),
        p99_9: honest(0.999),
        mean,
        sd,
        cv: sd.map(|sd| sd / mean),
        min: sorted[0],
        max: sorted[sorted.len() - 1],
        p99_over_p50: honest(0.99).map(|p99| p99 / median),
        ci_low: interval.map(|i| i.low),
        ci_high: interval.map(|i| i.high),
        median_ci_low: around_median.map(|(low, _)| low),
        median_ci_high: around_median.map(|(_, high)| high),
        autocorrelation: stats::lag1_autocorrelation(block_means),
        drift: stats::trend(block_means).map(|t| t.relative_change),
        n: steps.len(),
        blocks,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;
    use hbmark_core::result::{BlockTelemetry, Spread};

    #[test]
    fn joules_of_a_step_are_those_of_all_blocks_together_and_a_gpus_need_time() {
        let of = |milliseconds: f64, sm_clock_mhz| {
            let mut cell = samples::measured().cells[0].clone();
            cell.blocks.truncate(2);
            for (block, (steps, joules)) in cell.blocks.iter_mut().zip([(1, 1.0), (3, 5.0)]) {
                block.rejected = None;
                block.step_ns = vec![1e6; steps];
                block.wall_ns = milliseconds * 1e6 / 2.0;
                let energy_joules = Some(joules);
                block.telemetry =
                    Some(BlockTelemetry { energy_joules, sm_clock_mhz, ..BlockTelemetry::default() });
            }
            energy_per_step(&cell)
        };
        assert_eq!(of(500.0, Some(1_980.0)), Some(1.5));
        assert_eq!(of(498.0, Some(1_980.0)), None);
        assert_eq!(of(1.0, None), Some(1.5));
    }

    #[test]
    fn steps_are_held_against_the_read_rate_beside_each_block() {
        let mut report = samples::measured();
        let first = |report: &Report| report.cells[0].clone();
        recompute(&mut report);
        assert_eq!(first(&report).fraction_of_read_beside, None);
        // The memory becomes half as fast during the run, and so do the steps. The second block is rejected.
        let bytes = report.cells[0].bytes.ideal();
        report.cells[0].blocks.truncate(5);
        for (number, block) in report.cells[0].blocks.iter_mut().enumerate() {
            block.rejected = (number == 1).then_some(Cause::ForeignLoad { cores: 0.8 });
            let slow = if number < 3 { 1.0 } else { 2.0 };
            let step = bytes.as_f64() / 9.0 * slow;
            block.step_ns.fill(step);
            block.interval_ns.fill(step);
            (block.wall_ns, block.timeline_ns) = (step * 3.0, Some(step * 3.0));
            block.read_bytes_per_s = Some(if number == 1 { 1e12 } else { 1e10 / slow });
        }
        recompute(&mut report);
        let cell = first(&report);
        assert!(
            (cell.fraction_of_read_beside.unwrap() - 0.9).abs() < 1e-9,
            "{:?}",
            cell.fraction_of_read_beside
        );
        assert!(
            (cell.read_beside_bytes_per_s.unwrap() - 1e10 / 2f64.sqrt()).abs() < 1.0,
            "{:?}",
            cell.read_beside_bytes_per_s
        );
        // The ceiling, measured before, was that of another memory.
        let mut slowed = report.clone();
        let ceilings = slowed.ceilings.as_mut().unwrap();
        ceilings.read_bytes_per_s = Spread { median: 4e10, low: 4e10, high: 4e10 };
        ceilings.gemm_flops_per_s.values_mut().for_each(|peak| peak.median *= 1e3);
        recompute(&mut slowed);
        assert!(first(&slowed).fraction_of_ceiling.unwrap() < EXPLAINED_SHARE);
        assert_eq!(first(&slowed).bound, Some(Bound::Memory));
        // Faster than a read can be: the reads were disturbed.
        let mut disturbed = report.clone();
        disturbed.cells[0]
            .blocks
            .iter_mut()
            .filter_map(|block| block.read_bytes_per_s.as_mut())
            .for_each(|r| *r /= 2.0);
        recompute(&mut disturbed);
        assert_eq!(first(&disturbed).fraction_of_read_beside, None);
        assert!(first(&disturbed).read_beside_bytes_per_s.is_some());
        // Blocks without a rate are not counted; without any there is no share.
        report.cells[0].blocks[4].read_bytes_per_s = None;
        recompute(&mut report);
        let of_three = 1e10 / 2f64.cbrt();
        assert!((first(&report).read_beside_bytes_per_s.unwrap() - of_three).abs() < 1.0);
        report.cells[0].blocks.iter_mut().for_each(|block| block.read_bytes_per_s = None);
        recompute(&mut report);
        assert_eq!(
            (first(&report).fraction_of_read_beside, first(&report).read_beside_bytes_per_s),
            (None, None)
        );
    }
}
