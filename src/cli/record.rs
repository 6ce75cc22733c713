//! `hbmark record`.

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use clap::Args as ClapArgs;

use super::capacity::PriceArgs;
use super::{Outcome, print};
use hbmark_core::result::serving::ServeReport;
use hbmark_report::analysis::capacity::{Capacity, capacity};
use hbmark_report::analysis::import::{Imported, UserOverrides};
use hbmark_report::analysis::{Opened, open};
use hbmark_report::output::document::Document;
use hbmark_report::output::{markdown, record};

#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Examples:\n  hbmark record results/1b/result.json\n  hbmark record results/sweep/serve.json --target-rate 200 --gpu-hour-price 2.50 --output decision.md\n  hbmark record results/compared/comparison.json"
)]
pub struct Args {
    /// A saved result of any kind: of run, predict, serve or compare, or of a program that `hbmark import` reads.
    file: PathBuf,
    /// Peak requests per second, for instances and cost of a serving result.
    #[arg(long)]
    target_rate: Option<f64>,
    /// Share of an instance's rate that stays free.
    #[arg(long, default_value_t = 0.2, requires = "target_rate")]
    headroom: f64,
    /// GPUs (or machines) that one instance takes.
    #[arg(long, default_value_t = 1, requires = "target_rate", value_parser = clap::value_parser!(u64).range(1..=100_000))]
    gpus_per_instance: u64,
    #[command(flatten)]
    prices: PriceArgs,
    /// Write the record into this file instead of printing it.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    let text = markdown(&of_file(args, &args.file)?);
    match &args.output {
        Some(path) => crate::machine::atomic_file::write_atomic(path, &text)?,
        None => print(&text)?,
    }
    Ok(Outcome::Complete)
}

fn of_file(args: &Args, file: &Path) -> anyhow::Result<Document> {
    let opened = open(file)?;
    if let Opened::Serving(report) = &opened {
        let planned = plan(args, report)
            .with_context(|| format!("no capacity can be derived from {}", file.display()))?;
        return Ok(record::of_serving(report, planned.as_ref()));
    }
    ensure!(
        args.target_rate.is_none(),
        "--target-rate is about a result of `hbmark serve`, and {} is {}",
        file.display(),
        opened.kind()
    );
    Ok(match opened {
        Opened::Serving(report) => record::of_serving(&report, None),
        Opened::Comparison(found) => record::of_comparison(&found),
        Opened::Report(report) => record::of_run(&report),
        Opened::Foreign(results) => {
            let place = |result| Imported::new(result, &UserOverrides::default());
            record::of_foreign(&results.into_iter().map(place).collect::<Vec<_>>())
        }
    })
}

/// Instances and cost, where a rate was asked for.
fn plan(args: &Args, report: &ServeReport) -> anyhow::Result<Option<Capacity>> {
    let Some(rate) = args.target_rate else { return Ok(None) };
    let question = args.prices.question(rate, args.headroom, args.gpus_per_instance)?;
    Ok(Some(capacity(report, &question)?))
}
