//! Flags that several subcommands share.

pub use crate::run::config::parse_dtypes;

use std::path::PathBuf;

use clap::Args;

use crate::engine::DeviceChoice;
use crate::machine::device::UnknownDevice;
use crate::run::config;
use hbmark_report::output::Format;

/// Which model, on which device.
#[derive(Debug, Clone, Args)]
pub struct ModelArgs {
    /// A name (`hbmark models`), a Hugging Face folder, a hub id (org/name) or a GGUF file.
    #[arg(long, env = "HBMARK_MODEL", default_value = config::DEFAULT_MODEL)]
    pub model: String,
    /// Revision of a hub id: a branch, tag or commit.
    #[arg(long)]
    pub revision: Option<String>,
    /// Seed of synthetic weights, prompts and cell order.
    #[arg(long, env = "HBMARK_SEED", default_value_t = 42)]
    pub seed: u64,
}

/// Which device, and how many threads of it.
#[derive(Debug, Clone, Args)]
pub struct DeviceArgs {
    /// cpu, cuda or cuda:N [default: cuda in a CUDA build, cpu otherwise].
    #[arg(long, env = "HBMARK_DEVICE")]
    pub device: Option<String>,
    /// Threads of a CPU engine [default: every core this process may use].
    #[arg(long, env = "HBMARK_THREADS", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,
}

impl DeviceArgs {
    /// The device asked for, or the best of this build.
    pub fn choice(&self) -> Result<DeviceChoice, UnknownDevice> {
        self.device.as_deref().map_or_else(|| Ok(DeviceChoice::default_of_build()), str::parse)
    }
}

/// What becomes of the result.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = None)]
pub struct OutputArgs {
    /// Write the result as JSON, CSV, Markdown and HTML into this folder; until then a journal of what was measured.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// What to print on stdout.
    #[arg(long, value_enum, default_value = "table")]
    pub format: Format,
    /// A note to keep with the result.
    #[arg(long)]
    pub note: Option<String>,
    /// What you expect to see; kept with the result.
    #[arg(long)]
    pub hypothesis: Option<String>,
}
