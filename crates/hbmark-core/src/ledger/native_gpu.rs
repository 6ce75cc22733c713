//! The memory that the native engine takes of a GPU.
//!
//! Enters: a [`Ledger`] and a step. Leaves: what the engine allocates for it, which is more than the step must have: activations and sums are
//! kept in f32, scratch memory grows to powers of two, and the pool of K and V is made of slabs. A test of the engine holds this against
//! its allocations on the emulated device.

use super::step::{Ledger, StepShape};
use crate::model::{Dtype, Norms};
use crate::result::Phase;
use crate::units::Bytes;

/// Bytes of blocks of the pool that are allocated together, and the most blocks of those.
const SLAB_BYTES: u64 = 64 << 20;
const SLAB_BLOCKS: u64 = 256;
/// Of the products of the device's library.
const LIBRARY_BYTES: u64 = 32 << 20;
/// Rows from which products go to the tensor cores, and to the library.
const TILED_ROWS: u64 = 5;
const LIBRARY_ROWS: u64 = 65;
/// Rows from which ggml's blocks are widened to bf16 for the library; fewer are streamed.
const WIDENED_ROWS: u64 = 33;
/// Tokens of a sequence from which attention is on tensor cores.
const TILED_QUERIES: usize = 2;
/// The widest head whose prompts are attended to without partial sums; K and V that latents are expanded to.
const TILED_HEAD: usize = 128;
const TILED_EXPANDED: [usize; 2] = [192, 128];
/// K and V of a layer that latents are expanded to, at the most.
const EXPANDED_BYTES: u64 = 2 << 30;

impl Ledger {
    /// The memory that the native engine takes of a GPU in a step of weights of a dtype, where a block of the pool has so many positions.
    ///
    /// All weights, of latent attention the matrices from latents to keys twice; blocks of K and V in whole slabs; f32 activations between operations, f32 logits; the rows as tensor cores take them, weights
    /// that are widened for the library, the sums of a product of the library, and partial sums of attention, each as large as the largest layer needs
    /// and rounded up to a power of two.
    pub fn native_gpu_memory(&self, shape: StepShape, dtype: Dtype, block_size: usize) -> Bytes {
        let a = self.architecture();
        let (hidden, query) = (a.hidden_size as u64, (a.heads * a.head_dim) as u64);
        let experts = a.experts.as_ref();
        // Of a token: the experts that it passes, and their widths together.
        let per_token = experts.map_or(0, |experts| experts.per_token as u64);
        let of_experts = experts.map_or(0, |e| (e.per_token * e.ffn_size + e.shared_ffn_size) as u64);
        let is_dense = experts.is_none_or(|experts| !experts.dense_layers.is_empty());
        let ffn = if is_dense { a.ffn_size as u64 } else { 0 };
        let kv = if a.latent.is_some() { 0 } else { 2 * a.kv_heads * a.head_dim };
        let qkv = query + kv as u64;
        let batch = shape.batch as u64;
        let rows = batch.saturating_mul(shape.queries() as u64);
        let scratch = |bytes: u64| match bytes {
            0 => 0,
            bytes => bytes.checked_next_power_of_two().unwrap_or(u64::MAX),
        };
        let floats = |width: u64| rows.saturating_mul(width).saturating_mul(4);

        // Queries, what they attend to, and of latent attention what lies before and behind them; the sums of its projections.
        let (attention, attended, of_latents) = match a.latent {
            Some(latent) => {
                let heads = |width: usize| (a.heads * width) as u64;
                let kept = latent.cached() as u64;
                let compressed = latent.q_rank.map_or(query + kept, |rank| rank as u64);
                let attended = heads(latent.kv_rank);
                let own = heads(latent.cached()) + attended + compressed + heads(latent.v_head_dim);
                (own, attended, latent.q_rank.map_or(0, |rank| query.max(rank as u64 + kept)))
            }
            None => (2 * query, query, 0),
        };
        let activations = floats(hidden + attention + ffn + of_experts);
        let logits = shape.logits().saturating_mul(a.vocab_size as u64 * 4);
        let (plain, wide) = (matches!(dtype, Dtype::Bf16 | Dtype::F16), dtype == Dtype::F32);
        let of_ggml =
            matches!(dtype, Dtype::Gguf | Dtype::Q8_0 | Dtype::Q4_0 | Dtype::Q4K | Dtype::Q5K | Dtype::Q6K);
        let widens = of_ggml && rows >= WIDENED_ROWS;
        // Experts of ggml's blocks stream; those of a file may be mxfp4, which do not.
        let prepared_experts = if of_ggml && dtype != Dtype::Gguf { 0 } else { of_experts };
        let expands = self.expanded_kv(shape, dtype).is_some();
        let into_products = a.latent.filter(|_| expands).map(|latent| (a.heads * latent.v_head_dim) as u64);
        let mut widest = hidden.max(into_products.unwrap_or(attended)).max(ffn).max(prepared_experts);
        if of_ggml {
            // In whole groups of columns.
            widest = widest.next_multiple_of(32);
        }
        let prepared = match dtype {
            _ if wide || rows < TILED_ROWS || of_ggml && !widens && prepared_experts == 0 => 0,
            // 8 bits, and a scale of 32 for 32 columns.
            Dtype::Int8 => scratch(floats(widest) / 32 * 9),
            _ => scratch(floats(widest) / 2),
        };
        // Beside floats of 4 bits all else may be in bf16.
        let has_bf16 = plain || matches!(dtype, Dtype::Mxfp4 | Dtype::Nvfp4);
        let by_library = has_bf16 && rows >= LIBRARY_ROWS || widens;
        // The largest matrix.
        let widened = if widens {
            let head = if shape.logits() >= WIDENED_ROWS { a.vocab_size as u64 } else { 0 };
            scratch(2 * hidden * qkv.max(2 * ffn).max(head))
        } else {
            0
        };
        let sums = if by_library {
            scratch(floats(qkv.max(2 * ffn).max(of_latents)))
        } else {
            // Those of a file may be in several formats, which meet behind their products.
            let of_heads = if a.qk_norm || dtype == Dtype::Gguf { qkv } else { 0 };
            // The router's, and of the shared expert's gate.
            let of_router = experts.map_or(0, |experts| experts.count as u64 + 1);
            scratch(floats(of_heads.max(of_router).max(of_latents)))
        };
        let single_rows = shape.queries() < TILED_QUERIES;
        let alone = !expands && (wide || a.head_dim > TILED_HEAD || single_rows);
        let partial = if alone { scratch(floats(attended)) } else { 0 };
        // What attention over single rows and the gate leave for the product behind them, in 16 bits.
        let by_attention = if alone && !wide && a.latent.is_none() { query } else { 0 };
        let by_gate = if plain && !by_library { ffn } else { 0 };
        let rounded = match by_attention.max(by_gate) {
            width if width > 0 && rows >= TILED_ROWS => scratch(floats(width) / 2),
            _ => 0,
        };
        let library = if by_library { LIBRARY_BYTES } else { 0 };

        let [pool, expanded, keys] = self.kept_and_expanded(shape, dtype, block_size);

        // Tokens, positions, tables and last rows; and a word for each head that is normed.
        let step = scratch(rows.saturating_mul(20));
        let arrived = if a.qk_norm { scratch(floats((a.heads + 2 * a.kv_heads) as u64)) } else { 0 };

        // What layers add, where that is normed first.
        let after = |layer| !matches!(a.layer(layer).norms, Norms::Before);
        let to_norm = if (0..a.layers).any(after) { scratch(floats(hidden)) } else { 0 };

        // What routing leaves, and what each expert adds to a row.
        let routed = if per_token > 0 { scratch(floats(4 * per_token + 1)) } else { 0 };
        let added = if per_token > 0 { scratch(floats((per_token + 1) * hidden)) } else { 0 };

        let of_step = [activations, logits, prepared, widened, rounded, sums, partial, step];
        let of_layers = [arrived, library, pool, expanded, keys, to_norm, routed, added];
        of_step
            .into_iter()
            .chain(of_layers)
            .map(Bytes)
            .fold(self.resident_weights(), |all, part| Bytes(all.0.saturating_add(part.0)))
    }

    /// The pool of K and V; K and V of a layer that latents are expanded to; the matrices from latents to keys once more.
    fn kept_and_expanded(&self, shape: StepShape, dtype: Dtype, block_size: usize) -> [u64; 3] {
        let blocks = (shape.batch as u64).saturating_mul(shape.positions_after().div_ceil(block_size) as u64);
        let in_slabs = |of_position: u64| {
            let block_bytes = (of_position * block_size as u64).max(1);
            let of_slab = (SLAB_BYTES / block_bytes).clamp(1, SLAB_BLOCKS);
            blocks.div_ceil(of_slab).saturating_mul(of_slab).saturating_mul(block_bytes)
        };
        let a = self.architecture();
        let keys = a.latent.map_or(0, |latent| {
            let of_element = if dtype == Dtype::F32 { 4 } else { 2 };
            (a.layers * a.heads * latent.qk_nope_head_dim * latent.kv_rank * of_element) as u64
        });
        let expanded = self.expanded_kv(shape, dtype).map_or(0, in_slabs);
        [in_slabs(self.kv_bytes_per_token().0), expanded, keys]
    }

    /// Bytes of K and V of a position and layer that a prefill makes of latents, where it does.
    fn expanded_kv(&self, shape: StepShape, dtype: Dtype) -> Option<u64> {
        let a = self.architecture();
        let latent = a.latent?;
        let dims = [latent.query_dim(), latent.v_head_dim];
        let tiled = dims.iter().zip(TILED_EXPANDED).all(|(dim, most)| dim.is_multiple_of(8) && *dim <= most);
        let cache = matches!(self.kv_dtype(), Dtype::Bf16 | Dtype::F16);
        let fewer = dims[0] + dims[1] < latent.kv_rank + latent.cached();
        let bytes = (2 * a.heads * (dims[0] + dims[1])) as u64;
        let positions = (shape.batch as u64).saturating_mul(shape.positions_after() as u64);
        let room = positions.saturating_mul(bytes) <= EXPANDED_BYTES && positions >= TILED_ROWS;
        let prompts = shape.phase == Phase::Prefill && shape.queries() >= TILED_QUERIES;
        (tiled && dtype != Dtype::F32 && cache && fewer && room && prompts).then_some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::test_shapes as shapes;

    #[test]
    fn a_prefill_takes_several_times_what_16_bit_activations_would() {
        let model = shapes::llama_3_1_8b();
        let ledger = Ledger::new(&model, &model.inventory(Dtype::Bf16), Dtype::Bf16);
        let shape = StepShape::prefill(8, 4096);
        // 32,768 rows: (4096 + 2 · 4096 + 14,336) · 4 of activations; 14,336 · 2 and 28,672 · 4 to the next power of two.
        let beside = 32_768 * 26_624 * 4 + (1 << 30) + (1 << 32) + 8 * 128_256 * 4 + (1 << 20) + (32 << 20);
        let cache = 32_768 * 131_072;
        let found = ledger.native_gpu_memory(shape, Dtype::Bf16, 64);
        assert_eq!(found, ledger.resident_weights() + Bytes(beside + cache));
        let activations = |all: Bytes| all.0 - ledger.resident_weights().0 - cache;
        let ratio = activations(found) as f64 / activations(ledger.memory(shape)) as f64;
        assert!((3.0..5.0).contains(&ratio), "{ratio}");
    }

    #[test]
    fn every_sequence_has_whole_blocks_and_blocks_come_in_whole_slabs() {
        let model = shapes::llama_3_1_8b();
        let ledger = Ledger::new(&model, &model.inventory(Dtype::Bf16), Dtype::Bf16);
        // 128 KiB a position: 32 blocks of 16 of them, and 8 of 64, are a slab of 64 MiB.
        let of = |block_size| ledger.native_gpu_memory(StepShape::decode(32, 16), Dtype::Bf16, block_size).0;
        assert_eq!(of(64) - of(16), (32 / 8 - 64 / 32) * (64 << 20));
    }

    #[test]
    fn a_decode_takes_little_beside_weights_and_cache() {
        let model = shapes::llama_3_1_8b();
        let ledger = Ledger::new(&model, &model.inventory(Dtype::Bf16), Dtype::Bf16);
        let shape = StepShape::decode(32, 4096);
        let ratio = ledger.native_gpu_memory(shape, Dtype::Bf16, 64).as_f64() / ledger.memory(shape).as_f64();
        assert!((1.0..1.01).contains(&ratio), "{ratio}");
    }
}
