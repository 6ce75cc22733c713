//! What a result against a live server says beside its latencies: who answered, how tokens were counted, what failed, the client itself.

use crate::analysis::words;
use hbmark_core::result::serving::{
    GaugeOverTime, LiveResult, Quantiles, ServeResult, ServerIdentity, ServerMetrics, StampSource,
    TokenEvidence,
};
use hbmark_core::units::Nanos;

/// Share of events without a timestamp of their own from which the gaps between tokens mean little.
const UNRESOLVED: f64 = 0.1;

/// The server, above all tables: its model and address, and which program it is.
pub(super) fn server(server: &ServerIdentity) -> (String, String) {
    let version = server.version.as_deref().map(|version| format!(" {version}")).unwrap_or_default();
    let most = server.max_model_len.map(|most| format!(" · context {most}")).unwrap_or_default();
    let place = format!("{} at {}{}", server.model, server.url, server.path);
    (place, format!("{}{version}{most}", server.dialect.name()))
}

/// The name of a kind of evidence.
fn evidence(kind: TokenEvidence) -> &'static str {
    match kind {
        TokenEvidence::ContinuousUsage => "the running usage of each event",
        TokenEvidence::TokenIds => "the token ids of each event",
        TokenEvidence::Logprobs => "the log probabilities of each event",
        TokenEvidence::FinalUsage => "the final usage, spread over the events",
        TokenEvidence::Tokenizer => "a tokenizer over the output text",
        TokenEvidence::Events => "one token for each event (the server says nothing: a guess)",
    }
}

/// The rows of the table of latencies that only a client has.
pub(super) fn rows(live: &LiveResult) -> Vec<(&'static str, Option<&Quantiles>)> {
    let reasons = live.ttft_content_ns.n > 0 && live.ttft_content_ns.p50 != live.ttft_from_dispatch_ns.p50;
    let mut rows = vec![
        ("TTFT from dispatch", Some(&live.ttft_from_dispatch_ns)),
        ("E2E from dispatch", Some(&live.e2e_from_dispatch_ns)),
        ("gap between events", Some(&live.event_gap_ns)),
        ("headers", Some(&live.headers_ns)),
        ("connect", Some(&live.connect_ns)),
        ("client queue", Some(&live.client_queue_ns)),
        ("client delay", Some(&live.client_delay_ns)),
    ];
    if reasons {
        rows.insert(0, ("TTFT of the answer", Some(&live.ttft_content_ns)));
    }
    rows.retain(|(_, quantiles)| quantiles.is_some_and(|q| q.n > 0));
    rows
}

fn counted(counts: impl IntoIterator<Item = (String, usize)>) -> String {
    let words: Vec<String> = counts.into_iter().map(|(name, count)| format!("{name} {count}")).collect();
    words.join(", ")
}

/// What the server's own counters say of the measured time.
fn counters(server: &ServerMetrics) -> Vec<String> {
    let mut parts = Vec::new();
    let mut gauge = |what: &str, gauge: Option<GaugeOverTime>, unit: f64, sign: &str| {
        parts.extend(
            gauge.map(|g| format!("{what} {:.1}{sign} (most {:.1}{sign})", g.mean * unit, g.max * unit)),
        );
    };
    gauge("running", server.running, 1.0, "");
    gauge("waiting", server.waiting, 1.0, "");
    gauge("KV use", server.kv_use, 100.0, " %");
    parts.extend(server.preemptions.map(|count| format!("{count} preemptions")));
    parts.extend(server.prefix_hit_rate.map(|rate| format!("prefix hits {:.1} %", rate * 100.0)));
    let means = [
        ("queue", server.queue),
        ("prefill", server.prefill),
        ("TTFT", server.ttft),
        ("decode", server.decode),
        ("ITL", server.itl),
        ("E2E", server.e2e),
    ];
    let means = means.into_iter().filter_map(|(what, mean)| Some(format!("{what} {}", Nanos(mean?.mean_ns))));
    let means: Vec<String> = means.collect();
    let mut lines = Vec::new();
    if !parts.is_empty() {
        lines.push(format!("server: {}", parts.join(" · ")));
    }
    if !means.is_empty() {
        lines.push(format!("server, means of its own counters: {}", means.join(" · ")));
    }
    if let Some(steps) = &server.busy_steps {
        let batch = steps.mean_batch.map(|batch| format!(", batch {batch:.1}")).unwrap_or_default();
        lines.push(format!(
            "server steps while it was busy: {} of {} on average{batch}",
            steps.steps,
            Nanos(steps.mean_step_ns)
        ));
    }
    if let Some(speculation) = &server.speculation {
        lines.push(format!(
            "server, speculation: {} of {} drafted tokens were accepted",
            speculation.accepted_tokens, speculation.draft_tokens
        ));
    }
    lines
}

/// Sentences about a point.
pub(super) fn lines(live: &LiveResult, result: &ServeResult) -> Vec<String> {
    let mut lines = Vec::new();
    let per_event = live.tokens_per_event.map(|n| format!("; {n:.2} tokens an event")).unwrap_or_default();
    let by = live.evidence.iter().map(|(kind, count)| (format!("by {}:", evidence(*kind)), *count));
    if !live.evidence.is_empty() {
        lines.push(format!("output tokens counted {} requests{per_event}", counted(by)));
    }
    let stamps = match live.stamps {
        StampSource::Kernel => "events are stamped by the kernel on receipt",
        StampSource::Mixed => "some events are stamped by the kernel on receipt, others when they were read",
        StampSource::Client => "events are stamped when they were read (no receive stamps, as under TLS)",
    };
    let share = |value: Option<f64>, what: &str| {
        value.map(|share| format!(" · {:.1} % {what}", share * 100.0)).unwrap_or_default()
    };
    let delay = live.client_delay_ns.p99.or(live.client_delay_ns.max);
    let delay = delay.map(|d| format!(", and read within {} (99 %)", Nanos(d.value()))).unwrap_or_default();
    let shared = live.shared_stamps.filter(|share| *share > 0.01);
    let shared = shared
        .map(|share| {
            let resolved = if share > UNRESOLVED { ", and gaps between tokens are not resolved" } else { "" };
            format!(
                "; {:.1} % share the timestamp of a later event: chunks were merged on receipt{resolved}",
                share * 100.0
            )
        })
        .unwrap_or_default();
    lines.push(format!(
        "client: {stamps}{delay}{shared}{}{}{} · {} opened, {} on one that was kept",
        share(live.client_cpu, "of a processor"),
        share(live.client_cpu_wait, "waiting for one"),
        if live.client_realtime { " · real-time priority" } else { "" },
        words::counted(live.connections_opened, "connection"),
        words::counted(live.connections_reused, "request")
    ));
    if !result.rejected.is_empty() {
        let of = words::counted(result.measured, "request");
        lines.push(format!("failed: {} of {of}", counted(result.rejected.clone())));
    }
    // Those of measured requests are said with the reasons.
    let others = live.messages.iter().filter(|(failure, _)| !result.rejected.contains_key(*failure));
    lines.extend(others.map(|(failure, words)| format!("the first {failure}: {words}")));
    if live.short_outputs + live.long_outputs > 0 {
        lines.push(format!(
            "{} outputs are shorter and {} longer than asked for ({}): tokens per second are those of the outputs that came",
            live.short_outputs,
            live.long_outputs,
            counted(live.finish_reasons.clone())
        ));
    }
    if live.disagreeing_counts > 0 {
        lines.push(format!(
            "in {} the final token count is another than that of the events; the final one counts",
            words::counted(live.disagreeing_counts, "answer")
        ));
    }
    if live.retried > 0 {
        lines.push(format!(
            "sent again, because a kept connection was closed before any answer: {}; the time counts from the first sending",
            words::counted(live.retried, "request")
        ));
    }
    if live.clock_steps > 0 {
        lines.push(format!(
            "the machine's clock was stepped {} during the run; the stamps around it are those of this program",
            words::counted(live.clock_steps, "time")
        ));
    }
    if let Some(ratio) = live.prompt_tokens_ratio.filter(|ratio| (ratio - 1.0).abs() > 0.01) {
        lines.push(format!("prompt tokens, the server's count over the plan: {ratio:.3}"));
    }
    lines.extend(live.server.iter().flat_map(counters));
    if let Some(share) = live.cached_share {
        lines.push(format!(
            "the server found {:.1} % of the prompt tokens in its prefix cache",
            share * 100.0
        ));
    } else if live.server.as_ref().is_some_and(|server| server.computed_prompt_tokens.is_some()) {
        lines.push(
            "prompt tokens per second are those that the server's own counters call computed".to_owned(),
        );
    } else {
        lines.push("cached prompt tokens are not known and count as computed".to_owned());
    }
    lines
}
