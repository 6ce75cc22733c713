//! GuideLLM: the benchmarks of a run as JSON.
//!
//! Enters: a document. Leaves: one row per benchmark (a strategy or a rate of a sweep). Figures are those of the successful requests. Its
//! `inter_token_latency_ms` is our TPOT, and its `time_per_output_token_ms` is not: by newer versions it is the time to the last token over
//! all tokens (`request_stats.py`), by older ones the time from the first to the last over all tokens (`benchmark.py`), which no other
//! program has. The file does not say which, and its figures do. Its token rates are distributions over moments of unlike
//! length, of which neither mean nor median is tokens over time; those are computed from requests and their tokens.

use serde_json::Value as Json;

use super::document::Document;
use super::fields::Fields;
use super::{
    ForeignFormat, ForeignResult, ForeignRow, ImportError, MAX_ROWS, Metric, Rate, Setup, Statistic, Value,
    clipped,
};

const FORMAT: ForeignFormat = ForeignFormat::Guidellm;

pub(super) fn read(document: &Document) -> Option<Result<Vec<ForeignResult>, ImportError>> {
    let reports = document.objects_with(&["benchmarks"])?;
    let first = reports.first()?.get("benchmarks")?.as_array()?.first()?;
    first.get("metrics")?.get("requests_per_second")?;
    let benchmarks = reports.iter().filter_map(|r| r.get("benchmarks")?.as_array()).flatten();
    let rows: Result<Vec<ForeignRow>, ImportError> = benchmarks
        .take(MAX_ROWS + 1)
        .enumerate()
        .map(|(index, benchmark)| row(document, index, benchmark))
        .collect();
    Some(rows.map(|rows| vec![ForeignResult { source: document.file.clone(), format: FORMAT, rows }]))
}

/// Takes out a time per output token that is the span of TPOT over another number. TPOT is that span over one token less, so that in every
/// statistic it is the larger; with the wait for the first token in it, the time per token is larger wherever that wait is above one TPOT.
fn leave_out_span_over_tokens(values: &mut Vec<Value>) -> Option<String> {
    let mean = |metric| {
        values.iter().find(|v| v.metric == metric && v.statistic == Statistic::Mean).map(|v| v.value)
    };
    let (whole, tpot, first) = (mean(Metric::TpotWithFirst)?, mean(Metric::Tpot)?, mean(Metric::Ttft)?);
    // (TTFT + TPOT × (n − 1)) / n is below TPOT only where TTFT is.
    if whole >= tpot || first < tpot {
        return None;
    }
    values.retain(|value| value.metric != Metric::TpotWithFirst);
    Some(
        "time_per_output_token_ms is left out: in this file it is the span of inter_token_latency_ms over one token more, \
         without the wait for the first"
            .to_owned(),
    )
}

fn row(document: &Document, index: usize, benchmark: &Json) -> Result<ForeignRow, ImportError> {
    let nothing =
        || ImportError::NothingMeasured { file: document.file.clone(), record: index + 1, format: FORMAT };
    let map = benchmark.as_object().ok_or_else(nothing)?;
    let fields = Fields::new(&document.file, index, map);
    let metrics = fields.object("metrics").ok_or_else(|| fields.missing("metrics", FORMAT))?;
    // Every metric has its figures once per outcome of the request; the aliases are for successful ones.
    let successful: serde_json::Map<String, Json> = metrics
        .map
        .iter()
        .filter_map(|(key, outcomes)| Some((key.clone(), outcomes.get("successful")?.clone())))
        .collect();
    let successful = Fields { map: &successful, ..fields };
    let (mut values, mut remarks) = successful.values(FORMAT)?;
    remarks.extend(leave_out_span_over_tokens(&mut values));
    let mean = |key: &str| successful.object(key).map(|g| g.number("mean")).transpose().map(Option::flatten);
    let (requests, prompt, output) =
        (mean("requests_per_second")?, mean("prompt_token_count")?, mean("output_token_count")?);
    let amounts = [
        (Metric::OutputThroughput, "output_token_count", output),
        (Metric::TotalThroughput, "token counts", prompt.zip(output).map(|(prompt, output)| prompt + output)),
    ];
    for (metric, of, tokens) in amounts {
        let rate = requests.zip(tokens).map(|(requests, tokens)| requests * tokens);
        values.extend(rate.filter(|rate| *rate > 0.0).map(|value| Value {
            metric,
            statistic: Statistic::Single,
            value,
            key: format!("requests_per_second × {of}"),
        }));
    }
    // Where the strategy is kept has changed with the versions.
    let strategy = fields.object("args.strategy").or_else(|| fields.object("config.strategy"));
    let kind = strategy
        .map(|s| s.text("type_"))
        .transpose()?
        .flatten()
        .unwrap_or_else(|| format!("benchmark {}", index + 1));
    let rate = strategy.map(|s| s.number("rate")).transpose()?.flatten();
    let streams = strategy.map(|s| s.count("streams")).transpose()?.flatten();
    // Versions from 0.4 on keep the counts among the metrics, and the model with the backend.
    let total = |outcome: &str| match fields.count(&format!("request_totals.{outcome}"))? {
        Some(count) => Ok(Some(count)),
        None => fields.count(&format!("metrics.request_totals.{outcome}")),
    };
    let failed = total("errored")?;
    remarks.extend(super::failures(failed));
    let setup = Setup {
        model: fields.text("worker.backend_model")?.or(fields.text("config.backend.model")?),
        max_concurrency: streams.or_else(|| (kind == "synchronous").then_some(1)),
        concurrency: mean("request_concurrency")?.filter(|mean| *mean > 0.0),
        request_rate: rate.map(Rate::PerSecond).or_else(|| (kind == "throughput").then_some(Rate::Unlimited)),
        input_tokens: prompt,
        output_tokens: output,
        completed: total("successful")?,
        failed,
        duration_s: fields.number("duration")?,
        warmup: fields.count("args.warmup_number")?,
        seed: fields.count("args.profile.random_seed")?,
        ..Setup::default()
    };
    let label = match (rate, streams) {
        (Some(rate), _) => format!("{kind} {rate:.2} req/s"),
        (None, Some(streams)) => format!("{kind} c{streams}"),
        (None, None) => kind,
    };
    Ok(ForeignRow { label: clipped(&label), setup, values, remarks, ..ForeignRow::default() })
}
