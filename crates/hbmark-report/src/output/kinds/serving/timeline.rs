//! A serving run over time: running and waiting requests, KV pool use, and the tokens and the longest time of a step. Low charts below each
//! other over one time axis, with the window over which rates are taken.

use crate::output::document::{Block, Column, Table, numbers};
use crate::output::plot::axis::{Axis, Measure};
use crate::output::plot::{Chart, Drawing, Key, Line, Mark, Plot, Rule, Shape, Span};
use hbmark_core::input::plain;
use hbmark_core::result::serving::{Point, Span as TimelineSpan, Timeline};

/// One quantity of a span.
struct Quantity {
    name: &'static str,
    style: &'static str,
    value: fn(&TimelineSpan) -> Option<f64>,
}

/// A plot of quantities that share an axis.
struct Strip {
    name: &'static str,
    title: &'static str,
    measure: Measure,
    quantities: &'static [Quantity],
}

/// What is seen of a live server: no steps, no pool.
const REQUESTS: &str = "requests";
const SEEN: [&str; 4] = ["from", "running", "waiting", "output tokens"];

const STRIPS: &[Strip] = &[
    Strip {
        name: REQUESTS,
        title: "requests running and waiting",
        measure: Measure::Count,
        quantities: &[
            Quantity { name: "running", style: "c0", value: |s| Some(s.running) },
            Quantity { name: "waiting", style: "c1", value: |s| Some(s.waiting) },
        ],
    },
    Strip {
        name: "kv",
        title: "KV blocks in use",
        measure: Measure::Share,
        quantities: &[
            Quantity { name: "average of a span", style: "c2", value: |s| Some(s.kv_use) },
            Quantity { name: "largest", style: "c2 dotted", value: |s| Some(s.max_kv_use) },
        ],
    },
    Strip {
        name: "step-tokens",
        title: "tokens of a step, prompt and output",
        measure: Measure::Count,
        quantities: &[Quantity { name: "average of a span", style: "c3", value: TimelineSpan::step_tokens }],
    },
    Strip {
        name: "longest-step",
        title: "longest step",
        measure: Measure::Time,
        quantities: &[Quantity { name: "of a span", style: "c5", value: |s| s.longest_step_ns }],
    },
];

/// Times and values without a gap.
type Run = Vec<(f64, f64)>;

pub fn plot(points: &[&Point]) -> Block {
    let known: Vec<(&Point, &Timeline)> =
        points.iter().filter_map(|p| Some((*p, p.result.as_ref()?.timeline.as_ref()?))).collect();
    if known.is_empty() {
        return Block::absent(
            "This result holds no timeline: nothing was run, or it was saved before timelines were kept.",
        );
    }
    let charts = known.iter().flat_map(|(point, line)| {
        let seen = STRIPS.iter().filter(|strip| point.live.is_none() || strip.name == REQUESTS);
        seen.filter_map(|strip| chart(strip, point, line))
    });
    let spans = known.iter().map(|(_, line)| line.span_ns).fold(0.0, f64::max);
    let caption = format!(
        "Averages over spans of {} at most, idle time included; a line of steps is broken where a span has none; between the vertical lines rates and latencies are taken.",
        Measure::Time.show(spans)
    );
    let tables = known.iter().map(|(point, line)| {
        let mut columns = table(line);
        columns.retain(|column| point.live.is_none() || SEEN.contains(&column.title.as_str()));
        Table::titled(plain(&point.label), columns)
    });
    let drawings = charts.map(Drawing::Chart).collect();
    Block::Plot(Plot { open: STRIPS.len(), ..Plot::new(drawings, vec![caption], tables.collect()) })
}

fn chart(strip: &Strip, point: &Point, line: &Timeline) -> Option<Chart> {
    let end = line.span_ns * line.spans.len() as f64;
    let runs: Vec<(&Quantity, Run)> = strip
        .quantities
        .iter()
        .flat_map(|q| unbroken(q, line).into_iter().map(move |run| (q, run)))
        .collect();
    let least = if strip.measure == Measure::Share { 0.01 } else { 1.0 };
    let heights = runs.iter().flat_map(|(_, run)| run.iter().map(|v| v.1)).chain([least]);
    let marks = runs.iter().flat_map(|(q, run)| run.iter().map(|v| mark(strip, q, *v, run.len() == 1)));
    let rule = |x: f64| Rule { x, style: "crossing".into(), label: String::new() };
    let first = strip.name == STRIPS[0].name;
    let title = if first { format!("{}: {}", plain(&point.label), strip.title) } else { strip.title.into() };
    let x = Axis::from_zero("since the run began", Measure::Time, [end / 1.06])?;
    let y = Axis::from_zero("", strip.measure, heights)?;
    let keys = strip.quantities.iter().filter(|_| strip.quantities.len() > 1);
    Some(Chart {
        marks: marks.collect(),
        rules: vec![rule(line.window_from_ns), rule(line.window_to_ns)],
        legend: keys.map(|q| Key::line(q.style, q.name)).collect(),
        lines: runs.iter().map(|(q, run)| Line::new(q.style, run.clone())).collect(),
        ..Chart::new(format!("timeline-{}", strip.name), title, Span::Strip, x, y)
    })
}

/// The values of a quantity at the middles of the spans, broken where spans between them have none, as when idle.
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

/// A mark to point at; visible without that only where no line passes through it.
fn mark(strip: &Strip, quantity: &Quantity, (at, value): (f64, f64), alone: bool) -> Mark {
    let colour = quantity.style.split(' ').next().unwrap_or_default();
    let (shown, time) = (strip.measure.show(value), Measure::Time.show(at));
    let style = format!("{colour} small{}", if alone { "" } else { " quiet" });
    let hover = format!("{}: {shown}\n{time} into the run", quantity.name);
    Mark::new(style, Shape::Circle, (at, value), hover)
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
