//! Linear regression of the measured step: fixed cost with weights, cost per KV byte, cost per sequence.
//!
//! Enters: measured steps with their batch and KV bytes. Leaves: a [`FittedModel`]. The slope over KV bytes is the inverse of the
//! effective KV bandwidth; the intercept is weights plus fixed overhead, to compare with the prediction for the weights alone.

use crate::model::Dtype;
use crate::result::FittedModel;
use crate::stats::{CONFIDENCE, least_squares, mean};

/// One measured decode cell.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FitPoint {
    pub batch: usize,
    /// KV bytes the step reads over all sequences.
    pub kv_bytes: f64,
    pub step_ns: f64,
}

/// KV bytes enter the design in this unit, so that its columns are of like size and the solver stays well conditioned.
const KV_UNIT: f64 = 1e6;
/// Columns closer to parallel than this (as 1 − cos²) are collinear.
const COLLINEAR: f64 = 1e-6;

/// Regresses the step on KV bytes and batch: `step = fixed + kv_bytes / bandwidth + per_sequence · batch`.
///
/// What varies from run to run of a step is a share of its time, so residuals count in shares of it, and not the longest step most.
/// A column that does not vary is left out. `None` with fewer than two points more than columns, with nothing that varies, or when the columns cannot be
/// told apart: of one context and several batches nothing says whether a step grows with its KV or with its sequences.
pub fn fit(
    engine: &str,
    dtype: Dtype,
    points: &[FitPoint],
    predicted_intercept_ns: Option<f64>,
) -> Option<FittedModel> {
    let kv: Vec<f64> = points.iter().map(|point| point.kv_bytes / KV_UNIT).collect();
    let batch: Vec<f64> = points.iter().map(|point| point.batch as f64).collect();
    let use_kv = spread(&kv) > 0.0;
    let use_batch = spread(&batch) > 0.0;
    if use_kv && use_batch && collinear(&kv, &batch) {
        return None;
    }
    let columns = 1 + usize::from(use_kv) + usize::from(use_batch);
    if columns == 1 || points.len() < columns + 2 {
        return None;
    }
    let times: Vec<f64> = points.iter().map(|point| point.step_ns).collect();
    if times.iter().any(|time| !(time.is_finite() && *time > 0.0)) {
        return None;
    }
    let rows: Vec<Vec<f64>> = kv
        .iter()
        .zip(&batch)
        .map(|(&kv, &batch)| {
            let mut row = vec![1.0];
            row.extend(use_kv.then_some(kv));
            row.extend(use_batch.then_some(batch));
            row
        })
        .collect();
    let shares: Vec<Vec<f64>> =
        rows.iter().zip(&times).map(|(row, time)| row.iter().map(|value| value / time).collect()).collect();
    let solution = least_squares(&shares, &vec![1.0; times.len()], CONFIDENCE)?;
    let explained = |row: &Vec<f64>| -> f64 {
        row.iter().zip(&solution.coefficients).map(|(value, found)| value * found.value).sum()
    };
    let left: f64 = rows.iter().zip(&times).map(|(row, time)| (time - explained(row)).powi(2)).sum();
    let varies = spread(&times);
    let r_squared = if varies > 0.0 { 1.0 - left / varies } else { 1.0 };
    let mut estimates = solution.coefficients.into_iter();
    let intercept = estimates.next()?;
    let slope = if use_kv { Some(estimates.next()?) } else { None };
    let per_sequence = if use_batch { Some(estimates.next()?) } else { None };
    // ns per KV_UNIT bytes → bytes per second. A slope that may be nothing has no bandwidth: its inverse is unbounded.
    let bandwidth = |ns: f64| KV_UNIT / (ns * 1e-9);
    let bounded = slope.filter(|slope| slope.low > 0.0);
    Some(FittedModel {
        engine: engine.to_owned(),
        dtype,
        intercept_ns: intercept.value,
        intercept_ci_ns: [intercept.low, intercept.high],
        predicted_intercept_ns,
        kv_bytes_per_s: slope.filter(|slope| slope.value > 0.0).map(|slope| bandwidth(slope.value)),
        kv_bytes_per_s_ci: bounded.map(|slope| [bandwidth(slope.high), bandwidth(slope.low)]),
        per_sequence_ns: per_sequence.map(|estimate| estimate.value),
        per_sequence_ci_ns: per_sequence.map(|estimate| [estimate.low, estimate.high]),
        r_squared,
        cells: points.len(),
    })
}

/// Sum of squares about the mean.
fn spread(values: &[f64]) -> f64 {
    let mean = mean(values);
    values.iter().map(|value| (value - mean).powi(2)).sum()
}

fn collinear(a: &[f64], b: &[f64]) -> bool {
    let (mean_a, mean_b) = (mean(a), mean(b));
    let product: f64 = a.iter().zip(b).map(|(a, b)| (a - mean_a) * (b - mean_b)).sum();
    1.0 - product * product / (spread(a) * spread(b)) < COLLINEAR
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;
    use rand_distr::{Distribution, Normal};

    use super::*;

    /// 5 ms of weights, 2 TB/s for the KV, 10 µs per sequence.
    fn step(batch: usize, context: usize) -> FitPoint {
        let kv_bytes = (batch * context * 131_072) as f64;
        FitPoint { batch, kv_bytes, step_ns: 5e6 + kv_bytes / 2e12 * 1e9 + 1e4 * batch as f64 }
    }

    #[test]
    fn the_planted_bandwidth_and_costs_are_recovered() {
        let points: Vec<_> = [1, 4, 16]
            .into_iter()
            .flat_map(|batch| [128, 1024, 4096].map(|context| step(batch, context)))
            .collect();
        let model = fit("stock", Dtype::Bf16, &points, Some(4.9e6)).expect("enough points");
        assert!((model.intercept_ns / 5e6 - 1.0).abs() < 1e-6, "{model:?}");
        assert!((model.kv_bytes_per_s.expect("slope") / 2e12 - 1.0).abs() < 1e-6, "{model:?}");
        assert!((model.per_sequence_ns.expect("batch") / 1e4 - 1.0).abs() < 1e-4, "{model:?}");
        assert_eq!((model.cells, model.predicted_intercept_ns), (9, Some(4.9e6)));
    }

    /// The steps of one batch, every other one later by so much and the rest sooner.
    fn scattered(by: f64) -> Vec<FitPoint> {
        let points = [128, 512, 1024, 4096]
            .map(|context| step(4, context))
            .into_iter()
            .zip([-by, by].into_iter().cycle());
        points.map(|(point, by)| FitPoint { step_ns: point.step_ns + by, ..point }).collect()
    }

    #[test]
    fn the_interval_of_scattered_steps_holds_the_planted_bandwidth() {
        let model = fit("stock", Dtype::Bf16, &scattered(1e4), None).expect("enough points");
        let [low, high] = model.kv_bytes_per_s_ci.expect("a positive slope");
        assert!(low < 2e12 && 2e12 < high, "{model:?}");
    }

    /// Steps from 5 to 70 ms whose noise is 1 % of each: unweighted, the interval held the bandwidth in half of the draws.
    #[test]
    fn the_interval_holds_the_bandwidth_as_often_as_it_says_where_noise_is_a_share_of_the_step() {
        let mut random = ChaCha8Rng::seed_from_u64(7);
        let noise = Normal::new(1.0, 0.01).unwrap();
        let draws = 1000;
        let holds = |_| {
            let points: Vec<_> = [1, 8, 32]
                .into_iter()
                .flat_map(|batch| [512, 4096, 16_384].map(|context| step(batch, context)))
                .map(|point| FitPoint { step_ns: point.step_ns * noise.sample(&mut random), ..point })
                .collect();
            let [low, high] = fit("stock", Dtype::Bf16, &points, None).unwrap().kv_bytes_per_s_ci.unwrap();
            low < 2e12 && 2e12 < high
        };
        let held = (0..draws).map(holds).filter(|held| *held).count();
        assert!((930..=970).contains(&held), "{held} of {draws}");
    }

    #[test]
    fn one_batch_leaves_no_cost_per_sequence() {
        let points: Vec<_> = [128, 512, 1024, 4096].map(|context| step(4, context)).to_vec();
        let model = fit("stock", Dtype::Bf16, &points, None).expect("enough points");
        assert_eq!(model.per_sequence_ns, None);
        assert!((model.kv_bytes_per_s.expect("slope") / 2e12 - 1.0).abs() < 1e-6);
    }

    #[test]
    fn one_context_does_not_split_batch_and_kv() {
        let points: Vec<_> = [1, 2, 4, 8].map(|batch| step(batch, 1024)).to_vec();
        assert_eq!(fit("stock", Dtype::Bf16, &points, None), None);
    }

    #[test]
    fn too_little_variation_has_no_fit() {
        assert_eq!(fit("stock", Dtype::F32, &[step(1, 128); 6], None), None);
        assert_eq!(fit("stock", Dtype::F32, &[step(1, 128), step(1, 256), step(1, 512)], None), None);
        assert_eq!(fit("stock", Dtype::F32, &[], None), None);
    }

    #[test]
    fn a_slope_that_may_be_nothing_has_no_bandwidth_interval() {
        let model = fit("stock", Dtype::Bf16, &scattered(5e5), None).expect("enough points");
        assert!(model.kv_bytes_per_s.is_some());
        assert_eq!(model.kv_bytes_per_s_ci, None);
    }
}
