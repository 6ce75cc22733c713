//! Qwen1.5 and Qwen2 with routed experts beside a shared one that has a gate of its own; biases on Q, K and V.

use serde_json::json;

use super::config::{Conventions, FamilySpec, Fields, Windows, decoder, limits};
use super::qwen3_moe::{dense_layers, mixture};
use super::{Architecture, Biases, Family, Mixture, ModelError};

pub(super) const SPEC: FamilySpec =
    FamilySpec { names: &[("qwen2_moe", "Qwen2MoeForCausalLM")], keys: &[], read };

fn read(fields: &Fields) -> Result<Architecture, ModelError> {
    fields.only("mlp_bias", &json!(false))?;
    // Readers disagree on whether a window binds all layers or those from `max_window_layers` on.
    fields.only("use_sliding_window", &json!(false))?;
    let conventions = Conventions {
        biases: Biases { qkv: fields.flag("qkv_bias", true)?, o: false, mlp: false },
        windows: Windows::FromLayer,
        ..Conventions::of(Family::Qwen2Moe)
    };
    let architecture = decoder(fields, &conventions)?;
    let dense_layers = dense_layers(fields, architecture.layers)?;
    let mixture = Mixture {
        shared_width: fields.need_integer("shared_expert_intermediate_size", 1..=limits::FFN)?,
        shared_gate: true,
        ..mixture(fields)?
    };
    Ok(architecture.with_mixture(mixture, dense_layers))
}
