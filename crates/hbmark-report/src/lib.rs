//! What results mean, and how they are printed.
//!
//! | module | what it holds |
//! |---|---|
//! | [`analysis`] | judged cells, ladders, diagnosis, checklists, capacity, other programs' results, comparisons |
//! | [`output`] | tables, CSV, Markdown and pages |
//!
//! Both are computed from plain data alone: a saved file gives the same answers as a live run.

pub mod analysis;
pub mod output;
#[doc(hidden)]
pub mod samples;
