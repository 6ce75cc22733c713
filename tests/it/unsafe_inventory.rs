//! `docs/unsafe.md` lists every file with unsafe code, and how much of it; a file that is not listed, or has more or less, fails here.
//!
//! `INSTA_UPDATE=always cargo test --test it unsafe_inventory` writes the counts anew; why a file needs it and what is checked is for a person.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::runs::{root, sources};

/// Blocks, functions, and the rest (impls, traits, foreign declarations) of one file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Counts {
    blocks: usize,
    functions: usize,
    others: usize,
}

/// The word as a keyword: what follows it tells what it opens.
fn count(text: &str) -> Counts {
    // In two parts, so that this file has none.
    let word = concat!("un", "safe");
    let mut counts = Counts::default();
    for line in text.lines().filter(|line| !line.trim_start().starts_with("//")) {
        for (at, _) in line.match_indices(word) {
            let alone = |c: Option<char>| c.is_none_or(|c| !(c.is_alphanumeric() || c == '_'));
            let rest = &line[at + word.len()..];
            if !alone(line[..at].chars().next_back()) || !alone(rest.chars().next()) {
                continue;
            }
            match rest.trim_start() {
                rest if rest.starts_with('{') => counts.blocks += 1,
                rest if rest.starts_with("fn ") => counts.functions += 1,
                rest if ["impl", "trait", "extern"].iter().any(|word| rest.starts_with(word)) => {
                    counts.others += 1;
                }
                _ => {}
            }
        }
    }
    counts
}

fn in_source() -> BTreeMap<String, Counts> {
    let mut files = vec![root().join("build.rs")];
    for folder in ["src", "crates", "tests", "benches", "fuzz"] {
        sources(&root().join(folder), &mut files);
    }
    let named = |path: PathBuf| path.strip_prefix(root()).unwrap().to_string_lossy().into_owned();
    let counted = |path: PathBuf| (count(&std::fs::read_to_string(&path).unwrap()), path);
    let listed = files.into_iter().map(counted).filter(|(counts, _)| *counts != Counts::default());
    listed.map(|(counts, path)| (named(path), counts)).collect()
}

/// `| file | blocks | functions | others | why | what is checked |`
fn row(line: &str) -> Option<(String, Counts, String)> {
    let cells: Vec<&str> = line.trim().trim_matches('|').split('|').map(str::trim).collect();
    let [file, blocks, functions, others, why, checked] = cells[..] else { return None };
    let counts = Counts {
        blocks: blocks.parse().ok()?,
        functions: functions.parse().ok()?,
        others: others.parse().ok()?,
    };
    Some((file.trim_matches('`').to_owned(), counts, format!("{why} | {checked}")))
}

#[test]
fn the_inventory_of_unsafe_code_is_that_of_the_source() {
    let page = root().join("docs/unsafe.md");
    let text = std::fs::read_to_string(&page).unwrap();
    let source = in_source();
    if std::env::var_os("INSTA_UPDATE").is_some_and(|v| v == "always") {
        let rows: Vec<_> = text.lines().filter_map(row).collect();
        let head: Vec<&str> = text.lines().take_while(|line| row(line).is_none()).collect();
        let tail: Vec<&str> = text.lines().skip(head.len() + rows.len()).collect();
        let told: BTreeMap<String, String> = rows.into_iter().map(|(file, _, words)| (file, words)).collect();
        let lines = source.iter().map(|(file, c)| {
            let words = told.get(file).map_or("say why | say what is checked", String::as_str);
            format!("| `{file}` | {} | {} | {} | {words} |", c.blocks, c.functions, c.others)
        });
        let owned =
            |lines: &[&str]| lines.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>().into_iter();
        let all: Vec<String> = owned(&head).chain(lines).chain(owned(&tail)).collect();
        std::fs::write(&page, all.join("\n") + "\n").unwrap();
        return;
    }
    let listed: BTreeMap<String, Counts> = text.lines().filter_map(row).map(|(f, c, _)| (f, c)).collect();
    for (file, counts) in &source {
        assert_eq!(
            listed.get(file),
            Some(counts),
            "docs/unsafe.md on {file}; INSTA_UPDATE=always writes the counts"
        );
    }
    for file in listed.keys() {
        assert!(source.contains_key(file), "docs/unsafe.md lists {file}, which has none");
    }
    assert!(!text.contains("say why |"), "a row of docs/unsafe.md does not say why");
}

#[test]
fn only_the_keyword_counts() {
    let word = concat!("un", "safe");
    let text =
        format!("{word} {{ }} {word}_code // {word} fn\n    // {word} {{\npub {word} fn x()\n{word} impl X");
    assert_eq!(count(&text), Counts { blocks: 1, functions: 1, others: 1 });
}
