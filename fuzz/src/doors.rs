//! Every door by which untrusted bytes come in, as a function of bytes.
//!
//! Enters: bytes, and a folder to put them in where a reader wants a file. Leaves: whether they were let in. Behind each door everything is
//! done that the program would do next: weights are loaded, results judged and printed in every format. The tests, the fuzz targets and
//! the driver share these functions; what they assert holds for any bytes whatever.

use std::path::{Path, PathBuf};

use hbmark::weights::OpenModel;
use hbmark::weights::tokenizer::Tokenizer;
use hbmark_core::ledger::devices;
use hbmark_core::model::Dtype;
use hbmark_core::result::Phase;
use hbmark_core::result::serving::Arrivals;
use hbmark_report::analysis::import;
use hbmark_report::output::{Format, markdown, record, render};
use hbmark_traffic::trace;
use hbmark_traffic::workload::{Workload, plan_trace};

/// One reader of foreign bytes.
#[derive(Debug, Clone, Copy)]
pub struct FuzzTarget {
    pub name: &'static str,
    /// Memory that may be taken for each byte of the input, beside [`ALLOWANCE`].
    pub per_byte: usize,
    /// Where mutations begin to matter little: the weights behind a header.
    pub head: usize,
    pub open: fn(&[u8], &Path) -> bool,
    pub seeds: fn() -> Vec<Seed>,
}

/// Memory that any door may take beside its input.
pub const ALLOWANCE: usize = 64 << 20;

/// Something to begin from.
#[derive(Debug, Clone)]
pub struct Seed {
    pub name: String,
    pub bytes: Vec<u8>,
}

impl Seed {
    pub fn new(name: impl Into<String>, bytes: impl Into<Vec<u8>>) -> Self {
        Self { name: name.into(), bytes: bytes.into() }
    }
}

pub const FUZZ_TARGETS: &[FuzzTarget] = &[
    FuzzTarget { name: "safetensors", per_byte: 1, head: 4_096, open: safetensors, seeds: safetensors_seeds },
    FuzzTarget { name: "index", per_byte: 1, head: usize::MAX, open: index, seeds: index_seeds },
    FuzzTarget { name: "gguf", per_byte: 1, head: 4_096, open: gguf, seeds: gguf_seeds },
    FuzzTarget { name: "config", per_byte: 1, head: usize::MAX, open: config, seeds: config_seeds },
    // The tokenizers crate builds its tables as it likes: twice the vocabulary, its merges, an automaton of the added tokens.
    FuzzTarget { name: "tokenizer", per_byte: 32, head: usize::MAX, open: tokenizer, seeds: tokenizer_seeds },
    FuzzTarget { name: "trace", per_byte: 1, head: usize::MAX, open: trace, seeds: trace_seeds },
    FuzzTarget { name: "workload", per_byte: 1, head: usize::MAX, open: workload, seeds: workload_seeds },
    FuzzTarget { name: "foreign", per_byte: 1, head: usize::MAX, open: foreign, seeds: foreign_seeds },
    FuzzTarget { name: "result", per_byte: 1, head: usize::MAX, open: result, seeds: result_seeds },
    FuzzTarget {
        name: "serve_result",
        per_byte: 1,
        head: usize::MAX,
        open: serve_result,
        seeds: serve_seeds,
    },
];

/// The door of a name.
pub fn door(name: &str) -> Option<&'static FuzzTarget> {
    FUZZ_TARGETS.iter().find(|door| door.name == name)
}

fn root() -> PathBuf {
    // Of the repository, whichever crate this is compiled in.
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    if here.join("tests/fixtures").is_dir() { here.to_path_buf() } else { here.join("..") }
}

pub fn fixture(name: &str) -> PathBuf {
    root().join("tests/fixtures").join(name)
}

fn bytes_of(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn seed_file(name: &str) -> Seed {
    Seed::new(name, bytes_of(&root().join("fuzz/seeds").join(name)))
}

fn all_of(folder: &Path) -> Vec<Seed> {
    let mut seeds: Vec<Seed> = std::fs::read_dir(folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.is_file() && path.file_name().is_some_and(|name| name != "README.md"))
        .map(|path| Seed::new(path.file_name().unwrap_or_default().to_string_lossy(), bytes_of(&path)))
        .collect();
    seeds.sort_by(|a, b| a.name.cmp(&b.name));
    seeds
}

/// A folder below the scratch that holds these files, put there once.
fn prepared(scratch: &Path, name: &str, files: &[(&str, PathBuf)]) -> PathBuf {
    let folder = scratch.join(name);
    if !folder.is_dir() {
        std::fs::create_dir_all(&folder).expect("the scratch is writable");
        for (name, from) in files {
            std::fs::write(folder.join(name), bytes_of(from)).expect("the scratch is writable");
        }
    }
    folder
}

fn put(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).expect("the scratch is writable");
}

/// An error as the program would print it: one line of plain text.
fn refused(error: impl std::error::Error + Send + Sync + 'static) -> bool {
    let line = hbmark::cli::one_line(&anyhow::Error::new(error));
    assert!(!line.is_empty() && !line.contains('\n'), "{line:?}");
    assert!(line.len() < 16 << 10, "an error of {} bytes", line.len());
    harmless(&line);
    false
}

/// Text that does nothing to a terminal but stand there.
pub fn harmless(text: &str) {
    let acts = |c: &char| {
        (c.is_control() && *c != '\n')
            || matches!(*c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{2028}' | '\u{2029}')
    };
    if let Some(at) = text.char_indices().find(|(_, c)| acts(c)) {
        let start = text[..at.0].char_indices().rev().nth(60).map_or(0, |(start, _)| start);
        panic!("{:?} reaches the terminal behind {:?}", at.1, &text[start..at.0]);
    }
}

/// CSV whose cells no spreadsheet runs.
pub fn harmless_csv(text: &str) {
    let mut reader = csv::ReaderBuilder::new().flexible(true).has_headers(false).from_reader(text.as_bytes());
    for record in reader.records() {
        let record = record.expect("our own CSV can be read");
        for cell in &record {
            let runs = cell.starts_with(['=', '+', '-', '@', '\t', '\r']) && cell.parse::<f64>().is_err();
            assert!(!runs, "a spreadsheet would run {cell:?}");
        }
    }
}

/// Weights that were let in are loaded as every engine loads them.
fn load(model: &OpenModel) -> bool {
    let device = candle_core::Device::Cpu;
    let dtype = if model.is_gguf() { Dtype::Gguf } else { Dtype::F32 };
    let loaded = model.load(dtype, &device, &mut |_| {});
    let streamed = model.stream(if model.is_gguf() { Dtype::Gguf } else { Dtype::Q8_0 }, &mut |_, _| Ok(()));
    loaded.is_ok() && streamed.is_ok()
}

fn open_model(path: &Path) -> bool {
    let path = path.to_str().expect("a scratch path is text");
    match hbmark::weights::open(path, None, 0) {
        Ok(model) => load(&model),
        Err(error) => refused(error),
    }
}

fn safetensors(bytes: &[u8], scratch: &Path) -> bool {
    let config = fixture("models/llama-bf16/config.json");
    let folder = prepared(scratch, "safetensors", &[("config.json", config)]);
    put(&folder.join("model.safetensors"), bytes);
    open_model(&folder)
}

fn safetensors_seeds() -> Vec<Seed> {
    vec![Seed::new("llama-bf16", bytes_of(&fixture("models/llama-bf16/model.safetensors")))]
}

fn index(bytes: &[u8], scratch: &Path) -> bool {
    let of = |name: &str| fixture("models/llama-sharded").join(name);
    let shards = [1, 2, 3].map(|n| format!("model-0000{n}-of-00003.safetensors"));
    let mut files: Vec<(&str, PathBuf)> = shards.iter().map(|name| (name.as_str(), of(name))).collect();
    files.push(("config.json", of("config.json")));
    let folder = prepared(scratch, "index", &files);
    put(&folder.join("model.safetensors.index.json"), bytes);
    open_model(&folder)
}

fn index_seeds() -> Vec<Seed> {
    vec![Seed::new("llama-sharded", bytes_of(&fixture("models/llama-sharded/model.safetensors.index.json")))]
}

fn gguf(bytes: &[u8], scratch: &Path) -> bool {
    let path = scratch.join("model.gguf");
    put(&path, bytes);
    open_model(&path)
}

fn gguf_seeds() -> Vec<Seed> {
    let of = |name: &str| Seed::new(name, bytes_of(&fixture("models").join(name)));
    vec![of("llama-q8_0.gguf"), of("qwen3-q8_0.gguf")]
}

fn config(bytes: &[u8], _: &Path) -> bool {
    let Ok(text) = std::str::from_utf8(bytes) else { return false };
    if bytes.len() > 4 << 20 {
        // The file would not be read.
        return false;
    }
    match hbmark_core::model::parse_config(text, Path::new("config.json")) {
        Ok(architecture) => {
            architecture.check().expect("a config that was read is within bounds");
            let model = OpenModel::synthetic("a config", architecture, 0);
            corners(&model);
            true
        }
        Err(error) => refused(error),
    }
}

/// The smallest and the largest step that can be asked for.
fn corners(model: &OpenModel) {
    let Ok(device) = devices::find("h100-sxm") else { return };
    let question = hbmark::run::predict::Question {
        device: device.clone(),
        dtypes: vec![Dtype::Fp8, Dtype::Int4],
        kv_dtype: Some(Dtype::F32),
        phases: vec![Phase::Prefill, Phase::Decode],
        batches: vec![1, 1 << 27],
        contexts: vec![1, 1 << 27],
    };
    let report =
        hbmark::run::predict::report(model, &question, "hbmark predict").expect("formats of every model");
    assert_eq!(report.cells.len(), 16);
}

fn config_seeds() -> Vec<Seed> {
    let mut seeds = all_of(&fixture("configs"));
    seeds.push(Seed::new("tiny", bytes_of(&fixture("models/llama-bf16/config.json"))));
    seeds
}

fn tokenizer(bytes: &[u8], scratch: &Path) -> bool {
    let folder = prepared(scratch, "tokenizer", &[]);
    put(&folder.join("tokenizer.json"), bytes);
    match Tokenizer::open(&folder) {
        Ok(tokenizer) => {
            for text in [
                "",
                "a memory wall\n\n  é 一 123456",
                "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!",
                "\u{301}\u{0}\r\n",
            ] {
                if let Ok(tokens) = tokenizer.encode(text) {
                    let _ = tokenizer.decode(&tokens);
                }
            }
            let _ = tokenizer.decode(&[0, 1, u32::MAX]);
            if let Err(error) = tokenizer.check_vocab(1) {
                refused(error);
            }
            true
        }
        Err(error) => refused(error),
    }
}

fn tokenizer_seeds() -> Vec<Seed> {
    vec![seed_file("tokenizer-words.json"), seed_file("tokenizer-bpe.json")]
}

fn trace(bytes: &[u8], scratch: &Path) -> bool {
    let path = scratch.join("trace");
    put(&path, bytes);
    match trace::read(&path, None) {
        Ok(trace) => {
            assert!(trace.requests.windows(2).all(|pair| pair[0].arrival.0 <= pair[1].arrival.0));
            assert!(
                trace
                    .requests
                    .iter()
                    .all(|r| r.arrival.0.is_finite() && r.input_tokens > 0 && r.output_tokens > 0)
            );
            if trace.requests.len() <= 10_000 {
                let plan = plan_trace(&trace, 0.5, 1);
                assert!(plan.iter().zip(&trace.requests).all(|(p, r)| p.prompt_len() == r.input_tokens));
            }
            true
        }
        Err(error) => refused(error),
    }
}

fn trace_seeds() -> Vec<Seed> {
    let mut seeds = all_of(&fixture("traces"));
    let line = r#"{"arrival_s": 0.5, "input_tokens": 300, "output_tokens": 20, "prefix_ids": [7], "prefix_block": 256, "priority": 2}"#;
    seeds.push(Seed::new("hbmark.jsonl", format!("{line}\n{}\n", line.replace("0.5", "0.75"))));
    // A few lines are enough to begin from.
    for seed in &mut seeds {
        let end = seed.bytes.iter().enumerate().filter(|(_, byte)| **byte == b'\n').nth(12).map(|(at, _)| at);
        seed.bytes.truncate(end.unwrap_or(usize::MAX));
    }
    seeds
}

fn workload(bytes: &[u8], scratch: &Path) -> bool {
    let path = scratch.join("workload.toml");
    put(&path, bytes);
    match Workload::open(path.to_str().expect("a scratch path is text")) {
        Ok(workload) => {
            let plan = workload.plan(Some(10.0), Arrivals::Poisson, None, 40, 7);
            assert!(plan.len() <= 40 && plan.iter().all(|request| request.output_len > 0));
            true
        }
        Err(error) => refused(error),
    }
}

fn workload_seeds() -> Vec<Seed> {
    vec![Seed::new(
        "all.toml",
        r#"name = "mine"
source = "measured"
input = { distribution = "lognormal", mean = 500.0, cv = 1.0, min = 10, max = 4000 }
output = { distribution = "histogram", buckets = [[1, 10, 0.5], [11, 100, 2.0]] }
prefix = { tokens = 256, share = 0.5, groups = 4 }
session = { turns = 3, think_s = 5.0 }
[[tenants]]
name = "a"
share = 3.0
[[tenants]]
name = "b"
share = 1.0
priority = 2
"#,
    )]
}

const TEXT_FORMATS: [Format; 4] = [Format::Table, Format::Json, Format::Csv, Format::Md];

/// A text as it is printed in a format. JSON is for programs, and its own escapes keep control characters out.
fn printed(text: &str, format: Format) {
    match format {
        Format::Json => assert!(!text.contains(|c: char| c.is_control()
            && c != '\n'
            && c != '\u{7f}'
            && !('\u{80}'..='\u{9f}').contains(&c))),
        Format::Csv => {
            harmless_csv(text);
            harmless(text);
        }
        _ => harmless(text),
    }
}

fn foreign(bytes: &[u8], _: &Path) -> bool {
    let Ok(text) = std::str::from_utf8(bytes) else { return false };
    let results = match import::parse("result.json", text) {
        Ok(results) => results,
        Err(error) => return refused(error),
    };
    let lists: Vec<_> = results.iter().map(hbmark_report::analysis::of_foreign).collect();
    let gpu = devices::find("h100-sxm").ok();
    let given = import::UserOverrides { gpu, dtype: Some(Dtype::Bf16), ..import::UserOverrides::default() };
    let imported: Vec<_> = results.into_iter().map(|result| import::Imported::new(result, &given)).collect();
    for format in TEXT_FORMATS {
        printed(
            &render(imported.as_slice(), format, false).expect("an imported result can be printed"),
            format,
        );
        printed(&render(lists.as_slice(), format, false).expect("a checklist can be printed"), format);
    }
    true
}

fn foreign_seeds() -> Vec<Seed> {
    all_of(&fixture("foreign"))
}

fn result(bytes: &[u8], _: &Path) -> bool {
    let Ok(text) = std::str::from_utf8(bytes) else { return false };
    let mut report = match hbmark_core::result::saved::parse(text) {
        Ok(report) => report,
        Err(error) => return refused(error),
    };
    hbmark_report::analysis::judge::recompute(&mut report);
    for format in TEXT_FORMATS {
        printed(&render(&report, format, false).expect("a result can be printed"), format);
        let found = hbmark_report::analysis::explain(&report);
        printed(&render(found.as_slice(), format, false).expect("findings can be printed"), format);
        let list = [hbmark_report::analysis::of_report(&report)];
        printed(&render(list.as_slice(), format, false).expect("a checklist can be printed"), format);
        for ladder in &report.ladders {
            printed(&render(ladder, format, false).expect("a ladder can be printed"), format);
        }
    }
    let page = render(&report, Format::Html, false).expect("a page can be drawn");
    assert!(!page.contains("<img"), "a name became an element");
    true
}

fn result_seeds() -> Vec<Seed> {
    vec![seed_file("result.json"), seed_file("result-full.json")]
}

fn serve_result(bytes: &[u8], scratch: &Path) -> bool {
    let path = scratch.join("serve.json");
    put(&path, bytes);
    match hbmark_core::result::serving::read(&path) {
        Ok(Some(report)) => {
            for format in TEXT_FORMATS {
                printed(&render(&report, format, false).expect("a result can be printed"), format);
            }
            let page = render(&report, Format::Html, false).expect("a page can be drawn");
            assert!(!page.contains("<img"), "a name became an element");
            let planned = hbmark_report::analysis::capacity::capacity(&report, &question());
            harmless(&markdown(&record::of_serving(&report, planned.as_ref().ok())));
            if let Ok(planned) = planned {
                for format in TEXT_FORMATS {
                    printed(&render(&planned, format, false).expect("a plan can be printed"), format);
                }
            }
            true
        }
        Ok(None) => false,
        Err(error) => refused(error),
    }
}

/// How many instances three requests a second need.
fn question() -> hbmark_report::analysis::capacity::Question {
    hbmark_report::analysis::capacity::Question {
        target_rate: 3.0,
        mean_rate: None,
        slo: None,
        headroom: 0.2,
        gpus_per_instance: 1,
        prices: None,
        context: None,
        concurrency: None,
    }
}

fn serve_seeds() -> Vec<Seed> {
    vec![seed_file("serve.json"), seed_file("serve-sweep.json")]
}
