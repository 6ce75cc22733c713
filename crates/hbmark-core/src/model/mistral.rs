//! Mistral: Llama's layers with a window over all of them, where `sliding_window` is not null.

use serde_json::json;

use super::config::{Conventions, FamilySpec, Fields, Windows, decoder};
use super::{Architecture, Biases, Family, ModelError};

pub(super) const SPEC: FamilySpec = FamilySpec { model_type: "mistral", class: "MistralForCausalLM", read };

fn read(fields: &Fields) -> Result<Architecture, ModelError> {
    fields.only("attention_bias", &json!(false))?;
    fields.only("mlp_bias", &json!(false))?;
    let conventions = Conventions {
        family: Family::Mistral,
        kv_heads_may_be_absent: false,
        head_dim: None,
        theta: None,
        qk_norm: false,
        biases: Biases::default(),
        windows: Windows::Everywhere { required: true },
    };
    decoder(fields, &conventions)
}
