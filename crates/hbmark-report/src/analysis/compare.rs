//! Is B faster than A? From paired times to a verdict.
//!
//! Enters: the times of each round, one per side, and the settings of the decision. Leaves: an [`Effect`] per cell and one over all
//! cells. Pure: it runs nothing.
//!
//! The unit is a round: one fresh process a side. Everything is decided on d = ln(B/A) of a round's medians; ratios are geometric means.

use serde::{Deserialize, Serialize};

use hbmark_core::result::comparison::{ComparisonVerdict, Effect, Pair, Settings};
use hbmark_core::stats;

/// The effects of a comparison.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Findings {
    /// In the order of the cells.
    pub cells: Vec<Effect>,
    /// The mean over cells of d, round by round; null with a single cell, or where no round has all of them.
    pub overall: Option<Effect>,
}

/// Judges the rounds of every cell; `floor` holds what A against itself gave in the same cells.
#[must_use]
pub fn judge(cells: &[Vec<Pair>], floor: Option<&Findings>, settings: &Settings) -> Findings {
    let differences: Vec<Vec<f64>> =
        cells.iter().map(|rounds| rounds.iter().filter_map(|pair| pair.log_ratio()).collect()).collect();
    // Cells without a pair are no test, and do not make the others' harder.
    let tested = differences.iter().filter(|d| d.len() > 1).count();
    let tests: Vec<Option<stats::SignFlip>> = differences.iter().map(|d| test(d, settings)).collect();
    let known: Vec<f64> = tests.iter().flatten().map(|test| test.p).collect();
    let mut corrected = stats::holm(&known).into_iter();
    let corrected: Vec<Option<f64>> =
        tests.iter().map(|test| test.as_ref().and_then(|_| corrected.next())).collect();
    let effects = cells.iter().enumerate().map(|(index, rounds)| {
        let found = PairedStatistics {
            differences: &differences[index],
            test: tests[index],
            p_holm: corrected[index],
            tests: tested,
            floor: floor.map(|floor| floor.cells.get(index).map_or(f64::INFINITY, furthest)),
        };
        let mut effect = found.effect(settings);
        effect.a_ns = center(rounds, |pair| pair.a_ns);
        effect.b_ns = center(rounds, |pair| pair.b_ns);
        effect
    });
    let cells_found: Vec<Effect> = effects.collect();
    let overall = overall(cells, floor, settings);
    Findings { cells: cells_found, overall }
}

fn test(differences: &[f64], settings: &Settings) -> Option<stats::SignFlip> {
    if differences.len() < 2 { None } else { stats::sign_flip(differences, settings.seed) }
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

fn overall(cells: &[Vec<Pair>], floor: Option<&Findings>, settings: &Settings) -> Option<Effect> {
    if cells.len() < 2 {
        return None;
    }
    let rounds = cells.iter().map(Vec::len).min()?;
    let of_round = |round: usize| -> Option<f64> {
        let each: Option<Vec<f64>> = cells.iter().map(|rounds| rounds[round].log_ratio()).collect();
        each.map(|each| stats::mean(&each))
    };
    let differences: Vec<f64> = (0..rounds).filter_map(of_round).collect();
    if differences.is_empty() {
        return None;
    }
    let test = test(&differences, settings);
    let found = PairedStatistics {
        differences: &differences,
        test,
        p_holm: test.map(|test| test.p),
        tests: 1,
        floor: floor.map(|floor| floor.overall.as_ref().map_or(f64::INFINITY, furthest)),
    };
    Some(found.effect(settings))
}

/// The end of an interval that is further from no difference, as a relative difference; without an interval nothing is ruled out.
fn furthest(effect: &Effect) -> f64 {
    let ends = effect.low.zip(effect.high);
    ends.map_or(f64::INFINITY, |(low, high)| low.ln().abs().max(high.ln().abs()).exp_m1())
}

/// What a verdict is made of.
struct PairedStatistics<'a> {
    differences: &'a [f64],
    test: Option<stats::SignFlip>,
    p_holm: Option<f64>,
    /// Tests in the family.
    tests: usize,
    /// The interval of A against A, if that was run; infinite where it could not be measured.
    floor: Option<f64>,
}

impl PairedStatistics<'_> {
    fn effect(&self, settings: &Settings) -> Effect {
        let ratios: Vec<f64> = self.differences.iter().map(|d| d.exp()).collect();
        let interval = stats::t_interval_log(&ratios, settings.confidence);
        let level = settings.alpha / self.tests.max(1) as f64;
        let minimum = stats::sd(self.differences)
            .and_then(|sd| stats::minimum_detectable(sd, self.differences.len(), level, settings.power));
        let mut effect = Effect {
            rounds: self.differences.len(),
            a_ns: None,
            b_ns: None,
            ratio: (!ratios.is_empty()).then(|| stats::mean(self.differences).exp()),
            low: interval.map(|i| i.low),
            high: interval.map(|i| i.high),
            p: self.test.map(|test| test.p),
            p_exact: self.test.map(|test| test.exact),
            p_holm: self.p_holm,
            minimum_detectable: minimum.map(f64::exp_m1),
            floor: self.floor.filter(|floor| floor.is_finite()),
            verdict: ComparisonVerdict::Inconclusive,
            reason: String::new(),
        };
        (effect.verdict, effect.reason) = self.rule(&effect, level, settings);
        effect
    }

    fn rule(&self, effect: &Effect, level: f64, settings: &Settings) -> (ComparisonVerdict, String) {
        let (Some(ratio), Some(low), Some(high), Some(p)) =
            (effect.ratio, effect.low, effect.high, effect.p_holm)
        else {
            return (
                ComparisonVerdict::Inconclusive,
                format!("{} usable rounds; at least 2 are needed", effect.rounds),
            );
        };
        let edge = settings.margin.ln_1p();
        if low.ln() >= -edge && high.ln() <= edge {
            let reason = format!("the whole interval lies within ±{}", percent(settings.margin));
            return (ComparisonVerdict::Equivalent, reason);
        }
        // A verdict never contradicts the interval beside it.
        let shown = p <= settings.alpha && (low > 1.0 || high < 1.0);
        if !shown {
            return (ComparisonVerdict::Inconclusive, self.not_shown(effect, level));
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

    fn not_shown(&self, effect: &Effect, level: f64) -> String {
        match effect.minimum_detectable {
            Some(minimum) => {
                format!("no difference shown; {} would mostly have been found", percent(minimum))
            }
            None => format!(
                "{} rounds cannot show one: the least p is {:.2e}, and {:.2e} is needed",
                effect.rounds,
                stats::least_p(self.differences.len()),
                level
            ),
        }
    }
}

/// A relative difference for a sentence.
#[must_use]
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

    fn one(rounds: Vec<Pair>, settings: &Settings) -> Effect {
        judge(&[rounds], None, settings).cells.remove(0)
    }

    #[test]
    fn two_percent_is_found_nine_times_of_ten_where_rounds_spread_by_one_and_a_half() {
        let mut random = ChaCha8Rng::seed_from_u64(2);
        let mut found = 0;
        for _ in 0..1_000 {
            let effect = one(rounds(&mut random, 0.02, 0.015, ROUNDS), &settings());
            assert_ne!(effect.verdict, ComparisonVerdict::Faster);
            found += usize::from(effect.verdict == ComparisonVerdict::Slower);
        }
        assert!(found >= 900, "{found} of 1,000");
    }

    #[test]
    fn a_thing_beside_itself_is_called_different_no_more_often_than_the_level_over_eight_cells() {
        let mut random = ChaCha8Rng::seed_from_u64(3);
        let mut wrong = 0;
        for _ in 0..1_000 {
            let cells: Vec<Vec<Pair>> = (0..8).map(|_| rounds(&mut random, 0.0, 0.03, ROUNDS)).collect();
            let different =
                |e: &Effect| matches!(e.verdict, ComparisonVerdict::Faster | ComparisonVerdict::Slower);
            wrong += usize::from(judge(&cells, None, &settings()).cells.iter().any(different));
        }
        assert!(wrong <= 66, "{wrong} of 1,000 comparisons call one of 8 cells different");
    }

    #[test]
    fn the_machine_between_rounds_does_not_reach_the_ratio() {
        let mut random = ChaCha8Rng::seed_from_u64(4);
        let effect = one(rounds(&mut random, 0.5, 0.001, ROUNDS), &settings());
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
            (of_ratios(&[1.5]), ComparisonVerdict::Inconclusive, "1 usable rounds"),
        ] {
            let effect = one(given, &settings());
            assert_eq!(effect.verdict, verdict, "{effect:?}");
            assert!(effect.reason.contains(reason), "{}", effect.reason);
        }
    }

    #[test]
    fn a_difference_wholly_within_the_margin_is_equivalent_however_small_its_p() {
        let effect = one(of_ratios(&[1.004; 12]), &settings());
        assert!(effect.p.unwrap() < 0.001);
        assert_eq!(effect.verdict, ComparisonVerdict::Equivalent);
    }

    #[test]
    fn an_effect_that_a_against_itself_leaves_open_is_never_called() {
        let b = [of_ratios(&[1.02, 1.021, 1.022].repeat(4))];
        assert_eq!(judge(&b, None, &settings()).cells[0].verdict, ComparisonVerdict::Slower);
        let restless: Vec<f64> = (0..12).map(|i| if i % 2 == 0 { 1.06 } else { 0.95 }).collect();
        let floor = judge(&[of_ratios(&restless)], None, &settings());
        let held = judge(&b, Some(&floor), &settings()).cells.remove(0);
        assert_eq!(held.verdict, ComparisonVerdict::Inconclusive);
        assert!(held.reason.contains("A against itself"), "{}", held.reason);
        let steady = judge(&[of_ratios(&[0.999, 1.001, 1.0, 1.0])], None, &settings());
        assert_eq!(judge(&b, Some(&steady), &settings()).cells[0].verdict, ComparisonVerdict::Slower);
        let lost = judge(&[vec![Pair::default(); 4]], None, &settings());
        assert_eq!(judge(&b, Some(&lost), &settings()).cells[0].verdict, ComparisonVerdict::Inconclusive);
    }

    #[test]
    fn rounds_without_a_time_are_left_out_of_their_cell_and_of_the_whole() {
        let mut first = of_ratios(&[1.1; 12]);
        first[3].b_ns = None;
        first[4].a_ns = Some(0.0);
        let found = judge(&[first, of_ratios(&[1.3; 12]), vec![Pair::default(); 12]], None, &settings());
        assert_eq!(found.cells.iter().map(|e| e.rounds).collect::<Vec<_>>(), [10, 12, 0]);
        assert_eq!(found.overall, None);
        let found = judge(&[of_ratios(&[1.1; 12]), of_ratios(&[1.3; 12])], None, &settings());
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
            let (one_way, other_way) = (one(of_ratios(&ratios), &settings()), one(turned, &settings()));
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
            ratios in prop::collection::vec(0.9f64..1.1, 2..14),
        ) {
            let effect = one(of_ratios(&ratios), &settings());
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
