//! The page of a serving result: what was found, the latencies, the curve over load, the run over time, and how to run it again.
//!
//! Enters: a serving result and what was found in it. Leaves: one HTML document. Of many points a few are drawn in full; every one is in the
//! tables and on the curve.

use super::figure::{numbers, table, words};
use super::frame::{self, flat, pairs, plain_value};
use super::node::{Node, el};
use super::{bars, latency_vs_load, percentiles, steps};
use crate::output::kinds::serving::{
    curve, head, matrix_lines, point_lines, remarks, search_lines, validity,
};
use hbmark_core::result::serving::{Point, ServeKind, ServeReport, Validity};
use hbmark_core::result::{Finding, Severity};

/// Points that are drawn in full.
const DRAWN: usize = 6;

/// The whole document.
#[must_use]
pub fn document(report: &ServeReport, found: &[Finding]) -> String {
    let mut main = el("main").child(header(report)).child(findings(report, found));
    if let Some(cold) = &report.cold_start {
        main = main.child(bars::cold(cold).render());
    } else {
        let drawn = drawn(&report.points);
        let note = (drawn.len() < report.points.iter().filter(|p| p.result.is_some()).count()).then(|| {
            let names: Vec<&str> = drawn.iter().map(|p| p.label.as_str()).collect();
            el("p").class("identity").text(format!(
                "Of {} points these are drawn in full below: {}.",
                report.points.len(),
                names.join(", ")
            ))
        });
        main = main
            .child(latency_vs_load::figure(report).render())
            .children(note)
            .child(percentiles::figure(&drawn).render())
            .child(steps::figure(&drawn).render())
            .child(bars::loop_time(&drawn).render())
            .child(all_points(report))
            .child(gates(report));
    }
    let main = main.child(reproduce(report)).child(machine(report));
    frame::document(&report.model.name, "the JSON of the result", main)
}

/// The points worth a drawing of their own: all of a few; of many the last that held, the first that did not, and the ends.
fn drawn(points: &[Point]) -> Vec<&Point> {
    let run: Vec<&Point> = points.iter().filter(|p| p.result.is_some()).collect();
    if run.len() <= DRAWN {
        return run;
    }
    let held = |p: &&&Point| {
        p.result.as_ref().is_some_and(|r| r.validity == Validity::Valid && r.slo_met != Some(false))
    };
    let last_held = run.iter().rposition(|p| held(&p));
    let first_not = run.iter().position(|p| !held(&p));
    let mut chosen: Vec<usize> = Vec::new();
    // What one looks for stands first.
    for index in [last_held, first_not, Some(0), Some(run.len() - 1)].into_iter().flatten() {
        if !chosen.contains(&index) {
            chosen.push(index);
        }
    }
    chosen.into_iter().map(|i| run[i]).collect()
}

fn header(report: &ServeReport) -> Node {
    let mut lines = head(report).into_iter();
    // The first line names the model, which is the heading already, and what it is made of.
    let first = lines.next().unwrap_or_default();
    let made = first.split_once(" · ").map_or(first.clone(), |(_, rest)| rest.to_owned());
    let loud = (report.kind == ServeKind::ServeVirtual).then(|| {
        el("p")
            .class("notice")
            .text("VIRTUAL: the scheduler is real, the times of its steps are computed; nothing was measured")
    });
    let started = report.started_at.iter().map(|at| format!("started {at}"));
    el("header")
        .child(el("h1").text(report.model.name.as_str()))
        .children(
            std::iter::once(made)
                .chain(lines)
                .chain(started)
                .map(|line| el("p").class("identity").text(line)),
        )
        .children(loud)
}

/// One finding as a line.
fn line(finding: &Finding) -> String {
    let evidence = finding.evidence.first().map(|e| format!(" ({e})")).unwrap_or_default();
    format!(
        "{}: {}{evidence}. Measure next: {}. Do first: {}",
        finding.regime, finding.symptom, finding.next, finding.response
    )
}

/// What the numbers say, the worst first.
fn findings(report: &ServeReport, found: &[Finding]) -> Node {
    let run = report.points.iter().filter(|p| p.result.is_some()).count();
    let valid = report.points.iter().filter(|p| validity(p) == "ok").count();
    let summary = match &report.cold_start {
        Some(cold) => format!("{} launches of a process, timed from outside.", cold.launches.len()),
        None => format!("{run} of {} points were run, {valid} of them are valid.", report.points.len()),
    };
    let of = |worst: bool| -> Vec<String> {
        let bad = |f: &&Finding| (f.severity >= Severity::Warn) == worst;
        found.iter().filter(bad).map(line).collect()
    };
    let many = report.points.len() > 1;
    let (mut trouble, mut said) = (Vec::new(), Vec::new());
    for point in &report.points {
        let sound =
            validity(point) == "ok" && point.result.as_ref().is_some_and(|r| r.slo_met != Some(false));
        let name = |text: String| if many { format!("{}: {text}", point.label) } else { text };
        if sound { &mut said } else { &mut trouble }.extend(remarks(point).into_iter().map(name));
    }
    let searched = report.search.iter().flat_map(search_lines).collect();
    let matrix = report.matrix.iter().map(matrix_lines).collect();
    let single = match report.points.as_slice() {
        [point] => point_lines(point),
        _ => Vec::new(),
    };
    el("section")
        .attr("id", "findings")
        .child(el("h2").text("Findings"))
        .child(el("p").text(summary))
        .children(
            [
                ("What stands out", "warning", of(true)),
                ("What else was found", "", of(false)),
                ("Points that were rejected, and why", "warning", trouble),
                ("The highest rate", "", searched),
                ("Hypotheses", "", matrix),
                ("This load", "", single),
                ("About these points", "", said),
                ("About this machine and this run", "warning", report.warnings.clone()),
            ]
            .into_iter()
            .filter_map(|(title, class, lines)| frame::group(title, class, lines)),
        )
}

fn all_points(report: &ServeReport) -> Node {
    el("section")
        .attr("id", "points")
        .child(el("h2").text("Every point"))
        .child(table("", &curve(&report.points)))
}

fn gates(report: &ServeReport) -> Node {
    let section = el("section").attr("id", "gates").child(el("h2").text("Gates"));
    let all: Vec<(&Point, &hbmark_core::result::serving::Gate)> = report
        .points
        .iter()
        .filter_map(|p| Some((p, p.result.as_ref()?)))
        .flat_map(|(p, r)| r.gates.iter().map(move |g| (p, g)))
        .collect();
    if all.is_empty() {
        return section.child(el("p").class("absent").text("Nothing was run, so nothing was checked."));
    }
    let verdict = |passed: Option<bool>| match passed {
        Some(true) => "ok",
        Some(false) => "FAILED",
        None => "not judged",
    };
    let shown = [
        words("point", all.iter().map(|(p, _)| p.label.clone())),
        words("gate", all.iter().map(|(_, g)| g.name.to_string())),
        words("", all.iter().map(|(_, g)| verdict(g.passed).to_owned())),
        words("because", all.iter().map(|(_, g)| g.detail.clone())),
    ];
    section
        .child(el("p").text(
            "Checks of the measurement itself, point by point; one that fails makes its point INVALID.",
        ))
        .child(table("", &shown))
}

fn reproduce(report: &ServeReport) -> Node {
    let build = &report.environment.build;
    let revision = build.git_revision.as_deref().unwrap_or("unknown");
    let config = report.config.iter().map(|(key, value)| (key.clone(), plain_value(value))).collect();
    let mut section = el("section")
        .attr("id", "reproduce")
        .child(el("h2").text("To run it again"))
        .child(el("pre").attr("tabindex", "0").child(el("code").text(report.command.as_str())))
        .child(el("p").text(format!(
            "hbmark {} at revision {revision}, model hash {}",
            build.version, report.model.hash
        )))
        .child(pairs("Configuration", config));
    if let Some(point) = report.points.first() {
        section = section.child(pairs("Scheduler", flat(&point.scheduler)));
    }
    if !report.points.is_empty() {
        let seeds = vec![
            words("point", report.points.iter().map(|p| p.label.clone())),
            numbers("seed", report.points.iter().map(|p| p.seed.to_string())),
        ];
        section = section.child(el("details").child(el("summary").text("Seeds")).child(table("", &seeds)));
    }
    section.child(pairs("Model", flat(&report.model)))
}

fn machine(report: &ServeReport) -> Node {
    let mut section = el("section")
        .attr("id", "environment")
        .child(el("h2").text("Environment"))
        .child(pairs("Machine and build", flat(&report.environment)));
    if let Some(sheet) = &report.datasheet {
        section = section.child(pairs("Data sheet", flat(sheet)));
    }
    if let Some(capabilities) = &report.capabilities {
        section = section.child(pairs(&format!("Engine on {}", capabilities.device), flat(capabilities)));
    }
    section
}

#[cfg(test)]
pub(super) mod tests;
