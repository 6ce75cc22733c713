//! The page of a serving result: what was found, latency over load, the run over time, and what it takes to run it again. Of many points a
//! few are drawn in full; all are in the tables and on the curve.

use super::{
    PointVerdict, curve, held, latency_vs_load, notes, percentiles, point_verdict, reasons, served, setup,
    timeline, times,
};
use super::{matrix_lines, point_lines, steps_of_search, verdict, warnings};
use crate::analysis::distinct;
use crate::analysis::words::counted;
use crate::output::document::{Block, Document, Line, Tone, numbers, words};
use crate::output::kinds::headline;
use crate::output::kinds::provenance::{self, flat, pairs};
use hbmark_core::result::serving::{Point, ServeKind, ServeReport, Validity};
use hbmark_core::result::{Finding, Severity};

/// Points that are drawn in full.
const DRAWN: usize = 6;

/// The page, with what was found in the result.
pub fn page(report: &ServeReport, found: &[Finding]) -> Document {
    let mut page = Document::new(headline::serving_title(report));
    page.figures(headline::serving(report));
    page.lines(header(report));
    findings(&mut page, report, found);
    if let Some(cold) = &report.cold_start {
        page.anchored("cold", "From launch to first token");
        page.blocks.push(times::cold(cold));
    } else {
        let drawn = drawn(&report.points);
        page.anchored("load", "Latency and throughput against load");
        page.blocks.push(latency_vs_load::plot(report));
        page.anchored("latency", "Latency percentiles");
        if drawn.len() < report.points.iter().filter(|p| p.result.is_some()).count() {
            let names: Vec<&str> = drawn.iter().map(|p| p.label.as_str()).collect();
            page.lines([Line::plain(format!(
                "Of {} points these are drawn in full from here on: {}.",
                report.points.len(),
                names.join(", ")
            ))]);
        }
        page.blocks.push(percentiles::plot(&drawn));
        page.anchored("timeline", "The run over time");
        page.blocks.push(timeline::plot(&drawn));
        if report.server.is_none() {
            page.anchored("breakdown", "Where the time of the loop goes");
            page.blocks.push(times::breakdown(&drawn));
        }
        page.anchored("points", "Every point");
        page.table(curve(&report.points));
        client(&mut page, &drawn);
        gates(&mut page, report);
    }
    let scheduler =
        report.points.first().and_then(|p| p.scheduler.as_ref()).map(|s| pairs("Scheduler", flat(s)));
    let seeds = || {
        let columns = vec![
            words("point", report.points.iter().map(|p| p.label.clone())),
            numbers("seed", report.points.iter().map(|p| p.seed.to_string())),
        ];
        Block::Fold { title: "Seeds".to_owned(), blocks: vec![Block::Table(columns.into())] }
    };
    let more = scheduler.into_iter().flat_map(|scheduler| [scheduler, seeds()]);
    provenance::rerun(
        &mut page,
        &report.command,
        &report.environment,
        &report.config,
        report.model.as_ref(),
        more,
    );
    provenance::environment(
        &mut page,
        &report.environment,
        [],
        report.datasheet.as_ref(),
        &report.capabilities,
    );
    page
}

/// What the client saw beside the latencies of a live server.
fn client(page: &mut Document, points: &[&Point]) {
    let seen = |p: &&Point| Some((p.label.clone(), p.live.clone()?, p.result.clone()?));
    let seen: Vec<_> = points.iter().filter_map(seen).collect();
    if !seen.is_empty() {
        page.anchored("client", "What the client saw");
        let lines = seen.iter().flat_map(|(label, live, result)| {
            super::live::lines(live, result)
                .into_iter()
                .map(move |line| Line::plain(format!("{label}: {line}")))
        });
        page.lines(lines);
    }
}

/// The points that are drawn in full: all of a few; of many the last that held, the first that did not, and the ends.
fn drawn(points: &[Point]) -> Vec<&Point> {
    let run: Vec<&Point> = points.iter().filter(|p| p.result.is_some()).collect();
    if run.len() <= DRAWN {
        return run;
    }
    let last_held = run.iter().rposition(|p| held(p));
    let first_not = run.iter().position(|p| !held(p));
    let chosen = [last_held, first_not, Some(0), Some(run.len() - 1)];
    distinct(chosen.into_iter().flatten()).into_iter().map(|i| run[i]).collect()
}

fn header(report: &ServeReport) -> Vec<Line> {
    let mut served = served(report).into_iter();
    // The model's name is the title.
    let first = served.next().map(|(_, how)| how);
    let others = served.map(|(what, how)| format!("{what} · {how}"));
    let started = report.started_at.iter().map(|at| format!("started {at}"));
    let lines = first.into_iter().chain(others).chain(setup(report)).chain(started);
    let mut lines: Vec<Line> = lines.map(Line::plain).collect();
    if report.kind == ServeKind::ServeVirtual {
        let text =
            "VIRTUAL: the scheduler is real, the times of its steps are computed; nothing was measured";
        lines.push(Line::Said(Tone::Warning, text.to_owned()));
    }
    lines
}

/// One finding as a line.
fn line(finding: &Finding) -> String {
    let evidence = finding.evidence.first().map(|e| format!(" ({e})")).unwrap_or_default();
    format!(
        "{}: {}{evidence}. Measure next: {}. Do first: {}",
        finding.regime, finding.symptom, finding.next, finding.response
    )
}

/// What was found, the worst first.
fn findings(page: &mut Document, report: &ServeReport, found: &[Finding]) {
    let said = report.search.iter().map(|search| search.note.clone());
    page.lines(said.filter(|note| !note.is_empty()).map(Line::plain));
    page.anchored("findings", "Findings");
    let results = || report.points.iter().filter_map(|p| p.result.as_ref());
    let valid = results().filter(|r| r.validity == Validity::Valid).count();
    page.lines([Line::plain(match &report.cold_start {
        Some(cold) => format!("Launches of a process, timed from outside: {}.", cold.launches.len()),
        None => {
            format!(
                "Run: {} of {}; valid: {valid}.",
                results().count(),
                counted(report.points.len(), "point")
            )
        }
    })]);
    let of = |worst: bool| {
        found.iter().filter(move |f| (f.severity >= Severity::Warn) == worst).map(line).collect::<Vec<_>>()
    };
    let many = report.points.len() > 1;
    let (mut rejected, mut open, mut about) = (Vec::new(), Vec::new(), Vec::new());
    // The steps of a search say what decided each of them.
    let explained = if report.search.is_some() { &[] } else { report.points.as_slice() };
    for point in explained {
        let name = |text: String| if many { format!("{}: {text}", point.label) } else { text };
        match point_verdict(point) {
            PointVerdict::Rejected => &mut rejected,
            PointVerdict::Open => &mut open,
            PointVerdict::Held => &mut about,
        }
        .extend(reasons(point).into_iter().map(name));
        about.extend(notes(point).into_iter().map(name));
    }
    let single = match report.points.as_slice() {
        [point] => point_lines(point),
        _ => Vec::new(),
    };
    page.titled_list("What stands out", Tone::Warning, of(true));
    page.titled_list("What else was found", Tone::Plain, of(false));
    page.titled_list("Points that were rejected, and why", Tone::Warning, rejected);
    page.titled_list("Points that are not decided, and why", Tone::Warning, open);
    page.titled_list("Steps of the search", Tone::Plain, steps_of_search(report));
    page.titled_list("Hypotheses", Tone::Plain, report.matrix.iter().map(matrix_lines));
    page.titled_list("This load", Tone::Plain, single);
    page.titled_list("About these points", Tone::Plain, about);
    page.titled_list("About this machine and this run", Tone::Warning, warnings(report));
}

fn gates(page: &mut Document, report: &ServeReport) {
    page.anchored("gates", "Gates");
    let results = report.points.iter().filter_map(|p| Some((p, p.result.as_ref()?)));
    let all: Vec<_> = results.flat_map(|(p, r)| r.gates.iter().map(move |gate| (p, gate))).collect();
    if all.is_empty() {
        page.blocks.push(Block::absent("Nothing was run, so nothing was checked."));
        return;
    }
    let text = "Checks of the measurement itself, point by point; one that fails makes its point INVALID.";
    page.lines([Line::plain(text)]);
    page.table(vec![
        words("point", all.iter().map(|(p, _)| p.label.clone())),
        words("gate", all.iter().map(|(_, g)| g.name.to_string())),
        words("", all.iter().map(|(_, g)| verdict(g.passed).to_owned())),
        words("because", all.iter().map(|(_, g)| g.detail.clone())),
    ]);
}
