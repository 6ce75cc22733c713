//! Mean, spread and percentiles of a sample.

use crate::units::whole_count;

/// The arithmetic mean; NaN for an empty sample.
pub fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// The geometric mean of positive values.
pub fn geometric_mean(values: &[f64]) -> f64 {
    (values.iter().map(|value| value.ln()).sum::<f64>() / values.len() as f64).exp()
}

/// The sample standard deviation (n − 1), or `None` for fewer than two values.
pub fn sd(values: &[f64]) -> Option<f64> {
    if values.len() < 2 {
        return None;
    }
    let mean = mean(values);
    let sum: f64 = values.iter().map(|v| (v - mean).powi(2)).sum();
    Some((sum / (values.len() - 1) as f64).sqrt())
}

/// The nearest-rank percentile x(⌈p·n⌉) of ascending values; NaN for an empty sample.
pub fn percentile(sorted: &[f64], p: f64) -> f64 {
    if sorted.is_empty() {
        return f64::NAN;
    }
    // A product such as 0.9 · 10 may lie a rounding error above the whole number it stands for.
    let rank = whole_count((p * sorted.len() as f64 - 1e-9).ceil().max(1.0));
    sorted[rank.min(sorted.len()) - 1]
}

/// The median of values in any order, the mean of the two middle ones of an even number; NaN of none.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let half = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        count if count % 2 == 1 => sorted[half],
        _ => f64::midpoint(sorted[half - 1], sorted[half]),
    }
}

/// [`median`], where there are values.
pub fn known_median(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| median(values))
}

/// Values that a percentile needs to be reported.
///
/// *Source*: p99 and p99.9 are held to 1,000 and 10,000, so that ten values lie beyond them; p75, p90 and p95 to the number
/// of values whose maximum exceeds the percentile with 95 % confidence (0.75^11, 0.9^29 and 0.95^59 are below 0.05).
pub fn needed(p: f64) -> usize {
    match p {
        p if p > 0.99 => 10_000,
        p if p > 0.95 => 1_000,
        p if p > 0.90 => 59,
        p if p > 0.75 => 29,
        p if p > 0.50 => 11,
        _ => 1,
    }
}

/// A percentile of ascending values, or `None` where the sample is too small.
pub fn percentile_if_enough(sorted: &[f64], p: f64) -> Option<f64> {
    (sorted.len() >= needed(p)).then(|| percentile(sorted, p))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn percentiles_are_nearest_rank() {
        let sorted: Vec<f64> = (1..=10).map(f64::from).collect();
        for (p, wanted) in [(0.0, 1.0), (0.1, 1.0), (0.5, 5.0), (0.51, 6.0), (0.9, 9.0), (1.0, 10.0)] {
            assert!((percentile(&sorted, p) - wanted).abs() < f64::EPSILON, "{p}");
        }
        assert!(percentile(&[], 0.5).is_nan());
    }

    #[test]
    fn a_percentile_the_sample_cannot_carry_is_none() {
        let sorted: Vec<f64> = (0..999).map(f64::from).collect();
        assert_eq!(percentile_if_enough(&sorted, 0.99), None);
        let sorted: Vec<f64> = (1..=1000).map(f64::from).collect();
        assert_eq!(percentile_if_enough(&sorted, 0.99), Some(990.0));
        assert_eq!(percentile_if_enough(&sorted, 0.999), None);
        assert_eq!(percentile_if_enough(&sorted[..28], 0.9), None);
        assert_eq!(percentile_if_enough(&sorted[..29], 0.9), Some(27.0));
    }

    #[test]
    fn spread_is_that_of_a_sample() {
        // numpy: std([2, 4, 4, 4, 5, 5, 7, 9], ddof=1) = 2.138089935299395
        let values = [2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0];
        assert!((sd(&values).unwrap() - 2.138_089_935_299_395).abs() < 1e-14);
        assert!((mean(&values) - 5.0).abs() < 1e-15);
        assert_eq!(sd(&[1.0]), None);
    }

    proptest! {
        #[test]
        fn percentiles_rise_with_p_and_are_members(mut values in prop::collection::vec(-1e9f64..1e9, 1..200), p in 0.0f64..1.0, q in 0.0f64..1.0) {
            values.sort_by(f64::total_cmp);
            let (low, high) = (p.min(q), p.max(q));
            prop_assert!(percentile(&values, low) <= percentile(&values, high));
            prop_assert!(values.contains(&percentile(&values, p)));
        }
    }
}
