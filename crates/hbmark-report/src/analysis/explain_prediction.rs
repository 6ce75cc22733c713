//! What a prediction says: which term of the floor dominates in which cells, where that changes, and what would lower it.
//!
//! Enters: a predicted [`Report`]. Leaves: [`Finding`]s, what does not fit before the rest. Pure.

use super::words::counted;
use hbmark_core::ledger::Roof;
use hbmark_core::result::{
    Bound, Cause, CellResult, Crossover, CrossoverKind, Finding, GroupStep, Report, Severity,
};
use hbmark_core::units::{Bytes, Flops, Nanos};

/// Cells and crossovers that are shown of each finding; all cells are named.
const SHOWN: usize = 2;

/// The larger part of a floor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Term {
    Arithmetic,
    Weights,
    Kv,
    /// What the GPUs of a group exchange.
    Collectives,
}

impl Term {
    const ALL: [Self; 4] = [Self::Weights, Self::Kv, Self::Arithmetic, Self::Collectives];

    fn of(cell: &CellResult) -> Self {
        let bytes = &cell.bytes;
        match cell.bound {
            // By its parts: a file of before has the bound of the GPUs' own work.
            _ if cell.group.as_ref().is_some_and(GroupStep::is_bound_by_collectives) => Self::Collectives,
            Some(Bound::Compute) => Self::Arithmetic,
            _ if bytes.kv_read + bytes.kv_write > bytes.weights => Self::Kv,
            _ => Self::Weights,
        }
    }

    fn rule(self) -> &'static str {
        match self {
            Self::Arithmetic => "floor_of_arithmetic",
            Self::Weights => "floor_of_weights",
            Self::Kv => "floor_of_kv",
            Self::Collectives => "floor_of_collectives",
        }
    }

    fn regime(self) -> &'static str {
        match self {
            Self::Arithmetic => "compute-bound: the matrix products set the floor",
            Self::Weights => "memory-bound: reading the weights sets the floor",
            Self::Kv => "memory-bound: reading the KV cache sets the floor",
            Self::Collectives => "link-bound: what the GPUs exchange sets the floor",
        }
    }

    fn response(self) -> &'static str {
        match self {
            Self::Arithmetic => {
                "a dtype with a higher peak (fp8), fewer prompt tokens (prefix caching), of verify steps fewer draft tokens, or more GPUs; fewer bytes do not help"
            }
            Self::Weights => {
                "fewer bytes a weight (--dtype fp8, int8, int4), or a larger batch, which reads them once for all; more GPUs share them"
            }
            Self::Collectives => {
                "a faster link between the GPUs, fewer of them (--tensor-parallel-size), stages in the place of ranks (--pipeline-parallel-size), or an engine that overlaps the two; fewer bytes a weight do not help"
            }
            Self::Kv => {
                "a smaller KV dtype (--kv-dtype fp8), a shorter context, or more GPUs up to the number of KV heads (beyond it, and with latent attention, data-parallel attention); a larger batch does not help"
            }
        }
    }

    fn next(self) -> &'static str {
        match self {
            Self::Arithmetic => {
                "the same phase with hbmark run on the device: MFU says how near the floor it comes"
            }
            Self::Collectives => {
                "all-reduces of these sizes on the GPUs themselves (nccl-tests): the floor has them at the speed of the link"
            }
            Self::Weights | Self::Kv => {
                "the same phase with hbmark run on the device: % of the ceiling says how near the floor it comes"
            }
        }
    }

    /// The crossovers at which another term takes over.
    fn ends_at(self) -> &'static [CrossoverKind] {
        match self {
            Self::Arithmetic => &[CrossoverKind::ComputeBoundPrompt],
            Self::Weights => &[CrossoverKind::CriticalBatchSize, CrossoverKind::KvExceedsWeightsContext],
            Self::Kv => &[CrossoverKind::KvExceedsWeightsContext],
            Self::Collectives => &[],
        }
    }
}

/// Every finding about a prediction.
pub(super) fn explain_prediction(report: &Report) -> Vec<Finding> {
    let predicted = || report.cells.iter().filter(|cell| cell.predicted_ns.is_some());
    let mut findings = Vec::new();
    findings.extend(too_large(predicted()));
    for term in Term::ALL {
        let cells: Vec<&CellResult> = predicted().filter(|cell| Term::of(cell) == term).collect();
        if cells.is_empty() {
            continue;
        }
        let shown = cells.iter().take(SHOWN);
        let mut evidence: Vec<String> =
            shown.map(|cell| format!("{}: {}", cell.id, terms(report, cell))).collect();
        let changes = report.crossovers.iter().filter(|row| term.ends_at().contains(&row.what));
        evidence.extend(changes.filter_map(change).take(SHOWN));
        findings.push(Finding {
            rule: term.rule().to_owned(),
            severity: Severity::Ok,
            symptom: format!("{}, and nothing was measured", meaning(&cells)),
            regime: term.regime().to_owned(),
            evidence,
            next: term.next().to_owned(),
            response: term.response().to_owned(),
            cells: cells.iter().map(|cell| cell.id.clone()).collect(),
        });
    }
    findings
}

/// What a predicted time promises.
fn meaning(cells: &[&CellResult]) -> &'static str {
    if cells.iter().any(|cell| cell.group.is_some()) {
        "the floors of each GPU and its collectives added up: engines that overlap the two may be faster"
    } else if cells.iter().any(|cell| cell.distinct_experts.is_some()) {
        "an expectation by the data sheet: a step that meets fewer experts is faster"
    } else {
        "a floor by the data sheet: no engine with products in these formats is faster"
    }
}

/// Where another term takes over, if it does.
fn change(row: &Crossover) -> Option<String> {
    let value = row.value?;
    Some(match row.what {
        CrossoverKind::CriticalBatchSize => {
            format!(
                "{}: from batch {:.0} on the arithmetic takes longer (KV aside)",
                row.explanation,
                value.ceil()
            )
        }
        _ => row.explanation.clone(),
    })
}

fn too_large<'a>(cells: impl Iterator<Item = &'a CellResult>) -> Option<Finding> {
    let flag = |cell: &'a CellResult| {
        let flag = cell.flags.iter().find(|flag| matches!(flag, Cause::DoesNotFit { .. }))?;
        Some((cell.id.clone(), flag.to_string()))
    };
    let found: Vec<(String, String)> = cells.filter_map(flag).collect();
    let (first, _) = found.first()?;
    let mut evidence: Vec<String> =
        found.iter().take(SHOWN).map(|(id, why)| format!("{id}: {why}")).collect();
    if found.len() > SHOWN {
        evidence.push(format!("and {} more", counted(found.len() - SHOWN, "cell")));
    }
    Some(Finding {
        rule: "does_not_fit".to_owned(),
        severity: Severity::Problem,
        symptom: format!("out of memory in {}, {first} first", counted(found.len(), "predicted cell")),
        regime: "out of memory: these floors are those of a device with more".to_owned(),
        evidence,
        next: "the same with --dtype, --kv-dtype or --tensor-parallel-size that fit".to_owned(),
        response: "fewer bytes a weight or a position, a smaller batch or context, or more GPUs".to_owned(),
        cells: found.into_iter().map(|(id, _)| id).collect(),
    })
}

/// What a floor is made of: `4.64 ms: weights 15.0 GB (97 %), KV 537 MB (3 %); arithmetic would take 17.4 µs`.
fn terms(report: &Report, cell: &CellResult) -> String {
    let floor = cell.predicted_ns.unwrap_or_default();
    let (bytes, all) = (&cell.bytes, cell.bytes.ideal().as_f64().max(1.0));
    let share = |what: &str, part: Bytes| format!("{what} {part} ({:.0} %)", part.as_f64() / all * 100.0);
    let kv = bytes.kv_read + bytes.kv_write;
    let memory = format!("{}, {}", share("weights", bytes.weights), share("KV", kv));
    let exchanged = cell.group.as_ref().map_or_else(String::new, exchanged);
    let of_model = |sheet| Roof::of_model(sheet, cell.dtype, &report.model.architecture);
    let roof = report.datasheet.as_ref().map(of_model);
    let reading = roof.as_ref().map(|roof| bytes.ideal().at(roof.bandwidth));
    let computing = roof.as_ref().and_then(|roof| {
        let peak = roof.peak.as_ref()?;
        Some(format!("{} at {} ({})", Flops(cell.flops).at(peak.rate), peak.rate, peak.dtype))
    });
    match (cell.bound, reading, computing) {
        (Some(Bound::Compute), Some(reading), Some(computing)) => {
            let tokens = cell.batch * cell.phase.new_tokens(cell.context);
            format!(
                "{}: {tokens} tokens take {computing}; reading {memory} takes {reading}{exchanged}",
                Nanos(floor)
            )
        }
        (_, _, Some(computing)) => {
            format!("{}: {memory}; arithmetic takes {computing}{exchanged}", Nanos(floor))
        }
        _ => format!("{}: {memory}{exchanged}", Nanos(floor)),
    }
}

/// `; collectives take 6.36 µs at the speed of the link, 2.95 ms with NCCL 2.29.2`.
fn exchanged(step: &GroupStep) -> String {
    let Some(link) = step.collectives_ns else { return "; communication time is not modelled".to_owned() };
    let measured = step.measured.iter().map(|row| format!(", {} with {}", Nanos(row.all_reduces_ns), row.by));
    format!("; collectives take {} at the speed of the link{}", Nanos(link), measured.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::explain;
    use crate::samples;
    use hbmark_core::result::Phase;

    #[test]
    fn a_prediction_is_explained_by_its_largest_term_and_what_would_help() {
        let report: Report = samples::saved("predict-h100");
        let findings = explain(&report);
        let rules: Vec<&str> = findings.iter().map(|finding| finding.rule.as_str()).collect();
        assert_eq!(rules, ["floor_of_weights", "floor_of_arithmetic"]);
        let [weights, arithmetic] = findings.as_slice() else { unreachable!() };
        // 15.0 GB of weights and 67 MB of KV at 3.35 TB/s; 15.3 GFLOP at 989 TFLOP/s.
        samples::says(weights, "weights 15.0 GB (100 %), KV 67.2 MB (0 %)");
        samples::says(weights, "15.4 µs at 989 TFLOP/s (bf16)");
        assert!(weights.evidence.iter().any(|line| line.contains("more KV than weights")));
        assert!(weights.cells.iter().all(|cell| cell.starts_with("decode/")));
        assert!(arithmetic.cells.iter().all(|cell| cell.starts_with("prefill/")));
        samples::says(arithmetic, "512 tokens take 7.29 ms");
    }

    #[test]
    fn a_group_is_explained_with_what_it_exchanges() {
        let report: Report = samples::saved("predict-70b-8-h200");
        let findings = explain(&report);
        let weights = findings.iter().find(|finding| finding.rule == "floor_of_weights").unwrap();
        let evidence = &weights.evidence[0];
        assert!(
            evidence.contains("; collectives take ") && evidence.contains(" with NCCL 2.29.2"),
            "{evidence}"
        );
    }

    #[test]
    fn a_step_that_waits_for_the_link_is_not_blamed_on_its_arithmetic() {
        let mut report: Report = samples::saved("predict-70b-8-h200");
        let cell = report.cells.iter_mut().find(|cell| cell.phase == Phase::Prefill).unwrap();
        let id = cell.id.clone();
        let step = cell.group.as_mut().unwrap();
        step.collectives_ns = Some(3.0 * step.stages_ns.iter().sum::<f64>());
        let findings = explain(&report);
        let rule = |cell: &String| &findings.iter().find(|found| found.cells.contains(cell)).unwrap().rule;
        assert_eq!(rule(&id), "floor_of_collectives");
        let found = findings.iter().find(|found| found.rule == "floor_of_collectives").unwrap();
        samples::says(found, "; collectives take ");
        assert!(found.response.contains("a faster link"), "{found:?}");
    }

    #[test]
    fn what_does_not_fit_comes_first() {
        let mut report: Report = samples::saved("predict-h200");
        let cell = report.cells.iter_mut().find(|cell| cell.phase == Phase::Decode).unwrap();
        cell.bytes.kv_read = Bytes(cell.bytes.weights.0 * 2);
        cell.flags.push(Cause::DoesNotFit {
            needed_bytes: Bytes(200_000_000_000),
            device_bytes: Bytes(141_000_000_000),
            usable_share: 0.9,
        });
        let id = cell.id.clone();
        let findings = explain(&report);
        assert_eq!((findings[0].rule.as_str(), findings[0].severity), ("does_not_fit", Severity::Problem));
        assert_eq!(findings[0].cells, std::slice::from_ref(&id));
        let kv = findings.iter().find(|finding| finding.rule == "floor_of_kv").unwrap();
        assert_eq!(kv.cells[0], id);
        assert!(kv.response.contains("--kv-dtype") && kv.response.contains("up to the number of KV heads"));
    }
}
