//! The ceilings of a GPU: what [`DeviceProbe`] measures, matrix products in bursts and sustained, the link to the host; and the canary.
//!
//! Enters: a device index. Leaves: [`Ceilings`]. It opens its own stream on the device's primary context, which candle uses too; nothing
//! else runs on the device while it measures.

use std::collections::BTreeMap;
use std::time::Instant;

use candle_core::{DType, Tensor};

use super::device::{DeviceProbe, Extent, SPINS, memory_of, read};
use super::links::{LinkExtent, all_reduces, links, of_sizes};
use super::{ProbeError, last_half};
use crate::engine::native::cuda::device::{Device, KernelLaunch};
use crate::engine::native::cuda::driver::{Direction, Driver, DriverMemory};
use crate::engine::native::cuda::kernels::Tuning;
use crate::engine::native::cuda::nccl::{Communicator, Nccl};
use crate::engine::{Backend, DeviceChoice, DeviceOptions};
use crate::measure::canary::Canary;
use crate::measure::timer_checks::Check;
use hbmark_core::result::{AllReduceTime, Ceilings, GpuCeilings, LinkCeilings, Spread};
use hbmark_core::units::{Bytes, BytesPerSecond, Nanos};

/// Long enough that ramp and tail vanish, and so many times what L2 holds (50 to 126 MiB from Hopper on) that what stays there between two reads is
/// less than a hundredth.
const WORKING_SET: u64 = 4 << 30;
const WORKING_SET_CACHES: u64 = 128;

/// A millisecond or less beside each block, and a few hundredths in L2. A nearly full device has a smaller one, rather than none, whose time still tells
/// a slower device; below so many times what L2 holds no rate is made of it.
const CANARY_BYTES: u64 = 1 << 30;
const CANARY_CACHES: u64 = 32;
const RATE_CACHES: u64 = 8;

/// L2 is read in a buffer of this share of it, so often.
const CACHED_SHARE: u64 = 4;
const CACHED_PASSES: usize = 32;

/// What is copied between host and device at a time, where there is room: long enough that the start of a copy vanishes.
const LINK_BYTES: usize = 256 << 20;

/// Products between two readings of the clock.
const BURST: usize = 10;

/// Sides of the products, of which the fastest counts; the shortened probe takes the last.
const PRODUCTS: [usize; 2] = [4096, 8192];
/// A nearly full device multiplies smaller matrices, rather than none: no smaller than this.
const SMALLEST_PRODUCT: usize = 128;

/// Measures the ceilings of a GPU.
pub fn measure_cuda(index: u32, quick: bool) -> Result<Ceilings, ProbeError> {
    let driver = Driver::open(index)?;
    let (free, cache) = (driver.free_bytes()?, driver.cache_bytes());
    let bytes = |bytes: u64| usize::try_from(bytes & !0xffff).unwrap_or(usize::MAX);
    let extent = Extent {
        working_set: bytes(within(free, WORKING_SET, WORKING_SET_CACHES, cache)),
        cached: bytes(cache.map_or(8 << 20, |cache| cache.0 / CACHED_SHARE)).max(1 << 16),
        cached_passes: CACHED_PASSES,
        blocks_per_multiprocessor: &[1, 2, 4, 8, 16],
        runs: if quick { 5 } else { 15 },
    };
    let mut probe = DeviceProbe::new(driver);
    let mut ceilings = probe.ceilings(&extent)?;
    ceilings.last_cache_bytes = cache;
    let (burst, sustained) = gemm(index, quick, largest_product(free))?;
    ceilings.gemm_flops_per_s = burst;
    let at_a_time = LINK_BYTES.min(extent.working_set);
    let mut link = |direction| -> Result<Option<Spread>, ProbeError> {
        let seconds = probe.device().link_seconds(direction, at_a_time, extent.runs)?;
        let rates: Vec<f64> = seconds.iter().map(|seconds| at_a_time as f64 / seconds).collect();
        Ok(Spread::of(&rates))
    };
    ceilings.gpu = Some(GpuCeilings {
        sustained_gemm_flops_per_s: sustained,
        host_to_device_bytes_per_s: link(Direction::ToDevice)?,
        device_to_host_bytes_per_s: link(Direction::ToHost)?,
        ..ceilings.gpu.unwrap_or_default()
    });
    Ok(ceilings)
}

/// A quarter of what is free, at the most: so many bytes, or so many times the cache where that is more.
fn within(free: Bytes, bytes: u64, caches: u64, cache: Option<Bytes>) -> u64 {
    let beyond = cache.map_or(0, |cache| cache.0.saturating_mul(caches));
    (free.0 / 4).min(bytes.max(beyond))
}

/// Bytes of sums over GPUs: of hidden states of a token in the smallest models, and of some hundred in large ones.
const SUMS: [usize; 8] = [8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20];

/// Measures the links between so many GPUs from one on; sums by NCCL, too, where the machine has it.
pub fn measure_links(first: u32, count: usize, quick: bool) -> Result<LinkCeilings, ProbeError> {
    let devices = Driver::open_group(first, count)?;
    let free = devices.iter().map(Driver::free_bytes).collect::<Result<Vec<_>, _>>()?;
    let least = free.into_iter().map(|free| free.0).min().unwrap_or(0);
    let bytes = usize::try_from((least / 8).min(LINK_BYTES as u64) & !0xffff).unwrap_or(LINK_BYTES);
    let extent = LinkExtent { bytes, sums: &SUMS, runs: if quick { 5 } else { 15 } };
    let (mut found, devices) = links(devices, &extent, Tuning::default())?;
    if let Some(nccl) = Nccl::open() {
        let by = format!("NCCL {}", nccl.version());
        let times = all_reduces(devices, |rank, device, group: &mut Option<Communicator>| {
            let group = &*group.insert(nccl.join(device, rank)?);
            of_sizes(rank, device, &extent, |_, device, hidden| {
                group.all_reduce(device, &hidden.memory, hidden.rows * hidden.width)?;
                Ok("NCCL")
            })
        });
        match times {
            Ok((times, _)) => {
                found
                    .all_reduce
                    .extend(times.into_iter().map(|time| AllReduceTime { by: by.clone(), ..time }));
            }
            // What was measured before stands by itself.
            Err(error) => found.notes.push(format!("{by} was not measured: {error}")),
        }
    }
    Ok(found)
}

/// Rates by dtype.
type Peaks = BTreeMap<String, Spread>;

/// The largest side, a power of two, of products whose two factors, result and drawn numbers take at most half of so much memory, in f32.
fn largest_product(free: Bytes) -> usize {
    let elements = free.0 / 2 / (4 * 4);
    let mut side = PRODUCTS[1];
    while side > SMALLEST_PRODUCT && (side * side) as u64 > elements {
        side /= 2;
    }
    side
}

/// Peaks of the matrix product that candle's own path uses (cuBLAS), on random normal data: in bursts of the best size, and over seconds.
fn gemm(index: u32, quick: bool, largest: usize) -> Result<(Peaks, Peaks), ProbeError> {
    let mut backend = Backend::open(DeviceChoice::Cuda(index), DeviceOptions::default())?;
    let (mut bursts, mut sustained) = (Peaks::new(), Peaks::new());
    for (name, dtype) in [("bf16", DType::BF16), ("f16", DType::F16), ("f32", DType::F32)] {
        let mut best: Option<(Spread, usize)> = None;
        let device = format!("cuda:{index}");
        let failed = |size| {
            let device = &device;
            move |error| ProbeError::of_product(device, name, size, &error)
        };
        let mut sizes = PRODUCTS.map(|side| side.min(largest)).to_vec();
        sizes.dedup();
        for size in sizes.split_off(usize::from(quick && sizes.len() > 1)) {
            let rates = products(&mut backend, dtype, size, 0.0).map_err(failed(size))?;
            if let Some(rate) = Spread::of(&rates)
                && best.is_none_or(|(so_far, _)| rate.median > so_far.median)
            {
                best = Some((rate, size));
            }
        }
        if let Some((burst, size)) = best {
            bursts.insert(name.to_owned(), burst);
            let seconds = if quick { 0.5 } else { 3.0 };
            let rates = products(&mut backend, dtype, size, seconds).map_err(failed(size))?;
            // The clock has come down to what power and heat allow.
            sustained.extend(Spread::of(last_half(&rates)).map(|rate| (name.to_owned(), rate)));
        }
    }
    Ok((bursts, sustained))
}

/// FLOP rates of square products, behind three that are not counted: one burst of them, and more until so many seconds have passed.
fn products(backend: &mut Backend, dtype: DType, size: usize, seconds: f64) -> candle_core::Result<Vec<f64>> {
    let random = || Tensor::randn(0f32, 1f32, (size, size), &backend.device)?.to_dtype(dtype);
    let (a, b) = (random()?, random()?);
    let timeline = backend.timeline.as_mut();
    let wrap = candle_core::Error::wrap;
    for _ in 0..3 {
        a.matmul(&b)?;
    }
    let flops = 2.0 * (size as f64).powi(3);
    let (begin, mut rates) = (Instant::now(), Vec::new());
    while rates.is_empty() || begin.elapsed().as_secs_f64() < seconds {
        for _ in 0..BURST {
            timeline.mark().map_err(wrap)?;
            a.matmul(&b)?;
            timeline.mark().map_err(wrap)?;
        }
        let marks = timeline.drain().map_err(wrap)?;
        rates.extend(marks.chunks_exact(2).map(|pair| flops / Nanos(pair[1].0 - pair[0].0).seconds()));
    }
    Ok(rates)
}

/// Reads a gigabyte or more of the device's memory, which lies outside the pool that candle allocates from.
struct CudaCanary {
    probe: DeviceProbe<Driver>,
    read: KernelLaunch,
    /// What the launch points to.
    _buffers: [DriverMemory; 2],
    /// What it reads, where that is far more than L2 holds.
    bytes: Option<Bytes>,
    seconds: f64,
}

/// Whether L2 can hold too little of a canary's bytes to matter to their rate.
fn is_in_memory(bytes: Bytes, cache: Bytes) -> bool {
    bytes.0 / RATE_CACHES >= cache.0
}

/// The canary of a GPU.
pub fn canary(index: u32) -> Result<Box<dyn Canary>, ProbeError> {
    let mut driver = Driver::open(index)?;
    let (free, cache) = (driver.free_bytes()?, driver.cache_bytes());
    let bytes = within(free, CANARY_BYTES, CANARY_CACHES, cache) & !0xffff;
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    let (buffer, sum) = (driver.allocate_outside_pool(bytes)?, driver.allocate_outside_pool(4)?);
    driver.upload(&sum, 0, &[0; 4])?;
    let blocks = driver.multiprocessors() * 8;
    driver.launch(&super::device::write(&memory_of::<Driver>(&buffer), blocks))?;
    driver.synchronise()?;
    let read = read(&memory_of::<Driver>(&buffer), &memory_of::<Driver>(&sum), blocks);
    let bytes = Bytes(bytes as u64);
    let bytes = cache.filter(|cache| is_in_memory(bytes, *cache)).map(|_| bytes);
    let probe = DeviceProbe::new(driver);
    Ok(Box::new(CudaCanary { probe, read, _buffers: [buffer, sum], bytes, seconds: f64::NAN }))
}

impl Canary for CudaCanary {
    fn run(&mut self) -> f64 {
        let times = self.probe.time(3, &self.read);
        self.seconds = times.map_or(f64::NAN, |times| times.into_iter().fold(f64::INFINITY, f64::min));
        self.seconds
    }

    fn read_rate(&self) -> Option<BytesPerSecond> {
        let time = Nanos(self.seconds * 1e9);
        self.bytes.filter(|_| time.0 > 0.0 && time.0.is_finite()).map(|bytes| bytes.per(time))
    }
}

/// Spins of known length on the device, timed by events.
pub fn check_spins(index: u32) -> Result<Vec<Check>, ProbeError> {
    Ok(DeviceProbe::new(Driver::open(index)?).spins(&SPINS)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nearly_full_device_multiplies_smaller_matrices() {
        let of = |bytes| largest_product(Bytes(bytes));
        // Four matrices of 8,192 in f32 are a GiB, and half of the memory stays free.
        assert_eq!([of(100 << 30), of(2 << 30), of((2 << 30) - 1)], [8192, 8192, 4096]);
        assert_eq!([of(32 << 20), of(31 << 20), of(0)], [1024, 512, SMALLEST_PRODUCT]);
    }

    #[test]
    fn what_is_read_is_many_times_what_l2_holds_where_there_is_room() {
        let of = |free: u64, cache: Option<u64>| {
            let (free, cache) = (Bytes(free), cache.map(Bytes));
            [(WORKING_SET, WORKING_SET_CACHES), (CANARY_BYTES, CANARY_CACHES)]
                .map(|(bytes, caches)| within(free, bytes, caches, cache))
        };
        // An A100, an H200, a B200; one that does not say; one that is nearly full.
        assert_eq!(of(80 << 30, Some(40 << 20)), [5 << 30, 5 << 28]);
        assert_eq!(of(140 << 30, Some(50 << 20)), [6400 << 20, 1600 << 20]);
        assert_eq!(of(180 << 30, Some(126 << 20)), [16_128 << 20, 4032 << 20]);
        assert_eq!(of(80 << 30, None), [4 << 30, 1 << 30]);
        assert_eq!(of(1 << 30, Some(50 << 20)), [256 << 20; 2]);
        let cache = Bytes(50 << 20);
        assert_eq!(
            [400 << 20, (400 << 20) - 1].map(|bytes| is_in_memory(Bytes(bytes), cache)),
            [true, false]
        );
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn ceilings_of_a_real_gpu_are_positive() {
        let ceilings = measure_cuda(0, true).unwrap();
        assert!(ceilings.read_bytes_per_s.median > 1e11);
    }
}
