//! Which modules of a checkpoint are stored how.
//!
//! Enters: the rules of a `quantization_config`. Leaves: the [`Format`] of a module, or that it is a plain float.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::format::{Format, Layout, Scales};
use super::patterns::{Patterns, runs_of_parts};
use super::{Dtype, OutOfBounds};

/// How the modules that a list of patterns names are stored; the first rule that names a module decides.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct FormatRule {
    /// Names, parts of names, globs or `re:` expressions; an empty list names every linear layer.
    pub modules: Vec<String>,
    /// `None`: a plain float.
    pub format: Option<Format>,
}

/// How the weights of a checkpoint are stored, when they are not plain floats.
///
/// ```
/// use hbmark_core::model::{Format, FormatRule, Quantization};
///
/// let quantization = Quantization {
///     method: "modelopt".into(),
///     rules: vec![
///         FormatRule { modules: vec!["lm_head".into(), "*self_attn*".into()], format: None },
///         FormatRule { modules: Vec::new(), format: Some(Format::Nvfp4 { input_scale: true }) },
///     ],
///     ..Quantization::default()
/// };
/// let storage = quantization.storage().unwrap();
/// assert_eq!(storage.format("model.layers.0.self_attn.q_proj"), None);
/// assert_eq!(storage.format("model.layers.0.mlp.up_proj"), Some(Format::Nvfp4 { input_scale: true }));
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Quantization {
    /// `quant_method` of the config: `fp8`, `gptq`, `awq`, `compressed-tensors`, `mxfp4`...
    pub method: String,
    /// Bits, group and kind of what most of the weights are stored in.
    pub bits: u32,
    pub group_size: Option<usize>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub float: bool,
    /// Module by module. Empty in results of versions that read one storage for the whole model.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<FormatRule>,
    /// GPTQ reorders the inputs (`desc_act`).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reordered: bool,
    /// What the config says activations are rounded to before they are multiplied, where the weights' format does not say it: int8 beside
    /// int8 weights, bf16 beside fp4 ones; of a mixture the fastest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activations: Option<Dtype>,
    /// What the config asks the KV cache to be stored in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_cache: Option<Dtype>,
}

impl Quantization {
    /// The name of what most of the weights are stored in; `None` where the byte ledger has no sizes for it.
    pub fn dtype(&self) -> Option<Dtype> {
        if let Some(format) = self.main_format() {
            return Some(format.dtype());
        }
        match (self.method.as_str(), self.bits, self.float) {
            ("fp8" | "fbgemm_fp8", 8, _) | (_, 8, true) => Some(Dtype::Fp8),
            (_, 8, false) => Some(Dtype::Int8),
            (_, 4, false) => Some(Dtype::Int4),
            _ => None,
        }
    }

    /// The format of what no rule names, otherwise the first.
    pub fn main_format(&self) -> Option<Format> {
        let formats = || self.rules.iter().filter(|rule| rule.format.is_some());
        formats().find(|rule| rule.modules.is_empty()).or_else(|| formats().next())?.format
    }

    /// Who wrote it.
    pub fn layout(&self) -> Layout {
        match self.method.as_str() {
            "fbgemm_fp8" => Layout::Fbgemm,
            "modelopt" => Layout::ModelOpt,
            "quark" => Layout::Quark,
            "compressed-tensors" => Layout::CompressedTensors,
            "awq" => Layout::Awq,
            "gptq" => Layout::Gptq { reordered: self.reordered },
            "bitsandbytes" => Layout::Bitsandbytes,
            _ => Layout::Hub,
        }
    }

    /// The rules, ready to be asked; `None` where there are none.
    ///
    /// # Errors
    /// When a pattern is not an expression, or a size in a format is out of bounds.
    pub fn storage(&self) -> Result<ModuleStorage, OutOfBounds> {
        let out = |what, found: String, wanted| OutOfBounds { what, found, wanted };
        let (mut rules, mut named) = (Vec::with_capacity(self.rules.len()), HashMap::new());
        if self.rules.len() > MAX_RULES {
            return Err(out(
                "the number of quantisation rules",
                self.rules.len().to_string(),
                "at most 1024",
            ));
        }
        for rule in &self.rules {
            let mut modules = match rule.modules.as_slice() {
                [] => None,
                patterns => Some(Patterns::new(patterns).map_err(|why| {
                    out("a list of modules", why, "names, globs, or regular expressions without look-around")
                })?),
            };
            if let Some(found) = rule.format.and_then(unreasonable) {
                return Err(out(
                    "the format of a rule",
                    found,
                    "4 or 8 bits, and scales of at most 2^20 columns",
                ));
            }
            for part in modules.iter_mut().flat_map(|patterns| patterns.parts.drain()) {
                named.entry(part).or_insert(rules.len());
            }
            rules.push((modules, rule.format));
        }
        Ok(ModuleStorage { named, rules, layout: self.layout() })
    }
}

/// One for each module of the longest published lists is far more than a config needs.
const MAX_RULES: usize = 1_024;
/// Widest group of weights that shares a scale.
const MAX_GROUP: usize = 1 << 20;

fn unreasonable(format: Format) -> Option<String> {
    let fits = |size: usize| (1..=MAX_GROUP).contains(&size);
    let scales = match format {
        Format::Fp8 { scales, .. } | Format::Int { scales, .. } => scales,
        _ => Scales::Tensor,
    };
    let fine = match scales {
        Scales::Tensor | Scales::Channel => true,
        Scales::Group { size } => fits(size),
        Scales::Block { rows, columns } => fits(rows) && fits(columns),
    };
    (!fine || !matches!(format.bits(), 4 | 8)).then(|| format!("{format:?}"))
}

impl std::fmt::Display for Quantization {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, {} bits", self.method, self.bits)?;
        if self.float {
            f.write_str(" (float)")?;
        }
        self.group_size.map_or(Ok(()), |group| write!(f, ", groups of {group}"))
    }
}

/// The rules of a [`Quantization`], ready to be asked.
#[derive(Debug, Clone)]
pub struct ModuleStorage {
    /// The first rule that has a name, or consecutive parts of one: looked up once for all rules.
    named: HashMap<String, usize>,
    /// Globs and expressions of each rule, or none where it is for every module.
    rules: Vec<(Option<Patterns>, Option<Format>)>,
    layout: Layout,
}

impl ModuleStorage {
    /// The format of a module by its name without `.weight`; `None` where it is a plain float.
    pub fn format(&self, module: &str) -> Option<Format> {
        let named = runs_of_parts(module).filter_map(|run| self.named.get(run).copied()).min();
        let before = &self.rules[..named.unwrap_or(self.rules.len())];
        let matched = before.iter().position(|rule| rule.0.as_ref().is_none_or(|own| own.matches(module)));
        self.rules[matched.or(named)?].1
    }

    /// Who named the tensors.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Most tensors of a linear layer.
    pub(super) fn tensors_of_a_matrix(&self) -> usize {
        self.rules
            .iter()
            .filter_map(|rule| rule.1)
            .map(|format| format.parts(self.layout, 1, 1).len())
            .max()
            .unwrap_or(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_rule_that_names_a_module_decides_by_name_or_by_expression() {
        let rule = |modules: &[&str], format| FormatRule {
            modules: modules.iter().map(|module| (*module).to_owned()).collect(),
            format,
        };
        let rules = vec![
            rule(&["re:.*up_proj"], Some(Format::Mxfp8)),
            rule(&["mlp", "layers.1"], None),
            rule(&["layers.1.mlp", "*down_proj"], Some(Format::Mxfp8)),
            rule(&[], Some(Format::Mxfp4)),
            rule(&["self_attn"], None),
        ];
        let storage = Quantization { rules, ..Quantization::default() }.storage().unwrap();
        for (module, wanted) in [
            ("layers.1.mlp.up_proj", Some(Format::Mxfp8)),
            ("layers.1.mlp.gate_proj", None),
            ("layers.0.mlp.down_proj", None),
            ("layers.0.experts.down_proj", Some(Format::Mxfp8)),
            ("layers.1.self_attn.q_proj", None),
            ("layers.0.self_attn.q_proj", Some(Format::Mxfp4)),
        ] {
            assert_eq!(storage.format(module), wanted, "{module}");
        }
    }
}
