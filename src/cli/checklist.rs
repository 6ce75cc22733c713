//! `hbmark checklist`.

use std::path::{Path, PathBuf};

use clap::Args as ClapArgs;

use super::{Outcome, print_result};
use hbmark_core::result::{ReportError, saved};
use hbmark_report::analysis::{Checklist, import};
use hbmark_report::output::Format;

#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Examples:\n  hbmark checklist results/1b/result.json\n  hbmark checklist vllm-result.json\n\nExit code 1 when a result is INVALID."
)]
pub struct Args {
    /// Results: of hbmark, or of any program that `hbmark import` reads.
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// What to print on stdout.
    #[arg(long, value_enum, default_value = "table")]
    format: Format,
}

pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    let mut lists = Vec::new();
    for file in &args.files {
        lists.extend(of_file(file)?);
    }
    print_result(lists.as_slice(), args.format)?;
    Ok(if lists.iter().all(|list| list.valid) { Outcome::Complete } else { Outcome::SomeCellsFailed })
}

/// A file of our own if it has our schema, a foreign one otherwise.
fn of_file(file: &Path) -> anyhow::Result<Vec<Checklist>> {
    match saved::read(file) {
        Ok(mut report) => {
            hbmark_report::analysis::judge::recompute(&mut report);
            Ok(vec![hbmark_report::analysis::of_report(&report)])
        }
        // No schema version of ours, or no JSON at all: another program's.
        Err(ReportError::NotOurs { .. } | ReportError::Malformed { .. } | ReportError::Json(_)) => {
            Ok(import::read(file)?.iter().map(hbmark_report::analysis::of_foreign).collect())
        }
        Err(other) => Err(other.into()),
    }
}
