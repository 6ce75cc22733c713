//! A measured point in the schema of `vllm bench serve`, for scripts that read its results.
//!
//! Enters: a serving result and one of its points. Leaves: a JSON object with vLLM's keys and meanings: TTFT and E2E count from the sending of a
//! request, TPOT is the rest of E2E over the tokens after the first, ITL is the gap between two events, and requests that failed are in no latency.
//! What hbmark counts otherwise stands under vLLM's names for it: `e2el_including_client_queue` counts from the scheduled arrival. Of points with
//! too many requests to keep each, latencies are those of the tables.

use serde_json::{Map, Value};

use hbmark_core::result::serving::{
    Arrivals, Dialect, LEVELS, Offered, Point, Quantiles, Quantity, Requests, SavedOutcome, ServeReport,
    ServeResult, SloMetric,
};
use hbmark_core::stats;
use hbmark_core::units::rounded;

/// Which latencies and percentiles are written.
#[derive(Debug, Clone, PartialEq)]
pub struct Selection {
    /// Of `ttft`, `tpot`, `itl` and `e2el`.
    pub metrics: Vec<String>,
    /// In percent.
    pub percentiles: Vec<f64>,
}

impl Default for Selection {
    fn default() -> Self {
        Self { metrics: ["ttft", "tpot", "itl"].map(str::to_owned).to_vec(), percentiles: vec![99.0] }
    }
}

/// The metrics that can be selected.
pub const METRICS: [&str; 4] = ["ttft", "tpot", "itl", "e2el"];

/// A point as vLLM would write it; none where it was not measured.
pub fn bench_serve(report: &ServeReport, point: &Point, selection: &Selection) -> Option<Value> {
    let result = point.result.as_ref()?;
    let failed = result.measured - result.served.min(result.measured);
    let total = |each: f64| (each * result.served as f64).round();
    let requests = result.requests.as_ref();
    let (input, output) = requests.map_or_else(
        || (total(point.mean_prompt_tokens), result.output_tokens_per_s * result.window_s),
        tokens,
    );
    // From the first request to the last token, as vLLM takes rates; ours are over the time that arrivals span.
    let duration = requests.and_then(duration).unwrap_or(result.served as f64 / result.served_per_s);
    let per_s = |amount: f64| if duration > 0.0 { amount / duration } else { 0.0 };
    let mut fields = Map::new();
    let mut put = |key: &str, value: Value| {
        fields.insert(key.to_owned(), value);
    };
    put("date", report.started_at.clone().into());
    let backend = report.server.as_ref().map_or("hbmark", |server| {
        if server.path.ends_with("/chat/completions") { "openai-chat" } else { backend_of(server.dialect) }
    });
    put("endpoint_type", backend.into());
    put("backend", backend.into());
    put("label", report.note.clone().into());
    put("model_id", report.model_name().into());
    put("tokenizer_id", report.model_name().into());
    put("num_prompts", result.measured.into());
    put("request_rate", rate(point, result.offered_per_s));
    put("burstiness", burstiness(point.arrivals).into());
    let cap = report.config.get("server").and_then(|server| server.get("cap")).cloned();
    put(
        "max_concurrency",
        match point.offered {
            Offered::Concurrency(most) => most.into(),
            _ => cap.unwrap_or(Value::Null),
        },
    );
    put("duration", duration.into());
    put("completed", result.served.into());
    put("failed", failed.into());
    put("total_input_tokens", rounded(input).into());
    put("total_output_tokens", rounded(output).into());
    put("request_throughput", per_s(result.served as f64).into());
    put("request_goodput", good(result).map(per_s).into());
    put("output_throughput", per_s(output).into());
    put("total_token_throughput", per_s(input + output).into());
    let version = &report.environment.build.version;
    put("generated_by", format!("hbmark {version}").into());
    let live = point.live.as_ref();
    let e2e = result.e2e_ns.as_ref();
    let ttft_from_dispatch = live.map(|live| &live.ttft_from_dispatch_ns);
    let e2e_from_dispatch = live.map(|live| &live.e2e_from_dispatch_ns);
    let from_sending = |metric| requests.map(|all| latencies(all, |i| all.latency_from_sending(i, metric)));
    let from_arrival = |metric| requests.map(|all| latencies(all, |i| all.latency(i, metric)));
    let gaps = live.map(|live| &live.event_gap_ns).or(result.itl_ns.as_ref());
    for (name, each, quantiles) in [
        ("ttft", from_sending(SloMetric::Ttft), ttft_from_dispatch.or(result.ttft_ns.as_ref())),
        ("tpot", from_sending(SloMetric::Tpot), result.tpot_ns.as_ref()),
        ("itl", None, gaps),
        ("e2el", from_sending(SloMetric::E2e), e2e_from_dispatch.or(e2e)),
        ("e2el_including_client_queue", from_arrival(SloMetric::E2e), live.and(e2e)),
    ] {
        let is_selected = selection.metrics.iter().any(|metric| name.starts_with(metric.as_str()));
        let Some(quantiles) = quantiles.filter(|_| is_selected) else { continue };
        let statistics = statistics(each.as_deref(), quantiles, &selection.percentiles);
        fields.extend(statistics.map(|(of, value)| (format!("{of}_{name}_ms"), value)));
    }
    Some(Value::Object(fields))
}

fn served(requests: &Requests) -> impl Iterator<Item = usize> {
    (0..requests.outcome.len()).filter(|i| requests.outcome[*i] == SavedOutcome::Served)
}

/// A latency of every request that was served, ascending.
fn latencies(requests: &Requests, of: impl Fn(usize) -> Option<f64>) -> Vec<f64> {
    let mut times: Vec<f64> = served(requests).filter_map(of).collect();
    times.sort_by(f64::total_cmp);
    times
}

/// Served requests within the limits of all objectives, counted from sending; a limit of TPOT is nothing to an output of one token. None without an
/// objective, or without the requests.
fn good(result: &ServeResult) -> Option<f64> {
    let requests = result.requests.as_ref().filter(|_| !result.slo.is_empty())?;
    let within = |i: &usize| {
        result.slo.iter().all(|of| {
            let time = requests.latency_from_sending(*i, of.clause.metric);
            time.is_none_or(|time| time <= of.clause.limit_ns)
        })
    };
    Some(served(requests).filter(within).count() as f64)
}

/// The statistics in milliseconds; null where there are too few requests for one. Of quantiles, which failed requests are among, where the
/// requests are not known.
fn statistics<'a>(
    each: Option<&'a [f64]>,
    quantiles: &'a Quantiles,
    percentiles: &'a [f64],
) -> impl Iterator<Item = (String, Value)> + 'a {
    let at = move |percent: f64| {
        if let Some(each) = each {
            return stats::percentile_if_enough(each, percent / 100.0);
        }
        let kept = LEVELS.iter().find(|(share, _)| (share * 100.0 - percent).abs() < 1e-9);
        kept.and_then(|(_, of)| of(quantiles)).map(Quantity::value)
    };
    let mean = each.map_or_else(|| quantiles.mean.map(Quantity::value), |each| Some(stats::mean(each)));
    // Over n, as NumPy takes it.
    let std = each.and_then(|all| Some(stats::sd(all)? * (1.0 - 1.0 / all.len() as f64).sqrt()));
    let named = percentiles.iter().map(move |percent| (format!("p{percent}"), at(*percent)));
    let first = [("mean", mean), ("median", at(50.0)), ("std", std)];
    first.into_iter().map(|(of, value)| (of.to_owned(), value)).chain(named).map(|(of, value)| {
        let ms = value.filter(|ns| ns.is_finite()).map_or(Value::Null, |ns| (ns / 1e6).into());
        (of, ms)
    })
}

fn duration(requests: &Requests) -> Option<f64> {
    let first = requests.arrival_ns.iter().min()?;
    let last = requests.last_token_ns.iter().flatten().max()?;
    Some(last.saturating_sub(*first) as f64 / 1e9)
}

/// Prompt and output tokens of the requests that were served.
fn tokens(requests: &Requests) -> (f64, f64) {
    let served =
        |index: &usize| requests.outcome.get(*index).is_some_and(|outcome| *outcome == SavedOutcome::Served);
    let sum = |of: &[usize]| (0..of.len()).filter(served).map(|index| of[index] as f64).sum();
    (sum(&requests.prompt_tokens), sum(&requests.output_tokens))
}

fn rate(point: &Point, offered: Option<f64>) -> Value {
    match point.offered {
        Offered::Rate(rate) => rate.into(),
        Offered::AsRecorded => offered.into(),
        Offered::AtOnce | Offered::Concurrency(_) => "inf".into(),
    }
}

/// The shape of the gamma distribution of the gaps: the inverse square of their coefficient of variation.
fn burstiness(arrivals: Option<Arrivals>) -> Option<f64> {
    match arrivals? {
        Arrivals::Poisson => Some(1.0),
        Arrivals::Gamma(variation) => Some(1.0 / (variation * variation)),
        Arrivals::Constant => None,
    }
}

/// vLLM's name of the kind of server.
fn backend_of(dialect: Dialect) -> &'static str {
    match dialect {
        Dialect::Vllm => "vllm",
        Dialect::Sglang => "sglang",
        Dialect::TrtLlm => "tensorrt-llm",
        Dialect::Tgi => "tgi",
        Dialect::LlamaCpp => "llama.cpp",
        Dialect::OpenAi => "openai",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::import::{self, Metric, Statistic};
    use crate::samples;
    use hbmark_core::result::serving::{ClauseResult, Slo};

    #[test]
    fn what_is_written_is_read_back_as_it_was_measured() {
        let report = samples::single();
        let point = &report.points[0];
        let result = point.result.as_ref().unwrap();
        let selection = Selection { metrics: METRICS.map(str::to_owned).to_vec(), ..Selection::default() };
        let written = bench_serve(&report, point, &selection).unwrap();
        let read = import::parse("result.json", written.to_string()).unwrap();
        let row = &read[0].rows[0];
        let near = |metric, statistic, wanted: f64| {
            let found = row.value(metric, statistic).unwrap();
            // Times of single requests are whole nanoseconds.
            assert!((found / wanted - 1.0).abs() < 1e-6, "{metric:?}: {found} and {wanted}");
        };
        let p50 = |quantiles: &Option<Quantiles>| quantiles.as_ref().unwrap().p50.unwrap().value();
        near(Metric::Ttft, Statistic::Median, p50(&result.ttft_ns));
        near(Metric::Tpot, Statistic::Median, p50(&result.tpot_ns));
        near(Metric::E2e, Statistic::Median, p50(&result.e2e_ns));
        let tokens: usize = result.requests.as_ref().unwrap().output_tokens.iter().sum();
        let duration = written["duration"].as_f64().unwrap();
        near(Metric::OutputThroughput, Statistic::Single, tokens as f64 / duration);
        assert_eq!(row.setup.completed, u64::try_from(result.served).ok());
        assert_eq!(row.setup.engine.as_deref(), Some("hbmark"));
        assert!(row.problems.is_empty(), "{:?}", row.problems);
    }

    #[test]
    fn a_metric_that_is_not_asked_for_is_not_written() {
        let report = samples::single();
        let selection = Selection { metrics: vec!["tpot".into()], percentiles: vec![95.0] };
        let written = bench_serve(&report, &report.points[0], &selection).unwrap();
        let keys: Vec<&String> =
            written.as_object().unwrap().keys().filter(|key| key.ends_with("_ms")).collect();
        assert_eq!(keys, ["mean_tpot_ms", "median_tpot_ms", "std_tpot_ms", "p95_tpot_ms"]);
    }

    #[test]
    fn goodput_and_latencies_count_from_sending() {
        let mut report = samples::single();
        let result = report.points[0].result.as_mut().unwrap();
        let requests = result.requests.as_mut().unwrap();
        // A client that keeps each request back until 1 ms before its first token, and the first one until 3 ms before.
        let sent = requests.first_token_ns.iter().enumerate();
        requests.sent_ns = sent
            .map(|(i, first)| Some(first.unwrap() - if i == 0 { 3_000_000 } else { 1_000_000 }))
            .collect();
        requests.arrival_ns = requests.sent_ns.iter().map(|sent| sent.unwrap() / 2).collect();
        let slo: Slo = "ttft_p90=2ms".parse().unwrap();
        let (observed, low, high, met) = (None, None, None, None);
        result.slo = vec![ClauseResult { clause: slo.clauses[0], observed, low, high, met }];
        let written = bench_serve(&report, &report.points[0], &Selection::default()).unwrap();
        let completed = written["completed"].as_f64().unwrap();
        assert!((written["mean_ttft_ms"].as_f64().unwrap() - (completed + 2.0) / completed).abs() < 1e-9);
        let (throughput, goodput) = (&written["request_throughput"], &written["request_goodput"]);
        let share = goodput.as_f64().unwrap() / throughput.as_f64().unwrap();
        assert!((share - (completed - 1.0) / completed).abs() < 1e-9, "{share}");
        report.points[0].result.as_mut().unwrap().slo.clear();
        let written = bench_serve(&report, &report.points[0], &Selection::default()).unwrap();
        assert_eq!(written["request_goodput"], Value::Null);
    }

    #[test]
    fn requests_that_failed_are_in_no_latency() {
        let mut report = samples::single();
        let selection = Selection { percentiles: vec![90.0], ..Selection::default() };
        let result = report.points[0].result.as_mut().unwrap();
        let requests = result.requests.as_mut().unwrap();
        requests.outcome[0] = SavedOutcome::NotServed("status_503".into());
        (requests.first_token_ns[0], requests.last_token_ns[0]) = (None, None);
        let mut ttft: Vec<f64> = (1..requests.outcome.len())
            .map(|i| (requests.first_token_ns[i].unwrap() - requests.arrival_ns[i]) as f64 / 1e6)
            .collect();
        let all = || (0..requests.outcome.len()).map(|i| requests.latency(i, SloMetric::Ttft));
        result.ttft_ns = Some(Quantiles::of(all()));
        result.served -= 1;
        let written = bench_serve(&report, &report.points[0], &selection).unwrap();
        assert_eq!((&written["failed"], &written["completed"]), (&1.into(), &ttft.len().into()));
        ttft.sort_by(f64::total_cmp);
        let (n, mean) = (ttft.len() as f64, stats::mean(&ttft));
        let std = (ttft.iter().map(|ms| (ms - mean).powi(2)).sum::<f64>() / n).sqrt();
        for (of, wanted) in [("mean", mean), ("std", std), ("p90", stats::percentile(&ttft, 0.9))] {
            let found = written[format!("{of}_ttft_ms")].as_f64().unwrap();
            assert!((found / wanted - 1.0).abs() < 1e-9, "{of}: {found} and {wanted}");
        }
    }
}
