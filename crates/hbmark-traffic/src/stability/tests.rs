use super::*;
use crate::gates::keeps_up;
use crate::point::PointSpec;
use crate::test_queues::{BATCHES, SERVICES, Server, extended, simulated, spec};
use hbmark_core::result::serving::{
    Arrivals, GateName, Offered, SchedulerConfig, ServeResult, Slo, Validity,
};
use hbmark_core::units::whole_count;

/// The verdict on a queue of a utilisation, extended until it is decided.
fn verdict(server: Server, utilisation: f64, requests: usize, seed: u64) -> Option<bool> {
    let run = extended(server, utilisation, &Slo::default(), (requests, 262_144), seed);
    let records = &run.records[run.measured.clone()];
    let window = Window { from: records[0].arrival.0, to: records[records.len() - 1].arrival.0 };
    keeps_up(&run, records, &window).passed()
}

/// Judges 2,000 queues; their random numbers begin at a seed.
fn judge_queues(first_seed: u64) {
    const EACH: u32 = 200;
    let (mut wrong, mut open) = (Vec::new(), Vec::new());
    let singles = SERVICES.map(Server::Single);
    let mut judged = 0;
    for (kind, servers) in [singles, BATCHES].into_iter().enumerate() {
        for (index, server) in servers.into_iter().enumerate() {
            for i in 0..EACH {
                // From 0.3 to 1.2, and no two queues at the same place.
                let share = (f64::from(i) + (kind * 5 + index) as f64 / 10.0) / f64::from(EACH);
                let utilisation = 0.3 + 0.9 * share;
                let requests = [100, 1000][(i % 2) as usize];
                let seed = first_seed + u64::from(i) * 10 + (kind * 5 + index) as u64;
                let said = verdict(server, utilisation, requests, seed);
                judged += 1;
                let case = format!("{server:?} at {utilisation:.3}: {said:?}");
                if said == Some(utilisation >= 1.0) {
                    wrong.push(case);
                } else if said.is_none() && !(0.97..=1.03).contains(&utilisation) {
                    open.push(case);
                }
            }
        }
    }
    assert_eq!(judged, 2_000);
    assert!(wrong.len() <= 20, "{} of {judged} wrong: {wrong:#?}", wrong.len());
    assert!(open.is_empty(), "undetermined: {open:#?}");
    println!("{} of {judged} wrong: {wrong:#?}", wrong.len());
}

#[test]
fn queues_are_called_by_their_utilisation() {
    judge_queues(0);
}

#[test]
#[ignore = "minutes"]
fn queues_of_other_seeds_are_called_by_their_utilisation() {
    judge_queues(1_000_000);
    judge_queues(2_000_000);
}

#[test]
fn as_many_requests_as_an_open_verdict_asks_for_mostly_decide_it() {
    let singles = SERVICES.map(Server::Single);
    let (mut asked, mut decided, mut wrong) = (0, 0, 0);
    for server in singles.into_iter().chain(BATCHES) {
        for (step, utilisation) in [0.1, 0.3, 0.5, 0.7].into_iter().enumerate() {
            for seed in 0..4 {
                let judged = |requests, seed| {
                    let run = crate::test_queues::run(server, utilisation, requests, seed);
                    let records = &run.records[run.measured.clone()];
                    let window =
                        Window { from: records[0].arrival.0, to: records[records.len() - 1].arrival.0 };
                    keeps_up(&run, records, &window)
                };
                let seed = 1000 * seed + 10 * step as u64;
                let Some(needed) = judged(150, seed).needed() else { continue };
                assert!((300.0..1e6).contains(&needed), "{server:?} at {utilisation}: {needed}");
                asked += 1;
                match judged(whole_count(needed), seed + 1).passed() {
                    Some(true) => decided += 1,
                    Some(false) => wrong += 1,
                    None => {}
                }
            }
        }
    }
    println!("{asked} asked for more, {decided} decided then, {wrong} wrong");
    assert!(asked >= 80, "{asked}");
    assert!(decided * 4 >= asked * 3 && wrong == 0, "{decided} of {asked} decided, {wrong} wrong");
}

#[test]
fn a_server_that_fills_up_is_not_yet_saturated() {
    // 64 at a time and a load that holds about 40 of them: the first requests only fill it.
    let run = crate::test_queues::run(BATCHES[2], 0.8, 100, 1);
    let records = &run.records[..60];
    let window = Window { from: 0.0, to: records[59].arrival.0 };
    assert_eq!(keeps_up(&run, records, &window).passed(), None);
}

#[test]
fn averages_over_bins_are_those_of_the_spans() {
    let spans = [(1.0, 5.0), (1.0, 5.0), (3.0, 5.0), (3.0, 5.0)];
    let bins = |from, to, count| super::bins(spans.into_iter(), &Window { from, to }, count);
    assert_eq!(bins(2.0, 6.0, 2), [3.0, 2.0]);
    assert_eq!(bins(0.0, 2.0, 2), [0.0, 2.0]);
    assert_eq!(bins(6.0, 8.0, 2), [0.0, 0.0]);
    assert_eq!(super::bins(std::iter::empty(), &Window { from: 2.0, to: 6.0 }, 4), [0.0; 4]);
}

/// Requests that come one after another, a second apart, and wait and stay for so long.
fn stays(waits: f64, takes: f64) -> Vec<Stay> {
    let stay = |at| Stay { arrival: at, begun: at + waits, departed: at + waits + takes };
    (0..200_u16).map(|i| stay(f64::from(i))).collect()
}

const SECONDS_200: Window = Window { from: 0.0, to: 199.0 };

#[test]
fn too_few_requests_decide_nothing() {
    let grows = stays(200.0, 1.0);
    let seen = stability(&grows, &SECONDS_200, 99, 1.0);
    assert_eq!((seen.verdict, seen.growth), (Verdict::Undetermined(UndecidedReason::TooFewRequests), None));
    assert_eq!(stability(&grows, &SECONDS_200, 100, 1.0).verdict, Verdict::Saturated);
}

#[test]
fn requests_that_come_within_a_step_or_within_a_service_show_nothing() {
    let judge = |stays: &[Stay], window, alone| stability(stays, &window, 200, alone).verdict;
    let short = Verdict::Undetermined(UndecidedReason::ShortWindow);
    // All of them wait for the end of the step that is running, and are begun together.
    let step: Vec<Stay> =
        stays(0.0, 0.0).iter().map(|s| Stay { begun: 250.0, departed: 500.0, ..*s }).collect();
    assert_eq!(judge(&step, SECONDS_200, 250.0), short);
    // A second apart, one after the other takes three: the last waits for 400.
    let queue = (0..200_u16).map(f64::from);
    let queue: Vec<Stay> =
        queue.map(|i| Stay { arrival: i, begun: 3.0 * i, departed: 3.0 * i + 3.0 }).collect();
    assert_eq!(judge(&queue, SECONDS_200, 3.0), Verdict::Saturated);
    // As many leave as come, but none of those that came.
    let earlier =
        |s: &Stay| Stay { arrival: s.arrival - 300.0, begun: s.arrival - 300.0, departed: s.arrival };
    let mut before: Vec<Stay> = stays(0.0, 300.0).iter().map(earlier).collect();
    before.extend(stays(0.0, 300.0));
    assert_eq!(judge(&before, SECONDS_200, 1.0), short);
    assert_eq!(judge(&stays(0.0, 2.0), Window { from: 10.0, to: 199.0 }, 1.0), Verdict::KeepsUp);
    // At one moment: the window goes on until they are done, and the queue only shrinks.
    let at_once: Vec<Stay> = queue.iter().map(|s| Stay { arrival: 3.0, ..*s }).collect();
    assert_eq!(judge(&at_once, Window { from: 3.0, to: 600.0 }, 3.0), short);
    let nobody = Window { from: 1000.0, to: 1000.0 };
    assert_eq!(judge(&queue, nobody, 3.0), short);
}

fn gate(result: &ServeResult) -> (Option<bool>, &str) {
    let gate = result.gates.iter().find(|gate| gate.name == GateName::KeepsUp).unwrap();
    (gate.passed, &gate.detail)
}

#[test]
fn no_server_keeps_up_with_any_rate() {
    for rate in [20.0, 300.0, 1e4, 1e6, 9e8] {
        for arrivals in [Arrivals::Poisson, Arrivals::Constant] {
            for max_requests in [0, 1600] {
                let spec = PointSpec { arrivals, max_requests, ..spec(Offered::Rate(rate)) };
                let (_, result) = simulated(&spec);
                let said = gate(&result);
                assert_eq!((said.0, result.validity), (Some(false), Validity::Saturated), "{rate}: {said:?}");
                // All fit into a step or two: the next hundred might, too.
                let scheduler = SchedulerConfig {
                    max_num_seqs: 10_000,
                    max_num_batched_tokens: 1_000_000,
                    num_blocks: 100_000,
                    ..spec.scheduler.clone()
                };
                let (_, result) = simulated(&PointSpec { scheduler, ..spec });
                assert_ne!(gate(&result).0, Some(true), "{rate}: {:?}", gate(&result));
                assert!(rate < 1e5 || gate(&result).0.is_none(), "{rate}: {:?}", gate(&result));
            }
        }
    }
}

#[test]
fn what_is_undetermined_says_what_ended_it() {
    let ended = |spec: &PointSpec| {
        let (_, result) = simulated(spec);
        let (passed, detail) = gate(&result);
        assert_eq!(passed, None, "{detail}");
        detail.rsplit_once(" (").unwrap().1.to_owned()
    };
    // At half of its capacity, and still too few.
    let near = PointSpec { requests: 100, ..spec(Offered::Rate(4.3)) };
    assert_eq!(ended(&near), "--requests ended this one after 100)");
    assert_eq!(
        ended(&PointSpec { max_requests: 200, ..near.clone() }),
        "--max-requests ended this one after 200)"
    );
    let limit = Some(hbmark_core::units::Nanos::from_seconds(20.0));
    let cut = ended(&PointSpec { time_limit: limit, ..near });
    assert!(cut.starts_with("--time-limit ended this one after "), "{cut}");
    assert_ne!(cut, "--time-limit ended this one after 100)");
}

#[test]
fn a_gate_that_is_not_judged_says_from_when_on_it_is() {
    let detail = |requests, name| {
        let (_, result) = simulated(&PointSpec { requests, ..spec(Offered::Rate(4.3)) });
        let gate = result.gates.into_iter().find(|gate| gate.name == name).unwrap();
        (gate.passed, gate.detail)
    };
    let (passed, law) = detail(400, GateName::LittlesLaw);
    assert!(passed.is_none() && law.ends_with("; judged from 1000 requests on"), "{law}");
    let (passed, law) = detail(1000, GateName::LittlesLaw);
    assert!(passed == Some(true) && !law.contains("judged"), "{law}");
    let (passed, rate) = detail(60, GateName::RealisedRate);
    assert!(passed.is_none() && rate.ends_with("; judged from 100 on"), "{rate}");
}
