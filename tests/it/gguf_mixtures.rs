//! Mixtures of experts in GGUF files: what the checkpoint they were made of gives, run and counted as stored.

use std::collections::HashMap;
use std::path::PathBuf;

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{D, Device, Tensor};

use hbmark::engine::native::{self, NativeSession};
use hbmark::engine::relative_error;
use hbmark::engine::{self, DeviceChoice, DeviceOptions, ScriptedRouting, SequenceId, Session, StepBatch};
use hbmark::measure::quality::tolerance;
use hbmark::weights::{self, OpenModel, Packing, StoredData, StoredMatrix};
use hbmark_core::ledger::{ExpertRouting, Ledger, StepShape};
use hbmark_core::model::gguf::{expected_tensors, file_shape, file_tensor};
use hbmark_core::model::{Architecture, Attention, Dtype, Family, Mixer, Reach, Role, RopeScaling};

use crate::models::{self, logits_of, opened, threads};
use crate::runs::{changed, fixture};

/// Folders with checkpoints of transformers, and what their architecture is called in a file.
const CHECKPOINTS: [(&str, &str); 4] =
    [("qwen3-moe", "qwen3moe"), ("mixtral", "llama"), ("qwen2-moe", "qwen2moe"), ("gpt-oss", "gpt-oss")];

fn session(model: &OpenModel, dtype: Dtype) -> Box<dyn Session> {
    // Not what goes with the weights: those are in other dtypes.
    let options = DeviceOptions { kv_dtype: Some(Dtype::F32), ..threads(2) };
    models::session("native", model, dtype, options)
}

fn prompts(vocabulary: usize) -> impl Iterator<Item = (u64, Vec<u32>)> {
    let token = move |i: u32| (i * 37 + 3) % u32::try_from(vocabulary).unwrap();
    (0..).zip([1, 5, 33]).map(move |(sequence, count)| (sequence, (0..count).map(token).collect()))
}

/// A folder's checkpoint and its tensors, each expert's by itself.
fn checkpoint(folder: &str) -> (tempfile::TempDir, OpenModel, HashMap<String, Tensor>) {
    let copy = changed(folder, |config| {
        if folder == "gpt-oss" {
            // That of all published ones, which a file does not state.
            config["swiglu_limit"] = 7.0.into();
        }
    });
    let model = opened(copy.path());
    let tensors =
        candle_core::safetensors::load(copy.path().join("model.safetensors"), &Device::Cpu).unwrap();
    let mut apart = HashMap::new();
    for (name, tensor) in tensors {
        let Some((experts, matrix)) = name.split_once(".experts.").filter(|_| folder == "gpt-oss") else {
            apart.insert(name, tensor);
            continue;
        };
        // Matrices are `[experts, input, out]`; columns of gate and up alternate.
        let (matrix, kind) =
            matrix.strip_suffix("_bias").map_or((matrix, "weight"), |matrix| (matrix, "bias"));
        for expert in 0..tensor.dim(0).unwrap() {
            let own = tensor.get(expert).unwrap();
            let mut insert = |matrix: &str, values: &Tensor| {
                let values = if kind == "bias" { values.clone() } else { values.t().unwrap() };
                let name = format!("{experts}.experts.{expert}.{matrix}.{kind}");
                apart.insert(name, values.contiguous().unwrap());
            };
            if matrix == "down_proj" {
                insert(matrix, &own);
                continue;
            }
            for (half, matrix) in [(0, "gate_proj"), (1, "up_proj")] {
                let columns: Vec<u32> = (half..).step_by(2).take(own.dim(D::Minus1).unwrap() / 2).collect();
                let columns = Tensor::new(columns, &Device::Cpu).unwrap();
                insert(matrix, &own.index_select(&columns, D::Minus1).unwrap());
            }
        }
    }
    (copy, model, apart)
}

/// What a tensor is written as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Blocks {
    Candle(GgmlDType),
    Mxfp4,
}

impl Blocks {
    /// ggml's type code, and the bytes of a tensor.
    fn of(self, tensor: &Tensor) -> (u32, Vec<u8>) {
        let dtype = match self {
            Self::Candle(dtype) => dtype,
            Self::Mxfp4 => {
                let values: Vec<f32> = tensor.flatten_all().unwrap().to_vec1().unwrap();
                return (39, mxfp4(tensor.dim(D::Minus1).unwrap(), &values).1);
            }
        };
        let code = match dtype {
            GgmlDType::F32 => 0,
            GgmlDType::Q8_0 => 8,
            GgmlDType::Q4K => 12,
            GgmlDType::Q6K => 14,
            other => panic!("no test writes {other:?}"),
        };
        (code, QTensor::quantize(tensor, dtype).unwrap().data().unwrap().into_owned())
    }
}

/// Rows in mxfp4, and as a file has them: the power of two, then 16 bytes of which byte j has column j low and column j + 16 high.
fn mxfp4(columns: usize, values: &[f32]) -> (StoredMatrix, Vec<u8>) {
    let matrix = StoredMatrix::from_f32_rows(values.len() / columns, columns, values, Packing::Mxfp4);
    let StoredData::Mxfp4 { nibbles, scales } = &matrix.data else { unreachable!() };
    let code = |column: usize| (nibbles[column / 2] >> (4 * (column % 2))) & 0xF;
    let mut bytes = Vec::new();
    for (block, scale) in scales.iter().enumerate() {
        bytes.push(*scale);
        bytes.extend((32 * block..32 * block + 16).map(|column| code(column) | (code(column + 16) << 4)));
    }
    (matrix, bytes)
}

/// A value of a file's metadata.
enum Value {
    Count(usize),
    Float(f64),
    Text(&'static str),
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// A whole file: keys, then tensors with their shapes, type codes and bytes.
fn bytes_of_file(keys: &[(String, Value)], tensors: &[(String, Vec<usize>, u32, Vec<u8>)]) -> Vec<u8> {
    let mut out = [b"GGUF".as_slice(), &3u32.to_le_bytes()].concat();
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((keys.len() as u64).to_le_bytes());
    for (key, value) in keys {
        out.extend(string(key));
        #[expect(clippy::cast_possible_truncation, reason = "as a file has them")]
        let (kind, value): (u32, Vec<u8>) = match value {
            Value::Count(count) => (4, u32::try_from(*count).unwrap().to_le_bytes().into()),
            Value::Float(value) => (6, (*value as f32).to_le_bytes().into()),
            Value::Text(text) => (8, string(text)),
        };
        out.extend(kind.to_le_bytes());
        out.extend(value);
    }
    let mut data = Vec::new();
    for (name, shape, code, bytes) in tensors {
        out.extend(string(name));
        out.extend(u32::try_from(shape.len()).unwrap().to_le_bytes());
        out.extend(shape.iter().rev().flat_map(|&size| (size as u64).to_le_bytes()));
        out.extend(code.to_le_bytes());
        out.extend((data.len() as u64).to_le_bytes());
        data.extend(bytes);
        data.resize(data.len().next_multiple_of(32), 0);
    }
    out.resize(out.len().next_multiple_of(32), 0);
    out.extend(data);
    out
}

/// A file of these dimensions whose tensors are given by their names in a checkpoint, as llama.cpp's converter writes it.
///
/// *Source* of the order of rows: `LlamaModel.permute` of `convert_hf_to_gguf.py`.
fn written(
    name: &'static str,
    of: &Architecture,
    tensors: &HashMap<String, Tensor>,
    blocks: impl Fn(&str) -> Blocks,
) -> (tempfile::TempDir, PathBuf) {
    let mut parts: HashMap<String, Vec<(usize, Tensor)>> = HashMap::new();
    for (checkpoint, tensor) in tensors {
        let file = file_tensor(of.family, checkpoint).unwrap_or_else(|| panic!("no file has {checkpoint}"));
        let rotated = checkpoint.contains(".q_proj.") || checkpoint.contains(".k_proj.");
        let tensor = if of.family == Family::Mixtral && rotated {
            let (rows, columns) = tensor.dims2().unwrap();
            let heads = tensor.reshape((rows / of.head_dim, 2, of.head_dim / 2, columns)).unwrap();
            heads.transpose(1, 2).unwrap().reshape((rows, columns)).unwrap()
        } else {
            // Quantised files have a matrix of one row as a vector, those of the converter as it is.
            let quantised = blocks("token_embd.weight") != plain("");
            let dims = if quantised { file_shape(tensor.dims()) } else { tensor.dims() };
            tensor.reshape(dims).unwrap()
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
        let (code, bytes) = blocks(&file).of(&whole);
        (file, whole.dims().to_vec(), code, bytes)
    });
    let stacked: Vec<_> = stacked.collect();

    let experts = of.experts.as_ref().unwrap();
    let mut keys = vec![
        ("embedding_length", Value::Count(of.hidden_size)),
        ("block_count", Value::Count(of.layers)),
        ("attention.head_count", Value::Count(of.heads)),
        ("attention.head_count_kv", Value::Count(of.kv_heads)),
        ("attention.key_length", Value::Count(of.head_dim)),
        ("attention.value_length", Value::Count(of.head_dim)),
        ("feed_forward_length", Value::Count(of.ffn_size)),
        ("context_length", Value::Count(of.max_positions)),
        ("rope.freq_base", Value::Float(of.rope.theta)),
        ("attention.layer_norm_rms_epsilon", Value::Float(of.norm_eps)),
        ("expert_count", Value::Count(experts.count)),
        ("expert_used_count", Value::Count(experts.per_token)),
        ("expert_feed_forward_length", Value::Count(experts.ffn_size)),
    ];
    if let Mixer::Attention(Attention { reach: Reach::Window { tokens }, .. }) = of.layer(0).mixer {
        keys.push(("attention.sliding_window", Value::Count(tokens)));
    }
    if let RopeScaling::Yarn { factor, original_max_positions, shape } = of.rope.scaling {
        keys.extend([
            ("rope.scaling.type", Value::Text("yarn")),
            ("rope.scaling.factor", Value::Float(factor)),
            ("rope.scaling.original_context_length", Value::Count(original_max_positions)),
            ("rope.scaling.yarn_beta_fast", Value::Float(shape.beta_fast)),
        ]);
    }
    let mut keys: Vec<_> = keys.into_iter().map(|(key, value)| (format!("{name}.{key}"), value)).collect();
    keys.push(("general.architecture".to_owned(), Value::Text(name)));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, bytes_of_file(&keys, &stacked)).unwrap();
    (folder, path)
}

fn plain(_: &str) -> Blocks {
    Blocks::Candle(GgmlDType::F32)
}

#[test]
fn a_file_gives_what_the_checkpoint_it_was_made_of_gives() {
    for (folder, name) in CHECKPOINTS {
        let (_copy, checkpoint, tensors) = checkpoint(folder);
        let (_kept, path) = written(name, &checkpoint.architecture, &tensors, plain);
        let (mut from_file, mut from_folder) =
            (session(&opened(&path), Dtype::Gguf), session(&checkpoint, Dtype::F32));
        for (sequence, prompt) in prompts(checkpoint.architecture.vocab_size) {
            let found = logits_of(from_file.as_mut(), sequence, &prompt, 0);
            assert_eq!(found, logits_of(from_folder.as_mut(), sequence, &prompt, 0), "{folder}, {prompt:?}");
        }
    }
}

/// `Q4_K_M` as llama.cpp mixes it for experts: V and down in q6_K in the outer layers and in every third between.
fn q4_k_m(name: &str) -> Blocks {
    let more = name.starts_with("blk.0.") && (name.contains("attn_v") || name.contains("ffn_down"));
    Blocks::Candle(match name {
        "token_embd.weight" => GgmlDType::Q4K,
        "output.weight" => GgmlDType::Q6K,
        _ if is_plain(name) => GgmlDType::F32,
        _ if more => GgmlDType::Q6K,
        _ => GgmlDType::Q4K,
    })
}

/// `MXFP4_MOE`: experts in mxfp4, all other matrices in q8_0.
fn mxfp4_moe(name: &str) -> Blocks {
    match name {
        _ if is_plain(name) => Blocks::Candle(GgmlDType::F32),
        _ if name.contains("_exps.") => Blocks::Mxfp4,
        _ => Blocks::Candle(GgmlDType::Q8_0),
    }
}

fn is_plain(name: &str) -> bool {
    ["norm.weight", ".bias", "sinks.weight"].iter().any(|ending| name.ends_with(ending))
        || name.contains("gate_inp")
}

/// Larger dimensions than the checkpoint's, with seeded noise.
fn wide(folder: &str) -> (Architecture, HashMap<String, Tensor>) {
    let config = std::fs::read_to_string(fixture(folder).join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    // In whole blocks of 256, and outputs in whole panels of 16, which the engine pads.
    for (key, value) in [
        ("hidden_size", 256),
        ("moe_intermediate_size", 256),
        ("intermediate_size", 256),
        ("shared_expert_intermediate_size", 256),
        ("head_dim", 64),
        ("num_local_experts", 16),
        // With the gate of the shared one, a row of the router as well.
        ("num_experts", 15),
        ("vocab_size", 256),
    ] {
        if let Some(own) = config.get_mut(key) {
            *own = value.into();
        }
    }
    let shape = tempfile::tempdir().unwrap();
    std::fs::write(shape.path().join("config.json"), config.to_string()).unwrap();
    let architecture = weights::open_shape(shape.path().to_str().unwrap(), None).unwrap().architecture;
    let listed = architecture.inventory(Dtype::Gguf).tensors.into_iter().enumerate();
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
fn a_mixture_of_blocks_gives_what_its_dequantised_weights_give_and_moves_the_bytes_of_the_file() {
    let blocks: [fn(&str) -> Blocks; 2] = [q4_k_m, mxfp4_moe];
    for ((folder, name), blocks) in CHECKPOINTS.into_iter().flat_map(|of| blocks.map(|blocks| (of, blocks))) {
        let (architecture, tensors) = wide(folder);
        let (_kept, path) = written(name, &architecture, &tensors, blocks);
        let model = opened(&path);
        let mut quantised = session(&model, Dtype::Gguf);
        let two = threads(2);
        let mut dequantised: NativeSession<_> =
            native::open_dequantised(&model, Dtype::Gguf, two, &mut |_| {}).unwrap();
        // Experts may be so near to each other that what is rounded before them decides.
        let script = ScriptedRouting { routing: ExpertRouting::Uniform, seed: 5 };
        quantised.script_experts(Some(script));
        dequantised.script_experts(Some(script));
        for (sequence, prompt) in prompts(architecture.vocab_size) {
            let found = logits_of(quantised.as_mut(), sequence, &prompt, 0);
            let error = relative_error(&found, &logits_of(&mut dequantised, sequence, &prompt, 0));
            assert!(
                error > 0.0 && error <= tolerance(Dtype::Gguf),
                "{folder}: {error:.1e} off its own weights"
            );
        }

        // What is predicted from the header alone, at a step that routes as the engine did.
        let shape = weights::open_shape(path.to_str().unwrap(), None).unwrap();
        let in_file = shape.inventory(Dtype::Gguf);
        assert_eq!(quantised.inventory().total_bytes(), in_file.total_bytes(), "{folder}");
        for role in [
            Role::Expert,
            Role::ExpertBias,
            Role::SharedExpert,
            Role::Router,
            Role::Matrix,
            Role::Head,
            Role::Embedding,
            Role::Norm,
            Role::Bias,
        ] {
            assert_eq!(quantised.inventory().bytes_of(role), in_file.bytes_of(role), "{folder}, {role:?}");
        }
        let counted = Ledger::new(quantised.architecture(), quantised.inventory(), quantised.kv_dtype());
        let ideal = counted.step(StepShape::decode(1, 100)).bytes;
        quantised.script_experts(None);
        quantised.synthetic_kv().unwrap().fill_kv(SequenceId(9), 100, 1).unwrap();
        quantised.step(&StepBatch::uniform(SequenceId(9), &[vec![1]], 100)).unwrap();
        let off = quantised.bytes_moved().unwrap().as_f64() / ideal.ideal().as_f64() - 1.0;
        assert!(off.abs() <= 5e-3, "{folder}: {:+.2} % from the ideal", 100.0 * off);
    }
}

#[test]
fn a_gpu_takes_mixtures_of_blocks_and_refuses_others_by_tensor() {
    let gpu = DeviceChoice::Cuda(0);
    let on_a_gpu = |folder: &str, name: &'static str, blocks: fn(&str) -> Blocks| {
        let (architecture, tensors) = wide(folder);
        let (_kept, path) = written(name, &architecture, &tensors, blocks);
        engine::capabilities("native", &opened(&path), Dtype::Gguf, gpu).map_err(|error| error.to_string())
    };
    for (folder, name) in CHECKPOINTS {
        assert_eq!(on_a_gpu(folder, name, q4_k_m).err(), None, "{folder}");
        // Its shared expert is q8_0 beside mxfp4.
        let shared = if folder == "qwen2-moe" { Some("`blk.1.ffn_gate_shexp.weight` in q8_0") } else { None };
        match (on_a_gpu(folder, name, mxfp4_moe), shared) {
            (Err(error), Some(said)) => assert!(error.contains(said), "{error}"),
            (found, said) => assert_eq!(found.err().as_deref(), said, "{folder}"),
        }
        let error = on_a_gpu(folder, name, plain).unwrap_err();
        assert!(error.contains("`blk.0.attn_") && error.contains("in f32 on cuda:0"), "{folder}: {error}");
    }
    let shared_apart = |file: &str| {
        if file.contains("_shexp.") { Blocks::Candle(GgmlDType::Q8_0) } else { q4_k_m(file) }
    };
    let error = on_a_gpu("qwen2-moe", "qwen2moe", shared_apart).unwrap_err();
    assert!(error.contains("beside other experts of its layer"), "{error}");
    let table = |file: &str| if file == "token_embd.weight" { Blocks::Mxfp4 } else { q4_k_m(file) };
    let error = on_a_gpu("qwen3-moe", "qwen3moe", table).unwrap_err();
    assert!(error.contains("`token_embd.weight` in mxfp4"), "{error}");
}

#[test]
fn columns_of_mxfp4_lie_where_a_file_has_them() {
    let (architecture, mut tensors) = wide("gpt-oss");
    let (_kept, path) = written("gpt-oss", &architecture, &tensors, |name| match name {
        _ if name.contains("_exps.weight") => Blocks::Mxfp4,
        _ => plain(name),
    });
    for (name, tensor) in &mut tensors {
        if name.contains(".experts.") && name.ends_with(".weight") {
            let values: Vec<f32> = tensor.flatten_all().unwrap().to_vec1().unwrap();
            let (matrix, _) = mxfp4(tensor.dim(1).unwrap(), &values);
            let mut rounded = vec![0.0; values.len()];
            for (row, out) in rounded.chunks_mut(matrix.columns).enumerate() {
                matrix.row(row, out);
            }
            *tensor = Tensor::from_vec(rounded, tensor.dims(), &Device::Cpu).unwrap();
        }
    }
    let (_folder, rounded) = written("gpt-oss", &architecture, &tensors, plain);
    let two = DeviceOptions { kv_dtype: Some(Dtype::F32), ..threads(2) };
    let mut found: NativeSession<_> =
        native::open_dequantised(&opened(&path), Dtype::Gguf, two, &mut |_| {}).unwrap();
    let mut wanted = session(&opened(&rounded), Dtype::Gguf);
    for (sequence, prompt) in prompts(architecture.vocab_size) {
        let logits = logits_of(&mut found, sequence, &prompt, 0);
        assert_eq!(logits, logits_of(wanted.as_mut(), sequence, &prompt, 0), "{prompt:?}");
    }
    let (model, device) = (opened(&path), DeviceChoice::Cpu);
    let stock = engine::open("stock", &model, Dtype::Gguf, device, threads(2), &mut |_, _| {});
    assert!(stock.is_err());
}

#[test]
fn experts_that_a_file_lacks_or_has_too_few_of_are_named() {
    let (folder, name) = CHECKPOINTS[0];
    let (_copy, checkpoint, tensors) = checkpoint(folder);
    let refused = |keep: fn(&str) -> bool| {
        let kept = tensors.iter().filter(|(name, _)| keep(name)).map(|(k, v)| (k.clone(), v.clone()));
        let (_folder, path) = written(name, &checkpoint.architecture, &kept.collect(), plain);
        weights::open(path.to_str().unwrap(), None, 0).unwrap_err().to_string()
    };
    let error = refused(|name| !name.contains("layers.2.mlp.experts.7."));
    assert!(error.contains("blk.2.ffn_") && error.contains("[7, "), "{error}");
    let error = refused(|name| !(name.contains("layers.2.") && name.contains("up_proj")));
    assert!(error.contains("blk.2.ffn_up_exps.weight"), "{error}");
    assert!(expected_tensors(&checkpoint.architecture).len() < 50, "stacked");
}
