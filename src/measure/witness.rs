//! The real witness: telemetry and a canary beside each block.
//!
//! Enters: a device. Leaves: a [`Witness`] for the protocol. It sees the machine and never the times of the block it judges.

use super::canary::{Calibrated, Canary};
use super::ceilings;
use super::nvml::Gpu;
use super::probe::ProbeError;
use super::protocol::{Testimony, Witness};
use super::telemetry::{HostTelemetry, Limits, NvmlTelemetry, Telemetry, judge};
use crate::engine::DeviceChoice;

/// How many standard deviations of the canary's own noise a block may be off before it is rejected.
const CANARY_SIGMAS: f64 = 4.0;

/// Telemetry and a canary.
struct DeviceWitness {
    telemetry: Box<dyn Telemetry>,
    canary: Calibrated<Box<dyn Canary>>,
    limits: Limits,
}

/// The witness of a device.
///
/// # Errors
/// When the canary's buffer cannot be had.
pub fn of_device(device: DeviceChoice, threads: Option<usize>) -> Result<Box<dyn Witness>, ProbeError> {
    let host = HostTelemetry::new();
    let telemetry: Box<dyn Telemetry> = match device.gpu().and_then(Gpu::of_cuda_ordinal) {
        Some(gpu) => Box::new(NvmlTelemetry::new(gpu, host)),
        None => Box::new(host),
    };
    let canary = Calibrated::new(ceilings::canary(device, threads)?);
    Ok(Box::new(DeviceWitness { telemetry, canary, limits: Limits::default() }))
}

impl Witness for DeviceWitness {
    fn before_block(&mut self) {
        self.telemetry.before_block();
    }

    fn after_block(&mut self, _wall_seconds: f64) -> Testimony {
        // The telemetry closes its window before the canary works, which would count as load.
        let telemetry = self.telemetry.after_block();
        let judgement = judge(&telemetry, &self.limits);
        Testimony {
            telemetry: Some(telemetry),
            canary_ratio: Some(self.canary.ratio()),
            reject: judgement.reject,
            conditions: judgement.conditions,
        }
    }

    fn canary_tolerance(&self, wanted: f64) -> f64 {
        wanted.max(CANARY_SIGMAS * self.canary.noise())
    }
}
