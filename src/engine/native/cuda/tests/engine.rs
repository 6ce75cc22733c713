//! The whole engine on the emulated device: paged cache, batches, recorded graphs.

use std::path::{Path, PathBuf};

use super::super::device::MAX_GRID_YZ;
use super::super::emulator::{Emulated, SMALL};
use super::super::kernels::Tuning;
use super::super::operations::CudaOperations;
use crate::engine::native::cpu::CpuOperations;
use crate::engine::native::operations::{ExpertOperations, Operations};
use crate::engine::native::oracle::Oracle;
use crate::engine::native::{DEFAULT_BLOCK_SIZE, NativeSession};
use crate::engine::relative_error;
use crate::engine::{DeviceChoice, ScriptedRouting, SequenceId, Session, StepBatch};
use crate::weights::OpenModel;
use hbmark_core::ledger::{ExpertRouting, Ledger, StepShape};
use hbmark_core::model::Dtype;
use hbmark_core::units::Bytes;

/// f32 against f32: only the order of sums differs.
const F32_TOLERANCE: f64 = 1e-4;
/// A sum in another order may round an activation to the next bf16, or an 8-bit activation to the next step.
pub(super) const ROUNDED_TOLERANCE: f64 = 2e-2;
/// The same where several experts, each of rounded inputs, add to a row.
const MIXTURE_TOLERANCE: f64 = 3e-2;

/// The fixtures with experts.
const MIXTURES: [&str; 9] = [
    "qwen3-moe",
    "qwen2-moe",
    "mixtral",
    "glm4-moe",
    "minimax-m2",
    "gpt-oss",
    "deepseek-v2",
    "deepseek-v2-groups",
    "deepseek-v3",
];

pub(super) fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models")
}

fn model(name: &str) -> OpenModel {
    crate::weights::open(fixtures().join(name).to_str().unwrap(), None, 0).unwrap()
}

type EmulatedSession = NativeSession<CudaOperations<Emulated>>;

fn emulated(model: &OpenModel, dtype: Dtype, seed: u64) -> EmulatedSession {
    let operations = CudaOperations::with_tuning(Emulated::new(seed), SMALL);
    NativeSession::load(operations, model, dtype, 16, &mut |_| {}).unwrap()
}

pub(super) fn on_cpu(model: &OpenModel, dtype: Dtype) -> NativeSession<CpuOperations> {
    NativeSession::load(CpuOperations::new(1).unwrap(), model, dtype, 16, &mut |_| {}).unwrap()
}

pub(super) fn tokens(count: usize, seed: u32) -> Vec<u32> {
    (0..u32::try_from(count).unwrap()).map(|i| (i * 37 + seed * 11 + i * i) % 199).collect()
}

/// Runs the same steps on both; each decode step brings the token that the CPU chose.
pub(super) fn assert_equal<A: Operations, B: Operations>(
    found: &mut NativeSession<A>,
    wanted: &mut NativeSession<B>,
    prompts: &[Vec<u32>],
    steps: usize,
    tolerance: f64,
) {
    let sequences = |step: Vec<(Vec<u32>, usize)>| StepBatch {
        sequences: step
            .into_iter()
            .enumerate()
            .flat_map(|(index, (tokens, start))| {
                StepBatch::uniform(SequenceId(index as u64), &[tokens], start).sequences
            })
            .collect(),
    };
    let mut lengths: Vec<usize> = prompts.iter().map(Vec::len).collect();
    let mut batch = sequences(prompts.iter().map(|prompt| (prompt.clone(), 0)).collect());
    for step in 0..=steps {
        found.step(&batch).unwrap();
        wanted.step(&batch).unwrap();
        let (logits, reference) = (found.logits().unwrap(), wanted.logits().unwrap());
        assert_eq!(logits.len(), reference.len());
        for (index, (logits, reference)) in logits.iter().zip(&reference).enumerate() {
            let error = relative_error(logits, reference);
            assert!(error <= tolerance, "step {step}, sequence {index}: {error:.1e}");
        }
        let next = wanted.greedy_tokens().unwrap();
        assert_eq!(found.greedy_tokens().unwrap(), next, "step {step}");
        batch = sequences(next.iter().zip(&lengths).map(|(token, length)| (vec![*token], *length)).collect());
        for length in &mut lengths {
            *length += 1;
        }
    }
}

#[test]
fn every_fixture_model_generates_what_it_does_on_the_cpu() {
    let mut compared = 0;
    for (index, entry) in std::fs::read_dir(fixtures()).unwrap().enumerate() {
        let path = entry.unwrap().path();
        if !path.is_dir() {
            continue;
        }
        let model = crate::weights::open(path.to_str().unwrap(), None, 0).unwrap();
        crate::engine::native::check_device(&model.architecture, Dtype::F32, DeviceChoice::Cuda(0)).unwrap();
        let (mut found, mut wanted) =
            (emulated(&model, Dtype::F32, index as u64), on_cpu(&model, Dtype::F32));
        assert_equal(&mut found, &mut wanted, &[tokens(21, 3)], 5, F32_TOLERANCE);
        compared += 1;
    }
    assert!(compared >= 16, "{compared} models");
}

#[test]
fn every_dtype_generates_what_it_does_on_the_cpu() {
    for (name, dtypes) in [
        ("llama-gqa", [Dtype::Bf16, Dtype::F16, Dtype::Int8, Dtype::Fp8]),
        ("qwen3", [Dtype::Bf16, Dtype::F16, Dtype::Int8, Dtype::Fp8]),
        ("qwen2", [Dtype::Bf16, Dtype::F16, Dtype::Int8, Dtype::Fp8]),
    ] {
        let model = model(name);
        for dtype in dtypes {
            let (mut found, mut wanted) = (emulated(&model, dtype, 5), on_cpu(&model, dtype));
            assert_equal(&mut found, &mut wanted, &[tokens(18, 1)], 4, ROUNDED_TOLERANCE);
        }
    }
}

/// As [`assert_equal`], with a script that picks the experts: rounding decides between two that are nearly equal to a router.
pub(super) fn assert_equal_scripted<A: Operations, B: Operations>(
    found: &mut NativeSession<A>,
    wanted: &mut NativeSession<B>,
    prompt: Vec<u32>,
) {
    let script = ScriptedRouting { routing: ExpertRouting::Uniform, seed: 3 };
    found.script_experts(Some(script));
    wanted.script_experts(Some(script));
    assert_equal(found, wanted, &[prompt], 4, MIXTURE_TOLERANCE);
}

#[test]
fn every_dtype_of_a_mixture_generates_what_it_does_on_the_cpu() {
    for name in MIXTURES {
        let model = model(name);
        for dtype in [Dtype::Bf16, Dtype::F16, Dtype::Int8] {
            let mut found = emulated(&model, dtype, 5);
            if model.architecture.latent.is_some() {
                // A CPU expands the latents of prompts, and rounds other values then.
                let mut wanted = NativeSession::load(Oracle::new(), &model, dtype, 16, &mut |_| {}).unwrap();
                assert_equal_scripted(&mut found, &mut wanted, tokens(18, 1));
            } else {
                assert_equal_scripted(&mut found, &mut on_cpu(&model, dtype), tokens(18, 1));
            }
        }
        // The CPU sums in another order than both.
        let mut wanted = NativeSession::load(Oracle::new(), &model, Dtype::Fp8, 16, &mut |_| {}).unwrap();
        assert_equal_scripted(&mut emulated(&model, Dtype::Fp8, 6), &mut wanted, tokens(18, 1));
    }
}

#[test]
fn quantised_folders_generate_what_they_do_on_the_cpu() {
    for (index, entry) in std::fs::read_dir(fixtures().with_file_name("quantised")).unwrap().enumerate() {
        let path = entry.unwrap().path();
        let model = crate::weights::open(path.to_str().unwrap(), None, 0).unwrap();
        let dtype = model.stored_dtype();
        crate::engine::native::check_device(&model.architecture, dtype, DeviceChoice::Cuda(0)).unwrap();
        let (mut found, mut wanted) = (emulated(&model, dtype, index as u64), on_cpu(&model, dtype));
        if model.architecture.experts.is_some() {
            assert_equal_scripted(&mut found, &mut wanted, tokens(18, 1));
        } else {
            assert_equal(&mut found, &mut wanted, &[tokens(18, 1)], 4, ROUNDED_TOLERANCE);
        }
    }
}

#[test]
fn a_steady_decode_is_recorded_once_and_replayed_bit_for_bit() {
    for name in ["qwen3", "qwen2-moe"] {
        steady_decode(name);
    }
}

fn steady_decode(name: &str) {
    let model = model(name);
    let prompt = [tokens(20, 7)];
    let mut session = emulated(&model, Dtype::Bf16, 9);
    session.step(&StepBatch::uniform(SequenceId(0), &prompt, 0)).unwrap();
    assert_eq!(session.experts_met().is_some(), MIXTURES.contains(&name));
    let step = StepBatch::uniform(SequenceId(0), &[vec![5]], 20);
    let mut seen = Vec::new();
    for expected in [0, 1, 2, 3] {
        session.step(&step).unwrap();
        assert_eq!(session.operations.device().replays, expected);
        seen.push((
            session.logits().unwrap(),
            session.greedy_tokens().unwrap(),
            session.bytes_moved().unwrap(),
            session.experts_met(),
        ));
    }
    assert!(seen.iter().all(|one| *one == seen[0]), "eager, recorded and replayed steps differ");
    // A pinned step copies nothing to the device.
    let uploads = session.operations.uploads();
    session.step(&step).unwrap();
    assert_eq!(session.operations.uploads(), uploads);
    // Another position, token and block, the same graph.
    session.step(&StepBatch::uniform(SequenceId(0), &[vec![6]], 21)).unwrap();
    assert_eq!(session.operations.device().replays, 5);
}

#[test]
fn batches_of_nearby_sizes_share_a_graph_and_answer_as_they_do_alone() {
    let model = model("llama-gqa");
    let (mut found, mut wanted) = (emulated(&model, Dtype::Bf16, 5), on_cpu(&model, Dtype::Bf16));
    let batch = |sequences: usize, length: usize, start: usize| {
        let prompts = (0..sequences).map(|index| tokens(length, u32::try_from(index).unwrap()));
        StepBatch::uniform(SequenceId(0), &prompts.collect::<Vec<_>>(), start)
    };
    for session in [&mut found as &mut dyn Session, &mut wanted] {
        session.step(&batch(16, 5, 0)).unwrap();
    }
    let mut replays = Vec::new();
    for (position, sequences) in (5..).zip([9, 16, 10, 13, 16, 8]) {
        // Those that were left out a step ago begin again at the fifth position.
        let mut step = batch(sequences, 1, 5);
        for sequence in &mut step.sequences {
            sequence.tokens[0] += position;
        }
        found.step(&step).unwrap();
        wanted.step(&step).unwrap();
        assert_eq!(found.greedy_tokens().unwrap(), wanted.greedy_tokens().unwrap(), "{sequences} sequences");
        let (logits, reference) = (found.logits().unwrap(), wanted.logits().unwrap());
        assert_eq!(logits.len(), sequences);
        let errors = logits.iter().zip(&reference).map(|(found, wanted)| relative_error(found, wanted));
        assert!(errors.fold(0.0, f64::max) <= ROUNDED_TOLERANCE, "{sequences} sequences");
        replays.push(found.operations.device().replays);
    }
    // Nine run as sixteen, and are recorded by the sixteen that follow; eight are another size.
    assert_eq!(replays, [0, 1, 2, 3, 4, 4]);
}

#[test]
fn a_replayed_step_routes_anew_as_a_script_says_and_reads_no_expert_for_padding() {
    let script = ScriptedRouting { routing: ExpertRouting::Uniform, seed: 5 };
    // What the device keeps of an expert beyond the ledger's bytes: rows of 40 bytes are padded to 64, and scales have 32 bits.
    for (name, dtype, padding) in
        [("qwen2-moe", Dtype::F32, 1.0), ("qwen3-moe", Dtype::Bf16, 1.0), ("mixtral", Dtype::Int8, 1.4)]
    {
        let model = model(name);
        let (mut found, mut wanted) = (emulated(&model, dtype, 5), on_cpu(&model, dtype));
        let ledger = Ledger::new(found.architecture(), found.inventory(), found.kv_dtype());
        let expert = ledger.expert_bytes().unwrap().as_f64();
        let prompts: Vec<_> = (0..9).map(|index| tokens(20, index)).collect();
        for session in [&mut found as &mut dyn Session, &mut wanted] {
            session.script_experts(Some(script));
            session.step(&StepBatch::uniform(SequenceId(0), &prompts, 0)).unwrap();
            session.experts_met();
        }
        let mut step = |sequences: u32, start: usize, scripted: bool| {
            let tokens: Vec<_> = (0..sequences).map(|index| tokens(1, index)).collect();
            let batch = StepBatch::uniform(SequenceId(0), &tokens, start);
            let at = format!("{name}, {sequences} sequences at {start}");
            for session in [&mut found as &mut dyn Session, &mut wanted] {
                session.script_experts(scripted.then_some(script));
                session.step(&batch).unwrap();
            }
            let [gate_up, down] = found.operations.await_expert_bytes().unwrap();
            let met = [found.experts_met().unwrap(), wanted.experts_met().unwrap()];
            if scripted {
                let (logits, reference) = (found.logits().unwrap(), wanted.logits().unwrap());
                let errors = logits.iter().zip(&reference).map(|(a, b)| relative_error(a, b));
                assert!(errors.fold(0.0, f64::max) <= ROUNDED_TOLERANCE, "{at}");
                assert!((met[0] - met[1]).abs() < 1e-9, "{at}: {met:?}");
            }
            // All rows of an expert fit a tile, which reads it once.
            if sequences <= 4 {
                let share = (gate_up + down).as_f64() / (met[0] * expert);
                assert!((1.0 - 1e-9..=padding + 1e-9).contains(&share), "{at}: {share}");
            }
            found.operations.device().replays
        };
        // Nine run as twelve or as sixteen, and three as four.
        assert_eq!([20, 21, 22].map(|start| step(9, start, true)), [0, 1, 2], "{name}");
        assert_eq!([23, 24, 25, 26].map(|start| step(3, start, true)), [2, 3, 4, 5], "{name}");
        // A router of random weights chooses others than the script, in a graph of its own.
        assert_eq!([27, 28, 29].map(|start| step(3, start, false)), [5, 6, 7], "{name}");
        assert_eq!([25, 26].map(|start| step(3, start, true)), [8, 9], "{name}");
    }
}

#[test]
fn a_graph_is_void_when_the_scratch_that_it_points_to_has_moved() {
    let model = model("llama-gqa");
    let mut device = Emulated::new(3);
    device.multiprocessors = 16;
    let operations = CudaOperations::with_tuning(device, SMALL);
    let mut session = NativeSession::load(operations, &model, Dtype::F32, 16, &mut |_| {}).unwrap();
    let mut step = |sequence, tokens: Vec<u32>, start| {
        session.step(&StepBatch::uniform(SequenceId(sequence), &[tokens], start)).unwrap();
        (session.logits().unwrap(), session.operations.device().replays)
    };
    step(0, tokens(60, 1), 0);
    step(1, tokens(20, 2), 0);
    let short: Vec<_> = (0..3).map(|_| step(1, vec![5], 20)).collect();
    assert_eq!(short.iter().map(|(_, replays)| *replays).collect::<Vec<_>>(), [0, 1, 2]);
    // More splits need more scratch.
    let (_, before) = step(0, vec![5], 60);
    let (logits, after) = step(1, vec![5], 20);
    assert_eq!((after, logits), (before, short[0].0.clone()));
}

#[test]
fn a_profile_names_every_operation_and_counts_the_bytes_of_a_step() {
    for name in ["llama-gqa", "qwen2-moe"] {
        profiled(name);
    }
}

fn profiled(name: &str) {
    let model = model(name);
    let mut session = emulated(&model, Dtype::Bf16, 9);
    session.step(&StepBatch::uniform(SequenceId(0), &[tokens(20, 7)], 0)).unwrap();
    let step = StepBatch::uniform(SequenceId(0), &[vec![5]], 20);
    for _ in 0..3 {
        session.step(&step).unwrap();
    }
    let moved = session.bytes_moved().unwrap();
    let profile = session.profiler().unwrap().profile(&step).unwrap();
    assert_eq!(profile.iter().map(|operation| operation.bytes.0).sum::<u64>(), moved.0);
    assert!(profile.iter().all(|operation| operation.calls > 0));
}

#[test]
fn a_filled_cache_is_the_same_on_both_devices() {
    let model = model("llama-gqa");
    let (mut found, mut wanted) = (emulated(&model, Dtype::Bf16, 4), on_cpu(&model, Dtype::Bf16));
    for session in [&mut found as &mut dyn Session, &mut wanted] {
        session.synthetic_kv().unwrap().fill_kv(SequenceId(0), 75, 11).unwrap();
        session.step(&StepBatch::uniform(SequenceId(0), &[vec![3]], 75)).unwrap();
    }
    let error = relative_error(&found.logits().unwrap()[0], &wanted.logits().unwrap()[0]);
    assert!(error <= ROUNDED_TOLERANCE, "{error:.1e}");
}

/// A prompt of 4,096 tokens for each of 32 sequences and more is what `hbmark run` measures where nothing else is asked for.
#[test]
fn no_launch_of_a_large_prefill_has_a_grid_that_no_gpu_takes() {
    for (name, dtype, sequences) in [
        ("llama-gqa", Dtype::Bf16, 32),
        ("llama-gqa", Dtype::Fp8, 32),
        ("llama-gqa", Dtype::F32, 64),
        ("qwen3", Dtype::F16, 32),
        ("qwen3", Dtype::Int8, 32),
        ("mixtral", Dtype::Bf16, 32),
        ("mixtral", Dtype::F32, 64),
    ] {
        let mut architecture = model(name).architecture;
        architecture.max_positions = 4096;
        let model = OpenModel::synthetic(name, architecture, 1);
        // As large as a GPU's, with and without attention on tensor cores, with and without its library.
        for tuning in [Tuning::default(), SMALL] {
            let mut session = checked_only(&model, dtype, tuning);
            let prompts = vec![tokens(4096, 1); sequences];
            session.step(&StepBatch::uniform(SequenceId(0), &prompts, 0)).unwrap();
            assert!(session.operations.device().launches > 0);
        }
    }
}

/// 64 drafted tokens of each of 1,024 sequences and more: a row of logits for each of them.
#[test]
fn no_launch_of_a_large_verify_step_has_a_grid_that_no_gpu_takes() {
    let mut session = checked_only(&model("llama-gqa"), Dtype::Bf16, Tuning::default());
    let drafted = StepBatch::uniform(SequenceId(0), &vec![tokens(65, 1); 1024], 0).as_verify_step();
    assert!(drafted.output_count() > MAX_GRID_YZ);
    session.step(&drafted).unwrap();
}

#[test]
fn the_step_after_one_that_failed_while_it_was_recorded_succeeds() {
    let model = model("llama-gqa");
    let (mut found, mut wanted) = (emulated(&model, Dtype::Bf16, 5), on_cpu(&model, Dtype::Bf16));
    let prompt = StepBatch::uniform(SequenceId(0), &[tokens(20, 7)], 0);
    let step = StepBatch::uniform(SequenceId(0), &[vec![5]], 20);
    for session in [&mut found as &mut dyn Session, &mut wanted] {
        session.step(&prompt).unwrap();
        session.step(&step).unwrap();
    }
    // The step after the first of its size is recorded.
    found.operations.device_mut().fails_in = Some(3);
    let error = found.step(&step).unwrap_err().to_string();
    assert!(error.contains("a planted fault"), "{error}");
    // Nor does what lies between steps fail.
    found.synthetic_kv().unwrap().fill_kv(SequenceId(1), 33, 1).unwrap();
    for replays in [0, 1, 2] {
        found.step(&step).unwrap();
        assert_eq!(found.greedy_tokens().unwrap(), wanted.greedy_tokens().unwrap());
        assert_eq!(found.operations.device().replays, replays, "run, recorded, replayed");
    }
}

#[test]
fn graphs_are_destroyed_before_the_kernels_that_they_launch() {
    let model = model("llama-gqa");
    let mut session = emulated(&model, Dtype::Bf16, 5);
    let step = StepBatch::uniform(SequenceId(0), &[vec![5]], 0);
    for _ in 0..3 {
        session.step(&step).unwrap();
    }
    assert_eq!(session.operations.device().replays, 2);
    // A graph that outlives the device panics when it is dropped.
    drop(session);
}

/// A session whose launches are checked and not run.
fn checked_only(model: &OpenModel, dtype: Dtype, tuning: Tuning) -> EmulatedSession {
    let mut device = Emulated::new(1);
    device.only_checks = true;
    device.multiprocessors = 132;
    let operations = CudaOperations::with_tuning(device, tuning);
    NativeSession::load(operations, model, dtype, DEFAULT_BLOCK_SIZE, &mut |_| {}).unwrap()
}

#[test]
fn the_memory_of_a_prefill_is_what_is_predicted() {
    for (name, dtype) in [
        ("llama-gqa", Dtype::Bf16),
        ("qwen3", Dtype::F16),
        ("llama-gqa", Dtype::F32),
        ("qwen3", Dtype::Int8),
        ("llama-gqa", Dtype::Fp8),
        ("qwen3-moe", Dtype::Bf16),
        ("mixtral", Dtype::F32),
        ("minimax-m2", Dtype::Bf16),
        ("gemma2", Dtype::Bf16),
        ("olmo2", Dtype::F32),
        ("deepseek-v2", Dtype::Bf16),
        ("deepseek-v3", Dtype::F16),
        ("deepseek-v3", Dtype::F32),
        ("llama-gqa", Dtype::Q8_0),
        ("qwen3", Dtype::Q4_0),
    ] {
        for (sequences, length) in [(1, 4096), (5, 700), (33, 100)] {
            // With the proportions of a real one.
            let mut architecture = model(name).architecture;
            (architecture.max_positions, architecture.vocab_size) = (4096, 2048);
            let model = OpenModel::synthetic(name, architecture, 1);
            let mut session = checked_only(&model, dtype, Tuning::default());
            let ledger = Ledger::new(session.architecture(), session.inventory(), session.kv_dtype());
            let prompts = vec![tokens(length, 1); sequences];
            session.step(&StepBatch::uniform(SequenceId(0), &prompts, 0)).unwrap();
            let taken = session.operations.device().live_bytes();
            let shape = StepShape::prefill(sequences, length);
            let predicted = ledger.native_gpu_memory(shape, dtype, DEFAULT_BLOCK_SIZE);
            // The emulated library has no workspace.
            let by_library = matches!(dtype, Dtype::Bf16 | Dtype::F16 | Dtype::Q8_0 | Dtype::Q4_0);
            let predicted = Bytes(predicted.0 - if by_library { 32 << 20 } else { 0 });
            let ratio = predicted.as_f64() / taken as f64;
            assert!((0.93..1.15).contains(&ratio), "{name} {dtype}, {sequences} × {length}: {ratio:.2}");
        }
    }
}
