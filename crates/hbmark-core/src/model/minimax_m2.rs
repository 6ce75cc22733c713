//! MiniMax-M2 to M2.7: norms over the full width of Q and K, part of each head turned, sigmoid routing with a correction.

use serde_json::json;

use super::config::{Conventions, FamilySpec, Fields, decoder, experts_per_token, limits, rotary_dims};
use super::{
    Architecture, Attention, Experts, Family, FeedForward, Layer, Mixer, Mixture, ModelError, Norms, QkNorm,
    Rotary, Routing, Stack,
};

pub(super) const SPEC: FamilySpec = FamilySpec {
    names: &[("minimax_m2", "MiniMaxM2ForCausalLM")],
    keys: &["use_qk_norm", "partial_rotary_factor"],
    read,
};

fn read(fields: &Fields) -> Result<Architecture, ModelError> {
    fields.only("shared_intermediate_size", &json!(0))?;
    fields.only("scoring_func", &json!("sigmoid"))?;
    fields.only("qk_norm_type", &json!("per_layer"))?;
    // Of the family's first generation: layers of linear attention, and factors of the residual.
    if let Some(kinds) = fields.list("attn_type_list", limits::LAYERS)?
        && kinds.iter().any(|kind| kind != &json!(1))
    {
        return Err(fields.unsupported("attn_type_list", "1 for every layer"));
    }
    for key in ["layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta"] {
        fields.only(key, &json!(1))?;
    }
    let normed = fields.flag("use_qk_norm", true)?;
    let conventions = Conventions {
        qk_norm: normed,
        rope_keys: &["partial_rotary_factor"],
        ..Conventions::of(Family::MinimaxM2)
    };
    let a = decoder(fields, &conventions)?;
    let count = fields.need_integer("num_local_experts", 1..=limits::EXPERTS)?;
    let per_token = experts_per_token(fields, count)?;
    let routing = Routing::Sigmoid {
        correction: fields.flag("use_routing_bias", true)?,
        groups: 1,
        chosen_groups: 1,
        renormalised: true,
    };
    let mixture = Mixture::new(count, per_token, a.ffn_size, routing);
    // As published; transformers 5 saves the share of a head in its place, NVIDIA's copies both.
    let share = rotary_dims(fields, a.head_dim, 1.0)?;
    let is_stated = fields.get("partial_rotary_factor").is_some();
    let dims = match fields.integer("rotary_dim", 2..=a.head_dim)? {
        Some(dims) if is_stated && dims != share => {
            let wanted = format!("{share}, as `partial_rotary_factor` says, or only one of them");
            return Err(fields.bad("rotary_dim", wanted));
        }
        Some(dims) if dims.is_multiple_of(2) => dims,
        Some(_) => return Err(fields.bad("rotary_dim", "an even number: the rotary embedding turns pairs")),
        None => share,
    };
    let attention = Attention {
        rope: Some(Rotary { rope: a.rope, dims, interleaved: false }),
        qk_norm: if normed { QkNorm::FullWidth } else { QkNorm::None },
        ..a.attention()
    };
    let layer = Layer {
        mixer: Mixer::Attention(attention),
        feed_forward: FeedForward::Mixture(mixture),
        norms: Norms::Before,
    };
    let stack = Some(Stack::new(std::iter::repeat_n(layer, a.layers)));
    Ok(Architecture { stack, experts: Some(Experts::of(&mixture, Vec::new())), ..a })
}
