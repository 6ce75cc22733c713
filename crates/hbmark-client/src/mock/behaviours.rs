//! Everything awkward that servers are known to do, by name: in the frames of completions.

use std::sync::OnceLock;
use std::time::Duration;

use super::answer::{Answer, Step};
use super::http::refusal;
use super::stream::{Api, Content, DONE, LAST_CHUNK, STREAM_HEAD, Usage, WORD, write_chunk};

/// So that two writes are not read as one.
const APART: Duration = Duration::from_millis(2);
const BIG_EVENT_BYTES: usize = 10 << 20;
const NESTED_BRACKETS: usize = 100_000;
const LONG_HEADER_BYTES: usize = 64 << 10;
/// Longer than any client waits.
const AGES: Duration = Duration::from_secs(30);

fn json(content: Content, finish: Option<&str>, usage: Option<Usage>) -> String {
    let (api, mut out) = (Api::Completions, Vec::new());
    api.write_json(api.prefix("mock", "mock").as_bytes(), content, finish, usage, &mut out);
    String::from_utf8_lossy(&out).into_owned()
}
fn token() -> String {
    json(Content::Words(1), None, None)
}
fn last_token() -> String {
    json(Content::Words(1), Some("length"), None)
}
fn usage(output: u64) -> String {
    json(Content::None, None, Some(Usage { prompt: 4, output }))
}
fn data(json: impl AsRef<str>) -> Vec<u8> {
    format!("data: {}\n\n", json.as_ref()).into_bytes()
}
/// An event in which a part of a token's event is another.
fn odd(from: &str, to: &str) -> Vec<u8> {
    let plain = token();
    assert!(plain.contains(from), "{plain} has no {from}");
    data(plain.replacen(from, to, 1))
}
fn chunk(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len() + 16);
    write_chunk(bytes, &mut out);
    out
}
fn chunks(frames: &[Vec<u8>]) -> Vec<u8> {
    frames.iter().flat_map(|frame| chunk(frame)).collect()
}
/// Three tokens, usage and `[DONE]`: an answer with nothing wrong.
fn plain_frames() -> Vec<Vec<u8>> {
    vec![data(token()), data(token()), data(last_token()), data(usage(3)), DONE.to_vec()]
}
/// The bytes of such an answer.
fn plain_wire() -> Vec<u8> {
    [STREAM_HEAD.as_bytes(), &chunks(&plain_frames()), LAST_CHUNK].concat()
}
fn split(bytes: &[u8], at: &[usize]) -> Vec<Step> {
    let ends = at.iter().copied().chain([bytes.len()]);
    let starts = [0].into_iter().chain(at.iter().copied());
    starts
        .zip(ends)
        .flat_map(|(from, to)| [Step::Send(bytes[from..to].to_vec()), Step::Wait(APART)])
        .collect()
}
fn position(bytes: &[u8], part: &[u8]) -> usize {
    memchr::memmem::find(bytes, part).expect("the part is in these bytes")
}

impl Answer {
    fn steps(steps: Vec<Step>) -> Self {
        Self::Steps(steps.into())
    }
    /// These bytes in one write.
    fn bytes(bytes: impl Into<Vec<u8>>) -> Self {
        Self::steps(vec![Step::Send(bytes.into())])
    }
    /// An event stream of these frames: each a chunk and a write of its own.
    fn frames(frames: &[Vec<u8>]) -> Self {
        let mut steps = vec![Step::Send(STREAM_HEAD.into())];
        steps.extend(frames.iter().map(|frame| Step::Event(chunk(frame))));
        steps.push(Step::Send(LAST_CHUNK.to_vec()));
        Self::steps(steps)
    }
    /// Three tokens at once, usage and `[DONE]`.
    pub(crate) fn plain() -> Self {
        Self::frames(&plain_frames())
    }
    /// The frames of [`Self::plain`], changed.
    fn changed(change: impl FnOnce(&mut Vec<Vec<u8>>)) -> Self {
        let mut frames = plain_frames();
        change(&mut frames);
        Self::frames(&frames)
    }
    /// [`Self::plain`] with another frame after the first token.
    fn with(frame: Vec<u8>) -> Self {
        Self::changed(|frames| frames.insert(1, frame))
    }
    /// [`Self::plain`] with its text changed by `change`, in one chunk.
    fn as_text(change: impl Fn(String) -> String) -> Self {
        let text = String::from_utf8_lossy(&plain_frames().concat()).into_owned();
        Self::frames(&[change(text).into_bytes()])
    }
    /// [`Self::plain`] with this as the value of `usage`.
    fn usage_of(value: &str) -> Self {
        let none = json(Content::None, None, None).replace(r#","usage":null"#, "");
        Self::changed(|frames| {
            frames[3] = data(format!(r#"{},"usage":{value}}}"#, none.trim_end_matches('}')));
        })
    }
    /// The head and so many tokens, and then these steps.
    fn then(tokens: usize, end: &[Step]) -> Self {
        let mut steps = vec![Step::Send(STREAM_HEAD.into())];
        steps.extend(std::iter::repeat_n(Step::Event(chunk(&data(token()))), tokens));
        steps.extend_from_slice(end);
        Self::steps(steps)
    }
    /// [`Self::plain`], in writes of so many bytes from the status line on.
    fn split_every(bytes: usize) -> Self {
        let pause = Duration::from_micros(200);
        Self::steps(vec![Step::Pieces { bytes: plain_wire(), size: bytes, pause }])
    }
    /// These steps, and then [`Self::plain`] in one write.
    fn after(steps: &[Step]) -> Self {
        Self::steps([steps, &[Step::Send(plain_wire())]].concat())
    }
    /// [`Self::plain`] in one write, and then these steps.
    fn before(steps: &[Step]) -> Self {
        Self::steps([&[Step::Send(plain_wire())], steps].concat())
    }
    /// [`Self::plain`] in one write, not in chunks: `field` makes what the head has instead, and then these steps.
    fn unchunked(field: impl Fn(&[u8]) -> String, end: &[Step]) -> Self {
        let body = plain_frames().concat();
        let head = STREAM_HEAD.replace("transfer-encoding: chunked\r\n", &field(&body));
        Self::steps([&[Step::Send([head.as_bytes(), &body].concat())], end].concat())
    }
    /// [`Self::plain`] without its last chunk, and then these steps.
    fn cut(end: &[Step]) -> Self {
        let wire = plain_wire();
        Self::steps([&[Step::Send(wire[..wire.len() - LAST_CHUNK.len()].to_vec())], end].concat())
    }
    /// An error in the words of vLLM.
    fn error(status: u16, kind: &str, message: &str) -> Self {
        Self::bytes(refusal(status, kind, message))
    }
    pub(crate) fn redirect(status: u16, location: &str) -> Self {
        Self::status(status, "text/plain", &format!("location: {location}\r\n"), "")
    }
    /// This answer once, then the other.
    pub(super) fn once(self, then: Self) -> Self {
        Self::InTurn(vec![self, then])
    }
    /// The first request is served and the connection kept; the second gets `end` instead of a byte; later ones are served.
    /// What a client sees that sends on a kept connection just when the server closes it.
    pub(super) fn ended_when_reused(end: Step) -> Self {
        Self::InTurn(vec![Self::plain(), Self::steps(vec![end]), Self::plain()])
    }
    /// A compressed stream that nobody asked for.
    fn compressed(encoding: &str) -> Self {
        let head = STREAM_HEAD.replace("transfer-", &format!("content-encoding: {encoding}\r\ntransfer-"));
        let body = chunk(&stored(encoding, &plain_frames().concat()));
        Self::bytes([head.as_bytes(), &body, LAST_CHUNK].concat())
    }
    /// The body of [`Self::plain`] with a length in its head that is off by `error` bytes, and then FIN.
    fn content_length_off_by(error: isize) -> Self {
        let field = |body: &[u8]| format!("content-length: {}\r\n", body.len().saturating_add_signed(error));
        Self::unchunked(field, &[Step::Close])
    }
}

/// "Compressed" without compressing: deflate's stored blocks, in the wrapping of gzip or zlib.
fn stored(encoding: &str, bytes: &[u8]) -> Vec<u8> {
    let length = u16::try_from(bytes.len()).expect("a plain answer is short");
    let block = [&[1][..], &length.to_le_bytes(), &(!length).to_le_bytes(), bytes].concat();
    if encoding == "gzip" {
        let mut crc = u32::MAX;
        for &byte in bytes {
            crc ^= u32::from(byte);
            for _ in 0..8 {
                crc = (crc >> 1) ^ (0xedb8_8320 & (0u32.wrapping_sub(crc & 1)));
            }
        }
        let head = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3];
        [&head[..], &block, &(!crc).to_le_bytes(), &u32::from(length).to_le_bytes()].concat()
    } else {
        let (a, b) = bytes.iter().fold((1u32, 0u32), |(a, b), &byte| {
            let a = (a + u32::from(byte)) % 65_521;
            (a, (b + a) % 65_521)
        });
        [&[0x78, 0x01][..], &block, &((b << 16) | a).to_be_bytes()].concat()
    }
}

/// Every awkward behaviour by its name, for tests that run them all.
pub(crate) fn behaviours() -> &'static [(&'static str, Answer)] {
    static ALL: OnceLock<Vec<(&'static str, Answer)>> = OnceLock::new();
    ALL.get_or_init(|| [frames(), values(), writes(), heads(), statuses(), ends()].concat())
}

/// Frames that are unusual but right, and frames that are not.
#[rustfmt::skip] // A table: a behaviour a line.
fn frames() -> Vec<(&'static str, Answer)> {
    let error = r#"{"error":{"message":"out of blocks","type":"InternalServerError","param":null,"code":500}}"#;
    let after_one = |frame: &str| Answer::changed(|frames| { frames.truncate(1); frames.push(frame.into()); });
    let long = "x".repeat(BIG_EVENT_BYTES);
    let nested = ["[".repeat(NESTED_BRACKETS), "]".repeat(NESTED_BRACKETS)].concat();
    vec![
        ("plain", Answer::plain()),
        ("role_chunk_long_before_the_first_token", Answer::steps({
            let role = Step::Event(chunk(&data(json(Content::Role, None, None))));
            let rest = Step::Send([&chunks(&plain_frames())[..], LAST_CHUNK].concat());
            vec![Step::Send(STREAM_HEAD.into()), role, Step::Wait(Duration::from_millis(20)), rest]
        })),
        ("empty_deltas", Answer::with(data(token().replace(WORD, "")))),
        ("comments", Answer::with(b": ping\n\n:\n\n: a longer one: with a colon\n\n".to_vec())),
        ("event_id_and_retry_lines", Answer::with([b"event: message\nid: 7\nretry: 1000\n", &data(token())[..]].concat())),
        ("event_and_id_without_data", Answer::with(b"event: message\nid: 7\n\n".to_vec())),
        ("no_space_after_data", Answer::as_text(|text| text.replace("data: ", "data:"))),
        ("lines_end_in_crlf", Answer::as_text(|text| text.replace('\n', "\r\n"))),
        ("lines_end_in_cr", Answer::as_text(|text| text.replace('\n', "\r"))),
        ("byte_order_mark", Answer::as_text(|text| format!("\u{feff}{text}"))),
        ("several_data_lines", Answer::with(data(token().replacen(',', ",\ndata: ", 2)))),
        ("no_done", Answer::changed(|frames| frames.truncate(4))),
        ("no_blank_line_at_the_end", Answer::changed(|frames| frames[4].truncate(DONE.len() - 1))),
        ("bytes_after_done", Answer::changed(|frames| frames.push(data(token())))),
        ("events_after_done_without_end", Answer::steps({
            let frames = [STREAM_HEAD.as_bytes(), &chunks(&plain_frames())].concat();
            vec![Step::Send(frames), Step::Repeat(chunk(&data(token()).repeat(400)))]
        })),
        ("done_twice", Answer::changed(|frames| frames.push(DONE.to_vec()))),
        ("error_event", after_one(&format!("data: {error}\n\n"))),
        ("error_event_of_tgi", after_one("event: error\ndata: {\"error\":\"overloaded\",\"error_type\":\"overloaded\"}\n\n")),
        ("no_json", Answer::with(data("nonsense"))),
        ("not_utf8", Answer::changed(|frames| {
            let at = position(&frames[0], WORD.as_bytes());
            frames[0][at + 1] = 0xff;
        })),
        ("event_of_10_mb", Answer::with(data(token().replace(WORD, &long)))),
        ("nested_brackets", Answer::with(odd(r#""choices":["#, &format!(r#""choices":[{nested},"#)))),
        ("event_without_end", Answer::then(1, &[Step::Send(chunk(b"data: ")), Step::Repeat(chunk(b"x"))])),
        ("lines_without_end", Answer::then(1, &[Step::Repeat(chunk(b"\n"))])),
        ("events_without_end", Answer::steps(vec![Step::Send(STREAM_HEAD.into()), Step::Repeat(chunk(&data(token())))])),
    ]
}

/// Events whose JSON is unusual.
#[rustfmt::skip]
fn values() -> Vec<(&'static str, Answer)> {
    let event = |value: &str| Answer::with(data(value));
    let choices = |value: &str| event(&format!(r#"{{"id":"mock","object":"x","created":1,"model":"mock"{value}}}"#));
    let delta = |value: &str| format!(r#"{{"id":"mock","choices":[{{"index":0,"delta":{value},"finish_reason":null}}]}}"#);
    let counts = |output: &str| format!(r#"{{"prompt_tokens":4,"total_tokens":7,"completion_tokens":{output}}}"#);
    let counted = |outputs: [u64; 3]| Answer::changed(|frames| {
        for (frame, output) in frames.iter_mut().zip(outputs) {
            *frame = data(json(Content::Words(1), None, Some(Usage { prompt: 4, output })));
        }
    });
    vec![
        ("usage_in_the_last_content_event", Answer::changed(|frames| {
            frames[2] = data(json(Content::Words(1), Some("length"), Some(Usage { prompt: 4, output: 3 })));
            frames.remove(3);
        })),
        ("usage_with_every_event", counted([1, 2, 3])),
        ("usage_shrinks", counted([2, 1, 3])),
        ("usage_twice", Answer::changed(|frames| frames.insert(3, frames[3].clone()))),
        ("usage_null", Answer::usage_of("null")),
        ("usage_missing", Answer::changed(|frames| _ = frames.remove(3))),
        ("usage_wrong", Answer::usage_of(&counts("7"))),
        ("usage_negative", Answer::usage_of(&counts("-3"))),
        ("usage_2_to_63", Answer::usage_of(&counts("9223372036854775808"))),
        ("usage_2_to_32", Answer::usage_of(&counts("4294967295"))),
        ("usage_2_to_32_with_every_event", counted([1, 2, u64::from(u32::MAX)])),
        ("usage_zero", Answer::usage_of(&counts("0"))),
        ("usage_fraction", Answer::usage_of(&counts("3.5"))),
        ("usage_text", Answer::usage_of(&counts(r#""3""#))),
        ("keys_twice", Answer::usage_of(&counts("3").replace('{', r#"{"completion_tokens":99,"#))),
        ("nan", Answer::with(odd(r#""logprobs":null"#, r#""logprobs":NaN"#))),
        ("choices_absent", choices("")),
        ("choices_empty", choices(r#","choices":[]"#)),
        ("choices_null", choices(r#","choices":null"#)),
        ("two_choices", Answer::with({
            let one = token();
            let choice = &one[position(one.as_bytes(), br#"{"index""#)..=one.rfind("}]").expect("a choice ends")];
            data(one.replacen(choice, &format!("{choice},{}", choice.replacen(":0", ":1", 1)), 1))
        })),
        ("reasoning_of_vllm", event(&delta(r#"{"reasoning":" word"}"#))),
        ("reasoning_of_sglang", event(&delta(r#"{"role":null,"content":null,"reasoning_content":" word","tool_calls":null}"#))),
        ("tool_call_fragments", Answer::changed(|frames| {
            frames[0] = data(delta(r#"{"tool_calls":[{"index":0,"id":"call_1","type":"function","function":{"name":"f","arguments":""}}]}"#));
            frames[1] = data(delta(r#"{"tool_calls":[{"index":0,"function":{"arguments":"{\"a\": "}}]}"#));
        })),
        ("several_tokens_per_event", Answer::changed(|frames| {
            frames[0] = data(json(Content::Words(4), None, None));
            frames[3] = data(usage(6));
        })),
        ("unknown_finish_reason", Answer::with(odd(r#""finish_reason":null"#, r#""finish_reason":"matched: NaN happened""#))),
    ]
}

/// Borders of writes, chunks and events that do not agree.
#[rustfmt::skip]
fn writes() -> Vec<(&'static str, Answer)> {
    let marked = |end: &str| {
        let mut frames = plain_frames();
        let text = String::from_utf8_lossy(&frames[0]).replace(WORD, " caf\u{e9} \u{1f642}").replace('\n', end);
        frames[0] = text.into_bytes();
        [STREAM_HEAD.as_bytes(), &chunks(&frames), LAST_CHUNK].concat()
    };
    vec![
        ("all_in_one_write", Answer::after(&[])),
        ("all_in_one_chunk", Answer::frames(&[plain_frames().concat()])),
        ("a_chunk_for_every_byte", Answer::steps({
            let body: Vec<u8> = plain_frames().concat().iter().flat_map(|byte| chunk(&[*byte])).collect();
            vec![Step::Send([STREAM_HEAD.as_bytes(), &body, LAST_CHUNK].concat())]
        })),
        ("split_at_every_byte", Answer::split_every(1)),
        ("split_every_7_bytes", Answer::split_every(7)),
        ("split_in_utf8", Answer::steps({
            let wire = marked("\n");
            let (short, long) = (position(&wire, "\u{e9}".as_bytes()), position(&wire, "\u{1f642}".as_bytes()));
            split(&wire, &[short + 1, long + 1, long + 2, long + 3])
        })),
        ("split_in_crlf", Answer::steps({
            let wire = marked("\r\n");
            let end = position(&wire, b"}\r\n\r\n");
            split(&wire, &[end + 2, end + 3, end + 4])
        })),
        ("split_in_chunk_size", Answer::steps({
            let wire = plain_wire();
            let size = STREAM_HEAD.len();
            let (line_end, last) = (size + position(&wire[size..], b"\r\n"), wire.len() - LAST_CHUNK.len());
            split(&wire, &[size + 1, line_end, line_end + 1, last + 1, last + 2, last + 4])
        })),
        ("chunk_extensions_and_trailers", Answer::steps({
            let body = String::from_utf8_lossy(&chunk(&plain_frames().concat())).replacen("\r\n", ";name=\"value\"\r\n", 1);
            vec![Step::Send([STREAM_HEAD.as_bytes(), body.as_bytes(), b"0\r\nx-checksum: 1\r\n\r\n"].concat())]
        })),
    ]
}

/// Heads, and what frames the body.
#[rustfmt::skip]
fn heads() -> Vec<(&'static str, Answer)> {
    let with_field = |field: String| Answer::steps({
        let wire = String::from_utf8_lossy(&plain_wire()).replacen("server: mock", &field, 1);
        vec![Step::Send(wire.into_bytes())]
    });
    let interim = |head: &str| Answer::after(&[Step::Send(head.into()), Step::Wait(APART)]);
    let endless = |start: &str, again: &str| Answer::steps(vec![Step::Send(start.into()), Step::Repeat(again.into())]);
    vec![
        ("late_headers", Answer::after(&[Step::Wait(AGES)])),
        ("slow_headers", Answer::steps(vec![Step::Pieces { bytes: STREAM_HEAD.into(), size: 1, pause: Duration::from_secs(1) }])),
        ("continue_100", interim("HTTP/1.1 100 Continue\r\n\r\n")),
        ("early_hints_103", interim("HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n")),
        ("interim_without_end", endless("", &"HTTP/1.1 100 Continue\r\n\r\n".repeat(2000))),
        ("content_length", Answer::unchunked(|body| format!("content-length: {}\r\n", body.len()), &[])),
        ("content_length_too_long", Answer::content_length_off_by(10)),
        ("content_length_too_short", Answer::content_length_off_by(-10)),
        ("content_length_and_chunks", with_field("content-length: 7".to_owned())),
        ("http_1_0_until_close", Answer::steps({
            let head = STREAM_HEAD.replace("HTTP/1.1", "HTTP/1.0").replace("transfer-encoding: chunked\r\n", "");
            vec![Step::Send([head.as_bytes(), &plain_frames().concat()].concat()), Step::Close]
        })),
        ("until_close", Answer::unchunked(|_| String::new(), &[Step::Close])),
        ("gzip", Answer::compressed("gzip")),
        ("deflate", Answer::compressed("deflate")),
        ("header_of_64_kb", with_field(format!("x-long: {}", "a".repeat(LONG_HEADER_BYTES)))),
        ("1000_headers", with_field((0..1000).map(|n| format!("x-{n}: 1")).collect::<Vec<_>>().join("\r\n"))),
        ("headers_without_end", endless("HTTP/1.1 200 OK\r\n", "x: y\r\n")),
        ("not_http", Answer::bytes("SSH-2.0-OpenSSH_9.2\r\n\r\n")),
        ("chunk_size_not_hex", Answer::bytes(format!("{STREAM_HEAD}xyz\r\ndata: 1\n\n\r\n"))),
        ("chunk_size_too_large", Answer::bytes(format!("{STREAM_HEAD}fffffffffffffffff\r\ndata: 1\n\n\r\n"))),
        ("chunk_size_without_end", endless(STREAM_HEAD, "0")),
        ("chunk_longer_than_it_says", Answer::bytes(format!("{STREAM_HEAD}2\r\ndata: 1\n\n\r\n"))),
    ]
}

/// Statuses other than a stream.
#[rustfmt::skip]
fn statuses() -> Vec<(&'static str, Answer)> {
    let elsewhere = "http://other-host.invalid/v1/completions";
    let html = "<html><body>no</body></html>";
    let late = |after: &str| Answer::status(429, "application/json", &format!("retry-after: {after}\r\n"), r#"{"error":"slow down"}"#);
    let invalid = r#"{"detail":[{"loc":["body","prompt"],"msg":"field required"}]}"#;
    let error = r#"{"object":"error","message":"no","type":"BadRequestError","code":400}"#;
    vec![
        ("no_content_204", Answer::bytes("HTTP/1.1 204 No Content\r\n\r\n")),
        ("redirect_301", Answer::redirect(301, elsewhere)),
        ("redirect_307", Answer::redirect(307, elsewhere)),
        ("unauthorized_401", Answer::error(401, "Unauthorized", "no key")),
        ("no_such_model_404", Answer::error(404, "NotFoundError", "The model does not exist.")),
        ("too_large_413", Answer::error(413, "BadRequestError", "body too large")),
        ("unprocessable_422", Answer::status(422, "application/json", "", invalid)),
        ("too_many_429_seconds", late("2")),
        ("too_many_429_date", late("Fri, 01 Jan 2100 00:00:00 GMT")),
        ("html_500", Answer::status(500, "text/html", "", html)),
        ("endless_500", Answer::steps(vec![Step::Send(b"HTTP/1.1 500 No\r\n\r\n".to_vec()), Step::Repeat(vec![b'x'; 1 << 16])])),
        ("unavailable_503_then_fine", Answer::status(503, "text/plain", "", "loading").once(Answer::plain())),
        ("json_error_200", Answer::status(200, "application/json", "", error)),
        ("html_200", Answer::status(200, "text/html", "", html)),
        ("empty_stream", Answer::frames(&[])),
        ("only_done", Answer::frames(&[DONE.to_vec()])),
    ]
}

/// Connections that end, or do not.
#[rustfmt::skip]
fn ends() -> Vec<(&'static str, Answer)> {
    let in_headers = |end: &[Step]| Answer::steps([&[Step::Send(STREAM_HEAD[..30].into()), Step::Wait(APART)], end].concat());
    let half_an_event = Step::Send(b"20\r\ndata: {\"ch".to_vec());
    vec![
        ("reset_at_once", Answer::steps(vec![Step::Reset])),
        ("reset_in_headers", in_headers(&[Step::Reset])),
        ("reset_between_events", Answer::then(2, &[Step::Wait(APART), Step::Reset])),
        ("reset_in_an_event", Answer::then(2, &[half_an_event.clone(), Step::Wait(APART), Step::Reset])),
        ("reset_after_usage", Answer::steps({
            let frames = chunks(&plain_frames()[..4]);
            vec![Step::Send([STREAM_HEAD.as_bytes(), &frames].concat()), Step::Wait(APART), Step::Reset]
        })),
        ("close_at_once", Answer::steps(vec![Step::Close])),
        ("close_in_headers", in_headers(&[Step::Close])),
        ("close_after_headers", Answer::then(0, &[Step::Close])),
        ("close_between_events", Answer::then(2, &[Step::Close])),
        ("close_in_an_event", Answer::then(2, &[half_an_event, Step::Close])),
        ("reset_after_done", Answer::cut(&[Step::Wait(APART), Step::Reset])),
        ("no_chunk_after_done", Answer::cut(&[Step::Send(b"nonsense\r\n".to_vec())])),
        ("close_without_last_chunk", Answer::cut(&[Step::Close])),
        ("close_after_answer", Answer::before(&[Step::Close])),
        ("close_when_idle", Answer::before(&[Step::Wait(APART), Step::Close])),
        ("close_when_reused", Answer::ended_when_reused(Step::Close)),
        ("reset_when_reused", Answer::ended_when_reused(Step::Reset)),
        ("silence_at_once", Answer::steps(vec![Step::Silence])),
        ("silence_after_headers", Answer::then(0, &[Step::Silence])),
        ("silence_between_events", Answer::then(2, &[Step::Silence])),
        ("silence_after_done", Answer::cut(&[Step::Silence])),
    ]
}
