//! The page around its content.
//!
//! Enters: the main element. Leaves: an HTML document that loads nothing: its style sheet and script are inside it, and its content security
//! policy admits those two by their hash and nothing else.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest, Sha256};

use super::node::{Node, el};

const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("script.js");

/// The whole page.
pub fn page(name: &str, main: Node) -> String {
    let head = el("head")
        .child(el("meta").attr("charset", "utf-8"))
        .child(el("meta").attr("http-equiv", "Content-Security-Policy").attr("content", policy()))
        .child(el("meta").attr("name", "viewport").attr("content", "width=device-width, initial-scale=1"))
        .child(el("meta").attr("name", "color-scheme").attr("content", "light dark"))
        .child(el("meta").attr("name", "referrer").attr("content", "no-referrer"))
        .child(el("title").text(format!("{name} · hbmark")))
        .child(el("style").verbatim(STYLE));
    let footer = el("footer").child(el("p").text(format!(
        "Made by hbmark {}. This page loads nothing; what is behind it is in the JSON of the result, and hbmark glossary defines every word.",
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
