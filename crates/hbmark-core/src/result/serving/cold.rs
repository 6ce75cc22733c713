//! Launches of a process, up to their first tokens.

use serde::{Deserialize, Serialize};

/// One process: the time of each phase, in the order of [`ColdStart::phases`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Launch {
    pub phases_ns: Vec<f64>,
    /// From the launch to the first token.
    pub to_first_token_ns: f64,
}

/// A phase over all launches, in nanoseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ColdPhase {
    pub name: String,
    /// What it holds.
    pub holds: String,
    pub median_ns: f64,
    pub min_ns: f64,
    pub max_ns: f64,
    /// Of the launch before which the system's page cache was as the user left it.
    pub first_launch_ns: f64,
}

/// Launches of a process, by phases.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ColdStart {
    pub prompt_tokens: usize,
    pub launches: Vec<Launch>,
    pub phases: Vec<ColdPhase>,
    pub to_first_token: ColdPhase,
}
