//! Which cell of B stands against which of A, and the time each stands for.

use super::{CompareError, ComparedCell, EngineVariant};
use hbmark_core::result::{CellResult, Phase, Report, Status, accepted, judged_times};
use hbmark_core::stats;

/// One step of a grid, of any engine.
pub type GridStep = (Phase, usize, usize);

/// The engines and dtypes of a result, in the order of its cells.
#[must_use]
pub fn series_of(report: &Report) -> Vec<EngineVariant> {
    let mut known = Vec::new();
    for cell in &report.cells {
        let series = EngineVariant { engine: cell.engine.clone(), dtype: cell.dtype };
        if !known.contains(&series) {
            known.push(series);
        }
    }
    known
}

/// The cells of both sides: every step of the grid for every pair of series.
///
/// Series pair up where both sides run the same ones, where each runs one, or by engine where each side runs every engine once.
///
/// # Errors
/// When it is open which series stands against which, or a side lacks a step of the other.
pub fn places(
    (series_a, steps_a): (&[EngineVariant], &[GridStep]),
    (series_b, steps_b): (&[EngineVariant], &[GridStep]),
) -> Result<Vec<ComparedCell>, CompareError> {
    let pairs = pair_up(series_a, series_b).ok_or_else(|| CompareError::series(series_a, series_b))?;
    let lacks =
        |here: &[GridStep], there: &[GridStep]| here.iter().find(|step| !there.contains(step)).copied();
    let grid = |side, other, (phase, batch, context): GridStep| CompareError::Grid {
        side,
        other,
        id: format!("{phase} b{batch} c{context}"),
    };
    if let Some(step) = lacks(steps_a, steps_b) {
        return Err(grid('A', 'B', step));
    }
    if let Some(step) = lacks(steps_b, steps_a) {
        return Err(grid('B', 'A', step));
    }
    let place = |(a, b): &(EngineVariant, EngineVariant), (phase, batch, context): GridStep| ComparedCell {
        phase,
        batch,
        context,
        a: a.clone(),
        b: b.clone(),
    };
    Ok(pairs.iter().flat_map(|pair| steps_a.iter().map(move |step| place(pair, *step))).collect())
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
pub(super) fn steps_of(report: &Report) -> Vec<GridStep> {
    let mut steps = Vec::new();
    for cell in &report.cells {
        let step = (cell.phase, cell.batch, cell.context);
        if !steps.contains(&step) {
            steps.push(step);
        }
    }
    steps
}

/// The median over a cell's accepted steps of the time its phase is judged by, or why there is none.
///
/// An interval that missed its target or a warm-up without end does not matter here: how precise one process is is part of the spread
/// between rounds.
pub(super) fn typical(cell: &CellResult) -> Result<f64, String> {
    let usable =
        cell.status == Status::Ok || (cell.status.is_doubtful() && cell.status != Status::Incomplete);
    let steps = times(cell);
    if usable && !steps.is_empty() {
        return Ok(stats::median(&steps));
    }
    let word = format!("{:?}", cell.status).to_lowercase();
    Err(match &cell.reason {
        Some(reason) => format!("{word}: {reason}"),
        None if usable => "no accepted block".to_owned(),
        None => word,
    })
}

/// The accepted single times of a cell.
fn times(cell: &CellResult) -> Vec<f64> {
    accepted(&cell.blocks).flat_map(|block| judged_times(cell.phase, block)).copied().collect()
}
