//! A plot as data: charts of lines and marks over two axes, bars over one, and the values behind them as tables.
//!
//! Enters: what a kind of result shows. Leaves: plain data. How it looks is up to a format: a style is a name such as `c0` (the first
//! colour), `bad`, `dashed` or several of them, and no markup.

pub mod axis;

use super::document::Table;
use axis::Axis;

/// Drawings with a caption and the values behind them.
#[derive(Debug, Clone, PartialEq)]
pub struct Plot {
    pub drawings: Vec<Drawing>,
    /// Drawings after this many may be folded away.
    pub open: usize,
    pub caption: Vec<String>,
    pub tables: Vec<Table>,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Drawing {
    Chart(Chart),
    Bars(Bars),
}

/// Lines and marks over two axes. What lies off the axes is not drawn.
#[derive(Debug, Clone, PartialEq)]
pub struct Chart {
    /// For files that are saved: letters, digits and dashes.
    pub name: String,
    pub title: String,
    pub span: Span,
    pub x: Axis,
    pub y: Axis,
    pub lines: Vec<Line>,
    pub marks: Vec<Mark>,
    pub rules: Vec<Rule>,
    pub legend: Vec<Key>,
}

/// How much of the page's width a chart takes where there is room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Span {
    Full,
    Half,
    /// Full width, low: one of several below each other.
    Strip,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Line {
    pub style: String,
    pub points: Vec<(f64, f64)>,
    pub label: Option<(Label, String)>,
}

/// Where a line has its label.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Label {
    /// To the right of its end, outside the plot.
    Beyond,
    /// Above its end.
    Above,
    /// Above its beginning.
    Begin,
    /// Along its first segment.
    Along,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Mark {
    pub style: String,
    pub shape: Shape,
    pub x: f64,
    pub y: f64,
    /// Low and high end of its interval.
    pub spread: Option<(f64, f64)>,
    /// Shown when it is pointed at.
    pub hover: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    Circle,
    Square,
    Diamond,
    Cross,
    /// At least this.
    Triangle,
    /// A limit: a short level line.
    Limit,
}

/// A vertical reference line.
#[derive(Debug, Clone, PartialEq)]
pub struct Rule {
    pub x: f64,
    pub style: String,
    pub label: String,
}

/// One entry of the legend.
#[derive(Debug, Clone, PartialEq)]
pub struct Key {
    pub style: String,
    /// A line where there is no shape.
    pub shape: Option<Shape>,
    pub text: String,
}

/// Named bars below each other over one axis.
#[derive(Debug, Clone, PartialEq)]
pub struct Bars {
    pub name: String,
    pub title: String,
    pub axis: Axis,
    pub bars: Vec<Bar>,
    /// A line that sums them up.
    pub closing: Option<String>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Bar {
    pub name: String,
    pub style: String,
    pub from: f64,
    /// Below `from` where the bar takes away.
    pub to: f64,
    /// Written beside the bar.
    pub value: String,
    pub hover: String,
}

impl Plot {
    /// Drawings with their captions and tables, none folded away.
    pub fn new(drawings: Vec<Drawing>, caption: Vec<String>, tables: Vec<Table>) -> Self {
        Self { drawings, open: usize::MAX, caption, tables }
    }
}

impl Chart {
    /// A chart with nothing in it.
    pub fn new(name: impl Into<String>, title: impl Into<String>, span: Span, x: Axis, y: Axis) -> Self {
        Self {
            name: name.into(),
            title: title.into(),
            span,
            x,
            y,
            lines: Vec::new(),
            marks: Vec::new(),
            rules: Vec::new(),
            legend: Vec::new(),
        }
    }
}

impl Line {
    pub fn new(style: impl Into<String>, points: Vec<(f64, f64)>) -> Self {
        Self { style: style.into(), points, label: None }
    }
}

impl Mark {
    pub fn new(style: impl Into<String>, shape: Shape, (x, y): (f64, f64), hover: String) -> Self {
        Self { style: style.into(), shape, x, y, spread: None, hover }
    }
}

impl Key {
    pub fn line(style: impl Into<String>, text: impl Into<String>) -> Self {
        Self { style: style.into(), shape: None, text: text.into() }
    }

    pub fn mark(style: impl Into<String>, shape: Shape, text: impl Into<String>) -> Self {
        Self { shape: Some(shape), ..Self::line(style, text) }
    }
}
