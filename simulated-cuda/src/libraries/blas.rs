//! cuBLAS: products of batches on a handle's stream.
//!
//! Enters: the library's C calls, with scalars on the host. Leaves: a status, and a product as work of the stream that the handle has.

use std::ffi::{c_int, c_longlong, c_void};
use std::sync::Arc;

use super::gemm::{self, Gemm, INVALID_VALUE, Matrix, NOT_INITIALIZED, SUCCESS, Status, Type};
use super::handles::Handles;
use crate::calls::count;
use crate::stream::{self, StreamHandle, Work};

/// The stream of each handle, as a number.
static HANDLES: Handles<usize> = Handles::new();

/// Makes a handle, on the default stream.
///
/// # Safety
///
/// Null, or there is room for a handle.
#[unsafe(export_name = "simulated_cublasCreate_v2")]
pub unsafe extern "C" fn create(handle: *mut *mut c_void) -> Status {
    count!("cublasCreate_v2");
    if handle.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: there is room, by the caller's promise.
    unsafe { *handle = HANDLES.insert(0) };
    SUCCESS
}

#[unsafe(export_name = "simulated_cublasDestroy_v2")]
pub extern "C" fn destroy(handle: *mut c_void) -> Status {
    count!("cublasDestroy_v2");
    if HANDLES.remove(handle).is_some() { SUCCESS } else { NOT_INITIALIZED }
}

#[unsafe(export_name = "simulated_cublasSetStream_v2")]
pub extern "C" fn set_stream(handle: *mut c_void, stream: StreamHandle) -> Status {
    count!("cublasSetStream_v2");
    // A stream's handle is only handed on, never followed here.
    if HANDLES.with(handle, |kept| *kept = stream.expose_provenance()).is_some() {
        SUCCESS
    } else {
        NOT_INITIALIZED
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

/// # Safety
///
/// alpha and beta are null or addresses of values of the type that the compute type asks for. When the stream comes to it, the matrices
/// are memory of the sizes that they have here.
#[unsafe(export_name = "simulated_cublasGemmStridedBatchedEx")]
pub unsafe extern "C" fn gemm_strided_batched_ex(
    handle: *mut c_void,
    transa: c_int,
    transb: c_int,
    m: c_int,
    n: c_int,
    k: c_int,
    alpha: *const c_void,
    a: *const c_void,
    a_type: c_int,
    lda: c_int,
    stride_a: c_longlong,
    b: *const c_void,
    b_type: c_int,
    ldb: c_int,
    stride_b: c_longlong,
    beta: *const c_void,
    c: *mut c_void,
    c_type: c_int,
    ldc: c_int,
    stride_c: c_longlong,
    batch_count: c_int,
    compute_type: c_int,
    algo: c_int,
) -> Status {
    count!("cublasGemmStridedBatchedEx");
    let checked = || {
        let stream = HANDLES.get(handle).ok_or(NOT_INITIALIZED)?;
        let (transpose_a, transpose_b) = (transposed(transa)?, transposed(transb)?);
        // cublasGemmAlgo_t.
        if !matches!(algo, -1..=23 | 99..=115 | 999) {
            return Err(INVALID_VALUE);
        }
        let side = |address: *const c_void, values, leading: c_int, stride| {
            Ok::<_, Status>(Matrix {
                address: address.expose_provenance(),
                values: Type::from_cuda(values)?,
                leading: leading.into(),
                stride,
            })
        };
        let (a, b, c) = (
            side(a, a_type, lda, stride_a)?,
            side(b, b_type, ldb, stride_b)?,
            side(c, c_type, ldc, stride_c)?,
        );
        let scale = gemm::scale_type(compute_type, a.values, b.values, c.values)?;
        // SAFETY: of that type, by the caller's promise.
        let (alpha, beta) = unsafe { (gemm::scalar(scale, alpha)?, gemm::scalar(scale, beta)?) };
        let (m, n, k, batch) = (m.into(), n.into(), k.into(), batch_count.into());
        let product = Gemm {
            m,
            n,
            k,
            transpose_a,
            transpose_b,
            alpha,
            beta,
            a,
            b,
            c,
            d: c,
            bias: None,
            batch,
            compute: compute_type,
            parts: 1,
        };
        product.check()?;
        Ok((stream, product))
    };
    match checked() {
        Ok((stream, product)) => enqueue(stream, "cublasGemmStridedBatchedEx", product),
        Err(status) => status,
    }
}

/// Puts a checked product on a stream; an empty one is none.
fn enqueue(stream: usize, name: &str, product: Gemm) -> Status {
    if product.is_empty() {
        return SUCCESS;
    }
    let run = move || {
        // SAFETY: it was checked, and callers of the library promise that the memory is there when the stream comes to it.
        unsafe { product.run() }
    };
    let work = Work::new(name, product.demand(), Arc::new(run));
    if stream::enqueue(std::ptr::with_exposed_provenance_mut(stream), work) == 0 {
        SUCCESS
    } else {
        gemm::EXECUTION_FAILED
    }
}
