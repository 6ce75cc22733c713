//! The models that are benchmarked, each with its arithmetic: parameters, bytes of a decode step at batch 1, and what a token keeps.

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

/// Parameters, weight bytes of a step at batch 1, KV bytes that a token adds, and state of a sequence, all as published.
#[test]
fn every_benchmarked_model_has_its_parameters_and_its_bytes() {
    let table = [
        // Layer: attention 2880·(64 + 2·8)·64 + 4096·2880 = 26,542,080 with biases 8,064 and sinks 64, router 128·2880 + 128, experts
        // 128·(5760·2880 + 5760 + 2880·2880 + 2880), norms 5760; 36 of them, two tables of 201,088·2880, a norm. A step: of the experts
        // 4 in 128 of 60.93 GB, the rest in bf16.
        ("gpt-oss-120b", 116_829_156_672, 5_002_902_144, 73_728, 0),
        // The same with 24 layers of 32 experts: 4 in 32.
        ("gpt-oss-20b", 20_914_757_184, 3_708_083_328, 49_152, 0),
        // State: 30 layers · (32·128·128·4 B + 3·8192·2 B) = 64,389,120 B. KV: 10 layers · 2·2·256·2 B. A step: 2.95 B of 34.66 B.
        ("Qwen3.5-35B-A3B", 34_660_610_688, 5_892_859_136, 20_480, 64_389_120),
        // 48 · (48·128·128·4 + 3·10,240·2). KV: 16 layers · 2·4·256·2 B.
        ("Qwen3.5-27B", 26_895_998_464, 51_249_200_128, 65_536, 153_944_064),
        // 45 · (64·128·128·4 + 3·12,288·2): 384 MB read and written. KV: 15 · 2·2·256·2.
        ("Qwen3.5-397B-A17B", 396_346_350_336, 32_663_844_352, 30_720, 192_061_440),
        // 36 · (32·128·128·4 + 3·8192·2). KV: 12 · 2·2·256·2.
        ("Qwen3-Next-80B-A3B", 79_674_391_296, 7_127_528_960, 24_576, 77_266_944),
        // fp8 in blocks: 20,434,649,088 of 653,908,770,816 routed weights, the rest with head and router in bf16. KV 61 · 576 · 2 B.
        ("DeepSeek-V3", 671_026_419_200, 37_668_475_232, 70_272, 0),
        // An indexer in each of 61 layers: 64·128·1536 + 128·7168 + 64·7168 + 256, and 132 B of a token.
        ("DeepSeek-V3.2", 671_877_944_064, 38_548_200_640, 61 * (576 * 2 + 132), 0),
        ("GLM-5", 743_911_218_432, 81_666_330_624, 78 * (576 * 2 + 132), 0),
        // Of the experts 60·8·3·7168·2048 in 4.5 bits, 11,890,851,840 B; attention 61·101,122,048, shared 60·44,040,192, dense 396,361,728,
        // router 60·384·7168 and head 163,840·7168 in bf16, 21,093,548,032 B; norms and corrections 2,105,344 B.
        ("Kimi-K2.5", 1_026_408_232_448, 32_986_505_216, 70_272, 0),
        ("Qwen3-235B-A22B", 235_093_634_560, 43_136_867_328, 192_512, 0),
        ("Llama-3.1-405B", 405_853_388_800, 807_504_084_992, 516_096, 0),
        // KV of a token in all 62 layers: 2·16·128·2 B.
        ("Gemma-3-27B", 27_009_346_304, 54_018_692_608, 62 * 8192, 0),
        // 25 layers of 2·8·256·2 B and 5 of 2·2·512·2 B.
        ("Gemma-4-26B-A4B", 25_233_141_790, 7_645_061_180, 25 * 8192 + 5 * 4096, 0),
        // 50 layers of 2·16·256·2 B and 10 of 2·4·512·2 B.
        ("Gemma-4-31B", 30_697_345_340, 61_394_690_680, 50 * 16_384 + 10 * 8192, 0),
        ("GLM-4.7", 352_797_829_024, 65_712_668_288, 376_832, 0),
        // fp8 in blocks. KV 62 · 2·8·128·2 B.
        ("MiniMax-M2.5", 228_689_764_864, 11_082_568_704, 253_952, 0),
        // State: 23 · (4096·128·4 B + 3·6144·2 B). KV: 6 · 2·2·128·2 B.
        ("Nemotron-3-Nano-30B-A3B", 31_577_940_288, 6_455_515_520, 6144, 49_082_368),
        // 40 · (8192·128·4 + 3·10,240·2). KV: 8 · 2·2·128·2.
        ("Nemotron-3-Super-120B-A12B", 120_668_707_840, 24_466_774_016, 8192, 170_229_760),
        ("Llama-4-Scout-17B-16E", 107_769_861_120, 32_276_817_920, 196_608, 0),
        ("Llama-4-Maverick-17B-128E", 400_711_848_960, 32_300_410_880, 196_608, 0),
        ("Phi-4", 14_659_507_200, 28_291_409_920, 204_800, 0),
        // Keys of 192 and values of 128: 9 layers of 4 heads and 39 of 8, 2 B each.
        ("MiMo-V2-Flash", 308_778_780_864, 15_499_108_992, (9 * 4 + 39 * 8) * 320 * 2, 0),
    ];
    for (name, parameters, weights, kv_per_token, state) in table {
        let (_, inventory, ledger) = told(name);
        assert_eq!(inventory.parameters(), parameters, "parameters of {name}");
        assert_eq!(ledger.decode(1, 0).bytes.weights, Bytes(weights), "weights of {name}");
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
        ("mistral3", "Mistral3ForConditionalGeneration"),
    ] {
        let message = refusal(&json!({"model_type": model_type, "architectures": [class]}));
        assert!(
            message.contains(&format!("architecture {model_type} ({class}) is not supported")),
            "{message}"
        );
    }
    for (name, key, value) in [
        // GLM-5.2: some layers use the positions that another's indexer picked.
        ("GLM-5", "indexer_types", json!(vec!["full"; 78])),
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
    ] {
        let message = refusal(&changed(name, &[(key, value)]));
        assert!(message.contains(key), "{name}: {message}");
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
