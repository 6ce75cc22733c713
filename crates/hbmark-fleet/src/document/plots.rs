//! The drawings of a page: every GPU a dot, the fleet as a map of nodes and slots, and named GPUs over days.

use std::collections::{BTreeMap, BTreeSet};

use crate::metric::Metric;
use crate::result::{FleetReport, GpuRow, State};
use hbmark_report::output::document::{Block, Table, numbers, words};
use hbmark_report::output::plot::axis::{Axis, Measure};
use hbmark_report::output::plot::{Chart, Drawing, Key, Label, Line, Mark, Plot, Shape, Span};

/// Nodes side by side in one strip of the map.
const NODES_A_STRIP: usize = 96;
/// Dots of all metrics together; beyond, a metric has those GPUs alone that are not near the median.
const DOTS: usize = 12_000;
/// GPUs drawn over days.
const TRENDS: usize = 12;

pub(super) fn plots(report: &FleetReport) -> Vec<Block> {
    let metrics: BTreeSet<(&str, &Metric)> = report
        .groups
        .iter()
        .flat_map(|group| group.metrics.iter().map(|metric| (group.device.as_str(), &metric.metric)))
        .collect();
    let mut blocks = Vec::new();
    let heading = |title: &str| Block::Heading { title: title.to_owned(), anchor: None };
    blocks.push(heading("every GPU"));
    let mut room = DOTS;
    let mut drawings: Vec<Drawing> = Vec::new();
    for (device, metric) in &metrics {
        let dots = ratios(report, device, metric);
        // The first metric has every GPU, however many there are.
        let every = drawings.is_empty() || dots.len() <= room;
        room = if every { room.saturating_sub(dots.len()) } else { room };
        drawings.extend(distribution(report, device, metric, &dots, every));
    }
    if drawings.is_empty() {
        blocks.push(Block::absent("No GPU was judged."));
    } else {
        let caption = "A dot is a GPU: its median over fresh processes, relative to the fleet's median, in the order of nodes and slots. What \
                       its slot has in common over all nodes is taken out.";
        let plot = Plot::new(drawings, vec![caption.into()], vec![named(report)]);
        blocks.push(Block::Plot(Plot { open: 1, ..plot }));
    }
    if let Some((device, metric)) = metrics.first() {
        blocks.push(heading("rack × node × slot"));
        blocks.push(map(report, device, metric));
    }
    blocks.extend(trend(report).into_iter().flat_map(|plot| [heading("day by day"), plot]));
    blocks
}

fn style(state: State) -> &'static str {
    match state {
        State::Ok | State::NotConfirmed => "c0 small",
        State::Suspect | State::Unstable => "c1",
        State::Slow | State::WrongOutput | State::Failed => "bad",
        State::TooFew | State::NoPeers | State::Missing => "floor",
    }
}

/// Ratios to the fleet's median, with their GPUs, in the order of the report.
fn ratios<'a>(report: &'a FleetReport, device: &str, metric: &Metric) -> Vec<(&'a GpuRow, f64)> {
    let of = |row: &'a GpuRow| {
        let value = row.values.iter().find(|value| value.metric == *metric)?;
        Some((row, 1.0 + value.effect?))
    };
    report.gpus.iter().filter(|row| row.device == device).filter_map(of).collect()
}

fn hover(row: &GpuRow, ratio: f64) -> String {
    let slot = row.slot.map_or_else(String::new, |slot| format!(" slot {slot}"));
    format!("{}{slot} {}: {:.2} % of the median, {}", row.node, row.gpu, ratio * 100.0, row.state.word())
}

fn distribution(
    report: &FleetReport,
    device: &str,
    metric: &Metric,
    dots: &[(&GpuRow, f64)],
    every: bool,
) -> Option<Drawing> {
    let near = |row: &GpuRow, ratio: f64| {
        row.state == State::Ok && (1.0 - ratio).abs() <= report.settings.margin / 2.0
    };
    let limit = 1.0 - report.settings.margin;
    let x = Axis::from_zero("GPU, in the order of nodes", Measure::Count, [1.0, dots.len() as f64])?;
    let y = Axis::around(
        "speed over the fleet's median",
        Measure::Share,
        dots.iter().map(|(_, ratio)| *ratio).chain([1.0, limit]),
    )?;
    let shown = dots.iter().enumerate().filter(|(_, (row, ratio))| every || !near(row, *ratio));
    let marks = shown.map(|(index, (row, ratio))| {
        let shape = if row.state == State::Slow { Shape::Cross } else { Shape::Circle };
        Mark::new(style(row.state), shape, (index as f64, *ratio), hover(row, *ratio))
    });
    let level = |style: &str, at: f64| Line::new(style, vec![(x.low(), at), (x.high(), at)]);
    let lines = vec![level("level", 1.0), level("goal", limit)];
    let marks = marks.collect();
    let left_out = if every { "" } else { ", without those within half of the margin" };
    let title = format!("{metric} of {} {device}{left_out}", dots.len());
    Some(Drawing::Chart(Chart {
        lines,
        marks,
        legend: legend(),
        ..Chart::new("fleet-distribution", title, Span::Full, x, y)
    }))
}

fn legend() -> Vec<Key> {
    vec![
        Key::mark("c0", Shape::Circle, "ok"),
        Key::mark("c1", Shape::Circle, "suspect or unstable"),
        Key::mark("bad", Shape::Cross, "slow, confirmed"),
        Key::line("goal", "margin"),
    ]
}

/// A GPU's largest loss, and of which metric.
fn worst(row: &GpuRow) -> Option<(f64, &Metric)> {
    let effects = row.values.iter().filter_map(|value| Some((value.effect?, &value.metric)));
    effects.min_by(|a, b| a.0.total_cmp(&b.0))
}

/// GPUs that are not ok.
fn named(report: &FleetReport) -> Table {
    let rows: Vec<&GpuRow> =
        report.gpus.iter().filter(|row| row.state != State::Ok).take(super::ROWS).collect();
    vec![
        words("state", rows.iter().map(|row| row.state.word().to_owned())),
        words("node", rows.iter().map(|row| row.node.clone())),
        words("slot", rows.iter().map(|row| row.slot.map_or_else(|| "-".into(), |slot| slot.to_string()))),
        words("GPU", rows.iter().map(|row| row.gpu.clone())),
        numbers(
            "worst",
            rows.iter().map(|row| {
                worst(row).map_or_else(|| "-".into(), |(effect, _)| format!("{:+.2} %", effect * 100.0))
            }),
        ),
        words("of", rows.iter().map(|row| worst(row).map_or_else(|| "-".into(), |(_, m)| m.to_string()))),
    ]
    .into()
}

/// Nodes in the order of racks along, slots upwards, coloured by how far from the median a GPU is.
fn map(report: &FleetReport, device: &str, metric: &Metric) -> Block {
    let mut nodes: BTreeMap<(String, &str), Vec<(&GpuRow, f64)>> = BTreeMap::new();
    for (row, ratio) in ratios(report, device, metric) {
        let rack = row.rack.clone().unwrap_or_default();
        nodes.entry((rack, &row.node)).or_default().push((row, ratio));
    }
    let all: Vec<_> = nodes.into_iter().collect();
    let slots: Vec<f64> =
        all.iter().flat_map(|(_, gpus)| gpus).filter_map(|(g, _)| g.slot).map(f64::from).collect();
    let drawings: Vec<Drawing> = all
        .chunks(NODES_A_STRIP)
        .enumerate()
        .filter_map(|(strip, nodes)| {
            let x = Axis::from_zero("node", Measure::Count, [nodes.len() as f64])?;
            let y = Axis::around("slot", Measure::Count, slots.iter().copied().chain([0.0, 8.0]))?;
            let mut marks = Vec::new();
            let mut lines = Vec::new();
            let mut rack = None;
            for (index, ((of, _), gpus)) in nodes.iter().enumerate() {
                let at = index as f64 + 0.5;
                if rack != Some(of) && !of.is_empty() {
                    let line = Line::new("level", vec![(index as f64, y.low()), (index as f64, y.high())]);
                    lines.push(Line { label: Some((Label::Above, of.clone())), ..line });
                    rack = Some(of);
                }
                for (row, ratio) in gpus {
                    let style = heat(*ratio, report.settings.margin);
                    let slot = f64::from(row.slot.unwrap_or(0));
                    marks.push(Mark::new(style, Shape::Square, (at, slot), hover(row, *ratio)));
                }
            }
            let (first, last) = (nodes.first()?.0.1, nodes.last()?.0.1);
            let title = format!("{metric}, {first} to {last}");
            let chart = Chart::new(format!("fleet-map-{strip}"), title, Span::Strip, x, y);
            Some(Drawing::Chart(Chart { marks, lines, legend: heat_legend(), ..chart }))
        })
        .collect();
    let caption = "A square is a GPU; a column is a node, upright lines are where a rack begins. A whole column points to the node, a row to \
                   a slot's air or power, a block of columns to a rack.";
    let table = slot_table(report);
    Block::Plot(Plot { open: 4, ..Plot::new(drawings, vec![caption.into()], table) })
}

fn heat(ratio: f64, margin: f64) -> &'static str {
    match (1.0 - ratio) / margin {
        far if far > 1.0 => "bad",
        far if far > 0.5 => "c1",
        far if far < -0.5 => "c2",
        _ => "floor",
    }
}

fn heat_legend() -> Vec<Key> {
    vec![
        Key::mark("c2", Shape::Square, "faster by half the margin"),
        Key::mark("floor", Shape::Square, "within half the margin"),
        Key::mark("c1", Shape::Square, "slower by half the margin"),
        Key::mark("bad", Shape::Square, "slower than the margin"),
    ]
}

/// What each slot has in common over nodes.
fn slot_table(report: &FleetReport) -> Vec<Table> {
    let rows: Vec<(String, u32, f64)> = report
        .groups
        .iter()
        .flat_map(|group| group.metrics.iter())
        .flat_map(|metric| metric.slots.iter().map(|(slot, e)| (metric.metric.to_string(), *slot, *e)))
        .collect();
    if rows.is_empty() {
        return Vec::new();
    }
    let columns = vec![
        words("metric", rows.iter().map(|(metric, ..)| metric.clone())),
        numbers("slot", rows.iter().map(|(_, slot, _)| slot.to_string())),
        numbers("in common", rows.iter().map(|(.., effect)| format!("{:+.2} %", effect * 100.0))),
    ];
    vec![Table::titled("effect of each slot", columns)]
}

/// Named GPUs over the days that were given, and the fleet's median beside them.
fn trend(report: &FleetReport) -> Option<Block> {
    if report.days.is_empty() {
        return None;
    }
    let metric = report.groups.iter().flat_map(|group| &group.metrics).map(|m| &m.metric).min()?;
    let now = report.days.len() as f64;
    let mut lines: BTreeMap<&str, Vec<(f64, f64)>> = BTreeMap::new();
    for (index, day) in report.days.iter().enumerate() {
        for (gpu, of, effect) in day.effects.iter().filter(|(_, of, _)| of == metric) {
            debug_assert_eq!(of, metric);
            lines.entry(gpu).or_default().push((index as f64, 1.0 + effect));
        }
    }
    for row in &report.gpus {
        if let Some(points) = lines.get_mut(row.gpu.as_str())
            && let Some(effect) = row.values.iter().find(|v| v.metric == *metric).and_then(|v| v.effect)
        {
            points.push((now, 1.0 + effect));
        }
    }
    // A median of today over that day, so that day over today is its inverse.
    let mut fleet: Vec<(f64, f64)> = report
        .days
        .iter()
        .enumerate()
        .filter_map(|(index, day)| {
            let shift = day.shifts.iter().find(|shift| shift.metric == *metric)?;
            Some((index as f64, 1.0 / (1.0 + shift.shift)))
        })
        .collect();
    fleet.push((now, 1.0));
    let shown: Vec<(&str, Vec<(f64, f64)>)> = lines.into_iter().take(TRENDS).collect();
    let x = Axis::from_zero("day, the last one is this report", Measure::Count, [now])?;
    let values = shown.iter().flat_map(|(_, points)| points).chain(&fleet).map(|point| point.1);
    let y = Axis::around(
        "speed over the fleet's median of that day",
        Measure::Share,
        values.collect::<Vec<_>>(),
    )?;
    let mut drawn =
        vec![Line { label: Some((Label::Beyond, "fleet, over today's".into())), ..Line::new("goal", fleet) }];
    drawn.extend(shown.iter().enumerate().map(|(index, (gpu, points))| Line {
        label: Some((Label::Beyond, gpu.chars().take(12).collect())),
        ..Line::new(format!("c{}", index % 6), points.clone())
    }));
    let caption = "Each line is a GPU that is named today, relative to the fleet's median of its day; dashed, the median of the fleet itself \
                   over today's.";
    let chart = Chart { lines: drawn, ..Chart::new("fleet-trend", metric.to_string(), Span::Full, x, y) };
    Some(Block::Plot(Plot::new(vec![Drawing::Chart(chart)], vec![caption.into()], Vec::new())))
}
