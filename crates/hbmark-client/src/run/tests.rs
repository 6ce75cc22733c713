use std::time::Duration;

use super::*;
use crate::mock::{Answer as Script, BatchModel, Mock, Script as Server, Stream as Tokens};
use crate::target::Target;
use hbmark_core::result::serving::TokenEvidence;
use hbmark_traffic::serving_loop::Extension;
use hbmark_traffic::workload::PlannedRequest;

fn request(tokens: usize) -> String {
    format!(
        r#"{{"model":"mock","prompt":[1,2,3],"max_tokens":{tokens},"stream":true,"stream_options":{{"include_usage":true,"continuous_usage_stats":true}}}}"#
    )
}

fn plan(count: usize, gap: Duration, output: usize) -> Vec<PlannedRequest> {
    (0..count)
        .map(|index| PlannedRequest {
            arrival: Nanos(index as f64 * gap.as_nanos() as f64),
            prompt: Vec::new(),
            output_len: output,
            ..PlannedRequest::default()
        })
        .collect()
}

fn traffic(plan: &[PlannedRequest], kind: LoadMode) -> Traffic<'_> {
    Traffic::new(plan, kind, 0..plan.len(), 1)
}

/// Longer than any answer takes, on a busy machine, too.
const PATIENT: Limits = Limits {
    connect: Duration::from_mins(2),
    headers: Duration::from_mins(2),
    first_token: Duration::from_mins(2),
    event: Duration::from_mins(2),
    total: Duration::from_mins(2),
};

/// Short enough for a test, where something never comes.
const SHORT: Limits = Limits {
    connect: Duration::from_secs(5),
    headers: Duration::from_millis(300),
    first_token: Duration::from_millis(400),
    event: Duration::from_millis(300),
    total: Duration::from_mins(1),
};

fn drive(url: &str, key: &str, traffic: &Traffic<'_>, cap: Option<usize>, output: usize) -> LiveRun {
    drive_within(PATIENT, url, key, traffic, cap, output)
}

fn drive_within(
    limits: Limits,
    url: &str,
    key: &str,
    traffic: &Traffic<'_>,
    cap: Option<usize>,
    output: usize,
) -> LiveRun {
    let target = Target::new(url, (!key.is_empty()).then_some(key)).unwrap();
    drive_to(&Endpoint::resolve(target).unwrap(), limits, traffic, cap, output)
}

fn drive_to(
    endpoint: &Endpoint,
    limits: Limits,
    traffic: &Traffic<'_>,
    cap: Option<usize>,
    output: usize,
) -> LiveRun {
    let job = Job {
        endpoint,
        path: "/v1/completions",
        traffic,
        cap,
        limits,
        id: "t",
        keep_events: true,
        bodies: &mut |_, body| body.extend_from_slice(request(output).as_bytes()),
    };
    run(job, &mut |_| {}).unwrap()
}

fn fast() -> Tokens {
    Tokens { first_token: Duration::from_millis(5), token_gap: Duration::from_millis(2), ..Tokens::default() }
}

#[test]
fn every_event_is_stamped_after_it_was_sent_and_none_is_lost() {
    let mock = Mock::start(Server::new(Script::Stream(fast()))).unwrap();
    let plan = plan(60, Duration::from_millis(3), 12);
    let live = drive(&mock.url(), "", &traffic(&plan, LoadMode::Open), None, 12);
    assert_eq!(live.run.records.iter().filter(|r| r.outcome == RequestOutcome::Served).count(), 60);
    for (key, (record, events)) in live.run.records.iter().zip(&live.events).enumerate() {
        assert_eq!((record.output_tokens, record.first_tokens, events.len()), (12, 1, 12));
        let mut sent = mock.sent(&format!("t-{key}"));
        sent.retain(|sent| sent.tokens > 0);
        assert_eq!(sent.len(), 12);
        let sent = sent.iter().map(|sent| (sent.at_ns - live.origin) as f64);
        for ((stamp, tokens), sent) in events.iter().zip(sent) {
            // The offset between the two clocks is known to a few microseconds.
            assert!(
                *stamp > sent - 50_000.0 && *tokens == 1,
                "stamped {} ns before it was sent",
                sent - stamp
            );
        }
        assert!(record.enqueued.unwrap() >= record.arrival, "never before it is due");
        let exchange = &live.exchanges[key];
        assert_eq!(exchange.evidence, Some(TokenEvidence::ContinuousUsage));
        assert_eq!(record.prompt_tokens, 3, "as the server counts, where a plan has none");
        let departed = record.departed.map(|at| at.0);
        let moments =
            [exchange.dispatched, exchange.headers, exchange.first_token, exchange.last_token, departed];
        let moments: Vec<f64> = moments.into_iter().map(Option::unwrap).collect();
        assert!(moments.is_sorted(), "{moments:?}");
    }
    assert_eq!(live.run.gaps.len(), 60 * 11);
    assert_eq!(live.run.remote.as_ref().unwrap().between(0.0, live.run.end + 1e6), 60 * 12);
    assert_eq!(live.opened + live.reused, 60);
    assert!(live.reused > 0, "connections are kept");
    assert_eq!(live.unstamped, 0, "the kernel stamps everything on a loopback");
}

/// Requests that ended before the run was extended count with their gaps, too.
#[test]
fn an_extended_run_has_the_gaps_of_all_its_requests() {
    let mock = Mock::start(Server::new(Script::Stream(fast()))).unwrap();
    let plan = plan(40, Duration::from_millis(3), 12);
    let slo = hbmark_core::result::serving::Slo::default();
    let extension = Extension { max_requests: 40, settles: false, slo };
    let traffic = Traffic { extension: Some(extension), ..Traffic::new(&plan, LoadMode::Open, 0..10, 1) };
    let target = Target::new(&mock.url(), None).unwrap();
    let job = Job {
        endpoint: &Endpoint::resolve(target).unwrap(),
        path: "/v1/completions",
        traffic: &traffic,
        cap: None,
        limits: PATIENT,
        id: "t",
        keep_events: false,
        // The last of the first ten ends when later ones have long ended.
        bodies: &mut |key, body| body.extend_from_slice(request(if key == 9 { 100 } else { 12 }).as_bytes()),
    };
    let live = run(job, &mut |_| {}).unwrap();
    assert_eq!(live.run.measured, 0..40);
    assert_eq!(live.event_gaps.quantiles(|key| live.run.measured.contains(&key)).n, 39 * 11 + 99);
    assert_eq!(live.run.gaps.len(), 39 * 11 + 99);
}

#[test]
fn several_tokens_in_an_event_share_its_gap() {
    let stream = Tokens { tokens_per_event: 4, ..fast() };
    let mock = Mock::start(Server::new(Script::Stream(stream))).unwrap();
    let plan = plan(5, Duration::from_millis(3), 12);
    let live = drive(&mock.url(), "", &traffic(&plan, LoadMode::Open), None, 12);
    for (record, events) in live.run.records.iter().zip(&live.events) {
        assert_eq!((record.output_tokens, record.first_tokens, events.len()), (12, 4, 3));
    }
    assert_eq!(live.event_gaps.quantiles(|_| true).n, 5 * 2);
    assert_eq!(live.run.gaps.len(), 5 * 8, "a gap for each token behind the first event");
}

/// Where only the final count is known, TPOT is what other clients call so: over all tokens but one.
#[test]
fn the_first_event_of_a_final_count_holds_one_token() {
    let (_, answer) =
        crate::mock::behaviours().iter().find(|(known, _)| *known == "several_tokens_per_event").unwrap();
    let mock = Mock::start(Server::new(answer.clone())).unwrap();
    let plan = plan(1, Duration::ZERO, 6);
    let live = drive(&mock.url(), "", &traffic(&plan, LoadMode::Open), None, 6);
    assert_eq!(live.exchanges[0].evidence, Some(TokenEvidence::FinalUsage));
    let (record, events) = (&live.run.records[0], &live.events[0]);
    assert_eq!((record.output_tokens, record.first_tokens, events.len()), (6, 1, 3));
    let (span, gaps) = (events[2].0 - events[0].0, &live.run.gaps);
    assert!(gaps.len() == 5 && (gaps.iter().sum::<f64>() - span).abs() < 1.0, "{gaps:?} over {span}");
    assert_eq!(live.run.remote.as_ref().unwrap().between(0.0, live.run.end + 1e6), 6);
}

#[test]
fn events_that_are_sent_as_one_share_a_stamp_and_are_counted() {
    let stream = Tokens { events_per_write: 4, ..fast() };
    let mock = Mock::start(Server::new(Script::Stream(stream))).unwrap();
    let plan = plan(5, Duration::from_millis(3), 12);
    let live = drive(&mock.url(), "", &traffic(&plan, LoadMode::Open), None, 12);
    assert_eq!(live.outputs, 5 * 12);
    // On a busy machine the kernel may merge two writes, too.
    assert!(live.shared_stamps >= 5 * 9, "{} of 60 with another's stamp", live.shared_stamps);
}

#[test]
fn a_closed_loop_holds_its_number_and_a_cap_lets_requests_wait_from_their_arrival() {
    let mock = Mock::start(Server::new(Script::Stream(fast()))).unwrap();
    let plan = plan(20, Duration::ZERO, 4);
    let live = drive(&mock.url(), "", &traffic(&plan, LoadMode::Closed { concurrency: 3 }), None, 4);
    assert_eq!(live.run.population.iter().map(|(_, inside)| *inside).max(), Some(3));
    assert!(live.opened <= 3);

    let live = drive(&mock.url(), "", &traffic(&plan, LoadMode::Open), Some(4), 4);
    assert_eq!(live.opened, 4);
    let waits: Vec<f64> = live.exchanges.iter().map(|e| e.dispatched.unwrap()).collect();
    assert!(waits.is_sorted());
    let last = &live.run.records[19];
    let own = live.exchanges[19].first_token.unwrap() - waits[19];
    assert!(
        last.first_token.unwrap().0 - last.arrival.0 > 2.0 * own,
        "the wait at the cap is part of its TTFT"
    );
}

#[test]
fn a_server_that_batches_gives_every_token() {
    let model = BatchModel {
        max_running: 4,
        step: Duration::from_millis(1),
        per_sequence: Duration::from_micros(100),
    };
    let mock = Mock::start(Server::new(Script::Stream(fast())).in_batches(model)).unwrap();
    let plan = plan(30, Duration::from_millis(1), 10);
    let live = drive(&mock.url(), "", &traffic(&plan, LoadMode::Open), None, 10);
    assert!(live.run.records.iter().all(|r| r.outcome == RequestOutcome::Served && r.output_tokens == 10));
}

/// What each awkward behaviour of a server ends in: the others are right, and are served.
const FAILS: &[(&str, Failure)] = &[
    ("error_event", Failure::ErrorEvent),
    ("error_event_of_tgi", Failure::ErrorEvent),
    ("no_json", Failure::MalformedEvent),
    ("not_utf8", Failure::MalformedEvent),
    ("nan", Failure::MalformedEvent),
    ("keys_twice", Failure::MalformedEvent),
    ("nested_brackets", Failure::MalformedEvent),
    ("event_of_10_mb", Failure::TooLarge),
    ("event_without_end", Failure::EventTimeout),
    ("lines_without_end", Failure::EventTimeout),
    ("events_without_end", Failure::TooLarge),
    ("late_headers", Failure::HeadersTimeout),
    ("slow_headers", Failure::HeadersTimeout),
    ("interim_without_end", Failure::HeadersTimeout),
    ("gzip", Failure::Compressed),
    ("deflate", Failure::Compressed),
    ("header_of_64_kb", Failure::TooLarge),
    ("1000_headers", Failure::TooLarge),
    ("headers_without_end", Failure::TooLarge),
    ("not_http", Failure::MalformedHttp),
    ("chunk_size_not_hex", Failure::MalformedHttp),
    ("chunk_size_too_large", Failure::MalformedHttp),
    ("chunk_size_without_end", Failure::MalformedHttp),
    ("chunk_longer_than_it_says", Failure::MalformedHttp),
    ("no_content_204", Failure::NotAStream),
    ("redirect_301", Failure::Redirect(301)),
    ("redirect_307", Failure::Redirect(307)),
    ("unauthorized_401", Failure::Status(401)),
    ("no_such_model_404", Failure::Status(404)),
    ("too_large_413", Failure::Status(413)),
    ("unprocessable_422", Failure::Status(422)),
    ("too_many_429_seconds", Failure::Status(429)),
    ("too_many_429_date", Failure::Status(429)),
    ("html_500", Failure::Status(500)),
    ("unavailable_503_then_fine", Failure::Status(503)),
    ("json_error_200", Failure::NotAStream),
    ("html_200", Failure::NotAStream),
    ("empty_stream", Failure::ClosedEarly),
    ("only_done", Failure::NoOutput),
    ("endless_500", Failure::TooLarge),
    ("reset_at_once", Failure::Reset),
    ("reset_in_headers", Failure::Reset),
    ("reset_between_events", Failure::Reset),
    ("reset_in_an_event", Failure::Reset),
    ("reset_after_usage", Failure::Reset),
    ("close_at_once", Failure::ClosedEarly),
    ("close_in_headers", Failure::ClosedEarly),
    ("close_after_headers", Failure::ClosedEarly),
    ("close_between_events", Failure::ClosedEarly),
    ("close_in_an_event", Failure::ClosedEarly),
    ("silence_at_once", Failure::HeadersTimeout),
    ("silence_after_headers", Failure::FirstTokenTimeout),
    ("silence_between_events", Failure::EventTimeout),
];

#[test]
fn every_awkward_behaviour_ends_in_its_class_within_its_time() {
    for (name, answer) in crate::mock::behaviours() {
        let mock = Mock::start(Server::new(answer.clone())).unwrap();
        let plan = plan(1, Duration::ZERO, 3);
        let failure = FAILS.iter().find(|(fails, _)| fails == name).map(|(_, failure)| *failure);
        let never_comes = matches!(
            failure,
            Some(Failure::HeadersTimeout | Failure::FirstTokenTimeout | Failure::EventTimeout)
        );
        let limits = if never_comes { SHORT } else { PATIENT };
        let live = drive_within(limits, &mock.url(), "sk-secret", &traffic(&plan, LoadMode::Open), None, 3);
        let expected = failure.map_or(RequestOutcome::Served, RequestOutcome::Failed);
        assert_eq!(live.run.records[0].outcome, expected, "{name}");
        if expected == RequestOutcome::Served {
            let tokens = match *name {
                "usage_wrong" => 7,
                "several_tokens_per_event" => 6,
                _ => 3,
            };
            assert_eq!(live.exchanges[0].output_tokens, tokens, "{name}");
        }
        assert!(live.messages.iter().all(|(_, words)| !words.contains("sk-secret")), "{name}");
    }
    let known = |name: &str| crate::mock::behaviours().iter().any(|(known, _)| *known == name);
    assert!(FAILS.iter().all(|(name, _)| known(name)), "every name is one of the server's");
}

#[test]
fn a_request_is_sent_again_only_where_a_kept_connection_ended_before_any_answer() {
    for name in ["close_when_reused", "reset_when_reused", "close_when_idle"] {
        let (_, answer) = crate::mock::behaviours().iter().find(|(known, _)| *known == name).unwrap();
        let mock = Mock::start(Server::new(answer.clone())).unwrap();
        let plan = plan(2, Duration::from_millis(60), 3);
        let live = drive(&mock.url(), "", &traffic(&plan, LoadMode::Open), None, 3);
        assert!(live.run.records.iter().all(|r| r.outcome == RequestOutcome::Served), "{name}");
        let retried: Vec<bool> = live.exchanges.iter().map(|e| e.retried).collect();
        // An idle connection that was closed is noticed before anything is sent.
        assert_eq!(retried, [false, name != "close_when_idle"], "{name}");
    }
}

#[test]
fn a_request_that_is_answered_before_it_is_sent_whole_leaves_no_connection_behind() {
    use std::io::{Read, Write};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    // Reads nothing of a body and says no. The first connection would take more; the others are reset, since bytes are unread.
    let server = std::thread::spawn(move || {
        let mut first = None;
        for _ in 0..8 {
            let (mut socket, _) = listener.accept().unwrap();
            socket.read_exact(&mut [0; 16]).unwrap();
            socket.write_all(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno").unwrap();
            first.get_or_insert(socket);
        }
        first
    });
    let plan = plan(8, Duration::ZERO, 3);
    let endpoint = Endpoint::resolve(Target::new(&url, None).unwrap()).unwrap();
    let job = Job {
        endpoint: &endpoint,
        path: "/v1/completions",
        traffic: &traffic(&plan, LoadMode::Closed { concurrency: 1 }),
        cap: None,
        limits: PATIENT,
        id: "t",
        keep_events: false,
        bodies: &mut |_, body| body.resize(body.len() + 16_000_000, b' '),
    };
    // The client looks so late that the connection is gone by then.
    let live = run(job, &mut |_| std::thread::sleep(Duration::from_millis(30))).unwrap();
    assert!(live.exchanges.iter().all(|e| e.failure == Some(Failure::Status(413)) && !e.retried));
    assert_eq!((live.opened, live.reused), (8, 0));
    drop(server.join().unwrap());
}

#[test]
fn a_key_goes_to_the_server_that_was_named_and_to_no_other() {
    let other = Mock::start(Server::new(Script::plain())).unwrap();
    let redirect = Script::redirect(307, &format!("{}/v1/completions", other.url()));
    let mock = Mock::start(Server::new(redirect)).unwrap();
    let plan = plan(2, Duration::ZERO, 3);
    let live = drive(&mock.url(), "sk-secret", &traffic(&plan, LoadMode::Open), None, 3);
    assert!(live.exchanges.iter().all(|e| e.failure == Some(Failure::Redirect(307))));
    assert!(other.requests().is_empty());
    assert_eq!(mock.requests()[0].header("authorization").as_deref(), Some("Bearer sk-secret"));
}

#[test]
fn what_the_server_repeats_of_the_key_is_not_kept() {
    let words = r#"{"error":{"message":"bad key sk-secret"}}"#;
    let mock = Mock::start(Server::new(Script::status(401, "application/json", "", words))).unwrap();
    let plan = plan(1, Duration::ZERO, 3);
    let live = drive(&mock.url(), "sk-secret", &traffic(&plan, LoadMode::Open), None, 3);
    assert_eq!(live.messages, [(Failure::Status(401), words.replace("sk-secret", "***"))]);
}

#[test]
fn a_server_that_is_not_there_is_refused() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let plan = plan(3, Duration::from_millis(1), 3);
    let live = drive(&url, "", &traffic(&plan, LoadMode::Open), None, 3);
    assert!(live.run.records.iter().all(|r| r.outcome == RequestOutcome::Failed(Failure::Refused)));
}

#[test]
fn a_run_is_given_up_where_none_of_the_first_requests_is_served() {
    let says = |status: u16| Script::status(status, "application/json", "", r#"{"detail":"no"}"#);
    let plan = plan(60, Duration::from_millis(1), 3);
    let driven = |answer: Script, kind: LoadMode| {
        let mock = Mock::start(Server::new(answer)).unwrap();
        let live = drive(&mock.url(), "", &traffic(&plan, kind), None, 3);
        (live.gave_up, mock.requests().len())
    };
    let closed = LoadMode::Closed { concurrency: 2 };
    let (gave_up, sent) = driven(says(404), closed);
    assert!(gave_up && sent < FIRST_REQUESTS + 3, "{sent}");
    assert!(driven(says(404), LoadMode::Open).0);
    // Load is no reason to stop, and neither are single failures.
    for status in [429, 503, 504] {
        assert_eq!(driven(says(status), closed), (false, 60), "{status}");
    }
    let late = Script::InTurn([vec![says(404); FIRST_REQUESTS - 1], vec![Script::Stream(fast())]].concat());
    assert_eq!(driven(late, closed), (false, 60));
    // Others are refused before the first one is served.
    let slow = Tokens { first_token: Duration::from_millis(300), ..fast() };
    let early = Script::InTurn(vec![Script::Stream(slow), says(404)]);
    assert_eq!(driven(early, LoadMode::Closed { concurrency: 60 }), (false, 60));
}

#[test]
fn an_address_that_drops_packets_is_left_for_the_next_one() {
    use nix::sys::socket::{Backlog, listen};
    let mock = Mock::start(Server::new(Script::Stream(fast()))).unwrap();
    let full = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listen(&full, Backlog::new(0).unwrap()).unwrap();
    let address = full.local_addr().unwrap();
    // Room for one, which nobody accepts: the kernel answers no other.
    let patience = Duration::from_millis(200);
    let waiting: Vec<_> =
        (0..4).map_while(|_| std::net::TcpStream::connect_timeout(&address, patience).ok()).collect();
    assert!(waiting.len() < 4, "the listener is full");
    let mut endpoint = Endpoint::resolve(Target::new(&mock.url(), None).unwrap()).unwrap();
    let limits = Limits { connect: Duration::from_millis(300), ..PATIENT };
    let plan = plan(4, Duration::ZERO, 3);
    endpoint.addresses.insert(0, address);
    let live = drive_to(&endpoint, limits, &traffic(&plan, LoadMode::Closed { concurrency: 1 }), None, 3);
    assert!(live.run.records.iter().all(|r| r.outcome == RequestOutcome::Served), "{:?}", live.messages);
    assert_eq!((live.opened, live.reused), (2, 3), "the address that answers is kept");
    // Where no other is left the failure is that it took too long.
    endpoint.addresses.truncate(1);
    let live = drive_to(&endpoint, limits, &traffic(&plan, LoadMode::Closed { concurrency: 4 }), None, 3);
    assert!(live.exchanges.iter().all(|e| e.failure == Some(Failure::ConnectTimeout)), "{:?}", live.messages);
    assert_eq!(live.messages[0].1, "no connection within 0.3 s");
    drop(waiting);
}

#[test]
fn the_client_s_processor_time_counts_from_the_start_of_the_run() {
    const BEFORE: u64 = 300_000_000;
    let mock = Mock::start(Server::new(Script::Stream(fast()))).unwrap();
    let endpoint = Endpoint::resolve(Target::new(&mock.url(), None).unwrap()).unwrap();
    let plan = plan(1, Duration::ZERO, 3);
    let spent = |from: Cost| Cost::now().since(from);
    let job = Job {
        endpoint: &endpoint,
        path: "/v1/completions",
        traffic: &traffic(&plan, LoadMode::Open),
        cap: None,
        limits: PATIENT,
        id: "t",
        keep_events: false,
        // Requests are made before the clock starts.
        bodies: &mut |_, body| {
            let from = Cost::now();
            while spent(from).known && spent(from).processor < BEFORE {}
            body.extend_from_slice(request(3).as_bytes());
        },
    };
    let live = run(job, &mut |_| {}).unwrap();
    assert!(live.cost.processor < BEFORE, "{:?}", live.cost);
}

#[test]
fn an_endless_run_ends_at_its_time_limit_and_what_was_under_way_is_unfinished() {
    let mock =
        Mock::start(Server::new(Script::Stream(Tokens { token_gap: Duration::from_millis(50), ..fast() })))
            .unwrap();
    let plan = plan(4, Duration::ZERO, 200);
    let mut traffic = traffic(&plan, LoadMode::Open);
    traffic.time_limit = Some(Nanos(150e6));
    let live = drive(&mock.url(), "", &traffic, None, 200);
    assert!(live.run.records.iter().all(|r| r.outcome == RequestOutcome::Unfinished));
    assert!(live.exchanges.iter().all(|e| e.failure == Some(Failure::Aborted)));
}

/// A server behind TLS, with a certificate of its own for this name: the certificate, and its port.
fn encrypted(name: &str, connections: usize) -> (String, u16) {
    use std::io::{Read, Write};
    use std::sync::Arc;
    let made = rcgen::generate_simple_self_signed([name.to_owned()]).unwrap();
    let key = rustls::pki_types::PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)
        .unwrap();
    let (config, listener) = (Arc::new(config), std::net::TcpListener::bind("127.0.0.1:0").unwrap());
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for _ in 0..connections {
            let (socket, _) = listener.accept().unwrap();
            let tls = rustls::ServerConnection::new(config.clone()).unwrap();
            let mut stream = rustls::StreamOwned::new(tls, socket);
            let (mut request, mut buffer) = (Vec::new(), [0; 4096]);
            // The body ends with a brace; a client that does not trust the certificate sends none.
            while !request.ends_with(b"}") {
                match stream.read(&mut buffer) {
                    Ok(0) | Err(_) => break,
                    Ok(len) => request.extend_from_slice(&buffer[..len]),
                }
            }
            let mut events = String::new();
            for count in 1..=4 {
                events +=
                    r#"data: {"choices":[{"text":"x"}],"usage":{"prompt_tokens":3,"completion_tokens":"#;
                events += &count.to_string();
                events += "}}\n\n";
            }
            let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
            let _ = write!(stream, "{head}{events}data: [DONE]\n\n");
            stream.conn.send_close_notify();
            let _ = stream.flush();
        }
    });
    (made.cert.pem(), port)
}

fn over_tls(port: u16, certificate: Option<&str>, requests: usize) -> LiveRun {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut target = Target::new(&format!("https://localhost:{port}"), None).unwrap();
    if let Some(pem) = certificate {
        std::fs::write(file.path(), pem).unwrap();
        target = target.with_certificates(file.path()).unwrap();
    }
    let mut endpoint = Endpoint::resolve(target).unwrap();
    endpoint.addresses.retain(std::net::SocketAddr::is_ipv4);
    let plan = plan(requests, Duration::from_millis(5), 4);
    drive_to(&endpoint, PATIENT, &traffic(&plan, LoadMode::Open), None, 4)
}

#[test]
fn a_server_with_a_trusted_certificate_is_measured_without_stamps_of_the_kernel() {
    let (certificate, port) = encrypted("localhost", 5);
    let live = over_tls(port, Some(&certificate), 5);
    for record in &live.run.records {
        assert_eq!(
            (record.outcome, record.output_tokens),
            (RequestOutcome::Served, 4),
            "{:?}",
            live.messages
        );
    }
    assert!(live.unstamped > 0 && live.delays.seen() == 0);
}

#[test]
fn a_certificate_of_an_unknown_maker_or_of_another_name_is_a_failure_of_tls() {
    let (_, port) = encrypted("localhost", 1);
    let unknown = over_tls(port, None, 1);
    let (other, port) = encrypted("elsewhere.example", 1);
    let misnamed = over_tls(port, Some(&other), 1);
    for live in [unknown, misnamed] {
        assert_eq!(live.run.records[0].outcome, RequestOutcome::Failed(Failure::Tls), "{:?}", live.messages);
        assert!(live.messages[0].1.contains("certificate"), "{:?}", live.messages);
    }
}

#[test]
fn a_file_without_certificates_is_refused_with_its_name() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let target = Target::new("https://localhost", None).unwrap();
    let error = target.with_certificates(file.path()).unwrap_err().to_string();
    assert!(error.contains(file.path().to_str().unwrap()) && error.contains("CERTIFICATE"), "{error}");
}
