//! The lines of a serving result about adapters, grammars and text.

use crate::analysis::words::counted;
use hbmark_core::result::serving::{Point, ServeReport, ServeResult};
use hbmark_core::units::{Bytes, Nanos, rounded};

/// Adapters listed one by one.
const LISTED: usize = 8;

/// Lines above all tables: what was loaded and compiled, and how long that took.
pub(super) fn head(report: &ServeReport) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(lora) = &report.lora {
        let most = lora.max_loras.map_or_else(|| "all".to_owned(), |most| most.to_string());
        if report.server.is_some() {
            let names: Vec<&str> = lora.adapters.iter().map(|adapter| adapter.name.as_str()).collect();
            lines.push(format!("LoRA adapters of the server: {}", names.join(", ")));
        } else {
            lines.push(format!(
                "{} LoRA adapters, {most} of them at once, of rank {} at most",
                lora.adapters.len(),
                lora.max_lora_rank
            ));
        }
        let ours = lora.adapters.iter().filter(|_| report.server.is_none());
        for adapter in ours.clone().take(LISTED) {
            let disk = adapter.disk_ns.map_or_else(
                || "synthetic (not read from disk)".to_owned(),
                |ns| format!("loaded from disk in {}", Nanos(ns)),
            );
            let memory = adapter
                .memory_ns
                .map_or_else(String::new, |ns| format!(", copied to the engine in {}", Nanos(ns)));
            let targets: Vec<&str> = adapter.targets.iter().map(|target| target.name()).collect();
            lines.push(format!(
                "adapter {}: rank {} on {}, {}; {disk}{memory}",
                adapter.name,
                adapter.rank,
                targets.join(" "),
                adapter.bytes
            ));
        }
        if ours.clone().count() > LISTED {
            lines.push(format!("and {} more", counted(ours.count() - LISTED, "adapter")));
        }
    }
    if let Some(structured) = &report.structured {
        let times = structured.vocabulary_ns.zip(structured.compile_ns).map(|(vocabulary, compile)| {
            format!("; vocabulary prepared in {}, grammar compiled in {}", Nanos(vocabulary), Nanos(compile))
        });
        lines.push(format!(
            "structured output: {} for {:.0} % of the requests{}",
            structured.grammar,
            structured.share * 100.0,
            times.unwrap_or_default()
        ));
    }
    lines
}

/// Sentences about a point.
pub(super) fn remarks(point: &Point, result: &ServeResult) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(cost) = &point.adapters {
        // A server shows neither its steps nor the size of its adapters.
        let ours = point.live.is_none();
        lines.extend(ours.then(|| format!(
            "adapters: {:.2} different ones in a step ({:.2} expected of {}, {}); they add {} to the weights a step reads, {:.2} %",
            cost.mean_in_batch,
            cost.expected_in_batch,
            cost.adapters,
            cost.assignment,
            Bytes(rounded(cost.added_bytes_per_step)),
            cost.added_share_of_weights * 100.0
        )));
        if let Some(measured) = cost.measured_tpot_ratio {
            let predicted = cost.predicted_tpot_ratio.filter(|_| ours);
            let by_bytes = predicted
                .map_or_else(String::new, |ratio| format!("; bytes alone would make it {ratio:.3} times"));
            lines.push(format!("adapters: median TPOT is {measured:.3} times that without them{by_bytes}"));
        }
    }
    if let Some(cost) = &point.structured {
        lines.push(format!(
            "structured output: {} outputs begun under the grammar, {} came to its end, the others were cut at their planned length",
            cost.started, cost.complete
        ));
        if let (Some(mask), Some(apply), Some(allowed)) =
            (cost.mask_ns_per_token, cost.mask_apply_ns_per_token, cost.mean_allowed)
        {
            lines.push(format!(
                "structured output: a mask takes {} and its application {} per token, over {} tokens; {allowed:.0} tokens were allowed on \
                 average",
                Nanos(mask),
                Nanos(apply),
                cost.tokens
            ));
        }
    }
    if let Some(ratio) = result.encoded_per_asked.filter(|ratio| (ratio - 1.0).abs() > 0.01) {
        lines.push(format!(
            "the texts of the prompts encode to {ratio:.2} tokens for each token asked for; what is run has the length asked for"
        ));
    }
    lines
}
