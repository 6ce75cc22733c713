//! `hbmark glossary`.

use anyhow::Context;
use clap::Args as ClapArgs;

use super::{Outcome, print_result};
use hbmark_report::output::{Format, Glossary};

#[derive(Debug, ClapArgs)]
#[command(after_help = "Examples:\n  hbmark glossary\n  hbmark glossary canary")]
pub struct Args {
    /// Only what has to do with this word.
    word: Option<String>,
    /// What to print on stdout.
    #[arg(long, value_enum, default_value = "table")]
    format: Format,
}

pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    let found = match &args.word {
        None => Glossary::whole(),
        Some(word) => Glossary::of(word)
            .with_context(|| format!("the glossary has no `{word}`; `hbmark glossary` prints all of it"))?,
    };
    print_result(&found, args.format)?;
    Ok(Outcome::Complete)
}
