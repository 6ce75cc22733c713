//! Paired comparisons: a test over the order within pairs, and the smallest effect a number of pairs can show.
//!
//! Enters: for each pair the second over the first, and which of them was B. Leaves: p values and effect sizes on the scale of the
//! differences. What is supposed is only that the order was drawn, as [`balanced_order`] draws it: whatever the machine did from one launch
//! to the next stays as it was, and the orders that could have been drawn are the distribution.

use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use statrs::distribution::ContinuousCDF;

use super::intervals::{Interval, t_quantile};
use super::summary::{mean, sd};

/// Up to this many pairs all sign patterns are counted: at 20 there are 524,288 of them up to the sign of all, a few milliseconds.
pub const EXACT_PAIRS: usize = 20;

/// Random sign patterns beyond that: the standard error of a p near 0.05 is then 0.0007.
pub const DRAWS: u32 = 100_000;

/// Sums nearer than this share of Σ|d| count as equal: rounding must not decide whether a pattern is as extreme as the one seen.
const TIE: f64 = 1e-12;

/// An order for each of so many pairs, `true` where B is second: as often as first, or once more or less of an odd number.
pub fn balanced_order(pairs: usize, random: &mut impl Rng) -> Vec<bool> {
    let more = pairs % 2 == 1 && random.random::<bool>();
    let mut order: Vec<bool> = (0..pairs).map(|pair| pair < pairs / 2 + usize::from(more)).collect();
    order.shuffle(random);
    order
}

/// One test of several over the same pairs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OrderTest {
    pub p: f64,
    /// The chance that any test of the family is as extreme as this one, where none of them has an effect.
    pub p_adjusted: f64,
    /// Every order was counted; otherwise [`DRAWS`] of them, from a seed.
    pub exact: bool,
}

/// Tests, for several things measured in the same pairs, whether being B matters: the share of the orders which could have been drawn that
/// are at least as extreme as the one that was.
///
/// `later[test][pair]` is the second of the pair over the first, on a log scale, null where the pair was lost; `b_second[pair]` says which was
/// B. What the second of a pair has of being the second is taken out. All tests see the same orders at once, so a machine that moves them
/// together counts once: adjusted p are Westfall and Young's step-down ones. A test without a usable pair is `None`.
pub fn order_test(later: &[Vec<Option<f64>>], b_second: &[bool], seed: u64) -> Vec<Option<OrderTest>> {
    let tests: Vec<Option<Scaled>> = later.iter().map(|test| Scaled::of(test, b_second.len())).collect();
    let known: Vec<&Scaled> = tests.iter().flatten().collect();
    let observed: Vec<f64> = known.iter().map(|test| test.statistic(b_second)).collect();
    // From the least extreme on, so that the maximum over those that are left is a running one.
    let mut rising: Vec<usize> = (0..known.len()).collect();
    rising.sort_by(|&a, &b| observed[a].total_cmp(&observed[b]));
    let (mut alone, mut together, mut patterns) = (vec![0u64; known.len()], vec![0u64; known.len()], 0u64);
    let mut count = |order: &[bool]| {
        patterns += 1;
        let mut most = 0.0f64;
        for &index in &rising {
            let found = known[index].statistic(order);
            most = most.max(found);
            alone[index] += u64::from(found >= observed[index] - TIE);
            together[index] += u64::from(most >= observed[index] - TIE);
        }
    };
    let second = b_second.iter().filter(|second| **second).count();
    let exact = b_second.len() <= EXACT_PAIRS;
    if exact {
        every_order(b_second.len(), second, &mut count);
    } else {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut order = b_second.to_vec();
        count(&order);
        for _ in 0..DRAWS {
            order.shuffle(&mut random);
            count(&order);
        }
    }
    let share = |count: u64| count as f64 / patterns.max(1) as f64;
    let mut adjusted = vec![1.0; known.len()];
    let mut highest = 0.0f64;
    for &index in rising.iter().rev() {
        highest = highest.max(share(together[index]));
        adjusted[index] = highest;
    }
    let mut found =
        alone.iter().zip(adjusted).map(|(&p, p_adjusted)| OrderTest { p: share(p), p_adjusted, exact });
    tests.iter().map(|test| test.as_ref().and_then(|_| found.next())).collect()
}

/// Differences of one test without what they have in common, and scaled so that tests can be compared.
struct Scaled(Vec<f64>);

impl Scaled {
    fn of(later: &[Option<f64>], pairs: usize) -> Option<Self> {
        let known: Vec<f64> = later.iter().take(pairs).flatten().copied().filter(|d| d.is_finite()).collect();
        if known.len() < 2 {
            return None;
        }
        let center = mean(&known);
        let size = known.iter().map(|d| (d - center).powi(2)).sum::<f64>().sqrt();
        // All of them alike, up to rounding: nothing depends on the order.
        let factor = if size > 1e-12 * (1.0 + center.abs()) { 1.0 / size } else { 0.0 };
        let scaled = |d: &Option<f64>| d.filter(|d| d.is_finite()).map_or(0.0, |d| (d - center) * factor);
        Some(Self(later.iter().map(scaled).collect()))
    }

    fn statistic(&self, b_second: &[bool]) -> f64 {
        let signed = self.0.iter().zip(b_second).map(|(d, second)| if *second { *d } else { -d });
        signed.sum::<f64>().abs()
    }
}

/// Calls with every order of so many pairs in which B is second so many times.
fn every_order(pairs: usize, second: usize, call: &mut impl FnMut(&[bool])) {
    let mut order: Vec<bool> = (0..pairs).map(|pair| pair < second).collect();
    loop {
        call(&order);
        // The next one: the first `true` before a `false` moves on, and those before it go back to the beginning.
        let Some(at) = (1..pairs).find(|&i| order[i - 1] && !order[i]) else { return };
        order.swap(at - 1, at);
        order[..at - 1].sort_by(|a, b| b.cmp(a));
    }
}

/// The least p that the order of so many pairs can reach, B being second in `second` of them.
pub fn least_order_p(pairs: usize, second: usize) -> f64 {
    let orders =
        (0..second.min(pairs - second.min(pairs))).fold(1.0, |c, i| c * (pairs - i) as f64 / (i + 1) as f64);
    // Half and half: the opposite order is as extreme.
    let least = if 2 * second == pairs { 2.0 / orders } else { 1.0 / orders };
    least.max(if pairs > EXACT_PAIRS { 1.0 / f64::from(DRAWS + 1) } else { 0.0 }).min(1.0)
}

/// The fewest pairs whose order can show anything at a level.
pub fn least_pairs(alpha: f64) -> usize {
    // Beyond, draws are not finer.
    let most = 2 * EXACT_PAIRS;
    (2..most).find(|&pairs| least_order_p(pairs, pairs / 2) <= alpha).unwrap_or(most)
}

/// The fewest processes a side, not in pairs, whose deal to the sides can show anything at a level.
pub fn least_a_side(alpha: f64) -> usize {
    (2..EXACT_PAIRS).find(|&a_side| least_order_p(2 * a_side, a_side) <= alpha).unwrap_or(EXACT_PAIRS)
}

/// What being B adds to the logarithm of a time, with its interval and the spread of one pair; what being second adds is taken out. `None`
/// where the pairs do not tell the two apart, or nothing is left to estimate a spread from.
pub fn order_effect(later: &[Option<f64>], b_second: &[bool], confidence: f64) -> Option<(Interval, f64)> {
    let side = |wanted: bool| -> Vec<f64> {
        let known = later.iter().zip(b_second).filter(|(_, second)| **second == wanted);
        known.filter_map(|(d, _)| *d).collect()
    };
    let (second, first) = (side(true), side(false));
    let pairs = second.len() + first.len();
    if second.is_empty() || first.is_empty() || pairs < 3 {
        return None;
    }
    let center = (mean(&second) - mean(&first)) / 2.0;
    let squares = |values: &[f64]| values.iter().map(|v| (v - mean(values)).powi(2)).sum::<f64>();
    let spread = ((squares(&second) + squares(&first)) / (pairs - 2) as f64).sqrt();
    let error = spread * (1.0 / second.len() as f64 + 1.0 / first.len() as f64).sqrt() / 2.0;
    let half = t_quantile(confidence, pairs - 2)? * error;
    Some((Interval { center, low: center - half, high: center + half }, spread))
}

/// The smallest [effect](order_effect) that so many pairs of this spread show with the given power at a two-sided level.
///
/// *Source*: (t(1 − α/2) + t(power))·sd/√n, within 1 % of the noncentral t from eight pairs at α = 0.05.
pub fn minimum_detectable(spread: f64, pairs: usize, alpha: f64, power: f64) -> Option<f64> {
    // What being B adds, and what being second adds.
    detectable(spread, (pairs, pairs.checked_sub(2)?), alpha, power)
}

fn detectable(spread: f64, (pairs, freedom): (usize, usize), alpha: f64, power: f64) -> Option<f64> {
    let detect = t_quantile(1.0 - alpha, freedom)?;
    let reach = t_quantile(2.0 * power - 1.0, freedom)?;
    Some((detect + reach) * spread / (pairs as f64).sqrt())
}

/// The ratio of two unpaired samples of positive values, `b` over `a`, with Welch's interval on the log scale. `None` for fewer than
/// two values on a side, or any that is not positive.
pub fn unpaired_ratio(a: &[f64], b: &[f64], confidence: f64) -> Option<Interval> {
    let logs = |values: &[f64]| -> Option<Vec<f64>> {
        values.iter().map(|v| (v.is_finite() && *v > 0.0).then(|| v.ln())).collect()
    };
    let (a, b) = (logs(a)?, logs(b)?);
    let of_mean = |logs: &[f64]| Some(sd(logs)?.powi(2) / logs.len() as f64);
    let (error_a, error_b) = (of_mean(&a)?, of_mean(&b)?);
    let center = mean(&b) - mean(&a);
    let error = (error_a + error_b).sqrt();
    if error == 0.0 {
        let ratio = center.exp();
        return Some(Interval { center: ratio, low: ratio, high: ratio });
    }
    let freedom = |error: f64, n: usize| error * error / (n - 1) as f64;
    let degrees = (error_a + error_b).powi(2) / (freedom(error_a, a.len()) + freedom(error_b, b.len()));
    let student = statrs::distribution::StudentsT::new(0.0, 1.0, degrees).ok()?;
    let half = student.inverse_cdf(0.5 + confidence / 2.0) * error;
    Some(Interval { center: center.exp(), low: (center - half).exp(), high: (center + half).exp() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde::Deserialize;

    use crate::stats::t_interval_log;

    /// `tests/fixtures/stats/paired.json`, written by `scripts/make_stats_fixtures.py` with scipy and statsmodels.
    #[derive(Deserialize)]
    struct Reference {
        t_interval_log: Vec<IntervalCase>,
        welch_log: Vec<WelchCase>,
        minimum_detectable: Vec<DetectableCase>,
    }
    #[derive(Deserialize)]
    struct IntervalCase {
        values: Vec<f64>,
        center: f64,
        low: f64,
        high: f64,
    }
    #[derive(Deserialize)]
    struct WelchCase {
        a: Vec<f64>,
        b: Vec<f64>,
        center: f64,
        low: f64,
        high: f64,
    }
    #[derive(Deserialize)]
    struct DetectableCase {
        pairs: usize,
        alpha: f64,
        power: f64,
        effect_over_sd: f64,
    }

    fn reference() -> Reference {
        serde_json::from_str(include_str!("../../../../tests/fixtures/stats/paired.json")).unwrap()
    }

    fn near(found: f64, wanted: f64, relative: f64) -> bool {
        (found - wanted).abs() <= relative * wanted.abs()
    }

    #[test]
    fn intervals_of_ratios_are_those_of_scipy() {
        for case in reference().t_interval_log {
            let found = t_interval_log(&case.values, 0.95).unwrap();
            for (found, wanted) in
                [(found.center, case.center), (found.low, case.low), (found.high, case.high)]
            {
                assert!(near(found, wanted, 1e-9), "{found} for {wanted}");
            }
        }
        for case in reference().welch_log {
            let found = unpaired_ratio(&case.a, &case.b, 0.95).unwrap();
            for (found, wanted) in
                [(found.center, case.center), (found.low, case.low), (found.high, case.high)]
            {
                assert!(near(found, wanted, 1e-9), "{found} for {wanted}");
            }
        }
    }

    #[test]
    fn the_smallest_detectable_effect_is_that_of_the_noncentral_t_within_a_hundredth() {
        for case in reference().minimum_detectable {
            let found = detectable(1.0, (case.pairs, case.pairs - 1), case.alpha, case.power).unwrap();
            assert!(
                near(found, case.effect_over_sd, 0.01),
                "{} pairs: {found} for {}",
                case.pairs,
                case.effect_over_sd
            );
        }
    }

    #[test]
    fn every_order_comes_once_and_half_of_them_have_b_second() {
        for (pairs, second, wanted) in [(2, 1, 2), (7, 3, 35), (7, 4, 35), (12, 6, 924), (5, 0, 1), (5, 5, 1)]
        {
            let mut seen = std::collections::BTreeSet::new();
            every_order(pairs, second, &mut |order| {
                assert_eq!(order.iter().filter(|second| **second).count(), second);
                assert!(seen.insert(order.to_vec()), "{order:?} twice");
            });
            assert_eq!(seen.len(), wanted);
        }
        assert!((least_order_p(12, 6) - 1.0 / 462.0).abs() < 1e-12);
        assert!(
            (least_order_p(7, 3) - 1.0 / 35.0).abs() < 1e-12
                && (least_order_p(7, 4) - 1.0 / 35.0).abs() < 1e-12
        );
        assert_eq!((least_pairs(0.05), least_pairs(0.01)), (7, 9));
        let mut random = ChaCha8Rng::seed_from_u64(1);
        for pairs in 2..40 {
            let second = balanced_order(pairs, &mut random).iter().filter(|second| **second).count();
            assert!(second == pairs / 2 || second == pairs.div_ceil(2));
        }
    }

    #[test]
    fn beyond_the_exact_size_a_seed_gives_one_p_and_never_zero() {
        let order = balanced_order(30, &mut ChaCha8Rng::seed_from_u64(2));
        let later = [order.iter().map(|second| Some(if *second { 0.1 } else { -0.1 })).collect::<Vec<_>>()];
        let found = order_test(&later, &order, 3)[0].unwrap();
        assert!(!found.exact && found.p > 0.0 && found.p < 1e-4);
        assert_eq!(Some(found), order_test(&later, &order, 3)[0]);
    }

    #[test]
    fn an_effect_of_the_order_is_told_from_an_effect_of_the_side() {
        let order = balanced_order(12, &mut ChaCha8Rng::seed_from_u64(9));
        let made = |of_b: f64, of_second: f64| -> Vec<Option<f64>> {
            order.iter().map(|second| Some(of_second + if *second { of_b } else { -of_b })).collect()
        };
        let test = |later: Vec<Option<f64>>| order_test(&[later], &order, 1)[0].unwrap();
        assert!((test(made(0.1, 0.3)).p - least_order_p(12, 6)).abs() < 1e-12);
        assert!((test(made(0.0, 0.3)).p - 1.0).abs() < 1e-12);
        let (effect, spread) = order_effect(&made(0.1, 0.3), &order, 0.95).unwrap();
        assert!((effect.center - 0.1).abs() < 1e-12 && spread < 1e-12);
        // A lost pair takes nothing away but itself.
        let mut lost = made(0.1, 0.3);
        lost[4] = None;
        assert!((order_effect(&lost, &order, 0.95).unwrap().0.center - 0.1).abs() < 1e-12);
        assert!(test(lost).p <= 0.01);
        assert_eq!(order_test(&[vec![None; 12]], &order, 1), [None]);
        assert_eq!(order_effect(&made(0.1, 0.0), &[true; 12], 0.95), None);
    }

    proptest! {
        #[test]
        fn p_is_a_probability_and_does_not_know_the_side_or_the_scale(
            later in prop::collection::vec(-1.0f64..1.0, 2..12),
            factor in 0.01f64..100.0,
            seed in 0u64..100,
        ) {
            let order = balanced_order(later.len(), &mut ChaCha8Rng::seed_from_u64(seed));
            let second = order.iter().filter(|second| **second).count();
            let test = |later: Vec<f64>, order: &[bool]| {
                order_test(&[later.into_iter().map(Some).collect()], order, 1)[0].unwrap()
            };
            let found = test(later.clone(), &order);
            prop_assert!(found.p >= least_order_p(later.len(), second) - 1e-12 && found.p <= 1.0);
            prop_assert!((found.p - found.p_adjusted).abs() < 1e-12, "a family of one");
            let scaled = test(later.iter().map(|d| d * factor).collect(), &order);
            prop_assert!((scaled.p - found.p).abs() < 1e-12);
            let exchanged: Vec<bool> = order.iter().map(|second| !second).collect();
            prop_assert!((test(later, &exchanged).p - found.p).abs() < 1e-12);
        }

        #[test]
        fn a_family_never_lowers_a_p(
            later in prop::collection::vec(prop::collection::vec(-1.0f64..1.0, 8), 1..6),
        ) {
            let order = balanced_order(8, &mut ChaCha8Rng::seed_from_u64(5));
            let later: Vec<Vec<Option<f64>>> = later.iter().map(|of| of.iter().copied().map(Some).collect()).collect();
            let found: Vec<OrderTest> = order_test(&later, &order, 1).into_iter().flatten().collect();
            for test in found {
                prop_assert!(test.p_adjusted >= test.p - 1e-12 && test.p_adjusted <= 1.0);
            }
        }

        #[test]
        fn more_pairs_and_less_spread_detect_less(pairs in 6usize..60, spread in 0.001f64..0.1) {
            let detectable = |spread, pairs| minimum_detectable(spread, pairs, 0.05, 0.8).unwrap();
            prop_assert!(detectable(spread, pairs + 1) < detectable(spread, pairs));
            prop_assert!(detectable(spread * 2.0, pairs) > detectable(spread, pairs));
        }

        #[test]
        fn an_unpaired_ratio_turns_over_with_its_sides(
            a in prop::collection::vec(0.5f64..2.0, 2..20),
            b in prop::collection::vec(0.5f64..2.0, 2..20),
        ) {
            let (one, other) = (unpaired_ratio(&a, &b, 0.95).unwrap(), unpaired_ratio(&b, &a, 0.95).unwrap());
            prop_assert!((one.center * other.center - 1.0).abs() < 1e-9);
            prop_assert!((one.low * other.high - 1.0).abs() < 1e-9);
        }
    }
}
