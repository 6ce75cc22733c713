//! A document as Markdown, for an issue or a pull request.
//!
//! Enters: a [`Document`]. Leaves: blocks with an empty line between them. Foreign text cannot become markup.

use std::fmt::Write;

use super::document::{Block, Column, Document, Line, List, Table};
use hbmark_core::input::plain;

/// Draws a document.
pub fn render(document: &Document) -> String {
    let mut parts: Vec<String> = Vec::new();
    if !document.title.is_empty() {
        let level = if document.page { "#" } else { "###" };
        parts.push(format!("{level} {}\n", escape(&document.title)));
    }
    parts.extend(document.blocks.iter().map(|block| draw(block, document.page)));
    parts.join("\n")
}

fn draw(block: &Block, page: bool) -> String {
    let item = |text: String| format!("- {text}\n");
    match block {
        Block::Heading { title, .. } if page => format!("## {}\n", escape(title)),
        Block::Heading { title, .. } => strong(title),
        Block::Lines(lines) => lines
            .iter()
            .map(|line| match line {
                Line::Said(_, text) => item(escape(text)),
                Line::Command(command) => item(format!("command: `{}`", plain(command).replace('`', "'"))),
            })
            .collect(),
        Block::List(List { title, items, .. }) => {
            let title = title.iter().map(|title| strong(title) + "\n");
            title.chain(items.iter().map(|text| item(escape(text)))).collect()
        }
        Block::Figures(figures) => figures.iter().map(|figure| item(escape(&figure.text()))).collect(),
        Block::KeyValues(pairs) => {
            pairs.iter().map(|(key, value)| item(format!("{}: {}", escape(key), escape(value)))).collect()
        }
        Block::Table(table) => draw_table(table),
        Block::Plot(plot) => plot.tables.iter().map(draw_table).collect::<Vec<_>>().join("\n"),
        Block::Fold { title, blocks } => {
            let parts = std::iter::once(strong(title)).chain(blocks.iter().map(|block| draw(block, page)));
            parts.collect::<Vec<_>>().join("\n")
        }
        // A fence longer than any the command could hold.
        Block::Shell(command) => format!("~~~~~~sh\n{}\n~~~~~~\n", plain(command)),
    }
}

fn strong(text: &str) -> String {
    format!("**{}**\n", escape(text))
}

fn draw_table(table: &Table) -> String {
    let mut text = table.title.as_ref().map_or_else(String::new, |title| strong(title) + "\n");
    // Bars are drawn with spaces, which Markdown folds.
    let columns: Vec<&Column> = table.columns.iter().filter(|column| !column.is_drawing()).collect();
    let titles: Vec<String> = columns.iter().map(|column| escape(&column.title)).collect();
    let rules: Vec<&str> = columns.iter().map(|column| if column.right() { "---:" } else { "---" }).collect();
    let _ = writeln!(text, "| {} |\n|{}|", titles.join(" | "), rules.join("|"));
    let shown: Vec<Vec<String>> = columns.iter().map(|column| column.shown()).collect();
    for row in 0..shown.first().map_or(0, Vec::len) {
        let cells: Vec<String> = shown.iter().map(|cells| escape(&cells[row])).collect();
        let _ = writeln!(text, "| {} |", cells.join(" | "));
    }
    let closing = table.closing.iter().map(|closing| format!("\n{}\n", escape(closing)));
    text.extend(closing);
    text
}

/// Text that stays text inside a Markdown table or list.
pub(super) fn escape(text: &str) -> String {
    plain(text).chars().fold(String::new(), |mut out, c| {
        if matches!(c, '|' | '\\' | '`' | '*' | '_' | '[' | ']' | '<' | '>' | '#') {
            out.push('\\');
        }
        out.push(c);
        out
    })
}
