//! Qwen2 and Qwen2.5: biases on Q, K and V whatever the config says, windows on the upper layers on request.

use serde_json::json;

use super::config::{Conventions, FamilySpec, Fields, Windows, decoder};
use super::{Architecture, Biases, Family, ModelError};

pub(super) const SPEC: FamilySpec = FamilySpec { model_type: "qwen2", class: "Qwen2ForCausalLM", read };

fn read(fields: &Fields) -> Result<Architecture, ModelError> {
    fields.only("mlp_bias", &json!(false))?;
    let conventions = Conventions {
        family: Family::Qwen2,
        kv_heads_may_be_absent: false,
        head_dim: None,
        theta: None,
        qk_norm: false,
        biases: Biases { qkv: true, o: false, mlp: false },
        windows: Windows::FromLayer,
    };
    decoder(fields, &conventions)
}
