//! The oracle against itself: the same steps split otherwise, and over other blocks.
//!
//! The CPU's operations are compared with the oracle by the checks of `run::verify::native`, which its tests run.

use super::sample::DTYPES;
use super::scenario::{BLOCK_SIZES, Script, ragged};
use super::*;
use crate::engine::native::operations::ExpertOperations;
use crate::engine::native::oracle::Oracle;
use crate::engine::native::shapes::AttentionShape;
use hbmark_core::ledger::Ledger;
use hbmark_core::model::{DraftLayer, Family, Mixer, Reach, Routing};

fn scenario_of(sample: &Sample, scripts: &[Script]) -> Scenario {
    let block_size = sample::nth(&BLOCK_SIZES, sample.seed);
    Scenario::new(scripts, block_size, sample.architecture.vocab_size, sample.seed)
}

#[test]
fn samples_cover_every_dtype_head_and_group_and_are_reproducible() {
    let samples: Vec<Sample> = (0..24).map(Sample::random).collect();
    let count = |key: &dyn Fn(&Sample) -> usize| {
        samples.iter().map(key).collect::<std::collections::HashSet<_>>().len()
    };
    assert_eq!(count(&|s| DTYPES.iter().position(|d| *d == s.dtype).unwrap()), DTYPES.len());
    assert_eq!(count(&|s| s.architecture.head_dim), 8);
    assert_eq!(count(&|s| s.architecture.heads / s.architecture.kv_heads), 16);
    for sample in &samples {
        super::super::check(
            &Architecture { quantization: None, ..sample.architecture.clone() },
            sample.dtype,
        )
        .unwrap();
        assert_eq!(*sample, Sample::random(sample.seed));
        assert!(sample.tensors().eq(sample.tensors()));
    }
}

#[test]
fn mixtures_cover_every_family_and_dtype_and_are_what_the_engine_runs() {
    let samples: Vec<Sample> = (0..96).map(|seed| Sample::mixture(None, seed)).collect();
    let families = [Family::Qwen3Moe, Family::Mixtral, Family::Qwen2Moe, Family::Glm4Moe, Family::GptOss];
    for family in families.into_iter().chain([Family::MinimaxM2, Family::DeepseekV3]) {
        for dtype in DTYPES {
            assert!(samples.iter().any(|s| s.architecture.family == family && s.dtype == dtype));
        }
    }
    for sample in &samples {
        let architecture = Architecture { quantization: None, ..sample.architecture.clone() };
        super::super::check(&architecture, sample.dtype).unwrap();
        assert!(architecture.is_expert_layer(0));
        assert_eq!(*sample, Sample::mixture(None, sample.seed));
    }
    assert!(samples.iter().any(|s| s.architecture.layers > 1 && !s.architecture.is_expert_layer(1)));
    let has = |what: &dyn Fn(&Routing) -> bool| {
        let of = |s: &Sample| s.architecture.layer(0).feed_forward.mixture().map(|mixture| mixture.routing);
        samples.iter().filter_map(of).any(|routing| what(&routing))
    };
    for correction in [false, true] {
        assert!(has(
            &|routing| matches!(routing, Routing::Sigmoid { correction: own, .. } if *own == correction)
        ));
    }
    for grouped in [false, true] {
        assert!(has(&|routing| {
            matches!(routing, Routing::Sigmoid { groups, chosen_groups, .. } if (chosen_groups < groups) == grouped)
        }));
        assert!(has(&|routing| match routing {
            Routing::GroupedSoftmax { groups, chosen_groups, .. } => grouped && chosen_groups < groups,
            Routing::Softmax { .. } => !grouped,
            _ => false,
        }));
    }
}

#[test]
fn varied_samples_have_everything_and_are_what_the_engine_runs() {
    let samples: Vec<Sample> = (0..24).map(|seed| Sample::varied(None, seed)).collect();
    for sample in &samples {
        let architecture = Architecture { quantization: None, ..sample.architecture.clone() };
        super::super::check(&architecture, sample.dtype).unwrap();
        assert_eq!(*sample, Sample::varied(None, sample.seed));
    }
    // Of the first layers, which operations are compared on alone.
    let first = |has: &dyn Fn(&AttentionShape) -> bool| {
        samples.iter().filter(|sample| has(&AttentionShape::of(&sample.architecture, 0))).count()
    };
    for count in [
        first(&|shape| shape.joint_norms),
        first(&|shape| shape.rope.is_none()),
        first(&|shape| shape.softcap.is_some()),
        samples.iter().filter(|sample| sample.architecture.multipliers.logits_softcap.is_some()).count(),
        samples.iter().filter(|sample| sample.architecture.draft == Some(DraftLayer::Mtp)).count(),
        samples.iter().filter(|sample| sample.architecture.draft == Some(DraftLayer::Eagle)).count(),
    ] {
        assert!((4..20).contains(&count), "{count}");
    }
}

#[test]
fn the_oracle_gives_the_same_bits_ragged_looped_and_chunked() {
    for seed in 0..12 {
        let sample = Sample::random(seed);
        let scripts: Vec<Script> = ragged(seed).into_iter().take(3).collect();
        let scenario = scenario_of(&sample, &scripts);
        for chunk in [usize::MAX, 7] {
            let error = same_in_pieces(Oracle::new(), Oracle::new(), &sample, &scenario, chunk).unwrap();
            assert!(error <= 0.0, "chunks of {chunk}, {}", sample.label());
        }
    }
}

#[test]
fn the_oracle_gives_the_same_bits_over_shuffled_blocks_and_over_one_stretch() {
    let scripts = [
        Script { cached: 0, brings: vec![33, 0, 1] },
        Script { cached: 0, brings: vec![15, 1, 1] },
        Script { cached: 0, brings: vec![0, 17, 31] },
    ];
    for seed in 20..28 {
        let sample = Sample::random(seed);
        let vocab = sample.architecture.vocab_size;
        let [paged, contiguous] = [16, 64].map(|size| Scenario::new(&scripts, size, vocab, seed));
        let mut a = Runner::new(Oracle::new(), &sample, &paged).unwrap();
        let mut b = Runner::new(Oracle::new(), &sample, &contiguous).unwrap();
        for (paged, contiguous) in paged.steps.iter().zip(&contiguous.steps) {
            assert_eq!(a.step(paged).unwrap(), b.step(contiguous).unwrap(), "{}", sample.label());
            assert_eq!(a.next_tokens().unwrap(), b.next_tokens().unwrap());
            assert_eq!(a.operations().take_bytes_moved(), b.operations().take_bytes_moved());
        }
    }
}

#[test]
fn an_error_of_another_shape_or_not_a_number_is_infinite() {
    assert!(worst(&[vec![1.0]], &[vec![1.0]]) <= 0.0);
    assert!(worst(&[vec![1.0]], &[]).is_infinite());
    assert!(worst(&[vec![1.0, 2.0]], &[vec![1.0]]).is_infinite());
    assert!(worst(&[vec![f32::NAN]], &[vec![1.0]]).is_infinite());
}

#[test]
fn few_rows_may_be_rounded_apart_and_not_most() {
    let sample = Sample::of_dtype(Dtype::Bf16, 0);
    let error = |operation, worst, median| OperationError { operation, worst, median };
    assert!(error(Operation::GateUp, 2e-3, 1e-6).passed(&sample));
    assert!(!error(Operation::GateUp, 2e-3, 1e-3).passed(&sample));
    assert!(!error(Operation::GateUp, 2e-2, 1e-6).passed(&sample));
    assert!(!error(Operation::Down, 2e-3, 1e-6).passed(&sample), "its input is not normed");
    let reference = vec![vec![1.0, 1.0]; 5];
    let mut found = reference.clone();
    (found[1][0], found[3][1]) = (0.5, 0.75);
    let found = OperationError::new(Operation::Down, &found, &reference);
    assert_eq!((found.worst, found.median), (0.5, 0.0));
}

/// No layer has a window.
fn see_everything(sample: &mut Sample) {
    sample.architecture.windows.clear();
    for layer in sample.architecture.stack.iter_mut().flat_map(|stack| &mut stack.kinds) {
        if let Mixer::Attention(attention) = &mut layer.mixer {
            attention.reach = Reach::Full;
        }
    }
}

/// Holds the bytes that a decode step of the oracle moves against those of the ledger, which may be rounded by so many.
fn moves_what_the_ledger_says(mut sample: Sample, rounded: u64) {
    see_everything(&mut sample);
    let a = &sample.architecture;
    let ledger = Ledger::new(a, &a.inventory(Dtype::F32), sample.kv_dtype);
    let (batch, context) = (3, 40);
    let scripts = vec![Script { cached: context, brings: vec![1] }; batch];
    let scenario = scenario_of(&sample, &scripts);
    let mut runner = Runner::new(Oracle::new(), &sample, &scenario).unwrap();
    runner.step(&scenario.steps[0]).unwrap();
    let mut cost = ledger.decode(batch, context);
    let expert_layers = (0..a.layers).filter(|layer| a.is_expert_layer(*layer)).count();
    if expert_layers > 0 {
        let met = runner.operations().take_experts_met();
        assert_eq!(met.layers, expert_layers as u64);
        cost = cost.meeting(met.mean().unwrap(), ledger.expert_bytes());
    }
    // The ledger leaves out a token's own K and V, which need not come from memory, and the rows of a table that the head reads.
    let own = ledger.kv_bytes_per_token().0 * batch as u64;
    let rows = if a.tied_head { 4 * batch * a.hidden_size } else { 0 };
    let wanted = cost.bytes.ideal().0 + own + rows as u64;
    let moved = runner.operations().take_bytes_moved().0;
    assert!(moved.abs_diff(wanted) <= rounded, "{moved} for {wanted}: {}", sample.label());
}

#[test]
fn the_oracle_moves_what_the_ledger_says() {
    for seed in 0..16 {
        let draw = if seed % 2 == 1 { Sample::varied } else { Sample::dense };
        moves_what_the_ledger_says(draw(Some(Dtype::F32), seed), 0);
    }
}

#[test]
fn the_oracle_moves_what_the_ledger_says_for_the_experts_that_it_met() {
    for seed in 0..12 {
        // The expectation that was replaced had been rounded to a byte.
        moves_what_the_ledger_says(Sample::mixture(Some(Dtype::F32), seed), 1);
    }
}
