//! The inventory of a folder of safetensors from its headers: what is stored, tensor by tensor.
//!
//! Enters: the tensors of the headers, and the [`Architecture`] of the config beside them. Leaves: an [`Inventory`] with the bytes of the
//! files and the roles of the architecture, or the [`StoredError`] that names what does not fit. Experts may be one tensor or many, Q, K and V
//! one or three, and a model of several parts may put its name before those of its language model; whatever else is not in the architecture
//! is refused by name. Layers that predict further tokens and encoders of images and sound are listed, and no step reads them.

use std::collections::{BTreeMap, HashMap};

pub use super::patterns::language_model;
use super::safetensors::StoredTensor;
use super::{Architecture, Dtype, Inventory, OutOfBounds, Role, TensorInfo};
use crate::units::Bytes;

/// Why the tensors of a folder are not those of its config.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StoredError {
    #[error("tensor {name} is not one of the {family} family")]
    Unknown { name: String, family: String },
    #[error(
        "{place} has {found} {role} weights in the tensors and {wanted} by config.json; the folder is incomplete or of another model"
    )]
    Count { place: String, role: String, found: u64, wanted: u64 },
    #[error(transparent)]
    Rules(#[from] OutOfBounds),
}

/// What follows a module's name, and what it holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    Weights,
    /// Packed into words; so many weights are in one element.
    Packed,
    Scales,
    /// Beside the weights, and not read by a step.
    Unread,
}

/// Endings of names, longest first where one ends another.
const ENDINGS: [(&str, Held); 31] = [
    (".weight.nested_quant_map", Held::Scales),
    (".weight.nested_absmax", Held::Scales),
    (".weight.quant_map", Held::Scales),
    (".weight.absmax", Held::Scales),
    (".weight_global_scale", Held::Scales),
    (".input_global_scale", Held::Scales),
    (".weight_zero_point", Held::Scales),
    (".weight_scale_inv", Held::Scales),
    (".input_scale_ub", Held::Scales),
    (".weight_scale_2", Held::Scales),
    (".weight_packed", Held::Packed),
    (".weight_format", Held::Unread),
    (".weight_scale", Held::Scales),
    (".weight_shape", Held::Unread),
    (".input_scale", Held::Scales),
    (".weight_g_idx", Held::Scales),
    (".k_scale", Held::Scales),
    (".v_scale", Held::Scales),
    (".qweight", Held::Packed),
    (".qzeros", Held::Scales),
    (".scales", Held::Scales),
    (".g_idx", Held::Scales),
    (".weight", Held::Packed),
    ("_scale_inv", Held::Scales),
    ("_weight_scale", Held::Scales),
    ("_blocks", Held::Packed),
    ("_scales", Held::Scales),
    ("_scale", Held::Scales),
    ("_bias", Held::Weights),
    (".bias", Held::Weights),
    (".SCB", Held::Scales),
];

/// Parts of a model beside its decoder, by the beginning of their names.
const BESIDE: [&str; 15] = [
    "mtp.",
    "visual.",
    "vision",
    "vit.",
    "audio",
    "embed_vision",
    "embed_audio",
    "model.visual.",
    "model.vision",
    "model.audio",
    "model.embed_vision",
    "model.embed_audio",
    "model.multi_modal_projector",
    "multi_modal_projector",
    "mm_projector",
];

/// Whether a tensor is of no decode step of a decoder with so many layers, by its name within the language model: it is of a layer that
/// predicts further tokens, of an encoder of images or sound, or a rotary table.
pub fn is_beside(name: &str, layers: usize) -> bool {
    let is_further = |prefix| layer(name, prefix).is_some_and(|layer| layer >= layers);
    ["model.layers.", "backbone.layers."].into_iter().any(is_further)
        || name.ends_with("rotary_emb.inv_freq")
        || BESIDE.iter().any(|start| name.starts_with(start))
}

fn layer(name: &str, prefix: &str) -> Option<usize> {
    name.strip_prefix(prefix)?.split('.').next()?.parse().ok()
}

impl Architecture {
    /// The tensors of a folder, each with the role it has in this architecture and the bytes it has there.
    ///
    /// # Errors
    /// When a tensor is none of the family, or the weights of a layer are not as many as the architecture has.
    pub fn inventory_of<'a>(
        &self,
        tensors: impl IntoIterator<Item = &'a StoredTensor>,
    ) -> Result<Inventory, StoredError> {
        let expected = self.inventory(Dtype::F32);
        let reader = Reader::new(self, &expected)?;
        let mut inventory = Inventory::default();
        for tensor in tensors {
            inventory.tensors.push(reader.listed(tensor)?);
        }
        check_counts(&expected, &inventory)?;
        Ok(inventory)
    }
}

/// Refuses a layer whose weights of a role are more or fewer than the architecture has.
fn check_counts(expected: &Inventory, found: &Inventory) -> Result<(), StoredError> {
    let mut counts: BTreeMap<(Option<usize>, String), (u64, u64)> = BTreeMap::new();
    let counted = |role: Role| {
        use Role::{Embedding, Expert, Head, Matrix, Router, SharedExpert};
        matches!(role, Embedding | Head | Matrix | Expert | SharedExpert | Router)
    };
    for (inventory, side) in [(found, 0), (expected, 1)] {
        for tensor in inventory.tensors.iter().filter(|tensor| counted(tensor.role)) {
            let entry =
                counts.entry((tensor.layer, format!("{:?}", tensor.role).to_lowercase())).or_default();
            let count = if side == 0 { &mut entry.0 } else { &mut entry.1 };
            *count = count.saturating_add(tensor.elements());
        }
    }
    match counts.into_iter().find(|(_, (found, wanted))| found != wanted) {
        None => Ok(()),
        Some(((layer, role), (found, wanted))) => {
            let place = layer.map_or_else(|| "the model".to_owned(), |layer| format!("layer {layer}"));
            Err(StoredError::Count { place, role, found, wanted })
        }
    }
}

/// Knows the modules of an architecture.
struct Reader<'a> {
    architecture: &'a Architecture,
    /// Role and layer of each module, without the ending of its weight.
    modules: HashMap<&'a str, (Role, Option<usize>)>,
    storage: Option<super::quantization::ModuleStorage>,
    layers: String,
}

impl<'a> Reader<'a> {
    fn new(architecture: &'a Architecture, expected: &'a Inventory) -> Result<Self, StoredError> {
        let modules = expected.tensors.iter().map(|tensor| {
            let name = tensor.name.as_str();
            (name.strip_suffix(".weight").unwrap_or(name), (tensor.role, tensor.layer))
        });
        let quantization = architecture.quantization.as_ref();
        let family = architecture.family;
        let layers = if family == super::Family::NemotronH { "backbone.layers." } else { "model.layers." };
        Ok(Self {
            architecture,
            modules: modules.collect(),
            storage: quantization.map(super::Quantization::storage).transpose()?,
            layers: layers.to_owned(),
        })
    }

    fn listed(&self, tensor: &StoredTensor) -> Result<TensorInfo, StoredError> {
        let name = language_model(&tensor.name);
        let listed = |role, layer, shape: Vec<usize>| TensorInfo {
            name: tensor.name.clone(),
            shape,
            storage: tensor.storage.to_lowercase(),
            bytes: Bytes(tensor.bytes),
            role,
            layer,
        };
        let tied = self.architecture.tied_head && name == "lm_head.weight";
        if tied || is_beside(&name, self.architecture.layers) {
            return Ok(listed(Role::Unused, None, tensor.shape.clone()));
        }
        let unknown = || StoredError::Unknown {
            name: tensor.name.chars().take(200).collect(),
            family: format!("{:?}", self.architecture.family),
        };
        // Vectors such as `sinks` and biases are modules of their own.
        if let Some((role, layer)) = self.modules.get(name.as_str()) {
            return Ok(listed(*role, *layer, tensor.shape.clone()));
        }
        let (module, held, ending) = split(&name);
        let (role, layer) = self.module(module).ok_or_else(unknown)?;
        let scale = if role == Role::Expert { Role::ExpertScale } else { Role::Scale };
        let role = match held {
            Held::Scales if self.is_unread(ending) => Role::Unused,
            Held::Scales => scale,
            Held::Unread => Role::Unused,
            Held::Weights if role == Role::Expert => Role::ExpertBias,
            Held::Weights => Role::Bias,
            Held::Packed => role,
        };
        let mut shape = tensor.shape.clone();
        if held == Held::Packed
            && let Some(last) = shape.last_mut()
        {
            *last = last.saturating_mul(self.packed(module, tensor.storage));
        }
        Ok(listed(role, layer, shape))
    }

    /// The role of a module by its own name, or by what it is made of.
    fn module(&self, module: &str) -> Option<(Role, Option<usize>)> {
        if let Some(found) = self.modules.get(module) {
            return Some(*found);
        }
        let layer = layer(module, &self.layers)?;
        if layer >= self.architecture.layers {
            return None;
        }
        let (block, last) = module.rsplit_once('.')?;
        let same = |names: &[&str]| names.contains(&last);
        let known = |name: &str| self.modules.contains_key(format!("{block}.{name}").as_str());
        if module.contains(".experts.") || last == "experts" {
            return match last {
                "gate_up_proj" | "gate_proj" | "up_proj" | "down_proj" | "w1" | "w2" | "w3" | "w13"
                | "experts" => Some((Role::Expert, Some(layer))),
                _ => None,
            };
        }
        let joined = (same(&["qkv_proj"]) && known("q_proj"))
            || (same(&["gate_up_proj"]) && known("gate_proj"))
            || (same(&["q_proj", "k_proj", "v_proj"]) && known("qkv_proj"))
            || (same(&["gate_proj", "up_proj"]) && known("gate_up_proj"));
        // Scales of a quantised cache stand beside the projections.
        let attention = same(&["self_attn", "attn", "mixer"]);
        (joined || attention).then_some((Role::Matrix, Some(layer)))
    }

    /// A symmetric GPTQ file has zeros that are all alike, and one in order has groups that follow from the position.
    fn is_unread(&self, ending: &str) -> bool {
        let Some(quantization) = &self.architecture.quantization else { return false };
        let symmetric = matches!(quantization.main_format(), Some(super::Format::Int { zeros: false, .. }));
        match ending {
            ".qzeros" => quantization.method == "gptq" && symmetric,
            ".g_idx" | ".weight_g_idx" => !quantization.reordered,
            _ => false,
        }
    }

    /// Weights in one element of a tensor.
    fn packed(&self, module: &str, storage: &str) -> usize {
        let bits =
            self.storage.as_ref().and_then(|storage| storage.format(module)).map_or(4, super::Format::bits);
        let per = |word: u32| (word / bits.max(1)).max(1) as usize;
        match storage {
            "I32" | "U32" => per(32),
            "I64" => per(64),
            "U8" | "I8" => per(8),
            _ => 1,
        }
    }
}

/// The module of a tensor's name, and what the ending says it holds.
fn split(name: &str) -> (&str, Held, &str) {
    // bitsandbytes writes the rest of its state as text.
    if let Some((module, _)) = name.split_once(".weight.quant_state.") {
        return (module, Held::Unread, "");
    }
    for (ending, held) in ENDINGS {
        if let Some(module) = name.strip_suffix(ending) {
            return (module, held, ending);
        }
    }
    (name, Held::Packed, "")
}

#[cfg(test)]
mod tests;
