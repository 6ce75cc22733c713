//! The plan of a confirming run: the nodes of the suspects once more, and healthy nodes beside them, by which the day is told apart from a GPU.

use std::collections::{BTreeMap, BTreeSet};

use crate::nodes::Node;
use crate::plan::Plan;
use crate::result::{FindingKind, FleetReport, State};

/// Healthy nodes at the least, where there are any: eight GPUs of one node share its luck.
const LEAST_CONTROLS: usize = 2;

/// Findings that ask for a second run.
const SUSPICIONS: [FindingKind; 6] = [
    FindingKind::GpuSuspect,
    FindingKind::NodeSuspect,
    FindingKind::RackSuspect,
    FindingKind::GpuUnstable,
    FindingKind::UnstableOnce,
    FindingKind::GpuChanged,
];

/// The same plan over the nodes of suspects and as many controls, whose GPUs lie nearest to the fleet's median. `None` without a suspect.
///
/// Whole nodes are run, as in the first run: GPUs of a node share air and power.
pub fn confirming(report: &FleetReport, plan: Plan) -> Option<(Plan, Vec<Node>)> {
    let mut racks: BTreeMap<&str, Option<&str>> = BTreeMap::new();
    let mut worst: BTreeMap<&str, f64> = BTreeMap::new();
    let mut healthy: BTreeSet<&str> = BTreeSet::new();
    for row in &report.gpus {
        racks.insert(&row.node, row.rack.as_deref());
        healthy.insert(&row.node);
        let far = row.values.iter().filter_map(|value| value.effect).map(f64::abs).fold(0.0, f64::max);
        let known = worst.entry(&row.node).or_default();
        *known = known.max(far);
    }
    for row in report.gpus.iter().filter(|row| row.state != State::Ok) {
        healthy.remove(row.node.as_str());
    }
    let mut suspects: BTreeSet<&str> = BTreeSet::new();
    for finding in report.findings_of(&SUSPICIONS) {
        match (&finding.node, &finding.rack) {
            (Some(node), _) => {
                suspects.insert(node);
            }
            (None, Some(rack)) => suspects
                .extend(racks.iter().filter(|(_, of)| **of == Some(rack.as_str())).map(|(node, _)| *node)),
            (None, None) => {}
        }
    }
    if suspects.is_empty() {
        return None;
    }
    let mut controls: Vec<&str> = healthy.difference(&suspects).copied().collect();
    controls.sort_by(|a, b| worst[a].total_cmp(&worst[b]).then(a.cmp(b)));
    controls.truncate(suspects.len().max(LEAST_CONTROLS));
    let nodes: BTreeSet<&str> = suspects.into_iter().chain(controls).collect();
    let node = |name: &str| Node {
        name: name.to_owned(),
        rack: racks.get(name).copied().flatten().map(str::to_owned),
    };
    let confirms = Some(report.digest());
    Some((Plan { confirms, ..plan }, nodes.into_iter().map(node).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folder::Reading;
    use crate::result::Settings;
    use crate::simulation::{Fault, Simulated, node_name};
    use crate::verdict::verdict;

    #[test]
    fn suspects_are_run_again_with_healthy_nodes_beside_them() {
        let plan = Plan::open("quick-ceiling").unwrap();
        let simulated = Simulated::new(512, 2, Some(Fault::SlowGpu(0.1)));
        let reading = |runs| Reading { runs, ..Reading::default() };
        let report = verdict(reading(simulated.runs()), &Settings::default(), &[]);
        let (again, nodes) = confirming(&report, plan.clone()).unwrap();
        assert_ne!(again.digest(), plan.digest());
        assert_eq!(nodes.len(), 3);
        assert!(nodes.iter().any(|node| node.name == node_name(simulated.victim() / 8)));
        assert!(nodes.iter().all(|node| node.rack.is_some()));
        let healthy = Simulated { fault: None, ..simulated };
        let report = verdict(reading(healthy.runs()), &Settings::default(), &[]);
        assert_eq!(confirming(&report, plan), None);
    }
}
