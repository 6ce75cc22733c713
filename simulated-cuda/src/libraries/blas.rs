//! cuBLAS: products of batches on a handle's stream.
//!
//! Enters: the library's C calls, with scalars on the host. Leaves: a status, and a product as work of the stream that the handle has.

use std::ffi::{c_int, c_longlong, c_void};
use std::sync::Arc;

use super::gemm::{self, Gemm, INVALID_VALUE, Matrix, NOT_INITIALIZED, SUCCESS, Status, Type};
use super::handles::Handles;
use crate::stream::{self, StreamHandle, Work};

/// The stream of each handle, as a number.
static HANDLES: Handles<usize> = Handles::new();

entries! {
    // On the default stream.
    "cublasCreate_v2" create(handle: *mut *mut c_void) -> Status {
        if handle.is_null() {
            return INVALID_VALUE;
        }
        *handle = HANDLES.insert(0);
        SUCCESS
    }
    "cublasDestroy_v2" destroy(handle: *mut c_void) -> Status {
        if HANDLES.remove(handle).is_some() { SUCCESS } else { NOT_INITIALIZED }
    }
    "cublasSetStream_v2" set_stream(handle: *mut c_void, stream: StreamHandle) -> Status {
        // A stream's handle is only handed on, never followed here.
        let set = |kept: &mut usize| *kept = stream.expose_provenance();
        if HANDLES.with(handle, set).is_some() { SUCCESS } else { NOT_INITIALIZED }
    }
    "cublasGemmStridedBatchedEx" gemm_strided_batched_ex(
        handle: *mut c_void, transa: c_int, transb: c_int, m: c_int, n: c_int, k: c_int, alpha: *const c_void,
        a: *const c_void, a_type: c_int, lda: c_int, stride_a: c_longlong,
        b: *const c_void, b_type: c_int, ldb: c_int, stride_b: c_longlong, beta: *const c_void,
        c: *mut c_void, c_type: c_int, ldc: c_int, stride_c: c_longlong,
        batch_count: c_int, compute_type: c_int, algo: c_int) -> Status {
        let checked = || {
            let stream = HANDLES.get(handle).ok_or(NOT_INITIALIZED)?;
            let (transpose_a, transpose_b) = (transposed(transa)?, transposed(transb)?);
            // cublasGemmAlgo_t.
            if !matches!(algo, -1..=23 | 99..=115 | 999) {
                return Err(INVALID_VALUE);
            }
            let side = |address: *const c_void, values, leading: c_int, stride| {
                let (address, values) = (address.expose_provenance(), Type::from_cuda(values)?);
                Ok::<_, Status>(Matrix { address, values, leading: leading.into(), stride })
            };
            let a = side(a, a_type, lda, stride_a)?;
            let b = side(b, b_type, ldb, stride_b)?;
            let c = side(c, c_type, ldc, stride_c)?;
            let scale = gemm::scale_type(compute_type, a.values, b.values, c.values)?;
            let (alpha, beta) = (gemm::scalar(scale, alpha)?, gemm::scalar(scale, beta)?);
            let (m, n, k, batch, compute) = (m.into(), n.into(), k.into(), batch_count.into(), compute_type);
            let product = Gemm { m, n, k, transpose_a, transpose_b, alpha, beta, a, b, c, d: c, bias: None, batch, compute, parts: 1 };
            product.check()?;
            Ok((stream, product))
        };
        match checked() {
            Ok((stream, product)) => {
                enqueue(std::ptr::with_exposed_provenance_mut(stream), "cublasGemmStridedBatchedEx", product, || ())
            }
            Err(status) => status,
        }
    }
}

/// `cublasOperation_t` of real matrices, where a conjugate is the matrix itself.
///
/// # Errors
///
/// Another number.
pub(super) fn transposed(operation: c_int) -> Result<bool, Status> {
    match operation {
        0 | 3 => Ok(false),
        1 | 2 => Ok(true),
        _ => Err(INVALID_VALUE),
    }
}

/// Puts a checked product on a stream, after something else; an empty one is none.
pub(super) fn enqueue(
    stream: StreamHandle,
    name: &str,
    product: Gemm,
    before: impl Fn() + Send + Sync + 'static,
) -> Status {
    if product.is_empty() {
        return SUCCESS;
    }
    let run = move || {
        before();
        // SAFETY: it was checked, and callers of the library promise that the memory is there when the stream comes to it.
        unsafe { product.run() }
    };
    let work = Work::new(name, product.demand(), Arc::new(run));
    if stream::enqueue(stream, work) == 0 { SUCCESS } else { gemm::EXECUTION_FAILED }
}
