//! The cells of a report as a table of text, before any format draws it.
//!
//! Enters: cells. Leaves: columns with aligned units, and the columns that are the same in every row taken out, so that a reader sees
//! what differs. Terminal and Markdown draw the same table.

use super::metrics::{METRICS, Shown};
use super::text::column;
use hbmark_core::input::plain;
use hbmark_core::result::{Bound, CellResult, Status};

/// Columns that stay even when all rows agree.
const ALWAYS: &[&str] = &["batch", "context", "step", "TPOT", "validity"];

/// One column of text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Column {
    pub title: String,
    /// Numbers stand to the right.
    pub right: bool,
    pub cells: Vec<String>,
}

/// Columns that vary, and those that do not.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CellTable {
    pub columns: Vec<Column>,
    /// Title and value of each column that is the same in every row.
    pub constants: Vec<(String, String)>,
    /// The status of each row, for colour.
    pub statuses: Vec<Status>,
}

/// The word for a status.
#[must_use]
pub fn status_word(status: Status) -> &'static str {
    match status {
        Status::Ok => "ok",
        Status::Invalid => "INVALID",
        Status::NotConverged => "not converged",
        Status::NoSteadyState => "no steady state",
        Status::Disturbed => "disturbed",
        Status::Skipped => "skipped",
        Status::Oom => "oom",
        Status::Failed => "failed",
        Status::Incomplete => "incomplete",
        Status::Predicted => "predicted",
    }
}

/// The word for a bound.
#[must_use]
pub fn bound_word(bound: Bound) -> &'static str {
    match bound {
        Bound::Memory => "memory",
        Bound::Compute => "compute",
        Bound::Overhead => "overhead",
    }
}

/// Builds the table.
#[must_use]
pub fn of_cells(cells: &[CellResult]) -> CellTable {
    let text = |title: &str, right: bool, of: &dyn Fn(&CellResult) -> String| Column {
        title: title.to_owned(),
        right,
        cells: cells.iter().map(of).collect(),
    };
    let mut columns = vec![
        text("phase", false, &|c| format!("{:?}", c.phase).to_lowercase()),
        text("engine", false, &|c| plain(&c.engine)),
        text("dtype", false, &|c| c.dtype.to_string()),
        text("KV dtype", false, &|c| c.kv_dtype.to_string()),
        text("batch", true, &|c| c.batch.to_string()),
        text("context", true, &|c| c.context.to_string()),
    ];
    for metric in METRICS.iter().filter(|m| m.shown == Shown::Table) {
        let values: Vec<Option<f64>> = cells.iter().map(metric.value).collect();
        if values.iter().any(Option::is_some) {
            columns.push(Column {
                title: metric.title.to_owned(),
                right: true,
                cells: column(metric.unit, &values),
            });
        }
    }
    columns.push(text("bound", false, &|c| c.bound.map_or("-", bound_word).to_owned()));
    columns.push(text("validity", false, &|c| status_word(c.status).to_owned()));
    let same = |column: &Column| column.cells.windows(2).all(|pair| pair[0] == pair[1]);
    let (constant, columns): (Vec<Column>, Vec<Column>) =
        columns.into_iter().partition(|c| cells.len() > 1 && same(c) && !ALWAYS.contains(&c.title.as_str()));
    let constants = constant
        .into_iter()
        .filter_map(|mut c| Some((c.title, c.cells.pop()?)))
        .filter(|(_, value)| value != "-")
        .collect();
    CellTable { columns, constants, statuses: cells.iter().map(|c| c.status).collect() }
}

/// Sentences about the cells that are not simply ok: what became of them and why, and their flags.
#[must_use]
pub fn remarks(cells: &[CellResult]) -> Vec<String> {
    let mut remarks = Vec::new();
    for cell in cells {
        if let Some(reason) = &cell.reason {
            remarks.push(format!(
                "{}: {}: {}",
                plain(&cell.id),
                status_word(cell.status),
                plain(&reason.to_string())
            ));
        }
        let rejected = cell.blocks.iter().filter(|b| b.rejected.is_some()).count();
        if rejected > 0 && cell.status != Status::Disturbed {
            let last = cell.blocks.iter().rev().find_map(|b| b.rejected.as_ref());
            remarks.push(format!(
                "{}: {rejected} of {} blocks rejected; the last: {}",
                plain(&cell.id),
                cell.blocks.len(),
                last.map_or_else(String::new, |cause| plain(&cause.to_string()))
            ));
        }
    }
    remarks.extend(shared(cells, |cell| cell.flags.iter().map(ToString::to_string).collect()));
    remarks.extend(shared(cells, |cell| {
        let mut conditions: Vec<String> =
            cell.blocks.iter().flat_map(|b| &b.conditions).map(ToString::to_string).collect();
        conditions.sort();
        conditions.dedup();
        conditions
    }));
    remarks
}

/// A sentence said of several cells, once, with how many of them it is said of.
fn shared(cells: &[CellResult], of: impl Fn(&CellResult) -> Vec<String>) -> Vec<String> {
    let mut sentences: Vec<(String, Vec<String>)> = Vec::new();
    for cell in cells {
        for sentence in of(cell) {
            match sentences.iter_mut().find(|(known, _)| *known == sentence) {
                Some((_, ids)) => ids.push(plain(&cell.id)),
                None => sentences.push((sentence, vec![plain(&cell.id)])),
            }
        }
    }
    sentences
        .into_iter()
        .map(|(sentence, ids)| match ids.as_slice() {
            [one] => format!("{one}: {}", plain(&sentence)),
            many if many.len() == cells.len() => format!("every cell: {}", plain(&sentence)),
            many => format!("{} cells ({} ...): {}", many.len(), many[0], plain(&sentence)),
        })
        .collect()
}
