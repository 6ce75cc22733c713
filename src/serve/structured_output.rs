//! Structured output: a grammar compiled against a vocabulary, and per step the tokens that may come next.
//!
//! Enters: a JSON schema, a regular expression or a Lark grammar, and a tokenizer. Leaves: a [`CompiledGrammar`] grammar, and from it
//! [`Constraints`], which follow each constrained request: a mask over the vocabulary before a token is chosen, and the token after. The
//! end of the grammar is a mask of nothing but the end-of-sequence token. Callers time it. Compiling is done once per grammar, as servers
//! do that keep compiled grammars; what a request begins with is a copy.
//!
//! The matching is llguidance's.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};

use crate::weights::loading::SizedFile;
use crate::weights::tokenizer::Tokenizer;
use hbmark_client::point::Constraint;

/// A schema or a grammar is a few pages of text.
const MAX_FILE: u64 = 1 << 20;
/// The longest token that is accepted; vocabularies in use end at 256 bytes.
const MAX_TOKEN_BYTES: usize = 4096;
/// Usual names of the end-of-sequence token, for models without one.
const END_OF_SEQUENCE: [&str; 5] = ["</s>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>"];

/// What outputs are held to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Grammar {
    JsonSchema(PathBuf),
    Regex(String),
    Lark(PathBuf),
}

/// Why outputs cannot be held to a grammar.
#[derive(Debug, thiserror::Error)]
pub enum StructuredError {
    #[error("`{given}` names no grammar; write json-schema:FILE, regex:RE or grammar:FILE")]
    Unknown { given: String },
    #[error(transparent)]
    File(Box<crate::weights::WeightsError>),
    #[error("{} is not JSON: {problem}", path.display())]
    NotJson { path: PathBuf, problem: String },
    #[error("{} is not text", path.display())]
    NotText { path: PathBuf },
    #[error("the grammar {grammar} cannot be compiled: {problem}")]
    Compile { grammar: String, problem: String },
    #[error(
        "the bytes of the tokenizer's tokens are not known: {problem}; byte-level, byte-fallback and metaspace vocabularies are read"
    )]
    Vocabulary { problem: String },
    #[error(
        "neither the model nor the tokenizer names an end-of-sequence token (looked for {}), so no output could end",
        END_OF_SEQUENCE.join(", ")
    )]
    NoEnd,
}

impl FromStr for Grammar {
    type Err = StructuredError;

    fn from_str(given: &str) -> Result<Self, StructuredError> {
        let unknown = || StructuredError::Unknown { given: given.chars().take(100).collect() };
        let (kind, rest) = given.split_once(':').filter(|(_, rest)| !rest.is_empty()).ok_or_else(unknown)?;
        match kind {
            "json-schema" => Ok(Self::JsonSchema(rest.into())),
            "regex" => Ok(Self::Regex(rest.to_owned())),
            "grammar" => Ok(Self::Lark(rest.into())),
            _ => Err(unknown()),
        }
    }
}

impl std::fmt::Display for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::JsonSchema(path) => write!(f, "json-schema:{}", path.display()),
            Self::Regex(regex) => write!(f, "regex:{regex}"),
            Self::Lark(path) => write!(f, "grammar:{}", path.display()),
        }
    }
}

fn read(path: &Path) -> Result<String, StructuredError> {
    let bytes = SizedFile::open(path).and_then(|file| file.read_all(MAX_FILE));
    let bytes = bytes.map_err(|error| StructuredError::File(Box::new(error)))?;
    String::from_utf8(bytes).map_err(|_| StructuredError::NotText { path: path.to_path_buf() })
}

impl Grammar {
    /// What a live server is sent of it.
    pub(super) fn constraint(&self) -> Result<Constraint, StructuredError> {
        Ok(match self {
            Self::Regex(regex) => Constraint::Regex(regex.clone()),
            Self::Lark(path) => Constraint::Grammar(read(path)?),
            Self::JsonSchema(path) => {
                let schema = serde_json::from_str(&read(path)?);
                Constraint::JsonSchema(schema.map_err(|error| StructuredError::NotJson {
                    path: path.clone(),
                    problem: error.to_string(),
                })?)
            }
        })
    }

    /// Reads what it names. A schema's outputs are compact unless it asks otherwise (`x-guidance`): an untrained model would choose free
    /// whitespace for ever.
    fn load(&self) -> Result<TopLevelGrammar, StructuredError> {
        Ok(match self {
            Self::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Self::Lark(path) => TopLevelGrammar::from_lark(read(path)?),
            Self::JsonSchema(path) => {
                let bad = |error: serde_json::Error| StructuredError::NotJson {
                    path: path.clone(),
                    problem: error.to_string(),
                };
                let mut schema: Value = serde_json::from_str(&read(path)?).map_err(bad)?;
                if let Some(schema) = schema.as_object_mut() {
                    schema.entry("x-guidance").or_insert_with(|| json!({ "whitespace_flexible": false }));
                }
                TopLevelGrammar::from_json_schema(schema)
            }
        })
    }
}

/// The bytes of every token, by its number.
fn token_bytes(tokenizer: &Tokenizer) -> Result<Vec<Vec<u8>>, StructuredError> {
    let unknown = |problem: String| StructuredError::Vocabulary { problem };
    let mut document = tokenizer.json().map_err(unknown)?;
    // A metaspace decoder replaces one character by a space, as the sequence that llguidance reads does.
    if document["decoder"]["type"] == "Metaspace" {
        let space = document["decoder"]["replacement"].clone();
        document["decoder"] = json!({ "type": "Sequence", "decoders": [
            { "type": "Replace", "pattern": { "String": space }, "content": " " },
            { "type": "ByteFallback" },
        ] });
    }
    if document["added_tokens"].is_null() {
        document["added_tokens"] = json!([]);
    }
    let vocabulary = document["model"]["vocab"].as_object();
    let vocabulary = vocabulary.ok_or_else(|| unknown("its model has no map of tokens".to_owned()))?;
    let is_byte = |name: &str| {
        let digits = name.strip_prefix("<0x").and_then(|n| n.strip_suffix('>'));
        digits.is_some_and(|d| d.len() == 2 && d.bytes().all(|b| b.is_ascii_hexdigit()))
    };
    let odd = |name: &&String| name.len() > MAX_TOKEN_BYTES || (name.starts_with("<0x") && !is_byte(name));
    if let Some(name) = vocabulary.keys().find(odd) {
        return Err(unknown(format!("token {:?} is none", name.chars().take(40).collect::<String>())));
    }
    llguidance::token_bytes_from_tokenizer_json(&document).map_err(|error| unknown(error.to_string()))
}

/// A grammar, compiled against a vocabulary.
pub struct CompiledGrammar {
    grammar: Grammar,
    template: Matcher,
    /// Tokens that end an output.
    ends: Vec<u32>,
}

impl std::fmt::Debug for CompiledGrammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compiled").field("grammar", &self.grammar).finish_non_exhaustive()
    }
}

/// A vocabulary in the form that grammars are compiled against; made once.
pub struct GrammarCompiler {
    factory: ParserFactory,
    end: u32,
}

impl std::fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Masks").field("end", &self.end).finish_non_exhaustive()
    }
}

impl GrammarCompiler {
    /// The vocabulary of a tokenizer, for a model of `vocab` logits that ends its outputs with one of `ends`. Logits without a token are
    /// never allowed.
    ///
    /// # Errors
    /// When the bytes of the tokens are not known, or there is no token to end with.
    pub fn new(tokenizer: &Tokenizer, vocab: usize, ends: &[u32]) -> Result<Self, StructuredError> {
        let mut words = token_bytes(tokenizer)?;
        let is_special = |word: &Vec<u8>| word.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER);
        // Special tokens may have no logit.
        if words.iter().skip(vocab).any(|word| !word.is_empty() && !is_special(word)) {
            let problem = format!("it has {} tokens and the model {vocab} logits", words.len());
            return Err(StructuredError::Vocabulary { problem });
        }
        words.truncate(vocab);
        let mut named = END_OF_SEQUENCE.iter().filter_map(|name| tokenizer.token_id(name));
        let named = named.find(|end| (*end as usize) < vocab);
        let own = |end: &u32| words.get(*end as usize).is_some_and(is_special);
        let end = ends.iter().copied().find(own).or(named).ok_or(StructuredError::NoEnd)?;
        words.resize(vocab, Vec::new());
        let size = u32::try_from(vocab).map_err(|_| StructuredError::NoEnd)?;
        let trie = TokTrie::from(&TokRxInfo::new(size, end), &words);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let failed = |error: anyhow::Error| StructuredError::Vocabulary { problem: error.to_string() };
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let mut factory =
            ParserFactory::new(&env, InferenceCapabilities::default(), &slices).map_err(failed)?;
        factory.quiet();
        Ok(Self { factory, end })
    }

    /// Compiles a grammar.
    ///
    /// # Errors
    /// When it cannot be read, or is none.
    pub fn compile(&self, grammar: &Grammar) -> Result<CompiledGrammar, StructuredError> {
        let failed = |problem: String| StructuredError::Compile {
            grammar: grammar.to_string(),
            problem: without_state(&problem),
        };
        let parser =
            self.factory.create_parser(grammar.load()?).map_err(|error| failed(error.to_string()))?;
        let mut template = Matcher::new(Ok(parser));
        // The first mask is part of compiling: it shows whether the grammar allows anything at all.
        template.compute_mask().map_err(|error| failed(error.to_string()))?;
        Ok(CompiledGrammar { grammar: grammar.clone(), template, ends: vec![self.end] })
    }
}

/// What is wrong with a grammar, without the pages of its parser's state that the library adds.
fn without_state(problem: &str) -> String {
    let said = problem.split_once("<state>").map_or(problem, |(said, _)| said).trim();
    // Named by the library where no token may come first.
    let nothing = ["NoExtensionBias", "NoExtension"].iter().any(|name| said.starts_with(name));
    if nothing { "it admits no output".to_owned() } else { said.to_owned() }
}

impl CompiledGrammar {
    /// What it was compiled from.
    pub fn grammar(&self) -> &Grammar {
        &self.grammar
    }

    /// Tokens that end an output that is complete.
    pub fn ends(&self) -> &[u32] {
        &self.ends
    }
}

/// How constrained requests have fared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ConstraintCounts {
    /// Requests that got a first token.
    pub started: usize,
    /// Outputs that came to the grammar's end; others were cut at their planned length or are not done.
    pub complete: usize,
    /// Tokens chosen under a mask.
    pub tokens: usize,
    /// Tokens that the masks allowed, over all of them.
    pub allowed: u64,
}

/// The states of all constrained requests.
pub struct Constraints<'a> {
    compiled: &'a CompiledGrammar,
    /// Whether the request of a number is constrained.
    constrained: Vec<bool>,
    states: HashMap<usize, Matcher>,
    mask: SimpleVob,
    pub counts: ConstraintCounts,
}

impl std::fmt::Debug for Constraints<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Constraints").field("counts", &self.counts).finish_non_exhaustive()
    }
}

impl<'a> Constraints<'a> {
    /// Constrains the requests for which `constrained` is true.
    pub fn new(compiled: &'a CompiledGrammar, constrained: Vec<bool>) -> Self {
        Self {
            compiled,
            constrained,
            states: HashMap::new(),
            mask: SimpleVob::new(),
            counts: ConstraintCounts::default(),
        }
    }

    /// Whether a request is constrained.
    pub fn holds(&self, request: usize) -> bool {
        self.constrained.get(request).copied().unwrap_or(false)
    }

    /// Finds the tokens that may come next for a request.
    ///
    /// # Errors
    /// The matcher's response.
    pub fn compute_mask(&mut self, request: usize) -> Result<(), String> {
        let counts = &mut self.counts;
        let state = self.states.entry(request).or_insert_with(|| {
            counts.started += 1;
            self.compiled.template.deep_clone()
        });
        self.mask = state.compute_mask_or_eos().map_err(|error| error.to_string())?;
        counts.tokens += 1;
        counts.allowed += self.mask.num_set() as u64;
        Ok(())
    }

    /// Forbids all logits but those of the tokens just found.
    pub fn apply(&self, logits: &mut [f32]) {
        self.mask.iter_unset_entries(|token| {
            if let Some(logit) = logits.get_mut(token) {
                *logit = f32::NEG_INFINITY;
            }
        });
    }

    /// Follows a request by the token that was chosen.
    ///
    /// # Errors
    /// When the grammar does not allow it.
    pub fn advance(&mut self, request: usize, token: u32) -> Result<(), String> {
        if self.compiled.ends.contains(&token) {
            self.states.remove(&request);
            self.counts.complete += 1;
            return Ok(());
        }
        match self.states.get_mut(&request) {
            Some(state) => state.consume_token(token).map_err(|error| error.to_string()),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
