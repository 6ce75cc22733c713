//! The cells of a report as CSV: one row a cell, raw numbers, the unit in the heading.

use super::metrics::METRICS;
use super::table::{bound_word, status_word};
use crate::output::OutputError;
use hbmark_core::input::plain;
use hbmark_core::result::Report;
use hbmark_core::result::cause::joined;

/// Text that a spreadsheet will not run as a formula.
pub(super) fn harmless(text: &str) -> String {
    let text = plain(text);
    if text.starts_with(['=', '+', '-', '@']) { format!("'{text}") } else { text }
}

/// Draws a report.
///
/// # Errors
/// Never on a buffer in memory; the signature is the writer's.
pub fn render(report: &Report) -> Result<String, OutputError> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    let names =
        ["id", "phase", "engine", "dtype", "kv_dtype", "batch", "context", "status", "reason", "bound"];
    let metrics = METRICS.iter().map(|m| format!("{}{}", m.key, m.unit.suffix()));
    writer.write_record(names.iter().map(ToString::to_string).chain(metrics))?;
    for cell in &report.cells {
        let mut record = vec![
            harmless(&cell.id),
            format!("{:?}", cell.phase).to_lowercase(),
            harmless(&cell.engine),
            cell.dtype.to_string(),
            cell.kv_dtype.to_string(),
            cell.batch.to_string(),
            cell.context.to_string(),
            status_word(cell.status).to_owned(),
            harmless(&joined(cell.reason.as_slice())),
            cell.bound.map_or("", bound_word).to_owned(),
        ];
        // A number that was not measured is an empty field, never 0.
        record.extend(METRICS.iter().map(|m| (m.value)(cell).map_or_else(String::new, |v| v.to_string())));
        writer.write_record(record)?;
    }
    let bytes = writer.into_inner().map_err(|e| OutputError::Csv(e.into_error().into()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
