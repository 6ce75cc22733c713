//! GGUF files in mixtures of ggml's blocks of 256, as `Q4_K_M` is one: run as stored, and counted as stored.

use std::collections::HashMap;
use std::io::Cursor;
use std::path::PathBuf;

use candle_core::quantized::{GgmlDType, QTensor, gguf_file};
use candle_core::{Device, Tensor};

use hbmark::engine::native::operations::{FusedLayout, LinearPart, Storage};
use hbmark::engine::native::{self, DEFAULT_BLOCK_SIZE, NativeSession};
use hbmark::engine::native::{CpuOperations, InstructionSet};
use hbmark::engine::relative_error;
use hbmark::engine::{SequenceId, SequenceStep, Session, StepBatch};
use hbmark::measure::quality::tolerance;
use hbmark::weights::stored_matrix::SuperBlock;
use hbmark::weights::{self, Packing, StoredMatrix, StoredTensor};
use hbmark_core::ledger::{Ledger, StepShape};
use hbmark_core::model::{Dtype, Role};

use crate::models::{logits_of, opened, session, threads};

const LAYERS: usize = 4;
const HIDDEN: usize = 512;
const FFN: usize = 768;
const VOCAB: usize = 1024;
const HEADS: usize = 8;
const KV_HEADS: usize = 4;

/// `Q4_K_M` of a model with a head of its own.
///
/// *Source*: `llama_tensor_get_type_impl` of llama.cpp: the head in q6_K; V and down in q6_K in the first and last eighth of the layers and every
/// third between, all else in q4_K.
fn q4_k_m(name: &str) -> GgmlDType {
    let layer: Option<usize> =
        name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse().ok());
    let eighth = LAYERS / 8;
    let more = layer.is_some_and(|i| !(eighth..7 * LAYERS / 8).contains(&i) || (i - eighth) % 3 == 2);
    match name {
        "output.weight" => GgmlDType::Q6K,
        _ if name.ends_with("norm.weight") => GgmlDType::F32,
        _ if more && (name.contains("attn_v") || name.contains("ffn_down")) => GgmlDType::Q6K,
        _ => GgmlDType::Q4K,
    }
}

/// The same without one: the table is the head.
fn q4_k_m_tied(name: &str) -> GgmlDType {
    if name == "token_embd.weight" { GgmlDType::Q6K } else { q4_k_m(name) }
}

/// `Q5_K_M`: five bits where the other has four.
fn q5_k_m(name: &str) -> GgmlDType {
    match q4_k_m(name) {
        GgmlDType::Q4K => GgmlDType::Q5K,
        other => other,
    }
}

/// Gate and up in formats of their own, as no program of ggml's mixes them, and K in one of the smaller blocks.
fn uneven(name: &str) -> GgmlDType {
    match name {
        _ if name.contains("ffn_up") => GgmlDType::Q6K,
        _ if name.contains("attn_k") => GgmlDType::Q4_0,
        _ => q4_k_m(name),
    }
}

type Mixture = fn(&str) -> GgmlDType;
const MIXTURES: [(&str, Mixture, bool); 4] = [
    ("Q4_K_M", q4_k_m, false),
    ("Q4_K_M tied", q4_k_m_tied, true),
    ("Q5_K_M", q5_k_m, false),
    ("uneven", uneven, false),
];

/// Noise of the size of a trained layer's weights.
fn noise(index: usize, shape: &[usize], mean: f32, deviation: f32) -> Tensor {
    let mut values = vec![0.0; shape.iter().product()];
    native::random_kv::fill(11, index, 0, false, &mut values);
    for value in &mut values {
        *value = value.mul_add(deviation, mean);
    }
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// A llama in a file that candle's writer and quantisers made.
fn written(mixture: Mixture, tied: bool) -> (tempfile::TempDir, PathBuf) {
    let kv = HIDDEN / HEADS * KV_HEADS;
    let mut shapes = vec![
        ("token_embd.weight".to_owned(), vec![VOCAB, HIDDEN]),
        ("output_norm.weight".to_owned(), vec![HIDDEN]),
    ];
    if !tied {
        shapes.push(("output.weight".to_owned(), vec![VOCAB, HIDDEN]));
    }
    for layer in 0..LAYERS {
        for (name, shape) in [
            ("attn_norm", vec![HIDDEN]),
            ("attn_q", vec![HIDDEN, HIDDEN]),
            ("attn_k", vec![kv, HIDDEN]),
            ("attn_v", vec![kv, HIDDEN]),
            ("attn_output", vec![HIDDEN, HIDDEN]),
            ("ffn_norm", vec![HIDDEN]),
            ("ffn_gate", vec![FFN, HIDDEN]),
            ("ffn_up", vec![FFN, HIDDEN]),
            ("ffn_down", vec![HIDDEN, FFN]),
        ] {
            shapes.push((format!("blk.{layer}.{name}.weight"), shape));
        }
    }
    let tensors: Vec<(String, QTensor)> = shapes
        .into_iter()
        .enumerate()
        .map(|(index, (name, shape))| {
            let values = match shape.as_slice() {
                [_] => noise(index, &shape, 1.0, 0.1),
                [.., columns] => noise(index, &shape, 0.0, 1.0 / (*columns as f32).sqrt()),
                [] => unreachable!("vectors and matrices"),
            };
            let tensor = QTensor::quantize(&values, mixture(&name)).unwrap();
            (name, tensor)
        })
        .collect();
    let count = |value: usize| gguf_file::Value::U32(u32::try_from(value).unwrap());
    let metadata = [
        ("general.architecture", gguf_file::Value::String("llama".to_owned())),
        ("llama.embedding_length", count(HIDDEN)),
        ("llama.block_count", count(LAYERS)),
        ("llama.attention.head_count", count(HEADS)),
        ("llama.attention.head_count_kv", count(KV_HEADS)),
        ("llama.feed_forward_length", count(FFN)),
        ("llama.context_length", count(512)),
        ("llama.rope.dimension_count", count(HIDDEN / HEADS)),
        ("llama.attention.layer_norm_rms_epsilon", gguf_file::Value::F32(1e-5)),
    ];
    let metadata: Vec<_> = metadata.iter().map(|(key, value)| (*key, value)).collect();
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let mut bytes = Cursor::new(Vec::new());
    gguf_file::write(&mut bytes, &metadata, &tensors).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, bytes.into_inner()).unwrap();
    (folder, path)
}

fn tokens(seed: u32, count: u32) -> Vec<u32> {
    (0..count).map(|i| (i * 37 + seed * 101 + 3) % 1000).collect()
}

#[test]
fn a_mixture_gives_what_candle_gives_and_what_its_dequantised_weights_give() {
    for (name, mixture, tied) in MIXTURES {
        let (_folder, path) = written(mixture, tied);
        let model = opened(&path);
        let mut native = session("native", &model, Dtype::Gguf, threads(2));
        let mut stock = session("stock", &model, Dtype::Gguf, threads(2));
        let two = threads(2);
        let mut dequantised = native::open_dequantised(&model, Dtype::Gguf, two, &mut |_| {}).unwrap();
        for (sequence, count) in [(0, 1), (1, 5), (2, 33)] {
            let prompt = tokens(u32::try_from(sequence).unwrap(), count);
            let found = logits_of(native.as_mut(), sequence, &prompt, 0);
            let reference = logits_of(&mut dequantised, sequence, &prompt, 0);
            let error = relative_error(&found, &reference);
            assert!(
                error > 0.0 && error <= tolerance(Dtype::Gguf),
                "{name}: {error:.1e} off its own weights"
            );
            let candle = logits_of(stock.as_mut(), sequence, &prompt, 0);
            // Both round activations to 8 bits, candle in groups of 256.
            let error = relative_error(&found, &candle);
            assert!(error <= tolerance(Dtype::Gguf), "{name}: {error:.1e} off candle");
        }
    }
}

#[test]
fn blocks_come_from_a_file_as_they_are() {
    for (name, mixture, tied) in MIXTURES {
        let (_folder, path) = written(mixture, tied);
        let model = opened(&path);
        let mut storages = HashMap::new();
        let streamed = model
            .stream(Dtype::Gguf, &mut |name, tensor| {
                if let StoredTensor::Matrix(matrix) = &tensor {
                    storages.insert(name.to_owned(), (matrix.storage(), matrix.bytes()));
                }
                Ok(())
            })
            .unwrap();
        let in_file = model.inventory(Dtype::Gguf);
        assert_eq!(streamed.total_bytes(), in_file.total_bytes(), "{name}");
        assert_eq!(storages["model.layers.2.mlp.down_proj.weight"].0, "q6_k", "{name}");
        let table = &storages["model.embed_tokens.weight"];
        let wanted = mixture("token_embd.weight");
        assert_eq!(table.1.0, (VOCAB * HIDDEN / wanted.block_size() * wanted.type_size()) as u64, "{name}");
    }
}

#[test]
fn a_step_moves_the_bytes_of_the_file_and_a_prediction_counts_them_to_the_byte() {
    for (name, mixture, tied) in MIXTURES {
        let (_folder, path) = written(mixture, tied);
        let shape = weights::open_shape(path.to_str().unwrap(), None).unwrap();
        let inventory = shape.inventory(Dtype::Gguf);
        let predicted = Ledger::new(&shape.architecture, &inventory, Dtype::Bf16);
        let cost = predicted.step(StepShape::decode(1, 100)).bytes;
        // Everything once, and one row of a table that is not the head.
        let of = |role| inventory.bytes_of(role).0;
        let table = of(Role::Embedding) / if tied { 1 } else { VOCAB as u64 };
        let read = of(Role::Matrix) + of(Role::Head) + of(Role::Norm) + table;
        assert_eq!(cost.weights.0 + cost.other.0, read, "{name}");

        let mut session = session("native", &opened(&path), Dtype::Gguf, threads(2));
        let counted = Ledger::new(session.architecture(), session.inventory(), session.kv_dtype());
        let ideal = counted.step(StepShape::decode(1, 100)).bytes;
        assert_eq!((ideal.weights, ideal.other), (cost.weights, cost.other), "{name}");
        session.synthetic_kv().unwrap().fill_kv(SequenceId(0), 100, 1).unwrap();
        session.step(&StepBatch::uniform(SequenceId(0), &[vec![1]], 100)).unwrap();
        let moved = session.bytes_moved().unwrap().as_f64();
        let off = moved / ideal.ideal().as_f64() - 1.0;
        assert!(off.abs() <= 5e-3, "{name}: moved {moved}, {:+.2} % from the ideal", 100.0 * off);
    }
}

#[test]
fn results_depend_neither_on_threads_nor_on_the_other_rows() {
    for (name, mixture, tied) in MIXTURES {
        let (_folder, path) = written(mixture, tied);
        let model = opened(&path);
        let on = |threads| {
            let operations = CpuOperations::new(threads).unwrap();
            NativeSession::load(operations, &model, Dtype::Gguf, DEFAULT_BLOCK_SIZE, &mut |_| {}).unwrap()
        };
        let prompts = [tokens(1, 5), tokens(2, 17), tokens(3, 1), tokens(4, 2)];
        let mut one = on(1);
        let alone: Vec<Vec<f32>> =
            (0..).zip(&prompts).map(|(id, prompt)| logits_of(&mut one, id, prompt, 0)).collect();
        for threads in [1, 2, 3] {
            let mut session = on(threads);
            let sequences = (0..).zip(&prompts).map(|(id, prompt)| SequenceStep {
                sequence: SequenceId(id),
                tokens: prompt.clone(),
                start_position: 0,
                draft_tokens: 0,
                block_table: Vec::new(),
            });
            session.step(&StepBatch { sequences: sequences.collect() }).unwrap();
            assert_eq!(session.logits().unwrap(), alone, "{name}, {threads} threads");
        }
    }
}

#[test]
fn rows_that_are_no_whole_blocks_are_refused_by_name() {
    for format in SuperBlock::ALL {
        let mut operations = CpuOperations::with_set(1, InstructionSet::Portable).unwrap();
        let matrix = StoredMatrix::from_f32_rows(16, 100, &[0.5; 1600], Packing::Super(format));
        let part = LinearPart { matrix, bias: None };
        let error = operations.linear(vec![part], FusedLayout::Stacked).unwrap_err().to_string();
        assert!(error.contains(&format!("{} in rows of 100", format.name())), "{error}");
    }
    let model = weights::open("SmolLM2-135M", None, 1).unwrap();
    let error = model.stream(Dtype::Q4K, &mut |name, _| panic!("{name} came")).unwrap_err().to_string();
    assert!(error.contains("has rows of 576, which the blocks of 256 of q4_k do not divide"), "{error}");
    let error = model.storage(Some(Dtype::Q6K)).unwrap_err().to_string();
    assert!(error.contains("rows of 576") && error.ends_with("choose q8_0 or q4_0"), "{error}");
}
