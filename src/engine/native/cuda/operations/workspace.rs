//! The scratch memory of kernels: made on the first step that needs it, kept, and grown for a larger one.
//!
//! Enters: what an operation is about to run. Leaves: addresses. Growing anything invalidates the recorded graphs, which point to the old memory.

use super::CudaOperations;
use crate::engine::EngineError;
use crate::engine::native::cuda::attention::SplitSpace;
use crate::engine::native::cuda::device::Device;
use crate::engine::native::cuda::device_matrix::{KernelFormat, Matrix};
use crate::engine::native::cuda::kernels::DeviceTensor;
use crate::engine::native::cuda::step::Scratch;
use crate::engine::native::cuda::tensor_core_linear::{self, TiledWorkspace};

/// A piece of memory that kernels need beside weights and activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Prepared,
    /// Weights in bf16.
    Widened,
    Rounded,
    Projected,
    /// Sums that are normed before they are added; zeros between operations.
    ToNorm,
    HeadsArrived,
    Partial,
    Statistics,
    SplitsArrived,
    Best,
    LogitsArrived,
    Next,
    ExpertWork,
    ExpertParts,
    RoutersArrived,
    ExpertsMet,
    TilesMet,
}

/// All of them, by their number.
#[derive(Debug)]
pub(super) struct Workspace<D: Device>([Scratch<D>; Part::TilesMet as usize + 1]);

impl<D: Device> Default for Workspace<D> {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Scratch::default()))
    }
}

impl<D: Device> Workspace<D> {
    /// 0 where there is none yet.
    pub(super) fn address(&self, part: Part) -> u64 {
        self.0[part as usize].address()
    }

    pub(super) fn memory(&self, part: Part) -> Option<&D::Memory> {
        self.0[part as usize].memory()
    }

    pub(super) fn forget(&mut self, part: Part) {
        self.0[part as usize] = Scratch::default();
    }
}

/// Rows of a buffer that the operation which wrote it has also left as a product on tensor cores takes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rounded {
    pub(super) buffer: u64,
    pub(super) rows: usize,
    pub(super) format: KernelFormat,
}

impl<D: Device> CudaOperations<D> {
    /// Room for a product on tensor cores, where there are enough rows for one.
    pub(super) fn tiled_workspace(
        &mut self,
        rows: usize,
        weights: &Matrix<D>,
    ) -> Result<Option<TiledWorkspace>, EngineError> {
        let widens = weights.format.is_of_ggml();
        let least = if widens { self.tuning.min_widened_rows } else { self.tuning.min_library_rows };
        let by_library = rows >= least && (widens || tensor_core_linear::library_has(weights.format));
        if rows < self.tuning.min_tiled_rows || !by_library && !tensor_core_linear::fits(weights.format) {
            return Ok(None);
        }
        self.grow(Part::Prepared, tensor_core_linear::prepared_bytes(weights, rows), &[])?;
        if widens {
            self.grow(Part::Widened, weights.widened_bytes(), &[])?;
        }
        let [prepared, widened] = [Part::Prepared, Part::Widened].map(|part| self.workspace.address(part));
        Ok(Some(TiledWorkspace { prepared, ready: false, by_library, widened }))
    }

    /// Room for the product of a router on tensor cores, of bf16 only: with f16 weights they round the inputs too, which could change the largest logits.
    pub(super) fn router_workspace(
        &mut self,
        rows: usize,
        router: &Matrix<D>,
    ) -> Result<Option<TiledWorkspace>, EngineError> {
        if router.format != KernelFormat::Bf16 {
            return Ok(None);
        }
        // All ranks must choose the same experts, and the library picks the order of a sum by what was fastest on each of them.
        let own = self.ranks > 1;
        let workspace = self.tiled_workspace(rows, router)?;
        Ok(workspace.map(|space| TiledWorkspace { by_library: space.by_library && !own, ..space }))
    }

    /// Room for rows of a buffer in 16 bits, for the product that follows; 0 where it does not take such rows.
    pub(super) fn round_for_next(
        &mut self,
        buffer: &DeviceTensor<D>,
        rows: usize,
        format: KernelFormat,
    ) -> Result<u64, EngineError> {
        let plain = matches!(format, KernelFormat::Bf16 | KernelFormat::F16)
            && buffer.width.is_multiple_of(format.columns());
        if rows < self.tuning.min_tiled_rows || !plain {
            return Ok(0);
        }
        self.grow(Part::Rounded, 2 * rows * buffer.width, &[])?;
        self.rounded = Some(Rounded { buffer: D::address(&buffer.memory), rows, format });
        Ok(self.workspace.address(Part::Rounded))
    }

    /// Room for sums that a kernel behind the product finishes.
    pub(super) fn sums_workspace(&mut self, rows: usize, outputs: usize) -> Result<u64, EngineError> {
        self.grow(Part::Projected, 4 * rows * outputs, &[])?;
        Ok(self.workspace.address(Part::Projected))
    }

    /// Room for so many parts of attention, and words at which those who have them meet.
    pub(super) fn splits_workspace(
        &mut self,
        parts: usize,
        head_dim: usize,
        words: usize,
    ) -> Result<(), EngineError> {
        self.grow(Part::Partial, 4 * parts * head_dim, &[])?;
        self.grow(Part::Statistics, 8 * parts, &[])?;
        self.grow(Part::SplitsArrived, 4 * words, &[0])
    }

    /// The room that there is for parts of attention.
    pub(super) fn split_space(&self) -> SplitSpace {
        let [partial, statistics, arrived] =
            [Part::Partial, Part::Statistics, Part::SplitsArrived].map(|part| self.workspace.address(part));
        SplitSpace { partial, statistics, arrived }
    }

    /// Room for sums that are normed before they are added to the hidden states. They are zeros between steps.
    pub(super) fn sums_to_norm(&mut self, rows: usize, width: usize) -> Result<u64, EngineError> {
        self.grow(Part::ToNorm, 4 * rows * width, &[0])?;
        Ok(self.workspace.address(Part::ToNorm))
    }

    /// Makes room in one part of the workspace. What was recorded points to the room that was there before.
    pub(super) fn grow(&mut self, part: Part, bytes: usize, fill: &[u8]) -> Result<(), EngineError> {
        let grown = self.workspace.0[part as usize].grow(&mut self.device, bytes, fill);
        if !matches!(grown, Ok(false)) {
            self.known.clear();
        }
        grown.map(drop)
    }
}
