//! The CUDA runtime, as the code uses it that nvcc makes of a kernel and of its launch.
//!
//! Enters: registrations of kernels before `main`, launches, and the few calls that launchers make. Leaves: `cudaError_t`, and launches
//! as work of streams. A kernel that is registered and not emulated makes its stream fail, since launchers ignore what a launch returns.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::handles::Handles;
use crate::clock::Demand;
use crate::launch::{self, Config, MOST_SHARED_BYTES, SHARED_BYTES};
use crate::stream::{self, StreamHandle, Work};

/// `cudaError_t`.
pub type Status = i32;
pub const SUCCESS: Status = 0;
pub const INVALID_VALUE: Status = 1;
pub const INVALID_CONFIGURATION: Status = 9;
pub const MISSING_CONFIGURATION: Status = 52;
pub const INVALID_DEVICE_FUNCTION: Status = 98;

/// `cudaFuncAttribute`.
const MAX_DYNAMIC_SHARED_MEMORY_SIZE: c_int = 8;
const PREFERRED_SHARED_MEMORY_CARVEOUT: c_int = 9;

/// `dim3`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dim3 {
    pub x: u32,
    pub y: u32,
    pub z: u32,
}

impl Dim3 {
    fn sides(self) -> [u32; 3] {
        [self.x, self.y, self.z]
    }
}

/// A registered kernel.
#[derive(Debug, Clone)]
struct Kernel {
    /// As the device knows it, mangled.
    name: Arc<str>,
    binary: usize,
    shared_limit: usize,
}

/// Binaries, of which nothing is kept.
static BINARIES: Handles<()> = Handles::new();
/// Kernels by the addresses of the functions that launch them.
static KERNELS: Mutex<BTreeMap<usize, Kernel>> = Mutex::new(BTreeMap::new());

fn kernels() -> MutexGuard<'static, BTreeMap<usize, Kernel>> {
    KERNELS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What stands between `<<<` and `>>>`.
#[derive(Debug, Clone, Copy)]
struct Configuration {
    grid: Dim3,
    block: Dim3,
    shared_bytes: usize,
    stream: StreamHandle,
}

thread_local! {
    static CONFIGURATIONS: RefCell<Vec<Configuration>> = const { RefCell::new(Vec::new()) };
    static LAST_ERROR: Cell<Status> = const { Cell::new(SUCCESS) };
}

/// Keeps an error for `cudaGetLastError`.
fn kept(status: Status) -> Status {
    if status != SUCCESS {
        LAST_ERROR.set(status);
    }
    status
}

entries! {
    "__cudaRegisterFatBinary" register_fat_binary(_binary: *mut c_void) -> *mut *mut c_void { BINARIES.insert(()).cast() }
    "__cudaRegisterFatBinaryEnd" register_fat_binary_end(_binary: *mut *mut c_void) {}
    "__cudaUnregisterFatBinary" unregister_fat_binary(binary: *mut *mut c_void) {
        if BINARIES.remove(binary.cast()).is_some() {
            kernels().retain(|_, kernel| kernel.binary != binary.addr());
        }
    }
    "__cudaInitModule" init_module(_binary: *mut *mut c_void) -> c_char { 1 }
    "__cudaRegisterFunction" register_function(binary: *mut *mut c_void, host_function: *const c_void, _device_function: *mut c_char,
        device_name: *const c_char, _thread_limit: c_int, _thread: *mut c_void, _block: *mut c_void, _block_size: *mut c_void,
        _grid_size: *mut c_void, _warp_size: *mut c_int) {
        let name = CStr::from_ptr(device_name).to_string_lossy();
        let kernel = Kernel { name: name.into(), binary: binary.addr(), shared_limit: SHARED_BYTES };
        kernels().insert(host_function.addr(), kernel);
    }
    // Variables of the device: emulated kernels have theirs in themselves.
    "__cudaRegisterVar" register_var(_binary: *mut *mut c_void, _host_variable: *mut c_char, _device_address: *mut c_char,
        _device_name: *const c_char, _external: c_int, _bytes: usize, _constant: c_int, _global: c_int) {}

    "__cudaPushCallConfiguration" push_call_configuration(grid: Dim3, block: Dim3, shared_bytes: usize, stream: StreamHandle) -> c_int {
        CONFIGURATIONS.with_borrow_mut(|stack| stack.push(Configuration { grid, block, shared_bytes, stream }));
        SUCCESS
    }
    "__cudaPopCallConfiguration" pop_call_configuration(grid: *mut Dim3, block: *mut Dim3, shared_bytes: *mut usize,
        stream: *mut StreamHandle) -> Status {
        let Some(configuration) = CONFIGURATIONS.with_borrow_mut(Vec::pop) else { return kept(MISSING_CONFIGURATION) };
        *grid = configuration.grid;
        *block = configuration.block;
        *shared_bytes = configuration.shared_bytes;
        *stream = configuration.stream;
        SUCCESS
    }
    // The handle of a kernel, which here is the address of the function that launches it.
    "__cudaGetKernel" get_kernel(kernel: *mut *const c_void, host_function: *const c_void) -> Status {
        if !kernels().contains_key(&host_function.addr()) {
            return kept(INVALID_DEVICE_FUNCTION);
        }
        *kernel = host_function;
        SUCCESS
    }
    "__cudaLaunchKernel" launch_kernel_handle(kernel: *const c_void, grid: Dim3, block: Dim3, arguments: *mut *mut c_void,
        shared_bytes: usize, stream: StreamHandle) -> Status { kept(launch(kernel, grid, block, arguments, shared_bytes, stream)) }
    // What sources compiled for per-thread default streams call. A stream is always given here.
    "__cudaLaunchKernel_ptsz" launch_kernel_handle_per_thread(kernel: *const c_void, grid: Dim3, block: Dim3, arguments: *mut *mut c_void,
        shared_bytes: usize, stream: StreamHandle) -> Status { kept(launch(kernel, grid, block, arguments, shared_bytes, stream)) }
    "cudaLaunchKernel" launch_kernel(host_function: *const c_void, grid: Dim3, block: Dim3, arguments: *mut *mut c_void,
        shared_bytes: usize, stream: StreamHandle) -> Status { kept(launch(host_function, grid, block, arguments, shared_bytes, stream)) }

    "cudaFuncSetAttribute" func_set_attribute(function: *const c_void, attribute: c_int, value: c_int) -> Status {
        let mut kernels = kernels();
        let Some(kernel) = kernels.get_mut(&function.addr()) else { return kept(INVALID_DEVICE_FUNCTION) };
        match (attribute, usize::try_from(value)) {
            (MAX_DYNAMIC_SHARED_MEMORY_SIZE, Ok(bytes)) if bytes <= MOST_SHARED_BYTES => {
                kernel.shared_limit = bytes;
                SUCCESS
            }
            // In percent, or as the driver likes.
            (PREFERRED_SHARED_MEMORY_CARVEOUT, _) if (-1..=100).contains(&value) => SUCCESS,
            _ => kept(INVALID_VALUE),
        }
    }
    // There is one device.
    "cudaGetDevice" get_device(device: *mut c_int) -> Status {
        if device.is_null() {
            return kept(INVALID_VALUE);
        }
        *device = 0;
        SUCCESS
    }
    // The last error of this thread, which it forgets.
    "cudaGetLastError" get_last_error() -> Status { LAST_ERROR.replace(SUCCESS) }
    "cudaPeekAtLastError" peek_at_last_error() -> Status { LAST_ERROR.get() }
}

/// # Safety
///
/// As for [`launch::work`].
unsafe fn launch(
    function: *const c_void,
    grid: Dim3,
    block: Dim3,
    arguments: *const *mut c_void,
    shared_bytes: usize,
    stream: StreamHandle,
) -> Status {
    let Some(kernel) = kernels().get(&function.addr()).cloned() else { return INVALID_DEVICE_FUNCTION };
    let config =
        Config { grid: grid.sides(), block: block.sides(), shared_bytes, shared_limit: kernel.shared_limit };
    if !config.grid_fits() {
        return INVALID_CONFIGURATION;
    }
    // SAFETY: the caller's promise.
    match unsafe { launch::work(&kernel.name, &config, arguments, false) } {
        // The numbers of a cudaError_t are those of the CUresult wherever both have one.
        Ok(work) => stream::enqueue(stream, work),
        Err(launch::NOT_FOUND) => stream::enqueue(stream, not_emulated(&kernel.name)),
        Err(status) => status,
    }
}

fn not_emulated(name: &str) -> Work {
    let message = format!("{name}: there is no emulation of this kernel");
    Work::new(name, Demand::default(), Arc::new(move || Err(message.clone())))
}
