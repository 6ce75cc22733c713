//! The end of a page: how to run it again, and what it ran on.
//!
//! Enters: the parts that a report and a serving result have in common. Leaves: two sections of a document.

use std::collections::BTreeMap;

use crate::output::document::{Block, Document, Line, words};
use hbmark_core::result::{Capabilities, DeviceSpec, Environment, ModelSummary};

/// The command, the build and the configuration; `more` is folded away with it.
pub fn rerun(
    page: &mut Document,
    command: &str,
    environment: &Environment,
    config: &BTreeMap<String, serde_json::Value>,
    model: Option<&ModelSummary>,
    more: impl IntoIterator<Item = Block>,
) {
    let build = &environment.build;
    let revision = build.git_revision.as_deref().unwrap_or("unknown");
    page.anchored("reproduce", "To run it again");
    page.blocks.push(Block::Shell(command.to_owned()));
    let hash = model.map(|model| format!(", model hash {}", model.hash)).unwrap_or_default();
    let made = format!("hbmark {} at revision {revision}{hash}", build.version);
    page.lines([Line::plain(made)]);
    let config = config.iter().map(|(key, value)| (key.clone(), plain_value(value)));
    page.blocks.push(pairs("Configuration", config));
    page.blocks.extend(more);
    page.blocks.extend(model.map(|model| pairs("Model", flat(model))));
}

/// The machine, the build and the engines; `more` is folded away with them.
pub fn environment<'a>(
    page: &mut Document,
    environment: &Environment,
    more: impl IntoIterator<Item = Block>,
    datasheet: Option<&DeviceSpec>,
    capabilities: impl IntoIterator<Item = &'a Capabilities>,
) {
    page.anchored("environment", "Environment");
    page.blocks.push(pairs("Machine and build", flat(environment)));
    page.blocks.extend(more);
    page.blocks.extend(datasheet.map(|sheet| pairs("Data sheet", flat(sheet))));
    let engines = capabilities.into_iter();
    page.blocks.extend(engines.map(|c| pairs(&format!("Engine on {}", c.device), flat(c))));
}

/// Names and values as a table that is folded away.
pub fn pairs(title: &str, pairs: impl IntoIterator<Item = (String, String)>) -> Block {
    let (names, values): (Vec<String>, Vec<String>) = pairs.into_iter().unzip();
    let table = vec![words("name", names), words("value", values)];
    Block::Fold { title: title.to_owned(), blocks: vec![Block::Table(table.into())] }
}

/// A serialisable value as dotted names and plain values; what is null is left out.
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
fn plain_value(value: &serde_json::Value) -> String {
    match value {
        serde_json::Value::String(text) => text.clone(),
        serde_json::Value::Array(items) if items.iter().all(|i| !i.is_object() && !i.is_array()) => {
            items.iter().map(plain_value).collect::<Vec<_>>().join(", ")
        }
        other => other.to_string(),
    }
}
