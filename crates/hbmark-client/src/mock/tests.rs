//! The server over raw sockets: what it sends, when by its own log, and every awkward behaviour byte by byte.

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use super::*;

const QUIET: Duration = Duration::from_millis(40);

fn millis(count: u64) -> Duration {
    Duration::from_millis(count)
}

/// Sends a request; `id` may be empty.
fn send(socket: &mut TcpStream, method: &str, path: &str, id: &str, body: &str) {
    let id = if id.is_empty() { String::new() } else { format!("X-Request-Id: {id}\r\n") };
    let length = body.len();
    let request =
        format!("{method} {path} HTTP/1.1\r\nhost: mock\r\n{id}content-length: {length}\r\n\r\n{body}");
    socket.write_all(request.as_bytes()).unwrap();
}

fn connect(mock: &Mock) -> TcpStream {
    let socket = TcpStream::connect(mock.address()).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    socket
}

/// One whole answer, as the head says: head and body, chunks joined.
fn receive(socket: &mut TcpStream) -> (String, String) {
    let mut byte = [0];
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        socket.read_exact(&mut byte).unwrap();
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap();
    let mut body = Vec::new();
    if let Some((_, length)) = head.split_once("content-length: ") {
        body.resize(length.lines().next().unwrap().parse().unwrap(), 0);
        socket.read_exact(&mut body).unwrap();
    } else {
        loop {
            let mut line = Vec::new();
            while !line.ends_with(b"\r\n") {
                socket.read_exact(&mut byte).unwrap();
                line.push(byte[0]);
            }
            let size = usize::from_str_radix(std::str::from_utf8(&line).unwrap().trim_end(), 16).unwrap();
            let mut chunk = vec![0; size + 2];
            socket.read_exact(&mut chunk).unwrap();
            assert!(chunk.ends_with(b"\r\n"));
            body.extend_from_slice(&chunk[..size]);
            if size == 0 {
                break;
            }
        }
    }
    (head, String::from_utf8(body).unwrap())
}

fn exchange(mock: &Mock, method: &str, path: &str, id: &str, body: &str) -> (String, String) {
    let mut socket = connect(mock);
    send(&mut socket, method, path, id, body);
    receive(&mut socket)
}

fn completions(mock: &Mock, id: &str, body: &str) -> String {
    exchange(mock, "POST", "/v1/completions", id, body).1
}

fn quick() -> Stream {
    Stream { first_token: millis(2), token_gap: millis(1), ..Stream::default() }
}

fn start(stream: Stream) -> Mock {
    Mock::start(Script::new(Answer::Stream(stream))).unwrap()
}

/// A value of `/metrics`.
fn metric(mock: &Mock, series: &str) -> String {
    let text = exchange(mock, "GET", "/metrics", "", "").1;
    let line = text.lines().find(|line| line.starts_with(&format!("vllm:{series}"))).unwrap();
    line.rsplit_once(' ').unwrap().1.to_owned()
}

#[test]
fn a_stream_of_completions_has_the_frames_of_vllm_to_the_byte() {
    let mock = start(quick());
    let body = r#"{"model":"mock","prompt":[1,2,3],"max_tokens":2,"stream":true,"stream_options":{"include_usage":true}}"#;
    let (head, stream) = exchange(&mock, "POST", "/v1/completions", "a-1", body);
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains("content-type: text/event-stream"));
    let start = r#"data: {"id":"cmpl-a-1","object":"text_completion","created":1760000000,"model":"mock","choices":["#;
    let expected = [
        format!(
            r#"{start}{{"index":0,"text":" word","logprobs":null,"finish_reason":null}}],"usage":null}}"#
        ),
        format!(
            r#"{start}{{"index":0,"text":" word","logprobs":null,"finish_reason":"length"}}],"usage":null}}"#
        ),
        format!(r#"{start}],"usage":{{"prompt_tokens":3,"total_tokens":5,"completion_tokens":2}}}}"#),
        "data: [DONE]\n\n".to_owned(),
    ];
    assert_eq!(stream, expected.join("\n\n"));
}

#[test]
fn a_chat_stream_begins_with_its_role_and_carries_the_evidence_that_was_asked_for() {
    let mock = start(Stream { tokens_per_event: 2, ..quick() });
    let body = r#"{"messages":[{"role":"user","content":"one two"}],"max_completion_tokens":3,"stream":true,
        "stream_options":{"include_usage":true,"continuous_usage_stats":true}}"#;
    let (_, stream) = exchange(&mock, "POST", "/v1/chat/completions", "c", body);
    let start = r#"data: {"id":"chatcmpl-c","object":"chat.completion.chunk","created":1760000000,"model":"mock","choices":["#;
    let usage = |output: u64| {
        format!(
            r#""usage":{{"prompt_tokens":2,"total_tokens":{},"completion_tokens":{output}}}}}"#,
            2 + output
        )
    };
    let expected = [
        format!(
            r#"{start}{{"index":0,"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}],{}"#,
            usage(0)
        ),
        format!(
            r#"{start}{{"index":0,"delta":{{"content":" word word"}},"logprobs":null,"finish_reason":null}}],{}"#,
            usage(2)
        ),
        format!(
            r#"{start}{{"index":0,"delta":{{"content":" word"}},"logprobs":null,"finish_reason":"length"}}],{}"#,
            usage(3)
        ),
        format!("{start}],{}", usage(3)),
        "data: [DONE]\n\n".to_owned(),
    ];
    assert_eq!(stream, expected.join("\n\n"));
    let tokens: Vec<_> = mock.sent("c").iter().map(|sent| sent.tokens).collect();
    assert_eq!(tokens, [0, 2, 1, 0, 0]);
}

#[test]
fn every_event_is_logged_with_its_moment_and_its_deadline_is_absolute() {
    let mock = start(quick());
    let before = now_ns();
    completions(&mock, "j", r#"{"prompt":"","max_tokens":40,"stream":true}"#);
    let after = now_ns();
    let (sent, received) = (mock.sent("j"), mock.requests()[0].received_ns);
    assert_eq!(sent.len(), 41);
    assert!(
        sent.is_sorted_by_key(|sent| sent.at_ns)
            && before < received
            && received < sent[0].at_ns
            && sent[40].at_ns < after
    );
    for (sent, index) in sent[..40].iter().zip(0..) {
        assert_eq!(sent.at_ns - u64::from(sent.late_ns), received + 2_000_000 + index * 1_000_000);
    }
}

#[test]
fn deadlines_are_kept_in_the_median() {
    let mock = start(Stream { first_token: millis(20), token_gap: millis(5), ..Stream::default() });
    let mut sockets: Vec<_> = (0..50).map(|_| connect(&mock)).collect();
    for (index, socket) in sockets.iter_mut().enumerate() {
        send(socket, "POST", "/v1/completions", &format!("d{index}"), r#"{"max_tokens":40,"stream":true}"#);
    }
    for socket in &mut sockets {
        receive(socket);
    }
    let mut late: Vec<u32> =
        (0..50).flat_map(|index| mock.sent(&format!("d{index}"))).map(|sent| sent.late_ns).collect();
    late.sort_unstable();
    assert_eq!(late.len(), 50 * 41);
    assert!(late[late.len() / 2] < 5_000_000, "the median is {} ns late", late[late.len() / 2]);
}

#[test]
fn events_of_one_write_wait_for_the_last_of_them_and_share_a_moment() {
    let mock = start(Stream { tokens_per_event: 2, events_per_write: 3, ..quick() });
    let text = completions(&mock, "m", r#"{"max_tokens":10,"stream":true}"#);
    assert_eq!(text.matches(" word").count(), 10);
    let (sent, received) = (mock.sent("m"), mock.requests()[0].received_ns);
    let tokens: Vec<_> = sent.iter().map(|sent| sent.tokens).collect();
    assert_eq!(tokens, [2, 2, 2, 2, 2, 0]);
    assert!(
        sent[0].at_ns == sent[2].at_ns && sent[3].at_ns == sent[4].at_ns && sent[2].at_ns < sent[3].at_ns
    );
    let due = |index: usize| sent[index].at_ns - u64::from(sent[index].late_ns) - received;
    assert_eq!((due(0), due(3)), (2_000_000 + 4_000_000, 2_000_000 + 8_000_000));
}

#[test]
fn a_batch_makes_tokens_at_its_saturation_rate_and_says_so_in_its_metrics() {
    // A full batch of 4 makes 4 tokens in 3 + 4 × 0.5 = 5 ms.
    let model = BatchModel { max_running: 4, step: millis(3), per_sequence: Duration::from_micros(500) };
    let mock = Mock::start(Script::default().in_batches(model)).unwrap();
    let mut sockets: Vec<_> = (0..12).map(|_| connect(&mock)).collect();
    for (index, socket) in sockets.iter_mut().enumerate() {
        let body = r#"{"prompt":"one two","max_tokens":50,"stream":true}"#;
        send(socket, "POST", "/v1/completions", &format!("b{index}"), body);
    }
    std::thread::sleep(millis(100));
    assert_eq!(metric(&mock, "num_requests_running"), "4");
    let waiting = metric(&mock, "num_requests_waiting");
    assert!(waiting == "8" || waiting == "4", "{waiting} wait");
    for socket in &mut sockets {
        receive(socket);
    }
    let mut due: Vec<u64> = Vec::new();
    for index in 0..12 {
        let sent = mock.sent(&format!("b{index}"));
        assert_eq!(sent.iter().map(|sent| sent.tokens).sum::<u32>(), 50);
        due.extend(
            sent.iter().filter(|sent| sent.tokens == 1).map(|sent| sent.at_ns - u64::from(sent.late_ns)),
        );
    }
    due.sort_unstable();
    // Not the first steps, in which requests were still coming in. By deadlines, which do not depend on this machine.
    let middle = &due[40..440];
    let rate = (middle.len() - 1) as f64 / ((middle[middle.len() - 1] - middle[0]) as f64 / 1e9);
    assert!((rate / 800.0 - 1.0).abs() < 0.02, "{rate} of 800 tokens per second");
    assert_eq!(metric(&mock, "generation_tokens_total"), "600");
    assert_eq!(metric(&mock, "prompt_tokens_total"), "24");
    assert_eq!(metric(&mock, "iteration_tokens_total_sum"), "624.0");
    assert_eq!(
        (metric(&mock, "num_requests_running"), metric(&mock, "num_requests_waiting")),
        ("0".to_owned(), "0".to_owned())
    );
    let steps: u64 = metric(&mock, "iteration_tokens_total_count").parse().unwrap();
    assert!((150..=156).contains(&steps), "{steps} steps");
}

#[test]
fn metrics_are_true_of_what_was_served() {
    let mock = start(quick());
    for id in ["a", "b"] {
        completions(&mock, id, r#"{"prompt":"one two three","max_tokens":10,"stream":true}"#);
    }
    let mut socket = connect(&mock);
    send(&mut socket, "POST", "/v1/completions", "gone", r#"{"max_tokens":1000,"stream":true}"#);
    socket.read_exact(&mut [0; 400]).unwrap();
    assert_eq!(metric(&mock, "num_requests_running"), "1");
    drop(socket);
    while metric(&mock, "num_requests_running") != "0" {
        std::thread::sleep(millis(1));
    }
    let aborted = mock.sent("gone").len();
    assert!((1..1000).contains(&aborted));
    assert_eq!(metric(&mock, "prompt_tokens_total"), "6");
    assert_eq!(metric(&mock, "generation_tokens_total"), (20 + aborted).to_string());
    assert_eq!(
        metric(&mock, r#"request_success_total{engine="0",model_name="mock",finished_reason="length"}"#),
        "2"
    );
    assert_eq!(
        metric(&mock, r#"request_success_total{engine="0",model_name="mock",finished_reason="abort"}"#),
        "1"
    );
    assert_eq!(metric(&mock, "time_to_first_token_seconds_count"), "3");
    assert_eq!(metric(&mock, "e2e_request_latency_seconds_count"), "2");
    let (log, requests) = ([mock.sent("a"), mock.sent("b")], mock.requests());
    let e2e: u64 = log.iter().zip(&requests).map(|(log, request)| log[9].at_ns - request.received_ns).sum();
    let shown: f64 = metric(&mock, "e2e_request_latency_seconds_sum").parse().unwrap();
    assert!((shown - e2e as f64 / 1e9).abs() < 1e-9, "{shown} s, but {e2e} ns by the log");
}

#[test]
fn other_paths_answer_as_such_a_server_does_and_requests_are_recorded_whole() {
    let mock = start(quick());
    let mut socket = connect(&mock);
    let mut ask = |method: &str, path: &str, body: &str| {
        send(&mut socket, method, path, "", body);
        let (head, body) = receive(&mut socket);
        (head[9..12].parse::<u16>().unwrap(), body)
    };
    let (status, models) = ask("GET", "/v1/models", "");
    assert!(status == 200 && models.contains(r#""id":"mock""#) && models.contains("max_model_len"));
    assert_eq!(ask("GET", "/health", ""), (200, String::new()));
    assert!(ask("GET", "/version", "").1.contains("version"));
    assert_eq!(ask("GET", "/v1/completions", "").0, 404);
    assert_eq!(ask("POST", "/v1/embeddings?x=1", "{}").0, 404);
    assert_eq!(ask("POST", "/v1/completions", "{").0, 400);
    assert_eq!(ask("POST", "/v1/completions", r#"{"max_tokens":0}"#).0, 400);
    let (status, error) = ask("POST", "/v1/completions", r#"{"model":"other"}"#);
    assert!(status == 404 && error.contains("`other`"));
    let requests = mock.requests();
    assert_eq!(requests.len(), 8);
    assert_eq!(
        (requests[4].id.as_str(), requests[4].target.as_str(), &requests[4].body[..]),
        ("mock-4", "/v1/embeddings?x=1", &b"{}"[..])
    );
    assert_eq!(requests[0].head, b"GET /v1/models HTTP/1.1\r\nhost: mock\r\ncontent-length: 0\r\n\r\n");
    assert_eq!(requests[4].header("HOST").as_deref(), Some("mock"));
    let address = mock.address();
    drop(mock);
    assert!(TcpStream::connect(address).is_err(), "a stopped server listens no more");
}

/// What is left of an answer, until the connection ends or is quiet.
fn drain(socket: &mut TcpStream, most: usize) -> (Vec<u8>, Option<ErrorKind>) {
    let (mut all, mut buffer) = (Vec::new(), vec![0; 1 << 16]);
    while all.len() < most {
        match socket.read(&mut buffer) {
            Ok(0) => return (all, None),
            Ok(read) => all.extend_from_slice(&buffer[..read]),
            Err(error) => return (all, Some(error.kind())),
        }
    }
    (all, Some(ErrorKind::FileTooLarge))
}

/// Follows an answer's steps from the client's side and holds every byte and the end against them.
fn check_steps(mock: &Mock, id: &str, steps: &[Step]) {
    let mut socket = connect(mock);
    send(&mut socket, "POST", "/v1/completions", id, "{}");
    let (mut expected, mut end) = (Vec::new(), None);
    for step in steps {
        match step {
            Step::Send(bytes) | Step::Event(bytes) => expected.extend_from_slice(bytes),
            Step::Pieces { bytes, pause, .. } if *pause < QUIET => expected.extend_from_slice(bytes),
            Step::Wait(pause) if *pause < QUIET => {}
            other => {
                end = Some(other);
                break;
            }
        }
    }
    let mut received = vec![0; expected.len()];
    socket.read_exact(&mut received).unwrap_or_else(|error| panic!("{id}: {error}"));
    assert!(received == expected, "{id}: the bytes are others");
    socket.set_read_timeout(Some(QUIET)).unwrap();
    match end {
        Some(Step::Close) => assert_eq!(drain(&mut socket, 1), (Vec::new(), None), "{id}"),
        Some(Step::Reset) => {
            assert_eq!(drain(&mut socket, 1), (Vec::new(), Some(ErrorKind::ConnectionReset)), "{id}");
        }
        Some(Step::Repeat(bytes)) => {
            let (more, _) = drain(&mut socket, bytes.len().max(100) * 3);
            assert!(
                more.len() >= bytes.len() * 3 && more.chunks_exact(bytes.len()).all(|again| again == bytes),
                "{id}"
            );
        }
        Some(Step::Silence | Step::Wait(_)) => {
            assert_eq!(drain(&mut socket, 1), (Vec::new(), Some(ErrorKind::WouldBlock)), "{id}");
        }
        Some(Step::Pieces { bytes, .. }) => {
            assert_eq!(
                drain(&mut socket, bytes.len()),
                (bytes[..1].to_vec(), Some(ErrorKind::WouldBlock)),
                "{id}"
            );
        }
        // The connection can be used again.
        _ => {
            socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            send(&mut socket, "GET", "/health", "", "");
            assert!(receive(&mut socket).0.starts_with("HTTP/1.1 200"), "{id}");
        }
    }
}

#[test]
fn every_behaviour_sends_the_bytes_of_its_steps_and_ends_as_they_say() {
    let names: BTreeSet<_> = behaviours().iter().map(|(name, _)| *name).collect();
    assert_eq!(names.len(), behaviours().len(), "names are unique");
    let check = |(name, answer): &(&str, Answer)| {
        let mock = Mock::start(Script::new(answer.clone())).unwrap();
        let turns =
            if let Answer::InTurn(turns) = answer { &turns[..] } else { std::slice::from_ref(answer) };
        for turn in turns {
            let Answer::Steps(steps) = turn else { panic!("{name} has no steps") };
            check_steps(&mock, name, steps);
        }
    };
    std::thread::scope(|scope| {
        let threads = 16;
        for first in 0..threads {
            scope.spawn(move || behaviours().iter().skip(first).step_by(threads).for_each(check));
        }
    });
}

/// The body that a behaviour sends on completions, as text.
fn wire(name: &str) -> String {
    let (_, answer) = behaviours()
        .iter()
        .find(|(other, _)| *other == name)
        .unwrap_or_else(|| panic!("no behaviour {name}"));
    let Answer::Steps(steps) = answer else { panic!("{name} has no steps") };
    let mut all = Vec::new();
    for step in steps.iter() {
        match step {
            Step::Send(bytes) | Step::Event(bytes) | Step::Pieces { bytes, .. } => {
                all.extend_from_slice(bytes);
            }
            _ => {}
        }
    }
    String::from_utf8_lossy(&all).into_owned()
}

#[test]
fn behaviours_are_what_their_names_say() {
    for (name, part) in [
        ("no_space_after_data", "\r\ndata:{\"id\""),
        ("lines_end_in_crlf", "}\r\n\r\ndata: "),
        ("lines_end_in_cr", "}\r\rdata: "),
        ("byte_order_mark", "\r\n\u{feff}data: "),
        ("comments", "\r\n: ping\n\n"),
        ("several_data_lines", "\"id\":\"cmpl-mock\",\ndata: \"object\":"),
        ("no_blank_line_at_the_end", "data: [DONE]\n\r\n0\r\n"),
        ("bytes_after_done", "[DONE]\n\n\r\n"),
        ("usage_null", "\"choices\":[],\"usage\":null}\n\n"),
        (
            "usage_negative",
            "\"choices\":[],\"usage\":{\"prompt_tokens\":4,\"total_tokens\":7,\"completion_tokens\":-3}}\n\n",
        ),
        ("usage_2_to_63", "\"completion_tokens\":9223372036854775808}"),
        ("usage_in_the_last_content_event", "\"finish_reason\":\"length\"}],\"usage\":{\"prompt_tokens\":4"),
        ("keys_twice", "{\"completion_tokens\":99,\"prompt_tokens\":4"),
        ("nan", "\"logprobs\":NaN"),
        ("choices_absent", "\"model\":\"mock\"}\n\n"),
        ("two_choices", "\"finish_reason\":null},{\"index\":1,\"text\":\" word\""),
        ("empty_deltas", "\"text\":\"\""),
        ("several_tokens_per_event", "\" word word word word\""),
        (
            "tool_call_fragments",
            "\"tool_calls\":[{\"index\":0,\"function\":{\"arguments\":\"{\\\"a\\\": \"}}]",
        ),
        ("chunk_extensions_and_trailers", ";name=\"value\"\r\ndata: "),
        ("gzip", "content-encoding: gzip\r\n"),
        ("too_many_429_seconds", "retry-after: 2\r\n"),
        ("redirect_307", "location: http://other-host.invalid/"),
        ("http_1_0_until_close", "HTTP/1.0 200"),
    ] {
        assert!(wire(name).contains(part), "{name} has no {part:?}: {}", wire(name));
    }
    assert!(!wire("no_done").contains("DONE") && !wire("usage_missing").contains("completion_tokens"));
    assert!(
        !wire("close_without_last_chunk").ends_with("0\r\n\r\n")
            && wire("plain").ends_with("[DONE]\n\n\r\n0\r\n\r\n")
    );
    assert!(wire("event_of_10_mb").len() > 10 << 20);
    assert_eq!(wire("nested_brackets").matches("[[").count(), 50_000);
    assert!(wire("header_of_64_kb").lines().any(|line| line.len() > 64 << 10));
    let off = |name| {
        let text = wire(name);
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        let length: i64 = head.rsplit_once("content-length: ").unwrap().1.parse().unwrap();
        length - i64::try_from(body.len()).unwrap()
    };
    assert_eq!(
        [off("content_length"), off("content_length_too_long"), off("content_length_too_short")],
        [0, 10, -10]
    );
}

#[test]
fn a_split_is_where_its_name_says() {
    let borders = |name: &str| {
        let (_, answer) = behaviours().iter().find(|(other, _)| *other == name).unwrap();
        let Answer::Steps(steps) = answer else { panic!("{name} has no steps") };
        let pieces: Vec<_> = steps
            .iter()
            .filter_map(|step| if let Step::Send(bytes) = step { Some(bytes.clone()) } else { None })
            .collect();
        pieces.windows(2).map(|pair| (pair[0].clone(), pair[1].clone())).collect::<Vec<_>>()
    };
    // A byte that continues a character comes first in every piece.
    assert!(borders("split_in_utf8").iter().all(|(_, after)| after[0] & 0xc0 == 0x80));
    assert_eq!(borders("split_in_utf8").len(), 4);
    let crlf = borders("split_in_crlf");
    assert!(
        crlf[0].0.ends_with(b"}\r")
            && crlf[1].0 == b"\n"
            && crlf[2].0 == b"\r"
            && crlf[2].1.starts_with(b"\n\r\n")
    );
    let size = borders("split_in_chunk_size");
    assert!(size[0].0.ends_with(b"\r\n\r\n8") || size[0].0.last().unwrap().is_ascii_hexdigit());
    assert!(
        size[1].0.iter().all(u8::is_ascii_hexdigit)
            && size[2].0 == b"\r"
            && size[2].1.starts_with(b"\ndata: ")
    );
    assert!(size[5].0.ends_with(b"\r\n\r") || size[5].0 == b"\n\r");
}

#[test]
fn answers_come_in_turn_and_a_kept_connection_is_closed_when_it_is_used_again() {
    let loading = Answer::status(503, "text/plain", "", "loading").once(Answer::plain());
    let mock = Mock::start(Script::new(loading)).unwrap();
    let statuses: Vec<_> =
        (0..3).map(|_| exchange(&mock, "POST", "/v1/completions", "", "{}").0[9..12].to_owned()).collect();
    assert_eq!(statuses, ["503", "200", "200"]);
    let mock = Mock::start(Script::new(Answer::ended_when_reused(Step::Close))).unwrap();
    let mut socket = connect(&mock);
    send(&mut socket, "POST", "/v1/completions", "reused", "{}");
    assert!(receive(&mut socket).1.ends_with("[DONE]\n\n"));
    send(&mut socket, "POST", "/v1/completions", "reused", "{}");
    assert_eq!(socket.read(&mut [0; 10]).unwrap(), 0, "closed without a byte");
    let again = exchange(&mock, "POST", "/v1/completions", "reused", "{}").1;
    assert!(again.ends_with("[DONE]\n\n"));
}

#[test]
fn any_id_and_any_model_make_json() {
    let mock = Mock::start(Script { model: "a \"b\\c\"".to_owned(), ..Script::new(Answer::Stream(quick())) })
        .unwrap();
    for id in ["plain", r#"x"y\z"#, "caf\u{e9}"] {
        let stream = completions(&mock, id, r#"{"max_tokens":1}"#);
        let event = stream.lines().next().unwrap().strip_prefix("data: ").unwrap();
        let event: serde_json::Value = serde_json::from_str(event).unwrap();
        assert_eq!((&event["id"], &event["model"]), (&format!("cmpl-{id}").into(), &r#"a "b\c""#.into()));
        assert_eq!(mock.sent(id).len(), 2);
    }
}

#[test]
fn the_log_of_an_id_is_of_its_newest_request_and_the_log_of_none_is_empty() {
    let mock = start(quick());
    completions(&mock, "twice", r#"{"max_tokens":5,"stream":true}"#);
    completions(&mock, "twice", r#"{"max_tokens":7,"stream":true}"#);
    assert_eq!((mock.sent("twice").len(), mock.sent("never").len()), (8, 0));
}

#[test]
fn a_connection_that_the_client_wants_closed_is_closed() {
    let mock = start(quick());
    let mut socket = connect(&mock);
    socket.write_all(b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n").unwrap();
    let (bytes, end) = drain(&mut socket, 1 << 16);
    assert!(bytes.starts_with(b"HTTP/1.1 200") && end.is_none());
    let mut socket = connect(&mock);
    socket.write_all(b"what is this\r\n\r\n").unwrap();
    let (bytes, end) = drain(&mut socket, 1 << 16);
    assert!(bytes.starts_with(b"HTTP/1.1 400") && end.is_none());
}

#[test]
fn a_client_that_goes_makes_room_in_the_batch_and_one_that_asks_twice_at_once_is_answered_twice() {
    let model = BatchModel { max_running: 1, step: millis(1), per_sequence: Duration::ZERO };
    let mock = Mock::start(Script::default().in_batches(model)).unwrap();
    let mut gone = connect(&mock);
    send(&mut gone, "POST", "/v1/completions", "gone", r#"{"max_tokens":100000,"stream":true}"#);
    gone.read_exact(&mut [0; 400]).unwrap();
    let mut socket = connect(&mock);
    send(&mut socket, "POST", "/v1/completions", "first", r#"{"max_tokens":3,"stream":true}"#);
    send(&mut socket, "POST", "/v1/completions", "second", r#"{"max_tokens":2}"#);
    drop(gone);
    assert_eq!(receive(&mut socket).1.matches(" word").count(), 3);
    assert_eq!(receive(&mut socket).1.matches(" word").count(), 2);
    assert_eq!(metric(&mock, "num_requests_running"), "0");
}

#[test]
fn a_client_that_does_not_read_gets_everything_later() {
    let mock = start(Stream { tokens_per_event: 1000, token_gap: Duration::ZERO, ..quick() });
    let mut socket = connect(&mock);
    send(&mut socket, "POST", "/v1/completions", "full", r#"{"max_tokens":1000000,"stream":true}"#);
    // The windows of both sides are full now, and most of 5 MB is not sent.
    std::thread::sleep(millis(50));
    assert!(receive(&mut socket).1.matches(" word").count() == 1_000_000);
    assert_eq!(mock.sent("full").len(), 1001);
}
