//! A serving benchmark of a scripted device: the real loop, scheduler and summary on a virtual clock, with faults planted where they arise.
//!
//! Enters: a [`ServeScenario`] with [`ServeFault`]s. Leaves: a [`Point`], a [`ServeReport`] of points, and their findings.

use std::ops::Range;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

use super::{architecture, label};
use crate::engine::scripted::{ScriptedSession, StepInfo, StepOutcome};
use crate::engine::{DeviceChoice, EngineError};
use crate::serve::executor::SessionExecutor;
use hbmark_client::point::{Delay, check_delay};
use hbmark_core::model::Dtype;
use hbmark_core::result::Finding;
use hbmark_core::result::serving::{
    self, Arrivals, Offered, Point, SchedulerConfig, ServeKind, ServeReport, Slo, WorkloadSummary,
};
use hbmark_core::units::Nanos;
use hbmark_report::analysis::explain_serving;
use hbmark_report::output::Kind as _;
use hbmark_traffic::arrivals::deadlines;
use hbmark_traffic::clock::{Clock, VirtualClock};
use hbmark_traffic::latency::summarise;
use hbmark_traffic::sampler::{Sampler, Sampling};
use hbmark_traffic::scheduler::Scheduler;
use hbmark_traffic::serving_loop::{LoadMode, Traffic, run_with_scheduler};
use hbmark_traffic::workload::{PlannedRequest, PromptSegment, ideal_hit_rate};

const MS: f64 = 1e6;
/// What a step takes, and each of its tokens more.
const STEP: f64 = MS;
const TOKEN: f64 = 0.01 * MS;
/// Vocabulary of prompts.
const VOCAB: usize = 1_000;
const OUTPUT: usize = 32;

/// One fault of a serving system, or of the harness, with its severity.
#[derive(Debug, Clone, PartialEq)]
pub enum ServeFault {
    /// The host takes so long after each step.
    Host(Nanos),
    /// A pool of so few blocks.
    Pool(usize),
    /// So many sequences at a time.
    Sequences(usize),
    /// So many requests come together ten milliseconds before the last measured one.
    Crowd(usize),
    /// Steps before this moment take so many times longer, and nothing warms up before.
    Cold { until: Nanos, times: f64 },
    /// The step under way at this moment takes so much longer.
    Stall { at: Nanos, time: Nanos },
    /// Every n-th prompt has so many tokens.
    LongPrompts { every: usize, tokens: u32 },
    /// A prompt without chunked prefill blocks a whole step.
    Unchunked,
    /// Prompts begin with one of so many prefixes, of so many tokens.
    Prefixes { groups: u64, tokens: u32 },
    /// So many requests of one prefix come at the same moment.
    Bursts { size: usize, tokens: u32 },
    /// The loop wakes late by so much.
    LateInjector(Nanos),
    /// A client reads what came so long after it came.
    LateClient(Nanos),
    /// The engine fails at this step, so often.
    Breaks { at: usize, times: usize },
    /// Blocks that no request holds.
    LostBlocks(usize),
    /// Other processes keep so many cores busy.
    Foreign(f64),
    /// The plan has other output lengths than were requested.
    OtherLengths,
    /// An earlier run left so large a share of the prompts in the cache.
    CachedBefore(f64),
    /// Of the vocabulary, one token in so many ends an output.
    EndsEarly(u32),
    /// Requests have one token of prompt and one of output, and arrive evenly.
    SingleTokens,
}

/// A load to offer.
#[derive(Debug, Clone)]
pub struct ServeScenario {
    pub rate: f64,
    pub requests: usize,
    pub warmup: usize,
    pub noise: f64,
    pub seed: u64,
    pub slo: &'static str,
    pub faults: Vec<ServeFault>,
}

impl ServeScenario {
    /// A load well below the capacity of the scripted system.
    pub fn new(seed: u64, faults: Vec<ServeFault>) -> Self {
        Self { rate: 60.0, requests: 400, warmup: 60, noise: 0.02, seed, slo: "", faults }
    }

    pub fn at(mut self, rate: f64) -> Self {
        self.rate = rate;
        self
    }

    pub fn of(mut self, requests: usize) -> Self {
        self.requests = requests;
        self
    }

    pub fn under(mut self, slo: &'static str) -> Self {
        self.slo = slo;
        self
    }

    pub(super) fn scheduler(&self) -> SchedulerConfig {
        SchedulerConfig {
            max_num_seqs: planted!(self.faults, ServeFault::Sequences(n) => *n).unwrap_or(16),
            max_num_batched_tokens: 8192,
            num_blocks: planted!(self.faults, ServeFault::Pool(n) => *n).unwrap_or(8192),
            max_model_len: 32_768,
            enable_prefix_caching:
                planted!(self.faults, ServeFault::Prefixes { .. } | ServeFault::Bursts { .. } => ()).is_some(),
            enable_chunked_prefill: !self.faults.contains(&ServeFault::Unchunked),
            ..SchedulerConfig::UNLIMITED
        }
    }

    fn plan(&self) -> Vec<PlannedRequest> {
        if self.faults.contains(&ServeFault::SingleTokens) {
            return super::queues::single_tokens(Arrivals::Constant, self.rate, self.requests, self.seed);
        }
        let count = self.warmup + self.requests + self.requests / 2 + 16;
        let moments = deadlines(Arrivals::Poisson, None, self.rate, count, self.seed);
        let mut random = ChaCha8Rng::seed_from_u64(self.seed ^ 0x9a7);
        let own = |index: usize| self.seed.wrapping_mul(1 << 20) + index as u64;
        let mut plan: Vec<PlannedRequest> = moments
            .into_iter()
            .enumerate()
            .map(|(index, arrival)| {
                let mut planned = PlannedRequest {
                    arrival,
                    prompt: vec![PromptSegment { source: own(index), tokens: random.random_range(96..160) }],
                    output_len: OUTPUT,
                    ..PlannedRequest::default()
                };
                for fault in &self.faults {
                    match fault {
                        ServeFault::LongPrompts { every, tokens } if index % every == every / 2 => {
                            planned.prompt[0].tokens = *tokens;
                        }
                        ServeFault::Prefixes { groups, tokens } => {
                            let source = (1 << 50) + random.random_range(0..*groups);
                            planned.prompt.insert(0, PromptSegment { source, tokens: *tokens });
                        }
                        ServeFault::Bursts { size, tokens } => {
                            let burst = index / size;
                            planned.arrival = Nanos(burst as f64 * *size as f64 / self.rate * 1e9);
                            planned.prompt[0].tokens = 16;
                            let source = (1 << 50) + own(burst);
                            planned.prompt.insert(0, PromptSegment { source, tokens: *tokens });
                        }
                        _ => {}
                    }
                }
                planned
            })
            .collect();
        if let Some(size) = planted!(self.faults, ServeFault::Crowd(n) => *n) {
            let last = self.warmup + self.requests - 1;
            let together = Nanos(plan[last].arrival.0 - 10.0 * MS);
            plan[last - size..last].iter_mut().for_each(|planned| planned.arrival = together);
        }
        plan
    }

    fn script(&self, clock: &VirtualClock) -> impl FnMut(StepInfo) -> StepOutcome + 'static {
        let (load, clock) = (self.clone(), clock.clone());
        let mut random = ChaCha8Rng::seed_from_u64(self.seed ^ 0x5c1);
        let mut stalled = false;
        move |info| {
            let normal: f64 = StandardNormal.sample(&mut random);
            let tokens = info.tokens as f64;
            let mut device = (STEP + TOKEN * tokens) * (1.0 + load.noise * normal.clamp(-4.0, 4.0));
            let mut host = 0.0;
            for fault in &load.faults {
                match fault {
                    ServeFault::Host(time) => host += time.0,
                    ServeFault::Cold { until, times } if clock.now().0 < until.0 => device *= times,
                    ServeFault::Stall { at, time } if !stalled && clock.now().0 >= at.0 => {
                        stalled = true;
                        device += time.0;
                    }
                    ServeFault::Breaks { at, times } if (*at..at + times).contains(&info.index) => {
                        let error =
                            EngineError::Device { device: "scripted".into(), detail: "planted".into() };
                        return StepOutcome::Fails(error);
                    }
                    _ => {}
                }
            }
            StepOutcome::Takes { device: Nanos(device), host: Nanos(host) }
        }
    }

    /// Runs the load.
    ///
    /// # Panics
    /// Never: there is no tokenizer that could fail.
    pub fn point(&self) -> Point {
        let plan = self.plan();
        let config = self.scheduler();
        let warmup =
            if planted!(self.faults, ServeFault::Cold { .. } => ()).is_some() { 0 } else { self.warmup };
        let measured = warmup..warmup + self.requests;
        let stop_tokens = planted!(self.faults, ServeFault::EndsEarly(n) => *n);
        let stop_tokens = stop_tokens.map_or_else(Vec::new, |n| (0..49_152).step_by(n as usize).collect());
        let traffic = |plan| Traffic {
            stop_tokens: stop_tokens.clone(),
            time_limit: Some(Nanos(600e9)),
            ..traffic(plan, measured.clone())
        };
        let lost = planted!(self.faults, ServeFault::LostBlocks(n) => *n).unwrap_or(0);
        let scheduler = Scheduler::new(config.clone()).with_leaked_blocks(lost);
        let clock = VirtualClock::default();
        let inventory = architecture().inventory(Dtype::Bf16);
        let script = Box::new(self.script(&clock));
        let mut session = ScriptedSession::new(architecture(), inventory, &clock, script);
        let mut executor = SessionExecutor::new(&mut session, Sampler::new(Sampling::GREEDY));
        let late = planted!(self.faults, ServeFault::LateInjector(t) => t.0).unwrap_or(0.0);
        let mut clock = LateClock { clock, late };
        let run =
            run_with_scheduler(&traffic(&plan), scheduler, &mut executor, &mut clock, None, &mut |_| {})
                .expect("without a tokenizer nothing can fail");
        let slo: Slo =
            if self.slo.is_empty() { Slo::default() } else { self.slo.parse().expect("written here") };
        let mut booked = plan.clone();
        if self.faults.contains(&ServeFault::OtherLengths) {
            for planned in &mut booked {
                planned.output_len += 1;
            }
        }
        let mut result = summarise(&run, &traffic(&booked), &slo);
        if let Some(delay) = planted!(self.faults, ServeFault::LateClient(t) => *t) {
            check_delay(&mut result, Delay { p99: Some(delay), exact_stamps: false });
        }
        result.foreign_cores = planted!(self.faults, ServeFault::Foreign(cores) => *cores);
        let found = planted!(self.faults, ServeFault::CachedBefore(share) => *share);
        result.prefix_hit_rate = found.or(result.prefix_hit_rate);
        let counted =
            plan.iter().enumerate().map(|(index, request)| (request, run.measured.contains(&index)));
        Point {
            label: format!("rate {}", self.rate),
            offered: Offered::Rate(self.rate),
            arrivals: Some(Arrivals::Poisson),
            seed: self.seed,
            cold: false,
            mean_prompt_tokens: 128.0,
            mean_output_tokens: OUTPUT as f64,
            ideal_hit_rate: config
                .enable_prefix_caching
                .then(|| ideal_hit_rate(counted, config.block_size))
                .flatten(),
            scheduler: Some(config),
            result: Some(result),
            not_run: None,
            predicted: None,
            drift: None,
            live: None,
            residuals: None,
            adapters: None,
            structured: None,
        }
    }

    /// Runs the load and says what was found, the worst first.
    pub fn explain(&self) -> Vec<Finding> {
        explain_serving(&report(vec![self.point()]), None)
    }
}

/// Requests that arrive on their own schedule, with forced output lengths.
pub(super) fn traffic(plan: &[PlannedRequest], measured: Range<usize>) -> Traffic<'_> {
    Traffic::new(plan, LoadMode::Open, measured, VOCAB)
}

/// A clock that wakes late.
struct LateClock {
    clock: VirtualClock,
    late: f64,
}

impl Clock for LateClock {
    fn now(&self) -> Nanos {
        self.clock.now()
    }
    fn wait_until(&mut self, moment: Nanos) {
        let until = moment.0 + self.late;
        Clock::wait_until(&mut self.clock, Nanos(until));
    }
    fn is_virtual(&self) -> bool {
        true
    }
}

/// A saved result of these points, as read back from a file.
pub fn report(points: Vec<Point>) -> ServeReport {
    let workload = WorkloadSummary { name: "scripted".into(), source: format!("{}", DeviceChoice::Cpu) };
    let saved = ServeReport {
        model: Some(super::model()),
        dtype: Some(Dtype::Bf16),
        swept: Some("rate".into()),
        points,
        ..ServeReport::new(ServeKind::Serve, "hbmark selftest", workload)
    };
    let text = saved.json().expect("a result is plain data");
    serving::parse(&text).expect("a result is read back as it was written")
}

/// A verdict and its figures.
type Shown = (bool, String);

/// One token a request and a request every 10 ms: after a stall of 1.4 s, 140 requests wait 1.4 s less 10 ms each. Of ten thousand a
/// hundred lie above p99, and the one at it waits 0.4 s, from the scheduled arrival.
pub fn long_stall() -> Shown {
    let stall = ServeFault::Stall { at: Nanos(50e9), time: Nanos(1.4e9) };
    let mut load = ServeScenario::new(0, vec![ServeFault::SingleTokens, ServeFault::Sequences(256), stall])
        .at(100.0)
        .of(10_000);
    (load.warmup, load.noise) = (0, 0.0);
    let point = load.point();
    let ttft = point.result.as_ref().and_then(|result| result.ttft_ns.as_ref());
    let p99 = ttft.and_then(|q| q.p99).map_or(f64::NAN, |q| q.value() / 1e9);
    let findings = explain_serving(&report(vec![point]), None);
    let passed = (p99 / 0.4 - 1.0).abs() <= 0.05 && label(&findings) == "tail_failure";
    (passed, format!("{}: p99 of TTFT {p99:.4} s, the arithmetic says 0.4 s", label(&findings)))
}
