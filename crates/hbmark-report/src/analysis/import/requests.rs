//! Many values of one latency as the figures a summary has.
//!
//! Enters: the values of single requests. Leaves: an object of statistics as summaries write it, so that the aliases read both alike. A
//! percentile that needs more values is left out; the largest value is there.

use serde_json::{Map, Value as Json};

use super::ImportError;
use super::fields::Fields;
use hbmark_core::stats::{mean, percentile_if_enough, sd};

/// The statistics of values in any order; `None` for none.
pub(super) fn group(mut values: Vec<f64>, unit: &str) -> Option<Json> {
    if values.is_empty() {
        return None;
    }
    values.sort_by(f64::total_cmp);
    let mut group = Map::new();
    group.insert("unit".into(), unit.into());
    group.insert("avg".into(), mean(&values).into());
    group.extend(sd(&values).map(|sd| ("std".to_owned(), sd.into())));
    for (name, p) in [("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99), ("p99.9", 0.999)] {
        group.extend(percentile_if_enough(&values, p).map(|v| (name.to_owned(), v.into())));
    }
    group.insert("min".into(), values[0].into());
    group.extend(values.last().map(|v| ("max".to_owned(), (*v).into())));
    Some(Json::Object(group))
}

/// The mean; `None` of no values.
pub(super) fn known_mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| mean(values))
}

/// A single value with its unit.
pub(super) fn single(value: f64, unit: &str) -> Json {
    serde_json::json!({ "unit": unit, "avg": value })
}

/// First and last of many moments.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reach {
    pub first: f64,
    pub last: f64,
}

impl Reach {
    pub fn none() -> Self {
        Self { first: f64::INFINITY, last: f64::NEG_INFINITY }
    }

    pub fn add(&mut self, from: f64, to: f64) {
        (self.first, self.last) = (self.first.min(from), self.last.max(to));
    }

    /// The time between them, where there is any.
    pub fn length(self) -> Option<f64> {
        let length = self.last - self.first;
        (length.is_finite() && length > 0.0).then_some(length)
    }
}

/// A difference of two moments of one record; `None` where one is missing, an error where they are in the wrong order.
pub(super) fn between(fields: &Fields<'_>, from: &str, to: &'static str) -> Result<Option<f64>, ImportError> {
    let (Some(begin), Some(end)) = (fields.number(from)?, fields.number(to)?) else { return Ok(None) };
    if end < begin {
        return Err(fields.out_of_order(to, end, from));
    }
    Ok(Some(end - begin))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_values_have_no_far_percentile() {
        let ten = group((1..=10).map(f64::from).collect(), "ms").unwrap();
        assert_eq!(
            (ten["avg"].as_f64(), ten["p50"].as_f64(), ten["max"].as_f64()),
            (Some(5.5), Some(5.0), Some(10.0))
        );
        assert!(ten.get("p90").is_none() && ten.get("p99").is_none());
        let many = group((1..=1000).map(f64::from).collect(), "ms").unwrap();
        assert_eq!((many["p99"].as_f64(), many.get("p99.9")), (Some(990.0), None));
        assert_eq!(group(Vec::new(), "ms"), None);
    }
}
