//! e8m0: powers of two that a group of small floats shares, a byte each.
//!
//! *Source*: OCP Microscaling Formats (MX) Specification 1.0: `2^(byte − 127)`, 255 no number. Conversion as in its section 6.3: the scale is the power
//! of two of the largest magnitude, less that of the largest element of the format.

/// The byte that is not a number.
pub const NAN: u8 = 255;

/// The power of two of a byte.
pub fn power(scale: u8) -> f32 {
    match scale {
        // 2^−127 is denormal.
        0 => f32::from_bits(1 << 22),
        NAN => f32::NAN,
        scale => f32::from_bits(u32::from(scale) << 23),
    }
}

/// The scale of values of which this is the largest magnitude, for elements of which the largest lies above this power of two.
pub fn scale_of(largest: f32, largest_power: u32) -> u8 {
    let exponent = largest.min(f32::MAX).to_bits() >> 23;
    u8::try_from(exponent.saturating_sub(largest_power)).unwrap_or(NAN - 1)
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "powers of two, which f32 holds exactly")]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_powers_of_two() {
        assert_eq!([127, 129, 254].map(power), [1.0, 4.0, 2f32.powi(127)]);
        assert_eq!(power(0), 2f32.powi(-127));
        assert!(power(NAN).is_nan());
    }

    #[test]
    fn the_scale_brings_the_largest_value_to_the_power_of_the_largest_element() {
        assert_eq!(
            [6.0, 4.0, 7.99, 3.99, 1.0].map(|largest| scale_of(largest, 2)),
            [127, 127, 127, 126, 125]
        );
        assert_eq!([448.0, 256.0, 511.0, 255.0].map(|largest| scale_of(largest, 8)), [127, 127, 127, 126]);
        assert_eq!([0.0, f32::MIN_POSITIVE, f32::INFINITY].map(|largest| scale_of(largest, 2)), [0, 0, 252]);
    }
}
