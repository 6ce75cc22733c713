//! The text of a foreign file as records and tables, whichever program wrote it.
//!
//! Enters: text. Leaves: JSON documents (one, several, or a list; YAML is read as what it would be in JSON), or tables of CSV, SQL or
//! Markdown. Memory is counted before it is allocated: short text can be many values. A log of single records, one a line, stays text, and its
//! readers see one record at a time.

use serde_json::{Map, Value as Json};

use super::aiperf::{RECORD, TELEMETRY};
use super::fields::Fields;
use super::vllm_engine::REQUEST;
use super::{ForeignFormat, ForeignResult, ForeignRow, ImportError, MAX_ROWS, clipped};
use hbmark_core::input::json;

/// Memory for the values of a file, or of one record of a log, beside the text: half a million numbers of a detailed export.
const BUDGET: usize = 40 << 20;
/// What a record of a log has; there may be as many as the file has room for, since they become one row.
const LOGS: &[&[&str]] = &[RECORD, TELEMETRY, REQUEST];
/// Columns of a table; the widest known has a few dozen.
const MAX_COLUMNS: usize = 1_000;
/// Values and keys of a YAML document: a report of a run has a few hundred.
const MAX_YAML_NODES: usize = 50_000;
/// What a cell takes beside its text: its title's text, its place in a map of room for twice as many, two allocations.
const CELL_BYTES: usize = 300;

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
    /// The lines of a log, each a JSON object.
    Log(String),
    Tables(Vec<Table>),
    /// The samples of a Prometheus page: name with labels, and value.
    Prometheus(Vec<(String, f64)>),
}

/// A table of text.
#[derive(Debug)]
pub(super) struct Table {
    /// The headings above it on a Markdown page, the outermost first.
    pub headings: Vec<String>,
    pub rows: Vec<Map<String, Json>>,
    pub titles: Vec<String>,
}

impl Document {
    pub fn parse(file: &str, text: String) -> Result<Self, ImportError> {
        let is_json = |text: &str| text.trim_start_matches('\u{feff}').trim_start().starts_with(['{', '[']);
        let text = if is_json(&text) { strict(text) } else { text };
        if is_log(text.trim_start_matches('\u{feff}')) {
            return Ok(Self { file: file.to_owned(), body: Body::Log(text) });
        }
        let text = text.trim_start_matches('\u{feff}');
        let start = text.trim_start();
        let body = if start.is_empty() {
            return Err(ImportError::Empty { file: file.to_owned() });
        } else if start.starts_with(['{', '[']) {
            Body::Json(json(file, start)?)
        } else if start.starts_with("# HELP ") || start.starts_with("# TYPE ") {
            Body::Prometheus(prometheus(file, start)?)
        } else if text.contains("INSERT INTO") {
            Body::Tables(sql(file, text)?)
        } else if text.lines().any(|line| line.starts_with('|')) {
            Body::Tables(markdown(file, text)?)
        } else if is_yaml(start) {
            Body::Json(vec![yaml(file, start)?])
        } else {
            Body::Tables(csv(file, text)?)
        };
        Ok(Self { file: file.to_owned(), body })
    }

    /// Every JSON document, if they all are objects and have these keys.
    pub fn objects_with(&self, keys: &[&str]) -> Option<Vec<&Map<String, Json>>> {
        let Body::Json(documents) = &self.body else { return None };
        let first = documents.first()?.as_object()?;
        has(first, keys).then(|| documents.iter().map(Json::as_object).collect())?
    }

    /// Shows every record of a log, if the first has these keys; how many there are.
    pub fn each(
        &self,
        keys: &[&str],
        mut look: impl FnMut(&Fields<'_>) -> Result<(), ImportError>,
    ) -> Result<Option<usize>, ImportError> {
        let Body::Log(text) = &self.body else {
            let Some(records) = self.objects_with(keys) else { return Ok(None) };
            for (index, map) in records.iter().enumerate() {
                look(&Fields::new(&self.file, index, map))?;
            }
            return Ok(Some(records.len()));
        };
        let mut seen = 0;
        for line in text.trim_start_matches('\u{feff}').lines().filter(|line| !line.trim().is_empty()) {
            let map: Map<String, Json> = json::from_str(line, BUDGET)
                .map_err(|json| ImportError::Json { file: self.file.clone(), json })?;
            if seen == 0 && !has(&map, keys) {
                return Ok(None);
            }
            look(&Fields::new(&self.file, seen, &map))?;
            seen += 1;
        }
        Ok(Some(seen))
    }

    /// A result with a row for each record.
    pub fn result<'a>(
        &self,
        format: ForeignFormat,
        records: impl IntoIterator<Item = &'a Map<String, Json>>,
        row: impl Fn(&Fields<'_>) -> Result<ForeignRow, ImportError>,
    ) -> Result<Vec<ForeignResult>, ImportError> {
        let rows = records.into_iter().enumerate().map(|(i, map)| row(&Fields::new(&self.file, i, map)));
        Ok(vec![ForeignResult { source: self.file.clone(), format, rows: rows.collect::<Result<_, _>>()? }])
    }

    /// The tables that have these columns.
    pub fn tables_with<'a>(&'a self, titles: &'a [&str]) -> impl Iterator<Item = &'a Table> {
        let tables = match &self.body {
            Body::Tables(tables) => tables.as_slice(),
            Body::Json(_) | Body::Log(_) | Body::Prometheus(_) => &[],
        };
        tables.iter().filter(|table| titles.iter().all(|title| table.titles.iter().any(|t| t == title)))
    }

    /// A description for the message that no reader matches.
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
                Some(_) => "JSON that is not an object".to_owned(),
                None => "an empty JSON list".to_owned(),
            },
            Body::Log(_) => "a log of records".to_owned(),
            Body::Tables(tables) => match tables.first() {
                Some(table) => format!("a table with the columns {}", listed(table.titles.iter().collect())),
                None => "text without a table".to_owned(),
            },
            Body::Prometheus(_) => "a Prometheus page of a server that is not vLLM".to_owned(),
        }
    }
}

fn has(map: &Map<String, Json>, keys: &[&str]) -> bool {
    keys.iter().all(|key| map.contains_key(*key))
}

/// Whether the first of several lines is a record of a log.
fn is_log(text: &str) -> bool {
    let Some((first, rest)) = text.trim_start().split_once('\n') else { return false };
    first.starts_with('{')
        && !rest.trim().is_empty()
        && json::from_str(first, BUDGET).is_ok_and(|map| LOGS.iter().any(|keys| has(&map, keys)))
}

/// Whether the first line that is not a comment is a key, as in YAML and in nothing else that is read here.
fn is_yaml(text: &str) -> bool {
    let first = text.lines().find(|line| !line.trim().is_empty() && !line.starts_with('#'));
    let key = first
        .and_then(|line| line.split_once(':'))
        .filter(|(_, rest)| rest.is_empty() || rest.starts_with(' '));
    key.is_some_and(|(key, _)| {
        !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    })
}

/// A YAML document without anchors, which no result needs and with which a short text would be a large one. Every beginning of one is one,
/// too: only the end of its last line shows that a number was not cut off.
fn yaml(file: &str, text: &str) -> Result<Json, ImportError> {
    if !text.ends_with('\n') {
        return Err(ImportError::CutOff { file: file.to_owned() });
    }
    let budget = serde_saphyr::budget! { max_anchors: 0, max_aliases: 0, max_nodes: MAX_YAML_NODES };
    serde_saphyr::from_str_with_options(text, serde_saphyr::options! { budget: budget })
        .map_err(|source| ImportError::Yaml { file: file.to_owned(), source: Box::new(source) })
}

/// One JSON document, several after each other, or the elements of a list.
fn json(file: &str, text: &str) -> Result<Vec<Json>, ImportError> {
    let mut records = Vec::new();
    json::each(text, BUDGET, |document| match document {
        Json::Array(elements) if records.is_empty() => records = elements,
        Json::Array(elements) => records.extend(elements),
        other => records.push(other),
    })
    .map_err(|json| ImportError::Json { file: file.to_owned(), json })?;
    if records.len() > MAX_ROWS {
        return Err(ImportError::TooMany { file: file.to_owned(), what: "records", limit: MAX_ROWS });
    }
    Ok(records)
}

/// JSON as the standard has it, of the same length: Python writes `Infinity` and `NaN`, which become `"inf"` and an empty text. Both words
/// leave room for what replaces them, so that no second text is needed.
fn strict(text: String) -> String {
    let mut bytes = text.into_bytes();
    let (mut at, mut in_string) = (0, false);
    while at < bytes.len() {
        at += match bytes[at] {
            // The escaped character belongs to it; of a wide one the first byte is enough to pass.
            b'\\' if in_string => 2,
            b'"' => {
                in_string = !in_string;
                1
            }
            b'I' if !in_string && bytes[at..].starts_with(b"Infinity") => {
                let negative = at > 0 && bytes[at - 1] == b'-';
                let (start, word) =
                    if negative { (at - 1, &b"\"-inf\"   "[..]) } else { (at, &b"\"inf\"   "[..]) };
                bytes[start..start + word.len()].copy_from_slice(word);
                "Infinity".len()
            }
            b'N' if !in_string && bytes[at..].starts_with(b"NaN") => {
                bytes[at..at + 3].copy_from_slice(b"\"\" ");
                3
            }
            _ => 1,
        };
    }
    String::from_utf8(bytes).expect("whole ASCII words were replaced by ASCII")
}

/// Tables that grow while they are read, and the memory that may still go into them.
struct Tables<'a> {
    file: &'a str,
    done: Vec<Table>,
    rows: usize,
    budget: json::Budget,
}

impl<'a> Tables<'a> {
    fn new(file: &'a str) -> Self {
        Self { file, done: Vec::new(), rows: 0, budget: json::Budget::new(BUDGET) }
    }

    fn too_many(&self) -> ImportError {
        ImportError::TooMany { file: self.file.to_owned(), what: "rows and columns", limit: MAX_ROWS }
    }

    fn begin(&mut self, headings: Vec<String>, titles: Vec<String>) -> Result<(), ImportError> {
        // Empty tables are not rows, and must have an end too.
        self.rows += 1;
        if titles.len() > MAX_COLUMNS || self.rows > MAX_ROWS {
            return Err(self.too_many());
        }
        self.done.push(Table { headings, rows: Vec::new(), titles });
        Ok(())
    }

    /// Adds a row to the table begun last; cells beyond the titles are left out.
    fn row<T: Into<String>>(&mut self, cells: impl Iterator<Item = T>) -> Result<(), ImportError> {
        let too_many = self.too_many();
        let Some(table) = self.done.last_mut() else { return Ok(()) };
        self.rows += 1;
        let mut row = Map::new();
        for (title, cell) in table.titles.iter().zip(cells) {
            let cell = cell.into();
            if self.budget.charge(CELL_BYTES + title.len() + cell.len()).is_err() {
                return Err(too_many);
            }
            row.insert(title.clone(), Json::String(cell));
        }
        if self.rows > MAX_ROWS {
            return Err(too_many);
        }
        table.rows.push(row);
        Ok(())
    }
}

/// Stacked CSV tables, with an empty line between them.
fn csv(file: &str, text: &str) -> Result<Vec<Table>, ImportError> {
    let mut tables = Tables::new(file);
    // Where a part ends: an empty line, which a carriage return may precede.
    let mut rest = text;
    while !rest.trim().is_empty() {
        let start = rest.trim_start();
        let end = [start.find("\n\n"), start.find("\n\r\n")].into_iter().flatten().min();
        let (part, next) = start.split_at(end.unwrap_or(start.len()));
        rest = next;
        let mut reader =
            csv::ReaderBuilder::new().flexible(true).trim(csv::Trim::All).from_reader(part.trim().as_bytes());
        let failed = |source| ImportError::Csv { file: file.to_owned(), source };
        let titles = reader.headers().map_err(failed)?;
        if titles.len() > MAX_COLUMNS {
            return Err(tables.too_many());
        }
        tables.begin(Vec::new(), titles.iter().map(str::to_owned).collect())?;
        let mut record = csv::StringRecord::new();
        while reader.read_record(&mut record).map_err(failed)? {
            tables.row(record.iter())?;
        }
    }
    Ok(tables.done)
}

/// The tables of a Markdown page; logs around them are passed over.
fn markdown(file: &str, text: &str) -> Result<Vec<Table>, ImportError> {
    let cells = |line: &'_ str| line.trim().trim_start_matches('|').trim_end_matches('|').to_owned();
    let is_rule = |line: &str| line.contains('-') && line.chars().all(|c| matches!(c, '|' | '-' | ':' | ' '));
    let (mut tables, mut headings): (_, Vec<(usize, String)>) = (Tables::new(file), Vec::new());
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        if line.starts_with('#') {
            let title = line.trim_start_matches('#');
            let level = line.len() - title.len();
            headings.retain(|(above, _)| *above < level);
            // Markdown has six.
            if level <= 6 {
                headings.push((level, clipped(title)));
            }
        }
        let is_head =
            line.starts_with('|') && lines.peek().is_some_and(|next| next.starts_with('|') && is_rule(next));
        if !is_head {
            continue;
        }
        lines.next();
        let titles = cells(line).split('|').take(MAX_COLUMNS + 1).map(|c| c.trim().to_owned()).collect();
        tables.begin(headings.iter().map(|(_, title)| title.clone()).collect(), titles)?;
        while let Some(row) = lines.next_if(|line| line.starts_with('|')) {
            tables.row(cells(row).split('|').map(str::trim))?;
        }
    }
    Ok(tables.done)
}

/// The samples of a Prometheus page; comments, timestamps and what is not finite are left out.
fn prometheus(file: &str, text: &str) -> Result<Vec<(String, f64)>, ImportError> {
    let mut samples = Vec::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        // Labels may hold blanks; the value follows the last bracket.
        let split = line.rfind('}').map_or_else(|| line.find(' '), |at| Some(at + 1));
        let Some((name, rest)) = split.map(|at| line.split_at(at)) else { continue };
        let value = rest.split_whitespace().next().and_then(|v| v.parse::<f64>().ok());
        samples.extend(value.filter(|v| v.is_finite()).map(|v| (name.trim().to_owned(), v)));
        if samples.len() > MAX_ROWS {
            return Err(ImportError::TooMany { file: file.to_owned(), what: "samples", limit: MAX_ROWS });
        }
    }
    Ok(samples)
}

/// The inserted rows of an SQL script; the columns are those of the first insert.
fn sql(file: &str, text: &str) -> Result<Vec<Table>, ImportError> {
    let mut tables = Tables::new(file);
    for insert in text.split("INSERT INTO").skip(1) {
        let Some((head, values)) = insert.split_once("VALUES") else { continue };
        let Some(names) = head.split_once('(').and_then(|(_, rest)| rest.split_once(')')) else { continue };
        if tables.done.is_empty() {
            let titles =
                names.0.split(',').take(MAX_COLUMNS + 1).map(|name| name.trim().to_owned()).collect();
            tables.begin(Vec::new(), titles)?;
        }
        tables.row(sql_values(values).into_iter())?;
    }
    Ok(tables.done)
}

/// The items of `('a', 'it''s', 3)`, no more of them than a table has columns.
fn sql_values(text: &str) -> Vec<String> {
    let mut values = Vec::new();
    let Some((_, list)) = text.split_once('(') else { return values };
    let (mut value, mut quoted) = (String::new(), false);
    let mut characters = list.chars().peekable();
    while let Some(c) = characters.next() {
        match c {
            '\'' if quoted && characters.next_if_eq(&'\'').is_some() => value.push('\''),
            '\'' => quoted = !quoted,
            ',' if !quoted && values.len() < MAX_COLUMNS => {
                values.push(std::mem::take(&mut value).trim().to_owned());
            }
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
        json("f", &strict(text.to_owned())).unwrap()
    }

    #[test]
    fn python_tokens_become_json_and_strings_stay_as_they_are() {
        let parsed = records(r#"{"rate": Infinity, "low": -Infinity, "x": NaN, "s": "NaN \" Infinity, \\"}"#);
        assert_eq!(parsed[0]["rate"], "inf");
        assert_eq!(parsed[0]["low"], "-inf");
        assert_eq!(parsed[0]["x"], "", "an empty text is not a number");
        assert_eq!(parsed[0]["s"], "NaN \" Infinity, \\");
    }

    #[test]
    fn documents_after_each_other_and_lists_are_records() {
        assert_eq!(records("{}\n{}\n").len(), 2);
        assert_eq!(records("[{}, {}, {}]").len(), 3);
        assert!(matches!(json("f", "{\"a\": [1, 2"), Err(ImportError::Json { .. })));
    }

    #[test]
    fn memory_is_counted_before_it_is_taken() {
        let many = format!("[{}0]", "0,".repeat(1 << 20));
        let error = json("f", &many).unwrap_err();
        assert!(
            matches!(&error, ImportError::Json { json, .. } if json.to_string().contains("40 MiB")),
            "{error:?}"
        );
        assert!(matches!(json("f", &"[".repeat(100_000)), Err(ImportError::Json { .. })), "depth has an end");
        let records = "{}\n".repeat(MAX_ROWS + 1);
        assert!(matches!(json("f", &records), Err(ImportError::TooMany { .. })));
        let wide = format!("a\n{}", ",".repeat(MAX_COLUMNS * 2));
        assert!(csv("f", &wide).is_ok(), "cells beyond the titles are left out");
        assert!(matches!(csv("f", &",".repeat(MAX_COLUMNS + 1)), Err(ImportError::TooMany { .. })));
        let broad = format!("{}\n{}", ",".repeat(500), format!("{}\n", ",".repeat(500)).repeat(1_000));
        assert!(matches!(csv("f", &broad), Err(ImportError::TooMany { .. })));
        let empty = "|a|\n|-|\n".repeat(MAX_ROWS + 1);
        assert!(matches!(markdown("f", &empty), Err(ImportError::TooMany { .. })));
        let inserts = "INSERT INTO t (a) VALUES (1);".repeat(MAX_ROWS + 1);
        assert!(matches!(sql("f", &inserts), Err(ImportError::TooMany { .. })));
    }

    #[test]
    fn an_escape_at_the_end_and_words_within_words_are_survived() {
        for text in ["\"\\", "\"\\é", "-Infinity", "Infinity", "NaN", "InfinityNaN", "\"é\\"] {
            assert_eq!(strict(text.to_owned()).len(), text.len(), "{text}");
        }
    }

    #[test]
    fn stacked_csv_tables_and_markdown_among_logs_are_found() {
        let tables = csv("f", "a,b\n1,\"x, y\"\n\nc\n3\n").unwrap();
        assert_eq!((tables.len(), tables[0].rows[0]["b"].as_str()), (2, Some("x, y")));
        let page = "# Top\nlog | line\n| a | b |\n| -: | --- |\n| 1 | 2 |\n\n| not a table |\n";
        let tables = markdown("f", page).unwrap();
        assert_eq!(tables.len(), 1);
        assert_eq!((tables[0].headings.as_slice(), tables[0].rows.len()), (&["Top".to_owned()][..], 1));
        let nested = markdown("f", "# A\n## B\n|a|\n|-|\n|1|\n## C\n|a|\n|-|\n# D\n|a|\n|-|\n").unwrap();
        let above: Vec<String> = nested.iter().map(|t| t.headings.join("/")).collect();
        assert_eq!(above, ["A/B", "A/C", "D"]);
    }

    #[test]
    fn sql_values_may_hold_quotes_commas_and_brackets() {
        assert_eq!(sql_values("('a, b', 'it''s', 3, '(x)');"), ["a, b", "it's", "3", "(x)"]);
        assert_eq!(sql_values("('never ends"), ["never ends"]);
    }
}
