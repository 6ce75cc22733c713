//! The page around whatever it shows: one HTML document that loads nothing, and the parts that every page has.
//!
//! Enters: the main element. Leaves: a document. Its style sheet and script are inside it, and its policy admits those two by their hash
//! and nothing else.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest, Sha256};

use super::figure::{table, words};
use super::node::{Node, el};

const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("script.js");

/// Findings that are not folded away.
const OPEN_FINDINGS: usize = 5;

/// The whole document; `file` is where the data behind it is.
#[must_use]
pub fn document(name: &str, file: &str, main: Node) -> String {
    let head = el("head")
        .child(el("meta").attr("charset", "utf-8"))
        .child(el("meta").attr("http-equiv", "Content-Security-Policy").attr("content", policy()))
        .child(el("meta").attr("name", "viewport").attr("content", "width=device-width, initial-scale=1"))
        .child(el("meta").attr("name", "color-scheme").attr("content", "light dark"))
        .child(el("meta").attr("name", "referrer").attr("content", "no-referrer"))
        .child(el("title").text(format!("{name} · hbmark")))
        .child(el("style").verbatim(STYLE));
    let footer = el("footer").child(el("p").text(format!(
        "Made by hbmark {}. This page loads nothing; what is behind it is in {file}, and hbmark glossary defines every word.",
        env!("CARGO_PKG_VERSION")
    )));
    let body = el("body")
        .child(main)
        .child(footer)
        .child(el("div").attr("id", "hover").attr("role", "status").attr("hidden", "hidden"))
        .child(el("script").verbatim(SCRIPT));
    format!("<!doctype html>\n{}\n", el("html").attr("lang", "en").child(head).child(body).render())
}

/// Nothing from elsewhere, and of what is here only our own style sheet and script; pictures are those the script makes to be saved.
fn policy() -> String {
    let hash = |text: &str| STANDARD.encode(Sha256::digest(text.as_bytes()));
    format!(
        "default-src 'none'; style-src 'sha256-{}'; script-src 'sha256-{}'; img-src blob:; base-uri 'none'; form-action 'none'",
        hash(STYLE),
        hash(SCRIPT)
    )
}

/// A list whose end is folded away when it is long.
fn list(lines: Vec<String>) -> Vec<Node> {
    let item = |line: String| el("li").text(line);
    let count = lines.len();
    let mut lines = lines.into_iter();
    let mut nodes = vec![el("ul").children(lines.by_ref().take(OPEN_FINDINGS).map(item))];
    if count > OPEN_FINDINGS {
        let more = el("summary").text(format!("{} more", count - OPEN_FINDINGS));
        nodes.push(el("details").child(more).child(el("ul").children(lines.map(item))));
    }
    nodes
}

/// Lines under a title, the worst of a page first; nothing where there are none.
#[must_use]
pub fn group(title: &str, class: &str, lines: Vec<String>) -> Option<Node> {
    if lines.is_empty() {
        return None;
    }
    let group = el("div").class(format!("findings {class}").trim_end()).child(el("h3").text(title));
    Some(group.children(list(lines)))
}

/// Names and values as a table of two columns.
#[must_use]
pub fn pairs(title: &str, pairs: Vec<(String, String)>) -> Node {
    let (names, values): (Vec<String>, Vec<String>) = pairs.into_iter().unzip();
    let group = el("details").child(el("summary").text(title));
    group.child(table("", &[words("name", names), words("value", values)]))
}

/// A serialisable value as dotted names and plain values; what is null is left out.
#[must_use]
pub fn flat(value: &impl serde::Serialize) -> Vec<(String, String)> {
    fn walk(prefix: &str, value: &serde_json::Value, rows: &mut Vec<(String, String)>) {
        match value {
            serde_json::Value::Null => {}
            serde_json::Value::Object(map) => {
                for (key, value) in map {
                    let name = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                    walk(&name, value, rows);
                }
            }
            other => rows.push((prefix.to_owned(), plain_value(other))),
        }
    }
    let mut rows = Vec::new();
    walk("", &serde_json::to_value(value).unwrap_or_default(), &mut rows);
    rows
}

/// A value on one line.
#[must_use]
pub fn plain_value(value: &serde_json::Value) -> String {
    match value {
        serde_json::Value::String(text) => text.clone(),
        serde_json::Value::Array(items) if items.iter().all(|i| !i.is_object() && !i.is_array()) => {
            items.iter().map(plain_value).collect::<Vec<_>>().join(", ")
        }
        other => other.to_string(),
    }
}
