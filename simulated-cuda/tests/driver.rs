//! The driver's rules, by its own functions. All tests share one simulated device, and take turns.
#![allow(unsafe_code, reason = "the driver's interface is C")]

use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};

use simulated_cuda::driver::*;
use simulated_cuda::status;

/// `cuStreamBeginCapture` that refuses calls of this thread that are not safe then, and the one that refuses nothing.
const THREAD_LOCAL: u32 = 1;
const NON_BLOCKING: u32 = 1;

struct Context {
    _turn: MutexGuard<'static, ()>,
    stream: usize,
}

impl Context {
    fn open() -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut context, mut stream) = (0, 0);
        // SAFETY: addresses of values of these types.
        unsafe {
            assert_eq!(cuInit(0), 0);
            assert_eq!(cuDevicePrimaryCtxRetain(&raw mut context, 0), 0);
            assert_eq!(cuCtxSetCurrent(context), 0);
            assert_eq!(cuStreamCreate(&raw mut stream, NON_BLOCKING), 0);
        }
        Self { _turn: turn, stream }
    }

    fn allocate(&self, bytes: usize) -> Result<usize, i32> {
        let mut address = 0;
        // SAFETY: as above.
        let status = unsafe { cuMemAllocAsync(&raw mut address, bytes, self.stream) };
        if status == 0 { Ok(address) } else { Err(status) }
    }

    fn free(&self, address: usize) -> i32 {
        // SAFETY: no addresses of the host.
        unsafe { cuMemFreeAsync(address, self.stream) }
    }

    fn upload(&self, to: usize, values: &[f32]) -> i32 {
        // SAFETY: as many bytes.
        unsafe { cuMemcpyHtoDAsync_v2(to, values.as_ptr() as usize, size_of_val(values), self.stream) }
    }

    fn download(&self, from: usize, values: &mut [f32]) -> i32 {
        // SAFETY: as many bytes.
        unsafe { cuMemcpyDtoHAsync_v2(values.as_mut_ptr() as usize, from, size_of_val(values), self.stream) }
    }

    fn synchronise(&self) -> i32 {
        // SAFETY: no addresses.
        unsafe { cuStreamSynchronize(self.stream) }
    }

    /// `fill_f32` over the first elements.
    fn fill(&self, function: usize, to: usize, mut value: f32, mut elements: usize, grid: [u32; 3]) -> i32 {
        let mut address = to;
        let mut arguments: [*mut c_void; 3] =
            [(&raw mut address).cast(), (&raw mut value).cast(), (&raw mut elements).cast()];
        let [x, y, z] = grid;
        // SAFETY: three arguments of the kernel's sizes.
        unsafe {
            let arguments = arguments.as_mut_ptr();
            cuLaunchKernel(function, x, y, z, 32, 1, 1, 0, self.stream, arguments, std::ptr::null_mut())
        }
    }

    fn function(&self) -> (usize, usize) {
        let (mut module, mut function) = (0, 0);
        // SAFETY: addresses of values, and zero-terminated texts.
        unsafe {
            assert_eq!(cuModuleLoadData(&raw mut module, c"an image".as_ptr().cast()), 0);
            assert_eq!(cuModuleGetFunction(&raw mut function, module, c"fill_f32".as_ptr()), 0);
            let mut none = 0;
            assert_eq!(cuModuleGetFunction(&raw mut none, module, c"no_kernel".as_ptr()), status::NOT_FOUND);
        }
        (module, function)
    }

    fn capture(&self) -> usize {
        let mut graph = 0;
        // SAFETY: an address of a value.
        unsafe {
            assert_eq!(cuStreamEndCapture(self.stream, &raw mut graph), 0);
            let mut executable = 0;
            assert_eq!(cuGraphInstantiateWithFlags(&raw mut executable, graph, 0), 0);
            assert_eq!(cuGraphDestroy(graph), 0);
            executable
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: what `open` has made.
        unsafe {
            cuStreamDestroy_v2(self.stream);
            cuDevicePrimaryCtxRelease_v2(0);
        }
    }
}

#[test]
fn work_runs_in_the_order_of_its_stream_when_somebody_waits() {
    let c = Context::open();
    let (_, function) = c.function();
    let buffer = c.allocate(40).unwrap();
    let mut host = [0.0; 10];
    assert_eq!(c.upload(buffer, &[1.0; 10]), 0);
    assert_eq!(c.fill(function, buffer, 2.0, 4, [1, 1, 1]), 0);
    // Pageable memory of the host is written when the call returns.
    assert_eq!(c.download(buffer, &mut host), 0);
    assert_eq!(host, [2.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]);
    assert_eq!(c.free(buffer), 0);
}

#[test]
fn what_was_never_written_is_not_a_number() {
    let c = Context::open();
    let buffer = c.allocate(16).unwrap();
    let mut host = [0.0; 4];
    assert_eq!(c.download(buffer, &mut host), 0);
    assert!(host.iter().all(|value: &f32| value.is_nan()));
    assert_eq!(c.free(buffer), 0);
    assert_eq!(c.free(buffer), status::INVALID_VALUE, "freed twice");
    assert_eq!(c.upload(buffer, &[0.0; 4]), status::INVALID_VALUE, "freed memory");
}

#[test]
fn copies_beyond_an_allocation_and_grids_beyond_the_limits_are_refused() {
    let c = Context::open();
    let (_, function) = c.function();
    let buffer = c.allocate(16).unwrap();
    assert_eq!(c.upload(buffer, &[0.0; 5]), status::INVALID_VALUE);
    assert_eq!(c.fill(function, buffer, 0.0, 4, [1, 65_536, 1]), status::INVALID_VALUE);
    assert_eq!(c.fill(function, buffer, 0.0, 4, [1, 65_535, 1]), 0);
    assert_eq!(c.free(buffer), 0);
}

#[test]
fn a_graph_runs_what_was_captured_as_often_as_it_is_launched() {
    let c = Context::open();
    let (module, function) = c.function();
    let buffer = c.allocate(16).unwrap();
    let mut host = [0.0; 4];
    assert_eq!(c.upload(buffer, &[5.0; 4]), 0);
    // SAFETY: no addresses.
    assert_eq!(unsafe { cuStreamBeginCapture_v2(c.stream, THREAD_LOCAL) }, 0);
    assert_eq!(c.fill(function, buffer, 7.0, 2, [1, 1, 1]), 0);
    let graph = c.capture();
    assert_eq!(c.download(buffer, &mut host), 0);
    assert_eq!(host, [5.0; 4], "nothing runs while it is captured");
    // SAFETY: no addresses.
    unsafe {
        assert_eq!(cuGraphLaunch(graph, c.stream), 0);
        assert_eq!(c.download(buffer, &mut host), 0);
        assert_eq!(host, [7.0, 7.0, 5.0, 5.0]);
        assert_eq!(cuModuleUnload(module), 0);
        assert_eq!(cuGraphLaunch(graph, c.stream), status::INVALID_HANDLE, "its kernels are gone");
        assert_eq!(cuGraphExecDestroy(graph), status::INVALID_HANDLE, "and it should have gone before them");
    }
    assert_eq!(c.free(buffer), 0);
}

#[test]
fn what_may_not_be_called_in_a_capture_ends_it() {
    let c = Context::open();
    let mut graph = 1;
    // SAFETY: addresses of values.
    unsafe {
        assert_eq!(cuStreamBeginCapture_v2(c.stream, THREAD_LOCAL), 0);
        assert_eq!(c.synchronise(), status::STREAM_CAPTURE_UNSUPPORTED);
        assert_eq!(c.allocate(16), Err(status::STREAM_CAPTURE_INVALIDATED));
        assert_eq!(cuStreamEndCapture(c.stream, &raw mut graph), status::STREAM_CAPTURE_INVALIDATED);
        assert_eq!(graph, 0);
        assert_eq!(cuStreamBeginCapture_v2(c.stream, THREAD_LOCAL), 0);
        let mut address = 0;
        assert_eq!(cuMemAlloc_v2(&raw mut address, 16), status::STREAM_CAPTURE_UNSUPPORTED);
        assert_eq!(cuStreamEndCapture(c.stream, &raw mut graph), status::STREAM_CAPTURE_INVALIDATED);
        // The stream works again.
        assert_eq!(c.synchronise(), 0);
    }
}

#[test]
fn a_graph_has_its_memory_while_it_runs() {
    let c = Context::open();
    let (_, function) = c.function();
    let mut high = 0;
    let reset = 0;
    // SAFETY: addresses of values.
    unsafe {
        assert_eq!(cuDeviceSetGraphMemAttribute(0, 1, &raw const reset), 0);
        assert_eq!(cuStreamBeginCapture_v2(c.stream, THREAD_LOCAL), 0);
        let inside = c.allocate(1 << 20).unwrap();
        assert_eq!(c.fill(function, inside, 1.0, 100, [4, 1, 1]), 0);
        assert_eq!(c.free(inside), 0);
        let graph = c.capture();
        assert_eq!(cuDeviceGetGraphMemAttribute(0, 1, &raw mut high), 0);
        assert_eq!(high, 0);
        for _ in 0..3 {
            assert_eq!(cuGraphLaunch(graph, c.stream), 0);
        }
        assert_eq!(c.synchronise(), 0);
        assert_eq!(cuDeviceGetGraphMemAttribute(0, 1, &raw mut high), 0);
        assert_eq!(high, 1 << 20);
        assert_eq!(cuGraphExecDestroy(graph), 0);
    }
}

#[test]
fn events_have_times_when_they_have_happened() {
    let c = Context::open();
    let (_, function) = c.function();
    let buffer = c.allocate(4000).unwrap();
    let (mut start, mut end, mut untimed, mut ms) = (0, 0, 0, -1.0);
    // SAFETY: addresses of values.
    unsafe {
        assert_eq!(cuEventCreate(&raw mut start, 0), 0);
        assert_eq!(cuEventCreate(&raw mut end, 0), 0);
        assert_eq!(cuEventCreate(&raw mut untimed, 2), 0);
        assert_eq!(cuEventElapsedTime_v2(&raw mut ms, start, end), status::INVALID_HANDLE, "never recorded");
        assert_eq!(cuEventRecord(start, c.stream), 0);
        assert_eq!(c.fill(function, buffer, 1.0, 1000, [32, 1, 1]), 0);
        assert_eq!(cuEventRecord(end, c.stream), 0);
        assert_eq!(cuEventRecord(untimed, c.stream), 0);
        assert_eq!(cuEventElapsedTime_v2(&raw mut ms, start, end), status::NOT_READY);
        assert_eq!(cuEventSynchronize(end), 0);
        assert_eq!(cuEventElapsedTime_v2(&raw mut ms, start, end), 0);
        // At least a launch and the 4,000 bytes that it wrote, on an H200.
        assert!(ms > 2.49e-3, "{ms}");
        assert_eq!(c.synchronise(), 0);
        assert_eq!(cuEventElapsedTime_v2(&raw mut ms, start, untimed), status::INVALID_HANDLE);
        for event in [start, end, untimed] {
            assert_eq!(cuEventDestroy_v2(event), 0);
        }
    }
    assert_eq!(c.free(buffer), 0);
}

/// A kernel of ours by its name.
fn own_kernel(module: usize, name: &std::ffi::CStr) -> usize {
    let mut function = 0;
    // SAFETY: an address of a value and a zero-terminated text.
    assert_eq!(unsafe { cuModuleGetFunction(&raw mut function, module, name.as_ptr()) }, 0);
    function
}

#[test]
fn kernels_take_the_time_of_the_bytes_that_they_touch() {
    let c = Context::open();
    let (module, _) = c.function();
    let (copy, pattern) = (own_kernel(module, c"copy"), own_kernel(module, c"write_pattern"));
    let (mut from, mut to) = (c.allocate(8 << 20).unwrap(), c.allocate(8 << 20).unwrap());
    let mut vectors = (8_u64 << 20) / 16;
    let launch = |function, [blocks, threads]: [u32; 2], arguments: &mut [*mut c_void]| {
        // SAFETY: as many arguments as the kernel has parameters.
        unsafe {
            let arguments = arguments.as_mut_ptr();
            cuLaunchKernel(
                function,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                c.stream,
                arguments,
                std::ptr::null_mut(),
            )
        }
    };
    // SAFETY: addresses of values.
    unsafe {
        let mut events = [0; 3];
        for event in &mut events {
            assert_eq!(cuEventCreate(event, 0), 0);
        }
        // The host is ahead of the device from here on, however long it is kept from its next calls.
        let (spin, mut nanoseconds) = (own_kernel(module, c"spin"), 2_000_000_000_u64);
        assert_eq!(launch(spin, [1, 1], &mut [(&raw mut nanoseconds).cast()]), 0);
        assert_eq!(cuEventRecord(events[0], c.stream), 0);
        let [source, target, count] =
            [(&raw mut from).cast(), (&raw mut to).cast(), (&raw mut vectors).cast()];
        assert_eq!(launch(pattern, [8, 128], &mut [source, count]), 0);
        assert_eq!(cuEventRecord(events[1], c.stream), 0);
        assert_eq!(launch(copy, [8, 128], &mut [source, target, count]), 0);
        assert_eq!(cuEventRecord(events[2], c.stream), 0);
        assert_eq!(c.synchronise(), 0);
        for (pair, bytes) in events.windows(2).zip([8 << 20, 16 << 20]) {
            let mut ms = 0.0;
            assert_eq!(cuEventElapsedTime_v2(&raw mut ms, pair[0], pair[1]), 0);
            let exact = 2.5e-3 + f64::from(bytes) / (4.8e12 * 0.9) * 1e3;
            assert!((f64::from(ms) / exact - 1.0).abs() < 0.01, "{bytes} bytes: {ms} ms, wanted {exact}");
        }
        for event in events {
            assert_eq!(cuEventDestroy_v2(event), 0);
        }
    }
    for buffer in [from, to] {
        assert_eq!(c.free(buffer), 0);
    }
}

#[test]
fn a_stream_waits_for_an_event_of_another() {
    let c = Context::open();
    let (_, function) = c.function();
    let buffer = c.allocate(16).unwrap();
    let (mut other, mut event) = (0, 0);
    let mut host = [0.0; 4];
    // SAFETY: addresses of values.
    unsafe {
        assert_eq!(cuStreamCreate(&raw mut other, NON_BLOCKING), 0);
        assert_eq!(cuEventCreate(&raw mut event, 2), 0);
        assert_eq!(c.fill(function, buffer, 3.0, 4, [1, 1, 1]), 0);
        assert_eq!(cuEventRecord(event, c.stream), 0);
        // Without the wait nothing orders the two.
        let to = host.as_mut_ptr() as usize;
        assert_eq!(cuMemcpyDtoHAsync_v2(to, buffer, 16, other), 0);
        assert!(host.iter().all(|value: &f32| value.is_nan()));
        assert_eq!(cuStreamWaitEvent(other, event, 0), 0);
        assert_eq!(cuMemcpyDtoHAsync_v2(to, buffer, 16, other), 0);
        assert_eq!(cuStreamDestroy_v2(other), 0);
        assert_eq!(cuEventDestroy_v2(event), 0);
    }
    assert_eq!(host, [3.0; 4]);
    assert_eq!(c.free(buffer), 0);
}

#[test]
fn a_thread_without_a_context_can_do_nothing() {
    let c = Context::open();
    let stream = c.stream;
    // SAFETY: an address of a value.
    let status = std::thread::spawn(move || unsafe {
        let mut address = 0;
        cuMemAllocAsync(&raw mut address, 16, stream)
    });
    assert_eq!(status.join().unwrap(), status::INVALID_CONTEXT);
}

/// A launch that may begin while the kernel before runs.
fn launch_dependent(c: &Context, function: usize, arguments: &mut [*mut c_void]) -> i32 {
    let mut allowed = [0_u32; 16];
    allowed[0] = 1;
    // Programmatic stream serialization.
    let attributes = [LaunchAttribute::new(6, allowed)];
    let config = LaunchConfig::new([1, 1, 1], [32, 1, 1], 0, c.stream, &attributes);
    // SAFETY: the kernel's arguments; the configuration and its attributes live until the call returns.
    unsafe { cuLaunchKernelEx(&raw const config, function, arguments.as_mut_ptr(), std::ptr::null_mut()) }
}

#[test]
fn a_dependent_kernel_that_does_not_wait_sees_nothing_of_the_kernel_before() {
    let c = Context::open();
    let (module, fill) = c.function();
    let pattern = own_kernel(module, c"write_pattern");
    let mut buffer = c.allocate(16).unwrap();
    let mut host = [0.0; 4];
    // candle's kernels do not wait: the second is overwritten by the first.
    assert_eq!(c.fill(fill, buffer, 2.0, 4, [1, 1, 1]), 0);
    let (mut value, mut elements) = (5.0_f32, 4_usize);
    let mut arguments = [(&raw mut buffer).cast(), (&raw mut value).cast(), (&raw mut elements).cast()];
    assert_eq!(launch_dependent(&c, fill, &mut arguments), 0);
    assert_eq!(c.download(buffer, &mut host), 0);
    assert_eq!(host, [2.0; 4]);
    // One of ours waits.
    assert_eq!(c.fill(fill, buffer, 2.0, 4, [1, 1, 1]), 0);
    let mut words = 1_u64;
    assert_eq!(launch_dependent(&c, pattern, &mut [(&raw mut buffer).cast(), (&raw mut words).cast()]), 0);
    assert_eq!(c.download(buffer, &mut host), 0);
    assert_eq!(host[0].to_bits(), 1);
    assert_eq!(c.free(buffer), 0);
}
