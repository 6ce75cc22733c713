//! Checks of the measured ceilings: ordered, repeatable, and from memory and not from a cache.

use super::{Check, Record};
use crate::engine::DeviceChoice;
use crate::measure::ceilings;
use crate::measure::protocol::ProtocolPreset;
use hbmark_core::result::Ceilings;
use hbmark_core::units::{BytesPerSecond, FlopsPerSecond};

/// A bandwidth probe must walk at least this many times the last cache.
const CACHE_FACTOR: f64 = 3.0;

/// Measures the ceilings of a device and checks them.
pub fn measured(device: DeviceChoice, record: &mut Record<'_>) {
    match ceilings::measure(device, ProtocolPreset::Quick, None) {
        Ok(Some(found)) => sane(&found, record),
        Ok(None) => {
            record(Check::failed("ceilings", "measured", format!("{device} has no probe in this build")));
        }
        Err(error) => record(Check::failed("ceilings", "measured", error.to_string())),
    }
}

fn sane(found: &Ceilings, record: &mut Record<'_>) {
    let read = found.read_bytes_per_s;
    record(Check::new(
        "ceilings",
        "read bandwidth is ordered and repeatable",
        read.low > 0.0 && read.low <= read.median && read.median <= read.high && read.high < 3.0 * read.low,
        format!(
            "{} to {}, median {}",
            BytesPerSecond(read.low),
            BytesPerSecond(read.high),
            BytesPerSecond(read.median)
        ),
    ));
    if let Some(cache) = found.last_cache_bytes {
        record(Check::new(
            "ceilings",
            "the working set lies beyond the last cache",
            found.working_set_bytes.as_f64() >= CACHE_FACTOR * cache.as_f64(),
            format!("{} over a cache of {cache}", found.working_set_bytes),
        ));
    }
    for (dtype, peak) in &found.gemm_flops_per_s {
        record(Check::new(
            "ceilings",
            format!("matrix products in {dtype} have a peak"),
            peak.median.is_finite() && peak.median > 0.0,
            FlopsPerSecond(peak.median).to_string(),
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_that_stays_in_the_cache_fails() {
        let spread =
            |median: f64| hbmark_core::result::Spread { median, low: median * 0.9, high: median * 1.1 };
        let found = Ceilings {
            read_bytes_per_s: spread(4e10),
            copy_bytes_per_s: spread(4e10),
            triad_bytes_per_s: spread(4e10),
            gemm_flops_per_s: [("f32".to_owned(), spread(1e11))].into(),
            launch_ns: None,
            working_set_bytes: hbmark_core::units::Bytes(32 << 20),
            last_cache_bytes: Some(hbmark_core::units::Bytes(32 << 20)),
            read_configuration: String::new(),
            gpu: None,
            disturbed: Vec::new(),
            age_s: None,
        };
        let mut checks = Vec::new();
        sane(&found, &mut |check| checks.push(check));
        let failed: Vec<&str> = checks.iter().filter(|c| !c.passed).map(|c| c.name.as_str()).collect();
        assert_eq!(failed, ["the working set lies beyond the last cache"]);
    }
}
