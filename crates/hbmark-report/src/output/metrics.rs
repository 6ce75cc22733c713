//! The table of metrics: every number a tabular format shows about a cell.
//!
//! Enters: a [`CellResult`]. Leaves: one value per row of [`METRICS`]. To add a metric is to add a row here; the terminal, CSV and
//! Markdown follow. It formats nothing but units.

use Better::{Higher, Lower, Neither};
use Shown::{Files, Table};
use Unit::{Bytes, BytesPerSecond, Count, Flops, Fraction, Joules, Nanoseconds, PerSecond};

use hbmark_core::result::{CellResult, Phase, StepBytes};

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
    #[must_use]
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

/// Which direction is good.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Better {
    Lower,
    Higher,
    Neither,
}

/// Where a metric is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shown {
    /// In every table, when any cell has it.
    Table,
    /// In files for machines only.
    Files,
}

/// One number about a cell.
#[derive(Debug, Clone, Copy)]
pub struct Metric {
    /// The name in files, without the unit.
    pub key: &'static str,
    /// The heading of a table.
    pub title: &'static str,
    pub unit: Unit,
    pub better: Better,
    pub shown: Shown,
    pub value: fn(&CellResult) -> Option<f64>,
}

const fn row(
    key: &'static str,
    title: &'static str,
    unit: Unit,
    better: Better,
    shown: Shown,
    value: fn(&CellResult) -> Option<f64>,
) -> Metric {
    Metric { key, title, unit, better, shown, value }
}

/// The bytes of a step. A cell that was never costed has none; no step moves nothing.
fn moved(cell: &CellResult) -> Option<&StepBytes> {
    (cell.bytes.ideal().0 > 0).then_some(&cell.bytes)
}

/// The achieved bandwidth says something about a step that moves memory; a prefill is told by its FLOPs.
fn bandwidth_matters(cell: &CellResult) -> bool {
    cell.phase == Phase::Decode
}

/// Every metric, in the order of columns.
pub const METRICS: &[Metric] = &[
    row("step", "step", Nanoseconds, Lower, Table, |c| {
        let step = c.step_ns.as_ref()?;
        Some(step.typical.unwrap_or(step.median))
    }),
    row("step_median", "median", Nanoseconds, Lower, Files, |c| Some(c.step_ns.as_ref()?.median)),
    row("step_p50", "p50", Nanoseconds, Lower, Files, |c| Some(c.step_ns.as_ref()?.p50)),
    row("step_p90", "p90", Nanoseconds, Lower, Files, |c| c.step_ns.as_ref()?.p90),
    row("step_p95", "p95", Nanoseconds, Lower, Files, |c| c.step_ns.as_ref()?.p95),
    row("step_p99", "p99", Nanoseconds, Lower, Files, |c| c.step_ns.as_ref()?.p99),
    row("step_p99_9", "p99.9", Nanoseconds, Lower, Files, |c| c.step_ns.as_ref()?.p99_9),
    row("step_mean", "mean", Nanoseconds, Lower, Files, |c| Some(c.step_ns.as_ref()?.mean)),
    row("step_sd", "sd", Nanoseconds, Lower, Files, |c| c.step_ns.as_ref()?.sd),
    row("step_cv", "cv", Fraction, Lower, Files, |c| c.step_ns.as_ref()?.cv),
    row("step_max", "max", Nanoseconds, Lower, Files, |c| Some(c.step_ns.as_ref()?.max)),
    row("step_ci_low", "ci low", Nanoseconds, Neither, Files, |c| c.step_ns.as_ref()?.ci_low),
    row("step_ci_high", "ci high", Nanoseconds, Neither, Files, |c| c.step_ns.as_ref()?.ci_high),
    row("steps", "n", Count, Neither, Files, |c| Some(c.step_ns.as_ref()?.n as f64)),
    row("tpot", "TPOT", Nanoseconds, Lower, Table, |c| c.tpot_ns),
    row("interval_half_width", "±", Fraction, Lower, Table, half_width),
    row("host_bubble", "bubble", Nanoseconds, Lower, Files, |c| c.host_bubble_ns),
    row("launch_cost", "launches", Nanoseconds, Lower, Files, |c| c.launch_cost_ns),
    row("launch_share", "% launches", Fraction, Lower, Table, |c| c.launch_share),
    row("predicted", "predicted", Nanoseconds, Neither, Table, |c| {
        c.predicted_ns.or(c.predicted_datasheet_ns)
    }),
    row("predicted_datasheet", "datasheet", Nanoseconds, Neither, Files, |c| c.predicted_datasheet_ns),
    row("weights", "weights", Bytes, Neither, Table, |c| Some(moved(c)?.weights.as_f64())),
    row("kv", "KV", Bytes, Neither, Table, |c| {
        moved(c).map(|bytes| (bytes.kv_read + bytes.kv_write).as_f64())
    }),
    row("kv_read", "KV read", Bytes, Neither, Files, |c| Some(moved(c)?.kv_read.as_f64())),
    row("kv_write", "KV write", Bytes, Neither, Files, |c| Some(moved(c)?.kv_write.as_f64())),
    row("other", "other", Bytes, Neither, Files, |c| Some(moved(c)?.other.as_f64())),
    row("as_implemented", "moved", Bytes, Lower, Table, |c| Some(c.bytes.as_implemented?.as_f64())),
    row("arithmetic", "FLOP", Flops, Neither, Files, |c| Some(c.flops).filter(|flops| *flops > 0.0)),
    row("achieved", "achieved", BytesPerSecond, Higher, Table, |c| {
        c.achieved_bytes_per_s.filter(|_| bandwidth_matters(c))
    }),
    row("fraction_of_ceiling", "% ceiling", Fraction, Higher, Table, |c| {
        c.fraction_of_ceiling.filter(|_| bandwidth_matters(c))
    }),
    row("fraction_of_datasheet", "% sheet", Fraction, Higher, Table, |c| {
        c.fraction_of_datasheet.filter(|_| bandwidth_matters(c))
    }),
    row("mfu", "MFU", Fraction, Higher, Table, |c| c.mfu.filter(|_| !bandwidth_matters(c))),
    row("tokens", "tok/s", PerSecond, Higher, Table, |c| c.tokens_per_s),
    row("memory_predicted", "memory predicted", Bytes, Neither, Files, |c| {
        Some(c.memory_predicted_bytes?.as_f64())
    }),
    row("memory_peak", "memory peak", Bytes, Lower, Files, |c| Some(c.memory_peak_bytes?.as_f64())),
    row("energy_per_step", "J/step", Joules, Lower, Files, |c| c.energy_per_step_joules),
    row("energy_per_token", "J/token", Joules, Lower, Table, |c| c.energy_per_token_joules),
    row("distinct_experts", "experts", Count, Neither, Table, |c| c.distinct_experts),
];

/// Half of the interval's width, relative: of TPOT for decode, of the step for prefill.
fn half_width(cell: &CellResult) -> Option<f64> {
    let (low, high) = match cell.phase {
        Phase::Decode => (cell.tpot_ci_low_ns?, cell.tpot_ci_high_ns?),
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
    fn keys_are_unique_and_carry_no_unit() {
        let mut keys: Vec<&str> = METRICS.iter().map(|m| m.key).collect();
        keys.sort_unstable();
        let count = keys.len();
        keys.dedup();
        assert_eq!(keys.len(), count);
        assert!(keys.iter().all(|k| !k.ends_with("_ns") && !k.ends_with("_bytes")));
    }
}
