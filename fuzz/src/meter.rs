//! An allocator that knows how much is taken, and the most that ever was.
//!
//! One process, one meter: what is measured runs alone.

#![allow(unsafe_code, reason = "a global allocator is unsafe to declare")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator with a meter.
#[derive(Debug)]
pub struct Metered;

/// A single allocation above this is refused, as a small machine would refuse it.
const LARGEST: usize = 4 << 30;

fn taken(size: usize) {
    let now = NOW.fetch_add(size, Ordering::Relaxed) + size;
    PEAK.fetch_max(now, Ordering::Relaxed);
}

fn given_back(size: usize) {
    NOW.fetch_sub(size, Ordering::Relaxed);
}

// SAFETY: every call is passed on to the system's allocator unchanged, or answered with null, which the contract allows.
unsafe impl GlobalAlloc for Metered {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() > LARGEST {
            return std::ptr::null_mut();
        }
        taken(layout.size());
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.size() > LARGEST {
            return std::ptr::null_mut();
        }
        taken(layout.size());
        // SAFETY: the caller's contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        given_back(layout.size());
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if size > LARGEST {
            return std::ptr::null_mut();
        }
        // Large blocks are moved by the system without a copy.
        if size > layout.size() {
            taken(size - layout.size());
        } else {
            given_back(layout.size() - size);
        }
        // SAFETY: the caller's contract.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// Runs something and returns the most memory it held at once beyond what was held before.
pub fn peak_of<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = NOW.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let done = work();
    (done, PEAK.load(Ordering::Relaxed).saturating_sub(before))
}
