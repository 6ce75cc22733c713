//! `hbmark fleet report`.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, ensure};
use clap::Args as ClapArgs;

use crate::cli::compare::parse_percent;
use crate::cli::{Outcome, conclude, one_line, print, print_result, save};
use crate::machine::atomic_file::write_atomic;
use hbmark_fleet::result::{FleetReport, Level, Settings};
use hbmark_fleet::verdict::verdict;
use hbmark_fleet::{export, folder};
use hbmark_report::output::Format;

#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Examples:\n  hbmark fleet report /shared/fleet/monday\n  hbmark fleet report monday monday-again --against sunday --out report\n  hbmark fleet report monday --nagios\n  hbmark fleet report monday --prometheus /var/lib/node_exporter/textfile/hbmark.prom --junit fleet.xml\n\nA GPU is SLOW when it is more than --margin below the fleet's median, the test says so after Holm's correction over all tests of the report, and a confirming run (`fleet plan --only-suspects`) agrees; without that run it is SUSPECT.\n\nExit codes: 0 no finding, 1 findings. With --nagios 0 OK, 1 WARNING (suspects, unsteady GPUs, changes), 2 CRITICAL (slow, failed, wrong), 3 UNKNOWN (missing, too few, or no report)."
)]
pub struct Args {
    /// Folders of results, of the first and of the confirming run, in any order.
    #[arg(required = true, value_name = "DIR")]
    folders: Vec<PathBuf>,
    /// A report of another day (fleet-report.json), or the folder of its results; may be given again for a trend.
    #[arg(long, value_name = "REPORT|DIR")]
    against: Vec<PathBuf>,
    /// What a GPU must be slower by before it is named.
    #[arg(long, value_name = "PERCENT", default_value = "2%", value_parser = parse_percent)]
    margin: f64,
    /// Family-wise false-positive rate: the chance of naming any GPU in a fleet without faults.
    #[arg(long, value_name = "PERCENT", default_value = "5%", value_parser = parse_percent)]
    alpha: f64,
    /// Read bandwidth below this share of the data sheet is too low, whatever the fleet does.
    #[arg(long, value_name = "PERCENT", default_value = "75%", value_parser = parse_percent)]
    datasheet_share: f64,
    /// Fresh processes that a GPU needs.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(2..=1000))]
    processes: u32,
    /// What to print on stdout.
    #[arg(short = 'o', long, value_enum, default_value = "table")]
    format: Format,
    /// Write the report as JSON (fleet-report.json), CSV, Markdown and HTML into this folder.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Print one line for Nagios, and end with its exit codes.
    #[arg(long)]
    nagios: bool,
    /// Write gauges for the textfile collector of node_exporter.
    #[arg(long, value_name = "FILE")]
    prometheus: Option<PathBuf>,
    /// Write JUnit XML: one case a GPU and check.
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// Write the findings as JSON lines.
    #[arg(long, value_name = "FILE")]
    json_lines: Option<PathBuf>,
}

pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    if !args.nagios {
        return judge(args);
    }
    // What asks as Nagios reads one line and the code, also where there is no report.
    judge(args).or_else(|error| {
        print(&format!("HBMARK FLEET UNKNOWN: {}", one_line(&error)))?;
        Ok(Outcome::Nagios(Level::Unknown.nagios()))
    })
}

fn judge(args: &Args) -> anyhow::Result<Outcome> {
    ensure!(args.alpha > 0.0 && args.alpha < 0.5, "--alpha is a chance above 0 and below 50 %");
    ensure!(args.margin < 0.5, "--margin is below 50 %");
    let settings = Settings {
        margin: args.margin,
        alpha: args.alpha,
        processes: args.processes as usize,
        datasheet_share: args.datasheet_share,
    };
    let past =
        args.against.iter().map(|path| other_day(path, &settings)).collect::<anyhow::Result<Vec<_>>>()?;
    let reading = folder::read(&args.folders)?;
    ensure!(
        !reading.runs.is_empty() || !reading.manifests.is_empty(),
        "{} files, and neither a result of `hbmark fleet node` nor a manifest among them; name the folder of `hbmark fleet plan`",
        reading.files
    );
    let report = verdict(reading, &settings, &past);
    let saved = args.out.as_ref().map(|folder| save(&report, "fleet-report", folder));
    exports(args, &report)?;
    let printed =
        if args.nagios { print(&export::nagios(&report)) } else { print_result(&report, args.format) };
    conclude(printed, saved)??;
    let level = report.level();
    Ok(match (args.nagios, level) {
        (true, level) => Outcome::Nagios(level.nagios()),
        (false, Level::Ok) => Outcome::Complete,
        (false, _) => Outcome::SomeCellsFailed,
    })
}

fn exports(args: &Args, report: &FleetReport) -> anyhow::Result<()> {
    if let Some(path) = &args.prometheus {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        write_atomic(path, &export::prometheus(report, now))?;
    }
    if let Some(path) = &args.junit {
        write_atomic(path, &export::junit(report))?;
    }
    if let Some(path) = &args.json_lines {
        write_atomic(path, &export::json_lines(report))?;
    }
    Ok(())
}

/// A report of another day, made of its results where it was not saved.
fn other_day(path: &Path, settings: &Settings) -> anyhow::Result<FleetReport> {
    if path.is_dir() {
        let reading = folder::read(&[path.to_owned()])?;
        ensure!(!reading.runs.is_empty(), "{} holds no result", path.display());
        return Ok(verdict(reading, settings, &[]));
    }
    FleetReport::read(path).with_context(|| format!("cannot compare with {}", path.display()))
}
