//! Values in the order they were taken: correlation of neighbours and trend.

use super::intervals::t_quantile;
use super::summary::mean;

/// Lag-1 autocorrelation, or `None` for fewer than four values or none that vary.
#[must_use]
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
#[must_use]
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_that_resemble_each_other_correlate() {
        // By hand: mean 2.5; products -0.75·... r1 of 1,2,3,4 is 0.25.
        assert!((lag1_autocorrelation(&[1.0, 2.0, 3.0, 4.0]).unwrap() - 0.25).abs() < 1e-12);
        assert!(lag1_autocorrelation(&[1.0, -1.0, 1.0, -1.0, 1.0, -1.0]).unwrap() < -0.7);
        assert_eq!(lag1_autocorrelation(&[5.0; 10]), None);
        assert_eq!(lag1_autocorrelation(&[1.0, 2.0, 3.0]), None);
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
