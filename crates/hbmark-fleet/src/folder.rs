//! Folders of results, as they were left: in any order, twice, half written, with other files among them.
//!
//! Enters: untrusted folders. Leaves: [`Run`]s, the manifests and the records of nodes, and a [`Notice`] for whatever was not used. Links are
//! not followed, files are read one at a time and to a limit, and of a result only what is judged stays in memory.
//!
//! What is read of a result are its ceilings and the typical times of its cells, as they were saved; `hbmark report` on one of the files
//! recomputes them from its samples.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::metric::Metric;
use crate::plan::Manifest;
use hbmark_core::input::{self, InputError};
use hbmark_core::ledger::devices;
use hbmark_core::result::{
    BuildEnvironment, Cause, Ceilings, DeviceSpec, Environment, OLDEST_SCHEMA_VERSION, Placement, Quality,
    ReportKind, SCHEMA_VERSION, Status, TimeSummary,
};

/// The largest result that is read.
const MAX_RESULT_BYTES: u64 = 64 << 20;
/// Memory for the values of a result that are kept while it is read; what is skipped costs none.
const BUDGET: usize = 32 << 20;
/// Folders deeper than this are not entered.
const MAX_DEPTH: usize = 16;
/// Entries after which a tree is not a folder of results.
const MAX_ENTRIES: u64 = 4_000_000;
/// Notices of one kind that are kept; of more the number.
const MAX_NOTICES: usize = 1_000;

/// The record that `hbmark fleet node` leaves of a node.
pub const NODE_FILE: &str = "node.json";

/// Why a file is not used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NoticeKind {
    /// The same bytes as another file.
    Duplicate,
    /// Begun and not finished: of a run that was stopped, or is still under way.
    Unfinished,
    /// No file of hbmark.
    Foreign,
    /// Of hbmark, and no result that can be read.
    Damaged,
    /// A result of another plan than the manifest's.
    OtherPlan,
    /// A result under other settings than most of its GPU's.
    OtherSettings,
    /// A manifest that does not belong to the folder.
    OtherManifest,
    /// A result that says not which GPU it is of.
    Nameless,
    /// A link, which is not followed, or a folder that is not entered.
    NotEntered,
}

impl NoticeKind {
    pub fn words(self) -> &'static str {
        match self {
            Self::Duplicate => "duplicates",
            Self::Unfinished => "unfinished",
            Self::Foreign => "other files",
            Self::Damaged => "cannot be read",
            Self::OtherPlan => "results of another plan",
            Self::OtherSettings => "results under other settings",
            Self::OtherManifest => "other manifests",
            Self::Nameless => "results without a GPU",
            Self::NotEntered => "not entered",
        }
    }
}

/// A file or folder that was not used, and why.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Notice {
    pub kind: NoticeKind,
    pub path: String,
    pub why: String,
}

/// Notices, the first `MAX_NOTICES` of each kind by name, and the number of all.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notices {
    pub shown: Vec<Notice>,
    pub counts: BTreeMap<NoticeKind, u64>,
}

impl Notices {
    pub(crate) fn add(&mut self, kind: NoticeKind, path: impl Into<String>, why: impl Into<String>) {
        let count = self.counts.entry(kind).or_default();
        *count += 1;
        if *count <= MAX_NOTICES as u64 {
            self.shown.push(Notice { kind, path: path.into(), why: why.into() });
        }
    }
}

/// Facts that set how fast a GPU is, or what its numbers mean: GPUs that differ in one are not compared with each other.
pub(crate) const SPEED_FACTS: [&str; 5] = ["MIG", "memory", "power limit", "ECC", "hbmark"];

/// How a child of `hbmark fleet node` ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskRecord {
    /// The GPU's UUID, or the name of an emulated device.
    pub device: String,
    pub slot: u32,
    /// Processes that left a result.
    pub finished: u32,
    pub wanted: u32,
    /// Why the others did not.
    #[serde(default)]
    pub failures: Vec<String>,
}

/// What `hbmark fleet node` leaves of a node: which GPUs it saw, and how their processes ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRecord {
    pub schema_version: u32,
    pub kind: NodeRecordKind,
    pub node: String,
    pub plan: String,
    pub at_once: bool,
    pub emulated: bool,
    pub tasks: Vec<TaskRecord>,
}

/// Marks the record of a node among other JSON files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeRecordKind {
    #[serde(rename = "fleet_node")]
    FleetNode,
}

/// Why a metric has no value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lack {
    /// The engine, the device or an allocation failed.
    Failed,
    /// Measured, and no time that can be believed.
    Invalid,
    /// Not run, or not to its end.
    NotRun,
}

/// A metric of a run that has no value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unmeasured {
    /// `None` for all ceilings.
    pub metric: Option<Metric>,
    pub lack: Lack,
    pub why: String,
}

/// One fresh process on one GPU, as far as it is judged.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Run {
    pub path: String,
    /// Of the file's bytes.
    pub content: [u8; 32],
    pub started_at: String,
    /// The GPU's UUID, or the name of an emulated device.
    pub gpu: String,
    pub emulated: bool,
    pub node: String,
    pub hostname: Option<String>,
    pub rack: Option<String>,
    pub slot: Option<u32>,
    /// The product's name. Together with `SPEED_FACTS` it says what is compared with what.
    pub device: String,
    pub plan: Option<String>,
    pub at_once: Option<u32>,
    pub values: Vec<(Metric, f64)>,
    /// What disturbed a metric.
    pub disturbed: Vec<String>,
    /// Metrics without a value.
    pub unmeasured: Vec<Unmeasured>,
    /// Cells whose outputs are wrong.
    pub wrong: Vec<String>,
    pub datasheet_bytes_per_s: Option<f64>,
    /// Facts that may explain a difference, by name.
    pub facts: Vec<(&'static str, String)>,
    pub remapped: Option<hbmark_core::result::RemappedRows>,
    pub xids: Vec<u32>,
    pub pci_bus_id: Option<String>,
    pub serial: Option<String>,
}

impl Run {
    fn lacks(&mut self, metric: Option<Metric>, lack: Lack, why: String) {
        self.unmeasured.push(Unmeasured { metric, lack, why });
    }

    /// Values of [`SPEED_FACTS`].
    pub(crate) fn speed_facts(&self) -> [&str; SPEED_FACTS.len()] {
        SPEED_FACTS.map(|name| {
            let found = self.facts.iter().find(|(known, _)| *known == name);
            found.map_or("unknown", |(_, value)| value.as_str())
        })
    }
}

/// Everything that was found.
#[derive(Debug, Clone, Default)]
pub struct Reading {
    pub manifests: Vec<(PathBuf, Manifest)>,
    pub runs: Vec<Run>,
    pub nodes: Vec<NodeRecord>,
    pub notices: Notices,
    /// Files that were looked at.
    pub files: u64,
}

/// A folder that was named and cannot be read at all.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {path}: {source}")]
pub struct FolderError {
    pub path: PathBuf,
    pub source: std::io::Error,
}

/// Reads folders of results.
///
/// # Errors
/// When one of those named cannot be listed. What lies in them and cannot be read is a notice.
pub fn read(folders: &[PathBuf]) -> Result<Reading, FolderError> {
    let mut reader = Reader::default();
    for folder in folders {
        let failed = |source| FolderError { path: folder.clone(), source };
        if !std::fs::metadata(folder).map_err(failed)?.is_dir() {
            return Err(failed(std::io::ErrorKind::NotADirectory.into()));
        }
        std::fs::read_dir(folder).map_err(failed)?;
        reader.tree(folder);
    }
    let mut reading = reader.reading;
    // The order of folders and of reading must not show.
    reading.runs.sort_by(|a, b| (&a.gpu, &a.started_at, a.content).cmp(&(&b.gpu, &b.started_at, b.content)));
    reading.nodes.sort_by(|a, b| (&a.node, &a.plan).cmp(&(&b.node, &b.plan)));
    reading.manifests.sort_by(|a, b| a.0.cmp(&b.0));
    reading.notices.shown.sort();
    Ok(reading)
}

#[derive(Default)]
struct Reader {
    reading: Reading,
    seen: HashSet<[u8; 32]>,
    entries: u64,
}

impl Reader {
    fn notice(&mut self, kind: NoticeKind, path: &Path, why: impl Into<String>) {
        self.reading.notices.add(kind, input::plain(&path.to_string_lossy()), why);
    }

    fn tree(&mut self, root: &Path) {
        let mut folders = vec![(root.to_owned(), 0)];
        while let Some((folder, depth)) = folders.pop() {
            let entries = match std::fs::read_dir(&folder) {
                Ok(entries) => entries,
                Err(error) => {
                    self.notice(NoticeKind::NotEntered, &folder, error.to_string());
                    continue;
                }
            };
            // One folder's names at a time are in memory, in an order that does not depend on the file system.
            let mut paths: Vec<(PathBuf, std::fs::FileType)> = Vec::new();
            for entry in entries.flatten() {
                self.entries += 1;
                if self.entries > MAX_ENTRIES {
                    self.notice(NoticeKind::NotEntered, &folder, format!("above {MAX_ENTRIES} entries"));
                    return;
                }
                if let Ok(kind) = entry.file_type() {
                    paths.push((entry.path(), kind));
                }
            }
            paths.sort_by(|a, b| a.0.cmp(&b.0));
            for (path, kind) in paths {
                if kind.is_symlink() {
                    self.notice(NoticeKind::NotEntered, &path, "a link");
                } else if kind.is_dir() && depth >= MAX_DEPTH {
                    self.notice(NoticeKind::NotEntered, &path, format!("deeper than {MAX_DEPTH} folders"));
                } else if kind.is_dir() {
                    folders.push((path, depth + 1));
                } else {
                    self.file(root, &path);
                }
            }
        }
    }

    fn file(&mut self, root: &Path, path: &Path) {
        self.reading.files += 1;
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let unfinished =
            path.components().any(|part| part.as_os_str().to_string_lossy().ends_with(".unfinished"));
        if unfinished {
            // The journal stands for its folder.
            if name == "journal.jsonl" || name.ends_with(".unfinished") {
                self.notice(NoticeKind::Unfinished, path, "begun and not finished");
            }
            return;
        }
        // What else lies beside results, made by this program: named for what it is, it needs no notice.
        let ours = match name.as_str() {
            "result.csv" | "result.md" | "report.html" | "journal.jsonl" | "log.txt" | "nodes.txt"
            | "submit.sh" | "fleet.sbatch" | "fleet.yaml" | "ssh.sh" | "lock" | ".hbmark.lock" => true,
            // The logs of a scheduler, in the folder that our scripts give it.
            _ => path.strip_prefix(root).is_ok_and(|inside| inside.starts_with("logs")),
        };
        if !is_json(&name) {
            if name == "journal.jsonl" && !path.with_file_name("result.json").exists() {
                self.notice(NoticeKind::Unfinished, path, "a journal without its result");
            } else if !ours {
                self.notice(NoticeKind::Foreign, path, "no result");
            }
            return;
        }
        match input::read(path, MAX_RESULT_BYTES) {
            Ok(bytes) => self.json(root, path, &bytes),
            Err(error @ (InputError::TooLarge { .. } | InputError::NotRegular { .. })) => {
                self.notice(NoticeKind::Foreign, path, error.to_string());
            }
            Err(error) => self.notice(NoticeKind::Damaged, path, error.to_string()),
        }
    }

    fn json(&mut self, root: &Path, path: &Path, bytes: &[u8]) {
        #[derive(Deserialize)]
        struct Head {
            kind: Option<String>,
        }
        let content: [u8; 32] = Sha256::digest(bytes).into();
        if self.seen.contains(&content) {
            return self.notice(NoticeKind::Duplicate, path, "the same bytes as another file");
        }
        let Ok(text) = std::str::from_utf8(bytes) else {
            return self.notice(NoticeKind::Foreign, path, "no text");
        };
        // Our results say at their beginning what they are: that saves reading the whole file twice.
        if says_run_first(text)
            && let Ok(Some(run)) = run(text, path, content)
        {
            self.seen.insert(content);
            self.reading.runs.push(run);
            return;
        }
        let head = match input::json::from_str::<Head>(text, BUDGET) {
            Ok(head) => head,
            Err(error) => {
                // A file that was being written when its process was killed ends in the middle.
                let kind = if error.is_eof() { NoticeKind::Unfinished } else { NoticeKind::Foreign };
                return self.notice(kind, path, input::one_line(&error));
            }
        };
        match head.kind.as_deref() {
            Some("run") => match run(text, path, content) {
                Ok(Some(run)) => {
                    self.seen.insert(content);
                    self.reading.runs.push(run);
                }
                Ok(None) => {
                    self.notice(NoticeKind::Nameless, path, "neither a GPU's UUID nor a task of a fleet");
                }
                Err(why) => self.notice(NoticeKind::Damaged, path, why),
            },
            Some("fleet_node") => match input::json::from_str::<NodeRecord>(text, BUDGET) {
                Ok(record) => self.reading.nodes.push(record),
                Err(error) => self.notice(NoticeKind::Damaged, path, input::one_line(&error)),
            },
            Some("fleet_manifest") => match Manifest::parse(text, path) {
                Ok(manifest) if path.parent() == Some(root) => {
                    self.reading.manifests.push((path.to_owned(), manifest));
                }
                Ok(_) => self.notice(
                    NoticeKind::OtherManifest,
                    path,
                    "not at the top of a folder that was named: it may be of another cluster",
                ),
                Err(error) => self.notice(NoticeKind::Damaged, path, input::one_line(&error)),
            },
            // An earlier report among the results.
            Some("fleet_report") => {}
            Some(other) => {
                let other: String = input::plain(other).chars().take(40).collect();
                self.notice(NoticeKind::Foreign, path, format!("of kind `{other}`"));
            }
            None => self.notice(NoticeKind::Foreign, path, "no result of hbmark"),
        }
    }
}

/// Whether a text begins as results are written.
fn says_run_first(text: &str) -> bool {
    let begin: String = text.bytes().take(200).filter(|b| !b.is_ascii_whitespace()).map(char::from).collect();
    begin.starts_with("{\"schema_version\":") && begin.contains(",\"kind\":\"run\",")
}

fn is_json(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json"))
}

/// What is read of a result.
#[derive(Deserialize)]
struct Saved {
    schema_version: u32,
    kind: ReportKind,
    started_at: Option<String>,
    environment: Environment,
    ceilings: Option<Ceilings>,
    datasheet: Option<DeviceSpec>,
    #[serde(default)]
    cells: Vec<SavedCell>,
}

#[derive(Deserialize)]
struct SavedCell {
    id: String,
    status: Status,
    reason: Option<Cause>,
    step_ns: Option<TimeSummary>,
    #[serde(default)]
    tpot_ns: Option<f64>,
    #[serde(default)]
    quality: Option<Quality>,
}

/// A run of a text; `None` where it says not of which GPU, and a reason where it is none.
fn run(text: &str, path: &Path, content: [u8; 32]) -> Result<Option<Run>, String> {
    let saved: Saved = input::json::from_str(text, BUDGET).map_err(|error| input::one_line(&error))?;
    if !(OLDEST_SCHEMA_VERSION..=SCHEMA_VERSION).contains(&saved.schema_version) {
        return Err(format!("of version {}, and this program reads {SCHEMA_VERSION}", saved.schema_version));
    }
    if saved.kind != ReportKind::Run {
        return Err("a prediction".into());
    }
    let Environment { hostname, cpu, gpu, build, placement, .. } = saved.environment;
    let placement: Placement = placement.unwrap_or_default();
    let task = placement.fleet.clone();
    let Some(id) = gpu
        .as_ref()
        .and_then(|gpu| gpu.uuid.clone())
        .or_else(|| task.as_ref().filter(|task| task.emulated).map(|task| task.device.clone()))
    else {
        return Ok(None);
    };
    let board = gpu.as_ref().and_then(|gpu| gpu.board.clone()).unwrap_or_default();
    let emulated = task.as_ref().is_some_and(|task| task.emulated);
    let plain = |text: &String| input::plain(text);
    let device = gpu.as_ref().and_then(|gpu| gpu.name.as_ref()).or(cpu.model.as_ref());
    let sheet = saved.datasheet.as_ref().map(|sheet| sheet.bandwidth_bytes_per_s);
    // A slice has its GPU's name, and a part of what that promises.
    let product = gpu.as_ref().filter(|gpu| gpu.mig != Some(true)).and_then(|gpu| gpu.name.clone());
    let sheet = sheet.or_else(|| Some(devices::find(&product?).ok()?.bandwidth_bytes_per_s));
    let text_of = |value: Option<&String>| value.map(plain);
    let facts = [
        ("driver", text_of(gpu.as_ref().and_then(|gpu| gpu.driver.as_ref()))),
        ("VBIOS", text_of(board.vbios.as_ref())),
        (
            "power limit",
            gpu.as_ref().and_then(|gpu| gpu.power_limit_watts).map(|watts| format!("{watts:.0} W")),
        ),
        ("hbmark", Some(plain(&build_of(&build)))),
        (
            "memory",
            gpu.as_ref()
                .and_then(|gpu| gpu.memory_bytes)
                .map(|bytes| format!("{:.0} GiB", bytes.as_f64() / f64::from(1 << 30))),
        ),
        ("MIG", gpu.as_ref().and_then(|gpu| gpu.mig).map(|mig| if mig { "on" } else { "off" }.to_owned())),
        ("ECC", gpu.as_ref().and_then(|gpu| gpu.ecc).map(|ecc| if ecc { "on" } else { "off" }.to_owned())),
    ];
    let mut run = Run {
        path: input::plain(&path.to_string_lossy()),
        content,
        started_at: text_of(saved.started_at.as_ref()).unwrap_or_default(),
        gpu: plain(&id),
        emulated,
        node: placement.node.as_ref().or(hostname.as_ref()).map_or_else(|| "unknown".into(), plain),
        hostname: text_of(hostname.as_ref()),
        rack: placement.topology.as_deref().and_then(rack),
        slot: board
            .module_id
            .or_else(|| task.as_ref().and_then(|task| task.slot))
            .or_else(|| gpu.as_ref().map(|gpu| gpu.index)),
        device: device.map_or_else(|| "unknown".into(), plain),
        plan: task.as_ref().map(|task| plain(&task.plan)),
        at_once: task.as_ref().map(|task| task.at_once),
        datasheet_bytes_per_s: sheet.filter(|rate| rate.is_finite() && *rate > 0.0),
        facts: facts.into_iter().filter_map(|(name, value)| Some((name, value?))).collect(),
        remapped: board.remapped_rows,
        xids: board.xids.unwrap_or_default(),
        pci_bus_id: text_of(board.pci_bus_id.as_ref()),
        serial: text_of(board.serial.as_ref()),
        ..Run::default()
    };
    if emulated {
        run.device = format!("{} (emulated GPU)", run.device);
    }
    match &saved.ceilings {
        // Kept from another process: no measurement of this one.
        Some(ceilings) if ceilings.age_s.is_none() => take_ceilings(&mut run, ceilings),
        Some(_) => run.lacks(
            None,
            Lack::NotRun,
            "its ceilings were kept from an earlier run: use --fresh-ceilings".into(),
        ),
        None => run.lacks(None, Lack::NotRun, "no ceilings were measured".into()),
    }
    for cell in &saved.cells {
        take_cell(&mut run, cell);
    }
    Ok(Some(run))
}

/// A build: its version, and where they are known its revision and a profile other than that of releases.
fn build_of(build: &BuildEnvironment) -> String {
    let profile = Some(&build.profile).filter(|profile| !["", "release"].contains(&profile.as_str()));
    let parts: Vec<&str> = build.git_revision.iter().chain(profile).map(String::as_str).collect();
    if parts.is_empty() { build.version.clone() } else { format!("{} ({})", build.version, parts.join(", ")) }
}

/// The switch or block above a node: the last but one part of `root.rack7.node001`.
fn rack(topology: &str) -> Option<String> {
    let parts: Vec<&str> = topology.split('.').collect();
    (parts.len() >= 2).then(|| input::plain(parts[parts.len() - 2]))
}

fn take_ceilings(run: &mut Run, ceilings: &Ceilings) {
    let mut take = |metric: Metric, value: f64| {
        if value.is_finite() && value > 0.0 {
            run.values.push((metric, value));
        } else {
            let why = format!("{metric} is {value}");
            run.lacks(Some(metric), Lack::Invalid, why);
        }
    };
    take(Metric::Read, ceilings.read_bytes_per_s.median);
    take(Metric::Copy, ceilings.copy_bytes_per_s.median);
    for (dtype, rate) in &ceilings.gemm_flops_per_s {
        // A sustained rate is what heat and power leave, where it was measured.
        let sustained = ceilings.gpu.as_ref().and_then(|gpu| gpu.sustained_gemm_flops_per_s.get(dtype));
        take(Metric::Gemm(input::plain(dtype)), sustained.unwrap_or(rate).median);
    }
    if let Some(cause) = ceilings.doubt() {
        run.disturbed.push(format!("ceilings: {cause}"));
    }
}

fn take_cell(run: &mut Run, cell: &SavedCell) {
    let id = input::plain(&cell.id);
    let reason = cell.reason.as_ref().map_or_else(String::new, |cause| format!(": {cause}"));
    let wrong = cell.quality.as_ref().is_some_and(|quality| !quality.passed) || says_wrong(cell);
    if wrong {
        run.wrong.push(format!("{id}{reason}"));
    }
    let status = format!("{:?}", cell.status).to_lowercase();
    let lacks = |run: &mut Run, lack, why| run.lacks(Some(Metric::Step(id.clone())), lack, why);
    match cell.status {
        // Once through, or not on a device, and no time.
        Status::Smoke | Status::Simulated | Status::Predicted => {}
        Status::Oom | Status::Failed => lacks(run, Lack::Failed, format!("{id} {status}{reason}")),
        Status::Skipped | Status::Incomplete => lacks(run, Lack::NotRun, format!("{id} {status}{reason}")),
        // The time of other work, or one that cannot be believed: it would enter a median with the good ones.
        Status::Invalid => lacks(run, Lack::Invalid, format!("{id} {status}{reason}")),
        Status::Ok | Status::NotConverged | Status::NoSteadyState | Status::Disturbed | Status::Noisy => {
            let step = cell.step_ns.as_ref().map(TimeSummary::center);
            let time = cell.tpot_ns.or(step).filter(|time| time.is_finite() && *time > 0.0);
            match time {
                Some(time) if !wrong => run.values.push((Metric::Step(id.clone()), time)),
                Some(_) => lacks(run, Lack::Invalid, format!("{id} with wrong outputs{reason}")),
                None => lacks(run, Lack::Invalid, format!("{id} {status} without a time{reason}")),
            }
            if cell.status == Status::Disturbed {
                run.disturbed.push(format!("{id}{reason}"));
            }
        }
    }
}

/// Whether a cell is invalid because its outputs are wrong: identical steps gave other tokens, or another number of them.
fn says_wrong(cell: &SavedCell) -> bool {
    let reason = matches!(
        cell.reason,
        Some(Cause::TokensChanged { .. } | Cause::TokenCount { .. } | Cause::WrongOutputs { .. })
    );
    cell.status == Status::Invalid && reason
}

#[cfg(test)]
mod tests;
