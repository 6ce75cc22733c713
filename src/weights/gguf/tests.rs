//! Claims about [`GgufModel`]: dimensions and bytes are those of the file, and every known inconsistency of a header is refused.

use std::fs;

use candle_core::quantized::{GgmlDType, QTensor, gguf_file};
use candle_core::{Device, Tensor};
use proptest::prelude::*;

use super::*;
use hbmark_core::model::{Biases, Dtype, Family, RopeScaling};
use hbmark_core::units::Bytes;

const HIDDEN: u64 = 32;
const VOCAB: u64 = 64;

/// A GGUF file written field by field, so that any field can be wrong.
#[derive(Clone)]
struct Writer {
    tensor_count: Option<u64>,
    key_count: Option<u64>,
    keys: Vec<(&'static str, u32, Vec<u8>)>,
    /// Name, shape as in the file (fastest first), type code, offset.
    tensors: Vec<(String, Vec<u64>, u32, u64)>,
    data: usize,
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

impl Writer {
    fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.key_count.unwrap_or(self.keys.len() as u64).to_le_bytes());
        for (key, kind, value) in &self.keys {
            out.extend([string(key), kind.to_le_bytes().to_vec(), value.clone()].concat());
        }
        for (name, shape, code, offset) in &self.tensors {
            out.extend(string(name));
            out.extend(u32::try_from(shape.len()).unwrap().to_le_bytes());
            out.extend(shape.iter().flat_map(|d| d.to_le_bytes()));
            out.extend(code.to_le_bytes());
            out.extend(offset.to_le_bytes());
        }
        out.resize(out.len().next_multiple_of(32) + self.data, 0);
        out
    }

    fn count(&mut self, key: &'static str, value: u32) {
        self.keys.push((key, 4, value.to_le_bytes().to_vec()));
    }

    fn float(&mut self, key: &'static str, value: f32) {
        self.keys.push((key, 6, value.to_le_bytes().to_vec()));
    }

    fn text(&mut self, key: &'static str, value: &str) {
        self.keys.push((key, 8, string(value)));
    }

    fn tensor(&mut self, name: &str, shape: &[u64], code: u32) {
        let block = header::block_type(code).unwrap();
        let bytes = shape.iter().product::<u64>() / block.elements * block.bytes;
        self.tensors.push((name.to_owned(), shape.to_vec(), code, self.data as u64));
        self.data += usize::try_from(bytes.next_multiple_of(32)).unwrap();
    }
}

/// A one-layer llama with 4 heads of 8, 2 KV heads, q8_0 matrices and a tied head.
fn llama() -> Writer {
    let mut w = Writer { tensor_count: None, key_count: None, keys: vec![], tensors: vec![], data: 0 };
    w.text("general.architecture", "llama");
    w.count("llama.embedding_length", 32);
    w.count("llama.block_count", 1);
    w.count("llama.attention.head_count", 4);
    w.count("llama.attention.head_count_kv", 2);
    w.count("llama.rope.dimension_count", 8);
    w.count("llama.feed_forward_length", 64);
    w.count("llama.context_length", 512);
    w.float("llama.attention.layer_norm_rms_epsilon", 1e-5);
    w.float("llama.rope.freq_base", 500_000.0);
    w.count("tokenizer.ggml.eos_token_id", 2);
    let tokens = [8u32.to_le_bytes().to_vec(), 2u64.to_le_bytes().to_vec(), string("a"), string("b")];
    w.keys.push(("tokenizer.ggml.tokens", 9, tokens.concat()));
    w.tensor("token_embd.weight", &[HIDDEN, VOCAB], 8);
    w.tensor("output_norm.weight", &[HIDDEN], 0);
    w.tensor("blk.0.attn_norm.weight", &[HIDDEN], 0);
    w.tensor("blk.0.ffn_norm.weight", &[HIDDEN], 0);
    for (name, rows, columns) in [
        ("attn_q", 32, 32),
        ("attn_k", 16, 32),
        ("attn_v", 16, 32),
        ("attn_output", 32, 32),
        ("ffn_gate", 64, 32),
        ("ffn_up", 64, 32),
        ("ffn_down", 32, 64),
    ] {
        w.tensor(&format!("blk.0.{name}.weight"), &[columns, rows], 8);
    }
    w
}

fn open(bytes: &[u8]) -> Result<GgufModel, WeightsError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    fs::write(&path, bytes).unwrap();
    GgufModel::open(&path)
}

fn refused(bytes: &[u8]) -> String {
    let error = open(bytes).unwrap_err().to_string();
    error.split_once("model.gguf: ").map_or(error.clone(), |(_, tail)| tail.to_owned())
}

#[test]
fn dimensions_roles_and_block_bytes_come_from_the_file() {
    let model = open(&llama().bytes()).unwrap();
    let a = &model.architecture;
    assert_eq!((a.family, a.hidden_size, a.layers, a.ffn_size, a.vocab_size), (Family::Llama, 32, 1, 64, 64));
    assert_eq!((a.heads, a.kv_heads, a.head_dim, a.max_positions), (4, 2, 8, 512));
    assert_eq!((a.tied_head, a.qk_norm, a.biases), (true, false, Biases::default()));
    assert_eq!((a.rope.theta, a.rope.scaling), (500_000.0, RopeScaling::None));
    assert_eq!((a.native_dtype, a.eos_tokens.as_slice()), (Some(Dtype::Gguf), [2].as_slice()));
    // 34 bytes for each 32 elements of q8_0.
    assert_eq!(model.inventory.bytes_of(Role::Embedding), Bytes(64 * 34));
    assert_eq!(model.inventory.bytes_of(Role::Matrix), Bytes((32 + 16 + 16 + 32 + 64 + 64 + 32 * 2) * 34));
    assert_eq!(model.inventory.bytes_of(Role::Norm), Bytes(3 * 32 * 4));
    let down = model.inventory.tensors.iter().find(|t| t.name == "blk.0.ffn_down.weight").unwrap();
    assert_eq!(
        (down.shape.as_slice(), down.storage.as_str(), down.layer),
        ([32, 64].as_slice(), "q8_0", Some(0))
    );
}

#[test]
fn what_is_accepted_is_what_candle_reads() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    fs::write(&path, llama().bytes()).unwrap();
    let model = GgufModel::open(&path).unwrap();
    let inventory = model.inventory.clone();
    let (content, mut file) = model.into_candle().unwrap();
    assert_eq!(content.tensor_infos.len(), inventory.tensors.len());
    for info in &inventory.tensors {
        let tensor = content.tensor(&mut file, &info.name, &Device::Cpu).unwrap();
        assert_eq!(tensor.shape().dims(), info.shape, "{}", info.name);
        assert_eq!(tensor.storage_size_in_bytes() as u64, info.bytes.0, "{}", info.name);
    }
}

#[test]
fn block_sizes_are_those_of_candle_and_a_file_it_wrote_is_understood() {
    let types = [
        (0, GgmlDType::F32),
        (1, GgmlDType::F16),
        (2, GgmlDType::Q4_0),
        (3, GgmlDType::Q4_1),
        (6, GgmlDType::Q5_0),
        (7, GgmlDType::Q5_1),
        (8, GgmlDType::Q8_0),
        (9, GgmlDType::Q8_1),
        (10, GgmlDType::Q2K),
        (11, GgmlDType::Q3K),
        (12, GgmlDType::Q4K),
        (13, GgmlDType::Q5K),
        (14, GgmlDType::Q6K),
        (15, GgmlDType::Q8K),
        (30, GgmlDType::BF16),
    ];
    for (code, dtype) in types {
        let block = header::block_type(code).unwrap();
        assert_eq!((block.elements, block.bytes), (dtype.block_size() as u64, dtype.type_size() as u64));
    }
    let tensor = Tensor::zeros((2, 256), candle_core::DType::F32, &Device::Cpu).unwrap();
    let tensor = QTensor::quantize(&tensor, GgmlDType::Q4K).unwrap();
    let mut bytes = std::io::Cursor::new(Vec::new());
    let list = gguf_file::Value::Array(vec![gguf_file::Value::String("token".to_owned())]);
    gguf_file::write(&mut bytes, &[("tokenizer.ggml.tokens", &list)], &[("w", &tensor)]).unwrap();
    let bytes = bytes.into_inner();
    let header = header::read(bytes.as_slice(), bytes.len() as u64).unwrap();
    assert_eq!((header.tensors[0].shape.as_slice(), header.tensors[0].bytes), ([2, 256].as_slice(), 288));
}

#[test]
fn a_block_type_is_read_by_candle_or_refused_by_its_name() {
    let mut read = Vec::new();
    for code in 0..64 {
        // The matrices of this file have rows of 32.
        let Some(block) = header::block_type(code).filter(|block| block.elements <= HIDDEN) else { continue };
        let mut w = llama();
        w.tensor("output.weight", &[HIDDEN, VOCAB], code);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        fs::write(&path, w.bytes()).unwrap();
        match GgufModel::open(&path).and_then(GgufModel::into_candle) {
            Ok((content, mut file)) => {
                content.tensor(&mut file, "output.weight", &Device::Cpu).unwrap();
                read.push(block.name);
            }
            Err(error) => {
                let named = format!("tensor output.weight is stored as {}, which", block.name);
                assert!(error.to_string().contains(&named), "{error}");
            }
        }
    }
    assert_eq!(read, ["f32", "f16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "bf16"]);
}

#[test]
fn an_untied_qwen2_with_biases_and_a_qwen3_with_qk_norm_are_told_apart() {
    let rename = |from: Writer, family: &'static str| {
        let mut w = from;
        for (key, _, value) in &mut w.keys {
            match *key {
                "general.architecture" => *value = string(family),
                _ if key.starts_with("llama.") => {
                    *key = Box::leak(key.replacen("llama", family, 1).into_boxed_str());
                }
                _ => {}
            }
        }
        w
    };
    let mut qwen2 = rename(llama(), "qwen2");
    qwen2.tensor("output.weight", &[HIDDEN, VOCAB], 14);
    let error = refused(&qwen2.bytes());
    assert!(error.contains("rows of 32 elements, which blocks of 256 do not divide (q6_k)"), "{error}");
    let mut qwen2 = rename(llama(), "qwen2");
    qwen2.tensor("output.weight", &[HIDDEN, VOCAB], 1);
    for (name, rows) in [("q", 32), ("k", 16), ("v", 16)] {
        qwen2.tensor(&format!("blk.0.attn_{name}.bias"), &[rows], 0);
    }
    let model = open(&qwen2.bytes()).unwrap();
    assert_eq!(model.architecture.family, Family::Qwen2);
    assert_eq!(model.architecture.biases, Biases { qkv: true, o: false, mlp: false });
    assert!(!model.architecture.tied_head);
    assert_eq!(model.inventory.bytes_of(Role::Head), Bytes(64 * 32 * 2));

    let mut qwen3 = rename(llama(), "qwen3");
    qwen3.tensor("blk.0.attn_q_norm.weight", &[8], 0);
    qwen3.tensor("blk.0.attn_k_norm.weight", &[8], 0);
    let model = open(&qwen3.bytes()).unwrap();
    assert!(model.architecture.qk_norm && model.architecture.family == Family::Qwen3);
}

/// A llama file with a table of what its rotary frequencies are divided by.
fn with_divisors(mut w: Writer, divisors: &[f32]) -> Vec<u8> {
    let at = w.data;
    w.tensor("rope_freqs.weight", &[divisors.len() as u64], 0);
    let (mut bytes, data) = (w.bytes(), w.data);
    let begin = bytes.len() - data + at;
    let table: Vec<u8> = divisors.iter().flat_map(|divisor| divisor.to_le_bytes()).collect();
    bytes[begin..begin + table.len()].copy_from_slice(&table);
    bytes
}

/// Divisors of Llama-3.2-1B's scaling for heads of 8 as llama.cpp's converter computes them: wavelengths of 6.28, 167, 4443 and 118,144 positions
/// of an original context of 8192, between 2048 and 8192 a mean.
const LLAMA3_DIVISORS: [f32; 4] = [1.0, 1.0, 3.292_262, 32.0];

#[test]
fn rotary_scaling_is_read_and_a_table_of_divisors_is_llama_3_s_or_refused() {
    let mut w = llama();
    w.text("llama.rope.scaling.type", "linear");
    w.float("llama.rope.scaling.factor", 4.0);
    assert_eq!(open(&w.bytes()).unwrap().architecture.rope.scaling, RopeScaling::Linear { factor: 4.0 });
    let model = open(&with_divisors(llama(), &LLAMA3_DIVISORS)).unwrap();
    let llama3 = RopeScaling::Llama3 {
        factor: 32.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_positions: 8192,
    };
    assert_eq!(model.architecture.rope.scaling, llama3);
    assert_eq!(model.inventory.bytes_of(Role::Unused), Bytes(16));

    let unlike = "rope_freqs.weight is a table of frequencies that are not scaled as Llama 3's";
    for other in [[1.0, 1.0, 3.3, 32.0], [0.0; 4], [2.0, 2.0, 2.0, 2.0], [1.0, 1.0, 3.29, f32::MAX]] {
        assert!(refused(&with_divisors(llama(), &other)).contains(unlike), "{other:?}");
    }
    assert!(refused(&with_divisors(w, &LLAMA3_DIVISORS)).contains(unlike), "two scalings");
    assert!(refused(&with_divisors(llama(), &[1.0; 8])).contains("[8]"), "a table of another length");
}

/// Each case plants one wrong field in a valid file and expects it to be named.
#[test]
fn every_lie_in_a_header_is_named() {
    type Lie = fn(&mut Writer);
    let lies: [(Lie, &str); 25] = [
        (|w| w.tensor_count = Some(1 << 63), "claims 9223372036854775808 tensors"),
        (|w| w.key_count = Some(u64::MAX), "claims 18446744073709551615 metadata keys"),
        (|w| w.tensors[0].1 = vec![1 << 32, 1 << 32], "whose size in bytes overflows"),
        (|w| w.tensors[0].1 = vec![1 << 40, 1 << 20], "bytes at offset 0, but the file holds"),
        (|w| w.tensors[0].1 = vec![32, 0], "has a dimension of 0 in [0, 32]"),
        (|w| w.tensors[0].1 = vec![], "has 0 dimensions"),
        (|w| w.tensors[0].1 = vec![1; 5], "has 5 dimensions, not 1 to 4"),
        (|w| w.tensors[0].1 = vec![33, 64], "rows of 33 elements, which blocks of 32 do not divide"),
        (|w| w.tensors[0].3 = 1 << 40, "at offset 1099511627776, but the file holds"),
        (|w| w.tensors[0].3 = u64::MAX - 31, "at offset 18446744073709551584, but the file holds"),
        (|w| w.tensors[0].3 = 7, "lies at offset 7, which is not a multiple of the alignment 32"),
        (|w| w.tensors[1].3 = 0, "which ends at"),
        (|w| w.tensors[0].2 = 77, "tensor token_embd.weight has the unknown type 77"),
        (|w| w.tensors[0].2 = 20, "is stored as iq4_nl, which the engine has no kernels for"),
        (|w| w.tensors[1].0 = "token_embd.weight".to_owned(), "tensor token_embd.weight appears twice"),
        (|w| w.count("general.alignment", 0), "general.alignment is 0, not a power of two"),
        (|w| w.count("general.alignment", 48), "general.alignment is 48, not a power of two"),
        (|w| w.count("general.alignment", 1 << 31), "general.alignment is 2147483648, not a power of two"),
        (|w| w.count("llama.block_count", 1), "metadata key llama.block_count appears twice"),
        (|w| w.keys.push(("k", 99, vec![0; 8])), "metadata key k has the unknown value type 99"),
        (|w| w.keys.push(("k", 7, vec![2])), "metadata key k is a boolean with the value 2"),
        (|w| w.keys.push(("k", 8, vec![0xff; 8])), "claims 18446744073709551615 bytes, above the limit"),
        (|w| w.keys.push(("a\0b", 7, vec![1])), "a metadata key at byte"),
        (|w| w.keys.push(("k", 9, [9u32.to_le_bytes(); 4].concat())), "is an array of arrays"),
        (
            |w| w.keys.push(("k", 9, [&[0; 4][..], &[0xff; 8]].concat())),
            "claims 18446744073709551615 array elements",
        ),
    ];
    for (lie, message) in lies {
        let mut writer = llama();
        lie(&mut writer);
        let error = refused(&writer.bytes());
        assert!(error.contains(message), "gave: {error}\nwant: {message}");
    }
}

#[test]
fn dimensions_that_do_not_fit_the_tensors_are_named() {
    type Lie = fn(&mut Writer);
    let set = |w: &mut Writer, key: &str, value: u32| {
        w.keys.iter_mut().find(|(k, ..)| *k == key).unwrap().2 = value.to_le_bytes().to_vec();
    };
    let cases = [
        ("llama.block_count", 2, "has no tensor blk.1.attn_norm.weight of shape [32]"),
        ("llama.block_count", u32::MAX, "metadata key llama.block_count is 4294967295, outside 1..=1024"),
        ("llama.attention.head_count", 0, "metadata key llama.attention.head_count is 0, outside"),
        ("llama.attention.head_count_kv", 3, "llama.attention.head_count_kv is 3 with 4 heads of 8"),
        ("llama.rope.dimension_count", 4, "llama.rope.dimension_count is 4 with 4 heads of 8"),
        ("llama.feed_forward_length", 96, "has shape [64, 32], but the config implies [96, 32]"),
        ("llama.embedding_length", 64, "llama.rope.dimension_count is 8 with 4 heads of 16"),
    ];
    for (key, value, message) in cases {
        let mut writer = llama();
        set(&mut writer, key, value);
        let error = refused(&writer.bytes());
        assert!(error.contains(message), "gave: {error}\nwant: {message}");
    }
    let cases: [(Lie, &str); 6] = [
        (
            |w| w.keys[0].2 = string("mamba"),
            r#"architecture "mamba" is not supported; llama, qwen2, qwen3 and qwen3moe are"#,
        ),
        (|w| drop(w.keys.remove(0)), "metadata key general.architecture is missing"),
        (|w| w.float("llama.attention.key_length", 8.0), "key_length is 8, not a whole number"),
        (|w| w.count("llama.expert_count", 8), "blk.0.ffn_down_exps.weight is missing"),
        (|w| w.tensor("blk.0.extra.weight", &[1], 0), "does not have: blk.0.extra.weight"),
        (|w| drop(w.tensors.remove(0)), "token_embd.weight is missing"),
    ];
    for (lie, message) in cases {
        let mut writer = llama();
        lie(&mut writer);
        let error = refused(&writer.bytes());
        assert!(error.contains(message), "gave: {error}\nwant: {message}");
    }
}

#[test]
fn no_infinity_or_nan_becomes_a_dimension() {
    for value in [f32::NAN, f32::INFINITY, -1.0] {
        let mut writer = llama();
        writer.keys.retain(|(key, ..)| *key != "llama.rope.freq_base");
        writer.float("llama.rope.freq_base", value);
        let error = refused(&writer.bytes());
        assert!(error.contains("llama.rope.freq_base is"), "{error}");
    }
}

#[test]
fn other_files_and_other_versions_are_refused() {
    assert!(refused(b"PK\x03\x04 and so on").starts_with("not a GGUF file: it begins with [50, 4b, 03, 04]"));
    assert!(refused(b"").starts_with("the file ends at byte 0, inside the magic at byte 0"));
    assert!(refused(b"GGUF\x00\x00\x00\x03").starts_with("GGUF version 50331648 is not supported"));
    assert!(refused(b"GGUF\x01\x00\x00\x00").starts_with("GGUF version 1 is not supported"));
}

#[test]
fn a_file_cut_anywhere_is_an_error() {
    let bytes = llama().bytes();
    for length in (0..bytes.len()).step_by(7) {
        assert!(open(&bytes[..length]).is_err(), "{length} of {} bytes", bytes.len());
    }
}

proptest! {
    #[test]
    fn no_corruption_of_a_header_panics(
        flips in prop::collection::vec((0usize..1200, any::<u8>()), 1..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = llama().bytes();
        for (place, value) in flips {
            bytes[place] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        fs::write(&path, &bytes).unwrap();
        if let Ok(model) = GgufModel::open(&path) {
            let names: Vec<_> = model.inventory.tensors.iter().map(|t| t.name.clone()).collect();
            match model.into_candle() {
                Ok((content, mut file)) => {
                    for name in names {
                        content.tensor(&mut file, &name, &Device::Cpu).unwrap();
                    }
                }
                Err(error @ WeightsError::Gguf { .. }) => {
                    prop_assert!(error.to_string().contains("stored as mxfp4"), "{}", error);
                }
                Err(error) => prop_assert!(matches!(error, WeightsError::NotFinite { .. }), "{}", error),
            }
        }
    }
}

#[test]
fn a_stated_vocabulary_is_at_least_one_and_no_larger_than_the_table() {
    let with = |kind: u32, value: Vec<u8>| {
        let mut writer = llama();
        writer.keys.push(("llama.vocab_size", kind, value));
        writer.bytes()
    };
    for (kind, value) in [
        (5, (-1_i32).to_le_bytes().to_vec()),
        (11, (-1_i64).to_le_bytes().to_vec()),
        (11, i64::MIN.to_le_bytes().to_vec()),
        (4, 0_u32.to_le_bytes().to_vec()),
        (4, 65_u32.to_le_bytes().to_vec()),
        (10, u64::MAX.to_le_bytes().to_vec()),
    ] {
        let error = refused(&with(kind, value));
        assert!(error.contains("llama.vocab_size"), "{error}");
    }
    open(&with(4, 64_u32.to_le_bytes().to_vec())).unwrap();
    open(&with(4, 60_u32.to_le_bytes().to_vec())).unwrap();
}

/// A fixture over two files, as `llama-gguf-split` writes them: all metadata in the first.
fn split(folder: &Path) -> (PathBuf, PathBuf) {
    let whole = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models/llama-q8_0.gguf");
    let mut file = File::open(&whole).unwrap();
    let content = Content::read(&mut file).unwrap();
    let names: Vec<&String> = content.tensor_infos.keys().collect();
    let tensors: Vec<_> =
        names.iter().map(|name| content.tensor(&mut file, name, &Device::Cpu).unwrap()).collect();
    let half = names.len() / 2;
    for (at, part) in [0..half, half..names.len()].into_iter().enumerate() {
        let at = u16::try_from(at).unwrap();
        let keys = [
            ("split.no", gguf_file::Value::U16(at)),
            ("split.count", gguf_file::Value::U16(2)),
            ("split.tensors.count", gguf_file::Value::I32(i32::try_from(names.len()).unwrap())),
        ];
        let mut metadata: Vec<_> = keys.iter().map(|(key, value)| (*key, value)).collect();
        if at == 0 {
            metadata.extend(content.metadata.iter().map(|(key, value)| (key.as_str(), value)));
        }
        let tensors: Vec<_> = part.map(|each| (names[each].as_str(), &tensors[each])).collect();
        let mut file = File::create(folder.join(format!("tiny-0000{}-of-00002.gguf", at + 1))).unwrap();
        gguf_file::write(&mut file, &metadata, &tensors).unwrap();
    }
    (whole, folder.join("tiny-00001-of-00002.gguf"))
}

#[test]
fn a_model_over_several_files_is_the_one_they_are_parts_of() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, first) = split(folder.path());
    let second = folder.path().join("tiny-00002-of-00002.gguf");
    let (one, two) = (GgufModel::open(&whole).unwrap(), GgufModel::open(&first).unwrap());
    assert_eq!((&one.architecture, &one.inventory), (&two.architecture, &two.inventory));
    assert_eq!(two.paths(), [first.clone(), second.clone()]);
    for info in &one.architecture.inventory(Dtype::Gguf).tensors {
        if info.shape.len() == 2 {
            assert_eq!(one.matrix(info).unwrap(), two.matrix(info).unwrap(), "{}", info.name);
        } else {
            assert_eq!(one.vector(info).unwrap(), two.vector(info).unwrap(), "{}", info.name);
        }
    }
    let (_, shape, files) = GgufModel::open_shape(&first).unwrap();
    assert_eq!((shape.total_bytes(), files.len()), (one.inventory.total_bytes(), 2));

    let error = two.into_candle().unwrap_err().to_string();
    assert!(error.contains("candle's own reader takes one"), "{error}");
    let error = GgufModel::open_shape(&second).unwrap_err().to_string();
    assert!(error.contains("give the first of them"), "{error}");
    fs::remove_file(&second).unwrap();
    let error = GgufModel::open_shape(&first).unwrap_err().to_string();
    assert!(error.contains("tiny-00002-of-00002.gguf"), "{error}");
}

#[test]
fn the_shape_of_a_file_that_lacks_a_matrix_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let mut less = llama();
    less.tensors.retain(|(name, ..)| name != "blk.0.ffn_up.weight");
    fs::write(&path, less.bytes()).unwrap();
    let error = GgufModel::open_shape(&path).unwrap_err().to_string();
    assert!(error.ends_with("tensor blk.0.ffn_up.weight is missing"), "{error}");
}
