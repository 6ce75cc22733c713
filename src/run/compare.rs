//! Comparisons: two configurations in paired rounds, or two saved results side by side.
//!
//! Enters: a [`ComparisonPlan`] and something that runs a side once, or two read results. Leaves: a [`Comparison`]. A side runs in a process of its
//! own every time, so that what a process happens to get (its place in memory, above all) is part of the spread and not of the
//! effect; which side
//! goes first is drawn, each as often as the other.

mod error;
mod matching;
mod process;
mod saved;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use crate::machine::clock::now_utc;
use crate::worker::Observer;
use hbmark_core::result::comparison::{
    Arm, COMPARISON_VERSION, CellComparison, ComparedCell, Comparison, ComparisonKind, Difference,
    EngineVariant, Floor, Method, Pair, Settings,
};
use hbmark_core::result::{Capabilities, Report};
use hbmark_core::stats;
use hbmark_report::analysis::compare::{Findings, RAN_ONCE, judge};

pub use error::CompareError;
pub use matching::{places, series_of};
pub use process::{Launcher, Processes, clear};
pub use saved::saved;

/// Rounds when none are asked for: a verdict needs seven, and twelve find 2 % where rounds spread by 1.5 %.
pub const DEFAULT_ROUNDS: usize = 12;

/// Rounds below which nothing is said: one difference has no spread.
const MIN_ROUNDS: usize = 2;

/// A side of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    A,
    B,
}

impl Side {
    /// Its letter.
    #[must_use]
    pub fn letter(self) -> char {
        match self {
            Self::A => 'A',
            Self::B => 'B',
        }
    }
}

/// A live comparison, checked.
#[derive(Debug, Clone, PartialEq)]
pub struct ComparisonPlan {
    /// The sides as they were given.
    pub a: String,
    pub b: String,
    pub command: String,
    pub places: Vec<ComparedCell>,
    pub rounds: usize,
    /// Of the order within rounds.
    pub seed: u64,
    /// Measure A against itself first.
    pub aa: bool,
    pub settings: Settings,
}

/// Runs one side once.
pub trait Runner {
    /// # Errors
    /// When the side gave no result.
    fn run(&mut self, side: Side, launch: &str) -> Result<Report, CompareError>;
}

/// A comparison, and the signal that ended it before its last round.
#[derive(Debug, Clone, PartialEq)]
pub struct Compared {
    pub comparison: Comparison,
    pub stopped: Option<i32>,
}

/// Runs the rounds and judges them. After a signal, the rounds that are complete by then are judged.
///
/// # Errors
/// When a side gives no result in its first launch, or results are not those of the plan. A launch that fails later is a lost round.
/// When it is stopped before a second round.
pub fn live(
    plan: &ComparisonPlan,
    runner: &mut dyn Runner,
    observer: &mut dyn Observer,
) -> Result<Compared, CompareError> {
    let started_at = Some(now_utc());
    let mut rounds = Rounds {
        runner,
        observer,
        first: [None, None],
        random: ChaCha8Rng::seed_from_u64(plan.seed),
        lost: Vec::new(),
        stopped: None,
        done: 0,
        total: plan.rounds * if plan.aa { 4 } else { 2 },
    };
    let floor = if plan.aa { Some(rounds.take(plan, Against::Itself)?) } else { None };
    let floor_found = floor.as_ref().map(|taken| judge(&taken.pairs, &taken.b_second, None, &plan.settings));
    let taken = if rounds.stopped.is_none() { rounds.take(plan, Against::Other)? } else { Taken::default() };
    let count = taken.b_second.len();
    if let Some(signal) = rounds.stopped
        && count < MIN_ROUNDS
    {
        return Err(CompareError::Stopped { signal, rounds: count, wanted: plan.rounds, least: MIN_ROUNDS });
    }
    let mut found = judge(&taken.pairs, &taken.b_second, floor_found.as_ref(), &plan.settings);
    let Rounds { first: [a, b], lost, stopped, .. } = rounds;
    let (a, b) = (a.ok_or(CompareError::NoRounds)?, b.ok_or(CompareError::NoRounds)?);
    if a.model.architecture != b.model.architecture {
        return Err(CompareError::models(&a, &b));
    }
    if a.protocol.as_ref().is_some_and(|protocol| protocol.name == "smoke") {
        found.decides_nothing(RAN_ONCE);
    }
    // In A/A rounds both sides are A.
    let twin = |place: &ComparedCell| ComparedCell { b: place.a.clone(), ..place.clone() };
    let twins: Vec<ComparedCell> = plan.places.iter().map(twin).collect();
    let mut remarks = lost;
    remarks.extend(stopped.map(|signal| {
        format!(
            "stopped by signal {signal} after {count} of {} rounds: their number was to be fixed in advance, and who stops by hand \
             may have seen what came; a verdict of these is weaker than it says",
            plan.rounds
        )
    }));
    remarks.extend(tokens_differ(&plan.places, &a, &b));
    let lost_floor = floor_found.iter().flat_map(|f| &f.cells).filter(|e| e.rounds < plan.rounds).count();
    if lost_floor > 0 {
        remarks.push(format!("A against itself lost rounds in {lost_floor} cells"));
    }
    let comparison = Comparison {
        schema_version: COMPARISON_VERSION,
        kind: ComparisonKind::Comparison,
        method: Method::PairedRounds,
        command: plan.command.clone(),
        started_at,
        model: model_line(&a, &b),
        machine: machine_line(&a),
        protocol: a.protocol.as_ref().map(|p| p.name.clone()),
        differences: differences(&a, &b),
        a: arm(&plan.a, &a),
        b: arm(&plan.b, &b),
        rounds: Some(count),
        seed: Some(plan.seed),
        order: taken.order(),
        settings: plan.settings,
        floor: floor.zip(floor_found).map(|(taken, found)| Floor {
            order: taken.order(),
            overall: found.overall.clone(),
            cells: cells(&twins, taken.pairs, found),
        }),
        overall: found.overall.clone(),
        cells: cells(&plan.places, taken.pairs, found),
        remarks,
        limits: Vec::new(),
    };
    Ok(Compared { comparison, stopped })
}

/// The other side of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Against {
    Itself,
    Other,
}

/// Rounds as taken: for each place its pairs, and for each round which side went first.
#[derive(Default)]
struct Taken {
    pairs: Vec<Vec<Pair>>,
    b_second: Vec<bool>,
}

impl Taken {
    /// As a reader sees it: `AB` or `BA`.
    fn order(&self) -> Vec<String> {
        self.b_second.iter().map(|second| if *second { "AB" } else { "BA" }.to_owned()).collect()
    }
}

struct Rounds<'a> {
    runner: &'a mut dyn Runner,
    observer: &'a mut dyn Observer,
    /// The first result of each side.
    first: [Option<Report>; 2],
    random: ChaCha8Rng,
    lost: Vec<String>,
    stopped: Option<i32>,
    done: usize,
    total: usize,
}

impl Rounds<'_> {
    fn take(&mut self, plan: &ComparisonPlan, against: Against) -> Result<Taken, CompareError> {
        let mut taken = Taken { pairs: vec![Vec::new(); plan.places.len()], b_second: Vec::new() };
        let order = stats::balanced_order(plan.rounds, &mut self.random);
        for (round, b_second) in (1..=plan.rounds).zip(order) {
            let b_first = !b_second;
            let mut times = vec![Pair::default(); plan.places.len()];
            for slot in [b_first, !b_first] {
                let side = if slot && against == Against::Other { Side::B } else { Side::A };
                let title = match against {
                    Against::Itself => {
                        format!("A against A, round {round}: {}", if slot { "A'" } else { "A" })
                    }
                    Against::Other => format!("round {round}: {}", side.letter()),
                };
                match self.launch(plan, side, slot, &title, &mut times) {
                    // An incomplete round is not judged.
                    Err(CompareError::Interrupted { signal }) => {
                        self.stopped = Some(signal);
                        return Ok(taken);
                    }
                    other => other?,
                }
            }
            taken.b_second.push(b_second);
            for (pairs, pair) in taken.pairs.iter_mut().zip(times) {
                pairs.push(pair);
            }
        }
        Ok(taken)
    }

    /// Runs one side and puts its medians into the round.
    fn launch(
        &mut self,
        plan: &ComparisonPlan,
        side: Side,
        second_slot: bool,
        title: &str,
        times: &mut [Pair],
    ) -> Result<(), CompareError> {
        self.observer.stage(title);
        self.observer.progress(self.done, self.total, &mut String::new);
        let result = self.runner.run(side, title);
        self.done += 1;
        let known = &mut self.first[side as usize];
        let result = match result {
            Ok(result) => result,
            Err(error) if known.is_none() || matches!(error, CompareError::Interrupted { .. }) => {
                return Err(error);
            }
            Err(error) => {
                self.lost.push(format!("{title} gave no result: {error}"));
                return Ok(());
            }
        };
        for (place, pair) in plan.places.iter().zip(times) {
            let id = if side == Side::A { place.id_of_a() } else { place.id_of_b() };
            let cell = result.cells.iter().find(|cell| cell.id == id);
            let cell =
                cell.ok_or_else(|| CompareError::CellMissing { side: side.letter(), id: id.clone() })?;
            match matching::typical(cell) {
                Ok(time) if second_slot => pair.b_ns = Some(time),
                Ok(time) => pair.a_ns = Some(time),
                Err(reason) => self.lost.push(format!("{title}: {id}: {reason}")),
            }
        }
        known.get_or_insert(result);
        Ok(())
    }
}

fn cells(places: &[ComparedCell], pairs: Vec<Vec<Pair>>, found: Findings) -> Vec<CellComparison> {
    let together = places.iter().zip(pairs).zip(found.cells);
    together.map(|((place, pairs), effect)| CellComparison { place: place.clone(), pairs, effect }).collect()
}

fn arm(given: &str, report: &Report) -> Arm {
    Arm {
        given: given.to_owned(),
        command: report.command.clone(),
        started_at: report.started_at.clone(),
        series: series_of(report),
        config: report.config.clone(),
    }
}

fn model_line(a: &Report, b: &Report) -> String {
    let line = |report: &Report| format!("{} · {}", report.model.name, report.model.source);
    if line(a) == line(b) { line(a) } else { format!("A {} · B {}", line(a), line(b)) }
}

fn machine_line(report: &Report) -> String {
    let environment = &report.environment;
    let gpu = environment.gpu.as_ref().and_then(|gpu| gpu.name.clone());
    let gpu = gpu.filter(|_| report.capabilities.iter().any(Capabilities::on_gpu));
    let product = gpu.or_else(|| environment.cpu.model.clone()).unwrap_or_else(|| "unknown product".into());
    let revision = environment.build.git_revision.as_ref().map_or_else(String::new, |r| format!(" ({r})"));
    let cores = environment.cpu.usable_cores;
    format!("{product} · {cores} cores · hbmark {}{revision}", environment.build.version)
}

/// The keys in which two configurations differ.
fn differences(a: &Report, b: &Report) -> Vec<Difference> {
    let null = serde_json::Value::Null;
    let mut keys: Vec<&String> = a.config.keys().chain(b.config.keys()).collect();
    keys.sort();
    keys.dedup();
    keys.into_iter()
        // Where results are written is no difference, and the options of a device repeat its flags.
        .filter(|key| !matches!(key.as_str(), "out" | "device_options"))
        .filter_map(|key| {
            let value = |report: &Report| report.config.get(key).unwrap_or(&null).clone();
            let (of_a, of_b) = (value(a), value(b));
            (of_a != of_b).then(|| Difference { key: key.clone(), a: of_a, b: of_b })
        })
        .collect()
}

/// A remark where the sides generate different tokens at one dtype: they may then not do the same work.
fn tokens_differ(places: &[ComparedCell], a: &Report, b: &Report) -> Option<String> {
    let hash = |report: &Report, id: &str| -> Option<String> {
        report.cells.iter().find(|cell| cell.id == id)?.quality.as_ref()?.token_hash.clone()
    };
    let differ = |place: &&ComparedCell| {
        let hashes = hash(a, &place.id_of_a()).zip(hash(b, &place.id_of_b()));
        place.a.dtype == place.b.dtype && hashes.is_some_and(|(a, b)| a != b)
    };
    let count = places.iter().filter(differ).count();
    (count > 0).then(|| format!("in {count} of {} cells the sides generate different tokens", places.len()))
}

#[cfg(test)]
mod tests;
