//! Two saved results of one kind beside each other, figure by figure, where no rounds were run and so nothing can be decided.
//!
//! Enters: two [`Opened`] results. Leaves: a [`SideBySide`]: rows of both, matched by their names, each figure with its ratio.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::capacity::number;
use super::distinct;
use super::import::{ForeignResult, Metric, Rate};
use super::opened::Opened;
use super::words::said;
use hbmark_core::result::comparison::Difference;
use hbmark_core::result::serving::{Offered, Quantiles, Quantity, ServeReport, ServeResult};
use hbmark_core::result::{CellResult, Phase, Report, TimeSummary};

/// One figure of both results.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FigurePair {
    /// The point, cell or row, as its result names it.
    pub of: String,
    pub figure: String,
    /// Nanoseconds, otherwise per second.
    pub is_time: bool,
    pub a: Option<f64>,
    pub b: Option<f64>,
    /// Whether both mean the same: what counts requests by their objectives does not where those differ.
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
}

/// Names of points in a message, at most.
const NAMED: usize = 8;

struct Figure {
    of: String,
    name: &'static str,
    is_time: bool,
    value: Option<f64>,
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
    // A single row on each side is the pair that is meant, whatever it is called.
    let names_of = |figures: &[Figure]| {
        let mut names: Vec<String> = figures.iter().map(|figure| figure.of.clone()).collect();
        names.dedup();
        names
    };
    let (of_a, of_b) = (names_of(&first), names_of(&second));
    let differences = differences(&conditions(a), &conditions(b));
    let other_objectives = differences.iter().any(|found| found.key == OBJECTIVES);
    let comparable = |name: &str| !(other_objectives && matches!(name, GOODPUT | HIGHEST));
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
            comparable: comparable(figure.name),
        });
    }
    let left = |figure: Figure| FigurePair {
        of: figure.of,
        figure: figure.name.to_owned(),
        is_time: figure.is_time,
        a: None,
        b: figure.value,
        comparable: comparable(figure.name),
    };
    figures.extend(unmatched.into_iter().map(left));
    figures.retain(|pair| pair.a.is_some() || pair.b.is_some());
    if !figures.iter().any(|pair| pair.a.is_some() && pair.b.is_some()) {
        return Err(SideBySideError::NothingInCommon { a: listed(&of_a), b: listed(&of_b) });
    }
    let mut limits = vec![
        "one result a side, not paired and not repeated: a ratio, and no verdict".to_owned(),
        "`hbmark compare` with two configurations runs them in paired rounds".to_owned(),
    ];
    if other_objectives && figures.iter().any(|pair| !pair.comparable) {
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

/// What was run, by name; a name without a value is not reported.
type Conditions = BTreeMap<String, String>;

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
    let every =
        |of: &dyn Fn(&CellResult) -> String| values_of_rows(report.cells.iter().map(|cell| Some(of(cell))));
    let gpu = report.environment.gpu.as_ref().and_then(|gpu| gpu.name.clone());
    let device = report.datasheet.as_ref().map(|sheet| sheet.name.clone()).or(gpu);
    let mut found = settings(&report.config);
    found.extend(known([
        ("model", Some(report.model.name.clone())),
        ("GPU", device.or_else(|| report.environment.cpu.model.clone())),
        ("engine", every(&|cell| cell.engine.clone())),
        ("dtype", every(&|cell| cell.dtype.to_string())),
        ("KV dtype", every(&|cell| cell.kv_dtype.to_string())),
    ]));
    found
}

fn of_foreign(results: &[ForeignResult]) -> Conditions {
    let every = |of: &dyn Fn(&super::import::Setup) -> Option<String>| {
        values_of_rows(results.iter().flat_map(|result| &result.rows).map(|row| of(&row.setup)))
    };
    let tokens = |mean: Option<f64>| mean.map(number);
    known([
        ("program", values_of_rows(results.iter().map(|result| Some(result.format.name().to_owned())))),
        ("engine", every(&|setup| setup.engine.clone())),
        ("engine version", every(&|setup| setup.engine_version.clone())),
        ("model", every(&|setup| setup.model.clone())),
        ("stored as", every(&|setup| setup.stored_as.clone())),
        ("KV dtype", every(&|setup| setup.kv_dtype.map(|dtype| dtype.to_string()))),
        ("GPU", every(&|setup| setup.gpu.clone())),
        ("GPUs", every(&|setup| setup.gpus.map(|gpus| gpus.to_string()))),
        ("batch", every(&|setup| setup.batch.map(|batch| batch.to_string()))),
        ("limit of requests at once", every(&|setup| setup.max_concurrency.map(|most| most.to_string()))),
        (
            "rate",
            every(&|setup| {
                setup.request_rate.map(|rate| match rate {
                    Rate::PerSecond(rate) => format!("{}/s", number(rate)),
                    Rate::Unlimited => "unlimited".to_owned(),
                })
            }),
        ),
        ("mean prompt tokens", every(&|setup| tokens(setup.input_tokens))),
        ("mean output tokens", every(&|setup| tokens(setup.output_tokens))),
    ])
}

/// The values of several rows, each once; `None` where none has any.
fn values_of_rows(values: impl Iterator<Item = Option<String>>) -> Option<String> {
    let mut found = distinct(values.flatten());
    let more = found.len().saturating_sub(NAMED);
    found.truncate(NAMED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    (!found.is_empty()).then(|| format!("{}{more}", found.join(", ")))
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
        push(GOODPUT, false, result.goodput_per_s);
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
        figures.push(Figure { of: "search".to_owned(), name: HIGHEST, is_time: false, value });
    }
    figures
}

fn cells(report: &Report) -> Vec<Figure> {
    let each = report.cells.iter().flat_map(|cell| {
        let of = |name, is_time, value| Figure { of: cell.id.clone(), name, is_time, value };
        [
            of("floor", true, cell.predicted_ns.or(cell.predicted_datasheet_ns)),
            of("step", true, cell.step_ns.as_ref().map(TimeSummary::center)),
            of("TPOT", true, cell.tpot()),
            of("tok/s", false, cell.tokens_per_s.filter(|_| !matches!(cell.phase, Phase::Verify { .. }))),
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
