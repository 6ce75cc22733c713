//! The program as a person meets it: exit codes, messages, formats. Times are never compared.

use std::path::Path;

use predicates::prelude::PredicateBooleanExt;
use predicates::str::contains;

use crate::runs::{asserted as hbmark, changed, copy_of, fixture, path, words};

/// Bad input: exit code 2, the message on stderr, nothing on stdout.
fn refused(arguments: &[&str], message: &str) {
    hbmark().args(arguments).assert().code(2).stdout("").stderr(contains(message));
}

#[test]
fn an_unknown_model_is_named_with_suggestions() {
    refused(&["run", "--model", "Llama-3.2-1C"], "Llama-3.2-1B");
    refused(&["predict", "--model", "./no/such/folder"], "does not exist");
}

#[test]
fn a_gpu_outside_the_table_is_a_file_wherever_a_gpu_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mine.toml");
    let sheet = "name = 'mine'\nproduct = 'Mine 48GB'\nbandwidth_bytes_per_s = 1e12\nmemory_bytes = 51_539_607_552\n\
                 dense_flops_per_s = { bf16 = 362e12 }\nsource = 'a data sheet'\n";
    std::fs::write(&file, sheet).unwrap();
    let mine = path(&file);
    let predicted = ["predict", "--gpu", mine, "--phase", "decode", "--batch", "1", "--context", "16"];
    hbmark().args(predicted).assert().code(0).stdout(contains("1.00 TB/s"));
    let of_another = [
        "import",
        &foreign("vllm-serve-0.25.json"),
        "--gpu",
        mine,
        "--model",
        "SmolLM2-135M",
        "--dtype",
        "bf16",
    ];
    hbmark().args(of_another).assert().stdout(contains("facebook/opt-125m"));
    refused(&["predict", "--gpu", path(folder.path())], "no data sheet for device");
    std::fs::write(&file, sheet.replace("1e12", "1000")).unwrap();
    refused(&predicted, "bandwidth_bytes_per_s = 1e3 is not in 1e9 to 1e18");
}

#[test]
fn another_programs_result_is_explained_by_its_distance_from_the_floor() {
    let file = foreign("sglang-one-batch-server.jsonl");
    hbmark().args(["explain", &file]).assert().code(0).stdout(contains("the floor of a token is not known"));
}

#[test]
fn a_hub_id_without_a_network_says_so() {
    let cache = tempfile::tempdir().unwrap();
    hbmark()
        .args(["logits", "--model", "org/name", "--tokens", "1"])
        .env("HF_HOME", cache.path())
        .assert()
        .code(2)
        .stderr(contains("org/name").and(contains("HF_HUB_OFFLINE")));
}

#[test]
fn a_folder_without_a_config_is_refused() {
    let empty = tempfile::tempdir().unwrap();
    refused(&["run", "--model", path(empty.path())], "config.json");
}

#[test]
fn lists_batches_and_contexts_are_checked_before_anything_runs() {
    refused(&["run", "--batch", "0"], "--batch `0`: 0 is not allowed");
    refused(&["run", "--context", "8..1"], "runs backwards");
    refused(&["run", "--dtype", "f8"], "`f8` is not one of");
    refused(
        &["run", "--engine", "warp"],
        "`warp` is unknown; engines: stock, native, stock-graph, stock-pool",
    );
    refused(&["run", "--device", "tpu"], "wanted cpu, cuda or cuda:N");
    refused(&["predict", "--gpu", "voodoo2"], "voodoo2");
}

#[cfg(not(feature = "cuda"))]
#[test]
fn a_cpu_build_asked_for_cuda_says_how_to_get_it() {
    refused(&["run", "--device", "cuda", "--smoke"], "--features cuda");
    let model = fixture("qwen3");
    for command in [&["run", "--smoke"][..], &["logits", "--tokens", "1"]] {
        let native = ["--model", path(&model), "--device", "cuda", "--engine", "native"];
        hbmark().args(command).args(native).assert().code(2).stdout("").stderr(contains("cuda"));
    }
}

#[test]
fn what_no_engine_can_make_of_a_folder_is_refused_with_what_it_can() {
    let model = fixture("qwen3");
    for command in [&["run", "--smoke"][..], &["logits", "--tokens", "1"]] {
        hbmark()
            .args(command)
            .args(["--model", path(&model), "--engine", "native", "--dtype", "gguf", "--device", "cpu"])
            .assert()
            .code(2)
            .stdout("")
            .stderr(contains("is not a GGUF file").and(contains("q8_0, q4_0 or q4_k")));
    }
    refused(
        &["logits", "--tokens", "1", "--engine", "warp"],
        "`warp` is unknown; engines: stock, native, stock-graph, stock-pool",
    );
}

#[test]
fn an_unwritable_output_folder_is_found_before_the_run() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let inside = file.path().join("results");
    refused(&["run", "--smoke", "--out", path(&inside)], "cannot create the output folder");
}

#[test]
fn flags_of_llama_bench_without_a_counterpart_are_named_with_what_to_do() {
    refused(
        &["run", "-m", "SmolLM2-135M", "-ngl", "99"],
        "`run` has no -ngl of llama-bench: the whole model",
    );
    refused(&["run", "-fa", "1"], "`run` has no -fa of llama-bench: native fuses its attention");
}

#[test]
fn a_cache_is_not_stored_in_blocks_of_256_and_computed_times_are_not_written_as_measured() {
    for dtype in ["q4_k", "gguf"] {
        refused(&["predict", "--kv-dtype", dtype], "invalid value");
    }
    hbmark().args(["predict", "--dtype", "bfloat16", "--kv-cache-dtype", "fp8"]).assert().success();
    let virtually = ["serve", "--virtual", "--gpu", "h200", "--model", "Llama-3.1-8B", "--save-result"];
    refused(&virtually, "--save-result writes what was measured");
}

#[test]
fn a_config_that_lies_about_a_shape_is_refused_with_both_shapes() {
    let copy = changed("llama-gqa", |config| config["intermediate_size"] = 128.into());
    hbmark()
        .args(["run", "--model", path(copy.path())])
        .assert()
        .code(2)
        .stderr(contains("112").and(contains("128")));
}

#[test]
fn an_unsupported_architecture_is_named_with_the_supported_ones() {
    let copy = changed("llama-gqa", |config| {
        config["architectures"] = serde_json::json!(["RwkvForCausalLM"]);
        config["model_type"] = "rwkv".into();
    });
    hbmark()
        .args(["run", "--model", path(copy.path())])
        .assert()
        .code(2)
        .stderr(contains("RwkvForCausalLM").and(contains("LlamaForCausalLM")));
}

#[test]
fn an_engine_that_lacks_the_family_says_so() {
    refused(&["run", "--model", "DeepSeek-V3.2", "--smoke"], "the stock engine does not run");
}

#[test]
fn a_context_beyond_the_models_limit_is_a_skipped_cell_and_the_others_run() {
    let output = hbmark()
        .args(["run", "--smoke", "--format", "json", "--phase", "decode"])
        .args(["--model", path(&fixture("llama-gqa")), "--batch", "1", "--context", "8,100000"])
        .assert()
        .code(0);
    let report: serde_json::Value = serde_json::from_slice(&output.get_output().stdout).unwrap();
    let statuses: Vec<(u64, &str)> = report["cells"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| (c["context"].as_u64().unwrap(), c["status"].as_str().unwrap()))
        .collect();
    assert!(statuses.contains(&(8, "smoke")), "{statuses:?}");
    assert!(statuses.contains(&(100_000, "skipped")), "{statuses:?}");
}

#[test]
fn a_grid_of_which_nothing_can_run_is_bad_input() {
    let model = fixture("llama-gqa");
    hbmark()
        .args(["run", "--smoke", "--model", path(&model), "--batch", "1", "--context", "100000"])
        .assert()
        .code(2)
        .stderr(contains("no cell of this grid can run").and(contains("the limit is")));
}

#[test]
fn a_smoke_run_says_what_it_is_and_saves_a_result_that_can_be_read_again() {
    let out = tempfile::tempdir().unwrap();
    hbmark()
        .args(["run", "--smoke", "--model", path(&fixture("qwen3")), "--batch", "1,2", "--context", "4,8"])
        .args(["--note", "=1+1", "--hypothesis", "it runs", "--out", path(out.path())])
        .assert()
        .code(0)
        .stdout(contains("SMOKE run").and(contains("hypothesis: it runs")));
    for name in ["result.json", "result.csv", "result.md", "report.html"] {
        assert!(out.path().join(name).exists(), "{name}");
    }
    let saved = out.path().join("result.json");
    let again = hbmark().args(["report", path(&saved), "--format", "json"]).assert().code(0);
    let read = |bytes: &[u8]| -> serde_json::Value { serde_json::from_slice(bytes).unwrap() };
    assert_eq!(read(&again.get_output().stdout), read(&std::fs::read(&saved).unwrap()));
    hbmark().args(["report", path(&saved)]).assert().code(0).stdout(contains("SMOKE run"));
}

#[test]
fn operations_are_asked_for_and_an_engine_without_them_says_so() {
    hbmark()
        .args(["run", "--smoke", "--model", path(&fixture("qwen3")), "--engine", "stock", "--show-ops"])
        .args(["--batch", "1", "--context", "4", "--phase", "decode"])
        .assert()
        .code(0)
        .stdout(contains("the stock engine cannot time its operations apart"));
}

#[test]
fn a_file_that_is_no_result_is_refused() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "{\"schema_version\": 99}").unwrap();
    refused(&["report", path(file.path())], "schema version 99");
    std::fs::write(file.path(), "not json").unwrap();
    refused(&["report", path(file.path())], "is not a result this program knows");
}

#[test]
fn logits_have_the_documented_shape() {
    let print = |more: &[&str]| -> serde_json::Value {
        let output = hbmark()
            .args(["logits", "--model", path(&fixture("llama-gqa")), "--tokens", "1,2,3"])
            .args(["--greedy", "4", "--format", "json"])
            .args(more)
            .assert()
            .code(0);
        serde_json::from_slice(&output.get_output().stdout).unwrap()
    };
    let found = print(&[]);
    assert_eq!(found["engine"], "stock");
    assert_eq!(found["dtype"], "f32");
    assert_eq!(found["tokens"], serde_json::json!([1, 2, 3]));
    assert_eq!(found["generated"].as_array().unwrap().len(), 4);
    assert!(found["logits"].as_array().unwrap().iter().all(serde_json::Value::is_f64));
    let [exact, rounded] = ["f32", "int8"].map(|dtype| {
        let native = print(&["--engine", "native", "--dtype", dtype, "--device", "cpu"]);
        assert_eq!((&native["engine"], &native["dtype"]), (&"native".into(), &dtype.into()));
        native
    });
    assert_eq!(exact["generated"], found["generated"]);
    assert_ne!(exact["logits"], rounded["logits"]);
    refused(&["logits", "--model", path(&fixture("llama-gqa")), "--tokens", "1,x"], "`x` is not a token id");
    refused(&["logits", "--model", path(&fixture("llama-gqa")), "--tokens", "99999"], "token 99999");
}

#[test]
fn both_engines_side_by_side_print_the_ladder() {
    for model in ["qwen3", "llama-q8_0.gguf"] {
        hbmark()
            .args(words("run --quick -r 1 --allow-noise --engine stock,native --device cpu"))
            .args(["--model", path(&fixture(model)), "--batch", "1", "--context", "8", "--phase", "decode"])
            .assert()
            .code(0)
            .stdout(contains("ladders: where the time of a step goes").and(contains("decode b1 c8: ")));
    }
}

#[test]
fn a_prompt_as_text_goes_through_the_models_tokenizer() {
    hbmark()
        .args(["logits", "--model", path(&fixture("llama-gqa")), "--prompt", "the"])
        .assert()
        .code(0)
        .stdout(contains("logit"));
    refused(&["logits", "--model", "SmolLM2-135M", "--prompt", "the"], "has no tokenizer");
}

#[test]
fn a_prediction_has_the_cells_of_a_run() {
    let output = hbmark()
        .args(["predict", "--model", "Llama-3.1-8B", "--gpu", "h200", "--format", "json"])
        .args(["--batch", "1", "--context", "512", "--phase", "decode"])
        .assert()
        .code(0);
    let report: serde_json::Value = serde_json::from_slice(&output.get_output().stdout).unwrap();
    let cell = &report["cells"][0];
    assert_eq!(cell["status"], "predicted");
    // 15.01 GB of weights as the step reads them, 512 positions of 131,072 B read and one written.
    assert_eq!(cell["bytes"]["kv_read"], 512 * 131_072);
    assert_eq!(cell["bytes"]["kv_write"], 131_072);
    for key in ["id", "phase", "engine", "dtype", "batch", "context", "predicted_ns", "flops", "bound"] {
        assert!(!cell[key].is_null(), "{key}");
    }
}

#[test]
fn blocks_of_256_are_predicted_at_their_bits_and_refused_where_rows_do_not_fill_them() {
    let asked = ["predict", "--model", "Llama-3.1-8B", "--gpu", "h200", "--batch", "1", "--context", "512"];
    let q4_k = [&asked[..], &["--phase", "decode", "--dtype", "q4_k", "--format", "json"]].concat();
    let output = hbmark().args(&q4_k).assert().code(0);
    let report: serde_json::Value = serde_json::from_slice(&output.get_output().stdout).unwrap();
    // 4.5 bits for 6,979,321,856 weights of layers, 6.5625 for the head, f32 for 65 × 4096 of norms.
    let wanted = 6_979_321_856_u64 / 256 * 144 + 128_256 * 4096 / 256 * 210 + 65 * 4096 * 4;
    assert_eq!(report["cells"][0]["bytes"]["weights"], wanted);
    refused(
        &["predict", "--model", "SmolLM2-135M", "--dtype", "q4_k"],
        "has rows of 576, which the blocks of 256 of q4_k do not divide",
    );
}

#[test]
fn a_model_on_several_gpus_has_the_bytes_of_one_and_the_collectives_of_all() {
    let asked = ["predict", "--model", "Llama-3.1-70B", "--gpu", "h200", "--batch", "1", "--context", "4096"];
    let decode = [&asked[..], &["--phase", "decode", "--tensor-parallel-size", "8"]].concat();
    let output = hbmark().args(&decode).args(["--format", "json"]).assert().code(0);
    let report: serde_json::Value = serde_json::from_slice(&output.get_output().stdout).unwrap();
    assert_eq!(report["group"]["tensor_parallel_size"], 8);
    assert_eq!(report["cells"][0]["bytes"]["weights"], 17_378_066_432_u64);
    assert_eq!(report["cells"][0]["group"]["collectives"][0]["count"], 160);
    hbmark().args(&decode).assert().code(0).stdout(
        contains("8 GPUs: tensor parallel 8")
            .and(contains("all-reduce of hidden states after each mixer and feed-forward"))
            .and(contains("with vLLM 0.24.0")),
    );
    refused(
        &[&asked[..], &["--tp", "5"]].concat(),
        "Llama-3.1-70B with tensor parallel 5: 64 attention heads cannot be shared by 5 GPUs",
    );
    refused(&[&asked[..], &["--enable-expert-parallel"]].concat(), "has no routed experts");
    refused(&[&asked[..], &["--pp", "81"]].concat(), "80 layers cannot be split into 81 stages");
    refused(&[&asked[..], &["--tp", "0"]].concat(), "0");
}

#[test]
fn a_folder_whose_headers_cannot_be_read_is_predicted_by_its_config_and_says_so() {
    let folder = copy_of("qwen3");
    let asked =
        ["predict", "--gpu", "h200", "--batch", "1", "--context", "16", "--format", "json", "--model"];
    let predict = || hbmark().args(asked).arg(path(folder.path())).assert().code(0);
    assert!(!String::from_utf8_lossy(&predict().get_output().stderr).contains("headers cannot be read"));
    std::fs::write(folder.path().join("model.safetensors"), "version https://git-lfs.example/spec/v1")
        .unwrap();
    let output = predict().stderr(contains("config.json says").and(contains("headers cannot be read")));
    let report: serde_json::Value = serde_json::from_slice(&output.get_output().stdout).unwrap();
    let first = report["warnings"][0].as_str().unwrap();
    assert!(first.contains("headers cannot be read") && first.contains("model.safetensors"), "{first}");
    // A folder may have a config alone.
    std::fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    let alone = predict().stderr(contains("headers cannot be read").not());
    let alone: serde_json::Value = serde_json::from_slice(&alone.get_output().stdout).unwrap();
    assert_eq!(alone["cells"], report["cells"]);
}

#[test]
fn every_subcommand_explains_itself_with_an_example() {
    for name in [
        "run",
        "serve",
        "compare",
        "predict",
        "ceiling",
        "logits",
        "verify",
        "selftest",
        "report",
        "models",
        "devices",
        "doctor",
        "glossary",
        "completions",
        "man",
        "import",
        "ladder",
        "explain",
        "checklist",
        "capacity",
        "record",
    ] {
        hbmark().args([name, "--help"]).assert().code(0).stdout(contains("Example"));
    }
    for mode in ["sweep", "search", "matrix", "cold"] {
        hbmark().args(["serve", mode, "--help"]).assert().code(0).stdout(contains("Example"));
    }
    hbmark().args(["completions", "bash"]).assert().code(0).stdout(contains("hbmark"));
    let pages = tempfile::tempdir().unwrap();
    hbmark().arg("man").arg(pages.path()).assert().code(0).stdout(contains("hbmark.1"));
    let page = std::fs::read_to_string(pages.path().join("hbmark-serve-sweep.1")).unwrap();
    assert!(page.contains("SYNOPSIS") && page.contains("\\-\\-slo"));
    hbmark().arg("glossary").assert().code(0).stdout(contains("TPOT"));
    hbmark().args(["glossary", "canary"]).assert().code(0).stdout(contains("goodput").not());
    refused(&["glossary", "zebra"], "the glossary has no `zebra`");
    hbmark().arg("models").assert().code(0).stdout(contains("SmolLM2-135M"));
    hbmark().arg("devices").assert().code(0).stdout(contains("h200"));
}

#[test]
fn a_dry_run_prints_the_plan_and_measures_nothing() {
    hbmark()
        .args(["run", "--dry-run", "--batch", "1,2", "--context", "128"])
        .assert()
        .code(0)
        .stdout(contains("decode/stock/f32/b2/c128").and(contains("run")));
    let plan = hbmark()
        .args(["run", "--dry-run", "--batch", "1,4096", "--context", "128", "--format", "json"])
        .assert()
        .code(0);
    let plan: serde_json::Value = serde_json::from_slice(&plan.get_output().stdout).unwrap();
    let decode = |batch: u32| {
        let id = format!("/b{batch}/c128");
        let cells = plan["cells"].as_array().unwrap();
        cells.iter().find(|cell| cell["id"].as_str().unwrap().ends_with(&id)).unwrap().clone()
    };
    assert!(decode(1)["skip"].is_null() && decode(1)["step_bytes"].as_u64() > Some(0));
    assert!(decode(4096)["skip"]["code"].is_string());
}

fn foreign(name: &str) -> String {
    path(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/foreign").join(name)).to_owned()
}

#[test]
fn an_import_maps_asks_and_places() {
    let file = foreign("vllm-serve-2025-03-detailed.json");
    hbmark()
        .args(["import", &file])
        .assert()
        .success()
        .stdout(contains("TPOT").and(contains("the file names no GPU")));
    hbmark()
        .args(["import", &file, "--model", "Llama-3.1-8B", "--gpu", "h100-pcie", "--dtype", "bf16"])
        .assert()
        .success()
        .stdout(contains("1.44 TB/s").and(contains("it ran on h100-pcie as given")));
    hbmark().args(["import", "--aliases"]).assert().success().stdout(contains("called ITL there"));
    refused(&["import"], "FILES");
    refused(&["import", &foreign("README.md")], "not a result this program knows");
}

#[test]
fn a_ladder_takes_an_external_rung_on_a_prediction() {
    let file = foreign("vllm-serve-2025-03-detailed.json");
    let said = ["--model", "Llama-3.1-8B", "--gpu", "h100-pcie", "--dtype", "bf16"];
    let cell = ["ladder", "--cell", "decode/ideal/bf16/b1/c1024", "--external", &file];
    hbmark()
        .args(cell)
        .args(said)
        .assert()
        .success()
        .stdout(contains("data sheet").and(contains("vllm (external")).or(contains("external (external")));
    refused(&cell, "--gpu (the file names no GPU)");
    refused(&["ladder", "--cell", "decode/b1", "--external", &file], "`decode/b1` is not a cell");
    refused(
        &["ladder", "--cell", "decode/ideal/bf16/b1/c1024", "--external", &file, "--row", "zz"],
        "no row with `zz`",
    );
}

#[test]
fn a_checklist_takes_from_flags_what_a_file_cannot_say() {
    let file = foreign("vllm-serve-appended.json");
    let list = |more: &[&str]| hbmark().args(["checklist", &file]).args(more).assert();
    list(&[]).code(1).stdout(contains("hardware named (not reported)"));
    let said = ["--gpu", "h100-sxm", "--dtype", "bf16", "--engine", "vllm 0.9.1", "--model", "Llama-3.1-8B"];
    list(&said).stdout(
        contains("NVIDIA H100").and(contains("vllm 0.9.1, as given")).and(contains("not reported)").not()),
    );
    list(&["--model", "Qwen3-0.6B"]).code(1).stdout(contains("figures agree (FAILED)"));
}

#[test]
fn what_contradicts_the_file_is_marked_and_not_rated() {
    let import = |name: &str, more: &[&str]| hbmark().args(["import", &foreign(name)]).args(more).assert();
    let said = ["--model", "Llama-3.1-8B", "--gpu", "h100-sxm", "--dtype", "bf16"];
    import("vllm-serve-0.25.json", &said).code(1).stdout(
        contains("CONTRADICTS")
            .and(contains("the file says model (family) facebook/opt-125m"))
            .and(contains("% sheet").not()),
    );
    import("vllm-serve-2024-09.json", &said)
        .code(1)
        .stdout(contains("the file says dtype fp8, and bf16 was given"));
    let both = [foreign("vllm-serve-0.25.json"), foreign("vllm-serve-appended.json")];
    hbmark().args(["import", &both[0], &both[1]]).assert().code(0).stdout(contains("2 results · 3 rows"));
}

/// Every kind of file through every command that takes results.
#[test]
fn every_kind_of_result_goes_through_every_door() {
    let result = |name: &str| {
        path(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/results").join(name)).to_owned()
    };
    let search = tempfile::tempdir().unwrap();
    let search = search.path().join("search");
    let found = ["serve", "search", "--virtual", "--gpu", "h100-sxm", "--model", "SmolLM2-135M"];
    let found = hbmark()
        .args(found)
        .args(["--slo", "ttft_p95=1s", "--requests", "100", "--out", path(&search)])
        .assert();
    assert!(matches!(found.get_output().status.code(), Some(0 | 1)), "{found:?}");
    let kinds = [
        ("run", result("run-scripted.json")),
        ("prediction", result("predict-h200.json")),
        ("serve", result("serve-single.json")),
        ("sweep", result("serve-sweep.json")),
        ("search", path(&search.join("serve.json")).to_owned()),
        ("comparison", result("comparison.json")),
        ("foreign", foreign("vllm-serve-appended.json")),
        ("foreign page", foreign("llama-cpp-page.md")),
    ];
    for (kind, file) in &kinds {
        for command in ["report", "explain", "checklist", "record"] {
            let done = hbmark().args([command, file]).assert();
            let (code, text) = (
                done.get_output().status.code(),
                String::from_utf8_lossy(&done.get_output().stderr).into_owned(),
            );
            assert!(
                matches!(code, Some(0 | 1)) && !done.get_output().stdout.is_empty(),
                "{command} {kind}: {code:?} {text}"
            );
        }
        for format in ["json", "csv", "md", "html"] {
            hbmark().args(["report", file, "--format", format]).assert().code(0);
        }
        let beside = hbmark().args(["compare", file, file]).assert();
        if *kind == "comparison" {
            beside.code(2).stderr(contains("`hbmark report FILE` prints each"));
        } else {
            let code = beside.get_output().status.code();
            assert!(matches!(code, Some(0 | 1)), "compare {kind}: {beside:?}");
        }
        let imported = hbmark().args(["import", file]).assert();
        if ["serve", "sweep", "search"].contains(kind) {
            // Beside those of other programs, on the same roofline.
            imported.stdout(contains("hbmark serve"));
        } else if !kind.contains("foreign") {
            imported.code(2).stderr(contains("`hbmark report FILE` prints it"));
        }
    }
    let mixed = hbmark().args(["compare", &kinds[0].1, &kinds[2].1]).assert();
    mixed.code(2).stderr(contains("is a run and").and(contains("give two of one kind")));
}

#[test]
fn conditions_of_a_pipeline_set_the_exit_code() {
    let sweep = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/results/serve-sweep.json");
    let report = |more: &[&str]| hbmark().args(["report", path(&sweep)]).args(more).assert();
    report(&[]).code(0);
    report(&["--fail-on", "slo,saturated"]).code(1).stderr(contains("--fail-on: "));
    let serve = words("serve --virtual --gpu h100-sxm --model SmolLM2-135M --requests 100 --rate 1");
    let served = |more: &[&str]| hbmark().args(&serve).args(more).assert();
    served(&["--slo", "ttft_p95=1s", "--fail-on", "saturated"]).code(0);
    served(&["--slo", "e2e_p50=1us", "--fail-on", "slo"]).code(1).stderr(contains("an objective is not met"));
}

#[test]
fn a_condition_that_can_never_hold_is_refused() {
    let serve = ["serve", "--virtual", "--gpu", "h100-sxm", "--model", "SmolLM2-135M", "--fail-on"];
    refused(&[&serve[..], &["slo"]].concat(), "--fail-on slo needs objectives: add --slo");
    refused(&[&serve[..], &["no-rate"]].concat(), "--fail-on no-rate is of `hbmark serve search`");
    refused(&[&serve[..], &["does-not-fit"]].concat(), "--fail-on does-not-fit is of `hbmark predict`");
    let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/results");
    let single = results.join("serve-single.json");
    refused(&["report", path(&single), "--fail-on", "no-rate"], "has nothing of the kind");
    let predict = ["predict", "--model", "Llama-3.1-70B", "--gpu", "l4", "--batch", "1", "--context", "16"];
    let with = |condition: &str| hbmark().args(predict).args(["--fail-on", condition]).assert();
    with("not-ok").code(0);
    with("does-not-fit").code(1).stderr(contains("does not fit"));
    with("slo").code(2).stderr(contains("has nothing of the kind"));
    // A context that the model does not have: nothing was predicted.
    let beyond = ["predict", "--model", "SmolLM2-135M", "--batch", "1", "--context", "1m"];
    hbmark().args(beyond).assert().code(1);
}

#[test]
fn what_the_flags_alone_show_is_said_before_anything_is_loaded() {
    let few = ["serve", "--model", "SmolLM2-135M", "--rate", "1", "--requests", "30", "--slo", "ttft_p95=2s"];
    refused(&few, "needs at least 59 requests");
    let out = tempfile::tempdir().unwrap();
    refused(&[&few[..], &["--out", path(&out.path().join("none"))]].concat(), "needs at least 59 requests");
    assert!(!out.path().join("none").exists());
    refused(&["run", "--max-noise", "0"], "no interval is as narrow as 0 %");
    let unknown = ["serve", "--virtual", "--gpu", "gb10", "--model", "SmolLM2-135M", "--dtype", "bf16"];
    refused(&unknown, "NVIDIA GB10 has no matrix-product peak for bf16");
}

#[test]
fn a_smoke_run_does_not_replace_a_measured_one() {
    let folder = tempfile::tempdir().unwrap();
    let measured = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/results/run-scripted.json");
    let kept = folder.path().join("result.json");
    std::fs::copy(&measured, &kept).unwrap();
    refused(&["run", "--smoke", "--out", path(folder.path())], "choose another --out");
    assert_eq!(std::fs::read(&kept).unwrap(), std::fs::read(&measured).unwrap());
}

#[test]
fn capacity_says_what_a_file_is_that_cannot_answer() {
    let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/results");
    let ask = |file: &Path, message: &str| refused(&["capacity", path(file), "--target-rate", "5"], message);
    ask(&results.join("run-scripted.json"), "is a run, and capacity needs a serving result");
    let folder = tempfile::tempdir().unwrap();
    let cut = folder.path().join("cut.json");
    let whole = std::fs::read_to_string(results.join("serve-sweep.json")).unwrap();
    std::fs::write(&cut, &whole[..whole.len() / 2]).unwrap();
    ask(&cut, "was it cut off?");
    std::fs::write(&cut, "").unwrap();
    ask(&cut, "is empty");
    refused(&["capacity", path(&results.join("serve-sweep.json")), "--target-rate", "-5"], "target-rate");
}

#[test]
fn a_prediction_goes_by_what_the_checkpoint_states() {
    let folder = changed("qwen3", |config| {
        config["quantization_config"] =
            serde_json::json!({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": true});
    });
    let config = folder.path().join("config.json");
    std::fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    let predict =
        ["predict", "--gpu", "h200", "--batch", "1", "--context", "16", "--phase", "decode", "--model"];
    hbmark().args(predict).arg(path(&config)).assert().code(0).stdout(contains("int4").and(contains("TPOT")));
    refused(
        &[&predict[..], &[path(folder.path()), "--dtype", "bf16"]].concat(),
        "is stored as int4 (gptq, 4 bits, groups of 32)",
    );
    refused(
        &[
            "serve",
            "--virtual",
            "--gpu",
            "h200",
            "--rate",
            "1",
            "--model",
            path(folder.path()),
            "--dtype",
            "bf16",
        ],
        "is stored as int4",
    );
    refused(&["run", "--model", path(folder.path())], "GPTQ with reordered inputs (desc_act)");
    refused(&["run", "--dtype", "fp4"], "--dtype `fp4` is not one of");
}

#[test]
fn a_saved_result_says_that_nothing_proves_who_took_its_samples() {
    let seed = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds/result-full.json");
    for format in ["table", "md", "html"] {
        hbmark()
            .args(["report", path(&seed), "--format", format])
            .assert()
            .code(0)
            .stdout(contains("their origin is not verified"));
    }
}

#[test]
fn a_pipe_in_the_place_of_a_result_is_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("result.json");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for command in ["report", "explain", "checklist", "import"] {
        refused(&[command, path(&pipe)], "regular file");
    }
}

#[test]
fn numbers_that_mean_nothing_are_refused_before_anything_is_served() {
    let model = fixture("qwen3");
    let serve = ["serve", "--virtual", "--gpu", "h100-sxm", "--model", path(&model)];
    let with = |more: &[&str], message: &str| refused(&[&serve[..], more].concat(), message);
    for scale in ["nan", "inf", "-1", "0"] {
        with(&["--trace", "none.csv", &format!("--time-scale={scale}")], "is not between");
    }
    with(&["--warmup-requests=18446744073709551615"], "18446744073709551615 is not between 0 and 10000000");
    with(&["--rate", "1e308"], "1e308 is not a rate");
    with(&["--rate", "1e-300"], "1e-300 is not a rate");
}

#[test]
fn an_output_that_is_a_device_or_a_link_is_written_and_stays_what_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let seed = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds/result.json");
    let (real, link, null) =
        (folder.path().join("real"), folder.path().join("link"), folder.path().join("null"));
    std::os::unix::fs::symlink("real", &link).unwrap();
    std::os::unix::fs::symlink("/dev/null", &null).unwrap();
    for output in [&link, &null] {
        hbmark().args(["record", path(&seed), "--output", path(output)]).assert().code(0);
        assert!(output.symlink_metadata().unwrap().file_type().is_symlink());
    }
    assert!(std::fs::read_to_string(&real).unwrap().contains("hbmark"));
    let missing = folder.path().join("none/decision.md");
    let said = format!("error: cannot write {}: its folder takes no new file: No such file", path(&missing));
    refused(&["record", path(&seed), "--output", path(&missing)], &said);
}

#[test]
fn a_negative_number_is_refused_with_the_limit_of_its_flag() {
    let sweep = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/results/serve-sweep.json");
    let sweep = path(&sweep);
    for command in ["capacity", "record"] {
        let on = [command, sweep, "--target-rate", "3"];
        refused(&[&on[..], &["--headroom", "-1"]].concat(), "--headroom -1 is not at least 0 and below 1");
        refused(
            &[&on[..], &["--gpu-hour-price", "-1"]].concat(),
            "--gpu-hour-price -1 is not a number above 0",
        );
    }
    let cost = ["--max-cost-per-million", "1", "--gpu-hour-price", "-1"];
    refused(&[&["explain", sweep][..], &cost].concat(), "`-1` is not a positive number");
    refused(&["speculate", sweep, "--draft-time", "-1"], "`-1`");
}

#[test]
fn what_no_engine_keeps_its_kv_cache_in_is_refused_and_a_plan_of_nothing_says_why() {
    refused(&["run", "--kv-dtype", "int4", "--dry-run"], "[possible values: f32, bf16, f16, int8, fp8]");
    // As vLLM has it.
    hbmark()
        .args(["run", "--kv-dtype", "fp8_e4m3", "--engine", "native", "--device", "cpu", "--dry-run"])
        .assert()
        .code(0);
    refused(
        &["run", "--kv-dtype", "fp8", "--engine", "stock,stock-pool", "--device", "cpu", "--dry-run"],
        "no cell can run: stock, f32: the stock engine does not run a KV cache in fp8",
    );
}

#[test]
fn an_engine_or_a_dtype_named_twice_is_planned_once() {
    let plan = |engines: &str, dtypes: &str| {
        let plan = ["run", "--dry-run", "--device", "cpu", "--engine", engines, "--dtype", dtypes];
        hbmark().args(plan).assert().code(0).get_output().stdout.clone()
    };
    assert_eq!(plan("native", "int8"), plan("native,native", "int8,int8"));
}
