//! What a page answers first: its title, and a few figures with the verdict.
//!
//! Enters: a result. Leaves: the title of its page and [`Figure`]s, the verdict the first of them.

use crate::output::document::{Figure, Tone};
use crate::output::kinds::serving::range_over_seeds;
use crate::output::metrics::Unit;
use crate::output::text::single;
use hbmark_core::result::serving::{Point, Quantiles, Quantity, ServeKind, ServeReport, Validity};
use hbmark_core::result::{CellResult, Phase, Report, ReportKind, Status};

/// The title of a run's or a prediction's page.
#[must_use]
pub fn run_title(report: &Report) -> String {
    let kind = if report.kind == ReportKind::Predict { "roofline prediction" } else { "step benchmark" };
    format!("{}: {kind}", report.model.name)
}

/// The title of a serving page.
#[must_use]
pub fn serving_title(report: &ServeReport) -> String {
    let kind = if report.cold_start.is_some() {
        "cold start"
    } else if report.search.is_some() {
        "highest rate"
    } else if !report.matrix.is_empty() {
        "workload matrix"
    } else if report.swept.is_some() {
        "serving sweep"
    } else {
        "serving benchmark"
    };
    let clock = match report.kind {
        ServeKind::ServeVirtual => " on a virtual clock",
        ServeKind::ServeLive => " of a live server",
        _ => "",
    };
    format!("{}: {kind}{clock}", report.model_name())
}

fn figure(name: &str, value: String, note: String) -> Figure {
    Figure { name: name.to_owned(), value, note, tone: Tone::Plain }
}

/// How many of all count, as the verdict.
fn verdict(good: usize, all: usize, what: &str, note: String) -> Figure {
    let tone = match good {
        n if n == all => Tone::Good,
        0 => Tone::Bad,
        _ => Tone::Warning,
    };
    Figure { name: "valid".to_owned(), value: format!("{good} of {all} {what}"), note, tone }
}

/// The figures of a run or of a prediction.
#[must_use]
pub fn run(report: &Report) -> Vec<Figure> {
    let place = |cell: &CellResult| {
        format!("{} {}, batch {}, context {}", cell.engine, cell.dtype, cell.batch, cell.context)
    };
    let predicted = report.kind == ReportKind::Predict;
    let decodes = || report.cells.iter().filter(|cell| cell.phase == Phase::Decode);
    let time = |cell: &CellResult| if predicted { cell.predicted_ns } else { cell.tpot_ns };
    let rate = |cell: &CellResult| {
        let floor = || Some(cell.batch as f64 * 1e9 / cell.predicted_ns?);
        if predicted { floor() } else { cell.tokens_per_s }
    };
    let mut figures = Vec::new();
    if !predicted {
        let valid = report.cells.iter().filter(|cell| cell.status == Status::Ok).count();
        let run = report.cells.iter().filter(|cell| cell.status != Status::Skipped).count();
        let skipped = match report.cells.len() - run {
            0 => String::new(),
            skipped => format!("{skipped} more were skipped"),
        };
        figures.push(verdict(valid, run, "cells", skipped));
    }
    if let Some((cell, ns)) = decodes().find_map(|cell| Some((cell, time(cell)?))) {
        let name = if predicted { "lowest possible TPOT" } else { "TPOT" };
        figures.push(figure(name, single(Unit::Nanoseconds, ns), place(cell)));
    }
    let rates = decodes().filter_map(|cell| Some((cell, rate(cell)?)));
    if let Some((cell, most)) = rates.max_by(|a, b| a.1.total_cmp(&b.1)) {
        let name =
            if predicted { "highest possible output throughput" } else { "output throughput, at most" };
        figures.push(figure(name, format!("{} tok/s", single(Unit::Count, most.round())), place(cell)));
    }
    let shares = decodes().filter_map(|cell| Some((cell, cell.fraction_of_ceiling?)));
    if let Some((cell, share)) = shares.max_by(|a, b| a.1.total_cmp(&b.1)) {
        let name = "of the memory bandwidth, at most";
        figures.push(figure(name, single(Unit::Fraction, share), place(cell)));
    }
    figures
}

/// A percentile of a latency.
fn latency(name: &str, quantiles: Option<&Quantiles>) -> Option<Figure> {
    let q = quantiles?;
    let (level, value) =
        [("p95", q.p95), ("p50", q.p50)].into_iter().find_map(|(level, v)| Some((level, v?)))?;
    let Quantity::Finite(ns) = value else { return None };
    let median = q.p50.map(Quantity::value).filter(|ns| ns.is_finite() && level != "p50");
    let note = median.map_or_else(String::new, |ns| format!("median {}", single(Unit::Nanoseconds, ns)));
    Some(figure(&format!("{name} {level}"), single(Unit::Nanoseconds, ns), note))
}

fn point(point: &Point) -> Vec<Figure> {
    let Some(result) = &point.result else { return Vec::new() };
    let (value, tone) = match (result.validity, result.slo_met) {
        (Validity::Invalid, _) => ("INVALID", Tone::Bad),
        (Validity::Saturated, _) => ("SATURATED", Tone::Bad),
        (_, Some(true)) => ("objectives met", Tone::Good),
        (_, Some(false)) => ("objectives NOT met", Tone::Bad),
        (_, None) if !result.slo.is_empty() => ("objectives undetermined", Tone::Warning),
        _ => ("valid", Tone::Good),
    };
    let offered =
        result.offered_per_s.map_or_else(String::new, |rate| format!("{rate:.3} requests/s offered"));
    let verdict = Figure { name: "verdict".to_owned(), value: value.to_owned(), note: offered, tone };
    let tokens = single(Unit::Count, result.output_tokens_per_s.round());
    let served = format!("{:.3} requests/s served", result.served_per_s);
    let throughput = figure("output throughput", format!("{tokens} tok/s"), served);
    [Some(verdict), latency("TTFT", result.ttft_ns.as_ref()), latency("TPOT", result.tpot_ns.as_ref())]
        .into_iter()
        .flatten()
        .chain([throughput])
        .collect()
}

/// The figures of a serving result.
#[must_use]
pub fn serving(report: &ServeReport) -> Vec<Figure> {
    if let Some(cold) = &report.cold_start {
        let first = &cold.to_first_token;
        let range = format!(
            "{} to {}",
            single(Unit::Nanoseconds, first.min_ns),
            single(Unit::Nanoseconds, first.max_ns)
        );
        return vec![figure(
            "launch to first token, median",
            single(Unit::Nanoseconds, first.median_ns),
            range,
        )];
    }
    let results = || report.points.iter().filter_map(|point| Some((point, point.result.as_ref()?)));
    let most = |of: fn(&Point) -> Option<f64>| {
        let known = report.points.iter().filter_map(|point| Some((point, of(point)?)));
        known.max_by(|a, b| a.1.total_cmp(&b.1))
    };
    let throughput = || {
        let (point, most) = most(|p| Some(p.result.as_ref()?.output_tokens_per_s))?;
        let value = format!("{} tok/s", single(Unit::Count, most.round()));
        Some(figure("output throughput, at most", value, point.label.clone()))
    };
    if let Some(search) = &report.search {
        let (value, tone) = search.max_rate.map_or_else(
            || ("none found".to_owned(), Tone::Bad),
            |rate| (format!("{rate:.3} requests/s"), Tone::Good),
        );
        let note = range_over_seeds(search);
        let found = Figure { name: "highest rate".to_owned(), value, note, tone };
        let objectives: Vec<String> = search.slo.clauses.iter().map(ToString::to_string).collect();
        let objectives = figure("objectives", objectives.join(", "), String::new());
        return [found, objectives].into_iter().chain(throughput()).collect();
    }
    if let [only] = report.points.as_slice() {
        return point(only);
    }
    let valid = results().filter(|(_, result)| result.validity == Validity::Valid).count();
    let mut figures = vec![verdict(valid, results().count(), "points", String::new())];
    let held = most(|p| {
        let result =
            p.result.as_ref().filter(|r| r.validity == Validity::Valid && r.slo_met != Some(false))?;
        result.offered_per_s
    });
    figures.extend(held.map(|(point, rate)| {
        figure("highest rate that held", format!("{rate:.3} requests/s"), point.label.clone())
    }));
    figures.extend(throughput());
    figures
}
