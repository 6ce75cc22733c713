//! Verify steps of speculative decoding: what they cost, and the speed-up over acceptance.
//!
//! Enters: what [`crate::analysis::speculation`] worked out. Leaves: a table and a chart, in a document of their own or in that of a run.

use super::run::palette::numbered;
use super::run::status_word;
use crate::analysis::distinct;
use crate::analysis::speculation::{Acceptance, Speculation, VerifyRow};
use crate::analysis::words::counted;
use crate::output::Kind;
use crate::output::document::{
    Block, Column, Document, Line, Table, Tone, facts, measured, numbers, split_constants, words,
};
use crate::output::metrics::Unit;
use crate::output::plot::axis::{Axis, Measure};
use crate::output::plot::{Chart, Drawing, Key, Line as PlotLine, Plot, Span};

/// Acceptance rates that have a column.
const SHOWN: [(f64, &str); 4] = [(0.5, "at 50 %"), (0.7, "at 70 %"), (0.9, "at 90 %"), (1.0, "all accepted")];

/// Charts that are not folded away.
const OPEN: usize = 4;

/// How a reader takes the numbers.
const READING: &str = "A step brings 1 + p + … + p^k tokens of each sequence, where each of k draft tokens is accepted with probability p if all \
                       before it were. The speed-up is the decode step over the effective time per output token; below 1 speculation loses.";

impl Kind for Speculation {
    fn document(&self) -> Document {
        let predicted = if self.predicted { "PREDICTED · " } else { "" };
        let steps = counted(self.rows.len(), "verify step");
        let mut document =
            Document::new(format!("{predicted}{}: {steps} of speculative decoding", self.model));
        document.lines([Line::plain(drafting(self)), Line::Said(Tone::Faint, READING.to_owned())]);
        document.lines(self.acceptance.as_ref().map(|acceptance| Line::plain(assumed(acceptance))));
        push_table(&mut document, &self.rows);
        document.section("caveats", caveats(self));
        document.sheet = Some(sheet(&self.rows));
        document
    }

    fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self)
    }

    fn page(&self) -> Document {
        let mut page = Document { sheet: None, ..self.document() };
        page.anchored("speed-up", "Speed-up over acceptance");
        page.blocks.push(plot(&self.rows, &[]));
        page
    }
}

/// The verify steps of a run, under a heading of their own, where it has any. Drafting costs nothing there.
pub fn push(document: &mut Document, found: &Speculation) {
    if found.rows.is_empty() {
        return;
    }
    document.heading("speculative decoding: verify steps beside the decode step");
    push_table(document, &found.rows);
    document.list([READING.to_owned(), FREE.to_owned()]);
}

const FREE: &str = "Drafting costs no time here: `hbmark speculate` adds that of a draft model, and an acceptance of your own.";

/// The chart of a run's page, where it has verify steps.
pub fn push_plot(page: &mut Document, found: &Speculation) {
    if found.rows.is_empty() {
        return;
    }
    page.anchored("speculation", "Speculative decoding");
    page.blocks.push(plot(&found.rows, &[READING]));
    page.lines([Line::plain(FREE)]);
}

fn drafting(found: &Speculation) -> String {
    let times = || found.rows.iter().filter_map(|row| row.draft_ns);
    match &found.draft_model {
        Some(model) => {
            let mut series: Vec<&str> =
                found.rows.iter().filter_map(|row| row.draft_series.as_deref()).collect();
            series.dedup();
            format!("drafted by {model} ({}): one decode step of it for each draft token", series.join(", "))
        }
        None if times().any(|time| time > 0.0) => {
            let time = times().fold(0.0, f64::max);
            format!("drafting takes {} for each draft token", hbmark_core::units::Nanos(time))
        }
        None => "drafting costs no time (prompt lookup)".to_owned(),
    }
}

fn assumed(acceptance: &Acceptance) -> String {
    match acceptance {
        Acceptance::Rate(rate) => {
            format!("assumed: {:.0} % of draft tokens behind accepted ones are accepted", rate * 100.0)
        }
        Acceptance::RatePerPosition(rates) => {
            let rates: Vec<String> = rates.iter().map(|rate| format!("{:.0} %", rate * 100.0)).collect();
            format!("assumed: accepted at each position in {} of steps", rates.join(", "))
        }
        Acceptance::Length(length) => {
            format!("assumed: a step brings {length} tokens of a sequence on average")
        }
    }
}

fn caveats(found: &Speculation) -> Vec<String> {
    let mut caveats =
        vec!["what is accepted was not measured: it depends on text, model and draft".to_owned()];
    let untimed = found.rows.iter().filter(|row| row.draft_ns.is_none()).count();
    if untimed > 0 {
        caveats.push(format!(
            "{} without a draft time: the draft model was not timed at their batch and context",
            counted(untimed, "row")
        ));
    }
    if found.acceptance.is_some()
        && found.rows.iter().any(|row| row.assumed.is_none() && row.draft_ns.is_some())
    {
        caveats.push(
            "rows without an effective TPOT: the assumed acceptance says nothing of so many draft tokens, or is more than they can bring"
                .to_owned(),
        );
    }
    if found.predicted {
        caveats.push(
            "times are floors: an engine may read the cache once for each token, and launches more"
                .to_owned(),
        );
    }
    caveats
}

fn ratio(value: f64) -> String {
    format!("{value:.2}")
}

fn optional(value: Option<f64>, show: impl Fn(f64) -> String) -> String {
    value.map_or_else(|| "-".to_owned(), show)
}

fn push_table(document: &mut Document, rows: &[VerifyRow]) {
    let (constants, columns) = split_constants(columns(rows), |column| rows.len() > 1 && column.key);
    document.lines(
        (!constants.is_empty()).then(|| Line::Said(Tone::Faint, format!("all steps: {}", facts(&constants)))),
    );
    document.blocks.push(Block::Table(Table::from(columns)));
}

fn columns(rows: &[VerifyRow]) -> Vec<Column> {
    let text = |of: &dyn Fn(&VerifyRow) -> String| rows.iter().map(of).collect::<Vec<_>>();
    let time = |title: &str, of: &dyn Fn(&VerifyRow) -> Option<f64>| {
        measured(title, Unit::Nanoseconds, rows.iter().map(of))
    };
    let with_interval = |row: &VerifyRow| match row.ratio_low.zip(row.ratio_high) {
        Some((low, high)) => format!("{} ({} to {})", ratio(row.ratio), ratio(low), ratio(high)),
        None => ratio(row.ratio),
    };
    // More tokens than a step of so many draft tokens can bring.
    let break_even = |row: &VerifyRow| match (row.break_even_length, row.break_even_rate) {
        (Some(_), None) => "never".to_owned(),
        (_, rate) => optional(rate, |rate| format!("{:.0} %", rate * 100.0)),
    };
    let mut columns = vec![
        words("engine", text(&|row| row.engine.clone())).key(),
        words("dtype", text(&|row| row.dtype.to_string())).key(),
        numbers("batch", text(&|row| row.batch.to_string())).key(),
        numbers("context", text(&|row| row.context.to_string())).key(),
        numbers("draft tokens", text(&|row| row.draft_tokens.to_string())),
        time("decode", &|row| Some(row.decode_ns)),
        time("verify", &|row| Some(row.verify_ns)),
        numbers("verify/decode", text(&with_interval)),
        numbers("floors", text(&|row| optional(row.floor_ratio, ratio))),
        numbers("experts", text(&|row| optional(row.verify_experts, |experts| format!("{experts:.1}")))),
        time("drafting", &|row| {
            row.draft_ns.filter(|time| *time > 0.0).map(|time| time * row.draft_tokens as f64)
        }),
        numbers("break-even tokens", text(&|row| optional(row.break_even_length, ratio))),
        numbers("break-even rate", text(&break_even)),
    ];
    columns.extend(SHOWN.map(|(rate, title)| {
        numbers(title, text(&|row| optional(row.speedup_at(rate), |speedup| format!("{speedup:.2}×"))))
    }));
    columns.push(time("TPOT", &|row| row.assumed.map(|point| point.tpot_ns)));
    let speedup = |row: &VerifyRow| {
        optional(row.assumed.map(|point| point.speedup), |speedup| format!("{speedup:.2}×"))
    };
    columns.push(numbers("speed-up", text(&speedup)));
    columns.push(words("validity", text(&|row| status_word(row.status).to_owned())));
    columns.retain(|column| !column.is_empty());
    columns
}

/// Every number of every row.
fn sheet(rows: &[VerifyRow]) -> Vec<Column> {
    let text = |of: &dyn Fn(&VerifyRow) -> String| rows.iter().map(of).collect::<Vec<_>>();
    let number = |title: &str, unit: Unit, of: &dyn Fn(&VerifyRow) -> Option<f64>| {
        measured(title, unit, rows.iter().map(of))
    };
    let mut columns = vec![
        words("engine", text(&|row| row.engine.clone())),
        words("dtype", text(&|row| row.dtype.to_string())),
        numbers("batch", text(&|row| row.batch.to_string())),
        numbers("context", text(&|row| row.context.to_string())),
        numbers("draft_tokens", text(&|row| row.draft_tokens.to_string())),
        words("validity", text(&|row| status_word(row.status).to_owned())),
        number("decode", Unit::Nanoseconds, &|row| Some(row.decode_ns)),
        number("verify", Unit::Nanoseconds, &|row| Some(row.verify_ns)),
        number("draft", Unit::Nanoseconds, &|row| row.draft_ns),
        number("ratio", Unit::Count, &|row| Some(row.ratio)),
        number("ratio_low", Unit::Count, &|row| row.ratio_low),
        number("ratio_high", Unit::Count, &|row| row.ratio_high),
        number("floor_ratio", Unit::Count, &|row| row.floor_ratio),
        number("break_even_length", Unit::Count, &|row| row.break_even_length),
        number("break_even_rate", Unit::Count, &|row| row.break_even_rate),
    ];
    for rate in crate::analysis::speculation::CURVE {
        let title = format!("speedup_at_{:.0}", rate * 100.0);
        columns.push(number(&title, Unit::Count, &|row| row.speedup_at(rate)));
    }
    columns.push(number("assumed_tpot", Unit::Nanoseconds, &|row| row.assumed.map(|point| point.tpot_ns)));
    columns.push(number("assumed_speedup", Unit::Count, &|row| row.assumed.map(|point| point.speedup)));
    columns
}

/// A chart for each engine, dtype, batch and context: a line for each number of draft tokens.
fn plot(rows: &[VerifyRow], caption: &[&str]) -> Block {
    let place = |row: &VerifyRow| (row.engine.clone(), row.dtype, row.batch, row.context);
    let places = distinct(rows.iter().filter(|row| !row.curve.is_empty()).map(place));
    let charts = places
        .iter()
        .filter_map(|here| chart(&rows.iter().filter(|row| place(row) == *here).collect::<Vec<_>>()));
    let drawings: Vec<Drawing> = charts.map(Drawing::Chart).collect();
    let caption = caption.iter().map(|line| (*line).to_owned()).collect();
    if drawings.is_empty() {
        return Block::absent("No verify step has both a time and a time of drafting.");
    }
    Block::Plot(Plot { open: OPEN, ..Plot::new(drawings, caption, Vec::new()) })
}

fn chart(rows: &[&VerifyRow]) -> Option<Chart> {
    let first = rows.first()?;
    let speedups = rows.iter().flat_map(|row| row.curve.iter().map(|point| point.speedup));
    let x = Axis::from_zero("acceptance rate of each draft token", Measure::Share, [1.0])?;
    let y = Axis::from_zero("speed-up", Measure::Count, speedups.chain([1.0]))?;
    let (batch, context) = (first.batch, first.context);
    let name = format!("speedup-{}-{}-b{batch}-c{context}", first.engine, first.dtype);
    let title = format!("{} {}, batch {batch}, context {context}", first.engine, first.dtype);
    let mut chart = Chart::new(name, title, Span::Half, x, y);
    chart.lines.push(PlotLine::new("goal", vec![(0.0, 1.0), (1.0, 1.0)]));
    chart.legend.push(Key::line("goal", "plain decode"));
    for (index, row) in rows.iter().enumerate() {
        let style = numbered(index);
        let points = row.curve.iter().filter_map(|point| Some((point.rate?, point.speedup)));
        chart.lines.push(PlotLine::new(style.clone(), points.collect()));
        chart.legend.push(Key::line(style, counted(row.draft_tokens, "draft token")));
    }
    Some(chart)
}

#[cfg(test)]
mod tests;
