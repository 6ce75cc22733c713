//! Products by the GPU's library (cublasLt), with the algorithm that was fastest when it was tried.
//!
//! Enters: a [`Gemm`] and where its sides lie. Leaves: one matmul on the driver's stream, which can be recorded. Rows of activations and of
//! weights are row-major, which column-major cublasLt reads as `sums = weightsᵀ · inputs`. The first product of a
//! shape times what the heuristics suggest on its operands, which come from memory as they do in a step, into scratch memory, and is not recorded; shapes
//! with as many rows up to the next power of two reuse its choice. One workspace is shared and never moves, because recorded products point to it.
#![expect(
    unsafe_code,
    reason = "cublasLt is called by its C interface: the safe one of cudarc has no f32 sums of 16-bit floats"
)]

use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt::{self, Debug, Formatter};
use std::sync::Arc;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use cudarc::driver::sys::CUdevice_attribute;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, result as driver};

use super::device::{GEMM_ALIGNMENT, Gemm, GemmOperands};
use super::device_matrix::KernelFormat;
use crate::engine::cuda::{self, EventTimeline};
use crate::engine::{EngineError, Timeline};
use hbmark_core::stats::median;

/// Bytes of the workspace. *Source*: cuBLAS documentation, recommended workspace of Hopper.
const WORKSPACE: usize = 32 << 20;
/// Algorithms that are tried, and timed runs of each behind one that is not.
const CANDIDATES: i32 = 8;
const RUNS: usize = 5;
/// What is written before each timed run, in sizes of L2, and the share of free memory that it may take.
const EVICTED_CACHES: usize = 2;
const EVICTING_SHARE: usize = 4;

/// Something of cublasLt that is destroyed when dropped.
struct CublasHandle<T: Copy> {
    raw: T,
    destroy: unsafe fn(T) -> Result<(), CublasError>,
}

impl<T: Copy> Drop for CublasHandle<T> {
    fn drop(&mut self) {
        // SAFETY: made by the matching function, and destroyed only here. A failure would leave it to the end of the process.
        let _ = unsafe { (self.destroy)(self.raw) };
    }
}

/// A shape that can be multiplied.
struct MatmulPlan {
    description: CublasHandle<sys::cublasLtMatmulDesc_t>,
    weights: CublasHandle<sys::cublasLtMatrixLayout_t>,
    inputs: CublasHandle<sys::cublasLtMatrixLayout_t>,
    sums: CublasHandle<sys::cublasLtMatrixLayout_t>,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// cublasLt on one stream.
pub(super) struct CublasLt {
    name: String,
    stream: Arc<CudaStream>,
    // Before what it made: fields are dropped in order.
    plans: HashMap<Gemm, MatmulPlan>,
    /// The choice for so many rows or fewer.
    tried: HashMap<Gemm, sys::cublasLtMatmulAlgo_t>,
    workspace: CudaSlice<u8>,
    handle: CublasHandle<sys::cublasLtHandle_t>,
}

// SAFETY: the library's handles belong to no thread, and whoever has them is the only one that uses them.
unsafe impl Send for CublasLt {}

impl Debug for CublasLt {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").field("plans", &self.plans.len()).finish_non_exhaustive()
    }
}

impl CublasLt {
    /// Opens the library and takes its workspace.
    pub fn open(stream: &Arc<CudaStream>, name: &str) -> Result<Self, EngineError> {
        let failed = |error| failed(name, "cublasLtCreate", error);
        let raw = result::create_handle().map_err(failed)?;
        // SAFETY: the library writes before it reads.
        let workspace =
            unsafe { stream.alloc::<u8>(WORKSPACE) }.map_err(|error| cuda::failed(name, error))?;
        Ok(Self {
            name: name.to_owned(),
            stream: Arc::clone(stream),
            plans: HashMap::new(),
            tried: HashMap::new(),
            workspace,
            handle: CublasHandle { raw, destroy: result::destroy_handle },
        })
    }

    /// Enqueues a product. While a graph is recorded nothing can be tried.
    pub fn multiply(
        &mut self,
        product: &Gemm,
        operands: &GemmOperands,
        recording: bool,
    ) -> Result<(), EngineError> {
        if let Some((side, address)) = operands.misaligned() {
            let detail =
                format!("{side} of {product:?} at {address:#x}, which is no multiple of {GEMM_ALIGNMENT}");
            return Err(EngineError::Device { device: self.name.clone(), detail });
        }
        if !self.plans.contains_key(product) {
            let plan = self.plan(product, operands, recording)?;
            self.plans.insert(*product, plan);
        }
        self.run(product, &self.plans[product], operands)
    }

    fn run(&self, product: &Gemm, plan: &MatmulPlan, operands: &GemmOperands) -> Result<(), EngineError> {
        let (one, beta) = (1.0_f32, if product.accumulate { 1.0_f32 } else { 0.0 });
        if product.bias {
            let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
            self.describe(&plan.description, attribute, &operands.bias)?;
        }
        let out = operands.out as *mut c_void;
        // SAFETY: the sides are device memory of the shapes in the plan, which callers have checked; scalars are read before the call
        // returns; workspace and stream belong to this library.
        unsafe {
            result::matmul(
                self.handle.raw,
                plan.description.raw,
                (&raw const one).cast(),
                (&raw const beta).cast(),
                operands.weights as *const c_void,
                plan.weights.raw,
                operands.inputs as *const c_void,
                plan.inputs.raw,
                out.cast_const(),
                plan.sums.raw,
                out,
                plan.sums.raw,
                &raw const plan.algorithm,
                self.workspace.device_ptr(&self.stream).0 as *mut c_void,
                WORKSPACE,
                self.stream.cu_stream().cast(),
            )
        }
        .map_err(|error| self.failed("cublasLtMatmul", error))
    }

    fn plan(
        &mut self,
        product: &Gemm,
        operands: &GemmOperands,
        recording: bool,
    ) -> Result<MatmulPlan, EngineError> {
        let mut plan = self.undecided(product)?;
        let like = Gemm { rows: product.rows.next_power_of_two(), ..*product };
        if let Some(tried) = self.tried.get(&like)
            && self.takes(&plan, tried)
        {
            plan.algorithm = *tried;
            return Ok(plan);
        }
        let candidates = self.candidates(&plan)?;
        let Some(first) = candidates.first() else {
            let status = CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED);
            return Err(self.failed(&format!("a product of {product:?}"), status));
        };
        plan.algorithm = *first;
        if !recording {
            plan.algorithm = self.fastest(product, &mut plan, operands, &candidates)?;
            self.tried.insert(like, plan.algorithm);
        }
        Ok(plan)
    }

    /// Everything of a plan but its algorithm.
    fn undecided(&self, product: &Gemm) -> Result<MatmulPlan, EngineError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let values = if product.format == KernelFormat::F16 {
            sys::cudaDataType_t::CUDA_R_16F
        } else {
            sys::cudaDataType_t::CUDA_R_16BF
        };
        let f32 = sys::cudaDataType_t::CUDA_R_32F;
        let description = result::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, f32);
        let description = CublasHandle {
            raw: description.map_err(|error| self.failed("cublasLtMatmulDescCreate", error))?,
            destroy: result::destroy_matmul_desc,
        };
        // cublasOperation_t: transposed, and as it is.
        self.describe(&description, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &1_i32)?;
        self.describe(&description, Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &0_i32)?;
        if product.bias {
            let bias = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
            self.describe(&description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &bias)?;
        }
        let layout = |dtype, rows: usize, columns: usize| {
            let stride = i64::try_from(rows).unwrap_or(i64::MAX);
            let raw = result::create_matrix_layout(dtype, rows as u64, columns as u64, stride);
            let raw = raw.map_err(|error| self.failed("cublasLtMatrixLayoutCreate", error))?;
            Ok::<_, EngineError>(CublasHandle { raw, destroy: result::destroy_matrix_layout })
        };
        Ok(MatmulPlan {
            weights: layout(values, product.columns, product.outputs)?,
            inputs: layout(values, product.columns, product.rows)?,
            sums: layout(f32, product.outputs, product.rows)?,
            description,
            algorithm: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
        })
    }

    fn describe<T>(
        &self,
        description: &CublasHandle<sys::cublasLtMatmulDesc_t>,
        attribute: sys::cublasLtMatmulDescAttributes_t,
        value: &T,
    ) -> Result<(), EngineError> {
        // SAFETY: the description lives, and the value, of the type that the attribute has, is copied.
        unsafe {
            let value = (&raw const *value).cast();
            result::set_matmul_desc_attribute(description.raw, attribute, value, size_of::<T>())
        }
        .map_err(|error| self.failed("cublasLtMatmulDescSetAttribute", error))
    }

    /// Whether a choice for another number of rows does for this plan.
    fn takes(&self, plan: &MatmulPlan, algorithm: &sys::cublasLtMatmulAlgo_t) -> bool {
        let mut found = std::mem::MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed();
        // SAFETY: all of them live; the result is written where the call succeeds, and zeros are one, too.
        unsafe {
            let checked = sys::cublasLtMatmulAlgoCheck(
                self.handle.raw,
                plan.description.raw,
                plan.weights.raw,
                plan.inputs.raw,
                plan.sums.raw,
                plan.sums.raw,
                &raw const *algorithm,
                found.as_mut_ptr(),
            );
            checked.result().is_ok() && found.assume_init().workspaceSize <= WORKSPACE
        }
    }

    /// What the heuristics suggest, the best first.
    fn candidates(&self, plan: &MatmulPlan) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, EngineError> {
        let preference = result::create_matmul_pref();
        let preference = CublasHandle {
            raw: preference.map_err(|error| self.failed("cublasLtMatmulPreferenceCreate", error))?,
            destroy: result::destroy_matmul_pref,
        };
        let mut found = [std::mem::MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed();
            CANDIDATES.unsigned_abs() as usize];
        let mut count = 0;
        // SAFETY: all of them live, the workspace's size is copied, and as many results are asked for as there is room; those that are
        // read were written, and zeros are one, too.
        let found = unsafe {
            let attribute =
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            let bytes = WORKSPACE;
            result::set_matmul_pref_attribute(
                preference.raw,
                attribute,
                (&raw const bytes).cast(),
                size_of::<usize>(),
            )
            .and_then(|()| {
                sys::cublasLtMatmulAlgoGetHeuristic(
                    self.handle.raw,
                    plan.description.raw,
                    plan.weights.raw,
                    plan.inputs.raw,
                    plan.sums.raw,
                    plan.sums.raw,
                    preference.raw,
                    CANDIDATES,
                    found.as_mut_ptr().cast(),
                    &raw mut count,
                )
                .result()
            })
            .map_err(|error| self.failed("cublasLtMatmulAlgoGetHeuristic", error))?;
            found.map(|result| result.assume_init())
        };
        let found = found.into_iter().take(usize::try_from(count).unwrap_or(0));
        Ok(found.filter(|result| result.state.result().is_ok()).map(|result| result.algo).collect())
    }

    /// The candidate with the shortest median time. Sums that are added to what is there are in memory of their own.
    fn fastest(
        &self,
        product: &Gemm,
        plan: &mut MatmulPlan,
        operands: &GemmOperands,
        candidates: &[sys::cublasLtMatmulAlgo_t],
    ) -> Result<sys::cublasLtMatmulAlgo_t, EngineError> {
        let sums = product
            .accumulate
            .then(|| self.stream.alloc_zeros::<f32>(product.rows * product.outputs))
            .transpose()
            .map_err(|error| cuda::failed(&self.name, error))?;
        let out = sums.as_ref().map_or(operands.out, |sums| sums.device_ptr(&self.stream).0);
        let operands = GemmOperands { out, ..*operands };
        let evicting = self.evicting();
        let mut timeline = EventTimeline::new(Arc::clone(&self.stream), &self.name);
        timeline.reserve(2 * RUNS);
        let mut best = (f64::INFINITY, candidates[0]);
        for candidate in candidates {
            plan.algorithm = *candidate;
            // What the heuristics suggest may still be refused.
            if self.run(product, plan, &operands).is_err() {
                continue;
            }
            for _ in 0..RUNS {
                // Weights of the last run leave L2, and the stream has work until both marks are set: between them is no time of the host.
                if let Some(memory) = &evicting {
                    self.write(memory)?;
                }
                timeline.mark()?;
                self.run(product, plan, &operands)?;
                timeline.mark()?;
            }
            let marks = timeline.drain()?;
            let times: Vec<f64> = marks.as_chunks().0.iter().map(|[begin, end]| end.0 - begin.0).collect();
            let time = median(&times);
            if time < best.0 {
                best = (time, *candidate);
            }
        }
        Ok(best.1)
    }

    /// Memory whose writing leaves L2 with nothing else; none where there is no room. No pool counts it: the peak of the pool stays what models use.
    fn evicting(&self) -> Option<CudaSlice<u8>> {
        let context = self.stream.context();
        let cache = context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE).ok()?;
        let (free, _) = context.mem_get_info().ok()?;
        let bytes = (EVICTED_CACHES * cache.unsigned_abs() as usize).min(free / EVICTING_SHARE);
        if bytes == 0 {
            return None;
        }
        // SAFETY: asking for free memory has bound the context.
        let address = unsafe { driver::malloc_sync(bytes) }.ok()?;
        // SAFETY: the pointer is an allocation of so many bytes with no other owner, and any bytes are valid. The slice frees it in stream
        // order, which the driver allows for cuMemAlloc too (CUDA programming guide, stream-ordered memory allocator).
        Some(unsafe { self.stream.upgrade_device_ptr::<u8>(address, bytes) })
    }

    fn write(&self, memory: &CudaSlice<u8>) -> Result<(), EngineError> {
        let address = memory.device_ptr(&self.stream).0;
        // SAFETY: the whole of a live allocation, of which nothing else is read; it is freed behind this on the same stream.
        unsafe { driver::memset_d8_async(address, 0, memory.len(), self.stream.cu_stream()) }
            .map_err(|error| cuda::failed(&self.name, error))
    }

    fn failed(&self, call: &str, error: CublasError) -> EngineError {
        failed(&self.name, call, error)
    }
}

fn failed(device: &str, call: &str, error: CublasError) -> EngineError {
    EngineError::Device { device: device.to_owned(), detail: format!("{call}: {error}") }
}
