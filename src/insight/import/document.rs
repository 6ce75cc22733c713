//! The text of a foreign file as records and tables, before anybody asks whose it is.
//!
//! Enters: text. Leaves: JSON documents (one, several, or a list), or tables of CSV, SQL or Markdown. Counts are capped before memory is
//! taken: the marks of structure are counted in the text before it is parsed. It knows no format.

use serde_json::{Map, Value as Json};

use super::{ImportError, clipped};

/// Commas, colons and brackets of a JSON text; each stands for at most one value in memory.
const MAX_MARKS: usize = 4_000_000;
/// Rows of all tables together.
const MAX_TABLE_ROWS: usize = 100_000;

/// A parsed file.
#[derive(Debug)]
pub(super) struct Document {
    pub file: String,
    pub body: Body,
}

#[derive(Debug)]
pub(super) enum Body {
    /// JSON documents in their order; the elements of a list at the top.
    Json(Vec<Json>),
    Tables(Vec<Table>),
}

/// A table of text.
#[derive(Debug)]
pub(super) struct Table {
    /// The heading above it on a Markdown page.
    pub heading: Option<String>,
    pub rows: Vec<Map<String, Json>>,
    pub titles: Vec<String>,
}

impl Document {
    pub fn parse(file: &str, text: &str) -> Result<Self, ImportError> {
        let text = text.trim_start_matches('\u{feff}');
        let start = text.trim_start();
        let body = if start.is_empty() {
            return Err(ImportError::Empty { file: file.to_owned() });
        } else if start.starts_with(['{', '[']) {
            Body::Json(json(file, start)?)
        } else if text.contains("INSERT INTO") {
            Body::Tables(vec![sql(file, text)?])
        } else if text.lines().any(|line| line.starts_with('|')) {
            Body::Tables(markdown(file, text)?)
        } else {
            Body::Tables(csv(file, text)?)
        };
        Ok(Self { file: file.to_owned(), body })
    }

    /// Every JSON document, if they all are objects and have these keys.
    pub fn objects_with(&self, keys: &[&str]) -> Option<Vec<&Map<String, Json>>> {
        let Body::Json(documents) = &self.body else { return None };
        let first = documents.first()?.as_object()?;
        if !keys.iter().all(|key| first.contains_key(*key)) {
            return None;
        }
        documents.iter().map(Json::as_object).collect()
    }

    /// The tables that have these columns.
    pub fn tables_with<'a>(&'a self, titles: &'a [&str]) -> impl Iterator<Item = &'a Table> {
        let tables = match &self.body {
            Body::Tables(tables) => tables.as_slice(),
            Body::Json(_) => &[],
        };
        tables.iter().filter(|table| titles.iter().all(|title| table.titles.iter().any(|t| t == title)))
    }

    /// What a person would see of it, for the message that nobody knows it.
    pub fn describe(&self) -> String {
        let listed = |keys: Vec<&String>| {
            let shown: Vec<String> = keys.iter().take(6).map(|k| format!("`{}`", clipped(k))).collect();
            let more = if keys.len() > 6 { ", ..." } else { "" };
            format!("{}{more}", shown.join(", "))
        };
        match &self.body {
            Body::Json(documents) => match documents.first() {
                Some(Json::Object(map)) if map.is_empty() => "an empty JSON object".to_owned(),
                Some(Json::Object(map)) => format!("JSON with the keys {}", listed(map.keys().collect())),
                Some(_) => "JSON that is no object".to_owned(),
                None => "an empty JSON list".to_owned(),
            },
            Body::Tables(tables) => match tables.first() {
                Some(table) => format!("a table with the columns {}", listed(table.titles.iter().collect())),
                None => "text without a table".to_owned(),
            },
        }
    }
}

/// One JSON document, several after each other, or the elements of a list.
fn json(file: &str, text: &str) -> Result<Vec<Json>, ImportError> {
    let (strict, marks) = strict(text);
    if marks > MAX_MARKS {
        return Err(ImportError::TooMany { file: file.to_owned(), what: "JSON values", limit: MAX_MARKS });
    }
    let documents = serde_json::Deserializer::from_str(&strict).into_iter::<Json>();
    let mut records = Vec::new();
    for document in documents {
        match document.map_err(|source| ImportError::Json { file: file.to_owned(), source })? {
            Json::Array(elements) => records.extend(elements),
            other => records.push(other),
        }
    }
    Ok(records)
}

/// JSON as the standard has it, and how many marks of structure it holds: Python writes `Infinity` and `NaN`, which become `"inf"` and
/// null.
fn strict(text: &str) -> (String, usize) {
    let mut out = String::with_capacity(text.len());
    let (mut marks, mut rest) = (0, text);
    let mut in_string = false;
    while let Some(at) = rest.find(['"', '\\', ',', ':', '[', '{', 'I', 'N']) {
        out.push_str(&rest[..at]);
        let tail = &rest[at..];
        let taken = match tail.as_bytes()[0] {
            b'\\' if in_string => {
                // The escaped character belongs to it, however wide it is.
                let next = tail.chars().nth(1).map_or(0, char::len_utf8);
                out.push_str(&tail[..=next]);
                1 + next
            }
            b'"' => {
                in_string = !in_string;
                out.push('"');
                1
            }
            b'I' if !in_string && tail.starts_with("Infinity") => {
                let negative = out.ends_with('-');
                if negative {
                    out.pop();
                }
                out.push_str(if negative { "\"-inf\"" } else { "\"inf\"" });
                "Infinity".len()
            }
            b'N' if !in_string && tail.starts_with("NaN") => {
                out.push_str("null");
                "NaN".len()
            }
            mark => {
                marks += usize::from(!in_string && matches!(mark, b',' | b':' | b'[' | b'{'));
                out.push(char::from(mark));
                1
            }
        };
        rest = &tail[taken..];
    }
    out.push_str(rest);
    (out, marks)
}

/// A table from titles and rows; cells beyond the titles are left out.
fn table(
    file: &str,
    heading: Option<String>,
    titles: &[String],
    rows: Vec<Vec<String>>,
) -> Result<Table, ImportError> {
    if rows.len() > MAX_TABLE_ROWS || rows.len().saturating_mul(titles.len()) > MAX_MARKS {
        return Err(ImportError::TooMany { file: file.to_owned(), what: "rows", limit: MAX_TABLE_ROWS });
    }
    let rows = rows
        .into_iter()
        .map(|row| titles.iter().cloned().zip(row.into_iter().map(Json::String)).collect())
        .collect();
    Ok(Table { heading, rows, titles: titles.to_vec() })
}

/// Stacked CSV tables, with an empty line between them.
fn csv(file: &str, text: &str) -> Result<Vec<Table>, ImportError> {
    let mut tables = Vec::new();
    for part in text.replace("\r\n", "\n").split("\n\n").filter(|part| !part.trim().is_empty()) {
        let mut reader =
            csv::ReaderBuilder::new().flexible(true).trim(csv::Trim::All).from_reader(part.trim().as_bytes());
        let failed = |source| ImportError::Csv { file: file.to_owned(), source };
        let titles: Vec<String> = reader.headers().map_err(failed)?.iter().map(str::to_owned).collect();
        let rows = reader
            .records()
            .map(|record| Ok(record.map_err(failed)?.iter().map(str::to_owned).collect()))
            .collect::<Result<_, ImportError>>()?;
        tables.push(table(file, None, &titles, rows)?);
    }
    Ok(tables)
}

/// The tables of a Markdown page; logs around them are passed over.
fn markdown(file: &str, text: &str) -> Result<Vec<Table>, ImportError> {
    let cells = |line: &str| -> Vec<String> {
        line.trim()
            .trim_start_matches('|')
            .trim_end_matches('|')
            .split('|')
            .map(|c| c.trim().to_owned())
            .collect()
    };
    let is_rule = |line: &str| line.contains('-') && line.chars().all(|c| matches!(c, '|' | '-' | ':' | ' '));
    let (mut tables, mut heading) = (Vec::new(), None);
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        if let Some(title) = line.strip_prefix('#') {
            heading = Some(clipped(title.trim_start_matches('#')));
        }
        let is_head =
            line.starts_with('|') && lines.peek().is_some_and(|next| next.starts_with('|') && is_rule(next));
        if !is_head {
            continue;
        }
        lines.next();
        let mut rows = Vec::new();
        while let Some(row) = lines.next_if(|line| line.starts_with('|')) {
            rows.push(cells(row));
        }
        tables.push(table(file, heading.clone(), &cells(line), rows)?);
    }
    Ok(tables)
}

/// The inserted rows of an SQL script; the columns are those of the first insert.
fn sql(file: &str, text: &str) -> Result<Table, ImportError> {
    let mut titles: Vec<String> = Vec::new();
    let mut rows = Vec::new();
    for insert in text.split("INSERT INTO").skip(1) {
        let Some((head, values)) = insert.split_once("VALUES") else { continue };
        let Some(names) = head.split_once('(').and_then(|(_, rest)| rest.split_once(')')) else { continue };
        if titles.is_empty() {
            titles = names.0.split(',').map(|name| name.trim().to_owned()).collect();
        }
        rows.push(sql_values(values));
    }
    table(file, None, &titles, rows)
}

/// The items of `('a', 'it''s', 3)`.
fn sql_values(text: &str) -> Vec<String> {
    let mut values = Vec::new();
    let Some((_, list)) = text.split_once('(') else { return values };
    let (mut value, mut quoted) = (String::new(), false);
    let mut characters = list.chars().peekable();
    while let Some(c) = characters.next() {
        match c {
            '\'' if quoted && characters.next_if_eq(&'\'').is_some() => value.push('\''),
            '\'' => quoted = !quoted,
            ',' if !quoted => values.push(std::mem::take(&mut value).trim().to_owned()),
            ')' if !quoted => break,
            c => value.push(c),
        }
    }
    values.push(value.trim().to_owned());
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(text: &str) -> Vec<Json> {
        json("f", text).unwrap()
    }

    #[test]
    fn python_tokens_become_json_and_strings_stay_as_they_are() {
        let parsed = records(r#"{"rate": Infinity, "low": -Infinity, "x": NaN, "s": "NaN \" Infinity, \\"}"#);
        assert_eq!(parsed[0]["rate"], "inf");
        assert_eq!(parsed[0]["low"], "-inf");
        assert!(parsed[0]["x"].is_null());
        assert_eq!(parsed[0]["s"], "NaN \" Infinity, \\");
    }

    #[test]
    fn documents_after_each_other_and_lists_are_records() {
        assert_eq!(records("{}\n{}\n").len(), 2);
        assert_eq!(records("[{}, {}, {}]").len(), 3);
        assert!(matches!(json("f", "{\"a\": [1, 2"), Err(ImportError::Json { .. })));
    }

    #[test]
    fn structure_is_counted_before_it_is_parsed() {
        let bomb = "[".repeat(MAX_MARKS + 1);
        assert!(matches!(json("f", &bomb), Err(ImportError::TooMany { .. })));
        assert!(matches!(json("f", &"[".repeat(100_000)), Err(ImportError::Json { .. })), "depth has an end");
    }

    #[test]
    fn stacked_csv_tables_and_markdown_among_logs_are_found() {
        let tables = csv("f", "a,b\n1,\"x, y\"\n\nc\n3\n").unwrap();
        assert_eq!((tables.len(), tables[0].rows[0]["b"].as_str()), (2, Some("x, y")));
        let page = "# Top\nlog | line\n| a | b |\n| -: | --- |\n| 1 | 2 |\n\n| not a table |\n";
        let tables = markdown("f", page).unwrap();
        assert_eq!(tables.len(), 1);
        assert_eq!((tables[0].heading.as_deref(), tables[0].rows.len()), (Some("Top"), 1));
    }

    #[test]
    fn sql_values_may_hold_quotes_commas_and_brackets() {
        assert_eq!(sql_values("('a, b', 'it''s', 3, '(x)');"), ["a, b", "it's", "3", "(x)"]);
        assert_eq!(sql_values("('never ends"), ["never ends"]);
    }
}
