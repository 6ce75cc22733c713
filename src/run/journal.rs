//! What the journal of a step benchmark begins with.

use serde::{Deserialize, Serialize};

use crate::run::config::RunConfig;
use crate::worker::journal::JournaledPlan;

/// The plan of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunPlan {
    pub config: RunConfig,
    /// Of the model's dimensions and tensors.
    pub model_hash: String,
    /// The cells of the plan, in order.
    pub cells: Vec<String>,
}

impl JournaledPlan for RunPlan {
    const SUBCOMMAND: &'static str = "run";
}

#[cfg(test)]
mod tests;
