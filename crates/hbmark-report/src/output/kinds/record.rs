//! A decision record: one short Markdown page with the question, what was accepted and rejected and why, why it ended, and how to run it
//! again.
//!
//! Enters: a result of `run`, `serve` or `compare`, and for traffic what was planned with it. Leaves: a document. It decides nothing:
//! statuses, verdicts and reasons are those of the result.

use crate::analysis::words::{counted, said};
use std::collections::BTreeMap;

use super::comparison::differing;
use super::run::{device_line, protocol_text, status_word};
use super::serving::{PointVerdict, held, latencies, met_objectives, point_verdict, reasons, validity};
use crate::analysis::capacity::{Capacity, CapacityPart, number};
use crate::analysis::compare::percent;
use crate::analysis::import::{Imported, objections};
use crate::output::Kind;
use crate::output::document::{Block, Column, Document, Value, measured, numbers, words};
use crate::output::metrics::Unit;
use hbmark_core::result::cause::joined;
use hbmark_core::result::comparison::{Comparison, ComparisonVerdict, Effect, Method};
use hbmark_core::result::serving::{Offered, Point, ServeKind, ServeReport, Validity};
use hbmark_core::result::{CellResult, Environment, Report, ReportKind, Status, TimeSummary};
use hbmark_core::units::Nanos;

/// Lines of one list; the result has them all.
const MAX_LINES: usize = 20;

/// A page as far as it is written.
struct Page(Document);

impl Page {
    fn new(title: String) -> Self {
        Self(Document { page: true, ..Document::new(title) })
    }

    fn section(&mut self, title: &str, lines: impl IntoIterator<Item = String>) {
        let mut lines: Vec<String> = lines.into_iter().collect();
        if lines.len() > MAX_LINES {
            let more = lines.len() - MAX_LINES;
            lines.truncate(MAX_LINES);
            lines.push(format!("and {more} more, in the result"));
        }
        self.0.section(title, lines);
    }

    /// How to run it again.
    fn rerun(
        mut self,
        command: &str,
        mut facts: Vec<String>,
        config: &BTreeMap<String, serde_json::Value>,
    ) -> Document {
        self.0.heading("To run it again");
        self.0.blocks.push(Block::Shell(command.to_owned()));
        let settings: Vec<String> = config
            .iter()
            .filter(|(_, value)| !value.is_null())
            .map(|(key, value)| format!("{key}={}", said(value)))
            .collect();
        if !settings.is_empty() {
            facts.push(format!("configuration: {}", settings.join(", ")));
        }
        self.0.list(facts);
        self.0
    }
}

/// Revision, versions and hardware.
fn facts(environment: &Environment) -> Vec<String> {
    let build = &environment.build;
    let mut facts = vec![format!(
        "hbmark {} at revision {}, {} build, candle {}{}",
        build.version,
        build.git_revision.as_deref().unwrap_or("unknown"),
        if build.profile.is_empty() { "unknown" } else { &build.profile },
        build.candle,
        build.rustc.as_ref().map_or(String::new(), |r| format!(", {r}"))
    )];
    let cpu = &environment.cpu;
    if let Some(model) = &cpu.model {
        let memory = cpu.memory_bytes.map_or(String::new(), |m| format!(", {} of memory", m.capacity()));
        facts.push(format!("CPU: {model}, {} usable{memory}", counted(cpu.usable_cores, "core")));
    }
    if let Some(gpu) = &environment.gpu {
        let named = [
            gpu.name.clone(),
            gpu.uuid.clone(),
            gpu.driver.as_ref().map(|d| format!("driver {d}")),
            gpu.cuda_driver.as_ref().map(|c| format!("CUDA {c}")),
        ];
        facts.push(format!("GPU: {}", named.into_iter().flatten().collect::<Vec<_>>().join(", ")));
    }
    let system = [environment.os.clone(), environment.kernel.clone()];
    let system: Vec<String> = system.into_iter().flatten().collect();
    if !system.is_empty() {
        facts.push(format!("system: {}", system.join(", ")));
    }
    facts
}

fn remarks_of_a_person(note: Option<&String>, hypothesis: Option<&String>) -> Vec<String> {
    let hypothesis = hypothesis.map(|h| format!("hypothesis: {h}"));
    hypothesis.into_iter().chain(note.map(|n| format!("note: {n}"))).collect()
}

/// The record of other programs' results: their rows are accepted where nothing speaks against them, and their files hold no command.
pub fn of_foreign(results: &[Imported]) -> Document {
    let named = |one: &Imported| format!("{}, a result of {}", one.result.source, one.result.format.name());
    let mut page = Page::new(format!("Decision record: {}", counted(results.len(), "imported result")));
    page.section("Target", results.iter().map(named));
    let judged = || {
        let rows = results.iter().flat_map(|one| one.result.rows.iter().zip(&one.places));
        rows.map(|(row, place)| (&row.label, objections(row, place)))
    };
    let accepted = judged().filter(|(_, why)| why.is_empty());
    page.section(
        "Accepted",
        accepted.map(|(label, _)| format!("{label}: nothing in the file contradicts it")),
    );
    let rejected = judged().filter(|(_, why)| !why.is_empty());
    page.section("Rejected", rejected.map(|(label, why)| format!("{label}: {}", joined(&why))));
    page.section("To run it again", ["the file holds no command; its settings are below".to_owned()]);
    page.0.blocks.extend(results.document().blocks);
    page.0
}

/// The record of a serving result.
pub fn of_serving(report: &ServeReport, planned: Option<&Capacity>) -> Document {
    let mut page = Page::new(format!("Decision record: serving {}", report.model_name()));
    page.section("Target", serving_target(report, planned));
    let accepted = accepted(report, planned);
    page.section("Accepted", accepted_lines(report, accepted, planned));
    let others = |wanted| {
        let other = move |p: &&Point| {
            accepted.is_none_or(|taken| !std::ptr::eq(*p, taken)) && point_verdict(p) == wanted
        };
        report.points.iter().filter(other).map(rejection)
    };
    page.section("Rejected", others(PointVerdict::Rejected));
    page.section("Not decided", others(PointVerdict::Open));
    if let Some(point) = accepted
        && let Some(result) = &point.result
    {
        page.0.heading(format!("Percentiles of {}", point.label));
        page.0.table(latencies("", point, result));
    }
    if let Some(planned) = planned {
        let cost = planned.lines.iter().filter(|l| l.part != CapacityPart::KvMemory);
        page.section(
            "Cost and size",
            cost.map(|l| format!("{}: {} = {} = {}", l.what, l.formula, l.values, l.result)),
        );
        page.section("What breaks first", [planned.breaks_first.clone()]);
        page.section("Caveats", planned.assumptions.iter().chain(&planned.caveats).cloned());
    } else {
        page.section("Caveats", report.warnings.iter().cloned());
    }
    page.section("Why it ended there", serving_end(report));
    let seeds: Vec<String> = report.points.iter().map(|p| p.seed.to_string()).collect();
    let mut facts = facts(&report.environment);
    let served = report.server.iter().map(|server| format!("server {} ({})", server.url, server.model));
    let model = report.model.iter().map(|model| {
        let dtype = report.dtype.map(|dtype| format!(", {dtype}")).unwrap_or_default();
        format!("model {} ({}), hash {}{dtype}", model.name, model.source, model.hash)
    });
    facts.splice(0..0, model.chain(served));
    facts.push(format!("workload: {} ({})", report.workload.name, report.workload.source));
    if !seeds.is_empty() {
        facts.push(format!("seeds: {}", seeds.join(", ")));
    }
    facts.extend(report.started_at.iter().map(|at| format!("started {at}")));
    let mut config = report.config.clone();
    if let Some(sheet) = report.datasheet.as_ref().filter(|_| report.kind == ServeKind::ServeVirtual) {
        facts.insert(0, format!("GPU: {}, by its data sheet; no step ran on it", sheet.product));
        // No engine ran, and none of the devices of this machine.
        config.retain(|key, _| !matches!(key.as_str(), "device" | "engine" | "threads"));
    }
    if report.swept.is_some() || report.search.is_some() {
        // Each point has its own.
        config.remove("offered");
    }
    page.rerun(&report.command, facts, &config)
}

fn serving_target(report: &ServeReport, planned: Option<&Capacity>) -> Vec<String> {
    let first = report.points.iter().find_map(|p| p.result.as_ref());
    let mut clauses: Vec<String> =
        first.map(|r| r.slo.iter().map(|c| c.clause.to_string()).collect()).unwrap_or_default();
    if let Some(search) = &report.search {
        clauses = search.slo.clauses.iter().map(ToString::to_string).collect();
    }
    let asked = match (&report.search, &report.swept, &report.cold_start) {
        (Some(_), ..) => "the highest rate under the objectives".to_owned(),
        (_, Some(variable), _) => format!("what {variable} does, value by value"),
        (_, _, Some(cold)) => {
            format!("the time from launch to first token, over {}", counted(cold.launches.len(), "start"))
        }
        _ => "the latencies of this load".to_owned(),
    };
    let mut lines = vec![asked];
    if clauses.is_empty() {
        lines.push("no objectives were set, so nothing could miss them".into());
    } else {
        lines.push(format!("objectives: {}", clauses.join(", ")));
    }
    if let Some(planned) = planned {
        let question = &planned.question;
        lines.push(format!(
            "{} requests/s at the busiest, with {:.0} % headroom",
            number(question.target_rate),
            question.headroom * 100.0
        ));
    }
    lines.extend(remarks_of_a_person(report.note.as_ref(), report.hypothesis.as_ref()));
    lines
}

/// The point that a reader may build on: the one a plan used, the one a search confirmed, or the last that held.
fn accepted<'a>(report: &'a ServeReport, planned: Option<&Capacity>) -> Option<&'a Point> {
    let rate = |p: &Point| match p.offered {
        Offered::Rate(rate) => Some(rate),
        _ => None,
    };
    let planned = planned.map(|plan| plan.accepted_rate);
    let wanted = planned.or_else(|| report.search.as_ref().and_then(|s| s.max_rate));
    let pick = |points: &mut dyn DoubleEndedIterator<Item = &'a Point>| match wanted {
        Some(wanted) => points
            .filter(|p| rate(p).is_some_and(|r| (r / wanted - 1.0).abs() < 1e-9))
            .max_by_key(|p| p.result.as_ref().map_or(0, |r| r.measured)),
        None => points.next_back(),
    };
    // One of which it is open whether the system keeps up is taken where there is no other, and says so.
    pick(&mut report.points.iter().filter(|point| held(point)))
        .or_else(|| pick(&mut report.points.iter().filter(|point| met_objectives(point))))
}

fn accepted_lines(report: &ServeReport, accepted: Option<&Point>, planned: Option<&Capacity>) -> Vec<String> {
    let mut lines = Vec::new();
    if report.kind == ServeKind::ServeVirtual {
        lines.push("PREDICTED on a virtual clock: nothing was measured".to_owned());
    }
    if let Some(planned) = planned {
        lines.push(format!(
            "{} on {}, {} requests/s each",
            counted(planned.instances, "instance"),
            if planned.gpus == 1 {
                "1 GPU or machine".to_owned()
            } else {
                format!("{} GPUs or machines", planned.gpus)
            },
            number(planned.rate_per_instance)
        ));
    }
    match accepted.and_then(|p| Some((p, p.result.as_ref()?))) {
        Some((point, result)) => {
            lines.push(format!(
                "{}: {} requests/s served, {} output tok/s{}",
                point.label,
                number(result.served_per_s),
                number(result.output_tokens_per_s),
                result.goodput_share.map_or(String::new(), |g| format!(
                    ", {:.1} % of the requests met every objective",
                    g * 100.0
                ))
            ));
            lines.extend(result.slo.iter().map(|c| {
                let seen = c.observed.map_or("unknown".into(), |q| Nanos(q.value()).to_string());
                format!("{}: {seen}", c.clause)
            }));
            if !held(point) {
                lines.push("whether the system keeps up is not judged: the run is too short".to_owned());
            }
        }
        None if report.cold_start.is_none() => lines.push("nothing: no point held".into()),
        None => {}
    }
    if let Some(cold) = &report.cold_start {
        let all = &cold.to_first_token;
        lines.push(format!(
            "median {} to the first token, {} to {}, the first launch {}",
            Nanos(all.median_ns),
            Nanos(all.min_ns),
            Nanos(all.max_ns),
            Nanos(all.first_launch_ns)
        ));
    }
    lines
}

fn rejection(point: &Point) -> String {
    // The verdict is before the reason already.
    let mut why: Vec<String> = match &point.not_run {
        Some(reason) => vec![reason.to_string()],
        None => reasons(point),
    };
    if let Some(result) = &point.result {
        let missed = result.slo.iter().filter(|c| c.met == Some(false)).map(|c| {
            let seen = c.observed.map_or("not reported".into(), |q| Nanos(q.value()).to_string());
            format!("{} NOT met, {seen}", c.clause)
        });
        let disturbed = point.disturbances().into_iter().map(|why| format!("disturbed: {why}"));
        why = result.reasons.iter().map(ToString::to_string).chain(missed).chain(disturbed).collect();
        if let (true, (None, open)) = (why.is_empty(), result.held()) {
            why.push(format!("undetermined: {open}"));
        }
        if why.is_empty() && point.keeps_up().is_none() {
            why.push("undetermined: no trend of the queue was judged".to_owned());
        }
    }
    let valid = point.result.as_ref().is_some_and(|r| r.validity == Validity::Valid);
    let word = if valid { String::new() } else { format!(" {}", validity(point)) };
    format!("{}{word}: {}", point.label, why.join("; "))
}

fn serving_end(report: &ServeReport) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(search) = &report.search {
        lines.push(format!("runs of the search: {}", search.attempts.len()));
        lines.extend(search.confirmed_by().map(|by| format!("{by} agreed on the rate")));
        if !search.note.is_empty() {
            lines.push(search.note.clone());
        }
    } else if let Some(reason) = report.points.iter().find_map(|p| p.not_run.as_ref()) {
        lines.push(reason.to_string());
    } else if report.swept.is_some() {
        lines.push("every value that was asked for was run".into());
    } else if report.cold_start.is_none() {
        lines.push("every request that was asked for was sent".into());
    }
    lines
}

/// The record of a run.
pub fn of_run(report: &Report) -> Document {
    let what = if report.kind == ReportKind::Predict { "predicting" } else { "steps of" };
    let mut page = Page::new(format!("Decision record: {what} {}", report.model.name));
    let mut target = vec![format!(
        "{} of prefill and decode, each against its roofline",
        counted(report.cells.len(), "cell")
    )];
    target.extend(remarks_of_a_person(report.note.as_ref(), report.hypothesis.as_ref()));
    page.section("Target", target);
    let accepted: Vec<&CellResult> =
        report.cells.iter().filter(|c| matches!(c.status, Status::Ok | Status::Predicted)).collect();
    page.section("Accepted", [format!("{} of {}", accepted.len(), counted(report.cells.len(), "cell"))]);
    let rejected = report.cells.iter().filter(|c| !matches!(c.status, Status::Ok | Status::Predicted));
    page.section(
        "Rejected",
        rejected.map(|c| {
            let why = c.reason.as_ref().map_or_else(|| joined(&c.flags), ToString::to_string);
            format!("{} {}: {why}", c.id, status_word(c.status)).trim_end_matches(": ").to_owned()
        }),
    );
    if !accepted.is_empty() {
        page.0.heading("Percentiles of what was accepted");
        page.0.table(cell_columns(&accepted));
    }
    let stories = report.ladders.iter().map(|l| l.story.clone());
    page.section("Where the time goes", stories);
    page.section("Caveats", report.warnings.iter().cloned());
    page.section("Why it ended there", run_end(report));
    let model = &report.model;
    let mut lines = vec![format!("model {} ({}), hash {}", model.name, model.source, model.hash)];
    lines.extend(device_line(report));
    lines.extend(facts(&report.environment));
    lines.extend(report.protocol.as_ref().map(|p| format!("seed {}", p.seed)));
    lines.extend(report.started_at.iter().map(|at| format!("started {at}")));
    page.rerun(&report.command, lines, &report.config)
}

fn cell_columns(cells: &[&CellResult]) -> Vec<Column> {
    let cells = &cells[..cells.len().min(MAX_LINES * 4)];
    let time = |title: &str, of: &dyn Fn(&CellResult) -> Value| {
        measured(title, Unit::Nanoseconds, cells.iter().map(|cell| of(cell))).each_alone()
    };
    let step = |title: &str, of: fn(&TimeSummary) -> Option<f64>| {
        time(title, &|cell| match &cell.step_ns {
            Some(summary) => of(summary).into(),
            None => Value::Null,
        })
    };
    let steps = |cell: &&CellResult| cell.step_ns.as_ref().map_or("-".to_owned(), |s| s.n.to_string());
    vec![
        words("cell", cells.iter().map(|cell| cell.id.clone())),
        time("TPOT", &|cell| cell.tpot().into()),
        step("step p50", |summary| Some(summary.p50)),
        step("p90", |summary| summary.p90),
        step("p99", |summary| summary.p99),
        time("floor", &|cell| cell.predicted_ns.into()),
        numbers("n", cells.iter().map(steps)),
    ]
}

fn run_end(report: &Report) -> Vec<String> {
    let mut lines: Vec<String> = protocol_text(report).map(|(text, _)| text).into_iter().collect();
    if report.kind == ReportKind::Predict {
        return lines;
    }
    let count = |wanted: Status| report.cells.iter().filter(|c| c.status == wanted).count();
    for (status, why) in [
        (Status::Ok, "reached the interval that was asked for"),
        (Status::NotConverged, "ended at the most blocks or the most time with a wider interval"),
        (Status::NoSteadyState, "never came to a steady state"),
        (Status::Disturbed, "had too many blocks rejected"),
        (Status::Noisy, "had noise that the user allowed"),
        (Status::Smoke, "ran once: such times mean nothing"),
        (Status::Simulated, "ran on a simulated device: such times mean nothing"),
    ] {
        if count(status) > 0 {
            lines.push(format!("{} {why}", counted(count(status), "cell")));
        }
    }
    lines
}

/// The record of a comparison.
pub fn of_comparison(comparison: &Comparison) -> Document {
    let mut page = Page::new(format!("Decision record: is B faster than A, on {}", comparison.model));
    let mut target = vec![format!("A: {}", comparison.a.given), format!("B: {}", comparison.b.given)];
    target.push(format!("a difference below {} counts as none", percent(comparison.settings.margin)));
    page.section("Target", target);
    let ratio = |e: &Effect| match (e.ratio, e.low, e.high) {
        (Some(r), Some(l), Some(h)) => format!("B/A {r:.4}, {l:.4} to {h:.4}"),
        (Some(r), ..) => format!("B/A {r:.4}"),
        _ => "no ratio".to_owned(),
    };
    let effect =
        |name: &str, e: &Effect| format!("{name}: {} ({}; {})", e.verdict.word(), ratio(e), e.reason);
    let decided = |e: &Effect| e.verdict != ComparisonVerdict::Inconclusive;
    let all: Vec<(String, &Effect)> = comparison
        .overall
        .iter()
        .map(|e| ("all cells".to_owned(), e))
        .chain(comparison.cells.iter().map(|c| (c.place.id(), &c.effect)))
        .collect();
    page.section("Accepted", all.iter().filter(|(_, e)| decided(e)).map(|(n, e)| effect(n, e)));
    page.section("Not decided", all.iter().filter(|(_, e)| !decided(e)).map(|(n, e)| effect(n, e)));
    page.section(
        "What differs",
        (!comparison.differences.is_empty()).then(|| differing(&comparison.differences, "default")),
    );
    page.section("Caveats", comparison.remarks.iter().chain(&comparison.limits).cloned());
    let end = match (comparison.method, comparison.rounds) {
        (Method::PairedRounds, Some(rounds)) => {
            format!(
                "{} of fresh processes, a number fixed before the first; order {}",
                counted(rounds, "round"),
                comparison.order.join(" ")
            )
        }
        (Method::PairedRounds, None) => "the rounds were over".to_owned(),
        (Method::SavedResults | Method::SavedProcesses, _) => {
            "the results were there already; nothing was run".to_owned()
        }
    };
    page.section("Why it ended there", [end]);
    let mut lines = vec![format!("model {}", comparison.model), format!("machine {}", comparison.machine)];
    lines.extend(comparison.seed.map(|seed| format!("seed {seed}")));
    lines.extend(comparison.protocol.iter().map(|p| format!("protocol of every process: {p}")));
    lines.push(format!("A ran {}", comparison.a.command));
    lines.push(format!("B ran {}", comparison.b.command));
    lines.extend(comparison.started_at.iter().map(|at| format!("started {at}")));
    let config: BTreeMap<String, serde_json::Value> =
        [("a", &comparison.a.config), ("b", &comparison.b.config)]
            .into_iter()
            .flat_map(|(side, config)| config.iter().map(move |(k, v)| (format!("{side}.{k}"), v.clone())))
            .collect();
    page.rerun(&comparison.command, lines, &config)
}

#[cfg(test)]
mod tests;
