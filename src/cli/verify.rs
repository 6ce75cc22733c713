//! `hbmark verify`.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args as ClapArgs;
use serde::Serialize;

use super::shared_args::DeviceArgs;
use super::{Outcome, print};
use crate::machine::environment;
use crate::run::verify::Check;
use hbmark_core::result::Environment;

#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Examples:\n  hbmark verify --device cuda\n  hbmark verify --device cuda --output verify.json\n  hbmark verify --client"
)]
pub struct Args {
    #[command(flatten)]
    device: DeviceArgs,
    /// Check the HTTP client instead: its time stamps against those of a scripted server on this machine, at 1, 100 and 1,000 streams.
    #[arg(long, conflicts_with_all = ["device", "threads", "quick"])]
    client: bool,
    /// Check the native engine with fewer samples, in less time.
    #[arg(long)]
    quick: bool,
    /// text or json.
    #[arg(long, default_value = "text", value_parser = ["text", "json"])]
    format: String,
    /// Also write the checks, the machine and the revision into this file: JSON where its name ends in .json, text otherwise.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// What is kept of a verification.
#[derive(Debug, Serialize)]
struct Kept<'a> {
    command: String,
    finished_at: String,
    device: String,
    passed: usize,
    failed: usize,
    checks: &'a [Check],
    environment: Environment,
}

/// One check on one line.
pub(super) fn line(check: &Check) -> String {
    let verdict = if check.passed { "PASS" } else { "FAIL" };
    format!("{verdict}  {:<17} {:<44} {}", check.area, check.name, check.detail)
}

pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    crate::engine::threads::limit(args.device.threads.map(|t| t as usize));
    let device = args.device.choice()?;
    if let Some(file) = &args.output {
        // Before minutes of checks, and not after them.
        if let Some(folder) = file.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            std::fs::create_dir_all(folder)
                .with_context(|| format!("cannot create the folder of {}", file.display()))?;
        }
        crate::machine::atomic_file::check_writable(file)?;
    }
    let json = args.format == "json";
    let mut broken = None;
    let mut tell = |check: &Check| {
        if !json {
            // Checked to the end all the same: the file may be what counts.
            broken = broken.take().or_else(|| print(&line(check)).err());
        }
    };
    let checks = if args.client {
        crate::run::verify::client::verify(&mut tell)
    } else {
        crate::run::verify::verify(device, args.quick, &mut tell)
    };
    let failed = checks.iter().filter(|c| !c.passed).count();
    let kept = Kept {
        command: super::benchmark::command_line(),
        finished_at: crate::machine::clock::now_utc(),
        device: device.to_string(),
        passed: checks.len() - failed,
        failed,
        checks: &checks,
        environment: environment::collect(device.gpu()),
    };
    let saved = args.output.as_ref().map(|file| kept.save(file).map(|()| file.clone()));
    let rest = if json { serde_json::to_string_pretty(&checks)? } else { format!("\n{}", kept.sum()) };
    let printed = broken.map_or_else(|| print(&rest), Err);
    super::conclude(printed, saved)??;
    Ok(if failed == 0 { Outcome::Complete } else { Outcome::SomeCellsFailed })
}

impl Kept<'_> {
    fn sum(&self) -> String {
        let count = self.checks.len();
        format!("{count} checks on {}: {} passed, {} failed", self.device, self.passed, self.failed)
    }

    fn save(&self, file: &Path) -> anyhow::Result<()> {
        let as_json = file.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json"));
        let text = if as_json { serde_json::to_string_pretty(self)? } else { self.text() };
        Ok(crate::machine::atomic_file::write_atomic(file, &text)?)
    }

    fn text(&self) -> String {
        let product = self.environment.product(true);
        let revision = self.environment.build.git_revision.as_deref().unwrap_or("unknown");
        let mut text = format!(
            "{}\n{} · {product}\nrevision {revision} · {}\n\n",
            self.command, self.device, self.finished_at
        );
        for check in self.checks {
            text.push_str(&line(check));
            text.push('\n');
        }
        text.push('\n');
        text.push_str(&self.sum());
        text.push('\n');
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hbmark_report::samples;

    #[test]
    fn what_is_kept_says_what_ran_where_and_each_verdict() {
        let check = |name: &str, passed| Check {
            area: "timer",
            name: name.into(),
            passed,
            detail: "wanted 1, found 2".into(),
        };
        let checks = [check("a clock", true), check("a spin", false)];
        let kept = Kept {
            command: "hbmark verify".into(),
            finished_at: "2026-01-02T03:04:05Z".into(),
            device: "cuda:0".into(),
            passed: 1,
            failed: 1,
            checks: &checks,
            environment: samples::report().environment,
        };
        let text = kept.text();
        assert!(text.starts_with("hbmark verify\ncuda:0 · "), "{text}");
        assert!(text.contains("2026-01-02T03:04:05Z"), "{text}");
        assert!(text.contains("\nFAIL  timer             a spin "), "{text}");
        assert!(text.ends_with("\n2 checks on cuda:0: 1 passed, 1 failed\n"), "{text}");
    }
}
