//! What the server counted, as `/metrics` of vLLM shows it.

use std::fmt::Write as _;

/// The moments of a request, in ns; 0 before they come.
#[derive(Debug, Clone, Copy)]
pub(super) struct Times {
    pub(super) arrived: u64,
    /// Left the queue of the batch.
    pub(super) admitted: u64,
    pub(super) first: u64,
    pub(super) last: u64,
}

impl Times {
    pub(super) fn new(now: u64) -> Self {
        Self { arrived: now, admitted: now, first: 0, last: 0 }
    }
}

/// Sums since the start.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) prompt_tokens: u64,
    pub(super) generated: u64,
    pub(super) finished: u64,
    pub(super) aborted: u64,
    pub(super) steps: u64,
    started: u64,
    itl_gaps: u64,
    sums_ns: [u64; SPANS.len()],
}

const SPANS: [&str; 7] = [
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
];
const TTFT: usize = 0;
const ITL: usize = 1;

impl Counters {
    /// A write held tokens; `times.last` is still that of the write before.
    pub(super) fn tokens(&mut self, count: u64, prompt_tokens: u64, times: &Times, now: u64) {
        if times.first == 0 {
            self.started += 1;
            self.prompt_tokens += prompt_tokens;
            self.sums_ns[TTFT] += now.saturating_sub(times.arrived);
        } else {
            self.itl_gaps += 1;
            self.sums_ns[ITL] += now.saturating_sub(times.last);
        }
        self.generated += count;
    }
    pub(super) fn finish(&mut self, times: &Times) {
        self.finished += 1;
        let Times { arrived, admitted, first, last } = *times;
        let spans =
            [(arrived, last), (arrived, admitted), (admitted, first), (first, last), (admitted, last)];
        for (sum, (from, to)) in self.sums_ns[ITL + 1..].iter_mut().zip(spans) {
            *sum += to.saturating_sub(from);
        }
    }

    /// The text of `/metrics`. Engine steps are there only when a batch makes them.
    pub(super) fn render(&self, model: &str, running: usize, waiting: usize, batched: bool) -> String {
        let labels = format!(r#"engine="0",model_name={}"#, serde_json::Value::from(model));
        let mut out = String::new();
        let mut plain = |name: &str, kind: &str, more: &str, value: u64| {
            let family = name.strip_suffix("_total").unwrap_or(name);
            // Writing to a string does not fail.
            let _ = write!(
                out,
                "# HELP vllm:{family} {family}\n# TYPE vllm:{family} {kind}\nvllm:{name}{{{labels}{more}}} {value}\n"
            );
        };
        plain("num_requests_running", "gauge", "", running as u64);
        plain("num_requests_waiting", "gauge", "", waiting as u64);
        plain("num_preemptions_total", "counter", "", 0);
        plain("prefix_cache_queries_total", "counter", "", self.prompt_tokens);
        plain("prefix_cache_hits_total", "counter", "", 0);
        plain("prompt_tokens_total", "counter", "", self.prompt_tokens);
        plain("generation_tokens_total", "counter", "", self.generated);
        plain("request_success_total", "counter", r#",finished_reason="length""#, self.finished);
        let _ = writeln!(
            out,
            r#"vllm:request_success_total{{{labels},finished_reason="abort"}} {}"#,
            self.aborted
        );
        let mut histogram = |name: &str, count: u64, sum: f64| {
            let _ = write!(
                out,
                "# HELP vllm:{name} {name}\n# TYPE vllm:{name} histogram\nvllm:{name}_bucket{{{labels},le=\"+Inf\"}} {count}\n\
                 vllm:{name}_count{{{labels}}} {count}\nvllm:{name}_sum{{{labels}}} {sum:?}\n"
            );
        };
        for (index, (name, sum_ns)) in SPANS.iter().zip(self.sums_ns).enumerate() {
            let count = [self.started, self.itl_gaps].get(index).copied().unwrap_or(self.finished);
            histogram(name, count, sum_ns as f64 / 1e9);
        }
        if batched {
            histogram("iteration_tokens_total", self.steps, (self.prompt_tokens + self.generated) as f64);
        }
        out
    }
}
