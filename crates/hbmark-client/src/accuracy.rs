//! The client's own error on this machine: its stamps against the moments at which a scripted server sent.
//!
//! Enters: a [`Load`]: streams and tokens a second. Leaves: an [`Accuracy`]. Server and client are threads of this process and read one clock, so
//! that every event has an error of its own. What the server itself was late is apart, and no error of the client.

use std::io;
use std::time::Duration;

use crate::mock::{Answer, Mock, Script, Stream};
use crate::run::{Cost, Job, Limits, run};
use crate::target::{Endpoint, Target};
use hbmark_core::result::serving::Quantiles;
use hbmark_core::units::Nanos;
use hbmark_traffic::serving_loop::{LoadMode, RequestOutcome, Traffic};
use hbmark_traffic::workload::PlannedRequest;

/// Streams at a time, and how fast each runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    pub streams: usize,
    /// Of one stream.
    pub tokens_per_s: u32,
    pub seconds: u32,
}

/// What was seen. Times are in nanoseconds.
#[derive(Debug, Clone, PartialEq)]
pub struct Accuracy {
    pub load: Load,
    /// Events with output that were received, of those that were sent.
    pub received: usize,
    pub sent: usize,
    pub failed: usize,
    /// The client's stamp minus the moment just before the server's write.
    pub stamp_error: Quantiles,
    /// The stamp of the first event, less than the TTFT of the server by its own clock.
    pub ttft_error: Quantiles,
    /// From the scheduled arrival to the dispatch.
    pub dispatch_lag: Quantiles,
    /// From the kernel's receipt to the reading.
    pub client_delay: Quantiles,
    /// How late the server itself sent.
    pub server_lateness: Quantiles,
    /// Of one processor, the client's share.
    pub processor: Option<f64>,
}

/// Runs the client against a scripted server.
///
/// # Errors
/// When this system has no room for so many connections.
pub fn measure(load: Load) -> io::Result<Accuracy> {
    let gap = Duration::from_secs(1) / load.tokens_per_s.max(1);
    let stream = Stream { first_token: 2 * gap, token_gap: gap, ..Stream::default() };
    let mock = Mock::start(Script::new(Answer::Stream(stream)))?;
    let tokens = load.tokens_per_s * load.seconds;
    // Streams begin one after the other over the first second, so that their tokens do not come at one moment.
    let plan: Vec<PlannedRequest> = (0..load.streams)
        .map(|index| PlannedRequest {
            arrival: Nanos(1e9 * index as f64 / load.streams as f64),
            prompt: Vec::new(),
            output_len: tokens as usize,
            ..PlannedRequest::default()
        })
        .collect();
    let traffic = Traffic::new(&plan, LoadMode::Open, 0..plan.len(), 1);
    let endpoint = Target::new(&mock.url(), None).and_then(Endpoint::resolve).map_err(io::Error::other)?;
    let request = format!(
        r#"{{"model":"mock","prompt":[1,2,3,4],"max_tokens":{tokens},"stream":true,"stream_options":{{"include_usage":true,"continuous_usage_stats":true}}}}"#
    );
    let job = Job {
        endpoint: &endpoint,
        path: "/v1/completions",
        traffic: &traffic,
        cap: None,
        limits: Limits::default(),
        id: "accuracy",
        keep_events: true,
        bodies: &mut |_, body| body.extend_from_slice(request.as_bytes()),
    };
    let live = run(job, &mut |_| {})?;
    let (mut stamps, mut firsts, mut late) = (Vec::new(), Vec::new(), Vec::new());
    let (mut received, mut sent_events) = (0, 0);
    let requests = mock.requests();
    for (key, events) in live.events.iter().enumerate() {
        let id = format!("accuracy-{key}");
        let mut sent = mock.sent(&id);
        sent.retain(|sent| sent.tokens > 0);
        (received, sent_events) = (received + events.len(), sent_events + sent.len());
        let since = |at: u64| at.cast_signed().wrapping_sub(live.origin.cast_signed()) as f64;
        stamps.extend(events.iter().zip(&sent).map(|((at, _), sent)| Some(at - since(sent.at_ns))));
        late.extend(sent.iter().map(|sent| Some(f64::from(sent.late_ns))));
        let asked = requests.iter().find(|request| request.id == id).map(|request| request.arrived_ns);
        let own = asked.zip(sent.first()).map(|(asked, first)| since(first.at_ns) - since(asked));
        let seen = live.exchanges[key].dispatched.zip(events.first()).map(|(from, (at, _))| at - from);
        firsts.push(seen.zip(own).map(|(seen, own)| seen - own));
    }
    let of = |values: Vec<Option<f64>>| Quantiles::of(values.into_iter());
    let Cost { processor, known, .. } = live.cost;
    Ok(Accuracy {
        load,
        received,
        sent: sent_events,
        failed: live.run.records.iter().filter(|r| r.outcome != RequestOutcome::Served).count(),
        stamp_error: of(stamps),
        ttft_error: of(firsts),
        dispatch_lag: of(live.run.records.iter().map(|r| Some(r.lag.0)).collect()),
        client_delay: live.delays.quantiles(|_| true),
        server_lateness: of(late),
        processor: known.then(|| processor as f64 / live.run.end),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_event_is_received_once_and_never_before_it_was_sent() {
        let seen = measure(Load { streams: 20, tokens_per_s: 50, seconds: 1 }).unwrap();
        assert_eq!((seen.received, seen.sent, seen.failed), (1000, 1000, 0));
        // Two clocks are known to each other to a few microseconds.
        let least = |q: &Quantiles| q.p50.unwrap().value();
        assert!(least(&seen.stamp_error) > -50_000.0 && least(&seen.ttft_error) > -50_000.0);
        assert!(seen.dispatch_lag.n == 20 && seen.server_lateness.n == 1000);
    }
}
