//! The libraries beside the driver: cuBLAS, cuBLASLt, cuRAND, NCCL and the CUDA runtime.
//!
//! Enters: calls by the libraries' C interfaces. Leaves: their status codes at once, and work on a stream. Each entry point is exported
//! with `simulated_` before its name; `scripts/simulated-cuda.sh` makes the libraries whose symbols lead here.

/// Functions of a library: by what name callers know it, what it is called here, and what it does. All are called with what the library's
/// documentation asks of a caller; what a stream reads and writes is there when it comes to it.
macro_rules! entries {
    ($($symbol:literal $name:ident($($argument:ident: $kind:ty),*) $(-> $returned:ty)? $body:block)*) => {$(
        /// # Safety
        ///
        /// As the library's documentation says.
        #[unsafe(export_name = concat!("simulated_", $symbol))]
        pub unsafe extern "C" fn $name($($argument: $kind),*) $(-> $returned)? {
            $crate::calls::count!($symbol);
            #[allow(unused_unsafe, reason = "most of them follow an address of the caller's")]
            // SAFETY: addresses are the caller's, as the library's documentation says of each.
            unsafe { $body }
        }
    )*};
}

pub mod blas;
pub mod blas_lt;
pub mod gemm;
pub mod handles;
pub mod nccl;
pub mod random;
pub mod runtime;
