//! One event of an answer, decoded: text, reasoning, tool calls, token ids, usage, the reason of the end, an error.
//!
//! Enters: the name and the data of an event. Leaves: a [`Delta`] that borrows from the data, the end of the stream, or the server's error.
//! What an event means in its stream is left to [`crate::tokens`].
//!
//! One decoder reads all dialects, since none of their names collide: the OpenAI shapes (vLLM, SGLang, TensorRT-LLM, llama.cpp), the
//! token events of TGI, and the native events of SGLang and llama.cpp. Fields that are not known are skipped without looking inside.
//! What a measurement rests on is strict: text that is not text makes the event malformed. Numbers are lenient: one that cannot
//! be used is reported as that.

mod values;

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

pub use values::Number;
use values::{Length, Lenient, Scalar, Text};

/// What an event says.
#[derive(Debug, Clone, PartialEq)]
pub enum Decoded<'a> {
    /// `[DONE]`: nothing follows.
    Done,
    Delta(Delta<'a>),
    /// The server gave up in the middle of its answer. Its words are untrusted text: cleaned where they are shown.
    Error(Cow<'a, str>),
}

/// What one event adds to the answer. Everything is empty or absent in an event that only keeps the connection open.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Delta<'a> {
    pub text: Cow<'a, str>,
    pub reasoning: Cow<'a, str>,
    /// Names and arguments of fragments of tool calls, one after the other.
    pub tool_calls: Cow<'a, str>,
    /// Ids of tokens in this event; absent where the event has no list of them.
    pub ids: Option<u32>,
    /// Entries of log probabilities in this event, likewise.
    pub logprobs: Option<u32>,
    pub usage: Usage,
    /// Output tokens so far, of an event that could hold some: its usage, else its timings. Where the events before it had none it may
    /// merely be the total.
    pub running: Option<u32>,
    /// Text and ids are those of the whole answer so far (SGLang's `/generate`).
    pub cumulative: bool,
    pub finish: Option<Finish>,
    pub timings: Timings,
}

/// The counts that a server reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Usage {
    /// None, or null, as OpenAI sends it in all events but the last.
    #[default]
    Absent,
    /// Something else than counts: a text, a negative number, 2^63.
    Unusable,
    Known(Counts),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    pub output: u32,
    pub prompt: Option<u32>,
    /// Prompt tokens that came from the prefix cache. Absent where the server does not report them.
    pub cached: Option<u32>,
}

/// Why the answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// The end-of-sequence token, or a stop string.
    Stop,
    Length,
    ToolCalls,
    ContentFilter,
    Abort,
    Error,
    /// A reason of this server's own, as vLLM's `repetition`.
    Other,
}

/// What llama.cpp counts beside its own times of a request.
#[derive(Debug, Clone, Copy, PartialEq, Default, Deserialize)]
#[serde(default)]
pub struct Timings {
    #[serde(rename = "cache_n")]
    pub cached: Number,
    #[serde(rename = "predicted_n")]
    pub output: Number,
}

/// An event that is not JSON of a known shape, or not UTF-8. Its message may quote the server: cleaned where it is shown.
#[derive(Debug, thiserror::Error)]
pub enum Malformed {
    #[error("an event of the stream is not a JSON object")]
    NotAnObject,
    #[error("an event of the stream cannot be read: {0}")]
    Json(#[from] serde_json::Error),
}

/// Decodes an event of the given name, mostly empty.
///
/// # Errors
/// [`Malformed`].
pub fn decode<'a>(name: &[u8], data: &'a [u8]) -> Result<Decoded<'a>, Malformed> {
    let data = data.trim_ascii();
    if data == b"[DONE]" {
        return Ok(Decoded::Done);
    }
    if data.is_empty() {
        return Ok(Decoded::Delta(Delta::default()));
    }
    let is_error = name == b"error";
    // Without this a list would be read as the values of the fields in order.
    let raw = if data.first() == Some(&b'{') {
        serde_json::from_slice::<Raw<'a>>(data).map_err(Malformed::Json)
    } else {
        Err(Malformed::NotAnObject)
    };
    match raw {
        Ok(raw) => Ok(raw.decoded(is_error)),
        // An event of this name is an error whatever it says.
        Err(_) if is_error => Ok(Decoded::Error(String::from_utf8_lossy(data))),
        Err(error) => Err(error),
    }
}

impl Finish {
    fn named(name: &str) -> Self {
        match name {
            "stop" | "eos_token" | "stop_sequence" | "eos" | "word" => Self::Stop,
            "length" | "limit" => Self::Length,
            "tool_calls" | "function_call" => Self::ToolCalls,
            "content_filter" => Self::ContentFilter,
            "abort" => Self::Abort,
            "error" => Self::Error,
            _ => Self::Other,
        }
    }
}

/// The stop reason of an SGLang server whose logits were no numbers. It calls it a success.
const NOT_A_NUMBER: &str = "NaN happened";

/// All fields of all dialects. Read by hand: this is done for every event of every answer, and a derived reader moves twice as much.
#[derive(Default)]
struct Raw<'a> {
    choices: Option<Choices<'a>>,
    usage: Usage,
    timings: Timings,
    /// `object` is `error`.
    is_error: bool,
    error: Scalar<'a>,
    message: Scalar<'a>,
    native: Native<'a>,
}

/// An event of a server's own API.
#[derive(Default)]
struct Native<'a> {
    // SGLang's `/generate`.
    text: Text<'a>,
    meta: Option<Meta<'a>>,
    // llama.cpp's `/completion`.
    content: Text<'a>,
    tokens: Length,
    is_stopped: bool,
    stop_type: Option<Finish>,
    predicted: Number,
    evaluated: Number,
    // TGI's `/generate_stream`.
    token: Option<Token<'a>>,
    details: Option<Details<'a>>,
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum Field {
    Choices,
    Usage,
    Timings,
    Object,
    Error,
    Message,
    Text,
    MetaInfo,
    Content,
    Tokens,
    Stop,
    StopType,
    TokensPredicted,
    TokensEvaluated,
    Token,
    Details,
    #[serde(other)]
    Other,
}

impl<'de: 'a, 'a> Deserialize<'de> for Raw<'a> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct RawVisitor<'a>(PhantomData<&'a ()>);
        impl<'de: 'a, 'a> Visitor<'de> for RawVisitor<'a> {
            type Value = Raw<'a>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an event")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Raw<'a>, A::Error> {
                let mut raw = Raw::default();
                while let Some(field) = map.next_key()? {
                    match field {
                        Field::Choices if raw.choices.is_some() => {
                            return Err(A::Error::duplicate_field("choices"));
                        }
                        Field::Choices => raw.choices = Some(map.next_value()?),
                        Field::Usage => raw.usage = map.next_value::<Lenient<RawUsage>>()?.into(),
                        Field::Timings => {
                            raw.timings = map.next_value::<Lenient<Timings>>()?.map().unwrap_or_default();
                        }
                        Field::Object => raw.is_error = map.next_value::<Scalar<'a>>()?.is("error"),
                        Field::Other => drop(map.next_value::<IgnoredAny>()?),
                        Field::Error => raw.error = map.next_value()?,
                        Field::Message => raw.message = map.next_value()?,
                        native => raw.native.read(&native, &mut map)?,
                    }
                }
                Ok(raw)
            }
        }
        from.deserialize_map(RawVisitor(PhantomData))
    }
}

impl<'a> Native<'a> {
    fn read<'de: 'a, A: MapAccess<'de>>(&mut self, field: &Field, map: &mut A) -> Result<(), A::Error> {
        match field {
            Field::Text => self.text = map.next_value()?,
            Field::MetaInfo => self.meta = map.next_value::<Lenient<Meta<'a>>>()?.map(),
            Field::Content => self.content = map.next_value()?,
            Field::Tokens => self.tokens = map.next_value()?,
            Field::Stop => self.is_stopped = map.next_value::<Scalar<'a>>()?.is_true(),
            Field::StopType => self.stop_type = map.next_value::<Scalar<'a>>()?.finish(),
            Field::TokensPredicted => self.predicted = map.next_value()?,
            Field::TokensEvaluated => self.evaluated = map.next_value()?,
            Field::Token => self.token = map.next_value::<Lenient<Token<'a>>>()?.map(),
            Field::Details => self.details = map.next_value::<Lenient<Details<'a>>>()?.map(),
            _ => drop(map.next_value::<IgnoredAny>()?),
        }
        Ok(())
    }
}

#[derive(Default)]
struct Choice<'a> {
    text: Option<Text<'a>>,
    delta: Option<Message<'a>>,
    token_ids: Length,
    logprobs: Option<Logprobs>,
    finish: Option<Finish>,
    /// Its logits were no numbers.
    is_nan: bool,
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum ChoiceField {
    Text,
    Delta,
    TokenIds,
    Logprobs,
    FinishReason,
    MatchedStop,
    #[serde(other)]
    Other,
}

impl<'de: 'a, 'a> Deserialize<'de> for Choice<'a> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct ChoiceVisitor<'a>(PhantomData<&'a ()>);
        impl<'de: 'a, 'a> Visitor<'de> for ChoiceVisitor<'a> {
            type Value = Choice<'a>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a choice")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Choice<'a>, A::Error> {
                let mut choice = Choice::default();
                while let Some(field) = map.next_key()? {
                    match field {
                        ChoiceField::Text if choice.text.is_some() => {
                            return Err(A::Error::duplicate_field("text"));
                        }
                        ChoiceField::Delta if choice.delta.is_some() => {
                            return Err(A::Error::duplicate_field("delta"));
                        }
                        ChoiceField::Text => choice.text = Some(map.next_value()?),
                        ChoiceField::Delta => choice.delta = map.next_value()?,
                        ChoiceField::TokenIds => choice.token_ids = map.next_value()?,
                        ChoiceField::Logprobs => choice.logprobs = map.next_value()?,
                        ChoiceField::FinishReason => choice.finish = map.next_value::<Scalar<'a>>()?.finish(),
                        ChoiceField::MatchedStop => {
                            choice.is_nan = map.next_value::<Scalar<'a>>()?.is(NOT_A_NUMBER);
                        }
                        ChoiceField::Other => drop(map.next_value::<IgnoredAny>()?),
                    }
                }
                Ok(choice)
            }
        }
        from.deserialize_map(ChoiceVisitor(PhantomData))
    }
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Message<'a> {
    #[serde(borrow)]
    content: Text<'a>,
    #[serde(borrow)]
    reasoning: Text<'a>,
    #[serde(borrow)]
    reasoning_content: Text<'a>,
    #[serde(borrow)]
    tool_calls: ToolCalls<'a>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct ToolCall<'a> {
    #[serde(borrow)]
    function: Option<Function<'a>>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Function<'a> {
    #[serde(borrow)]
    name: Text<'a>,
    #[serde(borrow)]
    arguments: Text<'a>,
}

/// `tokens` in completions, `content` in chats and in both of llama.cpp.
#[derive(Deserialize, Default)]
#[serde(default)]
struct Logprobs {
    tokens: Length,
    content: Length,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Meta<'a> {
    #[serde(borrow)]
    finish_reason: Scalar<'a>,
    completion_tokens: Number,
    prompt_tokens: Number,
    cached_tokens: Number,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Token<'a> {
    #[serde(borrow)]
    text: Text<'a>,
    #[serde(borrow)]
    special: Scalar<'a>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Details<'a> {
    #[serde(borrow)]
    finish_reason: Scalar<'a>,
    generated_tokens: Number,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct RawUsage {
    completion_tokens: Number,
    prompt_tokens: Number,
    prompt_tokens_details: Lenient<PromptDetails>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct PromptDetails {
    cached_tokens: Number,
}

impl<'a> Raw<'a> {
    fn decoded(self, is_error: bool) -> Decoded<'a> {
        let words = match self.error {
            Scalar::Text(words) => Some(words),
            Scalar::Map(fields) => Some(fields.message.or(fields.detail).unwrap_or_default()),
            _ if is_error || self.is_error => Some(self.message.text().unwrap_or_default()),
            _ => None,
        };
        if let Some(words) = words {
            return Decoded::Error(words);
        }
        // Only an event with a choice can hold tokens.
        let (mut delta, has_choice) = match self.choices.and_then(|choices| choices.0) {
            Some(first) if first.is_nan => return Decoded::Error(NOT_A_NUMBER.into()),
            Some(first) => (openai(first), true),
            None => self.native.delta(),
        };
        if self.usage != Usage::Absent {
            delta.usage = self.usage;
        }
        delta.timings = self.timings;
        if delta.running.is_none() && has_choice {
            delta.running = match self.usage {
                Usage::Known(counts) => Some(counts.output),
                Usage::Unusable => None,
                Usage::Absent => self.timings.output.0,
            };
        }
        Decoded::Delta(delta)
    }
}

impl<'a> Native<'a> {
    /// What it adds, and whether it stands for a choice.
    fn delta(self) -> (Delta<'a>, bool) {
        if let Some(token) = self.token {
            return (tgi(token, self.details), true);
        }
        if let Some(meta) = self.meta {
            return (sglang(self.text, &meta), true);
        }
        let running = self.predicted.0;
        // Events without anything come here too.
        let is_any =
            running.is_some() || self.is_stopped || self.tokens.0.is_some() || !self.content.0.is_empty();
        let delta = Delta {
            text: self.content.0,
            // The list is there, and empty, where the ids were not asked for.
            ids: self.tokens.0.filter(|&ids| ids > 0),
            usage: running.map_or(Usage::Absent, |output| {
                Usage::Known(Counts { output, prompt: self.evaluated.0, cached: None })
            }),
            running,
            finish: self.is_stopped.then(|| self.stop_type.unwrap_or(Finish::Stop)),
            ..Delta::default()
        };
        (delta, is_any)
    }
}

fn openai(choice: Choice<'_>) -> Delta<'_> {
    let message = choice.delta.unwrap_or_default();
    let mut text = choice.text.unwrap_or_default().0;
    append(&mut text, message.content.0);
    let reasoning = message.reasoning.0;
    // A few servers send the same piece under both names.
    let reasoning = if reasoning.is_empty() { message.reasoning_content.0 } else { reasoning };
    Delta {
        text,
        reasoning,
        tool_calls: message.tool_calls.0,
        ids: choice.token_ids.0,
        logprobs: choice.logprobs.and_then(|logprobs| logprobs.tokens.0.or(logprobs.content.0)),
        finish: choice.finish,
        ..Delta::default()
    }
}

fn tgi<'a>(token: Token<'a>, details: Option<Details<'a>>) -> Delta<'a> {
    // A special token, as the end of the sequence, is a token without text.
    let text = if token.special.is_true() { Cow::default() } else { token.text.0 };
    let mut delta = Delta { text, ids: Some(1), ..Delta::default() };
    if let Some(details) = details {
        delta.finish = details.finish_reason.finish();
        delta.usage = usage(details.generated_tokens, None, None);
    }
    delta
}

fn sglang<'a>(text: Text<'a>, meta: &Meta<'a>) -> Delta<'a> {
    Delta {
        text: text.0,
        usage: usage(meta.completion_tokens, meta.prompt_tokens.0, meta.cached_tokens.0),
        running: meta.completion_tokens.0,
        cumulative: true,
        finish: meta.finish_reason.finish(),
        ..Delta::default()
    }
}

/// A usage with this number of output tokens.
fn usage(output: Number, prompt: Option<u32>, cached: Option<u32>) -> Usage {
    output.0.map_or(Usage::Unusable, |output| Usage::Known(Counts { output, prompt, cached }))
}

fn append<'a>(to: &mut Cow<'a, str>, more: Cow<'a, str>) {
    if to.is_empty() {
        *to = more;
    } else if !more.is_empty() {
        to.to_mut().push_str(&more);
    }
}

/// The first of `choices`: one answer is asked for.
struct Choices<'a>(Option<Choice<'a>>);

impl<'de: 'a, 'a> Deserialize<'de> for Choices<'a> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct ChoicesVisitor<'a>(PhantomData<&'a ()>);
        impl<'de: 'a, 'a> Visitor<'de> for ChoicesVisitor<'a> {
            type Value = Choices<'a>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of choices or null")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Choices<'a>, A::Error> {
                let first = list.next_element()?;
                while list.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Choices(first))
            }
            fn visit_unit<E>(self) -> Result<Choices<'a>, E> {
                Ok(Choices(None))
            }
        }
        from.deserialize_any(ChoicesVisitor(PhantomData))
    }
}

/// Fragments of tool calls, joined.
#[derive(Default)]
struct ToolCalls<'a>(Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for ToolCalls<'a> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct ToolCallsVisitor<'a>(PhantomData<&'a ()>);
        impl<'de: 'a, 'a> Visitor<'de> for ToolCallsVisitor<'a> {
            type Value = ToolCalls<'a>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of tool calls or null")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<ToolCalls<'a>, A::Error> {
                let mut text = Cow::default();
                while let Some(call) = list.next_element::<ToolCall<'a>>()? {
                    let function = call.function.unwrap_or_default();
                    append(&mut text, function.name.0);
                    append(&mut text, function.arguments.0);
                }
                Ok(ToolCalls(text))
            }
            fn visit_unit<E>(self) -> Result<ToolCalls<'a>, E> {
                Ok(ToolCalls::default())
            }
        }
        from.deserialize_any(ToolCallsVisitor(PhantomData))
    }
}

impl From<Lenient<RawUsage>> for Usage {
    fn from(raw: Lenient<RawUsage>) -> Self {
        match raw {
            Lenient::Absent => Self::Absent,
            Lenient::Wrong => Self::Unusable,
            Lenient::Map(raw) => {
                let cached = raw.prompt_tokens_details.map().and_then(|details| details.cached_tokens.0);
                usage(raw.completion_tokens, raw.prompt_tokens.0, cached)
            }
        }
    }
}

#[cfg(test)]
mod tests;
