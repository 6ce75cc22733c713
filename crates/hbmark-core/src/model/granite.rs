//! Granite 3 and 4.1 without mixtures or state: Llama's layers, and multipliers of embeddings, scores, what layers add, and logits.

use super::config::{Conventions, FamilySpec, Fields, decoder};
use super::{Architecture, Attention, Biases, Family, Layer, Mixer, ModelError, Multipliers, Stack};

pub(super) const SPEC: FamilySpec = FamilySpec {
    names: &[("granite", "GraniteForCausalLM")],
    keys: &["embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"],
    read,
};

fn read(fields: &Fields) -> Result<Architecture, ModelError> {
    let biased = fields.flag("attention_bias", false)?;
    let conventions = Conventions {
        biases: Biases { qkv: biased, o: biased, mlp: fields.flag("mlp_bias", false)? },
        ..Conventions::of(Family::Granite)
    };
    let a = decoder(fields, &conventions)?;
    // What `transformers` takes for an absent key.
    let multiplier = |key| Ok::<_, ModelError>(fields.float(key, 1e-6..=1e6)?.unwrap_or(1.0));
    let multipliers = Multipliers {
        embedding: multiplier("embedding_multiplier")?,
        residual: multiplier("residual_multiplier")?,
        logits: 1.0 / multiplier("logits_scaling")?,
        logits_softcap: None,
    };
    let attention = Attention { scale: Some(multiplier("attention_multiplier")?), ..a.attention() };
    let layer = Layer { mixer: Mixer::Attention(attention), ..a.layer(0) };
    let stack = Some(Stack::new(std::iter::repeat_n(layer, a.layers)));
    Ok(Architecture { multipliers, stack, ..a })
}
