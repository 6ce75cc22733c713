//! `hbmark serve matrix`: the six standard rows.

use clap::Args;

use super::flags::{ServingArgs, within};
use crate::serve::{Mode, ServeConfig};
use hbmark_core::result::serving::Slo;

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  hbmark serve matrix --out results/matrix")]
pub(super) struct MatrixArgs {
    /// Multiply the prompt and output lengths.
    #[arg(long, default_value = "1", value_parser = within(1e-6..=1000.0), help_heading = "Workload")]
    scale: f64,
    #[command(flatten)]
    pub serving: ServingArgs,
}

impl MatrixArgs {
    pub fn config(&self) -> anyhow::Result<ServeConfig> {
        self.serving.config(Mode::Matrix { scale: self.scale }, None, &Slo::default())
    }
}
