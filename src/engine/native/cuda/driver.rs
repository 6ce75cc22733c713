//! A GPU through its driver.
//!
//! Enters: what [`Device`] says. Leaves: the same on one stream of the device's primary context, which candle uses too. Kernels use programmatic dependent
//! launch where the GPU has it (9.0 and up): a kernel starts while the previous one ends, and waits for it before it reads its results;
//! recorded graphs keep those edges.
#![expect(unsafe_code, reason = "launching kernels by name with arguments by value has no safe form")]

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::{
    CudaContext, CudaFunction, CudaGraph, CudaModule, CudaSlice, CudaStream, DevicePtr, DriverError,
    PinnedHostSlice, result, sys,
};
use cudarc::nvrtc::Ptx;

use super::cublaslt::CublasLt;
use super::device::{Argument, Device, Gemm, GemmOperands, KernelLaunch};
use crate::engine::cuda::{self, EventTimeline};
use crate::engine::native::refuse;
use crate::engine::{EngineError, Timeline};
use hbmark_core::units::{Bytes, Nanos};

/// The fatbin of a kernel file.
macro_rules! kernels {
    ($file:literal) => {
        include_bytes!(concat!(env!("OUT_DIR"), "/", $file, ".fatbin"))
    };
}

/// The compiled kernels, each file with what the names of its kernels begin with.
const MODULES: [(&[&str], &[u8]); 19] = [
    (&["add_normed"], kernels!("add_normed")),
    (&["all_reduce", "reduce_slice", "gather_slices", "first_of_ranks"], kernels!("all_reduce")),
    (&["decode_attention"], kernels!("decode_attention")),
    (&["embed"], kernels!("embed")),
    (&["experts_"], kernels!("experts")),
    (&["fill_kv"], kernels!("fill_kv")),
    (&["gate_up"], kernels!("gate_up")),
    (&["head"], kernels!("head")),
    (&["join_state"], kernels!("join_state")),
    (
        &["latent_finish", "latent_gather", "latent_product", "latent_tiled", "latent_turn"],
        kernels!("latent"),
    ),
    (&["latent_attention"], kernels!("latent_attention")),
    (&["norm_qkv"], kernels!("norm_qkv")),
    (&["prefill_attention"], kernels!("prefill_attention")),
    (&["prepare_rows"], kernels!("prepare_rows")),
    (&["project_add"], kernels!("project_add")),
    (&["tiled", "finish_", "first_largest"], kernels!("tiled_layers")),
    (&BANDWIDTH, kernels!("bandwidth")),
    (&["spin", "empty"], kernels!("timer")),
    (&["widen_"], kernels!("widen_blocks")),
];

/// A kernel of the smallest file: where there is no code for a device in it, there is none in any.
const SMALLEST: &str = "empty";

/// The kernels of the bandwidth probe, whose loads are kept in L1 until they arrive.
const BANDWIDTH: [&str; 4] = ["read_", "write_pattern", "copy", "triad"];

/// Shared memory, static and dynamic together, that a kernel has without asking. *Source*: CUDA programming guide, shared memory.
const SHARED_BYTES: i32 = 48 << 10;

/// As much of L1 as shared memory as there may be, in per cent. A kernel that needs little would be given little otherwise, and a dependent
/// launch that needs more could not begin beside it. *Source*: CUDA programming guide, shared memory of compute capability 7.x.
const MOST_SHARED: i32 = 100;

/// PTX from which on kernels wait for the launch that they depend on.
const DEPENDENT_PTX: i32 = 90;

/// Bytes of results that arrive in pinned memory: the tokens of any batch.
const ARRIVAL_BYTES: usize = 64 << 10;

/// Which way a copy between host and device goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    ToDevice,
    ToHost,
}

/// An allocation of the stream.
#[derive(Debug)]
pub struct DriverMemory {
    slice: CudaSlice<u8>,
    address: u64,
}

impl Drop for DriverMemory {
    /// A thread with memory of several devices frees it on the device that has it.
    fn drop(&mut self) {
        // A device that failed has lost the memory, too.
        let _ = self.slice.context().bind_to_thread();
    }
}

/// A recorded graph, ready to launch.
pub struct DriverGraph(CudaGraph);

// SAFETY: the driver's handles belong to no thread, and whoever has a graph is the only one that uses it.
unsafe impl Send for DriverGraph {}

impl std::fmt::Debug for DriverGraph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("DriverGraph")
    }
}

/// A kernel, ready to be launched.
#[derive(Debug, Clone)]
struct LoadedKernel {
    function: CudaFunction,
    /// Dynamic shared memory that a launch may have.
    shared_bytes: i32,
    /// Whether it may begin before the kernel in front of it has ended, and waits for it where it needs what that one writes.
    dependent: bool,
}

/// A GPU. Clones share stream and kernels.
#[derive(Debug, Clone)]
pub struct Driver {
    name: String,
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    /// Those of [`MODULES`] of which a kernel was launched: of what a device has PTX of alone, each is compiled when it is loaded.
    modules: Arc<[OnceLock<Arc<CudaModule>>; MODULES.len()]>,
    /// Those that were launched.
    kernels: HashMap<String, LoadedKernel>,
    multiprocessors: u32,
    shared_bytes: usize,
    /// Whether the device reads the host's pageable memory itself, and so perhaps after a copy's call has returned.
    reads_pageable: bool,
    recording: bool,
    /// Where tokens arrive, without the driver's detour for pageable memory; there from the first download on.
    arrivals: Arc<Mutex<Option<PinnedHostSlice<u8>>>>,
    /// Opened by the first product.
    products: Arc<Mutex<Option<CublasLt>>>,
}

impl Driver {
    /// Opens a device. Kernels are loaded by the first launch of one of their file, which comes before any recording.
    pub fn open(index: u32) -> Result<Self, EngineError> {
        let name = format!("cuda:{index}");
        let failed = |error: DriverError| cuda::failed(&name, error);
        cuda::require(index, &name)?;
        let context = CudaContext::new(index as usize).map_err(failed)?;
        let stream = context.new_stream().map_err(failed)?;
        // SAFETY: everything of this device is made, used and freed on its one stream. Tracked, allocations would record events that break
        // the recording of graphs.
        unsafe { context.disable_event_tracking() };
        let attribute = |attribute| context.attribute(attribute).map_err(failed);
        let multiprocessors =
            attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.unsigned_abs();
        let shared_bytes =
            attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?
                .unsigned_abs() as usize;
        let host_page_tables =
            sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES;
        let reads_pageable = attribute(host_page_tables).is_ok_and(|uses| uses != 0);
        let driver = Self {
            context,
            stream,
            modules: Arc::new([const { OnceLock::new() }; MODULES.len()]),
            kernels: HashMap::new(),
            multiprocessors,
            shared_bytes,
            reads_pageable,
            recording: false,
            arrivals: Arc::default(),
            products: Arc::default(),
            name,
        };
        driver.module(SMALLEST)?;
        Ok(driver)
    }

    /// Opens the devices of a group, each of which reaches the memory of the others.
    pub fn open_group(first: u32, count: usize) -> Result<Vec<Self>, EngineError> {
        let last = u32::try_from(count).map_or(u32::MAX, |count| first.saturating_add(count - 1));
        if let Err(EngineError::NoCudaDevice { detail, .. }) = cuda::require(last, &format!("cuda:{last}")) {
            return refuse(
                format!("a group of {count} GPUs from cuda:{first} on"),
                format!("{detail}; ask for fewer, or make more visible with CUDA_VISIBLE_DEVICES"),
            );
        }
        let group: Vec<Self> = (first..=last).map(Self::open).collect::<Result<_, _>>()?;
        for device in &group {
            device.reach(&group)?;
            // A load may wait for kernels, and those of a group wait for ranks that may be loading (CUDA programming guide, lazy loading).
            (0..MODULES.len())
                .try_for_each(|index| device.module_at(index, MODULES[index].0[0]).map(drop))?;
        }
        Ok(group)
    }

    /// Checks that the devices of a group are of one kind, and lets kernels of this one touch the memory of the others.
    fn reach(&self, group: &[Self]) -> Result<(), EngineError> {
        let failed = |error: DriverError| self.failed(error);
        self.bind()?;
        let kind = |device: &Self| device.context.name().map_err(failed);
        for other in group.iter().filter(|other| other.name != self.name) {
            let (own_kind, other_kind) = (kind(self)?, kind(other)?);
            if own_kind != other_kind {
                let what = format!("a group of {} ({own_kind}) and {} ({other_kind})", self.name, other.name);
                return refuse(what, "its GPUs must be alike; choose them by CUDA_VISIBLE_DEVICES");
            }
            let mut reaches = 0;
            // SAFETY: both are devices of open contexts; the answer is written before it is read.
            unsafe {
                sys::cuDeviceCanAccessPeer(
                    &raw mut reaches,
                    self.context.cu_device(),
                    other.context.cu_device(),
                )
            }
            .result()
            .map_err(failed)?;
            if reaches == 0 {
                return refuse(
                    format!("a group of {} and {}", self.name, other.name),
                    "one cannot access the memory of the other (`nvidia-smi topo -p2p r` says why); sums need NVLink, or PCIe with peer access",
                );
            }
            // SAFETY: the context of this device is current, and the other one is open.
            let enabled = unsafe { sys::cuCtxEnablePeerAccess(other.context.cu_ctx(), 0) };
            if enabled != sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED {
                enabled.result().map_err(failed)?;
            }
        }
        Ok(())
    }

    /// Free memory.
    pub fn free_bytes(&self) -> Result<Bytes, EngineError> {
        self.context.mem_get_info().map(|(free, _)| Bytes(free as u64)).map_err(|error| self.failed(error))
    }

    /// The size of the L2 cache, where the driver reports it.
    pub fn cache_bytes(&self) -> Option<Bytes> {
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE;
        self.context.attribute(attribute).ok().map(|bytes| Bytes(u64::from(bytes.unsigned_abs())))
    }

    /// Memory that no pool counts: the peak of the pool stays what models use.
    pub fn allocate_outside_pool(&mut self, bytes: usize) -> Result<DriverMemory, EngineError> {
        self.bind()?;
        // SAFETY: the context is bound.
        let address = unsafe { result::malloc_sync(bytes) }.map_err(|error| self.failed(error))?;
        // SAFETY: the pointer is an allocation of so many bytes with no other owner, and any bytes are valid. The slice frees it in stream
        // order, which the driver allows for cuMemAlloc too (CUDA programming guide, stream-ordered memory allocator).
        let slice = unsafe { self.stream.upgrade_device_ptr::<u8>(address, bytes) };
        Ok(DriverMemory { slice, address })
    }

    /// Seconds of each of `runs` copies between pinned memory of the host and the device, behind one that is not counted. The bytes are
    /// checked at the end.
    pub fn link_seconds(
        &mut self,
        direction: Direction,
        bytes: usize,
        runs: usize,
    ) -> Result<Vec<f64>, EngineError> {
        let failed = |error: DriverError| cuda::failed(&self.name, error);
        // SAFETY: both are written whole before they are read.
        let (mut source, mut target) = unsafe {
            let pinned = || self.context.alloc_pinned_with_flags::<u8>(bytes, 0);
            (pinned().map_err(failed)?, pinned().map_err(failed)?)
        };
        let pattern = |index: usize| (index.wrapping_mul(167) >> 3).to_le_bytes()[0];
        source
            .as_mut_slice()
            .map_err(failed)?
            .iter_mut()
            .enumerate()
            .for_each(|(i, byte)| *byte = pattern(i));
        // SAFETY: the first copy writes it whole.
        let mut memory = unsafe { self.stream.alloc::<u8>(bytes) }.map_err(failed)?;
        self.stream.memcpy_htod(&source, &mut memory).map_err(failed)?;
        let mut timeline = EventTimeline::new(self.stream.clone(), &self.name);
        for _ in 0..=runs {
            timeline.mark()?;
            match direction {
                Direction::ToDevice => self.stream.memcpy_htod(&source, &mut memory),
                Direction::ToHost => self.stream.memcpy_dtoh(&memory, &mut target),
            }
            .map_err(failed)?;
            timeline.mark()?;
        }
        let marks = timeline.drain()?;
        self.stream.memcpy_dtoh(&memory, &mut target).map_err(failed)?;
        self.stream.synchronize().map_err(failed)?;
        if source.as_slice().map_err(failed)? != target.as_slice().map_err(failed)? {
            return Err(self.refused(format!("{bytes} bytes came back from the device changed")));
        }
        let times = marks.chunks_exact(2).map(|pair| Nanos(pair[1].0 - pair[0].0).seconds());
        Ok(times.skip(1).collect())
    }

    /// Makes its context that of this thread, for a library.
    pub(super) fn bind(&self) -> Result<(), EngineError> {
        self.context.bind_to_thread().map_err(|error| self.failed(error))
    }

    /// The stream, for a library.
    pub(super) fn raw_stream(&self) -> sys::CUstream {
        self.stream.cu_stream()
    }

    fn failed(&self, error: DriverError) -> EngineError {
        cuda::failed(&self.name, error)
    }

    fn refused(&self, detail: String) -> EngineError {
        EngineError::Device { device: self.name.clone(), detail }
    }

    /// A kernel that may be launched with so much dynamic shared memory. Layers of different widths launch the same one with more or less.
    fn kernel(&mut self, symbol: &str, shared_bytes: u32) -> Result<&LoadedKernel, EngineError> {
        if !self.kernels.contains_key(symbol) {
            let loaded = self.load(symbol)?;
            self.kernels.insert(symbol.to_owned(), loaded);
        }
        let kernel = self.kernels.get_mut(symbol).expect("what was not there has just been loaded");
        let wanted = i32::try_from(shared_bytes).unwrap_or(i32::MAX);
        if wanted > kernel.shared_bytes {
            let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let allowed = kernel.function.set_attribute(attribute, wanted);
            allowed.map_err(|error| cuda::failed(&self.name, error))?;
            kernel.shared_bytes = wanted;
        }
        Ok(kernel)
    }

    /// The module of a kernel.
    fn module(&self, kernel: &str) -> Result<&Arc<CudaModule>, EngineError> {
        let index = MODULES.iter().position(|(prefixes, _)| begins_with_one_of(kernel, prefixes));
        match index {
            Some(index) => self.module_at(index, kernel),
            None => Err(self.refused(format!("there is no kernel {kernel}"))),
        }
    }

    fn module_at(&self, index: usize, kernel: &str) -> Result<&Arc<CudaModule>, EngineError> {
        if let Some(module) = self.modules[index].get() {
            return Ok(module);
        }
        if self.recording {
            return Err(self.refused(format!("{kernel} would be loaded while a graph is recorded")));
        }
        let image = Ptx::from_binary(MODULES[index].1.to_vec());
        let module = self.context.load_module(image).map_err(|error| self.failed(error))?;
        // A clone may have been faster.
        Ok(self.modules[index].get_or_init(|| module))
    }

    fn load(&self, kernel: &str) -> Result<LoadedKernel, EngineError> {
        let module = self.module(kernel)?;
        let prepare = || {
            let function = module.load_function(kernel)?;
            if !begins_with_one_of(kernel, &BANDWIDTH) {
                let attribute =
                    sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
                function.set_attribute(attribute, MOST_SHARED)?;
            }
            let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
            let shared_bytes = SHARED_BYTES.saturating_sub(function.get_attribute(attribute)?);
            let dependent = function.ptx_version()? >= DEPENDENT_PTX;
            Ok(LoadedKernel { function, shared_bytes, dependent })
        };
        prepare().map_err(|error| self.failed(error))
    }

    /// Copies few bytes from an address of a live allocation, which reaches so far.
    fn download_pinned(&mut self, from: u64, target: &mut [u8]) -> Result<(), EngineError> {
        let shared = self.arrivals.clone();
        let mut arrivals = shared.lock().unwrap_or_else(PoisonError::into_inner);
        if arrivals.is_none() {
            // SAFETY: it is written whole below, before anything of it is read.
            let memory = unsafe { self.context.alloc_pinned_with_flags::<u8>(ARRIVAL_BYTES, 0) };
            let mut memory = memory.map_err(|error| self.failed(error))?;
            memory.as_mut_slice().map_err(|error| self.failed(error))?.fill(0);
            *arrivals = Some(memory);
        }
        let Some(memory) = arrivals.as_mut() else { return Ok(()) };
        let arrived = memory.as_mut_slice().map_err(|error| self.failed(error))?;
        let arrived = &mut arrived[..target.len()];
        // SAFETY: the caller's promise for the device, the length of the slice for the host; the stream is waited for before it is read.
        unsafe { result::memcpy_dtoh_async(arrived, from, self.stream.cu_stream()) }
            .map_err(|error| self.failed(error))?;
        self.synchronise()?;
        target.copy_from_slice(arrived);
        Ok(())
    }

    fn check(&self, memory: &DriverMemory, offset: usize, bytes: usize) -> Result<(), EngineError> {
        if self.recording || offset + bytes > memory.slice.len() {
            let what = format!("a copy of {bytes} bytes at {offset} of {}", memory.slice.len());
            return Err(self.refused(if self.recording {
                format!("{what} while a graph is recorded")
            } else {
                what
            }));
        }
        self.bind()
    }
}

fn begins_with_one_of(kernel: &str, prefixes: &[&str]) -> bool {
    prefixes.iter().any(|prefix| kernel.starts_with(prefix))
}

impl Device for Driver {
    type Memory = DriverMemory;
    type Graph = DriverGraph;

    fn name(&self) -> &str {
        &self.name
    }

    fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    fn shared_bytes(&self) -> usize {
        self.shared_bytes
    }

    fn timeline(&self) -> Box<dyn Timeline + Send> {
        Box::new(EventTimeline::new(self.stream.clone(), &self.name))
    }

    fn allocate(&mut self, bytes: usize) -> Result<DriverMemory, EngineError> {
        if self.recording {
            return Err(self.refused(format!("an allocation of {bytes} bytes while a graph is recorded")));
        }
        // SAFETY: callers write before kernels read; undefined contents are what the trait promises.
        let slice = unsafe { self.stream.alloc::<u8>(bytes.max(1)) }.map_err(|error| self.failed(error))?;
        let address = slice.device_ptr(&self.stream).0;
        Ok(DriverMemory { slice, address })
    }

    fn allocate_shared(&mut self, bytes: usize) -> Result<DriverMemory, EngineError> {
        // Memory of a pool would have to be opened to each of the others.
        self.allocate_outside_pool(bytes)
    }

    fn address(memory: &DriverMemory) -> u64 {
        memory.address
    }

    fn bytes(memory: &DriverMemory) -> usize {
        memory.slice.len()
    }

    fn upload(&mut self, to: &DriverMemory, offset: usize, source: &[u8]) -> Result<(), EngineError> {
        self.check(to, offset, source.len())?;
        // SAFETY: the range lies within the allocation, checked above. The source is pageable, so the driver has staged it when the call
        // returns (CUDA driver API, synchronisation behaviour of copies), or the copy is waited for below.
        unsafe { result::memcpy_htod_async(to.address + offset as u64, source, self.stream.cu_stream()) }
            .map_err(|error| self.failed(error))?;
        // A machine whose GPU uses the host's page tables (GH200) needs no staging, and nothing says that it stages all the same.
        if self.reads_pageable { self.synchronise() } else { Ok(()) }
    }

    fn download(&mut self, from: &DriverMemory, offset: usize, target: &mut [u8]) -> Result<(), EngineError> {
        self.check(from, offset, target.len())?;
        if target.len() <= ARRIVAL_BYTES {
            return self.download_pinned(from.address + offset as u64, target);
        }
        // SAFETY: the range lies within the allocation, checked above; the stream is waited for before the target is read.
        unsafe { result::memcpy_dtoh_async(target, from.address + offset as u64, self.stream.cu_stream()) }
            .map_err(|error| self.failed(error))?;
        self.synchronise()
    }

    fn launch(&mut self, launch: &KernelLaunch) -> Result<(), EngineError> {
        self.bind()?;
        let LoadedKernel { function, dependent, .. } = self.kernel(&launch.kernel, launch.shared_bytes)?;
        let (function, dependent) = (function.cu_function(), *dependent);
        let mut arguments: Vec<*mut c_void> = launch
            .arguments
            .iter()
            .map(|argument| match argument {
                Argument::Address(value) | Argument::U64(value) => (&raw const *value).cast_mut().cast(),
                Argument::I32(value) => (&raw const *value).cast_mut().cast(),
                Argument::F32(value) => (&raw const *value).cast_mut().cast(),
            })
            .collect();
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: launch.grid[0],
            gridDimY: launch.grid[1],
            gridDimZ: launch.grid[2],
            blockDimX: launch.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared_bytes,
            hStream: self.stream.cu_stream(),
            attrs: &raw mut attribute,
            numAttrs: u32::from(dependent),
        };
        // SAFETY: the function is loaded, and the typed wrappers give it the arguments of its signature: the emulated device, which sees the same
        // launches, checks their number and kinds. They live until the driver has copied them, which is before the call returns. The kernels
        // wait for the last one before they touch what it may have written.
        unsafe {
            sys::cuLaunchKernelEx(&raw const config, function, arguments.as_mut_ptr(), std::ptr::null_mut())
        }
        .result()
        .map_err(|error| self.failed(error))
    }

    fn multiply(&mut self, product: &Gemm, operands: &GemmOperands) -> Result<(), EngineError> {
        self.bind()?;
        let mut library = self.products.lock().unwrap_or_else(PoisonError::into_inner);
        if library.is_none() {
            *library = Some(CublasLt::open(&self.stream, &self.name)?);
        }
        library.as_mut().map_or(Ok(()), |library| library.multiply(product, operands, self.recording))
    }

    fn begin_capture(&mut self) -> Result<(), EngineError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.stream.begin_capture(mode).map_err(|error| self.failed(error))?;
        self.recording = true;
        Ok(())
    }

    fn end_capture(&mut self) -> Result<DriverGraph, EngineError> {
        self.recording = false;
        let ended = self.stream.end_capture(sys::CUgraphInstantiate_flags(0));
        if ended.is_err() {
            // What was freed inside a void capture left an error behind, which is not the next step's.
            let _ = self.context.check_err();
        }
        let graph = ended.map_err(|error| self.failed(error))?;
        let graph = graph.ok_or_else(|| self.refused("no graph was being recorded".into()))?;
        graph.upload().map_err(|error| self.failed(error))?;
        Ok(DriverGraph(graph))
    }

    fn replay(&mut self, graph: &DriverGraph) -> Result<(), EngineError> {
        graph.0.launch().map_err(|error| self.failed(error))
    }

    fn synchronise(&mut self) -> Result<(), EngineError> {
        self.stream.synchronize().map_err(|error| self.failed(error))
    }
}
