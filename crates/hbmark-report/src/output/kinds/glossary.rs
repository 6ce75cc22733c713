//! Every word of a report, defined once.

use serde::Serialize;

use crate::output::document::{Block, Document, words};
use crate::output::{Kind, OutputError};

/// One definition.
#[derive(Debug, Clone, Copy, Serialize)]
struct Entry {
    term: &'static str,
    formula: &'static str,
    meaning: &'static str,
}

const fn entry(term: &'static str, formula: &'static str, meaning: &'static str) -> Entry {
    Entry { term, formula, meaning }
}

const ENTRIES: &[Entry] = &[
    entry("prefill", "", "the step that reads a prompt: many tokens per sequence, an empty cache before it"),
    entry("decode", "", "the step that makes one token per sequence on top of a cache"),
    entry("context", "", "decode: positions in the KV cache before the step; prefill: tokens of the prompt"),
    entry(
        "pinned context",
        "",
        "every timed decode step rewrites the same position, so all steps read the same KV",
    ),
    entry(
        "step time D",
        "device end − device start",
        "the span of one step on the device's own timeline: CUDA events, or the monotonic clock",
    ),
    entry(
        "interval I",
        "step end(i) − step end(i−1)",
        "what a client sees between tokens of a steady decode",
    ),
    entry(
        "TPOT",
        "I, typical",
        "time per output token: the geometric mean of block means of I, with its 95 % interval",
    ),
    entry("host bubble G", "I − D", "time in which the device waited for the host"),
    entry(
        "launch cost",
        "TPOT eager − TPOT replayed",
        "what launching candle's kernels one by one adds to the same kernels replayed from a CUDA graph; % launches is its share of the eager step",
    ),
    entry("TTFT", "t1 − s", "time to first token, from the scheduled arrival s"),
    entry("ITL", "t(i) − t(i−1)", "inter-token latency, pooled over tokens"),
    entry("E2E", "tN − s", "whole latency of a request; a failed one counts as infinite"),
    entry("block", "", "at least 20 decode steps and 100 ms; the unit of every interval"),
    entry("±", "√(high/low) − 1", "half-width of the 95 % t-interval on log block means, relative"),
    entry("percentile", "x(⌈p·n⌉)", "nearest-rank; p99 needs 1,000 steps and p99.9 10,000, otherwise null"),
    entry(
        "weights",
        "",
        "bytes of every matrix once per step as stored, with scales, biases, norms and head; an untied embedding counts as its B rows",
    ),
    entry(
        "KV",
        "Σ 2·min(context, window)·kv_heads·head_dim·size",
        "bytes of cache a step reads and writes, over sequences and layers",
    ),
    entry("ideal bytes", "weights + KV + other", "what the step must move"),
    entry(
        "moved",
        "",
        "bytes as implemented: what this engine's code really moves, copies and casts included",
    ),
    entry("ceiling", "", "read bandwidth measured in the same run by our own read-only probe"),
    entry("data sheet", "", "the vendor's bandwidth and dense peaks, each row with its source"),
    entry(
        "predicted",
        "max(bytes / bandwidth, FLOPs / peak)",
        "the floor of a step by the measured ceilings; by the data sheet in `predict`",
    ),
    entry(
        "floor",
        "",
        "the least time a step can take: by the data sheet's bandwidth and peak, or by those measured in this run",
    ),
    entry("rung", "", "one time on a ladder: a floor, or an engine's TPOT (decode) or step (prefill)"),
    entry(
        "ladder",
        "data sheet → ceiling → native → stock",
        "the rungs of one phase, batch and context, from what the device promises to what was measured",
    ),
    entry(
        "adds",
        "Σ adds = time of the last rung",
        "what a rung adds to those above it; a floor at a second dtype adds what it is over the first floor, and the rung after it the rest",
    ),
    entry(
        "share",
        "adds / slowest measured time",
        "of a ladder's rung; of an operation, its time over the sum of all",
    ),
    entry(
        "operation",
        "",
        "a part of a step that was timed apart, in an extra pass whose times never reach a step's",
    ),
    entry(
        "% ceiling (MBU)",
        "ideal bytes / (time · bandwidth)",
        "share of the ceiling that useful bytes reach; above the data sheet it is invalid unless the set fits the cache",
    ),
    entry(
        "MFU",
        "FLOPs / (time · dense peak)",
        "share of the peak that useful arithmetic reaches; the dtype of the peak is named",
    ),
    entry(
        "bound",
        "",
        "memory or compute, whichever floor is higher; overhead where the higher floor explains less than half of the time",
    ),
    entry(
        "canary",
        "",
        "a read of fixed bytes beside each block; if it is slow, so is the machine, and the block is rejected",
    ),
    entry("round", "", "of a comparison: one fresh process of A and one of B, in random order; its unit"),
    entry(
        "B/A",
        "exp(mean ln(B/A))",
        "geometric mean over rounds of the ratio of medians: below 1, B is faster",
    ),
    entry(
        "p, p (Holm)",
        "share of sign patterns with |Σ ln(B/A)| at least that seen",
        "the chance of such a difference if A and B were the same; corrected for the number of cells",
    ),
    entry(
        "detectable",
        "(t(1 − α/2) + t(0.8))·sd/√rounds",
        "the difference that so many rounds of this spread find eight times of ten, at the corrected level",
    ),
    entry(
        "A/A floor",
        "",
        "the end further from 1 of the interval of A against itself: no smaller effect is called",
    ),
    entry(
        "FASTER, SLOWER",
        "",
        "of B: corrected p at most 0.05, an interval without 1, an effect beyond the A/A floor",
    ),
    entry("EQUIVALENT", "", "both ends of the interval lie within the margin, 1 % unless asked otherwise"),
    entry("INCONCLUSIVE", "", "neither a difference nor its absence was shown"),
    entry("ok", "", "measured, and every gate passed"),
    entry(
        "not converged",
        "",
        "measured; the interval did not reach its target, and the reason says what was reached",
    ),
    entry("no steady state", "", "measured; the warm-up never stopped drifting"),
    entry("disturbed", "", "blocks were rejected for recorded causes until retries ran out"),
    entry("INVALID", "", "measured, and not to be trusted; the reason says why"),
    entry("skipped", "", "not run; the reason says why, with the numbers"),
    entry("oom", "", "an allocation failed on the device; the rest went on"),
    entry("incomplete", "", "the run was stopped before the cell was done; what it has by then is shown"),
    entry(
        "fixed (fit)",
        "step = fixed + KV/bandwidth + batch·each",
        "the intercept of the regression over the grid: weights plus overhead",
    ),
    entry(
        "queue time",
        "q − s",
        "from the scheduled arrival to the first step that holds the request; the wait after a preemption is kept apart",
    ),
    entry(
        "injection lag",
        "enqueue − max(s, end of the step that ran at s)",
        "what the harness itself added to a wait: waking late, queueing others first. A gate, never subtracted",
    ),
    entry(
        "request TPOT",
        "(tN − t1)/(N − 1)",
        "in `serve`: time per output token of one request; null for one token, infinite for a request that failed",
    ),
    entry(
        "goodput",
        "requests completed in the window that met every objective / window",
        "never more than are served; a request without a TPOT is judged without that clause; how many is said",
    ),
    entry(
        "window",
        "",
        "in `serve`: from the first measured arrival to the last (open loop), else to the last measured end; rates are taken over it",
    ),
    entry(
        "warm-up, cool-down",
        "",
        "requests in front of the measured ones (a tenth, and twice as many as are in the system at a time), and behind them to keep the \
         load until the last measured one is done; served and not counted",
    ),
    entry(
        "SATURATED",
        "",
        "fewer than 98 % of the offered requests were completed and more than chance piled up, or queue time and TTFT both rise; percentiles \
         of waiting are refused, because they depend on how long one measured",
    ),
    entry(
        "Little's law",
        "L = λ·W",
        "a gate: requests in the system on average against rate × mean time in system, within 10 %",
    ),
    entry(
        "prefix hit rate",
        "tokens found / tokens looked up",
        "of prompts when they first start; ideal: by a cache without an end, in order of arrival",
    ),
    entry("GB, GiB", "10⁹, 2³⁰", "bandwidth and traffic are decimal, memory capacity is binary"),
];

/// Every definition.
#[derive(Debug, Clone, Copy)]
pub struct Glossary;

impl Kind for Glossary {
    fn document(&self) -> Document {
        let mut document = Document::default();
        document.blocks.push(Block::KeyValues(
            ENTRIES
                .iter()
                .map(|e| {
                    let formula =
                        if e.formula.is_empty() { String::new() } else { format!("{}: ", e.formula) };
                    (e.term.to_owned(), format!("{formula}{}", e.meaning))
                })
                .collect(),
        ));
        let column =
            |title: &str, of: fn(&Entry) -> &str| words(title, ENTRIES.iter().map(|e| of(e).to_owned()));
        document.sheet = Some(vec![
            column("term", |e| e.term),
            column("formula", |e| e.formula),
            column("meaning", |e| e.meaning),
        ]);
        document
    }

    fn json(&self) -> Result<String, OutputError> {
        Ok(serde_json::to_string_pretty(ENTRIES)?)
    }
}
