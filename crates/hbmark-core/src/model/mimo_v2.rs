//! MiMo-V2-Flash: keys wider than values, windows with sinks and more KV heads on five of six layers, `DeepSeek`'s experts.

use serde_json::Value;

use super::config::{
    Conventions, FamilySpec, Fields, Windows, decoder, experts_per_token, limits, rotary_dims,
    routed_scaling_factor,
};
use super::{
    Activation, Architecture, Attention, Dense, Experts, Family, FeedForward, Layer, Mixer, Mixture,
    ModelError, Norms, QkNorm, Reach, Rope, Rotary, Routing, Stack,
};

pub(super) const SPEC: FamilySpec = FamilySpec {
    names: &[("mimo_v2_flash", "MiMoV2FlashForCausalLM")],
    // Its chunk is its window under another name.
    keys: &["partial_rotary_factor", "attention_chunk_size"],
    read,
};

fn read(fields: &Fields) -> Result<Architecture, ModelError> {
    fields.only("attention_bias", &serde_json::json!(false))?;
    fields.only("n_shared_experts", &Value::Null)?;
    let conventions = Conventions {
        norm_key: "layernorm_epsilon",
        windows: Windows::Own,
        ..Conventions::of(Family::MimoV2)
    };
    let a = decoder(fields, &conventions)?;
    let width = |key| fields.need_integer(key, 1..=limits::HEAD_DIM);
    let sinks = |key| fields.flag(key, false);
    let full = Attention {
        value_dim: width("v_head_dim")?,
        rope: Some(Rotary { rope: a.rope, dims: rotary_dims(fields, a.head_dim, 1.0)?, interleaved: false }),
        qk_norm: QkNorm::None,
        sinks: sinks("add_full_attention_sink_bias")?,
        ..a.attention()
    };
    let theta = fields.need_float("swa_rope_theta", limits::THETA)?;
    let key_dim = width("swa_head_dim")?;
    let heads = fields.need_integer("swa_num_attention_heads", 1..=limits::HEADS)?;
    let local = Attention {
        reach: Reach::Window { tokens: fields.need_integer("sliding_window", 1..=limits::POSITIONS)? },
        heads,
        kv_heads: fields.need_integer("swa_num_key_value_heads", 1..=heads)?,
        key_dim,
        value_dim: width("swa_v_head_dim")?,
        rope: Some(Rotary {
            rope: Rope { theta, ..a.rope },
            dims: rotary_dims(fields, key_dim, 1.0)?,
            interleaved: false,
        }),
        sinks: sinks("add_swa_attention_sink_bias")?,
        ..full
    };
    let (windowed, routed) =
        (flags(fields, "hybrid_layer_pattern", a.layers)?, flags(fields, "moe_layer_freq", a.layers)?);
    let mixture = mixture(fields)?;
    let dense = Dense { width: a.ffn_size, activation: Activation::Silu, bias: false, fused: false };
    let layers = (0..a.layers).map(|layer| Layer {
        mixer: Mixer::Attention(if windowed[layer] { local } else { full }),
        feed_forward: if routed[layer] { FeedForward::Mixture(mixture) } else { FeedForward::Dense(dense) },
        norms: Norms::Before,
    });
    let stack = Some(Stack::new(layers));
    let dense_layers = (0..a.layers).filter(|layer| !routed[*layer]).collect();
    Ok(Architecture { stack, experts: Some(Experts::of(&mixture, dense_layers)), ..a })
}

fn mixture(fields: &Fields) -> Result<Mixture, ModelError> {
    let count = fields.need_integer("n_routed_experts", 1..=limits::EXPERTS)?;
    let per_token = experts_per_token(fields, count)?;
    let width = fields.need_integer("moe_intermediate_size", 1..=limits::FFN)?;
    let renormalised = fields.flag("norm_topk_prob", true)?;
    let routing = Routing::Sigmoid { correction: true, groups: 1, chosen_groups: 1, renormalised };
    let routed_scaling_factor = routed_scaling_factor(fields)?;
    Ok(Mixture { routed_scaling_factor, ..Mixture::new(count, per_token, width, routing) })
}

/// A 0 or a 1 for each layer.
fn flags(fields: &Fields, key: &str, layers: usize) -> Result<Vec<bool>, ModelError> {
    let wanted = || format!("a list of {layers} entries, each 0 or 1");
    let list = fields.list(key, limits::LAYERS)?.ok_or_else(|| fields.missing(key, wanted()))?;
    let flag = |value: &Value| value.as_u64().filter(|flag| *flag < 2).map(|flag| flag == 1);
    list.iter()
        .map(flag)
        .collect::<Option<Vec<_>>>()
        .filter(|flags| flags.len() == layers)
        .ok_or_else(|| fields.bad(key, wanted()))
}
