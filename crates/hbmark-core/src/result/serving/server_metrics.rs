//! What a live server counted over a window of a run, by its own counters.
//!
//! Enters: counters and gauges of a `/metrics` page, read before, during and after the window. Leaves: their differences and means, and for
//! each signal that is not known, why.

use serde::{Deserialize, Serialize};

use super::live::Dialect;

/// A quantity that servers export, whatever they call it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Signal {
    /// Requests in the batch.
    Running,
    /// Requests before the batch.
    Waiting,
    /// Share of the KV cache in use.
    KvUse,
    Preemptions,
    /// Requests that ended.
    Requests,
    AbortedRequests,
    /// Tokens of the prompts, those found in the cache included.
    PromptTokens,
    /// Tokens of the prompts that were found in a cache.
    CachedTokens,
    /// Tokens of the prompts that were computed.
    ComputedTokens,
    /// Lookups in the prefix cache, in tokens, and those that were found. A request that waits is looked up again at every step.
    PrefixQueries,
    PrefixHits,
    GenerationTokens,
    /// Tokens of steps that decode; the first token of a request is none of them.
    DecodeTokens,
    /// Time from arrival to the first token.
    Ttft,
    /// Time from arrival to the end.
    E2e,
    /// Time before the batch.
    Queue,
    /// Time from the batch to the first token.
    Prefill,
    /// Time from the first token to the last.
    Decode,
    /// Time from the batch to the last token.
    Inference,
    /// Time between tokens.
    Itl,
    /// Time per token after the first, of each request.
    Tpot,
    /// Time of computing prompts and of making tokens, of all requests.
    PromptSeconds,
    PredictedSeconds,
    /// Steps of the engine.
    Steps,
    /// Those while the server was busy throughout.
    BusySteps,
    DecodeSteps,
    /// Tokens in the batches of these steps.
    StepTokens,
    /// Requests in a step, on average since the server was started.
    BusySlots,
    /// Steps that checked drafted tokens, the tokens drafted, and those accepted.
    Drafts,
    DraftTokens,
    AcceptedTokens,
    /// The server's own estimates, of one GPU.
    ReadBytes,
    WrittenBytes,
    Flops,
    /// Blocks of the KV cache, the tokens in a block, and the tokens in all of them.
    KvBlocks,
    BlockTokens,
    KvTokens,
    /// The longest sequence that is served.
    MaxModelLen,
    PrefixCaching,
    /// When the process was started.
    StartTime,
}

/// Why a signal is not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Unknown {
    /// The page has no such series.
    NotExported,
    /// The counter went down within the window, or its process was started again.
    Restarted,
    /// Not a number, infinite or negative.
    NotANumber,
    /// The series was there before the window and not after it.
    Vanished,
    /// The server prints fewer digits than the difference needs.
    TooCoarse,
    /// Nothing was counted in the window, so there is no mean.
    NothingCounted,
    /// No two readings in a row showed a request in the batch.
    NotBusy,
}

/// A signal that is not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct UnknownSignal {
    pub signal: Signal,
    pub why: Unknown,
}

/// The series a signal was taken from, by its usual name without `_total`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct SeenSeries {
    pub signal: Signal,
    pub series: String,
}

/// A gauge over the window.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct GaugeOverTime {
    /// Over time: between two readings the gauge is taken to go from one to the other in a straight line.
    pub mean: f64,
    pub min: f64,
    pub max: f64,
    pub readings: usize,
}

/// A mean of what was counted in the window: difference of the sums ÷ difference of the counts.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ServerMean {
    pub mean_ns: f64,
    pub count: u64,
}

/// What a server counts as a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum StepBasis {
    /// Steps from which at least one token came out: one that computes only a part of a prompt is not counted, and the next one that is counted
    /// takes its time too (vLLM). With several API servers each of them counts the steps that have tokens for it.
    StepsWithOutput,
    /// Passes of the model, of prompts and of decoding, each (SGLang).
    ForwardPasses,
    /// Calls that compute a batch of prompts, decoding, or both; drafts are not counted (llama.cpp).
    DecodeCalls,
    /// Batches, of prompts and of decoding, each (TGI).
    Batches,
}

/// Steps, while the server was busy throughout.
///
/// Busy: at two readings in a row every engine had at least one request in its batch; the time between them is busy time, and the steps counted
/// between them are its steps. An idle moment between two readings is not seen: then the true step is shorter than the mean here. `min_running` far
/// above one makes that unlikely.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct BusySteps {
    pub basis: StepBasis,
    pub busy_ns: f64,
    /// Engines that step beside each other, each with some of the requests.
    pub engines: usize,
    /// Fewest requests in the batch of any engine at any of these readings.
    pub min_running: f64,
    /// Of all engines.
    pub steps: u64,
    /// Busy time ÷ steps of one engine, on average.
    pub mean_step_ns: f64,
    /// Tokens of prompts and of outputs in a step.
    pub mean_step_tokens: Option<f64>,
    /// Steps that decode; all of them where the server does not tell them apart.
    pub decode_steps: u64,
    /// Tokens that came out of a step, or requests in it, on average: null where the server counts its tokens only when a request ends and counts no
    /// requests per step either.
    pub mean_batch: Option<f64>,
}

/// Drafted tokens.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ServerSpeculation {
    /// Steps that checked drafts.
    pub drafts: Option<u64>,
    pub draft_tokens: u64,
    pub accepted_tokens: u64,
    /// Accepted ÷ drafted tokens.
    pub acceptance_rate: f64,
    /// Tokens of a step that checked drafts: one, and the accepted ones.
    pub mean_length: Option<f64>,
}

/// What the page says of the server's configuration.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ServerConfiguration {
    pub kv_blocks: Option<u64>,
    pub block_tokens: Option<u64>,
    /// Of one engine, where there are several.
    pub kv_tokens: Option<u64>,
    pub max_model_len: Option<u64>,
    pub prefix_caching: Option<bool>,
}

/// How a question to a server, beside the measured requests, failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum FetchFailure {
    /// No address for the name.
    NoSuchName,
    /// Nothing listens there.
    Refused,
    /// No route, or a connection that broke.
    Unreachable,
    /// An expired, unknown or wrongly named certificate, or no TLS there.
    Tls,
    Timeout,
    /// An HTTP status that is not a success.
    Status(u16),
    /// A redirect; it is not followed.
    Redirect(u16),
    /// The answer is beyond the limit.
    TooLarge,
    /// Not HTTP.
    MalformedHttp,
    /// A whole answer that is none to this question: not JSON, no known series.
    NotUnderstood,
}

/// Failures of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct FetchFailures {
    pub failure: FetchFailure,
    pub count: usize,
}

/// A server's own view of a window. What it does not say is null, and `unknown` says why.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ServerMetrics {
    /// By the names of its series.
    pub dialect: Dialect,
    /// From the reading before to the reading after.
    pub window_ns: f64,
    /// Readings of the page, the first and the last included.
    pub readings: usize,
    /// The longest reading: a counter is as old as that at most.
    pub longest_reading_ns: f64,
    /// Lines that are not a sample, in all readings.
    pub broken_lines: u64,
    /// Readings that failed.
    pub failures: Vec<FetchFailures>,

    pub running: Option<GaugeOverTime>,
    pub waiting: Option<GaugeOverTime>,
    /// From 0 to 1; the mean over engines, where there are several.
    pub kv_use: Option<GaugeOverTime>,

    pub preemptions: Option<u64>,
    pub requests: Option<u64>,
    pub aborted_requests: Option<u64>,
    /// Computed and cached ones.
    pub prompt_tokens: Option<u64>,
    pub computed_prompt_tokens: Option<u64>,
    pub cached_prompt_tokens: Option<u64>,
    pub generation_tokens: Option<u64>,
    /// Cached ÷ all tokens of the prompts; by lookups where the server has no better counter.
    pub prefix_hit_rate: Option<f64>,

    pub ttft: Option<ServerMean>,
    pub e2e: Option<ServerMean>,
    pub queue: Option<ServerMean>,
    pub prefill: Option<ServerMean>,
    pub decode: Option<ServerMean>,
    pub inference: Option<ServerMean>,
    pub itl: Option<ServerMean>,
    pub tpot: Option<ServerMean>,
    /// Computing prompts, per computed token, and making tokens, per token and request: servers that count seconds and no latencies.
    pub prompt_ns_per_token: Option<f64>,
    pub predicted_ns_per_token: Option<f64>,

    /// Of the whole window, idle time included.
    pub steps: Option<u64>,
    pub busy_steps: Option<BusySteps>,
    pub speculation: Option<ServerSpeculation>,
    /// Estimates of the server, of one GPU.
    pub estimated_read_bytes: Option<f64>,
    pub estimated_written_bytes: Option<f64>,
    pub estimated_flops: Option<f64>,

    pub configuration: ServerConfiguration,
    pub seen: Vec<SeenSeries>,
    pub unknown: Vec<UnknownSignal>,
}
