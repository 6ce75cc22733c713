//! A folder of results: one table of its cells, one of its points of load, and where they come from.
//!
//! Enters: a [`Collection`]. Leaves: its document. What is the same in every row stands above the table. A spreadsheet gets every number of every
//! cell, or of every point where there are no cells.

use super::{run, serving};
use crate::analysis::collection::{Collection, From, Source};
use crate::analysis::words::counted;
use crate::output::document::{Column, Document, Line, Tone, facts, split_constants, words};
use crate::output::{Kind, OutputError};
use hbmark_core::result::CellResult;
use hbmark_core::result::serving::Point;

impl Kind for Collection {
    fn document(&self) -> Document {
        let mut document = Document::new(format!(
            "{} in {}: {}, {} of load",
            counted(self.sources.len(), "result"),
            self.folder,
            counted(self.cells.len(), "cell"),
            counted(self.points.len(), "point")
        ));
        document.lines([Line::Said(
            Tone::Faint,
            "rows of one model, device and name stand together, the oldest first; compare decides between two revisions, a table does not"
                .to_owned(),
        )]);
        if !self.cells.is_empty() {
            let cells: Vec<CellResult> = self.cells.iter().map(|cell| cell.row.clone()).collect();
            let (same, columns) = run::of_cells(&cells);
            self.push(&mut document, "cells", &self.cells, same, columns);
        }
        if !self.points.is_empty() {
            let points: Vec<Point> = self.points.iter().map(|point| point.row.clone()).collect();
            self.push(&mut document, "points of load", &self.points, Vec::new(), serving::curve(&points));
        }
        document.heading("results");
        document.table(vec![
            words("file", self.sources.iter().map(|source| source.file.clone())).key(),
            words("kind", self.sources.iter().map(|source| source.kind.to_owned())),
            words("started", self.sources.iter().map(|source| or_dash(source.started_at.as_ref()))),
            words("revision", self.sources.iter().map(|source| or_dash(source.revision.as_ref()))),
            words("model", self.sources.iter().map(|source| source.model.clone())),
            words("device", self.sources.iter().map(|source| source.device.clone())),
            words("note", self.sources.iter().map(|source| or_dash(source.note.as_ref()))),
        ]);
        document.section(
            "files that are no results",
            self.unused.iter().map(|unused| format!("{}: {}", unused.file, unused.why)),
        );
        document.sheet = Some(self.sheet());
        document
    }

    fn json(&self) -> Result<String, OutputError> {
        Ok(serde_json::to_string_pretty(self)?)
    }
}

fn or_dash(text: Option<&String>) -> String {
    text.map_or_else(|| "-".to_owned(), Clone::clone)
}

impl Collection {
    fn of<'a, T>(&'a self, rows: &'a [From<T>]) -> impl Iterator<Item = &'a Source> {
        rows.iter().map(|row| &self.sources[row.source])
    }

    /// A table with columns of where each row is from; what is the same in all rows stands above it.
    fn push<T>(
        &self,
        document: &mut Document,
        title: &str,
        rows: &[From<T>],
        mut same: Vec<(String, String)>,
        columns: Vec<Column>,
    ) {
        let origin = vec![
            words("model", self.of(rows).map(|source| source.model.clone())).key(),
            words("device", self.of(rows).map(|source| source.device.clone())).minor(true),
            words("revision", self.of(rows).map(|source| or_dash(source.revision.as_ref()))).key(),
            words("started", self.of(rows).map(|source| or_dash(source.started_at.as_ref()))).minor(true),
        ];
        let (constant, varying) = split_constants(origin, |_| rows.len() > 1);
        same.splice(0..0, constant);
        document.heading(title);
        if !same.is_empty() {
            document.lines([Line::Said(Tone::Faint, format!("all {title}: {}", facts(&same)))]);
        }
        document.table(varying.into_iter().chain(columns).collect());
    }

    fn sheet(&self) -> Vec<Column> {
        let origin = |sources: &mut dyn Iterator<Item = &Source>| {
            let sources: Vec<&Source> = sources.collect();
            vec![
                words("file", sources.iter().map(|source| source.file.clone())),
                words("kind", sources.iter().map(|source| source.kind.to_owned())),
                words(
                    "started_at",
                    sources.iter().map(|source| source.started_at.clone().unwrap_or_default()),
                ),
                words("revision", sources.iter().map(|source| source.revision.clone().unwrap_or_default())),
                words("model", sources.iter().map(|source| source.model.clone())),
                words("device", sources.iter().map(|source| source.device.clone())),
            ]
        };
        if self.cells.is_empty() {
            let points: Vec<Point> = self.points.iter().map(|point| point.row.clone()).collect();
            return [origin(&mut self.of(&self.points)), serving::sheet(&points)].concat();
        }
        let cells: Vec<CellResult> = self.cells.iter().map(|cell| cell.row.clone()).collect();
        [origin(&mut self.of(&self.cells)), run::sheet(&cells)].concat()
    }
}
