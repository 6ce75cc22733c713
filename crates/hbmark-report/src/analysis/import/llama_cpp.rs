//! llama.cpp: `llama-bench` (json, jsonl, csv, sql, md) and `llama-batched-bench` (jsonl, md).
//!
//! Enters: a document. Leaves: rows, one a test. The five spellings of `llama-bench` become the same fields before they are read, so
//! that a test means the same in each; the Markdown table has rates alone, and its units are in the cells. A page of both programs gives
//! two results.

use std::collections::BTreeMap;

use serde_json::Value as Json;

use crate::analysis::distinct;

use super::document::{Body, Document, Table};
use super::fields::Fields;
use super::{
    ForeignFormat, ForeignResult, ForeignRow, ImportError, Metric, Setup, Statistic, Value, clipped, dtype_of,
};
use hbmark_core::model::Dtype;
use hbmark_core::units::whole;

const BENCH: ForeignFormat = ForeignFormat::LlamaBench;
const BATCHED: ForeignFormat = ForeignFormat::LlamaBatchedBench;
/// Settings that change the time of a step, by the names of the files and of the Markdown table's columns.
const SETTINGS: &[(&str, &str)] = &[
    (GPU_LAYERS, "ngl"),
    (CPU_EXPERTS, "n_cpu_moe"),
    (HOST_CACHE, "nkvo"),
    ("flash_attn", "fa"),
    ("n_ubatch", "n_ubatch"),
    ("n_threads", "threads"),
];
const GPU_LAYERS: &str = "n_gpu_layers";
const CPU_EXPERTS: &str = "n_cpu_moe";
const HOST_CACHE: &str = "no_kv_offload";
/// Sequences of a batch have one prompt between them, whose keys and values are in the cache once.
const SHARED_PROMPT: &str = "is_pp_shared";
const TYPE_K: &str = "type_k";
const TYPE_V: &str = "type_v";

pub(super) fn read(document: &Document) -> Option<Result<Vec<ForeignResult>, ImportError>> {
    let result = |format, rows: Result<Vec<ForeignRow>, ImportError>| {
        rows.map(|rows| ForeignResult { source: document.file.clone(), format, rows })
    };
    if let Some(records) = document.objects_with(&["n_prompt", "n_gen", "avg_ns"]) {
        return Some(document.result(BENCH, records, bench));
    }
    if let Some(records) = document.objects_with(&["pp", "tg", "pl", "t_tg"]) {
        return Some(document.result(BATCHED, records, batched));
    }
    let Body::Tables(_) = &document.body else { return None };
    let rows_of = |titles: &[&str], row: fn(&Fields<'_>, &Table) -> Result<ForeignRow, ImportError>| {
        let tables = document.tables_with(titles);
        let rows = tables.flat_map(|table| table.rows.iter().map(move |map| (table, map)));
        rows.enumerate()
            .map(|(i, (table, map))| row(&Fields::new(&document.file, i, map), table))
            .collect::<Result<Vec<_>, _>>()
    };
    let found: Vec<Result<ForeignResult, ImportError>> = [
        (BENCH, rows_of(&["n_prompt", "n_gen", "avg_ns"], |fields, _| bench(fields))),
        (BENCH, rows_of(&["test", "t/s", "model"], page_row)),
        (BATCHED, rows_of(&["PP", "TG", "B", "T_TG s"], page_batched)),
    ]
    .into_iter()
    .filter(|(_, rows)| !matches!(rows, Ok(rows) if rows.is_empty()))
    .map(|(format, rows)| result(format, rows))
    .collect();
    (!found.is_empty()).then(|| found.into_iter().collect())
}

fn bench(fields: &Fields<'_>) -> Result<ForeignRow, ImportError> {
    let prompt = fields.need_count("n_prompt", BENCH)?;
    let generated = fields.need_count("n_gen", BENCH)?;
    let depth = fields.count("n_depth")?.unwrap_or(0);
    let test = Test { prompt, generated, depth };
    let average = fields.number("avg_ns")?.ok_or_else(|| fields.missing("avg_ns", BENCH))?;
    let mut times = vec![(Statistic::Mean, average, "avg_ns")];
    let samples = samples(fields)?;
    if samples.len() >= 3 {
        times.push((Statistic::Median, hbmark_core::stats::median(&samples), "samples_ns"));
        times.push((Statistic::Min, samples.iter().copied().fold(f64::INFINITY, f64::min), "samples_ns"));
        times.push((Statistic::Max, samples.iter().copied().fold(0.0, f64::max), "samples_ns"));
    }
    // With one repetition the spread is 0, which is not a measurement.
    if let Some(spread) = fields.number("stddev_ns")?.filter(|spread| *spread > 0.0) {
        times.push((Statistic::StandardDeviation, spread, "stddev_ns"));
    }
    let mut values: Vec<Value> = times
        .into_iter()
        .map(|(statistic, time, key)| Value {
            metric: test.metric(),
            statistic,
            value: time / test.steps(),
            key: key.to_owned(),
        })
        .filter(|value| value.value > 0.0)
        .collect();
    if let Some(rate) = fields.number("avg_ts")?.filter(|rate| *rate > 0.0) {
        let key = "avg_ts".to_owned();
        values.push(Value { metric: test.rate(), statistic: Statistic::Mean, value: rate, key });
    }
    let mut remarks = Vec::new();
    let setup = bench_setup(fields, test, samples.len(), &mut remarks)?;
    Ok(ForeignRow { label: test.label(), setup, values, remarks, ..ForeignRow::default() })
}

fn bench_setup(
    fields: &Fields<'_>,
    test: Test,
    samples: usize,
    remarks: &mut Vec<String>,
) -> Result<Setup, ImportError> {
    let kind = fields.text("model_type")?;
    let file = fields.text("model_filename")?.map(|path| file_stem(&path));
    let stored_as = kind.as_deref().and_then(storage_of);
    let on_gpu = fields.text("backends")?.is_none_or(|b| b != "CPU" && b != "BLAS");
    let mut settings = settings(fields);
    if !on_gpu {
        // A build without a GPU writes these down and does nothing by them.
        settings.retain(|key, _| ![GPU_LAYERS, CPU_EXPERTS, HOST_CACHE].contains(&key.as_str()));
    }
    let none_on_gpu = settings.get(GPU_LAYERS).is_some_and(|layers| layers == "0");
    if none_on_gpu {
        remarks.push("n_gpu_layers is 0: the weights lie in the host's memory, whatever the GPU".to_owned());
    }
    if samples == 1 {
        remarks.push("one repetition: its spread is unknown".to_owned());
    }
    Ok(Setup {
        engine: Some("llama.cpp".to_owned()),
        engine_version: fields.text("build_commit")?,
        model: file.or(kind),
        dtype: stored_as.as_deref().and_then(file_dtype),
        stored_as,
        kv_dtype: kv_dtype(fields, &mut settings)?,
        weight_bytes: fields.count("model_size")?.filter(|size| *size > 0),
        gpu: gpu_info(fields).filter(|_| on_gpu && !none_on_gpu),
        cpu: fields.text("cpu_info")?,
        batch: Some(1),
        repetitions: (samples > 0).then_some(samples as u64),
        // llama-bench runs every test once before it times it, unless switched off, and does not record which.
        date: fields.text("test_time")?,
        settings,
        ..test.lengths()
    })
}

/// The settings that a row states: switches are 0 and 1 in every spelling.
fn settings(fields: &Fields<'_>) -> BTreeMap<String, String> {
    let value = |key: &str| match fields.get(key)? {
        Json::Bool(on) => Some(u8::from(*on).to_string()),
        Json::Number(number) => Some(number.to_string()),
        Json::String(text) => Some(clipped(text)).filter(|text| !text.is_empty()),
        Json::Null | Json::Array(_) | Json::Object(_) => None,
    };
    let known = SETTINGS
        .iter()
        .filter_map(|(key, column)| Some(((*key).to_owned(), value(key).or_else(|| value(column))?)));
    known.collect()
}

/// What of a model, of so many layers where that is known, is not in the GPU's memory, so that a step does not wait for the GPU's bandwidth.
pub(super) fn beside_the_gpu(setup: &Setup, layers: Option<usize>) -> Option<String> {
    let on_the_host = setup.gpu.is_none() && setup.cpu.is_some();
    let number = |key: &str| setup.settings.get(key).filter(|_| !on_the_host)?.parse::<f64>().ok();
    // The head is one layer more; below 0 the program decides.
    let some = layers.zip(number(GPU_LAYERS)).filter(|(all, on_gpu)| (0.0..=*all as f64).contains(on_gpu));
    let experts = number(CPU_EXPERTS).filter(|layers| *layers > 0.0);
    let cache = number(HOST_CACHE).filter(|on| *on > 0.0);
    let what = match (some, experts, cache) {
        (Some((all, on_gpu)), ..) => {
            format!("{GPU_LAYERS} is {on_gpu} of {}, the head among them: other weights", all + 1)
        }
        (None, Some(experts), _) => format!("{CPU_EXPERTS} is {experts}: the experts of these layers"),
        (None, None, Some(_)) => format!("{HOST_CACHE} is set: K and V"),
        (None, None, None) => return None,
    };
    Some(format!("{what} are in the host's memory, and no step is bound by the GPU's alone"))
}

/// Whether a step reads the prompt once for all sequences.
pub(super) fn shares_prompt(setup: &Setup) -> bool {
    setup.settings.contains_key(SHARED_PROMPT)
}

/// The GPUs of the machine, each name once: which of them ran, and how many, is not in the file.
fn gpu_info(fields: &Fields<'_>) -> Option<String> {
    let names = fields.get("gpu_info")?.as_str()?.split(", ").map(str::trim);
    Some(clipped(&distinct(names).join(", "))).filter(|names| !names.is_empty())
}

/// The storage of keys and values, where both are of one kind that this program has; otherwise their words are settings.
fn kv_dtype(
    fields: &Fields<'_>,
    settings: &mut BTreeMap<String, String>,
) -> Result<Option<Dtype>, ImportError> {
    let (keys, values) = (fields.text(TYPE_K)?, fields.text(TYPE_V)?);
    let known = keys.as_deref().filter(|_| keys == values).and_then(dtype_of);
    if known.is_none() {
        let words = [(TYPE_K, keys), (TYPE_V, values)].into_iter();
        settings.extend(words.filter_map(|(key, word)| Some((key.to_owned(), word?))));
    }
    Ok(known)
}

/// What a file says of a cache that has no one storage of this program.
pub(super) fn cache_words(setup: &Setup) -> Option<String> {
    let word = |key: &str| setup.settings.get(key).map(|word| format!("{key} {word}"));
    let words: Vec<String> = [TYPE_K, TYPE_V].into_iter().filter_map(word).collect();
    (!words.is_empty()).then(|| words.join(", "))
}

fn samples(fields: &Fields<'_>) -> Result<Vec<f64>, ImportError> {
    let Some(list) = fields.get("samples_ns") else { return Ok(Vec::new()) };
    let wrong = || ImportError::Field {
        file: fields.file.to_owned(),
        record: fields.record,
        field: "samples_ns".to_owned(),
        found: clipped(&list.to_string()),
        wanted: "a list of positive numbers",
    };
    let items = list.as_array().ok_or_else(wrong)?;
    items.iter().map(|v| v.as_f64().filter(|n| *n > 0.0 && n.is_finite()).ok_or_else(wrong)).collect()
}

/// One test of llama-bench: `pp512`, `tg128 @ d4096`, `pp512+tg128`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Test {
    prompt: u64,
    generated: u64,
    depth: u64,
}

impl Test {
    fn parse(name: &str) -> Option<Self> {
        let (counts, depth) = match name.split_once('@') {
            Some((counts, depth)) => (counts, depth.trim().strip_prefix('d')?.parse().ok()?),
            None => (name, 0),
        };
        let mut this = Self { prompt: 0, generated: 0, depth };
        for part in counts.trim().split('+') {
            if let Some(tokens) = part.strip_prefix("pp") {
                this.prompt = tokens.parse().ok()?;
            } else {
                this.generated = part.strip_prefix("tg")?.parse().ok()?;
            }
        }
        (this.prompt + this.generated > 0).then_some(this)
    }

    fn label(self) -> String {
        let test = match (self.prompt, self.generated) {
            (prompt, 0) => format!("pp{prompt}"),
            (0, generated) => format!("tg{generated}"),
            (prompt, generated) => format!("pp{prompt}+tg{generated}"),
        };
        if self.depth == 0 { test } else { format!("{test} @ d{}", self.depth) }
    }

    fn metric(self) -> Metric {
        match (self.prompt, self.generated) {
            (_, 0) => Metric::PrefillStep,
            (0, _) => Metric::DecodeStep,
            _ => Metric::E2e,
        }
    }

    fn rate(self) -> Metric {
        match self.metric() {
            Metric::PrefillStep => Metric::InputThroughput,
            Metric::DecodeStep => Metric::OutputThroughput,
            _ => Metric::TotalThroughput,
        }
    }

    /// Steps in one timed test.
    fn steps(self) -> f64 {
        if self.metric() == Metric::DecodeStep { self.generated as f64 } else { 1.0 }
    }

    /// Tokens behind a rate, per step.
    fn tokens(self) -> f64 {
        if self.metric() == Metric::DecodeStep { 1.0 } else { self.prompt as f64 + self.generated as f64 }
    }

    /// The prompt, what is made, and what is in the cache before both.
    fn lengths(self) -> Setup {
        Setup {
            depth: (self.depth > 0).then_some(self.depth),
            input_tokens: Some(self.prompt as f64),
            output_tokens: (self.generated > 0).then_some(self.generated as f64),
            ..Setup::default()
        }
    }
}

/// The last part of a path of any system, without `.gguf`.
fn file_stem(path: &str) -> String {
    let name = path.rsplit(['/', '\\']).next().unwrap_or(path);
    name.strip_suffix(".gguf").unwrap_or(name).to_owned()
}

/// The storage at the end of `llama 3B Q8_0` or `qwen2 7B Q4_K - Medium`: what follows the size.
fn storage_of(kind: &str) -> Option<String> {
    let words: Vec<&str> = kind.split_whitespace().collect();
    // A mixture's size may have the active part behind it: `30B.A3B`.
    let is_size = |word: &str| {
        let whole = word.split_once(".A").map_or(word, |(whole, _)| whole);
        let digits = whole.trim_end_matches(['B', 'M', 'T']);
        digits.len() < whole.len() && digits.chars().all(|c| c.is_ascii_digit() || matches!(c, '.' | 'x'))
    };
    let size = words.iter().position(|word| is_size(word))?;
    let rest: Vec<&str> = words[size + 1..].iter().copied().filter(|w| *w != "MoE").collect();
    (!rest.is_empty()).then(|| rest.join(" "))
}

/// How the weights of a file of such a kind are stored.
fn file_dtype(stored_as: &str) -> Option<Dtype> {
    dtype_of(stored_as).map(|dtype| match dtype {
        // Experts alone are stored so, or all but the token table and the head; the rest of the file is not.
        Dtype::Mxfp4 | Dtype::Q4_0 => Dtype::Gguf,
        same => same,
    })
}

/// A row of llama-bench's Markdown table.
fn page_row(fields: &Fields<'_>, table: &Table) -> Result<ForeignRow, ImportError> {
    let wrong = |field: &str, found: String, wanted| ImportError::Field {
        file: fields.file.to_owned(),
        record: fields.record,
        field: field.to_owned(),
        found,
        wanted,
    };
    let named = fields.text("test")?.ok_or_else(|| fields.missing("test", BENCH))?;
    let test = Test::parse(&named).ok_or_else(|| {
        wrong("test", format!("`{named}`"), "pp or tg with a count, such as `tg128 @ d512`")
    })?;
    let cell = fields.text("t/s")?.ok_or_else(|| fields.missing("t/s", BENCH))?;
    let (rate, spread) = cell.split_once('±').unwrap_or((&cell, ""));
    let rate: f64 = match rate.trim().parse() {
        Ok(rate) if rate > 0.0 && f64::is_finite(rate) => rate,
        _ => return Err(wrong("t/s", format!("`{cell}`"), "a rate such as `50.83 ± 0.04`")),
    };
    let key = "t/s".to_owned();
    let time = test.tokens() / rate * 1e9;
    let mut values = vec![
        Value { metric: test.metric(), statistic: Statistic::Mean, value: time, key: key.clone() },
        Value { metric: test.rate(), statistic: Statistic::Mean, value: rate, key: key.clone() },
    ];
    if let Ok(spread) = spread.trim().parse::<f64>()
        && spread > 0.0
    {
        values.push(Value {
            metric: test.rate(),
            statistic: Statistic::StandardDeviation,
            value: spread,
            key,
        });
    }
    let model = fields.text("model")?;
    let stored_as = model.as_deref().and_then(storage_of);
    let mut settings = settings(fields);
    let setup = Setup {
        engine: Some("llama.cpp".to_owned()),
        dtype: stored_as.as_deref().and_then(file_dtype),
        stored_as,
        weight_bytes: fields.text("size")?.as_deref().and_then(size_of),
        model,
        kv_dtype: kv_dtype(fields, &mut settings)?,
        batch: Some(1),
        settings,
        ..test.lengths()
    };
    let heading = table.headings.last().map_or_else(String::new, |h| format!("{h}: "));
    Ok(ForeignRow { label: format!("{heading}{}", test.label()), setup, values, ..ForeignRow::default() })
}

/// `11.27 GiB` as bytes.
fn size_of(text: &str) -> Option<u64> {
    let (number, unit) = text.split_once(' ')?;
    let scale = match unit {
        "GiB" => 1_073_741_824.0,
        "MiB" => 1_048_576.0,
        _ => return None,
    };
    let bytes = number.parse::<f64>().ok()? * scale;
    (1.0..1e15).contains(&bytes).then(|| whole(bytes))
}

fn batched(fields: &Fields<'_>) -> Result<ForeignRow, ImportError> {
    let names = Names {
        pp: "pp",
        tg: "tg",
        parallel: "pl",
        decode: "t_tg",
        prefill: "t_pp",
        rates: ["speed_tg", "speed_pp"],
        positions: "n_kv",
    };
    batched_row(fields, &names, None)
}

fn page_batched(fields: &Fields<'_>, table: &Table) -> Result<ForeignRow, ImportError> {
    let names = Names {
        pp: "PP",
        tg: "TG",
        parallel: "B",
        decode: "T_TG s",
        prefill: "T_PP s",
        rates: ["S_TG t/s", "S_PP t/s"],
        positions: "N_KV",
    };
    batched_row(fields, &names, table.headings.last().map(String::as_str))
}

/// What batched-bench calls its columns.
struct Names {
    pp: &'static str,
    tg: &'static str,
    parallel: &'static str,
    decode: &'static str,
    prefill: &'static str,
    rates: [&'static str; 2],
    /// Positions in the cache when all is done.
    positions: &'static str,
}

fn batched_row(fields: &Fields<'_>, names: &Names, heading: Option<&str>) -> Result<ForeignRow, ImportError> {
    let prompt = fields.need_count(names.pp, BATCHED)?;
    let generated = fields.need_count(names.tg, BATCHED)?;
    let batch = fields.need_count(names.parallel, BATCHED)?;
    let mut values = Vec::new();
    let mut push = |key: &str, metric, statistic, scale: f64| -> Result<(), ImportError> {
        if let Some(number) = fields.number(key)?.filter(|n| *n > 0.0) {
            values.push(Value { metric, statistic, value: number * scale, key: key.to_owned() });
        }
        Ok(())
    };
    push(names.decode, Metric::DecodeStep, Statistic::Mean, 1e9 / generated.max(1) as f64)?;
    push(names.prefill, Metric::PrefillStep, Statistic::Single, 1e9)?;
    push(names.rates[0], Metric::OutputThroughput, Statistic::Single, 1.0)?;
    push(names.rates[1], Metric::InputThroughput, Statistic::Single, 1.0)?;
    let mut settings = settings(fields);
    // A cache of its own for each sequence holds the shared prompt as often, so that the switch says less than the size.
    let once = prompt.saturating_add(batch.saturating_mul(generated));
    if batch > 1 && prompt > 0 && fields.count(names.positions)? == Some(once) {
        settings.insert(SHARED_PROMPT.to_owned(), "1".to_owned());
    }
    let setup = Setup {
        engine: Some("llama.cpp".to_owned()),
        batch: Some(batch),
        input_tokens: Some(prompt as f64),
        output_tokens: Some(generated as f64),
        repetitions: Some(1),
        settings,
        ..Setup::default()
    };
    let heading = heading.map_or_else(String::new, |h| format!("{h}: "));
    let label = format!("{heading}b{batch} pp{prompt} tg{generated}");
    Ok(ForeignRow { label, setup, values, remarks: Vec::new(), ..ForeignRow::default() })
}

#[cfg(test)]
mod tests {
    use super::super::RooflinePlacement;
    use super::*;

    /// A row of 128 tokens on a GPU, with other settings.
    fn set(settings: &str) -> ForeignRow {
        let text = format!(
            r#"{{"model_type": "llama 8B Q8_0", "model_filename": "Llama-3.1-8B.gguf", "backends": "CUDA", "cpu_info": "a CPU",
            "gpu_info": "NVIDIA GeForce RTX 4090", {settings} "n_prompt": 0, "n_gen": 128, "avg_ns": 1.28e9}}"#
        );
        super::super::parse("bench.json", text).unwrap().remove(0).rows.remove(0)
    }

    #[test]
    fn weights_or_cache_in_the_hosts_memory_are_not_rated_against_a_gpu() {
        let place = |settings: &str| {
            super::super::place(&set(settings), BENCH, &super::super::UserOverrides::default())
        };
        for (settings, why) in [
            (r#""n_gpu_layers": 10,"#, "n_gpu_layers is 10 of 33"),
            (r#""n_gpu_layers": 32,"#, "n_gpu_layers is 32 of 33"),
            (r#""n_gpu_layers": 99, "n_cpu_moe": 20,"#, "n_cpu_moe is 20"),
            (r#""n_gpu_layers": "99", "no_kv_offload": "1","#, "no_kv_offload is set"),
            (r#""no_kv_offload": true,"#, "no_kv_offload is set"),
        ] {
            let RooflinePlacement::NoDecode(said) = place(settings) else { panic!("{settings}") };
            assert!(said.starts_with(why), "{said}");
        }
        let mut unknown = set(r#""n_gpu_layers": 10, "n_cpu_moe": 20,"#);
        unknown.setup.model = Some("of no known shape".to_owned());
        let place_of = super::super::place(&unknown, BENCH, &super::super::UserOverrides::default());
        assert!(matches!(place_of, RooflinePlacement::NoDecode(why) if why.starts_with("n_cpu_moe is 20")));
        for settings in
            [r#""n_gpu_layers": 33,"#, r#""n_gpu_layers": -1, "n_cpu_moe": 0, "no_kv_offload": false,"#, ""]
        {
            let place = place(settings);
            assert!(matches!(place, RooflinePlacement::Placed(_)), "{settings}: {place:?}");
        }
    }

    #[test]
    fn settings_are_conditions_and_those_that_vary_are_in_the_labels() {
        let page = "| model | size | params | backend | ngl | fa | test | t/s |\n|---|---|---|---|---|---|---|---|\n\
                    | llama 8B Q8_0 | 8.00 GiB | 8 B | CUDA | 99 | 0 | tg128 | 100.0 ± 1.0 |\n\
                    | llama 8B Q8_0 | 8.00 GiB | 8 B | CUDA | 99 | 1 | tg128 | 110.0 ± 1.0 |\n";
        let rows = super::super::parse("page.md", page).unwrap().remove(0).rows;
        let labels: Vec<&str> = rows.iter().map(|row| row.label.as_str()).collect();
        assert_eq!(labels, ["tg128 · flash_attn 0", "tg128 · flash_attn 1"]);
        assert!(
            rows.iter().all(|row| row.name() == "tg128" && row.setup.conditions()["n_gpu_layers"] == "99")
        );
        let row = set(r#""flash_attn": true, "n_threads": 8,"#);
        assert_eq!((row.label.as_str(), row.setup.conditions()["flash_attn"].as_str()), ("tg128", "1"));
    }

    #[test]
    fn keys_and_values_of_a_shared_prompt_are_read_once() {
        let architecture = hbmark_core::model::test_shapes::llama_3_1_8b();
        let given = super::super::UserOverrides {
            model: Some(&architecture),
            model_name: Some("Llama-3.1-8B"),
            gpu: Some(hbmark_core::ledger::devices::find("h100-sxm").unwrap()),
            dtype: Some(Dtype::Q8_0),
            ..super::super::UserOverrides::default()
        };
        let kv_read = |positions: u64| {
            let text = format!(
                r#"{{"is_pp_shared": 1, "pp": 8192, "tg": 128, "pl": 32, "n_kv": {positions}, "t_pp": 1.0, "t_tg": 1.10}}"#
            );
            let row = super::super::parse("bench.jsonl", text).unwrap().remove(0).rows.remove(0);
            let place = super::super::place(&row, BATCHED, &given);
            let RooflinePlacement::Placed(placed) = place else { panic!("{place:?}") };
            assert_eq!((placed.cell.batch, placed.cell.context), (32, 8256));
            (placed.cell.bytes.kv_read.0 / 131_072, placed.cell.status)
        };
        // 8,192 positions for all, and 64 of each; a cache for each sequence has all of them each.
        assert_eq!(kv_read(8192 + 32 * 128), (8192 + 32 * 64, hbmark_core::result::Status::Ok));
        assert_eq!(kv_read(32 * (8192 + 128)), (32 * 8256, hbmark_core::result::Status::Invalid));
    }

    #[test]
    fn tests_are_read_as_llama_bench_names_them() {
        let parsed = |text| Test::parse(text).map(|t| (t.prompt, t.generated, t.depth));
        assert_eq!(parsed("pp512"), Some((512, 0, 0)));
        assert_eq!(parsed("tg128 @ d4096"), Some((0, 128, 4096)));
        assert_eq!(parsed("pp512+tg128"), Some((512, 128, 0)));
        for wrong in ["", "tg", "pp-1", "tg128 @ 512", "xx1", "pp0"] {
            assert_eq!(parsed(wrong), None, "{wrong}");
        }
        assert_eq!(Test::parse("tg128 @ d4096").unwrap().label(), "tg128 @ d4096");
    }

    #[test]
    fn the_storage_is_what_follows_the_size() {
        assert_eq!(storage_of("llama 3B Q8_0").as_deref(), Some("Q8_0"));
        assert_eq!(storage_of("qwen2 7B Q4_K - Medium").as_deref(), Some("Q4_K - Medium"));
        assert_eq!(storage_of("gpt-oss 20B MXFP4 MoE").as_deref(), Some("MXFP4"));
        // Of such a file the size says more than the name of a part.
        assert_eq!(["MXFP4", "Q8_0"].map(file_dtype), [Some(Dtype::Gguf), Some(Dtype::Q8_0)]);
        assert_eq!(storage_of("nemotron_h 8x7B"), None);
        assert_eq!(storage_of("qwen3moe 30B.A3B Q8_0").as_deref(), Some("Q8_0"), "the active part is a size");
        assert_eq!(file_stem("LLMs\\Llama-3.2-3B-Instruct-Q8_0.gguf"), "Llama-3.2-3B-Instruct-Q8_0");
        assert_eq!(size_of("3.56 GiB"), Some(3_822_520_893));
        assert_eq!(size_of("1e300 GiB"), None);
    }
}
