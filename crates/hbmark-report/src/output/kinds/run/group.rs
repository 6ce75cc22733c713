//! A prediction for several GPUs: how the model lies over them, and the parts of each step.
//!
//! Enters: a [`Report`]. Leaves: lines and tables, none where one GPU holds the model.

use std::collections::BTreeSet;

use crate::analysis::distinct;
use crate::output::document::{Block, Column, Document, Line, Table, Tone, measured, numbers, words};
use crate::output::metrics::Unit;
use hbmark_core::result::{
    CellResult, CollectiveKind, CollectiveRow, GroupStep, GroupSummary, Link, Report, StageSummary,
};
use hbmark_core::units::{Bytes, BytesPerSecond, Nanos};

/// Libraries that have a column of their own.
const MOST_MEASURED: usize = 8;

/// What is printed of a group, under its own headings.
pub fn push(document: &mut Document, report: &Report) {
    let Some(group) = &report.group else { return };
    document.heading("group: one model on several GPUs");
    let bytes =
        "bytes of the cells are those of the slowest GPU, stage after stage; memory is that of the fullest";
    document.lines([Line::plain(shape(group)), Line::plain(bytes), Line::Said(Tone::Faint, link(group))]);
    let device = report.datasheet.as_ref().map_or(Bytes(0), |sheet| sheet.memory_bytes);
    document.table(stages(&group.stages, device));
    let steps: Vec<(&CellResult, &GroupStep)> =
        report.cells.iter().filter_map(|cell| Some((cell, cell.group.as_ref()?))).collect();
    if steps.is_empty() {
        return;
    }
    document.blocks.push(Block::Table(Table::titled("parts of a step, one after the other", parts(&steps))));
    document.blocks.push(Block::Table(Table::titled("collectives of a step", collectives(&steps))));
    let measured = steps.iter().flat_map(|(_, step)| &step.measured);
    let sources = measured.map(|row| format!("all-reduces by {}: {}", row.by, row.source));
    document.list(sources.collect::<BTreeSet<_>>());
}

/// `8 GPUs: tensor parallel 8`.
fn shape(group: &GroupSummary) -> String {
    let experts = if group.expert_parallel { ", whole experts dealt out" } else { "" };
    format!(
        "{} GPUs: tensor parallel {}, pipeline parallel {}{experts}",
        group.gpus, group.tensor_parallel_size, group.pipeline_parallel_size
    )
}

fn link(group: &GroupSummary) -> String {
    match &group.link {
        None => "link: not known, communication time is not modelled".to_owned(),
        Some(Link { name, bytes_per_s, reduces, source, .. }) => {
            let adds = if *reduces { ", adds up in the switch" } else { "" };
            format!("link: {name}, {} a GPU in one direction{adds} · {source}", BytesPerSecond(*bytes_per_s))
        }
    }
}

/// The fullest GPU of each stage.
fn stages(stages: &[StageSummary], device: Bytes) -> Vec<Column> {
    let last = |stage: &StageSummary| stage.first_layer.saturating_add(stage.layers).saturating_sub(1);
    let share = |stage: &StageSummary| (device.0 > 0).then(|| stage.weight_bytes.as_f64() / device.as_f64());
    vec![
        words("dtype", stages.iter().map(|stage| stage.dtype.to_string())),
        words("layers", stages.iter().map(|stage| format!("{} to {}", stage.first_layer, last(stage)))),
        measured("weights a GPU", Unit::Bytes, stages.iter().map(|stage| stage.weight_bytes.as_f64())),
        measured("of its memory", Unit::Fraction, stages.iter().map(share)),
        measured("on every GPU alike", Unit::Bytes, stages.iter().map(|s| s.replicated_bytes.as_f64())),
        measured("KV a token", Unit::Bytes, stages.iter().map(|stage| stage.kv_bytes_per_token.as_f64())),
    ]
}

fn parts(steps: &[(&CellResult, &GroupStep)]) -> Vec<Column> {
    let time = |title: &str, of: &dyn Fn(&CellResult, &GroupStep) -> Option<f64>| {
        measured(title, Unit::Nanoseconds, steps.iter().map(|(cell, step)| of(cell, step)))
    };
    let each = |step: &GroupStep| {
        let times: Vec<String> = step.stages_ns.iter().map(|time| Nanos(*time).to_string()).collect();
        times.join(" + ")
    };
    let mut columns = vec![
        words("cell", steps.iter().map(|(cell, _)| cell.id.clone())),
        words("slowest GPU", steps.iter().map(|(_, step)| each(step))),
        time("collectives", &|_, step| step.collectives_ns),
        time("floor", &|cell, _| cell.predicted_ns),
        time("slowest stage", &|_, step| Some(step.interval_ns).filter(|_| step.stages_ns.len() > 1)),
    ];
    let known = distinct(steps.iter().flat_map(|(_, step)| &step.measured).map(|row| row.by.as_str()));
    columns.extend(known.into_iter().take(MOST_MEASURED).map(|by| {
        let of = |_: &CellResult, step: &GroupStep| {
            step.measured.iter().find(|row| row.by == by).map(|row| row.step_ns)
        };
        time(&format!("with {by}"), &of)
    }));
    columns.retain(|column| !column.is_empty());
    columns
}

fn collectives(steps: &[(&CellResult, &GroupStep)]) -> Vec<Column> {
    let rows: Vec<(&str, &CollectiveRow)> = steps
        .iter()
        .flat_map(|(cell, step)| step.collectives.iter().map(|row| (cell.id.as_str(), row)))
        .collect();
    let kind = |row: &CollectiveRow| match row.kind {
        CollectiveKind::AllReduce => "all-reduce",
        CollectiveKind::AllGather => "all-gather",
        CollectiveKind::Send => "send",
    };
    let bytes = |title: &str, of: fn(&CollectiveRow) -> Bytes| {
        measured(title, Unit::Bytes, rows.iter().map(|(_, row)| of(row).as_f64())).each_alone()
    };
    let mut columns = vec![
        words("cell", rows.iter().map(|(id, _)| (*id).to_owned())),
        words("collective", rows.iter().map(|(_, row)| format!("{} of {}", kind(row), row.what))),
        numbers("count", rows.iter().map(|(_, row)| row.count.to_string())),
        bytes("bytes each", |row| row.bytes),
        bytes("sent by a GPU", |row| row.sent_bytes),
        measured("all at link speed", Unit::Nanoseconds, rows.iter().map(|(_, row)| row.link_ns))
            .each_alone(),
    ];
    columns.retain(|column| !column.is_empty());
    columns
}
