//! A steady decode of the native engine allocates nothing and leaves no thread behind.
//!
//! In a file of its own: the allocator that counts is the whole process's, so nothing else may run beside it, and its tests take turns.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod counting;

use hbmark::engine::{self, DeviceChoice, DeviceOptions, SequenceId, Session, StepBatch};
use hbmark::measure::block::{CellInput, take_block};
use hbmark::weights::Adapter;
use hbmark_core::model::{Dtype, Target};
use hbmark_core::result::{Cell, Phase};

/// Tests of this file, one at a time.
static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());

/// Threads of this process.
fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

#[test]
fn a_steady_decode_allocates_nothing_and_a_session_takes_its_threads_with_it() {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models/qwen3");
    let model = hbmark::weights::open(folder, None, 0).unwrap();
    let before = threads();
    for dtype in [Dtype::Bf16, Dtype::Q8_0] {
        let options = DeviceOptions { threads: Some(3), ..DeviceOptions::default() };
        let mut session =
            engine::open("native", &model, dtype, DeviceChoice::Cpu, options, &mut |_, _| {}).unwrap();
        assert_eq!(threads(), before + 2);
        let prompts: Vec<Vec<u32>> = (1..4).map(|i| vec![i; 9]).collect();
        session.step(&StepBatch::uniform(SequenceId(0), &prompts, 0)).unwrap();
        let decodes: Vec<StepBatch> = (9..14)
            .map(|position| StepBatch::uniform(SequenceId(0), &[vec![1], vec![2], vec![3]], position))
            .collect();
        // The first decode may make room for the threads' own scratch.
        session.step(&decodes[0]).unwrap();
        session.step(&decodes[0]).unwrap();
        let counted = counting::allocations();
        for decode in &decodes {
            session.step(decode).unwrap();
        }
        assert_eq!(counting::allocations() - counted, 0, "{dtype}");
        for index in 0..2 {
            let adapter = Adapter::synthetic(&model.architecture, "x", 4, &Target::ALL, index);
            let id = session.lora().unwrap().load_adapter(&adapter).unwrap().0;
            session.lora().unwrap().set_adapter(SequenceId(2 * index), Some(id)).unwrap();
        }
        session.step(&decodes[0]).unwrap();
        session.step(&decodes[0]).unwrap();
        let counted = counting::allocations();
        for decode in &decodes {
            session.step(decode).unwrap();
        }
        assert_eq!(counting::allocations() - counted, 0, "{dtype} with adapters");
        drop(session);
        assert_eq!(threads(), before);
    }
}

/// Allocations of a whole block of so many timed steps, with what comes before and after the clock.
fn of_a_block(session: &mut dyn Session, input: &CellInput, steps: usize) -> usize {
    let counted = counting::allocations();
    let mut tokens = Vec::new();
    take_block(session, input, steps, &mut tokens).unwrap();
    counting::allocations() - counted
}

#[test]
fn more_timed_steps_allocate_no_more() {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models/qwen3");
    let model = hbmark::weights::open(folder, None, 0).unwrap();
    let options = DeviceOptions { threads: Some(1), ..DeviceOptions::default() };
    let mut session =
        engine::open("native", &model, Dtype::Bf16, DeviceChoice::Cpu, options, &mut |_, _| {}).unwrap();
    let cell =
        Cell { phase: Phase::Decode, engine: "native".into(), dtype: Dtype::Bf16, batch: 3, context: 9 };
    let mut input = CellInput::new(&cell, 0, 7, model.architecture.vocab_size);
    input.fill(session.as_mut()).unwrap();
    // Room for the marks of the longest block is made once, before its clock starts.
    of_a_block(session.as_mut(), &input, 16_000);
    let (few, many) =
        (of_a_block(session.as_mut(), &input, 16), of_a_block(session.as_mut(), &input, 16_000));
    assert_eq!(few, many, "allocations of 16 steps and of 16,000");
}
