//! The shapes that ship with hbmark: configs of public models, embedded, so that a prediction needs no network.
//!
//! Enters: a name. Leaves: a [`Preset`]. Each file in `models/` keeps the keys of a hub config that matter; `_model` is the hub
//! id it stands for, `_source` the copy its values were read from, `_note` where they differ from that copy. A shape has no
//! weights; those come from a file or a seed.

use std::path::Path;

use serde_json::Value;

use super::config::parse_config;
use super::{Architecture, ModelError};

/// Least similarity of a name that is worth suggesting, on strsim's scale of 0 to 1.
const SIMILAR: f64 = 0.75;
const MAX_SUGGESTIONS: usize = 3;

/// A shipped model shape.
#[derive(Debug, Clone, PartialEq)]
pub struct Preset {
    pub name: &'static str,
    /// The hub repository whose config has this shape.
    pub hub_id: String,
    pub architecture: Architecture,
}

macro_rules! shipped {
    ($($name:literal),* $(,)?) => {
        /// Name and config, small models first.
        const SHIPPED: &[(&str, &str)] = &[$(($name, include_str!(concat!("../../models/", $name, ".json")))),*];
    };
}

shipped![
    "SmolLM2-135M",
    "Qwen3-0.6B",
    "Llama-3.2-1B",
    "Llama-3.2-3B",
    "Llama-2-7B",
    "Mistral-7B-v0.3",
    "Qwen2.5-7B",
    "Llama-3.1-8B",
    "Qwen3-8B",
    "Llama-2-13B",
    "Phi-4",
    "DeepSeek-V2-Lite",
    "gpt-oss-20b",
    "Gemma-4-26B-A4B",
    "Gemma-3-27B",
    "Qwen3.5-27B",
    "Qwen3-30B-A3B",
    "Gemma-4-31B",
    "Nemotron-3-Nano-30B-A3B",
    "Qwen3-32B",
    "Qwen3.5-35B-A3B",
    "Mixtral-8x7B",
    "Llama-3.1-70B",
    "Qwen3-Next-80B-A3B",
    "Llama-4-Scout-17B-16E",
    "gpt-oss-120b",
    "Nemotron-3-Super-120B-A12B",
    "MiniMax-M2.5",
    "Qwen3-235B-A22B",
    "MiMo-V2-Flash",
    "GLM-4.7",
    "Qwen3.5-397B-A17B",
    "Llama-4-Maverick-17B-128E",
    "Llama-3.1-405B",
    "DeepSeek-V3",
    "DeepSeek-V3.2",
    "GLM-5",
    "Kimi-K2.5",
];

/// Names of the shipped shapes, small models first.
pub fn names() -> impl Iterator<Item = &'static str> {
    SHIPPED.iter().map(|(name, _)| *name)
}

/// The shipped shape of a name (`llama-3.1-8b`) or hub id (`meta-llama/Llama-3.1-8B`), in any case. A version at the end may be
/// left out where only one is shipped: `Mistral-7B` is `Mistral-7B-v0.3`.
///
/// # Panics
/// When a shipped config is broken, which the tests rule out.
pub fn find(name: &str) -> Option<Preset> {
    let all = || SHIPPED.iter().map(|(shipped, text)| (*shipped, *text, hub_id(text)));
    let stem = format!("{}-v", name.to_lowercase());
    let mut versions = all().filter(|(shipped, ..)| shipped.to_lowercase().starts_with(&stem));
    all()
        .find(|(shipped, _, hub_id)| is_called(shipped, hub_id, name))
        .or_else(|| versions.next().filter(|_| versions.next().is_none()))
        .map(|(shipped, text, hub_id)| Preset {
            name: shipped,
            hub_id,
            architecture: parse_config(text, Path::new(shipped)).expect("a shipped config parses (tested)"),
        })
}

/// The error for an unknown name, with the nearest shipped names.
pub fn unknown(name: &str) -> ModelError {
    let wanted = tail(name).to_lowercase();
    let score = |shipped: &str| {
        let shipped = shipped.to_lowercase();
        // A longer name of the same model ("-instruct") is nearer than any respelling.
        let contained = wanted.len() >= 4 && (wanted.contains(&shipped) || shipped.contains(&wanted));
        if contained { 1.0 } else { strsim::normalized_damerau_levenshtein(&wanted, &shipped) }
    };
    let mut scored: Vec<_> = names().map(|n| (score(n), n)).filter(|(s, _)| *s >= SIMILAR).collect();
    scored.sort_by(|a, b| b.0.total_cmp(&a.0));
    let suggestions = scored.into_iter().take(MAX_SUGGESTIONS).map(|(_, n)| n.to_owned()).collect();
    ModelError::UnknownModel { name: name.to_owned(), suggestions }
}

fn hub_id(text: &str) -> String {
    let document: Value = serde_json::from_str(text).expect("a shipped config is JSON (tested)");
    document["_model"].as_str().unwrap_or_default().to_owned()
}

/// Whether `asked` names this shape: its name, its hub id, or its name under the same owner.
fn is_called(name: &str, hub_id: &str, asked: &str) -> bool {
    let owner = hub_id.split('/').next().unwrap_or_default();
    [name, hub_id, tail(hub_id)].iter().any(|known| known.eq_ignore_ascii_case(asked))
        || asked
            .split_once('/')
            .is_some_and(|(o, n)| o.eq_ignore_ascii_case(owner) && n.eq_ignore_ascii_case(name))
}

fn tail(hub_id: &str) -> &str {
    hub_id.rsplit('/').next().unwrap_or(hub_id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_may_be_left_out_where_only_one_is_shipped() {
        assert_eq!(find("mistral-7b").map(|p| p.name), Some("Mistral-7B-v0.3"));
        assert!(find("Llama-3.1").is_none());
    }
    use crate::model::{Dtype, Family, RopeScaling};

    #[test]
    fn every_shipped_config_parses_and_names_its_source() {
        for (name, text) in SHIPPED {
            let document: Value = serde_json::from_str(text).unwrap();
            assert!(document["_source"].is_string(), "{name}");
            let preset = find(name).unwrap();
            assert_eq!(preset.name, *name);
            assert_eq!(preset.hub_id.split('/').count(), 2, "{name}: {}", preset.hub_id);
            assert_eq!(
                preset.architecture.quantization.is_some(),
                text.contains("quantization_config"),
                "{name}"
            );
        }
    }

    #[test]
    fn a_preset_is_found_in_any_case_and_by_hub_id() {
        for asked in
            ["Llama-3.1-8B", "llama-3.1-8b", "meta-llama/Llama-3.1-8B", "META-LLAMA/Meta-Llama-3.1-8B"]
        {
            assert_eq!(find(asked).unwrap().name, "Llama-3.1-8B", "{asked}");
        }
        assert_eq!(find("mistralai/Mistral-7B-Instruct-v0.3").unwrap().name, "Mistral-7B-v0.3");
        assert_eq!(find("somebody/Llama-3.1-8B"), None);
        assert_eq!(find(""), None);
    }

    #[test]
    fn an_unknown_name_is_answered_with_near_ones() {
        let message = |name: &str| {
            assert!(find(name).is_none(), "{name}");
            unknown(name).to_string()
        };
        assert!(
            message("llama-3.1-8").starts_with("unknown model `llama-3.1-8`; did you mean Llama-3.1-8B, ")
        );
        assert!(message("Qwen/Qwen3-8B-Instruct").contains("Qwen3-8B"));
        assert!(message("gpt-5").ends_with("or a GGUF file"));
    }

    #[test]
    fn shipped_shapes_hold_the_published_dimensions() {
        let a = find("Llama-3.2-3B").unwrap().architecture;
        assert_eq!((a.hidden_size, a.layers, a.heads, a.kv_heads, a.head_dim), (3072, 28, 24, 8, 128));
        assert!(a.tied_head);
        assert!(
            matches!(a.rope.scaling, RopeScaling::Llama3 { factor, .. } if factor.to_bits() == 32_f64.to_bits())
        );

        let a = find("DeepSeek-V3").unwrap().architecture;
        assert_eq!((a.family, a.native_dtype), (Family::DeepseekV3, Some(Dtype::Bf16)));
        assert_eq!(a.kv_elements_per_token_and_layer(), 512 + 64);
        assert_eq!(a.experts.unwrap().dense_layers, [0, 1, 2]);
    }
}
