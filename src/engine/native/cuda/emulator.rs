//! A device that runs the kernels on the host, compiled from the same sources, one fiber per CUDA thread.
//!
//! Enters: what [`Device`] says, and a seed. Leaves: the same results as a GPU up to rounding, or an error where a kernel deadlocks, is launched
//! with wrong arguments, pointers to freed memory or a grid that no GPU takes, or writes out of bounds. Unwritten memory holds NaN. What fails
//! while a graph is recorded makes the recording void, and so does a kernel that was never launched before. For tests only: it is thousands of times slower than a GPU.
#![expect(unsafe_code, reason = "hands kernels that are compiled as C++ the addresses of its memory")]

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, CString, c_void};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::device::{Argument, Device, Gemm, GemmOperands, KernelLaunch, MAX_GRID_YZ};
use super::device_matrix::KernelFormat;
use super::kernels::Tuning;
use crate::engine::timeline::MonotonicTimeline;
use crate::engine::{EngineError, Timeline};

/// The name in errors.
const NAME: &str = "emulated";

/// What surrounds an allocation, and what fills it until it is written: not a number in f32, f16 and bf16.
const POISON: u8 = 0xff;
const GUARD: usize = 256;
/// What a block of an H100 can have. *Source*: CUDA programming guide, compute capabilities.
const SHARED_BYTES: usize = 227 << 10;
/// Threads of a block. *Source*: the same table.
const MAX_THREADS: u32 = 1024;

/// Allocations of a device that are not freed: their addresses and sizes.
#[derive(Debug, Clone, Default)]
struct Live(Arc<Mutex<BTreeMap<u64, usize>>>);

impl Live {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether so many bytes from an address on lie in one of them.
    fn holds(&self, address: u64, bytes: usize) -> bool {
        let live = self.lock();
        let below = live.range(..=address).next_back();
        below.is_some_and(|(start, size)| address + bytes as u64 <= start + *size as u64)
    }
}

/// An allocation between two guards.
#[derive(Debug)]
pub struct EmulatedMemory {
    start: NonNull<u8>,
    bytes: usize,
    live: Live,
}

// SAFETY: nothing but this has the allocation, and kernels, which run while somebody holds the device.
unsafe impl Send for EmulatedMemory {}

impl EmulatedMemory {
    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes + 2 * GUARD, GUARD)
            .expect("a test's memory is far below the address space")
    }

    fn new(bytes: usize, live: &Live) -> Self {
        let layout = Self::layout(bytes);
        // SAFETY: the size is not zero: there are guards.
        let start = unsafe { alloc(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        // SAFETY: as many bytes were allocated.
        unsafe { start.as_ptr().write_bytes(POISON, layout.size()) };
        let memory = Self { start, bytes, live: live.clone() };
        live.lock().insert(memory.address() as u64, bytes);
        memory
    }

    fn address(&self) -> *mut u8 {
        // SAFETY: behind the first guard.
        unsafe { self.start.as_ptr().add(GUARD) }
    }

    /// Whether its guard bytes are intact.
    fn is_sound(&self) -> bool {
        // SAFETY: both guards are part of the allocation.
        let guards = unsafe {
            [
                std::slice::from_raw_parts(self.start.as_ptr(), GUARD),
                std::slice::from_raw_parts(self.start.as_ptr().add(GUARD + self.bytes), GUARD),
            ]
        };
        guards.iter().all(|guard| guard.iter().all(|byte| *byte == POISON))
    }
}

impl Drop for EmulatedMemory {
    fn drop(&mut self) {
        let sound = self.is_sound();
        self.live.lock().remove(&(self.address() as u64));
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.start.as_ptr(), Self::layout(self.bytes)) };
        assert!(
            sound || std::thread::panicking(),
            "a kernel wrote beside an allocation of {} bytes",
            self.bytes
        );
    }
}

/// Splits of 16 positions and little shared memory: the paths of long contexts and wide layers, on tiny models.
pub const SMALL: Tuning = Tuning {
    input_bytes: 4 << 10,
    min_split: 16,
    min_tiled_rows: 5,
    min_library_rows: usize::MAX,
    min_widened_rows: usize::MAX,
    min_prefill_rows: usize::MAX,
    max_one_shot_bytes: 2 << 10,
    rank_timeout: Duration::from_secs(30),
};

/// What a graph is made of.
#[derive(Debug, Clone)]
pub enum GraphNode {
    KernelLaunch(KernelLaunch),
    Gemm(Gemm, GemmOperands),
}

/// The kernels of a device, which its graphs need until they are gone.
#[derive(Debug)]
struct Modules;

/// A recorded graph.
#[derive(Debug)]
pub struct EmulatedGraph {
    pub nodes: Vec<GraphNode>,
    modules: Weak<Modules>,
}

impl Drop for EmulatedGraph {
    fn drop(&mut self) {
        let loaded = self.modules.strong_count() > 0;
        assert!(
            loaded || std::thread::panicking(),
            "the kernels of a graph were unloaded before it was destroyed"
        );
    }
}

/// The emulated device.
#[derive(Debug)]
pub struct Emulated {
    random: u64,
    /// As [`Device::multiprocessors`].
    pub multiprocessors: u32,
    /// As [`Device::shared_bytes`].
    pub shared_bytes: usize,
    modules: Arc<Modules>,
    live: Live,
    /// `Err` when something failed since: the recording is void.
    recording: Option<Result<Vec<GraphNode>, String>>,
    /// Whether launches are checked and not run.
    pub only_checks: bool,
    /// The launch that fails, counted from here: a planted fault.
    pub fails_in: Option<usize>,
    /// Another: a recorded graph lacks its last two kernels, so that the next token of a step stays what it was.
    pub forgets: bool,
    /// Another: a bit of what is downloaded is flipped.
    pub flips: bool,
    /// Kernels run so far, or checked.
    pub launches: usize,
    /// Their names: a GPU has loaded these.
    loaded: BTreeSet<String>,
    /// Graphs replayed so far.
    pub replays: usize,
}

impl Emulated {
    /// A device whose threads and blocks are scheduled by a seed.
    pub fn new(seed: u64) -> Self {
        Self {
            random: seed,
            multiprocessors: 2,
            shared_bytes: SHARED_BYTES,
            modules: Arc::new(Modules),
            live: Live::default(),
            recording: None,
            only_checks: false,
            fails_in: None,
            forgets: false,
            flips: false,
            launches: 0,
            loaded: BTreeSet::new(),
            replays: 0,
        }
    }

    /// Devices that reach each other's memory.
    pub fn group(count: u64) -> Vec<Self> {
        let first = Self::new(0);
        (0..count).map(|seed| first.beside(seed)).collect()
    }

    /// Another device, which reaches the memory of this one.
    pub fn beside(&self, seed: u64) -> Self {
        Self { live: self.live.clone(), ..Self::new(seed) }
    }

    /// Bytes of its allocations, and of those of its group, that are not freed.
    pub fn live_bytes(&self) -> usize {
        self.live.lock().values().sum()
    }

    fn failed(detail: impl Into<String>) -> EngineError {
        EngineError::Device { device: NAME.into(), detail: detail.into() }
    }

    /// What a driver refuses when a kernel is launched or recorded.
    fn check_launch(&mut self, launch: &KernelLaunch) -> Result<(), EngineError> {
        let KernelLaunch { kernel, grid, threads, .. } = launch;
        if let Some(left) = self.fails_in {
            self.fails_in = left.checked_sub(1);
            if left == 0 {
                return Err(Self::failed(format!("{kernel}: a planted fault")));
            }
        }
        let most = [i32::MAX as usize, MAX_GRID_YZ, MAX_GRID_YZ];
        let fits = grid.iter().zip(most).all(|(blocks, most)| (1..=most).contains(&(*blocks as usize)));
        if !fits || !(1..=MAX_THREADS).contains(threads) {
            return Err(Self::failed(format!("{kernel}: a grid of {grid:?} blocks of {threads} threads")));
        }
        if launch.shared_bytes as usize > self.shared_bytes {
            let what = format!("{}: {} bytes of shared memory", launch.kernel, launch.shared_bytes);
            return Err(Self::failed(format!("{what}, of {}", self.shared_bytes)));
        }
        for argument in &launch.arguments {
            if let Argument::Address(address @ 1..) = argument
                && !self.live.holds(*address, 1)
            {
                return Err(Self::failed(format!("{}: an argument points to freed memory", launch.kernel)));
            }
        }
        Ok(())
    }

    fn run(&mut self, launch: &KernelLaunch) -> Result<(), EngineError> {
        self.check_launch(launch)?;
        let name = CString::new(launch.kernel.as_str()).expect("a symbol has no zero");
        let (arguments, kinds): (Vec<*const c_void>, Vec<&CStr>) = launch
            .arguments
            .iter()
            .map(|argument| match argument {
                Argument::Address(value) => ((&raw const *value).cast::<c_void>(), c"p8"),
                Argument::U64(value) => ((&raw const *value).cast(), c"u8"),
                Argument::I32(value) => ((&raw const *value).cast(), c"u4"),
                Argument::F32(value) => ((&raw const *value).cast(), c"f4"),
            })
            .unzip();
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.launches += 1;
        if !self.loaded.contains(&launch.kernel) {
            self.loaded.insert(launch.kernel.clone());
        }
        if self.only_checks {
            return Ok(());
        }
        let emulated = hbmark_emulated_kernels::Launch {
            kernel: &name,
            grid: launch.grid,
            threads: launch.threads,
            shared_bytes: launch.shared_bytes as usize,
            arguments: &arguments,
            kinds: &kinds,
            seed: self.random,
        };
        // SAFETY: the arguments live until the kernel ends; whether addresses and sizes fit each other is what the typed wrappers check, and
        // guards around allocations notice.
        unsafe { emulated.run() }.map_err(|error| Self::failed(format!("{}: {error}", launch.kernel)))
    }

    fn capture_or_run(&mut self, work: GraphNode) -> Result<(), EngineError> {
        if self.recording.is_none() {
            return self.work(&work);
        }
        if let GraphNode::KernelLaunch(launch) = &work
            && let Err(error) = self.check_launch(launch)
        {
            self.recording = Some(Err(error.to_string()));
            return Err(error);
        }
        if let GraphNode::KernelLaunch(KernelLaunch { kernel, .. }) = &work
            && !self.loaded.contains(kernel)
        {
            self.not_recorded(&format!("the first launch of {kernel}"))?;
        }
        match &mut self.recording {
            Some(Ok(recorded)) => recorded.push(work),
            Some(Err(why)) => return Err(Self::failed(format!("the recording is void: {why}"))),
            None => {}
        }
        Ok(())
    }

    /// Refuses what no recording takes, which makes it void.
    fn not_recorded(&mut self, what: &str) -> Result<(), EngineError> {
        if self.recording.is_none() {
            return Ok(());
        }
        let why = format!("{what} while a graph is recorded");
        self.recording = Some(Err(why.clone()));
        Err(Self::failed(why))
    }

    fn work(&mut self, work: &GraphNode) -> Result<(), EngineError> {
        match work {
            GraphNode::KernelLaunch(launch) => self.run(launch),
            GraphNode::Gemm(..) if self.only_checks => Ok(()),
            GraphNode::Gemm(product, operands) => self.product(product, operands),
        }
    }

    /// A product, term by term.
    fn product(&self, product: &Gemm, operands: &GemmOperands) -> Result<(), EngineError> {
        let Gemm { format, rows, outputs, columns, bias, accumulate } = *product;
        let widen: fn(u16) -> f32 = match format {
            KernelFormat::Bf16 => |bits| half::bf16::from_bits(bits).to_f32(),
            KernelFormat::F16 => |bits| half::f16::from_bits(bits).to_f32(),
            _ => return Err(Self::failed(format!("no product of {}", format.name()))),
        };
        let sides = [
            (operands.inputs, 2 * rows * columns),
            (operands.weights, 2 * outputs * columns),
            (operands.out, 4 * rows * outputs),
            (operands.bias, if bias { 4 * outputs } else { 0 }),
        ];
        if sides.iter().any(|(address, bytes)| *bytes > 0 && !self.live.holds(*address, *bytes)) {
            return Err(Self::failed("a side of a product reaches beyond its memory"));
        }
        // SAFETY: all of it lies in allocations that are alive, checked above, and nothing else uses them meanwhile; out is no other side.
        let (inputs, weights, out, bias) = unsafe {
            let halves = |address: u64, count| std::slice::from_raw_parts(address as *const u16, count);
            let out = std::slice::from_raw_parts_mut(operands.out as *mut f32, rows * outputs);
            let bias = bias.then(|| std::slice::from_raw_parts(operands.bias as *const f32, outputs));
            (halves(operands.inputs, rows * columns), halves(operands.weights, outputs * columns), out, bias)
        };
        for (input, sums) in inputs.chunks_exact(columns).zip(out.chunks_exact_mut(outputs)) {
            for (o, (sum, row)) in sums.iter_mut().zip(weights.chunks_exact(columns)).enumerate() {
                let before = if accumulate { *sum } else { 0.0 };
                let dot: f32 = row.iter().zip(input).map(|(w, x)| widen(*w) * widen(*x)).sum();
                *sum = before + dot + bias.map_or(0.0, |bias| bias[o]);
            }
        }
        Ok(())
    }

    fn check(memory: &EmulatedMemory, offset: usize, bytes: usize) -> Result<(), EngineError> {
        if offset + bytes > memory.bytes {
            return Err(Self::failed(format!("a copy of {bytes} bytes at {offset} of {}", memory.bytes)));
        }
        if !memory.is_sound() {
            return Err(Self::failed(format!(
                "a kernel wrote beside an allocation of {} bytes",
                memory.bytes
            )));
        }
        Ok(())
    }
}

impl Device for Emulated {
    type Memory = EmulatedMemory;
    type Graph = EmulatedGraph;

    fn name(&self) -> &str {
        NAME
    }

    fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    fn shared_bytes(&self) -> usize {
        self.shared_bytes
    }

    fn timeline(&self) -> Box<dyn Timeline + Send> {
        Box::new(MonotonicTimeline::default())
    }

    fn allocate(&mut self, bytes: usize) -> Result<EmulatedMemory, EngineError> {
        self.not_recorded(&format!("an allocation of {bytes} bytes"))?;
        Ok(EmulatedMemory::new(bytes, &self.live))
    }

    fn address(memory: &EmulatedMemory) -> u64 {
        memory.address() as u64
    }

    fn bytes(memory: &EmulatedMemory) -> usize {
        memory.bytes
    }

    fn upload(&mut self, to: &EmulatedMemory, offset: usize, source: &[u8]) -> Result<(), EngineError> {
        self.not_recorded("a copy to the device")?;
        Self::check(to, offset, source.len())?;
        // SAFETY: the range lies within the allocation, which `source` cannot be part of.
        unsafe { to.address().add(offset).copy_from_nonoverlapping(source.as_ptr(), source.len()) };
        Ok(())
    }

    fn download(
        &mut self,
        from: &EmulatedMemory,
        offset: usize,
        target: &mut [u8],
    ) -> Result<(), EngineError> {
        Self::check(from, offset, target.len())?;
        // SAFETY: the range lies within the allocation, which `target` cannot be part of.
        unsafe { target.as_mut_ptr().copy_from_nonoverlapping(from.address().add(offset), target.len()) };
        if self.flips && target.len() > 1 {
            target[1] ^= 4;
        }
        Ok(())
    }

    fn launch(&mut self, launch: &KernelLaunch) -> Result<(), EngineError> {
        self.capture_or_run(GraphNode::KernelLaunch(launch.clone()))
    }

    fn multiply(&mut self, product: &Gemm, operands: &GemmOperands) -> Result<(), EngineError> {
        if let Some((side, address)) = operands.misaligned() {
            return Err(Self::failed(format!("{side} of a product at {address:#x}")));
        }
        self.capture_or_run(GraphNode::Gemm(*product, *operands))
    }

    fn begin_capture(&mut self) -> Result<(), EngineError> {
        self.recording = Some(Ok(Vec::new()));
        Ok(())
    }

    fn end_capture(&mut self) -> Result<EmulatedGraph, EngineError> {
        let recorded = self.recording.take().ok_or_else(|| Self::failed("no graph is being recorded"))?;
        let mut nodes = recorded.map_err(|why| Self::failed(format!("the recording is void: {why}")))?;
        if self.forgets {
            nodes.truncate(nodes.len() - 2);
        }
        Ok(EmulatedGraph { nodes, modules: Arc::downgrade(&self.modules) })
    }

    fn replay(&mut self, graph: &EmulatedGraph) -> Result<(), EngineError> {
        self.replays += 1;
        graph.nodes.iter().try_for_each(|work| self.work(work))
    }

    fn synchronise(&mut self) -> Result<(), EngineError> {
        Ok(())
    }
}
