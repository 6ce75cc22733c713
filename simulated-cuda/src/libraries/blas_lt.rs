//! cuBLASLt: products that are described in parts, by algorithms that its heuristics suggest.
//!
//! Enters: the library's C calls. Leaves: statuses, algorithms, and a product as work of the stream that is given. An algorithm that did
//! not come from the heuristics, or came for another kind of product, is refused. Algorithms differ in the order of their sums, in the
//! workspace that they need, and in the alignment that they ask for; one that needs a workspace overwrites the start of it.

use std::ffi::{c_int, c_void};

use super::blas::enqueue;
use super::gemm::{self, Gemm, INVALID_VALUE, Matrix, NOT_INITIALIZED, NOT_SUPPORTED, SUCCESS, Status, Type};
use crate::launch::mix;
use crate::stream::StreamHandle;

mod descriptions;
pub use descriptions::*;
use descriptions::{DESCRIPTIONS, Description, LAYOUTS, LIBRARIES, Layout, PREFERENCES};

/// `cublasLtMatmulAlgo_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Algorithm {
    pub data: [u64; 8],
}

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct HeuristicResult {
    pub algorithm: Algorithm,
    pub workspace_bytes: usize,
    pub state: Status,
    pub waves: f32,
    pub reserved: [c_int; 4],
}

/// What an algorithm's workspace must be aligned to. *Source*: cuBLAS documentation, `cublasLtMatmul`.
const WORKSPACE_ALIGNMENT: usize = 256;
/// As much of a workspace as is overwritten: enough to show that it is another's memory.
const OVERWRITTEN: usize = 64 << 10;

/// How products can be computed.
struct Method {
    /// Parts of each sum.
    parts: usize,
    workspace_bytes: usize,
    /// What the addresses of all matrices, and the distances of their columns, must be multiples of; 0 stands for their values' size.
    alignment: usize,
}

/// The best first. The last takes everything, and needs nothing.
const METHODS: [Method; 5] = [
    Method { parts: 4, workspace_bytes: 4 << 20, alignment: 16 },
    Method { parts: 1, workspace_bytes: 0, alignment: 16 },
    Method { parts: 16, workspace_bytes: 16 << 20, alignment: 16 },
    Method { parts: 64, workspace_bytes: 64 << 20, alignment: 16 },
    Method { parts: 2, workspace_bytes: 0, alignment: 0 },
];

/// A kind of product: everything but addresses and scalars.
#[derive(Debug, Clone, Copy)]
struct Shape {
    description: Description,
    /// A, B, C and D.
    sides: [Layout; 4],
    scale: Type,
    /// Length of the sums.
    k: i64,
}

impl Shape {
    fn new(library: *mut c_void, desc: *const c_void, sides: [*const c_void; 4]) -> Result<Self, Status> {
        LIBRARIES.get(library).ok_or(NOT_INITIALIZED)?;
        let description = DESCRIPTIONS.get(desc).ok_or(INVALID_VALUE)?;
        let [a, b, c, d] = sides.map(|side| LAYOUTS.get(side).ok_or(INVALID_VALUE));
        let sides @ [a, b, c, d] = [a?, b?, c?, d?];
        let turned =
            |side: Layout, turn| if turn { (side.columns, side.rows) } else { (side.rows, side.columns) };
        let (m, k) = turned(a, description.transpose_a);
        let (depth, n) = turned(b, description.transpose_b);
        let agree = depth == k && [(c.rows, c.columns), (d.rows, d.columns)] == [(m, n); 2];
        if !agree || sides.iter().any(|side| side.leading < side.rows) {
            return Err(INVALID_VALUE);
        }
        let scale = gemm::scale_type(description.compute, a.values, b.values, d.values)?;
        let bias_type =
            if description.bias_type < 0 { d.values } else { Type::from_cuda(description.bias_type)? };
        let fits = c.values == d.values
            && Type::from_cuda(description.scale)? == scale
            && (description.epilogue == EPILOGUE_DEFAULT
                || (description.epilogue == EPILOGUE_BIAS && bias_type == d.values));
        if fits { Ok(Self { description, sides, scale, k }) } else { Err(NOT_SUPPORTED) }
    }

    /// What an algorithm is made for.
    fn mark(&self) -> u64 {
        let description = &self.description;
        let values = self.sides.map(|side| side.values as u64);
        let words = [
            description.compute as u64,
            description.epilogue as u64,
            description.transpose_a.into(),
            description.transpose_b.into(),
        ];
        words.into_iter().chain(values).fold(0x6862_6d61_726b, |mark, word| mix(mark ^ word))
    }

    fn algorithm(&self, method: usize) -> Algorithm {
        let mark = self.mark();
        Algorithm { data: [method as u64, mark, mix(mark ^ method as u64), 0, 0, 0, 0, 0] }
    }

    /// The method behind an algorithm, if it came from the heuristics for products like this one.
    fn method(&self, algorithm: &Algorithm) -> Result<&'static Method, Status> {
        let index = usize::try_from(algorithm.data[0]).map_err(|_| INVALID_VALUE)?;
        let method = METHODS.get(index).ok_or(INVALID_VALUE)?;
        if mix(algorithm.data[1] ^ algorithm.data[0]) != algorithm.data[2] {
            return Err(INVALID_VALUE);
        }
        if *algorithm == self.algorithm(index) && self.columns_fit(method) {
            Ok(method)
        } else {
            Err(NOT_SUPPORTED)
        }
    }

    /// Whether the columns of all matrices start where the method can read them, if the first does.
    fn columns_fit(&self, method: &Method) -> bool {
        let fits = |side: &Layout| {
            let bytes = side.leading.unsigned_abs() as usize * side.values.bytes();
            method.alignment == 0 || side.columns <= 1 || bytes.is_multiple_of(method.alignment)
        };
        self.sides.iter().all(fits)
    }

    fn result(&self, index: usize) -> HeuristicResult {
        let [.., d] = self.sides;
        // Tiles of 128 by 128 on 132 multiprocessors.
        let tiles = (d.rows as u64).div_ceil(128) * (d.columns as u64).div_ceil(128);
        HeuristicResult {
            algorithm: self.algorithm(index),
            workspace_bytes: METHODS[index].workspace_bytes,
            state: SUCCESS,
            waves: tiles as f32 / 132.0,
            reserved: [0; 4],
        }
    }
}

entries! {
    // There is room for as many results as are requested.
    "cublasLtMatmulAlgoGetHeuristic" algo_get_heuristic(handle: *mut c_void, desc: *mut c_void, a: *mut c_void, b: *mut c_void,
        c: *mut c_void, d: *mut c_void, preference: *mut c_void, requested: c_int, results: *mut HeuristicResult, returned: *mut c_int)
        -> Status {
        if results.is_null() || returned.is_null() || requested <= 0 {
            return INVALID_VALUE;
        }
        *returned = 0;
        let shape = match Shape::new(handle, desc, [a, b, c, d].map(<*mut c_void>::cast_const)) {
            Ok(shape) => shape,
            Err(status) => return status,
        };
        let Some(workspace_bytes) = PREFERENCES.get(preference) else { return INVALID_VALUE };
        let mut count = 0;
        for (i, method) in METHODS.iter().enumerate() {
            if count < requested && shape.columns_fit(method) && method.workspace_bytes <= workspace_bytes {
                results.add(count as usize).write(shape.result(i));
                count += 1;
            }
        }
        *returned = count;
        if count > 0 { SUCCESS } else { NOT_SUPPORTED }
    }
    "cublasLtMatmulAlgoCheck" algo_check(handle: *mut c_void, desc: *mut c_void, a: *mut c_void, b: *mut c_void, c: *mut c_void,
        d: *mut c_void, algorithm: *const Algorithm, result: *mut HeuristicResult) -> Status {
        let Some(algorithm) = algorithm.as_ref() else { return INVALID_VALUE };
        let checked = Shape::new(handle, desc, [a, b, c, d].map(<*mut c_void>::cast_const))
            .and_then(|shape| shape.method(algorithm).map(|_| shape.result(algorithm.data[0] as usize)));
        match checked {
            Ok(_) if result.is_null() => INVALID_VALUE,
            Ok(checked) => { result.write(checked); SUCCESS }
            Err(status) => status,
        }
    }
    "cublasLtMatmul" matmul(handle: *mut c_void, desc: *mut c_void, alpha: *const c_void, a: *const c_void, a_layout: *mut c_void,
        b: *const c_void, b_layout: *mut c_void, beta: *const c_void, c: *const c_void, c_layout: *mut c_void,
        d: *mut c_void, d_layout: *mut c_void, algorithm: *const Algorithm, workspace: *mut c_void, workspace_bytes: usize,
        stream: StreamHandle) -> Status {
        let workspace = workspace.expose_provenance();
        let checked = || {
            let layouts = [a_layout, b_layout, c_layout, d_layout].map(<*mut c_void>::cast_const);
            let shape = Shape::new(handle, desc, layouts)?;
            let (alpha, beta) = (gemm::scalar(shape.scale, alpha)?, gemm::scalar(shape.scale, beta)?);
            let side = |address: *const c_void, Layout { values, leading, .. }| {
                Matrix { address: address.expose_provenance(), values, leading, stride: 0 }
            };
            let [a_layout, b_layout, c_layout, d_layout] = shape.sides;
            let Description { transpose_a, transpose_b, compute, epilogue, bias, .. } = shape.description;
            let mut product = Gemm {
                m: d_layout.rows, n: d_layout.columns, k: shape.k, transpose_a, transpose_b, alpha, beta,
                a: side(a, a_layout), b: side(b, b_layout), c: side(c, c_layout), d: side(d, d_layout),
                bias: (epilogue == EPILOGUE_BIAS).then_some(bias), batch: 1, compute, parts: 1,
            };
            product.check()?;
            // What is added to in place is what is written.
            if product.c.address == product.d.address && product.c.leading != product.d.leading {
                return Err(INVALID_VALUE);
            }
            let method = match algorithm.as_ref() {
                Some(algorithm) => shape.method(algorithm)?,
                None => &METHODS[METHODS.len() - 1],
            };
            let needed = method.workspace_bytes;
            if needed > 0 && (needed > workspace_bytes || workspace == 0 || !workspace.is_multiple_of(WORKSPACE_ALIGNMENT)) {
                return Err(INVALID_VALUE);
            }
            let read = [&product.a, &product.b, &product.d].into_iter().chain((beta != 0.0).then_some(&product.c));
            if method.alignment > 0 && !product.is_empty() && !read.into_iter().all(|side| side.is_aligned(method.alignment)) {
                return Err(NOT_SUPPORTED);
            }
            product.parts = method.parts;
            Ok((product, needed))
        };
        match checked() {
            Ok((product, needed)) => {
                let overwritten = needed.min(OVERWRITTEN);
                // It is that large, and in no other use.
                let overwrite = move || if overwritten > 0 {
                    std::ptr::with_exposed_provenance_mut::<u8>(workspace).write_bytes(0xff, overwritten);
                };
                enqueue(stream, "cublasLtMatmul", product, overwrite)
            }
            Err(status) => status,
        }
    }
}
