//! `hbmark selftest` as data: checks of the harness itself.
//!
//! Enters: nothing. Leaves: named checks that passed or failed. Faults are planted on the scripted device, on a virtual clock; the
//! protocol, the judgement and the explanation must name them, and must not name faults that were not planted. Intervals, comparisons
//! and queues are compared with results known from theory. No device, network or wall-clock time is used, so one build gives the
//! same rows on every machine. `hbmark verify` checks a real device.

/// What the first fault of a kind holds, if there is one.
macro_rules! planted {
    ($faults:expr, $fault:pat => $value:expr) => {
        $faults.iter().find_map(|fault| if let $fault = fault { Some($value) } else { None })
    };
}

mod attribution;
mod faults;
mod plants;
mod queues;
mod serve;
mod statistics;
mod step;

pub use crate::run::verify::Check;

use hbmark_core::model::{Architecture, Dtype, presets};
use hbmark_core::result::{Finding, ModelSummary, Severity};

/// Takes a check when it is done.
type Record<'a> = dyn FnMut(Check) + 'a;

/// Runs every check; `tell` is called with each as it is done.
pub fn selftest(tell: &mut dyn FnMut(&Check)) -> Vec<Check> {
    let mut checks = Vec::new();
    let mut record = |check: Check| {
        tell(&check);
        checks.push(check);
    };
    faults::planted(&mut record);
    plants::every_rule(&mut record);
    attribution::of_runs(&mut record);
    attribution::of_serving(&mut record);
    attribution::of_pairs(&mut record);
    statistics::coverage(&mut record);
    statistics::comparisons(&mut record);
    queues::known(&mut record);
    checks
}

/// The model of every scripted benchmark: small enough that a step is short, larger than the scripted cache.
const MODEL: &str = "SmolLM2-135M";

fn architecture() -> Architecture {
    presets::find(MODEL).expect("a shipped shape").architecture
}

fn model() -> ModelSummary {
    let architecture = architecture();
    let model = ModelSummary::new(MODEL, "scripted", &architecture, &architecture.inventory(Dtype::Bf16));
    ModelSummary { hash: String::new(), ..model }
}

/// Findings that limit what a result can be used for, and name no cause.
const ADVICE: &[&str] = &["too_few_requests", "not_judged", "first_target_failed", "cost_of_tokens"];

/// The rule that names the cause: the first finding that is not advice.
fn label(findings: &[Finding]) -> &str {
    let cause =
        |finding: &&Finding| finding.severity >= Severity::Warn || !ADVICE.contains(&finding.rule.as_str());
    findings.iter().find(cause).map_or("nothing", |finding| finding.rule.as_str())
}

/// The first figure of the first finding.
fn evidence(findings: &[Finding]) -> String {
    findings.first().and_then(|finding| finding.evidence.first().cloned()).unwrap_or_default()
}

fn names(findings: &[Finding], rule: &str) -> bool {
    findings.iter().any(|finding| finding.rule == rule)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hbmark_core::result::Severity;

    fn finding(rule: &str, severity: Severity) -> Finding {
        Finding {
            rule: rule.into(),
            severity,
            symptom: String::new(),
            regime: String::new(),
            evidence: Vec::new(),
            next: String::new(),
            response: String::new(),
            cells: Vec::new(),
        }
    }

    #[test]
    fn the_label_is_the_first_cause_and_advice_is_none() {
        let findings = [finding("too_few_requests", Severity::Note), finding("keeps_up", Severity::Ok)];
        assert_eq!(label(&findings), "keeps_up");
        assert_eq!(label(&[]), "nothing");
    }

    #[test]
    fn statistics_and_known_queues_hold() {
        let mut checks = Vec::new();
        statistics::comparisons(&mut |check| checks.push(check));
        assert!(checks.iter().all(|check| check.passed), "{checks:#?}");
    }
}
