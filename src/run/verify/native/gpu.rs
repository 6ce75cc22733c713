//! The checks of a device that runs the CUDA kernels: a GPU, or the emulated device in tests.
//!
//! Enters: a way to open the device. Leaves: the same checks as a CPU's, once for each kind of
//! product (kernels that stream weights, kernels of the tensor cores, the device's library), with the bounds of each, and what only such a device has: recorded steps, known bytes, a timeline of its own.

use super::{Bounds, Extent, Kind, Make, Side, graphs, models, operations, steps};
use crate::engine::native::cuda::device::Device;
#[cfg(feature = "cuda")]
use crate::engine::native::cuda::driver::Driver;
use crate::engine::native::cuda::kernels::Tuning;
use crate::engine::native::cuda::operations::CudaOperations;
use crate::engine::native::operations::Operation;
use crate::engine::native::testing::sample::STREAMED;
use crate::engine::native::testing::{Sample, median_tolerance, nth, operation_tolerance, step_tolerance};
use crate::engine::native::{DEFAULT_BLOCK_SIZE, NativeSession, check_device};
use crate::engine::{DeviceChoice, EngineError, Session};
use crate::measure::probe::device::DeviceProbe;
use crate::run::verify::outputs::{FAMILIES, small_model};
use crate::run::verify::{Check, Record, timer};
use crate::weights::OpenModel;
use hbmark_core::model::Dtype;

/// K and V as the engine keeps them by itself or when it is asked; what its kernels run.
const KIND: Kind = Kind {
    draw: |make, dtype, seed| {
        let dtype = dtype.unwrap_or_else(|| nth(&STREAMED, seed));
        let sample = make(Some(dtype), seed).with_cache(seed);
        check_device(&sample.architecture, dtype, DeviceChoice::Cuda(0)).is_ok().then_some(sample)
    },
    mixtures_to_cut: Some(Dtype::F32),
    ..super::CPU
};

/// For a quick look: a format of each way in which kernels have scales, and none whose samples are large.
const SMALL_KIND: Kind = Kind {
    quantised: &[Dtype::Int8, Dtype::Fp8, Dtype::Mxfp4, Dtype::Int4, Dtype::Q4_0],
    in_blocks: &[],
    ..KIND
};

/// Kernels that stream. How attention is split, and so the order of its sums, depends on the whole batch.
const STREAMING: Bounds = Bounds {
    operation: operation_tolerance,
    median: median_tolerance,
    step: step_tolerance,
    cut: step_tolerance,
};

/// Kernels of the tensor cores: activations are rounded to 16 bits where the oracle keeps them as they are.
///
/// *Source*: half a step of bf16 in each of many terms of a softmax, half a step of f16 in each input of a product; seen over random samples on the
/// emulated device.
const TENSOR_CORES: Bounds = Bounds {
    operation: on_tensor_cores,
    median: |operation, sample| match operation {
        // Every row is rounded otherwise, and not a few.
        Operation::Attention | Operation::NormQkv | Operation::LatentDown | Operation::LatentExpand => {
            on_tensor_cores(operation, sample)
        }
        _ if sample.dtype == Dtype::F16 => on_tensor_cores(operation, sample),
        _ => median_tolerance(operation, sample).max(on_tensor_cores(operation, sample).min(1e-5)),
    },
    step: steps_on_tensor_cores,
    cut: steps_on_tensor_cores,
};

fn on_tensor_cores(operation: Operation, sample: &Sample) -> f64 {
    let plain = operation_tolerance(operation, sample);
    match (operation, sample.dtype) {
        // K and V are seen through an attention.
        (Operation::Attention | Operation::NormQkv | Operation::LatentDown | Operation::LatentExpand, _)
            if sample.kv_dtype != Dtype::F32 =>
        {
            plain.max(8e-3)
        }
        (Operation::Embed, _) | (_, Dtype::F32) => plain,
        (_, Dtype::F16) => plain.max(3e-3),
        (_, Dtype::Bf16) => plain.max(1e-5),
        // Widened for the library: weights and inputs are rounded to bf16, where the oracle's inputs have 8 bits.
        (_, Dtype::Q8_0 | Dtype::Q4_0 | Dtype::Q4K | Dtype::Q5K | Dtype::Q6K) => plain.max(3e-2),
        _ => plain,
    }
}

fn steps_on_tensor_cores(sample: &Sample) -> f64 {
    let plain = step_tolerance(sample);
    if sample.dtype == Dtype::F32 && sample.kv_dtype == Dtype::F32 { plain } else { plain.max(2e-2) }
}

/// Bytes of the data check: no multiple of a block.
#[cfg(feature = "cuda")]
const KNOWN_BYTES: usize = 1_000_003;

/// Everything on a GPU.
#[cfg(feature = "cuda")]
pub fn on_a_gpu(index: u32, quick: bool, record: &mut Record<'_>) {
    match Driver::open(index) {
        Ok(driver) => {
            let kind = if quick { &SMALL_KIND } else { &KIND };
            let open = || Ok(driver.clone());
            on_a_device(&open, Tuning::default(), (kind, super::extent(quick)), KNOWN_BYTES, record);
            on_groups(index, record);
        }
        Err(error) => record(Check::failed("native", "open the device", error.to_string())),
    }
}

/// Groups of GPUs from one on, as large as the machine has them.
#[cfg(feature = "cuda")]
fn on_groups(first: u32, record: &mut Record<'_>) {
    for ranks in [2, 4, 8] {
        match Driver::open_group(first, ranks) {
            Ok(devices) => {
                // Sums in one shot; and in two, where there are any.
                for max_one_shot_bytes in [usize::MAX, 8 << 10] {
                    let tuning = Tuning { max_one_shot_bytes, ..Tuning::default() };
                    let operations =
                        devices.iter().cloned().map(|device| CudaOperations::with_tuning(device, tuning));
                    super::groups::against_the_cpu(operations.collect(), record);
                }
            }
            // There are no more, or they are not a group.
            Err(EngineError::NoCudaDevice { .. } | EngineError::Unsupported { .. }) => return,
            Err(error) => record(Check::failed("groups", format!("{ranks} GPUs"), error.to_string())),
        }
    }
}

/// Everything on a device.
pub fn on_a_device<D: Device + 'static>(
    open: &dyn Fn() -> Result<D, EngineError>,
    tuning: Tuning,
    (kind, extent): (&Kind, &Extent),
    known_bytes: usize,
    record: &mut Record<'_>,
) {
    known(open, known_bytes, record);
    let no_tensor_cores = Tuning {
        min_tiled_rows: usize::MAX,
        min_widened_rows: usize::MAX,
        min_prefill_rows: usize::MAX,
        ..tuning
    };
    let streaming = |_: usize| Ok(CudaOperations::with_tuning(open()?, no_tensor_cores));
    let tiled = |_: usize| Ok(CudaOperations::with_tuning(open()?, tuning));
    let by_library = Tuning { min_library_rows: 1, min_widened_rows: 1, min_tiled_rows: 1, ..tuning };
    let library = |_: usize| Ok(CudaOperations::with_tuning(open()?, by_library));
    let streaming = Side { name: "streamed", make: &streaming as &Make<'_, _>, bounds: STREAMING };
    let tiled = Side { name: "tensor cores", make: &tiled as &Make<'_, _>, bounds: TENSOR_CORES };
    let library = Side { name: "the library", make: &library as &Make<'_, _>, bounds: TENSOR_CORES };
    operations::against_the_oracle(kind, &[streaming, tiled, library], extent, record);
    for side in [streaming, tiled, library] {
        steps::against_the_oracle(kind, side, extent, record);
    }
    steps::however_they_are_cut(kind, tiled, extent, record);
    record(graphs::as_eager(kind, tiled.make, extent.cut.clone()));
    models::against_stock(kind, tiled.make, extent.greedy, record);
    models::against_the_cpu(tiled.make, extent.greedy, record);
    // Those that read an expert once for all rows of the decodes that are counted.
    models::mixtures(tiled.make, extent.greedy, &[Dtype::Bf16, Dtype::Int8], record);
    models::bytes(kind, tiled.make, extent.depths, record);
    record(timer::block_of("native, a block of decode steps", extent.greedy.min(50), || {
        let model = OpenModel::synthetic("small", small_model(FAMILIES[0].1), 7);
        let operations = (tiled.make)(super::THREADS)?;
        let session = NativeSession::load(operations, &model, Dtype::F32, DEFAULT_BLOCK_SIZE, &mut |_| {})?;
        Ok(Box::new(session) as Box<dyn Session>)
    }));
}

/// Bytes that come back from the device as they went.
fn known<D: Device>(open: &dyn Fn() -> Result<D, EngineError>, bytes: usize, record: &mut Record<'_>) {
    const AREA: &str = "device memory";
    let found = open().map_err(Into::into).and_then(|device| DeviceProbe::new(device).known_bytes(bytes));
    match found {
        Ok(found) => {
            for (what, right) in found {
                let name =
                    if what.starts_with("read_") { format!("the sum of {what}") } else { what.to_owned() };
                let detail =
                    format!("{bytes} bytes, wanted {}", if right { "and found" } else { "and not found" });
                record(Check::new(AREA, name, right, detail));
            }
        }
        Err(error) => record(Check::failed(AREA, "known bytes", error.to_string())),
    }
}

#[cfg(all(test, debug_assertions))]
mod tests;
