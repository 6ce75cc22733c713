//! Service-level objectives.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::units::Nanos;

/// What a clause is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum SloMetric {
    Ttft,
    Tpot,
    E2e,
    Queue,
}

impl SloMetric {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ttft => "ttft",
            Self::Tpot => "tpot",
            Self::E2e => "e2e",
            Self::Queue => "queue",
        }
    }
}

/// One objective.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Clause {
    pub metric: SloMetric,
    /// Of one: 0.95.
    pub percentile: f64,
    pub limit_ns: f64,
}

impl fmt::Display for Clause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = format!("{:.3}", self.percentile * 100.0);
        let percent = percent.trim_end_matches('0').trim_end_matches('.');
        write!(f, "{}_p{percent} ≤ {}", self.metric.name(), Nanos(self.limit_ns))
    }
}

/// All objectives of a run.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct Slo {
    pub clauses: Vec<Clause>,
}

/// A list of objectives that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "--slo `{given}`: {problem}; write metric_percentile=limit with commas, as in ttft_p95=1s,tpot_p95=40ms,e2e_p99=15s"
)]
pub struct SloError {
    pub given: String,
    pub problem: String,
}

impl FromStr for Slo {
    type Err = SloError;

    fn from_str(given: &str) -> Result<Self, SloError> {
        let fail = |problem: String| SloError { given: given.to_owned(), problem };
        let mut clauses: Vec<Clause> = Vec::new();
        for item in given.split(',') {
            let clause = parse_clause(item.trim()).map_err(fail)?;
            let same =
                |c: &Clause| c.metric == clause.metric && (c.percentile - clause.percentile).abs() < 1e-9;
            if clauses.iter().any(same) {
                return Err(fail(format!("`{}` is there twice", item.trim())));
            }
            clauses.push(clause);
        }
        Ok(Self { clauses })
    }
}

fn parse_clause(item: &str) -> Result<Clause, String> {
    if item.is_empty() {
        return Err("there is an empty item".into());
    }
    let (name, limit) = item.split_once('=').ok_or_else(|| format!("`{item}` has no `=`"))?;
    let (metric, percentile) =
        name.split_once("_p").ok_or_else(|| format!("`{name}` has no percentile such as _p95"))?;
    let metric = match metric {
        "ttft" => SloMetric::Ttft,
        "tpot" => SloMetric::Tpot,
        "e2e" => SloMetric::E2e,
        "queue" => SloMetric::Queue,
        other => return Err(format!("`{other}` is not one of ttft, tpot, e2e, queue")),
    };
    let percent: f64 = percentile.parse().map_err(|_| format!("`{percentile}` is not a percentile"))?;
    if !(percent > 0.0 && percent < 100.0) {
        return Err(format!("percentile {percentile} is not between 0 and 100"));
    }
    Ok(Clause { metric, percentile: percent / 100.0, limit_ns: parse_span(limit)?.0 })
}

/// Reads a span of time with its unit: `40ms`, `1.5s`, `200us`, `2m`.
///
/// # Errors
/// What is wrong with it, as a part of a sentence.
pub fn parse_span(text: &str) -> Result<Nanos, String> {
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| c.is_alphabetic());
    let scale = match &text[digits.len()..] {
        "ns" => 1.0,
        "us" | "µs" => 1e3,
        "ms" => 1e6,
        "s" => 1e9,
        "m" | "min" => 60e9,
        "h" => 3600e9,
        "" => return Err(format!("`{text}` has no unit (us, ms, s)")),
        other => return Err(format!("`{other}` is not a unit of time (us, ms, s, m, h)")),
    };
    let value: f64 = digits.trim().parse().map_err(|_| format!("`{digits}` is not a number"))?;
    if !(value > 0.0 && (value * scale).is_finite()) {
        return Err(format!("`{text}` is not a span above zero"));
    }
    Ok(Nanos(value * scale))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clauses_have_metric_percentile_and_limit() {
        let slo: Slo = "ttft_p95=1s, tpot_p99.9=40ms,e2e_p50=1.5m".parse().unwrap();
        let shown: Vec<String> = slo.clauses.iter().map(ToString::to_string).collect();
        assert_eq!(shown, ["ttft_p95 ≤ 1.00 s", "tpot_p99.9 ≤ 40.0 ms", "e2e_p50 ≤ 90.0 s"]);
        assert!((slo.clauses[1].percentile - 0.999).abs() < 1e-12);
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        for (given, problem) in [
            ("", "there is an empty item"),
            ("ttft_p95=1s,", "there is an empty item"),
            ("ttft_p95", "`ttft_p95` has no `=`"),
            ("ttft=1s", "`ttft` has no percentile such as _p95"),
            ("itl_p95=1s", "`itl` is not one of ttft, tpot, e2e, queue"),
            ("ttft_px=1s", "`x` is not a percentile"),
            ("ttft_p100=1s", "percentile 100 is not between 0 and 100"),
            ("ttft_pNaN=1s", "percentile NaN is not between 0 and 100"),
            ("ttft_p95=1", "`1` has no unit (us, ms, s)"),
            ("ttft_p95=1parsec", "`parsec` is not a unit of time (us, ms, s, m, h)"),
            ("ttft_p95=-1s", "`-1s` is not a span above zero"),
            ("ttft_p95=s", "`` is not a number"),
            ("ttft_p95=1s,ttft_p95=2s", "`ttft_p95=2s` is there twice"),
        ] {
            let error = given.parse::<Slo>().unwrap_err();
            assert_eq!(error, SloError { given: given.into(), problem: problem.into() });
        }
    }
}
