//! `hbmark serve`: a mode of it per file, and the flags that they share.

mod cold;
mod finish;
mod flags;
mod lora;
mod matrix;
mod point;
mod search;
mod server;
mod speculation;
mod sweep;
mod vllm_names;

use clap::{Args as ClapArgs, FromArgMatches, Subcommand};
use flags::{ServingArgs, WorkloadArgs};

use super::shared_args::first_line;
use crate::serve::ServeConfig;

pub(super) use finish::{execute, work};

#[derive(Debug, ClapArgs)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Examples:
  hbmark serve --engine native --workload chat --rate 2 --requests 100
  hbmark serve sweep 'rate=0.5..8*2' --input-len 128 --output-len 32 --slo ttft_p95=2s
  hbmark serve search --slo ttft_p95=1s,tpot_p95=40ms
  hbmark serve --trace AzureLLMInferenceTrace_conv.csv --requests 500 --rate 1
  hbmark serve --url http://localhost:8000 --workload chat --rate 2 --requests 200 --slo ttft_p95=1s,tpot_p95=40ms
  hbmark serve --virtual --gpu h100-sxm --model Llama-3.1-8B --workload chat --rate 10 --duration 1h
  hbmark serve --rate inf --enable-lora --lora-adapters 8 --lora-rank 16
  hbmark serve --model ./llama --structured json-schema:order.json --structured-share 0.5

Traces (told apart by their first line):
  Azure     TIMESTAMP,ContextTokens,GeneratedTokens / 2023-11-16 18:15:46.68,374,44
  BurstGPT  Timestamp,Model,Request tokens,Response tokens,... / 5,ChatGPT,472,18,...
  Vidur     arrived_at,num_prefill_tokens,num_decode_tokens / 0.35,374,44
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
  [structured]  grammar = \"json-schema:order.json\"  share = 0.5"
)]
pub struct Args {
    #[command(subcommand)]
    mode: Option<Mode>,
    #[command(flatten)]
    point: point::PointArgs,
}

#[derive(Debug, Subcommand)]
enum Mode {
    /// Measure one variable over a range: a point for each value.
    Sweep(Box<sweep::SweepArgs>),
    /// Find the highest rate that meets --slo, confirm it with fresh seeds, and sustain it.
    Search(Box<search::SearchArgs>),
    /// Measure the six standard workloads, each with its hypothesis.
    Matrix(Box<matrix::MatrixArgs>),
    /// Launch the program several times and time each start by phases, up to its first tokens.
    Cold(Box<cold::ColdArgs>),
}

/// A serving command line.
struct Asked<'a> {
    serving: &'a ServingArgs,
    /// What is asked for, where the mode has not its own.
    workload: Option<&'a WorkloadArgs>,
    config: ServeConfig,
}

impl Args {
    fn asked(&self) -> anyhow::Result<Asked<'_>> {
        let (serving, workload, config) = match &self.mode {
            None => (&self.point.load.serving, Some(&self.point.load.workload), self.point.config()?),
            Some(Mode::Sweep(args)) => (&args.load.serving, Some(&args.load.workload), args.config()?),
            Some(Mode::Search(args)) => (&args.serving, Some(&args.workload), args.config()?),
            Some(Mode::Matrix(args)) => (&args.serving, None, args.config()?),
            Some(Mode::Cold(_)) => anyhow::bail!("a cold start serves no traffic"),
        };
        Ok(Asked { serving, workload, config })
    }
}

/// Flags of one point that are not settings of a side of a comparison: what a comparison decides itself, and what ends or keeps a run.
const NO_SETTINGS: &[&str] = &[
    "seed",
    "cache-salt",
    "compare-loops",
    "resume",
    "virtual",
    "gpu",
    "from",
    "out",
    "format",
    "note",
    "hypothesis",
    "fail-on",
    "help",
];

/// Whether a flag of one point may be a setting of a side of a comparison.
pub(super) fn is_setting(name: &str) -> bool {
    let command = <point::PointArgs as ClapArgs>::augment_args(clap::Command::new("serve"));
    let known = command.get_arguments().any(|argument| {
        let names = argument.get_long_and_visible_aliases().unwrap_or_default();
        names.contains(&name)
    });
    known && !NO_SETTINGS.contains(&name)
}

/// The configuration that `hbmark serve` makes of these arguments.
pub(super) fn point_config(arguments: &[String]) -> anyhow::Result<ServeConfig> {
    let command =
        <point::PointArgs as ClapArgs>::augment_args(clap::Command::new("serve").no_binary_name(true));
    let matches = command.try_get_matches_from(arguments).map_err(|error| first_line(&error))?;
    point::PointArgs::from_arg_matches(&matches).map_err(|error| first_line(&error))?.config()
}

/// What to write in place of a flag: of one that became a subcommand, and of those of vLLM's, SGLang's and NVIDIA's clients that have another
/// name here, or none.
pub(super) fn in_place_of(flag: &str) -> Option<&'static str> {
    Some(match flag {
        "--sweep" => "write `hbmark serve sweep VARIABLE=VALUES`",
        "--find-max-rate" => "write `hbmark serve search --slo ...`",
        "--matrix" => "write `hbmark serve matrix`",
        "--cold" => "write `hbmark serve cold --launches N`",
        "--host" | "--port" => "write `--url http://HOST:PORT`",
        "--isl" | "--synthetic-input-tokens-mean" | "--random-input" => "write `--input-len TOKENS`",
        "--osl" | "--output-tokens-mean" | "--random-output" => "write `--output-len TOKENS`",
        "--random-prefix-len" | "--prefix-prompt-length" => "write `--prefix-tokens TOKENS`",
        "--request-count" | "--num-requests" => "write `--requests N`",
        "--warmup-request-count" => "write `--warmup N`",
        "--endpoint-type" | "--apply-chat-template" => {
            "write `--backend vllm-chat` (or openai, sglang, tensorrt-llm, tgi, llama.cpp, with -chat for chat completions)"
        }
        "--disable-ignore-eos" => "write `--stop-at-eos`",
        "--label" => "write `--note TEXT`",
        "--insecure" => "write `--ca-cert FILE`",
        "--ramp-up-strategy" | "--ramp-up-start-rps" | "--ramp-up-end-rps" => {
            "write `hbmark serve sweep 'rate=1..64*2'`: each rate is a point of its own, warmed up"
        }
        "--save-detailed" | "--output-details" => "write `--out DIR`: every request is in its serve.json",
        "--append-result" => {
            "write `--out DIR` with a folder for each run; `hbmark report FOLDER` reads all of them"
        }
        "--plot-timeline" | "--plot-dataset-stats" => "write `--out DIR`: plots are in its report.html",
        "--min-p" | "--repetition-penalty" | "--frequency-penalty" | "--presence-penalty" | "--logprobs" => {
            "write `--extra-body JSON` with the fields of the request"
        }
        "--streaming"
        | "--disable-tqdm"
        | "--trust-remote-code"
        | "--ready-check-timeout-sec"
        | "--tokenizer-mode" => "leave it out: answers are always streamed, and nothing here needs it",
        _ => return None,
    })
}
