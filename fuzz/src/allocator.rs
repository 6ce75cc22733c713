//! A global allocator that counts the memory in use, and its peak.
//!
//! The counters are the process's: whatever is measured must run alone.

#![allow(unsafe_code, reason = "a global allocator is unsafe to declare")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

static IN_USE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator with counters.
#[derive(Debug)]
pub struct CountingAllocator;

/// A single allocation above this is refused, as a small machine would refuse it.
const LARGEST: usize = 4 << 30;

fn count_allocated(size: usize) {
    let now = IN_USE.fetch_add(size, Ordering::Relaxed) + size;
    PEAK.fetch_max(now, Ordering::Relaxed);
}

fn count_freed(size: usize) {
    IN_USE.fetch_sub(size, Ordering::Relaxed);
}

// SAFETY: every call is forwarded to the system's allocator unchanged, or returns null, which the contract allows.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() > LARGEST {
            return std::ptr::null_mut();
        }
        count_allocated(layout.size());
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.size() > LARGEST {
            return std::ptr::null_mut();
        }
        count_allocated(layout.size());
        // SAFETY: the caller's contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count_freed(layout.size());
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if size > LARGEST {
            return std::ptr::null_mut();
        }
        // Large blocks are moved by the system without a copy.
        if size > layout.size() {
            count_allocated(size - layout.size());
        } else {
            count_freed(layout.size() - size);
        }
        // SAFETY: the caller's contract.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// Runs something and returns its result with the peak of memory in use beyond that before.
pub fn peak_of<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = IN_USE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let done = work();
    (done, PEAK.load(Ordering::Relaxed).saturating_sub(before))
}
