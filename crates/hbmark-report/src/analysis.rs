//! Analysis of results.
//!
//! Enters: a [`Report`](hbmark_core::result::Report) with judged cells, a serving result, and results of other programs. Leaves: [`Ladder`](hbmark_core::result::Ladder)s, which go back into
//! the report as plain data, [`Finding`](hbmark_core::result::Finding)s and [`Checklist`]s. Pure: it measures nothing and
//! can be computed again from a saved file.

pub mod capacity;
mod checklist;
pub mod compare;
mod diagnose;
mod diagnose_serving;
mod evidence;
mod finding;
mod first_limit;
pub mod import;
pub mod judge;
mod ladder;
mod ladder_summary;

pub use checklist::{Check, CheckOutcome, Checklist, of_foreign, of_report};
pub use diagnose::{explain, rule_names};
pub use diagnose_serving::{Cost, explain_serving, serving_rule_names};
pub use ladder::{LadderError, ladders, with_external};

#[cfg(test)]
mod tests;
