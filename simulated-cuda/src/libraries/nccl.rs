//! NCCL's sums: ranks of one process, each with a device and a thread.
//!
//! Enters: calls of the C interface, from a thread of each rank. Leaves: the sum in the memory of all ranks, when the streams of all have come to it.
//!
//! *Source*: NCCL documentation, API reference.

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::handles::Handles;
use crate::clock::Demand;
use crate::machine::Machine;
use crate::stream::{self, Begin, Finish, StreamHandle, Work};

type Status = c_int;

const SUCCESS: Status = 0;
const UNHANDLED_CUDA_ERROR: Status = 1;
const INVALID_ARGUMENT: Status = 4;
/// `ncclFloat32` and `ncclSum`.
const FLOAT32: c_int = 7;
const SUM: c_int = 0;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct UniqueId {
    bytes: [u8; 128],
}

/// What a rank brings to a sum, and where the sum is to be.
type Brought = Option<(usize, usize)>;

#[derive(Debug)]
struct Group {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    joined: usize,
    /// To the sum that is under way.
    brought: Vec<Brought>,
    /// Sums that are done.
    done: u64,
}

impl Group {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Brings what a rank has; the last one makes the sum. The number of the sum.
    fn bring(&self, rank: usize, (from, to): (usize, usize), floats: usize) -> u64 {
        let mut state = self.lock();
        let number = state.done;
        state.brought[rank] = Some((from, to));
        if state.brought.iter().all(Option::is_some) {
            let all: Vec<(usize, usize)> = state.brought.iter_mut().filter_map(Option::take).collect();
            let at = |address: usize, i: usize| {
                std::ptr::with_exposed_provenance_mut::<f32>(address).wrapping_add(i)
            };
            for i in 0..floats {
                // SAFETY: memory of devices of so many floats, by the promise of the library's callers, which nothing else uses now: all ranks wait.
                unsafe {
                    let sum = all.iter().fold(0.0, |sum, (from, _)| sum + at(*from, i).read());
                    all.iter().for_each(|(_, to)| at(*to, i).write(sum));
                }
            }
            state.done += 1;
        }
        number
    }
}

#[derive(Debug, Clone)]
struct Communicator {
    group: Arc<Group>,
    rank: usize,
    ranks: usize,
}

static GROUPS: Mutex<Option<HashMap<UniqueId, Arc<Group>>>> = Mutex::new(None);
static COMMUNICATORS: Handles<Communicator> = Handles::new();

entries! {
    "ncclGetVersion" version(version: *mut c_int) -> Status {
        version.write(22_902);
        SUCCESS
    }
    "ncclGetUniqueId" unique_id(id: *mut UniqueId) -> Status {
        static GIVEN: AtomicU64 = AtomicU64::new(1);
        let mut bytes = [0; 128];
        bytes[..8].copy_from_slice(&GIVEN.fetch_add(1, Ordering::Relaxed).to_le_bytes());
        id.write(UniqueId { bytes });
        SUCCESS
    }
    // Waits until all ranks of the group have called it.
    "ncclCommInitRank" init_rank(communicator: *mut *mut c_void, ranks: c_int, id: UniqueId, rank: c_int) -> Status {
        let (Ok(ranks), Ok(rank)) = (usize::try_from(ranks), usize::try_from(rank)) else { return INVALID_ARGUMENT };
        if rank >= ranks || Machine::current_context() == 0 {
            return INVALID_ARGUMENT;
        }
        let group = {
            let mut groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
            let new = || {
                let state = State { joined: 0, brought: vec![None; ranks], done: 0 };
                Arc::new(Group { state: Mutex::new(state), changed: Condvar::new() })
            };
            groups.get_or_insert_default().entry(id).or_insert_with(new).clone()
        };
        let mut state = group.lock();
        state.joined += 1;
        group.changed.notify_all();
        while state.joined < ranks {
            state = group.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        communicator.write(COMMUNICATORS.insert(Communicator { group, rank, ranks }));
        SUCCESS
    }
    "ncclAllReduce" all_reduce(from: *const c_void, to: *mut c_void, floats: usize, kind: c_int, operation: c_int,
        communicator: *mut c_void, stream: StreamHandle) -> Status {
        let Some(Communicator { group, rank, ranks }) = COMMUNICATORS.get(communicator) else { return INVALID_ARGUMENT };
        if kind != FLOAT32 || operation != SUM {
            return INVALID_ARGUMENT;
        }
        let places = (from.expose_provenance(), to.expose_provenance());
        let begin: Begin = Arc::new(move |_, _| {
            let number = group.bring(rank, places, floats);
            let waiting = group.clone();
            let is_done = move || waiting.lock().done > number;
            if is_done() {
                return Ok(None);
            }
            let finish: Finish = Box::new(move || Ok(is_done()));
            Ok(Some(finish))
        });
        let sent = 2 * 4 * floats * (ranks - 1) / ranks;
        let demand = Demand { peer_bytes: sent as u64, meets: true, ..Demand::default() };
        let run = Arc::new(|| Err("waits for another device".into()));
        let work = Work { begin: Some(begin), ..Work::new("ncclAllReduce", demand, run) };
        if stream::enqueue(stream, work) == 0 { SUCCESS } else { UNHANDLED_CUDA_ERROR }
    }
    "ncclCommDestroy" destroy(communicator: *mut c_void) -> Status {
        COMMUNICATORS.remove(communicator).map_or(INVALID_ARGUMENT, |_| SUCCESS)
    }
    "ncclGetErrorString" error_string(status: Status) -> *const c_char {
        let text = match status {
            SUCCESS => c"no error",
            UNHANDLED_CUDA_ERROR => c"unhandled cuda error",
            INVALID_ARGUMENT => c"invalid argument",
            _ => c"unknown result code",
        };
        text.as_ptr()
    }
}
