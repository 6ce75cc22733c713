//! Whether a queue is stable: its trend over a window against its own autocorrelated spread.
//!
//! Enters: the stays of requests, and the window in which they were offered. Leaves: a [`Stability`].
//!
//! A stable queue wanders, the wider and the slower the closer the load is to capacity, and one that is started empty grows at first. So
//! growth counts only where it is beyond what a queue of this spread could do by chance, where waiting requests grow too, and where it goes
//! on in the second half of the window. That it does not grow counts only where the interval leaves no room for growth that matters.
//!
//! A window may be too short for either. Requests that all come within a step wait for its end and no longer, however fast the server: they
//! saturate it only where the last of them wait longer than that. And where a window is shorter than the stay of a request, none that came
//! in it was seen to leave.

use hbmark_core::stats::{Growth, growth, mean, median};

use super::latency::Window;
use super::occupancy::Stay;
use super::timeline::during;

/// What a window shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    KeepsUp,
    Saturated,
    Undetermined(UndecidedReason),
}

/// Why a window shows nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UndecidedReason {
    TooFewRequests,
    /// The interval of the growth holds both answers.
    WideInterval,
    /// Requests come within less time than one of them takes.
    ShortWindow,
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
/// Fewer requests than this show no trend.
pub const MIN_OFFERED: usize = 4 * BINS.0;
/// Bins of the window; at least four arrivals in each.
const BINS: (usize, usize) = (25, 64);
/// The last requests of a saturated window wait this many times as long as one that finds nobody before it.
const MIN_WAIT: f64 = 2.0;

/// Of the half of an interval, what a later estimate may lie off the true growth in 19 of 20 runs: the one-sided 95 % point of a normal
/// distribution (1.645) over the two-sided 99.5 % point (2.807).
const LATER_ESTIMATE: f64 = 0.586;

impl Stability {
    /// Requests that would mostly show that a queue keeps up which goes on as it did here, of a run in which so many were offered and the
    /// interval left both open. The spread of the growth falls with the root of the window, and the growth that is tolerated rises with
    /// the window. Rounded up to two digits.
    pub fn needed(&self, offered: usize) -> Option<f64> {
        let growth =
            self.growth.filter(|_| self.verdict == Verdict::Undetermined(UndecidedReason::WideInterval))?;
        let half = (growth.high - growth.low) / 2.0;
        let times = (1.0 + LATER_ESTIMATE) * half / (TOLERATED_GROWTH * offered as f64);
        let needed = offered as f64 * times.powf(2.0 / 3.0);
        // Fewer than there were would say that this run was long enough, and it was not.
        let needed = needed.max(2.0 * offered as f64);
        let digits = 10_f64.powf(needed.log10().floor() - 1.0);
        Some((needed / digits).ceil() * digits).filter(|needed| needed.is_finite())
    }
}

/// Time averages, over equal bins of a window, of how many spans hold a moment.
fn bins(spans: impl Iterator<Item = (f64, f64)>, window: &Window, count: usize) -> Vec<f64> {
    let width = (window.to - window.from) / count as f64;
    let mut bins = vec![0.0; count];
    for (from, until) in spans {
        during(&mut bins, width, (from - window.from, until - window.from), |bin, share| *bin += share);
    }
    bins
}

/// Judges a window in which so many requests were offered; `alone` is the wait of one that finds nobody before it.
pub(super) fn stability(stays: &[Stay], window: &Window, offered: usize, alone: f64) -> Stability {
    let undetermined = |doubt, growth| Stability { verdict: Verdict::Undetermined(doubt), growth };
    if offered < MIN_OFFERED {
        return undetermined(UndecidedReason::TooFewRequests, None);
    }
    let inside: Vec<&Stay> =
        stays.iter().filter(|s| (window.from..=window.to).contains(&s.arrival)).collect();
    let count = (offered / 4).clamp(BINS.0, BINS.1);
    let all = bins(stays.iter().map(|s| (s.arrival, s.departed)), window, count);
    let Some(total) = growth(&all, CONFIDENCE).filter(|_| window.to > window.from && !inside.is_empty())
    else {
        return undetermined(UndecidedReason::ShortWindow, None);
    };
    let significant = |values: &[f64]| growth(values, CONFIDENCE).is_some_and(|g| g.low > 0.0);
    let waits = bins(stays.iter().map(|s| (s.arrival, s.begun)), window, count);
    let (first, second) = all.split_at(count / 2);
    let change = |half: &[f64]| growth(half, CONFIDENCE).map_or(0.0, |g| g.change);
    let goes_on = change(second) > 0.5 * change(first);
    let growth = Some(total);
    let verdict = if total.low > 0.0 && significant(&waits) && goes_on {
        let last: Vec<f64> = inside[inside.len() * 3 / 4..].iter().map(|s| s.begun - s.arrival).collect();
        if median(&last) <= MIN_WAIT * alone {
            return undetermined(UndecidedReason::ShortWindow, growth);
        }
        Verdict::Saturated
    } else if total.high >= TOLERATED_GROWTH * offered as f64 {
        return undetermined(UndecidedReason::WideInterval, growth);
    } else {
        let times: Vec<f64> = inside.iter().map(|s| s.departed - s.arrival).collect();
        // Not the window's: of requests that all come at once it goes on until they are done.
        let span = inside[inside.len() - 1].arrival - inside[0].arrival;
        if span < mean(&times) {
            return undetermined(UndecidedReason::ShortWindow, growth);
        }
        Verdict::KeepsUp
    };
    Stability { verdict, growth }
}

#[cfg(test)]
mod tests;
