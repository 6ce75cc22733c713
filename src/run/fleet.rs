//! One node of a fleet: a fresh `hbmark run` for each GPU and process, chosen by UUID.
//!
//! Enters: a manifest, the devices of this node, and its folder. Leaves: a folder for each finished run and a [`NodeRecord`]. A run is written into
//! `run-N.unfinished` and renamed when its result is there, so that what has a result is never lost or taken twice, whatever is killed; started
//! again, finished runs are left alone and unfinished ones go on.
//!
//! ```text
//! DIR/NODE/UUID/run-1/result.json    DIR/NODE/node.json
//! ```

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::machine::atomic_file::{FileError, sync_folder, write_atomic};
use crate::machine::placement::{FLEET_NODE, FLEET_TASK};
use crate::worker::child::LAUNCHED_BY;
use crate::worker::journal::FILE as JOURNAL;
use crate::worker::signals::Interrupts;
use hbmark_core::result::FleetTask;
use hbmark_fleet::folder::{NODE_FILE, NodeRecord, NodeRecordKind, TaskRecord};
use hbmark_fleet::plan::Plan;

/// How often a child is looked after; it measures meanwhile.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// A child that was asked to stop is killed after this.
const GRACE: Duration = Duration::from_secs(20);
/// The share of the plan's time limit after which children are asked to stop, so that the record is written before a scheduler kills all.
const TIME_SHARE: f64 = 0.95;
/// Of a child's messages the last bytes are kept.
const MAX_MESSAGES: usize = 16 << 10;
/// What else was begun in the place of a run and could not go on is kept beside it, so often.
const MAX_ABANDONED: u32 = 100;

/// A device of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeDevice {
    /// The GPU's UUID, or a name.
    pub name: String,
    pub slot: u32,
}

/// What one node does.
#[derive(Debug)]
pub struct NodeTask<'a> {
    pub program: PathBuf,
    /// `DIR/NODE`.
    pub folder: PathBuf,
    pub node: String,
    pub plan: &'a Plan,
    pub devices: Vec<NodeDevice>,
    /// The CPU engine runs in the place of GPUs.
    pub emulated: bool,
    pub interrupts: Interrupts,
}

/// Why a node's task could not begin.
#[derive(Debug, thiserror::Error)]
pub enum FleetNodeError {
    #[error("cannot create {path}: {source}")]
    Folder { path: PathBuf, source: std::io::Error },
    #[error("{path}: another `hbmark fleet node` of this node is at work; wait for it, or end it")]
    Locked { path: PathBuf },
    #[error(transparent)]
    Record(#[from] FileError),
}

/// Runs everything that is not finished, and returns what there is afterwards.
pub fn run_node(task: &NodeTask<'_>, tell: &(dyn Fn(&str) + Sync)) -> Result<NodeRecord, FleetNodeError> {
    let folder_error = |source| FleetNodeError::Folder { path: task.folder.clone(), source };
    std::fs::create_dir_all(&task.folder).map_err(folder_error)?;
    let path = task.folder.join(".hbmark.lock");
    let lock = std::fs::File::options().write(true).create(true).truncate(false).open(&path);
    let lock = lock.map_err(folder_error)?;
    if matches!(lock.try_lock(), Err(std::fs::TryLockError::WouldBlock)) {
        return Err(FleetNodeError::Locked { path });
    }
    let state = NodeState::new(task, tell);
    state.save()?;
    if task.plan.at_once {
        std::thread::scope(|scope| {
            for index in 0..task.devices.len() {
                let state = &state;
                scope.spawn(move || (1..=task.plan.processes).for_each(|process| state.run(index, process)));
            }
        });
    } else {
        // GPUs take turns, so that a drift of the node does not fall on the last of them.
        for process in 1..=task.plan.processes {
            (0..task.devices.len()).for_each(|index| state.run(index, process));
        }
    }
    state.save()?;
    Ok(state.record())
}

/// What is known so far.
struct NodeState<'a> {
    task: &'a NodeTask<'a>,
    tell: &'a (dyn Fn(&str) + Sync),
    deadline: Instant,
    /// Why runs of each device failed.
    failures: Mutex<Vec<Vec<String>>>,
}

impl<'a> NodeState<'a> {
    fn new(task: &'a NodeTask<'a>, tell: &'a (dyn Fn(&str) + Sync)) -> Self {
        let limit = Duration::from_secs(u64::from(task.plan.time_limit_minutes) * 60).mul_f64(TIME_SHARE);
        let failures = Mutex::new(vec![Vec::new(); task.devices.len()]);
        Self { task, tell, deadline: Instant::now() + limit, failures }
    }

    fn device_folder(&self, index: usize) -> PathBuf {
        self.task.folder.join(&self.task.devices[index].name)
    }

    /// The record of what lies on the disk now.
    fn record(&self) -> NodeRecord {
        let failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted = self.task.plan.processes;
        let tasks = self.task.devices.iter().enumerate().map(|(index, device)| TaskRecord {
            device: device.name.clone(),
            slot: device.slot,
            finished: (1..=wanted).map(|n| u32::from(is_finished(&self.device_folder(index), n))).sum(),
            wanted,
            failures: failures[index].clone(),
        });
        NodeRecord {
            schema_version: 1,
            kind: NodeRecordKind::FleetNode,
            node: self.task.node.clone(),
            plan: self.task.plan.digest(),
            at_once: self.task.plan.at_once,
            emulated: self.task.emulated,
            tasks: tasks.collect(),
        }
    }

    fn save(&self) -> Result<(), FileError> {
        let text = serde_json::to_string_pretty(&self.record()).expect("strings and numbers are JSON");
        write_atomic(&self.task.folder.join(NODE_FILE), &text)
    }

    /// One process of one device, where it is not finished.
    fn run(&self, index: usize, process: u32) {
        let folder = self.device_folder(index);
        if is_finished(&folder, process) || self.stopped() {
            return;
        }
        let name = format!("{} run {process}", self.task.devices[index].name);
        match self.finish(index, process, &folder) {
            Ok(()) => (self.tell)(&format!("{name}: done")),
            // It goes on where it was, when the node's task is started again.
            Err(_) if self.stopped() => (self.tell)(&format!("{name}: stopped, and not finished")),
            Err(why) => {
                (self.tell)(&format!("{name}: {why}"));
                let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
                failures[index].push(format!("run {process}: {why}"));
            }
        }
        // A full disk: what was not recorded is recorded at the end, or is missing in the report.
        if let Err(error) = self.save() {
            (self.tell)(&error.to_string());
        }
    }

    /// Whether this process was asked to stop, or its time is up.
    fn stopped(&self) -> bool {
        self.task.interrupts.signal().is_some() || Instant::now() >= self.deadline
    }

    /// Runs a process to its end and gives its folder the name of a finished one.
    fn finish(&self, index: usize, process: u32, folder: &Path) -> Result<(), String> {
        let unfinished = folder.join(format!("run-{process}.unfinished"));
        let said = |error: std::io::Error| format!("{}: {error}", unfinished.display());
        std::fs::create_dir_all(&unfinished).map_err(said)?;
        if !is_whole(&unfinished) {
            let mut resumes = unfinished.join(JOURNAL).exists();
            loop {
                let (status, message) = self.child(index, process, &unfinished, resumes).map_err(said)?;
                // 1: some cells failed, and the result names them.
                if is_whole(&unfinished) && matches!(status.code(), Some(0 | 1)) {
                    break;
                }
                if !resumes || self.stopped() {
                    return Err(format!("{status}: {message}"));
                }
                // Of another build, or damaged: kept aside, and begun anew.
                abandon(folder, process, &unfinished).map_err(said)?;
                std::fs::create_dir_all(&unfinished).map_err(said)?;
                resumes = false;
            }
        }
        std::fs::rename(&unfinished, folder.join(format!("run-{process}"))).map_err(said)?;
        sync_folder(folder);
        Ok(())
    }

    /// Starts a run and waits for it: how it ended, and its last line.
    fn child(
        &self,
        index: usize,
        process: u32,
        out: &Path,
        resumes: bool,
    ) -> std::io::Result<(ExitStatus, String)> {
        let NodeTask { program, plan, devices, emulated, .. } = self.task;
        let device = &devices[index];
        let at_once = if plan.at_once { devices.len() } else { 1 };
        let task = FleetTask {
            plan: plan.digest(),
            device: device.name.clone(),
            slot: Some(device.slot),
            process,
            at_once: u32::try_from(at_once).unwrap_or(u32::MAX),
            emulated: *emulated,
        };
        let mut command = Command::new(program);
        command.arg("run");
        if resumes {
            command.arg("--resume").arg(out);
        } else {
            command.args(&plan.arguments).arg("--fresh-ceilings");
            command.args(["--device", if *emulated { "cpu" } else { "cuda" }]).arg("--out").arg(out);
        }
        if !emulated {
            command.env("CUDA_VISIBLE_DEVICES", &device.name);
        }
        command
            .env(FLEET_TASK, serde_json::to_string(&task).expect("strings and numbers are JSON"))
            .env(FLEET_NODE, &self.task.node)
            .env(LAUNCHED_BY, std::process::id().to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            // Ctrl-C at a terminal is for this process alone.
            .process_group(0);
        // Of a run that was stopped, and not of this child, which may end without one.
        let _ = std::fs::remove_file(out.join("result.json"));
        let mut child = command.spawn()?;
        let stderr = child.stderr.take();
        let reader = std::thread::spawn(move || stderr.map(tail).unwrap_or_default());
        let status = self.wait(&mut child)?;
        let messages = reader.join().unwrap_or_default();
        // Best effort: a full disk has no room for it, and the last line is in the record.
        let _ = std::fs::write(out.join("log.txt"), &messages);
        let message =
            messages.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
        Ok((status, hbmark_core::input::plain(message).chars().take(400).collect()))
    }

    /// Waits for a child; asks it to stop when this process was asked to, or when time is up.
    fn wait(&self, child: &mut Child) -> std::io::Result<ExitStatus> {
        let mut asked = None;
        loop {
            if let Some(status) = child.try_wait()? {
                return Ok(status);
            }
            match asked {
                None if self.stopped() => {
                    let _ = rustix::process::kill_process(
                        rustix::process::Pid::from_child(child),
                        rustix::process::Signal::TERM,
                    );
                    asked = Some(Instant::now());
                }
                Some(since) if since.elapsed() >= GRACE => {
                    let _ = child.kill();
                    return child.wait();
                }
                _ => {}
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

/// Whether a process of a device left its result.
fn is_finished(folder: &Path, process: u32) -> bool {
    is_whole(&folder.join(format!("run-{process}")))
}

/// Whether the result in a folder is that of a whole run: one that was stopped leaves what it had by then, beside its journal.
fn is_whole(run: &Path) -> bool {
    run.join("result.json").is_file() && !run.join(JOURNAL).exists()
}

/// Gives what was begun a name of its own.
fn abandon(folder: &Path, process: u32, unfinished: &Path) -> std::io::Result<()> {
    let name = |number| folder.join(format!("run-{process}.abandoned-{number}.unfinished"));
    let free = (1..=MAX_ABANDONED).map(name).find(|path| !path.exists());
    match free {
        Some(path) => std::fs::rename(unfinished, path),
        None => {
            Err(std::io::Error::other("it was begun and abandoned too often: remove the folders of its run"))
        }
    }
}

/// The last bytes of a child's messages, read to their end so that it never waits for a reader.
fn tail(mut stderr: impl Read) -> String {
    let (mut kept, mut buffer) = (Vec::new(), [0; 4096]);
    while let Ok(length) = stderr.read(&mut buffer) {
        if length == 0 {
            break;
        }
        kept.extend_from_slice(&buffer[..length]);
        if kept.len() > 2 * MAX_MESSAGES {
            kept.drain(..kept.len() - MAX_MESSAGES);
        }
    }
    String::from_utf8_lossy(&kept).into_owned()
}

#[cfg(test)]
mod tests;
