//! `hbmark predict`.

use clap::Args as ClapArgs;
use clap::builder::RangedU64ValueParser;

use super::benchmark::command_line;
use super::shared_args::parse_dtypes;
use super::{Outcome, print_result, say_doubt};
use crate::run::config::{DEFAULT_MODEL, PhaseName, parse_axis, phases};
use crate::weights;
use hbmark_core::ledger::{ExpertRouting, Group, devices};
use hbmark_core::model::Dtype;
use hbmark_core::result::{DeviceSpec, Status};
use hbmark_report::analysis::import::UserOverrides;
use hbmark_report::analysis::{FailOn, Opened};
use hbmark_report::output::Format;

#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Examples:\n  hbmark predict --model Llama-3.1-8B --gpu h100-sxm\n  hbmark predict --model DeepSeek-V3 --gpu h200 --dtype fp8 --kv-dtype bf16 --batch '1..256*4' --context 4096 --format json\n  hbmark predict --model Llama-3.1-70B --gpu h200 --tensor-parallel-size 8 --phase decode --batch 1"
)]
pub struct Args {
    /// A name (`hbmark models`), a folder with a config.json, a hub id or a GGUF file; no weights are read. MODEL+mtp or MODEL+eagle is the draft layer
    /// (MTP or EAGLE) of that model.
    #[arg(long, default_value = DEFAULT_MODEL)]
    model: String,
    /// Revision of a hub id.
    #[arg(long)]
    revision: Option<String>,
    /// A GPU of the datasheet table (`hbmark devices`), or a file GPU.toml with the keys of a row of it.
    #[arg(long, default_value = "h100-sxm", value_parser = devices::find_or_read)]
    gpu: DeviceSpec,
    /// Storage of the weights, comma-separated: f32, bf16, f16, int8, fp8, int4, mxfp8, mxfp4, nvfp4, q8_0, q4_0, q4_k, q5_k, q6_k, or gguf for
    /// a file's own [default: what the model's files state, tensor by tensor (headers, `quantization_config`), of a name of `hbmark models` what it is published in].
    #[arg(long)]
    dtype: Option<String>,
    /// Storage of the KV cache [default: that of the weights, bf16 where they are quantised].
    #[arg(long, visible_alias = "kv-cache-dtype", value_parser = super::shared_args::kv_dtype())]
    kv_dtype: Option<Dtype>,
    /// Phases to predict. `verify` is the step of speculative decoding that checks draft tokens; decode is predicted beside it.
    #[arg(long, value_delimiter = ',', default_value = "prefill,decode")]
    phase: Vec<PhaseName>,
    /// Draft tokens that a verify step checks for each sequence, behind its last token [default: 1,3,7, with --phase verify].
    #[arg(long, value_name = "TOKENS", visible_alias = "num-speculative-tokens")]
    draft_tokens: Option<String>,
    /// Sequences in a step.
    #[arg(long, default_value = "1,8,32")]
    batch: String,
    /// Decode: positions in the KV cache. Prefill: prompt tokens.
    #[arg(long, default_value = "512,4096")]
    context: String,
    /// How tokens are assumed to be spread over the experts of a layer: uniform, balanced (the most a step can read), or zipf:S (the expert
    /// of rank r is 1/r^S as popular) [default: uniform].
    #[arg(long)]
    expert_routing: Option<ExpertRouting>,
    /// GPUs that share each layer.
    #[arg(long, visible_alias = "tp", default_value_t = 1, value_parser = group_size())]
    tensor_parallel_size: u64,
    /// Stages of consecutive layers, each on GPUs of its own.
    #[arg(long, visible_alias = "pp", default_value_t = 1, value_parser = group_size())]
    pipeline_parallel_size: u64,
    /// The GPUs that share a layer hold whole experts, and not a slice of each.
    #[arg(long)]
    enable_expert_parallel: bool,
    /// Exit with 1 when one of these holds: a cell does not fit the GPU, or was not predicted.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "CONDITION")]
    fail_on: Vec<FailOn>,
    /// What to print on stdout.
    #[arg(long, value_enum, default_value = "table")]
    format: Format,
}

fn group_size() -> RangedU64ValueParser {
    clap::value_parser!(u64).range(1..=4096)
}

impl Args {
    /// The GPUs that were asked for, where they are more than one.
    fn group(&self) -> anyhow::Result<Option<Group>> {
        let group = Group {
            tensor: usize::try_from(self.tensor_parallel_size)?,
            pipeline: usize::try_from(self.pipeline_parallel_size)?,
            experts: self.enable_expert_parallel,
        };
        Ok((group != Group::ONE).then_some(group))
    }
}

pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    let model = weights::open_shape(&args.model, args.revision.as_deref())?;
    say_doubt(&model);
    super::check_routing(args.expert_routing, &model)?;
    let question = crate::run::predict::Question {
        device: args.gpu.clone(),
        dtypes: match &args.dtype {
            Some(given) => parse_dtypes("dtype", given)?,
            None => vec![model.stored_dtype()],
        },
        kv_dtype: args.kv_dtype,
        phases: phases(&args.phase, args.draft_tokens.as_deref())?,
        batches: parse_axis("batch", &args.batch)?,
        contexts: parse_axis("context", &args.context)?,
        routing: args.expert_routing.unwrap_or(ExpertRouting::Uniform),
        group: args.group()?,
    };
    let report = crate::run::predict::report(&model, &question, &command_line())?;
    let nothing = report.cells.iter().all(|cell| cell.status != Status::Predicted);
    let opened = Opened::Report(Box::new(report));
    let failed = super::tell_failures(&opened, &args.fail_on, &UserOverrides::default())?;
    if let Opened::Report(report) = &opened {
        print_result(&**report, args.format)?;
    }
    Ok(if nothing || failed { Outcome::SomeCellsFailed } else { Outcome::Complete })
}
