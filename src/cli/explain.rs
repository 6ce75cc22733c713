//! `hbmark explain`.

use std::path::PathBuf;

use clap::Args as ClapArgs;

use super::{Outcome, print_result};
use hbmark_core::result::saved;
use hbmark_report::analysis::Cost;
use hbmark_report::output::Format;

#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Examples:\n  hbmark run --out results/1b && hbmark explain results/1b/result.json\n  hbmark serve sweep rate=1,2,4,8 --slo ttft_p95=1s --out results/s && hbmark explain results/s/serve.json"
)]
pub struct Args {
    /// A result.json written by `run --out`, or a serve.json written by `serve --out`.
    file: PathBuf,
    /// What an hour of the device costs, to hold a serving result against --max-cost-per-million.
    #[arg(long, visible_alias = "price-per-hour", requires = "max_cost_per_million", value_parser = positive)]
    gpu_hour_price: Option<f64>,
    /// What a million output tokens may cost, in the same money.
    #[arg(long, requires = "gpu_hour_price", value_parser = positive)]
    max_cost_per_million: Option<f64>,
    /// What to print on stdout.
    #[arg(long, value_enum, default_value = "table")]
    format: Format,
}

fn positive(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|v: &f64| v.is_finite() && *v > 0.0)
        .ok_or_else(|| format!("`{text}` is no positive number"))
}

pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    let found = if let Some(served) = hbmark_core::result::serving::read(&args.file)? {
        let cost = args.gpu_hour_price.zip(args.max_cost_per_million);
        let cost = cost
            .map(|(price_per_hour, limit)| Cost { price_per_hour, limit_per_million_output_tokens: limit });
        hbmark_report::analysis::explain_serving(&served, cost)
    } else {
        anyhow::ensure!(
            args.gpu_hour_price.is_none(),
            "--gpu-hour-price is for results of `hbmark serve`, and {} is none",
            args.file.display()
        );
        let mut report = saved::read(&args.file)?;
        hbmark_report::analysis::judge::recompute(&mut report);
        hbmark_report::analysis::explain(&report)
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
