//! Sums by NCCL, the library that other engines have them from, opened at run time where the machine has it.
//!
//! Enters: a rank of a group and its [`Driver`]. Leaves: sums on the driver's stream, which can be recorded. They stand beside ours ([`super::peers`]) in
//! `hbmark ceiling --gpus`, and say what the library costs.
//!
//! *Source*: NCCL documentation, API reference.
#![expect(unsafe_code, reason = "NCCL is called by its C interface, of a library that is opened at run time")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;

use cudarc::driver::sys::CUstream;
use libloading::Library;

use super::device::Device;
use super::driver::{Driver, DriverMemory};
use crate::engine::EngineError;
use crate::engine::native::ranks::Rank;

/// Names of the library, of which the first that is there is opened.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// `ncclUniqueId`, 128 bytes.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u32; 32]);

/// `ncclFloat32` and `ncclSum`.
const FLOAT32: c_int = 7;
const SUM: c_int = 0;

type AllReduce =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, *mut c_void, CUstream) -> c_int;

/// The functions that are called.
struct Functions {
    version: unsafe extern "C" fn(*mut c_int) -> c_int,
    unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    init_rank: unsafe extern "C" fn(*mut *mut c_void, c_int, UniqueId, c_int) -> c_int,
    all_reduce: AllReduce,
    destroy: unsafe extern "C" fn(*mut c_void) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    /// They are there as long as this is.
    _library: Library,
}

/// NCCL, where the machine has it.
#[derive(Clone)]
pub struct Nccl(Arc<Functions>);

impl std::fmt::Debug for Nccl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Nccl({})", self.version())
    }
}

impl Nccl {
    /// Opens the library; none where there is none, or one without what is called.
    pub fn open() -> Option<Self> {
        // SAFETY: NCCL's initialisation reads environment variables, and touches nothing of this program.
        let library = NAMES.iter().find_map(|name| unsafe { Library::new(*name) }.ok())?;
        // SAFETY: the types are those of NCCL's header since version 2.0; the functions are kept no longer than the library.
        let functions = unsafe {
            Functions {
                version: *library.get(b"ncclGetVersion").ok()?,
                unique_id: *library.get(b"ncclGetUniqueId").ok()?,
                init_rank: *library.get(b"ncclCommInitRank").ok()?,
                all_reduce: *library.get(b"ncclAllReduce").ok()?,
                destroy: *library.get(b"ncclCommDestroy").ok()?,
                error_string: *library.get(b"ncclGetErrorString").ok()?,
                _library: library,
            }
        };
        Some(Self(Arc::new(functions)))
    }

    /// As `2.29.2`.
    pub fn version(&self) -> String {
        let mut code = 0;
        // SAFETY: the address of a number.
        let status = unsafe { (self.0.version)(&raw mut code) };
        if status != 0 {
            return "unknown".into();
        }
        // Since 2.9 two digits each for the second and the third.
        format!("{}.{}.{}", code / 10_000, code / 100 % 100, code % 100)
    }

    fn check(&self, device: &str, call: &str, status: c_int) -> Result<(), EngineError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: a zero-terminated text that lives as long as the library, for any status.
        let text = unsafe { CStr::from_ptr((self.0.error_string)(status)) };
        let detail = format!("{call}: {}", text.to_string_lossy());
        Err(EngineError::Device { device: device.into(), detail })
    }

    /// Joins a group, and waits until all of its ranks have, each on a thread of its own.
    pub fn join(&self, device: &Driver, rank: &mut Rank) -> Result<Communicator, EngineError> {
        let mut id = UniqueId([0; 32]);
        if rank.index() == 0 {
            // SAFETY: the address of such an id.
            let status = unsafe { (self.0.unique_id)(&raw mut id) };
            self.check(device.name(), "ncclGetUniqueId", status)?;
        }
        rank.bring(id.0.into_iter())?;
        rank.each_brought(|of, words| {
            if of == 0 {
                id.0.copy_from_slice(words);
            }
        });
        device.bind()?;
        let mut handle = std::ptr::null_mut();
        let [ranks, index] =
            [rank.size(), rank.index()].map(|count| c_int::try_from(count).unwrap_or(c_int::MAX));
        // SAFETY: the context of this rank's device is current on this thread; the address of a pointer.
        let status = unsafe { (self.0.init_rank)(&raw mut handle, ranks, id, index) };
        self.check(device.name(), "ncclCommInitRank", status)?;
        Ok(Communicator { nccl: self.clone(), handle })
    }
}

/// A rank of a group, as the library has it.
pub struct Communicator {
    nccl: Nccl,
    handle: *mut c_void,
}

// SAFETY: the library's handle belongs to no thread, and whoever has it is the only one that uses it.
unsafe impl Send for Communicator {}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Communicator").field("nccl", &self.nccl).finish_non_exhaustive()
    }
}

impl Communicator {
    /// `values = Σ values` over the ranks, in place, for the first so many floats.
    pub fn all_reduce(
        &self,
        device: &Driver,
        values: &DriverMemory,
        floats: usize,
    ) -> Result<(), EngineError> {
        if 4 * floats > Driver::bytes(values) {
            let detail = format!("a sum of {floats} floats in {} bytes", Driver::bytes(values));
            return Err(EngineError::Device { device: device.name().into(), detail });
        }
        device.bind()?;
        let at = Driver::address(values) as *mut c_void;
        // SAFETY: the memory is as large, checked above, and of the device whose stream this is; the communicator lives.
        let status = unsafe {
            (self.nccl.0.all_reduce)(at, at, floats, FLOAT32, SUM, self.handle, device.raw_stream())
        };
        self.nccl.check(device.name(), "ncclAllReduce", status)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // SAFETY: made by `ncclCommInitRank`, and destroyed only here. A failure would leave it to the end of the process.
        let _ = unsafe { (self.nccl.0.destroy)(self.handle) };
    }
}
