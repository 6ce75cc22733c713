//! Files that lie beside results and are none: what each is, and what to do with it.
//!
//! Enters: a document that no reader matches. Leaves: text for the message, or nothing for an unknown format.

use super::document::Document;

/// Keys of JSON that identify a file, and the message.
const OBJECTS: &[(&[&str], &str)] = &[
    (
        &["backend", "scenario", "launcher"],
        "the configuration of an optimum-benchmark run, not what it measured; give benchmark.json or benchmark_report.json",
    ),
    (&["model_type"], "a model's config.json, not a result; --model takes the folder it is in"),
    (&["architectures"], "a model's config.json, not a result; --model takes the folder it is in"),
    (
        &["hidden_size", "vocab_size"],
        "a model's shape, not a result; --model takes a folder with config.json",
    ),
    (&["num_hidden_layers"], "a model's shape, not a result; --model takes a folder with config.json"),
    (
        &["dim", "n_layers", "vocab_size"],
        "a model's shape, not a result; --model takes a folder with config.json",
    ),
    (&["added_tokens", "model"], "a tokenizer, not a result"),
    (
        &["timestamp", "input_length", "output_length"],
        "recorded traffic, not a result; `hbmark serve --trace FILE` replays it",
    ),
    (
        &["hash_id_scope", "requests"],
        "recorded traffic, not a result, and of a kind that `hbmark serve` does not replay",
    ),
];

const TABLES: &[(&[&str], &str)] = &[
    (
        &["============ Serving Benchmark Result ============"],
        "what `vllm bench serve` (or SGLang's bench_serving) prints, not its result; give the JSON of --save-result (--output-file)",
    ),
    (
        &["TIMESTAMP", "ContextTokens"],
        "recorded traffic, not a result; `hbmark serve --trace FILE` replays it",
    ),
    (
        &["arrived_at", "num_prefill_tokens"],
        "recorded traffic, not a result; `hbmark serve --trace FILE` replays it",
    ),
    (
        &["Request tokens", "Response tokens"],
        "recorded traffic, not a result; `hbmark serve --trace FILE` replays it",
    ),
];

/// What a document is, where it is known and no result.
pub(super) fn what(document: &Document) -> Option<&'static str> {
    if let Some((_, what)) = OBJECTS.iter().find(|(keys, _)| document.objects_with(keys).is_some()) {
        return Some(what);
    }
    let table = TABLES.iter().find(|(titles, _)| document.tables_with(titles).next().is_some());
    table.map(|(_, what)| *what)
}
