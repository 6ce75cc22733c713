//! Files as llama.cpp quantises them: a step reads the blocks that are there.

use std::collections::BTreeMap;

use super::super::header::{Value, block_type};
use super::*;
use crate::ledger::Ledger;
use crate::units::Bytes;

const F32: u32 = 0;
const Q8_0: u32 = 8;
const Q4_K: u32 = 12;
const Q6_K: u32 = 14;
const MXFP4: u32 = 39;

/// A header in memory.
struct File(Header);

impl File {
    fn new(name: &str, counts: &[(&str, u64)]) -> Self {
        let mut metadata =
            BTreeMap::from([("general.architecture".to_owned(), Value::Text(name.to_owned()))]);
        let key = |suffix: &str| format!("{name}.{suffix}");
        metadata.extend(counts.iter().map(|(suffix, count)| (key(suffix), Value::Unsigned(*count))));
        metadata.insert(key("attention.layer_norm_rms_epsilon"), Value::Float(1e-6));
        metadata.insert(key("rope.freq_base"), Value::Float(1e6));
        Self(Header { metadata, tensors: Vec::new(), data_start: 0 })
    }

    fn tensor(&mut self, name: &str, shape: &[usize], code: u32) {
        let block = block_type(code).unwrap();
        let elements: u64 = shape.iter().map(|&d| d as u64).product();
        assert!((*shape.last().unwrap() as u64).is_multiple_of(block.elements), "{name}");
        self.0.tensors.push(TensorEntry {
            name: name.to_owned(),
            shape: shape.to_vec(),
            storage: block.name,
            offset: 0,
            bytes: elements / block.elements * block.bytes,
        });
    }

    fn read(&self) -> (Architecture, Inventory, Ledger) {
        let (architecture, inventory) = shape(&self.0).unwrap();
        let ledger = Ledger::new(&architecture, &inventory, Dtype::F16);
        (architecture, inventory, ledger)
    }
}

/// Qwen3-30B-A3B, each kind of tensor in the type that `of` gives for the layer.
fn qwen3_30b(of: impl Fn(&str, usize) -> u32) -> File {
    let mut file = File::new(
        "qwen3moe",
        &[
            ("embedding_length", 2048),
            ("block_count", 48),
            ("attention.head_count", 32),
            ("attention.head_count_kv", 4),
            ("attention.key_length", 128),
            ("attention.value_length", 128),
            ("feed_forward_length", 6144),
            ("expert_count", 128),
            ("expert_used_count", 8),
            ("expert_feed_forward_length", 768),
            ("context_length", 40_960),
        ],
    );
    file.tensor("token_embd.weight", &[151_936, 2048], of("token_embd", 0));
    file.tensor("output.weight", &[151_936, 2048], of("output", 0));
    file.tensor("output_norm.weight", &[2048], F32);
    for layer in 0..48 {
        let mut add = |name: &str, shape: &[usize]| {
            file.tensor(&format!("blk.{layer}.{name}.weight"), shape, of(name, layer));
        };
        add("attn_q", &[4096, 2048]);
        add("attn_k", &[512, 2048]);
        add("attn_v", &[512, 2048]);
        add("attn_output", &[2048, 4096]);
        add("ffn_gate_exps", &[128, 768, 2048]);
        add("ffn_up_exps", &[128, 768, 2048]);
        add("ffn_down_exps", &[128, 2048, 768]);
        for (name, shape) in [
            ("attn_norm", &[2048][..]),
            ("ffn_norm", &[2048]),
            ("attn_q_norm", &[128]),
            ("attn_k_norm", &[128]),
            ("ffn_gate_inp", &[128, 2048]),
        ] {
            file.tensor(&format!("blk.{layer}.{name}.weight"), shape, F32);
        }
    }
    file
}

/// Which tensors of so many layers `Q4_K_M` gives six bits.
fn q4_k_m(name: &str, layer: usize) -> u32 {
    let n = 48;
    let more = layer < n / 8 || layer >= 7 * n / 8 || (layer - n / 8) % 3 == 2;
    match name {
        "output" => Q6_K,
        "attn_v" | "ffn_down_exps" if more => Q6_K,
        _ => Q4_K,
    }
}

#[test]
fn a_mixture_of_q4_k_m_reads_its_own_blocks() {
    let (architecture, inventory, ledger) = qwen3_30b(q4_k_m).read();
    assert_eq!(inventory.parameters(), 30_532_122_624);
    // Published: 18.56 GB, 17.28 GiB.
    let gigabytes = inventory.total_bytes().as_f64() / 1e9;
    assert!((18.5..18.6).contains(&gigabytes), "{gigabytes}");
    // By hand: a layer's q, k and o 17,825,792 weights in 4.5 bits, v 1,048,576 and the experts' down 201,326,592 in 6.5625 in half the
    // layers and 4.5 in the others, gate and up 402,653,184 in 4.5; 8 of 128 experts; router and norms f32; the head in 6.5625.
    let half = |weights: u64| 24 * (weights * 9 / 16 + weights * 105 / 128);
    let dense =
        48 * 17_825_792 * 9 / 16 + half(1_048_576) + 48 * 4 * (128 * 2048 + 2 * 2048 + 2 * 128) + 4 * 2048;
    let experts = 48 * 402_653_184 * 9 / 16 + half(201_326_592);
    let head = 151_936 * 2048 * 105 / 128;
    let step = ledger.decode(1, 0).bytes;
    assert_eq!(step.weights, Bytes(dense + experts / 16 + head));
    assert_eq!(step.other, Bytes(2048 / 256 * 144), "one row of the embedding");
    assert!((1.9..1.94).contains(&(step.weights.as_f64() / 1e9)), "{}", step.weights);
    assert_eq!(architecture.stack.unwrap().to_string(), "48 × (full), 128 experts");
    // 3,029,091,328 weights in 8.5 bits, the router and the norms in f32.
    let (_, _, q8) = qwen3_30b(|name, _| if name.ends_with("inp") { F32 } else { Q8_0 }).read();
    assert_eq!(
        q8.decode(1, 0).bytes.weights.0,
        3_029_073_920 / 32 * 34 + 4 * (3_041_867_776 - 3_029_073_920)
    );
}

#[test]
fn mxfp4_moe_is_4_25_bits_for_experts_and_8_5_for_the_rest() {
    let of = |name: &str, _: usize| if name.ends_with("_exps") { MXFP4 } else { Q8_0 };
    let (_, inventory, ledger) = qwen3_30b(of).read();
    let experts = 48 * 128 * 3 * 2048 * 768_u64;
    assert_eq!(inventory.bytes_of(Role::Expert), Bytes(experts * 17 / 32));
    assert_eq!(ledger.decode(1, 0).distinct_experts, Some(8.0));
}

#[test]
fn every_block_type_of_ggml_has_its_bytes() {
    for (code, bits) in [
        (2, 4.5),
        (3, 5.0),
        (6, 5.5),
        (7, 6.0),
        (8, 8.5),
        (9, 9.0),
        (10, 2.625),
        (11, 3.4375),
        (12, 4.5),
        (13, 5.5),
        (14, 6.5625),
        (15, 9.125),
        (16, 2.0625),
        (17, 2.3125),
        (18, 3.0625),
        (19, 1.5625),
        (20, 4.5),
        (21, 3.4375),
        (22, 2.5625),
        (23, 4.25),
        (29, 1.75),
        (30, 16.0),
        (34, 1.6875),
        (35, 2.0625),
        (39, 4.25),
        (40, 4.5),
    ] {
        let block = block_type(code).unwrap();
        let found = (block.bytes * 8) as f64 / block.elements as f64;
        assert!((found - bits).abs() < 1e-9, "{}: {found}", block.name);
    }
    assert_eq!(block_type(38), None);
}

/// A layer of gpt-oss as its GGUF files name it.
fn gpt_oss() -> File {
    let mut file = File::new(
        "gpt-oss",
        &[
            ("embedding_length", 2880),
            ("block_count", 2),
            ("attention.head_count", 64),
            ("attention.head_count_kv", 8),
            ("attention.key_length", 64),
            ("attention.value_length", 64),
            ("attention.sliding_window", 128),
            ("feed_forward_length", 2880),
            ("expert_count", 32),
            ("expert_used_count", 4),
            ("context_length", 131_072),
        ],
    );
    file.tensor("token_embd.weight", &[201_088, 2880], Q8_0);
    file.tensor("output.weight", &[201_088, 2880], Q8_0);
    file.tensor("output_norm.weight", &[2880], F32);
    for layer in 0..2 {
        let mut add =
            |name: &str, shape: &[usize], code| file.tensor(&format!("blk.{layer}.{name}"), shape, code);
        add("attn_q.weight", &[4096, 2880], Q8_0);
        add("attn_k.weight", &[512, 2880], Q8_0);
        add("attn_v.weight", &[512, 2880], Q8_0);
        add("attn_output.weight", &[2880, 4096], Q8_0);
        add("attn_q.bias", &[4096], F32);
        add("attn_sinks.weight", &[64], F32);
        add("attn_norm.weight", &[2880], F32);
        add("post_attention_norm.weight", &[2880], F32);
        add("ffn_gate_inp.weight", &[32, 2880], F32);
        add("ffn_gate_inp.bias", &[32], F32);
        for name in ["gate", "up", "down"] {
            add(&format!("ffn_{name}_exps.weight"), &[32, 2880, 2880], MXFP4);
            add(&format!("ffn_{name}_exps.bias"), &[32, 2880], F32);
        }
    }
    file
}

#[test]
fn gpt_oss_has_windows_on_even_layers_and_routed_biases() {
    let (architecture, inventory, ledger) = gpt_oss().read();
    assert_eq!(architecture.stack.as_ref().unwrap().to_string(), "2 × (1 window 128 : 1 full), 32 experts");
    assert_eq!(inventory.bytes_of(Role::ExpertBias), Bytes(2 * 3 * 32 * 2880 * 4));
    assert_eq!(ledger.decode(1, 1000).bytes.kv_read, Bytes(2048 * (1000 + 128)));
    let routed = inventory.bytes_of(Role::Expert).0 + inventory.bytes_of(Role::ExpertBias).0;
    let rest = inventory.total_bytes().0 - routed - 201_088 * 2880 / 32 * 34;
    assert_eq!(ledger.decode(1, 0).bytes.weights, Bytes(rest + routed / 8));
    let layer = architecture.layer(1);
    assert_eq!(layer.feed_forward.mixture().unwrap().activation, Activation::ClampedSwiglu { limit: 7.0 });
}

#[test]
fn files_that_are_not_understood_are_refused_by_name() {
    let refused = |file: &File| shape(&file.0).unwrap_err().to_string();
    assert!(refused(&File::new("deepseek4", &[])).contains("deepseek4"));
    let mut more = gpt_oss();
    more.tensor("blk.0.hyper_connection.weight", &[32], F32);
    assert!(refused(&more).contains("blk.0.hyper_connection.weight is none of the GptOss family's tensors"));
    let mut less = gpt_oss();
    less.0.tensors.retain(|tensor| tensor.name != "blk.1.attn_output.weight");
    assert!(refused(&less).contains("blk.1.attn_output.weight is missing"), "{}", refused(&less));
    for (key, value, wanted) in [
        ("expert_used_count", 33, "expert_used_count"),
        ("expert_count", 31, "32 experts"),
        ("attention.key_length", 96, "rows for heads of 96"),
        ("rope.dimension_count", 66, "rotated is 66 of 64"),
        ("rope.dimension_count", 63, "rotated is 63 of 64"),
        ("attention.key_length", 63, "attention.key_length is 63 with 64 heads"),
        ("block_count", 1 << 40, "block_count"),
        ("embedding_length", 0, "embedding_length"),
        ("attention.sliding_window", 1 << 40, "sliding_window"),
    ] {
        let mut file = gpt_oss();
        file.0.metadata.insert(format!("gpt-oss.{key}"), Value::Unsigned(value));
        assert!(refused(&file).contains(wanted), "{key}: {}", refused(&file));
    }
    let mut narrow = qwen3_30b(q4_k_m);
    narrow.0.metadata.remove("qwen3moe.attention.key_length");
    narrow.0.metadata.insert("qwen3moe.embedding_length".to_owned(), Value::Unsigned(16));
    assert!(refused(&narrow).contains("key_length is 0 with 32 heads"), "{}", refused(&narrow));
    let mut windowed = qwen3_30b(q4_k_m);
    windowed.0.metadata.insert("qwen3moe.attention.sliding_window".to_owned(), Value::Unsigned(4096));
    assert!(refused(&windowed).contains("qwen3moe.attention.sliding_window"));
}

#[test]
fn what_no_engine_has_kernels_for_is_refused_only_where_it_would_run() {
    for (code, name) in [(9, "q8_1"), (15, "q8_k"), (20, "iq4_nl")] {
        let file = qwen3_30b(|_, _| code);
        let error = file.0.check_computable().unwrap_err().to_string();
        assert!(error.contains(&format!("stored as {name}")), "{error}");
        assert!(shape(&file.0).is_ok());
    }
    assert!(gpt_oss().0.check_computable().is_ok());
}
