//! `hbmark verify` as data: are timers, outputs and ceilings right on this machine?
//!
//! Enters: a device. Leaves: named checks that passed or failed, each with what was wanted and what was found. It is what a person runs
//! before trusting a number, so it shares its code with the run: the same sessions, the same timeline, the same probes.

mod ceilings;
pub mod client;
mod native;
mod outputs;
mod timer;

use serde::Serialize;

use crate::engine::DeviceChoice;

/// One line of the result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    pub area: &'static str,
    pub name: String,
    pub passed: bool,
    pub detail: String,
}

impl Check {
    pub(crate) fn new(
        area: &'static str,
        name: impl Into<String>,
        passed: bool,
        detail: impl Into<String>,
    ) -> Self {
        Self { area, name: name.into(), passed, detail: detail.into() }
    }

    /// A check that could not be done.
    pub(crate) fn failed(area: &'static str, name: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::new(area, name, false, detail)
    }
}

/// Takes a check when it is done.
type Record<'a> = dyn FnMut(Check) + 'a;

/// Runs every check, over fewer samples where it is to be quick; `tell` is called with each as it is done.
pub fn verify(device: DeviceChoice, quick: bool, tell: &mut dyn FnMut(&Check)) -> Vec<Check> {
    let mut checks = Vec::new();
    let mut record = |check: Check| {
        tell(&check);
        checks.push(check);
    };
    timer::clocks(device, &mut record);
    timer::block(device, &mut record);
    outputs::synthetic_weights(device, &mut record);
    outputs::families(device, &mut record);
    match device {
        DeviceChoice::Cpu => native::on_the_cpu(quick, &mut record),
        #[cfg(feature = "cuda")]
        DeviceChoice::Cuda(index) => native::on_a_gpu(index, quick, &mut record),
        #[cfg(not(feature = "cuda"))]
        DeviceChoice::Cuda(_) => {}
    }
    ceilings::measured(device, &mut record);
    checks
}
