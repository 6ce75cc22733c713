//! Latency and throughput against load: the curve of a sweep or a search, with the objectives as lines.
//!
//! Enters: points of one workload. Leaves: TTFT, TPOT and throughput over the offered rate (or over whatever was swept). A point that did not
//! keep up has no latency to show and is marked at the top; one that kept up and missed an objective is a cross.

use super::axis::{Axis, Measure};
use super::chart::{Chart, Key, Label, Line, Point as Mark, Rule, Shape, Span};
use super::figure::{Figure, Panel};
use crate::report::serving::{ServeReport, columns, curve, validity};
use crate::report::text::plain;
use crate::serve::latency::{ClauseResult, Quantiles, Quantity, ServeResult, Validity};
use crate::serve::point::{Offered, Point};
use crate::serve::slo::{Clause, SloMetric};

/// Loads further apart than this factor stand on a logarithmic axis.
const WIDE: f64 = 12.0;
/// Pieces of the line of what is offered, which is a curve on a logarithmic axis.
const OFFERED: u32 = 60;

/// Name, colour and value of a line.
type Level<T, V> = (&'static str, &'static str, fn(&T) -> Option<V>);

/// One point of the curve.
struct Place<'a> {
    x: f64,
    point: &'a Point,
    result: &'a ServeResult,
}

impl Place<'_> {
    fn held(&self) -> bool {
        self.result.validity == Validity::Valid && self.result.slo_met != Some(false)
    }
}

#[must_use]
pub fn figure(report: &ServeReport) -> Figure {
    let figure = Figure::new("load", "Latency and throughput against load");
    let swept = report.swept.as_deref().unwrap_or("rate");
    let places: Vec<Place<'_>> = report
        .points
        .iter()
        .filter_map(|point| Some(Place { x: place(point, swept)?, point, result: point.result.as_ref()? }))
        .collect();
    let mut xs: Vec<f64> = places.iter().map(|p| p.x).collect();
    xs.sort_by(f64::total_cmp);
    xs.dedup();
    if !report.matrix.is_empty() {
        return figure
            .absent("The rows of the matrix are different workloads, so there is no curve through them.");
    }
    if xs.len() < 2 {
        return figure
            .absent("One load alone; a sweep (--sweep rate=1..32*2 --slo ttft_p95=1s) draws the curve.");
    }
    let Some(axis) = axis(swept, &xs) else {
        return figure.absent("The loads of this result cannot be drawn.");
    };
    let charts = [
        latency("ttft", "TTFT", SloMetric::Ttft, |r| r.ttft_ns.as_ref(), &places, &axis, report),
        latency("tpot", "TPOT", SloMetric::Tpot, |r| r.tpot_ns.as_ref(), &places, &axis, report),
        latency("e2e", "E2E", SloMetric::E2e, |r| r.e2e_ns.as_ref(), &places, &axis, report),
        throughput(swept, &places, &axis),
    ];
    let mut caption = vec![
        "Crosses are points that missed an objective; crosses at the upper edge did not keep up, so that their latencies are refused. \
         Point at one to read why."
            .to_owned(),
    ];
    caption.extend(report.search.as_ref().and_then(|s| s.max_rate).map(|rate| {
        format!("The vertical line is the highest rate that fresh seeds and a longer run confirmed: {rate:.3} per second.")
    }));
    Figure {
        caption,
        panels: charts.into_iter().flatten().map(|chart| Panel::of(&chart)).collect(),
        tables: vec![(String::new(), columns(&curve(&report.points)))],
        ..figure
    }
}

/// Where a point stands on the axis of what was swept.
fn place(point: &Point, swept: &str) -> Option<f64> {
    let value = match (swept, point.offered) {
        ("rate", Offered::Rate(rate)) => rate,
        ("concurrency", Offered::Concurrency(count)) => count as f64,
        ("rate" | "concurrency", _) => return None,
        // `max-num-seqs 8`: the label of a sweep ends with the value.
        _ => point.label.rsplit(' ').next()?.parse().ok()?,
    };
    (value.is_finite() && value > 0.0).then_some(value)
}

fn axis(swept: &str, xs: &[f64]) -> Option<Axis> {
    let (low, high) = (xs.first()?, xs.last()?);
    let (label, measure) = match swept {
        "rate" => ("offered requests per second", Measure::RequestsPerSecond),
        other => (other, Measure::Count),
    };
    if high / low > WIDE && xs.len() <= 12 {
        Axis::log_at(label, measure, xs)
    } else if high / low > WIDE {
        Axis::log(label, measure, xs.iter().copied(), 1.25)
    } else {
        Axis::from_zero(label, measure, xs.iter().copied())
    }
}

fn finite(quantity: Option<Quantity>) -> Option<f64> {
    quantity.map(Quantity::value).filter(|v| v.is_finite() && *v > 0.0)
}

/// What decided about a point.
fn told(place: &Place<'_>) -> String {
    let failed = place.result.slo.iter().filter(|c| c.met == Some(false)).map(|c: &ClauseResult| {
        format!(
            "\nNOT met: {}{}",
            c.clause,
            finite(c.observed).map_or(String::new(), |v| format!(", seen {}", Measure::Time.show(v)))
        )
    });
    let reasons = place.result.reasons.iter().map(|r| format!("\n{}: {r}", validity(place.point)));
    plain(&place.point.label) + &reasons.chain(failed).collect::<String>()
}

fn latency(
    name: &str,
    title: &str,
    metric: SloMetric,
    of: fn(&ServeResult) -> Option<&Quantiles>,
    places: &[Place<'_>],
    x: &Axis,
    report: &ServeReport,
) -> Option<Chart> {
    let levels: [Level<Quantiles, Quantity>; 3] =
        [("p50", "c0", |q| q.p50), ("p95", "c1", |q| q.p95), ("p99", "c3", |q| q.p99)];
    let (mut lines, mut points, mut keys) = (Vec::new(), Vec::new(), Vec::new());
    for (level, class, value) in levels {
        let seen: Vec<(&Place<'_>, f64)> =
            places.iter().filter_map(|p| Some((p, finite(value(of(p.result)?))?))).collect();
        if seen.is_empty() {
            continue;
        }
        keys.push(Key { class: class.into(), shape: Some(Shape::Circle), text: level.into() });
        // A search comes back to a rate with other seeds: a line through those would say nothing.
        if report.search.is_none() {
            let mut line: Vec<(f64, f64)> = seen.iter().map(|(p, v)| (p.x, *v)).collect();
            line.sort_by(|a, b| a.0.total_cmp(&b.0));
            lines.push(Line { class: class.into(), points: line, label: None });
        }
        points.extend(seen.into_iter().map(|(p, v)| Mark {
            class: if p.held() { class.into() } else { "bad".into() },
            shape: if p.held() { Shape::Circle } else { Shape::Cross },
            x: p.x,
            y: v,
            spread: None,
            hover: format!("{title} {level} {}\n{}", Measure::Time.show(v), told(p)),
        }));
    }
    let clauses = clauses(places, metric);
    let heights = points.iter().map(|p| p.y).chain(clauses.iter().map(|c| c.limit_ns));
    let y = Axis::log(title, Measure::Time, heights, 1.5)?;
    lines.extend(clauses.iter().map(|clause| Line {
        class: "limit".into(),
        points: vec![(x.low().max(f64::MIN_POSITIVE), clause.limit_ns), (x.high(), clause.limit_ns)],
        label: Some((Label::Begin, clause.to_string())),
    }));
    let refused = places.iter().filter(|p| of(p.result).is_none());
    points.extend(refused.map(|p| Mark {
        class: "bad".into(),
        shape: Shape::Cross,
        x: p.x,
        y: y.high(),
        spread: None,
        hover: format!("{title} is refused\n{}", told(p)),
    }));
    if points.iter().any(|p| p.shape == Shape::Cross) {
        keys.push(Key { class: "bad".into(), shape: Some(Shape::Cross), text: "rejected".into() });
    }
    Some(Chart {
        name: format!("load-{name}"),
        title: format!("{title} against load"),
        x: x.clone(),
        y,
        lines,
        points,
        rules: found(report),
        keys,
        span: Span::Half,
    })
}

/// The objectives about a metric, each once.
fn clauses(places: &[Place<'_>], metric: SloMetric) -> Vec<Clause> {
    let mut clauses: Vec<Clause> = Vec::new();
    for clause in places.iter().flat_map(|p| &p.result.slo).map(|c| c.clause) {
        if clause.metric == metric && !clauses.contains(&clause) {
            clauses.push(clause);
        }
    }
    clauses
}

fn found(report: &ServeReport) -> Vec<Rule> {
    let rate = report.search.as_ref().and_then(|s| s.max_rate);
    rate.map(|x| Rule { x, class: "crossing".into(), label: String::new() }).into_iter().collect()
}

fn throughput(swept: &str, places: &[Place<'_>], x: &Axis) -> Option<Chart> {
    let series: [Level<ServeResult, f64>; 2] =
        [("served", "c0", |r| Some(r.served_per_s)), ("goodput", "c2", |r| r.goodput_per_s)];
    let (mut lines, mut points, mut keys) = (Vec::new(), Vec::new(), Vec::new());
    for (name, class, value) in series {
        let mut seen: Vec<(&Place<'_>, f64)> =
            places.iter().filter_map(|p| Some((p, value(p.result).filter(|v| v.is_finite())?))).collect();
        seen.sort_by(|a, b| a.0.x.total_cmp(&b.0.x));
        if seen.is_empty() {
            continue;
        }
        keys.push(Key { class: class.into(), shape: Some(Shape::Circle), text: name.into() });
        lines.push(Line {
            class: class.into(),
            points: seen.iter().map(|(p, v)| (p.x, *v)).collect(),
            label: None,
        });
        points.extend(seen.into_iter().map(|(p, v)| Mark {
            class: class.into(),
            shape: Shape::Circle,
            x: p.x,
            y: v,
            spread: None,
            hover: format!("{name} {v:.3} requests per second\n{}", told(p)),
        }));
    }
    let y = Axis::from_zero("requests per second", Measure::RequestsPerSecond, points.iter().map(|p| p.y))?;
    if swept == "rate" {
        // What is offered, as far as the plot shows it.
        let (low, high) = (x.low(), x.high().min(y.high()));
        let step = |i: u32| low + (high - low) * (f64::from(i) / f64::from(OFFERED)).powi(2);
        let points = (0..=OFFERED).map(|i| (step(i), step(i))).collect();
        lines.push(Line { class: "level".into(), points, label: None });
        keys.push(Key { class: "level".into(), shape: None, text: "as offered".into() });
    }
    Some(Chart {
        name: "load-throughput".into(),
        title: "Throughput against load".into(),
        x: x.clone(),
        y,
        lines,
        points,
        rules: Vec::new(),
        keys,
        span: Span::Half,
    })
}
