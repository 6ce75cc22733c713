//! The flags of adapters.

use std::path::PathBuf;

use anyhow::ensure;
use clap::Args;

use super::flags::within;
use crate::serve::LoraConfig;
use crate::weights::adapter::MAX_RANK;
use hbmark_core::model::Target;
use hbmark_core::result::serving::Assignment;

/// Adapters beyond which a number is a typing error.
const MAX_ADAPTERS: usize = 10_000;

/// Adapters, by vLLM's names where it has one.
#[derive(Debug, Args)]
#[command(next_help_heading = "Adapters")]
#[group(requires = "enable_lora")]
pub(super) struct LoraArgs {
    /// Serve with LoRA adapters and also measure a baseline without them (native engine on a CPU, or a live server that has them).
    #[arg(long)]
    enable_lora: bool,
    /// NAME=PATH of PEFT folders (adapter_config.json, adapter_model.safetensors); for a live server the names alone.
    #[arg(long, value_name = "NAME=PATH", num_args = 1.., value_parser = module)]
    lora_modules: Vec<(String, PathBuf)>,
    /// Number of random adapters [default: 4 without --lora-modules].
    #[arg(long, value_name = "N")]
    lora_adapters: Option<usize>,
    /// The rank of random adapters.
    #[arg(long, default_value = "16", value_parser = within(1..=MAX_RANK))]
    lora_rank: usize,
    /// The projections that random adapters change.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Target::ALL)]
    lora_targets: Vec<Target>,
    /// Maximum distinct adapters per step [default: all].
    #[arg(long, value_parser = within(1..=MAX_ADAPTERS))]
    pub max_loras: Option<usize>,
    /// Maximum adapter rank.
    #[arg(long, default_value = "16", value_parser = within(1..=MAX_RANK))]
    max_lora_rank: usize,
    /// How requests are assigned adapters: round-robin, uniform, zipf:S or tenant.
    #[arg(long, default_value = "round-robin")]
    lora_assignment: Assignment,
    /// Fraction of requests that use an adapter.
    #[arg(long, default_value = "1", value_parser = within(0.0..=1.0))]
    lora_share: f64,
}

fn module(given: &str) -> Result<(String, PathBuf), &'static str> {
    let (name, path) = given.split_once('=').map_or((given, None), |(name, path)| (name, Some(path)));
    if name.is_empty() || path == Some("") {
        return Err("wanted NAME=PATH, or of a live server a NAME");
    }
    Ok((name.to_owned(), path.unwrap_or_default().into()))
}

impl LoraArgs {
    /// Of a live server the names of its adapters are enough.
    pub fn config(&self, is_live: bool) -> anyhow::Result<Option<LoraConfig>> {
        if !self.enable_lora {
            return Ok(None);
        }
        let modules = self.lora_modules.clone();
        if let Some((name, _)) = modules.iter().find(|(_, path)| !is_live && path.as_os_str().is_empty()) {
            anyhow::bail!(
                "--lora-modules {name}: wanted NAME=PATH, the name and the PEFT folder of an adapter"
            );
        }
        let synthetic = self.lora_adapters.unwrap_or(if modules.is_empty() && !is_live { 4 } else { 0 });
        let count = synthetic.saturating_add(modules.len());
        ensure!(
            (1..=MAX_ADAPTERS).contains(&count) || is_live && count == 0,
            "{count} adapters are not between 1 and {MAX_ADAPTERS} (--lora-adapters, --lora-modules)"
        );
        ensure!(
            self.lora_rank <= self.max_lora_rank,
            "--lora-rank {} is above --max-lora-rank {}",
            self.lora_rank,
            self.max_lora_rank
        );
        Ok(Some(LoraConfig {
            modules,
            synthetic,
            rank: self.lora_rank,
            targets: self.lora_targets.clone(),
            max_lora_rank: self.max_lora_rank,
            share: self.lora_share,
            assignment: self.lora_assignment,
        }))
    }
}
