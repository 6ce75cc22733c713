//! What files say of how a run was set up, and what follows from it for the roofline.

use super::*;
use crate::samples;
use serde_json::{Value as Json, json};

/// The only row of a text.
fn row_of(name: &str, text: impl Into<String>) -> ForeignRow {
    parse(name, text).unwrap().remove(0).rows.remove(0)
}

/// The first record of a fixture with some keys changed.
fn changed(name: &str, change: impl FnOnce(&mut Json)) -> ForeignRow {
    let mut record: Json = serde_json::from_str(text(name).lines().next().unwrap())
        .or_else(|_| serde_json::from_str(&text(name)))
        .unwrap_or_else(|_| serde_json::from_str(&text(name).replace("Infinity", "\"inf\"")).unwrap());
    change(&mut record);
    row_of(name, record.to_string())
}

/// Why a row is not on the roofline.
#[track_caller]
fn unrated(row: &ForeignRow, format: ForeignFormat) -> String {
    match place(row, format, &UserOverrides::default()) {
        RooflinePlacement::NoDecode(why) => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn several_tokens_a_step_are_seen_in_every_program_that_shows_them() {
    let row = changed("trtllm-bench-streaming.json", |record| {
        record["decoding_stats"] =
            json!({"mode": "EAGLE", "acceptance_length_percentiles": {"p50": 2.8, "average": 2.75}});
    });
    assert_eq!(row.setup.accept_length, Some(2.75));
    assert!(unrated(&row, ForeignFormat::TrtllmBench).contains("2.75 tokens a step"));
    // 2.1 accepted a draft, and one that the verifying step makes itself.
    let page = format!(
        "{}vllm:spec_decode_num_drafts_total{{engine=\"0\"}} 1000.0\nvllm:spec_decode_num_accepted_tokens_total{{engine=\"0\"}} 2100.0\n",
        text("vllm-metrics.txt")
    );
    assert_eq!(row_of("page.txt", page).setup.accept_length, Some(3.1));
    assert_eq!(one("vllm-metrics.txt").rows[0].setup.accept_length, None);
    // Eight steps a scheduling, of which the file of 2024 has no word.
    let why = unrated(&one("vllm-serve-2024-09.json").rows[0], ForeignFormat::VllmServe);
    assert!(why.starts_with("several tokens arrive at once") && why.contains("8.4 x"), "{why}");
    // Chunks of three tokens.
    let row = changed("aiperf.json", |record| {
        let tpot = record["inter_token_latency"]["avg"].as_f64().unwrap();
        record["inter_chunk_latency"]["avg"] = (3.0 * tpot).into();
    });
    for format in [ForeignFormat::Aiperf, ForeignFormat::AiperfRecords] {
        assert!(unrated(&row, format).starts_with("several tokens arrive at once"), "{format:?}");
    }
}

#[test]
fn a_rate_with_prefill_in_it_is_no_decode_step() {
    // 16 sequences of 16 tokens in 2 s, of which most is prefill.
    let row = |more: &str| {
        row_of(
            "server.jsonl",
            format!(
                r#"{{"run_name": "default", "batch_size": 16, "input_len": 1024, "output_len": 16, "latency": 2.0, {more}
                "output_throughput": 128.0, "overall_throughput": 8320.0}}"#
            ),
        )
    };
    let first = row("");
    assert_eq!(first.center(Metric::DecodeStep), None);
    assert!(first.remarks[0].contains("prefill in it"), "{:?}", first.remarks);
    has(&first, Metric::OutputThroughput, Single, 128.0);
    assert!(
        row(r#""last_ttft": 0.01,"#).center(Metric::DecodeStep).is_some(),
        "the newer ones time the rest apart"
    );
}

#[test]
fn the_storage_of_the_cache_that_a_file_states_is_not_called_unsaid() {
    let mut report = samples::single();
    report.config.insert("kv_dtype".to_owned(), "fp8".into());
    assert_eq!(of_serving(&report, "serve.json").rows[0].setup.kv_dtype, Some(Dtype::Fp8));
    for word in ["fp8_e5m2", "fp8_e4m3"] {
        let row = changed("sglang-serving-server-info.jsonl", |record| {
            record["server_info"]["kv_cache_dtype"] = word.into();
        });
        assert_eq!(row.setup.kv_dtype, Some(Dtype::Fp8), "{word}");
    }
    let architecture = test_shapes::qwen2_5_7b();
    let text = text("llama-bench.jsonl").replace(r#""type_k": "f16""#, r#""type_k": "q8_0""#);
    let row = parse("bench.jsonl", text).unwrap().remove(0).rows.remove(1);
    let sheet = DeviceSpec {
        name: "mine".to_owned(),
        product: "NVIDIA GeForce RTX 4080".to_owned(),
        ..devices::find("rtx-4090").unwrap().clone()
    };
    let given = UserOverrides {
        model: Some(&architecture),
        model_name: Some("Qwen2.5-7B"),
        gpu: Some(&sheet),
        ..UserOverrides::default()
    };
    let assumed = placed(&row, ForeignFormat::LlamaBench, &given).assumptions.join("\n");
    assert!(assumed.contains("the file has type_k q8_0, type_v f16 (--kv-dtype)"), "{assumed}");
}

/// A row of 128 tokens by llama-bench of a model in q4_0.
fn q4_0(gpu_info: &str) -> ForeignRow {
    row_of(
        "bench.json",
        json!({
            "model_type": "llama 8B Q4_0", "model_filename": "Llama-3.1-8B.gguf", "backends": "CUDA", "gpu_info": gpu_info,
            "n_prompt": 0, "n_gen": 128, "avg_ns": 1.28e9, "model_size": 4_653_375_488_u64, "type_k": "f16", "type_v": "f16",
        })
        .to_string(),
    )
}

#[test]
fn a_file_in_q4_0_is_a_mixture_and_is_placed_by_the_size_it_states() {
    let row = q4_0("NVIDIA GeForce RTX 4090");
    for dtype in [None, Some(Dtype::Q4_0)] {
        let given = UserOverrides { dtype, ..UserOverrides::default() };
        let placed = placed(&row, ForeignFormat::LlamaBench, &given);
        // All but the token table, which a step does not read.
        let weights = placed.cell.bytes.weights.0;
        assert!((4_100_000_000..4_400_000_000).contains(&weights), "{weights}");
    }
    let other = UserOverrides { dtype: Some(Dtype::Q8_0), ..UserOverrides::default() };
    assert_eq!(fields(&row, &other), ["dtype"]);
}

#[test]
fn the_gpus_of_a_machine_are_not_one_name() {
    let alike = q4_0(&["NVIDIA GeForce RTX 4090"; 8].join(", "));
    assert_eq!((alike.setup.gpu.as_deref(), alike.setup.gpus), (Some("NVIDIA GeForce RTX 4090"), None));
    let unlike = q4_0("NVIDIA GeForce RTX 4090, NVIDIA H100 PCIe");
    let given = |gpu| UserOverrides { gpu: Some(devices::find(gpu).unwrap()), ..UserOverrides::default() };
    for gpu in ["rtx-4090", "h100-pcie"] {
        assert_eq!(fields(&unlike, &given(gpu)), [""; 0], "{gpu}");
    }
    assert_eq!(fields(&unlike, &given("l4")), ["GPU"]);
    let asked = place(&unlike, ForeignFormat::LlamaBench, &UserOverrides::default());
    assert!(matches!(&asked, RooflinePlacement::Asks(missing) if missing[0].flag == "--gpu"), "{asked:?}");
}

#[test]
fn a_server_of_sglang_has_its_gpus_by_tensor_pipeline_and_data() {
    let sizes = |sizes: Json| {
        changed("sglang-serving-server-info.jsonl", |record| {
            for (key, value) in sizes.as_object().unwrap() {
                record["server_info"][key] = value.clone();
            }
        })
    };
    assert_eq!(sizes(json!({"tp_size": 2, "pp_size": 4})).setup.gpus, Some(8));
    let replicas = sizes(json!({"tp_size": 2, "dp_size": 4}));
    assert_eq!(replicas.setup.gpus, Some(8));
    assert!(unrated(&replicas, ForeignFormat::SglangServing).starts_with("dp_size is 4"));
    let attention = sizes(json!({"tp_size": 8, "dp_size": 8, "enable_dp_attention": true}));
    assert_eq!(attention.setup.gpus, Some(8), "its ranks are those of the tensor group");
}

#[test]
fn a_word_for_how_requests_came_is_no_rate() {
    let row = changed("sglang-serving-server-info.jsonl", |record| record["request_rate"] = "trace".into());
    assert_eq!(row.setup.request_rate, None);
}

#[test]
fn newer_files_of_guidellm_count_requests_among_their_metrics() {
    let newer = |successful: u64| {
        let mut report: Json = serde_json::from_str(&text("guidellm.json")).unwrap();
        let benchmark = &mut report["benchmarks"][0];
        for key in ["request_totals", "worker"] {
            benchmark.as_object_mut().unwrap().remove(key).unwrap();
        }
        benchmark["metrics"]["request_totals"] =
            json!({"successful": successful, "errored": 5, "incomplete": 0});
        benchmark["config"] = json!({"backend": {"type_": "openai_http", "model": "Qwen/Qwen3-0.6B"}});
        row_of("guidellm.json", report.to_string())
    };
    let row = newer(46);
    assert_eq!((row.setup.completed, row.setup.failed), (Some(46), Some(5)));
    assert_eq!((row.setup.model.as_deref(), row.problems.len()), (Some("Qwen/Qwen3-0.6B"), 0));
    assert_eq!(newer(0).problems, [Cause::other("no request of 5 completed")]);
}

#[test]
fn old_keys_and_far_percentiles_of_vllm_are_read() {
    let row = changed("vllm-serve-0.25.json", |record| {
        record["request_goodput:"] = 1.5.into();
        record["request_goodput"] = Json::Null;
        record["p99.99_ttft_ms"] = 734.9.into();
        record["p100_ttft_ms"] = 735.0.into();
    });
    has(&row, Metric::Goodput, Single, 1.5);
    has(&row, Metric::Ttft, Statistic::Percentile(9999), 734.9e6);
    has(&row, Metric::Ttft, Statistic::Max, 735e6);
}

#[test]
fn genai_perf_names_its_model_in_three_ways() {
    let named = |config: Json| changed("genai-perf-2024-05.json", |record| record["input_config"] = config);
    for config in [
        json!({"model": "gpt2"}),
        json!({"model": ["gpt2"], "formatted_model_name": "gpt2_vllm"}),
        json!({"model": null, "formatted_model_name": "gpt2"}),
    ] {
        assert_eq!(named(config.clone()).setup.model.as_deref(), Some("gpt2"), "{config}");
    }
}

#[test]
fn a_run_of_aiperf_that_was_cancelled_says_so() {
    let row = changed("aiperf.json", |record| record["was_cancelled"] = true.into());
    assert!(
        row.remarks.iter().any(|remark| remark.starts_with("the run was cancelled")),
        "{:?}",
        row.remarks
    );
}
