//! A look at `tokenizer.json` before the tokenizers crate gets it.
//!
//! Enters: its bytes. Leaves: bounds on the time and the memory that its steps take for a text, or what in it could run or grow without
//! bounds. Of the file only the parts that compute are kept; vocabulary and merges are passed over. It does not say that the file is a
//! tokenizer.

use regex_syntax::hir::{Hir, HirKind};
use serde::Deserialize;
use serde_json::Value;

use hbmark_core::input::json;

/// Memory for the parts that compute and the added tokens.
const BUDGET: usize = 24 << 20;
/// All patterns together; those of the tokenizers in use stay below 2,000 bytes. The memory of a search grows with their square.
const MAX_PATTERN_BYTES: usize = 4 << 10;
/// Sequences in use have up to a dozen steps, each of which is a pass over the text.
const MAX_STEPS: usize = 64;
/// All counted repetitions of a pattern together: `\p{N}{1,3}` counts 3, and nested ones multiply in the compiled pattern.
const MAX_REPETITIONS: u64 = 10_000;
/// How many times as long replacements may make a text. A mark of three bytes for each space is 3.
const MAX_GROWTH: f64 = 100.0;
/// All added tokens together: each byte becomes some hundred in the automaton that looks for them. Thousands of tokens fit.
const MAX_ADDED_BYTES: usize = 256 << 10;
/// Characters of a word of which every part is looked up, cubed in time; 100 in all models of that kind.
const MAX_WORD_CHARS: u64 = 1000;
/// Keeps a run of spaces before a word apart from its last one. Every byte-level tokenizer has it; looking one character ahead once for
/// each space is not what takes for ever.
const HARMLESS_LOOKAHEAD: &str = r"\s+(?!\S)";

/// What was found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Vetted {
    /// Steps of a search per pair of characters of a text, at most; `None` where a pattern may take any time.
    pub(super) cost: Option<u64>,
    /// How many times as long the steps may make a text that is encoded, and one that is decoded.
    pub(super) growth: f64,
    pub(super) decoded_growth: f64,
}

/// Why a tokenizer is not handed on.
#[derive(Debug, thiserror::Error)]
pub(super) enum VetError {
    #[error("byte {at} is not UTF-8")]
    NotText { at: usize },
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    #[error("it has {count} steps, above the limit of {MAX_STEPS}")]
    Steps { count: usize },
    #[error("its patterns have {bytes} bytes together, above the limit of {MAX_PATTERN_BYTES}")]
    LongPatterns { bytes: usize },
    #[error("the repetitions of a pattern multiply to more than {MAX_REPETITIONS}")]
    Repetitions,
    #[error("it replaces the empty text, which is everywhere")]
    ReplacesNothing,
    #[error("its replacements can make a text {growth:.3e} times as long, above the limit of {MAX_GROWTH}")]
    Growth { growth: f64 },
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
    #[serde(default)]
    model: Model,
}

#[derive(Deserialize, Default)]
struct Model {
    #[serde(default)]
    max_input_chars_per_word: Option<u64>,
}

#[derive(Deserialize)]
struct Added {
    content: String,
}

/// The steps of a part.
#[derive(Default)]
struct Steps<'a> {
    count: usize,
    patterns: Vec<&'a str>,
    /// How many times as long they may make a text.
    growth: f64,
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
    let (encoding, growth) =
        check_steps(&[&outline.normalizer, &outline.pre_tokenizer, &outline.post_processor])?;
    let (decoding, decoded_growth) = check_steps(&[&outline.decoder])?;
    let words = outline.model.max_input_chars_per_word.is_none_or(|most| most <= MAX_WORD_CHARS);
    let cost = encoding.zip(decoding).filter(|_| words).map(|(one, other)| one.max(other));
    Ok(Vetted { cost, growth, decoded_growth })
}

/// The cost of the patterns of some parts, and their growth.
fn check_steps(parts: &[&Value]) -> Result<(Option<u64>, f64), VetError> {
    let mut steps = Steps { growth: 1.0, ..Steps::default() };
    for part in parts {
        gather(part, &mut steps)?;
    }
    let Steps { count, patterns, growth } = steps;
    if count > MAX_STEPS {
        return Err(VetError::Steps { count });
    }
    let bytes = patterns.iter().map(|pattern| pattern.len()).sum();
    if bytes > MAX_PATTERN_BYTES {
        return Err(VetError::LongPatterns { bytes });
    }
    if patterns.iter().any(|pattern| repetitions(pattern) > MAX_REPETITIONS) {
        return Err(VetError::Repetitions);
    }
    if growth > MAX_GROWTH {
        return Err(VetError::Growth { growth });
    }
    let cost = patterns.iter().map(|pattern| cost(pattern)).sum();
    Ok((cost, growth))
}

/// Every step of a part. The depth of the tree is that of the JSON, which has an end.
fn gather<'a>(part: &'a Value, steps: &mut Steps<'a>) -> Result<(), VetError> {
    match part {
        Value::Object(map) => {
            let kind = map.get("type").and_then(Value::as_str);
            steps.count += usize::from(kind.is_some());
            match kind {
                Some("Precompiled") => return Err(VetError::Unchecked { kind: "Precompiled" }),
                Some("Replace") => steps.growth *= replacement_growth(map)?,
                Some("Prepend") => {
                    // In front of each piece between added tokens: a mark of a few bytes is no more than those had.
                    let content = map.get("prepend").and_then(Value::as_str).unwrap_or_default();
                    steps.growth *= (content.len() as f64 / 8.0).max(1.0);
                }
                _ => {}
            }
            steps.patterns.extend(map.get("Regex").and_then(Value::as_str));
            map.values().try_for_each(|value| gather(value, steps))
        }
        Value::Array(items) => items.iter().try_for_each(|item| gather(item, steps)),
        _ => Ok(()),
    }
}

/// How many times as long a replacement may make a text.
fn replacement_growth(step: &serde_json::Map<String, Value>) -> Result<f64, VetError> {
    let content = step.get("content").and_then(Value::as_str).unwrap_or_default().len() as f64;
    let pattern = step.get("pattern");
    let of = |kind: &str| pattern.and_then(|pattern| pattern.get(kind)).and_then(Value::as_str);
    let shortest = match (of("String"), of("Regex")) {
        (Some(""), _) | (_, Some("")) => return Err(VetError::ReplacesNothing),
        (Some(text), _) => text.len(),
        // A pattern that cannot be looked into may match between any two characters.
        (None, Some(pattern)) => {
            regex_syntax::parse(pattern).ok().and_then(|hir| hir.properties().minimum_len()).unwrap_or(0)
        }
        (None, None) => 0,
    };
    Ok(if shortest == 0 { 1.0 + content } else { (content / shortest as f64).max(1.0) })
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

/// Steps of a search per character that it looks at: the places of a pattern, counted out. `None` where it needs backtracking, or has a
/// repetition in a repetition.
fn cost(pattern: &str) -> Option<u64> {
    fn places(hir: &Hir, is_repeated: bool) -> Option<u64> {
        match hir.kind() {
            HirKind::Empty | HirKind::Class(_) | HirKind::Look(_) => Some(1),
            HirKind::Literal(literal) => Some(literal.0.len() as u64),
            HirKind::Capture(capture) => places(&capture.sub, is_repeated),
            HirKind::Repetition(_) if is_repeated => None,
            HirKind::Repetition(repetition) => {
                let times = repetition.max.unwrap_or(repetition.min).max(1);
                Some(places(&repetition.sub, true)?.saturating_mul(times.into()))
            }
            HirKind::Concat(parts) | HirKind::Alternation(parts) => {
                parts.iter().try_fold(0_u64, |sum, part| Some(sum.saturating_add(places(part, is_repeated)?)))
            }
        }
    }
    places(&regex_syntax::parse(&pattern.replace(HARMLESS_LOOKAHEAD, r"\s+")).ok()?, false)
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
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|\s+(?!\S)|\s+",
            r"[\r\n]",
            r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿ]+",
        ] {
            let cost = vetted(pattern).unwrap().cost.unwrap_or_else(|| panic!("{pattern}"));
            assert!(cost < 100, "{pattern}: {cost}");
        }
    }

    #[test]
    fn backtracking_and_nested_repetitions_need_a_clock() {
        for pattern in [
            r"(a+)+(?=b)",
            r"(a|b)\1",
            r"(?<!x)a+",
            r"(?=(a+))\1b",
            "(?i)((((((((((a?)?)?)?)?)?)?)?)?)?)?",
            "(?:a{1,9})+",
        ] {
            assert_eq!(vetted(pattern).unwrap().cost, None, "{pattern}");
        }
        // Harmless in themselves, and counted.
        assert_eq!(vetted(&format!("(?i){}", "(a?)".repeat(1000))).unwrap().cost, Some(1000));
        let words = r#"{"model": {"type": "WordPiece", "max_input_chars_per_word": 1000000}}"#;
        assert_eq!(check_tokenizer(words.as_bytes()).unwrap().cost, None);
    }

    #[test]
    fn what_grows_without_bounds_is_refused() {
        let refused = |pattern: &str| vetted(pattern).unwrap_err().to_string();
        assert!(refused("(?:(?:(?=a){1000}){1000}){1000}").contains("multiply to more than 10000"));
        assert!(refused(&"a".repeat(MAX_PATTERN_BYTES + 1)).contains("have 4097 bytes together"));
        assert!(vetted(r"\p{N}{1,3}\x{41}a{,5}").is_ok());
        let refused = |json: &str| check_tokenizer(json.as_bytes()).unwrap_err().to_string();
        assert!(
            refused(r#"{"normalizer": {"type": "Precompiled", "precompiled_charsmap": "////////"}}"#)
                .contains("Precompiled")
        );
        assert!(refused(r#"{"added_tokens": [{"content": ""}]}"#).contains("empty"));
        let long = format!(r#"{{"added_tokens": [{{"content": "{}"}}]}}"#, "x".repeat(MAX_ADDED_BYTES + 1));
        assert!(refused(&long).contains("have 262145 bytes"));
        let many = r#"{"type": "Lowercase"},"#.repeat(MAX_STEPS + 1);
        assert!(refused(&format!("{{\"decoder\": [{many} 0]}}")).contains("65 steps"));
        assert!(check_tokenizer(b"\xff").unwrap_err().to_string().contains("byte 0"));
    }

    #[test]
    fn replacements_that_multiply_are_refused_and_marks_for_spaces_are_not() {
        let replace = |kind: &str, pattern: &str, content: &str| serde_json::json!({"type": "Replace", "pattern": {kind: pattern}, "content": content});
        let of = |steps: Vec<Value>, decoder: Value| {
            let normalizer = serde_json::json!({"type": "Sequence", "normalizers": steps});
            let file = serde_json::json!({"normalizer": normalizer, "decoder": decoder});
            check_tokenizer(file.to_string().as_bytes()).map_err(|refused| refused.to_string())
        };
        let prepend = serde_json::json!({"type": "Prepend", "prepend": "\u{2581}"});
        let mark = || replace("String", " ", "\u{2581}");
        let found = of(vec![prepend, mark()], replace("String", "\u{2581}", " ")).unwrap();
        assert_eq!((found.growth, found.decoded_growth), (3.0, 1.0));
        let found = of(vec![replace("Regex", r"\s+", " "), replace("Regex", " {2,}", "--")], Value::Null);
        assert_eq!(found.unwrap(), Vetted { cost: Some(3), growth: 1.0, decoded_growth: 1.0 });
        let doubling = || replace("String", "a", "aa");
        for bomb in [
            vec![replace("String", "a", &"a".repeat(1_000_000))],
            vec![replace("Regex", "b*", &"a".repeat(1_000))],
            vec![replace("Regex", "(?=a)", &"a".repeat(1_000))],
            (0..30).map(|_| doubling()).collect(),
            (0..60).map(|_| doubling()).collect(),
        ] {
            let error = of(bomb.clone(), Value::Null).unwrap_err();
            assert!(error.contains("times as long, above the limit of 100"), "{error}");
            assert_eq!(of(Vec::new(), bomb.into()).unwrap_err(), error);
        }
        assert!(of((0..200).map(|_| doubling()).collect(), Value::Null).unwrap_err().contains("201 steps"));
        for nothing in [replace("String", "", "x"), replace("Regex", "", "x")] {
            assert!(of(vec![nothing], Value::Null).unwrap_err().contains("replaces the empty text"));
        }
    }
}
