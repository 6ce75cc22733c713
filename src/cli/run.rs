//! `hbmark run`.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use clap::Args as ClapArgs;
use clap::parser::ValueSource;

use super::benchmark::{FREE, Resumable, WorkerArgs, arguments_of, command_line, give_up, reopen};
use super::shared_args::{DeviceArgs, ModelArgs, OutputArgs, parse_dtypes};
use super::{Outcome, conclude, prepare_folder, print_result, save, say, say_replaced};
use crate::engine::native::cpu::kernel_choice;
use crate::engine::{DeviceOptions, ScriptedRouting};
use crate::measure::protocol::{ProtocolPreset, Stopping};
use crate::run::config::{self, PhaseName, RunConfig};
use crate::run::device_worker::DeviceJob;
use crate::run::dry_run::DryRun;
use crate::run::journal::RunPlan;
use crate::run::{Finished, LocalDevice};
use crate::weights::OpenModel;
use crate::worker::journal::{self, Header, Journal};
use hbmark_core::ledger::ExpertRouting;
use hbmark_core::model::Dtype;
use hbmark_core::result::{EngineKind, KvFill, MAX_RANKS, Report, Status, as_map};
use hbmark_report::analysis::words::counted;

#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Examples:\n  hbmark run\n  hbmark run --model Llama-3.2-1B --batch '1..8*2' --context 128,1024 --out results/1b\n  hbmark run --device cuda --model Llama-3.1-8B --dtype bf16 --batch 1,8,32 --context 512,4096\n  hbmark run --model Llama-3.2-1B --engine native --phase verify --draft-tokens 1,3,7\n\nLists take commas and ranges: 1,8,32   4k,128k   1..64*2   128..1024+128\nllama-bench's -m -p -n -t -r -o are understood: -r counts blocks of steps, -o is --format."
)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own on the command line")]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Engines, comma-separated: stock (candle's own kernels), native (hbmark's own); on a GPU also stock-graph (candle's kernels replayed from
    /// a CUDA graph: what launches cost, with the uploads and allocations of each; added wherever `stock` runs) and stock-pool (its memory pool kept) [default: stock,native].
    #[arg(long, env = "HBMARK_ENGINE")]
    engine: Option<String>,
    #[command(flatten)]
    device: DeviceArgs,
    /// Tensor-parallel sizes, comma-separated: the native engine runs once for each, as native-tp2 for two. A rank is a group of threads on a CPU.
    /// On CUDA each rank is a GPU, from --device on.
    #[arg(long, visible_alias = "tp", env = "HBMARK_TENSOR_PARALLEL_SIZE")]
    tensor_parallel_size: Option<String>,
    /// Dtypes of weights, comma-separated: f32, bf16, f16; native also int8, fp8, mxfp8, q8_0, q6_k, q5_k, q4_k, q4_0, mxfp4, nvfp4, int4 [default on a CPU:
    /// f32 for stock, bf16 for native; on a GPU bf16]. The k-quants (q4_k to q6_k) need rows of a multiple of 256.
    #[arg(long, env = "HBMARK_DTYPE")]
    dtype: Option<String>,
    /// Storage of the KV cache [default: that of the weights in f32, f16 or bf16, otherwise bf16]. native also has fp8 (e4m3 without scales) and int8
    /// (an f32 scale for each token and head).
    #[arg(long, env = "HBMARK_KV_DTYPE", visible_alias = "kv-cache-dtype", value_parser = super::shared_args::engine_kv_dtype())]
    kv_dtype: Option<Dtype>,
    /// Phases of inference. `verify` is the step of speculative decoding that checks draft tokens; decode is measured beside it.
    #[arg(long, env = "HBMARK_PHASE", value_delimiter = ',', default_value = "prefill,decode")]
    phase: Vec<PhaseName>,
    /// Draft tokens that a verify step checks for each sequence, behind its last token [default: 1,3,7, with --phase verify].
    #[arg(
        long,
        env = "HBMARK_DRAFT_TOKENS",
        value_name = "TOKENS",
        visible_alias = "num-speculative-tokens"
    )]
    draft_tokens: Option<String>,
    /// Sequences in a step [default: 1,4 on a CPU, 1,8,32 on a GPU; 1 with -p or -n].
    #[arg(long, env = "HBMARK_BATCH")]
    batch: Option<String>,
    /// Decode: positions in the KV cache. Prefill: prompt tokens [default: 128 on a CPU, 512,4096 on a GPU].
    #[arg(long, env = "HBMARK_CONTEXT")]
    context: Option<String>,
    /// Time prefills of prompts this long, and no other phase unless --n-gen asks for it; 0 for none.
    #[arg(short = 'p', long, value_name = "TOKENS", conflicts_with_all = ["context", "phase"])]
    n_prompt: Option<String>,
    /// Time the decode step at these depths, and no other phase unless --n-prompt asks for it; 0 for none. llama-bench generates so many tokens
    /// from an empty cache; here the cache is that deep in every step.
    #[arg(short = 'n', long, value_name = "TOKENS", conflicts_with_all = ["context", "phase"])]
    n_gen: Option<String>,
    /// Measure the ceilings again, where they were kept from a run of the last minutes.
    #[arg(long)]
    fresh_ceilings: bool,
    /// A shortened protocol, marked in the report.
    #[arg(long, conflicts_with = "smoke")]
    quick: bool,
    /// Run every cell exactly once; times mean nothing.
    #[arg(long)]
    smoke: bool,
    /// Print the plan and stop.
    #[arg(long)]
    dry_run: bool,
    /// CUDA: keep the memory pool's pages between steps (not candle's default; marked in the result).
    #[arg(long)]
    keep_memory_pool: bool,
    /// CUDA: run `stock` without adding `stock-graph`.
    #[arg(long)]
    no_replay: bool,
    /// Break each step down per operation (time, bytes, share of the ceiling), in a separate profiling pass.
    #[arg(long)]
    show_ops: bool,
    /// How the context of decode cells is filled, where the engine can do both.
    #[arg(long, value_enum, default_value = "synthetic")]
    kv: KvFill,
    /// Synthetic expert routing for mixtures of experts: uniform, balanced (the most a step can read), or zipf:S (the expert of rank r is
    /// 1/r^S as popular). The router is still computed. Random weights do not route as a trained model does.
    #[arg(long)]
    expert_routing: Option<ExpertRouting>,
    #[command(flatten)]
    output: OutputArgs,
    /// Resume the unfinished run in this folder (same settings, machine and binary).
    #[arg(long, value_name = "DIR", conflicts_with_all = ["out", "dry_run"])]
    resume: Option<PathBuf>,
    #[command(flatten)]
    worker: WorkerArgs,
    #[command(flatten)]
    stopping: StoppingArgs,
}

/// When to stop sampling a cell.
#[derive(Debug, ClapArgs)]
#[command(next_help_heading = "Stopping")]
struct StoppingArgs {
    /// Blocks of a cell, no more and no fewer; a block is 20 steps or more, with --quick 5 [default: 10 to 40, as the interval asks].
    #[arg(short = 'r', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    repetitions: Option<u32>,
    /// Seconds of sampling a cell, at the least.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    min_time: Option<f64>,
    /// Half-width of the 95 % interval at which sampling ends [default: 1 %, with --quick 5 %].
    #[arg(long, value_name = "PERCENT", value_parser = width)]
    max_noise: Option<f64>,
    /// Count cells that are disturbed or do not converge; they are marked `noisy`, and no error.
    #[arg(long)]
    allow_noise: bool,
}

impl StoppingArgs {
    fn stopping(&self) -> Stopping {
        Stopping {
            repetitions: self.repetitions.map(|blocks| blocks as usize),
            min_seconds: self.min_time,
            max_noise: self.max_noise,
            allow_noise: self.allow_noise,
        }
    }
}

fn seconds(given: &str) -> Result<f64, String> {
    let seconds = given.trim_end_matches('s').trim_end().parse().ok();
    seconds
        .filter(|s| (0.0..=3600.0).contains(s))
        .ok_or_else(|| format!("`{given}` is not a time from 0 to 3600 s"))
}

/// The width of an interval, which no number of blocks brings to nothing.
fn width(given: &str) -> Result<f64, String> {
    let width = super::compare::parse_percent(given)?;
    if width > 0.0 { Ok(width) } else { Err("no interval is as narrow as 0 %; write 1%, say".to_owned()) }
}

/// A list of lengths as llama-bench has them, where 0 is none.
fn lengths(flag: &str, given: Option<&String>) -> anyhow::Result<Option<Vec<usize>>> {
    match given.map(String::as_str) {
        None | Some("0") => Ok(None),
        Some(given) => Ok(Some(config::parse_axis(flag, given)?)),
    }
}

impl Args {
    /// The configuration that these arguments make.
    pub(super) fn config(&self) -> anyhow::Result<RunConfig> {
        let preset = match (self.quick, self.smoke) {
            (_, true) => ProtocolPreset::Smoke,
            (true, _) => ProtocolPreset::Quick,
            _ => ProtocolPreset::Full,
        };
        let device = self.device.choice()?;
        let (batches, contexts) = config::default_grid(device);
        // As llama-bench, where its flags are given.
        let batches = if self.n_prompt.is_some() || self.n_gen.is_some() { "1" } else { batches };
        let (mut phases, mut draft_tokens) = (self.phase.clone(), self.draft_tokens.as_deref());
        let mut contexts = config::parse_axis("context", self.context.as_deref().unwrap_or(contexts))?;
        let mut prompts = None;
        if self.n_prompt.is_some() || self.n_gen.is_some() {
            prompts = lengths("n-prompt", self.n_prompt.as_ref())?;
            let depths = lengths("n-gen", self.n_gen.as_ref())?;
            phases.clear();
            phases.extend(prompts.as_ref().map(|_| PhaseName::Prefill));
            phases.extend(depths.as_ref().map(|_| PhaseName::Decode));
            // A prompt has no decode step to be verified beside.
            draft_tokens = draft_tokens.filter(|_| depths.is_some());
            anyhow::ensure!(
                !phases.is_empty(),
                "-p 0 -n 0 leaves nothing to time; give one of them a length"
            );
            contexts = depths.or_else(|| prompts.clone()).unwrap_or_default();
        }
        let mut engines = config::parse_engines(self.engine.as_deref().unwrap_or(config::default_engines()))?;
        if let Some(given) = &self.tensor_parallel_size {
            let sizes = config::parse_axis("tensor-parallel-size", given)?;
            anyhow::ensure!(
                sizes.iter().all(|size| *size <= MAX_RANKS),
                "--tensor-parallel-size `{given}`: a group has at most {MAX_RANKS} ranks"
            );
            anyhow::ensure!(
                engines.iter().any(|engine| engine == EngineKind::Native.name()),
                "--tensor-parallel-size is for the native engine; name it with --engine native"
            );
            engines = config::with_ranks(&engines, &sizes);
        }
        let phases = config::phases(&phases, draft_tokens)?;
        config::check_phases(&engines, &phases)?;
        Ok(RunConfig {
            model: self.model.model.clone(),
            revision: self.model.revision.clone(),
            engines,
            device,
            dtypes: match &self.dtype {
                Some(given) => parse_dtypes("dtype", given)?,
                None => Vec::new(),
            },
            phases,
            batches: config::parse_axis("batch", self.batch.as_deref().unwrap_or(batches))?,
            contexts,
            prompts,
            seed: self.model.seed,
            threads: self.device.threads.map(|t| t as usize),
            preset,
            stopping: self.stopping.stopping(),
            fresh_ceilings: self.fresh_ceilings,
            device_options: DeviceOptions {
                keep_memory_pool: self.keep_memory_pool,
                threads: self.device.threads.map(|t| t as usize),
                block_size: None,
                kv_dtype: self.kv_dtype,
                scripted_routing: self
                    .expert_routing
                    .map(|routing| ScriptedRouting { routing, seed: self.model.seed }),
            },
            show_ops: self.show_ops,
            kv: self.kv,
            note: self.output.note.clone(),
            hypothesis: self.output.hypothesis.clone(),
            out: self.output.out.clone(),
        })
    }

    /// The same, with the series that a run adds by itself.
    fn with_replay(&self) -> anyhow::Result<RunConfig> {
        let config = self.config()?;
        if self.no_replay {
            return Ok(config);
        }
        let engines = config::with_replay(config.engines, config.device);
        Ok(RunConfig { engines, ..config })
    }
}

/// A run that is about to start, or to be resumed.
struct Ready {
    config: RunConfig,
    model: Rc<OpenModel>,
    command: String,
    journal: Resumable<DeviceJob>,
}

/// What to do in place of a flag of llama-bench that `run` has none for. Of several letters, clap would read it as a short flag and its value.
pub(super) fn in_place_of(flag: &str) -> Option<&'static str> {
    Some(match flag {
        "-ngl" | "-sm" | "-mg" | "-ts" | "-ot" | "-ncmoe" | "-nkvo" => {
            "the whole model and its KV cache lie on one device: --device cpu, cuda or cuda:N"
        }
        "-ctk" | "-ctv" => "K and V have one dtype: --kv-dtype fp8, say",
        "-fa" => "native fuses its attention always; --engine stock has candle's",
        "-b" | "-ub" => "a prompt is one step of --batch sequences, whatever its length",
        "-pg" => "prompts (-p) and decode steps (-n) are timed apart",
        "-d" => "-n is the depth of the KV cache at which the decode step is timed",
        "-mmp" | "-dio" | "-embd" | "-nopo" | "-prio" | "-C" | "-hf" | "-hff" => {
            "it has no counterpart here; leave it out, and give the model as --model (a folder, a GGUF file or org/name)"
        }
        _ => return None,
    })
}

pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    if args.dry_run {
        let config = args.with_replay()?;
        let model = open(&config)?;
        print_result(&DryRun::of(&config, &model)?, args.output.format)?;
        return Ok(Outcome::Complete);
    }
    let ready = match &args.resume {
        Some(folder) => resume(args, folder)?,
        None => start(args)?,
    };
    // Before any other thread is started.
    crate::engine::threads::limit(ready.config.threads);
    finish(args, ready)
}

fn open(config: &RunConfig) -> anyhow::Result<OpenModel> {
    let model = crate::weights::open(&config.model, config.revision.as_deref(), config.seed)?;
    super::say_doubt(&model);
    super::check_routing(config.device_options.scripted_routing.map(|script| script.routing), &model)?;
    Ok(model)
}

/// A run from its beginning.
fn start(args: &Args) -> anyhow::Result<Ready> {
    let config = args.with_replay()?;
    if let (ProtocolPreset::Smoke, Some(folder)) = (config.preset, &config.out) {
        keep_measured(folder)?;
    }
    let (model, command) = (Rc::new(open(&config)?), command_line());
    // Before anything is measured or loaded; a device that this build cannot use is the first thing to say.
    let is_usable = cfg!(feature = "cuda") || config.device == crate::engine::DeviceChoice::Cpu;
    if let Some(plan) = is_usable.then(|| DryRun::of(&config, &model).ok()).flatten()
        && let Some((id, cause)) = plan.obstacle()
    {
        return Err(nothing_runs(id, &cause.to_string()));
    }
    let journal = match &config.out {
        Some(folder) => {
            let plan = RunPlan::of(&config, &model);
            say_replaced(folder);
            prepare_folder(folder, plan.cells.len())?;
            Some((Journal::create(folder, &Header::new(&command, plan)?)?, Vec::new()))
        }
        None => None,
    };
    Ok(Ready { config, model, command, journal })
}

/// Refuses to write over a result whose times mean something with one whose times mean nothing.
fn keep_measured(folder: &Path) -> anyhow::Result<()> {
    let there = hbmark_core::result::saved::read(&folder.join("result.json"));
    anyhow::ensure!(
        !there.is_ok_and(|report| report.protocol.is_some_and(|protocol| !protocol.is_smoke())),
        "{} holds a measured run, and --smoke would replace it by times that mean nothing; choose another --out",
        folder.display()
    );
    Ok(())
}

/// A run that ended early.
fn resume(args: &Args, folder: &Path) -> anyhow::Result<Ready> {
    let (journal, Header { command, plan, .. }, steps) = reopen::<RunPlan, DeviceJob>(folder)?;
    same_settings(args, folder, &plan.config)?;
    let config = RunConfig { out: Some(folder.to_owned()), ..plan.config.clone() };
    let model = Rc::new(open(&config)?);
    let is = RunPlan::of(&config, &model);
    journal::same(folder, "the model", &plan.model, &is.model)?;
    journal::same(folder, "the plan", &plan.cells.join(" "), &is.cells.join(" "))?;
    let kernels = |plan: &RunPlan| plan.cpu_kernels.clone().unwrap_or_else(|| "unset".into());
    journal::same(folder, kernel_choice::FORCED, &kernels(&plan), &kernels(&is))?;
    say(&format!("resuming `{command}` after {}", counted(steps.len(), "recorded measurement")));
    Ok(Ready { config, model, command, journal: Some((journal, steps)) })
}

/// Compares the settings given on the command line or by environment with those of a run.
fn same_settings(args: &Args, folder: &Path, was: &RunConfig) -> anyhow::Result<()> {
    let Some(given) = arguments_of("run") else { return Ok(()) };
    let chosen = |id: &str| given.value_source(id).is_some_and(|source| source != ValueSource::DefaultValue);
    let mut is = args.with_replay()?;
    if chosen("tensor_parallel_size") && !chosen("engine") {
        // The sizes of the engines that the run has.
        let one = |engine: &String| EngineKind::ranks(engine) == 1 && *engine != EngineKind::Native.name();
        let others = was.engines.iter().filter(|engine| one(engine)).cloned();
        let sized =
            is.engines.iter().filter(|engine| EngineKind::of(engine) == Some(EngineKind::Native)).cloned();
        let mut engines: Vec<String> = others.chain(sized).collect();
        let place = |engine: &String| was.engines.iter().position(|own| own == engine).unwrap_or(usize::MAX);
        engines.sort_by_key(place);
        is.engines = engines;
    }
    if chosen("phase") != chosen("draft_tokens") {
        // What is said of one stands beside what was said of the other.
        let (names, drafts) = config::names_of(&was.phases);
        is.phases = if chosen("phase") {
            config::phases(&args.phase, drafts.as_deref())?
        } else {
            config::phases(&names, args.draft_tokens.as_deref())?
        };
    }
    let (was, is) = (as_map(was), as_map(&is));
    for id in given.ids().map(clap::Id::as_str) {
        let chosen = chosen(id);
        let key = match id {
            "engine" | "no_replay" | "tensor_parallel_size" => "engines",
            "dtype" => "dtypes",
            "phase" | "draft_tokens" => "phases",
            "batch" => "batches",
            "context" | "n_gen" => "contexts",
            "quick" | "smoke" => "preset",
            "n_prompt" => "prompts",
            "repetitions" | "min_time" | "max_noise" | "allow_noise" => "stopping",
            "keep_memory_pool" | "expert_routing" | "kv_dtype" => "device_options",
            other => other,
        };
        if let (true, false, Some(was), Some(is)) = (chosen, FREE.contains(&id), was.get(key), is.get(key)) {
            let what = format!("--{}", id.replace('_', "-"));
            journal::same(folder, &what, &was.to_string(), &is.to_string())?;
        }
    }
    Ok(())
}

/// Runs, prints and saves.
fn finish(args: &Args, ready: Ready) -> anyhow::Result<Outcome> {
    let Ready { config, model, command, journal } = ready;
    let isolation = (!args.worker.no_isolation).then(|| (args.worker, config.clone()));
    let handler = LocalDevice::new(&config, model.clone());
    let (finished, journal) = super::benchmark::execute(isolation, handler, journal, |worker, progress| {
        crate::run::benchmark(worker, &config, &model, &command, progress)
    })?;
    let Finished { report, stopped } = match finished {
        Ok(finished) => finished,
        Err(error) => return give_up(journal, error.signal(), error.into()),
    };
    let saved = config.out.as_ref().map(|folder| save(&report, "result", folder));
    let printed = conclude(print_result(&report, args.output.format), saved)?;
    if let Some(signal) = stopped {
        if let Some(folder) = &config.out {
            say(&format!("stopped; go on with `hbmark run --resume {}`", folder.display()));
        }
        printed?;
        return Ok(Outcome::Stopped(signal));
    }
    if let Some(journal) = journal {
        journal.finish()?;
    }
    printed?;
    judge(&report)
}

fn nothing_runs(id: &str, reason: &str) -> anyhow::Error {
    anyhow::anyhow!("no cell of this grid can run: {id}: {reason}")
}

/// How a whole run ended.
fn judge(report: &Report) -> anyhow::Result<Outcome> {
    // Cells that cannot run are results beside others that can; alone they are bad input.
    if !report.cells.is_empty() && report.cells.iter().all(|cell| cell.status == Status::Skipped) {
        let reason = hbmark_core::result::cause::joined(report.cells[0].reason.as_slice());
        return Err(nothing_runs(&report.cells[0].id, &reason));
    }
    let of = |status| report.cells.iter().filter(|cell| cell.status == status).count();
    let bad = [
        (Status::Invalid, "invalid", "the table says why"),
        (Status::Failed, "failed", "the table says why"),
        (Status::Oom, "out of memory", "choose a smaller batch or context"),
        (
            Status::Disturbed,
            "disturbed by other load",
            "`hbmark doctor` shows it, and --allow-noise counts such cells",
        ),
    ];
    let mut failed = false;
    for (status, what, remedy) in bad {
        let count = of(status);
        if count > 0 {
            failed = true;
            say(&format!("{count} of {}: {what}; {remedy}", counted(report.cells.len(), "cell")));
        }
    }
    Ok(if failed { Outcome::SomeCellsFailed } else { Outcome::Complete })
}
