use crate::latency::summarise;
use crate::point::{PointSpec, TrafficSource};
use crate::serving_loop::RequestOutcome;
use crate::test_queues::{simulated, simulated_plan, spec};
use crate::workload::Workload;
use hbmark_core::result::serving::{
    Failure, Gate, GateName, Offered, SchedulerConfig, ServeResult, Slo, Validity,
};
use hbmark_core::units::Nanos;

/// A point on the virtual clock, whose capacity is about nine requests a second.
fn at(rate: f64, requests: usize, max_requests: usize, slo: &str) -> ServeResult {
    let slo: Slo = if slo.is_empty() { Slo::default() } else { slo.parse().unwrap() };
    simulated(&PointSpec { requests, max_requests, slo, ..spec(Offered::Rate(rate)) }).1
}

fn keeps_up(result: &ServeResult) -> &Gate {
    result.gates.iter().find(|gate| gate.name == GateName::KeepsUp).expect("an open loop has this gate")
}

#[test]
fn goodput_is_of_the_requests_that_count_and_not_of_those_that_found_an_empty_system() {
    // Those of the warm-up wait for less than a second, those behind them for two and more.
    let beyond = at(100.0, 400, 0, "ttft_p50=1s");
    assert_eq!((beyond.goodput_per_s, beyond.goodput_share), (Some(0.0), Some(0.0)));
    assert!(beyond.served_per_s > 5.0, "{beyond:?}");
    let within = at(1.0, 400, 0, "ttft_p50=100s");
    assert_eq!((within.goodput_per_s, within.goodput_share), (Some(within.served_per_s), Some(1.0)));
}

#[test]
fn an_overloaded_system_has_the_throughput_of_its_capacity_however_fast_requests_come() {
    for rate in [30.0, 100.0, 1_000.0, 100_000.0] {
        let beyond = at(rate, 400, 0, "");
        let per_s = beyond.served_per_s;
        assert!((per_s / 9.0 - 1.0).abs() < 0.1, "{per_s} at {rate}");
        let tokens = beyond.output_tokens_per_s / per_s;
        let mean = beyond.requests.as_ref().map(|r| r.output_tokens.iter().sum::<usize>() as f64 / 400.0);
        assert!((tokens / mean.unwrap() - 1.0).abs() < 0.15, "{tokens} tokens a request, of {mean:?}");
        assert!((beyond.offered_per_s.unwrap() / rate - 1.0).abs() < 0.15, "{:?}", beyond.offered_per_s);
    }
}

/// Lengths that vary: while the longest outputs are made, the other places need more requests than were measured.
#[test]
fn a_closed_loop_holds_its_load_until_the_last_measured_request_is_done() {
    for (concurrency, requests) in [(1, 20), (16, 50), (64, 100), (128, 100)] {
        let scheduler = SchedulerConfig {
            max_num_seqs: 256,
            num_blocks: 1 << 16,
            max_model_len: 1 << 16,
            ..SchedulerConfig::UNLIMITED
        };
        let source = TrafficSource::Workload(Workload::named("chat").unwrap());
        let warmup = 2 * concurrency;
        let closed =
            PointSpec { source, requests, warmup, scheduler, ..spec(Offered::Concurrency(concurrency)) };
        let (_, result) = simulated(&closed);
        let held = (result.mean_running + result.mean_waiting) / concurrency as f64;
        assert!((held - 1.0).abs() < 0.01, "{held} of {concurrency}");
        assert_eq!(result.validity, Validity::Valid, "{:?}", result.reasons);
    }
}

#[test]
fn load_that_ends_before_the_measured_requests_do_makes_a_point_invalid() {
    for offered in [Offered::Concurrency(16), Offered::Rate(5.0)] {
        let spec = PointSpec { requests: 10, ..spec(offered) };
        let (plan, measured) = spec.plan().unwrap();
        let with = |more: usize| {
            let plan = &plan[..measured.end + more];
            simulated_plan(&spec, plan, measured.clone()).1
        };
        let short = with(0);
        assert_eq!(short.validity, Validity::Invalid, "{offered:?}");
        assert!(short.failed(GateName::SustainedLoad), "{:?}", short.gates);
        assert!(!with(30).failed(GateName::SustainedLoad), "{offered:?}");
    }
}

#[test]
fn in_a_closed_loop_a_turn_follows_the_one_before_it_and_as_many_conversations_go_on_as_there_are_places() {
    let source = TrafficSource::Workload(Workload::named("agents").unwrap());
    let scheduler = SchedulerConfig {
        max_num_seqs: 64,
        num_blocks: 1 << 16,
        max_model_len: 1 << 17,
        ..SchedulerConfig::UNLIMITED
    };
    let closed = PointSpec { source, requests: 60, scheduler, ..spec(Offered::Concurrency(4)) };
    let (plan, _) = closed.plan().unwrap();
    let (run, result) = simulated(&closed);
    let mut turns = 0;
    for (record, planned) in run.records.iter().zip(&plan) {
        let Some(before) = planned.after.filter(|_| record.enqueued.is_some()) else { continue };
        let departed = run.records[before as usize].departed.unwrap();
        assert!(record.arrival.0 >= departed.0, "{record:?} after {departed:?}");
        turns += 1;
    }
    assert!(turns > 60, "{turns}");
    assert!((result.mean_running + result.mean_waiting - 4.0).abs() < 0.04, "{result:?}");
    // First turns before those of another conversation that has begun would be more conversations than places.
    let begun = |key: usize| run.records[key].enqueued.map(|at| at.0);
    let first = |key: &usize| plan[*key].after.is_none();
    for key in (0..plan.len()).filter(first) {
        let Some(at) = begun(key) else { continue };
        let going_on = (0..plan.len()).filter(|other| *other != key && first(other)).filter(|other| {
            let last = (*other..plan.len()).take_while(|k| k == other || plan[*k].after.is_some()).last();
            begun(*other).is_some_and(|begun| begun < at)
                && run.records[last.unwrap()].departed.is_none_or(|end| end.0 > at)
        });
        assert!(going_on.count() < 4, "when conversation {key} begins");
    }
}

#[test]
fn a_run_that_served_nothing_is_invalid() {
    let spec = PointSpec { requests: 400, time_limit: Some(Nanos(1e6)), ..spec(Offered::Rate(1.0)) };
    let nothing = simulated(&spec).1;
    assert_eq!((nothing.served, nothing.validity), (0, Validity::Invalid));
    assert!(nothing.gates.iter().any(|gate| gate.name == GateName::Served), "{:?}", nothing.gates);
}

#[test]
fn requests_that_fail_make_a_point_invalid_and_those_that_were_turned_away_do_not() {
    let spec = PointSpec { requests: 400, warmup: 0, ..spec(Offered::Rate(1.0)) };
    let (plan, measured) = spec.plan().unwrap();
    let traffic = spec.traffic(&plan, measured, 1000, &[]);
    let with = |failed: usize, failure| {
        let (mut run, _) = simulated(&spec);
        let first = run.measured.start;
        for record in &mut run.records[first..first + failed] {
            record.outcome = RequestOutcome::Failed(failure);
        }
        let result = summarise(&run, &traffic, &spec.slo);
        let failed = result.gates.into_iter().find(|gate| gate.name == GateName::Served);
        (result.validity, failed.map(|gate| gate.detail))
    };
    assert_eq!(with(20, Failure::Status(500)), (Validity::Valid, None));
    let (validity, detail) = with(21, Failure::Status(500));
    assert_eq!(validity, Validity::Invalid);
    assert!(detail.unwrap().starts_with("21 of the 400 measured requests failed"));
    for load in [Failure::Status(503), Failure::Status(504), Failure::FirstTokenTimeout] {
        assert_eq!(with(21, load).1, None, "{load:?}");
    }
}

#[test]
fn too_few_requests_leave_open_whether_the_system_keeps_up() {
    for rate in [1.0, 100.0] {
        let few = at(rate, 60, 0, "");
        let gate = keeps_up(&few);
        assert_eq!(gate.passed, None, "{rate}");
        assert!(
            gate.detail.contains("60 requests were offered; at fewer than 100 no trend"),
            "{}",
            gate.detail
        );
        assert!(few.steadiness_open().is_some() && few.held().0.is_none());
    }
    assert_eq!(keeps_up(&at(1.0, 400, 0, "")).passed, Some(true));
}

#[test]
fn what_ended_a_run_is_named() {
    let open = |max_requests, slo: &str| {
        let near = (0..20).map(|i| at(8.0 + 0.1 * f64::from(i), 200, max_requests, slo));
        near.map(|result| keeps_up(&result).clone())
            .find(|gate| gate.passed.is_none())
            .expect("one is open")
            .detail
    };
    // Ended by an objective long before so many were measured.
    let missed = open(65_536, "ttft_p90=1us");
    assert!(missed.ends_with("(a missed objective ended this one after 200)"), "{missed}");
    let most = open(400, "");
    assert!(most.ends_with("(--max-requests ended this one after 400)"), "{most}");
    let exactly = open(0, "");
    assert!(exactly.ends_with("(--requests ended this one after 200)"), "{exactly}");
}

/// Of a live server nobody knows before how long a request stays there.
#[test]
fn requests_that_came_while_the_system_filled_up_are_not_measured() {
    let wide = spec(Offered::Rate(5.0));
    let scheduler = SchedulerConfig {
        max_num_seqs: 100,
        num_blocks: 4_000,
        max_num_batched_tokens: 128,
        ..wide.scheduler.clone()
    };
    let source = TrafficSource::Workload(Workload::fixed(40, 80).unwrap());
    for seed in 0..5 {
        let (source, scheduler) = (source.clone(), scheduler.clone());
        let short = PointSpec { requests: 100, warmup: 4, seed, source, scheduler, ..wide.clone() };
        let (_, filling) = simulated(&short);
        let (run, settled) = simulated(&PointSpec { settles: true, ..short });
        let inside = settled.mean_running + settled.mean_waiting;
        assert!(inside > 5.0 && (filling.warmup_requests as f64) < inside, "{inside}");
        assert!(settled.warmup_requests as f64 > 1.3 * inside, "{}", settled.warmup_requests);
        assert_eq!((settled.measured, settled.served, run.measured.len()), (100, 100, 100));
    }
    // What fills without end is called saturated as early as before.
    let over = PointSpec { requests: 400, settles: true, ..spec(Offered::Rate(20.0)) };
    let (_, over) = simulated(&over);
    assert_eq!((over.validity, over.warmup_requests), (Validity::Saturated, 20));
}
