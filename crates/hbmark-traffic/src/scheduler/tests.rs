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
        ..SchedulerConfig::UNLIMITED
    }
}

fn ask(key: usize, prompt: Vec<u32>, output_len: usize) -> Request {
    Request { key, prompt, output_len, stop_tokens: Vec::new(), priority: 0, adapter: None }
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
        let batch = &scheduler.batch().scheduled;
        for seq in batch {
            let table = scheduler.block_table(seq);
            for (offset, token) in scheduler.tokens(seq).iter().enumerate() {
                let position = seq.start + offset;
                let at = table[position / self.size] as usize * self.size + position % self.size;
                self.slots[at] = Some(cached(*token, seq.adapter));
            }
        }
        batch
            .iter()
            .map(|seq| {
                let table = scheduler.block_table(seq);
                let rejected = seq.draft_tokens - scheduler.accepted(seq);
                let sequence: Vec<u32> = (0..seq.start + seq.tokens - rejected)
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

    fn arrive(&mut self, request: Request) {
        let (key, kept) = (request.key, (request.prompt.clone(), request.output_len, request.adapter));
        let expected = Scheduler::check(self.scheduler.config(), kept.0.len(), kept.1);
        match self.scheduler.add_request(request) {
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
        assert_eq!(batch.scheduled.is_empty(), !had_work, "work that can be done is done: {batch:?}");
        if batch.scheduled.is_empty() {
            return false;
        }
        assert!(batch.token_count() <= config.max_num_batched_tokens, "budget of tokens");
        assert!(self.scheduler.load().running <= config.max_num_seqs, "budget of sequences");
        assert!(batch.scheduled.len() <= self.scheduler.load().running);
        let distinct: HashSet<u32> = batch.scheduled.iter().filter_map(|seq| seq.adapter).collect();
        assert_eq!(batch.adapters, distinct.len(), "adapters are counted once");
        assert!(config.max_loras.is_none_or(|most| distinct.len() <= most), "budget of adapters");
        self.check_blocks(&batch);
        for seq in &batch.scheduled {
            if !self.first_scheduled.contains(&seq.key) {
                self.first_scheduled.push(seq.key);
            }
            if !config.enable_chunked_prefill {
                assert!(seq.produces_token, "without chunking every part computes all there is");
            }
        }
        let mut accepted: HashMap<usize, usize> =
            batch.scheduled.iter().map(|seq| (seq.key, self.scheduler.accepted(seq))).collect();
        let tokens = self.engine.run(&self.scheduler);
        for emitted in self.scheduler.complete(&tokens).to_vec() {
            assert!(!self.finished.contains(&emitted.key), "served after it finished");
            let output = self.outputs.entry(emitted.key).or_default();
            let (prompt, _, adapter) = &self.prompts[&emitted.key];
            let so_far: Vec<u32> = prompt.iter().chain(&*output).copied().collect();
            let left = accepted.get_mut(&emitted.key).unwrap();
            let expected = if *left > 0 {
                *left -= 1;
                so_far[so_far.len() % prompt.len()]
            } else {
                model(&so_far.iter().map(|token| cached(*token, *adapter)).collect::<Vec<u32>>())
            };
            assert_eq!(emitted.token, expected, "what was accepted, and then what the model makes of it");
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
        for seq in &batch.scheduled {
            let table = self.scheduler.block_table(seq);
            assert!(table.len() * size >= seq.start + seq.tokens, "the table covers the part");
            for block in &table[seq.start / size..(seq.start + seq.tokens).div_ceil(size)] {
                assert!(written.insert(*block), "block {block} is written by two");
                assert_eq!(self.scheduler.pool.ref_count(*block), 1, "a block that is written has one owner");
            }
        }
        let mut references: HashMap<u32, u32> = HashMap::new();
        for request in self.scheduler.requests.iter().flatten() {
            for block in &request.blocks {
                *references.entry(*block).or_default() += 1;
            }
        }
        assert_eq!(self.scheduler.pool.num_used_blocks(), references.len());
        for (block, count) in references {
            assert_eq!(self.scheduler.pool.ref_count(block), count);
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
            assert_eq!(self.outputs[key].len(), *output_len, "request {key}");
            if self.scheduler.config().speculation.is_none() {
                assert_eq!(self.outputs[key], alone(prompt, *output_len, *adapter), "request {key}");
            }
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
        assert_eq!(self.scheduler.pool.num_free_blocks(), self.scheduler.pool.num_blocks());
    }
}

/// A short random history; few token values and shared stems make prefixes meet.
fn random_history(random: &mut ChaCha8Rng, fault: Option<SchedulerBug>) -> History {
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
        max_loras: random.random_bool(0.3).then(|| random.random_range(1..=2)),
        speculation: random.random_bool(0.4).then(|| {
            let mut rates: Vec<f64> = (0..random.random_range(1..=4)).map(|_| random.random()).collect();
            rates.sort_by(|a, b| b.total_cmp(a));
            SpeculativeConfig { synthetic_acceptance_rates: rates, seed: random.random() }
        }),
        ..SchedulerConfig::UNLIMITED
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
        history.arrive(Request { priority, adapter, ..ask(key, prompt, random.random_range(0..=8)) });
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
    let (mut drafted, mut accepted) = (0, 0);
    for _ in 0..100_000 {
        let mut history = random_history(&mut random, None);
        history.drain();
        preemptions += history.scheduler.preemptions();
        let counts = history.scheduler.cache_stats();
        hits += counts.hit_tokens;
        evictions += counts.evictions;
        collisions += counts.collisions;
        rejected += history.rejected;
        if let Some(drafts) = history.scheduler.drafts() {
            drafted += drafts.num_draft_tokens;
            accepted += drafts.num_accepted_tokens;
            assert_eq!(drafts.num_accepted_tokens, drafts.num_accepted_tokens_per_pos.iter().sum::<u64>());
        }
    }
    // The histories reach what they are about.
    assert!(preemptions > 5_000 && hits > 30_000 && rejected > 10_000, "{preemptions} {hits} {rejected}");
    assert!(evictions > 10_000 && collisions > 10_000, "{evictions} {collisions}");
    assert!(drafted > accepted + 10_000 && accepted > 10_000, "{drafted} {accepted}");
}

#[test]
fn every_planted_fault_is_seen_within_a_thousand_histories() {
    let faults = [
        SchedulerBug::SkipsRefcount,
        SchedulerBug::TrustsHashes,
        SchedulerBug::LeaksBlocks,
        SchedulerBug::LosesPreempted,
        SchedulerBug::ExceedsBudget,
        SchedulerBug::BreaksOrder,
        SchedulerBug::ForgetsAdapters,
        SchedulerBug::ExceedsAdapters,
        SchedulerBug::KeepsRejectedDrafts,
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
        scheduler.add_request(Request { adapter, ..ask(key, vec![1], 2) }).unwrap();
    }
    let keys = |batch: &Batch| batch.scheduled.iter().map(|p| p.key).collect::<Vec<_>>();
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
    scheduler.add_request(ask(0, vec![1; 4], 3)).unwrap();
    scheduler.add_request(ask(1, vec![2; 9], 1)).unwrap();
    let shape = |batch: &Batch| {
        batch.scheduled.iter().map(|p| (p.key, p.start, p.tokens, p.produces_token)).collect::<Vec<_>>()
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
    scheduler.add_request(ask(0, vec![3; 12], 1)).unwrap();
    assert_eq!(scheduler.next_batch().scheduled[0].tokens, 12);
    scheduler.complete(&[0]);
    scheduler.add_request(ask(1, vec![3; 12], 1)).unwrap();
    let seq = scheduler.next_batch().scheduled[0];
    // Twelve tokens are three blocks; the last is computed again, because its logits are needed.
    assert_eq!((seq.start, seq.tokens), (8, 4));
    assert_eq!(scheduler.cache_stats().hit_tokens, 8);
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
        scheduler.add_request(Request { priority, ..ask(key, vec![1], 4) }).unwrap();
    }
    let keys = |batch: &Batch| batch.scheduled.iter().map(|p| p.key).collect::<Vec<_>>();
    assert_eq!(keys(scheduler.next_batch()), [1, 2]);
    scheduler.complete(&[0, 0]);
    assert_eq!(keys(scheduler.next_batch()), [1, 2]);
    scheduler.complete(&[0, 0]);
    // Two positions each are all there is; the third of request 1 takes those of request 2.
    let batch = scheduler.next_batch();
    assert_eq!((keys(batch), batch.preempted.clone()), (vec![1], vec![2]));
}

/// As in vLLM: what runs keeps its place, and priority decides who is admitted and who yields.
#[test]
fn an_urgent_prompt_takes_no_step_from_requests_that_run() {
    let priority = SchedulerConfig { scheduling: Policy::Priority, ..config() };
    let budget = priority.max_num_batched_tokens;
    let mut scheduler = Scheduler::new(priority);
    for key in 0..2 {
        scheduler.add_request(Request { priority: 1, ..ask(key, vec![1], 40) }).unwrap();
    }
    scheduler.next_batch();
    scheduler.complete(&[0, 0]);
    scheduler.add_request(ask(2, vec![2; 3 * budget], 1)).unwrap();
    for _ in 0..3 {
        let batch = scheduler.next_batch();
        let tokens: Vec<_> = batch.scheduled.iter().map(|seq| (seq.key, seq.tokens)).collect();
        assert_eq!(tokens, [(0, 1), (1, 1), (2, budget - 2)]);
        scheduler.complete(&[0, 0, 0]);
    }
}

/// The one that needs blocks was admitted last and is the most urgent: the others yield, though the step had room for them.
#[test]
fn who_yields_leaves_the_batch_that_was_being_made() {
    let priority = SchedulerConfig {
        scheduling: Policy::Priority,
        max_num_seqs: 3,
        num_blocks: 6,
        block_size: 1,
        enable_prefix_caching: false,
        ..config()
    };
    let mut scheduler = Scheduler::new(priority);
    for (key, priority) in [(0, 5), (1, 3)] {
        scheduler.add_request(Request { priority, ..ask(key, vec![1], 4) }).unwrap();
    }
    scheduler.next_batch();
    scheduler.complete(&[0, 0]);
    scheduler.add_request(Request { priority: 1, ..ask(2, vec![1], 4) }).unwrap();
    let keys = |batch: &Batch| batch.scheduled.iter().map(|p| p.key).collect::<Vec<_>>();
    assert_eq!(keys(scheduler.next_batch()), [1, 0, 2]);
    scheduler.complete(&[0, 0, 0]);
    // Request 1 has the sixth block; request 0, the least urgent, yields to itself, and request 2 has one of its two.
    let batch = scheduler.next_batch();
    assert_eq!((keys(batch), batch.preempted.clone()), (vec![1, 2], vec![0]));
    scheduler.complete(&[0, 0]);
    // Request 1 has the last one, stands in the batch already, and yields to request 2.
    let batch = scheduler.next_batch();
    assert_eq!((keys(batch), batch.preempted.clone()), (vec![2], vec![1]));
}

#[test]
fn what_can_never_be_served_is_rejected_by_name() {
    let small = SchedulerConfig { num_blocks: 4, enable_chunked_prefill: false, ..config() };
    let check = |prompt, output| Scheduler::check(&small, prompt, output);
    assert_eq!(check(0, 1), Err(RejectReason::EmptyPrompt));
    assert_eq!(check(1, 0), Err(RejectReason::EmptyOutput));
    assert_eq!(check(64, 1), Err(RejectReason::ExceedsContext));
    assert_eq!(check(usize::MAX, usize::MAX), Err(RejectReason::ExceedsContext));
    assert_eq!(check(16, 2), Err(RejectReason::ExceedsPool));
    assert_eq!(check(16, 1), Ok(()));
    let wide = SchedulerConfig { num_blocks: 16, ..small.clone() };
    assert_eq!(Scheduler::check(&wide, 17, 1), Err(RejectReason::ExceedsBudget));
    let mut scheduler = Scheduler::new(SchedulerConfig { max_waiting: Some(1), ..config() });
    scheduler.add_request(ask(0, vec![1], 1)).unwrap();
    assert_eq!(scheduler.add_request(ask(1, vec![1], 1)), Err(RejectReason::QueueFull));
}

#[test]
fn a_stop_token_ends_an_output_early() {
    let mut scheduler = Scheduler::new(config());
    scheduler.add_request(Request { stop_tokens: vec![9], ..ask(0, vec![1], 5) }).unwrap();
    scheduler.next_batch();
    assert!(!scheduler.complete(&[8])[0].finished);
    scheduler.next_batch();
    assert!(scheduler.complete(&[9])[0].finished);
    assert!(!scheduler.has_work());
}

#[test]
fn a_failed_step_drops_its_requests_and_keeps_the_others() {
    let mut scheduler = Scheduler::new(SchedulerConfig { max_num_seqs: 1, ..config() });
    scheduler.add_request(ask(0, vec![1], 2)).unwrap();
    scheduler.add_request(ask(1, vec![1], 2)).unwrap();
    scheduler.next_batch();
    assert_eq!(scheduler.abort_batch(), [0]);
    assert_eq!(scheduler.load().used_blocks, 0);
    let batch = scheduler.next_batch();
    assert_eq!((batch.scheduled[0].key, batch.dropped.len()), (1, 1));
}

fn speculating(rates: &[f64]) -> Scheduler {
    let speculation = SpeculativeConfig { synthetic_acceptance_rates: rates.to_vec(), seed: 7 };
    Scheduler::new(SchedulerConfig { speculation: Some(speculation), ..config() })
}

#[test]
fn a_verify_step_brings_accepted_draft_tokens_and_one_more_and_never_more_than_was_asked_for() {
    let mut scheduler = speculating(&[1.0, 1.0, 1.0]);
    scheduler.add_request(ask(0, vec![5, 6, 8], 6)).unwrap();
    let mut step = || {
        let part = scheduler.next_batch().scheduled[0];
        let tokens = scheduler.tokens(&part).to_vec();
        let emitted: Vec<u32> = scheduler.complete(&[9]).iter().map(|token| token.token).collect();
        (part.tokens, part.draft_tokens, tokens, emitted)
    };
    assert_eq!(step(), (3, 0, vec![5, 6, 8], vec![9]));
    // Behind four tokens the draft goes on with the prompt's second, its third, and its first.
    assert_eq!(step(), (4, 3, vec![9, 6, 8, 5], vec![6, 8, 5, 9]));
    // One token is left, and a step brings one without any draft.
    assert_eq!(step(), (1, 0, vec![9], vec![9]));
    let drafts = scheduler.drafts().unwrap();
    assert_eq!(drafts.mean_acceptance_length(), Some(4.0));
    assert_eq!((drafts.num_drafts, drafts.num_accepted_tokens_per_pos.as_slice()), (1, &[1, 1, 1][..]));
    assert!(!scheduler.has_work());
}

#[test]
fn a_stop_token_among_accepted_draft_tokens_ends_the_output_there() {
    let mut scheduler = speculating(&[1.0, 1.0, 1.0]);
    scheduler.add_request(Request { stop_tokens: vec![8], ..ask(0, vec![5, 6, 8], 6) }).unwrap();
    scheduler.next_batch();
    scheduler.complete(&[9]);
    scheduler.next_batch();
    let emitted: Vec<(u32, bool)> =
        scheduler.complete(&[9]).iter().map(|token| (token.token, token.finished)).collect();
    assert_eq!(emitted, [(6, false), (8, true)]);
    assert_eq!(scheduler.load().used_blocks, 0);
}

#[test]
fn as_many_draft_tokens_are_accepted_as_the_rates_say() {
    let rates = [0.8, 0.5, 0.1];
    let config = SpeculativeConfig { synthetic_acceptance_rates: rates.to_vec(), seed: 3 };
    let steps = 20_000;
    let mut counts = DraftCounts { num_accepted_tokens_per_pos: vec![0; 3], ..DraftCounts::default() };
    for step in 0..steps {
        counts.count(3, config.accepted(step / 100, step % 100, 3));
    }
    for (found, rate) in counts.num_accepted_tokens_per_pos.iter().zip(rates) {
        // Five standard errors of a share.
        let bound = 5.0 * (rate * (1.0 - rate) / steps as f64).sqrt();
        assert!((*found as f64 / steps as f64 - rate).abs() < bound, "{found} of {steps} for {rate}");
    }
    assert!((counts.mean_acceptance_length().unwrap() - 2.4).abs() < 0.03);
}
