//! Causes: why a block does not count, a cell is invalid or was skipped, a point was not run.
//!
//! In files a cause is an object with a stable code, its numbers and a message
//! (`{"code": "foreign_load", "cores": 0.9, "message": "foreign load: ..."}`). Rules match on variants; messages are formatted here from the
//! numbers, and never read back. `docs/causes.md` has the table of codes, made of the comments here.
//!
//! Results of schema version 1 have a plain sentence instead. It is kept as [`Cause::Other`], which no rule matches. An unknown code is
//! refused, as an unknown status is.

use std::fmt;

#[cfg(test)]
use schemars::Schema;
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::serving::GateName;
use crate::model::Dtype;
use crate::units::{Bytes, BytesPerSecond, Nanos, counted};

/// A cause: a stable code with its numbers, and as text the sentence for a person.
#[derive(Debug, Clone, PartialEq, thiserror::Error, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(remote = "Self", tag = "code", rename_all = "snake_case")]
#[cfg_attr(test, schemars(transform = with_message))]
pub enum Cause {
    /// The GPU slowed itself down, for these of NVML's clock event reasons (`hw_slowdown`, `hw_thermal`, `hw_power_brake`, `sw_thermal`,
    /// `thermal_violation`), or the processor did for its heat (`cpu_thermal`).
    #[cfg_attr(test, schemars(extend("where" = "block")))]
    #[error("{}", reasons.iter().map(|reason| clock_event(reason)).collect::<Vec<_>>().join("; "))]
    Throttled { reasons: Vec<String> },
    /// Other processes kept so many CPU cores busy.
    #[cfg_attr(test, schemars(extend("where" = "block")))]
    #[error("foreign load: {cores:.1} cores busy with other processes")]
    ForeignLoad { cores: f64 },
    /// The hypervisor gave so many cores to others.
    #[cfg_attr(test, schemars(extend("where" = "block")))]
    #[error("steal: the hypervisor took {cores:.1} cores")]
    CpuSteal { cores: f64 },
    /// The control group's CPU quota held so many cores back.
    #[cfg_attr(test, schemars(extend("where" = "block")))]
    #[error("CPU quota: it held {cores:.1} cores back")]
    CpuQuota { cores: f64 },
    /// So many of the engine's threads, on average, were left out of its jobs because another program had their processor.
    #[cfg_attr(test, schemars(extend("where" = "block")))]
    #[error("{threads:.1} of the engine's threads were away: another program had their processor")]
    ThreadsAway { threads: f64 },
    /// A read of fixed bytes beside the block, over its usual time.
    #[cfg_attr(test, schemars(extend("where" = "block")))]
    #[error("reference read (canary) {:+.1} % off its usual time", (ratio - 1.0) * 100.0)]
    Canary {
        #[serde(deserialize_with = "or_infinite")]
        ratio: f64,
    },
    /// The power limit held the clocks back.
    #[cfg_attr(test, schemars(extend("where" = "condition")))]
    #[error("power capped")]
    PowerCapped,
    /// Another of NVML's clock event reasons.
    #[cfg_attr(test, schemars(extend("where" = "condition")))]
    #[error("{}", clock_event(reason))]
    ClockEvent { reason: String },
    /// Other processes have a context on the GPU.
    #[cfg_attr(test, schemars(extend("where" = "condition")))]
    #[error("{processes} other processes on the GPU")]
    GpuShared { processes: usize },
    /// The canary's time over the one when the ceilings were measured.
    #[cfg_attr(test, schemars(extend("where" = "condition")))]
    #[error(
        "read bandwidth beside the blocks {} since the ceilings were measured: read `% ceiling` with that in mind",
        if *ratio > 1.0 { "fell by a quarter or more" } else { "rose by a third or more" }
    )]
    BandwidthShifted {
        #[serde(deserialize_with = "or_infinite")]
        ratio: f64,
    },

    /// The repetitions of the read probe ranged further than on a steady machine.
    #[cfg_attr(test, schemars(extend("where" = "ceiling")))]
    #[error(
        "the read ceiling ranged from {} to {} over its repetitions",
        BytesPerSecond(*low_bytes_per_s), BytesPerSecond(*high_bytes_per_s)
    )]
    CeilingUnsteady { low_bytes_per_s: f64, high_bytes_per_s: f64 },
    /// The cell's floor and `% ceiling` rest on a disturbed ceiling, for this cause.
    #[cfg_attr(test, schemars(extend("where" = "flag")))]
    #[error("the floor and `% ceiling` rest on a ceiling that was disturbed: {cause}")]
    CeilingDisturbed { cause: Box<Cause> },

    /// Retries of a block ran out; `last` is the cause of the last one.
    #[cfg_attr(test, schemars(extend("where" = "cell")))]
    #[error("{} in a row rejected; the last: {last}", counted(*blocks, "block"))]
    RejectedInARow { blocks: usize, last: Box<Cause> },
    /// More than half of criterion's samples were rejected.
    #[cfg_attr(test, schemars(extend("where" = "cell")))]
    #[error("{rejected} of {} rejected; the last: {last}", counted(*blocks, "sample"))]
    MostRejected { rejected: usize, blocks: usize, last: Box<Cause> },
    /// Warm-up never became steady.
    #[cfg_attr(test, schemars(extend("where" = "cell")))]
    #[error("still drifting {:+.1} % after {warmup_s:.1} s of warm-up", drift * 100.0)]
    StillDrifting {
        #[serde(deserialize_with = "or_infinite")]
        drift: f64,
        warmup_s: f64,
    },
    /// The 95 % interval did not reach its target.
    #[cfg_attr(test, schemars(extend("where" = "cell")))]
    #[error(
        "95 % interval is ±{:.1} % after {} in {sampled_s:.0} s, wanted ±{:.0} %",
        half_width * 100.0, counted(*blocks, "block"), wanted * 100.0
    )]
    IntervalTooWide {
        #[serde(deserialize_with = "or_infinite")]
        half_width: f64,
        wanted: f64,
        blocks: usize,
        sampled_s: f64,
    },
    /// No interval can be computed.
    #[cfg_attr(test, schemars(extend("where" = "cell")))]
    #[error("an interval needs more than {}", counted(*blocks, "block"))]
    TooFewBlocks { blocks: usize },
    /// A signal ended the run after so many blocks of the cell.
    #[cfg_attr(test, schemars(extend("where" = "cell")))]
    #[error("the run was stopped after {blocks} of its blocks")]
    RunStopped { blocks: usize },
    /// A signal ended the run before the cell.
    #[cfg_attr(test, schemars(extend("where" = "cell")))]
    #[error("the run was stopped before it came to this cell")]
    NotReached,

    /// Identical steps gave different tokens.
    #[cfg_attr(test, schemars(extend("where" = "cell")))]
    #[error("identical steps gave different tokens: sequence {sequence} first {first}, then {then}")]
    TokensChanged { sequence: usize, first: u32, then: u32 },
    /// The engine gave another number of tokens than it has sequences.
    #[cfg_attr(test, schemars(extend("where" = "cell")))]
    #[error(
        "the engine gave {found} tokens for {wanted} sequences: it did not do the step that was asked for"
    )]
    TokenCount { wanted: usize, found: usize },
    /// The device's timeline and the host's clock saw different times of one block.
    #[cfg_attr(test, schemars(extend("where" = "cell")))]
    #[error(
        "the device timeline says the block took {}, the host's clock {}; times on this machine cannot be trusted",
        Nanos(*timeline_ns), Nanos(*host_ns)
    )]
    ClocksDisagree { timeline_ns: f64, host_ns: f64 },
    /// The marks of the timeline are not on the stream that does the work.
    #[cfg_attr(test, schemars(extend("where" = "cell")))]
    #[error(
        "the device timeline did not see the work: it says {} a step, the host's clock {}, and {bytes} have to be moved; its marks \
         are not on the stream that runs it",
        Nanos(*timeline_ns), Nanos(*host_ns)
    )]
    WorkUnseen { timeline_ns: f64, host_ns: f64, bytes: Bytes },
    /// Logits or tokens are not those of the reference.
    #[cfg_attr(test, schemars(extend("where" = "cell")))]
    #[error(
        "outputs are wrong: {check}{}",
        max_relative_error.map_or_else(String::new, |error| format!(" is {error:.1e} off"))
    )]
    WrongOutputs { check: String, max_relative_error: Option<f64> },
    /// Weights of another size than asked for were loaded.
    #[cfg_attr(test, schemars(extend("where" = "cell")))]
    #[error(
        "weights of another size: matrices of {found_bytes} were loaded where {wanted_bytes} were asked for, {:.2} times; \
         check --model, --revision and --dtype",
        found_bytes.as_f64() / wanted_bytes.as_f64()
    )]
    WeightsSize { found_bytes: Bytes, wanted_bytes: Bytes },
    /// So many bytes of the weights are stored in another type than asked for.
    #[cfg_attr(test, schemars(extend("where" = "cell")))]
    #[error(
        "weights in another storage: {bytes} of the matrices are {found} where {wanted} was asked for; check --dtype and what the \
         checkpoint holds"
    )]
    WeightsStorage { bytes: Bytes, found: String, wanted: String },

    /// Faster than the data sheet's bandwidth allows.
    #[cfg_attr(test, schemars(extend("where" = "cell")))]
    #[error(
        "{:.1} % of the data sheet's bandwidth: no step can move {bytes} that fast, so the timing or the data sheet row is wrong",
        share * 100.0
    )]
    AboveDatasheetBandwidth {
        #[serde(deserialize_with = "or_infinite")]
        share: f64,
        bytes: Bytes,
    },
    /// Faster than the data sheet's dense peak allows.
    #[cfg_attr(test, schemars(extend("where" = "cell")))]
    #[error(
        "{:.1} % of the data sheet's dense peak: no step computes that fast, so the timing or the data sheet row is wrong",
        share * 100.0
    )]
    AboveDatasheetPeak {
        #[serde(deserialize_with = "or_infinite")]
        share: f64,
    },
    /// Faster than the reads and copies of the probe allow.
    #[cfg_attr(test, schemars(extend("where" = "cell")))]
    #[error(
        "{:.0} % of the measured read ceiling: either the step did not do its work or the probe was disturbed",
        share * 100.0
    )]
    AboveReadCeiling {
        #[serde(deserialize_with = "or_infinite")]
        share: f64,
    },
    /// Another program's time is impossible for the model it was placed under; `impossible` is the cause.
    #[cfg_attr(test, schemars(extend("where" = "cell")))]
    #[error(
        "{impossible}; or the model, the storage, the batch or the number of GPUs is not that of the run"
    )]
    ImportMismatch { impossible: Box<Cause> },

    /// A flag says another model, storage, GPU or number of GPUs than the file of another program.
    #[cfg_attr(test, schemars(extend("where" = "cell")))]
    #[error("the file says {field} {file}, and {given} was given")]
    FileContradicts { field: String, file: String, given: String },
    /// Figures of one file that cannot all be true; `rule` names what they break (`percentile_order`, `throughput`,
    /// `repeated_blocks`...).
    #[cfg_attr(test, schemars(extend("where" = "cell")))]
    #[error("{detail}")]
    Inconsistent { rule: ConsistencyRule, detail: String },

    /// Faster than the measured read ceiling, by no more than its spread or a faster copy explains: the probe read slower than the step.
    #[cfg_attr(test, schemars(extend("where" = "flag")))]
    #[error("{:.0} % of the measured read ceiling: the probe read slower than this step", share * 100.0)]
    ReadCeilingLow {
        #[serde(deserialize_with = "or_infinite")]
        share: f64,
    },
    /// No matrix-product peak is known for the storage, so only the memory floor is held.
    #[cfg_attr(test, schemars(extend("where" = "flag")))]
    #[error("no matrix-product peak known for {dtype}: only the memory floor is held")]
    PeakUnknown { dtype: Dtype },
    /// Shares of the step that the bytes moved, and those that must be, explain.
    #[cfg_attr(test, schemars(extend("where" = "flag")))]
    #[error(
        "the bytes this engine moves explain {:.0} % of the step, the bytes it must move {:.0} %",
        moved_share * 100.0, ideal_share * 100.0
    )]
    EngineTraffic { moved_share: f64, ideal_share: f64 },
    /// The step's bytes are under `margin` times the last cache.
    #[cfg_attr(test, schemars(extend("where" = "flag")))]
    #[error(
        "working set of {bytes} is under {margin}x the last cache ({cache_bytes}): it is partly served from there"
    )]
    WorkingSetInCache { bytes: Bytes, cache_bytes: Bytes, margin: u64 },
    /// Above the data sheet's bandwidth, out of the cache.
    #[cfg_attr(test, schemars(extend("where" = "flag")))]
    #[error("{:.0} % of the data sheet's bandwidth, from the cache", share * 100.0)]
    CacheBandwidth {
        #[serde(deserialize_with = "or_infinite")]
        share: f64,
    },
    /// A predicted cell needs more than the device has.
    #[cfg_attr(test, schemars(extend("where" = "flag")))]
    #[error(
        "does not fit: needs {}, {:.0} % of the device's {}",
        more_than(*needed_bytes, device_bytes.as_f64() * usable_share), usable_share * 100.0, device_bytes.capacity()
    )]
    DoesNotFit { needed_bytes: Bytes, device_bytes: Bytes, usable_share: f64 },

    /// A step needs at least one sequence.
    #[cfg_attr(test, schemars(extend("where" = "cell")))]
    #[error("a step needs at least one sequence")]
    EmptyBatch,
    /// The engine replays decode steps alone.
    #[cfg_attr(test, schemars(extend("where" = "cell")))]
    #[error("{engine} replays decode steps alone; a prefill hides its launches")]
    DecodeOnly { engine: String },
    /// The batch is above the engine's limit; `limited_by` says what sets it, null for the engine.
    #[cfg_attr(test, schemars(extend("where" = "cell")))]
    #[error(
        "batch {batch} is above the engine's limit of {limit}{}",
        limited_by.as_ref().map_or_else(String::new, |by| format!(": {by}"))
    )]
    BatchAboveLimit {
        batch: usize,
        limit: usize,
        #[serde(default)]
        limited_by: Option<String>,
    },
    /// More positions than the model or the engine has; `limited_by` says what sets the limit, null for the model.
    #[cfg_attr(test, schemars(extend("where" = "cell")))]
    #[error("{}", exceeds_context(*positions, *limit, limited_by.as_deref()))]
    ExceedsContext { positions: usize, limit: usize, limited_by: Option<String> },
    /// The cell needs more memory than there is.
    #[cfg_attr(test, schemars(extend("where" = "cell")))]
    #[error("needs {needed_bytes} of memory, {available_bytes} is available")]
    NotEnoughMemory { needed_bytes: Bytes, available_bytes: Bytes },
    /// Not even the weights fit.
    #[cfg_attr(test, schemars(extend("where" = "cell")))]
    #[error(
        "weights need {needed_bytes}, {available_bytes} is available (at most {usable_percent} % is used)"
    )]
    WeightsDoNotFit { needed_bytes: Bytes, available_bytes: Bytes, usable_percent: u64 },
    /// The engine cannot do it.
    #[cfg_attr(test, schemars(extend("where" = "cell")))]
    #[error("the {engine} engine does not run {what}: {why}")]
    Unsupported { engine: String, what: String, why: String },
    /// The step cannot be recorded and replayed.
    #[cfg_attr(test, schemars(extend("where" = "cell")))]
    #[error("{engine} cannot replay this step: {why}")]
    NotReplayed { engine: String, why: String },
    /// An allocation failed; `during` is what was done before any step, or null.
    #[cfg_attr(test, schemars(extend("where" = "cell")))]
    #[error(
        "{}out of memory on {device}: {detail}",
        during.as_ref().map_or_else(String::new, |during| format!("while {during}: "))
    )]
    OutOfMemory { device: String, detail: String, during: Option<String> },
    /// The device failed.
    #[cfg_attr(test, schemars(extend("where" = "cell")))]
    #[error("{device} failed: {detail}")]
    DeviceFailed { device: String, detail: String },
    /// Any other error of an engine.
    #[cfg_attr(test, schemars(extend("where" = "cell")))]
    #[error("{detail}")]
    EngineFailed { detail: String },
    /// The process that held the device died or did not answer.
    #[cfg_attr(test, schemars(extend("where" = "cell, point")))]
    #[error("{detail}")]
    WorkerLost { detail: String },

    /// A check of the run did not pass: `injection_lag`, `realised_rate`, `littles_law`, `kv_accounting`, `token_count`, `served`,
    /// `sustained_load`, `engine`, `outputs`, `device` (a simulated one), `client_delay`, `client_processor`, or `keeps_up` (saturated).
    #[cfg_attr(test, schemars(extend("where" = "result")))]
    #[error("{detail}")]
    GateFailed { gate: GateName, detail: String },
    /// All requests arrive at once, so latencies depend on their number.
    #[cfg_attr(test, schemars(extend("where" = "result")))]
    #[error(
        "all requests arrive at once: throughput is the result, and how long one waits depends on how many there are"
    )]
    AllAtOnce,
    /// Queue time and TTFT rise over the window; in older results only: now `gate_failed` with `keeps_up`.
    #[cfg_attr(test, schemars(extend("where" = "result")))]
    #[error(
        "queue time and TTFT both rise from the start of the window to its end: they depend on how long one measures"
    )]
    LatenciesRise,
    /// A sweep ended at a value that missed an objective.
    #[cfg_attr(test, schemars(extend("where" = "point")))]
    #[error("the sweep ended at {variable} {value}: {why}")]
    SweepEnded { variable: String, value: f64, why: String },
    /// A signal came while the point was measured.
    #[cfg_attr(test, schemars(extend("where" = "point")))]
    #[error("stopped by {signal} while it was measured")]
    Interrupted { signal: String },

    /// A sentence without a code, of a result of schema version 1.
    #[cfg_attr(test, schemars(extend("where" = "any")))]
    #[error("{message}")]
    Other {
        #[serde(skip_serializing)]
        message: String,
    },
}

/// What figures of one file must hold among themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ConsistencyRule {
    /// Percentiles rise, between the smallest and the largest value.
    PercentileOrder,
    /// No mean, median or percentile is further from the mean than its standard deviation allows.
    Spread,
    /// A request ends after its first token.
    EndAfterFirstToken,
    /// Tokens or requests over the duration are the throughput.
    Throughput,
    /// No more requests complete than were sent, and failures are those that did not.
    RequestCount,
    /// No more requests are served than arrive.
    OfferedRate,
    /// Requests under way at once, by Little's law, are within the limit, and at least one while all wait.
    Concurrency,
    /// Lists of single requests give the summary.
    Lists,
    /// A block's intervals are no shorter than the device spans within them, and both have as many as it has steps.
    IntervalsAndSpans,
    /// The intervals of a block add up to its time on the host's clock.
    IntervalsAndWall,
    /// No two blocks are one measurement.
    RepeatedBlocks,
    /// Blocks have as many steps as the protocol asks for.
    BlockLength,
    /// A cell that counts has blocks that count.
    AcceptedBlocks,
    /// A decode step takes no longer than the prefill of its batch and context.
    Phases,
}

impl Cause {
    /// A sentence that no rule matches.
    pub fn other(message: impl Into<String>) -> Self {
        Self::Other { message: message.into() }
    }
}

/// Causes one after the other, for a person.
pub fn joined(causes: &[Cause]) -> String {
    causes.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// NVML's clock event reasons in words. Source: nvml.h, nvmlClocksEventReasons.
fn clock_event(reason: &str) -> String {
    let known = match reason {
        "hw_slowdown" => "hardware slowdown",
        "hw_thermal" => "hardware thermal slowdown",
        "hw_power_brake" => "hardware power brake",
        "sw_thermal" => "software thermal slowdown",
        "thermal_violation" => "thermal slowdown between two looks at the clocks",
        "cpu_thermal" => "thermal slowdown of the processor",
        "sw_power_cap" => "power capped",
        "gpu_idle" => "GPU idle",
        "application_clocks" => "clocks pinned by the application clock setting",
        "display_clocks" => "clocks limited by the display setting",
        "sync_boost" => "clocks held by another GPU of the sync boost group",
        "board_limit" => "board limit reached",
        unknown => {
            return match unknown.strip_prefix("unknown_") {
                Some(bit) => format!("unknown throttle bit {bit}"),
                None => format!("unknown throttle reason `{unknown}`"),
            };
        }
    };
    known.to_owned()
}

/// Both amounts, with digits enough to tell them apart: `72.05 GiB, above the usable 72.00 GiB`.
fn more_than(needed: Bytes, usable: f64) -> String {
    let gib = f64::from(1 << 30);
    let shown =
        |digits: usize| [needed.as_f64(), usable].map(|bytes| format!("{:.digits$} GiB", bytes / gib));
    let [needed, usable] =
        (1..6).map(shown).find(|[needed, usable]| needed != usable).unwrap_or_else(|| shown(9));
    format!("{needed}, above the usable {usable}")
}

fn exceeds_context(positions: usize, limit: usize, limited_by: Option<&str>) -> String {
    match limited_by {
        Some(by) => format!("needs {positions} positions, the limit is {limit} ({by})"),
        None => format!("needs {positions} positions and the model has {limit}"),
    }
}

/// JSON has no infinity: a share of a step that took no time is written as null.
fn or_infinite<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(deserializer)?.unwrap_or(f64::INFINITY))
}

/// Every cause is written with its words.
#[cfg(test)]
fn with_message(schema: &mut Schema) {
    for cause in schema.get_mut("oneOf").and_then(|causes| causes.as_array_mut()).into_iter().flatten() {
        cause["properties"]["message"] = serde_json::json!({ "type": "string" });
        if let Some(required) = cause["required"].as_array_mut()
            && !required.contains(&"message".into())
        {
            required.push("message".into());
        }
    }
}

impl Serialize for Cause {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Written<'a> {
            // The derived one, which has no words.
            #[serde(flatten, serialize_with = "Cause::serialize")]
            cause: &'a Cause,
            message: String,
        }
        serde::Serialize::serialize(&Written { cause: self, message: self.to_string() }, serializer)
    }
}

impl<'de> Deserialize<'de> for Cause {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Saved;
        impl<'de> Visitor<'de> for Saved {
            type Value = Cause;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a cause with its code, or a sentence")
            }
            fn visit_str<E>(self, sentence: &str) -> Result<Cause, E> {
                Ok(Cause::other(sentence))
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Cause, A::Error> {
                Cause::deserialize(MapAccessDeserializer::new(map))
            }
        }
        deserializer.deserialize_any(Saved)
    }
}

#[cfg(test)]
mod tests;
