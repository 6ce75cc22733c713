//! What one GPU of a group holds: its tensors and its dimensions.
//!
//! Enters: a checked [`Group`], an architecture and its inventory. Leaves: of each stage an [`Architecture`] with the heads and widths of one GPU
//! and an [`Inventory`] with its bytes, from which a [`Ledger`](super::super::Ledger) counts as for any model. Of GPUs with unequal parts the
//! first has the most.

use std::ops::Range;

use super::{Group, GroupError, Shared, check, sizes, whole};
use crate::model::gguf::BlockType;
use crate::model::{
    Architecture, Experts, Family, FeedForward, Inventory, Layer, Mixer, QkNorm, Role, Stack, TensorInfo,
};
use crate::units::Bytes;

/// Weights that share an exponent in mxfp4, the format in which a feed-forward may be dealt out in unequal parts.
const MXFP4_BLOCK: usize = 32;

/// One GPU of a stage.
#[derive(Debug, Clone, PartialEq)]
pub struct Stage {
    /// Which of the stages.
    pub index: usize,
    pub first_layer: usize,
    pub layers: usize,
    /// The dimensions of one GPU.
    pub architecture: Architecture,
    /// Its tensors, with its bytes of each.
    pub inventory: Inventory,
    /// Bytes that the other GPUs of the stage hold as well.
    pub replicated: Bytes,
    /// Whether its embedding table is the head, too.
    pub tied: bool,
}

/// Every stage as GPU `rank` of each holds it.
///
/// # Errors
/// When no engine would start the model on such a group, or a tensor is not known well enough to split.
pub fn stages(
    architecture: &Architecture,
    inventory: &Inventory,
    group: Group,
    rank: usize,
) -> Result<Vec<Stage>, GroupError> {
    let splitter = Splitter::new(architecture, inventory, group, rank)?;
    let mut stages = Vec::new();
    let mut first_layer = 0;
    for (stage, layers) in group.layers_of_stages(architecture.layers).into_iter().enumerate() {
        stages.push(splitter.stage(stage, first_layer, layers)?);
        first_layer += layers;
    }
    Ok(stages)
}

/// What of a tensor one GPU of a tensor parallel group has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TensorPart {
    Whole,
    /// All of it on the first GPU, and nothing on the others: what is added to a sum is added once.
    OnFirst,
    /// Some outputs: rows, where weights are `[outputs, inputs]`. What families store as one has a share of each of its blocks, which are so
    /// many parts of all rows: Q, K and V, gate and up, every expert.
    Rows(Vec<(usize, Share)>),
    /// Some inputs: columns.
    Columns(Share),
}

impl TensorPart {
    /// Which of so many rows blocks with their shares are.
    pub fn ranges(blocks: &[(usize, Share)], rows: usize) -> Vec<Range<usize>> {
        let all: usize = blocks.iter().map(|(size, _)| size).sum();
        let mut before = 0;
        let range = |(size, share): &(usize, Share)| {
            let [first, next] = [before, before + size].map(|at| at * rows / all.max(1));
            before += size;
            let Range { start, end } = share.range_of(next - first);
            first + start..first + end
        };
        blocks.iter().map(range).collect()
    }
}

/// The part of each tensor that GPU `rank` of a tensor parallel group has, in the order of the inventory.
///
/// # Errors
/// As [`stages`].
pub fn tensor_parts(
    architecture: &Architecture,
    inventory: &Inventory,
    ranks: usize,
    rank: usize,
) -> Result<Vec<TensorPart>, GroupError> {
    let group = Group { tensor: ranks, ..Group::ONE };
    let splitter = Splitter::new(architecture, inventory, group, rank)?;
    let part = |tensor: &TensorInfo| {
        Ok(match splitter.split(tensor)? {
            Split::Whole | Split::Elsewhere | Split::Stacked(_) => TensorPart::Whole,
            Split::AddedOnce => TensorPart::OnFirst,
            Split::Columns(share) => TensorPart::Columns(share),
            Split::Rows(share) => TensorPart::Rows(splitter.blocks_of_rows(tensor, share)),
        })
    };
    inventory.tensors.iter().map(part).collect()
}

/// Blocks along the width of an expert, where loaders deal them out unequally: gpt-oss in its own format, whose 90 blocks no power of two
/// divides.
pub(super) fn blocks_of_experts(architecture: &Architecture, inventory: &Inventory) -> Option<usize> {
    let experts = architecture.experts.as_ref().filter(|_| architecture.family == Family::GptOss)?;
    let quantised = inventory.tensors.iter().any(|tensor| tensor.role == Role::ExpertScale);
    quantised.then(|| experts.ffn_size.div_ceil(MXFP4_BLOCK))
}

/// Some of so many equal parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    first: usize,
    here: usize,
    of: usize,
    /// GPUs that hold this very part.
    repeated: bool,
}

impl Share {
    /// Which of so many rows or columns they are.
    pub fn range_of(self, count: usize) -> Range<usize> {
        let at = |at: usize| at * count / self.of.max(1);
        at(self.first)..at(self.first + self.here)
    }
}

/// What a GPU has of a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Split {
    /// All of it.
    Whole,
    /// All of it, read by the first GPU alone: what is added to a sum is added once.
    AddedOnce,
    /// Outputs: rows of a matrix, and as much of its bias.
    Rows(Share),
    /// Inputs: columns of a matrix; its bias is added once.
    Columns(Share),
    /// Whole experts, so many of all, in one tensor.
    Stacked(Share),
    /// An expert of another GPU.
    Elsewhere,
}

struct Splitter<'a> {
    architecture: &'a Architecture,
    inventory: &'a Inventory,
    group: Group,
    rank: usize,
    blocks_of_experts: Option<usize>,
}

impl<'a> Splitter<'a> {
    fn new(
        architecture: &'a Architecture,
        inventory: &'a Inventory,
        group: Group,
        rank: usize,
    ) -> Result<Self, GroupError> {
        check(architecture, inventory, group)?;
        let blocks_of_experts = blocks_of_experts(architecture, inventory);
        Ok(Self { architecture, inventory, group, rank, blocks_of_experts })
    }

    fn stage(&self, stage: usize, first_layer: usize, layers: usize) -> Result<Stage, GroupError> {
        let (first, last) = (stage == 0, stage + 1 == self.group.pipeline);
        let tied = self.inventory.tensors.iter().all(|tensor| tensor.role != Role::Head);
        let own = first_layer..first_layer + layers;
        let mut inventory = Inventory::default();
        let mut replicated = 0;
        for tensor in &self.inventory.tensors {
            let embedding = tensor.role == Role::Embedding || module_of(&tensor.name).contains("embed");
            let here = match tensor.layer {
                _ if tensor.role == Role::Unused => false,
                Some(layer) => own.contains(&layer),
                None if embedding => first || (tied && last),
                None => last,
            };
            if !here {
                continue;
            }
            let split = self.split(tensor)?;
            replicated += self.replicated(tensor, split);
            if split != Split::Elsewhere {
                let mut piece = self.piece(tensor, split)?;
                // The last of several stages has the table for the head alone.
                if embedding && tied && last && !first {
                    piece.role = Role::Head;
                }
                inventory.tensors.push(piece);
            }
        }
        Ok(Stage {
            index: stage,
            first_layer,
            layers,
            architecture: self.dimensions(own),
            inventory,
            replicated: Bytes(replicated),
            tied: tied && first && last,
        })
    }

    /// The model's dimensions with the layers of a stage and what one GPU has of each. The vocabulary and the number of experts stay whole.
    fn dimensions(&self, layers: Range<usize>) -> Architecture {
        let whole = self.architecture;
        let tensor = self.group.tensor;
        let count = layers.len();
        let experts = whole.experts.as_ref().map(|experts| Experts {
            ffn_size: self.width_of_expert(experts.ffn_size).here,
            shared_ffn_size: experts.shared_ffn_size / tensor,
            dense_layers: Vec::new(),
            ..experts.clone()
        });
        let stack = Stack::new(layers.map(|index| self.layer(whole.layer(index))));
        Architecture {
            layers: count,
            heads: whole.heads / tensor,
            kv_heads: (whole.kv_heads / tensor).max(1),
            ffn_size: whole.ffn_size.div_ceil(tensor),
            windows: Vec::new(),
            experts,
            stack: Some(stack),
            ..whole.clone()
        }
    }

    fn layer(&self, mut layer: Layer) -> Layer {
        let tensor = self.group.tensor;
        match &mut layer.mixer {
            Mixer::Attention(a) => {
                a.heads /= tensor;
                a.kv_heads = (a.kv_heads / tensor).max(1);
            }
            Mixer::Latent { heads, .. } => *heads /= tensor,
            Mixer::DeltaNet(delta) => {
                delta.key_heads /= tensor;
                delta.value_heads /= tensor;
            }
            Mixer::Mamba(mamba) => {
                mamba.heads /= tensor;
                mamba.groups /= tensor;
            }
            Mixer::None => {}
        }
        match &mut layer.feed_forward {
            FeedForward::Dense(dense) => dense.width /= tensor,
            FeedForward::Mixture(mixture) => {
                mixture.width = self.width_of_expert(mixture.width).here;
                mixture.shared_width /= tensor;
            }
            FeedForward::DenseBesideMixture { dense, mixture } => {
                dense.width /= tensor;
                mixture.width = self.width_of_expert(mixture.width).here;
                mixture.shared_width /= tensor;
            }
            FeedForward::None => {}
        }
        layer
    }

    /// The channels of a routed expert that this GPU has.
    fn width_of_expert(&self, width: usize) -> Share {
        let all = Share { first: 0, here: width, of: width, repeated: false };
        match self.blocks_of_experts {
            _ if self.group.tensor == 1 || self.group.experts => all,
            Some(blocks) => {
                let own = self.chunk_of(blocks);
                Share { first: own.first * MXFP4_BLOCK, here: own.here * MXFP4_BLOCK, ..all }
            }
            None => {
                let here = width / self.group.tensor;
                Share { first: self.rank * here, here, ..all }
            }
        }
    }

    fn even(&self) -> Share {
        Share { first: self.rank, here: 1, of: self.group.tensor, repeated: false }
    }

    fn of_kv_heads(&self, heads: usize) -> Share {
        let kv = Shared { what: "", count: heads, repeated: true };
        let here = kv.here(self.group.tensor);
        let repeated = heads < self.group.tensor;
        let first = if repeated { self.rank * heads / self.group.tensor } else { self.rank * here };
        Share { first, here, of: heads, repeated }
    }

    /// All parts but the last are equal.
    fn chunk_of(&self, count: usize) -> Share {
        let first = (self.rank * count.div_ceil(self.group.tensor)).min(count);
        Share { first, here: chunk(count, self.group.tensor, self.rank), of: count, repeated: false }
    }

    /// The share of each block of rows.
    fn blocks_of_rows(&self, tensor: &TensorInfo, share: Share) -> Vec<(usize, Share)> {
        let layer = tensor.layer.map(|layer| self.architecture.layer(layer));
        match (module_of(&tensor.name), layer) {
            ("qkv_proj", Some(Layer { mixer: Mixer::Attention(a), .. })) => {
                let of_kv = self.of_kv_heads(a.kv_heads);
                let [keys, values] = [a.key_dim, a.value_dim].map(|dim| (a.kv_heads * dim, of_kv));
                vec![(a.heads * a.key_dim, self.even()), keys, values]
            }
            // A stack of experts, in which gate and up of a channel are neighbours.
            ("gate_up_proj", Some(layer)) if tensor.name.contains("experts.") => {
                vec![(1, share); layer.feed_forward.mixture().map_or(1, |mixture| mixture.count)]
            }
            ("gate_up_proj", _) => vec![(1, share); 2],
            _ => vec![(1, share)],
        }
    }

    fn split(&self, tensor: &TensorInfo) -> Result<Split, GroupError> {
        if self.group.tensor == 1 {
            return Ok(Split::Whole);
        }
        let unknown = || GroupError::Tensor { tensor: tensor.name.chars().take(200).collect() };
        let split = match tensor.role {
            Role::Router => Split::Whole,
            Role::Embedding | Role::Head => Split::Rows(self.vocabulary()),
            Role::Expert | Role::ExpertScale | Role::ExpertBias => {
                self.of_expert(tensor).ok_or_else(unknown)?
            }
            Role::Matrix | Role::SharedExpert | Role::Norm | Role::Bias | Role::Scale => match tensor.layer {
                Some(layer) => self.of_layer(tensor, &self.architecture.layer(layer)).ok_or_else(unknown)?,
                None if module_of(&tensor.name) == "lm_head" => Split::Rows(self.vocabulary()),
                None => Split::Whole,
            },
            Role::Unused => Split::Elsewhere,
        };
        Ok(match (tensor.role, split) {
            (Role::Bias | Role::ExpertBias, Split::Columns(_)) => Split::AddedOnce,
            (_, split) => split,
        })
    }

    fn vocabulary(&self) -> Share {
        self.chunk_of(self.architecture.vocab_size)
    }

    fn of_expert(&self, tensor: &TensorInfo) -> Option<Split> {
        let experts = self.architecture.experts.as_ref()?;
        let (_, rest) = tensor.name.split_once("experts.")?;
        let own = own_expert(&tensor.name);
        if self.group.experts {
            let (first, here) = dealt(experts.count, self.group.tensor, self.rank);
            return Some(match own {
                Some(expert) if (first..first + here).contains(&expert) => Split::Whole,
                Some(_) => Split::Elsewhere,
                None => Split::Stacked(Share { first, here, of: experts.count, repeated: false }),
            });
        }
        let width = self.width_of_expert(experts.ffn_size);
        Some(match module_of(rest) {
            "gate_proj" | "up_proj" | "gate_up_proj" | "w1" | "w3" | "w13" => Split::Rows(width),
            "down_proj" | "w2" => Split::Columns(width),
            _ => return None,
        })
    }

    fn of_layer(&self, tensor: &TensorInfo, layer: &Layer) -> Option<Split> {
        let name = tensor.name.as_str();
        let even = self.even();
        let module = module_of(name);
        // A norm of the hidden state, and what stands beside a projection of the whole hidden state.
        if tensor.role == Role::Norm && !matches!(module, "q_norm" | "k_norm" | "norm") {
            return Some(Split::Whole);
        }
        if matches!(module, "fc1_latent_proj" | "fc2_latent_proj" | "layer_scalar" | "gate" | "router")
            || name.contains(".indexer.")
        {
            return Some(Split::Whole);
        }
        match module {
            "gate_proj" | "up_proj" | "gate_up_proj" => return Some(Split::Rows(even)),
            "down_proj" => return Some(Split::Columns(even)),
            _ => {}
        }
        match layer.mixer {
            Mixer::Attention(a) => {
                let of_kv = self.of_kv_heads(a.kv_heads);
                Some(match module {
                    "q_proj" | "sinks" | "attention_sink_bias" => Split::Rows(even),
                    "k_proj" | "v_proj" => Split::Rows(of_kv),
                    "qkv_proj" => {
                        let rows =
                            |heads: usize, kv: usize| heads * a.key_dim + kv * (a.key_dim + a.value_dim);
                        let part = rows(a.heads / self.group.tensor, of_kv.here);
                        // What is here of it lies apart: `blocks_of_rows`.
                        let all = rows(a.heads, a.kv_heads);
                        Split::Rows(Share { first: 0, here: part, of: all, repeated: false })
                    }
                    "o_proj" => Split::Columns(even),
                    "q_norm" if a.qk_norm == QkNorm::FullWidth => Split::Rows(even),
                    "k_norm" if a.qk_norm == QkNorm::FullWidth => Split::Rows(of_kv),
                    "q_norm" | "k_norm" => Split::Whole,
                    // The scales of a quantised cache.
                    "self_attn" | "attn" | "mixer" if tensor.role == Role::Scale => Split::Whole,
                    "norm" if tensor.role == Role::Norm => Split::Whole,
                    _ => return None,
                })
            }
            Mixer::Latent { .. } => Some(match module {
                "q_a_proj" | "kv_a_proj_with_mqa" => Split::Whole,
                "q_proj" | "q_b_proj" | "kv_b_proj" => Split::Rows(even),
                "o_proj" => Split::Columns(even),
                _ => return None,
            }),
            Mixer::DeltaNet(_) => Some(match module {
                "in_proj_qkv" | "in_proj_z" | "in_proj_b" | "in_proj_a" | "in_proj_qkvz" | "in_proj_ba"
                | "conv1d" | "A_log" | "dt_bias" => Split::Rows(even),
                "out_proj" => Split::Columns(even),
                "norm" => Split::Whole,
                _ => return None,
            }),
            Mixer::Mamba(_) => Some(match module {
                "in_proj" | "conv1d" | "A_log" | "D" | "dt_bias" => Split::Rows(even),
                "norm" if name.contains(".mixer.") => Split::Rows(even),
                "norm" => Split::Whole,
                "out_proj" => Split::Columns(even),
                _ => return None,
            }),
            Mixer::None => (module == "norm").then_some(Split::Whole),
        }
    }

    /// Bytes of a tensor here that others hold, too.
    fn replicated(&self, tensor: &TensorInfo, split: Split) -> u64 {
        let of_expert = matches!(tensor.role, Role::Expert | Role::ExpertScale | Role::ExpertBias);
        match split {
            _ if self.group.tensor == 1 => 0,
            // An expert that is dealt out whole is here alone.
            Split::Whole if of_expert && self.group.experts => 0,
            Split::Whole | Split::AddedOnce => tensor.bytes.0,
            Split::Rows(share) if share.repeated => part_of(tensor.bytes.0, share),
            _ => 0,
        }
    }

    /// What is here of a tensor.
    fn piece(&self, tensor: &TensorInfo, split: Split) -> Result<TensorInfo, GroupError> {
        let share = match split {
            Split::Whole | Split::Elsewhere => return Ok(tensor.clone()),
            Split::AddedOnce => {
                let role = if self.rank == 0 { tensor.role } else { Role::Unused };
                return Ok(TensorInfo { role, ..tensor.clone() });
            }
            Split::Stacked(share) => share,
            Split::Rows(share) | Split::Columns(share) => {
                let columns = matches!(split, Split::Columns(_));
                if is_scale(tensor) && self.is_unsplit(tensor, columns) {
                    return Ok(tensor.clone());
                }
                in_blocks(tensor, share, columns).map_err(|blocks| self.blocks(tensor, blocks))?
            }
        };
        let elements = usize::try_from(part_of(tensor.elements(), share)).unwrap_or(usize::MAX);
        Ok(TensorInfo {
            // The ledger asks for elements, and whether it is a matrix.
            shape: if tensor.shape.len() > 1 { vec![1, elements] } else { vec![elements] },
            bytes: Bytes(part_of(tensor.bytes.0, share)),
            ..tensor.clone()
        })
    }

    /// Whether every GPU needs all scales of a matrix: the one of a matrix or of each of a stack, those of outputs of which each GPU has a part,
    /// and those of groups that are out of order.
    fn is_unsplit(&self, tensor: &TensorInfo, columns: bool) -> bool {
        let stack = self
            .architecture
            .experts
            .as_ref()
            .filter(|_| tensor.role == Role::ExpertScale && own_expert(&tensor.name).is_none());
        if tensor.elements() == 1 || stack.is_some_and(|experts| tensor.elements() == experts.count as u64) {
            return true;
        }
        let order = tensor.name.ends_with("g_idx");
        let reordered = self.architecture.quantization.as_ref().is_some_and(|how| how.reordered);
        if columns { scales_along(tensor, true) == 1 || (reordered && !order) } else { order }
    }

    fn blocks(&self, tensor: &TensorInfo, blocks: usize) -> GroupError {
        let fits = |gpus: &usize| {
            let other = Self { group: Group { tensor: *gpus, ..self.group }, rank: 0, ..*self };
            match other.split(tensor) {
                Ok(Split::Rows(share)) => in_blocks(tensor, share, false).is_ok(),
                Ok(Split::Columns(share)) => in_blocks(tensor, share, true).is_ok(),
                split => split.is_ok(),
            }
        };
        let sizes = sizes(self.architecture, self.inventory, self.group.experts);
        GroupError::Blocks {
            tensor: tensor.name.chars().take(200).collect(),
            blocks,
            gpus: self.group.tensor,
            otherwise: whole(matches!(tensor.role, Role::Expert | Role::ExpertScale)),
            sizes: sizes.filter(fits).filter(|gpus| *gpus < self.group.tensor).collect(),
        }
    }
}

fn is_scale(tensor: &TensorInfo) -> bool {
    matches!(tensor.role, Role::Scale | Role::ExpertScale)
}

/// A share in the blocks of a tensor that has such, or the number of those that it would cut.
fn in_blocks(tensor: &TensorInfo, share: Share, columns: bool) -> Result<Share, usize> {
    let along =
        if is_scale(tensor) { Some(scales_along(tensor, columns)) } else { ggml_blocks(tensor, columns) };
    let Some(blocks) = along else { return Ok(share) };
    // A part of a block of the vocabulary has its scale, too: engines fill it up. So has one of a head that is no whole blocks.
    let heads = matches!(module_of(&tensor.name), "q_proj" | "k_proj" | "v_proj");
    if tensor.layer.is_none() || (heads && is_scale(tensor) && !columns) {
        return Ok(Share { here: (blocks * share.here).div_ceil(share.of), of: blocks, ..share });
    }
    if (blocks * share.here).is_multiple_of(share.of) { Ok(share) } else { Err(blocks) }
}

/// Which expert a tensor is of; `None` of a stack of them.
fn own_expert(name: &str) -> Option<usize> {
    name.split_once("experts.")?.1.split('.').next()?.parse().ok()
}

/// Rows of a part where all but the last are equal.
fn chunk(count: usize, parts: usize, at: usize) -> usize {
    let each = count.div_ceil(parts);
    count.saturating_sub(each * at).min(each)
}

/// The first of a part and how many it has, where parts differ by one at the most.
fn dealt(count: usize, parts: usize, at: usize) -> (usize, usize) {
    let (each, over) = (count / parts, count % parts);
    (each * at + at.min(over), each + usize::from(at < over))
}

/// A part of a count, rounded up where it is none of whole numbers.
fn part_of(count: u64, share: Share) -> u64 {
    let part = (u128::from(count) * share.here as u128).div_ceil(share.of.max(1) as u128);
    u64::try_from(part).unwrap_or(u64::MAX)
}

/// How many scales lie along the rows or the columns of their matrix. AWQ and GPTQ store inputs first.
fn scales_along(tensor: &TensorInfo, columns: bool) -> usize {
    let inputs_first = [".scales", ".qzeros", "g_idx"].iter().any(|ending| tensor.name.ends_with(ending));
    let (rows, across) = match tensor.shape.as_slice() {
        [] => (1, 1),
        [rows] => (*rows, 1),
        [before @ .., across] => (before.iter().product(), *across),
    };
    if columns == inputs_first { rows } else { across }
}

/// Blocks along the columns of a matrix in one of ggml's formats, which no split may cut.
fn ggml_blocks(tensor: &TensorInfo, columns: bool) -> Option<usize> {
    // Safetensors have mxfp4 and nvfp4 too, with scales in tensors of their own.
    let block = BlockType::named(&tensor.storage)
        .filter(|block| block.elements > 1 && !matches!(block.name, "mxfp4" | "nvfp4"))?;
    let size = usize::try_from(block.elements).ok()?;
    columns.then(|| tensor.shape.last().copied().unwrap_or(1) / size)
}

/// The module that a tensor belongs to: `q_proj` of `model.layers.3.self_attn.q_proj.weight_scale_inv`.
fn module_of(name: &str) -> &str {
    // Of stacked experts the ending is part of the name: `down_proj_blocks`.
    const ENDINGS: [&str; 7] =
        ["_blocks", "_weight_scale", "_scale_inv", "_scales", "_scale", "_zero_point", "_bias"];
    name.rsplit('.')
        .find_map(|word| {
            let bare = || ENDINGS.iter().find_map(|ending| word.strip_suffix(ending));
            known_module(word).or_else(|| known_module(bare()?))
        })
        .unwrap_or_else(|| name.rsplit('.').nth(1).unwrap_or(name))
}

fn known_module(word: &str) -> Option<&str> {
    match word {
        "q_proj" | "k_proj" | "v_proj" | "qkv_proj" | "o_proj" | "q_norm" | "k_norm" | "sinks"
        | "q_a_proj" | "q_b_proj" | "kv_a_proj_with_mqa" | "kv_b_proj" | "gate_proj" | "up_proj"
        | "gate_up_proj" | "down_proj" | "w1" | "w2" | "w3" | "w13" | "in_proj" | "in_proj_qkv"
        | "in_proj_z" | "in_proj_b" | "in_proj_a" | "in_proj_qkvz" | "in_proj_ba" | "conv1d" | "A_log"
        | "D" | "dt_bias" | "out_proj" | "norm" | "fc1_latent_proj" | "fc2_latent_proj" | "layer_scalar"
        | "lm_head" | "embed_tokens" | "embeddings" | "self_attn" => Some(word),
        _ => (word == "attention_sink_bias").then_some(word),
    }
}
