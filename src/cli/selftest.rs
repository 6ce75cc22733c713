//! `hbmark selftest`.

use clap::Args as ClapArgs;

use super::{Outcome, print, print_json};

#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Example:\n  hbmark selftest && hbmark verify\n\nExit code 1 when a row fails. The rows need no device and are the same on every machine."
)]
pub struct Args {
    /// text or json.
    #[arg(long, default_value = "text", value_parser = ["text", "json"])]
    format: String,
}

pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    let json = args.format == "json";
    let mut broken = None;
    let checks = crate::run::selftest::selftest(&mut |check| {
        if !json {
            broken = broken.take().or(print(&super::verify::line(check)).err());
        }
    });
    if let Some(error) = broken {
        return Err(error);
    }
    let failed = checks.iter().filter(|c| !c.passed).count();
    if json {
        print_json(&checks)?;
    } else {
        print(&format!("\n{} checks: {} passed, {failed} failed", checks.len(), checks.len() - failed))?;
    }
    Ok(if failed == 0 { Outcome::Complete } else { Outcome::SomeCellsFailed })
}
