//! `hbmark explain`.

use std::path::PathBuf;

use clap::Args as ClapArgs;

use super::{Outcome, print};
use crate::insight;
use crate::report::{TextFormat, findings, json};

#[derive(Debug, ClapArgs)]
#[command(after_help = "Example:\n  hbmark run --out results/1b && hbmark explain results/1b/result.json")]
pub struct Args {
    /// A result.json written by `run --out`.
    file: PathBuf,
    /// What to print on stdout.
    #[arg(long, value_enum, default_value = "table")]
    format: TextFormat,
}

pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    let mut report = json::read(&args.file)?;
    crate::judge::recompute(&mut report);
    print(&findings::render(&insight::explain(&report), args.format)?)?;
    Ok(Outcome::Complete)
}
