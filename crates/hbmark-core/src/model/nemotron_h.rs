//! Nemotron-H and Nemotron 3: each layer is a Mamba 2 mixer, an attention or a feed-forward, as a string of letters says.

use serde_json::json;

use super::config::{
    Conventions, FamilySpec, Fields, decoder, experts_per_token, limits, routed_scaling_factor,
};
use super::{
    Activation, Architecture, Attention, Dense, Experts, Family, FeedForward, Layer, Mamba, Mixer, Mixture,
    ModelError, Norms, QkNorm, Routing, Stack,
};

pub(super) const SPEC: FamilySpec = FamilySpec {
    names: &[("nemotron_h", "NemotronHForCausalLM")],
    keys: &["hybrid_override_pattern", "hidden_act", "partial_rotary_factor"],
    read,
};

fn read(fields: &Fields) -> Result<Architecture, ModelError> {
    for key in ["attention_bias", "mlp_bias", "mamba_proj_bias", "use_bias"] {
        fields.only(key, &json!(false))?;
    }
    fields.only("mlp_hidden_act", &json!("relu2"))?;
    let conventions = Conventions {
        head_dim: fields.integer("attention_head_dim", 1..=limits::HEAD_DIM)?,
        theta: Some(10_000.0),
        norm_key: "layer_norm_epsilon",
        ..Conventions::of(Family::NemotronH)
    };
    let a = decoder(fields, &conventions)?;
    let key = "hybrid_override_pattern";
    let letters = fields.text(key)?.ok_or_else(|| fields.missing(key, "a letter for each layer"))?;
    if letters.chars().count() != a.layers {
        return Err(fields.bad(key, format!("a letter for each of {} layers", a.layers)));
    }
    let mixture = if letters.contains('E') { Some(mixture(fields)?) } else { None };
    let mamba = if letters.contains('M') { Some(mamba(fields)?) } else { None };
    let attention = Attention { rope: None, qk_norm: QkNorm::None, ..a.attention() };
    let dense = Dense { width: a.ffn_size, activation: Activation::SquaredRelu, bias: false, fused: false };
    let alone = |feed_forward| Layer { mixer: Mixer::None, feed_forward, norms: Norms::Before };
    let mixer = |mixer| Layer { mixer, feed_forward: FeedForward::None, norms: Norms::Before };
    let layers = letters
        .chars()
        .map(|letter| match (letter, mamba, mixture) {
            ('M', Some(mamba), _) => Ok(mixer(Mixer::Mamba(mamba))),
            ('*', ..) => Ok(mixer(Mixer::Attention(attention))),
            ('-', ..) => Ok(alone(FeedForward::Dense(dense))),
            ('E', _, Some(mixture)) => Ok(alone(FeedForward::Mixture(mixture))),
            _ => Err(fields.unsupported(key, "M, *, - and E")),
        })
        .collect::<Result<Vec<_>, _>>()?;
    let dense_layers: Vec<usize> =
        (0..a.layers).filter(|at| layers[*at].feed_forward.mixture().is_none()).collect();
    let experts = mixture.map(|mixture| Experts::of(&mixture, dense_layers));
    Ok(Architecture { stack: Some(Stack::new(layers)), experts, ..a })
}

fn mamba(fields: &Fields) -> Result<Mamba, ModelError> {
    let state_bytes = match fields.text("mamba_ssm_cache_dtype")? {
        Some("float32") => 4,
        None | Some("bfloat16" | "float16") => 2,
        Some(_) => return Err(fields.unsupported("mamba_ssm_cache_dtype", "float32, bfloat16, float16")),
    };
    Ok(Mamba {
        heads: fields.need_integer("mamba_num_heads", 1..=limits::HEADS)?,
        head_dim: fields.need_integer("mamba_head_dim", 1..=limits::HEAD_DIM)?,
        groups: fields.need_integer("n_groups", 1..=limits::HEADS)?,
        state_size: fields.need_integer("ssm_state_size", 1..=limits::HEAD_DIM)?,
        conv_kernel: fields.need_integer("conv_kernel", 1..=64)?,
        conv_bias: fields.flag("use_conv_bias", true)?,
        state_bytes,
    })
}

fn mixture(fields: &Fields) -> Result<Mixture, ModelError> {
    let count = fields.need_integer("n_routed_experts", 1..=limits::EXPERTS)?;
    let groups = fields.integer("n_group", 1..=count)?.unwrap_or(1);
    let shared = fields.integer("n_shared_experts", 0..=64)?.unwrap_or(0);
    let shared_width = fields.integer("moe_shared_expert_intermediate_size", 1..=limits::FFN)?.unwrap_or(0);
    let per_token = experts_per_token(fields, count)?;
    let width = fields.need_integer("moe_intermediate_size", 1..=limits::FFN)?;
    let routing = Routing::Sigmoid {
        correction: true,
        groups,
        chosen_groups: fields.integer("topk_group", 1..=groups)?.unwrap_or(groups),
        renormalised: fields.flag("norm_topk_prob", true)?,
    };
    Ok(Mixture {
        activation: Activation::SquaredRelu,
        shared_width: shared * shared_width,
        latent: fields.integer("moe_latent_size", 1..=limits::HIDDEN)?,
        routed_scaling_factor: routed_scaling_factor(fields)?,
        ..Mixture::new(count, per_token, width, routing)
    })
}
