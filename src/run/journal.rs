//! What the journal of a step benchmark begins with.

use serde::{Deserialize, Serialize};

use crate::engine::native::cpu::kernel_choice;
use crate::run::config::RunConfig;
use crate::weights::OpenModel;
use crate::worker::journal::JournaledPlan;

/// The plan of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunPlan {
    pub config: RunConfig,
    /// [`OpenModel::identity`](crate::weights::OpenModel::identity).
    pub model: String,
    /// The instruction set that all CPU kernels are to use, where one is named.
    pub cpu_kernels: Option<String>,
    /// The cells of the plan, in order.
    pub cells: Vec<String>,
}

impl RunPlan {
    /// Of a configuration and its model, under this process's environment.
    pub fn of(config: &RunConfig, model: &OpenModel) -> Self {
        let dtype = config.dtypes_for(&config.engines[0], model)[0];
        Self {
            config: config.clone(),
            model: model.identity(dtype),
            cpu_kernels: kernel_choice::forced_name(),
            cells: crate::run::planned(config, model),
        }
    }
}

impl JournaledPlan for RunPlan {
    const SUBCOMMAND: &'static str = "run";
}

#[cfg(test)]
mod tests;
