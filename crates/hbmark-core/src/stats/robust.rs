//! Statistics that a minority of wrong values cannot move: medians, the median absolute deviation, Tukey's median polish; and Holm's
//! correction of a family of tests.
//!
//! Enters: values on a scale where effects add up, such as logarithms. Leaves: centres, spreads, effects, p values. Not a number is a bug of
//! the caller.

use statrs::distribution::{ChiSquared, ContinuousCDF, FisherSnedecor, StudentsT};

use super::summary::median;

/// The standard error of a median of many normal values over that of their mean: √(π/2).
pub const MEDIAN_ERROR: f64 = 1.253_314_137_315_500_1;

/// Degrees of freedom of a normal sample that estimate a spread as well as the median absolute deviation does from all values.
/// *Source*: its asymptotic efficiency of 36.8 % (Rousseeuw and Croux, 1993).
pub const MAD_EFFICIENCY: f64 = 0.368;

/// What turns a median absolute deviation of a normal sample into its standard deviation: 1/Φ⁻¹(3/4).
const MAD_TO_SD: f64 = 1.482_602_218_505_602;

/// The standard deviation of a normal sample that has this median absolute deviation; NaN of none.
pub fn mad_sd(values: &[f64]) -> f64 {
    let center = median(values);
    MAD_TO_SD * median(&values.iter().map(|value| (value - center).abs()).collect::<Vec<_>>())
}

/// The standard error of a median of so many independent normal values of standard deviation 1.
///
/// *Source*: variances of the middle order statistic for 3 to 7 values (Harter, 1961, and the mean of the two middle ones for even
/// numbers); √(π/2n) beyond, which is at most 4 % above them there.
pub fn median_error(count: usize) -> f64 {
    match count {
        0 => f64::NAN,
        1 => 1.0,
        2 => std::f64::consts::FRAC_1_SQRT_2,
        3 => 0.6698,
        4 => 0.5460,
        5 => 0.5356,
        6 => 0.4634,
        7 => 0.4587,
        more => MEDIAN_ERROR / (more as f64).sqrt(),
    }
}

/// The standard deviation that groups have in common, such as the processes of each GPU, whatever a minority of the groups does: the median
/// of their variances, each over the median that chance gives it. Groups of one are not evidence; `None` where there are no others.
pub fn pooled_sd<'a>(groups: impl IntoIterator<Item = &'a [f64]>) -> Option<f64> {
    let mut medians: Vec<Option<f64>> = Vec::new();
    let mut shares = Vec::new();
    for group in groups {
        let Some(sd) = super::sd(group) else { continue };
        let freedom = group.len() - 1;
        if medians.len() <= freedom {
            medians.resize(freedom + 1, None);
        }
        let usual = *medians[freedom].get_or_insert_with(|| chi_square_median(freedom));
        shares.push(sd * sd / usual);
    }
    (!shares.is_empty()).then(|| median(&shares).sqrt())
}

/// The median of χ² over its degrees of freedom.
fn chi_square_median(freedom: usize) -> f64 {
    let freedom = freedom as f64;
    ChiSquared::new(freedom).map_or(1.0, |distribution| distribution.inverse_cdf(0.5) / freedom)
}

/// The chance of a t at or below this, by Student's distribution.
pub fn student_tail(t: f64, freedom: f64) -> f64 {
    StudentsT::new(0.0, 1.0, freedom.max(1.0)).map_or(1.0, |distribution| distribution.cdf(t))
}

/// The t below which this chance lies, by Student's distribution.
pub fn student_quantile(chance: f64, freedom: f64) -> f64 {
    StudentsT::new(0.0, 1.0, freedom.max(1.0))
        .map_or(f64::NAN, |distribution| distribution.inverse_cdf(chance))
}

/// The chance of a ratio of two estimated variances at or above this, by Fisher's distribution; `freedom` is that of both, the upper one
/// first.
pub fn variance_ratio_tail(ratio: f64, freedom: (f64, f64)) -> f64 {
    FisherSnedecor::new(freedom.0, freedom.1.max(1.0)).map_or(1.0, |distribution| distribution.sf(ratio))
}

/// Effects of rows and columns that add up to a table.
#[derive(Debug, Clone, PartialEq)]
pub struct Polish {
    pub center: f64,
    pub rows: Vec<f64>,
    pub columns: Vec<f64>,
}

/// Sweeps of a median polish; it has nearly always settled after four (Tukey, 1977).
const SWEEPS: usize = 10;

/// Splits a table with holes, given as (row, column, value), into a centre, an effect of each row and an effect of each column, by medians:
/// Tukey's median polish. Effects of rows and of columns have a median of zero.
pub fn median_polish(cells: &[(usize, usize, f64)], rows: usize, columns: usize) -> Polish {
    let mut left: Vec<f64> = cells.iter().map(|cell| cell.2).collect();
    let mut found = Polish { center: 0.0, rows: vec![0.0; rows], columns: vec![0.0; columns] };
    let by_row = grouped(cells.iter().map(|cell| cell.0), rows);
    let by_column = grouped(cells.iter().map(|cell| cell.1), columns);
    for _ in 0..SWEEPS {
        let moved = sweep(&mut left, &by_row, &mut found.rows, &mut found.center)
            + sweep(&mut left, &by_column, &mut found.columns, &mut found.center);
        if moved <= 1e-12 {
            break;
        }
    }
    found
}

/// The cells of each group.
fn grouped(of: impl Iterator<Item = usize>, groups: usize) -> Vec<Vec<usize>> {
    let mut members = vec![Vec::new(); groups];
    for (cell, group) in of.enumerate() {
        members[group].push(cell);
    }
    members
}

/// Moves the medians of groups from what is left into their effects, and the median effect into the centre; how much was moved.
fn sweep(left: &mut [f64], groups: &[Vec<usize>], effects: &mut [f64], center: &mut f64) -> f64 {
    let mut moved = 0.0;
    for (members, effect) in groups.iter().zip(effects.iter_mut()).filter(|(members, _)| !members.is_empty())
    {
        let usual = median(&members.iter().map(|&cell| left[cell]).collect::<Vec<_>>());
        for &cell in members {
            left[cell] -= usual;
        }
        *effect += usual;
        moved += usual.abs();
    }
    let known =
        || groups.iter().enumerate().filter(|(_, members)| !members.is_empty()).map(|(group, _)| group);
    let common = median(&known().map(|group| effects[group]).collect::<Vec<_>>());
    if common.is_finite() {
        for group in known().collect::<Vec<_>>() {
            effects[group] -= common;
        }
        *center += common;
    }
    moved
}

/// Holm's adjusted p values: where those at or below α are rejected, the chance of rejecting any true hypothesis is at most α, however the
/// tests depend on each other. *Source*: Holm, 1979.
pub fn holm(p: &[f64]) -> Vec<f64> {
    let mut rising: Vec<usize> = (0..p.len()).collect();
    rising.sort_by(|&a, &b| p[a].total_cmp(&p[b]));
    let mut adjusted = vec![1.0; p.len()];
    let mut highest = 0.0_f64;
    for (rank, &index) in rising.iter().enumerate() {
        highest = highest.max(((p.len() - rank) as f64 * p[index]).min(1.0));
        adjusted[index] = highest;
    }
    adjusted
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;
    use rand_distr::{Distribution, StandardNormal};

    fn normal(count: usize, seed: u64) -> Vec<f64> {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        (0..count).map(|_| StandardNormal.sample(&mut random)).collect()
    }

    #[test]
    fn a_third_of_wrong_values_moves_neither_centre_nor_spread_far() {
        let mut values = normal(3_000, 1);
        assert!(median(&values).abs() < 0.06 && (mad_sd(&values) - 1.0).abs() < 0.05);
        for value in values.iter_mut().step_by(10) {
            *value = -1e6;
        }
        assert!(median(&values).abs() < 0.25 && (mad_sd(&values) - 1.0).abs() < 0.2);
    }

    #[test]
    fn the_error_of_a_median_is_that_of_simulated_ones() {
        for count in [2, 3, 4, 5, 6, 7, 9] {
            let values = normal(count * 40_000, count as u64);
            let medians: Vec<f64> = values.chunks(count).map(median).collect();
            let found = crate::stats::sd(&medians).unwrap();
            assert!((found / median_error(count) - 1.0).abs() < 0.03, "{count}: {found}");
        }
    }

    #[test]
    fn a_pooled_spread_is_that_of_most_groups_whatever_their_sizes() {
        let values = normal(6_000, 3);
        let mut groups: Vec<Vec<f64>> = values.chunks(3).map(<[f64]>::to_vec).collect();
        groups.extend(normal(2_500, 4).chunks(5).map(<[f64]>::to_vec));
        for group in groups.iter_mut().step_by(20) {
            group[0] += 100.0;
        }
        let found = pooled_sd(groups.iter().map(Vec::as_slice)).unwrap();
        assert!((found - 1.0).abs() < 0.08, "{found}");
        assert_eq!(pooled_sd([[1.0].as_slice()]), None);
    }

    #[test]
    fn effects_of_rows_and_columns_are_found_beside_single_outliers_and_holes() {
        let (rows, columns) = ([0.0, 0.0, -5.0, 0.0, 1.0], [0.0, 2.0, 0.0]);
        let mut cells = Vec::new();
        for (r, row) in rows.iter().enumerate() {
            for (c, column) in columns.iter().enumerate() {
                if (r, c) != (1, 0) {
                    cells.push((r, c, 10.0 + row + column + if (r, c) == (3, 2) { -50.0 } else { 0.0 }));
                }
            }
        }
        let found = median_polish(&cells, 5, 3);
        assert_eq!((found.center, found.rows, found.columns), (10.0, rows.to_vec(), columns.to_vec()));
    }

    #[test]
    fn holm_is_that_of_statsmodels() {
        #[derive(serde::Deserialize)]
        struct Reference {
            holm: Vec<Family>,
        }
        #[derive(serde::Deserialize)]
        struct Family {
            p: Vec<f64>,
            adjusted: Vec<f64>,
        }
        let file = include_str!("../../../../tests/fixtures/stats/paired.json");
        let reference: Reference = serde_json::from_str(file).unwrap();
        for family in reference.holm {
            let found = holm(&family.p);
            assert_eq!(found.len(), family.adjusted.len());
            for (found, wanted) in found.iter().zip(family.adjusted) {
                assert!((found - wanted).abs() < 1e-12, "{found} for {wanted}");
            }
        }
        assert!(holm(&[]).is_empty());
    }

    #[test]
    fn tails_are_those_of_the_tables() {
        // The 5 % points of t with 8 degrees on both sides, and of F with 2 and 10.
        assert!((student_tail(-2.306, 8.0) - 0.025).abs() < 1e-4);
        assert!((variance_ratio_tail(4.1028, (2.0, 10.0)) - 0.05).abs() < 1e-4);
        // With two upper degrees it has a closed form: (1 + 2x/d)^(-d/2).
        let (x, d) = (30.0, 5.9_f64);
        let wanted = (1.0 + 2.0 * x / d).powf(-d / 2.0);
        assert!((variance_ratio_tail(x, (2.0, d)) / wanted - 1.0).abs() < 1e-6);
    }

    proptest! {
        #[test]
        fn adjusted_p_are_never_below_p_and_keep_their_order(p in prop::collection::vec(0.0f64..=1.0, 1..50)) {
            let adjusted = holm(&p);
            for a in 0..p.len() {
                prop_assert!(adjusted[a] >= p[a] && adjusted[a] <= 1.0);
                for b in 0..p.len() {
                    prop_assert!(p[a] > p[b] || adjusted[a] <= adjusted[b]);
                }
            }
        }
    }
}
