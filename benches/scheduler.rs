//! What the scheduler itself costs per step, with no engine below it: 256 sequences that decode, and prefills mixed in.

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use hbmark::serve::scheduler::{Policy, Scheduler, SchedulerConfig, Submission};

fn config() -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: 257,
        max_num_batched_tokens: 2048,
        block_size: 16,
        num_blocks: 65_536,
        max_model_len: 8192,
        enable_prefix_caching: true,
        enable_chunked_prefill: true,
        scheduling: Policy::Fcfs,
        max_waiting: None,
        max_loras: None,
    }
}

fn submission(key: usize, output_len: usize) -> Submission {
    let prompt = (0..64_u32).map(|i| u32::try_from(key).unwrap_or(0) * 64 + i).collect();
    Submission { key, prompt, output_len, stop_tokens: Vec::new(), priority: 0, adapter: None }
}

/// 256 sequences that have their prompts behind them.
fn decoding() -> Scheduler {
    let mut scheduler = Scheduler::new(config());
    for key in 0..256 {
        let admitted = scheduler.admit(submission(key, 4096));
        assert!(admitted.is_ok(), "the bench's requests fit");
    }
    while scheduler.load().waiting > 0 || scheduler.batch().parts.iter().any(|p| p.tokens > 1) {
        step(&mut scheduler, &[7; 256]);
    }
    scheduler
}

fn step(scheduler: &mut Scheduler, tokens: &[u32]) {
    let parts = scheduler.next_batch().parts.len();
    scheduler.complete(&tokens[..parts]);
}

fn benches(criterion: &mut Criterion) {
    let tokens = [7; 256];
    criterion.bench_function("step of 256 decodes", |bencher| {
        bencher.iter_batched_ref(
            decoding,
            |scheduler| (0..100).for_each(|_| step(scheduler, &tokens)),
            BatchSize::LargeInput,
        );
    });
    criterion.bench_function("admit, prefill and finish one of 256", |bencher| {
        bencher.iter_batched_ref(
            decoding,
            |scheduler| {
                for key in 1000..1100 {
                    let _ = scheduler.admit(submission(key, 1));
                    step(scheduler, &tokens);
                }
            },
            BatchSize::LargeInput,
        );
    });
}

criterion_group!(scheduler, benches);
criterion_main!(scheduler);
