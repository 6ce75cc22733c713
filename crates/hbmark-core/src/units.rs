//! Quantities with their unit in the type.
//!
//! Enters: numbers from clocks, ledgers and data sheets. Leaves: newtypes that print themselves.
//! GB is 10^9 bytes and GiB is 2^30 bytes; the two are never mixed: bandwidth and traffic are decimal,
//! memory capacity is binary.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A span of time in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct Nanos(pub f64);

/// A count of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct Bytes(pub u64);

/// A count of floating-point operations (a multiply-add is two).
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct Flops(pub f64);

/// A rate of memory traffic, decimal.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct BytesPerSecond(pub f64);

/// A rate of arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct FlopsPerSecond(pub f64);

/// A rate of requests or tokens, without its unit: three decimals, and of less than a hundredth three digits.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub struct PerSecond(pub f64);

impl Nanos {
    /// The span as seconds.
    pub fn seconds(self) -> f64 {
        self.0 / 1e9
    }
    /// A span given in seconds.
    pub fn from_seconds(seconds: f64) -> Self {
        Self(seconds * 1e9)
    }
}

impl From<std::time::Duration> for Nanos {
    fn from(duration: std::time::Duration) -> Self {
        Self(duration.as_nanos() as f64)
    }
}

impl Bytes {
    /// The count as a float, for rates.
    pub fn as_f64(self) -> f64 {
        self.0 as f64
    }
    /// Traffic divided by time.
    pub fn per(self, time: Nanos) -> BytesPerSecond {
        BytesPerSecond(self.as_f64() / time.seconds())
    }
    /// The time this traffic takes at a bandwidth.
    pub fn at(self, bandwidth: BytesPerSecond) -> Nanos {
        Nanos::from_seconds(self.as_f64() / bandwidth.0)
    }
}

impl Flops {
    /// The time this arithmetic takes at a peak rate.
    pub fn at(self, peak: FlopsPerSecond) -> Nanos {
        Nanos::from_seconds(self.0 / peak.0)
    }
    /// Arithmetic divided by time.
    pub fn per(self, time: Nanos) -> FlopsPerSecond {
        FlopsPerSecond(self.0 / time.seconds())
    }
}

impl std::ops::Add for Bytes {
    type Output = Self;
    /// Saturates: counts of an untrusted file may be anything, and their sum is only shown.
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl std::iter::Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self(0), |a, b| a + b)
    }
}

/// Three significant digits, without an exponent.
fn three_digits(value: f64) -> String {
    let magnitude = value.abs();
    if magnitude >= 100.0 {
        format!("{value:.0}")
    } else if magnitude >= 10.0 {
        format!("{value:.1}")
    } else {
        format!("{value:.2}")
    }
}

fn scaled(f: &mut fmt::Formatter<'_>, value: f64, steps: &[(f64, &str)]) -> fmt::Result {
    let last = steps[steps.len() - 1];
    let (scale, unit) =
        steps.iter().find(|(scale, _)| value.abs() >= *scale * 0.9995).copied().unwrap_or(last);
    f.pad(&format!("{} {unit}", three_digits(value / scale)))
}

impl fmt::Display for PerSecond {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rate = self.0;
        // Three decimals of it would be a row of zeros.
        if rate > 0.0 && rate < 0.01 && rate.is_finite() {
            f.pad(&format!("{rate:.2e}"))
        } else {
            f.pad(&format!("{rate:.3}"))
        }
    }
}

impl fmt::Display for Nanos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A request that never ends has no unit.
        if self.0 == f64::INFINITY {
            return f.pad("∞");
        }
        scaled(f, self.0, &[(1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns")])
    }
}

impl Bytes {
    /// As a capacity: `80 GiB`, `15.5 GiB`, `256 MiB`.
    pub fn capacity(self) -> String {
        let gib = self.as_f64() / f64::from(1 << 30);
        if gib < 1.0 {
            let least = if self.0 > 0 { 1.0 } else { 0.0 };
            return format!("{:.0} MiB", (gib * 1024.0).max(least));
        }
        if gib.fract().abs() < 0.05 || gib >= 1000.0 {
            format!("{gib:.0} GiB")
        } else {
            format!("{gib:.1} GiB")
        }
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        scaled(f, self.as_f64(), &[(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")])
    }
}

impl fmt::Display for Flops {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        scaled(f, self.0, &[(1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1.0, "FLOP")])
    }
}

impl fmt::Display for BytesPerSecond {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        scaled(f, self.0, &[(1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1.0, "B/s")])
    }
}

impl fmt::Display for FlopsPerSecond {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        scaled(f, self.0, &[(1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1.0, "FLOP/s")])
    }
}

/// The whole part of a number: 0 of a negative number or NaN, [`u64::MAX`] of a number above it.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a cast saturates")]
pub fn whole(value: f64) -> u64 {
    value as u64
}

/// The nearest whole number, halves away from zero; bounded as [`whole`].
pub fn rounded(value: f64) -> u64 {
    whole(value.round())
}

/// [`whole`], of a count or an index.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a cast saturates")]
pub fn whole_count(value: f64) -> usize {
    value as usize
}

/// `1 row`, `3 rows`.
pub fn counted<N: Copy + fmt::Display + PartialEq + From<u8>>(count: N, one: &str) -> String {
    let plural = if one.ends_with('s') { "es" } else { "s" };
    format!("{count} {one}{}", if count == N::from(1) { "" } else { plural })
}

/// Seconds since the epoch as a date. *Source*: days to civil date by the proleptic Gregorian calendar's 400-year cycle.
pub fn rfc3339(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Years are counted from March, so that the leap day is the last of its year.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", second / 3600, second / 60 % 60, second % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_a_thing_is_no_plural() {
        assert_eq!([0_usize, 1, 2].map(|n| counted(n, "cell")), ["0 cells", "1 cell", "2 cells"]);
        assert_eq!(counted(1.0, "request"), "1 request");
    }

    #[test]
    fn a_capacity_is_binary_and_a_small_one_is_not_nothing() {
        let shown = [80 << 30, 31 << 29, 256 << 20, 1, 0].map(|bytes| Bytes(bytes).capacity());
        assert_eq!(shown, ["80 GiB", "15.5 GiB", "256 MiB", "1 MiB", "0 MiB"]);
    }

    #[test]
    fn a_rate_is_never_a_row_of_zeros() {
        let shown = [105.294_135, 1.0, 0.25, 0.01, 0.000_029_5, 0.0].map(|rate| PerSecond(rate).to_string());
        assert_eq!(shown, ["105.294", "1.000", "0.250", "0.010", "2.95e-5", "0.000"]);
    }

    #[test]
    fn quantities_print_three_digits_and_their_unit() {
        assert_eq!(Nanos(1_234.0).to_string(), "1.23 µs");
        assert_eq!(Nanos(999_900.0).to_string(), "1.00 ms");
        assert_eq!(Bytes(269_000_000).to_string(), "269 MB");
        assert_eq!(BytesPerSecond(4.8e12).to_string(), "4.80 TB/s");
        assert_eq!(format!("{:>10}", Nanos(5.0)), "   5.00 ns");
        assert_eq!(format!("{:>3}", Nanos(f64::INFINITY)), "  ∞");
    }

    #[test]
    fn traffic_over_bandwidth_is_time() {
        let time = Bytes(48_000_000_000).at(BytesPerSecond(4.8e12));
        assert!((time.0 - 1e7).abs() < 1e-3);
        assert!((Bytes(48_000_000_000).per(time).0 - 4.8e12).abs() < 1.0);
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00Z");
        assert_eq!(rfc3339(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(rfc3339(1_750_000_000), "2025-06-15T15:06:40Z");
    }
}
