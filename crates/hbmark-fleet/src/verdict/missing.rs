//! GPUs that were expected and left nothing: a class of its own. Where a node's record says why, they failed; else they are missing.

use std::collections::{BTreeMap, BTreeSet};

use super::Fleet;
use super::names::common;
use crate::folder::NodeRecord;
use crate::plan::Manifest;
use crate::result::{Finding, FindingKind, FleetReport, GpuRow, MissingRow, State};

/// Findings about what is not there, and rows of GPUs that failed.
#[derive(Default)]
pub(super) struct Absent {
    pub findings: Vec<Finding>,
    pub failed: Vec<GpuRow>,
}

pub(super) fn find(
    fleet: &Fleet<'_>,
    manifest: Option<&Manifest>,
    records: &[&NodeRecord],
    past: &[FleetReport],
) -> (Vec<MissingRow>, Absent) {
    let mut seen: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for gpu in fleet.gpus.iter().filter(|gpu| !gpu.runs.is_empty()) {
        // A GPU that moved between two runs was found in both nodes.
        for run in &gpu.runs {
            seen.entry(run.node.as_str()).or_default().insert(gpu.id);
        }
    }
    let mut absent = Absent::default();
    let racks: BTreeMap<&str, Option<String>> = manifest
        .iter()
        .flat_map(|manifest| &manifest.nodes)
        .map(|expected| (expected.node.name.as_str(), expected.node.rack.clone()))
        .collect();
    for record in records {
        for task in record.tasks.iter().filter(|task| task.finished == 0 && !task.failures.is_empty()) {
            if seen.entry(record.node.as_str()).or_default().insert(&task.device) {
                let rack = racks.get(record.node.as_str()).cloned().flatten();
                absent.failed.push(failed_row(record, task, rack.clone()));
                absent.findings.push(Finding {
                    rack,
                    node: Some(record.node.clone()),
                    gpu: Some(task.device.clone()),
                    slot: Some(task.slot),
                    ..common(FindingKind::GpuFailed, format!("no result: {}", task.failures.join("; ")))
                });
            }
        }
    }
    let Some(manifest) = manifest else { return (Vec::new(), absent) };
    let expected: BTreeSet<&str> = manifest.nodes.iter().map(|node| node.node.name.as_str()).collect();
    for node in seen.keys().filter(|node| !expected.contains(*node)) {
        let evidence = format!("{} GPUs of a node that the manifest does not have", seen[node].len());
        absent
            .findings
            .push(Finding { node: Some((*node).to_owned()), ..common(FindingKind::Unexpected, evidence) });
    }
    let latest = past.iter().max_by(|a, b| a.at.cmp(&b.at));
    let mut missing = Vec::new();
    for node in &manifest.nodes {
        let name = node.node.name.as_str();
        let found = seen.get(name).map_or(0, BTreeSet::len);
        let Some(count) = (node.gpus as usize).checked_sub(found).filter(|count| *count > 0) else {
            continue;
        };
        let known = |gpu: &str| seen.get(name).is_some_and(|gpus| gpus.contains(gpu));
        let record = records.iter().find(|record| record.node == name);
        let of = |gpu: Option<&str>, slot: Option<u32>, count: usize, why: &str| MissingRow {
            node: name.to_owned(),
            rack: node.node.rack.clone(),
            gpu: gpu.map(str::to_owned),
            slot,
            count: u32::try_from(count).unwrap_or(u32::MAX),
            why: why.to_owned(),
        };
        let mut rows: Vec<MissingRow> = record
            .iter()
            .flat_map(|record| &record.tasks)
            .filter(|task| !known(&task.device))
            .map(|task| of(Some(&task.device), Some(task.slot), 1, "its processes left no result yet"))
            .take(count)
            .collect();
        let why = match record {
            None if found == 0 => "nothing of this node: it never started, or could write nothing",
            None => "no record of the node: it was stopped, or could not write",
            Some(_) => "the node's driver did not show it",
        };
        let gone = latest.iter().flat_map(|day| &day.gpus).filter(|row| {
            row.node == name && !known(&row.gpu) && rows.iter().all(|r| r.gpu.as_ref() != Some(&row.gpu))
        });
        let room = count - rows.len();
        let gone: Vec<MissingRow> = gone.take(room).map(|row| of(Some(&row.gpu), row.slot, 1, why)).collect();
        rows.extend(gone);
        if rows.len() < count {
            rows.push(of(None, None, count - rows.len(), why));
        }
        missing.extend(rows);
    }
    for row in &missing {
        absent.findings.push(Finding {
            rack: row.rack.clone(),
            node: Some(row.node.clone()),
            gpu: row.gpu.clone(),
            slot: row.slot,
            ..common(FindingKind::GpuMissing, format!("{} expected: {}", row.count, row.why))
        });
    }
    (missing, absent)
}

fn failed_row(record: &NodeRecord, task: &crate::folder::TaskRecord, rack: Option<String>) -> GpuRow {
    GpuRow {
        gpu: task.device.clone(),
        state: State::Failed,
        node: record.node.clone(),
        rack,
        slot: Some(task.slot),
        serial: None,
        pci_bus_id: None,
        device: "unknown".into(),
        processes: 0,
        confirming: 0,
        values: Vec::new(),
    }
}
