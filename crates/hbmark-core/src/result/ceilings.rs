//! The ceilings of a device: measured in this session, and of its data sheet.
//!
//! Enters: figures from the probe (`measure::probe`) and rows of `models/devices.toml`. Leaves: the denominators of every
//! percentage in a report.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::cause::Cause;
use crate::units::Bytes;

/// A measured rate: the best configuration's median, and its lowest and highest repetition.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Spread {
    pub median: f64,
    pub low: f64,
    pub high: f64,
}

impl Spread {
    /// Median, lowest and highest of the usable values; none without one.
    pub fn of(values: &[f64]) -> Option<Self> {
        let usable: Vec<f64> = values.iter().copied().filter(|v| v.is_finite() && *v > 0.0).collect();
        let low = usable.iter().copied().reduce(f64::min)?;
        let high = usable.iter().copied().reduce(f64::max)?;
        Some(Self { median: crate::stats::median(&usable), low, high })
    }
}

/// A read ceiling whose repetitions range further than this, relative to their median, was not measured on a steady machine.
const STEADY_RANGE: f64 = 0.25;

/// Ceilings measured on the device in this session.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Ceilings {
    /// Read-only bandwidth: the denominator of decode, which is 99 % reads.
    pub read_bytes_per_s: Spread,
    /// Copy bandwidth, both directions counted.
    pub copy_bytes_per_s: Spread,
    /// STREAM triad bandwidth, three streams counted.
    pub triad_bytes_per_s: Spread,
    /// Matrix-product peak by dtype name (`f32`, `bf16`, `f16`).
    pub gemm_flops_per_s: BTreeMap<String, Spread>,
    /// Time from launching an empty kernel (GPU) or waking the thread pool (CPU) to its end.
    pub launch_ns: Option<Spread>,
    /// Bytes the bandwidth probes walked; must be well beyond the last cache.
    pub working_set_bytes: Bytes,
    /// Last-level cache (L2 on a GPU, L3 on a CPU), where the system reports it.
    pub last_cache_bytes: Option<Bytes>,
    /// Threads, or the winning grid and unroll, of the read probe.
    pub read_configuration: String,
    /// What only the probe of a GPU measures.
    #[serde(default)]
    pub gpu: Option<GpuCeilings>,
    /// What disturbed the probe.
    #[serde(default)]
    pub disturbed: Vec<Cause>,
    /// Seconds from their measurement to this run, where they were kept from a run before.
    #[serde(default)]
    pub age_s: Option<f64>,
}

impl Ceilings {
    /// Whether a copy moved more bytes a second than every read: the memory gives more than reads alone take, as where each direction has lanes of its own.
    pub fn copy_exceeds_read(&self) -> bool {
        self.copy_bytes_per_s.median > self.read_bytes_per_s.high
    }

    /// Why nothing should rest on them: what disturbed the probe, or a range over its repetitions that a steady machine does not have.
    pub fn doubt(&self) -> Option<Cause> {
        let Spread { median, low, high } = self.read_bytes_per_s;
        let unsteady = (high - low) / median > STEADY_RANGE;
        let unsteady =
            unsteady.then_some(Cause::CeilingUnsteady { low_bytes_per_s: low, high_bytes_per_s: high });
        self.disturbed.first().cloned().or(unsteady)
    }
}

/// Ceilings beside the roofline's own, of a GPU.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct GpuCeilings {
    /// Write-only bandwidth.
    pub write_bytes_per_s: Option<Spread>,
    /// Read bandwidth of a buffer that the L2 cache holds.
    pub cache_read_bytes_per_s: Option<Spread>,
    /// Matrix-product rates by dtype name after seconds of load, when the clock has come down to what power and heat allow.
    pub sustained_gemm_flops_per_s: BTreeMap<String, Spread>,
    /// What one more kernel adds to the replay of a graph.
    pub graph_node_ns: Option<Spread>,
    /// Copies over the bus, from and to pinned memory of the host.
    pub host_to_device_bytes_per_s: Option<Spread>,
    pub device_to_host_bytes_per_s: Option<Spread>,
}

/// What the links between the GPUs of a machine give.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct LinkCeilings {
    /// Reads by kernels of the GPU of the row in memory of the GPU of the column, one pair at a time; null for its own.
    pub read_bytes_per_s: Vec<Vec<Option<Spread>>>,
    /// Writes likewise.
    pub write_bytes_per_s: Vec<Vec<Option<Spread>>>,
    /// Sums over all of these GPUs as a tensor parallel step makes them, from a graph.
    pub all_reduce: Vec<AllReduceTime>,
    /// What was not measured, and why.
    #[serde(default)]
    pub notes: Vec<String>,
}

/// The time of a sum over GPUs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct AllReduceTime {
    /// Of the sum, in f32.
    pub bytes: Bytes,
    /// What made it: `one-shot`, our kernel by which each GPU reads the sums of all others whole; `two-shot`, our kernels by which it reads a part of
    /// them, and the finished parts of the others; or a library, as `NCCL 2.29.2`.
    pub by: String,
    pub time_ns: Spread,
}

/// One row of the datasheet table, `models/devices.toml`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct DeviceSpec {
    /// The short name on the command line: `h100-sxm`.
    pub name: String,
    /// The product name as NVML reports it, or its common name.
    pub product: String,
    pub bandwidth_bytes_per_s: f64,
    pub memory_bytes: Bytes,
    pub l2_bytes: Option<Bytes>,
    /// Dense (not sparse) peaks by dtype name: `bf16`, `f16`, `f32`, `fp8`, `int8`, `fp4`.
    pub dense_flops_per_s: BTreeMap<String, f64>,
    /// Where the figures come from: vendor document and date read.
    pub source: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_is_median_lowest_and_highest() {
        assert_eq!(Spread::of(&[3.0, 1.0, 2.0]), Some(Spread { median: 2.0, low: 1.0, high: 3.0 }));
        assert_eq!(Spread::of(&[4.0, 1.0]), Some(Spread { median: 2.5, low: 1.0, high: 4.0 }));
        assert_eq!(Spread::of(&[]), None);
    }
}
