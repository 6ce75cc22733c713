//! Analysis of results.
//!
//! Enters: a [`Report`](hbmark_core::result::Report) with judged cells, a serving result, and results of other programs. Leaves: [`Ladder`](hbmark_core::result::Ladder)s, which go back into
//! the report as plain data, [`Finding`](hbmark_core::result::Finding)s and [`Checklist`]s. Pure: it measures nothing and
//! can be computed again from a saved file.

pub mod capacity;
mod checklist;
pub mod collection;
pub mod compare;
mod diagnose;
mod diagnose_serving;
mod evidence;
mod explain_import;
mod explain_prediction;
mod fail_on;
mod finding;
mod first_limit;
pub mod import;
pub mod judge;
mod ladder;
mod ladder_summary;
pub mod opened;
mod recheck;
mod side_by_side;
pub mod speculation;
pub mod words;

pub use checklist::{
    Check, CheckOutcome, Checklist, ChecklistVerdict, of_comparison, of_foreign, of_report, of_serving,
};
pub use collection::{Collection, CollectionError};
pub use diagnose::{explain, rule_names};
pub(crate) use diagnose_serving::cached_before;
pub use diagnose_serving::{Cost, explain_serving, serving_rule_names};
pub use explain_import::explain_import;
pub use fail_on::{FailOn, failures, serving_failures};
pub use ladder::{LadderError, ladders, with_external};
pub use opened::{Opened, OpenedError, open};
pub use recheck::recheck;
pub use side_by_side::{FigurePair, SideBySide, SideBySideError, side_by_side};

/// The values, each once, in the order in which they come first.
pub fn distinct<T: PartialEq>(values: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut found = Vec::new();
    for value in values {
        if !found.contains(&value) {
            found.push(value);
        }
    }
    found
}

#[cfg(test)]
mod tests;
