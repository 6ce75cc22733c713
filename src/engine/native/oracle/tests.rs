//! The oracle against values computed by hand, and its whole forward against that of transformers.

use std::path::{Path, PathBuf};

use super::*;
use crate::engine::native::NativeSession;
use crate::engine::native::operations::{ExpertMlp, ExpertOperations, ExpertWeights};
use crate::engine::native::shapes::{CLAMPED_SWIGLU_SLOPE, ExpertGroups, ExpertScores, ExpertShape};
use crate::engine::relative_error;
use crate::engine::{SequenceId, Session, StepBatch};
use crate::weights::stored_matrix::SuperBlock;
use crate::weights::{OpenModel, Packing};
use hbmark_core::model::{Dtype, Rope, RopeScaling, test_shapes};

fn part(rows: usize, columns: usize, values: &[f32], packing: Packing) -> LinearPart {
    LinearPart { matrix: StoredMatrix::from_f32_rows(rows, columns, values, packing), bias: None }
}

fn buffer(rows: &[&[f32]]) -> PlainBuffer {
    PlainBuffer { width: rows[0].len(), values: rows.concat() }
}

/// One sequence of so many new tokens in a cache of blocks in order.
fn rows(start: usize, tokens: usize, table: &[u32]) -> Rows {
    let mut rows = Rows::new(16);
    rows.push(&vec![0; tokens], start, table);
    rows
}

fn assert_close(found: &[f32], wanted: &[f64]) {
    assert_eq!(found.len(), wanted.len());
    for (found, wanted) in found.iter().zip(wanted) {
        assert!((f64::from(*found) - wanted).abs() < 1e-6, "{found} is not {wanted}");
    }
}

#[test]
fn a_linear_layer_multiplies_adds_its_bias_and_adds_to_what_is_there() {
    let mut oracle = Oracle::new();
    let mut layer = part(2, 2, &[1.0, 2.0, 3.0, 4.0], Packing::F32);
    layer.bias = Some(vec![0.5, -0.5]);
    let mut hidden = buffer(&[&[10.0, 20.0], &[0.0, 0.0]]);
    let input = buffer(&[&[1.0, -1.0], &[2.0, 0.25]]);
    oracle.project_add(&rows(0, 2, &[0]), &vec![layer], None, &input, &mut hidden).unwrap();
    assert_eq!(hidden.values, [10.0 - 1.0 + 0.5, 20.0 - 1.0 - 0.5, 2.5 + 0.5, 7.0 - 0.5]);
    assert_eq!(oracle.take_bytes_moved(), Bytes(4 * 4 + 2 * 4));
    assert_eq!(oracle.take_bytes_moved(), Bytes(0));
}

#[test]
fn inputs_are_rounded_to_what_the_weights_are_multiplied_in() {
    // Between 1 and 1 + 1/128, nearer to 1; a tie goes to the even neighbour.
    let input = [1.0 + 1.0 / 512.0, 1.0 + 3.0 / 256.0];
    let seen = |packing| as_multiplied(&input, &part(1, 2, &[1.0, 1.0], packing).matrix);
    assert_eq!(seen(Packing::F32), [1.0 + 1.0 / 512.0, 1.0 + 3.0 / 256.0]);
    assert_eq!(seen(Packing::F16), seen(Packing::F32));
    assert_eq!(seen(Packing::Bf16), [1.0, 1.0 + 1.0 / 64.0]);
    assert_eq!(seen(Packing::Mxfp8), seen(Packing::Bf16));

    // The scale of the first group is 2, that of the second 1/127 · 1: 5 / 2 is a tie and goes to 2, so 4.
    let mut wide = [0.0; 33];
    (wide[0], wide[1], wide[2], wide[32]) = (-254.0, 5.0, 7.0, 1.0);
    let four_bits = [Packing::Q4_0, Packing::Mxfp4, Packing::Nvfp4, Packing::Int4 { group: 32 }];
    for packing in
        [Packing::Int8, Packing::Q8_0].into_iter().chain(four_bits).chain(SuperBlock::ALL.map(Packing::Super))
    {
        let seen = as_multiplied(&wide, &part(1, 33, &wide, packing).matrix);
        assert_eq!(seen[..4], [-254.0, 4.0, 8.0, 0.0]);
        assert!((seen[32] - 1.0).abs() < 1e-7);
    }
}

#[test]
fn a_norm_divides_by_the_root_of_the_mean_square() {
    // (3² + 4²) / 2 = 12.5, and 12.5 + 3.5 = 4².
    assert_eq!(normed(&[3.0, 4.0], &[1.0, 2.0], 3.5), [0.75, 2.0]);
}

#[test]
fn gate_and_up_meet_in_silu_or_gelu_or_clamped() {
    let mut oracle = Oracle::new();
    // The norm of [1, 1] is [1, 1]: gate is 2 and 0, up is 3 and 5.
    let gate = part(2, 2, &[1.0, 1.0, 1.0, -1.0], Packing::F32);
    let up = part(2, 2, &[1.0, 2.0, 2.0, 3.0], Packing::F32);
    let mut out = buffer(&[&[0.0, 0.0]]);
    let hidden = buffer(&[&[1.0, 1.0]]);
    let (rows, norm, weights) = (rows(0, 1, &[0]), vec![1.0, 1.0], vec![gate, up]);
    let mut run = |norm, gate| {
        oracle.norm_gate_up(&rows, norm, gate, &weights, &hidden, &mut out).unwrap();
        (out.values.clone(), oracle.take_bytes_moved())
    };
    // silu(2) = 2 / (1 + e⁻²) = 1.7615942; gelu(2) = 1 + tanh(√(2/π) · 2.35772).
    let (silu, moved) = run(Some((&norm, 0.0)), Gate::Silu);
    assert_close(&silu, &[1.761_594_155_955_765 * 3.0, 0.0]);
    assert_close(&run(Some((&norm, 0.0)), Gate::GeluTanh).0, &[1.954_597_694_087_775 * 3.0, 0.0]);
    // Gate and up of 2 and 3, and of 0 and 5, as 1.5 and 1.5, and 0: 2.5 · 1.5 / (1 + e^(−1.702 · 1.5)).
    let clamped = run(Some((&norm, 0.0)), Gate::ClampedSwiglu { limit: 1.5 }).0;
    let slope = f64::from(CLAMPED_SWIGLU_SLOPE);
    assert_close(&clamped, &[2.5 * 1.5 / (1.0 + (-1.5 * slope).exp()), 0.0]);
    // [1, 1] is its own norm; without one its weights are not read.
    assert_eq!(run(None, Gate::Silu), (silu, Bytes(moved.0 - 8)));
}

#[test]
fn what_a_projection_adds_is_normed_where_there_is_a_norm() {
    let mut oracle = Oracle::new();
    let layer = vec![part(2, 2, &[1.0, 0.0, 0.0, 1.0], Packing::F32)];
    let mut hidden = buffer(&[&[10.0, 20.0]]);
    let norm = vec![1.0, 2.0];
    oracle
        .project_add(&rows(0, 1, &[0]), &layer, Some((&norm, 3.5)), &buffer(&[&[3.0, 4.0]]), &mut hidden)
        .unwrap();
    // (3² + 4²) / 2 = 12.5, and 12.5 + 3.5 = 4².
    assert_eq!(hidden.values, [10.75, 22.0]);
    assert_eq!(oracle.take_bytes_moved(), Bytes(4 * 4 + 2 * 4));
}

#[test]
fn norms_of_queries_and_keys_go_over_one_head_or_all() {
    let (shape, ropes) = tiny();
    let still = AttentionShape { rope: None, heads: 2, kv_heads: 2, ..shape };
    let identity =
        || part(4, 4, &[1., 0., 0., 0., 0., 1., 0., 0., 0., 0., 1., 0., 0., 0., 0., 1.], Packing::F32);
    let mut query = buffer(&[&[0.0; 4]]);
    let mut run = |shape, norm: &[f32]| {
        let mut oracle = Oracle::new();
        let pool = &mut oracle.pool(PoolShape { kv_heads: 2, ..TINY }).unwrap();
        oracle.reserve(pool, 1).unwrap();
        let weights = AttentionWeights::<Oracle> {
            norm: None,
            qkv: vec![identity(), identity(), identity()],
            head_norms: Some((norm.to_vec(), vec![1.0; norm.len()])),
        };
        let hidden = buffer(&[&[3.0, -3.0, 1.0, 1.0]]);
        oracle.norm_qkv(&rows(2, 1, &[0]), &shape, &weights, &ropes, 0, &hidden, pool, &mut query).unwrap();
        query.values.clone()
    };
    // Without a rotary embedding nothing turns. The mean square of each head is 9 and 1, of both 5.
    assert_close(&run(still, &[1.0, 2.0]), &[1.0, -2.0, 1.0, 2.0]);
    let all = AttentionShape { joint_norms: true, ..still };
    let root = 5f64.sqrt();
    assert_close(&run(all, &[1.0, 2.0, 3.0, 4.0]), &[3.0 / root, -6.0 / root, 3.0 / root, 4.0 / root]);
}

#[test]
fn rows_go_through_their_experts_and_the_shared_one_and_are_added_by_their_shares() {
    // Each expert of width 1 doubles, triples, … what its gate lets through; hidden rows are their own norms.
    let expert = |times: f32| ExpertMlp::<Oracle> {
        gate_up: vec![part(1, 2, &[1.0, 0.0], Packing::F32), part(1, 2, &[0.0, times], Packing::F32)],
        down: vec![part(2, 1, &[1.0, 0.5], Packing::F32)],
    };
    // Of the row [1, 1] the logits are ln 1, ln 4, ln 3, and the gate's 0; of [1, -1] ln 1, ln 2, ln 3, and the gate's ln 3.
    let ln = |x: f32| x.ln() / 2.0;
    let router = [0.0, 0.0, ln(8.0), ln(2.0), ln(9.0), 0.0, ln(3.0), -ln(3.0)];
    let mut weights = ExpertWeights::<Oracle> {
        shape: ExpertShape {
            count: 3,
            per_row: 2,
            width: 1,
            shared_width: 1,
            shared_gate: true,
            gate: Gate::Silu,
            scores: ExpertScores::Softmax,
            groups: ExpertGroups::ONE,
            renormalised: false,
            scale: 1.0,
        },
        router: vec![part(4, 2, &router, Packing::F32)],
        router_bias: None,
        routed: vec![expert(2.0), expert(3.0), expert(5.0)],
        shared: Some(expert(7.0)),
        table: (),
    };
    let mut oracle = Oracle::new();
    let rows = rows(0, 2, &[0]);
    let hidden = buffer(&[&[1.0, 1.0], &[1.0, -1.0]]);
    let norm = vec![1.0, 1.0];
    let mut run = |weights: &ExpertWeights<Oracle>, scripted| {
        let mut inner = buffer(&[&[0.0; 3], &[0.0; 3]]);
        let mut out = buffer(&[&[0.5, 0.25], &[1.0, 2.0]]);
        oracle.route(&rows, (&norm, 0.0), weights, scripted, &hidden).unwrap();
        oracle.expert_gate_up(&rows, (&norm, 0.0), weights, &hidden, &mut inner).unwrap();
        oracle.expert_down(&rows, weights, &inner, &mut out).unwrap();
        (out.values, oracle.take_bytes_moved().0, oracle.take_experts_met())
    };
    // silu(1) = 0.7310586. Both rows take experts 1 and 2, which go up to 3 and 5 times silu(1), and down again.
    let silu = 0.731_058_578_630_004_9;
    let of = |first: f64, second: f64, gate: f64| silu * (3.0 * first + 5.0 * second + 7.0 * gate);
    let (one, other) = (of(4.0 / 8.0, 3.0 / 8.0, 0.5), -of(2.0 / 6.0, 3.0 / 6.0, 0.75));
    let (found, moved, met) = run(&weights, None);
    assert_close(&found, &[0.5 + one, 0.25 + one / 2.0, 1.0 + other, 2.0 + other / 2.0]);
    // A norm and a router of four rows, and of three experts' six matrices each.
    assert_eq!(moved, 4 * (2 + 4 * 2 + 3 * (2 * 2 + 2)));
    assert_eq!(met, ExpertsMet { experts: 2, layers: 1 });

    weights.shape.renormalised = true;
    let (one, other) = (of(4.0 / 7.0, 3.0 / 7.0, 0.5), -of(2.0 / 5.0, 3.0 / 5.0, 0.75));
    assert_close(&run(&weights, None).0, &[0.5 + one, 0.25 + one / 2.0, 1.0 + other, 2.0 + other / 2.0]);

    // A script picks experts 0 and 1 of the second row; the router weighs them: 1 to 2.
    let other = -silu * (2.0 / 3.0 + 3.0 * 2.0 / 3.0 + 7.0 * 0.75);
    let (found, _, met) = run(&weights, Some(&[2, 1, 1, 0]));
    assert_close(&found, &[0.5 + one, 0.25 + one / 2.0, 1.0 + other, 2.0 + other / 2.0]);
    assert_eq!(met.experts, 3);

    // Sigmoids of these logits are a / (1 + a): 1/2, 4/5, 3/4 and 1/2, 2/3, 3/4. A correction of the first brings it among the two largest,
    // and its share is that without it.
    weights.shape =
        ExpertShape { scores: ExpertScores::Sigmoid, renormalised: false, scale: 2.0, ..weights.shape };
    weights.router_bias = Some(vec![0.275, 0.0, 0.0]);
    let one = silu * 2.0 * (2.0 * 0.5 + 3.0 * 0.8) + silu * 7.0 * 0.5;
    let other = -(silu * 2.0 * (2.0 * 0.5 + 5.0 * 0.75) + silu * 7.0 * 0.75);
    let (found, moved, _) = run(&weights, None);
    assert_close(&found, &[0.5 + one, 0.25 + one / 2.0, 1.0 + other, 2.0 + other / 2.0]);
    // As before, of four experts, with the correction.
    assert_eq!(moved, 4 * (2 + 4 * 2 + 4 * (2 * 2 + 2) + 3));

    // Each expert a group of its own, of which the best is chosen; a row must then have one of them.
    weights.shape.groups = ExpertGroups { count: 3, chosen: 1 };
    (weights.shape.per_row, weights.shape.renormalised, weights.router_bias) = (1, true, None);
    let mut inner = buffer(&[&[0.0; 2], &[0.0; 2]]);
    let mut out = buffer(&[&[0.0, 0.0], &[0.0, 0.0]]);
    oracle.route(&rows, (&norm, 0.0), &weights, None, &hidden).unwrap();
    oracle.expert_gate_up(&rows, (&norm, 0.0), &weights, &hidden, &mut inner).unwrap();
    oracle.expert_down(&rows, &weights, &inner, &mut out).unwrap();
    let (one, other) = (silu * (2.0 * 3.0 + 7.0 * 0.5), -silu * (2.0 * 5.0 + 7.0 * 0.75));
    assert_close(&out.values, &[one, one / 2.0, other, other / 2.0]);
}

/// One head of two elements, angle 1 per position.
fn tiny() -> (AttentionShape, RopeTables) {
    let mut architecture = test_shapes::dense(hbmark_core::model::Family::Llama, [2, 1, 1, 1, 2, 2, 2]);
    architecture.rope = Rope { theta: 10_000.0, scaling: RopeScaling::None };
    architecture.norm_eps = 0.0;
    let mut ropes = RopeTables::new(&architecture).unwrap();
    ropes.extend_to(8);
    (AttentionShape::of(&architecture, 0), ropes)
}

const TINY: PoolShape = PoolShape {
    layers: 2,
    kv_heads: 1,
    head_dim: 2,
    value_dim: 2,
    block_size: 16,
    dtype: Dtype::F32,
    consecutive: false,
};

fn tiny_pool(oracle: &mut Oracle, dtype: Dtype) -> PlainPool {
    let mut pool = oracle.pool(PoolShape { dtype, ..TINY }).unwrap();
    oracle.reserve(&mut pool, 3).unwrap();
    pool
}

#[test]
fn queries_and_keys_turn_by_their_position_and_values_do_not() {
    let (shape, ropes) = tiny();
    let mut oracle = Oracle::new();
    let identity = || part(2, 2, &[1.0, 0.0, 0.0, 1.0], Packing::F32);
    let attention = |head_norms| AttentionWeights::<Oracle> {
        norm: Some(vec![1.0, 1.0]),
        qkv: vec![identity(), identity(), identity()],
        head_norms,
    };
    let mut pool = tiny_pool(&mut oracle, Dtype::F32);
    let mut query = buffer(&[&[0.0, 0.0]]);
    // At position 2, the first row of block 2; [1, -1] is its own norm.
    let (rows, hidden) = (rows(2, 1, &[2]), buffer(&[&[1.0, -1.0]]));
    oracle.norm_qkv(&rows, &shape, &attention(None), &ropes, 1, &hidden, &mut pool, &mut query).unwrap();
    let (sine, cosine) = 2f64.sin_cos();
    let turned = [cosine + sine, sine - cosine];
    assert_close(&query.values, &turned);
    let [place, _] = pool.places((2, 2), 0);
    assert_close(&pool.layers[1][0][place.clone()], &turned);
    assert_eq!(pool.layers[1][1][place.clone()], [1.0, -1.0]);
    assert!(pool.layers[0][0].iter().all(|x| x.is_nan()), "the other layer was not written");
    assert_eq!(oracle.take_bytes_moved(), Bytes(4 * 2 + 3 * 16 + 16));

    // Norms over heads come before the rotation.
    let norms = Some((vec![3.0, 3.0], vec![0.5, 0.5]));
    oracle.norm_qkv(&rows, &shape, &attention(norms), &ropes, 1, &hidden, &mut pool, &mut query).unwrap();
    assert_close(&query.values, &turned.map(|x| 3.0 * x));
    assert_close(&pool.layers[1][0][place.clone()], &turned.map(|x| 0.5 * x));
    assert_eq!(oracle.take_bytes_moved(), Bytes(4 * 2 + 3 * 16 + 16 + 4 * 4));
}

#[test]
fn a_pool_keeps_what_its_dtype_can_hold() {
    let mut oracle = Oracle::new();
    let key = [1.0 + 1.0 / 512.0, 1.0 / 3.0];
    for (dtype, kept) in [
        (Dtype::F32, key),
        (Dtype::Bf16, [1.0, 171.0 / 512.0]),
        (Dtype::F16, [1.0 + 1.0 / 512.0, 1365.0 / 4096.0]),
        (Dtype::Fp8, [1.0, 11.0 / 32.0]),
    ] {
        let mut pool = tiny_pool(&mut oracle, dtype);
        pool.write(0, (1, 3), 0, [&key, &[2.0, 3.0]]);
        let [place, _] = pool.places((1, 3), 0);
        assert_eq!(pool.layers[0][0][place.clone()], kept);
        assert_eq!(pool.layers[0][1][place], [2.0, 3.0]);
    }
    // Each vector has its own scale: 127 is the largest of it.
    let mut pool = tiny_pool(&mut oracle, Dtype::Int8);
    pool.write(0, (1, 3), 0, [&[0.5, -127.0], &[2.0, 0.25]]);
    let [place, _] = pool.places((1, 3), 0);
    assert_eq!(pool.layers[0][0][place.clone()], [0.0, -127.0]);
    assert_close(&pool.layers[0][1][place], &[2.0, 16.0 * 2.0 / 127.0]);
    let shape = PoolShape { dtype: Dtype::Int4, ..TINY };
    assert!(oracle.pool(shape).unwrap_err().to_string().contains("a KV cache in int4"));
}

#[test]
fn attention_is_causal_and_looks_no_further_than_its_window() {
    let (shape, _) = tiny();
    let mut oracle = Oracle::new();
    let mut pool = tiny_pool(&mut oracle, Dtype::F32);
    // Scores of a query [√2, 0] are the first elements of the keys; values are [1, 10], [2, 20], [3, 30].
    for (slot, (score, value)) in [(0.0, 1.0), (2f32.ln(), 2.0), (5f32.ln(), 3.0)].into_iter().enumerate() {
        pool.write(1, (1, slot), 0, [&[score, 7.0], &[value, 10.0 * value]]);
    }
    let query = [2f32.sqrt(), 0.0];
    let queries = buffer(&[&query, &query]);
    let mut attend = |window| {
        let mut out = buffer(&[&[0.0; 2], &[0.0; 2]]);
        // The rows at positions 1 and 2, whose keys are weighted 1 : 2 : 5.
        oracle.attention(&rows(1, 2, &[1]), &shape, window, None, 1, &queries, &pool, &mut out).unwrap();
        (out.values, oracle.take_bytes_moved())
    };
    let (all, read_all) = attend(None);
    assert_close(&all, &[5.0 / 3.0, 50.0 / 3.0, 20.0 / 8.0, 200.0 / 8.0]);
    assert_eq!(read_all, Bytes(3 * 2 * 2 * 4));
    assert_eq!(attend(Some(3)), (all, read_all));
    let (near, _) = attend(Some(2));
    assert_close(&near, &[5.0 / 3.0, 50.0 / 3.0, 19.0 / 7.0, 190.0 / 7.0]);
    let (own, read_own) = attend(Some(1));
    assert_close(&own, &[2.0, 20.0, 3.0, 30.0]);
    assert_eq!(read_own, Bytes(2 * 2 * 2 * 4), "the rows see positions 1 and 2 between them");
}

#[test]
fn the_first_of_equal_largest_logits_wins_and_only_last_rows_have_any() {
    let mut oracle = Oracle::new();
    let head = vec![part(3, 2, &[0.0, 1.0, 1.0, 0.0, 1.0, 0.0], Packing::F32)];
    let mut rows = rows(0, 2, &[0]);
    rows.push(&[0], 0, &[1]);
    // By their norms: [1, 1], [7/5, 1/5], [-7/5, 1/5].
    let hidden = buffer(&[&[1.0, 1.0], &[7.0, 1.0], &[-7.0, 1.0]]);
    let mut logits = buffer(&[&[0.0; 3], &[0.0; 3]]);
    let mut next = vec![9; 7];
    oracle.head(&rows, &vec![1.0, 1.0], 0.0, &head, None, &hidden, &mut logits, &mut next).unwrap();
    assert_close(&logits.values, &[0.2, 1.4, 1.4, 0.2, -1.4, -1.4]);
    assert_eq!(next, [1, 0]);
    oracle.head(&rows, &vec![1.0, 1.0], 0.0, &head, Some(2.0), &hidden, &mut logits, &mut next).unwrap();
    // 2 tanh(0.1) and 2 tanh(0.7).
    let (low, high) = (0.199_335_989_249_912, 1.208_735_554_234_327);
    assert_close(&logits.values, &[low, high, high, low, -high, -high]);
}

#[test]
fn scores_are_scaled_and_then_bent_and_a_sink_is_one_more() {
    let (shape, _) = tiny();
    let mut oracle = Oracle::new();
    let mut pool = tiny_pool(&mut oracle, Dtype::F32);
    // Scaled by a half and bent towards 2, scores of 4 atanh(½ ln 2) and 0 are ln 2 and 0.
    let score = 4.0 * (0.5 * 2f32.ln()).atanh();
    for (slot, (score, value)) in [(score, 3.0), (0.0, 9.0)].into_iter().enumerate() {
        pool.write(0, (0, slot), 0, [&[score, 0.0], &[value, 0.0]]);
    }
    let shape = AttentionShape { scale: 0.5, softcap: Some(2.0), ..shape };
    let mut out = buffer(&[&[0.0; 2]]);
    let queries = buffer(&[&[1.0, 0.0]]);
    oracle.attention(&rows(1, 1, &[0]), &shape, None, None, 0, &queries, &pool, &mut out).unwrap();
    assert_close(&out.values, &[5.0, 0.0]);
    // A sink, which is not bent, of ln 3: weights of 2, 1 and 3.
    oracle.take_bytes_moved();
    let sinks = vec![3f32.ln()];
    oracle.attention(&rows(1, 1, &[0]), &shape, None, Some(&sinks), 0, &queries, &pool, &mut out).unwrap();
    assert_close(&out.values, &[2.5, 0.0]);
    assert_eq!(oracle.take_bytes_moved(), Bytes(2 * 2 * 2 * 4 + 4));
}

/// What transformers computed for a fixture.
#[derive(serde::Deserialize)]
struct Reference {
    cases: Vec<Case>,
}

#[derive(serde::Deserialize)]
struct Case {
    tokens: Vec<u32>,
    logits: Vec<f32>,
}

/// The checkpoints in a folder of fixtures.
fn checkpoints(folder: &str) -> Vec<(PathBuf, OpenModel)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(folder);
    let paths = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let open = |path: PathBuf| {
        let model = crate::weights::open(path.to_str().unwrap(), None, 0).unwrap();
        (path, model)
    };
    paths.filter(|path| path.is_dir()).map(open).collect()
}

fn equals_transformers(session: &mut dyn Session, checkpoint: &Path, tolerance: f64) {
    let reference = std::fs::read_to_string(checkpoint.join("reference.json")).unwrap();
    let reference: Reference = serde_json::from_str(&reference).unwrap();
    for (sequence, case) in (0..).zip(&reference.cases) {
        let tokens = std::slice::from_ref(&case.tokens);
        session.step(&StepBatch::uniform(SequenceId(sequence), tokens, 0)).unwrap();
        let error = relative_error(&session.logits().unwrap()[0], &case.logits);
        let (path, count) = (checkpoint.display(), case.tokens.len());
        assert!(error <= tolerance, "{path}, {count} tokens: {error:.1e}");
    }
}

#[test]
fn the_oracle_gives_the_logits_of_transformers_on_every_fixture() {
    let (models, quantised) = (checkpoints("models"), checkpoints("quantised"));
    assert_eq!((models.len(), quantised.len()), (31, 15));
    for (path, model) in models {
        let mut oracle = NativeSession::load(Oracle::new(), &model, Dtype::F32, 16, &mut |_| {}).unwrap();
        equals_transformers(&mut oracle, &path, 1e-4);
    }
    for (path, model) in quantised {
        let dtype = model.stored_dtype();
        // As they are stored, inputs are rounded, to 8 bits or to bf16; dequantised, they are not.
        let mut stored = NativeSession::load(Oracle::new(), &model, dtype, 16, &mut |_| {}).unwrap();
        equals_transformers(&mut stored, &path, 6e-2);
        let (each, dtypes) = (crate::engine::native::weights::dequantised, (dtype, Dtype::F32));
        let oracle = Oracle::new();
        let mut whole = NativeSession::assemble(oracle, &model, dtypes, 16, each, &mut |_| {}).unwrap();
        equals_transformers(&mut whole, &path, 1e-4);
    }
}
