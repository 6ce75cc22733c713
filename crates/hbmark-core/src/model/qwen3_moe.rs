//! Qwen3 with routed experts, on every `decoder_sparse_step`-th layer that `mlp_only_layers` does not name.

use serde_json::{Value, json};

use super::config::{Conventions, FamilySpec, Fields, Windows, decoder, experts_per_token, limits};
use super::{Architecture, Biases, Family, Mixture, ModelError, Routing};

pub(super) const SPEC: FamilySpec =
    FamilySpec { names: &[("qwen3_moe", "Qwen3MoeForCausalLM")], keys: &["use_qk_norm"], read };

fn read(fields: &Fields) -> Result<Architecture, ModelError> {
    fields.only("mlp_bias", &json!(false))?;
    // Qwen3-Coder says what all of the family have.
    fields.only("use_qk_norm", &json!(true))?;
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
    let dense_layers = dense_layers(fields, architecture.layers)?;
    Ok(architecture.with_mixture(mixture(fields)?, dense_layers))
}

/// The experts of Qwen's mixtures, without shared ones.
pub(super) fn mixture(fields: &Fields) -> Result<Mixture, ModelError> {
    let count = count(fields)?;
    let per_token = experts_per_token(fields, count)?;
    let width = fields.need_integer("moe_intermediate_size", 1..=limits::FFN)?;
    let routing = Routing::Softmax { renormalised: fields.flag("norm_topk_prob", false)? };
    Ok(Mixture::new(count, per_token, width, routing))
}

/// `num_experts`, which transformers 5 writes as `num_local_experts` where it saves a model.
fn count(fields: &Fields) -> Result<usize, ModelError> {
    let (published, saved) = ("num_experts", "num_local_experts");
    match (fields.get(published), fields.get(saved)) {
        (None, Some(_)) => fields.need_integer(saved, 1..=limits::EXPERTS),
        (Some(one), Some(other)) if one != other => {
            Err(fields.bad(saved, format!("the same number as `{published}`, or only one of them")))
        }
        _ => fields.need_integer(published, 1..=limits::EXPERTS),
    }
}

/// Layers that `mlp_only_layers` names, and those that are no `decoder_sparse_step`-th.
pub(super) fn dense_layers(fields: &Fields, layers: usize) -> Result<Vec<usize>, ModelError> {
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
