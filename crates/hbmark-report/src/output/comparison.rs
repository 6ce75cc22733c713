//! The result of a comparison as plain data, and its output formats.
//!
//! Enters: what was compared, run and judged. Leaves: one [`Comparison`], from which every format is printed. It decides nothing: verdicts
//! are those of [`crate::analysis::compare`].

use std::fmt::Write;

use owo_colors::Style;

use super::csv::harmless;
use super::markdown::{escape, rows};
use super::metrics::Unit;
use super::table::Column;
use super::terminal::{Paint, aligned};
use super::text::column;
use super::{OutputError, TextFormat};
use crate::analysis::compare::percent;
use hbmark_core::input::plain;
use hbmark_core::result::comparison::{
    Arm, CellComparison, ComparedCell, Comparison, ComparisonVerdict, Effect, Method,
};

/// Prints a comparison in a format; `color` is for the table on a terminal.
///
/// # Errors
/// When a format's writer fails.
pub fn render(comparison: &Comparison, format: TextFormat, color: bool) -> Result<String, OutputError> {
    match format {
        TextFormat::Table => Ok(terminal(comparison, color)),
        TextFormat::Json => Ok(serde_json::to_string_pretty(comparison)?),
        TextFormat::Csv => csv(comparison),
        TextFormat::Md => Ok(markdown(comparison)),
    }
}

/// One row of a table: a cell, or all of them together.
struct Row<'a> {
    place: Option<&'a ComparedCell>,
    effect: &'a Effect,
}

fn table_rows<'a>(cells: &'a [CellComparison], overall: Option<&'a Effect>) -> Vec<Row<'a>> {
    let each = cells.iter().map(|cell| Row { place: Some(&cell.place), effect: &cell.effect });
    each.chain(overall.map(|effect| Row { place: None, effect })).collect()
}

/// The columns of a table; those of the test are there where one was made.
fn columns(rows: &[Row<'_>]) -> Vec<Column> {
    let text = |title: &str, right: bool, of: &dyn Fn(&Row<'_>) -> String| Column {
        title: title.to_owned(),
        right,
        cells: rows.iter().map(of).collect(),
    };
    let numbers = |title: &str, unit: Unit, of: &dyn Fn(&Effect) -> Option<f64>| Column {
        title: title.to_owned(),
        right: true,
        cells: column(unit, &rows.iter().map(|row| of(row.effect)).collect::<Vec<_>>()),
    };
    let placed = |row: &Row<'_>, of: &dyn Fn(&ComparedCell) -> String| row.place.map_or_else(String::new, of);
    let small = |value: Option<f64>| value.map_or_else(|| "-".into(), percent);
    let p = |value: Option<f64>| match value {
        Some(p) if p < 0.0001 => "< 0.0001".to_owned(),
        Some(p) => format!("{p:.4}"),
        None => "-".to_owned(),
    };
    let ratio = |value: Option<f64>| value.map_or_else(|| "-".into(), |value| format!("{value:.4}"));
    let mut columns = vec![
        text("cell", false, &|row| match row.place {
            Some(place) => format!("{:?} b{} c{}", place.phase, place.batch, place.context).to_lowercase(),
            None => "all cells".into(),
        }),
        text("A", false, &|row| placed(row, &|place| plain(&place.a.to_string()))),
        text("B", false, &|row| placed(row, &|place| plain(&place.b.to_string()))),
        numbers("A time", Unit::Nanoseconds, &|effect| effect.a_ns),
        numbers("B time", Unit::Nanoseconds, &|effect| effect.b_ns),
        text("B/A", true, &|row| ratio(row.effect.ratio)),
        text("95 % interval", false, &|row| match (row.effect.low, row.effect.high) {
            (Some(low), Some(high)) => format!("{low:.4} to {high:.4}"),
            _ => "-".into(),
        }),
    ];
    if rows.iter().any(|row| row.effect.p.is_some()) {
        columns.push(text("p", true, &|row| p(row.effect.p)));
        columns.push(text("p (Holm)", true, &|row| p(row.effect.p_holm)));
        columns.push(text("detectable", true, &|row| small(row.effect.minimum_detectable)));
    }
    if rows.iter().any(|row| row.effect.floor.is_some()) {
        columns.push(text("A/A floor", true, &|row| small(row.effect.floor)));
    }
    columns.push(text("verdict", false, &|row| row.effect.verdict.word().into()));
    columns.push(text("because", false, &|row| row.effect.reason.clone()));
    columns
}

/// What was compared, how, line by line and without markup.
fn header(comparison: &Comparison) -> Vec<String> {
    let side = |letter: char, arm: &Arm| format!("{letter}: {}", plain(&arm.given));
    let mut lines = vec![
        plain(&comparison.model),
        plain(&comparison.machine),
        side('A', &comparison.a),
        side('B', &comparison.b),
    ];
    if comparison.differences.is_empty() {
        lines.push("the configurations do not differ".into());
    } else {
        let each = comparison.differences.iter().map(|d| {
            let text = |value: &serde_json::Value| match value {
                serde_json::Value::Null => "default".to_owned(),
                other => other.to_string().replace('"', ""),
            };
            plain(&format!("{} {} in A, {} in B", d.key, text(&d.a), text(&d.b)))
        });
        lines.push(format!("they differ in: {}", each.collect::<Vec<_>>().join("; ")));
    }
    let protocol = comparison.protocol.as_deref().unwrap_or("unknown");
    lines.push(match comparison.method {
        Method::PairedRounds => format!(
            "{} rounds, a fresh process a side, in random order (seed {}: {}), {} protocol in each",
            comparison.rounds.unwrap_or_default(),
            comparison.seed.unwrap_or_default(),
            comparison.order.join(" "),
            plain(protocol)
        ),
        Method::SavedResults => {
            format!("two saved results, {} protocol: no rounds, no test", plain(protocol))
        }
    });
    lines.push(format!(
        "ratios are B's time over A's; equivalent within ±{}; p by sign flips, corrected over the cells",
        percent(comparison.settings.margin)
    ));
    lines
}

/// Sections under the table.
fn closing(comparison: &Comparison) -> Vec<(&'static str, Vec<String>)> {
    let clean = |lines: &[String]| lines.iter().map(|line| plain(line)).collect::<Vec<_>>();
    let mut sections = vec![
        ("about these rounds", clean(&comparison.remarks)),
        ("what this cannot prove", clean(&comparison.limits)),
    ];
    sections.retain(|(_, lines)| !lines.is_empty());
    sections
}

fn terminal(comparison: &Comparison, color: bool) -> String {
    let paint = Paint(color);
    let mut text = String::new();
    for (index, line) in header(comparison).into_iter().enumerate() {
        let _ = writeln!(text, "{}", if index == 0 { paint.strong(&line) } else { line });
    }
    let mut draw = |title: Option<&str>, found: &[Row<'_>]| {
        let _ = writeln!(text, "{}", title.map_or_else(String::new, |t| format!("\n{}", paint.strong(t))));
        let mut lines = aligned(&columns(found)).into_iter();
        let _ = writeln!(text, "{}", paint.strong(&lines.next().unwrap_or_default()));
        for (line, row) in lines.zip(found) {
            let style = match row.effect.verdict {
                ComparisonVerdict::Faster => Style::new().green(),
                ComparisonVerdict::Slower => Style::new().red(),
                ComparisonVerdict::Equivalent => Style::new(),
                ComparisonVerdict::Inconclusive => Style::new().dimmed(),
            };
            let _ = writeln!(text, "{}", paint.with(&line, style));
        }
    };
    if let Some(floor) = &comparison.floor {
        draw(
            Some("A against A: the floor of this machine"),
            &table_rows(&floor.cells, floor.overall.as_ref()),
        );
        draw(Some("B against A"), &table_rows(&comparison.cells, comparison.overall.as_ref()));
    } else {
        draw(None, &table_rows(&comparison.cells, comparison.overall.as_ref()));
    }
    for (title, lines) in closing(comparison) {
        let _ = writeln!(text, "\n{}", paint.strong(title));
        for line in lines {
            let _ = writeln!(text, "  {line}");
        }
    }
    text
}

fn markdown(comparison: &Comparison) -> String {
    let mut text = String::from("### Comparison\n\n");
    for line in header(comparison) {
        let _ = writeln!(text, "- {}", escape(&line));
    }
    let _ = writeln!(text, "- command: `{}`\n", plain(&comparison.command).replace('`', "'"));
    if let Some(floor) = &comparison.floor {
        text.push_str("**A against A: the floor of this machine**\n\n");
        rows(&mut text, &columns(&table_rows(&floor.cells, floor.overall.as_ref())));
        text.push_str("\n**B against A**\n\n");
    }
    rows(&mut text, &columns(&table_rows(&comparison.cells, comparison.overall.as_ref())));
    for (title, lines) in closing(comparison) {
        let _ = writeln!(text, "\n**{title}**\n");
        for line in lines {
            let _ = writeln!(text, "- {}", escape(&line));
        }
    }
    text
}

/// Raw numbers, one row a cell and one for all cells; A against itself is marked in the first column.
fn csv(comparison: &Comparison) -> Result<String, OutputError> {
    let mut writer = ::csv::Writer::from_writer(Vec::new());
    writer.write_record([
        "of",
        "phase",
        "batch",
        "context",
        "a_engine",
        "a_dtype",
        "b_engine",
        "b_dtype",
        "rounds",
        "a_ns",
        "b_ns",
        "ratio",
        "low",
        "high",
        "p",
        "p_holm",
        "minimum_detectable",
        "floor",
        "verdict",
        "reason",
    ])?;
    let floor = comparison
        .floor
        .iter()
        .flat_map(|f| table_rows(&f.cells, f.overall.as_ref()).into_iter().map(|row| ("a_against_a", row)));
    let found = table_rows(&comparison.cells, comparison.overall.as_ref());
    for (of, row) in floor.chain(found.into_iter().map(|row| ("b_against_a", row))) {
        let number = |value: Option<f64>| value.map_or_else(String::new, |v| v.to_string());
        let mut record = vec![of.to_owned()];
        if let Some(place) = row.place {
            record.extend([
                format!("{:?}", place.phase).to_lowercase(),
                place.batch.to_string(),
                place.context.to_string(),
                harmless(&place.a.engine),
                place.a.dtype.to_string(),
                harmless(&place.b.engine),
                place.b.dtype.to_string(),
            ]);
        } else {
            record.push("all".into());
            record.extend(std::iter::repeat_n(String::new(), 6));
        }
        let e = row.effect;
        record.push(e.rounds.to_string());
        record.extend(
            [e.a_ns, e.b_ns, e.ratio, e.low, e.high, e.p, e.p_holm, e.minimum_detectable, e.floor]
                .map(number),
        );
        record.extend([e.verdict.word().to_owned(), harmless(&e.reason)]);
        writer.write_record(record)?;
    }
    let bytes = writer.into_inner().map_err(|e| OutputError::Csv(e.into_error().into()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
