//! vLLM: `bench serve` (also `benchmark_serving.py` and `bench sweep`), `bench latency`, `bench throughput`, and the table of its CI.
//!
//! Enters: a document. Leaves: one row per run. The file reports no GPU, storage or version, so the row has none. SGLang's
//! `bench_serving` grew from the same script; fields that only it writes tell the two apart.

use crate::analysis::words::counted;
use serde_json::Value as Json;

use super::consistency;
use super::document::Document;
use super::fields::Fields;
use super::{ForeignFormat, ForeignResult, ForeignRow, ImportError, Metric, Setup, Statistic, Value};

/// The shape of the gamma distribution of the gaps between arrivals, where it is not 1; below it they vary more than Poisson's.
pub(super) const BURSTINESS: &str = "burstiness";

pub(super) fn read(document: &Document) -> Option<Result<Vec<ForeignResult>, ImportError>> {
    type Row = fn(&Fields<'_>) -> Result<ForeignRow, ImportError>;
    let modes: [(&[&str], ForeignFormat, Row); 4] = [
        (&["completed", "duration", "model_id"], ForeignFormat::VllmServe, serve),
        (&["Test name", "Tput (req/s)"], ForeignFormat::VllmSummary, summary),
        (&["avg_latency", "percentiles"], ForeignFormat::VllmLatency, latency),
        (&["elapsed_time", "num_requests", "requests_per_second"], ForeignFormat::VllmThroughput, throughput),
    ];
    modes
        .into_iter()
        .find_map(|(keys, format, row)| Some(document.result(format, document.objects_with(keys)?, row)))
}

fn serve(fields: &Fields<'_>) -> Result<ForeignRow, ImportError> {
    let (values, mut remarks) = fields.values(ForeignFormat::VllmServe)?;
    let mut setup = requests(fields, ForeignFormat::VllmServe)?;
    // `openai` is a protocol that any server has, so it names none.
    setup.engine = fields.text("backend")?.filter(|b| b != "openai" && b != "openai-chat");
    setup.model = fields.text("model_id")?;
    setup.date = fields.text("date")?;
    setup.accept_length = fields.number("spec_decode_acceptance_length")?;
    setup.requests = fields.count("num_prompts")?.or(setup.requests);
    if values.iter().any(|v| v.metric == Metric::OutputThroughput && v.statistic == Statistic::Single) {
        remarks.extend(unfinished(&setup));
    } else if setup.completed == Some(0) {
        remarks = vec!["the zeros of this run are not measurements".to_owned()];
    }
    row(fields, setup, values, remarks)
}

/// What vLLM's and SGLang's serving benchmarks write alike.
pub(super) fn requests(fields: &Fields<'_>, format: ForeignFormat) -> Result<Setup, ImportError> {
    let completed = fields.need_count("completed", format)?;
    let each = |total: Option<u64>| total.filter(|_| completed > 0).map(|t| t as f64 / completed as f64);
    let given = |value: &Json| !value.is_null() && value.as_array().is_none_or(|list| !list.is_empty());
    let ramped = fields
        .map
        .iter()
        .any(|(key, value)| (key.starts_with("ramp_up_") || key == "rps_change_events") && given(value));
    let burstiness = fields.number(BURSTINESS)?.filter(|shape| (*shape - 1.0).abs() > f64::EPSILON);
    Ok(Setup {
        max_concurrency: fields.count("max_concurrency")?,
        // A ramp goes through many rates, and leaves the one that was asked for at its default.
        request_rate: if ramped { None } else { fields.rate("request_rate")? },
        settings: burstiness.map(|shape| (BURSTINESS.to_owned(), shape.to_string())).into_iter().collect(),
        input_tokens: each(fields.count("total_input_tokens")?),
        output_tokens: each(fields.count("total_output_tokens")?),
        completed: Some(completed),
        failed: fields.count("failed")?,
        duration_s: fields.number("duration")?,
        ..Setup::default()
    })
}

/// The row of such a run, held against its own lists of requests.
pub(super) fn row(
    fields: &Fields<'_>,
    setup: Setup,
    values: Vec<Value>,
    remarks: Vec<String>,
) -> Result<ForeignRow, ImportError> {
    Ok(ForeignRow {
        label: run_label(fields, &setup)?,
        problems: consistency::of_lists(fields, &setup, &values),
        setup,
        values,
        remarks,
        ..ForeignRow::default()
    })
}

/// A remark where some requests did not finish: the summaries leave them out.
pub(super) fn unfinished(setup: &Setup) -> Option<String> {
    let (asked, done) = (setup.requests?, setup.completed?);
    (done < asked).then(|| {
        format!(
            "{done} of {} completed: the figures leave the others out, which flatters the tail",
            counted(asked, "request")
        )
    })
}

/// `c16`, `10 req/s` or both: what varies between runs in one file.
fn run_label(fields: &Fields<'_>, setup: &Setup) -> Result<String, ImportError> {
    let mut parts = Vec::new();
    for key in ["label", "tag"] {
        parts.extend(fields.text(key)?);
    }
    if parts.is_empty() {
        parts.extend(setup.max_concurrency.map(|c| format!("c{c}")));
        if let Some(super::Rate::PerSecond(rate)) = setup.request_rate {
            parts.push(format!("{rate} req/s"));
        }
    }
    if parts.is_empty() {
        parts.push(format!("run {}", fields.record));
    }
    Ok(parts.join(" "))
}

fn summary(fields: &Fields<'_>) -> Result<ForeignRow, ImportError> {
    let (values, remarks) = fields.values(ForeignFormat::VllmSummary)?;
    let setup = Setup {
        engine: Some("vllm".to_owned()),
        completed: fields.count("# of req.")?,
        gpu: fields.text("GPU")?,
        ..Setup::default()
    };
    let label = fields.text("Test name")?.unwrap_or_else(|| numbered(fields));
    Ok(ForeignRow { label, setup, values, remarks, ..ForeignRow::default() })
}

/// The label of a row that the file gives no name.
fn numbered(fields: &Fields<'_>) -> String {
    format!("run {}", fields.record)
}

fn latency(fields: &Fields<'_>) -> Result<ForeignRow, ImportError> {
    let (values, remarks) = fields.values(ForeignFormat::VllmLatency)?;
    let repetitions = fields.get("latencies").and_then(Json::as_array).map(|l| l.len() as u64);
    let setup = Setup { engine: Some("vllm".to_owned()), repetitions, ..Setup::default() };
    Ok(ForeignRow { label: numbered(fields), setup, values, remarks, ..ForeignRow::default() })
}

fn throughput(fields: &Fields<'_>) -> Result<ForeignRow, ImportError> {
    let (values, remarks) = fields.values(ForeignFormat::VllmThroughput)?;
    let setup = Setup {
        engine: Some("vllm".to_owned()),
        requests: fields.count("num_requests")?,
        duration_s: fields.number("elapsed_time")?,
        ..Setup::default()
    };
    Ok(ForeignRow { label: numbered(fields), setup, values, remarks, ..ForeignRow::default() })
}
