//! What another program's result says of its decode: how far each row is from its roofline, and what the checklist misses.
//!
//! Enters: an [`Imported`] result and what the user said beside it. Leaves: [`Finding`]s, what is wrong before the rest. A file has one time a
//! row and no samples of the machine beside it, so that a row far from its floor is given the measurement that tells its causes apart, and no
//! cause. Pure.

use super::checklist::of_foreign;
use super::diagnose::{EXPLAINED, explained, floor};
use super::finding::{Kind, Rule};
use super::import::{Imported, Placement, RooflinePlacement, UserOverrides};
use hbmark_core::result::{Bound, Finding, Severity};
use hbmark_core::units::{BytesPerSecond, Nanos};

/// The evidence in a placed row, if the rule matches.
type Detector = fn(&Placement) -> Option<String>;

const RULES: &[Rule<Detector>] = &[
    Rule {
        name: "import_memory_bound",
        kind: Kind::Regime,
        severity: Severity::Ok,
        symptom: "a token takes about as long as the bytes of its step",
        regime: "memory-bound decode",
        next: "hbmark predict with a smaller --dtype or --kv-dtype: what the same GPU could do with fewer bytes",
        response: "fewer bytes a token: quantise weights or KV, or raise the batch to share the weights",
        detect: |row| near_floor(row, Bound::Memory),
    },
    Rule {
        name: "import_compute_bound",
        kind: Kind::Regime,
        severity: Severity::Ok,
        symptom: "a token takes about as long as the arithmetic of its step",
        regime: "compute-bound decode: past the crossover",
        next: "the same with half the concurrency: the step should get shorter, tokens per second hardly less",
        response: "a larger batch no longer raises throughput; add devices or a faster matrix format",
        detect: |row| near_floor(row, Bound::Compute),
    },
    Rule {
        name: "import_far_from_floor",
        kind: Kind::Regime,
        severity: Severity::Note,
        symptom: "a token takes longer than the bytes or the arithmetic of its step",
        regime: "kernels, launches, scheduler or client: a file of times alone does not say which",
        next: "the same model, dtype, batch and context with hbmark run on that GPU, then hbmark ladder --external with this file",
        response: "none before that measurement: it gives the time of kernels, launches and scheduler apart",
        detect: far_from_floor,
    },
];

/// What the GPU could do, and how much of it the row did.
fn against_floor(row: &Placement) -> Option<(f64, String)> {
    let (cell, time) = (&row.cell, row.cell.tpot_ns?);
    let (floor, share) = (floor(cell)?, explained(cell)?);
    let rate =
        cell.achieved_bytes_per_s.map_or_else(String::new, |rate| format!(", {}", BytesPerSecond(rate)));
    let gpus = if row.gpus > 1 { format!("{} x ", row.gpus) } else { String::new() };
    let evidence = format!(
        "{} a token at batch {}, context {}{rate}; the floor on {gpus}{} is {}: {:.0} % of the time",
        Nanos(time),
        cell.batch,
        cell.context,
        row.device,
        Nanos(floor),
        share * 100.0
    );
    Some((share, evidence))
}

fn near_floor(row: &Placement, bound: Bound) -> Option<String> {
    let (share, evidence) = against_floor(row)?;
    (share >= EXPLAINED && row.cell.bound == Some(bound)).then_some(evidence)
}

fn far_from_floor(row: &Placement) -> Option<String> {
    let (share, evidence) = against_floor(row)?;
    (share < EXPLAINED).then_some(evidence)
}

/// What a result of another program says, with what `given` adds to it.
pub fn explain_import(imported: &Imported, given: &UserOverrides<'_>) -> Vec<Finding> {
    let placed = || {
        let rows = imported.result.rows.iter().zip(&imported.places);
        rows.filter_map(|(row, place)| match place {
            RooflinePlacement::Placed(placed) => Some((&row.label, &**placed)),
            RooflinePlacement::Asks(_)
            | RooflinePlacement::Contradicts(_)
            | RooflinePlacement::NoDecode(_) => None,
        })
    };
    let found = |rule: &Rule<Detector>| {
        let rows: Vec<(String, String)> =
            placed().filter_map(|(label, row)| Some((label.clone(), (rule.detect)(row)?))).collect();
        (!rows.is_empty()).then(|| rule.finding(&rows))
    };
    let mut findings: Vec<Finding> = RULES.iter().filter_map(found).collect();
    findings.extend(not_placed(imported));
    findings.extend(of_foreign(&imported.result, given, None).findings());
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    findings
}

/// What has to be said before a row can be held against its roofline.
fn not_placed(imported: &Imported) -> Option<Finding> {
    let missing = imported.missing();
    let rule = Rule {
        name: "import_not_on_roofline",
        kind: Kind::Regime,
        severity: Severity::Note,
        symptom: "the floor of a token is not known",
        regime: "what the roofline needs is not in the file",
        next: "the same command with these flags",
        response: "record it beside the file next time",
        detect: (),
    };
    let evidence = missing.iter().map(|missing| format!("{}: {}", missing.flag, missing.hint)).collect();
    (!missing.is_empty()).then(|| rule.finding_of_all(evidence))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::analysis::import;
    use hbmark_core::ledger::devices;
    use hbmark_core::model::{Dtype, test_shapes};

    fn imported(gpu: Option<&str>, batch: u64) -> Vec<Finding> {
        let file =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/foreign/vllm-serve-0.25.json");
        let mut result = import::read(&file).expect("a fixture").remove(0);
        // The shape of its model is none that ships.
        result.rows[0].setup.model = None;
        let architecture = test_shapes::smollm2_135m();
        let given = UserOverrides {
            gpu: gpu.map(|name| devices::find(name).expect("a row")),
            model: Some(&architecture),
            model_name: Some("a folder"),
            dtype: Some(Dtype::F16),
            batch: Some(batch),
            ..UserOverrides::default()
        };
        explain_import(&Imported::new(result, &given), &given)
    }

    #[test]
    fn a_row_far_from_its_floor_says_how_far_and_what_would_tell_why() {
        let findings = imported(Some("h100-sxm"), 2);
        let far = findings.iter().find(|f| f.rule == "import_far_from_floor").expect("11 ms for 250 MB");
        assert!(far.evidence[0].contains("11.2 ms a token at batch 2"), "{:?}", far.evidence);
        assert!(far.next.contains("hbmark ladder --external"), "{}", far.next);
        assert_eq!(far.cells.len(), 1);
        assert!(findings.is_sorted_by_key(|finding| std::cmp::Reverse(finding.severity)));
    }

    #[test]
    fn what_is_missing_is_asked_for_and_no_floor_is_invented() {
        let findings = imported(None, 2);
        let asked = findings.iter().find(|f| f.rule == "import_not_on_roofline").expect("no GPU is known");
        assert!(asked.evidence.iter().any(|line| line.starts_with("--gpu: ")), "{:?}", asked.evidence);
        assert!(!findings.iter().any(|f| f.rule == "import_far_from_floor"));
    }
}
