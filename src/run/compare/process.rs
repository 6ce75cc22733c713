//! A side as a fresh process of this very program.

use std::fs::File;
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use super::{CompareError, Launch, Runner, Side, SideResult};
use crate::worker::child::LAUNCHED_BY;
use crate::worker::signals::Interrupts;
use hbmark_core::result::{ReportError, saved, serving};
use hbmark_traffic::workload::splitmix64;

/// The command of the launches, its arguments for each side, and where results go.
#[derive(Debug, Clone)]
pub struct Launcher {
    pub program: PathBuf,
    pub command: Launched,
    /// After the command, without `--format` and `--out`.
    pub a: Vec<String>,
    pub b: Vec<String>,
    /// A folder for the results of single launches, where they are kept.
    pub folder: Option<PathBuf>,
}

/// What is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launched {
    /// `hbmark run`, with the same seed every time.
    Run,
    /// `hbmark serve`: the requests of a round are those of its seed, and no launch finds those of another in a prefix cache.
    Serve { seed: u64, salted: bool },
}

impl Launched {
    fn name(self) -> &'static str {
        match self {
            Self::Run => "run",
            Self::Serve { .. } => "serve",
        }
    }

    /// What differs from launch to launch.
    fn arguments(self, launched: usize, round: usize) -> Vec<String> {
        match self {
            Self::Run => Vec::new(),
            Self::Serve { seed, salted } => {
                let of_round = format!("--seed={}", splitmix64(seed, round as u64));
                let salt = salted.then(|| format!("--cache-salt={seed}-{launched}"));
                [of_round].into_iter().chain(salt).collect()
            }
        }
    }

    fn file(self) -> &'static str {
        match self {
            Self::Run => "result.json",
            Self::Serve { .. } => "serve.json",
        }
    }

    fn read(self, path: &Path) -> Result<SideResult, CompareError> {
        Ok(match self {
            Self::Run => SideResult::Steps(Box::new(saved::read(path)?)),
            Self::Serve { .. } => SideResult::Served(Box::new(
                serving::read(path)?.ok_or_else(|| ReportError::NotOurs { path: path.to_path_buf() })?,
            )),
        })
    }

    fn parse(self, text: &str) -> Result<SideResult, CompareError> {
        Ok(match self {
            Self::Run => SideResult::Steps(Box::new(saved::parse(text)?)),
            Self::Serve { .. } => SideResult::Served(Box::new(serving::parse(text)?)),
        })
    }
}

/// Starts a process a launch.
#[derive(Debug)]
pub struct Processes {
    launcher: Launcher,
    launched: usize,
    interrupts: Interrupts,
    running: Running,
}

/// The running process, until it was waited for.
type Running = Arc<Mutex<Option<Child>>>;

impl Processes {
    /// Processes of which the running one is terminated by a signal to this one.
    pub fn new(launcher: Launcher, interrupts: Interrupts) -> Self {
        let running = Running::default();
        let child = Arc::clone(&running);
        interrupts.on_first(move |_| terminate(&child));
        Self { launcher, launched: 0, interrupts, running }
    }

    fn stopped(&self) -> Option<CompareError> {
        self.interrupts.signal().map(|signal| CompareError::Interrupted { signal })
    }

    /// Starts a process and waits for it: how it ended, and its stderr.
    fn wait_for(&self, command: &mut Command) -> std::io::Result<(ExitStatus, Vec<u8>)> {
        let mut child = command.spawn()?;
        let stderr = child.stderr.take();
        *lock(&self.running) = Some(child);
        // A signal that came before there was a child.
        if self.interrupts.signal().is_some() {
            terminate(&self.running);
        }
        let mut messages = Vec::new();
        let read = stderr.map_or(Ok(0), |mut stderr| stderr.read_to_end(&mut messages));
        // No signal from here on: another process may soon have its number.
        let child = lock(&self.running).take();
        let status = child.map_or_else(|| Err(std::io::ErrorKind::NotFound.into()), |mut child| child.wait());
        read?;
        Ok((status?, messages))
    }
}

fn lock(running: &Mutex<Option<Child>>) -> std::sync::MutexGuard<'_, Option<Child>> {
    running.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Terminates the running process.
fn terminate(running: &Mutex<Option<Child>>) {
    if let Some(child) = lock(running).as_ref() {
        let _ = rustix::process::kill_process(
            rustix::process::Pid::from_child(child),
            rustix::process::Signal::TERM,
        );
    }
}

impl Runner for Processes {
    fn run(&mut self, launch: &Launch) -> Result<SideResult, CompareError> {
        use std::os::unix::process::CommandExt;
        if let Some(stopped) = self.stopped() {
            return Err(stopped);
        }
        self.launched += 1;
        let (side, kind) = (launch.side, self.launcher.command);
        let folder = self.launcher.folder.as_ref().map(|folder| folder.join(name(self.launched, side)));
        let program = || self.launcher.program.clone();
        let start = |source| CompareError::Start { program: program(), source };
        // A file without a name: whatever ends this process, nothing is left of it.
        let mut printed = folder.is_none().then(tempfile::tempfile).transpose().map_err(start)?;
        let arguments = if side == Side::A { &self.launcher.a } else { &self.launcher.b };
        let mut command = Command::new(&self.launcher.program);
        command
            .arg(kind.name())
            .args(arguments)
            .args(kind.arguments(self.launched, launch.round))
            .args(["--format", "json"])
            .env(LAUNCHED_BY, std::process::id().to_string())
            .stdin(Stdio::null())
            // Where there is a folder, the same result is in it.
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            // Ctrl-C at a terminal is for this process alone.
            .process_group(0);
        if let Some(folder) = &folder {
            command.arg("--out").arg(folder);
        }
        if let Some(printed) = &printed {
            command.stdout(printed.try_clone().map_err(start)?);
        }
        let (status, messages) = self.wait_for(&mut command).map_err(start)?;
        // 1: some cells failed, and the result names them.
        if !matches!(status.code(), Some(0 | 1)) {
            if let Some(stopped) = self.stopped() {
                // Half a launch, which is not resumed.
                if let Some(folder) = &folder {
                    let _ = std::fs::remove_dir_all(folder);
                }
                return Err(stopped);
            }
            return Err(CompareError::Launch {
                side: side.letter(),
                launch: launch.title.clone(),
                ended: status.to_string(),
                message: last_line(&messages),
            });
        }
        match (folder, &mut printed) {
            (Some(folder), _) => kind.read(&folder.join(kind.file())),
            (None, Some(printed)) => kind.parse(&read(printed).map_err(start)?),
            (None, None) => unreachable!("without a folder the result is printed"),
        }
    }
}

/// What a launch printed.
fn read(printed: &mut File) -> std::io::Result<String> {
    let mut text = String::new();
    printed.rewind()?;
    printed.read_to_string(&mut text)?;
    Ok(text)
}

/// The folder of a launch.
fn name(launched: usize, side: Side) -> String {
    format!("{launched:03}-{}", side.letter().to_ascii_lowercase())
}

/// Removes what the launches of an earlier comparison left in a folder, and nothing else: a comparison is not resumed.
pub fn clear(folder: &Path) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let ours = entry.file_name().to_str().is_some_and(|found| {
            let number = found.get(..found.len().saturating_sub(2)).and_then(|digits| digits.parse().ok());
            number.is_some_and(|number| [Side::A, Side::B].iter().any(|side| found == name(number, *side)))
        });
        if ours && entry.file_type()?.is_dir() {
            std::fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

fn last_line(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    let line = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
    line.trim_start_matches("error: ").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_launches_left_is_cleared() {
        let folder = tempfile::tempdir().unwrap();
        let kept = ["1-a", "001-c", "notes", "0001-a", "é-a", "a"];
        for name in ["001-a", "012-b", "1000-a"].iter().chain(&kept) {
            std::fs::create_dir(folder.path().join(name)).unwrap();
            std::fs::write(folder.path().join(name).join("journal.jsonl"), "x").unwrap();
        }
        std::fs::write(folder.path().join("002-a"), "a file").unwrap();
        clear(folder.path()).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), kept.len() + 1);
        assert!(kept.iter().all(|name| folder.path().join(name).is_dir()));
    }
}
