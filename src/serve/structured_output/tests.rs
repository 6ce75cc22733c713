//! Grammars over small vocabularies: what they allow, where they end, what is refused.

use super::*;
use hbmark_traffic::sampler::{Sampler, Sampling};

const BYTES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tokenizers/bytes.json");

/// Every byte a token, a few longer ones, and an end.
fn byte_level() -> Tokenizer {
    Tokenizer::open_path(Path::new(BYTES)).unwrap()
}

fn document() -> Value {
    serde_json::from_str(&std::fs::read_to_string(BYTES).unwrap()).unwrap()
}

fn file(text: &str) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    file
}

/// What a model of random logits generates under a grammar.
fn generated(
    masks: &GrammarCompiler,
    grammar: &Grammar,
    how: Sampling,
    tokenizer: &Tokenizer,
    request: usize,
) -> String {
    let compiled = masks.compile(grammar).unwrap();
    let mut constraints = Constraints::new(&compiled, vec![true; request + 1]);
    let mut sampler = Sampler::new(how);
    let mut tokens = Vec::new();
    for position in 0..2_000 {
        let mut logits: Vec<f32> = (0..300_u64)
            .map(|i| {
                (hbmark_traffic::workload::splitmix64(request as u64 * 7_919 + position, i) >> 44) as f32
                    / 1e5
            })
            .collect();
        constraints.compute_mask(request).unwrap();
        constraints.apply(&mut logits);
        let token = sampler.sample(&logits, request, usize::try_from(position).unwrap());
        assert!(logits[token as usize].is_finite(), "a token that was allowed");
        constraints.advance(request, token).unwrap();
        if compiled.ends().contains(&token) {
            assert_eq!((constraints.counts.started, constraints.counts.complete), (1, 1));
            return tokenizer.decode(&tokens).unwrap();
        }
        tokens.push(token);
    }
    panic!("no end: {}", tokenizer.decode(&tokens).unwrap());
}

const WARM: Sampling = Sampling { temperature: 0.8, top_k: 50, top_p: 0.95, seed: 3 };

const SCHEMA: &str = r##"{"type": "object", "properties": {
    "name": {"type": "string", "maxLength": 12},
    "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    "next": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]}},
    "$defs": {"leaf": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": false}},
    "required": ["name", "age", "tags", "next"], "additionalProperties": false}"##;

/// What satisfies [`SCHEMA`], but for its bounds.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Person {
    name: String,
    age: u32,
    tags: Vec<Tag>,
    #[serde(rename = "next")]
    _next: Option<Leaf>,
}

#[derive(serde::Deserialize)]
#[serde(rename_all = "lowercase")]
enum Tag {
    Red,
    Green,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Leaf {
    #[serde(rename = "on")]
    _on: bool,
}

#[test]
fn outputs_under_a_schema_satisfy_it_greedy_or_sampled() {
    let tokenizer = byte_level();
    let masks = GrammarCompiler::new(&tokenizer, 300, &[]).unwrap();
    let schema = file(SCHEMA);
    let grammar: Grammar = format!("json-schema:{}", schema.path().display()).parse().unwrap();
    let mut seen = std::collections::HashSet::new();
    for request in 0..12 {
        let how = if request % 2 == 0 { Sampling::GREEDY } else { WARM };
        let text = generated(&masks, &grammar, how, &tokenizer, request);
        let person: Person = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        assert!(person.name.chars().count() <= 12 && person.age <= 150 && person.tags.len() <= 3, "{text}");
        seen.insert(text);
    }
    assert!(seen.len() > 6, "the model still decides what is said");
}

#[test]
fn outputs_under_a_regular_expression_or_a_grammar_match_it() {
    let tokenizer = byte_level();
    let masks = GrammarCompiler::new(&tokenizer, 300, &[]).unwrap();
    let grammar: Grammar = "regex:[0-9]{3}-[a-c]+x".parse().unwrap();
    let text = generated(&masks, &grammar, WARM, &tokenizer, 1);
    let (digits, rest) = text.split_once('-').unwrap();
    assert!(digits.len() == 3 && digits.bytes().all(|b| b.is_ascii_digit()), "{text}");
    assert!(
        rest.ends_with('x') && rest[..rest.len() - 1].bytes().all(|b| (b'a'..=b'c').contains(&b)),
        "{text}"
    );
    let lark = file("start: pair+ \";\"\npair: \"(\" /[ab]/ \")\"\n");
    let text = generated(&masks, &Grammar::Lark(lark.path().to_path_buf()), WARM, &tokenizer, 2);
    assert!(text.starts_with('(') && text.ends_with(");"), "{text}");
}

#[test]
fn only_constrained_requests_are_held() {
    let masks = GrammarCompiler::new(&byte_level(), 300, &[]).unwrap();
    let compiled = masks.compile(&"regex:a".parse().unwrap()).unwrap();
    let constraints = Constraints::new(&compiled, vec![true, false]);
    assert!(constraints.holds(0) && !constraints.holds(1) && !constraints.holds(2));
}

#[test]
fn a_metaspace_vocabulary_is_read_as_text_with_spaces() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models/llama-gqa");
    let tokenizer = Tokenizer::open(&path).unwrap();
    let masks = GrammarCompiler::new(&tokenizer, 211, &[2]).unwrap();
    let compiled = masks.compile(&"regex:( every| step)+ at".parse().unwrap()).unwrap();
    assert_eq!(compiled.ends(), [2]);
    let mut constraints = Constraints::new(&compiled, vec![true]);
    constraints.compute_mask(0).unwrap();
    let mut logits = vec![0.0; 211];
    constraints.apply(&mut logits);
    let allowed: Vec<u32> = (0..211).filter(|t| logits[*t as usize].is_finite()).collect();
    let names = allowed.iter().map(|t| tokenizer.decode(&[3, *t]).unwrap()).collect::<Vec<_>>();
    assert!(names.iter().any(|n| n == ", every") && names.iter().any(|n| n == ", step"), "{names:?}");
    assert!(names.iter().all(|n| " every".starts_with(&n[1..]) || " step".starts_with(&n[1..])), "{names:?}");
}

#[test]
fn what_is_no_grammar_or_no_vocabulary_is_refused_by_name() {
    for given in ["", "regex", "regex:", "xml:a", "json-schema:"] {
        let error = given.parse::<Grammar>().unwrap_err().to_string();
        assert!(error.contains("json-schema:FILE, regex:RE or grammar:FILE"), "{error}");
    }
    let tokenizer = byte_level();
    let masks = GrammarCompiler::new(&tokenizer, 300, &[]).unwrap();
    let refused = |grammar: &str, message: &str| {
        let error = masks.compile(&grammar.parse().unwrap()).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    };
    refused("regex:[a", "the grammar regex:[a cannot be compiled");
    // Said in a line, and not with pages of the parser's state behind it.
    let nothing = masks.compile(&r"regex:[^\s\S]".parse().unwrap()).unwrap_err().to_string();
    assert!(nothing.ends_with("cannot be compiled: it admits no output"), "{nothing}");
    refused("json-schema:/no/such", "cannot read /no/such");
    let (broken, lark, binary) = (file("{"), file("start: nowhere"), file(""));
    std::fs::write(binary.path(), [0xff, 0xfe]).unwrap();
    refused(&format!("json-schema:{}", broken.path().display()), "is not JSON");
    refused(&format!("grammar:{}", lark.path().display()), "cannot be compiled");
    refused(&format!("grammar:{}", binary.path().display()), "is not text");
    let error = GrammarCompiler::new(&tokenizer, 100, &[]).unwrap_err().to_string();
    assert!(error.contains("263 tokens and the model 100 logits"), "{error}");
    let error = GrammarCompiler::new(&tokenizer, 262, &[]).unwrap_err().to_string();
    assert!(error.contains("names an end-of-sequence token"), "the end has no logit: {error}");
}

#[test]
fn a_special_token_without_a_logit_is_none_of_the_vocabulary() {
    let mut document = document();
    let mut image = document["added_tokens"][0].clone();
    (image["id"], image["content"]) = (263.into(), "<image>".into());
    document["added_tokens"].as_array_mut().unwrap().push(image);
    let tokenizer = Tokenizer::open_path(file(&document.to_string()).path()).unwrap();
    assert_eq!(tokenizer.token_id("<image>"), Some(263));
    let masks = GrammarCompiler::new(&tokenizer, 263, &[]).unwrap();
    masks.compile(&"regex:[a-z]{3}".parse().unwrap()).unwrap();
}

#[test]
fn hostile_vocabularies_are_errors_and_not_panics() {
    let with = |change: &dyn Fn(&mut Value)| {
        let mut document = document();
        change(&mut document);
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), document.to_string()).unwrap();
        let tokenizer = Tokenizer::open(folder.path()).unwrap();
        GrammarCompiler::new(&tokenizer, 400, &[]).map(|_| ()).unwrap_err().to_string()
    };
    let fallback = json!({ "type": "Sequence", "decoders": [{ "type": "ByteFallback" }] });
    let error = with(&|d| {
        d["decoder"] = fallback.clone();
        d["model"]["vocab"]["<0xZZ>"] = 300.into();
    });
    assert!(error.contains("token \"<0xZZ>\" is none"), "{error}");
    let error = with(&|d| d["decoder"] = Value::Null);
    assert!(error.contains("bytes of the tokenizer's tokens are not known"), "{error}");
    let error = with(&|d| d["added_tokens"] = json!([]));
    assert!(error.contains("names an end-of-sequence token"), "{error}");
}
