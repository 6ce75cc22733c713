//! The blocks of the run over time: was the machine steady, and what was rejected.
//!
//! Enters: the raw blocks of every cell. Leaves: one plot, each block's mean over the time its cell stands for, so that all cells share an
//! axis. Rejected blocks are crosses with their cause.

use std::fmt::Write;

use super::axis::{Axis, Measure};
use super::chart::{Chart, Key, Line, Point, Shape, Span};
use super::figure::{Figure, Panel, numbers, words};
use super::palette::{Palette, timed};
use hbmark_core::result::cause::joined;
use hbmark_core::result::{Block, CellResult, Phase, Report};

/// Rows of the table behind the plot; the file holds all.
const ROWS: usize = 400;

/// One block beside the time of its cell.
pub struct Taken<'a> {
    pub cell: &'a CellResult,
    pub block: &'a Block,
    pub seconds: f64,
    pub mean_ns: f64,
    /// Mean over the cell's time; `None` where no block of the cell was accepted.
    pub ratio: Option<f64>,
}

/// All blocks of a report that hold a sample, in the order in which they were taken.
#[must_use]
pub fn taken(report: &Report) -> Vec<Taken<'_>> {
    let typical: Vec<(&str, f64)> = timed(report).map(|t| (t.cell.id.as_str(), t.time_ns)).collect();
    let mut all: Vec<Taken<'_>> = Vec::new();
    for cell in &report.cells {
        let time = typical.iter().find(|(id, _)| *id == cell.id).map(|(_, time)| *time);
        for block in &cell.blocks {
            let times = match cell.phase {
                Phase::Decode if !block.interval_ns.is_empty() => &block.interval_ns,
                _ => &block.step_ns,
            };
            let mean_ns = times.iter().sum::<f64>() / times.len() as f64;
            if mean_ns.is_finite() && block.at_ns.is_finite() {
                let ratio = time.map(|time| mean_ns / time);
                all.push(Taken { cell, block, seconds: block.at_ns / 1e9, mean_ns, ratio });
            }
        }
    }
    all.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    all
}

#[must_use]
pub fn figure(palette: &Palette, taken: &[Taken<'_>]) -> Figure {
    let figure = Figure::new("blocks", "Blocks over the run");
    if taken.is_empty() {
        return figure.absent("This result holds no blocks of samples.");
    }
    let shown: Vec<&Taken<'_>> = taken.iter().filter(|t| t.ratio.is_some()).collect();
    let axes = Axis::from_zero("since the run began", Measure::Time, shown.iter().map(|t| t.block.at_ns))
        .zip(Axis::around(
            "mean of a block over the time of its cell",
            Measure::Share,
            shown.iter().filter_map(|t| t.ratio).chain([1.0]),
        ));
    let Some((x, y)) = axes else {
        return figure.absent("Every block was rejected, so no cell has a time to hold its blocks against.");
    };
    let mut keys: Vec<Key> = palette
        .series()
        .map(|(engine, dtype)| Key {
            class: palette.class(engine, dtype),
            shape: Some(Shape::Circle),
            text: format!("{engine} {dtype}"),
        })
        .collect();
    let rejected = taken.iter().filter(|t| t.block.rejected.is_some()).count();
    if rejected > 0 {
        keys.push(Key { class: "bad".into(), shape: Some(Shape::Cross), text: "rejected".into() });
    }
    let chart = Chart {
        name: "blocks".into(),
        title: format!("{} blocks, {rejected} rejected", taken.len()),
        lines: vec![Line {
            class: "level".into(),
            points: vec![(x.low(), 1.0), (x.high(), 1.0)],
            label: None,
        }],
        points: shown.iter().filter_map(|t| point(t, palette)).collect(),
        rules: Vec::new(),
        keys,
        span: Span::Full,
        x,
        y,
    };
    let mut caption = vec![
        "Cells are visited several times in random order. A block is rejected only for a recorded cause, never for being slow.".to_owned(),
    ];
    if shown.len() < taken.len() {
        caption.push(format!(
            "{} blocks of cells without an accepted block are in the table alone.",
            taken.len() - shown.len()
        ));
    }
    let tables = vec![table(taken)];
    let panels = vec![Panel::of(&chart)];
    Figure { caption, panels, tables, ..figure }
}

fn point(taken: &Taken<'_>, palette: &Palette) -> Option<Point> {
    let (cell, ratio) = (taken.cell, taken.ratio?);
    let mut hover = format!(
        "{}\n{} ({})\n{:.1} s into the run, visit {}",
        cell.id,
        Measure::Time.show(taken.mean_ns),
        Measure::Share.show(ratio),
        taken.seconds,
        taken.block.visit.saturating_add(1)
    );
    if let Some(cause) = &taken.block.rejected {
        let _ = write!(hover, "\nrejected: {cause}");
    }
    let (class, shape) = match taken.block.rejected {
        Some(_) => ("bad".to_owned(), Shape::Cross),
        None => (format!("{} small", palette.class(&cell.engine, cell.dtype)), Shape::Circle),
    };
    Some(Point { class, shape, x: taken.block.at_ns, y: ratio, spread: None, hover })
}

fn table(taken: &[Taken<'_>]) -> (String, Vec<crate::output::document::Column>) {
    let rows = &taken[..taken.len().min(ROWS)];
    let of = |show: &dyn Fn(&Taken<'_>) -> String| rows.iter().map(show).collect::<Vec<_>>();
    let caption = if rows.len() < taken.len() {
        format!("The first {ROWS} of {} blocks; the rest are in result.json.", taken.len())
    } else {
        String::new()
    };
    let columns = vec![
        numbers("at", of(&|t| format!("{:.2} s", t.seconds))),
        words("cell", of(&|t| t.cell.id.clone())),
        numbers("visit", of(&|t| t.block.visit.saturating_add(1).to_string())),
        numbers("steps", of(&|t| t.block.step_ns.len().to_string())),
        numbers("mean", of(&|t| Measure::Time.show(t.mean_ns))),
        numbers("of the cell's", of(&|t| t.ratio.map_or("-".into(), |r| Measure::Share.show(r)))),
        numbers("canary", of(&|t| t.block.canary_ratio.map_or("-".into(), |r| Measure::Share.show(r)))),
        words("rejected", of(&|t| joined(t.block.rejected.as_slice()))),
        words("conditions", of(&|t| joined(&t.block.conditions))),
    ];
    (caption, columns)
}
