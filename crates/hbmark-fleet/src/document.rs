//! A fleet's report for a reader: what is wrong first, then the numbers, then what was not used.
//!
//! Enters: a [`FleetReport`]. Leaves: a [`Document`], which every format draws. It decides nothing.

mod plots;

use crate::drain::drain_commands;
use crate::result::{Finding, FleetReport, Level, MissingRow, State};
use hbmark_report::analysis::words::counted;
use hbmark_report::output::Kind;
use hbmark_report::output::document::{
    Block, Column, Document, Figure, Line, Table, Tone, measured, numbers, words,
};
use hbmark_report::output::metrics::Unit;

/// Rows of a table; JSON has all.
const ROWS: usize = 300;

impl Kind for FleetReport {
    fn document(&self) -> Document {
        laid_out(self, Vec::new())
    }

    fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self)
    }

    fn page(&self) -> Document {
        let mut page = laid_out(self, plots::plots(self));
        page.page = true;
        page.title = format!("Fleet: {}", headline(self));
        page
    }
}

/// The report, with plots between what was found and the tables.
fn laid_out(report: &FleetReport, plots: Vec<Block>) -> Document {
    let mut document = Document::new("fleet");
    document.lines(header(report));
    document.figures(figures(report));
    findings(report, &mut document);
    document.blocks.extend(plots);
    document.heading("what the fleet does");
    document.blocks.push(groups(report));
    days(report, &mut document);
    missing(report, &mut document);
    let commands = drain_commands(report);
    if !commands.is_empty() {
        document.heading("to take confirmed nodes out of service (printed, not run)");
        document.blocks.extend(commands.into_iter().map(Block::Shell));
    }
    notices(report, &mut document);
    document.sheet = Some(sheet(report));
    document
}

/// All of it in one line, as Nagios shows it.
pub fn headline(report: &FleetReport) -> String {
    let mut counts: Vec<String> = Vec::new();
    for state in State::ALL.into_iter().rev() {
        let count = report.count(state);
        if count > 0 && state != State::Ok {
            counts.push(format!("{count} {}", state.word()));
        }
    }
    let total = report.gpus.len() + report.count(State::Missing);
    counts.push(format!("{} of {} ok", report.count(State::Ok), counted(total, "GPU")));
    format!("{}: {}", report.level().word(), counts.join(", "))
}

fn header(report: &FleetReport) -> Vec<Line> {
    let mut lines = Vec::new();
    if report.emulated {
        let text =
            "EMULATED: the CPU engine ran in the place of GPUs; this tries the launcher, no GPU was measured";
        lines.push(Line::Said(Tone::Warning, text.into()));
    }
    match &report.expected {
        Some(expected) => lines.push(Line::plain(format!(
            "plan {} ({}): {}, {}, processes of each: {}; {} read from {}",
            expected.plan,
            expected.digest,
            counted(expected.nodes, "node"),
            counted(expected.gpus, "GPU"),
            expected.processes,
            counted(report.runs, "result"),
            counted(report.files, "file")
        ))),
        None => lines.push(Line::plain(format!(
            "no manifest (fleet.json): what is missing cannot be told; {} read from {}",
            counted(report.runs, "result"),
            counted(report.files, "file")
        ))),
    }
    let settings = &report.settings;
    lines.push(Line::plain(format!(
        "slow: more than {} below the fleet's median, p at most {} after Holm's correction over {} tests, and confirmed by a second run; \
         at least {} fresh processes a GPU",
        percent(settings.margin),
        settings.alpha,
        report.tests,
        settings.processes
    )));
    lines.push(Line::plain(format!(
        "false names expected in a fleet without faults: at most {:.2} with the correction ({:.0} at p {} without it)",
        report.expected_false_names,
        report.tests as f64 * settings.alpha,
        settings.alpha
    )));
    lines
}

fn figures(report: &FleetReport) -> Vec<Figure> {
    let level = report.level();
    let mut figures = vec![Figure {
        name: "verdict".into(),
        value: level.word().into(),
        note: String::new(),
        tone: tone(level),
    }];
    for state in State::ALL {
        let count = report.count(state);
        if count > 0 {
            let tone = match state {
                State::Ok => Tone::Good,
                State::Slow | State::WrongOutput | State::Failed => Tone::Bad,
                State::NotConfirmed => Tone::Plain,
                _ => Tone::Warning,
            };
            figures.push(Figure {
                name: state.word().to_owned(),
                value: count.to_string(),
                note: "GPUs".into(),
                tone,
            });
        }
    }
    figures
}

pub(crate) fn tone(level: Level) -> Tone {
    match level {
        Level::Ok => Tone::Good,
        Level::Unknown | Level::Warning => Tone::Warning,
        Level::Critical => Tone::Bad,
    }
}

fn percent(share: f64) -> String {
    let text = format!("{:.2}", share * 100.0);
    format!("{} %", text.trim_end_matches('0').trim_end_matches('.'))
}

/// Where a finding is: `rack7 node012 slot 3`.
pub(crate) fn place(finding: &Finding) -> String {
    let slot = finding.slot.map(|slot| format!("slot {slot}"));
    let parts: Vec<String> =
        [finding.rack.clone(), finding.node.clone(), slot].into_iter().flatten().collect();
    if parts.is_empty() { "-".into() } else { parts.join(" ") }
}

fn findings(report: &FleetReport, document: &mut Document) {
    document.heading("findings");
    if report.findings.is_empty() {
        document.lines([Line::Said(Tone::Good, "none".into())]);
        return;
    }
    let shown = &report.findings[..report.findings.len().min(ROWS)];
    let text = |title: &str, of: &dyn Fn(&Finding) -> String| words(title, shown.iter().map(of));
    let table = Table {
        columns: vec![
            text("level", &|f| match f.kind.level() {
                Level::Ok => "note".into(),
                level => level.word().into(),
            }),
            text("finding", &|f| f.kind.code()),
            text("where", &place),
            text("GPU", &|f| f.gpu.clone().unwrap_or_else(|| "-".into())),
            text("evidence", &|f| f.evidence.clone()),
        ],
        tones: shown
            .iter()
            .map(|f| if f.kind.level() == Level::Ok { Tone::Plain } else { tone(f.kind.level()) })
            .collect(),
        closing: more(report.findings.len()),
        ..Table::default()
    };
    document.blocks.push(Block::Table(table));
}

fn more(rows: usize) -> Option<String> {
    (rows > ROWS).then(|| format!("{} more in the JSON", rows - ROWS))
}

fn groups(report: &FleetReport) -> Block {
    let rows: Vec<_> = report
        .groups
        .iter()
        .flat_map(|group| group.metrics.iter().map(move |metric| (group, metric)))
        .collect();
    if rows.is_empty() {
        return Block::absent("No group of equal GPUs has enough processes to be judged.");
    }
    let share = |title: &str, of: &dyn Fn(usize) -> Option<f64>| {
        numbers(title, (0..rows.len()).map(|row| of(row).map_or_else(|| "-".into(), percent)))
    };
    Block::Table(Table::from(vec![
        words("device", rows.iter().map(|(group, _)| group.device.clone())),
        words("metric", rows.iter().map(|(_, metric)| metric.metric.to_string())),
        numbers("GPUs", rows.iter().map(|(_, metric)| metric.gpus.to_string())),
        words("median", rows.iter().map(|(_, metric)| metric.metric.shown(metric.center))),
        share("of data sheet", &|row| rows[row].1.datasheet_share),
        share("sd over GPUs", &|row| Some(rows[row].1.spread)),
        share("sd over processes", &|row| Some(rows[row].1.process_spread)),
        share("named from", &|row| Some(rows[row].1.detectable)),
    ]))
}

fn days(report: &FleetReport, document: &mut Document) {
    let rows: Vec<_> =
        report.days.iter().flat_map(|day| day.shifts.iter().map(move |shift| (day, shift))).collect();
    if rows.is_empty() {
        return;
    }
    document.heading("today against other days, GPU by GPU");
    document.table(vec![
        words("day", rows.iter().map(|(day, _)| day.at.clone())),
        words("metric", rows.iter().map(|(_, shift)| shift.metric.to_string())),
        numbers("GPUs", rows.iter().map(|(_, shift)| shift.gpus.to_string())),
        numbers("all changed by", rows.iter().map(|(_, shift)| format!("{:+.2} %", shift.shift * 100.0))),
        numbers("sd of the rest", rows.iter().map(|(_, shift)| percent(shift.spread))),
    ]);
}

fn missing(report: &FleetReport, document: &mut Document) {
    if report.missing.is_empty() {
        return;
    }
    document.heading("missing");
    let shown = &report.missing[..report.missing.len().min(ROWS)];
    let dash = |text: Option<String>| text.unwrap_or_else(|| "-".into());
    document.blocks.push(Block::Table(Table {
        columns: vec![
            words("node", shown.iter().map(|row| row.node.clone())),
            words("GPU", shown.iter().map(|row| dash(row.gpu.clone()))),
            words("slot", shown.iter().map(|row| dash(row.slot.map(|slot| slot.to_string())))),
            numbers("GPUs", shown.iter().map(|row| row.count.to_string())),
            words("why", shown.iter().map(|row| row.why.clone())),
        ],
        closing: more(report.missing.len()),
        ..Table::default()
    }));
}

/// Files of each kind that are shown.
const FILES: usize = 10;

fn notices(report: &FleetReport, document: &mut Document) {
    if report.notices.counts.is_empty() {
        return;
    }
    document.heading("files that were not used");
    for (kind, count) in &report.notices.counts {
        let of_kind = report.notices.shown.iter().filter(|notice| notice.kind == *kind);
        let items = of_kind.take(FILES).map(|notice| format!("{}: {}", notice.path, notice.why));
        document.titled_list(&format!("{}: {count}", kind.words()), Tone::Plain, items.collect::<Vec<_>>());
    }
}

/// Raw numbers, one row a GPU and metric, and behind them what is missing.
fn sheet(report: &FleetReport) -> Vec<Column> {
    let mut columns = measured_rows(report);
    for (column, missing) in columns.iter_mut().zip(missing_rows(&report.missing)) {
        column.cells.extend(missing.cells);
    }
    columns
}

/// The columns of [`measured_rows`] for GPUs without a result.
fn missing_rows(rows: &[MissingRow]) -> Vec<Column> {
    let text = |title: &str, of: &dyn Fn(&MissingRow) -> Option<String>| {
        words(title, rows.iter().map(|row| of(row).unwrap_or_default()))
    };
    let unknown = |title: &str| measured(title, Unit::Count, rows.iter().map(|_| None::<f64>));
    vec![
        text("node", &|row| Some(row.node.clone())),
        text("rack", &|row| row.rack.clone()),
        text("slot", &|row| row.slot.map(|slot| slot.to_string())),
        text("gpu", &|row| row.gpu.clone()),
        measured("gpus", Unit::Count, rows.iter().map(|row| f64::from(row.count))),
        text("device", &|_| None),
        text("state", &|_| Some(State::Missing.word().to_owned())),
        text("metric", &|_| None),
        unknown("value"),
        text("unit", &|_| None),
        unknown("effect"),
        unknown("processes"),
    ]
}

fn measured_rows(report: &FleetReport) -> Vec<Column> {
    let rows: Vec<_> = report
        .gpus
        .iter()
        .flat_map(|gpu| {
            let each = gpu.values.iter().map(Some);
            let none = gpu.values.is_empty().then_some(None);
            each.chain(none).map(move |value| (gpu, value))
        })
        .collect();
    let text = |title: &str, of: &dyn Fn(&crate::result::GpuRow) -> String| {
        words(title, rows.iter().map(|(gpu, _)| of(gpu)))
    };
    let optional = |value: Option<String>| value.unwrap_or_default();
    vec![
        text("node", &|gpu| gpu.node.clone()),
        text("rack", &|gpu| optional(gpu.rack.clone())),
        text("slot", &|gpu| optional(gpu.slot.map(|slot| slot.to_string()))),
        text("gpu", &|gpu| gpu.gpu.clone()),
        measured("gpus", Unit::Count, rows.iter().map(|_| 1.0)),
        text("device", &|gpu| gpu.device.clone()),
        text("state", &|gpu| gpu.state.word().to_owned()),
        words("metric", rows.iter().map(|(_, v)| v.map_or_else(String::new, |v| v.metric.to_string()))),
        measured("value", Unit::Count, rows.iter().map(|(_, v)| v.map(|v| v.value))),
        words("unit", rows.iter().map(|(_, v)| v.map_or_else(String::new, |v| v.metric.unit().to_owned()))),
        measured("effect", Unit::Count, rows.iter().map(|(_, v)| v.and_then(|v| v.effect))),
        measured("processes", Unit::Count, rows.iter().map(|(_, v)| v.map(|v| v.processes as f64))),
    ]
}
