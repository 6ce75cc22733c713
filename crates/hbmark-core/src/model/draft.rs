//! The one layer that drafts tokens for a model.
//!
//! Enters: a model's [`Architecture`]. Leaves: that of the drafting layer as a model of its own, whose decode step is one draft token. It has the
//! model's embedding, one layer like the model's last, and the model's head; before the layer a projection brings the embedding of the last token
//! and the model's hidden state to one width.
//!
//! *Source*: `DeepSeek`-V3 technical report (arXiv 2412.19437), section 2.2, equations 21 to 23; EAGLE (arXiv 2401.15077), section 4.1.

use serde::{Deserialize, Serialize};

use super::{Architecture, Attention, Experts, Family, FeedForward, Layer, Mixer, ModelError, Reach, Stack};

/// What a drafting layer makes of an embedding and a hidden state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum DraftLayer {
    /// Multi-token prediction (`DeepSeek`-V3, GLM-4.5): each is normed, and a matrix projects both.
    Mtp,
    /// EAGLE: a matrix projects both as they are. Its layer keeps the norms of the model's.
    Eagle,
}

impl DraftLayer {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Mtp, Self::Eagle];

    /// As it is written behind the name of a model.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mtp => "mtp",
            Self::Eagle => "eagle",
        }
    }

    /// Splits the spec of a drafting layer, `MODEL+mtp` or `MODEL+eagle`, into the model's and the kind.
    pub fn split(spec: &str) -> Option<(&str, Self)> {
        let (model, kind) = spec.rsplit_once('+')?;
        let kind = Self::ALL.into_iter().find(|own| own.name() == kind)?;
        (!model.is_empty()).then_some((model, kind))
    }

    /// The name of the projection, behind that of the model.
    pub fn projection(self) -> &'static str {
        match self {
            Self::Mtp => "eh_proj",
            Self::Eagle => "fc",
        }
    }

    /// The names of the norms of the embedding and of the hidden state, behind that of the model.
    pub fn norms(self) -> Option<[&'static str; 2]> {
        (self == Self::Mtp).then_some(["enorm", "hnorm"])
    }
}

impl Architecture {
    /// The layer that drafts for this model, as a model of its own.
    ///
    /// # Errors
    /// For EAGLE where the model's last layer has experts: its drafting layers are dense, and their widths follow from nothing in a config.
    pub fn draft(&self, kind: DraftLayer) -> Result<Self, ModelError> {
        let last = self.drafting_layer(kind);
        let mixture = last.feed_forward.mixture().copied();
        if matches!(last.mixer, Mixer::None) || matches!(last.feed_forward, FeedForward::None) {
            return Err(ModelError::NoDraftLayer {
                kind: kind.name(),
                why: "its layers are a mixer or a feed-forward, and a drafting layer has both",
            });
        }
        if kind == DraftLayer::Eagle && !matches!(last.feed_forward, FeedForward::Dense(_)) {
            return Err(ModelError::NoDraftLayer {
                kind: kind.name(),
                why: "its last layer has experts, and EAGLE's are dense layers of a width that the config does not say; choose +mtp",
            });
        }
        Ok(Self {
            layers: 1,
            windows: Vec::new(),
            experts: mixture.map(|mixture| Experts::of(&mixture, Vec::new())),
            stack: Some(Stack::new([last])),
            draft: Some(kind),
            ..self.clone()
        })
    }

    /// The layer like which the drafting one is: the last, but MiMo-V2-Flash drafts with a window and a dense feed-forward, 0.33 billion parameters a
    /// layer (its model card).
    fn drafting_layer(&self, kind: DraftLayer) -> Layer {
        let last = self.layer(self.layers - 1);
        if (self.family, kind) != (Family::MimoV2, DraftLayer::Mtp) {
            return last;
        }
        let all = || (0..self.layers).map(|index| self.layer(index));
        let windowed =
            |mixer: &Mixer| matches!(mixer, Mixer::Attention(Attention { reach: Reach::Window { .. }, .. }));
        Layer {
            mixer: all().map(|layer| layer.mixer).find(windowed).unwrap_or(last.mixer),
            feed_forward: all()
                .map(|layer| layer.feed_forward)
                .find(|feed_forward| matches!(feed_forward, FeedForward::Dense(_)))
                .unwrap_or(last.feed_forward),
            ..last
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Ledger;
    use crate::model::{Dtype, Role, presets, test_shapes as shapes};

    #[test]
    fn a_spec_names_a_model_and_a_kind() {
        assert_eq!(DraftLayer::split("DeepSeek-V3+mtp"), Some(("DeepSeek-V3", DraftLayer::Mtp)));
        assert_eq!(DraftLayer::split("./a+b+eagle"), Some(("./a+b", DraftLayer::Eagle)));
        for other in ["Llama-3.1-8B", "a+b", "+mtp", "x+MTP"] {
            assert_eq!(DraftLayer::split(other), None);
        }
    }

    #[test]
    fn the_layer_of_deepseek_v3_has_the_tensors_that_are_published() {
        // Layer 61 of the checkpoint; its copies of the embedding and of the head are the model's own.
        let draft = presets::find("DeepSeek-V3").unwrap().architecture.draft(DraftLayer::Mtp).unwrap();
        let inventory = draft.inventory(Dtype::Bf16);
        assert_eq!(inventory.bytes_of(Role::Head).0, 2 * 129_280 * 7168);
        let h = 7168_u64;
        // Attention: queries over a rank of 1536, latents of 512 and a key of 64, 128 heads of 128 + 64 and 128.
        let attention = h * 1536 + 1536 + 1536 * 128 * 192 + h * 576 + 512 + 512 * 128 * 256 + 128 * 128 * h;
        let experts = 257 * 3 * h * 2048 + 256 * h;
        // Two norms of the layer, two of the inputs, one before the head.
        let wanted = 2 * h * h + attention + experts + 5 * h;
        let correction = 256;
        let parameters = inventory.parameters() - 2 * 129_280 * h;
        assert_eq!(parameters, wanted + correction);
        // The model card: 11.5 billion beside embedding and head.
        assert!((11.5e9..11.65e9).contains(&(parameters as f64)), "{parameters}");
    }

    #[test]
    fn the_layer_of_mimo_has_a_window_and_a_dense_feed_forward() {
        let mimo = presets::find("MiMo-V2-Flash").unwrap().architecture;
        let draft = mimo.draft(DraftLayer::Mtp).unwrap();
        let parameters = draft.inventory(Dtype::Bf16).parameters() - 2 * 152_576 * 4096;
        // The projection, 64 heads of 192 and 128, 8 of keys and values, and 16,384 channels; sinks and norms are a few thousand.
        let matrices = 2 * 4096 * 4096 + 4096 * (64 * (192 + 128) + 8 * (192 + 128) + 3 * 16_384);
        assert!((matrices..matrices + 50_000).contains(&parameters), "{parameters} for {matrices}");
        // The model card: 0.33 billion.
        assert!((0.325e9..0.335e9).contains(&(parameters as f64)), "{parameters}");
        let read = |context| {
            let inventory = draft.inventory(Dtype::Bf16);
            Ledger::new(&draft, &inventory, Dtype::Bf16).decode(1, context).bytes.kv_read
        };
        assert_eq!(read(128), read(100_000));
    }

    #[test]
    fn a_step_reads_the_projection_one_layer_and_the_head() {
        let llama = shapes::llama_3_1_8b();
        let read = |architecture: &Architecture| {
            let inventory = architecture.inventory(Dtype::Bf16);
            Ledger::new(architecture, &inventory, Dtype::Bf16).decode(1, 0).bytes.weights.0
        };
        let one = Architecture { layers: 1, ..llama.clone() };
        let h = 4096;
        assert_eq!(read(&llama.draft(DraftLayer::Eagle).unwrap()), read(&one) + 2 * 2 * h * h);
        assert_eq!(read(&llama.draft(DraftLayer::Mtp).unwrap()), read(&one) + 2 * (2 * h * h + 2 * h));
    }

    #[test]
    fn eagle_is_for_dense_layers() {
        let error = shapes::mixtral_8x7b().draft(DraftLayer::Eagle).unwrap_err();
        assert!(error.to_string().contains("+mtp"), "{error}");
        assert!(shapes::mixtral_8x7b().draft(DraftLayer::Mtp).unwrap().check().is_ok());
    }
}
