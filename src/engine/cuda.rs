//! The CUDA device of an engine: candle's device on its own stream, and a timeline of events on that stream.
//!
//! Enters: a device index. Leaves: a [`Backend`]. All work of a session goes to one stream from one thread, so marks between steps
//! are ordered with them.
//!
//! The build links against the driver's library, so a binary with the `cuda` feature starts only where `libcuda.so.1` is found.

#![expect(
    unsafe_code,
    reason = "the driver's calls for the memory of pools and graphs, and turning off event tracking, have no safe form"
)]

use std::sync::Arc;
use std::time::Instant;

use candle_core::{CudaDevice, Device};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result, sys};

use super::device::{Backend, DeviceOptions};
use super::error_mapping::{self, of_candle};
use super::{EngineError, Timeline};
use hbmark_core::units::{Bytes, Nanos};

/// Opens candle's device on a stream of its own.
///
/// # Errors
/// [`EngineError::NoCudaDevice`] without a driver or such a device, [`EngineError::OutOfMemory`] when others fill it, and
/// [`EngineError::Device`] when it refuses for another reason.
pub fn open(index: u32, options: DeviceOptions) -> Result<Backend, EngineError> {
    let name = format!("cuda:{index}");
    let failed = |error: DriverError| failed(&name, error);
    require(index, &name)?;
    let device = CudaDevice::new_with_stream(index as usize).map_err(|error| of_candle(&name, &error))?;
    // SAFETY: every tensor of this device is made, used and freed on its one stream, so no use on another stream has to be
    // tracked. Nothing has been allocated yet.
    unsafe { device.disable_event_tracking() };
    let stream = device.cuda_stream();
    let mut pool = MemoryPool::of(stream.context()).map_err(failed)?;
    // Not said otherwise: the pool is the device's, and the reference of a session that keeps it is opened beside that.
    if options.keep_memory_pool {
        pool.keep().map_err(failed)?;
    }
    Ok(Backend {
        device: Device::Cuda(device),
        timeline: Box::new(EventTimeline::new(stream, &name)),
        name,
        peak_memory: Some(Box::new(move || pool.take_peak_with_graphs())),
    })
}

/// Checks that there is such a device.
pub(super) fn require(index: u32, name: &str) -> Result<(), EngineError> {
    let count = result::init().and_then(|()| CudaContext::device_count());
    let count = count.map_err(|error| failed(name, error))?;
    if i64::from(index) >= i64::from(count) {
        let detail = format!("this machine has {count}");
        return Err(EngineError::NoCudaDevice { asked: name.to_owned(), detail });
    }
    Ok(())
}

/// What a driver error means to a run.
pub(crate) fn failed(device: &str, error: DriverError) -> EngineError {
    error_mapping::of_driver(device, error.0 as u32, describe(error))
}

/// A driver error in words.
fn describe(error: DriverError) -> String {
    let name = error.error_name().ok().and_then(|n| n.to_str().ok()).unwrap_or("unknown CUDA error");
    let text = error.error_string().ok().and_then(|s| s.to_str().ok()).unwrap_or("no description");
    format!("{name}: {text}")
}

/// The device's default memory pool, from which candle allocates.
struct MemoryPool {
    context: Arc<CudaContext>,
    pool: sys::CUmemoryPool,
    /// Whether freed memory stays in it for as long as this lives.
    keeps: bool,
}

impl MemoryPool {
    fn of(context: &Arc<CudaContext>) -> Result<Self, DriverError> {
        context.bind_to_thread()?;
        let mut pool = std::ptr::null_mut();
        // SAFETY: the context is bound, so its device is valid; `pool` is written before it is read.
        unsafe { sys::cuDeviceGetDefaultMemPool(&raw mut pool, context.cu_device()) }.result()?;
        Ok(Self { context: context.clone(), pool, keeps: false })
    }

    fn set(&self, attribute: sys::CUmemPool_attribute, mut value: u64) -> Result<(), DriverError> {
        self.context.bind_to_thread()?;
        // SAFETY: the default pool lives as long as its device; both attributes used here are 64-bit, as `value` is.
        unsafe { sys::cuMemPoolSetAttribute(self.pool, attribute, (&raw mut value).cast()) }.result()
    }

    /// Keeps all freed memory in the pool across synchronisations.
    fn keep(&mut self) -> Result<(), DriverError> {
        self.keeps = true;
        self.set(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, u64::MAX)
    }

    /// Gives back what is in the pool and not in use.
    fn give_back(&self) -> Result<(), DriverError> {
        if self.keeps {
            self.set(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, 0)?;
        }
        // What was freed last is freed in the order of a stream.
        self.context.synchronize()?;
        // SAFETY: the default pool lives as long as its device; memory that is in use is not touched.
        unsafe { result::mem_pool::trim_to(self.pool, 0) }
    }

    /// The most that was in use since the last call.
    fn take_peak(&self) -> Option<Bytes> {
        self.context.bind_to_thread().ok()?;
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH;
        let mut value: u64 = 0;
        // SAFETY: as in `set`; `value` is 64-bit, as the attribute is.
        unsafe { sys::cuMemPoolGetAttribute(self.pool, attribute, (&raw mut value).cast()) }.result().ok()?;
        // The driver accepts only 0, and then counts from what is in use.
        self.set(attribute, 0).ok()?;
        Some(Bytes(value))
    }

    /// The most that was in use since the last call, with the memory of graphs, which no pool counts. The two need not have been in use together:
    /// a graph is replayed while its inputs and the weights are in the pool, and only what a step allocates eagerly is counted twice.
    fn take_peak_with_graphs(&self) -> Option<Bytes> {
        Some(self.take_peak()? + take_graph_peak(&self.context)?)
    }
}

impl Drop for MemoryPool {
    /// The pool outlives a session where anything else holds the device's context, and what it holds is not free to the next one.
    fn drop(&mut self) {
        // A device that failed has nothing to give back.
        let _ = self.give_back();
    }
}

/// The most that allocations inside graphs took since the last call.
fn take_graph_peak(context: &CudaContext) -> Option<Bytes> {
    context.bind_to_thread().ok()?;
    let attribute = sys::CUgraphMem_attribute::CU_GRAPH_MEM_ATTR_USED_MEM_HIGH;
    let (device, mut value) = (context.cu_device(), 0_u64);
    // SAFETY: the context is bound, so its device is valid; `value` is 64-bit, as the attribute is.
    unsafe { sys::cuDeviceGetGraphMemAttribute(device, attribute, (&raw mut value).cast()) }.result().ok()?;
    let mut zero = 0_u64;
    // SAFETY: as above; a high-water mark can be set, to 0 only.
    unsafe { sys::cuDeviceSetGraphMemAttribute(device, attribute, (&raw mut zero).cast()) }.result().ok()?;
    Some(Bytes(value))
}

/// Gives back the memory that graphs which are gone leave with the device: no pool has it, and nothing else can use it.
pub(super) fn trim_graph_memory(context: &CudaContext) -> Result<(), DriverError> {
    context.bind_to_thread()?;
    // SAFETY: the context is bound, so its device is valid; memory of graphs that still are is not touched.
    unsafe { sys::cuDeviceGraphMemTrim(context.cu_device()) }.result()
}

/// CUDA events on the stream of the steps.
pub struct EventTimeline {
    stream: Arc<CudaStream>,
    device: String,
    origin: Instant,
    /// Events are made once and used again in every block.
    events: Vec<CudaEvent>,
    set: usize,
}

impl std::fmt::Debug for EventTimeline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EventTimeline").field("set", &self.set).finish_non_exhaustive()
    }
}

impl EventTimeline {
    /// A timeline on a stream.
    pub fn new(stream: Arc<CudaStream>, device: &str) -> Self {
        Self { stream, device: device.to_owned(), origin: Instant::now(), events: Vec::new(), set: 0 }
    }

    fn failed(&self, error: DriverError) -> EngineError {
        failed(&self.device, error)
    }

    fn new_event(&self) -> Result<CudaEvent, DriverError> {
        // Without a flag cudarc makes events that keep no time.
        self.stream.context().new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT))
    }
}

impl Timeline for EventTimeline {
    fn reserve(&mut self, marks: usize) {
        while self.events.len() < self.set + marks {
            // Where one cannot be made, setting its mark says so.
            let Ok(event) = self.new_event() else { break };
            self.events.push(event);
        }
    }

    fn mark(&mut self) -> Result<(), EngineError> {
        if self.set == self.events.len() {
            let event = self.new_event().map_err(|error| self.failed(error))?;
            self.events.push(event);
        }
        self.events[self.set].record(&self.stream).map_err(|error| self.failed(error))?;
        self.set += 1;
        Ok(())
    }

    fn drain_into(&mut self, times: &mut Vec<Nanos>) -> Result<(), EngineError> {
        self.stream.synchronize().map_err(|error| self.failed(error))?;
        times.reserve(self.set);
        let mut now = 0.0;
        if self.set > 0 {
            times.push(Nanos(0.0));
        }
        // From event to event: the driver gives milliseconds in f32, which over a whole block would lose nanoseconds.
        for pair in self.events[..self.set].windows(2) {
            let gap = pair[0].elapsed_ms(&pair[1]).map_err(|error| self.failed(error))?;
            now += f64::from(gap) * 1e6;
            times.push(Nanos(now));
        }
        self.set = 0;
        Ok(())
    }

    fn host_now(&self) -> Nanos {
        self.origin.elapsed().into()
    }
}
