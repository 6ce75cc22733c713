//! Named times as bars under each other: where the loop's time went, and what a cold start waited for.
//!
//! Enters: names and times. Leaves: a drawing for a desk and one for a phone, bars over one time axis.

use super::axis::{Axis, Measure};
use super::chart::{Size, canvas, fitted, label, text_width};
use super::figure::{Figure, Panel, numbers, words};
use super::node::{Node, el};
use hbmark_core::input::plain;
use hbmark_core::result::serving::{Breakdown, ColdStart, Point};

/// Height of a bar with the gap below it.
const BAR: f64 = 26.0;

struct Bar {
    name: String,
    ns: f64,
    /// Beside the bar.
    says: String,
    hover: String,
}

/// Where the loop's time went, point by point.
#[must_use]
pub fn loop_time(points: &[&Point]) -> Figure {
    let figure = Figure::new("breakdown", "Where the time of the loop goes");
    let known: Vec<(&Point, &Breakdown)> =
        points.iter().filter_map(|p| Some((*p, &p.result.as_ref()?.breakdown))).collect();
    let panels: Vec<Panel> =
        known.iter().filter_map(|(point, b)| panel("breakdown", &plain(&point.label), &parts(b))).collect();
    if panels.is_empty() {
        return figure.absent("No point of load was run, so no time was spent.");
    }
    let tables = known.iter().map(|(point, b)| {
        let per_step = |ns: f64| Measure::Time.show(ns / b.steps.max(1) as f64);
        let shown = named(b);
        let columns = vec![
            words("part", shown.iter().map(|(name, _)| (*name).to_owned())),
            numbers("time", shown.iter().map(|(_, ns)| Measure::Time.show(*ns))),
            numbers("share", shown.iter().map(|(_, ns)| Measure::Share.show(ns / b.wall_ns.max(1.0)))),
            numbers("per step", shown.iter().map(|(_, ns)| per_step(*ns))),
        ];
        (plain(&point.label), columns)
    });
    Figure {
        caption: vec![
            "Over the whole run, warm-up included. Device is the step itself, idle is waiting for arrivals; the rest is the host's work, \
             which no request is served in."
                .into(),
        ],
        tables: tables.collect(),
        panels,
        open_panels: 4,
        ..figure
    }
}

fn named(b: &Breakdown) -> Vec<(&'static str, f64)> {
    let all = [
        ("device", b.device_ns),
        ("enqueue", b.enqueue_ns),
        ("schedule", b.schedule_ns),
        ("build", b.build_ns),
        ("launch", b.launch_ns),
        ("sample", b.sample_ns),
        ("detokenize", b.detokenize_ns),
        ("other", b.other_ns),
        ("idle", b.idle_ns),
    ];
    all.into_iter().filter(|(_, ns)| ns.is_finite() && *ns > 0.0).collect()
}

fn parts(b: &Breakdown) -> Vec<Bar> {
    let bar = |(name, ns): (&str, f64)| {
        let share = Measure::Share.show(ns / b.wall_ns.max(1.0));
        let step = Measure::Time.show(ns / b.steps.max(1) as f64);
        let hover = format!(
            "{name}\n{} of {} ({share})\n{step} per step",
            Measure::Time.show(ns),
            Measure::Time.show(b.wall_ns)
        );
        Bar { name: name.to_owned(), ns, says: share, hover }
    };
    named(b).into_iter().map(bar).collect()
}

/// The phases of a cold start.
#[must_use]
pub fn cold(cold: &ColdStart) -> Figure {
    let figure = Figure::new("cold", "From launch to first token");
    let bars: Vec<Bar> = cold
        .phases
        .iter()
        .chain([&cold.to_first_token])
        .map(|phase| Bar {
            name: plain(&phase.name),
            ns: phase.median_ns,
            says: Measure::Time.show(phase.median_ns),
            hover: format!(
                "{}\nmedian {}\n{} to {}, first launch {}",
                plain(&phase.name),
                Measure::Time.show(phase.median_ns),
                Measure::Time.show(phase.min_ns),
                Measure::Time.show(phase.max_ns),
                Measure::Time.show(phase.first_launch_ns)
            ),
        })
        .collect();
    match panel("cold", &format!("medians of {} launches", cold.launches.len()), &bars) {
        Some(panel) => Figure {
            caption: vec![
                "Each launch is a process of its own; the last bar is all of them together.".into(),
            ],
            panels: vec![panel],
            tables: vec![(String::new(), crate::output::kinds::serving::cold_columns(cold))],
            ..figure
        },
        None => figure.absent("No launch was timed."),
    }
}

fn panel(name: &str, title: &str, bars: &[Bar]) -> Option<Panel> {
    let axis = Axis::from_zero("time", Measure::Time, bars.iter().map(|b| b.ns).filter(|ns| *ns > 0.0))?;
    let height = 34.0 + BAR * bars.len() as f64 + 40.0;
    let sizes =
        [Size { class: "wide", width: 470.0, height }, Size { class: "narrow", width: 350.0, height }];
    let drawings = sizes.map(|size| at(size, name, title, &axis, bars)).to_vec();
    Some(Panel { drawings, half: true, closing: None })
}

fn at(size: Size, name: &str, title: &str, axis: &Axis, bars: &[Bar]) -> Node {
    let widest = bars.iter().map(|b| text_width(&b.name)).fold(0.0, f64::max).min(size.width * 0.36);
    let says = bars.iter().map(|b| text_width(&b.says)).fold(0.0, f64::max);
    let (left, right, top) = (widest + 10.0, size.width - says - 12.0, 34.0);
    let bottom = top + BAR * bars.len() as f64;
    let mut drawing = canvas(size, name, title);
    for tick in axis.ticks(if size.width > 400.0 { 5 } else { 3 }) {
        let x = left + tick.place * (right - left);
        drawing = drawing
            .child(el("line").class("grid").at("x1", x).at("x2", x).at("y1", top - 6.0).at("y2", bottom))
            .child(label(x, bottom + 16.0, "tick middle", &tick.label));
    }
    for (i, bar) in bars.iter().enumerate() {
        let y = top + BAR * i as f64;
        let to = left + axis.place(bar.ns).unwrap_or(0.0) * (right - left);
        let drawn = el("rect")
            .class("bar c0")
            .at("x", left)
            .at("y", y)
            .at("width", (to - left).max(1.0))
            .at("height", BAR - 8.0);
        drawing = drawing
            .child(label(0.0, y + 14.0, "key", &fitted(&bar.name, widest + 4.0)))
            .child(el("g").class("mark").child(el("title").text(bar.hover.as_str())).child(drawn))
            .child(label(to + 5.0, y + 14.0, "value", &bar.says));
    }
    drawing
        .child(el("line").class("axis").at("x1", left).at("x2", left).at("y1", top - 6.0).at("y2", bottom))
        .child(label(right, bottom + 34.0, "axis-name end", &axis.label))
}
