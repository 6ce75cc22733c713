//! Mixtures of experts in GGUF files: what the checkpoint they were made of gives, run and counted as stored.

use std::collections::HashMap;
use std::io::Cursor;
use std::path::{Path, PathBuf};

use candle_core::quantized::{GgmlDType, QTensor, gguf_file};
use candle_core::{Device, Tensor};

use hbmark::engine::native::{self, NativeSession};
use hbmark::engine::{self, DeviceChoice, DeviceOptions, SequenceId, Session, StepBatch};
use hbmark::measure::quality::{relative_error, tolerance};
use hbmark::weights::{self, OpenModel};
use hbmark_core::ledger::{Ledger, StepShape};
use hbmark_core::model::gguf::{expected_tensors, file_tensor};
use hbmark_core::model::{Architecture, Dtype, Family, Role};

/// Folders with checkpoints of transformers, and what their architecture is called in a file.
const CHECKPOINTS: [(&str, &str); 2] = [("qwen3-moe", "qwen3moe"), ("mixtral", "llama")];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(name)
}

fn opened(path: &Path) -> OpenModel {
    weights::open(path.to_str().unwrap(), None, 0).unwrap()
}

fn session(model: &OpenModel, dtype: Dtype) -> Box<dyn Session> {
    // Not what goes with the weights: those are in other dtypes.
    let options = DeviceOptions { threads: Some(2), kv_dtype: Some(Dtype::F32), ..DeviceOptions::default() };
    engine::open("native", model, dtype, DeviceChoice::Cpu, options, &mut |_, _| {}).unwrap()
}

fn logits_of(session: &mut dyn Session, sequence: u64, tokens: &[u32]) -> Vec<f32> {
    session.step(&StepBatch::uniform(SequenceId(sequence), &[tokens.to_vec()], 0)).unwrap();
    session.logits().unwrap().swap_remove(0)
}

fn prompts(vocabulary: usize) -> impl Iterator<Item = (u64, Vec<u32>)> {
    let token = move |i: u32| (i * 37 + 3) % u32::try_from(vocabulary).unwrap();
    (0..).zip([1, 5, 33]).map(move |(sequence, count)| (sequence, (0..count).map(token).collect()))
}

/// A file of these dimensions whose tensors are given by their names in a checkpoint, as llama.cpp's converter writes it.
///
/// *Source* of the order of rows: `LlamaModel.permute` of `convert_hf_to_gguf.py`.
fn written(
    name: &str,
    of: &Architecture,
    tensors: &HashMap<String, Tensor>,
    dtype: impl Fn(&str) -> GgmlDType,
) -> (tempfile::TempDir, PathBuf) {
    let mut parts: HashMap<String, Vec<(usize, Tensor)>> = HashMap::new();
    for (checkpoint, tensor) in tensors {
        let file = file_tensor(checkpoint).unwrap_or_else(|| panic!("no file has {checkpoint}"));
        let rotated = checkpoint.contains(".q_proj.") || checkpoint.contains(".k_proj.");
        let tensor = if of.family == Family::Mixtral && rotated {
            let (rows, columns) = tensor.dims2().unwrap();
            let heads = tensor.reshape((rows / of.head_dim, 2, of.head_dim / 2, columns)).unwrap();
            heads.transpose(1, 2).unwrap().reshape((rows, columns)).unwrap()
        } else {
            tensor.clone()
        };
        parts.entry(file.name).or_default().push((file.expert.unwrap_or(0), tensor));
    }
    let stacked = parts.into_iter().map(|(file, mut experts)| {
        experts.sort_by_key(|(expert, _)| *expert);
        let all: Vec<Tensor> = experts.into_iter().map(|(_, tensor)| tensor).collect();
        let whole = if file.contains("_exps.") {
            Tensor::stack(&all, 0).unwrap()
        } else {
            all[0].contiguous().unwrap()
        };
        let quantised = QTensor::quantize(&whole, dtype(&file)).unwrap();
        (file, quantised)
    });
    let stacked: Vec<(String, QTensor)> = stacked.collect();

    let count = |value: usize| gguf_file::Value::U32(u32::try_from(value).unwrap());
    #[expect(clippy::cast_possible_truncation, reason = "as a file has them")]
    let float = |value: f64| gguf_file::Value::F32(value as f32);
    let experts = of.experts.as_ref().unwrap();
    let keys = [
        ("embedding_length", count(of.hidden_size)),
        ("block_count", count(of.layers)),
        ("attention.head_count", count(of.heads)),
        ("attention.head_count_kv", count(of.kv_heads)),
        ("attention.key_length", count(of.head_dim)),
        ("attention.value_length", count(of.head_dim)),
        ("feed_forward_length", count(of.ffn_size)),
        ("context_length", count(of.max_positions)),
        ("rope.freq_base", float(of.rope.theta)),
        ("attention.layer_norm_rms_epsilon", float(of.norm_eps)),
        ("expert_count", count(experts.count)),
        ("expert_used_count", count(experts.per_token)),
        ("expert_feed_forward_length", count(experts.ffn_size)),
    ];
    let keys: Vec<_> = keys.into_iter().map(|(key, value)| (format!("{name}.{key}"), value)).collect();
    let architecture = gguf_file::Value::String(name.to_owned());
    let mut metadata = vec![("general.architecture", &architecture)];
    metadata.extend(keys.iter().map(|(key, value)| (key.as_str(), value)));
    let tensors: Vec<_> = stacked.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let mut bytes = Cursor::new(Vec::new());
    gguf_file::write(&mut bytes, &metadata, &tensors).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, bytes.into_inner()).unwrap();
    (folder, path)
}

#[test]
fn a_file_gives_what_the_checkpoint_it_was_made_of_gives() {
    for (folder, name) in CHECKPOINTS {
        let checkpoint = opened(&fixture(folder));
        let tensors =
            candle_core::safetensors::load(fixture(folder).join("model.safetensors"), &Device::Cpu).unwrap();
        let (_kept, path) = written(name, &checkpoint.architecture, &tensors, |_| GgmlDType::F32);
        let (mut from_file, mut from_folder) =
            (session(&opened(&path), Dtype::Gguf), session(&checkpoint, Dtype::F32));
        for (sequence, prompt) in prompts(checkpoint.architecture.vocab_size) {
            let found = logits_of(from_file.as_mut(), sequence, &prompt);
            assert_eq!(found, logits_of(from_folder.as_mut(), sequence, &prompt), "{folder}, {prompt:?}");
        }
    }
}

/// `Q4_K_M` as llama.cpp mixes it for experts: V and down in q6_K in the outer layers and in every third between.
fn q4_k_m(name: &str) -> GgmlDType {
    let more = name.starts_with("blk.0.") && (name.contains("attn_v") || name.contains("ffn_down"));
    match name {
        "token_embd.weight" => GgmlDType::Q4K,
        "output.weight" => GgmlDType::Q6K,
        _ if name.ends_with("norm.weight") || name.contains("gate_inp") => GgmlDType::F32,
        _ if more => GgmlDType::Q6K,
        _ => GgmlDType::Q4K,
    }
}

/// Larger dimensions than the checkpoint's, with seeded noise.
fn wide(folder: &str) -> (Architecture, HashMap<String, Tensor>) {
    let config = std::fs::read_to_string(fixture(folder).join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    // In whole blocks of 256, and outputs in whole panels of 16, which the engine pads.
    for (key, value) in [
        ("hidden_size", 256),
        ("moe_intermediate_size", 256),
        ("intermediate_size", 512),
        ("head_dim", 64),
        ("num_local_experts", 16),
        ("vocab_size", 256),
    ] {
        config[key] = value.into();
    }
    let shape = tempfile::tempdir().unwrap();
    std::fs::write(shape.path().join("config.json"), config.to_string()).unwrap();
    let architecture = weights::open_shape(shape.path().to_str().unwrap(), None).unwrap().architecture;
    let listed = architecture.inventory(Dtype::F32).tensors.into_iter().enumerate();
    let tensors = listed.map(|(index, info)| {
        let mut values = vec![0.0; info.shape.iter().product()];
        native::random_kv::fill(11, index, 0, false, &mut values);
        let columns = info.shape.last().copied().unwrap_or(1) as f32;
        let (mean, deviation) =
            if info.role == Role::Norm { (1.0, 0.1) } else { (0.0, columns.sqrt().recip()) };
        for value in &mut values {
            *value = value.mul_add(deviation, mean);
        }
        (info.name, Tensor::from_vec(values, info.shape, &Device::Cpu).unwrap())
    });
    let tensors = tensors.collect();
    (architecture, tensors)
}

#[test]
fn q4_k_m_gives_what_its_dequantised_weights_give_and_moves_the_bytes_of_the_file() {
    for (folder, name) in CHECKPOINTS {
        let (architecture, tensors) = wide(folder);
        let (_kept, path) = written(name, &architecture, &tensors, q4_k_m);
        let model = opened(&path);
        let mut quantised = session(&model, Dtype::Gguf);
        let two = DeviceOptions { threads: Some(2), ..DeviceOptions::default() };
        let mut dequantised: NativeSession<_> =
            native::open_dequantised(&model, Dtype::Gguf, two, &mut |_| {}).unwrap();
        for (sequence, prompt) in prompts(architecture.vocab_size) {
            let found = logits_of(quantised.as_mut(), sequence, &prompt);
            let error = relative_error(&found, &logits_of(&mut dequantised, sequence, &prompt));
            assert!(
                error > 0.0 && error <= tolerance(Dtype::Gguf),
                "{folder}: {error:.1e} off its own weights"
            );
        }

        // What is predicted from the header alone, at a step that routes as the engine did.
        let shape = weights::open_shape(path.to_str().unwrap(), None).unwrap();
        let in_file = shape.inventory(Dtype::Gguf);
        assert_eq!(quantised.inventory().total_bytes(), in_file.total_bytes(), "{folder}");
        for role in [Role::Expert, Role::Router, Role::Matrix, Role::Head, Role::Embedding, Role::Norm] {
            assert_eq!(quantised.inventory().bytes_of(role), in_file.bytes_of(role), "{folder}, {role:?}");
        }
        let counted = Ledger::new(quantised.architecture(), quantised.inventory(), quantised.kv_dtype());
        let ideal = counted.step(StepShape::decode(1, 100)).bytes;
        quantised.synthetic_kv().unwrap().fill_kv(SequenceId(9), 100, 1).unwrap();
        quantised.step(&StepBatch::uniform(SequenceId(9), &[vec![1]], 100)).unwrap();
        let off = quantised.bytes_moved().unwrap().as_f64() / ideal.ideal().as_f64() - 1.0;
        assert!(off.abs() <= 5e-3, "{folder}: {:+.2} % from the ideal", 100.0 * off);
    }
}

#[test]
fn experts_that_a_file_lacks_or_has_too_few_of_are_named() {
    let (folder, name) = CHECKPOINTS[0];
    let checkpoint = opened(&fixture(folder));
    let tensors =
        candle_core::safetensors::load(fixture(folder).join("model.safetensors"), &Device::Cpu).unwrap();
    let refused = |keep: fn(&str) -> bool| {
        let kept = tensors.iter().filter(|(name, _)| keep(name)).map(|(k, v)| (k.clone(), v.clone()));
        let (_folder, path) = written(name, &checkpoint.architecture, &kept.collect(), |_| GgmlDType::F32);
        weights::open(path.to_str().unwrap(), None, 0).unwrap_err().to_string()
    };
    let error = refused(|name| !name.contains("layers.2.mlp.experts.7."));
    assert!(error.contains("blk.2.ffn_") && error.contains("[7, "), "{error}");
    let error = refused(|name| !(name.contains("layers.2.") && name.contains("up_proj")));
    assert!(error.contains("blk.2.ffn_up_exps.weight"), "{error}");
    assert!(expected_tensors(&checkpoint.architecture).len() < 50, "stacked");
}
