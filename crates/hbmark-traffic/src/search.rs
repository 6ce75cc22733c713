//! The highest rate that still meets the objectives.
//!
//! Enters: a way to measure a point at a rate with a seed, and the objectives. Leaves: a [`Search`] with every step that was taken. A rate
//! holds where a run shows that the system keeps up and that the interval of every objective's percentile is within its limit; a run that
//! cannot tell does not hold, and the note says so. The search brackets and bisects, does so again near the answer with fresh seeds, takes the
//! median of their rates, and lowers it until a longer run holds it. Where the first rate fails, a few requests are sent one at a time: the
//! search ends where requests that have the server to themselves miss an objective, or are not served. It ends early where several runs in a
//! row serve nothing: at lower rates they would only take longer.

use hbmark_core::result::cause::joined;
use hbmark_core::result::serving::{
    Attempt, Point, Requests, Search, SearchStage, ServeResult, Slo, Validity,
};
use hbmark_core::stats::{chance_of_at_least, median};
use hbmark_core::units::{Nanos, PerSecond};

/// How to search.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SearchConfig {
    /// The first rate tried.
    pub start: f64,
    /// Bracketing ends here, both ways.
    pub lowest: f64,
    pub highest: f64,
    /// Bisection ends when the bracket is this narrow, relative.
    pub precision: f64,
    /// How often the rate is found anew, the first time among them.
    pub seeds: usize,
    /// As many requests as a trace has to measure; `None` where requests are drawn.
    pub recorded: Option<usize>,
}

/// What a search asks to be measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Trial {
    /// Requests at a rate.
    Rate(f64),
    /// A longer run at a rate.
    Sustained(f64),
    /// So many requests one at a time: each has the server to itself. Without objectives: they are judged here.
    Alone(usize),
}

/// Requests that are sent one at a time: the first and the last of them may have company, and ten that all miss a median are not luck.
const ALONE: usize = 14;

/// After so many runs in a row that served nothing, with no rate known to hold, a search ends: a server that is gone serves no lower rate either.
const MAX_UNSERVED: usize = 3;

/// What keeps a run from going on until it can tell, and what to do about it.
fn remedy(point: &Point, result: &ServeResult, recorded: Option<usize>) -> &'static str {
    if result.unfinished > 0 {
        "raise --time-limit to decide"
    } else if point.arrivals.is_some() {
        "raise --max-requests to decide"
    } else if recorded.is_some_and(|recorded| result.measured >= recorded) {
        "these are all of the trace, and only a longer trace can decide"
    } else {
        "raise --requests to decide"
    }
}

/// A run that told nothing.
#[derive(Debug)]
struct Short {
    rate: f64,
    requests: usize,
    remedy: &'static str,
    /// An objective whose interval has no upper end, as it was seen.
    unbounded: Option<String>,
}

/// Runs that told nothing, although they count as rates that do not hold.
#[derive(Debug, Default)]
struct Silent {
    short: Vec<Short>,
    /// Invalid: rate and reason.
    invalid: Vec<(f64, String)>,
}

impl Silent {
    /// What a reader of the answer has to know of them; empty where every run could tell.
    fn note(&self) -> String {
        let runs = |rates: &[f64]| {
            let low = rates.iter().copied().fold(f64::INFINITY, f64::min);
            let high = rates.iter().copied().fold(0.0, f64::max);
            let (from, to) = (PerSecond(low), PerSecond(high));
            let range = if low < high { format!("{from} to {to}") } else { from.to_string() };
            format!("{} run{} at {range} per second", rates.len(), if rates.len() == 1 { "" } else { "s" })
        };
        let short = self.short.iter().max_by_key(|run| run.requests).map(|Short { requests, remedy, .. }| {
            let rates: Vec<f64> = self.short.iter().map(|run| run.rate).collect();
            // The last of them ran longest, and nearest to the answer.
            let unbounded = self.short.iter().rev().find_map(|run| run.unbounded.as_ref());
            let unbounded = unbounded.map_or_else(String::new, |seen| {
                format!(
                    " (requests depend on each other, and too few were measured to bound a percentile from above: {seen})"
                )
            });
            format!(
                "{} could not tell after at most {requests} requests and count as not held{unbounded}; {remedy}",
                runs(&rates)
            )
        });
        let invalid = self.invalid.first().map(|(_, why)| {
            let rates: Vec<f64> = self.invalid.iter().map(|(rate, _)| *rate).collect();
            format!("{} invalid and not held: {why}", runs(&rates))
        });
        short.into_iter().chain(invalid).collect::<Vec<_>>().join("; ")
    }
}

/// Why a search has no more to do.
enum End<E> {
    Failed(E),
    /// A point has no result, or nothing is served any more.
    Early,
}

/// The state of a search.
struct Walk<'a, M> {
    config: &'a SearchConfig,
    measure: M,
    seed: u64,
    points: &'a mut Vec<Point>,
    /// The last rate that held in a single run.
    held: Option<f64>,
    /// Why no rate below that of the last run can hold.
    missed: Option<String>,
    /// Runs in a row, up to the last one, that served none of their requests.
    unserved: usize,
    silent: Silent,
    search: Search,
}

/// Above this chance of seeing as many misses by luck, requests are not said to miss an objective.
const LUCK: f64 = 0.001;

/// That requests sent one at a time were not served, and why: at no lower rate are they either.
fn unserved_alone(point: &Point, result: &ServeResult) -> Option<String> {
    let said = |kind: &String| point.live.as_ref().and_then(|live| live.messages.get(kind));
    let kinds = result.rejected.keys();
    let kinds = kinds.map(|kind| said(kind).map_or_else(|| kind.clone(), |words| format!("{kind}: {words}")));
    let why: Vec<String> = kinds.collect();
    let why = if why.is_empty() { joined(&result.reasons) } else { why.join("; ") };
    let sent = result.measured;
    (sent > 0 && result.served == 0)
        .then(|| format!("no rate holds: of {sent} requests sent one at a time none was served: {why}"))
}

/// An objective that requests miss which have the server to themselves: at no lower rate are they faster.
fn missed_alone(requests: &Requests, slo: &Slo) -> Option<String> {
    let alone = requests.alone();
    slo.clauses.iter().find_map(|clause| {
        let values: Vec<f64> = alone.iter().filter_map(|i| requests.latency(*i, clause.metric)).collect();
        let missed = values.iter().filter(|value| **value > clause.limit_ns).count();
        let luck = chance_of_at_least(missed, values.len(), 1.0 - clause.percentile)?;
        (luck < LUCK).then(|| {
            format!(
                "no rate meets {clause}: of {} requests that ran alone, half within {}, {missed} took longer than the limit",
                values.len(),
                Nanos(median(&values)),
            )
        })
    })
}

impl<E, M: FnMut(Trial, u64) -> Result<Point, E>> Walk<'_, M> {
    /// Whether a rate is shown to hold.
    fn holds(&mut self, stage: SearchStage, rate: f64) -> Result<bool, End<E>> {
        self.seed = self.seed.wrapping_add(1);
        let longer = stage == SearchStage::Sustain;
        let trial = if longer { Trial::Sustained(rate) } else { Trial::Rate(rate) };
        let mut point = (self.measure)(trial, self.seed).map_err(End::Failed)?;
        point.label = format!("{stage} {}/s", PerSecond(rate));
        let not_run = || point.not_run.as_ref().map_or_else(|| "not run".to_owned(), ToString::to_string);
        let (met, why) = point.result.as_ref().map_or_else(|| (None, not_run()), ServeResult::held);
        match &point.result {
            Some(result) if met.is_none() && result.validity == Validity::Invalid => {
                self.silent.invalid.push((rate, joined(&result.reasons)));
            }
            Some(result) if met.is_none() => {
                let unbounded = result.slo.iter().find(|c| c.met.is_none() && c.is_unbounded());
                self.silent.short.push(Short {
                    rate,
                    requests: result.measured,
                    remedy: remedy(&point, result, self.config.recorded),
                    unbounded: unbounded.map(ToString::to_string),
                });
            }
            _ => {}
        }
        self.missed = None;
        if let Some(result) = &mut point.result {
            self.unserved = if result.served == 0 { self.unserved + 1 } else { 0 };
            // Of a run that is invalid the latencies are, too.
            let counts = met != Some(true) && result.validity != Validity::Invalid;
            let requests = result.requests.as_ref().filter(|_| counts);
            self.missed = requests.and_then(|requests| missed_alone(requests, &self.search.slo));
            // Every request of every step would be a file of a hundred megabytes.
            result.requests = result.requests.take().filter(|_| longer);
        }
        let lost = point.result.is_none();
        self.search.attempts.push(Attempt { stage, rate, seed: self.seed, met, why });
        self.points.push(point);
        if lost { Err(End::Early) } else { Ok(met == Some(true)) }
    }

    /// Whether no rate below that of the last run can hold. At the first rate of all, where few requests are alone, some are sent one at a time.
    fn ends_below(&mut self) -> Result<bool, End<E>> {
        if self.missed.is_none() && self.search.attempts.len() == 1 {
            let point = (self.measure)(Trial::Alone(ALONE), self.seed).map_err(End::Failed)?;
            if point.result.as_ref().is_some_and(|result| result.served > 0) {
                self.unserved = 0;
            }
            self.missed = point.result.as_ref().and_then(|result| {
                let valid = result.requests.as_ref().filter(|_| result.validity != Validity::Invalid);
                unserved_alone(&point, result)
                    .or_else(|| valid.and_then(|requests| missed_alone(requests, &self.search.slo)))
            });
        }
        Ok(self.missed.is_some())
    }

    /// Ends the search where one run after the other served nothing.
    fn check_served(&self) -> Result<(), End<E>> {
        if self.unserved >= MAX_UNSERVED { Err(End::Early) } else { Ok(()) }
    }

    /// The highest rate that holds, from a rate to begin with: by ever longer steps until one holds and one does not, then halved.
    fn highest(&mut self, first: SearchStage, start: f64, step: f64) -> Result<Option<f64>, End<E>> {
        let SearchConfig { lowest, highest, precision, .. } = *self.config;
        let (mut rate, mut step) = (start.clamp(lowest, highest), step);
        let (mut good, mut bad): (Option<f64>, Option<f64>) = (None, None);
        // Rates far above what holds may serve nothing, too.
        self.unserved = 0;
        let (mut low, mut high) = loop {
            if self.holds(first, rate)? {
                (good, self.held) = (Some(rate), Some(rate));
                if rate >= highest {
                    return Ok(good);
                }
            } else {
                bad = Some(rate);
                if rate <= lowest || good.is_none() && self.ends_below()? {
                    return Ok(None);
                }
                if good.is_none() {
                    self.check_served()?;
                }
            }
            match (good, bad) {
                (Some(low), Some(high)) => break (low, high),
                (Some(low), None) => rate = (low * step).min(highest),
                _ => rate = (rate / step).max(lowest),
            }
            // The first step of all is large already.
            step = if first == SearchStage::Bracket { step } else { step * step };
        };
        while high / low > 1.0 + precision {
            let middle = (low * high).sqrt();
            let stage = if first == SearchStage::Bracket { SearchStage::Bisect } else { first };
            if self.holds(stage, middle)? {
                (low, self.held) = (middle, Some(middle));
            } else {
                high = middle;
            }
        }
        Ok(Some(low))
    }

    fn run(&mut self) -> Result<(), End<E>> {
        let SearchConfig { start, lowest, highest, precision, seeds, .. } = *self.config;
        let Some(found) = self.highest(SearchStage::Bracket, start, 2.0)? else {
            self.search.note = self.missed.take().unwrap_or_else(|| {
                format!(
                    "not even {} requests per second were shown to meet the objectives; start lower (--rate)",
                    PerSecond(lowest)
                )
            });
            return Ok(());
        };
        self.search.rate_by_seed.push(found);
        for seed in 1..seeds.max(1) {
            let step = 1.0 + 2.0 * precision;
            // Not on the same grid again: the rates found would agree because no others were tried.
            let start = found * (1.0 + precision * (seed as f64 / seeds as f64 - 0.5));
            let again = self.highest(SearchStage::Confirm, start, step)?;
            self.search.rate_by_seed.push(again.unwrap_or(lowest));
        }
        let longest = |points: &[Point]| {
            let recorded = points.iter().filter(|point| point.arrivals.is_none());
            recorded.filter_map(|point| Some(point.result.as_ref()?.measured)).max()
        };
        let recorded = longest(self.points);
        let mut rate = median(&self.search.rate_by_seed);
        let mut step = 1.0 + precision / 2.0;
        self.unserved = 0;
        // A short run cannot show a queue that grows slowly.
        while !self.holds(SearchStage::Sustain, rate)? {
            self.search.sustained = Some(false);
            if rate <= lowest {
                self.search.note = format!(
                    "no rate was sustained over a longer run, down to {} per second",
                    PerSecond(lowest)
                );
                return Ok(());
            }
            self.check_served()?;
            rate = (rate / step).max(lowest);
            step *= step;
        }
        (self.search.max_rate, self.search.confirmed, self.search.sustained) = (Some(rate), true, Some(true));
        if let Some(requests) = recorded.filter(|_| longest(self.points) == recorded) {
            self.search.sustained = None;
            self.search.note = format!(
                "no longer run was possible: {requests} requests are all that the trace has to measure"
            );
        }
        if rate >= highest {
            self.search.note =
                format!("the highest rate tried, {} per second, still holds", PerSecond(highest));
        }
        Ok(())
    }
}

/// Searches. `measure(trial, seed)` runs a point. Requests one by one are kept of the sustained runs only.
///
/// # Errors
/// Whatever `measure` fails with.
pub fn find_max_rate<E>(
    config: &SearchConfig,
    slo: &Slo,
    first_seed: u64,
    points: &mut Vec<Point>,
    measure: impl FnMut(Trial, u64) -> Result<Point, E>,
) -> Result<Search, E> {
    let search = Search { slo: slo.clone(), ..Search::default() };
    let mut walk = Walk {
        config,
        measure,
        seed: first_seed,
        points,
        held: None,
        missed: None,
        unserved: 0,
        silent: Silent::default(),
        search,
    };
    let mut search = match walk.run() {
        Ok(()) => walk.search,
        Err(End::Early) => walk.search.ended_early(walk.held),
        Err(End::Failed(error)) => return Err(error),
    };
    let notes = [search.note, walk.silent.note()];
    search.note = notes.into_iter().filter(|note| !note.is_empty()).collect::<Vec<_>>().join("; ");
    Ok(search)
}

#[cfg(test)]
mod tests;
