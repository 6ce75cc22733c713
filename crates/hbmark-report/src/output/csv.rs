//! A document for a spreadsheet: one row per thing, raw numbers, the unit in the heading.
//!
//! Enters: a [`Document`]. Leaves: its sheet as CSV, or where it has none its tables one after the other. A number that is not known is an
//! empty field, never 0.

use super::document::{Block, Cells, Column, Document, Table, Value};
use crate::output::OutputError;
use hbmark_core::input::plain;

/// Draws a document.
///
/// # Errors
/// Never on a buffer in memory; the signature is the writer's.
pub fn render(document: &Document) -> Result<String, OutputError> {
    if let Some(sheet) = &document.sheet {
        return write(
            sheet.iter().map(Column::title_with_unit),
            &sheet.iter().map(fields).collect::<Vec<_>>(),
        );
    }
    let mut text = String::new();
    for table in document.blocks.iter().flat_map(tables) {
        let columns = || table.columns.iter().filter(|column| !column.is_drawing());
        text += &write(columns().map(Column::title_with_unit), &columns().map(fields).collect::<Vec<_>>())?;
    }
    Ok(text)
}

fn tables(block: &Block) -> Vec<&Table> {
    match block {
        Block::Table(table) => vec![table],
        Block::Plot(plot) => plot.tables.iter().collect(),
        Block::Fold { blocks, .. } => blocks.iter().flat_map(tables).collect(),
        _ => Vec::new(),
    }
}

fn write(titles: impl Iterator<Item = String>, columns: &[Vec<String>]) -> Result<String, OutputError> {
    let mut writer = ::csv::Writer::from_writer(Vec::new());
    writer.write_record(titles.map(|title| harmless(&title)))?;
    for row in 0..columns.first().map_or(0, Vec::len) {
        writer.write_record(columns.iter().map(|column| column[row].as_str()))?;
    }
    let bytes = writer.into_inner().map_err(|e| OutputError::Csv(e.into_error().into()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn fields(column: &Column) -> Vec<String> {
    match &column.cells {
        Cells::Words(cells) | Cells::Numbers(cells) | Cells::Bars(cells) => {
            // For a reader nothing is a dash.
            cells.iter().map(|cell| if cell == "-" { String::new() } else { harmless(cell) }).collect()
        }
        Cells::Measured { values, .. } => values.iter().map(field).collect(),
    }
}

fn field(value: &Value) -> String {
    match value {
        Value::Null | Value::Word(_) => String::new(),
        Value::Finite(value) | Value::Disturbed(value) => value.to_string(),
        Value::Doubtful(spread) => spread.median.to_string(),
        Value::Infinite => "infinite".to_owned(),
    }
}

/// Text that a spreadsheet will not run as a formula.
fn harmless(text: &str) -> String {
    let text = plain(text);
    if text.starts_with(['=', '+', '-', '@']) { format!("'{text}") } else { text }
}
