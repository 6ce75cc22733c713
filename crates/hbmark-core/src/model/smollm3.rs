//! `SmolLM3`: Llama's layers, every fourth of them without positions.

use super::config::{Conventions, FamilySpec, Fields, decoder};
use super::llama4::turned_layers;
use super::{Architecture, Attention, Biases, Family, Layer, Mixer, ModelError, Stack};

pub(super) const SPEC: FamilySpec = FamilySpec {
    names: &[("smollm3", "SmolLM3ForCausalLM")],
    keys: &["no_rope_layers", "no_rope_layer_interval"],
    read,
};

fn read(fields: &Fields) -> Result<Architecture, ModelError> {
    let attention = fields.flag("attention_bias", false)?;
    let conventions = Conventions {
        biases: Biases { qkv: attention, o: attention, mlp: fields.flag("mlp_bias", false)? },
        ..Conventions::of(Family::Smollm3)
    };
    let mut a = decoder(fields, &conventions)?;
    a.tied_head = fields.flag("tie_word_embeddings", true)?;
    let turned = turned_layers(fields, a.layers)?;
    let layers = (0..a.layers).map(|layer| {
        let attention = a.attention();
        let rope = attention.rope.filter(|_| turned[layer]);
        Layer { mixer: Mixer::Attention(Attention { rope, ..attention }), ..a.layer(layer) }
    });
    let stack = Some(Stack::new(layers));
    Ok(Architecture { stack, ..a })
}
