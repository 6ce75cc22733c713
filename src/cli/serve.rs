//! `hbmark serve`.

mod execute;
mod live;
mod lora;

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{ArgAction, Args as ClapArgs};
use lora::LoraArgs;

use super::Outcome;
use super::axes::{DeviceArgs, ModelArgs, parse_dtypes};
use crate::run::config;
use crate::serve::structured::Grammar;
use crate::serve::{Mode, SchedulerOptions, ServeConfig, VirtualSource};
use hbmark_core::ledger::devices;
use hbmark_core::result::saved;
use hbmark_core::result::serving::{Arrivals, Offered, Policy, Slo};
use hbmark_report::output::Format;
use hbmark_traffic::point::TrafficSource;
use hbmark_traffic::sampler::Sampling;
use hbmark_traffic::trace;
use hbmark_traffic::workload::{SharedPrefix, Structured, Workload};

pub(super) use execute::work;

#[derive(Debug, ClapArgs)]
#[command(after_help = "Examples:
  hbmark serve --engine native --workload chat --rate 2 --requests 100
  hbmark serve --engine native --input-len 128 --output-len 32 --sweep 'rate=0.5..8*2' --slo ttft_p95=2s
  hbmark serve --trace azure.csv --requests 500 --rate 1
  hbmark serve --virtual --gpu h100-sxm --model Llama-3.1-8B --workload chat --rate 10 --duration 1h
  hbmark serve --virtual --gpu h100-sxm --model Llama-3.1-8B --find-max-rate --slo ttft_p95=1s,tpot_p95=40ms --requests 5000
  hbmark serve --rate inf --enable-lora --lora-adapters 8 --lora-rank 16
  hbmark serve --model ./llama --structured json-schema:order.json --structured-share 0.5
  hbmark serve --cold 10 --model Llama-3.2-1B

Traces (told apart by their first line):
  Azure     TIMESTAMP,ContextTokens,GeneratedTokens / 2023-11-16 18:15:46.68,374,44
  BurstGPT  Timestamp,Model,Request tokens,Response tokens,... / 5,ChatGPT,472,18,...
  Mooncake  {\"timestamp\": 0, \"input_length\": 6758, \"output_length\": 500, \"hash_ids\": [0, 1]}
  hbmark    {\"arrival_s\": 0.5, \"input_tokens\": 300, \"output_tokens\": 20, \"prefix_ids\": [7], \"prefix_block\": 256, \"priority\": 0}

Workload files (TOML):
  name = \"support\"
  [input]   distribution = \"lognormal\"  mean = 500.0  cv = 1.0  min = 16  max = 4000    (a line each)
  [output]  distribution = \"fixed\"  tokens = 100        (or histogram: buckets = [[1, 100, 0.7]], empirical: tokens = [1, 2])
  [prefix]  tokens = 512  share = 0.5  groups = 2       [session]  turns = 4  think_s = 10.0
  [[branches]]  tokens = 128  ways = 4                   (a tree below the prefix, level by level)
  [tiling]  contexts = 64  tokens = 4096                 (long contexts in turn, so that the cache evicts)
  [[tenants]]  name = \"hot\"  share = 3.0  priority = 1  burst = \"4x10s/60s\"
  [structured]  grammar = \"json-schema:order.json\"  share = 0.5")]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own on the command line")]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// The engine: native or stock.
    #[arg(long, env = "HBMARK_ENGINE", default_value = "native")]
    engine: String,
    #[command(flatten)]
    device: DeviceArgs,
    /// Dtype of the weights [default: the engine's for the device].
    #[arg(long, env = "HBMARK_DTYPE")]
    dtype: Option<String>,

    /// chat, code, long-context-qa, summarization, rag, agents, batch, or a TOML file [default: chat].
    #[arg(long, conflicts_with_all = ["input_len", "output_len", "trace"], help_heading = "Workload")]
    workload: Option<String>,
    /// Prompts of one length, in tokens.
    #[arg(long, requires = "output_len", help_heading = "Workload")]
    input_len: Option<usize>,
    /// Outputs of one length, in tokens.
    #[arg(long, requires = "input_len", help_heading = "Workload")]
    output_len: Option<usize>,
    /// Recorded traffic.
    #[arg(long, value_name = "FILE", conflicts_with = "input_len", help_heading = "Workload")]
    trace: Option<PathBuf>,
    /// Times of a trace are multiplied by this; 0.5 is twice the recorded rate. --rate sets the mean rate instead.
    #[arg(long, default_value_t = 1.0, requires = "trace", help_heading = "Workload")]
    time_scale: f64,
    /// Requests whose times count [default: 100, or what --duration gives].
    #[arg(long, visible_alias = "num-prompts", conflicts_with = "duration", help_heading = "Workload")]
    requests: Option<usize>,
    /// Measure the requests of so long (60s, 10m, 1h), at --rate.
    #[arg(long, requires = "rate", help_heading = "Workload")]
    duration: Option<String>,
    /// Requests in front of the measured ones, to warm the system up [default: a tenth, and twice what is in the system].
    #[arg(long, help_heading = "Workload")]
    warmup_requests: Option<usize>,
    /// A beginning of so many tokens that requests share; also measures the baseline without reuse, which shares nothing.
    #[arg(long, help_heading = "Workload")]
    prefix_tokens: Option<usize>,
    /// Share of the requests that have the shared beginning.
    #[arg(long, default_value_t = 1.0, requires = "prefix_tokens", help_heading = "Workload")]
    prefix_share: f64,
    /// Different shared beginnings.
    #[arg(long, default_value_t = 1, requires = "prefix_tokens", help_heading = "Workload")]
    prefix_groups: usize,
    /// End outputs at the model's end-of-sequence token instead of at their planned length.
    #[arg(long, help_heading = "Workload")]
    stop_at_eos: bool,

    /// Requests per second, or `inf`: all at once [default: 1; for a trace, as recorded].
    #[arg(long, visible_alias = "request-rate", conflicts_with = "concurrency", help_heading = "Load")]
    rate: Option<String>,
    /// A closed loop of so many requests at a time.
    #[arg(long, visible_alias = "max-concurrency", help_heading = "Load")]
    concurrency: Option<usize>,
    /// poisson, gamma:CV, constant, or closed (with --concurrency) [default: poisson; a trace has its own].
    #[arg(long, conflicts_with = "trace", help_heading = "Load")]
    arrivals: Option<String>,
    /// FACTORxON/PERIOD, as in 4x10s/60s: four times the rate for 10 s of every 60 s, at the same mean.
    #[arg(long, conflicts_with_all = ["concurrency", "trace"], help_heading = "Load")]
    burst: Option<String>,
    /// Objectives: ttft_p95=1s,tpot_p95=40ms,e2e_p99=15s.
    #[arg(long, help_heading = "Load")]
    slo: Option<Slo>,
    /// End the run after so long; what is not done counts as never done.
    #[arg(long, help_heading = "Load")]
    time_limit: Option<String>,

    /// Sequences that run at once [default: 256, on a CPU 32].
    #[arg(long, help_heading = "Scheduler")]
    max_num_seqs: Option<usize>,
    /// Tokens of one step [default: 2048, on a CPU 512].
    #[arg(long, help_heading = "Scheduler")]
    max_num_batched_tokens: Option<usize>,
    /// Share of a GPU's memory for weights and KV [default: 0.9]; on a CPU, share of the free memory for KV [default: 0.25].
    #[arg(long, help_heading = "Scheduler")]
    gpu_memory_utilization: Option<f64>,
    /// KV blocks, instead of what fits.
    #[arg(long, help_heading = "Scheduler")]
    num_gpu_blocks_override: Option<usize>,
    /// Positions of a KV block [default: the engine's 64; on a virtual GPU 16].
    #[arg(long, help_heading = "Scheduler")]
    block_size: Option<usize>,
    /// Positions of prompt and output together [default: the model's].
    #[arg(long, help_heading = "Scheduler")]
    max_model_len: Option<usize>,
    /// Keep prefixes of prompts for others [default: true].
    #[arg(long, num_args = 0..=1, default_missing_value = "true", action = ArgAction::Set, help_heading = "Scheduler")]
    enable_prefix_caching: Option<bool>,
    /// Cut prompts to the budget of a step [default: true].
    #[arg(long, num_args = 0..=1, default_missing_value = "true", action = ArgAction::Set, help_heading = "Scheduler")]
    enable_chunked_prefill: Option<bool>,
    /// Who goes first.
    #[arg(long, value_enum, default_value = "fcfs", help_heading = "Scheduler")]
    scheduling: Policy,
    /// Requests that may wait; more are rejected.
    #[arg(long, help_heading = "Scheduler")]
    max_waiting: Option<usize>,

    /// 0 is greedy.
    #[arg(long, default_value_t = 0.0, help_heading = "Sampling")]
    temperature: f32,
    /// Only the most likely so many tokens; 0 is all.
    #[arg(long, default_value_t = 0, help_heading = "Sampling")]
    top_k: usize,
    /// Only the most likely tokens that together reach this probability.
    #[arg(long, default_value_t = 1.0, help_heading = "Sampling")]
    top_p: f32,

    /// Hold outputs to a grammar: json-schema:FILE, regex:RE or grammar:FILE (Lark); they end where it does. Also measures the twin
    /// without it.
    #[arg(long, value_name = "GRAMMAR", conflicts_with = "simulate", help_heading = "Sampling")]
    structured: Option<String>,
    /// Share of the requests that --structured holds.
    #[arg(long, default_value_t = 1.0, requires = "structured", help_heading = "Sampling")]
    structured_share: f64,
    /// A tokenizer.json or its folder, for a model that has none or instead of its own: text is then encoded and decoded in the path.
    #[arg(long, value_name = "PATH", conflicts_with = "simulate", help_heading = "Sampling")]
    tokenizer: Option<PathBuf>,

    #[command(flatten)]
    lora: LoraArgs,

    /// One variable over values: rate=1..32*2, max-num-seqs=8,64; with --slo a sweep of the load ends where it is not met.
    #[arg(long, value_name = "VARIABLE=VALUES", conflicts_with_all = ["find_max_rate", "matrix", "compare_loops"], help_heading = "Modes")]
    sweep: Vec<String>,
    /// Search the highest rate under --slo, confirm it with fresh seeds, and hold it for longer.
    #[arg(long, conflicts_with_all = ["matrix", "compare_loops", "concurrency"], help_heading = "Modes")]
    find_max_rate: bool,
    /// Fresh seeds that must agree on the rate found.
    #[arg(long, default_value_t = 3, requires = "find_max_rate", help_heading = "Modes")]
    seeds: usize,
    /// The six standard rows, each with its hypothesis.
    #[arg(
        long,
        conflicts_with_all = ["compare_loops", "rate", "concurrency", "burst", "slo", "workload", "input_len", "prefix_tokens"],
        help_heading = "Modes"
    )]
    matrix: bool,
    /// Multiplies the lengths of the matrix.
    #[arg(long, default_value_t = 1.0, requires = "matrix", help_heading = "Modes")]
    matrix_scale: f64,
    /// The same load in an open and a closed loop, side by side.
    #[arg(long, help_heading = "Modes")]
    compare_loops: bool,
    /// Run the scheduler on a virtual clock: step times from --gpu's data sheet or --from a saved run.
    #[arg(long = "virtual", help_heading = "Modes")]
    simulate: bool,
    /// A GPU of the datasheet table (`hbmark devices`), for --virtual.
    #[arg(long, requires = "simulate", conflicts_with = "from", help_heading = "Modes")]
    gpu: Option<String>,
    /// A result.json of `hbmark run` of the same model, for --virtual.
    #[arg(long, requires = "simulate", value_name = "FILE", help_heading = "Modes")]
    from: Option<PathBuf>,
    /// Launch the program so many times and time each start by phases, up to its first tokens, instead of serving traffic.
    #[arg(
        long,
        value_name = "LAUNCHES",
        num_args = 0..=1,
        default_missing_value = "5",
        value_parser = clap::value_parser!(u32).range(1..=1000),
        conflicts_with_all = [
            "workload", "input_len", "trace", "requests", "duration", "warmup_requests", "prefix_tokens", "stop_at_eos", "rate",
            "concurrency", "burst", "slo", "time_limit", "sweep", "find_max_rate", "matrix", "compare_loops", "simulate", "no_predict",
            "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "num_gpu_blocks_override", "block_size",
            "max_model_len", "enable_prefix_caching", "enable_chunked_prefill", "max_waiting", "structured", "tokenizer",
            "enable_lora",
        ],
        help_heading = "Modes"
    )]
    cold: Option<u32>,
    /// Tokens of the prompt of a cold start.
    #[arg(long, default_value_t = 128, requires = "cold", help_heading = "Modes", value_name = "TOKENS")]
    cold_prompt_tokens: u32,
    /// The process that a cold start launches.
    #[arg(long, requires = "cold", hide = true)]
    cold_child: bool,
    /// Do not time the engine's steps first, and predict nothing.
    #[arg(long, help_heading = "Modes")]
    no_predict: bool,

    /// Measure in this process and not in a worker of its own: for profilers and debuggers. A crash then ends everything.
    #[arg(long, env = "HBMARK_NO_ISOLATION", value_parser = clap::builder::FalseyValueParser::new())]
    no_isolation: bool,
    /// How long a worker may be silent, on top of ten times what its longest step should take, before it is given up as hung.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = clap::value_parser!(u32).range(1..))]
    hang_after: u32,
    /// Write serve.json, serve.csv, serve.md and report.html into this folder, and until they are there a journal of what was measured.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Go on with the benchmark that ended early in this folder, with its settings, on the same machine and with the same program.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["out", "simulate", "cold"])]
    resume: Option<PathBuf>,
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

/// Requests that are measured when nothing is said.
const DEFAULT_REQUESTS: usize = 100;
/// Beyond this a number of requests is a typing error.
const MAX_REQUESTS: usize = 10_000_000;

impl Args {
    /// Whether a worker measures. A virtual clock can crash nothing, and what only this process can read no other one reads again.
    fn isolated(&self) -> bool {
        let files = [&self.trace, &self.tokenizer].into_iter().flatten();
        let own = |path: &Path| path.starts_with("/dev") || path.starts_with("/proc/self");
        let only_here = files.map(PathBuf::as_path).chain(self.workload.as_deref().map(Path::new)).any(own);
        !(self.simulate || self.no_isolation || only_here)
    }

    fn config(&self) -> anyhow::Result<ServeConfig> {
        one_engine(&self.engine)?;
        let offered = self.offered()?;
        let requests = self.request_count(offered)?;
        let positive = |name: &str, value: Option<usize>| match value {
            Some(0) => anyhow::bail!("--{name} 0: at least 1 is needed"),
            other => Ok(other),
        };
        if let Some(share) = self.gpu_memory_utilization {
            anyhow::ensure!(
                share > 0.0 && share <= 1.0,
                "--gpu-memory-utilization {share} is not above 0 and at most 1"
            );
        }
        anyhow::ensure!(
            self.temperature.is_finite() && self.temperature >= 0.0,
            "--temperature {} is not at least 0",
            self.temperature
        );
        anyhow::ensure!(
            self.top_p > 0.0 && self.top_p <= 1.0,
            "--top-p {} is not above 0 and at most 1",
            self.top_p
        );
        if let Some(warmup) = self.warmup_requests {
            anyhow::ensure!(warmup <= MAX_REQUESTS, "--warmup-requests {warmup} is above {MAX_REQUESTS}");
        }
        let span = |name: &str, text: &Option<String>| {
            text.as_deref()
                .map(hbmark_core::result::serving::parse_span)
                .transpose()
                .map_err(|problem| anyhow::anyhow!("--{name}: {problem}"))
        };
        Ok(ServeConfig {
            engine: self.engine.clone(),
            device: self.device.choice()?,
            dtype: self.dtype.as_deref().map(|d| parse_dtypes("dtype", d)).transpose()?.map(|d| d[0]),
            threads: self.device.threads.map(|t| t as usize),
            virtual_source: self.virtual_source()?,
            source: self.source(requests)?,
            offered,
            arrivals: match self.arrivals.as_deref() {
                None | Some("closed") => Arrivals::Poisson,
                Some(text) => text.parse()?,
            },
            burst: self.burst.as_deref().map(str::parse).transpose()?,
            requests,
            warmup: self.warmup_requests,
            cold_twin: self.prefix_tokens.is_some(),
            knobs: SchedulerOptions {
                max_num_seqs: positive("max-num-seqs", self.max_num_seqs)?,
                max_num_batched_tokens: positive("max-num-batched-tokens", self.max_num_batched_tokens)?,
                gpu_memory_utilization: self.gpu_memory_utilization,
                num_gpu_blocks_override: positive("num-gpu-blocks-override", self.num_gpu_blocks_override)?,
                block_size: positive("block-size", self.block_size)?,
                max_model_len: positive("max-model-len", self.max_model_len)?,
                enable_prefix_caching: self.enable_prefix_caching,
                enable_chunked_prefill: self.enable_chunked_prefill,
                scheduling: self.scheduling,
                max_waiting: self.max_waiting,
                max_loras: positive("max-loras", self.lora.max_loras)?,
            },
            sampling: Sampling {
                temperature: self.temperature,
                top_k: self.top_k,
                top_p: self.top_p,
                seed: self.model.seed,
            },
            stop_at_eos: self.stop_at_eos,
            slo: self.slo.clone().unwrap_or_default(),
            time_limit_s: span("time-limit", &self.time_limit)?.map(hbmark_core::units::Nanos::seconds),
            mode: self.mode()?,
            predict: !self.no_predict && !self.simulate,
            tokenizer: self.tokenizer.clone(),
            lora: self.lora.config()?,
            structured: self.structure()?,
            seed: self.model.seed,
            note: self.note.clone(),
            hypothesis: self.hypothesis.clone(),
            out: self.out.clone(),
        })
    }

    fn structure(&self) -> anyhow::Result<Option<Structured>> {
        let Some(grammar) = &self.structured else { return Ok(None) };
        let share = self.structured_share;
        anyhow::ensure!((0.0..=1.0).contains(&share), "--structured-share {share} is not between 0 and 1");
        grammar.parse::<Grammar>().context("--structured")?;
        Ok(Some(Structured { grammar: grammar.clone(), share }))
    }

    fn offered(&self) -> anyhow::Result<Offered> {
        if let Some(concurrency) = self.concurrency {
            anyhow::ensure!(
                (1..=1_000_000).contains(&concurrency),
                "--concurrency {concurrency} is not between 1 and a million"
            );
            return Ok(Offered::Concurrency(concurrency));
        }
        anyhow::ensure!(self.arrivals.as_deref() != Some("closed"), "--arrivals closed needs --concurrency");
        match self.rate.as_deref() {
            Some("inf") => Ok(Offered::AtOnce),
            Some(text) => {
                let rate: f64 =
                    text.parse().with_context(|| format!("--rate `{text}` is not a number or `inf`"))?;
                anyhow::ensure!(
                    rate > 1e-6 && rate < 1e9,
                    "--rate {rate:e} is not a rate above 1e-6 and below 1e9 requests per second (or `inf`)"
                );
                Ok(Offered::Rate(rate))
            }
            None if self.trace.is_some() => Ok(Offered::AsRecorded),
            // A search chooses its own start.
            None if self.find_max_rate => Ok(Offered::AtOnce),
            None => Ok(Offered::Rate(1.0)),
        }
    }

    fn request_count(&self, offered: Offered) -> anyhow::Result<usize> {
        let requests = match (&self.duration, offered) {
            (Some(text), Offered::Rate(rate)) => {
                let span = hbmark_core::result::serving::parse_span(text)
                    .map_err(|problem| anyhow::anyhow!("--duration: {problem}"))?;
                let count = (span.seconds() * rate).ceil();
                anyhow::ensure!(
                    count <= MAX_REQUESTS as f64,
                    "--duration {text} at that rate is {count} requests, above {MAX_REQUESTS}"
                );
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "bounded above, and positive"
                )]
                let count = count as usize;
                count
            }
            (Some(_), _) => anyhow::bail!("--duration needs a --rate that is a number"),
            (None, _) => self.requests.unwrap_or(DEFAULT_REQUESTS),
        };
        anyhow::ensure!(
            (1..=MAX_REQUESTS).contains(&requests),
            "--requests {requests} is not between 1 and {MAX_REQUESTS}"
        );
        Ok(requests)
    }

    fn source(&self, requests: usize) -> anyhow::Result<TrafficSource> {
        anyhow::ensure!(
            self.time_scale > 0.0 && self.time_scale.is_finite(),
            "--time-scale {:e} is not above 0",
            self.time_scale
        );
        if let Some(path) = &self.trace {
            anyhow::ensure!(
                self.prefix_tokens.is_none(),
                "--prefix-tokens changes what a trace has recorded"
            );
            // Warm-up before and load behind the measured ones.
            let trace = trace::read(path, Some(requests.saturating_mul(2).saturating_add(10_000)))?;
            return Ok(TrafficSource::Trace(std::rc::Rc::new(trace), self.time_scale));
        }
        let mut workload = match (self.input_len, self.output_len) {
            (Some(input), Some(output)) => Workload::fixed(input, output)?,
            _ => Workload::open(self.workload.as_deref().unwrap_or("chat"))?,
        };
        if let Some(tokens) = self.prefix_tokens {
            let prefix = SharedPrefix { tokens, share: self.prefix_share, groups: self.prefix_groups };
            workload = Workload { prefix: Some(prefix), ..workload }.checked()?;
        }
        Ok(TrafficSource::Workload(workload))
    }

    fn virtual_source(&self) -> anyhow::Result<Option<VirtualSource>> {
        if !self.simulate {
            return Ok(None);
        }
        if let Some(path) = &self.from {
            return Ok(Some(VirtualSource::Saved(Box::new(saved::read(path)?))));
        }
        let gpu = self.gpu.as_deref().unwrap_or("h100-sxm");
        Ok(Some(VirtualSource::Datasheet(Box::new(devices::find(gpu)?.clone()))))
    }

    fn mode(&self) -> anyhow::Result<Mode> {
        match self.sweep.as_slice() {
            [] => {}
            [one] => {
                let (variable, values) = one
                    .split_once('=')
                    .with_context(|| format!("--sweep `{one}` has no `=`; write it as rate=1..32*2"))?;
                let variable = variable.trim();
                anyhow::ensure!(
                    !(matches!(variable, "rate" | "concurrency")
                        && (self.rate.is_some() || self.concurrency.is_some())),
                    "--sweep {variable} chooses the load itself; leave out --rate and --concurrency"
                );
                return Ok(Mode::Sweep { variable: variable.to_owned(), values: parse_values(values)? });
            }
            many => anyhow::bail!(
                "--sweep is there {} times: one variable at a time, or a difference could be due to any of them",
                many.len()
            ),
        }
        if self.find_max_rate {
            anyhow::ensure!(
                (1..=100).contains(&self.seeds),
                "--seeds {} is not between 1 and 100",
                self.seeds
            );
            return Ok(Mode::FindMaxRate { seeds: self.seeds, precision: 0.05 });
        }
        if self.matrix {
            let scale = self.matrix_scale;
            anyhow::ensure!(
                scale > 0.0 && scale <= 1000.0,
                "--matrix-scale {scale} is not above 0 and at most 1000"
            );
            return Ok(Mode::Matrix { scale });
        }
        Ok(if self.compare_loops { Mode::CompareLoops } else { Mode::Single })
    }
}

/// The most values of a sweep.
const MAX_VALUES: usize = 256;

/// Reads `0.5,1,2`, `1..50`, `0.5..8*2` or `1..3+0.5`.
fn parse_values(given: &str) -> anyhow::Result<Vec<f64>> {
    let number = |text: &str| -> anyhow::Result<f64> {
        let value: f64 =
            text.trim().parse().with_context(|| format!("--sweep `{given}`: `{text}` is not a number"))?;
        anyhow::ensure!(value > 0.0 && value < 1e9, "--sweep `{given}`: {value} is not above 0");
        Ok(value)
    };
    let mut values = Vec::new();
    for part in given.split(',') {
        let Some((from, to)) = part.split_once("..") else {
            values.push(number(part)?);
            continue;
        };
        let (mut value, factor, step, to) = if let Some((to, factor)) = to.split_once('*') {
            (number(from)?, number(factor)?, 0.0, number(to)?)
        } else if let Some((to, step)) = to.split_once('+') {
            (number(from)?, 1.0, number(step)?, number(to)?)
        } else {
            (number(from)?, 1.0, 1.0, number(to)?)
        };
        anyhow::ensure!(
            factor >= 1.0 && (factor > 1.0 || step > 0.0),
            "--sweep `{given}`: a factor must be above 1"
        );
        anyhow::ensure!(value <= to, "--sweep `{given}`: {from}..{to} runs backwards");
        while value <= to * (1.0 + 1e-9) {
            values.push(value);
            anyhow::ensure!(values.len() <= MAX_VALUES, "--sweep `{given}`: more than {MAX_VALUES} values");
            value = value * factor + step;
        }
    }
    Ok(values)
}

/// Refuses an engine that is unknown, or a list of them.
fn one_engine(given: &str) -> anyhow::Result<()> {
    let engines = config::parse_engines(given)?;
    anyhow::ensure!(engines.len() == 1, "--engine `{given}`: traffic is served by one engine at a time");
    Ok(())
}

/// Runs it.
pub fn execute(args: Args) -> anyhow::Result<Outcome> {
    execute::execute(args)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_a_sweep_are_lists_and_ranges() {
        assert_eq!(parse_values("0.5,1,2").unwrap(), [0.5, 1.0, 2.0]);
        assert_eq!(parse_values("1..3").unwrap(), [1.0, 2.0, 3.0]);
        assert_eq!(parse_values("0.5..4*2").unwrap(), [0.5, 1.0, 2.0, 4.0]);
        assert_eq!(parse_values("1..2+0.5").unwrap(), [1.0, 1.5, 2.0]);
        for wrong in ["", "a", "0", "-1", "3..1", "1..8*1", "1..1e9*1.00001", "NaN", "inf"] {
            assert!(parse_values(wrong).is_err(), "{wrong}");
        }
    }
}
