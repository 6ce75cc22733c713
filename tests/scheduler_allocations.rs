//! A steady step of the scheduler allocates nothing.
//!
//! In a file of its own: the allocator that counts is the whole process's, so nothing else may run beside it.

mod counting;

use hbmark_core::result::serving::{Policy, SchedulerConfig};
use hbmark_traffic::scheduler::{Request, Scheduler};

#[test]
fn a_steady_step_of_256_sequences_allocates_nothing() {
    let mut scheduler = Scheduler::new(SchedulerConfig {
        max_num_seqs: 256,
        max_num_batched_tokens: 2048,
        block_size: 16,
        num_blocks: 65_536,
        max_model_len: 4096,
        enable_prefix_caching: true,
        enable_chunked_prefill: true,
        scheduling: Policy::Fcfs,
        max_waiting: None,
        max_loras: Some(3),
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
    let before = counting::allocations();
    // New blocks are taken and cached meanwhile.
    for _ in 0..200 {
        assert_eq!(step(), 256);
    }
    assert_eq!(counting::allocations() - before, 0);
}
