//! gpt-oss: windows on every other layer, a sink per head, biases everywhere, experts with a clamped activation.

use serde_json::json;

use super::config::{
    Conventions, FamilySpec, Fields, Windows, decoder, experts_per_token, layer_kinds, limits,
};
use super::{
    Activation, Architecture, Attention, Biases, Experts, Family, FeedForward, Layer, Mixer, Mixture,
    ModelError, Norms, QkNorm, Reach, Routing, Stack,
};

pub(super) const SPEC: FamilySpec =
    FamilySpec { names: &[("gpt_oss", "GptOssForCausalLM")], keys: &["swiglu_limit"], read };

const KINDS: [&str; 2] = ["full_attention", "sliding_attention"];

fn read(fields: &Fields) -> Result<Architecture, ModelError> {
    let bias = fields.flag("attention_bias", true)?;
    let conventions = Conventions {
        biases: Biases { qkv: bias, o: bias, mlp: true },
        windows: Windows::Own,
        ..Conventions::of(Family::GptOss)
    };
    let a = decoder(fields, &conventions)?;
    fields.only(
        "experts_per_token",
        &json!(fields.need_integer("num_experts_per_tok", 1..=limits::EXPERTS)?),
    )?;
    fields.only("swiglu_alpha", &json!(1.702))?;
    let count = fields.need_integer("num_local_experts", 1..=limits::EXPERTS)?;
    let mixture =
        Mixture::new(count, experts_per_token(fields, count)?, a.ffn_size, Routing::SoftmaxOfChosen);
    let limit = fields.float("swiglu_limit", 0.0..=1e6)?.unwrap_or(7.0);
    let mixture = Mixture { activation: Activation::ClampedSwiglu { limit }, bias: true, ..mixture };
    let tokens = fields.need_integer("sliding_window", 1..=limits::POSITIONS)?;
    let kinds = layer_kinds(fields, a.layers, &KINDS)?
        .ok_or_else(|| fields.missing("layer_types", "the kind of every layer"))?;
    let layers = kinds.iter().map(|kind| Layer {
        mixer: Mixer::Attention(Attention {
            reach: if *kind == KINDS[0] { Reach::Full } else { Reach::Window { tokens } },
            qk_norm: QkNorm::None,
            sinks: true,
            ..a.attention()
        }),
        feed_forward: FeedForward::Mixture(mixture),
        norms: Norms::Before,
    });
    let stack = Some(Stack::new(layers));
    Ok(Architecture { stack, experts: Some(Experts::of(&mixture, Vec::new())), ..a })
}
