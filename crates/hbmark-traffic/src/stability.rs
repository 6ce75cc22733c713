//! Whether a queue is stable: its trend over a window against its own autocorrelated spread.
//!
//! Enters: the number of requests in the system, and of those that wait, over time. Leaves: a [`Stability`].
//!
//! A stable queue wanders, the wider and the slower the closer the load is to capacity, and one that is started empty grows at first. So
//! growth counts only where it is beyond what a queue of this spread could do by chance, where waiting requests grow too, and where it goes
//! on in the second half of the window. That it does not grow counts only where the interval leaves no room for growth that matters.

use hbmark_core::stats::{Growth, growth};

use super::latency::Window;

/// What a window shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    KeepsUp,
    Saturated,
    /// Too short a window to tell.
    Undetermined,
}

/// The growth of a queue, and what it means.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Stability {
    pub verdict: Verdict,
    /// Of the requests in the system over the window, with an interval of [`CONFIDENCE`]; `None` for too short a window.
    pub growth: Option<Growth>,
}

/// A queue that grows by less than this share of the offered requests keeps up.
pub const TOLERATED_GROWTH: f64 = 0.01;
/// Of the interval of the growth, two-sided: runs are extended and judged again, so each look has to be nearly certain.
pub const CONFIDENCE: f64 = 0.995;
/// Bins of the window; at least four arrivals in each.
const BINS: (usize, usize) = (25, 64);

/// A number that changes at moments: (time, number from then on), ascending.
pub type StepSeries = [(f64, usize)];

/// Time averages over equal bins of a window.
fn bins(series: &StepSeries, window: &Window, count: usize) -> Vec<f64> {
    let width = (window.to - window.from) / count as f64;
    let mut next = series.partition_point(|(time, _)| *time <= window.from);
    let mut level = next.checked_sub(1).map_or(0, |i| series[i].1);
    let mut at = window.from;
    (1..=count)
        .map(|bin| {
            let end = window.from + bin as f64 * width;
            let mut area = 0.0;
            while let Some((time, value)) = series.get(next).filter(|(time, _)| *time < end) {
                area += (time - at) * level as f64;
                (at, level) = (*time, *value);
                next += 1;
            }
            area += (end - at) * level as f64;
            at = end;
            area / width
        })
        .collect()
}

/// Judges a window in which so many requests were offered.
#[must_use]
pub fn stability(in_system: &StepSeries, waiting: &StepSeries, window: &Window, offered: usize) -> Stability {
    let undetermined = Stability { verdict: Verdict::Undetermined, growth: None };
    let count = (offered / 4).clamp(BINS.0, BINS.1);
    if offered < 4 * BINS.0 || window.to <= window.from {
        return undetermined;
    }
    let all = bins(in_system, window, count);
    let Some(total) = growth(&all, CONFIDENCE) else { return undetermined };
    let significant = |values: &[f64]| growth(values, CONFIDENCE).is_some_and(|g| g.low > 0.0);
    let waits = bins(waiting, window, count);
    let (first, second) = all.split_at(count / 2);
    let change = |half: &[f64]| growth(half, CONFIDENCE).map_or(0.0, |g| g.change);
    let goes_on = change(second) > 0.5 * change(first);
    let verdict = if total.low > 0.0 && significant(&waits) && goes_on {
        Verdict::Saturated
    } else if total.high < TOLERATED_GROWTH * offered as f64 {
        Verdict::KeepsUp
    } else {
        Verdict::Undetermined
    };
    Stability { verdict, growth: Some(total) }
}

#[cfg(test)]
mod tests;
