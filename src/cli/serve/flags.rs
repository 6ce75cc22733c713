//! The flags that modes of `hbmark serve` share, in groups.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use clap::{ArgAction, Args};

use super::lora::LoraArgs;
use super::server::ServerArgs;
use super::speculation::SpeculationArgs;
use super::vllm_names::VllmNames;
use crate::cli::benchmark::WorkerArgs;
pub(super) use crate::cli::shared_args::within;
use crate::cli::shared_args::{DeviceArgs, ModelArgs, OutputArgs, length_within, parse_dtypes};
use crate::run::config::{self, ConfigError};
use crate::serve::structured_output::{Grammar, StructuredError};
use crate::serve::{Mode, SchedulerOptions, ServeConfig, VirtualSource, requests_within};
use crate::weights::{self, OpenModel};
use hbmark_core::ledger::devices;
use hbmark_core::model::Dtype;
use hbmark_core::result::serving::{
    Arrivals, Offered, Policy, SchedulerConfig, Slo, SloMetric, SweepVariable, parse_span,
};
use hbmark_core::result::{DeviceSpec, EngineKind};
use hbmark_core::units::Nanos;
use hbmark_report::analysis::{FailOn, opened};
use hbmark_traffic::arrivals::Burst;
use hbmark_traffic::point::{PlanError, TrafficSource};
use hbmark_traffic::sampler::Sampling;
use hbmark_traffic::trace;
use hbmark_traffic::workload::{SharedPrefix, Structured, Workload};

/// Requests per second when nothing is said.
const DEFAULT_RATE: f64 = 1.0;
/// Requests that are measured when nothing is said, on an engine and on the virtual clock.
const DEFAULT_REQUESTS: (usize, usize) = (100, 5_000);
/// Times this an undetermined run is extended on an engine; on the virtual clock, up to this many requests.
const EXTENSION: (usize, usize) = (16, 65_536);
/// Beyond this a number of requests is a typing error.
const MAX_REQUESTS: usize = 10_000_000;
/// Beyond this a number of tokens or requests is one.
const MAX_COUNT: usize = 1_000_000_000;

/// Reads a number of tokens, such as 4096 or 4k.
fn tokens(given: &str) -> Result<usize, String> {
    length_within(1..=MAX_COUNT)(given)
}

/// Reads requests per second.
pub(super) fn rate(given: &str) -> Result<Offered, String> {
    if given == "inf" {
        return Ok(Offered::AtOnce);
    }
    let wrong = || {
        format!("{given} is not a rate above 1e-6 and below 1e9 requests per second, or `inf` (all at once)")
    };
    let rate = given.parse().ok().filter(|rate| *rate > 1e-6 && *rate < 1e9);
    rate.map(Offered::Rate).ok_or_else(wrong)
}

fn one_engine(given: &str) -> anyhow::Result<String> {
    let engines = config::parse_engines(given)?;
    anyhow::ensure!(engines.len() == 1, "traffic is served by one engine at a time");
    anyhow::ensure!(
        EngineKind::ranks(&engines[0]) == 1,
        "traffic is served without tensor parallel groups; `hbmark run --tensor-parallel-size` times their steps"
    );
    Ok(given.to_owned())
}

fn dtype(given: &str) -> Result<Dtype, ConfigError> {
    Ok(parse_dtypes("dtype", given)?[0])
}

fn grammar(given: &str) -> Result<String, StructuredError> {
    given.parse::<Grammar>().map(|_| given.to_owned())
}

/// A model on an engine.
#[derive(Debug, Args)]
pub(super) struct EngineArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// The engine: native or stock.
    #[arg(long, env = "HBMARK_ENGINE", default_value = "native", value_parser = one_engine)]
    pub engine: String,
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Dtype of the weights [default: the engine's for the device].
    #[arg(long, env = "HBMARK_DTYPE", value_parser = dtype)]
    pub dtype: Option<Dtype>,
    /// Storage of the KV cache [default: the engine's for the weights]. native also has fp8 and int8.
    #[arg(long, env = "HBMARK_KV_DTYPE", visible_alias = "kv-cache-dtype", value_parser = crate::cli::shared_args::engine_kv_dtype())]
    pub kv_dtype: Option<Dtype>,
}

impl EngineArgs {
    pub fn threads(&self) -> Option<usize> {
        self.device.threads.map(|threads| threads as usize)
    }

    pub fn open(&self) -> anyhow::Result<OpenModel> {
        let ModelArgs { model, revision, seed } = &self.model;
        Ok(weights::open(model, revision.as_deref(), *seed)?)
    }
}

/// Where no engine runs.
#[derive(Debug, Args)]
#[command(next_help_heading = "Virtual clock")]
#[group(requires = "simulate")]
pub(super) struct VirtualArgs {
    /// Run the scheduler on a virtual clock: step times from --gpu's data sheet or --from a saved run.
    #[arg(long = "virtual", conflicts_with_all = ["structured", "tokenizer"])]
    pub simulate: bool,
    /// A GPU of the datasheet table (`hbmark devices`), or a file GPU.toml with the keys of a row of it [default: h100-sxm].
    #[arg(long, conflicts_with = "from", value_parser = devices::find_or_read)]
    gpu: Option<DeviceSpec>,
    /// A result.json of `hbmark run` of the same model.
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
}

/// The GPU of a virtual clock where none is named.
const DEFAULT_GPU: &str = "h100-sxm";

impl VirtualArgs {
    fn source(&self) -> anyhow::Result<Option<VirtualSource>> {
        Ok(match &self.from {
            _ if !self.simulate => None,
            Some(path) => Some(VirtualSource::Saved(Box::new(opened::report(path)?))),
            None => {
                let default = || {
                    crate::cli::say(&format!(
                        "virtual clock: step times of {DEFAULT_GPU}; --gpu names another"
                    ));
                    devices::find(DEFAULT_GPU).cloned()
                };
                let gpu = self.gpu.clone().map_or_else(default, Ok)?;
                Some(VirtualSource::Datasheet(Box::new(gpu)))
            }
        })
    }
}

/// The scheduler's options under vLLM's names.
#[derive(Debug, Args)]
#[command(next_help_heading = "Scheduler")]
struct SchedulerArgs {
    /// Maximum sequences per step [default: 256, CPU: 32].
    #[arg(long, value_parser = within(1..=SchedulerConfig::MAX_NUM_SEQS))]
    max_num_seqs: Option<usize>,
    /// Maximum tokens per step [default: 2048, CPU: 512].
    #[arg(long, value_parser = within(1..=SchedulerConfig::MAX_NUM_BATCHED_TOKENS))]
    max_num_batched_tokens: Option<usize>,
    /// Fraction of GPU memory for weights and KV [default: 0.9]; on a CPU, fraction of free memory for KV [default: 0.25].
    #[arg(long, value_parser = within(1e-6..=1.0))]
    gpu_memory_utilization: Option<f64>,
    /// Number of KV blocks, instead of what fits.
    #[arg(long, value_parser = within(1..=SchedulerConfig::MAX_NUM_BLOCKS))]
    num_gpu_blocks_override: Option<usize>,
    /// Tokens per KV block [default: the engine's 64; on a virtual GPU 16].
    #[arg(long, value_parser = within(1..=SchedulerConfig::MAX_BLOCK_SIZE))]
    block_size: Option<usize>,
    /// Maximum length of prompt and output together [default: the model's].
    #[arg(long, value_parser = tokens)]
    max_model_len: Option<usize>,
    /// Enable automatic prefix caching [default: true].
    #[arg(long, num_args = 0..=1, default_missing_value = "true", action = ArgAction::Set)]
    enable_prefix_caching: Option<bool>,
    /// Split long prefills across steps (chunked prefill) [default: true].
    #[arg(long, num_args = 0..=1, default_missing_value = "true", action = ArgAction::Set)]
    enable_chunked_prefill: Option<bool>,
    /// Scheduling policy.
    #[arg(long, value_enum, default_value = "fcfs")]
    scheduling: Policy,
    /// Maximum queue length; further requests are rejected.
    #[arg(long, value_parser = within(1..=MAX_COUNT))]
    max_waiting: Option<usize>,
}

/// How outputs are chosen.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sampling")]
struct SamplingArgs {
    /// Sampling temperature; 0 is greedy.
    #[arg(long, default_value = "0", value_parser = within(0.0..=1e6_f32))]
    temperature: f32,
    /// Top-k sampling; 0 disables.
    #[arg(long, default_value_t = 0)]
    top_k: usize,
    /// Top-p (nucleus) sampling.
    #[arg(long, default_value = "1", value_parser = within(1e-6..=1.0_f32))]
    top_p: f32,
    /// End outputs at the model's end-of-sequence token instead of at their planned length.
    #[arg(long)]
    stop_at_eos: bool,
    /// Constrain outputs: json-schema:FILE, regex:RE or grammar:FILE (Lark). Also measures a baseline without it.
    #[arg(long, value_name = "GRAMMAR", value_parser = grammar)]
    structured: Option<String>,
    /// Fraction of requests constrained by --structured.
    #[arg(long, default_value = "1", requires = "structured", value_parser = within(0.0..=1.0))]
    structured_share: f64,
    /// A tokenizer.json or its folder, for a model without one or instead of its own: text is then encoded and decoded.
    #[arg(long, value_name = "PATH")]
    tokenizer: Option<PathBuf>,
}

/// What every mode takes that serves traffic.
#[derive(Debug, Args)]
pub(super) struct ServingArgs {
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Number of measured requests [default: what the percentiles of --slo need, at least 100; 5000 on the virtual clock].
    #[arg(
        long,
        visible_alias = "num-prompts",
        value_parser = within(1..=MAX_REQUESTS),
        help_heading = "Workload"
    )]
    requests: Option<usize>,
    /// Send up to this many requests while it is undetermined whether the system keeps up or meets --slo [default: 16 x the default number,
    /// 65536 on the virtual clock; exactly --requests where that is given, except in search and matrix].
    #[arg(long, value_parser = within(1..=MAX_REQUESTS), help_heading = "Workload")]
    max_requests: Option<usize>,
    /// Warm-up requests before measurement [default: 10 %, at least twice the mean concurrency].
    #[arg(
        long,
        visible_aliases = ["warmup", "num-warmups"],
        value_parser = within(0..=MAX_REQUESTS),
        help_heading = "Workload"
    )]
    warmup_requests: Option<usize>,
    /// Recorded traffic (formats: `hbmark serve --help`).
    #[arg(long, value_name = "FILE", group = "source", help_heading = "Workload")]
    trace: Option<PathBuf>,
    /// Multiply the times of a trace: 0.5 is twice the recorded rate. --rate sets the mean rate instead.
    #[arg(long, default_value = "1", requires = "trace", value_parser = within(1e-9..=1e9), help_heading = "Workload")]
    time_scale: f64,
    /// Time limit (30s, 10m); unfinished requests count as failed.
    #[arg(long, value_parser = parse_span, help_heading = "Workload")]
    time_limit: Option<Nanos>,
    #[command(flatten)]
    scheduler: SchedulerArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    speculation: SpeculationArgs,
    #[command(flatten)]
    lora: LoraArgs,
    #[command(flatten)]
    pub server: ServerArgs,
    #[command(flatten)]
    pub clock: VirtualArgs,
    /// Do not time the engine's steps first, and predict nothing.
    #[arg(long, help_heading = None)]
    no_predict: bool,
    #[command(flatten)]
    pub worker: WorkerArgs,
    #[command(flatten)]
    pub output: OutputArgs,
    /// Exit with 1 when one of these holds: an objective of --slo missed, a point saturated, no rate found by a search, a point invalid, or
    /// not `ok`.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "CONDITION")]
    pub fail_on: Vec<FailOn>,
}

impl ServingArgs {
    /// The files that are read while traffic is made.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        [&self.trace, &self.sampling.tokenizer].into_iter().flatten().map(PathBuf::as_path)
    }

    /// The model; of a live server only its shape, and only where it is given.
    pub fn open(&self) -> anyhow::Result<Option<Rc<OpenModel>>> {
        let ModelArgs { model, revision, .. } = &self.engine.model;
        let shape = || weights::open_shape(model, revision.as_deref());
        let opened = match &self.server.url {
            Some(_) if self.engine.model.is_default() => return Ok(None),
            Some(_) => match shape() {
                Ok(opened) => opened,
                // A name of the server's own, as `vllm bench serve` takes.
                Err(_) if !Path::new(model).exists() => return Ok(None),
                Err(error) => return Err(error.into()),
            },
            None if self.clock.simulate => shape()?,
            None => self.engine.open()?,
        };
        Ok(Some(Rc::new(opened)))
    }

    /// As [`Self::open`], for a process whose user should hear what is doubtful about the model; a worker is silent.
    pub fn open_and_warn(&self) -> anyhow::Result<Option<Rc<OpenModel>>> {
        let opened = self.open()?;
        match (&opened, &self.engine.model) {
            (Some(opened), _) => crate::cli::say_doubt(opened),
            (None, named) if named.is_default() => {}
            (None, ModelArgs { model, .. }) => {
                crate::cli::say(&format!(
                    "no shape is known of {model}: it is only the name to ask the server for"
                ));
            }
        }
        Ok(opened)
    }

    /// How many requests are measured, and how many at most.
    fn requests(&self, mode: &Mode, given: Option<usize>, slo: &Slo) -> anyhow::Result<(usize, usize)> {
        let clauses =
            slo.clauses.iter().map(|clause| (hbmark_core::stats::needed(clause.percentile), clause));
        let strictest = clauses.max_by_key(|(needed, _)| *needed);
        let needed = strictest.map_or(0, |(needed, _)| needed);
        let (default, most) = if self.clock.simulate {
            (DEFAULT_REQUESTS.1.max(needed), EXTENSION.1)
        } else {
            let default = DEFAULT_REQUESTS.0.max(needed);
            (default, EXTENSION.0 * given.unwrap_or(default))
        };
        let requests = given.unwrap_or(default);
        let goes_on = given.is_none() || matches!(mode, Mode::FindMaxRate { .. } | Mode::Matrix { .. });
        if let Some(most) = self.max_requests {
            anyhow::ensure!(
                most >= requests,
                "--max-requests {most} is below the number that is measured first, {requests}; raise it, or give fewer --requests"
            );
        }
        let most = self.max_requests.unwrap_or(if goes_on { most } else { 0 }).max(requests);
        // Said before an engine is loaded for nothing; what a trace has is known later.
        if let Some((needed, clause)) = strictest.filter(|(needed, _)| *needed > most) {
            return Err(PlanError::TooFewForSlo {
                clause: clause.to_string(),
                needed,
                requests: most,
                more: "",
            }
            .into());
        }
        Ok((requests, most))
    }

    /// A benchmark of chat or recorded traffic; `requests` where another flag sets their number.
    pub fn config(&self, mode: Mode, requests: Option<usize>, slo: &Slo) -> anyhow::Result<ServeConfig> {
        for condition in &self.fail_on {
            let needs = match condition {
                FailOn::Slo if slo.clauses.is_empty() => "needs objectives: add --slo",
                FailOn::NoRate if !matches!(mode, Mode::FindMaxRate { .. }) => "is of `hbmark serve search`",
                FailOn::DoesNotFit => "is of `hbmark predict`",
                _ => continue,
            };
            anyhow::bail!("--fail-on {} {needs}", crate::cli::name_of(*condition));
        }
        if self.server.url.is_some() && slo.clauses.iter().any(|clause| clause.metric == SloMetric::Queue) {
            anyhow::bail!(
                "a live server does not show how long requests queue; give ttft_p... in place of queue_p..."
            );
        }
        let (requests, max_requests) = self.requests(&mode, requests.or(self.requests), slo)?;
        let (source, offered) = match &self.trace {
            Some(path) => {
                // Warm-up before and load behind the measured ones, three times as many for the last run of a search.
                let trace = trace::read(path, Some(6 * requests + 10_000))?;
                (TrafficSource::Trace(Rc::new(trace), self.time_scale), Offered::AsRecorded)
            }
            None => (TrafficSource::Workload(Workload::open("chat")?), Offered::Rate(DEFAULT_RATE)),
        };
        let (engine, scheduler, sampling) = (&self.engine, &self.scheduler, &self.sampling);
        if self.clock.simulate && (engine.device.device.is_some() || engine.device.threads.is_some()) {
            crate::cli::say(
                "virtual clock: --device and --threads change nothing; --gpu names the GPU of its step times",
            );
        }
        Ok(ServeConfig {
            engine: engine.engine.clone(),
            device: engine.device.choice()?,
            dtype: engine.dtype,
            kv_dtype: engine.kv_dtype,
            threads: engine.threads(),
            virtual_source: self.clock.source()?,
            server: self.server.config(engine.model.given())?,
            source,
            offered,
            arrivals: Arrivals::Poisson,
            burst: None,
            requests,
            duration: None,
            max_requests,
            warmup: self.warmup_requests,
            cold_baseline: false,
            scheduler: SchedulerOptions {
                max_num_seqs: scheduler.max_num_seqs,
                max_num_batched_tokens: scheduler.max_num_batched_tokens,
                gpu_memory_utilization: scheduler.gpu_memory_utilization,
                num_gpu_blocks_override: scheduler.num_gpu_blocks_override,
                block_size: scheduler.block_size,
                max_model_len: scheduler.max_model_len,
                enable_prefix_caching: scheduler.enable_prefix_caching,
                enable_chunked_prefill: scheduler.enable_chunked_prefill,
                scheduling: scheduler.scheduling,
                max_waiting: scheduler.max_waiting,
                max_loras: self.lora.max_loras,
                speculation: self.speculation.config(engine.model.seed, self.server.url.is_some())?,
            },
            sampling: Sampling {
                temperature: sampling.temperature,
                top_k: sampling.top_k,
                top_p: sampling.top_p,
                seed: engine.model.seed,
            },
            stop_at_eos: sampling.stop_at_eos,
            slo: Slo::default(),
            time_limit_s: self.time_limit.map(Nanos::seconds),
            mode,
            predict: !self.no_predict && !self.clock.simulate && self.server.url.is_none(),
            tokenizer: sampling.tokenizer.clone(),
            lora: self.lora.config(self.server.url.is_some())?,
            structured: sampling
                .structured
                .clone()
                .map(|grammar| Structured { grammar, share: sampling.structured_share }),
            seed: engine.model.seed,
            note: self.output.note.clone(),
            hypothesis: self.output.hypothesis.clone(),
            out: self.output.out.clone(),
        })
    }
}

/// A beginning that prompts share.
#[derive(Debug, Args)]
#[command(next_help_heading = "Workload")]
#[group(requires = "prefix_tokens")]
#[expect(clippy::struct_field_names, reason = "the names of the flags")]
struct PrefixArgs {
    /// Shared prefix length in tokens; also measures a baseline without prefix reuse.
    #[arg(long, conflicts_with = "trace")]
    prefix_tokens: Option<usize>,
    /// Fraction of requests that use the shared prefix.
    #[arg(long, default_value_t = 1.0)]
    prefix_share: f64,
    /// Number of distinct shared prefixes.
    #[arg(long, default_value_t = 1)]
    prefix_groups: usize,
}

/// What requests ask for, and how they arrive.
#[derive(Debug, Args)]
#[command(next_help_heading = "Workload")]
pub(super) struct WorkloadArgs {
    /// chat, code, long-context-qa, summarization, rag, agents, batch, or a TOML file [default: chat].
    #[arg(long, group = "source")]
    pub workload: Option<String>,
    /// Prompt length in tokens, the same for every request.
    #[arg(
        long,
        visible_alias = "random-input-len",
        conflicts_with_all = ["workload", "trace"],
        value_parser = config::parse_length
    )]
    input_len: Option<usize>,
    /// Output length in tokens, the same for every request.
    #[arg(
        long,
        visible_alias = "random-output-len",
        aliases = ["sharegpt-output-len", "custom-output-len"],
        conflicts_with_all = ["workload", "trace"],
        value_parser = config::parse_length
    )]
    output_len: Option<usize>,
    #[command(flatten)]
    prefix: PrefixArgs,
    /// Arrival process: poisson, gamma:CV or constant [default: poisson; a trace has its own].
    #[arg(long, conflicts_with = "trace", help_heading = "Load")]
    arrivals: Option<Arrivals>,
    /// FACTORxON/PERIOD, as in 4x10s/60s: four times the rate for 10 s of every 60 s, at the same mean.
    #[arg(long, conflicts_with = "trace", help_heading = "Load")]
    burst: Option<Burst>,
    #[command(flatten)]
    pub vllm: VllmNames,
}

impl WorkloadArgs {
    /// That benchmark, of this workload.
    pub fn of(&self, mut config: ServeConfig) -> anyhow::Result<ServeConfig> {
        // What a sweep sets point by point needs no other value.
        let swept = |asked| matches!(config.mode, Mode::Sweep { variable, .. } if variable == asked);
        config.arrivals = self.arrivals.or(self.vllm.arrivals()).unwrap_or_default();
        config.burst = self.burst;
        if let Some(server) = &mut config.server {
            server.ignore_eos = self.vllm.ignore_eos;
        }
        if let Some(dataset) = self.vllm.dataset(&config, self.output_len)? {
            anyhow::ensure!(
                self.input_len.is_none() && self.prefix.prefix_tokens.is_none(),
                "the prompts of a dataset are as recorded; leave out --input-len and --prefix-tokens"
            );
            config.source = TrafficSource::Dataset(Some(Rc::new(dataset)));
            return Ok(config);
        }
        let random = self.vllm.random();
        let input = self.input_len.or(random.map(|(input, _)| input));
        let output = self.output_len.or(random.map(|(_, output)| output));
        let lengths = match (input, output) {
            (Some(input), Some(output)) => Some((input, output)),
            (None, Some(output)) if swept(SweepVariable::InputLen) => Some((1, output)),
            (Some(input), None) if swept(SweepVariable::OutputLen) => Some((input, 1)),
            (Some(input), None) => anyhow::bail!("--input-len {input} needs --output-len beside it"),
            (None, Some(output)) => anyhow::bail!("--output-len {output} needs --input-len beside it"),
            (None, None) => None,
        };
        if let TrafficSource::Workload(traffic) = &mut config.source {
            *traffic = match lengths {
                Some((input, output)) => {
                    let fixed = self.vllm.spread(Workload::fixed(input, output)?)?;
                    let name = match (swept(SweepVariable::InputLen), swept(SweepVariable::OutputLen)) {
                        (true, _) => format!("input swept, output {output}"),
                        (_, true) => format!("input {input}, output swept"),
                        _ => fixed.name.clone(),
                    };
                    Workload { name, ..fixed }
                }
                None => Workload::open(self.workload.as_deref().unwrap_or("chat"))?,
            };
            if let PrefixArgs { prefix_tokens: Some(tokens), prefix_share: share, prefix_groups: groups } =
                self.prefix
            {
                let prefix = Some(SharedPrefix { tokens, share, groups });
                *traffic = Workload { prefix, ..traffic.clone() }.checked()?;
                config.cold_baseline = true;
            }
        }
        Ok(config)
    }
}

/// A workload under a load.
#[derive(Debug, Args)]
pub(super) struct LoadArgs {
    #[command(flatten)]
    pub serving: ServingArgs,
    #[command(flatten)]
    pub workload: WorkloadArgs,
    /// Requests per second, or `inf`: all at once [default: 1; for a trace, as recorded].
    #[arg(long, visible_alias = "request-rate", value_parser = rate, help_heading = "Load")]
    pub rate: Option<Offered>,
    /// Closed loop with this many concurrent requests; with --rate and --url, an open loop with no more in flight; TTFT
    /// and E2E include the wait for a slot.
    #[arg(
        long,
        visible_alias = "max-concurrency",
        conflicts_with_all = ["burst"],
        value_parser = within(1..=1_000_000_usize),
        help_heading = "Load"
    )]
    pub concurrency: Option<usize>,
    /// Measurement duration (60s, 10m, 1h) at --rate, or at each rate of a sweep, instead of --requests.
    #[arg(long, conflicts_with = "requests", value_parser = parse_span, help_heading = "Load")]
    duration: Option<Nanos>,
    /// Objectives: ttft_p95=1s,tpot_p95=40ms,e2e_p99=15s.
    #[arg(long, help_heading = "Load")]
    slo: Option<Slo>,
}

impl LoadArgs {
    pub fn config(&self, mode: Mode) -> anyhow::Result<ServeConfig> {
        let slo = self.slo.clone().or_else(|| self.workload.vllm.objectives()).unwrap_or_default();
        let requests = self.duration.map(|duration| self.requests(duration, &mode)).transpose()?;
        if let Some([fewest, _]) = requests {
            self.serving.requests(&mode, Some(fewest), &slo)?;
        }
        let requests = requests.map(|[_, most]| most);
        let mut config = self.workload.of(self.serving.config(mode, requests, &slo)?)?;
        config.duration = self.duration;
        config.offered = match (self.rate, self.concurrency, &mut config.server) {
            (Some(rate), Some(cap), Some(server)) => {
                server.cap = Some(cap);
                rate
            }
            (Some(_), Some(_), None) => anyhow::bail!(
                "--rate beside --concurrency caps the requests in flight to a live server (--url); otherwise give one of them"
            ),
            (rate, concurrency, _) => {
                concurrency.map(Offered::Concurrency).or(rate).unwrap_or(config.offered)
            }
        };
        if config.offered == Offered::AtOnce && self.serving.warmup_requests.is_some_and(|count| count > 0) {
            crate::cli::say(
                "--rate inf has all requests there at once, and measures all: --warmup-requests is not used",
            );
        }
        config.slo = slo;
        Ok(config)
    }

    /// The fewest and the most requests that arrive in this time at the rates.
    fn requests(&self, duration: Nanos, mode: &Mode) -> anyhow::Result<[usize; 2]> {
        let [lowest, highest] = match (mode, self.rate) {
            (Mode::Sweep { variable, values }, _) if *variable == SweepVariable::Rate => {
                values.iter().fold([f64::INFINITY, 0.0], |[low, high], rate| [rate.min(low), rate.max(high)])
            }
            (_, Some(Offered::Rate(rate))) => [rate; 2],
            (_, Some(_)) => anyhow::bail!(
                "--duration {duration} beside --rate inf has no end; give a rate that is a number"
            ),
            (Mode::Sweep { variable: SweepVariable::Concurrency, .. }, _) => anyhow::bail!(
                "--duration {duration} needs --rate, or a sweep over rate: a closed loop has no rate"
            ),
            (_, None) if self.concurrency.is_none() && self.serving.trace.is_none() => [DEFAULT_RATE; 2],
            (_, None) => anyhow::bail!("--duration {duration} needs --rate, or a sweep over rate"),
        };
        let most = requests_within(duration, highest);
        anyhow::ensure!(
            most <= MAX_REQUESTS,
            "--duration {duration} at --rate {highest} is {most} requests, above {MAX_REQUESTS}; give a shorter one"
        );
        Ok([requests_within(duration, lowest), most])
    }
}
