//! The time of the scheduler itself per step, without an engine: 256 sequences that decode, and prefills mixed in.

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};

use hbmark_core::result::serving::SchedulerConfig;
use hbmark_traffic::scheduler::{Request, Scheduler};

fn config() -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: 257,
        max_num_batched_tokens: 2048,
        num_blocks: 65_536,
        max_model_len: 8192,
        ..SchedulerConfig::UNLIMITED
    }
}

fn request(key: usize, output_len: usize) -> Request {
    let prompt = (0..64_u32).map(|i| u32::try_from(key).unwrap_or(0) * 64 + i).collect();
    Request { key, prompt, output_len, stop_tokens: Vec::new(), priority: 0, adapter: None }
}

/// 256 sequences after their prefill.
fn decoding() -> Scheduler {
    let mut scheduler = Scheduler::new(config());
    for key in 0..256 {
        let admitted = scheduler.add_request(request(key, 4096));
        assert!(admitted.is_ok(), "the bench's requests fit");
    }
    while scheduler.load().waiting > 0 || scheduler.batch().scheduled.iter().any(|p| p.tokens > 1) {
        step(&mut scheduler, &[7; 256]);
    }
    scheduler
}

fn step(scheduler: &mut Scheduler, tokens: &[u32]) {
    let entries = scheduler.next_batch().scheduled.len();
    scheduler.complete(&tokens[..entries]);
}

/// Steps of one iteration; the throughput criterion prints is in steps.
const STEPS: usize = 100;

fn benches(criterion: &mut Criterion) {
    let tokens = [7; 257];
    let mut group = criterion.benchmark_group("scheduler");
    group.throughput(Throughput::Elements(STEPS as u64));
    group.bench_function("100 steps of 256 decodes", |bencher| {
        bencher.iter_batched_ref(
            decoding,
            |scheduler| (0..STEPS).for_each(|_| step(scheduler, &tokens)),
            BatchSize::LargeInput,
        );
    });
    group.bench_function("100 steps that admit, prefill and finish one beside 256 decodes", |bencher| {
        bencher.iter_batched_ref(
            decoding,
            |scheduler| {
                for key in 1000..1000 + STEPS {
                    let admitted = scheduler.add_request(request(key, 1));
                    assert!(admitted.is_ok(), "one more fits");
                    step(scheduler, &tokens);
                }
            },
            BatchSize::LargeInput,
        );
    });
    group.finish();
}

criterion_group!(scheduler, benches);
criterion_main!(scheduler);
