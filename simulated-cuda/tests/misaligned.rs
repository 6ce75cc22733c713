//! An access that is not aligned to its size ends all work. By itself, since it leaves the process without a device.
#![allow(unsafe_code, reason = "the driver's interface is C")]

mod opened;

use std::ffi::c_void;

use simulated_cuda::driver::*;
use simulated_cuda::status;

#[test]
fn vectors_that_do_not_begin_at_a_multiple_of_their_size_are_refused() {
    let (stream, module) = opened::device();
    let (mut pattern, mut address) = (0, 0);
    // SAFETY: addresses of values, and arguments of the kernel's sizes.
    unsafe {
        assert_eq!(cuModuleGetFunction(&raw mut pattern, module, c"write_pattern".as_ptr()), 0);
        assert_eq!(cuMemAllocAsync(&raw mut address, 256, stream), 0);
        let mut vectors = 2_u64;
        for (offset, wanted) in [(0, 0), (16, 0), (8, status::MISALIGNED_ADDRESS)] {
            let mut to = address + offset;
            let mut arguments: [*mut c_void; 2] = [(&raw mut to).cast(), (&raw mut vectors).cast()];
            let arguments = arguments.as_mut_ptr();
            let launched =
                cuLaunchKernel(pattern, 1, 1, 1, 32, 1, 1, 0, stream, arguments, std::ptr::null_mut());
            assert_eq!(launched, 0, "a launch does not know yet");
            assert_eq!(cuStreamSynchronize(stream), wanted, "offset {offset}");
        }
    }
}
