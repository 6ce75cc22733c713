//! The formats of a result, and what there is to print.
//!
//! Enters: a result as plain data, and its analysis. Leaves: text: a table for a terminal, CSV, Markdown, or one HTML page
//! that loads nothing. What is null is a dash or an empty field, never 0.
//!
//! A kind of result is one file of [`kinds`] that makes it a [`Document`]; a format is one module that draws any document. Neither imports
//! the other, and a command calls [`render`].

mod csv;
pub mod document;
mod html;
pub mod kinds;
mod markdown;
pub mod metrics;
mod parquet;
pub mod plot;
mod terminal;
mod text;
pub mod vllm_schema;

use document::Document;
pub use terminal::Screen;

use hbmark_core::result::{CellResult, Report};

pub use kinds::{Aliases, Glossary, copy_above_read, record, status_word};

/// Another program's decode, to be drawn beside the cells of a report on its roofline.
#[derive(Debug, Clone, PartialEq)]
pub struct External {
    /// The name of its file.
    pub file: String,
    /// What the file calls the row.
    pub label: String,
    pub cell: CellResult,
}

/// How a result is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// For a person at a terminal.
    #[value(alias = "text")]
    Table,
    /// Everything, raw samples included.
    Json,
    /// One row per thing.
    Csv,
    /// For an issue or a pull request.
    Md,
    /// One page with plots, for a browser; it loads nothing.
    Html,
}

impl Format {
    /// The formats that are saved in files, in the order of writing.
    pub const SAVED: [Self; 4] = [Self::Json, Self::Csv, Self::Md, Self::Html];

    /// Whether a person reads it, and not a program.
    pub fn is_for_people(self) -> bool {
        matches!(self, Self::Table | Self::Md | Self::Html)
    }

    /// The name of a file of this format; `stem` is its subject.
    pub fn file_name(self, stem: &str) -> String {
        match self {
            Self::Table => format!("{stem}.txt"),
            Self::Json => format!("{stem}.json"),
            Self::Csv => format!("{stem}.csv"),
            Self::Md => format!("{stem}.md"),
            Self::Html => "report.html".to_owned(),
        }
    }
}

/// Something that can be printed in every format.
pub trait Kind {
    /// Its content for a reader.
    fn document(&self) -> Document;

    /// All its data, to be read back.
    ///
    /// # Errors
    /// When it cannot be serialised.
    // Without a default, which would be compiled once more in each crate that prints the kind.
    fn json(&self) -> serde_json::Result<String>;

    /// Its content for a page: kinds with plots have more there.
    fn page(&self) -> Document {
        self.document()
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

/// Prints a result in a format; the screen is for the table on a terminal.
///
/// # Errors
/// When a format's writer fails.
pub fn render<K: Kind + ?Sized>(
    result: &K,
    format: Format,
    screen: impl Into<Screen>,
) -> Result<String, OutputError> {
    match format {
        Format::Table => Ok(terminal::render(&result.document(), screen)),
        Format::Json => Ok(result.json()?),
        Format::Csv => csv::render(&result.document()),
        Format::Md => Ok(markdown(&result.document())),
        Format::Html => Ok(html::render(&result.page())),
    }
}

/// A document's sheet of raw numbers as the bytes of a Parquet file, where it has one.
pub fn parquet(document: &Document) -> Option<Vec<u8>> {
    parquet::render(document)
}

/// Draws a document as Markdown.
pub fn markdown(document: &Document) -> String {
    markdown::render(document)
}

/// Draws a report as an HTML page, with other programs' decodes on its roofline.
pub fn page(report: &Report, externals: &[External]) -> String {
    html::render(&kinds::run::page(report, externals))
}

#[cfg(test)]
mod tests;
