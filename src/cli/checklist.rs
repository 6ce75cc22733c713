//! `hbmark checklist`.

use std::path::PathBuf;

use clap::Args as ClapArgs;

use super::import::OverrideArgs;
use super::{Outcome, print_result};
use hbmark_report::analysis::{
    ChecklistVerdict, Opened, of_comparison, of_foreign, of_report, of_serving, open,
};
use hbmark_report::output::Format;

#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Examples:\n  hbmark checklist results/1b/result.json\n  hbmark checklist vllm-result.json --gpu h100-sxm --dtype bf16 --engine 'vllm 0.9.1'\n\nINCOMPLETE: something essential is not reported, and nothing failed. Exit code 1 when a result is INVALID."
)]
pub struct Args {
    /// Results: of run, predict, serve or compare, or of any program that `hbmark import` reads.
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// The program and version whose steps were timed, where the file does not say: `vllm 0.9.1`.
    #[arg(long, value_name = "NAME VERSION", help_heading = "Other programs")]
    engine: Option<String>,
    #[command(flatten, next_help_heading = "Other programs")]
    said: OverrideArgs,
    /// What to print on stdout.
    #[arg(long, value_enum, default_value = "table")]
    format: Format,
}

pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    let model = args.said.model()?;
    let given = args.said.given(model.as_ref())?;
    let mut lists = Vec::new();
    for file in &args.files {
        match open(file)? {
            Opened::Report(report) => lists.push(of_report(&report)),
            Opened::Serving(report) => lists.push(of_serving(&report)),
            Opened::Comparison(found) => lists.push(of_comparison(&found)),
            Opened::Foreign(results) => {
                lists.extend(results.iter().map(|result| of_foreign(result, &given, args.engine.as_deref())));
            }
        }
    }
    print_result(lists.as_slice(), args.format)?;
    let invalid = lists.iter().any(|list| list.verdict() == ChecklistVerdict::Invalid);
    Ok(if invalid { Outcome::SomeCellsFailed } else { Outcome::Complete })
}
