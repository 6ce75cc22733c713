//! The memory of a device: addresses of its own, of which only what is allocated can be touched.
//!
//! Enters: sizes. Leaves: addresses that kernels read and write. Every allocation ends at memory that nobody may touch, and what was freed may not
//! be touched either; an address is not given twice. New memory is filled with a pattern that is not a number as f32, f16 and bf16, so that what was never
//! written is seen in the results.

use std::collections::BTreeMap;
use std::ffi::c_void;

/// Addresses that are set aside for a device. Pages that nobody touches cost nothing.
const ADDRESSES: usize = 4 << 40;
/// *Source*: CUDA programming guide, device memory accesses: allocations are aligned to at least 256 bytes.
const ALIGNMENT: usize = 256;
const PAGE: usize = 4096;
/// Larger allocations are zero until they are written: filling them would take longer than the test.
const FILLED: usize = 256 << 20;
const PATTERN: i32 = 0xff;

/// How an allocation was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `cuMemAlloc`.
    Plain,
    /// From the pool, in the order of a stream.
    Pool,
    /// Of a graph: there while the graph runs, and until it is freed.
    Graph,
}

#[derive(Debug, Clone, Copy)]
pub struct Allocation {
    pub bytes: usize,
    pub kind: Kind,
    /// Freed by the program; its pages go when the work before that has run.
    pub freed: bool,
    mapped: bool,
    first_page: usize,
    pages: usize,
}

/// One device's memory.
#[derive(Debug)]
pub struct Memory {
    base: usize,
    next: usize,
    pub allocations: BTreeMap<usize, Allocation>,
    pub capacity: usize,
    /// Taken by others.
    pub foreign: usize,
    pub used_plain: usize,
    pub used_pool: usize,
    pub used_graphs: usize,
    pub high_pool: usize,
    pub high_graphs: usize,
}

fn map(address: usize, bytes: usize, access: i32) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: the range lies in the addresses that are set aside here, which nothing else of the process uses.
    let mapped = unsafe { libc::mmap(address as *mut c_void, bytes, access, flags, -1, 0) };
    mapped as usize == address
}

impl Memory {
    /// # Panics
    ///
    /// When the process has no addresses left.
    #[must_use]
    pub fn new(capacity: usize, foreign: usize) -> Self {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: new addresses, of no file, that cannot be touched.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), ADDRESSES, libc::PROT_NONE, flags, -1, 0) };
        assert!(base != libc::MAP_FAILED, "no addresses left for a simulated device");
        Self {
            base: base as usize,
            next: base as usize,
            allocations: BTreeMap::new(),
            capacity,
            foreign,
            used_plain: 0,
            used_pool: 0,
            used_graphs: 0,
            high_pool: 0,
            high_graphs: 0,
        }
    }

    /// The first address and how many follow, whether they are memory or not.
    #[must_use]
    pub fn addresses(&self) -> (usize, usize) {
        (self.base, ADDRESSES)
    }

    #[must_use]
    pub fn holds(&self, address: usize) -> bool {
        (self.base..self.base + ADDRESSES).contains(&address)
    }

    #[must_use]
    pub fn free_bytes(&self) -> usize {
        self.capacity.saturating_sub(self.foreign + self.used_plain + self.used_pool + self.used_graphs)
    }

    fn used(&mut self, kind: Kind) -> (&mut usize, Option<&mut usize>) {
        match kind {
            Kind::Plain => (&mut self.used_plain, None),
            Kind::Pool => (&mut self.used_pool, Some(&mut self.high_pool)),
            Kind::Graph => (&mut self.used_graphs, Some(&mut self.high_graphs)),
        }
    }

    /// Addresses for so many bytes; of a graph they are memory only while it runs. None where the device has no room.
    pub fn allocate(&mut self, bytes: usize, kind: Kind) -> Option<usize> {
        if bytes > self.free_bytes() {
            return None;
        }
        let rounded = bytes.max(1).next_multiple_of(ALIGNMENT);
        let pages = rounded.div_ceil(PAGE);
        let first_page = self.next;
        if first_page + (pages + 1) * PAGE > self.base + ADDRESSES {
            return None;
        }
        self.next += (pages + 1) * PAGE;
        let address = first_page + pages * PAGE - rounded;
        self.allocations
            .insert(address, Allocation { bytes, kind, freed: false, mapped: false, first_page, pages });
        if kind != Kind::Graph && !self.map(address) {
            self.allocations.remove(&address);
            return None;
        }
        if kind != Kind::Graph {
            self.count(bytes, kind);
        }
        Some(address)
    }

    fn count(&mut self, bytes: usize, kind: Kind) {
        let (used, high) = self.used(kind);
        *used += bytes;
        let now = *used;
        if let Some(high) = high {
            *high = now.max(*high);
        }
    }

    /// Makes an allocation's pages, where they are not there yet, and fills them.
    fn map(&mut self, address: usize) -> bool {
        let Some(allocation) = self.allocations.get_mut(&address) else { return false };
        if allocation.mapped {
            return true;
        }
        if !map(allocation.first_page, allocation.pages * PAGE, libc::PROT_READ | libc::PROT_WRITE) {
            return false;
        }
        allocation.mapped = true;
        if allocation.bytes <= FILLED && !crate::script::script().zeroed_memory {
            // SAFETY: pages that were just mapped.
            unsafe { libc::memset(allocation.first_page as *mut c_void, PATTERN, allocation.pages * PAGE) };
        }
        true
    }

    /// A graph's allocation, as the graph runs. False where there is no room, or where it was not freed since the last run and is not to be.
    pub fn map_of_graph(&mut self, address: usize) -> bool {
        let Some(allocation) = self.allocations.get(&address).copied() else { return false };
        if allocation.mapped || allocation.bytes > self.free_bytes() || !self.map(address) {
            return false;
        }
        self.count(allocation.bytes, Kind::Graph);
        true
    }

    /// Notes that an allocation was freed; false where that is none, or freed already.
    pub fn mark_freed(&mut self, address: usize) -> bool {
        let Some(allocation) = self.allocations.get_mut(&address) else { return false };
        if allocation.freed {
            return false;
        }
        let (bytes, kind) = (allocation.bytes, allocation.kind);
        if kind != Kind::Graph {
            allocation.freed = true;
            *self.used(kind).0 -= bytes;
        }
        true
    }

    /// Takes the pages away: whoever touches them now fails.
    pub fn unmap(&mut self, address: usize) {
        let Some(allocation) = self.allocations.get_mut(&address) else { return };
        if !std::mem::replace(&mut allocation.mapped, false) {
            return;
        }
        map(allocation.first_page, allocation.pages * PAGE, libc::PROT_NONE);
        let (bytes, kind) = (allocation.bytes, allocation.kind);
        if kind == Kind::Graph {
            self.used_graphs -= bytes;
        } else {
            self.allocations.remove(&address);
        }
    }

    /// Forgets an allocation of a graph that is destroyed.
    pub fn forget(&mut self, address: usize) {
        self.unmap(address);
        self.allocations.remove(&address);
    }

    /// Whether a range lies within one allocation that can be touched.
    #[must_use]
    pub fn contains(&self, address: usize, bytes: usize) -> bool {
        let before = self.allocations.range(..=address).next_back();
        before.is_some_and(|(start, allocation)| {
            allocation.mapped && !allocation.freed && address + bytes <= start + allocation.bytes
        })
    }
}
