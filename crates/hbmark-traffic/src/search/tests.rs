use super::*;
use crate::latency::summarise;
use crate::point::{PointSpec, TrafficSource};
use crate::test_queues::{BATCHES, Server, Service, extended, plan, run, simulated, spec, traffic};
use crate::trace::{Trace, TraceRequest};
use hbmark_core::result::Cause;
use hbmark_core::result::serving::Quantity;
use hbmark_core::result::serving::{Arrivals, GateName, Offered, ServeReport};
use hbmark_core::units::Nanos;

/// A point without a result.
fn blank(rate: f64) -> Point {
    let report: ServeReport =
        serde_json::from_str(include_str!("../../../../fuzz/seeds/serve.json")).unwrap();
    Point { offered: Offered::Rate(rate), result: None, ..report.points[0].clone() }
}

fn measure(server: Server, rate: f64, slo: &Slo, sizes: (usize, usize), seed: u64) -> ServeResult {
    let run = extended(server, rate, slo, sizes, seed);
    let plan = plan(&run);
    let result = summarise(&run, &traffic(&plan, &run), slo);
    ServeResult { requests: None, timeline: None, ..result }
}

fn config(start: f64, seeds: usize) -> SearchConfig {
    SearchConfig {
        start,
        lowest: start / 65_536.0,
        highest: start * 256.0,
        precision: 0.03,
        seeds,
        recorded: None,
    }
}

fn search(server: Server, slo: &Slo, requests: usize, seed: u64) -> Search {
    let blank = blank(1.0);
    let mut points = Vec::new();
    find_max_rate::<()>(&config(0.3, 3), slo, seed * 1000, &mut points, |trial, seed| {
        let (rate, times) = match trial {
            Trial::Rate(rate) => (rate, 1),
            Trial::Sustained(rate) => (rate, 3),
            // Nothing is served one at a time here.
            Trial::Alone(_) => return Ok(blank.clone()),
        };
        let sizes = (requests * times, 65_536.max(requests) * times);
        let result = measure(server, rate, slo, sizes, seed);
        Ok(Point { result: Some(result), ..blank.clone() })
    })
    .unwrap()
}

/// The rate that a run of 200,000 requests holds.
fn reference(server: Server, slo: &Slo) -> f64 {
    let holds = |rate: f64| {
        let run = run(server, rate, 200_000, 99);
        let plan = plan(&run);
        summarise(&run, &traffic(&plan, &run), slo).held().0 == Some(true)
    };
    let (mut low, mut high) = (0.01, 1.5);
    while high / low > 1.002 {
        let middle = f64::sqrt(low * high);
        if holds(middle) { low = middle } else { high = middle }
    }
    low
}

/// Four loads: one that its queue limits smoothly, two near saturation, one with heavy tails.
fn loads() -> [(Server, Slo); 4] {
    let slo = |text: &str| text.parse::<Slo>().unwrap();
    [
        (Server::Single(Service::Exponential), slo("ttft_p95=12s")),
        (Server::Single(Service::Constant), slo("ttft_p95=20s")),
        (Server::Single(Service::Lognormal), slo("e2e_p95=15s")),
        (BATCHES[1], slo("e2e_p95=40s")),
    ]
}

fn check(seeds: u64, sizes: &[usize]) {
    for (server, slo) in loads() {
        let held = reference(server, &slo);
        for requests in sizes {
            for seed in 0..seeds {
                let found = search(server, &slo, *requests, seed);
                let case = format!("{server:?} with {requests} requests, seed {seed}: {found:?}");
                let rate = found.max_rate.unwrap_or_else(|| panic!("none found: {case}"));
                assert!((rate / held - 1.0).abs() <= 0.05, "{rate} against {held}: {case}");
                let (low, high) = found.range().unwrap();
                assert!(low <= high && rate <= high * 1.000_001, "{case}");
                let beyond = measure(server, rate * 1.1, &slo, (*requests, 65_536), seed + 7_777);
                assert_eq!(beyond.held().0, Some(false), "beyond it: {case}");
            }
            println!("{server:?}: {requests} requests, {seeds} seeds: all within 5 % of {held:.3}");
        }
    }
}

#[test]
fn the_rate_found_is_that_of_a_long_run() {
    check(1, &[1_000]);
}

#[test]
#[ignore = "minutes"]
fn the_rate_found_is_that_of_a_long_run_over_seeds_and_sample_sizes() {
    check(20, &[1_000, 2_000, 5_000, 10_000, 20_000]);
}

/// The rate of a trial that has one.
fn rate_of(trial: Trial) -> Option<f64> {
    match trial {
        Trial::Rate(rate) | Trial::Sustained(rate) => Some(rate),
        Trial::Alone(_) => None,
    }
}

/// What a trial measures of a load.
fn of_trial(spec: &PointSpec, trial: Trial, seed: u64) -> PointSpec {
    let (offered, requests, slo) = match trial {
        Trial::Rate(rate) => (Offered::Rate(rate), spec.requests, spec.slo.clone()),
        Trial::Sustained(rate) => (Offered::Rate(rate), 3 * spec.requests, spec.slo.clone()),
        Trial::Alone(requests) => (Offered::Concurrency(1), requests, Slo::default()),
    };
    PointSpec { offered, requests, max_requests: 0, seed, slo, ..spec.clone() }
}

/// A search in which rates up to a limit hold, and what it measured.
fn scripted(config: &SearchConfig, holds: impl Fn(f64) -> Option<bool>) -> (Search, Vec<f64>) {
    let slo: Slo = "ttft_p95=1s".parse().unwrap();
    let valid = measure(Server::Single(Service::Constant), 0.3, &slo, (1000, 1000), 1);
    assert_eq!(valid.held().0, Some(false), "a service takes a second");
    let (mut rates, mut points) = (Vec::new(), Vec::new());
    let found = find_max_rate::<()>(config, &slo, 0, &mut points, |trial, _| {
        let Some(rate) = rate_of(trial) else { return Ok(blank(1.0)) };
        rates.push(rate);
        let mut result = valid.clone();
        result.slo[0].met = holds(rate);
        Ok(Point { result: Some(result), ..blank(rate) })
    });
    (found.unwrap(), rates)
}

#[test]
fn a_search_goes_down_until_a_rate_holds() {
    let (found, rates) = scripted(&config(100.0, 1), |rate| Some(rate <= 0.05));
    let rate = found.max_rate.unwrap();
    assert!((0.05 / 1.03..=0.05).contains(&rate), "{rate}");
    assert!(found.confirmed && rates.len() < 25, "{rates:?}");
}

#[test]
fn what_a_run_cannot_tell_does_not_hold() {
    let (found, _) = scripted(&config(4.0, 2), |rate| match rate {
        r if r <= 10.0 => Some(true),
        r if r <= 11.0 => None,
        _ => Some(false),
    });
    let rate = found.max_rate.unwrap();
    assert!((10.0 / 1.03..=10.0).contains(&rate), "{rate}");
    let silent = found.attempts.iter().filter(|attempt| attempt.met.is_none()).count();
    assert!(silent > 0);
    let says = format!("{silent} run{} at ", if silent == 1 { "" } else { "s" });
    assert!(found.note.starts_with(&says), "{}", found.note);
    let ends =
        "could not tell after at most 1000 requests and count as not held; raise --max-requests to decide";
    assert!(found.note.ends_with(ends), "{}", found.note);
    // Where every run could tell there is nothing to say.
    assert_eq!(scripted(&config(4.0, 2), |rate| Some(rate <= 10.0)).0.note, "");
}

#[test]
fn rates_whose_runs_are_invalid_are_said_with_the_reason() {
    let slo: Slo = "ttft_p95=1s".parse().unwrap();
    let valid = measure(Server::Single(Service::Constant), 0.3, &slo, (1000, 1000), 1);
    let found = find_max_rate::<()>(&config(1.0, 1), &slo, 0, &mut Vec::new(), |trial, _| {
        let Some(rate) = rate_of(trial) else { return Ok(blank(1.0)) };
        let mut result = valid.clone();
        result.slo[0].met = Some(true);
        if rate > 5.0 {
            result.validity = Validity::Invalid;
            let (gate, detail) = (GateName::InjectionLag, "planted".to_owned());
            result.reasons = vec![Cause::GateFailed { gate, detail }];
        }
        Ok(Point { result: Some(result), ..blank(rate) })
    })
    .unwrap();
    assert!(found.max_rate.unwrap() <= 5.0);
    let note = &found.note;
    assert!(note.contains(" per second invalid and not held: ") && note.contains("planted"), "{note}");
}

/// So many requests of one length, a second apart.
fn recorded(requests: usize) -> PointSpec {
    let request = |second: usize| TraceRequest {
        arrival: Nanos::from_seconds(second as f64),
        input_tokens: 40,
        output_tokens: 20,
        prefix_ids: Vec::new(),
        prefix_block: 0,
        priority: 0,
    };
    let requests: Vec<TraceRequest> = (0..requests).map(request).collect();
    let have = requests.len();
    let trace = Trace { format: "hbmark", requests, left_out: 0 };
    let slo: Slo = "ttft_p90=500ms".parse().unwrap();
    let source = TrafficSource::Trace(std::rc::Rc::new(trace), 1.0);
    PointSpec { source, requests: have, warmup: 10, slo, ..spec(Offered::Rate(1.0)) }
}

#[test]
fn a_search_over_a_trace_goes_down_from_any_rate_and_says_that_no_longer_run_was_possible() {
    let search = |spec: &PointSpec, start| {
        let config = SearchConfig { recorded: spec.recorded(), ..config(start, 2) };
        find_max_rate::<()>(&config, &spec.slo, 0, &mut Vec::new(), |trial, seed| {
            let spec = of_trial(spec, trial, seed);
            let (_, result) = simulated(&spec);
            Ok(Point { result: Some(result), arrivals: None, ..blank(1.0) })
        })
        .unwrap()
    };
    let short = recorded(300);
    let (near, far) = (search(&short, 1.0), search(&short, 5e4));
    let rates = [near.max_rate.unwrap(), far.max_rate.unwrap()];
    assert!(rates.iter().all(|rate| (8.0..10.0).contains(rate)), "{rates:?}");
    assert!((rates[0] / rates[1] - 1.0).abs() < 0.05, "{rates:?}");
    for found in [near, far] {
        assert_eq!((found.confirmed, found.sustained), (true, None));
        let says = "no longer run was possible: 290 requests are all that the trace has to measure";
        assert!(found.note.starts_with(says), "{}", found.note);
    }
    let long = recorded(1000);
    let found = search(&PointSpec { requests: 300, ..long }, 1.0);
    assert_eq!(found.sustained, Some(true));
    assert!(!found.note.contains("no longer run"), "{}", found.note);
}

#[test]
fn a_trace_too_short_for_the_search_or_its_objectives_is_refused_with_both_numbers() {
    let refused = |spec: &PointSpec| spec.check_trend().unwrap_err().to_string();
    assert!(recorded(110).check_trend().is_ok());
    assert_eq!(
        refused(&recorded(109)),
        "a search needs at least 100 measured requests at each rate, to see whether the queue grows, and 99 are measured; raise \
         --requests and give a trace that has them"
    );
    let few = PointSpec { requests: 50, max_requests: 60, ..spec(Offered::Rate(1.0)) };
    assert!(refused(&few).ends_with("and 60 are measured; raise --requests"));
    // A trace does not go on, however many are allowed.
    let tail = PointSpec { slo: "ttft_p99=1s".parse().unwrap(), max_requests: 65_536, ..recorded(600) };
    let (plan, measured) = tail.plan().unwrap();
    let error = tail.check(&plan, &measured).unwrap_err().to_string();
    assert!(error.contains("needs at least 1000 requests") && error.contains("590 are measured"), "{error}");
    // Asked for as many as it needs, of a trace that has fewer.
    let asked = PointSpec { requests: 1000, ..tail };
    let (plan, measured) = asked.plan().unwrap();
    let error = asked.check(&plan, &measured).unwrap_err().to_string();
    assert!(error.contains("590 are measured; raise --requests and give a trace that has them"), "{error}");
}

#[test]
fn no_rate_is_claimed_where_none_holds() {
    let (found, rates) = scripted(&config(1.0, 3), |_| Some(false));
    assert_eq!((found.max_rate, found.confirmed, found.range()), (None, false, None));
    assert!(found.note.contains("not even"), "{}", found.note);
    assert!((rates.last().unwrap() * 65_536.0 - 1.0).abs() < 1e-9);
    // Nor where only short runs hold.
    let slo: Slo = "ttft_p95=1s".parse().unwrap();
    let valid = measure(Server::Single(Service::Constant), 0.3, &slo, (1000, 1000), 1);
    let found = find_max_rate::<()>(&config(1.0, 2), &slo, 0, &mut Vec::new(), |trial, _| {
        let Some(rate) = rate_of(trial) else { return Ok(blank(1.0)) };
        let mut result = valid.clone();
        result.slo[0].met = Some(trial == Trial::Rate(rate) && rate <= 3.0);
        Ok(Point { result: Some(result), ..blank(rate) })
    })
    .unwrap();
    assert_eq!((found.max_rate, found.sustained), (None, Some(false)));
    assert_eq!(found.rate_by_seed.len(), 2);
}

#[test]
fn an_objective_that_an_unloaded_server_misses_ends_the_search() {
    let search = |slo: &str, requests: usize, start: f64| {
        let slo: Slo = slo.parse().unwrap();
        let asked = PointSpec { requests, slo, ..spec(Offered::Rate(1.0)) };
        let (mut trials, mut points) = (Vec::new(), Vec::new());
        let found = find_max_rate::<()>(&config(start, 2), &asked.slo, 0, &mut points, |trial, seed| {
            trials.push(trial);
            let result = simulated(&of_trial(&asked, trial, seed)).1;
            Ok(Point { result: Some(result), ..blank(1.0) })
        });
        let kept = points.iter().filter(|point| point.result.as_ref().unwrap().requests.is_some()).count();
        (found.unwrap(), trials, kept)
    };
    // A step of one sequence takes 11 ms, a prompt 40 ms.
    for (slo, idle) in [("ttft_p90=1us", "40.0 ms"), ("tpot_p95=5ms", "11.0 ms"), ("tpot_p50=5ms", "11.0 ms")]
    {
        for (requests, start) in [(300, 20.0), (100, 20.0), (2_000, 400.0), (300, 0.05)] {
            let (found, trials, kept) = search(slo, requests, start);
            assert_eq!((found.max_rate, kept), (None, 0));
            assert!(trials.len() <= 2, "{slo} at {start}: {trials:?}");
            let note = &found.note;
            assert!(note.starts_with(&format!("no rate meets {}", slo.split('=').next().unwrap())), "{note}");
            assert!(note.contains(&format!(" ran alone, half within {idle}, ")), "{note}");
        }
    }
    // One that an unloaded server meets does not end it, wherever it begins; requests are kept of the last run.
    let (found, trials, kept) = search("ttft_p90=5s", 300, 20.0);
    assert!(found.max_rate.is_some());
    assert_eq!(trials.iter().filter(|trial| matches!(trial, Trial::Alone(_))).count(), 1, "{trials:?}");
    assert_eq!(kept, trials.iter().filter(|trial| matches!(trial, Trial::Sustained(_))).count());
}

#[test]
fn the_highest_rate_tried_is_said_where_it_holds() {
    let (found, rates) = scripted(&config(1.0, 1), |_| Some(true));
    assert_eq!((found.max_rate, rates.len()), (Some(256.0), 10));
    assert!(found.note.contains("the highest rate tried"), "{}", found.note);
}

#[test]
fn a_search_ends_at_a_point_without_a_result() {
    let slo: Slo = "ttft_p95=1s".parse().unwrap();
    let found = find_max_rate::<()>(&config(1.0, 1), &slo, 0, &mut Vec::new(), |_, _| {
        let not_run = Some(Cause::WorkerLost { detail: "it was killed".into() });
        Ok(Point { not_run, arrivals: Some(Arrivals::Poisson), ..blank(1.0) })
    })
    .unwrap();
    assert_eq!(found.attempts.len(), 1);
    assert!(found.note.contains("ended early") && found.max_rate.is_none(), "{}", found.note);
}

#[test]
fn a_search_of_a_whole_trace_does_not_ask_for_more_requests_of_it() {
    let slo: Slo = "ttft_p95=1s".parse().unwrap();
    let valid = measure(Server::Single(Service::Constant), 0.3, &slo, (1000, 1000), 1);
    let search = |recorded, arrivals| {
        let config = SearchConfig { recorded, ..config(1.0, 2) };
        find_max_rate::<()>(&config, &slo, 0, &mut Vec::new(), |trial, _| {
            let Some(rate) = rate_of(trial) else { return Ok(blank(1.0)) };
            let mut result = valid.clone();
            result.slo[0].met = if rate <= 4.0 {
                Some(true)
            } else if rate <= 5.0 {
                None
            } else {
                Some(false)
            };
            (result.slo[0].low, result.slo[0].high) =
                (Some(Quantity::from(5e8)), Some(Quantity::from(f64::INFINITY)));
            Ok(Point { result: Some(result), arrivals, ..blank(rate) })
        })
        .unwrap()
        .note
    };
    let whole = search(Some(1000), None);
    assert!(whole.contains("too few were measured to bound a percentile from above: ttft_p95"), "{whole}");
    assert!(whole.contains("these are all of the trace, and only a longer trace can decide"), "{whole}");
    assert!(!whole.contains("raise"), "{whole}");
    let part = search(Some(5000), None);
    assert!(part.contains("; raise --requests to decide"), "{part}");
    let drawn = search(None, Some(Arrivals::Poisson));
    assert!(drawn.contains("; raise --max-requests to decide"), "{drawn}");
}

#[test]
fn a_rate_far_below_one_is_not_named_by_zeros() {
    let (found, _) = scripted(&config(0.01, 1), |_| Some(false));
    assert!(found.note.contains("not even 1.53e-7 requests per second"), "{}", found.note);
}

/// A search against a server that serves only the trials at which it is alive, and the trials in their order.
fn served_where(
    config: &SearchConfig,
    mut is_alive: impl FnMut(usize, Trial) -> bool,
) -> (Search, Vec<Trial>) {
    let slo: Slo = "ttft_p95=1s".parse().unwrap();
    let served = measure(Server::Single(Service::Constant), 0.3, &slo, (1000, 1000), 1);
    let detail = "none of the 110 measured requests was served".to_owned();
    let dead = ServeResult {
        validity: Validity::Invalid,
        reasons: vec![Cause::GateFailed { gate: GateName::Served, detail }],
        served: 0,
        rejected: [("status_404".to_owned(), 110)].into(),
        ..served.clone()
    };
    let mut trials = Vec::new();
    let found = find_max_rate::<()>(config, &slo, 0, &mut Vec::new(), |trial, _| {
        trials.push(trial);
        let mut result = if is_alive(trials.len(), trial) { served.clone() } else { dead.clone() };
        result.slo[0].met = Some(rate_of(trial).is_some_and(|rate| rate <= 4.0));
        Ok(Point { result: Some(result), ..blank(1.0) })
    });
    (found.unwrap(), trials)
}

#[test]
fn a_search_ends_where_requests_sent_one_at_a_time_are_not_served() {
    let (found, trials) = served_where(&config(1.0, 3), |_, _| false);
    assert_eq!(trials, [Trial::Rate(1.0), Trial::Alone(ALONE)]);
    let says = "no rate holds: of 1000 requests sent one at a time none was served: status_404";
    assert!(found.max_rate.is_none() && found.note.starts_with(says), "{}", found.note);
    // What fails above some rate and is served below it is found as ever.
    let (found, _) = served_where(&config(32.0, 1), |_, trial| rate_of(trial).is_none_or(|rate| rate <= 8.0));
    assert!((4.0 / 1.03..=4.0).contains(&found.max_rate.unwrap()), "{}", found.note);
    // Nor do rates above what holds end a search that has begun below it.
    let (found, _) = served_where(&config(1.0, 3), |_, trial| rate_of(trial).is_none_or(|rate| rate <= 4.0));
    assert!((4.0 / 1.03..=4.0).contains(&found.max_rate.unwrap()), "{}", found.note);
}

#[test]
fn a_search_ends_where_the_server_serves_nothing_any_more() {
    let bracketed = |served: usize| served_where(&config(1.0, 3), move |number, _| number <= served);
    let whole = served_where(&config(1.0, 3), |_, _| true).1;
    let first = whole.iter().position(|trial| matches!(trial, Trial::Sustained(_))).unwrap();
    for served in 1..whole.len() {
        let (found, trials) = bracketed(served);
        assert!(found.max_rate.is_none(), "{served}: {}", found.note);
        // At most a bisection goes on to its end.
        let lowest = trials.iter().filter_map(|trial| rate_of(*trial)).fold(f64::INFINITY, f64::min);
        assert!(lowest > 0.5 && trials.len() < served + 12, "{served}: {trials:?}");
        assert!(found.note.contains("the search ended early, at `"), "{served}: {}", found.note);
    }
    let (found, trials) = bracketed(first);
    assert_eq!(trials.len(), first + MAX_UNSERVED);
    assert!(
        found.note.contains("at `sustain` of ") && found.note.contains("is not confirmed"),
        "{}",
        found.note
    );
}
