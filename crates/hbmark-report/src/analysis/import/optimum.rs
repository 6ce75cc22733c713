//! optimum-benchmark: `benchmark.json` (configuration and report), `benchmark_report.json` and `benchmark_report.md` (report alone).
//!
//! Enters: a document. Leaves: one row. The report alone has neither batch nor lengths nor machine.

use serde_json::{Map, Value as Json};

use super::document::{Body, Document};
use super::fields::Fields;
use super::{ForeignFormat, ForeignResult, ForeignRow, ImportError, Setup, dtype_of};

const FORMAT: ForeignFormat = ForeignFormat::OptimumBenchmark;

pub(super) fn read(document: &Document) -> Option<Result<Vec<ForeignResult>, ImportError>> {
    let whole = document.objects_with(&["config", "report"]);
    let alone = || document.objects_with(&["prefill", "decode", "per_token"]);
    let page = from_markdown(document);
    let records = whole.or_else(alone).or_else(|| Some(vec![page.as_ref()?]))?;
    Some(document.result(FORMAT, records, row))
}

/// The page of tables as the object of the JSON report: `# prefill:` and `## latency:` become keys.
fn from_markdown(document: &Document) -> Option<Map<String, Json>> {
    let Body::Tables(tables) = &document.body else { return None };
    let mut report = Map::new();
    for table in tables.iter().filter(|t| t.titles == ["metric", "value", "unit"]) {
        let [phase, kind] = table.headings.as_slice() else { continue };
        let (phase, kind) = (phase.trim_end_matches(':'), kind.trim_end_matches(':'));
        let mut figures = Map::new();
        for row in &table.rows {
            let text = |title: &str| row.get(title)?.as_str();
            let (Some(metric), Some(value)) = (text("metric"), text("value")) else { continue };
            // A rate is called `value` in the JSON, and so is its alias.
            let metric = if metric == kind { "value" } else { metric };
            // `stdev_` is in percent; of times only those in seconds are what the JSON has.
            if kind == "latency" && text("unit").is_some_and(|unit| !matches!(unit, "s" | "-")) {
                continue;
            }
            figures.insert(metric.to_owned(), value.into());
        }
        let phase = report.entry(phase).or_insert_with(|| Json::Object(Map::new()));
        if let Some(phase) = phase.as_object_mut() {
            phase.insert(kind.to_owned(), Json::Object(figures));
        }
    }
    ["prefill", "decode", "per_token"].iter().all(|key| report.contains_key(*key)).then_some(report)
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
    Ok(ForeignRow { label, setup, values, remarks, ..ForeignRow::default() })
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
        _ => {
            remarks.push("GPUs of several products are listed, and which one ran is not reported".to_owned());
        }
    }
    Ok(())
}
