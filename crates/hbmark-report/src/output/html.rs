//! A report as one HTML page that a browser shows without a network: findings, plots, tables, and how to run it again.
//!
//! Enters: a [`Report`] or a [`ServeReport`], which have plots, or any [`Document`]. Leaves: a page. [`node`] is markup that escapes everything by construction; [`axis`],
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
mod latency_vs_load;
mod node;
mod page;
mod palette;
mod percentiles;
mod roofline;
mod serving;
mod steps;
mod telemetry;
mod waterfall;

use node::{Node, el};

use super::External;
use super::document::{Block, Document, Line};
use hbmark_core::result::serving::ServeReport;
use hbmark_core::result::{Finding, Report};

/// Draws a report, with other programs' decodes on its roofline.
#[must_use]
pub fn of_run(report: &Report, externals: &[External]) -> String {
    page::document(report, externals)
}

/// Draws a serving result, with what was found in it.
#[must_use]
pub fn of_serving(report: &ServeReport, findings: &[Finding]) -> String {
    serving::document(report, findings)
}

/// Draws a document that has no plots.
#[must_use]
pub fn of_document(document: &Document) -> String {
    let mut main = el("main");
    if !document.title.is_empty() {
        main = main.child(el("header").child(el("h1").text(document.title.as_str())));
    }
    for block in &document.blocks {
        main = main.children(drawn(block));
    }
    let name = if document.title.is_empty() { "report" } else { &document.title };
    frame::document(name, "the JSON of the result", main)
}

fn drawn(block: &Block) -> Vec<Node> {
    let code = |text: &str| el("pre").attr("tabindex", "0").child(el("code").text(text));
    match block {
        Block::Heading(title) => vec![el("h2").text(title.as_str())],
        Block::Lines(lines) => lines
            .iter()
            .map(|line| match line {
                Line::Said(_, text) => el("p").class("identity").text(text.as_str()),
                Line::Command(command) => code(command),
            })
            .collect(),
        Block::List(items) => {
            vec![el("ul").children(items.iter().map(|item| el("li").text(item.as_str())))]
        }
        Block::KeyValues(pairs) => {
            vec![el("ul").children(pairs.iter().map(|(key, value)| el("li").text(format!("{key}: {value}"))))]
        }
        Block::Table(table) => {
            let caption = table.title.as_deref().unwrap_or_default();
            let closing = table.closing.iter().map(|closing| el("p").text(closing.as_str()));
            std::iter::once(figure::table(caption, &table.columns)).chain(closing).collect()
        }
        Block::Shell(command) => vec![code(command)],
    }
}

#[cfg(test)]
mod tests;
