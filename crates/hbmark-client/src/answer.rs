//! The answer to one request, as it comes in: HTTP, events, tokens.
//!
//! Enters: pieces of a response, each with its time. Leaves: when which output came, and how the answer ended. Its memory is kept for the
//! next request on the same stream.

use crate::event::{self, Decoded, Delta, Finish, Usage};
use crate::exchange::Exchange;
use crate::http::Response;
use crate::sse::{Event, Events};
use crate::tokens::{Output, TokenCounter};
use hbmark_core::result::serving::Failure;

/// Largest answer.
const MAX_ANSWER: usize = 256 << 20;
/// Events with output, and tokens by any count, that an answer may have for each token it was to have, and beyond that.
const EVENTS_PER_TOKEN: usize = 16;
const MORE_EVENTS: usize = 1024;
/// What is kept of an answer that is not a stream: the server's words.
const MAX_WORDS: usize = 2 << 10;

/// What a piece led to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    More,
    /// The answer is whole.
    Done,
    Failed(Failure),
}

/// One answer.
#[derive(Debug, Default)]
pub struct Answer {
    response: Response,
    events: Events,
    counter: TokenCounter,
    /// When output came, in order, and how many tokens it was: settled at the end.
    outputs: Vec<f64>,
    tokens: Vec<u32>,
    /// What the head says that makes this no stream to read.
    refused: Option<Failure>,
    words: Vec<u8>,
    bytes: usize,
    /// More events with output than this never end, and no count is larger.
    most_events: usize,
    done: bool,
    /// Bytes came behind the end of the response.
    surplus: bool,
    head_at: Option<f64>,
    first_content: Option<f64>,
    finish: Option<Finish>,
}

impl Answer {
    /// Ready for the answer to another request, of so many tokens.
    pub fn reset(&mut self, tokens: usize) {
        self.most_events = tokens.saturating_mul(EVENTS_PER_TOKEN).saturating_add(MORE_EVENTS);
        self.response.reset();
        self.events.reset();
        self.counter = TokenCounter::default();
        self.outputs.clear();
        self.tokens.clear();
        self.words.clear();
        (self.refused, self.bytes, self.done, self.surplus) = (None, 0, false, false);
        (self.head_at, self.first_content, self.finish) = (None, None, None);
    }

    /// Nothing has come.
    pub fn is_untouched(&self) -> bool {
        self.response.is_untouched()
    }

    pub fn has_head(&self) -> bool {
        self.head_at.is_some()
    }

    pub fn has_output(&self) -> bool {
        !self.outputs.is_empty()
    }

    /// Events with output so far: what a person is shown while it runs.
    pub fn progress(&self) -> usize {
        self.outputs.len()
    }

    /// Whether another request can follow on the connection.
    pub fn keeps_connection(&self) -> bool {
        self.response.is_done() && !self.surplus && self.response.head().is_some_and(|head| head.keep_alive)
    }

    /// What the server said instead of an answer.
    pub fn words(&self) -> String {
        String::from_utf8_lossy(&self.words).into_owned()
    }

    /// The stream has ended in good order, whatever is missing of the response.
    pub fn is_over(&self) -> bool {
        self.done && !self.outputs.is_empty() && self.refused.is_none()
    }

    /// Takes what came at a moment.
    pub fn take(&mut self, bytes: &[u8], at: f64) -> Step {
        let mut rest = bytes;
        while !rest.is_empty() {
            if self.response.is_done() {
                self.surplus = true;
                break;
            }
            let (taken, piece) = match self.response.take(rest) {
                Ok(taken) => taken,
                Err(failure) => return self.broken(failure, at),
            };
            rest = &rest[taken..];
            if self.head_at.is_none() && self.response.head().is_some() {
                self.head_at = Some(at);
                self.judge_head();
            }
            if !piece.is_empty()
                && let Err(failure) = self.body(piece, at)
            {
                return self.broken(failure, at);
            }
        }
        if self.response.is_done() { self.end(at) } else { Step::More }
    }

    /// The server closed the connection.
    pub fn closed(&mut self, at: f64) -> Step {
        match self.response.closed() {
            Ok(()) => self.end(at),
            Err(failure) => self.broken(failure, at),
        }
    }

    /// The response cannot be read on: no failure behind the end of its stream.
    fn broken(&mut self, failure: Failure, at: f64) -> Step {
        if self.is_over() { self.end(at) } else { Step::Failed(failure) }
    }

    fn judge_head(&mut self) {
        let Some(head) = self.response.head() else { return };
        self.refused = match head.status {
            200..300 if head.compressed => Some(Failure::Compressed),
            200..300 if !head.is_event_stream => Some(Failure::NotAStream),
            200..300 => None,
            300..400 => Some(Failure::Redirect(head.status)),
            status => Some(Failure::Status(status)),
        };
    }

    fn body(&mut self, piece: &[u8], at: f64) -> Result<(), Failure> {
        self.bytes = self.bytes.saturating_add(piece.len());
        if self.bytes > MAX_ANSWER {
            return Err(Failure::TooLarge);
        }
        if self.refused.is_some() {
            let room = MAX_WORDS.saturating_sub(self.words.len()).min(piece.len());
            self.words.extend_from_slice(&piece[..room]);
            return Ok(());
        }
        self.events(|events, on_event| events.feed(piece, on_event), at)
    }

    /// Reads the events of a piece, or what is left at the end.
    fn events(
        &mut self,
        read: impl FnOnce(&mut Events, &mut dyn FnMut(Event<'_>) -> Result<(), Failure>) -> Result<(), Failure>,
        at: f64,
    ) -> Result<(), Failure> {
        let mut events = std::mem::take(&mut self.events);
        let read = read(&mut events, &mut |event| self.event(event, at));
        self.events = events;
        read
    }

    fn event(&mut self, event: Event<'_>, at: f64) -> Result<(), Failure> {
        // What follows the end of a stream is no part of it.
        if self.done {
            return Ok(());
        }
        match event::decode(event.name, event.data) {
            Ok(Decoded::Done) => self.done = true,
            Ok(Decoded::Error(words)) => {
                self.words.extend_from_slice(words.as_bytes());
                self.words.truncate(MAX_WORDS);
                return Err(Failure::ErrorEvent);
            }
            Ok(Decoded::Delta(delta)) => self.delta(delta, at),
            Err(_) => {
                self.words.extend_from_slice(&event.data[..event.data.len().min(MAX_WORDS)]);
                return Err(Failure::MalformedEvent);
            }
        }
        if self.outputs.len() > self.most_events {
            return Err(Failure::TooLarge);
        }
        Ok(())
    }

    fn delta(&mut self, mut delta: Delta<'_>, at: f64) {
        // Nobody makes so many: such a count is no more usable than a negative one.
        let is_most = |count: u32| count as usize <= self.most_events;
        if matches!(delta.usage, Usage::Known(counts) if !is_most(counts.output)) {
            delta.usage = Usage::Unusable;
        }
        delta.timings.output.0 = delta.timings.output.0.filter(|count| is_most(*count));
        delta.running = delta.running.filter(|count| is_most(*count));
        delta.ids = delta.ids.filter(|count| is_most(*count));
        delta.logprobs = delta.logprobs.filter(|count| is_most(*count));
        if let Some(output) = self.counter.event(&delta, &mut self.tokens) {
            self.outputs.push(at);
            if output == Output::Content {
                self.first_content.get_or_insert(at);
            }
        }
        self.finish = delta.finish.or(self.finish);
    }

    /// The response is whole.
    fn end(&mut self, at: f64) -> Step {
        if let Some(failure) = self.refused {
            return Step::Failed(failure);
        }
        if let Err(failure) = self.events(|events, on_event| events.finish(on_event), at) {
            return Step::Failed(failure);
        }
        match self.finish {
            Some(Finish::Error | Finish::Abort) => Step::Failed(Failure::ErrorEvent),
            // Neither the end of the stream nor a reason for it: it was cut off.
            None if !self.done => Step::Failed(Failure::ClosedEarly),
            _ if self.outputs.is_empty() => Step::Failed(Failure::NoOutput),
            _ => Step::Done,
        }
    }

    /// Settles how many tokens each event had, and says what was seen.
    pub fn settle(&mut self, exchange: &mut Exchange) {
        let tally = self.counter.finish(&mut self.tokens);
        let count = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
        exchange.headers = self.head_at;
        exchange.first_token = self.outputs.first().copied();
        exchange.first_content = self.first_content;
        exchange.last_token = self.outputs.last().copied();
        exchange.finish = self.finish;
        exchange.events = count(self.outputs.len() as u64);
        exchange.evidence = (!self.outputs.is_empty()).then_some(tally.evidence);
        exchange.output_tokens = count(tally.output_tokens);
        exchange.prompt_tokens = tally.prompt_tokens;
        exchange.cached_tokens = tally.cached_tokens;
        exchange.disagrees = tally.disagrees() || tally.conflict;
    }

    /// Every event with output: when it came, and its tokens once they are settled.
    pub fn outputs(&self) -> impl Iterator<Item = (f64, u32)> {
        self.outputs.iter().copied().zip(self.tokens.iter().copied())
    }
}
