//! Qwen3 with routed experts, on every `decoder_sparse_step`-th layer that `mlp_only_layers` does not name.

use serde_json::{Value, json};

use super::config::{Conventions, FamilySpec, Fields, Windows, decoder, experts_per_token, limits};
use super::{Architecture, Biases, Experts, Family, ModelError};

pub(super) const SPEC: FamilySpec =
    FamilySpec { names: &[("qwen3_moe", "Qwen3MoeForCausalLM")], keys: &[], read };

fn read(fields: &Fields) -> Result<Architecture, ModelError> {
    fields.only("mlp_bias", &json!(false))?;
    // Readers disagree on whether a window binds all layers or those from `max_window_layers` on.
    fields.only("use_sliding_window", &json!(false))?;
    let attention = fields.flag("attention_bias", false)?;
    let conventions = Conventions {
        qk_norm: true,
        biases: Biases { qkv: attention, o: attention, mlp: false },
        windows: Windows::FromLayer,
        ..Conventions::of(Family::Qwen3Moe)
    };
    let architecture = decoder(fields, &conventions)?;
    let count = fields.need_integer("num_experts", 1..=limits::EXPERTS)?;
    let experts = Experts {
        count,
        per_token: experts_per_token(fields, count)?,
        ffn_size: fields.need_integer("moe_intermediate_size", 1..=limits::FFN)?,
        shared_count: 0,
        shared_ffn_size: 0,
        dense_layers: dense_layers(fields, architecture.layers)?,
    };
    Ok(Architecture { experts: Some(experts), ..architecture })
}

fn dense_layers(fields: &Fields, layers: usize) -> Result<Vec<usize>, ModelError> {
    let key = "mlp_only_layers";
    let step = fields.integer("decoder_sparse_step", 1..=limits::LAYERS)?.unwrap_or(1);
    let index = |value: &Value| {
        value
            .as_u64()
            .and_then(|v| usize::try_from(v).ok())
            .filter(|&v| v < layers)
            .ok_or_else(|| fields.bad(key, format!("a list of layer indices below {layers}")))
    };
    let listed: Vec<usize> =
        fields.list(key, limits::LAYERS)?.unwrap_or_default().iter().map(index).collect::<Result<_, _>>()?;
    Ok((0..layers).filter(|layer| listed.contains(layer) || !(layer + 1).is_multiple_of(step)).collect())
}
