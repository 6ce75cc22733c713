//! The ladder of a step: from what the data sheet promises to what was measured, and what each rung adds.
//!
//! Enters: judged cells, ceilings, a data sheet. Leaves: one [`Ladder`] per phase, batch and context. The floors are those of
//! [`hbmark_core::ledger`]; nothing is predicted here.
//!
//! What the rungs add sums to the time of the last one. Where two engines run different dtypes, their difference has two parts: what
//! the other dtype's bytes cost at the ceiling, a floor of its own, and what is left for kernels and data movement. Where memory was read
//! at another rate beside an engine's blocks than when the ceilings were measured, what that costs is no engine's: a floor, too.

use super::{distinct, ladder_summary};
use hbmark_core::ledger::{Floor, Roof, StepCost};
use hbmark_core::model::Dtype;
use hbmark_core::result::{
    Bound, CellResult, EngineKind, Ladder, LaunchCost, Phase, Report, Rung, RungKind, Status,
};
use hbmark_core::units::{BytesPerSecond, Flops};

/// Why a ladder with an external rung cannot be built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LadderError {
    #[error("the result has no cell `{asked}`; it has {known}")]
    NoSuchCell { asked: String, known: String },
    #[error("`{asked}` is not a decode, and external results are compared with decode cells only")]
    NotDecode { asked: String },
    #[error(
        "external results of different loads, {}, are steps of different work: give those of one load, or a ladder for each",
        .places.join(" and ")
    )]
    DifferentLoads { places: Vec<String> },
}

/// Batches and contexts within this factor of each other are one load: they are means of what ran.
const SAME_LOAD: f64 = 1.25;

/// What launching kernels one by one costs candle's forward at one place and dtype, where both were measured.
pub fn launch_cost(eager: &CellResult, cells: &[CellResult]) -> Option<LaunchCost> {
    let (eager_ns, dtype) = (trusted_tpot(eager)?, eager.dtype);
    let same = |cell: &&CellResult| {
        (cell.phase, cell.batch, cell.context, cell.dtype) == (eager.phase, eager.batch, eager.context, dtype)
            && RungKind::of_engine(&cell.engine) == RungKind::StockGraph
    };
    let eager_kind = RungKind::of_engine(&eager.engine);
    let replayed = cells.iter().find(same)?;
    // Memory that was slower beside one of them is no launch.
    let rates = eager.read_beside_bytes_per_s.zip(replayed.read_beside_bytes_per_s);
    if rates.is_some_and(|(eager, replayed)| differ(eager, replayed)) {
        return None;
    }
    let replayed_ns = trusted_tpot(replayed)?;
    let cost_ns = eager_ns - replayed_ns;
    (eager_kind == RungKind::Stock).then_some(LaunchCost {
        eager_ns,
        replayed_ns,
        cost_ns,
        share: cost_ns / eager_ns,
    })
}

/// The time of a decode that can be trusted.
fn trusted_tpot(cell: &CellResult) -> Option<f64> {
    cell.tpot_ns.filter(|time| is_trusted(cell.status) && time.is_finite() && *time > 0.0)
}

/// Whether the time of a cell may stand for it.
pub(super) fn is_trusted(status: Status) -> bool {
    status == Status::Ok
        || (status.is_doubtful() && !matches!(status, Status::Incomplete | Status::Smoke | Status::Simulated))
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
    /// What the floor is longer by at the rate at which memory was read beside the blocks, where that is known; 0 where it is nearly the ceiling's.
    pub memory_change_ns: Option<f64>,
    datasheet: Option<KnownFloor>,
}

impl<'a> Measured<'a> {
    /// `None` for a cell without a time that can be trusted.
    fn new(cell: &'a CellResult, report: &Report) -> Option<Self> {
        let step = cell.step_ns.as_ref().filter(|_| is_trusted(cell.status))?;
        let (time_ns, low, high) = match cell.phase {
            Phase::Decode | Phase::Verify { .. } => {
                (cell.tpot_ns?, cell.tpot_ci_low_ns, cell.tpot_ci_high_ns)
            }
            Phase::Prefill => (step.center(), step.ci_low, step.ci_high),
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
    fn from_prediction(cell: &'a CellResult, report: &Report) -> Option<Self> {
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
        let roof = report.ceilings.as_ref().map(|c| Roof::measured(c, cell.dtype));
        // A rate that the steps themselves beat says nothing of them. A GPU's memory is its own, and its canary one pattern of those among which a ceiling is the fastest.
        let on_host = report.environment.gpu.is_none();
        let rate = cell.read_beside_bytes_per_s.filter(|_| on_host && cell.fraction_of_read_beside.is_some());
        let beside = roof.as_ref().zip(rate).map(|(roof, rate)| {
            floor(RungKind::ReadBeside, Roof { bandwidth: BytesPerSecond(rate), ..roof.clone() })
        });
        let ceiling = roof.map(|roof| floor(RungKind::Ceiling, roof));
        let change = |(then, now): (KnownFloor, KnownFloor)| {
            if differ(then.time_ns, now.time_ns) { now.time_ns - then.time_ns } else { 0.0 }
        };
        let sheet = report.datasheet.as_ref();
        let of_sheet = |d| Roof::of_any_engine(d, cell.dtype, &report.model.architecture);
        let datasheet = sheet.map(|d| floor(RungKind::Datasheet, of_sheet(d)));
        Some(Self {
            cell,
            kind,
            time_ns,
            low_ns: interval.0,
            high_ns: interval.1,
            floor: ceiling.or(datasheet),
            memory_change_ns: ceiling.zip(beside).map(change),
            datasheet,
        })
    }

    /// Whether something ran, and not only a floor was computed.
    pub fn ran(&self) -> bool {
        self.cell.status != Status::Predicted
    }

    /// Whether memory was read at another rate beside the blocks than in the ceiling.
    pub fn has_other_memory(&self) -> bool {
        self.memory_change_ns.is_some_and(|change| change != 0.0)
    }

    /// The floor at the rate at which memory was read beside the blocks.
    pub fn floor_then_ns(&self) -> Option<f64> {
        Some(self.floor?.time_ns + self.memory_change_ns.unwrap_or(0.0))
    }

    /// Time over the engine's own floor; negative below it.
    pub fn over_floor(&self) -> Option<f64> {
        Some(self.time_ns - self.floor_then_ns()?)
    }
}

/// The floors on which the next engine of a ladder stands.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ground {
    pub floor_ns: f64,
    /// What other memory than the ceiling's adds to it.
    pub memory_change_ns: f64,
}

impl Ground {
    /// The floor of the first cell, at the ceiling.
    pub fn of(lowest: &Measured<'_>) -> Option<Self> {
        Some(Self { floor_ns: lowest.floor?.time_ns, memory_change_ns: 0.0 })
    }

    /// Moves to the floors of an engine: what its bytes at the ceiling add, and what memory at another rate then adds.
    pub fn move_to(&mut self, engine: &Measured<'_>) -> (Option<f64>, Option<f64>) {
        let Some(floor) = engine.floor else { return (None, None) };
        let bytes = floor.time_ns - self.floor_ns;
        let of_bytes = differ(floor.time_ns, self.floor_ns).then_some(bytes);
        self.floor_ns += of_bytes.unwrap_or(0.0);
        let of_memory = engine
            .memory_change_ns
            .filter(|change| differ(self.floor_ns + change, self.floor_ns + self.memory_change_ns))
            .map(|change| change - self.memory_change_ns);
        self.memory_change_ns += of_memory.unwrap_or(0.0);
        (of_bytes, of_memory)
    }
}

/// The ladders of every phase, batch and context at which something was measured, in the order of the cells.
///
/// An engine measured at several dtypes is on several ladders: one per dtype, on which every engine is at that dtype if it ran it,
/// and otherwise at the one of its own with the fewest bytes.
pub fn ladders(report: &Report) -> Vec<Ladder> {
    let place = |cell: &CellResult| (cell.phase, cell.batch, cell.context);
    distinct(report.cells.iter().map(place))
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
/// [`LadderError`] when the report has no such cell, when it is a prefill, or when the externals ran under different loads.
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
    one_load(externals)?;
    let place = |cell: &CellResult| (cell.phase, cell.batch, cell.context);
    let cells = report.cells.iter().filter(|cell| place(cell) == place(home));
    let (mut measured, mut missing) = (Vec::new(), Vec::new());
    for cell in cells {
        match Measured::new(cell, report).or_else(|| Measured::from_prediction(cell, report)) {
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

/// Refuses results whose steps are of different work: each would stand above the other with what it did more.
fn one_load(externals: &[CellResult]) -> Result<(), LadderError> {
    let apart = |of: fn(&CellResult) -> usize| {
        let values = || externals.iter().map(|cell| of(cell).max(1) as f64);
        values().fold(0.0, f64::max) > SAME_LOAD * values().fold(f64::INFINITY, f64::min)
    };
    if apart(|cell| cell.batch) || apart(|cell| cell.context) {
        let place = |cell: &CellResult| format!("{} at b{} c{}", cell.engine, cell.batch, cell.context);
        return Err(LadderError::DifferentLoads { places: externals.iter().map(place).collect() });
    }
    Ok(())
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
    // A GPU of a group has fewer bytes to move than one by itself; the ranks of a host share its memory.
    let on_gpu = report.environment.gpu.is_some();
    let ranks = |m: &Measured<'_>| if on_gpu { EngineKind::ranks(&m.cell.engine) } else { 1 };
    for (dtype, of_ranks) in measured.iter().map(|m| (m.cell.dtype, ranks(m))) {
        let alike: Vec<Measured<'_>> = measured.iter().filter(|m| ranks(m) == of_ranks).copied().collect();
        let selection = one_per_engine(&alike, dtype);
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
    let mut climb = LadderBuilder { rungs: Vec::new(), level: 0.0, place };
    let floored = || selection.iter().filter(|m| m.floor.is_some());
    // The ladder begins at the floor of its own cell; what another batch or context of an imported result costs is a rung of its own.
    let ours = floored().filter(|m| m.kind != RungKind::External);
    let lowest = ours.min_by(|a, b| floor_time(a).total_cmp(&floor_time(b)));
    let lowest = lowest.or_else(|| floored().min_by(|a, b| floor_time(a).total_cmp(&floor_time(b))));
    let mut ground = lowest.and_then(Ground::of);
    if let Some(lowest) = lowest {
        let ceiling = lowest.floor.filter(|floor| floor.kind == RungKind::Ceiling);
        for floor in [lowest.datasheet, ceiling].into_iter().flatten() {
            climb.floor(lowest.cell, floor, floor.time_ns - climb.level);
        }
    }
    for engine in selection {
        if let (Some(floor), Some(ground)) = (engine.floor, &mut ground) {
            let (of_bytes, of_memory) = ground.move_to(engine);
            if let Some(adds) = of_bytes {
                climb.floor(engine.cell, floor, adds);
            }
            if let Some(adds) = of_memory {
                let time_ns = ground.floor_ns + ground.memory_change_ns;
                climb.floor(engine.cell, KnownFloor { time_ns, kind: RungKind::ReadBeside, ..floor }, adds);
            }
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
    let launches = stock.and_then(|stock| launch_cost(stock.cell, &report.cells));
    Ladder {
        launches,
        phase: selection[0].cell.phase,
        batch: place.0,
        context: place.1,
        story: ladder_summary::summarize(selection, lowest, missing, report, launches, place),
        rungs: climb.rungs,
    }
}

fn floor_time(measured: &Measured<'_>) -> f64 {
    measured.floor.map_or(f64::INFINITY, |floor| floor.time_ns)
}

/// Floors nearer than this are one rung: a context of 1023 instead of 1024 is not a step.
const NEAR: f64 = 0.02;

/// Whether two floors are of different steps, and not nearly the same.
pub(super) fn differ(a: f64, b: f64) -> bool {
    (a - b).abs() > NEAR * a.abs().min(b.abs())
}

/// A ladder as far as it is built.
struct LadderBuilder {
    rungs: Vec<Rung>,
    /// What all rungs so far add up to.
    level: f64,
    /// Batch and context of the ladder.
    place: (usize, usize),
}

/// The batch and context of a cell on the ladder of another place.
pub(super) fn elsewhere(cell: &CellResult, place: (usize, usize)) -> Option<String> {
    ((cell.batch, cell.context) != place).then(|| format!("b{} c{}", cell.batch, cell.context))
}

impl LadderBuilder {
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
