//! What an engine can do, as planning checks it and results state it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How an engine runs sequences of different length in one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Capabilities {
    pub engine: String,
    pub device: String,
    pub max_batch: usize,
    pub max_positions: usize,
    /// Why `max_positions` is what it is, when it is less than the model's own limit.
    pub max_positions_reason: Option<String>,
    pub ragged: Ragged,
    pub paged: bool,
    pub prefix_sharing: bool,
    pub graphs: bool,
}
