//! Blocks of steps as measured, and which of them count.
//!
//! Raw samples are kept, so everything that is computed from them can be computed again from a saved file.

use serde::{Deserialize, Serialize};

use super::cause::Cause;
use super::cell::Phase;
use super::environment::Limits;
use crate::stats::{self, CONFIDENCE, Interval};
use crate::units::Bytes;

/// One block of steps as measured.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
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
    /// Different experts of a layer that a step met, on average over layers and steps, where the engine counts them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts_met: Option<f64>,
    /// The canary beside this block over the session's canary: 1.02 is 2 % slow.
    pub canary_ratio: Option<f64>,
    /// The rate at which the canary read memory beside this block. Null of a GPU, whose memory does not change its rate, and where the
    /// canary's buffer may be in a cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_bytes_per_s: Option<f64>,
    /// Why the block does not count, if it does not. Never a value.
    pub rejected: Option<Cause>,
    /// Conditions during the block that do not reject it.
    pub conditions: Vec<Cause>,
    pub telemetry: Option<BlockTelemetry>,
}

/// Telemetry of a block.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
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
    /// Cores that a CPU quota held back. Null where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_back_cores: Option<f64>,
    /// Threads of the engine that were left out because another program had their processor, on average over the block's jobs. Null of engines
    /// that leave none out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads_away: Option<f64>,
    pub major_faults: Option<u64>,
    pub minor_faults: Option<u64>,
    pub cpu_frequency_mhz: Option<f64>,
    /// Other processes with a context on the measured GPU.
    #[serde(default)]
    pub gpu_other_processes: Option<usize>,
}

/// The host's clock and the timeline may disagree over a block by this much, plus [`CLOCK_SLACK_NS`].
const CLOCK_TOLERANCE: f64 = 0.01;

/// What a synchronise may add at the ends of a block.
const CLOCK_SLACK_NS: f64 = 200_000.0;

impl Block {
    /// What the clocks of this block may differ by.
    pub fn clock_slack_ns(&self) -> f64 {
        self.wall_ns * CLOCK_TOLERANCE + CLOCK_SLACK_NS
    }

    /// Whether two independent clocks saw the same block. The timeline's span lies inside the host's: it is never longer, and shorter
    /// only by what the host does after the last mark, which is no more than the largest wait between two steps.
    pub fn clocks_agree(&self, spanned_ns: f64) -> bool {
        let slack = self.clock_slack_ns();
        let waits = self.interval_ns.iter().zip(&self.step_ns).map(|(interval, span)| interval - span);
        let longest_wait = waits.fold(0.0, f64::max);
        (self.wall_ns - slack - longest_wait..=self.wall_ns + slack).contains(&spanned_ns)
    }
}

impl BlockTelemetry {
    /// The throttle reasons that mean that the device ran slower than its own clocks.
    pub fn slowed_by(&self) -> Vec<String> {
        let slows = |name: &&String| {
            let reasons = [
                "hw_slowdown",
                "hw_thermal",
                "hw_power_brake",
                "sw_thermal",
                "thermal_violation",
                "cpu_thermal",
            ];
            reasons.contains(&name.as_str())
        };
        self.throttle_reasons.iter().filter(slows).cloned().collect()
    }

    /// The cause for which a block with this telemetry does not count.
    pub fn rejects(&self, limits: &Limits) -> Option<Cause> {
        let reasons = self.slowed_by();
        if !reasons.is_empty() {
            return Some(Cause::Throttled { reasons });
        }
        let held_back = self.held_back_cores.filter(|cores| *cores > limits.steal_cores);
        held_back
            .map(|cores| Cause::CpuQuota { cores })
            .or_else(|| self.short_of_threads())
            .or_else(|| load_rejects(self.foreign_cores, self.steal_cores, limits))
    }

    /// The cause for which a block does not count that too many threads were away from: as much as other programs may have of all processors.
    pub fn short_of_threads(&self) -> Option<Cause> {
        let away = self.threads_away.filter(|threads| *threads > Limits::default().foreign_cores);
        away.map(|threads| Cause::ThreadsAway { threads })
    }
}

/// The cause for which blocks beside such a load do not count; of two the load.
pub fn load_rejects(foreign_cores: Option<f64>, steal_cores: Option<f64>, limits: &Limits) -> Option<Cause> {
    let foreign = foreign_cores.filter(|cores| *cores > limits.foreign_cores);
    let steal = || steal_cores.filter(|cores| *cores > limits.steal_cores);
    foreign
        .map(|cores| Cause::ForeignLoad { cores })
        .or_else(|| steal().map(|cores| Cause::CpuSteal { cores }))
}

/// The blocks that count.
pub fn accepted(blocks: &[Block]) -> impl Iterator<Item = &Block> {
    blocks.iter().filter(|b| b.rejected.is_none())
}

/// Which times of a block a phase is judged by: the interval between step ends over a cache, the device span for prefill.
pub fn judged_times(phase: Phase, block: &Block) -> &[f64] {
    match phase {
        Phase::Decode | Phase::Verify { .. } => &block.interval_ns,
        Phase::Prefill => &block.step_ns,
    }
}

/// Means over the steps of the accepted blocks, `merge` consecutive blocks together; `times` picks the times of a block. Every
/// step weighs the same, and a last group of fewer blocks is left out.
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

/// The interval of what [`block_means`] has the values of. Blocks of one visit share the clock, the heat and the memory of that minute: where visits
/// lie apart, the interval is that of the visits.
pub fn block_interval(blocks: &[Block], merge: usize, times: impl Fn(&Block) -> &[f64]) -> Option<Interval> {
    let accepted: Vec<&Block> = accepted(blocks).collect();
    let visits: Vec<usize> = accepted.chunks_exact(merge.max(1)).map(|chunk| chunk[0].visit).collect();
    stats::t_interval_log_of_groups(&block_means(blocks, merge, times), &visits, CONFIDENCE)
}
