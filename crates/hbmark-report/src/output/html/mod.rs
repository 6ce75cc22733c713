//! A report as one HTML page that a browser shows without a network: findings, plots, tables, and how to run it again.
//!
//! Enters: a [`Report`] or a [`ServeReport`]. Leaves: a document. [`node`] is markup that escapes everything by construction; [`axis`],
//! [`chart`] and [`figure`] are the parts of a plot; each plot has a file of its own and decides only what to show; [`page`] and
//! [`serving`] put them in order within the [`frame`] that every page has. Nothing is computed here that the other formats do not have,
//! and nothing is measured.

mod axis;
mod bars;
mod batch;
mod blocks;
mod chart;
mod context;
mod figure;
mod frame;
mod load;
mod node;
mod page;
mod palette;
mod percentiles;
mod roofline;
mod serving;
mod steps;
mod telemetry;
mod waterfall;

use super::External;
use hbmark_core::result::serving::ServeReport;
use hbmark_core::result::{Finding, Report};

/// Draws a report, with other programs' decodes on its roofline.
#[must_use]
pub fn render(report: &Report, externals: &[External]) -> String {
    page::document(report, externals)
}

/// Draws a serving result, with what was found in it.
#[must_use]
pub fn render_serving(report: &ServeReport, findings: &[Finding]) -> String {
    serving::document(report, findings)
}

#[cfg(test)]
mod browser_tests;
#[cfg(test)]
mod serving_tests;
#[cfg(test)]
mod tests;
