//! Numbers made readable; shared by the formats.

use super::document::Value;
use super::metrics::Unit;
use hbmark_core::result::Spread;
use hbmark_core::units::{Bytes, BytesPerSecond, Flops, Nanos, PerSecond, whole};

/// A number as wide as this is shown in a larger unit.
const WIDE: f64 = 10_000.0;
/// Unless one beside it would be less than this there.
const NARROW: f64 = 0.1;

/// A column of values in one unit and with one number of digits, so that they can be compared at a glance.
pub fn column(unit: Unit, values: &[Value]) -> Vec<String> {
    let known = |value: &Value| match value {
        Value::Finite(value) | Value::Disturbed(value) => Some(*value).filter(|v| v.is_finite()),
        Value::Doubtful(spread) => Some(spread.median).filter(|v| v.is_finite()),
        Value::Null | Value::Infinite | Value::Word(_) => None,
    };
    let present = || values.iter().filter_map(known);
    let smallest = present().filter(|v| *v != 0.0).fold(f64::INFINITY, |m, v| m.min(v.abs()));
    let largest = present().fold(0.0, |m: f64, v| m.max(v.abs()));
    let (own, wider) = (scale(unit, smallest), scale(unit, largest / 10.0));
    // Five digits before the point are harder to read than a small value with a zero before it.
    let wide = largest / own.0 >= WIDE && own != wider;
    if wide && smallest / wider.0 < NARROW {
        // No unit suits the largest and the smallest.
        return values.iter().map(|value| written(*value, |v| single(unit, v))).collect();
    }
    let (scale, suffix) = if wide { wider } else { own };
    let decimals = match unit {
        Unit::Fraction | Unit::Joules => 1,
        Unit::PerSecond if smallest >= 100.0 => 0,
        Unit::Count => usize::from(present().any(|v| v.fract() != 0.0)),
        // Three significant digits for the smallest value.
        _ => match smallest / scale {
            s if s < 10.0 => 2,
            s if s < 100.0 => 1,
            _ => usize::from(!smallest.is_finite()) * 2,
        },
    };
    values
        .iter()
        .map(|value| match value {
            Value::Doubtful(Spread { median, low, high }) if low < high => {
                let [median, low, high] = [median, low, high].map(|v| format!("{:.decimals$}", v / scale));
                format!("[{median}{suffix}, {low} to {high}]")
            }
            value => written(*value, |v| format!("{:.decimals$}{suffix}", v / scale)),
        })
        .collect()
}

/// A value among others that are not to be compared with it.
pub fn alone(unit: Unit, value: Value) -> String {
    written(value, |value| match unit {
        Unit::Nanoseconds => Nanos(value).to_string(),
        Unit::Fraction => format!("{:.1} %", value * 100.0),
        Unit::Count if value.fract() == 0.0 => format!("{value:.0}"),
        Unit::PerSecond if value > 0.0 && value < 0.01 => PerSecond(value).to_string(),
        _ if value.abs() >= 100.0 => format!("{value:.0}"),
        _ if value.abs() >= 1.0 || value == 0.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    })
}

/// A value with what is known of it.
fn written(value: Value, show: impl Fn(f64) -> String) -> String {
    match value {
        Value::Finite(value) if value.is_finite() => show(value),
        Value::Doubtful(Spread { median, low, high }) if low < high => {
            format!("[{}, {} to {}]", show(median), show(low), show(high))
        }
        // One sample has no range.
        Value::Doubtful(spread) => format!("[{}]", show(spread.median)),
        Value::Disturbed(value) if value.is_finite() => format!("[{}]", show(value)),
        Value::Null | Value::Finite(_) | Value::Disturbed(_) => "-".to_owned(),
        Value::Infinite => "∞".to_owned(),
        Value::Word(word) => word.to_owned(),
    }
}

/// The largest step of a unit in which the smallest value is still at least one.
fn scale(unit: Unit, smallest: f64) -> (f64, &'static str) {
    let pick = |steps: &[(f64, &'static str)]| {
        let fits = |step: &&(f64, &'static str)| smallest.is_finite() && smallest >= step.0 * 0.9995;
        steps.iter().find(fits).or(steps.last()).copied().unwrap_or((1.0, ""))
    };
    match unit {
        Unit::Nanoseconds => pick(&[(1e9, " s"), (1e6, " ms"), (1e3, " µs"), (1.0, " ns")]),
        Unit::Bytes => pick(&[(1e12, " TB"), (1e9, " GB"), (1e6, " MB"), (1e3, " kB"), (1.0, " B")]),
        Unit::BytesPerSecond => pick(&[(1e12, " TB/s"), (1e9, " GB/s"), (1e6, " MB/s")]),
        Unit::Flops => pick(&[(1e12, " TFLOP"), (1e9, " GFLOP"), (1e6, " MFLOP")]),
        Unit::Fraction => (0.01, " %"),
        Unit::Joules => pick(&[(1.0, " J"), (1e-3, " mJ")]),
        Unit::PerSecond | Unit::Count => (1.0, ""),
    }
}

/// One quantity on its own.
pub fn single(unit: Unit, value: f64) -> String {
    match unit {
        Unit::Nanoseconds => Nanos(value).to_string(),
        Unit::Bytes => Bytes(whole(value)).to_string(),
        Unit::BytesPerSecond => BytesPerSecond(value).to_string(),
        Unit::Flops => Flops(value).to_string(),
        Unit::Fraction | Unit::PerSecond | Unit::Joules | Unit::Count => {
            column(unit, &[value.into()]).swap_remove(0)
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_column_of_wide_numbers_is_shown_in_the_larger_unit() {
        let shown = |values: &[f64]| {
            super::column(super::Unit::Nanoseconds, &values.iter().map(|v| (*v).into()).collect::<Vec<_>>())
        };
        assert_eq!(shown(&[46_889_000.0, 812_000.0]), ["46.89 ms", "0.81 ms"]);
        assert_eq!(shown(&[8_889_000.0, 812_000.0]), ["8889 µs", "812 µs"]);
        assert_eq!(shown(&[46_889_000.0, 1_200.0]), ["46.9 ms", "1.20 µs"], "no unit suits both");
        assert_eq!(shown(&[1_308_530e6, 54.4e6]), ["1309 s", "54.4 ms"]);
    }

    use super::*;
    use hbmark_core::input::plain;

    #[test]
    fn a_column_has_one_unit_and_one_number_of_digits() {
        let column = |unit, values: &[Option<f64>]| {
            super::column(unit, &values.iter().map(|value| (*value).into()).collect::<Vec<_>>())
        };
        let shown = column(Unit::Nanoseconds, &[Some(13_303_641.0), Some(133_036_410.0), None]);
        assert_eq!(shown, ["13.3 ms", "133.0 ms", "-"]);
        assert_eq!(column(Unit::Fraction, &[Some(0.269), Some(0.9)]), ["26.9 %", "90.0 %"]);
        assert_eq!(column(Unit::Bytes, &[Some(0.0), None]), ["0.00 B", "-"]);
        assert_eq!(column(Unit::Count, &[Some(8.0)]), ["8"]);
    }

    #[test]
    fn a_value_alone_has_its_unit_and_a_count_no_decimals() {
        let alone = |unit, value: f64| super::alone(unit, value.into());
        assert_eq!(alone(Unit::Fraction, 0.034), "3.4 %");
        assert_eq!([0.0, 94.0, 9.1].map(|count| alone(Unit::Count, count)), ["0", "94", "9.10"]);
        assert_eq!(alone(Unit::PerSecond, 0.0), "0.00");
        assert_eq!(alone(Unit::PerSecond, 0.000_03), "3.00e-5");
    }

    #[test]
    fn control_characters_do_not_reach_a_terminal() {
        assert_eq!(plain("a\u{1b}[31mb\nc"), "a\u{fffd}[31mb\u{fffd}c");
        assert_eq!(plain("gpj\u{202e}exe\u{9b}2J"), "gpj\u{fffd}exe\u{fffd}2J");
    }
}
