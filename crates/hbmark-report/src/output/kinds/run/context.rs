//! TPOT against context: what each position in the KV cache costs, and the fitted line. One chart per engine and dtype, with the slope as the
//! bandwidth of KV reads.

use std::fmt::Write;

use super::palette::{Palette, Timed, look, numbered, timed};
use super::{fit_line, status_word};
use crate::output::document::{Block, Column, numbers, words};
use crate::output::plot::axis::{Axis, Measure};
use crate::output::plot::{Chart, Drawing, Key, Label, Line, Mark, Plot, Shape, Span};
use hbmark_core::result::{FittedModel, Phase, Report, ReportKind, Status};
use hbmark_core::units::BytesPerSecond;

pub fn plot(report: &Report, palette: &Palette) -> Block {
    let decode: Vec<Timed<'_>> = timed(report).filter(|t| t.cell.phase == Phase::Decode).collect();
    let mut contexts: Vec<usize> = decode.iter().map(|t| t.cell.context).collect();
    contexts.sort_unstable();
    contexts.dedup();
    match contexts.as_slice() {
        [] => return Block::absent("No decode cell of this result has a time."),
        [one] => {
            return Block::absent(format!(
                "Only context {one} was measured; run with two or more (--context 128,512) to see KV-cache cost."
            ));
        }
        _ => {}
    }
    let mut caption: Vec<String> = Vec::new();
    let drawings = palette
        .series()
        .enumerate()
        .filter_map(|(index, (engine, dtype))| {
            let of: Vec<Timed<'_>> =
                decode.iter().filter(|t| t.cell.engine == engine && t.cell.dtype == dtype).copied().collect();
            let fit = report.fits.iter().find(|f| f.engine == engine && f.dtype == dtype);
            let chart = chart(index, &of, fit)?;
            caption.extend(match (fit, report.kind) {
                (Some(fit), _) => Some(fit_line(fit)),
                (None, ReportKind::Predict) => None,
                (None, ReportKind::Run) => Some(format!(
                    "{engine} {dtype}: no line, too few cells for a fit (two more than it has coefficients)"
                )),
            });
            Some(Drawing::Chart(chart))
        })
        .collect();
    caption.push(match report.kind {
        ReportKind::Run => {
            "Lines are the fit of all decode cells of an engine and dtype: fixed cost + KV bytes ÷ bandwidth + cost per sequence. Bars at \
             points are 95 % intervals; faint points are not ok, and their bars the range over all blocks."
                .into()
        }
        ReportKind::Predict => "The floor of the data sheet, predicted at each point and joined.".into(),
    });
    Block::Plot(Plot::new(drawings, caption, vec![table(report, &decode).into()]))
}

/// The fitted time of a cell, at its own bytes and batch.
fn fitted_ns(fit: &FittedModel, timed: &Timed<'_>) -> f64 {
    let kv = fit.kv_bytes_per_s.map_or(0.0, |rate| timed.cell.bytes.kv_read.as_f64() / rate * 1e9);
    fit.intercept_ns + kv + fit.per_sequence_ns.unwrap_or(0.0) * timed.cell.batch as f64
}

fn chart(index: usize, of: &[Timed<'_>], fit: Option<&FittedModel>) -> Option<Chart> {
    let first = of.first()?.cell;
    let mut batches: Vec<usize> = of.iter().map(|t| t.cell.batch).collect();
    batches.sort_unstable();
    batches.dedup();
    let style = |batch: usize| numbered(batches.iter().position(|b| *b == batch).unwrap_or(0));
    let fitted = fit.iter().flat_map(|fit| of.iter().map(move |t| fitted_ns(fit, t)));
    let times = of.iter().flat_map(|t| [Some(t.time_ns), t.interval_ns.map(|i| i.1)]).flatten().chain(fitted);
    let mut lines = Vec::new();
    for &batch in &batches {
        let mut here: Vec<&Timed<'_>> = of.iter().filter(|t| t.cell.batch == batch).collect();
        here.sort_by_key(|t| t.cell.context);
        // A prediction is its own line.
        let predicted = here.iter().all(|t| t.cell.status == Status::Predicted);
        if fit.is_some() || predicted {
            let height = |t: &Timed<'_>| fit.map_or(t.time_ns, |fit| fitted_ns(fit, t));
            let points = here.iter().map(|t| (t.cell.context as f64, height(t))).collect();
            let label = Some((Label::Beyond, format!("b{batch}")));
            lines.push(Line { label, ..Line::new(style(batch), points) });
        }
    }
    let marks = of.iter().map(|t| {
        let (style, shape) = look(t.cell, style(t.cell.batch), Shape::Circle);
        let place = (t.cell.context as f64, t.time_ns);
        Mark { spread: t.interval_ns, ..Mark::new(style, shape, place, hover(t, fit)) }
    });
    let slope = fit.and_then(|fit| fit.kv_bytes_per_s);
    let title = match slope {
        Some(rate) => format!("{} {}: KV read at {}", first.engine, first.dtype, BytesPerSecond(rate)),
        None if fit.is_some() => format!("{} {}: no slope over the KV", first.engine, first.dtype),
        None => format!("{} {}", first.engine, first.dtype),
    };
    let contexts = of.iter().map(|t| t.cell.context as f64);
    let x = Axis::from_zero("context (positions in the KV cache)", Measure::Count, contexts)?;
    let y = Axis::from_zero("TPOT", Measure::Time, times)?;
    let key = |&batch: &usize| Key::mark(style(batch), Shape::Circle, format!("batch {batch}"));
    Some(Chart {
        lines,
        marks: marks.collect(),
        legend: batches.iter().map(key).collect(),
        ..Chart::new(format!("tpot-context-{index}"), title, Span::Half, x, y)
    })
}

fn hover(timed: &Timed<'_>, fit: Option<&FittedModel>) -> String {
    let mut text = format!("{}\nTPOT {}", timed.cell.id, Measure::Time.show(timed.time_ns));
    if let Some((low, high)) = timed.interval_ns {
        let what = if timed.cell.all_blocks.is_some() { "all blocks" } else { "95 %" };
        let _ = write!(text, "\n{what}: {} to {}", Measure::Time.show(low), Measure::Time.show(high));
    }
    if let Some(fit) = fit {
        let _ = write!(text, "\nfit: {}", Measure::Time.show(fitted_ns(fit, timed)));
    }
    text
}

fn table(report: &Report, decode: &[Timed<'_>]) -> Vec<Column> {
    let of = |show: &dyn Fn(&Timed<'_>) -> String| decode.iter().map(show).collect::<Vec<_>>();
    let fitted = |t: &Timed<'_>| {
        let fit = report.fits.iter().find(|f| f.engine == t.cell.engine && f.dtype == t.cell.dtype);
        fit.map_or("-".to_owned(), |fit| Measure::Time.show(fitted_ns(fit, t)))
    };
    let end = |pick: fn((f64, f64)) -> f64| {
        move |t: &Timed<'_>| t.interval_ns.map_or("-".to_owned(), |i| Measure::Time.show(pick(i)))
    };
    vec![
        words("engine", of(&|t| t.cell.engine.clone())),
        words("dtype", of(&|t| t.cell.dtype.to_string())),
        numbers("batch", of(&|t| t.cell.batch.to_string())),
        numbers("context", of(&|t| t.cell.context.to_string())),
        numbers("KV read", of(&|t| t.cell.bytes.kv_read.to_string())),
        numbers("TPOT", of(&|t| Measure::Time.show(t.time_ns))),
        numbers("from", of(&end(|i| i.0))),
        numbers("to", of(&end(|i| i.1))),
        numbers("fit", of(&fitted)),
        words("validity", of(&|t| status_word(t.cell.status).to_owned())),
    ]
}
