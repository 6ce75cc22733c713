//! The capabilities of an engine, for planning and for results.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How an engine runs sequences of different length in one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Ragged {
    /// One pass over the weights serves all.
    Fused,
    /// One forward per sequence.
    Looped,
    /// Refused: every sequence must bring as many tokens at the same position.
    Uniform,
}

/// What an engine can do; checked when planning and printed in the report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[expect(clippy::struct_excessive_bools, reason = "each is a question of its own")]
pub struct Capabilities {
    pub engine: String,
    #[cfg_attr(test, schemars(with = "String"))]
    pub device: EngineDevice,
    pub max_batch: usize,
    /// Why `max_batch` is what it is, when it is less than the engine's own limit.
    #[serde(default)]
    pub max_batch_reason: Option<String>,
    pub max_positions: usize,
    /// Why `max_positions` is what it is, when it is less than the model's own limit.
    pub max_positions_reason: Option<String>,
    pub ragged: Ragged,
    pub paged: bool,
    pub prefix_sharing: bool,
    pub graphs: bool,
    /// A step can give the logits of every token of it, as speculative decoding needs to verify its draft tokens.
    #[serde(default)]
    pub every_token_logits: bool,
    /// Weights and KV lie in the memory of this process: its resident set is what the engine uses.
    #[serde(default)]
    pub host_memory: bool,
    /// Instruction sets of a CPU engine's own kernels: that of most, then what products of a format use instead, by measurement.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kernels: Vec<String>,
}

impl Capabilities {
    /// Whether its steps run on a GPU.
    pub fn on_gpu(&self) -> bool {
        matches!(self.device, EngineDevice::Cuda(_))
    }
}

/// The device that runs an engine's steps. In files it is its name: `cpu`, `cuda:0`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum EngineDevice {
    Cpu,
    /// A GPU by its number; of a tensor parallel group the first.
    Cuda(u32),
    /// Any other: `scripted`, `emulated`.
    Other(String),
}

impl fmt::Display for EngineDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
            Self::Other(name) => f.write_str(name),
        }
    }
}

impl From<String> for EngineDevice {
    fn from(name: String) -> Self {
        let index = name.strip_prefix("cuda:").and_then(|index| index.parse().ok());
        match index.map(Self::Cuda) {
            // Whatever else is written so is kept as it is.
            Some(gpu) if gpu.to_string() == name => gpu,
            _ if name == Self::Cpu.to_string() => Self::Cpu,
            _ => Self::Other(name),
        }
    }
}

impl From<&str> for EngineDevice {
    fn from(name: &str) -> Self {
        name.to_owned().into()
    }
}

impl From<EngineDevice> for String {
    fn from(device: EngineDevice) -> Self {
        device.to_string()
    }
}

/// The engines of the program. Planning, opening, help and the ladder read this list; a name that is not in it is another program's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineKind {
    /// candle's own forward, unmodified.
    Stock,
    /// Our own kernels.
    Native,
    /// candle's kernels, replayed from a captured graph.
    StockGraph,
    /// candle's forward with the freed pages of the memory pool kept between synchronisations: a labelled deviation.
    StockPool,
}

/// Between the name of the native engine and its ranks.
const RANKS: &str = "-tp";

/// The largest tensor parallel group.
pub const MAX_RANKS: usize = 64;

impl EngineKind {
    /// All of them.
    pub const ALL: &[Self] = &[Self::Stock, Self::Native, Self::StockGraph, Self::StockPool];

    /// The name on the command line and in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stock => "stock",
            Self::Native => "native",
            Self::StockGraph => "stock-graph",
            Self::StockPool => "stock-pool",
        }
    }

    /// The engine of a name; a tensor parallel group of ranks is the engine of each of them.
    pub fn of(name: &str) -> Option<Self> {
        if Self::ranks(name) > 1 {
            return Some(Self::Native);
        }
        Self::ALL.iter().copied().find(|kind| kind.name() == name)
    }

    /// The name of the native engine over so many ranks of a tensor parallel group.
    pub fn of_ranks(ranks: usize) -> String {
        match ranks {
            0 | 1 => Self::Native.name().to_owned(),
            ranks => format!("{}{RANKS}{ranks}", Self::Native.name()),
        }
    }

    /// The ranks of an engine's name; 1 where it has no group.
    pub fn ranks(name: &str) -> usize {
        let ranks = name.strip_prefix(Self::Native.name()).and_then(|rest| rest.strip_prefix(RANKS));
        let ranks = ranks.filter(|digits| !digits.starts_with('0')).and_then(|digits| digits.parse().ok());
        ranks.filter(|ranks| (2..=MAX_RANKS).contains(ranks)).unwrap_or(1)
    }

    /// Whether it is candle's forward, whichever way it is run.
    pub fn is_stock(self) -> bool {
        matches!(self, Self::Stock | Self::StockGraph | Self::StockPool)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_saved_under_its_name() {
        let known = [
            ("cpu", EngineDevice::Cpu),
            ("cuda:0", EngineDevice::Cuda(0)),
            ("cuda:7", EngineDevice::Cuda(7)),
        ];
        for (name, device) in known {
            assert_eq!((EngineDevice::from(name), device.to_string().as_str()), (device, name));
        }
        for name in ["scripted", "emulated", "cuda", "cuda:", "cuda:00", "cuda:+1", ""] {
            assert_eq!(EngineDevice::from(name), EngineDevice::Other(name.to_owned()));
            assert_eq!(EngineDevice::from(name).to_string(), name);
        }
    }

    #[test]
    fn ranks_are_part_of_the_name_of_the_native_engine() {
        for ranks in [2, 8, MAX_RANKS] {
            let name = EngineKind::of_ranks(ranks);
            assert_eq!((EngineKind::of(&name), EngineKind::ranks(&name)), (Some(EngineKind::Native), ranks));
        }
        assert_eq!(
            (EngineKind::of_ranks(2), EngineKind::of_ranks(1)),
            ("native-tp2".into(), "native".into())
        );
        for other in ["native-tp1", "native-tp0", "native-tp02", "native-tp65", "native-tp", "stock-tp2"] {
            assert_eq!((EngineKind::of(other), EngineKind::ranks(other)), (None, 1), "{other}");
        }
    }
}
