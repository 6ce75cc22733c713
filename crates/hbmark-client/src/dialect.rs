//! What each kind of server understands, as data: paths, how a length is forced, where the token counts are.
//!
//! Enters: the name of a backend as a user types it, or a dialect that [`mod@crate::probe`] concluded. Leaves: a row of the table, [`Server`],
//! whose endpoints say in their own words what may be sent. [`crate::body`] writes requests from it; nothing else names a field.
//!
//! Only what a row lists is sent. Servers differ in what they do with a field that they do not know: vLLM and SGLang drop it without a word,
//! TensorRT-LLM and `transformers serve` refuse the request.

use std::fmt;
use std::str::FromStr;

use hbmark_core::result::serving::{Dialect, TokenEvidence};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Api {
    /// A prompt in, its continuation out.
    Completions,
    /// Messages in, through the server's chat template.
    Chat,
}

/// What a request may say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Knob {
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
    MinP,
    Seed,
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
    /// One of some texts.
    Choice,
}

/// A piece of a JSON object; `$` stands for the value.
pub type Template = &'static str;

/// One API of a server.
#[derive(Debug, Clone, Copy)]
pub struct Endpoint {
    pub path: &'static str,
    /// What it understands.
    knobs: &'static [&'static [(Knob, Template)]],
    /// How tokens can be counted and what asks for it. First what costs the server least for what it tells.
    pub evidence: &'static [(TokenEvidence, Template)],
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
    /// The words for a knob, if this API has it.
    #[must_use]
    pub fn template(&self, knob: Knob) -> Option<Template> {
        self.knobs.iter().copied().flatten().find(|(known, _)| *known == knob).map(|(_, template)| *template)
    }

    #[must_use]
    pub fn has(&self, knob: Knob) -> bool {
        self.template(knob).is_some()
    }

    /// The best that can be asked for at little cost.
    #[must_use]
    pub fn default_evidence(&self) -> TokenEvidence {
        self.evidence.first().map_or(TokenEvidence::Events, |(evidence, _)| *evidence)
    }
}

impl Server {
    #[must_use]
    pub fn endpoint(&self, api: Api) -> &Endpoint {
        match api {
            Api::Completions => &self.completions,
            Api::Chat => &self.chat,
        }
    }
}

/// The row of a dialect.
#[must_use]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Backend {
    pub dialect: Dialect,
    pub api: Api,
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
const STREAM: &[(Knob, Template)] = &[(Knob::Model, r#""model":$"#), (Knob::Stream, r#""stream":true"#)];
const PROMPT: &[(Knob, Template)] = &[(Knob::Ids, r#""prompt":$"#), (Knob::Text, r#""prompt":$"#)];
const MESSAGES: &[(Knob, Template)] = &[(Knob::Messages, r#""messages":$"#)];
const MAX_TOKENS: &[(Knob, Template)] = &[(Knob::MaxTokens, r#""max_tokens":$"#)];
const MAX_COMPLETION_TOKENS: &[(Knob, Template)] = &[(Knob::MaxTokens, r#""max_completion_tokens":$"#)];
/// `min_tokens` would say it twice: vLLM and SGLang then mask logits at every step, work that is not asked about here, and vLLM does not
/// do it when it speculates.
const IGNORE_EOS: &[(Knob, Template)] = &[(Knob::ForcedLength, r#""ignore_eos":true"#)];
const SAMPLING: &[(Knob, Template)] =
    &[(Knob::Temperature, r#""temperature":$"#), (Knob::TopP, r#""top_p":$"#), (Knob::Seed, r#""seed":$"#)];
const MORE_SAMPLING: &[(Knob, Template)] = &[(Knob::TopK, r#""top_k":$"#), (Knob::MinP, r#""min_p":$"#)];
const CACHE_SALT: &[(Knob, Template)] = &[(Knob::CacheSalt, r#""cache_salt":$"#)];
const LORA_AS_MODEL: &[(Knob, Template)] = &[(Knob::Lora, r#""model":$"#)];
const RESPONSE_FORMAT: &[(Knob, Template)] = &[(
    Knob::JsonSchema,
    r#""response_format":{"type":"json_schema","json_schema":{"name":"output","schema":$}}"#,
)];

const FINAL_USAGE: (TokenEvidence, Template) =
    (TokenEvidence::FinalUsage, r#""stream_options":{"include_usage":true}"#);
const CONTINUOUS_USAGE: (TokenEvidence, Template) = (
    TokenEvidence::ContinuousUsage,
    r#""stream_options":{"include_usage":true,"continuous_usage_stats":true}"#,
);
/// vLLM's first event then repeats the ids of the prompt, however long: it comes later than without.
const TOKEN_IDS: (TokenEvidence, Template) =
    (TokenEvidence::TokenIds, r#""stream_options":{"include_usage":true},"return_token_ids":true"#);
const LOGPROBS: (TokenEvidence, Template) =
    (TokenEvidence::Logprobs, r#""stream_options":{"include_usage":true},"logprobs":1"#);
const CHAT_LOGPROBS: (TokenEvidence, Template) =
    (TokenEvidence::Logprobs, r#""stream_options":{"include_usage":true},"logprobs":true"#);

/// vLLM 0.11 and later: the older `guided_regex`, `guided_grammar` and `guided_choice` went with 0.12.
const VLLM_STRUCTURED: &[(Knob, Template)] = &[
    (Knob::Regex, r#""structured_outputs":{"regex":$}"#),
    (Knob::Grammar, r#""structured_outputs":{"grammar":$}"#),
    (Knob::Choice, r#""structured_outputs":{"choice":$}"#),
];
/// A second adapter name in `model`, behind a colon, is newer than this field.
const SGLANG_OWN: &[(Knob, Template)] =
    &[(Knob::Lora, r#""lora_path":$"#), (Knob::Regex, r#""regex":$"#), (Knob::Grammar, r#""ebnf":$"#)];
const TRTLLM_STRUCTURED: &[(Knob, Template)] = &[
    (Knob::JsonSchema, r#""response_format":{"type":"json","schema":$}"#),
    (Knob::Regex, r#""response_format":{"type":"regex","regex":$}"#),
    (Knob::Grammar, r#""response_format":{"type":"ebnf","ebnf":$}"#),
];
/// Adapters are numbers here, and model names are ignored.
const LLAMA_CPP_OWN: &[(Knob, Template)] = &[
    (Knob::MaxTokens, r#""n_predict":$"#),
    (Knob::CacheOff, r#""cache_prompt":false"#),
    (Knob::JsonSchema, r#""json_schema":$"#),
    (Knob::Grammar, r#""grammar":$"#),
];
/// The running count is in the timings. Its log probabilities are not a count: a token whose text is held back has no entry.
const LLAMA_CPP_USAGE: (TokenEvidence, Template) =
    (TokenEvidence::ContinuousUsage, r#""stream_options":{"include_usage":true},"timings_per_token":true"#);
/// Of `/generate_stream`. It cannot be made to go on after the end of the sequence, and refuses a top-p of one.
const TGI_OWN: &[(Knob, Template)] = &[
    (Knob::Text, r#""inputs":$"#),
    (Knob::MaxTokens, r#""max_new_tokens":$"#),
    // A temperature of zero is refused.
    (Knob::Greedy, r#""do_sample":false"#),
    (Knob::TopK, r#""top_k":$"#),
    (Knob::Lora, r#""adapter_id":$"#),
    (Knob::JsonSchema, r#""grammar":{"type":"json","value":$}"#),
    (Knob::Regex, r#""grammar":{"type":"regex","value":$}"#),
];
/// Any other model name is taken for an adapter's.
const TGI_CHAT: &[(Knob, Template)] = &[
    (Knob::Model, r#""model":"tgi""#),
    (Knob::JsonSchema, r#""response_format":{"type":"json","value":$}"#),
    (Knob::Regex, r#""response_format":{"type":"regex","value":$}"#),
];

/// In the order of [`Dialect`].
const SERVERS: [Server; 6] = [
    Server {
        dialect: Dialect::OpenAi,
        name: "openai",
        completions: Endpoint {
            path: "/v1/completions",
            knobs: &[STREAM, PROMPT, MAX_TOKENS, SAMPLING, LORA_AS_MODEL],
            evidence: &[FINAL_USAGE, LOGPROBS],
            inside: None,
        },
        chat: Endpoint {
            path: "/v1/chat/completions",
            // The newer `max_completion_tokens` is unknown to many, and refused by some.
            knobs: &[STREAM, MESSAGES, MAX_TOKENS, SAMPLING, LORA_AS_MODEL, RESPONSE_FORMAT],
            evidence: &[FINAL_USAGE, CHAT_LOGPROBS],
            inside: None,
        },
    },
    Server {
        dialect: Dialect::Vllm,
        name: "vllm",
        completions: Endpoint {
            path: "/v1/completions",
            knobs: &[
                STREAM,
                PROMPT,
                MAX_TOKENS,
                IGNORE_EOS,
                SAMPLING,
                MORE_SAMPLING,
                CACHE_SALT,
                LORA_AS_MODEL,
                RESPONSE_FORMAT,
                VLLM_STRUCTURED,
            ],
            evidence: &[CONTINUOUS_USAGE, TOKEN_IDS, LOGPROBS, FINAL_USAGE],
            inside: None,
        },
        chat: Endpoint {
            path: "/v1/chat/completions",
            knobs: &[
                STREAM,
                MESSAGES,
                MAX_COMPLETION_TOKENS,
                IGNORE_EOS,
                SAMPLING,
                MORE_SAMPLING,
                CACHE_SALT,
                LORA_AS_MODEL,
                RESPONSE_FORMAT,
                VLLM_STRUCTURED,
            ],
            evidence: &[CONTINUOUS_USAGE, TOKEN_IDS, CHAT_LOGPROBS, FINAL_USAGE],
            inside: None,
        },
    },
    Server {
        dialect: Dialect::Sglang,
        name: "sglang",
        completions: Endpoint {
            path: "/v1/completions",
            knobs: &[
                STREAM,
                PROMPT,
                MAX_TOKENS,
                IGNORE_EOS,
                SAMPLING,
                MORE_SAMPLING,
                CACHE_SALT,
                SGLANG_OWN,
                RESPONSE_FORMAT,
            ],
            evidence: &[CONTINUOUS_USAGE, TOKEN_IDS, LOGPROBS, FINAL_USAGE],
            inside: None,
        },
        chat: Endpoint {
            path: "/v1/chat/completions",
            knobs: &[
                STREAM,
                MESSAGES,
                MAX_COMPLETION_TOKENS,
                IGNORE_EOS,
                SAMPLING,
                MORE_SAMPLING,
                CACHE_SALT,
                SGLANG_OWN,
                RESPONSE_FORMAT,
            ],
            evidence: &[CONTINUOUS_USAGE, TOKEN_IDS, CHAT_LOGPROBS, FINAL_USAGE],
            inside: None,
        },
    },
    Server {
        dialect: Dialect::TrtLlm,
        name: "tensorrt-llm",
        completions: Endpoint {
            path: "/v1/completions",
            // No cache salt here: the request would be refused.
            knobs: &[STREAM, PROMPT, MAX_TOKENS, IGNORE_EOS, SAMPLING, MORE_SAMPLING, TRTLLM_STRUCTURED],
            evidence: &[CONTINUOUS_USAGE, LOGPROBS, FINAL_USAGE],
            inside: None,
        },
        chat: Endpoint {
            path: "/v1/chat/completions",
            knobs: &[
                STREAM,
                MESSAGES,
                MAX_COMPLETION_TOKENS,
                IGNORE_EOS,
                SAMPLING,
                MORE_SAMPLING,
                CACHE_SALT,
                TRTLLM_STRUCTURED,
            ],
            evidence: &[CONTINUOUS_USAGE, CHAT_LOGPROBS, FINAL_USAGE],
            inside: None,
        },
    },
    Server {
        dialect: Dialect::Tgi,
        name: "tgi",
        completions: Endpoint {
            path: "/generate_stream",
            knobs: &[TGI_OWN, SAMPLING],
            evidence: &[
                (TokenEvidence::TokenIds, r#""details":true"#),
                (TokenEvidence::FinalUsage, r#""details":true"#),
            ],
            inside: Some("parameters"),
        },
        chat: Endpoint {
            path: "/v1/chat/completions",
            knobs: &[TGI_CHAT, STREAM, MESSAGES, MAX_TOKENS, SAMPLING, LORA_AS_MODEL],
            evidence: &[FINAL_USAGE, CHAT_LOGPROBS],
            inside: None,
        },
    },
    Server {
        dialect: Dialect::LlamaCpp,
        name: "llama.cpp",
        completions: Endpoint {
            path: "/v1/completions",
            knobs: &[STREAM, PROMPT, IGNORE_EOS, SAMPLING, MORE_SAMPLING, LLAMA_CPP_OWN],
            evidence: &[LLAMA_CPP_USAGE, FINAL_USAGE],
            inside: None,
        },
        chat: Endpoint {
            path: "/v1/chat/completions",
            knobs: &[STREAM, MESSAGES, IGNORE_EOS, SAMPLING, MORE_SAMPLING, LLAMA_CPP_OWN],
            evidence: &[LLAMA_CPP_USAGE, FINAL_USAGE],
            inside: None,
        },
    },
];

#[cfg(test)]
mod tests;
