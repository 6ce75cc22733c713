//! optimum-benchmark: `benchmark.json` (configuration and report) and `benchmark_report.json` (report alone).
//!
//! Enters: a document. Leaves: one row. The report alone says neither batch nor lengths nor machine.

use serde_json::Value as Json;

use super::document::Document;
use super::fields::Fields;
use super::{ForeignFormat, ForeignResult, ForeignRow, ImportError, Setup, dtype_of};

const FORMAT: ForeignFormat = ForeignFormat::OptimumBenchmark;

pub(super) fn read(document: &Document) -> Option<Result<Vec<ForeignResult>, ImportError>> {
    let whole = document.objects_with(&["config", "report"]);
    let alone = || document.objects_with(&["prefill", "decode", "per_token"]);
    let records = whole.or_else(alone)?;
    let rows = records.iter().enumerate().map(|(i, map)| row(&Fields::new(&document.file, i, map)));
    Some(
        rows.collect::<Result<_, _>>()
            .map(|rows| vec![ForeignResult { source: document.file.clone(), format: FORMAT, rows }]),
    )
}

fn row(fields: &Fields<'_>) -> Result<ForeignRow, ImportError> {
    let report = fields.object("report").unwrap_or(*fields);
    let (values, mut remarks) = report.values(FORMAT)?;
    let mut setup = Setup {
        repetitions: report.count("decode.latency.count")?.or(report.count("prefill.latency.count")?),
        ..Setup::default()
    };
    let mut label = "report".to_owned();
    if let Some(config) = fields.object("config") {
        label = config.text("name")?.unwrap_or(label);
        describe(&config, &mut setup, &mut remarks)?;
    }
    Ok(ForeignRow { label, setup, values, remarks })
}

fn describe(config: &Fields<'_>, setup: &mut Setup, remarks: &mut Vec<String>) -> Result<(), ImportError> {
    setup.engine = config.text("backend.name")?;
    setup.engine_version = config.text("backend.version")?;
    setup.model = config.text("backend.model")?;
    setup.seed = config.count("backend.seed")?;
    setup.stored_as = config.text("backend.quantization_scheme")?.or(config.text("backend.torch_dtype")?);
    setup.dtype = setup.stored_as.as_deref().and_then(dtype_of);
    setup.batch = config.count("scenario.input_shapes.batch_size")?;
    setup.input_tokens = config.number("scenario.input_shapes.sequence_length")?;
    setup.output_tokens = config.number("scenario.generate_kwargs.max_new_tokens")?;
    setup.warmup = config.count("scenario.warmup_runs")?;
    setup.cpu = config.text("environment.cpu")?;
    if config.text("backend.device")?.as_deref() != Some("cuda") {
        return Ok(());
    }
    let all = config.get("environment.gpu").and_then(Json::as_array);
    let all: Vec<&str> = all.into_iter().flatten().filter_map(Json::as_str).collect();
    let used = config.text("backend.device_ids")?;
    let ids: Vec<usize> =
        used.iter().flat_map(|ids| ids.split(',')).filter_map(|id| id.trim().parse().ok()).collect();
    let mut names: Vec<&str> =
        if ids.is_empty() { all } else { ids.iter().filter_map(|id| all.get(*id).copied()).collect() };
    setup.gpus = (!ids.is_empty()).then_some(ids.len() as u64);
    names.dedup();
    match names.as_slice() {
        [one] => setup.gpu = Some(super::clipped(one)),
        [] => {}
        _ => remarks.push("GPUs of several products are listed, and which ran is not said".to_owned()),
    }
    Ok(())
}
