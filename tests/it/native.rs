//! The native engine gives what Hugging Face transformers and the stock engine give, however a step is cut.

use std::path::Path;

use hbmark::engine::{self, DeviceChoice, DeviceOptions, SequenceId, SequenceStep, Session, StepBatch};
use hbmark::measure::quality::relative_error;
use hbmark_core::ledger::{Ledger, StepShape};
use hbmark_core::model::Dtype;

use crate::logits::{fixtures, reference};

/// f32 against f32: only the order of sums differs.
const F32_TOLERANCE: f64 = 1e-4;

fn open(path: &Path, dtype: Dtype) -> Box<dyn Session> {
    let model = hbmark::weights::open(path.to_str().unwrap(), None, 0).unwrap();
    engine::open("native", &model, dtype, DeviceChoice::Cpu, DeviceOptions::default(), &mut |_, _| {})
        .unwrap()
}

#[test]
fn every_fixture_model_equals_transformers() {
    let mut folders = 0;
    for entry in std::fs::read_dir(fixtures()).unwrap() {
        let folder = entry.unwrap().path();
        if !folder.is_dir() {
            continue;
        }
        let reference = reference(&folder.join("reference.json"));
        let mut session = open(&folder, Dtype::F32);
        for case in &reference.cases {
            let sequence = SequenceId(case.tokens.len() as u64);
            session.step(&StepBatch::uniform(sequence, std::slice::from_ref(&case.tokens), 0)).unwrap();
            let error = relative_error(&session.logits().unwrap()[0], &case.logits);
            assert!(
                error <= F32_TOLERANCE,
                "{}: {} tokens: {error:.1e} off",
                folder.display(),
                case.tokens.len()
            );
            let mut generated = vec![session.greedy_tokens().unwrap()[0]];
            while generated.len() < case.greedy.len() {
                let position = case.tokens.len() + generated.len() - 1;
                let last = generated[generated.len() - 1];
                session.step(&StepBatch::uniform(sequence, &[vec![last]], position)).unwrap();
                generated.push(session.greedy_tokens().unwrap()[0]);
            }
            assert_eq!(generated, case.greedy, "{}", folder.display());
        }
        folders += 1;
    }
    assert_eq!(folders, 13);
}

/// The logits of one prompt, cut into steps of the given lengths.
fn in_steps(session: &mut dyn Session, sequence: u64, tokens: &[u32], lengths: &[usize]) -> Vec<f32> {
    let mut start = 0;
    for length in lengths {
        let chunk = tokens[start..start + length].to_vec();
        session.step(&StepBatch::uniform(SequenceId(sequence), &[chunk], start)).unwrap();
        start += length;
    }
    assert_eq!(start, tokens.len());
    let logits = session.logits().unwrap().swap_remove(0);
    session.release(SequenceId(sequence));
    logits
}

#[test]
fn chunked_prefill_equals_whole_prefill_bit_for_bit() {
    let mut session = open(&fixtures().join("llama-gqa"), Dtype::F32);
    let tokens: Vec<u32> = (0..50).map(|i| (i * 7 + 3) % 200).collect();
    let whole = in_steps(session.as_mut(), 1, &tokens, &[50]);
    for (sequence, lengths) in
        [[25, 25].as_slice(), &[1, 48, 1], &[16, 16, 18], &[17, 15, 18]].iter().enumerate()
    {
        let chunked = in_steps(session.as_mut(), 2 + sequence as u64, &tokens, lengths);
        assert_eq!(whole, chunked, "{lengths:?}");
    }
}

#[test]
fn a_ragged_step_equals_its_sequences_one_by_one() {
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::Q8_0, Dtype::Q4_0, Dtype::Int8, Dtype::Int4, Dtype::F16] {
        let mut session = open(&fixtures().join("qwen2"), dtype);
        let tokens =
            |seed: u32, count: u32| -> Vec<u32> { (0..count).map(|i| (i * 11 + seed) % 190).collect() };
        let sequences: Vec<(u64, Vec<u32>)> =
            vec![(1, tokens(1, 5)), (2, tokens(2, 17)), (3, tokens(3, 33)), (4, tokens(4, 1))];
        let mut alone = Vec::new();
        for (id, tokens) in &sequences {
            session.step(&StepBatch::uniform(SequenceId(100 + id), std::slice::from_ref(tokens), 0)).unwrap();
            session.step(&StepBatch::uniform(SequenceId(100 + id), &[vec![7]], tokens.len())).unwrap();
            alone.push(session.logits().unwrap().swap_remove(0));
        }
        // Two are prefilled together, then one decodes beside the prefill of the others.
        let step = |id: u64, tokens: &[u32], start_position| SequenceStep {
            sequence: SequenceId(id),
            tokens: tokens.to_vec(),
            start_position,
            block_table: Vec::new(),
        };
        let mut run = |steps: Vec<SequenceStep>| {
            session.step(&StepBatch { sequences: steps }).unwrap();
            session.logits().unwrap()
        };
        run(vec![step(1, &sequences[0].1, 0), step(2, &sequences[1].1, 0)]);
        let mixed = run(vec![step(1, &[7], 5), step(3, &sequences[2].1, 0), step(4, &sequences[3].1, 0)]);
        let last = run(vec![step(4, &[7], 1), step(3, &[7], 33), step(2, &[7], 17)]);
        assert_eq!(mixed[0], alone[0], "{dtype}");
        assert_eq!(last[0], alone[3], "{dtype}");
        assert_eq!(last[1], alone[2], "{dtype}");
        assert_eq!(last[2], alone[1], "{dtype}");
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let model =
        hbmark::weights::open(fixtures().join("llama-llama3-rope").to_str().unwrap(), None, 0).unwrap();
    let tokens: Vec<u32> = (0..40).map(|i| (i * 5 + 1) % 180).collect();
    let with = |threads| {
        let options = DeviceOptions { threads: Some(threads), ..DeviceOptions::default() };
        let mut session =
            engine::open("native", &model, Dtype::Bf16, DeviceChoice::Cpu, options, &mut |_, _| {}).unwrap();
        in_steps(session.as_mut(), 1, &tokens, &[39, 1])
    };
    let one = with(1);
    for threads in [2, 3, 5] {
        assert_eq!(one, with(threads), "{threads}");
    }
}

#[test]
fn a_decode_over_shared_blocks_equals_one_over_its_own() {
    let mut session = open(&fixtures().join("llama-gqa"), Dtype::F32);
    let tokens: Vec<u32> = (0..64).collect();
    let step = |tokens: &[u32], start_position, block_table: &[u32]| SequenceStep {
        sequence: SequenceId(0),
        tokens: tokens.to_vec(),
        start_position,
        block_table: block_table.to_vec(),
    };
    let mut run = |steps: Vec<SequenceStep>| {
        session.step(&StepBatch { sequences: steps }).unwrap();
        session.logits().unwrap()
    };
    // Block 5 holds the first 64 positions; two sequences go on from it in blocks of their own.
    run(vec![step(&tokens, 0, &[5])]);
    let both = run(vec![step(&[9], 64, &[5, 2]), step(&[11], 64, &[5, 7])]);
    run(vec![step(&tokens, 0, &[0])]);
    let own = run(vec![step(&[11], 64, &[0, 1])]);
    assert_eq!(both[1], own[0]);
    assert_ne!(both[0], own[0]);
    let short = StepBatch { sequences: vec![step(&[1], 64, &[5])] };
    let error = session.step(&short).unwrap_err().to_string();
    assert!(error.contains("a block table of 1 for 65 positions"), "{error}");
}

#[test]
fn every_byte_of_a_decode_is_counted_and_the_sum_is_near_the_ideal() {
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::Int8, Dtype::Q8_0, Dtype::Q4_0, Dtype::Int4] {
        let model = hbmark::weights::open("SmolLM2-135M", None, 1).unwrap();
        let mut session = engine::open(
            "native",
            &model,
            dtype,
            DeviceChoice::Cpu,
            DeviceOptions::default(),
            &mut |_, _| {},
        )
        .unwrap();
        session.synthetic_kv().unwrap().fill_kv(SequenceId(0), 500, 1).unwrap();
        session.step(&StepBatch::uniform(SequenceId(0), &[vec![1]], 500)).unwrap();
        let ledger = Ledger::new(session.architecture(), session.inventory(), session.kv_dtype());
        let ideal = ledger.step(StepShape::decode(1, 500)).bytes.ideal().as_f64();
        let counted = session.bytes_moved().unwrap();
        let moved = counted.as_f64();
        assert!(moved >= ideal * 0.999 && moved <= ideal * 1.01, "{dtype}: moved {moved}, ideal {ideal}");
        let profiled: u64 = session
            .profiler()
            .unwrap()
            .profile(&StepBatch::uniform(SequenceId(0), &[vec![1]], 500))
            .unwrap()
            .iter()
            .map(|operation| operation.bytes.0)
            .sum();
        assert_eq!(profiled, counted.0, "{dtype}");
    }
}

#[test]
fn a_gguf_file_gives_what_its_dequantised_weights_give() {
    for name in ["llama-q8_0", "qwen3-q8_0"] {
        let path = fixtures().join(format!("{name}.gguf"));
        let reference = reference(&fixtures().join(format!("{name}.reference.json")));
        let mut session = open(&path, Dtype::Gguf);
        for case in &reference.cases {
            let sequence = SequenceId(case.tokens.len() as u64);
            session.step(&StepBatch::uniform(sequence, std::slice::from_ref(&case.tokens), 0)).unwrap();
            let error = relative_error(&session.logits().unwrap()[0], &case.logits);
            assert!(error <= 6e-2, "{name}: {error:.1e} off");
        }
    }
}
