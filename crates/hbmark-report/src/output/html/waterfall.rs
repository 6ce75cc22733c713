//! The ladder of a cell as a waterfall: where the time of a step goes, floor by floor and engine by engine.
//!
//! Enters: the ladders of a report, as computed. Leaves: a drawing each, with the story under it. What takes time away is drawn lighter.

use super::axis::{Axis, Measure};
use super::chart::{Size, canvas, fitted, label, text_width};
use super::figure::{Figure, Panel};
use super::node::{Node, el};
use super::palette::{Palette, phase_word};
use crate::output::kinds;
use crate::output::kinds::run::status_word;
use hbmark_core::result::{Ladder, Phase, Report, RungKind, Status};

/// Height of a rung with the gap below it, and of the line its name takes above it on a phone, where beside it there is no room.
const RUNG: f64 = 30.0;
const NAME: f64 = 17.0;
/// A drawing narrower than this is for a phone.
const NARROW: f64 = 400.0;
/// Drawings that are not folded away.
const OPEN: usize = 4;

#[must_use]
pub fn figure(report: &Report, palette: &Palette) -> Figure {
    let figure = Figure::new("ladder", "Where the time of a step goes");
    let mut order: Vec<usize> = (0..report.ladders.len()).collect();
    // Decode first: it is what the ladder is mostly read for.
    order.sort_by_key(|&i| report.ladders[i].phase == Phase::Prefill);
    let panels: Vec<Panel> = order.iter().filter_map(|&i| draw(&report.ladders[i], palette)).collect();
    if panels.is_empty() {
        return figure.absent("No cell of this result was measured, so there is no ladder.");
    }
    let all = kinds::all_ladders(report);
    let tables = order
        .iter()
        .filter_map(|&i| all.get(i))
        .map(|table| (table.title.clone().unwrap_or_default(), table.columns.clone()));
    Figure {
        caption: vec![
            "Each bar begins where the one above it ends; together they are the time of the slowest engine. Grey is what memory and \
             arithmetic take at their ceilings, colour what an engine adds."
                .into(),
        ],
        open_panels: OPEN,
        tables: tables.collect(),
        panels,
        ..figure
    }
}

fn draw(ladder: &Ladder, palette: &Palette) -> Option<Panel> {
    let mut levels = vec![0.0];
    for rung in &ladder.rungs {
        levels.push(levels[levels.len() - 1] + rung.step_ns);
    }
    let time = match ladder.phase {
        Phase::Decode => "TPOT",
        Phase::Prefill => "step",
    };
    let axis = Axis::from_zero(time, Measure::Time, levels.iter().copied())?;
    let size = |class, width: f64| {
        let height = 40.0 + rung_height(width) * ladder.rungs.len() as f64 + 40.0;
        Size { class, width, height }
    };
    let sizes = [size("wide", 470.0), size("narrow", 350.0)];
    let drawings = sizes.map(|size| at(size, ladder, &axis, &levels, palette)).to_vec();
    Some(Panel { drawings, half: true, closing: Some(ladder.story.clone()) })
}

fn rung_height(width: f64) -> f64 {
    if width < NARROW { RUNG + NAME } else { RUNG }
}

fn at(size: Size, ladder: &Ladder, axis: &Axis, levels: &[f64], palette: &Palette) -> Node {
    let title = format!("{}, batch {}, context {}", phase_word(ladder.phase), ladder.batch, ladder.context);
    let name = format!("ladder-{}-b{}-c{}", phase_word(ladder.phase), ladder.batch, ladder.context);
    let scale = ladder.scale();
    let names: Vec<String> = (0..ladder.rungs.len()).map(|i| rung_name(ladder, i)).collect();
    let (stacked, rung_height) = (size.width < NARROW, rung_height(size.width));
    let widest = names.iter().map(|n| text_width(n)).fold(0.0, f64::max);
    let widest = if stacked { size.width } else { widest.min(size.width * 0.36) };
    let left = if stacked { 2.0 } else { widest + 10.0 };
    let (top, right) = (34.0, size.width - 12.0);
    let bottom = top + rung_height * ladder.rungs.len() as f64;
    let x = |value: f64| left + axis.place(value).unwrap_or(0.0) * (right - left);
    let mut drawing = canvas(size, &name, &title);
    for tick in axis.ticks(if stacked { 4 } else { 6 }) {
        let at = left + tick.place * (right - left);
        drawing = drawing
            .child(el("line").class("grid").at("x1", at).at("x2", at).at("y1", top - 6.0).at("y2", bottom))
            .child(label(at, bottom + 16.0, "tick middle", &tick.label));
    }
    for (i, rung) in ladder.rungs.iter().enumerate() {
        let above = top + rung_height * i as f64;
        let y = if stacked { above + NAME } else { above };
        let (from, to) = (x(levels[i].min(levels[i + 1])), x(levels[i].max(levels[i + 1])));
        let colour = match (&rung.engine, rung.kind) {
            (Some(engine), _) => palette.class(engine, rung.dtype),
            (None, RungKind::Datasheet) => "sheet".to_owned(),
            (None, _) => "floor".to_owned(),
        };
        let class = if rung.step_ns < 0.0 { format!("bar less {colour}") } else { format!("bar {colour}") };
        let hover = format!(
            "{}\nup to here {}\nadds {} ({:.1} %)",
            names[i],
            scale.show(rung.time_ns),
            scale.show(rung.step_ns),
            rung.share * 100.0
        );
        let bar = el("rect")
            .class(class)
            .at("x", from)
            .at("y", y)
            .at("width", (to - from).max(1.0))
            .at("height", RUNG - 8.0);
        let mark = el("g").class("mark").child(el("title").text(hover)).child(bar);
        let baseline = if stacked { above + 12.0 } else { y + 15.0 };
        drawing = drawing.child(label(0.0, baseline, "key", &fitted(&names[i], widest + 4.0))).child(mark);
        drawing = drawing.child(added(&scale.show(rung.step_ns), from, to, right, left, y + 15.0));
        if i + 1 < ladder.rungs.len() {
            let at = x(levels[i + 1]);
            let link = el("line")
                .class("link")
                .at("x1", at)
                .at("x2", at)
                .at("y1", y + RUNG - 8.0)
                .at("y2", above + rung_height);
            drawing = drawing.child(link);
        }
    }
    drawing
        .child(el("line").class("axis").at("x1", left).at("x2", left).at("y1", top - 6.0).at("y2", bottom))
        .child(label(right, bottom + 34.0, "axis-name end", &format!("time ({})", axis.label)))
}

/// What a bar adds, beside it where there is room, otherwise in it.
fn added(text: &str, from: f64, to: f64, right: f64, left: f64, y: f64) -> Node {
    let wide = text_width(text) + 8.0;
    if to + wide <= right + 8.0 {
        label(to + 5.0, y, "value", text)
    } else if from - wide >= left {
        label(from - 5.0, y, "value end", text)
    } else {
        label(to - 6.0, y, "value inside end", text)
    }
}

fn rung_name(ladder: &Ladder, index: usize) -> String {
    let rung = &ladder.rungs[index];
    let name = ladder.name(index);
    let dtype = rung.dtype.to_string();
    let name = if name.ends_with(&dtype) { name } else { format!("{name} {dtype}") };
    match rung.status {
        Status::Ok | Status::Predicted => name,
        status => format!("{name} ({})", status_word(status)),
    }
}
