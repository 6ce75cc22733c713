//! Qwen3: a norm on Q and K per head, a `head_dim` of its own, no biases unless asked for.

use serde_json::json;

use super::config::{Conventions, FamilySpec, Fields, Windows, decoder};
use super::{Architecture, Biases, Family, ModelError};

pub(super) const SPEC: FamilySpec = FamilySpec { names: &[("qwen3", "Qwen3ForCausalLM")], keys: &[], read };

fn read(fields: &Fields) -> Result<Architecture, ModelError> {
    fields.only("mlp_bias", &json!(false))?;
    if fields.get("head_dim").is_none() {
        // transformers takes 128 for an absent key; other readers divide.
        return Err(fields.missing("head_dim", "the width of one attention head"));
    }
    let attention = fields.flag("attention_bias", false)?;
    let conventions = Conventions {
        qk_norm: true,
        biases: Biases { qkv: attention, o: attention, mlp: false },
        windows: Windows::FromLayer,
        ..Conventions::of(Family::Qwen3)
    };
    decoder(fields, &conventions)
}
