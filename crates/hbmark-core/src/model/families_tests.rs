//! The models that are benchmarked: what a token keeps, what a step reads of it, and what is refused. Weights: `by_hand_tests.rs`.

use std::path::Path;

use serde_json::{Value, json};

use super::{
    Architecture, Dtype, Inventory, Layer, Mixer, QkNorm, Quantization, Reach, Role, RopeScaling,
    parse_config, presets,
};
use crate::ledger::Ledger;
use crate::units::Bytes;

fn shape(name: &str) -> Architecture {
    presets::find(name).unwrap_or_else(|| panic!("no shape {name}")).architecture
}

/// A shape as it is published, its tensors, and the ledger of both with a cache in bf16.
fn told(name: &str) -> (Architecture, Inventory, Ledger) {
    let architecture = shape(name);
    let dtype = architecture.quantization.as_ref().and_then(Quantization::dtype).unwrap_or(Dtype::Bf16);
    let inventory = architecture.inventory(dtype);
    let ledger = Ledger::new(&architecture, &inventory, Dtype::Bf16);
    (architecture, inventory, ledger)
}

/// Bytes that a token adds and that a sequence keeps whatever its length, with a cache in bf16.
#[test]
fn every_benchmarked_model_keeps_its_bytes_of_a_token_and_of_a_sequence() {
    /// Key and value of 2 B each in every layer that attends.
    fn keys_and_values(layers: u64, kv_heads: u64, head_dim: u64) -> u64 {
        2 * layers * kv_heads * head_dim * 2
    }
    /// A matrix of 128 × 128 at f32 for each value head, and the last 3 inputs of the convolution over its channels.
    fn delta_nets(layers: u64, value_heads: u64, channels: u64) -> u64 {
        layers * (value_heads * 128 * 128 * 4 + 3 * channels * 2)
    }
    /// A state of 128 at f32 for each inner channel, and the last 3 inputs of the convolution.
    fn mambas(layers: u64, inner: u64) -> u64 {
        layers * (inner * 128 * 4 + 3 * (inner + 2 * 8 * 128) * 2)
    }
    // 512 values and 64 turned ones; an indexer's key is 128 B of fp8 and an f32 scale.
    let (latent, indexed) = (576 * 2, 576 * 2 + 128 + 4);
    for (name, kv_per_token, state) in [
        ("gpt-oss-120b", keys_and_values(36, 8, 64), 0),
        ("gpt-oss-20b", keys_and_values(24, 8, 64), 0),
        ("Qwen3.5-35B-A3B", keys_and_values(10, 2, 256), delta_nets(30, 32, 8192)),
        ("Qwen3.5-27B", keys_and_values(16, 4, 256), delta_nets(48, 48, 10_240)),
        ("Qwen3.5-397B-A17B", keys_and_values(15, 2, 256), delta_nets(45, 64, 12_288)),
        ("Qwen3-Next-80B-A3B", keys_and_values(12, 2, 256), delta_nets(36, 32, 8192)),
        ("DeepSeek-V2-Lite", 27 * latent, 0),
        ("DeepSeek-V3", 61 * latent, 0),
        ("DeepSeek-V3.2", 61 * indexed, 0),
        ("GLM-5", 78 * indexed, 0),
        ("Kimi-K2.5", 61 * latent, 0),
        ("Qwen3-235B-A22B", keys_and_values(94, 4, 128), 0),
        ("Llama-3.1-405B", keys_and_values(126, 8, 128), 0),
        ("Gemma-3-27B", keys_and_values(62, 16, 128), 0),
        // A full layer keeps its key, and its normed copy as the value.
        ("Gemma-4-26B-A4B", keys_and_values(25, 8, 256) + keys_and_values(5, 2, 512), 0),
        ("Gemma-4-31B", keys_and_values(50, 16, 256) + keys_and_values(10, 4, 512), 0),
        ("GLM-4.7", keys_and_values(92, 8, 128), 0),
        ("MiniMax-M2.5", keys_and_values(62, 8, 128), 0),
        ("Nemotron-3-Nano-30B-A3B", keys_and_values(6, 2, 128), mambas(23, 64 * 64)),
        ("Nemotron-3-Super-120B-A12B", keys_and_values(8, 2, 128), mambas(40, 128 * 64)),
        ("Llama-4-Scout-17B-16E", keys_and_values(48, 8, 128), 0),
        ("Llama-4-Maverick-17B-128E", keys_and_values(48, 8, 128), 0),
        ("Phi-4", keys_and_values(40, 10, 128), 0),
        // Keys of 192 and values of 128: 9 layers of 4 heads and 39 of 8.
        ("MiMo-V2-Flash", (9 * 4 + 39 * 8) * (192 + 128) * 2, 0),
    ] {
        let (_, _, ledger) = told(name);
        assert_eq!(ledger.kv_bytes_per_token(), Bytes(kv_per_token), "KV of {name}");
        assert_eq!(ledger.state_bytes(), Bytes(state), "state of {name}");
    }
}

#[test]
fn gpt_oss_keeps_experts_in_4_25_bits_and_the_rest_in_16() {
    let (a, inventory, ledger) = told("gpt-oss-120b");
    assert_eq!(inventory.total_bytes(), Bytes(65_248_815_744));
    // 36·128·(5760 + 2880)·2880 weights: a byte for two and one for 32.
    let experts = 36 * 128 * 8640 * 2880_u64;
    assert_eq!(
        inventory.bytes_of(Role::Expert) + inventory.bytes_of(Role::ExpertScale),
        Bytes(experts * 17 / 32)
    );
    // 36·128·8640 biases of two bytes: 79.6 MB, of which a token at batch 1 reads 4 in 128.
    assert_eq!(inventory.bytes_of(Role::ExpertBias), Bytes(79_626_240));
    let blocks =
        inventory.tensors.iter().find(|t| t.name.ends_with("layers.0.mlp.experts.gate_up_proj_blocks"));
    assert_eq!(blocks.unwrap().shape, [128, 5760, 2880]);
    // 36,864 B a token in 18 full layers, and as many of the last 128.
    let read = |context: u64| ledger.decode(1, usize::try_from(context).unwrap()).bytes.kv_read.0;
    assert_eq!(read(8192), 36_864 * (8192 + 128));
    assert_eq!(read(100), 36_864 * 200);
    assert_eq!(a.stack.unwrap().to_string(), "36 × (1 window 128 : 1 full), 128 experts");
}

#[test]
fn gemma_reads_its_windows_and_ten_full_layers() {
    let (a, _, ledger) = told("Gemma-3-27B");
    let read = |context: usize| ledger.decode(1, context).bytes.kv_read.0;
    assert_eq!(read(8192), 81_920 * 8192 + 52 * 8192 * 1024);
    assert_eq!(read(131_071), 81_920 * 131_071 + 52 * 8192 * 1024);
    let attention = |layer: usize| match a.layer(layer) {
        Layer { mixer: Mixer::Attention(attention), .. } => attention,
        other => panic!("{other:?}"),
    };
    let thetas =
        |layer| attention(layer).rope.map(|rotary| (rotary.rope.theta.to_bits(), rotary.rope.scaling));
    assert_eq!(thetas(5), Some((1e6_f64.to_bits(), RopeScaling::Linear { factor: 8.0 })));
    assert_eq!(thetas(4), Some((1e4_f64.to_bits(), RopeScaling::None)));
    assert_eq!([5, 11, 59, 58].map(|layer| attention(layer).reach == Reach::Full), [true, true, true, false]);

    let fourth = shape("Gemma-4-26B-A4B");
    let Mixer::Attention(full) = fourth.layer(5).mixer else { panic!("attention") };
    assert_eq!((full.key_dim, full.kv_heads, full.shares_key), (512, 2, true));
    assert_eq!(full.rope.unwrap().dims, 128);
    let inventory = fourth.inventory(Dtype::Bf16);
    assert!(inventory.tensors.iter().all(|t| t.name != "model.layers.5.self_attn.v_proj.weight"));
    assert!(inventory.tensors.iter().any(|t| t.name == "model.layers.4.self_attn.v_proj.weight"));
}

#[test]
fn a_recurrent_state_is_read_and_written_whatever_the_context() {
    let (_, _, ledger) = told("Qwen3.5-35B-A3B");
    let step = |batch, context| ledger.decode(batch, context).bytes;
    assert_eq!(step(1, 0).kv_read, Bytes(64_389_120));
    assert_eq!(step(1, 0).kv_write, Bytes(64_389_120 + 20_480));
    assert_eq!(step(3, 1000).kv_read, Bytes(3 * (64_389_120 + 1000 * 20_480)));
    // The state, read and written, is the KV of 6,288 tokens.
    assert_eq!(2 * 64_389_120 / 20_480, 6288);
}

#[test]
fn an_indexer_reads_all_positions_and_its_choice_of_them() {
    let (_, _, ledger) = told("DeepSeek-V3.2");
    let read = |context: usize| ledger.decode(1, context).bytes.kv_read.0;
    assert_eq!(read(1000), 61 * 1000 * (132 + 1152));
    assert_eq!(read(100_000), 61 * (100_000 * 132 + 2048 * 1152));
    let (_, _, plain) = told("DeepSeek-V3");
    assert_eq!(plain.decode(1, 100_000).bytes.kv_read.0, 61 * 100_000 * 1152);
}

#[test]
fn a_chunk_is_read_from_its_start_and_layers_without_positions_read_all() {
    let (a, _, ledger) = told("Llama-4-Scout-17B-16E");
    // 36 layers of chunks and 12 full ones, 2·8·128·2 B each.
    assert_eq!(ledger.decode(1, 8192 + 100).bytes.kv_read.0, 4096 * (12 * 8292 + 36 * 100));
    let Mixer::Attention(full) = a.layer(3).mixer else { panic!("attention") };
    assert_eq!((full.reach, full.rope), (Reach::Full, None));
    let Mixer::Attention(local) = a.layer(2).mixer else { panic!("attention") };
    assert_eq!((local.reach, local.qk_norm), (Reach::Chunk { tokens: 8192 }, QkNorm::Unweighted));
}

fn refusal(document: &Value) -> String {
    parse_config(&document.to_string(), Path::new("config.json")).expect_err("refused").to_string()
}

/// A shipped config with keys of its language model changed.
pub(super) fn changed(name: &str, changes: &[(&str, Value)]) -> Value {
    let path = format!("{}/models/{name}.json", env!("CARGO_MANIFEST_DIR"));
    let mut document: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let nested = document.get("text_config").is_some();
    for (key, value) in changes {
        let map = if nested { &mut document["text_config"] } else { &mut document };
        map[*key] = value.clone();
    }
    document
}

#[test]
fn what_is_not_known_well_enough_is_refused_by_name_or_key() {
    for (model_type, class) in [
        ("deepseek_v4", "DeepseekV4ForCausalLM"),
        ("minimax_m3", "MiniMaxM3ForCausalLM"),
        ("kimi_k3", "KimiK3ForCausalLM"),
        ("step3p7", "Step3p7FlashForCausalLM"),
        ("olmo3", "Olmo3ForCausalLM"),
        ("granitemoehybrid", "GraniteMoeHybridForCausalLM"),
    ] {
        let message = refusal(&json!({"model_type": model_type, "architectures": [class]}));
        assert!(
            message.contains(&format!("architecture {model_type} ({class}) is not supported")),
            "{message}"
        );
    }
    for (name, key, value) in [
        // GLM-5.2: some layers use the positions that another's indexer picked.
        ("GLM-5", "indexer_types", json!([vec!["full"; 77], vec!["shared"]].concat())),
        ("DeepSeek-V3", "compress_ratios", json!([0, 4])),
        ("MiniMax-M2.5", "sparse_attention_config", json!({"use_sparse_attention": true})),
        ("Qwen3-32B", "hc_mult", json!(4)),
        ("Llama-3.1-8B", "hybrid_override_pattern", json!("M*")),
        ("Gemma-4-26B-A4B", "hidden_size_per_layer_input", json!(256)),
        ("Gemma-4-26B-A4B", "hidden_activation", json!("silu")),
        ("Gemma-4-26B-A4B", "use_double_wide_mlp", json!(true)),
        ("Qwen3.5-35B-A3B", "mlp_only_layers", json!([1])),
        ("Nemotron-3-Nano-30B-A3B", "hybrid_override_pattern", json!("X".repeat(52))),
        ("Nemotron-3-Nano-30B-A3B", "hybrid_override_pattern", json!("M")),
        ("Nemotron-3-Nano-30B-A3B", "mlp_hidden_act", json!("silu")),
        ("gpt-oss-20b", "layer_types", json!(vec!["linear_attention"; 24])),
        ("gpt-oss-20b", "num_local_experts", json!(1_000_000_000)),
        ("gpt-oss-20b", "swiglu_limit", json!(-1)),
        ("Qwen3.5-27B", "linear_conv_kernel_dim", json!(0)),
        ("Qwen3.5-27B", "linear_value_head_dim", json!(1 << 30)),
        ("Qwen3.5-27B", "mamba_ssm_dtype", json!("float8")),
        ("DeepSeek-V3.2", "index_topk", json!(0)),
        ("DeepSeek-V3.2", "index_n_heads", json!(1 << 20)),
        ("MiMo-V2-Flash", "hybrid_layer_pattern", json!(vec![2; 48])),
        ("Llama-4-Scout-17B-16E", "attention_chunk_size", json!(0)),
        ("MiniMax-M2.5", "shared_intermediate_size", json!(512)),
        ("MiniMax-M2.5", "attn_type_list", json!([1, 0])),
        ("MiniMax-M2.5", "layernorm_mlp_beta", json!(3.5)),
        ("MiniMax-M2.5", "rotary_dim", json!(63)),
        ("MiniMax-M2.5", "partial_rotary_factor", json!(0.25)),
        ("Qwen3-235B-A22B", "use_qk_norm", json!(false)),
        ("GLM-4.7", "scoring_func", json!("softmax")),
        ("GLM-4.7", "topk_method", json!("greedy")),
    ] {
        let message = refusal(&changed(name, &[(key, value)]));
        assert!(message.contains(key), "{name}: {message}");
    }
}

/// Qwen3-Coder-480B, MiniMax-M2.7 of NVIDIA and GLM-5.1 of NVIDIA.
#[test]
fn a_key_that_says_what_its_family_has_anyhow_changes_nothing() {
    for (name, key, value) in [
        ("Qwen3-235B-A22B", "use_qk_norm", json!(true)),
        ("MiniMax-M2.5", "partial_rotary_factor", json!(0.5)),
        ("GLM-5", "indexer_types", json!(vec!["full"; 78])),
    ] {
        let document = changed(name, &[(key, value)]);
        let read = parse_config(&document.to_string(), Path::new("config.json")).unwrap();
        assert_eq!(read, shape(name), "{name}");
    }
}

#[test]
fn keys_of_a_nested_model_are_named_where_they_stand() {
    let inner = changed("Gemma-4-26B-A4B", &[("hidden_size", json!(-1))]);
    assert!(refusal(&inner).contains("`text_config.hidden_size` is -1"));
    let mut outer = changed("Gemma-4-26B-A4B", &[]);
    outer["quantization_config"] = json!({"quant_method": "spqr"});
    assert!(refusal(&outer).contains("`quantization_config.quant_method` = \"spqr\""));
    outer["text_config"] = json!(7);
    assert!(refusal(&outer).contains("`text_config` is 7"));
}

/// Rotates so many elements of the heads of the first kind of layers, which have 64.
fn rotated(a: &mut Architecture, dims: usize) {
    let Mixer::Attention(attention) = &mut a.stack.as_mut().unwrap().kinds[0].mixer else { return };
    attention.rope.as_mut().unwrap().dims = dims;
}

#[test]
fn a_stack_of_a_hostile_result_is_refused() {
    for change in [
        |a: &mut Architecture| a.stack.as_mut().unwrap().order[0] = 9,
        |a: &mut Architecture| a.stack.as_mut().unwrap().order.clear(),
        |a: &mut Architecture| a.experts = None,
        |a: &mut Architecture| a.experts.as_mut().unwrap().count = 7,
        |a: &mut Architecture| {
            let Mixer::Attention(attention) = &mut a.stack.as_mut().unwrap().kinds[0].mixer else { return };
            attention.key_dim = usize::MAX;
        },
        |a: &mut Architecture| rotated(a, 66),
        |a: &mut Architecture| rotated(a, 63),
    ] {
        let mut a = shape("gpt-oss-20b");
        a.check().unwrap();
        change(&mut a);
        assert!(a.check().is_err(), "{a:?}");
    }
}

#[test]
fn modelopt_beside_the_config_is_read_as_its_quantisation() {
    let folder = tempfile::tempdir().unwrap();
    let config = changed("DeepSeek-V3", &[("quantization_config", Value::Null)]);
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let own = json!({"producer": {"name": "modelopt"}, "quantization": {
        "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
        "exclude_modules": ["lm_head", "*self_attn*"]}});
    std::fs::write(folder.path().join("hf_quant_config.json"), own.to_string()).unwrap();
    let a = super::read_config(&folder.path().join("config.json")).unwrap();
    let quantization = a.quantization.unwrap();
    assert_eq!((quantization.dtype(), quantization.kv_cache), (Some(Dtype::Nvfp4), Some(Dtype::Fp8)));
}

/// Storage as `DeepSeek`-V3's own config says, changed to another writer's.
#[test]
fn exceptions_leave_attention_in_16_bits() {
    let own = json!({"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head", "model.layers.*.self_attn*"]});
    let a = parse_config(
        &changed("DeepSeek-V3", &[("quantization_config", own)]).to_string(),
        Path::new("config.json"),
    )
    .unwrap();
    let inventory = a.inventory(Dtype::Nvfp4);
    let of = |name: &str| inventory.tensors.iter().find(|t| t.name == name).unwrap().storage.as_str();
    assert_eq!(of("model.layers.7.self_attn.o_proj.weight"), "bf16");
    assert_eq!(of("model.layers.7.mlp.experts.9.up_proj.weight"), "nvfp4");
    assert_eq!(of("model.layers.7.mlp.experts.9.up_proj.weight_scale_2"), "f32");
}

#[test]
fn a_layer_without_a_mixer_is_counted_as_what_it_is() {
    let nemotron = presets::find("Nemotron-3-Nano-30B-A3B").unwrap().architecture;
    let shown = nemotron.stack.unwrap().to_string();
    for count in ["52 × (", "23 mamba", "23 feed-forward", "6 full"] {
        assert!(shown.contains(count), "{count}: {shown}");
    }
}
