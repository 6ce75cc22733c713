//! `hbmark report`.

use std::path::PathBuf;

use anyhow::Context;
use clap::Args as ClapArgs;

use super::{Outcome, print, stdout_color};
use crate::report::{Format, json, render, serving};

#[derive(Debug, ClapArgs)]
#[command(after_help = "Example:\n  hbmark report results/1b/result.json --format md")]
pub struct Args {
    /// A result.json written by `run --out`, a serve.json by `serve --out`, or the output of `--format json`.
    file: PathBuf,
    /// What to print on stdout.
    #[arg(long, value_enum, default_value = "table")]
    format: Format,
}

/// What a saved file can show, and what not.
const UNSIGNED: &str =
    "read from a file: every number is recomputed from its raw samples, and nothing proves who took them";

pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    if let Some(report) = serving::read(&args.file)? {
        let format = args
            .format
            .as_text()
            .context("a serve result has no page yet: ask for table, json, csv or md")?;
        print(&serving::render(&report, format)?)?;
        return Ok(Outcome::Complete);
    }
    let mut report = json::read(&args.file)?;
    crate::judge::recompute(&mut report);
    // A person is told; what a program reads again stays what it was.
    if !matches!(args.format, Format::Json | Format::Csv) {
        report.warnings.push(UNSIGNED.to_owned());
    }
    print(&render(&report, args.format, stdout_color())?)?;
    Ok(Outcome::Complete)
}
