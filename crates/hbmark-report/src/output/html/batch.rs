//! TPOT and throughput of decode against batch, and the batch from which arithmetic is the limit.
//!
//! Enters: decode cells and the crossovers of a report. Leaves: two plots side by side, both axes logarithmic.

use super::axis::{Axis, Measure};
use super::chart::{Chart, Key, Line, Point, Rule, Shape, Span};
use super::figure::{Figure, Panel, numbers, words};
use super::palette::{Palette, Timed, is_believable, timed};
use crate::output::document::Column;
use crate::output::kinds::run::status_word;
use hbmark_core::model::Dtype;
use hbmark_core::result::{Phase, Report, ReportKind};

/// A crossover further from the measured batches than this factor is told, not drawn.
const FAR: f64 = 64.0;

#[must_use]
pub fn figure(report: &Report, palette: &Palette) -> Figure {
    let figure = Figure::new("batch", "TPOT and throughput against batch");
    let decode: Vec<Timed<'_>> = timed(report).filter(|t| t.cell.phase == Phase::Decode).collect();
    let mut batches: Vec<f64> = decode.iter().map(|t| t.cell.batch as f64).collect();
    batches.sort_by(f64::total_cmp);
    batches.dedup();
    match batches.as_slice() {
        [] => return figure.absent("No decode cell of this result has a time."),
        [one] => {
            return figure.absent(format!(
                "Only batch {one} was measured; run with two or more (--batch 1,4) to see batch scaling."
            ));
        }
        _ => {}
    }
    let groups = groups(&decode);
    let most = batches.last().copied().unwrap_or(1.0);
    let crossings = crossings(report, most * FAR);
    let mut ticks = batches.clone();
    ticks.extend(crossings.first());
    let tpot = |t: &Timed<'_>| Some(t.time_ns);
    let rate = |t: &Timed<'_>| t.cell.tokens_per_s;
    let charts = [
        chart(
            "tpot-batch",
            "TPOT against batch",
            "TPOT",
            Measure::Time,
            &tpot,
            &groups,
            &ticks,
            &crossings,
            palette,
        ),
        chart(
            "throughput-batch",
            "Throughput against batch",
            "output tokens, whole batch",
            Measure::TokensPerSecond,
            &rate,
            &groups,
            &ticks,
            &crossings,
            palette,
        ),
    ];
    let mut caption: Vec<String> = Vec::new();
    for crossover in report.crossovers.iter().filter(|c| c.what == "compute_bound_batch") {
        let line = match report.kind {
            ReportKind::Run => {
                format!("{} (floors of the run's first engine and dtype)", crossover.explanation)
            }
            ReportKind::Predict => crossover.explanation.clone(),
        };
        // Several dtypes may say the same.
        if !caption.contains(&line) {
            caption.push(line);
        }
    }
    let points = match report.kind {
        ReportKind::Run => "bars at points are 95 % intervals",
        ReportKind::Predict => "points are predicted floors, and nothing was measured",
    };
    caption.push(format!("Both axes are logarithmic. Contexts after the first are dashed; {points}."));
    let panels = charts.into_iter().flatten().map(|chart| Panel::of(&chart)).collect();
    Figure { caption, panels, tables: vec![(String::new(), table(&decode))], ..figure }
}

/// The batches from which decode computes longer than it reads, shortest context first, each once.
fn crossings(report: &Report, limit: f64) -> Vec<f64> {
    let known = report.crossovers.iter().filter(|c| c.what == "compute_bound_batch").filter_map(|c| c.value);
    let mut values: Vec<f64> = known.filter(|v| v.is_finite() && *v >= 1.0 && *v <= limit).collect();
    values.dedup();
    values
}

/// The cells of one engine, dtype and context, by batch.
struct Group<'a> {
    engine: &'a str,
    dtype: Dtype,
    context: usize,
    /// How many contexts of this engine and dtype came before.
    rank: usize,
    cells: Vec<Timed<'a>>,
}

fn groups<'a>(decode: &[Timed<'a>]) -> Vec<Group<'a>> {
    let mut groups: Vec<Group<'a>> = Vec::new();
    for &timed in decode {
        let cell = timed.cell;
        let same = |g: &Group<'_>| g.engine == cell.engine && g.dtype == cell.dtype;
        let rank = groups.iter().filter(|g| same(g)).count();
        match groups.iter_mut().find(|g| same(g) && g.context == cell.context) {
            Some(group) => group.cells.push(timed),
            None => groups.push(Group {
                engine: &cell.engine,
                dtype: cell.dtype,
                context: cell.context,
                rank,
                cells: vec![timed],
            }),
        }
    }
    for group in &mut groups {
        group.cells.sort_by_key(|t| t.cell.batch);
    }
    groups
}

#[expect(clippy::too_many_arguments, reason = "what differs between the two plots, and what they share")]
fn chart(
    name: &str,
    title: &str,
    y_label: &str,
    measure: Measure,
    value: &dyn Fn(&Timed<'_>) -> Option<f64>,
    groups: &[Group<'_>],
    ticks: &[f64],
    crossings: &[f64],
    palette: &Palette,
) -> Option<Chart> {
    let (mut lines, mut points, mut keys) = (Vec::new(), Vec::new(), Vec::new());
    for group in groups {
        let colour = palette.class(group.engine, group.dtype);
        let dash = ["", " dashed", " dotted"][group.rank.min(2)];
        let class = format!("{colour}{dash}");
        let places: Vec<(f64, f64)> = group
            .cells
            .iter()
            .filter(|t| is_believable(t.cell))
            .filter_map(|t| Some((t.cell.batch as f64, value(t)?)))
            .collect();
        lines.push(Line { class: class.clone(), points: places, label: None });
        keys.push(Key {
            class,
            shape: None,
            text: format!("{} {} context {}", group.engine, group.dtype, group.context),
        });
        points.extend(group.cells.iter().filter_map(|t| {
            let y = value(t)?;
            Some(Point {
                class: if is_believable(t.cell) { colour.clone() } else { "bad".into() },
                shape: if is_believable(t.cell) { Shape::Circle } else { Shape::Cross },
                x: t.cell.batch as f64,
                y,
                spread: t.interval_ns.filter(|_| measure == Measure::Time),
                hover: format!("{}\n{}", t.cell.id, measure.show(y)),
            })
        }));
    }
    let ys: Vec<f64> = points.iter().map(|p| p.y).collect();
    let rules = crossings.iter().take(1).map(|&batch| Rule {
        x: batch,
        class: "crossing".into(),
        label: format!("compute-bound from {batch:.0}"),
    });
    Some(Chart {
        name: name.into(),
        title: title.into(),
        x: Axis::log_at("batch (sequences in a step)", Measure::Count, ticks)?,
        y: Axis::log(y_label, measure, ys, 1.3)?,
        lines,
        points,
        rules: rules.collect(),
        keys,
        span: Span::Half,
    })
}

fn table(decode: &[Timed<'_>]) -> Vec<Column> {
    let of = |show: &dyn Fn(&Timed<'_>) -> String| decode.iter().map(show).collect::<Vec<_>>();
    let rate = |t: &Timed<'_>| t.cell.tokens_per_s.map_or("-".into(), |r| Measure::TokensPerSecond.show(r));
    vec![
        words("engine", of(&|t| t.cell.engine.clone())),
        words("dtype", of(&|t| t.cell.dtype.to_string())),
        numbers("context", of(&|t| t.cell.context.to_string())),
        numbers("batch", of(&|t| t.cell.batch.to_string())),
        numbers("TPOT", of(&|t| Measure::Time.show(t.time_ns))),
        numbers("throughput", of(&rate)),
        words("validity", of(&|t| status_word(t.cell.status).to_owned())),
    ]
}
