//! `hbmark man`.

use std::path::PathBuf;

use anyhow::Context;
use clap::{Args as ClapArgs, CommandFactory};

use super::{Cli, Outcome, print};

#[derive(Debug, ClapArgs)]
#[command(after_help = "Example:\n  hbmark man ~/.local/share/man/man1 && man hbmark-run")]
pub struct Args {
    /// The folder; it is made where it is missing.
    dir: PathBuf,
}

pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    let dir = &args.dir;
    std::fs::create_dir_all(dir)
        .and_then(|()| clap_mangen::generate_to(Cli::command(), dir))
        .with_context(|| format!("cannot write into {}", dir.display()))?;
    print(&format!("{}\n", dir.join("hbmark.1").display()))?;
    Ok(Outcome::Complete)
}
