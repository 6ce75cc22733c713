//! Objects that callers hold by opaque pointers.
//!
//! Enters: an object. Leaves: a pointer that nobody follows; one that was never given out, or whose object is gone, finds nothing.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Objects of one kind.
#[derive(Debug)]
pub struct Handles<T> {
    /// The last address that was given out, and what lives.
    state: Mutex<(usize, BTreeMap<usize, T>)>,
}

/// Between two handles, and before the first: none looks like null or like a small number.
const STEP: usize = 4096;

impl<T> Handles<T> {
    #[must_use]
    pub const fn new() -> Self {
        Self { state: Mutex::new((0, BTreeMap::new())) }
    }

    fn lock(&self) -> MutexGuard<'_, (usize, BTreeMap<usize, T>)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn insert(&self, object: T) -> *mut c_void {
        let mut state = self.lock();
        state.0 += STEP;
        let address = state.0;
        state.1.insert(address, object);
        std::ptr::without_provenance_mut(address)
    }

    pub fn remove(&self, handle: *const c_void) -> Option<T> {
        self.lock().1.remove(&handle.addr())
    }

    /// Does something with an object, if it lives.
    pub fn with<R>(&self, handle: *const c_void, f: impl FnOnce(&mut T) -> R) -> Option<R> {
        self.lock().1.get_mut(&handle.addr()).map(f)
    }
}

impl<T: Clone> Handles<T> {
    pub fn get(&self, handle: *const c_void) -> Option<T> {
        self.with(handle, |object| object.clone())
    }
}

impl<T> Default for Handles<T> {
    fn default() -> Self {
        Self::new()
    }
}
