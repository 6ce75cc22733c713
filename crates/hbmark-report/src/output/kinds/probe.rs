//! What a server said of itself before it was measured.
//!
//! Enters: a [`Probe`]. Leaves: the document of `hbmark doctor --url`: who answers, what it serves, what of it can be measured.

use crate::analysis::words::counted;
use crate::output::Kind;
use crate::output::document::{Document, Line, Tone, numbers, words};
use hbmark_core::result::serving::{Clue, Outcome, Probe, ServedModel};
use hbmark_core::units::Nanos;

/// Requests are timed with stamps of one clock and scheduled by another: beyond this they drift apart within a run.
const MAX_DRIFT_PPM: f64 = 500.0;

impl Kind for Probe {
    fn document(&self) -> Document {
        let mut document = Document::new(format!("{}: {}", self.root, answer(self)));
        document.lines(facts(self).into_iter().map(Line::plain));
        if !self.models.is_empty() {
            let models = || self.models.iter();
            let number = |of: fn(&ServedModel) -> Option<u64>| {
                models().map(move |m| of(m).map_or_else(|| "-".to_owned(), |n| n.to_string()))
            };
            document.table(vec![
                words("model", models().map(|m| m.id.clone())),
                words("loaded from", models().map(|m| m.root.clone().unwrap_or_default())),
                numbers("context", number(|m| m.max_model_len)),
                numbers("vocabulary", number(|m| m.vocab_size)),
            ]);
        }
        document.titled_list("problems", Tone::Warning, warnings(self));
        document
    }

    fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self)
    }
}

fn answer(probe: &Probe) -> String {
    if !probe.connects() {
        return "nothing answers".to_owned();
    }
    if probe.evidence.is_empty() && probe.models_problem().is_some() {
        return "something listens, and does not say that it is an OpenAI-compatible server".to_owned();
    }
    let version = probe.version.as_deref().map(|version| format!(" {version}")).unwrap_or_default();
    format!("{}{version}", probe.dialect.name())
}

fn clue(clue: Clue) -> &'static str {
    match clue {
        Clue::ModelOwner => "the owner of its model",
        Clue::MetricNames => "the names of its metrics",
        Clue::Props => "/props",
        Clue::ServerInfo => "/server_info",
        Clue::ModelInfo => "/model_info",
        Clue::RouterInfo => "/info",
    }
}

fn facts(probe: &Probe) -> Vec<String> {
    let mut facts: Vec<String> = probe
        .addresses
        .iter()
        .map(|at| match at.connect_ns {
            Some(ns) => format!("{}: a connection takes {}", at.address, Nanos(ns)),
            None => format!("{}: no connection", at.address),
        })
        .collect();
    if !probe.evidence.is_empty() {
        let by: Vec<String> =
            probe.evidence.iter().map(|e| format!("{} ({})", clue(e.clue), e.dialect.name())).collect();
        facts.push(format!("known by {}", by.join(", ")));
    }
    facts.extend(probe.slots.map(|slots| format!("{} at a time", counted(slots, "request"))));
    facts.extend(probe.kv_tokens.map(|tokens| format!("a KV cache of {}", counted(tokens, "token"))));
    facts.extend(probe.prefix_caching.map(|on| format!("prefix caching {}", if on { "on" } else { "off" })));
    facts.push(match &probe.metrics {
        Some(metrics) => {
            format!("counters at {} ({} of those that are understood)", metrics.page, metrics.signals.len())
        }
        None => "no counters: steps, queue and KV use of the server stay unknown".to_owned(),
    });
    facts.push(if probe.key_sent { "a key is sent" } else { "no key is sent" }.to_owned());
    facts
}

fn warnings(probe: &Probe) -> Vec<String> {
    let mut all = Vec::new();
    if probe.healthy == Some(false) {
        all.push("it says that it is not healthy".to_owned());
    }
    match probe.models_problem() {
        _ if !probe.connects() => {}
        Some(problem) => all.push(problem),
        None if probe.models.is_empty() => {
            all.push("it lists no model: name one with --served-model-name".to_owned());
        }
        None => {}
    }
    let dialects: Vec<_> = probe.evidence.iter().map(|e| e.dialect).collect();
    if dialects.windows(2).any(|pair| pair[0] != pair[1]) {
        all.push("the evidence contradicts itself: name the kind of server with --backend".to_owned());
    }
    if probe.asked.iter().any(|asked| asked.outcome == Outcome::NotAsked) {
        all.push("it answers so slowly that not everything was asked".to_owned());
    }
    if probe.clock.drift_ppm.abs() > MAX_DRIFT_PPM {
        all.push(format!(
            "this machine's clocks drift apart by {:.0} ppm: stamps of the kernel are off by that",
            probe.clock.drift_ppm
        ));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use hbmark_core::result::serving::{
        Asked, ClockCheck, Dialect, DialectEvidence, FetchFailure, ProbedAddress, Question,
    };

    fn probe() -> Probe {
        let address = |address: &str, connect_ns| ProbedAddress {
            address: address.to_owned(),
            connect_ns,
            connections: 5,
            failure: None,
        };
        Probe {
            root: "http://localhost:8000".to_owned(),
            key_sent: false,
            resolve_ns: None,
            addresses: vec![address("[::1]:8000", None), address("127.0.0.1:8000", Some(52_000.0))],
            asked: Vec::new(),
            dialect: Dialect::Vllm,
            evidence: vec![DialectEvidence { dialect: Dialect::Vllm, clue: Clue::ModelOwner }],
            healthy: Some(true),
            version: Some("0.11.0".to_owned()),
            models: vec![ServedModel {
                id: "m".to_owned(),
                max_model_len: Some(4096),
                ..ServedModel::default()
            }],
            model_count: 1,
            max_model_len: Some(4096),
            slots: None,
            kv_tokens: None,
            prefix_caching: Some(true),
            metrics: None,
            clock: ClockCheck {
                span_ns: 1e9,
                readings: 10,
                largest_step_ns: 0.0,
                drift_ppm: 0.0,
                uncertainty_ns: 100.0,
            },
        }
    }

    #[test]
    fn a_server_is_named_with_what_it_is_known_by() {
        let text = crate::output::markdown(&probe().document());
        for part in [
            "vLLM 0.11.0",
            "127.0.0.1:8000: a connection takes 52.0 µs",
            "\\[::1\\]:8000: no connection",
            "owner",
            "4096",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(!text.contains("problems"));
    }

    #[test]
    fn what_is_wrong_is_said_with_its_remedy() {
        let mut odd = probe();
        odd.models.clear();
        odd.healthy = Some(false);
        odd.evidence.push(DialectEvidence { dialect: Dialect::Sglang, clue: Clue::MetricNames });
        let text = crate::output::markdown(&odd.document());
        for part in ["not healthy", "--served-model-name", "--backend"] {
            assert!(text.contains(part), "{part} in {text}");
        }
        odd.addresses[1].connect_ns = None;
        assert!(crate::output::markdown(&odd.document()).contains("nothing answers"));
    }

    #[test]
    fn what_is_no_server_of_models_is_called_that_with_what_to_do() {
        let asked = |failure| Asked { question: Question::Models, outcome: Outcome::Failed(failure) };
        let of = |failure, key_sent| {
            let found = Probe { asked: vec![asked(failure)], models: Vec::new(), key_sent, ..probe() };
            warnings(&found).join("\n")
        };
        for (failure, key_sent, wanted) in [
            (FetchFailure::Status(401), false, "status 401, and no key was sent"),
            (FetchFailure::Status(403), true, "the key that was sent is not accepted"),
            (FetchFailure::Status(404), false, "--url is the base URL"),
            (FetchFailure::Tls, false, "http://"),
            (FetchFailure::NotUnderstood, false, "is this the port"),
        ] {
            let said = of(failure, key_sent);
            assert!(said.starts_with("http://localhost:8000/v1/models: ") && said.contains(wanted), "{said}");
        }
        let stranger = Probe {
            asked: vec![asked(FetchFailure::NotUnderstood)],
            models: Vec::new(),
            evidence: Vec::new(),
            ..probe()
        };
        assert!(answer(&stranger).contains("does not say that it is"), "{}", answer(&stranger));
    }
}
