//! Is B faster than A? From paired times to a verdict.
//!
//! Enters: the times of each round, one per side, and the settings of the decision. Leaves: an [`Effect`] per cell and one over all
//! cells. Pure: it runs nothing.
//!
//! The unit is a round: one fresh process a side. Everything is decided on ln(B/A) of a round's medians, and on the order
//! within rounds, which was drawn: what the second launch of a round has of being the second is estimated beside the effect and taken out.

use serde::{Deserialize, Serialize};

use super::words::counted;
use hbmark_core::result::comparison::{
    CellComparison, Comparison, ComparisonVerdict, Effect, Method, Pair, Settings,
};
use hbmark_core::stats;

/// The effects of a comparison.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Findings {
    /// In the order of the cells.
    pub cells: Vec<Effect>,
    /// The mean over cells of d, round by round; null with a single cell, or where no round has all of them.
    pub overall: Option<Effect>,
}

/// Judges the rounds of every cell; `b_second` says of each round which side went second, `floor` holds what A against itself gave in the same
/// cells. The cells and their mean are one family of tests.
pub fn judge(
    cells: &[Vec<Pair>],
    b_second: &[bool],
    floor: Option<&Findings>,
    settings: &Settings,
) -> Findings {
    let later = cells.iter().map(|rounds| later_over_first(rounds, b_second)).collect();
    let centers = |rounds: &[Pair]| (center(rounds, |pair| pair.a_ns), center(rounds, |pair| pair.b_ns));
    decide(later, b_second, Unit::Round, floor, settings).with_times(cells, centers)
}

/// Judges processes that were run at other times, and not in pairs: the `i`-th of each side stand beside each other for no other reason. The
/// test deals all of them to the sides in every way. `read` is the time in which the probe of each read a gigabyte: no difference is called that
/// the interval of its ratio leaves open, for the machine may have changed as much.
pub fn judge_processes(cells: &[Vec<Pair>], read: &[Pair], settings: &Settings) -> Findings {
    let dealt = Dealt::of(cells);
    let later = cells.iter().map(|pairs| dealt.twice_logs(pairs)).collect();
    let centers = |pairs: &[Pair]| {
        let side = |times: Vec<f64>| (!times.is_empty()).then(|| stats::geometric_mean(&times));
        (side(times_of(pairs, |pair| pair.a_ns)), side(times_of(pairs, |pair| pair.b_ns)))
    };
    let mut found = decide(later, &dealt.is_b, Unit::Process, None, settings).with_times(cells, centers);
    let machine =
        decide(vec![dealt.twice_logs(read)], &dealt.is_b, Unit::Process, None, settings).cells.remove(0);
    if let (Some(ratio), Some(low), Some(high)) = (machine.ratio, machine.low, machine.high) {
        let reason = format!(
            "the machine itself may be the cause: by the probe of each process its memory took {ratio:.3} times as long in those of B \
             ({low:.3} to {high:.3})"
        );
        let differs = is_shown(&machine, machine.p, settings);
        found.undecided(&reason, |effect| match effect.verdict {
            ComparisonVerdict::Faster | ComparisonVerdict::Slower => nearest(effect) <= furthest(&machine),
            ComparisonVerdict::Equivalent => differs,
            ComparisonVerdict::Inconclusive => false,
        });
    }
    found
}

/// Whether the test and the interval both show a difference: a verdict never contradicts the interval beside it.
fn is_shown(effect: &Effect, p: Option<f64>, settings: &Settings) -> bool {
    let apart = effect.low.zip(effect.high).is_some_and(|(low, high)| low > 1.0 || high < 1.0);
    apart && p.is_some_and(|p| p <= settings.alpha)
}

/// Which processes there are, those of A before those of B.
struct Dealt {
    places: Vec<usize>,
    is_b: Vec<bool>,
}

impl Dealt {
    /// Of those that have a time in any cell.
    fn of(cells: &[Vec<Pair>]) -> Self {
        let most = cells.iter().map(Vec::len).max().unwrap_or(0);
        let timed = |side: fn(&Pair) -> Option<f64>| {
            let has =
                move |at: &usize| cells.iter().any(|pairs| usable(pairs.get(*at).and_then(side)).is_some());
            (0..most).filter(has)
        };
        let (a, b) = (timed(|pair| pair.a_ns), timed(|pair| pair.b_ns));
        let labelled = a.map(|at| (at, false)).chain(b.map(|at| (at, true)));
        let (places, is_b) = labelled.unzip();
        Self { places, is_b }
    }

    /// Twice the logarithm of the time of each: being B adds to it and being A takes away half of the difference of the sides, as in a round.
    fn twice_logs(&self, pairs: &[Pair]) -> Vec<Option<f64>> {
        let time = |(at, is_b): (&usize, &bool)| {
            let pair = pairs.get(*at)?;
            Some(2.0 * usable(if *is_b { pair.b_ns } else { pair.a_ns })?.ln())
        };
        self.places.iter().zip(&self.is_b).map(time).collect()
    }
}

fn usable(time: Option<f64>) -> Option<f64> {
    time.filter(|time| time.is_finite() && *time > 0.0)
}

fn times_of(pairs: &[Pair], side: impl Fn(&Pair) -> Option<f64>) -> Vec<f64> {
    pairs.iter().filter_map(|pair| usable(side(pair))).collect()
}

/// The effects of one family, without times.
fn decide(
    mut later: Vec<Vec<Option<f64>>>,
    b_second: &[bool],
    unit: Unit,
    floor: Option<&Findings>,
    settings: &Settings,
) -> Findings {
    let cells = later.len();
    let with_overall = cells > 1;
    if with_overall {
        later.push(means(&later, b_second.len()));
    }
    let tested = later.iter().filter(|of_cell| of_cell.iter().flatten().count() > 1).count();
    let tests = stats::order_test(&later, b_second, settings.seed);
    let effect = |index: usize, floor: Option<f64>| {
        let found =
            Statistics { later: &later[index], b_second, unit, test: tests[index], tests: tested, floor };
        found.effect(settings)
    };
    let of_cells = (0..cells).map(|index| {
        effect(index, floor.map(|floor| floor.cells.get(index).map_or(f64::INFINITY, furthest)))
    });
    let of_cells = of_cells.collect();
    let overall = (with_overall && later[cells].iter().any(Option::is_some)).then(|| {
        let floor = floor.map(|floor| floor.overall.as_ref().map_or(f64::INFINITY, furthest));
        effect(cells, floor)
    });
    Findings { cells: of_cells, overall }
}

/// The logarithm of the second time of each round over the first.
fn later_over_first(rounds: &[Pair], b_second: &[bool]) -> Vec<Option<f64>> {
    let signed = |(pair, second): (&Pair, &bool)| pair.log_ratio().map(|d| if *second { d } else { -d });
    rounds.iter().zip(b_second).map(signed).collect()
}

/// The mean over the cells, in the rounds that have all of them.
fn means(later: &[Vec<Option<f64>>], rounds: usize) -> Vec<Option<f64>> {
    let of_round = |round: usize| {
        let each: Option<Vec<f64>> = later.iter().map(|cell| cell.get(round).copied().flatten()).collect();
        each.map(|each| stats::mean(&each))
    };
    (0..rounds).map(of_round).collect()
}

/// The geometric mean of one side over the rounds that have both.
fn center(rounds: &[Pair], side: impl Fn(&Pair) -> Option<f64>) -> Option<f64> {
    let logs: Vec<f64> = rounds
        .iter()
        .filter(|pair| pair.log_ratio().is_some())
        .filter_map(|pair| Some(side(pair)?.ln()))
        .collect();
    (!logs.is_empty()).then(|| stats::mean(&logs).exp())
}

/// The end of an interval that is further from no difference, as a relative difference; without an interval nothing is ruled out.
fn furthest(effect: &Effect) -> f64 {
    let ends = effect.low.zip(effect.high);
    ends.map_or(f64::INFINITY, |(low, high)| low.ln().abs().max(high.ln().abs()).exp_m1())
}

/// The end of an interval that is nearer to no difference, as a relative difference; none where it is on both sides of it.
fn nearest(effect: &Effect) -> f64 {
    let ends = effect.low.zip(effect.high).map(|(low, high)| (low.ln(), high.ln()));
    let same_side = ends.filter(|(low, high)| *low > 0.0 || *high < 0.0);
    same_side.map_or(0.0, |(low, high)| low.abs().min(high.abs()).exp_m1())
}

/// What is drawn, and counted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Unit {
    /// A pair of processes; its order was drawn.
    Round,
    /// A process by itself.
    Process,
}

/// What a verdict is made of.
struct Statistics<'a> {
    /// The second time of each round over the first, as a logarithm; twice that of the time of each process.
    later: &'a [Option<f64>],
    /// Of a process: whether it is B's.
    b_second: &'a [bool],
    unit: Unit,
    test: Option<stats::OrderTest>,
    /// Tests in the family.
    tests: usize,
    /// The interval of A against A, if that was run; infinite where it could not be measured.
    floor: Option<f64>,
}

impl Statistics<'_> {
    /// What has a time, and how much of it has B second, or is B's.
    fn known(&self) -> (usize, usize) {
        let known = self.later.iter().zip(self.b_second).filter(|(d, _)| d.is_some());
        known.fold((0, 0), |(all, second), (_, is_second)| (all + 1, second + usize::from(*is_second)))
    }

    /// The least p that what has a time can reach.
    fn least_p(&self) -> f64 {
        let (all, second) = self.known();
        stats::least_order_p(all, second)
    }

    fn effect(&self, settings: &Settings) -> Effect {
        let (all, of_b) = self.known();
        // As many rounds, or processes a side, as tell as much where one side has more of them.
        let (rounds, balanced) = match self.unit {
            Unit::Round => (all, all),
            Unit::Process => (of_b.min(all - of_b), 4 * of_b * (all - of_b) / all.max(1)),
        };
        let estimated = stats::order_effect(self.later, self.b_second, settings.confidence);
        // Without both orders the difference of the sides is what there is, without an interval.
        let plain = || {
            let differences: Vec<f64> = self
                .later
                .iter()
                .zip(self.b_second)
                .filter_map(|(d, second)| d.map(|d| if *second { d } else { -d }))
                .collect();
            (!differences.is_empty()).then(|| stats::mean(&differences))
        };
        let level = settings.alpha / self.tests.max(1) as f64;
        let minimum = estimated
            .filter(|_| self.least_p() <= settings.alpha)
            .and_then(|(_, spread)| stats::minimum_detectable(spread, balanced, level, settings.power));
        let mut effect = Effect {
            rounds,
            ratio: estimated.map(|(interval, _)| interval.center).or_else(plain).map(f64::exp),
            low: estimated.map(|(interval, _)| interval.low.exp()),
            high: estimated.map(|(interval, _)| interval.high.exp()),
            p: self.test.map(|test| test.p),
            p_exact: self.test.map(|test| test.exact),
            p_adjusted: self.test.map(|test| test.p_adjusted),
            minimum_detectable: minimum.map(f64::exp_m1),
            floor: self.floor.filter(|floor| floor.is_finite()),
            ..Effect::unknown()
        };
        (effect.verdict, effect.reason) = self.rule(&effect, settings);
        effect
    }

    fn rule(&self, effect: &Effect, settings: &Settings) -> (ComparisonVerdict, String) {
        let (Some(ratio), Some(low), Some(high), Some(p)) =
            (effect.ratio, effect.low, effect.high, effect.p_adjusted)
        else {
            let least = self.least_units(settings);
            let reason = match self.unit {
                Unit::Round => {
                    format!("{}; at least {least} are needed", counted(effect.rounds, "usable round"))
                }
                Unit::Process => format!("{}; at least {least} a side are needed", self.processes()),
            };
            return (ComparisonVerdict::Inconclusive, reason);
        };
        let edge = settings.margin.ln_1p();
        if low.ln() >= -edge && high.ln() <= edge {
            let reason = format!("the whole interval lies within ±{}", percent(settings.margin));
            return (ComparisonVerdict::Equivalent, reason);
        }
        if !is_shown(effect, Some(p), settings) {
            return (ComparisonVerdict::Inconclusive, self.not_shown(effect, settings));
        }
        let size = ratio.ln().abs().exp_m1();
        if let Some(floor) = self.floor.filter(|floor| size <= *floor) {
            let reason = if floor.is_finite() {
                let (size, floor) = (percent(size), percent(floor));
                format!(
                    "a difference of {size} is not beyond what A against itself leaves open here ({floor})"
                )
            } else {
                "what A against itself leaves open here could not be measured".into()
            };
            return (ComparisonVerdict::Inconclusive, reason);
        }
        if ratio < 1.0 {
            (ComparisonVerdict::Faster, format!("B takes {} less time", percent(1.0 - ratio)))
        } else {
            (ComparisonVerdict::Slower, format!("B takes {} more time", percent(ratio - 1.0)))
        }
    }

    fn not_shown(&self, effect: &Effect, settings: &Settings) -> String {
        if let Some(minimum) = effect.minimum_detectable {
            return format!("no difference shown; {} would mostly have been found", percent(minimum));
        }
        let (have, remedy) = match self.unit {
            Unit::Round => (counted(effect.rounds, "round"), "run"),
            Unit::Process => (self.processes(), "of each side, save"),
        };
        format!(
            "{have} cannot show one: the least p is {:.2e}, and {:.2e} is needed; {remedy} {} or more",
            self.least_p(),
            settings.alpha,
            self.least_units(settings)
        )
    }

    /// How many processes of A and of B have a time.
    fn processes(&self) -> String {
        let (all, of_b) = self.known();
        format!("{} of A and {of_b} of B", counted(all - of_b, "process"))
    }

    /// The fewest rounds, or processes a side, that can decide.
    fn least_units(&self, settings: &Settings) -> usize {
        match self.unit {
            Unit::Round => stats::least_pairs(settings.alpha),
            Unit::Process => stats::least_a_side(settings.alpha),
        }
    }
}

impl Findings {
    /// With the times of both sides of each cell.
    fn with_times(mut self, cells: &[Vec<Pair>], of: impl Fn(&[Pair]) -> (Option<f64>, Option<f64>)) -> Self {
        for (effect, pairs) in self.cells.iter_mut().zip(cells) {
            (effect.a_ns, effect.b_ns) = of(pairs);
        }
        self
    }

    /// What a verdict rests on means nothing.
    pub fn decides_nothing(&mut self, reason: &str) {
        self.undecided(reason, |_| true);
    }

    fn undecided(&mut self, reason: &str, is: impl Fn(&Effect) -> bool) {
        for effect in self.cells.iter_mut().chain(&mut self.overall).filter(|effect| is(effect)) {
            effect.verdict = ComparisonVerdict::Inconclusive;
            reason.clone_into(&mut effect.reason);
        }
    }
}

/// Why processes of the smoke protocol decide nothing.
pub const RAN_ONCE: &str = "every cell ran once a process: the times mean nothing";
/// Why two saved results decide nothing.
pub const ONE_PROCESS: &str = "one process a side shows a ratio and not its cause";
/// Pairs of times that are decided again in a moment.
const MAX_PAIRS: usize = 100_000;

/// Decides a saved comparison again from its rounds. What they do not give is replaced, and a remark says so.
pub(super) fn recheck_comparison(found: &mut Comparison) {
    let paired = found.method == Method::PairedRounds;
    found.rounds = paired.then_some(found.order.len());
    if !paired {
        found.floor = None;
    }
    let again = |cells: &[CellComparison], order: &[String], floor: Option<&Findings>| {
        let mut judged = match found.method {
            Method::PairedRounds => of_rounds(cells, order, floor, &found.settings),
            Method::SavedResults => of_saved(cells),
            Method::SavedProcesses => of_processes(cells, &found.read, &found.settings),
        };
        if found.protocol.as_deref() == Some("smoke") && found.method != Method::SavedResults {
            judged.decides_nothing(RAN_ONCE);
        }
        judged
    };
    let floor = found.floor.as_ref().map(|floor| again(&floor.cells, &floor.order, None));
    let judged = again(&found.cells, &found.order, floor.as_ref());
    let remarks = &mut found.remarks;
    if let Some((floor, judged)) = found.floor.as_mut().zip(floor) {
        replace((&mut floor.cells, &mut floor.overall), judged, "A against A, ", remarks);
    }
    replace((&mut found.cells, &mut found.overall), judged, "", remarks);
}

/// The effects of saved rounds.
fn of_rounds(
    cells: &[CellComparison],
    order: &[String],
    floor: Option<&Findings>,
    settings: &Settings,
) -> Findings {
    let b_second: Vec<bool> = order.iter().map(|order| order == "AB").collect();
    let complete = |cell: &CellComparison| {
        let mut pairs = cell.pairs.clone();
        pairs.resize(b_second.len(), Pair::default());
        pairs
    };
    if let Some(kept) = too_many(cells, b_second.len()) {
        return kept;
    }
    let pairs: Vec<Vec<Pair>> = cells.iter().map(complete).collect();
    judge(&pairs, &b_second, floor, settings)
}

/// The effects of saved processes.
fn of_processes(cells: &[CellComparison], read: &[Pair], settings: &Settings) -> Findings {
    let most = cells.iter().map(|cell| 2 * cell.pairs.len()).max().unwrap_or(0);
    if let Some(kept) = too_many(cells, most) {
        return kept;
    }
    let pairs: Vec<Vec<Pair>> = cells.iter().map(|cell| cell.pairs.clone()).collect();
    judge_processes(&pairs, read, settings)
}

/// Where deciding again would take too long: the effects as they are, and no verdict.
fn too_many(cells: &[CellComparison], units: usize) -> Option<Findings> {
    (cells.len().saturating_mul(units) > MAX_PAIRS).then(|| {
        let effects = cells.iter().map(|cell| cell.effect.clone()).collect();
        let mut kept = Findings { cells: effects, overall: None };
        kept.decides_nothing("more rounds than are decided again from a file");
        kept
    })
}

/// The effects of two saved results: the interval is that of samples which the comparison does not keep.
fn of_saved(cells: &[CellComparison]) -> Findings {
    let of_cell = |cell: &CellComparison| {
        let pair = cell.pairs.first().copied().unwrap_or_default();
        let ratio = pair.log_ratio().map(f64::exp);
        let around = |low: &f64, high: &f64| ratio.is_some_and(|ratio| (*low..=*high).contains(&ratio));
        let interval = cell.effect.low.zip(cell.effect.high).filter(|(low, high)| around(low, high));
        let effect =
            Statistics { later: &[], b_second: &[], unit: Unit::Process, test: None, tests: 0, floor: None };
        Effect {
            rounds: usize::from(ratio.is_some()),
            a_ns: pair.a_ns,
            b_ns: pair.b_ns,
            ratio,
            low: interval.map(|(low, _)| low),
            high: interval.map(|(_, high)| high),
            reason: ONE_PROCESS.to_owned(),
            ..effect.effect(&Settings::new(0.0, 0))
        }
    };
    Findings { cells: cells.iter().map(of_cell).collect(), overall: None }
}

/// Puts effects into the place of what a file says, with a remark for each verdict or ratio that was another.
fn replace(
    (cells, overall): (&mut [CellComparison], &mut Option<Effect>),
    judged: Findings,
    what: &str,
    remarks: &mut Vec<String>,
) {
    let mut note = |stated: &Effect, own: &Effect, of: &str| {
        let alike = match (stated.ratio, own.ratio) {
            (Some(stated), Some(own)) => (stated - own).abs() <= 1e-6 * own,
            (stated, own) => stated.is_some() == own.is_some(),
        };
        if stated.verdict != own.verdict || !alike {
            let said = |effect: &Effect| {
                let ratio = effect.ratio.map_or_else(|| "no ratio".to_owned(), |ratio| format!("{ratio:.4}"));
                format!("{} ({ratio})", effect.verdict.word())
            };
            remarks.push(format!(
                "{what}{of}: the file says {}, its rounds give {}",
                said(stated),
                said(own)
            ));
        }
    };
    for (cell, own) in cells.iter_mut().zip(judged.cells) {
        note(&cell.effect, &own, &cell.place.id());
        cell.effect = own;
    }
    if let Some((stated, own)) = overall.as_ref().zip(judged.overall.as_ref()) {
        note(stated, own, "all cells");
    }
    *overall = judged.overall;
}

/// A relative difference for a sentence.
pub fn percent(fraction: f64) -> String {
    let percent = fraction * 100.0;
    if percent.abs() >= 10.0 { format!("{percent:.1} %") } else { format!("{percent:.2} %") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;
    use rand_distr::{Distribution, StandardNormal};

    const ROUNDS: usize = 12;

    fn settings() -> Settings {
        Settings::new(0.01, 42)
    }

    /// Rounds in which the logs of both sides share what the machine does to a round, and differ by `effect` and their own noise.
    fn rounds(random: &mut ChaCha8Rng, effect: f64, noise: f64, count: usize) -> Vec<Pair> {
        let mut normal = || -> f64 { StandardNormal.sample(random) };
        (0..count)
            .map(|_| {
                let machine = 0.2 * normal();
                let side = noise / 2f64.sqrt();
                let a = 1e7 * (machine + side * normal()).exp();
                let b = 1e7 * (machine + effect.ln_1p() + side * normal()).exp();
                Pair { a_ns: Some(a), b_ns: Some(b) }
            })
            .collect()
    }

    fn of_ratios(ratios: &[f64]) -> Vec<Pair> {
        ratios.iter().map(|ratio| Pair { a_ns: Some(1e6), b_ns: Some(1e6 * ratio) }).collect()
    }

    /// Twice each, in turns.
    fn order(rounds: usize) -> Vec<bool> {
        (0..rounds).map(|round| round / 2 % 2 == 0).collect()
    }

    fn judged(cells: &[Vec<Pair>], floor: Option<&Findings>) -> Findings {
        judge(cells, &order(cells.iter().map(Vec::len).max().unwrap_or(0)), floor, &settings())
    }

    fn one(rounds: Vec<Pair>) -> Effect {
        judged(&[rounds], None).cells.remove(0)
    }

    #[test]
    fn a_verdict_written_into_a_saved_comparison_is_decided_again_from_its_rounds() {
        let mut random = ChaCha8Rng::seed_from_u64(5);
        let template: Comparison = crate::samples::saved("comparison");
        let of = |effect: f64, random: &mut ChaCha8Rng| {
            let mut found = template.clone();
            found.method = Method::PairedRounds;
            found.order =
                order(ROUNDS).iter().map(|second| if *second { "AB" } else { "BA" }.to_owned()).collect();
            for cell in &mut found.cells {
                cell.pairs = rounds(random, effect, 0.005, ROUNDS);
            }
            recheck_comparison(&mut found);
            found.remarks.clear();
            found
        };
        for (effect, verdict) in [(-0.1, ComparisonVerdict::Faster), (0.0, ComparisonVerdict::Equivalent)] {
            let honest = of(effect, &mut random);
            assert!(
                honest.cells.iter().all(|cell| cell.effect.verdict == verdict),
                "{:?}",
                honest.cells[0].effect
            );
            let mut again = honest.clone();
            recheck_comparison(&mut again);
            assert_eq!(again, honest, "an honest file is what it was");
            for word in [ComparisonVerdict::Slower, ComparisonVerdict::Inconclusive] {
                let mut edited = honest.clone();
                edited.cells[0].effect.verdict = word;
                edited.cells[0].effect.ratio = Some(2.0);
                edited.rounds = Some(1_000);
                recheck_comparison(&mut edited);
                assert_eq!(edited.remarks.len(), 1, "{:?}", edited.remarks);
                edited.remarks.clear();
                assert_eq!(edited, honest);
            }
            let mut smoke = honest.clone();
            smoke.protocol = Some("smoke".into());
            recheck_comparison(&mut smoke);
            assert!(smoke.cells.iter().all(|cell| cell.effect.verdict == ComparisonVerdict::Inconclusive));
        }
        // Two saved results have no rounds to decide by.
        let mut edited = template.clone();
        edited.cells[0].effect.verdict = ComparisonVerdict::Faster;
        edited.cells[0].effect.ratio = Some(0.5);
        recheck_comparison(&mut edited);
        assert_eq!(edited.remarks.len(), template.remarks.len() + 1, "{:?}", edited.remarks);
        edited.remarks = template.remarks.clone();
        assert_eq!(edited, template);
    }

    #[test]
    fn two_percent_is_found_nine_times_of_ten_where_rounds_spread_by_one_and_a_half() {
        let mut random = ChaCha8Rng::seed_from_u64(2);
        let mut found = 0;
        for _ in 0..1_000 {
            let effect = one(rounds(&mut random, 0.02, 0.015, ROUNDS));
            assert_ne!(effect.verdict, ComparisonVerdict::Faster);
            found += usize::from(effect.verdict == ComparisonVerdict::Slower);
        }
        assert!(found >= 900, "{found} of 1,000");
    }

    /// What a machine does to the launches of a comparison, one after the other, in every cell.
    #[derive(Clone, Copy, Debug)]
    enum Machine {
        Independent,
        /// Launches resemble the ones before, and the second of a round is slower.
        DriftAndPosition,
        /// Most of what happens to a launch happens to all of its cells.
        SharedByCells,
        /// Student's t of two degrees of freedom: some launches are far off.
        HeavyTails,
    }

    const MACHINES: [Machine; 4] =
        [Machine::Independent, Machine::DriftAndPosition, Machine::SharedByCells, Machine::HeavyTails];

    /// Rounds of four cells in which B takes `effect` more, and the order they were taken in.
    fn launched(machine: Machine, effect: f64, random: &mut ChaCha8Rng) -> (Vec<Vec<Pair>>, Vec<bool>) {
        const CELLS: usize = 4;
        let b_second = stats::balanced_order(ROUNDS, random);
        let mut cells = vec![Vec::new(); CELLS];
        let mut drift = [0.0; CELLS];
        for &b_second in &b_second {
            let mut pairs = [Pair::default(); CELLS];
            for second in [false, true] {
                let is_b = second == b_second;
                let mut normal = || -> f64 { StandardNormal.sample(random) };
                let shared = normal();
                for (pair, drift) in pairs.iter_mut().zip(&mut drift) {
                    let log = match machine {
                        Machine::Independent => 0.01 * normal(),
                        Machine::DriftAndPosition => {
                            *drift = 0.95 * *drift + 0.01 * normal();
                            *drift + if second { 0.01 } else { 0.0 }
                        }
                        Machine::SharedByCells => 0.01 * shared + 0.002 * normal(),
                        Machine::HeavyTails => {
                            let chi = f64::midpoint(normal().powi(2), normal().powi(2));
                            0.01 * normal() / chi.sqrt().max(1e-3)
                        }
                    };
                    let time = Some(1e7 * (log + if is_b { effect.ln_1p() } else { 0.0 }).exp());
                    if is_b { pair.b_ns = time } else { pair.a_ns = time }
                }
            }
            for (cell, pair) in cells.iter_mut().zip(pairs) {
                cell.push(pair);
            }
        }
        (cells, b_second)
    }

    fn is_different(effect: &Effect) -> bool {
        matches!(effect.verdict, ComparisonVerdict::Faster | ComparisonVerdict::Slower)
    }

    /// How often a verdict of difference comes, in any cell or over all of them, and in the mean cell.
    fn called(machine: Machine, effect: f64, trials: usize) -> (f64, f64) {
        let mut random = ChaCha8Rng::seed_from_u64(3);
        let (mut any, mut cells) = (0, 0);
        for _ in 0..trials {
            let (rounds, b_second) = launched(machine, effect, &mut random);
            let found = judge(&rounds, &b_second, None, &settings());
            let different = found.cells.iter().filter(|effect| is_different(effect)).count();
            cells += different;
            any += usize::from(different > 0 || found.overall.as_ref().is_some_and(is_different));
        }
        (any as f64 / trials as f64, cells as f64 / (4 * trials) as f64)
    }

    #[test]
    fn a_thing_beside_itself_is_called_different_in_no_more_than_one_comparison_of_twenty() {
        const TRIALS: usize = 2_000;
        for machine in MACHINES {
            let (wrong, _) = called(machine, 0.0, TRIALS);
            // Three standard errors of a share of 5 %.
            assert!(wrong <= 0.05 + 0.015, "{machine:?}: {wrong}");
        }
    }

    #[test]
    fn five_percent_is_found_in_nearly_every_cell_and_two_percent_in_most() {
        for (machine, effect, least) in [
            (Machine::Independent, 0.05, 0.99),
            (Machine::Independent, 0.02, 0.85),
            (Machine::DriftAndPosition, 0.05, 0.99),
            (Machine::DriftAndPosition, 0.02, 0.85),
            (Machine::SharedByCells, 0.05, 0.99),
            (Machine::SharedByCells, 0.02, 0.85),
            (Machine::HeavyTails, 0.05, 0.85),
        ] {
            let (_, found) = called(machine, effect, 400);
            assert!(found >= least, "{machine:?} {effect}: {found}");
        }
    }

    /// Processes of four cells, in which B takes `effect` more: `sides` of A and of B; and the time in which the probe of each read a gigabyte, on a
    /// machine that is `drift` slower while B's are run.
    fn processes(
        machine: Machine,
        (effect, drift): (f64, f64),
        sides: [usize; 2],
        random: &mut ChaCha8Rng,
    ) -> (Vec<Vec<Pair>>, Vec<Pair>) {
        let rounds = sides[0].max(sides[1]);
        let mut cells = vec![vec![Pair::default(); rounds]; 4];
        let mut read = vec![Pair::default(); rounds];
        for (is_b, count) in [false, true].into_iter().zip(sides) {
            let slower = if is_b { drift.ln_1p() } else { 0.0 };
            let put = |pair: &mut Pair, time: f64| {
                *(if is_b { &mut pair.b_ns } else { &mut pair.a_ns }) = Some(time);
            };
            for at in 0..count {
                let mut normal = || -> f64 { StandardNormal.sample(random) };
                let shared = normal();
                for cell in &mut cells {
                    let noise = match machine {
                        Machine::SharedByCells => 0.01 * shared + 0.002 * normal(),
                        Machine::HeavyTails => {
                            let chi = f64::midpoint(normal().powi(2), normal().powi(2));
                            0.01 * normal() / chi.sqrt().max(1e-3)
                        }
                        Machine::Independent | Machine::DriftAndPosition => 0.01 * normal(),
                    };
                    let of_b = if is_b { effect.ln_1p() } else { 0.0 };
                    put(&mut cell[at], 1e7 * (noise + slower + of_b).exp());
                }
                put(&mut read[at], 2e7 * (0.01 * normal() + slower).exp());
            }
        }
        (cells, read)
    }

    /// How often a verdict of difference comes, in any cell or over all of them, and in the mean cell.
    fn called_of_processes(
        machine: Machine,
        moved: (f64, f64),
        sides: [usize; 2],
        trials: usize,
    ) -> (f64, f64) {
        let mut random = ChaCha8Rng::seed_from_u64(6);
        let (mut any, mut cells) = (0, 0);
        for _ in 0..trials {
            let (times, read) = processes(machine, moved, sides, &mut random);
            let found = judge_processes(&times, &read, &settings());
            let different = found.cells.iter().filter(|effect| is_different(effect)).count();
            cells += different;
            any += usize::from(different > 0 || found.overall.as_ref().is_some_and(is_different));
        }
        (any as f64 / trials as f64, cells as f64 / (4 * trials) as f64)
    }

    #[test]
    fn processes_of_one_thing_are_called_different_in_no_more_than_one_comparison_of_twenty() {
        for machine in [Machine::Independent, Machine::SharedByCells, Machine::HeavyTails] {
            for sides in [[4, 4], [5, 5], [8, 5]] {
                let (wrong, _) = called_of_processes(machine, (0.0, 0.0), sides, 2_000);
                assert!(wrong <= 0.05 + 0.015, "{machine:?} {sides:?}: {wrong}");
            }
        }
    }

    #[test]
    fn five_percent_between_saved_processes_is_found_in_nearly_every_cell() {
        for (machine, sides, least) in [
            (Machine::Independent, [4, 4], 0.75),
            (Machine::Independent, [5, 5], 0.9),
            (Machine::Independent, [8, 5], 0.9),
            (Machine::SharedByCells, [5, 5], 0.9),
            (Machine::HeavyTails, [8, 8], 0.6),
        ] {
            let (_, found) = called_of_processes(machine, (0.05, 0.0), sides, 400);
            assert!(found >= least, "{machine:?} {sides:?}: {found}");
        }
    }

    #[test]
    fn a_machine_that_was_slower_on_the_other_day_decides_nothing() {
        for drift in [0.005, 0.01, 0.02, 0.03, 0.1, -0.1] {
            let (any, _) = called_of_processes(Machine::Independent, (0.0, drift), [6, 6], 400);
            assert!(any <= 0.05, "{drift}: {any}");
        }
        let mut random = ChaCha8Rng::seed_from_u64(7);
        let (times, read) = processes(Machine::Independent, (0.0, 0.1), [6, 6], &mut random);
        let told = judge_processes(&times, &read, &settings());
        assert!(
            told.cells[0].reason.starts_with("the machine itself may be the cause: by the probe"),
            "{told:?}"
        );
        // What the machine cannot explain is told all the same.
        let (times, read) = processes(Machine::Independent, (0.5, 0.1), [6, 6], &mut random);
        let told = judge_processes(&times, &read, &settings());
        assert!(told.cells.iter().all(|effect| effect.verdict == ComparisonVerdict::Slower), "{told:?}");
        let (times, _) = processes(Machine::Independent, (0.0, 0.1), [6, 6], &mut random);
        // Where the probe was not run, or the sides are two machines, the times are all there is.
        let blind = judge_processes(&times, &[], &settings());
        assert_eq!(blind.overall.unwrap().verdict, ComparisonVerdict::Slower);
    }

    #[test]
    fn too_few_processes_say_how_many_are_needed() {
        let mut random = ChaCha8Rng::seed_from_u64(8);
        for (sides, reason) in [
            ([3, 3], "3 processes of A and 3 of B cannot show one: the least p is 1.00e-1"),
            ([4, 1], "of each side, save 4 or more"),
            ([1, 1], "1 process of A and 1 of B; at least 4 a side are needed"),
        ] {
            let (times, read) = processes(Machine::Independent, (0.5, 0.0), sides, &mut random);
            for effect in judge_processes(&times, &read, &settings()).cells {
                assert_eq!(effect.verdict, ComparisonVerdict::Inconclusive);
                assert!(effect.reason.contains(reason), "{}", effect.reason);
            }
        }
        // A process without a time in one cell is left out of that cell alone.
        let (mut times, read) = processes(Machine::Independent, (0.5, 0.0), [6, 5], &mut random);
        times[0][1].a_ns = None;
        times[1][2].b_ns = Some(f64::INFINITY);
        let found = judge_processes(&times, &read, &settings());
        assert_eq!(found.cells.iter().map(|effect| effect.rounds).collect::<Vec<_>>(), [5, 4, 5, 5]);
        assert!(found.cells.iter().all(|effect| effect.verdict == ComparisonVerdict::Slower), "{found:?}");
        let one = &found.cells[2];
        assert!((one.b_ns.unwrap() / one.a_ns.unwrap() - one.ratio.unwrap()).abs() < 1e-9);
    }

    #[test]
    fn a_verdict_on_saved_processes_is_decided_again_from_their_times() {
        let mut random = ChaCha8Rng::seed_from_u64(9);
        let mut honest: Comparison = crate::samples::saved("comparison");
        let (times, read) = processes(Machine::Independent, (0.2, 0.0), [6, 5], &mut random);
        (honest.method, honest.read) = (Method::SavedProcesses, read);
        honest.cells.truncate(times.len());
        for (cell, pairs) in honest.cells.iter_mut().zip(times) {
            cell.pairs = pairs;
        }
        recheck_comparison(&mut honest);
        honest.remarks.clear();
        let is_slower = |cell: &CellComparison| cell.effect.verdict == ComparisonVerdict::Slower;
        assert!(honest.cells.iter().all(is_slower), "{:?}", honest.cells);
        let mut edited = honest.clone();
        edited.cells[0].effect.verdict = ComparisonVerdict::Faster;
        recheck_comparison(&mut edited);
        assert_eq!(edited.remarks.len(), 1, "{:?}", edited.remarks);
        edited.remarks.clear();
        assert_eq!(edited, honest);
    }

    #[test]
    fn the_machine_between_rounds_does_not_reach_the_ratio() {
        let mut random = ChaCha8Rng::seed_from_u64(4);
        let effect = one(rounds(&mut random, 0.5, 0.001, ROUNDS));
        assert!((effect.ratio.unwrap() - 1.5).abs() < 0.003, "{effect:?}");
        assert!((effect.b_ns.unwrap() / effect.a_ns.unwrap() - effect.ratio.unwrap()).abs() < 1e-9);
        assert_eq!(
            (effect.verdict, effect.rounds, effect.p_exact),
            (ComparisonVerdict::Slower, ROUNDS, Some(true))
        );
    }

    #[test]
    fn each_verdict_says_why() {
        let spread = |center: f64, half: f64| -> Vec<Pair> {
            of_ratios(&(0..12).map(|i| center + if i % 2 == 0 { half } else { -half }).collect::<Vec<_>>())
        };
        for (given, verdict, reason) in [
            (spread(0.9, 0.01), ComparisonVerdict::Faster, "% less time"),
            (spread(1.1, 0.01), ComparisonVerdict::Slower, "% more time"),
            (spread(1.0, 0.002), ComparisonVerdict::Equivalent, "the whole interval lies within ±1.00 %"),
            (spread(1.0, 0.05), ComparisonVerdict::Inconclusive, "would mostly have been found"),
            (of_ratios(&[1.5, 1.5, 1.6]), ComparisonVerdict::Inconclusive, "3 rounds cannot show one"),
            (of_ratios(&[1.5]), ComparisonVerdict::Inconclusive, "1 usable round;"),
        ] {
            let effect = one(given);
            assert_eq!(effect.verdict, verdict, "{effect:?}");
            assert!(effect.reason.contains(reason), "{}", effect.reason);
        }
    }

    #[test]
    fn a_difference_wholly_within_the_margin_is_equivalent_however_small_its_p() {
        let effect = one(of_ratios(&[1.004; 12]));
        assert!(effect.p.unwrap() < 0.003);
        assert_eq!(effect.verdict, ComparisonVerdict::Equivalent);
    }

    #[test]
    fn an_effect_that_a_against_itself_leaves_open_is_never_called() {
        let b = [of_ratios(&[1.02, 1.021, 1.022].repeat(4))];
        assert_eq!(judged(&b, None).cells[0].verdict, ComparisonVerdict::Slower);
        let restless: Vec<f64> = (0..12).map(|i| if i % 2 == 0 { 1.06 } else { 0.95 }).collect();
        let floor = judged(&[of_ratios(&restless)], None);
        let held = judged(&b, Some(&floor)).cells.remove(0);
        assert_eq!(held.verdict, ComparisonVerdict::Inconclusive);
        assert!(held.reason.contains("A against itself"), "{}", held.reason);
        let steady = judged(&[of_ratios(&[0.999, 1.001, 1.0, 1.0])], None);
        assert_eq!(judged(&b, Some(&steady)).cells[0].verdict, ComparisonVerdict::Slower);
        let lost = judged(&[vec![Pair::default(); 4]], None);
        assert_eq!(judged(&b, Some(&lost)).cells[0].verdict, ComparisonVerdict::Inconclusive);
    }

    #[test]
    fn rounds_without_a_time_are_left_out_of_their_cell_and_of_the_whole() {
        let mut first = of_ratios(&[1.1; 12]);
        first[3].b_ns = None;
        first[4].a_ns = Some(0.0);
        let found = judged(&[first, of_ratios(&[1.3; 12]), vec![Pair::default(); 12]], None);
        assert_eq!(found.cells.iter().map(|e| e.rounds).collect::<Vec<_>>(), [10, 12, 0]);
        assert_eq!(found.overall, None);
        let found = judged(&[of_ratios(&[1.1; 12]), of_ratios(&[1.3; 12])], None);
        let overall = found.overall.unwrap();
        assert!((overall.ratio.unwrap() - (1.1f64 * 1.3).sqrt()).abs() < 1e-12);
        assert_eq!((overall.verdict, overall.rounds), (ComparisonVerdict::Slower, 12));
    }

    proptest! {
        #[test]
        fn exchanging_the_sides_turns_every_finding_over(
            ratios in prop::collection::vec(0.8f64..1.25, 2..14),
        ) {
            let turned: Vec<Pair> =
                of_ratios(&ratios).iter().map(|p| Pair { a_ns: p.b_ns, b_ns: p.a_ns }).collect();
            let (one_way, other_way) = (one(of_ratios(&ratios)), one(turned));
            prop_assert!((one_way.ratio.unwrap() * other_way.ratio.unwrap() - 1.0).abs() < 1e-9);
            prop_assert!((one_way.p.unwrap() - other_way.p.unwrap()).abs() < 1e-12);
            let expected = match one_way.verdict {
                ComparisonVerdict::Faster => ComparisonVerdict::Slower,
                ComparisonVerdict::Slower => ComparisonVerdict::Faster,
                same => same,
            };
            prop_assert_eq!(other_way.verdict, expected);
        }

        #[test]
        fn a_verdict_of_a_difference_has_an_interval_without_one(
            ratios in prop::collection::vec(0.9f64..1.1, 3..14),
        ) {
            let effect = one(of_ratios(&ratios));
            let (low, high) = (effect.low.unwrap(), effect.high.unwrap());
            match effect.verdict {
                ComparisonVerdict::Faster => prop_assert!(high < 1.0),
                ComparisonVerdict::Slower => prop_assert!(low > 1.0),
                ComparisonVerdict::Equivalent => prop_assert!(low >= 1.0 / 1.01 - 1e-12 && high <= 1.01 + 1e-12),
                ComparisonVerdict::Inconclusive => {}
            }
        }
    }
}
