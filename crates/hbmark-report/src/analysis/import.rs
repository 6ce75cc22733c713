//! Results of other programs, mapped by meaning.
//!
//! Enters: a file of vLLM, SGLang, llama.cpp, AIPerf, GuideLLM, inference-perf, optimum-benchmark or TensorRT-LLM. Leaves:
//! [`ForeignResult`]s, plain data with one name per metric, whatever the file calls it; [`metric_keys`] maps the names. A file is untrusted:
//! its size is checked before it is read, counts are capped, text loses its control characters, and a field of the wrong kind is an error
//! that names it. What a file does not report stays `None`; nothing is guessed from names of files or folders.

mod aiperf;
mod consistency;
mod decoding;
mod document;
mod fields;
mod genai_perf;
mod guidellm;
mod inference_perf;
mod llama_cpp;
pub mod metric_keys;
mod model_name;
mod optimum;
mod own_serving;
pub mod placement;
mod requests;
mod sglang;
mod trtllm;
mod unsupported;
mod vllm;
mod vllm_engine;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use document::Document;
use serde::{Deserialize, Serialize};

use super::capacity::number;
use super::words;
use hbmark_core::input::{self, InputError, plain};
use hbmark_core::model::Dtype;
use hbmark_core::result::Cause;

pub use metric_keys::{Alias, Metric, Statistic};
pub use own_serving::of_serving;
pub use placement::{
    Imported, Missing, Placement, RooflinePlacement, UserOverrides, objections, place, remedy,
};

/// A summary takes kilobytes; a detailed export of a long run a few dozen megabytes.
const MAX_BYTES: u64 = 64 << 20;
/// More rows than this come from a log, not a summary.
const MAX_ROWS: usize = 10_000;
/// Characters of untrusted text that are kept.
const MAX_TEXT: usize = 160;

/// What stands in a label before the conditions that tell its row from others of the name.
const APART: &str = " · ";
/// Conditions that tell rows of a name apart beside their settings.
const TELLING: &[&str] = &["model", "stored as", "KV dtype"];

/// What was run, by name; a name without a value is not reported.
pub type Conditions = BTreeMap<String, String>;

/// Which program and mode wrote a result, in the order in which the table of aliases lists them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum ForeignFormat {
    VllmServe,
    VllmSummary,
    VllmLatency,
    VllmThroughput,
    VllmEngine,
    SglangOneBatch,
    SglangServing,
    LlamaBench,
    LlamaBatchedBench,
    Aiperf,
    AiperfRecords,
    GenaiPerfAnalyze,
    Guidellm,
    InferencePerf,
    OptimumBenchmark,
    TrtllmBench,
    /// Our own serving results, which are read as themselves and placed on the roofline like the others.
    HbmarkServe,
}

impl ForeignFormat {
    /// What a person calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::VllmServe => "vLLM bench serve",
            Self::VllmSummary => "vLLM benchmark table",
            Self::VllmLatency => "vLLM bench latency",
            Self::VllmThroughput => "vLLM bench throughput",
            Self::VllmEngine => "vLLM engine log or metrics",
            Self::SglangOneBatch => "SGLang bench_one_batch",
            Self::SglangServing => "SGLang bench_serving",
            Self::LlamaBench => "llama-bench",
            Self::LlamaBatchedBench => "llama-batched-bench",
            Self::Aiperf => "AIPerf / GenAI-Perf",
            Self::AiperfRecords => "AIPerf records",
            Self::GenaiPerfAnalyze => "GenAI-Perf analyze",
            Self::Guidellm => "GuideLLM",
            Self::InferencePerf => "inference-perf",
            Self::OptimumBenchmark => "optimum-benchmark",
            Self::TrtllmBench => "trtllm-bench",
            Self::HbmarkServe => "hbmark serve",
        }
    }

    /// The engine whose steps it times; `None` where the program can drive any server.
    pub fn engine(self) -> Option<&'static str> {
        match self {
            Self::VllmServe
            | Self::VllmSummary
            | Self::VllmLatency
            | Self::VllmThroughput
            | Self::VllmEngine => Some("vllm"),
            Self::SglangOneBatch | Self::SglangServing => Some("sglang"),
            Self::LlamaBench | Self::LlamaBatchedBench => Some("llama.cpp"),
            Self::TrtllmBench => Some("tensorrt-llm"),
            Self::Aiperf
            | Self::AiperfRecords
            | Self::GenaiPerfAnalyze
            | Self::Guidellm
            | Self::InferencePerf
            | Self::OptimumBenchmark
            | Self::HbmarkServe => None,
        }
    }

    /// Whether requests came over a server, and not steps from a loop.
    pub fn served(self) -> bool {
        !matches!(
            self,
            Self::SglangOneBatch | Self::LlamaBench | Self::LlamaBatchedBench | Self::OptimumBenchmark
        )
    }
}

/// What one file holds of one format.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ForeignResult {
    /// The name of the file, without its folder.
    pub source: String,
    pub format: ForeignFormat,
    pub rows: Vec<ForeignRow>,
}

/// One measured configuration.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ForeignRow {
    /// What the file calls it: `tg128 @ d512`, a run's name, or its place in the file.
    pub label: String,
    pub setup: Setup,
    pub values: Vec<Value>,
    /// What limits trust in this row, as far as the file shows it.
    pub remarks: Vec<String>,
    /// Figures that contradict one another; a row with any is not rated.
    #[serde(default)]
    pub problems: Vec<Cause>,
    /// Of our own results: more was asked for than the system keeps up with, so that its latencies are those of the run's length. Not
    /// rated, and no fault of the file.
    #[serde(default)]
    pub saturated: bool,
}

/// The conditions of a row; `None` where the file does not report them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Setup {
    /// The program whose steps were timed.
    pub engine: Option<String>,
    pub engine_version: Option<String>,
    pub model: Option<String>,
    /// Storage of the weights, where it is one this program has.
    pub dtype: Option<Dtype>,
    /// Storage of the weights as the file puts it.
    pub stored_as: Option<String>,
    pub kv_dtype: Option<Dtype>,
    /// All weights, as the file states their size.
    pub weight_bytes: Option<u64>,
    pub gpu: Option<String>,
    pub cpu: Option<String>,
    /// GPUs that hold the model together.
    pub gpus: Option<u64>,
    /// Sequences in a step.
    pub batch: Option<u64>,
    /// The most requests under way at once that the load generator allowed.
    pub max_concurrency: Option<u64>,
    /// Requests under way at once, mean.
    pub concurrency: Option<f64>,
    /// Requests offered per second; infinite where all came at once.
    pub request_rate: Option<Rate>,
    /// Prompt tokens per request, mean.
    pub input_tokens: Option<f64>,
    /// Positions in the cache before the prompt, where a step benchmark fills it first.
    #[serde(default)]
    pub depth: Option<u64>,
    /// Tokens made per request, mean.
    pub output_tokens: Option<f64>,
    pub requests: Option<u64>,
    pub completed: Option<u64>,
    pub failed: Option<u64>,
    pub duration_s: Option<f64>,
    pub repetitions: Option<u64>,
    /// Warm-up runs or requests before the first that counts.
    pub warmup: Option<u64>,
    pub seed: Option<u64>,
    /// Mean tokens accepted per speculative step; above 1 a step makes several tokens.
    pub accept_length: Option<f64>,
    /// Settings of the engine under the names that its program has for them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub settings: BTreeMap<String, String>,
    pub date: Option<String>,
}

impl Setup {
    /// Positions in the cache of a decode step, mean over the tokens made: what was there, what went in, and half of what came out.
    pub fn decode_context(&self) -> Option<f64> {
        Some(self.depth.unwrap_or(0) as f64 + self.input_tokens? + self.output_tokens? / 2.0)
    }

    /// What was run, as far as the file says.
    pub fn conditions(&self) -> Conditions {
        let rate = self.request_rate.map(|rate| match rate {
            Rate::PerSecond(rate) => format!("{}/s", number(rate)),
            Rate::Unlimited => "unlimited".to_owned(),
        });
        let count = |count: Option<u64>| count.map(|count| count.to_string());
        let known = [
            ("engine", self.engine.clone()),
            ("engine version", self.engine_version.clone()),
            ("model", self.model.clone()),
            ("stored as", self.stored_as.clone()),
            ("KV dtype", self.kv_dtype.map(|dtype| dtype.to_string())),
            ("GPU", self.gpu.clone()),
            ("GPUs", count(self.gpus)),
            ("batch", count(self.batch)),
            ("limit of requests at once", count(self.max_concurrency)),
            ("rate", rate),
            ("depth", count(self.depth)),
            ("mean prompt tokens", self.input_tokens.map(number)),
            ("mean output tokens", self.output_tokens.map(number)),
        ];
        let known = known.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?)));
        known.chain(self.settings.clone()).collect()
    }
}

/// An arrival rate.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rate {
    PerSecond(f64),
    /// Every request at once, or as many as the concurrency allows.
    Unlimited,
}

/// One number of a file as our metric in our unit: nanoseconds for times, per second for rates.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Value {
    pub metric: Metric,
    pub statistic: Statistic,
    pub value: f64,
    /// The foreign key it was read from.
    pub key: String,
}

impl ForeignRow {
    /// The label without the conditions that tell it from rows of the same name.
    pub fn name(&self) -> &str {
        self.label.split_once(APART).map_or(&self.label, |(name, _)| name)
    }

    /// A number of this row.
    pub fn value(&self, metric: Metric, statistic: Statistic) -> Option<f64> {
        self.values.iter().find(|v| v.metric == metric && v.statistic == statistic).map(|v| v.value)
    }

    /// A rate as an amount over all of the time, which some formats write as a mean.
    pub fn rate(&self, metric: Metric) -> Option<f64> {
        self.value(metric, Statistic::Single).or_else(|| self.value(metric, Statistic::Mean))
    }

    /// The middle of a metric. Of a time it is the median where the file has it, otherwise the mean, otherwise the only figure. A rate
    /// is an amount over all of the time, which is the mean or the only figure: the median of how fast things went from moment to moment
    /// adds up to nothing.
    pub fn center(&self, metric: Metric) -> Option<&Value> {
        let order = if metric.is_time() {
            [Statistic::Median, Statistic::Mean, Statistic::Single]
        } else {
            [Statistic::Single, Statistic::Mean, Statistic::Median]
        };
        order.into_iter().find_map(|s| self.values.iter().find(|v| v.metric == metric && v.statistic == s))
    }
}

/// Why a file could not be imported.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} is not a regular file; give the result itself")]
    NotAFile { path: PathBuf },
    #[error(
        "{path} holds {size} bytes, and a foreign result is at most {limit}; give the summary, not the detailed export"
    )]
    TooLarge { path: PathBuf, size: u64, limit: u64 },
    #[error("{file} is not UTF-8 text from byte {at} on; give the result as its program wrote it")]
    NotText { file: String, at: usize },
    #[error("{file} is empty")]
    Empty { file: String },
    #[error("{file} has more than {limit} {what}; cut it down to the runs that matter")]
    TooMany { file: String, what: &'static str, limit: usize },
    #[error("{file}: {}", hbmark_core::input::json::problem(json))]
    Json { file: String, json: serde_json::Error },
    #[error("{file} cannot be read as YAML")]
    Yaml { file: String, source: Box<serde_saphyr::Error> },
    #[error("{file} does not end with a whole line; was it cut off?")]
    CutOff { file: String },
    #[error("{file} cannot be read as CSV")]
    Csv { file: String, source: csv::Error },
    /// `object`: JSON, and an object, as results of this program are.
    #[error("{file} is not a result this program knows ({found}); it reads {}", known_formats())]
    Unrecognised { file: String, found: String, object: bool },
    #[error("{file} is a result of this program; `hbmark report FILE` prints it")]
    OwnResult { file: String },
    #[error("{file} is {what}")]
    NotAResult { file: String, what: &'static str },
    #[error("{file}, record {record}: field `{field}` is {found}, and {wanted} was expected")]
    Field { file: String, record: usize, field: String, found: String, wanted: &'static str },
    #[error("{file}, record {record}: field `{field}` is missing, and {} always has it", .format.name())]
    MissingField { file: String, record: usize, field: &'static str, format: ForeignFormat },
    #[error("{file}, record {record}: {} holds no measurement", .format.name())]
    NothingMeasured { file: String, record: usize, format: ForeignFormat },
}

fn known_formats() -> String {
    ForeignFormat::value_variants().iter().map(|f| f.name()).collect::<Vec<_>>().join(", ")
}

/// Reads a foreign result. A file may hold several: a Markdown page with tables of two programs gives one for each.
///
/// # Errors
/// [`ImportError`], with the file, and the record and field where there is one.
pub fn read(path: &Path) -> Result<Vec<ForeignResult>, ImportError> {
    let owned = || path.to_path_buf();
    let name = source_name(path);
    let text = input::read_text(path, MAX_BYTES).map_err(|refused| match refused {
        InputError::Io(source) => ImportError::Read { path: owned(), source },
        InputError::NotRegular { .. } => ImportError::NotAFile { path: owned() },
        InputError::TooLarge { size, limit } => ImportError::TooLarge { path: owned(), size, limit },
        InputError::NotText { at } => ImportError::NotText { file: name.clone(), at },
    })?;
    parse(&name, text)
}

/// Adds to the labels of rows of one name the model, storage and settings in which they differ.
fn tell_apart(rows: &mut [ForeignRow]) {
    let mut named: BTreeMap<String, Vec<&mut ForeignRow>> = BTreeMap::new();
    for row in rows {
        named.entry(row.label.clone()).or_default().push(row);
    }
    for rows in named.into_values().filter(|rows| rows.len() > 1) {
        let settings: Vec<Conditions> = rows
            .iter()
            .map(|row| {
                let mut known = row.setup.conditions();
                known
                    .retain(|key, _| TELLING.contains(&key.as_str()) || row.setup.settings.contains_key(key));
                known
            })
            .collect();
        let varies = |key: &String| settings.iter().any(|other| other.get(key) != settings[0].get(key));
        for (row, settings) in rows.into_iter().zip(&settings) {
            let said =
                settings.iter().filter(|(key, _)| varies(key)).map(|(key, value)| format!("{key} {value}"));
            let said = said.collect::<Vec<_>>().join(", ");
            if !said.is_empty() {
                row.label = format!("{}{APART}{said}", row.label);
            }
        }
    }
}

/// What a file is called in [`ForeignResult::source`] and in messages.
pub(super) fn source_name(path: &Path) -> String {
    clipped(&path.file_name().map_or_else(|| path.to_string_lossy(), std::ffi::OsStr::to_string_lossy))
}

/// Reads a foreign result from text; `file` is for messages and for [`ForeignResult::source`].
///
/// # Errors
/// As [`read`].
pub fn parse(file: &str, text: impl Into<String>) -> Result<Vec<ForeignResult>, ImportError> {
    let document = Document::parse(file, text.into())?;
    let mut results = recognise(&document)?;
    for result in &mut results {
        tell_apart(&mut result.rows);
        let format = result.format;
        for row in &mut result.rows {
            row.problems.extend(consistency::of_row(row, format));
            row.remarks.extend(consistency::remark(row, format));
            row.problems.extend(nothing_completed(&row.setup));
        }
    }
    let rows: usize = results.iter().map(|r| r.rows.len()).sum();
    if rows > MAX_ROWS {
        return Err(ImportError::TooMany { file: file.to_owned(), what: "rows", limit: MAX_ROWS });
    }
    for result in &results {
        let says_nothing =
            |row: &ForeignRow| row.values.is_empty() && row.remarks.is_empty() && row.problems.is_empty();
        if let Some(at) = result.rows.iter().position(says_nothing) {
            let file = file.to_owned();
            return Err(ImportError::NothingMeasured { file, record: at + 1, format: result.format });
        }
    }
    Ok(results)
}

/// What a reader of one program's results makes of a document: `None` when it is not that program's.
type Reader = fn(&Document) -> Option<Result<Vec<ForeignResult>, ImportError>>;

/// The readers, those first whose marks are the surest.
const READERS: &[Reader] = &[
    llama_cpp::read,
    trtllm::read,
    guidellm::read,
    optimum::read,
    inference_perf::read,
    aiperf::read,
    genai_perf::read,
    vllm_engine::read,
    sglang::read,
    vllm::read,
];

fn recognise(document: &Document) -> Result<Vec<ForeignResult>, ImportError> {
    READERS.iter().find_map(|reader| reader(document)).unwrap_or_else(|| {
        let file = document.file.clone();
        let own = [["schema_version", "cells"], ["schema_version", "points"]];
        if own.iter().any(|keys| document.objects_with(keys).is_some()) {
            return Err(ImportError::OwnResult { file });
        }
        if let Some(what) = unsupported::what(document) {
            return Err(ImportError::NotAResult { file, what });
        }
        let object = document.objects_with(&[]).is_some_and(|objects| !objects[0].is_empty());
        Err(ImportError::Unrecognised { file, found: document.describe(), object })
    })
}

/// Untrusted text: without control characters, and not longer than a line.
fn clipped(text: &str) -> String {
    let text = plain(text.trim());
    match text.char_indices().nth(MAX_TEXT) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// A run of which no request ended is not a measurement, whatever its summary says.
fn nothing_completed(setup: &Setup) -> Option<Cause> {
    let sent = setup.requests.or(setup.failed);
    (setup.completed == Some(0)).then(|| {
        let of = sent.map_or_else(String::new, |sent| format!(" of {sent}"));
        Cause::other(format!("no request{of} completed"))
    })
}

/// A remark where requests failed.
fn failures(failed: Option<u64>) -> Option<String> {
    let failed = failed.filter(|failed| *failed > 0)?;
    Some(format!(
        "failed: {}; the figures leave what failed out, which flatters the tail",
        words::counted(failed, "request")
    ))
}

/// The dtype of a foreign name, where this program has it.
fn dtype_of(word: &str) -> Option<Dtype> {
    let known = [
        (&["f32", "fp32", "float32", "float", "all f32", "torch.float32"][..], Dtype::F32),
        (&["bf16", "bfloat16", "torch.bfloat16"][..], Dtype::Bf16),
        (&["f16", "fp16", "float16", "half", "torch.float16"][..], Dtype::F16),
        (
            &["fp8", "fp8_e4m3", "fp8_e5m2", "float8", "float8_e4m3fn", "fbgemm_fp8", "w8a8_fp8"][..],
            Dtype::Fp8,
        ),
        (&["int8", "w8a8_int8"][..], Dtype::Int8),
        (&["mxfp4"][..], Dtype::Mxfp4),
        (&["mxfp8"][..], Dtype::Mxfp8),
        (&["nvfp4", "modelopt_fp4"][..], Dtype::Nvfp4),
        (&["q8_0"][..], Dtype::Q8_0),
        (&["q4_0"][..], Dtype::Q4_0),
        (&["q4_k"][..], Dtype::Q4K),
        (&["q5_k"][..], Dtype::Q5K),
        (&["q6_k"][..], Dtype::Q6K),
    ];
    let word = word.trim().to_lowercase();
    known.iter().find(|(words, _)| words.contains(&word.as_str())).map(|(_, dtype)| *dtype)
}

#[cfg(test)]
mod tests;
