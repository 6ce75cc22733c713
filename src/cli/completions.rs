//! `hbmark completions`.

use clap::{Args as ClapArgs, CommandFactory};
use clap_complete::Shell;

use super::{Cli, Outcome, print};

#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Example:\n  hbmark completions bash > ~/.local/share/bash-completion/completions/hbmark"
)]
pub struct Args {
    /// The shell.
    shell: Shell,
}

pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "hbmark", &mut script);
    print(&String::from_utf8_lossy(&script))?;
    Ok(Outcome::Complete)
}
