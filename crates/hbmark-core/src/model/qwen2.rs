//! Qwen2 and Qwen2.5: biases on Q, K and V whatever the config says, windows on the upper layers on request.

use serde_json::json;

use super::config::{Conventions, FamilySpec, Fields, Windows, decoder};
use super::{Architecture, Biases, Family, ModelError};

pub(super) const SPEC: FamilySpec = FamilySpec { names: &[("qwen2", "Qwen2ForCausalLM")], keys: &[], read };

fn read(fields: &Fields) -> Result<Architecture, ModelError> {
    fields.only("mlp_bias", &json!(false))?;
    let conventions = Conventions {
        biases: Biases { qkv: true, o: false, mlp: false },
        windows: Windows::FromLayer,
        ..Conventions::of(Family::Qwen2)
    };
    decoder(fields, &conventions)
}
