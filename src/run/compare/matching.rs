//! Which cell of B stands against which of A, and the time each stands for.

use super::{CompareError, ComparedCell, EngineVariant};
use hbmark_core::result::{CellResult, Phase, Report, Status, block_means, judged_times};
use hbmark_core::stats;

/// One step of a grid, of any engine.
pub type GridStep = (Phase, usize, usize);

/// The engines and dtypes of a result, in the order of its cells.
pub fn series_of(report: &Report) -> Vec<EngineVariant> {
    distinct(&steps_of(report))
}

/// A step of an engine and dtype. An engine may have fewer steps than another of the same run: candle's models have no verify steps.
pub type PlacedStep = (EngineVariant, GridStep);

/// The cells of both sides: every step of a series of A beside the same of its partner in B.
///
/// Series pair up where both sides run the same ones, where each runs one, or by engine where each side runs every engine once.
pub fn places(a: &[PlacedStep], b: &[PlacedStep]) -> Result<Vec<ComparedCell>, CompareError> {
    let (series_a, series_b) = (distinct(a), distinct(b));
    let pairs = pair_up(&series_a, &series_b).ok_or_else(|| CompareError::series(&series_a, &series_b))?;
    let steps_of = |side: &[PlacedStep], series: &EngineVariant| -> Vec<GridStep> {
        side.iter().filter(|(own, _)| own == series).map(|(_, step)| *step).collect()
    };
    let grid = |side, other, (phase, batch, context): GridStep| CompareError::Grid {
        side,
        other,
        id: format!("{phase} b{batch} c{context}"),
    };
    let mut cells = Vec::new();
    for (of_a, of_b) in pairs {
        let (steps_a, steps_b) = (steps_of(a, &of_a), steps_of(b, &of_b));
        if let Some(step) = steps_a.iter().find(|step| !steps_b.contains(step)) {
            return Err(grid('A', 'B', *step));
        }
        if let Some(step) = steps_b.iter().find(|step| !steps_a.contains(step)) {
            return Err(grid('B', 'A', *step));
        }
        cells.extend(steps_a.into_iter().map(|(phase, batch, context)| ComparedCell {
            phase,
            batch,
            context,
            a: of_a.clone(),
            b: of_b.clone(),
        }));
    }
    Ok(cells)
}

/// The series of a side, in order.
fn distinct(side: &[PlacedStep]) -> Vec<EngineVariant> {
    let mut known: Vec<EngineVariant> = Vec::new();
    for (series, _) in side {
        if !known.contains(series) {
            known.push(series.clone());
        }
    }
    known
}

fn pair_up(a: &[EngineVariant], b: &[EngineVariant]) -> Option<Vec<(EngineVariant, EngineVariant)>> {
    if let ([a], [b]) = (a, b) {
        return Some(vec![(a.clone(), b.clone())]);
    }
    let partner = |series: &EngineVariant, same: &dyn Fn(&EngineVariant, &EngineVariant) -> bool| {
        let mut found = b.iter().filter(|other| same(series, other));
        let first = found.next().cloned();
        first.filter(|_| found.next().is_none())
    };
    let all = |same: &dyn Fn(&EngineVariant, &EngineVariant) -> bool| -> Option<Vec<(EngineVariant, EngineVariant)>> {
        let pairs: Option<Vec<(EngineVariant, EngineVariant)>> =
            a.iter().map(|series| Some((series.clone(), partner(series, same)?))).collect();
        let pairs = pairs?;
        let taken = |series: &EngineVariant| pairs.iter().filter(|(_, other)| other == series).count() == 1;
        (pairs.len() == b.len() && b.iter().all(taken)).then_some(pairs)
    };
    all(&|one, other| one == other).or_else(|| all(&|one, other| one.engine == other.engine))
}

/// The steps of a result, in order.
pub(super) fn steps_of(report: &Report) -> Vec<PlacedStep> {
    let mut steps = Vec::new();
    for cell in &report.cells {
        let series = EngineVariant { engine: cell.engine.clone(), dtype: cell.dtype };
        let step = (series, (cell.phase, cell.batch, cell.context));
        if !steps.contains(&step) {
            steps.push(step);
        }
    }
    steps
}

/// The time that a cell of one process stands for, the geometric mean of its block means as in its report, or why there is none.
///
/// An interval that missed its target or a warm-up without end does not matter here: how precise one process is is part of the spread
/// between rounds.
pub(super) fn typical(cell: &CellResult) -> Result<f64, NoTime> {
    let usable =
        cell.status == Status::Ok || (cell.status.is_doubtful() && cell.status != Status::Incomplete);
    let means = means(cell);
    if usable && !means.is_empty() {
        return Ok(stats::geometric_mean(&means));
    }
    let word = format!("{:?}", cell.status).to_lowercase();
    let reason = match &cell.reason {
        Some(reason) => format!("{word}: {reason}"),
        None if usable => "no accepted block".to_owned(),
        None => word,
    };
    let own = matches!(cell.status, Status::Invalid | Status::Oom | Status::Failed);
    Err(NoTime { reason, own })
}

/// Why a process has no time for an item.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NoTime {
    pub reason: String,
    /// The side failed itself; otherwise the machine, or whoever stopped it, is why.
    pub own: bool,
}

/// The means of a cell's accepted blocks.
pub(super) fn means(cell: &CellResult) -> Vec<f64> {
    block_means(&cell.blocks, cell.block_merge, |block| judged_times(cell.phase, block))
}
