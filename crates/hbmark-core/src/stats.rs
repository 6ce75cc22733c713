//! Statistics of timed samples.
//!
//! Percentiles are nearest-rank, and `None` where the sample is too small. Intervals come
//! from block means on a log scale (Student's t) or from order statistics; both assume independent inputs, which is why steps
//! are blocked before they come here. Paired differences are tested by flipping their signs.

mod hashing;
mod intervals;
mod paired;
mod regression;
mod robust;
mod series;
mod summary;

pub use hashing::{splitmix64, splitmix64_of_two};
pub use intervals::{
    Interval, batch_error, chance_of_at_least, order_statistic_interval, t_interval_log,
    t_interval_log_of_groups,
};
pub use paired::{
    DRAWS, EXACT_PAIRS, OrderTest, balanced_order, least_a_side, least_order_p, least_pairs,
    minimum_detectable, order_effect, order_test, unpaired_ratio,
};
pub use regression::{Coefficient, Fit, least_squares};
pub use robust::{
    MAD_EFFICIENCY, MEDIAN_ERROR, Polish, holm, mad_sd, median_error, median_polish, pooled_sd,
    student_quantile, student_tail, variance_ratio_tail,
};
pub use series::{Growth, Trend, growth, lag1_autocorrelation, trend};
pub use summary::{geometric_mean, known_median, mean, median, needed, percentile, percentile_if_enough, sd};

/// Confidence of every interval of the protocol.
pub const CONFIDENCE: f64 = 0.95;
