//! Requests in the system over time.
//!
//! Enters: a [`Run`]. Leaves: when each request came, was begun and left; and spans of time, each with how many requests ran and how many
//! waited in it. Spans overlap: their counts add. A request counts from its scheduled arrival, as its latencies do, until it leaves: so
//! the means over a time are its rate × time in system.

use super::serving_loop::{Record, RequestOutcome, Run};
use hbmark_core::units::Nanos;

/// Requests that run and wait during a span of time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Occupancy {
    pub from: f64,
    pub until: f64,
    pub running: usize,
    pub waiting: usize,
}

/// The length of what two spans share.
pub(super) fn overlap(a: (f64, f64), b: (f64, f64)) -> f64 {
    (a.1.min(b.1) - a.0.max(b.0)).max(0.0)
}

/// A request in the system.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Stay {
    pub arrival: f64,
    /// When work on it began. When it left, if that came first.
    pub begun: f64,
    /// The end of the run, for one that was still there.
    pub departed: f64,
}

/// When work on a request began; of a live server only its first token is seen.
pub(super) fn begun(run: &Run, record: &Record) -> Option<Nanos> {
    if run.remote.is_some() { record.first_token } else { record.started }
}

/// The stay of a request; `None` for one that never was in the queue: not sent, or turned away.
pub(super) fn stay(run: &Run, record: &Record) -> Option<Stay> {
    let begun = begun(run, record);
    let turned_away = begun.is_none() && matches!(record.outcome, RequestOutcome::Rejected(_));
    if record.enqueued.is_none() || turned_away {
        return None;
    }
    let departed = record.departed.map_or(run.end, |at| at.0);
    Some(Stay { arrival: record.arrival.0, begun: begun.map_or(departed, |at| at.0.min(departed)), departed })
}

/// The stays of all requests.
pub(super) fn stays(run: &Run) -> impl Iterator<Item = Stay> {
    run.records.iter().filter_map(|record| stay(run, record))
}

/// What ran and waited during the whole run.
pub fn occupancy(run: &Run) -> impl Iterator<Item = Occupancy> {
    let remote = run.remote.iter().flat_map(|_| stays(run)).flat_map(|stay| {
        [
            Occupancy { from: stay.arrival, until: stay.begun, running: 0, waiting: 1 },
            Occupancy { from: stay.begun, until: stay.departed, running: 1, waiting: 0 },
        ]
    });
    remote.chain(scheduled(run))
}

/// By the steps of our own scheduler.
fn scheduled(run: &Run) -> impl Iterator<Item = Occupancy> {
    let steps = run.steps.iter().enumerate().flat_map(|(index, step)| {
        // Behind a step, until the next one begins, is who was not done.
        let next = run.steps.get(index + 1).map_or(run.end, |next| next.begin);
        let load = step.load;
        let left = load.running.saturating_sub(step.finished);
        [
            Occupancy { from: step.begin, until: step.end, running: load.running, waiting: load.waiting },
            Occupancy { from: step.end, until: next, running: left, waiting: load.waiting },
        ]
    });
    // The scheduler knows of a request when the step after its arrival begins.
    let unseen = run.records.iter().filter(|record| run.remote.is_none() && stay(run, record).is_some());
    let unseen = unseen.map(|record| {
        let queued = record.enqueued.unwrap_or(record.arrival).0;
        let next = run.steps.partition_point(|step| step.begin < queued);
        let seen = run.steps.get(next).map_or(run.end, |step| step.begin);
        Occupancy { from: record.arrival.0, until: seen, running: 0, waiting: 1 }
    });
    steps.chain(unseen)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serving_loop::RemoteTokens;
    use crate::test_queues::{simulated, spec};
    use crate::workload::PlannedRequest;
    use hbmark_core::result::serving::{Arrivals, Failure, Offered, SchedulerConfig, ServeResult};

    fn served(offered: Offered, arrivals: Arrivals, num_blocks: usize) -> (Run, ServeResult) {
        let spec = spec(offered);
        let scheduler = SchedulerConfig { num_blocks, ..spec.scheduler.clone() };
        simulated(&crate::point::PointSpec { arrivals, scheduler, ..spec })
    }

    #[test]
    fn the_means_of_running_and_waiting_are_the_stays_of_the_requests() {
        // Little load; load with queues; a pool that preempts.
        for (rate, blocks, preempts) in [(0.5, 100, false), (6.0, 100, false), (6.0, 17, true)] {
            let (run, result) = served(Offered::Rate(rate), Arrivals::Poisson, blocks);
            assert_eq!(result.preemptions > 0, preempts);
            let line = result.timeline.as_ref().unwrap();
            let window = (line.window_from_ns, line.window_to_ns);
            let stays = |until: &dyn Fn(&Record) -> Option<f64>| -> f64 {
                let of = |r: &Record| overlap((r.arrival.0, until(r).unwrap_or(run.end)), window);
                run.records.iter().filter(|r| r.enqueued.is_some()).map(of).sum::<f64>()
                    / (window.1 - window.0)
            };
            let inside =
                stays(&|r| r.last_token.filter(|_| r.outcome == RequestOutcome::Served).map(|t| t.0));
            let found = result.mean_running + result.mean_waiting;
            assert!((found / inside - 1.0).abs() < 1e-6, "{rate}/s: {found} and {inside}");
            if !preempts {
                let queued = stays(&|r| r.started.map(|t| t.0));
                assert!((result.mean_waiting - queued).abs() < 1e-6, "{} and {queued}", result.mean_waiting);
            }
        }
    }

    #[test]
    fn where_requests_do_not_meet_the_means_are_rate_times_time_in_system() {
        // A prefill of 40 ms and 19 decodes of 11 ms, every 2 s.
        let (_, result) = served(Offered::Rate(0.5), Arrivals::Constant, 100);
        assert!((result.mean_running - 0.249 / 2.0).abs() < 1e-9, "{}", result.mean_running);
        assert!(result.mean_waiting.abs() < 1e-9, "{}", result.mean_waiting);
        // A closed loop is always full.
        let (_, result) = served(Offered::Concurrency(3), Arrivals::Poisson, 100);
        let found = result.mean_running + result.mean_waiting;
        assert!((found - 3.0).abs() < 1e-6, "{found}");
    }

    #[test]
    fn a_request_that_a_live_server_refuses_waits_until_then_and_no_longer() {
        let at = |ns: f64| Some(Nanos(ns));
        let planned = PlannedRequest { arrival: Nanos(10.0), ..PlannedRequest::default() };
        let sent = Record { enqueued: at(11.0), ..Record::planned(&planned) };
        let refused = Record {
            departed: at(30.0),
            outcome: RequestOutcome::Failed(Failure::Status(429)),
            ..sent.clone()
        };
        let answered = Record { first_token: at(20.0), departed: at(50.0), ..sent.clone() };
        let records = vec![refused, answered, sent, Record::planned(&planned)];
        let run = Run { records, remote: Some(RemoteTokens::default()), end: 100.0, ..Run::default() };
        let sum = |of: fn(&Occupancy) -> usize| -> f64 {
            occupancy(&run).map(|o| (o.until - o.from) * of(&o) as f64).sum()
        };
        // The last one was not sent, and the one before is there until the end.
        assert_eq!((sum(|o| o.waiting), sum(|o| o.running)), (20.0 + 10.0 + 90.0, 30.0));
    }

    #[test]
    fn spans_of_a_timeline_hold_the_same_requests() {
        let (run, result) = served(Offered::Rate(6.0), Arrivals::Poisson, 100);
        let line = result.timeline.unwrap();
        let everything: f64 =
            occupancy(&run).map(|o| (o.until - o.from) * (o.running + o.waiting) as f64).sum();
        let drawn: f64 = line.spans.iter().map(|span| (span.running + span.waiting) * line.span_ns).sum();
        assert!((drawn / everything - 1.0).abs() < 1e-3, "{drawn} and {everything}");
    }
}
