//! Queues with known solutions, on a scripted engine: the loop and its arithmetic against theory.

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Exp1};

use crate::engine::EngineError;
use crate::engine::scripted::{ScriptedSession, StepInfo, StepOutcome};
use crate::serve::executor::SessionExecutor;
use hbmark_core::model::{Dtype, test_shapes};
use hbmark_core::result::Cause;
use hbmark_core::result::serving::{Arrivals, GateName, SchedulerConfig, ServeResult, Slo, Validity};
use hbmark_core::units::Nanos;
use hbmark_traffic::arrivals::deadlines;
use hbmark_traffic::clock::VirtualClock;
use hbmark_traffic::latency::summarise;
use hbmark_traffic::sampler::{Sampler, Sampling};
use hbmark_traffic::scheduler::RejectReason;
use hbmark_traffic::serving_loop::{LoadMode, RequestOutcome, Run, Traffic, run};
use hbmark_traffic::workload::{PlannedRequest, PromptSegment, Workload};

pub(super) fn options(max_num_seqs: usize) -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs,
        max_num_batched_tokens: 8192,
        num_blocks: 4096,
        max_model_len: 100_000,
        enable_prefix_caching: false,
        ..SchedulerConfig::UNLIMITED
    }
}

/// Serves a plan on a scripted device.
fn serve(
    plan: &[PlannedRequest],
    kind: LoadMode,
    config: SchedulerConfig,
    script: impl FnMut(StepInfo) -> StepOutcome + 'static,
) -> Run {
    let clock = VirtualClock::default();
    let architecture = test_shapes::smollm2_135m();
    let inventory = architecture.inventory(Dtype::Bf16);
    let mut session = ScriptedSession::new(architecture, inventory, &clock, Box::new(script));
    let mut executor = SessionExecutor::new(&mut session, Sampler::new(Sampling::GREEDY));
    run(&traffic(plan, kind), config, &mut executor, &mut clock.clone(), None, &mut |_| {}).unwrap()
}

fn traffic(plan: &[PlannedRequest], kind: LoadMode) -> Traffic<'_> {
    Traffic::new(plan, kind, 0..plan.len(), 1000)
}

fn result(run: &Run, plan: &[PlannedRequest], slo: &str) -> ServeResult {
    let slo = if slo.is_empty() { Slo::default() } else { slo.parse().unwrap() };
    summarise(run, &traffic(plan, LoadMode::Open), &slo)
}

fn one_token(arrival: Nanos) -> PlannedRequest {
    PlannedRequest {
        arrival,
        prompt: vec![PromptSegment { source: 1, tokens: 1 }],
        output_len: 1,
        ..PlannedRequest::default()
    }
}

/// One server: a request is one step, and one sequence at a time.
fn single_server(
    rate: f64,
    count: usize,
    seed: u64,
    mut service: impl FnMut() -> f64 + 'static,
) -> (Vec<PlannedRequest>, Run) {
    let plan: Vec<PlannedRequest> =
        deadlines(Arrivals::Poisson, None, rate, count, seed).into_iter().map(one_token).collect();
    let run = serve(&plan, LoadMode::Open, options(1), move |_| StepOutcome::Takes {
        device: Nanos(service()),
        host: Nanos(0.0),
    });
    (plan, run)
}

fn exponential(seed: u64) -> impl FnMut() -> f64 {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    move || {
        let draw: f64 = Exp1.sample(&mut random);
        draw * 1e9
    }
}

#[test]
fn every_wait_is_that_of_lindleys_recursion() {
    let (plan, run) = single_server(0.9, 10_000, 7, exponential(8));
    let mut service = exponential(8);
    let mut free_at = 0.0_f64;
    for (planned, record) in plan.iter().zip(&run.records) {
        let start = planned.arrival.0.max(free_at);
        free_at = start + service();
        assert!((record.started.unwrap().0 - start).abs() < 1e-3);
        assert!((record.last_token.unwrap().0 - free_at).abs() < 1e-3);
    }
}

/// Steps of 1 ms, requests every 10 ms, one stall of 1.4 s.
#[test]
fn a_planted_stall_appears_in_p99_ttft_where_the_arithmetic_puts_it() {
    let plan: Vec<PlannedRequest> =
        deadlines(Arrivals::Constant, None, 100.0, 10_000, 0).into_iter().map(one_token).collect();
    let run = serve(&plan, LoadMode::Open, options(256), |info| StepOutcome::Takes {
        device: Nanos(if info.index == 5_000 { 1.4e9 } else { 1e6 }),
        host: Nanos(0.0),
    });
    let ttft = result(&run, &plan, "").ttft_ns.unwrap();
    // The stalled request waits 1.4 s, the next 1.39 s + 1 ms ...: 140 requests wait 1.4 s − 10 ms · i. Of 10,000, 100 lie above p99:
    // the 101st from the top waits about 0.4 s.
    let p99 = ttft.p99.unwrap().value() / 1e9;
    assert!((p99 / 0.4 - 1.0).abs() < 0.05, "{p99}");
    assert!((ttft.max.unwrap().value() / 1.4e9 - 1.0).abs() < 0.01);
    assert!((ttft.p50.unwrap().value() / 1e6 - 1.0).abs() < 1e-6);
}

#[test]
fn a_closed_loop_hides_the_stall_that_an_open_one_shows() {
    let plan: Vec<PlannedRequest> =
        deadlines(Arrivals::Constant, None, 100.0, 10_000, 0).into_iter().map(one_token).collect();
    let script = |info: StepInfo| StepOutcome::Takes {
        device: Nanos(if info.index == 5_000 { 1.4e9 } else { 1e6 }),
        host: Nanos(0.0),
    };
    let run = serve(&plan, LoadMode::Closed { concurrency: 1 }, options(256), script);
    let seen = summarise(&run, &traffic(&plan, LoadMode::Closed { concurrency: 1 }), &Slo::default());
    assert!(seen.ttft_ns.unwrap().p99.unwrap().value() < 1.1e6, "one request in 10,000 met the stall");
    assert_eq!(seen.offered_per_s, None);
    // Arrivals that do not wait meet it 140 times.
    let open = result(&serve(&plan, LoadMode::Open, options(256), script), &plan, "");
    assert!(open.ttft_ns.unwrap().p99.unwrap().value() > 0.3e9, "a hundredth of them waited for long");
}

#[test]
fn tokens_of_a_decode_have_the_times_of_its_steps() {
    let plan = [PlannedRequest {
        arrival: Nanos(5e6),
        prompt: vec![PromptSegment { source: 1, tokens: 100 }],
        output_len: 11,
        ..PlannedRequest::default()
    }];
    let run = serve(&plan, LoadMode::Open, options(4), |info| StepOutcome::Takes {
        device: Nanos(if info.tokens > 1 { 50e6 } else { 10e6 }),
        host: Nanos(1e6),
    });
    let seen = result(&run, &plan, "ttft_p50=51ms,tpot_p50=11ms,e2e_p50=161ms");
    assert_eq!(seen.slo_met, None, "one request decides nothing");
    assert!((seen.goodput_share.unwrap() - 1.0).abs() < f64::EPSILON);
    assert!(
        (seen.ttft_ns.unwrap().p50.unwrap().value() - 51e6).abs() < 1.0,
        "50 ms on the device, 1 ms to read"
    );
    assert!((seen.tpot_ns.unwrap().p50.unwrap().value() - 11e6).abs() < 1.0);
    assert!((seen.e2e_ns.unwrap().p50.unwrap().value() - 161e6).abs() < 1.0);
    let itl = seen.itl_ns.unwrap();
    assert_eq!((itl.n, itl.p99), (10, None));
    assert!((seen.breakdown.idle_ns - 5e6).abs() < 1.0);
    assert!((seen.breakdown.sample_ns - 11e6).abs() < 1.0);
    assert!((seen.breakdown.device_ns - 150e6).abs() < 1.0);
    assert!(seen.breakdown.other_ns < 1.0);
}

#[test]
fn one_token_has_no_tpot_and_a_reject_is_infinitely_slow() {
    let mut plan: Vec<PlannedRequest> = (0..40_u32).map(|i| one_token(Nanos(f64::from(i) * 1e6))).collect();
    for request in &mut plan[..4] {
        request.output_len = 1_000_000;
    }
    let run = serve(&plan, LoadMode::Open, options(4), |_| StepOutcome::Takes {
        device: Nanos(1e3),
        host: Nanos(0.0),
    });
    assert_eq!(run.records[0].outcome, RequestOutcome::Rejected(RejectReason::ExceedsContext));
    let seen = result(&run, &plan, "ttft_p95=1ms,tpot_p50=1ms");
    assert_eq!((seen.served, seen.measured), (36, 40));
    assert_eq!(seen.rejected["exceeds_context"], 4);
    let ttft = seen.ttft_ns.unwrap();
    assert_eq!((ttft.n, ttft.infinite), (40, 4));
    assert_eq!(serde_json::to_value(ttft.max).unwrap(), "infinite");
    assert!(ttft.p90.unwrap().value() < 1e6 && ttft.p95.is_none());
    let tpot = seen.tpot_ns.unwrap();
    assert_eq!((tpot.n, tpot.infinite, tpot.missing), (4, 4, 36));
    assert_eq!(seen.tpot_clause_dropped, 36);
    assert!((seen.goodput_share.unwrap() - 0.9).abs() < 1e-12, "a null TPOT drops its clause");
    assert_eq!(
        (seen.slo[0].observed, seen.slo_met),
        (None, None),
        "too few for a p95, and four for a median"
    );
}

#[test]
fn an_overloaded_server_is_called_saturated_and_its_percentiles_are_refused() {
    let (plan, run) = single_server(1.3, 2_000, 9, exponential(10));
    let seen = result(&run, &plan, "ttft_p95=10h,tpot_p50=1s");
    assert_eq!(seen.validity, Validity::Saturated, "{:?}", seen.reasons);
    assert_eq!((seen.ttft_ns, seen.e2e_ns, seen.slo_met), (None, None, Some(false)));
    assert!((seen.served_per_s - 1.0).abs() < 0.1, "throughput is still a result: {}", seen.served_per_s);
}

#[test]
fn a_stable_server_is_not_called_saturated() {
    let mut called = 0;
    for seed in 0..40 {
        let (plan, run) = single_server(0.8, 3_000, seed, exponential(seed + 1_000));
        called += usize::from(result(&run, &plan, "").validity != Validity::Valid);
    }
    assert!(called <= 3, "{called} of 40");
}

#[test]
fn a_short_overload_of_a_full_batch_is_called_saturated() {
    // Sixteen at a time, each for sixteen steps of 1 ms: 1,000 requests per second, and 1.2 times as many come.
    let mut called = 0;
    for seed in 0..20 {
        let mut plan: Vec<PlannedRequest> =
            deadlines(Arrivals::Poisson, None, 1_200.0, 1_700, seed).into_iter().map(one_token).collect();
        for request in &mut plan {
            request.output_len = 16;
        }
        let run = serve(&plan, LoadMode::Open, options(16), |_| StepOutcome::Takes {
            device: Nanos(1e6),
            host: Nanos(0.0),
        });
        let traffic = Traffic { measured: 200..1_700, ..traffic(&plan, LoadMode::Open) };
        let seen = summarise(&run, &traffic, &Slo::default());
        // Where it is not called, the report calls it unknown.
        let undecided = seen.gates.iter().any(|g| g.name == GateName::KeepsUp && g.passed.is_none());
        assert!(undecided || seen.validity == Validity::Saturated, "{:?}", seen.gates);
        called += usize::from(seen.validity == Validity::Saturated);
    }
    assert!(called >= 17, "{called} of 20");
}

#[test]
fn a_short_stable_run_is_not_called_saturated() {
    let mut called = 0;
    for seed in 0..40 {
        let (plan, run) = single_server(0.7, 300, seed, exponential(seed + 5_000));
        called += usize::from(result(&run, &plan, "").validity != Validity::Valid);
    }
    assert!(called <= 3, "{called} of 40");
}

#[test]
fn requests_at_once_give_throughput_and_the_latency_of_that_many() {
    let plan = Workload::fixed(64, 8).unwrap().plan(None, Arrivals::Poisson, None, 50, 1);
    let run = serve(&plan, LoadMode::Open, options(16), |_| StepOutcome::Takes {
        device: Nanos(1e6),
        host: Nanos(0.0),
    });
    let seen = result(&run, &plan, "");
    assert_eq!((seen.validity, seen.served), (Validity::Saturated, 50));
    // 16 at a time, 8 steps of 1 ms each: the last two of 50 begin after three such batches.
    let last = seen.ttft_ns.as_ref().and_then(|ttft| ttft.max).unwrap().value();
    assert!(last >= 24e6, "{last}");
    assert!(seen.tpot_ns.is_some(), "a step is a step, however long one waited for it");
    assert!(seen.output_tokens_per_s > 0.0);
}

#[test]
fn an_engine_that_fails_once_fails_only_what_it_was_serving() {
    let plan: Vec<PlannedRequest> = (0..10_u32).map(|i| one_token(Nanos(f64::from(i) * 1e9))).collect();
    let run = serve(&plan, LoadMode::Open, options(4), |info| {
        if info.index == 3 {
            StepOutcome::Fails(EngineError::Device { device: "scripted".into(), detail: "planted".into() })
        } else {
            StepOutcome::Takes { device: Nanos(1e6), host: Nanos(0.0) }
        }
    });
    let seen = result(&run, &plan, "");
    assert_eq!((seen.served, seen.rejected["engine_failed"]), (9, 1));
    assert_eq!(seen.validity, Validity::Invalid);
    let gate = GateName::Engine;
    assert!(
        matches!(&seen.reasons[0], Cause::GateFailed { gate: of, detail } if *of == gate && detail.contains("planted")),
        "{:?}",
        seen.reasons
    );
}

#[test]
fn an_engine_that_stays_broken_ends_the_run_and_the_rest_is_unfinished() {
    let plan: Vec<PlannedRequest> = (0..10_u32).map(|i| one_token(Nanos(f64::from(i) * 1e9))).collect();
    let run = serve(&plan, LoadMode::Open, options(4), |_| {
        StepOutcome::Fails(EngineError::Device { device: "scripted".into(), detail: "planted".into() })
    });
    let seen = result(&run, &plan, "");
    assert_eq!((seen.served, seen.unfinished, seen.rejected["engine_failed"]), (0, 7, 3));
    assert_eq!(seen.ttft_ns.unwrap().infinite, 10);
}

#[test]
fn warm_up_and_cool_down_are_served_and_not_measured() {
    let plan: Vec<PlannedRequest> = (0..100_u32).map(|i| one_token(Nanos(f64::from(i) * 1e6))).collect();
    let clock = VirtualClock::default();
    let architecture = test_shapes::smollm2_135m();
    let inventory = architecture.inventory(Dtype::Bf16);
    let script = |_| StepOutcome::Takes { device: Nanos(3e6), host: Nanos(0.0) };
    let mut session = ScriptedSession::new(architecture, inventory, &clock, Box::new(script));
    let mut executor = SessionExecutor::new(&mut session, Sampler::new(Sampling::GREEDY));
    let traffic = Traffic { measured: 10..60, ..traffic(&plan, LoadMode::Open) };
    let run = run(&traffic, options(4), &mut executor, &mut clock.clone(), None, &mut |_| {}).unwrap();
    let seen = summarise(&run, &traffic, &Slo::default());
    assert_eq!((seen.warmup_requests, seen.measured, seen.served), (10, 50, 50));
    assert!(seen.cooldown_requests > 0 && run.loaded_until.is_none());
    // The loop ends with the last measured request.
    assert!(run.end < 80e6, "{}", run.end);
}
