//! Numbers in sentences.

pub use hbmark_core::units::counted;

use hbmark_core::units::Nanos;

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
    fn a_long_time_is_in_seconds() {
        assert_eq!(precise(1_308_530e6), "1308.530 s");
        assert_eq!([12_345_678.0, 0.0].map(precise), ["12.346 ms", "0.000 ms"]);
        assert_eq!(precise(f64::INFINITY), "∞");
    }
}
