//! Two saved results of one kind beside each other, figure by figure, where no rounds were run and so nothing can be decided.
//!
//! Enters: two [`Opened`] results. Leaves: a [`SideBySide`]: rows of both, matched by their names, each figure with its ratio.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::import::{ForeignResult, Metric};
use super::opened::Opened;
use hbmark_core::result::Report;
use hbmark_core::result::serving::{Quantiles, Quantity, ServeReport, ServeResult};

/// One figure of both results.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FigurePair {
    /// The point, cell or row, as its result names it.
    pub of: String,
    pub figure: String,
    /// Nanoseconds, otherwise per second.
    pub is_time: bool,
    pub a: Option<f64>,
    pub b: Option<f64>,
}

impl FigurePair {
    /// B over A, where both have it.
    #[must_use]
    pub fn ratio(&self) -> Option<f64> {
        Some(self.b? / self.a.filter(|a| *a > 0.0)?)
    }
}

/// Two results beside each other.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SideBySide {
    pub a: String,
    pub b: String,
    pub kind: String,
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
}

/// Names of points in a message, at most.
const NAMED: usize = 8;

struct Figure {
    of: String,
    name: &'static str,
    is_time: bool,
    value: Option<f64>,
}

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
    // A single row on each side is the pair that is meant, whatever it is called.
    let names_of = |figures: &[Figure]| {
        let mut names: Vec<String> = figures.iter().map(|figure| figure.of.clone()).collect();
        names.dedup();
        names
    };
    let (of_a, of_b) = (names_of(&first), names_of(&second));
    let alone = of_a.len() == 1 && of_b.len() == 1;
    let mut unmatched = second;
    let mut figures: Vec<FigurePair> = Vec::new();
    for figure in first {
        let same = |other: &Figure| other.name == figure.name && (alone || other.of == figure.of);
        let beside = unmatched.iter().position(same).map(|at| unmatched.remove(at));
        let of = match &beside {
            Some(beside) if beside.of != figure.of => format!("{} / {}", figure.of, beside.of),
            _ => figure.of,
        };
        let b = beside.and_then(|beside| beside.value);
        figures.push(FigurePair {
            of,
            figure: figure.name.to_owned(),
            is_time: figure.is_time,
            a: figure.value,
            b,
        });
    }
    let left = |figure: Figure| FigurePair {
        of: figure.of,
        figure: figure.name.to_owned(),
        is_time: figure.is_time,
        a: None,
        b: figure.value,
    };
    figures.extend(unmatched.into_iter().map(left));
    figures.retain(|pair| pair.a.is_some() || pair.b.is_some());
    if !figures.iter().any(|pair| pair.a.is_some() && pair.b.is_some()) {
        return Err(SideBySideError::NothingInCommon { a: listed(&of_a), b: listed(&of_b) });
    }
    let limits = vec![
        "one result a side, not paired and not repeated: a ratio, and no verdict".to_owned(),
        "`hbmark compare` with two configurations runs them in paired rounds".to_owned(),
    ];
    Ok(SideBySide {
        a: names[0].to_owned(),
        b: names[1].to_owned(),
        kind: a.kind().to_owned(),
        figures,
        limits,
    })
}

/// What a result holds, for a message.
fn listed(names: &[String]) -> String {
    let listed: Vec<String> = names.iter().take(NAMED).map(|name| format!("`{name}`")).collect();
    match names.len().saturating_sub(NAMED) {
        _ if names.is_empty() => "no point with figures".to_owned(),
        0 => listed.join(", "),
        more => format!("{} and {more} more", listed.join(", ")),
    }
}

fn serving(report: &ServeReport) -> Vec<Figure> {
    type At = fn(&Quantiles) -> Option<Quantity>;
    let mut figures = Vec::new();
    for point in &report.points {
        let Some(result) = &point.result else { continue };
        let mut push =
            |name, is_time, value| figures.push(Figure { of: point.label.clone(), name, is_time, value });
        let time = |of: &Option<Quantiles>, at: At| {
            of.as_ref().and_then(at).and_then(|quantity| match quantity {
                Quantity::Finite(value) => Some(value),
                Quantity::Infinite(_) => None,
            })
        };
        let ServeResult { ttft_ns, tpot_ns, itl_ns, e2e_ns, .. } = result;
        push("served req/s", false, Some(result.served_per_s));
        push("out tok/s", false, Some(result.output_tokens_per_s));
        push("good req/s", false, result.goodput_per_s);
        let times: [(&str, &Option<Quantiles>, At); 8] = [
            ("TTFT p50", ttft_ns, |q| q.p50),
            ("TTFT p95", ttft_ns, |q| q.p95),
            ("TTFT p99", ttft_ns, |q| q.p99),
            ("TPOT p50", tpot_ns, |q| q.p50),
            ("TPOT p95", tpot_ns, |q| q.p95),
            ("ITL p95", itl_ns, |q| q.p95),
            ("E2E p50", e2e_ns, |q| q.p50),
            ("E2E p95", e2e_ns, |q| q.p95),
        ];
        for (figure, of, at) in times {
            push(figure, true, time(of, at));
        }
    }
    if let Some(search) = &report.search {
        let value = search.max_rate;
        figures.push(Figure { of: "search".to_owned(), name: "highest req/s", is_time: false, value });
    }
    figures
}

fn cells(report: &Report) -> Vec<Figure> {
    let each = report.cells.iter().flat_map(|cell| {
        let of = |name, is_time, value| Figure { of: cell.id.clone(), name, is_time, value };
        [
            of("floor", true, cell.predicted_ns.or(cell.predicted_datasheet_ns)),
            of("step", true, cell.step_ns.as_ref().map(|step| step.median)),
            of("TPOT", true, cell.tpot_ns),
            of("tok/s", false, cell.tokens_per_s),
        ]
    });
    each.collect()
}

fn foreign(results: &[ForeignResult]) -> Vec<Figure> {
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
    let figures = rows.flat_map(|row| {
        METRICS.iter().map(move |metric| Figure {
            of: row.label.clone(),
            name: metric.title(),
            is_time: metric.is_time(),
            value: row.center(*metric).map(|value| value.value),
        })
    });
    figures.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;

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
        assert!(listed(&many).ends_with("`7` and 2 more"), "{}", listed(&many));
        assert_eq!(listed(&[]), "no point with figures");
    }
}
