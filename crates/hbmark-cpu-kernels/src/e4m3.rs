//! 8-bit floats: a sign, four bits of exponent (bias 7), three of mantissa; no infinities, and the largest value is 448.
//!
//! Enters: a float, or a code. Leaves: the other. *Source*: OCP 8-bit floating point specification, E4M3.

use half::f16;

/// The largest value.
pub const LARGEST: f32 = 448.0;
/// The power of two below it.
pub const LARGEST_POWER: u32 = 8;

/// Moved up by seven places a code is the f16 of this much less: f16 has one bit of exponent more, whose bias is 15.
pub const BELOW_F16: f32 = 256.0;

/// The value of a code that is not NaN, so much less.
pub fn below_f16(code: u8) -> f16 {
    f16::from_bits(u16::from(code & 0x80) << 8 | u16::from(code & 0x7f) << 7)
}

/// The value of a code that is not NaN.
pub fn to_f32(code: u8) -> f32 {
    below_f16(code).to_f32() * BELOW_F16
}

/// Whether a code is NaN: the only one of its sign.
pub fn is_nan(code: u8) -> bool {
    code & 0x7f == 0x7f
}

/// The nearest code, ties to even; beyond the largest value that, and 0 for what is not a number.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "at most 16 steps of one exponent"
)]
pub fn from_f32(value: f32) -> u8 {
    if value.is_nan() {
        return 0;
    }
    let size = value.abs().min(LARGEST);
    // Below 2⁻⁶ steps are those of 2⁻⁶; above, one in the last of three places.
    let exponent = ((size.to_bits() >> 23).cast_signed() - 127).max(-6);
    let steps = (size / 2f32.powi(exponent - 3)).round_ties_even() as u8;
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    sign | ((((exponent + 6) as u8) << 3) + steps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_have_the_values_of_the_specification() {
        for (code, value) in [
            (0x00, 0.0),
            (0x01, 2f32.powi(-9)),
            (0x07, 7.0 * 2f32.powi(-9)),
            (0x08, 2f32.powi(-6)),
            (0x38, 1.0),
            (0x39, 1.125),
            (0x7e, 448.0),
            (0xfe, -448.0),
            (0xb8, -1.0),
        ] {
            assert_eq!(to_f32(code).to_bits(), value.to_bits(), "{code:#x}");
        }
    }

    #[test]
    fn every_code_comes_back_and_halves_go_to_the_even_one() {
        for code in (0..=0x7e).chain(0x80..=0xfe) {
            assert_eq!(from_f32(to_f32(code)), code, "{code:#x}");
        }
        for code in 0..0x7e {
            let (low, high) = (to_f32(code), to_f32(code + 1));
            let even = if code % 2 == 0 { code } else { code + 1 };
            assert_eq!(from_f32(f32::midpoint(low, high)), even, "{code:#x}");
            assert_eq!(from_f32(low + (high - low) * 0.499), code, "{code:#x}");
        }
    }

    #[test]
    fn what_is_too_large_is_the_largest_and_what_is_no_number_is_zero() {
        assert_eq!([from_f32(1e9), from_f32(f32::NEG_INFINITY), from_f32(f32::NAN)], [0x7e, 0xfe, 0]);
    }
}
