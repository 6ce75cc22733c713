//! Serving as a person meets it: outputs that do not depend on what they were batched with, and messages about bad input.

use std::path::{Path, PathBuf};

use assert_cmd::Command;
use predicates::prelude::PredicateBooleanExt;
use predicates::str::contains;

use crate::models::{opened, session, threads};
use crate::runs::{asserted, words};

use hbmark::engine::{DeviceOptions, SequenceId, Session, StepBatch};
use hbmark::serve::clock::HostClock;
use hbmark::serve::detokenizer::TextPipeline;
use hbmark::serve::executor::SessionExecutor;
use hbmark::serve::structured_output::{Constraints, GrammarCompiler};
use hbmark::weights::adapter::MAX_RANK;
use hbmark::weights::tokenizer::Tokenizer;
use hbmark::weights::{Adapter, OpenModel};
use hbmark_core::model::{Dtype, Target};
use hbmark_core::result::serving::{Policy, SchedulerConfig, SpeculativeConfig};
use hbmark_core::units::Nanos;
use hbmark_traffic::sampler::{Sampler, Sampling};
use hbmark_traffic::serving_loop::{LoadMode, RequestOutcome, Run, Traffic, run};
use hbmark_traffic::workload::{PlannedRequest, PromptSegment};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn open(engine: &str, name: &str) -> Box<dyn Session> {
    session(engine, &opened(&fixture("models").join(name)), Dtype::F32, options())
}

/// Two threads, and the block size of the plans.
fn options() -> DeviceOptions {
    DeviceOptions { block_size: Some(16), ..threads(2) }
}

/// Prompts of many lengths, half of them behind one of two shared beginnings of more than two blocks.
fn plan() -> Vec<PlannedRequest> {
    (0..12_u64)
        .map(|index| {
            let own =
                PromptSegment { source: 100 + index, tokens: u32::try_from(1 + index * 5 % 23).unwrap() };
            let shared = PromptSegment { source: index % 4, tokens: 40 };
            PlannedRequest {
                arrival: Nanos(0.0),
                prompt: if index % 4 < 2 { vec![shared, own] } else { vec![own] },
                output_len: usize::try_from(3 + index * 7 % 17).unwrap(),
                priority: i32::try_from(index % 3).unwrap(),
                ..PlannedRequest::default()
            }
        })
        .collect()
}

/// What the engine says when a request is all there is.
fn one_at_a_time(session: &mut dyn Session, plan: &[PlannedRequest]) -> Vec<Vec<u32>> {
    let vocab = session.architecture().vocab_size;
    let mut outputs = Vec::new();
    for (index, request) in plan.iter().enumerate() {
        let sequence = SequenceId(index as u64);
        let prompt = request.tokens(vocab);
        let mut position = prompt.len();
        session.step(&StepBatch::uniform(sequence, &[prompt], 0)).unwrap();
        let mut output = session.greedy_tokens().unwrap();
        while output.len() < request.output_len {
            let last = output[output.len() - 1];
            session.step(&StepBatch::uniform(sequence, &[vec![last]], position)).unwrap();
            output.extend(session.greedy_tokens().unwrap());
            position += 1;
        }
        session.release(sequence);
        outputs.push(output);
    }
    outputs
}

fn scheduler() -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: 6,
        max_num_batched_tokens: 256,
        num_blocks: 64,
        max_model_len: 100,
        enable_prefix_caching: false,
        enable_chunked_prefill: false,
        ..SchedulerConfig::UNLIMITED
    }
}

fn served(session: &mut dyn Session, plan: &[PlannedRequest], config: SchedulerConfig) -> Run {
    let vocab = session.architecture().vocab_size;
    let traffic = Traffic { keep_outputs: true, ..Traffic::new(plan, LoadMode::Open, 0..plan.len(), vocab) };
    let mut executor = SessionExecutor::new(session, Sampler::new(Sampling::GREEDY));
    let run = run(&traffic, config, &mut executor, &mut HostClock::default(), None, &mut |_| {}).unwrap();
    assert!(run.failure.is_none(), "{:?}", run.failure);
    assert!(run.records.iter().all(|r| r.outcome == RequestOutcome::Served));
    run
}

#[test]
fn outputs_do_not_depend_on_batching_caching_chunking_or_preemption() {
    for name in ["llama-gqa", "qwen3", "mistral-window"] {
        let plan = plan();
        let wanted = one_at_a_time(open("native", name).as_mut(), &plan);
        let on = |config: SchedulerConfig| served(open("native", name).as_mut(), &plan, config);
        let cached = SchedulerConfig { enable_prefix_caching: true, ..scheduler() };
        let chunked =
            SchedulerConfig { enable_chunked_prefill: true, max_num_batched_tokens: 11, ..scheduler() };
        let chunked_cached = SchedulerConfig { enable_prefix_caching: true, ..chunked.clone() };
        let tight = SchedulerConfig { num_blocks: 7, ..chunked_cached.clone() };
        let tight_plain = SchedulerConfig { num_blocks: 7, ..scheduler() };
        let by_priority = SchedulerConfig { scheduling: Policy::Priority, ..tight.clone() };
        let runs = [
            ("plain", on(scheduler())),
            ("cached", on(cached)),
            ("chunked", on(chunked)),
            ("chunked and cached", on(chunked_cached)),
            ("preempted", on(tight_plain)),
            ("preempted, chunked and cached", on(tight)),
            ("by priority", on(by_priority)),
        ];
        for (what, run) in &runs {
            assert_eq!(run.outputs, wanted, "{name}, {what}");
        }
        // The runs are what they are called.
        assert!(runs[1].1.cache.hit_tokens > 0 && runs[0].1.cache.hit_tokens == 0);
        assert!(runs[0].1.preemptions == 0 && runs[4].1.preemptions > 0 && runs[5].1.preemptions > 0);
        assert!(runs[2].1.steps.len() > runs[0].1.steps.len());
    }
}

/// What a request gets under scripted acceptance: so many tokens of its draft as the script accepts, and what the model makes of all before it.
fn speculated(
    session: &mut dyn Session,
    plan: &[PlannedRequest],
    speculation: &SpeculativeConfig,
) -> Vec<Vec<u32>> {
    let vocab = session.architecture().vocab_size;
    let mut next = |tokens: &[u32]| {
        session.step(&StepBatch::uniform(SequenceId(7), &[tokens.to_vec()], 0)).unwrap();
        session.greedy_tokens().unwrap()[0]
    };
    let request = |(key, request): (usize, &PlannedRequest)| {
        let prompt = request.tokens(vocab);
        let (length, whole) = (prompt.len(), prompt.len() + request.output_len);
        let mut tokens = prompt;
        tokens.push(next(&tokens));
        while tokens.len() < whole {
            let drafts = speculation.num_speculative_tokens().min(whole - tokens.len() - 1);
            for _ in 0..speculation.accepted(key, tokens.len() - 1, drafts) {
                tokens.push(tokens[tokens.len() % length]);
            }
            tokens.push(next(&tokens));
        }
        tokens.split_off(length)
    };
    plan.iter().enumerate().map(request).collect()
}

#[test]
fn outputs_under_scripted_acceptance_are_accepted_drafts_and_what_the_model_writes_behind_them() {
    for name in ["llama-gqa", "mistral-window"] {
        let plan = plan();
        let speculation = SpeculativeConfig { synthetic_acceptance_rates: vec![0.8, 0.5, 0.3], seed: 5 };
        let wanted = speculated(open("native", name).as_mut(), &plan, &speculation);
        for enable_prefix_caching in [false, true] {
            let speculation = Some(speculation.clone());
            let config = SchedulerConfig { speculation, enable_prefix_caching, ..scheduler() };
            let run = served(open("native", name).as_mut(), &plan, config);
            assert_eq!(run.outputs, wanted, "{name}, caching {enable_prefix_caching}");
            let drafts = run.drafts.unwrap();
            let tokens: usize = plan.iter().map(|request| request.output_len).sum();
            // Every token but the first of each request, and those of last steps without drafts, is of a verify step.
            let verified = drafts.num_drafts + drafts.num_accepted_tokens;
            assert!(verified <= (tokens - plan.len()) as u64 && drafts.num_accepted_tokens > 10);
            assert!(run.steps.len() < 17, "{} steps", run.steps.len());
        }
    }
}

/// Steps of an 8B model at batch 1 take as long with three draft tokens as without: at an acceptance of L tokens a step, TPOT is an L-th.
#[test]
fn on_a_virtual_clock_the_tpot_falls_by_the_tokens_of_a_step() {
    let traffic = ["--concurrency", "1", "--input-len", "512", "--output-len", "400", "--requests", "60"];
    let tpot = |more: &[&str]| {
        let found = virtual_json(&[&traffic[..], more].concat());
        let result = found["points"][0]["result"].clone();
        assert_eq!(result["validity"], "valid", "{result}");
        (result["tpot_ns"]["mean"].as_f64().unwrap(), result["drafts"].clone())
    };
    let (plain, none) = tpot(&[]);
    let (faster, drafts) = tpot(&["--draft-tokens", "3", "--acceptance-rate", "0.7"]);
    assert!(none.is_null());
    let count = |key: &str| drafts[key].as_u64().unwrap() as f64;
    let length = 1.0 + count("num_accepted_tokens") / count("num_drafts");
    // 1 + 0.7 + 0.49 + 0.343.
    assert!((length / 2.533 - 1.0).abs() < 0.02, "{length}");
    assert!((plain / faster / length - 1.0).abs() < 0.02, "{plain} {faster} {length}");
}

#[test]
fn an_engine_without_pages_serves_the_same_outputs_one_sequence_at_a_time() {
    let plan = plan();
    let mut session = open("stock", "llama-gqa");
    let wanted = one_at_a_time(session.as_mut(), &plan);
    let run = served(session.as_mut(), &plan, SchedulerConfig { num_blocks: 7, ..scheduler() });
    assert_eq!(run.outputs, wanted);
    assert!(run.preemptions > 0);
}

fn hbmark(arguments: &[&str]) -> Command {
    let mut command = asserted();
    command.arg("serve").args(arguments);
    command
}

fn refused(arguments: &[&str], message: &str) {
    hbmark(arguments).assert().code(2).stdout("").stderr(contains(message));
}

const H100: [&str; 5] = ["--virtual", "--gpu", "h100-sxm", "--model", "Llama-3.1-8B"];

fn virtual_json(arguments: &[&str]) -> serde_json::Value {
    let all = [arguments, &H100, &["--format", "json"]].concat();
    let output = hbmark(&all).assert().code(0);
    let found: serde_json::Value = serde_json::from_slice(&output.get_output().stdout).unwrap();
    let read: hbmark_core::result::serving::ServeReport = serde_json::from_value(found.clone()).unwrap();
    assert_eq!(serde_json::to_value(&read).unwrap(), found, "nothing is lost by reading it");
    found
}

#[test]
fn bad_input_is_refused_before_anything_runs() {
    refused(&["--slo", "ttft=1s"], "has no percentile such as _p95");
    refused(&["--rate", "fast"], "fast is not a rate above 1e-6");
    for rate in ["0", "-1", "NaN"] {
        let message = format!("{rate} is not a rate above 1e-6");
        refused(&["--rate", rate], &message);
        refused(&["search", "--slo", "ttft_p95=1s", "--rate", rate], &message);
    }
    refused(&["--requests", "-5"], "-5 is not a number between 1 and 10000000");
    refused(&["--requests", "many"], "many is not a number between 1 and 10000000");
    refused(&["--rate", "1", "--duration", "0s"], "`0s` is not a span above zero");
    refused(&["--rate", "inf", "--duration", "10s"], "--duration 10.0 s beside --rate inf has no end");
    refused(
        &["--requests", "100", "--max-requests", "50"],
        "--max-requests 50 is below the number that is measured first, 100",
    );
    refused(&["--input-len", "64"], "--input-len 64 needs --output-len");
    refused(&["sweep", "rate=1,2", "--output-len", "64"], "--output-len 64 needs --input-len");
    refused(&["--workload", "chat", "--output-len", "64"], "cannot be used with");
    refused(&["--arrivals", "uniform"], "wanted poisson, gamma:CV");
    refused(&["--burst", "9x1s"], "there is no `/`");
    refused(&["--workload", "chatty"], "neither a .toml file nor one of chat, code");
    refused(&["--trace", "/no/such/file"], "cannot read the trace");
    refused(&["--requests", "0"], "is not between 1 and");
    refused(&["sweep", "rate"], "has no `=`");
    refused(&["sweep", "colour=1,2"], "error: a sweep over colour is not known");
    refused(&["sweep", "rate=1,2", "max-num-seqs=8,16"], "unexpected argument 'max-num-seqs=8,16'");
    refused(&["sweep", "rate=1,2", "--rate", "3"], "chooses the load itself; leave out --rate");
    refused(&["sweep", "--requests", "3"], "<VARIABLE=VALUES>");
    refused(&["search"], "--slo <SLO>");
    refused(&["search", "--slo", "ttft_p95=1s", "--concurrency", "3"], "unexpected argument '--concurrency'");
    refused(&["--rate", "3", "--concurrency", "3"], "to a live server (--url)");
    refused(&["--prefix-share", "0.5"], "--prefix-tokens");
    refused(&["--gpu", "h100-sxm"], "--virtual");
    refused(
        &["--url", "http://127.0.0.1:9", "--slo", "queue_p95=1s"],
        "a live server does not show how long requests queue",
    );
    refused(&["--workload", "chat", "--trace", "x"], "cannot be used with");
    for (old, new) in [
        ("--sweep", "sweep VARIABLE=VALUES"),
        ("--find-max-rate", "search --slo"),
        ("--matrix", "matrix"),
        ("--cold", "cold --launches"),
    ] {
        refused(&[old], &format!("write `hbmark serve {new}"));
    }
    refused(&["--draft-tokens", "3"], "--acceptance-rate <RATE>");
    refused(&["--acceptance-rate", "0.7"], "--draft-tokens <TOKENS>");
    refused(
        &["--draft-tokens", "3", "--acceptance-rate", "1.7"],
        "an acceptance rate of 1.7 is not between 0 and 1",
    );
    refused(&["--draft-tokens", "65", "--acceptance-rate", "0.7"], "65 is not between 1 and 64");
    refused(&["--acceptance-rates", "0.5,0.6"], "the acceptance rate rises from 0.5 to 0.6");
    refused(
        &["--acceptance-rates", "0.5", "--url", "http://localhost:1"],
        "a live server (--url) has its own draft",
    );
    refused(&["--max-num-seqs", "0"], "0 is not between 1 and");
    refused(&["--slo", "fast"], "--slo");
    refused(&["--slo", "ttft_p95=quick"], "--slo");
    refused(&["--duration", "1h", "--concurrency", "2"], "--duration 3600 s needs --rate");
    refused(&["--url", "http://localhost:1", "--extra-body", r#"{"n": 2}"#], "one completion per request");
    let model = fixture("models/llama-gqa");
    let on = ["--model", model.to_str().unwrap()];
    let with =
        |more: &[&str], message: &str| refused(&on.iter().chain(more).copied().collect::<Vec<_>>(), message);
    with(
        &["--num-gpu-blocks-override", "1", "--input-len", "100", "--output-len", "20"],
        "the KV pool of 1 blocks of 64 positions is too small",
    );
    with(
        &["--input-len", "100000", "--output-len", "1"],
        "no request can be served: prompt and output are longer",
    );
    refused(&[&["sweep", "warp=1,2"][..], &on].concat(), "the variables are rate, concurrency");
    with(&["--slo", "ttft_p99=1s", "--requests", "50"], "needs at least 1000 requests");
    refused(
        &[&["search", "--slo", "ttft_p90=1s", "--requests", "50", "--max-requests", "60"][..], &on].concat(),
        "a search needs at least 100 measured requests at each rate, to see whether the queue grows, and 60 are measured",
    );
    with(&["--block-size", "10"], "a multiple of 16");
    with(
        &["--engine", "stock", "--acceptance-rates", "0.5"],
        "speculative decoding needs an engine with the logits of every token",
    );
}

#[test]
fn a_virtual_clock_says_that_it_has_no_device() {
    let asked = [&H100[..], &["--rate", "5", "--requests", "20", "--device", "cuda"]].concat();
    hbmark(&asked).assert().code(0).stderr(contains("--device and --threads change nothing"));
}

#[test]
fn broken_traces_are_refused_by_line() {
    let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
    let of = |rows: &str| format!("{azure}2023-11-16 18:15:46.68,374,44\n{rows}\n");
    for (text, message) in [
        (String::new(), "has no requests"),
        (azure.to_owned(), "has no requests"),
        (
            "once upon a time\n".to_owned(),
            "none of Azure CSV, BurstGPT CSV, Vidur CSV, Mooncake JSONL or hbmark JSONL",
        ),
        (format!("{azure}yesterday,1,1\n"), "line 2 of the trace"),
        (of("2023-11-16 18:15:47"), "it has fewer than 3 fields"),
        (of("2023-11-16 18:15:45.0,1,1"), "it is earlier than the line before; sort the trace"),
        (of("2023-11-16 18:15:47,-1,1"), "ContextTokens `-1` is not a count"),
        (of("2023-11-16 18:15:47,99999999999999999999,1"), "is not a count"),
        (of("2023-11-16 18:15:47,99999999,1"), "above the limit of 10000000"),
        (of("2093-11-16 18:15:47,1,1"), "days after the first"),
        (of(&"9".repeat((1 << 20) + 1)), "longer than the limit of 1048576"),
        (r#"{"timestamp": -5, "input_length": 1, "output_length": 1}"#.to_owned(), "is not a time"),
        (r#"{"arrival_s": 0, "input_tokens": 1, "output_tokens": 1"#.to_owned(), "line 1 of the trace"),
    ] {
        let trace = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(trace.path(), text).unwrap();
        refused(&["--trace", trace.path().to_str().unwrap()], message);
    }
    let enormous = tempfile::NamedTempFile::new().unwrap();
    enormous.as_file().set_len((1 << 30) + 1).unwrap();
    refused(&["--trace", enormous.path().to_str().unwrap()], "above the limit of 1073741824");
    refused(&["--trace", "/no/such/file"], "cannot read the trace");
    refused(&["--trace", env!("CARGO_MANIFEST_DIR")], "it is a folder, not a regular file");
}

#[test]
fn adapters_grammars_and_tokenizers_that_cannot_be_are_refused_before_weights_are_loaded() {
    let model = fixture("models/llama-gqa");
    let on = ["--model", model.to_str().unwrap()];
    let with =
        |more: &[&str], message: &str| refused(&on.iter().chain(more).copied().collect::<Vec<_>>(), message);
    with(
        &["--enable-lora", "--engine", "stock"],
        "the stock engine does not run LoRA adapters on cpu: only the native engine on a CPU adds them",
    );
    with(&["--enable-lora", "--device", "cuda"], "LoRA adapters on cuda:0");
    with(&["--lora-adapters", "2"], "--enable-lora");
    with(&["--enable-lora", "--lora-modules", "x"], "wanted NAME=PATH");
    with(&["--enable-lora", "--lora-modules", "x=/no/such"], "cannot read /no/such");
    with(&["--enable-lora", "--lora-rank", "64"], "--lora-rank 64 is above --max-lora-rank 16");
    with(&["--enable-lora", "--lora-assignment", "random"], "wanted round-robin, uniform, tenant or zipf:S");
    with(&["--enable-lora", "--max-loras", "0"], "0 is not between 1 and");
    let adapter = format!("x={}", fixture("adapters/llama-gqa-r4").display());
    with(
        &["--enable-lora", "--lora-modules", &adapter, "--max-lora-rank", "2", "--lora-rank", "2"],
        "the adapter x has rank 4, and the most is 2; raise --max-lora-rank",
    );
    with(&["--structured", "xml:a"], "write json-schema:FILE, regex:RE or grammar:FILE");
    with(&["--structured", "regex:[a"], "cannot be compiled");
    with(&["--tokenizer", "/no/such"], "cannot read /no/such");
    let large = fixture("models/llama-tied/tokenizer-wrong-vocab.json");
    with(&["--tokenizer", large.to_str().unwrap()], "but the model's vocabulary ends at 211");
    refused(
        &["--model", "Llama-3.1-8B", "--structured", "regex:a"],
        "structured output needs the model's vocabulary: give --tokenizer PATH",
    );
    refused(&[&H100[..], &["--structured", "regex:a"]].concat(), "cannot be used with");
}

#[test]
fn a_later_point_that_cannot_be_run_takes_nothing_from_those_before_it() {
    let sweep =
        ["sweep", "input-len=64,200000", "--requests", "100", "--output-len", "8", "--format", "json"];
    let output = hbmark(&[&sweep[..], &H100].concat()).assert().code(1);
    let report: serde_json::Value = serde_json::from_slice(&output.get_output().stdout).unwrap();
    assert_eq!(report["points"].as_array().unwrap().len(), 1);
    let warning = report["warnings"][0].as_str().unwrap();
    assert!(warning.starts_with("the benchmark ended early: "), "{warning}");
    assert!(warning.ends_with("here is what was measured before"), "{warning}");
}

#[test]
fn prompts_beyond_the_context_are_rejected_by_name_and_counted() {
    let trace = fixture("traces/azure-conv.csv");
    let on = ["--trace", trace.to_str().unwrap(), "--requests", "100", "--max-model-len", "1000"];
    let found = virtual_json(&on);
    let result = &found["points"][0]["result"];
    let rejected = result["rejected"]["exceeds_context"].as_u64().unwrap();
    assert!(rejected > 10 && rejected + result["served"].as_u64().unwrap() == 100, "{result}");
    assert_eq!(result["ttft_ns"]["infinite"], rejected);
}

#[test]
fn a_sweep_past_saturation_is_explained_with_its_edge_and_its_cost() {
    let out = tempfile::tempdir().unwrap();
    let folder = out.path().to_str().unwrap();
    let sweep = ["sweep", "rate=4,200", "--workload", "chat", "--requests", "800", "--out", folder];
    hbmark(&[&sweep[..], &H100].concat()).assert().success();
    let result = out.path().join("serve.json");
    let explain =
        |more: &[&str]| Command::cargo_bin("hbmark").unwrap().arg("explain").arg(&result).args(more).assert();
    explain(&[])
        .success()
        .stdout(contains("the last rate that kept up is 4.000 per second, the first that did not 200.000"));
    explain(&["--price-per-hour", "3", "--max-cost-per-million", "0.0001"])
        .success()
        .stdout(contains("cost fails first"));
    explain(&["--gpu-hour-price", "3", "--max-cost-per-million", "1000"])
        .success()
        .stdout(contains("the cost is within its limit").and(contains("may cost 1000")));
    explain(&["--price-per-hour", "3"]).code(2);
    explain(&["--price-per-hour", "0", "--max-cost-per-million", "1"])
        .code(2)
        .stderr(contains("not a positive number"));
}

#[test]
fn a_virtual_run_is_a_result_with_a_schema() {
    let found = virtual_json(&["--workload", "chat", "--duration", "2m"]);
    assert_eq!(found["points"][0]["offered"]["rate"], 1.0, "the default");
    let found = virtual_json(&["--workload", "chat", "--rate", "10", "--duration", "2m"]);
    assert_eq!(found["kind"], "serve_virtual");
    let result = &found["points"][0]["result"];
    assert_eq!((result["validity"].as_str().unwrap(), result["measured"].as_u64().unwrap()), ("valid", 1200));
    // The floor of a decode step of an 8B model on an H100 is 4.5 ms.
    let tpot = result["tpot_ns"]["p50"].as_f64().unwrap() / 1e6;
    assert!((4.4..20.0).contains(&tpot), "{tpot} ms");
    assert!(result["ttft_ns"]["p99"].is_f64() && result["ttft_ns"]["p99_9"].is_null());
    assert!((result["output_tokens_per_s"].as_f64().unwrap() / 2000.0 - 1.0).abs() < 0.15, "{result}");
}

#[test]
fn a_duration_gives_each_rate_of_a_sweep_its_requests() {
    let found = virtual_json(&["sweep", "rate=10,20", "--duration", "30s"]);
    let measured = |at: usize| found["points"][at]["result"]["measured"].as_u64();
    assert_eq!([measured(0), measured(1)], [Some(300), Some(600)]);
    let objective = ["--duration", "2s", "--slo", "ttft_p99=1s"];
    refused(&[&["sweep", "rate=10,200"][..], &objective, &H100].concat(), "20 are measured");
    refused(&[&["sweep", "concurrency=8,16"][..], &objective, &H100].concat(), "needs --rate");
}

#[test]
fn a_mooncake_trace_finds_the_prefixes_it_recorded() {
    let trace = fixture("traces/mooncake-conversation.jsonl");
    let found =
        virtual_json(&["--trace", trace.to_str().unwrap(), "--requests", "50", "--warmup-requests", "0"]);
    let point = &found["points"][0];
    let seen = point["result"]["prefix_hit_rate"].as_f64().unwrap();
    let ideal = point["ideal_hit_rate"].as_f64().unwrap();
    assert!(ideal > 0.01 && seen > 0.0 && seen <= ideal + 0.05, "{seen} of {ideal}");
}

#[test]
fn a_sweep_to_saturation_keeps_the_points_it_did_not_run() {
    let load = words("--input-len 512 --output-len 128 --requests 300 --slo ttft_p95=1s");
    let found = virtual_json(&[&["sweep", "rate=10..2560*4"][..], &load].concat());
    let points = found["points"].as_array().unwrap();
    assert_eq!(points.len(), 5);
    assert_eq!(points[0]["result"]["slo_met"], true);
    let last = points.last().unwrap();
    assert!(last["result"].is_null());
    assert_eq!(
        (&last["not_run"]["code"], &last["not_run"]["variable"]),
        (&"sweep_ended".into(), &"rate".into())
    );
    let seeds: std::collections::HashSet<u64> = points.iter().map(|p| p["seed"].as_u64().unwrap()).collect();
    assert_eq!(seeds.len(), 5, "no point meets the prompts of another");
}

#[test]
fn a_sweep_over_a_length_needs_only_the_other_length() {
    for (swept, other) in [("input-len=64,128", "--output-len"), ("output-len=64,128", "--input-len")] {
        let found = virtual_json(&["sweep", swept, other, "32", "--rate", "5", "--requests", "20"]);
        let key = if other == "--output-len" { "mean_prompt_tokens" } else { "mean_output_tokens" };
        let seen: Vec<f64> =
            found["points"].as_array().unwrap().iter().map(|point| point[key].as_f64().unwrap()).collect();
        assert_eq!(seen, [64.0, 128.0]);
    }
}

#[test]
fn the_highest_rate_is_found_confirmed_and_held() {
    let load = words("--input-len 512 --output-len 64 --requests 400 --max-requests 3200");
    let slo = ["--slo", "ttft_p95=200ms,tpot_p95=30ms"];
    let found = virtual_json(&[&["search"][..], &load, &slo].concat());
    let search = &found["search"];
    assert_eq!(search["confirmed"], true, "{search}");
    let stages: Vec<&str> =
        search["attempts"].as_array().unwrap().iter().map(|a| a["stage"].as_str().unwrap()).collect();
    for stage in ["bracket", "bisect", "confirm", "sustain"] {
        assert!(stages.contains(&stage), "{stages:?}");
    }
    let rate = search["max_rate"].as_f64().unwrap();
    let by_seed: Vec<f64> =
        search["rate_by_seed"].as_array().unwrap().iter().map(|rate| rate.as_f64().unwrap()).collect();
    assert!(by_seed.len() == 3 && rate > 5.0, "{search}");
    assert!(by_seed.iter().any(|found| *found >= rate), "{rate} of {by_seed:?}");
}

#[test]
fn the_matrix_states_and_checks_its_hypotheses() {
    let found = virtual_json(&["matrix", "--requests", "300", "--max-requests", "4800"]);
    let rows = found["matrix"].as_array().unwrap();
    assert_eq!(rows.len(), 7);
    for row in rows {
        assert!(!row["hypothesis"].as_str().unwrap().is_empty());
        assert_eq!(row["held"], true, "{row}");
    }
}

#[test]
fn a_shared_prefix_is_measured_with_its_cold_twin() {
    let found =
        virtual_json(&["--input-len", "64", "--output-len", "16", "--prefix-tokens", "2048", "--rate", "5"]);
    let points = found["points"].as_array().unwrap();
    let ttft = |i: usize| points[i]["result"]["ttft_ns"]["p50"].as_f64().unwrap();
    assert_eq!((points[0]["cold"].as_bool(), points[1]["cold"].as_bool()), (Some(true), Some(false)));
    assert!(ttft(1) < 0.5 * ttft(0), "warm {} cold {}", ttft(1), ttft(0));
}

#[test]
fn loops_are_compared_and_the_closed_one_says_what_it_hides() {
    let all: Vec<&str> = H100.iter().copied().chain(["--rate", "20", "--compare-loops"]).collect();
    hbmark(&all).assert().code(0).stdout(contains("are never asked"));
}

#[test]
fn a_real_run_has_every_line_and_a_prediction_beside_it() {
    let model = fixture("models/llama-gqa");
    let out = tempfile::tempdir().unwrap();
    let more = words("--requests 20 --rate 50 --input-len 20 --output-len 5 --dtype f32 --threads 2");
    let on = ["--model", model.to_str().unwrap(), "--out", out.path().to_str().unwrap()];
    let arguments = [&on[..], &more].concat();
    // On a busy machine a gate may fail, which is exit code 1 and still a result.
    let output = hbmark(&arguments).output().unwrap();
    assert!(matches!(output.status.code(), Some(0 | 1)), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    for part in [
        "TTFT",
        "TPOT",
        "ITL",
        "E2E",
        "queue",
        "injection lag",
        "schedule",
        "detokenize",
        "predicted against measured",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let saved: serde_json::Value =
        serde_json::from_slice(&std::fs::read(out.path().join("serve.json")).unwrap()).unwrap();
    assert_eq!(saved["kind"], "serve");
    assert_eq!(saved["points"][0]["result"]["served"], 20);
    assert!(out.path().join("serve.csv").exists() && out.path().join("serve.md").exists());
    let page = std::fs::read_to_string(out.path().join("report.html")).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.contains("id=\"timeline\""));
    let spans = saved["points"][0]["result"]["timeline"]["spans"].as_array().unwrap();
    assert_eq!(spans.len(), 120);
    assert!(saved["points"][0]["predicted"]["timeline"].is_null(), "a prediction is not drawn over time");
    let mut again = Command::cargo_bin("hbmark").unwrap();
    let again = again.arg("report").arg(out.path().join("serve.json")).assert().code(0);
    let printed = String::from_utf8_lossy(&again.get_output().stdout).into_owned();
    let (same, more) = printed.split_at(text.len().min(printed.len()));
    assert_eq!(same, text);
    assert!(more.contains("read from a file") && more.lines().count() == 1, "{more}");
}

#[test]
fn a_cold_start_is_phases_of_processes() {
    let model = fixture("models/llama-gqa");
    let on = ["--model", model.to_str().unwrap(), "--dtype", "f32", "--threads", "1"];
    let with = |more: &[&'static str]| {
        [&["cold", "--launches", "3", "--prompt-tokens", "8"][..], &on, more].concat()
    };
    let output = hbmark(&with(&["--format", "json"])).assert().code(0);
    let found: serde_json::Value = serde_json::from_slice(&output.get_output().stdout).unwrap();
    assert_eq!(found["kind"], "serve_cold");
    let start = &found["cold_start"];
    assert_eq!(
        (start["launches"].as_array().unwrap().len(), start["phases"].as_array().unwrap().len()),
        (3, 6)
    );
    assert!(start["to_first_token"]["median_ns"].as_f64().unwrap() > 0.0);
    hbmark(&with(&[])).assert().code(0).stdout(contains("launch to first token"));
    let csv = hbmark(&with(&["--format", "csv"])).assert().code(0);
    assert_eq!(String::from_utf8_lossy(&csv.get_output().stdout).lines().count(), 1 + 3 * 7);
    refused(&with(&["--rate", "3"]), "unexpected argument '--rate'");
    refused(&[&["cold", "--prompt-tokens", "100000"][..], &on].concat(), "do not fit the model's context");
}

#[test]
fn a_saved_sweep_becomes_a_plan_a_record_and_a_page() {
    let out = tempfile::tempdir().unwrap();
    let sweep =
        ["sweep", "rate=4,16,4000", "--requests", "3000", "--slo", "ttft_p95=500ms,tpot_p95=20ms", "--out"];
    let arguments: Vec<&str> = [&sweep[..], &[out.path().to_str().unwrap()], &H100].concat();
    hbmark(&arguments).assert().code(0);
    let saved = out.path().join("serve.json");
    let on = |command: &str, more: &[&str]| {
        let mut on = Command::cargo_bin("hbmark").unwrap();
        on.arg(command).arg(&saved).args(more).assert()
    };
    let json =
        on("capacity", &["--target-rate", "100", "--gpu-hour-price", "2.5", "--format", "json"]).code(0);
    let plan: serde_json::Value = serde_json::from_slice(&json.get_output().stdout).unwrap();
    let rate = plan["rate_per_instance"].as_f64().unwrap();
    assert!(rate > 14.0 && rate <= 16.0, "{rate}");
    let number = |key: &str| plan[key].as_f64().unwrap();
    assert!((number("instances") - (100.0 / (rate * 0.8)).ceil()).abs() < 1e-9);
    assert!((number("cost_per_hour") - number("gpus") * 2.5).abs() < 1e-9);
    on("capacity", &["--target-rate", "100"])
        .code(0)
        .stdout(contains("what breaks first").and(contains("PREDICTED")));
    on("capacity", &["--target-rate", "100", "--slo", "ttft_p95=1us"])
        .code(2)
        .stderr(contains("no rate that was tried is shown to meet"));
    on("capacity", &["--target-rate", "-3"]).code(2);
    on("capacity", &["--target-rate", "3", "--headroom", "1"]).code(2).stderr(contains("below 1"));
    let record = out.path().join("decision.md");
    on("record", &["--target-rate", "100", "--output", record.to_str().unwrap()]).code(0).stdout("");
    let text = std::fs::read_to_string(record).unwrap();
    for part in [
        "## Target",
        "## Accepted",
        "## Rejected",
        "## Why it ended there",
        "## To run it again",
        "serve sweep rate=4,16,4000",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    on("report", &["--format", "html"]).code(0).stdout(contains("<!doctype html>"));
}

/// The model `llama-gqa` with the fixture's adapter merged into its weights, as a folder.
fn merged() -> tempfile::TempDir {
    use safetensors::tensor::{Dtype as Stored, SafeTensors, TensorView, serialize};
    let from = fixture("models/llama-gqa");
    let model = opened(&from);
    let adapter =
        Adapter::open(&fixture("adapters/llama-gqa-r4"), "x", &model.architecture, MAX_RANK).unwrap();
    let bytes = std::fs::read(from.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let place = |name: &str| {
        let (layer, module) = name.strip_prefix("model.layers.")?.split_once('.')?;
        let module = module.strip_suffix(".weight")?.rsplit_once('.')?.1;
        Some((layer.parse::<usize>().ok()?, Target::ALL.into_iter().find(|t| t.name() == module)?))
    };
    let change = |(name, view): (String, TensorView<'_>)| {
        let mut values: Vec<f32> =
            view.data().as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect();
        if let Some((layer, target)) = place(&name) {
            adapter.merge(layer, target, &mut values);
        }
        let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        (name, view.shape().to_vec(), data)
    };
    let changed: Vec<_> = tensors.tensors().into_iter().map(change).collect();
    let views = changed.iter().map(|(name, shape, data)| {
        (name.as_str(), TensorView::new(Stored::F32, shape.clone(), data).unwrap())
    });
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("model.safetensors"), serialize(views, None).unwrap()).unwrap();
    std::fs::copy(from.join("config.json"), folder.path().join("config.json")).unwrap();
    folder
}

#[test]
fn a_peft_adapter_gives_the_tokens_of_its_merged_model_whatever_it_is_served_beside() {
    let folder = merged();
    let model = opened(folder.path());
    let load = |engine: &str| session(engine, &model, Dtype::F32, options());
    let plan = plan();
    let with_it = one_at_a_time(load("native").as_mut(), &plan);
    assert_eq!(
        with_it,
        one_at_a_time(load("stock").as_mut(), &plan),
        "candle over the merged weights agrees"
    );
    let without = one_at_a_time(open("native", "llama-gqa").as_mut(), &plan);

    let base = opened(&fixture("models/llama-gqa"));
    let adapter =
        Adapter::open(&fixture("adapters/llama-gqa-r4"), "x", &base.architecture, MAX_RANK).unwrap();
    let other = Adapter::synthetic(&base.architecture, "y", 16, &Target::ALL, 5);
    let mixed: Vec<PlannedRequest> = plan
        .iter()
        .enumerate()
        .map(|(index, request)| PlannedRequest {
            adapter: [None, Some(1), Some(0)][index % 3],
            ..request.clone()
        })
        .collect();
    let chunked = SchedulerConfig { enable_chunked_prefill: true, max_num_batched_tokens: 11, ..scheduler() };
    let cached = SchedulerConfig { enable_prefix_caching: true, ..chunked.clone() };
    let tight = SchedulerConfig { num_blocks: 7, ..cached.clone() };
    let two = SchedulerConfig { max_loras: Some(1), ..tight.clone() };
    let mut others: Option<Vec<Vec<u32>>> = None;
    for config in [scheduler(), chunked, cached, tight, two] {
        let mut session = open("native", "llama-gqa");
        for adapter in [&adapter, &other] {
            session.lora().unwrap().load_adapter(adapter).unwrap();
        }
        let run = served(session.as_mut(), &mixed, config);
        for (index, output) in run.outputs.iter().enumerate() {
            match mixed[index].adapter {
                None => assert_eq!(*output, without[index], "request {index}, no adapter"),
                Some(0) => assert_eq!(*output, with_it[index], "request {index}, the adapter"),
                _ => {}
            }
        }
        let of_other: Vec<Vec<u32>> = run.outputs.iter().skip(1).step_by(3).cloned().collect();
        assert_eq!(*others.get_or_insert_with(|| of_other.clone()), of_other);
    }
    assert_ne!(with_it, without, "an adapter that is felt");
}

#[test]
fn a_run_with_adapters_says_what_they_cost_beside_its_twin() {
    let model = fixture("models/llama-gqa");
    let adapter = format!("legal={}", fixture("adapters/llama-gqa-r4").display());
    let load = words("--dtype f32 --threads 2 --requests 24 --rate inf --input-len 12 --output-len 8");
    let loras = words("--enable-lora --lora-adapters 2 --lora-rank 8 --lora-targets q_proj,v_proj");
    let on = ["--model", model.to_str().unwrap(), "--format", "json", "--lora-modules", &adapter];
    let output = hbmark(&[load, loras, on.to_vec()].concat()).output().unwrap();
    assert!(matches!(output.status.code(), Some(0 | 1)), "{}", String::from_utf8_lossy(&output.stderr));
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let loaded = found["lora"]["adapters"].as_array().unwrap();
    assert_eq!(loaded.len(), 3);
    assert_eq!((loaded[0]["name"].as_str(), loaded[0]["rank"].as_u64()), (Some("legal"), Some(4)));
    assert!(loaded[0]["disk_ns"].as_f64().unwrap() > 0.0 && loaded[1]["disk_ns"].is_null());
    assert!(loaded.iter().all(|adapter| adapter["memory_ns"].as_f64().unwrap() > 0.0));
    // q and v of both layers, rank 8: inputs of 64, outputs of 64 and 32, four bytes a number.
    assert_eq!(loaded[1]["bytes"], 2 * 8 * (64 + 64 + 64 + 32) * 4);
    let points = found["points"].as_array().unwrap();
    assert_eq!(points.len(), 2);
    assert!(
        points[0]["label"].as_str().unwrap().ends_with("without adapters") && points[0]["adapters"].is_null()
    );
    let cost = &points[1]["adapters"];
    let mean = cost["mean_in_batch"].as_f64().unwrap();
    assert!(mean > 1.5 && mean <= 3.0, "{cost}");
    let added = cost["added_bytes_per_step"].as_f64().unwrap();
    assert!((added - mean * cost["bytes_each"].as_f64().unwrap()).abs() < 1.0, "{cost}");
    assert!(cost["measured_tpot_ratio"].as_f64().unwrap() > 0.0);
    let mut virtual_run = hbmark(
        &[&H100[..], &["--enable-lora", "--lora-adapters", "8", "--max-loras", "2", "--rate", "20"]].concat(),
    );
    let output = String::from_utf8(virtual_run.output().unwrap().stdout).unwrap();
    assert!(output.contains("8 LoRA adapters, 2 of them at once"), "{output}");
    assert!(output.contains("bytes alone would make it"), "{output}");
}

/// A model of random weights over the vocabulary of a tokenizer of bytes.
fn byte_model() -> (OpenModel, Tokenizer) {
    let mut architecture = hbmark_core::model::read_config(&fixture("models/llama-gqa/config.json")).unwrap();
    (architecture.vocab_size, architecture.max_positions) = (300, 1024);
    let tokenizer = Tokenizer::open_path(&fixture("tokenizers/bytes.json")).unwrap();
    (OpenModel::synthetic("bytes", architecture, 7), tokenizer)
}

#[test]
fn outputs_served_under_a_schema_satisfy_it_and_others_are_left_alone() {
    const SCHEMA: &str = r#"{"type": "object", "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 99999},
        "kind": {"enum": ["cat", "dog"]}, "note": {"type": "string", "maxLength": 9}},
        "required": ["id", "kind", "note"], "additionalProperties": false}"#;

    /// What satisfies it, but for the bounds.
    #[derive(serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Item {
        id: u32,
        #[serde(rename = "kind")]
        _kind: Kind,
        note: String,
    }
    #[derive(serde::Deserialize)]
    #[serde(rename_all = "lowercase")]
    enum Kind {
        Cat,
        Dog,
    }
    let (model, tokenizer) = byte_model();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), SCHEMA).unwrap();
    let grammar = format!("json-schema:{}", file.path().display()).parse().unwrap();
    let masks = GrammarCompiler::new(&tokenizer, 300, &model.architecture.eos_tokens).unwrap();
    let compiled = masks.compile(&grammar).unwrap();
    let plan: Vec<PlannedRequest> = plan()
        .into_iter()
        .enumerate()
        .map(|(index, request)| PlannedRequest { output_len: 120, constrained: index % 3 != 0, ..request })
        .collect();
    let warm = Sampling { temperature: 1.0, top_k: 40, top_p: 0.9, seed: 1 };
    for sampling in [Sampling::GREEDY, warm] {
        let mut session = session("native", &model, Dtype::F32, options());
        let traffic = Traffic {
            constrained_stops: compiled.ends().to_vec(),
            keep_outputs: true,
            ..Traffic::new(&plan, LoadMode::Open, 0..plan.len(), 256)
        };
        // Blocks for a few requests only: some are preempted, and their grammars go on where they were.
        let tight = SchedulerConfig { num_blocks: 24, max_model_len: 300, ..scheduler() };
        let constraints = Constraints::new(&compiled, plan.iter().map(|p| p.constrained).collect());
        let mut executor = SessionExecutor::new(session.as_mut(), Sampler::new(sampling))
            .with_constraints(Some(constraints));
        let mut text = TextPipeline::new(&tokenizer, plan.iter().map(|p| traffic.prompt(p))).unwrap();
        let mut clock = HostClock::default();
        let run = run(&traffic, tight, &mut executor, &mut clock, Some(&mut text), &mut |_| {}).unwrap();
        assert!(run.failure.is_none() && run.preemptions > 0, "{:?} {}", run.failure, run.preemptions);
        let counts = executor.constraint_counts().unwrap();
        assert_eq!((counts.started, counts.complete), (8, 8));
        assert!(run.steps.iter().map(|s| s.phases.mask).sum::<f64>() > 0.0);
        assert!(run.steps.iter().map(|s| s.phases.mask_apply).sum::<f64>() > 0.0);
        for (request, output) in plan.iter().zip(&run.outputs) {
            if !request.constrained {
                assert_eq!(output.len(), 120, "its length is forced");
                continue;
            }
            assert!(output.len() < 120 && compiled.ends().contains(output.last().unwrap()));
            let said = tokenizer.decode(output).unwrap();
            let item: Item = serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error}: {said}"));
            assert!(item.id <= 99_999 && item.note.chars().count() <= 9, "{said}");
        }
    }
}

#[test]
fn a_run_under_a_grammar_shows_what_compiling_finding_and_applying_took() {
    let model = fixture("models/llama-gqa");
    let load = words("--dtype f32 --threads 2 --requests 20 --rate inf --input-len 12 --output-len 30");
    let grammar = ["--structured", "regex:( every| step| reads){1,4}", "--structured-share", "0.5"];
    let arguments = [&load[..], &grammar, &["--model", model.to_str().unwrap()]].concat();
    let output = hbmark(&arguments).output().unwrap();
    assert!(matches!(output.status.code(), Some(0 | 1)), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    for part in [
        "grammar compiled in",
        "and its application",
        "outputs begun under the grammar",
        "a mask takes",
        "without grammar",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn a_model_without_a_tokenizer_says_so_and_one_can_be_given() {
    let folder = merged();
    let model = folder.path().to_str().unwrap();
    let more = words("--requests 10 --rate inf --input-len 20 --output-len 4 --dtype f32 --threads 2");
    let run = |tokenizer: &[&str]| {
        let arguments = [&["--model", model, "--format", "json"][..], &more, tokenizer].concat();
        let output = hbmark(&arguments).output().unwrap();
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()
    };
    let warned = |found: &serde_json::Value| found["warnings"].to_string().contains("has no tokenizer");
    let without = run(&[]);
    assert!(warned(&without) && without["points"][0]["result"]["breakdown"]["detokenize_ns"] == 0.0);
    let given = fixture("models/llama-gqa/tokenizer.json");
    let with = run(&["--tokenizer", given.to_str().unwrap()]);
    let result = &with["points"][0]["result"];
    assert!(!warned(&with) && result["breakdown"]["detokenize_ns"].as_f64().unwrap() > 0.0);
    assert_eq!(result["encoded_per_asked"], 1.0, "what is asked for is what the text encodes to");
}

#[test]
fn tiled_contexts_beyond_the_pool_find_nothing_and_within_it_nearly_all() {
    let file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
    let text = "name = \"tiled\"\n[input]\ndistribution = \"fixed\"\ntokens = 16\n[output]\ndistribution = \"fixed\"\ntokens = 4\n\
                [tiling]\ncontexts = 20\ntokens = 1024\n";
    std::fs::write(file.path(), text).unwrap();
    // 20 contexts of 64 blocks.
    let point = |blocks: &str| {
        let load = ["--requests", "200", "--arrivals", "constant", "--num-gpu-blocks-override", blocks];
        let found = virtual_json(&[&["--workload", file.path().to_str().unwrap()][..], &load].concat());
        let result = found["points"][0]["result"].clone();
        (result["prefix_hit_rate"].as_f64().unwrap(), result["prefix_evictions"].as_u64().unwrap())
    };
    let (hits, evictions) = point("1000");
    assert!(hits < 0.01 && evictions > 10_000, "{hits} {evictions}");
    let (hits, evictions) = point("4000");
    assert!(hits > 0.85 && evictions < 1_000, "{hits} {evictions}");
}

#[test]
fn a_burst_and_a_duration_shape_the_arrivals() {
    let found =
        virtual_json(&["--input-len", "64", "--output-len", "8", "--rate", "10", "--duration", "30s"]);
    assert_eq!(found["points"][0]["result"]["measured"], 300);
    let waiting = |more: &[&str]| {
        let base = words("--input-len 2048 --output-len 64 --rate 8 --requests 400 --arrivals constant");
        let found = virtual_json(&[&base[..], more].concat());
        found["points"][0]["result"]["mean_waiting"].as_f64().unwrap()
            + found["points"][0]["result"]["mean_running"].as_f64().unwrap()
    };
    assert!(waiting(&["--burst", "5x2s/12s"]) > 1.2 * waiting(&[]), "a burst overloads while it lasts");
}

#[test]
fn a_model_whose_logits_are_no_numbers_has_no_valid_point() {
    let folder = tempfile::tempdir().unwrap();
    let from = fixture("models/qwen3");
    std::fs::copy(from.join("config.json"), folder.path().join("config.json")).unwrap();
    let mut bytes = std::fs::read(from.join("model.safetensors")).unwrap();
    let data = 8 + usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..data]).unwrap();
    for tensor in ["model.norm.weight", "lm_head.weight"] {
        let at = |end: usize| {
            data + usize::try_from(header[tensor]["data_offsets"][end].as_u64().unwrap()).unwrap()
        };
        // The largest numbers, near 3.4e38 in bf16 and f32: their product is none.
        bytes[at(0)..at(1)].fill(0x7f);
    }
    std::fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    for engine in ["native", "stock"] {
        let mut command = Command::cargo_bin("hbmark").unwrap();
        command.args(words("serve --device cpu --no-predict --rate 100 --requests 5 --input-len 8"));
        command.args(["--output-len", "4", "--engine", engine, "--model"]).arg(folder.path());
        command.assert().code(1).stdout(contains("INVALID").and(contains("logits are not finite numbers")));
        let mut command = Command::cargo_bin("hbmark").unwrap();
        command
            .args(["logits", "--tokens", "1,2", "--engine", engine, "--device", "cpu", "--model"])
            .arg(folder.path());
        command.assert().code(1).stderr(contains("logits are NaN or infinite: these outputs are wrong"));
    }
}
