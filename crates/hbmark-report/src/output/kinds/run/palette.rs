//! The colour of each engine and dtype, the same in every plot, and the cells that have a time to plot.

use crate::output::plot::Shape;
use hbmark_core::model::Dtype;
use hbmark_core::result::{CellResult, Report, Status};

/// Distinct colours.
const COLOURS: usize = 6;

/// The engines and dtypes of a report in the order of its cells.
#[derive(Debug, Clone)]
pub struct Palette {
    series: Vec<(String, Dtype)>,
}

impl Palette {
    pub fn of(report: &Report) -> Self {
        let mut series: Vec<(String, Dtype)> = Vec::new();
        for cell in &report.cells {
            if !series.iter().any(|(engine, dtype)| *engine == cell.engine && *dtype == cell.dtype) {
                series.push((cell.engine.clone(), cell.dtype));
            }
        }
        Self { series }
    }

    pub fn series(&self) -> impl Iterator<Item = (&str, Dtype)> {
        self.series.iter().map(|(engine, dtype)| (engine.as_str(), *dtype))
    }

    /// The colour of an engine at a dtype.
    pub fn style(&self, engine: &str, dtype: Dtype) -> String {
        let index = self.series.iter().position(|(e, d)| e == engine && *d == dtype).unwrap_or(0);
        numbered(index)
    }
}

/// The colour of the n-th of several things.
pub fn numbered(index: usize) -> String {
    format!("c{}", index % COLOURS)
}

/// The colour of the n-th imported file: from the other end than the engines' colours.
pub fn of_imported(index: usize) -> String {
    numbered(COLOURS - 1 - index % COLOURS)
}

/// A cell with its typical time: TPOT for decode, the step for prefill; of a prediction its floor.
#[derive(Debug, Clone, Copy)]
pub struct Timed<'a> {
    pub cell: &'a CellResult,
    pub time_ns: f64,
    pub interval_ns: Option<(f64, f64)>,
}

/// The cells of a report that have a time. An invalid one is shown, as a cross.
pub fn timed(report: &Report) -> impl Iterator<Item = Timed<'_>> {
    report.cells.iter().filter_map(|cell| {
        let (time_ns, interval_ns) = cell.time_or_floor()?;
        Some(Timed { cell, time_ns, interval_ns })
    })
}

/// The style and shape of a cell's mark: a cross where its time is wrong, faint where its blocks cannot stand for it.
pub fn look(cell: &CellResult, style: String, shape: Shape) -> (String, Shape) {
    if is_invalid(cell) {
        ("bad".to_owned(), Shape::Cross)
    } else if cell.all_blocks.is_some() {
        (format!("{style} doubtful"), shape)
    } else {
        (style, shape)
    }
}

pub fn is_invalid(cell: &CellResult) -> bool {
    cell.status == Status::Invalid
}
