//! `hbmark glossary`.

use clap::Args as ClapArgs;

use super::{Outcome, print, print_json};
use hbmark_report::output::glossary;

#[derive(Debug, ClapArgs)]
#[command(after_help = "Example:\n  hbmark glossary")]
pub struct Args {
    /// text, md or json.
    #[arg(long, default_value = "text", value_parser = ["text", "md", "json"])]
    format: String,
}

pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    match args.format.as_str() {
        "json" => print_json(&glossary::entries())?,
        "md" => print(&glossary::markdown())?,
        _ => print(&glossary::text())?,
    }
    Ok(Outcome::Complete)
}
