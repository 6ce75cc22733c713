//! A report as one HTML page that a browser shows without a network: findings, plots, tables, and how to run it again.
//!
//! Enters: a [`Report`]. Leaves: a document. [`node`] is markup that escapes everything by construction; [`axis`], [`chart`] and [`figure`]
//! are the parts of a plot; each plot has a file of its own and decides only what to show; [`page`] puts them in order. Nothing is computed
//! here that the other formats do not have, and nothing is measured.

mod axis;
mod batch;
mod blocks;
mod chart;
mod context;
mod figure;
mod node;
mod page;
mod palette;
mod roofline;
mod telemetry;
mod waterfall;

use super::Report;

/// Draws a report.
#[must_use]
pub fn render(report: &Report) -> String {
    page::document(report)
}

#[cfg(test)]
mod browser_tests;
#[cfg(test)]
mod tests;
