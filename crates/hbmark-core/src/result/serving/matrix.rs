//! The rows of the workload matrix.

use serde::{Deserialize, Serialize};

/// A row of the matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub enum Row {
    A,
    B,
    C,
    D,
    E,
    #[serde(rename = "E-cold")]
    ECold,
    F,
}

/// The verdict on a hypothesis.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct RowVerdict {
    pub row: Row,
    pub title: String,
    pub hypothesis: String,
    /// Null where the run could not decide.
    pub held: Option<bool>,
    pub seen: String,
}

impl Row {
    /// In the order in which they are run.
    pub const ALL: [Self; 7] = [Self::A, Self::B, Self::C, Self::D, Self::E, Self::ECold, Self::F];

    /// What it is.
    pub fn title(self) -> &'static str {
        match self {
            Self::A => "A short chat, the baseline",
            Self::B => "B long prefill",
            Self::C => "C long decode",
            Self::D => "D mixed, beyond saturation",
            Self::E => "E shared prefix, warm",
            Self::ECold => "E shared prefix, cold baseline",
            Self::F => "F production mix",
        }
    }

    /// What is expected, before it is run.
    pub fn hypothesis(self) -> &'static str {
        match self {
            Self::A => {
                "at 30 % of capacity hardly anybody waits: median queue time is under half of median TTFT"
            }
            Self::B => {
                "prefill dominates: at the same share of capacity, median TTFT is at least three times the baseline's"
            }
            Self::C => {
                "decode dominates: output tokens outnumber computed prompt tokens, and TTFT is under a tenth of E2E"
            }
            Self::D => "at twice its capacity the queue grows without end: the run is called saturated",
            Self::E => "the cache finds what is shared: the hit rate is within 10 points of the ideal one",
            Self::ECold => "without sharing the same lengths take longer to the first token than warm",
            Self::F => {
                "a wide mix of lengths has a wide spread of waits: p90 of E2E is at least twice its median"
            }
        }
    }

    /// Share of the row's own capacity that is offered.
    pub fn utilisation(self) -> f64 {
        match self {
            Self::A | Self::B => 0.3,
            Self::C | Self::E | Self::ECold => 0.5,
            Self::D => 2.0,
            Self::F => 0.6,
        }
    }
}
