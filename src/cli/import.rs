//! `hbmark import`.

use std::path::{Path, PathBuf};

use clap::Args as ClapArgs;

use super::{Outcome, print_result};
use crate::weights::{self, OpenModel};
use hbmark_core::ledger::devices;
use hbmark_core::model::Dtype;
use hbmark_core::result::DeviceSpec;
use hbmark_report::analysis::import::{ForeignFormat, ForeignResult, Imported, UserOverrides};
use hbmark_report::analysis::opened;
use hbmark_report::output::{Aliases, Format};

#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Examples:\n  hbmark import vllm-result.json --model Llama-3.1-8B --gpu h100-sxm --dtype bf16\n  hbmark import llama-bench.jsonl --format csv\n  hbmark import --aliases\n\nReads vLLM bench serve, latency and throughput; SGLang bench_one_batch and bench_serving; llama-bench (json, jsonl, csv, sql, md) and\nllama-batched-bench; AIPerf (summary, records, GPU telemetry), GenAI-Perf; GuideLLM; inference-perf; optimum-benchmark (json, md);\ntrtllm-bench; a vLLM engine's request log, counters and Prometheus page. The format is told by the content.\nExit code 1 when a flag contradicts a file (the row is not rated), a row is INVALID or one of several files cannot be read."
)]
pub struct Args {
    /// Results of other programs.
    #[arg(required_unless_present = "aliases")]
    files: Vec<PathBuf>,
    #[command(flatten)]
    said: OverrideArgs,
    /// Print which foreign key means which of our metrics, and stop.
    #[arg(long)]
    aliases: bool,
    /// With --aliases: of one format alone.
    #[arg(long, requires = "aliases", value_enum)]
    of: Option<ForeignFormat>,
    /// What to print on stdout.
    #[arg(long, value_enum, default_value = "table")]
    format: Format,
}

/// What a foreign file may lack; a flag that contradicts the file leaves the row unrated.
#[derive(Debug, Clone, ClapArgs)]
pub struct OverrideArgs {
    /// The model that ran: a name (`hbmark models`), a folder with a config.json, a hub id or a GGUF file; no weights are read.
    #[arg(long)]
    pub model: Option<String>,
    /// The GPU it ran on, of the datasheet table (`hbmark devices`), or a file GPU.toml with the keys of a row of it.
    #[arg(long, value_parser = devices::find_or_read)]
    pub gpu: Option<DeviceSpec>,
    /// GPUs that held the model together.
    #[arg(long, visible_aliases = ["tensor-parallel-size", "tp"], value_parser = clap::value_parser!(u64).range(1..=4096))]
    pub gpus: Option<u64>,
    /// Storage of the weights.
    #[arg(long)]
    pub dtype: Option<Dtype>,
    /// Storage of the KV cache.
    #[arg(long, value_parser = super::shared_args::kv_dtype())]
    pub kv_dtype: Option<Dtype>,
    /// Sequences that decoded at once.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub batch: Option<u64>,
    /// Positions in the KV cache of a decode step.
    #[arg(long, value_parser = super::shared_args::length_within(0..=100_000_000))]
    pub context: Option<usize>,
}

impl OverrideArgs {
    /// The model named by flag.
    pub fn model(&self) -> anyhow::Result<Option<OpenModel>> {
        Ok(self.model.as_deref().map(|name| weights::open_shape(name, None)).transpose()?)
    }

    /// What was said, with the model that was opened.
    pub fn given<'a>(&'a self, model: Option<&'a OpenModel>) -> anyhow::Result<UserOverrides<'a>> {
        Ok(UserOverrides {
            model: model.map(|m| &m.architecture),
            model_name: model.map(|m| m.name.as_str()),
            model_dtype: model.map(|m| self.model_dtype(m)).transpose()?.flatten(),
            gpu: self.gpu.as_ref(),
            gpus: self.gpus,
            dtype: self.dtype,
            kv_dtype: self.kv_dtype,
            batch: self.batch,
            context: self.context.map(|context| context as u64),
        })
    }

    /// The storage of the model's own files, where they are quantised: plain weights may have been quantised by the engine.
    fn model_dtype(&self, model: &OpenModel) -> anyhow::Result<Option<Dtype>> {
        let storage = if model.is_gguf() { Dtype::Gguf } else { model.storage(self.dtype)? };
        Ok((!matches!(storage, Dtype::F32 | Dtype::Bf16 | Dtype::F16)).then_some(storage))
    }
}

/// What a file is called in a table: its name, with its path where another one has the same name.
pub fn name_of(file: &Path, files: &[PathBuf]) -> String {
    let alike = files.iter().filter(|other| other.file_name() == file.file_name()).count() > 1;
    let name = file.file_name().filter(|_| !alike).unwrap_or(file.as_os_str());
    hbmark_core::input::plain(&name.to_string_lossy())
}

pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    if args.aliases {
        print_result(&Aliases(args.of), args.format)?;
        return Ok(Outcome::Complete);
    }
    let model = args.said.model()?;
    let given = args.said.given(model.as_ref())?;
    let (mut imported, mut refused) = (Vec::new(), Vec::new());
    for file in &args.files {
        match opened::rows(file) {
            Ok(results) => imported.extend(results.into_iter().map(|result| {
                Imported::new(ForeignResult { source: name_of(file, &args.files), ..result }, &given)
            })),
            // One file that is none must not cost the others.
            Err(error) if args.files.len() > 1 => refused.push(anyhow::Error::new(error)),
            Err(error) => return Err(error.into()),
        }
    }
    refused.iter().for_each(super::say_error);
    anyhow::ensure!(!imported.is_empty(), "none of the {} files could be read", args.files.len());
    print_result(imported.as_slice(), args.format)?;
    let trusted = imported.iter().all(|one| one.objections().next().is_none());
    Ok(if trusted && refused.is_empty() { Outcome::Complete } else { Outcome::SomeCellsFailed })
}
