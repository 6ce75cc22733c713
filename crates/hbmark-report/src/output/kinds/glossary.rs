//! Every term of a report, defined once.

use serde::Serialize;

use crate::output::Kind;
use crate::output::document::{Block, Document, words};

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
    entry("prefill", "", "a step that processes a whole prompt into an empty KV cache"),
    entry("decode", "", "a step that generates one token per sequence using the KV cache"),
    entry(
        "verify step",
        "",
        "a step of speculative decoding: the last token of each sequence and k draft tokens behind it, with logits of all of them",
    ),
    entry("draft tokens", "k", "tokens that a draft proposes for each sequence, and a verify step checks"),
    entry(
        "acceptance rate",
        "p",
        "the probability that a draft token is accepted where all before it were; assumed, never measured here",
    ),
    entry(
        "acceptance length",
        "L = 1 + p + … + p^k",
        "tokens of a sequence that a verify step brings on average: those accepted and one more",
    ),
    entry(
        "effective TPOT",
        "(verify step + k · draft step) / L",
        "time per output token of speculative decoding; the speed-up is TPOT over it",
    ),
    entry(
        "break-even",
        "(verify step + k · draft step) / decode step",
        "the acceptance length at which speculation gains nothing and loses nothing, or the rate that brings it",
    ),
    entry("context", "", "positions in the KV cache before the step; prefill: tokens of the prompt"),
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
        "time between step ends; equals TPOT in steady decode",
    ),
    entry(
        "TPOT",
        "geometric mean of I",
        "time per output token: the geometric mean of block means of I, with its 95 % interval",
    ),
    entry("host bubble G", "I − D", "device idle time per step while it waits for the host"),
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
    entry("ideal bytes", "weights + KV + other", "bytes a step must read or write at minimum"),
    entry("moved", "", "bytes this implementation reads and writes, including copies and casts"),
    entry("ceiling", "", "read bandwidth measured in the same run by our own read-only probe"),
    entry("data sheet", "", "the vendor's bandwidth and dense peaks, each row with its source"),
    entry(
        "floor",
        "max(bytes / bandwidth, FLOPs / peak)",
        "roofline lower bound of a step, from measured ceilings; from the data sheet in `predict`",
    ),
    entry(
        "rung",
        "",
        "one row of a time breakdown: a lower bound, or a measured TPOT (decode) or step time (prefill)",
    ),
    entry(
        "ladder",
        "data sheet → ceiling → native → stock",
        "time breakdown for one (phase, batch, context): from datasheet lower bound to measured time",
    ),
    entry(
        "incremental",
        "Σ incremental = time of the last rung",
        "time added over the previous row; a second dtype's lower bound is counted against the first dtype's, and the next row holds the remainder",
    ),
    entry(
        "share",
        "incremental / slowest measured time",
        "of a ladder's rung; of an operation, its time over the sum of all",
    ),
    entry(
        "operation",
        "",
        "one fused operation, timed in a separate profiling pass; not included in step times",
    ),
    entry(
        "% ceiling (MBU)",
        "ideal bytes / (time · bandwidth)",
        "memory bandwidth utilisation; above 100 % of the data sheet the result is invalid, unless the working set fits in cache",
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
        "a fixed-size memory read next to each block; if it slows down, the block is rejected",
    ),
    entry(
        "round",
        "",
        "comparison sample: one fresh process each of A and B; each is first in half of the rounds, at random",
    ),
    entry(
        "B/A",
        "exp(mean ln(B/A))",
        "geometric mean over rounds of the ratio of medians: below 1, B is faster",
    ),
    entry(
        "p, p (family)",
        "share of the orders of rounds that could have been drawn, and are at least as extreme",
        "p-value if A equals B; for the most extreme of all cells and their mean",
    ),
    entry(
        "detectable",
        "(t(1 − α/2) + t(0.8))·sd/√rounds, rounds − 2 degrees of freedom",
        "minimum detectable effect at 80 % power and the corrected significance level",
    ),
    entry("A/A floor", "", "larger bound of the A/A interval; smaller effects are reported INCONCLUSIVE"),
    entry(
        "FASTER, SLOWER",
        "",
        "B versus A: corrected p <= 0.05, interval excludes 1, effect exceeds the A/A floor",
    ),
    entry("EQUIVALENT", "", "both ends of the interval lie within the margin, 1 % unless asked otherwise"),
    entry("INCONCLUSIVE", "", "neither a difference nor its absence was shown"),
    entry("ok", "", "measured, and every gate passed"),
    entry(
        "not converged",
        "",
        "measured, but the confidence interval is wider than the target; the reason gives the width",
    ),
    entry("no steady state", "", "measured, but warm-up did not reach a steady state"),
    entry("disturbed", "", "blocks were rejected for recorded causes until retries ran out"),
    entry("noisy", "", "disturbed or not converged, and counted because of --allow-noise"),
    entry("smoke", "", "ran once to see that it runs; the time means nothing"),
    entry("[x, a to b]", "", "median and range over all blocks, where the blocks cannot stand for the cell"),
    entry("INVALID", "", "measured but not valid; see the reason"),
    entry(
        "SATURATED",
        "",
        "requests come faster than they are served: throughput is a result, TTFT and E2E depend on how long one measures and are not reported; of \
         requests that all arrive at once they are shown, and depend on how many there are",
    ),
    entry(
        "client delay",
        "read − kernel receipt",
        "how long what a live server sent waited for this program; its p99 is a gate: 1 ms, or a tenth of the median ITL",
    ),
    entry(
        "client processor",
        "(CPU time + wait for a CPU) / wall",
        "of the thread that reads; beyond 90 % the client is what is measured, and the point is INVALID",
    ),
    entry(
        "undetermined",
        "",
        "the run is too short to tell, of an objective or of whether the system keeps up",
    ),
    entry("skipped", "", "not run; the reason says why, with the numbers"),
    entry("oom", "", "device out of memory for this cell; other cells continued"),
    entry("incomplete", "", "run stopped before the cell finished; partial data shown"),
    entry(
        "fixed (fit)",
        "step = fixed + KV/bandwidth + batch·each",
        "the intercept of the regression over the grid: weights plus overhead",
    ),
    entry(
        "queue time",
        "q − s",
        "from scheduled arrival to first scheduling; preemption wait reported separately",
    ),
    entry(
        "injection lag",
        "enqueue − max(s, end of the step that ran at s)",
        "delay added by the load generator; checked by a gate, never subtracted",
    ),
    entry(
        "request TPOT",
        "(tN − t1)/(N − 1)",
        "in `serve`: time per output token of one request; null for one token, infinite for a request that failed",
    ),
    entry(
        "goodput",
        "served/s × share of the served measured requests that met every objective",
        "rate of requests that met every SLO; a request without TPOT skips the TPOT clause, and the count is reported",
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
        "Little's law",
        "L = λ·W",
        "a gate: requests in the system on average against rate × mean time in system, within 10 %",
    ),
    entry(
        "prefix hit rate",
        "tokens found / tokens looked up",
        "of prompts at first scheduling; ideal: with an infinite cache, in arrival order",
    ),
    entry("GB, GiB", "10⁹, 2³⁰", "bandwidth and traffic are decimal, memory capacity is binary"),
];

/// Definitions.
#[derive(Debug, Clone, Serialize)]
#[serde(transparent)]
pub struct Glossary {
    entries: Vec<&'static Entry>,
}

impl Glossary {
    /// Every one of them.
    #[must_use]
    pub fn whole() -> Self {
        Self { entries: ENTRIES.iter().collect() }
    }

    /// Those whose term holds a word, or if there are none those that mention it; `None` where nothing does.
    #[must_use]
    pub fn of(word: &str) -> Option<Self> {
        let word = word.to_lowercase();
        let with = |of: fn(&Entry) -> &str| -> Vec<&'static Entry> {
            ENTRIES.iter().filter(|entry| of(entry).to_lowercase().contains(&word)).collect()
        };
        [with(|entry| entry.term), with(|entry| entry.meaning)]
            .into_iter()
            .find(|entries| !entries.is_empty())
            .map(|entries| Self { entries })
    }
}

impl Kind for Glossary {
    fn document(&self) -> Document {
        let mut document = Document::default();
        document.blocks.push(Block::KeyValues(
            self.entries
                .iter()
                .map(|e| {
                    let formula =
                        if e.formula.is_empty() { String::new() } else { format!("{}: ", e.formula) };
                    (e.term.to_owned(), format!("{formula}{}", e.meaning))
                })
                .collect(),
        ));
        let column =
            |title: &str, of: fn(&Entry) -> &str| words(title, self.entries.iter().map(|e| of(e).to_owned()));
        document.sheet = Some(vec![
            column("term", |e| e.term),
            column("formula", |e| e.formula),
            column("meaning", |e| e.meaning),
        ]);
        document
    }
}

#[cfg(test)]
mod tests {
    use super::ENTRIES;

    const HEAD: &str = "| term | formula | meaning |\n|---|---|---|\n";

    #[test]
    fn the_document_has_every_definition() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/glossary.md");
        let page = std::fs::read_to_string(&path).unwrap();
        let (introduction, found) = page.split_once(HEAD).expect("the page has one table");
        let rows: Vec<String> =
            ENTRIES.iter().map(|e| format!("| {} | {} | {} |\n", e.term, e.formula, e.meaning)).collect();
        let wanted = rows.concat();
        if std::env::var_os("INSTA_UPDATE").is_some_and(|v| v == "always") {
            std::fs::write(&path, format!("{introduction}{HEAD}{wanted}")).unwrap();
            return;
        }
        assert_eq!(found, wanted, "docs/glossary.md: run the tests with INSTA_UPDATE=always");
    }
}
