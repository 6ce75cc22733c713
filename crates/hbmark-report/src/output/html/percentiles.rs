//! Latencies by percentile: the middle and the tail of every latency of a point of load, with its objectives.
//!
//! Enters: points with results. Leaves: a plot each; time over the percentile, both logarithmic, the percentile by how rare what lies beyond
//! it is. A percentile that the sample cannot carry is drawn as what is known of it: at least the largest value seen.

use super::axis::{Axis, Measure};
use super::chart::{Chart, Key, Line, Point as Mark, Shape, Span};
use super::figure::{Figure, Panel};
use crate::output::kinds::serving::latencies;
use hbmark_core::input::plain;
use hbmark_core::result::serving::{LEVELS, Point, Quantiles, Quantity, ServeResult, SloMetric};
use hbmark_core::stats::needed;

/// A latency, and its colour in every plot.
pub struct Latency {
    pub name: &'static str,
    pub class: &'static str,
    pub of: fn(&ServeResult) -> Option<&Quantiles>,
    pub objective: Option<SloMetric>,
}

/// The latencies of a request and of a token.
pub const LATENCIES: &[Latency] = &[
    Latency { name: "TTFT", class: "c0", of: |r| r.ttft_ns.as_ref(), objective: Some(SloMetric::Ttft) },
    Latency { name: "TPOT", class: "c1", of: |r| r.tpot_ns.as_ref(), objective: Some(SloMetric::Tpot) },
    Latency { name: "ITL", class: "c2", of: |r| r.itl_ns.as_ref(), objective: None },
    Latency { name: "E2E", class: "c3", of: |r| r.e2e_ns.as_ref(), objective: Some(SloMetric::E2e) },
    Latency { name: "queue", class: "c4", of: |r| r.queue_ns.as_ref(), objective: Some(SloMetric::Queue) },
];

/// Where a percentile stands on the axis of tails.
fn tail(p: f64) -> f64 {
    1.0 / (1.0 - p)
}

fn finite(quantity: Option<Quantity>) -> Option<f64> {
    quantity.map(Quantity::value).filter(|v| v.is_finite() && *v > 0.0)
}

#[must_use]
pub fn figure(points: &[&Point]) -> Figure {
    let figure = Figure::new("latency", "Latency percentiles");
    let known: Vec<(&Point, &ServeResult)> =
        points.iter().filter_map(|p| Some((*p, p.result.as_ref()?))).collect();
    if known.is_empty() {
        return figure.absent("No point of load was run, so there are no latencies.");
    }
    let panels: Vec<Panel> = known.iter().filter_map(|(point, result)| panel(point, result)).collect();
    let tables = known.iter().map(|(p, r)| (plain(&p.label), latencies("", r))).collect();
    if panels.is_empty() {
        return Figure { tables, ..figure }
            .absent("No percentile available: the run is saturated or requests failed.");
    }
    let mut caption = vec![
        "Percentiles are nearest-rank over all measured requests, the failed ones included as infinite; latencies count from the \
         scheduled arrival. A triangle is a percentile that needs more values than there are: it is at least the largest one seen."
            .to_owned(),
    ];
    if known.iter().any(|(_, r)| r.ttft_ns.is_none()) {
        caption.push(
            "TTFT, E2E and queue-time percentiles are not reported for saturated points: they depend on run length.".into(),
        );
    }
    Figure { caption, panels, tables, open_panels: 2, ..figure }
}

fn panel(point: &Point, result: &ServeResult) -> Option<Panel> {
    let (mut lines, mut points, mut keys, mut bounded) = (Vec::new(), Vec::new(), Vec::new(), false);
    let mut levels = vec![tail(0.5)];
    for latency in LATENCIES {
        let Some(quantiles) = (latency.of)(result) else { continue };
        let (mut sure, mut open) = (Vec::new(), Vec::new());
        for (p, value) in LEVELS {
            let name = format!("{} {}", latency.name, Measure::Tail.show(tail(p)));
            match (value(quantiles), finite(quantiles.max)) {
                (Some(value), _) => {
                    let Some(ns) = finite(Some(value)) else { continue };
                    sure.push((tail(p), ns));
                    let hover = format!("{name}\n{}\n{} values", Measure::Time.show(ns), quantiles.n);
                    points.push(mark(latency.class, Shape::Circle, tail(p), ns, hover));
                }
                (None, Some(max)) => {
                    let said = Measure::Time.show(max);
                    let hover = format!(
                        "{name}\n≥ {said}, the largest seen\n{} values; {} are needed",
                        quantiles.n,
                        needed(p)
                    );
                    open.push((tail(p), max));
                    points.push(mark(latency.class, Shape::Triangle, tail(p), max, hover));
                    bounded = true;
                }
                (None, None) => continue,
            }
            levels.push(tail(p));
        }
        if sure.is_empty() && open.is_empty() {
            continue;
        }
        keys.push(Key { class: latency.class.into(), shape: None, text: latency.name.into() });
        if let (Some(last), false) = (sure.last(), open.is_empty()) {
            let reach = std::iter::once(*last).chain(open).collect();
            lines.push(Line { class: format!("{} dotted", latency.class), points: reach, label: None });
        }
        lines.push(Line { class: latency.class.into(), points: sure, label: None });
    }
    let mut objectives = Vec::new();
    for clause in &result.slo {
        if !LATENCIES.iter().any(|l| l.objective == Some(clause.clause.metric)) {
            continue;
        }
        let verdict = match clause.met {
            Some(true) => "met",
            Some(false) => "NOT met",
            None => "unknown",
        };
        let place = tail(clause.clause.percentile);
        let hover = format!("objective {}\n{verdict}", clause.clause);
        points.push(mark("goal", Shape::Limit, place, clause.clause.limit_ns, hover));
        // Where it stands is its percentile and its limit; the name of the latency is in the legend.
        let text = format!("objective {}", clause.clause);
        objectives.push(Key { class: "goal".into(), shape: Some(Shape::Limit), text });
    }
    if bounded {
        keys.push(Key { class: "floor".into(), shape: Some(Shape::Triangle), text: "at least".into() });
    }
    keys.extend(objectives);
    let chart = Chart {
        name: "latency".into(),
        title: format!("Latency percentiles at {}", plain(&point.label)),
        x: Axis::log_at("percentile", Measure::Tail, &levels)?,
        y: Axis::log("time", Measure::Time, points.iter().map(|p| p.y), 1.4)?,
        lines,
        points,
        rules: Vec::new(),
        keys,
        span: Span::Full,
    };
    Some(Panel::of(&chart))
}

fn mark(class: &str, shape: Shape, x: f64, y: f64, hover: String) -> Mark {
    Mark { class: class.to_owned(), shape, x, y, spread: None, hover }
}
