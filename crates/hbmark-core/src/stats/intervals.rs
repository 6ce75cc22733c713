//! Intervals: Student's t on log block means, and order statistics for percentiles.

use statrs::distribution::{Binomial, ContinuousCDF, DiscreteCDF, StudentsT};

use super::summary::{mean, sd};

/// A center with its interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    pub center: f64,
    pub low: f64,
    pub high: f64,
}

impl Interval {
    /// Half of the width on the log scale, relative to the center.
    pub fn relative_half_width(&self) -> f64 {
        (self.high / self.low).sqrt() - 1.0
    }
}

/// The geometric mean of positive, independent values with its t-interval on the log scale, or `None` for fewer than two values
/// or any that is not positive.
pub fn t_interval_log(values: &[f64], confidence: f64) -> Option<Interval> {
    if values.len() < 2 || values.iter().any(|v| !v.is_finite() || *v <= 0.0) {
        return None;
    }
    let logs: Vec<f64> = values.iter().map(|v| v.ln()).collect();
    let center = mean(&logs);
    let half = t_quantile(confidence, values.len() - 1)? * sd(&logs)? / (values.len() as f64).sqrt();
    Some(Interval { center: center.exp(), low: (center - half).exp(), high: (center + half).exp() })
}

/// Groups whose means are further apart than this many times what their values' spread explains (variance over variance) are not of one mean.
const GROUPS_DIFFER: f64 = 1.5;

/// The same for values in groups that may share something, such as the clock and the memory of one visit: `group` names that of each value, neighbours
/// in order. Where the means of groups lie apart, the interval is that of so few groups, by their variance component; never narrower than
/// [`t_interval_log`].
pub fn t_interval_log_of_groups(values: &[f64], group: &[usize], confidence: f64) -> Option<Interval> {
    let plain = t_interval_log(values, confidence)?;
    let logs: Vec<f64> = values.iter().map(|v| v.ln()).collect();
    let mut groups: Vec<&[f64]> = Vec::new();
    let mut begin = 0;
    for of in group.chunk_by(|one, other| one == other) {
        groups.push(logs.get(begin..begin + of.len())?);
        begin += of.len();
    }
    let (count, number) = (logs.len() as f64, groups.len());
    if number < 2 || logs.len() <= number {
        return Some(plain);
    }
    let center = mean(&logs);
    let within: f64 = groups.iter().flat_map(|of| of.iter().map(|v| (v - mean(of)).powi(2))).sum();
    let between: f64 = groups.iter().map(|of| of.len() as f64 * (mean(of) - center).powi(2)).sum();
    let within = within / (count - number as f64);
    let between = between / (number as f64 - 1.0);
    if between <= GROUPS_DIFFER * within {
        return Some(plain);
    }
    let squares = groups.iter().map(|of| (of.len() as f64).powi(2)).sum::<f64>();
    let size = (count - squares / count) / (number as f64 - 1.0);
    let variance = (between - within) / size * squares / count.powi(2) + within / count;
    let half = t_quantile(confidence, number - 1)? * variance.sqrt();
    let half = half.max((plain.high / plain.low).ln() / 2.0);
    Some(Interval { center: center.exp(), low: (center - half).exp(), high: (center + half).exp() })
}

/// The two-sided Student quantile.
pub(super) fn t_quantile(confidence: f64, degrees: usize) -> Option<f64> {
    let t = StudentsT::new(0.0, 1.0, degrees as f64).ok()?;
    Some(t.inverse_cdf(0.5 + confidence / 2.0))
}

/// Half of the interval of the mean of a series whose neighbours may depend on each other, by *batch means*: the means of consecutive
/// batches are taken for independent. Never less than if all values were; `None` for too few values.
pub fn batch_error(values: &[f64], batches: usize, confidence: f64) -> Option<f64> {
    // Of a small sample fewer batches, so that each holds some values.
    let size = (values.len() / batches.max(5)).max(4);
    if values.len() / size < 5 {
        return None;
    }
    // The remainder is shared by none: it is less than one batch.
    let means: Vec<f64> = values.chunks_exact(size).map(mean).collect();
    let grouped = sd(&means)? / (means.len() as f64).sqrt();
    let independent = sd(values)? / (values.len() as f64).sqrt();
    Some(t_quantile(confidence, means.len() - 1)? * grouped.max(independent))
}

/// A distribution-free interval of a percentile: the tightest pair of ascending values, one rank step at a time outwards from the
/// percentile, that covers it with at least this confidence. `None` where the sample is too small for any pair.
pub fn order_statistic_interval(sorted: &[f64], p: f64, confidence: f64) -> Option<(f64, f64)> {
    let n = sorted.len();
    let binomial = Binomial::new(p, n as u64).ok()?;
    let tail = (1.0 - confidence) / 2.0;
    // Ranks from 1. The percentile lies below x(low) with probability P(B < low), above x(high) with P(B >= high).
    let below = |rank: usize| if rank == 0 { 0.0 } else { binomial.cdf(rank as u64 - 1) };
    let low = (1..=n).rev().find(|&rank| below(rank) <= tail)?;
    let high = (low + 1..=n).find(|&rank| 1.0 - below(rank) <= tail)?;
    Some((sorted[low - 1], sorted[high - 1]))
}

/// The chance of at least so many of `n` independent events that each have the probability `p`. `None` for none of them.
pub fn chance_of_at_least(count: usize, n: usize, p: f64) -> Option<f64> {
    if n == 0 {
        return None;
    }
    let binomial = Binomial::new(p, n as u64).ok()?;
    Some(if count == 0 { 1.0 } else { binomial.sf(count as u64 - 1) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;
    use rand_distr::{Distribution, LogNormal, StandardNormal};

    #[test]
    fn an_interval_needs_two_positive_values() {
        assert_eq!(t_interval_log(&[1.0], 0.95), None);
        assert_eq!(t_interval_log(&[1.0, 0.0], 0.95), None);
    }

    #[test]
    fn t_quantiles_equal_published_tables() {
        for (degrees, wanted) in [(1, 12.706_2), (4, 2.776_4), (9, 2.262_2), (39, 2.022_7)] {
            assert!((t_quantile(0.95, degrees).unwrap() - wanted).abs() < 1e-4);
        }
    }

    #[test]
    fn chances_of_a_binomial_are_those_worked_by_hand() {
        assert_eq!(chance_of_at_least(0, 10, 0.1), Some(1.0));
        assert!((chance_of_at_least(10, 10, 0.5).unwrap() - 1.0 / 1024.0).abs() < 1e-12);
        // 1 - 0.9^10 - 10 * 0.1 * 0.9^9
        assert!((chance_of_at_least(2, 10, 0.1).unwrap() - 0.263_901_070_9).abs() < 1e-9);
        assert_eq!(chance_of_at_least(0, 0, 0.1), None);
    }

    #[test]
    fn order_statistics_need_the_published_minimum_and_give_the_published_ranks() {
        let sorted: Vec<f64> = (1..=1000).map(f64::from).collect();
        // Two-sided 95 %: the median needs 6 values, p90 36, p99 368.
        assert_eq!(order_statistic_interval(&sorted[..5], 0.5, 0.95), None);
        assert_eq!(order_statistic_interval(&sorted[..6], 0.5, 0.95), Some((1.0, 6.0)));
        assert_eq!(order_statistic_interval(&sorted[..35], 0.9, 0.95), None);
        assert!(order_statistic_interval(&sorted[..36], 0.9, 0.95).is_some());
        assert_eq!(order_statistic_interval(&sorted[..367], 0.99, 0.95), None);
        assert!(order_statistic_interval(&sorted[..368], 0.99, 0.95).is_some());
        // p99 at n = 1,000: ranks 983 to 997.
        assert_eq!(order_statistic_interval(&sorted, 0.99, 0.95), Some((983.0, 997.0)));
    }

    #[test]
    fn the_t_interval_covers_as_often_as_it_says() {
        let mut random = ChaCha8Rng::seed_from_u64(11);
        let distribution = LogNormal::new(0.0, 0.05).unwrap();
        let covered = (0..10_000)
            .filter(|_| {
                let sample: Vec<f64> = (0..10).map(|_| distribution.sample(&mut random)).collect();
                let interval = t_interval_log(&sample, 0.95).unwrap();
                interval.low <= 1.0 && 1.0 <= interval.high
            })
            .count();
        assert!((9_400..=9_600).contains(&covered), "{covered} of 10,000");
    }

    /// Visits of a cell in which clock and memory differ: spread between visits and within them, and how often of 2,000 the interval may miss.
    #[test]
    fn an_interval_of_groups_covers_what_differs_between_them() {
        let mut random = ChaCha8Rng::seed_from_u64(14);
        let group = [0, 0, 0, 0, 1, 1, 1, 2, 2, 2];
        for (between, within, least, plain_most) in [
            (0.0, 0.01, 1_880, 2_000),
            (0.002, 0.005, 1_800, 1_850),
            (0.005, 0.005, 1_750, 1_650),
            (0.01, 0.005, 1_750, 1_400),
        ] {
            let (mut covered, mut by_plain) = (0, 0);
            for _ in 0..2_000 {
                let mut normal = || -> f64 { StandardNormal.sample(&mut random) };
                let visits = [normal(), normal(), normal()];
                let values: Vec<f64> =
                    group.iter().map(|of| (between * visits[*of] + within * normal()).exp()).collect();
                let holds = |interval: Interval| interval.low <= 1.0 && 1.0 <= interval.high;
                covered += usize::from(holds(t_interval_log_of_groups(&values, &group, 0.95).unwrap()));
                by_plain += usize::from(holds(t_interval_log(&values, 0.95).unwrap()));
            }
            let found = format!("{between} {within}: {covered} of 2,000, {by_plain} without groups");
            assert!((least..=1_960).contains(&covered) && by_plain <= plain_most, "{found}");
        }
        let values = [1.0, 1.01, 0.99, 1.0];
        assert_eq!(t_interval_log_of_groups(&values, &[3; 4], 0.95), t_interval_log(&values, 0.95));
        assert_eq!(t_interval_log_of_groups(&values, &[0, 1, 2, 3], 0.95), t_interval_log(&values, 0.95));
    }

    #[test]
    fn batch_means_allow_for_bursts() {
        let mut random = ChaCha8Rng::seed_from_u64(13);
        // One value in twenty is high, alone or thirty at a time.
        for (burst, covered) in [(1, 930), (30, 900)] {
            let right = (0..1_000)
                .filter(|_| {
                    let mut values = Vec::new();
                    while values.len() < 4_000 {
                        let high = f64::from(u8::from(rand::Rng::random_bool(&mut random, 0.05)));
                        values.extend(std::iter::repeat_n(high, burst));
                    }
                    let error = batch_error(&values, 20, 0.95).unwrap();
                    (mean(&values) - 0.05).abs() <= error
                })
                .count();
            assert!(right >= covered, "{right} of 1,000 with bursts of {burst}");
        }
        assert_eq!(batch_error(&[1.0; 19], 20, 0.95), None);
        assert_eq!(batch_error(&[1.0; 20], 20, 0.95), Some(0.0));
    }

    #[test]
    fn block_means_rescue_an_interval_that_correlated_steps_would_ruin() {
        let mut random = ChaCha8Rng::seed_from_u64(12);
        let (mut by_steps, mut by_blocks) = (0, 0);
        for _ in 0..1_000 {
            // AR(1) with coefficient 0.9 around 1: 1,000 steps.
            let mut state = 0.0;
            let steps: Vec<f64> = (0..1_000)
                .map(|_| {
                    let shock: f64 = StandardNormal.sample(&mut random);
                    state = 0.9 * state + 0.01 * shock;
                    1.0 + state
                })
                .collect();
            let blocks: Vec<f64> = steps.chunks(100).map(mean).collect();
            let covers =
                |values: &[f64]| t_interval_log(values, 0.95).is_some_and(|i| i.low <= 1.0 && 1.0 <= i.high);
            by_steps += usize::from(covers(&steps));
            by_blocks += usize::from(covers(&blocks));
        }
        assert!(by_steps < 500, "raw steps cover {by_steps} of 1,000");
        assert!(by_blocks > 900, "block means cover {by_blocks} of 1,000");
    }

    proptest! {
        #[test]
        fn an_interval_holds_its_center_and_scales(values in prop::collection::vec(0.1f64..1e6, 2..60), factor in 0.01f64..100.0) {
            let interval = t_interval_log(&values, 0.95).unwrap();
            prop_assert!(interval.low <= interval.center && interval.center <= interval.high);
            let scaled: Vec<f64> = values.iter().map(|v| v * factor).collect();
            let other = t_interval_log(&scaled, 0.95).unwrap();
            prop_assert!((other.center / interval.center / factor - 1.0).abs() < 1e-9);
        }
    }
}
