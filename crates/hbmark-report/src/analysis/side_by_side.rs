//! Two saved results of one kind beside each other, figure by figure, where no rounds were run and so nothing can be decided.
//!
//! Enters: two [`Opened`] results. Leaves: a [`SideBySide`]: rows of both, matched by their names, each figure with its ratio.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::capacity::number;
use super::distinct;
use super::import::{Conditions, ForeignResult, ForeignRow, Metric, Statistic};
use super::opened::Opened;
use super::words::{counted, said};
use hbmark_core::result::cause::joined;
use hbmark_core::result::comparison::Difference;
use hbmark_core::result::serving::{Offered, Point, Quantiles, Quantity, ServeReport, ServeResult, Validity};
use hbmark_core::result::{CellResult, GroupSummary, Phase, Report, ReportKind, TimeSummary};

/// One figure of both results.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FigurePair {
    /// The point, cell or row, as its result names it.
    pub of: String,
    /// With the statistic that both are, where the result has several.
    pub figure: String,
    /// Nanoseconds, otherwise per second.
    pub is_time: bool,
    pub a: Option<f64>,
    pub b: Option<f64>,
    /// Whether both mean the same: what counts requests by their objectives does not where those differ, and neither do a mean and a median.
    pub comparable: bool,
}

impl FigurePair {
    /// B over A, where both have it and mean the same by it.
    pub fn ratio(&self) -> Option<f64> {
        self.comparable.then_some(())?;
        Some(self.b? / self.a.filter(|a| *a > 0.0)?)
    }
}

/// Two results beside each other.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SideBySide {
    pub a: String,
    pub b: String,
    pub kind: String,
    /// What was run differently, as far as the results say: without these a ratio means nothing.
    pub differences: Vec<Difference>,
    pub figures: Vec<FigurePair>,
    /// What the pairs leave open.
    pub limits: Vec<String>,
}

/// Why two results cannot stand beside each other.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SideBySideError {
    /// They are of different kinds, or of one that has rounds of its own.
    #[error("A is {a} and B is {b}; give two of one kind")]
    Kinds { a: &'static str, b: &'static str },
    #[error("no figure is in both: A has {a} and B has {b}; give results of the same points")]
    NothingInCommon { a: String, b: String },
    #[error("which rows belong together is open: {rows}; give files with one of each")]
    Ambiguous { rows: String },
}

/// Names of points in a message, at most.
const NAMED: usize = 8;

/// A point, cell or row of a result.
struct Row {
    /// What its result calls it.
    of: String,
    /// What rows that are the same thing in both results have in common.
    name: String,
    /// What tells rows of one name apart.
    conditions: Conditions,
    figures: Vec<Figure>,
    doubt: Option<Doubt>,
}

/// Why figures of a point mean little.
#[derive(Clone)]
struct Doubt {
    why: String,
    /// Of all figures, and not of times alone.
    of_all: bool,
}

struct Figure {
    name: &'static str,
    is_time: bool,
    /// What there is of it, the preferred first; those that their name says all of have no statistic.
    values: Vec<(Option<Statistic>, f64)>,
}

/// Requests per second that met the objectives, and the highest rate under them.
const GOODPUT: &str = "good req/s";
const HIGHEST: &str = "highest req/s";
/// The key of the objectives.
const OBJECTIVES: &str = "objectives";
/// What a reader asks for first.
const FIRST: &[&str] =
    &["program", "model", "GPU", "GPUs", "engine", "dtype", "stored as", "load", "rate", OBJECTIVES];

/// Puts two results of one kind beside each other.
///
/// # Errors
/// [`SideBySideError`], where no pair of figures would be beside each other.
pub fn side_by_side(names: [&str; 2], a: &Opened, b: &Opened) -> Result<SideBySide, SideBySideError> {
    let (first, second) = match (a, b) {
        (Opened::Serving(a), Opened::Serving(b)) => (serving(a), serving(b)),
        (Opened::Report(a), Opened::Report(b)) if a.kind == b.kind => (cells(a), cells(b)),
        (Opened::Foreign(a), Opened::Foreign(b)) => (foreign(a), foreign(b)),
        _ => return Err(SideBySideError::Kinds { a: a.kind(), b: b.kind() }),
    };
    let differences = differences(&conditions(a), &conditions(b));
    let other_objectives = differences.iter().any(|found| found.key == OBJECTIVES);
    let (mut beside, ambiguous) = paired(&first, &second);
    let (mut figures, mut doubtful) = (Vec::new(), Vec::new());
    for (row, beside) in first.iter().zip(&beside) {
        let found = pairs(Some(row), beside.map(|at| &second[at]));
        let doubts = [row.doubt.as_ref(), beside.and_then(|at| second[at].doubt.as_ref())];
        if doubts.iter().any(Option::is_some) {
            let of_all = doubts.into_iter().flatten().any(|doubt| doubt.of_all);
            doubtful.extend(found.first().map(|pair| (pair.of.clone(), of_all)));
        }
        figures.extend(found);
    }
    beside.sort_unstable();
    let alone = (0..second.len()).filter(|at| beside.binary_search(&Some(*at)).is_err());
    figures.extend(alone.flat_map(|at| pairs(None, Some(&second[at]))));
    figures.retain(|pair| pair.a.is_some() || pair.b.is_some());
    if !figures.iter().any(|pair| pair.a.is_some() && pair.b.is_some()) {
        return Err(if ambiguous.is_empty() {
            SideBySideError::NothingInCommon { a: listed(&first), b: listed(&second) }
        } else {
            SideBySideError::Ambiguous { rows: ambiguous.join("; ") }
        });
    }
    let mut limits = vec![
        "one result a side, not paired and not repeated: a ratio, and no verdict".to_owned(),
        "`hbmark compare` with two configurations runs them in paired rounds".to_owned(),
    ];
    limits.extend(ambiguous.into_iter().map(|rows| format!("not put beside each other: {rows}")));
    if figures.iter().any(|pair| !pair.comparable) {
        limits.push(
            "a mean and a median of times are no ratio, and one of the results lacks the other".to_owned(),
        );
    }
    for (side, rows) in [("A", &first), ("B", &second)] {
        let doubts = rows.iter().filter_map(|row| Some((&row.of, row.doubt.as_ref()?)));
        limits.extend(doubts.map(|(of, doubt)| format!("{side}, {of}: {}", doubt.why)));
    }
    for (of, of_all) in &doubtful {
        for pair in figures.iter_mut().filter(|pair| pair.of == *of && (pair.is_time || *of_all)) {
            pair.comparable = false;
        }
    }
    if other_objectives {
        for pair in figures.iter_mut().filter(|pair| matches!(pair.figure.as_str(), GOODPUT | HIGHEST)) {
            pair.comparable = false;
        }
        limits.push("the objectives differ, so that what met them in A and in B is not a ratio".to_owned());
    }
    Ok(SideBySide {
        a: names[0].to_owned(),
        b: names[1].to_owned(),
        kind: a.kind().to_owned(),
        differences,
        figures,
        limits,
    })
}

/// For each row of A the place in B of the one that is the same thing; and the rows of which more than one could be it.
fn paired(a: &[Row], b: &[Row]) -> (Vec<Option<usize>>, Vec<String>) {
    let mut beside = vec![None; a.len()];
    // A single row on each side is the pair that is meant, whatever it is called.
    if let ([_], [_]) = (a, b) {
        return (vec![Some(0)], Vec::new());
    }
    let mut named: BTreeMap<&str, [Vec<usize>; 2]> = BTreeMap::new();
    for (side, rows) in [a, b].into_iter().enumerate() {
        for (at, row) in rows.iter().enumerate() {
            named.entry(row.name.as_str()).or_default()[side].push(at);
        }
    }
    let mut ambiguous = Vec::new();
    for (name, [of_a, of_b]) in named.iter().filter(|(_, [a, b])| !a.is_empty() && !b.is_empty()) {
        // What differs between the files is what they are compared for; what differs within one tells its rows apart.
        let within = [varying(a, of_a), varying(b, of_b)].concat();
        let key = |row: &Row| within.iter().map(|key| row.conditions.get(*key).cloned()).collect::<Vec<_>>();
        let mut alike: BTreeMap<Vec<Option<String>>, [Vec<usize>; 2]> = BTreeMap::new();
        for (side, rows, places) in [(0, a, of_a), (1, b, of_b)] {
            for at in places {
                alike.entry(key(&rows[*at])).or_default()[side].push(*at);
            }
        }
        for sides in alike.values() {
            match sides {
                [of_a, of_b] if of_a.is_empty() || of_b.is_empty() => {}
                [of_a, of_b] if of_a.len() == 1 && of_b.len() == 1 => beside[of_a[0]] = Some(of_b[0]),
                [of_a, of_b] => ambiguous.push(format!(
                    "of `{name}` under the same conditions A has {} and B has {}",
                    counted(of_a.len(), "row"),
                    counted(of_b.len(), "row")
                )),
            }
        }
    }
    let more = ambiguous.len().saturating_sub(NAMED);
    ambiguous.truncate(NAMED);
    ambiguous.extend((more > 0).then(|| format!("{} more", counted(more, "name"))));
    (beside, ambiguous)
}

/// The conditions in which the rows at some places differ.
fn varying<'a>(rows: &'a [Row], places: &[usize]) -> Vec<&'a str> {
    let of = || places.iter().map(|at| &rows[*at].conditions);
    let keys: BTreeSet<&str> = of().flat_map(Conditions::keys).map(String::as_str).collect();
    let differs = |key: &&str| {
        let mut values = of().map(|conditions| conditions.get(*key));
        let first = values.next();
        values.any(|value| Some(value) != first)
    };
    keys.into_iter().filter(differs).collect()
}

/// Each figure of two rows that are the same thing, or of one that stands alone, in a statistic that both have.
fn pairs(a: Option<&Row>, b: Option<&Row>) -> Vec<FigurePair> {
    let of = match (a, b) {
        (Some(a), Some(b)) if a.of != b.of => format!("{} / {}", a.of, b.of),
        (Some(row), _) | (None, Some(row)) => row.of.clone(),
        (None, None) => return Vec::new(),
    };
    let names = distinct(
        [a, b].into_iter().flatten().flat_map(|row| row.figures.iter().map(|f| (f.name, f.is_time))),
    );
    let pair = |(name, is_time): (&'static str, bool)| {
        let values = [a, b].map(|row| {
            let found = row.and_then(|row| row.figures.iter().find(|figure| figure.name == name));
            found.map_or(&[][..], |figure| &figure.values)
        });
        let shared = values[0].iter().find_map(|(statistic, a)| {
            let (_, b) = values[1].iter().find(|(other, _)| other == statistic)?;
            Some((*statistic, Some(*a), Some(*b)))
        });
        let [first, second] = values.map(|values| values.first().copied());
        let word =
            |statistic: Option<Statistic>| statistic.map_or_else(String::new, |word| format!(" {word}"));
        let (statistic, a, b) = match (shared, first, second) {
            (Some((statistic, a, b)), ..) => (word(statistic), a, b),
            (None, Some((of_a, a)), Some((of_b, b))) => {
                (format!("{} /{}", word(of_a), word(of_b)), Some(a), Some(b))
            }
            (None, a, b) => {
                (word(a.or(b).and_then(|(statistic, _)| statistic)), a.map(|v| v.1), b.map(|v| v.1))
            }
        };
        let comparable = shared.is_some() || first.is_none() || second.is_none();
        FigurePair { of: of.clone(), figure: format!("{name}{statistic}"), is_time, a, b, comparable }
    };
    names.into_iter().map(pair).collect()
}

fn conditions(of: &Opened) -> Conditions {
    match of {
        Opened::Serving(report) => of_serving(report),
        Opened::Report(report) => of_report(report),
        Opened::Foreign(results) => of_foreign(results),
        Opened::Comparison(_) => Conditions::new(),
    }
}

/// The names whose values differ; one that a side does not report is null there.
fn differences(a: &Conditions, b: &Conditions) -> Vec<Difference> {
    let value = |of: &Conditions, key: &str| of.get(key).cloned().map_or(serde_json::Value::Null, Into::into);
    let mut keys: Vec<&String> = a.keys().chain(b.keys()).collect();
    let rank = |key: &str| FIRST.iter().position(|first| *first == key).unwrap_or(FIRST.len());
    keys.sort_by_key(|key| (rank(key), key.as_str()));
    keys.dedup();
    let each =
        keys.into_iter().map(|key| Difference { key: key.clone(), a: value(a, key), b: value(b, key) });
    each.filter(|found| found.a != found.b).collect()
}

/// Names with values, as far as they are known.
fn known<const N: usize>(pairs: [(&str, Option<String>); N]) -> Conditions {
    pairs.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect()
}

/// The settings of a configuration, one name a value.
fn settings(config: &BTreeMap<String, serde_json::Value>) -> Conditions {
    let mut found = Conditions::new();
    for (key, value) in config {
        match (key.as_str(), value) {
            // What does not change a result, and what is said in a line of its own.
            (
                "note" | "hypothesis" | "out" | "mode" | "slo" | "offered" | "dtype" | "engine" | "device"
                | "device_options" | "server",
                _,
            )
            | (_, serde_json::Value::Null) => {}
            (_, serde_json::Value::Object(inner)) => {
                let each = inner.iter().filter(|(_, value)| !value.is_null());
                found.extend(each.map(|(name, value)| (format!("{key}.{name}"), said(value))));
            }
            (_, value) => drop(found.insert(key.clone(), said(value))),
        }
    }
    found
}

fn of_serving(report: &ServeReport) -> Conditions {
    let measured = report.environment.gpu.as_ref().and_then(|gpu| gpu.name.clone());
    let server = report.server.as_ref();
    let device = report.datasheet.as_ref().map(|sheet| sheet.name.clone()).or(measured);
    let engine = server.map(|server| server.dialect.name().to_owned());
    let engine = engine.or_else(|| report.capabilities.as_ref().map(|engine| engine.engine.clone()));
    let mut offered: Vec<String> = report.points.iter().map(|point| load(point.offered)).collect();
    offered.dedup();
    let objectives: Option<Vec<String>> = match &report.search {
        Some(search) => Some(search.slo.clauses.iter().map(ToString::to_string).collect()),
        None => report.points.iter().find_map(|point| {
            Some(point.result.as_ref()?.slo.iter().map(|found| found.clause.to_string()).collect())
        }),
    };
    let objectives = objectives.map(|clauses| match clauses.as_slice() {
        [] => "none".to_owned(),
        clauses => clauses.join(", "),
    });
    // Where several points are swept, each has its own beside it.
    let one = report.points.first().filter(|_| report.points.len() == 1);
    let mut found = settings(&report.config);
    found.extend(known([
        ("model", Some(report.model_name().to_owned())),
        ("dtype", report.dtype.map(|dtype| dtype.to_string())),
        ("GPU", device),
        ("engine", engine.or_else(|| Some("virtual clock".to_owned()))),
        ("server", server.map(|server| server.url.clone())),
        ("load", Some(offered.join(", "))),
        (OBJECTIVES, objectives),
        ("workload", Some(report.workload.name.clone())),
        ("mean prompt tokens", one.map(|point| number(point.mean_prompt_tokens))),
        ("mean output tokens", one.map(|point| number(point.mean_output_tokens))),
    ]));
    found
}

fn load(offered: Offered) -> String {
    match offered {
        Offered::Rate(rate) => format!("rate {}/s", number(rate)),
        Offered::Concurrency(most) => format!("concurrency {most}"),
        Offered::AtOnce => "all at once".to_owned(),
        Offered::AsRecorded => "as recorded".to_owned(),
    }
}

fn of_report(report: &Report) -> Conditions {
    let every = |of: &dyn Fn(&CellResult) -> String| each_once(report.cells.iter().map(of));
    let gpu = report.environment.gpu.as_ref().and_then(|gpu| gpu.name.clone());
    let device = report.datasheet.as_ref().map(|sheet| sheet.name.clone()).or(gpu);
    // A prediction without a group is one of one GPU.
    let predicted = report.kind == ReportKind::Predict;
    let group =
        |of: fn(&GroupSummary) -> usize| predicted.then(|| report.group.as_ref().map_or(1, of).to_string());
    let mut found = settings(&report.config);
    found.extend(known([
        ("GPUs", group(|group| group.gpus)),
        ("tp", group(|group| group.tensor_parallel_size)),
        ("pp", group(|group| group.pipeline_parallel_size)),
        ("model", Some(report.model.name.clone())),
        ("GPU", device.or_else(|| report.environment.cpu.model.clone())),
        ("engine", every(&|cell| cell.engine.clone())),
        ("dtype", every(&|cell| cell.dtype.to_string())),
        ("KV dtype", every(&|cell| cell.kv_dtype.to_string())),
    ]));
    found
}

fn of_foreign(results: &[ForeignResult]) -> Conditions {
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for result in results {
        found.entry("program".to_owned()).or_default().push(result.format.name().to_owned());
        for (key, value) in result.rows.iter().flat_map(|row| row.setup.conditions()) {
            found.entry(key).or_default().push(value);
        }
    }
    found.into_iter().filter_map(|(key, values)| Some((key, each_once(values)?))).collect()
}

/// The values of several rows, each once; `None` where none has any.
fn each_once(values: impl IntoIterator<Item = String>) -> Option<String> {
    let mut found = distinct(values);
    let more = found.len().saturating_sub(NAMED);
    found.truncate(NAMED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    (!found.is_empty()).then(|| format!("{}{more}", found.join(", ")))
}

/// What a result holds, for a message.
fn listed(rows: &[Row]) -> String {
    let names = distinct(rows.iter().map(|row| format!("`{}`", row.of)));
    let listed = names.iter().take(NAMED).cloned().collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(NAMED) {
        _ if names.is_empty() => "no point with figures".to_owned(),
        0 => listed,
        more => format!("{listed} and {more} more"),
    }
}

/// A point or cell of ours, which its name tells from the others.
fn row(of: String, figures: impl IntoIterator<Item = (&'static str, bool, Option<f64>)>) -> Row {
    let figure = |(name, is_time, value): (_, _, Option<f64>)| Figure {
        name,
        is_time,
        values: value.map(|value| (None, value)).into_iter().collect(),
    };
    Row {
        name: of.clone(),
        of,
        conditions: Conditions::new(),
        figures: figures.into_iter().map(figure).collect(),
        doubt: None,
    }
}

/// What is wrong with a point, where something is: its figures are not those of its load, or its times those of other work, too.
fn doubt(point: &Point, result: &ServeResult) -> Option<Doubt> {
    if result.validity == Validity::Invalid {
        return Some(Doubt { why: format!("INVALID: {}", joined(&result.reasons)), of_all: true });
    }
    let disturbed = point.disturbances();
    (!disturbed.is_empty())
        .then(|| Doubt { why: format!("disturbed: {}", disturbed.join("; ")), of_all: false })
}

fn serving(report: &ServeReport) -> Vec<Row> {
    type At = fn(&Quantiles) -> Option<Quantity>;
    let time = |of: &Option<Quantiles>, at: At| {
        of.as_ref().and_then(at).and_then(|quantity| match quantity {
            Quantity::Finite(value) => Some(value),
            Quantity::Infinite(_) => None,
        })
    };
    let point = |point: &Point| {
        let ServeResult { ttft_ns, tpot_ns, itl_ns, e2e_ns, .. } = point.result.as_ref()?;
        let result = point.result.as_ref()?;
        let figures = [
            ("served req/s", false, Some(result.served_per_s)),
            ("out tok/s", false, Some(result.output_tokens_per_s)),
            (GOODPUT, false, result.goodput_per_s),
            ("TTFT p50", true, time(ttft_ns, |q| q.p50)),
            ("TTFT p95", true, time(ttft_ns, |q| q.p95)),
            ("TTFT p99", true, time(ttft_ns, |q| q.p99)),
            ("TPOT p50", true, time(tpot_ns, |q| q.p50)),
            ("TPOT p95", true, time(tpot_ns, |q| q.p95)),
            ("ITL p95", true, time(itl_ns, |q| q.p95)),
            ("E2E p50", true, time(e2e_ns, |q| q.p50)),
            ("E2E p95", true, time(e2e_ns, |q| q.p95)),
        ];
        Some(Row { doubt: doubt(point, result), ..row(point.label.clone(), figures) })
    };
    let search =
        report.search.as_ref().map(|search| row("search".to_owned(), [(HIGHEST, false, search.max_rate)]));
    report.points.iter().filter_map(point).chain(search).collect()
}

fn cells(report: &Report) -> Vec<Row> {
    let each = report.cells.iter().map(|cell| {
        let made = cell.tokens_per_s.filter(|_| !matches!(cell.phase, Phase::Verify { .. }));
        let figures = [
            ("floor", true, cell.predicted_ns.or(cell.predicted_datasheet_ns)),
            ("step", true, cell.step_ns.as_ref().map(TimeSummary::center)),
            ("TPOT", true, cell.tpot()),
            ("tok/s", false, made),
        ];
        row(cell.id.clone(), figures)
    });
    each.collect()
}

fn foreign(results: &[ForeignResult]) -> Vec<Row> {
    const METRICS: &[Metric] = &[
        Metric::PrefillStep,
        Metric::DecodeStep,
        Metric::Ttft,
        Metric::Tpot,
        Metric::Itl,
        Metric::E2e,
        Metric::OutputThroughput,
        Metric::TotalThroughput,
        Metric::RequestThroughput,
    ];
    let rows = results.iter().flat_map(|result| &result.rows);
    let each = rows.map(|row| Row {
        of: row.label.clone(),
        name: row.name().to_owned(),
        conditions: row.setup.conditions(),
        figures: METRICS.iter().map(|metric| figure(row, *metric)).collect(),
        doubt: foreign_doubt(row),
    });
    each.collect()
}

fn foreign_doubt(row: &ForeignRow) -> Option<Doubt> {
    if !row.problems.is_empty() {
        return Some(Doubt { why: format!("INVALID: {}", joined(&row.problems)), of_all: true });
    }
    row.saturated.then(|| Doubt {
        why: "SATURATED: its latencies grow with the length of the run".to_owned(),
        of_all: false,
    })
}

/// The middles of a metric, as [`ForeignRow::center`] prefers them. A rate that is an amount over all of the time needs no other word,
/// whether its file calls it a mean or not.
fn figure(row: &ForeignRow, metric: Metric) -> Figure {
    let value = |statistic| Some((Some(statistic), row.value(metric, statistic)?));
    let values: Vec<_> = if metric.is_time() {
        [Statistic::Median, Statistic::Mean, Statistic::Single].into_iter().filter_map(value).collect()
    } else {
        let amount = row.rate(metric).map(|rate| (None, rate));
        amount.into_iter().chain(value(Statistic::Median)).collect()
    };
    Figure { name: metric.title(), is_time: metric.is_time(), values }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;
    use hbmark_core::result::Cause;

    fn sweep(rename: impl Fn(usize) -> String) -> Opened {
        let mut report = samples::sweep();
        for (number, point) in report.points.iter_mut().enumerate() {
            point.label = rename(number);
        }
        Opened::Serving(Box::new(report))
    }

    #[test]
    fn points_of_both_stand_beside_each_other_and_others_alone() {
        let a = sweep(|number| format!("rate {number}"));
        let b = sweep(|number| format!("rate {}", number + 1));
        let found = side_by_side(["a", "b"], &a, &b).unwrap();
        let of = |name: &str| {
            found.figures.iter().find(|pair| pair.of == name && pair.figure == "out tok/s").unwrap()
        };
        assert!(of("rate 0").b.is_none() && of("rate 1").ratio().is_some(), "{:?}", found.figures);
    }

    fn difference<'a>(
        found: &'a SideBySide,
        key: &str,
    ) -> Option<(&'a serde_json::Value, &'a serde_json::Value)> {
        found.differences.iter().find(|found| found.key == key).map(|found| (&found.a, &found.b))
    }

    #[test]
    fn what_was_run_differently_is_said_and_other_objectives_make_no_ratio() {
        let (same, mut other) = (samples::single(), samples::single());
        let beside = |a: &ServeReport, b: &ServeReport| {
            let open = |report: &ServeReport| Opened::Serving(Box::new(report.clone()));
            side_by_side(["a", "b"], &open(a), &open(b)).unwrap()
        };
        let goodput =
            |found: &SideBySide| found.figures.iter().find(|pair| pair.figure == GOODPUT).cloned().unwrap();
        let alike = beside(&same, &same);
        assert_eq!(alike.differences, []);
        assert!(goodput(&alike).ratio().is_some(), "{:?}", alike.figures);

        other.model.as_mut().unwrap().name = "Llama-3.2-1B".to_owned();
        other.datasheet.as_mut().unwrap().name = "h200".to_owned();
        other.points[0].offered = Offered::Rate(40.0);
        let found = beside(&same, &other);
        assert_eq!(difference(&found, "model").unwrap().1, "Llama-3.2-1B");
        assert_eq!(difference(&found, "GPU").unwrap().1, "h200");
        assert_eq!(difference(&found, "load").unwrap().1, "rate 40/s");
        assert!(difference(&found, OBJECTIVES).is_none() && goodput(&found).ratio().is_some());

        other.points[0].result.as_mut().unwrap().slo[0].clause.limit_ns *= 2.0;
        let found = beside(&same, &other);
        assert!(difference(&found, OBJECTIVES).is_some(), "{:?}", found.differences);
        let pair = goodput(&found);
        assert!(pair.a.is_some() && pair.b.is_some() && pair.ratio().is_none(), "{pair:?}");
        let text = crate::output::render(&found, crate::output::Format::Table, false).unwrap();
        assert!(text.contains("they differ in: model Llama-3.1-8B in A, Llama-3.2-1B in B; GPU h100-sxm in A, h200 in B; load"), "{text}");
        let line = text.lines().find(|line| line.contains(GOODPUT)).unwrap();
        assert!(line.ends_with("not comparable"), "{line}");
    }

    #[test]
    fn points_that_are_invalid_or_disturbed_make_no_ratio_of_times_and_are_named() {
        use hbmark_core::result::serving::GateName;
        let (a, mut b) = (samples::sweep(), samples::sweep());
        let result = b.points[0].result.as_mut().unwrap();
        result.gate(GateName::InjectionLag, Some(false), "planted".to_owned());
        b.points[1].result.as_mut().unwrap().foreign_cores = Some(1.5);
        let open = |report: &ServeReport| Opened::Serving(Box::new(report.clone()));
        let found = side_by_side(["a", "b"], &open(&a), &open(&b)).unwrap();
        let compared = |point: &Point, is_time: bool| {
            let mut of =
                found.figures.iter().filter(|pair| pair.of == point.label && pair.is_time == is_time);
            of.any(|pair| pair.ratio().is_some())
        };
        let both = |point| [compared(point, true), compared(point, false)];
        assert_eq!(both(&a.points[0]), [false, false], "nothing of an invalid point");
        assert_eq!(both(&a.points[1]), [false, true], "no time of a disturbed one");
        let names = [&a.points[0].label, &a.points[1].label];
        let says = [
            format!("B, {}: INVALID: ", names[0]),
            format!("B, {}: disturbed: other processes kept 1.5 cores busy", names[1]),
        ];
        for says in &says {
            assert!(found.limits.iter().any(|limit| limit.starts_with(says)), "{:?}", found.limits);
        }
        assert!(!found.limits.iter().any(|limit| limit.starts_with("A, ") || limit.contains("median")));
    }

    #[test]
    fn two_files_of_other_programs_say_what_each_ran() {
        let open = |name: &str| {
            let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/foreign/");
            super::super::opened::open(std::path::Path::new(&format!("{folder}{name}"))).unwrap()
        };
        let found = side_by_side(
            ["a", "b"],
            &open("vllm-serve-0.25.json"),
            &open("sglang-serving-server-info.jsonl"),
        )
        .unwrap();
        let (a, b) = difference(&found, "model").unwrap();
        assert_eq!((a, b), (&"facebook/opt-125m".into(), &"Qwen/Qwen2.5-3B-Instruct".into()));
        assert!(difference(&found, "program").is_some());
        assert_eq!(difference(&found, "limit of requests at once").unwrap(), (&"2".into(), &"32".into()));
        let gpus = difference(&found, "GPUs").unwrap();
        assert_eq!(
            gpus.0,
            &serde_json::Value::Null,
            "what one of them does not say is not a value: {gpus:?}"
        );
    }

    /// A llama-bench file of rows of `tg128`: model, step in milliseconds and what else is set.
    fn bench(rows: &[(&str, f64, &str)]) -> Opened {
        let row = |(model, step_ms, more): &(&str, f64, &str)| {
            format!(
                r#"{{"model_type": "llama 8B Q8_0", "model_filename": "{model}.gguf", "n_prompt": 0, "n_gen": 128, {more}
                "avg_ns": {}, "stddev_ns": 0, "avg_ts": {}}}"#,
                step_ms * 128e6,
                1e3 / step_ms
            )
        };
        let text = rows.iter().map(row).collect::<Vec<_>>().join("\n");
        Opened::Foreign(super::super::import::parse("bench.jsonl", text).unwrap())
    }

    /// The ratios of decode steps, each with its row.
    fn ratios(found: &SideBySide) -> Vec<(&str, Option<f64>)> {
        let steps = found.figures.iter().filter(|pair| pair.figure.starts_with("decode step"));
        steps.map(|pair| (pair.of.as_str(), pair.ratio())).collect()
    }

    #[test]
    fn rows_of_one_label_are_paired_by_what_ran_and_not_by_their_order() {
        let a = bench(&[("big", 20.0, ""), ("small", 10.0, "")]);
        let b = bench(&[("small", 10.0, ""), ("big", 20.0, "")]);
        let found = side_by_side(["a", "b"], &a, &b).unwrap();
        assert_eq!(ratios(&found), [("tg128 · model big", Some(1.0)), ("tg128 · model small", Some(1.0))]);
        // What differs between the files alone is what they are compared for.
        let set = |model, on: f64, off: f64| {
            [(model, on, r#""flash_attn": true,"#), (model, off, r#""flash_attn": false,"#)]
        };
        let (a, b) = (bench(&set("big", 20.0, 40.0)), bench(&set("small", 10.0, 10.0)));
        let found = side_by_side(["a", "b"], &a, &b).unwrap();
        assert_eq!(ratios(&found).iter().map(|row| row.1).collect::<Vec<_>>(), [Some(0.5), Some(0.25)]);
        assert_eq!(difference(&found, "model").unwrap().1, "small");
        // One row is beside that of several that ran as it did.
        let found = side_by_side(["a", "b"], &a, &bench(&[set("big", 0.0, 20.0)[1]])).unwrap();
        assert_eq!(ratios(&found)[1].1, Some(0.5), "{:?}", found.figures);
    }

    #[test]
    fn rows_that_nothing_tells_apart_are_not_paired_and_that_is_said() {
        let twice = bench(&[("big", 20.0, ""), ("big", 40.0, "")]);
        let error = side_by_side(["a", "b"], &twice, &twice).unwrap_err().to_string();
        assert!(
            error.contains("of `tg128` under the same conditions A has 2 rows and B has 2 rows"),
            "{error}"
        );
        let more = [("big", 20.0, ""), ("big", 40.0, ""), ("small", 10.0, "")];
        let found = side_by_side(["a", "b"], &bench(&more), &bench(&more)).unwrap();
        assert_eq!(ratios(&found).iter().filter(|row| row.1.is_some()).count(), 1);
        assert!(found.limits.iter().any(|limit| limit.starts_with("not put beside each other: of `tg128`")));
    }

    #[test]
    fn rows_of_other_programs_that_contradict_themselves_make_no_ratio() {
        let sound = bench(&[("big", 20.0, "")]);
        let changed = |change: &dyn Fn(&mut ForeignRow)| {
            let Opened::Foreign(mut results) = sound.clone() else { unreachable!("made just above") };
            change(&mut results[0].rows[0]);
            side_by_side(["a", "b"], &sound, &Opened::Foreign(results)).unwrap()
        };
        let compared = |found: &SideBySide, is_time| {
            found.figures.iter().any(|pair| pair.is_time == is_time && pair.ratio().is_some())
        };
        let found = changed(&|_| ());
        assert_eq!([compared(&found, true), compared(&found, false)], [true; 2]);
        let found = changed(&|row| row.problems.push(Cause::other("a rate that is no rate")));
        assert_eq!([compared(&found, true), compared(&found, false)], [false; 2]);
        let says = |says| found.limits.iter().any(|limit| limit == says);
        assert!(says("B, tg128: INVALID: a rate that is no rate"), "{:?}", found.limits);
        let found = changed(&|row| row.saturated = true);
        assert_eq!([compared(&found, true), compared(&found, false)], [false, true]);
    }

    #[test]
    fn a_mean_is_no_part_of_a_ratio_with_a_median() {
        let samples = r#""samples_ns": [1280e6, 1280e6, 5120e6],"#;
        let (whole, mean) = (bench(&[("a", 20.0, samples)]), bench(&[("b", 40.0, "")]));
        let found = side_by_side(["a", "b"], &whole, &mean).unwrap();
        assert_eq!(ratios(&found), [("tg128", Some(2.0))], "both have a mean");
        assert!(found.figures.iter().any(|pair| pair.figure == "decode step mean"), "{:?}", found.figures);
        let found = side_by_side(["a", "b"], &whole, &whole).unwrap();
        assert!(found.figures.iter().any(|pair| pair.figure == "decode step median"), "{:?}", found.figures);

        let Opened::Foreign(mut median) = whole else { unreachable!("made just above") };
        median[0].rows[0]
            .values
            .retain(|value| value.statistic != Statistic::Mean || !value.metric.is_time());
        let found = side_by_side(["a", "b"], &Opened::Foreign(median), &mean).unwrap();
        let pair = found.figures.iter().find(|pair| pair.is_time).unwrap();
        assert_eq!((pair.figure.as_str(), pair.ratio()), ("decode step median / mean", None));
        assert!(
            found.limits.iter().any(|limit| limit.starts_with("a mean and a median")),
            "{:?}",
            found.limits
        );
        for format in [crate::output::Format::Table, crate::output::Format::Csv, crate::output::Format::Json]
        {
            let text = crate::output::render(&found, format, false).unwrap();
            assert!(text.contains("decode step median / mean"), "{text}");
        }
    }

    #[test]
    fn predictions_for_one_gpu_and_for_eight_differ_in_their_gpus() {
        let open = |name| Opened::Report(Box::new(samples::saved(name)));
        let found = side_by_side(["a", "b"], &open("predict-h200"), &open("predict-70b-8-h200")).unwrap();
        assert_eq!(difference(&found, "GPUs"), Some((&"1".into(), &"8".into())));
        assert_eq!(difference(&found, "tp"), Some((&"1".into(), &"4".into())));
        assert_eq!(difference(&found, "pp"), Some((&"1".into(), &"2".into())));
    }

    #[test]
    fn results_without_a_common_point_are_refused_with_the_points_of_each() {
        let a = sweep(|number| format!("rate {number}"));
        let b = sweep(|number| format!("rate {number}00"));
        let Opened::Serving(report) = &a else { unreachable!("made just above") };
        assert!(report.points.len() > 1, "a single point on each side is the pair that is meant");
        let error = side_by_side(["a", "b"], &a, &b).unwrap_err().to_string();
        assert!(
            error.starts_with("no figure is in both: A has `rate 0`, `rate 1`")
                && error.contains("and B has `rate 000`, `rate 100`"),
            "{error}"
        );
        let many: Vec<String> = (0..10).map(|number| number.to_string()).collect();
        let many: Vec<Row> = many.into_iter().map(|name| row(name, [])).collect();
        assert!(listed(&many).ends_with("`7` and 2 more"), "{}", listed(&many));
        assert_eq!(listed(&[]), "no point with figures");
    }
}
