//! Ordinary least squares with intervals, for designs of a few columns.

use super::intervals::t_quantile;

/// One estimated coefficient with its t-interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Coefficient {
    pub value: f64,
    pub low: f64,
    pub high: f64,
}

/// A fitted linear model.
#[derive(Debug, Clone, PartialEq)]
pub struct Fit {
    pub coefficients: Vec<Coefficient>,
    pub r_squared: f64,
}

/// Pivots smaller than this, relative to the largest entry, mean that columns repeat each other.
const SINGULAR: f64 = 1e-12;

/// Fits `y ≈ rows · coefficients`. An intercept is a column of ones in `rows`.
///
/// `None` with no more rows than columns, ragged rows, numbers that are not finite, or columns that repeat each other.
pub fn least_squares(rows: &[Vec<f64>], y: &[f64], confidence: f64) -> Option<Fit> {
    let columns = rows.first()?.len();
    let usable = rows.len() == y.len()
        && rows.len() > columns
        && rows.iter().all(|row| row.len() == columns && row.iter().all(|v| v.is_finite()))
        && y.iter().all(|v| v.is_finite());
    if !usable {
        return None;
    }
    // Columns are brought to like size first: bytes beside batch sizes would ruin the normal equations.
    let scale: Vec<f64> = (0..columns)
        .map(|j| rows.iter().map(|row| row[j] * row[j]).sum::<f64>().sqrt().max(f64::MIN_POSITIVE))
        .collect();
    let mut normal = vec![vec![0.0; columns]; columns];
    let mut right = vec![0.0; columns];
    for (row, &target) in rows.iter().zip(y) {
        for i in 0..columns {
            right[i] += row[i] / scale[i] * target;
            for j in 0..columns {
                normal[i][j] += row[i] / scale[i] * row[j] / scale[j];
            }
        }
    }
    let inverse = invert(normal)?;
    let solution: Vec<f64> = (0..columns)
        .map(|i| (0..columns).map(|j| inverse[i][j] * right[j]).sum::<f64>() / scale[i])
        .collect();
    let predict = |row: &[f64]| row.iter().zip(&solution).map(|(x, b)| x * b).sum::<f64>();
    let residual: f64 = rows.iter().zip(y).map(|(row, target)| (target - predict(row)).powi(2)).sum();
    let mean = y.iter().sum::<f64>() / y.len() as f64;
    let total: f64 = y.iter().map(|v| (v - mean).powi(2)).sum();
    let degrees = rows.len() - columns;
    let variance = residual / degrees as f64;
    let t = t_quantile(confidence, degrees)?;
    let coefficients = (0..columns)
        .map(|i| {
            let half = t * (variance * inverse[i][i].max(0.0)).sqrt() / scale[i];
            Coefficient { value: solution[i], low: solution[i] - half, high: solution[i] + half }
        })
        .collect();
    Some(Fit { coefficients, r_squared: if total > 0.0 { 1.0 - residual / total } else { 1.0 } })
}

/// Gauss-Jordan with partial pivoting.
fn invert(mut matrix: Vec<Vec<f64>>) -> Option<Vec<Vec<f64>>> {
    let n = matrix.len();
    let mut inverse: Vec<Vec<f64>> =
        (0..n).map(|i| (0..n).map(|j| f64::from(u8::from(i == j))).collect()).collect();
    for column in 0..n {
        let pivot =
            (column..n).max_by(|&a, &b| matrix[a][column].abs().total_cmp(&matrix[b][column].abs()))?;
        if matrix[pivot][column].abs() < SINGULAR {
            return None;
        }
        matrix.swap(column, pivot);
        inverse.swap(column, pivot);
        let divisor = matrix[column][column];
        for j in 0..n {
            matrix[column][j] /= divisor;
            inverse[column][j] /= divisor;
        }
        for i in (0..n).filter(|&i| i != column) {
            let factor = matrix[i][column];
            for j in 0..n {
                matrix[i][j] -= factor * matrix[column][j];
                inverse[i][j] -= factor * inverse[column][j];
            }
        }
    }
    Some(inverse)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_through_noise_equals_the_closed_form() {
        // By hand: x = 1..5, y = 2.1 3.9 6.2 7.8 10.1. Sxy = 19.9, Sxx = 10, slope 1.99, intercept 0.05,
        // residual sum of squares 0.107, s² = 0.107/3, standard error of the slope sqrt(s²/10), t(0.975, 3) = 3.182446.
        let rows: Vec<Vec<f64>> = (1..=5).map(|x| vec![1.0, f64::from(x)]).collect();
        let fit = least_squares(&rows, &[2.1, 3.9, 6.2, 7.8, 10.1], 0.95).unwrap();
        let [intercept, slope] = [fit.coefficients[0], fit.coefficients[1]];
        assert!((intercept.value - 0.05).abs() < 1e-9 && (slope.value - 1.99).abs() < 1e-9);
        let half = 3.182_446_305_284_263 * (0.107 / 3.0 / 10.0f64).sqrt();
        assert!((slope.high - slope.value - half).abs() < 1e-6, "{} {half}", slope.high - slope.value);
        assert!((fit.r_squared - (1.0 - 0.107 / 39.708)).abs() < 1e-6, "{}", fit.r_squared);
    }

    #[test]
    fn two_regressors_of_very_different_size_are_recovered() {
        let rows: Vec<Vec<f64>> =
            (0..12).map(|i| vec![1.0, f64::from(i % 4) * 1e9, f64::from(i / 4)]).collect();
        let y: Vec<f64> = rows.iter().map(|r| 5e6 + r[1] / 40.0 + 7e3 * r[2]).collect();
        let fit = least_squares(&rows, &y, 0.95).unwrap();
        assert!((fit.coefficients[0].value / 5e6 - 1.0).abs() < 1e-9);
        assert!((fit.coefficients[1].value * 40.0 - 1.0).abs() < 1e-9);
        assert!((fit.coefficients[2].value / 7e3 - 1.0).abs() < 1e-5);
    }

    #[test]
    fn what_cannot_be_solved_is_none() {
        let repeated: Vec<Vec<f64>> = (0..6).map(|i| vec![1.0, f64::from(i), 2.0 * f64::from(i)]).collect();
        assert_eq!(least_squares(&repeated, &[0.0; 6], 0.95), None);
        assert_eq!(least_squares(&[vec![1.0, 2.0], vec![1.0, 3.0]], &[1.0, 2.0], 0.95), None);
        assert_eq!(least_squares(&vec![vec![f64::NAN]; 3], &[1.0; 3], 0.95), None);
        assert_eq!(least_squares(&[], &[], 0.95), None);
    }
}
