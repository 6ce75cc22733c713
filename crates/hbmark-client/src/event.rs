//! One event of an answer, decoded: text, reasoning, tool calls, token ids, usage, the reason of the end, an error.
//!
//! Enters: the name and the data of an event. Leaves: a [`Delta`] that borrows from the data, the end of the stream, or the server's error.
//! What an event means in its stream is left to [`crate::tokens`].
//!
//! One decoder reads all dialects, since none of their names collide: the OpenAI shapes (vLLM, SGLang, TensorRT-LLM, llama.cpp), the
//! token events of TGI, and the native events of SGLang and llama.cpp. Fields that are not known are skipped without looking inside.
//! What a measurement rests on is strict: text that is not text makes the event malformed. Numbers are lenient: one that cannot
//! be used is reported as that.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// What an event says.
#[derive(Debug, Clone, PartialEq)]
pub enum Decoded<'a> {
    /// `[DONE]`: nothing follows.
    Done,
    Delta(Delta<'a>),
    /// The server gave up in the middle of its answer.
    Error(ServerError<'a>),
}

/// What one event adds to the answer. Everything is empty or absent in an event that only keeps the connection open.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Delta<'a> {
    pub text: Cow<'a, str>,
    pub reasoning: Cow<'a, str>,
    /// Names and arguments of fragments of tool calls, one after the other.
    pub tool_calls: Cow<'a, str>,
    /// A role is named: the first event of a chat, mostly before there is any token.
    pub role: bool,
    /// Entries of `choices`. The first one is decoded, the others are only counted: one answer is asked for.
    pub choices: usize,
    /// The first choice is not the answer's first alternative.
    pub other_choice: bool,
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
    pub timings: Option<Timings>,
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

/// llama.cpp's own times of a request.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Timings {
    pub cached: Option<u32>,
    pub prompt_tokens: Option<u32>,
    pub prompt_ms: Option<f64>,
    pub output_tokens: Option<u32>,
    pub output_ms: Option<f64>,
}

/// An error that a server sends where an event should be. It is untrusted text: cleaned where it is shown.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ServerError<'a> {
    pub message: Cow<'a, str>,
    /// As `invalid_request_error`; empty where there is none.
    pub kind: Cow<'a, str>,
    /// Mostly an HTTP status.
    pub code: Option<u32>,
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
        Err(_) if is_error => {
            let message = String::from_utf8_lossy(data);
            Ok(Decoded::Error(ServerError { message, ..ServerError::default() }))
        }
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
    timings: Option<Timings>,
    /// `object` is `error`.
    is_error: bool,
    fault: Option<Box<Fault<'a>>>,
    native: Native<'a>,
}

/// An error, in three shapes.
#[derive(Default)]
struct Fault<'a> {
    error: Scalar<'a>,
    error_type: Scalar<'a>,
    message: Scalar<'a>,
    kind: Scalar<'a>,
    code: Scalar<'a>,
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
    ErrorType,
    Message,
    Type,
    Code,
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
                        Field::Timings => raw.timings = map.next_value::<Lenient<RawTimings>>()?.into(),
                        Field::Object => raw.is_error = map.next_value::<Scalar<'a>>()?.is("error"),
                        Field::Other => drop(map.next_value::<IgnoredAny>()?),
                        Field::Error | Field::ErrorType | Field::Message | Field::Type | Field::Code => {
                            let value = map.next_value::<Scalar<'a>>()?;
                            if !matches!(value, Scalar::Absent) {
                                raw.fault.get_or_insert_default().note(&field, value);
                            }
                        }
                        native => raw.native.read(&native, &mut map)?,
                    }
                }
                Ok(raw)
            }
        }
        from.deserialize_map(RawVisitor(PhantomData))
    }
}

impl<'a> Fault<'a> {
    fn note(&mut self, field: &Field, value: Scalar<'a>) {
        match field {
            Field::Error => self.error = value,
            Field::ErrorType => self.error_type = value,
            Field::Message => self.message = value,
            Field::Type => self.kind = value,
            _ => self.code = value,
        }
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
    index: Option<u32>,
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
    Index,
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
                        ChoiceField::Index => choice.index = map.next_value::<Number>()?.count(),
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
    role: Scalar<'a>,
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
struct RawTimings {
    cache_n: Number,
    prompt_n: Number,
    prompt_ms: Number,
    predicted_n: Number,
    predicted_ms: Number,
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
    fn decoded(mut self, is_error: bool) -> Decoded<'a> {
        let is_error = is_error || self.is_error;
        if is_error || self.fault.is_some() {
            let fault = self.fault.take().unwrap_or_default();
            if let Some(error) = fault.error(is_error) {
                return Decoded::Error(error);
            }
        }
        let delta = match self.choices {
            Some(choices) if choices.count > 0 => openai(choices),
            _ => Ok(self.native.delta()),
        };
        let mut delta = match delta {
            Ok(delta) => delta,
            Err(error) => return Decoded::Error(error),
        };
        if self.usage != Usage::Absent {
            delta.usage = self.usage;
        }
        delta.timings = self.timings;
        if delta.running.is_none() && delta.choices > 0 {
            delta.running = match self.usage {
                Usage::Known(counts) => Some(counts.output),
                Usage::Unusable => None,
                Usage::Absent => self.timings.and_then(|timings| timings.output_tokens),
            };
        }
        Decoded::Delta(delta)
    }
}

impl<'a> Fault<'a> {
    fn error(self, is_error: bool) -> Option<ServerError<'a>> {
        let code = self.code.count();
        match self.error {
            Scalar::Text(message) => {
                Some(ServerError { message, kind: self.error_type.text().unwrap_or_default(), code })
            }
            Scalar::Map(fields) => Some(ServerError {
                message: fields.message.or(fields.detail).unwrap_or_default(),
                kind: fields.kind.unwrap_or_default(),
                code: fields.code,
            }),
            _ if is_error => Some(ServerError {
                message: self.message.text().unwrap_or_default(),
                kind: self.kind.text().unwrap_or_default(),
                code,
            }),
            _ => None,
        }
    }
}

impl<'a> Native<'a> {
    fn delta(self) -> Delta<'a> {
        if let Some(token) = self.token {
            return tgi(token, self.details);
        }
        if let Some(meta) = self.meta {
            return sglang(self.text, &meta);
        }
        let running = self.predicted.count();
        // Events without anything come here too.
        let is_any =
            running.is_some() || self.is_stopped || self.tokens.0.is_some() || !self.content.0.is_empty();
        Delta {
            text: self.content.0,
            choices: usize::from(is_any),
            // The list is there, and empty, where the ids were not asked for.
            ids: self.tokens.0.filter(|&ids| ids > 0),
            usage: running.map_or(Usage::Absent, |output| {
                Usage::Known(Counts { output, prompt: self.evaluated.count(), cached: None })
            }),
            running,
            finish: self.is_stopped.then(|| self.stop_type.unwrap_or(Finish::Stop)),
            ..Delta::default()
        }
    }
}

fn openai(choices: Choices<'_>) -> Result<Delta<'_>, ServerError<'_>> {
    let Choices { first, count } = choices;
    if first.is_nan {
        let kind = Cow::Borrowed("nan");
        return Err(ServerError { message: Cow::Borrowed(NOT_A_NUMBER), kind, code: None });
    }
    let message = first.delta.unwrap_or_default();
    let mut text = first.text.unwrap_or_default().0;
    append(&mut text, message.content.0);
    let reasoning = message.reasoning.0;
    // A few servers send the same piece under both names.
    let reasoning = if reasoning.is_empty() { message.reasoning_content.0 } else { reasoning };
    Ok(Delta {
        text,
        reasoning,
        tool_calls: message.tool_calls.0,
        role: matches!(message.role, Scalar::Text(_)),
        choices: count,
        other_choice: first.index.is_some_and(|index| index > 0),
        ids: first.token_ids.0,
        logprobs: first.logprobs.and_then(|logprobs| logprobs.tokens.0.or(logprobs.content.0)),
        finish: first.finish,
        ..Delta::default()
    })
}

fn tgi<'a>(token: Token<'a>, details: Option<Details<'a>>) -> Delta<'a> {
    // A special token, as the end of the sequence, is a token without text.
    let text = if token.special.is_true() { Cow::default() } else { token.text.0 };
    let mut delta = Delta { text, choices: 1, ids: Some(1), ..Delta::default() };
    if let Some(details) = details {
        delta.finish = details.finish_reason.finish();
        delta.usage = details.generated_tokens.usage(None, None);
    }
    delta
}

fn sglang<'a>(text: Text<'a>, meta: &Meta<'a>) -> Delta<'a> {
    let usage = meta.completion_tokens.usage(meta.prompt_tokens.count(), meta.cached_tokens.count());
    Delta {
        text: text.0,
        choices: 1,
        usage,
        running: meta.completion_tokens.count(),
        cumulative: true,
        finish: meta.finish_reason.finish(),
        ..Delta::default()
    }
}

fn append<'a>(to: &mut Cow<'a, str>, more: Cow<'a, str>) {
    if to.is_empty() {
        *to = more;
    } else if !more.is_empty() {
        to.to_mut().push_str(&more);
    }
}

/// Visits of plain values that are not expected.
macro_rules! otherwise {
    ($value:ty => $otherwise:expr) => {
        fn visit_bool<E>(self, _: bool) -> Result<$value, E> {
            Ok($otherwise)
        }
        fn visit_u64<E>(self, _: u64) -> Result<$value, E> {
            Ok($otherwise)
        }
        fn visit_i64<E>(self, _: i64) -> Result<$value, E> {
            Ok($otherwise)
        }
        fn visit_f64<E>(self, _: f64) -> Result<$value, E> {
            Ok($otherwise)
        }
        fn visit_str<E>(self, _: &str) -> Result<$value, E> {
            Ok($otherwise)
        }
    };
}

/// A text, or null. Anything else is an error.
#[derive(Default)]
struct Text<'a>(Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct TextVisitor<'a>(PhantomData<&'a ()>);
        impl<'de: 'a, 'a> Visitor<'de> for TextVisitor<'a> {
            type Value = Text<'a>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text or null")
            }
            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Text<'a>, E> {
                Ok(Text(Cow::Borrowed(text)))
            }
            fn visit_str<E>(self, text: &str) -> Result<Text<'a>, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }
            fn visit_unit<E>(self) -> Result<Text<'a>, E> {
                Ok(Text::default())
            }
        }
        from.deserialize_any(TextVisitor(PhantomData))
    }
}

/// The length of a list, or nothing where there is no list.
#[derive(Default)]
struct Length(Option<u32>);

impl<'de> Deserialize<'de> for Length {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct LengthVisitor;
        impl<'de> Visitor<'de> for LengthVisitor {
            type Value = Length;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("any value")
            }
            otherwise!(Length => Length(None));
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Length, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Length(None))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Length, A::Error> {
                let mut length = 0_u32;
                while list.next_element::<IgnoredAny>()?.is_some() {
                    length = length.saturating_add(1);
                }
                Ok(Length(Some(length)))
            }
            fn visit_unit<E>(self) -> Result<Length, E> {
                Ok(Length(None))
            }
        }
        from.deserialize_any(LengthVisitor)
    }
}

/// The first of `choices`, and how many there are.
#[derive(Default)]
struct Choices<'a> {
    first: Choice<'a>,
    count: usize,
}

impl<'de: 'a, 'a> Deserialize<'de> for Choices<'a> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct ChoicesVisitor<'a>(PhantomData<&'a ()>);
        impl<'de: 'a, 'a> Visitor<'de> for ChoicesVisitor<'a> {
            type Value = Choices<'a>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of choices or null")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Choices<'a>, A::Error> {
                let Some(first) = list.next_element()? else { return Ok(Choices::default()) };
                let mut count = 1;
                while list.next_element::<IgnoredAny>()?.is_some() {
                    count += 1;
                }
                Ok(Choices { first, count })
            }
            fn visit_unit<E>(self) -> Result<Choices<'a>, E> {
                Ok(Choices::default())
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

/// A number, whatever stands there.
#[derive(Clone, Copy, Default, PartialEq)]
enum Number {
    /// Nothing, or null.
    #[default]
    Absent,
    Count(u64),
    Real(f64),
    Unusable,
}

impl Number {
    fn count(self) -> Option<u32> {
        match self {
            Self::Count(count) => u32::try_from(count).ok(),
            _ => None,
        }
    }

    fn real(self) -> Option<f64> {
        match self {
            Self::Count(count) => Some(count as f64),
            Self::Real(real) => Some(real),
            Self::Absent | Self::Unusable => None,
        }
    }

    /// A usage with this number of output tokens.
    fn usage(self, prompt: Option<u32>, cached: Option<u32>) -> Usage {
        match self.count() {
            Some(output) => Usage::Known(Counts { output, prompt, cached }),
            None => Usage::Unusable,
        }
    }
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        Ok(match Scalar::deserialize(from)? {
            Scalar::Absent => Self::Absent,
            Scalar::Number(number) => number,
            Scalar::Text(_) | Scalar::True | Scalar::Map(_) | Scalar::Other => Self::Unusable,
        })
    }
}

/// A value of any type, of which texts, numbers and the fields of an error matter.
#[derive(Default)]
enum Scalar<'a> {
    #[default]
    Absent,
    Text(Cow<'a, str>),
    Number(Number),
    True,
    Map(Box<Fields<'a>>),
    Other,
}

/// The fields of an error, or of a reason of the end.
#[derive(Default)]
struct Fields<'a> {
    message: Option<Cow<'a, str>>,
    detail: Option<Cow<'a, str>>,
    kind: Option<Cow<'a, str>>,
    code: Option<u32>,
}

impl<'a> Scalar<'a> {
    fn text(self) -> Option<Cow<'a, str>> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    fn count(&self) -> Option<u32> {
        match self {
            Self::Number(number) => number.count(),
            _ => None,
        }
    }

    fn is_true(&self) -> bool {
        matches!(self, Self::True)
    }

    fn is(&self, text: &str) -> bool {
        matches!(self, Self::Text(found) if found == text)
    }

    /// A reason of the end: a name, or SGLang's `{"type": name}`.
    fn finish(&self) -> Option<Finish> {
        match self {
            Self::Text(name) => Some(Finish::named(name)),
            Self::Map(fields) => Some(fields.kind.as_deref().map_or(Finish::Other, Finish::named)),
            _ => None,
        }
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Scalar<'a> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct ScalarVisitor<'a>(PhantomData<&'a ()>);
        impl<'de: 'a, 'a> Visitor<'de> for ScalarVisitor<'a> {
            type Value = Scalar<'a>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("any value")
            }
            fn visit_unit<E>(self) -> Result<Scalar<'a>, E> {
                Ok(Scalar::Absent)
            }
            fn visit_bool<E>(self, value: bool) -> Result<Scalar<'a>, E> {
                Ok(if value { Scalar::True } else { Scalar::Other })
            }
            fn visit_u64<E>(self, number: u64) -> Result<Scalar<'a>, E> {
                Ok(Scalar::Number(Number::Count(number)))
            }
            fn visit_i64<E>(self, _: i64) -> Result<Scalar<'a>, E> {
                Ok(Scalar::Number(Number::Unusable))
            }
            fn visit_f64<E>(self, number: f64) -> Result<Scalar<'a>, E> {
                Ok(Scalar::Number(Number::Real(number)))
            }
            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Scalar<'a>, E> {
                Ok(Scalar::Text(Cow::Borrowed(text)))
            }
            fn visit_str<E>(self, text: &str) -> Result<Scalar<'a>, E> {
                Ok(Scalar::Text(Cow::Owned(text.to_owned())))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Scalar<'a>, A::Error> {
                while list.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Scalar::Other)
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Scalar<'a>, A::Error> {
                let mut fields = Box::<Fields<'a>>::default();
                while let Some(key) = map.next_key::<Text<'a>>()? {
                    match &*key.0 {
                        "message" => fields.message = map.next_value::<Plain<'a>>()?.0,
                        "detail" => fields.detail = map.next_value::<Plain<'a>>()?.0,
                        "type" => fields.kind = map.next_value::<Plain<'a>>()?.0,
                        "code" => fields.code = map.next_value::<Plain<'a>>()?.1,
                        _ => drop(map.next_value::<IgnoredAny>()?),
                    }
                }
                Ok(Scalar::Map(fields))
            }
        }
        from.deserialize_any(ScalarVisitor(PhantomData))
    }
}

/// A text or a count, of whatever stands there.
struct Plain<'a>(Option<Cow<'a, str>>, Option<u32>);

impl<'de: 'a, 'a> Deserialize<'de> for Plain<'a> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let value = Scalar::deserialize(from)?;
        let count = value.count();
        Ok(Self(value.text(), count))
    }
}

/// A map of known fields. Anything else in its place is noted, not an error.
#[derive(Default)]
enum Lenient<T> {
    #[default]
    Absent,
    Wrong,
    Map(T),
}

impl<T> Lenient<T> {
    fn map(self) -> Option<T> {
        match self {
            Self::Map(map) => Some(map),
            Self::Absent | Self::Wrong => None,
        }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Lenient<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct LenientVisitor<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for LenientVisitor<T> {
            type Value = Lenient<T>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("any value")
            }
            fn visit_unit<E>(self) -> Result<Lenient<T>, E> {
                Ok(Lenient::Absent)
            }
            otherwise!(Lenient<T> => Lenient::Wrong);
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Lenient<T>, A::Error> {
                while list.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Lenient::Wrong)
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Lenient<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Lenient::Map)
            }
        }
        from.deserialize_any(LenientVisitor(PhantomData))
    }
}

impl From<Lenient<RawTimings>> for Option<Timings> {
    fn from(raw: Lenient<RawTimings>) -> Self {
        raw.map().map(|raw| Timings {
            cached: raw.cache_n.count(),
            prompt_tokens: raw.prompt_n.count(),
            prompt_ms: raw.prompt_ms.real(),
            output_tokens: raw.predicted_n.count(),
            output_ms: raw.predicted_ms.real(),
        })
    }
}

impl From<Lenient<RawUsage>> for Usage {
    fn from(raw: Lenient<RawUsage>) -> Self {
        match raw {
            Lenient::Absent => Self::Absent,
            Lenient::Wrong => Self::Unusable,
            Lenient::Map(raw) => {
                let cached =
                    raw.prompt_tokens_details.map().and_then(|details| details.cached_tokens.count());
                raw.completion_tokens.usage(raw.prompt_tokens.count(), cached)
            }
        }
    }
}

#[cfg(test)]
mod tests;
