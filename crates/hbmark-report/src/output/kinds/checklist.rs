//! Checklists: every question of a result with its answer, and the verdict.

use crate::analysis::{Check, Checklist};
use crate::output::Kind;
use crate::output::document::{Document, words};

impl Kind for [Checklist] {
    fn document(&self) -> Document {
        let mut document = Document::default();
        for list in self {
            let verdict = list.verdict().word();
            document.heading(format!("{verdict} · {}", list.subject));
            let column =
                |title: &str, of: &dyn Fn(&Check) -> String| words(title, list.checks.iter().map(of));
            document.table(vec![
                column("", &|c| c.outcome.word().to_owned()),
                column("question", &|c| format!("{}{}", c.question, if c.essential { " *" } else { "" })),
                column("answer", &|c| c.evidence.clone()),
                column("next", &|c| c.next.clone()),
            ]);
            let reasons: Vec<String> =
                list.reasons().map(|c| format!("{} ({})", c.question, c.outcome.word())).collect();
            document.list([if reasons.is_empty() {
                "every question marked * is answered".to_owned()
            } else {
                format!("{verdict} because of the questions marked *: {}", reasons.join(", "))
            }]);
        }
        let column = |title: &str, of: &dyn Fn(&Checklist, &Check) -> String| {
            words(title, self.iter().flat_map(|list| list.checks.iter().map(|check| of(list, check))))
        };
        document.sheet = Some(vec![
            column("subject", &|list, _| list.subject.clone()),
            column("verdict", &|list, _| list.verdict().word().to_owned()),
            column("essential", &|_, check| check.essential.to_string()),
            column("outcome", &|_, check| check.outcome.word().to_owned()),
            column("question", &|_, check| check.question.clone()),
            column("answer", &|_, check| check.evidence.clone()),
            column("next", &|_, check| check.next.clone()),
        ]);
        document
    }

    fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self)
    }
}
