//! Bars as SVG, each beginning where its data says.
//!
//! Enters: [`Bars`]. Leaves: a drawing for a desk, names beside the bars, and one for a phone, names above them.

use super::chart::{Size, canvas, fitted, label, text_width};
use super::node::{Node, el};
use crate::output::plot::Bars;

/// Height of a bar with the gap below it, of the gap, and of the line a name takes above its bar.
const ROW: f64 = 30.0;
const GAP: f64 = 8.0;
const NAME: f64 = 17.0;

/// Both drawings.
pub fn draw(bars: &Bars) -> Vec<Node> {
    [("wide", 470.0), ("narrow", 350.0)].map(|(class, width)| draw_at(bars, class, width)).to_vec()
}

fn draw_at(bars: &Bars, class: &'static str, width: f64) -> Node {
    let stacked = class == "narrow";
    let name_height = if stacked { NAME } else { 0.0 };
    let row = ROW + name_height;
    let widest = bars.bars.iter().map(|bar| text_width(&bar.name)).fold(0.0, f64::max).min(width * 0.36);
    let (name_width, left) = if stacked { (width, 2.0) } else { (widest, widest + 10.0) };
    let (top, right) = (34.0, width - 12.0);
    let bottom = top + row * bars.bars.len() as f64;
    let x = |value: f64| left + bars.axis.place(value).unwrap_or(0.0) * (right - left);
    let vertical = |class: &'static str, x: f64, from: f64, to: f64| {
        el("line").class(class).at("x1", x).at("x2", x).at("y1", from).at("y2", to)
    };
    let mut drawing = canvas(Size { class, width, height: bottom + 40.0 }, &bars.name, &bars.title);
    for tick in bars.axis.ticks(if stacked { 4 } else { 6 }) {
        let at = left + tick.place * (right - left);
        drawing = drawing.child(vertical("grid", at, top - 6.0, bottom)).child(label(
            at,
            bottom + 16.0,
            "tick middle",
            &tick.label,
        ));
    }
    for (i, bar) in bars.bars.iter().enumerate() {
        let above = top + row * i as f64;
        let y = above + name_height;
        let (from, to) = (x(bar.from.min(bar.to)), x(bar.from.max(bar.to)));
        let less = if bar.to < bar.from { "less " } else { "" };
        let drawn = el("rect")
            .class(format!("bar {less}{}", bar.style))
            .at("x", from)
            .at("y", y)
            .at("width", (to - from).max(1.0))
            .at("height", ROW - GAP);
        let baseline = if stacked { above + 12.0 } else { y + 15.0 };
        drawing = drawing
            .child(label(0.0, baseline, "key", &fitted(&bar.name, name_width + 4.0)))
            .child(el("g").class("mark").child(el("title").text(bar.hover.as_str())).child(drawn))
            .child(value(&bar.value, from, to, left, right, y + 15.0));
        // The next bar begins where this one ends.
        if bars.bars.get(i + 1).is_some_and(|next| next.from.total_cmp(&bar.to).is_eq()) {
            drawing = drawing.child(vertical("link", x(bar.to), y + ROW - GAP, above + row));
        }
    }
    drawing.child(vertical("axis", left, top - 6.0, bottom)).child(label(
        right,
        bottom + 34.0,
        "axis-name end",
        &bars.axis.label,
    ))
}

/// A bar's value beside it where there is room, otherwise in it.
fn value(text: &str, from: f64, to: f64, left: f64, right: f64, y: f64) -> Node {
    let wide = text_width(text) + 8.0;
    if to + wide <= right + 8.0 {
        label(to + 5.0, y, "value", text)
    } else if from - wide >= left {
        label(from - 5.0, y, "value end", text)
    } else {
        label(to - 6.0, y, "value inside end", text)
    }
}
