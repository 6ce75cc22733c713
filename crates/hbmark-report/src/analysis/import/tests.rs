//! Values checked by hand against the files, one file of each format and version, and malformed and hostile files.

mod batch;
mod conditions;
mod contradictions;
mod records;

use std::path::{Path, PathBuf};

use super::metric_keys::Statistic::{Mean, Median, Single};
use super::*;
use hbmark_core::ledger::devices;
use hbmark_core::model::{Architecture, test_shapes};
use hbmark_core::result::{Cause, DeviceSpec};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/foreign").join(name)
}

fn text(name: &str) -> String {
    std::fs::read_to_string(fixture(name)).unwrap()
}

fn one(name: &str) -> ForeignResult {
    let mut results = read(&fixture(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert_eq!(results.len(), 1, "{name}");
    results.remove(0)
}

fn all_fixtures() -> Vec<String> {
    let entries =
        std::fs::read_dir(fixture("")).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = entries.filter(|name| name != "README.md").collect();
    names.sort();
    assert!(names.len() > 20);
    names
}

/// A model on a device.
fn on<'a>(model: &'a Architecture, gpu: &str, dtype: Option<Dtype>) -> UserOverrides<'a> {
    let gpu = Some(devices::find(gpu).unwrap());
    UserOverrides { model: Some(model), model_name: Some("a folder"), gpu, dtype, ..UserOverrides::default() }
}

/// The placement of a row on the roofline, or the test fails.
#[track_caller]
fn placed(row: &ForeignRow, format: ForeignFormat, given: &UserOverrides<'_>) -> Placement {
    match place(row, format, given) {
        RooflinePlacement::Placed(placed) => *placed,
        other => panic!("{other:?}"),
    }
}

/// A value of a row, or the test fails with its name.
#[track_caller]
fn has(row: &ForeignRow, metric: Metric, statistic: Statistic, wanted: f64) {
    let found =
        row.value(metric, statistic).unwrap_or_else(|| panic!("no {statistic} of {metric:?}: {row:#?}"));
    assert!((found / wanted - 1.0).abs() < 1e-9, "{statistic} of {metric:?} is {found}, not {wanted}");
}

#[test]
fn vllm_serve_of_every_year_means_the_same() {
    let result = one("vllm-serve-0.25.json");
    assert_eq!(result.format, ForeignFormat::VllmServe);
    let row = &result.rows[0];
    has(row, Metric::Tpot, Mean, 11_265_828.258_331_112);
    has(row, Metric::Ttft, Statistic::Percentile(9900), 734_404_917.410_214_8);
    has(row, Metric::OutputThroughput, Single, 82.892_970_740_374_74);
    let setup = &row.setup;
    assert_eq!((setup.max_concurrency, setup.request_rate), (Some(2), Some(Rate::Unlimited)));
    assert_eq!((setup.input_tokens, setup.output_tokens), (Some(32.0), Some(16.0)));
    assert_eq!((setup.gpu.as_deref(), setup.dtype, setup.batch), (None, None, None), "the file does not say");
    assert_eq!(setup.model.as_deref(), Some("facebook/opt-125m"));

    let detailed = &one("vllm-serve-2025-03-detailed.json").rows[0];
    has(detailed, Metric::Itl, Median, 10_545_245.499_770_317);
    assert_eq!(detailed.setup.engine, None, "`openai` is what the client speaks, not what answered");
    assert_eq!(detailed.setup.request_rate, Some(Rate::PerSecond(10.0)));
    assert_eq!(detailed.setup.decode_context(), Some(937.66 + 85.0));
    assert_eq!(detailed.label, "c1 10 req/s");

    let appended = one("vllm-serve-appended.json");
    assert_eq!(appended.rows.len(), 2);
    has(&appended.rows[1], Metric::Tpot, Median, 11_723_842.146_110_28);
    has(
        &one("vllm-serve-2024-09.json").rows[0],
        Metric::E2e,
        Statistic::Percentile(9900),
        1_030_514_696.787_286_3,
    );
}

#[test]
fn zeros_of_failed_requests_are_no_measurements() {
    let row = &one("vllm-serve-all-failed.json").rows[0];
    assert!(row.values.is_empty());
    assert_eq!((row.setup.completed, row.setup.failed), (Some(0), Some(8)));
    assert_eq!(row.remarks, ["the zeros of this run are not measurements"]);
    // It is as invalid here as it is for the checklist.
    assert_eq!(row.problems, [Cause::other("no request of 8 completed")]);
    let imported = Imported::new(one("vllm-serve-all-failed.json"), &UserOverrides::default());
    assert_eq!(imported.objections().count(), 1);
}

#[test]
fn the_other_modes_of_vllm_are_told_apart() {
    let table = one("vllm-table.json");
    assert_eq!(table.format, ForeignFormat::VllmSummary);
    has(&table.rows[0], Metric::Tpot, Statistic::Percentile(9900), 28_033_566.246_584_865);
    has(&table.rows[0], Metric::RequestThroughput, Single, 0.974_566_631_565_362_9);
    let latency = one("vllm-latency.json");
    assert_eq!(latency.format, ForeignFormat::VllmLatency);
    has(&latency.rows[0], Metric::E2e, Mean, 2e9);
    has(&latency.rows[0], Metric::E2e, Statistic::Percentile(9900), 2.1e9);
    assert_eq!(latency.rows[0].setup.repetitions, Some(3));
    let throughput = one("vllm-throughput.json");
    has(&throughput.rows[0], Metric::TotalThroughput, Single, 3000.0);
    assert_eq!(
        throughput.rows[0].value(Metric::OutputThroughput, Single),
        None,
        "both kinds of tokens are in it"
    );
}

#[test]
fn sglang_times_steps_in_seconds_and_requests_in_milliseconds() {
    let steps = one("sglang-one-batch.jsonl");
    assert_eq!((steps.format, steps.rows.len()), (ForeignFormat::SglangOneBatch, 3));
    has(&steps.rows[0], Metric::DecodeStep, Median, 9_012_132.883_071_9);
    has(&steps.rows[1], Metric::PrefillStep, Single, 54_056_834.429_502_49);
    assert_eq!((steps.rows[1].setup.batch, steps.rows[1].setup.decode_context()), (Some(4), Some(516.0)));
    // 256 sequences of 400 tokens at 1,841.95 a second; 399 steps in the 55.59 s after the first tokens.
    let server = &one("sglang-one-batch-server.jsonl").rows[0];
    has(server, Metric::DecodeStep, Mean, 256.0 / 1841.95 * 400.0 / 399.0 * 1e9);
    assert_eq!(server.setup.accept_length, None, "-1 is not a length");
    let serving = one("sglang-serving-server-info.jsonl");
    assert_eq!(serving.format, ForeignFormat::SglangServing);
    has(&serving.rows[0], Metric::E2e, Median, 519_379_977.602_511_6);
    assert_eq!(serving.rows[0].setup.model.as_deref(), Some("Qwen/Qwen2.5-3B-Instruct"));
    assert_eq!(serving.rows[0].setup.stored_as, None, "auto is not an answer");
    assert_eq!(serving.rows[0].setup.request_rate, Some(Rate::Unlimited));
    let old = &one("sglang-serving-2024.jsonl").rows[0];
    has(old, Metric::RequestThroughput, Single, 300.0 / 298.367_580_506_019_3);
    assert_eq!(old.center(Metric::Tpot), None);
}

#[test]
fn llama_bench_means_the_same_in_five_spellings() {
    for (name, decode_ns) in [
        ("llama-bench.csv", 1_067_431_600.0),
        ("llama-bench.json", 1_062_000_000.0),
        ("llama-bench.jsonl", 1_062_000_000.0),
        ("llama-bench.sql", 1_063_608_780.0),
    ] {
        let result = one(name);
        assert_eq!((result.format, result.rows.len()), (ForeignFormat::LlamaBench, 2), "{name}");
        let [prefill, decode] = &result.rows[..] else { panic!("{name}") };
        assert_eq!((prefill.label.as_str(), decode.label.as_str()), ("pp512", "tg128"), "{name}");
        let step = decode.value(Metric::DecodeStep, Mean).unwrap();
        assert!((step / (decode_ns / 128.0) - 1.0).abs() < 0.02, "{name}: {step}");
        assert!(prefill.value(Metric::PrefillStep, Mean).is_some() && decode.center(Metric::Ttft).is_none());
        let setup = &decode.setup;
        assert_eq!(setup.gpu.as_deref(), Some("NVIDIA GeForce RTX 4080"), "{name}");
        assert_eq!(setup.stored_as.as_deref(), Some("Q4_K - Medium"), "{name}");
        assert_eq!(
            (setup.weight_bytes, setup.dtype, setup.batch),
            (Some(4_677_120_000), None, Some(1)),
            "{name}"
        );
        assert_eq!((setup.kv_dtype, setup.decode_context()), (Some(Dtype::F16), Some(64.0)), "{name}");
    }
    has(&one("llama-bench.csv").rows[1], Metric::DecodeStep, Mean, 1_067_431_600.0 / 128.0);
    let page = one("llama-bench.md");
    assert_eq!(page.rows[1].label, "tg32 @ d65536");
    has(&page.rows[1], Metric::DecodeStep, Mean, 1e9 / 40.79);
    has(&page.rows[0], Metric::PrefillStep, Mean, 2048.0 / 679.48 * 1e9);
    assert_eq!(page.rows[1].setup.decode_context(), Some(65_552.0));
    assert_eq!(one("llama-bench-q8_0.json").rows[1].setup.dtype, Some(Dtype::Q8_0));
}

#[test]
fn a_page_of_two_programs_gives_two_results() {
    let results = read(&fixture("llama-cpp-page.md")).unwrap();
    let formats: Vec<_> = results.iter().map(|r| (r.format, r.rows.len())).collect();
    assert_eq!(formats, [(ForeignFormat::LlamaBench, 3), (ForeignFormat::LlamaBatchedBench, 3)]);
    let batched = &results[1].rows[2];
    assert_eq!(batched.label, "ggml-org/gpt-oss-20b-GGUF: b4 pp512 tg32");
    has(batched, Metric::DecodeStep, Mean, 0.820 / 32.0 * 1e9);
    has(batched, Metric::OutputThroughput, Single, 156.03);
    let lines = one("llama-batched-bench.jsonl");
    has(&lines.rows[1], Metric::DecodeStep, Mean, 11.106_112 / 128.0 * 1e9);
    assert_eq!((lines.rows[1].setup.batch, lines.rows[1].setup.model.as_deref()), (Some(2), None));
}

#[test]
fn what_aiperf_and_guidellm_call_itl_is_our_tpot() {
    let json = &one("aiperf.json").rows[0];
    has(json, Metric::Tpot, Mean, 18_199_095.331_601_38);
    has(json, Metric::Itl, Median, 18_063_869.0);
    let setup = &json.setup;
    assert_eq!((setup.max_concurrency, setup.warmup, setup.seed), (Some(1), Some(1), Some(100)));
    assert_eq!(setup.model.as_deref(), Some("Qwen/Qwen3-0.6B"));
    assert_eq!(setup.gpu.as_deref(), Some("NVIDIA RTX 6000 Ada Generation"));
    let csv = &one("aiperf.csv").rows[0];
    has(csv, Metric::Tpot, Median, 8.73e6);
    has(csv, Metric::RequestThroughput, Single, 6.81);
    let forerunner = &one("genai-perf.csv").rows[0];
    has(forerunner, Metric::Tpot, Mean, 30.35e6);
    has(forerunner, Metric::OutputThroughput, Mean, 261.25);
    has(forerunner, Metric::RequestThroughput, Single, 1.5);
    assert_eq!((forerunner.setup.input_tokens, forerunner.setup.completed), (Some(3000.05), Some(40)));
    let old = &one("genai-perf-2024-05.json").rows[0];
    has(old, Metric::Itl, Mean, 3_860_101.110_027_430_6);
    assert_eq!(old.center(Metric::Tpot), None, "its gaps are those of all requests: from 0.6 to 104 ms");
    assert_eq!(
        (old.setup.engine.as_deref(), old.setup.input_tokens),
        (Some("vllm"), Some(550.052_391_799_544_5))
    );
    let guide = one("guidellm.json");
    has(&guide.rows[0], Metric::Tpot, Median, 4_924_122.742_780_55);
    has(&guide.rows[0], Metric::E2e, Mean, 644_474_366.436_833_9);
    // What it calls time_per_output_token_ms is 127 gaps over 128 tokens in this file: no wait for the first token is in it.
    assert!((4.941_609_043_733_832_f64 * 127.0 / 128.0 - 4.903_002_723_079_66).abs() < 1e-9);
    assert_eq!(guide.rows[0].center(Metric::TpotWithFirst), None);
    assert!(guide.rows[0].remarks[0].starts_with("time_per_output_token_ms is left out"));
    // Newer versions begin at the request: (16.79 + 127 × 4.94) / 128.
    let newer = text("guidellm.json")
        .replace("4.90300272307966", "5.034194251047")
        .replace("4.885653033852577", "5.01");
    let newer = parse("guidellm.json", newer).unwrap().remove(0).rows.remove(0);
    has(&newer, Metric::TpotWithFirst, Mean, 5_034_194.251_047);
    assert_eq!((guide.rows[0].setup.max_concurrency, guide.rows[0].setup.completed), (Some(1), Some(46)));
}

#[test]
fn optimum_and_trtllm_say_more_than_others() {
    let optimum = &one("optimum-benchmark.json").rows[0];
    has(optimum, Metric::DecodeStep, Median, 25_622_528.076_171_876);
    has(optimum, Metric::PrefillStep, Mean, 26_584_511.947_631_832);
    let setup = &optimum.setup;
    assert_eq!((setup.dtype, setup.batch, setup.warmup), (Some(Dtype::Bf16), Some(1), Some(10)));
    assert_eq!(
        setup.gpu.as_deref(),
        Some("NVIDIA A100-SXM4-80GB"),
        "device 0 of a list with a display in it"
    );
    assert_eq!(setup.decode_context(), Some(96.0));
    let streaming = &one("trtllm-bench-streaming.json").rows[0];
    has(streaming, Metric::Tpot, Median, 4_216_104.820_512_821);
    has(streaming, Metric::Ttft, Mean, 15_694_758.55);
    assert_eq!((streaming.setup.dtype, streaming.setup.gpus), (Some(Dtype::Bf16), Some(1)));
    let silent = &one("trtllm-bench-fp8.json").rows[0];
    assert_eq!((silent.setup.dtype, silent.setup.kv_dtype), (Some(Dtype::Fp8), Some(Dtype::Fp8)));
    assert!(silent.remarks[0].starts_with("not streamed"), "{:?}", silent.remarks);
}

#[test]
fn a_decode_stands_on_the_roofline_of_its_own_batch_and_context() {
    let architecture = test_shapes::llama_3_1_8b();
    let given = on(&architecture, "h100-pcie", Some(Dtype::Bf16));
    let result = one("vllm-serve-2025-03-detailed.json");
    let placed = placed(&result.rows[0], result.format, &given);
    assert_eq!(
        (placed.cell.batch, placed.cell.context),
        (1, 1023),
        "one at a time; 937.7 in and half of 170 out"
    );
    // 15.0 GB of weights and 134 MB of KV in 10.5 ms: 1.44 TB/s of 2.039.
    let achieved = placed.cell.achieved_bytes_per_s.unwrap();
    assert!((1.43e12..1.45e12).contains(&achieved), "{achieved}");
    let share = placed.cell.fraction_of_datasheet.unwrap();
    assert!((share - achieved / 2.039e12).abs() < 1e-9, "{share}");
    assert_eq!(placed.time.metric, Metric::Tpot);
    let assumed = placed.assumptions.join("\n");
    assert!(assumed.contains("one GPU") && assumed.contains("KV cache in bf16"), "{assumed}");
}

#[test]
fn what_is_missing_is_asked_for_and_not_guessed() {
    let asked = |model: Option<&str>| {
        let mut result = one("vllm-serve-2025-03-detailed.json");
        for row in model.map(|_| &mut result.rows).into_iter().flatten() {
            row.setup.model = model.map(str::to_owned);
        }
        let imported = Imported::new(result, &UserOverrides::default());
        imported.missing().iter().map(|m| (m.flag.clone(), m.hint.clone())).collect::<Vec<_>>()
    };
    let flags = |asked: &[(String, String)]| asked.iter().map(|(flag, _)| flag.clone()).collect::<Vec<_>>();
    // The file's model is a tuning of a shape that ships with the program.
    assert_eq!(flags(&asked(None)), ["--gpu", "--dtype"]);
    let longer = asked(Some("acme/Llama-3.1-8B-Instruct-Longer"));
    assert_eq!(flags(&longer), ["--model", "--gpu", "--dtype"]);
    assert!(longer[0].1.contains("Llama-3.1-8B"), "{longer:?}");
    // A GPU that could be two products is asked for by naming both.
    let mut row = one("optimum-benchmark.json").rows.remove(0);
    row.setup.gpu = Some("A100".to_owned());
    let RooflinePlacement::Asks(missing) =
        place(&row, ForeignFormat::OptimumBenchmark, &UserOverrides::default())
    else {
        panic!()
    };
    let gpu = missing.iter().find(|m| m.flag == "--gpu").unwrap();
    assert!(gpu.hint.contains("a100-80-sxm") && gpu.hint.contains("a100-40-pcie"), "{}", gpu.hint);
}

#[test]
fn speculative_steps_and_missing_decodes_stay_off_the_roofline() {
    for (name, why) in [
        ("vllm-serve-speculative.json", "speculative"),
        ("vllm-serve-all-failed.json", "no decode"),
        ("vllm-latency.json", "no decode"),
    ] {
        let result = one(name);
        let RooflinePlacement::NoDecode(said) =
            place(&result.rows[0], result.format, &UserOverrides::default())
        else {
            panic!("{name}")
        };
        assert!(said.contains(why), "{name}: {said}");
    }
}

/// What a row and the flags contradict each other in.
fn contradictions(row: &ForeignRow, given: &UserOverrides<'_>) -> Vec<(String, String, String)> {
    let RooflinePlacement::Contradicts(causes) = place(row, ForeignFormat::VllmServe, given) else {
        return Vec::new();
    };
    let said = |cause| match cause {
        Cause::FileContradicts { field, file, given } => (field, file, given),
        other => panic!("{other:?}"),
    };
    causes.into_iter().map(said).collect()
}

fn fields(row: &ForeignRow, given: &UserOverrides<'_>) -> Vec<String> {
    contradictions(row, given).into_iter().map(|(field, ..)| field).collect()
}

#[test]
fn times_beyond_the_device_are_invalid_and_weights_of_another_size_are_another_model() {
    let architecture = test_shapes::llama_3_1_8b();
    let mut row = one("vllm-serve-2025-03-detailed.json").rows.remove(0);
    let placed = placed(&row, ForeignFormat::VllmServe, &on(&architecture, "l4", Some(Dtype::Bf16)));
    assert_eq!(placed.cell.status, hbmark_core::result::Status::Invalid, "an L4 cannot read 15 GB that fast");
    assert!(matches!(placed.cell.reason, Some(Cause::ImportMismatch { .. })));
    row.setup.dtype = Some(Dtype::Q8_0);
    row.setup.stored_as = Some("Q8_0".to_owned());
    row.setup.weight_bytes = Some(3_400_000_000);
    assert_eq!(fields(&row, &on(&architecture, "h100-pcie", None)), ["size of the weights"]);
    row.setup.weight_bytes = Some(8_530_000_000);
    assert_eq!(fields(&row, &on(&architecture, "h100-pcie", None)), [""; 0]);
}

/// A decode step of SGLang's bench_one_batch: 32 sequences at 1,024 tokens, on a B200.
fn step_of_32(model: &str, milliseconds: f64) -> Placement {
    let row = format!(
        r#"{{"run_name": "default", "batch_size": 32, "input_len": 1024, "output_len": 16, "prefill_latency": 0.1, "prefill_throughput": 1.0,
        "median_decode_latency": {}, "median_decode_throughput": {}, "total_latency": 1.0, "overall_throughput": 1.0}}"#,
        milliseconds / 1e3,
        32.0 / milliseconds * 1e3
    );
    let result = parse("result.jsonl", row).unwrap().remove(0);
    let architecture = hbmark_core::model::presets::find(model).unwrap().architecture;
    placed(&result.rows[0], result.format, &on(&architecture, "b200", Some(Dtype::Bf16)))
}

#[test]
fn a_mixture_is_impossible_only_where_the_experts_of_one_token_cannot_be_read() {
    use hbmark_core::result::Status;
    // 111.8 experts a layer are expected of uniform routing: 118 % of the data sheet, where 8 are read by tokens that agree.
    let agreed = step_of_32("Qwen3-30B-A3B", 6.0);
    assert_eq!((agreed.cell.status, agreed.cell.reason), (Status::Ok, None));
    let share = agreed.cell.fraction_of_datasheet.unwrap();
    assert!((1.17..1.19).contains(&share), "{share}");
    let said = agreed.assumptions.join("\n");
    assert!(said.contains("a step whose tokens agree reads 8") && said.contains("agreed on fewer"), "{said}");
    let slow = step_of_32("Qwen3-30B-A3B", 12.0).assumptions.join("\n");
    assert!(slow.contains("uniform routing") && !slow.contains("agreed on fewer"), "{slow}");
    for impossible in [step_of_32("Qwen3-30B-A3B", 0.5), step_of_32("Llama-3.1-8B", 1.5)] {
        assert_eq!(impossible.cell.status, Status::Invalid);
    }
}

/// 1,024 sequences at 80 tokens: 16.4 TFLOP, which take 7.8 ms at the int8 peak and 15.6 at that of bf16.
#[test]
fn weights_and_activations_in_int8_are_held_against_the_int8_peak() {
    use hbmark_core::model::Quantization;
    let row = r#"{"run_name": "default", "batch_size": 1024, "input_len": 72, "output_len": 16, "prefill_latency": 0.1, "prefill_throughput": 1.0,
        "median_decode_latency": 0.010, "median_decode_throughput": 102400.0, "total_latency": 1.0, "overall_throughput": 1.0}"#;
    let result = parse("result.jsonl", row).unwrap().remove(0);
    let own = Quantization { bits: 8, activations: Some(Dtype::Int8), ..Quantization::default() };
    let architecture = Architecture { quantization: Some(own), ..test_shapes::llama_3_1_8b() };
    let placed = placed(&result.rows[0], result.format, &on(&architecture, "h100-sxm", Some(Dtype::Int8)));
    let floor = placed.cell.predicted_datasheet_ns.unwrap();
    assert!((7.7e6..7.9e6).contains(&floor), "{floor}");
}

#[test]
fn a_model_that_is_not_the_files_is_not_rated() {
    let architecture = test_shapes::llama_3_1_8b();
    let given = UserOverrides {
        model_name: Some("Llama-3.1-8B"),
        ..on(&architecture, "h100-sxm", Some(Dtype::Bf16))
    };
    for (name, file) in [("vllm-serve-0.25.json", "facebook/opt-125m"), ("aiperf.json", "Qwen/Qwen3-0.6B")] {
        let row = one(name).rows.remove(0);
        let said = contradictions(&row, &given);
        let model = ("model (family)".to_owned(), file.to_owned(), "Llama-3.1-8B".to_owned());
        assert!(said.contains(&model), "{said:?}");
    }
    let mut row = one("vllm-serve-2025-03-detailed.json").rows.remove(0);
    row.setup.model = Some("meta-llama/Llama-3.3-70B-Instruct".to_owned());
    assert_eq!(fields(&row, &given), ["model (size)"]);
    row.setup.model = Some("neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8".to_owned());
    assert_eq!(contradictions(&row, &given), [("dtype".to_owned(), "fp8".to_owned(), "bf16".to_owned())]);
    let fp8 = UserOverrides { dtype: None, ..given };
    let placed = placed(&row, ForeignFormat::VllmServe, &fp8);
    assert_eq!(placed.cell.dtype, Dtype::Fp8, "by its name");
    let assumed = placed.assumptions.join("; ");
    assert!(assumed.contains("the same family and size") && assumed.contains("weights in fp8"), "{assumed}");
}

#[test]
fn storage_parallelism_and_batch_that_are_not_the_files_are_not_rated() {
    let architecture = test_shapes::llama_3_1_8b();
    let mut row = one("vllm-serve-2025-03-detailed.json").rows.remove(0);
    let given = on(&architecture, "h100-pcie", Some(Dtype::Bf16));
    row.setup.gpus = Some(2);
    assert_eq!(fields(&row, &UserOverrides { gpus: Some(64), ..given.clone() }), ["number of GPUs"]);
    assert_eq!(
        fields(&row, &UserOverrides { batch: Some(8), ..given.clone() }),
        ["limit of requests at once"]
    );
    row.setup.dtype = Some(Dtype::Fp8);
    row.setup.kv_dtype = Some(Dtype::Fp8);
    assert_eq!(fields(&row, &given), ["dtype"]);
    let kv = UserOverrides { dtype: Some(Dtype::Fp8), kv_dtype: Some(Dtype::Bf16), ..given };
    assert_eq!(fields(&row, &kv), ["KV dtype"]);
}

#[test]
fn figures_that_contradict_one_another_are_not_valid() {
    let architecture = test_shapes::llama_3_1_8b();
    let text =
        text("vllm-serve-2025-03-detailed.json").replace("\"p99_tpot_ms\": 10.9", "\"p99_tpot_ms\": 1.9");
    let row = parse("f.json", text).unwrap().remove(0).rows.remove(0);
    let placed = placed(&row, ForeignFormat::VllmServe, &on(&architecture, "h100-pcie", Some(Dtype::Bf16)));
    assert_eq!(placed.cell.status, hbmark_core::result::Status::Invalid);
    assert!(matches!(placed.cell.reason, Some(Cause::Inconsistent { .. })), "{:?}", placed.cell.reason);
}

#[test]
fn a_mixture_of_formats_is_placed_by_the_size_its_file_states() {
    let architecture = test_shapes::qwen2_5_7b();
    let given = on(&architecture, "4090", None);
    let mut result = one("llama-bench.json");
    (result.rows[1].setup.gpu, result.rows[1].setup.cpu) = (None, None);
    let placed = placed(&result.rows[1], result.format, &given);
    assert_eq!(placed.cell.dtype, Dtype::Gguf);
    let weights = placed.cell.bytes.weights.0;
    assert!((3_900_000_000..4_677_120_000).contains(&weights), "all but the token table: {weights}");
}

#[test]
fn a_dtype_that_is_not_the_files_block_formats_is_not_rated() {
    let architecture = test_shapes::qwen2_5_7b();
    let row = one("llama-bench.json").rows.remove(1);
    let given = UserOverrides {
        model: Some(&architecture),
        model_name: Some("Qwen2.5-7B"),
        ..UserOverrides::default()
    };
    let wanted = UserOverrides { dtype: Some(Dtype::Bf16), ..given.clone() };
    let said = contradictions(&row, &wanted);
    assert!(said.contains(&("dtype".to_owned(), "Q4_K - Medium".to_owned(), "bf16".to_owned())), "{said:?}");
    assert!(
        !fields(&row, &UserOverrides { dtype: Some(Dtype::Gguf), ..given }).contains(&"dtype".to_owned())
    );
}

#[test]
fn a_device_that_is_not_the_files_is_not_rated() {
    let architecture = test_shapes::qwen2_5_7b();
    let mut row = one("llama-bench.json").rows.remove(1);
    let mut said = |named: &str, given: &str| {
        row.setup.gpu = Some(named.to_owned());
        contradictions(&row, &on(&architecture, given, None))
    };
    let other = said("NVIDIA GeForce RTX 4080", "rtx-4090");
    assert_eq!(other, [("GPU".to_owned(), "NVIDIA GeForce RTX 4080".to_owned(), "rtx-4090".to_owned())]);
    assert_eq!(said("Apple M4", "l4").len(), 1);
    assert_eq!(said("NVIDIA GeForce RTX 4090", "rtx-4090"), []);
    assert_eq!(said("A100", "a100-80-sxm"), [], "it may be that one");
    assert_eq!(said("1xStandard_ND96asr_v4 x 1", "a100-80-sxm"), [], "a machine, and no GPU");
    // The ceilings of a run on a processor, as a data sheet of that name.
    let name = "Intel(R) Xeon(R) Processor";
    let measured = DeviceSpec { name: name.to_owned(), ..devices::find("l4").unwrap().clone() };
    row.setup.cpu = Some(name.to_owned());
    row.setup.gpu = None;
    let given = UserOverrides { gpu: Some(&measured), ..on(&architecture, "l4", None) };
    assert_eq!(contradictions(&row, &given), []);
    assert_eq!(contradictions(&row, &on(&architecture, "l4", None)).len(), 1);
}

#[test]
fn a_rate_is_an_amount_over_the_time_and_not_the_median_of_moments() {
    let row = &one("guidellm.json").rows[0];
    let shown = |metric| row.center(metric).unwrap().value;
    // 46 requests of 257.1 and 128 tokens in 29.7 s.
    assert!((shown(Metric::OutputThroughput) - 198.17).abs() < 0.01, "{}", shown(Metric::OutputThroughput));
    assert!((shown(Metric::TotalThroughput) - 596.2).abs() < 0.1, "{}", shown(Metric::TotalThroughput));
    assert_eq!(row.center(Metric::RequestThroughput).unwrap().statistic, Mean);
    assert_eq!(row.center(Metric::Tpot).unwrap().statistic, Median, "a time is still its median");
}

#[test]
fn a_prompt_after_a_filled_cache_is_not_a_longer_prompt() {
    let page = "| model | size | params | backend | ngl | test | t/s |\n|---|---|---|---|---|---|---|\n\
                | qwen3 8B Q8_0 | 8.11 GiB | 8.19 B | CUDA | 99 | pp2048 @ d4096 | 4151.39 ± 1.00 |\n\
                | qwen3 8B Q8_0 | 8.11 GiB | 8.19 B | CUDA | 99 | tg128 @ d4096 | 60.00 ± 1.00 |\n";
    let rows = parse("page.md", page).unwrap().remove(0).rows;
    let lengths = |row: &ForeignRow| (row.setup.depth, row.setup.input_tokens, row.setup.output_tokens);
    assert_eq!(lengths(&rows[0]), (Some(4096), Some(2048.0), None));
    assert_eq!(lengths(&rows[1]), (Some(4096), Some(0.0), Some(128.0)));
    assert_eq!(rows[1].setup.decode_context(), Some(4160.0));
}

#[test]
fn every_fixture_survives_being_cut_anywhere() {
    for name in all_fixtures() {
        let whole = text(&name);
        for end in (0..whole.len()).step_by(whole.len() / 60 + 1).filter(|end| whole.is_char_boundary(*end)) {
            // A table of text may still be whole; JSON that is cut is an error with a name.
            if let Err(error) = parse(&name, &whole[..end]) {
                assert!(error.to_string().contains(&name), "{name} at {end}: {error}");
            }
        }
    }
}

#[test]
fn a_field_of_another_kind_is_an_error_or_ignored_and_never_a_panic() {
    let strange = [
        serde_json::json!({}),
        serde_json::json!([[]]),
        serde_json::json!(-1),
        serde_json::json!(1e308),
        serde_json::json!("\u{1b}[31m; DROP"),
        serde_json::json!(true),
        serde_json::json!(null),
    ];
    let mut named = 0;
    for name in all_fixtures().iter().filter(|name| name.ends_with("json") && !name.contains("appended")) {
        let document: serde_json::Value = serde_json::from_str(&text(name)).unwrap();
        let record = document.as_array().map_or(&document, |list| &list[0]).clone();
        for key in record.as_object().unwrap().keys() {
            for value in &strange {
                let mut broken = record.clone();
                broken[key.as_str()] = value.clone();
                match parse(name, broken.to_string()) {
                    Err(ImportError::Field { field, .. }) => {
                        named += usize::from(field.contains(key.as_str()));
                    }
                    Err(error) => assert!(error.to_string().contains(name.as_str())),
                    Ok(results) => {
                        for result in results {
                            let _ = Imported::new(result, &UserOverrides::default());
                        }
                    }
                }
            }
        }
    }
    assert!(named > 100, "{named}");
}

#[test]
fn a_stranger_is_refused_by_what_it_is() {
    let refused = |text: &str| parse("x.json", text).unwrap_err().to_string();
    assert_eq!(refused(" \n"), "x.json is empty");
    assert!(
        refused("{}")
            .starts_with("x.json is not a result this program knows (an empty JSON object); it reads vLLM")
    );
    assert!(refused("[]").contains("an empty JSON list"));
    assert!(refused("{\"a\": 1, \"b\\u001b\": 2}").contains("JSON with the keys `a`, `b\u{fffd}`"));
    assert!(refused("hello").contains("a table with the columns `hello`"));
    assert!(refused("{\"completed\": 1, \"duration\":").contains("was it cut off?"));
    let missing = refused(r#"{"dataset_name": "random", "random_input_len": 1, "completed": null}"#);
    assert_eq!(
        missing,
        "x.json, record 1: field `completed` is missing, and SGLang bench_serving always has it"
    );
    let folder = std::env::temp_dir();
    assert!(matches!(read(&folder), Err(ImportError::NotAFile { .. })));
}

#[test]
fn names_from_strangers_are_harmless() {
    let mut record: serde_json::Value = serde_json::from_str(&text("vllm-serve-0.25.json")).unwrap();
    record["model_id"] = format!("\u{1b}]0;own\u{7}{}", "x".repeat(10_000)).into();
    let model = parse("f", record.to_string()).unwrap()[0].rows[0].setup.model.clone().unwrap();
    assert!(model.chars().count() <= MAX_TEXT + 1 && !model.contains(char::is_control), "{model}");
}
