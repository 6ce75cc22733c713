//! `hbmark speculate`.

use std::path::PathBuf;

use anyhow::ensure;
use clap::Args as ClapArgs;

use super::{Outcome, print_result};
use hbmark_core::result::Phase;
use hbmark_core::result::serving::parse_span;
use hbmark_core::units::Nanos;
use hbmark_report::analysis::opened;
use hbmark_report::analysis::speculation::{Acceptance, Drafting, other_device, speculation};
use hbmark_report::output::{Format, status_word};

#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Examples:\n  hbmark run --model Llama-3.1-8B --engine native --phase verify --draft-tokens 1,3,7 --out results/8b\n  hbmark run --model Llama-3.2-1B --engine native --phase decode --out results/1b\n  hbmark speculate results/8b/result.json --draft results/1b/result.json --acceptance-rate 0.7\n  hbmark speculate results/8b/result.json --draft-time 0.4ms --acceptance-length 2.5\n\nThe effective TPOT is (verify step + draft tokens · draft step) / tokens that the step brings. What is accepted is assumed, and never measured here."
)]
pub struct Args {
    /// A result of `hbmark run` or `hbmark predict` with verify steps.
    file: PathBuf,
    /// A result of the draft model, timed at the same batches and contexts.
    #[arg(long, value_name = "FILE", conflicts_with = "draft_time")]
    draft: Option<PathBuf>,
    /// What each draft token takes, such as 0.4ms [default: none, as where tokens are looked up in the prompt].
    #[arg(long, value_name = "TIME", value_parser = parse_span)]
    draft_time: Option<Nanos>,
    /// Probability that a draft token is accepted where all before it were.
    #[arg(long, value_name = "RATE", group = "accepted")]
    acceptance_rate: Option<f64>,
    /// Share of steps that accept the draft token at each position, comma-separated and never rising.
    #[arg(long, value_name = "RATES", group = "accepted", value_delimiter = ',')]
    acceptance_rates: Option<Vec<f64>>,
    /// Tokens that a step brings on average, the one that is not a draft token among them.
    #[arg(long, value_name = "TOKENS", group = "accepted")]
    acceptance_length: Option<f64>,
    /// What to print on stdout.
    #[arg(long, value_enum, default_value = "table")]
    format: Format,
}

impl Args {
    fn acceptance(&self) -> anyhow::Result<Option<Acceptance>> {
        let rate = self.acceptance_rate.map(Acceptance::Rate);
        let rates = || self.acceptance_rates.clone().map(Acceptance::RatePerPosition);
        let length = || self.acceptance_length.map(Acceptance::Length);
        Ok(rate.or_else(rates).or_else(length).map(Acceptance::checked).transpose()?)
    }
}

pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    let acceptance = args.acceptance()?;
    let target = opened::report(&args.file)?;
    let draft = args.draft.as_deref().map(opened::report).transpose()?;
    let drafting = match (&draft, args.draft_time) {
        (Some(draft), _) => Drafting::Model(draft),
        (None, Some(time)) => Drafting::Time(time.0),
        (None, None) => Drafting::Free,
    };
    if let Some((of_target, of_draft)) = draft.as_ref().and_then(|draft| other_device(&target, draft)) {
        anyhow::bail!(
            "the model ran on {of_target} and the draft on {of_draft}: give times of one device, or the draft's as --draft-time"
        );
    }
    let found = speculation(&target, drafting, acceptance);
    let verified = target.cells.iter().filter(|cell| matches!(cell.phase, Phase::Verify { .. }));
    let statuses: Vec<&str> = verified.map(|cell| status_word(cell.status)).collect();
    ensure!(
        !found.rows.is_empty() || statuses.is_empty(),
        "no verify step of {} has a time that can be read beside that of its decode step: they are {}",
        args.file.display(),
        statuses
            .iter()
            .collect::<std::collections::BTreeSet<_>>()
            .into_iter()
            .copied()
            .collect::<Vec<_>>()
            .join(", ")
    );
    ensure!(
        !found.rows.is_empty(),
        "{} has no verify step with a decode step of the same batch and context beside it; measure some with \
         `hbmark run --engine native --phase verify --draft-tokens 1,3,7`",
        args.file.display()
    );
    if let Some(draft) = &args.draft {
        ensure!(
            found.rows.iter().any(|row| row.draft_ns.is_some()),
            "{} has no decode step at a batch and context of {}; run the draft model with the same --batch and --context",
            draft.display(),
            args.file.display()
        );
    }
    print_result(&found, args.format)?;
    Ok(Outcome::Complete)
}
