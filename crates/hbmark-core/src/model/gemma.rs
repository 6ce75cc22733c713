//! Gemma 3 and 4: norms before and after, windows on five of six layers; Gemma 4's full layers have other heads and no values of their own.

use serde_json::json;

use super::config::{Conventions, FamilySpec, Fields, Windows, decoder, layer_kinds, limits, scaling};
use super::{
    Activation, Architecture, Attention, Dense, Experts, Family, FeedForward, Layer, Mixer, Mixture,
    ModelError, Norms, QkNorm, Reach, Rope, RopeScaling, Rotary, Routing, Stack,
};

pub(super) const SPEC: FamilySpec = FamilySpec {
    names: &[
        ("gemma3", "Gemma3ForConditionalGeneration"),
        ("gemma3_text", "Gemma3ForCausalLM"),
        ("gemma4", "Gemma4ForConditionalGeneration"),
        ("gemma4_text", "Gemma4ForCausalLM"),
    ],
    keys: &[
        "hidden_act",
        "query_pre_attn_scalar",
        "sliding_window_pattern",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "attention_k_eq_v",
        "partial_rotary_factor",
    ],
    read,
};

const KINDS: [&str; 2] = ["full_attention", "sliding_attention"];

fn read(fields: &Fields) -> Result<Architecture, ModelError> {
    fields.only("attention_bias", &json!(false))?;
    fields.only("use_double_wide_mlp", &json!(false))?;
    for key in ["hidden_activation", "hidden_act"] {
        if fields.text(key)?.is_some_and(|name| name != "gelu_pytorch_tanh") {
            return Err(fields.unsupported(key, "gelu_pytorch_tanh"));
        }
    }
    let fourth = fields.text("model_type")?.is_some_and(|name| name.starts_with("gemma4"));
    let ropes = if fourth { gemma_4_ropes(fields)? } else { gemma_3_ropes(fields)? };
    let conventions = Conventions {
        qk_norm: true,
        rope: Some(ropes.full.rope),
        windows: Windows::Own,
        // What `transformers` has for Gemma 3 where the published configs leave the keys out.
        default_vocab: (!fourth).then_some(262_208),
        default_positions: (!fourth).then_some(131_072),
        default_eps: Some(1e-6),
        ..Conventions::of(if fourth { Family::Gemma4 } else { Family::Gemma3 })
    };
    let mut a = decoder(fields, &conventions)?;
    a.tied_head = fields.flag("tie_word_embeddings", true)?;
    let (mixture, dense) = (mixture(fields)?, dense(a.ffn_size));
    let feed_forward = mixture
        .map_or(FeedForward::Dense(dense), |mixture| FeedForward::DenseBesideMixture { dense, mixture });
    let tokens = fields.need_integer("sliding_window", 1..=limits::POSITIONS)?;
    let local = Attention {
        reach: Reach::Window { tokens },
        rope: Some(ropes.local.on(a.head_dim)),
        qk_norm: QkNorm::PerHead,
        softcap: fields.float("attn_logit_softcapping", 1e-3..=1e6)?,
        ..a.attention()
    };
    let full = full_attention(fields, &local, &ropes, fourth)?;
    let layers = full_layers(fields, a.layers)?.into_iter().map(|is_full| Layer {
        mixer: Mixer::Attention(if is_full { full } else { local }),
        feed_forward,
        norms: Norms::BeforeAndAfter,
    });
    let stack = Some(Stack::new(layers));
    Ok(Architecture { stack, experts: mixture.map(|mixture| Experts::of(&mixture, Vec::new())), ..a })
}

fn full_attention(
    fields: &Fields,
    local: &Attention,
    ropes: &Ropes,
    fourth: bool,
) -> Result<Attention, ModelError> {
    if !fourth {
        return Ok(Attention { reach: Reach::Full, rope: Some(ropes.full.on(local.key_dim)), ..*local });
    }
    let width = fields.integer("global_head_dim", 1..=limits::HEAD_DIM)?.unwrap_or(local.key_dim);
    let kv_heads = fields.integer("num_global_key_value_heads", 1..=local.heads)?.unwrap_or(local.kv_heads);
    if !local.heads.is_multiple_of(kv_heads) {
        return Err(fields.bad("num_global_key_value_heads", "a divisor of `num_attention_heads`"));
    }
    Ok(Attention {
        reach: Reach::Full,
        kv_heads,
        key_dim: width,
        value_dim: width,
        shares_key: fields.flag("attention_k_eq_v", false)?,
        rope: Some(ropes.full.on(width)),
        ..*local
    })
}

fn full_layers(fields: &Fields, layers: usize) -> Result<Vec<bool>, ModelError> {
    if let Some(kinds) = layer_kinds(fields, layers, &KINDS)? {
        return Ok(kinds.iter().map(|kind| *kind == KINDS[0]).collect());
    }
    let every = fields.integer("sliding_window_pattern", 1..=limits::LAYERS)?.unwrap_or(6);
    Ok((0..layers).map(|layer| (layer + 1).is_multiple_of(every)).collect())
}

fn dense(width: usize) -> Dense {
    Dense { width, activation: Activation::GeluTanh, bias: false, fused: false }
}

fn mixture(fields: &Fields) -> Result<Option<Mixture>, ModelError> {
    if !fields.flag("enable_moe_block", false)? {
        return Ok(None);
    }
    let count = fields.need_integer("num_experts", 1..=limits::EXPERTS)?;
    Ok(Some(Mixture {
        count,
        per_token: fields.need_integer("top_k_experts", 1..=count)?,
        width: fields.need_integer("moe_intermediate_size", 1..=limits::FFN)?,
        routing: Routing::Softmax { renormalised: true },
        activation: Activation::GeluTanh,
        shared_width: 0,
        shared_gate: false,
        bias: false,
        latent: None,
    }))
}

/// The rotary embeddings of the two kinds of layers.
struct Ropes {
    full: Share,
    local: Share,
}

/// A rotary embedding, and the share of a head that turns.
struct Share {
    rope: Rope,
    share: f64,
}

impl Share {
    fn on(&self, width: usize) -> Rotary {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a share of a head's width"
        )]
        let dims = (width as f64 * self.share) as usize / 2 * 2;
        Rotary { rope: self.rope, dims }
    }
}

fn gemma_3_ropes(fields: &Fields) -> Result<Ropes, ModelError> {
    let theta = fields.float("rope_theta", limits::THETA)?.unwrap_or(1e6);
    let positions = fields.integer("max_position_embeddings", 1..=limits::POSITIONS)?.unwrap_or(131_072);
    let scaled = fields.section("rope_scaling")?;
    let scaling = scaled.map_or(Ok(RopeScaling::None), |section| scaling(&section, positions, &[]))?;
    let local = fields.float("rope_local_base_freq", limits::THETA)?.unwrap_or(1e4);
    let whole = |theta, scaling| Share { rope: Rope { theta, scaling }, share: 1.0 };
    Ok(Ropes { full: whole(theta, scaling), local: whole(local, RopeScaling::None) })
}

fn gemma_4_ropes(fields: &Fields) -> Result<Ropes, ModelError> {
    let key = "rope_parameters";
    let Some(both) = fields.section(key)? else {
        return Err(fields.missing(key, "an object with `full_attention` and `sliding_attention`"));
    };
    let of = |kind: &str| {
        let Some(section) = both.section(kind)? else {
            return Err(both.missing(kind, "an object with `rope_theta`"));
        };
        let theta = section.need_float("rope_theta", limits::THETA)?;
        let scaling = scaling(&section, limits::POSITIONS, &["partial_rotary_factor"])?;
        let share = section.float("partial_rotary_factor", 0.0..=1.0)?.unwrap_or(1.0);
        Ok(Share { rope: Rope { theta, scaling }, share })
    };
    Ok(Ropes { full: of(KINDS[0])?, local: of(KINDS[1])? })
}
