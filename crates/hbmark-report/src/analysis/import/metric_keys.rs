//! The dictionary: which foreign key means which of our metrics, in which unit, and what to mind.
//!
//! Enters: nothing. Leaves: [`ALIASES`], which the readers map by and which `hbmark import --aliases` prints: what is printed is what is
//! applied. Names collide between programs (AIPerf's `inter_token_latency` is our TPOT), so a key means something only beside its
//! format.

use std::fmt;

use ForeignUnit::{InFile, Milliseconds, Nanoseconds, PerSecond, Seconds};
use Shape::{Computed, Group, One, Suffix};
use Statistic::{Mean, Median, Single};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use {ForeignFormat as F, Metric as M};

use super::ForeignFormat;

/// What was measured, in our words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// One prefill of a whole batch of prompts.
    PrefillStep,
    /// One decode step of a whole batch: the time per output token of each of its sequences.
    DecodeStep,
    /// Per request: (last token − first token) / (tokens − 1).
    Tpot,
    /// Per request: (last token − arrival) / tokens; not comparable with TPOT.
    TpotWithFirst,
    /// Per gap between tokens, or between chunks of several.
    Itl,
    Ttft,
    E2e,
    OutputThroughput,
    InputThroughput,
    TotalThroughput,
    RequestThroughput,
    Goodput,
}

impl Metric {
    /// The heading of a table.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            Self::PrefillStep => "prefill step",
            Self::DecodeStep => "decode step",
            Self::Tpot => "TPOT",
            Self::TpotWithFirst => "TPOT with first",
            Self::Itl => "ITL",
            Self::Ttft => "TTFT",
            Self::E2e => "E2E",
            Self::OutputThroughput => "out tok/s",
            Self::InputThroughput => "in tok/s",
            Self::TotalThroughput => "all tok/s",
            Self::RequestThroughput => "req/s",
            Self::Goodput => "good req/s",
        }
    }

    /// Whether it is a time, in nanoseconds, and not a rate per second.
    #[must_use]
    pub fn is_time(self) -> bool {
        !matches!(
            self,
            Self::OutputThroughput
                | Self::InputThroughput
                | Self::TotalThroughput
                | Self::RequestThroughput
                | Self::Goodput
        )
    }
}

/// Which number of a distribution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(into = "String", try_from = "String")]
#[schemars(with = "String")]
pub enum Statistic {
    Mean,
    Median,
    /// In tenths of a percent: p99.9 is 999.
    Percentile(u16),
    StandardDeviation,
    Min,
    Max,
    /// The only figure there is.
    Single,
}

impl Statistic {
    /// The statistic that a foreign word means: `avg`, `p99`, GuideLLM's `p999`...
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        match word {
            "mean" | "avg" | "average" => Some(Self::Mean),
            "median" | "p50" => Some(Self::Median),
            "std" | "stddev" | "std_dev" | "stdev" => Some(Self::StandardDeviation),
            "min" | "minimum" => Some(Self::Min),
            "max" | "maximum" => Some(Self::Max),
            "single" => Some(Self::Single),
            _ => Self::percentile(word.strip_prefix('p').or_else(|| word.strip_prefix('P'))?),
        }
    }

    /// `99`, `99.9`, and GuideLLM's `001` and `999` for a thousandth at either end.
    pub(super) fn percentile(digits: &str) -> Option<Self> {
        match digits {
            "001" => return Some(Self::Percentile(1)),
            "999" => return Some(Self::Percentile(999)),
            _ => {}
        }
        let percent: f64 = digits.parse().ok()?;
        if !(percent > 0.0 && percent < 100.0) {
            return None;
        }
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 0 and 1000")]
        let tenths = (percent * 10.0).round() as u16;
        Some(if tenths == 500 { Self::Median } else { Self::Percentile(tenths) })
    }
}

impl fmt::Display for Statistic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mean => f.pad("mean"),
            Self::Median => f.pad("median"),
            Self::Percentile(tenths) if tenths % 10 == 0 => f.pad(&format!("p{}", tenths / 10)),
            Self::Percentile(tenths) => f.pad(&format!("p{}.{}", tenths / 10, tenths % 10)),
            Self::StandardDeviation => f.pad("std"),
            Self::Min => f.pad("min"),
            Self::Max => f.pad("max"),
            Self::Single => f.pad("single"),
        }
    }
}

impl From<Statistic> for String {
    fn from(statistic: Statistic) -> Self {
        statistic.to_string()
    }
}

impl TryFrom<String> for Statistic {
    type Error = String;
    fn try_from(word: String) -> Result<Self, String> {
        Self::parse(&word).ok_or_else(|| format!("`{word}` is no statistic"))
    }
}

/// Where the statistics of a metric stand in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// One key each: `{stat}_tpot_ms`; the alias has what follows the statistic.
    Suffix,
    /// An object of statistics.
    Group,
    /// One number.
    One(Statistic),
    /// Computed from several keys, as the conversion says; its reader does it.
    Computed,
}

/// The unit of a foreign number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ForeignUnit {
    Seconds,
    Milliseconds,
    Nanoseconds,
    PerSecond,
    /// Stands beside the number.
    InFile,
}

impl ForeignUnit {
    /// What a number is multiplied with to become nanoseconds, or per second; `None` where the file has to say.
    #[must_use]
    pub fn scale(self) -> Option<f64> {
        match self {
            Self::Seconds => Some(1e9),
            Self::Milliseconds => Some(1e6),
            Self::Nanoseconds | Self::PerSecond => Some(1.0),
            Self::InFile => None,
        }
    }

    /// The word for the table of aliases.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Seconds => "s",
            Self::Milliseconds => "ms",
            Self::Nanoseconds => "ns",
            Self::PerSecond => "1/s",
            Self::InFile => "in the file",
        }
    }
}

/// One line of the dictionary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alias {
    pub format: ForeignFormat,
    /// The foreign key; dots go down into objects, `{stat}` stands for a statistic.
    pub key: &'static str,
    pub metric: Metric,
    pub shape: Shape,
    pub unit: ForeignUnit,
    /// How the number becomes ours, where that is more than a unit.
    pub conversion: &'static str,
    /// What to mind; empty where name and meaning agree with ours.
    pub caveat: &'static str,
}

/// The lines of one format.
pub fn of(format: ForeignFormat) -> impl Iterator<Item = &'static Alias> {
    ALIASES.iter().filter(move |alias| alias.format == format)
}

const fn row(
    format: ForeignFormat,
    key: &'static str,
    metric: Metric,
    shape: Shape,
    unit: ForeignUnit,
    conversion: &'static str,
    caveat: &'static str,
) -> Alias {
    Alias { format, key, metric, shape, unit, conversion, caveat }
}

const CLIENT: &str = "timed by the client: network and HTTP are in it";
const CHUNKS: &str =
    "per chunk as the client saw it: with speculative decoding or bundled tokens it is not TPOT";
const SENT: &str = "from sending the request, not from its scheduled arrival: a late client hides queueing";
const ENGINE: &str = "the engine's own clock: client and network are not in it";

/// Every alias.
pub const ALIASES: &[Alias] = &[
    row(F::VllmServe, "{stat}_tpot_ms", M::Tpot, Suffix, Milliseconds, "", CLIENT),
    row(F::VllmServe, "{stat}_itl_ms", M::Itl, Suffix, Milliseconds, "", CHUNKS),
    row(F::VllmServe, "{stat}_ttft_ms", M::Ttft, Suffix, Milliseconds, "", SENT),
    row(F::VllmServe, "{stat}_e2el_ms", M::E2e, Suffix, Milliseconds, "", SENT),
    row(F::VllmServe, "{stat}_latency_ms", M::E2e, Suffix, Milliseconds, "", "the name of 2024 for e2el"),
    row(F::VllmServe, "output_throughput", M::OutputThroughput, One(Single), PerSecond, "", ""),
    row(F::VllmServe, "input_throughput", M::InputThroughput, One(Single), PerSecond, "", ""),
    row(F::VllmServe, "total_token_throughput", M::TotalThroughput, One(Single), PerSecond, "", ""),
    row(F::VllmServe, "request_throughput", M::RequestThroughput, One(Single), PerSecond, "", ""),
    row(
        F::VllmServe,
        "request_goodput",
        M::Goodput,
        One(Single),
        PerSecond,
        "",
        "older files write `request_goodput:`",
    ),
    row(F::VllmSummary, "{stat} TPOT (ms)", M::Tpot, Suffix, Milliseconds, "", CLIENT),
    row(F::VllmSummary, "{stat} ITL (ms)", M::Itl, Suffix, Milliseconds, "", CHUNKS),
    row(F::VllmSummary, "{stat} TTFT (ms)", M::Ttft, Suffix, Milliseconds, "", SENT),
    row(F::VllmSummary, "Tput (req/s)", M::RequestThroughput, One(Single), PerSecond, "", ""),
    row(F::VllmSummary, "Output Tput (tok/s)", M::OutputThroughput, One(Single), PerSecond, "", ""),
    row(F::VllmSummary, "Total Tput (tok/s)", M::TotalThroughput, One(Single), PerSecond, "", ""),
    row(
        F::VllmLatency,
        "avg_latency",
        M::E2e,
        One(Mean),
        Seconds,
        "",
        "a whole batch: one prefill and all its decode steps; the file says neither batch nor lengths",
    ),
    row(
        F::VllmLatency,
        "percentiles",
        M::E2e,
        Group,
        Seconds,
        "",
        "keys are bare percents: `50` is the median",
    ),
    row(F::VllmThroughput, "requests_per_second", M::RequestThroughput, One(Single), PerSecond, "", ""),
    row(
        F::VllmThroughput,
        "tokens_per_second",
        M::TotalThroughput,
        One(Single),
        PerSecond,
        "",
        "prompt and output tokens together, not output alone",
    ),
    row(F::VllmEngine, "ttft", M::Ttft, Group, InFile, "first_token_ts − queued_ts", ENGINE),
    row(
        F::VllmEngine,
        "tpot",
        M::Tpot,
        Group,
        InFile,
        "(last_token_ts − first_token_ts) / (output_toks − 1)",
        ENGINE,
    ),
    row(
        F::VllmEngine,
        "itl",
        M::Itl,
        Group,
        InFile,
        "",
        "of the Prometheus page: sum / count of vllm:inter_token_latency_seconds (older: time_per_output_token_seconds)",
    ),
    row(F::VllmEngine, "e2e", M::E2e, Group, InFile, "last_token_ts − queued_ts", ENGINE),
    row(
        F::VllmEngine,
        "output_rate",
        M::OutputThroughput,
        One(Mean),
        InFile,
        "",
        "tokens over the time from the first request to the last token, or the mean of gen_throughput",
    ),
    row(
        F::VllmEngine,
        "input_rate",
        M::InputThroughput,
        One(Mean),
        InFile,
        "",
        "as output_rate, of prompt tokens",
    ),
    row(F::VllmEngine, "request_rate", M::RequestThroughput, One(Single), InFile, "", ""),
    row(
        F::SglangOneBatch,
        "prefill_latency",
        M::PrefillStep,
        One(Single),
        Seconds,
        "",
        "one repetition after a warm-up",
    ),
    row(
        F::SglangOneBatch,
        "median_decode_latency",
        M::DecodeStep,
        One(Median),
        Seconds,
        "",
        "the median over a growing context",
    ),
    row(F::SglangOneBatch, "prefill_throughput", M::InputThroughput, One(Single), PerSecond, "", ""),
    row(F::SglangOneBatch, "median_decode_throughput", M::OutputThroughput, One(Median), PerSecond, "", ""),
    row(
        F::SglangOneBatch,
        "output_throughput",
        M::DecodeStep,
        Computed,
        PerSecond,
        "batch_size / output_throughput",
        "of bench_one_batch_server: (latency − ttft) / output_len, the server's work in it",
    ),
    row(
        F::SglangOneBatch,
        "last_ttft",
        M::Ttft,
        One(Single),
        Seconds,
        "",
        "of the last request of the batch",
    ),
    row(F::SglangOneBatch, "total_latency", M::E2e, One(Single), Seconds, "", "of the whole batch"),
    row(F::SglangOneBatch, "latency", M::E2e, One(Single), Seconds, "", "of the whole batch"),
    row(
        F::SglangOneBatch,
        "overall_throughput",
        M::TotalThroughput,
        One(Single),
        PerSecond,
        "",
        "prompt and output tokens together",
    ),
    row(F::SglangServing, "{stat}_tpot_ms", M::Tpot, Suffix, Milliseconds, "", CLIENT),
    row(F::SglangServing, "{stat}_itl_ms", M::Itl, Suffix, Milliseconds, "", CHUNKS),
    row(F::SglangServing, "{stat}_ttft_ms", M::Ttft, Suffix, Milliseconds, "", SENT),
    row(F::SglangServing, "{stat}_e2e_latency_ms", M::E2e, Suffix, Milliseconds, "", SENT),
    row(F::SglangServing, "output_throughput", M::OutputThroughput, One(Single), PerSecond, "", ""),
    row(F::SglangServing, "input_throughput", M::InputThroughput, One(Single), PerSecond, "", ""),
    row(F::SglangServing, "total_throughput", M::TotalThroughput, One(Single), PerSecond, "", ""),
    row(F::SglangServing, "request_throughput", M::RequestThroughput, One(Single), PerSecond, "", ""),
    row(
        F::LlamaBench,
        "avg_ns (n_gen > 0)",
        M::DecodeStep,
        Computed,
        Nanoseconds,
        "avg_ns / n_gen",
        "the mean over a context that grows by n_gen; batch 1; no sampling",
    ),
    row(
        F::LlamaBench,
        "samples_ns (n_gen > 0)",
        M::DecodeStep,
        Computed,
        Nanoseconds,
        "median(samples_ns) / n_gen",
        "each sample is a whole test of n_gen tokens",
    ),
    row(
        F::LlamaBench,
        "avg_ns (n_prompt > 0)",
        M::PrefillStep,
        Computed,
        Nanoseconds,
        "",
        "in pieces of n_ubatch tokens; logits of the last position",
    ),
    row(
        F::LlamaBench,
        "avg_ns (both > 0)",
        M::E2e,
        Computed,
        Nanoseconds,
        "",
        "a prompt and its tokens together",
    ),
    row(F::LlamaBench, "avg_ts (n_gen > 0)", M::OutputThroughput, Computed, PerSecond, "", ""),
    row(F::LlamaBench, "avg_ts (n_prompt > 0)", M::InputThroughput, Computed, PerSecond, "", ""),
    row(
        F::LlamaBench,
        "t/s (tgN)",
        M::DecodeStep,
        Computed,
        PerSecond,
        "1 / t/s",
        "the Markdown table has rates alone: the inverse of a mean rate is a little under the mean time",
    ),
    row(
        F::LlamaBench,
        "t/s (ppN)",
        M::PrefillStep,
        Computed,
        PerSecond,
        "N / t/s",
        "from the mean rate, as for tgN",
    ),
    row(
        F::LlamaBatchedBench,
        "t_tg",
        M::DecodeStep,
        Computed,
        Seconds,
        "t_tg / tg",
        "one run, no repetitions; the mean over a context that grows by tg",
    ),
    row(
        F::LlamaBatchedBench,
        "t_pp",
        M::PrefillStep,
        One(Single),
        Seconds,
        "",
        "one run; with a shared prompt only one is computed",
    ),
    row(
        F::LlamaBatchedBench,
        "speed_tg",
        M::OutputThroughput,
        One(Single),
        PerSecond,
        "",
        "of all sequences",
    ),
    row(F::LlamaBatchedBench, "speed_pp", M::InputThroughput, One(Single), PerSecond, "", "of all sequences"),
    row(
        F::Aiperf,
        "inter_token_latency",
        M::Tpot,
        Group,
        InFile,
        "",
        "called ITL there; it is one number per request, so our TPOT",
    ),
    row(
        F::Aiperf,
        "inter_chunk_latency",
        M::Itl,
        Group,
        InFile,
        "",
        "called ICL there; the gaps, so our ITL",
    ),
    row(F::Aiperf, "time_to_first_token", M::Ttft, Group, InFile, "", SENT),
    row(F::Aiperf, "request_latency", M::E2e, Group, InFile, "", SENT),
    row(F::Aiperf, "output_token_throughput", M::OutputThroughput, One(Mean), InFile, "", ""),
    row(F::Aiperf, "request_throughput", M::RequestThroughput, One(Single), InFile, "", ""),
    row(F::Aiperf, "goodput", M::Goodput, One(Single), InFile, "", ""),
    row(
        F::AiperfRecords,
        "inter_token_latency",
        M::Tpot,
        Group,
        InFile,
        "statistics over the records",
        "called ITL there; it is one number per request, so our TPOT",
    ),
    row(
        F::AiperfRecords,
        "inter_chunk_latency",
        M::Itl,
        Group,
        InFile,
        "statistics over the gaps of all records",
        "called ICL there; the gaps, so our ITL",
    ),
    row(F::AiperfRecords, "time_to_first_token", M::Ttft, Group, InFile, "statistics over the records", SENT),
    row(F::AiperfRecords, "request_latency", M::E2e, Group, InFile, "statistics over the records", SENT),
    row(
        F::AiperfRecords,
        "output_token_throughput",
        M::OutputThroughput,
        One(Mean),
        InFile,
        "Σ output tokens / (last end − first start)",
        "",
    ),
    row(
        F::AiperfRecords,
        "request_throughput",
        M::RequestThroughput,
        One(Single),
        InFile,
        "records / (last end − first start)",
        "",
    ),
    row(
        F::GenaiPerfAnalyze,
        "{stat} Inter Token Latency (ms)",
        M::Tpot,
        Suffix,
        Milliseconds,
        "",
        "called ITL there; one number per request, so our TPOT; one percentile alone",
    ),
    row(F::GenaiPerfAnalyze, "{stat} Time To First Token (ms)", M::Ttft, Suffix, Milliseconds, "", SENT),
    row(F::GenaiPerfAnalyze, "{stat} Request Latency (ms)", M::E2e, Suffix, Milliseconds, "", SENT),
    row(
        F::GenaiPerfAnalyze,
        "{stat} Output Token Throughput (tokens/sec)",
        M::OutputThroughput,
        Suffix,
        PerSecond,
        "",
        "",
    ),
    row(
        F::GenaiPerfAnalyze,
        "Request Throughput (requests/sec)",
        M::RequestThroughput,
        One(Single),
        PerSecond,
        "",
        "",
    ),
    row(F::InferencePerf, "successes.latency.time_per_output_token", M::Tpot, Group, Seconds, "", CLIENT),
    row(
        F::InferencePerf,
        "successes.latency.normalized_time_per_output_token",
        M::TpotWithFirst,
        Group,
        Seconds,
        "",
        "the whole request over its output tokens",
    ),
    row(F::InferencePerf, "successes.latency.inter_token_latency", M::Itl, Group, Seconds, "", CHUNKS),
    row(F::InferencePerf, "successes.latency.time_to_first_token", M::Ttft, Group, Seconds, "", SENT),
    row(F::InferencePerf, "successes.latency.request_latency", M::E2e, Group, Seconds, "", SENT),
    row(
        F::InferencePerf,
        "successes.throughput.output_tokens_per_sec",
        M::OutputThroughput,
        One(Single),
        PerSecond,
        "",
        "",
    ),
    row(
        F::InferencePerf,
        "successes.throughput.input_tokens_per_sec",
        M::InputThroughput,
        One(Single),
        PerSecond,
        "",
        "",
    ),
    row(
        F::InferencePerf,
        "successes.throughput.total_tokens_per_sec",
        M::TotalThroughput,
        One(Single),
        PerSecond,
        "",
        "prompt and output tokens together",
    ),
    row(
        F::InferencePerf,
        "successes.throughput.requests_per_sec",
        M::RequestThroughput,
        One(Single),
        PerSecond,
        "",
        "",
    ),
    row(
        F::InferencePerf,
        "successes.time_per_output_token",
        M::Itl,
        Group,
        Seconds,
        "",
        "of the server's metrics: a histogram of gaps, so our ITL, although the client's figure of that name is TPOT",
    ),
    row(F::InferencePerf, "successes.time_to_first_token", M::Ttft, Group, Seconds, "", ENGINE),
    row(F::InferencePerf, "successes.request_latency", M::E2e, Group, Seconds, "", ENGINE),
    row(
        F::InferencePerf,
        "successes.rate",
        M::RequestThroughput,
        One(Mean),
        PerSecond,
        "",
        "of the server's metrics",
    ),
    row(
        F::InferencePerf,
        "successes.output_len.rate",
        M::OutputThroughput,
        One(Mean),
        PerSecond,
        "",
        "of the server's metrics",
    ),
    row(
        F::InferencePerf,
        "successes.prompt_len.rate",
        M::InputThroughput,
        One(Mean),
        PerSecond,
        "",
        "of the server's metrics",
    ),
    row(
        F::Guidellm,
        "inter_token_latency_ms",
        M::Tpot,
        Group,
        Milliseconds,
        "",
        "called ITL there; (last − first) / (tokens − 1) per request, so our TPOT",
    ),
    row(
        F::Guidellm,
        "time_per_output_token_ms",
        M::TpotWithFirst,
        Group,
        Milliseconds,
        "",
        "called TPOT there; the first token's wait is spread over all tokens",
    ),
    row(F::Guidellm, "time_to_first_token_ms", M::Ttft, Group, Milliseconds, "", CLIENT),
    row(F::Guidellm, "request_latency", M::E2e, Group, Seconds, "", CLIENT),
    row(
        F::Guidellm,
        "output_tokens_per_second",
        M::OutputThroughput,
        Group,
        PerSecond,
        "",
        "over moments of unlike length, so that no figure of it is tokens over time",
    ),
    row(
        F::Guidellm,
        "requests_per_second × tokens",
        M::OutputThroughput,
        Computed,
        PerSecond,
        "mean requests_per_second × mean tokens of a request",
        "",
    ),
    row(
        F::Guidellm,
        "tokens_per_second",
        M::TotalThroughput,
        Group,
        PerSecond,
        "",
        "prompt and output tokens together, over moments of unlike length",
    ),
    row(F::Guidellm, "requests_per_second", M::RequestThroughput, Group, PerSecond, "", ""),
    row(F::OptimumBenchmark, "per_token.latency", M::DecodeStep, Group, Seconds, "", "Python's loop in it"),
    row(F::OptimumBenchmark, "prefill.latency", M::PrefillStep, Group, Seconds, "", "Python's loop in it"),
    row(
        F::OptimumBenchmark,
        "decode.throughput.value",
        M::OutputThroughput,
        One(Mean),
        PerSecond,
        "",
        "of all sequences of the batch",
    ),
    row(
        F::TrtllmBench,
        "streaming_metrics.tpot_percentiles",
        M::Tpot,
        Group,
        Milliseconds,
        "",
        "older versions report it only with --streaming",
    ),
    row(F::TrtllmBench, "streaming_metrics.ttft_percentiles", M::Ttft, Group, Milliseconds, "", ""),
    row(F::TrtllmBench, "performance.request_latency_percentiles_ms", M::E2e, Group, Milliseconds, "", ""),
    row(
        F::TrtllmBench,
        "performance.system_output_throughput_tok_s",
        M::OutputThroughput,
        One(Single),
        PerSecond,
        "",
        "",
    ),
    row(
        F::TrtllmBench,
        "performance.system_total_throughput_tok_s",
        M::TotalThroughput,
        One(Single),
        PerSecond,
        "",
        "prompt and output tokens together",
    ),
    row(
        F::TrtllmBench,
        "performance.request_throughput_req_s",
        M::RequestThroughput,
        One(Single),
        PerSecond,
        "",
        "",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_has_aliases_and_no_key_means_two_things() {
        for format in ForeignFormat::ALL {
            assert!(of(*format).count() >= 2, "{}", format.name());
        }
        for (index, alias) in ALIASES.iter().enumerate() {
            let twice = ALIASES[..index].iter().any(|a| (a.format, a.key) == (alias.format, alias.key));
            assert!(!twice, "{} {}", alias.format.name(), alias.key);
        }
    }

    #[test]
    fn statistics_are_known_under_every_name_and_round_trip() {
        let parsed = |word| Statistic::parse(word);
        assert_eq!(parsed("p99"), Some(Statistic::Percentile(990)));
        assert_eq!(parsed("P99"), Some(Statistic::Percentile(990)));
        assert_eq!(parsed("p99.9"), parsed("p999"), "GuideLLM leaves the point out");
        assert_eq!(parsed("p001").unwrap().to_string(), "p0.1");
        assert_eq!(parsed("p50"), Some(Median));
        for word in ["p", "p0", "p100", "pNaN", "pinf", "count", "sum", "p-1"] {
            assert_eq!(parsed(word), None, "{word}");
        }
        for statistic in [Mean, Median, Single, Statistic::Percentile(999), Statistic::Max] {
            assert_eq!(Statistic::parse(&statistic.to_string()), Some(statistic));
        }
    }
}
