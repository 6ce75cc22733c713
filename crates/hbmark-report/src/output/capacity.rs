//! A capacity, line by line: table, JSON, CSV and Markdown.
//!
//! Enters: what [`crate::analysis::capacity`] worked out. Leaves: text. Nothing is computed here.

use super::foreign::{Draw, Markdown, Plain, delimited};
use super::table::Column;
use super::{OutputError, TextFormat};
use crate::analysis::capacity::{ArithmeticLine, Capacity, number};
use hbmark_core::input::plain;

/// Prints a capacity.
///
/// # Errors
/// When a format's writer fails.
pub fn render(capacity: &Capacity, format: TextFormat) -> Result<String, OutputError> {
    match format {
        TextFormat::Json => Ok(serde_json::to_string_pretty(capacity)?),
        TextFormat::Csv => {
            let mut columns = vec![text("part", &capacity.lines, &|l| l.part.clone())];
            columns.extend(arithmetic(&capacity.lines.iter().collect::<Vec<_>>()));
            let values = capacity.lines.iter().map(|l| l.value.to_string()).collect();
            columns.push(Column { title: "value".into(), right: true, cells: values });
            Ok(delimited(&columns))
        }
        TextFormat::Table => Ok(spelled(capacity, &Plain)),
        TextFormat::Md => Ok(spelled(capacity, &Markdown)),
    }
}

fn text<T>(title: &str, rows: &[T], of: &dyn Fn(&T) -> String) -> Column {
    Column { title: title.to_owned(), right: false, cells: rows.iter().map(|row| plain(&of(row))).collect() }
}

fn arithmetic(lines: &[&ArithmeticLine]) -> Vec<Column> {
    vec![
        text("", lines, &|l| l.what.clone()),
        text("formula", lines, &|l| l.formula.clone()),
        text("values", lines, &|l| l.values.clone()),
        Column {
            title: "result".into(),
            right: true,
            cells: lines.iter().map(|l| l.result.clone()).collect(),
        },
    ]
}

/// The answer in one line.
#[must_use]
pub fn headline(capacity: &Capacity) -> String {
    let question = &capacity.question;
    format!(
        "{}{}: {} instances for {} requests/s under {}, {:.0} % headroom, on {}",
        if capacity.predicted { "PREDICTED · " } else { "" },
        plain(&capacity.model),
        capacity.instances,
        number(question.target_rate),
        capacity.objectives.join(", "),
        question.headroom * 100.0,
        plain(&capacity.machine)
    )
}

fn spelled(capacity: &Capacity, draw: &dyn Draw) -> String {
    let mut out = draw.heading(&headline(capacity));
    let mut parts: Vec<&str> = Vec::new();
    for line in &capacity.lines {
        if !parts.contains(&line.part.as_str()) {
            parts.push(&line.part);
        }
    }
    for part in parts {
        let lines: Vec<&ArithmeticLine> = capacity.lines.iter().filter(|l| l.part == part).collect();
        out.push('\n');
        out.push_str(&draw.heading(part));
        out.push_str(&draw.table(&arithmetic(&lines)));
    }
    out.push('\n');
    out.push_str(&draw.heading("what breaks first"));
    out.push_str(&draw.item(&plain(&capacity.breaks_first)));
    for near in &capacity.nearness {
        out.push_str(&draw.item(&format!(
            "{:.0} % of its limit: {} ({})",
            near.used * 100.0,
            near.what,
            near.detail
        )));
    }
    out.push('\n');
    out.push_str(&draw.heading("rates that were tried"));
    for tried in &capacity.tried {
        let runs = if tried.runs > 1 { format!(" in {} runs", tried.runs) } else { String::new() };
        let held = if tried.held { "held" } else { "failed" };
        out.push_str(&draw.item(&format!("{}/s {held}{runs}: {}", number(tried.rate), plain(&tried.why))));
    }
    for (title, items) in [("assumed", &capacity.assumptions), ("mind", &capacity.caveats)] {
        if items.is_empty() {
            continue;
        }
        out.push('\n');
        out.push_str(&draw.heading(title));
        for item in items {
            out.push_str(&draw.item(&plain(item)));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::capacity::{Prices, Question, capacity};

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
        capacity(&crate::output::serving::tests::sweep(), &question).unwrap()
    }

    #[test]
    fn the_table_shows_formula_values_and_result_of_every_line() {
        insta::assert_snapshot!(render(&answered(), TextFormat::Table).unwrap());
    }

    #[test]
    fn markdown_has_the_same_lines() {
        let text = render(&answered(), TextFormat::Md).unwrap();
        for line in &answered().lines {
            assert!(text.contains(&super::super::markdown::escape(&line.values)), "{}", line.values);
        }
    }

    #[test]
    fn json_comes_back_as_it_was_and_csv_has_raw_values() {
        let text = render(&answered(), TextFormat::Json).unwrap();
        assert_eq!(serde_json::from_str::<Capacity>(&text).unwrap(), answered());
        let csv = render(&answered(), TextFormat::Csv).unwrap();
        assert_eq!(csv.lines().count(), answered().lines.len() + 1);
        assert!(csv.starts_with("part,,formula,values,result,value\n"), "{csv}");
    }
}
