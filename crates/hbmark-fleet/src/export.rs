//! What monitoring reads: Nagios' line, Prometheus' text, JUnit's XML.
//!
//! Enters: a [`FleetReport`]. Leaves: text. Names of nodes and GPUs are untrusted and escaped in each.

use std::fmt::Write as _;

use crate::document::{headline, place};
use crate::result::{Finding, FindingKind, FleetReport, GpuRow, Level, State};

/// The line of a Nagios plugin, with counts as performance data.
pub fn nagios(report: &FleetReport) -> String {
    let mut line = format!("HBMARK FLEET {}", headline(report));
    let worst = report.findings.iter().find(|finding| finding.kind.level() > Level::Ok);
    if let Some(finding) = worst {
        let _ = write!(line, "; {} {}", finding.kind.code(), place(finding));
    }
    // The bar begins the performance data.
    let mut line = line.replace(['|', '\n'], " ");
    line.push_str(" |");
    for state in State::ALL {
        let _ = write!(line, " {}={}", state_label(state), report.count(state));
    }
    line
}

fn state_label(state: State) -> String {
    state.word().to_lowercase().replace(' ', "_")
}

/// Text for the textfile collector of node_exporter: without timestamps, which it refuses; the time is a gauge of its own. Labels are
/// those of dcgm-exporter (`Hostname`, `UUID`, `pci_bus_id`, `modelName`), so that its series can be joined.
pub fn prometheus(report: &FleetReport, written_at: u64) -> String {
    let mut text = String::new();
    let mut gauge = |name: &str, help: &str, samples: Vec<(String, f64)>| {
        if samples.is_empty() {
            return;
        }
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} gauge");
        for (labels, value) in samples {
            let braces = if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
            let _ = writeln!(text, "{name}{braces} {value}");
        }
    };
    gauge(
        "hbmark_fleet_written_time_seconds",
        "When this file was written, in seconds of Unix time.",
        vec![(String::new(), written_at as f64)],
    );
    gauge(
        "hbmark_fleet_level",
        "The worst finding as an exit code of Nagios: 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN.",
        vec![(String::new(), f64::from(report.level().nagios()))],
    );
    gauge(
        "hbmark_fleet_gpus",
        "GPUs by state.",
        State::ALL
            .iter()
            .map(|state| (format!("state=\"{}\"", state_label(*state)), report.count(*state) as f64))
            .collect(),
    );
    gauge(
        "hbmark_fleet_gpu_state",
        "1 for each GPU, with its state as a label.",
        report
            .gpus
            .iter()
            .map(|row| (format!("{},state=\"{}\"", labels(row), state_label(row.state)), 1.0))
            .collect(),
    );
    let values = |of: &dyn Fn(&crate::result::GpuValue) -> Option<f64>| -> Vec<(String, f64)> {
        let each = report.gpus.iter().flat_map(|row| row.values.iter().map(move |value| (row, value)));
        each.filter_map(|(row, value)| {
            let metric = label(&value.metric.to_string());
            Some((format!("{},metric=\"{metric}\"", labels(row)), of(value)?))
        })
        .collect()
    };
    gauge(
        "hbmark_fleet_gpu_value",
        "Median over fresh processes: bytes per second, FLOP per second, or nanoseconds of a step.",
        values(&|value| Some(value.value)),
    );
    gauge(
        "hbmark_fleet_gpu_effect_ratio",
        "Speed relative to the fleet's median, less one.",
        values(&|value| value.effect),
    );
    gauge(
        "hbmark_fleet_missing_gpus",
        "GPUs of a node that were expected and left no result.",
        missing_by_node(report),
    );
    text
}

fn missing_by_node(report: &FleetReport) -> Vec<(String, f64)> {
    let mut nodes = std::collections::BTreeMap::new();
    for row in &report.missing {
        *nodes.entry(row.node.as_str()).or_insert(0) += row.count;
    }
    nodes
        .into_iter()
        .map(|(node, count)| (format!("Hostname=\"{}\"", label(node)), f64::from(count)))
        .collect()
}

fn labels(row: &GpuRow) -> String {
    let pci = row.pci_bus_id.as_deref().unwrap_or_default();
    format!(
        "Hostname=\"{}\",UUID=\"{}\",pci_bus_id=\"{}\",modelName=\"{}\"",
        label(&row.node),
        label(&row.gpu),
        label(pci),
        label(&row.device)
    )
}

/// A label's value: backslash, quote and line feed are escaped.
fn label(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// How a case of JUnit ends that does not pass.
#[derive(Clone, Copy)]
enum CaseEnd {
    Failure,
    Error,
}

/// Checks of each GPU, the findings that fail them, and how such a case ends.
const CHECKS: [(&str, CaseEnd, &[FindingKind]); 4] = [
    ("result", CaseEnd::Error, &[FindingKind::GpuFailed, FindingKind::GpuTooFew]),
    (
        "speed",
        CaseEnd::Failure,
        &[
            FindingKind::GpuSlow,
            FindingKind::GpuSuspect,
            FindingKind::GpuBelowDatasheet,
            FindingKind::GpuChanged,
        ],
    ),
    ("steadiness", CaseEnd::Failure, &[FindingKind::GpuUnstable, FindingKind::GpuDisturbed]),
    ("hardware", CaseEnd::Failure, &[FindingKind::GpuWrongOutput, FindingKind::GpuMemoryFault]),
];

/// JUnit's XML: one case a GPU and check. Slow is a failure, missing is an error; what concerns a node, a rack or all of them has a case of
/// its own.
pub fn junit(report: &FleetReport) -> String {
    let mut by_gpu: std::collections::BTreeMap<&str, Vec<&Finding>> = std::collections::BTreeMap::new();
    for finding in &report.findings {
        by_gpu.entry(finding.gpu.as_deref().unwrap_or_default()).or_default().push(finding);
    }
    let (mut cases, mut tests, mut failures, mut errors) = (String::new(), 0, 0, 0);
    let mut case = |node: &str, name: &str, fault: Option<(CaseEnd, &str, &str)>| {
        tests += 1;
        let _ = write!(cases, "  <testcase classname=\"{}\" name=\"{}\"", xml(node), xml(name));
        match fault {
            None => cases.push_str("/>\n"),
            Some((end, kind, why)) => {
                let element = match end {
                    CaseEnd::Failure => {
                        failures += 1;
                        "failure"
                    }
                    CaseEnd::Error => {
                        errors += 1;
                        "error"
                    }
                };
                let _ = writeln!(
                    cases,
                    "><{element} type=\"{}\" message=\"{}\"/></testcase>",
                    xml(kind),
                    xml(why)
                );
            }
        }
    };
    for row in &report.gpus {
        let found = by_gpu.get(row.gpu.as_str()).map_or(&[][..], Vec::as_slice);
        for (check, end, kinds) in CHECKS {
            let fault = found.iter().find(|f| kinds.contains(&f.kind) && f.kind.level() > Level::Ok);
            let name = format!("{} {check}", row.gpu);
            let fault = fault.map(|f| (end, f.kind.code(), f.evidence.as_str()));
            case(&row.node, &name, fault.as_ref().map(|(end, code, why)| (*end, code.as_str(), *why)));
        }
    }
    for row in &report.missing {
        for index in 0..row.count {
            let gpu = row.gpu.clone().unwrap_or_else(|| format!("missing GPU {}", index + 1));
            case(&row.node, &format!("{gpu} result"), Some((CaseEnd::Error, "gpu_missing", &row.why)));
        }
    }
    for finding in report.findings.iter().filter(|f| f.gpu.is_none() && f.kind != FindingKind::GpuMissing) {
        if finding.kind.level() > Level::Ok {
            let (code, node) = (finding.kind.code(), finding.node.as_deref().unwrap_or("fleet"));
            case(
                node,
                &format!("{code} {}", place(finding)),
                Some((CaseEnd::Failure, &code, &finding.evidence)),
            );
        }
    }
    format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuite name=\"hbmark fleet\" tests=\"{tests}\" failures=\"{failures}\" \
         errors=\"{errors}\">\n{cases}</testsuite>\n"
    )
}

fn xml(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in hbmark_core::input::plain(text).chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            // Characters that XML 1.0 has no place for.
            '\u{fffe}' | '\u{ffff}' => escaped.push('\u{fffd}'),
            c => escaped.push(c),
        }
    }
    escaped
}

/// Findings as JSON, one a line, for log pipelines.
pub fn json_lines(report: &FleetReport) -> String {
    let mut text = String::new();
    for finding in &report.findings {
        let mut value = serde_json::json!({
            "at": report.at,
            "level": finding.kind.level(),
            "check": "hbmark fleet",
        });
        if let (Some(object), Ok(serde_json::Value::Object(found))) =
            (value.as_object_mut(), serde_json::to_value(finding))
        {
            object.extend(found);
        }
        let _ = writeln!(text, "{value}");
    }
    text
}

#[cfg(test)]
mod tests;
