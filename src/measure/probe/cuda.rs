//! The ceilings of a GPU: read, copy and triad bandwidth, matrix products, launches; the canary; spins of known length.
//!
//! Enters: a device index. Leaves: [`Ceilings`]. It opens a stream of its own on the device's primary context, beside candle's; nothing
//! else runs on the device while it measures.

#![expect(unsafe_code, reason = "launching a kernel and allocating without zeroing have no safe form")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use candle_core::{DType, Tensor};
use cudarc::driver::{
    CudaContext, CudaFunction, CudaModule, CudaSlice, CudaStream, DriverError, LaunchConfig, PushKernelArg,
    result, sys,
};
use cudarc::nvrtc::Ptx;

use super::{ProbeError, spread};
use crate::engine::cuda::{self, EventTimeline};
use crate::engine::{Backend, DeviceChoice, DeviceOptions, Timeline};
use crate::measure::canary::Canary;
use crate::measure::known_answers::Check;
use crate::roofline::{Ceilings, Spread};
use crate::units::{Bytes, Nanos};

const BANDWIDTH: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/bandwidth.fatbin"));
const TIMER: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/timer.fatbin"));

/// Threads in a block of the bandwidth kernels.
const BLOCK: u32 = 256;

/// Bytes in flight decide bandwidth, so both the blocks per multiprocessor and the loads per thread are swept.
const BLOCKS_PER_SM: [u32; 5] = [1, 2, 4, 8, 16];
const READS: [&str; 4] = ["read_u1", "read_u2", "read_u4", "read_u8"];

/// Far beyond any L2 (50 to 60 MiB on Hopper), and long enough that ramp and tail vanish.
const WORKING_SET: u64 = 4 << 30;

/// A millisecond or less beside each block. A nearly full device has a smaller one, rather than none.
const CANARY_BYTES: u64 = 1 << 30;

/// Lengths of the spins, and how far a measured one may be off: max(0.5 %, 2 µs), and a tick of the device's timer.
const SPINS: [f64; 5] = [5e4, 2e5, 1e6, 5e6, 1e7];
const TIMER_TICK_NS: f64 = 1_000.0;

/// A stream with our kernels loaded.
struct Bench {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    bandwidth: Arc<CudaModule>,
    timer: Arc<CudaModule>,
    timeline: EventTimeline,
    name: String,
    multiprocessors: u32,
}

impl Bench {
    fn open(index: u32) -> Result<Self, ProbeError> {
        let name = format!("cuda:{index}");
        let failed = |error: DriverError| ProbeError::from(cuda::failed(&name, error));
        let context = CudaContext::new(index as usize).map_err(failed)?;
        let stream = context.new_stream().map_err(failed)?;
        // SAFETY: every buffer of a bench is made, used and freed on its one stream. Tracked, each launch would wait on events and
        // record others between the marks.
        unsafe { context.disable_event_tracking() };
        let load = |image: &[u8]| context.load_module(Ptx::from_binary(image.to_vec())).map_err(failed);
        let (bandwidth, timer) = (load(BANDWIDTH)?, load(TIMER)?);
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let multiprocessors = context.attribute(attribute).map_err(failed)?.unsigned_abs();
        let timeline = EventTimeline::new(stream.clone(), &name);
        Ok(Self { context, stream, bandwidth, timer, timeline, name, multiprocessors })
    }

    fn failed(&self, error: DriverError) -> ProbeError {
        cuda::failed(&self.name, error).into()
    }

    fn function(&self, module: &Arc<CudaModule>, name: &str) -> Result<CudaFunction, ProbeError> {
        module.load_function(name).map_err(|error| self.failed(error))
    }

    fn buffer(&self, bytes: u64) -> Result<CudaSlice<u32>, ProbeError> {
        // SAFETY: every buffer is filled by `fill`, or written whole by `copy` or `triad`, before anything reads it.
        unsafe { self.stream.alloc(usize::try_from(bytes / 4).unwrap_or(usize::MAX)) }
            .map_err(|error| self.failed(error))
    }

    /// A buffer that no memory pool counts: the peak of the pool stays what the model uses.
    fn buffer_outside_pool(&self, bytes: u64) -> Result<CudaSlice<u32>, ProbeError> {
        let words = usize::try_from(bytes / 4).unwrap_or(usize::MAX / 4);
        self.context.bind_to_thread().map_err(|error| self.failed(error))?;
        // SAFETY: the context is bound. Nothing reads the buffer before `fill` or a memset has written it.
        let pointer = unsafe { result::malloc_sync(words * 4) }.map_err(|error| self.failed(error))?;
        // SAFETY: the pointer is an allocation of `words` words that nobody else owns. The slice frees it in stream order, which
        // the driver allows for cuMemAlloc too (CUDA programming guide, stream-ordered memory allocator).
        Ok(unsafe { self.stream.upgrade_device_ptr(pointer, words) })
    }

    fn fill(&self, buffer: &mut CudaSlice<u32>) -> Result<(), ProbeError> {
        let words = buffer.len() as u64;
        let fill = self.function(&self.bandwidth, "fill")?;
        let grid = grid(self.multiprocessors * 8);
        // SAFETY: `fill` writes `words` words, as many as the buffer has.
        unsafe { self.stream.launch_builder(&fill).arg(buffer).arg(&words).launch(grid) }
            .map_err(|error| self.failed(error))?;
        self.stream.synchronize().map_err(|error| self.failed(error))
    }

    /// Seconds of device time of each of `runs` calls, behind one that is not counted.
    fn time(
        &mut self,
        runs: usize,
        mut launch: impl FnMut(&Self) -> Result<(), DriverError>,
    ) -> Result<Vec<f64>, ProbeError> {
        for run in 0..=runs {
            self.timeline.mark()?;
            launch(self).map_err(|error| self.failed(error))?;
            self.timeline.mark()?;
            if run == 0 {
                self.timeline.drain()?;
            }
        }
        let marks = self.timeline.drain()?;
        Ok(marks.chunks_exact(2).map(|pair| Nanos(pair[1].0 - pair[0].0).seconds()).collect())
    }

    /// The read bandwidth of the best grid and unroll, with its name. The sum of every sweep point is checked.
    fn read(&mut self, buffer: &CudaSlice<u32>, runs: usize) -> Result<(Spread, String), ProbeError> {
        let bytes = buffer.num_bytes() as f64;
        let mut best: Option<(Spread, String)> = None;
        for name in READS {
            let read = self.function(&self.bandwidth, name)?;
            for per_sm in BLOCKS_PER_SM {
                let mut sum = self.stream.alloc_zeros::<u32>(1).map_err(|error| self.failed(error))?;
                let config = grid(self.multiprocessors * per_sm);
                let vectors = buffer.len() as u64 / 4;
                let times = self.time(runs, |bench| {
                    let mut call = bench.stream.launch_builder(&read);
                    // SAFETY: the kernel reads `vectors` 16-byte vectors, a quarter of the buffer's words, and adds to one
                    // word.
                    unsafe { call.arg(buffer).arg(&mut sum).arg(&vectors).launch(config) }.map(drop)
                })?;
                let found = self.stream.clone_dtoh(&sum).map_err(|error| self.failed(error))?[0];
                let passes = u32::try_from(runs + 1).unwrap_or(u32::MAX);
                let wanted = pattern_sum(buffer.len() as u64).wrapping_mul(passes);
                if found != wanted {
                    return Err(ProbeError::WrongSum {
                        device: self.name.clone(),
                        kernel: name,
                        wanted,
                        found,
                    });
                }
                let rates: Vec<f64> = times.iter().map(|seconds| bytes / seconds).collect();
                if let Some(rate) = spread(&rates)
                    && best.as_ref().is_none_or(|(so_far, _)| rate.median > so_far.median)
                {
                    best = Some((rate, format!("{name}, {per_sm} blocks of {BLOCK} per SM")));
                }
            }
        }
        best.ok_or(ProbeError::Repetitions { repetitions: runs })
    }

    /// Rates of a kernel over the block counts, best median.
    fn best_over_grids(
        &mut self,
        bytes: f64,
        runs: usize,
        launch: impl Fn(&Self, LaunchConfig) -> Result<(), DriverError>,
    ) -> Result<Spread, ProbeError> {
        let mut best: Option<Spread> = None;
        for per_sm in BLOCKS_PER_SM {
            let config = grid(self.multiprocessors * per_sm);
            let times = self.time(runs, |bench| launch(bench, config))?;
            let rates: Vec<f64> = times.iter().map(|seconds| bytes / seconds).collect();
            if let Some(rate) = spread(&rates)
                && best.is_none_or(|so_far| rate.median > so_far.median)
            {
                best = Some(rate);
            }
        }
        best.ok_or(ProbeError::Repetitions { repetitions: runs })
    }

    /// From the launch of an empty kernel until the host knows that it has ended.
    fn launch(&self) -> Result<Option<Spread>, ProbeError> {
        let empty = self.function(&self.timer, "empty")?;
        let mut nanoseconds = Vec::with_capacity(200);
        for _ in 0..200 {
            let begin = Instant::now();
            // SAFETY: the kernel takes no arguments and touches no memory.
            unsafe { self.stream.launch_builder(&empty).launch(grid(1)) }
                .map_err(|error| self.failed(error))?;
            self.stream.synchronize().map_err(|error| self.failed(error))?;
            nanoseconds.push(Nanos::from(begin.elapsed()).0);
        }
        Ok(spread(&nanoseconds))
    }
}

fn grid(blocks: u32) -> LaunchConfig {
    LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (BLOCK, 1, 1), shared_mem_bytes: 0 }
}

/// Σ (i·2654435761 + 1) over i < n, mod 2^32: what `fill` writes, summed in closed form.
fn pattern_sum(n: u64) -> u32 {
    let pairs = u128::from(n) * u128::from(n.saturating_sub(1)) / 2;
    let sum = pairs.wrapping_mul(2_654_435_761).wrapping_add(u128::from(n));
    u32::try_from(sum % (1 << 32)).expect("a remainder of 2^32 fits 32 bits")
}

/// Measures the ceilings of a GPU.
///
/// # Errors
/// When the device refuses, or a checked sum is wrong.
pub fn measure_cuda(index: u32, quick: bool) -> Result<Ceilings, ProbeError> {
    let runs = if quick { 5 } else { 15 };
    let mut bench = Bench::open(index)?;
    let (free, _) = bench.context.mem_get_info().map_err(|error| bench.failed(error))?;
    let bytes = (free as u64 / 4).min(WORKING_SET) & !0xffff;
    let mut a = bench.buffer(bytes)?;
    bench.fill(&mut a)?;
    let (read_bytes_per_s, read_configuration) = bench.read(&a, runs)?;

    let third = bytes / 2;
    let (mut b, mut c) = (bench.buffer(third)?, bench.buffer(third)?);
    bench.fill(&mut b)?;
    bench.fill(&mut c)?;
    let vectors = third / 16;
    let copy = bench.function(&bench.bandwidth, "copy")?;
    let copy_bytes_per_s = bench.best_over_grids(2.0 * third as f64, runs, |bench, config| {
        let mut call = bench.stream.launch_builder(&copy);
        // SAFETY: both buffers hold `vectors` 16-byte vectors; nothing else uses them meanwhile.
        unsafe { call.arg(&b).arg(&c).arg(&vectors).launch(config) }.map(drop)
    })?;
    let triad = bench.function(&bench.bandwidth, "triad")?;
    let triad_bytes_per_s = bench.best_over_grids(3.0 * third as f64, runs, |bench, config| {
        let mut call = bench.stream.launch_builder(&triad);
        // SAFETY: all three buffers hold at least `vectors` 16-byte vectors; any bits are valid floats.
        unsafe { call.arg(&a).arg(&b).arg(&c).arg(&0.5f32).arg(&vectors).launch(config) }.map(drop)
    })?;
    drop((a, b, c));
    let launch_ns = bench.launch()?;
    let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE;
    let l2 = bench.context.attribute(attribute).ok().map(|bytes| Bytes(u64::from(bytes.unsigned_abs())));
    Ok(Ceilings {
        read_bytes_per_s,
        copy_bytes_per_s,
        triad_bytes_per_s,
        gemm_flops_per_s: gemm(index, quick)?,
        launch_ns,
        working_set_bytes: Bytes(bytes),
        last_cache_bytes: l2,
        read_configuration,
    })
}

/// Peaks of the matrix product that candle's own path uses (cuBLAS), on random normal data, in bursts.
fn gemm(index: u32, quick: bool) -> Result<BTreeMap<String, Spread>, ProbeError> {
    let mut backend = Backend::open(DeviceChoice::Cuda(index), DeviceOptions::default())?;
    let mut peaks = BTreeMap::new();
    for (name, dtype) in [("bf16", DType::BF16), ("f16", DType::F16), ("f32", DType::F32)] {
        let mut best: Option<Spread> = None;
        for size in if quick { vec![8192] } else { vec![4096, 8192] } {
            let rates = products(&mut backend, dtype, size).map_err(|source| ProbeError::Gemm {
                dtype: name,
                size,
                source,
            })?;
            if let Some(rate) = spread(&rates)
                && best.is_none_or(|so_far| rate.median > so_far.median)
            {
                best = Some(rate);
            }
        }
        peaks.extend(best.map(|best| (name.to_owned(), best)));
    }
    Ok(peaks)
}

/// FLOP rates of ten square products, behind three that are not counted.
fn products(backend: &mut Backend, dtype: DType, size: usize) -> candle_core::Result<Vec<f64>> {
    let random = || Tensor::randn(0f32, 1f32, (size, size), &backend.device)?.to_dtype(dtype);
    let (a, b) = (random()?, random()?);
    let timeline = backend.timeline.as_mut();
    let wrap = candle_core::Error::wrap;
    for _ in 0..3 {
        a.matmul(&b)?;
    }
    for _ in 0..10 {
        timeline.mark().map_err(wrap)?;
        a.matmul(&b)?;
        timeline.mark().map_err(wrap)?;
    }
    let marks = timeline.drain().map_err(wrap)?;
    let flops = 2.0 * (size as f64).powi(3);
    Ok(marks.chunks_exact(2).map(|pair| flops / Nanos(pair[1].0 - pair[0].0).seconds()).collect())
}

/// Reads a gigabyte of the device's memory, which lies outside the pool that candle allocates from.
struct CudaCanary {
    bench: Bench,
    read: CudaFunction,
    buffer: CudaSlice<u32>,
    sum: CudaSlice<u32>,
}

/// The canary of a GPU.
///
/// # Errors
/// When its buffer cannot be had.
pub fn canary(index: u32) -> Result<Box<dyn Canary>, ProbeError> {
    let bench = Bench::open(index)?;
    let (free, _) = bench.context.mem_get_info().map_err(|error| bench.failed(error))?;
    let mut buffer = bench.buffer_outside_pool((free as u64 / 4).min(CANARY_BYTES) & !0xffff)?;
    bench.fill(&mut buffer)?;
    let mut sum = bench.buffer_outside_pool(4)?;
    bench.stream.memset_zeros(&mut sum).map_err(|error| bench.failed(error))?;
    let read = bench.function(&bench.bandwidth, "read_u4")?;
    Ok(Box::new(CudaCanary { bench, read, buffer, sum }))
}

impl Canary for CudaCanary {
    fn run(&mut self) -> f64 {
        let Self { bench, read, buffer, sum } = self;
        let (vectors, config) = (buffer.len() as u64 / 4, grid(bench.multiprocessors * 8));
        let times = bench.time(3, |bench| {
            let mut call = bench.stream.launch_builder(read);
            // SAFETY: the kernel reads `vectors` 16-byte vectors, a quarter of the buffer's words, and adds to one word.
            unsafe { call.arg(&*buffer).arg(&mut *sum).arg(&vectors).launch(config) }.map(drop)
        });
        times.map_or(f64::NAN, |times| times.into_iter().fold(f64::INFINITY, f64::min))
    }
}

/// Spins of known length on the device, timed by events.
///
/// # Errors
/// When the device refuses.
pub fn check_spins(index: u32) -> Result<Vec<Check>, ProbeError> {
    let mut bench = Bench::open(index)?;
    let spin = bench.function(&bench.timer, "spin")?;
    let mut checks = Vec::with_capacity(SPINS.len());
    let one = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };
    for wanted in SPINS {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "the spins are small and positive"
        )]
        let nanoseconds = wanted as u64;
        let times = bench.time(7, |bench| {
            // SAFETY: the kernel takes its length by value and touches no memory.
            unsafe { bench.stream.launch_builder(&spin).arg(&nanoseconds).launch(one) }.map(drop)
        })?;
        let found = times.into_iter().fold(f64::INFINITY, f64::min) * 1e9;
        let bound = (wanted * 0.005).max(2_000.0) + TIMER_TICK_NS;
        checks.push(Check::within(
            format!("CUDA events: a spin of {} (ns)", Nanos(wanted)),
            wanted,
            found,
            bound,
        ));
    }
    Ok(checks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pattern_sums_to_what_the_closed_form_says() {
        for n in [0u32, 1, 2, 1000, 70_001] {
            let sum =
                (0..n).fold(0u32, |sum, i| sum.wrapping_add(i.wrapping_mul(2_654_435_761).wrapping_add(1)));
            assert_eq!(pattern_sum(u64::from(n)), sum);
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn ceilings_of_a_real_gpu_are_positive() {
        let ceilings = measure_cuda(0, true).unwrap();
        assert!(ceilings.read_bytes_per_s.median > 1e11);
    }
}
