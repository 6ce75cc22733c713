//! What results mean, and how they are printed.
//!
//! | module | what it holds |
//! |---|---|
//! | [`analysis`] | judged cells, ladders, diagnosis, checklists, capacity, other programs' results, comparisons |
//! | [`output`] | tables, CSV, Markdown and pages |
//!
//! Both are computed from plain data alone: a saved file gives the same answers as a live run.
//!
//! ```
//! use hbmark_report::output::{Format, render};
//! # let folder = tempfile::tempdir().unwrap();
//! # let path = folder.path().join("result.json");
//! # std::fs::write(&path, hbmark_core::result::saved::write(&hbmark_report::samples::measured()).unwrap()).unwrap();
//! // Read, validated, and judged again from its raw samples.
//! let report = hbmark_report::analysis::opened::report(&path).unwrap();
//! let page = render(&report, Format::Md, false).unwrap();
//! assert!(page.contains("Llama-3.2-1B"));
//! ```

pub mod analysis;
pub mod output;
#[doc(hidden)]
pub mod samples;
