//! TensorRT-LLM: `trtllm-bench --report_json`.
//!
//! Enters: a document. Leaves: one row. It states more than others: version, storage of weights and cache, parallelism, the concurrency
//! that was reached. Without streaming there is no TPOT.

use super::document::Document;
use super::fields::Fields;
use super::{ForeignFormat, ForeignResult, ForeignRow, ImportError, Metric, Setup, dtype_of};

const FORMAT: ForeignFormat = ForeignFormat::TrtllmBench;

pub(super) fn read(document: &Document) -> Option<Result<Vec<ForeignResult>, ImportError>> {
    let records = document.objects_with(&["engine", "world_info", "performance"])?;
    Some(document.result(FORMAT, records, row))
}

fn row(fields: &Fields<'_>) -> Result<ForeignRow, ImportError> {
    let (values, mut remarks) = fields.values(FORMAT)?;
    if !values.iter().any(|v| v.metric == Metric::Tpot) {
        remarks.push("not streamed: there is no TPOT, and throughput says nothing of one step".to_owned());
    }
    // `quantization` names the weights; `dtype` is that of the activations, and of the weights where nothing is quantised.
    let stored_as = fields.text("engine.quantization")?.or(fields.text("engine.dtype")?);
    let setup = Setup {
        engine: Some("tensorrt-llm".to_owned()),
        engine_version: fields.text("engine.version")?,
        model: fields.text("engine.model")?,
        dtype: stored_as.as_deref().and_then(dtype_of),
        stored_as,
        kv_dtype: fields.text("engine.kv_cache_dtype")?.as_deref().and_then(dtype_of),
        gpu: fields.text("machine.name")?,
        gpus: fields.count("world_info.world_size")?.filter(|n| *n > 0),
        concurrency: fields.number("request_info.avg_num_concurrent_requests")?,
        input_tokens: fields.number("request_info.avg_input_length")?,
        output_tokens: fields.number("request_info.avg_output_length")?,
        requests: fields.count("request_info.num_requests")?,
        accept_length: fields.number("decoding_stats.acceptance_length_percentiles.average")?,
        duration_s: fields.number("performance.total_latency_ms")?.map(|ms| ms / 1e3),
        ..Setup::default()
    };
    let label = match (setup.input_tokens, setup.output_tokens) {
        (Some(input), Some(output)) => format!("in{input:.0} out{output:.0}"),
        _ => format!("run {}", fields.record),
    };
    Ok(ForeignRow { label, setup, values, remarks, ..ForeignRow::default() })
}
