//! `hbmark doctor`.

use clap::Args as ClapArgs;

use super::{Outcome, print, print_json, stdout_color};
use crate::machine::{doctor, environment};

#[derive(Debug, ClapArgs)]
#[command(after_help = "Example:\n  hbmark doctor")]
pub struct Args {
    /// GPU index to look at.
    #[arg(long, default_value_t = 0)]
    gpu: u32,
    /// text or json.
    #[arg(long, default_value = "text", value_parser = ["text", "json"])]
    format: String,
}

pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    let environment = environment::collect(Some(args.gpu));
    let findings = doctor::examine(&environment, &doctor::Probes::collect());
    if args.format == "json" {
        print_json(&findings)?;
    } else {
        print(&doctor::render(&findings, stdout_color()))?;
    }
    Ok(Outcome::Complete)
}
