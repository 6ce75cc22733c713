//! Qwen3.5, 3.6 and Qwen3-Next: three gated delta nets to one full attention with an output gate, dense or with experts.

use serde_json::json;

use super::config::{
    Conventions, FamilySpec, Fields, Windows, decoder, experts_per_token, full_layers, limits, rotary_dims,
};
use super::{
    Activation, Architecture, Attention, DeltaNet, Dense, Experts, Family, FeedForward, Layer, Mixer,
    Mixture, ModelError, Norms, Rotary, Routing, Stack,
};

pub(super) const SPEC: FamilySpec = FamilySpec {
    names: &[
        ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
        ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
        ("qwen3_5_text", "Qwen3_5ForCausalLM"),
        ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
        ("qwen3_next", "Qwen3NextForCausalLM"),
    ],
    keys: &["attn_output_gate", "linear_num_value_heads", "partial_rotary_factor"],
    read,
};

const KINDS: [&str; 2] = ["full_attention", "linear_attention"];

fn read(fields: &Fields) -> Result<Architecture, ModelError> {
    fields.only("attention_bias", &json!(false))?;
    fields.only("mlp_only_layers", &json!([]))?;
    fields.only("decoder_sparse_step", &json!(1))?;
    let next = fields.text("model_type")? == Some("qwen3_next");
    let mixture = mixture(fields)?;
    let conventions = Conventions {
        qk_norm: true,
        ffn_size: mixture.map(|mixture| mixture.width),
        windows: Windows::Own,
        rope_keys: &["partial_rotary_factor", "mrope_section", "mrope_interleaved"],
        ..Conventions::of(if next { Family::Qwen3Next } else { Family::Qwen3_5 })
    };
    let a = decoder(fields, &conventions)?;
    let feed_forward = match mixture {
        Some(mixture) => FeedForward::Mixture(mixture),
        None => FeedForward::Dense(Dense {
            width: a.ffn_size,
            activation: Activation::Silu,
            bias: false,
            fused: false,
        }),
    };
    let attention = Attention {
        rope: Some(Rotary { rope: a.rope, dims: rotary_dims(fields, a.head_dim, 0.25)?, interleaved: false }),
        output_gate: next || fields.flag("attn_output_gate", true)?,
        ..a.attention()
    };
    let delta = delta_net(fields)?;
    let layers =
        full_layers(fields, a.layers, &KINDS, "full_attention_interval", 4)?.into_iter().map(|full| Layer {
            mixer: if full { Mixer::Attention(attention) } else { Mixer::DeltaNet(delta) },
            feed_forward,
            norms: Norms::Before,
        });
    let stack = Some(Stack::new(layers));
    Ok(Architecture { stack, experts: mixture.map(|mixture| Experts::of(&mixture, Vec::new())), ..a })
}

fn delta_net(fields: &Fields) -> Result<DeltaNet, ModelError> {
    let state_bytes = match fields.text("mamba_ssm_dtype")? {
        None | Some("float32") => 4,
        Some("bfloat16") => 2,
        Some(_) => return Err(fields.unsupported("mamba_ssm_dtype", "float32, bfloat16")),
    };
    let heads = |key| fields.need_integer(key, 1..=limits::HEADS);
    let width = |key| fields.need_integer(key, 1..=limits::HEAD_DIM);
    Ok(DeltaNet {
        key_heads: heads("linear_num_key_heads")?,
        value_heads: heads("linear_num_value_heads")?,
        key_dim: width("linear_key_head_dim")?,
        value_dim: width("linear_value_head_dim")?,
        conv_kernel: fields.need_integer("linear_conv_kernel_dim", 1..=64)?,
        state_bytes,
    })
}

fn mixture(fields: &Fields) -> Result<Option<Mixture>, ModelError> {
    let Some(count) = fields.integer("num_experts", 0..=limits::EXPERTS)?.filter(|count| *count > 0) else {
        return Ok(None);
    };
    let per_token = experts_per_token(fields, count)?;
    let width = fields.need_integer("moe_intermediate_size", 1..=limits::FFN)?;
    let routing = Routing::Softmax { renormalised: fields.flag("norm_topk_prob", true)? };
    let shared_width = fields.need_integer("shared_expert_intermediate_size", 1..=limits::FFN)?;
    let mixture = Mixture::new(count, per_token, width, routing);
    Ok(Some(Mixture { shared_width, shared_gate: true, ..mixture }))
}
