//! The comparison of two sides, round by round.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::ReportError;
use super::cell::{Phase, cell_id};
use super::serving::{Quantity, ServeResult};
use crate::model::Dtype;

/// The verdict on B against A.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ComparisonVerdict {
    /// B takes less time.
    Faster,
    /// B takes more time.
    Slower,
    /// The whole interval lies within the margin.
    Equivalent,
    /// Neither a difference nor its absence was shown.
    Inconclusive,
}

impl ComparisonVerdict {
    /// The word in every format.
    pub fn word(self) -> &'static str {
        match self {
            Self::Faster => "FASTER",
            Self::Slower => "SLOWER",
            Self::Equivalent => "EQUIVALENT",
            Self::Inconclusive => "INCONCLUSIVE",
        }
    }
}

/// The numbers of a decision.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Of every interval.
    pub confidence: f64,
    /// A p beyond this, corrected, shows nothing.
    pub alpha: f64,
    /// Power of the smallest detectable effect.
    pub power: f64,
    /// Relative difference below which two sides count as equivalent.
    pub margin: f64,
    /// Of the orders that are drawn where there are too many to count.
    pub seed: u64,
}

impl Settings {
    /// 95 % intervals, a level of 5 %, a power of 80 %.
    pub fn new(margin: f64, seed: u64) -> Self {
        Self { confidence: 0.95, alpha: 0.05, power: 0.8, margin, seed }
    }
}

/// What ran on one side of a cell.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct EngineVariant {
    pub engine: String,
    pub dtype: Dtype,
}

impl std::fmt::Display for EngineVariant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.engine, self.dtype)
    }
}

/// A cell of both sides: the same step, on whichever engine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComparedCell {
    pub phase: Phase,
    pub batch: usize,
    pub context: usize,
    pub a: EngineVariant,
    pub b: EngineVariant,
}

impl ComparedCell {
    /// The name of the cell in A's result.
    pub fn id_of_a(&self) -> String {
        cell_id(self.phase, &self.a.engine, self.a.dtype, self.batch, self.context)
    }

    /// The name of the cell in B's result.
    pub fn id_of_b(&self) -> String {
        cell_id(self.phase, &self.b.engine, self.b.dtype, self.batch, self.context)
    }
}

/// A time of served requests that is compared. Smaller is better, for every one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ServedTime {
    TtftP50,
    TtftP95,
    TpotP50,
    TpotP95,
    E2eP50,
    E2eP95,
    /// The inverse of the output throughput of all requests together.
    PerOutputToken,
}

impl ServedTime {
    /// Under a load that does not depend on the server: throughput is then what was offered.
    pub const OPEN_LOOP: [Self; 6] =
        [Self::TtftP50, Self::TtftP95, Self::TpotP50, Self::TpotP95, Self::E2eP50, Self::E2eP95];
    /// Under a load that comes as fast as it is served.
    pub const CLOSED_LOOP: [Self; 7] = [
        Self::TtftP50,
        Self::TtftP95,
        Self::TpotP50,
        Self::TpotP95,
        Self::E2eP50,
        Self::E2eP95,
        Self::PerOutputToken,
    ];

    /// The name, as objectives are named.
    pub fn name(self) -> &'static str {
        match self {
            Self::TtftP50 => "ttft_p50",
            Self::TtftP95 => "ttft_p95",
            Self::TpotP50 => "tpot_p50",
            Self::TpotP95 => "tpot_p95",
            Self::E2eP50 => "e2e_p50",
            Self::E2eP95 => "e2e_p95",
            Self::PerOutputToken => "per_output_token",
        }
    }

    /// Its value in nanoseconds; none where it is missing, and infinite where too many requests failed.
    pub fn of(self, result: &ServeResult) -> Option<f64> {
        let (quantiles, at_p95) = match self {
            Self::TtftP50 => (&result.ttft_ns, false),
            Self::TtftP95 => (&result.ttft_ns, true),
            Self::TpotP50 => (&result.tpot_ns, false),
            Self::TpotP95 => (&result.tpot_ns, true),
            Self::E2eP50 => (&result.e2e_ns, false),
            Self::E2eP95 => (&result.e2e_ns, true),
            Self::PerOutputToken => {
                return (result.output_tokens_per_s > 0.0).then(|| 1e9 / result.output_tokens_per_s);
            }
        };
        let quantiles = quantiles.as_ref()?;
        if at_p95 { quantiles.p95 } else { quantiles.p50 }.map(Quantity::value)
    }
}

/// What is compared, side against side.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum ComparedItem {
    /// A timed step.
    Cell(ComparedCell),
    /// A time of served requests.
    Served { metric: ServedTime },
}

impl ComparedItem {
    /// Its name in A's result.
    pub fn id(&self) -> String {
        match self {
            Self::Cell(cell) => cell.id_of_a(),
            Self::Served { metric } => metric.name().to_owned(),
        }
    }

    /// The step, where it is one.
    pub fn cell(&self) -> Option<&ComparedCell> {
        match self {
            Self::Cell(cell) => Some(cell),
            Self::Served { .. } => None,
        }
    }
}

/// The times of one round. A side without a usable time is null.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Pair {
    pub a_ns: Option<f64>,
    pub b_ns: Option<f64>,
    /// A side has no time because it failed itself: it ran out of memory, its outputs were wrong, too many of its requests failed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub a_failed: bool,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub b_failed: bool,
}

impl Pair {
    /// The logarithm of the second side over the first.
    pub fn log_ratio(self) -> Option<f64> {
        let usable = |time: &f64| time.is_finite() && *time > 0.0;
        Some((self.b_ns.filter(usable)? / self.a_ns.filter(usable)?).ln())
    }
}

/// What was found in one cell, or over all of them. Ratios are B's time over A's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Effect {
    /// Rounds in which both sides have a time; of saved processes, those of the side that has fewer with one.
    pub rounds: usize,
    /// Geometric means of the medians over those rounds; null over all cells.
    pub a_ns: Option<f64>,
    pub b_ns: Option<f64>,
    pub ratio: Option<f64>,
    pub low: Option<f64>,
    pub high: Option<f64>,
    /// Two-sided, over the orders of the rounds that could have been drawn, or over the ways to relabel the processes.
    pub p: Option<f64>,
    /// Whether every order was counted.
    pub p_exact: Option<bool>,
    /// The same for the most extreme of all cells and their mean: one family.
    #[serde(alias = "p_holm")]
    pub p_adjusted: Option<f64>,
    /// The relative difference that this many rounds of this spread find with the power of the settings, at the level the least p
    /// of the family must reach. Null where no p that small exists.
    pub minimum_detectable: Option<f64>,
    /// The relative difference that A against itself did not rule out; null where it was not measured.
    pub floor: Option<f64>,
    /// Rounds, or processes, in which each side failed itself.
    #[serde(default, skip_serializing_if = "Failures::none")]
    pub failed: Failures,
    pub verdict: ComparisonVerdict,
    pub reason: String,
}

/// How often each side had no time because it failed itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failures {
    pub a: usize,
    pub b: usize,
}

impl Failures {
    /// Of the rounds of one cell, or of several cells that stand together.
    pub fn of(cells: &[Vec<Pair>]) -> Self {
        let rounds = cells.iter().map(Vec::len).max().unwrap_or(0);
        let count = |failed: fn(&Pair) -> bool| {
            let in_any = |round: &usize| cells.iter().filter_map(|pairs| pairs.get(*round)).any(failed);
            (0..rounds).filter(in_any).count()
        };
        Self { a: count(|pair| pair.a_failed), b: count(|pair| pair.b_failed) }
    }

    fn none(&self) -> bool {
        *self == Self::default()
    }
}

impl Effect {
    /// Before anything is decided.
    pub fn unknown() -> Self {
        Self {
            rounds: 0,
            a_ns: None,
            b_ns: None,
            ratio: None,
            low: None,
            high: None,
            p: None,
            p_exact: None,
            p_adjusted: None,
            minimum_detectable: None,
            floor: None,
            failed: Failures::default(),
            verdict: ComparisonVerdict::Inconclusive,
            reason: String::new(),
        }
    }
}

/// Version of the JSON of a comparison; raised when a field changes its meaning or goes away.
///
/// Version 1 tested signs and corrected by Holm, in `p_holm`.
pub const COMPARISON_VERSION: u32 = 2;

/// What the file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ComparisonKind {
    Comparison,
}

/// How the two sides were brought together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// Fresh processes in pairs, in random order.
    PairedRounds,
    /// Two saved results.
    SavedResults,
    /// Several saved results a side, each of a process of its own.
    SavedProcesses,
}

/// A side.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Arm {
    /// As it was given.
    pub given: String,
    /// The command line of its (first) process.
    pub command: String,
    pub started_at: Option<String>,
    pub series: Vec<EngineVariant>,
    pub config: BTreeMap<String, serde_json::Value>,
}

/// A key in which the configurations differ.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    pub key: String,
    pub a: serde_json::Value,
    pub b: serde_json::Value,
}

/// One cell, or one metric of served requests: its rounds, and what was found in them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CellComparison {
    #[serde(flatten)]
    pub place: ComparedItem,
    /// In the order of the rounds; saved results have one. Of saved processes, the first of A beside the first of B and so on: they were no pairs.
    pub pairs: Vec<Pair>,
    #[serde(flatten)]
    pub effect: Effect,
}

/// A against itself, measured first. Here `b` is the other process of the pair, running A.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Floor {
    pub order: Vec<String>,
    pub cells: Vec<CellComparison>,
    pub overall: Option<Effect>,
}

/// A whole comparison.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    pub schema_version: u32,
    pub kind: ComparisonKind,
    pub method: Method,
    pub command: String,
    pub started_at: Option<String>,
    pub model: String,
    pub machine: String,
    /// Of every single process: `full`, `quick` or `smoke`; null where requests were served.
    pub protocol: Option<String>,
    pub a: Arm,
    pub b: Arm,
    pub differences: Vec<Difference>,
    pub rounds: Option<usize>,
    pub seed: Option<u64>,
    /// `AB` or `BA`, round by round.
    pub order: Vec<String>,
    pub settings: Settings,
    pub floor: Option<Floor>,
    pub cells: Vec<CellComparison>,
    pub overall: Option<Effect>,
    /// Of each saved process: nanoseconds in which the machine's memory read a gigabyte beside its steps.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub read: Vec<Pair>,
    /// Saved processes of A ran on other GPUs, or other machines, than those of B, and not on so many that the test counts their differences.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub other_devices: bool,
    /// What happened on the way: lost rounds, cells without a time.
    pub remarks: Vec<String>,
    /// What this comparison cannot prove.
    pub limits: Vec<String>,
}

impl Comparison {
    /// Whether requests were served: then metrics are compared, not cells.
    pub fn is_served(&self) -> bool {
        self.cells.iter().any(|compared| compared.place.cell().is_none())
    }
}

/// Reads a saved comparison; `None` where the file is of another kind, or no result at all, which its own reader reports.
///
/// # Errors
/// When the file cannot be read, or is a comparison of another version, or holds impossible values.
pub fn read(path: &std::path::Path) -> Result<Option<Comparison>, ReportError> {
    #[derive(Deserialize)]
    struct Head {
        kind: ComparisonKind,
        schema_version: Option<u32>,
    }
    let file = super::saved::Saved::open(path)?;
    let Ok(head) = file.read::<Head>() else { return Ok(None) };
    let _: ComparisonKind = head.kind;
    if !head.schema_version.is_some_and(|version| (1..=COMPARISON_VERSION).contains(&version)) {
        return Err(ReportError::Version { found: head.schema_version, supported: COMPARISON_VERSION });
    }
    let comparison = file.read().map_err(|json| ReportError::Malformed { path: path.to_path_buf(), json })?;
    super::validation::check_comparison(&comparison)?;
    Ok(Some(comparison))
}
