//! `hbmark serve search`: the highest rate under objectives.

use clap::Args;

use super::flags::{ServingArgs, WorkloadArgs, rate, within};
use crate::serve::{Mode, ServeConfig};
use hbmark_core::result::serving::{Offered, Slo, parse_span};
use hbmark_core::units::Nanos;

/// The bracket is halved until it is this narrow.
const PRECISION: f64 = 0.03;

#[derive(Debug, Args)]
#[command(after_help = "Example:
  hbmark serve search --slo ttft_p95=300ms,tpot_p95=50ms
  hbmark serve search --virtual --gpu h100-sxm --model Llama-3.1-8B --slo ttft_p95=1s,tpot_p95=40ms,e2e_p99=15s")]
pub(super) struct SearchArgs {
    /// Objectives: ttft_p95=1s,tpot_p95=40ms,e2e_p99=15s.
    #[arg(long, help_heading = "Load")]
    slo: Slo,
    /// First rate to try, in requests per second [default: half of the predicted maximum].
    #[arg(long, visible_alias = "request-rate", value_parser = rate, help_heading = "Load")]
    rate: Option<Offered>,
    /// Number of seeds with which the rate is found; the result is their median, with its range.
    #[arg(long, default_value = "3", value_parser = within(1..=100_usize), help_heading = "Load")]
    seeds: usize,
    /// The run that confirms the rate lasts this long at least (5m) [default: three times the other runs].
    #[arg(long, value_parser = parse_span, help_heading = "Load")]
    sustain: Option<Nanos>,
    #[command(flatten)]
    pub serving: ServingArgs,
    #[command(flatten)]
    pub workload: WorkloadArgs,
}

impl SearchArgs {
    pub fn config(&self) -> anyhow::Result<ServeConfig> {
        let mode = Mode::FindMaxRate {
            seeds: self.seeds,
            precision: PRECISION,
            sustain_s: self.sustain.map_or(0.0, Nanos::seconds),
        };
        let config = self.workload.of(self.serving.config(mode, None, &self.slo)?)?;
        // Without a rate, the search chooses its own start.
        Ok(ServeConfig { slo: self.slo.clone(), offered: self.rate.unwrap_or(Offered::AtOnce), ..config })
    }
}
