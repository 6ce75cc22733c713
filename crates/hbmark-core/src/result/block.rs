//! Blocks of steps as measured, and which of them count.
//!
//! Raw samples are kept, so everything that is computed from them can be computed again from a saved file.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::cause::Cause;
use super::cell::Phase;
use crate::stats;
use crate::units::Bytes;

/// One block of steps as measured.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Block {
    /// Which randomised visit of the cell it belongs to.
    pub visit: usize,
    /// Start since the run began.
    pub at_ns: f64,
    /// Device span of each step (D).
    pub step_ns: Vec<f64>,
    /// Interval between step ends as the host sees it (I).
    pub interval_ns: Vec<f64>,
    /// Wall time of the whole block on the host's clock: the cross-check of the timeline.
    pub wall_ns: f64,
    /// From the first mark of the timeline to the last: an independent clock over the same block. Null in files that had none.
    #[serde(default)]
    pub timeline_ns: Option<f64>,
    /// Memory in use after the block: of the device, or on a CPU the resident set without the monitor's own.
    #[serde(default)]
    pub memory_bytes: Option<Bytes>,
    /// The canary beside this block over the session's canary: 1.02 is 2 % slow.
    pub canary_ratio: Option<f64>,
    /// Why the block does not count, if it does not. Never a value.
    pub rejected: Option<Cause>,
    /// Conditions during the block that do not reject it.
    pub conditions: Vec<Cause>,
    pub telemetry: Option<BlockTelemetry>,
}

/// Telemetry of a block.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct BlockTelemetry {
    pub sm_clock_mhz: Option<f64>,
    pub memory_clock_mhz: Option<f64>,
    pub power_watts: Option<f64>,
    pub temperature_celsius: Option<f64>,
    pub throttle_reasons: Vec<String>,
    /// Joules spent by the device (NVML energy counter, or RAPL package).
    pub energy_joules: Option<f64>,
    /// CPU cores busy with other processes.
    pub foreign_cores: Option<f64>,
    /// Cores stolen by the hypervisor.
    pub steal_cores: Option<f64>,
    pub major_faults: Option<u64>,
    pub minor_faults: Option<u64>,
    pub cpu_frequency_mhz: Option<f64>,
    /// Other processes with a context on the measured GPU.
    #[serde(default)]
    pub gpu_other_processes: Option<usize>,
}

/// The blocks that count.
pub fn accepted(blocks: &[Block]) -> impl Iterator<Item = &Block> {
    blocks.iter().filter(|b| b.rejected.is_none())
}

/// Which times of a block a phase is judged by: the interval between step ends for decode, the device span for prefill.
#[must_use]
pub fn judged_times(phase: Phase, block: &Block) -> &[f64] {
    match phase {
        Phase::Decode => &block.interval_ns,
        Phase::Prefill => &block.step_ns,
    }
}

/// Means over the steps of the accepted blocks, `merge` consecutive blocks together; `times` picks the times of a block. Every
/// step weighs the same, and a last group of fewer blocks is left out.
#[must_use]
pub fn block_means(blocks: &[Block], merge: usize, times: impl Fn(&Block) -> &[f64]) -> Vec<f64> {
    let accepted: Vec<&Block> = accepted(blocks).collect();
    accepted
        .chunks_exact(merge.max(1))
        .map(|chunk| {
            let steps: Vec<f64> = chunk.iter().flat_map(|block| times(block)).copied().collect();
            stats::mean(&steps)
        })
        .collect()
}
