//! Dimensions of published models, for tests: each row is the `config.json` of the named repository.

use super::architecture::{
    Architecture, Biases, Dtype, Experts, Family, LatentAttention, Multipliers, Rope, RopeScaling,
};
use super::{Format, FormatRule, Mixture, Quantization, Routing, Scales};

/// A dense llama-like model; tests change what differs. `shape`: hidden, layers, heads, kv heads, head dim, ffn, vocab.
pub fn dense(family: Family, shape: [usize; 7]) -> Architecture {
    let [hidden_size, layers, heads, kv_heads, head_dim, ffn_size, vocab_size] = shape;
    Architecture {
        family,
        hidden_size,
        layers,
        heads,
        kv_heads,
        head_dim,
        ffn_size,
        vocab_size,
        max_positions: 131_072,
        norm_eps: 1e-5,
        rope: Rope { theta: 500_000.0, scaling: RopeScaling::None },
        qk_norm: matches!(family, Family::Qwen3 | Family::Qwen3Moe),
        biases: Biases { qkv: family == Family::Qwen2, o: false, mlp: false },
        tied_head: false,
        windows: Vec::new(),
        experts: None,
        latent: None,
        quantization: None,
        native_dtype: Some(Dtype::Bf16),
        eos_tokens: Vec::new(),
        multipliers: Multipliers::default(),
        stack: None,
        draft: None,
        rope_factors: Vec::new(),
    }
}

pub fn smollm2_135m() -> Architecture {
    Architecture { tied_head: true, ..dense(Family::Llama, [576, 30, 9, 3, 64, 1536, 49_152]) }
}

pub fn llama_3_2_1b() -> Architecture {
    Architecture { tied_head: true, ..dense(Family::Llama, [2048, 16, 32, 8, 64, 8192, 128_256]) }
}

pub fn llama_3_1_8b() -> Architecture {
    dense(Family::Llama, [4096, 32, 32, 8, 128, 14_336, 128_256])
}

pub fn llama_2_7b() -> Architecture {
    dense(Family::Llama, [4096, 32, 32, 32, 128, 11_008, 32_000])
}

pub fn llama_3_1_70b() -> Architecture {
    dense(Family::Llama, [8192, 80, 64, 8, 128, 28_672, 128_256])
}

/// v0.1: a window of 4096 in every layer.
pub fn mistral_7b() -> Architecture {
    Architecture {
        windows: vec![Some(4096); 32],
        ..dense(Family::Mistral, [4096, 32, 32, 8, 128, 14_336, 32_000])
    }
}

pub fn qwen2_5_7b() -> Architecture {
    dense(Family::Qwen2, [3584, 28, 28, 4, 128, 18_944, 152_064])
}

pub fn qwen3_0_6b() -> Architecture {
    Architecture { tied_head: true, ..dense(Family::Qwen3, [1024, 28, 16, 8, 128, 3072, 151_936]) }
}

pub fn qwen3_8b() -> Architecture {
    dense(Family::Qwen3, [4096, 36, 32, 8, 128, 12_288, 151_936])
}

pub fn qwen3_32b() -> Architecture {
    dense(Family::Qwen3, [5120, 64, 64, 8, 128, 25_600, 151_936])
}

/// With so many experts in every layer, so many of them a token, and the width of one.
fn routed(model: Architecture, [count, per_token, width]: [usize; 3]) -> Architecture {
    let mixture = Mixture::new(count, per_token, width, Routing::Softmax { renormalised: true });
    model.with_mixture(mixture, Vec::new())
}

pub fn qwen3_30b_a3b() -> Architecture {
    routed(dense(Family::Qwen3Moe, [2048, 48, 32, 4, 128, 6144, 151_936]), [128, 8, 768])
}

pub fn mixtral_8x7b() -> Architecture {
    routed(dense(Family::Mixtral, [4096, 32, 32, 8, 128, 14_336, 32_000]), [8, 2, 14_336])
}

pub fn deepseek_v3() -> Architecture {
    Architecture {
        quantization: Some(Quantization {
            method: "fp8".to_owned(),
            bits: 8,
            group_size: Some(128),
            float: true,
            rules: vec![FormatRule {
                modules: Vec::new(),
                format: Some(Format::Fp8 {
                    scales: Scales::Block { rows: 128, columns: 128 },
                    input_scale: false,
                }),
            }],
            ..Quantization::default()
        }),
        experts: Some(Experts {
            count: 256,
            per_token: 8,
            ffn_size: 2048,
            shared_count: 1,
            shared_ffn_size: 2048,
            dense_layers: vec![0, 1, 2],
        }),
        latent: Some(LatentAttention {
            q_rank: Some(1536),
            kv_rank: 512,
            qk_nope_head_dim: 128,
            qk_rope_head_dim: 64,
            v_head_dim: 128,
            scale: None,
        }),
        ..dense(Family::DeepseekV3, [7168, 61, 128, 128, 128, 18_432, 129_280])
    }
}
