//! Findings, the worst first: what is wrong or right, the evidence, and what to do.

use crate::output::Kind;
use crate::output::document::{Block, Document, words};
use hbmark_core::result::{Finding, Severity};

/// Evidence of one rule that is printed; a file for machines has it all.
const MAX_EVIDENCE: usize = 4;

impl Kind for [Finding] {
    fn document(&self) -> Document {
        let mut document = Document::default();
        if self.is_empty() {
            document.list([
                "no rule found anything: only what its own blocks or requests can stand for is explained"
                    .to_owned(),
            ]);
        }
        for finding in self {
            document.heading(format!("{} ({})", finding.regime, word(finding.severity)));
            let mut pairs = vec![("symptom", finding.symptom.clone())];
            pairs.extend(finding.evidence.iter().take(MAX_EVIDENCE).map(|e| ("evidence", e.clone())));
            if let Some(more) = finding.evidence.len().checked_sub(MAX_EVIDENCE).filter(|more| *more > 0) {
                pairs.push(("", format!("and {more} more")));
            }
            pairs.push(("measure", finding.next.clone()));
            pairs.push(("do first", finding.response.clone()));
            pairs.retain(|(_, said)| !said.is_empty());
            let pairs = pairs.into_iter().map(|(key, value)| (key.to_owned(), value));
            document.blocks.push(Block::KeyValues(pairs.collect()));
        }
        let column = |title: &str, of: &dyn Fn(&Finding) -> String| words(title, self.iter().map(of));
        document.sheet = Some(vec![
            column("rule", &|f| f.rule.clone()),
            column("severity", &|f| word(f.severity).to_owned()),
            column("regime", &|f| f.regime.clone()),
            column("symptom", &|f| f.symptom.clone()),
            column("evidence", &|f| f.evidence.join("; ")),
            column("next", &|f| f.next.clone()),
            column("response", &|f| f.response.clone()),
        ]);
        document
    }

    fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self)
    }
}

fn word(severity: Severity) -> &'static str {
    match severity {
        Severity::Ok => "expected",
        Severity::Note => "note",
        Severity::Warn => "warning",
        Severity::Problem => "problem",
    }
}
