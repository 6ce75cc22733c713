//! The native engine gives what Hugging Face transformers and the stock engine give, however a step is cut.

use hbmark::engine::relative_error;
use hbmark::engine::{self, DeviceChoice, SequenceId, SequenceStep, Session, StepBatch};
use hbmark::weights::Adapter;
use hbmark_core::ledger::Ledger;
use hbmark_core::model::{Dtype, Target};

use crate::logits::{compare, reference};
use crate::models::{self, fixtures, open, opened, session};
use crate::runs::{self, changed};

/// f32 against f32: only the order of sums differs.
const F32_TOLERANCE: f64 = 1e-4;

#[test]
fn every_fixture_model_equals_transformers() {
    let mut folders = 0;
    for entry in std::fs::read_dir(fixtures()).unwrap() {
        let folder = entry.unwrap().path();
        if !folder.is_dir() {
            continue;
        }
        let reference = reference(&folder.join("reference.json"));
        let mut session = open("native", &folder, Dtype::F32);
        let name = folder.display().to_string();
        let compared = compare(&name, session.as_mut(), &reference, F32_TOLERANCE);
        assert_eq!(compared, reference.cases.len(), "{name}");
        folders += 1;
    }
    assert_eq!(folders, 31);
}

/// The logits of one prompt, cut into steps of the given lengths.
pub fn in_steps(session: &mut dyn Session, sequence: u64, tokens: &[u32], lengths: &[usize]) -> Vec<f32> {
    let mut start = 0;
    for length in lengths {
        let chunk = tokens[start..start + length].to_vec();
        session.step(&StepBatch::uniform(SequenceId(sequence), &[chunk], start)).unwrap();
        start += length;
    }
    assert_eq!(start, tokens.len());
    let logits = session.logits().unwrap().swap_remove(0);
    session.release(SequenceId(sequence));
    logits
}

/// The same logits, to the bit. Over latents in f32 up to rounding: which form their attention takes depends on the step.
fn assert_same(found: &[f32], wanted: &[f32], model: &str, what: &str) {
    if model.starts_with("deepseek") {
        let error = relative_error(found, wanted);
        assert!(error <= 1e-5, "{model}, {what}: {error:.1e}");
    } else {
        assert_eq!(found, wanted, "{model}, {what}");
    }
}

#[test]
fn a_ragged_step_equals_its_sequences_one_by_one() {
    const DTYPES: [Dtype; 10] = [
        Dtype::F32,
        Dtype::Bf16,
        Dtype::Q8_0,
        Dtype::Q4_0,
        Dtype::Mxfp8,
        Dtype::Mxfp4,
        Dtype::Nvfp4,
        Dtype::Int8,
        Dtype::Int4,
        Dtype::F16,
    ];
    let models = [
        "qwen2",
        "qwen3-moe",
        "mixtral",
        "qwen2-moe",
        "glm4-moe",
        "minimax-m2",
        "gpt-oss",
        "deepseek-v3",
        "deepseek-v2",
    ];
    // Of coarser weights the inputs of products are rounded, over latents apart in its two forms.
    let of_model = |name: &&str, dtype: Dtype| !name.starts_with("deepseek") || dtype == Dtype::F32;
    let cases = models.iter().flat_map(|name| DTYPES.map(|dtype| (name, dtype)));
    for (name, dtype) in cases.filter(|(name, dtype)| of_model(name, *dtype)) {
        let mut session = open("native", &fixtures().join(name), dtype);
        let tokens =
            |seed: u32, count: u32| -> Vec<u32> { (0..count).map(|i| (i * 11 + seed) % 190).collect() };
        let sequences: Vec<(u64, Vec<u32>)> =
            vec![(1, tokens(1, 5)), (2, tokens(2, 17)), (3, tokens(3, 33)), (4, tokens(4, 1))];
        let mut alone = Vec::new();
        for (id, tokens) in &sequences {
            session.step(&StepBatch::uniform(SequenceId(100 + id), std::slice::from_ref(tokens), 0)).unwrap();
            session.step(&StepBatch::uniform(SequenceId(100 + id), &[vec![7]], tokens.len())).unwrap();
            alone.push(session.logits().unwrap().swap_remove(0));
        }
        // Two are prefilled together, one of them in part; then one decodes beside the prefill of the others and of the rest.
        let step = |id: u64, tokens: &[u32], start_position| SequenceStep {
            sequence: SequenceId(id),
            tokens: tokens.to_vec(),
            start_position,
            draft_tokens: 0,
            block_table: Vec::new(),
        };
        let mut run = |steps: Vec<SequenceStep>| {
            session.step(&StepBatch { sequences: steps }).unwrap();
            session.logits().unwrap()
        };
        let (begun, rest) = sequences[1].1.split_at(9);
        run(vec![step(1, &sequences[0].1, 0), step(2, begun, 0)]);
        let mixed = run(vec![
            step(1, &[7], 5),
            step(2, rest, 9),
            step(3, &sequences[2].1, 0),
            step(4, &sequences[3].1, 0),
        ]);
        let last = run(vec![step(4, &[7], 1), step(3, &[7], 33), step(2, &[7], 17)]);
        let what = dtype.to_string();
        for (found, wanted) in [(&mixed[0], 0), (&last[0], 3), (&last[1], 2), (&last[2], 1)] {
            assert_same(found, &alone[wanted], name, &what);
        }
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    for name in
        ["llama-llama3-rope", "qwen3-moe", "mixtral", "qwen2-moe", "glm4-moe", "gpt-oss", "deepseek-v3"]
    {
        let model = opened(&fixtures().join(name));
        let tokens: Vec<u32> = (0..40).map(|i| (i * 5 + 1) % 180).collect();
        let with = |threads| {
            let mut session = session("native", &model, Dtype::Bf16, models::threads(threads));
            in_steps(session.as_mut(), 1, &tokens, &[39, 1])
        };
        let one = with(1);
        for threads in [2, 3, 5] {
            assert_eq!(one, with(threads), "{name}, {threads}");
        }
    }
}

#[test]
fn mixtures_that_lack_or_have_other_experts_are_refused_with_the_tensor() {
    for (name, key, value, said) in [
        ("qwen3-moe", "num_local_experts", 9, "layers.0.mlp.gate.weight"),
        ("qwen3-moe", "num_local_experts", 7, "layers.0.mlp.gate.weight"),
        ("qwen3-moe", "num_experts_per_tok", 9, "`num_experts_per_tok`"),
        ("qwen3-moe", "moe_intermediate_size", 25, "layers.0.mlp.experts.0.gate_proj.weight"),
        ("qwen2-moe", "shared_expert_intermediate_size", 43, "mlp.shared_expert."),
        ("qwen2-moe", "decoder_sparse_step", 1, "layers.0.mlp.gate.weight"),
        ("mixtral", "num_local_experts", 6, "block_sparse_moe"),
        ("glm4-moe", "first_k_dense_replace", 2, "layers.1.mlp.gate_proj.weight"),
        ("glm4-moe", "n_shared_experts", 2, "layers.1.mlp.shared_experts."),
        ("glm4-moe", "n_group", 3, "`n_group`"),
        ("minimax-m2", "num_local_experts", 5, "layers.0.block_sparse_moe."),
        ("deepseek-v3", "kv_lora_rank", 16, "layers.0.self_attn.kv_a_proj_with_mqa."),
        ("deepseek-v3", "v_head_dim", 16, "layers.0.self_attn.kv_b_proj.weight"),
        ("deepseek-v3", "q_lora_rank", 32, "layers.0.self_attn.q_a_proj."),
        ("deepseek-v3", "n_group", 3, "`n_group`"),
        ("deepseek-v2", "qk_nope_head_dim", 12, "layers.0.self_attn.q_proj.weight"),
        ("deepseek-v2", "qk_rope_head_dim", 7, "`qk_rope_head_dim`"),
        ("deepseek-v2-groups", "n_group", 5, "`n_group`"),
        ("deepseek-v2-groups", "topk_group", 5, "`topk_group`"),
        ("gpt-oss", "num_local_experts", 5, "layers.0.mlp.router."),
        ("gpt-oss", "intermediate_size", 25, "layers.0.mlp.experts.gate_up_proj"),
    ] {
        let folder = changed(name, |config| config[key] = value.into());
        let error = hbmark::weights::open(folder.path().to_str().unwrap(), None, 0).unwrap_err().to_string();
        assert!(error.contains(said), "{name}, {key} {value}: {error}");
    }
    // One expert under another number.
    let folder = changed("qwen3-moe", |_| {});
    let path = folder.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let name = b"layers.2.mlp.experts.7.up_proj";
    let at = bytes.windows(name.len()).position(|window| window == name).unwrap();
    bytes[at + name.len() - "7.up_proj".len()] = b'9';
    std::fs::write(&path, bytes).unwrap();
    let error = hbmark::weights::open(folder.path().to_str().unwrap(), None, 0).unwrap_err().to_string();
    assert!(error.contains("layers.2.mlp.experts.7.up_proj.weight"), "{error}");
}

#[test]
fn mixtures_that_the_engine_lacks_are_refused_by_name() {
    for (name, said) in [
        ("DeepSeek-V3.2", "latent, best 2048"),
        ("Qwen3.5-35B-A3B", "Qwen3_5"),
        ("Llama-4-Scout-17B-16E", "Llama4"),
    ] {
        let model = hbmark::weights::open(name, None, 0).unwrap();
        let error = engine::capabilities("native", &model, Dtype::Bf16, DeviceChoice::Cpu).unwrap_err();
        assert!(error.to_string().contains(said), "{name}: {error}");
    }
    // In their own storage, and in another shapes alone.
    for (name, dtype) in
        [("gpt-oss-20b", Dtype::Mxfp4), ("MiniMax-M2.5", Dtype::Fp8), ("DeepSeek-V3", Dtype::Fp8)]
    {
        let model = hbmark::weights::open(name, None, 0).unwrap();
        assert!(engine::capabilities("native", &model, dtype, DeviceChoice::Cpu).is_ok(), "{name}");
    }
    for name in
        ["Qwen3-30B-A3B", "Mixtral-8x7B", "GLM-4.7", "gpt-oss-20b", "MiniMax-M2.5", "DeepSeek-V2-Lite"]
    {
        let model = hbmark::weights::open(name, None, 0).unwrap();
        assert!(engine::capabilities("native", &model, Dtype::Bf16, DeviceChoice::Cpu).is_ok());
        assert!(engine::capabilities("native", &model, Dtype::Bf16, DeviceChoice::Cuda(0)).is_ok());
        assert!(engine::capabilities("stock", &model, Dtype::Bf16, DeviceChoice::Cpu).is_err());
    }
}

#[test]
fn adapters_of_experts_are_refused_and_those_of_attention_add() {
    let model = opened(&fixtures().join("qwen3-moe"));
    let mut session = open("native", &fixtures().join("qwen3-moe"), Dtype::F32);
    let of = |targets: &[Target]| Adapter::synthetic(&model.architecture, "x", 4, targets, 1);
    let lora = session.lora().unwrap();
    let error = lora.load_adapter(&of(&[Target::QProj, Target::DownProj])).unwrap_err().to_string();
    assert!(error.contains("the adapter x of a layer with experts"), "{error}");
    let id = lora.load_adapter(&of(&[Target::QProj, Target::OProj])).unwrap().0;
    lora.set_adapter(SequenceId(1), Some(id)).unwrap();
    session.step(&StepBatch::uniform(SequenceId(0), &[vec![5, 6], vec![5, 6]], 0)).unwrap();
    let logits = session.logits().unwrap();
    assert_ne!(logits[0], logits[1]);
}

#[test]
fn a_decode_over_shared_blocks_equals_one_over_its_own() {
    let mut session = open("native", &fixtures().join("llama-gqa"), Dtype::F32);
    let tokens: Vec<u32> = (0..64).collect();
    let step = |tokens: &[u32], start_position, block_table: &[u32]| SequenceStep {
        sequence: SequenceId(0),
        tokens: tokens.to_vec(),
        start_position,
        draft_tokens: 0,
        block_table: block_table.to_vec(),
    };
    let mut run = |steps: Vec<SequenceStep>| {
        session.step(&StepBatch { sequences: steps }).unwrap();
        session.logits().unwrap()
    };
    // Block 5 holds the first 64 positions; two sequences go on from it in blocks of their own.
    run(vec![step(&tokens, 0, &[5])]);
    let both = run(vec![step(&[9], 64, &[5, 2]), step(&[11], 64, &[5, 7])]);
    run(vec![step(&tokens, 0, &[0])]);
    let own = run(vec![step(&[11], 64, &[0, 1])]);
    assert_eq!(both[1], own[0]);
    assert_ne!(both[0], own[0]);
    let short = StepBatch { sequences: vec![step(&[1], 64, &[5])] };
    let error = session.step(&short).unwrap_err().to_string();
    assert!(error.contains("a block table of 1 for 65 positions"), "{error}");
}

/// That they are near the ideal ones is a check of `hbmark verify`, which its own tests run.
#[test]
fn bytes_of_a_step_are_those_of_its_operations() {
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::Q8_0] {
        let mut session = open("native", &fixtures().join("qwen2-moe"), dtype);
        session.synthetic_kv().unwrap().fill_kv(SequenceId(0), 40, 1).unwrap();
        let step = StepBatch::uniform(SequenceId(0), &[vec![1]], 40);
        session.step(&step).unwrap();
        let counted = session.bytes_moved().unwrap();
        let operations = session.profiler().unwrap().profile(&step).unwrap();
        assert_eq!(operations.iter().map(|operation| operation.bytes.0).sum::<u64>(), counted.0, "{dtype}");
    }
}

#[test]
fn quantised_files_give_what_their_dequantised_weights_give() {
    let gguf = ["llama-q8_0", "qwen3-q8_0"].map(|name| {
        (fixtures().join(format!("{name}.gguf")), fixtures().join(format!("{name}.reference.json")))
    });
    let folders = std::fs::read_dir(fixtures().parent().unwrap().join("quantised")).unwrap();
    let folders = folders.map(|folder| folder.unwrap().path());
    let all: Vec<_> =
        folders.map(|folder| (folder.clone(), folder.join("reference.json"))).chain(gguf).collect();
    assert_eq!(all.len(), 15 + 2);
    for (model, reference_file) in all {
        let reference = reference(&reference_file);
        let dtype = opened(&model).stored_dtype();
        let mut session = open("native", &model, dtype);
        for case in &reference.cases {
            let sequence = SequenceId(case.tokens.len() as u64);
            session.step(&StepBatch::uniform(sequence, std::slice::from_ref(&case.tokens), 0)).unwrap();
            let error = relative_error(&session.logits().unwrap()[0], &case.logits);
            assert!(error <= 6e-2, "{}: {error:.1e} off", model.display());
            assert_eq!(session.greedy_tokens().unwrap()[0], case.greedy[0], "{}", model.display());
        }
    }
}

#[test]
fn experts_in_several_formats_are_refused_before_anything_is_loaded() {
    let folder = fixtures().parent().unwrap().join("quantised/qwen3-moe-fp8-block");
    let text = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    let kept = &mut config["quantization_config"]["modules_to_not_convert"];
    kept.as_array_mut().unwrap().push(serde_json::json!("model.layers.1.mlp.experts.2"));
    let architecture = hbmark_core::model::parse_config(&config.to_string(), &folder).unwrap();
    let refused = engine::native::check(&architecture, Dtype::Fp8).unwrap_err().to_string();
    assert!(refused.contains("several formats"), "{refused}");
}

/// A run of the fixtures with experts, as JSON.
fn run_of_experts(more: &[&str]) -> serde_json::Value {
    let model = runs::fixture("qwen2-moe");
    let mut command = runs::hbmark();
    command.args(["run", "--smoke", "--engine", "native", "--device", "cpu", "--threads", "2", "--show-ops"]);
    command.args(["--batch", "1,6", "--context", "16", "--format", "json", "--model", runs::path(&model)]);
    let output = command.args(more).output().unwrap();
    assert!(output.status.success(), "{}", runs::stderr(&output));
    runs::report(&output)
}

#[test]
fn a_measured_cell_has_the_experts_that_its_steps_met_and_their_bytes() {
    let model = opened(&runs::fixture("qwen2-moe"));
    for (more, turns) in [
        (&["--dtype", "f32"][..], false),
        (&["--dtype", "q8_0"], false),
        (&["--dtype", "f32", "--expert-routing", "balanced"], true),
    ] {
        let report = run_of_experts(more);
        let routing = &report["protocol"]["expert_routing"];
        assert_eq!(routing.as_str(), turns.then_some("balanced"));
        let cells = report["cells"].as_array().unwrap();
        assert_eq!(cells.len(), 4);
        for cell in cells {
            let id = cell["id"].as_str().unwrap();
            assert_eq!(cell["status"], "smoke", "{id}: {}", cell["reason"]);
            let met = cell["distinct_experts"].as_f64().unwrap();
            assert_eq!(cell["blocks"][0]["experts_met"].as_f64(), Some(met), "{id}");
            let batch = cell["batch"].as_u64().unwrap();
            let tokens = if id.starts_with("prefill") { 16 * batch } else { batch };
            assert!((4.0..=8.0).contains(&met), "{id}: {met} of 8 experts, four a token");
            // Turns meet the most: all eight from the second token on.
            let most = if tokens == 1 { 4.0 } else { 8.0 };
            assert!(!turns || (met - most).abs() < 1e-9, "{id}: {met}");
            let dtype: Dtype = serde_json::from_value(cell["dtype"].clone()).unwrap();
            let kv = serde_json::from_value(cell["kv_dtype"].clone()).unwrap();
            let ledger = Ledger::new(&model.architecture, &model.inventory(dtype), kv);
            let each = ledger.expert_bytes().unwrap();
            let all = ledger.prefill(64, 64);
            // Every expert was met there; what a cell lacks of it are the experts that it did not meet.
            let expected = all.bytes.weights.as_f64() - (8.0 - met) * each.as_f64();
            let found = cell["bytes"]["weights"].as_f64().unwrap();
            assert!((found / expected - 1.0).abs() < 0.05, "{id}, {dtype}: {found} for {expected}");
            let operations: Vec<&str> = cell["operations"]
                .as_array()
                .unwrap()
                .iter()
                .map(|o| o["operation"].as_str().unwrap())
                .collect();
            for operation in ["gate_up", "down", "router", "expert_gate_up", "expert_down"] {
                assert!(operations.contains(&operation), "{id}: {operations:?}");
            }
        }
    }
}

#[test]
fn a_script_for_experts_is_refused_where_there_are_none() {
    let model = runs::fixture("qwen3");
    for command in ["run", "predict"] {
        let given = [command, "--model", runs::path(&model), "--expert-routing"];
        let output = |routing: &str| runs::hbmark().args(given).arg(routing).output().unwrap();
        runs::refused(
            &output("uniform"),
            &["--expert-routing", "qwen3", "has no experts; leave the flag out"],
        );
        runs::refused(&output("even"), &["zipf:S"]);
    }
}
