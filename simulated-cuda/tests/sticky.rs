//! An error of a kernel sticks. By itself, since it leaves the process without a device; so has `misaligned.rs` one of its own.
#![allow(unsafe_code, reason = "the driver's interface is C")]

mod opened;

use std::ffi::c_void;

use simulated_cuda::driver::*;
use simulated_cuda::status;

#[test]
fn a_kernel_that_writes_behind_an_allocation_ends_all_work() {
    let (stream, module) = opened::device();
    let (mut function, mut address) = (0, 0);
    // SAFETY: addresses of values, and arguments of the kernel's sizes.
    unsafe {
        assert_eq!(cuModuleGetFunction(&raw mut function, module, c"fill_f32".as_ptr()), 0);
        assert_eq!(cuMemAllocAsync(&raw mut address, 16, stream), 0);
        let (mut to, mut value, mut elements) = (address, 1.0_f32, 1_usize << 12);
        let mut arguments: [*mut c_void; 3] =
            [(&raw mut to).cast(), (&raw mut value).cast(), (&raw mut elements).cast()];
        let launched = cuLaunchKernel(
            function,
            4,
            1,
            1,
            32,
            1,
            1,
            0,
            stream,
            arguments.as_mut_ptr(),
            std::ptr::null_mut(),
        );
        assert_eq!(launched, 0, "a launch does not know yet");
        assert_eq!(cuStreamSynchronize(stream), status::ILLEGAL_ADDRESS);
        assert_eq!(cuStreamSynchronize(stream), status::ILLEGAL_ADDRESS);
        let mut other = 0;
        assert_eq!(cuMemAllocAsync(&raw mut other, 16, stream), status::ILLEGAL_ADDRESS);
    }
}
