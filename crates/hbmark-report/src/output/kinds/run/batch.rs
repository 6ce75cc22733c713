//! TPOT and throughput of decode against batch, and the batch from which arithmetic is the limit. Two charts, all axes logarithmic.

use super::palette::{Palette, Timed, is_invalid, look, timed};
use super::status_word;
use crate::analysis::distinct;
use crate::output::document::{Block, Column, numbers, words};
use crate::output::plot::axis::{Axis, Measure};
use crate::output::plot::{Chart, Drawing, Key, Line, Mark, Plot, Rule, Shape, Span};
use hbmark_core::model::Dtype;
use hbmark_core::result::{CellResult, CrossoverKind, Phase, Report, ReportKind};

/// A crossover further from the measured batches than this factor is in the caption only.
const FAR: f64 = 64.0;

pub fn plot(report: &Report, palette: &Palette) -> Block {
    let decode: Vec<Timed<'_>> = timed(report).filter(|t| t.cell.phase == Phase::Decode).collect();
    let mut batches: Vec<f64> = decode.iter().map(|t| t.cell.batch as f64).collect();
    batches.sort_by(f64::total_cmp);
    batches.dedup();
    match batches.as_slice() {
        [] => return Block::absent("No decode cell of this result has a time."),
        [one] => {
            return Block::absent(format!(
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
    let x = Axis::log_at("batch (sequences in a step)", Measure::Count, &ticks);
    let rules = crossings.first().map(|&batch| Rule {
        x: batch,
        style: "crossing".into(),
        label: format!("compute-bound from {batch:.0}"),
    });
    let chart = |name: &str, title: &str, y_label: &str, measure, value: Value| {
        let (lines, marks, legend) = series(&groups, palette, measure, value);
        // With the ends of its bars: one that is off the axis is not drawn.
        let heights = marks.iter().flat_map(|mark| {
            let (low, high) = mark.spread.unwrap_or((mark.y, mark.y));
            [mark.y, low, high]
        });
        let y = Axis::log(y_label, measure, heights, 1.3)?;
        let chart = Chart::new(name, title, Span::Half, x.clone()?, y);
        Some(Drawing::Chart(Chart { lines, marks, legend, rules: rules.iter().cloned().collect(), ..chart }))
    };
    let drawings = [
        chart("tpot-batch", "TPOT against batch", "TPOT", Measure::Time, |t| Some(t.time_ns)),
        chart(
            "throughput-batch",
            "Throughput against batch",
            "output tokens, whole batch",
            Measure::TokensPerSecond,
            |t| tokens_per_s(t.cell),
        ),
    ];
    let compute_bound = report.crossovers.iter().filter(|c| c.what == CrossoverKind::ComputeBoundBatch);
    // Several dtypes may say the same.
    let mut caption = distinct(compute_bound.map(|crossover| match report.kind {
        ReportKind::Run => format!("{} (floors of the run's first engine and dtype)", crossover.explanation),
        ReportKind::Predict => crossover.explanation.clone(),
    }));
    let points = match report.kind {
        ReportKind::Run => {
            "bars at points are 95 % intervals; faint points are not ok, and their bars the range over all blocks"
        }
        ReportKind::Predict => "points are predicted floors, and nothing was measured",
    };
    caption.push(format!("Both axes are logarithmic. Contexts after the first are dashed; {points}."));
    Block::Plot(Plot::new(drawings.into_iter().flatten().collect(), caption, vec![table(&decode).into()]))
}

/// The batches from which decode computes longer than it reads, shortest context first, each once.
fn crossings(report: &Report, limit: f64) -> Vec<f64> {
    let known = report
        .crossovers
        .iter()
        .filter(|c| c.what == CrossoverKind::ComputeBoundBatch)
        .filter_map(|c| c.value);
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

/// Over all blocks where they cannot stand for the cell, as its time is.
fn tokens_per_s(cell: &CellResult) -> Option<f64> {
    cell.all_blocks.as_ref().map_or(cell.tokens_per_s, |all| Some(all.tokens_per_s.median))
}

type Value = fn(&Timed<'_>) -> Option<f64>;

/// A line and its marks for each group.
fn series(
    groups: &[Group<'_>],
    palette: &Palette,
    measure: Measure,
    value: Value,
) -> (Vec<Line>, Vec<Mark>, Vec<Key>) {
    let (mut lines, mut marks, mut legend) = (Vec::new(), Vec::new(), Vec::new());
    for group in groups {
        let colour = palette.style(group.engine, group.dtype);
        let style = format!("{colour}{}", ["", " dashed", " dotted"][group.rank.min(2)]);
        let valid = group.cells.iter().filter(|t| !is_invalid(t.cell));
        let points = valid.filter_map(|t| Some((t.cell.batch as f64, value(t)?))).collect();
        lines.push(Line::new(style.as_str(), points));
        legend.push(Key::line(style, format!("{} {} context {}", group.engine, group.dtype, group.context)));
        marks.extend(group.cells.iter().filter_map(|t| {
            let y = value(t)?;
            let (style, shape) = look(t.cell, colour.clone(), Shape::Circle);
            let spread = t.interval_ns.filter(|_| measure == Measure::Time);
            let hover = format!("{}\n{}", t.cell.id, measure.show(y));
            Some(Mark { spread, ..Mark::new(style, shape, (t.cell.batch as f64, y), hover) })
        }));
    }
    (lines, marks, legend)
}

fn table(decode: &[Timed<'_>]) -> Vec<Column> {
    let of = |show: &dyn Fn(&Timed<'_>) -> String| decode.iter().map(show).collect::<Vec<_>>();
    let rate =
        |t: &Timed<'_>| tokens_per_s(t.cell).map_or("-".into(), |rate| Measure::TokensPerSecond.show(rate));
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
