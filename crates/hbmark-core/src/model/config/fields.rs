//! Typed access to the keys of a JSON object, with errors that name file, key, found value and wanted value.
//!
//! Enters: a parsed JSON object. Leaves: numbers in range, or a [`ModelError`]. A null is an absent
//! key everywhere, as in `transformers`; where the two differ, ask [`Fields::is_absent`].

use std::ops::RangeInclusive;
use std::path::Path;

use serde_json::{Map, Value};

use crate::model::ModelError;

/// Longest rendering of a found value in a message.
const FOUND_CHARS: usize = 80;

/// One JSON object of a config, and where it came from.
#[derive(Debug, Clone)]
pub(in crate::model) struct Fields<'a> {
    path: &'a Path,
    /// Key path of this object in the document, with its trailing dot; empty at the top.
    prefix: String,
    map: &'a Map<String, Value>,
    /// The object around this one, for keys that a model of several parts keeps outside.
    outer: Option<&'a Map<String, Value>>,
}

/// Keys that a model of several parts may keep beside its `text_config`.
const OUTER_KEYS: [&str; 5] =
    ["quantization_config", "tie_word_embeddings", "dtype", "torch_dtype", "eos_token_id"];

impl<'a> Fields<'a> {
    /// The top-level object of a document.
    pub fn top(path: &'a Path, document: &'a Value) -> Result<Self, ModelError> {
        match document {
            Value::Object(map) => Ok(Self { path, prefix: String::new(), map, outer: None }),
            other => Err(ModelError::BadValue {
                path: path.to_owned(),
                key: "(document)".to_owned(),
                found: render(other),
                wanted: "a JSON object".to_owned(),
            }),
        }
    }

    /// The language model of a config of several parts (`text_config`), or the config itself.
    pub fn text_model(&self) -> Result<Self, ModelError> {
        Ok(self
            .section("text_config")?
            .map_or_else(|| self.clone(), |text| Self { outer: Some(self.map), ..text }))
    }

    pub fn path(&self) -> &'a Path {
        self.path
    }

    /// The value of a key; null reads as absent.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        let own = self.map.get(key).filter(|v| !v.is_null());
        own.or_else(|| self.around(key)?.get(key).filter(|v| !v.is_null()))
    }

    /// The object around this one, where the key may stand there.
    fn around(&self, key: &str) -> Option<&'a Map<String, Value>> {
        self.outer.filter(|_| OUTER_KEYS.contains(&key))
    }

    /// Whether the key does not occur at all: `"key": null` is not absent.
    pub fn is_absent(&self, key: &str) -> bool {
        !self.map.contains_key(key)
    }

    /// Keys whose value is not null.
    pub fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.map.iter().filter(|(_, v)| !v.is_null()).map(|(k, _)| k.as_str())
    }

    pub fn integer(&self, key: &str, range: RangeInclusive<usize>) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64().and_then(|v| usize::try_from(v).ok()) {
            Some(v) if range.contains(&v) => Ok(Some(v)),
            _ => Err(self.bad(key, integer_wanted(&range))),
        }
    }

    /// An integer without which nothing can be computed.
    pub fn need_integer(&self, key: &str, range: RangeInclusive<usize>) -> Result<usize, ModelError> {
        self.integer(key, range.clone())?.ok_or_else(|| self.missing(key, integer_wanted(&range)))
    }

    pub fn float(&self, key: &str, range: RangeInclusive<f64>) -> Result<Option<f64>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64() {
            Some(v) if range.contains(&v) => Ok(Some(v)),
            _ => Err(self.bad(key, float_wanted(&range))),
        }
    }

    pub fn need_float(&self, key: &str, range: RangeInclusive<f64>) -> Result<f64, ModelError> {
        self.float(key, range.clone())?.ok_or_else(|| self.missing(key, float_wanted(&range)))
    }

    /// A boolean, or what `transformers` takes where the key is absent.
    pub fn flag(&self, key: &str, default: bool) -> Result<bool, ModelError> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value.as_bool().ok_or_else(|| self.bad(key, "true or false")),
        }
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => value.as_str().map(Some).ok_or_else(|| self.bad(key, "a string")),
        }
    }

    pub fn list(&self, key: &str, most: usize) -> Result<Option<&'a [Value]>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(items)) if items.len() <= most => Ok(Some(items)),
            Some(Value::Array(items)) => Err(ModelError::BadValue {
                path: self.path.to_owned(),
                key: self.name(key),
                found: format!("a list of {}", items.len()),
                wanted: format!("a list of at most {most}"),
            }),
            Some(_) => Err(self.bad(key, "a list")),
        }
    }

    /// A nested object.
    pub fn section(&self, key: &str) -> Result<Option<Fields<'a>>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => {
                Ok(Some(Self { path: self.path, prefix: format!("{}.", self.name(key)), map, outer: None }))
            }
            Some(_) => Err(self.bad(key, "an object")),
        }
    }

    /// Refuses a present key by name unless it has the one value that changes nothing.
    pub fn only(&self, key: &str, neutral: &Value) -> Result<(), ModelError> {
        match self.get(key) {
            None => Ok(()),
            Some(value) if value == neutral => Ok(()),
            // 1 and 1.0 are different JSON and the same number.
            Some(value) if value.as_f64().is_some() && value.as_f64() == neutral.as_f64() => Ok(()),
            Some(_) if neutral.is_null() => Err(self.unsupported(key, "null, or no such key")),
            Some(_) => Err(self.unsupported(key, neutral.to_string())),
        }
    }

    pub fn bad(&self, key: &str, wanted: impl Into<String>) -> ModelError {
        ModelError::BadValue {
            path: self.path.to_owned(),
            key: self.name(key),
            found: self.found(key),
            wanted: wanted.into(),
        }
    }

    pub fn missing(&self, key: &str, wanted: impl Into<String>) -> ModelError {
        ModelError::MissingKey { path: self.path.to_owned(), key: self.name(key), wanted: wanted.into() }
    }

    pub fn unsupported(&self, key: &str, supported: impl Into<String>) -> ModelError {
        ModelError::UnsupportedValue {
            path: self.path.to_owned(),
            key: self.name(key),
            found: self.found(key),
            supported: supported.into(),
        }
    }

    fn name(&self, key: &str) -> String {
        let outside = self.map.get(key).is_none_or(Value::is_null)
            && self.around(key).is_some_and(|map| map.contains_key(key));
        if outside { key.to_owned() } else { format!("{}{key}", self.prefix) }
    }

    fn found(&self, key: &str) -> String {
        self.get(key).or_else(|| self.map.get(key)).map_or_else(|| "absent".to_owned(), render)
    }
}

fn integer_wanted(range: &RangeInclusive<usize>) -> String {
    format!("an integer from {} to {}", range.start(), range.end())
}

fn float_wanted(range: &RangeInclusive<f64>) -> String {
    format!("a number from {:e} to {:e}", range.start(), range.end())
}

/// A value as JSON, shortened.
fn render(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(FOUND_CHARS) {
        None => text,
        Some((cut, _)) => format!("{}...", &text[..cut]),
    }
}
