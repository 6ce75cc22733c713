//! The monitor of a real device: telemetry and a canary around each block.
//!
//! Enters: a device. Leaves: a [`Monitor`] for the protocol. It reads the machine's state and never the times of a block's steps.

use std::collections::VecDeque;

use super::canary::{Baseline, Canary};
use super::ceilings;
use super::probe::ProbeError;
use super::protocol::{BlockContext, Monitor, WindowLoad};
use crate::engine::DeviceChoice;
use crate::machine::environment;
use crate::machine::nvml::Gpu;
use crate::machine::telemetry::{HostTelemetry, NvmlTelemetry, Telemetry, verdict};
use hbmark_core::result::{Cause, Limits, MAX_CANARY_TOLERANCE};
use hbmark_core::stats;
use hbmark_core::units::Bytes;

/// Canary runs that give its baseline and its own noise.
const BASELINE_RUNS: usize = 25;

/// On a CPU the canary is compared with the median of its last runs: on shared hosts memory bandwidth shifts for minutes at a time,
/// and only a sudden change shows that a block differs from its neighbours.
const CPU_WINDOW: usize = 5;

/// The tolerance of a CPU's canary: cores share memory bandwidth with other work of the host.
const CPU_TOLERANCE: (f64, f64) = (0.10, MAX_CANARY_TOLERANCE);

/// The least tolerance of a GPU's: a fraction of a millisecond in ticks of half a microsecond, against a baseline of a device that has become warmer
/// since.
const GPU_TOLERANCE: f64 = 0.03;

/// A lasting shift of the canary beyond this share of its baseline is reported with the block.
const SHIFT: f64 = 4.0 / 3.0;

/// Telemetry and a canary.
struct DeviceMonitor {
    telemetry: Box<dyn Telemetry>,
    canary: Box<dyn Canary>,
    /// `None` when the canary could not be timed.
    baseline: Option<Baseline>,
    limits: Limits,
    /// The last canary times of a CPU; on a GPU they are compared with the baseline only.
    recent: Option<VecDeque<f64>>,
}

/// The monitor of a device, or of so many from it on; the canary runs on the first, of a CPU with the threads of the run. Its baseline is measured
/// here, so call this under the conditions of the run.
pub fn of_devices(
    device: DeviceChoice,
    count: usize,
    threads: Option<usize>,
) -> Result<Box<dyn Monitor>, ProbeError> {
    let telemetry = telemetry_of(device, count);
    let mut canary = ceilings::canary(device, threads)?;
    let baseline = canary.baseline(BASELINE_RUNS);
    let recent = device.gpu().is_none().then(VecDeque::new);
    Ok(Box::new(DeviceMonitor { telemetry, canary, baseline, limits: limits_of(device), recent }))
}

/// What is read of a device, or of so many from it on, beside a block.
pub(super) fn telemetry_of(device: DeviceChoice, count: usize) -> Box<dyn Telemetry> {
    let host = HostTelemetry::new();
    let gpus: Vec<Gpu> = device.group(count).filter_map(|one| Gpu::of_cuda_ordinal(one.gpu()?)).collect();
    if gpus.is_empty() { Box::new(host) } else { Box::new(NvmlTelemetry::new(gpus, count, host)) }
}

/// The disturbance that blocks of a device bear.
pub(super) fn limits_of(device: DeviceChoice) -> Limits {
    let cores = environment::cores();
    device.gpu().map_or_else(|| Limits::of_cores(cores), |_| Limits::beside_gpu(cores))
}

impl DeviceMonitor {
    fn window_load(&mut self, last: bool) -> Option<WindowLoad> {
        let load = self.telemetry.load(last)?;
        Some(WindowLoad { load, reject: load.reject(&self.limits) })
    }
}

impl Monitor for DeviceMonitor {
    fn before_block(&mut self) {
        self.telemetry.before_block();
    }

    fn after_block(&mut self, _wall_seconds: f64) -> BlockContext {
        // The telemetry closes its window before the canary runs, which would count as load.
        let telemetry = self.telemetry.after_block();
        let load = self.window_load(false);
        let judgement = verdict(&telemetry, &self.limits);
        let seconds = self.canary.run();
        let mut conditions = judgement.conditions;
        let canary_ratio = self.baseline.map(|baseline| match &mut self.recent {
            Some(recent) => {
                conditions.extend(shifted(baseline.ratio(seconds)));
                against_recent(recent, baseline.median_seconds, seconds)
            }
            None => baseline.ratio(seconds),
        });
        BlockContext {
            telemetry: Some(telemetry),
            canary_ratio,
            read_rate: self.canary.read_rate(),
            reject: judgement.reject,
            conditions,
            load,
        }
    }

    fn after_visit(&mut self) -> Option<WindowLoad> {
        self.window_load(true)
    }

    fn canary_tolerance(&self, wanted: f64) -> f64 {
        let own = self.baseline.map_or(wanted, |baseline| baseline.tolerance().max(wanted));
        if self.recent.is_some() {
            own.clamp(CPU_TOLERANCE.0, CPU_TOLERANCE.1)
        } else {
            own.clamp(GPU_TOLERANCE, MAX_CANARY_TOLERANCE)
        }
    }

    fn resident_overhead(&self) -> Bytes {
        self.canary.host_memory()
    }
}

/// A canary time over the median of the last ones, to which it is added. The first is compared with the baseline.
fn against_recent(recent: &mut VecDeque<f64>, baseline: f64, seconds: f64) -> f64 {
    let usual = if recent.is_empty() { baseline } else { stats::median(recent.make_contiguous()) };
    if seconds.is_finite() {
        recent.push_back(seconds);
    }
    if recent.len() > CPU_WINDOW {
        recent.pop_front();
    }
    seconds / usual
}

/// The warning when the machine's memory bandwidth has shifted since the ceilings were measured.
fn shifted(ratio: f64) -> Option<Cause> {
    (!(1.0 / SHIFT..=SHIFT).contains(&ratio)).then_some(Cause::BandwidthShifted { ratio })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::telemetry::CpuLoad;

    #[test]
    fn a_sudden_change_stands_out_and_a_lasting_one_becomes_usual() {
        let mut recent = VecDeque::new();
        let mut ratios = |times: &[f64]| -> Vec<f64> {
            times.iter().map(|&t| against_recent(&mut recent, 1.0, t)).collect()
        };
        assert_eq!(ratios(&[1.0, 1.0, 2.0, 1.0]), [1.0, 1.0, 2.0, 1.0]);
        // After three blocks at the new level the median of five has moved: fewer than the retries of a block.
        assert_eq!(ratios(&[2.0, 2.0, 2.0]), [2.0, 2.0, 1.0]);
        assert!(against_recent(&mut recent, 1.0, f64::NAN).is_nan());
        assert_eq!(recent.len(), CPU_WINDOW);
    }

    #[test]
    fn a_gpu_bears_the_load_of_cores_that_it_does_not_need_and_a_cpu_does_not() {
        let busy = |cores| CpuLoad { blocks: 1, foreign_cores: Some(cores), steal_cores: None };
        let rejects = |limits: Limits, cores| busy(cores).reject(&limits).is_some();
        let node = Limits::beside_gpu(16);
        assert_eq!([0.3, 3.2, 7.5].map(|cores| rejects(node, cores)), [false, false, true]);
        // There are no cores to spare.
        assert!([1, 2].map(Limits::beside_gpu).iter().all(|limits| rejects(*limits, 0.3)));
        assert!(rejects(limits_of(DeviceChoice::Cpu), 0.3));
        assert_eq!(limits_of(DeviceChoice::Cuda(0)), Limits::beside_gpu(environment::cores()));
    }

    #[test]
    fn a_lasting_shift_is_said() {
        assert_eq!(shifted(1.5), Some(Cause::BandwidthShifted { ratio: 1.5 }));
        assert_eq!(shifted(0.5), Some(Cause::BandwidthShifted { ratio: 0.5 }));
        assert_eq!(shifted(1.1), None);
    }
}
