//! What each kind of server understands, as data: paths, how a length is forced, where the token counts are.
//!
//! Enters: the name of a backend as a user types it, or a dialect that [`mod@crate::probe`] concluded. Leaves: a row of the table, [`Server`],
//! whose endpoints say in their own words what may be sent. `body` writes requests from it; nothing else names a field.
//!
//! Only what a row lists is sent. Servers differ in what they do with a field that they do not know: vLLM and SGLang drop it without a word,
//! TensorRT-LLM and `transformers serve` refuse the request.

use std::fmt;
use std::str::FromStr;

use hbmark_core::result::serving::Dialect;
use serde::Serialize;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Api {
    /// A prompt in, its continuation out.
    Completions,
    /// Messages in, through the server's chat template.
    Chat,
}

/// What a request may say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestField {
    Model,
    /// The prompt as token ids.
    Ids,
    /// The prompt as text.
    Text,
    Messages,
    Stream,
    MaxTokens,
    /// Go on after the end of the sequence, up to the maximum.
    ForcedLength,
    Temperature,
    /// Temperature zero, where that is said in other words.
    Greedy,
    TopP,
    TopK,
    /// Requests of different salts share no prefixes in the cache.
    CacheSalt,
    /// This request takes nothing from the cache.
    CacheOff,
    /// A LoRA adapter that the server has loaded, by its name.
    Lora,
    JsonSchema,
    Regex,
    /// In the server's own notation: EBNF or GBNF.
    Grammar,
}

/// A piece of a JSON object; `$` stands for the value.
pub type Template = &'static str;

/// One API of a server.
#[derive(Debug, Clone, Copy)]
pub struct Endpoint {
    pub path: &'static str,
    /// What it understands.
    fields: &'static [&'static [(RequestField, Template)]],
    /// Asks for what tokens can be counted by: the best that costs the server little.
    pub evidence: Template,
    /// Everything but model and prompt goes into an object of this name.
    pub inside: Option<&'static str>,
}

/// One row of the table.
#[derive(Debug, Clone, Copy)]
pub struct Server {
    pub dialect: Dialect,
    pub name: &'static str,
    pub completions: Endpoint,
    pub chat: Endpoint,
}

impl Endpoint {
    /// How a field is written, if this API has it.
    pub fn template(&self, field: RequestField) -> Option<Template> {
        self.fields
            .iter()
            .copied()
            .flatten()
            .find(|(known, _)| *known == field)
            .map(|(_, template)| *template)
    }

    pub fn has(&self, field: RequestField) -> bool {
        self.template(field).is_some()
    }
}

/// The row of a dialect.
pub fn server(dialect: Dialect) -> &'static Server {
    &SERVERS[dialect as usize]
}

impl fmt::Display for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Completions => "completions",
            Self::Chat => "chat",
        })
    }
}

/// What `--backend` of the usual clients names. Scripts say `openai` to any server: there the server's own answer may know better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Backend {
    pub dialect: Dialect,
    pub api: Api,
}

impl Backend {
    pub fn endpoint(self) -> &'static Endpoint {
        let Server { completions, chat, .. } = server(self.dialect);
        match self.api {
            Api::Completions => completions,
            Api::Chat => chat,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no backend `{given}`; the backends are {}", names())]
pub struct UnknownBackend {
    pub given: String,
}

fn names() -> String {
    BACKENDS.map(|(name, ..)| name).join(", ")
}

impl FromStr for Backend {
    type Err = UnknownBackend;

    fn from_str(given: &str) -> Result<Self, UnknownBackend> {
        let row = BACKENDS.iter().find(|(name, ..)| name.eq_ignore_ascii_case(given));
        row.map(|&(_, dialect, api)| Self { dialect, api })
            .ok_or_else(|| UnknownBackend { given: given.to_owned() })
    }
}

/// Names that users of `vllm bench serve`, SGLang's `bench_serving` and AIPerf type.
const BACKENDS: [(&str, Dialect, Api); 22] = [
    ("openai", Dialect::OpenAi, Api::Completions),
    ("openai-completions", Dialect::OpenAi, Api::Completions),
    ("openai-chat", Dialect::OpenAi, Api::Chat),
    ("vllm", Dialect::Vllm, Api::Completions),
    ("vllm-chat", Dialect::Vllm, Api::Chat),
    ("sglang", Dialect::Sglang, Api::Completions),
    ("sglang-oai", Dialect::Sglang, Api::Completions),
    ("sglang-chat", Dialect::Sglang, Api::Chat),
    ("sglang-oai-chat", Dialect::Sglang, Api::Chat),
    ("tensorrt-llm", Dialect::TrtLlm, Api::Completions),
    ("tensorrt-llm-chat", Dialect::TrtLlm, Api::Chat),
    ("trtllm", Dialect::TrtLlm, Api::Completions),
    ("trtllm-chat", Dialect::TrtLlm, Api::Chat),
    ("trt", Dialect::TrtLlm, Api::Completions),
    ("tgi", Dialect::Tgi, Api::Completions),
    ("tgi-chat", Dialect::Tgi, Api::Chat),
    ("llama.cpp", Dialect::LlamaCpp, Api::Completions),
    ("llama.cpp-chat", Dialect::LlamaCpp, Api::Chat),
    ("llamacpp", Dialect::LlamaCpp, Api::Completions),
    ("llamacpp-chat", Dialect::LlamaCpp, Api::Chat),
    ("llama-server", Dialect::LlamaCpp, Api::Completions),
    ("llama-server-chat", Dialect::LlamaCpp, Api::Chat),
];

// What several servers have in common.
const STREAM: &[(RequestField, Template)] =
    &[(RequestField::Model, r#""model":$"#), (RequestField::Stream, r#""stream":true"#)];
const PROMPT: &[(RequestField, Template)] =
    &[(RequestField::Ids, r#""prompt":$"#), (RequestField::Text, r#""prompt":$"#)];
const MESSAGES: &[(RequestField, Template)] = &[(RequestField::Messages, r#""messages":$"#)];
const MAX_TOKENS: &[(RequestField, Template)] = &[(RequestField::MaxTokens, r#""max_tokens":$"#)];
const MAX_COMPLETION_TOKENS: &[(RequestField, Template)] =
    &[(RequestField::MaxTokens, r#""max_completion_tokens":$"#)];
/// What most servers have beyond OpenAI's API. `min_tokens` would say the first twice: vLLM and SGLang then mask logits at every step, work
/// that is not asked about here, and vLLM does not do it when it speculates.
const BEYOND_OPENAI: &[(RequestField, Template)] =
    &[(RequestField::ForcedLength, r#""ignore_eos":true"#), (RequestField::TopK, r#""top_k":$"#)];
const SAMPLING: &[(RequestField, Template)] =
    &[(RequestField::Temperature, r#""temperature":$"#), (RequestField::TopP, r#""top_p":$"#)];
const CACHE_SALT: &[(RequestField, Template)] = &[(RequestField::CacheSalt, r#""cache_salt":$"#)];
const LORA_AS_MODEL: &[(RequestField, Template)] = &[(RequestField::Lora, r#""model":$"#)];
const RESPONSE_FORMAT: &[(RequestField, Template)] = &[(
    RequestField::JsonSchema,
    r#""response_format":{"type":"json_schema","json_schema":{"name":"output","schema":$}}"#,
)];

const FINAL_USAGE: Template = r#""stream_options":{"include_usage":true}"#;
const CONTINUOUS_USAGE: Template = r#""stream_options":{"include_usage":true,"continuous_usage_stats":true}"#;

/// vLLM 0.11 and later: the older `guided_regex` and `guided_grammar` went with 0.12.
const VLLM_STRUCTURED: &[(RequestField, Template)] = &[
    (RequestField::Regex, r#""structured_outputs":{"regex":$}"#),
    (RequestField::Grammar, r#""structured_outputs":{"grammar":$}"#),
];
/// A second adapter name in `model`, behind a colon, is newer than this field.
const SGLANG_OWN: &[(RequestField, Template)] = &[
    (RequestField::Lora, r#""lora_path":$"#),
    (RequestField::Regex, r#""regex":$"#),
    (RequestField::Grammar, r#""ebnf":$"#),
];
const TRTLLM_STRUCTURED: &[(RequestField, Template)] = &[
    (RequestField::JsonSchema, r#""response_format":{"type":"json","schema":$}"#),
    (RequestField::Regex, r#""response_format":{"type":"regex","regex":$}"#),
    (RequestField::Grammar, r#""response_format":{"type":"ebnf","ebnf":$}"#),
];
/// Adapters are numbers here, and model names are ignored.
const LLAMA_CPP_OWN: &[(RequestField, Template)] = &[
    (RequestField::MaxTokens, r#""n_predict":$"#),
    (RequestField::CacheOff, r#""cache_prompt":false"#),
    (RequestField::JsonSchema, r#""json_schema":$"#),
    (RequestField::Grammar, r#""grammar":$"#),
];
/// The running count is in the timings. Its log probabilities are not a count: a token whose text is held back has no entry.
const LLAMA_CPP_USAGE: Template = r#""stream_options":{"include_usage":true},"timings_per_token":true"#;
/// Of `/generate_stream`. It cannot be made to go on after the end of the sequence, and refuses a top-p of one.
const TGI_OWN: &[(RequestField, Template)] = &[
    (RequestField::Text, r#""inputs":$"#),
    (RequestField::MaxTokens, r#""max_new_tokens":$"#),
    // A temperature of zero is refused.
    (RequestField::Greedy, r#""do_sample":false"#),
    (RequestField::TopK, r#""top_k":$"#),
    (RequestField::Lora, r#""adapter_id":$"#),
    (RequestField::JsonSchema, r#""grammar":{"type":"json","value":$}"#),
    (RequestField::Regex, r#""grammar":{"type":"regex","value":$}"#),
];
/// Any other model name is taken for an adapter's.
const TGI_CHAT: &[(RequestField, Template)] = &[
    (RequestField::Model, r#""model":"tgi""#),
    (RequestField::JsonSchema, r#""response_format":{"type":"json","value":$}"#),
    (RequestField::Regex, r#""response_format":{"type":"regex","value":$}"#),
];

/// An endpoint whose parameters stand beside the prompt.
const fn flat(
    path: &'static str,
    evidence: Template,
    fields: &'static [&'static [(RequestField, Template)]],
) -> Endpoint {
    Endpoint { path, fields, evidence, inside: None }
}

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// In the order of [`Dialect`].
#[rustfmt::skip] // A table: an endpoint a line.
const SERVERS: [Server; 6] = [
    Server {
        dialect: Dialect::OpenAi,
        name: "openai",
        completions: flat(COMPLETIONS, FINAL_USAGE, &[STREAM, PROMPT, MAX_TOKENS, SAMPLING, LORA_AS_MODEL]),
        // The newer `max_completion_tokens` is unknown to many, and refused by some.
        chat: flat(CHAT, FINAL_USAGE, &[STREAM, MESSAGES, MAX_TOKENS, SAMPLING, LORA_AS_MODEL, RESPONSE_FORMAT]),
    },
    Server {
        dialect: Dialect::Vllm,
        name: "vllm",
        completions: flat(COMPLETIONS, CONTINUOUS_USAGE, &[STREAM, PROMPT, MAX_TOKENS, SAMPLING, BEYOND_OPENAI, CACHE_SALT, LORA_AS_MODEL, RESPONSE_FORMAT, VLLM_STRUCTURED]),
        chat: flat(CHAT, CONTINUOUS_USAGE, &[STREAM, MESSAGES, MAX_COMPLETION_TOKENS, SAMPLING, BEYOND_OPENAI, CACHE_SALT, LORA_AS_MODEL, RESPONSE_FORMAT, VLLM_STRUCTURED]),
    },
    Server {
        dialect: Dialect::Sglang,
        name: "sglang",
        completions: flat(COMPLETIONS, CONTINUOUS_USAGE, &[STREAM, PROMPT, MAX_TOKENS, SAMPLING, BEYOND_OPENAI, CACHE_SALT, SGLANG_OWN, RESPONSE_FORMAT]),
        chat: flat(CHAT, CONTINUOUS_USAGE, &[STREAM, MESSAGES, MAX_COMPLETION_TOKENS, SAMPLING, BEYOND_OPENAI, CACHE_SALT, SGLANG_OWN, RESPONSE_FORMAT]),
    },
    Server {
        dialect: Dialect::TrtLlm,
        name: "tensorrt-llm",
        // No cache salt here: the request would be refused.
        completions: flat(COMPLETIONS, CONTINUOUS_USAGE, &[STREAM, PROMPT, MAX_TOKENS, SAMPLING, BEYOND_OPENAI, TRTLLM_STRUCTURED]),
        chat: flat(CHAT, CONTINUOUS_USAGE, &[STREAM, MESSAGES, MAX_COMPLETION_TOKENS, SAMPLING, BEYOND_OPENAI, CACHE_SALT, TRTLLM_STRUCTURED]),
    },
    Server {
        dialect: Dialect::Tgi,
        name: "tgi",
        completions: Endpoint { path: "/generate_stream", fields: &[TGI_OWN, SAMPLING], evidence: r#""details":true"#, inside: Some("parameters") },
        chat: flat(CHAT, FINAL_USAGE, &[TGI_CHAT, STREAM, MESSAGES, MAX_TOKENS, SAMPLING, LORA_AS_MODEL]),
    },
    Server {
        dialect: Dialect::LlamaCpp,
        name: "llama.cpp",
        completions: flat(COMPLETIONS, LLAMA_CPP_USAGE, &[STREAM, PROMPT, SAMPLING, BEYOND_OPENAI, LLAMA_CPP_OWN]),
        chat: flat(CHAT, LLAMA_CPP_USAGE, &[STREAM, MESSAGES, SAMPLING, BEYOND_OPENAI, LLAMA_CPP_OWN]),
    },
];

#[cfg(test)]
mod tests;
