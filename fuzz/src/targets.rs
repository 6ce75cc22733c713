//! Every reader of untrusted bytes as a function of bytes; those that load weights or a tokenizer are in [`weights`](crate::weights).
//!
//! Enters: bytes, and a scratch folder for readers that want a file. Leaves: whether the reader accepted them. After each reader the
//! next stages of the program run too: configs are predicted, results judged and printed in every format. The tests, the fuzz targets
//! and the driver share these functions; their assertions hold for any input.

use std::path::{Path, PathBuf};

use hbmark_client::answer::{Answer, Step};
use hbmark_client::exchange::Exchange;
use hbmark_client::metrics::Snapshot;
use hbmark_core::ledger::{ExpertRouting, Request, devices, predict};
use hbmark_core::model::{Architecture, Dtype};
use hbmark_core::result::Phase;
use hbmark_core::result::serving::Arrivals;
use hbmark_fleet::nodes;
use hbmark_fleet::plan::{Manifest, Plan};
use hbmark_fleet::result::{FleetReport, Settings};
use hbmark_fleet::simulation::{Fault, Simulated};
use hbmark_report::analysis::import;
use hbmark_report::output::{Format, markdown, record, render};
use hbmark_traffic::dataset;
use hbmark_traffic::trace;
use hbmark_traffic::workload::{Workload, plan_trace};

/// One reader of untrusted bytes.
#[derive(Debug, Clone, Copy)]
pub struct FuzzTarget {
    pub name: &'static str,
    /// Memory that may be taken for each byte of the input, beside [`ALLOWANCE`].
    pub per_byte: usize,
    /// Only this many leading bytes are mutated: behind a header there are only weights.
    pub head: usize,
    /// Reads the bytes, and says whether they were accepted.
    pub run: fn(&[u8], &Path) -> bool,
    pub seeds: fn() -> Vec<Seed>,
}

/// Memory that any target may take beside its input.
pub const ALLOWANCE: usize = 64 << 20;

/// A named input.
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

/// The targets that need no engine.
pub const TARGETS: &[FuzzTarget] = &[
    text_target("config", config, config_seeds),
    text_target("trace", trace, trace_seeds),
    text_target("dataset", dataset, dataset_seeds),
    FuzzTarget { per_byte: 64, ..text_target("answer", answer, answer_seeds) },
    FuzzTarget { per_byte: 64, ..text_target("metrics", metrics, metrics_seeds) },
    text_target("workload", workload, workload_seeds),
    text_target("foreign", foreign, foreign_seeds),
    text_target("result", result, result_seeds),
    text_target("serve_result", serve_result, serve_seeds),
    text_target("fleet", fleet, fleet_seeds),
];

/// A target whose whole input is mutated, and which may hold as much as its input.
pub const fn text_target(
    name: &'static str,
    run: fn(&[u8], &Path) -> bool,
    seeds: fn() -> Vec<Seed>,
) -> FuzzTarget {
    FuzzTarget { name, per_byte: 1, head: usize::MAX, run, seeds }
}

fn root() -> PathBuf {
    // The repository, whichever crate this is compiled in.
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    if here.join("tests/fixtures").is_dir() { here.to_path_buf() } else { here.join("..") }
}

pub fn fixture(name: &str) -> PathBuf {
    root().join("tests/fixtures").join(name)
}

pub fn bytes_of(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

pub fn seed_file(name: &str) -> Seed {
    Seed::new(name, bytes_of(&root().join("fuzz/seeds").join(name)))
}

pub fn all_of(folder: &Path) -> Vec<Seed> {
    let mut seeds: Vec<Seed> = std::fs::read_dir(folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.is_file() && path.file_name().is_some_and(|name| name != "README.md"))
        .map(|path| Seed::new(path.file_name().unwrap_or_default().to_string_lossy(), bytes_of(&path)))
        .collect();
    seeds.sort_by(|a, b| a.name.cmp(&b.name));
    seeds
}

/// A folder inside the scratch folder with copies of these files, made once.
pub fn prepared(scratch: &Path, name: &str, files: &[(&str, PathBuf)]) -> PathBuf {
    let folder = scratch.join(name);
    if !folder.is_dir() {
        std::fs::create_dir_all(&folder).expect("the scratch folder is writable");
        for (name, from) in files {
            std::fs::write(folder.join(name), bytes_of(from)).expect("the scratch folder is writable");
        }
    }
    folder
}

pub fn put(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).expect("the scratch folder is writable");
}

/// An error as the program would print it: one line of plain text.
pub fn refused(error: impl std::error::Error + 'static) -> bool {
    let line = hbmark_core::input::one_line(&error);
    assert!(!line.is_empty() && !line.contains('\n'), "{line:?}");
    assert!(line.len() < 16 << 10, "an error of {} bytes", line.len());
    harmless(&line);
    false
}

/// Fails on characters that a terminal would act on.
pub fn harmless(text: &str) {
    let acts = |c: &char| {
        (c.is_control() && *c != '\n')
            || matches!(*c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{2028}' | '\u{2029}')
    };
    if let Some(at) = text.char_indices().find(|(_, c)| acts(c)) {
        let start = text[..at.0].char_indices().rev().nth(60).map_or(0, |(start, _)| start);
        panic!("{:?} reaches the terminal after {:?}", at.1, &text[start..at.0]);
    }
}

/// Fails on CSV cells that a spreadsheet would run as a formula.
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

fn config(bytes: &[u8], _: &Path) -> bool {
    let Ok(text) = std::str::from_utf8(bytes) else { return false };
    if bytes.len() > 4 << 20 {
        // The file would not be read.
        return false;
    }
    match hbmark_core::model::parse_config(text, Path::new("config.json")) {
        Ok(architecture) => {
            architecture.check().expect("a config that was read is within bounds");
            predict_extremes(&architecture);
            true
        }
        Err(error) => refused(error),
    }
}

/// Predicts the smallest and the largest step that can be asked for.
fn predict_extremes(architecture: &Architecture) {
    for weights in [Dtype::Fp8, Dtype::Int4] {
        let prediction = predict(&Request {
            architecture,
            inventory: &architecture.inventory(weights),
            name: "a config",
            weights,
            kv: Dtype::F32,
            device: devices::find("h100-sxm").expect("it is in the table"),
            batches: &[1, 1 << 27],
            contexts: &[1, 1 << 27],
            phases: &[Phase::Prefill, Phase::Decode],
            routing: ExpertRouting::Uniform,
        });
        assert_eq!(prediction.cells.len(), 8);
    }
}

fn config_seeds() -> Vec<Seed> {
    let mut seeds = all_of(&fixture("configs"));
    seeds.push(Seed::new("tiny", bytes_of(&fixture("models/llama-bf16/config.json"))));
    seeds
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
    // A few lines are enough.
    for seed in &mut seeds {
        let end = seed.bytes.iter().enumerate().filter(|(_, byte)| **byte == b'\n').nth(12).map(|(at, _)| at);
        seed.bytes.truncate(end.unwrap_or(usize::MAX));
    }
    seeds
}

/// A word is a token.
#[expect(clippy::unnecessary_wraps, reason = "the form of a tokenizer")]
fn words(text: &str) -> Result<Vec<u32>, std::convert::Infallible> {
    Ok(text.split_whitespace().map(|word| u32::try_from(word.len()).unwrap_or(u32::MAX)).collect())
}

fn dataset(bytes: &[u8], scratch: &Path) -> bool {
    let path = scratch.join("dataset");
    put(&path, bytes);
    let selection = dataset::Selection { prompts: 100, output_len: None, seed: 1 };
    let read = |format| match dataset::read(&path, format, selection, words) {
        Ok(found) => {
            let plan = found.plan(Some(10.0), Arrivals::Poisson, None, 40, 7);
            assert!(
                plan.len() == 40
                    && plan.iter().all(|request| request.prompt_len() > 0 && request.output_len > 0)
            );
            true
        }
        Err(error) => refused(error),
    };
    [dataset::Format::ShareGpt, dataset::Format::Custom].map(read).contains(&true)
}

fn dataset_seeds() -> Vec<Seed> {
    let turn = |text: &str| serde_json::json!({"from": "human", "value": text});
    let row =
        serde_json::json!({"id": "a", "conversations": [turn("how far is it"), turn("not far at all")]});
    let line = r#"{"prompt": "how far is it", "output_tokens": 12}"#;
    vec![
        Seed::new("sharegpt.json", serde_json::json!([row, row, {"id": "none"}]).to_string()),
        Seed::new("custom.jsonl", format!("{line}\n{}\n", line.replace("far", "near"))),
    ]
}

/// A server's answer in pieces of a few bytes: it ends within its bytes, however they are cut.
fn answer(bytes: &[u8], _: &Path) -> bool {
    let read = |size: usize| {
        let mut answer = Answer::default();
        answer.reset(16);
        let mut at = 0.0;
        let mut pieces = bytes.chunks(size);
        let step = loop {
            let Some(piece) = pieces.next() else { break answer.closed(at) };
            at += 1.0;
            match answer.take(piece, at) {
                Step::More => {}
                step => break step,
            }
        };
        let mut exchange = Exchange::default();
        answer.settle(&mut exchange);
        assert!(exchange.first_token.is_none_or(|first| first <= at));
        (step == Step::Done, exchange.output_tokens)
    };
    let whole = read(bytes.len().max(1));
    assert!(
        read(7) == whole || !whole.0 && !read(7).0,
        "what an answer says does not depend on how it is cut"
    );
    whole.0
}

fn answer_seeds() -> Vec<Seed> {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    let event = |text: &str| format!("{:x}\r\n{text}\r\n", text.len());
    let token = r#"data: {"choices":[{"index":0,"text":" a","finish_reason":null}],"usage":{"prompt_tokens":4,"completion_tokens":1,"total_tokens":5}}"#;
    let chat = r#"data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"length"}]}"#;
    let events = [token, chat, "data: [DONE]"].map(|line| event(&format!("{line}\n\n"))).concat();
    vec![
        Seed::new("stream", format!("{head}{events}0\r\n\r\n")),
        Seed::new("refusal", "HTTP/1.1 429 Too Many\r\nretry-after: 1\r\ncontent-length: 2\r\n\r\n{}"),
    ]
}

/// The page of a server's counters.
fn metrics(bytes: &[u8], _: &Path) -> bool {
    let page = Snapshot::read(bytes);
    for signal in page.signals() {
        let _ = page.number(signal);
    }
    page.dialect().is_some()
}

fn metrics_seeds() -> Vec<Seed> {
    let page = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine=\"0\",model_name=\"a\"} 4.0\n\
                # TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total{engine=\"0\",model_name=\"a\"} 1e5\n\
                vllm:iteration_tokens_total_count{engine=\"0\"} 12\n\
                vllm:time_to_first_token_seconds_bucket{le=\"+Inf\"} 3\n";
    let other = page.replace("vllm:", "sglang:");
    vec![
        Seed::new("vllm", page),
        Seed::new("sglang", other),
        Seed::new("llama", "llamacpp:tokens_predicted_total 5\n"),
    ]
}

/// What a fleet is planned and reported with: a list of nodes, a plan, its manifest, and a report.
fn fleet(bytes: &[u8], scratch: &Path) -> bool {
    let path = scratch.join("fleet");
    put(&path, bytes);
    let list = std::str::from_utf8(bytes).map(nodes::parse);
    let list = list.is_ok_and(|list| list.map_or_else(refused, |_| true));
    let plan = Plan::open(path.to_str().expect("a scratch path is UTF-8")).map_or_else(refused, |_| true);
    let manifest = Manifest::read(&path).map_or_else(refused, |_| true);
    let report = FleetReport::read(&path).map_or_else(refused, |report| {
        for format in TEXT_FORMATS {
            check_printed(&render(&report, format, false).expect("a report can be printed"), format);
        }
        let page = render(&report, Format::Html, false).expect("a page can be drawn");
        assert!(!page.contains("<img"), "a name became an element");
        true
    });
    list || plan || manifest || report
}

fn fleet_seeds() -> Vec<Seed> {
    let list = "# one rack\nnode[001-003,7] rack-1\nlast\n";
    let plan = "name = \"own\"\nprocesses = 3\ntime_limit_minutes = 5\narguments = [\"--batch\", \"1\"]\n";
    let manifest = Manifest::new(
        Plan::open("quick-ceiling").expect("a named plan"),
        nodes::parse(list).expect("a list of nodes"),
    );
    let runs = Simulated::new(16, 1, Some(Fault::SlowGpu(0.05))).runs();
    let reading = hbmark_fleet::folder::Reading { runs, ..Default::default() };
    let report = hbmark_fleet::verdict::verdict(reading, &Settings::default(), &[]);
    let json = |value: serde_json::Result<Vec<u8>>| value.expect("plain data is JSON");
    vec![
        Seed::new("list", list),
        Seed::new("plan", plan),
        Seed::new("manifest", json(serde_json::to_vec(&manifest))),
        Seed::new("report", json(serde_json::to_vec(&report))),
    ]
}

fn workload(bytes: &[u8], scratch: &Path) -> bool {
    let path = scratch.join("workload.toml");
    put(&path, bytes);
    match Workload::open(path.to_str().expect("a scratch path is UTF-8")) {
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

/// Checks printed output. JSON is for programs, and its own escapes keep control characters out.
fn check_printed(text: &str, format: Format) {
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
    let lists: Vec<_> = results
        .iter()
        .map(|result| hbmark_report::analysis::of_foreign(result, &import::UserOverrides::default(), None))
        .collect();
    let gpu = devices::find("h100-sxm").ok();
    let given = import::UserOverrides { gpu, dtype: Some(Dtype::Bf16), ..import::UserOverrides::default() };
    let imported: Vec<_> = results.into_iter().map(|result| import::Imported::new(result, &given)).collect();
    for format in TEXT_FORMATS {
        check_printed(
            &render(imported.as_slice(), format, false).expect("an imported result can be printed"),
            format,
        );
        check_printed(&render(lists.as_slice(), format, false).expect("a checklist can be printed"), format);
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
    hbmark_report::analysis::recheck(&mut report);
    for format in TEXT_FORMATS {
        check_printed(&render(&report, format, false).expect("a result can be printed"), format);
        let found = hbmark_report::analysis::explain(&report);
        check_printed(&render(found.as_slice(), format, false).expect("findings can be printed"), format);
        let list = [hbmark_report::analysis::of_report(&report)];
        check_printed(&render(list.as_slice(), format, false).expect("a checklist can be printed"), format);
        for ladder in &report.ladders {
            check_printed(&render(ladder, format, false).expect("a ladder can be printed"), format);
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
                check_printed(&render(&report, format, false).expect("a result can be printed"), format);
            }
            let page = render(&report, Format::Html, false).expect("a page can be drawn");
            assert!(!page.contains("<img"), "a name became an element");
            let plan = hbmark_report::analysis::capacity::capacity(&report, &capacity_question());
            harmless(&markdown(&record::of_serving(&report, plan.as_ref().ok())));
            if let Ok(plan) = plan {
                for format in TEXT_FORMATS {
                    check_printed(&render(&plan, format, false).expect("a plan can be printed"), format);
                }
            }
            true
        }
        Ok(None) => false,
        Err(error) => refused(error),
    }
}

/// How many instances serve three requests per second.
fn capacity_question() -> hbmark_report::analysis::capacity::Question {
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
