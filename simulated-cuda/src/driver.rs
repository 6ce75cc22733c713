//! The driver's functions, by their names in `libcuda.so.1`.
//!
//! Enters: calls of the C interface. Leaves: their answers by [`Machine`]; nothing is decided here but what an address of the caller may be.
#![allow(non_snake_case, reason = "the driver's names")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

use crate::calls;
use crate::device::attribute;
use crate::machine::{Answer, Machine, asked, machine};
use crate::status::{self, SUCCESS};

fn code(answer: Answer<()>) -> c_int {
    answer.err().unwrap_or(SUCCESS)
}

/// Writes an answer where the caller wants it.
///
/// # Safety
///
/// `to` is null or can be written.
unsafe fn write<T>(to: *mut T, answer: Answer<T>) -> c_int {
    if to.is_null() {
        return status::INVALID_VALUE;
    }
    match answer {
        Ok(value) => {
            // SAFETY: the caller's promise.
            unsafe { to.write(value) };
            SUCCESS
        }
        Err(status) => status,
    }
}

/// Functions of the driver. All are called with what its documentation asks of a caller.
macro_rules! entries {
    ($($name:ident($($argument:ident: $kind:ty),*) $body:block)*) => {$(
        /// # Safety
        ///
        /// As the CUDA driver API says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $kind),*) -> c_int {
            calls::count!(stringify!($name));
            #[allow(unused_unsafe, reason = "most of them write where the caller wants the answer")]
            // SAFETY: addresses are the caller's, as the driver API says of each.
            unsafe { $body }
        }
    )*};
}

entries! {
    cuInit(_flags: u32) { code(machine().initialise()) }
    cuDriverGetVersion(version: *mut c_int) { write(version, Ok(13_000)) }
    cuGetErrorName(error: c_int, text: *mut *const c_char) {
        match status::text(error) {
            Some((name, _)) => write(text, Ok(name.as_ptr())),
            None => { write(text, Ok(ptr::null())); status::INVALID_VALUE }
        }
    }
    cuGetErrorString(error: c_int, text: *mut *const c_char) {
        match status::text(error) {
            Some((_, words)) => write(text, Ok(words.as_ptr())),
            None => { write(text, Ok(ptr::null())); status::INVALID_VALUE }
        }
    }

    cuDeviceGetCount(count: *mut c_int) {
        write(count, asked(|m| Ok(m.count() as c_int)))
    }
    cuDeviceGet(device: *mut c_int, ordinal: c_int) {
        write(device, asked(|m| m.device(ordinal).map(|index| index as c_int)))
    }
    cuDeviceGetName(name: *mut c_char, length: c_int, device: c_int) {
        let text = asked(|m| { m.device(device)?; Ok(m.script.device.name()) });
        match text {
            Ok(text) if !name.is_null() && length > 0 => {
                let count = text.len().min(length as usize - 1);
                ptr::copy_nonoverlapping(text.as_ptr().cast(), name, count);
                name.add(count).write(0);
                SUCCESS
            }
            Ok(_) => status::INVALID_VALUE,
            Err(status) => status,
        }
    }
    cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) {
        write(bytes, asked(|m| { m.device(device)?; Ok(m.script.capacity() as usize) }))
    }
    cuDeviceGetAttribute(value: *mut c_int, which: c_int, device: c_int) {
        write(value, asked(|m| {
            let index = m.device(device)?;
            attribute(m.script, index as u32, which).ok_or(status::INVALID_VALUE)
        }))
    }
    cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) {
        write(uuid, asked(|m| m.device(device).map(|index| crate::device::uuid(index as u32))))
    }
    cuDeviceGetPCIBusId(text: *mut c_char, length: c_int, device: c_int) {
        let id = asked(|m| m.device(device).map(|index| format!("0000:{:02X}:00.0", crate::device::pci_bus(index as u32))));
        match id {
            Ok(id) if length as usize > id.len() => {
                ptr::copy_nonoverlapping(id.as_ptr().cast(), text, id.len());
                text.add(id.len()).write(0);
                SUCCESS
            }
            Ok(_) => status::INVALID_VALUE,
            Err(status) => status,
        }
    }
    cuDeviceGetDefaultMemPool(pool: *mut usize, device: c_int) { write(pool, asked(|m| m.pool(device))) }
    cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) { write(context, asked(|m| m.retain(device))) }
    cuDevicePrimaryCtxRelease_v2(device: c_int) { code(machine().release(device)) }
    cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) {
        write(can, asked(|m| m.can_access_peer(device, peer).map(c_int::from)))
    }
    cuCtxEnablePeerAccess(peer: usize, flags: u32) { code(asked(|m| m.enable_peer_access(peer, flags))) }
    cuDeviceGraphMemTrim(device: c_int) { code(asked(|m| m.device(device).map(|_| ()))) }
    cuDeviceGetGraphMemAttribute(device: c_int, which: u32, value: *mut u64) {
        write(value, asked(|m| m.graph_attribute(device, which)))
    }
    cuDeviceSetGraphMemAttribute(device: c_int, which: u32, value: *const u64) {
        code(asked(|m| m.set_graph_attribute(device, which, value.read())))
    }

    cuCtxGetCurrent(context: *mut usize) { write(context, asked(|_| Ok(Machine::current_context()))) }
    cuCtxSetCurrent(context: usize) { code(asked(|m| m.set_current(context))) }
    cuCtxGetDevice(device: *mut c_int) { write(device, asked(|m| m.current().map(|index| index as c_int))) }
    cuCtxSynchronize() { code(asked(Machine::synchronise_context)) }
    // Only primary contexts are made here, and these are released.
    cuCtxDestroy_v2(_context: usize) { status::INVALID_CONTEXT }

    cuStreamCreate(stream: *mut usize, flags: u32) { write(stream, asked(|m| m.create_stream(flags))) }
    cuStreamDestroy_v2(stream: usize) { code(asked(|m| m.destroy_stream(stream))) }
    cuStreamSynchronize(stream: usize) { code(asked(|m| m.synchronise_stream(stream))) }
    cuStreamWaitEvent(stream: usize, event: usize, _flags: u32) { code(asked(|m| m.wait(stream, event))) }
    cuStreamBeginCapture_v2(stream: usize, mode: u32) { code(asked(|m| m.begin_capture(stream, mode))) }
    cuStreamEndCapture(stream: usize, graph: *mut usize) {
        let answer = asked(|m| m.end_capture(stream));
        // A void capture gives no graph.
        if answer.is_err() && !graph.is_null() {
            graph.write(0);
        }
        write(graph, answer)
    }
    cuStreamIsCapturing(stream: usize, state: *mut u32) { write(state, asked(|m| m.capture_status(stream))) }

    cuEventCreate(event: *mut usize, flags: u32) { write(event, asked(|m| m.create_event(flags))) }
    cuEventDestroy_v2(event: usize) { code(asked(|m| m.destroy_event(event))) }
    cuEventRecord(event: usize, stream: usize) { code(asked(|m| m.record(event, stream))) }
    cuEventSynchronize(event: usize) { code(asked(|m| m.synchronise_event(event))) }
    cuEventElapsedTime_v2(ms: *mut f32, start: usize, end: usize) { write(ms, asked(|m| m.elapsed_ms(start, end))) }
    cuEventElapsedTime(ms: *mut f32, start: usize, end: usize) { write(ms, asked(|m| m.elapsed_ms(start, end))) }

    cuMemAlloc_v2(address: *mut usize, bytes: usize) { write(address, asked(|m| m.allocate(bytes))) }
    cuMemAllocAsync(address: *mut usize, bytes: usize, stream: usize) {
        write(address, asked(|m| m.allocate_on(bytes, stream)))
    }
    cuMemFree_v2(address: usize) { code(asked(|m| m.free(address))) }
    cuMemFreeAsync(address: usize, stream: usize) { code(asked(|m| m.free_on(address, stream))) }
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        match asked(|m| m.memory_info()) {
            Ok((free_bytes, all)) => { write(free, Ok(free_bytes)); write(total, Ok(all)) }
            Err(status) => status,
        }
    }
    cuMemHostAlloc(address: *mut usize, bytes: usize, _flags: u32) { write(address, asked(|m| m.allocate_pinned(bytes))) }
    cuMemFreeHost(address: usize) { code(asked(|m| m.free_pinned(address))) }
    cuMemPoolGetAttribute(pool: usize, which: u32, value: *mut u64) { write(value, asked(|m| m.pool_attribute(pool, which))) }
    cuMemPoolSetAttribute(pool: usize, which: u32, value: *const u64) {
        code(asked(|m| m.set_pool_attribute(pool, which, value.read())))
    }
    cuMemPoolTrimTo(pool: usize, _bytes_to_keep: usize) { code(asked(|m| m.trim_pool(pool))) }
    cuMemcpyHtoDAsync_v2(to: usize, from: usize, bytes: usize, stream: usize) {
        code(asked(|m| m.copy_to_device(to, from, bytes, stream)))
    }
    cuMemcpyDtoHAsync_v2(to: usize, from: usize, bytes: usize, stream: usize) {
        code(asked(|m| m.copy_to_host(to, from, bytes, stream)))
    }
    cuMemcpyDtoDAsync_v2(to: usize, from: usize, bytes: usize, stream: usize) {
        code(asked(|m| m.copy_on_device(to, from, bytes, stream)))
    }
    cuMemcpyPeerAsync(to: usize, _to_context: usize, from: usize, _from_context: usize, bytes: usize, stream: usize) {
        code(asked(|m| m.copy_on_device(to, from, bytes, stream)))
    }
    cuMemsetD8Async(to: usize, value: u8, bytes: usize, stream: usize) { code(asked(|m| m.fill(to, value, bytes, stream))) }

    // Kernels are found by their names: what the image holds was compiled for a device, and is not looked at.
    cuModuleLoadData(module: *mut usize, image: *const c_void) {
        if image.is_null() { status::INVALID_VALUE } else { write(module, asked(Machine::load)) }
    }
    cuModuleLoad(module: *mut usize, path: *const c_char) {
        let path = CStr::from_ptr(path).to_string_lossy();
        if std::path::Path::new(&*path).is_file() { write(module, asked(Machine::load)) } else { status::FILE_NOT_FOUND }
    }
    cuModuleUnload(module: usize) { code(asked(|m| m.unload(module))) }
    cuModuleGetFunction(function: *mut usize, module: usize, name: *const c_char) {
        let name = CStr::from_ptr(name).to_string_lossy();
        write(function, asked(|m| m.function(module, &name)))
    }
    cuFuncGetAttribute(value: *mut c_int, which: u32, function: usize) {
        write(value, asked(|m| m.function_attribute(function, which)))
    }
    cuFuncSetAttribute(function: usize, which: u32, value: c_int) {
        code(asked(|m| m.set_function_attribute(function, which, value)))
    }
    cuLaunchKernel(function: usize, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        shared_bytes: u32, stream: usize, arguments: *mut *mut c_void, _extra: *mut *mut c_void) {
        code(asked(|m| m.launch(
            function, [grid_x, grid_y, grid_z], [block_x, block_y, block_z], shared_bytes as usize, stream, arguments, false)))
    }
    cuLaunchKernelEx(config: *const LaunchConfig, function: usize, arguments: *mut *mut c_void, _extra: *mut *mut c_void) {
        let LaunchConfig { grid, block, shared_bytes, stream, attributes, attribute_count } = config.read();
        let mut attributes = (0..attribute_count as usize).map(|index| attributes.add(index).read());
        let dependent = attributes.any(|attribute| attribute.id == PROGRAMMATIC_STREAM_SERIALIZATION && attribute.value[0] != 0);
        code(asked(|m| m.launch(function, grid, block, shared_bytes as usize, stream, arguments, dependent)))
    }

    cuGraphInstantiateWithFlags(executable: *mut usize, graph: usize, flags: u64) {
        write(executable, asked(|m| m.instantiate(graph, flags)))
    }
    cuGraphUpload(executable: usize, stream: usize) { code(asked(|m| m.upload(executable, stream))) }
    cuGraphLaunch(executable: usize, stream: usize) { code(asked(|m| m.launch_graph(executable, stream))) }
    cuGraphDestroy(graph: usize) { code(asked(|m| m.destroy_graph(graph))) }
    cuGraphExecDestroy(executable: usize) { code(asked(|m| m.destroy_executable(executable))) }
}

/// *Source*: CUDA driver API, `CUlaunchConfig`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LaunchConfig {
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    stream: usize,
    attributes: *const LaunchAttribute,
    attribute_count: u32,
}

/// *Source*: CUDA driver API, `CUlaunchAttribute`; the value is a union.
#[repr(C, align(8))]
#[derive(Debug, Clone, Copy)]
pub struct LaunchAttribute {
    id: u32,
    pad: u32,
    value: [u32; 16],
}

impl LaunchConfig {
    /// A configuration, for callers in Rust. The attributes must live as long as it is used.
    #[must_use]
    pub fn new(
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        stream: usize,
        attributes: &[LaunchAttribute],
    ) -> Self {
        let attribute_count = attributes.len() as u32;
        Self { grid, block, shared_bytes, stream, attributes: attributes.as_ptr(), attribute_count }
    }
}

impl LaunchAttribute {
    #[must_use]
    pub fn new(id: u32, value: [u32; 16]) -> Self {
        Self { id, pad: 0, value }
    }
}

/// *Source*: CUDA driver API, `CUlaunchAttributeID`.
const PROGRAMMATIC_STREAM_SERIALIZATION: u32 = 6;
