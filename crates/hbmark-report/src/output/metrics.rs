//! The tables of metrics: every number a tabular format shows about a cell of a run or a point of load.
//!
//! Enters: a [`CellResult`] or a [`ServeResult`]. Leaves: one column per row of [`METRICS`] or [`SERVING`]. To add a metric is to add a row
//! here; every format follows. It formats nothing.

use Shown::{Files, Table};
use Unit::{Bytes, BytesPerSecond, Count, Flops, Fraction, Joules, Nanoseconds, PerSecond};

use super::document::{Column, Value, measured};
use hbmark_core::result::serving::{Quantity, ServeResult};
use hbmark_core::result::{CellResult, Phase, Spread, Status, StepBytes, TimeSummary};

/// What a metric is measured in; decides how a table scales it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    Nanoseconds,
    Bytes,
    BytesPerSecond,
    Flops,
    /// A share of one, shown in percent.
    Fraction,
    PerSecond,
    Joules,
    Count,
}

impl Unit {
    /// The suffix of machine-readable columns.
    pub fn suffix(self) -> &'static str {
        match self {
            Self::Nanoseconds => "_ns",
            Self::Bytes => "_bytes",
            Self::BytesPerSecond => "_bytes_per_s",
            Self::Flops => "_flops",
            Self::PerSecond => "_per_s",
            Self::Joules => "_joules",
            Self::Fraction | Self::Count => "",
        }
    }
}

/// Where a metric is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shown {
    /// In every table, when any cell has it.
    Table,
    /// In files for machines only.
    Files,
}

/// One number about a thing.
#[derive(Debug, Clone, Copy)]
pub struct Metric<T, V = f64> {
    /// The name in files, without the unit.
    pub key: &'static str,
    /// The heading of a table.
    pub title: &'static str,
    pub unit: Unit,
    pub shown: Shown,
    pub value: fn(&T) -> Option<V>,
}

const fn row<T, V>(
    key: &'static str,
    title: &'static str,
    unit: Unit,
    shown: Shown,
    value: fn(&T) -> Option<V>,
) -> Metric<T, V> {
    Metric { key, title, unit, shown, value }
}

impl Metric<CellResult> {
    /// A column for a reader, in which a cell whose blocks cannot stand for it has median and range over all of them.
    pub fn of_cells(&self, cells: &[CellResult]) -> Column {
        let value = |cell: &CellResult| {
            let range = cell.all_blocks.as_ref().and_then(|all| match self.key {
                "step" => Some(all.step_ns),
                "tpot" => all.tpot_ns,
                "tokens" => Some(all.tokens_per_s),
                _ => None,
            });
            let value = (self.value)(cell);
            range.filter(|_| value.is_some()).map_or_else(|| Value::from(value), Value::Doubtful)
        };
        measured(self.title, self.unit, cells.iter().map(value))
    }
}

impl<T, V: Into<Value>> Metric<T, V> {
    /// A column of it for a reader; empty where there is no result.
    pub fn column<'a>(&self, things: impl IntoIterator<Item = Option<&'a T>>) -> Column
    where
        T: 'a,
    {
        measured(
            self.title,
            self.unit,
            things.into_iter().map(|thing| Value::from(thing.and_then(self.value))),
        )
    }

    /// The same under its name in files.
    pub fn field<'a>(&self, things: impl IntoIterator<Item = Option<&'a T>>) -> Column
    where
        T: 'a,
    {
        Column { title: self.key.to_owned(), ..self.column(things) }
    }
}

/// The bytes of a step. A cell that was never costed has none; no step moves nothing.
fn moved(cell: &CellResult) -> Option<&StepBytes> {
    (cell.bytes.ideal().0 > 0).then_some(&cell.bytes)
}

/// Achieved bandwidth describes a step that is limited by memory; for a prefill it is FLOPs.
fn bandwidth_matters(cell: &CellResult) -> bool {
    cell.phase.is_over_cache()
}

/// Every metric of a cell, in the order of columns.
pub const METRICS: &[Metric<CellResult>] = &[
    row("step", "step", Nanoseconds, Table, |c| match &c.all_blocks {
        Some(all) => Some(all.step_ns.median),
        None => c.step_ns.as_ref().map(TimeSummary::center),
    }),
    row("step_median", "median", Nanoseconds, Files, |c| Some(c.step_ns.as_ref()?.median)),
    row("step_p50", "p50", Nanoseconds, Files, |c| Some(c.step_ns.as_ref()?.p50)),
    row("step_p90", "p90", Nanoseconds, Files, |c| c.step_ns.as_ref()?.p90),
    row("step_p95", "p95", Nanoseconds, Files, |c| c.step_ns.as_ref()?.p95),
    row("step_p99", "p99", Nanoseconds, Files, |c| c.step_ns.as_ref()?.p99),
    row("step_p99_9", "p99.9", Nanoseconds, Files, |c| c.step_ns.as_ref()?.p99_9),
    row("step_mean", "mean", Nanoseconds, Files, |c| Some(c.step_ns.as_ref()?.mean)),
    row("step_sd", "sd", Nanoseconds, Files, |c| c.step_ns.as_ref()?.sd),
    row("step_cv", "cv", Fraction, Files, |c| c.step_ns.as_ref()?.cv),
    row("step_max", "max", Nanoseconds, Files, |c| Some(c.step_ns.as_ref()?.max)),
    row("step_ci_low", "ci low", Nanoseconds, Files, |c| c.step_ns.as_ref()?.ci_low),
    row("step_ci_high", "ci high", Nanoseconds, Files, |c| c.step_ns.as_ref()?.ci_high),
    row("steps", "n", Count, Files, |c| Some(c.step_ns.as_ref()?.n as f64)),
    row("tpot", "TPOT", Nanoseconds, Table, |c| match &c.all_blocks {
        // Of a verify step it hangs on how many draft tokens are accepted.
        _ if c.phase != Phase::Decode => None,
        Some(all) => all.tpot_ns.map(|tpot| tpot.median),
        None => c.tpot_ns.or_else(|| predicted_tpot(c)),
    }),
    row("interval", "interval", Nanoseconds, Files, |c| c.tpot_ns),
    row("interval_half_width", "±", Fraction, Table, half_width),
    row("host_bubble", "bubble", Nanoseconds, Files, |c| c.host_bubble_ns),
    row("launch_cost", "launches", Nanoseconds, Files, |c| c.launch_cost_ns),
    row("launch_share", "% launches", Fraction, Table, |c| c.launch_share),
    row("floor", "floor", Nanoseconds, Table, |c| c.predicted_ns.or(c.predicted_datasheet_ns)),
    row("predicted_datasheet", "datasheet", Nanoseconds, Files, |c| c.predicted_datasheet_ns),
    row("weights", "weights", Bytes, Table, |c| Some(moved(c)?.weights.as_f64())),
    row("kv", "KV", Bytes, Table, |c| moved(c).map(|bytes| (bytes.kv_read + bytes.kv_write).as_f64())),
    row("kv_read", "KV read", Bytes, Files, |c| Some(moved(c)?.kv_read.as_f64())),
    row("kv_write", "KV write", Bytes, Files, |c| Some(moved(c)?.kv_write.as_f64())),
    row("other", "other", Bytes, Files, |c| Some(moved(c)?.other.as_f64())),
    row("as_implemented", "moved", Bytes, Table, |c| Some(c.bytes.as_implemented?.as_f64())),
    row("arithmetic", "FLOP", Flops, Files, |c| Some(c.flops).filter(|flops| *flops > 0.0)),
    row("achieved", "achieved", BytesPerSecond, Table, |c| {
        c.achieved_bytes_per_s.filter(|_| bandwidth_matters(c))
    }),
    row("fraction_of_ceiling", "% ceiling", Fraction, Table, |c| {
        c.fraction_of_ceiling.filter(|_| bandwidth_matters(c))
    }),
    row("read_beside", "read beside", BytesPerSecond, Files, |c| {
        c.read_beside_bytes_per_s.filter(|_| bandwidth_matters(c))
    }),
    row("fraction_of_read_beside", "% read", Fraction, Table, |c| {
        c.fraction_of_read_beside.filter(|_| bandwidth_matters(c))
    }),
    row("fraction_of_datasheet", "% sheet", Fraction, Table, |c| {
        c.fraction_of_datasheet.filter(|_| bandwidth_matters(c))
    }),
    row("mfu", "MFU", Fraction, Table, |c| c.mfu.filter(|_| c.phase != Phase::Decode)),
    row("tokens", "tok/s", PerSecond, Table, |c| match &c.all_blocks {
        _ if matches!(c.phase, Phase::Verify { .. }) => None,
        Some(all) => Some(all.tokens_per_s.median),
        None => c.tokens_per_s,
    }),
    row("all_blocks_low", "lowest block", Nanoseconds, Files, |c| Some(judged(c)?.low)),
    row("all_blocks_high", "highest block", Nanoseconds, Files, |c| Some(judged(c)?.high)),
    row("blocks", "blocks", Count, Files, |c| Some(c.blocks.len() as f64).filter(|n| *n > 0.0)),
    row("blocks_rejected", "rejected", Count, Files, |c| {
        let rejected = c.blocks.iter().filter(|block| block.rejected.is_some()).count();
        (!c.blocks.is_empty()).then_some(rejected as f64)
    }),
    row("memory_predicted", "memory predicted", Bytes, Files, |c| Some(c.memory_predicted_bytes?.as_f64())),
    row("memory_peak", "memory peak", Bytes, Files, |c| Some(c.memory_peak_bytes?.as_f64())),
    row("energy_per_step", "J/step", Joules, Files, |c| c.energy_per_step_joules),
    row("energy_per_token", "J/token", Joules, Table, |c| {
        c.energy_per_token_joules.filter(|_| !matches!(c.phase, Phase::Verify { .. }))
    }),
    row("distinct_experts", "experts", Count, Table, |c| c.distinct_experts),
];

/// What only the scheduler knows: nothing of a live server.
fn of_scheduler(result: &ServeResult, value: f64) -> Option<Quantity> {
    result.median_step_ns.is_some().then(|| value.into())
}

/// Every number of a point of load, in the order of columns.
pub const SERVING: &[Metric<ServeResult, Quantity>] = &[
    row("offered", "offered req/s", PerSecond, Table, |r| r.offered_per_s.map(Quantity::from)),
    row("served", "served req/s", PerSecond, Table, |r| Some(r.served_per_s.into())),
    row("prompt_tokens", "prompt tok/s", PerSecond, Table, |r| Some(r.prompt_tokens_per_s.into())),
    row("output_tokens", "output tok/s", PerSecond, Table, |r| Some(r.output_tokens_per_s.into())),
    row("goodput", "goodput req/s", PerSecond, Table, |r| r.goodput_per_s.map(Quantity::from)),
    row("ttft_p50", "TTFT p50", Nanoseconds, Table, |r| r.ttft_ns.as_ref()?.p50),
    row("ttft_p95", "TTFT p95", Nanoseconds, Table, |r| r.ttft_ns.as_ref()?.p95),
    row("ttft_p99", "TTFT p99", Nanoseconds, Files, |r| r.ttft_ns.as_ref()?.p99),
    row("tpot_p50", "TPOT p50", Nanoseconds, Table, |r| r.tpot_ns.as_ref()?.p50),
    row("tpot_p95", "TPOT p95", Nanoseconds, Table, |r| r.tpot_ns.as_ref()?.p95),
    row("tpot_p99", "TPOT p99", Nanoseconds, Files, |r| r.tpot_ns.as_ref()?.p99),
    row("itl_p50", "ITL p50", Nanoseconds, Files, |r| r.itl_ns.as_ref()?.p50),
    row("itl_p99", "ITL p99", Nanoseconds, Files, |r| r.itl_ns.as_ref()?.p99),
    row("e2e_p50", "E2E p50", Nanoseconds, Table, |r| r.e2e_ns.as_ref()?.p50),
    row("e2e_p95", "E2E p95", Nanoseconds, Files, |r| r.e2e_ns.as_ref()?.p95),
    row("e2e_p99", "E2E p99", Nanoseconds, Files, |r| r.e2e_ns.as_ref()?.p99),
    row("queue_p50", "queue p50", Nanoseconds, Table, |r| r.queue_ns.as_ref()?.p50),
    row("queue_p95", "queue p95", Nanoseconds, Files, |r| r.queue_ns.as_ref()?.p95),
    row("injection_lag_max", "lag max", Nanoseconds, Files, |r| r.injection_lag_ns.max),
    row("mean_batch", "seqs/step", Count, Table, |r| of_scheduler(r, r.mean_batch)),
    row("mean_step_tokens", "tokens/step", Count, Table, |r| of_scheduler(r, r.mean_step_tokens)),
    row("mean_waiting", "waiting", Count, Files, |r| Some(r.mean_waiting.into())),
    row("mean_kv_use", "KV use", Fraction, Table, |r| of_scheduler(r, r.mean_kv_use)),
    row("max_kv_use", "KV max", Fraction, Files, |r| of_scheduler(r, r.max_kv_use)),
    row("prefix_hit_rate", "prefix hits", Fraction, Table, |r| r.prefix_hit_rate.map(Quantity::from)),
    row("mean_adapters", "adapters", Count, Table, |r| r.mean_adapters.map(Quantity::from)),
    row("acceptance_length", "accept length", Count, Table, |r| {
        r.drafts.as_ref()?.mean_acceptance_length().map(Quantity::from)
    }),
    row("preemptions", "preemptions", Count, Table, |r| of_scheduler(r, r.preemptions as f64)),
    row("median_step", "step", Nanoseconds, Files, |r| r.median_step_ns.map(Quantity::from)),
    row("median_schedule", "schedule", Nanoseconds, Files, |r| r.median_schedule_ns.map(Quantity::from)),
    row("measured", "measured", Count, Files, |r| Some((r.measured as f64).into())),
    row("served", "served", Count, Files, |r| Some((r.served as f64).into())),
];

/// The time of all blocks that the phase is judged by.
fn judged(cell: &CellResult) -> Option<Spread> {
    let all = cell.all_blocks.as_ref()?;
    Some(all.tpot_ns.unwrap_or(all.step_ns))
}

/// A predicted decode step is a lower bound of the time per output token.
fn predicted_tpot(cell: &CellResult) -> Option<f64> {
    (cell.status == Status::Predicted && cell.phase == Phase::Decode).then_some(cell.predicted_ns).flatten()
}

/// Half of the interval's width, relative: of the interval between steps over a cache, of the step for prefill.
fn half_width(cell: &CellResult) -> Option<f64> {
    let (low, high) = match cell.phase {
        Phase::Decode | Phase::Verify { .. } => (cell.tpot_ci_low_ns?, cell.tpot_ci_high_ns?),
        Phase::Prefill => {
            let step = cell.step_ns.as_ref()?;
            (step.ci_low?, step.ci_high?)
        }
    };
    Some((high / low).sqrt() - 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_files_are_unique_and_keys_carry_no_unit() {
        let cells: Vec<(&str, Unit)> = METRICS.iter().map(|m| (m.key, m.unit)).collect();
        let points: Vec<(&str, Unit)> = SERVING.iter().map(|m| (m.key, m.unit)).collect();
        for keys in [cells, points] {
            assert!(keys.iter().all(|(k, _)| !k.ends_with("_ns") && !k.ends_with("_bytes")));
            let names = keys.iter().map(|(key, unit)| format!("{key}{}", unit.suffix()));
            assert_eq!(names.collect::<std::collections::BTreeSet<_>>().len(), keys.len());
        }
    }
}
