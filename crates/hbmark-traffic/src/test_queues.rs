//! Queues of known utilisation, as the serving loop would record them, and a small point on the virtual clock.

use hbmark_core::result::serving::{Arrivals, Offered, SchedulerConfig, ServeResult, Slo};
use hbmark_core::units::Nanos;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Exp1, LogNormal};

use crate::latency::{decided, summarise};
use crate::point::{PointSpec, TrafficSource, simulate};
use crate::sampler::Sampling;
use crate::serving_loop::{LoadMode, Record, RequestOutcome, Run, Traffic};
use crate::step_model::{Calibration, StepModel};
use crate::workload::{PlannedRequest, Workload};

/// How the time of one service is distributed; its mean is one second.
#[derive(Debug, Clone, Copy)]
pub enum Service {
    Constant,
    Exponential,
    /// Log-normal with a squared coefficient of variation of 2.
    Lognormal,
    /// One in ten takes eleven times as long as the others.
    Mixture,
    Erlang2,
}

pub const SERVICES: [Service; 5] =
    [Service::Constant, Service::Exponential, Service::Lognormal, Service::Mixture, Service::Erlang2];

impl Service {
    fn draw(self, random: &mut ChaCha8Rng) -> f64 {
        let mut exponential = || -> f64 { Exp1.sample(random) };
        match self {
            Self::Constant => 1.0,
            Self::Exponential => exponential(),
            Self::Erlang2 => f64::midpoint(exponential(), exponential()),
            Self::Lognormal => {
                let variance = 3_f64.ln();
                LogNormal::new(-variance / 2.0, variance.sqrt()).expect("finite").sample(random)
            }
            Self::Mixture => {
                if random.random_bool(0.1) {
                    5.5
                } else {
                    0.5
                }
            }
        }
    }
}

/// A server, its capacity in requests per second one.
#[derive(Debug, Clone, Copy)]
pub enum Server {
    /// One request at a time.
    Single(Service),
    /// Continuous batching: a step of every running request takes `fixed + each × running`, a request takes about `LENGTH` steps.
    Batch { most: usize, fixed: f64, each: f64, spread: bool },
}

pub const BATCHES: [Server; 5] = [
    Server::Batch { most: 4, fixed: 1.0, each: 0.01, spread: false },
    Server::Batch { most: 16, fixed: 1.0, each: 0.1, spread: true },
    Server::Batch { most: 64, fixed: 1.0, each: 0.02, spread: false },
    Server::Batch { most: 8, fixed: 1.0, each: 1.0, spread: true },
    Server::Batch { most: 32, fixed: 1.0, each: 0.0, spread: false },
];

const LENGTH: f64 = 16.0;

/// Arrival, start and end of requests at a rate, in seconds, first come, first served.
fn serve(server: Server, rate: f64, count: usize, seed: u64) -> Vec<[f64; 3]> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut at = 0.0;
    let arrivals: Vec<f64> = (0..count)
        .map(|_| {
            let gap: f64 = Exp1.sample(&mut random);
            at += gap / rate;
            at
        })
        .collect();
    match server {
        Server::Single(service) => {
            let mut free = 0.0_f64;
            let serve = |arrival: f64| {
                let start = free.max(arrival);
                free = start + service.draw(&mut random);
                [arrival, start, free]
            };
            arrivals.into_iter().map(serve).collect()
        }
        Server::Batch { most, fixed, each, spread } => {
            // So that the capacity is one.
            let unit = most as f64 / (LENGTH * (fixed + each * most as f64));
            let variance = 2_f64.ln();
            let lengths = LogNormal::new(LENGTH.ln() - variance / 2.0, variance.sqrt()).expect("finite");
            let mut left: Vec<f64> = (0..count)
                .map(|_| if spread { lengths.sample(&mut random).round().max(1.0) } else { LENGTH })
                .collect();
            let mut times: Vec<[f64; 3]> =
                arrivals.iter().map(|at| [*at, f64::INFINITY, f64::INFINITY]).collect();
            let (mut now, mut next, mut running) = (0.0_f64, 0, Vec::new());
            while next < count || !running.is_empty() {
                if running.is_empty() {
                    now = now.max(arrivals[next]);
                }
                while next < count && arrivals[next] <= now && running.len() < most {
                    times[next][1] = now;
                    running.push(next);
                    next += 1;
                }
                now += (fixed + each * running.len() as f64) * unit;
                running.retain(|key: &usize| {
                    left[*key] -= 1.0;
                    if left[*key] == 0.0 {
                        times[*key][2] = now;
                    }
                    left[*key] > 0.0
                });
            }
            times
        }
    }
}

/// A run of so many measured requests after a tenth as many that warm up.
pub fn run(server: Server, rate: f64, measured: usize, seed: u64) -> Run {
    let warmup = measured / 10;
    let times = serve(server, rate, warmup + measured, seed);
    let last = times[times.len() - 1][0];
    let ns = |at: f64| Nanos(at * 1e9);
    let records = times
        .iter()
        .map(|[arrival, start, end]| Record {
            arrival: ns(*arrival),
            enqueued: Some(ns(*arrival)),
            started: Some(ns(*start)),
            first_token: Some(ns(*end)),
            last_token: Some(ns(*end)),
            departed: Some(ns(*end)),
            prompt_tokens: 1,
            output_tokens: 1,
            first_tokens: 1,
            outcome: RequestOutcome::Served,
            ..Record::default()
        })
        .collect();
    let mut changes: Vec<(f64, bool)> =
        times.iter().flat_map(|[arrival, _, end]| [(*arrival, true), (*end, false)]).collect();
    changes.sort_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1)));
    let mut count = 0;
    let population = changes
        .into_iter()
        .map(|(at, came)| {
            count = if came { count + 1 } else { count - 1 };
            (at * 1e9, count)
        })
        .collect();
    Run {
        records,
        measured: warmup..warmup + measured,
        population,
        end: times.iter().map(|t| t[2]).fold(last, f64::max) * 1e9,
        ..Run::default()
    }
}

/// What such a run was asked for.
pub fn traffic<'a>(plan: &'a [PlannedRequest], run: &Run) -> Traffic<'a> {
    Traffic::new(plan, LoadMode::Open, run.measured.clone(), 1)
}

/// The plan of a run.
pub fn plan(run: &Run) -> Vec<PlannedRequest> {
    let planned =
        |r: &Record| PlannedRequest { arrival: r.arrival, output_len: 1, ..PlannedRequest::default() };
    run.records.iter().map(planned).collect()
}

/// A run that is doubled until it is decided or has as many requests as allowed.
pub fn extended(server: Server, rate: f64, slo: &Slo, (requests, most): (usize, usize), seed: u64) -> Run {
    let mut measured = requests;
    loop {
        let run = run(server, rate, measured, seed);
        let plan = plan(&run);
        if measured >= most || decided(&run, &traffic(&plan, &run), slo) {
            return run;
        }
        measured = (2 * measured).min(most);
    }
}

/// 400 requests of 40 and 20 tokens for four sequences at a time and blocks for all of them.
pub fn spec(offered: Offered) -> PointSpec {
    PointSpec {
        label: String::new(),
        source: TrafficSource::Workload(Workload::fixed(40, 20).unwrap()),
        offered,
        arrivals: Arrivals::Poisson,
        burst: None,
        requests: 400,
        max_requests: 0,
        warmup: 20,
        settles: false,
        scheduler: SchedulerConfig {
            max_num_seqs: 4,
            max_num_batched_tokens: 64,
            block_size: 8,
            num_blocks: 100,
            max_model_len: 128,
            enable_prefix_caching: false,
            ..SchedulerConfig::UNLIMITED
        },
        sampling: Sampling::GREEDY,
        stop_at_eos: false,
        seed: 3,
        prompt_set: 0,
        cold: false,
        slo: Slo::default(),
        time_limit: None,
        adapters: None,
        constrained: None,
        is_remote: false,
    }
}

/// The point on the virtual clock: a prefill of n tokens takes n ms, a decode of n sequences 10 ms and n.
pub fn simulated(spec: &PointSpec) -> (Run, ServeResult) {
    let (plan, measured) = spec.plan().unwrap();
    simulated_plan(spec, &plan, measured)
}

/// The point with a given plan.
pub fn simulated_plan(
    spec: &PointSpec,
    plan: &[PlannedRequest],
    measured: std::ops::Range<usize>,
) -> (Run, ServeResult) {
    let model = StepModel::Calibrated(Calibration::of(
        vec![(1.0, 1e6), (101.0, 101e6)],
        vec![(1.0, 11e6), (11.0, 21e6)],
    ));
    let traffic = spec.traffic(plan, measured, 1000, &[]);
    let run = simulate(&model, spec, &traffic, &mut |_| {}).unwrap();
    let result = summarise(&run, &traffic, &spec.slo);
    (run, result)
}
