//! The report of a fleet as plain data, written and read back.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::folder::Notices;
use crate::metric::Metric;
use hbmark_core::input::{self, InputError};

/// Raised when a field changes its meaning or goes away.
pub const REPORT_VERSION: u32 = 1;

/// The largest report that is read: ten thousand GPUs take some ten megabytes.
const MAX_BYTES: u64 = 1 << 30;

/// How GPUs are judged.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// An effect smaller than this is named by nobody.
    pub margin: f64,
    /// The chance of naming anything in a healthy fleet.
    pub alpha: f64,
    /// Fresh processes a GPU needs.
    pub processes: usize,
    /// Read bandwidth below this share of the data sheet is too low whatever the fleet does.
    pub datasheet_share: f64,
}

impl Default for Settings {
    fn default() -> Self {
        Self { margin: 0.02, alpha: 0.05, processes: 3, datasheet_share: 0.75 }
    }
}

/// The state of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    Ok,
    /// Slow in the first run and not in the confirming one.
    NotConfirmed,
    /// Slow; no confirming run yet.
    Suspect,
    /// Slow, and a confirming run agrees.
    Slow,
    /// Its processes differ more than those of the others, in two metrics or in two runs.
    Unstable,
    /// Outputs of a model are wrong.
    WrongOutput,
    /// Results, and none that can be judged.
    Failed,
    /// Fewer processes than needed.
    TooFew,
    /// Equal GPUs are too few to compare with.
    NoPeers,
    /// Expected, and no result.
    Missing,
}

impl State {
    pub const ALL: [Self; 10] = [
        Self::Ok,
        Self::NotConfirmed,
        Self::Suspect,
        Self::Slow,
        Self::Unstable,
        Self::WrongOutput,
        Self::Failed,
        Self::TooFew,
        Self::NoPeers,
        Self::Missing,
    ];

    pub fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::NotConfirmed => "not confirmed",
            Self::Suspect => "SUSPECT",
            Self::Slow => "SLOW",
            Self::Unstable => "UNSTABLE",
            Self::WrongOutput => "WRONG OUTPUT",
            Self::Failed => "FAILED",
            Self::TooFew => "too few",
            Self::NoPeers => "no peers",
            Self::Missing => "MISSING",
        }
    }
}

/// What a finding means for an operator; Nagios has the same four.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    Ok,
    Unknown,
    Warning,
    Critical,
}

impl Level {
    /// Nagios' exit code.
    pub fn nagios(self) -> u8 {
        match self {
            Self::Ok => 0,
            Self::Warning => 1,
            Self::Critical => 2,
            Self::Unknown => 3,
        }
    }

    pub fn word(self) -> &'static str {
        match self {
            Self::Ok => "OK",
            Self::Warning => "WARNING",
            Self::Critical => "CRITICAL",
            Self::Unknown => "UNKNOWN",
        }
    }
}

/// A stable code of each finding, for programs that act on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FindingKind {
    GpuSlow,
    NodeSlow,
    RackSlow,
    GpuWrongOutput,
    GpuFailed,
    GpuMemoryFault,
    GpuSuspect,
    NodeSuspect,
    RackSuspect,
    GpuUnstable,
    GpuBelowDatasheet,
    FleetBelowDatasheet,
    FleetChanged,
    GpuChanged,
    SlotSlow,
    GpuDisturbed,
    GpuMissing,
    GpuTooFew,
    TooFewPeers,
    NotConfirmed,
    UnstableOnce,
    GpuMoved,
    GpuGone,
    Unexpected,
    FactsDiffer,
}

impl FindingKind {
    pub fn level(self) -> Level {
        match self {
            Self::GpuSlow
            | Self::NodeSlow
            | Self::RackSlow
            | Self::GpuWrongOutput
            | Self::GpuFailed
            | Self::GpuMemoryFault => Level::Critical,
            Self::GpuSuspect
            | Self::NodeSuspect
            | Self::RackSuspect
            | Self::GpuUnstable
            | Self::GpuBelowDatasheet
            | Self::FleetBelowDatasheet
            | Self::FleetChanged
            | Self::GpuChanged
            | Self::SlotSlow
            | Self::GpuDisturbed => Level::Warning,
            Self::GpuMissing | Self::GpuTooFew | Self::TooFewPeers => Level::Unknown,
            Self::NotConfirmed
            | Self::UnstableOnce
            | Self::GpuMoved
            | Self::GpuGone
            | Self::Unexpected
            | Self::FactsDiffer => Level::Ok,
        }
    }

    /// As JSON spells it.
    pub fn code(self) -> String {
        match serde_json::to_value(self) {
            Ok(serde_json::Value::String(code)) => code,
            _ => unreachable!("a unit variant is a string"),
        }
    }
}

/// Something that an operator should know.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    pub kind: FindingKind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rack: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metric: Option<Metric>,
    /// Relative to the fleet; -0.05 is 5 % slower.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub effect: Option<f64>,
    /// After Holm's correction over all tests of the report.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p_adjusted: Option<f64>,
    /// What was seen, in a sentence.
    pub evidence: String,
}

/// A metric over a group of equal GPUs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MetricSummary {
    pub metric: Metric,
    pub gpus: usize,
    /// The fleet's median.
    pub center: f64,
    /// Relative standard deviation over GPUs, robust.
    pub spread: f64,
    /// The same over the processes of one GPU.
    pub process_spread: f64,
    /// The least of a single GPU that this fleet size and spread name with a chance of one half.
    pub detectable: f64,
    /// Of read bandwidth: the centre over the data sheet's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub datasheet_share: Option<f64>,
    /// By slot, what its GPUs have in common; taken out of each. Empty where nodes are too few to tell.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub slots: Vec<(u32, f64)>,
}

/// GPUs of one product.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Group {
    pub device: String,
    pub gpus: usize,
    pub metrics: Vec<MetricSummary>,
    /// Drivers, firmware and limits, with the number of GPUs that have them.
    pub facts: Vec<(String, Vec<(String, usize)>)>,
}

/// One value of a GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GpuValue {
    pub metric: Metric,
    /// The median over its processes.
    pub value: f64,
    /// Relative to the fleet, its slot taken out; null where it could not be judged.
    pub effect: Option<f64>,
    pub processes: usize,
}

/// One GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GpuRow {
    pub gpu: String,
    pub state: State,
    pub node: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rack: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci_bus_id: Option<String>,
    pub device: String,
    /// Fresh processes with a result.
    pub processes: usize,
    /// Of the confirming run.
    #[serde(default)]
    pub confirming: usize,
    pub values: Vec<GpuValue>,
}

/// GPUs that were expected and left nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MissingRow {
    pub node: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rack: Option<String>,
    /// Where it is known which.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<u32>,
    pub count: u32,
    pub why: String,
}

/// What was expected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Expected {
    pub plan: String,
    pub digest: String,
    pub nodes: usize,
    pub gpus: usize,
    pub processes: u32,
}

/// Another day beside this one, GPU by GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DayShift {
    pub device: String,
    pub metric: Metric,
    /// GPUs with a value on both days.
    pub gpus: usize,
    /// What all of them changed by: the median of today over that day, less one.
    pub shift: f64,
    /// What single GPUs changed by beside that: robust standard deviation.
    pub spread: f64,
}

/// A point of the past.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Day {
    pub at: String,
    pub shifts: Vec<DayShift>,
    /// Effects on that day of the GPUs that are named today.
    pub effects: Vec<(String, Metric, f64)>,
}

/// Marks a report among other JSON files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReportMark {
    #[serde(rename = "fleet_report")]
    FleetReport,
}

/// All of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FleetReport {
    pub schema_version: u32,
    pub kind: ReportMark,
    /// The digest of the plan that is judged; null of runs without one.
    #[serde(default)]
    pub plan: Option<String>,
    /// The latest start of a run.
    pub at: String,
    pub settings: Settings,
    pub expected: Option<Expected>,
    /// Runs on the CPU engine in the place of GPUs: no GPU was measured.
    pub emulated: bool,
    pub runs: usize,
    pub files: u64,
    pub groups: Vec<Group>,
    pub findings: Vec<Finding>,
    pub gpus: Vec<GpuRow>,
    pub missing: Vec<MissingRow>,
    pub notices: Notices,
    /// Tests that were corrected together.
    pub tests: usize,
    /// False names that are expected at the most, in a fleet without faults.
    pub expected_false_names: f64,
    #[serde(default)]
    pub days: Vec<Day>,
}

/// Why a report was not read.
#[derive(Debug, thiserror::Error)]
pub enum ReportReadError {
    #[error("cannot read {path}: {source}")]
    Read { path: std::path::PathBuf, source: InputError },
    #[error("{path} is not a report of `hbmark fleet report`: {source}")]
    Malformed { path: std::path::PathBuf, source: serde_json::Error },
    #[error("{path} is a fleet report of version {found}; this program reads version {REPORT_VERSION}")]
    Version { path: std::path::PathBuf, found: u32 },
}

impl FleetReport {
    /// The worst of its findings.
    pub fn level(&self) -> Level {
        self.findings.iter().map(|finding| finding.kind.level()).max().unwrap_or(Level::Ok)
    }

    /// GPUs in a state; the missing ones are counted by the manifest.
    pub fn count(&self, state: State) -> usize {
        match state {
            State::Missing => self.missing.iter().map(|missing| missing.count as usize).sum(),
            state => self.gpus.iter().filter(|gpu| gpu.state == state).count(),
        }
    }

    /// Findings of these kinds.
    pub fn findings_of(&self, kinds: &[FindingKind]) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(move |finding| kinds.contains(&finding.kind))
    }

    /// Reads a saved report.
    ///
    /// # Errors
    /// When it cannot be read, or is none of this version.
    pub fn read(path: &Path) -> Result<Self, ReportReadError> {
        let path_of = || path.to_owned();
        let text = input::read_text(path, MAX_BYTES)
            .map_err(|source| ReportReadError::Read { path: path_of(), source })?;
        let budget = text.len().saturating_mul(6).saturating_add(1 << 20);
        let found: Self = input::json::from_str(&text, budget)
            .map_err(|source| ReportReadError::Malformed { path: path_of(), source })?;
        if found.schema_version != REPORT_VERSION {
            return Err(ReportReadError::Version { path: path_of(), found: found.schema_version });
        }
        Ok(found)
    }

    /// The digest of its plan, also of a report that knew it by its manifest alone.
    pub fn plan_digest(&self) -> Option<&str> {
        self.plan.as_deref().or(self.expected.as_ref().map(|expected| expected.digest.as_str()))
    }

    /// Whether a file says of itself that it is one.
    pub fn is_one(path: &Path) -> bool {
        #[derive(Deserialize)]
        struct Head {
            #[expect(dead_code, reason = "that it is there is all")]
            kind: ReportMark,
        }
        let text = input::read_text(path, MAX_BYTES);
        text.is_ok_and(|text| input::json::from_str::<Head>(&text, 1 << 20).is_ok())
    }

    /// By what a confirming plan names it: of what it found.
    ///
    /// # Panics
    /// Never: plain data is JSON.
    pub fn digest(&self) -> String {
        use sha2::{Digest, Sha256};
        let text = serde_json::to_vec(&(&self.at, self.runs, &self.findings)).expect("plain data is JSON");
        format!("{:.16x}", Sha256::digest(text))
    }
}
