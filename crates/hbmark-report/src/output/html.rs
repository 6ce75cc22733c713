//! A document as one HTML page that a browser shows without a network.
//!
//! Enters: a [`Document`]. Leaves: a page. [`node`] is markup that escapes everything by construction, [`chart`] and [`bars`] draw plots as
//! SVG, [`frame`] is the page around them.

mod bars;
mod chart;
mod frame;
mod node;

use super::document::{Block, Column, Document, Figure, Line, List, Table, Tone};
use super::plot::{Drawing, Plot, Span};
use node::{Node, el};

/// Items of a titled list that are not folded away.
const OPEN_ITEMS: usize = 5;

/// Longer words may be broken where there is little room.
const LONG_WORD: usize = 14;

/// Draws a document. Each heading begins a section; the lines before the first are its header.
pub fn render(document: &Document) -> String {
    let title = (!document.title.is_empty()).then(|| el("h1").text(document.title.as_str()));
    let opens = |block: &&Block| matches!(block, Block::Lines(_) | Block::Figures(_));
    let opening = document.blocks.iter().take_while(opens).count();
    let (header, rest) = document.blocks.split_at(opening);
    let mut main = el("main");
    if title.is_some() || opening > 0 {
        main = main.child(el("header").children(title).children(header.iter().flat_map(draw)));
    }
    for blocks in rest.chunk_by(|_, next| !matches!(next, Block::Heading { .. })) {
        let mut section = el("section");
        if let Some(Block::Heading { anchor: Some(anchor), .. }) = blocks.first() {
            section = section.attr("id", *anchor);
        }
        main = main.child(section.children(blocks.iter().flat_map(draw)));
    }
    frame::page(if document.title.is_empty() { "report" } else { &document.title }, main)
}

fn draw(block: &Block) -> Vec<Node> {
    match block {
        Block::Heading { title, .. } => vec![el("h2").text(title.as_str())],
        Block::Lines(lines) => lines.iter().map(line).collect(),
        Block::Figures(figures) => vec![el("div").class("figures").children(figures.iter().map(headline))],
        Block::List(list) => items(list),
        Block::KeyValues(pairs) => {
            vec![el("ul").children(pairs.iter().map(|(key, value)| el("li").text(format!("{key}: {value}"))))]
        }
        Block::Table(shown) => {
            let closing = shown.closing.iter().map(|closing| el("p").text(closing.as_str()));
            std::iter::once(table(shown)).chain(closing).collect()
        }
        Block::Plot(plot) => vec![figure(plot)],
        Block::Fold { title, blocks } => vec![fold(title.as_str(), blocks.iter().flat_map(draw))],
        Block::Shell(command) => vec![code(command)],
    }
}

fn headline(figure: &Figure) -> Node {
    let class = match figure.tone {
        Tone::Plain | Tone::Faint => "headline",
        Tone::Good => "headline good",
        Tone::Warning => "headline warning",
        Tone::Bad => "headline bad",
    };
    let note = (!figure.note.is_empty()).then(|| el("p").class("note").text(figure.note.as_str()));
    el("div")
        .class(class)
        .child(el("p").class("name").text(figure.name.as_str()))
        .child(el("p").class("value").text(figure.value.as_str()))
        .children(note)
}

fn line(line: &Line) -> Node {
    match line {
        Line::Said(Tone::Plain, text) => el("p").text(text.as_str()),
        Line::Said(Tone::Faint, text) => el("p").class("absent").text(text.as_str()),
        Line::Said(_, text) => el("p").class("notice").text(text.as_str()),
        Line::Command(command) => code(command),
    }
}

fn code(text: &str) -> Node {
    el("pre").attr("tabindex", "0").child(el("code").text(text))
}

fn fold(title: impl Into<String>, nodes: impl IntoIterator<Item = Node>) -> Node {
    el("details").child(el("summary").text(title)).children(nodes)
}

/// A list; the end of a long one with a title is folded away.
fn items(list: &List) -> Vec<Node> {
    let bullets = |items: &[String]| el("ul").children(items.iter().map(|item| el("li").text(item.as_str())));
    let Some(title) = &list.title else { return vec![bullets(&list.items)] };
    let (shown, more) = list.items.split_at(list.items.len().min(OPEN_ITEMS));
    let more = (!more.is_empty()).then(|| fold(format!("{} more", more.len()), [bullets(more)]));
    let class = if list.tone == Tone::Warning { "findings warning" } else { "findings" };
    let title = el("h3").text(title.as_str());
    vec![el("div").class(class).child(title).child(bullets(shown)).children(more)]
}

/// A table that scrolls in itself where it is too wide; bars made of characters are left out.
fn table(table: &Table) -> Node {
    let columns: Vec<&Column> = table.columns.iter().filter(|column| !column.is_drawing()).collect();
    let class = |column: &Column| match (column.right(), column.minor) {
        (true, false) => "number",
        (true, true) => "number minor",
        (false, false) if column.key => "word key",
        (false, false) => "word",
        (false, true) => "word minor",
    };
    let heading = |c: &&Column| el("th").attr("scope", "col").class(class(c)).text(c.title.as_str());
    let head = el("thead").child(el("tr").children(columns.iter().map(heading)));
    let shown: Vec<(&str, Vec<String>)> = columns.iter().map(|c| (class(c), c.shown())).collect();
    let row = |i: usize| {
        let cell = |(class, cells): &(&str, Vec<String>)| {
            let text = cells.get(i).map_or("", String::as_str);
            // A median with its range is three times as long as a number, and the name of a file may be one long word.
            let long = text.split_whitespace().any(|word| word.chars().count() > LONG_WORD);
            let class = match (text.starts_with('['), long) {
                (true, _) => format!("{class} range"),
                (false, true) => format!("{class} long"),
                (false, false) => (*class).to_owned(),
            };
            el("td").class(class).text(text)
        };
        el("tr").children(shown.iter().map(cell))
    };
    let rows = shown.first().map_or(0, |(_, cells)| cells.len());
    let caption = table.title.iter().map(|title| el("caption").text(title.as_str()));
    let body = el("tbody").children((0..rows).map(row));
    // A region that scrolls must be reachable with the keyboard.
    let scroll = el("div").class("scroll").attr("tabindex", "0");
    let scroll = scroll.child(el("table").children(caption).child(head).child(body));
    if columns.iter().all(|column| !column.minor) {
        return scroll;
    }
    // Shown where a style sheet hides the minor columns; it needs no script.
    let all = el("label").class("all").child(el("input").attr("type", "checkbox")).text(" All columns");
    el("div").class("columns").child(all).child(scroll)
}

/// Drawings with the buttons that save them, the caption, and the values as tables.
fn figure(plot: &Plot) -> Node {
    let panels = |drawings: &[Drawing]| el("div").class("panels").children(drawings.iter().map(panel));
    let (shown, more) = plot.drawings.split_at(plot.drawings.len().min(plot.open));
    let more = (!more.is_empty()).then(|| fold(format!("{} more", more.len()), [panels(more)]));
    let caption = el("figcaption").children(plot.caption.iter().map(|line| el("p").text(line.as_str())));
    let tables =
        (!plot.tables.is_empty()).then(|| fold("The values as a table", plot.tables.iter().map(table)));
    el("figure").child(panels(shown)).children(more).child(caption).children(tables)
}

fn panel(drawing: &Drawing) -> Node {
    let (drawn, half, closing) = match drawing {
        Drawing::Chart(chart) => (chart.draw(), chart.span == Span::Half, None),
        Drawing::Bars(bars) => (bars::draw(bars), true, bars.closing.as_ref()),
    };
    let button = |kind: &'static str, label: &'static str| {
        el("button").attr("type", "button").attr("data-save", kind).text(label)
    };
    el("div")
        .class(if half { "panel half" } else { "panel" })
        .children(drawn)
        .child(el("div").class("save").child(button("svg", "Save SVG")).child(button("png", "Save PNG")))
        .children(closing.map(|text| el("p").class("closing").text(text.as_str())))
}

#[cfg(test)]
mod tests;
