//! A device as a program opens it, for tests that have it to themselves.

use simulated_cuda::driver::*;

/// A stream, and a module of kernels.
pub fn device() -> (usize, usize) {
    let (mut context, mut stream, mut module) = (0, 0, 0);
    // SAFETY: addresses of values, and a zero-terminated text.
    unsafe {
        assert_eq!(cuInit(0), 0);
        assert_eq!(cuDevicePrimaryCtxRetain(&raw mut context, 0), 0);
        assert_eq!(cuCtxSetCurrent(context), 0);
        assert_eq!(cuStreamCreate(&raw mut stream, 1), 0);
        assert_eq!(cuModuleLoadData(&raw mut module, c"an image".as_ptr().cast()), 0);
    }
    (stream, module)
}
