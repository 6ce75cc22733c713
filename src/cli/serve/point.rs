//! `hbmark serve`: one point.

use std::path::PathBuf;

use clap::Args;

use super::flags::LoadArgs;
use crate::serve::{Mode, ServeConfig};

#[derive(Debug, Args)]
pub(super) struct PointArgs {
    #[command(flatten)]
    pub load: LoadArgs,
    /// Serve the same load in an open and a closed loop, side by side.
    #[arg(long, conflicts_with = "concurrency", help_heading = "Load")]
    compare_loops: bool,
    /// Resume the unfinished benchmark of any mode in this folder (same settings, machine and binary).
    #[arg(long, value_name = "DIR", conflicts_with_all = ["out", "simulate"], help_heading = None)]
    pub resume: Option<PathBuf>,
}

impl PointArgs {
    pub fn config(&self) -> anyhow::Result<ServeConfig> {
        self.load.config(if self.compare_loops { Mode::CompareLoops } else { Mode::Single })
    }
}
