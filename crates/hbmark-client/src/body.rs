//! The body of a request, as the bytes that are sent.
//!
//! Enters: what one request asks for, and the server's endpoint. Leaves: JSON in a buffer that is used again. The same request gives the
//! same bytes on every machine: fields come in a fixed order, so that two servers can be shown to have got the same.
//!
//! What the endpoint has no words for is an error before anything is sent: a server that ignores a field would measure something else.

use serde::Serialize;
use serde_json::{Map, Value};

use super::dialect::{self, Api, Backend, Endpoint, RequestField, Template};

/// What one request asks for.
#[derive(Debug, Clone, Copy)]
pub struct RequestSpec<'a> {
    pub model: &'a str,
    pub prompt: Prompt<'a>,
    /// The most tokens of the answer.
    pub max_tokens: u32,
    /// The answer is exactly that long: the end of the sequence is ignored.
    pub forced_length: bool,
    pub sampling: Sampling,
    pub cache: Cache<'a>,
    /// A LoRA adapter, by its name at the server.
    pub lora: Option<&'a str>,
    pub constraint: Option<&'a Constraint>,
    /// Fields in the server's own words. They replace ours of the same name, objects are merged, and null takes a field away.
    pub extra: Option<&'a Map<String, Value>>,
}

#[derive(Debug, Clone, Copy)]
pub enum Prompt<'a> {
    Ids(&'a [u32]),
    /// For a chat it becomes one message of the user.
    Text(&'a str),
}

/// What is absent is left to the server: its default, or that of the model's files.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Sampling {
    pub temperature: Option<f64>,
    pub top_p: Option<f64>,
    pub top_k: Option<i32>,
}

/// What a request may take from the server's prefix cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cache<'a> {
    /// Whatever is there.
    Shared,
    /// What requests with the same salt left.
    Salt(&'a str),
    /// Nothing.
    Off,
}

/// What an answer must look like.
#[derive(Debug, Clone, PartialEq)]
pub enum Constraint {
    JsonSchema(Value),
    Regex(String),
    /// EBNF for vLLM, SGLang and TensorRT-LLM, GBNF for llama.cpp.
    Grammar(String),
}

#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    #[error(
        "the {api} API of {dialect} has no field for {what}: leave it out, choose another API, or give the field itself as extra body"
    )]
    Unsupported { dialect: &'static str, api: Api, what: &'static str },
    #[error("{what} is {value}: it must be a finite number")]
    NotFinite { what: &'static str, value: f64 },
    #[error("the body of a request cannot be written: {0}")]
    Json(#[from] serde_json::Error),
}

/// Writes the body of a request in place of what `into` holds.
///
/// # Errors
/// [`BodyError`]: what the API cannot express, and numbers that JSON cannot.
pub fn write(backend: Backend, spec: &RequestSpec<'_>, into: &mut Vec<u8>) -> Result<(), BodyError> {
    into.clear();
    let endpoint = backend.endpoint();
    let (field, prompt) = match (spec.prompt, backend.api) {
        (Prompt::Ids(ids), _) => (RequestField::Ids, PromptField::Ids(ids)),
        (Prompt::Text(text), Api::Completions) => (RequestField::Text, PromptField::Text(text)),
        (Prompt::Text(content), Api::Chat) => {
            (RequestField::Messages, PromptField::Messages([Message { role: "user", content }]))
        }
    };
    let mut body = Body { backend, endpoint, into, is_first: true };
    let Some(extra) = spec.extra else {
        return body.write(spec, field, &prompt);
    };
    // A prompt can be long: it is put where it belongs at the end, without a turn through a tree.
    body.write(spec, field, &())?;
    let mut fields: Map<String, Value> = serde_json::from_slice(into)?;
    merge(&mut fields, extra);
    into.clear();
    let mut open = b'{';
    for (name, value) in &fields {
        into.push(open);
        open = b',';
        serde_json::to_writer(&mut *into, name)?;
        into.push(b':');
        // The merge leaves no null but ours.
        if value.is_null() {
            serde_json::to_writer(&mut *into, &prompt)?;
        } else {
            serde_json::to_writer(&mut *into, value)?;
        }
    }
    into.extend_from_slice(if fields.is_empty() { b"{}" } else { b"}" });
    Ok(())
}

/// A prompt as the API takes it.
#[derive(Serialize)]
#[serde(untagged)]
enum PromptField<'a> {
    Ids(&'a [u32]),
    Text(&'a str),
    Messages([Message<'a>; 1]),
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'static str,
    content: &'a str,
}

/// A body that is being written.
struct Body<'w> {
    backend: Backend,
    endpoint: &'static Endpoint,
    into: &'w mut Vec<u8>,
    /// Nothing stands before the next field of this object.
    is_first: bool,
}

impl Body<'_> {
    fn write(
        &mut self,
        spec: &RequestSpec<'_>,
        prompt_field: RequestField,
        prompt: &impl Serialize,
    ) -> Result<(), BodyError> {
        self.into.push(b'{');
        // An adapter that is asked for as a model stands in the base model's place.
        let as_model = |template: Template| template.starts_with("\"model\":");
        let is_model =
            spec.lora.is_some() && self.endpoint.template(RequestField::Lora).is_some_and(as_model);
        if let Some(adapter) = spec.lora.filter(|_| is_model) {
            self.field(RequestField::Lora, &adapter)?;
        } else if let Some(template) = self.endpoint.template(RequestField::Model) {
            self.expand(template, &spec.model)?;
        }
        self.field(prompt_field, prompt)?;
        if let Some(name) = self.endpoint.inside {
            self.separate();
            serde_json::to_writer(&mut *self.into, name)?;
            self.into.extend_from_slice(b":{");
            self.is_first = true;
        }
        if let Some(template) = self.endpoint.template(RequestField::Stream) {
            self.expand(template, &())?;
        }
        self.field(RequestField::MaxTokens, &spec.max_tokens)?;
        if spec.forced_length {
            self.field(RequestField::ForcedLength, &())?;
        }
        self.expand(self.endpoint.evidence, &())?;
        self.sampling(spec.sampling)?;
        match spec.cache {
            Cache::Shared => {}
            Cache::Salt(salt) => self.field(RequestField::CacheSalt, &salt)?,
            Cache::Off => self.field(RequestField::CacheOff, &())?,
        }
        if let Some(adapter) = spec.lora.filter(|_| !is_model) {
            self.field(RequestField::Lora, &adapter)?;
        }
        match spec.constraint {
            None => {}
            Some(Constraint::JsonSchema(schema)) => self.field(RequestField::JsonSchema, schema)?,
            Some(Constraint::Regex(regex)) => self.field(RequestField::Regex, regex)?,
            Some(Constraint::Grammar(grammar)) => self.field(RequestField::Grammar, grammar)?,
        }
        self.into.extend_from_slice(if self.endpoint.inside.is_some() { b"}}" } else { b"}" });
        Ok(())
    }

    fn sampling(&mut self, sampling: Sampling) -> Result<(), BodyError> {
        let finite = |what: &'static str, value: Option<f64>| match value {
            Some(value) if !value.is_finite() => Err(BodyError::NotFinite { what, value }),
            value => Ok(value),
        };
        if let Some(temperature) = finite("the temperature", sampling.temperature)? {
            let greedy = self.endpoint.template(RequestField::Greedy).filter(|_| temperature <= 0.0);
            match greedy {
                Some(template) => self.expand(template, &())?,
                None => self.field(RequestField::Temperature, &temperature)?,
            }
        }
        if let Some(top_p) = finite("top-p", sampling.top_p)? {
            self.field(RequestField::TopP, &top_p)?;
        }
        if let Some(top_k) = sampling.top_k {
            self.field(RequestField::TopK, &top_k)?;
        }
        Ok(())
    }

    fn field(&mut self, field: RequestField, value: &impl Serialize) -> Result<(), BodyError> {
        let template = self.endpoint.template(field).ok_or_else(|| BodyError::Unsupported {
            dialect: dialect::server(self.backend.dialect).name,
            api: self.backend.api,
            what: name(field),
        })?;
        self.expand(template, value)
    }

    fn expand(&mut self, template: Template, value: &impl Serialize) -> Result<(), BodyError> {
        self.separate();
        let mut pieces = template.split('$');
        self.into.extend_from_slice(pieces.next().unwrap_or_default().as_bytes());
        for piece in pieces {
            serde_json::to_writer(&mut *self.into, value)?;
            self.into.extend_from_slice(piece.as_bytes());
        }
        Ok(())
    }

    fn separate(&mut self) {
        if !self.is_first {
            self.into.push(b',');
        }
        self.is_first = false;
    }
}

/// Merges as RFC 7396 says.
fn merge(into: &mut Map<String, Value>, from: &Map<String, Value>) {
    for (name, value) in from {
        match (into.get_mut(name), value) {
            (_, Value::Null) => drop(into.shift_remove(name)),
            (Some(Value::Object(ours)), Value::Object(theirs)) => merge(ours, theirs),
            _ => drop(into.insert(name.clone(), value.clone())),
        }
    }
}

fn name(field: RequestField) -> &'static str {
    match field {
        RequestField::Model => "a model",
        RequestField::Ids => "a prompt of token ids",
        RequestField::Text => "a prompt of text",
        RequestField::Messages => "messages",
        RequestField::Stream => "streaming",
        RequestField::MaxTokens => "a number of tokens",
        RequestField::ForcedLength => "going on after the end of the sequence",
        RequestField::Temperature | RequestField::Greedy => "a temperature",
        RequestField::TopP => "top-p",
        RequestField::TopK => "top-k",
        RequestField::CacheSalt => "a salt of the prefix cache",
        RequestField::CacheOff => "a request without the prefix cache",
        RequestField::Lora => "a LoRA adapter",
        RequestField::JsonSchema => "a JSON schema",
        RequestField::Regex => "a regular expression",
        RequestField::Grammar => "a grammar",
    }
}

#[cfg(test)]
mod tests;
