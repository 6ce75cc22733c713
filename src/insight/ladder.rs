//! The ladder of a step: from what the data sheet promises to what was measured, and what each rung adds.
//!
//! Enters: judged cells, ceilings, a data sheet. Leaves: one [`Ladder`] per phase, batch and context. The floors are those of
//! [`crate::roofline`]; nothing is predicted here.
//!
//! What the rungs add sums to the time of the last one. Where two engines run different dtypes, their difference has two parts: what
//! the other dtype's bytes cost at the ceiling, a floor of its own, and what is left for kernels and data movement.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::story;
use crate::model::Dtype;
use crate::report::{Bound, CellResult, Phase, Report, Status};
use crate::roofline::{Floor, Roof, StepCost};
use crate::units::{Bytes, Flops};

/// What stands on a rung, from the floor up: that order is the ladder's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RungKind {
    /// The floor by the data sheet's bandwidth and peak.
    Datasheet,
    /// The floor by the bandwidth and peak measured in this run.
    Ceiling,
    /// Our own kernels.
    Native,
    /// Candle's own kernels, replayed from a recording.
    StockGraph,
    /// Candle's own forward, its memory pool kept.
    StockPool,
    /// Candle's own forward.
    Stock,
    /// Any other engine, by its name.
    Other,
    /// An imported result of another program: its scheduler, server and client are in it.
    External,
}

impl RungKind {
    fn of_engine(engine: &str) -> Self {
        match engine {
            "native" => Self::Native,
            "stock" => Self::Stock,
            "stock-graph" => Self::StockGraph,
            "stock-pool" => Self::StockPool,
            _ => Self::Other,
        }
    }
}

/// One time on the ladder.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Rung {
    pub kind: RungKind,
    /// The engine that was measured; null for a floor.
    pub engine: Option<String>,
    pub dtype: Dtype,
    /// Decode: time per output token. Prefill: the step.
    pub time_ns: f64,
    /// What this rung adds to those above it: all of them together are the time of the last. A floor at a second dtype adds what
    /// it is over the first floor.
    pub step_ns: f64,
    /// `step_ns` over the slowest measured time.
    pub share: f64,
    /// What must move for a floor; what the engine really moves for a measured rung, where that is known.
    pub bytes: Option<Bytes>,
    pub status: Status,
    /// `b1 c1006` where that is not the ladder's own batch and context.
    #[serde(default)]
    pub place: Option<String>,
}

/// Why a ladder with an external rung cannot be built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LadderError {
    #[error("the result has no cell `{asked}`; it has {known}")]
    NoSuchCell { asked: String, known: String },
    #[error("`{asked}` is a prefill, and external results stand on ladders of decode cells only")]
    NotDecode { asked: String },
}

/// What launching kernels one by one costs: the same kernels timed eagerly and replayed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LaunchCost {
    pub eager_ns: f64,
    pub replayed_ns: f64,
    /// Eager less replayed; below zero where the replay was the slower.
    pub cost_ns: f64,
    /// Of the eager time.
    pub share: f64,
}

impl LaunchCost {
    /// Of candle's forward at one place and dtype, where both were measured.
    #[must_use]
    pub fn of(eager: &CellResult, cells: &[CellResult]) -> Option<Self> {
        let (eager_ns, dtype) = (trusted_tpot(eager)?, eager.dtype);
        let same = |cell: &&CellResult| {
            (cell.phase, cell.batch, cell.context, cell.dtype)
                == (eager.phase, eager.batch, eager.context, dtype)
                && RungKind::of_engine(&cell.engine) == RungKind::StockGraph
        };
        let eager_kind = RungKind::of_engine(&eager.engine);
        let replayed_ns = cells.iter().find(same).and_then(trusted_tpot)?;
        let cost_ns = eager_ns - replayed_ns;
        (eager_kind == RungKind::Stock).then_some(Self {
            eager_ns,
            replayed_ns,
            cost_ns,
            share: cost_ns / eager_ns,
        })
    }
}

/// The time of a decode that can be trusted.
fn trusted_tpot(cell: &CellResult) -> Option<f64> {
    cell.tpot_ns.filter(|time| is_trusted(cell.status) && time.is_finite() && *time > 0.0)
}

fn is_trusted(status: Status) -> bool {
    matches!(status, Status::Ok | Status::NotConverged | Status::NoSteadyState | Status::Disturbed)
}

/// The rungs of one phase, batch and context.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Ladder {
    pub phase: Phase,
    pub batch: usize,
    pub context: usize,
    pub rungs: Vec<Rung>,
    /// Where candle's own forward was measured both eagerly and replayed.
    #[serde(default)]
    pub launches: Option<LaunchCost>,
    /// One line: where the time went.
    pub story: String,
}

/// A floor with what bounds it and where it is from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct KnownFloor {
    pub time_ns: f64,
    pub bound: Bound,
    pub kind: RungKind,
}

/// A measured cell on its way to a rung.
#[derive(Debug, Clone, Copy)]
pub(super) struct Measured<'a> {
    pub cell: &'a CellResult,
    pub kind: RungKind,
    pub time_ns: f64,
    /// Half of what is known of its spread: the 95 % interval.
    pub low_ns: f64,
    pub high_ns: f64,
    /// By the measured ceiling where there is one, otherwise by the data sheet.
    pub floor: Option<KnownFloor>,
    datasheet: Option<KnownFloor>,
}

impl<'a> Measured<'a> {
    /// `None` for a cell without a time that can be trusted.
    fn new(cell: &'a CellResult, report: &Report) -> Option<Self> {
        let step = cell.step_ns.as_ref().filter(|_| is_trusted(cell.status))?;
        let (time_ns, low, high) = match cell.phase {
            Phase::Decode => (cell.tpot_ns?, cell.tpot_ci_low_ns, cell.tpot_ci_high_ns),
            Phase::Prefill => (step.typical.unwrap_or(step.median), step.ci_low, step.ci_high),
        };
        let interval = (low.unwrap_or(time_ns), high.unwrap_or(time_ns));
        Self::timed(cell, report, RungKind::of_engine(&cell.engine), time_ns, interval)
    }

    /// An imported decode: one figure without an interval.
    fn external(cell: &'a CellResult, report: &Report) -> Option<Self> {
        let time_ns = cell.tpot_ns?;
        Self::timed(cell, report, RungKind::External, time_ns, (time_ns, time_ns))
    }

    /// A predicted cell: it has floors and no rung of its own.
    fn promised(cell: &'a CellResult, report: &Report) -> Option<Self> {
        let time_ns = cell.predicted_ns.filter(|_| cell.status == Status::Predicted)?;
        Self::timed(cell, report, RungKind::of_engine(&cell.engine), time_ns, (time_ns, time_ns))
    }

    fn timed(
        cell: &'a CellResult,
        report: &Report,
        kind: RungKind,
        time_ns: f64,
        interval: (f64, f64),
    ) -> Option<Self> {
        if !(time_ns.is_finite() && time_ns > 0.0) {
            return None;
        }
        let cost =
            StepCost { bytes: cell.bytes, flops: Flops(cell.flops), distinct_experts: cell.distinct_experts };
        let floor = |kind, roof: Roof| {
            let floor = Floor::new(&cost, &roof);
            KnownFloor { time_ns: floor.time().0, bound: floor.bound(), kind }
        };
        let ceiling = report.ceilings.as_ref();
        let ceiling = ceiling.map(|c| floor(RungKind::Ceiling, Roof::measured(c, cell.dtype)));
        let sheet = report.datasheet.as_ref();
        let datasheet = sheet.map(|d| floor(RungKind::Datasheet, Roof::datasheet(d, cell.dtype)));
        Some(Self {
            cell,
            kind,
            time_ns,
            low_ns: interval.0,
            high_ns: interval.1,
            floor: ceiling.or(datasheet),
            datasheet,
        })
    }

    /// Whether something ran, and not only a floor was computed.
    pub fn ran(&self) -> bool {
        self.cell.status != Status::Predicted
    }

    /// Time over the engine's own floor; negative below it.
    pub fn over_floor(&self) -> Option<f64> {
        Some(self.time_ns - self.floor?.time_ns)
    }
}

/// The ladders of every phase, batch and context at which something was measured, in the order of the cells.
///
/// An engine measured at several dtypes stands on several ladders: one per dtype, on which every engine is at that dtype if it ran it,
/// and otherwise at the one of its own with the fewest bytes.
#[must_use]
pub fn ladders(report: &Report) -> Vec<Ladder> {
    let place = |cell: &CellResult| (cell.phase, cell.batch, cell.context);
    let mut places = Vec::new();
    for cell in &report.cells {
        if !places.contains(&place(cell)) {
            places.push(place(cell));
        }
    }
    places
        .into_iter()
        .flat_map(|here| {
            let cells: Vec<&CellResult> = report.cells.iter().filter(|cell| place(cell) == here).collect();
            at_one_place(&cells, report)
        })
        .collect()
}

/// The ladder of one cell with imported decodes above it, held against the ceilings and the data sheet of `report`.
///
/// The externals must have run the same model on the same device; their batch and context may differ, and what that costs at the ceiling
/// is then a floor of its own.
///
/// # Errors
/// [`LadderError`] when the report has no such cell, or when it is a prefill.
pub fn with_external(report: &Report, id: &str, externals: &[CellResult]) -> Result<Ladder, LadderError> {
    let known = || report.cells.iter().map(|c| c.id.as_str()).take(20).collect::<Vec<_>>().join(", ");
    let home = report
        .cells
        .iter()
        .find(|cell| cell.id == id)
        .ok_or_else(|| LadderError::NoSuchCell { asked: id.to_owned(), known: known() })?;
    if home.phase != Phase::Decode {
        return Err(LadderError::NotDecode { asked: id.to_owned() });
    }
    let place = |cell: &CellResult| (cell.phase, cell.batch, cell.context);
    let cells = report.cells.iter().filter(|cell| place(cell) == place(home));
    let (mut measured, mut missing) = (Vec::new(), Vec::new());
    for cell in cells {
        match Measured::new(cell, report).or_else(|| Measured::promised(cell, report)) {
            Some(known) => measured.push(known),
            None => missing.push(cell),
        }
    }
    measured.sort_by_key(|m| m.kind);
    let mut selection = one_per_engine(&measured, home.dtype);
    selection.extend(externals.iter().filter_map(|cell| Measured::external(cell, report)));
    // A cell without a time still names the place.
    missing.retain(|cell| !selection.iter().any(|m| m.cell.engine == cell.engine));
    if selection.is_empty() {
        return Err(LadderError::NoSuchCell { asked: id.to_owned(), known: known() });
    }
    Ok(build(&selection, &missing, report, (home.batch, home.context)))
}

fn at_one_place(cells: &[&CellResult], report: &Report) -> Vec<Ladder> {
    let mut measured: Vec<Measured<'_>> = Vec::new();
    let mut missing: Vec<&CellResult> = Vec::new();
    for cell in cells {
        match Measured::new(cell, report) {
            Some(known) => measured.push(known),
            None => missing.push(cell),
        }
    }
    // Stable: engines of one kind stay in the order of the run.
    measured.sort_by_key(|m| m.kind);
    let mut chosen: Vec<Vec<Measured<'_>>> = Vec::new();
    for dtype in measured.iter().map(|m| m.cell.dtype) {
        let selection = one_per_engine(&measured, dtype);
        let ids = |of: &[Measured<'_>]| -> Vec<String> { of.iter().map(|m| m.cell.id.clone()).collect() };
        if !chosen.iter().any(|known| ids(known) == ids(&selection)) {
            chosen.push(selection);
        }
    }
    let place = (cells[0].batch, cells[0].context);
    chosen.iter().map(|selection| build(selection, &missing, report, place)).collect()
}

/// Every engine once: at `dtype` if it ran it, otherwise where it has the fewest bytes to move.
fn one_per_engine<'a>(measured: &[Measured<'a>], dtype: Dtype) -> Vec<Measured<'a>> {
    let mut selection: Vec<Measured<'a>> = Vec::new();
    let rank = |m: &Measured<'_>| (m.cell.dtype != dtype, m.cell.bytes.ideal());
    for candidate in measured {
        match selection.iter_mut().find(|m| m.cell.engine == candidate.cell.engine) {
            Some(known) if rank(candidate) < rank(known) => *known = *candidate,
            Some(_) => {}
            None => selection.push(*candidate),
        }
    }
    selection
}

fn build(
    selection: &[Measured<'_>],
    missing: &[&CellResult],
    report: &Report,
    place: (usize, usize),
) -> Ladder {
    let mut climb = Climb { rungs: Vec::new(), level: 0.0, place };
    let floored = || selection.iter().filter(|m| m.floor.is_some());
    // The ladder stands on the floor of its own cell; what another batch or context of an imported result costs is a rung of its own.
    let ours = floored().filter(|m| m.kind != RungKind::External);
    let lowest = ours.min_by(|a, b| floor_time(a).total_cmp(&floor_time(b)));
    let lowest = lowest.or_else(|| floored().min_by(|a, b| floor_time(a).total_cmp(&floor_time(b))));
    let mut floor_now = lowest.map(floor_time);
    if let Some(lowest) = lowest {
        let ceiling = lowest.floor.filter(|floor| floor.kind == RungKind::Ceiling);
        for floor in [lowest.datasheet, ceiling].into_iter().flatten() {
            climb.floor(lowest.cell, floor, floor.time_ns - climb.level);
        }
    }
    for engine in selection {
        if let (Some(floor), Some(now)) = (engine.floor, floor_now)
            && differ(floor.time_ns, now)
        {
            climb.floor(engine.cell, floor, floor.time_ns - now);
            floor_now = Some(floor.time_ns);
        }
        if engine.ran() {
            climb.engine(engine);
        }
    }
    let slowest = selection.iter().map(|m| m.time_ns).fold(0.0, f64::max);
    for rung in &mut climb.rungs {
        rung.share = rung.step_ns / slowest;
    }
    let stock = selection.iter().find(|m| m.kind == RungKind::Stock);
    let launches = stock.and_then(|stock| LaunchCost::of(stock.cell, &report.cells));
    Ladder {
        launches,
        phase: selection[0].cell.phase,
        batch: place.0,
        context: place.1,
        story: story::tell(selection, lowest, missing, report, launches, place),
        rungs: climb.rungs,
    }
}

fn floor_time(measured: &Measured<'_>) -> f64 {
    measured.floor.map_or(f64::INFINITY, |floor| floor.time_ns)
}

/// Floors nearer than this stand on one rung: a context of 1023 instead of 1024 is no step.
const NEAR: f64 = 0.02;

/// Whether two floors are of different steps, and not nearly the same.
pub(super) fn differ(a: f64, b: f64) -> bool {
    (a - b).abs() > NEAR * a.abs().min(b.abs())
}

/// A ladder as far as it is built.
struct Climb {
    rungs: Vec<Rung>,
    /// What all rungs so far add up to.
    level: f64,
    /// Batch and context of the ladder.
    place: (usize, usize),
}

/// The batch and context of a cell that stands on a ladder of another place.
pub(super) fn elsewhere(cell: &CellResult, place: (usize, usize)) -> Option<String> {
    ((cell.batch, cell.context) != place).then(|| format!("b{} c{}", cell.batch, cell.context))
}

impl Climb {
    fn floor(&mut self, cell: &CellResult, floor: KnownFloor, adds: f64) {
        self.push(floor.kind, None, cell, floor.time_ns, adds);
    }

    fn engine(&mut self, measured: &Measured<'_>) {
        let engine = Some(measured.cell.engine.clone());
        let adds = measured.time_ns - self.level;
        self.push(measured.kind, engine, measured.cell, measured.time_ns, adds);
    }

    fn push(&mut self, kind: RungKind, engine: Option<String>, cell: &CellResult, time_ns: f64, adds: f64) {
        self.level += adds;
        self.rungs.push(Rung {
            kind,
            dtype: cell.dtype,
            time_ns,
            step_ns: adds,
            share: 0.0,
            bytes: if engine.is_some() { cell.bytes.as_implemented } else { Some(cell.bytes.ideal()) },
            status: if engine.is_some() { cell.status } else { Status::Predicted },
            place: elsewhere(cell, self.place),
            engine,
        });
    }
}

impl Ladder {
    /// The name of a rung: `data sheet`, `ceiling`, an engine, or `ceiling at f32` for a floor that is not the first.
    #[must_use]
    pub fn name(&self, rung: usize) -> String {
        let this = &self.rungs[rung];
        let word = match (&this.engine, this.kind) {
            (Some(engine), RungKind::External) => {
                let place = this.place.as_ref().map_or_else(String::new, |place| format!(", {place}"));
                return format!("{engine} (external{place})");
            }
            (Some(engine), _) => return engine.clone(),
            (None, RungKind::Datasheet) => "data sheet",
            (None, _) => "ceiling",
        };
        let again = self.rungs[..rung].iter().any(|above| above.kind == this.kind);
        match &this.place {
            Some(place) => format!("{word} at {} {place}", this.dtype),
            None if again => format!("{word} at {}", this.dtype),
            None => word.to_owned(),
        }
    }

    /// The unit in which this ladder's times can be compared at a glance.
    #[must_use]
    pub fn scale(&self) -> TimeScale {
        TimeScale::for_longest(self.rungs.iter().map(|rung| rung.time_ns).fold(0.0, f64::max))
    }
}

/// One unit and one number of decimals for times that stand beside each other.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TimeScale {
    nanoseconds: f64,
    unit: &'static str,
    decimals: usize,
}

impl TimeScale {
    /// The scale that shows the longest of them in four digits or a few more.
    #[must_use]
    pub fn for_longest(nanoseconds: f64) -> Self {
        let of = |nanoseconds, unit, decimals| Self { nanoseconds, unit, decimals };
        match nanoseconds {
            t if t >= 99.95e6 => of(1e6, "ms", 1),
            t if t >= 9.995e6 => of(1e6, "ms", 2),
            t if t >= 999.5e3 => of(1e3, "µs", 0),
            t if t >= 99.95e3 => of(1e3, "µs", 1),
            _ => of(1e3, "µs", 2),
        }
    }

    /// A time in this scale.
    #[must_use]
    pub fn show(self, nanoseconds: f64) -> String {
        let shown = format!("{:.*}", self.decimals, nanoseconds / self.nanoseconds);
        // A difference that rounds to nothing has no sign.
        let shown = match shown.strip_prefix('-') {
            Some(digits) if digits.chars().all(|c| matches!(c, '0' | '.')) => digits.to_owned(),
            _ => shown,
        };
        format!("{shown} {}", self.unit)
    }
}
