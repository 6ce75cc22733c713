//! A chart as SVG.
//!
//! Enters: a [`Chart`]. Leaves: one drawing per [`Size`], so that a phone gets type of the same size as a desk. Styles are classes of the
//! page's style sheet.

use super::node::{Node, el, pixel};
use crate::output::plot::axis::Tick;
use crate::output::plot::{Chart, Label, Mark, Shape, Span};
use hbmark_core::units::whole_count;

/// Height of a line of small type.
const LINE: f64 = 17.0;
/// Mean width of a character of 12 px type in the fonts of the style sheet, on the wide side.
const LETTER: f64 = 6.4;

/// How large a drawing is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Size {
    pub class: &'static str,
    pub width: f64,
    pub height: f64,
}

/// The drawing for a desk and the one for a phone.
fn sizes(span: Span) -> [Size; 2] {
    let (width, height, narrow) = match span {
        Span::Full => (960.0, 400.0, 330.0),
        Span::Half => (470.0, 300.0, 280.0),
        Span::Strip => (960.0, 190.0, 190.0),
    };
    [Size { class: "wide", width, height }, Size { class: "narrow", width: 350.0, height: narrow }]
}

/// The box inside the axes.
#[derive(Debug, Clone, Copy)]
struct Area {
    left: f64,
    top: f64,
    width: f64,
    height: f64,
}

impl Area {
    fn right(self) -> f64 {
        self.left + self.width
    }
    fn bottom(self) -> f64 {
        self.top + self.height
    }
    fn x(self, place: f64) -> f64 {
        self.left + place * self.width
    }
    fn y(self, place: f64) -> f64 {
        self.bottom() - place * self.height
    }
}

/// How wide a text will be, roughly.
pub fn text_width(text: &str) -> f64 {
    text.chars().count() as f64 * LETTER
}

/// A text cut to a width, with an ellipsis where something is missing.
pub fn fitted(text: &str, width: f64) -> String {
    let letters = whole_count((width / LETTER).clamp(4.0, 400.0));
    if text.chars().count() <= letters {
        return text.to_owned();
    }
    text.chars().take(letters - 1).chain(['…']).collect()
}

/// The outermost element of a drawing: its size, its accessible name, its title.
pub fn canvas(size: Size, name: &str, title: &str) -> Node {
    let view = format!("0 0 {} {}", pixel(size.width), pixel(size.height));
    el("svg")
        .attr("xmlns", "http://www.w3.org/2000/svg")
        .class(size.class)
        .attr("viewBox", view)
        .attr("role", "img")
        .attr("aria-label", title)
        .attr("data-name", name)
        .child(label(0.0, 15.0, "title", &fitted(title, size.width * 0.92)))
}

/// A text at a place; classes decide its anchor and colour.
pub fn label(x: f64, y: f64, class: &str, text: &str) -> Node {
    el("text").class(class).at("x", x).at("y", y).text(text)
}

fn segment(class: &str, from: (f64, f64), to: (f64, f64)) -> Node {
    el("line").class(class).at("x1", from.0).at("y1", from.1).at("x2", to.0).at("y2", to.1)
}

fn shape(shape: Shape, class: &str, x: f64, y: f64) -> Node {
    match shape {
        Shape::Circle => {
            el("circle").class(format!("point {class}")).at("cx", x).at("cy", y).attr("r", "4.5")
        }
        Shape::Square => el("rect")
            .class(format!("point {class}"))
            .at("x", x - 4.0)
            .at("y", y - 4.0)
            .attr("width", "8")
            .attr("height", "8"),
        Shape::Diamond => {
            let (left, right) = (pixel(x - 5.5), pixel(x + 5.5));
            let (top, bottom) = (pixel(y - 5.5), pixel(y + 5.5));
            let (x, y) = (pixel(x), pixel(y));
            let path = format!("M{left} {y}L{x} {top}L{right} {y}L{x} {bottom}Z");
            el("path").class(format!("point {class}")).attr("d", path)
        }
        Shape::Cross => {
            let (left, right) = (pixel(x - 4.0), pixel(x + 4.0));
            let (top, bottom) = (pixel(y - 4.0), pixel(y + 4.0));
            let path = format!("M{left} {top}L{right} {bottom}M{left} {bottom}L{right} {top}");
            el("path").class(format!("cross {class}")).attr("d", path)
        }
        Shape::Triangle => {
            let path = format!(
                "M{} {}L{} {}L{} {}Z",
                pixel(x - 5.0),
                pixel(y + 4.0),
                pixel(x + 5.0),
                pixel(y + 4.0),
                pixel(x),
                pixel(y - 5.0)
            );
            el("path").class(format!("point {class}")).attr("d", path)
        }
        Shape::Limit => {
            let path = format!("M{} {}H{}", pixel(x - 9.0), pixel(y), pixel(x + 9.0));
            el("path").class(format!("cross {class}")).attr("d", path)
        }
    }
}

/// Moves labels apart that would cover each other, keeping their order: each entry is a wanted height.
fn apart(mut wanted: Vec<f64>, low: f64, high: f64) -> Vec<f64> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by(|&a, &b| wanted[a].total_cmp(&wanted[b]));
    let gap = LINE - 3.0;
    let mut last = low - gap;
    for &i in &order {
        wanted[i] = wanted[i].max(last + gap);
        last = wanted[i];
    }
    let mut next = high + gap;
    for &i in order.iter().rev() {
        wanted[i] = wanted[i].min(next - gap);
        next = wanted[i];
    }
    wanted
}

/// Half of a mark, with some air.
const MARK: f64 = 7.0;
/// Height of a label's letters over its baseline.
const TALL: f64 = 10.0;

/// The baseline of a level line's label that begins at a place: above the line, or below it where there are marks above.
fn beside((x, y): (f64, f64), width: f64, marks: &[(f64, f64)]) -> f64 {
    let covered = |baseline: f64| {
        let across = |at: f64| (x - MARK..=x + width + MARK).contains(&at);
        let down = |at: f64| (baseline - TALL - MARK..=baseline + MARK).contains(&at);
        marks.iter().any(|&(mark_x, mark_y)| across(mark_x) && down(mark_y))
    };
    let (above, below) = (y - 5.0, y + TALL + 4.0);
    if covered(above) && !covered(below) { below } else { above }
}

/// The middle of a label along a line: as near to the line's own middle as marks on that side allow.
fn along(from: (f64, f64), to: (f64, f64), width: f64, marks: &[(f64, f64)]) -> (f64, f64) {
    let (dx, dy) = (to.0 - from.0, to.1 - from.1);
    let length = (dx * dx + dy * dy).sqrt().max(f64::MIN_POSITIVE);
    let at = |share: f64| (from.0 + dx * share, from.1 + dy * share);
    let free = |share: &f64| {
        let middle = at(*share);
        // Off the line, positive above it, and on along it. What is on the line itself is below the label.
        marks.iter().all(|(x, y)| {
            let (right, down) = (x - middle.0, y - middle.1);
            let (on, above) = ((right * dx + down * dy) / length, (right * dy - down * dx) / length);
            on.abs() > width / 2.0 + MARK || !(1.0..=TALL + 6.0 + MARK).contains(&above)
        })
    };
    let room = (1.0 - width / length).max(0.0) / 2.0;
    let shares = [0.0, -0.2, 0.2, -0.4, 0.4, -0.6, 0.6, -0.8, 0.8, -1.0, 1.0].map(|part| 0.5 + part * room);
    at(shares.into_iter().find(free).unwrap_or(0.5))
}

impl Chart {
    /// Both drawings.
    pub fn draw(&self) -> Vec<Node> {
        sizes(self.span).into_iter().map(|size| self.draw_at(size)).collect()
    }

    fn draw_at(&self, size: Size) -> Node {
        let (legend, legend_height) = self.legend(size.width);
        // Title, legend, the y axis's name.
        let named = if self.y.label.is_empty() { 4.0 } else { LINE };
        let top = 24.0 + legend_height + named + 4.0;
        let rows = whole_count(((size.height - top - 44.0) / 45.0).clamp(3.0, 9.0));
        let y_ticks = self.y.ticks(rows);
        let widest = y_ticks.iter().map(|t| text_width(&t.label)).fold(0.0, f64::max);
        let beyond = self.lines.iter().filter_map(|line| match &line.label {
            Some((Label::Beyond, text)) => Some(text_width(text) + 10.0),
            _ => None,
        });
        let (left, right) = (widest + 12.0, beyond.fold(14.0, f64::max));
        let area = Area { left, top, width: size.width - left - right, height: size.height - top - 44.0 };
        let mut drawing = canvas(size, &self.name, &self.title).children(legend);
        drawing = drawing.children(self.frame(area, &y_ticks));
        drawing = drawing.children(self.rules(area));
        let (drawn, above) = self.lines(area);
        // What is crossed out must be seen where points lie on each other, so crosses come last.
        let (crosses, points): (Vec<&Mark>, Vec<&Mark>) =
            self.marks.iter().partition(|mark| mark.shape == Shape::Cross);
        // Labels are drawn over marks, and beside them where there is room.
        drawing
            .children(drawn)
            .children(points.into_iter().chain(crosses).filter_map(|mark| self.mark(area, mark)))
            .children(above)
    }

    /// The legend below the title, and how high it is.
    fn legend(&self, width: f64) -> (Vec<Node>, f64) {
        let (mut nodes, mut x, mut row) = (Vec::new(), 0.0, 0.0);
        for key in &self.legend {
            let text = fitted(&key.text, width - 24.0);
            let wide = text_width(&text) + 34.0;
            if x > 0.0 && x + wide - 14.0 > width {
                (x, row) = (0.0, row + 1.0);
            }
            let y = 35.0 + row * LINE;
            nodes.push(match key.shape {
                Some(mark) => shape(mark, &key.style, x + 7.0, y - 4.0),
                None => segment(&format!("line {}", key.style), (x, y - 4.0), (x + 16.0, y - 4.0)),
            });
            nodes.push(label(x + 21.0, y, "key", &text));
            x += wide;
        }
        let rows = if self.legend.is_empty() { 0.0 } else { row + 1.0 };
        (nodes, rows * LINE + if rows > 0.0 { 4.0 } else { 0.0 })
    }

    fn frame(&self, area: Area, y_ticks: &[Tick]) -> Vec<Node> {
        let mut nodes = vec![label(0.0, area.top - 9.0, "axis-name", &self.y.label)];
        for tick in y_ticks {
            let y = area.y(tick.place);
            nodes.push(segment("grid", (area.left, y), (area.right(), y)));
            nodes.push(label(area.left - 6.0, y + 4.0, "tick end", &tick.label));
        }
        // As many ticks as their labels leave room for, with some air between them.
        let widest = self.x.ticks(12).iter().map(|t| text_width(&t.label)).fold(20.0, f64::max);
        let columns = whole_count((area.width / (widest * 1.4)).clamp(3.0, 12.0));
        for tick in self.x.ticks(columns) {
            let x = area.x(tick.place);
            nodes.push(segment("grid", (x, area.top), (x, area.bottom())));
            // A label at the edge would be outside the drawing.
            let half = text_width(&tick.label) / 2.0;
            let x = x.min(area.right() + 14.0 - half);
            nodes.push(label(x, area.bottom() + 17.0, "tick middle", &tick.label));
        }
        nodes.push(segment("axis", (area.left, area.bottom()), (area.right(), area.bottom())));
        nodes.push(segment("axis", (area.left, area.top), (area.left, area.bottom())));
        nodes.push(label(area.right(), area.bottom() + 36.0, "axis-name end", &self.x.label));
        nodes
    }

    fn rules(&self, area: Area) -> Vec<Node> {
        let mut nodes = Vec::new();
        let known = self.rules.iter().filter_map(|rule| Some((self.x.place(rule.x)?, rule)));
        let mut row = 0.0;
        for (place, rule) in known {
            let x = area.x(place);
            nodes.push(segment(&format!("rule {}", rule.style), (x, area.top), (x, area.bottom())));
            if rule.label.is_empty() {
                continue;
            }
            let (class, at) = if place > 0.5 { ("key end", x - 5.0) } else { ("key", x + 5.0) };
            nodes.push(label(
                at,
                area.top + 12.0 + row * (LINE - 3.0),
                class,
                &fitted(&rule.label, area.width),
            ));
            row += 1.0;
        }
        nodes
    }

    /// The lines, and apart from them their names.
    fn lines(&self, area: Area) -> (Vec<Node>, Vec<Node>) {
        let (mut nodes, mut names) = (Vec::new(), Vec::new());
        let marks: Vec<(f64, f64)> = self.marks.iter().filter_map(|mark| self.place(area, mark)).collect();
        // Labels at the ends of lines: text, and the place it belongs to.
        let mut ends: Vec<(&str, Label, (f64, f64))> = Vec::new();
        for line in &self.lines {
            let places: Vec<(f64, f64)> = line
                .points
                .iter()
                .filter_map(|&(x, y)| Some((area.x(self.x.place(x)?), area.y(self.y.place(y)?))))
                .collect();
            let [first, second, ..] = places.as_slice() else { continue };
            let drawn: Vec<String> =
                places.iter().map(|(x, y)| format!("{},{}", pixel(*x), pixel(*y))).collect();
            nodes.push(el("polyline").class(format!("line {}", line.style)).attr("points", drawn.join(" ")));
            match &line.label {
                Some((Label::Along, text)) => {
                    let (x, y) = along(*first, *second, text_width(text), &marks);
                    let angle = (second.1 - first.1).atan2(second.0 - first.0).to_degrees();
                    let turn = format!("rotate({} {} {})", pixel(angle), pixel(x), pixel(y));
                    names.push(label(x, y - 6.0, "key middle", text).attr("transform", turn));
                }
                Some((side, text)) => {
                    let end = if *side == Label::Begin { first } else { places.last().unwrap_or(first) };
                    ends.push((text, *side, *end));
                }
                None => {}
            }
        }
        let heights = ends.iter().map(|(text, side, (x, y))| match side {
            Label::Beyond => y + 4.0,
            Label::Begin => beside((x + 4.0, *y), text_width(text), &marks),
            _ => beside((x - 2.0 - text_width(text), *y), text_width(text), &marks),
        });
        let heights = apart(heights.collect(), area.top + 4.0, area.bottom());
        for ((text, side, (x, _)), y) in ends.into_iter().zip(heights) {
            names.push(match side {
                Label::Beyond => label(x + 8.0, y, "key", text),
                Label::Begin => label(x + 4.0, y, "key", text),
                _ => label(x - 2.0, y, "key end", text),
            });
        }
        (nodes, names)
    }

    /// Where a mark is drawn, if it is on both axes.
    fn place(&self, area: Area, mark: &Mark) -> Option<(f64, f64)> {
        Some((area.x(self.x.place(mark.x)?), area.y(self.y.place(mark.y)?)))
    }

    fn mark(&self, area: Area, mark: &Mark) -> Option<Node> {
        let (x, y) = self.place(area, mark)?;
        let mut drawn = el("g").class("mark").child(el("title").text(mark.hover.as_str()));
        if let Some((low, high)) = mark.spread
            && let (Some(low), Some(high)) = (self.y.place(low), self.y.place(high))
        {
            let class = format!("whisker {}", mark.style);
            drawn = drawn.child(segment(&class, (x, area.y(low)), (x, area.y(high))));
        }
        Some(drawn.child(shape(mark.shape, &mark.style, x, y)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::plot::Line;
    use crate::output::plot::axis::{Axis, Measure};

    fn chart() -> Chart {
        let x = Axis::from_zero("context", Measure::Count, [100.0]).unwrap();
        let y = Axis::from_zero("TPOT", Measure::Time, [5e6]).unwrap();
        let line = Line::new("c0", vec![(0.0, 1e6), (100.0, 5e6)]);
        let mark = Mark::new("c0", Shape::Circle, (50.0, 2e6), "2.00 ms".into());
        Chart {
            lines: vec![Line { label: Some((Label::Beyond, "batch 1".into())), ..line }],
            marks: vec![Mark { spread: Some((1.9e6, 2.1e6)), ..mark }],
            ..Chart::new("x", "a title", Span::Full, x, y)
        }
    }

    #[test]
    fn a_chart_is_drawn_for_a_desk_and_for_a_phone() {
        let drawn: Vec<String> = chart().draw().iter().map(Node::render).collect();
        assert!(drawn[0].contains("viewBox=\"0 0 960 400\"") && drawn[1].contains("viewBox=\"0 0 350 330\""));
        for one in drawn {
            assert!(
                one.contains("<title>2.00 ms</title>") && one.contains("batch 1") && one.contains("4 ms")
            );
        }
    }

    #[test]
    fn points_off_the_axes_are_left_out() {
        let mut off = chart();
        off.marks[0].x = 1e9;
        off.marks.push(Mark { y: f64::NAN, ..off.marks[0].clone() });
        assert!(off.draw().iter().all(|d| !d.render().contains("mark")));
    }

    #[test]
    fn a_cross_is_drawn_over_the_points_at_its_place() {
        let mut crossed = chart();
        let cross = Mark { shape: Shape::Cross, style: "bad".into(), ..crossed.marks[0].clone() };
        crossed.marks.insert(0, cross);
        for drawn in crossed.draw() {
            let drawn = drawn.render();
            assert!(drawn.find("point c0") < drawn.find("cross bad"), "{drawn}");
        }
    }

    #[test]
    fn labels_do_not_cover_each_other_and_keep_their_order() {
        assert_eq!(apart(vec![50.0, 48.0, 200.0], 0.0, 190.0), [62.0, 48.0, 190.0]);
    }

    #[test]
    fn a_name_gives_way_to_a_mark_that_stands_where_it_would() {
        assert!((beside((100.0, 50.0), 60.0, &[]) - 45.0).abs() < 1e-9);
        assert!(
            (beside((100.0, 50.0), 60.0, &[(130.0, 42.0)]) - 64.0).abs() < 1e-9,
            "below, where a mark is above"
        );
        assert!(
            (beside((100.0, 50.0), 60.0, &[(130.0, 42.0), (110.0, 60.0)]) - 45.0).abs() < 1e-9,
            "no side is free"
        );
        // Up to the right by 45 degrees: a mark just above the middle.
        let (from, to) = ((0.0, 400.0), (400.0, 0.0));
        assert_eq!(along(from, to, 100.0, &[]), (200.0, 200.0));
        let (x, y) = along(from, to, 100.0, &[(195.0, 195.0)]);
        assert!(
            (x - 200.0).powi(2) + (y - 200.0).powi(2) > 57.0 * 57.0 && (x + y - 400.0).abs() < 1e-9,
            "{x} {y}"
        );
        assert_eq!(
            along(from, to, 100.0, &[(210.0, 215.0)]),
            (200.0, 200.0),
            "what is below the line is not in the way"
        );
    }

    #[test]
    fn long_texts_are_cut() {
        assert_eq!(fitted("abcdefghijklmnop", 64.0), "abcdefghi…");
    }
}
