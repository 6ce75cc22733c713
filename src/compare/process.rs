//! A side as a fresh process of this very program.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use super::{CompareError, Runner, Side};
use crate::report::{Report, json};
use crate::rig::LAUNCHED_BY;

/// The arguments of `run` for each side, and where results go.
#[derive(Debug, Clone)]
pub struct Launcher {
    pub program: PathBuf,
    /// After `run`, without `--format` and `--out`.
    pub a: Vec<String>,
    pub b: Vec<String>,
    /// A folder for the results of single launches.
    pub folder: PathBuf,
}

/// Starts a process a launch.
#[derive(Debug)]
pub struct Processes {
    launcher: Launcher,
    launched: usize,
}

impl Processes {
    #[must_use]
    pub fn new(launcher: Launcher) -> Self {
        Self { launcher, launched: 0 }
    }
}

impl Runner for Processes {
    fn run(&mut self, side: Side, launch: &str) -> Result<Report, CompareError> {
        self.launched += 1;
        let name = format!("{:03}-{}", self.launched, side.letter().to_ascii_lowercase());
        let folder = self.launcher.folder.join(name);
        let arguments = if side == Side::A { &self.launcher.a } else { &self.launcher.b };
        let output = Command::new(&self.launcher.program)
            .arg("run")
            .args(arguments)
            .args(["--format", "json", "--out"])
            .arg(&folder)
            .env(LAUNCHED_BY, std::process::id().to_string())
            .stdin(Stdio::null())
            // The same result is in the folder.
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .output()
            .map_err(|source| CompareError::Start { program: self.launcher.program.clone(), source })?;
        // 1 says that some cells failed; the result is there and says which.
        if !matches!(output.status.code(), Some(0 | 1)) {
            return Err(CompareError::Launch {
                side: side.letter(),
                launch: launch.to_owned(),
                ended: ended(output.status),
                message: last_line(&output.stderr),
            });
        }
        read(&folder)
    }
}

fn read(folder: &Path) -> Result<Report, CompareError> {
    Ok(json::read(&folder.join("result.json"))?)
}

fn ended(status: ExitStatus) -> String {
    status.to_string()
}

fn last_line(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    let line = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
    line.trim_start_matches("error: ").to_owned()
}
