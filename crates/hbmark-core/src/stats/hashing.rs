//! Numbers that look random and are a function of what they are drawn for.

/// The step of splitmix64's sequence: 2^64 over the golden ratio, made odd.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// A 64-bit hash of a number: the first number of splitmix64 from that seed.
///
/// *Source*: SplitMix64 (Steele, Lea and Flood, 2014).
pub const fn splitmix64(number: u64) -> u64 {
    mixed(number.wrapping_add(STEP))
}

/// A 64-bit hash of two numbers, the same finaliser as [`splitmix64`]'s.
pub const fn splitmix64_of_two(a: u64, b: u64) -> u64 {
    mixed(a ^ b.wrapping_add(1).wrapping_mul(STEP))
}

/// The finaliser: every bit of the result depends on every bit of the number.
const fn mixed(number: u64) -> u64 {
    let number = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ number >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ number >> 31
}
