//! The ceilings of the chosen device, and its canary.
//!
//! Enters: a device and how thorough to be. Leaves: [`Ceilings`] from the probe of that device. One arm per kind of device.

mod kept;

use super::canary::{Canary, CpuCanary};
use super::monitor::{limits_of, telemetry_of};
use super::probe::{ProbeConfig, ProbeError, measure_cpu, usable_cores};
use crate::engine::DeviceChoice;
use crate::machine::telemetry::verdict;
use crate::measure::protocol::ProtocolPreset;
use hbmark_core::result::{Ceilings, Environment, LinkCeilings};

/// The ceilings for a run: those kept from a run of the last minutes under the same conditions, unless `fresh` ones are asked for.
pub fn for_run(
    device: DeviceChoice,
    preset: ProtocolPreset,
    threads: Option<usize>,
    environment: &Environment,
    fresh: bool,
) -> Result<Option<Ceilings>, ProbeError> {
    let folder = kept::folder().filter(|_| preset != ProtocolPreset::Smoke);
    let Some(folder) = folder else { return measure(device, preset, threads) };
    let conditions = kept::Conditions::of(environment, usable_cores()?, threads, preset);
    if !fresh && let Some(ceilings) = kept::read(&folder, &conditions, kept::now()) {
        return Ok(Some(ceilings));
    }
    let measured = measure(device, preset, threads)?;
    if let Some(ceilings) = &measured {
        kept::write(&folder, &conditions, ceilings, kept::now());
    }
    Ok(measured)
}

/// Measures the ceilings of a device, and what disturbed that; `None` for a smoke run, whose times mean nothing.
pub fn measure(
    device: DeviceChoice,
    preset: ProtocolPreset,
    threads: Option<usize>,
) -> Result<Option<Ceilings>, ProbeError> {
    let mut telemetry = telemetry_of(device, 1);
    telemetry.before_block();
    let measured = probe(device, preset, threads)?;
    let limits = limits_of(device);
    let slowed = verdict(&telemetry.after_block(), &limits).reject;
    let load = telemetry.load(true).and_then(|load| load.reject(&limits));
    let disturbed = slowed.into_iter().chain(load).collect();
    Ok(measured.map(|ceilings| Ceilings { disturbed, ..ceilings }))
}

fn probe(
    device: DeviceChoice,
    preset: ProtocolPreset,
    threads: Option<usize>,
) -> Result<Option<Ceilings>, ProbeError> {
    if preset == ProtocolPreset::Smoke {
        return Ok(None);
    }
    match device {
        DeviceChoice::Cpu => {
            let config =
                if preset == ProtocolPreset::Full { ProbeConfig::full()? } else { ProbeConfig::quick()? };
            measure_cpu(&limited(config, threads)).map(Some)
        }
        #[cfg(feature = "cuda")]
        DeviceChoice::Cuda(index) => {
            super::probe::cuda::measure_cuda(index, preset == ProtocolPreset::Quick).map(Some)
        }
        #[cfg(not(feature = "cuda"))]
        DeviceChoice::Cuda(_) => Ok(None),
    }
}

/// Measures the links between so many GPUs from a device on; `None` where the build has no GPUs.
#[cfg_attr(
    not(feature = "cuda"),
    expect(clippy::unnecessary_wraps, reason = "it fails where there are GPUs")
)]
pub fn links(
    device: DeviceChoice,
    gpus: usize,
    preset: ProtocolPreset,
) -> Result<Option<LinkCeilings>, ProbeError> {
    match device {
        #[cfg(feature = "cuda")]
        DeviceChoice::Cuda(first) => {
            super::probe::cuda::measure_links(first, gpus, preset == ProtocolPreset::Quick).map(Some)
        }
        _ => {
            let _ = (gpus, preset);
            Ok(None)
        }
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

/// The canary of a device, with so many threads of a CPU.
pub fn canary(device: DeviceChoice, threads: Option<usize>) -> Result<Box<dyn Canary>, ProbeError> {
    match device {
        DeviceChoice::Cpu => Ok(Box::new(CpuCanary::beyond_caches(threads)?)),
        #[cfg(feature = "cuda")]
        DeviceChoice::Cuda(index) => super::probe::cuda::canary(index),
        #[cfg(not(feature = "cuda"))]
        DeviceChoice::Cuda(_) => Ok(Box::new(CpuCanary::beyond_caches(threads)?)),
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
