//! Low-rank adapters as data.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::Architecture;

/// A linear layer that an adapter may add to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ValueEnum)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Target {
    QProj,
    KProj,
    VProj,
    OProj,
    GateProj,
    UpProj,
    DownProj,
}

impl Target {
    /// All of them, in the order of a layer.
    pub const ALL: [Self; 7] =
        [Self::QProj, Self::KProj, Self::VProj, Self::OProj, Self::GateProj, Self::UpProj, Self::DownProj];

    /// The module's name in Hugging Face's models.
    pub fn name(self) -> &'static str {
        match self {
            Self::QProj => "q_proj",
            Self::KProj => "k_proj",
            Self::VProj => "v_proj",
            Self::OProj => "o_proj",
            Self::GateProj => "gate_proj",
            Self::UpProj => "up_proj",
            Self::DownProj => "down_proj",
        }
    }

    /// The block of a layer that holds it: `self_attn` or `mlp`.
    pub fn parent(self) -> &'static str {
        match self {
            Self::QProj | Self::KProj | Self::VProj | Self::OProj => "self_attn",
            Self::GateProj | Self::UpProj | Self::DownProj => "mlp",
        }
    }

    /// Outputs and inputs of the layer.
    pub fn shape(self, architecture: &Architecture) -> (usize, usize) {
        let a = architecture;
        let (query, kv) = (a.heads * a.head_dim, a.kv_heads * a.head_dim);
        match self {
            Self::QProj => (query, a.hidden_size),
            Self::KProj | Self::VProj => (kv, a.hidden_size),
            Self::OProj => (a.hidden_size, query),
            Self::GateProj | Self::UpProj => (a.ffn_size, a.hidden_size),
            Self::DownProj => (a.hidden_size, a.ffn_size),
        }
    }
}
