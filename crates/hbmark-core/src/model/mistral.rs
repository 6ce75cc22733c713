//! Mistral: Llama's layers with a window over all of them, where `sliding_window` is not null.

use serde_json::json;

use super::config::{Conventions, FamilySpec, Fields, Windows, decoder};
use super::{Architecture, Family, ModelError};

pub(super) const SPEC: FamilySpec = FamilySpec {
    names: &[("mistral", "MistralForCausalLM"), ("mistral3", "Mistral3ForConditionalGeneration")],
    keys: &[],
    read,
};

fn read(fields: &Fields) -> Result<Architecture, ModelError> {
    // Among the parts of a Mistral 3 there may be a Ministral 3 or a Mistral 4, whose layers are others.
    fields.only("model_type", &json!("mistral"))?;
    fields.only("attention_bias", &json!(false))?;
    fields.only("mlp_bias", &json!(false))?;
    let conventions =
        Conventions { windows: Windows::Everywhere { required: true }, ..Conventions::of(Family::Mistral) };
    decoder(fields, &conventions)
}
