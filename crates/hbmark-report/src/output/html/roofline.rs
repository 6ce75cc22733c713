//! The roofline: how much arithmetic a step does per byte it must move, against how fast it does it, under what memory and arithmetic allow.
//!
//! Enters: a report. Leaves: a log-log plot with a point per measured cell, under the ceilings measured in the run and, dashed, those of
//! the data sheet.

use std::fmt::Write;

use super::axis::{Axis, Measure};
use super::chart::{Chart, Key, Label, Line, Point, Shape, Span};
use super::figure::{Figure, Panel, numbers, words};
use super::palette::{Palette, Timed, is_believable, phase_word, timed};
use crate::output::External;
use crate::output::kinds::run::{bound_word, status_word};
use hbmark_core::ledger::Roof;
use hbmark_core::model::Dtype;
use hbmark_core::result::{Phase, Report, ReportKind};
use hbmark_core::units::{BytesPerSecond, FlopsPerSecond};

struct Dot<'a> {
    timed: Timed<'a>,
    /// FLOP per byte.
    intensity: f64,
    flops_per_s: f64,
    /// What its file calls it, where another program made it.
    imported: Option<&'a str>,
}

/// One roof over the plot: a slope, and a level where a peak is known.
struct Ceiling {
    bandwidth: f64,
    peak: Option<(&'static str, f64)>,
    measured: bool,
}

#[must_use]
pub fn figure(report: &Report, palette: &Palette, externals: &[External]) -> Figure {
    let figure = Figure::new("roofline", "Roofline");
    let imported = externals.iter().filter_map(|e| {
        let time_ns = e.cell.tpot_ns.filter(|t| t.is_finite() && *t > 0.0)?;
        dot(Timed { cell: &e.cell, time_ns, interval_ns: None }, Some(&e.label))
    });
    let dots: Vec<Dot<'_>> = timed(report).filter_map(|timed| dot(timed, None)).chain(imported).collect();
    if dots.is_empty() {
        return figure
            .absent("No cell of this result has a time, so there is no point to hold against the roof.");
    }
    let ceilings = ceilings(report, &dots);
    let ridges = || ceilings.iter().filter_map(|c| Some(c.peak?.1 / c.bandwidth));
    let peaks = || ceilings.iter().filter_map(|c| Some(c.peak?.1));
    let xs = dots.iter().map(|d| d.intensity).chain(ridges());
    let ys = dots.iter().map(|d| d.flops_per_s).chain(peaks());
    let axes = Axis::log("intensity (FLOP per byte to be moved)", Measure::FlopsPerByte, xs, 1.8)
        .zip(Axis::log("arithmetic rate", Measure::FlopsPerSecond, ys, 1.8));
    let Some((x, y)) = axes else {
        return figure.absent("The rates of this result cannot be drawn.");
    };
    let chart = Chart {
        name: "roofline".into(),
        title: format!("Roofline of {}", report.model.name),
        lines: roofs(&ceilings, &x, &y),
        points: dots.iter().map(|dot| point(dot, palette)).collect(),
        rules: Vec::new(),
        keys: keys(&dots, &ceilings, palette),
        span: Span::Full,
        x,
        y,
    };
    let distance = match report.kind {
        ReportKind::Run => {
            "The distance of a point from the roof above it is what kernels, copies and launches cost"
        }
        ReportKind::Predict => "Predicted points lie on the roofline of their dtype; nothing was measured",
    };
    let mut caption = vec![format!(
        "Under the slope memory is the limit, under the level arithmetic. {distance}; both axes are logarithmic."
    )];
    if !externals.is_empty() {
        caption.push(
            "Triangles are other programs' decodes, imported: their scheduler, server and client are in the time, and what their files do \
             not say was said by hand."
                .into(),
        );
    }
    if ceilings.is_empty() {
        caption.push(
            "No ceiling was measured and the device is not in the data sheet table, so no roof is drawn."
                .into(),
        );
    }
    Figure { caption, panels: vec![Panel::of(&chart)], tables: vec![table(&dots)], ..figure }
}

fn dot<'a>(timed: Timed<'a>, imported: Option<&'a str>) -> Option<Dot<'a>> {
    let bytes = timed.cell.bytes.ideal().as_f64();
    let flops = timed.cell.flops;
    (bytes > 0.0 && flops > 0.0 && flops.is_finite()).then(|| Dot {
        intensity: flops / bytes,
        flops_per_s: flops / timed.time_ns * 1e9,
        timed,
        imported,
    })
}

/// The roofs of the dtypes that were run, each once.
fn ceilings(report: &Report, dots: &[Dot<'_>]) -> Vec<Ceiling> {
    let mut dtypes: Vec<Dtype> = Vec::new();
    for dot in dots {
        if !dtypes.contains(&dot.timed.cell.dtype) {
            dtypes.push(dot.timed.cell.dtype);
        }
    }
    let measured = dtypes.iter().filter_map(|&d| Some((Roof::measured(report.ceilings.as_ref()?, d), true)));
    let sheet = dtypes.iter().filter_map(|&d| Some((Roof::datasheet(report.datasheet.as_ref()?, d), false)));
    let mut ceilings: Vec<Ceiling> = Vec::new();
    for (roof, measured) in measured.chain(sheet) {
        let bandwidth = roof.bandwidth.0;
        let peak = roof
            .peak
            .map(|peak| (peak.dtype, peak.rate.0))
            .filter(|(_, rate)| rate.is_finite() && *rate > 0.0);
        let known = |c: &Ceiling| c.measured == measured && c.peak.map(|p| p.0) == peak.map(|p| p.0);
        if bandwidth.is_finite() && bandwidth > 0.0 && !ceilings.iter().any(known) {
            ceilings.push(Ceiling { bandwidth, peak, measured });
        }
    }
    ceilings
}

fn roofs(ceilings: &[Ceiling], x: &Axis, y: &Axis) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    for measured in [true, false] {
        let class = if measured { "roof" } else { "roof dashed" };
        let of_kind = || ceilings.iter().filter(|c| c.measured == measured);
        // The slope is one for all dtypes, up to the highest level.
        if let Some(first) = of_kind().next() {
            let top = of_kind().filter_map(|c| Some(c.peak?.1)).fold(0.0, f64::max);
            let top = if top > 0.0 && of_kind().all(|c| c.peak.is_some()) { top } else { y.high() };
            let from = x.low().max(y.low() / first.bandwidth);
            let to = x.high().min(top / first.bandwidth);
            let says = format!(
                "{} {}",
                if measured { "read" } else { "data sheet" },
                BytesPerSecond(first.bandwidth)
            );
            lines.push(Line {
                class: class.into(),
                points: vec![(from, from * first.bandwidth), (to, to * first.bandwidth)],
                label: (to > from * 2.0).then_some((Label::Along, says)),
            });
        }
        for ceiling in of_kind() {
            let Some((dtype, rate)) = ceiling.peak else { continue };
            let source = if measured { "" } else { "data sheet " };
            lines.push(Line {
                class: class.into(),
                points: vec![(rate / ceiling.bandwidth, rate), (x.high(), rate)],
                label: Some((Label::Above, format!("{source}{dtype} {}", FlopsPerSecond(rate)))),
            });
        }
    }
    lines
}

fn shape(dot: &Dot<'_>) -> Shape {
    match dot.timed.cell.phase {
        _ if !is_believable(dot.timed.cell) => Shape::Cross,
        _ if dot.imported.is_some() => Shape::Triangle,
        Phase::Decode => Shape::Circle,
        Phase::Prefill => Shape::Square,
    }
}

fn point(dot: &Dot<'_>, palette: &Palette) -> Point {
    let cell = dot.timed.cell;
    let name = match dot.imported {
        Some(label) => {
            format!("{}, imported: {label}\nbatch {}, context {}", cell.engine, cell.batch, cell.context)
        }
        None => cell.id.clone(),
    };
    let mut hover = format!(
        "{name}\n{} in {}\n{} per byte",
        Measure::FlopsPerSecond.show(dot.flops_per_s),
        Measure::Time.show(dot.timed.time_ns),
        Measure::FlopsPerByte.show(dot.intensity).replace("/B", "")
    );
    if let Some(fraction) = cell.predicted_ns.map(|floor| floor / dot.timed.time_ns) {
        let _ = write!(hover, "\n{} of the roof", Measure::Share.show(fraction));
    }
    let class = if is_believable(cell) { colour(dot, palette) } else { "bad".to_owned() };
    Point { class, shape: shape(dot), x: dot.intensity, y: dot.flops_per_s, spread: None, hover }
}

/// The last colour of the page is that of other programs.
fn colour(dot: &Dot<'_>, palette: &Palette) -> String {
    match dot.imported {
        Some(_) => "c5".to_owned(),
        None => palette.class(&dot.timed.cell.engine, dot.timed.cell.dtype),
    }
}

fn keys(dots: &[Dot<'_>], ceilings: &[Ceiling], palette: &Palette) -> Vec<Key> {
    let mut keys: Vec<Key> = Vec::new();
    for dot in dots {
        let cell = dot.timed.cell;
        let key = if is_believable(cell) {
            Key {
                class: colour(dot, palette),
                shape: Some(shape(dot)),
                text: match dot.imported {
                    Some(_) => format!("{} (imported)", cell.engine),
                    None => format!("{} {} {}", phase_word(cell.phase), cell.engine, cell.dtype),
                },
            }
        } else {
            Key { class: "bad".into(), shape: Some(Shape::Cross), text: "INVALID".into() }
        };
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    for (measured, text) in [(true, "ceiling measured in this run"), (false, "data sheet")] {
        if ceilings.iter().any(|c| c.measured == measured) {
            let class = if measured { "roof" } else { "roof dashed" };
            keys.push(Key { class: class.into(), shape: None, text: text.into() });
        }
    }
    keys
}

fn table(dots: &[Dot<'_>]) -> (String, Vec<crate::output::document::Column>) {
    let of = |show: &dyn Fn(&Dot<'_>) -> String| dots.iter().map(show).collect::<Vec<_>>();
    let share = |d: &Dot<'_>| {
        d.timed.cell.predicted_ns.map_or("-".to_owned(), |floor| Measure::Share.show(floor / d.timed.time_ns))
    };
    let columns = vec![
        words("cell", of(&|d| d.imported.map_or_else(|| d.timed.cell.id.clone(), str::to_owned))),
        numbers("time", of(&|d| Measure::Time.show(d.timed.time_ns))),
        numbers("intensity", of(&|d| Measure::FlopsPerByte.show(d.intensity))),
        numbers("rate", of(&|d| Measure::FlopsPerSecond.show(d.flops_per_s))),
        numbers("of the roof", of(&share)),
        words("bound", of(&|d| d.timed.cell.bound.map_or("-", bound_word).to_owned())),
        words("validity", of(&|d| status_word(d.timed.cell.status).to_owned())),
    ];
    (String::new(), columns)
}
