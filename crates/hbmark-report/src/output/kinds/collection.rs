//! A folder of results: one table of its cells, one of its points of load, and where they come from.
//!
//! Enters: a [`Collection`]. Leaves: its document. What is the same in every row stands above the table. A spreadsheet gets every number of every
//! cell and, below them, of every point of load.

use super::{run, serving};
use crate::analysis::collection::{Collection, Source, Sourced};
use crate::analysis::words::counted;
use crate::output::Kind;
use crate::output::document::{
    Column, Document, Line, Tone, facts, measured, numbers, split_constants, words,
};
use crate::output::metrics::Unit;
use hbmark_core::result::CellResult;
use hbmark_core::result::serving::{Offered, Point};

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
            let mut curve = serving::curve(&points);
            curve.insert(1, numbers("rate", points.iter().map(rate)));
            curve.insert(
                1,
                words("workload", self.of(&self.points).map(|source| or_dash(source.workload.as_ref()))),
            );
            self.push(&mut document, "points of load", &self.points, Vec::new(), curve);
        }
        document.heading("results");
        document.table(vec![
            words("file", self.sources.iter().map(|source| source.file.clone())).key(),
            words("kind", self.sources.iter().map(|source| source.kind.to_owned())),
            words("started", self.sources.iter().map(|source| or_dash(source.started_at.as_ref()))),
            words("revision", self.sources.iter().map(|source| or_dash(source.revision.as_ref()))),
            words("model", self.sources.iter().map(|source| source.model.clone())),
            words("device", self.sources.iter().map(|source| source.device.clone())),
            words("protocol", self.sources.iter().map(|source| or_dash(source.protocol.as_ref()))),
            words("note", self.sources.iter().map(|source| or_dash(source.note.as_ref()))),
        ]);
        document.section(
            "files that are not results",
            self.unused.iter().map(|unused| format!("{}: {}", unused.file, unused.why)),
        );
        document.sheet = Some(self.sheet());
        document
    }

    fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self)
    }
}

fn or_dash(text: Option<&String>) -> String {
    text.map_or_else(|| "-".to_owned(), Clone::clone)
}

/// Requests per second that were asked for, or how else the load was given.
fn rate(point: &Point) -> String {
    match point.offered {
        Offered::Rate(rate) => rate.to_string(),
        Offered::AtOnce => "inf".to_owned(),
        Offered::Concurrency(most) => format!("{most} at once"),
        Offered::AsRecorded => "as recorded".to_owned(),
    }
}

impl Collection {
    fn of<'a, T>(&'a self, rows: &'a [Sourced<T>]) -> impl Iterator<Item = &'a Source> {
        rows.iter().map(|row| &self.sources[row.source])
    }

    /// A table with columns of where each row is from; what is the same in all rows stands above it.
    fn push<T>(
        &self,
        document: &mut Document,
        title: &str,
        rows: &[Sourced<T>],
        mut same: Vec<(String, String)>,
        columns: Vec<Column>,
    ) {
        let origin = vec![
            words("model", self.of(rows).map(|source| source.model.clone())).key(),
            words("device", self.of(rows).map(|source| source.device.clone())).minor(true),
            words("revision", self.of(rows).map(|source| or_dash(source.revision.as_ref()))).key(),
            words("protocol", self.of(rows).map(|source| or_dash(source.protocol.as_ref()))).key(),
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

    /// Points of load stand below cells; columns that only the others have are empty.
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
                words("protocol", sources.iter().map(|source| source.protocol.clone().unwrap_or_default())),
            ]
        };
        let cells: Vec<CellResult> = self.cells.iter().map(|cell| cell.row.clone()).collect();
        let mut cells = [origin(&mut self.of(&self.cells)), run::sheet(&cells)].concat();
        // Counted in the blocks of a cell, which are not here.
        let counts = self.cells.iter().map(|cell| cell.block_counts);
        let (taken, rejected): (Vec<_>, Vec<_>) =
            counts.map(|blocks| (blocks.map(|b| b.taken as f64), blocks.map(|b| b.rejected as f64))).unzip();
        for (title, known) in [("blocks", taken), ("blocks_rejected", rejected)] {
            let known = known.into_iter();
            if let Some(column) = cells.iter_mut().find(|column| column.title == title) {
                column.cells = measured(title, Unit::Count, known).cells;
            }
        }
        let points: Vec<Point> = self.points.iter().map(|point| point.row.clone()).collect();
        let load = vec![words(
            "workload",
            self.of(&self.points).map(|source| source.workload.clone().unwrap_or_default()),
        )];
        let points = [origin(&mut self.of(&self.points)), load, serving::sheet(&points)].concat();
        match (self.cells.len(), self.points.len()) {
            (_, 0) => cells,
            (0, _) => points,
            rows => stacked(cells, points, rows),
        }
    }
}

/// Two sheets of so many rows as one. Columns of the same title and kind are one column.
fn stacked(above: Vec<Column>, below: Vec<Column>, rows: (usize, usize)) -> Vec<Column> {
    let mut below: Vec<Option<Column>> = below.into_iter().map(Some).collect();
    let mut columns: Vec<Column> = Vec::new();
    for mut column in above {
        let title = column.title_with_unit();
        let same = below.iter_mut().find(|other| {
            other
                .as_ref()
                .is_some_and(|other| other.title_with_unit() == title && other.cells.alike(&column.cells))
        });
        let rest =
            same.and_then(Option::take).map_or_else(|| column.cells.empty(rows.1), |other| other.cells);
        column.cells.extend(rest);
        columns.push(column);
    }
    columns.extend(below.into_iter().flatten().map(|mut column| {
        let mut cells = column.cells.empty(rows.0);
        cells.extend(column.cells);
        column.cells = cells;
        column
    }));
    columns
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::{Format, Screen, render};
    use crate::samples;
    use std::collections::BTreeSet;

    #[test]
    fn a_quick_run_is_told_from_a_full_one_in_every_format() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["full", "quick"] {
            let mut run = samples::measured();
            run.protocol = Some(samples::protocol_named(name));
            let text = hbmark_core::result::saved::write(&run).unwrap();
            std::fs::write(folder.path().join(format!("{name}.json")), text).unwrap();
        }
        let found = Collection::read(folder.path()).unwrap();
        for (format, quick) in [
            (Format::Table, "quick"),
            (Format::Csv, "quick"),
            (Format::Json, "\"protocol\": \"quick\""),
            (Format::Html, ">quick<"),
        ] {
            let text = render(&found, format, Screen::default()).unwrap();
            assert!(text.contains("protocol") && text.contains(quick), "{text}");
        }
        let csv = render(&found, Format::Csv, Screen::default()).unwrap();
        let rows = |word: &str| csv.lines().filter(|line| line.contains(&format!(",{word},"))).count();
        assert_eq!((rows("quick"), rows("full")), (found.cells.len() / 2, found.cells.len() / 2));
    }

    #[test]
    fn a_sheet_of_runs_and_of_points_has_a_row_for_each() {
        let folder = tempfile::tempdir().unwrap();
        let (run, sweep) = (samples::measured(), samples::sweep());
        std::fs::write(folder.path().join("run.json"), hbmark_core::result::saved::write(&run).unwrap())
            .unwrap();
        std::fs::write(folder.path().join("serve.json"), serde_json::to_string(&sweep).unwrap()).unwrap();
        let found = Collection::read(folder.path()).unwrap();
        let csv = render(&found, Format::Csv, Screen::default()).unwrap();
        let mut table = csv::Reader::from_reader(csv.as_bytes());
        let titles = table.headers().unwrap().clone();
        let at = |title: &str| titles.iter().position(|t| t == title).unwrap_or_else(|| panic!("no {title}"));
        let (kind, cell, point, rate) = (at("kind"), at("id"), at("label"), at("served_per_s"));
        let rows: Vec<csv::StringRecord> = table.records().map(Result::unwrap).collect();
        let of = |wanted: &str| rows.iter().filter(|row| &row[kind] == wanted).collect::<Vec<_>>();
        assert_eq!((of("run").len(), of("serve").len()), (run.cells.len(), sweep.points.len()));
        assert!(
            of("run")
                .iter()
                .all(|row| !row[cell].is_empty() && row[point].is_empty() && row[rate].is_empty())
        );
        assert!(of("run").iter().all(|row| &row[at("blocks")] == "5" && &row[at("blocks_rejected")] == "1"));
        assert!(of("serve").iter().all(|row| row[cell].is_empty() && !row[point].is_empty()));
        assert!(of("serve").iter().any(|row| !row[rate].is_empty()));
        let rates: Vec<&str> = of("serve").iter().map(|row| &row[at("rate")]).collect();
        assert!(rates.starts_with(&["2", "8"]), "{rates:?}");
        assert!(of("serve").iter().all(|row| row[at("workload")] == sweep.workload.name));
        let unique: BTreeSet<&str> = titles.iter().collect();
        assert_eq!(unique.len(), titles.len(), "{titles:?}");
    }
}
