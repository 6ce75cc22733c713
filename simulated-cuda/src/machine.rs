//! The devices, and what is on them: contexts, streams, events, modules, graphs.
//!
//! Enters: what the driver's functions ask for. Leaves: their answers. Work is put on streams and runs when somebody waits for it, in the order of its
//! stream and behind the events that the stream was told to wait for, and in no other order. While a stream is captured, its work
//! becomes the nodes of a graph, and what CUDA refuses then is refused. An error of the device sticks.

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::ffi::c_void;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::Instant;

use crate::memory::{Kind, Memory};
use crate::script::{self, Script};
use crate::status::{self, SUCCESS};
use crate::stream::{Finish, Work};

pub type Answer<T> = Result<T, i32>;

/// Work that waits before whoever puts more there waits for it.
const LONGEST_QUEUE: usize = 1024;
/// What a context takes of a device before anything is allocated, about as an H200 does.
const CONTEXT_BYTES: usize = 520 << 20;

/// One step of a stream.
#[derive(Debug, Clone)]
enum Item {
    Work(Work),
    /// Pages of an allocation go.
    Unmap(usize),
    /// Pages of a graph's allocation come.
    Map(usize),
    Record {
        event: usize,
        ticket: u64,
    },
    Wait {
        event: usize,
        ticket: u64,
    },
    Graph {
        nodes: Arc<Vec<Item>>,
        frees_first: bool,
    },
}

#[derive(Debug)]
struct Capture {
    nodes: Vec<Item>,
    thread: ThreadId,
    thread_local: bool,
    invalid: bool,
    allocations: Vec<usize>,
}

#[derive(Debug)]
struct Stream {
    device: usize,
    blocking: bool,
    queue: VecDeque<Item>,
    capture: Option<Capture>,
    running: bool,
}

#[derive(Debug, Default)]
struct Event {
    device: usize,
    timed: bool,
    /// The stream of the last record and its number.
    last: Option<(usize, u64)>,
    done: u64,
    captured: bool,
    at: Option<Instant>,
}

#[derive(Debug)]
struct Function {
    module: usize,
    name: Arc<str>,
    /// Dynamic shared memory that a launch may ask for.
    shared_limit: usize,
}

#[derive(Debug, Clone)]
struct Graph {
    nodes: Arc<Vec<Item>>,
    modules: Vec<usize>,
    allocations: Vec<usize>,
    executables: usize,
    destroyed: bool,
}

#[derive(Debug)]
struct Executable {
    graph: usize,
    nodes: Arc<Vec<Item>>,
    modules: Vec<usize>,
    frees_first: bool,
}

struct Device {
    memory: Memory,
    retained: usize,
    threshold: u64,
}

/// Everything.
pub struct Machine {
    pub script: &'static Script,
    initialised: bool,
    devices: Vec<Device>,
    streams: HashMap<usize, Stream>,
    events: HashMap<usize, Event>,
    modules: HashMap<usize, usize>,
    functions: HashMap<usize, Function>,
    graphs: HashMap<usize, Graph>,
    executables: HashMap<usize, Executable>,
    pinned: HashMap<usize, usize>,
    next_handle: usize,
    next_ticket: u64,
    sticky: i32,
    calls: u64,
    allocations: u64,
    launches: u64,
    /// The next kernel of the stream that runs, where it was begun: what is left of it.
    begun: Option<Option<Finish>>,
    slot: u32,
}

thread_local! {
    static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
}

static MACHINE: LazyLock<Mutex<Machine>> = LazyLock::new(|| Mutex::new(Machine::new(script::script())));

/// The machine of this process.
pub fn machine() -> MutexGuard<'static, Machine> {
    MACHINE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A context is its device's only one.
const CONTEXT: usize = 0x5100_0000;
const POOL: usize = 0x5200_0000;
const DEFAULT_STREAM: usize = 0x5300_0000;

impl Machine {
    fn new(script: &'static Script) -> Self {
        let device = |_: usize| Device {
            memory: Memory::new(
                script.device.memory_bytes as usize,
                (crate::device::RESERVED_BYTES + crate::device::foreign_bytes(script)) as usize,
            ),
            retained: 0,
            threshold: 0,
        };
        let devices: Vec<Device> = (0..script.count as usize).map(device).collect();
        let stream = |index| {
            let stream = Stream {
                device: index,
                blocking: true,
                queue: VecDeque::new(),
                capture: None,
                running: false,
            };
            (DEFAULT_STREAM + index, stream)
        };
        Self {
            streams: (0..devices.len()).map(stream).collect(),
            script,
            initialised: false,
            devices,
            events: HashMap::new(),
            modules: HashMap::new(),
            functions: HashMap::new(),
            graphs: HashMap::new(),
            executables: HashMap::new(),
            pinned: HashMap::new(),
            next_handle: 0x6000_0000,
            next_ticket: 1,
            sticky: SUCCESS,
            calls: 0,
            allocations: 0,
            launches: 0,
            begun: None,
            slot: 0,
        }
    }

    fn handle(&mut self) -> usize {
        self.next_handle += 16;
        self.next_handle
    }

    fn ticket(&mut self) -> u64 {
        self.next_ticket += 1;
        self.next_ticket
    }

    /// What every call but a few asks first.
    ///
    /// # Errors
    /// Before `cuInit`, and the error that sticks.
    pub fn ready(&mut self) -> Answer<()> {
        self.calls += 1;
        if !self.initialised {
            return Err(status::NOT_INITIALIZED);
        }
        if self.sticky == SUCCESS && self.script.lost.is_some_and(|from| self.calls >= from) {
            for lost in &crate::device::LOST[..self.devices.len()] {
                lost.store(true, std::sync::atomic::Ordering::Relaxed);
            }
            self.stick(status::UNKNOWN, "the device is lost");
        }
        if self.sticky == SUCCESS { Ok(()) } else { Err(self.sticky) }
    }

    fn stick(&mut self, status: i32, text: &str) {
        if self.sticky == SUCCESS {
            eprintln!("simulated CUDA device: {text}");
            self.sticky = status;
        }
    }

    pub fn initialise(&mut self) -> Answer<()> {
        self.initialised = true;
        if self.devices.is_empty() { Err(status::NO_DEVICE) } else { Ok(()) }
    }

    #[must_use]
    pub fn count(&self) -> usize {
        self.devices.len()
    }

    // ---- Contexts ----

    pub fn device(&self, device: i32) -> Answer<usize> {
        usize::try_from(device).ok().filter(|index| *index < self.devices.len()).ok_or(status::INVALID_DEVICE)
    }

    pub fn retain(&mut self, device: i32) -> Answer<usize> {
        let index = self.device(device)?;
        self.devices[index].retained += 1;
        if self.devices[index].retained == 1 {
            self.devices[index].memory.used_plain += CONTEXT_BYTES;
        }
        self.report_memory(index);
        Ok(CONTEXT + index)
    }

    pub fn release(&mut self, device: i32) -> Answer<()> {
        let index = self.device(device)?;
        let retained = &mut self.devices[index].retained;
        *retained = retained.checked_sub(1).ok_or(status::INVALID_CONTEXT)?;
        if *retained > 0 {
            return Ok(());
        }
        // What is left of the context goes with it.
        let drained = self.wait_for_device(index);
        self.devices[index].memory.used_plain -= CONTEXT_BYTES;
        let default = DEFAULT_STREAM + index;
        self.streams.retain(|handle, stream| *handle == default || stream.device != index);
        self.events.retain(|_, event| event.device != index);
        let gone: Vec<usize> =
            self.modules.iter().filter(|(_, device)| **device == index).map(|(handle, _)| *handle).collect();
        for module in gone {
            self.unload(module)?;
        }
        let memory = &mut self.devices[index].memory;
        let left: Vec<usize> = memory.allocations.keys().copied().collect();
        for address in left {
            if memory.mark_freed(address) {
                memory.forget(address);
            }
        }
        self.report_memory(index);
        drained
    }

    pub fn set_current(&self, context: usize) -> Answer<()> {
        if context == 0 {
            CURRENT.set(None);
            return Ok(());
        }
        let index = context.wrapping_sub(CONTEXT);
        let device = self.devices.get(index).ok_or(status::INVALID_CONTEXT)?;
        if device.retained == 0 {
            return Err(status::CONTEXT_IS_DESTROYED);
        }
        CURRENT.set(Some(index));
        Ok(())
    }

    #[must_use]
    pub fn current_context() -> usize {
        CURRENT.get().map_or(0, |index| CONTEXT + index)
    }

    /// The device of this thread's context.
    ///
    /// # Errors
    /// Without one, or when it is gone.
    pub fn current(&self) -> Answer<usize> {
        let index = CURRENT.get().ok_or(status::INVALID_CONTEXT)?;
        if self.devices[index].retained == 0 { Err(status::CONTEXT_IS_DESTROYED) } else { Ok(index) }
    }

    // ---- Capture ----

    /// Refuses what may not be called while this thread captures; the capture is void then.
    fn not_in_capture(&mut self) -> Answer<()> {
        let thread = std::thread::current().id();
        let mut refused = false;
        for capture in self.streams.values_mut().filter_map(|stream| stream.capture.as_mut()) {
            if capture.thread_local && capture.thread == thread {
                capture.invalid = true;
                refused = true;
            }
        }
        if refused { Err(status::STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
    }

    pub fn begin_capture(&mut self, stream: usize, mode: u32) -> Answer<()> {
        if stream == 0 {
            return Err(status::STREAM_CAPTURE_UNSUPPORTED);
        }
        let stream = self.streams.get_mut(&stream).ok_or(status::INVALID_HANDLE)?;
        if mode > 2 || stream.capture.is_some() {
            return Err(status::INVALID_VALUE);
        }
        stream.capture = Some(Capture {
            nodes: Vec::new(),
            thread: std::thread::current().id(),
            // A global capture refuses for all threads; the program has one.
            thread_local: mode != 2,
            invalid: false,
            allocations: Vec::new(),
        });
        Ok(())
    }

    pub fn end_capture(&mut self, stream: usize) -> Answer<usize> {
        let stream = self.streams.get_mut(&stream).ok_or(status::INVALID_HANDLE)?;
        let thread = stream.capture.as_ref().ok_or(status::INVALID_VALUE)?;
        if thread.thread_local && thread.thread != std::thread::current().id() {
            return Err(status::STREAM_CAPTURE_WRONG_THREAD);
        }
        let device = stream.device;
        let capture = stream.capture.take().ok_or(status::INVALID_VALUE)?;
        if capture.invalid {
            for address in capture.allocations {
                self.devices[device].memory.forget(address);
            }
            return Err(status::STREAM_CAPTURE_INVALIDATED);
        }
        let mut modules: Vec<usize> = capture
            .nodes
            .iter()
            .filter_map(|node| match node {
                Item::Work(work) => work.module,
                _ => None,
            })
            .collect();
        modules.sort_unstable();
        modules.dedup();
        let handle = self.handle();
        let graph = Graph {
            nodes: Arc::new(capture.nodes),
            modules,
            allocations: capture.allocations,
            executables: 0,
            destroyed: false,
        };
        self.graphs.insert(handle, graph);
        Ok(handle)
    }

    /// 0 not captured, 1 captured, 2 captured and void.
    pub fn capture_status(&self, stream: usize) -> Answer<u32> {
        let stream = self.stream(stream)?;
        Ok(self.streams[&stream].capture.as_ref().map_or(0, |capture| if capture.invalid { 2 } else { 1 }))
    }

    // ---- Graphs ----

    pub fn instantiate(&mut self, graph: usize, flags: u64) -> Answer<usize> {
        let found =
            self.graphs.get_mut(&graph).filter(|graph| !graph.destroyed).ok_or(status::INVALID_VALUE)?;
        // Free allocations before a launch (1), upload (2), launch from the device (4), the priorities of nodes (8).
        if flags > 15 {
            return Err(status::INVALID_VALUE);
        }
        found.executables += 1;
        let executable = Executable {
            graph,
            nodes: found.nodes.clone(),
            modules: found.modules.clone(),
            frees_first: flags & 1 != 0,
        };
        let handle = self.handle();
        self.executables.insert(handle, executable);
        Ok(handle)
    }

    fn executable(&self, handle: usize) -> Answer<&Executable> {
        let executable = self.executables.get(&handle).ok_or(status::INVALID_VALUE)?;
        if executable.modules.iter().all(|module| self.modules.contains_key(module)) {
            return Ok(executable);
        }
        eprintln!("simulated CUDA device: a graph's kernels were unloaded before it");
        Err(status::INVALID_HANDLE)
    }

    pub fn upload(&mut self, executable: usize, stream: usize) -> Answer<()> {
        self.stream(stream)?;
        self.executable(executable).map(|_| ())
    }

    pub fn launch_graph(&mut self, executable: usize, stream: usize) -> Answer<()> {
        let executable = self.executable(executable)?;
        let item = Item::Graph { nodes: executable.nodes.clone(), frees_first: executable.frees_first };
        self.push(stream, item)
    }

    pub fn destroy_graph(&mut self, graph: usize) -> Answer<()> {
        let found =
            self.graphs.get_mut(&graph).filter(|graph| !graph.destroyed).ok_or(status::INVALID_VALUE)?;
        found.destroyed = true;
        self.forget_graph(graph);
        Ok(())
    }

    pub fn destroy_executable(&mut self, executable: usize) -> Answer<()> {
        let stale = matches!(self.executable(executable), Err(status::INVALID_HANDLE));
        let gone = self.executables.remove(&executable).ok_or(status::INVALID_VALUE)?;
        // A launch that has not run yet runs first.
        self.wait_for_all()?;
        if let Some(graph) = self.graphs.get_mut(&gone.graph) {
            graph.executables -= 1;
        }
        self.forget_graph(gone.graph);
        if stale { Err(status::INVALID_HANDLE) } else { Ok(()) }
    }

    fn forget_graph(&mut self, handle: usize) {
        if !self.graphs.get(&handle).is_some_and(|graph| graph.destroyed && graph.executables == 0) {
            return;
        }
        let Some(graph) = self.graphs.remove(&handle) else { return };
        for address in graph.allocations {
            for device in &mut self.devices {
                device.memory.forget(address);
            }
        }
    }

    // ---- Streams ----

    /// A handle of the table, for the default stream that of the current device.
    fn stream(&self, stream: usize) -> Answer<usize> {
        // The null stream, and the legacy default stream by its number.
        if stream <= 1 {
            return Ok(DEFAULT_STREAM + self.current()?);
        }
        let found = self.streams.get(&stream).ok_or(status::INVALID_HANDLE)?;
        if found.device == self.current()? { Ok(stream) } else { Err(status::INVALID_HANDLE) }
    }

    pub fn create_stream(&mut self, flags: u32) -> Answer<usize> {
        if flags > 1 {
            return Err(status::INVALID_VALUE);
        }
        let device = self.current()?;
        let handle = self.handle();
        let stream =
            Stream { device, blocking: flags == 0, queue: VecDeque::new(), capture: None, running: false };
        self.streams.insert(handle, stream);
        Ok(handle)
    }

    pub fn destroy_stream(&mut self, stream: usize) -> Answer<()> {
        if !self.streams.contains_key(&stream) || stream < 0x6000_0000 {
            return Err(status::INVALID_HANDLE);
        }
        // CUDA returns at once and frees the stream when its work is done.
        let drained = self.run(stream);
        self.streams.remove(&stream);
        drained
    }

    fn push(&mut self, stream: usize, item: Item) -> Answer<()> {
        let handle = self.stream(stream)?;
        let device = self.streams[&handle].device;
        let default = DEFAULT_STREAM + device;
        // The default stream and blocking ones wait for each other.
        if handle == default {
            let others: Vec<usize> = self
                .streams
                .iter()
                .filter(|(_, s)| s.device == device && s.blocking && s.capture.is_none())
                .map(|(h, _)| *h)
                .collect();
            for other in others {
                if other != default {
                    self.run(other)?;
                }
            }
        } else if self.streams[&handle].blocking && !self.streams[&default].queue.is_empty() {
            self.run(default)?;
        }
        let entry = self.streams.get_mut(&handle).ok_or(status::INVALID_HANDLE)?;
        if let Some(capture) = &mut entry.capture {
            if capture.invalid {
                return Err(status::STREAM_CAPTURE_INVALIDATED);
            }
            capture.nodes.push(item);
            return Ok(());
        }
        entry.queue.push_back(item);
        if entry.queue.len() > LONGEST_QUEUE { self.run(handle) } else { Ok(()) }
    }

    /// Puts work on a stream.
    ///
    /// # Errors
    /// As the driver says.
    pub fn work(&mut self, stream: usize, work: Work) -> Answer<()> {
        self.push(stream, Item::Work(work))
    }

    pub fn synchronise_stream(&mut self, stream: usize) -> Answer<()> {
        let handle = self.stream(stream)?;
        if let Some(capture) = self.streams.get_mut(&handle).and_then(|stream| stream.capture.as_mut()) {
            capture.invalid = true;
            return Err(status::STREAM_CAPTURE_UNSUPPORTED);
        }
        self.not_in_capture()?;
        self.run(handle)
    }

    pub fn synchronise_context(&mut self) -> Answer<()> {
        let device = self.current()?;
        self.not_in_capture()?;
        self.wait_for_device(device)
    }

    fn wait_for_device(&mut self, device: usize) -> Answer<()> {
        let streams: Vec<usize> = self
            .streams
            .iter()
            .filter(|(_, stream)| stream.device == device)
            .map(|(handle, _)| *handle)
            .collect();
        streams.into_iter().try_for_each(|handle| self.run(handle))
    }

    fn wait_for_all(&mut self) -> Answer<()> {
        (0..self.devices.len()).try_for_each(|device| self.wait_for_device(device))
    }

    /// Runs a stream's work to its end.
    fn run(&mut self, stream: usize) -> Answer<()> {
        self.run_until(stream, None)
    }

    fn run_until(&mut self, stream: usize, ticket: Option<u64>) -> Answer<()> {
        loop {
            if self.sticky != SUCCESS {
                return Err(self.sticky);
            }
            let Some(entry) = self.streams.get_mut(&stream) else { return Ok(()) };
            if entry.running {
                // Two streams that wait for each other: no such order can be asked for.
                return Ok(());
            }
            let device = entry.device;
            let Some(item) = entry.queue.pop_front() else { return Ok(()) };
            entry.running = true;
            let next = entry.queue.front().cloned();
            let done = matches!(item, Item::Record { ticket: number, .. } if Some(number) == ticket);
            let ran = self.perform(device, &item, next.as_ref());
            if let Some(entry) = self.streams.get_mut(&stream) {
                entry.running = false;
            }
            ran?;
            if done {
                return Ok(());
            }
        }
    }

    fn perform(&mut self, device: usize, item: &Item, next: Option<&Item>) -> Answer<()> {
        match item {
            Item::Work(work) => self.perform_work(work, next)?,
            Item::Unmap(address) => self.devices[device].memory.unmap(*address),
            Item::Map(address) => {
                if !self.devices[device].memory.map_of_graph(*address) {
                    self.stick(
                        status::OUT_OF_MEMORY,
                        "a graph has no room for its allocations, or was launched again with some not freed",
                    );
                }
            }
            Item::Record { event, ticket } => {
                if let Some(event) = self.events.get_mut(event) {
                    event.done = event.done.max(*ticket);
                    event.at = Some(Instant::now());
                }
            }
            Item::Wait { event, ticket } => {
                let before =
                    self.events.get(event).filter(|event| event.done < *ticket).and_then(|event| event.last);
                if let Some((stream, _)) = before {
                    self.run_until(stream, Some(*ticket))?;
                }
            }
            Item::Graph { nodes, frees_first } => {
                if *frees_first {
                    for node in nodes.iter() {
                        if let Item::Map(address) = node {
                            self.devices[device].memory.unmap(*address);
                        }
                    }
                }
                for (at, node) in nodes.iter().enumerate() {
                    self.perform(device, node, nodes.get(at + 1))?;
                }
            }
        }
        self.report_memory(device);
        if self.sticky == SUCCESS { Ok(()) } else { Err(self.sticky) }
    }

    /// Runs work to its end. A kernel whose launch allows that is begun before the one in front of it has run, so that it sees nothing of its
    /// results unless it waits.
    fn perform_work(&mut self, work: &Work, next: Option<&Item>) -> Answer<()> {
        self.launches += u64::from(work.module.is_some());
        let number = self.launches;
        if work.module.is_some() && self.script.hang == Some(number) {
            eprintln!("simulated CUDA device: {} hangs", work.name);
            loop {
                std::thread::park();
            }
        }
        if work.module.is_some() && self.script.illegal_address == Some(number) {
            self.stick(status::ILLEGAL_ADDRESS, &format!("{}: a planted illegal address", work.name));
            return Err(self.sticky);
        }
        let began = Instant::now();
        let this = self.begun.take();
        let early = match next {
            Some(Item::Work(next)) if work.module.is_some() => next.early.as_ref(),
            _ => None,
        };
        if let Some(early) = early {
            // Another slot than this one's; what was not begun early runs in the first.
            self.slot = if this.is_some() { self.slot ^ 1 } else { 1 };
            match early(self.slot) {
                Ok(begun) => self.begun = Some(begun),
                Err(text) => return Err(self.kernel_failed(work, &text)),
            }
        }
        let ran = match this {
            Some(Some(finish)) => finish(),
            Some(None) => Ok(()),
            None => (work.run)(),
        };
        let slowness = self.script.slowness(&work.name);
        if slowness > 1.0 {
            std::thread::sleep(began.elapsed().mul_f64(slowness - 1.0));
        }
        ran.map_err(|text| self.kernel_failed(work, &text))
    }

    fn kernel_failed(&mut self, work: &Work, text: &str) -> i32 {
        let status =
            if text.contains("illegal address") { status::ILLEGAL_ADDRESS } else { status::LAUNCH_FAILED };
        self.stick(status, &format!("{}: {text}", work.name));
        self.sticky
    }

    // ---- Events ----

    pub fn create_event(&mut self, flags: u32) -> Answer<usize> {
        let device = self.current()?;
        // Blocking waits (1), no time (2), between processes (4).
        if flags > 7 {
            return Err(status::INVALID_VALUE);
        }
        let handle = self.handle();
        self.events.insert(handle, Event { device, timed: flags & 2 == 0, ..Event::default() });
        Ok(handle)
    }

    pub fn destroy_event(&mut self, event: usize) -> Answer<()> {
        self.events.remove(&event).map(|_| ()).ok_or(status::INVALID_HANDLE)
    }

    pub fn record(&mut self, event: usize, stream: usize) -> Answer<()> {
        let handle = self.stream(stream)?;
        let ticket = self.ticket();
        let captured = self.streams[&handle].capture.is_some();
        let device = self.streams[&handle].device;
        let found = self.events.get_mut(&event).ok_or(status::INVALID_HANDLE)?;
        if found.device != device {
            return Err(status::INVALID_HANDLE);
        }
        found.captured = captured;
        if captured {
            // An edge of the graph: the event itself is never recorded.
            return Ok(());
        }
        found.last = Some((handle, ticket));
        self.push(stream, Item::Record { event, ticket })
    }

    pub fn wait(&mut self, stream: usize, event: usize) -> Answer<()> {
        let found = self.events.get(&event).ok_or(status::INVALID_HANDLE)?;
        let (captured, last) = (found.captured, found.last);
        let handle = self.stream(stream)?;
        if let Some(capture) = &mut self.streams.get_mut(&handle).ok_or(status::INVALID_HANDLE)?.capture {
            if captured {
                return Ok(());
            }
            // Work from outside of a capture can't be waited for in it.
            capture.invalid = true;
            return Err(905);
        }
        match last {
            Some((_, ticket)) => self.push(stream, Item::Wait { event, ticket }),
            None => Ok(()),
        }
    }

    pub fn synchronise_event(&mut self, event: usize) -> Answer<()> {
        let found = self.events.get(&event).ok_or(status::INVALID_HANDLE)?;
        if found.captured {
            return Err(status::STREAM_CAPTURE_UNSUPPORTED);
        }
        let last = found.last;
        self.not_in_capture()?;
        match last {
            Some((stream, ticket)) if self.events[&event].done < ticket => {
                self.run_until(stream, Some(ticket))
            }
            _ => Ok(()),
        }
    }

    pub fn elapsed_ms(&self, start: usize, end: usize) -> Answer<f32> {
        let find = |event| self.events.get(&event).ok_or(status::INVALID_HANDLE);
        let (start, end) = (find(start)?, find(end)?);
        for event in [start, end] {
            let (_, ticket) =
                event.last.filter(|_| event.timed && !event.captured).ok_or(status::INVALID_HANDLE)?;
            if event.done < ticket {
                return Err(status::NOT_READY);
            }
        }
        let (Some(from), Some(to)) = (start.at, end.at) else { return Err(status::INVALID_HANDLE) };
        let seconds = if to >= from { (to - from).as_secs_f64() } else { -(from - to).as_secs_f64() };
        Ok((seconds * 1e3) as f32)
    }

    // ---- Memory ----

    fn report_memory(&self, device: usize) {
        let memory = &self.devices[device].memory;
        let used = memory.used_plain + memory.used_pool + memory.used_graphs;
        crate::device::USED_BYTES[device].store(used as u64, std::sync::atomic::Ordering::Relaxed);
    }

    fn has_room(&mut self) -> Answer<()> {
        self.allocations += 1;
        if self.script.out_of_memory == Some(self.allocations) { Err(status::OUT_OF_MEMORY) } else { Ok(()) }
    }

    pub fn allocate(&mut self, bytes: usize) -> Answer<usize> {
        let device = self.current()?;
        if bytes == 0 {
            return Err(status::INVALID_VALUE);
        }
        self.not_in_capture()?;
        self.has_room()?;
        let address =
            self.devices[device].memory.allocate(bytes, Kind::Plain).ok_or(status::OUT_OF_MEMORY)?;
        self.report_memory(device);
        Ok(address)
    }

    pub fn allocate_on(&mut self, bytes: usize, stream: usize) -> Answer<usize> {
        let handle = self.stream(stream)?;
        if bytes == 0 {
            return Err(status::INVALID_VALUE);
        }
        self.has_room()?;
        let device = self.streams[&handle].device;
        let captured = self.streams[&handle].capture.is_some();
        let kind = if captured { Kind::Graph } else { Kind::Pool };
        let address = self.devices[device].memory.allocate(bytes, kind).ok_or(status::OUT_OF_MEMORY)?;
        if let Some(capture) = self.streams.get_mut(&handle).and_then(|stream| stream.capture.as_mut()) {
            capture.allocations.push(address);
            self.push(stream, Item::Map(address))?;
        }
        self.report_memory(device);
        Ok(address)
    }

    fn owner(&self, address: usize) -> Answer<usize> {
        self.devices.iter().position(|device| device.memory.holds(address)).ok_or(status::INVALID_VALUE)
    }

    /// `cuMemFree` waits for the whole device.
    pub fn free(&mut self, address: usize) -> Answer<()> {
        if address == 0 {
            return Ok(());
        }
        let device = self.owner(address)?;
        self.not_in_capture()?;
        self.wait_for_device(device)?;
        if !self.devices[device].memory.mark_freed(address) {
            return Err(status::INVALID_VALUE);
        }
        self.devices[device].memory.unmap(address);
        self.report_memory(device);
        Ok(())
    }

    pub fn free_on(&mut self, address: usize, stream: usize) -> Answer<()> {
        if address == 0 {
            return Ok(());
        }
        let handle = self.stream(stream)?;
        let device = self.owner(address)?;
        let kind = self.devices[device]
            .memory
            .allocations
            .get(&address)
            .map(|a| a.kind)
            .ok_or(status::INVALID_VALUE)?;
        if let Some(capture) = &mut self.streams.get_mut(&handle).ok_or(status::INVALID_HANDLE)?.capture {
            // A graph frees what it has allocated.
            if kind != Kind::Graph || !capture.allocations.contains(&address) {
                capture.invalid = true;
                return Err(status::INVALID_VALUE);
            }
            return self.push(stream, Item::Unmap(address));
        }
        if !self.devices[device].memory.mark_freed(address) {
            return Err(status::INVALID_VALUE);
        }
        self.push(stream, Item::Unmap(address))
    }

    pub fn memory_info(&self) -> Answer<(usize, usize)> {
        let memory = &self.devices[self.current()?].memory;
        Ok((memory.free_bytes(), memory.capacity))
    }

    pub fn pool(&self, device: i32) -> Answer<usize> {
        Ok(POOL + self.device(device)?)
    }

    fn device_of_pool(&mut self, pool: usize) -> Answer<&mut Device> {
        self.devices.get_mut(pool.wrapping_sub(POOL)).ok_or(status::INVALID_VALUE)
    }

    /// Attributes of a pool: release threshold (4), reserved now and at most (5, 6), used now and at most (7, 8).
    pub fn pool_attribute(&mut self, pool: usize, attribute: u32) -> Answer<u64> {
        let device = self.device_of_pool(pool)?;
        match attribute {
            4 => Ok(device.threshold),
            5 | 7 => Ok(device.memory.used_pool as u64),
            6 | 8 => Ok(device.memory.high_pool as u64),
            _ => Err(status::INVALID_VALUE),
        }
    }

    pub fn set_pool_attribute(&mut self, pool: usize, attribute: u32, value: u64) -> Answer<()> {
        let device = self.device_of_pool(pool)?;
        match (attribute, value) {
            (4, threshold) => device.threshold = threshold,
            (6 | 8, 0) => device.memory.high_pool = device.memory.used_pool,
            _ => return Err(status::INVALID_VALUE),
        }
        Ok(())
    }

    /// Attributes of the memory of graphs: used now and at most (0, 1), reserved now and at most (2, 3).
    pub fn graph_attribute(&self, device: i32, attribute: u32) -> Answer<u64> {
        let memory = &self.devices[self.device(device)?].memory;
        match attribute {
            0 | 2 => Ok(memory.used_graphs as u64),
            1 | 3 => Ok(memory.high_graphs as u64),
            _ => Err(status::INVALID_VALUE),
        }
    }

    pub fn set_graph_attribute(&mut self, device: i32, attribute: u32, value: u64) -> Answer<()> {
        let index = self.device(device)?;
        let memory = &mut self.devices[index].memory;
        match (attribute, value) {
            (1 | 3, 0) => memory.high_graphs = memory.used_graphs,
            _ => return Err(status::INVALID_VALUE),
        }
        Ok(())
    }

    pub fn allocate_pinned(&mut self, bytes: usize) -> Answer<usize> {
        self.not_in_capture()?;
        let layout =
            std::alloc::Layout::from_size_align(bytes.max(1), 4096).map_err(|_| status::INVALID_VALUE)?;
        // SAFETY: the size is not zero.
        let address = unsafe { std::alloc::alloc(layout) } as usize;
        if address == 0 {
            return Err(status::OUT_OF_MEMORY);
        }
        self.pinned.insert(address, layout.size());
        Ok(address)
    }

    pub fn free_pinned(&mut self, address: usize) -> Answer<()> {
        self.wait_for_all()?;
        let bytes = self.pinned.remove(&address).ok_or(status::INVALID_VALUE)?;
        let layout = std::alloc::Layout::from_size_align(bytes, 4096).map_err(|_| status::INVALID_VALUE)?;
        // SAFETY: allocated with this layout above, and forgotten now.
        unsafe { std::alloc::dealloc(address as *mut u8, layout) };
        Ok(())
    }

    fn is_pinned(&self, address: usize) -> bool {
        self.pinned.iter().any(|(start, bytes)| (*start..start + bytes).contains(&address))
    }

    fn check_range(&self, address: usize, bytes: usize) -> Answer<()> {
        let device = self.owner(address)?;
        let memory = &self.devices[device].memory;
        // The memory of a graph comes with its launch.
        let of_graph = memory.allocations.range(..=address).next_back().is_some_and(|(start, allocation)| {
            allocation.kind == Kind::Graph && address + bytes <= start + allocation.bytes
        });
        if of_graph || memory.contains(address, bytes) { Ok(()) } else { Err(status::INVALID_VALUE) }
    }

    pub fn copy_to_device(&mut self, to: usize, from: usize, bytes: usize, stream: usize) -> Answer<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.check_range(to, bytes)?;
        let handle = self.stream(stream)?;
        let captured = self.streams[&handle].capture.is_some();
        let run: crate::stream::Run = if captured || self.is_pinned(from) {
            // Read when it happens.
            Arc::new(move || {
                // SAFETY: the target was checked; the source is the caller's, who keeps it until the copy has happened.
                unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
                Ok(())
            })
        } else {
            // SAFETY: the caller has so many bytes there; pageable memory has been read when the call returns.
            let staged = unsafe { std::slice::from_raw_parts(from as *const u8, bytes) }.to_vec();
            Arc::new(move || {
                // SAFETY: as above.
                unsafe { std::ptr::copy_nonoverlapping(staged.as_ptr(), to as *mut u8, bytes) };
                Ok(())
            })
        };
        self.work(
            stream,
            Work {
                name: "copy to the device".into(),
                bytes: bytes as u64,
                flops: 0,
                module: None,
                run,
                early: None,
            },
        )
    }

    pub fn copy_to_host(&mut self, to: usize, from: usize, bytes: usize, stream: usize) -> Answer<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.check_range(from, bytes)?;
        let handle = self.stream(stream)?;
        let captured = self.streams[&handle].capture.is_some();
        let run: crate::stream::Run = Arc::new(move || {
            // SAFETY: the source was checked; the target is the caller's, who keeps it until the copy has happened.
            unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
            Ok(())
        });
        let waits = !captured && !self.is_pinned(to);
        self.work(
            stream,
            Work {
                name: "copy to the host".into(),
                bytes: bytes as u64,
                flops: 0,
                module: None,
                run,
                early: None,
            },
        )?;
        if waits { self.run(handle) } else { Ok(()) }
    }

    pub fn copy_on_device(&mut self, to: usize, from: usize, bytes: usize, stream: usize) -> Answer<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.check_range(to, bytes)?;
        self.check_range(from, bytes)?;
        let run: crate::stream::Run = Arc::new(move || {
            // SAFETY: both were checked.
            unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
            Ok(())
        });
        self.work(
            stream,
            Work {
                name: "copy on the device".into(),
                bytes: 2 * bytes as u64,
                flops: 0,
                module: None,
                run,
                early: None,
            },
        )
    }

    pub fn fill(&mut self, to: usize, value: u8, bytes: usize, stream: usize) -> Answer<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.check_range(to, bytes)?;
        let run: crate::stream::Run = Arc::new(move || {
            // SAFETY: the range was checked.
            unsafe { std::ptr::write_bytes(to as *mut u8, value, bytes) };
            Ok(())
        });
        self.work(
            stream,
            Work { name: "fill".into(), bytes: bytes as u64, flops: 0, module: None, run, early: None },
        )
    }

    // ---- Modules ----

    pub fn load(&mut self) -> Answer<usize> {
        let device = self.current()?;
        let handle = self.handle();
        self.modules.insert(handle, device);
        Ok(handle)
    }

    pub fn unload(&mut self, module: usize) -> Answer<()> {
        self.modules.remove(&module).ok_or(status::INVALID_HANDLE)?;
        self.functions.retain(|_, function| function.module != module);
        Ok(())
    }

    pub fn function(&mut self, module: usize, name: &str) -> Answer<usize> {
        if !self.modules.contains_key(&module) {
            return Err(status::INVALID_HANDLE);
        }
        let symbol = std::ffi::CString::new(name).map_err(|_| status::INVALID_VALUE)?;
        if crate::kernels::parameters(&symbol).is_none() {
            eprintln!("simulated CUDA device: there is no kernel {name}");
            return Err(status::NOT_FOUND);
        }
        let handle = self.handle();
        self.functions.insert(
            handle,
            Function { module, name: name.into(), shared_limit: crate::launch::SHARED_BYTES },
        );
        Ok(handle)
    }

    /// Raises what a launch may ask for of dynamic shared memory (attribute 8).
    pub fn set_function_attribute(&mut self, function: usize, attribute: u32, value: i32) -> Answer<()> {
        let most = self.script.limits().shared_bytes_per_block_opt_in as usize;
        let found = self.functions.get_mut(&function).ok_or(status::INVALID_HANDLE)?;
        match (attribute, usize::try_from(value)) {
            (8, Ok(bytes)) if bytes <= most => found.shared_limit = bytes,
            // Preferred carve-out of shared memory.
            (9, _) => {}
            _ => return Err(status::INVALID_VALUE),
        }
        Ok(())
    }

    /// Launches a kernel.
    ///
    /// # Safety
    ///
    /// `arguments` holds an address for each of the kernel's parameters.
    ///
    /// # Errors
    /// As the driver says.
    pub unsafe fn launch(
        &mut self,
        function: usize,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: usize,
        stream: usize,
        arguments: *const *mut c_void,
        dependent: bool,
    ) -> Answer<()> {
        let found = self.functions.get(&function).ok_or(status::INVALID_HANDLE)?;
        let config = crate::launch::Config { grid, block, shared_bytes, shared_limit: found.shared_limit };
        let module = found.module;
        // SAFETY: the caller's promise.
        let mut work = unsafe { crate::launch::work(&found.name, &config, arguments) }?;
        work.module = Some(module);
        if !dependent {
            work.early = None;
        }
        self.work(stream, work)
    }
}
