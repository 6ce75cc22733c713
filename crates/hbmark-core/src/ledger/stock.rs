//! The traffic and memory of candle's own forward, beyond the minimum.
//!
//! Enters: a [`Ledger`] and a step. Leaves: the *as implemented* bytes and the peak memory of candle-transformers 0.11.1.
//! It separates the cost of the code from that of the hardware. Counted are the operations whose size grows with the
//! context, read line by line from `models/{llama,mistral,qwen2,qwen3}.rs`; the activations of the one new token are not.
//!
//! Notation, per cached position, layer and sequence: `s` bytes per element, `e = kv_heads · head_dim` elements of K (and as
//! many of V), `n = heads / kv_heads`. No family looks at the attention window in a decode step: all positions are moved.
//!
//! | operation | llama | mistral | qwen2 | qwen3, CUDA | qwen3, CPU |
//! |---|---|---|---|---|---|
//! | `cat` of cache and new token, K and V, read + write | 4es | 4es | 4es | 4es | 4es |
//! | copy of V because the cache is strided ¹ | | | 2nes (2es if n = 1) | | |
//! | `repeat_kv` by `cat`, if n > 1, read + write | 4nes | 4nes | 4nes | 4nes | |
//! | transpose to (batch, position, head) and `contiguous` ¹ | | | | | 4es |
//! | `to_dtype(F32)` of K and V, unless s = 4 | 2n(es + 4e) | | | | 2(es + 4e) |
//! | the two products read K and V | 8ne | 2nes | 2nes | 2nes | 8ne ² |
//! | scores: product writes, scale r + w, softmax r + w, product reads | 24·heads | 6s·heads | 6s·heads | 6s·heads | |
//!
//! ¹ Only if `kv_heads` > 1. Prefill leaves V as a transposed view of `(batch, position, head, dim)` in the caches of llama
//!   and qwen2. llama's first decode step copies it to contiguous after the `cat`, and the steps after it, which are the ones
//!   timed, do not; qwen2 keeps it strided for good, so that the `reshape` in `repeat_kv` (or the `contiguous` after it) copies.
//! ² candle-nn's CPU flash kernel walks all positions once per query head, in f32.
//!
//! llama also converts its logits to f32. For Llama-3.1-8B in bf16 (es = 2048 B, n = 4) the table gives 8 + 32 + 48 + 32 KiB
//! and 0.75 KiB of scores: 120.75 KiB for a position whose K and V are 4 KiB.

use super::step::{Ledger, StepShape};
use crate::model::{Architecture, Family};
use crate::result::Phase;
use crate::units::Bytes;

/// Where candle runs: some families take another path on the CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StockBackend {
    Cpu,
    Cuda,
}

/// Sizes of one position of one layer of one sequence, in the notation of the module.
#[derive(Debug, Clone, Copy)]
struct Position {
    family: Family,
    backend: StockBackend,
    /// `es`
    one: u64,
    /// `4e`
    one_f32: u64,
    /// `n`
    repeats: u64,
    heads: u64,
    /// `s`
    size: u64,
    strided: bool,
}

impl Position {
    fn new(architecture: &Architecture, size: u64, backend: StockBackend) -> Option<Self> {
        let supported =
            matches!(architecture.family, Family::Llama | Family::Mistral | Family::Qwen2 | Family::Qwen3);
        if !supported || architecture.latent.is_some() || architecture.kv_heads == 0 {
            return None;
        }
        let elements = (architecture.kv_heads * architecture.head_dim) as u64;
        Some(Self {
            family: architecture.family,
            backend,
            one: elements * size,
            one_f32: elements * 4,
            repeats: (architecture.heads / architecture.kv_heads) as u64,
            heads: architecture.heads as u64,
            size,
            strided: architecture.kv_heads > 1,
        })
    }

    fn flash_on_cpu(&self) -> bool {
        self.family == Family::Qwen3 && self.backend == StockBackend::Cpu
    }

    /// Bytes of one score as it is stored.
    fn score_bytes(&self) -> u64 {
        if self.family == Family::Llama { 4 } else { self.size }
    }

    /// Bytes that a decode step moves for this position: the table of the module, top to bottom.
    fn decode_traffic(&self) -> u64 {
        let n = self.repeats;
        let concatenate = 4 * self.one;
        if self.flash_on_cpu() {
            let transpose = if self.strided { 4 * self.one } else { 0 };
            let cast = if self.size == 4 { 0 } else { 2 * (self.one + self.one_f32) };
            return concatenate + transpose + cast + 2 * n * self.one_f32;
        }
        let strided_copy = match self.family {
            Family::Qwen2 if self.strided => 2 * n * self.one,
            _ => 0,
        };
        let repeat = if n > 1 { 4 * n * self.one } else { 0 };
        let (cast, products) = if self.family == Family::Llama {
            let cast = if self.size == 4 { 0 } else { 2 * n * (self.one + self.one_f32) };
            (cast, 2 * n * self.one_f32)
        } else {
            (0, 2 * n * self.one)
        };
        let scores = 6 * self.heads * self.score_bytes();
        concatenate + strided_copy + repeat + cast + products + scores
    }

    /// Bytes held for this position beside the cache while its layer runs: the repeated K and V and their f32 copies, which
    /// all live to the end of the attention because shadowing a tensor does not free it.
    fn transient(&self) -> u64 {
        let n = self.repeats;
        if self.flash_on_cpu() {
            let cast = if self.size == 4 { 0 } else { 2 * self.one_f32 };
            return 2 * self.one + cast;
        }
        let repeated = if n > 1 || self.family == Family::Qwen2 { 2 * n * self.one } else { 0 };
        let cast = if self.family == Family::Llama && self.size != 4 { 2 * n * self.one_f32 } else { 0 };
        repeated + cast
    }
}

/// The largest tensor that candle's forward makes in a step of so many tokens of each sequence, which has so many positions behind it: what it
/// holds, and how many of them.
///
/// *Source*: `models/{llama,mistral,qwen2,qwen3,phi3,quantized_llama,quantized_qwen3}.rs`. Phi-3 multiplies Q, K and V by one matrix, gate and up by
/// another. Caches are no larger than repeated, and logits are those of last tokens.
pub fn largest_stock_tensor(
    architecture: &Architecture,
    batch: usize,
    queries: usize,
    positions: usize,
) -> (&'static str, u64) {
    let a = architecture;
    let (heads, query) = (a.heads, a.heads * a.head_dim);
    let (qkv, gate_up) = match a.family {
        Family::Phi3 => (query + 2 * a.kv_heads * a.head_dim, 2 * a.ffn_size),
        _ => (query, a.ffn_size),
    };
    let tensors = [
        ("attention scores", [batch, heads, queries, positions]),
        ("elements of keys, repeated for each head", [batch, heads, positions, a.head_dim]),
        ("queries", [batch, queries, qkv, 1]),
        ("elements of a feed-forward layer", [batch, queries, gate_up, 1]),
        ("hidden states", [batch, queries, a.hidden_size, 1]),
        ("logits", [batch, a.vocab_size, 1, 1]),
    ];
    let sized = tensors.map(|(what, dims)| {
        (what, dims.into_iter().fold(1_u64, |elements, dim| elements.saturating_mul(dim as u64)))
    });
    sized.into_iter().max_by_key(|(_, elements)| *elements).unwrap_or_default()
}

impl Ledger {
    /// Bytes that candle's own forward moves in a step, or `None` where that is not modelled: prefill (its traffic is
    /// activations, which depend on the GEMM's tiling), verify steps, which it has none of, and families without a stock path.
    pub fn stock_bytes(&self, shape: StepShape, backend: StockBackend) -> Option<Bytes> {
        if shape.phase != Phase::Decode {
            return None;
        }
        let architecture = self.architecture();
        let size = self.activation_bytes();
        let position = Position::new(architecture, size, backend)?;
        let ideal = self.decode(shape.batch, shape.context).bytes;
        let each = (shape.positions_after() * architecture.layers) as u64;
        let positions = (shape.batch as u64).saturating_mul(each);
        let logits = if architecture.family == Family::Llama && size != 4 {
            (shape.batch as u64).saturating_mul(architecture.vocab_size as u64 * (size + 4))
        } else {
            0
        };
        let traffic = positions.saturating_mul(position.decode_traffic());
        Some(ideal.weights + ideal.other + Bytes(traffic) + Bytes(logits))
    }

    /// Peak memory of candle's own forward in a step, or `None` for families without a stock path.
    ///
    /// All weights; the KV cache, twice in decode (a pinned step concatenates into a new cache while the one it started from
    /// is kept); and the largest of: one layer's copies of K and V with its scores (three tensors of them in prefill:
    /// scaled, masked, softmax), the feed-forward's four intermediates, the logits.
    pub fn stock_memory(&self, shape: StepShape, backend: StockBackend) -> Option<Bytes> {
        let architecture = self.architecture();
        let size = self.activation_bytes();
        let position = Position::new(architecture, size, backend)?;
        let (batch, queries) = (shape.batch as u64, shape.queries() as u64);
        let positions = batch * shape.positions_after() as u64;
        let cache = positions.saturating_mul(architecture.layers as u64 * 2 * position.one);
        let (caches, score_tensors) = match shape.phase {
            Phase::Prefill => (1, 3),
            Phase::Decode | Phase::Verify { .. } => (2, 2),
        };
        let scores = if position.flash_on_cpu() {
            0
        } else {
            (score_tensors * position.heads * position.score_bytes())
                .saturating_mul(positions)
                .saturating_mul(queries)
        };
        let attention = positions.saturating_mul(position.transient()).saturating_add(scores);
        let hidden = architecture.hidden_size as u64;
        let tokens = batch * queries;
        let feed_forward = tokens.saturating_mul((4 * architecture.ffn_size as u64 + hidden) * size);
        let logits = batch.saturating_mul(architecture.vocab_size as u64 * (size + 4));
        let residual = tokens.saturating_mul(2 * hidden * size);
        let widest = attention.max(feed_forward).max(logits);
        Some(self.resident_weights() + Bytes(cache.saturating_mul(caches)) + Bytes(residual) + Bytes(widest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Dtype;
    use crate::model::test_shapes as shapes;

    fn per_position(architecture: &Architecture, dtype: Dtype, backend: StockBackend) -> u64 {
        let ledger = Ledger::new(architecture, &architecture.inventory(dtype), dtype);
        let at =
            |context| ledger.stock_bytes(StepShape::decode(1, context), backend).expect("a stock family").0;
        (at(1001) - at(1000)) / architecture.layers as u64
    }

    #[test]
    fn llama_8b_moves_120_kb_per_position_and_layer_instead_of_4() {
        // es = 8·128·2 = 2048, n = 4: 8192 + 32,768 + 49,152 + 32,768 + 24·32.
        assert_eq!(per_position(&shapes::llama_3_1_8b(), Dtype::Bf16, StockBackend::Cuda), 123_648);
        // In f32 nothing is cast: es = 4096; 16,384 + 65,536 + 32,768 + 768.
        assert_eq!(per_position(&shapes::llama_3_1_8b(), Dtype::F32, StockBackend::Cpu), 115_456);
    }

    #[test]
    fn without_grouping_nothing_is_repeated() {
        // Llama-2-7B f32: es = 16,384, n = 1: 4es + 8ne + 24·32 = 65,536 + 32,768 + 768.
        assert_eq!(per_position(&shapes::llama_2_7b(), Dtype::F32, StockBackend::Cpu), 99_072);
    }

    #[test]
    fn each_family_has_its_own_copies() {
        // Mistral-7B bf16: 8192 + 32,768 + 16,384 + 12·32; the window does not help.
        assert_eq!(per_position(&shapes::mistral_7b(), Dtype::Bf16, StockBackend::Cuda), 57_728);
        // Qwen2.5-7B bf16: es = 1024, n = 7: 4096 + 14,336 + 28,672 + 14,336 + 12·28.
        assert_eq!(per_position(&shapes::qwen2_5_7b(), Dtype::Bf16, StockBackend::Cuda), 61_776);
        // Qwen3-0.6B: es = 2048 (bf16), n = 2: 8192 + 16,384 + 8192 + 12·16.
        assert_eq!(per_position(&shapes::qwen3_0_6b(), Dtype::Bf16, StockBackend::Cuda), 32_960);
        // The same on the CPU in f32: es = 4096: 16,384 + 16,384 + 0 + 2·2·4096.
        assert_eq!(per_position(&shapes::qwen3_0_6b(), Dtype::F32, StockBackend::Cpu), 49_152);
    }

    #[test]
    fn families_without_a_stock_path_have_no_stock_column() {
        let architecture = shapes::mixtral_8x7b();
        let ledger = Ledger::new(&architecture, &architecture.inventory(Dtype::Bf16), Dtype::Bf16);
        assert_eq!(ledger.stock_bytes(StepShape::decode(1, 128), StockBackend::Cuda), None);
        assert_eq!(ledger.stock_memory(StepShape::decode(1, 128), StockBackend::Cuda), None);
    }

    #[test]
    fn scores_are_the_largest_tensor_of_a_prompt_and_keys_of_a_decode_step() {
        let model = shapes::smollm2_135m();
        // 9 heads of 64.
        let scores = 32 * 9 * 4096 * 4096;
        assert_eq!(largest_stock_tensor(&model, 32, 4096, 4096), ("attention scores", scores));
        let (what, elements) = largest_stock_tensor(&model, 32, 1, 4097);
        assert_eq!(elements, 32 * 9 * 4097 * 64);
        assert!(what.contains("keys"), "{what}");
        // Each of many short prompts.
        let (what, elements) = largest_stock_tensor(&model, 4096, 16, 16);
        assert_eq!((what, elements), ("logits", 4096 * 49_152));
        let phi = crate::model::Architecture { family: Family::Phi3, ..shapes::llama_3_1_8b() };
        let (what, elements) = largest_stock_tensor(&phi, 64, 512, 512);
        assert_eq!((what, elements), ("elements of a feed-forward layer", 64 * 512 * 2 * 14_336));
    }

    #[test]
    fn stock_memory_holds_the_cache_twice_and_three_score_tensors() {
        let architecture = shapes::llama_2_7b();
        let ledger = Ledger::new(&architecture, &architecture.inventory(Dtype::F32), Dtype::F32);
        let weights = ledger.resident_weights().0;
        let cache = 2048 * 32 * 2 * 16_384_u64;
        // Prefill of 2048: scores 3 · 32 · 2048² · 4 B, residual 2 · 2048 · 4096 · 4 B.
        let prefill = ledger.stock_memory(StepShape::prefill(1, 2048), StockBackend::Cpu).expect("llama");
        assert_eq!(prefill.0, weights + cache + 3 * 32 * 2048 * 2048 * 4 + 2 * 2048 * 4096 * 4);
        // Decode at 2047 ends at 2048 positions: two caches, scores 2 · 32 · 2048 · 4 B, residual 2 · 4096 · 4 B.
        let decode = ledger.stock_memory(StepShape::decode(1, 2047), StockBackend::Cpu).expect("llama");
        assert_eq!(decode.0, weights + 2 * cache + 2 * 32 * 2048 * 4 + 2 * 4096 * 4);
    }
}
