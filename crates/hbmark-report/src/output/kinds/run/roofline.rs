//! The roofline: FLOP/s of each cell over its arithmetic intensity, below the measured ceilings and, dashed, those of the data sheet.

use std::fmt::Write;

use super::palette::{Palette, Timed, is_invalid, look, of_imported, timed};
use super::{bound_word, status_word, when_measured};
use crate::analysis::distinct;
use crate::output::External;
use crate::output::document::{Block, Column, numbers, words};
use crate::output::plot::axis::{Axis, Measure};
use crate::output::plot::{Chart, Drawing, Key, Label, Line, Mark, Plot, Shape, Span};
use hbmark_core::ledger::{Floor, Roof, StepCost};
use hbmark_core::result::{CellResult, Phase, Report, ReportKind};
use hbmark_core::units::{BytesPerSecond, Flops, FlopsPerSecond};

struct Dot<'a> {
    timed: Timed<'a>,
    /// FLOP per byte.
    intensity: f64,
    flops_per_s: f64,
    /// Of the roof above it.
    share: Option<f64>,
    imported: Option<Imported<'a>>,
}

/// A row of another program's file.
#[derive(Clone, Copy)]
struct Imported<'a> {
    file: &'a str,
    /// Of the files in the order they were given.
    number: usize,
    label: &'a str,
}

impl Imported<'_> {
    fn name(self) -> String {
        format!("{} {}", self.file, self.label)
    }
}

/// One roof over the plot: a slope, and a level where a peak is known.
struct Ceiling {
    bandwidth: f64,
    peak: Option<(&'static str, f64)>,
    measured: bool,
}

pub fn plot(report: &Report, palette: &Palette, externals: &[External]) -> Block {
    let files = distinct(externals.iter().map(|external| external.file.as_str()));
    let imported = externals.iter().filter_map(|e| {
        let time_ns = e.cell.tpot_ns.filter(|t| t.is_finite() && *t > 0.0)?;
        let number = files.iter().position(|file| *file == e.file)?;
        let imported = Imported { file: &e.file, number, label: &e.label };
        dot(report, Timed { cell: &e.cell, time_ns, interval_ns: None }, Some(imported))
    });
    let dots: Vec<Dot<'_>> =
        timed(report).filter_map(|timed| dot(report, timed, None)).chain(imported).collect();
    if dots.is_empty() {
        return Block::absent(
            "No cell of this result has a time, so there is no point to hold against the roof.",
        );
    }
    let ceilings = ceilings(report, &dots);
    let ridges = || ceilings.iter().filter_map(|c| Some(c.peak?.1 / c.bandwidth));
    let peaks = || ceilings.iter().filter_map(|c| Some(c.peak?.1));
    let xs = dots.iter().map(|d| d.intensity).chain(ridges());
    let ys = dots.iter().map(|d| d.flops_per_s).chain(peaks());
    let axes = Axis::log("intensity (FLOP per byte to be moved)", Measure::FlopsPerByte, xs, 1.8)
        .zip(Axis::log("arithmetic rate", Measure::FlopsPerSecond, ys, 1.8));
    let Some((x, y)) = axes else {
        return Block::absent("The rates of this result cannot be drawn.");
    };
    let chart = Chart {
        lines: roofs(&ceilings, &x, &y),
        marks: dots.iter().map(|dot| mark(dot, palette)).collect(),
        legend: legend(report, &dots, &ceilings, palette),
        ..Chart::new("roofline", format!("Roofline of {}", report.model.name), Span::Full, x, y)
    };
    let distance = match report.kind {
        ReportKind::Run => {
            "The distance of a point from the roof above it is what kernels, copies and launches cost"
        }
        ReportKind::Predict if report.group.is_some() => {
            "Predicted points lie below the roofline of a GPU by what the GPUs exchange; nothing was measured"
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
    Block::Plot(Plot::new(vec![Drawing::Chart(chart)], caption, vec![table(&dots).into()]))
}

fn dot<'a>(report: &Report, timed: Timed<'a>, imported: Option<Imported<'a>>) -> Option<Dot<'a>> {
    let bytes = timed.cell.bytes.ideal().as_f64();
    let flops = timed.cell.flops;
    (bytes > 0.0 && flops > 0.0 && flops.is_finite()).then(|| Dot {
        intensity: flops / bytes,
        flops_per_s: flops / timed.time_ns * 1e9,
        share: floor(report, timed.cell).map(|floor| floor / timed.time_ns),
        timed,
        imported,
    })
}

/// The time on the roof. That of a group's step has in it what the GPUs exchange, and the roof has not.
fn floor(report: &Report, cell: &CellResult) -> Option<f64> {
    if cell.group.is_none() {
        return cell.predicted_ns;
    }
    let roof = Roof::of_model(report.datasheet.as_ref()?, cell.dtype, &report.model.architecture);
    let (bytes, flops) = (cell.bytes, Flops(cell.flops));
    Some(Floor::new(&StepCost { bytes, flops, distinct_experts: cell.distinct_experts }, &roof).time().0)
}

/// The roofs of the dtypes that were run, each once.
fn ceilings(report: &Report, dots: &[Dot<'_>]) -> Vec<Ceiling> {
    let dtypes = distinct(dots.iter().map(|dot| dot.timed.cell.dtype));
    let measured = dtypes.iter().filter_map(|&d| Some((Roof::measured(report.ceilings.as_ref()?, d), true)));
    let of_model = |d, sheet| Roof::of_model(sheet, d, &report.model.architecture);
    let sheet = dtypes.iter().filter_map(|&d| Some((of_model(d, report.datasheet.as_ref()?), false)));
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
        let style = if measured { "roof" } else { "roof dashed" };
        let of_kind = || ceilings.iter().filter(|c| c.measured == measured);
        // The slope is one for all dtypes, up to the highest level.
        if let Some(first) = of_kind().next() {
            let top = of_kind().filter_map(|c| Some(c.peak?.1)).fold(0.0, f64::max);
            let top = if top > 0.0 && of_kind().all(|c| c.peak.is_some()) { top } else { y.high() };
            let from = x.low().max(y.low() / first.bandwidth);
            let to = x.high().min(top / first.bandwidth);
            let text = format!(
                "{} {}",
                if measured { "read" } else { "data sheet" },
                BytesPerSecond(first.bandwidth)
            );
            let label = (to > from * 2.0).then_some((Label::Along, text));
            let points = [from, to].map(|x| (x, x * first.bandwidth));
            lines.push(Line { label, ..Line::new(style, points.to_vec()) });
        }
        for ceiling in of_kind() {
            let Some((dtype, rate)) = ceiling.peak else { continue };
            let source = if measured { "" } else { "data sheet " };
            let label = Some((Label::Above, format!("{source}{dtype} {}", FlopsPerSecond(rate))));
            let points = vec![(rate / ceiling.bandwidth, rate), (x.high(), rate)];
            lines.push(Line { label, ..Line::new(style, points) });
        }
    }
    lines
}

/// The style and shape of a dot's mark.
fn mark_look(dot: &Dot<'_>, palette: &Palette) -> (String, Shape) {
    let cell = dot.timed.cell;
    let (style, shape) = match (dot.imported, cell.phase) {
        (Some(imported), _) => (of_imported(imported.number), Shape::Triangle),
        (None, Phase::Decode) => (palette.style(&cell.engine, cell.dtype), Shape::Circle),
        (None, Phase::Verify { .. }) => (palette.style(&cell.engine, cell.dtype), Shape::Diamond),
        (None, Phase::Prefill) => (palette.style(&cell.engine, cell.dtype), Shape::Square),
    };
    look(cell, style, shape)
}

fn mark(dot: &Dot<'_>, palette: &Palette) -> Mark {
    let cell = dot.timed.cell;
    let name = match dot.imported {
        Some(row) => {
            format!(
                "{}, imported: {}\nbatch {}, context {}",
                cell.engine,
                row.name(),
                cell.batch,
                cell.context
            )
        }
        None => cell.id.clone(),
    };
    let mut hover = format!(
        "{name}\n{} in {}\n{} per byte",
        Measure::FlopsPerSecond.show(dot.flops_per_s),
        Measure::Time.show(dot.timed.time_ns),
        Measure::FlopsPerByte.show(dot.intensity).replace("/B", "")
    );
    if let Some(fraction) = dot.share {
        let _ = write!(hover, "\n{} of the roof", Measure::Share.show(fraction));
    }
    let (style, shape) = mark_look(dot, palette);
    Mark::new(style, shape, (dot.intensity, dot.flops_per_s), hover)
}

fn legend(report: &Report, dots: &[Dot<'_>], ceilings: &[Ceiling], palette: &Palette) -> Vec<Key> {
    let keys = dots.iter().map(|dot| {
        let cell = dot.timed.cell;
        let text = match dot.imported {
            _ if is_invalid(cell) => "INVALID".to_owned(),
            Some(row) => format!("{} (imported from {})", cell.engine, row.file),
            None => {
                let phase = match cell.phase {
                    Phase::Verify { .. } => "verify".to_owned(),
                    phase => phase.to_string(),
                };
                let doubt = cell.all_blocks.as_ref().map(|_| format!(", {}", status_word(cell.status)));
                format!("{phase} {} {}{}", cell.engine, cell.dtype, doubt.unwrap_or_default())
            }
        };
        let (style, shape) = mark_look(dot, palette);
        Key::mark(style, shape, text)
    });
    let mut keys = distinct(keys);
    let measured = report.ceilings.as_ref().map(|known| format!("ceiling measured {}", when_measured(known)));
    let roofs =
        [(true, "roof", measured.unwrap_or_default()), (false, "roof dashed", "data sheet".to_owned())];
    let known = roofs.into_iter().filter(|roof| ceilings.iter().any(|c| c.measured == roof.0));
    keys.extend(known.map(|(_, style, text)| Key::line(style, text)));
    keys
}

fn table(dots: &[Dot<'_>]) -> Vec<Column> {
    let of = |show: &dyn Fn(&Dot<'_>) -> String| dots.iter().map(show).collect::<Vec<_>>();
    let share = |d: &Dot<'_>| d.share.map_or("-".to_owned(), |share| Measure::Share.show(share));
    vec![
        words("cell", of(&|d| d.imported.map_or_else(|| d.timed.cell.id.clone(), Imported::name))),
        numbers("time", of(&|d| Measure::Time.show(d.timed.time_ns))),
        numbers("intensity", of(&|d| Measure::FlopsPerByte.show(d.intensity))),
        numbers("rate", of(&|d| Measure::FlopsPerSecond.show(d.flops_per_s))),
        numbers("of the roof", of(&share)),
        words("bound", of(&|d| d.timed.cell.bound.map_or("-", bound_word).to_owned())),
        words("validity", of(&|d| status_word(d.timed.cell.status).to_owned())),
    ]
}
