//! AIPerf and its forerunner GenAI-Perf: the aggregate export as JSON or CSV; [`records`] reads single requests.
//!
//! Enters: a document. Leaves: one row per file. Each number has its unit beside it: early files count in nanoseconds and write numbers as
//! text. The engine behind the endpoint is not reported.

mod records;

pub(super) use records::{RECORD, TELEMETRY};

use serde_json::{Map, Value as Json};

use super::document::{Body, Document};
use super::fields::Fields;
use super::{ForeignFormat, ForeignResult, ForeignRow, ImportError, Metric, Setup};

const FORMAT: ForeignFormat = ForeignFormat::Aiperf;

pub(super) fn read(document: &Document) -> Option<Result<Vec<ForeignResult>, ImportError>> {
    if let Some(records) = document.objects_with(&["request_latency", "request_throughput", "input_config"]) {
        return Some(document.result(FORMAT, records, row));
    }
    records::read(document).or_else(|| Some(document.result(FORMAT, [&from_csv(document)?], row)))
}

/// The stacked tables of the CSV export as the object of the JSON export: titles with units become keys and units.
fn from_csv(document: &Document) -> Option<Map<String, Json>> {
    let Body::Tables(tables) = &document.body else { return None };
    let distributions = document.tables_with(&["Metric", "avg", "p99"]).next()?;
    let mut map = Map::new();
    let named = |row: &Map<String, Json>| {
        let title = row.get("Metric")?.as_str()?;
        let (name, unit) = title.trim_end_matches(')').rsplit_once(" (").unwrap_or((title, ""));
        Some((name.to_lowercase().replace(' ', "_"), unit.to_owned()))
    };
    for row in &distributions.rows {
        let Some((key, unit)) = named(row) else { continue };
        let mut group: Map<String, Json> =
            row.iter().filter(|(k, _)| *k != "Metric").map(|(k, v)| (k.clone(), v.clone())).collect();
        group.insert("unit".to_owned(), unit.into());
        map.insert(key, Json::Object(group));
    }
    for row in tables.iter().filter(|t| t.titles == ["Metric", "Value"]).flat_map(|t| &t.rows) {
        let (Some((key, unit)), Some(value)) = (named(row), row.get("Value")) else { continue };
        map.insert(key, serde_json::json!({ "unit": unit, "avg": value }));
    }
    Some(map)
}

fn row(fields: &Fields<'_>) -> Result<ForeignRow, ImportError> {
    let (mut values, mut remarks) = fields.values(FORMAT)?;
    // GenAI-Perf pooled the gaps of all requests as long as it called the lengths so.
    if fields.get("num_output_token").is_some() {
        for value in values.iter_mut().filter(|value| value.metric == Metric::Tpot) {
            value.metric = Metric::Itl;
        }
    }
    let mean = |keys: [&str; 2]| -> Result<Option<f64>, ImportError> {
        for key in keys {
            if let Some(mean) = fields.object(key).map(|group| group.number("avg")).transpose()?.flatten() {
                return Ok(Some(mean));
            }
        }
        Ok(None)
    };
    let total =
        |key: &str| fields.object(key).map(|group| group.count("avg")).transpose().map(Option::flatten);
    let config = fields.object("input_config");
    let config = config.as_ref();
    let completed = total("request_count")?;
    let failed = total("error_request_count")?;
    remarks.extend(super::failures(failed));
    if fields.get("was_cancelled") == Some(&Json::Bool(true)) {
        remarks.push("the run was cancelled: the figures are of what had completed by then".to_owned());
    }
    let mut setup = Setup {
        input_tokens: mean(["input_sequence_length", "num_input_token"])?,
        output_tokens: mean(["output_sequence_length", "num_output_token"])?,
        completed,
        failed,
        duration_s: fields
            .object("benchmark_duration")
            .map(|group| group.number("avg"))
            .transpose()?
            .flatten(),
        gpu: first_gpu(fields)?,
        date: fields.text("start_time")?,
        ..Setup::default()
    };
    if let Some(config) = config {
        describe(config, &mut setup)?;
    }
    if setup.seed.is_none() {
        setup.seed = fields.count("run_info.random_seed")?;
    }
    let label = setup.max_concurrency.map_or_else(|| format!("run {}", fields.record), |c| format!("c{c}"));
    Ok(ForeignRow { label, setup, values, remarks, ..ForeignRow::default() })
}

/// The configuration, under the keys of three generations of the program.
fn describe(config: &Fields<'_>, setup: &mut Setup) -> Result<(), ImportError> {
    let first = |list: Option<&Json>| list.and_then(|l| l.get(0)).cloned();
    let named = first(config.get("endpoint.model_names"))
        .or_else(|| first(config.get("models.items")).and_then(|item| item.get("name").cloned()))
        .or_else(|| first(config.get("model")))
        .or_else(|| config.get("model").filter(|model| model.is_string()).cloned())
        .or_else(|| config.get("formatted_model_name").cloned());
    setup.model = named.and_then(|name| name.as_str().map(super::clipped));
    let phase = config.get("phases").and_then(Json::as_array).and_then(|phases| {
        phases
            .iter()
            .filter_map(Json::as_object)
            .find(|p| p.get("name").and_then(Json::as_str) != Some("warmup"))
    });
    let phase = phase.map(|map| Fields { map, ..*config });
    setup.max_concurrency = match config.count("loadgen.concurrency")? {
        Some(count) => Some(count),
        None => match config.count("concurrency")? {
            Some(count) => Some(count),
            None => phase.map(|p| p.count("concurrency")).transpose()?.flatten(),
        },
    };
    setup.request_rate = config.rate("loadgen.request_rate")?.or(config.rate("request_rate")?);
    setup.warmup = config.count("loadgen.warmup_request_count")?;
    setup.seed = config.count("input.random_seed")?.or(config.count("random_seed")?);
    if let Some(backend) = config.text("backend")? {
        setup.engine = Some(backend);
    }
    Ok(())
}

/// The GPU of the telemetry, where all that were watched are of one product.
fn first_gpu(fields: &Fields<'_>) -> Result<Option<String>, ImportError> {
    let Some(endpoints) = fields.object("telemetry_data.endpoints") else { return Ok(None) };
    let mut names = Vec::new();
    for endpoint in endpoints.map.values() {
        let gpus = endpoint.get("gpus").and_then(Json::as_object);
        for gpu in gpus.into_iter().flat_map(Map::values).filter_map(Json::as_object) {
            names.extend(Fields { map: gpu, ..*fields }.text("gpu_name")?);
        }
    }
    names.dedup();
    Ok(if names.len() == 1 { names.pop() } else { None })
}
