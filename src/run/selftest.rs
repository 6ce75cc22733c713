//! `hbmark selftest` as data: is the harness itself to be believed?
//!
//! Enters: nothing. Leaves: named checks that passed or failed. Faults are planted on the scripted device, on a virtual clock, and the
//! whole path from there to a finding has to name them, and must not name what is not there: measured by the protocol, judged, explained.
//! Beside them stand known answers: intervals, comparisons and queues whose truth is computed elsewhere. No device and no network is
//! touched and no wall-clock time is read, so the same build gives the same rows everywhere. `hbmark verify` asks the same of a real device.

mod attribution;
mod faults;
mod plants;
mod queues;
mod serve;
mod statistics;
mod step;

pub use crate::run::verify::Check;

use hbmark_core::result::{Finding, Severity};

/// Takes a check when it is done.
type Record<'a> = dyn FnMut(Check) + 'a;

/// Runs every check; `tell` hears of each as it is done.
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

/// Findings that say how far a result carries and name no cause.
const ADVICE: &[&str] = &["too_few_requests", "not_judged", "first_target_failed", "cost_of_tokens"];

/// The rule that names the cause: the first finding that is not mere advice.
fn label(findings: &[Finding]) -> &str {
    let cause =
        |finding: &&Finding| finding.severity >= Severity::Warn || !ADVICE.contains(&finding.rule.as_str());
    findings.iter().find(cause).map_or("nothing", |finding| finding.rule.as_str())
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
