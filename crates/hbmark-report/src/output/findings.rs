//! Findings, checklists and single ladders for a person, a spreadsheet or a machine.
//!
//! Enters: what [`crate::analysis`] decided. Leaves: text in any format.

use super::foreign::{Draw, Markdown, Plain, delimited};
use super::table::Column;
use super::{OutputError, TextFormat, breakdown};
use crate::analysis::Checklist;
use hbmark_core::input::plain;
use hbmark_core::result::{Finding, Ladder, Severity};

/// Evidence of one rule that is printed; a file for machines has it all.
const MAX_EVIDENCE: usize = 4;

/// Prints findings, the worst first.
///
/// # Errors
/// When a format's writer fails.
pub fn render(findings: &[Finding], format: TextFormat) -> Result<String, OutputError> {
    match format {
        TextFormat::Json => Ok(serde_json::to_string_pretty(findings)?),
        TextFormat::Csv => {
            let text = |title: &str, of: &dyn Fn(&Finding) -> String| column(title, findings, of);
            Ok(delimited(&[
                text("rule", &|f| f.rule.clone()),
                text("severity", &|f| word(f.severity).to_owned()),
                text("regime", &|f| f.regime.clone()),
                text("symptom", &|f| f.symptom.clone()),
                text("evidence", &|f| f.evidence.join("; ")),
                text("next", &|f| f.next.clone()),
                text("response", &|f| f.response.clone()),
            ]))
        }
        TextFormat::Table => Ok(spelled(findings, &Plain)),
        TextFormat::Md => Ok(spelled(findings, &Markdown)),
    }
}

fn column<T>(title: &str, rows: &[T], of: &dyn Fn(&T) -> String) -> Column {
    Column { title: title.to_owned(), right: false, cells: rows.iter().map(|row| plain(&of(row))).collect() }
}

fn word(severity: Severity) -> &'static str {
    match severity {
        Severity::Ok => "as it should be",
        Severity::Note => "note",
        Severity::Warn => "warning",
        Severity::Problem => "problem",
    }
}

fn spelled(findings: &[Finding], draw: &dyn Draw) -> String {
    if findings.is_empty() {
        return draw.item("no cell was measured, so there is nothing to explain");
    }
    let mut text = String::new();
    for (index, finding) in findings.iter().enumerate() {
        if index > 0 {
            text.push('\n');
        }
        text.push_str(&draw.heading(&format!("{} ({})", plain(&finding.regime), word(finding.severity))));
        text.push_str(&draw.item(&format!("{:<9} {}", "symptom", plain(&finding.symptom))));
        for evidence in finding.evidence.iter().take(MAX_EVIDENCE) {
            text.push_str(&draw.item(&format!("{:<9} {}", "evidence", plain(evidence))));
        }
        if let Some(more) = finding.evidence.len().checked_sub(MAX_EVIDENCE).filter(|more| *more > 0) {
            text.push_str(&draw.item(&format!("{:<9} and {more} more cells", "")));
        }
        text.push_str(&draw.item(&format!("{:<9} {}", "measure", plain(&finding.next))));
        text.push_str(&draw.item(&format!("{:<9} {}", "do first", plain(&finding.response))));
    }
    text
}

/// Prints checklists.
///
/// # Errors
/// When a format's writer fails.
pub fn render_checklists(lists: &[Checklist], format: TextFormat) -> Result<String, OutputError> {
    let columns = |list: &Checklist| {
        let text =
            |title: &str, of: &dyn Fn(&crate::analysis::Check) -> String| column(title, &list.checks, of);
        vec![
            text("", &|c| c.outcome.word().to_owned()),
            text("question", &|c| format!("{}{}", c.question, if c.essential { " *" } else { "" })),
            text("answer", &|c| c.evidence.clone()),
            text("next", &|c| c.next.clone()),
        ]
    };
    let spelled = |draw: &dyn Draw| {
        let mut text = String::new();
        for list in lists {
            if !text.is_empty() {
                text.push('\n');
            }
            let verdict = if list.valid { "VALID" } else { "INVALID" };
            text.push_str(&draw.heading(&format!("{verdict} · {}", plain(&list.subject))));
            text.push_str(&draw.table(&columns(list)));
            let reasons: Vec<String> =
                list.reasons().map(|c| format!("{} ({})", plain(&c.question), c.outcome.word())).collect();
            let closing = if reasons.is_empty() {
                "every question marked * is answered".to_owned()
            } else {
                format!("INVALID because of the questions marked *: {}", reasons.join(", "))
            };
            text.push('\n');
            text.push_str(&draw.item(&closing));
        }
        text
    };
    match format {
        TextFormat::Json => Ok(serde_json::to_string_pretty(lists)?),
        TextFormat::Csv => Ok(lists.iter().map(|list| delimited(&columns(list))).collect()),
        TextFormat::Table => Ok(spelled(&Plain)),
        TextFormat::Md => Ok(spelled(&Markdown)),
    }
}

/// Prints one ladder.
///
/// # Errors
/// When a format's writer fails.
pub fn render_ladder(ladder: &Ladder, format: TextFormat) -> Result<String, OutputError> {
    let table = breakdown::of_ladder(ladder);
    let spelled = |draw: &dyn Draw, keep_bars: bool| {
        let columns: Vec<Column> =
            table.columns.iter().filter(|c| keep_bars || !c.title.is_empty()).cloned().collect();
        format!("{}{}\n{}", draw.heading(&table.title), draw.table(&columns), draw.item(&table.closing))
    };
    match format {
        TextFormat::Json => Ok(serde_json::to_string_pretty(ladder)?),
        TextFormat::Csv => {
            let columns: Vec<Column> =
                table.columns.iter().filter(|c| !c.title.is_empty()).cloned().collect();
            Ok(delimited(&columns))
        }
        TextFormat::Table => Ok(spelled(&Plain, true)),
        TextFormat::Md => Ok(spelled(&Markdown, false)),
    }
}
