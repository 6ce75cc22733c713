//! Buffers that several members of a team write.
//!
//! Enters: a slice that the caller of a job has borrowed. Leaves: parts of it, which do not overlap by the promise of whoever takes them.
#![expect(unsafe_code, reason = "parts are made of a pointer")]

use std::ops::Range;

/// A slice that members write at places that do not overlap.
#[derive(Debug)]
pub struct DisjointSlice<T> {
    start: *mut T,
    len: usize,
}

// Copies are further handles under the same contract, whatever the elements are.
impl<T> Clone for DisjointSlice<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DisjointSlice<T> {}

// SAFETY: by the contract of `part`, no two members touch the same element.
unsafe impl<T: Send> Send for DisjointSlice<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for DisjointSlice<T> {}

impl<T> DisjointSlice<T> {
    /// Wraps a slice for the duration of a job.
    pub fn new(slice: &mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len() }
    }

    /// A part of the slice.
    ///
    /// # Safety
    /// The slice must still be borrowed by the job's caller, and no other live part may overlap this one.
    ///
    /// # Panics
    /// When the part is not within the slice.
    #[expect(clippy::mut_from_ref, reason = "the caller promises that parts do not overlap")]
    pub unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "a part lies within its slice");
        // SAFETY: within the slice as asserted; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }

    /// Where an element is, or the end.
    ///
    /// # Panics
    /// When it is behind the end.
    pub fn at(&self, index: usize) -> *const T {
        assert!(index <= self.len, "an element lies within its slice");
        self.start.wrapping_add(index).cast_const()
    }

    /// The whole slice, after a barrier after which it is not written.
    ///
    /// # Safety
    /// No part may be written while this is alive.
    pub unsafe fn whole(&self) -> &[T] {
        // SAFETY: the slice lives as long as the job; it is not written, by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}
