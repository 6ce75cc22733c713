//! The real witness: telemetry and a canary beside each block.
//!
//! Enters: a device. Leaves: a [`Witness`] for the protocol. It sees the machine and never the times of the block it judges.

use super::canary::{Baseline, Canary};
use super::ceilings;
use super::nvml::Gpu;
use super::probe::ProbeError;
use super::protocol::{Testimony, Witness};
use super::telemetry::{HostTelemetry, Limits, NvmlTelemetry, Telemetry, judge};
use crate::engine::DeviceChoice;

/// Canary runs from which its usual time and its own noise are learned.
const BASELINE_RUNS: usize = 25;

/// Telemetry and a canary.
struct DeviceWitness {
    telemetry: Box<dyn Telemetry>,
    canary: Box<dyn Canary>,
    /// `None` when the canary could not be timed; then it says nothing.
    baseline: Option<Baseline>,
    limits: Limits,
}

/// The witness of a device. Its canary learns its usual time here, so call it on the machine as the run will find it.
///
/// # Errors
/// When the canary's buffer cannot be had.
pub fn of_device(device: DeviceChoice) -> Result<Box<dyn Witness>, ProbeError> {
    let host = HostTelemetry::new();
    let telemetry: Box<dyn Telemetry> = match device.gpu().and_then(Gpu::of_cuda_ordinal) {
        Some(gpu) => Box::new(NvmlTelemetry::new(gpu, host)),
        None => Box::new(host),
    };
    let mut canary = ceilings::canary(device)?;
    let baseline = canary.baseline(BASELINE_RUNS);
    Ok(Box::new(DeviceWitness { telemetry, canary, baseline, limits: Limits::default() }))
}

impl Witness for DeviceWitness {
    fn before_block(&mut self) {
        self.telemetry.before_block();
    }

    fn after_block(&mut self, _wall_seconds: f64) -> Testimony {
        // The telemetry closes its window before the canary works, which would count as load.
        let telemetry = self.telemetry.after_block();
        let judgement = judge(&telemetry, &self.limits);
        let seconds = self.canary.run();
        Testimony {
            telemetry: Some(telemetry),
            canary_ratio: self.baseline.map(|baseline| baseline.ratio(seconds)),
            reject: judgement.reject,
            conditions: judgement.conditions,
        }
    }

    fn canary_tolerance(&self, wanted: f64) -> f64 {
        self.baseline.map_or(wanted, |baseline| baseline.tolerance().max(wanted))
    }
}
