//! What a run against a live server adds to a point: how tokens were counted, how requests failed, the client's own error.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::latency::Quantiles;
use super::server_metrics::ServerMetrics;

/// A kind of server: what it understands, and what it calls things.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Dialect {
    /// Nothing beyond what OpenAI documents.
    OpenAi,
    Vllm,
    Sglang,
    TrtLlm,
    Tgi,
    LlamaCpp,
}

impl Dialect {
    /// The kind of server, as its makers write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::OpenAi => "an OpenAI-compatible server",
            Self::Vllm => "vLLM",
            Self::Sglang => "SGLang",
            Self::TrtLlm => "TensorRT-LLM",
            Self::Tgi => "TGI",
            Self::LlamaCpp => "llama.cpp",
        }
    }
}

/// How the output tokens of a stream were counted, best evidence first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum TokenEvidence {
    /// The running count that the server sends with every event.
    ContinuousUsage,
    /// The ids of the tokens in each event.
    TokenIds,
    /// An entry of log probabilities for each token.
    Logprobs,
    /// The final count: one token for the first event that holds output, the rest spread evenly over the others.
    FinalUsage,
    /// The output text, encoded again with a tokenizer.
    Tokenizer,
    /// None: each event that holds output counts as one token.
    Events,
}

/// How a request to a server failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Failure {
    /// Nothing listens there.
    Refused,
    /// No route, or no such name.
    Unreachable,
    /// The handshake failed: an expired, unknown or wrongly named certificate.
    Tls,
    /// The connection was reset.
    Reset,
    /// The connection was closed before the answer was whole.
    ClosedEarly,
    ConnectTimeout,
    HeadersTimeout,
    FirstTokenTimeout,
    /// Between two events.
    EventTimeout,
    TotalTimeout,
    /// An HTTP status that is not a success.
    Status(u16),
    /// A redirect; it is not followed, and no key is sent along.
    Redirect(u16),
    /// Something else than an event stream, with a status of success.
    NotAStream,
    /// Not HTTP, or a broken chunk.
    MalformedHttp,
    /// An event that is not JSON of the expected shape, or not UTF-8.
    MalformedEvent,
    /// A compressed body, which was not asked for.
    Compressed,
    /// The server sent an error in the stream.
    ErrorEvent,
    /// Headers, an event or an answer beyond the limit.
    TooLarge,
    /// A whole answer without any output.
    NoOutput,
    /// The client ended it: an interrupt, or the end of the run.
    Aborted,
}

impl Failure {
    /// As results name it: `reset`, `status_429`.
    pub fn name(self) -> String {
        match self {
            Self::Status(code) => format!("status_{code}"),
            Self::Redirect(code) => format!("redirect_{code}"),
            other => serde_json::to_value(other)
                .ok()
                .and_then(|value| value.as_str().map(str::to_owned))
                .unwrap_or_default(),
        }
    }

    /// The server says that it has too much to do.
    pub fn is_overload(self) -> bool {
        matches!(self, Self::Status(429 | 503))
    }

    /// It says so, or an answer did not come in time.
    pub fn may_be_overload(self) -> bool {
        let is_late = matches!(
            self,
            Self::Status(504)
                | Self::ConnectTimeout
                | Self::HeadersTimeout
                | Self::FirstTokenTimeout
                | Self::EventTimeout
                | Self::TotalTimeout
        );
        is_late || self.is_overload()
    }
}

/// A server that was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ServerIdentity {
    /// Its base URL.
    pub url: String,
    pub dialect: Dialect,
    /// The path that requests were sent to.
    pub path: String,
    /// The model's name in the requests.
    pub model: String,
    pub version: Option<String>,
    /// Positions of a sequence, as the server says.
    pub max_model_len: Option<usize>,
}

/// Where the time stamps of events come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum StampSource {
    /// The kernel's receive stamp of every piece.
    Kernel,
    /// Some of the kernel, some of this program.
    Mixed,
    /// This program, when it read: under TLS, and on systems without receive stamps.
    Client,
}

/// What a run against a live server shows beside its latencies. Times are in nanoseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct LiveResult {
    pub stamps: StampSource,
    /// Measured requests by how their tokens were counted.
    pub evidence: BTreeMap<TokenEvidence, usize>,
    /// From sending the request on, as most other programs count; TTFT and E2E themselves count from the scheduled arrival.
    pub ttft_from_dispatch_ns: Quantiles,
    pub e2e_from_dispatch_ns: Quantiles,
    /// From the scheduled arrival until the request was handed to a connection.
    pub client_queue_ns: Quantiles,
    /// Opening a connection; of requests on a connection that was kept there is none.
    pub connect_ns: Quantiles,
    /// From sending the request until the head of the response.
    pub headers_ns: Quantiles,
    /// TTFT of the first event with text of the answer itself; where the model reasons first, later than TTFT.
    pub ttft_content_ns: Quantiles,
    /// Gaps between events with output, each of one or more tokens.
    pub event_gap_ns: Quantiles,
    /// Events with output, and the tokens in them.
    pub events: u64,
    pub tokens_per_event: Option<f64>,
    /// From the kernel's receipt of a piece until this program saw it.
    pub client_delay_ns: Quantiles,
    /// Share of the pieces with output that have the kernel's stamp of a later one: sent as one, or merged while they waited to be read.
    #[serde(default)]
    pub shared_stamps: Option<f64>,
    /// Of one processor, the share that the client's thread used, and the share that it waited for one.
    pub client_cpu: Option<f64>,
    pub client_cpu_wait: Option<f64>,
    /// The client's thread had real-time scheduling: it went before all ordinary ones.
    #[serde(default)]
    pub client_realtime: bool,
    pub connections_opened: usize,
    pub connections_reused: usize,
    /// Requests sent again, because a kept connection was closed before any byte of an answer.
    pub retried: usize,
    /// Steps of the machine's real-time clock during the run.
    pub clock_steps: usize,
    /// What the server said, of each kind of failure the first.
    pub messages: BTreeMap<String, String>,
    /// Reasons of the ends of served requests, by name.
    pub finish_reasons: BTreeMap<String, usize>,
    /// Served requests with fewer or more output tokens than were asked for.
    pub short_outputs: usize,
    pub long_outputs: usize,
    /// Requests whose final token count is another than that of their events.
    pub disagreeing_counts: usize,
    /// Prompt tokens as the server counts them over those that were sent, where it says.
    pub prompt_tokens_ratio: Option<f64>,
    /// Prompt tokens that the server found in its cache, over all it counts, where it says.
    pub cached_share: Option<f64>,
    /// sha256 over the bodies of the requests that warm up and of those that were planned to count, in their order and without salts.
    pub bodies_sha256: String,
    /// The server's own counters over the measured time, where it shows any.
    pub server: Option<ServerMetrics>,
    /// Measured requests whose prompt and planned output together are longer than the context that the server names.
    #[serde(default)]
    pub beyond_context: usize,
}
