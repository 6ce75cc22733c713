//! The serving loop: arrivals, scheduler and engine, with timestamps.
//!
//! Enters: planned requests, a scheduler's configuration, an [`Executor`] and a [`Clock`]. Leaves: a [`Record`] per request and a [`StepLog`] per
//! step; nothing is summarised here. One thread: what is due is queued, a batch is made and run, its tokens are read.
//!
//! Arrivals never wait for the engine: their times were fixed before the start, and every latency counts from the *scheduled* arrival,
//! however late the loop came to it. A request due while a step runs is queued when the step ends, as a server's engine loop sees its
//! input queue, and that wait is part of its queue time. *Injection lag* is what the loop adds beyond that (waking late, queueing others
//! first): an error of the harness, checked by a gate.
//!
//! Requests before the measured ones warm the system up; requests after them keep it loaded until the last measured one is done, and the
//! loop ends there.

use std::collections::VecDeque;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::clock::Clock;
use super::dataset::{Dataset, RecordedPrompt};
use super::executor::{Executor, Phases};
use super::latency::{decided, full_from};
use super::order::Order;
use super::scheduler::{EmittedToken, RejectReason, Request, Scheduler, SchedulerLoad};
use super::step_model::Mixture;
use super::workload::PlannedRequest;
use crate::executor::StepFailure;
use hbmark_core::result::serving::{DraftCounts, Failure, SchedulerConfig, Slo};
use hbmark_core::units::{Nanos, whole_count};

/// When a request is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadMode {
    /// At its scheduled time, whatever the system does.
    Open,
    /// When another finishes, at a fixed concurrency: the load adapts to the system, and queueing is hidden.
    Closed { concurrency: usize },
}

/// How a run goes on while it decides neither whether the system keeps up nor whether the objectives are met: the number of measured
/// requests is doubled.
#[derive(Debug, Clone)]
pub struct Extension {
    pub max_requests: usize,
    /// Before that, requests that came while the system filled up become warm-up requests, and as many later ones are measured.
    pub settles: bool,
    pub slo: Slo,
}

/// What is sent.
#[derive(Debug, Clone)]
pub struct Traffic<'a> {
    pub plan: &'a [PlannedRequest],
    pub kind: LoadMode,
    /// The requests whose times count, to begin with.
    pub measured: Range<usize>,
    /// Measure more requests where these decide nothing.
    pub extension: Option<Extension>,
    /// The plan is the beginning of traffic without an end: who uses it up has less load than was asked for.
    pub goes_on: bool,
    pub vocab: usize,
    /// The tokens that prompts are drawn from; empty for the whole vocabulary.
    pub prompt_vocab: Vec<u32>,
    /// The texts of the requests that have one.
    pub dataset: Option<&'a Dataset>,
    /// Tokens that end an output early; empty where lengths are forced.
    pub stop_tokens: Vec<u32>,
    /// Tokens that end a constrained output: its grammar allows one of them when it is complete.
    pub constrained_stops: Vec<u32>,
    /// The run ends after this time; unfinished requests count as never finished.
    pub time_limit: Option<Nanos>,
    /// Keep every output token, for comparisons.
    pub keep_outputs: bool,
}

impl<'a> Traffic<'a> {
    /// Requests of the planned lengths, without a limit of time and without more than these.
    pub fn new(plan: &'a [PlannedRequest], kind: LoadMode, measured: Range<usize>, vocab: usize) -> Self {
        Self {
            plan,
            kind,
            measured,
            extension: None,
            goes_on: false,
            vocab,
            prompt_vocab: Vec::new(),
            dataset: None,
            stop_tokens: Vec::new(),
            constrained_stops: Vec::new(),
            time_limit: None,
            keep_outputs: false,
        }
    }

    /// The prompt of a dataset that a request has.
    pub fn recorded(&self, request: &PlannedRequest) -> Option<&'a RecordedPrompt> {
        self.dataset?.prompt(request)
    }

    /// The tokens of a request's prompt.
    pub fn prompt(&self, request: &PlannedRequest) -> Vec<u32> {
        if let Some(recorded) = self.recorded(request) {
            return recorded.tokens.clone();
        }
        if self.prompt_vocab.is_empty() {
            return request.tokens(self.vocab);
        }
        let mut tokens = request.tokens(self.prompt_vocab.len());
        for token in &mut tokens {
            *token = self.prompt_vocab[*token as usize];
        }
        tokens
    }
}

/// The outcome of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RequestOutcome {
    /// Not done when the run ended.
    #[default]
    Unfinished,
    Served,
    Rejected(RejectReason),
    /// A live server, or the way there, failed it.
    Failed(Failure),
}

/// Times of one request, since the start of the run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Record {
    /// Scheduled (`s`); in a closed loop the moment its predecessor finished.
    pub arrival: Nanos,
    pub enqueued: Option<Nanos>,
    /// The wait added by the harness.
    pub lag: Nanos,
    /// First scheduled (`q`).
    pub started: Option<Nanos>,
    pub first_token: Option<Nanos>,
    pub last_token: Option<Nanos>,
    /// When it left the system, however it ended; `None` while it is there, and for one that was turned away.
    pub departed: Option<Nanos>,
    pub prompt_tokens: usize,
    pub output_tokens: usize,
    /// Tokens that came at once with the first; no time per token is known of these.
    pub first_tokens: usize,
    pub preemptions: usize,
    /// Time between being preempted and being scheduled again.
    pub preempted_wait: Nanos,
    /// Prompt tokens found in the cache when it was first scheduled.
    pub cached_tokens: usize,
    pub outcome: RequestOutcome,
}

/// One step.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StepLog {
    /// When the batch was scheduled, and when its tokens were available.
    pub begin: f64,
    pub end: f64,
    pub prompt_tokens: usize,
    pub output_tokens: usize,
    /// Requests that were done at its end.
    pub finished: usize,
    /// Distinct adapters in the batch.
    pub adapters: usize,
    /// The longest prompt of which the step computed a part.
    pub longest_prompt: usize,
    pub mixture: Mixture,
    /// While the step ran.
    pub load: SchedulerLoad,
    pub schedule: f64,
    pub phases: Phases,
    /// Text of the step's tokens.
    pub detokenize: f64,
}

/// Everything that happened.
#[derive(Debug, Clone, Default)]
pub struct Run {
    pub records: Vec<Record>,
    /// The requests whose times count; more than planned where the run was extended.
    pub measured: Range<usize>,
    pub steps: Vec<StepLog>,
    /// Gaps between tokens from the first measured request on, in nanoseconds, with the gap across a preemption among them.
    pub gaps: Vec<f64>,
    /// The request of each gap.
    pub gap_request: Vec<u32>,
    /// (time, requests in the system from then on).
    pub population: Vec<(f64, usize)>,
    /// Waiting for arrivals with nothing to do.
    pub idle: f64,
    /// Queueing arrivals, prompts encoded.
    pub enqueue: f64,
    /// Tokens that the texts of the prompts encoded to, and tokens that were asked for; 0 without a tokenizer.
    pub encoded_tokens: usize,
    pub asked_tokens: usize,
    pub end: f64,
    pub preemptions: u64,
    /// Draft tokens of speculative decoding; `None` without it.
    pub drafts: Option<DraftCounts>,
    pub cache: super::block_pool::CacheStats,
    /// The engine's error, if one ended or invalidated the run.
    pub failure: Option<String>,
    /// The device failed, not just one step: nothing it does afterwards is reliable.
    pub device_unusable: bool,
    pub outputs: Vec<Vec<u32>>,
    /// From then on there was less load than was asked for: every request of the plan had been sent.
    pub loaded_until: Option<f64>,
    /// What a live server showed, which tells nothing of its steps and its queue.
    pub remote: Option<RemoteTokens>,
}

/// Output tokens of a live server over time.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RemoteTokens {
    /// Output tokens by the millisecond since the start.
    per_ms: Vec<u32>,
}

/// A moment beyond which tokens are counted together: four days.
const LAST_MS: usize = 4 * 86_400_000;

fn millisecond(at: f64) -> usize {
    whole_count(at / 1e6).min(LAST_MS)
}

impl RemoteTokens {
    /// Counts tokens that came at a moment.
    pub fn count(&mut self, at: f64, tokens: u32) {
        let ms = millisecond(at);
        if self.per_ms.len() <= ms {
            self.per_ms.resize(ms + 1, 0);
        }
        self.per_ms[ms] = self.per_ms[ms].saturating_add(tokens);
    }

    /// Tokens between two moments, to a millisecond.
    pub fn between(&self, from: f64, to: f64) -> u64 {
        let (from, to) = (millisecond(from), millisecond(to).min(self.per_ms.len()));
        self.per_ms.get(from..to).unwrap_or_default().iter().map(|tokens| u64::from(*tokens)).sum()
    }
}

impl Record {
    /// The record of a request that is to come.
    pub fn planned(request: &PlannedRequest) -> Self {
        Self {
            arrival: request.arrival,
            prompt_tokens: request.prompt_len(),
            first_tokens: 1,
            ..Self::default()
        }
    }
}

impl Run {
    /// Goes on with more measured requests where those so far decide nothing and more are allowed; how many of them are under way.
    pub fn extend(&mut self, traffic: &Traffic<'_>, now: f64) -> Option<usize> {
        self.end = now;
        let Extension { max_requests, settles, slo } = traffic.extension.as_ref()?;
        loop {
            let (Range { start, end }, plan) = (self.measured.clone(), traffic.plan.len());
            let count = end - start;
            let may_settle = *settles && self.measured == traffic.measured;
            let full = if may_settle { full_from(self, traffic).min(plan - count) } else { start };
            if full > start {
                self.measured = full..full + count;
            } else {
                let longer = (start + (2 * count).min(*max_requests)).min(plan);
                if longer <= end || decided(self, traffic, slo) {
                    return None;
                }
                self.measured.end = longer;
            }
            // Some of them arrived and finished meanwhile.
            let unfinished = |record: &&Record| record.outcome == RequestOutcome::Unfinished;
            let left = self.records[self.measured.clone()].iter().filter(unfinished).count();
            if left > 0 {
                return Some(left);
            }
        }
    }
}

/// The progress of a run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    pub elapsed: Nanos,
    pub done: usize,
    pub total: usize,
    pub load: SchedulerLoad,
    pub output_tokens: usize,
}

/// Why a run could not go on.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error(transparent)]
    Text(#[from] TextError),
}

/// An error of a tokenizer.
pub type TextError = Box<dyn std::error::Error + Send + Sync>;

/// Text in the path of a request: what a server does with a tokenizer between the socket and the engine.
pub trait TextPath {
    /// Encodes the prompt of a request, as a server would on arrival; returns its tokens.
    ///
    /// # Errors
    /// When the tokenizer cannot encode it.
    fn encode(&self, request: usize) -> Result<usize, TextError>;
    /// Takes a token of a request's output and decodes the text that is complete by now.
    ///
    /// # Errors
    /// When the tokenizer cannot decode.
    fn push(&mut self, request: usize, token: u32, finished: bool) -> Result<(), TextError>;
}

/// How often an observer is notified during a long wait.
const HEARTBEAT: f64 = 0.5e9;

/// Consecutive failed steps after which the run ends.
const MAX_CONSECUTIVE_STEP_FAILURES: usize = 3;

/// Serves the traffic.
///
/// # Errors
/// When the tokenizer fails. An engine that fails is a result.
pub fn run(
    traffic: &Traffic<'_>,
    config: SchedulerConfig,
    executor: &mut dyn Executor,
    clock: &mut dyn Clock,
    text: Option<&mut dyn TextPath>,
    observe: &mut dyn FnMut(Progress),
) -> Result<Run, RunError> {
    run_with_scheduler(traffic, Scheduler::new(config), executor, clock, text, observe)
}

/// Serves the traffic with an existing scheduler.
///
/// # Errors
/// As [`run`].
pub fn run_with_scheduler(
    traffic: &Traffic<'_>,
    scheduler: Scheduler,
    executor: &mut dyn Executor,
    clock: &mut dyn Clock,
    text: Option<&mut dyn TextPath>,
    observe: &mut dyn FnMut(Progress),
) -> Result<Run, RunError> {
    // On a real clock prompts are made in advance; virtual time passes only in steps.
    let prompts = if clock.is_virtual() {
        Vec::new()
    } else {
        // The others are made when they arrive.
        let ready = match traffic.kind {
            LoadMode::Open => 2 * traffic.measured.end,
            LoadMode::Closed { .. } => traffic.plan.len(),
        };
        traffic.plan.iter().take(ready).map(|request| traffic.prompt(request)).collect()
    };
    let mut server = Server {
        traffic,
        scheduler,
        text,
        prompts,
        origin: clock.now().0,
        order: Order::new(traffic),
        openings: match traffic.kind {
            LoadMode::Open => VecDeque::new(),
            LoadMode::Closed { concurrency } => vec![0.0; concurrency].into(),
        },
        in_system: 0,
        left: traffic.measured.len(),
        boundary: 0.0,
        preempted_at: vec![None; traffic.plan.len()],
        run: Run {
            records: traffic.plan.iter().map(Record::planned).collect(),
            measured: traffic.measured.clone(),
            outputs: if traffic.keep_outputs { vec![Vec::new(); traffic.plan.len()] } else { Vec::new() },
            ..Run::default()
        },
        output_tokens: 0,
        emitted: Vec::new(),
    };
    let mut tokens = Vec::new();
    let mut failures = 0;
    let mut rounds = 0_u64;
    loop {
        server.enqueue_due(clock)?;
        let now = server.now(clock);
        rounds += 1;
        if rounds.is_multiple_of(64) || !clock.is_virtual() {
            observe(server.progress(now));
        }
        if traffic.time_limit.is_some_and(|limit| now > limit.0) || server.left == 0 && !server.extend(now) {
            break;
        }
        if !server.scheduler.has_work() {
            let Some(moment) = server.next_arrival() else { break };
            server.wait(moment, clock, observe);
            server.run.idle += server.now(clock) - now;
            continue;
        }
        match server.step(executor, clock, &mut tokens)? {
            Ok(()) => failures = 0,
            Err(error) => {
                failures += 1;
                server.run.failure = Some(error.message);
                server.run.device_unusable |= error.device_unusable;
                if failures == MAX_CONSECUTIVE_STEP_FAILURES {
                    break;
                }
            }
        }
    }
    server.run.end = server.now(clock);
    server.run.preemptions = server.scheduler.preemptions();
    server.run.drafts = server.scheduler.drafts().cloned();
    server.run.cache = server.scheduler.cache_stats();
    observe(server.progress(server.run.end));
    Ok(server.run)
}

/// The state of a run.
struct Server<'a, 't> {
    traffic: &'a Traffic<'a>,
    scheduler: Scheduler,
    text: Option<&'t mut dyn TextPath>,
    prompts: Vec<Vec<u32>>,
    origin: f64,
    order: Order,
    /// Closed loop: when slots became free.
    openings: VecDeque<f64>,
    in_system: usize,
    /// Measured requests without an outcome.
    left: usize,
    /// End of the last step: nothing could be queued before.
    boundary: f64,
    preempted_at: Vec<Option<f64>>,
    run: Run,
    output_tokens: usize,
    /// Tokens of the last step; kept for its buffer.
    emitted: Vec<EmittedToken>,
}

impl Server<'_, '_> {
    fn now(&self, clock: &dyn Clock) -> f64 {
        clock.now().0 - self.origin
    }

    fn next_arrival(&self) -> Option<f64> {
        self.order.next_due(self.traffic, &self.openings)
    }

    /// Waits with nothing to do. The last wait is never shorter than a heartbeat, so that notifying an observer delays no arrival.
    fn wait(&self, moment: f64, clock: &mut dyn Clock, observe: &mut dyn FnMut(Progress)) {
        while !clock.is_virtual() && moment - self.now(clock) > 2.0 * HEARTBEAT {
            clock.wait_until(Nanos(clock.now().0 + HEARTBEAT));
            observe(self.progress(self.now(clock)));
        }
        clock.wait_until(Nanos(moment + self.origin));
    }

    /// Queues every request that is due.
    fn enqueue_due(&mut self, clock: &dyn Clock) -> Result<(), TextError> {
        loop {
            let begin = self.now(clock);
            let Some(arrival) = self.next_arrival().filter(|arrival| *arrival <= begin) else {
                self.run.loaded_until =
                    self.run.loaded_until.or_else(|| self.order.used_up(self.traffic, &self.openings));
                return Ok(());
            };
            let Some(key) = self.order.take() else { return Ok(()) };
            self.openings.pop_front();
            if let Some(text) = &self.text {
                self.run.encoded_tokens += text.encode(key)?;
                self.run.asked_tokens += self.run.records[key].prompt_tokens;
            }
            let planned = &self.traffic.plan[key];
            let prompt = match self.prompts.get_mut(key) {
                Some(prompt) => std::mem::take(prompt),
                None => self.traffic.prompt(planned),
            };
            let admitted = self.scheduler.add_request(Request {
                key,
                prompt,
                output_len: planned.output_len,
                stop_tokens: if planned.constrained {
                    self.traffic.constrained_stops.clone()
                } else {
                    self.traffic.stop_tokens.clone()
                },
                priority: planned.priority,
                adapter: planned.adapter,
            });
            let now = self.now(clock);
            let record = &mut self.run.records[key];
            record.arrival = Nanos(arrival);
            record.enqueued = Some(Nanos(now));
            record.lag = Nanos((begin - arrival.max(self.boundary)).max(0.0));
            self.run.enqueue += now - begin;
            match admitted {
                Ok(_) => {
                    self.in_system += 1;
                    self.run.population.push((now, self.in_system));
                }
                Err(reject) => self.finish_request(key, RequestOutcome::Rejected(reject), now),
            }
        }
    }

    fn extend(&mut self, now: f64) -> bool {
        let left = self.run.extend(self.traffic, now);
        self.left = left.unwrap_or(0);
        left.is_some()
    }

    fn finish_request(&mut self, key: usize, outcome: RequestOutcome, now: f64) {
        self.run.records[key].outcome = outcome;
        if self.run.measured.contains(&key) {
            self.left -= 1;
        }
        if matches!(self.traffic.kind, LoadMode::Closed { .. }) {
            self.openings.push_back(now);
            self.order.done(key);
        }
    }

    fn leave(&mut self, key: usize, outcome: RequestOutcome, now: f64) {
        self.in_system -= 1;
        self.run.population.push((now, self.in_system));
        self.run.records[key].departed = Some(Nanos(now));
        self.finish_request(key, outcome, now);
    }

    fn step(
        &mut self,
        executor: &mut dyn Executor,
        clock: &mut dyn Clock,
        tokens: &mut Vec<u32>,
    ) -> Result<Result<(), StepFailure>, TextError> {
        let begin = self.now(clock);
        self.scheduler.next_batch();
        let scheduled = self.now(clock);
        let mut log = StepLog { begin, load: self.scheduler.load(), ..StepLog::default() };
        log.schedule = scheduled - begin;
        self.record_batch(begin, &mut log);
        tokens.clear();
        match executor.run(&self.scheduler, clock, tokens) {
            Ok(phases) => log.phases = phases,
            Err(error) => {
                let now = self.now(clock);
                self.boundary = now;
                for key in self.scheduler.abort_batch() {
                    self.leave(key, RequestOutcome::Rejected(RejectReason::EngineFailed), now);
                }
                return Ok(Err(error));
            }
        }
        let end = self.now(clock);
        let mut emitted = std::mem::take(&mut self.emitted);
        emitted.clear();
        emitted.extend_from_slice(self.scheduler.complete(tokens));
        let completed = self.now(clock);
        log.schedule += completed - end;
        log.end = end;
        log.output_tokens = emitted.len();
        log.finished = emitted.iter().filter(|token| token.finished).count();
        self.output_tokens += emitted.len();
        for together in emitted.chunk_by(|a, b| a.key == b.key) {
            let key = together[0].key;
            self.record_tokens(key, together, end);
            if together.iter().any(|token| token.finished) {
                self.leave(key, RequestOutcome::Served, end);
            }
        }
        if let Some(text) = &mut self.text {
            let before = clock.now().0;
            for token in &emitted {
                text.push(token.key, token.token, token.finished)?;
            }
            log.detokenize = clock.now().0 - before;
        }
        self.emitted = emitted;
        self.boundary = self.now(clock);
        self.run.steps.push(log);
        Ok(Ok(()))
    }

    /// Timestamps of requests that the batch starts, continues and preempts.
    fn record_batch(&mut self, now: f64, log: &mut StepLog) {
        let batch = self.scheduler.batch();
        log.adapters = batch.adapters;
        for key in &batch.preempted {
            self.preempted_at[*key] = Some(now);
            self.run.records[*key].preemptions += 1;
        }
        for seq in &batch.scheduled {
            log.mixture.add(seq.part());
            let record = &mut self.run.records[seq.key];
            let prompt = record.prompt_tokens.saturating_sub(seq.start).min(seq.tokens);
            log.prompt_tokens += prompt;
            if prompt > 0 {
                log.longest_prompt = log.longest_prompt.max(record.prompt_tokens);
            }
            if seq.is_first_step {
                if record.started.is_none() {
                    record.cached_tokens = seq.start;
                }
                record.started.get_or_insert(Nanos(now));
                if let Some(at) = self.preempted_at[seq.key].take() {
                    record.preempted_wait.0 += now - at;
                }
            }
        }
    }

    /// Records the tokens that a step brought of a request: several share the time since the last one.
    fn record_tokens(&mut self, key: usize, tokens: &[EmittedToken], now: f64) {
        let record = &mut self.run.records[key];
        record.output_tokens += tokens.len();
        record.first_token.get_or_insert(Nanos(now));
        if let Some(last) = record.last_token.replace(Nanos(now))
            && key >= self.run.measured.start
        {
            let gap = (now - last.0) / tokens.len() as f64;
            let request = u32::try_from(key).expect("a number of requests");
            self.run.gaps.extend(tokens.iter().map(|_| gap));
            self.run.gap_request.extend(tokens.iter().map(|_| request));
        }
        if let Some(output) = self.run.outputs.get_mut(key) {
            output.extend(tokens.iter().map(|token| token.token));
        }
    }

    fn progress(&self, now: f64) -> Progress {
        Progress {
            elapsed: Nanos(now),
            done: self.run.measured.len() - self.left,
            total: self.run.measured.len(),
            load: self.scheduler.load(),
            output_tokens: self.output_tokens,
        }
    }
}
