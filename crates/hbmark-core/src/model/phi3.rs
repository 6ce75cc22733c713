//! Phi-3 and Phi-4: Q, K and V in one matrix, gate and up in another.

use super::config::{Conventions, FamilySpec, Fields, Windows, decoder, long_factors, rotary_dims};
use super::{
    Activation, Architecture, Attention, Dense, Family, FeedForward, Layer, Mixer, ModelError, Norms, Reach,
    Rotary, Stack,
};

pub(super) const SPEC: FamilySpec =
    FamilySpec { names: &[("phi3", "Phi3ForCausalLM")], keys: &["partial_rotary_factor"], read };

fn read(fields: &Fields) -> Result<Architecture, ModelError> {
    fields.only("attention_bias", &serde_json::json!(false))?;
    let conventions = Conventions {
        windows: Windows::Everywhere { required: false },
        rope_keys: &["long_factor", "short_factor", "partial_rotary_factor"],
        ..Conventions::of(Family::Phi3)
    };
    let a = decoder(fields, &conventions)?;
    let dense = Dense { width: a.ffn_size, activation: Activation::Silu, bias: false, fused: true };
    let dims = rotary_dims(fields, a.head_dim, 1.0)?;
    let rope_factors = long_factors(fields, a.rope.scaling, a.max_positions, dims)?;
    let layers = (0..a.layers).map(|layer| Layer {
        mixer: Mixer::Attention(Attention {
            reach: a.window(layer).map_or(Reach::Full, |tokens| Reach::Window { tokens }),
            rope: Some(Rotary { rope: a.rope, dims, interleaved: false }),
            fused: true,
            ..a.attention()
        }),
        feed_forward: FeedForward::Dense(dense),
        norms: Norms::Before,
    });
    let stack = Some(Stack::new(layers));
    Ok(Architecture { rope_factors, stack, ..a })
}
