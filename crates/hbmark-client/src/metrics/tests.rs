use std::fmt::Write;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use hbmark_core::result::serving::{FetchFailure, GaugeOverTime, ServerConfiguration, StepBasis, Unknown};
use proptest::prelude::*;

use super::scraper::{Scraper, Source};
use super::*;
use crate::fetch::tests::{Reply, Server, not_found, reply};
use crate::target::Target;

static BEGIN: LazyLock<Instant> = LazyLock::new(Instant::now);

/// A reading of `page` at a second of a run.
fn at(seconds: f64, page: &str) -> Scrape {
    Scrape {
        at: *BEGIN + Duration::from_secs_f64(seconds),
        took: Duration::from_millis(3),
        snapshot: Snapshot::read(page.as_bytes()),
    }
}

/// The window from one reading to another, with those between them.
fn window(before: &Scrape, after: &Scrape, between: &[Scrape]) -> ServerMetrics {
    super::window(&[std::slice::from_ref(before), between, std::slice::from_ref(after)].concat())
}

fn why(metrics: &ServerMetrics, signal: Signal) -> Option<Unknown> {
    metrics.unknown.iter().find(|unknown| unknown.signal == signal).map(|unknown| unknown.why)
}

#[track_caller]
fn near(found: Option<f64>, wanted: f64) {
    let found = found.unwrap();
    assert!((found - wanted).abs() <= 1e-9 * wanted.abs(), "{found} is not {wanted}");
}

/// Two engines of vLLM; `scale` is how far they have counted.
fn vllm(scale: f64, running: f64) -> String {
    let mut page = String::from(
        "# HELP vllm:num_requests_running Number of requests in model execution batches.\n\
         # TYPE vllm:num_requests_running gauge\n",
    );
    for engine in 0..2 {
        let labels = format!("engine=\"{engine}\",model_name=\"a/b\"");
        for (name, value) in [
            ("num_requests_running", running / 2.0),
            ("num_requests_waiting", 3.0),
            ("kv_cache_usage_perc", if engine == 0 { 0.5 } else { 0.75 }),
            ("num_preemptions_total", 2.0 * scale),
            ("prefix_cache_queries_total", 9_000.0 * scale),
            ("prefix_cache_hits_total", 8_000.0 * scale),
            ("prompt_tokens_total", 1_000.0 * scale),
            ("prompt_tokens_cached_total", 250.0 * scale),
            ("generation_tokens_total", 4_000.0 * scale),
            ("iteration_tokens_total_sum", 4_750.0 * scale),
            ("iteration_tokens_total_count", 500.0 * scale),
            ("time_to_first_token_seconds_sum", 2.5 * scale),
            ("time_to_first_token_seconds_count", 10.0 * scale),
            ("request_queue_time_seconds_sum", 0.5 * scale),
            ("request_queue_time_seconds_count", 10.0 * scale),
            ("request_prefill_time_seconds_sum", 1.5 * scale),
            ("request_prefill_time_seconds_count", 10.0 * scale),
            ("request_decode_time_seconds_sum", 40.0 * scale),
            ("request_decode_time_seconds_count", 10.0 * scale),
            ("inter_token_latency_seconds_sum", 40.0 * scale),
            ("inter_token_latency_seconds_count", 3_990.0 * scale),
            ("spec_decode_num_drafts_total", 100.0 * scale),
            ("spec_decode_num_draft_tokens_total", 300.0 * scale),
            ("spec_decode_num_accepted_tokens_total", 150.0 * scale),
        ] {
            let _ = writeln!(page, "vllm:{name}{{{labels}}} {value:?}");
        }
        for reason in ["stop", "length", "abort"] {
            let count = if reason == "abort" { scale } else { 10.0 * scale };
            let _ = writeln!(
                page,
                "vllm:request_success_total{{{labels},finished_reason=\"{reason}\"}} {count:?}"
            );
        }
        let _ = write!(
            page,
            "vllm:time_to_first_token_seconds_bucket{{{labels},le=\"+Inf\"}} {:?}\n\
             vllm:prompt_tokens_created{{{labels}}} 1.7e+09\n\
             vllm:cache_config_info{{block_size=\"16\",num_gpu_blocks=\"1000\",enable_prefix_caching=\"True\",{labels}}} 1.0\n",
            10.0 * scale
        );
    }
    page + "process_start_time_seconds 1.76e+09\n"
}

#[test]
fn counters_of_all_engines_are_added_up_and_their_differences_taken() {
    let metrics = window(&at(0.0, &vllm(1.0, 8.0)), &at(10.0, &vllm(3.0, 8.0)), &[]);
    assert_eq!(metrics.dialect, Dialect::Vllm);
    near(Some(metrics.window_ns), 10e9);
    assert_eq!(metrics.readings, 2);
    near(Some(metrics.longest_reading_ns), 3e6);
    assert_eq!(metrics.preemptions, Some(8));
    assert_eq!((metrics.requests, metrics.aborted_requests), (Some(84), Some(4)));
    assert_eq!(metrics.prompt_tokens, Some(4_000));
    assert_eq!(metrics.cached_prompt_tokens, Some(1_000));
    assert_eq!(metrics.computed_prompt_tokens, Some(3_000));
    assert_eq!(why(&metrics, Signal::ComputedTokens), None);
    assert_eq!(metrics.generation_tokens, Some(16_000));
    // By tokens of prompts: a request that waits is looked up at every step.
    near(metrics.prefix_hit_rate, 0.25);
    let mean =
        |mean: Option<hbmark_core::result::serving::ServerMean>| (mean.unwrap().mean_ns, mean.unwrap().count);
    assert_eq!(mean(metrics.ttft), (0.25e9, 40));
    assert_eq!(mean(metrics.queue), (0.05e9, 40));
    assert_eq!(mean(metrics.prefill), (0.15e9, 40));
    assert_eq!(mean(metrics.decode), (4e9, 40));
    near(metrics.itl.map(|mean| mean.mean_ns), 40e9 / 3_990.0);
    assert_eq!(metrics.e2e, None);
    assert_eq!(why(&metrics, Signal::E2e), Some(Unknown::NotExported));
    let speculation = metrics.speculation.unwrap();
    assert_eq!(
        (speculation.drafts, speculation.draft_tokens, speculation.accepted_tokens),
        (Some(400), 1_200, 600)
    );
    near(Some(speculation.acceptance_rate), 0.5);
    near(speculation.mean_length, 2.5);
    assert_eq!(
        metrics.configuration,
        ServerConfiguration {
            kv_blocks: Some(1000),
            block_tokens: Some(16),
            kv_tokens: Some(16_000),
            max_model_len: None,
            prefix_caching: Some(true),
        }
    );
    let seen =
        |signal| metrics.seen.iter().find(|seen| seen.signal == signal).map(|seen| seen.series.as_str());
    assert_eq!(seen(Signal::Ttft), Some("vllm:time_to_first_token_seconds"));
    assert_eq!(seen(Signal::KvBlocks), Some("vllm:cache_config_info{num_gpu_blocks}"));
}

#[test]
fn steps_give_their_time_and_batch_where_the_server_was_busy() {
    let metrics = window(&at(0.0, &vllm(1.0, 8.0)), &at(10.0, &vllm(3.0, 8.0)), &[]);
    assert_eq!(metrics.steps, Some(2_000));
    let busy = metrics.busy_steps.unwrap();
    assert_eq!(busy.basis, StepBasis::StepsWithOutput);
    assert_eq!((busy.steps, busy.decode_steps), (2_000, 2_000));
    // Each of the two engines made a thousand steps in ten seconds.
    assert_eq!(busy.engines, 2);
    near(Some(busy.mean_step_ns), 10e6);
    near(busy.mean_step_tokens, 9.5);
    near(busy.mean_batch, 8.0);
    near(Some(busy.min_running), 4.0);
}

#[test]
fn one_idle_engine_is_enough_for_the_server_not_to_be_busy() {
    let idle = |scale| {
        vllm(scale, 8.0).replacen(
            "vllm:num_requests_running{engine=\"1\",model_name=\"a/b\"} 4",
            "vllm:num_requests_running{engine=\"1\",model_name=\"a/b\"} 0",
            1,
        )
    };
    let metrics = window(&at(0.0, &vllm(1.0, 8.0)), &at(10.0, &idle(3.0)), &[]);
    assert_eq!((metrics.busy_steps, why(&metrics, Signal::BusySteps)), (None, Some(Unknown::NotBusy)));
    near(metrics.running.map(|gauge| gauge.min), 4.0);
    let broken =
        idle(3.0).replacen("engine=\"1\",model_name=\"a/b\"} 0.0", "engine=\"1\",model_name=\"a/b\"} NaN", 1);
    let metrics = window(&at(0.0, &vllm(1.0, 8.0)), &at(10.0, &broken), &[]);
    assert_eq!(metrics.broken_lines, 0);
    assert_eq!(why(&metrics, Signal::BusySteps), Some(Unknown::NotBusy));
    // An engine that came later.
    let one =
        "vllm:num_requests_running{engine=\"0\"} 4\nvllm:iteration_tokens_total_count{engine=\"0\"} 5\n";
    let metrics = window(&at(0.0, one), &at(10.0, &vllm(3.0, 8.0)), &[]);
    assert_eq!((metrics.busy_steps, why(&metrics, Signal::BusySteps)), (None, Some(Unknown::NotBusy)));
}

#[test]
fn a_breakdown_by_priority_is_no_further_engine() {
    let page = "sglang:num_running_reqs{priority=\"\"} 5\nsglang:num_running_reqs{priority=\"1\"} 3\n\
                sglang:num_running_reqs{priority=\"2\"} 2\nsglang:num_queue_reqs{priority=\"\"} 7\n\
                sglang:num_queue_reqs{priority=\"1\"} 7\n";
    let metrics = window(&at(0.0, page), &at(1.0, page), &[]);
    near(metrics.running.map(|gauge| gauge.mean), 5.0);
    near(metrics.waiting.map(|gauge| gauge.mean), 7.0);
}

#[test]
fn idle_time_is_in_no_step() {
    // Idle for 100 s, busy for two, idle again.
    let between = [at(100.0, &vllm(1.0, 4.0)), at(101.0, &vllm(1.5, 6.0)), at(102.0, &vllm(2.0, 2.0))];
    let metrics = window(&at(0.0, &vllm(1.0, 0.0)), &at(200.0, &vllm(3.0, 0.0)), &between);
    assert_eq!(metrics.readings, 5);
    assert_eq!(metrics.steps, Some(2_000));
    let busy = metrics.busy_steps.unwrap();
    assert_eq!(busy.steps, 1_000);
    near(Some(busy.busy_ns), 2e9);
    near(Some(busy.mean_step_ns), 4e6);
    near(Some(busy.min_running), 1.0);
    let idle = window(&at(0.0, &vllm(1.0, 0.0)), &at(1.0, &vllm(2.0, 8.0)), &[]);
    assert_eq!(idle.busy_steps, None);
    assert_eq!(why(&idle, Signal::BusySteps), Some(Unknown::NotBusy));
    assert_eq!(idle.steps, Some(1_000));
}

#[test]
fn a_gauge_counts_by_the_time_it_stood() {
    let page = |running: f64| format!("vllm:num_requests_running {running}\n");
    let between = [at(1.0, &page(2.0)), at(9.0, &page(10.0))];
    let metrics = window(&at(0.0, &page(0.0)), &at(10.0, &page(10.0)), &between);
    // 1 s from 0 to 2, 8 s from 2 to 10, 1 s at 10.
    near(metrics.running.map(|gauge| gauge.mean), (1.0 + 48.0 + 10.0) / 10.0);
    let GaugeOverTime { min, max, readings, .. } = metrics.running.unwrap();
    assert_eq!((min, max, readings), (0.0, 10.0, 4));
    let metrics = window(&at(0.0, &vllm(1.0, 8.0)), &at(10.0, &vllm(3.0, 8.0)), &[]);
    // Waiting requests are those of both engines; the use of their caches is a mean.
    near(metrics.waiting.map(|gauge| gauge.mean), 6.0);
    near(metrics.kv_use.map(|gauge| gauge.mean), 0.625);
}

#[test]
fn a_counter_that_went_down_is_unknown_and_the_others_are_not() {
    let page = |preemptions: f64, prompt: f64| {
        format!("vllm:num_preemptions_total {preemptions}\nvllm:prompt_tokens_total {prompt}\n")
    };
    let metrics = window(&at(0.0, &page(5.0, 10.0)), &at(1.0, &page(4.0, 30.0)), &[]);
    assert_eq!(metrics.preemptions, None);
    assert_eq!(why(&metrics, Signal::Preemptions), Some(Unknown::Restarted));
    assert_eq!(metrics.prompt_tokens, Some(20));
    // It came back to more than it was at first.
    let dip = [at(1.0, &page(0.0, 20.0))];
    let metrics = window(&at(0.0, &page(5.0, 10.0)), &at(2.0, &page(7.0, 30.0)), &dip);
    assert_eq!(metrics.preemptions, None);
    assert_eq!(why(&metrics, Signal::Preemptions), Some(Unknown::Restarted));
}

#[test]
fn another_process_spoils_every_counter_and_no_gauge() {
    let page = |start: f64, scale: f64| {
        format!(
            "process_start_time_seconds {start}\nvllm:num_preemptions_total {scale}\nvllm:num_requests_running 1\n"
        )
    };
    let metrics = window(&at(0.0, &page(1.7e9, 5.0)), &at(1.0, &page(1.7e9 + 60.0, 50.0)), &[]);
    assert_eq!(metrics.preemptions, None);
    assert_eq!(why(&metrics, Signal::Preemptions), Some(Unknown::Restarted));
    assert!(metrics.running.is_some());
    let metrics = window(&at(0.0, &page(1.7e9, 5.0)), &at(1.0, &page(1.7e9 + 0.5, 50.0)), &[]);
    assert_eq!(metrics.preemptions, Some(45));
    // Another program altogether.
    let metrics = window(&at(0.0, "llamacpp:n_decode_total 5\n"), &at(1.0, &page(1.7e9, 5.0)), &[]);
    assert_eq!(why(&metrics, Signal::Preemptions), Some(Unknown::Restarted));
}

#[test]
fn what_is_no_count_is_unknown() {
    for bad in ["NaN", "+Inf", "-1", "1e300"] {
        let page =
            |value: &str| format!("vllm:num_preemptions_total {value}\nvllm:num_requests_running {value}\n");
        let metrics = window(&at(0.0, &page("0")), &at(1.0, &page(bad)), &[]);
        assert_eq!(metrics.preemptions, None);
        assert_eq!(why(&metrics, Signal::Preemptions), Some(Unknown::NotANumber), "{bad}");
    }
    let page = "vllm:num_requests_running NaN\n";
    let metrics = window(&at(0.0, page), &at(1.0, page), &[]);
    assert_eq!((metrics.running, why(&metrics, Signal::Running)), (None, Some(Unknown::NotANumber)));
    // One engine without a number is not a number of all.
    let page = "vllm:num_preemptions_total{engine=\"0\"} 3\nvllm:num_preemptions_total{engine=\"1\"} NaN\n";
    let metrics = window(&at(0.0, page), &at(1.0, page), &[]);
    assert_eq!(why(&metrics, Signal::Preemptions), Some(Unknown::NotANumber));
}

#[test]
fn a_counter_may_begin_within_the_window_and_not_end_in_it() {
    let without = "vllm:num_requests_running 1\n";
    let with = "vllm:num_requests_running 1\nvllm:num_preemptions_total 3\n";
    let begins = window(&at(0.0, without), &at(1.0, with), &[]);
    assert_eq!(begins.preemptions, Some(3));
    let ends = window(&at(0.0, with), &at(1.0, without), &[]);
    assert_eq!((ends.preemptions, why(&ends, Signal::Preemptions)), (None, Some(Unknown::Vanished)));
    let never = window(&at(0.0, without), &at(1.0, without), &[]);
    assert_eq!(why(&never, Signal::Preemptions), Some(Unknown::NotExported));
    assert!(never.seen.iter().all(|seen| seen.signal == Signal::Running));
}

#[test]
fn a_mean_of_nothing_is_unknown() {
    let page = vllm(2.0, 1.0);
    let metrics = window(&at(0.0, &page), &at(1.0, &page), &[]);
    assert_eq!((metrics.ttft, why(&metrics, Signal::Ttft)), (None, Some(Unknown::NothingCounted)));
    assert_eq!((metrics.prompt_tokens, metrics.prefix_hit_rate), (Some(0), None));
    assert_eq!(
        (metrics.speculation, why(&metrics, Signal::DraftTokens)),
        (None, Some(Unknown::NothingCounted))
    );
}

#[test]
fn older_names_stand_in_and_one_series_is_followed_throughout() {
    let old = |hits: f64| {
        format!(
            "vllm:gpu_prefix_cache_hits_total {hits}\nvllm:gpu_prefix_cache_queries_total {}\n\
             vllm:gpu_cache_usage_perc 0.5\n",
            2.0 * hits
        )
    };
    let metrics = window(&at(0.0, &old(10.0)), &at(1.0, &old(30.0)), &[]);
    near(metrics.prefix_hit_rate, 0.5);
    near(metrics.kv_use.map(|gauge| gauge.max), 0.5);
    // SGLang writes the better one down with its first event: both are compared by it.
    let before = "sglang:cached_tokens_total 500\nsglang:num_running_reqs 0\n";
    let after = "sglang:cached_tokens_total 600\nsglang:realtime_tokens_total{mode=\"prefill_cache\"} 90\n";
    let metrics = window(&at(0.0, before), &at(1.0, after), &[]);
    assert_eq!(metrics.cached_prompt_tokens, Some(90));
}

/// What SGLang with two ranks of tensor parallelism in each of two replicas exports.
fn sglang(scale: f64) -> String {
    let mut page = String::new();
    for replica in 0..2 {
        for rank in 0..2 {
            let labels = format!(
                "dp_rank=\"{replica}\",tp_rank=\"{rank}\",pp_rank=\"0\",moe_ep_rank=\"{rank}\",model_name=\"m\",engine_type=\"unified\""
            );
            for (mode, count) in
                [("decode_cuda_graph", 400.0), ("decode_none", 100.0), ("prefill_none", 50.0)]
            {
                let _ = writeln!(
                    page,
                    "sglang:cuda_graph_passes_total{{{labels},mode=\"{mode}\"}} {}",
                    count * scale
                );
            }
            for (mode, count) in
                [("decode", 8_000.0), ("prefill_compute", 3_000.0), ("prefill_cache", 1_000.0)]
            {
                let _ = writeln!(
                    page,
                    "sglang:realtime_tokens_total{{{labels},mode=\"{mode}\"}} {}",
                    count * scale
                );
            }
            let _ = writeln!(page, "sglang:num_retracted_requests_total{{{labels}}} {}", 3.0 * scale);
            let _ = writeln!(page, "sglang:num_running_reqs{{{labels}}} 16");
            let _ = writeln!(
                page,
                "sglang:num_queue_reqs{{{labels}}} 4\nsglang:num_grammar_queue_reqs{{{labels}}} 1"
            );
            let _ = writeln!(
                page,
                "sglang:full_token_usage{{{labels}}} 0.25\nsglang:token_usage{{{labels}}} 0.9"
            );
            let _ = writeln!(
                page,
                "sglang:max_total_num_tokens{{{labels}}} 100000\nsglang:cache_hit_rate{{{labels}}} 0"
            );
        }
    }
    page
}

#[test]
fn each_rank_exports_the_same_and_is_counted_once() {
    let metrics = window(&at(0.0, &sglang(1.0)), &at(2.0, &sglang(2.0)), &[]);
    assert_eq!(metrics.dialect, Dialect::Sglang);
    // Two replicas.
    assert_eq!(metrics.preemptions, Some(6));
    near(metrics.running.map(|gauge| gauge.mean), 32.0);
    near(metrics.waiting.map(|gauge| gauge.mean), 10.0);
    near(metrics.kv_use.map(|gauge| gauge.mean), 0.25);
    assert_eq!(metrics.cached_prompt_tokens, Some(2_000));
    assert_eq!(metrics.computed_prompt_tokens, Some(6_000));
    near(metrics.prefix_hit_rate, 0.25);
    assert_eq!(metrics.configuration.kv_tokens, Some(100_000));
    let busy = metrics.busy_steps.unwrap();
    assert_eq!((busy.basis, busy.engines), (StepBasis::ForwardPasses, 2));
    assert_eq!((busy.steps, busy.decode_steps), (1_100, 1_000));
    near(busy.mean_batch, 16.0);
    near(busy.mean_step_tokens, 22_000.0 / 1_100.0);
}

/// A page of llama.cpp's server, as its prints six digits.
fn llama(prompt: &str, cached: &str, predicted: &str, decodes: &str, busy: &str) -> String {
    format!(
        "# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed\n\
         # TYPE llamacpp:prompt_tokens_total counter\n\
         llamacpp:prompt_tokens_total {prompt}\nllamacpp:prompt_tokens_cached_total {cached}\n\
         llamacpp:prompt_seconds_total 1.5\nllamacpp:tokens_predicted_total {predicted}\n\
         llamacpp:tokens_predicted_seconds_total 2.25\nllamacpp:n_decode_total {decodes}\n\
         llamacpp:prompt_tokens_seconds 100\nllamacpp:predicted_tokens_seconds 50.5\n\
         llamacpp:requests_processing 3\nllamacpp:requests_deferred 0\n\
         llamacpp:n_busy_slots_per_decode {busy}\n"
    )
}

#[test]
fn llama_cpp_counts_cached_tokens_apart_and_slots_by_the_call() {
    let before = llama("1000", "50", "100", "10", "1.5").replace("_total 1.5", "_total 0.5");
    let after = llama("3000", "1050", "500", "30", "2.5").replace("_total 2.25", "_total 4.25");
    let metrics = window(&at(0.0, &before), &at(4.0, &after), &[]);
    assert_eq!(metrics.dialect, Dialect::LlamaCpp);
    assert_eq!(metrics.prompt_tokens, Some(3_000));
    assert_eq!(metrics.computed_prompt_tokens, Some(2_000));
    assert_eq!(metrics.cached_prompt_tokens, Some(1_000));
    near(metrics.prefix_hit_rate, 1.0 / 3.0);
    // No series has all tokens of the prompts, and they are known.
    assert_eq!(why(&metrics, Signal::PromptTokens), None);
    near(metrics.prompt_ns_per_token, 1e9 / 2_000.0);
    near(metrics.predicted_ns_per_token, 2e9 / 400.0);
    let busy = metrics.busy_steps.unwrap();
    assert_eq!((busy.basis, busy.steps), (StepBasis::DecodeCalls, 20));
    near(Some(busy.mean_step_ns), 0.2e9);
    // 75 slots in 30 calls, 15 in the first 10.
    near(busy.mean_batch, 3.0);
    assert_eq!((metrics.kv_use, why(&metrics, Signal::KvUse)), (None, Some(Unknown::NotExported)));
}

#[test]
fn a_real_page_of_llama_server_under_load_gives_its_steps() {
    // Four slots of a tiny model, 1.035927 s apart.
    let first = at(0.0, include_str!("../../tests/fixtures/llama-server-metrics-1.txt"));
    let second = at(1.035_927, include_str!("../../tests/fixtures/llama-server-metrics-2.txt"));
    assert_eq!(first.snapshot.broken_lines, 0);
    let metrics = window(&first, &second, &[]);
    assert_eq!((metrics.dialect, metrics.steps), (Dialect::LlamaCpp, Some(445)));
    // It counts the tokens of a request when the request ends.
    assert_eq!(metrics.generation_tokens, Some(0));
    near(metrics.running.map(|gauge| gauge.mean), 4.0);
    let busy = metrics.busy_steps.unwrap();
    near(Some(busy.mean_step_ns), 1.035_927e9 / 445.0);
    let batch = busy.mean_batch.unwrap();
    assert!((batch - 4.0).abs() < 1e-3, "{batch}");
}

#[test]
fn six_digits_are_too_few_for_a_small_difference_of_large_counts() {
    let window_of = |before: &str, after: &str| {
        window(&at(0.0, &llama(before, "0", "1", "1", "1")), &at(1.0, &llama(after, "0", "1", "1", "1")), &[])
    };
    let metrics = window_of("1.23456e+06", "1.23466e+06");
    assert_eq!(
        (metrics.computed_prompt_tokens, why(&metrics, Signal::ComputedTokens)),
        (None, Some(Unknown::TooCoarse))
    );
    assert_eq!(window_of("1.23456e+06", "1.33456e+06").computed_prompt_tokens, Some(100_000));
    // What may have been nothing, or five.
    assert_eq!(
        why(&window_of("1.23456e+06", "1.23456e+06"), Signal::ComputedTokens),
        Some(Unknown::TooCoarse)
    );
    // Below a million a count is printed whole.
    assert_eq!(window_of("123456", "123457").computed_prompt_tokens, Some(1));
    // Python prints all digits, and as few as are needed.
    let page = |value: &str| format!("vllm:prompt_tokens_total {value}\n");
    let metrics = window(&at(0.0, &page("1.2e+06")), &at(1.0, &page("1.200001e+06")), &[]);
    assert_eq!(metrics.prompt_tokens, Some(1));
}

#[test]
fn other_servers_have_their_own_names() {
    let tgi = |scale: f64| {
        format!(
            "tgi_request_input_length_sum {}\ntgi_request_generated_tokens_sum {}\ntgi_request_success {}\n\
             tgi_request_duration_sum {}\ntgi_request_duration_count {}\ntgi_batch_current_size 4\ntgi_queue_size 2\n\
             tgi_batch_inference_count{{method=\"prefill\"}} {}\ntgi_batch_inference_count{{method=\"decode\"}} {}\n",
            100.0 * scale,
            200.0 * scale,
            scale,
            2.0 * scale,
            scale,
            3.0 * scale,
            97.0 * scale
        )
    };
    let metrics = window(&at(0.0, &tgi(1.0)), &at(1.0, &tgi(2.0)), &[]);
    assert_eq!(metrics.dialect, Dialect::Tgi);
    assert_eq!((metrics.prompt_tokens, metrics.generation_tokens), (Some(100), Some(200)));
    near(metrics.e2e.map(|mean| mean.mean_ns), 2e9);
    let busy = metrics.busy_steps.unwrap();
    assert_eq!(
        (busy.basis, busy.steps, busy.decode_steps, busy.mean_batch),
        (StepBasis::Batches, 100, 97, None)
    );
    let trt = |scale: f64| {
        format!(
            "trtllm_prompt_tokens_total{{model_name=\"m\"}} {}\ntrtllm_prompt_cached_tokens_total {}\n\
             trtllm_num_requests_running 5\ntrtllm_kv_cache_utilization 0.5\ntrtllm_kv_cache_max_blocks 10\n\
             trtllm_kv_cache_tokens_per_block 32\n",
            100.0 * scale,
            25.0 * scale
        )
    };
    let metrics = window(&at(0.0, &trt(1.0)), &at(1.0, &trt(2.0)), &[]);
    assert_eq!((metrics.dialect, metrics.computed_prompt_tokens), (Dialect::TrtLlm, Some(75)));
    near(metrics.prefix_hit_rate, 0.25);
    assert_eq!(metrics.configuration.kv_tokens, Some(320));
}

#[test]
fn ray_writes_names_in_its_own_way() {
    let page = |tokens: f64| {
        format!(
            "ray_vllm_generation_tokens_total{{WorkerId=\"a\",model_name=\"m\"}} {tokens}\nray_vllm_num_requests_running 2\n"
        )
    };
    let metrics = window(&at(0.0, &page(5.0)), &at(1.0, &page(9.0)), &[]);
    assert_eq!((metrics.dialect, metrics.generation_tokens), (Dialect::Vllm, Some(4)));
}

#[test]
fn a_page_without_known_series_is_of_no_server() {
    for page in ["", "<html>", "python_gc_objects_collected_total 5\nprocess_start_time_seconds 1.7e9\n"] {
        let snapshot = Snapshot::read(page.as_bytes());
        assert_eq!(
            (snapshot.dialect(), snapshot.signals().filter(|s| *s != Signal::StartTime).count()),
            (None, 0)
        );
    }
    // One foreign series does not make another server of it.
    let page = vllm(1.0, 1.0) + "sglang:num_running_reqs 7\n";
    assert_eq!(Snapshot::read(page.as_bytes()).dialect(), Some(Dialect::Vllm));
    near(Snapshot::read(page.as_bytes()).number(Signal::Running), 1.0);
}

#[test]
fn the_result_survives_json() {
    let metrics = window(&at(0.0, &vllm(1.0, 8.0)), &at(10.0, &vllm(3.0, 8.0)), &[]);
    let text = serde_json::to_string(&metrics).unwrap();
    assert_eq!(serde_json::from_str::<ServerMetrics>(&text).unwrap(), metrics);
}

#[test]
fn a_window_lies_between_the_readings_around_it() {
    let readings = Readings {
        scrapes: (0..10).map(|second| at(f64::from(second), &vllm(f64::from(second), 2.0))).collect(),
        failures: [(FetchFailure::Timeout, 3)].into(),
    };
    let second = |seconds: f64| *BEGIN + Duration::from_secs_f64(seconds);
    let metrics = readings.window(second(2.5), second(6.5)).unwrap();
    near(Some(metrics.window_ns), 5e9);
    assert_eq!((metrics.readings, metrics.prompt_tokens), (6, Some(10_000)));
    assert_eq!((metrics.failures[0].failure, metrics.failures[0].count), (FetchFailure::Timeout, 3));
    near(readings.window(second(0.0), second(99.0)).map(|all| all.window_ns), 9e9);
    assert_eq!(readings.window(second(20.0), second(30.0)), None);
    assert_eq!(Readings::default().window(second(0.0), second(1.0)), None);
}

#[test]
fn a_run_is_read_before_beside_and_after() {
    let asked = AtomicUsize::new(0);
    let server = Server::start(move |path| {
        let count = asked.fetch_add(1, Ordering::SeqCst);
        match (path, count) {
            // One of them fails.
            ("/metrics", 1) => reply("503 Busy", "text/plain", ""),
            ("/metrics", _) => reply("200 OK", "text/plain", vllm(count as f64, 2.0)),
            _ => not_found(),
        }
    });
    let target = Target::new(&format!("{}/v1", server.url()), Some("sk-secret")).unwrap();
    let source = Source::new(&target, "/metrics");
    let scraper = Scraper::start(source.clone(), Duration::from_millis(1)).unwrap();
    // The first reading is over when it has started.
    assert!(!server.heads().is_empty());
    while server.heads().len() < 4 {
        std::thread::yield_now();
    }
    let readings = scraper.stop();
    let asked = server.heads().len();
    assert_eq!(readings.failures, [(FetchFailure::Status(503), 1)].into());
    assert_eq!(readings.scrapes.len(), asked - 1);
    assert!(readings.scrapes.is_sorted_by_key(|scrape| scrape.at));
    let (first, last) = (&readings.scrapes[0], &readings.scrapes[readings.scrapes.len() - 1]);
    let metrics = readings.window(first.at, last.at).unwrap();
    assert_eq!(metrics.prompt_tokens, Some(2_000 * (asked as u64 - 1)));
    assert!(server.heads().iter().all(|head| head.contains("sk-secret")));
    assert!(!format!("{source:?} {readings:?}").contains("secret"));
}

#[test]
fn a_page_that_cannot_be_read_ends_in_its_failure() {
    let server = Server::start(|path| match path {
        "/hang" => Reply::Hang,
        "/large" => reply("200 OK", "text/plain", vec![b'\n'; 10 << 20 | 1]),
        "/html" => reply("200 OK", "text/html", "<html>vllm:a 1</html>"),
        // What vLLM says with its statistics off.
        "/off" => reply("200 OK", "text/plain", "python_info{version=\"3.12\"} 1.0\n"),
        _ => not_found(),
    });
    let target = Target::new(&server.url(), None).unwrap();
    let read = |page| Source::new(&target, page).read().map(|scrape| scrape.snapshot);
    assert_eq!(read("/hang"), Err(FetchFailure::Timeout));
    assert_eq!(read("/large"), Err(FetchFailure::TooLarge));
    assert_eq!(read("/html"), Err(FetchFailure::NotUnderstood));
    assert_eq!(read("/off"), Err(FetchFailure::NotUnderstood));
    assert_eq!(read("/metrics"), Err(FetchFailure::Status(404)));
}

proptest! {
    #[test]
    fn any_pages_make_a_window(pages in proptest::collection::vec(
        proptest::collection::vec((0..table::TABLE.len(), 0..3usize, "[a-z]{0,2}", any::<f64>()), 0..30), 2..5,
    )) {
        let scrapes: Vec<Scrape> = pages.iter().enumerate().map(|(second, lines)| {
            let mut page = String::new();
            for (row, suffix, label, value) in lines {
                let name = table::TABLE[*row].series[0].names[0];
                let suffix = ["", "_sum", "_count"][*suffix];
                let _ = writeln!(page, "{name}{suffix}{{l=\"{label}\",mode=\"decode\"}} {value:?}");
            }
            at(second as f64, &page)
        }).collect();
        let metrics = window(&scrapes[0], &scrapes[scrapes.len() - 1], &scrapes[1..scrapes.len() - 1]);
        let text = serde_json::to_string(&metrics).unwrap();
        prop_assert_eq!(serde_json::from_str::<ServerMetrics>(&text).unwrap(), metrics.clone());
        for gauge in [metrics.running, metrics.waiting, metrics.kv_use].into_iter().flatten() {
            prop_assert!(gauge.min <= gauge.max);
        }
        for signal in &metrics.unknown {
            prop_assert_eq!(metrics.unknown.iter().filter(|other| other.signal == signal.signal).count(), 1);
        }
    }
}
