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
mod side_result;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use crate::machine::clock::now_utc;
use crate::worker::Observer;
use hbmark_core::result::comparison::{
    COMPARISON_VERSION, CellComparison, ComparedCell, ComparedItem, Comparison, ComparisonKind,
    EngineVariant, Floor, Method, Pair, Settings,
};
use hbmark_core::stats;
use hbmark_report::analysis::compare::{Findings, RAN_ONCE, judge};

use matching::NoTime;

pub use error::CompareError;
pub use matching::{PlacedStep, places, series_of};
pub use process::{Launched, Launcher, Processes, clear};
pub use saved::saved;
pub use side_result::{SideResult, served_times};

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
    pub items: Vec<ComparedItem>,
    pub rounds: usize,
    /// Of the order within rounds.
    pub seed: u64,
    /// Measure A against itself first.
    pub aa: bool,
    pub settings: Settings,
}

/// One run of one side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    pub side: Side,
    /// Of the rounds of A against itself and of those of A against B, counted through.
    pub round: usize,
    /// As it is told to a person.
    pub title: String,
}

/// Runs one side once.
pub trait Runner {
    fn run(&mut self, launch: &Launch) -> Result<SideResult, CompareError>;
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
        started: 0,
    };
    let floor = if plan.aa { Some(rounds.take(plan, Against::Itself)?) } else { None };
    let are_steps = plan.items.iter().all(|item| matches!(item, ComparedItem::Cell(_)));
    let decide =
        |taken: &Taken, floor| judge(&taken.pairs, &taken.b_second, floor, &plan.settings, are_steps);
    let floor_found = floor.as_ref().map(|taken| decide(taken, None));
    let taken = if rounds.stopped.is_none() { rounds.take(plan, Against::Other)? } else { Taken::default() };
    let count = taken.b_second.len();
    if let Some(signal) = rounds.stopped
        && count < MIN_ROUNDS
    {
        return Err(CompareError::Stopped { signal, rounds: count, wanted: plan.rounds, least: MIN_ROUNDS });
    }
    let mut found = decide(&taken, floor_found.as_ref());
    let Rounds { first: [a, b], lost, stopped, .. } = rounds;
    let (a, b) = (a.ok_or(CompareError::NoRounds)?, b.ok_or(CompareError::NoRounds)?);
    a.check_against(&b)?;
    if a.protocol() == Some("smoke") {
        found.decides_nothing(RAN_ONCE);
    }
    // In A/A rounds both sides are A.
    let twin = |item: &ComparedItem| match item {
        ComparedItem::Cell(cell) => ComparedItem::Cell(ComparedCell { b: cell.a.clone(), ..cell.clone() }),
        served @ ComparedItem::Served { .. } => served.clone(),
    };
    let twins: Vec<ComparedItem> = plan.items.iter().map(twin).collect();
    let mut remarks = lost;
    remarks.extend(stopped.map(|signal| {
        format!(
            "stopped by signal {signal} after {count} of {} rounds: their number was to be fixed in advance, and who stops by hand \
             may have seen what came; a verdict of these is weaker than it says",
            plan.rounds
        )
    }));
    remarks.extend(a.remarks_beside(&b, &plan.items));
    let lost_floor = floor_found.iter().flat_map(|f| &f.cells).filter(|e| e.rounds < plan.rounds).count();
    if lost_floor > 0 {
        remarks.push(format!("A against itself lost rounds in {lost_floor} cells"));
    }
    let comparison = Comparison {
        schema_version: COMPARISON_VERSION,
        kind: ComparisonKind::Comparison,
        method: Method::PairedRounds,
        read: Vec::new(),
        command: plan.command.clone(),
        started_at,
        model: a.model_line(&b),
        machine: a.machine_line(),
        protocol: a.protocol().map(str::to_owned),
        differences: a.differences(&b),
        a: a.arm(&plan.a),
        b: b.arm(&plan.b),
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
        cells: cells(&plan.items, taken.pairs, found),
        remarks,
        other_devices: false,
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
    /// Whether no item can have enough usable rounds any more, however those that are left go.
    fn is_hopeless(&self, plan: &ComparisonPlan, done: usize) -> bool {
        let (least, left) = (stats::least_pairs(plan.settings.alpha), plan.rounds - done);
        let usable = |pairs: &Vec<Pair>| {
            pairs.iter().filter(|pair| pair.a_ns.is_some() && pair.b_ns.is_some()).count()
        };
        left > 0 && plan.rounds >= least && self.pairs.iter().all(|pairs| usable(pairs) + left < least)
    }

    /// As a reader sees it: `AB` or `BA`.
    fn order(&self) -> Vec<String> {
        self.b_second.iter().map(|second| if *second { "AB" } else { "BA" }.to_owned()).collect()
    }
}

struct Rounds<'a> {
    runner: &'a mut dyn Runner,
    observer: &'a mut dyn Observer,
    /// The first result of each side.
    first: [Option<SideResult>; 2],
    random: ChaCha8Rng,
    lost: Vec<String>,
    stopped: Option<i32>,
    done: usize,
    total: usize,
    /// Rounds that were started.
    started: usize,
}

impl Rounds<'_> {
    fn take(&mut self, plan: &ComparisonPlan, against: Against) -> Result<Taken, CompareError> {
        let mut taken = Taken { pairs: vec![Vec::new(); plan.items.len()], b_second: Vec::new() };
        let order = stats::balanced_order(plan.rounds, &mut self.random);
        for (round, b_second) in (1..=plan.rounds).zip(order) {
            let b_first = !b_second;
            let mut times = vec![Pair::default(); plan.items.len()];
            for slot in [b_first, !b_first] {
                let side = if slot && against == Against::Other { Side::B } else { Side::A };
                let title = match against {
                    Against::Itself => {
                        format!("A against A, round {round}: {}", if slot { "A'" } else { "A" })
                    }
                    Against::Other => format!("round {round}: {}", side.letter()),
                };
                let launch = Launch { side, round: self.started, title };
                match self.launch(plan, &launch, slot, &mut times) {
                    // An incomplete round is not judged.
                    Err(CompareError::Interrupted { signal }) => {
                        self.stopped = Some(signal);
                        return Ok(taken);
                    }
                    other => other?,
                }
            }
            self.started += 1;
            taken.b_second.push(b_second);
            for (pairs, pair) in taken.pairs.iter_mut().zip(times) {
                pairs.push(pair);
            }
            if against == Against::Other && taken.is_hopeless(plan, round) {
                self.lost.push(format!(
                    "ended after round {round} of {}: too many were lost for any cell to reach the {} usable rounds of a verdict",
                    plan.rounds,
                    stats::least_pairs(plan.settings.alpha)
                ));
                break;
            }
        }
        Ok(taken)
    }

    /// Runs one side and puts its times into the round.
    fn launch(
        &mut self,
        plan: &ComparisonPlan,
        launch: &Launch,
        second_slot: bool,
        times: &mut [Pair],
    ) -> Result<(), CompareError> {
        let Launch { side, title, .. } = launch;
        self.observer.stage(title);
        self.observer.progress(self.done, self.total, &mut String::new);
        let result = self.runner.run(launch);
        self.done += 1;
        let known = &mut self.first[*side as usize];
        let result = match result {
            Ok(result) => result,
            Err(error) if known.is_none() || matches!(error, CompareError::Interrupted { .. }) => {
                return Err(error);
            }
            Err(error) => {
                self.lost.push(format!("{title} gave no result: {error}"));
                for pair in times {
                    *failed(pair, second_slot) = true;
                }
                return Ok(());
            }
        };
        self.lost.extend(result.remark().map(|remark| format!("{title}: {remark}")));
        // Items and the reason that they have no time for.
        let mut without: Vec<(Vec<String>, String)> = Vec::new();
        for (item, pair) in plan.items.iter().zip(times) {
            match result.time(item, *side)? {
                Ok(time) if second_slot => pair.b_ns = Some(time),
                Ok(time) => pair.a_ns = Some(time),
                Err(NoTime { reason, own }) => {
                    *failed(pair, second_slot) |= own;
                    match without.iter_mut().find(|(_, known)| *known == reason) {
                        Some((items, _)) => items.push(item.id()),
                        None => without.push((vec![item.id()], reason)),
                    }
                }
            }
        }
        let lost = without.into_iter().map(|(items, reason)| match items.len() {
            count if count == plan.items.len() && count > 1 => format!("{title}: {reason}"),
            _ => format!("{title}: {}: {reason}", items.join(", ")),
        });
        self.lost.extend(lost);
        known.get_or_insert(result);
        Ok(())
    }
}

fn failed(pair: &mut Pair, of_b: bool) -> &mut bool {
    if of_b { &mut pair.b_failed } else { &mut pair.a_failed }
}

fn cells(items: &[ComparedItem], pairs: Vec<Vec<Pair>>, found: Findings) -> Vec<CellComparison> {
    let together = items.iter().zip(pairs).zip(found.cells);
    together.map(|((item, pairs), effect)| CellComparison { place: item.clone(), pairs, effect }).collect()
}

#[cfg(test)]
mod tests;
