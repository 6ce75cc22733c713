//! A vLLM engine's own metrics: its log of single requests, its counters over time, and its Prometheus page.
//!
//! Enters: a document. Leaves: one row per file. Times are the engine's own: neither client nor network is in them. The Prometheus page counts
//! from the server's start, warm-up included, and has means alone.

use crate::analysis::words::counted;
use serde_json::{Map, Value as Json};

use super::document::{Body, Document};
use super::fields::Fields;
use super::requests::{Reach, between, group, known_mean, single};
use super::{ForeignFormat, ForeignResult, ForeignRow, ImportError, Setup};

const FORMAT: ForeignFormat = ForeignFormat::VllmEngine;
/// What a record of a request has.
pub(super) const REQUEST: &[&str] = &["request_id", "queued_ts", "first_token_ts", "last_token_ts"];
const COUNTERS: &[&str] = &["prompt_throughput", "gen_throughput", "running", "waiting"];

pub(super) fn read(document: &Document) -> Option<Result<Vec<ForeignResult>, ImportError>> {
    let row = if let Some(row) = requests(document).transpose() {
        row
    } else if let Some(table) = document.tables_with(COUNTERS).next() {
        counters(document, &table.rows)
    } else if let Body::Prometheus(samples) = &document.body {
        page(document, samples)?
    } else {
        return None;
    };
    Some(
        row.map(|row| vec![ForeignResult { source: document.file.clone(), format: FORMAT, rows: vec![row] }]),
    )
}

fn requests(document: &Document) -> Result<Option<ForeignRow>, ImportError> {
    let (mut ttft, mut tpot, mut e2e) = (Vec::new(), Vec::new(), Vec::new());
    let (mut prompts, mut outputs) = (Vec::new(), Vec::new());
    let mut reach = Reach::none();
    let looked = document.each(REQUEST, |fields| {
        let tokens = fields.number("output_toks")?;
        ttft.extend(between(fields, "queued_ts", "first_token_ts")?);
        e2e.extend(between(fields, "queued_ts", "last_token_ts")?);
        let decoding = between(fields, "first_token_ts", "last_token_ts")?;
        if let (Some(seconds), Some(tokens)) = (decoding, tokens.filter(|t| *t > 1.0)) {
            tpot.push(seconds / (tokens - 1.0));
        }
        if let (Some(from), Some(to)) = (fields.number("queued_ts")?, fields.number("last_token_ts")?) {
            reach.add(from, to);
        }
        prompts.extend(fields.number("input_toks")?);
        outputs.extend(tokens);
        Ok(())
    })?;
    let Some(records) = looked else { return Ok(None) };
    let mut map = Map::new();
    for (key, values) in [("ttft", ttft), ("tpot", tpot), ("e2e", e2e)] {
        map.extend(group(values, "s").map(|g| (key.to_owned(), g)));
    }
    if let Some(seconds) = reach.length() {
        let rate = |total: f64, unit: &str| single(total / seconds, unit);
        map.insert("output_rate".into(), rate(outputs.iter().sum(), "tokens/s"));
        map.insert("input_rate".into(), rate(prompts.iter().sum(), "tokens/s"));
        map.insert("request_rate".into(), rate(records as f64, "requests/s"));
    }
    let (values, mut remarks) = Fields::new(&document.file, 0, &map).values(FORMAT)?;
    remarks.push(format!(
        "computed here from {}; the engine's own times, client and network not in them",
        counted(records, "record")
    ));
    let setup = Setup {
        engine: Some("vllm".into()),
        input_tokens: known_mean(&prompts),
        output_tokens: known_mean(&outputs),
        requests: Some(records as u64),
        completed: Some(outputs.len() as u64),
        duration_s: reach.length(),
        ..Setup::default()
    };
    Ok(Some(ForeignRow { label: "requests".into(), setup, values, remarks, ..ForeignRow::default() }))
}

fn counters(document: &Document, rows: &[Map<String, Json>]) -> Result<ForeignRow, ImportError> {
    let (mut input, mut output, mut running, mut waiting) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut reach = Reach::none();
    for (index, map) in rows.iter().enumerate() {
        let fields = Fields::new(&document.file, index, map);
        input.extend(fields.number("prompt_throughput")?);
        output.extend(fields.number("gen_throughput")?);
        running.extend(fields.number("running")?);
        waiting.extend(fields.number("waiting")?);
        if let Some(at) = fields.number("t")? {
            reach.add(at, at);
        }
    }
    let mut map = Map::new();
    for (key, values) in [("output_rate", &output), ("input_rate", &input)] {
        map.extend(known_mean(values).map(|mean| (key.to_owned(), single(mean, "tokens/s"))));
    }
    let (values, mut remarks) = Fields::new(&document.file, 0, &map).values(FORMAT)?;
    remarks.push(format!(
        "counters over time, the mean of {} readings, ramp-up and end among them; no latencies",
        rows.len()
    ));
    if waiting.iter().any(|w| *w > 0.0) {
        let most = waiting.iter().copied().fold(0.0, f64::max);
        remarks.push(format!("up to {most:.0} requests waited"));
    }
    let setup = Setup {
        engine: Some("vllm".into()),
        concurrency: known_mean(&running),
        duration_s: reach.length(),
        ..Setup::default()
    };
    Ok(ForeignRow { label: "counters".into(), setup, values, remarks, ..ForeignRow::default() })
}

/// The page of a server: sums and counts of its histograms; `None` where it is not a vLLM's.
fn page(document: &Document, samples: &[(String, f64)]) -> Option<Result<ForeignRow, ImportError>> {
    // All engines and label sets of a server together.
    let total = |name: &str| -> Option<f64> {
        let full = format!("vllm:{name}");
        let mut found =
            samples.iter().filter(|(n, _)| n.split('{').next() == Some(full.as_str())).map(|(_, v)| *v);
        found.next().map(|first| first + found.sum::<f64>())
    };
    total("num_requests_running")?;
    let mean = |name: &str| -> Option<f64> {
        let count = total(&format!("{name}_count")).filter(|n| *n > 0.0)?;
        Some(total(&format!("{name}_sum"))? / count)
    };
    let mut map = Map::new();
    for (key, histograms) in [
        ("ttft", &["time_to_first_token_seconds"][..]),
        ("tpot", &["request_time_per_output_token_seconds"][..]),
        ("itl", &["inter_token_latency_seconds", "time_per_output_token_seconds"][..]),
        ("e2e", &["e2e_request_latency_seconds"][..]),
    ] {
        map.extend(histograms.iter().find_map(|h| mean(h)).map(|m| (key.to_owned(), single(m, "s"))));
    }
    let model = samples.iter().find_map(|(name, _)| {
        let (_, rest) = name.split_once("model_name=\"")?;
        Some(super::clipped(rest.split('"').next()?))
    });
    let fields = Fields::new(&document.file, 0, &map);
    let read = fields.values(FORMAT).and_then(|(values, mut remarks)| {
        remarks.push("from the server's start on, warm-up included; means alone".to_owned());
        let count = |name: &str| total(name).map(|n| fields.whole(name, n)).transpose();
        let setup = Setup {
            engine: Some("vllm".into()),
            model,
            input_tokens: mean("request_prompt_tokens"),
            output_tokens: mean("request_generation_tokens"),
            completed: count("request_success_total")?,
            // Each draft is verified by a step, which makes a token of its own, too.
            accept_length: total("spec_decode_num_accepted_tokens_total")
                .zip(total("spec_decode_num_drafts_total").filter(|drafts| *drafts > 0.0))
                .map(|(accepted, drafts)| 1.0 + accepted / drafts),
            ..Setup::default()
        };
        if let (Some(queries), Some(hits)) =
            (total("prefix_cache_queries_total"), total("prefix_cache_hits_total"))
            && queries > 0.0
        {
            remarks.push(format!("prefix cache: {:.1} % of the prompt tokens found", hits / queries * 100.0));
        }
        if let Some(preempted) = total("num_preemptions_total").filter(|n| *n > 0.0) {
            remarks.push(format!("{preempted:.0} preemptions"));
        }
        Ok(ForeignRow { label: "server".into(), setup, values, remarks, ..ForeignRow::default() })
    });
    Some(read)
}
