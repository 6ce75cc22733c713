//! Devices: which one, and the stream and clock an engine gets on it.
//!
//! Enters: a [`DeviceChoice`]. Leaves: a [`Backend`] with candle's device, the timeline of its stream and a way to read peak memory.

use candle_core::Device;
use serde::{Deserialize, Serialize};

use super::EngineError;
use super::timeline::{MonotonicTimeline, Timeline};
use crate::machine::device::DeviceChoice;
use hbmark_core::ledger::ExpertRouting;
use hbmark_core::model::Dtype;
use hbmark_core::units::Bytes;

/// Options that change what a device gives.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceOptions {
    /// CUDA: keep the memory pool's pages between synchronisations (release threshold at its maximum). candle leaves the
    /// threshold at 0, so this is a labelled deviation from what people run.
    pub keep_memory_pool: bool,
    /// CPU: threads of engines that have a team of their own; all that the process may use where none is given.
    pub threads: Option<usize>,
    /// Positions of a block of the native engine's KV; its own choice where none is given.
    pub block_size: Option<usize>,
    /// Storage of the KV cache; what goes with the weights where none is given.
    #[serde(default)]
    pub kv_dtype: Option<Dtype>,
    /// Experts that a script picks in place of the routers of the native engine, from a seed.
    #[serde(default)]
    pub scripted_routing: Option<ScriptedRouting>,
}

/// How a script spreads rows over experts.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ScriptedRouting {
    pub routing: ExpertRouting,
    pub seed: u64,
}

/// Reads the peak of device memory since it was last read.
pub type PeakMemory = Box<dyn FnMut() -> Option<Bytes>>;

/// A device and the timeline of the stream that steps run on.
pub struct Backend {
    pub device: Device,
    pub timeline: Box<dyn Timeline>,
    /// As in results: `cpu`, `cuda:0`.
    pub name: String,
    pub peak_memory: Option<PeakMemory>,
}

impl std::fmt::Debug for Backend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Backend").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Backend {
    /// The host processor, with its monotonic clock.
    pub fn cpu() -> Self {
        Self {
            device: Device::Cpu,
            timeline: Box::new(MonotonicTimeline::default()),
            name: "cpu".into(),
            peak_memory: None,
        }
    }

    /// Opens a device.
    ///
    /// # Errors
    /// When this build has no CUDA, or the device cannot be opened.
    pub fn open(choice: DeviceChoice, options: DeviceOptions) -> Result<Self, EngineError> {
        match choice {
            DeviceChoice::Cpu => Ok(Self::cpu()),
            #[cfg(feature = "cuda")]
            DeviceChoice::Cuda(index) => super::cuda::open(index, options),
            #[cfg(not(feature = "cuda"))]
            DeviceChoice::Cuda(_) => {
                let _ = options;
                Err(EngineError::NotBuiltForCuda { asked: choice.to_string() })
            }
        }
    }
}

#[cfg(all(test, not(feature = "cuda")))]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_build_says_how_to_get_cuda() {
        let error = Backend::open(DeviceChoice::Cuda(0), DeviceOptions::default()).unwrap_err();
        assert!(error.to_string().contains("--features cuda"), "{error}");
    }
}
