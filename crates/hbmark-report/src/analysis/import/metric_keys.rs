//! Foreign keys: to which of our metrics each belongs, in which unit, and how its definition differs.
//!
//! Enters: the table `metric_keys.txt`. Leaves: [`Alias`]es, which the readers map by and which `hbmark import --aliases` prints. Names
//! collide between programs (AIPerf's `inter_token_latency` is our TPOT), so a key has a meaning only within its format.

use std::fmt;
use std::sync::LazyLock;

use ForeignUnit::{InFile, Milliseconds, Nanoseconds, PerSecond, Seconds};
use Shape::{Computed, Group, One, Suffix};
use clap::ValueEnum;
use serde::de::value::{Error as ValueError, StrDeserializer};
use serde::{Deserialize, Serialize};

use super::ForeignFormat;

/// What was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// One prefill of a whole batch of prompts.
    PrefillStep,
    /// One decode step of a whole batch: the time per output token of each of its sequences.
    DecodeStep,
    /// Per request: (last token − first token) / (tokens − 1).
    Tpot,
    /// Per request: (last token − arrival) / tokens; not comparable with TPOT.
    TpotWithFirst,
    /// Per gap between tokens, or between chunks of several.
    Itl,
    Ttft,
    E2e,
    OutputThroughput,
    InputThroughput,
    TotalThroughput,
    RequestThroughput,
    Goodput,
}

impl Metric {
    /// The heading of a table.
    pub fn title(self) -> &'static str {
        match self {
            Self::PrefillStep => "prefill step",
            Self::DecodeStep => "decode step",
            Self::Tpot => "TPOT",
            Self::TpotWithFirst => "TPOT with first",
            Self::Itl => "ITL",
            Self::Ttft => "TTFT",
            Self::E2e => "E2E",
            Self::OutputThroughput => "out tok/s",
            Self::InputThroughput => "in tok/s",
            Self::TotalThroughput => "total tok/s",
            Self::RequestThroughput => "req/s",
            Self::Goodput => "good req/s",
        }
    }

    /// Whether it is a time, in nanoseconds, and not a rate per second.
    pub fn is_time(self) -> bool {
        !matches!(
            self,
            Self::OutputThroughput
                | Self::InputThroughput
                | Self::TotalThroughput
                | Self::RequestThroughput
                | Self::Goodput
        )
    }
}

/// Which number of a distribution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Statistic {
    Mean,
    Median,
    /// In hundredths of a percent: p99.9 is 9990.
    Percentile(u16),
    StandardDeviation,
    Min,
    Max,
    /// The only value there is.
    Single,
}

impl Statistic {
    /// The statistic of a foreign name: `avg`, `p99`, GuideLLM's `p999`...
    pub fn parse(word: &str) -> Option<Self> {
        match word {
            "mean" | "avg" | "average" => Some(Self::Mean),
            "median" | "p50" => Some(Self::Median),
            "std" | "stddev" | "std_dev" | "stdev" => Some(Self::StandardDeviation),
            "min" | "minimum" => Some(Self::Min),
            "max" | "maximum" => Some(Self::Max),
            "single" => Some(Self::Single),
            _ => Self::percentile(word.strip_prefix('p').or_else(|| word.strip_prefix('P'))?),
        }
    }

    /// `99`, `99.9`, and GuideLLM's `001` and `999` for a thousandth at either end.
    pub(super) fn percentile(digits: &str) -> Option<Self> {
        match digits {
            "001" => return Some(Self::Percentile(10)),
            "999" => return Some(Self::Percentile(9990)),
            "100" => return Some(Self::Max),
            _ => {}
        }
        let percent: f64 = digits.parse().ok()?;
        if !(percent > 0.0 && percent < 100.0) {
            return None;
        }
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 0 and 10,000")]
        let hundredths = (percent * 100.0).round() as u16;
        match hundredths {
            // Nearer to an end than this can say.
            0 | 10_000 => None,
            5000 => Some(Self::Median),
            _ => Some(Self::Percentile(hundredths)),
        }
    }
}

impl fmt::Display for Statistic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mean => f.pad("mean"),
            Self::Median => f.pad("median"),
            Self::Percentile(hundredths) => f.pad(&format!("p{}", f64::from(*hundredths) / 100.0)),
            Self::StandardDeviation => f.pad("std"),
            Self::Min => f.pad("min"),
            Self::Max => f.pad("max"),
            Self::Single => f.pad("single"),
        }
    }
}

impl From<Statistic> for String {
    fn from(statistic: Statistic) -> Self {
        statistic.to_string()
    }
}

impl TryFrom<String> for Statistic {
    type Error = String;
    fn try_from(word: String) -> Result<Self, String> {
        Self::parse(&word).ok_or_else(|| format!("`{word}` is not a statistic"))
    }
}

/// How a file holds the statistics of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// One key each: `{stat}_tpot_ms`; the alias has what follows the statistic.
    Suffix,
    /// An object of statistics.
    Group,
    /// One number.
    One(Statistic),
    /// Computed by its reader from several keys, as the conversion shows.
    Computed,
}

/// The unit of a foreign number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ForeignUnit {
    Seconds,
    Milliseconds,
    Nanoseconds,
    PerSecond,
    /// Given beside the number.
    InFile,
}

impl ForeignUnit {
    /// The factor to nanoseconds, or to per second; `None` where the file gives the unit.
    pub fn scale(self) -> Option<f64> {
        match self {
            Self::Seconds => Some(1e9),
            Self::Milliseconds => Some(1e6),
            Self::Nanoseconds | Self::PerSecond => Some(1.0),
            Self::InFile => None,
        }
    }

    /// Its name in the table of aliases.
    pub fn word(self) -> &'static str {
        match self {
            Self::Seconds => "s",
            Self::Milliseconds => "ms",
            Self::Nanoseconds => "ns",
            Self::PerSecond => "1/s",
            Self::InFile => "in the file",
        }
    }
}

/// One row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alias {
    pub format: ForeignFormat,
    /// The foreign key; dots go down into objects, `{stat}` stands for a statistic.
    pub key: &'static str,
    pub metric: Metric,
    pub shape: Shape,
    pub unit: ForeignUnit,
    /// How the number becomes ours, where that is more than a unit.
    pub conversion: &'static str,
    /// How the definition differs from ours; empty where it does not.
    pub caveat: &'static str,
}

/// The aliases of one format.
pub fn of(format: ForeignFormat) -> impl Iterator<Item = &'static Alias> {
    ALIASES.iter().filter(move |alias| alias.format == format)
}

const CLIENT: &str = "timed by the client: network and HTTP are in it";
const CHUNKS: &str =
    "per chunk as the client saw it: with speculative decoding or bundled tokens it is not TPOT";
const SENT: &str = "from sending the request, not from its scheduled arrival: a late client hides queueing";
const ENGINE: &str = "the engine's own clock: client and network are not in it";

/// One row of the file per line, cells between bars, comments behind `#`.
static ALIASES: LazyLock<Vec<Alias>> = LazyLock::new(|| {
    let rows = include_str!("metric_keys.txt").lines().filter(|line| !line.starts_with('#'));
    rows.map(|line| alias(line).unwrap_or_else(|| panic!("not an alias: {line}"))).collect()
});

fn alias(line: &'static str) -> Option<Alias> {
    let mut cells = line.split('|').map(str::trim);
    let mut next = || cells.next();
    Some(Alias {
        format: ForeignFormat::from_str(next()?, false).ok()?,
        key: next()?,
        metric: Metric::deserialize(StrDeserializer::<ValueError>::new(next()?)).ok()?,
        shape: match next()? {
            "suffix" => Suffix,
            "group" => Group,
            "computed" => Computed,
            statistic => One(Statistic::parse(statistic)?),
        },
        unit: {
            let word = next()?;
            [Seconds, Milliseconds, Nanoseconds, PerSecond, InFile].into_iter().find(|u| u.word() == word)?
        },
        conversion: next()?,
        caveat: match next()? {
            "CLIENT" => CLIENT,
            "CHUNKS" => CHUNKS,
            "SENT" => SENT,
            "ENGINE" => ENGINE,
            text => text,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::Statistic::{Mean, Median, Single};
    use super::*;
    use clap::ValueEnum;

    #[test]
    fn every_format_has_aliases_and_no_key_means_two_things() {
        for format in ForeignFormat::value_variants() {
            assert!(of(*format).count() >= 2, "{}", format.name());
        }
        for (index, alias) in ALIASES.iter().enumerate() {
            let twice = ALIASES[..index].iter().any(|a| (a.format, a.key) == (alias.format, alias.key));
            assert!(!twice, "{} {}", alias.format.name(), alias.key);
        }
    }

    #[test]
    fn statistics_are_known_under_every_name_and_round_trip() {
        let parsed = |word| Statistic::parse(word);
        assert_eq!(parsed("p99"), Some(Statistic::Percentile(9900)));
        assert_eq!(parsed("P99"), Some(Statistic::Percentile(9900)));
        assert_eq!(parsed("p99.9"), parsed("p999"), "GuideLLM leaves the point out");
        assert_eq!(parsed("p001").unwrap().to_string(), "p0.1");
        assert_eq!(parsed("p50"), Some(Median));
        assert_eq!(parsed("p99.99").unwrap().to_string(), "p99.99", "and not p100");
        assert_eq!(parsed("p100"), Some(Statistic::Max));
        for word in ["p", "p0", "p99.999", "pNaN", "pinf", "count", "sum", "p-1"] {
            assert_eq!(parsed(word), None, "{word}");
        }
        for statistic in
            [Mean, Median, Single, Statistic::Percentile(9990), Statistic::Percentile(9999), Statistic::Max]
        {
            assert_eq!(Statistic::parse(&statistic.to_string()), Some(statistic));
        }
    }
}
