//! Is B faster than A? From paired times to a verdict; [`processes`] decides on times that were not taken in pairs.
//!
//! Enters: the times of each round, one per side, and the settings of the decision. Leaves: an [`Effect`] per cell and one over all
//! cells. Pure: it runs nothing.
//!
//! The unit is a round: one fresh process a side. Everything is decided on ln(B/A) of the times that a round's processes report, and on the order
//! within rounds, which was drawn: what the second launch of a round has of being the second is estimated beside the effect and taken out.

pub mod processes;

use serde::{Deserialize, Serialize};

use super::words::counted;
use hbmark_core::result::comparison::{
    CellComparison, ComparedItem, Comparison, ComparisonVerdict, Effect, Failures, Method, Pair, Settings,
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
/// cells. The cells are one family of tests, with their mean where they are steps: latencies of requests contain one another, and have none.
pub fn judge(
    cells: &[Vec<Pair>],
    b_second: &[bool],
    floor: Option<&Findings>,
    settings: &Settings,
    are_steps: bool,
) -> Findings {
    let mut later: Vec<Vec<Option<f64>>> =
        cells.iter().map(|rounds| later_over_first(rounds, b_second)).collect();
    let with_overall = are_steps && cells.len() > 1;
    if with_overall {
        later.push(means(&later, b_second.len()));
    }
    let tested = later.iter().filter(|of_cell| of_cell.iter().flatten().count() > 1).count();
    let tests = stats::order_test(&later, b_second, settings.seed);
    let effect = |index: usize, floor: Option<f64>| {
        let failed = failures(cells, index);
        let (later, test) = (&later[index], tests[index]);
        PairedStatistics { later, b_second, test, tests: tested, floor, failed }.effect(settings)
    };
    let of_cells = cells.iter().enumerate().map(|(index, rounds)| {
        let floor = floor.map(|floor| floor.cells.get(index).map_or(f64::INFINITY, furthest));
        let (a_ns, b_ns) = (center(rounds, |pair| pair.a_ns), center(rounds, |pair| pair.b_ns));
        Effect { a_ns, b_ns, ..effect(index, floor) }
    });
    let of_cells = of_cells.collect();
    let overall = (with_overall && later[cells.len()].iter().any(Option::is_some)).then(|| {
        let floor = floor.map(|floor| floor.overall.as_ref().map_or(f64::INFINITY, furthest));
        effect(cells.len(), floor)
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

/// What a verdict is made of.
struct PairedStatistics<'a> {
    /// The second time of each round over the first, as a logarithm.
    later: &'a [Option<f64>],
    b_second: &'a [bool],
    test: Option<stats::OrderTest>,
    /// Tests in the family.
    tests: usize,
    /// The interval of A against A, if that was run; infinite where it could not be measured.
    floor: Option<f64>,
    failed: Failures,
}

impl PairedStatistics<'_> {
    fn effect(&self, settings: &Settings) -> Effect {
        let rounds = self.later.iter().flatten().count();
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
            .filter(|_| rounds >= ROUNDS_OF_POWER)
            .and_then(|(_, spread)| stats::minimum_detectable(spread, rounds, level, settings.power));
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
            failed: self.failed,
            ..Effect::unknown()
        };
        (effect.verdict, effect.reason) = self.rule(&effect, settings);
        effect
    }

    fn rule(&self, effect: &Effect, settings: &Settings) -> (ComparisonVerdict, String) {
        let (Some(ratio), Some(low), Some(high), Some(p)) =
            (effect.ratio, effect.low, effect.high, effect.p_adjusted)
        else {
            return (
                ComparisonVerdict::Inconclusive,
                format!(
                    "{}; at least {} are needed",
                    counted(effect.rounds, "usable round"),
                    stats::least_pairs(settings.alpha)
                ),
            );
        };
        // The interval of three rounds holds what two modes of a process hide more often than it says.
        if is_within_margin(low, high, settings) && effect.rounds >= stats::least_pairs(settings.alpha) {
            if let Some((_, words)) = failed_more(effect, self.later.len()) {
                let reason = format!("the sides take the same time where both give one, and {words}");
                return (ComparisonVerdict::Inconclusive, reason);
            }
            let reason = format!("the whole interval lies within ±{}", percent(settings.margin));
            return (ComparisonVerdict::Equivalent, reason);
        }
        if !is_shown(low, high, p, settings) {
            return (ComparisonVerdict::Inconclusive, not_shown(effect, settings));
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
        if let Some(reason) = survived(effect, ratio, self.later.len()) {
            return (ComparisonVerdict::Inconclusive, reason);
        }
        if ratio < 1.0 {
            (ComparisonVerdict::Faster, format!("B takes {} less time", percent(1.0 - ratio)))
        } else {
            (ComparisonVerdict::Slower, format!("B takes {} more time", percent(ratio - 1.0)))
        }
    }
}

/// How often each side failed itself in a cell; behind the last cell, in any.
fn failures(cells: &[Vec<Pair>], index: usize) -> Failures {
    Failures::of(cells.get(index..=index).unwrap_or(cells))
}

/// Why the side that takes less time is not called faster: the rounds that count are those that it survived.
fn survived(effect: &Effect, ratio: f64, of: usize) -> Option<String> {
    let quicker = if ratio < 1.0 { "B" } else { "A" };
    let (_, words) = failed_more(effect, of).filter(|(side, _)| *side == quicker)?;
    Some(format!("{quicker} takes less time where it gives one, and {words}"))
}

/// The side that failed itself in more rounds, and in how many.
fn failed_more(effect: &Effect, of: usize) -> Option<(&'static str, String)> {
    let Failures { a, b } = effect.failed;
    let (side, more, less) = if a > b { ("A", a, b) } else { ("B", b, a) };
    (more > less)
        .then(|| (side, format!("{side} failed itself in {more} of {of} rounds, the other in {less}")))
}

/// Why a difference is not called.
fn not_shown(effect: &Effect, settings: &Settings) -> String {
    let (rounds, least) = (effect.rounds, stats::least_pairs(settings.alpha));
    if let Some(minimum) = effect.minimum_detectable {
        format!("no difference shown; {} would mostly have been found", percent(minimum))
    } else if rounds < least {
        format!("{rounds} rounds cannot show one; run {least} or more")
    } else {
        format!(
            "no difference shown; fewer than {ROUNDS_OF_POWER} rounds do not say how small a one they would find"
        )
    }
}

/// Fewer rounds find a difference of the size of [`stats::minimum_detectable`] less often than it says: that is of a t test, and of the orders of seven
/// rounds the most extreme alone shows one.
const ROUNDS_OF_POWER: usize = 10;

/// Whether p shows a difference, which a verdict never does against the interval beside it.
fn is_shown(low: f64, high: f64, p: f64, settings: &Settings) -> bool {
    p <= settings.alpha && (low > 1.0 || high < 1.0)
}

/// Whether an interval of a ratio lies within the margin.
fn is_within_margin(low: f64, high: f64, settings: &Settings) -> bool {
    let edge = settings.margin.ln_1p();
    low.ln() >= -edge && high.ln() <= edge
}

/// Whether a difference, had there been one, could have been called.
pub fn can_decide(comparison: &Comparison, effect: &Effect) -> bool {
    let alpha = comparison.settings.alpha;
    if comparison.protocol.as_deref() == Some("smoke") || effect.failed.b > effect.failed.a {
        return false;
    }
    match comparison.method {
        Method::SavedResults => false,
        Method::SavedProcesses => {
            let least = stats::least_a_side(alpha);
            let known = |side: fn(&Pair) -> Option<f64>| comparison.read.iter().filter_map(side).count();
            let read = [known(|p| p.a_ns), known(|p| p.b_ns)];
            effect.rounds >= least && read.iter().all(|n| *n >= least) && !comparison.other_devices
        }
        Method::PairedRounds => {
            let measured = comparison.floor.is_none() || effect.floor.is_some();
            effect.rounds >= stats::least_pairs(alpha) && measured
        }
    }
}

impl Findings {
    /// What a verdict rests on means nothing.
    pub fn decides_nothing(&mut self, reason: &str) {
        for effect in self.cells.iter_mut().chain(&mut self.overall) {
            effect.verdict = ComparisonVerdict::Inconclusive;
            reason.clone_into(&mut effect.reason);
        }
    }
}

/// Why processes of the smoke protocol decide nothing.
pub const RAN_ONCE: &str = "every cell ran once a process: the times mean nothing";
/// Why processes of different machines decide nothing.
pub const OTHER_DEVICES: &str =
    "A and B ran on different devices, and on too few: equal products differ, too";
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
        if found.other_devices && found.method == Method::SavedProcesses {
            judged.decides_nothing(OTHER_DEVICES);
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
    if cells.len().saturating_mul(b_second.len()) > MAX_PAIRS {
        return too_many(cells);
    }
    let pairs: Vec<Vec<Pair>> = cells.iter().map(complete).collect();
    let are_steps = cells.iter().all(|cell| matches!(cell.place, ComparedItem::Cell(_)));
    judge(&pairs, &b_second, floor, settings, are_steps)
}

/// The effects of saved processes.
fn of_processes(cells: &[CellComparison], read: &[Pair], settings: &Settings) -> Findings {
    let most = cells.iter().map(|cell| cell.pairs.len()).max().unwrap_or(0);
    if most > processes::MAX_A_SIDE || cells.len().saturating_mul(most) > MAX_PAIRS {
        return too_many(cells);
    }
    let pairs: Vec<Vec<Pair>> = cells.iter().map(|cell| cell.pairs.clone()).collect();
    processes::judge(&pairs, read, settings)
}

/// The effects as they are, and no verdict, where deciding again would take too long.
fn too_many(cells: &[CellComparison]) -> Findings {
    let effects = cells.iter().map(|cell| cell.effect.clone()).collect();
    let mut kept = Findings { cells: effects, overall: None };
    kept.decides_nothing("more rounds than are decided again from a file");
    kept
}

/// The effects of two saved results: the interval is that of samples which the comparison does not keep.
fn of_saved(cells: &[CellComparison]) -> Findings {
    let of_cell = |cell: &CellComparison| {
        let pair = cell.pairs.first().copied().unwrap_or_default();
        let ratio = pair.log_ratio().map(f64::exp);
        let around = |low: &f64, high: &f64| ratio.is_some_and(|ratio| (*low..=*high).contains(&ratio));
        let interval = cell.effect.low.zip(cell.effect.high).filter(|(low, high)| around(low, high));
        let failed = Failures::of(std::slice::from_ref(&cell.pairs));
        let effect =
            PairedStatistics { later: &[], b_second: &[], test: None, tests: 0, floor: None, failed };
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
                Pair { a_ns: Some(a), b_ns: Some(b), ..Pair::default() }
            })
            .collect()
    }

    fn of_ratios(ratios: &[f64]) -> Vec<Pair> {
        ratios
            .iter()
            .map(|ratio| Pair { a_ns: Some(1e6), b_ns: Some(1e6 * ratio), ..Pair::default() })
            .collect()
    }

    /// Twice each, in turns.
    fn order(rounds: usize) -> Vec<bool> {
        (0..rounds).map(|round| round / 2 % 2 == 0).collect()
    }

    fn judged(cells: &[Vec<Pair>], floor: Option<&Findings>) -> Findings {
        judge(cells, &order(cells.iter().map(Vec::len).max().unwrap_or(0)), floor, &settings(), true)
    }

    fn one(rounds: Vec<Pair>) -> Effect {
        judged(&[rounds], None).cells.remove(0)
    }

    /// B is 3 % faster where it works, and dies in three rounds of ten: what is left are the rounds that it survived.
    #[test]
    fn a_side_that_fails_itself_more_often_is_never_faster_for_it() {
        let mut random = ChaCha8Rng::seed_from_u64(6);
        let mut called = |failed: [usize; 2]| {
            let faster = (0..200).filter(|_| {
                let mut pairs = rounds(&mut random, -0.03, 0.005, ROUNDS);
                for (at, pair) in pairs.iter_mut().enumerate() {
                    if at < failed[1] {
                        *pair = Pair { b_ns: None, b_failed: true, ..*pair };
                    } else if at < failed[0] + failed[1] {
                        *pair = Pair { a_ns: None, a_failed: true, ..*pair };
                    }
                }
                one(pairs).verdict == ComparisonVerdict::Faster
            });
            faster.count()
        };
        assert_eq!(called([0, 4]), 0);
        assert_eq!(called([1, 2]), 0);
        assert!(called([0, 0]) > 190);
        assert!(called([2, 1]) > 150, "A failed more often, and is the slower one");
        let mut pairs = rounds(&mut random, -0.03, 0.001, ROUNDS);
        pairs[3] = Pair { b_ns: None, b_failed: true, ..pairs[3] };
        let effect = one(pairs);
        assert_eq!(effect.failed, Failures { a: 0, b: 1 });
        assert_eq!(
            effect.reason,
            "B takes less time where it gives one, and B failed itself in 1 of 12 rounds, the other in 0"
        );
    }

    #[test]
    fn sides_of_which_one_fails_itself_more_often_are_not_equivalent() {
        let mut random = ChaCha8Rng::seed_from_u64(7);
        let pairs = rounds(&mut random, 0.0, 0.001, ROUNDS);
        assert_eq!(one(pairs.clone()).verdict, ComparisonVerdict::Equivalent);
        for side in ["A", "B"] {
            let mut pairs = pairs.clone();
            for pair in &mut pairs[..4] {
                *pair = match side {
                    "A" => Pair { a_ns: None, a_failed: true, ..*pair },
                    _ => Pair { b_ns: None, b_failed: true, ..*pair },
                };
            }
            let effect = one(pairs);
            assert_eq!(effect.verdict, ComparisonVerdict::Inconclusive);
            assert_eq!(
                effect.reason,
                format!(
                    "the sides take the same time where both give one, and {side} failed itself in 4 of 12 rounds, the other in 0"
                )
            );
        }
    }

    /// Each launch is in one of two modes 4 % apart, and B is 2 % slower: three rounds that happen to agree show nothing.
    #[test]
    fn fewer_rounds_than_a_verdict_needs_are_not_equivalent_either() {
        assert_eq!(one(of_ratios(&[1.0, 1.001, 0.999])).verdict, ComparisonVerdict::Inconclusive);
        let many = [1.0, 1.001, 0.999, 1.0, 1.001, 0.999, 1.0];
        assert_eq!(one(of_ratios(&many)).verdict, ComparisonVerdict::Equivalent);
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

    /// How often a verdict of difference comes, in any cell or over all of them, and in the mean cell.
    pub(super) fn share_different(trials: usize, mut trial: impl FnMut() -> Findings) -> (f64, f64) {
        let is_different =
            |effect: &Effect| matches!(effect.verdict, ComparisonVerdict::Faster | ComparisonVerdict::Slower);
        let (mut any, mut cells, mut different) = (0, 0, 0);
        for _ in 0..trials {
            let found = trial();
            let here = found.cells.iter().filter(|effect| is_different(effect)).count();
            cells += found.cells.len();
            different += here;
            any += usize::from(here > 0 || found.overall.as_ref().is_some_and(is_different));
        }
        (any as f64 / trials as f64, different as f64 / cells as f64)
    }

    fn called(machine: Machine, effect: f64, trials: usize) -> (f64, f64) {
        let mut random = ChaCha8Rng::seed_from_u64(3);
        share_different(trials, || {
            let (rounds, b_second) = launched(machine, effect, &mut random);
            judge(&rounds, &b_second, None, &settings(), true)
        })
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
    fn latencies_that_contain_one_another_have_no_mean() {
        let cells = [of_ratios(&[0.5; 12]), of_ratios(&[1.2; 12])];
        assert!(judged(&cells, None).overall.is_some());
        assert_eq!(judge(&cells, &order(12), None, &settings(), false).overall, None);
    }

    /// What is said to be found eight times of ten, is.
    #[test]
    fn the_difference_called_detectable_mostly_is() {
        let mut random = ChaCha8Rng::seed_from_u64(6);
        for count in [7, ROUNDS_OF_POWER, ROUNDS] {
            let said = one(rounds(&mut random, 0.0, 0.015, count)).minimum_detectable;
            if count < ROUNDS_OF_POWER {
                assert_eq!(said, None);
                continue;
            }
            let found = (0..400).filter(|_| {
                let spread = one(rounds(&mut random, 0.0, 0.015, count)).minimum_detectable.unwrap();
                one(rounds(&mut random, spread, 0.015, count)).verdict == ComparisonVerdict::Slower
            });
            let found = found.count();
            assert!(found >= 270, "{found} of 400 with {count} rounds");
        }
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
                of_ratios(&ratios).iter().map(|p| Pair { a_ns: p.b_ns, b_ns: p.a_ns, ..*p }).collect();
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
