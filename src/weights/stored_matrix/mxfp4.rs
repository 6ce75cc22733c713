//! mxfp4: 4-bit floats (e2m1) that share a power of two with the 31 beside them.
//!
//! *Source*: OCP Microscaling Formats (MX) Specification 1.0: elements 0, ½, 1, 1½, 2, 3, 4, 6 and their opposites, the sign in bit 3; a scale is
//! an e8m0 byte, `2^(byte − 127)`, 255 no number. Conversion as in its section 6.3: the scale is the power of two of the largest magnitude,
//! less that of the format's own largest element; elements round to nearest, ties to the even code, and end at 6.

/// Twice the value of each code.
pub const DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// The scale byte that is no number.
pub const NAN_SCALE: u8 = 255;

/// Of the largest element: 6 lies between 2² and 2³.
const LARGEST_POWER: u32 = 2;

/// The power of two of a scale byte.
#[must_use]
pub fn power(scale: u8) -> f32 {
    match scale {
        // 2^−127 is denormal.
        0 => f32::from_bits(1 << 22),
        NAN_SCALE => f32::NAN,
        scale => f32::from_bits(u32::from(scale) << 23),
    }
}

/// The value of a code under a scale.
#[must_use]
pub fn value(code: u8, scale: u8) -> f32 {
    f32::from(DOUBLED[usize::from(code & 15)]) * 0.5 * power(scale)
}

/// The scale of values of which this is the largest magnitude.
pub(super) fn scale_of(largest: f32) -> u8 {
    let exponent = largest.min(f32::MAX).to_bits() >> 23;
    u8::try_from(exponent.saturating_sub(LARGEST_POWER)).unwrap_or(NAN_SCALE - 1)
}

/// The nearest code of a value that is divided by its scale; zero where that is no number.
pub(super) fn nearest(value: f32) -> u8 {
    // Half way from each code to the next one: ties go to the even code.
    const HALF_WAYS: [f32; 7] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
    let magnitude = value.abs();
    let mut code = 0;
    for (below, half_way) in (0u8..).zip(HALF_WAYS) {
        let up = if below % 2 == 1 { magnitude >= half_way } else { magnitude > half_way };
        code += u8::from(up);
    }
    if value < 0.0 { code | 8 } else { code }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_those_of_the_specification() {
        let values: Vec<f32> = (0..16).map(|code| value(code, 127)).collect();
        assert_eq!(values[..8], [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
        assert_eq!(values[9..], [-0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]);
        assert_eq!((value(7, 129), value(2, 0), power(254)), (24.0, 2f32.powi(-127), 2f32.powi(127)));
        assert!(value(1, NAN_SCALE).is_nan());
        for code in 0..16 {
            // The zero of the other sign is the first.
            assert_eq!(nearest(value(code, 127)), if code == 8 { 0 } else { code });
        }
    }

    #[test]
    fn values_round_to_the_nearest_code_and_ties_to_the_even_one() {
        let ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0].map(nearest);
        assert_eq!(ties, [0, 2, 2, 4, 4, 6, 6]);
        assert_eq!([0.26, 0.74, 5.01, 7.9, -0.3, -100.0, f32::NAN].map(nearest), [1, 1, 7, 7, 9, 15, 0]);
    }

    #[test]
    fn the_scale_brings_the_largest_value_between_four_and_eight() {
        assert_eq!([6.0, 4.0, 7.99, 3.99, 1.0].map(scale_of), [127, 127, 127, 126, 125]);
        assert_eq!([0.0, f32::MIN_POSITIVE, f32::INFINITY].map(scale_of), [0, 0, 252]);
    }
}
