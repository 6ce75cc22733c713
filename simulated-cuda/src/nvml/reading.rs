//! What the sensors of a simulated device show.
//!
//! Enters: the script, which device, the number of the sample, whether the device is in use. Leaves: a [`Reading`], the same for the same.
//! Units are NVML's.

use crate::launch::mix;
use crate::script::Script;

/// Bits of `nvmlClocksEventReasons`. *Source*: nvml.h.
pub const GPU_IDLE: u64 = 0x1;
pub const HW_SLOWDOWN: u64 = 0x8;
pub const SW_THERMAL: u64 = 0x20;
pub const HW_THERMAL: u64 = 0x40;
/// Time that each sample with a thermal fault adds to the violation counter. *Source*: chosen, of the order of a block.
const THERMAL_VIOLATION_NS: u64 = 50_000_000;
/// Degrees at which the clocks fall. *Source*: `nvidia-smi -q` of H100, "GPU T.Limit"; the same for all here.
pub const SLOWDOWN_CELSIUS: u32 = 87;
/// Part of the highest power that a busy device draws, in percent. *Source*: chosen, as of decoding, which memory limits.
pub const BUSY_POWER_PERCENT: u32 = 62;

/// One look at a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reading {
    pub sm_clock_mhz: u32,
    pub memory_clock_mhz: u32,
    pub power_milliwatts: u32,
    pub temperature_celsius: u32,
    pub reasons: u64,
    /// Since the driver was loaded.
    pub thermal_violation_ns: u64,
}

impl Reading {
    /// The reading of a sample, counted from 1. A device in use has allocations of this process.
    #[must_use]
    pub fn of(script: &Script, index: u32, sample: u64, in_use: bool) -> Self {
        let device = script.device;
        let noise = |quantity, values| noise([script.seed, u64::from(index), sample, quantity], values);
        let hot = script.thermal.is_some_and(|span| span.holds(sample));
        let slow = hot || script.clock.is_some_and(|span| span.holds(sample));
        let busy_clock = if slow { device.max_sm_clock_mhz * 3 / 5 } else { device.max_sm_clock_mhz };
        // Real clocks move in steps of 15 MHz and often stand one below the highest.
        let sm_clock = if in_use { busy_clock - 15 * noise(0, 2) } else { device.idle_sm_clock_mhz };
        let busy_power = device.max_power_watts * 10 * BUSY_POWER_PERCENT;
        let power = if in_use { busy_power } else { device.idle_power_watts * 1000 };
        let temperature = if in_use { 52 } else { 31 };
        let reasons = if in_use { 0 } else { GPU_IDLE };
        let thermal = if hot { HW_SLOWDOWN | SW_THERMAL | HW_THERMAL } else { 0 };
        let hot_samples = script.thermal.map_or(0, |span| span.passed(sample));
        Self {
            sm_clock_mhz: sm_clock,
            memory_clock_mhz: device.memory_clock_mhz,
            power_milliwatts: power + noise(1, power / 50),
            temperature_celsius: if hot { SLOWDOWN_CELSIUS } else { temperature } + noise(2, 3),
            reasons: reasons | thermal,
            thermal_violation_ns: hot_samples * THERMAL_VIOLATION_NS,
        }
    }
}

/// A number below `values` that depends on all words.
fn noise(words: [u64; 4], values: u32) -> u32 {
    let mixed = words.iter().fold(0, |state, word| mix(state ^ word));
    (((mixed >> 32) * u64::from(values)) >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readings_repeat_and_move_a_little() {
        let script = Script::parse("seed=3").unwrap();
        let readings: Vec<Reading> = (1..=200).map(|sample| Reading::of(&script, 0, sample, true)).collect();
        assert_eq!(readings[17], Reading::of(&script, 0, 18, true));
        for reading in &readings {
            assert!(
                [1965, 1980].contains(&reading.sm_clock_mhz) && reading.memory_clock_mhz == 3201,
                "{reading:?}"
            );
            assert!((434_000..443_000).contains(&reading.power_milliwatts), "{reading:?}");
            assert_eq!((reading.reasons, reading.thermal_violation_ns), (0, 0));
        }
        assert!(
            readings.iter().any(|reading| reading.sm_clock_mhz == 1965)
                && readings.iter().any(|reading| reading.sm_clock_mhz == 1980)
        );
        assert!(readings.windows(2).any(|pair| pair[0].power_milliwatts != pair[1].power_milliwatts));
        let other = Script::parse("seed=4").unwrap();
        assert!(
            (1..=20)
                .any(|sample| Reading::of(&script, 0, sample, true) != Reading::of(&other, 0, sample, true))
        );
    }

    #[test]
    fn heat_shows_in_bits_clocks_and_the_counter_and_passes() {
        let script = Script::parse("thermal=5+2").unwrap();
        let at = |sample| Reading::of(&script, 0, sample, true);
        assert_eq!([4, 5, 6, 7].map(|sample| at(sample).reasons), [0, 0x68, 0x68, 0]);
        assert_eq!(
            [4, 5, 6, 7, 50].map(|sample| at(sample).thermal_violation_ns / 50_000_000),
            [0, 1, 2, 2, 2]
        );
        assert!(
            at(5).sm_clock_mhz < 1200
                && at(5).temperature_celsius >= SLOWDOWN_CELSIUS
                && at(7).sm_clock_mhz > 1900
        );
    }

    #[test]
    fn a_clock_may_fall_without_a_reason() {
        let script = Script::parse("clock=2+1,device=a100").unwrap();
        let at = |sample| Reading::of(&script, 0, sample, true);
        assert_eq!([1, 2, 3].map(|sample| at(sample).sm_clock_mhz < 900), [false, true, false]);
        assert_eq!(at(2).reasons, 0);
    }

    #[test]
    fn a_device_without_work_is_idle() {
        let reading = Reading::of(&Script::default(), 0, 1, false);
        assert_eq!((reading.reasons, reading.sm_clock_mhz), (GPU_IDLE, 345));
    }
}
