//! Llama 4: chunks on three of four layers, no positions on the fourth, one routed and one shared expert a token.

use serde_json::{Value, json};

use super::config::{Conventions, FamilySpec, Fields, Windows, decoder, experts_per_token, limits};
use super::{
    Activation, Architecture, Attention, Dense, Experts, Family, FeedForward, Layer, Mixer, Mixture,
    ModelError, Norms, QkNorm, Reach, Routing, Stack,
};

pub(super) const SPEC: FamilySpec = FamilySpec {
    names: &[("llama4", "Llama4ForConditionalGeneration"), ("llama4_text", "Llama4ForCausalLM")],
    keys: &["attention_chunk_size", "no_rope_layers", "no_rope_layer_interval", "use_qk_norm"],
    read,
};

fn read(fields: &Fields) -> Result<Architecture, ModelError> {
    fields.only("attention_bias", &json!(false))?;
    let conventions = Conventions {
        ffn_size: Some(fields.need_integer("intermediate_size_mlp", 1..=limits::FFN)?),
        windows: Windows::Own,
        rope_keys: &["high_freq_factor"],
        ..Conventions::of(Family::Llama4)
    };
    let a = decoder(fields, &conventions)?;
    let width = fields.need_integer("intermediate_size", 1..=limits::FFN)?;
    let count = fields.need_integer("num_local_experts", 1..=limits::EXPERTS)?;
    let routing = Routing::Sigmoid { correction: false, groups: 1, chosen_groups: 1, renormalised: false };
    let mixture = Mixture::new(count, experts_per_token(fields, count)?, width, routing);
    let mixture = Mixture { shared_width: width, ..mixture };
    let dense = Dense { width: a.ffn_size, activation: Activation::Silu, bias: false, fused: false };
    let chunk = fields.integer("attention_chunk_size", 1..=limits::POSITIONS)?;
    let normed = if fields.flag("use_qk_norm", true)? { QkNorm::Unweighted } else { QkNorm::None };
    let full = Attention { rope: None, qk_norm: QkNorm::None, ..a.attention() };
    let local = Attention {
        reach: chunk.map_or(Reach::Full, |tokens| Reach::Chunk { tokens }),
        qk_norm: normed,
        ..a.attention()
    };
    let step = fields.integer("interleave_moe_layer_step", 1..=limits::LAYERS)?.unwrap_or(1);
    let turned = turned_layers(fields, a.layers)?;
    let layers = (0..a.layers).map(|layer| Layer {
        mixer: Mixer::Attention(if turned[layer] { local } else { full }),
        feed_forward: if (layer + 1).is_multiple_of(step) {
            FeedForward::Mixture(mixture)
        } else {
            FeedForward::Dense(dense)
        },
        norms: Norms::Before,
    });
    let stack = Some(Stack::new(layers));
    let dense_layers = (0..a.layers).filter(|layer| !(layer + 1).is_multiple_of(step)).collect();
    Ok(Architecture { stack, experts: Some(Experts::of(&mixture, dense_layers)), ..a })
}

/// Which layers have positions: `no_rope_layers` has a 1 for those that do, despite its name.
pub(super) fn turned_layers(fields: &Fields, layers: usize) -> Result<Vec<bool>, ModelError> {
    let key = "no_rope_layers";
    match fields.list(key, limits::LAYERS)? {
        Some(list) if list.len() == layers => {
            let turned = |flag: &Value| match flag.as_u64() {
                Some(flag @ 0..=1) => Some(flag == 1),
                _ => flag.as_bool(),
            };
            let turned = list.iter().map(turned).collect::<Option<_>>();
            turned.ok_or_else(|| fields.bad(key, format!("a list of {layers} entries, each 0 or 1")))
        }
        Some(list) if !list.is_empty() => Err(fields.bad(key, format!("a list of {layers} entries"))),
        _ => {
            let every = fields.integer("no_rope_layer_interval", 1..=limits::LAYERS)?.unwrap_or(4);
            Ok((0..layers).map(|layer| !(layer + 1).is_multiple_of(every)).collect())
        }
    }
}
