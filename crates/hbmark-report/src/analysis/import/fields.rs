//! Typed access to the fields of a record, with errors that name the field.
//!
//! Enters: an untrusted JSON object and the aliases. Leaves: numbers in our units and harmless text. A missing or null field is
//! `None`; a field of the wrong kind is an error. Numbers may be text, as CSV and early GenAI-Perf have them.

use serde_json::{Map, Value as Json};

use super::metric_keys::{self, Alias, ForeignUnit, Metric, Shape, Statistic};
use super::{ForeignFormat, ImportError, Rate, Value, clipped};
use hbmark_core::units::whole;

/// The largest count that is accepted; also keeps products of two counts within 64 bits.
const MAX_COUNT: f64 = 1e15;
/// The longest time and the highest rate that are accepted: a year, and far above any memory.
const MAX_NANOSECONDS: f64 = 3.2e16;
const MAX_RATE: f64 = 1e12;
/// Values of one row.
const MAX_VALUES: usize = 300;

/// One record, or an object within it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fields<'a> {
    pub file: &'a str,
    /// From 1.
    pub record: usize,
    pub map: &'a Map<String, Json>,
}

impl<'a> Fields<'a> {
    pub fn new(file: &'a str, index: usize, map: &'a Map<String, Json>) -> Self {
        Self { file, record: index + 1, map }
    }

    /// The value at a key or, where no key is spelled so, down a path of dots; null is none.
    pub fn get(&self, path: &str) -> Option<&'a Json> {
        let direct = self.map.get(path);
        let found = direct.or_else(|| {
            let (first, rest) = path.split_once('.')?;
            rest.split('.').try_fold(self.map.get(first)?, |value, key| value.get(key))
        });
        found.filter(|value| !value.is_null())
    }

    /// An object at a path.
    pub fn object(&self, path: &str) -> Option<Self> {
        Some(Self { map: self.get(path)?.as_object()?, ..*self })
    }

    fn wrong(&self, field: &str, found: &Json, wanted: &'static str) -> ImportError {
        let found = match found {
            Json::Object(_) => "an object".to_owned(),
            Json::Array(_) => "a list".to_owned(),
            other => clipped(&other.to_string()),
        };
        ImportError::Field {
            file: self.file.to_owned(),
            record: self.record,
            field: clipped(field),
            found,
            wanted,
        }
    }

    /// A finite number that is not negative.
    pub fn number(&self, path: &str) -> Result<Option<f64>, ImportError> {
        let Some(value) = self.get(path) else { return Ok(None) };
        let number = match value {
            Json::Number(number) => number.as_f64(),
            Json::String(text) if matches!(text.trim(), "" | "-" | "N/A" | "inf") => return Ok(None),
            Json::String(text) => text.trim().replace(',', "").parse().ok(),
            _ => None,
        };
        match number.filter(|n| n.is_finite() && *n >= 0.0) {
            Some(number) => Ok(Some(number)),
            None => Err(self.wrong(path, value, "a finite number of at least 0")),
        }
    }

    /// A whole number.
    pub fn count(&self, path: &str) -> Result<Option<u64>, ImportError> {
        let Some(number) = self.number(path)? else { return Ok(None) };
        self.whole(path, number).map(Some)
    }

    /// The error of a moment that lies before the one it follows.
    pub fn out_of_order(&self, field: &str, found: f64, after: &str) -> ImportError {
        let found = Json::from(format!("{found}, before {after}"));
        self.wrong(field, &found, "a later moment")
    }

    /// The error of a field that is there and is not what a reader can use.
    pub fn wrong_at(&self, path: &str, wanted: &'static str) -> ImportError {
        self.wrong(path, self.get(path).unwrap_or(&Json::Null), wanted)
    }

    /// A delay above a limit; one that is missing, negative or no number is none.
    pub fn late(&self, path: &str, limit: f64) -> Option<f64> {
        self.get(path)?.as_f64().filter(|delay| delay.is_finite() && *delay > limit)
    }

    /// A number from elsewhere as a count.
    pub fn whole(&self, name: &str, number: f64) -> Result<u64, ImportError> {
        if !(0.0..=MAX_COUNT).contains(&number) || number.fract() != 0.0 {
            return Err(self.wrong(name, &Json::from(number), "a whole number below 10^15"));
        }
        Ok(whole(number))
    }

    /// A whole number that a reader cannot do without.
    pub fn need_count(&self, key: &'static str, format: ForeignFormat) -> Result<u64, ImportError> {
        self.count(key)?.ok_or_else(|| self.missing(key, format))
    }

    pub fn missing(&self, field: &'static str, format: ForeignFormat) -> ImportError {
        ImportError::MissingField { file: self.file.to_owned(), record: self.record, field, format }
    }

    /// Text without control characters, clipped; empty text and `None` are none.
    pub fn text(&self, path: &str) -> Result<Option<String>, ImportError> {
        let Some(value) = self.get(path) else { return Ok(None) };
        let text = match value {
            Json::String(text) => clipped(text),
            Json::Number(number) => number.to_string(),
            other => return Err(self.wrong(path, other, "text")),
        };
        Ok(Some(text).filter(|text| !text.is_empty() && text != "None"))
    }

    /// An arrival rate: a number, or the several spellings of no limit.
    pub fn rate(&self, path: &str) -> Result<Option<Rate>, ImportError> {
        match self.get(path) {
            Some(Json::String(text)) if text == "inf" => Ok(Some(Rate::Unlimited)),
            // A word for how requests came, such as SGLang's `trace`, is no rate.
            Some(Json::String(text)) if text.starts_with(char::is_alphabetic) => Ok(None),
            // Some write a number that no generator reaches.
            _ => Ok(self.number(path)?.map(|n| if n >= 1e6 { Rate::Unlimited } else { Rate::PerSecond(n) })),
        }
    }

    /// The values that the aliases find in this record, and remarks about what is not a measurement.
    pub fn values(&self, format: ForeignFormat) -> Result<(Vec<Value>, Vec<String>), ImportError> {
        let mut found = Found::default();
        for alias in metric_keys::of(format) {
            self.follow(alias, &mut found)?;
        }
        let mut remarks = Vec::new();
        if !found.zeros.is_empty() {
            remarks.push(format!("{} is 0: nothing was timed, so it is left out", found.zeros.join(", ")));
        }
        found.values.truncate(MAX_VALUES);
        Ok((found.values, remarks))
    }

    fn follow(&self, alias: &Alias, found: &mut Found) -> Result<(), ImportError> {
        match alias.shape {
            Shape::Suffix => {
                let suffix = alias.key.trim_start_matches("{stat}").trim_start_matches(['_', ' ']);
                for key in self.map.keys() {
                    let Some(word) = key.strip_suffix(suffix) else { continue };
                    let word = word.trim_end_matches(['_', ' ', '.']);
                    if let Some(statistic) = Statistic::parse(&word.to_lowercase()) {
                        self.take(alias, key, statistic, found)?;
                    }
                }
            }
            Shape::Group => {
                let Some(group) = self.object(alias.key) else {
                    return match self.get(alias.key) {
                        Some(other) => Err(self.wrong(alias.key, other, "an object of statistics")),
                        None => Ok(()),
                    };
                };
                let unit = group.text("unit")?;
                for (key, value) in
                    group.map.iter().chain(group.object("percentiles").iter().flat_map(|p| p.map))
                {
                    // vLLM's latency names percentiles by bare numbers.
                    let statistic = Statistic::parse(key).or_else(|| Statistic::percentile(key));
                    let Some(statistic) = statistic.filter(|_| !value.is_null()) else { continue };
                    let nested =
                        if group.map.contains_key(key) { key.clone() } else { format!("percentiles.{key}") };
                    let Some(number) = group.number(&nested)? else { continue };
                    let key = format!("{}.{nested}", alias.key);
                    self.push(alias, key, statistic, number, unit.as_deref(), found)?;
                }
            }
            Shape::One(statistic) => {
                // AIPerf keeps single figures in the same objects as distributions.
                match self.object(alias.key) {
                    Some(group) => {
                        if let Some(number) = group.number("avg")? {
                            let unit = group.text("unit")?;
                            self.push(
                                alias,
                                format!("{}.avg", alias.key),
                                statistic,
                                number,
                                unit.as_deref(),
                                found,
                            )?;
                        }
                    }
                    None => self.take(alias, alias.key, statistic, found)?,
                }
            }
            Shape::Computed => {}
        }
        Ok(())
    }

    fn take(
        &self,
        alias: &Alias,
        key: &str,
        statistic: Statistic,
        found: &mut Found,
    ) -> Result<(), ImportError> {
        match self.number(key)? {
            Some(number) => self.push(alias, key.to_owned(), statistic, number, None, found),
            None => Ok(()),
        }
    }

    fn push(
        &self,
        alias: &Alias,
        key: String,
        statistic: Statistic,
        number: f64,
        unit: Option<&str>,
        found: &mut Found,
    ) -> Result<(), ImportError> {
        let scale = match alias.unit {
            ForeignUnit::InFile => unit.and_then(|unit| scale_of(unit, alias)).ok_or_else(|| {
                let given = unit.map_or(Json::Null, Json::from);
                self.wrong(&format!("{}.unit", alias.key), &given, "ns, us, ms, s or a rate per second")
            })?,
            fixed => fixed.scale().unwrap_or(1.0),
        };
        let value = number * scale;
        let limit = if alias.metric.is_time() { MAX_NANOSECONDS } else { MAX_RATE };
        if value > limit {
            return Err(self.wrong(
                &key,
                &Json::from(number),
                "a time below a year or a rate below 10^12 per second",
            ));
        }
        // A spread, a low percentile and a goodput may be 0; the middle of a time or a rate that was measured is not.
        let middle =
            matches!(statistic, Statistic::Mean | Statistic::Median | Statistic::Single | Statistic::Max);
        if value == 0.0 && middle && alias.metric != Metric::Goodput {
            let name = alias.metric.title();
            if !found.zeros.contains(&name) {
                found.zeros.push(name);
            }
            found.values.retain(|v| v.metric != alias.metric);
            return Ok(());
        }
        if !found.zeros.contains(&alias.metric.title()) {
            found.values.push(Value { metric: alias.metric, statistic, value, key });
        }
        Ok(())
    }
}

#[derive(Default)]
struct Found {
    values: Vec<Value>,
    /// Metrics that are 0.
    zeros: Vec<&'static str>,
}

fn scale_of(unit: &str, alias: &Alias) -> Option<f64> {
    let unit = unit.trim().to_lowercase();
    if !alias.metric.is_time() {
        return (unit.ends_with("/sec") || unit.ends_with("/s") || unit.ends_with("per sec")).then_some(1.0);
    }
    match unit.as_str() {
        "ns" => Some(1.0),
        "us" | "µs" => Some(1e3),
        "ms" => Some(1e6),
        "s" | "sec" => Some(1e9),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with<T>(json: &str, look: impl FnOnce(Fields<'_>) -> T) -> T {
        let value: Json = serde_json::from_str(json).unwrap();
        look(Fields::new("f.json", 0, value.as_object().unwrap()))
    }

    #[test]
    fn a_field_of_the_wrong_kind_is_named_with_what_was_found() {
        let error = with(r#"{"completed": {"a": 1}}"#, |f| f.count("completed").unwrap_err());
        assert_eq!(
            error.to_string(),
            "f.json, record 1: field `completed` is an object, and a finite number of at least 0 was expected"
        );
        let error = with(r#"{"n": 1.5}"#, |f| f.count("n").unwrap_err()).to_string();
        assert!(error.contains("field `n` is 1.5"), "{error}");
        assert!(with(r#"{"n": -1}"#, |f| f.number("n").is_err()));
        assert!(with(r#"{"n": true}"#, |f| f.text("n").is_err()));
    }

    #[test]
    fn missing_null_and_infinite_are_not_numbers_and_not_errors() {
        with(r#"{"a": null, "b": "inf", "c": "1,024.5", "d.e": 3, "f": {"g": 4}}"#, |f| {
            assert_eq!(f.number("x").unwrap(), None);
            assert_eq!(f.number("a").unwrap(), None);
            assert_eq!(f.number("b").unwrap(), None);
            assert_eq!(f.rate("b").unwrap(), Some(Rate::Unlimited));
            assert_eq!(f.number("c").unwrap(), Some(1024.5));
            assert_eq!(f.number("d.e").unwrap(), Some(3.0));
            assert_eq!(f.number("f.g").unwrap(), Some(4.0));
            assert_eq!(f.number("f.h.i").unwrap(), None);
        });
    }

    #[test]
    fn a_metric_that_is_zero_was_not_measured() {
        let json = r#"{"mean_tpot_ms": 0.0, "std_tpot_ms": 0.0, "p99_tpot_ms": 0.0, "mean_ttft_ms": 5}"#;
        let (values, remarks) = with(json, |f| f.values(ForeignFormat::VllmServe).unwrap());
        assert_eq!(values.len(), 1);
        assert_eq!((values[0].metric, values[0].value), (Metric::Ttft, 5e6));
        assert_eq!(remarks, ["TPOT is 0: nothing was timed, so it is left out"]);
    }

    #[test]
    fn a_unit_in_the_file_is_obeyed_and_an_unknown_one_is_an_error() {
        let ns = r#"{"inter_token_latency": {"unit": "ns", "avg": "3860101.11"}}"#;
        let (values, _) = with(ns, |f| f.values(ForeignFormat::Aiperf).unwrap());
        assert_eq!((values[0].metric, values[0].value), (Metric::Tpot, 3_860_101.11));
        let odd = r#"{"inter_token_latency": {"unit": "fortnights", "avg": 1}}"#;
        let error = with(odd, |f| f.values(ForeignFormat::Aiperf).unwrap_err()).to_string();
        assert!(error.contains("`inter_token_latency.unit` is \"fortnights\""), "{error}");
    }
}
