//! A serving run over time: who ran and who waited, how full the KV pool was, and what a step held.
//!
//! Enters: points with their timelines. Leaves: low plots under each other over one time axis, with the window over which rates are taken.

use super::axis::{Axis, Measure};
use super::chart::{Chart, Key, Line, Point as Mark, Rule, Shape, Span};
use super::figure::{Figure, Panel, numbers};
use crate::output::document::Column;
use hbmark_core::input::plain;
use hbmark_core::result::serving::{Point, Span as TimelineSpan, Timeline};

/// One quantity of a span.
struct Quantity {
    name: &'static str,
    class: &'static str,
    value: fn(&TimelineSpan) -> Option<f64>,
}

/// A plot of quantities that share an axis.
struct Strip {
    name: &'static str,
    title: &'static str,
    measure: Measure,
    quantities: &'static [Quantity],
}

const STRIPS: &[Strip] = &[
    Strip {
        name: "requests",
        title: "requests running and waiting",
        measure: Measure::Count,
        quantities: &[
            Quantity { name: "running", class: "c0", value: |s| Some(s.running) },
            Quantity { name: "waiting", class: "c1", value: |s| Some(s.waiting) },
        ],
    },
    Strip {
        name: "kv",
        title: "KV blocks in use",
        measure: Measure::Share,
        quantities: &[
            Quantity { name: "average of a span", class: "c2", value: |s| Some(s.kv_use) },
            Quantity { name: "largest", class: "c2 dotted", value: |s| Some(s.max_kv_use) },
        ],
    },
    Strip {
        name: "step-tokens",
        title: "tokens of a step, prompt and output",
        measure: Measure::Count,
        quantities: &[Quantity { name: "average of a span", class: "c3", value: TimelineSpan::step_tokens }],
    },
    Strip {
        name: "longest-step",
        title: "longest step",
        measure: Measure::Time,
        quantities: &[Quantity { name: "of a span", class: "c5", value: |s| s.longest_step_ns }],
    },
];

/// Times and values without a gap.
type Run = Vec<(f64, f64)>;

#[must_use]
pub fn figure(points: &[&Point]) -> Figure {
    let figure = Figure::new("timeline", "The run over time");
    let known: Vec<(&Point, &Timeline)> =
        points.iter().filter_map(|p| Some((*p, p.result.as_ref()?.timeline.as_ref()?))).collect();
    if known.is_empty() {
        return figure.absent(
            "This result holds no timeline: nothing was run, or it was saved before timelines were kept.",
        );
    }
    let panels =
        known.iter().flat_map(|(point, line)| STRIPS.iter().filter_map(|strip| chart(strip, point, line)));
    let spans = known.iter().map(|(_, line)| line.span_ns).fold(0.0, f64::max);
    let caption = vec![format!(
        "Averages over spans of {} at most, idle time included; a line of steps is broken where a span has none; between the vertical lines rates and latencies are taken.",
        Measure::Time.show(spans)
    )];
    Figure {
        caption,
        panels: panels.map(|chart| Panel::of(&chart)).collect(),
        tables: known.iter().map(|(point, line)| (plain(&point.label), table(line))).collect(),
        open_panels: STRIPS.len(),
        ..figure
    }
}

fn chart(strip: &Strip, point: &Point, line: &Timeline) -> Option<Chart> {
    let end = line.span_ns * line.spans.len() as f64;
    let seen: Vec<(&Quantity, Vec<Run>)> = strip.quantities.iter().map(|q| (q, unbroken(q, line))).collect();
    let least = if strip.measure == Measure::Share { 0.01 } else { 1.0 };
    let heights = seen.iter().flat_map(|(_, runs)| runs.iter().flatten().map(|v| v.1)).chain([least]);
    let marks = seen.iter().flat_map(|(quantity, runs)| {
        runs.iter().flat_map(|run| run.iter().map(|value| mark(strip, quantity, *value, run.len() == 1)))
    });
    let rule = |x: f64, label: &str| Rule { x, class: "crossing".into(), label: label.into() };
    let first = strip.name == STRIPS[0].name;
    Some(Chart {
        name: format!("timeline-{}", strip.name),
        title: if first { format!("{}: {}", plain(&point.label), strip.title) } else { strip.title.into() },
        x: Axis::from_zero("since the run began", Measure::Time, [end / 1.06])?,
        y: Axis::from_zero("", strip.measure, heights)?,
        points: marks.collect(),
        rules: vec![rule(line.window_from_ns, ""), rule(line.window_to_ns, "")],
        keys: if strip.quantities.len() > 1 {
            seen.iter().map(|(q, _)| key(q)).collect()
        } else {
            Vec::new()
        },
        lines: seen
            .into_iter()
            .flat_map(|(q, runs)| {
                runs.into_iter().map(|points| Line { class: q.class.into(), points, label: None })
            })
            .collect(),
        span: Span::Strip,
    })
}

/// The values of a quantity at the middles of the spans, apart where spans between them have none: nothing goes on while all is idle.
fn unbroken(quantity: &Quantity, line: &Timeline) -> Vec<Run> {
    let mut runs: Vec<Run> = vec![Run::new()];
    for (at, span) in line.at() {
        match ((quantity.value)(span).filter(|value| value.is_finite()), runs.last_mut()) {
            (Some(value), Some(run)) => run.push((at + line.span_ns / 2.0, value)),
            (None, Some(run)) if !run.is_empty() => runs.push(Run::new()),
            _ => {}
        }
    }
    runs.retain(|run| !run.is_empty());
    runs
}

/// What can be pointed at; seen without that only where no line passes through it.
fn mark(strip: &Strip, quantity: &Quantity, (at, value): (f64, f64), alone: bool) -> Mark {
    let colour = quantity.class.split(' ').next().unwrap_or_default();
    Mark {
        class: format!("{colour} small{}", if alone { "" } else { " quiet" }),
        shape: Shape::Circle,
        x: at,
        y: value,
        spread: None,
        hover: format!(
            "{}: {}\n{} into the run",
            quantity.name,
            strip.measure.show(value),
            Measure::Time.show(at)
        ),
    }
}

fn key(quantity: &Quantity) -> Key {
    Key { class: quantity.class.into(), shape: None, text: quantity.name.into() }
}

fn table(line: &Timeline) -> Vec<Column> {
    let of = |show: &dyn Fn(f64, &TimelineSpan) -> String| {
        line.at().map(|(at, s)| show(at, s)).collect::<Vec<_>>()
    };
    let time = |ns: f64| Measure::Time.show(ns);
    vec![
        numbers("from", of(&|at, _| time(at))),
        numbers("steps", of(&|_, s| s.steps.to_string())),
        numbers("running", of(&|_, s| format!("{:.1}", s.running))),
        numbers("waiting", of(&|_, s| format!("{:.1}", s.waiting))),
        numbers("KV use", of(&|_, s| Measure::Share.show(s.kv_use))),
        numbers("largest", of(&|_, s| Measure::Share.show(s.max_kv_use))),
        numbers("prompt tokens", of(&|_, s| s.prompt_tokens.to_string())),
        numbers("output tokens", of(&|_, s| s.output_tokens.to_string())),
        numbers("longest step", of(&|_, s| s.longest_step_ns.map_or("-".into(), time))),
    ]
}
