//! Rules and the [`Finding`]s they make. What a rule examines is up to it: cells of a run, points of a serving result, a fit.

use hbmark_core::result::{Finding, Severity};

/// The regime where no rule applies.
pub(super) const UNEXPLAINED: &str = "unexplained";
/// Where the file or its samples are wrong, and no rule says how.
const INVALID: &str = "invalid";

/// Cells or points to which no rule gives a name, each with its numbers.
pub(super) fn unexplained(
    symptom: &'static str,
    next: &'static str,
    found: &[(String, String)],
) -> Option<Finding> {
    let rule = Rule {
        name: UNEXPLAINED,
        kind: Kind::Regime,
        severity: Severity::Note,
        symptom,
        regime: UNEXPLAINED,
        next,
        response: "none before the next measurement",
        detect: (),
    };
    (!found.is_empty()).then(|| rule.finding(found))
}

/// Cells or points that are invalid for a reason that no rule names, each with the reason.
pub(super) fn invalid(found: &[(String, String)]) -> Option<Finding> {
    let rule = Rule {
        name: INVALID,
        kind: Kind::Trust,
        severity: Severity::Problem,
        symptom: "what was measured is not valid",
        regime: "not to be used: figures contradict one another, or a check failed",
        next: "the same again, from the program itself",
        response: "use no figure of it",
        detect: (),
    };
    (!found.is_empty()).then(|| rule.finding(found))
}

/// A limit further away than this factor is not what nearly applied; half of a limit is no near miss, and neither is twice it.
const NEAR: f64 = 1.5;

/// A limit that a cell or a point did not reach, or went beyond.
pub(super) struct NearMiss {
    /// What it would be called within the limit.
    pub regime: &'static str,
    pub seen: f64,
    pub limit: f64,
}

impl NearMiss {
    /// How far it was from the limit, as the logarithm of a factor; infinite where nothing was seen.
    fn factor(&self) -> f64 {
        if self.seen > 0.0 && self.limit > 0.0 { (self.seen / self.limit).ln().abs() } else { f64::INFINITY }
    }

    /// The nearest of several, in words; `None` where none is near.
    pub fn nearest(all: impl IntoIterator<Item = Self>) -> Option<String> {
        let near = all.into_iter().filter(|miss| miss.factor() < NEAR.ln());
        let nearest = near.min_by(|a, b| a.factor().total_cmp(&b.factor()))?;
        let Self { regime, seen, limit } = nearest;
        let (side, missed) = if seen < limit { ("from", limit - seen) } else { ("up to", seen - limit) };
        Some(format!(
            "the nearest limit: {regime}, {side} {:.1} %; here {:.1} %, missed by {:.1} points",
            limit * 100.0,
            seen * 100.0,
            missed * 100.0
        ))
    }
}

/// What kind of statement a rule makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Where the time goes; a cell without one is unexplained.
    Regime,
    /// What limits trust.
    Trust,
}

/// A finding to be made, and the function that finds its evidence.
pub(super) struct Rule<Detector> {
    pub name: &'static str,
    pub kind: Kind,
    pub severity: Severity,
    pub symptom: &'static str,
    pub regime: &'static str,
    pub next: &'static str,
    pub response: &'static str,
    pub detect: Detector,
}

impl<Detector> Rule<Detector> {
    /// The rule's finding about cells, each with what was found in it.
    pub fn finding(&self, found: &[(String, String)]) -> Finding {
        Finding {
            evidence: found.iter().map(|(cell, evidence)| format!("{cell}: {evidence}")).collect(),
            cells: found.iter().map(|(cell, _)| cell.clone()).collect(),
            ..self.finding_of_all(Vec::new())
        }
    }

    /// The rule's finding about everything together.
    pub fn finding_of_all(&self, evidence: Vec<String>) -> Finding {
        Finding {
            rule: self.name.to_owned(),
            severity: self.severity,
            symptom: self.symptom.to_owned(),
            regime: self.regime.to_owned(),
            evidence,
            next: self.next.to_owned(),
            response: self.response.to_owned(),
            cells: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_far_from_a_limit_did_not_nearly_reach_it() {
        let at = |seen: f64, limit: f64| NearMiss { regime: "cold start", seen, limit };
        let near = NearMiss::nearest([at(0.038, 1.5), at(0.19, 0.2)]).unwrap();
        assert!(near.ends_with("from 20.0 %; here 19.0 %, missed by 1.0 points"), "{near}");
        // The first requests took a twenty-fifth of what the others took, or the same: neither is nearly a cold start.
        assert_eq!(NearMiss::nearest([at(0.038, 1.5)]), None);
        assert_eq!(NearMiss::nearest([at(1.0, 1.5)]), None);
        assert_eq!(NearMiss::nearest([at(0.0, 1.5)]), None);
    }
}
