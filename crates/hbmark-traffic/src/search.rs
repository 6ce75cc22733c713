//! The highest rate that still meets the objectives: bracket, bisect, confirm.
//!
//! Enters: a way to measure a point at a rate with a seed, and the objectives. Leaves: a [`Search`] with every step that was taken. A
//! single run decides each step of the search, because the search corrects itself; the final rate counts only when fresh seeds
//! agree: the upper 95 % bound (Student's t over seeds) of every objective's percentile is within its limit. Percentiles of one queue
//! are too correlated for an interval from a single run.

use hbmark_core::result::cause::joined;
use hbmark_core::result::serving::{Attempt, Point, Search, SearchStage, ServeResult, Slo, Validity};
use hbmark_core::stats::t_interval_log;

/// How to search.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SearchConfig {
    /// The first rate tried.
    pub start: f64,
    /// Bracketing ends here, both ways.
    pub lowest: f64,
    pub highest: f64,
    /// Bisection ends when the bracket is this narrow, relative.
    pub precision: f64,
    /// Fresh seeds that must agree.
    pub seeds: usize,
}

/// Whether a run met every objective, and what decided.
#[must_use]
pub fn verdict(result: &ServeResult) -> (bool, String) {
    match result.validity {
        Validity::Saturated => (false, format!("saturated: {}", joined(&result.reasons))),
        Validity::Invalid => (false, format!("invalid: {}", joined(&result.reasons))),
        Validity::Valid => {
            let failed = result.slo.iter().find(|c| c.met != Some(true));
            failed.map_or_else(
                || (true, "every objective was met".to_owned()),
                |c| {
                    let seen = c
                        .observed
                        .map_or("unknown".to_owned(), |q| hbmark_core::units::Nanos(q.value()).to_string());
                    (false, format!("{}: {seen}", c.clause))
                },
            )
        }
    }
}

/// Confidence of the bound over seeds, two-sided: 90 % leaves 5 % above it.
const CONFIDENCE: f64 = 0.90;

/// Whether runs with different seeds agree that every objective holds.
fn agree(results: &[ServeResult]) -> (bool, String) {
    if let Some(bad) = results.iter().find(|r| r.validity != Validity::Valid) {
        return verdict(bad);
    }
    let clauses = results.first().map_or(0, |r| r.slo.len());
    for index in 0..clauses {
        let clause = results[0].slo[index].clause;
        let values: Option<Vec<f64>> = results
            .iter()
            .map(|r| r.slo[index].observed.map(hbmark_core::result::serving::Quantity::value))
            .collect();
        let Some(values) = values else { return (false, format!("{clause}: unknown")) };
        let bound = match t_interval_log(&values, CONFIDENCE) {
            Some(interval) => interval.high,
            // One seed, or a time of exactly zero or infinity: the worst decides.
            None => values.iter().copied().fold(0.0, f64::max),
        };
        if bound > clause.limit_ns {
            return (
                false,
                format!(
                    "{clause}: upper bound over {} seeds {}",
                    values.len(),
                    hbmark_core::units::Nanos(bound)
                ),
            );
        }
    }
    (true, format!("every objective's upper bound over {} seeds is within its limit", results.len()))
}

/// Searches. `measure(rate, seed, longer)` runs a point; `longer` asks for the sustained run.
///
/// # Errors
/// Whatever `measure` fails with.
pub fn find_max_rate<E>(
    config: &SearchConfig,
    slo: &Slo,
    first_seed: u64,
    points: &mut Vec<Point>,
    mut measure: impl FnMut(f64, u64, bool) -> Result<Point, E>,
) -> Result<Search, E> {
    let mut search = Search { slo: slo.clone(), ..Search::default() };
    let mut seed = first_seed;
    let mut run = |stage: SearchStage,
                   rate: f64,
                   longer: bool,
                   search: &mut Search|
     -> Result<Option<(bool, ServeResult)>, E> {
        seed += 1;
        let mut point = measure(rate, seed, longer)?;
        point.label = format!("{stage} {rate:.3}/s");
        let result = point.result.clone();
        let not_run = || point.not_run.as_ref().map_or_else(|| "not run".to_owned(), ToString::to_string);
        let (met, why) = result.as_ref().map_or_else(|| (false, not_run()), verdict);
        search.attempts.push(Attempt { stage, rate, seed, met, why });
        points.push(point);
        Ok(result.map(|result| (met, result)))
    };
    let mut rate = config.start.clamp(config.lowest, config.highest);
    let (mut good, mut bad) = (None, None);
    // Twice or half until both sides are known.
    while good.is_none() || bad.is_none() {
        let Some((met, _)) = run(SearchStage::Bracket, rate, false, &mut search)? else {
            return Ok(search.ended_early(good));
        };
        if met {
            good = Some(rate);
            if rate >= config.highest {
                break;
            }
            rate = (rate * 2.0).min(config.highest);
        } else {
            bad = Some(rate);
            if rate <= config.lowest {
                break;
            }
            rate = (rate / 2.0).max(config.lowest);
        }
    }
    let Some(mut low) = good else {
        search.note = format!("not even {:.4} requests per second meet the objectives", config.lowest);
        return Ok(search);
    };
    if let Some(mut high) = bad {
        while high / low > 1.0 + config.precision {
            let middle = (low * high).sqrt();
            let Some((met, _)) = run(SearchStage::Bisect, middle, false, &mut search)? else {
                return Ok(search.ended_early(Some(low)));
            };
            if met {
                low = middle;
            } else {
                high = middle;
            }
        }
    } else {
        search.note = format!("the highest rate tried, {:.3} per second, still holds", config.highest);
    }
    // The last rate that passed may have passed by chance: lower it until fresh seeds and a longer run agree.
    for _ in 0..8 {
        let mut results = Vec::new();
        for _ in 0..config.seeds.max(1) {
            let Some((_, result)) = run(SearchStage::Confirm, low, false, &mut search)? else {
                return Ok(search.ended_early(Some(low)));
            };
            results.push(result);
        }
        let (met, why) = agree(&results);
        search.attempts.push(Attempt { stage: SearchStage::Agree, rate: low, seed: 0, met, why });
        // A short run cannot show a queue that grows slowly.
        if met {
            let Some((held, _)) = run(SearchStage::Sustain, low, true, &mut search)? else {
                return Ok(search.ended_early(Some(low)));
            };
            if held {
                search.max_rate = Some(low);
                search.confirmed = true;
                search.sustained = Some(true);
                break;
            }
        }
        search.sustained = met.then_some(false);
        low /= 1.0 + config.precision;
        if low < config.lowest {
            break;
        }
    }
    if search.max_rate.is_none() && search.note.is_empty() {
        search.note =
            format!("single runs held, and fresh seeds or a longer run did not, down to {low:.3} per second");
    }
    Ok(search)
}
