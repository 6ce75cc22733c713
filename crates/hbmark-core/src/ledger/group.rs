//! A model over several GPUs: tensor, pipeline and expert parallel groups.
//!
//! Enters: an [`Architecture`], the [`Inventory`] of its tensors, and a [`Group`]. Leaves: of each stage the tensors and the dimensions of one
//! GPU (`part`), what the GPUs exchange (`exchange`) and a prediction ([`predict_group`]); or the [`GroupError`] that says why no engine
//! would start. Splits are those of vLLM and SGLang:
//!
//! - a layer of a stage is split over `tensor` GPUs: projections into heads and channels by rows, those out of them by columns, the vocabulary by
//!   rows. Heads of keys and values that are fewer than the GPUs are repeated. Norms, routers and the latent projections and caches of latent
//!   attention are on every GPU.
//! - routed experts are cut like any feed-forward, or dealt out whole where experts are parallel.
//! - `pipeline` stages take consecutive layers; the embedding is with the first, the last norm and the head are with the last.

mod exchange;
mod part;
mod predict;
#[cfg(test)]
mod tests;

use std::fmt;

pub use part::{Share, Stage, TensorPart, stages, tensor_parts};
pub use predict::predict_group;

use super::Ledger;
use crate::model::{Architecture, Dtype, Inventory, Mixer, Role};

/// How many GPUs hold a model together, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// GPUs that share each layer.
    pub tensor: usize,
    /// Stages of consecutive layers.
    pub pipeline: usize,
    /// The GPUs of a stage hold whole experts.
    pub experts: bool,
}

impl Group {
    /// One GPU.
    pub const ONE: Self = Self { tensor: 1, pipeline: 1, experts: false };

    /// GPUs in all.
    pub fn gpus(self) -> usize {
        self.tensor.saturating_mul(self.pipeline)
    }

    /// GPUs that hold the experts of a layer between them, whole ones each.
    fn expert_ranks(self) -> usize {
        if self.experts { self.tensor } else { 1 }
    }

    /// The layers of each stage, as vLLM deals them: equally many, and what is left over to the last stages but the very last, which has the
    /// head.
    fn layers_of_stages(self, layers: usize) -> Vec<usize> {
        let (each, over) = (layers / self.pipeline, layers % self.pipeline);
        let stages = self.pipeline;
        let of = |stage: usize| each + usize::from(stage + 1 < stages && stage + 1 + over >= stages);
        (0..stages).map(of).collect()
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut words = Vec::new();
        if self.tensor > 1 || self.pipeline == 1 {
            words.push(format!("tensor parallel {}", self.tensor));
        }
        if self.pipeline > 1 {
            words.push(format!("pipeline parallel {}", self.pipeline));
        }
        if self.experts {
            words.push("expert parallel".to_owned());
        }
        f.write_str(&words.join(", "))
    }
}

impl Ledger {
    /// The ledger of an engine's steps: of all that one memory holds. The ranks of a group share that of a host; GPUs have their own each, and this is the
    /// ledger of the first, whose part is the largest.
    pub fn of_engine(
        architecture: &Architecture,
        inventory: &Inventory,
        kv_dtype: Dtype,
        ranks: usize,
        on_gpu: bool,
    ) -> Self {
        // What cannot be split is not run either.
        let of_rank = || Self::of_first_rank(architecture, inventory, kv_dtype, ranks).ok();
        let one = || Self::new(architecture, inventory, kv_dtype);
        (on_gpu && ranks > 1).then(of_rank).flatten().unwrap_or_else(one)
    }

    /// The ledger of the first of so many GPUs that share each layer.
    ///
    /// # Errors
    /// When no engine would start the model on such a group.
    pub fn of_first_rank(
        architecture: &Architecture,
        inventory: &Inventory,
        kv_dtype: Dtype,
        ranks: usize,
    ) -> Result<Self, GroupError> {
        let of_ranks = stages(architecture, inventory, Group { tensor: ranks, ..Group::ONE }, 0)?;
        let [stage] = &of_ranks[..] else { unreachable!("one stage") };
        Ok(Self::new(&stage.architecture, &stage.inventory, kv_dtype))
    }
}

/// Why no engine would start a model on a group.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GroupError {
    #[error(
        "{count} {what} cannot be shared by {gpus} GPUs; --tensor-parallel-size may be {}{otherwise}",
        listed(.sizes)
    )]
    Indivisible { what: &'static str, count: usize, gpus: usize, sizes: Vec<usize>, otherwise: &'static str },
    #[error(
        "{tensor}: {blocks} blocks of quantised weights cannot be shared by {gpus} GPUs; --tensor-parallel-size may be {}{otherwise}",
        listed(.sizes)
    )]
    Blocks { tensor: String, blocks: usize, gpus: usize, sizes: Vec<usize>, otherwise: &'static str },
    #[error(
        "{layers} layers cannot be split into {stages} stages; --pipeline-parallel-size may be 1 to {layers}"
    )]
    Stages { layers: usize, stages: usize },
    #[error("the model has no routed experts; leave out --enable-expert-parallel")]
    NoExperts,
    #[error(
        "{count} experts are fewer than {gpus} GPUs; --tensor-parallel-size may be up to {count} with --enable-expert-parallel"
    )]
    FewExperts { count: usize, gpus: usize },
    #[error(
        "how {format} weights are split over GPUs is not modelled; take a folder of safetensors, or --pipeline-parallel-size alone"
    )]
    Format { format: String },
    #[error("{tensor}: how tensor parallelism splits it is not known; use --pipeline-parallel-size alone")]
    Tensor { tensor: String },
}

/// The way out where it is an expert that cannot be cut.
fn whole(of_expert: bool) -> &'static str {
    if of_expert { ", or keep experts whole with --enable-expert-parallel" } else { "" }
}

/// `1, 2 or 4`.
fn listed(sizes: &[usize]) -> String {
    let words: Vec<String> = sizes.iter().map(ToString::to_string).collect();
    match words.as_slice() {
        [] => "no other".to_owned(),
        [only] => only.clone(),
        [before @ .., last] => format!("{} or {last}", before.join(", ")),
    }
}

/// What is shared of a routed expert that is not whole.
const OF_EXPERT: &str = "channels of an expert";

/// Sizes that are offered where one is refused.
const LARGEST_OFFERED: usize = 64;

/// Something of a layer that GPUs share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shared {
    what: &'static str,
    count: usize,
    /// Fewer of them than GPUs are repeated, each on as many.
    repeated: bool,
}

impl Shared {
    fn by(self, gpus: usize) -> bool {
        self.count.is_multiple_of(gpus) || (self.repeated && gpus.is_multiple_of(self.count))
    }

    /// How many one GPU has.
    fn here(self, gpus: usize) -> usize {
        (self.count / gpus).max(1)
    }
}

/// Everything that the GPUs of a stage share, each once.
fn shared(architecture: &Architecture, inventory: &Inventory, experts: bool) -> Vec<Shared> {
    let mut all: Vec<Shared> = Vec::new();
    let mut add = |what, count: usize, repeated| {
        let one = Shared { what, count, repeated };
        if count > 0 && !all.contains(&one) {
            all.push(one);
        }
    };
    let dealt = part::blocks_of_experts(architecture, inventory).is_some();
    for index in 0..architecture.layers {
        let layer = architecture.layer(index);
        match layer.mixer {
            Mixer::Attention(a) => {
                add("attention heads", a.heads, false);
                add("heads of keys and values", a.kv_heads, true);
            }
            Mixer::Latent { heads, .. } => add("attention heads", heads, false),
            Mixer::DeltaNet(delta) => {
                add("heads of keys of a delta net", delta.key_heads, false);
                add("heads of values of a delta net", delta.value_heads, false);
            }
            Mixer::Mamba(mamba) => {
                add("heads of a Mamba mixer", mamba.heads, false);
                add("groups of a Mamba mixer", mamba.groups, false);
            }
            Mixer::None => {}
        }
        if let Some(dense) = layer.feed_forward.dense() {
            add("channels of a feed-forward", dense.width, false);
        }
        if let Some(mixture) = layer.feed_forward.mixture() {
            add("channels of the shared experts", mixture.shared_width, false);
            if !experts && !dealt {
                add(OF_EXPERT, mixture.width, false);
            }
        }
    }
    all
}

/// Refuses a group that no engine would start.
fn check(architecture: &Architecture, inventory: &Inventory, group: Group) -> Result<(), GroupError> {
    let experts = architecture.experts.as_ref();
    if group.experts && experts.is_none() {
        return Err(GroupError::NoExperts);
    }
    if group.pipeline > architecture.layers || group.pipeline == 0 {
        return Err(GroupError::Stages { layers: architecture.layers, stages: group.pipeline });
    }
    if let Some(experts) = experts.filter(|experts| group.expert_ranks() > experts.count) {
        return Err(GroupError::FewExperts { count: experts.count, gpus: group.tensor });
    }
    if group.tensor == 1 {
        return Ok(());
    }
    // Names and blocks of ggml, and a format of one list of scales for the whole matrix.
    let ggml = inventory.tensors.iter().find(|tensor| tensor.name.starts_with("blk."));
    let method = architecture.quantization.as_ref().map(|how| how.method.as_str());
    if ggml.is_some() || method == Some("bitsandbytes") {
        let format = if ggml.is_some() { "GGUF" } else { "bitsandbytes" };
        return Err(GroupError::Format { format: format.to_owned() });
    }
    match shared(architecture, inventory, group.experts).into_iter().find(|each| !each.by(group.tensor)) {
        None => Ok(()),
        Some(Shared { what, count, .. }) => Err(GroupError::Indivisible {
            what,
            count,
            gpus: group.tensor,
            sizes: sizes(architecture, inventory, group.experts).collect(),
            otherwise: whole(what == OF_EXPERT),
        }),
    }
}

/// The numbers of GPUs that can share a layer.
fn sizes(architecture: &Architecture, inventory: &Inventory, experts: bool) -> impl Iterator<Item = usize> {
    let shared = shared(architecture, inventory, experts);
    let most =
        architecture.experts.as_ref().filter(|_| experts).map_or(LARGEST_OFFERED, |experts| experts.count);
    (1..=LARGEST_OFFERED.min(most)).filter(move |gpus| shared.iter().all(|each| each.by(*gpus)))
}

/// Bytes of an inventory that no step reads and no plain run loads: further-token layers, encoders beside the language model.
fn unread(inventory: &Inventory) -> u64 {
    inventory.tensors.iter().filter(|tensor| tensor.role == Role::Unused).map(|tensor| tensor.bytes.0).sum()
}
