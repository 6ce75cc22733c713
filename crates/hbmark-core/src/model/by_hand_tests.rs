//! The benchmarked models counted by hand: what their own modelling code declares, in parameters, in bytes, and in the bytes that a decode
//! step of one sequence reads. Nothing here asks this crate's list of tensors, which is what it is compared with.
//!
//! *Source*: the classes of each family in huggingface/transformers 5.23 with the published configs. Built there without memory, each of these
//! models has the same number of parameters (with the correction biases and Gemma's layer scalars, which are buffers). Prediction layers and
//! vision are left out. What is stored how: see each model.

use std::ops::{Add, Mul};

use super::{Dtype, Quantization, Role, presets};
use crate::ledger::Ledger;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sum {
    parameters: u64,
    bytes: u64,
    read: u64,
}

impl Add for Sum {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self {
            parameters: self.parameters + other.parameters,
            bytes: self.bytes + other.bytes,
            read: self.read + other.read,
        }
    }
}

impl Mul<Sum> for u64 {
    type Output = Sum;
    fn mul(self, each: Sum) -> Sum {
        Sum { parameters: self * each.parameters, bytes: self * each.bytes, read: self * each.read }
    }
}

impl Sum {
    /// All `count` experts, of which a token reads `chosen`.
    fn experts(self, count: u64, chosen: u64) -> Self {
        Sum { read: chosen * self.read, ..count * self }
    }
}

fn stored(parameters: u64, bytes: u64) -> Sum {
    Sum { parameters, bytes, read: bytes }
}

fn bf16(elements: u64) -> Sum {
    stored(elements, 2 * elements)
}

fn f32(elements: u64) -> Sum {
    stored(elements, 4 * elements)
}

/// An f32 scale for each block of 128 × 128.
fn fp8(out: u64, input: u64) -> Sum {
    stored(out * input, out * input + 4 * out.div_ceil(128) * input.div_ceil(128))
}

/// A bf16 scale for each 32 inputs of an output.
fn int4(out: u64, input: u64) -> Sum {
    stored(out * input, out * input / 2 + 2 * out * input / 32)
}

/// Four bits and a byte for each 32 inputs.
fn mxfp4(out: u64, input: u64) -> Sum {
    stored(out * input, out * input * 17 / 32)
}

fn matrix(out: u64, input: u64) -> Sum {
    bf16(out * input)
}

/// The table of embeddings, of which a step reads no more than a row, and an untied head.
fn table_and_head(vocabulary: u64, hidden: u64) -> Sum {
    Sum { read: 0, ..matrix(vocabulary, hidden) } + matrix(vocabulary, hidden)
}

/// Two norms a layer and a last one.
fn norms(layers: u64, hidden: u64) -> Sum {
    bf16((2 * layers + 1) * hidden)
}

/// Gate, up and down.
fn gated(matrix: fn(u64, u64) -> Sum, hidden: u64, width: u64) -> Sum {
    2 * matrix(width, hidden) + matrix(hidden, width)
}

/// Query, key, value and output.
fn attention(matrix: fn(u64, u64) -> Sum, hidden: u64, heads: u64, kv_heads: u64, head_dim: u64) -> Sum {
    matrix(heads * head_dim, hidden)
        + 2 * matrix(kv_heads * head_dim, hidden)
        + matrix(hidden, heads * head_dim)
}

/// 16 key heads, all heads of 128. Qwen3.5 holds `A_log` and the norm at f32 (90 such tensors in the 45 layers of 397B), Qwen3-Next all in bf16.
fn delta_net(small: fn(u64) -> Sum, hidden: u64, value_heads: u64) -> Sum {
    let (keys, values) = (16 * 128, value_heads * 128);
    let (queries_keys_values, gate, decay_and_rate) = (2 * keys + values, values, 2 * value_heads);
    matrix(queries_keys_values + gate + decay_and_rate, hidden)
        + bf16(queries_keys_values * 4)
        + small(value_heads)
        + bf16(value_heads)
        + small(128)
        + matrix(hidden, values)
}

/// Heads of 256; the query comes with a gate of its width; norms of query and key.
fn gated_attention(hidden: u64, heads: u64, kv_heads: u64) -> Sum {
    attention(matrix, hidden, heads, kv_heads, 256) + matrix(heads * 256, hidden) + bf16(2 * 256)
}

/// Router, experts as wide as the shared one, and its gate.
fn qwen_experts(hidden: u64, count: u64, chosen: u64, width: u64) -> Sum {
    let one = gated(matrix, hidden, width);
    matrix(count, hidden) + one.experts(count, chosen) + one + bf16(hidden)
}

struct Latent {
    hidden: u64,
    heads: u64,
    query_rank: u64,
    unrotated: u64,
    value: u64,
}

impl Latent {
    /// 512 values and 64 turned ones of a token are kept; a norm on each low rank.
    fn sum(&self, matrix: fn(u64, u64) -> Sum) -> Sum {
        let Self { hidden, heads, query_rank, unrotated, value } = *self;
        matrix(query_rank, hidden)
            + bf16(query_rank)
            + matrix(heads * (unrotated + 64), query_rank)
            + matrix(512 + 64, hidden)
            + bf16(512)
            + matrix(heads * (unrotated + value), 512)
            + matrix(hidden, heads * value)
    }

    /// Heads of 128; a `LayerNorm` of the key has a weight and a bias; the weights of heads stay in bf16.
    fn indexer(&self, dense: fn(u64, u64) -> Sum, index_heads: u64) -> Sum {
        dense(index_heads * 128, self.query_rank)
            + dense(128, self.hidden)
            + bf16(2 * 128)
            + matrix(index_heads, self.hidden)
    }
}

/// A router with a correction at f32, experts, of which a token reads 8, and one shared.
fn corrected_experts(routed: Sum, shared: Sum, hidden: u64, count: u64) -> Sum {
    matrix(count, hidden) + f32(count) + routed.experts(count, 8) + shared
}

/// Input (gate, channels of the convolution, a rate per head), convolution with its bias, `A_log`, `D` and `dt_bias`, norm, output.
fn mamba(hidden: u64, heads: u64) -> Sum {
    let (inner, channels) = (heads * 64, heads * 64 + 2 * 8 * 128);
    matrix(inner + channels + heads, hidden)
        + bf16(channels * 4 + channels)
        + bf16(3 * heads)
        + bf16(inner)
        + matrix(hidden, inner)
}

#[expect(clippy::too_many_lines, reason = "a table: one entry a model")]
fn by_hand() -> Vec<(&'static str, Sum)> {
    let v3 = Latent { hidden: 7168, heads: 128, query_rank: 1536, unrotated: 128, value: 128 };
    let kimi = Latent { heads: 64, ..v3 };
    let glm = Latent { hidden: 6144, heads: 64, query_rank: 2048, unrotated: 192, value: 256 };
    let fp8_expert = gated(fp8, 7168, 2048);
    let deepseek = table_and_head(129_280, 7168)
        + norms(61, 7168)
        + 61 * v3.sum(fp8)
        + 3 * gated(fp8, 7168, 18_432)
        + 58 * corrected_experts(fp8_expert, fp8_expert, 7168, 256);
    // Queries projected directly; two shared experts as one of their width.
    let v2_lite = table_and_head(102_400, 2048)
        + norms(27, 2048)
        + 27 * (matrix(16 * 192, 2048)
            + matrix(576, 2048)
            + bf16(512)
            + matrix(16 * 256, 512)
            + matrix(2048, 16 * 128))
        + gated(matrix, 2048, 10_944)
        + 26 * (matrix(64, 2048) + gated(matrix, 2048, 1408).experts(64, 6) + gated(matrix, 2048, 2 * 1408));
    let nemotron_attention = attention(matrix, 2688, 32, 2, 128);
    let llama4 = |routed: u64, count: u64| {
        let expert = gated(matrix, 5120, 8192);
        table_and_head(202_048, 5120)
            + norms(48, 5120)
            + 48 * attention(matrix, 5120, 40, 8, 128)
            + routed * (matrix(count, 5120) + expert.experts(count, 1) + expert)
            + (48 - routed) * gated(matrix, 5120, 16_384)
    };
    // The four norms of a layer, a scalar, and the norms of query and key.
    let gemma4 = |hidden: u64, norms: u64, head_dim: u64| bf16(norms * hidden + 1 + 2 * head_dim);
    // The value of a full layer is its key.
    let key_is_value = |hidden: u64, heads: u64, kv_heads: u64| {
        matrix(heads * 512, hidden) + matrix(kv_heads * 512, hidden) + matrix(hidden, heads * 512)
    };
    // Query and key of 192, values of 128; the output projection is not fp8, and the router is f32.
    let mimo = |kv_heads: u64| {
        fp8(64 * 192, 4096) + fp8(kv_heads * 192, 4096) + fp8(kv_heads * 128, 4096) + matrix(4096, 64 * 128)
    };
    // Biases everywhere, sinks, and gate and up of an expert in one matrix.
    let gpt_oss = |layers: u64, count: u64| {
        let expert = mxfp4(5760, 2880) + bf16(5760) + mxfp4(2880, 2880) + bf16(2880);
        table_and_head(201_088, 2880)
            + norms(layers, 2880)
            + layers * (attention(matrix, 2880, 64, 8, 64) + bf16((64 + 2 * 8) * 64 + 2880) + bf16(64))
            + layers * (matrix(count, 2880) + bf16(count) + expert.experts(count, 4))
    };
    vec![
        ("gpt-oss-120b", gpt_oss(36, 128)),
        ("DeepSeek-V2-Lite", v2_lite),
        ("gpt-oss-20b", gpt_oss(24, 32)),
        (
            "Gemma-3-27B",
            matrix(262_208, 5376)
                + bf16(5376)
                + 62 * (attention(matrix, 5376, 32, 16, 128) + bf16(4 * 5376 + 2 * 128))
                + 62 * gated(matrix, 5376, 21_504),
        ),
        (
            "Qwen3.5-27B",
            table_and_head(248_320, 5120)
                + norms(64, 5120)
                + 48 * delta_net(f32, 5120, 48)
                + 16 * gated_attention(5120, 24, 4)
                + 64 * gated(matrix, 5120, 17_408),
        ),
        (
            "Qwen3.5-35B-A3B",
            table_and_head(248_320, 2048)
                + norms(40, 2048)
                + 30 * delta_net(f32, 2048, 32)
                + 10 * gated_attention(2048, 16, 2)
                + 40 * qwen_experts(2048, 256, 8, 512),
        ),
        (
            // 792,692,717,952 B are the language model's part of the published folder.
            "Qwen3.5-397B-A17B",
            table_and_head(248_320, 4096)
                + norms(60, 4096)
                + 45 * delta_net(f32, 4096, 64)
                + 15 * gated_attention(4096, 32, 2)
                + 60 * qwen_experts(4096, 512, 10, 1024),
        ),
        (
            "Qwen3-Next-80B-A3B",
            table_and_head(151_936, 2048)
                + norms(48, 2048)
                + 36 * delta_net(bf16, 2048, 32)
                + 12 * gated_attention(2048, 16, 2)
                + 48 * qwen_experts(2048, 512, 10, 512),
        ),
        (
            "Qwen3-235B-A22B",
            table_and_head(151_936, 4096)
                + norms(94, 4096)
                + 94 * (attention(matrix, 4096, 64, 4, 128) + bf16(2 * 128))
                + 94 * (matrix(128, 4096) + gated(matrix, 4096, 1536).experts(128, 8)),
        ),
        (
            "Llama-3.1-405B",
            table_and_head(128_256, 16_384)
                + norms(126, 16_384)
                + 126 * (attention(matrix, 16_384, 128, 8, 128) + gated(matrix, 16_384, 53_248)),
        ),
        (
            // Biases of query, key and value, and norms of query and key.
            "GLM-4.7",
            table_and_head(151_552, 5120)
                + norms(92, 5120)
                + 92 * (attention(matrix, 5120, 96, 8, 128) + bf16((96 + 2 * 8) * 128) + bf16(2 * 128))
                + 3 * gated(matrix, 5120, 12_288)
                + 89 * corrected_experts(gated(matrix, 5120, 1536), gated(matrix, 5120, 1536), 5120, 160),
        ),
        (
            "GLM-5",
            table_and_head(154_880, 6144)
                + norms(78, 6144)
                + 78 * (glm.sum(matrix) + glm.indexer(matrix, 32))
                + 3 * gated(matrix, 6144, 12_288)
                + 75 * corrected_experts(gated(matrix, 6144, 2048), gated(matrix, 6144, 2048), 6144, 256),
        ),
        ("DeepSeek-V3", deepseek),
        ("DeepSeek-V3.2", deepseek + 61 * v3.indexer(fp8, 64)),
        (
            // The same language model as Kimi-K2-Thinking, whose folder has 594,205,920,512 B: these, and 568,576 of shapes and rotations.
            "Kimi-K2.5",
            table_and_head(163_840, 7168)
                + norms(61, 7168)
                + 61 * kimi.sum(matrix)
                + gated(matrix, 7168, 18_432)
                + 60 * corrected_experts(gated(int4, 7168, 2048), gated(matrix, 7168, 2048), 7168, 384),
        ),
        (
            // The tied table is read as the head.
            "Gemma-4-31B",
            matrix(262_144, 5376)
                + bf16(5376)
                + 50 * (attention(matrix, 5376, 32, 16, 256) + gemma4(5376, 4, 256))
                + 10 * (key_is_value(5376, 32, 4) + gemma4(5376, 4, 512))
                + 60 * gated(matrix, 5376, 21_504),
        ),
        (
            // Three more norms around the experts; the router has a scale per input and one per expert.
            "Gemma-4-26B-A4B",
            matrix(262_144, 2816)
                + bf16(2816)
                + 25 * (attention(matrix, 2816, 16, 8, 256) + gemma4(2816, 7, 256))
                + 5 * (key_is_value(2816, 16, 2) + gemma4(2816, 7, 512))
                + 30 * gated(matrix, 2816, 2112)
                + 30 * (matrix(128, 2816) + bf16(2816 + 128) + gated(matrix, 2816, 704).experts(128, 8)),
        ),
        (
            // Norms of the full width of query and key; the router is f32. With its 13,880,064 scales the hub counts 228,703,644,928.
            "MiniMax-M2.5",
            table_and_head(200_064, 3072)
                + norms(62, 3072)
                + 62 * (attention(fp8, 3072, 48, 8, 128) + bf16((48 + 8) * 128))
                + 62 * (f32(256 * 3072) + f32(256) + gated(fp8, 3072, 1536).experts(256, 8)),
        ),
        (
            // A layer is one of three things and has one norm; experts have no gate: 23 M, 6 *, 23 E.
            "Nemotron-3-Nano-30B-A3B",
            table_and_head(131_072, 2688)
                + bf16((52 + 1) * 2688)
                + 23 * mamba(2688, 64)
                + 6 * nemotron_attention
                + 23 * (matrix(128, 2688) + f32(128))
                + 23 * ((2 * matrix(1856, 2688)).experts(128, 6) + 2 * matrix(3712, 2688)),
        ),
        (
            // 40 M, 8 *, 40 E; routed experts work in a width of 1024, between two projections.
            "Nemotron-3-Super-120B-A12B",
            table_and_head(131_072, 4096)
                + bf16((88 + 1) * 4096)
                + 40 * mamba(4096, 128)
                + 8 * attention(matrix, 4096, 32, 2, 128)
                + 40 * (matrix(512, 4096) + f32(512) + 2 * matrix(1024, 4096))
                + 40 * ((2 * matrix(2688, 1024)).experts(512, 22) + 2 * matrix(5376, 4096)),
        ),
        ("Llama-4-Scout-17B-16E", llama4(48, 16)),
        ("Llama-4-Maverick-17B-128E", llama4(24, 128)),
        (
            "Phi-4",
            table_and_head(100_352, 5120)
                + norms(40, 5120)
                + 40 * (attention(matrix, 5120, 40, 10, 128) + gated(matrix, 5120, 17_920)),
        ),
        (
            // A sink for each head of a window.
            "MiMo-V2-Flash",
            table_and_head(152_576, 4096)
                + norms(48, 4096)
                + 9 * mimo(4)
                + 39 * (mimo(8) + bf16(64))
                + gated(fp8, 4096, 16_384)
                + 47 * (f32(256 * 4096) + f32(256) + gated(fp8, 4096, 2048).experts(256, 8)),
        ),
    ]
}

#[test]
fn parameters_and_bytes_are_those_of_a_count_by_hand() {
    for (name, expected) in by_hand() {
        let architecture = presets::find(name).unwrap().architecture;
        let dtype = architecture.quantization.as_ref().and_then(Quantization::dtype).unwrap_or(Dtype::Bf16);
        let inventory = architecture.inventory(dtype);
        let ledger = Ledger::new(&architecture, &inventory, Dtype::Bf16);
        let found = Sum {
            parameters: inventory.parameters(),
            // Without what no step reads: the shapes of packed tensors.
            bytes: inventory.total_bytes().0 - inventory.bytes_of(Role::Unused).0,
            read: ledger.decode(1, 0).bytes.weights.0,
        };
        assert_eq!(found, expected, "{name}");
    }
}

/// Counts that others publish: totals of safetensors headers and indices, llama.cpp's `n_params`, and a provider's `paramCount` (GLM).
#[test]
fn counts_by_hand_are_the_published_ones() {
    let hand = by_hand();
    let of = |name: &str| hand.iter().find(|(found, _)| *found == name).unwrap().1;
    for (name, published) in [
        ("gpt-oss-120b", 116_829_156_672),
        ("DeepSeek-V2-Lite", 15_706_484_224),
        ("gpt-oss-20b", 20_914_757_184),
        ("Qwen3.5-27B", 26_895_998_464),
        ("Qwen3.5-397B-A17B", 396_346_350_336),
        ("Qwen3-Next-80B-A3B", 79_674_391_296),
        ("Qwen3-235B-A22B", 235_093_634_560),
        ("Llama-3.1-405B", 405_853_388_800),
        ("GLM-4.7", 352_797_829_024),
        ("GLM-5", 743_911_218_432),
        ("Kimi-K2.5", 1_026_408_232_448),
        ("MiniMax-M2.5", 228_703_644_928 - 13_880_064),
        ("Nemotron-3-Nano-30B-A3B", 31_577_940_288),
        ("Nemotron-3-Super-120B-A12B", 120_668_707_840),
        // Vision and its projector are 871,932,416.
        ("Llama-4-Scout-17B-16E", 108_641_793_536 - 871_932_416),
        ("Llama-4-Maverick-17B-128E", 400_711_848_960),
        ("Phi-4", 14_659_507_200),
    ] {
        assert_eq!(of(name).parameters, published, "{name}");
    }
    assert_eq!(of("Qwen3.5-397B-A17B").bytes, 792_692_717_952);
    // The hub counts a prediction layer with it: a layer as the last ones, a projection of two states, three norms, and both tables again.
    let v3 = Latent { hidden: 7168, heads: 128, query_rank: 1536, unrotated: 128, value: 128 };
    let expert = gated(fp8, 7168, 2048);
    let prediction = v3.sum(fp8)
        + v3.indexer(fp8, 64)
        + corrected_experts(expert, expert, 7168, 256)
        + bf16((2 + 3) * 7168)
        + matrix(7168, 2 * 7168)
        + table_and_head(129_280, 7168);
    assert_eq!(of("DeepSeek-V3.2").parameters + prediction.parameters, 685_355_329_792);
    assert_eq!(of("Kimi-K2.5").bytes, 594_205_920_512 - 568_576);
}
