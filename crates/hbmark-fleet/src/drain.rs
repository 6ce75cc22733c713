//! Commands that take a node out of service: printed for an operator, and never run.

use std::collections::BTreeMap;

use crate::nodes::is_name;
use crate::result::{FindingKind, FleetReport};

/// The reason of a drain is kept on one line by schedulers that show it.
const MAX_REASON: usize = 200;

/// Findings that a drain can rest on: confirmed, or beyond doubt without a comparison.
const GROUNDS: [FindingKind; 4] =
    [FindingKind::GpuSlow, FindingKind::NodeSlow, FindingKind::GpuWrongOutput, FindingKind::GpuMemoryFault];

/// One command a node for Slurm, with the reason, and the same for Kubernetes as a comment.
pub fn drain_commands(report: &FleetReport) -> Vec<String> {
    let mut reasons: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for finding in report.findings_of(&GROUNDS) {
        let Some(node) = finding.node.as_deref().filter(|node| is_name(node)) else { continue };
        let gpu = finding.gpu.as_ref().map_or_else(String::new, |gpu| format!(" {gpu}"));
        let slot = finding.slot.map_or_else(String::new, |slot| format!(" slot {slot}"));
        let effect = finding.effect.map_or_else(String::new, |effect| format!(" {:+.1} %", effect * 100.0));
        reasons.entry(node).or_default().push(format!("{}{gpu}{slot}{effect}", finding.kind.code()));
    }
    reasons
        .into_iter()
        .flat_map(|(node, reasons)| {
            // Between quotes of a shell: what is not plain is left out.
            let plain = |c: &char| c.is_ascii_alphanumeric() || " .,;:+-_%/".contains(*c);
            let reason: String = reasons.join("; ").chars().filter(plain).take(MAX_REASON).collect();
            [
                format!("scontrol update NodeName={node} State=DRAIN Reason=\"hbmark: {reason}\""),
                format!(
                    "# kubectl cordon {node} && kubectl label node {node} hbmark/verdict=slow --overwrite"
                ),
            ]
        })
        .collect()
}
