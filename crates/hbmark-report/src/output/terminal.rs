//! A report for a person at a terminal: what was run on what, one table, and what limits trust in it.

use std::fmt::Write;

use owo_colors::{OwoColorize, Style};

use super::breakdown::{self, Breakdown};
use super::metrics::Unit;
use super::table::{self, CellTable, Column};
use super::text::single;
use hbmark_core::input::plain;
use hbmark_core::result::{Report, ReportKind, Status};
use hbmark_core::units::{BytesPerSecond, FlopsPerSecond, Nanos};

/// Draws a report.
#[must_use]
pub fn render(report: &Report, color: bool) -> String {
    let paint = Paint(color);
    let mut text = String::new();
    header(&mut text, report, &paint);
    text.push('\n');
    draw(&mut text, &table::of_cells(&report.cells), &paint);
    breakdowns(&mut text, report, &paint);
    remarks(&mut text, report, &paint);
    text
}

/// Colour, or not.
pub(super) struct Paint(pub(super) bool);

impl Paint {
    pub(super) fn with(&self, text: &str, style: Style) -> String {
        if self.0 { text.style(style).to_string() } else { text.to_owned() }
    }
    pub(super) fn strong(&self, text: &str) -> String {
        self.with(text, Style::new().bold())
    }
    pub(super) fn faint(&self, text: &str) -> String {
        self.with(text, Style::new().dimmed())
    }
    fn alarm(&self, text: &str) -> String {
        self.with(text, Style::new().bold().yellow())
    }
    fn status(&self, text: &str, status: Status) -> String {
        let style = match status {
            Status::Ok | Status::Predicted => return text.to_owned(),
            Status::Skipped => Style::new().dimmed(),
            Status::NotConverged | Status::NoSteadyState | Status::Disturbed | Status::Incomplete => {
                Style::new().yellow()
            }
            Status::Invalid | Status::Oom | Status::Failed => Style::new().red().bold(),
        };
        self.with(text, style)
    }
}

fn header(text: &mut String, report: &Report, paint: &Paint) {
    let model = &report.model;
    let _ = writeln!(
        text,
        "{} · {} · {:.3} B parameters · {} of weights",
        paint.strong(&plain(&model.name)),
        plain(&model.source),
        model.parameters as f64 / 1e9,
        model.weight_bytes
    );
    if let Some(device) = device_line(report) {
        let _ = writeln!(text, "{device}");
    }
    if let Some(c) = &report.ceilings {
        let gemm: Vec<String> = c
            .gemm_flops_per_s
            .iter()
            .map(|(dtype, peak)| format!("{dtype} {}", FlopsPerSecond(peak.median)))
            .collect();
        let _ = writeln!(
            text,
            "ceilings measured now: read {} ({} to {}), GEMM {} · {}",
            BytesPerSecond(c.read_bytes_per_s.median),
            BytesPerSecond(c.read_bytes_per_s.low),
            BytesPerSecond(c.read_bytes_per_s.high),
            gemm.join(", "),
            plain(&c.read_configuration)
        );
    }
    if let Some(sheet) = &report.datasheet {
        let _ = writeln!(
            text,
            "data sheet: {} · {} · {:.0} GiB · {}",
            plain(&sheet.product),
            BytesPerSecond(sheet.bandwidth_bytes_per_s),
            sheet.memory_bytes.as_f64() / f64::from(1 << 30),
            plain(&sheet.source)
        );
    }
    protocol_line(text, report, paint);
    for (title, value) in [("note", &report.note), ("hypothesis", &report.hypothesis)] {
        if let Some(value) = value {
            let _ = writeln!(text, "{title}: {}", plain(value));
        }
    }
}

/// What the run was on and by which program; `None` for a prediction.
pub(super) fn device_line(report: &Report) -> Option<String> {
    if report.kind == ReportKind::Predict {
        return None;
    }
    let environment = &report.environment;
    let device = report.capabilities.first().map_or("cpu", |c| c.device.as_str());
    let product = match (&environment.gpu, device.starts_with("cuda")) {
        (Some(gpu), true) => gpu.name.clone(),
        _ => environment.cpu.model.clone(),
    };
    let cores = environment.cpu.usable_cores;
    Some(format!(
        "{} · {} · {cores} cores · candle {} · hbmark {}{}",
        plain(device),
        plain(&product.unwrap_or_else(|| "unknown product".into())),
        plain(&environment.build.candle),
        plain(&environment.build.version),
        environment.build.git_revision.as_ref().map_or_else(String::new, |r| format!(" ({})", plain(r)))
    ))
}

fn protocol_line(text: &mut String, report: &Report, paint: &Paint) {
    if let Some((line, loud)) = protocol_text(report) {
        let _ = writeln!(text, "{}", if loud { paint.alarm(&line) } else { line });
    }
}

/// The protocol in a line, and whether it must catch the eye: everything but the full one.
pub(super) fn protocol_text(report: &Report) -> Option<(String, bool)> {
    if report.kind == ReportKind::Predict {
        return Some(("predicted from the data sheet; nothing was measured".to_owned(), true));
    }
    let p = report.protocol.as_ref()?;
    Some(match p.name.as_str() {
        "full" => {
            let line = format!(
                "protocol full: {} to {} blocks until ±{:.0} %, {} visits in random order, seed {}",
                p.min_blocks,
                p.max_blocks,
                p.target_half_width * 100.0,
                p.visits,
                p.seed
            );
            (line, false)
        }
        "smoke" => ("SMOKE run: every cell once; the times mean nothing".to_owned(), true),
        name => {
            let name = plain(name).to_uppercase();
            (format!("{name} protocol: shortened, not comparable with full runs"), true)
        }
    })
}

fn draw(text: &mut String, table: &CellTable, paint: &Paint) {
    if !table.constants.is_empty() {
        let constants: Vec<String> =
            table.constants.iter().map(|(title, value)| format!("{title} {value}")).collect();
        let _ = writeln!(text, "{}\n", paint.faint(&format!("all cells: {}", constants.join(" · "))));
    }
    let mut lines = aligned(&table.columns).into_iter();
    let _ = writeln!(text, "{}", paint.strong(&lines.next().unwrap_or_default()));
    for (line, status) in lines.zip(&table.statuses) {
        let _ = writeln!(text, "{}", paint.status(&line, *status));
    }
}

/// Columns as lines, the titles first.
pub(super) fn aligned(columns: &[Column]) -> Vec<String> {
    let width = |column: &Column| {
        let cells = column.cells.iter().map(|c| c.chars().count());
        cells.chain([column.title.chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = columns.iter().map(width).collect();
    let pad = |value: &str, index: usize| {
        let fill = " ".repeat(widths[index].saturating_sub(value.chars().count()));
        if columns[index].right { format!("{fill}{value}") } else { format!("{value}{fill}") }
    };
    let line = |of: &dyn Fn(&Column) -> String| {
        let cells: Vec<String> = columns.iter().enumerate().map(|(i, c)| pad(&of(c), i)).collect();
        cells.join("  ").trim_end().to_owned()
    };
    let rows = columns.first().map_or(0, |c| c.cells.len());
    let titles = std::iter::once(line(&|c| c.title.clone()));
    titles.chain((0..rows).map(|row| line(&|c| c.cells[row].clone()))).collect()
}

fn breakdowns(text: &mut String, report: &Report, paint: &Paint) {
    let mut section = |title: &str, tables: Vec<Breakdown>| {
        if !tables.is_empty() {
            let _ = writeln!(text, "\n{}", paint.strong(title));
        }
        for (index, table) in tables.into_iter().enumerate() {
            let gap = if index > 0 { "\n" } else { "" };
            let _ = writeln!(text, "{gap}  {}", paint.strong(&table.title));
            let mut lines = aligned(&table.columns).into_iter();
            let _ = writeln!(text, "  {}", paint.faint(&lines.next().unwrap_or_default()));
            for line in lines {
                let _ = writeln!(text, "  {line}");
            }
            let _ = writeln!(text, "  {}", table.closing);
        }
    };
    section("ladders: where the time of a step goes", breakdown::ladders(report));
    section("operations: an untimed pass of its own", breakdown::operations(report));
}

fn remarks(text: &mut String, report: &Report, paint: &Paint) {
    let mut section = |title: &str, lines: Vec<String>| {
        if !lines.is_empty() {
            let _ = writeln!(text, "\n{}", paint.strong(title));
            for line in lines {
                let _ = writeln!(text, "  {line}");
            }
        }
    };
    section("about these cells", table::remarks(&report.cells));
    section("fitted over the grid", report.fits.iter().map(fit_line).collect());
    let crossovers = report.crossovers.iter();
    section(
        "crossovers",
        crossovers.map(|c| format!("{}: {}", crossover_value(c), plain(&c.explanation))).collect(),
    );
    section(
        "cold (once per process)",
        report
            .cold
            .iter()
            .map(|row| {
                format!(
                    "{:<28} {} {:>10}",
                    plain(&row.what),
                    row.dtype,
                    single(Unit::Nanoseconds, row.time_ns)
                )
            })
            .collect(),
    );
    section("this machine, this run", report.warnings.iter().map(|w| plain(w)).collect());
}

/// The value of a crossover with its name.
pub(super) fn crossover_value(crossover: &hbmark_core::result::Crossover) -> String {
    let name = plain(&crossover.what).replace('_', " ");
    match crossover.value {
        Some(value) => format!("{name} {value:.0} {}", plain(&crossover.unit)),
        None => format!("{name} none"),
    }
}

/// A fitted model as a sentence.
pub(super) fn fit_line(fit: &hbmark_core::result::FittedModel) -> String {
    let range = |low: f64, high: f64| format!("{} to {}", Nanos(low), Nanos(high));
    let mut line = format!(
        "{} {}: fixed {} ({})",
        plain(&fit.engine),
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
    let _ = write!(line, "; r² {:.3} over {} cells", fit.r_squared, fit.cells);
    line
}
