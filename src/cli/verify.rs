//! `hbmark verify`.

use clap::Args as ClapArgs;

use super::axes::DeviceArgs;
use super::{Outcome, print, print_json};
use crate::verify::Check;

#[derive(Debug, ClapArgs)]
#[command(after_help = "Example:\n  hbmark verify --device cuda")]
pub struct Args {
    #[command(flatten)]
    device: DeviceArgs,
    /// text or json.
    #[arg(long, default_value = "text", value_parser = ["text", "json"])]
    format: String,
}

/// One check on one line.
pub(super) fn line(check: &Check) -> String {
    let verdict = if check.passed { "PASS" } else { "FAIL" };
    format!("{verdict}  {:<17} {:<44} {}", check.area, check.name, check.detail)
}

pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    crate::threads::limit(args.device.threads.map(|t| t as usize));
    let device = args.device.choice()?;
    let json = args.format == "json";
    let mut broken = None;
    let checks = crate::verify::verify(device, &mut |check| {
        if !json {
            broken = broken.take().or(print(&line(check)).err());
        }
    });
    if let Some(error) = broken {
        return Err(error);
    }
    let failed = checks.iter().filter(|c| !c.passed).count();
    if json {
        print_json(&checks)?;
    } else {
        print(&format!(
            "\n{} checks on {device}: {} passed, {failed} failed",
            checks.len(),
            checks.len() - failed
        ))?;
    }
    Ok(if failed == 0 { Outcome::Complete } else { Outcome::SomeCellsFailed })
}
