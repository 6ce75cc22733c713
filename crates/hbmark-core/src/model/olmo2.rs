//! OLMo 2: norms after each block and none before, and over the full width of Q and K.

use super::config::{Conventions, FamilySpec, Fields, decoder};
use super::{Architecture, Attention, Biases, Family, Layer, Mixer, ModelError, Norms, QkNorm, Stack};

pub(super) const SPEC: FamilySpec = FamilySpec { names: &[("olmo2", "Olmo2ForCausalLM")], keys: &[], read };

fn read(fields: &Fields) -> Result<Architecture, ModelError> {
    let biased = fields.flag("attention_bias", false)?;
    let conventions = Conventions {
        qk_norm: true,
        biases: Biases { qkv: biased, o: biased, mlp: false },
        ..Conventions::of(Family::Olmo2)
    };
    let a = decoder(fields, &conventions)?;
    let attention = Attention { qk_norm: QkNorm::FullWidth, ..a.attention() };
    let layer = Layer { mixer: Mixer::Attention(attention), norms: Norms::After, ..a.layer(0) };
    let stack = Some(Stack::new(std::iter::repeat_n(layer, a.layers)));
    Ok(Architecture { stack, ..a })
}
