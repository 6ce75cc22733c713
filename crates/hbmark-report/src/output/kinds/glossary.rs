//! Every term of a report, defined once.

use serde::Serialize;

use crate::output::Kind;
use crate::output::document::{Block, Document, words};

#[derive(Debug, Clone, Copy, Serialize)]
struct Entry {
    term: &'static str,
    formula: &'static str,
    meaning: &'static str,
}

/// One term a line of the file, cells between bars, comments behind `#`.
fn entries() -> impl Iterator<Item = Entry> {
    let rows = include_str!("glossary.txt").lines().filter(|line| !line.starts_with('#'));
    rows.map(|line| {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [term, formula, meaning] = cells[..] else { panic!("not a term: {line}") };
        Entry { term, formula, meaning }
    })
}

#[derive(Debug, Clone, Serialize)]
#[serde(transparent)]
pub struct Glossary {
    entries: Vec<Entry>,
}

impl Glossary {
    pub fn whole() -> Self {
        Self { entries: entries().collect() }
    }

    /// Those whose term holds a word, or if there are none those that mention it; `None` where nothing does.
    pub fn of(word: &str) -> Option<Self> {
        let word = word.to_lowercase();
        let with = |of: fn(&Entry) -> &str| -> Vec<Entry> {
            entries().filter(|entry| of(entry).to_lowercase().contains(&word)).collect()
        };
        [with(|entry| entry.term), with(|entry| entry.meaning)]
            .into_iter()
            .find(|entries| !entries.is_empty())
            .map(|entries| Self { entries })
    }
}

impl Kind for Glossary {
    fn document(&self) -> Document {
        let mut document = Document::default();
        document.blocks.push(Block::KeyValues(
            self.entries
                .iter()
                .map(|e| {
                    let formula =
                        if e.formula.is_empty() { String::new() } else { format!("{}: ", e.formula) };
                    (e.term.to_owned(), format!("{formula}{}", e.meaning))
                })
                .collect(),
        ));
        let column =
            |title: &str, of: fn(&Entry) -> &str| words(title, self.entries.iter().map(|e| of(e).to_owned()));
        document.sheet = Some(vec![
            column("term", |e| e.term),
            column("formula", |e| e.formula),
            column("meaning", |e| e.meaning),
        ]);
        document
    }

    fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self)
    }
}

#[cfg(test)]
mod tests {
    use super::entries;

    const HEAD: &str = "| term | formula | meaning |\n|---|---|---|\n";

    #[test]
    fn the_document_has_every_definition() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/glossary.md");
        let page = std::fs::read_to_string(&path).unwrap();
        let (introduction, found) = page.split_once(HEAD).expect("the page has one table");
        let rows: Vec<String> =
            entries().map(|e| format!("| {} | {} | {} |\n", e.term, e.formula, e.meaning)).collect();
        let wanted = rows.concat();
        if std::env::var_os("INSTA_UPDATE").is_some_and(|v| v == "always") {
            std::fs::write(&path, format!("{introduction}{HEAD}{wanted}")).unwrap();
            return;
        }
        assert_eq!(found, wanted, "docs/glossary.md: run the tests with INSTA_UPDATE=always");
    }
}
