//! Latencies by percentile: the middle and the tail of every latency of a point of load, with its objectives.
//!
//! A chart per point: time over the percentile, both logarithmic, the percentile by 1 / (1 − p). A percentile that the sample is too small
//! for is drawn as a lower bound, the largest value seen.

use super::{doubts, finite, is_sound, latencies, look, met, validity};
use crate::output::document::{Block, Table};
use crate::output::plot::axis::{Axis, Measure};
use crate::output::plot::{Chart, Drawing, Key, Line, Mark, Plot, Shape, Span};
use hbmark_core::input::plain;
use hbmark_core::result::serving::{LEVELS, Point, Quantiles, ServeResult, SloMetric};

/// A latency, and its colour in every plot.
struct Latency {
    name: &'static str,
    style: &'static str,
    of: fn(&ServeResult) -> Option<&Quantiles>,
    objective: Option<SloMetric>,
}

/// The latencies of a request and of a token.
const LATENCIES: &[Latency] = &[
    Latency { name: "TTFT", style: "c0", of: |r| r.ttft_ns.as_ref(), objective: Some(SloMetric::Ttft) },
    Latency { name: "TPOT", style: "c1", of: |r| r.tpot_ns.as_ref(), objective: Some(SloMetric::Tpot) },
    Latency { name: "ITL", style: "c2", of: |r| r.itl_ns.as_ref(), objective: None },
    Latency { name: "E2E", style: "c3", of: |r| r.e2e_ns.as_ref(), objective: Some(SloMetric::E2e) },
    Latency { name: "queue", style: "c4", of: |r| r.queue_ns.as_ref(), objective: Some(SloMetric::Queue) },
];

/// The place of a percentile on its axis.
fn tail(p: f64) -> f64 {
    1.0 / (1.0 - p)
}

pub fn plot(points: &[&Point]) -> Block {
    let known: Vec<(&Point, &ServeResult)> =
        points.iter().filter_map(|p| Some((*p, p.result.as_ref()?))).collect();
    if known.is_empty() {
        return Block::absent("No point of load was run, so there are no latencies.");
    }
    let drawings: Vec<Drawing> = known.iter().filter_map(|(point, result)| chart(point, result)).collect();
    if drawings.is_empty() {
        return Block::absent("No percentile available: the run is saturated or requests failed.");
    }
    let tables = known.iter().map(|(p, r)| Table::titled(plain(&p.label), latencies("", p, r)));
    let mut caption = vec![
        "Percentiles are nearest-rank over all measured requests, the failed ones included as infinite; latencies count from the \
         scheduled arrival. A percentile that needs more values than there are is left out."
            .to_owned(),
    ];
    if known.iter().any(|(_, r)| r.ttft_ns.is_none()) {
        caption.push(
            "TTFT, E2E and queue-time percentiles are not reported for saturated points: they depend on run length.".into(),
        );
    }
    Block::Plot(Plot { open: 2, ..Plot::new(drawings, caption, tables.collect()) })
}

fn chart(point: &Point, result: &ServeResult) -> Option<Drawing> {
    let (mut lines, mut marks, mut legend) = (Vec::new(), Vec::new(), Vec::new());
    let mut levels = vec![tail(0.5)];
    let doubts = doubts(point);
    for latency in LATENCIES {
        let Some(quantiles) = (latency.of)(result) else { continue };
        let mut known = Vec::new();
        for (p, value) in LEVELS {
            let Some(ns) = finite(value(quantiles)) else { continue };
            let name = format!("{} {}", latency.name, Measure::Tail.show(tail(p)));
            let hover = format!("{name}\n{}\n{} values{doubts}", Measure::Time.show(ns), quantiles.n);
            let (style, shape) = look(point, latency.style, Shape::Circle);
            marks.push(Mark::new(style, shape, (tail(p), ns), hover));
            known.push((tail(p), ns));
            levels.push(tail(p));
        }
        if !known.is_empty() {
            legend.push(Key::line(latency.style, latency.name));
            lines.extend(is_sound(point).then(|| Line::new(latency.style, known)));
        }
    }
    for clause in &result.slo {
        let Some(latency) = LATENCIES.iter().find(|l| l.objective == Some(clause.clause.metric)) else {
            continue;
        };
        let style = format!("goal {}", latency.style);
        let place = (tail(clause.clause.percentile), clause.clause.limit_ns);
        let text = format!("objective {}", clause.clause);
        marks.push(Mark::new(style.as_str(), Shape::Limit, place, format!("{text}\n{}", met(clause.met))));
        legend.push(Key::mark(style, Shape::Limit, text));
    }
    let x = Axis::log_at("percentile", Measure::Tail, &levels)?;
    let y = Axis::log("time", Measure::Time, marks.iter().map(|mark| mark.y), 1.4)?;
    let verdict = if is_sound(point) { String::new() } else { format!(" ({})", validity(point)) };
    let title = format!("Latency percentiles at {}{verdict}", plain(&point.label));
    Some(Drawing::Chart(Chart { lines, marks, legend, ..Chart::new("latency", title, Span::Full, x, y) }))
}
