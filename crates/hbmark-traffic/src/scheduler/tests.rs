//! Properties of the scheduler over random histories, and the cases that have a name.

use std::collections::{BTreeMap, HashMap, HashSet};

use proptest::prelude::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;

fn config() -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: 4,
        max_num_batched_tokens: 16,
        block_size: 4,
        num_blocks: 32,
        max_model_len: 64,
        enable_prefix_caching: true,
        enable_chunked_prefill: true,
        scheduling: Policy::Fcfs,
        max_waiting: None,
        max_loras: None,
    }
}

fn ask(key: usize, prompt: Vec<u32>, output_len: usize) -> Submission {
    Submission { key, prompt, output_len, stop_tokens: Vec::new(), priority: 0, adapter: None }
}

/// A token as it is cached: what an adapter makes of it.
fn cached(token: u32, adapter: Option<u32>) -> u32 {
    token + adapter.map_or(0, |adapter| 1_000 * (adapter + 1))
}

/// A model that is a function of the whole cache so far, so that a token computed from a wrong prefix, or one of another adapter, is wrong.
fn model(cache: &[u32]) -> u32 {
    cache.iter().fold(7, |state: u32, token| state.wrapping_mul(31).wrapping_add(token + 1)) % 5
}

/// What a request gets when it is served alone.
fn alone(prompt: &[u32], output_len: usize, adapter: Option<u32>) -> Vec<u32> {
    let mut cache: Vec<u32> = prompt.iter().map(|token| cached(*token, adapter)).collect();
    let next = |_| {
        let token = model(&cache);
        cache.push(cached(token, adapter));
        token
    };
    (0..output_len).map(next).collect()
}

/// An engine whose KV is the tokens themselves, written into blocks: it computes from what the blocks hold and nothing else, so a
/// block shared by accident, reused too early or never written shows as a wrong token.
struct PagedModel {
    size: usize,
    slots: Vec<Option<u32>>,
}

impl PagedModel {
    fn run(&mut self, scheduler: &Scheduler) -> Vec<u32> {
        let parts = &scheduler.batch().parts;
        for part in parts {
            let table = scheduler.block_table(part);
            for (offset, token) in scheduler.tokens(part).iter().enumerate() {
                let position = part.start + offset;
                let at = table[position / self.size] as usize * self.size + position % self.size;
                self.slots[at] = Some(cached(*token, part.adapter));
            }
        }
        parts
            .iter()
            .map(|part| {
                let table = scheduler.block_table(part);
                let sequence: Vec<u32> = (0..part.start + part.tokens)
                    .map(|p| {
                        self.slots[table[p / self.size] as usize * self.size + p % self.size]
                            .expect("a position that is read was written")
                    })
                    .collect();
                model(&sequence)
            })
            .collect()
    }
}

/// One random history: arrivals between steps, everything checked at every step.
struct History {
    scheduler: Scheduler,
    engine: PagedModel,
    prompts: HashMap<usize, (Vec<u32>, usize, Option<u32>)>,
    outputs: BTreeMap<usize, Vec<u32>>,
    finished: HashSet<usize>,
    first_scheduled: Vec<usize>,
    rejected: usize,
}

impl History {
    fn new(config: SchedulerConfig, hash_bits: Option<u32>) -> Self {
        let engine =
            PagedModel { size: config.block_size, slots: vec![None; config.num_blocks * config.block_size] };
        let pool = BlockPool::new(config.num_blocks, config.block_size, config.enable_prefix_caching);
        let pool = match hash_bits {
            Some(bits) => pool.with_hash_bits(bits),
            None => pool,
        };
        Self {
            scheduler: Scheduler::over(config, pool),
            engine,
            prompts: HashMap::new(),
            outputs: BTreeMap::new(),
            finished: HashSet::new(),
            first_scheduled: Vec::new(),
            rejected: 0,
        }
    }

    fn arrive(&mut self, submission: Submission) {
        let (key, kept) =
            (submission.key, (submission.prompt.clone(), submission.output_len, submission.adapter));
        let expected = Scheduler::check(self.scheduler.config(), kept.0.len(), kept.1);
        match self.scheduler.admit(submission) {
            Ok(_) => {
                assert_eq!(expected, Ok(()));
                self.prompts.insert(key, kept);
            }
            Err(reject) => {
                assert_eq!(expected, Err(reject));
                self.rejected += 1;
            }
        }
    }

    /// One step; `false` when there is nothing to do.
    fn step(&mut self) -> bool {
        let config = self.scheduler.config().clone();
        let had_work = self.scheduler.has_work();
        let batch = self.scheduler.next_batch().clone();
        assert_eq!(batch.parts.is_empty(), !had_work, "work that can be done is done: {batch:?}");
        if batch.parts.is_empty() {
            return false;
        }
        assert!(batch.token_count() <= config.max_num_batched_tokens, "budget of tokens");
        assert!(self.scheduler.load().running <= config.max_num_seqs, "budget of sequences");
        assert!(batch.parts.len() <= self.scheduler.load().running);
        let distinct: HashSet<u32> = batch.parts.iter().filter_map(|part| part.adapter).collect();
        assert_eq!(batch.adapters, distinct.len(), "adapters are counted once");
        assert!(config.max_loras.is_none_or(|most| distinct.len() <= most), "budget of adapters");
        self.check_blocks(&batch);
        for part in &batch.parts {
            if !self.first_scheduled.contains(&part.key) {
                self.first_scheduled.push(part.key);
            }
            if !config.enable_chunked_prefill {
                assert!(part.produces, "without chunking every part computes all there is");
            }
        }
        let tokens = self.engine.run(&self.scheduler);
        for emitted in self.scheduler.complete(&tokens).to_vec() {
            assert!(!self.finished.contains(&emitted.key), "served after it finished");
            let output = self.outputs.entry(emitted.key).or_default();
            output.push(emitted.token);
            assert_eq!(output.len(), emitted.index, "no token is emitted twice");
            if emitted.finished {
                self.finished.insert(emitted.key);
            }
        }
        true
    }

    /// No block is written by two, what is shared lies before what is written, and references are those of the tables.
    fn check_blocks(&self, batch: &Batch) {
        let size = self.scheduler.config().block_size;
        let mut written = HashSet::new();
        for part in &batch.parts {
            let table = self.scheduler.block_table(part);
            assert!(table.len() * size >= part.start + part.tokens, "the table covers the part");
            for block in &table[part.start / size..(part.start + part.tokens).div_ceil(size)] {
                assert!(written.insert(*block), "block {block} is written by two");
                assert_eq!(
                    self.scheduler.pool.references(*block),
                    1,
                    "a block that is written has one owner"
                );
            }
        }
        let mut references: HashMap<u32, u32> = HashMap::new();
        for request in self.scheduler.requests.iter().flatten() {
            for block in &request.blocks {
                *references.entry(*block).or_default() += 1;
            }
        }
        assert_eq!(self.scheduler.pool.used(), references.len());
        for (block, count) in references {
            assert_eq!(self.scheduler.pool.references(block), count);
        }
    }

    fn drain(&mut self) {
        // Every step makes at least one token of somebody, preemptions included, or the bound is passed.
        let bound =
            64 + self.prompts.values().map(|(p, o, _)| p.len() + o).sum::<usize>() * (self.prompts.len() + 1);
        let mut steps = 0;
        while self.step() {
            steps += 1;
            assert!(steps <= bound, "no end after {steps} steps");
        }
        assert_eq!(self.finished.len(), self.prompts.len(), "no request is lost");
        for (key, (prompt, output_len, adapter)) in &self.prompts {
            assert_eq!(self.outputs[key], alone(prompt, *output_len, *adapter), "request {key}");
        }
        if self.scheduler.config().scheduling == Policy::Fcfs {
            assert!(
                self.first_scheduled.is_sorted(),
                "first come, first started: {:?}",
                self.first_scheduled
            );
        }
        let load = self.scheduler.load();
        assert_eq!((load.running, load.waiting, load.used_blocks), (0, 0, 0), "all is given back");
        assert_eq!(self.scheduler.pool.free(), self.scheduler.pool.total());
    }
}

/// A short random history; few token values and shared stems make prefixes meet.
fn random_history(random: &mut ChaCha8Rng, fault: Option<Fault>) -> History {
    let block_size = random.random_range(1..=4);
    let config = SchedulerConfig {
        max_num_seqs: random.random_range(1..=5),
        max_num_batched_tokens: random.random_range(1..=24),
        block_size,
        num_blocks: random.random_range(1..=16),
        max_model_len: random.random_range(4..=40),
        enable_prefix_caching: random.random_bool(0.7),
        enable_chunked_prefill: random.random_bool(0.7),
        scheduling: if random.random_bool(0.5) { Policy::Fcfs } else { Policy::Priority },
        max_waiting: None,
        max_loras: random.random_bool(0.3).then(|| random.random_range(1..=2)),
    };
    let adapters = if random.random_bool(0.5) { random.random_range(1..=3) } else { 0 };
    let hash_bits = random.random_bool(0.3).then_some(2);
    let mut history = History::new(config, hash_bits);
    history.scheduler.pool.fault = fault;
    for key in 0..random.random_range(1..=7) {
        let stem: u32 = random.random_range(0..2);
        let length = random.random_range(0..=14);
        let shared = random.random_range(0..=length);
        let prompt = (0..length)
            .map(|i| if i < shared { stem } else { random.random_range(0..3) })
            .collect::<Vec<u32>>();
        let priority = random.random_range(-1..=1);
        let adapter = (adapters > 0 && random.random_bool(0.8)).then(|| random.random_range(0..adapters));
        history.arrive(Submission { priority, adapter, ..ask(key, prompt, random.random_range(0..=8)) });
        for _ in 0..random.random_range(0..4) {
            history.step();
        }
    }
    history
}

#[test]
fn a_hundred_thousand_random_histories_keep_every_promise() {
    let mut random = ChaCha8Rng::seed_from_u64(20_240_601);
    let (mut preemptions, mut hits, mut rejected, mut evictions, mut collisions) = (0, 0, 0, 0, 0);
    for _ in 0..100_000 {
        let mut history = random_history(&mut random, None);
        history.drain();
        preemptions += history.scheduler.preemptions();
        let counts = history.scheduler.cache_counts();
        hits += counts.hit_tokens;
        evictions += counts.evictions;
        collisions += counts.collisions;
        rejected += history.rejected;
    }
    // The histories reach what they are about.
    assert!(preemptions > 10_000 && hits > 30_000 && rejected > 10_000, "{preemptions} {hits} {rejected}");
    assert!(evictions > 10_000 && collisions > 10_000, "{evictions} {collisions}");
}

#[test]
fn every_planted_fault_is_seen_within_a_thousand_histories() {
    let faults = [
        Fault::SharesUncounted,
        Fault::BelievesHashes,
        Fault::LeaksBlocks,
        Fault::LosesPreempted,
        Fault::ExceedsBudget,
        Fault::PassesQueue,
        Fault::ForgetsAdapters,
        Fault::ExceedsAdapters,
    ];
    let seen = faults.map(|fault| {
        let mut random = ChaCha8Rng::seed_from_u64(99);
        (0..1_000).any(|_| {
            let broken = || random_history(&mut random, Some(fault)).drain();
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(broken)).is_err()
        })
    });
    for (fault, seen) in faults.into_iter().zip(seen) {
        assert!(seen, "{fault:?} was not seen");
    }
}

#[test]
fn a_request_whose_adapter_has_no_place_waits_and_nobody_passes_it() {
    let mut scheduler = Scheduler::new(SchedulerConfig { max_loras: Some(1), ..config() });
    for (key, adapter) in [(0, Some(0)), (1, Some(1)), (2, Some(0)), (3, None)] {
        scheduler.admit(Submission { adapter, ..ask(key, vec![1], 2) }).unwrap();
    }
    let keys = |batch: &Batch| batch.parts.iter().map(|p| p.key).collect::<Vec<_>>();
    assert_eq!(keys(scheduler.next_batch()), [0]);
    scheduler.complete(&[0]);
    assert_eq!(keys(scheduler.next_batch()), [0]);
    assert!(scheduler.complete(&[0])[0].finished);
    assert_eq!(keys(scheduler.next_batch()), [1], "its place is free; the next wants the old one");
    scheduler.complete(&[0]);
    scheduler.next_batch();
    scheduler.complete(&[0]);
    assert_eq!((keys(scheduler.next_batch()), scheduler.batch().adapters), (vec![2, 3], 1));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn every_history_drains_and_serves_what_one_at_a_time_would(seed in any::<u64>()) {
        random_history(&mut ChaCha8Rng::seed_from_u64(seed), None).drain();
    }

    #[test]
    fn first_come_is_first_started(seed in any::<u64>()) {
        let mut history = random_history(&mut ChaCha8Rng::seed_from_u64(seed), None);
        let fcfs = history.scheduler.config().scheduling == Policy::Fcfs;
        history.drain();
        if fcfs {
            prop_assert!(history.first_scheduled.is_sorted(), "{:?}", history.first_scheduled);
        }
    }
}

#[test]
fn prefill_is_cut_to_the_budget_and_mixed_with_decode() {
    let mut scheduler = Scheduler::new(SchedulerConfig { max_num_batched_tokens: 6, ..config() });
    scheduler.admit(ask(0, vec![1; 4], 3)).unwrap();
    scheduler.admit(ask(1, vec![2; 9], 1)).unwrap();
    let shape = |batch: &Batch| {
        batch.parts.iter().map(|p| (p.key, p.start, p.tokens, p.produces)).collect::<Vec<_>>()
    };
    assert_eq!(shape(scheduler.next_batch()), [(0, 0, 4, true), (1, 0, 2, false)]);
    scheduler.complete(&[0, 0]);
    assert_eq!(shape(scheduler.next_batch()), [(0, 4, 1, true), (1, 2, 5, false)]);
    scheduler.complete(&[0, 0]);
    assert_eq!(shape(scheduler.next_batch()), [(0, 5, 1, true), (1, 7, 2, true)]);
    assert!(scheduler.complete(&[0, 0]).iter().all(|e| e.finished));
    assert!(!scheduler.has_work());
}

#[test]
fn the_second_of_two_equal_prompts_computes_only_what_is_not_cached() {
    let mut scheduler = Scheduler::new(config());
    scheduler.admit(ask(0, vec![3; 12], 1)).unwrap();
    assert_eq!(scheduler.next_batch().parts[0].tokens, 12);
    scheduler.complete(&[0]);
    scheduler.admit(ask(1, vec![3; 12], 1)).unwrap();
    let part = scheduler.next_batch().parts[0];
    // Twelve tokens are three blocks; the last is computed again, because its logits are needed.
    assert_eq!((part.start, part.tokens), (8, 4));
    assert_eq!(scheduler.cache_counts().hit_tokens, 8);
}

#[test]
fn under_priority_the_lowest_number_goes_first_and_yields_last() {
    let priority = SchedulerConfig {
        scheduling: Policy::Priority,
        max_num_seqs: 2,
        num_blocks: 4,
        block_size: 1,
        enable_prefix_caching: false,
        ..config()
    };
    let mut scheduler = Scheduler::new(priority);
    for (key, priority) in [(0, 5), (1, 1), (2, 3)] {
        scheduler.admit(Submission { priority, ..ask(key, vec![1], 4) }).unwrap();
    }
    let keys = |batch: &Batch| batch.parts.iter().map(|p| p.key).collect::<Vec<_>>();
    assert_eq!(keys(scheduler.next_batch()), [1, 2]);
    scheduler.complete(&[0, 0]);
    assert_eq!(keys(scheduler.next_batch()), [1, 2]);
    scheduler.complete(&[0, 0]);
    // Two positions each are all there is; the third of request 1 takes those of request 2.
    let batch = scheduler.next_batch();
    assert_eq!((keys(batch), batch.preempted.clone()), (vec![1], vec![2]));
}

#[test]
fn what_can_never_be_served_is_rejected_by_name() {
    let small = SchedulerConfig { num_blocks: 4, enable_chunked_prefill: false, ..config() };
    let check = |prompt, output| Scheduler::check(&small, prompt, output);
    assert_eq!(check(0, 1), Err(Reject::EmptyPrompt));
    assert_eq!(check(1, 0), Err(Reject::EmptyOutput));
    assert_eq!(check(64, 1), Err(Reject::ExceedsContext));
    assert_eq!(check(usize::MAX, usize::MAX), Err(Reject::ExceedsContext));
    assert_eq!(check(16, 2), Err(Reject::ExceedsPool));
    assert_eq!(check(16, 1), Ok(()));
    let wide = SchedulerConfig { num_blocks: 16, ..small.clone() };
    assert_eq!(Scheduler::check(&wide, 17, 1), Err(Reject::ExceedsBudget));
    let mut scheduler = Scheduler::new(SchedulerConfig { max_waiting: Some(1), ..config() });
    scheduler.admit(ask(0, vec![1], 1)).unwrap();
    assert_eq!(scheduler.admit(ask(1, vec![1], 1)), Err(Reject::QueueFull));
}

#[test]
fn a_stop_token_ends_an_output_early() {
    let mut scheduler = Scheduler::new(config());
    scheduler.admit(Submission { stop_tokens: vec![9], ..ask(0, vec![1], 5) }).unwrap();
    scheduler.next_batch();
    assert!(!scheduler.complete(&[8])[0].finished);
    scheduler.next_batch();
    assert!(scheduler.complete(&[9])[0].finished);
    assert!(!scheduler.has_work());
}

#[test]
fn a_failed_step_drops_its_requests_and_keeps_the_others() {
    let mut scheduler = Scheduler::new(SchedulerConfig { max_num_seqs: 1, ..config() });
    scheduler.admit(ask(0, vec![1], 2)).unwrap();
    scheduler.admit(ask(1, vec![1], 2)).unwrap();
    scheduler.next_batch();
    assert_eq!(scheduler.abandon(), [0]);
    assert_eq!(scheduler.load().used_blocks, 0);
    let batch = scheduler.next_batch();
    assert_eq!((batch.parts[0].key, batch.dropped.len()), (1, 1));
}
