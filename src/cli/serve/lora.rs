//! The flags of adapters.

use std::path::PathBuf;

use anyhow::Context;
use clap::Args as ClapArgs;

use crate::serve::LoraConfig;
use crate::weights::adapter::MAX_RANK;
use hbmark_core::model::Target;
use hbmark_core::result::serving::Assignment;

/// Adapters, by vLLM's names where it has one.
#[derive(Debug, ClapArgs)]
pub(super) struct LoraArgs {
    /// Serve requests with LoRA adapters, and measure the twin without them; the native engine on a CPU.
    #[arg(long, help_heading = "Adapters")]
    enable_lora: bool,
    /// NAME=PATH of a PEFT folder (adapter_config.json, adapter_model.safetensors); more than once for more.
    #[arg(long, value_name = "NAME=PATH", requires = "enable_lora", help_heading = "Adapters")]
    lora_modules: Vec<String>,
    /// Random adapters beside them [default: 4 where there are no --lora-modules].
    #[arg(long, value_name = "N", requires = "enable_lora", help_heading = "Adapters")]
    lora_adapters: Option<usize>,
    /// The rank of random adapters.
    #[arg(long, default_value_t = 16, requires = "enable_lora", help_heading = "Adapters")]
    lora_rank: usize,
    /// What random adapters add to.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_values_t = Target::ALL,
        requires = "enable_lora",
        help_heading = "Adapters"
    )]
    lora_targets: Vec<Target>,
    /// Different adapters that run at once [default: all].
    #[arg(long, requires = "enable_lora", help_heading = "Adapters")]
    pub(super) max_loras: Option<usize>,
    /// The largest rank that is taken.
    #[arg(long, default_value_t = 16, requires = "enable_lora", help_heading = "Adapters")]
    max_lora_rank: usize,
    /// round-robin, uniform, zipf:S or tenant: how requests get their adapters.
    #[arg(long, default_value = "round-robin", requires = "enable_lora", help_heading = "Adapters")]
    lora_assignment: Assignment,
    /// Share of the requests that have an adapter.
    #[arg(long, default_value_t = 1.0, requires = "enable_lora", help_heading = "Adapters")]
    lora_share: f64,
}

/// Adapters beyond which a number is a typing error.
const MAX_ADAPTERS: usize = 10_000;

impl LoraArgs {
    pub(super) fn config(&self) -> anyhow::Result<Option<LoraConfig>> {
        if !self.enable_lora {
            return Ok(None);
        }
        let module = |text: &String| -> anyhow::Result<(String, PathBuf)> {
            let parts = text.split_once('=').filter(|(name, path)| !name.is_empty() && !path.is_empty());
            let (name, path) = parts.with_context(|| format!("--lora-modules `{text}`: wanted NAME=PATH"))?;
            Ok((name.to_owned(), PathBuf::from(path)))
        };
        let modules = self.lora_modules.iter().map(module).collect::<anyhow::Result<Vec<_>>>()?;
        let synthetic = self.lora_adapters.unwrap_or(if modules.is_empty() { 4 } else { 0 });
        let count = synthetic.saturating_add(modules.len());
        anyhow::ensure!(
            (1..=MAX_ADAPTERS).contains(&count),
            "{count} adapters are not between 1 and {MAX_ADAPTERS} (--lora-adapters, --lora-modules)"
        );
        for (name, rank) in [("lora-rank", self.lora_rank), ("max-lora-rank", self.max_lora_rank)] {
            anyhow::ensure!(
                (1..=MAX_RANK).contains(&rank),
                "--{name} {rank} is not between 1 and {MAX_RANK}"
            );
        }
        anyhow::ensure!(
            self.lora_rank <= self.max_lora_rank,
            "--lora-rank {} is above --max-lora-rank {}",
            self.lora_rank,
            self.max_lora_rank
        );
        let share = self.lora_share;
        anyhow::ensure!((0.0..=1.0).contains(&share), "--lora-share {share} is not between 0 and 1");
        Ok(Some(LoraConfig {
            modules,
            synthetic,
            rank: self.lora_rank,
            targets: self.lora_targets.clone(),
            max_lora_rank: self.max_lora_rank,
            share,
            assignment: self.lora_assignment,
        }))
    }
}
