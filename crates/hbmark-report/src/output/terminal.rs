//! A document for a person at a terminal: aligned columns, and colour where that is wanted.
//!
//! Enters: a [`Document`] and whether to colour. Leaves: text; without colour it is the same text. Foreign text cannot move the cursor.

use std::fmt::Write;

use owo_colors::{OwoColorize, Style};

use super::document::{Block, Cells, Column, Document, Figure, Line, List, Table, Tone};
use hbmark_core::input::plain;

/// Characters between two columns.
const GAP: usize = 2;
/// Characters of a name that is shortened, at the least.
const LEAST_NAME: usize = 8;

/// Where a document is shown.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Screen {
    pub color: bool,
    /// Characters in a line; a wider table is drawn in parts, and prose is folded. Unlimited where it is not known.
    pub width: Option<usize>,
}

impl From<bool> for Screen {
    /// Of any width; with colour or without.
    fn from(color: bool) -> Self {
        Self { color, width: None }
    }
}

/// Draws a document.
pub fn render(document: &Document, screen: impl Into<Screen>) -> String {
    let paint = Paint(screen.into());
    let mut text = String::new();
    if !document.title.is_empty() {
        let _ = writeln!(text, "{}", paint.strong(&plain(&document.title)));
    }
    let mut follows = !document.title.is_empty();
    for block in &document.blocks {
        let heading = matches!(block, Block::Heading { .. });
        // No gap between a heading and what is below it.
        if !text.is_empty() && (heading || !follows) {
            text.push('\n');
        }
        follows = heading;
        let _ = draw(&mut text, block, &paint);
    }
    text
}

/// Colour, or not, and the width.
struct Paint(Screen);

impl Paint {
    fn with(&self, text: &str, style: Style) -> String {
        if self.0.color { text.style(style).to_string() } else { text.to_owned() }
    }

    /// Prose in lines that the screen has room for, each but the first indented.
    fn folded(&self, text: &str, indent: usize) -> String {
        let Some(width) = self.0.width else { return text.to_owned() };
        let indent = " ".repeat(indent.min(width / 2));
        // A flag or a name stays whole, to be copied.
        let options = textwrap::Options::new(width)
            .word_splitter(textwrap::WordSplitter::NoHyphenation)
            .word_separator(textwrap::WordSeparator::AsciiSpace)
            .break_words(false);
        textwrap::fill(text, options.subsequent_indent(&indent))
    }

    fn strong(&self, text: &str) -> String {
        self.with(text, Style::new().bold())
    }

    fn toned(&self, text: &str, tone: Tone) -> String {
        match tone {
            Tone::Plain => text.to_owned(),
            Tone::Faint => self.with(text, Style::new().dimmed()),
            Tone::Good => self.with(text, Style::new().green()),
            Tone::Warning => self.with(text, Style::new().yellow()),
            Tone::Bad => self.with(text, Style::new().red().bold()),
        }
    }
}

fn draw(text: &mut String, block: &Block, paint: &Paint) -> std::fmt::Result {
    match block {
        Block::Heading { title, .. } => writeln!(text, "{}", paint.strong(&plain(title))),
        Block::Lines(lines) => lines.iter().try_for_each(|line| match line {
            Line::Said(tone, line) => {
                writeln!(text, "{}", paint.toned(&paint.folded(&plain(line), 2), *tone))
            }
            Line::Command(_) => Ok(()),
        }),
        Block::Figures(figures) => {
            let line = |f: &Figure| paint.toned(&paint.folded(&plain(&f.text()), 2), f.tone);
            figures.iter().try_for_each(|figure| writeln!(text, "{}", line(figure)))
        }
        Block::List(List { title, items, .. }) => {
            title.iter().try_for_each(|title| writeln!(text, "{}", paint.strong(&plain(title))))?;
            let line = |item: &String| paint.folded(&format!("  {}", plain(item)), 4);
            items.iter().try_for_each(|item| writeln!(text, "{}", line(item)))
        }
        Block::KeyValues(pairs) => {
            let width = pairs.iter().map(|(key, _)| key.chars().count()).max().unwrap_or(0);
            pairs.iter().try_for_each(|(key, value)| {
                let fill = " ".repeat(width - key.chars().count());
                let line = format!("  {}{fill}  {}", plain(key), plain(value));
                writeln!(text, "{}", paint.folded(&line, width + 4))
            })
        }
        Block::Table(table) => draw_table(text, table, paint),
        Block::Plot(plot) => plot.tables.iter().try_for_each(|table| draw_table(text, table, paint)),
        Block::Fold { title, blocks } => {
            writeln!(text, "{}", paint.strong(&plain(title)))?;
            blocks.iter().try_for_each(|block| draw(text, block, paint))
        }
        Block::Shell(command) => writeln!(text, "  {}", plain(command)),
    }
}

fn draw_table(text: &mut String, table: &Table, paint: &Paint) -> std::fmt::Result {
    // A table with a title of its own is one of several under a heading.
    let indent = if table.title.is_some() { "  " } else { "" };
    if let Some(title) = &table.title {
        writeln!(text, "{indent}{}", paint.strong(&plain(title)))?;
    }
    for (part, columns) in
        parts(&table.columns, paint.0.width.map(|width| width.saturating_sub(indent.len())))
            .iter()
            .enumerate()
    {
        if part > 0 {
            writeln!(text)?;
        }
        let mut lines = aligned(columns).into_iter();
        writeln!(text, "{indent}{}", paint.strong(&lines.next().unwrap_or_default()))?;
        for (index, line) in lines.enumerate() {
            let tone = table.tones.get(index).copied().unwrap_or(Tone::Plain);
            writeln!(text, "{indent}{}", paint.toned(&line, tone))?;
        }
    }
    table.closing.iter().try_for_each(|closing| {
        writeln!(text, "{}", paint.folded(&format!("{indent}{}", plain(closing)), indent.len() + 2))
    })
}

/// Room that a column takes with the gap to the next.
fn wide(column: &Column) -> usize {
    let cells = column.shown();
    let longest = std::iter::once(&column.title).chain(&cells).map(|cell| plain(cell).chars().count()).max();
    longest.unwrap_or(0) + GAP
}

/// The columns of a table in parts that are no wider than a line; each part begins with the columns that name a row.
fn parts(columns: &[Column], width: Option<usize>) -> Vec<Vec<Column>> {
    let all: usize = columns.iter().map(wide).sum();
    let Some(width) = width.filter(|width| all > width + GAP) else { return vec![columns.to_vec()] };
    // Half of a line is for numbers.
    let half = width / 2 + GAP;
    let keys = columns.iter().take_while(|column| column.key).count();
    let names: Vec<Column> = if keys > 0 {
        fitted(&columns[..keys], half)
    } else {
        let mut width_so_far = 0;
        let names = columns.iter().take_while(|column| {
            width_so_far += wide(column);
            !matches!(column.cells, Cells::Measured { .. } | Cells::Bars(_)) && width_so_far <= half
        });
        names.cloned().collect()
    };
    let begin: usize = names.iter().map(wide).sum();
    let mut parts: Vec<Vec<Column>> = Vec::new();
    let mut taken = usize::MAX;
    for column in &columns[names.len()..] {
        let needs = wide(column);
        if taken.saturating_add(needs) > width + GAP {
            parts.push(names.clone());
            taken = begin;
        }
        taken += needs;
        parts.last_mut().expect("the first column begins a part").push(column.clone());
    }
    if parts.is_empty() { vec![names] } else { parts }
}

/// Columns in a room: those with less than an equal share keep what they have, the others are shortened to what is left for each.
fn fitted(columns: &[Column], room: usize) -> Vec<Column> {
    let mut narrowest: Vec<usize> = columns.iter().map(wide).collect();
    narrowest.sort_unstable();
    let (mut left, mut share) = (room, room / columns.len().max(1));
    for (index, needs) in narrowest.iter().enumerate() {
        share = left / (columns.len() - index);
        if *needs > share {
            break;
        }
        left -= needs;
    }
    let each = |column: &Column| match &column.cells {
        Cells::Words(cells) if wide(column) > share => {
            let most = share.saturating_sub(GAP);
            let cells = cells.iter().map(|cell| shortened(&plain(cell), most)).collect();
            Column { cells: Cells::Words(cells), ..column.clone() }
        }
        _ => column.clone(),
    };
    columns.iter().map(each).collect()
}

/// Text of so many characters at most: names differ at their end more often than at their beginning, so that the middle goes.
fn shortened(text: &str, most: usize) -> String {
    let letters: Vec<char> = text.chars().collect();
    let kept = most.max(LEAST_NAME).saturating_sub(1);
    if letters.len() <= kept + 1 {
        return text.to_owned();
    }
    let (first, last) = letters.split_at(kept / 3);
    let last = &last[letters.len() - kept..];
    first.iter().chain(&['…']).chain(last).collect()
}

/// Columns as lines, the titles first.
fn aligned(columns: &[Column]) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for (index, column) in columns.iter().enumerate() {
        let cells: Vec<String> =
            std::iter::once(&column.title).chain(&column.shown()).map(|cell| plain(cell)).collect();
        let width = cells.iter().map(|cell| cell.chars().count()).max().unwrap_or(0);
        lines.resize(lines.len().max(cells.len()), String::new());
        for (line, cell) in lines.iter_mut().zip(&cells) {
            let fill = " ".repeat(width - cell.chars().count());
            let gap = " ".repeat(if index > 0 { GAP } else { 0 });
            let _ = if column.right() {
                write!(line, "{gap}{fill}{cell}")
            } else {
                write!(line, "{gap}{cell}{fill}")
            };
        }
    }
    lines.into_iter().map(|line| line.trim_end().to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prose_is_folded_between_words_and_flags_stay_whole() {
        let text = "  name it with --served-model-name, as https://host.example/v1/models lists it";
        let folded = Paint(Screen { color: false, width: Some(26) }).folded(text, 4);
        let lines: Vec<&str> = folded.lines().collect();
        let wanted = [
            "  name it with",
            "    --served-model-name,",
            "    as",
            "    https://host.example/v1/models",
            "    lists it",
        ];
        assert_eq!(lines, wanted);
        assert_eq!(Paint(Screen::from(false)).folded(text, 4), text);
    }
}
