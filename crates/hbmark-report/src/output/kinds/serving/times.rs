//! Named times as bars: where the time of the serving loop goes, and what a cold start waits for.

use super::{cold_columns, loop_parts};
use crate::output::document::{Block, Table, numbers, words};
use crate::output::plot::axis::{Axis, Measure};
use crate::output::plot::{Bar, Bars, Drawing, Plot};
use hbmark_core::input::plain;
use hbmark_core::result::serving::{Breakdown, ColdPhase, ColdStart, Point};

/// Where the loop's time went, point by point.
pub fn breakdown(points: &[&Point]) -> Block {
    let known: Vec<(&Point, &Breakdown)> =
        points.iter().filter_map(|p| Some((*p, &p.result.as_ref()?.breakdown))).collect();
    let drawings: Vec<Drawing> = known
        .iter()
        .filter_map(|(point, b)| {
            let bar = |(name, ns)| {
                let (share, step) = (share(b, ns), per_step(b, ns));
                let (time, wall) = (Measure::Time.show(ns), Measure::Time.show(b.wall_ns));
                let hover = format!("{name}\n{time} of {wall} ({share})\n{step} per step");
                self::bar(name, ns, share, hover)
            };
            bars("breakdown", plain(&point.label), loop_parts(b).into_iter().map(bar).collect())
        })
        .collect();
    if drawings.is_empty() {
        return Block::absent("No point of load was run, so no time was spent.");
    }
    let tables = known.iter().map(|(point, b)| {
        let parts = loop_parts(b);
        let columns = vec![
            words("part", parts.iter().map(|(name, _)| (*name).to_owned())),
            numbers("time", parts.iter().map(|(_, ns)| Measure::Time.show(*ns))),
            numbers("share", parts.iter().map(|(_, ns)| share(b, *ns))),
            numbers("per step", parts.iter().map(|(_, ns)| per_step(b, *ns))),
        ];
        Table::titled(plain(&point.label), columns)
    });
    let caption = "Over the whole run, warm-up included. Device is the step itself, idle is waiting for arrivals; the rest is the host's \
                   work, during which no request is served.";
    Block::Plot(Plot { open: 4, ..Plot::new(drawings, vec![caption.into()], tables.collect()) })
}

fn share(b: &Breakdown, ns: f64) -> String {
    Measure::Share.show(ns / b.wall_ns.max(1.0))
}

fn per_step(b: &Breakdown, ns: f64) -> String {
    Measure::Time.show(ns / b.steps.max(1) as f64)
}

/// The phases of a cold start.
pub fn cold(cold: &ColdStart) -> Block {
    let phase = |phase: &ColdPhase| {
        let [median, min, max, first] = [phase.median_ns, phase.min_ns, phase.max_ns, phase.first_launch_ns]
            .map(|ns| Measure::Time.show(ns));
        let name = plain(&phase.name);
        let hover = format!("{name}\nmedian {median}\n{min} to {max}, first launch {first}");
        bar(&name, phase.median_ns, median, hover)
    };
    let phases = cold.phases.iter().chain([&cold.to_first_token]).map(phase).collect();
    let Some(drawing) = bars("cold", format!("medians of {} launches", cold.launches.len()), phases) else {
        return Block::absent("No launch was timed.");
    };
    let caption = "Each launch is a process of its own; the last bar is all of them together.";
    Block::Plot(Plot::new(vec![drawing], vec![caption.into()], vec![cold_columns(cold).into()]))
}

fn bar(name: &str, ns: f64, value: String, hover: String) -> Bar {
    Bar { name: name.to_owned(), style: "c0".into(), from: 0.0, to: ns, value, hover }
}

fn bars(name: &str, title: String, bars: Vec<Bar>) -> Option<Drawing> {
    let axis = Axis::from_zero("time", Measure::Time, bars.iter().map(|b| b.to).filter(|ns| *ns > 0.0))?;
    Some(Drawing::Bars(Bars { name: name.to_owned(), title, axis, bars, closing: None }))
}
