//! 4-bit floats: 0, ½, 1, 1½, 2, 3, 4, 6 and their opposites, the sign in bit 3.
//!
//! *Source*: OCP Microscaling Formats (MX) Specification 1.0, E2M1. Elements round to nearest, ties to the even code, and end at 6.

/// Twice the value of each code.
pub const DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// The largest value.
pub const LARGEST: f32 = 6.0;
/// The power of two below it.
pub const LARGEST_POWER: u32 = 2;

/// The value of a code.
pub fn to_f32(code: u8) -> f32 {
    f32::from(DOUBLED[usize::from(code & 15)]) * 0.5
}

/// The nearest code of a value that is divided by its scale; zero where that is not a number.
pub fn from_f32(value: f32) -> u8 {
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
        let values: Vec<f32> = (0..16).map(to_f32).collect();
        assert_eq!(values[..8], [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
        assert_eq!(values[9..], [-0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]);
        for code in 0..16 {
            // The zero of the other sign is the first.
            assert_eq!(from_f32(to_f32(code)), if code == 8 { 0 } else { code });
        }
    }

    #[test]
    fn values_round_to_the_nearest_code_and_ties_to_the_even_one() {
        let ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0].map(from_f32);
        assert_eq!(ties, [0, 2, 2, 4, 4, 6, 6]);
        assert_eq!([0.26, 0.74, 5.01, 7.9, -0.3, -100.0, f32::NAN].map(from_f32), [1, 1, 7, 7, 9, 15, 0]);
    }
}
