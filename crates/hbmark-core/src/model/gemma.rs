//! Gemma 2 to 4: norms before and after, embeddings scaled, windows on one of two layers (2) or five of six (3, 4). Gemma 2 bends scores and
//! logits; Gemma 3 has norms of Q and K and two rotary embeddings; Gemma 4's full layers have other heads and no values of their own.

use serde_json::json;

use super::config::{Conventions, FamilySpec, Fields, Windows, decoder, full_layers, limits, scaling};
use super::{
    Activation, Architecture, Attention, Dense, Experts, Family, FeedForward, Layer, Mixer, Mixture,
    ModelError, Multipliers, Norms, Reach, Rope, RopeScaling, Rotary, Routing, Stack,
};
use crate::units::whole_count;

pub(super) const SPEC: FamilySpec = FamilySpec {
    names: &[
        ("gemma2", "Gemma2ForCausalLM"),
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

/// The most names of classes that are looked at.
const CLASSES: usize = 16;
const KINDS: [&str; 2] = ["full_attention", "sliding_attention"];

/// Which Gemma.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Generation {
    Second,
    Third,
    Fourth,
}

impl Generation {
    fn of(fields: &Fields) -> Result<Self, ModelError> {
        let classes = fields.list("architectures", CLASSES)?.unwrap_or_default();
        let class = classes.first().and_then(|class| class.as_str()).unwrap_or_default();
        let name = fields.text("model_type")?.unwrap_or(class).to_ascii_lowercase();
        Ok(match name {
            name if name.starts_with("gemma2") => Self::Second,
            name if name.starts_with("gemma4") => Self::Fourth,
            _ => Self::Third,
        })
    }

    fn family(self) -> Family {
        match self {
            Self::Second => Family::Gemma2,
            Self::Third => Family::Gemma3,
            Self::Fourth => Family::Gemma4,
        }
    }
}

fn read(fields: &Fields) -> Result<Architecture, ModelError> {
    fields.only("attention_bias", &json!(false))?;
    // "vision": among the tokens of an image alone.
    if fields.text("use_bidirectional_attention").ok().flatten().is_none_or(|among| among != "vision") {
        fields.only("use_bidirectional_attention", &json!(false))?;
    }
    fields.only("use_double_wide_mlp", &json!(false))?;
    for key in ["hidden_activation", "hidden_act"] {
        if fields.text(key)?.is_some_and(|name| name != "gelu_pytorch_tanh") {
            return Err(fields.unsupported(key, "gelu_pytorch_tanh"));
        }
    }
    let generation = Generation::of(fields)?;
    let third = generation == Generation::Third;
    let ropes = match generation {
        Generation::Second => None,
        Generation::Third => Some(gemma_3_ropes(fields)?),
        Generation::Fourth => Some(ropes_of_kinds(fields, &["partial_rotary_factor"])?),
    };
    let conventions = Conventions {
        qk_norm: generation != Generation::Second,
        rope: ropes.as_ref().map(|ropes| ropes.full.rope),
        windows: Windows::Own,
        // What `transformers` has where the published configs of Gemma 3 leave keys out, and the width of heads also for Gemma 2.
        default_heads: third.then_some(8),
        default_kv_heads: third.then_some(4),
        default_head_dim: (generation != Generation::Fourth).then_some(256),
        default_vocab: third.then_some(262_208),
        default_positions: third.then_some(131_072),
        default_eps: Some(1e-6),
        ..Conventions::of(generation.family())
    };
    let mut a = decoder(fields, &conventions)?;
    a.tied_head = fields.flag("tie_word_embeddings", true)?;
    let (mixture, dense) = (mixture(fields)?, dense(a.ffn_size));
    let feed_forward = mixture
        .map_or(FeedForward::Dense(dense), |mixture| FeedForward::DenseBesideMixture { dense, mixture });
    let tokens = match fields.get("sliding_window") {
        None if third => 4096,
        _ => fields.need_integer("sliding_window", 1..=limits::POSITIONS)?,
    };
    let ropes = ropes.unwrap_or(Ropes { full: whole(a.rope), local: whole(a.rope) });
    let scale = match generation {
        // Its queries are normed and not scaled.
        Generation::Fourth => None,
        _ => Some(fields.float("query_pre_attn_scalar", 1e-3..=1e9)?.unwrap_or(256.0).powf(-0.5)),
    };
    let local = Attention {
        reach: Reach::Window { tokens },
        rope: Some(ropes.local.on(a.head_dim)),
        scale,
        softcap: softcap(fields, generation, "attn_logit_softcapping", 50.0)?,
        ..a.attention()
    };
    if generation != Generation::Fourth {
        let logits_softcap = softcap(fields, generation, "final_logit_softcapping", 30.0)?;
        let embedding = (a.hidden_size as f64).sqrt();
        a.multipliers = Multipliers { embedding, logits_softcap, ..Multipliers::default() };
    }
    let full = full_attention(fields, &local, &ropes, generation)?;
    let every = if generation == Generation::Second { 2 } else { 6 };
    let full_layers = full_layers(fields, a.layers, &KINDS, "sliding_window_pattern", every)?;
    let layers = full_layers.into_iter().map(|is_full| Layer {
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
    generation: Generation,
) -> Result<Attention, ModelError> {
    if generation != Generation::Fourth {
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

/// A cap, or what `transformers` takes for Gemma 2 where the key does not occur.
fn softcap(
    fields: &Fields,
    generation: Generation,
    key: &str,
    of_second: f64,
) -> Result<Option<f64>, ModelError> {
    if generation == Generation::Second && fields.is_absent(key) {
        return Ok(Some(of_second));
    }
    fields.float(key, 1e-3..=1e6)
}

fn dense(width: usize) -> Dense {
    Dense { width, activation: Activation::GeluTanh, bias: false, fused: false }
}

fn mixture(fields: &Fields) -> Result<Option<Mixture>, ModelError> {
    if !fields.flag("enable_moe_block", false)? {
        return Ok(None);
    }
    let count = fields.need_integer("num_experts", 1..=limits::EXPERTS)?;
    let per_token = fields.need_integer("top_k_experts", 1..=count)?;
    let width = fields.need_integer("moe_intermediate_size", 1..=limits::FFN)?;
    let mixture = Mixture::new(count, per_token, width, Routing::Softmax { renormalised: true });
    Ok(Some(Mixture { activation: Activation::GeluTanh, ..mixture }))
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
        let dims = whole_count(width as f64 * self.share) / 2 * 2;
        Rotary { rope: self.rope, dims, interleaved: false }
    }
}

/// A rotary embedding of whole heads.
fn whole(rope: Rope) -> Share {
    Share { rope, share: 1.0 }
}

fn gemma_3_ropes(fields: &Fields) -> Result<Ropes, ModelError> {
    if fields.get("rope_parameters").is_some() {
        return ropes_of_kinds(fields, &[]);
    }
    let theta = fields.float("rope_theta", limits::THETA)?.unwrap_or(1e6);
    let positions = fields.integer("max_position_embeddings", 1..=limits::POSITIONS)?.unwrap_or(131_072);
    let scaled = fields.section("rope_scaling")?;
    let scaling =
        scaled.map_or(Ok(RopeScaling::None), |section| scaling(&section, positions, positions, &[]))?;
    let local = fields.float("rope_local_base_freq", limits::THETA)?.unwrap_or(1e4);
    let local = Rope { theta: local, scaling: RopeScaling::None };
    Ok(Ropes { full: whole(Rope { theta, scaling }), local: whole(local) })
}

/// As `transformers` 5 writes them, by the kind of layer.
fn ropes_of_kinds(fields: &Fields, extra: &[&str]) -> Result<Ropes, ModelError> {
    let key = "rope_parameters";
    let Some(both) = fields.section(key)? else {
        return Err(fields.missing(key, "an object with `full_attention` and `sliding_attention`"));
    };
    let of = |kind: &str| {
        let Some(section) = both.section(kind)? else {
            return Err(both.missing(kind, "an object with `rope_theta`"));
        };
        let theta = section.need_float("rope_theta", limits::THETA)?;
        let scaling = scaling(&section, limits::POSITIONS, limits::POSITIONS, extra)?;
        let share = section.float("partial_rotary_factor", 0.0..=1.0)?.unwrap_or(1.0);
        Ok(Share { rope: Rope { theta, scaling }, share })
    };
    Ok(Ropes { full: of(KINDS[0])?, local: of(KINDS[1])? })
}
