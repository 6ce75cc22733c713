//! Mixtral: Mistral's attention, and routed experts of width `intermediate_size` in every layer.

use serde_json::json;

use super::config::{Conventions, FamilySpec, Fields, Windows, decoder, experts_per_token, limits};
use super::{Architecture, Family, Mixture, ModelError, Routing};

pub(super) const SPEC: FamilySpec =
    FamilySpec { names: &[("mixtral", "MixtralForCausalLM")], keys: &[], read };

fn read(fields: &Fields) -> Result<Architecture, ModelError> {
    fields.only("attention_bias", &json!(false))?;
    fields.only("mlp_bias", &json!(false))?;
    let conventions =
        Conventions { windows: Windows::Everywhere { required: false }, ..Conventions::of(Family::Mixtral) };
    let architecture = decoder(fields, &conventions)?;
    let count = fields.need_integer("num_local_experts", 1..=limits::EXPERTS)?;
    let per_token = experts_per_token(fields, count)?;
    let routing = Routing::Softmax { renormalised: true };
    let mixture = Mixture::new(count, per_token, architecture.ffn_size, routing);
    Ok(architecture.with_mixture(mixture, Vec::new()))
}
