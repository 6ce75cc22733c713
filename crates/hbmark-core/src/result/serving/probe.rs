//! Who answers at an address: what a server said of itself before it was measured.
//!
//! Enters: answers to a handful of questions. Leaves: addresses, the time of a connection, the dialect with what it was concluded from, models,
//! versions. A key is nowhere in it.

use serde::{Deserialize, Serialize};

use super::live::Dialect;
use super::server_metrics::{FetchFailure, Signal};

/// What a server was asked: the paths differ by dialect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Question {
    /// `/v1/models`
    Models,
    /// `/health`
    Health,
    /// `/version`
    Version,
    /// `/props`
    Props,
    /// `/server_info`
    ServerInfo,
    /// `/get_server_info`, its older name
    GetServerInfo,
    /// `/model_info`
    ModelInfo,
    /// `/info`
    Info,
    /// `/metrics`, or where it was said to be
    Metrics,
    /// `/prometheus/metrics`
    PrometheusMetrics,
}

/// What came back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Answered,
    Failed(FetchFailure),
    /// Other answers had taken all the time there is for a probe.
    NotAsked,
}

/// A question and its outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Asked {
    pub question: Question,
    pub outcome: Outcome,
}

/// What a dialect was concluded from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Clue {
    /// The owner of a model, as `/v1/models` has it.
    ModelOwner,
    /// The names of the series of its metrics page.
    MetricNames,
    /// `/props` with slots and a build.
    Props,
    /// `/server_info` with the fields of this server.
    ServerInfo,
    /// `/model_info` with the path of a model.
    ModelInfo,
    /// `/info` with the limits of a router.
    RouterInfo,
}

/// A clue and where it points.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct DialectEvidence {
    pub dialect: Dialect,
    pub clue: Clue,
}

/// An address of the name, and how it connects.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ProbedAddress {
    pub address: String,
    /// Time of the TCP handshake: the median over the connections made.
    pub connect_ns: Option<f64>,
    pub connections: usize,
    pub failure: Option<FetchFailure>,
}

/// A model that is served.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ServedModel {
    pub id: String,
    /// The path or name it was loaded from.
    pub root: Option<String>,
    /// The model an adapter belongs to.
    pub parent: Option<String>,
    pub owned_by: Option<String>,
    /// Tokens of the longest sequence that is served.
    pub max_model_len: Option<u64>,
    pub vocab_size: Option<u64>,
    /// Tokens of the longest sequence it was trained on.
    pub train_context: Option<u64>,
}

/// A page of metrics.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ProbedMetrics {
    /// Path below the root, or a URL.
    pub page: String,
    /// The signals it has now; a server may write a counter down with its first event only.
    pub signals: Vec<Signal>,
}

/// The two clocks of this machine: kernel stamps of packets are on the one, schedules on the other.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ClockCheck {
    pub span_ns: f64,
    pub readings: usize,
    /// The largest change of their offset between two readings in a row, beyond what reading them leaves open.
    pub largest_step_ns: f64,
    /// The change of their offset over the span, in parts per million of it.
    pub drift_ppm: f64,
    /// How far an offset may be from its reading: half the time of the reading, the largest one.
    pub uncertainty_ns: f64,
}

/// What a server said of itself. What it did not say is null.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Probe {
    /// Scheme, host, port and the path before `/v1`.
    pub root: String,
    pub key_sent: bool,
    /// Time of looking the name up; null where that failed, and for an address.
    pub resolve_ns: Option<f64>,
    pub addresses: Vec<ProbedAddress>,
    pub asked: Vec<Asked>,
    pub dialect: Dialect,
    /// All clues, those that point elsewhere too.
    pub evidence: Vec<DialectEvidence>,
    pub healthy: Option<bool>,
    pub version: Option<String>,
    /// The first of them; `model_count` is how many there are.
    pub models: Vec<ServedModel>,
    pub model_count: usize,
    /// Tokens of the longest sequence of the first model, by whichever answer has it.
    pub max_model_len: Option<u64>,
    /// Requests at a time.
    pub slots: Option<u64>,
    /// Tokens of the KV cache.
    pub kv_tokens: Option<u64>,
    /// Whether prompts are looked up in a prefix cache.
    pub prefix_caching: Option<bool>,
    pub metrics: Option<ProbedMetrics>,
    pub clock: ClockCheck,
}

impl Probe {
    /// Whether anything listens there.
    pub fn connects(&self) -> bool {
        self.addresses.iter().any(|address| address.connect_ns.is_some())
    }

    fn models_failure(&self) -> Option<FetchFailure> {
        self.asked.iter().find_map(|asked| match (asked.question, asked.outcome) {
            (Question::Models, Outcome::Failed(failure)) => Some(failure),
            _ => None,
        })
    }

    /// Whether no request can be answered: the key is refused, there is no TLS, or what answers is no server of models.
    pub fn is_no_server(&self) -> bool {
        matches!(
            self.models_failure(),
            Some(
                FetchFailure::Status(401 | 403)
                    | FetchFailure::Tls
                    | FetchFailure::MalformedHttp
                    | FetchFailure::NotUnderstood
            )
        )
    }

    /// Why the server does not say which models it has, and what to do; none where it does, and where it was not asked.
    pub fn models_problem(&self) -> Option<String> {
        let failure = self.models_failure()?;
        let why = match failure {
            FetchFailure::Status(status @ (401 | 403)) if self.key_sent => {
                format!("status {status}: the key that was sent is not accepted")
            }
            FetchFailure::Status(status @ (401 | 403)) => {
                format!("status {status}, and no key was sent (OPENAI_API_KEY, or --api-key-env NAME)")
            }
            FetchFailure::Status(404) => {
                "status 404; --url is the base URL, such as http://localhost:8000, and --served-model-name \
                 names a model that is not listed"
                    .to_owned()
            }
            FetchFailure::Status(status) => format!("status {status}"),
            FetchFailure::Redirect(status) => {
                format!("a redirect ({status}), which is not followed; give the URL it leads to")
            }
            FetchFailure::Tls => "no TLS connection: the certificate is not trusted (--ca-cert), or the \
                                  server speaks plain http (--url http://...)"
                .to_owned(),
            FetchFailure::MalformedHttp | FetchFailure::NotUnderstood => {
                "no list of models came; is this the port of an OpenAI-compatible server?".to_owned()
            }
            FetchFailure::Timeout => "no answer in time".to_owned(),
            FetchFailure::TooLarge => "the answer is too large".to_owned(),
            FetchFailure::NoSuchName | FetchFailure::Refused | FetchFailure::Unreachable => {
                "no connection".to_owned()
            }
        };
        Some(format!("{}/v1/models: {why}", self.root))
    }
}
