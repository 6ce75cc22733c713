//! `hbmark serve cold`: this process launches others of itself, or is one of them.

use std::ffi::OsString;

use anyhow::Context;
use clap::Args;

use super::finish::conclude;
use super::flags::{EngineArgs, within};
use crate::cli::benchmark::command_line;
use crate::cli::progress::Progress;
use crate::cli::shared_args::OutputArgs;
use crate::cli::{Outcome, lock_folder};
use crate::serve::cold::{self, ColdConfig};

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  hbmark serve cold --launches 10 --model Llama-3.2-1B")]
pub(super) struct ColdArgs {
    /// How many processes to launch, one after the other.
    #[arg(long, default_value = "5", value_parser = within(1..=1000_usize))]
    launches: usize,
    /// Tokens of the prompt.
    #[arg(long, value_name = "TOKENS", default_value = "128", value_parser = within(1..=1_000_000_000_usize))]
    prompt_tokens: usize,
    /// The process that a cold start launches.
    #[arg(long, hide = true)]
    child: bool,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    output: OutputArgs,
}

impl ColdArgs {
    pub fn execute(&self) -> anyhow::Result<Outcome> {
        let Self { engine, output, .. } = self;
        let config = ColdConfig {
            engine: engine.engine.clone(),
            device: engine.device.choice()?,
            dtype: engine.dtype,
            kv_dtype: engine.kv_dtype,
            threads: engine.threads(),
            prompt_tokens: self.prompt_tokens,
            launches: self.launches,
            seed: engine.model.seed,
            note: output.note.clone(),
            hypothesis: output.hypothesis.clone(),
        };
        crate::engine::threads::limit(config.threads);
        if self.child {
            cold::child(&config, || engine.open(), &mut std::io::stdout())?;
            return Ok(Outcome::Complete);
        }
        // Kept until the result is saved.
        let _claim = output.out.as_deref().map(lock_folder).transpose()?;
        let program = std::env::current_exe().context("cannot find this program, to launch it again")?;
        let mut arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
        arguments.push("--child".into());
        let mut progress = Progress::new();
        let report =
            cold::measure(&config, &engine.open()?, &command_line(), (&program, &arguments), &mut progress);
        progress.finish();
        conclude(&report?, output)??;
        Ok(Outcome::Complete)
    }
}
