//! Which device a run is on, and what CUDA says that device is.

use serde::{Deserialize, Serialize};

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
    pub fn default_of_build() -> Self {
        if cfg!(feature = "cuda") { Self::Cuda(0) } else { Self::Cpu }
    }

    /// The devices of a group of so many ranks: that many GPUs from this one on, or this host.
    pub fn group(self, ranks: usize) -> impl Iterator<Item = Self> {
        let count = if self == Self::Cpu { 1 } else { u32::try_from(ranks).unwrap_or(u32::MAX) };
        (0..count).map(move |rank| match self {
            Self::Cpu => Self::Cpu,
            Self::Cuda(first) => Self::Cuda(first.saturating_add(rank)),
        })
    }

    /// The GPU's index, for telemetry.
    pub fn gpu(self) -> Option<u32> {
        match self {
            Self::Cpu => None,
            Self::Cuda(index) => Some(index),
        }
    }
}

/// What CUDA says a device is, beside the number that it gives it. What it does not say is `None`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CudaIdentity {
    pub uuid: Option<[u8; 16]>,
    /// `0000:65:00.0`.
    pub pci_bus_id: Option<String>,
}

impl CudaIdentity {
    /// Queries the driver without opening a context; a build without CUDA finds none.
    pub fn of_ordinal(index: u32) -> Self {
        #[cfg(feature = "cuda")]
        return driver::identity(index);
        #[cfg(not(feature = "cuda"))]
        {
            let _ = index;
            Self::default()
        }
    }
}

impl From<DeviceChoice> for String {
    fn from(choice: DeviceChoice) -> Self {
        choice.to_string()
    }
}

/// Asking the CUDA driver, without opening a context.
#[cfg(feature = "cuda")]
#[expect(unsafe_code, reason = "the driver's entry points have no safe wrappers")]
mod driver {
    use cudarc::driver::{result, sys};

    use super::CudaIdentity;

    /// The driver's PCI address of a device.
    pub(super) fn identity(index: u32) -> CudaIdentity {
        let device = i32::try_from(index).ok().filter(|_| result::init().is_ok());
        let Some(device) = device.and_then(|index| result::device::get(index).ok()) else {
            return CudaIdentity::default();
        };
        // `c_char` is signed on some machines and unsigned on others.
        let bytes = |uuid: sys::CUuuid| uuid.bytes.map(|byte| byte.to_ne_bytes()[0]);
        CudaIdentity {
            uuid: result::device::get_uuid(device).ok().map(bytes),
            pci_bus_id: pci_bus_id(device),
        }
    }

    fn pci_bus_id(device: sys::CUdevice) -> Option<String> {
        // Domain, bus, device, function: 13 characters and a zero.
        let mut text = [0u8; 32];
        // SAFETY: the driver writes a zero-terminated string of at most the 32 bytes passed; the device came from the driver.
        unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), 32, device) }.result().ok()?;
        let text = std::ffi::CStr::from_bytes_until_nul(&text).ok()?;
        text.to_str().ok().map(str::to_owned)
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
}
