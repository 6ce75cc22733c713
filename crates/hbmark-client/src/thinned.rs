//! A bounded sample of an unbounded series: every value up to a number, and of more every second, fourth, ...
//!
//! Enters: values in time, each of a request. Leaves: values spread evenly over all of time, whose percentiles are those of the whole.

use hbmark_core::result::serving::Quantiles;

/// Values that are kept at most; no fewer than half as many, where there are so many.
const MOST: usize = 1 << 22;

/// A series, thinned.
#[derive(Debug, Clone, PartialEq)]
pub struct Thinned {
    /// With the request of each.
    values: Vec<(f64, u32)>,
    /// One in so many is kept.
    stride: u64,
    seen: u64,
    largest: Option<f64>,
}

impl Default for Thinned {
    fn default() -> Self {
        Self { values: Vec::new(), stride: 1, seen: 0, largest: None }
    }
}

impl Thinned {
    /// Adds a value of a request.
    pub fn push(&mut self, value: f64, request: usize) {
        if self.seen.is_multiple_of(self.stride) {
            if self.values.len() == MOST {
                halve(&mut self.values);
                self.stride *= 2;
            }
            if self.seen.is_multiple_of(self.stride) {
                self.values.push((value, u32::try_from(request).unwrap_or(u32::MAX)));
            }
        }
        self.seen += 1;
        self.largest = Some(self.largest.map_or(value, |largest| largest.max(value)));
    }

    /// The values that were kept, in their order, each with its request.
    pub fn values(&self) -> &[(f64, u32)] {
        &self.values
    }

    /// Values in all.
    pub fn seen(&self) -> u64 {
        self.seen
    }

    /// Quantiles of the values of some requests; where all were kept, or all count, with their largest.
    pub fn quantiles(&self, counts: impl Fn(usize) -> bool) -> Quantiles {
        let of = self.values.iter().filter(|(_, request)| counts(*request as usize));
        let kept = Quantiles::of(of.map(|(value, _)| Some(*value)));
        let max = if self.stride == 1 { kept.max } else { self.largest.map(Into::into) };
        Quantiles { max, ..kept }
    }
}

/// Keeps every second value.
fn halve<T>(series: &mut Vec<T>) {
    let mut keep = false;
    series.retain(|_| {
        keep = !keep;
        keep
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_series_is_kept_evenly_and_its_largest_value_exactly() {
        let mut series = Thinned::default();
        let count = 5 * MOST as u64 + 3;
        for value in 0..count {
            series.push(value as f64, 0);
        }
        let kept: Vec<f64> = series.values().iter().map(|(value, _)| *value).collect();
        assert!(kept.len() > MOST / 2 && kept.len() <= MOST);
        let stride = kept[1] - kept[0];
        assert!(kept.windows(2).all(|pair| (pair[1] - pair[0] - stride).abs() < 0.5), "evenly");
        assert!(kept[kept.len() - 1] + stride >= count as f64, "to the end");
        assert_eq!(series.seen(), count);
        assert_eq!(series.quantiles(|_| true).max, Some(((count - 1) as f64).into()));
    }

    #[test]
    fn quantiles_are_those_of_the_requests_that_count() {
        let mut series = Thinned::default();
        (0..10).for_each(|request| series.push(request as f64, request));
        let found = series.quantiles(|request| (2..5).contains(&request));
        assert_eq!((found.n, found.max), (3, Some(4.0.into())));
    }
}
