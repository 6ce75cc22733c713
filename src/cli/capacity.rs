//! `hbmark capacity`.

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use clap::Args as ClapArgs;

use super::{Outcome, print_result};
use hbmark_core::result::serving::{ServeReport, Slo};
use hbmark_report::analysis::capacity::{self, Prices, Question};
use hbmark_report::analysis::{open, opened};
use hbmark_report::output::Format;

#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Examples:\n  hbmark serve sweep 'rate=1..32*2' --slo ttft_p95=1s --out results/sweep\n  hbmark capacity results/sweep/serve.json --target-rate 200 --gpu-hour-price 2.50\n  hbmark capacity results/sweep/serve.json --target-rate 200 --headroom 0.3 --gpus-per-instance 2 --context 8192 --concurrency 64\n\nThe rate of one instance is the highest that was run and met every objective, as every lower one did."
)]
pub struct Args {
    /// A serve.json of a sweep over the rate, or of a search.
    file: PathBuf,
    /// Peak requests per second.
    #[arg(long)]
    target_rate: f64,
    /// Objectives [default: those of the result].
    #[arg(long)]
    slo: Option<Slo>,
    /// Share of an instance's rate that stays free.
    #[arg(long, default_value_t = 0.2)]
    headroom: f64,
    /// GPUs (or machines) that one instance takes.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    gpus_per_instance: u64,
    /// Positions of a sequence, for the KV memory [default: prompt and output of the run].
    #[arg(long, value_parser = super::shared_args::length_within(1..=1_000_000_000))]
    context: Option<usize>,
    /// Sequences at once in an instance [default: those that ran].
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    concurrency: Option<u64>,
    #[command(flatten)]
    prices: PriceArgs,
    /// What to print on stdout.
    #[arg(long, value_enum, default_value = "table")]
    format: Format,
}

/// What things cost; shared with `hbmark record`.
#[derive(Debug, Clone, ClapArgs)]
pub struct PriceArgs {
    /// Price of a GPU (or machine) for an hour.
    #[arg(long, help_heading = "Prices")]
    gpu_hour_price: Option<f64>,
    /// What a million prompt tokens are sold for.
    #[arg(long, requires = "gpu_hour_price", requires = "price_output", help_heading = "Prices")]
    price_input: Option<f64>,
    /// What a million output tokens are sold for.
    #[arg(long, requires = "gpu_hour_price", requires = "price_input", help_heading = "Prices")]
    price_output: Option<f64>,
    /// Currency symbol.
    #[arg(long, default_value = "$", help_heading = "Prices")]
    currency: String,
    /// Requests per second on average over the time that is paid for [default: the target].
    #[arg(long, help_heading = "Prices")]
    mean_rate: Option<f64>,
}

/// A number above zero that arithmetic survives.
fn positive(name: &str, value: Option<f64>) -> anyhow::Result<Option<f64>> {
    if let Some(value) = value {
        ensure!(
            value.is_finite() && value > 0.0 && value < 1e12,
            "--{name} {} is not a number above 0 and below 10^12",
            if value.abs() < 1e12 { value.to_string() } else { format!("{value:e}") }
        );
    }
    Ok(value)
}

impl PriceArgs {
    fn prices(&self) -> anyhow::Result<Option<Prices>> {
        let Some(gpu_hour) = positive("gpu-hour-price", self.gpu_hour_price)? else { return Ok(None) };
        Ok(Some(Prices {
            currency: self.currency.clone(),
            gpu_hour,
            input_per_million: positive("price-input", self.price_input)?,
            output_per_million: positive("price-output", self.price_output)?,
        }))
    }

    /// The question with its prices.
    pub fn question(
        &self,
        target_rate: f64,
        headroom: f64,
        gpus_per_instance: u64,
    ) -> anyhow::Result<Question> {
        positive("target-rate", Some(target_rate))?;
        ensure!(
            (0.0..1.0).contains(&headroom),
            "--headroom {headroom} is not at least 0 and below 1 (0.2 is a fifth)"
        );
        let mean_rate = positive("mean-rate", self.mean_rate)?;
        ensure!(
            mean_rate.is_none_or(|mean| mean <= target_rate),
            "--mean-rate {} is above the --target-rate {target_rate}, which is the busiest",
            mean_rate.unwrap_or_default()
        );
        Ok(Question {
            target_rate,
            mean_rate,
            slo: None,
            headroom,
            gpus_per_instance,
            prices: self.prices()?,
            context: None,
            concurrency: None,
        })
    }
}

/// The serving result in a file.
pub fn serving_result(file: &Path) -> anyhow::Result<ServeReport> {
    if let Some(report) = opened::serving(file)? {
        return Ok(report);
    }
    // What it is instead, or why it is nothing.
    let kind = open(file)?.kind();
    anyhow::bail!(
        "{} is {kind}, and capacity needs a serving result: give one of `hbmark serve`",
        file.display()
    )
}

pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    let question = args.prices.question(args.target_rate, args.headroom, args.gpus_per_instance)?;
    let question = Question {
        slo: args.slo.clone(),
        context: args.context.map(|context| context as u64),
        concurrency: args.concurrency,
        ..question
    };
    let report = serving_result(&args.file)?;
    let answer = capacity::capacity(&report, &question)
        .with_context(|| format!("no capacity can be derived from {}", args.file.display()))?;
    print_result(&answer, args.format)?;
    Ok(Outcome::Complete)
}
