//! What was loaded beside the model.

use serde::{Deserialize, Serialize};

use crate::model::Target;
use crate::units::Bytes;

/// One adapter, and how long it took to have it. Of one that a live server has, only the name is known: its rank is 0.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct AdapterSummary {
    pub name: String,
    /// A folder, or the seed.
    pub source: String,
    pub rank: usize,
    pub targets: Vec<Target>,
    pub parameters: u64,
    /// As the engine stores it.
    pub bytes: Bytes,
    /// Reading and checking the folder, with whatever the page cache had of it; null where there is none.
    pub disk_ns: Option<f64>,
    /// From the host's memory into the engine; null where no engine runs.
    pub memory_ns: Option<f64>,
}

/// All adapters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct LoraSummary {
    pub adapters: Vec<AdapterSummary>,
    /// Different ones that may run at once.
    pub max_loras: Option<usize>,
    pub max_lora_rank: usize,
}

/// The grammar, and how long it took to have it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct StructuredSummary {
    pub grammar: String,
    pub share: f64,
    /// Making a trie of the vocabulary, once per tokenizer; null where a live server does it.
    pub vocabulary_ns: Option<f64>,
    /// Compiling the grammar against it, once per grammar.
    pub compile_ns: Option<f64>,
}
