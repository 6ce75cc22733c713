//! The kernels as typed launches: shapes, formats and alignment are checked, and the bytes that must move are counted.
//!
//! Enters: device memory with its shapes. Leaves: a [`KernelLaunch`] on a device, and the bytes of weights and KV that it reads and writes. The formulas
//! of the kernels, and what their arguments mean, are in the sources under `kernels/`.

use std::time::Duration;

use Argument::{Address, F32, I32, U64};

use super::device::{Argument, Device, KernelLaunch, MAX_GRID_YZ};
use super::device_matrix::{KernelFormat, Matrix};
use super::step::{Pool, StepState};
use super::tensor_core_linear::{self, Prepare, TiledWorkspace};
use crate::engine::EngineError;
use crate::engine::native::random_kv;
use crate::engine::native::shapes::{AttentionShape, Gate};
use hbmark_core::model::Dtype;

/// Threads of a block of the streaming product, as of most kernels beside it; its warps, 16-byte vectors of a row that a warp takes in a step, and
/// shared memory for weights on their way (`linear.cuh`).
pub(super) const THREADS: u32 = 256;
pub(super) const WARPS: usize = 8;
const STEP: usize = 32;
const RING_BYTES: usize = 32 << 10;
/// Logits that a block of `first_largest` takes in one turn (`tiled_layers.cu`).
const LOGITS_AT_ONCE: usize = 4096;

/// Elements of a cache that a thread draws (`fill_kv.cu`).
const DRAWS_OF_THREAD: usize = 32;

/// Rows that the streaming product takes at a time.
const ROWS_AT_ONCE: [usize; 3] = [1, 2, 4];

/// Blocks of the streaming product for each multiprocessor: enough to keep the memory busy, and as many of the next kernel fit beside them, whose
/// first weights come while these end. `scripts/check_sass.py` holds that.
pub(super) const BLOCKS_PER_MULTIPROCESSOR: usize = 2;

/// Activations `[rows, width]` f32, or a vector where there is one row.
#[derive(Debug)]
pub struct DeviceTensor<D: Device> {
    pub memory: D::Memory,
    pub rows: usize,
    pub width: usize,
}

/// Sizes that are tuned, and small in tests so that every path is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuning {
    /// Shared memory for inputs of a streaming product: with the weights on their way, three blocks of it fit an H100 and two an A100. Of q6_k, which
    /// has as many words beside its vectors as those are long, two and one.
    pub input_bytes: usize,
    /// Positions of a split of attention, at least.
    pub min_split: usize,
    /// Rows from which a product goes to the tensor cores, where the format allows.
    pub min_tiled_rows: usize,
    /// And rows from which the device's library makes it.
    pub min_library_rows: usize,
    /// Rows from which ggml's blocks are widened for the library. A pass of the streaming kernel takes 4 rows; to widen costs 4 bytes a weight, as many as
    /// 7 passes over q4_k read.
    pub min_widened_rows: usize,
    /// Rows of a sequence from which attention goes to the tensor cores, where heads and cache allow.
    pub min_prefill_rows: usize,
    /// Bytes of a sum over three or four ranks that each of them reads whole from all; half as many over more, and any over two. *Source*: vLLM's custom all-reduce changes
    /// over at the same sizes.
    pub max_one_shot_bytes: usize,
    /// How long a barrier waits for another rank: longer than it takes to record a graph or to load a kernel.
    pub rank_timeout: Duration,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            input_bytes: 40 << 10,
            min_split: 64,
            min_tiled_rows: 5,
            min_library_rows: 65,
            min_widened_rows: 33,
            min_prefill_rows: 2,
            max_one_shot_bytes: 512 << 10,
            rank_timeout: Duration::from_secs(30),
        }
    }
}

/// A launch that would not fit its kernel: a fault of this program.
pub(super) fn launch_mismatch<T>(
    device: &impl Device,
    kernel: &str,
    mut detail: String,
) -> Result<T, EngineError> {
    detail.insert_str(0, &format!("kernel {kernel}: "));
    Err(EngineError::Device { device: device.name().into(), detail })
}

/// A gate as kernels take it (`elements.cuh`).
pub(super) fn gate_arguments(gate: Gate) -> [Argument; 2] {
    let (function, limit) = match gate {
        Gate::Silu => (0, 0.0),
        Gate::GeluTanh => (1, 0.0),
        Gate::ClampedSwiglu { limit } => (2, limit),
    };
    [I32(function), F32(limit)]
}

/// A size as kernels take it; beyond 2^31 no launch is made.
pub(super) fn size(value: usize) -> Argument {
    I32(i32::try_from(value).unwrap_or(i32::MAX))
}

pub(super) fn word(value: usize) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

pub(super) fn optional<D: Device>(memory: Option<&D::Memory>) -> Argument {
    Address(memory.map_or(0, D::address))
}

/// Rows that the streaming product of a format takes at a time, of so many.
pub(super) fn rows_at_once(format: KernelFormat, rows: usize) -> usize {
    // Four rows with fp8 would spill on sm_80, so there are no such kernels.
    let most = if matches!(format, KernelFormat::Fp8 | KernelFormat::Fp8Block | KernelFormat::Mxfp8) {
        2
    } else {
        4
    };
    ROWS_AT_ONCE.into_iter().find(|at_once| *at_once >= rows.min(most)).unwrap_or(most)
}

/// Columns of rows of so many vectors that a block of the streaming product keeps at a time, and the shared memory that it asks for.
pub(super) fn staged_inputs(
    format: KernelFormat,
    vectors: usize,
    rows_at_once: usize,
    tuning: Tuning,
) -> (usize, u32) {
    // Bytes of 32 inputs.
    let input = match format {
        KernelFormat::Bf16 | KernelFormat::Fp8 | KernelFormat::Fp8Block | KernelFormat::Mxfp8 => 64,
        KernelFormat::F16 | KernelFormat::F32 => 128,
        KernelFormat::Int8
        | KernelFormat::Mxfp4
        | KernelFormat::Nvfp4
        | KernelFormat::Int4
        | KernelFormat::Q8_0
        | KernelFormat::Q4_0
        | KernelFormat::Q4K
        | KernelFormat::Q5K
        | KernelFormat::Q6K => 32 + 4,
    };
    // Scales of groups are on their way beside the weights. Where they need nearly as much room, inputs have half of theirs all the same.
    let scales = format.words_beside() * RING_BYTES / 4;
    let whole = vectors * format.columns();
    let step = STEP * format.columns();
    let inputs = tuning.input_bytes.saturating_sub(scales).max(tuning.input_bytes / 2);
    let fits = inputs * 32 / (rows_at_once * input);
    let chunk = if whole <= fits { whole } else { (fits / step * step).max(step) };
    (chunk, word(RING_BYTES + scales + (rows_at_once * chunk * input).div_ceil(32)))
}

/// Enqueues a kernel in blocks of [`THREADS`] without dynamic shared memory.
pub(super) fn enqueue(
    device: &mut impl Device,
    kernel: impl Into<String>,
    grid: [u32; 3],
    arguments: Vec<Argument>,
) -> Result<(), EngineError> {
    device.launch(&KernelLaunch { kernel: kernel.into(), grid, threads: THREADS, shared_bytes: 0, arguments })
}

/// Enqueues a streaming product: `arguments`, then the sizes that every such kernel takes. Returns the bytes of weights read.
pub(super) fn stream<D: Device>(
    device: &mut D,
    operation: &str,
    weights: &Matrix<D>,
    rows: usize,
    tuning: Tuning,
    mut arguments: Vec<Argument>,
) -> Result<u64, EngineError> {
    let rows_at_once = rows_at_once(weights.format, rows);
    let passes = rows.div_ceil(rows_at_once);
    let (chunk, shared_bytes) = staged_inputs(weights.format, weights.vectors, rows_at_once, tuning);
    let pairs = weights.outputs.div_ceil(2);
    let blocks = pairs.min(device.multiprocessors() as usize * BLOCKS_PER_MULTIPROCESSOR);
    let shift = weights.shift as usize;
    arguments.extend([rows, weights.columns, weights.outputs, weights.vectors, shift, chunk].map(size));
    // Passes beyond what y may have go to z; those behind the last row return.
    let layers = passes.div_ceil(MAX_GRID_YZ).max(1);
    device.launch(&KernelLaunch {
        kernel: format!("{operation}_{}_m{rows_at_once}", weights.format.name()),
        grid: [word(blocks), word(passes.div_ceil(layers)), word(layers)],
        threads: THREADS,
        shared_bytes,
        arguments,
    })?;
    Ok(passes as u64 * weights.bytes())
}

/// K and V of the blocks of a sequence, from a seed: what `random_kv` gives.
#[derive(Debug)]
pub struct FillKv<'a, D: Device> {
    pub pool: &'a Pool<D>,
    /// Every 16-bit draw as the pool keeps it.
    pub quantiles: &'a D::Memory,
    /// Addresses of the blocks, in order.
    pub blocks: &'a D::Memory,
    pub count: usize,
    pub seed: u64,
}

impl<D: Device> FillKv<'_, D> {
    /// Enqueues it.
    pub fn launch(&self, device: &mut D) -> Result<(), EngineError> {
        let Self { pool, quantiles, blocks, count, seed } = self;
        let elements = pool.shape.block_parts()[0];
        let parts = pool.shape.block_parts().iter().filter(|part| **part > 0).count();
        if !elements.is_multiple_of(DRAWS_OF_THREAD) {
            return launch_mismatch(device, "fill_kv", format!("blocks of {elements} elements"));
        }
        let arguments = vec![
            Address(D::address(quantiles)),
            Address(D::address(blocks)),
            U64(*seed),
            U64(pool.layer_bytes() as u64),
            size(elements),
            size(parts),
            size(pool.shape.head_dim),
            F32(if pool.shape.scale_bytes() > 0 { random_kv::int8_scale() } else { 0.0 }),
        ];
        let grid = [
            word(*count),
            word(parts * pool.shape.layers),
            word(elements.div_ceil(DRAWS_OF_THREAD * THREADS as usize)),
        ];
        enqueue(device, format!("fill_kv_{}", 8 * pool.shape.element_bytes()), grid, arguments)
    }
}

/// `hidden[row] = scale · table[tokens[row]]`.
#[derive(Debug)]
pub struct Embed<'a, D: Device> {
    pub rows: usize,
    pub table: &'a Matrix<D>,
    pub scale: f32,
    pub step: &'a StepState<D>,
    pub hidden: &'a DeviceTensor<D>,
}

impl<D: Device> Embed<'_, D> {
    /// Enqueues it; bytes of table rows.
    pub fn launch(&self, device: &mut D) -> Result<u64, EngineError> {
        let Self { rows, table, scale, step, hidden } = self;
        if hidden.width != table.columns || hidden.rows < *rows {
            return launch_mismatch(
                device,
                "embed",
                format!("{} × {} for {rows} × {}", hidden.rows, hidden.width, table.columns),
            );
        }
        let arguments = vec![
            Address(D::address(&table.data)),
            optional::<D>(table.scales.as_ref()),
            Address(step.tokens()),
            Address(D::address(&hidden.memory)),
            F32(*scale),
            size(table.columns),
            size(table.vectors),
            size(table.outputs),
        ];
        enqueue(device, format!("embed_{}", table.format.name()), [word(*rows), 1, 1], arguments)?;
        Ok(*rows as u64 * table.bytes() / table.outputs as u64)
    }
}

/// `into += W · input + b`.
#[derive(Debug)]
pub struct ProjectAdd<'a, D: Device> {
    pub rows: usize,
    pub input: &'a DeviceTensor<D>,
    pub weights: &'a Matrix<D>,
    pub hidden: &'a DeviceTensor<D>,
    /// The hidden states, or `[rows, hidden]` f32 zeros for [`AddNormed`].
    pub into: u64,
    /// Room for a product on tensor cores; `None` streams.
    pub workspace: Option<TiledWorkspace>,
}

impl<D: Device> ProjectAdd<'_, D> {
    /// Enqueues it; bytes of weights.
    pub fn launch(&self, device: &mut D, tuning: Tuning) -> Result<u64, EngineError> {
        let Self { rows, input, weights, hidden, into, workspace } = self;
        if (input.width, hidden.width) != (weights.columns, weights.outputs)
            || input.rows.min(hidden.rows) < *rows
        {
            let what = format!(
                "{rows} rows of {} to {}, {} × {}",
                input.width, hidden.width, weights.outputs, weights.columns
            );
            return launch_mismatch(device, "project_add", what);
        }
        if let Some(workspace) = *workspace {
            let TiledWorkspace { prepared, ready, by_library, .. } = workspace;
            if !ready {
                Prepare { rows: *rows, input: D::address(&input.memory), row_of: 0, norm: None, parts: None }
                    .launch(device, weights, prepared)?;
            }
            if by_library {
                return tensor_core_linear::multiply_by_library(
                    device, *rows, weights, workspace, *into, true,
                );
            }
            return tensor_core_linear::multiply(
                device,
                "project_add",
                *rows,
                weights,
                prepared,
                vec![Address(*into)],
            );
        }
        let arguments = vec![
            Address(D::address(&input.memory)),
            Address(D::address(&weights.data)),
            optional::<D>(weights.scales.as_ref()),
            optional::<D>(weights.bias.as_ref()),
            Address(*into),
        ];
        stream(device, "project_add", weights, *rows, tuning, arguments)
    }
}

/// `hidden += norm(sums)`, and zeros for the sums.
#[derive(Debug)]
pub struct AddNormed<'a, D: Device> {
    pub rows: usize,
    /// `[rows, hidden]` f32.
    pub sums: u64,
    pub norm: &'a DeviceTensor<D>,
    pub norm_eps: f32,
    pub hidden: &'a DeviceTensor<D>,
}

impl<D: Device> AddNormed<'_, D> {
    /// Enqueues it; bytes of the norm.
    pub fn launch(&self, device: &mut D) -> Result<u64, EngineError> {
        let Self { rows, sums, norm, norm_eps, hidden } = self;
        if norm.width != hidden.width || hidden.rows < *rows {
            let what = format!("{rows} rows of {}, a norm of {}", hidden.width, norm.width);
            return launch_mismatch(device, "add_normed", what);
        }
        let arguments = vec![
            Address(*sums),
            Address(D::address(&norm.memory)),
            F32(*norm_eps),
            Address(D::address(&hidden.memory)),
            size(*rows),
            size(hidden.width),
        ];
        enqueue(device, "add_normed", [word(*rows), 1, 1], arguments)?;
        Ok(4 * norm.width as u64)
    }
}

/// `joined[row] = [norm(hidden[row]); norm(state)]`, and zeros for the hidden states.
#[derive(Debug)]
pub struct JoinState<'a, D: Device> {
    pub rows: usize,
    pub hidden: &'a DeviceTensor<D>,
    pub state: &'a DeviceTensor<D>,
    pub norms: Option<&'a [DeviceTensor<D>; 2]>,
    pub norm_eps: f32,
    pub joined: &'a DeviceTensor<D>,
}

impl<D: Device> JoinState<'_, D> {
    /// Enqueues it; bytes of the norms.
    pub fn launch(&self, device: &mut D) -> Result<u64, EngineError> {
        let Self { rows, hidden, state, norms, norm_eps, joined } = self;
        let vectors = norms.iter().flat_map(|norms| norms.iter()).chain([*state]);
        let unlike = vectors.map(|vector| vector.width).find(|width| *width != hidden.width);
        if unlike.is_some() || joined.width != 2 * hidden.width || hidden.rows.min(joined.rows) < *rows {
            let what = format!("{rows} rows of {} to {}, {unlike:?}", hidden.width, joined.width);
            return launch_mismatch(device, "join_state", what);
        }
        let [of_hidden, of_state] =
            norms.map_or([0; 2], |norms| norms.each_ref().map(|norm| D::address(&norm.memory)));
        let arguments = vec![
            Address(D::address(&hidden.memory)),
            Address(D::address(&state.memory)),
            Address(of_hidden),
            Address(of_state),
            F32(*norm_eps),
            Address(D::address(&joined.memory)),
            size(*rows),
            size(hidden.width),
        ];
        enqueue(device, "join_state", [word(*rows), 1, 1], arguments)?;
        Ok(norms.iter().flat_map(|norms| norms.iter()).map(|norm| 4 * norm.width as u64).sum())
    }
}

/// `out = gate(G · norm(hidden) + b) ∘ (U · norm(hidden) + b)`.
#[derive(Debug)]
pub struct GateUp<'a, D: Device> {
    pub rows: usize,
    pub hidden: &'a DeviceTensor<D>,
    pub norm: Option<(&'a DeviceTensor<D>, f32)>,
    pub gate: Gate,
    pub weights: &'a Matrix<D>,
    pub out: &'a DeviceTensor<D>,
    /// The same as the next product takes it on tensor cores, which kernels of ours leave there; 0 for none.
    pub rounded: u64,
    /// `[rows, outputs]` f32, for a product of the device's library.
    pub sums: u64,
    /// Room for a product on tensor cores; `None` streams.
    pub workspace: Option<TiledWorkspace>,
}

impl<D: Device> GateUp<'_, D> {
    /// Enqueues it; bytes of weights and norm.
    pub fn launch(&self, device: &mut D, tuning: Tuning) -> Result<u64, EngineError> {
        let Self { rows, hidden, norm, gate, weights, out, rounded, sums, workspace } = self;
        let gate = gate_arguments(*gate);
        let widths = (hidden.width, norm_width(hidden, *norm), 2 * out.width);
        if widths != (weights.columns, weights.columns, weights.outputs) || hidden.rows.min(out.rows) < *rows
        {
            let what = format!(
                "{rows} rows of {} to {}, {} × {}",
                hidden.width, out.width, weights.outputs, weights.columns
            );
            return launch_mismatch(device, "gate_up", what);
        }
        if let Some(workspace) = *workspace {
            let input = D::address(&hidden.memory);
            let inputs = Prepare { rows: *rows, input, row_of: 0, norm: *norm, parts: None };
            let out_address = Address(D::address(&out.memory));
            let ours = || [out_address, Address(*rounded)].into_iter().chain(gate).collect();
            let bytes = inputs.multiply(device, "gate_up", weights, workspace, *sums, ours)?;
            if workspace.by_library {
                let arguments =
                    [Address(*sums), out_address].into_iter().chain(gate).chain([size(out.width)]).collect();
                let grid = [word(*rows), word(out.width.div_ceil(THREADS as usize)), 1];
                enqueue(device, "finish_gate_up", grid, arguments)?;
            }
            return Ok(bytes + norm_bytes(*norm));
        }
        let mut arguments = vec![
            Address(D::address(&hidden.memory)),
            optional::<D>(norm.map(|(norm, _)| &norm.memory)),
            F32(norm.map_or(0.0, |(_, eps)| eps)),
            Address(D::address(&weights.data)),
            optional::<D>(weights.scales.as_ref()),
            optional::<D>(weights.bias.as_ref()),
            Address(D::address(&out.memory)),
        ];
        arguments.extend(gate);
        Ok(stream(device, "gate_up", weights, *rows, tuning, arguments)? + norm_bytes(*norm))
    }
}

/// `logits = head · norm(hidden[rows of outputs])`, and the first largest of each.
#[derive(Debug)]
pub struct Head<'a, D: Device> {
    pub outputs: usize,
    pub hidden: &'a DeviceTensor<D>,
    pub norm: &'a DeviceTensor<D>,
    pub norm_eps: f32,
    pub weights: &'a Matrix<D>,
    /// Logits are bent towards this.
    pub softcap: Option<f32>,
    pub step: &'a StepState<D>,
    pub logits: &'a DeviceTensor<D>,
    /// 8 bytes per output, [`Self::NO_LOGIT`] before the first launch.
    pub best: u64,
    /// 4 bytes per output, zeros before the first launch.
    pub arrived: u64,
    /// 4 bytes per output.
    pub next: u64,
    /// Room for a product on tensor cores; `None` streams.
    pub workspace: Option<TiledWorkspace>,
}

impl<D: Device> Head<'_, D> {
    /// What `best` holds between launches.
    pub const NO_LOGIT: u64 = 0xffff_ffff;

    /// Enqueues it; bytes of weights and norm.
    pub fn launch(&self, device: &mut D, tuning: Tuning) -> Result<u64, EngineError> {
        let Self { outputs, hidden, norm, norm_eps, weights, softcap, step, logits, .. } = self;
        let Self { best, arrived, next, workspace, .. } = self;
        let softcap = F32(softcap.unwrap_or(0.0));
        let widths = (hidden.width, norm.width, logits.width);
        if widths != (weights.columns, weights.columns, weights.outputs) || logits.rows < *outputs {
            let what = format!(
                "{outputs} rows of {} to {}, {} × {}",
                hidden.width, logits.width, weights.outputs, weights.columns
            );
            return launch_mismatch(device, "head", what);
        }
        if let Some(workspace) = *workspace {
            let inputs = Prepare {
                rows: *outputs,
                input: D::address(&hidden.memory),
                row_of: step.output_rows(),
                norm: Some((*norm, *norm_eps)),
                parts: None,
            };
            let sums = D::address(&logits.memory);
            let logits = Address(sums);
            let bytes = inputs.multiply(device, "head", weights, workspace, sums, || vec![logits])?;
            let arguments = vec![
                logits,
                Address(*best),
                Address(*arrived),
                Address(*next),
                softcap,
                size(weights.outputs),
            ];
            let grid = [word(*outputs), word(weights.outputs.div_ceil(LOGITS_AT_ONCE)), 1];
            enqueue(device, "first_largest", grid, arguments)?;
            return Ok(bytes + 4 * norm.width as u64);
        }
        let arguments = vec![
            Address(D::address(&hidden.memory)),
            Address(step.output_rows()),
            Address(D::address(&norm.memory)),
            F32(*norm_eps),
            Address(D::address(&weights.data)),
            optional::<D>(weights.scales.as_ref()),
            Address(D::address(&logits.memory)),
            Address(*best),
            Address(*arrived),
            Address(*next),
            softcap,
        ];
        Ok(stream(device, "head", weights, *outputs, tuning, arguments)? + 4 * norm.width as u64)
    }
}

/// Norm, Q, K and V, head norms, rotation, and the cache.
#[derive(Debug)]
pub struct NormQkv<'a, D: Device> {
    pub rows: usize,
    pub shape: AttentionShape,
    pub hidden: &'a DeviceTensor<D>,
    pub norm: Option<&'a DeviceTensor<D>>,
    pub weights: &'a Matrix<D>,
    pub head_norms: Option<(&'a DeviceTensor<D>, &'a DeviceTensor<D>)>,
    pub step: &'a StepState<D>,
    pub pool: &'a Pool<D>,
    pub layer: usize,
    pub query: &'a DeviceTensor<D>,
    /// `[rows, outputs]` f32.
    pub projected: u64,
    /// A word per head and row, zeros before the first launch; 0 leaves heads with norms to a kernel of their own.
    pub arrived: u64,
    /// Room for a product on tensor cores; `None` streams.
    pub workspace: Option<TiledWorkspace>,
}

impl<D: Device> NormQkv<'_, D> {
    /// Enqueues it; bytes of weights and norms, and of K and V written.
    pub fn launch(&self, device: &mut D, tuning: Tuning) -> Result<u64, EngineError> {
        let Self { rows, shape, hidden, norm, weights, pool, query, projected, arrived, workspace, .. } =
            self;
        let outputs = shape.query_width() + 2 * shape.kv_width();
        let all_outputs = weights.all_outputs();
        let widths = (hidden.width, norm.map_or(hidden.width, |norm| norm.width), query.width, all_outputs);
        if widths != (weights.columns, weights.columns, shape.query_width(), outputs)
            || hidden.rows.min(query.rows) < *rows
        {
            let what =
                format!("{rows} rows of {} to {outputs}, {all_outputs} × {}", hidden.width, weights.columns);
            return launch_mismatch(device, "norm_qkv", what);
        }
        let fits = pool.has_narrow_elements() || pool.shape.dtype == cache_dtype(weights.format);
        if !fits || pool.shape.head_dim != shape.head_dim {
            let what = format!("{} weights with a {} cache", weights.format.name(), pool.shape.dtype);
            return launch_mismatch(device, "norm_qkv", what);
        }
        if let Some(workspace) = *workspace {
            return self.launch_on_tensor_cores(device, workspace);
        }
        if !weights.following.is_empty() && (*projected == 0 || *arrived != 0) {
            return launch_mismatch(device, "norm_qkv", "heads of several formats meet behind them".into());
        }
        let (mut bytes, mut first) = (0, 0);
        for run in weights.runs() {
            let projected = if *projected == 0 { 0 } else { projected + 4 * first as u64 };
            let arguments = self.stream_arguments(run, projected, all_outputs);
            bytes += stream(device, "norm_qkv", run, *rows, tuning, arguments)?;
            first += run.outputs;
        }
        if self.projected != 0 && self.arrived == 0 {
            self.finish_heads(device)?;
        }
        Ok(bytes + self.extra_bytes())
    }

    /// What the streaming kernel of one of the matrices takes; the sums of a row are so many columns from those of the next.
    fn stream_arguments(&self, weights: &Matrix<D>, projected: u64, stride: usize) -> Vec<Argument> {
        let Self { shape, hidden, norm, head_norms, step, pool, layer, query, arrived, .. } = self;
        let (cosines, sines) = step.angles(shape.rope);
        vec![
            Address(D::address(&hidden.memory)),
            optional::<D>(norm.map(|norm| &norm.memory)),
            F32(shape.norm_eps),
            Address(D::address(&weights.data)),
            optional::<D>(weights.scales.as_ref()),
            optional::<D>(weights.bias.as_ref()),
            optional::<D>(head_norms.map(|(query, _)| &query.memory)),
            optional::<D>(head_norms.map(|(_, key)| &key.memory)),
            Address(cosines),
            Address(sines),
            Address(step.positions()),
            Address(step.tables()),
            Address(step.starts()),
            Address(D::address(&query.memory)),
            Address(projected),
            Address(*arrived),
            U64(pool.layer_bytes() as u64),
            size(*layer),
            size(shape.heads),
            size(shape.kv_heads),
            size(shape.head_dim),
            size(pool.block_shift() as usize),
            size(stride),
        ]
    }

    /// Bytes of norms, and of K and V written.
    fn extra_bytes(&self) -> u64 {
        let norms = self.norm.map_or(0, |norm| norm.width)
            + self.head_norms.map_or(0, |(query, key)| query.width + key.width);
        (4 * norms + self.rows * self.pool.shape.position_bytes()) as u64
    }

    fn launch_on_tensor_cores(&self, device: &mut D, workspace: TiledWorkspace) -> Result<u64, EngineError> {
        let Self { rows, shape, weights, projected, .. } = self;
        let norm = self.norm.map(|norm| (norm, shape.norm_eps));
        let input = D::address(&self.hidden.memory);
        let inputs = Prepare { rows: *rows, input, row_of: 0, norm, parts: None };
        let ours = || self.head_arguments();
        let bytes = inputs.multiply(device, "qkv", weights, workspace, *projected, ours)?;
        if self.projected != 0 {
            self.finish_heads(device)?;
        }
        Ok(bytes + self.extra_bytes())
    }

    /// What a kernel needs to know of heads.
    fn head_arguments(&self) -> Vec<Argument> {
        let Self { shape, head_norms, step, pool, .. } = self;
        let (cosines, sines) = step.angles(shape.rope);
        vec![
            optional::<D>(head_norms.map(|(query, _)| &query.memory)),
            optional::<D>(head_norms.map(|(_, key)| &key.memory)),
            F32(shape.norm_eps),
            Address(cosines),
            Address(sines),
            Address(step.positions()),
            Address(step.tables()),
            Address(step.starts()),
            Address(D::address(&self.query.memory)),
            Address(self.projected),
            U64(pool.layer_bytes() as u64),
            size(self.layer),
            size(shape.heads),
            size(shape.kv_heads),
            size(shape.head_dim),
            size(pool.block_shift() as usize),
        ]
    }

    /// Norms, turns and stores heads whose sums lie in `projected`.
    fn finish_heads(&self, device: &mut D) -> Result<(), EngineError> {
        let Self { rows, shape, weights, .. } = self;
        let mut arguments = self.head_arguments();
        arguments.extend([I32(i32::from(shape.joint_norms)), size(weights.all_outputs())]);
        let grid = [word(*rows), word((shape.heads + 2 * shape.kv_heads).div_ceil(WARPS)), 1];
        enqueue(device, format!("finish_heads_{}", self.pool.shape.dtype), grid, arguments)
    }
}

/// The width of a norm, which is that of its input where there is none.
pub(super) fn norm_width<D: Device>(input: &DeviceTensor<D>, norm: Option<(&DeviceTensor<D>, f32)>) -> usize {
    norm.map_or(input.width, |(norm, _)| norm.width)
}

pub(super) fn norm_bytes<D: Device>(norm: Option<(&DeviceTensor<D>, f32)>) -> u64 {
    norm.map_or(0, |(norm, _)| 4 * norm.width as u64)
}

/// What the cache of a model keeps, by the format of its weights.
fn cache_dtype(format: KernelFormat) -> Dtype {
    match format {
        KernelFormat::F16 => Dtype::F16,
        KernelFormat::F32 => Dtype::F32,
        _ => Dtype::Bf16,
    }
}
