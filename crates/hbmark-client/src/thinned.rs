//! A bounded sample of an unbounded series: every value up to a number, and of more every second, fourth, ...
//!
//! Enters: values in time. Leaves: values spread evenly over all of time, whose percentiles are those of the whole.

/// Values that are kept at most; no fewer than half as many, where there are so many.
const MOST: usize = 1 << 20;

/// A series, thinned.
#[derive(Debug, Clone, PartialEq)]
pub struct Thinned {
    values: Vec<f64>,
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
    /// Adds a value.
    pub fn push(&mut self, value: f64) {
        if self.seen.is_multiple_of(self.stride) {
            if self.values.len() == MOST {
                halve(&mut self.values);
                self.stride *= 2;
            }
            if self.seen.is_multiple_of(self.stride) {
                self.values.push(value);
            }
        }
        self.seen += 1;
        self.largest = Some(self.largest.map_or(value, |largest| largest.max(value)));
    }

    /// The values that were kept, in their order.
    pub fn values(&self) -> &[f64] {
        &self.values
    }

    /// Values in all.
    pub fn seen(&self) -> u64 {
        self.seen
    }

    /// The largest of all, kept or not.
    pub fn largest(&self) -> Option<f64> {
        self.largest
    }
}

/// Keeps every second value.
pub fn halve<T>(series: &mut Vec<T>) {
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
            series.push(value as f64);
        }
        let kept = series.values();
        assert!(kept.len() > MOST / 2 && kept.len() <= MOST);
        let stride = kept[1] - kept[0];
        assert!(kept.windows(2).all(|pair| (pair[1] - pair[0] - stride).abs() < 0.5), "evenly");
        assert!(kept[kept.len() - 1] + stride >= count as f64, "to the end");
        assert_eq!((series.seen(), series.largest()), (count, Some((count - 1) as f64)));
    }
}
