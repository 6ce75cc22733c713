//! SGLang: `bench_one_batch`, `bench_one_batch_server` and `bench_serving`.
//!
//! Enters: a document. Leaves: one row per run. Newer servers put their whole configuration beside the figures; model, storage and
//! tensor parallelism are taken from there.

use super::document::Document;
use super::fields::Fields;
use super::vllm::{self, requests, unfinished};
use super::{
    ForeignFormat, ForeignResult, ForeignRow, ImportError, Metric, Setup, Statistic, Value, dtype_of,
};

/// How near all output tokens over the whole latency are to a rate that was taken so.
const WITH_PREFILL: f64 = 0.01;
/// Schedulers that share the requests, each with a cache of its own.
const REPLICAS: &str = "dp_size";

pub(super) fn read(document: &Document) -> Option<Result<Vec<ForeignResult>, ImportError>> {
    type Row = fn(&Fields<'_>) -> Result<ForeignRow, ImportError>;
    let modes: [(&[&str], ForeignFormat, Row); 2] = [
        (&["run_name", "batch_size", "input_len", "output_len"], ForeignFormat::SglangOneBatch, one_batch),
        (&["dataset_name", "random_input_len", "completed"], ForeignFormat::SglangServing, serving),
    ];
    modes
        .into_iter()
        .find_map(|(keys, format, row)| Some(document.result(format, document.objects_with(keys)?, row)))
}

fn one_batch(fields: &Fields<'_>) -> Result<ForeignRow, ImportError> {
    let format = ForeignFormat::SglangOneBatch;
    let batch = fields.need_count("batch_size", format)?;
    let (mut values, mut remarks) = fields.values(format)?;
    let over_a_server = fields.get("output_throughput").is_some();
    if let Some(rate) = fields.number("output_throughput")?.filter(|rate| *rate > 0.0) {
        let key = "output_throughput".to_owned();
        // All tokens over the time after the first ones: one step fewer than tokens of a sequence.
        let outputs = fields.number("output_len")?.filter(|outputs| *outputs > 1.0);
        let whole = fields.number("latency")?.zip(outputs).filter(|_| fields.get("last_ttft").is_none());
        let with_prefill = whole.is_some_and(|(latency, outputs)| {
            (rate * latency / (batch as f64 * outputs) - 1.0).abs() < WITH_PREFILL
        });
        if with_prefill {
            remarks.push(
                "output_throughput is of the whole latency, prefill in it, as the first versions have it: no decode step was timed"
                    .to_owned(),
            );
        }
        let step = outputs
            .filter(|_| !with_prefill)
            .map(|outputs| batch as f64 / rate * outputs / (outputs - 1.0) * 1e9);
        values.extend(step.map(|value| Value {
            metric: Metric::DecodeStep,
            statistic: Statistic::Mean,
            value,
            key: key.clone(),
        }));
        values.push(Value {
            metric: Metric::OutputThroughput,
            statistic: Statistic::Single,
            value: rate,
            key,
        });
    } else if !over_a_server && fields.get("median_decode_latency").is_none() {
        remarks.push("no decode step was timed: output_len is 1 or the run ended early".to_owned());
    }
    let setup = Setup {
        engine: Some("sglang".to_owned()),
        batch: Some(batch),
        input_tokens: fields.number("input_len")?,
        output_tokens: fields.number("output_len")?,
        // Newer versions write -1 where nothing is speculated.
        accept_length: fields.get("acc_length").and_then(serde_json::Value::as_f64).filter(|n| *n > 0.0),
        ..Setup::default()
    };
    let name = fields.text("run_name")?.unwrap_or_else(|| format!("run {}", fields.record));
    let lengths = format!("b{batch} in{} out{}", count(setup.input_tokens), count(setup.output_tokens));
    Ok(ForeignRow { label: format!("{name} {lengths}"), setup, values, remarks, ..ForeignRow::default() })
}

fn count(tokens: Option<f64>) -> String {
    tokens.map_or_else(|| "?".to_owned(), |n| format!("{n:.0}"))
}

fn serving(fields: &Fields<'_>) -> Result<ForeignRow, ImportError> {
    let format = ForeignFormat::SglangServing;
    let (mut values, mut remarks) = fields.values(format)?;
    let mut setup = requests(fields, format)?;
    setup.engine = fields.text("backend")?;
    setup.concurrency = fields.number("concurrency")?;
    setup.accept_length = fields.number("accept_length")?;
    // Files of 2024 leave the request rate out, and it follows from what they have.
    if let (Some(completed), Some(duration)) = (setup.completed, setup.duration_s.filter(|d| *d > 0.0))
        && !values.iter().any(|v| v.metric == Metric::RequestThroughput)
    {
        let value = completed as f64 / duration;
        let key = "completed / duration".to_owned();
        values.push(Value { metric: Metric::RequestThroughput, statistic: Statistic::Single, value, key });
    }
    if let Some(info) = fields.object("server_info") {
        server(&info, &mut setup, &mut remarks)?;
    }
    remarks.extend(unfinished(&setup));
    vllm::row(fields, setup, values, remarks)
}

/// Why a server of several schedulers has no one step.
pub(super) fn replicas(setup: &Setup) -> Option<String> {
    let ranks = setup.settings.get(REPLICAS)?;
    Some(format!(
        "{REPLICAS} is {ranks}: each of these ranks has steps and a batch of its own, which the file does not state"
    ))
}

fn server(info: &Fields<'_>, setup: &mut Setup, remarks: &mut Vec<String>) -> Result<(), ImportError> {
    if info.get("prefill").is_some() && info.get("decode").is_some() {
        remarks.push(
            "prefill and decode ran on different servers: which GPU decoded is not in the figures".to_owned(),
        );
        return Ok(());
    }
    setup.model = info.text("model_path")?;
    let size = |key: &str| info.count(key).map(|size| size.filter(|size| *size > 0));
    let (tensor, pipeline, data) =
        (size("tp_size")?, size("pp_size")?.unwrap_or(1), size(REPLICAS)?.unwrap_or(1));
    // Ranks of attention by data are ranks of the tensor group.
    let replicas = if info.get("enable_dp_attention") == Some(&true.into()) { 1 } else { data };
    setup.gpus = tensor.map(|tensor| tensor.saturating_mul(pipeline).saturating_mul(replicas));
    if data > 1 {
        setup.settings.insert(REPLICAS.to_owned(), data.to_string());
    }
    setup.engine_version = info.text("version")?;
    // `auto` is whatever the checkpoint has, which is not reported.
    setup.stored_as = info.text("quantization")?.or(info.text("dtype")?).filter(|word| word != "auto");
    setup.dtype = setup.stored_as.as_deref().and_then(dtype_of);
    setup.kv_dtype = info.text("kv_cache_dtype")?.as_deref().and_then(dtype_of);
    Ok(())
}
