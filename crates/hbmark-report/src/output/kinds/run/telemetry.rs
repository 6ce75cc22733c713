//! Clocks, power, temperature and load over the run: a low chart for each quantity that the machine reports, over the time axis of the
//! blocks, with rejected blocks as vertical lines.

use super::blocks::Taken;
use crate::output::document::{Block, numbers, words};
use crate::output::plot::axis::{Axis, Measure};
use crate::output::plot::{Chart, Drawing, Key, Line, Mark, Plot, Rule, Shape, Span};
use hbmark_core::result::{self, BlockTelemetry};

/// Rows of the table; the file has all.
const ROWS: usize = 400;

/// One quantity of the telemetry.
struct Quantity {
    name: &'static str,
    title: &'static str,
    measure: Measure,
    value: fn(&result::Block, &BlockTelemetry) -> Option<f64>,
}

const fn quantity(
    name: &'static str,
    title: &'static str,
    measure: Measure,
    value: fn(&result::Block, &BlockTelemetry) -> Option<f64>,
) -> Quantity {
    Quantity { name, title, measure, value }
}

const QUANTITIES: &[Quantity] = &[
    quantity("sm-clock", "SM clock", Measure::Megahertz, |_, t| t.sm_clock_mhz),
    quantity("memory-clock", "memory clock", Measure::Megahertz, |_, t| t.memory_clock_mhz),
    quantity("cpu-frequency", "CPU frequency", Measure::Megahertz, |_, t| t.cpu_frequency_mhz),
    quantity("power", "power", Measure::Watts, |_, t| t.power_watts),
    quantity("mean-power", "mean power of a block, by its energy", Measure::Watts, |block, t| {
        t.energy_joules.filter(|_| block.wall_ns > 0.0).map(|joules| joules / block.wall_ns * 1e9)
    }),
    quantity("temperature", "temperature", Measure::Celsius, |_, t| t.temperature_celsius),
    quantity("foreign-load", "other processes' load", Measure::Cores, |_, t| t.foreign_cores),
    quantity("steal", "stolen by the hypervisor", Measure::Cores, |_, t| t.steal_cores),
    quantity("canary", "canary, over its own time at the start", Measure::Share, |block, _| {
        block.canary_ratio
    }),
];

pub fn plot(taken: &[Taken<'_>]) -> Block {
    let none = BlockTelemetry::default();
    let value = |quantity: &Quantity, taken: &Taken<'_>| {
        let seen = taken.block.telemetry.as_ref().unwrap_or(&none);
        (quantity.value)(taken.block, seen).filter(|v| v.is_finite())
    };
    let seen: Vec<&Quantity> =
        QUANTITIES.iter().filter(|q| taken.iter().any(|t| value(q, t).is_some())).collect();
    if seen.is_empty() {
        return Block::absent("No clock, power, temperature or load telemetry was available.");
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
        caption.push(format!("Not reported by this machine: {}.", missing.join(", ")));
    }
    let rows: Vec<&Taken<'_>> =
        taken.iter().filter(|t| seen.iter().any(|q| value(q, t).is_some())).take(ROWS).collect();
    let mut columns = vec![
        numbers("at", rows.iter().map(|t| format!("{:.2} s", t.seconds))),
        words("cell", rows.iter().map(|t| t.cell.id.clone())),
    ];
    columns.extend(seen.iter().map(|q| {
        let show = |t: &&Taken<'_>| value(q, t).map_or("-".to_owned(), |v| q.measure.show(v));
        numbers(q.title, rows.iter().map(show))
    }));
    Block::Plot(Plot::new(charts.map(Drawing::Chart).collect(), caption, vec![columns.into()]))
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
    let mark = |&(at, value, t): &(f64, f64, &Taken<'_>)| {
        let shown = quantity.measure.show(value);
        let hover = format!("{shown}\n{:.1} s into the run\n{}", t.seconds, t.cell.id);
        Mark::new("c0 small", Shape::Circle, (at, value), hover)
    };
    // The axis of the blocks, so that the plots can be read below each other.
    let x = Axis::from_zero("since the run began", Measure::Time, taken.iter().map(|t| t.block.at_ns))?;
    let key = (!rejected.is_empty()).then(|| Key::line("rejected", "rejected block"));
    let rule = |x| Rule { x, style: "rejected".into(), label: String::new() };
    Some(Chart {
        lines: vec![Line::new("c0 thin", known.iter().map(|k| (k.0, k.1)).collect())],
        marks: known.iter().map(mark).collect(),
        rules: rejected.into_iter().map(rule).collect(),
        legend: key.into_iter().collect(),
        ..Chart::new(quantity.name, quantity.title, Span::Strip, x, y)
    })
}
