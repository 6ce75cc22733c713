//! Llama 1 to 3.2, `SmolLM2` and everything else that calls itself `LlamaForCausalLM`.

use super::config::{Conventions, FamilySpec, Fields, Windows, decoder};
use super::{Architecture, Biases, Family, ModelError};

pub(super) const SPEC: FamilySpec = FamilySpec { model_type: "llama", class: "LlamaForCausalLM", read };

fn read(fields: &Fields) -> Result<Architecture, ModelError> {
    let attention = fields.flag("attention_bias", false)?;
    let conventions = Conventions {
        family: Family::Llama,
        kv_heads_may_be_absent: true,
        head_dim: None,
        // Configs older than the key, such as the first Llama 2, all mean this base.
        theta: Some(10_000.0),
        qk_norm: false,
        biases: Biases { qkv: attention, o: attention, mlp: fields.flag("mlp_bias", false)? },
        windows: Windows::Never,
    };
    decoder(fields, &conventions)
}
