//! `hbmark explain`.

use std::path::PathBuf;

use clap::Args as ClapArgs;

use super::import::OverrideArgs;
use super::{Outcome, print_result};
use hbmark_report::analysis::import::Imported;
use hbmark_report::analysis::{Cost, Opened, explain_import, of_comparison, open};
use hbmark_report::output::Format;

#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Examples:\n  hbmark run --out results/1b && hbmark explain results/1b/result.json\n  hbmark serve sweep rate=1,2,4,8 --slo ttft_p95=1s --out results/sweep && hbmark explain results/sweep/serve.json"
)]
pub struct Args {
    /// A saved result of any kind: of run, predict, serve or compare, the folder of one, or a result of a program that `hbmark import` reads.
    file: PathBuf,
    /// What an hour of the device costs, to hold a serving result against --max-cost-per-million.
    #[arg(long, visible_alias = "price-per-hour", requires = "max_cost_per_million", value_parser = positive)]
    gpu_hour_price: Option<f64>,
    /// What a million output tokens may cost, in the same money.
    #[arg(long, requires = "gpu_hour_price", value_parser = positive)]
    max_cost_per_million: Option<f64>,
    #[command(flatten, next_help_heading = "Other programs")]
    said: OverrideArgs,
    /// What to print on stdout.
    #[arg(long, value_enum, default_value = "table")]
    format: Format,
}

fn positive(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|v: &f64| v.is_finite() && *v > 0.0)
        .ok_or_else(|| format!("`{text}` is not a positive number"))
}

pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    let opened = open(&args.file)?;
    anyhow::ensure!(
        args.gpu_hour_price.is_none() || matches!(opened, Opened::Serving(_)),
        "--gpu-hour-price is for results of `hbmark serve`, and {} is {}",
        args.file.display(),
        opened.kind()
    );
    let found = match opened {
        Opened::Serving(served) => {
            let cost = args.gpu_hour_price.zip(args.max_cost_per_million);
            let cost = cost.map(|(price_per_hour, limit)| Cost {
                price_per_hour,
                limit_per_million_output_tokens: limit,
            });
            hbmark_report::analysis::explain_serving(&served, cost)
        }
        Opened::Report(report) => hbmark_report::analysis::explain(&report),
        Opened::Comparison(found) => of_comparison(&found).findings(),
        Opened::Foreign(results) => {
            let model = args.said.model()?;
            let given = args.said.given(model.as_ref())?;
            let imported = results.into_iter().map(|result| Imported::new(result, &given));
            imported.flat_map(|imported| explain_import(&imported, &given)).collect()
        }
    };
    print_result(found.as_slice(), args.format)?;
    Ok(Outcome::Complete)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Alone {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn the_price_of_an_hour_has_the_name_it_has_elsewhere_and_its_old_one() {
        for flag in ["--gpu-hour-price", "--price-per-hour"] {
            let given = ["explain", "serve.json", flag, "2.5", "--max-cost-per-million", "3"];
            assert_eq!(Alone::parse_from(given).args.gpu_hour_price, Some(2.5), "{flag}");
        }
    }
}
