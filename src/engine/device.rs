//! Devices: which one, and the stream and clock an engine gets on it.
//!
//! Enters: a [`DeviceChoice`]. Leaves: a [`Backend`] with candle's device, the timeline of its stream and a way to read peak memory.
//! It knows no model.

use candle_core::Device;
use serde::{Deserialize, Serialize};

use super::EngineError;
use super::timeline::{MonotonicTimeline, Timeline};
use hbmark_core::units::Bytes;

/// Where a run happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum DeviceChoice {
    Cpu,
    Cuda(u32),
}

/// A device name that cannot be read.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("--device `{given}`: wanted cpu, cuda or cuda:N")]
pub struct UnknownDevice {
    pub given: String,
}

impl std::fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

impl From<DeviceChoice> for String {
    fn from(choice: DeviceChoice) -> Self {
        choice.to_string()
    }
}

impl TryFrom<String> for DeviceChoice {
    type Error = UnknownDevice;
    fn try_from(given: String) -> Result<Self, UnknownDevice> {
        given.parse()
    }
}

impl std::str::FromStr for DeviceChoice {
    type Err = UnknownDevice;
    fn from_str(given: &str) -> Result<Self, UnknownDevice> {
        let wrong = || UnknownDevice { given: given.to_owned() };
        match given.split_once(':') {
            None if given == "cpu" => Ok(Self::Cpu),
            None if given == "cuda" => Ok(Self::Cuda(0)),
            Some(("cuda", index)) => index.parse().map(Self::Cuda).map_err(|_| wrong()),
            _ => Err(wrong()),
        }
    }
}

impl DeviceChoice {
    /// The device used when none is named: a GPU where the build has CUDA, the CPU otherwise.
    #[must_use]
    pub fn default_of_build() -> Self {
        if cfg!(feature = "cuda") { Self::Cuda(0) } else { Self::Cpu }
    }

    /// The GPU's index, for telemetry.
    #[must_use]
    pub fn gpu(self) -> Option<u32> {
        match self {
            Self::Cpu => None,
            Self::Cuda(index) => Some(index),
        }
    }
}

/// Options that change what a device gives.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceOptions {
    /// CUDA: keep the memory pool's pages between synchronisations (release threshold at its maximum). candle leaves the
    /// threshold at 0, so this is a labelled deviation from what people run.
    pub keep_memory_pool: bool,
    /// CPU: threads of engines that have a team of their own; all that the process may use where none is given.
    pub threads: Option<usize>,
    /// Positions of a block of the native engine's KV; its own choice where none is given.
    pub block_size: Option<usize>,
}

/// What CUDA says a device is, beside the number that it gives it. What it does not say is `None`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CudaIdentity {
    pub uuid: Option<[u8; 16]>,
    /// `0000:65:00.0`.
    pub pci_bus_id: Option<String>,
}

impl CudaIdentity {
    /// Asks the driver, and opens no context; a build without CUDA knows nothing.
    #[must_use]
    pub fn of_ordinal(index: u32) -> Self {
        #[cfg(feature = "cuda")]
        return super::cuda::identity(index);
        #[cfg(not(feature = "cuda"))]
        {
            let _ = index;
            Self::default()
        }
    }
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
    #[must_use]
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_strictly() {
        assert_eq!("cuda:3".parse(), Ok(DeviceChoice::Cuda(3)));
        assert_eq!("cpu".parse(), Ok(DeviceChoice::Cpu));
        for wrong in ["gpu", "cuda:", "cuda:x", "cpu:0", ""] {
            assert!(wrong.parse::<DeviceChoice>().is_err(), "{wrong}");
        }
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn a_cpu_build_says_how_to_get_cuda() {
        let error = Backend::open(DeviceChoice::Cuda(0), DeviceOptions::default()).unwrap_err();
        assert!(error.to_string().contains("--features cuda"), "{error}");
    }
}
