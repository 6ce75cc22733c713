//! GLM-4-0414: norms before and after, neighbours turned together in half of each head, gate and up in one matrix.

use super::config::{Conventions, FamilySpec, Fields, decoder, rotary_dims};
use super::{
    Activation, Architecture, Attention, Biases, Dense, Family, FeedForward, Layer, Mixer, ModelError, Norms,
    Rotary, Stack,
};

pub(super) const SPEC: FamilySpec =
    FamilySpec { names: &[("glm4", "Glm4ForCausalLM")], keys: &["partial_rotary_factor"], read };

fn read(fields: &Fields) -> Result<Architecture, ModelError> {
    if fields.get("attention_bias").is_none() {
        // transformers takes true for an absent key; other readers false.
        return Err(fields.missing("attention_bias", "whether Q, K and V have biases"));
    }
    let conventions = Conventions {
        biases: Biases { qkv: fields.flag("attention_bias", true)?, o: false, mlp: false },
        rope_keys: &["partial_rotary_factor"],
        ..Conventions::of(Family::Glm4)
    };
    let a = decoder(fields, &conventions)?;
    let dims = rotary_dims(fields, a.head_dim, 0.5)?;
    let attention =
        Attention { rope: Some(Rotary { rope: a.rope, dims, interleaved: true }), ..a.attention() };
    let dense = Dense { width: a.ffn_size, activation: Activation::Silu, bias: false, fused: true };
    let layer = Layer {
        mixer: Mixer::Attention(attention),
        feed_forward: FeedForward::Dense(dense),
        norms: Norms::BeforeAndAfter,
    };
    let stack = Some(Stack::new(std::iter::repeat_n(layer, a.layers)));
    Ok(Architecture { stack, ..a })
}
