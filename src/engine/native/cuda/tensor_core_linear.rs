//! The linear layers on tensor cores, for batches too large for the streaming kernels.
//!
//! Enters: rows and a matrix. Leaves: launches of `prepare_rows.cu`, and of `tiled_layers.cu` or the device's library. Our own kernels, which
//! finish an operation in the product itself, take a decode batch and read a matrix once per tile of rows; for 16-bit floats, from
//! [`Tuning::min_library_rows`](super::kernels::Tuning) rows on, it is the library's, and a kernel after it finishes. For ggml's blocks, which our kernels
//! only stream, it is the library's from `min_widened_rows` on, behind `widen_blocks.cu`. Which is faster from how many rows on has not been measured.

use Argument::{Address, F32};

use super::device::{Argument, Device, Gemm, GemmOperands, KernelLaunch};
use super::device_matrix::{KernelFormat, Matrix, VECTOR};
use super::kernels::{DeviceTensor, enqueue, launch_mismatch, size, word};
use crate::engine::EngineError;

/// One of the tilings of `tiled.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tiling {
    rows: usize,
    outputs: usize,
    warps: u32,
    stages: usize,
}

const TILINGS: [Tiling; 4] = [
    Tiling { rows: 16, outputs: 32, warps: 4, stages: 6 },
    Tiling { rows: 32, outputs: 32, warps: 4, stages: 6 },
    Tiling { rows: 64, outputs: 32, warps: 4, stages: 6 },
    Tiling { rows: 128, outputs: 128, warps: 8, stages: 3 },
];
/// Up to so many rows, the operations whose outputs make about one block for each multiprocessor have a deeper pipe: so many stages, or as many as
/// fit the bytes (`tiled.cuh`).
const DEEP_ROWS: usize = 32;
const DEEP_STAGES: usize = 12;
const DEEP_BYTES: usize = 80 << 10;

impl Tiling {
    /// The smallest that takes all rows at once, or the largest; of those whose tiles fit the shared memory of a block.
    fn of(operation: &str, rows: usize, inputs: Inputs, shared_bytes: usize) -> Option<Self> {
        let deep = matches!(operation, "project_add" | "qkv");
        let mut fitting = TILINGS
            .into_iter()
            .map(|tiling| if deep && tiling.rows <= DEEP_ROWS { tiling.deepened(inputs) } else { tiling })
            .filter(|tiling| tiling.shared_bytes(inputs) <= shared_bytes);
        fitting.clone().find(|tiling| tiling.rows >= rows).or_else(|| fitting.next_back())
    }

    fn deepened(self, inputs: Inputs) -> Self {
        Self { stages: DEEP_STAGES.min(DEEP_BYTES / self.stage_bytes(inputs)), ..self }
    }

    /// A stage: 128 bytes of each output, and the inputs that meet them.
    fn stage_bytes(self, inputs: Inputs) -> usize {
        let of_output = STAGE_VECTORS * VECTOR + inputs.output_scale_bytes;
        let of_row = (inputs.vectors(STAGE_VECTORS) + inputs.scale_vectors) * VECTOR;
        self.outputs * of_output + self.rows * of_row
    }

    /// Shared memory.
    fn shared_bytes(self, inputs: Inputs) -> usize {
        self.stages * self.stage_bytes(inputs)
    }
}

/// Vectors of a row of weights in a stage.
const STAGE_VECTORS: usize = 8;

/// How rows are prepared for a format (`tiled.cuh`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Inputs {
    /// Vectors of inputs that meet one of weights.
    per_vector: usize,
    /// Vectors of scales that come with a stage of them, one for every 32 columns.
    scale_vectors: usize,
    /// Bytes of scales that come with a stage of an output.
    output_scale_bytes: usize,
}

impl Inputs {
    /// Of formats that tensor cores take.
    fn of(format: KernelFormat) -> Option<Self> {
        let (per_vector, scale_vectors) = match format {
            KernelFormat::Bf16 | KernelFormat::F16 => (1, 0),
            KernelFormat::Int8 => (1, 1),
            KernelFormat::Fp8 | KernelFormat::Fp8Block | KernelFormat::Mxfp8 => (2, 0),
            KernelFormat::Mxfp4 | KernelFormat::Nvfp4 | KernelFormat::Int4 => (2, 2),
            // ggml's blocks stream, or are widened for the library.
            KernelFormat::F32
            | KernelFormat::Q8_0
            | KernelFormat::Q4_0
            | KernelFormat::Q4K
            | KernelFormat::Q5K
            | KernelFormat::Q6K => return None,
        };
        let output_scale_bytes = match format {
            KernelFormat::Mxfp8 => 4,
            KernelFormat::Mxfp4 => 8,
            KernelFormat::Nvfp4 => 16,
            KernelFormat::Int4 | KernelFormat::Fp8Block => 32,
            _ => 0,
        };
        Some(Self { per_vector, scale_vectors, output_scale_bytes })
    }

    fn vectors(self, of_weights: usize) -> usize {
        self.per_vector * of_weights
    }

    /// Bytes of a prepared row; scales are those of whole stages.
    fn row_bytes(self, of_weights: usize) -> usize {
        let scales = of_weights.div_ceil(STAGE_VECTORS) * self.scale_vectors;
        (self.vectors(of_weights) + scales) * VECTOR
    }
}

/// Whether a matrix can be multiplied on tensor cores.
pub fn fits(format: KernelFormat) -> bool {
    Inputs::of(format).is_some()
}

/// Whether the device's library has the product: it has neither group scales nor 8-bit floats with bf16 activations.
pub fn library_has(format: KernelFormat) -> bool {
    matches!(format, KernelFormat::Bf16 | KernelFormat::F16)
}

/// Bytes of the prepared rows of a product; none where there is no such product.
pub fn prepared_bytes<D: Device>(weights: &Matrix<D>, rows: usize) -> usize {
    if weights.format.is_of_ggml() {
        return rows * weights.input_vectors() * VECTOR;
    }
    Inputs::of(weights.format).map_or(0, |inputs| rows * inputs.row_bytes(weights.vectors))
}

/// How a product goes to the tensor cores, and the memory it needs there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TiledWorkspace {
    /// The rows as tensor cores take them.
    pub prepared: u64,
    /// They are there already.
    pub ready: bool,
    /// Whether the device's library makes it, or kernels of ours.
    pub by_library: bool,
    /// Room for weights that the library takes in bf16 and that are stored otherwise.
    pub widened: u64,
}

/// Parts of a row, each of which is a row of its own for a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowParts {
    pub count: usize,
    /// Columns from one to the next.
    pub apart: usize,
    /// Columns of the row.
    pub stride: usize,
}

/// Rows, picked, normed and rounded.
#[derive(Debug)]
pub struct Prepare<'a, D: Device> {
    pub rows: usize,
    /// Where the first lies, f32.
    pub input: u64,
    /// Which rows, `[rows]` words; 0 for all of them in order.
    pub row_of: u64,
    pub norm: Option<(&'a DeviceTensor<D>, f32)>,
    /// What of a row is a row of its own.
    pub parts: Option<RowParts>,
}

impl<D: Device> Prepare<'_, D> {
    /// Enqueues it; the result is at `prepared`.
    pub fn launch(&self, device: &mut D, weights: &Matrix<D>, prepared: u64) -> Result<(), EngineError> {
        let parts = self.parts.unwrap_or(RowParts { count: 1, apart: 0, stride: 0 });
        let arguments = vec![
            Address(self.input),
            Address(self.row_of),
            Address(self.norm.map_or(0, |(norm, _)| D::address(&norm.memory))),
            F32(self.norm.map_or(0.0, |(_, eps)| eps)),
            Address(prepared),
            size(self.rows),
            size(weights.columns),
            size(weights.input_vectors()),
            size(parts.count),
            size(parts.apart),
            size(parts.stride),
        ];
        let grid = [word(self.rows), 1, 1];
        enqueue(device, format!("prepare_rows_{}", weights.format.of_inputs().name()), grid, arguments)
    }

    /// Enqueues it, and the product: ours, with the arguments of its operation first, or that of the library, whose sums go to `sums`; bytes of
    /// weights.
    pub fn multiply(
        &self,
        device: &mut D,
        operation: &str,
        weights: &Matrix<D>,
        workspace: TiledWorkspace,
        sums: u64,
        arguments: impl FnOnce() -> Vec<Argument>,
    ) -> Result<u64, EngineError> {
        self.launch(device, weights, workspace.prepared)?;
        if workspace.by_library {
            return multiply_by_library(device, self.rows, weights, workspace, sums, false);
        }
        multiply(device, operation, self.rows, weights, workspace.prepared, arguments())
    }
}

/// Enqueues the library's product of prepared rows to `out`; bytes of weights.
pub fn multiply_by_library<D: Device>(
    device: &mut D,
    rows: usize,
    weights: &Matrix<D>,
    workspace: TiledWorkspace,
    out: u64,
    accumulate: bool,
) -> Result<u64, EngineError> {
    let product = Gemm {
        format: weights.format.of_inputs(),
        rows,
        outputs: weights.all_outputs(),
        columns: weights.vectors * weights.format.columns(),
        bias: weights.bias.is_some(),
        accumulate,
    };
    let (data, bytes) = if weights.format.is_of_ggml() {
        (workspace.widened, widen(device, weights, workspace.widened)?)
    } else {
        (D::address(&weights.data), weights.bytes())
    };
    let bias = weights.bias.as_ref().map_or(0, D::address);
    let operands = GemmOperands { inputs: workspace.prepared, weights: data, bias, out };
    device.multiply(&product, &operands)?;
    Ok(bytes)
}

/// Enqueues the widening of a matrix to bf16; bytes of weights, and of what is written and read again.
fn widen<D: Device>(device: &mut D, weights: &Matrix<D>, to: u64) -> Result<u64, EngineError> {
    let mut at = to;
    for run in weights.runs() {
        let arguments = vec![
            Address(D::address(&run.data)),
            Address(run.scales.as_ref().map_or(0, D::address)),
            Address(at),
            size(run.outputs),
            size(run.vectors),
        ];
        enqueue(device, format!("widen_{}", run.format.name()), [word(run.outputs), 1, 1], arguments)?;
        at += (run.outputs * run.input_vectors() * VECTOR) as u64;
    }
    Ok(weights.runs().map(Matrix::bytes).sum::<u64>() + 2 * (at - to))
}

/// The tiling of a product, and how its rows are prepared.
fn tiling_of(
    device: &impl Device,
    operation: &str,
    rows: usize,
    format: KernelFormat,
) -> Result<(Inputs, Tiling), EngineError> {
    let Some(inputs) = Inputs::of(format) else {
        return launch_mismatch(device, operation, format!("{} on tensor cores", format.name()));
    };
    let Some(tiling) = Tiling::of(operation, rows, inputs, device.shared_bytes()) else {
        let what = format!("no tile fits {} bytes of shared memory", device.shared_bytes());
        return launch_mismatch(device, operation, what);
    };
    Ok((inputs, tiling))
}

/// Enqueues a tiled product of prepared rows, with the arguments of its operation first; bytes of weights.
pub fn multiply<D: Device>(
    device: &mut D,
    operation: &str,
    rows: usize,
    weights: &Matrix<D>,
    prepared: u64,
    mut arguments: Vec<Argument>,
) -> Result<u64, EngineError> {
    let (inputs, tiling) = tiling_of(device, operation, rows, weights.format)?;
    let passes = rows.div_ceil(tiling.rows);
    arguments.extend([
        Address(prepared),
        Address(D::address(&weights.data)),
        Address(weights.scales.as_ref().map_or(0, D::address)),
        Address(weights.bias.as_ref().map_or(0, D::address)),
        size(rows),
        size(weights.outputs),
        size(weights.vectors),
        size(weights.shift as usize),
    ]);
    device.launch(&KernelLaunch {
        kernel: format!("tiled_{operation}_{}_t{}", weights.format.name(), tiling.rows),
        grid: [word(weights.outputs.div_ceil(tiling.outputs)), word(passes), 1],
        threads: tiling.warps * 32,
        shared_bytes: word(tiling.shared_bytes(inputs)),
        arguments,
    })?;
    Ok(passes as u64 * weights.bytes())
}

/// Enqueues a tiled product with a matrix for each of so many heads, which lie one after another and have no bias, with the arguments of its
/// operation first; bytes of weights. Heads are parts of prepared rows.
pub fn multiply_heads<D: Device>(
    device: &mut D,
    operation: &str,
    (rows, heads): (usize, usize),
    weights: &Matrix<D>,
    prepared: u64,
    mut arguments: Vec<Argument>,
) -> Result<u64, EngineError> {
    let (inputs, tiling) = tiling_of(device, operation, rows, weights.format)?;
    let (outputs, passes) = (weights.outputs / heads, rows.div_ceil(tiling.rows));
    arguments.extend([
        Address(prepared),
        Address(D::address(&weights.data)),
        Address(weights.scales.as_ref().map_or(0, D::address)),
        size(rows),
        size(outputs),
        size(weights.vectors),
        size(weights.shift as usize),
    ]);
    device.launch(&KernelLaunch {
        kernel: format!("latent_tiled_{operation}_{}_t{}", weights.format.name(), tiling.rows),
        grid: [word(outputs.div_ceil(tiling.outputs)), word(heads), word(passes)],
        threads: tiling.warps * 32,
        shared_bytes: word(tiling.shared_bytes(inputs)),
        arguments,
    })?;
    Ok(passes as u64 * weights.bytes())
}

/// Static shared memory of a tiled product of experts: a word and an address for each row (`experts.cu`).
const ROW_PLACE_BYTES: usize = 12;

/// The tiling of a product of experts, for so many rows of one.
fn expert_tiling(format: KernelFormat, rows: usize, shared_bytes: usize) -> Option<Tiling> {
    let most = TILINGS.map(|tiling| tiling.rows).into_iter().max().unwrap_or(0);
    Tiling::of("experts", rows, Inputs::of(format)?, shared_bytes.saturating_sub(ROW_PLACE_BYTES * most))
}

/// Rows of an expert that a tiled product takes at once, of so many; `None` where there is no such product.
pub fn expert_tile_rows(format: KernelFormat, rows: usize, shared_bytes: usize) -> Option<usize> {
    expert_tiling(format, rows, shared_bytes).map(|tiling| tiling.rows)
}

/// Enqueues a tiled product of experts: of tiles of so many rows, along y and z, with matrices of as many outputs at the most.
pub fn multiply_experts<D: Device>(
    device: &mut D,
    operation: &str,
    format: KernelFormat,
    (tile_rows, [tiles, layers]): (usize, [u32; 2]),
    outputs: usize,
    arguments: Vec<Argument>,
) -> Result<(), EngineError> {
    let fitting = Inputs::of(format).zip(expert_tiling(format, tile_rows, device.shared_bytes()));
    let Some((inputs, tiling)) = fitting else {
        return launch_mismatch(device, operation, format!("{} on tensor cores", format.name()));
    };
    device.launch(&KernelLaunch {
        kernel: format!("experts_tiled_{operation}_{}_t{}", format.name(), tiling.rows),
        grid: [word(outputs.div_ceil(tiling.outputs)), tiles, layers],
        threads: tiling.warps * 32,
        shared_bytes: word(tiling.shared_bytes(inputs)),
        arguments,
    })
}

#[cfg(test)]
mod tests {
    use super::{Inputs, KernelFormat, Tiling};

    #[test]
    fn a_tile_fits_the_shared_memory_of_a_block() {
        // An H100, and a GPU of 8.9 or 12.0.
        let formats = [
            KernelFormat::Bf16,
            KernelFormat::Int8,
            KernelFormat::Fp8,
            KernelFormat::Fp8Block,
            KernelFormat::Mxfp8,
            KernelFormat::Mxfp4,
            KernelFormat::Nvfp4,
            KernelFormat::Int4,
        ];
        for operation in ["gate_up", "project_add"] {
            let rows_at = |format, rows, kib: usize| {
                Tiling::of(operation, rows, Inputs::of(format).unwrap(), kib << 10).map(|tiling| tiling.rows)
            };
            assert_eq!(formats.map(|format| rows_at(format, 128, 227)), [Some(128); 8]);
            assert_eq!(
                formats.map(|format| rows_at(format, 128, 99)),
                [Some(128), Some(64), Some(32), Some(32), Some(32), Some(32), Some(32), Some(32)]
            );
            assert_eq!(formats.map(|format| rows_at(format, 8, 99)), [Some(16); 8]);
            assert_eq!(formats.map(|format| rows_at(format, 8, 8)), [None; 8]);
        }
    }

    #[test]
    fn few_outputs_have_a_deeper_pipe() {
        let bytes = |operation, format, rows| {
            let inputs = Inputs::of(format).unwrap();
            Tiling::of(operation, rows, inputs, 227 << 10).unwrap().shared_bytes(inputs)
        };
        // Stages of 32 outputs and 16 or 32 rows have 6 or 8 KiB in bf16, 8 or 12 in fp8.
        assert_eq!(bytes("gate_up", KernelFormat::Bf16, 8), (6 * 6) << 10);
        assert_eq!(bytes("qkv", KernelFormat::Bf16, 8), (12 * 6) << 10);
        assert_eq!(bytes("project_add", KernelFormat::Bf16, 32), (10 * 8) << 10);
        assert_eq!(bytes("project_add", KernelFormat::Fp8, 32), (6 * 12) << 10);
        assert_eq!(bytes("project_add", KernelFormat::Bf16, 64), bytes("head", KernelFormat::Bf16, 64));
    }
}
