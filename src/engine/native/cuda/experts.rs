//! The experts of a layer as typed launches: shapes are checked, and the bytes are counted that are known before rows were routed.
//!
//! Enters: rows, the matrices of all experts, perhaps the experts that a script picks. Leaves: launches of `experts.cu`, whose grids have blocks for
//! every choice that rows can make. Which experts are met is on the device alone, and so is how often each is read ([`ExpertPlan`]).

use Argument::{Address, F32};

use super::device::{Argument, Device, KernelLaunch, MAX_GRID_YZ};
use super::device_matrix::{KernelFormat, Matrix};
use super::kernels::{
    BLOCKS_PER_MULTIPROCESSOR, DeviceTensor, THREADS, Tuning, WARPS, enqueue, gate_arguments,
    launch_mismatch, rows_at_once, size, staged_inputs, stream, word,
};
use super::operations::CudaOperations;
use super::step::Scratch;
use super::tensor_core_linear::{self, Prepare, RowParts, TiledWorkspace};
use crate::engine::EngineError;
use crate::engine::native::checks::{MAX_EXPERTS, MAX_EXPERTS_PER_TOKEN};
use crate::engine::native::operations::{ExpertMlp, ExpertWeights};
use crate::engine::native::shapes::{ExpertScores, ExpertShape};

/// Layers whose tiles are counted apart, at least.
pub const COUNTED_LAYERS: usize = 1024;

/// Where the matrices of the experts of a layer lie: the shared one's first, then the routed ones'.
#[derive(Debug)]
pub struct ExpertTable<D: Device> {
    gate_up: D::Memory,
    down: D::Memory,
}

impl<D: Device> ExpertTable<D> {
    /// The table of a layer.
    pub fn new(
        device: &mut D,
        routed: &[ExpertMlp<CudaOperations<D>>],
        shared: Option<&ExpertMlp<CudaOperations<D>>>,
    ) -> Result<Self, EngineError> {
        let formats = |expert: &ExpertMlp<CudaOperations<D>>| [expert.gate_up.format, expert.down.format];
        let first = routed.first().map(formats);
        // Rows are prepared once for both products; those of ggml's formats are not prepared at all.
        let both =
            first.is_some_and(|[gate_up, down]| gate_up == down || gate_up.is_of_ggml() && down.is_of_ggml());
        let alike = both && routed.iter().chain(shared).all(|own| Some(formats(own)) == first);
        if routed.len() > MAX_EXPERTS || !alike {
            let what = format!("{} experts, of one format: {alike}", routed.len());
            return launch_mismatch(device, "experts", what);
        }
        let mut table = |matrix: fn(&ExpertMlp<CudaOperations<D>>) -> &Matrix<D>| {
            let none = shared.is_none().then_some([0; 4]);
            let all = shared.into_iter().chain(routed).map(matrix);
            let entries = all.map(|matrix| {
                let [scales, bias] =
                    [&matrix.scales, &matrix.bias].map(|memory| memory.as_ref().map_or(0, D::address));
                [D::address(&matrix.data), scales, bias, u64::from(matrix.shift)]
            });
            let bytes: Vec<u8> =
                none.into_iter().chain(entries).flatten().flat_map(u64::to_le_bytes).collect();
            let memory = device.allocate(bytes.len())?;
            device.upload(&memory, 0, &bytes)?;
            Ok::<_, EngineError>(memory)
        };
        Ok(Self { gate_up: table(|expert| &expert.gate_up)?, down: table(|expert| &expert.down)? })
    }
}

/// The experts that a script picks for the steps to come, on the device.
#[derive(Debug)]
pub struct DeviceScript<D: Device> {
    memory: Scratch<D>,
    there: Vec<u32>,
    bytes: Vec<u8>,
    is_set: bool,
    /// Those that layers have taken of the current step.
    taken: usize,
}

impl<D: Device> Default for DeviceScript<D> {
    fn default() -> Self {
        Self { memory: Scratch::default(), there: Vec::new(), bytes: Vec::new(), is_set: false, taken: 0 }
    }
}

impl<D: Device> DeviceScript<D> {
    /// Takes the experts of the next step to the device, or none. Says whether they have moved there.
    pub fn set(&mut self, device: &mut D, chosen: Option<&[u32]>) -> Result<bool, EngineError> {
        (self.is_set, self.taken) = (chosen.is_some(), 0);
        let Some(chosen) = chosen else { return Ok(false) };
        let moved = self.memory.grow(device, 4 * chosen.len(), &[])?;
        if moved {
            self.there.clear();
        }
        if self.there != chosen
            && let Some(memory) = self.memory.memory()
        {
            self.bytes.clear();
            self.bytes.extend(chosen.iter().flat_map(|expert| expert.to_le_bytes()));
            device.upload(memory, 0, &self.bytes)?;
            chosen.clone_into(&mut self.there);
        }
        Ok(moved)
    }

    /// Whether a script picks.
    pub fn is_set(&self) -> bool {
        self.is_set
    }

    /// Where the next layer's experts lie, so many.
    pub fn take(&mut self, choices: usize) -> u64 {
        let at = self.memory.address() + 4 * self.taken as u64;
        self.taken += choices;
        at
    }
}

/// How rows meet experts: tiles of so many rows of one expert, each of which reads its weights once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertPlan {
    rows: usize,
    tile_rows: usize,
    on_tensor_cores: bool,
    /// Those of the shared expert, and the most that routed ones can make.
    shared_tiles: usize,
    routed_tiles: usize,
}

impl ExpertPlan {
    /// The plan of so many rows, on a device whose blocks can have so much shared memory.
    pub fn new(
        shared_bytes: usize,
        rows: usize,
        shape: &ExpertShape,
        format: KernelFormat,
        tuning: Tuning,
    ) -> Self {
        let average = (rows * shape.per_row).div_ceil(shape.count);
        let tile = (rows >= tuning.min_tiled_rows)
            // Twice the average, or a few rows whoever they meet.
            .then(|| tensor_core_linear::expert_tile_rows(format, rows.min(2 * average), shared_bytes))
            .flatten();
        let tile_rows = tile.unwrap_or_else(|| rows_at_once(format, rows));
        let choices = rows * shape.per_row;
        let met = shape.count.min(choices);
        let routed_tiles =
            (met + (choices - met) / tile_rows).min(shape.count * rows.div_ceil(tile_rows)).max(1);
        let shared_tiles = if shape.shared_width > 0 { rows.div_ceil(tile_rows) } else { 0 };
        Self { rows, tile_rows, on_tensor_cores: tile.is_some(), shared_tiles, routed_tiles }
    }

    /// Bytes of what routing leaves (`experts.cu`).
    pub fn work_bytes(&self, shape: &ExpertShape) -> usize {
        let words = (self.rows * (4 * shape.per_row + 2)).next_multiple_of(4);
        4 * (4 + words) + 16 * self.routed_tiles
    }

    /// Words that count blocks of the router.
    pub fn arrivals(&self) -> usize {
        1 + self.rows
    }

    /// Bytes of the prepared inputs of the experts.
    pub fn prepared_bytes<D: Device>(&self, experts: &ExpertWeights<CudaOperations<D>>) -> usize {
        if !self.on_tensor_cores {
            return 0;
        }
        let of = tensor_core_linear::prepared_bytes::<D>;
        let [first, ..] = experts.routed.as_slice() else { return 0 };
        let shared = experts.shared.as_ref().map_or(0, |shared| of(&shared.down, self.rows));
        of(&first.gate_up, self.rows).max(of(&first.down, self.rows * experts.shape.per_row) + shared)
    }

    /// Blocks along y and z.
    fn grid(&self) -> [u32; 2] {
        let tiles = self.shared_tiles + self.routed_tiles;
        let layers = tiles.div_ceil(MAX_GRID_YZ).max(1);
        [word(tiles.div_ceil(layers)), word(layers)]
    }

    /// What every kernel of experts takes.
    fn arguments<D: Device>(&self, table: &D::Memory, work: u64, shape: &ExpertShape) -> Vec<Argument> {
        let sizes =
            [self.rows, shape.per_row, shape.width, shape.shared_width, self.shared_tiles, self.tile_rows];
        [Address(D::address(table)), Address(work)].into_iter().chain(sizes.map(size)).collect()
    }

    /// Enqueues a streaming product of all tiles: matrices of so many pairs of outputs, rows of so many vectors at the most.
    fn stream<D: Device>(
        &self,
        device: &mut D,
        operation: &str,
        format: KernelFormat,
        (pairs, vectors): (usize, usize),
        tuning: Tuning,
        mut arguments: Vec<Argument>,
    ) -> Result<(), EngineError> {
        let (chunk, shared_bytes) = staged_inputs(format, vectors, self.tile_rows, tuning);
        arguments.push(size(chunk));
        let blocks = device.multiprocessors() as usize * BLOCKS_PER_MULTIPROCESSOR;
        let of_tile = blocks.div_ceil(self.shared_tiles + self.routed_tiles).min(pairs);
        let [y, z] = self.grid();
        device.launch(&KernelLaunch {
            kernel: format!("{operation}_{}_m{}", format.name(), self.tile_rows),
            grid: [word(of_tile), y, z],
            threads: THREADS,
            shared_bytes,
            arguments,
        })
    }
}

/// The experts of each row, and the tiles that they make.
#[derive(Debug)]
pub struct Route<'a, D: Device> {
    pub plan: ExpertPlan,
    pub hidden: &'a DeviceTensor<D>,
    pub norm: (&'a DeviceTensor<D>, f32),
    pub experts: &'a ExpertWeights<CudaOperations<D>>,
    /// Picked by a script; 0 where the router picks.
    pub scripted: u64,
    /// A word: rows without padding.
    pub real_rows: u64,
    /// `[rows, experts]` f32, and one more for the gate of the shared one.
    pub logits: u64,
    pub work: u64,
    /// Zeros before the first launch.
    pub arrived: u64,
    /// Different experts so far, 8 bytes, and the tiles of this layer, 4.
    pub met: u64,
    pub tiles_met: u64,
    /// Room for the router's product on tensor cores; `None` streams.
    pub workspace: Option<TiledWorkspace>,
}

impl<D: Device> Route<'_, D> {
    /// Enqueues it; bytes of the router and the norm.
    pub fn launch(&self, device: &mut D, tuning: Tuning) -> Result<u64, EngineError> {
        let Self { plan, hidden, norm: (norm, eps), experts, workspace, .. } = self;
        let (router, shape, rows) = (&experts.router, &experts.shape, self.plan.rows);
        let outputs = shape.count + usize::from(shape.shared_gate);
        if (hidden.width, norm.width, outputs) != (router.columns, router.columns, router.outputs)
            || hidden.rows < rows
            || !(1..=MAX_EXPERTS_PER_TOKEN.min(shape.count)).contains(&shape.per_row)
        {
            let what = format!(
                "{rows} rows of {} to {} of {outputs}, {} × {}",
                hidden.width, shape.per_row, router.outputs, router.columns
            );
            return launch_mismatch(device, "experts_router", what);
        }
        let bias = experts.router_bias.as_ref();
        let routing = [
            Address(self.logits),
            Address(self.scripted),
            Address(bias.map_or(0, |bias| D::address(&bias.memory))),
            Address(self.real_rows),
            Address(self.work),
            Address(self.arrived),
            Address(self.met),
            Address(self.tiles_met),
            size(shape.count),
            size(usize::from(shape.shared_gate)),
            size(usize::from(shape.scores == ExpertScores::Sigmoid)),
            size(shape.groups.count),
            size(shape.groups.chosen),
            size(usize::from(shape.renormalised)),
            F32(shape.scale),
            size(plan.tile_rows),
            size(shape.per_row),
        ];
        let of_vectors = 4 * (norm.width + bias.map_or(0, |bias| bias.width)) as u64;
        let Some(workspace) = *workspace else {
            let mut arguments = vec![
                Address(D::address(&hidden.memory)),
                Address(D::address(&norm.memory)),
                F32(*eps),
                Address(D::address(&router.data)),
            ];
            arguments.extend(routing);
            return Ok(stream(device, "experts_router", router, rows, tuning, arguments)? + of_vectors);
        };
        let input = D::address(&hidden.memory);
        let inputs = Prepare { rows, input, row_of: 0, norm: Some((norm, *eps)), parts: None };
        let ours = || vec![Address(self.logits)];
        let bytes = inputs.multiply(device, "head", router, workspace, self.logits, ours)?;
        device.launch(&KernelLaunch {
            kernel: "experts_choose".into(),
            grid: [word(rows.div_ceil(WARPS)), 1, 1],
            threads: THREADS,
            shared_bytes: word(4 * WARPS * shape.count),
            arguments: routing.into_iter().chain([size(rows)]).collect(),
        })?;
        Ok(bytes + of_vectors)
    }
}

/// `inner[row][i] = gate(G · norm(hidden) + b) ∘ (U · norm(hidden) + b)` of each row's experts and the shared one.
#[derive(Debug)]
pub struct ExpertGateUp<'a, D: Device> {
    pub plan: ExpertPlan,
    pub hidden: &'a DeviceTensor<D>,
    pub norm: (&'a DeviceTensor<D>, f32),
    pub experts: &'a ExpertWeights<CudaOperations<D>>,
    pub work: u64,
    pub inner: &'a DeviceTensor<D>,
    /// Room for the prepared rows, and whether the router left them there.
    pub prepared: u64,
    pub is_prepared: bool,
}

impl<D: Device> ExpertGateUp<'_, D> {
    /// Enqueues it; bytes of the shared expert.
    pub fn launch(&self, device: &mut D, tuning: Tuning) -> Result<u64, EngineError> {
        let Self { plan, hidden, norm: (norm, eps), experts, work, inner, prepared, is_prepared } = self;
        let (shape, weights) = (&experts.shape, &experts.routed[0].gate_up);
        let shared = experts.shared.as_ref().map(|shared| &shared.gate_up);
        let shared_fits = shared.map_or(shape.shared_width == 0, |shared| {
            (shared.outputs, shared.columns) == (2 * shape.shared_width, hidden.width)
        });
        let widths = (hidden.width, norm.width, 2 * shape.width, inner.width);
        if widths != (weights.columns, weights.columns, weights.outputs, shape.inner_width())
            || !shared_fits
            || hidden.rows.min(inner.rows) < plan.rows
        {
            let what = format!(
                "{} rows of {} to {}, {} × {}",
                plan.rows, hidden.width, inner.width, weights.outputs, weights.columns
            );
            return launch_mismatch(device, "experts_gate_up", what);
        }
        let input = D::address(&hidden.memory);
        let out = Address(D::address(&inner.memory));
        let of_experts = plan.arguments::<D>(&experts.table.gate_up, *work, shape);
        if plan.on_tensor_cores {
            if !is_prepared {
                Prepare { rows: plan.rows, input, row_of: 0, norm: Some((norm, *eps)), parts: None }
                    .launch(device, weights, *prepared)?;
            }
            let mut arguments = vec![Address(*prepared), out];
            arguments.extend(of_experts);
            arguments.push(size(weights.vectors));
            arguments.extend(gate_arguments(shape.gate));
            let outputs = 2 * shape.width.max(shape.shared_width);
            let tile = (plan.tile_rows, plan.grid());
            tensor_core_linear::multiply_experts(
                device,
                "gate_up",
                weights.format,
                tile,
                outputs,
                arguments,
            )?;
        } else {
            let mut arguments = vec![Address(input), Address(D::address(&norm.memory)), F32(*eps), out];
            arguments.extend(of_experts);
            arguments.extend([weights.columns, weights.vectors].map(size));
            arguments.extend(gate_arguments(shape.gate));
            let pairs = shape.width.max(shape.shared_width);
            let sizes = (pairs, weights.vectors);
            plan.stream(device, "experts_gate_up", weights.format, sizes, tuning, arguments)?;
        }
        Ok(shared.map_or(0, |shared| plan.shared_tiles as u64 * shared.bytes()))
    }
}

/// `hidden += Σ share · (down · inner[row][i] + b)` over each row's experts and the shared one.
#[derive(Debug)]
pub struct ExpertDown<'a, D: Device> {
    pub plan: ExpertPlan,
    pub inner: &'a DeviceTensor<D>,
    pub experts: &'a ExpertWeights<CudaOperations<D>>,
    pub work: u64,
    pub real_rows: u64,
    /// `[rows · per row + rows, width]` f32.
    pub parts: u64,
    pub hidden: &'a DeviceTensor<D>,
    /// What the sums are added to: the hidden states, or a rank's part of a sum of their shape.
    pub into: u64,
    /// Room for the prepared rows.
    pub prepared: u64,
}

impl<D: Device> ExpertDown<'_, D> {
    /// Enqueues it; bytes of the shared expert.
    pub fn launch(&self, device: &mut D, tuning: Tuning) -> Result<u64, EngineError> {
        let Self { plan, inner, experts, work, real_rows, parts, hidden, into, prepared } = self;
        let (shape, weights) = (&experts.shape, &experts.routed[0].down);
        let shared = experts.shared.as_ref().map(|shared| &shared.down);
        let shared_fits = shared.map_or(shape.shared_width == 0, |shared| {
            (shared.outputs, shared.columns) == (hidden.width, shape.shared_width)
        });
        let widths = (inner.width, shape.width, hidden.width);
        if widths != (shape.inner_width(), weights.columns, weights.outputs)
            || !shared_fits
            || inner.rows.min(hidden.rows) < plan.rows
        {
            let what = format!(
                "{} rows of {} to {}, {} × {}",
                plan.rows, inner.width, hidden.width, weights.outputs, weights.columns
            );
            return launch_mismatch(device, "experts_down", what);
        }
        let input = D::address(&inner.memory);
        let of_experts = plan.arguments::<D>(&experts.table.down, *work, shape);
        let shared_vectors = shared.map_or(0, |shared| shared.vectors);
        let sizes = [weights.outputs, weights.vectors, shared_vectors].map(size);
        if plan.on_tensor_cores {
            let choices = plan.rows * shape.per_row;
            Prepare {
                rows: choices,
                input,
                row_of: 0,
                norm: None,
                parts: Some(RowParts { count: shape.per_row, apart: weights.columns, stride: inner.width }),
            }
            .launch(device, weights, *prepared)?;
            let behind = *prepared + tensor_core_linear::prepared_bytes(weights, choices) as u64;
            if let Some(shared) = shared {
                let input = input + 4 * (shape.per_row * shape.width) as u64;
                let parts = Some(RowParts { count: 1, apart: shared.columns, stride: inner.width });
                Prepare { rows: plan.rows, input, row_of: 0, norm: None, parts }
                    .launch(device, shared, behind)?;
            }
            let mut arguments = vec![Address(*prepared), Address(behind), Address(*parts)];
            arguments.extend(of_experts);
            arguments.extend(sizes);
            let tile = (plan.tile_rows, plan.grid());
            let outputs = weights.outputs;
            tensor_core_linear::multiply_experts(device, "down", weights.format, tile, outputs, arguments)?;
        } else {
            let mut arguments = vec![Address(input), Address(*parts)];
            arguments.extend(of_experts);
            arguments.extend(sizes);
            let sizes = (weights.outputs.div_ceil(2), weights.vectors.max(shared_vectors));
            plan.stream(device, "experts_down", weights.format, sizes, tuning, arguments)?;
        }
        let arguments = vec![
            Address(*parts),
            Address(*into),
            Address(*work),
            Address(*real_rows),
            size(plan.rows),
            size(shape.per_row),
            size(usize::from(shared.is_some())),
            size(hidden.width),
        ];
        let grid = [word(plan.rows), word(hidden.width.div_ceil(THREADS as usize)), 1];
        enqueue(device, "experts_combine", grid, arguments)?;
        Ok(shared.map_or(0, |shared| plan.shared_tiles as u64 * shared.bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::native::shapes::{ExpertGroups, Gate};

    #[test]
    fn a_tile_has_all_of_few_rows_or_twice_the_average_of_many() {
        let shape = ExpertShape {
            count: 128,
            per_row: 8,
            width: 768,
            shared_width: 512,
            shared_gate: true,
            gate: Gate::Silu,
            scores: ExpertScores::Softmax,
            groups: ExpertGroups::ONE,
            renormalised: true,
            scale: 1.0,
        };
        let plan = |format, rows| {
            let plan = ExpertPlan::new(227 << 10, rows, &shape, format, Tuning::default());
            (plan.tile_rows, plan.shared_tiles, plan.routed_tiles)
        };
        let bf16 = [1, 4, 5, 16, 100, 4096].map(|rows| plan(KernelFormat::Bf16, rows));
        // The most tiles: every choice meets an expert of its own, and what is left makes whole ones.
        let wanted = [(1, 1, 8), (4, 1, 32), (16, 1, 40), (16, 1, 128), (16, 7, 170), (128, 32, 383)];
        assert_eq!(bf16, wanted);
        assert_eq!([2, 5].map(|rows| plan(KernelFormat::F32, rows)), [(2, 1, 16), (4, 2, 40)]);
        assert_eq!([2, 3].map(|rows| plan(KernelFormat::Fp8, rows)), [(2, 1, 16), (2, 2, 24)]);
    }
}
