//! Claims about the order and the bits of what is read from GGUF files.

use std::io::Cursor;
use std::os::unix::fs::FileExt;

use candle_core::quantized::gguf_file;
use candle_core::{DType, Tensor};

use super::*;
use hbmark_core::model::Role;
use hbmark_core::units::Bytes;

#[test]
fn interleaved_rows_go_back_to_the_half_they_came_from() {
    // The converter: reshape to [heads, 2, head_dim / 2] and swap the last two axes.
    let (heads, head_dim) = (3, 10);
    let mut file_rows = Vec::new();
    for head in 0..heads {
        for pair in 0..head_dim / 2 {
            for half in 0..2 {
                file_rows.push(head * head_dim + half * (head_dim / 2) + pair);
            }
        }
    }
    let order = RowOrder::Interleaved { head_dim };
    for (file, checkpoint) in file_rows.into_iter().enumerate() {
        assert_eq!(order.checkpoint_row(file), checkpoint);
    }
    assert_eq!(RowOrder::AsInCheckpoint.checkpoint_row(7), 7);
}

/// A llama of one layer with two heads of 128, two KV heads, biases on Q, K and V, as a file that candle wrote.
fn written(dtypes: impl Fn(&str) -> GgmlDType) -> (tempfile::TempDir, GgufModel, HashMap<String, Vec<f32>>) {
    let (hidden, ffn, vocab) = (256, 256, 7);
    let mut tensors = vec![
        ("token_embd.weight".to_owned(), vec![vocab, hidden]),
        ("output.weight".to_owned(), vec![vocab, hidden]),
        ("output_norm.weight".to_owned(), vec![hidden]),
    ];
    for (name, shape) in [
        ("attn_norm", vec![hidden]),
        ("attn_q", vec![hidden, hidden]),
        ("attn_k", vec![hidden, hidden]),
        ("attn_v", vec![hidden, hidden]),
        ("attn_output", vec![hidden, hidden]),
        ("ffn_norm", vec![hidden]),
        ("ffn_gate", vec![ffn, hidden]),
        ("ffn_up", vec![ffn, hidden]),
        ("ffn_down", vec![hidden, ffn]),
    ] {
        tensors.push((format!("blk.0.{name}.weight"), shape));
    }
    for name in ["q", "k", "v"] {
        tensors.push((format!("blk.0.attn_{name}.bias"), vec![hidden]));
    }
    let mut values = HashMap::new();
    let mut written = Vec::new();
    for (name, shape) in tensors {
        let tensor = Tensor::randn(0.0f32, 0.05, shape, &Device::Cpu).unwrap();
        let tensor = QTensor::quantize(&tensor, dtypes(&name)).unwrap();
        let floats = tensor.dequantize(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
        values.insert(name.clone(), floats.flatten_all().unwrap().to_vec1().unwrap());
        written.push((name, tensor));
    }
    let count = |value: usize| gguf_file::Value::U32(u32::try_from(value).unwrap());
    let metadata = [
        ("general.architecture", gguf_file::Value::String("llama".to_owned())),
        ("llama.embedding_length", count(hidden)),
        ("llama.block_count", count(1)),
        ("llama.attention.head_count", count(2)),
        ("llama.attention.head_count_kv", count(2)),
        ("llama.feed_forward_length", count(ffn)),
        ("llama.context_length", count(512)),
        ("llama.attention.layer_norm_rms_epsilon", gguf_file::Value::F32(1e-5)),
    ];
    let metadata: Vec<_> = metadata.iter().map(|(key, value)| (*key, value)).collect();
    let tensors: Vec<_> = written.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let mut bytes = Cursor::new(Vec::new());
    gguf_file::write(&mut bytes, &metadata, &tensors).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, bytes.into_inner()).unwrap();
    let model = GgufModel::open(&path).unwrap();
    (folder, model, values)
}

fn info(name: &str, shape: &[usize]) -> TensorInfo {
    TensorInfo {
        name: name.to_owned(),
        shape: shape.to_vec(),
        storage: "q8_0".to_owned(),
        bytes: Bytes(0),
        role: Role::Matrix,
        layer: None,
    }
}

fn matrix_of(model: &GgufModel, name: &str, rows: usize) -> (&'static str, Vec<Vec<f32>>) {
    let matrix = model.matrix(&info(name, &[rows, 256])).unwrap();
    let rows = (0..rows).map(|row| {
        let mut values = vec![0.0; 256];
        matrix.row(row, &mut values);
        values
    });
    (matrix.storage(), rows.collect())
}

#[test]
fn blocks_that_are_multiplied_keep_their_values_and_others_are_packed_as_q8_0() {
    let kept = [
        (GgmlDType::Q8_0, "q8_0"),
        (GgmlDType::Q4_0, "q4_0"),
        (GgmlDType::Q4K, "q4_k"),
        (GgmlDType::Q5K, "q5_k"),
        (GgmlDType::Q6K, "q6_k"),
        (GgmlDType::F32, "f32"),
        (GgmlDType::F16, "f16"),
        (GgmlDType::BF16, "bf16"),
    ];
    let repacked = [GgmlDType::Q4_1, GgmlDType::Q5_0, GgmlDType::Q5_1, GgmlDType::Q2K, GgmlDType::Q3K];
    let dtypes = |dtype| move |name: &str| if name.ends_with("norm.weight") { GgmlDType::F32 } else { dtype };
    for (dtype, name) in kept {
        let (_folder, model, values) = written(dtypes(dtype));
        let (storage, rows) = matrix_of(&model, "model.layers.0.mlp.up_proj.weight", 256);
        assert_eq!((storage, rows.concat()), (name, values["blk.0.ffn_up.weight"].clone()));
        let (_, rows) = matrix_of(&model, "lm_head.weight", 7);
        assert_eq!(rows.concat(), values["output.weight"]);
    }
    for dtype in repacked {
        let (_folder, model, values) = written(dtypes(dtype));
        let (storage, rows) = matrix_of(&model, "model.layers.0.mlp.down_proj.weight", 256);
        assert_eq!(storage, "q8_0", "{dtype:?}");
        for (found, wanted) in rows.concat().iter().zip(&values["blk.0.ffn_down.weight"]) {
            // Half a step of 1/127 of the largest weight of the block, itself under 0.5.
            assert!((found - wanted).abs() < 0.6 * 0.5 / 127.0, "{dtype:?}: {found} for {wanted}");
        }
    }
}

#[test]
fn rows_and_biases_of_q_and_k_come_in_the_order_of_the_checkpoint() {
    let (_folder, model, values) = written(|name| match name {
        _ if name.ends_with("norm.weight") || name.ends_with("bias") => GgmlDType::F32,
        _ => GgmlDType::Q4K,
    });
    for letter in ["q", "k", "v"] {
        let (_, rows) = matrix_of(&model, &format!("model.layers.0.self_attn.{letter}_proj.weight"), 256);
        let bias =
            model.vector(&info(&format!("model.layers.0.self_attn.{letter}_proj.bias"), &[256])).unwrap();
        let in_file = StoredMatrix::from_f32_rows(
            256,
            256,
            &values[&format!("blk.0.attn_{letter}.weight")],
            Packing::F32,
        );
        for row in 0..256 {
            // Row 128h + 64·half + i of the checkpoint is row 128h + 2i + half of the file.
            let (head, half, pair) = (row / 128, row % 128 / 64, row % 64);
            let from = if letter == "v" { row } else { head * 128 + 2 * pair + half };
            let mut wanted = vec![0.0; 256];
            in_file.row(from, &mut wanted);
            assert_eq!(rows[row], wanted, "{letter} row {row}");
            assert_eq!(bias[row].to_bits(), values[&format!("blk.0.attn_{letter}.bias")][from].to_bits());
        }
    }
}

#[test]
fn a_tensor_that_is_missing_or_of_another_shape_is_an_error() {
    let (_folder, model, _) = written(|_| GgmlDType::Q8_0);
    let error = model.matrix(&info("model.layers.1.mlp.up_proj.weight", &[256, 256])).unwrap_err();
    assert!(matches!(error, WeightsError::Missing { .. }), "{error}");
    let error = model.matrix(&info("model.layers.0.mlp.up_proj.weight", &[256, 128])).unwrap_err();
    assert!(matches!(error, WeightsError::WrongShape { .. }), "{error}");
}

#[test]
fn a_scale_that_is_no_number_is_found_in_every_format() {
    let formats = [
        GgmlDType::F32,
        GgmlDType::F16,
        GgmlDType::BF16,
        GgmlDType::Q4_0,
        GgmlDType::Q4_1,
        GgmlDType::Q5_0,
        GgmlDType::Q5_1,
        GgmlDType::Q8_0,
        GgmlDType::Q2K,
        GgmlDType::Q3K,
        GgmlDType::Q4K,
        GgmlDType::Q5K,
        GgmlDType::Q6K,
    ];
    for dtype in formats {
        let (_folder, model, _) = written(|_| dtype);
        model.check_values().unwrap();
        let place = &model.places.0["blk.0.ffn_up.weight"];
        let size = dtype.type_size() as u64;
        // Every byte of the last block in turn: values that are numbers stay numbers, and candle says which are.
        let at = place.offset + place.bytes - size;
        let file = std::fs::File::options().read(true).write(true).open(model.path()).unwrap();
        let mut found = 0;
        for byte in 0..size - 1 {
            let mut before = [0; 2];
            file.read_exact_at(&mut before, at + byte).unwrap();
            file.write_all_at(&[0xff, 0x7f], at + byte).unwrap();
            let mut block = vec![0; dtype.type_size()];
            file.read_exact_at(&mut block, at).unwrap();
            let values = model.dequantised("x", place.storage, &block, &[dtype.block_size()]).unwrap();
            let is_number = values.iter().all(|value| value.is_finite());
            let checked = model.check_values();
            assert_eq!(checked.is_ok(), is_number, "{dtype:?} byte {byte}: {checked:?}");
            found += usize::from(checked.is_err());
            file.write_all_at(&before, at + byte).unwrap();
        }
        assert!(found > 0, "{dtype:?}");
        model.check_values().unwrap();
    }
}
