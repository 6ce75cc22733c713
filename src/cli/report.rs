//! `hbmark report`.

use std::path::PathBuf;

use anyhow::{Context, bail, ensure};
use clap::Args as ClapArgs;

use super::import::{OverrideArgs, name_of};
use super::ladder::{assert_same, device_of, same_machine};
use super::{Outcome, print, print_result};
use hbmark_core::result::Report;
use hbmark_fleet::result::FleetReport;
use hbmark_report::analysis::import::{self, Imported};
use hbmark_report::analysis::{Collection, FailOn, Opened, open, opened};
use hbmark_report::output::{External, Format, Kind, page, parquet};

#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Examples:\n  hbmark report results/1b/result.json --format md\n  hbmark report results/sweep/serve.json --format html > sweep.html\n  hbmark report results/ --format csv > all.csv\n  hbmark report results/ --parquet all.parquet\n  hbmark report results/8b/result.json --format html --external vllm.json --model Llama-3.1-8B --gpu h100-sxm --dtype bf16 > page.html"
)]
pub struct Args {
    /// A saved result of any kind: of run, predict, serve, compare or fleet, or of a program that `hbmark import` reads; or a folder, of whose
    /// results of run, predict and serve each cell and each point is a row.
    #[arg(value_name = "FILE|FOLDER")]
    file: PathBuf,
    /// What to print on stdout.
    #[arg(long, value_enum, default_value = "table")]
    format: Format,
    /// Write the rows of --format csv to this Parquet file, with types, and print nothing else.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["format", "external"])]
    parquet: Option<PathBuf>,
    /// Exit with 1 when one of these holds.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "CONDITION")]
    fail_on: Vec<FailOn>,
    /// A result of another program, drawn on the roofline of the page (--format html).
    #[arg(long, value_name = "FILE", help_heading = "Other programs")]
    external: Vec<PathBuf>,
    /// Assert that the external results ran this model on this device; --model and --gpu take precedence.
    #[arg(long, requires = "external", help_heading = "Other programs")]
    same: bool,
    #[command(flatten, next_help_heading = "Other programs")]
    said: OverrideArgs,
}

/// What a saved serving result can show, and what not.
const UNSIGNED_SERVING: &str = "read from a file: counts, latencies and objectives are recomputed from its requests where it keeps \
     them, rates and gates are its own, and their origin is not verified";

pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    let page_asked = args.format == Format::Html;
    ensure!(
        args.external.is_empty() || page_asked,
        "--external is drawn on the roofline of the page: add --format html (`hbmark import` prints its rows)"
    );
    if args.file.is_dir() {
        return folder(args);
    }
    if FleetReport::is_one(&args.file) {
        return fleet(args);
    }
    let opened = open(&args.file)?;
    let model = args.said.model()?;
    let given = args.said.given(model.as_ref())?;
    let failed = super::tell_failures(&opened, &args.fail_on, &given)?;
    let outcome = if failed { Outcome::SomeCellsFailed } else { Outcome::Complete };
    let kind = opened.kind();
    // Formats that programs read stay as they were saved.
    let for_people = args.format.is_for_people();
    let mut report = match opened {
        Opened::Report(report) => report,
        other => {
            ensure!(
                args.external.is_empty(),
                "{kind} has no roofline to draw --external on; give a run or a prediction"
            );
            match other {
                Opened::Serving(mut report) => {
                    if for_people {
                        report.warnings.push(UNSIGNED_SERVING.to_owned());
                    }
                    show(&*report, args)?;
                }
                Opened::Comparison(found) => show(&*found, args)?,
                Opened::Foreign(results) => {
                    let placed: Vec<Imported> =
                        results.into_iter().map(|r| Imported::new(r, &given)).collect();
                    show(placed.as_slice(), args)?;
                }
                Opened::Report(_) => unreachable!("matched above"),
            }
            return Ok(outcome);
        }
    };
    if for_people {
        report.warnings.push(opened::unsigned(report.kind).to_owned());
    }
    if args.external.is_empty() {
        show(&*report, args)?;
    } else {
        print(&page(&report, &externals(args, &report)?))?;
    }
    Ok(outcome)
}

/// Prints a result, or writes its rows to a file.
fn show<K: Kind + ?Sized>(result: &K, args: &Args) -> anyhow::Result<()> {
    let Some(file) = &args.parquet else { return print_result(result, args.format) };
    let rows = parquet(&result.document())
        .context("this result has no table of raw numbers; those of run, predict and serve have one, and folders of them")?;
    std::fs::write(file, rows).with_context(|| format!("cannot write {}", file.display()))
}

/// Prints all results of a folder.
fn folder(args: &Args) -> anyhow::Result<Outcome> {
    ensure!(
        args.external.is_empty() && args.fail_on.is_empty(),
        "{} is a folder: --external and --fail-on are for one result, give its file",
        args.file.display()
    );
    show(&Collection::read(&args.file)?, args)?;
    Ok(Outcome::Complete)
}

/// Prints a saved report of a fleet.
fn fleet(args: &Args) -> anyhow::Result<Outcome> {
    ensure!(
        args.external.is_empty() && args.fail_on.is_empty(),
        "a fleet has no roofline and no --fail-on: `hbmark fleet report` ends with 1 when it finds something"
    );
    show(&FleetReport::read(&args.file)?, args)?;
    Ok(Outcome::Complete)
}

/// The rows that can be drawn on the roofline of the report.
fn externals(args: &Args, report: &Report) -> anyhow::Result<Vec<External>> {
    let opened = args.said.model()?;
    let mut given = args.said.given(opened.as_ref())?;
    let device = device_of(report);
    if args.same {
        assert_same(&mut given, report, device.as_ref(), &args.file)?;
    }
    let mut found = Vec::new();
    for file in &args.external {
        let (mut placed, mut refused) = (0, Vec::new());
        for result in opened::rows(file)? {
            for row in &result.rows {
                match import::place(row, result.format, &given).placed() {
                    Ok(placement) => {
                        if !args.same {
                            same_machine(report, &placement)?;
                        }
                        placed += 1;
                        found.push(External {
                            file: name_of(file, &args.external),
                            label: row.label.clone(),
                            cell: placement.cell,
                        });
                    }
                    Err(why) => refused.push(format!("{}: {why}", row.label)),
                }
            }
        }
        if placed == 0 {
            bail!(
                "no row of {} can be drawn on the roofline: {}",
                file.display(),
                refused[..refused.len().min(3)].join("; ")
            );
        }
        for why in refused {
            super::say(&format!("left out {}: {why}", name_of(file, &args.external)));
        }
    }
    Ok(found)
}
