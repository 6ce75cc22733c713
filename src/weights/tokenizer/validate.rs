//! A look at `tokenizer.json` before the tokenizers crate gets it.
//!
//! Enters: its bytes. Leaves: whether all its regular expressions run in linear time, or what in it could grow without bounds. Of the file
//! only the parts that compute are kept; vocabulary and merges are passed over. It does not say that the file is a tokenizer.

use serde::Deserialize;
use serde_json::Value;

use hbmark_core::input::json;

/// Memory for the parts that compute and the added tokens.
const BUDGET: usize = 24 << 20;
/// The longest in use has some 300 bytes.
const MAX_PATTERN: usize = 8 << 10;
/// Sequences in use have up to a dozen steps.
const MAX_PATTERNS: usize = 64;
/// All counted repetitions of a pattern together: `\p{N}{1,3}` counts 3, and nested ones multiply in the compiled pattern.
const MAX_REPETITIONS: u64 = 10_000;
/// All added tokens together: each byte becomes some hundred in the automaton that looks for them. Thousands of tokens fit.
const MAX_ADDED_BYTES: usize = 256 << 10;
/// Keeps a run of spaces before a word apart from its last one. Every byte-level tokenizer has it; looking one character ahead once for
/// each space is not what takes for ever.
const HARMLESS_LOOKAHEAD: &str = r"\s+(?!\S)";

/// What was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Vetted {
    /// No pattern needs backtracking.
    pub(super) linear: bool,
}

/// Why a tokenizer is not handed on.
#[derive(Debug, thiserror::Error)]
pub(super) enum VetError {
    #[error("byte {at} is not UTF-8")]
    NotText { at: usize },
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    #[error("it has {count} patterns, above the limit of {MAX_PATTERNS}")]
    Patterns { count: usize },
    #[error("a pattern has {bytes} bytes, above the limit of {MAX_PATTERN}")]
    LongPattern { bytes: usize },
    #[error("the repetitions of a pattern multiply to more than {MAX_REPETITIONS}")]
    Repetitions,
    #[error("its added tokens have {bytes} bytes together, above the limit of {MAX_ADDED_BYTES}")]
    AddedTokens { bytes: usize },
    #[error("an added token is empty")]
    EmptyToken,
    #[error("a {kind} step, whose tables are read without checks; no model that runs here has one")]
    Unchecked { kind: &'static str },
}

/// The parts of the file that compute.
#[derive(Deserialize)]
struct Outline {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    #[serde(default)]
    added_tokens: Option<Vec<Added>>,
}

#[derive(Deserialize)]
struct Added {
    content: String,
}

pub(super) fn check_tokenizer(bytes: &[u8]) -> Result<Vetted, VetError> {
    let text = std::str::from_utf8(bytes).map_err(|error| VetError::NotText { at: error.valid_up_to() })?;
    let outline: Outline = json::from_str(text, BUDGET)?;
    if outline.added_tokens.iter().flatten().any(|token| token.content.is_empty()) {
        return Err(VetError::EmptyToken);
    }
    let bytes = outline.added_tokens.iter().flatten().map(|token| token.content.len()).sum();
    if bytes > MAX_ADDED_BYTES {
        return Err(VetError::AddedTokens { bytes });
    }
    let mut patterns = Vec::new();
    for part in [&outline.normalizer, &outline.pre_tokenizer, &outline.post_processor, &outline.decoder] {
        gather(part, &mut patterns)?;
    }
    if patterns.len() > MAX_PATTERNS {
        return Err(VetError::Patterns { count: patterns.len() });
    }
    let mut linear = true;
    for pattern in patterns {
        if pattern.len() > MAX_PATTERN {
            return Err(VetError::LongPattern { bytes: pattern.len() });
        }
        if repetitions(pattern) > MAX_REPETITIONS {
            return Err(VetError::Repetitions);
        }
        linear &= is_linear(pattern);
    }
    Ok(Vetted { linear })
}

/// Every regular expression of a part. The depth of the tree is that of the JSON, which has an end.
fn gather<'a>(part: &'a Value, patterns: &mut Vec<&'a str>) -> Result<(), VetError> {
    match part {
        Value::Object(map) => {
            if map.get("type").and_then(Value::as_str) == Some("Precompiled") {
                return Err(VetError::Unchecked { kind: "Precompiled" });
            }
            patterns.extend(map.get("Regex").and_then(Value::as_str));
            map.values().try_for_each(|value| gather(value, patterns))
        }
        Value::Array(items) => items.iter().try_for_each(|item| gather(item, patterns)),
        _ => Ok(()),
    }
}

/// The upper ends of all counted repetitions, multiplied: more than any nesting of them comes to.
fn repetitions(pattern: &str) -> u64 {
    let upper_end = |inside: &str| {
        let numbers: Option<Vec<u64>> = inside
            .split(',')
            .filter(|part| !part.trim().is_empty())
            .map(|part| part.trim().parse().ok())
            .collect();
        numbers?.into_iter().max()
    };
    pattern
        .split('{')
        .skip(1)
        .filter_map(|rest| rest.split_once('}'))
        .filter_map(|(inside, _)| upper_end(inside))
        .fold(1, |product, count| product.saturating_mul(count.max(1)))
}

/// Whether a pattern is one of the regex crate's, which does not backtrack.
fn is_linear(pattern: &str) -> bool {
    regex::Regex::new(&pattern.replace(HARMLESS_LOOKAHEAD, r"\s+")).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vetted(pattern: &str) -> Result<Vetted, VetError> {
        let file = serde_json::json!({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false}
        ]}});
        check_tokenizer(file.to_string().as_bytes())
    }

    #[test]
    fn patterns_of_public_tokenizers_run_without_a_clock() {
        for pattern in [
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            r"[\r\n]",
            r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿ]+",
        ] {
            assert_eq!(vetted(pattern).unwrap(), Vetted { linear: true }, "{pattern}");
        }
    }

    #[test]
    fn backtracking_needs_a_clock() {
        for pattern in [r"(a+)+(?=b)", r"(a|b)\1", r"(?<!x)a+", r"(?=(a+))\1b"] {
            assert_eq!(vetted(pattern).unwrap(), Vetted { linear: false }, "{pattern}");
        }
    }

    #[test]
    fn what_grows_without_bounds_is_refused() {
        let refused = |pattern: &str| vetted(pattern).unwrap_err().to_string();
        assert!(refused("(?:(?:(?=a){1000}){1000}){1000}").contains("multiply to more than 10000"));
        assert!(refused(&"a".repeat(MAX_PATTERN + 1)).contains("has 8193 bytes"));
        assert!(vetted(r"\p{N}{1,3}\x{41}a{,5}").is_ok());
        let refused = |json: &str| check_tokenizer(json.as_bytes()).unwrap_err().to_string();
        assert!(
            refused(r#"{"normalizer": {"type": "Precompiled", "precompiled_charsmap": "////////"}}"#)
                .contains("Precompiled")
        );
        assert!(refused(r#"{"added_tokens": [{"content": ""}]}"#).contains("empty"));
        let long = format!(r#"{{"added_tokens": [{{"content": "{}"}}]}}"#, "x".repeat(MAX_ADDED_BYTES + 1));
        assert!(refused(&long).contains("have 262145 bytes"));
        let many = r#"{"Regex": "a"},"#.repeat(MAX_PATTERNS + 1);
        assert!(refused(&format!("{{\"decoder\": [{many} 0]}}")).contains("65 patterns"));
        assert!(check_tokenizer(b"\xff").unwrap_err().to_string().contains("byte 0"));
    }
}
