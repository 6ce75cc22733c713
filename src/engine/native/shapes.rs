//! The shapes of a layer as operations take them: heads, latents, experts, what is kept of a position, and how a gate is computed.
//!
//! Enters: the dimensions of a model. Leaves: plain data, the same for every device.

use super::kv_format;
use super::ragged_batch::Rows;
use super::rope::distinct_ropes;
use hbmark_core::model::{Activation, Architecture, Dtype, Mixer, Mixture, QkNorm, Routing};
use hbmark_core::units::Bytes;

/// Heads of one attention layer, and what is done to their queries, keys and scores.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Width of a value; of latent attention the first so many elements of what is kept of a position are its value.
    pub value_dim: usize,
    pub norm_eps: f32,
    /// Norms of Q and K go over all their heads together; otherwise over each.
    pub joint_norms: bool,
    /// Which of the model's rotary embeddings turns Q and K; `None` for none.
    pub rope: Option<usize>,
    /// What scores are multiplied with.
    pub scale: f32,
    /// Scores are bent towards this: `softcap · tanh(score / softcap)`.
    pub softcap: Option<f32>,
}

impl AttentionShape {
    /// That of a layer of a model. Its hidden states are kept divided by its residual multiplier, and the ε of their norms by the square of that.
    ///
    /// # Panics
    /// When the layer has no attention.
    #[expect(clippy::cast_possible_truncation, reason = "f32 is the precision of norms and scores")]
    pub fn of(architecture: &Architecture, layer: usize) -> Self {
        let norm_eps = (architecture.norm_eps / architecture.multipliers.residual.powi(2)) as f32;
        let attention = match architecture.layer(layer).mixer {
            Mixer::Attention(attention) => attention,
            Mixer::Latent { heads, latent, .. } => {
                let scale = latent.scale.unwrap_or_else(|| (latent.query_dim() as f64).powf(-0.5));
                return Self {
                    heads,
                    kv_heads: 1,
                    head_dim: latent.cached(),
                    value_dim: latent.kv_rank,
                    norm_eps,
                    joint_norms: false,
                    rope: Some(0),
                    scale: scale as f32,
                    softcap: None,
                };
            }
            mixer => panic!("layer {layer} was checked to be attention: {mixer:?}"),
        };
        let same = |rope| distinct_ropes(architecture).position(|one| one == rope);
        Self {
            heads: attention.heads,
            kv_heads: attention.kv_heads,
            head_dim: attention.key_dim,
            value_dim: attention.key_dim,
            norm_eps,
            joint_norms: attention.qk_norm == QkNorm::FullWidth,
            rope: attention.rope.and_then(same),
            scale: attention.scale.unwrap_or_else(|| (attention.key_dim as f64).powf(-0.5)) as f32,
            softcap: attention.softcap.map(|cap| cap as f32),
        }
    }

    /// Width of the queries of all heads.
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of what all heads attend to.
    pub fn attended_width(&self) -> usize {
        self.heads * self.value_dim
    }

    /// Width of the keys (or values) of all heads.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Query heads that share one head of K and V.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }
}

/// How the gate of a feed-forward meets what goes up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Gate {
    /// `up · x · sigmoid(x)`.
    Silu,
    /// GELU by tanh: `up · x · sigmoid(2 √(2/π) (x + 0.044715 x³))`.
    GeluTanh,
    /// As gpt-oss has it: `(up + 1) · x · sigmoid(1.702 x)`, x clamped from above and up on both sides.
    ClampedSwiglu { limit: f32 },
}

/// What [`Gate::ClampedSwiglu`] multiplies the gate with inside its sigmoid.
pub const CLAMPED_SWIGLU_SLOPE: f32 = 1.702;

impl Gate {
    /// That of an activation, where the operations have it.
    #[expect(clippy::cast_possible_truncation, reason = "f32 is the precision of activations")]
    pub fn of(activation: Activation) -> Option<Self> {
        match activation {
            Activation::Silu => Some(Self::Silu),
            Activation::GeluTanh => Some(Self::GeluTanh),
            Activation::ClampedSwiglu { limit } => Some(Self::ClampedSwiglu { limit: limit as f32 }),
            Activation::SquaredRelu => None,
        }
    }
}

/// The widths of latent attention: what is kept of a token is a latent of `kv_rank` elements and a key of `rope_dim`, which turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentShape {
    pub heads: usize,
    /// Of what stands for the queries of all heads; `None` where those are projected from hidden states.
    pub q_rank: Option<usize>,
    pub kv_rank: usize,
    /// Of a head's query, what meets the latent, and what meets the key.
    pub nope_dim: usize,
    pub rope_dim: usize,
    /// Of a head's value.
    pub value_dim: usize,
}

impl LatentShape {
    /// That of a layer of a model.
    pub fn of(architecture: &Architecture, layer: usize) -> Option<Self> {
        let Mixer::Latent { heads, latent, .. } = architecture.layer(layer).mixer else { return None };
        Some(Self {
            heads,
            q_rank: latent.q_rank,
            kv_rank: latent.kv_rank,
            nope_dim: latent.qk_nope_head_dim,
            rope_dim: latent.qk_rope_head_dim,
            value_dim: latent.v_head_dim,
        })
    }

    /// Width of a head's query, as it is projected.
    pub fn query_dim(&self) -> usize {
        self.nope_dim + self.rope_dim
    }

    /// Width of the queries of all heads, as they are projected.
    pub fn query_width(&self) -> usize {
        self.heads * self.query_dim()
    }

    /// Elements that are kept of a token.
    pub fn cached(&self) -> usize {
        self.kv_rank + self.rope_dim
    }

    /// Width of what the first projection leaves for the queries: what stands for them; where nothing does, the queries, before what is kept of a
    /// token.
    pub fn compressed_width(&self) -> usize {
        self.q_rank.unwrap_or_else(|| self.query_part() + self.cached())
    }

    /// Outputs of the first projection before what is kept of a token.
    pub fn query_part(&self) -> usize {
        self.q_rank.unwrap_or_else(|| self.query_width())
    }

    /// The form with fewer multiplications in a step. Where every row has logits, as in decode and verify steps, that is the absorbed one for all but
    /// the shortest contexts, and always taken: such steps come again at other contexts.
    pub fn form(&self, rows: &Rows) -> LatentForm {
        if rows.outputs.len() == rows.len() {
            return LatentForm::Absorbed;
        }
        // Of a head: of a row or a position, between latents and the head's own widths; of a row and a position that it sees.
        let between = self.kv_rank * (self.nope_dim + self.value_dim);
        let of_latents = self.kv_rank + self.cached();
        let of_heads = self.query_dim() + self.value_dim;
        let (mut absorbed, mut expanded) = (0, 0);
        for sequence in &rows.sequences {
            let (count, after) = (sequence.rows.len(), sequence.positions_after());
            let seen = count * (sequence.start_position + 1 + after) / 2;
            absorbed += count * between + seen * of_latents;
            expanded += after * between + seen * of_heads;
        }
        if expanded < absorbed { LatentForm::Expanded } else { LatentForm::Absorbed }
    }

    /// Width of the queries of all heads, as they meet keys.
    pub fn query_width_of(&self, form: LatentForm) -> usize {
        match form {
            LatentForm::Absorbed => self.heads * self.cached(),
            LatentForm::Expanded => self.query_width(),
        }
    }

    /// The attention of the expanded form: each head has K and V of its own.
    pub fn expanded(&self, absorbed: &AttentionShape) -> AttentionShape {
        AttentionShape {
            kv_heads: self.heads,
            head_dim: self.query_dim(),
            value_dim: self.value_dim,
            ..*absorbed
        }
    }

    /// The pool of the K and V of the expanded form, of one layer at a time.
    pub fn expanded_pool(&self, latents: &PoolShape) -> PoolShape {
        PoolShape {
            layers: 1,
            kv_heads: self.heads,
            head_dim: self.query_dim(),
            value_dim: self.value_dim,
            consecutive: true,
            ..*latents
        }
    }
}

/// How latent attention is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LatentForm {
    /// Queries meet the latents, which are also the values: all heads read the same vector of a position.
    Absorbed,
    /// Each head meets keys and values of its own, made of the latents: fewer multiplications where many rows share them.
    Expanded,
}

/// What the experts of a row are chosen by, and their shares made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertScores {
    /// The softmax over all of them.
    Softmax,
    /// The sigmoid of each, chosen after a correction.
    Sigmoid,
}

impl ExpertScores {
    /// Of a group so many of the largest scores are summed, to choose groups by.
    pub fn summed_of_a_group(self) -> usize {
        match self {
            Self::Softmax => 1,
            Self::Sigmoid => 2,
        }
    }
}

/// Experts in groups: only those of the best are chosen from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroups {
    pub count: usize,
    pub chosen: usize,
}

impl ExpertGroups {
    /// All in one.
    pub const ONE: Self = Self { count: 1, chosen: 1 };
}

/// What is added to the sum of sigmoids that shares are divided by, as published models do: where all are nothing, so are their shares.
pub const SMALLEST_SUM: f32 = 1e-20;

/// The most groups of experts: their marks are the bits of a word, and a warp has a lane for each.
pub const MAX_EXPERT_GROUPS: usize = 32;

/// The experts of a layer as numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertShape {
    /// Routed experts.
    pub count: usize,
    /// Of a row.
    pub per_row: usize,
    /// Inner width of a routed expert.
    pub width: usize,
    /// Inner width of the expert that every row passes; 0 without.
    pub shared_width: usize,
    /// The shared expert has a gate: its output is multiplied with the sigmoid of that.
    pub shared_gate: bool,
    /// Between the matrices of every expert.
    pub gate: Gate,
    pub scores: ExpertScores,
    pub groups: ExpertGroups,
    /// The shares of a row's experts sum to one; otherwise each keeps its own score.
    pub renormalised: bool,
    /// What the shares are multiplied with then.
    pub scale: f32,
}

impl ExpertShape {
    /// That of a mixture, where the operations have everything that it needs.
    #[expect(clippy::cast_possible_truncation, reason = "f32 is the precision of shares")]
    pub fn of(mixture: &Mixture) -> Option<Self> {
        let (scores, groups, renormalised) = match mixture.routing {
            Routing::Softmax { renormalised } => (ExpertScores::Softmax, ExpertGroups::ONE, renormalised),
            Routing::GroupedSoftmax { groups, chosen_groups, renormalised } => {
                let groups = ExpertGroups { count: groups, chosen: chosen_groups };
                (ExpertScores::Softmax, groups, renormalised)
            }
            // Of shares that are renormalised, all experts but the chosen ones cancel.
            Routing::SoftmaxOfChosen => (ExpertScores::Softmax, ExpertGroups::ONE, true),
            Routing::Sigmoid { groups, chosen_groups, renormalised, correction: _ } => {
                let groups = ExpertGroups { count: groups, chosen: chosen_groups };
                (ExpertScores::Sigmoid, groups, renormalised)
            }
        };
        let gate = Gate::of(mixture.activation)?;
        (mixture.latent.is_none() && groups.count <= MAX_EXPERT_GROUPS).then_some(Self {
            count: mixture.count,
            per_row: mixture.per_token,
            width: mixture.width,
            shared_width: mixture.shared_width,
            shared_gate: mixture.shared_gate,
            gate,
            scores,
            groups,
            renormalised,
            scale: mixture.routed_scaling_factor as f32,
        })
    }

    /// Width of what lies between gate, up and down: that of each expert of a row, in the order of their numbers, then the shared one's.
    pub fn inner_width(&self) -> usize {
        self.per_row * self.width + self.shared_width
    }
}

/// Experts that rows were routed to since they were last asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ExpertsMet {
    /// Different experts, summed over layers and steps.
    pub experts: u64,
    /// Layers with experts, summed over steps.
    pub layers: u64,
}

impl ExpertsMet {
    /// Different experts of a layer in a step, on average; `None` where no layer has any.
    pub fn mean(self) -> Option<f64> {
        (self.layers > 0).then(|| self.experts as f64 / self.layers as f64)
    }
}

/// The size of a paged KV pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolShape {
    pub layers: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Elements of V of a head; 0 where values are the first elements of the keys (latent attention).
    pub value_dim: usize,
    /// Positions in a block; a multiple of 16.
    pub block_size: usize,
    pub dtype: Dtype,
    /// The blocks of a step are the first ones, in the order of its tables, whatever numbers those hold: nothing stays between steps.
    pub consecutive: bool,
}

impl PoolShape {
    /// That of an architecture.
    pub fn of(a: &Architecture, block_size: usize, dtype: Dtype) -> Self {
        let shape = Self {
            layers: a.layers,
            kv_heads: a.kv_heads,
            head_dim: a.head_dim,
            value_dim: a.head_dim,
            block_size,
            dtype,
            consecutive: false,
        };
        match a.latent {
            Some(latent) => Self { kv_heads: 1, head_dim: latent.cached(), value_dim: 0, ..shape },
            None => shape,
        }
    }

    /// Elements of K and of V of one block in one layer.
    pub fn block_parts(&self) -> [usize; 2] {
        [self.head_dim, self.value_dim].map(|dim| self.kv_heads * dim * self.block_size)
    }

    /// Bytes of one element.
    pub fn element_bytes(&self) -> usize {
        kv_format::element_bytes(self.dtype)
    }

    /// Bytes of the scales of K and V of one position in one layer.
    pub fn scale_bytes(&self) -> usize {
        let vectors = if self.value_dim == 0 { self.kv_heads } else { 2 * self.kv_heads };
        vectors * kv_format::scale_bytes(self.dtype)
    }

    /// Bytes of K and V of one position in one layer, scales included.
    pub fn position_bytes(&self) -> usize {
        self.kv_heads * (self.head_dim + self.value_dim) * self.element_bytes() + self.scale_bytes()
    }

    /// Bytes of one block over all layers, K and V.
    pub fn block_bytes(&self) -> Bytes {
        Bytes((self.layers * self.position_bytes() * self.block_size) as u64)
    }
}
