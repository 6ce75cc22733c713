//! `hbmark glossary`.

use clap::Args as ClapArgs;

use super::{Outcome, print_result};
use hbmark_report::output::{Format, Glossary};

#[derive(Debug, ClapArgs)]
#[command(after_help = "Example:\n  hbmark glossary")]
pub struct Args {
    /// text, md or json.
    #[arg(long, value_enum, default_value = "table")]
    format: Format,
}

pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    print_result(&Glossary, args.format)?;
    Ok(Outcome::Complete)
}
