//! `hbmark logits`.

use anyhow::Context;
use clap::Args as ClapArgs;
use serde::Serialize;

use super::progress::Progress;
use super::shared_args::{DeviceArgs, ModelArgs, parse_dtypes};
use super::{Outcome, print, print_json, say};
use crate::engine::{DeviceOptions, SequenceId, Session, StepBatch};
use crate::worker::Observer;
use hbmark_report::analysis::words::counted;

#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Example:\n  hbmark logits --model ./my-model --tokens 1,2,3 --greedy 8 --format json"
)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// The prompt as token ids, comma-separated.
    #[arg(long, conflicts_with = "prompt", required_unless_present = "prompt")]
    tokens: Option<String>,
    /// The prompt as text, for a model with a tokenizer.json.
    #[arg(long)]
    prompt: Option<String>,
    /// The engine.
    #[arg(long, default_value = "stock")]
    engine: String,
    /// f32, bf16 or f16 [default: f32 on a CPU, bf16 on a GPU].
    #[arg(long)]
    dtype: Option<String>,
    #[command(flatten)]
    device: DeviceArgs,
    /// Also generate this many tokens greedily.
    #[arg(long, default_value_t = 0)]
    greedy: usize,
    /// json, or text (the ten largest logits).
    #[arg(long, default_value = "text", value_parser = ["text", "json"])]
    format: String,
}

#[derive(Debug, Serialize)]
struct Logits {
    model: String,
    engine: String,
    dtype: String,
    tokens: Vec<u32>,
    #[serde(rename = "logits")]
    last: Vec<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    generated: Option<Vec<u32>>,
}

pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    crate::engine::threads::limit(args.device.threads.map(|t| t as usize));
    let engines = crate::run::config::parse_engines(&args.engine)?;
    anyhow::ensure!(engines.len() == 1, "--engine takes one engine here, not {}", engines.len());
    let device = args.device.choice()?;
    let model = crate::weights::open(&args.model.model, args.model.revision.as_deref(), args.model.seed)?;
    super::say_doubt(&model);
    let tokens = match (&args.tokens, &args.prompt) {
        (Some(given), _) => parse_tokens(given)?,
        (None, Some(text)) => model.tokenizer()?.encode(text)?,
        (None, None) => unreachable!("clap requires one of the two"),
    };
    anyhow::ensure!(!tokens.is_empty(), "the prompt has no tokens");
    let dtype = match &args.dtype {
        Some(given) => parse_dtypes("dtype", given)?[0],
        None => crate::engine::default_dtype(&engines[0], &model, device),
    };
    let mut progress = Progress::new();
    progress.stage(&format!("loading {} as {dtype}", model.name));
    let mut loaded = |done, total| progress.loaded(done, total);
    let mut session =
        crate::engine::open(&engines[0], &model, dtype, device, DeviceOptions::default(), &mut loaded)?;
    progress.finish();
    let logits = prefill(session.as_mut(), &tokens)?;
    let generated =
        if args.greedy > 0 { Some(generate(session.as_mut(), &tokens, args.greedy)?) } else { None };
    let wrong = logits.iter().filter(|logit| !logit.is_finite()).count();
    let result = Logits {
        model: model.name.clone(),
        engine: engines[0].clone(),
        dtype: dtype.to_string(),
        tokens,
        last: logits,
        generated,
    };
    if args.format == "json" {
        print_json(&result)?;
    } else {
        print(&text(&result))?;
    }
    if wrong > 0 {
        say(&format!(
            "{wrong} of {} logits are NaN or infinite: these outputs are wrong; try --dtype f32, or another copy of the weights",
            result.last.len()
        ));
        return Ok(Outcome::SomeCellsFailed);
    }
    Ok(Outcome::Complete)
}

fn parse_tokens(given: &str) -> anyhow::Result<Vec<u32>> {
    given
        .split(',')
        .map(|t| t.trim().parse().with_context(|| format!("--tokens: `{}` is not a token id", t.trim())))
        .collect()
}

fn prefill(session: &mut dyn Session, tokens: &[u32]) -> anyhow::Result<Vec<f32>> {
    session.step(&StepBatch::uniform(SequenceId(0), &[tokens.to_vec()], 0))?;
    Ok(session.logits()?.swap_remove(0))
}

/// Continues the sequence that [`prefill`] left behind.
fn generate(session: &mut dyn Session, tokens: &[u32], count: usize) -> anyhow::Result<Vec<u32>> {
    let mut generated = vec![session.greedy_tokens()?[0]];
    while generated.len() < count {
        let last = *generated.last().expect("it starts with one");
        let position = tokens.len() + generated.len() - 1;
        session.step(&StepBatch::uniform(SequenceId(0), &[vec![last]], position))?;
        generated.push(session.greedy_tokens()?[0]);
    }
    Ok(generated)
}

fn text(result: &Logits) -> String {
    use std::fmt::Write;
    let mut ranked: Vec<(usize, f32)> = result.last.iter().copied().enumerate().collect();
    ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
    let mut text = format!(
        "{} · {} · {} · {}\n",
        result.model,
        result.engine,
        result.dtype,
        counted(result.tokens.len(), "token")
    );
    text.push_str("    token       logit\n");
    for (token, logit) in ranked.iter().take(10) {
        let _ = writeln!(text, "{token:>9}  {logit:>10.5}");
    }
    if let Some(generated) = &result.generated {
        let tokens: Vec<String> = generated.iter().map(u32::to_string).collect();
        let _ = writeln!(text, "generated: {}", tokens.join(" "));
    }
    text
}
