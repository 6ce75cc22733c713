//! A capacity, line by line.
//!
//! Enters: what [`crate::analysis::capacity`] worked out. Leaves: a document. Nothing is computed here.

use crate::analysis::capacity::{ArithmeticLine, Capacity, number};
use crate::analysis::distinct;
use crate::analysis::words::{answer, counted};
use crate::output::Kind;
use crate::output::document::{Column, Document, measured, numbers, words};
use crate::output::metrics::Unit;

impl Kind for Capacity {
    fn document(&self) -> Document {
        let mut document = Document::new(headline(self));
        for part in distinct(self.lines.iter().map(|line| line.part)) {
            document.heading(part.name());
            document.table(arithmetic(self.lines.iter().filter(|line| line.part == part)));
        }
        let near = self
            .nearness
            .iter()
            .map(|near| format!("{:.0} % of its limit: {} ({})", near.used * 100.0, near.what, near.detail));
        document.section("what breaks first", std::iter::once(self.breaks_first.clone()).chain(near));
        document.heading("rates that were tried");
        document.list(self.tried.iter().map(|tried| {
            let held = answer(tried.held, ["held", "failed", "undetermined"]);
            let runs = match tried.runs {
                1 => String::new(),
                runs => format!(" ({} of {runs} runs held)", tried.runs_held),
            };
            format!("{}/s {held}{runs}: {}", number(tried.rate), tried.why)
        }));
        document.section("assumed", self.assumptions.iter().cloned());
        document.section("caveats", self.caveats.iter().cloned());
        let mut sheet = vec![words("part", self.lines.iter().map(|line| line.part.name().to_owned()))];
        sheet.extend(arithmetic(self.lines.iter()));
        sheet.push(measured("value", Unit::Count, self.lines.iter().map(|line| line.value)));
        document.sheet = Some(sheet);
        document
    }

    fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self)
    }
}

fn arithmetic<'a>(lines: impl Iterator<Item = &'a ArithmeticLine> + Clone) -> Vec<Column> {
    vec![
        words("", lines.clone().map(|l| l.what.clone())),
        words("formula", lines.clone().map(|l| l.formula.clone())),
        words("values", lines.clone().map(|l| l.values.clone())),
        numbers("result", lines.map(|l| l.result.clone())),
    ]
}

/// The answer in one line.
fn headline(capacity: &Capacity) -> String {
    let question = &capacity.question;
    let fits = if capacity.kv_headroom.is_some_and(|free| free < 0.0) {
        "; the KV cache of that context and concurrency does NOT fit an instance"
    } else {
        ""
    };
    format!(
        "{}{}: {} for {} requests/s under {}, {:.0} % headroom, on {}{fits}",
        if capacity.predicted { "PREDICTED · " } else { "" },
        capacity.model,
        counted(capacity.instances, "instance"),
        number(question.target_rate),
        capacity.objectives.join(", "),
        question.headroom * 100.0,
        capacity.machine
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::capacity::{Prices, Question, capacity};
    use crate::output::{Format, markdown, render};

    fn answered() -> Capacity {
        let question = Question {
            target_rate: 100.0,
            mean_rate: Some(40.0),
            slo: None,
            headroom: 0.2,
            gpus_per_instance: 1,
            prices: Some(Prices {
                currency: "$".into(),
                gpu_hour: 2.5,
                input_per_million: Some(0.2),
                output_per_million: Some(0.6),
            }),
            context: Some(4096),
            concurrency: Some(64),
        };
        capacity(&crate::samples::decided(crate::samples::sweep()), &question).unwrap()
    }

    #[test]
    fn the_table_shows_formula_values_and_result_of_every_line() {
        insta::assert_snapshot!(render(&answered(), Format::Table, false).unwrap());
    }

    #[test]
    fn markdown_has_the_same_lines() {
        let text = render(&answered(), Format::Md, false).unwrap();
        for line in &answered().lines {
            assert!(text.contains(&markdown::escape(&line.values)), "{}", line.values);
        }
    }

    #[test]
    fn json_comes_back_as_it_was_and_csv_has_raw_values() {
        let text = render(&answered(), Format::Json, false).unwrap();
        assert_eq!(serde_json::from_str::<Capacity>(&text).unwrap(), answered());
        let csv = render(&answered(), Format::Csv, false).unwrap();
        assert_eq!(csv.lines().count(), answered().lines.len() + 1);
        assert!(csv.starts_with("part,,formula,values,result,value\n"), "{csv}");
    }
}
