//! Is B faster than A? From processes that were saved before, several of each side, and not run in pairs.
//!
//! Enters: the times of each process, and how fast the machine's memory was beside them. Leaves: an [`Effect`] per cell and one over all cells.
//!
//! The unit is a process. What is decided on is the logarithm of its time, by a test over the labels A and B, and by Welch's interval.
//! The sides were run at other times, so that a machine which changed meanwhile looks like a change of B: only what lies beyond the
//! interval of the machine's own ratio is called.

use super::{Findings, failures, is_shown, is_within_margin, percent, survived};
use crate::analysis::words::counted;
use hbmark_core::result::comparison::{ComparisonVerdict, Effect, Pair, Settings};
use hbmark_core::stats::{self, Interval};

/// Processes of one side, at most.
pub const MAX_A_SIDE: usize = 100;

/// Judges every cell, and their mean over the processes that have all of them, as one family of tests. The `i`-th process of each side stand beside each
/// other for no other reason; `read` holds for each how long its memory took to read a gigabyte beside its steps.
pub fn judge(cells: &[Vec<Pair>], read: &[Pair], settings: &Settings) -> Findings {
    let labels = Labels::of(cells);
    let mut logs: Vec<Vec<Option<f64>>> = cells.iter().map(|pairs| labels.logs(pairs)).collect();
    if cells.len() > 1 {
        logs.push(super::means(&logs, labels.is_b.len()));
    }
    let tests = stats::order_test(&logs, &labels.is_b, settings.seed);
    let times_read = labels.sides(&labels.logs(read));
    let machine = enough(&times_read, settings).then(|| interval(&times_read, settings)).flatten();
    let effects = logs.iter().zip(tests).enumerate().map(|(index, (logs, test))| {
        let sides = labels.sides(logs);
        let [a_ns, b_ns] =
            sides.each_ref().map(|times| (!times.is_empty()).then(|| stats::geometric_mean(times)));
        let found = interval(&sides, settings);
        let mut effect = Effect {
            rounds: sides[0].len().min(sides[1].len()),
            a_ns,
            b_ns,
            ratio: a_ns.zip(b_ns).map(|(a, b)| b / a),
            low: found.map(|interval| interval.low),
            high: found.map(|interval| interval.high),
            p: test.map(|test| test.p),
            p_exact: test.map(|test| test.exact),
            p_adjusted: test.map(|test| test.p_adjusted),
            failed: failures(cells, index),
            ..Effect::unknown()
        };
        (effect.verdict, effect.reason) = rule(&effect, &sides, machine, settings);
        effect
    });
    let mut effects: Vec<Effect> = effects.collect();
    let overall = (cells.len() > 1).then(|| effects.pop()).flatten().filter(|effect| effect.ratio.is_some());
    Findings { cells: effects, overall: overall.map(|effect| Effect { a_ns: None, b_ns: None, ..effect }) }
}

/// Which processes have a time in any cell, those of A before those of B.
struct Labels {
    places: Vec<usize>,
    is_b: Vec<bool>,
}

impl Labels {
    fn of(cells: &[Vec<Pair>]) -> Self {
        let most = cells.iter().map(Vec::len).max().unwrap_or(0);
        let timed = |is_b: bool| {
            let has = move |at: &usize| cells.iter().any(|pairs| log_of(pairs, *at, is_b).is_some());
            (0..most).filter(has).map(move |at| (at, is_b))
        };
        let (places, is_b) = timed(false).chain(timed(true)).unzip();
        Self { places, is_b }
    }

    /// The logarithm of the time of each process in a cell.
    fn logs(&self, pairs: &[Pair]) -> Vec<Option<f64>> {
        self.places.iter().zip(&self.is_b).map(|(at, is_b)| log_of(pairs, *at, *is_b)).collect()
    }

    /// The times of A and of B.
    fn sides(&self, logs: &[Option<f64>]) -> [Vec<f64>; 2] {
        [false, true].map(|wanted| {
            let of_side = logs.iter().zip(&self.is_b).filter(|(_, is_b)| **is_b == wanted);
            of_side.filter_map(|(log, _)| log.map(f64::exp)).collect()
        })
    }
}

fn log_of(pairs: &[Pair], at: usize, is_b: bool) -> Option<f64> {
    let pair = pairs.get(at)?;
    let time = if is_b { pair.b_ns } else { pair.a_ns };
    time.filter(|time| time.is_finite() && *time > 0.0).map(f64::ln)
}

fn interval([a, b]: &[Vec<f64>; 2], settings: &Settings) -> Option<Interval> {
    stats::unpaired_ratio(a, b, settings.confidence)
}

fn enough(sides: &[Vec<f64>; 2], settings: &Settings) -> bool {
    sides.iter().all(|times| times.len() >= stats::least_a_side(settings.alpha))
}

fn rule(
    effect: &Effect,
    sides: &[Vec<f64>; 2],
    machine: Option<Interval>,
    settings: &Settings,
) -> (ComparisonVerdict, String) {
    let inconclusive = |reason: String| (ComparisonVerdict::Inconclusive, reason);
    let (Some(ratio), Some(low), Some(high), Some(p), true) =
        (effect.ratio, effect.low, effect.high, effect.p_adjusted, enough(sides, settings))
    else {
        return inconclusive(format!(
            "{} of A and {} of B with a time; at least {} a side are needed",
            counted(sides[0].len(), "process"),
            sides[1].len(),
            stats::least_a_side(settings.alpha)
        ));
    };
    let Some(machine) = machine else {
        return inconclusive(
            "how fast the machine's memory was beside the steps is not known of enough processes: the machine may be the cause"
                .to_owned(),
        );
    };
    let of_machine = || {
        format!(
            "the memory of B's machine took {:.3} times as long beside the steps ({:.3} to {:.3})",
            machine.center, machine.low, machine.high
        )
    };
    if is_within_margin(low, high, settings) {
        let within = format!("the whole interval lies within ±{}", percent(settings.margin));
        return if is_within_margin(machine.low, machine.high, settings) {
            (ComparisonVerdict::Equivalent, within)
        } else {
            inconclusive(format!("{within}, but {}", of_machine()))
        };
    }
    if !is_shown(low, high, p, settings) {
        return inconclusive("no difference shown".to_owned());
    }
    let processes = sides.iter().map(Vec::len).max().unwrap_or(0) + effect.failed.a.max(effect.failed.b);
    if let Some(reason) = survived(effect, ratio, processes) {
        return inconclusive(reason);
    }
    if ratio < 1.0 && high < machine.low.min(1.0) {
        (ComparisonVerdict::Faster, format!("B takes {} less time", percent(1.0 - ratio)))
    } else if ratio > 1.0 && low > machine.high.max(1.0) {
        (ComparisonVerdict::Slower, format!("B takes {} more time", percent(ratio - 1.0)))
    } else {
        inconclusive(format!("the machine may be the cause: {}", of_machine()))
    }
}

#[cfg(test)]
mod tests;
