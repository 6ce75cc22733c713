//! From a stream of tensors to a model packed for a device.
//!
//! Enters: an [`OpenModel`] and a dtype. Leaves: [`ModelWeights`] and the inventory of what was loaded. Tensors are packed as soon as the last one of their
//! fused layer has come, so no second copy of the model is ever held.

use std::collections::HashMap;
use std::ops::Range;

use super::forward::{LayerWeights, Mlp, ModelWeights, Projections};
use super::operations::{
    AttentionWeights, DraftWeights, ExpertMlp, ExpertWeights, FusedLayout, LatentWeights, LinearPart, Storage,
};
use super::random_kv;
use super::rope::{rotary_of_latents, to_f32};
use super::shapes::{AttentionShape, ExpertShape, Gate, LatentShape};
use crate::engine::{EngineError, error_mapping};
use crate::weights::{OpenModel, Packing, StoredMatrix, StoredTensor};
use hbmark_core::model::{
    Architecture, Attention, Dtype, FeedForward, Inventory, Mixer, MixtureNames, NormNames, QkNorm, Reach,
    Rotary, Routing, sinks_name,
};
use hbmark_core::units::Bytes;

/// The prefix of everything but the head.
const MODEL: &str = "model";

/// Loads and packs a model; every tensor passes through `each` first, and `loaded` is called with the bytes of each.
pub fn load<O: Storage>(
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
pub fn assemble<O: Storage>(
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
pub fn dequantised(tensor: StoredTensor) -> StoredTensor {
    match tensor {
        StoredTensor::Matrix(matrix) => StoredTensor::Matrix(StoredMatrix::quantize(&matrix, Packing::F32)),
        vector @ StoredTensor::Vector(_) => vector,
    }
}

/// Layers in the making.
pub(super) struct Assembly<'a, O: Storage> {
    architecture: &'a Architecture,
    /// Tensors whose layer is not complete.
    waiting: HashMap<String, StoredTensor>,
    layers: Vec<LayerWeights<O>>,
    names: MixtureNames,
    /// Experts of the next layer: each is packed when its last matrix has come.
    routed: Vec<ExpertMlp<O>>,
    /// The rows of a tied head that a rank of a tensor parallel group has, beside the whole table.
    vocabulary: Option<Range<usize>>,
}

impl<'a, O: Storage> Assembly<'a, O> {
    pub(super) fn new(architecture: &'a Architecture) -> Self {
        Self {
            architecture,
            waiting: HashMap::new(),
            layers: Vec::with_capacity(architecture.layers),
            names: MixtureNames::of(architecture.family),
            routed: Vec::new(),
            vocabulary: None,
        }
    }

    /// Those of a rank of a tensor parallel group, of whose vocabulary a tied head has so many rows.
    pub(super) fn of_rank(architecture: &'a Architecture, vocabulary: Range<usize>) -> Self {
        Self { vocabulary: Some(vocabulary), ..Self::new(architecture) }
    }

    /// Takes a tensor. Tensors come in the order of the inventory, so the first of the next layer means that the last is complete.
    pub(super) fn take(
        &mut self,
        operations: &mut O,
        name: &str,
        tensor: StoredTensor,
    ) -> Result<(), EngineError> {
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
        let layer = self.architecture.layer(self.layers.len());
        let kinds: &[&str] = match layer.feed_forward.mixture() {
            Some(mixture) if mixture.bias => &["weight", "bias"],
            _ => &["weight"],
        };
        let is_here =
            |(name, kind): (&&str, &&str)| self.waiting.contains_key(&format!("{expert}.{name}.{kind}"));
        if names.iter().all(|name| kinds.iter().all(|kind| is_here((name, kind)))) {
            let packed = self.expert(operations, &expert, names)?;
            self.routed.push(packed);
        }
        Ok(())
    }

    /// Packs the routed experts of the next layer where they are stored as one: gate and up in alternating rows, then down.
    fn complete_stacked_experts(
        &mut self,
        operations: &mut O,
        experts: &str,
        shape: &ExpertShape,
    ) -> Result<(), EngineError> {
        let [gate_up, down] = self.names.stacked.map(|name| self.stacked(&format!("{experts}.{name}")));
        let (Some(gate_up), Some(down)) = (gate_up, down) else { return Ok(()) };
        let hidden = down.matrix.rows / shape.count;
        for expert in 0..shape.count {
            let first = 2 * expert * shape.width;
            let rows = |half: usize| (0..shape.width).map(move |row| first + 2 * row + half);
            let own = [picked(&gate_up, rows(0)), picked(&gate_up, rows(1))];
            let gate_up = operations.linear(own.into(), FusedLayout::Interleaved)?;
            let down = picked(&down, expert * hidden..(expert + 1) * hidden);
            let down = operations.linear(vec![down], FusedLayout::Stacked)?;
            self.routed.push(ExpertMlp { gate_up, down });
        }
        Ok(())
    }

    /// A matrix of all experts of a layer, and their biases, where they are stored as one.
    fn stacked(&mut self, name: &str) -> Option<LinearPart> {
        let names = [name.to_owned(), format!("{name}_blocks")];
        let matrix = match names.iter().find_map(|name| self.waiting.remove(name))? {
            StoredTensor::Matrix(matrix) => matrix,
            StoredTensor::Vector(_) => unreachable!("the inventory has {name} as a matrix"),
        };
        let bias = match self.waiting.remove(&format!("{name}_bias")) {
            Some(StoredTensor::Vector(bias)) => Some(bias),
            _ => None,
        };
        Some(LinearPart { matrix, bias })
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
        let mixture = match self.architecture.layer(index).feed_forward {
            FeedForward::Mixture(mixture) => mixture,
            FeedForward::Dense(dense) => {
                let gate = Gate::of(dense.activation).expect("an activation that was checked");
                let dense = format!("{MODEL}.layers.{index}.mlp");
                let ExpertMlp { gate_up, down } = self.expert(operations, &dense, MixtureNames::DENSE)?;
                return Ok(Mlp::Dense { gate_up, gate, down });
            }
            other => unreachable!("a feed-forward that was checked before it was loaded: {other:?}"),
        };
        let shape = ExpertShape::of(&mixture).expect("a mixture that was checked before it was loaded");
        let prefix = self.mixture_prefix();
        let mut router = self.matrix(&format!("{prefix}.{}.weight", self.names.router));
        if shape.shared_gate {
            let gate = self.matrix(&format!("{prefix}.{}.weight", self.names.shared_gate));
            let float = matches!(router.packing(), Packing::F32 | Packing::F16 | Packing::Bf16);
            let both = if float && router.packing() == gate.packing() {
                [router, gate]
            } else {
                // A file may have either in any of its formats.
                [router, gate].map(|matrix| StoredMatrix::quantize(&matrix, Packing::F32))
            };
            let [rows, gate] = both;
            router = rows.extended(gate).expect("both are floats of one kind, as wide as hidden states");
        }
        let shared = if shape.shared_width > 0 {
            let shared = format!("{prefix}.{}", self.names.shared);
            Some(self.expert(operations, &shared, MixtureNames::DENSE)?)
        } else {
            None
        };
        let router =
            operations.linear(vec![LinearPart { matrix: router, bias: None }], FusedLayout::Stacked)?;
        let bias = match mixture.routing {
            Routing::Sigmoid { correction: true, .. } => Some(format!("{prefix}.{}", self.names.correction)),
            _ if mixture.bias => Some(format!("{prefix}.{}.bias", self.names.router)),
            _ => None,
        };
        let router_bias = bias.map(|bias| operations.vector(self.vector(&bias))).transpose()?;
        self.complete_stacked_experts(operations, &format!("{prefix}.experts"), &shape)?;
        let experts = std::mem::take(&mut self.routed);
        let table = operations.expert_table(&experts, shared.as_ref())?;
        Ok(Mlp::Experts(ExpertWeights { shape, router, router_bias, routed: experts, shared, table }))
    }

    fn complete_layer(&mut self, operations: &mut O) -> Result<(), EngineError> {
        let index = self.layers.len();
        let prefix = format!("{MODEL}.layers.{index}");
        let a = self.architecture;
        let halves = [("gate_proj", a.ffn_size), ("up_proj", a.ffn_size)];
        self.unfuse(&format!("{prefix}.mlp.gate_up_proj"), halves);

        let layer = a.layer(index);
        let names = NormNames::of(a.family, layer.norms);
        let norm = self.norm_of_layer(operations, &prefix, names.before_mixer)?;
        let attention_prefix = format!("{prefix}.self_attn");
        let (mut sinks, mut reach) = (None, None);
        let attention = match layer.mixer {
            Mixer::Attention(attention) => {
                reach = window(&attention);
                if attention.sinks {
                    let name = format!("{attention_prefix}.{}", sinks_name(a.family));
                    sinks = Some(operations.vector(self.vector(&name))?);
                }
                Projections::Heads(self.heads(operations, &attention_prefix, norm, &attention)?)
            }
            Mixer::Latent { .. } => {
                let shape = LatentShape::of(a, index).expect("a layer of latent attention");
                let norm = norm.expect("the input of latent attention is normed");
                Projections::Latent(self.latent(operations, &attention_prefix, norm, shape)?)
            }
            mixer => unreachable!("a mixer that was checked before it was loaded: {mixer:?}"),
        };
        let output = self.part(&format!("{attention_prefix}.o_proj"));
        let layer = LayerWeights {
            shape: AttentionShape::of(a, index),
            attention,
            sinks,
            output: operations.linear(vec![output], FusedLayout::Stacked)?,
            output_norm: self.norm_of_layer(operations, &prefix, names.after_mixer)?,
            norm: self.norm_of_layer(operations, &prefix, names.before_feed_forward)?,
            mlp: self.mlp(operations)?,
            mlp_norm: self.norm_of_layer(operations, &prefix, names.after_feed_forward)?,
            window: reach,
        };
        self.layers.push(layer);
        Ok(())
    }

    /// What makes queries, keys and values of each head.
    fn heads(
        &mut self,
        operations: &mut O,
        prefix: &str,
        norm: Option<O::Vector>,
        attention: &Attention,
    ) -> Result<AttentionWeights<O>, EngineError> {
        let a = self.architecture;
        let name = |name: &str| format!("{prefix}.{name}");
        let (query, kv) = (a.heads * a.head_dim, a.kv_heads * a.head_dim);
        self.unfuse(&name("qkv_proj"), [("q_proj", query), ("k_proj", kv), ("v_proj", kv)]);
        let mut qkv = ["q_proj", "k_proj", "v_proj"].map(|part| self.part(&name(part)));
        let order = attention.rope.and_then(|rope| pairs_in_halves(rope, a.head_dim));
        if let Some(order) = &order {
            qkv[..2].iter_mut().for_each(|part| reorder(part, order));
        }
        let mut head_norms = None;
        if attention.qk_norm != QkNorm::None {
            let [query, key] = ["q_norm", "k_norm"].map(|norm| {
                let weights = self.norm(&name(norm));
                order.as_ref().map_or(weights.clone(), |order| reordered(&weights, order))
            });
            head_norms = Some((operations.vector(query)?, operations.vector(key)?));
        }
        let qkv = operations.linear(qkv.into(), FusedLayout::Heads { head_dim: a.head_dim })?;
        Ok(AttentionWeights { norm, qkv, head_norms })
    }

    /// What makes queries, latents and keys, with the expansion of latents taken apart: its keys, which are also kept turned round for the queries, and
    /// its values.
    fn latent(
        &mut self,
        operations: &mut O,
        prefix: &str,
        norm: O::Vector,
        shape: LatentShape,
    ) -> Result<LatentWeights<O>, EngineError> {
        let name = |name: &str| format!("{prefix}.{name}");
        let rope = rotary_of_latents(self.architecture, shape.rope_dim);
        let order = pairs_in_halves(rope, shape.rope_dim).expect("neighbours that turn together");
        let mut latent = self.part(&name("kv_a_proj_with_mqa"));
        reorder(&mut latent, &behind(shape.kv_rank, &order));
        let of_queries = if shape.q_rank.is_some() { "q_b_proj" } else { "q_proj" };
        let mut queries = self.part(&name(of_queries));
        reorder(&mut queries, &behind(shape.nope_dim, &order));
        let (first, query) = if shape.q_rank.is_some() {
            let norm = operations.vector(self.norm(&name("q_a_layernorm")))?;
            let queries = operations.linear(vec![queries], FusedLayout::Stacked)?;
            (self.part(&name("q_a_proj")), Some((norm, queries)))
        } else {
            (queries, None)
        };
        let expansion = self.matrix(&name("kv_b_proj.weight"));
        let of_head = shape.nope_dim + shape.value_dim;
        let (mut key, mut key_up, mut value_up) = (Vec::new(), Vec::new(), Vec::new());
        for start in (0..shape.heads).map(|head| head * of_head) {
            let keys = expansion.slice_rows(start..start + shape.nope_dim);
            let values = expansion.slice_rows(start + shape.nope_dim..start + of_head);
            let Some(turned) = keys.transposed() else {
                return super::checks::refuse_expansion(keys.storage());
            };
            key_up.push(LinearPart { matrix: turned, bias: None });
            key.push(LinearPart { matrix: keys, bias: None });
            value_up.push(LinearPart { matrix: values, bias: None });
        }
        Ok(LatentWeights {
            shape,
            norm,
            down: operations.linear(vec![first, latent], FusedLayout::Stacked)?,
            latent_norm: operations.vector(self.norm(&name("kv_a_layernorm")))?,
            query,
            key_up: operations.linear(key_up, FusedLayout::Stacked)?,
            key: operations.linear(key, FusedLayout::Stacked)?,
            value_up: operations.linear(value_up, FusedLayout::Stacked)?,
        })
    }

    /// One of the norms over the hidden size that a layer may have.
    fn norm_of_layer(
        &mut self,
        operations: &mut O,
        layer: &str,
        name: Option<&str>,
    ) -> Result<Option<O::Vector>, EngineError> {
        name.map(|name| operations.vector(self.norm(&format!("{layer}.{name}")))).transpose()
    }

    pub(super) fn finish(mut self, operations: &mut O) -> Result<ModelWeights<O>, EngineError> {
        self.complete_layer(operations)?;
        let embedding = self.matrix(&format!("{MODEL}.embed_tokens.weight"));
        let (table, head) = if self.architecture.tied_head {
            match self.vocabulary.take() {
                Some(rows) => {
                    let head = embedding.slice_rows(rows);
                    (Some(operations.table(embedding)?), head)
                }
                None => (None, embedding),
            }
        } else {
            (Some(operations.table(embedding)?), self.matrix("lm_head.weight"))
        };
        let multipliers = self.architecture.multipliers;
        let mut norm = self.norm(&format!("{MODEL}.norm"));
        for weight in &mut norm {
            *weight = to_f32(f64::from(*weight) * multipliers.logits);
        }
        Ok(ModelWeights {
            table,
            draft: self.draft(operations)?,
            // Hidden states are kept divided by the residual multiplier, so that what layers add is added as it is.
            embedding_scale: to_f32(multipliers.embedding / multipliers.residual),
            norm: operations.vector(norm)?,
            head: operations.linear(vec![LinearPart { matrix: head, bias: None }], FusedLayout::Stacked)?,
            softcap: multipliers.logits_softcap.map(to_f32),
            layers: self.layers,
        })
    }

    /// What makes the input of a layer that drafts.
    fn draft(&mut self, operations: &mut O) -> Result<Option<DraftWeights<O>>, EngineError> {
        let Some(draft) = self.architecture.draft else { return Ok(None) };
        let norms = draft.norms().map(|norms| {
            let [embedding, state] = norms.map(|norm| self.norm(&format!("{MODEL}.{norm}")));
            Ok::<_, EngineError>([operations.vector(embedding)?, operations.vector(state)?])
        });
        let norms = norms.transpose()?;
        let mut state = vec![0.0; self.architecture.hidden_size];
        random_kv::fill(0, 0, 0, false, &mut state);
        let projection = self.part(&format!("{MODEL}.{}", draft.projection()));
        Ok(Some(DraftWeights {
            norms,
            state: operations.vector(state)?,
            projection: operations.linear(vec![projection], FusedLayout::Stacked)?,
        }))
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

    /// The weights of a norm, whole.
    fn norm(&mut self, name: &str) -> Vec<f32> {
        let mut weights = self.vector(&format!("{name}.weight"));
        if self.architecture.family.stores_norms_less_one() {
            for weight in &mut weights {
                *weight += 1.0;
            }
        }
        weights
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

/// Positions that an attention goes back; `None` for all.
pub(super) fn window(attention: &Attention) -> Option<usize> {
    match attention.reach {
        Reach::Window { tokens } => Some(tokens),
        Reach::Full | Reach::Chunk { .. } => None,
    }
}

/// The elements of a head in an order in which those that turn together are half a head apart, the pairs that turn first: as the operations
/// turn them. `None` where they are already. Scores are sums over a head, so that any order of Q and K alike gives the same.
fn pairs_in_halves(rope: Rotary, head_dim: usize) -> Option<Vec<usize>> {
    let Rotary { dims, interleaved, .. } = rope;
    if dims == head_dim && !interleaved {
        return None;
    }
    let (turning, half) = (dims / 2, head_dim / 2);
    let pair = |pair: usize| match pair {
        still if still >= turning => [turning + still, half + still],
        turned if interleaved => [2 * turned, 2 * turned + 1],
        turned => [turned, turning + turned],
    };
    Some((0..half).map(|i| pair(i)[0]).chain((0..half).map(|i| pair(i)[1])).collect())
}

/// So many elements as they are, then others in another order.
fn behind(before: usize, order: &[usize]) -> Vec<usize> {
    (0..before).chain(order.iter().map(|at| before + at)).collect()
}

/// Some outputs of a linear layer.
fn picked(part: &LinearPart, rows: impl ExactSizeIterator<Item = usize> + Clone) -> LinearPart {
    let bias = part.bias.as_ref().map(|bias| rows.clone().map(|row| bias[row]).collect());
    LinearPart { matrix: part.matrix.pick_rows(rows), bias }
}

/// Brings the outputs of a linear layer into another order, head by head.
fn reorder(part: &mut LinearPart, order: &[usize]) {
    let rows: Vec<usize> = (0..part.matrix.rows).collect();
    part.matrix = part.matrix.pick_rows(reordered(&rows, order));
    if let Some(bias) = &mut part.bias {
        *bias = reordered(bias, order);
    }
}

/// Values in another order, head by head.
fn reordered<T: Copy>(values: &[T], order: &[usize]) -> Vec<T> {
    values.chunks(order.len()).flat_map(|head| order.iter().map(|at| head[*at])).collect()
}

#[cfg(test)]
mod tests {
    use super::{Rotary, pairs_in_halves, reordered};
    use hbmark_core::model::{Rope, RopeScaling};

    #[test]
    fn what_turns_together_comes_to_lie_half_a_head_apart() {
        let order = |dims, interleaved| {
            let rope = Rope { theta: 1e4, scaling: RopeScaling::None };
            pairs_in_halves(Rotary { rope, dims, interleaved }, 8)
        };
        assert_eq!(order(8, false), None);
        assert_eq!(order(8, true).unwrap(), [0, 2, 4, 6, 1, 3, 5, 7]);
        assert_eq!(order(4, false).unwrap(), [0, 1, 4, 5, 2, 3, 6, 7]);
        assert_eq!(order(4, true).unwrap(), [0, 2, 4, 5, 1, 3, 6, 7]);
        assert_eq!(reordered(&[1, 2, 3, 4], &[1, 0]), [2, 1, 4, 3]);
    }
}
