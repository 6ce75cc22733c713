//! Fixtures parse to the published dimensions; what would change a number is refused by name; nothing panics.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use serde_json::{Value, json};

use super::{limits, parse_config, read_config};
use crate::model::{
    Architecture, Biases, Dtype, Experts, Family, Format, Layer, Mixer, ModelError, Multipliers, Norms,
    QkNorm, Reach, Role, RopeScaling, Routing, Scales, YarnShape,
};
use crate::units::Bytes;

const FIXTURES: [&str; 15] = [
    "deepseek-v3",
    "gemma-2-9b",
    "glm-4-9b",
    "granite-3.3-8b",
    "llama-2-13b",
    "llama-3.1-8b",
    "llama-3.2-1b-resaved-fp16",
    "mistral-7b-v0.3",
    "mixtral-8x7b",
    "olmo-2-7b",
    "qwen2.5-7b",
    "qwen3-0.6b",
    "qwen3-30b-a3b",
    "smollm2-transformers5",
    "smollm3-3b",
];

/// Shipped shapes whose layers differ, one of each family.
const LAYERED: [&str; 10] = [
    "DeepSeek-V3.2",
    "gpt-oss-20b",
    "Qwen3.5-35B-A3B",
    "Gemma-4-26B-A4B",
    "GLM-4.7",
    "MiniMax-M2.5",
    "Nemotron-3-Super-120B-A12B",
    "Llama-4-Maverick-17B-128E",
    "Phi-4",
    "MiMo-V2-Flash",
];

fn fixture_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../tests/fixtures/configs/{name}.json"))
}

fn document(name: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(fixture_path(name)).unwrap()).unwrap()
}

fn fixture(name: &str) -> Architecture {
    read_config(&fixture_path(name)).unwrap()
}

fn parse(document: &Value) -> Result<Architecture, ModelError> {
    parse_config(&document.to_string(), Path::new("config.json"))
}

/// A fixture with keys changed by JSON pointer; what is not there is added.
fn with(name: &str, changes: &[(&str, Value)]) -> Result<Architecture, ModelError> {
    let mut document = document(name);
    for (key, value) in changes {
        document[*key] = value.clone();
    }
    parse(&document)
}

fn without(name: &str, key: &str) -> Result<Architecture, ModelError> {
    let mut document = document(name);
    document.as_object_mut().unwrap().remove(key);
    parse(&document)
}

fn refusal(name: &str, changes: &[(&str, Value)]) -> String {
    with(name, changes).expect_err(&format!("{changes:?} must be refused")).to_string()
}

#[test]
fn dense_families_say_what_their_layers_have() {
    let layer = |a: &Architecture, index: usize| match a.layer(index) {
        Layer { mixer: Mixer::Attention(attention), norms, .. } => (attention, norms),
        other => panic!("{other:?}"),
    };
    let parameters = |a: &Architecture| a.inventory(Dtype::Bf16).parameters();

    let a = fixture("smollm3-3b");
    let turns: Vec<bool> = (0..5).map(|index| layer(&a, index).0.rope.is_some()).collect();
    assert_eq!(turns, [true, true, true, false, true]);
    assert_eq!((parameters(&a), a.tied_head), (3_075_098_624, true));

    let a = fixture("granite-3.3-8b");
    let Multipliers { embedding, residual, logits, logits_softcap } = a.multipliers;
    assert_eq!((embedding, residual, logits, logits_softcap), (12.0, 0.22, 0.0625, None));
    assert_eq!(layer(&a, 39).0.scale, Some(0.007_812_5));
    assert_eq!(parameters(&a), 8_170_864_640);

    let a = fixture("olmo-2-7b");
    let (attention, norms) = layer(&a, 0);
    assert_eq!((attention.qk_norm, norms), (QkNorm::FullWidth, Norms::After));
    assert_eq!(parameters(&a), 7_298_617_344);

    let a = fixture("glm-4-9b");
    let (attention, norms) = layer(&a, 0);
    let rotary = attention.rope.unwrap();
    assert_eq!((rotary.dims, rotary.interleaved, norms), (64, true, Norms::BeforeAndAfter));
    assert_eq!(parameters(&a), 9_400_279_040);
    let error = without("glm-4-9b", "attention_bias").unwrap_err().to_string();
    assert!(error.contains("`attention_bias` is missing"), "{error}");

    let a = fixture("gemma-2-9b");
    let reaches = [0, 1, 2].map(|index| layer(&a, index).0.reach);
    let window = Reach::Window { tokens: 4096 };
    assert_eq!(reaches, [window, Reach::Full, window]);
    let (attention, norms) = layer(&a, 0);
    assert_eq!((attention.scale, attention.softcap), (Some(0.0625), Some(50.0)));
    assert_eq!((attention.qk_norm, norms), (QkNorm::None, Norms::BeforeAndAfter));
    assert_eq!((a.multipliers.embedding, a.multipliers.logits_softcap), (3584_f64.sqrt(), Some(30.0)));
    assert_eq!(parameters(&a), 9_241_705_984);
    // Of absent caps transformers takes its own; null is none.
    let absent = without("gemma-2-9b", "final_logit_softcapping").unwrap();
    assert_eq!(absent.multipliers.logits_softcap, Some(30.0));
    let none = with("gemma-2-9b", &[("attn_logit_softcapping", Value::Null)]).unwrap();
    assert_eq!(layer(&none, 0).0.softcap, None);
}

/// What `transformers` takes for keys that published configs leave out.
#[test]
fn absent_keys_have_the_values_that_their_family_gives_them() {
    // Gemma-3-4b-it, its vision part left out.
    let gemma = parse(&json!({
        "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "torch_dtype": "bfloat16",
        "eos_token_id": [1, 106],
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10_240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
    }))
    .unwrap();
    assert_eq!((gemma.heads, gemma.kv_heads, gemma.head_dim), (8, 4, 256));
    // 262,208 × 2560 of embeddings; a layer of 2560 × (2048 + 2 × 1024 + 2048 + 3 × 10,240), four norms of 2560 and two of 256.
    let layer = 2560 * (4 * 2048 - 2048 + 3 * 10_240) + 4 * 2560 + 2 * 256;
    assert_eq!(gemma.inventory(Dtype::Bf16).parameters(), 262_208 * 2560 + 34 * layer + 2560);
    assert_eq!(without("gemma-2-9b", "head_dim").unwrap().head_dim, 256);

    let turned = |a: Architecture| match a.layer(0).mixer {
        Mixer::Attention(attention) => attention.rope.unwrap().dims,
        other => panic!("{other:?}"),
    };
    assert_eq!(turned(without("glm-4-9b", "partial_rotary_factor").unwrap()), 64);
    let both = [
        ("partial_rotary_factor", json!(0.5)),
        (
            "rope_parameters",
            json!({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}),
        ),
    ];
    let error = refusal("glm-4-9b", &both);
    assert!(error.contains("partial_rotary_factor"), "{error}");

    // The class alone names the generation.
    let mut document = document("gemma-2-9b");
    document.as_object_mut().unwrap().remove("model_type");
    assert_eq!(parse(&document).unwrap().family, Family::Gemma2);
}

/// Mistral-Small-3.1-24B, its vision part left out.
#[test]
fn the_text_of_a_mistral_3_is_a_mistral_or_refused() {
    let mut document = json!({
        "model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"], "torch_dtype": "bfloat16",
        "text_config": {
            "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 32_768,
            "max_position_embeddings": 131_072, "model_type": "mistral", "num_attention_heads": 32,
            "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e9,
            "sliding_window": null, "vocab_size": 131_072,
        },
    });
    let small = parse(&document).unwrap();
    assert_eq!((small.family, small.native_dtype), (Family::Mistral, Some(Dtype::Bf16)));
    // As its card says.
    assert_eq!(small.inventory(Dtype::Bf16).parameters(), 23_572_403_200);
    document["text_config"]["model_type"] = json!("ministral3");
    let error = parse(&document).unwrap_err().to_string();
    assert!(error.contains("`text_config.model_type` = \"ministral3\" is not supported"), "{error}");
}

#[test]
fn layers_without_positions_are_listed_by_0_and_1() {
    let list = |entry: Value| with("smollm3-3b", &[("no_rope_layers", json!(vec![entry; 36]))]);
    let has_rope =
        |a: Architecture| matches!(a.layer(0).mixer, Mixer::Attention(attention) if attention.rope.is_some());
    assert!(!has_rope(list(json!(0)).unwrap()) && !has_rope(list(json!(false)).unwrap()));
    assert!(has_rope(list(json!(1)).unwrap()) && has_rope(list(json!(true)).unwrap()));
    for other in [json!(2), json!("no"), Value::Null] {
        assert!(list(other.clone()).unwrap_err().to_string().contains("`no_rope_layers`"), "{other}");
    }
}

#[test]
fn multipliers_of_other_families_are_refused_by_name() {
    for key in ["residual_multiplier", "embedding_multiplier", "attention_multiplier", "no_rope_layers"] {
        let error = refusal("llama-3.1-8b", &[(key, json!(0.5))]);
        assert!(error.contains(key), "{error}");
    }
}

#[test]
fn transformers_5_spellings_are_read() {
    let a = fixture("smollm2-transformers5");
    assert_eq!((a.family, a.hidden_size, a.layers), (Family::Llama, 576, 30));
    assert_eq!((a.heads, a.kv_heads, a.head_dim), (9, 3, 64));
    assert_eq!((a.rope.theta.to_bits(), a.rope.scaling), (100_000_f64.to_bits(), RopeScaling::None));
    assert_eq!((a.native_dtype, a.tied_head, a.eos_tokens), (Some(Dtype::Bf16), true, vec![0]));
}

#[test]
fn llama_3_scaling_is_read_from_both_spellings() {
    let old = fixture("llama-3.1-8b");
    let scaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_positions: 8192,
    };
    assert_eq!(old.rope.scaling, scaling);
    assert_eq!(old.head_dim, 128, "no head_dim in this config: 4096 / 32");

    let mut parameters = document("llama-3.1-8b")["rope_scaling"].clone();
    parameters["rope_theta"] = json!(500_000);
    let new = with(
        "llama-3.1-8b",
        &[("rope_scaling", Value::Null), ("rope_theta", Value::Null), ("rope_parameters", parameters)],
    );
    assert_eq!(new.unwrap(), old);
}

#[test]
fn yarn_extends_the_positions_unless_the_config_counts_them_already() {
    let yarn = |factor: f64, original: usize| {
        let scaling =
            json!({"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original});
        with("qwen3-0.6b", &[("rope_scaling", scaling)]).unwrap().max_positions
    };
    // As Qwen3's model card has it: 40,960 positions beside four times 32,768.
    assert_eq!((fixture("qwen3-0.6b").max_positions, yarn(4.0, 32_768)), (40_960, 131_072));
    assert_eq!(yarn(1.0, 32_768), 40_960);
    assert_eq!(yarn(1e6, 1 << 27), 1 << 27);
}

#[test]
fn a_resaved_model_keeps_its_shape_and_changes_its_dtype() {
    assert_eq!(fixture("llama-3.2-1b-resaved-fp16").native_dtype, Some(Dtype::F16));
}

#[test]
fn the_first_llama_2_config_has_no_theta_and_means_ten_thousand() {
    assert_eq!(fixture("llama-2-13b").rope.theta.to_bits(), 10_000_f64.to_bits());
}

#[test]
fn qwen2_windows_bind_only_on_request_and_only_the_upper_layers() {
    let off = fixture("qwen2.5-7b");
    assert_eq!(off.windows, []);
    assert_eq!(off.biases, Biases { qkv: true, o: false, mlp: false });

    let on = with(
        "qwen2.5-7b",
        &[
            ("use_sliding_window", json!(true)),
            ("max_window_layers", json!(20)),
            ("sliding_window", json!(4096)),
        ],
    );
    let on = on.unwrap();
    assert_eq!((on.window(19), on.window(20), on.window(27)), (None, Some(4096), Some(4096)));

    let mut types = vec![json!("full_attention"); 28];
    types[3] = json!("sliding_attention");
    let listed = [("use_sliding_window", json!(true)), ("layer_types", json!(types))];
    let listed = with("qwen2.5-7b", &listed).unwrap();
    assert_eq!((listed.window(2), listed.window(3)), (None, Some(131_072)));
    assert!(
        refusal("qwen2.5-7b", &[("layer_types", json!(types))]).contains("`use_sliding_window` is false")
    );
    assert!(refusal("qwen2.5-7b", &[("layer_types", json!(["full_attention"]))]).contains("(28) entries"));
}

#[test]
fn a_mistral_window_binds_every_layer_and_must_be_stated() {
    assert_eq!(fixture("mistral-7b-v0.3").windows, []);
    let windowed = with("mistral-7b-v0.3", &[("sliding_window", json!(4096))]).unwrap();
    assert_eq!(windowed.windows, vec![Some(4096); 32]);
    assert!(
        without("mistral-7b-v0.3", "sliding_window")
            .unwrap_err()
            .to_string()
            .contains("`sliding_window` is missing")
    );
}

#[test]
fn a_head_width_need_not_be_hidden_over_heads() {
    let a = fixture("qwen3-0.6b");
    assert_eq!((a.hidden_size, a.heads, a.head_dim), (1024, 16, 128));
    assert!(a.qk_norm && a.tied_head);
    assert_eq!(with("llama-3.1-8b", &[("head_dim", Value::Null)]).unwrap().head_dim, 128);
}

#[test]
fn deepseek_v3_has_latent_attention_and_three_dense_layers() {
    let a = fixture("deepseek-v3");
    assert_eq!(a.head_dim, 192);
    assert_eq!(a.kv_elements_per_token_and_layer(), 576);
    let own = a.quantization.unwrap();
    assert_eq!((own.method.as_str(), own.bits, own.group_size, own.float), ("fp8", 8, Some(128), true));
    let scales = Scales::Block { rows: 128, columns: 128 };
    assert_eq!(own.main_format(), Some(Format::Fp8 { scales, input_scale: false }));
    // mscale and mscale_all_dim are both 1, so that cosines and sines stay as they are.
    let shape = YarnShape { attention_factor: Some(1.0), ..YarnShape::default() };
    assert_eq!(a.rope.scaling, RopeScaling::Yarn { factor: 40.0, original_max_positions: 4096, shape });
    let experts = Experts {
        count: 256,
        per_token: 8,
        ffn_size: 2048,
        shared_count: 1,
        shared_ffn_size: 2048,
        dense_layers: vec![0, 1, 2],
    };
    assert_eq!(a.experts, Some(experts));
}

#[test]
fn experts_are_placed_as_each_family_places_them() {
    let mixtral = fixture("mixtral-8x7b").experts.unwrap();
    assert_eq!((mixtral.count, mixtral.per_token, mixtral.ffn_size), (8, 2, 14336));

    let qwen = with("qwen3-30b-a3b", &[("decoder_sparse_step", json!(2)), ("mlp_only_layers", json!([1]))]);
    let dense = qwen.unwrap().experts.unwrap().dense_layers;
    assert_eq!(dense[..4], [0, 1, 2, 4], "layer 1 by name, the even ones by the step");
    assert!(refusal("qwen3-30b-a3b", &[("mlp_only_layers", json!([48]))]).contains("below 48"));
    assert!(refusal("qwen3-30b-a3b", &[("num_experts_per_tok", json!(129))]).contains("1 to 128"));
    assert!(refusal("deepseek-v3", &[("topk_group", json!(9))]).contains("1 to 8"));
    assert!(refusal("deepseek-v3", &[("n_group", json!(7))]).contains("divisor of `n_routed_experts` (256)"));
}

#[test]
fn shares_of_experts_are_renormalised_where_the_config_says_so() {
    let routing = |changes: &[(&str, Value)]| {
        let a = with("qwen3-30b-a3b", changes).unwrap();
        (a.layer(0).feed_forward.mixture().unwrap().routing, a.stack.is_some())
    };
    let softmax = |renormalised| Routing::Softmax { renormalised };
    assert_eq!(routing(&[]), (softmax(true), false));
    // The layers are then written out, each with a routing that the fields alone do not stand for.
    assert_eq!(routing(&[("norm_topk_prob", json!(false))]), (softmax(false), true));
    assert_eq!(routing(&[("norm_topk_prob", Value::Null)]), (softmax(false), true), "transformers' default");
    // transformers 5 saves the number of experts under another key.
    let saved = [("num_experts", Value::Null), ("num_local_experts", json!(128))];
    assert_eq!(with("qwen3-30b-a3b", &saved).unwrap(), fixture("qwen3-30b-a3b"));
    assert!(refusal("qwen3-30b-a3b", &[("num_local_experts", json!(64))]).contains("`num_local_experts`"));
    for absurd in [json!(0), json!(1_u64 << 40), json!("many")] {
        assert!(refusal("qwen3-30b-a3b", &[("num_experts", absurd)]).contains("`num_experts`"));
    }
    assert!(refusal("qwen3-30b-a3b", &[("num_experts", json!(65_536))]).contains("tensors"));
}

/// The config of Qwen/Qwen1.5-MoE-A2.7B, whose model card says 14.3 B parameters, 2.7 B of them active.
#[test]
fn qwen2_moe_has_a_shared_expert_with_a_gate_and_biases_on_q_k_and_v() {
    let config = |changes: &[(&str, Value)]| {
        let mut config = json!({
            "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "hidden_size": 2048,
            "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
            "vocab_size": 151_936, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
            "use_sliding_window": false, "sliding_window": 32_768, "max_window_layers": 21, "tie_word_embeddings": false,
            "decoder_sparse_step": 1, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632, "norm_topk_prob": false, "hidden_act": "silu",
        });
        for (key, value) in changes {
            config[*key] = value.clone();
        }
        parse_config(&config.to_string(), Path::new("config.json"))
    };
    let a = config(&[]).unwrap();
    let mixture = *a.layer(7).feed_forward.mixture().unwrap();
    assert_eq!(mixture.routing, Routing::Softmax { renormalised: false });
    assert_eq!((mixture.count, mixture.per_token, mixture.width), (60, 4, 1408));
    assert_eq!((mixture.shared_width, mixture.shared_gate), (5632, true));
    let inventory = a.inventory(Dtype::Bf16);
    // A layer: 4 × 2048² and 3 × 2048 of attention, 60 × 3 × 1408 × 2048 of experts, 3 × 5632 × 2048 of the shared one, 61 × 2048 of
    // routers, 2 × 2048 of norms: 570,560,512.
    assert_eq!(inventory.parameters(), 24 * 570_560_512 + 2 * 151_936 * 2048 + 2048);
    let of =
        |name: &str| inventory.tensors.iter().find(|t| t.name == format!("model.layers.3.{name}")).unwrap();
    assert_eq!(of("mlp.shared_expert.down_proj.weight").shape, [2048, 5632]);
    assert_eq!(of("mlp.shared_expert_gate.weight").shape, [1, 2048]);
    assert_eq!(of("mlp.gate.weight").role, Role::Router);
    assert_eq!(of("self_attn.q_proj.bias").shape, [2048]);
    a.check().unwrap();

    let sparse = config(&[("decoder_sparse_step", json!(2)), ("mlp_only_layers", json!([3]))]).unwrap();
    assert_eq!(sparse.experts.as_ref().unwrap().dense_layers[..4], [0, 2, 3, 4]);
    assert!(
        sparse.layer(3).feed_forward.mixture().is_none() && sparse.layer(1).feed_forward.mixture().is_some()
    );
    let plain = config(&[("qkv_bias", json!(false))]).unwrap();
    assert!(plain.inventory(Dtype::Bf16).tensors.iter().all(|tensor| tensor.role != Role::Bias));
    for (key, value) in [
        ("num_experts_per_tok", json!(61)),
        ("shared_expert_intermediate_size", json!(0)),
        ("use_sliding_window", json!(true)),
        ("mlp_only_layers", json!([24])),
    ] {
        assert!(config(&[(key, value)]).unwrap_err().to_string().contains(key), "{key}");
    }
}

#[test]
fn quantisation_methods_are_read_or_refused_by_name() {
    let read = |value: Value| with("llama-3.1-8b", &[("quantization_config", value)]);
    assert_eq!(read(Value::Null).unwrap().quantization, None);
    let group = |bits| json!({"targets": ["Linear"], "weights": {"num_bits": bits, "group_size": 64}});
    let ct = |weights: Value| json!({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}});
    for (value, wanted) in [
        (json!({"quant_method": "spqr"}), "`quantization_config.quant_method` = \"spqr\""),
        (json!({"quant_method": "gptq", "bits": 3, "group_size": 128}), "`quantization_config.bits` = 3"),
        (json!({"quant_method": "awq", "bits": 4, "group_size": 0}), "`quantization_config.group_size` is 0"),
        (
            json!({"quant_method": "fp8", "weight_block_size": [0, 128]}),
            "`quantization_config.weight_block_size`",
        ),
        (
            json!({"quant_method": "fp8", "weight_block_size": [128, 1e9]}),
            "`quantization_config.weight_block_size`",
        ),
        (json!({"quant_method": "fp8", "fmt": "e5m2"}), "`quantization_config.fmt` = \"e5m2\""),
        (ct(group(5)["weights"].clone()), "`quantization_config.config_groups.group_0.weights.num_bits` = 5"),
        (ct(json!({"num_bits": 4, "type": "float", "group_size": 24})), "weights.group_size` = 24"),
        (ct(json!({"num_bits": 4, "type": "posit", "group_size": 16})), "weights.type` = \"posit\""),
        (ct(json!({"num_bits": 8, "strategy": "block"})), "weights.block_structure` is missing"),
        (json!({"quant_method": "compressed-tensors"}), "`quantization_config.config_groups` is missing"),
        (
            json!({"quant_method": "modelopt", "quant_algo": "INT4_AWQ"}),
            "`quantization_config.quant_algo` = \"INT4_AWQ\"",
        ),
        (
            json!({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}),
            "`quantization_config.group_size` = 32",
        ),
        (json!({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["re:("]}), "a list of modules"),
        (
            json!({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp6"}}}),
            "weight.dtype` = \"fp6\"",
        ),
        (json!({"quant_method": "bitsandbytes"}), "`quantization_config.load_in_4bit`"),
        (json!({"quant_method": "fp8", "ignored_layers": [7]}), "`quantization_config.ignored_layers`"),
    ] {
        let message = read(value.clone()).expect_err(&value.to_string()).to_string();
        let wanted = if wanted == "a list of modules" { "without look-around" } else { wanted };
        assert!(message.contains(wanted), "{value}: {message}");
    }
}

/// Bits of a linear weight of Llama-3.1-8B with its scales, as a step reads them.
#[test]
fn every_method_has_the_bits_of_its_format() {
    let ct = |weights: Value| json!({"quant_method": "compressed-tensors", "ignore": ["lm_head"], "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}});
    let gptq = |more: Value| {
        let mut value = json!({"quant_method": "gptq", "bits": 4, "group_size": 128});
        value.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        value
    };
    for (value, dtype, wanted) in [
        (json!({"quant_method": "fp8", "weight_block_size": [128, 128]}), Dtype::Fp8, 8.0 + 32.0 / 16_384.0),
        (json!({"quant_method": "mxfp8"}), Dtype::Mxfp8, 8.25),
        (json!({"quant_method": "mxfp4"}), Dtype::Mxfp4, 4.25),
        (gptq(json!({})), Dtype::Int4, 4.125),
        (gptq(json!({"sym": false})), Dtype::Int4, 4.156_25),
        (gptq(json!({"bits": 8})), Dtype::Int8, 8.125),
        (json!({"quant_method": "awq", "bits": 4, "group_size": 128}), Dtype::Int4, 4.156_25),
        (ct(json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32})), Dtype::Int4, 4.5),
        (
            ct(json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128})),
            Dtype::Int4,
            4.125,
        ),
        (
            ct(json!({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16})),
            Dtype::Nvfp4,
            4.5,
        ),
        (
            ct(json!({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32})),
            Dtype::Mxfp4,
            4.25,
        ),
        (ct(json!({"num_bits": 8, "type": "int", "strategy": "channel"})), Dtype::Int8, 8.0),
        (ct(json!({"num_bits": 8, "type": "float", "strategy": "tensor"})), Dtype::Fp8, 8.0),
        (json!({"quant_method": "fbgemm_fp8"}), Dtype::Fp8, 8.0),
        (
            json!({"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}),
            Dtype::Nvfp4,
            4.5,
        ),
        (json!({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}), Dtype::Fp8, 8.0),
        (
            json!({"quant_method": "quark", "exclude": ["lm_head"], "global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}}}),
            Dtype::Mxfp4,
            4.25,
        ),
        (json!({"quant_method": "bitsandbytes", "load_in_4bit": true}), Dtype::Int4, 4.5),
    ] {
        let a = with("llama-3.1-8b", &[("quantization_config", value.clone())]).unwrap();
        assert_eq!(a.quantization.as_ref().unwrap().dtype(), Some(dtype), "{value}");
        let inventory = a.inventory(dtype);
        let bytes = inventory.bytes_of(Role::Matrix) + inventory.bytes_of(Role::Scale);
        let width = bytes.as_f64() * 8.0 / 6_979_321_856.0;
        // A scale for a row or a tensor is less than a hundredth of a bit.
        assert!((width - wanted).abs() < 0.01 && width >= wanted, "{value}: {width} instead of {wanted}");
        assert_eq!(inventory.bytes_of(Role::Head), Bytes(2 * 128_256 * 4096), "{value}");
    }
}

#[test]
fn what_activations_are_rounded_to_is_read_where_weights_do_not_say_it() {
    let ct = |weights: Value, inputs: Value| {
        json!({"quant_method": "compressed-tensors", "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}})
    };
    let int8 = json!({"num_bits": 8, "type": "int", "strategy": "channel"});
    let fp8 = json!({"num_bits": 8, "type": "float", "strategy": "channel"});
    let fp4 = json!({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16});
    let modelopt = |name: &str| json!({"quant_method": "modelopt", "quant_algo": name});
    let mixed = |names: [&str; 2]| {
        let [one, other] = names.map(|name| json!({"quant_algo": name}));
        json!({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
            "*.mlp.*": one, "*.self_attn.*": other}})
    };
    let quark = |inputs: Value| {
        json!({"quant_method": "quark", "global_quant_config": {"input_tensors": inputs,
            "weight": {"dtype": "int8", "qscheme": "per_channel"}}})
    };
    for (value, wanted) in [
        (ct(int8.clone(), int8.clone()), Some(Dtype::Int8)),
        (ct(int8, Value::Null), None),
        (ct(fp8.clone(), fp8.clone()), None),
        (ct(fp8.clone(), Value::Null), Some(Dtype::Bf16)),
        (ct(fp4.clone(), fp4.clone()), None),
        (ct(fp4.clone(), fp8), Some(Dtype::Fp8)),
        (ct(fp4, Value::Null), Some(Dtype::Bf16)),
        (modelopt("NVFP4"), None),
        (modelopt("FP8"), None),
        (modelopt("W4A16_NVFP4"), Some(Dtype::Bf16)),
        (modelopt("W4A8_MXFP4_FP8"), Some(Dtype::Fp8)),
        // The fastest of a mixture.
        (mixed(["W4A16_NVFP4", "FP8"]), Some(Dtype::Fp8)),
        (mixed(["NVFP4", "W4A16_NVFP4"]), None),
        (quark(json!({"dtype": "int8"})), Some(Dtype::Int8)),
        (quark(Value::Null), None),
        (json!({"quant_method": "bitsandbytes", "load_in_8bit": true}), Some(Dtype::Int8)),
        (json!({"quant_method": "awq", "bits": 4, "group_size": 128}), None),
    ] {
        let read = with("llama-3.1-8b", &[("quantization_config", value.clone())]).unwrap();
        assert_eq!(read.quantization.unwrap().activations, wanted, "{value}");
    }
}

/// The preset of compressed-tensors for nvfp4 stores `input_global_scale` beside every layer.
#[test]
fn inputs_that_are_scaled_in_part_have_a_stored_scale() {
    for (dynamic, input_scale) in [(json!("local"), true), (json!(false), true), (json!(true), false)] {
        let four = json!({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16});
        let mut inputs = four.clone();
        inputs["dynamic"] = dynamic;
        let own = json!({"quant_method": "compressed-tensors", "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": four, "input_activations": inputs}}});
        let read = with("llama-3.1-8b", &[("quantization_config", own)]).unwrap().quantization.unwrap();
        assert_eq!(read.main_format(), Some(Format::Nvfp4 { input_scale }));
    }
}

#[test]
fn one_model_mixes_formats_module_by_module() {
    let mixed = json!({
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head", "model.layers.0.*"],
        "quantized_layers": {"*.mlp.*": {"quant_algo": "NVFP4"}, "*.self_attn.*": {"quant_algo": "FP8"}},
    });
    let a = with("llama-3.1-8b", &[("quantization_config", mixed)]).unwrap();
    let own = a.quantization.clone().unwrap();
    assert_eq!(own.kv_cache, Some(Dtype::Fp8));
    let inventory = a.inventory(own.dtype().unwrap());
    let storage = |name: &str| inventory.tensors.iter().find(|t| t.name == name).unwrap().storage.clone();
    assert_eq!(storage("model.layers.0.mlp.up_proj.weight"), "bf16");
    assert_eq!(storage("model.layers.1.mlp.up_proj.weight"), "nvfp4");
    assert_eq!(storage("model.layers.1.self_attn.q_proj.weight"), "fp8");
    // Layer 0 in 16 bits; of 31 layers the attention (41,943,040 weights, four f32 pairs) in 8 and the rest (176,160,768) in 4.5.
    let weights = 2 * (41_943_040 + 176_160_768) + 31 * (41_943_040 + 4 * 8 + 176_160_768 * 9 / 16 + 3 * 8);
    assert_eq!(inventory.bytes_of(Role::Matrix) + inventory.bytes_of(Role::Scale), Bytes(weights));

    let gptq = json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": true,
        "dynamic": {"-:.*self_attn.*": {}, "+:.*down_proj": {"bits": 8, "group_size": 64}}});
    let a = with("llama-3.1-8b", &[("quantization_config", gptq)]).unwrap();
    let inventory = a.inventory(Dtype::Int4);
    let storage = |name: &str| inventory.tensors.iter().find(|t| t.name == name).unwrap().storage.clone();
    assert_eq!(storage("model.layers.9.self_attn.q_proj.weight"), "bf16");
    assert_eq!(storage("model.layers.9.mlp.down_proj.qweight"), "int8");
    assert_eq!(storage("lm_head.qweight"), "int4");
}

#[test]
fn a_message_names_file_key_found_and_wanted() {
    insta::assert_snapshot!(
        [
            refusal("llama-3.1-8b", &[("hidden_size", json!(-3))]),
            refusal("llama-3.1-8b", &[("num_hidden_layers", json!(0))]),
            refusal("llama-3.1-8b", &[("vocab_size", json!(1e300))]),
            refusal("llama-3.1-8b", &[("rms_norm_eps", json!("NaN"))]),
            refusal("llama-3.1-8b", &[("num_key_value_heads", json!(7))]),
            refusal("llama-3.1-8b", &[("num_attention_heads", json!(24))]),
            refusal("llama-3.1-8b", &[("head_dim", json!(65))]),
            refusal("llama-3.1-8b", &[("hidden_act", json!("gelu"))]),
            refusal("llama-3.1-8b", &[("hidden_size", Value::Null)]),
            refusal("llama-3.1-8b", &[("rope_scaling", json!({"type": "dynamic", "factor": 2.0}))]),
            refusal("llama-3.1-8b", &[("torch_dtype", json!("int3"))]),
            refusal("llama-3.1-8b", &[("model_type", json!("deepseek_v4")), ("architectures", json!(["DeepseekV4ForCausalLM"]))]),
        ]
        .join("\n"),
        @r#"
    config.json: `hidden_size` is -3; want an integer from 1 to 131072
    config.json: `num_hidden_layers` is 0; want an integer from 1 to 4096
    config.json: `vocab_size` is 1e+300; want an integer from 1 to 4194304
    config.json: `rms_norm_eps` is "NaN"; want a number from 1e-30 to 1e-1
    config.json: `num_key_value_heads` is 7; want a divisor of `num_attention_heads` (32)
    config.json: `hidden_size` is 4096; want a multiple of `num_attention_heads` (24), or a `head_dim` beside it
    config.json: `head_dim` is 65; want an even number: the rotary embedding turns pairs
    config.json: `hidden_act` = "gelu" is not supported; supported: silu
    config.json: `hidden_size` is missing; want an integer from 1 to 131072
    config.json: `rope_scaling.type` = "dynamic" is not supported; supported: default, linear, llama3, yarn, and longrope of phi3
    config.json: `torch_dtype` = "int3" is not supported; supported: float32, bfloat16, float16, float8_e4m3fn
    config.json: architecture deepseek_v4 (DeepseekV4ForCausalLM) is not supported; supported: llama (LlamaForCausalLM), mistral (MistralForCausalLM), mistral3 (Mistral3ForConditionalGeneration), qwen2 (Qwen2ForCausalLM), qwen3 (Qwen3ForCausalLM), qwen3_moe (Qwen3MoeForCausalLM), qwen2_moe (Qwen2MoeForCausalLM), mixtral (MixtralForCausalLM), deepseek_v2 (DeepseekV2ForCausalLM), deepseek_v3 (DeepseekV3ForCausalLM), deepseek_v32 (DeepseekV32ForCausalLM), kimi_k2 (DeepseekV3ForCausalLM), kimi_k25 (KimiK25ForConditionalGeneration), glm_moe_dsa (GlmMoeDsaForCausalLM), gpt_oss (GptOssForCausalLM), qwen3_5 (Qwen3_5ForConditionalGeneration), qwen3_5_moe (Qwen3_5MoeForConditionalGeneration), qwen3_5_text (Qwen3_5ForCausalLM), qwen3_5_moe_text (Qwen3_5MoeForCausalLM), qwen3_next (Qwen3NextForCausalLM), gemma2 (Gemma2ForCausalLM), gemma3 (Gemma3ForConditionalGeneration), gemma3_text (Gemma3ForCausalLM), gemma4 (Gemma4ForConditionalGeneration), gemma4_text (Gemma4ForCausalLM), glm4_moe (Glm4MoeForCausalLM), minimax_m2 (MiniMaxM2ForCausalLM), nemotron_h (NemotronHForCausalLM), llama4 (Llama4ForConditionalGeneration), llama4_text (Llama4ForCausalLM), phi3 (Phi3ForCausalLM), mimo_v2_flash (MiMoV2FlashForCausalLM), smollm3 (SmolLM3ForCausalLM), granite (GraniteForCausalLM), olmo2 (Olmo2ForCausalLM), glm4 (Glm4ForCausalLM)
    "#);
}

#[test]
fn what_would_change_a_number_is_refused_by_name() {
    let refused = [
        ("partial_rotary_factor", json!(0.5)),
        ("residual_multiplier", json!(0.22)),
        ("attention_multiplier", json!(0.015_625)),
        ("final_logit_softcapping", json!(30.0)),
        ("logits_scaling", json!(8)),
        ("sliding_window", json!(4096)),
        ("layer_types", json!(vec!["sliding_attention"; 32])),
        ("rope_scaling", json!({"rope_type": "longrope", "factor": 4.0})),
        ("rope_scaling", json!({"rope_type": "default", "mrope_section": [16, 24, 24]})),
        ("rope_scaling", json!({"rope_type": "linear", "type": "yarn", "factor": 4.0})),
        ("rope_scaling", json!({"factor": 4.0})),
        ("rope_parameters", json!({"rope_theta": 1e4})),
        ("rope_theta", json!(0)),
        ("eos_token_id", json!([1, -1])),
        ("dtype", json!("float32")),
        ("tie_word_embeddings", json!("yes")),
        ("compression_config", json!({})),
    ];
    for (key, value) in refused {
        let message = refusal("llama-3.1-8b", &[(key, value)]);
        let other = if key == "rope_parameters" { "rope_scaling" } else { key };
        assert!(message.contains(&format!("`{other}")), "{key}: {message}");
    }
    assert!(refusal("mistral-7b-v0.3", &[("attention_bias", json!(true))]).contains("`attention_bias`"));
}

/// Phi-4-mini as it is published, with its factors made short: <https://huggingface.co/microsoft/Phi-4-mini-instruct>.
fn phi4_mini(changes: &[(&str, Value)]) -> Result<Architecture, ModelError> {
    let mut config = json!({
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_act": "silu", "hidden_size": 3072,
        "intermediate_size": 8192, "max_position_embeddings": 131_072, "num_attention_heads": 24, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
        "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "sliding_window": 262_144, "tie_word_embeddings": true,
        "torch_dtype": "bfloat16", "vocab_size": 200_064, "eos_token_id": 199_999,
        "rope_scaling": {"type": "longrope", "long_factor": vec![2.0; 48], "short_factor": vec![1.0; 48]},
    });
    for (key, value) in changes {
        config[key] = value.clone();
    }
    parse_config(&config.to_string(), Path::new("config.json"))
}

#[test]
fn longrope_takes_the_factors_of_the_models_own_context() {
    let a = phi4_mini(&[]).unwrap();
    assert_eq!(a.inventory(Dtype::Bf16).parameters(), 3_836_021_760, "as its card says: 3.8 B");
    assert_eq!(a.rope_factors, [2.0; 48], "96 of 128 dimensions turn, 131,072 positions of 4,096");
    // √(1 + ln 32 / ln 4096)
    let RopeScaling::LongRope { original_max_positions: 4096, attention_factor } = a.rope.scaling else {
        panic!("{:?}", a.rope.scaling)
    };
    assert!((attention_factor - 1.190_238).abs() < 1e-6, "{attention_factor}");

    let short = phi4_mini(&[("max_position_embeddings", json!(4096))]).unwrap();
    assert_eq!(short.rope_factors, [1.0; 48]);
    let RopeScaling::LongRope { attention_factor, .. } = short.rope.scaling else { panic!("longrope") };
    assert!((attention_factor - 1.0).abs() < 1e-12);

    let own = json!({"type": "longrope", "attention_factor": 1.5, "factor": 2.0, "long_factor": vec![2.0; 48], "short_factor": []});
    let own = phi4_mini(&[("rope_scaling", own)]).unwrap();
    assert!(
        matches!(own.rope.scaling, RopeScaling::LongRope { attention_factor, .. } if attention_factor.to_bits() == 1.5_f64.to_bits())
    );

    for (list, why) in [
        (json!(vec![2.0; 47]), "too few"),
        (json!(vec![2.0; 49]), "too many"),
        (json!([vec![2.0; 47], vec![0.0]].concat()), "zero"),
        (json!([vec![2.0; 47], vec![-1.0]].concat()), "negative"),
        (json!(vec!["2"; 48]), "text"),
        (json!(2.0), "a number"),
        (Value::Null, "none"),
    ] {
        let scaling = json!({"type": "longrope", "long_factor": list, "short_factor": vec![1.0; 48]});
        let message = phi4_mini(&[("rope_scaling", scaling)]).unwrap_err().to_string();
        assert!(message.contains("long_factor"), "{why}: {message}");
    }
    let with = |key: &str, value: Value| {
        let mut scaling =
            json!({"type": "longrope", "long_factor": vec![2.0; 48], "short_factor": vec![1.0; 48]});
        scaling[key] = value;
        phi4_mini(&[("rope_scaling", scaling)]).map_err(|error| error.to_string())
    };
    for key in ["mscale", "long_mscale"] {
        let message = with(key, json!(2.0)).unwrap_err();
        assert!(message.contains(key), "{message}");
    }
    let message = with("original_max_position_embeddings", json!(8192)).unwrap_err();
    assert!(message.contains("`original_max_position_embeddings` is 4096; want 8192"), "{message}");
    assert!(with("original_max_position_embeddings", json!(4096)).is_ok());
    let unsaid = phi4_mini(&[("original_max_position_embeddings", Value::Null)]).unwrap();
    assert_eq!(unsaid.rope.scaling, phi4_mini(&[]).unwrap().rope.scaling, "transformers has 4096, too");
}

#[test]
fn neutral_values_of_foreign_keys_are_accepted() {
    let neutral =
        [("partial_rotary_factor", json!(1)), ("logits_scaling", json!(1.0)), ("eos_token_id", json!(null))];
    assert!(with("llama-3.1-8b", &neutral).unwrap().eos_tokens.is_empty());
}

#[test]
fn a_key_without_an_agreed_default_is_required() {
    for key in ["vocab_size", "intermediate_size", "max_position_embeddings", "rms_norm_eps"] {
        assert!(matches!(without("llama-3.1-8b", key), Err(ModelError::MissingKey { .. })), "{key}");
    }
    for key in ["num_key_value_heads", "rope_theta", "head_dim"] {
        assert!(matches!(without("qwen3-0.6b", key), Err(ModelError::MissingKey { .. })), "{key}");
    }
    assert_eq!(without("llama-3.1-8b", "num_key_value_heads").unwrap().kv_heads, 32);
    assert_eq!(with("qwen3-0.6b", &[("num_key_value_heads", Value::Null)]).unwrap().kv_heads, 16);
}

#[test]
fn dimensions_in_range_may_still_multiply_to_too_much() {
    let huge = [
        ("hidden_size", json!(limits::HIDDEN)),
        ("intermediate_size", json!(limits::FFN)),
        ("num_hidden_layers", json!(limits::LAYERS)),
    ];
    assert!(matches!(with("llama-3.1-8b", &huge), Err(ModelError::TooManyParameters { .. })));
}

#[test]
fn families_are_recognised_by_type_and_class_together() {
    assert!(without("llama-3.1-8b", "architectures").is_ok());
    assert!(without("llama-3.1-8b", "model_type").is_ok());
    for (key, value) in [
        ("architectures", json!(["LlamaForSequenceClassification"])),
        ("architectures", json!([7])),
        ("model_type", json!("llama4")),
    ] {
        let found = with("llama-3.1-8b", &[(key, value)]);
        assert!(matches!(found, Err(ModelError::UnsupportedArchitecture { .. })), "{key}: {found:?}");
    }
    assert!(matches!(parse(&json!({})), Err(ModelError::MissingKey { .. })));
}

#[test]
fn bytes_that_are_no_config_are_refused() {
    let at = |text: &str| parse_config(text, Path::new("config.json")).unwrap_err().to_string();
    assert!(
        at("{\n  \"a\": ,\n}").starts_with("config.json:2:8: invalid JSON"),
        "{}",
        at("{\n  \"a\": ,\n}")
    );
    assert!(at("").contains("invalid JSON"));
    assert!(at("[1]").contains("a JSON object"));
    assert!(at(&"[".repeat(100_000)).contains("invalid JSON"));
}

#[test]
fn pythons_bare_infinity_harms_only_keys_that_are_read() {
    let text = document("llama-3.1-8b").to_string();
    let unread =
        text.replacen('{', r#"{"time_step_limit": [0.0, Infinity, -Infinity], "note": "a \"NaN\" NaN", "#, 1);
    assert!(parse_config(&unread, Path::new("config.json")).is_ok());
    let read = text.replace("1e-05", "NaN").replace("0.00001", "NaN");
    let message = parse_config(&read, Path::new("config.json")).unwrap_err().to_string();
    assert!(message.contains("`rms_norm_eps` is \"NaN\""), "{message}");
}

#[test]
fn only_a_regular_file_of_sane_length_is_read() {
    let folder = tempfile::tempdir().unwrap();
    assert!(matches!(read_config(folder.path()), Err(ModelError::NotAFile { .. })));
    let path = folder.path().join("config.json");
    assert!(matches!(read_config(&path), Err(ModelError::Read { .. })));
    std::fs::File::create(&path).unwrap().set_len(limits::CONFIG_BYTES + 1).unwrap();
    assert!(matches!(read_config(&path), Err(ModelError::ConfigTooLarge { .. })));
}

fn hostile() -> impl Strategy<Value = Value> {
    prop_oneof![
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (0_u64..1 << 24).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        any::<String>().prop_map(Value::from),
        any::<bool>().prop_map(Value::from),
        Just(json!([])),
        Just(json!({})),
        proptest::collection::vec(any::<i64>(), 0..4).prop_map(Value::from),
    ]
}

/// Every value of a document that is not a container.
fn leaves<'a>(value: &'a mut Value, found: &mut Vec<&'a mut Value>) {
    match value {
        Value::Object(map) => map.values_mut().for_each(|v| leaves(v, found)),
        Value::Array(items) => items.iter_mut().for_each(|v| leaves(v, found)),
        leaf => found.push(leaf),
    }
}

/// A fixture, or a shipped shape by its name.
fn any_config(name: &str) -> Value {
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("models/{name}.json"));
    if shipped.is_file() {
        serde_json::from_str(&std::fs::read_to_string(shipped).unwrap()).unwrap()
    } else {
        document(name)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(1024) })]

    #[test]
    fn no_mutation_of_a_config_panics_and_what_is_accepted_is_consistent(
        name in proptest::sample::select([&FIXTURES[..], &LAYERED[..]].concat()),
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), hostile()), 1..4),
    ) {
        let mut document = any_config(name);
        for (at, value) in changes {
            let mut found = Vec::new();
            leaves(&mut document, &mut found);
            let at = at.index(found.len());
            *found.swap_remove(at) = value;
        }
        if let Ok(a) = parse(&document) {
            prop_assert!(a.layers >= 1 && a.heads.is_multiple_of(a.kv_heads));
            prop_assert!(a.norm_eps > 0.0 && a.rope.theta.is_finite());
            prop_assert!(a.windows.is_empty() || a.windows.len() == a.layers);
            prop_assert!(a.experts.is_none_or(|e| e.per_token <= e.count));
        }
    }

    #[test]
    fn no_text_panics(text in any::<String>()) {
        prop_assert!(parse_config(&text, Path::new("config.json")).is_err());
    }
}
