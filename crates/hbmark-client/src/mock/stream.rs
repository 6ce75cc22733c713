//! The truthful answer: tokens at absolute deadlines, in the frames that vLLM sends.
//!
//! Enters: what a request asked for and a [`Stream`]. Leaves: the bytes of each write, and when it is due. What is the same in all
//! events of a request is prepared once; an event is copied together from that and a few numbers, in a buffer that is there already.

use std::io::Write as _;
use std::time::Duration;

use super::counters::Times;
use super::http::{Asked, StreamOptions, refusal};
use super::{Sent, nanos};

/// Every token is this word.
pub(super) const WORD: &str = " word";
pub(super) const CREATED: u64 = 1_760_000_000;
pub(super) const STREAM_HEAD: &str = "HTTP/1.1 200 OK\r\nserver: mock\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
pub(super) const DONE: &[u8] = b"data: [DONE]\n\n";
pub(super) const LAST_CHUNK: &[u8] = b"0\r\n\r\n";
/// What vLLM makes of a request for completions that names no length.
const DEFAULT_TOKENS: u64 = 16;
/// The log of a stream is reserved before its first token.
const MOST_TOKENS: u64 = 1 << 20;

/// Tokens at set times. All times count from the last byte of the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    /// TTFT.
    pub first_token: Duration,
    /// ITL: an event of n tokens comes n of these after the one before it.
    pub token_gap: Duration,
    /// 0 counts as 1, here and below.
    pub tokens_per_event: u32,
    /// Events wait for each other and go out in one write, when the last of them is due.
    pub events_per_write: u32,
}

impl Default for Stream {
    /// As vLLM does: 50 ms to the first token, 10 ms between tokens.
    fn default() -> Self {
        Self {
            first_token: Duration::from_millis(50),
            token_gap: Duration::from_millis(10),
            tokens_per_event: 1,
            events_per_write: 1,
        }
    }
}

/// Which of the two endpoints was asked, and so what its frames look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Api {
    Completions,
    Chat,
}

/// What an event says.
#[derive(Debug, Clone, Copy)]
pub(super) enum Content {
    Role,
    Words(u64),
    /// No choice at all, as in the event of the usage.
    None,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Usage {
    pub(super) prompt: u64,
    pub(super) output: u64,
}

impl Api {
    /// The start of every event of a request, up to its choices. `id` and `model` are JSON strings without their quotes.
    pub(super) fn prefix(self, id: &str, model: &str) -> String {
        let (kind, object) = match self {
            Self::Completions => ("cmpl", "text_completion"),
            Self::Chat => ("chatcmpl", "chat.completion.chunk"),
        };
        format!(
            r#"{{"id":"{kind}-{id}","object":"{object}","created":{CREATED},"model":"{model}","choices":["#
        )
    }

    /// The JSON of an event.
    pub(super) fn write_json(
        self,
        prefix: &[u8],
        content: Content,
        finish: Option<&str>,
        usage: Option<Usage>,
        out: &mut Vec<u8>,
    ) {
        out.extend_from_slice(prefix);
        if !matches!(content, Content::None) {
            out.extend_from_slice(match (self, content) {
                (Self::Completions, _) => br#"{"index":0,"text":""#,
                (Self::Chat, Content::Role) => br#"{"index":0,"delta":{"role":"assistant","content":""#,
                (Self::Chat, _) => br#"{"index":0,"delta":{"content":""#,
            });
            if let Content::Words(count) = content {
                (0..count).for_each(|_| out.extend_from_slice(WORD.as_bytes()));
            }
            let end: &[u8] =
                if self == Self::Chat { br#""},"logprobs":null"# } else { br#"","logprobs":null"# };
            out.extend_from_slice(end);
            // Writing to memory does not fail.
            let _ = match finish {
                Some(reason) => write!(out, r#","finish_reason":"{reason}""#),
                None => write!(out, r#","finish_reason":null"#),
            };
            out.push(b'}');
        }
        out.push(b']');
        if let Some(Usage { prompt, output }) = usage {
            let total = prompt + output;
            let _ = write!(
                out,
                r#","usage":{{"prompt_tokens":{prompt},"total_tokens":{total},"completion_tokens":{output}}}"#
            );
        } else if self == Self::Completions {
            out.extend_from_slice(br#","usage":null"#);
        }
        out.push(b'}');
    }
}

/// A piece of a chunked body.
pub(super) fn write_chunk(bytes: &[u8], out: &mut Vec<u8>) {
    // Writing to memory does not fail.
    let _ = write!(out, "{:x}\r\n", bytes.len());
    out.extend_from_slice(bytes);
    out.extend_from_slice(b"\r\n");
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Role,
    Tokens,
    /// Usage, `[DONE]` and the end of the body, right after the last token.
    Tail,
    Ended,
}

/// A stream being sent.
#[derive(Debug)]
pub(super) struct Streaming {
    stream: Stream,
    api: Api,
    /// Which request, for the log.
    pub(super) request: usize,
    prefix: Vec<u8>,
    event: Vec<u8>,
    /// Usage with every event, usage at the end.
    usage: [bool; 2],
    prompt_tokens: u64,
    tokens: u64,
    sent_tokens: u64,
    next: Part,
    /// Tokens that the batch has made, where one does.
    made: Option<u64>,
    /// Deadline of the next write.
    due_ns: u64,
    pub(super) times: Times,
}

impl Streaming {
    /// # Errors
    /// What refuses the request: more tokens than this server logs.
    pub(super) fn new(
        stream: Stream,
        api: Api,
        asked: &Asked,
        id: &str,
        request: usize,
        now: u64,
        batched: bool,
    ) -> Result<Self, Vec<u8>> {
        let tokens = asked.max_completion_tokens.or(asked.max_tokens).unwrap_or(DEFAULT_TOKENS);
        if tokens == 0 || tokens > MOST_TOKENS {
            let message = format!("max_tokens is {tokens}, but this server sends 1 to {MOST_TOKENS}");
            return Err(refusal(400, "BadRequestError", &message));
        }
        let options = asked.stream_options.unwrap_or_default();
        let StreamOptions { include_usage, continuous_usage_stats } = options;
        let model = asked.model.as_deref().unwrap_or_default();
        // As JSON strings, without their quotes.
        let [id, model] = [id, model].map(|text| serde_json::Value::from(text).to_string());
        let role = api == Api::Chat && !batched;
        let mut streaming = Self {
            stream,
            api,
            request,
            prefix: api.prefix(&id[1..id.len() - 1], &model[1..model.len() - 1]).into_bytes(),
            event: Vec::with_capacity(512 + stream.tokens_per_event as usize * 8),
            usage: [include_usage && continuous_usage_stats, include_usage],
            prompt_tokens: asked.prompt.0 + asked.messages.0,
            tokens,
            sent_tokens: 0,
            next: if role { Part::Role } else { Part::Tokens },
            made: batched.then_some(0),
            due_ns: 0,
            times: Times::new(now),
        };
        streaming.set_due();
        Ok(streaming)
    }
    /// How many entries the log will have.
    pub(super) fn events(&self) -> usize {
        usize::try_from(self.tokens.div_ceil(self.tokens_of_next_event(0))).unwrap_or(0) + 3
    }
    /// When the next write is due; None before the batch has made it, and at the end.
    pub(super) fn due_ns(&self) -> Option<u64> {
        let unmade = self.next == Part::Tokens && self.made == Some(self.sent_tokens);
        (self.next != Part::Ended && !unmade).then_some(self.due_ns)
    }
    /// The deadline of the next write, whoever set it.
    pub(super) fn write_due_ns(&self) -> u64 {
        self.due_ns
    }
    pub(super) fn ended(&self) -> bool {
        self.next == Part::Ended
    }
    pub(super) fn tokens(&self) -> [u64; 2] {
        [self.prompt_tokens, self.sent_tokens]
    }
    /// A step of the batch has ended: one more token is due. Says whether it is the last.
    pub(super) fn step(&mut self, ends_ns: u64) -> bool {
        let made = self.made.unwrap_or(0) + 1;
        (self.made, self.due_ns) = (Some(made), ends_ns);
        made >= self.tokens
    }
    fn has_all_tokens(&self) -> bool {
        self.sent_tokens == self.tokens
    }
    fn batched(&self) -> bool {
        self.made.is_some()
    }

    fn tokens_of_next_event(&self, sent: u64) -> u64 {
        let per_event = if self.batched() { 1 } else { u64::from(self.stream.tokens_per_event.max(1)) };
        per_event.min(self.tokens - sent)
    }

    fn set_due(&mut self) {
        let start = self.times.arrived;
        let due = match self.next {
            Part::Role => start,
            Part::Tokens if !self.batched() => {
                // The last token of the write that comes next, after those of the first event.
                let mut last = self.sent_tokens;
                for _ in 0..self.stream.events_per_write.max(1) {
                    last += self.tokens_of_next_event(last);
                }
                let first = self.tokens_of_next_event(0).min(last);
                let gaps = nanos(self.stream.token_gap).saturating_mul(last - first);
                start.saturating_add(nanos(self.stream.first_token)).saturating_add(gaps)
            }
            // Right after the last token.
            Part::Tokens | Part::Tail | Part::Ended => self.due_ns,
        };
        self.due_ns = due.max(self.due_ns);
    }

    /// Adds the bytes of the next write to `out` and its events to `log`, their time still to be written. Says how many events.
    pub(super) fn write_next(&mut self, out: &mut Vec<u8>, log: &mut Vec<Sent>) -> usize {
        let logged = log.len();
        match self.next {
            Part::Role => {
                self.write_event(Content::Role, None, 0, out, log);
                self.next = Part::Tokens;
            }
            Part::Tokens => {
                let events = if self.batched() { 1 } else { self.stream.events_per_write.max(1) };
                for _ in 0..events {
                    let tokens = self.tokens_of_next_event(self.sent_tokens);
                    if tokens == 0 {
                        break;
                    }
                    self.sent_tokens += tokens;
                    let finish = self.has_all_tokens().then_some("length");
                    self.write_event(Content::Words(tokens), finish, tokens, out, log);
                }
                if self.has_all_tokens() {
                    self.next = Part::Tail;
                }
            }
            Part::Tail => {
                if self.usage[1] {
                    self.write_event(Content::None, None, 0, out, log);
                }
                write_chunk(DONE, out);
                log.push(Sent { at_ns: 0, late_ns: 0, tokens: 0 });
                out.extend_from_slice(LAST_CHUNK);
                self.next = Part::Ended;
            }
            Part::Ended => {}
        }
        self.set_due();
        log.len() - logged
    }

    fn write_event(
        &mut self,
        content: Content,
        finish: Option<&str>,
        tokens: u64,
        out: &mut Vec<u8>,
        log: &mut Vec<Sent>,
    ) {
        let usage = Usage { prompt: self.prompt_tokens, output: self.sent_tokens };
        let usage = (self.usage[0] || matches!(content, Content::None)).then_some(usage);
        self.event.clear();
        self.event.extend_from_slice(b"data: ");
        self.api.write_json(&self.prefix, content, finish, usage, &mut self.event);
        self.event.extend_from_slice(b"\n\n");
        write_chunk(&self.event, out);
        log.push(Sent { at_ns: 0, late_ns: 0, tokens: u32::try_from(tokens).unwrap_or(u32::MAX) });
    }
}
