//! The devices, and what is on them: contexts, streams, events, modules, graphs.
//!
//! Enters: what the driver's functions ask for. Leaves: their answers. Work is put on streams and runs when somebody waits for it, in the order of its
//! stream and behind the events that the stream was told to wait for, and in no other order. While a stream is captured, its work
//! becomes the nodes of a graph, and what CUDA refuses then is refused. An error of the device sticks.

mod graphs;
mod modules;
mod storage;
mod streams;

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::ffi::c_void;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use crate::clock::{Clock, Demand, Gap};
use crate::memory::{Kind, Memory};
use crate::script::{self, Script};
use crate::status::{self, SUCCESS};
use crate::stream::{Finish, Work};

pub type Answer<T> = Result<T, i32>;

/// Work that waits before whoever puts more there waits for it.
const LONGEST_QUEUE: usize = 1024;
/// The answer while a stream waits for a kernel of another device, whose launch may be yet to come; no caller of CUDA sees it.
const WAITS_FOR_DEVICE: i32 = -1;
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

/// Work that has not begun.
#[derive(Debug)]
struct Queued {
    item: Item,
    /// The host's time at which it was put there.
    put_at: f64,
    gap: Gap,
}

/// A kernel that has begun.
struct Flight {
    work: Work,
    finish: Finish,
    gap: Gap,
    slot: u32,
    /// That simulating it took.
    spent: Duration,
}

impl std::fmt::Debug for Flight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Flight").field("work", &self.work).finish_non_exhaustive()
    }
}

struct Stream {
    device: usize,
    blocking: bool,
    queue: VecDeque<Queued>,
    /// The kernel that runs and waits for another device.
    flight: Option<Flight>,
    /// The next kernel, where it was begun: what is left of it.
    begun: Option<Option<Finish>>,
    /// Of the two of its device, where that is.
    slot: u32,
    /// When the work that has run was done, by the device's time.
    done_at: f64,
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
    /// By the device's time.
    at: Option<f64>,
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
    /// Devices whose memory its kernels may touch, a bit for each.
    peers: u32,
    /// Kernels that met those of other devices.
    met: usize,
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
    clock: Clock,
    /// Of each meeting of kernels of several devices the time at which the last of them came.
    meetings: Vec<f64>,
}

thread_local! {
    static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
}

static MACHINE: LazyLock<Mutex<Machine>> = LazyLock::new(|| Mutex::new(Machine::new(script::script())));

/// The machine of this process.
pub fn machine() -> MutexGuard<'static, Machine> {
    MACHINE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a call asks of the machine, after `cuInit` and without an error of the device. A call that waits for a kernel which waits for another device
/// lets other threads put work there, and is made again.
///
/// # Errors
/// As the driver says.
pub fn asked<T>(mut answer: impl FnMut(&mut Machine) -> Answer<T>) -> Answer<T> {
    let mut calls = 0;
    loop {
        let answered = {
            let mut machine = machine();
            // Made again, it is still one call.
            machine.calls -= std::mem::replace(&mut calls, 1);
            machine.ready()?;
            answer(&mut machine)
        };
        if !matches!(answered, Err(WAITS_FOR_DEVICE)) {
            return answered;
        }
        std::thread::yield_now();
    }
}

/// A context is its device's only one.
const CONTEXT: usize = 0x5100_0000;
const POOL: usize = 0x5200_0000;
const DEFAULT_STREAM: usize = 0x5300_0000;

impl Machine {
    fn new(script: &'static Script) -> Self {
        let device = |_: usize| Device {
            memory: Memory::new(
                script.capacity() as usize,
                (crate::device::RESERVED_BYTES + crate::device::foreign_bytes(script)) as usize,
            ),
            peers: 0,
            met: 0,
            retained: 0,
            threshold: 0,
        };
        let devices: Vec<Device> = (0..script.count as usize).map(device).collect();
        for (index, device) in devices.iter().enumerate() {
            let (base, bytes) = device.memory.addresses();
            crate::kernels::add_device(index, base, bytes);
        }
        let stream = |index| {
            let stream = Stream {
                device: index,
                blocking: true,
                queue: VecDeque::new(),
                flight: None,
                begun: None,
                slot: 0,
                done_at: 0.0,
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
            clock: Clock::new(script),
            meetings: Vec::new(),
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

    pub fn can_access_peer(&self, device: i32, peer: i32) -> Answer<bool> {
        let (device, peer) = (self.device(device)?, self.device(peer)?);
        Ok(device != peer && self.script.peer_access)
    }

    /// Lets kernels of the current device touch the memory of another.
    ///
    /// # Errors
    /// As the driver says.
    pub fn enable_peer_access(&mut self, context: usize, flags: u32) -> Answer<()> {
        let device = self.current()?;
        let peer = context.wrapping_sub(CONTEXT);
        if flags != 0 || peer >= self.devices.len() || peer == device {
            return Err(status::INVALID_VALUE);
        }
        if !self.script.peer_access {
            return Err(status::PEER_ACCESS_UNSUPPORTED);
        }
        // Another group: its kernels meet from here on.
        self.meetings.clear();
        self.devices.iter_mut().for_each(|device| device.met = 0);
        if self.devices[device].peers >> peer & 1 == 1 {
            return Err(status::PEER_ACCESS_ALREADY_ENABLED);
        }
        self.devices[device].peers |= 1 << peer;
        Ok(())
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
}
