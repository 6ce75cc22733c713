//! The stock engine's logits equal those of Hugging Face transformers, on tiny random models that it saved
//! (`tests/fixtures/README.md` says how).

use std::collections::HashMap;
use std::path::Path;

use candle_core::{Device, Tensor};
use serde::Deserialize;

use hbmark::engine::relative_error;
use hbmark::engine::{
    self, Backend, DeviceChoice, DeviceOptions, EngineError, SequenceId, Session, StepBatch, StockSession,
};
use hbmark::weights::{OpenModel, StoredTensor};
use hbmark_core::model::Dtype;

use crate::models::{fixtures, open, opened, session};
use crate::runs::copy_of;

/// f32 against f32: only the order of sums differs.
const F32_TOLERANCE: f64 = 1e-4;

/// candle multiplies quantised weights with activations that it quantises to 8 bits; the reference keeps activations in f32.
const GGUF_TOLERANCE: f64 = 6e-2;

/// What transformers gave for a fixture.
#[derive(Deserialize)]
pub struct Reference {
    pub cases: Vec<Case>,
}

#[derive(Deserialize)]
pub struct Case {
    pub tokens: Vec<u32>,
    pub logits: Vec<f32>,
    pub greedy: Vec<u32>,
}

pub fn reference(path: &Path) -> Reference {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Prefill logits and greedy continuation against the reference, for each case the engine's limits allow.
pub fn compare(name: &str, session: &mut dyn Session, reference: &Reference, tolerance: f64) -> usize {
    let mut compared = 0;
    for case in &reference.cases {
        let sequence = SequenceId(case.tokens.len() as u64);
        let needed = case.tokens.len() + case.greedy.len();
        if needed > session.capabilities().max_positions {
            continue;
        }
        session.step(&StepBatch::uniform(sequence, std::slice::from_ref(&case.tokens), 0)).unwrap();
        let error = relative_error(&session.logits().unwrap()[0], &case.logits);
        assert!(error <= tolerance, "{name}, {} tokens: logits are {error:.1e} off", case.tokens.len());
        let mut generated = vec![session.greedy_tokens().unwrap()[0]];
        while generated.len() < case.greedy.len() {
            let position = case.tokens.len() + generated.len() - 1;
            let last = generated[generated.len() - 1];
            session.step(&StepBatch::uniform(sequence, &[vec![last]], position)).unwrap();
            generated.push(session.greedy_tokens().unwrap()[0]);
        }
        assert_eq!(generated, case.greedy, "{name}, {} tokens", case.tokens.len());
        session.release(sequence);
        compared += 1;
    }
    compared
}

fn folder_equals_transformers(name: &str, cases: usize) {
    let folder = fixtures().join(name);
    let mut session = open("stock", &folder, Dtype::F32);
    let compared = compare(name, session.as_mut(), &reference(&folder.join("reference.json")), F32_TOLERANCE);
    assert_eq!(compared, cases);
}

macro_rules! equal_transformers {
    ($($test:ident: $folder:literal;)*) => {$(
        #[test]
        fn $test() {
            folder_equals_transformers($folder, 3);
        }
    )*};
}

equal_transformers! {
    llama_with_grouped_queries: "llama-gqa";
    llama_with_a_tied_head: "llama-tied";
    llama_with_a_head_per_query: "llama-mha";
    llama_with_llama3_rope: "llama-llama3-rope";
    llama_with_linear_rope: "llama-linear-rope";
    llama_in_shards: "llama-sharded";
    llama_stored_in_bf16: "llama-bf16";
    mistral_with_its_own_head_dim: "mistral";
    qwen2_with_biases: "qwen2";
    qwen2_with_a_tied_head: "qwen2-tied";
    qwen3_with_qk_norm: "qwen3";
    qwen3_with_a_tied_head: "qwen3-tied";
    olmo2_with_norms_behind_its_blocks: "olmo2";
    qwen2_moe_with_a_shared_expert: "qwen2-moe";
}

/// The fixtures of these two have what candle leaves out; the native engine, which is held against transformers, has both.
#[test]
fn mixtures_give_what_the_native_engine_gives() {
    let shared = r#""hidden_size":48,"num_hidden_layers":3,"num_attention_heads":4,"num_key_value_heads":2,"vocab_size":211,
        "max_position_embeddings":256,"rms_norm_eps":1e-5,"rope_theta":10000.0,"hidden_act":"silu","tie_word_embeddings":false"#;
    for keys in [
        r#""model_type":"mixtral","intermediate_size":40,"num_local_experts":5,"num_experts_per_tok":2,"sliding_window":null"#,
        r#""model_type":"qwen3_moe","intermediate_size":72,"head_dim":16,"num_experts":8,"num_experts_per_tok":3,
            "moe_intermediate_size":24,"norm_topk_prob":true,"decoder_sparse_step":1,"mlp_only_layers":[]"#,
        r#""model_type":"qwen3_moe","intermediate_size":72,"head_dim":16,"num_experts":8,"num_experts_per_tok":3,
            "moe_intermediate_size":24,"norm_topk_prob":false,"decoder_sparse_step":2,"mlp_only_layers":[]"#,
    ] {
        let config = format!("{{{keys},{shared}}}");
        let architecture = hbmark_core::model::parse_config(&config, "config.json".as_ref()).unwrap();
        let model = OpenModel::synthetic("small", architecture, 5);
        let logits = |name: &str| {
            let mut session = session(name, &model, Dtype::F32, DeviceOptions::default());
            let prompt: Vec<u32> = (0..23).map(|i| i * 29 % 211).collect();
            session.step(&StepBatch::uniform(SequenceId(0), &[prompt], 0)).unwrap();
            session.step(&StepBatch::uniform(SequenceId(0), &[vec![7]], 23)).unwrap();
            session.logits().unwrap().swap_remove(0)
        };
        let error = relative_error(&logits("stock"), &logits("native"));
        assert!(error <= F32_TOLERANCE, "{keys}: {error:.1e}");
    }
}

#[test]
fn what_candle_leaves_out_of_mixtures_is_refused() {
    let stock = |name: &str, dtype, device| {
        let model = opened(&fixtures().join(name));
        engine::capabilities("stock", &model, dtype, device).map_err(|error| error.to_string())
    };
    let (cpu, gpu) = (DeviceChoice::Cpu, DeviceChoice::Cuda(0));
    for (name, dtype, device, said) in [
        ("qwen3-moe", Dtype::F32, cpu, "dense layers"),
        ("mixtral", Dtype::F32, cpu, "head_dim 16"),
        ("qwen2-moe", Dtype::Bf16, cpu, "f32"),
        ("qwen2-moe", Dtype::F32, gpu, "routes them on the host"),
        ("olmo2", Dtype::F16, cpu, "f32"),
        ("glm4-moe", Dtype::F32, cpu, "Glm4Moe"),
    ] {
        let error = stock(name, dtype, device).unwrap_err();
        assert!(error.contains(said), "{name}: {error}");
    }
    assert!(stock("qwen2-moe", Dtype::F32, cpu).is_ok());
}

#[test]
fn beyond_a_window_is_refused_and_within_it_is_right() {
    for folder in ["mistral-window", "phi3"].map(|name| fixtures().join(name)) {
        let mut session = open("stock", &folder, Dtype::F32);
        assert_eq!(session.capabilities().max_positions, 8);
        let reference = reference(&folder.join("reference.json"));
        let short = &reference.cases[0];
        let prompt = std::slice::from_ref(&short.tokens);
        session.step(&StepBatch::uniform(SequenceId(0), prompt, 0)).unwrap();
        assert!(relative_error(&session.logits().unwrap()[0], &short.logits) <= F32_TOLERANCE);
        for (position, pair) in short.greedy.windows(2).enumerate().take(6) {
            let step = StepBatch::uniform(SequenceId(0), &[vec![pair[0]]], position + 1);
            session.step(&step).unwrap();
            assert_eq!(session.greedy_tokens().unwrap(), [pair[1]], "{}", folder.display());
        }
        let long = std::slice::from_ref(&reference.cases[1].tokens);
        let error = session.step(&StepBatch::uniform(SequenceId(1), long, 0)).unwrap_err();
        assert!(matches!(error, EngineError::Unsupported { .. }), "{error}");
    }
}

#[test]
fn gguf_follows_its_dequantised_weights() {
    for name in ["llama-q8_0", "qwen3-q8_0"] {
        let mut session = open("stock", &fixtures().join(format!("{name}.gguf")), Dtype::Gguf);
        let reference = reference(&fixtures().join(format!("{name}.reference.json")));
        assert_eq!(compare(name, session.as_mut(), &reference, GGUF_TOLERANCE), 3, "{name}");
    }
}

/// Streamed to the names and the row order of a checkpoint, the file is an f32 model like any other: a wrong order of rows in
/// Q or K would be far outside the tolerance of f32.
#[test]
fn streamed_gguf_weights_are_the_checkpoint_they_were_converted_from() {
    for name in ["llama-q8_0", "qwen3-q8_0"] {
        let path = fixtures().join(format!("{name}.gguf"));
        let model = opened(&path);
        let mut tensors = HashMap::new();
        let mut keep = |name: &str, tensor: StoredTensor| {
            tensors.insert(name.to_owned(), as_candle(&tensor));
            Ok(())
        };
        model.stream(Dtype::Gguf, &mut keep).unwrap();
        let backend = Backend::open(DeviceChoice::Cpu, DeviceOptions::default()).unwrap();
        let inventory = model.architecture.inventory(Dtype::F32);
        let mut session =
            StockSession::new(model.architecture.clone(), tensors, inventory, Dtype::F32, backend).unwrap();
        let reference = reference(&fixtures().join(format!("{name}.reference.json")));
        assert_eq!(compare(name, &mut session, &reference, F32_TOLERANCE), 3, "{name}");
    }
}

fn as_candle(tensor: &StoredTensor) -> Tensor {
    match tensor {
        StoredTensor::Vector(values) => Tensor::from_slice(values, values.len(), &Device::Cpu).unwrap(),
        StoredTensor::Matrix(matrix) => {
            let mut values = vec![0.0; matrix.rows * matrix.columns];
            for (row, out) in values.chunks_mut(matrix.columns).enumerate() {
                matrix.row(row, out);
            }
            Tensor::from_vec(values, (matrix.rows, matrix.columns), &Device::Cpu).unwrap()
        }
    }
}

#[test]
fn a_batch_gives_each_sequence_what_it_gets_alone() {
    let folder = fixtures().join("llama-gqa");
    let reference = reference(&folder.join("reference.json"));
    let tokens = &reference.cases[1].tokens;
    let other: Vec<u32> = tokens.iter().rev().copied().collect();
    let mut session = open("stock", &folder, Dtype::F32);
    let alone: Vec<Vec<f32>> = [tokens, &other]
        .map(|prompt| {
            session.step(&StepBatch::uniform(SequenceId(9), std::slice::from_ref(prompt), 0)).unwrap();
            session.logits().unwrap().swap_remove(0)
        })
        .into();
    session.step(&StepBatch::uniform(SequenceId(0), &[tokens.clone(), other.clone()], 0)).unwrap();
    let together = session.logits().unwrap();
    for (together, alone) in together.iter().zip(&alone) {
        assert!(relative_error(together, alone) <= F32_TOLERANCE);
    }
}

#[test]
fn rope_scaling_that_candle_leaves_out_is_refused() {
    let model = opened(&fixtures().join("llama-yarn"));
    let (device, options) = (DeviceChoice::Cpu, DeviceOptions::default());
    let error = engine::open("stock", &model, Dtype::F32, device, options, &mut |_, _| {}).err().unwrap();
    assert!(error.to_string().contains("yarn rope scaling for Llama"), "{error}");
}

#[test]
fn a_pinned_step_gives_the_same_logits_every_time() {
    let folder = fixtures().join("qwen3");
    let reference = reference(&folder.join("reference.json"));
    let case = &reference.cases[1];
    let mut session = open("stock", &folder, Dtype::F32);
    session.step(&StepBatch::uniform(SequenceId(0), std::slice::from_ref(&case.tokens), 0)).unwrap();
    let step = StepBatch::uniform(SequenceId(0), &[vec![case.greedy[0]]], case.tokens.len());
    session.step(&step).unwrap();
    let first = session.logits().unwrap();
    for _ in 0..3 {
        session.step(&step).unwrap();
        assert_eq!(session.logits().unwrap(), first);
    }
    assert_eq!(session.greedy_tokens().unwrap(), [case.greedy[1]]);
}

#[test]
fn both_spellings_of_a_config_mean_the_same() {
    let mut compared = 0;
    for entry in std::fs::read_dir(fixtures()).unwrap() {
        let old = entry.unwrap().path().join("config.v4.json");
        if old.exists() {
            let new = old.with_file_name("config.json");
            let (mut old, mut new) = (
                hbmark_core::model::read_config(&old).unwrap(),
                hbmark_core::model::read_config(&new).unwrap(),
            );
            // The two generations write the end of sequence differently; no step reads it.
            old.eos_tokens.clear();
            new.eos_tokens.clear();
            assert_eq!(old, new);
            compared += 1;
        }
    }
    assert_eq!(compared, 22);
}

#[test]
fn a_tokenizer_of_another_vocabulary_is_refused_and_both_sizes_named() {
    let copy = copy_of("llama-tied");
    let at = |name: &str| copy.path().join(name);
    std::fs::rename(at("tokenizer-wrong-vocab.json"), at("tokenizer.json")).unwrap();
    let error = hbmark::weights::open(copy.path().to_str().unwrap(), None, 0).unwrap_err().to_string();
    assert!(error.contains("262") && error.contains("199"), "{error}");
}

#[test]
fn the_tensors_of_a_folder_weigh_what_they_do_on_disk() {
    for name in ["llama-gqa", "llama-bf16", "llama-sharded", "qwen2-tied"] {
        let folder = fixtures().join(name);
        let on_disk: u64 = std::fs::read_dir(&folder)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|e| e == "safetensors"))
            .map(|path| {
                let bytes = std::fs::read(path).unwrap();
                let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
                tensors.tensors().iter().map(|(_, view)| view.data().len() as u64).sum::<u64>()
            })
            .sum();
        let dtype = if name == "llama-bf16" { Dtype::Bf16 } else { Dtype::F32 };
        let session = open("stock", &folder, dtype);
        assert_eq!(session.inventory().total_bytes().0, on_disk, "{name}");
    }
}
