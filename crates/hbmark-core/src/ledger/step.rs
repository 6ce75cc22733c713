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
//! - Mixtures of experts: expected distinct experts under uniform routing, `E·(1 − (1 − k/E)^tokens)` per layer.
//! - Latent attention: the latent and the rotary part per token and layer, read once. Its FLOPs are those of the absorbed
//!   form in decode (scores and values on the latent) and of the expanded form in prefill.
//! - Low-rank adapters: the matrices of every *different* adapter of a batch once; how many those are follows from how often each is
//!   asked for ([`expected_distinct_adapters`]).
//! - Counts stop at 2^64 - 1 instead of overflowing: the largest batch and context that can be asked for move more.
//! - Left out: activations, logits and the scales of a quantised KV cache; together well under a percent of a decode.

use serde::{Deserialize, Serialize};

use crate::model::{Architecture, Dtype, Inventory, Role};
use crate::result::{Phase, StepBytes};
use crate::units::{Bytes, Flops};

/// One point of the grid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StepShape {
    pub phase: Phase,
    pub batch: usize,
    /// Decode: positions in the cache before the step. Prefill: tokens of each prompt.
    pub context: usize,
}

impl StepShape {
    /// A decode step of `batch` sequences with `context` positions each in the cache.
    #[must_use]
    pub fn decode(batch: usize, context: usize) -> Self {
        Self { phase: Phase::Decode, batch, context }
    }

    /// A prefill of `batch` prompts of `tokens` each into an empty cache.
    #[must_use]
    pub fn prefill(batch: usize, tokens: usize) -> Self {
        Self { phase: Phase::Prefill, batch, context: tokens }
    }

    /// New tokens of each sequence.
    #[must_use]
    pub fn queries(&self) -> usize {
        match self.phase {
            Phase::Prefill => self.context,
            Phase::Decode => 1,
        }
    }

    /// Positions of each sequence in the cache when the step is done.
    #[must_use]
    pub fn positions_after(&self) -> usize {
        match self.phase {
            Phase::Prefill => self.context,
            Phase::Decode => self.context + 1,
        }
    }
}

/// New tokens and cached positions of one sequence in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RaggedPart {
    /// Positions in the cache before the step.
    pub cached: usize,
    pub tokens: usize,
}

/// What a step must move and do.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StepCost {
    pub bytes: StepBytes,
    pub flops: Flops,
    /// Expected distinct experts per layer; `None` for dense models.
    pub distinct_experts: Option<f64>,
}

/// The sums over a model's tensors from which every step is costed.
#[derive(Debug, Clone)]
pub struct Ledger {
    architecture: Architecture,
    kv_dtype: Dtype,
    /// Everything a step reads whatever the routing, head included.
    shared_bytes: u64,
    /// All routed experts of all layers.
    expert_bytes: u64,
    /// One row of an embedding table that is not also the head; 0 when it is.
    embedding_row_bytes: u64,
    /// Elements of the linear layers every token passes, head excluded.
    shared_elements: u64,
    /// Elements of all routed experts of all layers.
    expert_elements: u64,
    head_elements: u64,
    resident: Bytes,
}

impl Ledger {
    /// Sums a model's tensors. Whether the head is tied follows from the inventory: no tensor has the role of a head.
    #[must_use]
    pub fn new(architecture: &Architecture, inventory: &Inventory, kv_dtype: Dtype) -> Self {
        let mut ledger = Self {
            architecture: architecture.clone(),
            kv_dtype,
            shared_bytes: 0,
            expert_bytes: 0,
            embedding_row_bytes: 0,
            shared_elements: 0,
            expert_elements: 0,
            head_elements: 0,
            resident: inventory.total_bytes(),
        };
        let tied = inventory.tensors.iter().all(|tensor| tensor.role != Role::Head);
        for tensor in &inventory.tensors {
            let (bytes, elements) = (tensor.bytes.0, tensor.elements());
            match tensor.role {
                Role::Embedding if tied => {
                    ledger.shared_bytes += bytes;
                    ledger.head_elements += elements;
                }
                Role::Embedding => {
                    ledger.embedding_row_bytes += bytes / (architecture.vocab_size.max(1) as u64);
                }
                Role::Head => {
                    ledger.shared_bytes += bytes;
                    ledger.head_elements += elements;
                }
                Role::Matrix | Role::SharedExpert | Role::Router => {
                    ledger.shared_bytes += bytes;
                    // A router's correction bias is a vector: bytes, no product.
                    if tensor.shape.len() > 1 {
                        ledger.shared_elements += elements;
                    }
                }
                Role::Norm | Role::Bias | Role::Scale => ledger.shared_bytes += bytes,
                Role::Expert => {
                    ledger.expert_bytes += bytes;
                    ledger.expert_elements += elements;
                }
                Role::ExpertScale => ledger.expert_bytes += bytes,
                Role::Unused => {}
            }
        }
        ledger
    }

    /// The model's dimensions.
    #[must_use]
    pub fn architecture(&self) -> &Architecture {
        &self.architecture
    }

    /// Storage of the KV cache.
    #[must_use]
    pub fn kv_dtype(&self) -> Dtype {
        self.kv_dtype
    }

    /// Bytes of all tensors, read or not: what stays in memory.
    #[must_use]
    pub fn resident_weights(&self) -> Bytes {
        self.resident
    }

    /// KV bytes of one token over all layers.
    #[must_use]
    pub fn kv_bytes_per_token(&self) -> Bytes {
        self.kv_bytes(self.architecture.layers as u64)
    }

    /// Cost of one step.
    #[must_use]
    pub fn step(&self, shape: StepShape) -> StepCost {
        match shape.phase {
            Phase::Prefill => self.prefill(shape.batch, shape.context),
            Phase::Decode => self.decode(shape.batch, shape.context),
        }
    }

    /// Cost of one decode step of `batch` sequences with `context` cached positions each.
    #[must_use]
    pub fn decode(&self, batch: usize, context: usize) -> StepCost {
        let sequences = batch as u64;
        let arch = &self.architecture;
        let attended = (0..arch.layers).map(|layer| arch.attended(layer, context) as u64).sum::<u64>();
        let scored = (0..arch.layers).map(|layer| arch.attended(layer, context + 1) as f64).sum::<f64>();
        let (weights, distinct_experts) = self.weights(batch);
        let bytes = StepBytes {
            weights,
            kv_read: self.kv_bytes(sequences.saturating_mul(attended)),
            kv_write: self.kv_bytes(sequences.saturating_mul(arch.layers as u64)),
            other: Bytes(sequences.saturating_mul(self.embedding_row_bytes)),
            as_implemented: None,
        };
        let per_sequence = self.linear_flops()
            + 2.0 * self.head_elements as f64
            + self.flops_per_scored_position(Phase::Decode) * scored;
        StepCost { bytes, flops: Flops(per_sequence * batch as f64), distinct_experts }
    }

    /// Cost of prefilling `batch` prompts of `tokens` each; logits of the last position only.
    #[must_use]
    pub fn prefill(&self, batch: usize, tokens: usize) -> StepCost {
        let all_tokens = (batch as u64).saturating_mul(tokens as u64);
        let arch = &self.architecture;
        let scored = (0..arch.layers).map(|layer| causal_pairs(tokens, arch.window(layer))).sum::<f64>();
        let (weights, distinct_experts) = self.weights(batch.saturating_mul(tokens));
        let kv = self.kv_bytes(all_tokens.saturating_mul(arch.layers as u64));
        let bytes = StepBytes {
            weights,
            kv_read: kv,
            kv_write: kv,
            other: Bytes(all_tokens.saturating_mul(self.embedding_row_bytes)),
            as_implemented: None,
        };
        let per_sequence = self.linear_flops() * tokens as f64
            + 2.0 * self.head_elements as f64
            + self.flops_per_scored_position(Phase::Prefill) * scored;
        StepCost { bytes, flops: Flops(per_sequence * batch as f64), distinct_experts }
    }

    /// Cost of one step over sequences of any length: each brings `tokens` on top of `cached` positions. One token is a decode as in
    /// [`decode`](Self::decode); more are (part of) a prefill as in [`prefill`](Self::prefill), which also reads what is cached.
    #[must_use]
    pub fn ragged(&self, parts: impl IntoIterator<Item = RaggedPart>) -> StepCost {
        let arch = &self.architecture;
        let full = arch.windows.is_empty();
        let (mut sequences, mut all, mut read, mut flops) = (0_u64, 0_u64, 0_u64, 0.0);
        for RaggedPart { cached, tokens } in parts {
            sequences += 1;
            all += tokens as u64;
            let phase = if tokens == 1 { Phase::Decode } else { Phase::Prefill };
            let own = if tokens == 1 { 0 } else { tokens };
            let layers = if full { 1 } else { arch.layers };
            let each = if full { arch.layers as u64 } else { 1 };
            let mut scored = 0.0;
            for layer in 0..layers {
                read += each * (arch.attended(layer, cached) + own) as u64;
                let window = arch.window(layer);
                let pairs = causal_pairs(cached + tokens, window) - causal_pairs(cached, window);
                scored += each as f64 * pairs;
            }
            flops += self.flops_per_scored_position(phase) * scored;
        }
        let tokens = usize::try_from(all).unwrap_or(usize::MAX);
        let (weights, distinct_experts) = self.weights(tokens);
        let bytes = StepBytes {
            weights,
            kv_read: self.kv_bytes(read),
            kv_write: self.kv_bytes(all.saturating_mul(arch.layers as u64)),
            other: Bytes(all.saturating_mul(self.embedding_row_bytes)),
            as_implemented: None,
        };
        flops += self.linear_flops() * all as f64 + 2.0 * self.head_elements as f64 * sequences as f64;
        StepCost { bytes, flops: Flops(flops), distinct_experts }
    }

    /// Memory an engine without copies needs for a step: all weights, the KV cache (no more than the window where there is
    /// one) and the widest activations (gate and up of the feed-forward beside the residual, or the f32 logits).
    #[must_use]
    pub fn memory(&self, shape: StepShape) -> Bytes {
        let arch = &self.architecture;
        let positions = shape.positions_after();
        let cached: u64 = (0..arch.layers).map(|layer| arch.attended(layer, positions) as u64).sum();
        let feed_forward = arch
            .experts
            .as_ref()
            .map_or(arch.ffn_size, |experts| experts.per_token * experts.ffn_size + experts.shared_ffn_size);
        let width = (2 * feed_forward + 2 * arch.hidden_size) as u64;
        let tokens = shape.batch.saturating_mul(shape.queries()) as u64;
        let activations = tokens.saturating_mul(width * self.activation_bytes());
        let logits = (shape.batch as u64).saturating_mul(arch.vocab_size as u64 * 4);
        self.resident
            + self.kv_bytes((shape.batch as u64).saturating_mul(cached))
            + Bytes(activations.max(logits))
    }

    /// Bytes of one activation: engines with an f32 cache keep f32, all others 16 bits.
    pub(super) fn activation_bytes(&self) -> u64 {
        if self.kv_dtype == Dtype::F32 { 4 } else { 2 }
    }

    /// Weights read when `tokens` tokens are routed, and the distinct experts per layer.
    fn weights(&self, tokens: usize) -> (Bytes, Option<f64>) {
        let Some(experts) = &self.architecture.experts else {
            return (Bytes(self.shared_bytes + self.expert_bytes), None);
        };
        let distinct = expected_distinct_experts(experts.count, experts.per_token, tokens);
        let share = distinct / experts.count.max(1) as f64;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a share of at most 1 of a u64, never negative"
        )]
        let routed = (self.expert_bytes as f64 * share).round() as u64;
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

    /// FLOPs of one query against one position in one layer: scores and the weighted sum, all heads.
    fn flops_per_scored_position(&self, phase: Phase) -> f64 {
        let arch = &self.architecture;
        let width = match (arch.latent, phase) {
            (None, _) => 2 * arch.head_dim,
            (Some(latent), Phase::Decode) => 2 * latent.kv_rank + latent.qk_rope_head_dim,
            (Some(latent), Phase::Prefill) => {
                latent.qk_nope_head_dim + latent.qk_rope_head_dim + latent.v_head_dim
            }
        };
        2.0 * arch.heads as f64 * width as f64
    }

    /// KV bytes of a number of (token, layer) pairs.
    fn kv_bytes(&self, token_layers: u64) -> Bytes {
        let each = self.architecture.kv_elements_per_token_and_layer() as u64;
        let elements = u128::from(token_layers) * u128::from(each);
        let (bits, of) = kv_bits(self.kv_dtype);
        Bytes(u64::try_from((elements * bits).div_ceil(8 * of)).unwrap_or(u64::MAX))
    }
}

/// Bits of so many KV elements. A mixture of formats is one of weights: the cache beside it is f16, llama.cpp's default.
fn kv_bits(dtype: Dtype) -> (u128, u128) {
    match dtype {
        Dtype::F32 => (32, 1),
        Dtype::Bf16 | Dtype::F16 | Dtype::Gguf => (16, 1),
        Dtype::Int8 | Dtype::Fp8 => (8, 1),
        Dtype::Int4 => (4, 1),
        // ggml's blocks of 32 with one f16 scale, as `-ctk q8_0` keeps them.
        Dtype::Q8_0 => (32 * 8 + 16, 32),
        Dtype::Q4_0 => (32 * 4 + 16, 32),
    }
}

/// Distinct experts of `tokens` tokens that each draw `per_token` of `count` uniformly: `E·(1 − (1 − k/E)^tokens)`.
#[must_use]
pub fn expected_distinct_experts(count: usize, per_token: usize, tokens: usize) -> f64 {
    if count == 0 {
        return 0.0;
    }
    let missed = 1.0 - (per_token.min(count) as f64 / count as f64);
    count as f64 * (1.0 - missed.powf(tokens as f64))
}

/// Different adapters among `batch` requests that each have adapter i with probability `shares[i]`: `Σ (1 − (1 − share)^batch)`. The rest
/// of the requests has none.
#[must_use]
pub fn expected_distinct_adapters(shares: &[f64], batch: f64) -> f64 {
    shares.iter().map(|share| 1.0 - (1.0 - share).max(0.0).powf(batch)).sum()
}

/// (query, position) pairs of a causal prefill: `T(T+1)/2`, or fewer under a window.
fn causal_pairs(tokens: usize, window: Option<usize>) -> f64 {
    let triangle = |n: usize| n as f64 * (n as f64 + 1.0) / 2.0;
    match window {
        Some(window) if window < tokens => triangle(window) + (tokens - window) as f64 * window as f64,
        _ => triangle(tokens),
    }
}

#[cfg(test)]
mod tests;
