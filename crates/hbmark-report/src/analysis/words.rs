//! Numbers in sentences.

use std::fmt::Display;

use hbmark_core::units::Nanos;

/// `1 row`, `3 rows`.
pub fn counted<N: Copy + Display + PartialEq + From<u8>>(count: N, one: &str) -> String {
    let plural = if count == N::from(1) { "" } else { "s" };
    format!("{count} {one}{plural}")
}

/// A value of a configuration, a text without its quotation marks.
pub fn said(value: &serde_json::Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// The word for yes, for no, or for what is open.
pub fn answer(known: Option<bool>, [yes, no, open]: [&'static str; 3]) -> &'static str {
    match known {
        Some(true) => yes,
        Some(false) => no,
        None => open,
    }
}

/// A time among others that differ from it by little: to the microsecond, and long ones in seconds.
pub fn precise(ns: f64) -> String {
    match ns {
        _ if !ns.is_finite() => Nanos(ns).to_string(),
        _ if ns.abs() >= 1e9 => format!("{:.3} s", ns / 1e9),
        _ => format!("{:.3} ms", ns / 1e6),
    }
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
    fn a_long_time_is_in_seconds() {
        assert_eq!(precise(1_308_530e6), "1308.530 s");
        assert_eq!([12_345_678.0, 0.0].map(precise), ["12.346 ms", "0.000 ms"]);
        assert_eq!(precise(f64::INFINITY), "∞");
    }
}
