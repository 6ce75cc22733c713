//! Which series of which server is which signal: data, and the finding of a name in it.
//!
//! Names and meanings: vLLM 0.32 (`docs/usage/metrics`, `vllm/v1/metrics/loggers.py`), SGLang 0.5.20 (`srt/observability/metrics_collector.py`),
//! TensorRT-LLM 1.3 (`tensorrt_llm/metrics/collector.py`), llama.cpp as of llama-cpp-python 0.3.36 (`tools/server/server-task.cpp`), TGI
//! (`docs/source/reference/metrics.md`). Within a row, newer and better series come first.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::LazyLock;

use hbmark_core::result::serving::{Dialect, Signal};

use Kind::{Histogram, Label, Number};
use Over::{Largest, Mean, Sum};

/// What a series holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// One value: a counter or a gauge.
    Number,
    /// A sum and a count; buckets are not read.
    Histogram,
    /// The value is that of a label.
    Label(&'static str),
}

/// How values of several label sets are one. Labels of ranks do not count: each rank exports the same, and one of them is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Over {
    Sum,
    Mean,
    Largest,
}

/// Series that are added up; one of them is enough.
#[derive(Debug)]
pub(super) struct Series {
    pub names: &'static [&'static str],
    /// A label and the values it may have; one that is not there is empty.
    pub only: Option<(&'static str, &'static [&'static str])>,
}

/// How a server exports a signal.
#[derive(Debug)]
pub(super) struct Row {
    pub signal: Signal,
    /// None: any server.
    pub dialect: Option<Dialect>,
    pub kind: Kind,
    pub over: Over,
    /// The first that is there is taken.
    pub series: &'static [Series],
}

/// Labels that tell ranks of one engine apart.
pub(super) const RANK_LABELS: &[&str] = &["tp_rank", "pp_rank", "moe_ep_rank", "ep_rank"];

const fn plain(names: &'static [&'static str]) -> Series {
    Series { names, only: None }
}

const fn only(
    names: &'static [&'static str],
    label: &'static str,
    values: &'static [&'static str],
) -> Series {
    Series { names, only: Some((label, values)) }
}

const fn row(signal: Signal, dialect: Dialect, kind: Kind, over: Over, series: &'static [Series]) -> Row {
    Row { signal, dialect: Some(dialect), kind, over, series }
}

use Dialect::{LlamaCpp, Sglang, Tgi, TrtLlm, Vllm};

const DECODE_PASSES: &[&str] = &["decode_cuda_graph", "decode_none"];

#[rustfmt::skip]
pub(super) const TABLE: &[Row] = &[
    row(Signal::Running, Vllm, Number, Sum, &[plain(&["vllm:num_requests_running"])]),
    // With priorities there is a breakdown by them beside the total.
    row(Signal::Running, Sglang, Number, Sum, &[only(&["sglang:num_running_reqs"], "priority", &[""])]),
    row(Signal::Running, TrtLlm, Number, Sum, &[plain(&["trtllm_num_requests_running"])]),
    row(Signal::Running, LlamaCpp, Number, Sum, &[plain(&["llamacpp:requests_processing"])]),
    row(Signal::Running, Tgi, Number, Sum, &[plain(&["tgi_batch_current_size"])]),

    row(Signal::Waiting, Vllm, Number, Sum, &[plain(&["vllm:num_requests_waiting"]), plain(&["vllm:num_requests_waiting_by_reason"])]),
    // A request whose grammar is being compiled waits in a queue of its own.
    row(Signal::Waiting, Sglang, Number, Sum, &[only(&["sglang:num_queue_reqs", "sglang:num_grammar_queue_reqs"], "priority", &[""])]),
    row(Signal::Waiting, TrtLlm, Number, Sum, &[plain(&["trtllm_num_requests_waiting"])]),
    row(Signal::Waiting, LlamaCpp, Number, Sum, &[plain(&["llamacpp:requests_deferred"])]),
    row(Signal::Waiting, Tgi, Number, Sum, &[plain(&["tgi_queue_size"])]),

    row(Signal::KvUse, Vllm, Number, Mean, &[plain(&["vllm:kv_cache_usage_perc"]), plain(&["vllm:gpu_cache_usage_perc"])]),
    // `token_usage` is rounded to a hundredth, and the largest over pools of several kinds.
    row(Signal::KvUse, Sglang, Number, Mean, &[plain(&["sglang:full_token_usage"]), plain(&["sglang:token_usage"])]),
    row(Signal::KvUse, TrtLlm, Number, Mean, &[plain(&["trtllm_kv_cache_utilization"])]),
    // Older builds.
    row(Signal::KvUse, LlamaCpp, Number, Mean, &[plain(&["llamacpp:kv_cache_usage_ratio"])]),

    row(Signal::Preemptions, Vllm, Number, Sum, &[plain(&["vllm:num_preemptions"])]),
    row(Signal::Preemptions, Sglang, Number, Sum, &[plain(&["sglang:num_retracted_requests"])]),

    row(Signal::Requests, Vllm, Number, Sum, &[plain(&["vllm:request_success"])]),
    row(Signal::Requests, Sglang, Number, Sum, &[plain(&["sglang:num_requests"])]),
    row(Signal::Requests, TrtLlm, Number, Sum, &[plain(&["trtllm_request_success"])]),
    row(Signal::Requests, Tgi, Number, Sum, &[plain(&["tgi_request_success"])]),
    row(Signal::AbortedRequests, Vllm, Number, Sum, &[only(&["vllm:request_success"], "finished_reason", &["abort"])]),
    row(Signal::AbortedRequests, Sglang, Number, Sum, &[plain(&["sglang:num_aborted_requests"])]),

    row(Signal::PromptTokens, Vllm, Number, Sum, &[plain(&["vllm:prompt_tokens"])]),
    row(Signal::PromptTokens, Sglang, Number, Sum, &[plain(&["sglang:prompt_tokens"])]),
    row(Signal::PromptTokens, TrtLlm, Number, Sum, &[plain(&["trtllm_prompt_tokens"])]),
    row(Signal::PromptTokens, Tgi, Number, Sum, &[plain(&["tgi_request_input_length_sum"])]),

    row(Signal::CachedTokens, Vllm, Number, Sum, &[
        plain(&["vllm:prompt_tokens_cached"]),
        only(&["vllm:prompt_tokens_by_source"], "source", &["local_cache_hit", "external_kv_transfer"]),
    ]),
    // The first is counted by the step, the second when a request ends.
    row(Signal::CachedTokens, Sglang, Number, Sum, &[
        only(&["sglang:realtime_tokens"], "mode", &["prefill_cache"]),
        plain(&["sglang:cached_tokens"]),
    ]),
    row(Signal::CachedTokens, TrtLlm, Number, Sum, &[plain(&["trtllm_prompt_cached_tokens"])]),
    row(Signal::CachedTokens, LlamaCpp, Number, Sum, &[plain(&["llamacpp:prompt_tokens_cached"])]),

    row(Signal::ComputedTokens, Vllm, Number, Sum, &[only(&["vllm:prompt_tokens_by_source"], "source", &["local_compute"])]),
    row(Signal::ComputedTokens, Sglang, Number, Sum, &[only(&["sglang:realtime_tokens"], "mode", &["prefill_compute"])]),
    // Without the cached ones.
    row(Signal::ComputedTokens, LlamaCpp, Number, Sum, &[plain(&["llamacpp:prompt_tokens"])]),

    row(Signal::PrefixQueries, Vllm, Number, Sum, &[plain(&["vllm:prefix_cache_queries"]), plain(&["vllm:gpu_prefix_cache_queries"])]),
    row(Signal::PrefixHits, Vllm, Number, Sum, &[plain(&["vllm:prefix_cache_hits"]), plain(&["vllm:gpu_prefix_cache_hits"])]),

    row(Signal::GenerationTokens, Vllm, Number, Sum, &[plain(&["vllm:generation_tokens"])]),
    row(Signal::GenerationTokens, Sglang, Number, Sum, &[plain(&["sglang:generation_tokens"])]),
    row(Signal::GenerationTokens, TrtLlm, Number, Sum, &[plain(&["trtllm_generation_tokens"])]),
    row(Signal::GenerationTokens, LlamaCpp, Number, Sum, &[plain(&["llamacpp:tokens_predicted"])]),
    row(Signal::GenerationTokens, Tgi, Number, Sum, &[plain(&["tgi_request_generated_tokens_sum"])]),
    row(Signal::DecodeTokens, Sglang, Number, Sum, &[only(&["sglang:realtime_tokens"], "mode", &["decode"])]),

    row(Signal::Ttft, Vllm, Histogram, Sum, &[plain(&["vllm:time_to_first_token_seconds"])]),
    row(Signal::Ttft, Sglang, Histogram, Sum, &[plain(&["sglang:time_to_first_token_seconds"])]),
    row(Signal::Ttft, TrtLlm, Histogram, Sum, &[plain(&["trtllm_time_to_first_token_seconds"])]),
    row(Signal::E2e, Vllm, Histogram, Sum, &[plain(&["vllm:e2e_request_latency_seconds"])]),
    row(Signal::E2e, Sglang, Histogram, Sum, &[plain(&["sglang:e2e_request_latency_seconds"])]),
    row(Signal::E2e, TrtLlm, Histogram, Sum, &[plain(&["trtllm_e2e_request_latency_seconds"])]),
    row(Signal::E2e, Tgi, Histogram, Sum, &[plain(&["tgi_request_duration"])]),
    row(Signal::Queue, Vllm, Histogram, Sum, &[plain(&["vllm:request_queue_time_seconds"])]),
    row(Signal::Queue, Sglang, Histogram, Sum, &[plain(&["sglang:queue_time_seconds"])]),
    row(Signal::Queue, TrtLlm, Histogram, Sum, &[plain(&["trtllm_request_queue_time_seconds"])]),
    row(Signal::Queue, Tgi, Histogram, Sum, &[plain(&["tgi_request_queue_duration"])]),
    row(Signal::Prefill, Vllm, Histogram, Sum, &[plain(&["vllm:request_prefill_time_seconds"])]),
    row(Signal::Prefill, TrtLlm, Histogram, Sum, &[plain(&["trtllm_request_prefill_time_seconds"])]),
    row(Signal::Decode, Vllm, Histogram, Sum, &[plain(&["vllm:request_decode_time_seconds"])]),
    row(Signal::Decode, TrtLlm, Histogram, Sum, &[plain(&["trtllm_request_decode_time_seconds"])]),
    row(Signal::Inference, Vllm, Histogram, Sum, &[plain(&["vllm:request_inference_time_seconds"])]),
    row(Signal::Inference, TrtLlm, Histogram, Sum, &[plain(&["trtllm_request_inference_time_seconds"])]),
    row(Signal::Inference, Tgi, Histogram, Sum, &[plain(&["tgi_request_inference_duration"])]),
    // The second was renamed to the first.
    row(Signal::Itl, Vllm, Histogram, Sum, &[plain(&["vllm:inter_token_latency_seconds"]), plain(&["vllm:time_per_output_token_seconds"])]),
    row(Signal::Itl, Sglang, Histogram, Sum, &[plain(&["sglang:inter_token_latency_seconds"])]),
    row(Signal::Tpot, Vllm, Histogram, Sum, &[plain(&["vllm:request_time_per_output_token_seconds"])]),
    row(Signal::Tpot, TrtLlm, Histogram, Sum, &[plain(&["trtllm_time_per_output_token_seconds"])]),
    row(Signal::Tpot, Tgi, Histogram, Sum, &[plain(&["tgi_request_mean_time_per_token_duration"])]),
    row(Signal::PromptSeconds, LlamaCpp, Number, Sum, &[plain(&["llamacpp:prompt_seconds"])]),
    row(Signal::PredictedSeconds, LlamaCpp, Number, Sum, &[plain(&["llamacpp:tokens_predicted_seconds"])]),

    row(Signal::Steps, Vllm, Number, Sum, &[plain(&["vllm:iteration_tokens_total_count"])]),
    row(Signal::Steps, Sglang, Number, Sum, &[plain(&["sglang:cuda_graph_passes"])]),
    row(Signal::Steps, LlamaCpp, Number, Sum, &[plain(&["llamacpp:n_decode"])]),
    row(Signal::Steps, Tgi, Number, Sum, &[plain(&["tgi_batch_inference_count"])]),
    row(Signal::DecodeSteps, Sglang, Number, Sum, &[only(&["sglang:cuda_graph_passes"], "mode", DECODE_PASSES)]),
    row(Signal::DecodeSteps, Tgi, Number, Sum, &[only(&["tgi_batch_inference_count"], "method", &["decode"])]),
    row(Signal::StepTokens, Vllm, Number, Sum, &[plain(&["vllm:iteration_tokens_total_sum"])]),
    row(Signal::StepTokens, Sglang, Number, Sum, &[only(&["sglang:realtime_tokens"], "mode", &["prefill_compute", "decode"])]),
    row(Signal::BusySlots, LlamaCpp, Number, Sum, &[plain(&["llamacpp:n_busy_slots_per_decode"])]),

    row(Signal::Drafts, Vllm, Number, Sum, &[plain(&["vllm:spec_decode_num_drafts"])]),
    row(Signal::Drafts, LlamaCpp, Number, Sum, &[plain(&["llamacpp:spec_decode_num_drafts"])]),
    row(Signal::DraftTokens, Vllm, Number, Sum, &[plain(&["vllm:spec_decode_num_draft_tokens"])]),
    row(Signal::DraftTokens, TrtLlm, Number, Sum, &[plain(&["trtllm_spec_decode_num_draft_tokens"])]),
    row(Signal::DraftTokens, LlamaCpp, Number, Sum, &[plain(&["llamacpp:spec_decode_num_draft_tokens"])]),
    row(Signal::AcceptedTokens, Vllm, Number, Sum, &[plain(&["vllm:spec_decode_num_accepted_tokens"])]),
    row(Signal::AcceptedTokens, TrtLlm, Number, Sum, &[plain(&["trtllm_spec_decode_num_accepted_tokens"])]),
    row(Signal::AcceptedTokens, LlamaCpp, Number, Sum, &[plain(&["llamacpp:spec_decode_num_accepted_tokens"])]),

    // Of one GPU: engines are not added up.
    row(Signal::ReadBytes, Vllm, Number, Mean, &[plain(&["vllm:estimated_read_bytes_per_gpu"])]),
    row(Signal::ReadBytes, Sglang, Number, Mean, &[plain(&["sglang:estimated_read_bytes_per_gpu"])]),
    row(Signal::WrittenBytes, Vllm, Number, Mean, &[plain(&["vllm:estimated_write_bytes_per_gpu"])]),
    row(Signal::WrittenBytes, Sglang, Number, Mean, &[plain(&["sglang:estimated_write_bytes_per_gpu"])]),
    row(Signal::Flops, Vllm, Number, Mean, &[plain(&["vllm:estimated_flops_per_gpu"])]),
    row(Signal::Flops, Sglang, Number, Mean, &[plain(&["sglang:estimated_flops_per_gpu"])]),

    row(Signal::KvBlocks, Vllm, Label("num_gpu_blocks"), Largest, &[plain(&["vllm:cache_config_info"])]),
    row(Signal::KvBlocks, Sglang, Number, Largest, &[plain(&["sglang:num_pages"])]),
    row(Signal::KvBlocks, TrtLlm, Number, Largest, &[plain(&["trtllm_kv_cache_max_blocks"])]),
    row(Signal::BlockTokens, Vllm, Label("block_size"), Largest, &[plain(&["vllm:cache_config_info"])]),
    row(Signal::BlockTokens, Sglang, Number, Largest, &[plain(&["sglang:page_size"])]),
    row(Signal::BlockTokens, TrtLlm, Number, Largest, &[plain(&["trtllm_kv_cache_tokens_per_block"])]),
    row(Signal::KvTokens, Sglang, Number, Largest, &[plain(&["sglang:max_total_num_tokens"])]),
    row(Signal::MaxModelLen, Sglang, Number, Largest, &[plain(&["sglang:context_len"])]),
    row(Signal::PrefixCaching, Vllm, Label("enable_prefix_caching"), Largest, &[plain(&["vllm:cache_config_info"])]),

    Row { signal: Signal::StartTime, dialect: None, kind: Number, over: Largest, series: &[plain(&["process_start_time_seconds"])] },
];

/// A place in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Place {
    pub row: usize,
    pub series: usize,
}

/// The parts of a row by name: 0 for the value or the sum, 1 for the count of a histogram.
static INDEX: LazyLock<HashMap<String, Vec<(Place, usize)>>> = LazyLock::new(|| {
    let mut index: HashMap<String, Vec<(Place, usize)>> = HashMap::new();
    for (at, row) in TABLE.iter().enumerate() {
        for (series, Series { names, .. }) in row.series.iter().enumerate() {
            let place = Place { row: at, series };
            for name in *names {
                let mut add = |name: &str, part| {
                    index.entry(canonical(name).into_owned()).or_default().push((place, part));
                };
                match row.kind {
                    Number | Label(_) => add(name, 0),
                    Histogram => {
                        add(&format!("{name}_sum"), 0);
                        add(&format!("{name}_count"), 1);
                    }
                }
            }
        }
    }
    index
});

/// Where in the table a series of this name belongs.
pub(super) fn places(name: &str) -> &'static [(Place, usize)] {
    INDEX.get(canonical(name).as_ref()).map_or(&[], Vec::as_slice)
}

/// One spelling for all: a counter may end in `_total`, and Ray writes `_` for `:` and puts its own name before.
pub(super) fn canonical(name: &str) -> Cow<'_, str> {
    let name = name.strip_prefix("ray_").unwrap_or(name);
    let name = name.strip_suffix("_total").unwrap_or(name);
    for server in ["vllm", "sglang"] {
        if let Some(rest) = name.strip_prefix(server).and_then(|rest| rest.strip_prefix('_')) {
            return format!("{server}:{rest}").into();
        }
    }
    name.into()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_signal_has_one_row_for_each_server() {
        let rows: BTreeSet<String> =
            TABLE.iter().map(|row| format!("{:?} {:?}", row.signal, row.dialect)).collect();
        assert_eq!(rows.len(), TABLE.len());
        for row in TABLE {
            assert!(!row.series.is_empty() && row.series.iter().all(|series| !series.names.is_empty()));
        }
    }

    #[test]
    fn a_series_belongs_to_the_server_of_its_row() {
        for row in TABLE {
            let prefix = match row.dialect {
                Some(Vllm) => "vllm:",
                Some(Sglang) => "sglang:",
                Some(TrtLlm) => "trtllm_",
                Some(Tgi) => "tgi_",
                Some(LlamaCpp) => "llamacpp:",
                Some(Dialect::OpenAi) => panic!("{row:?}"),
                None => "process_",
            };
            for name in row.series.iter().flat_map(|series| series.names) {
                assert!(name.starts_with(prefix), "{name}");
                // What ends in `_total` is stored without it and would be found by no other spelling.
                assert!(!name.ends_with("_total"), "{name}");
            }
        }
    }

    #[test]
    fn names_are_found_in_every_spelling() {
        let signals =
            |name| -> Vec<Signal> { places(name).iter().map(|(place, _)| TABLE[place.row].signal).collect() };
        for name in [
            "vllm:num_preemptions",
            "vllm:num_preemptions_total",
            "vllm_num_preemptions_total",
            "ray_vllm_num_preemptions_total",
        ] {
            assert_eq!(signals(name), [Signal::Preemptions], "{name}");
        }
        assert_eq!(signals("vllm:iteration_tokens_total_count"), [Signal::Steps]);
        assert_eq!(signals("vllm:iteration_tokens_total_bucket"), []);
        assert_eq!(signals("ray_vllm_time_to_first_token_seconds_sum"), [Signal::Ttft]);
        assert_eq!(signals("vllm:prompt_tokens_created"), []);
        assert_eq!(signals("llamacpp:prompt_seconds_total"), [Signal::PromptSeconds]);
        assert_eq!(signals("llamacpp:prompt_tokens_seconds"), []);
        assert_eq!(signals("num_preemptions"), []);
    }
}
