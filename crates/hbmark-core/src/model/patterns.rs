//! Names of modules as quantisation configs write them: exact, a part, a glob or a regular expression.
//!
//! Enters: patterns of an untrusted file. Leaves: [`Patterns`] that say whether a module is among them.

use std::collections::HashSet;

use regex::{RegexSet, RegexSetBuilder};

/// Published configs list some thousand modules, layer by layer.
pub(super) const MAX_PATTERNS: usize = 16_384;
const MAX_PATTERN_CHARS: usize = 512;
/// Globs and regular expressions, which are tried one and all.
const MAX_EXPRESSIONS: usize = 1_024;
const EXPRESSION_BYTES: usize = 16 << 20;

/// Modules that a config names.
///
/// A pattern that begins with `re:` is a regular expression from the start of the name (`compressed-tensors`), one with `*` or `?` a glob of
/// the whole name (`modelopt`, quark), and any other a name or consecutive parts of one: `self_attn` and `mlp.gate` are in
/// `model.layers.3.self_attn.q_proj` and `model.layers.3.mlp.gate`, and `mlp.gate` is not in `model.layers.3.mlp.gate_proj`.
#[derive(Debug, Clone)]
pub(super) struct Patterns {
    /// Names, and consecutive parts of names.
    pub parts: HashSet<String>,
    expressions: RegexSet,
}

impl Patterns {
    /// # Errors
    /// The pattern that is too long or no expression, and why.
    pub fn new(patterns: &[String]) -> Result<Self, String> {
        if patterns.len() > MAX_PATTERNS {
            return Err(format!("{} patterns, at most {MAX_PATTERNS}", patterns.len()));
        }
        let mut parts = HashSet::new();
        let mut expressions = Vec::new();
        for pattern in patterns {
            if pattern.len() > MAX_PATTERN_CHARS {
                return Err(format!("a pattern of {} bytes, at most {MAX_PATTERN_CHARS}", pattern.len()));
            }
            if let Some(expression) = pattern.strip_prefix("re:") {
                // A model of several parts may have its language model behind a prefix.
                expressions.push(format!("^(?:{expression})"));
                let inner = expression.replace(r"\.", ".");
                let inner = language_model(inner.trim_start_matches('^'));
                if inner.len() < expression.len() && inner != expression.trim_start_matches('^') {
                    expressions.push(format!("^(?:{inner})"));
                }
            } else if pattern.contains(['*', '?']) {
                let pattern = &language_model(pattern);
                // Below the module that is named, too: the glob of a block stands for its layers.
                let glob = regex::escape(pattern).replace(r"\*", ".*").replace(r"\?", ".");
                expressions.push(format!(r"^{glob}(?:\..*)?$"));
            } else {
                parts.insert(language_model(pattern).trim_end_matches('.').to_owned());
            }
        }
        if expressions.len() > MAX_EXPRESSIONS {
            return Err(format!("{} expressions, at most {MAX_EXPRESSIONS}", expressions.len()));
        }
        let expressions = RegexSetBuilder::new(&expressions)
            .size_limit(EXPRESSION_BYTES)
            .build()
            .map_err(|error| error.to_string().chars().take(200).collect::<String>())?;
        Ok(Self { parts, expressions })
    }

    /// Whether one of the globs and regular expressions is of a module.
    pub fn matches(&self, module: &str) -> bool {
        self.expressions.is_match(module)
    }
}

/// Every run of consecutive parts of a name.
pub(super) fn runs_of_parts(module: &str) -> impl Iterator<Item = &str> {
    let ends = move || module.match_indices('.').map(|(at, _)| at).chain([module.len()]);
    let starts = std::iter::once(0).chain(module.match_indices('.').map(|(at, _)| at + 1));
    starts.flat_map(move |start| ends().filter(move |end| *end > start).map(move |end| &module[start..end]))
}

/// The name of a module within the language model of a model of several parts.
pub fn language_model(name: &str) -> String {
    let inner =
        [("model.language_model.", "model."), ("language_model.model.", "model."), ("language_model.", "")];
    let found = inner.iter().find_map(|(prefix, own)| Some((own, name.strip_prefix(prefix)?)));
    found.map_or_else(|| name.to_owned(), |(own, rest)| format!("{own}{rest}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contains(pattern: &str, module: &str) -> bool {
        let patterns = Patterns::new(&[pattern.to_owned()]).unwrap();
        patterns.matches(module) || runs_of_parts(module).any(|run| patterns.parts.contains(run))
    }

    #[test]
    fn patterns_of_every_writer_mean_what_their_writers_mean() {
        for (pattern, module, wanted) in [
            ("lm_head", "lm_head", true),
            ("self_attn", "model.layers.0.self_attn.q_proj", true),
            ("mlp.gate", "model.layers.0.mlp.gate", true),
            ("mlp.gate", "model.layers.0.mlp.gate_proj", false),
            ("model.layers.1", "model.layers.1.mlp.down_proj", true),
            ("model.layers.1", "model.layers.11.mlp.down_proj", false),
            ("model.layers.*.self_attn*", "model.layers.7.self_attn.o_proj", true),
            ("model.layers.*.self_attn", "model.layers.7.self_attn.o_proj", true),
            ("*.mlp.gate", "model.layers.7.mlp.gate_proj", false),
            ("re:.*self_attn.*", "model.layers.7.self_attn.o_proj", true),
            ("re:.*mlp.gate$", "model.layers.7.mlp.gate_proj", false),
            ("model.language_model.layers.0.linear_attn*", "model.layers.0.linear_attn.in_proj_a", true),
            ("language_model.lm_head", "lm_head", true),
            (r"re:language_model\.model\.layers\..*gate$", "model.layers.0.mlp.gate", true),
            ("re:self_attn", "model.layers.7.self_attn.o_proj", false),
        ] {
            assert_eq!(contains(pattern, module), wanted, "{pattern} in {module}");
        }
    }

    #[test]
    fn hostile_patterns_are_refused_and_not_run() {
        let refused = |patterns: Vec<String>| Patterns::new(&patterns).unwrap_err();
        assert!(refused(vec!["re:(".to_owned()]).contains("unclosed"));
        assert!(refused(vec!["re:(?=x)".to_owned()]).contains("look-around"));
        assert!(refused(vec!["x".repeat(600)]).contains("600"));
        assert!(refused(vec!["re:((a{1000}){1000})".to_owned()]).contains("size limit"));
        assert!(refused(vec!["*a".to_owned(); 2000]).contains("2000 expressions"));
        assert!(refused(vec!["a".to_owned(); 20_000]).contains("20000 patterns"));
    }
}
