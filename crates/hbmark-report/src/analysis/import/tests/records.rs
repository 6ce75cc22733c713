//! Formats that hold single requests, sweeps or a server's own metrics.

use super::*;

#[test]
fn aiperf_records_give_the_figures_of_a_summary() {
    let result = one("aiperf-records.jsonl");
    assert_eq!((result.format, result.rows.len()), (ForeignFormat::AiperfRecords, 1));
    let row = &result.rows[0];
    has(
        row,
        Metric::Tpot,
        Mean,
        (18.153_352_603_015_076 + 18.233_836_944_723_617 + 18.163_684_366_834_172) / 3.0 * 1e6,
    );
    has(row, Metric::Ttft, Median, 31_274_152.0);
    has(row, Metric::E2e, Statistic::Max, 3_659_807_704.0);
    // Nine gaps of three requests; the middle one is the fifth.
    has(row, Metric::Itl, Median, 17_868_007.0);
    // 600 tokens from the first start to the last end.
    let near =
        |metric, statistic, wanted: f64| (row.value(metric, statistic).unwrap() / wanted - 1.0).abs() < 1e-7;
    assert!(near(Metric::OutputThroughput, Mean, 600.0 / 14.018_584_446));
    assert!(near(Metric::RequestThroughput, Single, 3.0 / 14.018_584_446));
    assert_eq!(row.value(Metric::Ttft, Statistic::Percentile(9900)), None, "three values have no p99");
    let setup = &row.setup;
    assert_eq!(
        (setup.requests, setup.completed, setup.failed),
        (Some(4), Some(3), Some(1)),
        "the warm-up is not asked for"
    );
    assert_eq!((setup.input_tokens, setup.output_tokens), (Some(100.0), Some(200.0)));
    let said = row.remarks.join("\n");
    assert!(
        said.contains("failed: 1 request;") && said.contains("left out: 1 record of the warm-up"),
        "{said}"
    );
}

#[test]
fn a_cancelled_request_was_asked_for_and_one_of_the_warm_up_was_not() {
    let text = text("aiperf-records.jsonl");
    let (first, rest) = text.split_once('\n').unwrap();
    let first = first.replace(r#""was_cancelled": false"#, r#""was_cancelled": true"#);
    let setup = parse("records.jsonl", format!("{first}\n{rest}")).unwrap().remove(0).rows.remove(0).setup;
    let wanted = (Some(4), Some(2), Some(1), Some(1));
    assert_eq!((setup.requests, setup.completed, setup.failed, setup.warmup), wanted);
}

#[test]
fn a_log_may_be_long_and_none_of_its_records_large() {
    let record = r#"{"metadata": {"benchmark_phase": "profiling"}, "metrics": {"time_to_first_token": {"value": 30, "unit": "ms"},
        "inter_chunk_latency": {"value": [GAPS], "unit": "ms"}}}"#
        .replace('\n', " ");
    // As many gaps take more memory than the values of a file may.
    let (requests, gaps) = (MAX_ROWS + 1, "20,".repeat(150) + "20");
    let log = format!("{}\n", record.replace("GAPS", &gaps)).repeat(requests);
    let row = parse("records.jsonl", log).unwrap().remove(0).rows.remove(0);
    assert_eq!(row.setup.completed, Some(requests as u64));
    has(&row, Metric::Itl, Median, 20e6);
    let large = format!(
        "{}\n{}\n",
        record.replace("GAPS", "20"),
        record.replace("GAPS", &("2,".repeat(1 << 20) + "2"))
    );
    let error = parse("records.jsonl", large).unwrap_err().to_string();
    assert!(error.contains("more than 40 MiB"), "{error}");
    let cut = format!("{0}\n{0}", record.replace("GAPS", "20"));
    let error = parse("records.jsonl", &cut[..cut.len() - 9]).unwrap_err().to_string();
    assert!(error.contains("was it cut off?"), "{error}");
}

#[test]
fn telemetry_names_the_gpu_and_what_held_it_back() {
    let row = &one("aiperf-gpu-telemetry.jsonl").rows[0];
    assert_eq!(row.setup.gpu.as_deref(), Some("NVIDIA RTX 6000 Ada Generation"));
    assert_eq!((row.setup.gpus, row.values.len()), (Some(1), 0));
    assert!((row.setup.duration_s.unwrap() - 2.995_833).abs() < 1e-5);
    let said = row.remarks.join("\n");
    assert!(said.contains("power 30.3 to 119.8 W, mean 90.3"), "{said}");
    assert!(
        said.contains("SM clock 210.0 to 2730.0 MHz")
            && said.contains("the power limit held the clocks back"),
        "{said}"
    );
}

#[test]
fn an_analysis_of_genai_perf_keeps_one_percentile_of_each_latency() {
    let result = one("genai-perf-analyze.csv");
    assert_eq!((result.format, result.rows.len()), (ForeignFormat::GenaiPerfAnalyze, 2));
    let row = &result.rows[0];
    has(row, Metric::Ttft, Statistic::Percentile(9900), 184_430_000.0);
    has(row, Metric::Tpot, Statistic::Percentile(9900), 30_900_000.0);
    has(row, Metric::OutputThroughput, Mean, 1134.92);
    has(row, Metric::RequestThroughput, Single, 10.12);
    assert_eq!(row.center(Metric::Tpot), None, "a p99 is not a middle");
    assert_eq!(row.label, "gpt2_run_config_3");
    let setup = &row.setup;
    assert_eq!(
        (setup.max_concurrency, setup.input_tokens, setup.requests),
        (Some(32), Some(200.0), Some(175))
    );
    assert!(row.remarks.contains(&"p99 GPU Power Usage of gpu0: 80.4 W".to_owned()), "{:?}", row.remarks);
    assert!(
        result.rows[1].remarks.contains(&"p99 GPU Power Usage of gpu0: 83.2 W".to_owned()),
        "{:?}",
        result.rows[1].remarks
    );
}

#[test]
fn the_report_of_inference_perf_is_read_as_yaml_too() {
    let row = &one("inference-perf.yaml").rows[0];
    assert_eq!((row.setup.completed, row.setup.duration_s), (Some(3), Some(2.0)));
    assert_eq!(row.setup.output_tokens, Some(53.333_333_333_333_336));
    has(row, Metric::Ttft, Mean, 0.033_333_333_333_333_354e9);
    has(row, Metric::Itl, Median, 0.169_999_999_999_999_93e9);
}

#[test]
fn yaml_that_is_cut_off_or_grows_from_anchors_is_refused() {
    let refused = |name: &str, text: &str| parse(name, text).unwrap_err().to_string();
    let text = text("inference-perf.yaml");
    assert!(refused("x.yaml", text.trim_end()).contains("does not end with a whole line"));
    let until = &text[..text.find("  output_len:").unwrap()];
    assert!(refused("x.yaml", until).contains("successes.throughput"));
    let bomb = "a: &a [1, 1]\nb: [*a, *a]\n";
    assert!(refused("x.yaml", bomb).contains("cannot be read as YAML"));
    assert!(refused("x.yml", "load_summary: [1, {\n").contains("cannot be read as YAML"));
    assert!(refused("x", "# a note\nkind: a\nother: 1\n").contains("keys `kind`, `other`"));
}

#[test]
fn inference_perf_calls_things_by_their_names_in_one_report_and_not_in_the_other() {
    let stage = &one("inference-perf-stage.json").rows[0];
    has(stage, Metric::Tpot, Mean, 12_019_587.185_668_208);
    has(stage, Metric::TpotWithFirst, Statistic::Percentile(9900), 43_850_279.251_129_78);
    has(stage, Metric::Itl, Median, 48_335.059_545_934_2);
    has(stage, Metric::Ttft, Statistic::Percentile(9990), 441_099_379.144_376_6);
    has(stage, Metric::RequestThroughput, Single, 110.759_518_405_258_63);
    assert_eq!(stage.setup.request_rate, Some(Rate::PerSecond(111.92)));
    assert_eq!((stage.setup.completed, stage.setup.failed), (Some(6715), Some(0)));
    assert_eq!(stage.label, "111.92 req/s");
    let server = &one("inference-perf-server.json").rows[0];
    has(server, Metric::Itl, Mean, 24_781_000.0);
    has(server, Metric::E2e, Statistic::Percentile(9900), 2_351_102_000.0);
    has(server, Metric::RequestThroughput, Mean, 167.527_364);
    assert_eq!(server.center(Metric::Tpot), None, "the server's histogram is one of gaps");
}

#[test]
fn a_page_of_optimum_benchmark_says_what_its_json_says() {
    let page = &one("optimum-benchmark.md").rows[0];
    has(page, Metric::PrefillStep, Mean, 26_585_000.0);
    has(page, Metric::DecodeStep, Statistic::Percentile(9900), 26_906_000.0);
    has(page, Metric::OutputThroughput, Mean, 38.82);
    assert_eq!(page.setup.repetitions, Some(10));
}

#[test]
fn an_engine_speaks_of_itself_in_three_ways() {
    let requests = &one("vllm-engine-requests.jsonl").rows[0];
    has(requests, Metric::Ttft, Median, (27_537.553_364_333 - 27_537.221_809_715) * 1e9);
    let tpots = [16.880_882_965 / 530.0, 24.929_758_933 / 768.0, 24.751_969_762 / 768.0];
    let mean = requests.value(Metric::Tpot, Mean).unwrap();
    assert!((mean / (tpots.iter().sum::<f64>() / 3.0 * 1e9) - 1.0).abs() < 1e-6, "{mean}");
    let rate = requests.value(Metric::RequestThroughput, Single).unwrap();
    assert!((rate / (3.0 / 25.644_633_028) - 1.0).abs() < 1e-6, "{rate}");
    let counters = &one("vllm-engine-counters.csv").rows[0];
    has(counters, Metric::OutputThroughput, Mean, 75.0);
    has(counters, Metric::InputThroughput, Mean, 8604.5);
    assert_eq!(counters.setup.concurrency, Some(20.25));
    let metrics = &one("vllm-metrics.txt").rows[0];
    has(metrics, Metric::Ttft, Mean, 88.244_990_825_653_08 / 664.0 * 1e9);
    has(metrics, Metric::Tpot, Mean, 3.641_358_996_619_241_7 / 600.0 * 1e9);
    has(metrics, Metric::Itl, Mean, 998.122_510_531_771_7 / 164_629.0 * 1e9);
    assert_eq!((metrics.setup.input_tokens, metrics.setup.completed), (Some(512.0), Some(600)));
    assert_eq!(metrics.setup.model.as_deref(), Some("opt-125m-tp2"));
}

#[test]
fn moments_in_the_wrong_order_are_named() {
    let text = r#"{"request_id": "a", "input_toks": 1, "output_toks": 2, "queued_ts": 5.0, "first_token_ts": 4.0, "last_token_ts": 6.0}"#;
    let error = parse("x.jsonl", text).unwrap_err().to_string();
    assert_eq!(
        error,
        "x.jsonl, record 1: field `first_token_ts` is \"4, before queued_ts\", and a later moment was expected"
    );
}

#[test]
fn files_beside_results_are_called_what_they_are() {
    let refused = |name: &str, text: &str| parse(name, text).unwrap_err().to_string();
    for (text, what) in [
        (r#"{"model_type": "llama", "hidden_size": 1}"#, "x is a model's config.json, not a result"),
        (r#"{"version": "1.0", "added_tokens": [], "model": {}}"#, "x is a tokenizer, not a result"),
        (
            r#"{"timestamp": 0, "input_length": 5, "output_length": 6, "hash_ids": []}"#,
            "`hbmark serve --trace FILE` replays it",
        ),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023,1,2\n", "x is recorded traffic"),
        (
            r#"{"name": "a", "backend": {}, "scenario": {}, "launcher": {}}"#,
            "the configuration of an optimum-benchmark run",
        ),
        (
            "# HELP go_gc_duration_seconds x\ngo_gc_duration_seconds 1\n",
            "a Prometheus page of a server that is not vLLM",
        ),
    ] {
        let said = refused("x", text);
        assert!(said.contains(what), "{what}: {said}");
    }
}
