//! What products are described by: the library's handle, descriptions of operations, layouts of matrices, and preferences.
//!
//! Enters: the library's C calls that make, change and destroy them. Leaves: statuses, and what is described, by its handle.

use std::ffi::{c_int, c_void};

use crate::libraries::blas::transposed;
use crate::libraries::gemm::{INVALID_VALUE, NOT_INITIALIZED, NOT_SUPPORTED, SUCCESS, Status, Type};
use crate::libraries::handles::Handles;

/// `cublasLtMatmulDescAttributes_t`, those that are kept.
pub const DESC_POINTER_MODE: c_int = 2;
pub const DESC_TRANSA: c_int = 3;
pub const DESC_TRANSB: c_int = 4;
pub const DESC_EPILOGUE: c_int = 7;
pub const DESC_BIAS_POINTER: c_int = 8;
pub const DESC_BIAS_DATA_TYPE: c_int = 26;
/// The last of them in CUDA 13.0.
const LAST_DESC: c_int = 38;
/// `cublasLtMatmulPreferenceAttributes_t`, that of the workspace, and the last in CUDA 13.0.
pub const PREF_MAX_WORKSPACE_BYTES: c_int = 1;
const LAST_PREF: c_int = 12;
/// `cublasLtEpilogue_t`: nothing, and the addition of a bias.
pub const EPILOGUE_DEFAULT: i32 = 1;
pub const EPILOGUE_BIAS: i32 = 4;

#[derive(Debug, Clone, Copy)]
pub(super) struct Description {
    pub(super) compute: i32,
    pub(super) scale: i32,
    pub(super) transpose_a: bool,
    pub(super) transpose_b: bool,
    pub(super) epilogue: i32,
    pub(super) bias: usize,
    /// A negative one is D's.
    pub(super) bias_type: i32,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    pub(super) values: Type,
    pub(super) rows: i64,
    pub(super) columns: i64,
    pub(super) leading: i64,
}

pub(super) static LIBRARIES: Handles<()> = Handles::new();
pub(super) static DESCRIPTIONS: Handles<Description> = Handles::new();
pub(super) static LAYOUTS: Handles<Layout> = Handles::new();
/// The bytes of workspace that an algorithm may have.
pub(super) static PREFERENCES: Handles<usize> = Handles::new();

/// # Safety
///
/// Null, or there is room for a handle.
unsafe fn give<T>(handles: &Handles<T>, object: Result<T, Status>, to: *mut *mut c_void) -> Status {
    if to.is_null() {
        return INVALID_VALUE;
    }
    match object {
        Ok(object) => {
            // SAFETY: there is room, by the caller's promise.
            unsafe { *to = handles.insert(object) };
            SUCCESS
        }
        Err(status) => status,
    }
}

fn take<T>(handles: &Handles<T>, handle: *mut c_void) -> Status {
    // As in the library, nothing is destroyed where there is nothing.
    if handle.is_null() || handles.remove(handle).is_some() { SUCCESS } else { INVALID_VALUE }
}

/// Reads an attribute, whose size the caller gives.
///
/// # Safety
///
/// Null, or the address of so many bytes.
unsafe fn attribute<T: Copy>(from: *const c_void, bytes: usize) -> Result<T, Status> {
    if from.is_null() || bytes != size_of::<T>() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: of that size, by the caller's promise; `T` is an integer.
    Ok(unsafe { from.cast::<T>().read_unaligned() })
}

/// The status of a change to an object, if there is one.
fn done(set: Option<Result<(), Status>>) -> Status {
    set.unwrap_or(Err(INVALID_VALUE)).err().unwrap_or(SUCCESS)
}

entries! {
    "cublasLtCreate" create(handle: *mut *mut c_void) -> Status { give(&LIBRARIES, Ok(()), handle) }
    "cublasLtDestroy" destroy(handle: *mut c_void) -> Status {
        if LIBRARIES.remove(handle).is_some() { SUCCESS } else { NOT_INITIALIZED }
    }

    "cublasLtMatmulDescCreate" desc_create(desc: *mut *mut c_void, compute: c_int, scale: c_int) -> Status {
        let (transpose_a, transpose_b, epilogue, bias, bias_type) = (false, false, EPILOGUE_DEFAULT, 0, -1);
        let description = Description { compute, scale, transpose_a, transpose_b, epilogue, bias, bias_type };
        give(&DESCRIPTIONS, Type::from_cuda(scale).map(|_| description), desc)
    }
    "cublasLtMatmulDescDestroy" desc_destroy(desc: *mut c_void) -> Status { take(&DESCRIPTIONS, desc) }
    "cublasLtMatmulDescSetAttribute" desc_set_attribute(desc: *mut c_void, kind: c_int, value: *const c_void, bytes: usize) -> Status {
        done(DESCRIPTIONS.with(desc, |description| {
            let number = || attribute::<i32>(value, bytes);
            match kind {
                DESC_TRANSA => description.transpose_a = transposed(number()?)?,
                DESC_TRANSB => description.transpose_b = transposed(number()?)?,
                DESC_EPILOGUE => description.epilogue = number()?,
                DESC_BIAS_DATA_TYPE => description.bias_type = number()?,
                // Scalars of the host, which are all that is taken.
                DESC_POINTER_MODE if number()? == 0 => {}
                DESC_BIAS_POINTER => description.bias = attribute(value, bytes)?,
                0..=LAST_DESC => return Err(NOT_SUPPORTED),
                _ => return Err(INVALID_VALUE),
            }
            Ok(())
        }))
    }

    "cublasLtMatrixLayoutCreate" layout_create(layout: *mut *mut c_void, values: c_int, rows: u64, columns: u64, leading: i64) -> Status {
        let made = || {
            let size = |size: u64| i64::try_from(size).map_err(|_| INVALID_VALUE);
            Ok(Layout { values: Type::from_cuda(values)?, rows: size(rows)?, columns: size(columns)?, leading })
        };
        give(&LAYOUTS, made(), layout)
    }
    "cublasLtMatrixLayoutDestroy" layout_destroy(layout: *mut c_void) -> Status { take(&LAYOUTS, layout) }

    "cublasLtMatmulPreferenceCreate" preference_create(preference: *mut *mut c_void) -> Status { give(&PREFERENCES, Ok(0), preference) }
    "cublasLtMatmulPreferenceDestroy" preference_destroy(preference: *mut c_void) -> Status { take(&PREFERENCES, preference) }
    "cublasLtMatmulPreferenceSetAttribute" preference_set_attribute(preference: *mut c_void, kind: c_int, value: *const c_void,
        bytes: usize) -> Status {
        done(PREFERENCES.with(preference, |workspace_bytes| {
            match kind {
                PREF_MAX_WORKSPACE_BYTES => *workspace_bytes = attribute(value, bytes)?,
                0..=LAST_PREF => return Err(NOT_SUPPORTED),
                _ => return Err(INVALID_VALUE),
            }
            Ok(())
        }))
    }
}
