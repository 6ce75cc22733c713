//! The ceilings of the chosen device, and its canary.
//!
//! Enters: a device and how thorough to be. Leaves: [`Ceilings`] from the probe of that device. One arm per kind of device.

use super::canary::{Canary, CpuCanary};
use super::probe::{ProbeConfig, ProbeError, measure_cpu};
use crate::engine::DeviceChoice;
use crate::measure::protocol::Depth;
use hbmark_core::result::Ceilings;

/// Measures the ceilings of a device; `None` for a smoke run, whose times mean nothing.
///
/// # Errors
/// When the device or the system refuses.
pub fn measure(
    device: DeviceChoice,
    depth: Depth,
    threads: Option<usize>,
) -> Result<Option<Ceilings>, ProbeError> {
    if depth == Depth::Smoke {
        return Ok(None);
    }
    match device {
        DeviceChoice::Cpu => {
            let config = if depth == Depth::Full { ProbeConfig::full()? } else { ProbeConfig::quick()? };
            measure_cpu(&limited(config, threads)).map(Some)
        }
        #[cfg(feature = "cuda")]
        DeviceChoice::Cuda(index) => super::probe::cuda::measure_cuda(index, depth == Depth::Quick).map(Some),
        #[cfg(not(feature = "cuda"))]
        DeviceChoice::Cuda(_) => Ok(None),
    }
}

/// The ceilings of a limited run are those of its threads.
fn limited(config: ProbeConfig, threads: Option<usize>) -> ProbeConfig {
    match threads {
        Some(threads) => {
            let most = config.threads.iter().copied().max().unwrap_or(1);
            ProbeConfig { threads: vec![threads.min(most)], ..config }
        }
        None => config,
    }
}

/// The canary of a device.
///
/// # Errors
/// When its buffer cannot be allocated.
pub fn canary(device: DeviceChoice) -> Result<Box<dyn Canary>, ProbeError> {
    match device {
        DeviceChoice::Cpu => Ok(Box::new(CpuCanary::new(CpuCanary::USUAL_SIZE)?)),
        #[cfg(feature = "cuda")]
        DeviceChoice::Cuda(index) => super::probe::cuda::canary(index),
        #[cfg(not(feature = "cuda"))]
        DeviceChoice::Cuda(_) => Ok(Box::new(CpuCanary::new(CpuCanary::USUAL_SIZE)?)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limited_run_is_probed_with_its_own_threads() {
        let config = ProbeConfig { threads: vec![1, 2], ..ProbeConfig::quick().unwrap() };
        assert_eq!(limited(config.clone(), None).threads, [1, 2]);
        assert_eq!(limited(config.clone(), Some(1)).threads, [1]);
        assert_eq!(limited(config, Some(64)).threads, [2]);
    }
}
