//! A steady decode of the native engine allocates nothing and leaves no thread behind.
//!
//! In a file of its own: the allocator that counts is the whole process's, so nothing else may run beside it.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod counting;

use hbmark::engine::{self, DeviceChoice, DeviceOptions, SequenceId, StepBatch};
use hbmark::weights::Adapter;
use hbmark_core::model::{Dtype, Target};

/// Threads of this process.
fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

#[test]
fn a_steady_decode_allocates_nothing_and_a_session_takes_its_threads_with_it() {
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
            let id = session.load_adapter(&adapter).unwrap().0;
            session.set_adapter(SequenceId(2 * index), Some(id)).unwrap();
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
