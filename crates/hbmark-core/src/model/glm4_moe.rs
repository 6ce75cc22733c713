//! GLM-4.5 to 4.7: biases on Q, K and V, half of each head turned, `DeepSeek`'s experts after the dense layers.

use super::config::{Conventions, FamilySpec, Fields, decoder, rotary_dims};
use super::deepseek_v3::experts;
use super::{
    Activation, Architecture, Attention, Biases, Dense, Family, FeedForward, Layer, Mixer, ModelError, Norms,
    QkNorm, Rotary, Stack,
};

pub(super) const SPEC: FamilySpec = FamilySpec {
    names: &[("glm4_moe", "Glm4MoeForCausalLM")],
    keys: &["partial_rotary_factor", "use_qk_norm"],
    read,
};

fn read(fields: &Fields) -> Result<Architecture, ModelError> {
    let bias = fields.flag("attention_bias", false)?;
    let conventions = Conventions {
        qk_norm: fields.flag("use_qk_norm", false)?,
        biases: Biases { qkv: bias, o: false, mlp: false },
        rope_keys: &["partial_rotary_factor"],
        ..Conventions::of(Family::Glm4Moe)
    };
    let a = decoder(fields, &conventions)?;
    let (experts, mixture) = experts(fields, a.layers)?;
    let attention = Attention {
        rope: Some(Rotary { rope: a.rope, dims: rotary_dims(fields, a.head_dim, 0.5)?, interleaved: false }),
        qk_norm: if a.qk_norm { QkNorm::PerHead } else { QkNorm::None },
        ..a.attention()
    };
    let dense = Dense { width: a.ffn_size, activation: Activation::Silu, bias: false, fused: false };
    let layers = (0..a.layers).map(|layer| Layer {
        mixer: Mixer::Attention(attention),
        feed_forward: if experts.dense_layers.contains(&layer) {
            FeedForward::Dense(dense)
        } else {
            FeedForward::Mixture(mixture)
        },
        norms: Norms::Before,
    });
    let stack = Some(Stack::new(layers));
    Ok(Architecture { stack, experts: Some(experts), ..a })
}
