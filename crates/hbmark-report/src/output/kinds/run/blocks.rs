//! The blocks of a run over time: whether the machine was steady, and what was rejected. Each block's mean is relative to the time of its
//! cell, so that all cells share an axis; rejected blocks are crosses with their cause.

use crate::analysis::words::counted;
use std::fmt::Write;

use super::palette::{Palette, timed};
use crate::output::document::{Block, Table, numbers, words};
use crate::output::plot::axis::{Axis, Measure};
use crate::output::plot::{Chart, Drawing, Key, Line, Mark, Plot, Shape, Span};
use hbmark_core::result::cause::joined;
use hbmark_core::result::{self, Cause, CellResult, Report};

/// Rows of the table; the file has all.
const ROWS: usize = 400;

/// One block beside the time of its cell.
pub struct Taken<'a> {
    pub cell: &'a CellResult,
    pub block: &'a result::Block,
    pub seconds: f64,
    pub mean_ns: f64,
    /// Mean over the cell's time; `None` where no block of the cell was accepted.
    pub ratio: Option<f64>,
}

/// All blocks of a report that hold a sample, in the order in which they were taken.
pub fn taken(report: &Report) -> Vec<Taken<'_>> {
    let typical: Vec<(&str, f64)> = timed(report).map(|t| (t.cell.id.as_str(), t.time_ns)).collect();
    let mut all: Vec<Taken<'_>> = Vec::new();
    for cell in &report.cells {
        let time = typical.iter().find(|(id, _)| *id == cell.id).map(|(_, time)| *time);
        for block in &cell.blocks {
            let times = match cell.phase {
                phase if phase.is_over_cache() && !block.interval_ns.is_empty() => &block.interval_ns,
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

pub fn plot(palette: &Palette, taken: &[Taken<'_>]) -> Block {
    if taken.is_empty() {
        return Block::absent("This result holds no blocks of samples.");
    }
    let shown: Vec<&Taken<'_>> = taken.iter().filter(|t| t.ratio.is_some()).collect();
    let axes = Axis::from_zero("since the run began", Measure::Time, shown.iter().map(|t| t.block.at_ns))
        .zip(Axis::around(
            "mean of a block over the time of its cell",
            Measure::Share,
            shown.iter().filter_map(|t| t.ratio).chain([1.0]),
        ));
    let Some((x, y)) = axes else {
        return Block::absent("Every block was rejected, so no cell has a time to hold its blocks against.");
    };
    let key =
        |(engine, dtype)| Key::mark(palette.style(engine, dtype), Shape::Circle, format!("{engine} {dtype}"));
    let rejected = taken.iter().filter(|t| t.block.rejected.is_some()).count();
    let crosses = (rejected > 0).then(|| Key::mark("bad", Shape::Cross, "rejected"));
    let conditions = taken.iter().filter(|t| t.block.rejected.is_none() && !t.block.conditions.is_empty());
    let (disturbed, other): (Vec<&Taken<'_>>, Vec<&Taken<'_>>) =
        conditions.partition(|t| t.block.conditions.iter().any(disturbs));
    let note = |blocks: usize, what: &str| {
        if blocks > 0 { format!(", {blocks} {what}") } else { String::new() }
    };
    let title = format!(
        "{}, {rejected} rejected{}{}",
        counted(taken.len(), "block"),
        note(disturbed.len(), "counted with a disturbance"),
        note(other.len(), "with a condition")
    );
    let chart = Chart {
        lines: vec![Line::new("level", vec![(x.low(), 1.0), (x.high(), 1.0)])],
        marks: shown.iter().filter_map(|t| mark(t, palette)).collect(),
        legend: palette.series().map(key).chain(crosses).collect(),
        ..Chart::new("blocks", title, Span::Full, x, y)
    };
    let mut caption = vec![
        "Cells are visited several times in random order. A block is rejected only for a recorded cause, never for being slow.".to_owned(),
    ];
    if shown.len() < taken.len() {
        caption.push(format!(
            "In the table alone: {} of cells without an accepted block.",
            counted(taken.len() - shown.len(), "block")
        ));
    }
    Block::Plot(Plot::new(vec![Drawing::Chart(chart)], caption, vec![table(taken)]))
}

/// Whether a condition is one that slows steps down, and not how the machine is set.
fn disturbs(condition: &Cause) -> bool {
    use Cause::{Canary, CpuSteal, ForeignLoad, GpuShared, Throttled};
    matches!(
        condition,
        ForeignLoad { .. } | CpuSteal { .. } | Canary { .. } | GpuShared { .. } | Throttled { .. }
    )
}

fn mark(taken: &Taken<'_>, palette: &Palette) -> Option<Mark> {
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
    let (style, shape) = match taken.block.rejected {
        Some(_) => ("bad".to_owned(), Shape::Cross),
        None => (format!("{} small", palette.style(&cell.engine, cell.dtype)), Shape::Circle),
    };
    Some(Mark::new(style, shape, (taken.block.at_ns, ratio), hover))
}

fn table(taken: &[Taken<'_>]) -> Table {
    let rows = &taken[..taken.len().min(ROWS)];
    let of = |show: &dyn Fn(&Taken<'_>) -> String| rows.iter().map(show).collect::<Vec<_>>();
    let left_out = rows.len() < taken.len();
    let title = || format!("The first {ROWS} of {} blocks; the rest are in result.json.", taken.len());
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
    Table { title: left_out.then(title), ..columns.into() }
}
