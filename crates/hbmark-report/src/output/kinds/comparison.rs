//! The result of a comparison.
//!
//! Enters: what was compared, run and judged. Leaves: a document. It decides nothing: verdicts are those of [`crate::analysis::compare`].

use crate::analysis::compare::percent;
use crate::analysis::words::counted;
use crate::output::Kind;
use crate::output::document::{Block, Column, Document, Line, Table, Tone, measured, numbers, words};
use crate::output::kinds::headline;
use crate::output::metrics::Unit;
use hbmark_core::result::comparison::{
    Arm, CellComparison, ComparedCell, ComparedItem, Comparison, ComparisonVerdict, Difference, Effect,
    Method, Pair,
};

impl Kind for Comparison {
    fn document(&self) -> Document {
        let mut document = Document::new(self.model.as_str());
        let lines = header(self).into_iter().map(Line::plain);
        document.lines(lines.chain([Line::Command(self.command.clone())]));
        let found = table_rows(&self.cells, self.overall.as_ref());
        let floor = self.floor.as_ref().map(|floor| table_rows(&floor.cells, floor.overall.as_ref()));
        if let Some(floor) = &floor {
            document.heading("A against A: the floor of this machine");
            document.blocks.push(table(floor));
            document.heading("B against A");
        }
        document.blocks.push(table(&found));
        let about = match self.method {
            Method::PairedRounds => "about these rounds",
            Method::SavedResults | Method::SavedProcesses => "about these results",
        };
        document.section(about, self.remarks.iter().cloned());
        document.section("what this cannot prove", self.limits.iter().cloned());
        let floor = floor.into_iter().flatten().map(|row| ("a_against_a", row));
        document.sheet =
            Some(sheet(&floor.chain(found.into_iter().map(|row| ("b_against_a", row))).collect::<Vec<_>>()));
        document
    }

    fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self)
    }

    fn page(&self) -> Document {
        let mut page = self.document();
        page.title = headline::comparison_title(self);
        page.blocks.insert(0, Block::Figures(headline::comparison(self)));
        // The header ends where the first section begins.
        let table =
            page.blocks.iter().position(|block| matches!(block, Block::Table(_) | Block::Heading { .. }));
        if self.floor.is_none()
            && let Some(table) = table
        {
            page.blocks.insert(table, Block::Heading { title: "B against A".to_owned(), anchor: None });
        }
        page
    }
}

/// One row of a table: a cell, or all of them together.
struct Row<'a> {
    place: Option<&'a ComparedItem>,
    effect: &'a Effect,
}

fn table_rows<'a>(cells: &'a [CellComparison], overall: Option<&'a Effect>) -> Vec<Row<'a>> {
    let each = cells.iter().map(|cell| Row { place: Some(&cell.place), effect: &cell.effect });
    each.chain(overall.map(|effect| Row { place: None, effect })).collect()
}

fn table(rows: &[Row<'_>]) -> Block {
    let tones = rows.iter().map(|row| match row.effect.verdict {
        ComparisonVerdict::Faster => Tone::Good,
        ComparisonVerdict::Slower => Tone::Bad,
        ComparisonVerdict::Equivalent => Tone::Plain,
        ComparisonVerdict::Inconclusive => Tone::Faint,
    });
    Block::Table(Table { columns: columns(rows), tones: tones.collect(), ..Table::default() })
}

/// The columns of a table; those of the test are there where one was made.
fn columns(rows: &[Row<'_>]) -> Vec<Column> {
    let text = |title: &str, of: &dyn Fn(&Row<'_>) -> String| words(title, rows.iter().map(of));
    let written =
        |title: &str, of: &dyn Fn(&Effect) -> String| numbers(title, rows.iter().map(|row| of(row.effect)));
    let time = |title: &str, of: &dyn Fn(&Effect) -> Option<f64>| {
        measured(title, Unit::Nanoseconds, rows.iter().map(|row| of(row.effect)))
    };
    let small = |value: Option<f64>| value.map_or_else(|| "-".into(), percent);
    let p = |value: Option<f64>| match value {
        Some(p) if p < 0.0001 => "< 0.0001".to_owned(),
        Some(p) => format!("{p:.4}"),
        None => "-".to_owned(),
    };
    let ratio = |value: Option<f64>| value.map_or_else(|| "-".into(), |value| format!("{value:.4}"));
    let served = rows.iter().any(|row| matches!(row.place, Some(ComparedItem::Served { .. })));
    let mut columns = vec![text(if served { "metric" } else { "cell" }, &|row| match row.place {
        Some(ComparedItem::Cell(cell)) => {
            format!("{} b{} c{}", cell.phase, cell.batch, cell.context)
        }
        Some(ComparedItem::Served { metric }) => metric.name().to_owned(),
        None if served => "all metrics".into(),
        None => "all cells".into(),
    })];
    columns.extend([
        text("verdict", &|row| row.effect.verdict.word().into()),
        written("B/A", &|effect| ratio(effect.ratio)),
        text("95 % interval", &|row| match (row.effect.low, row.effect.high) {
            (Some(low), Some(high)) => format!("{low:.4} to {high:.4}"),
            _ => "-".into(),
        }),
        time("A time", &|effect| effect.a_ns),
        time("B time", &|effect| effect.b_ns),
    ]);
    if !served {
        let side = |row: &Row<'_>, of: &dyn Fn(&ComparedCell) -> String| {
            row.place.and_then(ComparedItem::cell).map_or_else(String::new, of)
        };
        columns.push(text("A", &|row| side(row, &|cell| cell.a.to_string())));
        columns.push(text("B", &|row| side(row, &|cell| cell.b.to_string())));
    }
    if rows.iter().any(|row| row.effect.p.is_some()) {
        columns.push(written("p", &|effect| p(effect.p)));
        columns.push(written("p (family)", &|effect| p(effect.p_adjusted)));
    }
    if rows.iter().any(|row| row.effect.minimum_detectable.is_some()) {
        columns.push(written("detectable", &|effect| small(effect.minimum_detectable)));
    }
    if rows.iter().any(|row| row.effect.floor.is_some()) {
        columns.push(written("A/A floor", &|effect| small(effect.floor)));
    }
    columns.push(text("because", &|row| row.effect.reason.clone()));
    let main = ["metric", "cell", "verdict", "B/A", "95 % interval"];
    let minor = |column: Column| {
        let minor = !main.contains(&column.title.as_str());
        column.minor(minor)
    };
    columns.into_iter().map(minor).collect()
}

/// Raw numbers, one row a cell and one for all cells; A against itself is marked in the first column.
fn sheet(rows: &[(&str, Row<'_>)]) -> Vec<Column> {
    let place = |title: &str, of: &dyn Fn(&ComparedCell) -> String| {
        let cell = |row: &Row<'_>| row.place.and_then(ComparedItem::cell).map_or_else(String::new, of);
        words(title, rows.iter().map(|(_, row)| cell(row)))
    };
    let number = |title: &str, unit: Unit, of: &dyn Fn(&Effect) -> Option<f64>| {
        measured(title, unit, rows.iter().map(|(_, row)| of(row.effect)))
    };
    let phase = |row: &Row<'_>| match row.place {
        Some(ComparedItem::Cell(cell)) => cell.phase.to_string(),
        Some(ComparedItem::Served { metric }) => metric.name().to_owned(),
        None => "all".to_owned(),
    };
    vec![
        words("of", rows.iter().map(|(of, _)| (*of).to_owned())),
        words("phase", rows.iter().map(|(_, row)| phase(row))),
        place("batch", &|place| place.batch.to_string()),
        place("context", &|place| place.context.to_string()),
        place("a_engine", &|place| place.a.engine.clone()),
        place("a_dtype", &|place| place.a.dtype.to_string()),
        place("b_engine", &|place| place.b.engine.clone()),
        place("b_dtype", &|place| place.b.dtype.to_string()),
        number("rounds", Unit::Count, &|e| Some(e.rounds as f64)),
        number("a", Unit::Nanoseconds, &|e| e.a_ns),
        number("b", Unit::Nanoseconds, &|e| e.b_ns),
        number("ratio", Unit::Count, &|e| e.ratio),
        number("low", Unit::Count, &|e| e.low),
        number("high", Unit::Count, &|e| e.high),
        number("p", Unit::Count, &|e| e.p),
        number("p_adjusted", Unit::Count, &|e| e.p_adjusted),
        number("minimum_detectable", Unit::Count, &|e| e.minimum_detectable),
        number("floor", Unit::Count, &|e| e.floor),
        words("verdict", rows.iter().map(|(_, row)| row.effect.verdict.word().to_owned())),
        words("reason", rows.iter().map(|(_, row)| row.effect.reason.clone())),
    ]
}

/// In what both sides differ; a value that a side lacks is `missing`.
pub fn differing(differences: &[Difference], missing: &str) -> String {
    let text = |value: &serde_json::Value| match value {
        serde_json::Value::Null => missing.to_owned(),
        other => other.to_string().replace('"', ""),
    };
    let each = differences.iter().map(|d| format!("{} {} in A, {} in B", d.key, text(&d.a), text(&d.b)));
    format!("they differ in: {}", each.collect::<Vec<_>>().join("; "))
}

/// What was compared, how, line by line and without markup.
fn header(comparison: &Comparison) -> Vec<String> {
    let side = |letter: char, arm: &Arm| format!("{letter}: {}", arm.given);
    let mut lines = vec![comparison.machine.clone(), side('A', &comparison.a), side('B', &comparison.b)];
    if comparison.differences.is_empty() {
        lines.push("the configurations do not differ".into());
    } else {
        lines.push(differing(&comparison.differences, "default"));
    }
    let served = comparison.is_served();
    let each = match &comparison.protocol {
        Some(protocol) => format!("{protocol} protocol in each"),
        None if served => "the same requests for both in a round, others in the next".to_owned(),
        None => "unknown protocol in each".to_owned(),
    };
    lines.push(match comparison.method {
        Method::PairedRounds => format!(
            "{}, a fresh process a side, in random order (seed {}: {}), {each}",
            counted(comparison.rounds.unwrap_or_default(), "round"),
            comparison.seed.unwrap_or_default(),
            comparison.order.join(" "),
        ),
        Method::SavedResults => format!("two saved results, {each}: no rounds, no test"),
        Method::SavedProcesses => {
            let most = |side: fn(&Pair) -> Option<f64>| {
                let timed = |cell: &CellComparison| cell.pairs.iter().filter_map(side).count();
                comparison.cells.iter().map(timed).max().unwrap_or(0)
            };
            format!(
                "{} of A and {} of B, saved before, not in pairs, {each}",
                counted(most(|pair| pair.a_ns), "process"),
                most(|pair| pair.b_ns)
            )
        }
    });
    lines.push(format!(
        "ratios are B's time over A's; equivalent within ±{}; p over {}, for all {} together",
        percent(comparison.settings.margin),
        match comparison.method {
            Method::SavedProcesses => "the ways to relabel the processes",
            Method::PairedRounds | Method::SavedResults => "the orders that could have been drawn",
        },
        if served { "metrics" } else { "cells" }
    ));
    lines
}
