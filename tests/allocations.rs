//! What runs inside a timed interval allocates nothing: a decode of the native engine, a block of timed steps, a step of the scheduler, a
//! step of an engine under it.
//!
//! In a binary of its own: the allocator that counts is the whole process's, so its tests take turns.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]
#![expect(unsafe_code, reason = "a global allocator that counts is unsafe to declare")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use hbmark::engine::{self, DeviceChoice, DeviceOptions, SequenceId, Session, StepBatch};
use hbmark::measure::block::{CellInput, take_block};
use hbmark::serve::clock::HostClock;
use hbmark::serve::executor::SessionExecutor;
use hbmark::weights::Adapter;
use hbmark_core::model::{Dtype, Target};
use hbmark_core::result::serving::SchedulerConfig;
use hbmark_core::result::{Cell, Phase};
use hbmark_traffic::executor::Executor as _;
use hbmark_traffic::sampler::{Sampler, Sampling};
use hbmark_traffic::scheduler::{Request, Scheduler};

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

/// Allocations of this process so far.
fn allocations() -> usize {
    ALLOCATIONS.load(Ordering::Relaxed)
}

/// Tests of this file, one at a time.
static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());

/// Threads of sessions in this process; those of the test harness come and go.
fn threads() -> usize {
    let names = std::fs::read_dir("/proc/self/task").unwrap().flatten().map(|task| task.path().join("comm"));
    names.filter(|name| std::fs::read_to_string(name).is_ok_and(|name| name.starts_with("cpu-"))).count()
}

#[test]
fn a_steady_decode_allocates_nothing_and_a_session_takes_its_threads_with_it() {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    // Routers choose other experts in every step, and experts take no adapters.
    let models =
        [("qwen3", &Target::ALL[..]), ("qwen3-moe", &Target::ALL[..4]), ("qwen2-moe", &Target::ALL[..4])];
    for ((name, targets), dtype) in models.iter().flat_map(|m| [Dtype::Bf16, Dtype::Q8_0].map(|d| (*m, d))) {
        let folder = format!("{}/tests/fixtures/models/{name}", env!("CARGO_MANIFEST_DIR"));
        let model = hbmark::weights::open(&folder, None, 0).unwrap();
        let options = DeviceOptions { threads: Some(3), ..DeviceOptions::default() };
        let mut session =
            engine::open("native", &model, dtype, DeviceChoice::Cpu, options, &mut |_, _| {}).unwrap();
        assert_eq!(threads(), 2);
        let prompts: Vec<Vec<u32>> = (1..4).map(|i| vec![i; 9]).collect();
        session.step(&StepBatch::uniform(SequenceId(0), &prompts, 0)).unwrap();
        let decodes: Vec<StepBatch> = (9..14)
            .map(|position| StepBatch::uniform(SequenceId(0), &[vec![1], vec![2], vec![3]], position))
            .collect();
        // The first decode may make room for the threads' own scratch.
        session.step(&decodes[0]).unwrap();
        session.step(&decodes[0]).unwrap();
        let counted = allocations();
        for decode in &decodes {
            session.step(decode).unwrap();
        }
        assert_eq!(allocations() - counted, 0, "{name}, {dtype}");
        for index in 0..2 {
            let adapter = Adapter::synthetic(&model.architecture, "x", 4, targets, index);
            let id = session.lora().unwrap().load_adapter(&adapter).unwrap().0;
            session.lora().unwrap().set_adapter(SequenceId(2 * index), Some(id)).unwrap();
        }
        session.step(&decodes[0]).unwrap();
        session.step(&decodes[0]).unwrap();
        let counted = allocations();
        for decode in &decodes {
            session.step(decode).unwrap();
        }
        assert_eq!(allocations() - counted, 0, "{name}, {dtype} with adapters");
        drop(session);
        assert_eq!(threads(), 0);
    }
}

/// Allocations of a whole block of so many timed steps, with what comes before and after the clock.
fn of_a_block(session: &mut dyn Session, input: &CellInput, steps: usize) -> usize {
    let counted = allocations();
    let mut tokens = Vec::new();
    take_block(session, input, steps, &mut tokens).unwrap();
    allocations() - counted
}

#[test]
fn more_timed_steps_allocate_no_more() {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models/qwen3");
    let model = hbmark::weights::open(folder, None, 0).unwrap();
    let options = DeviceOptions { threads: Some(1), ..DeviceOptions::default() };
    let mut session =
        engine::open("native", &model, Dtype::Bf16, DeviceChoice::Cpu, options, &mut |_, _| {}).unwrap();
    for (index, phase) in [Phase::Decode, Phase::Verify { draft_tokens: 3 }].into_iter().enumerate() {
        let cell = Cell { phase, engine: "native".into(), dtype: Dtype::Bf16, batch: 3, context: 9 };
        let mut input = CellInput::new(&cell, index, 7, model.architecture.vocab_size);
        input.fill(session.as_mut()).unwrap();
        // Room for the marks of the longest block is made once, before its clock starts. A test of a minute would count what the harness says of it.
        of_a_block(session.as_mut(), &input, 1_000);
        let (few, many) =
            (of_a_block(session.as_mut(), &input, 16), of_a_block(session.as_mut(), &input, 1_000));
        assert_eq!(few, many, "{phase}: allocations of 16 steps and of 1,000");
    }
}

#[test]
fn a_steady_step_of_a_served_engine_allocates_nothing() {
    served_step_allocates_nothing(Sampling::GREEDY);
}

#[test]
fn a_steady_step_whose_tokens_are_drawn_allocates_nothing() {
    served_step_allocates_nothing(Sampling { temperature: 0.8, top_k: 40, top_p: 0.95, seed: 3 });
}

fn served_step_allocates_nothing(sampling: Sampling) {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models/qwen3");
    let model = hbmark::weights::open(folder, None, 0).unwrap();
    let options = DeviceOptions { threads: Some(1), block_size: Some(64), ..DeviceOptions::default() };
    let mut session =
        engine::open("native", &model, Dtype::Bf16, DeviceChoice::Cpu, options, &mut |_, _| {}).unwrap();
    session.preallocate_blocks(4).unwrap();
    let mut scheduler = Scheduler::new(SchedulerConfig {
        max_num_seqs: 4,
        max_num_batched_tokens: 64,
        block_size: 64,
        num_blocks: 4,
        max_model_len: 64,
        ..SchedulerConfig::UNLIMITED
    });
    for key in 0..4 {
        let prompt = vec![u32::try_from(key).unwrap() + 1; 5];
        let request =
            Request { key, prompt, output_len: 50, stop_tokens: Vec::new(), priority: 0, adapter: None };
        scheduler.add_request(request).unwrap();
    }
    let mut executor = SessionExecutor::new(session.as_mut(), Sampler::new(sampling));
    let (mut clock, mut tokens) = (HostClock::default(), Vec::new());
    let mut step = || {
        assert_eq!(scheduler.next_batch().scheduled.len(), 4);
        tokens.clear();
        executor.run(&scheduler, &mut clock, &mut tokens).unwrap();
        scheduler.complete(&tokens);
    };
    // The prefill, and decodes that make room for what a step keeps.
    for _ in 0..8 {
        step();
    }
    // The harness may print the end of another test meanwhile: what a step allocates, it allocates every time.
    let fewest = (0..3).map(|_| {
        let before = allocations();
        for _ in 0..8 {
            step();
        }
        allocations() - before
    });
    assert_eq!(fewest.min(), Some(0));
}

#[test]
fn a_steady_step_of_256_sequences_allocates_nothing() {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut scheduler = Scheduler::new(SchedulerConfig {
        max_num_seqs: 256,
        max_num_batched_tokens: 2048,
        num_blocks: 65_536,
        max_model_len: 4096,
        max_loras: Some(3),
        ..SchedulerConfig::UNLIMITED
    });
    for key in 0..256_usize {
        let prompt = (0..100).map(|i| u32::try_from(key * 100 + i).unwrap()).collect();
        let adapter = u32::try_from(key % 4).ok().filter(|adapter| *adapter < 3);
        let request =
            Request { key, prompt, output_len: 1000, stop_tokens: Vec::new(), priority: 0, adapter };
        scheduler.add_request(request).unwrap();
    }
    let tokens = [1; 256];
    let mut step = || {
        let entries = scheduler.next_batch().scheduled.len();
        scheduler.complete(&tokens[..entries]);
        entries
    };
    // Prefills, and the first blocks of outputs.
    for _ in 0..100 {
        step();
    }
    // All threads are counted, and the harness may print the end of another test meanwhile: what a step allocates, it allocates every time.
    let fewest = (0..3).map(|_| {
        let before = allocations();
        // New blocks are taken and cached meanwhile.
        for _ in 0..100 {
            assert_eq!(step(), 256);
        }
        allocations() - before
    });
    assert_eq!(fewest.min(), Some(0));
}
