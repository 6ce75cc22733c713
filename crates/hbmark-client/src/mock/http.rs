//! Requests out of bytes, and answers that are not streams.
//!
//! Enters: what a client sent. Leaves: a request, or the status that refuses it. Sizes are bounded: a test may point anything here.

use memchr::memmem;
use serde::Deserialize;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

const MOST_HEAD_BYTES: usize = 64 << 10;
const MOST_BODY_BYTES: usize = 64 << 20;
const MOST_HEADERS: usize = 128;

/// A request being read.
#[derive(Debug, Default)]
pub(super) struct Reader {
    pub(super) input: Vec<u8>,
    /// How much was searched for the end of the head.
    searched: usize,
    head: Option<Head>,
}

#[derive(Debug, Clone)]
struct Head {
    bytes: usize,
    body_bytes: usize,
    method: String,
    target: String,
    id: Option<String>,
    keep_alive: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) head: Vec<u8>,
    pub(super) body: Vec<u8>,
    pub(super) method: String,
    pub(super) target: String,
    pub(super) id: Option<String>,
    pub(super) keep_alive: bool,
}

impl Reader {
    /// The next whole request, None when bytes are missing.
    ///
    /// # Errors
    /// The status to refuse it with.
    pub(super) fn take(&mut self) -> Result<Option<Request>, u16> {
        if self.head.is_none() {
            let from = self.searched.saturating_sub(3);
            let Some(end) = memmem::find(&self.input[from..], b"\r\n\r\n") else {
                self.searched = self.input.len();
                return if self.input.len() > MOST_HEAD_BYTES { Err(431) } else { Ok(None) };
            };
            self.head = Some(parse_head(&self.input[..from + end + 4])?);
        }
        let whole = self.head.as_ref().map_or(0, |head| head.bytes + head.body_bytes);
        if self.input.len() < whole {
            return Ok(None);
        }
        let Some(head) = self.head.take() else { return Ok(None) };
        self.searched = 0;
        let rest = self.input.split_off(whole);
        let mut bytes = std::mem::replace(&mut self.input, rest);
        let body = bytes.split_off(head.bytes);
        let Head { method, target, id, keep_alive, .. } = head;
        Ok(Some(Request { head: bytes, body, method, target, id, keep_alive }))
    }
}

fn parse_head(bytes: &[u8]) -> Result<Head, u16> {
    let mut fields = [httparse::EMPTY_HEADER; MOST_HEADERS];
    let mut parsed = httparse::Request::new(&mut fields);
    if !matches!(parsed.parse(bytes), Ok(httparse::Status::Complete(_))) {
        return Err(400);
    }
    let value = |name: &str| {
        let field = parsed.headers.iter().find(|field| field.name.eq_ignore_ascii_case(name))?;
        Some(String::from_utf8_lossy(field.value).trim().to_owned())
    };
    if value("transfer-encoding").is_some() {
        return Err(411);
    }
    let body_bytes =
        value("content-length").map_or(Ok(0), |length| length.parse::<usize>().map_err(|_| 400_u16))?;
    if body_bytes > MOST_BODY_BYTES {
        return Err(413);
    }
    let connection = value("connection").unwrap_or_default().to_ascii_lowercase();
    Ok(Head {
        bytes: bytes.len(),
        body_bytes,
        method: parsed.method.unwrap_or_default().to_owned(),
        target: parsed.path.unwrap_or_default().to_owned(),
        id: value("x-request-id"),
        keep_alive: if parsed.version == Some(1) {
            connection != "close"
        } else {
            connection == "keep-alive"
        },
    })
}

/// What a completions request asks for; everything else in it is ignored, as vLLM does.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Asked {
    pub(super) model: Option<String>,
    pub(super) prompt: Words,
    pub(super) messages: Words,
    pub(super) max_tokens: Option<u64>,
    pub(super) max_completion_tokens: Option<u64>,
    pub(super) stream_options: Option<StreamOptions>,
}

#[derive(Debug, Default, Clone, Copy, Deserialize)]
#[serde(default)]
pub(super) struct StreamOptions {
    pub(super) include_usage: bool,
    pub(super) continuous_usage_stats: bool,
}

/// How many words and token ids are in a prompt, a list of them, or messages.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Words(pub(super) u64);

impl<'de> Deserialize<'de> for Words {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(CountWords)
    }
}

struct CountWords;

impl<'de> Visitor<'de> for CountWords {
    type Value = Words;
    fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("text, token ids or messages")
    }
    fn visit_str<E: Error>(self, text: &str) -> Result<Words, E> {
        Ok(Words(text.split_whitespace().count() as u64))
    }
    fn visit_u64<E: Error>(self, _: u64) -> Result<Words, E> {
        Ok(Words(1))
    }
    fn visit_unit<E: Error>(self) -> Result<Words, E> {
        Ok(Words(0))
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Words, A::Error> {
        let mut sum = 0;
        while let Some(Words(count)) = list.next_element()? {
            sum += count;
        }
        Ok(Words(sum))
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Words, A::Error> {
        let mut sum = 0;
        while let Some(key) = map.next_key::<String>()? {
            if matches!(key.as_str(), "content" | "text") {
                sum += map.next_value::<Words>()?.0;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(Words(sum))
    }
}

/// An answer of known length; `fields` are more header lines, each with its line end.
pub(super) fn reply(status: u16, content_type: &str, fields: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!("HTTP/1.1 {status} Mock\r\nserver: mock\r\ncontent-type: {content_type}\r\n{fields}content-length: {length}\r\n\r\n{body}")
        .into_bytes()
}

/// An error in the words of vLLM.
pub(super) fn refusal(status: u16, kind: &str, message: &str) -> Vec<u8> {
    let body =
        serde_json::json!({"error": {"message": message, "type": kind, "param": null, "code": status}})
            .to_string();
    reply(status, "application/json", "", &body)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_bytes_are_lost_or_invented_and_none_make_it_panic(
            bytes in prop::collection::vec(prop_oneof![Just(b'\r'), Just(b'\n'), Just(b' '), any::<u8>()], 0..200),
            lines in "GET /[a-z]{0,9} HTTP/1.[01]\r\n(content-length: [0-9]{1,2}\r\n)?\r\n",
            size in 1usize..50,
        ) {
            let wire = [lines.as_bytes(), &bytes].concat();
            let (mut reader, mut taken) = (Reader::default(), Vec::new());
            'reading: for piece in wire.chunks(size) {
                reader.input.extend_from_slice(piece);
                loop {
                    match reader.take() {
                        Ok(Some(request)) => taken.extend([request.head, request.body].concat()),
                        Ok(None) => break,
                        Err(_) => break 'reading,
                    }
                }
            }
            taken.extend_from_slice(&reader.input);
            prop_assert!(wire.starts_with(&taken) && taken.len() >= lines.len().min(wire.len()));
        }
    }

    #[test]
    fn requests_come_out_whole_whatever_pieces_they_come_in() {
        let wire = b"POST /v1/completions HTTP/1.1\r\nX-Request-ID: a\r\ncontent-length: 4\r\n\r\nbodyGET /health HTTP/1.1\r\nConnection: close\r\n\r\n";
        for size in [1, 2, 3, 7, 64, wire.len()] {
            let (mut reader, mut requests) = (Reader::default(), Vec::new());
            for piece in wire.chunks(size) {
                reader.input.extend_from_slice(piece);
                while let Some(request) = reader.take().unwrap() {
                    requests.push(request);
                }
            }
            assert_eq!(requests.len(), 2, "pieces of {size}");
            assert_eq!((requests[0].id.as_deref(), &requests[0].body[..]), (Some("a"), &b"body"[..]));
            assert!(requests[0].head.ends_with(b"4\r\n\r\n") && requests[0].keep_alive);
            assert_eq!((requests[1].target.as_str(), requests[1].keep_alive), ("/health", false));
        }
    }

    #[test]
    fn requests_that_are_too_large_or_not_http_are_refused_before_their_bytes_are_kept() {
        let status = |bytes: &[u8]| {
            let mut reader = Reader { input: bytes.to_vec(), ..Reader::default() };
            reader.take().unwrap_err()
        };
        assert_eq!(status(b"\x16\x03\x01\r\n\r\n"), 400);
        assert_eq!(status(b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n"), 400);
        assert_eq!(status(b"POST / HTTP/1.1\r\ncontent-length: 99999999999\r\n\r\n"), 413);
        assert_eq!(status(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"), 411);
        assert_eq!(status(&vec![b'a'; MOST_HEAD_BYTES + 1]), 431);
    }

    #[test]
    fn prompts_count_words_and_ids_in_every_form_of_the_api() {
        let words = |body: &str| {
            let asked: Asked = serde_json::from_str(body).unwrap();
            asked.prompt.0 + asked.messages.0
        };
        assert_eq!(words(r#"{"prompt":"one two  three","user":"not counted"}"#), 3);
        assert_eq!(words(r#"{"prompt":[5,6,7,8]}"#), 4);
        assert_eq!(words(r#"{"prompt":["one two","three"]}"#), 3);
        assert_eq!(
            words(
                r#"{"messages":[{"role":"user","content":"one two"},{"role":"user","content":[{"type":"text","text":"three"}]}]}"#
            ),
            3
        );
    }
}
