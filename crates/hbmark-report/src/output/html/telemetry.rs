//! Clocks, power, temperature and load over the run, as far as the machine told them.
//!
//! Enters: the telemetry of every block. Leaves: one low plot per quantity that was seen, over the same time axis as the blocks, with
//! rejected blocks as vertical lines.

use super::axis::{Axis, Measure};
use super::blocks::Taken;
use super::chart::{Chart, Key, Line, Point, Rule, Shape, Span};
use super::figure::{Figure, Panel, numbers, words};
use hbmark_core::result::{Block, BlockTelemetry};

/// One quantity of the telemetry.
struct Quantity {
    name: &'static str,
    title: &'static str,
    measure: Measure,
    value: fn(&Block, &BlockTelemetry) -> Option<f64>,
}

const QUANTITIES: &[Quantity] = &[
    Quantity {
        name: "sm-clock",
        title: "SM clock",
        measure: Measure::Megahertz,
        value: |_, t| t.sm_clock_mhz,
    },
    Quantity {
        name: "memory-clock",
        title: "memory clock",
        measure: Measure::Megahertz,
        value: |_, t| t.memory_clock_mhz,
    },
    Quantity {
        name: "cpu-frequency",
        title: "CPU frequency",
        measure: Measure::Megahertz,
        value: |_, t| t.cpu_frequency_mhz,
    },
    Quantity { name: "power", title: "power", measure: Measure::Watts, value: |_, t| t.power_watts },
    Quantity {
        name: "mean-power",
        title: "mean power of a block, by its energy",
        measure: Measure::Watts,
        value: |block, t| {
            t.energy_joules.filter(|_| block.wall_ns > 0.0).map(|joules| joules / block.wall_ns * 1e9)
        },
    },
    Quantity {
        name: "temperature",
        title: "temperature",
        measure: Measure::Celsius,
        value: |_, t| t.temperature_celsius,
    },
    Quantity {
        name: "foreign-load",
        title: "other processes' load",
        measure: Measure::Cores,
        value: |_, t| t.foreign_cores,
    },
    Quantity {
        name: "steal",
        title: "stolen by the hypervisor",
        measure: Measure::Cores,
        value: |_, t| t.steal_cores,
    },
    Quantity {
        name: "canary",
        title: "canary, over its own time at the start",
        measure: Measure::Share,
        value: |block, _| block.canary_ratio,
    },
];

#[must_use]
pub fn figure(taken: &[Taken<'_>]) -> Figure {
    let figure = Figure::new("telemetry", "Clocks, power, temperature and load");
    let none = BlockTelemetry::default();
    let value = |quantity: &Quantity, taken: &Taken<'_>| {
        let seen = taken.block.telemetry.as_ref().unwrap_or(&none);
        (quantity.value)(taken.block, seen).filter(|v| v.is_finite())
    };
    let seen: Vec<&Quantity> =
        QUANTITIES.iter().filter(|q| taken.iter().any(|t| value(q, t).is_some())).collect();
    if seen.is_empty() {
        return figure.absent("No clock, power, temperature or load telemetry was available.");
    }
    let charts = seen.iter().filter_map(|quantity| {
        let of = |t: &Taken<'_>| value(quantity, t);
        chart(quantity, taken, &of)
    });
    let missing: Vec<&str> =
        QUANTITIES.iter().filter(|q| !seen.iter().any(|s| s.name == q.name)).map(|q| q.title).collect();
    let mut caption = Vec::new();
    if taken.iter().any(|t| t.block.rejected.is_some()) {
        caption.push("Vertical lines are rejected blocks.".to_owned());
    }
    if !missing.is_empty() {
        caption.push(format!("Not told by this machine: {}.", missing.join(", ")));
    }
    let panels = charts.map(|chart| Panel::of(&chart)).collect();
    let told: Vec<&Taken<'_>> =
        taken.iter().filter(|t| seen.iter().any(|q| value(q, t).is_some())).take(400).collect();
    let mut columns = vec![
        numbers("at", told.iter().map(|t| format!("{:.2} s", t.seconds))),
        words("cell", told.iter().map(|t| t.cell.id.clone())),
    ];
    columns.extend(seen.iter().map(|q| {
        let show = |t: &&Taken<'_>| value(q, t).map_or("-".to_owned(), |v| q.measure.show(v));
        numbers(q.title, told.iter().map(show))
    }));
    Figure { caption, panels, tables: vec![(String::new(), columns)], ..figure }
}

fn chart(
    quantity: &Quantity,
    taken: &[Taken<'_>],
    value: &dyn Fn(&Taken<'_>) -> Option<f64>,
) -> Option<Chart> {
    let known: Vec<(f64, f64, &Taken<'_>)> =
        taken.iter().filter_map(|t| Some((t.block.at_ns, value(t)?, t))).collect();
    let rejected: Vec<f64> =
        taken.iter().filter(|t| t.block.rejected.is_some()).map(|t| t.block.at_ns).collect();
    let y = match quantity.measure {
        Measure::Share => Axis::around("", quantity.measure, known.iter().map(|k| k.1).chain([1.0])),
        // A load of zero is a value of its own, and the axis of an idle machine still reaches one core.
        Measure::Cores => Axis::from_zero("", quantity.measure, known.iter().map(|k| k.1).chain([0.5])),
        _ => Axis::around("", quantity.measure, known.iter().map(|k| k.1)),
    }?;
    let keys = if rejected.is_empty() {
        Vec::new()
    } else {
        vec![Key { class: "rejected".into(), shape: None, text: "rejected block".into() }]
    };
    let point = |&(at, value, t): &(f64, f64, &Taken<'_>)| Point {
        class: "c0 small".into(),
        shape: Shape::Circle,
        x: at,
        y: value,
        spread: None,
        hover: format!("{}\n{:.1} s into the run\n{}", quantity.measure.show(value), t.seconds, t.cell.id),
    };
    Some(Chart {
        name: quantity.name.into(),
        title: quantity.title.into(),
        // The axis of the blocks, so that the plots can be read under each other.
        x: Axis::from_zero("since the run began", Measure::Time, taken.iter().map(|t| t.block.at_ns))?,
        y,
        lines: vec![Line {
            class: "c0 thin".into(),
            points: known.iter().map(|k| (k.0, k.1)).collect(),
            label: None,
        }],
        points: known.iter().map(point).collect(),
        rules: rejected
            .into_iter()
            .map(|x| Rule { x, class: "rejected".into(), label: String::new() })
            .collect(),
        keys,
        span: Span::Strip,
    })
}
