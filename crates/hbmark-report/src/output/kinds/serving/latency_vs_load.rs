//! Latency and throughput against load: the curve of a sweep or a search, with the objectives as lines.
//!
//! TTFT, TPOT, E2E and throughput over the offered rate or another swept variable. A percentile that missed its own objective is a cross; one
//! that is not reported or infinite is a cross at the upper edge.

use super::{curve, doubts, finite, is_invalid, is_sound, look};
use crate::analysis::distinct;
use crate::output::document::Block;
use crate::output::plot::axis::{Axis, Measure};
use crate::output::plot::{Chart, Drawing, Key, Label, Line, Mark, Plot, Rule, Shape, Span};
use hbmark_core::input::plain;
use hbmark_core::result::serving::{
    Clause, ClauseResult, Offered, Point, Quantiles, Quantity, ServeReport, ServeResult, SloMetric,
    SweepVariable,
};

/// Loads further apart than this factor are on a logarithmic axis.
const WIDE: f64 = 12.0;

/// Name, colour and value of a line.
type PlotSeries = (&'static str, &'static str, fn(&ServeResult) -> Option<f64>);

/// A percentile that is drawn.
struct Level {
    name: &'static str,
    style: &'static str,
    percentile: f64,
    of: fn(&Quantiles) -> Option<Quantity>,
}

const LEVELS: [Level; 3] = [
    Level { name: "p50", style: "c0", percentile: 0.5, of: |q| q.p50 },
    Level { name: "p95", style: "c1", percentile: 0.95, of: |q| q.p95 },
    Level { name: "p99", style: "c3", percentile: 0.99, of: |q| q.p99 },
];

/// One point of the curve.
struct CurvePoint<'a> {
    x: f64,
    point: &'a Point,
    result: &'a ServeResult,
}

impl CurvePoint<'_> {
    /// Whether a level of a metric is crossed out: the point is invalid, or it missed this level's objective. An objective at
    /// a percentile that is not drawn crosses out all that are.
    fn missed(&self, metric: SloMetric, percentile: f64) -> bool {
        let drawn = |p: f64| LEVELS.iter().any(|level| same(level.percentile, p));
        let of = |c: &ClauseResult| {
            let at = c.clause.percentile;
            c.clause.metric == metric && c.met == Some(false) && (same(at, percentile) || !drawn(at))
        };
        is_invalid(self.point) || self.result.slo.iter().any(of)
    }

    /// Why a metric has no height here, if it has none.
    fn without_height(&self, metric: SloMetric, quantiles: Option<&Quantiles>) -> Option<String> {
        let Some(quantiles) = quantiles else { return Some("not reported (saturated)".to_owned()) };
        let infinite = |quantity: Option<Quantity>| quantity.is_some_and(|q| q.value().is_infinite());
        let levels = LEVELS.iter().filter(|l| infinite((l.of)(quantiles))).map(|l| l.name.to_owned());
        let clauses = self.result.slo.iter().filter(|c| c.clause.metric == metric && infinite(c.observed));
        let clauses = clauses.map(|c| Measure::Tail.show(1.0 / (1.0 - c.clause.percentile)));
        let names = distinct(levels.chain(clauses));
        (!names.is_empty())
            .then(|| format!("{} infinite: requests were rejected or failed", names.join(", ")))
    }
}

fn same(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-9
}

pub fn plot(report: &ServeReport) -> Block {
    let swept = report.variable();
    let places: Vec<CurvePoint<'_>> = report
        .points
        .iter()
        .filter_map(|point| {
            let result = point.result.as_ref()?;
            Some(CurvePoint { x: place(point, result, swept)?, point, result })
        })
        .collect();
    let mut xs: Vec<f64> = places.iter().map(|p| p.x).collect();
    xs.sort_by(f64::total_cmp);
    xs.dedup();
    if !report.matrix.is_empty() {
        return Block::absent(
            "The rows of the matrix are different workloads, so there is no curve through them.",
        );
    }
    if xs.len() < 2 {
        return Block::absent(
            "One load alone; a sweep (hbmark serve sweep rate=1..32*2 --slo ttft_p95=1s) draws the curve.",
        );
    }
    let Some(axis) = axis(report, &xs) else {
        return Block::absent("The loads of this result cannot be drawn.");
    };
    let charts = [
        latency("ttft", "TTFT", SloMetric::Ttft, |r| r.ttft_ns.as_ref(), &places, &axis, report),
        latency("tpot", "TPOT", SloMetric::Tpot, |r| r.tpot_ns.as_ref(), &places, &axis, report),
        latency("e2e", "E2E", SloMetric::E2e, |r| r.e2e_ns.as_ref(), &places, &axis, report),
        throughput(&places, &axis, report),
    ];
    let mut caption = vec![
        "A cross is a percentile that missed its own objective, or one of an INVALID point. Crosses at the upper edge have no height: their \
         latencies are infinite, because requests were rejected, or refused, because the point did not keep up. Point at one to read why."
            .to_owned(),
    ];
    if report.points.iter().any(|point| point.result.is_some() && !is_sound(point)) {
        caption.push(
            "Faint points were measured beside a disturbance. Lines leave them out, and INVALID ones.".into(),
        );
    }
    if report.search.is_some() {
        caption.push(
            "A search comes back to a rate with other seeds and runs of other lengths, so its points are not joined.".into(),
        );
    }
    caption.extend(report.search.as_ref().and_then(|search| {
        let rate = search.max_rate?;
        let which = search.confirmed_by().map_or_else(
            || "that held, in runs of one seed and one length".to_owned(),
            |by| format!("that {by} confirmed"),
        );
        Some(format!("The vertical line is the highest rate {which}: {rate:.3} per second asked for."))
    }));
    let drawings = charts.into_iter().flatten().map(Drawing::Chart).collect();
    Block::Plot(Plot::new(drawings, caption, vec![curve(&report.points).into()]))
}

/// A point's place on the axis of the swept variable: for a rate the one that was really offered, which chance makes another than the one
/// asked for.
fn place(point: &Point, result: &ServeResult, swept: Option<SweepVariable>) -> Option<f64> {
    let value = match (swept, point.offered) {
        (Some(SweepVariable::Rate), Offered::Rate(rate)) => {
            result.offered_per_s.filter(|r| r.is_finite() && *r > 0.0).unwrap_or(rate)
        }
        (Some(SweepVariable::Concurrency), Offered::Concurrency(count)) => count as f64,
        (Some(SweepVariable::Rate | SweepVariable::Concurrency), _) => return None,
        // `max-num-seqs 8`: the label of a sweep ends with the value.
        _ => point.label.rsplit(' ').next()?.parse().ok()?,
    };
    (value.is_finite() && value > 0.0).then_some(value)
}

fn axis(report: &ServeReport, xs: &[f64]) -> Option<Axis> {
    let (low, high) = (xs.first()?, xs.last()?);
    let is_rate = report.variable() == Some(SweepVariable::Rate);
    let (label, measure) = match &report.swept {
        Some(variable) if !is_rate => (variable.as_str(), Measure::Count),
        _ => ("offered requests per second", Measure::RequestsPerSecond),
    };
    if high / low > WIDE && xs.len() <= 12 && !is_rate {
        Axis::log_at(label, measure, xs)
    } else if high / low > WIDE {
        Axis::log(label, measure, xs.iter().copied(), 1.25)
    } else {
        Axis::from_zero(label, measure, xs.iter().copied())
    }
}

/// The point's name and why it is not valid or missed an objective.
fn verdict(place: &CurvePoint<'_>) -> String {
    let failed = place.result.slo.iter().filter(|c| c.met == Some(false)).map(|c: &ClauseResult| {
        format!(
            "\nNOT met: {}{}",
            c.clause,
            match c.observed.map(Quantity::value) {
                Some(v) if v.is_finite() => format!(", seen {}", Measure::Time.show(v)),
                Some(_) => ", seen infinite".to_owned(),
                None => String::new(),
            }
        )
    });
    plain(&place.point.label) + &doubts(place.point) + &failed.collect::<String>()
}

fn latency(
    name: &str,
    title: &str,
    metric: SloMetric,
    of: fn(&ServeResult) -> Option<&Quantiles>,
    places: &[CurvePoint<'_>],
    x: &Axis,
    report: &ServeReport,
) -> Option<Chart> {
    let (mut lines, mut marks, mut legend) = (Vec::new(), Vec::new(), Vec::new());
    for Level { name: level, style, percentile, of: value } in LEVELS {
        let mut seen: Vec<(&CurvePoint<'_>, f64)> =
            places.iter().filter_map(|p| Some((p, finite(value(of(p.result)?))?))).collect();
        if seen.is_empty() {
            continue;
        }
        seen.sort_by(|a, b| a.0.x.total_cmp(&b.0.x));
        legend.push(Key::mark(style, Shape::Circle, level));
        if report.search.is_none() {
            lines.push(joined(style, &seen));
        }
        marks.extend(seen.into_iter().map(|(p, v)| {
            let missed = p.missed(metric, percentile);
            let (style, shape) =
                if missed { ("bad".to_owned(), Shape::Cross) } else { look(p.point, style, Shape::Circle) };
            let hover = format!("{title} {level} {}\n{}", Measure::Time.show(v), verdict(p));
            Mark::new(style, shape, (p.x, v), hover)
        }));
    }
    let clauses = clauses(places, metric);
    let heights = marks.iter().map(|mark| mark.y).chain(clauses.iter().map(|c| c.limit_ns));
    let y = Axis::log(title, Measure::Time, heights, 1.5)?;
    lines.extend(clauses.iter().map(|clause| {
        let points = [x.low().max(f64::MIN_POSITIVE), x.high()].map(|x| (x, clause.limit_ns));
        let label = Some((Label::Begin, clause.to_string()));
        Line { label, ..Line::new("goal", points.to_vec()) }
    }));
    marks.extend(places.iter().filter_map(|p| {
        let why = p.without_height(metric, of(p.result))?;
        let hover = format!("{title} is {why}\n{}", verdict(p));
        Some(Mark::new("bad", Shape::Cross, (p.x, y.high()), hover))
    }));
    if marks.iter().any(|mark| mark.shape == Shape::Cross) {
        legend.push(Key::mark("bad", Shape::Cross, "SLO missed, INVALID or not reported"));
    }
    if !clauses.is_empty() {
        legend.push(Key::line("goal", "objective"));
    }
    let rate = report.search.as_ref().and_then(|s| s.max_rate);
    let rules = rate.map(|x| Rule { x, style: "crossing".into(), label: String::new() });
    Some(Chart {
        lines,
        marks,
        rules: rules.into_iter().collect(),
        legend,
        ..Chart::new(format!("load-{name}"), format!("{title} against load"), Span::Half, x.clone(), y)
    })
}

/// A line through the points that are neither INVALID nor disturbed.
fn joined(style: &str, seen: &[(&CurvePoint<'_>, f64)]) -> Line {
    let sound = seen.iter().filter(|(place, _)| is_sound(place.point));
    Line::new(style, sound.map(|(place, value)| (place.x, *value)).collect())
}

/// The objectives about a metric, each once.
fn clauses(places: &[CurvePoint<'_>], metric: SloMetric) -> Vec<Clause> {
    let clauses = places.iter().flat_map(|p| &p.result.slo).map(|c| c.clause);
    distinct(clauses.filter(|clause| clause.metric == metric))
}

fn throughput(places: &[CurvePoint<'_>], x: &Axis, report: &ServeReport) -> Option<Chart> {
    let series: [PlotSeries; 2] =
        [("served", "c0", |r| Some(r.served_per_s)), ("goodput", "c2", |r| r.goodput_per_s)];
    let (mut lines, mut marks, mut legend) = (Vec::new(), Vec::new(), Vec::new());
    for (name, style, value) in series {
        let mut seen: Vec<(&CurvePoint<'_>, f64)> =
            places.iter().filter_map(|p| Some((p, value(p.result).filter(|v| v.is_finite())?))).collect();
        seen.sort_by(|a, b| a.0.x.total_cmp(&b.0.x));
        if seen.is_empty() {
            continue;
        }
        legend.push(Key::mark(style, Shape::Circle, name));
        if report.search.is_none() {
            lines.push(joined(style, &seen));
        }
        marks.extend(seen.into_iter().map(|(p, v)| {
            let hover = format!("{name} {v:.3} requests per second\n{}", verdict(p));
            let (style, shape) = look(p.point, style, Shape::Circle);
            Mark::new(style, shape, (p.x, v), hover)
        }));
    }
    if marks.iter().any(|mark| mark.shape == Shape::Cross) {
        legend.push(Key::mark("bad", Shape::Cross, "INVALID"));
    }
    let y = Axis::from_zero("requests per second", Measure::RequestsPerSecond, marks.iter().map(|m| m.y))?;
    // Both axes of a rate begin at zero and are even, so that what is offered is a straight line, as far as the plot shows it.
    let x = if report.variable() == Some(SweepVariable::Rate) {
        let x = Axis::from_zero(&x.label, x.measure, places.iter().map(|p| p.x))?;
        let reach = x.high().min(y.high());
        lines.push(Line::new("level", vec![(0.0, 0.0), (reach, reach)]));
        legend.push(Key::line("level", "as offered"));
        x
    } else {
        x.clone()
    };
    Some(Chart {
        lines,
        marks,
        legend,
        ..Chart::new("load-throughput", "Throughput against load", Span::Half, x, y)
    })
}
