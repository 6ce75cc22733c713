//! The content of a result before a format draws it: headings, lines, lists, names with values, tables of typed columns, and plots.
//!
//! Enters: text and numbers from the kinds of results. Leaves: plain data. It imports no format and no kind of result; every format draws
//! every document, so a format is one file and a kind of result another.

use super::metrics::Unit;
use super::plot::Plot;
use super::text;
use hbmark_core::result::Spread;
use hbmark_core::result::serving::Quantity;
use std::mem::discriminant;

/// All of it, in the order of reading.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Document {
    pub title: String,
    /// Stands alone, so its headings begin at the top; else it is put into a page of others.
    pub page: bool,
    pub blocks: Vec<Block>,
    /// Raw numbers for a spreadsheet; without them it gets the tables.
    pub sheet: Option<Vec<Column>>,
}

/// A part of a document.
#[derive(Debug, Clone, PartialEq)]
pub enum Block {
    Heading {
        title: String,
        /// For links into a page.
        anchor: Option<&'static str>,
    },
    Lines(Vec<Line>),
    /// What the reader wants to know first.
    Figures(Vec<Figure>),
    List(List),
    KeyValues(Vec<(String, String)>),
    Table(Table),
    /// Drawn where there are drawings; elsewhere its tables.
    Plot(Plot),
    /// Folded away where that is possible.
    Fold {
        title: String,
        blocks: Vec<Block>,
    },
    /// To be copied as it is.
    Shell(String),
}

impl Block {
    /// Why there is nothing to show.
    pub fn absent(why: impl Into<String>) -> Self {
        Self::Lines(vec![Line::Said(Tone::Faint, why.into())])
    }
}

/// Items, and what they are about where there are several lists below a heading.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct List {
    pub title: Option<String>,
    pub tone: Tone,
    pub items: Vec<String>,
}

/// One line.
#[derive(Debug, Clone, PartialEq)]
pub enum Line {
    Said(Tone, String),
    /// The command behind the result, for readers of a saved report.
    Command(String),
}

impl Line {
    pub fn plain(text: impl Into<String>) -> Self {
        Self::Said(Tone::Plain, text.into())
    }
}

/// A number, or a verdict, to be seen at once.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Figure {
    pub name: String,
    pub value: String,
    /// What it belongs to, or its range.
    pub note: String,
    pub tone: Tone,
}

impl Figure {
    /// In one line.
    pub fn text(&self) -> String {
        let note = if self.note.is_empty() { String::new() } else { format!(" ({})", self.note) };
        format!("{}: {}{note}", self.name, self.value)
    }
}

/// How loud something is where there is colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Tone {
    #[default]
    Plain,
    Faint,
    Good,
    Warning,
    Bad,
}

/// Columns of one length.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Table {
    /// For one of several tables below a heading.
    pub title: Option<String>,
    pub columns: Vec<Column>,
    /// One a row, or none at all.
    pub tones: Vec<Tone>,
    /// A line that sums it up.
    pub closing: Option<String>,
}

impl From<Vec<Column>> for Table {
    fn from(columns: Vec<Column>) -> Self {
        Self { columns, ..Self::default() }
    }
}

impl Table {
    pub fn titled(title: impl Into<String>, columns: Vec<Column>) -> Self {
        Self { title: Some(title.into()), ..columns.into() }
    }
}

/// One column.
#[derive(Debug, Clone, PartialEq)]
pub struct Column {
    pub title: String,
    pub cells: Cells,
    /// Where there is little room, shown only when asked for.
    pub minor: bool,
    /// Says which row it is: shown beside every part of a table that is too wide, and shortened before it takes the room of numbers.
    pub key: bool,
}

/// What a column holds.
#[derive(Debug, Clone, PartialEq)]
pub enum Cells {
    Words(Vec<String>),
    /// Formatted numbers, aligned to the right.
    Numbers(Vec<String>),
    /// Drawn with characters, for fonts of one width.
    Bars(Vec<String>),
    Measured {
        unit: Unit,
        /// In one scale and with one number of digits; otherwise each in its own.
        alike: bool,
        values: Vec<Value>,
    },
}

/// A number as far as it is known.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value {
    Null,
    Finite(f64),
    Infinite,
    /// A median with its range, which nothing should rest on.
    Doubtful(Spread),
    /// A value of a disturbed machine, which nothing should rest on.
    Disturbed(f64),
    /// Why there is none.
    Word(&'static str),
}

impl From<f64> for Value {
    fn from(value: f64) -> Self {
        if value.is_infinite() { Self::Infinite } else { Self::Finite(value) }
    }
}

impl From<Quantity> for Value {
    fn from(quantity: Quantity) -> Self {
        quantity.value().into()
    }
}

impl<T: Into<Self>> From<Option<T>> for Value {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Null, Into::into)
    }
}

/// A column of text.
pub fn words(title: impl Into<String>, cells: impl IntoIterator<Item = String>) -> Column {
    Column { title: title.into(), cells: Cells::Words(cells.into_iter().collect()), minor: false, key: false }
}

/// A column of formatted numbers.
pub fn numbers(title: impl Into<String>, cells: impl IntoIterator<Item = String>) -> Column {
    Column {
        title: title.into(),
        cells: Cells::Numbers(cells.into_iter().collect()),
        minor: false,
        key: false,
    }
}

/// A column of values in one scale.
pub fn measured<V: Into<Value>>(
    title: impl Into<String>,
    unit: Unit,
    values: impl IntoIterator<Item = V>,
) -> Column {
    let values = values.into_iter().map(Into::into).collect();
    Column {
        title: title.into(),
        cells: Cells::Measured { unit, alike: true, values },
        minor: false,
        key: false,
    }
}

impl Cells {
    /// So many cells of this kind without a value.
    pub fn empty(&self, rows: usize) -> Self {
        match self {
            Self::Words(_) => Self::Words(vec![String::new(); rows]),
            Self::Numbers(_) => Self::Numbers(vec![String::new(); rows]),
            Self::Bars(_) => Self::Bars(vec![String::new(); rows]),
            Self::Measured { unit, alike, .. } => {
                Self::Measured { unit: *unit, alike: *alike, values: vec![Value::Null; rows] }
            }
        }
    }

    /// Whether both hold the same kind of cells.
    pub fn alike(&self, other: &Self) -> bool {
        discriminant(self) == discriminant(other)
    }

    /// Adds cells of the same kind.
    ///
    /// # Panics
    /// Given cells of another kind.
    pub fn extend(&mut self, more: Self) {
        match (self, more) {
            (Self::Words(cells), Self::Words(more))
            | (Self::Numbers(cells), Self::Numbers(more))
            | (Self::Bars(cells), Self::Bars(more)) => cells.extend(more),
            (Self::Measured { values, .. }, Self::Measured { values: more, .. }) => values.extend(more),
            (_, other) => panic!("a column was given cells of another kind: {other:?}"),
        }
    }
}

impl Column {
    /// The same with the times of some rows in brackets.
    pub fn in_brackets(mut self, rows: &[bool]) -> Self {
        if let Cells::Measured { unit: Unit::Nanoseconds, values, .. } = &mut self.cells {
            for (value, _) in values.iter_mut().zip(rows).filter(|(_, disturbed)| **disturbed) {
                if let Value::Finite(time) = *value {
                    *value = Value::Disturbed(time);
                }
            }
        }
        self
    }

    /// The same with each value in its own scale.
    pub fn each_alone(mut self) -> Self {
        if let Cells::Measured { alike, .. } = &mut self.cells {
            *alike = false;
        }
        self
    }

    /// The same, left out where there is little room.
    pub fn minor(self, minor: bool) -> Self {
        Self { minor, ..self }
    }

    /// The same, as one that says which row it is.
    pub fn key(self) -> Self {
        Self { key: true, ..self }
    }

    /// The title of raw numbers: with the unit where they have one.
    pub fn title_with_unit(&self) -> String {
        match self.cells {
            Cells::Measured { unit, .. } => format!("{}{}", self.title, unit.suffix()),
            _ => self.title.clone(),
        }
    }

    /// Whether it is aligned to the right.
    pub fn right(&self) -> bool {
        matches!(self.cells, Cells::Numbers(_) | Cells::Measured { .. })
    }

    pub fn is_drawing(&self) -> bool {
        matches!(self.cells, Cells::Bars(_))
    }

    /// The cells for a reader.
    pub fn shown(&self) -> Vec<String> {
        match &self.cells {
            Cells::Words(cells) | Cells::Numbers(cells) | Cells::Bars(cells) => cells.clone(),
            Cells::Measured { unit, alike: true, values } => text::column(*unit, values),
            Cells::Measured { unit, alike: false, values } => {
                values.iter().map(|value| text::alone(*unit, *value)).collect()
            }
        }
    }

    /// Whether no row has anything to show.
    pub fn is_empty(&self) -> bool {
        match &self.cells {
            Cells::Measured { values, .. } => values.iter().all(|value| *value == Value::Null),
            Cells::Words(cells) | Cells::Numbers(cells) | Cells::Bars(cells) => {
                cells.iter().all(|cell| cell == "-")
            }
        }
    }
}

/// Takes out the columns that hold one value in every row and that `may_go`; leaves their titles and values, and the other columns.
pub fn split_constants(
    columns: Vec<Column>,
    may_go: impl Fn(&Column) -> bool,
) -> (Vec<(String, String)>, Vec<Column>) {
    let same = |column: &Column| column.shown().windows(2).all(|pair| pair[0] == pair[1]);
    let (constant, varying): (Vec<Column>, Vec<Column>) =
        columns.into_iter().partition(|column| same(column) && may_go(column));
    let known = constant.into_iter().filter(|column| !column.is_empty());
    (known.filter_map(|column| Some((column.title.clone(), column.shown().pop()?))).collect(), varying)
}

/// Each line once, with the names of all the things it belongs to.
pub fn grouped<'a>(lines: impl IntoIterator<Item = (&'a str, Vec<String>)>) -> Vec<(String, Vec<&'a str>)> {
    let mut groups: Vec<(String, Vec<&str>)> = Vec::new();
    for (name, line) in lines.into_iter().flat_map(|(name, lines)| lines.into_iter().map(move |l| (name, l)))
    {
        match groups.iter_mut().find(|(known, _)| *known == line) {
            Some((_, names)) => names.push(name),
            None => groups.push((line, vec![name])),
        }
    }
    groups
}

/// Titles and values in one line.
pub fn facts(pairs: &[(String, String)]) -> String {
    let facts: Vec<String> = pairs.iter().map(|(title, value)| format!("{title} {value}")).collect();
    facts.join(" · ")
}

impl Document {
    pub fn new(title: impl Into<String>) -> Self {
        Self { title: title.into(), ..Self::default() }
    }

    pub fn heading(&mut self, title: impl Into<String>) {
        self.blocks.push(Block::Heading { title: title.into(), anchor: None });
    }

    /// A heading that can be linked to.
    pub fn anchored(&mut self, anchor: &'static str, title: impl Into<String>) {
        self.blocks.push(Block::Heading { title: title.into(), anchor: Some(anchor) });
    }

    /// Lines; nothing where there are none.
    pub fn lines(&mut self, lines: impl IntoIterator<Item = Line>) {
        let lines: Vec<Line> = lines.into_iter().collect();
        if !lines.is_empty() {
            self.blocks.push(Block::Lines(lines));
        }
    }

    /// Figures; nothing where there are none.
    pub fn figures(&mut self, figures: Vec<Figure>) {
        if !figures.is_empty() {
            self.blocks.push(Block::Figures(figures));
        }
    }

    /// A list; nothing where it is empty.
    pub fn list(&mut self, items: impl IntoIterator<Item = String>) {
        self.push_list(List { items: items.into_iter().collect(), ..List::default() });
    }

    /// A list with a title of its own; neither where it is empty.
    pub fn titled_list(&mut self, title: &str, tone: Tone, items: impl IntoIterator<Item = String>) {
        self.push_list(List { title: Some(title.to_owned()), tone, items: items.into_iter().collect() });
    }

    fn push_list(&mut self, list: List) {
        if !list.items.is_empty() {
            self.blocks.push(Block::List(list));
        }
    }

    /// A list under a heading; neither where it is empty.
    pub fn section(&mut self, title: &str, items: impl IntoIterator<Item = String>) {
        let mut items = items.into_iter().peekable();
        if items.peek().is_some() {
            self.heading(title);
            self.list(items);
        }
    }

    pub fn table(&mut self, columns: Vec<Column>) {
        self.blocks.push(Block::Table(columns.into()));
    }
}
