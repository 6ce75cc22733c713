//! The minimal bytes and FLOPs of one step.
//!
//! Enters: an [`Architecture`], the [`Inventory`] of the tensors actually loaded, and the storage of the KV cache. Leaves:
//! a [`StepCost`] per phase, batch and context, and the memory a step needs. What candle's own forward moves on top is in
//! [`super::stock`].
//!
//! What is counted, and what is not:
//!
//! - Weights: every matrix once per step as stored, with scales, biases and norms. The head is in. A table that doubles as
//!   head counts once; a table of its own is left out and one row per token is added as `other`.
//! - Decode at context c: c positions are cached and the new token is the one at position c. Memory traffic is the c cached
//!   positions read (fewer under a window) and one position written per sequence. The token also attends to itself: that
//!   is arithmetic over c + 1 positions, but its K and V are still in registers.
//! - Prefill of T tokens: weights once, the K and V of all tokens written once and read once. A real kernel reads them once
//!   per block of queries; once is the bound that no kernel beats without fusing the projection into the attention.
//! - Mixtures of experts: the expected distinct experts of a layer under an assumption about the routing ([`super::routing`]), uniform
//!   unless another is asked for. That is an expectation: a step whose tokens agree reads less.
//! - Latent attention: the latent and the rotary part per token and layer, read once. Its FLOPs are those of the absorbed
//!   form in decode (scores and values on the latent) and of the expanded form in prefill.
//! - Low-rank adapters: the matrices of every *different* adapter of a batch once; how many those are follows from how often each is
//!   asked for ([`expected_distinct_adapters`]).
//! - Counts stop at 2^64 - 1 instead of overflowing: the largest batch and context that can be asked for move more.
//! - A cache of int8 or int4: an f16 scale and an f16 zero per token and head beside the numbers.
//! - Recurrent layers: the state of every sequence once read and once written.
//! - Latent attention with an indexer: what the indexer keeps of every position, and the latents of those it picks.
//! - Left out: activations and logits; together well under a percent of a decode.

use serde::{Deserialize, Serialize};

use super::routing::{DistinctExperts, ExpertRouting, LayerRouting};
use crate::model::{Architecture, Dtype, Inventory, Mixer, Reach, Role};
use crate::result::{Phase, StepBytes};
use crate::units::{Bytes, Flops, rounded};

/// One point of the grid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StepShape {
    pub phase: Phase,
    pub batch: usize,
    /// Positions in the cache before the step. Prefill: tokens of each prompt.
    pub context: usize,
}

impl StepShape {
    /// A decode step of `batch` sequences with `context` positions each in the cache.
    pub fn decode(batch: usize, context: usize) -> Self {
        Self { phase: Phase::Decode, batch, context }
    }

    /// A prefill of `batch` prompts of `tokens` each into an empty cache.
    pub fn prefill(batch: usize, tokens: usize) -> Self {
        Self { phase: Phase::Prefill, batch, context: tokens }
    }

    /// New tokens of each sequence.
    pub fn queries(&self) -> usize {
        self.phase.new_tokens(self.context)
    }

    /// Rows of logits: of every token of a step over the cache, of the last one of a prompt.
    pub fn logits(&self) -> u64 {
        let per_sequence = if self.phase.is_over_cache() { self.queries() } else { 1 };
        (self.batch as u64).saturating_mul(per_sequence as u64)
    }

    /// Positions of each sequence in the cache when the step is done.
    pub fn positions_after(&self) -> usize {
        self.phase.positions_after(self.context)
    }
}

/// New tokens and cached positions of one sequence in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RaggedPart {
    /// Positions in the cache before the step.
    pub cached: usize,
    pub tokens: usize,
    /// Of the tokens, those that a draft proposed: they, and the one token before them, have logits.
    pub draft_tokens: usize,
}

impl RaggedPart {
    /// Tokens on top of so many cached positions, none of them a draft token.
    pub fn new(cached: usize, tokens: usize) -> Self {
        Self { cached, tokens, draft_tokens: 0 }
    }

    /// Whether all tokens have logits: a decode step, or a verify step, and no part of a prompt.
    pub fn is_over_cache(self) -> bool {
        self.tokens == self.draft_tokens + 1
    }
}

/// What a step must move and do.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StepCost {
    pub bytes: StepBytes,
    pub flops: Flops,
    /// Expected distinct experts per layer, which is not a lower bound; `None` for dense models.
    pub distinct_experts: Option<f64>,
}

impl StepCost {
    /// The same step where it met so many different experts of a layer, on average, as an engine counted them: no expectation any more.
    /// `expert_bytes` are those of one expert in every layer.
    pub fn meeting(self, experts: f64, expert_bytes: Option<Bytes>) -> Self {
        let (Some(expected), Some(each)) = (self.distinct_experts, expert_bytes) else { return self };
        let weights = self.bytes.weights.as_f64() + (experts - expected) * each.as_f64();
        let weights = Bytes(rounded(weights));
        Self { bytes: StepBytes { weights, ..self.bytes }, distinct_experts: Some(experts), ..self }
    }
}

/// The sums over a model's tensors from which every step is costed.
#[derive(Debug, Clone)]
pub struct Ledger {
    architecture: Architecture,
    kv_dtype: Dtype,
    /// What the layers keep of the tokens, equal ones once.
    caches: Vec<LayerCache>,
    /// Everything a step reads whatever the routing, head included.
    shared_bytes: u64,
    /// All routed experts of all layers.
    expert_bytes: u64,
    /// One row of an embedding table that is not also the head; 0 when it is.
    embedding_row_bytes: u64,
    /// The embedding table, whether it is also the head or not.
    table_bytes: u64,
    /// Elements of the linear layers every token passes, head excluded.
    shared_elements: u64,
    /// Elements of all routed experts of all layers.
    expert_elements: u64,
    head_elements: u64,
    resident: Bytes,
    routing: Option<LayerRouting>,
    /// GPUs that hold the routed experts of a layer between them, whole ones each.
    expert_ranks: usize,
}

impl Ledger {
    /// Sums a model's tensors. Whether the head is tied follows from the inventory: no tensor has the role of a head.
    pub fn new(architecture: &Architecture, inventory: &Inventory, kv_dtype: Dtype) -> Self {
        let tied = inventory.tensors.iter().all(|tensor| tensor.role != Role::Head);
        Self::part(architecture, inventory, kv_dtype, tied)
    }

    /// A part of a model, where the embedding may be there without being the head.
    pub(in crate::ledger) fn part(
        architecture: &Architecture,
        inventory: &Inventory,
        kv_dtype: Dtype,
        tied: bool,
    ) -> Self {
        let mut ledger = Self {
            architecture: architecture.clone(),
            kv_dtype,
            caches: LayerCache::of(architecture),
            shared_bytes: 0,
            expert_bytes: 0,
            embedding_row_bytes: 0,
            table_bytes: 0,
            shared_elements: 0,
            expert_elements: 0,
            head_elements: 0,
            resident: inventory.total_bytes(),
            routing: None,
            expert_ranks: 1,
        };
        for tensor in &inventory.tensors {
            let (bytes, elements) = (tensor.bytes.0, tensor.elements());
            match tensor.role {
                Role::Embedding if tied => {
                    ledger.table_bytes += bytes;
                    ledger.shared_bytes += bytes;
                    ledger.head_elements += elements;
                }
                Role::Embedding => {
                    ledger.table_bytes += bytes;
                    ledger.embedding_row_bytes += bytes / (architecture.vocab_size.max(1) as u64);
                }
                Role::Head => {
                    ledger.shared_bytes += bytes;
                    ledger.head_elements += elements;
                }
                Role::Matrix | Role::SharedExpert | Role::Router => {
                    ledger.shared_bytes += bytes;
                    // A router's correction bias is a vector: bytes, no product. A convolution is one of a few columns.
                    if tensor.shape.len() > 1 {
                        ledger.shared_elements += elements;
                    }
                }
                Role::Norm | Role::Bias | Role::Scale => ledger.shared_bytes += bytes,
                Role::Expert => {
                    ledger.expert_bytes += bytes;
                    ledger.expert_elements += elements;
                }
                Role::ExpertScale | Role::ExpertBias => ledger.expert_bytes += bytes,
                Role::Unused => {}
            }
        }
        ledger.routed(ExpertRouting::Uniform)
    }

    /// The same under another assumption about which experts tokens take.
    pub fn routed(mut self, routing: ExpertRouting) -> Self {
        let experts = self.architecture.experts.as_ref();
        self.routing = experts.map(|experts| LayerRouting::new(routing, experts.count, experts.per_token));
        self
    }

    /// One GPU of so many that share the routed experts of a layer: its tensors are its own experts.
    pub(in crate::ledger) fn sharing_experts(mut self, ranks: usize) -> Self {
        self.expert_ranks = ranks.max(1);
        self
    }

    /// What a step of so many tokens is expected to meet in a layer; `None` for dense models.
    pub fn distinct_experts(&self, tokens: usize) -> Option<DistinctExperts> {
        Some(self.routing.as_ref()?.distinct(tokens))
    }

    /// Bytes of one routed expert in every layer that has any, on average over the experts; `None` for dense models.
    pub fn expert_bytes(&self) -> Option<Bytes> {
        let experts = self.architecture.experts.as_ref()?;
        Some(Bytes(self.expert_bytes / experts.count.max(1) as u64))
    }

    /// The most experts of a layer that any GPU meets which shares them; `None` for dense models.
    pub(in crate::ledger) fn most_experts(&self, tokens: usize) -> Option<f64> {
        let routing = self.routing.as_ref()?;
        Some(match self.expert_ranks {
            1 => routing.distinct(tokens).mean,
            ranks => routing.fullest(tokens, ranks),
        })
    }

    /// The model's dimensions.
    pub fn architecture(&self) -> &Architecture {
        &self.architecture
    }

    /// Storage of the KV cache.
    pub fn kv_dtype(&self) -> Dtype {
        self.kv_dtype
    }

    /// Bytes of all tensors, read or not: what stays in memory.
    pub fn resident_weights(&self) -> Bytes {
        self.resident
    }

    /// Bytes that one token adds to the cache, over all layers; a window forgets as much.
    pub fn kv_bytes_per_token(&self) -> Bytes {
        self.cached(|_| 1)
    }

    /// Bytes of recurrent state of one sequence, over all layers: read and written in every step.
    pub fn state_bytes(&self) -> Bytes {
        Bytes(self.caches.iter().map(|cache| cache.layers * cache.state).sum())
    }

    /// Cost of one step.
    pub fn step(&self, shape: StepShape) -> StepCost {
        match shape.phase {
            Phase::Prefill => self.prefill(shape.batch, shape.context),
            Phase::Decode | Phase::Verify { .. } => {
                self.over_cache(shape.batch, shape.context, shape.queries())
            }
        }
    }

    /// Cost of one decode step of `batch` sequences with `context` cached positions each.
    pub fn decode(&self, batch: usize, context: usize) -> StepCost {
        self.over_cache(batch, context, 1)
    }

    /// Cost of one step of `tokens` new tokens for each of `batch` sequences with `context` cached positions, with the logits of all of them. The
    /// cache is read once for the tokens of a sequence: of a window, what the first of them sees.
    fn over_cache(&self, batch: usize, context: usize, tokens: usize) -> StepCost {
        let (sequences, all) = (batch as u64, (batch as u64).saturating_mul(tokens as u64));
        let read = times(self.read(context) + self.state_bytes(), sequences);
        let linear = (self.linear_flops() + 2.0 * self.head_elements as f64) * tokens as f64;
        let flops = linear + self.mixing_flops(Phase::Decode, context, tokens);
        self.cost(sequences, all, read, flops * batch as f64)
    }

    /// Cost of a step of so many sequences and new tokens that reads so much of the cache.
    fn cost(&self, sequences: u64, tokens: u64, kv_read: Bytes, flops: f64) -> StepCost {
        let (weights, distinct_experts) = self.weights(usize::try_from(tokens).unwrap_or(usize::MAX));
        let bytes = StepBytes {
            weights,
            kv_read,
            // The state before draft tokens is kept at the least: what stands of them can be replayed.
            kv_write: times(self.kv_bytes_per_token(), tokens) + times(self.state_bytes(), sequences),
            other: Bytes(tokens.saturating_mul(self.embedding_row_bytes)),
            as_implemented: None,
        };
        StepCost { bytes, flops: Flops(flops), distinct_experts }
    }

    /// Cost of prefilling `batch` prompts of `tokens` each; logits of the last position only.
    pub fn prefill(&self, batch: usize, tokens: usize) -> StepCost {
        let all = (batch as u64).saturating_mul(tokens as u64);
        let per_sequence = self.linear_flops() * tokens as f64
            + 2.0 * self.head_elements as f64
            + self.mixing_flops(Phase::Prefill, 0, tokens);
        self.cost(batch as u64, all, times(self.kv_bytes_per_token(), all), per_sequence * batch as f64)
    }

    /// Cost of one step over sequences of any length: each brings `tokens` on top of `cached` positions. One token is a decode as in
    /// [`decode`](Self::decode), one and its draft tokens are a verify step; more are (part of) a prefill as in [`prefill`](Self::prefill),
    /// which also reads what is cached.
    pub fn ragged(&self, parts: impl IntoIterator<Item = RaggedPart>) -> StepCost {
        let (mut sequences, mut all, mut outputs, mut flops) = (0_u64, 0_u64, 0_u64, 0.0);
        let mut read = Bytes(0);
        for part in parts {
            let RaggedPart { cached, tokens, draft_tokens } = part;
            sequences += 1;
            all += tokens as u64;
            outputs += draft_tokens as u64 + 1;
            let (phase, own) =
                if part.is_over_cache() { (Phase::Decode, 0) } else { (Phase::Prefill, tokens) };
            read = read + self.read(cached) + times(self.kv_bytes_per_token(), own as u64);
            flops += self.mixing_flops(phase, cached, tokens);
        }
        flops += self.linear_flops() * all as f64 + 2.0 * self.head_elements as f64 * outputs as f64;
        self.cost(sequences, all, read + times(self.state_bytes(), sequences), flops)
    }

    /// What stays in memory of a sequence of so many positions: its cache, no more than the window where there is one, and its state.
    pub(in crate::ledger) fn kept(&self, positions: usize) -> Bytes {
        self.cached(|cache| cache.reach.kept(positions)) + self.state_bytes()
    }

    /// The same of each of its positions: of a long sequence less than a token adds where windows forget, of a short one more where there is state.
    pub fn kept_per_position(&self, positions: usize) -> f64 {
        let positions = positions.max(1);
        self.kept(positions).as_f64() / positions as f64
    }

    /// Memory an engine without copies needs for a step: all weights, the KV cache (no more than the window where there is
    /// one) and the widest activations (gate and up of the feed-forward beside the residual, or the f32 logits).
    pub fn memory(&self, shape: StepShape) -> Bytes {
        let arch = &self.architecture;
        let kept = self.kept(shape.positions_after());
        let feed_forward = arch
            .experts
            .as_ref()
            .map_or(arch.ffn_size, |experts| experts.per_token * experts.ffn_size + experts.shared_ffn_size);
        let width = (2 * feed_forward + 2 * arch.hidden_size) as u64;
        let tokens = shape.batch.saturating_mul(shape.queries()) as u64;
        let activations = tokens.saturating_mul(width * self.activation_bytes());
        // A stage without the head has none.
        let vocabulary = if self.head_elements == 0 { 0 } else { arch.vocab_size as u64 };
        let logits = shape.logits().saturating_mul(vocabulary * 4);
        self.resident + times(kept, shape.batch as u64) + Bytes(activations.max(logits))
    }

    /// What the ranks of a tensor parallel group hold more than one device does: the embedding on each, latents, and heads of K and V that are fewer
    /// than the ranks.
    pub fn repeated_on_ranks(&self, shape: StepShape, ranks: usize) -> Bytes {
        if ranks <= 1 {
            return Bytes(0);
        }
        let a = &self.architecture;
        let copies = match a.latent {
            Some(_) => ranks,
            None => ranks.div_ceil(a.kv_heads.max(1)),
        };
        let kept = times(self.kept(shape.positions_after()), shape.batch as u64);
        times(kept, copies as u64 - 1) + self.rest_of_table(ranks)
    }

    /// What ranks hold of the embedding beside what this ledger counts: our engine keeps all of it on each, and of one that is the head, too, a part
    /// as the head.
    pub fn rest_of_table(&self, ranks: usize) -> Bytes {
        let copies = match ranks {
            0 | 1 => 0,
            ranks => ranks as u64 - 1 + u64::from(self.architecture.tied_head),
        };
        times(Bytes(self.table_bytes), copies)
    }

    /// Bytes of one activation: engines with an f32 cache keep f32, all others 16 bits.
    pub(in crate::ledger) fn activation_bytes(&self) -> u64 {
        if self.kv_dtype == Dtype::F32 { 4 } else { 2 }
    }

    /// Weights read when `tokens` tokens are routed, and the distinct experts per layer.
    fn weights(&self, tokens: usize) -> (Bytes, Option<f64>) {
        let (Some(experts), Some(routing)) = (&self.architecture.experts, &self.routing) else {
            return (Bytes(self.shared_bytes + self.expert_bytes), None);
        };
        let distinct = routing.distinct(tokens).mean;
        // A step waits for the GPU that has to read the largest share of its own experts.
        let here = experts.count.div_ceil(self.expert_ranks).max(1);
        let share = self.most_experts(tokens).unwrap_or(distinct) / here as f64;
        let routed = rounded(self.expert_bytes as f64 * share);
        (Bytes(self.shared_bytes + routed), Some(distinct))
    }

    /// FLOPs of the linear layers per token, head excluded.
    fn linear_flops(&self) -> f64 {
        let share = self
            .architecture
            .experts
            .as_ref()
            .map_or(1.0, |experts| experts.per_token as f64 / experts.count.max(1) as f64);
        2.0 * (self.shared_elements as f64 + self.expert_elements as f64 * share)
    }

    /// FLOPs of the mixers for `tokens` new tokens of a sequence on top of `cached`: scores and sums, and recurrences.
    fn mixing_flops(&self, phase: Phase, cached: usize, tokens: usize) -> f64 {
        let of = |cache: &LayerCache| {
            let pairs = cache.picked.map_or(cache.reach, |tokens| Reach::Window { tokens });
            let pairs = pairs.pairs(cached + tokens) - pairs.pairs(cached);
            let all = Reach::Full.pairs(cached + tokens) - Reach::Full.pairs(cached);
            let scores = match phase {
                Phase::Decode | Phase::Verify { .. } => cache.decode_flops,
                Phase::Prefill => cache.prefill_flops,
            };
            cache.layers as f64
                * (scores * pairs + cache.index_flops * all + cache.state_flops * tokens as f64)
        };
        self.caches.iter().map(of).sum()
    }

    /// Bytes of the cache that a token at position `context` reads, without recurrent state.
    fn read(&self, context: usize) -> Bytes {
        self.cached_of(
            |cache| cache.picked.map_or(cache.reach.read(context), |most| context.min(most)),
            |_| context,
        )
    }

    /// Bytes of the cache for so many positions of each layer.
    fn cached(&self, positions: impl Fn(&LayerCache) -> usize) -> Bytes {
        self.cached_of(&positions, &positions)
    }

    fn cached_of(
        &self,
        positions: impl Fn(&LayerCache) -> usize,
        indexed: impl Fn(&LayerCache) -> usize,
    ) -> Bytes {
        let (bits, of) = kv_bits(self.kv_dtype);
        let mut all: u128 = 0;
        let mut index: u128 = 0;
        for cache in &self.caches {
            let count = u128::from(cache.layers);
            let each = u128::from(cache.elements) * bits
                + u128::from(cache.vectors) * scale_bits(self.kv_dtype) * of;
            all += count * positions(cache) as u128 * each;
            index += count * indexed(cache) as u128 * u128::from(cache.index_bytes);
        }
        Bytes(u64::try_from(all.div_ceil(8 * of) + index).unwrap_or(u64::MAX))
    }
}

fn times(bytes: Bytes, count: u64) -> Bytes {
    Bytes(bytes.0.saturating_mul(count))
}

/// What equal layers keep of a sequence.
#[derive(Debug, Clone, Default, PartialEq)]
struct LayerCache {
    layers: u64,
    reach: Reach,
    /// Elements of a token.
    elements: u64,
    /// Vectors of a token that have a scale of their own where the cache is quantised.
    vectors: u64,
    /// Bytes of a token that an indexer reads, of every position.
    index_bytes: u64,
    /// Positions that the indexer picks.
    picked: Option<usize>,
    /// Bytes of state, whatever the context.
    state: u64,
    /// FLOPs of one query against one position.
    decode_flops: f64,
    prefill_flops: f64,
    index_flops: f64,
    /// FLOPs of a token against the state.
    state_flops: f64,
}

impl LayerCache {
    fn of(architecture: &Architecture) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::new();
        for index in 0..architecture.layers {
            let Some(cache) = Self::of_mixer(&architecture.layer(index).mixer) else { continue };
            match all.iter_mut().find(|known| Self { layers: 1, ..(*known).clone() } == cache) {
                Some(known) => known.layers += 1,
                None => all.push(cache),
            }
        }
        all
    }

    fn of_mixer(mixer: &Mixer) -> Option<Self> {
        let empty = Self { layers: 1, ..Self::default() };
        // Convolutions keep their last inputs in 16 bits.
        let convolved = |channels: usize, kernel: usize| (channels * (kernel - 1) * 2) as u64;
        match *mixer {
            Mixer::Attention(a) => {
                let flops = 2.0 * a.heads as f64 * (a.key_dim + a.value_dim) as f64;
                Some(Self {
                    reach: a.reach,
                    elements: (a.kv_heads * (a.key_dim + a.value_dim)) as u64,
                    vectors: 2 * a.kv_heads as u64,
                    decode_flops: flops,
                    prefill_flops: flops,
                    ..empty
                })
            }
            Mixer::Latent { heads, latent, indexer } => {
                let flops = |width: usize| 2.0 * heads as f64 * width as f64;
                let index = |indexer: crate::model::Indexer| 2.0 * (indexer.heads * indexer.head_dim) as f64;
                Some(Self {
                    elements: (latent.kv_rank + latent.qk_rope_head_dim) as u64,
                    vectors: 1,
                    index_bytes: indexer.map_or(0, crate::model::Indexer::bytes_per_token),
                    picked: indexer.map(|indexer| indexer.top_k),
                    decode_flops: flops(2 * latent.kv_rank + latent.qk_rope_head_dim),
                    prefill_flops: flops(
                        latent.qk_nope_head_dim + latent.qk_rope_head_dim + latent.v_head_dim,
                    ),
                    index_flops: indexer.map_or(0.0, index),
                    ..empty
                })
            }
            // The state times the key, the outer product added, the state times the query.
            Mixer::DeltaNet(delta) => Some(Self {
                state: (delta.state() * delta.state_bytes) as u64
                    + convolved(delta.channels(), delta.conv_kernel),
                state_flops: 6.0 * delta.state() as f64,
                ..empty
            }),
            // The outer product added, the state times C.
            Mixer::Mamba(mamba) => Some(Self {
                state: (mamba.state() * mamba.state_bytes) as u64
                    + convolved(mamba.channels(), mamba.conv_kernel),
                state_flops: 4.0 * mamba.state() as f64,
                ..empty
            }),
            Mixer::None => None,
        }
    }
}

/// Bits of so many KV elements. A mixture of formats and blocks of 256 are of weights: the cache beside them is f16, llama.cpp's default.
fn kv_bits(dtype: Dtype) -> (u128, u128) {
    match dtype {
        Dtype::F32 => (32, 1),
        Dtype::Bf16 | Dtype::F16 | Dtype::Gguf | Dtype::Q4K | Dtype::Q5K | Dtype::Q6K => (16, 1),
        Dtype::Int8 | Dtype::Fp8 => (8, 1),
        Dtype::Int4 => (4, 1),
        Dtype::Mxfp8 => (32 * 8 + 8, 32),
        Dtype::Mxfp4 => (32 * 4 + 8, 32),
        Dtype::Nvfp4 => (16 * 4 + 8, 16),
        // ggml's blocks of 32 with one f16 scale, as `-ctk q8_0` keeps them.
        Dtype::Q8_0 => (32 * 8 + 16, 32),
        Dtype::Q4_0 => (32 * 4 + 16, 32),
    }
}

/// Different adapters among `batch` requests that each have adapter i with probability `shares[i]`: `Σ (1 − (1 − share)^batch)`. The rest
/// of the requests has none.
pub fn expected_distinct_adapters(shares: &[f64], batch: f64) -> f64 {
    shares.iter().map(|share| 1.0 - (1.0 - share).max(0.0).powf(batch)).sum()
}

/// Bits beside each vector of a quantised cache: an f16 scale and an f16 zero per token and head, or one f32 scale, as engines keep integers. Blocks
/// have theirs inside, and fp8 one for the whole cache or none.
fn scale_bits(dtype: Dtype) -> u128 {
    match dtype {
        Dtype::Int8 | Dtype::Int4 => 32,
        _ => 0,
    }
}

#[cfg(test)]
mod tests;
