//! Bounds on the values of a saved result.
//!
//! Enters: a [`Report`], a [`ServeReport`] or a [`Comparison`] from an untrusted file. Leaves: nothing, or the first impossible value. Beyond
//! these bounds products overflow, averages are over nothing, and a page would take hours to draw; within them a number may still be
//! false, but is safe to compute with.

use std::ops::RangeInclusive;

use super::comparison::Comparison;
use super::serving::ServeReport;
use super::{Block, CellResult, ModelSummary, Phase, Report, ReportError};
use crate::result::serving::{Point, ServeResult};

/// As many as a grid of 100 batches and 100 contexts; the page and the comparisons look at pairs of them.
const MAX_CELLS: usize = 10_000;
/// The caps of `--batch` and `--context`.
const GRID: RangeInclusive<usize> = 0..=crate::result::validation::AXIS_CAP;
/// A step of thirty years.
const STEP_NS: RangeInclusive<f64> = 0.0..=1e18;
const READ_BYTES_PER_S: RangeInclusive<f64> = 1.0..=1e18;
/// A zettabyte a step.
const FLOPS: RangeInclusive<f64> = 0.0..=1e30;
const MAX_BYTES: u64 = 1 << 60;
/// Rows of what a person reads: warnings, cold starts, operations.
const MAX_ROWS: usize = 10_000;
/// Collective libraries that a predicted step is shown with.
const MAX_MEASURED: usize = 64;
const MAX_BLOCKS: usize = 1_000_000;
/// Points of a sweep, and spans of a timeline.
const MAX_POINTS: usize = 10_000;
const MAX_SPANS: usize = 10_000;
/// Counts: a double holds them exactly, and thousands of them can be added.
const MAX_COUNT: usize = 1 << 53;

/// Checks everything that later arithmetic assumes.
pub(crate) fn check(report: &Report) -> Result<(), ReportError> {
    model(&report.model)?;
    no_more_than(&[
        ("the number of cells", report.cells.len(), MAX_CELLS),
        ("the number of warnings", report.warnings.len(), MAX_ROWS),
        ("the number of cold rows", report.cold.len(), MAX_ROWS),
        ("the number of crossovers", report.crossovers.len(), MAX_ROWS),
        ("the number of stages", report.group.as_ref().map_or(0, |group| group.stages.len()), MAX_ROWS),
    ])?;
    report.cells.iter().try_for_each(cell)
}

/// Checks counts, each with its name, against a maximum.
fn no_more_than(counts: &[(&str, usize, usize)]) -> Result<(), ReportError> {
    counts.iter().try_for_each(|(what, count, most)| within(what, *count, &(0..=*most)))
}

fn model(model: &ModelSummary) -> Result<(), ReportError> {
    model.architecture.check().map_err(|problem| ReportError::ImpossibleValue {
        what: format!("the model's {}", problem.what),
        found: problem.found,
        wanted: problem.wanted,
    })
}

/// The same of a serving result.
pub(crate) fn check_serving(report: &ServeReport) -> Result<(), ReportError> {
    report.model.as_ref().map_or(Ok(()), model)?;
    no_more_than(&[
        ("the number of points", report.points.len(), MAX_POINTS),
        ("the number of warnings", report.warnings.len(), MAX_ROWS),
        ("the number of rows of the matrix", report.matrix.len(), MAX_ROWS),
    ])?;
    report.points.iter().try_for_each(point)
}

fn point(point: &Point) -> Result<(), ReportError> {
    let named = |what: &str| format!("{what} of {}", crate::input::plain(&point.label));
    [&point.result, &point.predicted].into_iter().flatten().try_for_each(|result| served(result, &named))
}

fn served(result: &ServeResult, named: &dyn Fn(&str) -> String) -> Result<(), ReportError> {
    let count = |what: &str, found: usize| within(&named(what), found, &(0..=MAX_COUNT));
    within(&named("the number of reasons"), result.reasons.len(), &(0..=MAX_ROWS))?;
    within(&named("the number of gates"), result.gates.len(), &(0..=MAX_ROWS))?;
    within(&named("the number of objectives"), result.slo.len(), &(0..=MAX_ROWS))?;
    let requests = [result.measured, result.served, result.unfinished];
    let beside = [result.warmup_requests, result.cooldown_requests, result.tpot_clause_dropped];
    for found in requests.into_iter().chain(beside).chain(result.rejected.values().copied()) {
        count("the requests", found)?;
    }
    let Some(timeline) = &result.timeline else { return Ok(()) };
    within(&named("the spans of the timeline"), timeline.spans.len(), &(0..=MAX_SPANS))?;
    for span in &timeline.spans {
        count("the steps of a span", span.steps)?;
        count("the tokens of a span", span.prompt_tokens.max(span.output_tokens))?;
    }
    Ok(())
}

/// The same of a comparison.
pub(crate) fn check_comparison(comparison: &Comparison) -> Result<(), ReportError> {
    let floor = comparison.floor.iter().flat_map(|floor| &floor.cells);
    for (what, count) in [
        ("the number of cells", comparison.cells.len()),
        ("the number of differences", comparison.differences.len()),
        ("the number of remarks", comparison.remarks.len()),
        ("the number of limits", comparison.limits.len()),
        ("the number of rounds", comparison.rounds.unwrap_or_default()),
        ("the number of processes", comparison.read.len()),
    ] {
        within(what, count, &(0..=MAX_ROWS))?;
    }
    let settings = comparison.settings;
    for (what, share, least) in [
        ("the confidence", settings.confidence, 1e-3),
        ("the level", settings.alpha, 1e-6),
        ("the power", settings.power, 1e-3),
        ("the margin", settings.margin, 0.0),
    ] {
        if !(least..=0.9999).contains(&share) {
            return Err(impossible_value(what.to_owned(), &share, "a share between 0 and 1"));
        }
    }
    for cell in comparison.cells.iter().chain(floor) {
        if let Some(step) = cell.place.cell() {
            within("a batch", step.batch, &GRID)?;
            within("a context", step.context, &GRID)?;
        }
        within("the number of pairs of a cell", cell.pairs.len(), &(0..=MAX_ROWS))?;
        within("the rounds of a cell", cell.effect.rounds, &(0..=MAX_ROWS))?;
    }
    Ok(())
}

fn cell(cell: &CellResult) -> Result<(), ReportError> {
    let named = |what: &str| format!("{what} of {}", crate::input::plain(&cell.id));
    let check = |what: &str, found: usize, range: &RangeInclusive<usize>| within(&named(what), found, range);
    check("the batch", cell.batch, &GRID)?;
    check("the context", cell.context, &GRID)?;
    check("the number of operations", cell.operations.len(), &(0..=MAX_ROWS))?;
    check("the number of blocks", cell.blocks.len(), &(0..=MAX_BLOCKS))?;
    if let Some(group) = &cell.group {
        check("the number of stages", group.stages_ns.len(), &(0..=MAX_ROWS))?;
        check("the number of collectives", group.collectives.len(), &(0..=MAX_ROWS))?;
        check("the number of measured steps", group.measured.len(), &(0..=MAX_MEASURED))?;
    }
    if !FLOPS.contains(&cell.flops) {
        return Err(impossible_value(named("flops"), &cell.flops, "0 to 1e30"));
    }
    let bytes = &cell.bytes;
    let moved = [bytes.weights, bytes.kv_read, bytes.kv_write, bytes.other];
    let kept = [bytes.as_implemented, cell.memory_predicted_bytes, cell.memory_peak_bytes];
    for count in moved.into_iter().chain(kept.into_iter().flatten()) {
        if count.0 > MAX_BYTES {
            return Err(impossible_value(named("bytes"), &count.0, "at most 2^60"));
        }
    }
    cell.blocks.iter().try_for_each(|b| block(b, cell.phase, &named))
}

/// The same for the blocks of a visit in a journal.
///
/// # Errors
/// [`ReportError::ImpossibleValue`], with the first of them.
pub fn check_blocks(blocks: &[Block], phase: Phase, id: &str) -> Result<(), ReportError> {
    let named = |what: &str| format!("{what} of {}", crate::input::plain(id));
    blocks.iter().try_for_each(|b| block(b, phase, &named))
}

fn block(block: &Block, phase: Phase, named: &dyn Fn(&str) -> String) -> Result<(), ReportError> {
    if let Some(time) = block.step_ns.iter().chain(&block.interval_ns).find(|ns| !STEP_NS.contains(ns)) {
        return Err(impossible_value(named("a step"), time, "0 to 1e18 ns"));
    }
    if let Some(rate) = block.read_bytes_per_s.filter(|rate| !READ_BYTES_PER_S.contains(rate)) {
        return Err(impossible_value(named("the read rate beside a block"), &rate, "1 to 1e18 B/s"));
    }
    let times = super::judged_times(phase, block).len();
    if block.rejected.is_none() && (block.step_ns.is_empty() || times == 0) {
        return Err(impossible_value(named("the length of a block that counts"), &0, "at least one step"));
    }
    Ok(())
}

fn within(what: &str, found: usize, range: &RangeInclusive<usize>) -> Result<(), ReportError> {
    if range.contains(&found) {
        return Ok(());
    }
    Err(impossible_value(what.to_owned(), &found, "far less"))
}

fn impossible_value(what: String, found: &dyn std::fmt::Display, wanted: &'static str) -> ReportError {
    ReportError::ImpossibleValue { what, found: found.to_string(), wanted }
}

/// The largest number an axis takes; beyond it a typing error is likelier than a wish.
pub const AXIS_CAP: usize = 1 << 27;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::saved;
    use crate::units::Bytes;

    fn sample() -> Report {
        saved::parse(include_str!("../../../../fuzz/seeds/result.json")).unwrap()
    }

    fn refused(change: impl FnOnce(&mut Report), message: &str) {
        let mut report = sample();
        change(&mut report);
        let text = serde_json::to_string(&report).unwrap();
        let error = saved::parse(&text).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }

    #[test]
    fn a_result_as_written_is_believed() {
        check(&sample()).unwrap();
    }

    #[test]
    fn numbers_that_overflow_later_are_refused_with_their_cell() {
        refused(|r| r.cells[0].batch = usize::MAX, "the batch of ");
        refused(|r| r.cells[0].context = usize::MAX, "the context of ");
        refused(|r| r.cells[0].bytes.weights = Bytes(u64::MAX), "bytes of ");
        refused(|r| r.cells[0].flops = 1e300, "flops of ");
        refused(|r| r.model.architecture.layers = usize::MAX, "the model's layers is 18446744073709551615");
        refused(|r| r.model.architecture.heads = 0, "the model's heads is 0");
    }

    #[test]
    fn averages_over_nothing_are_refused() {
        let empty = |r: &mut Report| r.cells[0].blocks = vec![Block::default()];
        refused(empty, "the length of a block that counts of ");
        refused(
            |r| r.cells[0].blocks = vec![Block { step_ns: vec![-1.0], ..Block::default() }],
            "a step of ",
        );
    }
}
