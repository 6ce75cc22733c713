//! A steady decode of the native engine allocates nothing and leaves no thread behind.
//!
//! In a file of its own: the allocator that counts is the whole process's, so nothing else may run beside it.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]
#![expect(unsafe_code, reason = "a global allocator that counts is unsafe to declare")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use hbmark::engine::{self, DeviceChoice, DeviceOptions, SequenceId, StepBatch};
use hbmark::model::{self, Adapter, Dtype, Target};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(pointer, layout) }
    }
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's contract.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Threads of this process.
fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

#[test]
fn a_steady_decode_allocates_nothing_and_a_session_takes_its_threads_with_it() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models/qwen3");
    let model = model::open(folder, None, 0).unwrap();
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
        let counted = ALLOCATIONS.load(Ordering::Relaxed);
        for decode in &decodes {
            session.step(decode).unwrap();
        }
        assert_eq!(ALLOCATIONS.load(Ordering::Relaxed) - counted, 0, "{dtype}");
        for index in 0..2 {
            let adapter = Adapter::synthetic(&model.architecture, "x", 4, &Target::ALL, index);
            let id = session.load_adapter(&adapter).unwrap().0;
            session.adapt(SequenceId(2 * index), Some(id)).unwrap();
        }
        session.step(&decodes[0]).unwrap();
        session.step(&decodes[0]).unwrap();
        let counted = ALLOCATIONS.load(Ordering::Relaxed);
        for decode in &decodes {
            session.step(decode).unwrap();
        }
        assert_eq!(ALLOCATIONS.load(Ordering::Relaxed) - counted, 0, "{dtype} with adapters");
        drop(session);
        assert_eq!(threads(), before);
    }
}
