//! A plot with what belongs to it: its drawings, the buttons that save them, a caption, and the values as a table.
//!
//! Enters: what one of the plots found to show, or why it has nothing. Leaves: a `figure` element. A plot without data says so in its place.

use super::chart::Chart;
use super::node::{Node, el};
use crate::output::document::Column;

pub use crate::output::document::{numbers, words};

/// One drawing, for a desk and for a phone.
pub type Drawings = Vec<Node>;

/// One plot of the page; several drawings where there is one per cell or per engine.
#[derive(Debug, Clone)]
pub struct Figure {
    /// The anchor on the page.
    pub id: &'static str,
    pub title: &'static str,
    /// What one sees, in a sentence or two.
    pub caption: Vec<String>,
    pub panels: Vec<Panel>,
    /// Panels after this many are folded away.
    pub open_panels: usize,
    pub tables: Vec<(String, Vec<Column>)>,
    /// Why there is nothing to show.
    pub absent: Option<String>,
}

/// A drawing and the line below it.
#[derive(Debug, Clone)]
pub struct Panel {
    pub drawings: Drawings,
    pub half: bool,
    pub closing: Option<String>,
}

impl Panel {
    #[must_use]
    pub fn of(chart: &Chart) -> Self {
        let half = chart.span == super::chart::Span::Half;
        Self { drawings: chart.draw(), half, closing: None }
    }
}

impl Figure {
    #[must_use]
    pub fn new(id: &'static str, title: &'static str) -> Self {
        Self {
            id,
            title,
            caption: Vec::new(),
            panels: Vec::new(),
            open_panels: usize::MAX,
            tables: Vec::new(),
            absent: None,
        }
    }

    #[must_use]
    pub fn absent(mut self, why: impl Into<String>) -> Self {
        self.absent = Some(why.into());
        self
    }

    #[must_use]
    pub fn render(self) -> Node {
        let section = el("section").attr("id", self.id).child(el("h2").text(self.title));
        if let Some(why) = self.absent {
            return section.child(el("p").class("absent").text(why));
        }
        let mut figure = el("figure");
        let count = self.panels.len();
        let open = self.open_panels.min(count);
        let mut panels = self.panels.into_iter();
        let shown: Vec<Node> = panels.by_ref().take(open).map(panel).collect();
        figure = figure.child(el("div").class("panels").children(shown));
        if count > open {
            let more = el("summary").text(format!("{} more", count - open));
            let rest = el("div").class("panels").children(panels.map(panel));
            figure = figure.child(el("details").child(more).child(rest));
        }
        let caption = self.caption.into_iter().map(|line| el("p").text(line));
        figure = figure.child(el("figcaption").children(caption));
        if !self.tables.is_empty() {
            let tables = self.tables.into_iter().map(|(caption, columns)| table(&caption, &columns));
            let values = el("details").child(el("summary").text("The values as a table"));
            figure = figure.child(values.children(tables));
        }
        section.child(figure)
    }
}

fn panel(panel: Panel) -> Node {
    let button = |kind: &'static str, says: &'static str| {
        el("button").attr("type", "button").attr("data-save", kind).text(says)
    };
    let buttons = el("div").class("save").child(button("svg", "Save SVG")).child(button("png", "Save PNG"));
    let closing = panel.closing.map(|text| el("p").class("closing").text(text));
    el("div")
        .class(if panel.half { "panel half" } else { "panel" })
        .children(panel.drawings)
        .child(buttons)
        .children(closing)
}

/// Columns as a table that scrolls in itself where it is too wide; drawings of characters are left out.
#[must_use]
pub fn table(caption: &str, columns: &[Column]) -> Node {
    let columns: Vec<&Column> = columns.iter().filter(|column| !column.is_drawing()).collect();
    let class = |column: &Column| if column.right() { "number" } else { "word" };
    let heading = |c: &Column| el("th").attr("scope", "col").class(class(c)).text(c.title.as_str());
    let head = el("thead").child(el("tr").children(columns.iter().map(|column| heading(column))));
    let shown: Vec<(&str, Vec<String>)> = columns.iter().map(|c| (class(c), c.shown())).collect();
    let row = |i: usize| {
        let cell = |(class, cells): &(&str, Vec<String>)| {
            el("td").class(*class).text(cells.get(i).map_or("", String::as_str))
        };
        el("tr").children(shown.iter().map(cell))
    };
    let rows = shown.first().map_or(0, |(_, cells)| cells.len());
    let mut table = el("table");
    if !caption.is_empty() {
        table = table.child(el("caption").text(caption));
    }
    let table = table.child(head).child(el("tbody").children((0..rows).map(row)));
    // A region that scrolls must be reachable with the keyboard.
    el("div").class("scroll").attr("tabindex", "0").child(table)
}
