//! Small tables under the cells: the ladder of a place on the grid, the operations of a step.
//!
//! Enters: a [`Report`]. Leaves: a title, columns of text and a closing line for each. Terminal and Markdown draw the same ones; what
//! the numbers mean was decided in [`crate::insight`] and where they were measured.

use super::metrics::Unit;
use super::table::{Column, status_word};
use super::text::{column, plain};
use super::{CellResult, OperationRow, Phase, Report, Status};
use crate::insight::Ladder;
use crate::units::Nanos;

/// Characters of a bar that spans the slowest time.
const BAR: usize = 30;

/// One small table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Breakdown {
    pub title: String,
    pub columns: Vec<Column>,
    /// What the table says, in a line.
    pub closing: String,
}

/// The ladders of a report that compares engines; with one engine the cells' own columns say the same.
#[must_use]
pub fn ladders(report: &Report) -> Vec<Breakdown> {
    let compares = report.cells.iter().any(|cell| cell.engine != report.cells[0].engine);
    report.ladders.iter().filter(|_| compares).map(of_ladder).collect()
}

/// The steps that were broken down per operation.
#[must_use]
pub fn operations(report: &Report) -> Vec<Breakdown> {
    report.cells.iter().filter(|cell| !cell.operations.is_empty()).map(of_operations).collect()
}

fn text(title: &str, cells: Vec<String>) -> Column {
    Column { title: title.to_owned(), right: false, cells }
}

fn number(title: &str, cells: Vec<String>) -> Column {
    Column { title: title.to_owned(), right: true, cells }
}

fn phase_word(phase: Phase) -> &'static str {
    match phase {
        Phase::Prefill => "prefill",
        Phase::Decode => "decode",
    }
}

fn of_ladder(ladder: &Ladder) -> Breakdown {
    let (scale, rungs) = (ladder.scale(), &ladder.rungs);
    let time = match ladder.phase {
        Phase::Prefill => "step",
        Phase::Decode => "TPOT",
    };
    let name = |index: usize| {
        let name = plain(&ladder.name(index));
        match rungs[index].status {
            Status::Ok | Status::Predicted => name,
            status => format!("{name} ({})", status_word(status)),
        }
    };
    let column_of = |unit, of: &dyn Fn(usize) -> Option<f64>| -> Vec<String> {
        column(unit, &(0..rungs.len()).map(of).collect::<Vec<_>>())
    };
    let columns = vec![
        text("rung", (0..rungs.len()).map(name).collect()),
        text("dtype", rungs.iter().map(|r| r.dtype.to_string()).collect()),
        number(time, rungs.iter().map(|r| scale.show(r.time_ns)).collect()),
        number("adds", rungs.iter().map(|r| scale.show(r.step_ns)).collect()),
        number("share", column_of(Unit::Fraction, &|i| Some(rungs[i].share))),
        number("bytes", column_of(Unit::Bytes, &|i| rungs[i].bytes.map(|b| b.as_f64()))),
        text("", bars(ladder)),
    ];
    let title = format!("{}, batch {}, context {}", phase_word(ladder.phase), ladder.batch, ladder.context);
    Breakdown { title, columns, closing: plain(&ladder.story) }
}

/// What each rung adds, drawn where the rungs above it end; what takes away is drawn lighter.
fn bars(ladder: &Ladder) -> Vec<String> {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped just here")]
    let place = |share: f64| (share * BAR as f64).round().clamp(0.0, 2.0 * BAR as f64) as usize;
    let mut level = 0.0;
    ladder
        .rungs
        .iter()
        .map(|rung| {
            let (from, to) = (place(level), place(level + rung.share));
            level += rung.share;
            let (start, mark) = if to < from { (to, "░") } else { (from, "█") };
            " ".repeat(start) + &mark.repeat(from.abs_diff(to))
        })
        .collect()
}

fn of_operations(cell: &CellResult) -> Breakdown {
    let rows = &cell.operations;
    let sum: f64 = rows.iter().map(|row| row.time_ns).sum();
    let column_of = |unit, of: &dyn Fn(&OperationRow) -> Option<f64>| -> Vec<String> {
        column(unit, &rows.iter().map(of).collect::<Vec<_>>())
    };
    let rate = |row: &OperationRow| {
        (row.time_ns > 0.0).then(|| row.bytes.per(Nanos(row.time_ns)).0).filter(|rate| *rate > 0.0)
    };
    let columns = vec![
        text("operation", rows.iter().map(|row| plain(&row.operation)).collect()),
        number("calls", rows.iter().map(|row| row.calls.to_string()).collect()),
        number("time", column_of(Unit::Nanoseconds, &|row| Some(row.time_ns))),
        number("share", column_of(Unit::Fraction, &|row| (sum > 0.0).then(|| row.time_ns / sum))),
        number("bytes", column_of(Unit::Bytes, &|row| Some(row.bytes.as_f64()))),
        number("rate", column_of(Unit::BytesPerSecond, &rate)),
        number("% ceiling", column_of(Unit::Fraction, &|row| row.fraction_of_ceiling)),
    ];
    let title = format!("{}, operations of a step", plain(&cell.id));
    Breakdown { title, columns, closing: against_the_step(cell, sum) }
}

/// The operations together beside the step that was timed whole.
fn against_the_step(cell: &CellResult, sum: f64) -> String {
    let timed = match cell.phase {
        Phase::Prefill => cell.step_ns.as_ref().map(|step| step.median),
        Phase::Decode => cell.tpot_ns,
    };
    let Some(timed) = timed else { return format!("together {}; no whole step was timed", Nanos(sum)) };
    let apart = sum / timed - 1.0;
    format!(
        "together {}, in steps timed operation by operation; a whole step takes {} ({:+.1} %)",
        Nanos(sum),
        Nanos(timed),
        // A difference that rounds to nothing has no sign of its own.
        if apart.abs() < 5e-4 { 0.0 } else { apart * 100.0 }
    )
}
