//! The ledger against published models, with the arithmetic beside each number, and its properties.

use proptest::prelude::*;

use super::{Ledger, RaggedPart, StepShape};
use crate::ledger::{ExpertRouting, LayerRouting};
use crate::model::{Architecture, Dtype, Family, Quantization, test_shapes as shapes};
use crate::result::{Phase, StepBytes};
use crate::units::Bytes;

fn expected_distinct_experts(count: usize, per_token: usize, tokens: usize) -> f64 {
    LayerRouting::new(ExpertRouting::Uniform, count, per_token).distinct(tokens).mean
}

fn ledger(architecture: &Architecture, dtype: Dtype) -> Ledger {
    let kv = if dtype == Dtype::F32 { Dtype::F32 } else { Dtype::Bf16 };
    Ledger::new(architecture, &architecture.inventory(dtype), kv)
}

/// Weight bytes of a bf16 step at batch 1, and KV bytes per token.
#[test]
fn weights_and_kv_of_published_models() {
    let table = [
        // Tied: all 134,515,008 parameters · 2 B. KV 2·3·64·2 B · 30 layers.
        (shapes::smollm2_135m(), 269_030_016, 23_040),
        // Tied: 1,235,814,400 · 2 B = 2.47 GB. KV 2·8·64·2 B · 16.
        (shapes::llama_3_2_1b(), 2_471_628_800, 32_768),
        // (8,030,261,248 − 128,256·4096 of the embedding) · 2 B = 15.01 GB. KV 2·8·128·2 B · 32.
        (shapes::llama_3_1_8b(), 15_009_849_344, 131_072),
        // (6,738,415,616 − 32,000·4096) · 2 B. All 32 heads keep KV: 2·32·128·2 B · 32.
        (shapes::llama_2_7b(), 13_214_687_232, 524_288),
        // (70,553,706,496 − 128,256·8192) · 2 B = 139.0 GB. KV 2·8·128·2 B · 80.
        (shapes::llama_3_1_70b(), 139_006_066_688, 327_680),
        // (7,241,732,096 − 32,000·4096) · 2 B.
        (shapes::mistral_7b(), 14_221_320_192, 131_072),
        // (7,615,616,512 − 152,064·3584) · 2 B, q, k and v biases in. KV 2·4·128·2 B · 28.
        (shapes::qwen2_5_7b(), 14_141_238_272, 57_344),
        // Tied: 596,049,920 · 2 B. KV 2·8·128·2 B · 28.
        (shapes::qwen3_0_6b(), 1_192_099_840, 114_688),
        // (8,190,735,360 − 151,936·4096) · 2 B. KV 2·8·128·2 B · 36.
        (shapes::qwen3_8b(), 15_136_811_008, 147_456),
        // (32,762,123,264 − 151,936·5120) · 2 B. KV 2·8·128·2 B · 64.
        (shapes::qwen3_32b(), 63_968_421_888, 262_144),
        // Experts 48·128·3·2048·768 = 28,991,029,248, of which 8 in 128 are read; the rest, without the embedding's
        // 151,936·2048, is 1,229,928,448: (1,229,928,448 + 1,811,939,328) · 2 B. KV 2·4·128·2 B · 48.
        (shapes::qwen3_30b_a3b(), 6_083_735_552, 98_304),
        // Experts 32·8·3·4096·14,336 = 45,097,156,608, of which 2 in 8; the rest 1,474,564,096:
        // (1,474,564,096 + 11,274,289,152) · 2 B.
        (shapes::mixtral_8x7b(), 25_497_706_496, 131_072),
        // Experts 58·256·3·7168·2048 = 653,908,770,816, of which 8 in 256 are read (20,434,649,088); the rest without the
        // embedding's 129,280·7168 is 16,190,969,344, and 58·256 correction biases are f32, 2 B more each:
        // (16,190,969,344 + 20,434,649,088) · 2 B + 14,848 · 2 B. KV (512 + 64)·2 B · 61.
        (shapes::deepseek_v3(), 73_251_266_560, 70_272),
    ];
    for (architecture, weights, kv_per_token) in table {
        let ledger = ledger(&architecture, Dtype::Bf16);
        let at = |context| ledger.decode(1, context).bytes;
        assert_eq!(at(1).weights, Bytes(weights), "weights of {:?}", architecture.family);
        assert_eq!(ledger.kv_bytes_per_token(), Bytes(kv_per_token), "KV of {:?}", architecture.family);
        assert_eq!(at(1000).kv_read, Bytes(1000 * kv_per_token));
        assert_eq!(at(1000).kv_write, Bytes(kv_per_token));
    }
}

#[test]
fn a_tied_table_counts_once_and_an_untied_one_by_rows() {
    assert_eq!(ledger(&shapes::llama_3_2_1b(), Dtype::Bf16).decode(16, 100).bytes.other, Bytes(0));
    // 16 rows of 4096 · 2 B.
    assert_eq!(ledger(&shapes::llama_3_1_8b(), Dtype::Bf16).decode(16, 100).bytes.other, Bytes(131_072));
}

#[test]
fn a_cache_in_blocks_has_its_scales_too() {
    let shape = shapes::llama_3_1_8b();
    let per_token = |kv| Ledger::new(&shape, &shape.inventory(Dtype::Bf16), kv).kv_bytes_per_token().0;
    // 32 layers × 2 × 8 heads × 128 = 65,536 elements, in blocks of 32 with two bytes of scale.
    assert_eq!(per_token(Dtype::Q8_0), 65_536 / 32 * 34);
    assert_eq!(per_token(Dtype::Q4_0), 65_536 / 32 * 18);
    // A scale and a zero of two bytes for each of 32 · 2 · 8 vectors: 3.1 % of int8 at a head of 128, 6.3 % of int4.
    assert_eq!(per_token(Dtype::Int8), 65_536 + 512 * 4);
    assert_eq!(per_token(Dtype::Int4), 65_536 / 2 + 512 * 4);
    assert_eq!(per_token(Dtype::Fp8), 65_536);
    // A file's mixture is one of weights.
    assert_eq!(per_token(Dtype::Gguf), per_token(Dtype::F16));
    assert_eq!(per_token(Dtype::Q4K), per_token(Dtype::F16));
}

#[test]
fn a_context_of_nothing_reads_no_kv_and_writes_one_position() {
    let bytes = ledger(&shapes::llama_3_1_8b(), Dtype::Bf16).decode(4, 0).bytes;
    assert_eq!((bytes.kv_read, bytes.kv_write), (Bytes(0), Bytes(4 * 131_072)));
}

#[test]
fn quantised_weights_bring_their_scales() {
    // Linear 6,979,321,856; head 525,336,576 and norms 65·4096 at 2 B: 6,979,321,856 + 1,050,673,152 + 532,480 = 8,030,527,488.
    // fp8: + f32 per output: 32 layers · (4096 + 1024 + 1024 + 4096 + 2·14336 + 4096) · 4 B = 5,505,024.
    let fp8 = ledger(&shapes::llama_3_1_8b(), Dtype::Fp8).decode(1, 1).bytes.weights;
    assert_eq!(fp8, Bytes(8_036_032_512));
    // Where the checkpoint says so: + f32 per 128² block = linear/4096 B. All shapes divide by 128.
    let own =
        Quantization { method: "fp8".into(), bits: 8, group_size: Some(128), ..Quantization::default() };
    let blocks = Architecture { quantization: Some(own), ..shapes::llama_3_1_8b() };
    assert_eq!(ledger(&blocks, Dtype::Fp8).decode(1, 1).bytes.weights, Bytes(8_032_231_424));
    // int4, group 128: 4¼ bits per weight: 6,979,321,856 · 17/32 + 1,050,673,152 + 532,480.
    let int4 = ledger(&shapes::llama_3_1_8b(), Dtype::Int4).decode(1, 1).bytes.weights;
    assert_eq!(int4, Bytes(4_758_970_368));
}

#[test]
fn a_window_caps_the_kv_read_and_not_the_write() {
    let ledger = ledger(&shapes::mistral_7b(), Dtype::Bf16);
    assert_eq!(ledger.decode(1, 4000).bytes.kv_read, Bytes(4000 * 131_072));
    assert_eq!(ledger.decode(1, 9000).bytes.kv_read, Bytes(4096 * 131_072));
    assert_eq!(ledger.decode(1, 9000).bytes.kv_write, Bytes(131_072));
}

#[test]
fn decode_flops_are_two_per_active_weight_and_the_attention() {
    // Llama-3.1-8B at context 1023: linear 6,979,321,856 and head 525,336,576, two each; attention 4·32·128 per position
    // and layer over 1023 cached positions and the token itself.
    let flops = ledger(&shapes::llama_3_1_8b(), Dtype::Bf16).decode(3, 1023).flops.0;
    let expected = 3.0 * (2.0 * (6_979_321_856.0 + 525_336_576.0) + 32.0 * 16_384.0 * 1024.0);
    assert!((flops - expected).abs() < 1.0, "{flops} instead of {expected}");
}

#[test]
fn prefill_flops_follow_the_formula() {
    // T = 512: 2·6,979,321,856·512 + 32 · 4·32·128 · 512·513/2 + 2·525,336,576 for the last position.
    let cost = ledger(&shapes::llama_3_1_8b(), Dtype::Bf16).prefill(2, 512);
    let expected =
        2.0 * (2.0 * 6_979_321_856.0 * 512.0 + 32.0 * 16_384.0 * 512.0 * 513.0 / 2.0 + 2.0 * 525_336_576.0);
    assert!((cost.flops.0 / expected - 1.0).abs() < 1e-12);
    // K and V of 2 · 512 tokens, once written and once read.
    assert_eq!(cost.bytes.kv_write, Bytes(1024 * 131_072));
    assert_eq!(cost.bytes.kv_read, Bytes(1024 * 131_072));
    assert_eq!(cost.bytes.weights, Bytes(15_009_849_344));
    assert_eq!(cost.bytes.other, Bytes(1024 * 8192));
}

/// A verify step beside the decode step: the cache is read once for all of its tokens, and each has logits.
#[test]
fn a_verify_step_reads_the_cache_once_and_writes_every_token() {
    let ledger = ledger(&shapes::llama_3_1_8b(), Dtype::Bf16);
    let shape = |draft_tokens| StepShape { phase: Phase::Verify { draft_tokens }, batch: 4, context: 1000 };
    let (decode, verify) = (ledger.decode(4, 1000), ledger.step(shape(3)));
    assert_eq!(verify.bytes.weights, decode.bytes.weights);
    assert_eq!(verify.bytes.kv_read, decode.bytes.kv_read);
    assert_eq!(verify.bytes.kv_write.0, 4 * decode.bytes.kv_write.0);
    assert_eq!(verify.bytes.other.0, 4 * decode.bytes.other.0);
    // Of linear layers and head four times; of attention 1001 + 1002 + 1003 + 1004 positions where the decode has 1001.
    let attention = |positions: f64| 4.0 * 32.0 * 4.0 * 32.0 * 128.0 * positions;
    let rest = 4.0 * (decode.flops.0 - attention(1001.0));
    assert!((verify.flops.0 / (rest + attention(4010.0)) - 1.0).abs() < 1e-12);
    assert_eq!((shape(3).queries(), shape(3).positions_after(), shape(3).logits()), (4, 1004, 16));
    // No draft token at all is a decode step.
    assert_eq!(ledger.step(shape(0)), decode);
}

/// By bytes at batch 1, uniform routing. Three draft tokens of Qwen3-30B: 128 · (1 − (120/128)⁴) = 29.1 experts, 1.23 + 28.99 · 29.1/128 =
/// 7.82 B elements where a decode reads 1.23 + 1.81; at batch 64 nearly all experts are met either way.
#[test]
fn a_verify_step_of_a_mixture_meets_more_experts() {
    let ratio = |architecture: &Architecture, dtype, batch, draft_tokens| {
        let ledger = ledger(architecture, dtype);
        let verify = StepShape { phase: Phase::Verify { draft_tokens }, batch, context: 1 };
        ledger.step(verify).bytes.weights.as_f64() / ledger.decode(batch, 1).bytes.weights.as_f64()
    };
    let qwen = shapes::qwen3_30b_a3b();
    assert!((ratio(&qwen, Dtype::Bf16, 1, 3) - 2.57).abs() < 0.005);
    assert!((ratio(&qwen, Dtype::Bf16, 64, 3) - 1.015).abs() < 0.001);
    // 16.19 B elements for every token and 20.43 B of its experts; two tokens meet 1.969 times as many experts, four 3.816 times.
    let deepseek = shapes::deepseek_v3();
    assert!((ratio(&deepseek, Dtype::Bf16, 1, 1) - 1.540).abs() < 0.002);
    assert!((ratio(&deepseek, Dtype::Bf16, 1, 3) - 2.571).abs() < 0.002);
}

#[test]
fn a_window_makes_prefill_attention_linear_in_the_prompt() {
    let windowed = shapes::mistral_7b();
    let full = Architecture { windows: Vec::new(), ..windowed.clone() };
    let difference = ledger(&full, Dtype::Bf16).prefill(1, 8192).flops.0
        - ledger(&windowed, Dtype::Bf16).prefill(1, 8192).flops.0;
    // Pairs beyond the window, each 4·32·128 in 32 layers: all 8192·8193/2, less the triangle of the first 4096 queries
    // and 4096 for each of the rest.
    let pairs = 8192.0 * 8193.0 / 2.0 - (4096.0 * 4097.0 / 2.0 + 4096.0 * 4096.0);
    assert!((difference / (32.0 * 16_384.0 * pairs) - 1.0).abs() < 1e-9);
}

#[test]
fn the_batch_meets_more_experts_until_it_meets_all() {
    // Mixtral, k/E = 1/4: one token 2; two tokens 8·(1 − 0.75²) = 3.5.
    let ledger = ledger(&shapes::mixtral_8x7b(), Dtype::Bf16);
    assert_eq!(ledger.decode(1, 1).distinct_experts, Some(2.0));
    assert_eq!(ledger.decode(2, 1).distinct_experts, Some(3.5));
    // (1,474,564,096 + 45,097,156,608 · 3.5/8) · 2 B.
    assert_eq!(ledger.decode(2, 1).bytes.weights, Bytes(42_409_140_224));
    assert!((ledger.prefill(1, 512).distinct_experts.expect("experts") - 8.0).abs() < 1e-9);
    assert!((expected_distinct_experts(128, 8, 16) - 128.0 * (1.0 - 0.9375_f64.powi(16))).abs() < 1e-9);
}

#[test]
fn deepseek_v3_activates_37_billion_parameters() {
    // The published figure counts both tables: 36,625,618,432 + 926,679,040 of the embedding.
    let flops = ledger(&shapes::deepseek_v3(), Dtype::Bf16).decode(1, 0).flops.0 / 2.0;
    assert!((36.5e9..36.8e9).contains(&flops), "{flops}");
}

#[test]
fn latent_attention_keeps_a_fiftieth_of_the_kv_of_full_heads() {
    let latent = shapes::deepseek_v3();
    let full = Architecture { latent: None, ..latent.clone() };
    // 2·128·128 elements against 576.
    let ratio = ledger(&full, Dtype::Bf16).kv_bytes_per_token().as_f64()
        / ledger(&latent, Dtype::Bf16).kv_bytes_per_token().as_f64();
    assert!((ratio - 32_768.0 / 576.0).abs() < 1e-9);
}

#[test]
fn memory_is_weights_cache_and_the_widest_activation() {
    let ledger = ledger(&shapes::llama_3_1_8b(), Dtype::Bf16);
    // All 8,030,261,248 · 2 B, 8 · 1024 positions of KV, f32 logits 8 · 128,256 · 4 B (wider than 8 · 36,864 · 2 B).
    let memory = ledger.memory(StepShape::decode(8, 1023));
    assert_eq!(memory, Bytes(16_060_522_496 + 8 * 1024 * 131_072 + 8 * 128_256 * 4));
}

fn dense_shape() -> impl Strategy<Value = Architecture> {
    (1_usize..4, 1_usize..6, prop::sample::select(vec![1_usize, 2, 4, 8]), prop::bool::ANY).prop_map(
        |(width, layers, kv_heads, tied_head)| Architecture {
            tied_head,
            ..shapes::dense(Family::Llama, [width * 128, layers, 8, kv_heads, 64, width * 256, 1000])
        },
    )
}

fn dominates(larger: &StepBytes, smaller: &StepBytes) -> bool {
    larger.weights >= smaller.weights
        && larger.kv_read >= smaller.kv_read
        && larger.kv_write >= smaller.kv_write
        && larger.other >= smaller.other
}

proptest! {
    #[test]
    fn cost_grows_with_batch_and_context(
        architecture in dense_shape(), batch in 1_usize..64, context in 1_usize..4096, more in 1_usize..64,
    ) {
        let ledger = ledger(&architecture, Dtype::Bf16);
        let (at, wider, longer) = (
            ledger.decode(batch, context),
            ledger.decode(batch + more, context),
            ledger.decode(batch, context + more),
        );
        prop_assert!(dominates(&wider.bytes, &at.bytes) && wider.flops.0 > at.flops.0);
        prop_assert!(dominates(&longer.bytes, &at.bytes) && longer.flops.0 > at.flops.0);
        prop_assert!(longer.bytes.kv_read > at.bytes.kv_read);
        let (at, wider, longer) = (
            ledger.prefill(batch, context),
            ledger.prefill(batch + more, context),
            ledger.prefill(batch, context + more),
        );
        prop_assert!(dominates(&wider.bytes, &at.bytes) && wider.flops.0 > at.flops.0);
        prop_assert!(dominates(&longer.bytes, &at.bytes) && longer.flops.0 > at.flops.0);
    }

    #[test]
    fn fewer_kv_heads_move_less(batch in 1_usize..32, context in 1_usize..4096) {
        let kv = |kv_heads| {
            let architecture = shapes::dense(Family::Llama, [512, 4, 8, kv_heads, 64, 1024, 1000]);
            ledger(&architecture, Dtype::Bf16).decode(batch, context).bytes.kv_read
        };
        let (mqa, gqa, mha) = (kv(1), kv(2), kv(8));
        prop_assert!(mqa < gqa && gqa < mha);
        prop_assert_eq!(mqa.0 * 8, mha.0);
    }

    #[test]
    fn a_window_never_costs_more(window in 1_usize..4096, context in 0_usize..8192) {
        let full = shapes::dense(Family::Mistral, [512, 4, 8, 2, 64, 1024, 1000]);
        let windowed = Architecture { windows: vec![Some(window), None, Some(window), None], ..full.clone() };
        let (full, windowed) = (ledger(&full, Dtype::Bf16), ledger(&windowed, Dtype::Bf16));
        let (all, some) = (full.decode(2, context), windowed.decode(2, context));
        prop_assert!(dominates(&all.bytes, &some.bytes) && all.flops.0 >= some.flops.0);
        prop_assert!(full.prefill(1, context).flops.0 >= windowed.prefill(1, context).flops.0);
    }

    #[test]
    fn distinct_experts_stay_between_one_tokens_and_all(
        count in 1_usize..512, per_token in 1_usize..16, tokens in 1_usize..2048,
    ) {
        let distinct = expected_distinct_experts(count, per_token, tokens);
        let least = per_token.min(count) as f64;
        prop_assert!(distinct >= least - 1e-9 && distinct <= count as f64);
        prop_assert!(expected_distinct_experts(count, per_token, tokens + 1) >= distinct);
    }
}

#[test]
fn a_ragged_step_of_equal_parts_costs_what_the_uniform_step_does() {
    for architecture in [shapes::llama_3_1_8b(), shapes::mistral_7b(), shapes::qwen3_30b_a3b()] {
        let ledger = Ledger::new(&architecture, &architecture.inventory(Dtype::Bf16), Dtype::Bf16);
        let parts = |count, cached, tokens| std::iter::repeat_n(RaggedPart::new(cached, tokens), count);
        for (ragged, uniform) in [
            (ledger.ragged(parts(4, 6000, 1)), ledger.decode(4, 6000)),
            (ledger.ragged(parts(2, 0, 5000)), ledger.prefill(2, 5000)),
        ] {
            assert_eq!(ragged.bytes, uniform.bytes);
            assert!((ragged.flops.0 / uniform.flops.0 - 1.0).abs() < 1e-12);
        }
        // Two chunks do the arithmetic of one prefill, and one head more.
        let chunks = ledger.ragged(parts(1, 0, 2000)).flops.0 + ledger.ragged(parts(1, 2000, 3000)).flops.0;
        let head = 2.0 * (architecture.vocab_size * architecture.hidden_size) as f64;
        assert!(((chunks - head) / ledger.prefill(1, 5000).flops.0 - 1.0).abs() < 1e-9);
    }
}

#[test]
fn ranks_repeat_the_embedding_and_heads_that_are_fewer() {
    let llama = shapes::llama_3_1_8b();
    let ledger = Ledger::new(&llama, &llama.inventory(Dtype::Bf16), Dtype::Bf16);
    let step = StepShape::decode(2, 100);
    let table = 128_256 * 4096 * 2;
    assert_eq!(ledger.repeated_on_ranks(step, 1), Bytes(0));
    assert_eq!(ledger.repeated_on_ranks(step, 4), Bytes(3 * table));
    // Eight heads of K and V on 16 ranks: each twice, for 101 positions of two sequences in 32 layers.
    assert_eq!(ledger.repeated_on_ranks(step, 16), Bytes(15 * table + 32 * 2 * 101 * 2 * 8 * 128 * 2));
}

/// Gemma-3-27B has ten full layers and 52 that keep 1,024 positions, 8,192 B of each; Qwen3.5-27B 16 of 4,096 B beside 48 states.
#[test]
fn a_position_of_a_sequence_is_its_share_of_what_the_sequence_keeps() {
    let ledger = |name: &str| {
        let shape = crate::model::presets::find(name).expect("a shape").architecture;
        Ledger::new(&shape, &shape.inventory(Dtype::Bf16), Dtype::Bf16)
    };
    let gemma = ledger("Gemma-3-27B");
    let wanted = (10.0 * 32_768.0 + 52.0 * 1024.0) * 8192.0 / 32_768.0;
    assert!((gemma.kept_per_position(32_768) / wanted - 1.0).abs() < 1e-12);
    assert!((gemma.kept_per_position(1024) - gemma.kv_bytes_per_token().as_f64()).abs() < 1e-9);
    let qwen = ledger("Qwen3.5-27B");
    let wanted = qwen.kv_bytes_per_token().as_f64() + qwen.state_bytes().as_f64() / 256.0;
    assert!((qwen.kept_per_position(256) / wanted - 1.0).abs() < 1e-12);
}
