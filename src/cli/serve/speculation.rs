//! The flags of speculative decoding with a scripted acceptance.

use anyhow::ensure;
use clap::Args;

use super::flags::within;
use hbmark_core::result::MAX_DRAFT_TOKENS;
use hbmark_core::result::serving::SpeculativeConfig;
use hbmark_report::analysis::speculation::Acceptance;

/// What drafts propose, and how much of it is accepted.
#[derive(Debug, Args)]
#[command(next_help_heading = "Speculative decoding")]
pub(super) struct SpeculationArgs {
    /// Draft tokens of each sequence in a step, with --acceptance-rate; drafting takes no time.
    #[arg(long, visible_alias = "num-speculative-tokens", requires = "acceptance_rate", value_name = "TOKENS", value_parser = within(1..=MAX_DRAFT_TOKENS))]
    draft_tokens: Option<usize>,
    /// Probability that a draft token is accepted where all before it were, whatever the model would have written.
    #[arg(long, requires = "draft_tokens", value_name = "RATE")]
    acceptance_rate: Option<f64>,
    /// Share of steps that accept the draft token at each position: as many as there are draft tokens, comma-separated and never rising.
    #[arg(
        long,
        visible_alias = "synthetic-acceptance-rates",
        conflicts_with = "draft_tokens",
        value_name = "RATES",
        value_delimiter = ','
    )]
    acceptance_rates: Option<Vec<f64>>,
}

impl SpeculationArgs {
    /// What is asked for; a live server speculates by itself.
    pub fn config(&self, seed: u64, is_live: bool) -> anyhow::Result<Option<SpeculativeConfig>> {
        let rates = match (&self.acceptance_rates, self.acceptance_rate.zip(self.draft_tokens)) {
            (Some(rates), _) => rates.clone(),
            (None, Some((rate, draft_tokens))) => {
                Acceptance::Rate(rate).checked()?;
                (1..).take(draft_tokens).map(|position| rate.powi(position)).collect()
            }
            (None, None) => return Ok(None),
        };
        ensure!(
            !is_live,
            "--acceptance-rate scripts the engine of this program; a live server (--url) has its own draft"
        );
        ensure!(
            (1..=MAX_DRAFT_TOKENS).contains(&rates.len()),
            "--acceptance-rates has {} rates, and steps have 1 to {MAX_DRAFT_TOKENS} draft tokens",
            rates.len()
        );
        Acceptance::RatePerPosition(rates.clone()).checked()?;
        Ok(Some(SpeculativeConfig { synthetic_acceptance_rates: rates, seed }))
    }
}
