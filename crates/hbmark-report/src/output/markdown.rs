//! A report as Markdown, for an issue or a pull request.

use std::fmt::Write;

use super::breakdown::{self, Breakdown};
use super::table::{self, Column};
use super::terminal::{crossover_value, fit_line};
use hbmark_core::input::plain;
use hbmark_core::result::{Report, ReportKind};
use hbmark_core::units::BytesPerSecond;

/// Text that stays text inside a Markdown table or list.
pub(super) fn escape(text: &str) -> String {
    plain(text).chars().fold(String::new(), |mut out, c| {
        if matches!(c, '|' | '\\' | '`' | '*' | '_' | '[' | ']' | '<' | '>' | '#') {
            out.push('\\');
        }
        out.push(c);
        out
    })
}

pub(super) fn rows(text: &mut String, columns: &[Column]) {
    let titles: Vec<String> = columns.iter().map(|c| escape(&c.title)).collect();
    let rules: Vec<&str> = columns.iter().map(|c| if c.right { "---:" } else { "---" }).collect();
    let _ = writeln!(text, "| {} |\n|{}|", titles.join(" | "), rules.join("|"));
    for row in 0..columns.first().map_or(0, |c| c.cells.len()) {
        let cells: Vec<String> = columns.iter().map(|c| escape(&c.cells[row])).collect();
        let _ = writeln!(text, "| {} |", cells.join(" | "));
    }
}

fn breakdowns(text: &mut String, tables: Vec<Breakdown>) {
    for table in tables {
        let _ = writeln!(text, "\n**{}**\n", escape(&table.title));
        // The bars are drawn with spaces, which Markdown folds.
        let told: Vec<Column> = table.columns.into_iter().filter(|c| !c.title.is_empty()).collect();
        rows(text, &told);
        let _ = writeln!(text, "\n{}", escape(&table.closing));
    }
}

/// Draws a report.
#[must_use]
pub fn render(report: &Report) -> String {
    let mut text = String::new();
    let _ = writeln!(text, "### {} ({})\n", escape(&report.model.name), escape(&report.model.source));
    let protocol = match (&report.protocol, report.kind) {
        (_, ReportKind::Predict) => "predicted from the data sheet; nothing was measured".to_owned(),
        (Some(p), _) => format!("{} protocol, seed {}", escape(&p.name), p.seed),
        (None, _) => "protocol unknown".to_owned(),
    };
    let _ = writeln!(text, "- {protocol}");
    if let Some(c) = &report.ceilings {
        let _ = writeln!(
            text,
            "- read ceiling measured in this run: {} ({} to {})",
            BytesPerSecond(c.read_bytes_per_s.median),
            BytesPerSecond(c.read_bytes_per_s.low),
            BytesPerSecond(c.read_bytes_per_s.high)
        );
    }
    if let Some(sheet) = &report.datasheet {
        let _ = writeln!(
            text,
            "- data sheet: {}, {}",
            escape(&sheet.product),
            BytesPerSecond(sheet.bandwidth_bytes_per_s)
        );
    }
    let table = table::of_cells(&report.cells);
    for (title, value) in &table.constants {
        let _ = writeln!(text, "- {}: {}", escape(title), escape(value));
    }
    let _ = writeln!(text, "- command: `{}`\n", plain(&report.command).replace('`', "'"));
    rows(&mut text, &table.columns);
    breakdowns(&mut text, breakdown::ladders(report));
    breakdowns(&mut text, breakdown::operations(report));
    let mut remarks = table::remarks(&report.cells);
    remarks.extend(report.fits.iter().map(fit_line));
    remarks.extend(report.crossovers.iter().map(|c| format!("{}: {}", crossover_value(c), c.explanation)));
    remarks.extend(report.warnings.iter().cloned());
    if !remarks.is_empty() {
        text.push('\n');
    }
    for remark in remarks {
        let _ = writeln!(text, "- {}", escape(&remark));
    }
    text
}
