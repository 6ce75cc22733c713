//! The page of a run around its plots: what was run and found, and how to run it again.
//!
//! Enters: a report. Leaves: one HTML document.

use super::figure::table;
use super::frame::{self, flat, pairs, plain_value};
use super::node::{Node, el};
use super::palette::Palette;
use super::{batch, blocks, context, roofline, telemetry, waterfall};
use crate::output::document::facts;
use crate::output::kinds::run::{
    cold, crossover_line, device_line, fit_line, of_cells, protocol_text, remarks,
};
use crate::output::metrics::Unit;
use crate::output::text::single;
use crate::output::{External, kinds};
use hbmark_core::result::{Phase, Report, ReportKind, Status};
use hbmark_core::units::{BytesPerSecond, FlopsPerSecond};

/// The whole document.
#[must_use]
pub fn document(report: &Report, externals: &[External]) -> String {
    let palette = Palette::of(report);
    let taken = blocks::taken(report);
    // A prediction has no steps whose time went anywhere, no blocks and no telemetry.
    let measured = report.kind != ReportKind::Predict;
    let ladder = measured.then(|| waterfall::figure(report, &palette).render());
    let over_time =
        measured.then(|| [blocks::figure(&palette, &taken).render(), telemetry::figure(&taken).render()]);
    let main = el("main")
        .child(header(report))
        .child(findings(report))
        .child(roofline::figure(report, &palette, externals).render())
        .children(ladder)
        .child(context::figure(report, &palette).render())
        .child(batch::figure(report, &palette).render())
        .child(all_cells(report))
        .children(operations(report))
        .children(over_time.into_iter().flatten())
        .children(once_per_process(report))
        .child(reproduce(report))
        .child(machine(report));
    frame::document(&report.model.name, "result.json", main)
}

fn header(report: &Report) -> Node {
    let model = &report.model;
    let mut lines = vec![format!(
        "{} · {:.3} B parameters · {} of weights",
        model.source,
        model.parameters as f64 / 1e9,
        model.weight_bytes
    )];
    lines.extend(device_line(report));
    if let Some(c) = &report.ceilings {
        lines.push(format!(
            "read ceiling measured in this run: {} ({} to {})",
            BytesPerSecond(c.read_bytes_per_s.median),
            BytesPerSecond(c.read_bytes_per_s.low),
            BytesPerSecond(c.read_bytes_per_s.high)
        ));
    }
    if let Some(sheet) = &report.datasheet {
        lines.push(format!(
            "data sheet: {} · {}",
            sheet.product,
            BytesPerSecond(sheet.bandwidth_bytes_per_s)
        ));
    }
    lines.extend(report.started_at.iter().map(|at| format!("started {at}")));
    let protocol = protocol_text(report)
        .map(|(text, loud)| el("p").class(if loud { "notice" } else { "identity" }).text(text));
    let remarks = [("note", &report.note), ("hypothesis", &report.hypothesis)];
    let remarks = remarks.into_iter().filter_map(|(title, value)| {
        Some(el("p").class("identity").text(format!("{title}: {}", value.as_ref()?)))
    });
    el("header")
        .child(el("h1").text(model.name.as_str()))
        .children(lines.into_iter().map(|line| el("p").class("identity").text(line)))
        .children(remarks)
        .children(protocol)
}

/// What the numbers say together, the worst first.
fn findings(report: &Report) -> Node {
    let section = el("section").attr("id", "findings").child(el("h2").text("Findings"));
    let measured = report.cells.iter().filter(|c| c.step_ns.is_some()).count();
    let not_ok: Vec<&hbmark_core::result::CellResult> =
        report.cells.iter().filter(|c| !matches!(c.status, Status::Ok | Status::Predicted)).collect();
    let summary = match (report.kind, not_ok.len()) {
        (ReportKind::Predict, _) => format!("{} cells predicted; nothing was measured.", report.cells.len()),
        (_, 0) => format!("{measured} of {} cells measured, all ok.", report.cells.len()),
        (_, bad) => format!("{measured} of {} cells measured, {bad} not simply ok.", report.cells.len()),
    };
    let section = section.child(el("p").text(summary));
    let (decode, prefill): (Vec<_>, Vec<_>) = report.ladders.iter().partition(|l| l.phase == Phase::Decode);
    let stories = decode.into_iter().chain(prefill).map(|ladder| ladder.story.clone()).collect();
    let fits = report.fits.iter().map(fit_line).collect();
    let crossovers = report.crossovers.iter().map(crossover_line).collect();
    let groups: [(&str, &str, Vec<String>); 5] = [
        ("About this machine and this run", "warning", report.warnings.clone()),
        ("About these cells", "warning", remarks(&report.cells)),
        ("Where the time goes", "", stories),
        ("Fitted over the grid", "", fits),
        ("Crossovers", "", crossovers),
    ];
    section.children(groups.into_iter().filter_map(|(title, class, lines)| frame::group(title, class, lines)))
}

fn all_cells(report: &Report) -> Node {
    let section = el("section").attr("id", "cells").child(el("h2").text("Every cell"));
    if report.cells.is_empty() {
        return section.child(el("p").class("absent").text("This result has no cells."));
    }
    let (constants, columns) = of_cells(&report.cells);
    let same = (!constants.is_empty()).then(|| el("p").text(format!("In all cells: {}.", facts(&constants))));
    section.children(same).child(table("", &columns))
}

fn operations(report: &Report) -> Option<Node> {
    let tables = kinds::operations(report);
    if tables.is_empty() {
        return None;
    }
    let section = el("section").attr("id", "operations").child(el("h2").text("Operations of a step"));
    let count = tables.len();
    let each = tables.into_iter().flat_map(|t| {
        [table(&t.title.unwrap_or_default(), &t.columns), el("p").text(t.closing.unwrap_or_default())]
    });
    let fold = el("details").child(el("summary").text(match count {
        1 => "One step, operation by operation".to_owned(),
        many => format!("{many} steps, operation by operation"),
    }));
    Some(
        section
            .child(el("p").text("From an untimed pass of its own, operation by operation."))
            .child(fold.children(each)),
    )
}

fn once_per_process(report: &Report) -> Option<Node> {
    if report.cold.is_empty() {
        return None;
    }
    let section = el("section").attr("id", "cold").child(el("h2").text("Cold, once per process"));
    Some(section.child(table("", &cold(report))))
}

fn reproduce(report: &Report) -> Node {
    let mut section = el("section")
        .attr("id", "reproduce")
        .child(el("h2").text("To run it again"))
        .child(el("pre").attr("tabindex", "0").child(el("code").text(report.command.as_str())));
    let build = &report.environment.build;
    let revision = build.git_revision.as_deref().unwrap_or("unknown");
    section =
        section.child(el("p").text(format!(
            "hbmark {} at revision {revision}, model hash {}",
            build.version, report.model.hash
        )));
    let config = report.config.iter().map(|(key, value)| (key.clone(), plain_value(value))).collect();
    section = section.child(pairs("Configuration", config));
    if let Some(protocol) = &report.protocol {
        section = section.child(pairs("Protocol", flat(protocol)));
    }
    section.child(pairs("Model", flat(&report.model)))
}

fn machine(report: &Report) -> Node {
    let mut section = el("section")
        .attr("id", "environment")
        .child(el("h2").text("Environment"))
        .child(pairs("Machine and build", flat(&report.environment)));
    if let Some(c) = &report.ceilings {
        let mut rows = vec![
            ("read".to_owned(), BytesPerSecond(c.read_bytes_per_s.median).to_string()),
            ("copy".to_owned(), BytesPerSecond(c.copy_bytes_per_s.median).to_string()),
            ("triad".to_owned(), BytesPerSecond(c.triad_bytes_per_s.median).to_string()),
        ];
        rows.extend(
            c.gemm_flops_per_s
                .iter()
                .map(|(dtype, peak)| (format!("GEMM {dtype}"), FlopsPerSecond(peak.median).to_string())),
        );
        rows.extend(c.launch_ns.map(|l| ("launch".to_owned(), single(Unit::Nanoseconds, l.median))));
        rows.push(("working set".to_owned(), c.working_set_bytes.to_string()));
        rows.push(("read by".to_owned(), c.read_configuration.clone()));
        section = section.child(pairs("Ceilings measured in this run", rows));
    }
    if let Some(sheet) = &report.datasheet {
        section = section.child(pairs("Data sheet", flat(sheet)));
    }
    for capabilities in &report.capabilities {
        section = section.child(pairs(&format!("Engine on {}", capabilities.device), flat(capabilities)));
    }
    section
}
