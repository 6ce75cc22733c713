//! How many sequences decoded at once, as far as a file says.
//!
//! Enters: a row. Leaves: an [`AtOnce`] with what it rests on, or what the file says against a batch that was given. A mean that the file
//! states goes before any estimate, requests before tokens, and nothing is above what the file can hold.

use super::{ForeignFormat, ForeignRow, Metric, Setup, Statistic, Value};

/// A batch this many times the mean of a whole run, or as many times below it, is not that of the run. A mean counts the time in which the
/// batch fills and drains: of one that was full for two thirds of the run and empty for the rest it is a factor of 1.5 below.
const APART: f64 = 1.5;
/// The same where mean gaps are all there is, which are those of the tokens only where lengths and TPOT are unrelated: short answers have the
/// longest TPOT, and the plain mean of ten requests was three times that of their tokens.
pub(super) const APART_BY_GAPS: f64 = 3.0;
/// A request that arrives on its own finds others by chance, so that steps have one sequence more than the mean over time; counts are rounded.
const ONE_MORE: f64 = 1.0;

/// The means of the gaps between tokens that a row has, the lesser first: one over requests overstates what short answers took, and one over
/// chunks those that hold several tokens.
pub(super) fn mean_gaps(row: &ForeignRow) -> Vec<&Value> {
    let is_gap = |value: &&Value| matches!(value.metric, Metric::Tpot | Metric::Itl);
    let mut gaps: Vec<&Value> =
        row.values.iter().filter(is_gap).filter(|value| value.statistic == Statistic::Mean).collect();
    gaps.sort_by(|a, b| a.value.total_cmp(&b.value));
    gaps
}

/// Sequences that decoded at once, mean.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct AtOnce {
    pub sequences: f64,
    /// What it rests on.
    pub how: String,
    /// Factor by which a batch may differ and still be that of the run.
    apart: f64,
    /// Whether requests that do not decode yet are in it: then a smaller batch is nothing against the file.
    with_waiting: bool,
}

impl AtOnce {
    fn new(sequences: f64, how: impl Into<String>, apart: f64) -> Self {
        Self { sequences, how: how.into(), apart, with_waiting: false }
    }

    fn with_waiting(sequences: f64, how: &str) -> Self {
        let how = format!("{how}, requests that wait or are in prefill included");
        Self { with_waiting: true, ..Self::new(sequences, how, APART) }
    }

    /// The estimate; `None` where the file has neither a mean concurrency nor a rate with the times of its requests.
    pub fn of(row: &ForeignRow, format: ForeignFormat) -> Option<Self> {
        let mean = |metric| row.value(metric, Statistic::Mean).map(|ns| ns / 1e9);
        let rate = row.rate(Metric::RequestThroughput);
        let end = mean(Metric::E2e).filter(|end| *end > 0.0);
        let first = mean(Metric::Ttft).or_else(|| Some(row.value(Metric::Ttft, Statistic::Median)? / 1e9));
        let after_first = end.zip(first).map(|(end, first)| (end - first).max(0.0));
        // Ours counts requests that run; TTFT and E2E have the time before that in them, too.
        let client_counts = format != ForeignFormat::HbmarkServe;
        let found = match (row.setup.concurrency, after_first, rate) {
            (Some(stated), Some(after_first), _) if client_counts => Self::new(
                stated * after_first / end?,
                format!(
                    "the file's mean concurrency of {stated:.1}, for the share of mean E2E that is after TTFT"
                ),
                APART,
            ),
            (_, Some(after_first), Some(rate)) => {
                Self::new(rate * after_first, "by Little's law: request rate × (mean E2E − TTFT)", APART)
            }
            (Some(stated), ..) => Self::with_waiting(stated, "the file's mean concurrency"),
            (None, None, Some(rate)) => {
                if let Some(end) = end {
                    Self::with_waiting(rate * end, "by Little's law: request rate × mean E2E")
                } else {
                    let tokens = (row.setup.output_tokens? - 1.0).max(0.0);
                    let gap = *mean_gaps(row).first()?;
                    let name = gap.metric.title();
                    let how = format!("by Little's law: request rate × (tokens − 1) × mean {name}");
                    Self::new(rate * tokens * gap.value / 1e9, how, APART_BY_GAPS)
                }
            }
            (None, ..) => return None,
        };
        Some(found.within(&row.setup))
    }

    fn within(mut self, setup: &Setup) -> Self {
        let least = limits(setup).into_iter().min_by(|a, b| a.1.total_cmp(&b.1));
        if let Some((what, most)) = least.filter(|(_, most)| *most < self.sequences) {
            self.how = format!("the {what}; {} would give {:.1}", self.how, self.sequences);
            self.sequences = most;
        }
        self
    }

    /// Whether a batch can be that of the run.
    fn allows(&self, batch: u64) -> bool {
        let (mean, batch) = (self.sequences.max(1.0), batch as f64);
        let least = if self.with_waiting { 0.0 } else { mean / self.apart - ONE_MORE };
        (least..=mean * self.apart + ONE_MORE).contains(&batch)
    }
}

/// What no number of sequences at once is above, each with its name.
fn limits(setup: &Setup) -> Vec<(&'static str, f64)> {
    let counted = |count: Option<u64>| count.filter(|count| *count > 0).map(|count| count as f64);
    [
        ("limit of requests at once", counted(setup.max_concurrency)),
        ("mean concurrency", setup.concurrency),
        ("number of requests", counted(setup.requests.or(setup.completed))),
    ]
    .into_iter()
    .filter_map(|(what, most)| Some((what, most?)))
    .collect()
}

/// What the file says against a batch that was given: the field and its value.
pub(super) fn refutes(row: &ForeignRow, format: ForeignFormat, given: u64) -> Option<(&'static str, String)> {
    if let Some(batch) = row.setup.batch {
        return (batch != given).then(|| ("batch", batch.to_string()));
    }
    // The mean concurrency is left to the estimate: a batch may be above a mean.
    let counts = limits(&row.setup).into_iter().filter(|(what, _)| *what != "mean concurrency");
    if let Some((what, most)) = counts.into_iter().find(|(_, most)| given as f64 > *most) {
        return Some((what, format!("{most:.0}")));
    }
    let implied = AtOnce::of(row, format).filter(|found| !found.allows(given))?;
    Some(("mean batch", format!("{:.1} ({})", implied.sequences, implied.how)))
}
