//! AIPerf's records of single requests (`profile_export.jsonl`), and the telemetry of the GPUs beside them (`gpu_telemetry_export.jsonl`).
//!
//! Enters: a document. Leaves: one row with the figures that AIPerf's own summary would have, computed from the records; of telemetry, one
//! row that names the GPUs and has their telemetry. Records of the warm-up, cancelled requests and errors are left out and counted.

use crate::analysis::words::counted;
use serde_json::{Map, Value as Json};

use super::super::document::Document;
use super::super::fields::Fields;
use super::super::requests::{Reach, group, known_mean, single};
use super::super::{ForeignFormat, ForeignResult, ForeignRow, ImportError, Setup, failures};

const FORMAT: ForeignFormat = ForeignFormat::AiperfRecords;
/// Gaps between chunks that are kept: those of a file of the largest size, at the digits that AIPerf writes.
const MAX_GAPS: usize = 4_000_000;
/// What a record of a request has, and one of a GPU.
pub(crate) const RECORD: &[&str] = &["metadata", "metrics"];
pub(crate) const TELEMETRY: &[&str] = &["timestamp_ns", "telemetry_data"];
/// What is kept of each record.
const LATENCIES: &[&str] = &["time_to_first_token", "inter_token_latency", "request_latency"];

pub(crate) fn read(document: &Document) -> Option<Result<Vec<ForeignResult>, ImportError>> {
    let result = |row| vec![ForeignResult { source: document.file.clone(), format: FORMAT, rows: vec![row] }];
    let row = match requests(document) {
        Ok(None) => telemetry(document),
        found => found,
    };
    Some(row.transpose()?.map(result))
}

fn requests(document: &Document) -> Result<Option<ForeignRow>, ImportError> {
    let mut seen: Vec<Vec<f64>> = vec![Vec::new(); LATENCIES.len()];
    let (mut gaps, mut prompts, mut outputs) = (Vec::new(), Vec::new(), Vec::new());
    let (mut failed, mut warmup, mut cancelled, mut completed) = (0_u64, 0_u64, 0_u64, 0_u64);
    let mut reach = Reach::none();
    let looked = document.each(RECORD, |fields| {
        let phase = fields.text("metadata.benchmark_phase")?;
        if phase.is_some_and(|phase| phase != "profiling") {
            warmup += 1;
            return Ok(());
        }
        if fields.get("metadata.was_cancelled") == Some(&Json::Bool(true)) {
            cancelled += 1;
            return Ok(());
        }
        if fields.get("error").is_some() {
            failed += 1;
            return Ok(());
        }
        completed += 1;
        let (from, to) =
            (fields.number("metadata.request_start_ns")?, fields.number("metadata.request_end_ns")?);
        if let (Some(from), Some(to)) = (from, to) {
            reach.add(from, to);
        }
        for (key, values) in LATENCIES.iter().zip(&mut seen) {
            values.extend(milliseconds(fields, key)?);
        }
        prompts.extend(fields.number("metrics.input_sequence_length.value")?);
        outputs.extend(fields.number("metrics.output_sequence_length.value")?);
        let chunks = fields.get("metrics.inter_chunk_latency.value").and_then(Json::as_array);
        let scale = scale(fields, "inter_chunk_latency")?;
        let known = chunks.into_iter().flatten().filter_map(Json::as_f64).map(|v| v * scale);
        gaps.extend(known.filter(|v| v.is_finite() && *v >= 0.0).take(MAX_GAPS.saturating_sub(gaps.len())));
        Ok(())
    })?;
    if looked.is_none() {
        return Ok(None);
    }
    let mut map = Map::new();
    let mut put = |key: &str, value: Option<Json>| map.extend(value.map(|v| (key.to_owned(), v)));
    for (key, values) in LATENCIES.iter().zip(seen) {
        put(key, group(values, "ms"));
    }
    put("inter_chunk_latency", group(gaps, "ms"));
    let total: f64 = outputs.iter().sum();
    if let Some(seconds) = reach.length().map(|ns| ns / 1e9) {
        put("output_token_throughput", (total > 0.0).then(|| single(total / seconds, "tokens/sec")));
        put("request_throughput", Some(single(completed as f64 / seconds, "requests/sec")));
    }
    let (values, mut remarks) = Fields::new(&document.file, 0, &map).values(FORMAT)?;
    remarks.push(format!("computed here from {} of single requests", counted(completed, "record")));
    remarks.extend(failures(Some(failed)));
    for (count, what) in [(warmup, "of the warm-up"), (cancelled, "of cancelled requests")] {
        remarks.extend((count > 0).then(|| format!("left out: {} {what}", counted(count, "record"))));
    }
    let setup = Setup {
        input_tokens: known_mean(&prompts),
        output_tokens: known_mean(&outputs),
        requests: Some(completed + failed + cancelled),
        warmup: (warmup > 0).then_some(warmup),
        completed: Some(completed),
        failed: Some(failed),
        duration_s: reach.length().map(|ns| ns / 1e9),
        ..Setup::default()
    };
    Ok(Some(ForeignRow { label: "records".into(), setup, values, remarks, ..ForeignRow::default() }))
}

/// What turns a metric's unit into milliseconds.
fn scale(fields: &Fields<'_>, key: &str) -> Result<f64, ImportError> {
    let path = format!("metrics.{key}.unit");
    match fields.text(&path)?.as_deref() {
        None | Some("ms") => Ok(1.0),
        Some("ns") => Ok(1e-6),
        Some("us" | "µs") => Ok(1e-3),
        Some("s" | "sec") => Ok(1e3),
        Some(_) => Err(fields.wrong_at(&path, "ns, us, ms or s")),
    }
}

fn milliseconds(fields: &Fields<'_>, key: &str) -> Result<Option<f64>, ImportError> {
    let value = fields.number(&format!("metrics.{key}.value"))?;
    Ok(match value {
        Some(value) => Some(value * scale(fields, key)?),
        None => None,
    })
}

/// A quantity of the telemetry: its key, its name and unit.
const WATCHED: &[(&str, &str, &str)] = &[
    ("gpu_power_usage", "power", "W"),
    ("sm_clock_frequency", "SM clock", "MHz"),
    ("memory_clock_frequency", "memory clock", "MHz"),
    ("gpu_temperature", "temperature", "°C"),
    ("gpu_utilization", "utilisation", "%"),
    ("gpu_memory_used", "memory in use", "GB"),
];

fn telemetry(document: &Document) -> Result<Option<ForeignRow>, ImportError> {
    let (mut names, mut cards) = (Vec::new(), Vec::new());
    let mut reach = Reach::none();
    let mut seen: Vec<Vec<f64>> = vec![Vec::new(); WATCHED.len()];
    let mut held_back = Reach::none();
    let looked = document.each(TELEMETRY, |fields| {
        for (list, key) in [(&mut names, "gpu_model_name"), (&mut cards, "gpu_uuid")] {
            let Some(text) = fields.text(key)? else { continue };
            if list.len() < 1024 && !list.contains(&text) {
                list.push(text);
            }
        }
        if let Some(at) = fields.number("timestamp_ns")? {
            reach.add(at, at);
        }
        for ((key, ..), values) in WATCHED.iter().zip(&mut seen) {
            values.extend(fields.number(&format!("telemetry_data.{key}"))?);
        }
        if let Some(held) = fields.number("telemetry_data.power_violation")? {
            held_back.add(held, held);
        }
        Ok(())
    })?;
    if looked.is_none() {
        return Ok(None);
    }
    let mut remarks = vec![
        "telemetry of the GPUs, not of requests: it stands beside the records of the same run".to_owned(),
    ];
    for ((_, name, unit), values) in WATCHED.iter().zip(&seen) {
        let (low, high) =
            values.iter().fold((f64::INFINITY, 0.0), |(l, h): (f64, f64), v| (l.min(*v), h.max(*v)));
        let mean = known_mean(values);
        remarks.extend(mean.map(|mean| format!("{name} {low:.1} to {high:.1} {unit}, mean {mean:.1}")));
    }
    if held_back.length().is_some() && cards.len() == 1 {
        remarks.push("the power limit held the clocks back during the run".into());
    }
    let setup = Setup {
        gpu: if names.len() == 1 { names.pop() } else { None },
        gpus: (!cards.is_empty()).then_some(cards.len() as u64),
        duration_s: reach.length().map(|ns| ns / 1e9),
        ..Setup::default()
    };
    Ok(Some(ForeignRow { label: "GPU telemetry".into(), setup, remarks, ..ForeignRow::default() }))
}
