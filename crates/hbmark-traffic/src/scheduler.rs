//! A continuous-batching scheduler: which tokens of which requests the next step runs.
//!
//! Enters: requests ([`add_request`](Scheduler::add_request)) and the tokens a step produced ([`complete`](Scheduler::complete)). Leaves: the next
//! [`Batch`] with block tables, and the output tokens. It owns no clock and no model, so the same scheduler serves a real engine and a
//! simulated one.
//!
//! The policy and the option names are vLLM's: a step first schedules running requests, in order of admission, then admits waiting ones
//! while the token budget, the number of sequences and the blocks allow. When blocks run out, the running request of the lowest rank is
//! preempted: it frees its blocks, returns to the queue and is recomputed (from whatever prefix is still cached). Rank is arrival, or
//! priority and then arrival. Because the lowest rank is preempted first and a request that could not run alone is rejected on
//! arrival, the highest rank always advances: nothing starves under first come, first served.

mod adapters;

use std::collections::BTreeSet;

use adapters::AdapterUse;
use serde::{Deserialize, Serialize};

use super::block_pool::{BlockPool, CacheStats, PrefixId};
use hbmark_core::ledger::RaggedPart;
use hbmark_core::result::serving::{DraftCounts, Policy, SchedulerConfig, SpeculativeConfig};

#[cfg(test)]
use super::block_pool::SchedulerBug;

/// A request as the scheduler sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The caller's id.
    pub key: usize,
    pub prompt: Vec<u32>,
    /// Tokens to generate.
    pub output_len: usize,
    /// Tokens that end the output early; empty where the length is forced.
    pub stop_tokens: Vec<u32>,
    /// Lower is served first under [`Policy::Priority`].
    pub priority: i32,
    /// Its LoRA adapter; only requests of the same adapter share prefixes.
    pub adapter: Option<u32>,
}

/// Why a request is not served. Rejects are results and are counted by reason.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, thiserror::Error, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum RejectReason {
    #[error("the prompt is empty")]
    EmptyPrompt,
    #[error("no output was asked for")]
    EmptyOutput,
    #[error("prompt and output are longer than the model's context")]
    ExceedsContext,
    #[error("prompt and output need more KV blocks than there are")]
    ExceedsPool,
    #[error("without chunked prefill the prompt must fit one step's budget of tokens")]
    ExceedsBudget,
    #[error("the queue is full")]
    QueueFull,
    #[error("the engine failed while it was served")]
    EngineFailed,
}

/// A handle on an admitted request, valid until it finishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(u32);

/// One request's part of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScheduledSequence {
    pub slot: Slot,
    pub key: usize,
    /// Unique to this run of the request: a new id after a preemption.
    pub sequence: u64,
    /// Position of the first token.
    pub start: usize,
    pub tokens: usize,
    /// Of the tokens, the last ones that a draft proposed.
    pub draft_tokens: usize,
    /// Whether the step computes the last known token, and so produces the next one.
    pub produces_token: bool,
    /// Whether this is the request's first step since it arrived or was preempted.
    pub is_first_step: bool,
    pub adapter: Option<u32>,
}

impl ScheduledSequence {
    /// What its time depends on.
    pub fn part(&self) -> RaggedPart {
        RaggedPart { cached: self.start, tokens: self.tokens, draft_tokens: self.draft_tokens }
    }
}

/// One step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Batch {
    /// In order of rank.
    pub scheduled: Vec<ScheduledSequence>,
    /// Sequences whose KV an engine with a cache of its own may drop: they finished or were preempted since the last batch.
    pub dropped: Vec<u64>,
    /// Requests preempted to make this batch.
    pub preempted: Vec<usize>,
    /// Distinct adapters in the batch.
    pub adapters: usize,
}

impl Batch {
    /// Tokens of all sequences.
    pub fn token_count(&self) -> usize {
        self.scheduled.iter().map(|seq| seq.tokens).sum()
    }
}

/// An output token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EmittedToken {
    pub key: usize,
    pub token: u32,
    /// Tokens of the request's output so far, this one included.
    pub index: usize,
    pub finished: bool,
}

/// The load of a scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SchedulerLoad {
    pub running: usize,
    pub waiting: usize,
    pub used_blocks: usize,
    pub total_blocks: usize,
    /// Entries in the block tables of running requests; a shared block counts for each. More used blocks than this are leaked.
    pub held_blocks: usize,
}

#[derive(Debug, Clone)]
struct RequestState {
    key: usize,
    rank: Rank,
    /// Prompt, then output.
    tokens: Vec<u32>,
    prompt_len: usize,
    output_len: usize,
    stop_tokens: Vec<u32>,
    /// Tokens whose KV is in the blocks.
    computed: usize,
    sequence: u64,
    blocks: Vec<u32>,
    /// Leading blocks that are cached, and the prefix they end with.
    cached_blocks: usize,
    prefix: PrefixId,
    started: bool,
    adapter: Option<u32>,
}

/// Priority, then order of admission.
type Rank = (i32, u64);

/// The scheduler.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    pool: BlockPool,
    requests: Vec<Option<RequestState>>,
    vacant: Vec<u32>,
    waiting: BTreeSet<(Rank, u32)>,
    /// In order of rank.
    running: Vec<(Rank, u32)>,
    batch: Batch,
    emitted: Vec<EmittedToken>,
    found: Vec<u32>,
    admitted: u64,
    sequences: u64,
    preemptions: u64,
    /// Sequences that ended since the last batch.
    ended: Vec<u64>,
    /// A batch was handed out and not completed.
    in_flight: bool,
    adapters: AdapterUse,
    drafts: Option<DraftCounts>,
}

impl Scheduler {
    /// A scheduler without requests.
    ///
    /// # Panics
    /// When a limit is 0.
    pub fn new(config: SchedulerConfig) -> Self {
        assert!(
            config.max_num_seqs > 0 && config.max_num_batched_tokens > 0,
            "a step must be able to hold something"
        );
        let pool = BlockPool::new(config.num_blocks, config.block_size, config.enable_prefix_caching);
        Self::over(config, pool)
    }

    fn over(config: SchedulerConfig, pool: BlockPool) -> Self {
        let drafts = config.speculation.as_ref().map_or(0, SpeculativeConfig::num_speculative_tokens);
        Self {
            pool,
            requests: Vec::new(),
            vacant: Vec::new(),
            waiting: BTreeSet::new(),
            running: Vec::with_capacity(config.max_num_seqs.min(SchedulerConfig::MAX_NUM_SEQS) + 1),
            batch: Batch::default(),
            emitted: Vec::with_capacity(
                config.max_num_seqs.min(SchedulerConfig::MAX_NUM_SEQS) * (drafts + 1),
            ),
            drafts: config.speculation.as_ref().map(|speculation| DraftCounts {
                num_accepted_tokens_per_pos: vec![0; speculation.num_speculative_tokens()],
                ..DraftCounts::default()
            }),
            found: Vec::new(),
            admitted: 0,
            sequences: 0,
            preemptions: 0,
            ended: Vec::new(),
            in_flight: false,
            adapters: AdapterUse::default(),
            config,
        }
    }

    /// Plants a leak for tests of the KV accounting: blocks that are allocated and never freed.
    pub fn with_leaked_blocks(mut self, count: usize) -> Self {
        for _ in 0..count {
            self.pool.allocate();
        }
        self
    }

    /// The configuration.
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// Whether a request of these lengths can ever be served, for checks before a run.
    ///
    /// # Errors
    /// The reason it would be rejected.
    pub fn check(config: &SchedulerConfig, prompt_len: usize, output_len: usize) -> Result<(), RejectReason> {
        if prompt_len == 0 {
            return Err(RejectReason::EmptyPrompt);
        }
        if output_len == 0 {
            return Err(RejectReason::EmptyOutput);
        }
        let whole = prompt_len.saturating_add(output_len);
        if whole > config.max_model_len {
            return Err(RejectReason::ExceedsContext);
        }
        // The last token is read and never written.
        if (whole - 1).div_ceil(config.block_size) > config.num_blocks {
            return Err(RejectReason::ExceedsPool);
        }
        // A preempted request computes its output again, in one step.
        if !config.enable_chunked_prefill && whole - 1 > config.max_num_batched_tokens {
            return Err(RejectReason::ExceedsBudget);
        }
        Ok(())
    }

    /// Adds a request to the queue.
    ///
    /// # Errors
    /// The reason for its rejection.
    ///
    /// # Panics
    /// With 2^32 requests at once.
    pub fn add_request(&mut self, request: Request) -> Result<Slot, RejectReason> {
        Self::check(&self.config, request.prompt.len(), request.output_len)?;
        if self.config.max_waiting.is_some_and(|most| self.waiting.len() >= most) {
            return Err(RejectReason::QueueFull);
        }
        let Request { key, prompt: mut tokens, output_len, stop_tokens, priority, adapter } = request;
        self.adapters.register(adapter);
        let priority = if self.config.scheduling == Policy::Priority { priority } else { 0 };
        let rank = (priority, self.admitted);
        self.admitted += 1;
        let prompt_len = tokens.len();
        // Reserved now, so that no step allocates.
        tokens.reserve_exact(output_len);
        let request = RequestState {
            key,
            rank,
            prompt_len,
            blocks: Vec::with_capacity(self.pool.blocks_for(prompt_len + output_len)),
            tokens,
            output_len,
            stop_tokens,
            computed: 0,
            sequence: 0,
            cached_blocks: 0,
            prefix: self.root(adapter),
            started: false,
            adapter,
        };
        let slot = self.vacant.pop().unwrap_or_else(|| {
            self.requests.push(None);
            u32::try_from(self.requests.len() - 1).expect("fewer than 2^32 requests at once")
        });
        self.requests[slot as usize] = Some(request);
        self.waiting.insert((rank, slot));
        Ok(Slot(slot))
    }

    /// Schedules the next step. An empty batch means that there is nothing to do.
    ///
    /// # Panics
    /// When the last batch was not completed.
    pub fn next_batch(&mut self) -> &Batch {
        assert!(!self.in_flight, "a batch is completed before the next is made");
        self.batch.scheduled.clear();
        self.batch.preempted.clear();
        self.batch.dropped.clear();
        self.batch.adapters = 0;
        self.adapters.next_batch();
        let mut budget = self.config.max_num_batched_tokens;
        #[cfg(test)]
        if self.pool.fault == Some(SchedulerBug::ExceedsBudget) {
            budget += 1;
        }
        self.schedule_running(&mut budget);
        if self.batch.preempted.is_empty() {
            self.schedule_waiting(&mut budget);
        }
        for seq in &self.batch.scheduled {
            self.batch.adapters += usize::from(self.adapters.is_new(seq.adapter));
        }
        self.batch.dropped.append(&mut self.ended);
        self.in_flight = !self.batch.scheduled.is_empty();
        &self.batch
    }

    fn schedule_running(&mut self, budget: &mut usize) {
        let mut index = 0;
        while index < self.running.len() && *budget > 0 {
            let slot = self.running[index].1;
            let request = self.request(slot);
            let known = request.tokens.len() - request.computed;
            let draft_tokens = self.draft_tokens(request, *budget);
            let tokens = (known + draft_tokens).min(*budget);
            let positions = request.computed + tokens;
            let before = self.batch.scheduled.len();
            let has_blocks = self.ensure_blocks(slot, positions, budget);
            // Those that were preempted for it, and stood before it.
            index -= before - self.batch.scheduled.len();
            if !has_blocks {
                // It had the lowest rank and was preempted itself: behind it stands the next.
                continue;
            }
            self.propose(slot, draft_tokens);
            self.push_scheduled(slot, tokens, draft_tokens);
            *budget -= tokens;
            index += 1;
        }
    }

    /// Draft tokens of a request that decodes: no more than the budget holds beside the last token, and than could be of use.
    fn draft_tokens(&self, request: &RequestState, budget: usize) -> usize {
        let Some(speculation) = &self.config.speculation else { return 0 };
        let generated = request.tokens.len() - request.prompt_len;
        if generated == 0 || request.tokens.len() - request.computed != 1 {
            return 0;
        }
        speculation.num_speculative_tokens().min(budget - 1).min(request.output_len - generated - 1)
    }

    /// Puts draft tokens behind those of a request until the step is done: tokens of its prompt, as where a draft looks them up there.
    fn propose(&mut self, slot: u32, draft_tokens: usize) {
        let request = self.request_mut(slot);
        for _ in 0..draft_tokens {
            let from = request.tokens.len() % request.prompt_len;
            request.tokens.push(request.tokens[from]);
        }
    }

    /// Gives a running request blocks for a number of positions, and preempts requests of lower rank where needed. `false` when it had to
    /// be preempted itself.
    fn ensure_blocks(&mut self, slot: u32, positions: usize, budget: &mut usize) -> bool {
        loop {
            if self.extend(slot, positions) {
                return true;
            }
            let &(_, victim) = self.running.iter().max().expect("the request itself runs");
            *budget += self.unschedule(victim);
            self.preempt(victim);
            if victim == slot {
                return false;
            }
        }
    }

    /// Takes a request that is to be preempted out of the batch that is being made; the tokens that it had of the budget.
    fn unschedule(&mut self, victim: u32) -> usize {
        let Some(at) = self.batch.scheduled.iter().position(|seq| seq.slot.0 == victim) else { return 0 };
        let seq = self.batch.scheduled.remove(at);
        let request = self.request_mut(victim);
        request.tokens.truncate(request.tokens.len() - seq.draft_tokens);
        seq.tokens
    }

    fn schedule_waiting(&mut self, budget: &mut usize) {
        while self.running.len() < self.config.max_num_seqs && *budget > 0 {
            let next = self.waiting.first();
            #[cfg(test)]
            let next =
                if self.pool.fault == Some(SchedulerBug::BreaksOrder) { self.waiting.last() } else { next };
            let Some(&(rank, slot)) = next else { break };
            let mut found = std::mem::take(&mut self.found);
            found.clear();
            let request = self.requests[slot as usize].as_ref().expect("a waiting request exists");
            let whole = request.tokens.len();
            let adapter = request.adapter;
            let most = self.config.max_loras;
            #[cfg(test)]
            let most =
                most.map(|most| most + usize::from(self.pool.fault == Some(SchedulerBug::ExceedsAdapters)));
            if !self.adapters.fits(adapter, most) {
                self.found = found;
                break;
            }
            // At least one token is computed, or there would be no logits.
            let root = self.root(adapter);
            let prefix = self.pool.find_cached_prefix(root, &request.tokens[..whole - 1], &mut found);
            let hit = found.len() * self.config.block_size;
            let wanted = whole - hit;
            let tokens = wanted.min(*budget);
            let fits = self.config.enable_chunked_prefill || wanted <= *budget;
            let needed = self.pool.blocks_for(hit + tokens) - found.len() + self.pool.unreferenced(&found);
            if !fits || needed > self.pool.num_free_blocks() {
                self.found = found;
                break;
            }
            self.waiting.remove(&(rank, slot));
            self.pool.incref(&found);
            self.sequences += 1;
            let sequence = self.sequences;
            let request = self.request_mut(slot);
            // A preempted request that hits its own blocks does not count as a cache hit.
            if request.sequence == 0 {
                self.pool.record_lookup(whole, hit);
            }
            let request = self.request_mut(slot);
            request.sequence = sequence;
            request.blocks.extend_from_slice(&found);
            request.cached_blocks = found.len();
            request.prefix = prefix;
            request.computed = hit;
            request.started = false;
            self.found = found;
            assert!(self.extend(slot, hit + tokens), "room was checked above");
            self.adapters.start(adapter);
            self.running.push((rank, slot));
            self.push_scheduled(slot, tokens, 0);
            *budget -= tokens;
        }
    }

    fn push_scheduled(&mut self, slot: u32, tokens: usize, draft_tokens: usize) {
        let request = self.request_mut(slot);
        let seq = ScheduledSequence {
            slot: Slot(slot),
            key: request.key,
            sequence: request.sequence,
            start: request.computed,
            tokens,
            draft_tokens,
            produces_token: request.computed + tokens == request.tokens.len(),
            is_first_step: !std::mem::replace(&mut request.started, true),
            adapter: request.adapter,
        };
        self.batch.scheduled.push(seq);
    }

    /// Allocates blocks for a number of positions of a request; none when there are too few.
    fn extend(&mut self, slot: u32, positions: usize) -> bool {
        let needed = self.pool.blocks_for(positions);
        let request = self.requests[slot as usize].as_mut().expect("a scheduled request exists");
        if needed.saturating_sub(request.blocks.len()) > self.pool.num_free_blocks() {
            return false;
        }
        while request.blocks.len() < needed {
            request.blocks.push(self.pool.allocate().expect("counted above"));
        }
        true
    }

    fn preempt(&mut self, slot: u32) {
        let at = self.running.iter().position(|r| r.1 == slot).expect("only what runs is preempted");
        let (rank, _) = self.running.remove(at);
        self.free(slot);
        let key = self.request(slot).key;
        self.batch.preempted.push(key);
        self.preemptions += 1;
        #[cfg(test)]
        if self.pool.fault == Some(SchedulerBug::LosesPreempted) {
            return;
        }
        self.waiting.insert((rank, slot));
    }

    /// The empty prefix of a request.
    #[cfg_attr(not(test), expect(clippy::unused_self, reason = "tests plant a fault here"))]
    fn root(&self, adapter: Option<u32>) -> PrefixId {
        #[cfg(test)]
        if self.pool.fault == Some(SchedulerBug::ForgetsAdapters) {
            return PrefixId::ROOT;
        }
        PrefixId::of(adapter)
    }

    /// Frees a request's blocks, from the end, and resets its progress.
    fn free(&mut self, slot: u32) {
        let root = self.root(self.request(slot).adapter);
        let request = self.requests[slot as usize].as_mut().expect("a scheduled request exists");
        for block in request.blocks.drain(..).rev() {
            self.pool.free(block);
        }
        request.computed = 0;
        request.cached_blocks = 0;
        request.prefix = root;
        self.ended.push(request.sequence);
        self.adapters.end(request.adapter);
    }

    /// Takes the output of a step: one token per sequence of the batch, in its order. It is ignored where
    /// [`produces_token`](ScheduledSequence::produces_token) is false.
    ///
    /// # Panics
    /// When there is no batch, or not one token per sequence.
    pub fn complete(&mut self, tokens: &[u32]) -> &[EmittedToken] {
        assert!(self.in_flight, "there is a batch to complete");
        assert_eq!(tokens.len(), self.batch.scheduled.len(), "one token per sequence");
        self.in_flight = false;
        self.emitted.clear();
        let scheduled = std::mem::take(&mut self.batch.scheduled);
        for (seq, &token) in scheduled.iter().zip(tokens) {
            self.advance(*seq, token);
        }
        self.batch.scheduled = scheduled;
        &self.emitted
    }

    /// Draft tokens of a sequence of the batch in flight that are accepted: its next token is the one behind them.
    pub fn accepted(&self, seq: &ScheduledSequence) -> usize {
        let speculation = self.config.speculation.as_ref().filter(|_| seq.draft_tokens > 0);
        speculation.map_or(0, |speculation| speculation.accepted(seq.key, seq.start, seq.draft_tokens))
    }

    fn advance(&mut self, seq: ScheduledSequence, token: u32) {
        let slot = seq.slot.0;
        let accepted = self.accepted(&seq);
        let rejected = seq.draft_tokens - accepted;
        if let Some(counts) = self.drafts.as_mut().filter(|_| seq.draft_tokens > 0) {
            counts.count(seq.draft_tokens, accepted);
        }
        let request = self.requests[slot as usize].as_mut().expect("a scheduled request exists");
        request.computed += seq.tokens - rejected;
        #[cfg(test)]
        if self.pool.fault == Some(SchedulerBug::KeepsRejectedDrafts) && rejected > 0 {
            request.computed += 1;
        }
        request.tokens.truncate(request.tokens.len() - rejected);
        if self.pool.caches_prefixes() {
            let size = self.config.block_size;
            while (request.cached_blocks + 1) * size <= request.computed {
                let index = request.cached_blocks;
                let tokens = &request.tokens[index * size..(index + 1) * size];
                request.prefix = self.pool.cache_block(request.blocks[index], request.prefix, tokens);
                request.cached_blocks += 1;
            }
        }
        if !seq.produces_token {
            return;
        }
        request.tokens.push(token);
        let first = request.tokens.len() - accepted - 1;
        for at in first..request.tokens.len() {
            let (token, index) = (request.tokens[at], at + 1 - request.prompt_len);
            let finished = index == request.output_len || request.stop_tokens.contains(&token);
            self.emitted.push(EmittedToken { key: request.key, token, index, finished });
            if finished {
                self.remove(seq.slot);
                return;
            }
        }
    }

    /// What became of draft tokens so far; `None` without speculative decoding.
    pub fn drafts(&self) -> Option<&DraftCounts> {
        self.drafts.as_ref()
    }

    /// Ends the batch in flight after a failure of the engine, and drops every request in it. Returns their keys.
    pub fn abort_batch(&mut self) -> Vec<usize> {
        self.in_flight = false;
        let slots: Vec<Slot> = self.batch.scheduled.iter().map(|seq| seq.slot).collect();
        let keys = self.batch.scheduled.iter().map(|seq| seq.key).collect();
        self.batch.scheduled.clear();
        for slot in slots {
            self.remove(slot);
        }
        keys
    }

    fn remove(&mut self, slot: Slot) {
        let rank = self.request(slot.0).rank;
        if let Some(at) = self.running.iter().position(|other| other.0 == rank) {
            self.running.remove(at);
            self.free(slot.0);
        }
        self.waiting.remove(&(rank, slot.0));
        self.requests[slot.0 as usize] = None;
        self.vacant.push(slot.0);
    }

    /// The tokens of a sequence of the batch in flight.
    pub fn tokens(&self, seq: &ScheduledSequence) -> &[u32] {
        &self.request(seq.slot.0).tokens[seq.start..seq.start + seq.tokens]
    }

    /// The block table of a sequence of the batch in flight.
    pub fn block_table(&self, seq: &ScheduledSequence) -> &[u32] {
        &self.request(seq.slot.0).blocks
    }

    /// The last batch.
    pub fn batch(&self) -> &Batch {
        &self.batch
    }

    /// Whether anything runs or waits.
    pub fn has_work(&self) -> bool {
        !self.running.is_empty() || !self.waiting.is_empty()
    }

    /// The current load.
    pub fn load(&self) -> SchedulerLoad {
        SchedulerLoad {
            running: self.running.len(),
            waiting: self.waiting.len(),
            used_blocks: self.pool.num_used_blocks(),
            total_blocks: self.pool.num_blocks(),
            held_blocks: self.running.iter().map(|&(_, slot)| self.request(slot).blocks.len()).sum(),
        }
    }

    /// Preemptions so far.
    pub fn preemptions(&self) -> u64 {
        self.preemptions
    }

    /// The counters of the prefix cache.
    pub fn cache_stats(&self) -> CacheStats {
        self.pool.counts()
    }

    fn request(&self, slot: u32) -> &RequestState {
        self.requests[slot as usize].as_ref().expect("a scheduled request exists")
    }

    fn request_mut(&mut self, slot: u32) -> &mut RequestState {
        self.requests[slot as usize].as_mut().expect("a scheduled request exists")
    }
}

#[cfg(test)]
mod tests;
