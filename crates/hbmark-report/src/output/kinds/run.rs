//! A report of cells: what was run on what, one table, where the time went, and what limits trust in it.
//!
//! Enters: a [`Report`]. Leaves: its document, and the page with plots. Columns that are the same in every row are taken
//! out of the table, so that a reader sees what differs.

mod batch;
mod blocks;
mod context;
mod group;
mod page;
pub(super) mod palette;
mod roofline;
mod telemetry;
mod waterfall;

use crate::analysis::speculation::{Drafting, speculation as speculate};
use crate::analysis::words::counted;
use std::fmt::Write;
use std::mem::{Discriminant, discriminant};

pub use page::page;

use super::{breakdown, speculation};
use crate::output::Kind;
use crate::output::document::{
    Block, Column, Document, Line, Table, Tone, facts, grouped, measured, numbers, split_constants, words,
};
use crate::output::metrics::{METRICS, Shown, Unit};
use hbmark_core::result::cause::joined;
use hbmark_core::result::{
    Bound, Capabilities, Cause, Ceilings, CellResult, EngineDevice, Phase, Report, ReportKind, Spread, Status,
};
use hbmark_core::units::{BytesPerSecond, FlopsPerSecond, Nanos};

/// Columns that stay even when all rows agree.
const ALWAYS: &[&str] = &["batch", "context", "step", "TPOT", "validity"];

impl Kind for Report {
    fn document(&self) -> Document {
        let model = &self.model;
        let mut document = Document::new(format!(
            "{} · {} · {} parameters · {} of weights",
            model.name,
            model.source,
            parameters(model.parameters),
            model.weight_bytes
        ));
        let layers = model.architecture.stack.as_ref();
        document.lines(layers.map(|stack| Line::Said(Tone::Faint, format!("layers: {stack}"))));
        let scripted = self.protocol.as_ref().and_then(|protocol| protocol.expert_routing.as_ref());
        let script = |routing| format!("experts: picked by a script ({routing}), not by the routers");
        document.lines(scripted.map(|routing| Line::Said(Tone::Faint, script(routing))));
        document.lines(header(self));
        let (constants, columns) = of_cells(&self.cells);
        if !constants.is_empty() {
            document.lines([Line::Said(Tone::Faint, format!("all cells: {}", facts(&constants)))]);
        }
        let tones = self.cells.iter().map(|cell| tone(cell.status)).collect();
        document.blocks.push(Block::Table(Table { columns, tones, ..Table::default() }));
        group::push(&mut document, self);
        for (title, tables) in [
            ("ladders: where the time of a step goes", breakdown::ladders(self)),
            ("operations (separate profiling pass, not in the step times)", breakdown::operations(self)),
        ] {
            if !tables.is_empty() {
                document.heading(title);
                document.blocks.extend(tables.into_iter().map(Block::Table));
            }
        }
        speculation::push(&mut document, &speculate(self, Drafting::Free, None));
        document.section("about these cells", remarks(&self.cells));
        document.section("fitted over the grid", self.fits.iter().map(fit_line));
        document.section("crossovers", self.crossovers.iter().map(crossover_line));
        if !self.cold.is_empty() {
            document.heading("cold (once per process)");
            document.table(cold(self));
        }
        let notes = if self.kind == ReportKind::Predict { "notes" } else { "this machine, this run" };
        document.section(notes, self.warnings.iter().cloned());
        document.sheet = Some(sheet(&self.cells));
        document
    }

    fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self)
    }

    fn page(&self) -> Document {
        page::page(self, &[])
    }
}

fn tone(status: Status) -> Tone {
    match status {
        Status::Ok | Status::Predicted => Tone::Plain,
        // What nothing should rest on is there, and does not catch the eye.
        Status::Skipped
        | Status::NotConverged
        | Status::NoSteadyState
        | Status::Disturbed
        | Status::Noisy
        | Status::Smoke
        | Status::Simulated
        | Status::Incomplete => Tone::Faint,
        Status::Invalid | Status::Oom | Status::Failed => Tone::Bad,
    }
}

fn header(report: &Report) -> Vec<Line> {
    let mut lines: Vec<Line> = device_line(report).into_iter().map(Line::plain).collect();
    if let Some(c) = &report.ceilings {
        let gemm: Vec<String> = c
            .gemm_flops_per_s
            .iter()
            .map(|(dtype, peak)| format!("{dtype} {}", FlopsPerSecond(peak.median)))
            .collect();
        lines.push(Line::plain(format!(
            "ceilings measured {}: read {}, GEMM {} · {}",
            when_measured(c),
            read_ceiling(c),
            gemm.join(", "),
            c.read_configuration
        )));
        lines.extend(ceiling_doubt(c));
        lines.extend(copy_above_read(c).map(Line::plain));
    }
    if let Some(sheet) = &report.datasheet {
        lines.push(Line::plain(format!(
            "data sheet: {} · {} · {} · {}",
            sheet.product,
            BytesPerSecond(sheet.bandwidth_bytes_per_s),
            sheet.memory_bytes.capacity(),
            sheet.source
        )));
    }
    lines.extend(protocol_line(report));
    lines.extend(notes(report));
    lines.push(Line::Command(report.command.clone()));
    lines
}

/// In the run, or how long before it.
fn when_measured(ceilings: &Ceilings) -> String {
    match ceilings.age_s {
        None => "in this run".to_owned(),
        Some(s) if s < 100.0 => format!("{s:.0} s before this run"),
        Some(s) => format!("{:.0} min before this run", s / 60.0),
    }
}

/// The read ceiling and its range; in brackets where nothing should rest on it.
fn read_ceiling(ceilings: &Ceilings) -> String {
    let Spread { median, low, high } = ceilings.read_bytes_per_s;
    let (median, low, high) = (BytesPerSecond(median), BytesPerSecond(low), BytesPerSecond(high));
    if ceilings.doubt().is_some() {
        format!("[{median}, {low} to {high}]")
    } else {
        format!("{median} ({low} to {high})")
    }
}

/// What to know where copies are faster than reads.
pub fn copy_above_read(ceilings: &Ceilings) -> Option<String> {
    let read = BytesPerSecond(ceilings.read_bytes_per_s.median);
    let copy = BytesPerSecond(ceilings.copy_bytes_per_s.median);
    ceilings
        .copy_exceeds_read()
        .then(|| format!("copy bandwidth ({copy}) exceeds read bandwidth ({read}); % ceiling is of reads"))
}

/// Why nothing should rest on the ceilings.
fn ceiling_doubt(ceilings: &Ceilings) -> Option<Line> {
    let cause = ceilings.doubt()?;
    Some(Line::Said(
        Tone::Warning,
        format!("the ceilings were disturbed: {cause}; every floor rests on them"),
    ))
}

fn protocol_line(report: &Report) -> Option<Line> {
    let (text, loud) = protocol_text(report)?;
    Some(Line::Said(if loud { Tone::Warning } else { Tone::Plain }, text))
}

/// The user's note and hypothesis.
fn notes(report: &Report) -> impl Iterator<Item = Line> {
    let notes = [("note", &report.note), ("hypothesis", &report.hypothesis)];
    notes.into_iter().filter_map(|(title, value)| Some(Line::plain(format!("{title}: {}", value.as_ref()?))))
}

/// What the run was on and by which program; `None` for a prediction.
pub fn device_line(report: &Report) -> Option<String> {
    if report.kind == ReportKind::Predict {
        return None;
    }
    let environment = &report.environment;
    let device = report.capabilities.first().map_or(&EngineDevice::Cpu, |c| &c.device);
    let product = environment.product(report.capabilities.first().is_some_and(Capabilities::on_gpu));
    let cores = environment.cpu.usable_cores;
    Some(format!(
        "{} · {} · {} · candle {} · hbmark {}{}",
        device,
        product,
        counted(cores, "core"),
        environment.build.candle,
        environment.build.version,
        environment.build.git_revision.as_ref().map_or_else(String::new, |r| format!(" ({r})"))
    ))
}

/// The protocol in a line, and whether it must catch the eye: everything but the full one.
pub fn protocol_text(report: &Report) -> Option<(String, bool)> {
    if report.kind == ReportKind::Predict {
        return Some(("predicted from the data sheet; nothing was measured".to_owned(), true));
    }
    let p = report.protocol.as_ref()?;
    Some(match p.name.as_str() {
        name @ ("full" | "custom") => {
            let blocks = counted(p.max_blocks, "block");
            let until = match p.min_blocks {
                least if least < p.max_blocks => {
                    format!("{least} to {blocks} until ±{:.0} %", p.target_half_width * 100.0)
                }
                _ => blocks,
            };
            let visits = counted(p.visits, "visit");
            let line = format!("protocol {name}: {until}, {visits} in random order, seed {}", p.seed);
            (line, name == "custom")
        }
        "smoke" => (format!("SMOKE run: every cell once; the times mean nothing · seed {}", p.seed), true),
        name => {
            let name = name.to_uppercase();
            (format!("{name} protocol: shortened, not comparable with full runs · seed {}", p.seed), true)
        }
    })
}

/// The word for a status.
pub fn status_word(status: Status) -> &'static str {
    match status {
        Status::Ok => "ok",
        Status::Invalid => "INVALID",
        Status::NotConverged => "not converged",
        Status::NoSteadyState => "no steady state",
        Status::Disturbed => "disturbed",
        Status::Noisy => "noisy",
        Status::Smoke => "smoke",
        Status::Simulated => "SIMULATED DEVICE",
        Status::Skipped => "skipped",
        Status::Oom => "oom",
        Status::Failed => "failed",
        Status::Incomplete => "incomplete",
        Status::Predicted => "predicted",
    }
}

/// The word for a bound.
pub fn bound_word(bound: Bound) -> &'static str {
    match bound {
        Bound::Memory => "memory",
        Bound::Compute => "compute",
        Bound::Overhead => "overhead",
        Bound::Collectives => "collectives",
    }
}

/// `8.030 B`, `0.135 B`; of a model below ten million in millions.
pub fn parameters(count: u64) -> String {
    if count < 10_000_000 {
        format!("{:.3} M", count as f64 / 1e6)
    } else {
        format!("{:.3} B", count as f64 / 1e9)
    }
}

/// The table of cells: what is the same in every row, by title, and the columns that vary.
pub fn of_cells(cells: &[CellResult]) -> (Vec<(String, String)>, Vec<Column>) {
    let mut columns = vec![
        words("phase", cells.iter().map(|c| c.phase.to_string())),
        words("engine", cells.iter().map(|c| c.engine.clone())),
        words("dtype", cells.iter().map(|c| c.dtype.to_string())),
        words("KV dtype", cells.iter().map(|c| c.kv_dtype.to_string())),
        numbers("batch", cells.iter().map(|c| c.batch.to_string())),
        numbers("context", cells.iter().map(|c| c.context.to_string())),
    ];
    let shown = METRICS.iter().filter(|m| m.shown == Shown::Table);
    columns.extend(shown.map(|m| m.of_cells(cells)).filter(|column| !column.is_empty()));
    columns.push(words("bound", cells.iter().map(|c| c.bound.map_or("-", bound_word).to_owned())));
    columns.push(words("validity", cells.iter().map(|c| validity(c).to_owned())));
    // Where there is little room: which cell, its time, its share of the ceiling, and whether it counts. A decode's time is its TPOT.
    let main = ["phase", "engine", "dtype", "batch", "context", "% ceiling", "validity"];
    // A prediction has no time but its floor.
    let predicted = cells.iter().all(|cell| cell.shown_time().is_none());
    let is_main = |title: &str| match title {
        "floor" | "tok/s" => predicted,
        "step" => cells.iter().any(|c| c.phase != Phase::Decode),
        "TPOT" => cells.iter().any(|c| c.phase == Phase::Decode),
        other => main.contains(&other),
    };
    let columns = columns.into_iter().map(|column| {
        let minor = !is_main(&column.title);
        column.minor(minor)
    });
    split_constants(columns.collect(), |c| cells.len() > 1 && !ALWAYS.contains(&c.title.as_str()))
}

/// The word for a cell: a prediction for a device that cannot hold it says so.
fn validity(cell: &CellResult) -> &'static str {
    let fits = !cell.flags.iter().any(|flag| matches!(flag, Cause::DoesNotFit { .. }));
    if cell.status == Status::Predicted && !fits { "does not fit" } else { status_word(cell.status) }
}

/// Every number of every cell.
pub fn sheet(cells: &[CellResult]) -> Vec<Column> {
    let mut columns = vec![
        words("id", cells.iter().map(|c| c.id.clone())),
        words("phase", cells.iter().map(|c| c.phase.to_string())),
        words("engine", cells.iter().map(|c| c.engine.clone())),
        words("dtype", cells.iter().map(|c| c.dtype.to_string())),
        words("kv_dtype", cells.iter().map(|c| c.kv_dtype.to_string())),
        numbers("batch", cells.iter().map(|c| c.batch.to_string())),
        numbers("context", cells.iter().map(|c| c.context.to_string())),
        words("status", cells.iter().map(|c| status_word(c.status).to_owned())),
        words("reason", cells.iter().map(|c| joined(c.reason.as_slice()))),
        words("bound", cells.iter().map(|c| c.bound.map_or("", bound_word).to_owned())),
    ];
    columns.extend(METRICS.iter().map(|m| m.field(cells.iter().map(Some))));
    columns
}

/// What was timed once per process.
pub fn cold(report: &Report) -> Vec<Column> {
    let rows = &report.cold;
    vec![
        words("what", rows.iter().map(|row| row.what.clone())),
        words("engine", rows.iter().map(|row| row.engine.clone())),
        words("dtype", rows.iter().map(|row| row.dtype.to_string())),
        measured("time", Unit::Nanoseconds, rows.iter().map(|row| row.time_ns)).each_alone(),
    ]
}

/// Sentences about the cells that are not simply ok: their status and why, and their flags.
pub fn remarks(cells: &[CellResult]) -> Vec<String> {
    let said = |cause: &Cause| (discriminant(cause), cause.to_string());
    let mut remarks = shared(cells, |cell| {
        let line = |cause: &Cause| format!("{}: {cause}", status_word(cell.status));
        cell.reason.iter().map(|cause| ((cell.status, discriminant(cause)), line(cause))).collect()
    });
    remarks.extend(shared(cells, |cell| rejections(cell).into_iter().collect()));
    remarks.extend(shared(cells, |cell| cell.flags.iter().map(said).collect()));
    remarks.extend(shared(cells, |cell| {
        let mut kinds: Vec<(Discriminant<Cause>, Vec<&Cause>)> = Vec::new();
        for cause in cell.blocks.iter().flat_map(|block| &block.conditions) {
            match kinds.iter_mut().find(|(kind, _)| *kind == discriminant(cause)) {
                Some((_, causes)) => causes.push(cause),
                None => kinds.push((discriminant(cause), vec![cause])),
            }
        }
        let line = |(kind, causes): (_, Vec<&Cause>)| {
            let last = causes[causes.len() - 1].to_string();
            let all = counted(cell.blocks.len(), "block");
            let differ = causes.iter().any(|cause| cause.to_string() != last);
            let count = if differ { format!("{} of {all}; the last: ", causes.len()) } else { String::new() };
            (kind, format!("{count}{last}"))
        };
        kinds.into_iter().map(line).collect()
    }));
    remarks
}

/// How many blocks were rejected, unless the reason of the cell says that all were.
fn rejections(cell: &CellResult) -> Option<(Discriminant<Cause>, String)> {
    let rejected = cell.blocks.iter().filter(|block| block.rejected.is_some()).count();
    let said = matches!(cell.reason, Some(Cause::RejectedInARow { blocks, .. }) if blocks == rejected);
    let last = cell.blocks.iter().rev().find_map(|block| block.rejected.as_ref())?;
    let all = counted(cell.blocks.len(), "block");
    (!said).then(|| (discriminant(last), format!("{rejected} of {all} rejected; the last: {last}")))
}

/// Lines of each cell.
type Said<'a> = Vec<(&'a str, Vec<String>)>;

/// A line that several cells share, once; of more than two lines of a kind, which differ in their numbers, the first.
fn shared<K: PartialEq>(cells: &[CellResult], of: impl Fn(&CellResult) -> Vec<(K, String)>) -> Vec<String> {
    let mut kinds: Vec<(K, Said<'_>)> = Vec::new();
    for cell in cells {
        for (kind, line) in of(cell) {
            let at = kinds.iter().position(|(known, _)| *known == kind).unwrap_or_else(|| {
                kinds.push((kind, Vec::new()));
                kinds.len() - 1
            });
            match kinds[at].1.last_mut() {
                Some((id, lines)) if *id == cell.id => lines.push(line),
                _ => kinds[at].1.push((&cell.id, vec![line])),
            }
        }
    }
    let named = |(line, ids): (String, Vec<&str>)| match ids.as_slice() {
        [one] => format!("{one}: {line}"),
        many if many.len() == cells.len() => format!("every cell: {line}"),
        many => format!("{} cells ({} ...): {line}", many.len(), many[0]),
    };
    let lines_of = |(_, said): (K, Said<'_>)| {
        let (of_kind, groups) = (said.len(), grouped(said));
        if of_kind > 2 && groups.len() > 2 {
            let (line, ids) = &groups[0];
            return vec![format!("{of_kind} cells, such as {}: {line}", ids[0])];
        }
        groups.into_iter().map(named).collect()
    };
    kinds.into_iter().flat_map(lines_of).collect()
}

/// A crossover as a sentence: its name, its value, and its explanation.
pub fn crossover_line(crossover: &hbmark_core::result::Crossover) -> String {
    let unit = |value: f64| {
        if (value - 1.0).abs() < 0.5 { crossover.unit.trim_end_matches('s') } else { &crossover.unit }
    };
    let value = crossover.value.map_or("none".to_owned(), |value| format!("{value:.0} {}", unit(value)));
    format!("{}: {value}; {}", crossover.what, crossover.explanation)
}

/// A fitted model as a sentence.
pub fn fit_line(fit: &hbmark_core::result::FittedModel) -> String {
    let range = |low: f64, high: f64| format!("{} to {}", Nanos(low), Nanos(high));
    let mut line = format!(
        "{} {}: fixed {} ({})",
        fit.engine,
        fit.dtype,
        Nanos(fit.intercept_ns),
        range(fit.intercept_ci_ns[0], fit.intercept_ci_ns[1])
    );
    if let Some(predicted) = fit.predicted_intercept_ns {
        let _ = write!(line, ", weights alone predict {}", Nanos(predicted));
    }
    if let Some(bandwidth) = fit.kv_bytes_per_s {
        let _ = write!(line, "; KV at {}", BytesPerSecond(bandwidth));
        if let Some([low, high]) = fit.kv_bytes_per_s_ci {
            let _ = write!(line, " ({} to {})", BytesPerSecond(low), BytesPerSecond(high));
        }
    }
    if let Some(each) = fit.per_sequence_ns {
        let _ = write!(line, "; {} per sequence", Nanos(each));
    }
    let _ = write!(line, "; r² {:.3} over {}", fit.r_squared, counted(fit.cells, "cell"));
    line
}
