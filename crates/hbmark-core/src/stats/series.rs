//! Values in the order they were taken: correlation of neighbours and trend.

use super::intervals::t_quantile;
use super::summary::mean;

/// Lag-1 autocorrelation, or `None` for fewer than four values or none that vary.
pub fn lag1_autocorrelation(values: &[f64]) -> Option<f64> {
    if values.len() < 4 {
        return None;
    }
    let mean = mean(values);
    let total: f64 = values.iter().map(|v| (v - mean).powi(2)).sum();
    let neighbours: f64 = values.windows(2).map(|pair| (pair[0] - mean) * (pair[1] - mean)).sum();
    (total > mean.abs().max(f64::MIN_POSITIVE) * 1e-24).then(|| neighbours / total)
}

/// A straight line through a series.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Trend {
    /// Change of the line from the first value to the last, relative to the mean.
    pub relative_change: f64,
    /// Whether the slope's 95 % t-interval leaves out zero.
    pub significant: bool,
}

/// Fits a line over the index; `None` for fewer than three values.
pub fn trend(values: &[f64]) -> Option<Trend> {
    let n = values.len();
    if n < 3 {
        return None;
    }
    let center = (n - 1) as f64 / 2.0;
    let mean = mean(values);
    let spread: f64 = (0..n).map(|i| (i as f64 - center).powi(2)).sum();
    let slope =
        values.iter().enumerate().map(|(i, v)| (i as f64 - center) * (v - mean)).sum::<f64>() / spread;
    let residual: f64 =
        values.iter().enumerate().map(|(i, v)| (v - mean - slope * (i as f64 - center)).powi(2)).sum();
    let error = (residual / (n - 2) as f64 / spread).sqrt();
    let half = t_quantile(0.95, n - 2)? * error;
    Some(Trend {
        relative_change: slope * (n - 1) as f64 / mean,
        significant: slope.abs() > half && slope != 0.0,
    })
}

/// By how much a series grew over its length: the change of a fitted line, with an interval that allows for autocorrelation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Growth {
    /// In the unit of the values.
    pub change: f64,
    pub low: f64,
    pub high: f64,
}

/// The growth of a series with a two-sided t-interval; `None` for fewer than eight values.
///
/// Deviations from the line are taken for an autoregression of order one. Its coefficient enters at the upper end of its own interval, after
/// Kendall's correction of its bias, and never above one: a short series that could as well be a random walk gets the interval of a
/// random walk.
pub fn growth(values: &[f64], confidence: f64) -> Option<Growth> {
    let n = values.len();
    if n < 8 {
        return None;
    }
    let (count, center) = (n as f64, (n - 1) as f64 / 2.0);
    let level = mean(values);
    let spread: f64 = (0..n).map(|i| (i as f64 - center).powi(2)).sum();
    let weight = |i: usize| (i as f64 - center) / spread;
    let slope: f64 = values.iter().enumerate().map(|(i, v)| weight(i) * (v - level)).sum();
    let residuals: Vec<f64> =
        values.iter().enumerate().map(|(i, v)| v - level - slope * (i as f64 - center)).collect();
    let pairs = || residuals.windows(2).map(|pair| (pair[0], pair[1]));
    let before: f64 = pairs().map(|(a, _)| a * a).sum();
    let seen = if before > 0.0 { pairs().map(|(a, b)| a * b).sum::<f64>() / before } else { 0.0 };
    let innovation = pairs().map(|(a, b)| (b - seen * a).powi(2)).sum::<f64>() / (count - 4.0);
    // A line through an autoregression makes it look less correlated than it is.
    let unbiased = seen + (2.0 + 4.0 * seen) / count;
    let phi = (unbiased + 2.0 * ((1.0 - seen * seen).max(0.0) / count).sqrt()).clamp(0.0, 1.0);
    // What each innovation adds to the slope: its own value and all that follows from it.
    let (mut reach, mut variance) = (0.0, 0.0);
    for i in (0..n).rev() {
        reach = weight(i) + phi * reach;
        variance += if i > 0 {
            reach * reach
        } else if phi < 1.0 {
            reach * reach / (1.0 - phi * phi)
        } else {
            0.0
        };
    }
    // The values of a queue are averages over bins, whose steps are smoother than those of the queue: by half of the variance of a random walk.
    let half = t_quantile(confidence, n - 4)? * (variance * innovation * (1.0 + phi / 2.0)).sqrt();
    let length = count - 1.0;
    Some(Growth { change: slope * length, low: (slope - half) * length, high: (slope + half) * length })
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;
    use rand_distr::{Distribution, StandardNormal};

    use super::*;

    #[test]
    fn neighbours_that_resemble_each_other_correlate() {
        // By hand: mean 2.5; products -0.75·... r1 of 1,2,3,4 is 0.25.
        assert!((lag1_autocorrelation(&[1.0, 2.0, 3.0, 4.0]).unwrap() - 0.25).abs() < 1e-12);
        assert!(lag1_autocorrelation(&[1.0, -1.0, 1.0, -1.0, 1.0, -1.0]).unwrap() < -0.7);
        assert_eq!(lag1_autocorrelation(&[5.0; 10]), None);
        assert_eq!(lag1_autocorrelation(&[1.0, 2.0, 3.0]), None);
    }

    fn autoregression(phi: f64, count: usize, random: &mut ChaCha8Rng) -> Vec<f64> {
        let mut state = 0.0;
        let mut next = || {
            let shock: f64 = StandardNormal.sample(random);
            state = phi * state + shock;
            state
        };
        // From anywhere in its range.
        (0..200).for_each(|_| _ = next());
        (0..count).map(|_| next()).collect()
    }

    #[test]
    fn growth_of_a_series_without_a_trend_holds_zero_however_it_is_correlated() {
        let mut random = ChaCha8Rng::seed_from_u64(5);
        for (phi, most) in [(0.0, 10), (0.5, 10), (0.8, 15), (0.95, 25), (1.0, 35)] {
            for count in [25, 64] {
                let misses = (0..1000)
                    .filter(|_| {
                        let g = growth(&autoregression(phi, count, &mut random), 0.99).unwrap();
                        g.low > 0.0 || g.high < 0.0
                    })
                    .count();
                assert!(misses <= most, "{misses} of 1,000 for {phi} and {count} values");
            }
        }
    }

    #[test]
    fn growth_is_that_of_the_line() {
        let mut random = ChaCha8Rng::seed_from_u64(6);
        let mut values = autoregression(0.3, 64, &mut random);
        for (i, value) in values.iter_mut().enumerate() {
            *value += i as f64;
        }
        let g = growth(&values, 0.99).unwrap();
        assert!(g.low < 63.0 && 63.0 < g.high && g.low > 58.0 && g.high < 68.0, "{g:?}");
        let constant = growth(&[3.0; 20], 0.99).unwrap();
        assert_eq!((constant.change, constant.low, constant.high), (0.0, 0.0, 0.0));
        assert_eq!(growth(&[1.0; 7], 0.99), None);
    }

    #[test]
    fn a_line_is_found_and_noise_is_not() {
        let rising: Vec<f64> = (0..20).map(|i| 100.0 + f64::from(i)).collect();
        let trend_of_rising = trend(&rising).unwrap();
        assert!(trend_of_rising.significant);
        assert!((trend_of_rising.relative_change - 19.0 / 109.5).abs() < 1e-12);
        let flat = [10.0, 10.1, 9.9, 10.05, 9.95, 10.1, 9.9, 10.0];
        assert!(!trend(&flat).unwrap().significant);
        assert_eq!(trend(&[1.0, 2.0]), None);
    }
}
