//! The kinds of results: each file makes one of them a [`Document`](super::document::Document), which every format draws.

mod breakdown;
mod capacity;
mod checklist;
mod collection;
mod comparison;
mod findings;
mod foreign;
mod glossary;
mod headline;
mod probe;
mod provenance;
pub mod record;
pub(super) mod run;
pub(super) mod serving;
mod side_by_side;
mod speculation;

pub use foreign::Aliases;
pub use glossary::Glossary;
pub use run::{copy_above_read, status_word};
