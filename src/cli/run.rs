//! `hbmark run`.

use std::path::PathBuf;

use clap::Args as ClapArgs;

use super::axes::{DeviceArgs, ModelArgs, parse_dtypes};
use super::progress::Progress;
use super::{Outcome, prepare_folder, print, save, stdout_color};
use crate::config::{self, Depth, RunConfig};
use crate::engine::DeviceOptions;
use crate::report::{Format, KvFill, Phase, Status, render};

#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Examples:\n  hbmark run\n  hbmark run --model Llama-3.2-1B --batch 1..8*2 --context 128,1024 --out results/1b\n  hbmark run --device cuda --model Llama-3.1-8B --dtype bf16 --batch 1,8,32 --context 512,4096\n\nLists take commas and ranges: 1,8,32   1..64*2   128..1024+128"
)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own on the command line")]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Engines, comma-separated: stock (candle's own kernels), native (hbmark's own) [default: stock,native on a CPU,
    /// stock on a GPU].
    #[arg(long, env = "HBMARK_ENGINE")]
    engine: Option<String>,
    #[command(flatten)]
    device: DeviceArgs,
    /// Dtypes of weights, comma-separated: f32, bf16, f16; native also int8, q8_0, int4, q4_0 [default on a CPU: f32 for stock, bf16
    /// for native; on a GPU bf16].
    #[arg(long, env = "HBMARK_DTYPE")]
    dtype: Option<String>,
    /// Phases to time.
    #[arg(long, env = "HBMARK_PHASE", value_delimiter = ',', default_value = "prefill,decode")]
    phase: Vec<Phase>,
    /// Sequences in a step [default: 1,4 on a CPU, 1,8,32 on a GPU].
    #[arg(long, env = "HBMARK_BATCH")]
    batch: Option<String>,
    /// Decode: positions in the KV cache. Prefill: prompt tokens [default: 128 on a CPU, 512,4096 on a GPU].
    #[arg(long, env = "HBMARK_CONTEXT")]
    context: Option<String>,
    /// A shortened protocol; the report says so.
    #[arg(long, conflicts_with = "smoke")]
    quick: bool,
    /// Run every cell exactly once; times mean nothing.
    #[arg(long)]
    smoke: bool,
    /// Print the plan and stop.
    #[arg(long)]
    dry_run: bool,
    /// CUDA: keep the memory pool's pages between steps (a labelled deviation from candle's default).
    #[arg(long)]
    keep_memory_pool: bool,
    /// Break each step down per operation (time, bytes, share of the ceiling), in an extra untimed pass.
    #[arg(long)]
    show_ops: bool,
    /// How the context of decode cells is filled, where the engine can do both.
    #[arg(long, value_enum, default_value = "synthetic")]
    kv: KvFill,
    /// Write result.json, result.csv, result.md and report.html into this folder.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// What to print on stdout.
    #[arg(long, value_enum, default_value = "table")]
    format: Format,
    /// Kept with the result.
    #[arg(long)]
    note: Option<String>,
    /// What you expect to see; kept with the result.
    #[arg(long)]
    hypothesis: Option<String>,
}

impl Args {
    /// The configuration that these arguments make.
    pub(super) fn config(&self) -> anyhow::Result<RunConfig> {
        let depth = match (self.quick, self.smoke) {
            (_, true) => Depth::Smoke,
            (true, _) => Depth::Quick,
            _ => Depth::Full,
        };
        let device = self.device.choice()?;
        let (batches, contexts) = config::default_grid(device);
        let mut phases = self.phase.clone();
        phases.dedup();
        Ok(RunConfig {
            model: self.model.model.clone(),
            revision: self.model.revision.clone(),
            engines: config::parse_engines(
                self.engine.as_deref().unwrap_or(config::default_engines(device)),
            )?,
            device,
            dtypes: match &self.dtype {
                Some(given) => parse_dtypes("dtype", given)?,
                None => Vec::new(),
            },
            phases,
            batches: config::parse_axis("batch", self.batch.as_deref().unwrap_or(batches))?,
            contexts: config::parse_axis("context", self.context.as_deref().unwrap_or(contexts))?,
            seed: self.model.seed,
            threads: self.device.threads.map(|t| t as usize),
            depth,
            device_options: DeviceOptions {
                keep_memory_pool: self.keep_memory_pool,
                threads: self.device.threads.map(|t| t as usize),
                block_size: None,
            },
            show_ops: self.show_ops,
            kv: self.kv,
            note: self.note.clone(),
            hypothesis: self.hypothesis.clone(),
            out: self.out.clone(),
        })
    }
}

pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    let config = args.config()?;
    super::threads::limit(config.threads);
    let model = crate::model::open(&config.model, config.revision.as_deref(), config.seed)?;
    if args.dry_run {
        print(&crate::dry_run(&config, &model)?)?;
        return Ok(Outcome::Complete);
    }
    if let Some(folder) = &config.out {
        prepare_folder(folder)?;
    }
    let mut progress = Progress::new();
    let report = crate::benchmark(&config, &model, &command_line(), &mut progress)?;
    progress.finish();
    print(&render(&report, args.format, stdout_color())?)?;
    if let Some(folder) = &config.out {
        let path = save(&report, folder)?;
        anstream::eprintln!("saved {}", path.display());
    }
    // Cells that cannot run are results beside others that can; alone they are bad input.
    if !report.cells.is_empty() && report.cells.iter().all(|cell| cell.status == Status::Skipped) {
        let reason = report.cells[0].reason.clone().unwrap_or_default();
        anyhow::bail!("no cell of this grid can run: {}: {reason}", report.cells[0].id);
    }
    let bad = |status| matches!(status, Status::Invalid | Status::Failed | Status::Oom | Status::Disturbed);
    let failed = report.cells.iter().any(|cell| bad(cell.status));
    Ok(if failed { Outcome::SomeCellsFailed } else { Outcome::Complete })
}

/// The command line as typed.
pub fn command_line() -> String {
    let quote = |arg: String| if arg.contains(' ') { format!("'{arg}'") } else { arg };
    let program = std::iter::once("hbmark".to_owned());
    program.chain(std::env::args().skip(1)).map(quote).collect::<Vec<_>>().join(" ")
}
