//! Tensor parallel groups of emulated devices, each on a host thread of its own, whose kernels wait for each other.

use std::time::Duration;

use super::super::device::Argument::{Address, F32, U64};
use super::super::device::{Device, KernelLaunch};
use super::super::emulator::{Emulated, SMALL};
use super::super::kernels::{DeviceTensor, Tuning};
use super::super::operations::CudaOperations;
use super::super::peers::PeerBuffer;
use super::emulation::words;
use super::engine::{ROUNDED_TOLERANCE, fixtures, tokens};
use crate::engine::native::ranks::Rank;
use crate::engine::native::testing::worst;
use crate::engine::native::{ParallelSession, check_ranks};
use crate::engine::{self, DeviceChoice, DeviceOptions, EngineError, SequenceId, Session, StepBatch};
use crate::weights::OpenModel;
use hbmark_core::ledger::{Ledger, StepShape};
use hbmark_core::model::Dtype;

type EmulatedGroup = ParallelSession<CudaOperations<Emulated>>;

fn group(model: &OpenModel, dtype: Dtype, ranks: usize, seed: u64, tuning: Tuning) -> EmulatedGroup {
    let on_device = |rank: usize| CudaOperations::with_tuning(Emulated::new(seed + 31 * rank as u64), tuning);
    let operations = (0..ranks).map(on_device).collect();
    let kv_dtype = engine::native::kv_dtype(dtype);
    EmulatedGroup::on_gpus(model, (dtype, kv_dtype), operations, 16, &mut |_| {}).unwrap()
}

fn on_cpu(model: &OpenModel, dtype: Dtype) -> Box<dyn Session> {
    let options = DeviceOptions { threads: Some(1), ..DeviceOptions::default() };
    engine::open("native", model, dtype, DeviceChoice::Cpu, options, &mut |_, _| {}).unwrap()
}

/// Prompts of several lengths at once, then decode steps of all of them, the third and fourth of which are replayed: logits of each step, and its
/// greedy tokens.
fn ran(session: &mut dyn Session, lengths: [usize; 2]) -> (Vec<Vec<f32>>, Vec<u32>) {
    let mut batch = StepBatch::default();
    for (sequence, length) in lengths.into_iter().enumerate() {
        let tokens = tokens(length, u32::try_from(sequence).unwrap());
        batch.sequences.extend(StepBatch::uniform(SequenceId(sequence as u64), &[tokens], 0).sequences);
    }
    let (mut logits, mut greedy) = (Vec::new(), Vec::new());
    for step in 0..5 {
        session.step(&batch).unwrap();
        session.next_tokens(&mut greedy).unwrap();
        logits.extend(session.logits().unwrap());
        for (index, sequence) in batch.sequences.iter_mut().enumerate() {
            let seed = u32::try_from(5 + index + step).unwrap();
            (sequence.tokens, sequence.start_position) = (tokens(1, seed), lengths[index] + step);
        }
    }
    (logits, greedy)
}

#[test]
fn groups_of_gpus_give_what_one_device_gives() {
    let mut split = 0;
    for (seed, name) in [
        "llama-gqa",
        "qwen2-tied",
        "granite",
        "qwen3-moe",
        "mixtral",
        "deepseek-v3",
        "gemma3",
        "glm4",
        "phi3",
        "gpt-oss",
    ]
    .into_iter()
    .enumerate()
    {
        let model = crate::weights::open(fixtures().join(name).to_str().unwrap(), None, 0).unwrap();
        let (wanted, greedy) = ran(&mut *on_cpu(&model, Dtype::F32), [1, 17]);
        for ranks in [2, 4] {
            if check_ranks(&model, Dtype::F32, DeviceChoice::Cuda(0), ranks).is_err() {
                continue;
            }
            let mut session = group(&model, Dtype::F32, ranks, seed as u64, SMALL);
            let (found, tokens) = ran(&mut session, [1, 17]);
            let error = worst(&found, &wanted);
            assert!(error <= 1e-4, "{name} on {ranks}: {error:.1e}");
            assert_eq!(tokens, greedy, "{name} on {ranks}");
            assert!(session.capabilities().graphs, "a step of a rank is still one graph");
            split += 1;
        }
    }
    assert!(split >= 9, "{split}");
}

#[test]
fn sums_of_a_group_are_made_by_the_library_too() {
    let model = crate::weights::open(fixtures().join("llama-gqa").to_str().unwrap(), None, 0).unwrap();
    let (wanted, _) = ran(&mut *on_cpu(&model, Dtype::Bf16), [1, 17]);
    let tuning = Tuning { min_tiled_rows: 1, min_library_rows: 1, ..SMALL };
    let (found, _) = ran(&mut group(&model, Dtype::Bf16, 2, 3, tuning), [1, 17]);
    let error = worst(&found, &wanted);
    assert!(error <= ROUNDED_TOLERANCE, "{error:.1e}");
}

#[test]
fn a_group_moves_the_bytes_of_the_ledger() {
    let model = crate::weights::open(fixtures().join("llama-gqa").to_str().unwrap(), None, 0).unwrap();
    let mut session = group(&model, Dtype::Bf16, 2, 1, SMALL);
    session.synthetic_kv().unwrap().fill_kv(SequenceId(0), 48, 1).unwrap();
    let (architecture, inventory) = (session.architecture(), session.inventory());
    let ledger = Ledger::of_first_rank(architecture, inventory, session.kv_dtype(), 2).unwrap();
    // Kernel by kernel, recorded, replayed.
    for step in 0..4 {
        session.step(&StepBatch::uniform(SequenceId(0), &[vec![7]], 48 + step)).unwrap();
        let counted = session.bytes_moved().unwrap().as_f64();
        let ideal = ledger.step(StepShape::decode(1, 48 + step)).bytes.ideal().as_f64();
        // Rows of weights are padded.
        assert!((counted / ideal - 1.0).abs() <= 3e-2, "{counted} of {ideal}");
    }
}

/// What a rank brings to sum number `turn`.
fn brought(rank: usize, turn: usize, at: usize) -> f32 {
    ((rank + 2) * (at % 101 + turn + 1)) as f32 / 7.0
}

fn floats(device: &mut Emulated, values: &[f32]) -> DeviceTensor<Emulated> {
    let memory = device.allocate(4 * values.len()).unwrap();
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    device.upload(&memory, 0, &bytes).unwrap();
    DeviceTensor { memory, rows: values.len() / 4, width: 4 }
}

fn read(device: &mut Emulated, tensor: &DeviceTensor<Emulated>, count: usize) -> Vec<f32> {
    words(device, &tensor.memory, count).into_iter().map(f32::from_bits).collect()
}

/// Sums of several sizes, one after another, by a rank: what it has after each.
fn sums_of_a_rank(mut rank: Rank, seed: u64, rows_of_sums: &[usize]) -> Vec<Vec<u32>> {
    let mut device = Emulated::new(seed + rank.index() as u64);
    let mut peer_buffer = PeerBuffer::default();
    let mut found = Vec::new();
    for (turn, rows) in rows_of_sums.iter().enumerate() {
        let count = 4 * rows;
        let hidden = floats(&mut device, &vec![1.5; count]);
        peer_buffer.begin(&mut device, &mut rank, count, 1).unwrap();
        let own: Vec<f32> = (0..count).map(|at| brought(rank.index(), turn, at)).collect();
        // In place of a product, which adds to what is there: zeros.
        let (own, sums) = (floats(&mut device, &own), peer_buffer.take_begun().unwrap());
        let own = Address(Emulated::address(&own.memory));
        let add = KernelLaunch {
            kernel: "triad".into(),
            grid: [1; 3],
            threads: 32,
            shared_bytes: 0,
            arguments: vec![Address(sums), Address(sums), own, F32(1.0), U64(*rows as u64)],
        };
        device.launch(&add).unwrap();
        peer_buffer
            .all_reduce(&mut device, &rank, SMALL, (*rows, hidden.width), Emulated::address(&hidden.memory))
            .unwrap();
        found.push(read(&mut device, &hidden, count).into_iter().map(f32::to_bits).collect());
    }
    // Until all have read what this one shares.
    rank.bring(std::iter::empty()).unwrap();
    found
}

/// Launches every kernel of a group of three, whose first rank is this host thread.
pub(super) fn launch_every_kernel() {
    let steps = |mut rank: Rank| {
        // Of few bytes, and of many.
        sums_of_a_rank(rank.clone(), 7, &[3, 200]);
        let mut device = Emulated::new(rank.index() as u64);
        let mut peer_buffer = PeerBuffer::default();
        let hidden = floats(&mut device, &[1.0; 8]);
        let logits = floats(&mut device, &[0.0, rank.index() as f32, 0.0, 0.0]);
        let next = device.allocate(4).unwrap();
        device.upload(&next, 0, &1u32.to_le_bytes()).unwrap();
        // What the sums above brought is behind them.
        rank.bring(std::iter::empty()).unwrap();
        peer_buffer.begin(&mut device, &mut rank, 8, 1).unwrap();
        peer_buffer
            .all_reduce(&mut device, &rank, SMALL, (2, hidden.width), Emulated::address(&hidden.memory))
            .unwrap();
        let (address, first) = (Emulated::address(&next), 4 * rank.index());
        peer_buffer.first_of_ranks(&mut device, &rank, SMALL, (1, &logits), address, first).unwrap();
        let mut token = [0; 4];
        device.download(&next, 0, &mut token).unwrap();
        assert_eq!(u32::from_le_bytes(token), 9, "the second token of the last rank");
        rank.bring(std::iter::empty()).unwrap();
    };
    std::thread::scope(|scope| {
        let mut ranks = Rank::group(3).into_iter();
        let first = ranks.next().unwrap();
        ranks.for_each(|rank| drop(scope.spawn(move || steps(rank))));
        steps(first);
    });
}

#[test]
fn every_rank_has_the_same_sum_to_the_bit_whatever_the_sizes_before() {
    // 128 rows of 4 are one shot, more are two; smaller sums follow larger ones, which leave more behind.
    let rows = [3, 200, 1, 128, 129, 2, 400, 7, 300, 1];
    for (seed, ranks) in [(1, 2), (2, 3), (3, 5), (4, 8)] {
        let found: Vec<Vec<Vec<u32>>> = std::thread::scope(|scope| {
            let threads: Vec<_> = Rank::group(ranks)
                .into_iter()
                .map(|rank| scope.spawn(move || sums_of_a_rank(rank, 100 * seed, &rows)))
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for (turn, rows) in rows.into_iter().enumerate() {
            let sum = |at| (1..ranks).fold(brought(0, turn, at), |sum, rank| sum + brought(rank, turn, at));
            let wanted: Vec<u32> = (0..4 * rows).map(|at| (1.5 + sum(at)).to_bits()).collect();
            for (rank, found) in found.iter().enumerate() {
                assert_eq!(found[turn], wanted, "rank {rank} of {ranks}, {rows} rows");
            }
        }
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_and_not_waited_for() {
    let tuning = Tuning { rank_timeout: Duration::from_millis(200), ..SMALL };
    let errors: Vec<EngineError> = std::thread::scope(|scope| {
        let threads: Vec<_> = Rank::group(3)
            .into_iter()
            .map(|mut rank| {
                scope.spawn(move || {
                    let mut device = Emulated::new(rank.index() as u64);
                    let mut peer_buffer = PeerBuffer::default();
                    let hidden = floats(&mut device, &[1.0; 8]);
                    let (logits, next) = (floats(&mut device, &[1.0; 8]), device.allocate(8).unwrap());
                    device.upload(&next, 0, &[0; 8]).unwrap();
                    peer_buffer.begin(&mut device, &mut rank, 8, 2).unwrap();
                    if rank.index() != 1 {
                        peer_buffer
                            .all_reduce(
                                &mut device,
                                &rank,
                                tuning,
                                (2, hidden.width),
                                Emulated::address(&hidden.memory),
                            )
                            .unwrap();
                        let address = Emulated::address(&next);
                        peer_buffer
                            .first_of_ranks(&mut device, &rank, tuning, (2, &logits), address, 0)
                            .unwrap();
                        let mut tokens = [0; 8];
                        device.download(&next, 0, &mut tokens).unwrap();
                        assert_eq!(tokens, [0xff; 8], "no token of any vocabulary");
                        assert_eq!(read(&mut device, &hidden, 8), [1.0; 8], "nothing is added");
                    }
                    rank.bring(std::iter::empty()).unwrap();
                    peer_buffer.check(&mut device, 3).unwrap_err()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    // The one that is late learns it, too.
    for error in errors {
        assert!(matches!(error, EngineError::RankLost { rank: 1, of: 3 }), "{error}");
    }
}

#[test]
fn a_fault_of_one_gpu_ends_the_group() {
    let model = crate::weights::open(fixtures().join("llama-gqa").to_str().unwrap(), None, 0).unwrap();
    // Long enough for a rank whose processor others have.
    let tuning = Tuning { rank_timeout: Duration::from_millis(200), ..SMALL };
    // In a step that runs kernel by kernel, and in one that is replayed.
    for (whole_steps, fails_in) in [(1, 3), (4, 9)] {
        let mut session = group(&model, Dtype::F32, 2, 3, tuning);
        let step = |position| StepBatch::uniform(SequenceId(0), &[vec![7]], position);
        for position in 0..whole_steps {
            session.step(&step(position)).unwrap();
            session.greedy_tokens().unwrap();
        }
        session.rank_mut(1).device_mut().fails_in = Some(fails_in);
        let error = session.step(&step(whole_steps)).unwrap_err();
        assert!(error.to_string().contains("a planted fault"), "{error}");
        assert!(session.greedy_tokens().is_err(), "the other rank's token is of no model");
        let error = session.step(&step(whole_steps + 1)).unwrap_err();
        assert!(error.to_string().contains("failed before"), "{error}");
    }
}
