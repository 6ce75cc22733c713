//! Known points are not measured again, and lost ones are named. On the virtual clock, whose times are exact.

mod serving_loop;

use super::serving_job::{PointKey, ServeRequest, ServeResponse};
use super::*;
use crate::run::tests::{config as serving_config, report_by, report_of, worker};
use crate::worker::journal::{Header, Journal};
use crate::worker::journaled::EntryOf;
use crate::worker::{InProcess, JournaledWorker, NoopObserver};
use hbmark_core::result::GpuEnvironment;
use hbmark_core::result::serving::{GateName, SavedOutcome, Validity};
use hbmark_core::units::Nanos;
use hbmark_report::output::{Format, render};
use hbmark_traffic::point::PointSpec;
use hbmark_traffic::trace::{Trace, TraceRequest};
use hbmark_traffic::workload::Workload;

type Entry = EntryOf<ServeJob>;

/// A virtual clock whose exchanges are kept, and which is lost in some points.
struct Recorded {
    worker: InProcess<LocalEngine>,
    kept: std::rc::Rc<std::cell::RefCell<Vec<Entry>>>,
    /// A point with this in its label is lost.
    loses: Option<&'static str>,
}

const REASON: &str = "the worker was killed by signal 9 while measuring it";

impl Worker<ServeJob> for Recorded {
    fn execute(
        &mut self,
        request: &ServeRequest,
        observer: &mut dyn Observer,
    ) -> Result<ServeResponse, ServeError> {
        if let ServeRequest::Measure(asked) = request {
            assert!(asked.longest.unwrap().0 > 0.0);
            if self.loses.is_some_and(|label| asked.key.label.contains(label)) {
                let reason = Cause::WorkerLost { detail: REASON.into() };
                return Ok(ServeResponse::Lost { reason, executing: true });
            }
        }
        let response = self.worker.execute(request, observer)?;
        self.kept.borrow_mut().push(Entry { request: request.clone(), response: response.clone() });
        Ok(response)
    }

    fn restore(&mut self, request: &ServeRequest, response: &ServeResponse) {
        self.worker.restore(request, response);
    }
}

fn config(mode: Mode) -> ServeConfig {
    // A search needs to be decided.
    let max_requests = if matches!(mode, Mode::FindMaxRate { .. }) { 6_400 } else { 0 };
    ServeConfig { mode, offered: Offered::Rate(4.0), max_requests, ..serving_config() }
}

/// A report, and the exchanges that were not known.
pub(super) fn resumed(config: &ServeConfig, known: Vec<Entry>) -> (Result<Finished, ServeError>, Vec<Entry>) {
    let folder = tempfile::tempdir().unwrap();
    let plan = serving_job::ServePlan {
        arguments: Vec::new(),
        config: std::collections::BTreeMap::new(),
        model: String::new(),
    };
    let journal = Journal::create(folder.path(), &Header::new("hbmark serve", plan).unwrap()).unwrap();
    let kept = std::rc::Rc::default();
    let inner = Recorded { worker: worker(config), kept: std::rc::Rc::clone(&kept), loses: None };
    let mut worker = JournaledWorker::new(Box::new(inner), journal, known);
    let model = crate::run::tests::model();
    let finished = benchmark(&mut worker, config, Some(&model), "hbmark serve --virtual", &mut NoopObserver);
    (finished, kept.take())
}

fn losing(mode: Mode, label: &'static str) -> ServeReport {
    let config = config(mode);
    let inner = worker(&config);
    report_by(&config, &mut Recorded { worker: inner, kept: std::rc::Rc::default(), loses: Some(label) })
}

fn modes() -> [Mode; 5] {
    [
        Mode::Single,
        Mode::Sweep { variable: SweepVariable::Rate, values: vec![2.0, 8.0, 64.0] },
        Mode::FindMaxRate { seeds: 2, precision: 0.2, sustain_s: 0.0 },
        Mode::Matrix { scale: 1.0 },
        Mode::CompareLoops,
    ]
}

#[test]
fn every_mode_goes_on_over_known_points_as_if_it_had_measured_them() {
    for mode in modes() {
        let config = config(mode.clone());
        let (whole, first) = resumed(&config, Vec::new());
        assert!(first.len() > 1);
        for known in [first.len() / 2, first.len()] {
            // Through a pipe, as between two processes.
            let text = serde_json::to_string(&first[..known]).unwrap();
            let (again, second) = resumed(&config, serde_json::from_str(&text).unwrap());
            assert_eq!(again.unwrap(), *whole.as_ref().unwrap(), "{mode:?}, {known} known");
            assert_eq!(second.len(), first.len() - known);
        }
    }
}

#[test]
fn what_a_simulated_device_served_is_invalid() {
    let mut result = report_of(&config(Mode::Single)).points[0].result.clone().unwrap();
    let before = result.clone();
    let named = |name: &str| GpuEnvironment { name: Some(name.to_owned()), ..GpuEnvironment::default() };
    result.check_device(None);
    result.check_device(Some(&named("NVIDIA H200")));
    assert_eq!(result, before);
    result.check_device(Some(&named("SIMULATED DEVICE (NVIDIA H200)")));
    assert_eq!(result.validity, Validity::Invalid);
    assert_eq!(result.reasons.last().unwrap().to_string(), "SIMULATED DEVICE: its times mean nothing");
}

#[test]
fn another_point_in_the_place_of_a_known_one_is_refused() {
    let sweep =
        |values: &[f64]| config(Mode::Sweep { variable: SweepVariable::Rate, values: values.to_vec() });
    let (_, first) = resumed(&sweep(&[2.0, 4.0]), Vec::new());
    let (refused, _) = resumed(&sweep(&[3.0, 4.0]), first);
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("goes on with `rate 2` (point 1, seed"), "{refused}");
    assert!(refused.contains("the plan with `rate 3` (point 1, seed"), "{refused}");
}

#[test]
fn a_point_whose_trace_changed_meanwhile_is_refused() {
    let config = config(Mode::Single);
    let (_, mut exchanges) = resumed(&config, Vec::new());
    let Entry { request: ServeRequest::Measure(asked), .. } = &mut exchanges[1] else { unreachable!() };
    asked.spec.seed += 1;
    let mut worker = worker(&config);
    worker.execute(&exchanges[0].request, &mut NoopObserver).unwrap();
    let error = worker.execute(&exchanges[1].request, &mut NoopObserver).unwrap_err().to_string();
    assert!(
        error.contains("was asked for `rate 4` (point 1") && error.contains("changed meanwhile"),
        "{error}"
    );
}

#[test]
fn a_lost_point_of_a_sweep_costs_no_other() {
    let mode = Mode::Sweep { variable: SweepVariable::Rate, values: vec![2.0, 4.0, 8.0] };
    let report = losing(mode, "rate 4");
    let has: Vec<bool> = report.points.iter().map(|point| point.result.is_some()).collect();
    assert_eq!(has, [true, false, true]);
    assert_eq!(report.points[1].not_run, Some(Cause::WorkerLost { detail: REASON.into() }));
}

#[test]
fn a_search_that_loses_a_point_ends_in_words_and_claims_no_rate() {
    let mode = Mode::FindMaxRate { seeds: 2, precision: 0.2, sustain_s: 0.0 };
    // The second rate that is tried: the first one held.
    let lost = losing(mode.clone(), "rate 8");
    let search = lost.search.unwrap();
    assert_eq!((search.max_rate, search.confirmed), (None, false));
    assert_eq!(
        search.note,
        format!(
            "the search ended early, at `bracket` of 8.000 per second: {REASON}; 4.000 per second had held in a single run and is not \
             confirmed"
        )
    );
    assert_eq!(search.attempts.last().unwrap().why, REASON);
    assert_eq!((lost.points.len(), lost.points[1].label.as_str()), (2, "bracket 8.000/s"));
    // And the very first.
    let lost = losing(mode, "rate");
    assert!(lost.search.unwrap().note.ends_with("no rate had held before"));
}

#[test]
fn a_closed_loop_is_not_compared_with_an_open_one_that_was_lost() {
    let report = losing(Mode::CompareLoops, "open");
    assert_eq!(report.points.len(), 1);
    assert!(report.warnings.iter().any(|warning| warning.contains("the closed loop was not run")));
}

#[test]
fn every_lost_point_can_be_shown_and_explained() {
    let some = [(Mode::Matrix { scale: 1.0 }, "refix"), (modes()[1].clone(), "rate 8")];
    for (mode, loses) in modes().into_iter().map(|mode| (mode, "")).chain(some) {
        let report = losing(mode.clone(), loses);
        assert!(
            report.points.iter().any(|point| point.result.is_none()),
            "{mode:?} loses none with `{loses}`"
        );
        for format in [Format::Table, Format::Json, Format::Csv, Format::Md, Format::Html] {
            let text = render(&report, format, false).unwrap();
            assert!(text.contains("signal 9"), "{mode:?} without `{loses}` as {format:?}");
        }
    }
}

/// All requests of the first moment of a closed loop wait for one another.
#[test]
fn a_closed_loop_warms_up_with_twice_its_concurrency() {
    let closed = |warmup| ServeConfig { offered: Offered::Concurrency(16), warmup, ..config(Mode::Single) };
    let warmed = |warmup| report_of(&closed(warmup)).points[0].result.as_ref().unwrap().warmup_requests;
    assert_eq!((warmed(None), warmed(Some(5))), (32, 5));
}

#[test]
fn a_point_is_known_by_all_that_was_asked() {
    let scheduler = report_of(&config(Mode::Single)).points[0].scheduler.clone();
    let spec = || PointSpec {
        label: "rate 4".into(),
        source: TrafficSource::Workload(Workload::fixed(8, 4).unwrap()),
        offered: Offered::Rate(4.0),
        arrivals: Arrivals::Poisson,
        burst: None,
        requests: 10,
        max_requests: 0,
        warmup: 4,
        settles: false,
        scheduler: scheduler.clone().unwrap(),
        sampling: Sampling::GREEDY,
        stop_at_eos: false,
        seed: 7,
        prompt_set: 0,
        cold: false,
        slo: Slo::default(),
        time_limit: None,
        adapters: None,
        constrained: None,
        is_remote: false,
    };
    let asked = PointKey::of(0, &spec());
    assert_eq!(asked, PointKey::of(0, &spec()));
    let trace = |output_tokens| {
        let request = TraceRequest {
            arrival: Nanos(0.0),
            input_tokens: 3,
            output_tokens,
            prefix_ids: Vec::new(),
            prefix_block: 0,
            priority: 0,
        };
        let trace = Trace { format: "hbmark", requests: vec![request], left_out: 0 };
        PointKey::of(0, &PointSpec { source: TrafficSource::Trace(std::rc::Rc::new(trace), 1.0), ..spec() })
    };
    assert_eq!(trace(5), trace(5));
    let others = [
        PointKey::of(1, &spec()),
        PointKey::of(0, &PointSpec { seed: 8, ..spec() }),
        PointKey::of(0, &PointSpec { warmup: 5, ..spec() }),
        PointKey::of(0, &PointSpec { offered: Offered::AtOnce, ..spec() }),
        PointKey::of(0, &PointSpec { time_limit: Some(Nanos(1.0)), ..spec() }),
        trace(5),
        trace(6),
    ];
    for (index, other) in others.iter().enumerate() {
        assert_ne!(*other, asked);
        assert!(!others[..index].contains(other));
    }
}

/// One point of long prompts on a virtual clock.
fn point(change: impl FnOnce(&mut ServeConfig)) -> Point {
    let mut config = ServeConfig {
        source: TrafficSource::Workload(Workload::fixed(1024, 128).unwrap()),
        requests: 1000,
        warmup: Some(0),
        ..serving_config()
    };
    change(&mut config);
    report_of(&config).points.remove(0)
}

#[test]
fn goodput_is_never_more_than_what_was_served() {
    for rate in [4.0, 40.0, 76.0] {
        let point = point(|config| {
            config.offered = Offered::Rate(rate);
            config.slo = "tpot_p95=40ms".parse().unwrap();
        });
        let result = point.result.unwrap();
        let goodput = result.goodput_per_s.unwrap();
        assert!(goodput <= result.served_per_s, "{goodput} of {}", result.served_per_s);
        assert!(goodput > 0.0 && result.goodput_share.unwrap() > 0.9, "{result:?}");
    }
}

#[test]
fn what_a_full_queue_turned_away_was_not_completed() {
    let crowded = |most| {
        point(|config| {
            config.offered = Offered::Rate(100.0);
            config.scheduler.max_waiting = Some(most);
            config.slo = Slo::default();
        })
        .result
        .unwrap()
    };
    let result = crowded(8);
    let gate = result.gates.iter().find(|gate| gate.name == GateName::KeepsUp).unwrap();
    let shed: usize = result.rejected.values().sum();
    assert!(shed > 200, "{:?}", result.rejected);
    assert_eq!((result.validity, gate.passed), (Validity::Saturated, Some(false)), "{}", gate.detail);
    assert!(gate.detail.contains(&format!("{shed} were turned away")), "{}", gate.detail);
    // No request waits here, and none is served.
    let result = crowded(0);
    assert_eq!((result.served, result.validity), (0, Validity::Saturated));
    let said = format!("{} {} {:?}", result.mean_running, result.mean_waiting, result.gates);
    assert!(!said.contains("-0") && !said.contains("NaN"), "{said}");
}

fn trace(requests: impl Iterator<Item = (f64, usize)>) -> TrafficSource {
    let requests = requests.map(|(second, input_tokens)| TraceRequest {
        arrival: Nanos::from_seconds(second),
        input_tokens,
        output_tokens: 4,
        prefix_ids: Vec::new(),
        prefix_block: 0,
        priority: 0,
    });
    let trace = Trace { format: "hbmark", requests: requests.collect(), left_out: 0 };
    TrafficSource::Trace(std::rc::Rc::new(trace), 1.0)
}

#[test]
fn a_trace_runs_at_the_rate_that_was_asked_for_and_its_means_are_of_the_requests_that_count() {
    // Ever busier, and ever longer.
    let rows = || (0..2000).map(f64::from).map(|i| (i.sqrt() * 10.0, if i < 500.0 { 100 } else { 300 }));
    for (requests, mean) in [(100, 100.0), (1000, 200.0)] {
        let point = point(|config| {
            config.source = trace(rows());
            (config.offered, config.requests) = (Offered::Rate(2.0), requests);
            config.slo = Slo::default();
        });
        assert_eq!((point.mean_prompt_tokens, point.mean_output_tokens), (mean, 4.0));
        let offered = point.result.unwrap().offered_per_s.unwrap();
        assert!((offered / 2.0 - 1.0).abs() < 0.001, "{offered}");
    }
}

#[test]
fn a_time_limit_changes_no_rate() {
    let point = point(|config| {
        config.offered = Offered::Rate(10.0);
        config.arrivals = Arrivals::Constant;
        config.time_limit_s = Some(30.0);
        config.slo = Slo::default();
    });
    let result = point.result.unwrap();
    assert!((result.offered_per_s.unwrap() / 10.0 - 1.0).abs() < 0.02, "{:?}", result.offered_per_s);
    let gate = result.gates.iter().find(|gate| gate.name == GateName::RealisedRate).unwrap();
    assert_eq!(gate.passed, Some(true), "{}", gate.detail);
    assert!(gate.detail.contains("1000 were planned, and the run ended before"), "{}", gate.detail);
}

#[test]
fn percentiles_can_be_computed_again_from_the_requests() {
    let point = point(|config| config.slo = Slo::default());
    let result = point.result.unwrap();
    let requests = result.requests.clone().unwrap();
    assert_eq!(
        (requests.outcome.len(), requests.outcome.iter().all(|outcome| *outcome == SavedOutcome::Served)),
        (1000, true)
    );
    let since = |ends: &[Option<u64>]| -> Vec<f64> {
        let pairs = ends.iter().zip(&requests.arrival_ns);
        let mut times: Vec<f64> = pairs.map(|(end, begin)| (end.unwrap() - begin) as f64).collect();
        times.sort_by(f64::total_cmp);
        times
    };
    for (ends, said) in [
        (&requests.first_token_ns, &result.ttft_ns),
        (&requests.last_token_ns, &result.e2e_ns),
        (&requests.started_ns, &result.queue_ns),
    ] {
        let times = since(ends);
        for (p, of) in hbmark_core::result::serving::LEVELS {
            let Some(said) = of(said.as_ref().unwrap()) else { continue };
            // Whole nanoseconds.
            assert!((hbmark_core::stats::percentile(&times, p) - said.value()).abs() <= 1.0, "{p}");
        }
    }
}
