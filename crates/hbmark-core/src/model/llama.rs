//! Llama 1 to 3.2, `SmolLM2` and everything else that calls itself `LlamaForCausalLM`.

use super::config::{Conventions, FamilySpec, Fields, decoder};
use super::{Architecture, Biases, Family, ModelError};

pub(super) const SPEC: FamilySpec = FamilySpec { names: &[("llama", "LlamaForCausalLM")], keys: &[], read };

fn read(fields: &Fields) -> Result<Architecture, ModelError> {
    let attention = fields.flag("attention_bias", false)?;
    let conventions = Conventions {
        kv_heads_may_be_absent: true,
        // Configs older than the key, such as the first Llama 2, all mean this base.
        theta: Some(10_000.0),
        biases: Biases { qkv: attention, o: attention, mlp: fields.flag("mlp_bias", false)? },
        ..Conventions::of(Family::Llama)
    };
    decoder(fields, &conventions)
}
