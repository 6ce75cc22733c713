//! From a stream of tensors to a model packed for a device.
//!
//! Enters: an [`OpenModel`] and a dtype. Leaves: [`ModelWeights`] and the inventory of what was loaded. Tensors are packed as soon as the last one of their
//! fused layer has come, so no second copy of the model is ever held.

use std::collections::HashMap;

use super::forward::{LayerWeights, ModelWeights};
use super::operations::{AttentionWeights, FusedLayout, LinearPart, Operations};
use crate::engine::{EngineError, error_mapping};
use crate::weights::{OpenModel, Packing, StoredMatrix, StoredTensor};
use hbmark_core::model::{Architecture, Dtype, Inventory};
use hbmark_core::units::Bytes;

/// The prefix of everything but the head.
const MODEL: &str = "model";

/// Loads and packs a model; every tensor passes through `each` first, and `loaded` is called with the bytes of each.
///
/// # Errors
/// When the weights cannot be read, or memory runs out.
pub fn load<O: Operations>(
    operations: &mut O,
    model: &OpenModel,
    dtype: Dtype,
    each: fn(StoredTensor) -> StoredTensor,
    loaded: &mut dyn FnMut(Bytes),
) -> Result<(ModelWeights<O>, Inventory), EngineError> {
    let mut assembly = Assembly::new(&model.architecture);
    let mut failed = None;
    let streamed = model.stream(dtype, &mut |name, tensor| {
        // The stream's sink returns the model's errors; an engine error is kept here, and the rest of the stream dropped.
        if failed.is_none() {
            loaded(tensor.bytes());
            failed = assembly.take(operations, name, each(tensor)).err();
        }
        Ok(())
    });
    if let Some(error) = failed {
        return Err(error);
    }
    // Whatever the device, tensors pass through the host.
    let inventory = streamed.map_err(|error| error_mapping::of_loading("cpu", error))?;
    Ok((assembly.finish(operations)?, inventory))
}

/// Packs tensors that are at hand, by their names and in the order of the inventory.
///
/// # Errors
/// When memory runs out.
pub fn assemble<O: Operations>(
    operations: &mut O,
    architecture: &Architecture,
    tensors: impl IntoIterator<Item = (String, StoredTensor)>,
) -> Result<ModelWeights<O>, EngineError> {
    let mut assembly = Assembly::new(architecture);
    for (name, tensor) in tensors {
        assembly.take(operations, &name, tensor)?;
    }
    assembly.finish(operations)
}

/// A tensor as f32, whatever it is stored as.
#[must_use]
pub fn dequantised(tensor: StoredTensor) -> StoredTensor {
    match tensor {
        StoredTensor::Matrix(matrix) => StoredTensor::Matrix(StoredMatrix::quantize(&matrix, Packing::F32)),
        vector @ StoredTensor::Vector(_) => vector,
    }
}

/// Layers in the making.
struct Assembly<'a, O: Operations> {
    architecture: &'a Architecture,
    /// Tensors whose layer is not complete.
    waiting: HashMap<String, StoredTensor>,
    layers: Vec<LayerWeights<O>>,
}

impl<'a, O: Operations> Assembly<'a, O> {
    fn new(architecture: &'a Architecture) -> Self {
        Self { architecture, waiting: HashMap::new(), layers: Vec::with_capacity(architecture.layers) }
    }

    /// Takes a tensor. Tensors come in the order of the inventory, so the first of the next layer means that the last is complete.
    fn take(&mut self, operations: &mut O, name: &str, tensor: StoredTensor) -> Result<(), EngineError> {
        let next = format!("{MODEL}.layers.{}.", self.layers.len() + 1);
        if name.starts_with(&next) {
            self.complete_layer(operations)?;
        }
        self.waiting.insert(name.to_owned(), tensor);
        Ok(())
    }

    fn complete_layer(&mut self, operations: &mut O) -> Result<(), EngineError> {
        let index = self.layers.len();
        let prefix = format!("{MODEL}.layers.{index}");
        let attention = |name: &str| format!("{prefix}.self_attn.{name}");
        let mlp = |name: &str| format!("{prefix}.mlp.{name}");

        let qkv = ["q_proj", "k_proj", "v_proj"].map(|name| self.part(&attention(name)));
        let norm = self.vector(&format!("{prefix}.input_layernorm.weight"));
        let head_norms = if self.architecture.qk_norm {
            let query = operations.vector(self.vector(&attention("q_norm.weight")))?;
            let key = operations.vector(self.vector(&attention("k_norm.weight")))?;
            Some((query, key))
        } else {
            None
        };
        let layer = LayerWeights {
            attention: AttentionWeights {
                norm: operations.vector(norm)?,
                qkv: operations
                    .linear(qkv.into(), FusedLayout::Heads { head_dim: self.architecture.head_dim })?,
                head_norms,
            },
            output: operations.linear(vec![self.part(&attention("o_proj"))], FusedLayout::Stacked)?,
            norm: operations.vector(self.vector(&format!("{prefix}.post_attention_layernorm.weight")))?,
            gate_up: operations.linear(
                ["gate_proj", "up_proj"].map(|name| self.part(&mlp(name))).into(),
                FusedLayout::Interleaved,
            )?,
            down: operations.linear(vec![self.part(&mlp("down_proj"))], FusedLayout::Stacked)?,
            window: self.architecture.window(index),
        };
        self.layers.push(layer);
        Ok(())
    }

    fn finish(mut self, operations: &mut O) -> Result<ModelWeights<O>, EngineError> {
        self.complete_layer(operations)?;
        let embedding = self.matrix(&format!("{MODEL}.embed_tokens.weight"));
        let (table, head) = if self.architecture.tied_head {
            (None, embedding)
        } else {
            (Some(operations.table(embedding)?), self.matrix("lm_head.weight"))
        };
        Ok(ModelWeights {
            table,
            norm: operations.vector(self.vector(&format!("{MODEL}.norm.weight")))?,
            head: operations.linear(vec![LinearPart { matrix: head, bias: None }], FusedLayout::Stacked)?,
            layers: self.layers,
        })
    }

    /// A linear layer with its bias, where it has one.
    fn part(&mut self, name: &str) -> LinearPart {
        let bias = match self.waiting.remove(&format!("{name}.bias")) {
            Some(StoredTensor::Vector(bias)) => Some(bias),
            _ => None,
        };
        LinearPart { matrix: self.matrix(&format!("{name}.weight")), bias }
    }

    fn matrix(&mut self, name: &str) -> StoredMatrix {
        match self.waiting.remove(name) {
            Some(StoredTensor::Matrix(matrix)) => matrix,
            other => unreachable!("the stream hands over every matrix of the inventory: {name} is {other:?}"),
        }
    }

    fn vector(&mut self, name: &str) -> Vec<f32> {
        match self.waiting.remove(name) {
            Some(StoredTensor::Vector(vector)) => vector,
            other => unreachable!("the stream hands over every vector of the inventory: {name} is {other:?}"),
        }
    }
}
