//! From a stream of tensors to a model packed for a device.
//!
//! Enters: an [`OpenModel`] and a dtype. Leaves: [`ModelWeights`] and the inventory of what was loaded. Tensors are packed as soon as the last one of their
//! fused layer has come, so no second copy of the model is ever held.

use std::collections::HashMap;

use super::forward::{LayerWeights, Mlp, ModelWeights};
use super::operations::{
    AttentionWeights, ExpertMlp, ExpertShape, ExpertWeights, FusedLayout, LinearPart, Operations,
};
use crate::engine::{EngineError, error_mapping};
use crate::weights::{OpenModel, Packing, StoredMatrix, StoredTensor};
use hbmark_core::model::{Architecture, Dtype, FeedForward, Inventory, MixtureNames};
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
    names: MixtureNames,
    /// Experts of the next layer: each is packed when its last matrix has come.
    routed: Vec<ExpertMlp<O>>,
}

impl<'a, O: Operations> Assembly<'a, O> {
    fn new(architecture: &'a Architecture) -> Self {
        Self {
            architecture,
            waiting: HashMap::new(),
            layers: Vec::with_capacity(architecture.layers),
            names: MixtureNames::of(architecture.family),
            routed: Vec::new(),
        }
    }

    /// Takes a tensor. Tensors come in the order of the inventory, so the first of the next layer means that the last is complete.
    fn take(&mut self, operations: &mut O, name: &str, tensor: StoredTensor) -> Result<(), EngineError> {
        let next = format!("{MODEL}.layers.{}.", self.layers.len() + 1);
        if name.starts_with(&next) {
            self.complete_layer(operations)?;
        }
        self.waiting.insert(name.to_owned(), tensor);
        if name.contains(".experts.") { self.complete_expert(operations) } else { Ok(()) }
    }

    /// Packs the next routed expert of the layer where all of it is there.
    fn complete_expert(&mut self, operations: &mut O) -> Result<(), EngineError> {
        let expert = format!("{}.experts.{}", self.mixture_prefix(), self.routed.len());
        let names = self.names.matrices;
        if names.iter().all(|name| self.waiting.contains_key(&format!("{expert}.{name}.weight"))) {
            let packed = self.expert(operations, &expert, names)?;
            self.routed.push(packed);
        }
        Ok(())
    }

    /// Where the experts of the next layer are.
    fn mixture_prefix(&self) -> String {
        format!("{MODEL}.layers.{}.{}", self.layers.len(), self.names.block)
    }

    /// An expert under a name, by the names of its gate, up and down.
    fn expert(
        &mut self,
        operations: &mut O,
        expert: &str,
        [gate, up, down]: [&str; 3],
    ) -> Result<ExpertMlp<O>, EngineError> {
        let gate_up = [gate, up].map(|name| self.part(&format!("{expert}.{name}")));
        let down = self.part(&format!("{expert}.{down}"));
        Ok(ExpertMlp {
            gate_up: operations.linear(gate_up.into(), FusedLayout::Interleaved)?,
            down: operations.linear(vec![down], FusedLayout::Stacked)?,
        })
    }

    /// The feed-forward of the next layer.
    fn mlp(&mut self, operations: &mut O) -> Result<Mlp<O>, EngineError> {
        let index = self.layers.len();
        let FeedForward::Mixture(mixture) = self.architecture.layer(index).feed_forward else {
            let dense = format!("{MODEL}.layers.{index}.mlp");
            let ExpertMlp { gate_up, down } = self.expert(operations, &dense, MixtureNames::DENSE)?;
            return Ok(Mlp::Dense { gate_up, down });
        };
        let shape = ExpertShape::of(&mixture).expect("a mixture that was checked before it was loaded");
        let prefix = self.mixture_prefix();
        let mut router = self.matrix(&format!("{prefix}.{}.weight", self.names.router));
        if shape.shared_gate {
            let gate = self.matrix(&format!("{prefix}.{}.weight", self.names.shared_gate));
            router = router.extended(gate).expect("the inventory stores both as the same plain floats");
        }
        let shared = if shape.shared_width > 0 {
            let shared = format!("{prefix}.{}", self.names.shared);
            Some(self.expert(operations, &shared, MixtureNames::DENSE)?)
        } else {
            None
        };
        let router =
            operations.linear(vec![LinearPart { matrix: router, bias: None }], FusedLayout::Stacked)?;
        let routed = std::mem::take(&mut self.routed);
        let table = operations.expert_table(&routed, shared.as_ref())?;
        Ok(Mlp::Experts(ExpertWeights { shape, router, routed, shared, table }))
    }

    fn complete_layer(&mut self, operations: &mut O) -> Result<(), EngineError> {
        let index = self.layers.len();
        let prefix = format!("{MODEL}.layers.{index}");
        let attention = |name: &str| format!("{prefix}.self_attn.{name}");
        let a = self.architecture;
        let (query, kv) = (a.heads * a.head_dim, a.kv_heads * a.head_dim);
        self.unfuse(&attention("qkv_proj"), [("q_proj", query), ("k_proj", kv), ("v_proj", kv)]);
        let halves = [("gate_proj", a.ffn_size), ("up_proj", a.ffn_size)];
        self.unfuse(&format!("{prefix}.mlp.gate_up_proj"), halves);

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
            mlp: self.mlp(operations)?,
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

    /// Gives the parts of a layer that some families store as one the names that others have for them: so many rows each.
    fn unfuse<const PARTS: usize>(&mut self, fused: &str, parts: [(&str, usize); PARTS]) {
        let Some(StoredTensor::Matrix(matrix)) = self.waiting.remove(&format!("{fused}.weight")) else {
            return;
        };
        let bias = self.waiting.remove(&format!("{fused}.bias"));
        let block = fused.rsplit_once('.').map_or("", |(block, _)| block);
        let mut start = 0;
        for (name, rows) in parts {
            let range = start..start + rows;
            let part = StoredTensor::Matrix(matrix.slice_rows(range.clone()));
            self.waiting.insert(format!("{block}.{name}.weight"), part);
            if let Some(StoredTensor::Vector(bias)) = &bias {
                let part = StoredTensor::Vector(bias[range].to_vec());
                self.waiting.insert(format!("{block}.{name}.bias"), part);
            }
            start += rows;
        }
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
