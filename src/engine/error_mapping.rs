//! Maps failures of a device, of candle and of loading to engine errors.
//!
//! Enters: a CUDA driver's error code, a candle error, an [`OpenError`]. Leaves: the [`EngineError`] that the protocol distinguishes: out
//! of memory ends one cell, a missing device ends the run before it starts, anything else is a fault. It calls no driver, so every build tests it.

use super::EngineError;
use crate::weights::{OpenError, WeightsError};

/// `CUresult` of an allocation that the device cannot serve. *Source* of this and the codes below: cuda.h of CUDA 13.0.
#[cfg(any(test, feature = "cuda"))]
const OUT_OF_MEMORY: u32 = 2;

/// `CUresult`s that say that there is nothing to run on: the stub in place of the driver's library, no device, no such device, a driver
/// too old for its kernel module, a driver that does not serve the device.
#[cfg(any(test, feature = "cuda"))]
const NO_DEVICE: [u32; 5] = [34, 100, 101, 803, 804];

/// A CUDA driver's error, by its code; `detail` says it in words.
#[cfg(any(test, feature = "cuda"))]
pub fn of_driver(device: &str, code: u32, detail: String) -> EngineError {
    let device = device.to_owned();
    match code {
        OUT_OF_MEMORY => EngineError::OutOfMemory { device, detail },
        code if NO_DEVICE.contains(&code) => EngineError::NoCudaDevice { asked: device, detail },
        _ => EngineError::Device { device, detail },
    }
}

/// An error of candle, which passes on the errors of the driver and of cuBLAS as text.
pub fn of_candle(device: &str, error: &candle_core::Error) -> EngineError {
    let detail = first_line(&error.to_string());
    let device = device.to_owned();
    if is_out_of_memory(&detail) {
        EngineError::OutOfMemory { device, detail }
    } else {
        EngineError::Device { device, detail }
    }
}

/// An error of loading weights onto a device.
pub fn of_loading(device: &str, error: OpenError) -> EngineError {
    let full = match &error {
        OpenError::Weights(WeightsError::OutOfMemory { .. }) => Some("cpu"),
        OpenError::Weights(WeightsError::Device { error, .. }) if is_out_of_memory(&error.to_string()) => {
            Some(device)
        }
        _ => None,
    };
    match full {
        Some(device) => {
            EngineError::OutOfMemory { device: device.into(), detail: first_line(&error.to_string()) }
        }
        None => error.into(),
    }
}

fn is_out_of_memory(text: &str) -> bool {
    ["OUT_OF_MEMORY", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED"].iter().any(|sign| text.contains(sign))
}

/// candle appends a backtrace where one is asked for.
fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn driver(code: u32) -> EngineError {
        of_driver("cuda:1", code, "detail".into())
    }

    fn candle(text: &str) -> candle_core::Error {
        candle_core::Error::Msg(format!("{text}\n   0: a backtrace"))
    }

    #[test]
    fn only_a_full_device_is_out_of_memory_and_only_a_missing_one_is_no_device() {
        assert!(matches!(driver(2), EngineError::OutOfMemory { device, .. } if device == "cuda:1"));
        for absent in [34, 100, 101, 803, 804] {
            assert!(matches!(driver(absent), EngineError::NoCudaDevice { .. }), "{absent}");
        }
        // Invalid value, device unavailable (in exclusive use), illegal address, launch failure, unknown.
        for fault in [1, 46, 700, 719, 999] {
            assert!(matches!(driver(fault), EngineError::Device { .. }), "{fault}");
        }
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn the_codes_are_those_of_the_driver() {
        use cudarc::driver::sys::CUresult;
        assert_eq!(CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32, OUT_OF_MEMORY);
        let absent = [
            CUresult::CUDA_ERROR_STUB_LIBRARY,
            CUresult::CUDA_ERROR_NO_DEVICE,
            CUresult::CUDA_ERROR_INVALID_DEVICE,
            CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,
            CUresult::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE,
        ];
        assert_eq!(absent.map(|code| code as u32), NO_DEVICE);
    }

    #[test]
    fn candle_passes_memory_errors_on_as_text() {
        for full in [
            "DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")",
            "CublasError(CUBLAS_STATUS_ALLOC_FAILED)",
        ] {
            let error = of_candle("cuda:0", &candle(full));
            assert!(matches!(&error, EngineError::OutOfMemory { detail, .. } if detail == full), "{error}");
        }
        let fault = of_candle("cuda:0", &candle("DriverError(CUDA_ERROR_ILLEGAL_ADDRESS)"));
        assert!(matches!(fault, EngineError::Device { .. }));
    }

    #[test]
    fn weights_that_do_not_fit_are_out_of_memory_where_they_did_not() {
        let name = || "model.norm.weight".to_owned();
        let host = OpenError::Weights(WeightsError::OutOfMemory { name: name(), bytes: 7 });
        assert!(
            matches!(of_loading("cuda:0", host), EngineError::OutOfMemory { device, .. } if device == "cpu")
        );
        let refused = |text| OpenError::Weights(WeightsError::Device { name: name(), error: candle(text) });
        let full = of_loading("cuda:0", refused("CUDA_ERROR_OUT_OF_MEMORY"));
        assert!(
            matches!(&full, EngineError::OutOfMemory { device, detail } if device == "cuda:0" && detail.contains("model.norm.weight"))
        );
        assert!(matches!(of_loading("cuda:0", refused("broken")), EngineError::Model(_)));
    }
}
