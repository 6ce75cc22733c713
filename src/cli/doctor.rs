//! `hbmark doctor`.

use clap::Args as ClapArgs;

use super::shared_args::AccessArgs;
use super::{Outcome, print, print_json, print_result, stdout_color};
use crate::machine::{doctor, environment};
use hbmark_client::probe::probe;
use hbmark_report::output::Format;

#[derive(Debug, ClapArgs)]
#[command(after_help = "Examples:\n  hbmark doctor\n  hbmark doctor --url http://localhost:8000")]
pub struct Args {
    /// GPU index to look at.
    #[arg(long, default_value_t = 0)]
    gpu: u32,
    /// Look at the server at this URL instead: what it is, what it serves, and what of it can be measured.
    #[arg(long, visible_alias = "base-url", conflicts_with = "gpu")]
    url: Option<String>,
    #[command(flatten)]
    access: AccessArgs,
    /// text or json.
    #[arg(long, default_value = "text", value_parser = ["text", "json"])]
    format: String,
}

pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    if let Some(url) = &args.url {
        return server(args, url);
    }
    let environment = environment::collect(Some(args.gpu));
    let findings = doctor::examine(&environment, &doctor::Probes::collect());
    if args.format == "json" {
        print_json(&findings)?;
    } else {
        print(&doctor::render(&findings, stdout_color()))?;
    }
    Ok(Outcome::Complete)
}

fn server(args: &Args, url: &str) -> anyhow::Result<Outcome> {
    let found = probe(&args.access.access()?.target(url)?, None);
    if args.format == "json" {
        print_json(&found)?;
    } else {
        print_result(&found, Format::Table)?;
    }
    let speaks = found.connects() && found.models_problem().is_none();
    Ok(if speaks { Outcome::Complete } else { Outcome::SomeCellsFailed })
}
