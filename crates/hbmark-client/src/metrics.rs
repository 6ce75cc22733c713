//! The server's own counters: `/metrics` before, during and after a run.
//!
//! Enters: pages of a server, with the moments they were read (`scraper`). Leaves: [`ServerMetrics`], the server's view of a window: differences
//! of counters, means of what was counted, gauges over time. Percentiles are never made of buckets: those of a server begin where a small model's
//! latencies end.
//!
//! What a server calls a signal is data (`table`). A signal that is not known says why.

pub(crate) mod scraper;
mod table;
mod text;
mod window;

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::{Duration, Instant};

use hbmark_core::result::serving::{Dialect, FetchFailure, FetchFailures, ServerMetrics, Signal};

use table::{Kind, Over, Place, RANK_LABELS, TABLE};
use text::{Sample, parse};
use window::window;

/// Bytes of a page beyond which it is not read: a vLLM with ten models has a tenth of that.
pub(crate) const MAX_PAGE_BYTES: u64 = 10 << 20;

/// What one series says.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Reading {
    Number(f64),
    Total { sum: f64, count: f64 },
}

/// The known signals of a page.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Snapshot {
    dialect: Option<Dialect>,
    /// Of every series of the table that is there: a fallback too, so that two snapshots are compared by the same series.
    readings: BTreeMap<Place, Reading>,
    engines: Option<Engines>,
    /// Lines that are neither empty, nor a comment, nor a sample.
    broken_lines: u64,
}

/// Engines behind one page: each says how many requests are in its batch.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Engines {
    count: usize,
    least_running: f64,
}

/// A reading of the page: the server wrote it down at some moment within `took`, in the middle of which is `at`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Scrape {
    pub at: Instant,
    pub took: Duration,
    pub snapshot: Snapshot,
}

/// The values of one row of the table: a group is one series of one engine.
#[derive(Debug, Default)]
struct Groups(HashMap<u64, [Option<f64>; 2]>);

impl Groups {
    fn add(&mut self, group: u64, part: usize, value: f64) {
        let known = &mut self.0.entry(group).or_default()[part];
        *known = Some(known.map_or(value, |known| largest(known, value)));
    }

    fn over(&self, over: Over, part: usize) -> Option<f64> {
        let mut values = self.0.values().filter_map(|parts| parts[part]);
        let first = values.next()?;
        let (mut total, mut count) = (first, 1.0);
        for value in values {
            count += 1.0;
            total = if over == Over::Largest { largest(total, value) } else { total + value };
        }
        Some(if over == Over::Mean { total / count } else { total })
    }

    fn engines(&self) -> Engines {
        let running = self.0.values().filter_map(|parts| parts[0]);
        // The least is the largest of the negatives: NaN stays NaN.
        let least = running.map(|value| -value).fold(f64::NEG_INFINITY, largest);
        Engines { count: self.0.len(), least_running: -least }
    }
}

/// The larger one; NaN stays NaN.
fn largest(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}

impl Snapshot {
    /// Reads a page. Of series of several servers on one page, those of the server with most of them are taken.
    pub fn read(page: &[u8]) -> Self {
        let mut found: BTreeMap<Place, Groups> = BTreeMap::new();
        let broken_lines = parse(page, |sample| {
            for (place, part) in table::places(sample.name) {
                let row = &TABLE[place.row];
                let series = &row.series[place.series];
                if series
                    .only
                    .is_some_and(|(label, values)| !values.contains(&sample.label(label).unwrap_or_default()))
                {
                    continue;
                }
                let value = match row.kind {
                    Kind::Label(label) => match sample.label(label).and_then(label_number) {
                        Some(value) => value,
                        None => continue,
                    },
                    Kind::Number | Kind::Histogram => sample.value,
                };
                found.entry(*place).or_default().add(group(&sample), *part, value);
            }
        });
        let mut readings: BTreeMap<Place, Reading> = found
            .iter()
            .filter_map(|(place, groups)| {
                let row = &TABLE[place.row];
                let value = groups.over(row.over, 0)?;
                let reading = match row.kind {
                    Kind::Histogram => Reading::Total { sum: value, count: groups.over(row.over, 1)? },
                    Kind::Number | Kind::Label(_) => Reading::Number(value),
                };
                Some((*place, reading))
            })
            .collect();
        let dialect = most_frequent(readings.keys().filter_map(|place| TABLE[place.row].dialect));
        readings.retain(|place, _| TABLE[place.row].dialect.is_none_or(|of_row| Some(of_row) == dialect));
        let mut snapshot = Self { dialect, readings, engines: None, broken_lines };
        snapshot.engines =
            snapshot.place(Signal::Running).and_then(|place| found.get(&place)).map(Groups::engines);
        snapshot
    }

    /// The server whose series these are; `None` where no series is known.
    pub fn dialect(&self) -> Option<Dialect> {
        self.dialect
    }

    /// A gauge or a counter as it stands.
    pub fn number(&self, signal: Signal) -> Option<f64> {
        match self.readings.get(&self.place(signal)?)? {
            Reading::Number(value) => Some(*value),
            Reading::Total { .. } => None,
        }
    }

    /// The signals that are there.
    pub fn signals(&self) -> impl Iterator<Item = Signal> + '_ {
        let mut last = None;
        let signals = self.readings.keys().map(|place| TABLE[place.row].signal);
        signals.filter(move |signal| last.replace(*signal) != Some(*signal))
    }

    /// The best series of a signal that is there.
    fn place(&self, signal: Signal) -> Option<Place> {
        // Rows of other servers have no readings.
        self.readings.keys().copied().find(|place| TABLE[place.row].signal == signal)
    }
}

/// One series of one engine: the name, and the labels without those of ranks, in any order.
fn group(sample: &Sample<'_>) -> u64 {
    let labels = sample.labels.iter().filter(|(label, _)| !RANK_LABELS.contains(label)).map(hash);
    labels.fold(hash(table::canonical(sample.name)), u64::wrapping_add)
}

fn hash(of: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

/// A number or a truth value, as Python writes it.
fn label_number(text: &str) -> Option<f64> {
    match text {
        "True" | "true" => Some(1.0),
        "False" | "false" => Some(0.0),
        _ => text.parse().ok(),
    }
}

fn most_frequent(dialects: impl Iterator<Item = Dialect>) -> Option<Dialect> {
    let mut counts: Vec<(Dialect, usize)> = Vec::new();
    for dialect in dialects {
        match counts.iter_mut().find(|(known, _)| *known == dialect) {
            Some((_, count)) => *count += 1,
            None => counts.push((dialect, 1)),
        }
    }
    // Of equals the first.
    counts.iter().rev().max_by_key(|(_, count)| *count).map(|(dialect, _)| *dialect)
}

/// Readings of a run, in their order.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Readings {
    pub scrapes: Vec<Scrape>,
    pub failures: BTreeMap<FetchFailure, usize>,
}

impl Readings {
    /// The server's view of the time from `from` to `to`: between the last reading before it and the first one after it, or the nearest ones
    /// there are. `None` with fewer than two readings.
    pub fn window(&self, from: Instant, to: Instant) -> Option<ServerMetrics> {
        let last = self.scrapes.len().checked_sub(1)?;
        let before = self.scrapes.iter().rposition(|scrape| scrape.at <= from).unwrap_or(0);
        let after = self.scrapes.iter().position(|scrape| scrape.at >= to).unwrap_or(last);
        if before >= after {
            return None;
        }
        let mut metrics = window(&self.scrapes[before..=after]);
        let failures = self.failures.iter().map(|(&failure, &count)| FetchFailures { failure, count });
        metrics.failures = failures.collect();
        Some(metrics)
    }
}

#[cfg(test)]
mod tests;
