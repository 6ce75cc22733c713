//! The formats of a result.
//!
//! Enters: a result as plain data, and what the analysis says of it. Leaves: text: a table for a terminal, CSV, Markdown, or one HTML page
//! that loads nothing. What is null is a dash or an empty field, never 0.

mod breakdown;
pub mod capacity;
pub mod comparison;
mod csv;
pub mod findings;
pub mod foreign;
pub mod glossary;
mod html;
mod markdown;
pub mod metrics;
pub mod record;
pub mod serving;
mod table;
mod terminal;
mod text;

use hbmark_core::result::{CellResult, Report, saved};

/// Another program's decode, to stand beside the cells of a report on its roofline.
#[derive(Debug, Clone, PartialEq)]
pub struct External {
    /// What the file calls the row.
    pub label: String,
    pub cell: CellResult,
}

/// How everything is printed that has no page of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum TextFormat {
    /// For a person at a terminal.
    Table,
    /// Everything.
    Json,
    /// One row a thing.
    Csv,
    /// For an issue or a pull request.
    Md,
}

/// How a report is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// For a person at a terminal.
    Table,
    /// Everything, raw samples included.
    Json,
    /// One row a cell.
    Csv,
    /// For an issue or a pull request.
    Md,
    /// One page with plots, for a browser; it loads nothing.
    Html,
}

impl Format {
    /// The same without pages.
    #[must_use]
    pub fn as_text(self) -> Option<TextFormat> {
        match self {
            Self::Table => Some(TextFormat::Table),
            Self::Json => Some(TextFormat::Json),
            Self::Csv => Some(TextFormat::Csv),
            Self::Md => Some(TextFormat::Md),
            Self::Html => None,
        }
    }
}

/// Why a result could not be printed.
#[derive(Debug, thiserror::Error)]
pub enum OutputError {
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error(transparent)]
    Csv(#[from] ::csv::Error),
}

/// Prints a report in a format; `color` is for the table on a terminal.
///
/// # Errors
/// When a format's writer fails.
pub fn render(report: &Report, format: Format, color: bool) -> Result<String, OutputError> {
    match format {
        Format::Table => Ok(terminal::render(report, color)),
        Format::Json => Ok(saved::write(report)?),
        Format::Csv => csv::render(report),
        Format::Md => Ok(markdown::render(report)),
        Format::Html => Ok(html::render(report, &[])),
    }
}

/// Draws a report as a page, with other programs' decodes on its roofline.
#[must_use]
pub fn page(report: &Report, externals: &[External]) -> String {
    html::render(report, externals)
}

#[cfg(test)]
mod tests;
